"""Pictures of detection power: ROC curves, histograms of z, power against length; extra `plot` (matplotlib).

Drawn without pyplot, so nothing global changes and no display is needed.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64
from separata_kit.pictures import draw_on

from pmark.metrics import scores_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Scores = Sequence[float] | np.ndarray
_SIZE = (6.5, 4.2)


def roc(positive: _Scores, negative: _Scores) -> tuple[Float64[np.ndarray, " points"], Float64[np.ndarray, " points"]]:
    """Return false- and true-positive rates of every threshold, from (0, 0) to (1, 1); ties move both at once.

    Raises:
        ValueError: A list is empty or holds NaN.
    """
    marked, unmarked = scores_of("positive", positive), scores_of("negative", negative)
    # A score counts as detected from its own value on, so the first threshold lies above all of them.
    thresholds = np.concatenate([[np.inf], np.unique(np.concatenate([marked, unmarked]))[::-1]])
    rates = [
        1 - np.searchsorted(np.sort(values), thresholds, side="left") / len(values) for values in (unmarked, marked)
    ]
    return rates[0], rates[1]


def plot_roc(curves: Mapping[str, tuple[_Scores, _Scores]], target: "str | os.PathLike[str] | Axes") -> None:
    """Draw ROC curves over a logarithmic false-positive rate, as far down as the negatives resolve.

    Args:
        curves: Scores of marked and of unmarked texts by name.
        target: A file that ends in `.png` or `.svg`, or axes to draw into.

    Raises:
        ValueError: There is no curve, a list of scores is empty or holds NaN, or the file's ending is another one.
        ImportError: The extra `plot` is not installed.
        OSError: The file cannot be written.
    """
    _refuse_nothing("curves", curves)
    points = {name: roc(*scores) for name, scores in curves.items()}
    lowest = min(1 / len(unmarked) for _, unmarked in curves.values())

    def draw(axes: "Axes") -> None:
        for name, (false, true) in points.items():
            axes.step(np.maximum(false, lowest / 2), true, where="post", label=name)
        axes.plot(*[np.geomspace(lowest / 2, 1, 50)] * 2, color="grey", linewidth=1, linestyle=":", label="guessing")
        axes.set_xscale("log")
        axes.set_xlim(lowest / 2, 1)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("false-positive rate")
        axes.set_ylabel("true-positive rate")
        axes.legend(fontsize="small")

    draw_on(target, draw, size=_SIZE, name="pmark", extra="pmark[plot]")


def plot_histogram(
    groups: Mapping[str, _Scores], target: "str | os.PathLike[str] | Axes", *, threshold: float | None = None
) -> None:
    """Draw densities of z on common bins, beside the standard normal law of a nominal null.

    Args:
        groups: z of the texts of each group.
        target: A file that ends in `.png` or `.svg`, or axes to draw into.
        threshold: Decision threshold to mark.

    Raises:
        ValueError: There is no group, a group is empty or not finite, or the file's ending is another one.
        ImportError: The extra `plot` is not installed.
        OSError: The file cannot be written.
    """
    _refuse_nothing("groups", groups)
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in groups.items()}
    for name, values in arrays.items():
        if not len(values) or not np.isfinite(values).all():
            raise ValueError(f"groups[{name!r}] must hold at least one z and only finite ones")
    every = np.concatenate(list(arrays.values()))
    edges = np.linspace(min(every.min(), -3.0), max(every.max(), 3.0), 41)

    def draw(axes: "Axes") -> None:
        for name, values in arrays.items():
            axes.hist(values, bins=edges.tolist(), density=True, alpha=0.45, label=f"{name} ({len(values)})")
        grid = np.linspace(edges[0], edges[-1], 200)
        axes.plot(grid, np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi), color="grey", linewidth=1, label="N(0, 1)")
        if threshold is not None:
            axes.axvline(threshold, color="black", linewidth=1, linestyle=":", label=f"threshold {threshold:.2f}")
        axes.set_xlabel("z")
        axes.set_ylabel("density")
        axes.legend(fontsize="small")

    draw_on(target, draw, size=_SIZE, name="pmark", extra="pmark[plot]")


def plot_power(
    curves: Mapping[str, Sequence[tuple[int, float, float, float]]],
    target: "str | os.PathLike[str] | Axes",
    *,
    label: str = "TPR at 1 % FPR",
) -> None:
    """Draw detection power against the number of sentences.

    Args:
        curves: For each name points `(sentences, value, low, high)`.
        target: A file that ends in `.png` or `.svg`, or axes to draw into.
        label: What the value is.

    Raises:
        ValueError: There is no curve, or the file's ending is another one.
        ImportError: The extra `plot` is not installed.
        OSError: The file cannot be written.
    """
    _refuse_nothing("curves", curves)

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        for name, points in curves.items():
            numbers, values, low, high = zip(*sorted(points), strict=True)
            [line] = axes.plot(numbers, values, marker="o", markersize=3, label=name)
            axes.fill_between(numbers, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set_ylim(-0.02, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("generated sentences")
        axes.set_ylabel(label)
        axes.legend(fontsize="small")

    draw_on(target, draw, size=_SIZE, name="pmark", extra="pmark[plot]")


def _refuse_nothing(argument: str, given: Mapping[str, object]) -> None:
    if not given:
        raise ValueError(f"{argument} is empty: there is nothing to draw")
