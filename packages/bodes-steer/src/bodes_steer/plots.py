"""Pictures of sweeps and of paths through activation space; needs the extra `plot` (matplotlib).

Drawn without pyplot, so nothing global changes and no display is needed. The same contents give the same file, byte for
byte, with the same matplotlib.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from separata_kit.pictures import draw_on, save_picture

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from bodes_steer.solver import Trajectory
    from bodes_steer.sweeps import Table

_HOW: Mapping[str, Any] = {"name": "bodes-steer", "extra": "bodes-steer[plot]"}
# Where a legend covers nothing.
_BESIDE: Mapping[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "fontsize": "x-small"}


def plot_pareto(
    table: "Table", target: "str | os.PathLike[str] | Axes", *, gain: str | None = None, cost: str | None = None
) -> None:
    """Draw what steering gains against what it costs.

    One line for each method and layer, in order of strength, with the strengths beside the points; a dotted line joins
    the points that no other one beats in both.

    Args:
        table: A sweep.
        target: A file that ends in `.png` or `.svg`, or axes to draw into.
        gain: The column that is to be high; that of the table if not given.
        cost: The column that is to be low; that of the table if not given.

    Raises:
        ValueError: The table lacks a column, or the file's ending is another one.
        ImportError: The extra `plot` is not installed.
        OSError: The file cannot be written.
    """
    gain, cost = gain or table.gain, cost or table.cost
    front = table.pareto(gain=gain, cost=cost)
    if not front:
        raise ValueError(f"no row of the table has both {gain} and {cost}")
    lines: dict[str, list[tuple[float, float, float]]] = {}
    several = len({row["layer"] for row in table.rows if row["method"] != "none"}) > 1
    for row in table.known(gain, cost):
        name = f"{row['method']}, layer {row['layer']}" if several and row["method"] != "none" else str(row["method"])
        lines.setdefault(name, []).append((float(row["T"]), float(row[cost]), float(row[gain])))

    def draw(axes: "Axes") -> None:
        for index, (name, points) in enumerate(lines.items()):
            points.sort()
            costs, gains = [each[1] for each in points], [each[2] for each in points]
            axes.plot(
                costs, gains, marker="*" if name == "none" else "o", markersize=4, label=name, color=f"C{index % 10}"
            )
            if name != "none":
                for strength, x, y in points:
                    axes.annotate(
                        f"{strength:.3g}", (x, y), fontsize="x-small", xytext=(3, 3), textcoords="offset points"
                    )
        best = sorted((float(row[cost]), float(row[gain])) for row in front)
        axes.plot(*zip(*best, strict=True), color="black", linewidth=1, linestyle=":", label="not beaten in both")
        axes.set_xlabel(f"{cost} (lower is better)")
        axes.set_ylabel(f"{gain} (higher is better)")
        axes.legend(**_BESIDE)

    draw_on(target, draw, size=(8, 4.5), **_HOW)


def plot_layers(table: "Table", target: "str | os.PathLike[str] | Axes") -> None:
    """Draw how well each layer tells the classes apart.

    Args:
        table: What `sweep_layers` found.
        target: A file that ends in `.png` or `.svg`, or axes to draw into.

    Raises:
        ValueError: The table is another one, or the file's ending is.
        ImportError: The extra `plot` is not installed.
        OSError: The file cannot be written.
    """
    names = [name for name in table.columns if name.endswith("accuracy")]
    names = [name for name in names if table.known(name)]
    if table.of != "layers" or not names:
        raise ValueError("the table holds no accuracy by layer; it must be one that sweep_layers made")

    def draw(axes: "Axes") -> None:
        for name in names:
            known = [(int(row["layer"]), float(row[name])) for row in table.known(name)]
            axes.plot(*zip(*known, strict=True), marker="o", markersize=3, label=name.replace("_", " "))
        axes.axhline(0.5, color="grey", linewidth=1, linestyle=":")
        axes.set_xlabel("block whose output is read, counted from 0")
        axes.set_ylabel("share of held-out examples told right")
        axes.legend(**_BESIDE)

    draw_on(target, draw, size=(9, 4), **_HOW)


def plot_trajectory(trajectory: "Trajectory", target: "str | os.PathLike[str] | Axes") -> None:
    """Draw how the log-density ratio rises along the path, and how far the direction turns.

    The line is the median over the rows, the band reaches from the 10th to the 90th percentile.

    Args:
        trajectory: What `Steerer.trajectory` recorded.
        target: A file that ends in `.png` or `.svg` for both panels, or axes to draw the first one into: the ratio
            where the steerer has one, or else the angle.

    Raises:
        ValueError: The file's ending is another one.
        ImportError: The extra `plot` is not installed.
        OSError: The file cannot be written.
    """
    import torch

    times = [float(each) for each in trajectory.times]
    states = trajectory.states.detach().cpu().double()
    moves = states.diff(dim=0)
    turned = torch.rad2deg(_angles(moves, moves[:1]))
    panels: list[tuple[str, list[float], Tensor]] = []
    if trajectory.log_ratios is not None:
        panels.append(("log-density ratio h", times, trajectory.log_ratios.detach().cpu().double()))
    panels.append(("angle to the first\ndirection (degrees)", times[1:], turned))

    def panel(axes: "Axes", which: int) -> None:
        words, at, values = panels[which]
        low, middle, high = (values.quantile(share, dim=1).tolist() for share in (0.1, 0.5, 0.9))
        [line] = axes.plot(at, middle, marker="o", markersize=3)
        axes.fill_between(at, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set_ylabel(words)
        axes.set_xlabel("length of the path")

    def draw(figure: "Figure") -> None:
        for index, axes in enumerate(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]):
            panel(axes, index)
            axes.label_outer()

    if isinstance(target, str | os.PathLike):
        save_picture(target, draw, size=(7, 2.4 * len(panels) + 0.4), **_HOW)
    else:
        panel(target, 0)


def plot_pca(
    pos: "Float[Tensor, 'positives d']",
    neg: "Float[Tensor, 'negatives d']",
    target: "str | os.PathLike[str] | Axes",
    *,
    moved: "Sequence[tuple[Float[Tensor, 'rows d'], Float[Tensor, 'rows d']]]" = (),
    arrows: int = 40,
) -> None:
    """Draw both classes in the plane of their two first principal components, and where steering takes rows.

    Args:
        pos: Activations of the positive class.
        neg: Activations of the negative class.
        target: A file that ends in `.png` or `.svg`, or axes to draw into.
        moved: Pairs of rows before and after steering, such as negatives and `steerer.steer(negatives)`; an arrow each.
        arrows: At most so many arrows of each pair, evenly spread over the rows.

    Raises:
        ValueError: The classes differ in width, there are fewer than two rows or columns, or the file's ending is
            another one.
        ImportError: The extra `plot` is not installed.
        OSError: The file cannot be written.
    """
    import torch

    if pos.shape[1:] != neg.shape[1:] or len(pos) + len(neg) < 2 or pos.shape[1] < 2:
        raise ValueError(
            f"pos {tuple(pos.shape)} and neg {tuple(neg.shape)} must be at least two rows of one width >= 2"
        )
    rows = torch.cat([pos, neg]).detach().cpu().double()
    centre = rows.mean(0)
    _, _, axes_of = torch.linalg.svd(rows - centre, full_matrices=False)
    plane = axes_of[:2].T
    # The sign of a component is arbitrary: the positive class is to the right and above.
    plane = plane * torch.where(((pos.detach().cpu().double().mean(0) - centre) @ plane) < 0, -1.0, 1.0)

    def flat(values: "Tensor") -> "Tensor":
        flattened: Tensor = (values.detach().cpu().double() - centre) @ plane
        return flattened

    def draw(axes: "Axes") -> None:
        for values, name, colour in ((neg, "negative", "C3"), (pos, "positive", "C0")):
            x, y = flat(values).T.tolist()
            axes.scatter(x, y, s=8, alpha=0.5, color=colour, label=name, linewidths=0)
        for before, after in moved:
            chosen = torch.linspace(0, len(before) - 1, min(arrows, len(before))).round().long()
            start, end = flat(before[chosen]), flat(after[chosen])
            axes.quiver(*start.T.numpy(), *(end - start).T.numpy(), angles="xy", scale_units="xy", scale=1, width=0.002)
        axes.set_xlabel("first principal component")
        axes.set_ylabel("second principal component")
        axes.legend(**_BESIDE)

    draw_on(target, draw, size=(7.5, 5), **_HOW)


def _angles(a: "Tensor", b: "Tensor") -> "Tensor":
    """Angles between vectors, exact for small ones, where the arc cosine is not; 0 where one of them is 0."""
    import torch

    a, b = (torch.nn.functional.normalize(each, dim=-1, eps=1e-300) for each in (a, b))
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)) * ((a * a + b * b).sum(-1) > 1.5)
