"""Results in words and tables, for people."""

from zerotuning.calibration import CalibrationResult
from zerotuning.evaluation import Evaluation
from zerotuning.metrics import PairedComparison, Proportion
from zerotuning.profiling import Unit

# Pairs that are named; there may be hundreds.
_FEW = 8


def heads_of(result: CalibrationResult) -> list[int]:
    """The head indices that a calibration scales.

    Args:
        result: What calibration found.

    Returns:
        Head indices, sorted; empty if nothing is scaled.
    """
    return [int(head) for head in (result.config.log_gamma != 0).any(dim=0).nonzero().flatten()]


def describe_choice(result: CalibrationResult) -> str:
    """Say in one line what calibration chose.

    Args:
        result: What calibration found.

    Returns:
        One line.
    """
    if result.config.is_identity:
        if any("is kept" in each for each in result.warnings):
            return "calibration kept gamma 1: the lowest entropy cannot be trusted"
        if any("nothing is scaled" in each for each in result.warnings):
            return "calibration chose gamma 1: no unit of heads matters beyond the tolerance"
        return "calibration chose gamma 1: no factor was better than the untouched model"
    config, profile = result.config, result.profile
    identity = config.model_id
    which, kinds = _units(result), ""
    if profile is not None:
        kinds = (
            f" ({', '.join(sorted({profile.kind(unit) for unit in scaled_units(result)}))}-effective in the profile)"
        )
    if profile is not None and profile.granularity != "head_index":
        return f"calibration chose gamma {result.gamma:g} on {which}{kinds}"
    where = "every layer" if len(config.layers) == identity.layers else f"{len(config.layers)} layers"
    return f"calibration chose gamma {result.gamma:g} on {which}{kinds} of {where}"


def scaled_units(result: CalibrationResult) -> list[Unit]:
    """The units of the profile that a calibration scales; without a profile, head indices.

    Args:
        result: What calibration found.

    Returns:
        Units, sorted; empty if nothing is scaled.
    """
    touched = result.config.log_gamma != 0
    granularity = "head_index" if result.profile is None else result.profile.granularity
    if granularity == "layer_head":
        return [(layer, head) for layer, head in touched.nonzero().tolist()]
    return [int(index) for index in touched.any(dim=1 if granularity == "layer" else 0).nonzero().flatten()]


def _units(result: CalibrationResult) -> str:
    units = scaled_units(result)
    granularity = "head_index" if result.profile is None else result.profile.granularity
    if granularity == "layer":
        return f"all heads of layer {', '.join(map(str, units))}"
    if granularity == "layer_head":
        some = ", ".join(f"{layer}.{head}" for layer, head in units[:_FEW])  # type: ignore[misc]  # pairs here
        return f"{len(units)} pairs of layer and head ({some}{', ...' if len(units) > _FEW else ''})"
    if len(units) == result.config.model_id.query_heads:
        return "all heads"
    return f"head {', '.join(map(str, units))}"


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
