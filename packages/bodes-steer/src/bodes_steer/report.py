"""Results in words and tables, for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bodes_steer.demo import DemoResult
    from bodes_steer.metrics import PairedBootstrap

PLAIN, MEANS, ONE_STEP, TEN_STEPS, REVERSED = "untouched", "CAA", "one step", "ten steps", "ten steps, reversed"
"""The conditions of the demo."""

# An interval that excludes 0 and a p-value below this go together but for the resampling.
_LEVEL = 0.05


def verdict(comparison: "PairedBootstrap") -> str:
    """Say honestly whether a score changed.

    Args:
        comparison: Before and after.

    Returns:
        `"raised"`, `"lowered"` or `"no difference shown"`.
    """
    if comparison.p_value >= _LEVEL:
        return "no difference shown"
    return "raised" if comparison.difference > 0 else "lowered"


def difference(comparison: "PairedBootstrap") -> str:
    """A difference with its uncertainty.

    Args:
        comparison: Before and after.

    Returns:
        Such as `"+0.210 [+0.100, +0.320], p = 0.0004"`.
    """
    low, high = comparison.interval
    return f"{comparison.difference:+.3f} [{low:+.3f}, {high:+.3f}], p = {comparison.p_value:.2g}"


def demo_report(result: "DemoResult") -> str:
    """The demo's result for people.

    Args:
        result: What `run_demo` found.

    Returns:
        Several lines of text.
    """
    model, probe = result.model, result.probe
    texts = len(next(iter(result.texts.values())).scores)
    lines = [
        f"{model.model_name or model.model_type}: output of block {result.layer} of {model.num_layers} "
        f"(d = {model.hidden_size}), {result.dtype}",
        f"texts: {result.source}; fitted on {result.fitted_on}, tested on {result.tested_on} others "
        f"(seed {result.seed}), {result.seconds:.0f} s",
        "",
        f"held-out accuracy: {probe.sketch_accuracy:.3f} on sketch features, {probe.linear_accuracy:.3f} linear on raw "
        "activations",
        f"median log ratio of held-out negatives {probe.before:+.3f}, after ten steps {probe.after:+.3f} (positives "
        f"{probe.of_positives:+.3f})",
        f"every condition moves by {result.T:.1f}: {result.T / probe.norm:.0%} of the median activation norm "
        f"{probe.norm:.0f}",
        "",
        f"{texts} sampled continuations of {texts // result.samples} neutral prompts; score: compound of the VADER "
        "lexicon, -1 to 1",
        f"{'':<22}{'score':>7}{'perplexity':>12}{'dist-2':>8}   against untouched, paired by prompt (95 % interval)",
    ]
    for name, written in result.texts.items():
        against = "" if name == PLAIN else difference(result.against_plain[name])
        numbers = f"{written.mean:>7.3f}{written.perplexity.value:>12.2f}{written.distinct[2]:>8.3f}"
        lines.append(f"{name:<22}{numbers}   {against}".rstrip())
    lines += ["", *verdict_lines(result), "", f"steerer: {result.file}"]
    return "\n".join(lines)


def verdict_lines(result: "DemoResult") -> list[str]:
    """Say whether steering worked, and whether many steps beat one direction.

    Args:
        result: What `run_demo` found.

    Returns:
        Lines of text.
    """
    up, down = (verdict(result.against_plain[name]) for name in (TEN_STEPS, REVERSED))
    worked = [up == "raised", down == "lowered"]
    if all(worked):
        first = "Steering works both ways: ten steps raised the score, and lowered it reversed."
    elif any(worked):
        first = f"Steering worked one way only: forwards {up}, reversed {down}."
    else:
        first = f"Steering did not work here: forwards {up}, reversed {down}."
    lines = [first]
    for comparison, other in ((result.against_caa, MEANS), (result.against_one_step, ONE_STEP)):
        word = {"raised": "better", "lowered": "worse"}.get(verdict(comparison), "no difference shown")
        lines.append(f"Ten steps against {other} of the same length: {word}, {difference(comparison)}.")
    probe = result.probe
    if verdict(result.against_caa) != "raised":
        lines.append(
            f"The field is {'nearly constant' if probe.first_and_last > 0.95 else 'not constant'} here: cosine "
            f"{probe.field_and_caa:.3f} with CAA's direction, {probe.first_and_last:.3f} between first and last step."
        )
    return lines


def table_lines(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Rows in columns.

    Args:
        header: Names of the columns.
        rows: As many cells in each; numbers with four digits.

    Returns:
        Lines of text.
    """
    cells = [list(header), *([_cell(each) for each in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
