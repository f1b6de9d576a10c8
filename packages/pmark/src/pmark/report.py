"""Results in words and tables, for people."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

if TYPE_CHECKING:
    from pmark.demo import DemoResult

MARKED, UNMARKED, WRONG_KEYS = "marked", "unmarked", "marked, wrong keys"
"""The conditions of the demo besides the attack."""

_Counts = Float64[np.ndarray, "sentences channels"]

_LEVEL = 0.05


def detection_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What detection found, a line for each text.

    Args:
        results: `DetectionResult.to_json()` of the texts, each with the text's `id`.

    Returns:
        Lines of text.
    """
    width = max(4, *(len(str(row["id"])) for row in results))
    lines = [f"{'text':<{width}}  sentences  {'z':>7}  {'p':>8}  {'calibrated':>10}  verdict"]
    for row in results:
        verdict = "watermarked" if row["is_watermarked"] else "not shown"
        note = row["reason"] or ("few sentences" if row["low_power"] else "")
        lines.append(
            f"{row['id']!s:<{width}}  {row['num_sentences']:>9}  {row['z']:>7.2f}  {row['p_value']:>8.2g}  "
            f"{row['p_calibrated']:>10.2g}  {verdict}{f' ({note})' if note else ''}"
        )
    marked = sum(row["is_watermarked"] for row in results)
    return [*lines, "", f"{marked} of {len(results)} texts are watermarked"]


def power_by_length(
    marked: Sequence[_Counts], unmarked: Sequence[_Counts], *, fpr: float = 0.01, seed: int = 0
) -> list[tuple[int, float, float, float]]:
    """How the share of marked texts that are found grows with their number of sentences.

    Args:
        marked: Counts of marked texts; NaN where a sentence can carry no evidence.
        unmarked: Those of unmarked texts; at each length they set the threshold.
        fpr: Share of them that may lie above it.
        seed: Of the bootstrap over texts.

    Returns:
        For each length that all texts have: sentences, rate, and its 95 % interval.

    Raises:
        ValueError: There is no text of a kind, or one without a sentence.
    """
    from pmark.metrics import bootstrap, tpr_at_fpr

    # No evidence is as good as a toss of a coin.
    kinds = [[np.nan_to_num(each, nan=0.5) for each in kind] for kind in (marked, unmarked)]
    longest = min((len(counts) for kind in kinds for counts in kind), default=0)
    if not marked or not unmarked or not longest:
        raise ValueError("power needs marked and unmarked texts of at least one sentence each")
    points = []
    for length in range(1, longest + 1):
        found, null = ([float(counts[:length].mean()) for counts in kind] for kind in kinds)
        points.append((length, *bootstrap(lambda a, b: tpr_at_fpr(a, b, fpr), found, null, seed=seed)))
    return points


def demo_report(result: "DemoResult") -> str:
    """The demo's result for people.

    Args:
        result: What `run_demo` found.

    Returns:
        Several lines of text.
    """
    from scipy import stats  # type: ignore[import-untyped]  # scipy ships no types

    settings, conditions = result.settings, result.conditions
    lines = [
        f"{settings['prompts']} prompts continued by up to {settings['sentences']} sentences; {settings['samples']} "
        f"candidates for each, {settings['channels']} channels (seed {settings['seed']}), {result.seconds:.0f} s",
        "",
        f"a marked text: {result.example}",
        "",
        f"{'detection with medians from the model':<40}{'z, mean +- its standard error':<32}found at p = 0.05",
    ]
    lines += [
        f"{name:<40}{f'{each.mean:+.2f} +- {each.standard_error:.2f}':<32}{each.found} of {each.tests}"
        for name, each in conditions.items()
    ]
    ratios = np.array(result.log_perplexity)
    p_value = float(stats.ttest_1samp(ratios, 0.0).pvalue)
    return "\n".join(
        [
            *lines,
            "(z and p compare a text with what it would give under other bits)",
            "",
            f"log perplexity, marked less unmarked: {ratios.mean():+.3f} +- {standard_error(ratios):.3f} "
            f"({'no difference shown, ' if not p_value < _LEVEL else ''}p = {p_value:.2g})",
            verdict(result),
            f"marked texts: {result.texts}",
        ]
    )


def verdict(result: "DemoResult") -> str:
    """Say honestly whether the mark shows, and whether what should not carry it is quiet.

    Args:
        result: What `run_demo` found.

    Returns:
        One line.
    """
    from scipy import stats

    marked = result.conditions[MARKED].z
    parts = []
    for name in (UNMARKED, WRONG_KEYS):
        other = result.conditions[name].z
        p_value = float(stats.ttest_ind(marked, other, equal_var=False, alternative="greater").pvalue)
        shown = "above" if p_value < _LEVEL else "not shown to be above"
        parts.append(f"{shown} {name} by {np.mean(marked) - np.mean(other):+.2f} (p = {p_value:.2g})")
    return f"z of marked texts is {' and '.join(parts)}."


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Standard error of a mean.

    Args:
        values: At least two.

    Returns:
        The sample's standard deviation over the root of its size.
    """
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))
