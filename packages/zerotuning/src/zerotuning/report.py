"""Results in words and tables, for people."""

from zerotuning.calibration import CalibrationResult
from zerotuning.evaluation import Evaluation
from zerotuning.metrics import PairedComparison, Proportion


def heads_of(result: CalibrationResult) -> list[int]:
    """The head indices that a calibration scales.

    Args:
        result: What calibration found.

    Returns:
        Head indices, sorted; empty if nothing is scaled.
    """
    touched = result.config.log_gamma.abs().amax(dim=0)
    return [int(head) for head in touched.nonzero().flatten()]


def describe_choice(result: CalibrationResult) -> str:
    """Say in one line what calibration chose.

    Args:
        result: What calibration found.

    Returns:
        One line.
    """
    if result.config.is_identity:
        return "calibration chose gamma 1: no factor was better than the untouched model"
    heads = heads_of(result)
    everywhere = len(heads) == result.config.model_id.query_heads
    which = "all heads" if everywhere else f"head {', '.join(map(str, heads))}"
    kinds = ""
    if result.profile is not None:
        kinds = f" ({', '.join(sorted({result.profile.kind(head) for head in heads}))}-effective in the profile)"
    where = (
        "every layer"
        if len(result.config.layers) == result.config.model_id.layers
        else f"{len(result.config.layers)} layers"
    )
    return f"calibration chose gamma {result.gamma:g} on {which}{kinds} of {where}"


def comparison_table(evaluation: Evaluation) -> list[str]:
    """Vanilla beside tuned: the four numbers with their intervals, the paired tests, and what they amount to.

    Args:
        evaluation: The comparison.

    Returns:
        Lines of text.
    """
    vanilla, tuned = evaluation.vanilla, evaluation.tuned
    rows = [
        ("accuracy over all items", vanilla.accuracy, tuned.accuracy),
        ("answers that parse", vanilla.parse_rate, tuned.parse_rate),
        ("accuracy among parsed", vanilla.accuracy_parsed, tuned.accuracy_parsed),
        ("label-constrained accuracy", vanilla.constrained_accuracy, tuned.constrained_accuracy),
    ]
    lines = [f"{'(95 % interval)':<28}{'vanilla':<23}tuned"]
    lines += [f"{name:<28}{_share(before):<23}{_share(after)}" for name, before, after in rows]
    lines += [
        "",
        f"paired, accuracy over all:  {_paired(evaluation.accuracy)}",
        f"paired, label-constrained:  {_paired(evaluation.constrained_accuracy)}",
        verdict_line(evaluation),
    ]
    return lines


def verdict_line(evaluation: Evaluation) -> str:
    """Say honestly whether it helped.

    Args:
        evaluation: The comparison.

    Returns:
        One line.
    """
    paired = evaluation.accuracy
    if evaluation.verdict == "no difference shown":
        return (
            f"No difference shown: accuracy {paired.difference:+.3f}, p = {paired.p_value:.2g} on {paired.total} items."
        )
    line = f"It {evaluation.verdict}: accuracy {paired.difference:+.3f} over all items (p = {paired.p_value:.2g})."
    format_only = evaluation.constrained_accuracy.p_value >= 0.05
    if evaluation.verdict == "helped" and format_only:
        line += " Mostly by format: between the label words alone no difference is shown."
    return line


def _share(proportion: Proportion) -> str:
    low, high = proportion.interval
    return f"{proportion.value:.3f} [{low:.3f}, {high:.3f}]"


def _paired(comparison: PairedComparison) -> str:
    low, high = comparison.interval
    return (
        f"{comparison.difference:+.3f} [{low:+.3f}, {high:+.3f}], {comparison.gained} gained, {comparison.lost} lost, "
        f"McNemar p = {comparison.p_value:.2g}"
    )
