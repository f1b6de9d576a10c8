"""Pictures of profiles, calibrations and configurations; needs the extra `plot` (matplotlib).

Drawn without pyplot, so nothing global changes and no display is needed. The same contents give the same file, byte for
byte, with the same matplotlib.
"""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from separata_kit.pictures import draw_on, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from zerotuning.calibration import CalibrationResult
    from zerotuning.config import ZeroTuningConfig
    from zerotuning.profiling import HeadProfile

_HOW: Mapping[str, Any] = {"name": "zerotuning", "extra": "zerotuning[plot]"}

_NUMBERS = {
    "accuracy": "accuracy over all items",
    "parse_rate": "answers that parse",
    "accuracy_parsed": "accuracy among parsed",
    "constrained_accuracy": "label-constrained accuracy",
}
# Where a legend covers nothing.
_BESIDE: Mapping[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
_ENTROPIES = {"entropy": "entropy over\nthe vocabulary (nats)", "label_entropy": "entropy over\nthe label words (nats)"}


def plot_profile(profile: "HeadProfile", target: "str | os.PathLike[str] | Axes") -> None:
    """Draw a head profile as a heat map.

    Red units raise the metric when scaled by the probe, blue ones lower it, those with a dot beyond the tolerance.
    There is one row for each layer and one column for each query head; one row if the profile is by head index, one
    column if it is by layer.

    Args:
        profile: The profile.
        target: A file that ends in `.png` or `.svg`, or axes to draw into.

    Raises:
        ValueError: The file's ending is another one.
        ImportError: The extra `plot` is not installed.
        OSError: The file cannot be written.
    """
    layers, heads = profile.shape
    rows = 1 if profile.granularity == "head_index" else layers
    columns = 1 if profile.granularity == "layer" else heads
    values = [[math.nan] * columns for _ in range(rows)]
    marked = []
    for unit, delta in zip(profile.units, profile.deltas, strict=True):
        if isinstance(unit, tuple):
            row, column = unit
        else:
            row, column = (0, unit) if profile.granularity == "head_index" else (unit, 0)
        values[row][column] = delta
        if profile.kind(unit) != "neutral":
            marked.append((row, column))
    name = profile.metric.replace("_", " ")
    if profile.metric in _ENTROPIES:
        name = f"{name} (nats), sign turned"
    title = f"change of {name}\nat gamma {profile.gamma_probe:g}; untouched {profile.baseline:.3f}"
    if profile.method == "gradient":
        title += "; by gradient"

    def draw(axes: "Axes") -> None:
        _heat_map(axes, values, title)
        axes.scatter(
            [column for _, column in marked], [row for row, _ in marked], s=9, c="black", label="beyond the tolerance"
        )
        if rows == 1:
            axes.set_yticks([0], ["all layers" if len(profile.layers) == layers else f"{len(profile.layers)} layers"])
        if columns == 1:
            axes.set_xticks([0], ["all heads"])

    draw_on(target, draw, size=_map_size(rows, columns), **_HOW)


def plot_config(config: "ZeroTuningConfig", target: "str | os.PathLike[str] | Axes") -> None:
    """Draw the factors of a configuration as a heat map of layers and query heads.

    Args:
        config: The configuration.
        target: A file that ends in `.png` or `.svg`, or axes to draw into.

    Raises:
        ValueError: The file's ending is another one.
        ImportError: The extra `plot` is not installed.
        OSError: The file cannot be written.
    """
    values = config.log_gamma.tolist()
    title = f"log gamma, mode {config.mode}"

    def draw(axes: "Axes") -> None:
        _heat_map(axes, values, title)

    draw_on(target, draw, size=_map_size(config.model_id.layers, config.model_id.query_heads), **_HOW)


def plot_curve(
    result: "CalibrationResult | Mapping[str, Any]",
    target: "str | os.PathLike[str] | Axes",
    labels: Sequence[str] | None = None,
) -> None:
    """Draw what a calibration found along gamma.

    Panels above each other: the four numbers with their 95 % intervals (where the data were labelled), the two mean
    entropies (without labels the one that was minimised first), and how many answers gave each label. A line marks the
    chosen gamma.

    Args:
        result: The result, or its `to_json()`.
        target: A file that ends in `.png` or `.svg`, or axes to draw the first of these panels into.
        labels: Label words; numbers if not given. The JSON form may carry them as `labels`, and the number of items as
            `examples`.

    Raises:
        ValueError: The file's ending is another one, or `result` holds no curve.
        ImportError: The extra `plot` is not installed.
        OSError: The file cannot be written.
    """
    if isinstance(result, Mapping):
        body = result
    else:
        body = {**result.to_json(), "examples": result.config.meta.get("calibration", {}).get("examples")}
    if labels is None:
        labels = body.get("labels")
    try:
        gamma = float(body["gamma"])
        points = sorted(body["curve"], key=lambda point: float(point["gamma"]))
        if not all(0 < each < math.inf for each in (gamma, *(float(point["gamma"]) for point in points))):
            raise ValueError("a gamma is not a finite number above 0")  # noqa: TRY301  # told like all that is wrong
        panels = [_entropy_panel(points, name) for name in _ENTROPIES]
        if body.get("metric") == "label_entropy":
            panels.reverse()
        if "accuracy" in points[0]:
            panels.insert(0, _number_panel(points))
        panels.append(_label_panel(points, labels, body.get("examples")))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"result holds no curve of a calibration ({type(error).__name__}: {error})") from None
    gammas = [float(point["gamma"]) for point in points]

    def on_axis(axes: "Axes") -> None:
        axes.set_xscale("log")
        axes.set_xticks(gammas, [f"{each:g}" for each in gammas], rotation=90, fontsize="small")
        axes.set_xticks([], minor=True)
        axes.axvline(gamma, color="black", linewidth=1, linestyle=":")
        axes.set_xlabel(f"gamma (chosen: {gamma:g})")

    def draw_first(axes: "Axes") -> None:
        panels[0](axes)
        on_axis(axes)

    def draw(figure: "Figure") -> None:
        every = figure.subplots(len(panels), 1, sharex=True)
        for axes, panel in zip(every, panels, strict=True):
            panel(axes)
            on_axis(axes)
            axes.label_outer()

    if isinstance(target, str | os.PathLike):
        save_picture(target, draw, size=(9, 2.2 * len(panels) + 0.4), **_HOW)
    else:
        draw_first(target)


def _number_panel(points: Sequence[Mapping[str, Any]]) -> "Callable[[Axes], None]":
    gammas = [float(point["gamma"]) for point in points]
    lines = []
    for name, words in _NUMBERS.items():
        # Among no parsed answers there is no accuracy.
        values = [math.nan if point[name]["value"] is None else float(point[name]["value"]) for point in points]
        ends = [[float(end) for end in point[name]["interval95"]] for point in points]
        lines.append((words, values, [low for low, _ in ends], [high for _, high in ends]))

    def draw(axes: "Axes") -> None:
        for words, values, low, high in lines:
            [line] = axes.plot(gammas, values, marker="o", markersize=3, label=words)
            axes.fill_between(gammas, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set_ylabel("share of items")
        axes.legend(fontsize="x-small", **_BESIDE)

    return draw


def _entropy_panel(points: Sequence[Mapping[str, Any]], name: str) -> "Callable[[Axes], None]":
    gammas = [float(point["gamma"]) for point in points]
    values = [float(point[name]) for point in points]

    def draw(axes: "Axes") -> None:
        axes.plot(gammas, values, marker="o", markersize=3)
        axes.set_ylabel(_ENTROPIES[name])

    return draw


def _label_panel(
    points: Sequence[Mapping[str, Any]], labels: Sequence[str] | None, items: int | None
) -> "Callable[[Axes], None]":
    gammas = [float(point["gamma"]) for point in points]
    counts = [[int(count) for count in point["label_counts"]] for point in points]
    names = [f"label {index}" for index in range(len(counts[0]))] if labels is None else [str(each) for each in labels]
    bars = [(name, [each[index] for each in counts]) for index, name in enumerate(names)]
    if items is None and "accuracy" in points[0]:
        items = int(points[0]["accuracy"]["total"])
    if items is not None:
        bars.append(("did not parse", [items - sum(each) for each in counts]))
    # As wide as the closest two points allow, and as wide to the eye everywhere on the logarithmic axis.
    nearest = min((b / a for a, b in itertools.pairwise(gammas)), default=2.0)
    half = nearest**0.4
    left, width = [gamma / half for gamma in gammas], [gamma * half - gamma / half for gamma in gammas]

    def draw(axes: "Axes") -> None:
        below = [0] * len(gammas)
        for index, (name, heights) in enumerate(bars):
            colour = "lightgrey" if name == "did not parse" else f"C{index % 10}"
            axes.bar(left, heights, width, bottom=below, align="edge", label=name, color=colour)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        axes.set_ylabel("answers")
        axes.legend(fontsize="x-small", **_BESIDE)

    return draw


def _heat_map(axes: "Axes", values: Sequence[Sequence[float]], title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    largest = max((abs(each) for row in values for each in row if not math.isnan(each)), default=0.0) or 1.0
    image = axes.imshow(
        values, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto", origin="lower", interpolation="nearest"
    )
    axes.set_facecolor("lightgrey")
    axes.figure.colorbar(image, ax=axes)
    axes.set_xlabel("query head")
    axes.set_ylabel("layer")
    axes.set_title(title, fontsize="medium")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))


def _map_size(rows: int, columns: int) -> tuple[float, float]:
    """Inches that give each cell of a heat map some room."""
    return min(14.0, 3.6 + 0.28 * columns), min(14.0, 1.8 + 0.22 * rows)
