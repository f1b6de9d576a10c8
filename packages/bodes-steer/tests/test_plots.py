import re
import sys

import pytest
import torch
from bodes_steer.plots import plot_layers, plot_pareto, plot_pca, plot_trajectory
from bodes_steer.solver import Trajectory
from bodes_steer.sweeps import Table

ROWS = (
    {"layer": 1, "method": "none", "T": 0.0, "score": 0.1, "ppl": 9.0},
    {"layer": 1, "method": "caa", "T": 2.0, "score": 0.4, "ppl": 10.0},
    {"layer": 1, "method": "caa", "T": 1.0, "score": 0.2, "ppl": 9.5},
    {"layer": 1, "method": "ode", "T": 3.0, "score": 0.3, "ppl": 11.0},
)
TABLE = Table("methods", ROWS, "score", "ppl")
LAYERS = Table(
    "layers",
    tuple({"layer": i, "linear_accuracy": 0.5 + i / 10, "caa_accuracy": 0.6, "caa_length": 0.1} for i in (1, 2, 4)),
    "linear_accuracy",
    "caa_length",
)


@pytest.fixture
def axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


def path(ratios=True):
    """Two rows, of which one goes straight and the other turns by 90 degrees at each step."""
    states = torch.tensor([[[0.0, 0], [0, 0]], [[1, 0], [0, 1]], [[2, 0], [1, 1]], [[3, 0], [1, 0]]])
    times = torch.tensor([0.0, 1, 2, 3])
    return Trajectory(
        states, times, torch.tensor([[-1.0, -3], [0, -2], [1, -1], [2, 0]]) if ratios else None, torch.zeros(2)
    )


def lines(axes):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def test_gain_against_cost(axes):
    plot_pareto(TABLE, axes)
    drawn = lines(axes)
    assert drawn["none"] == [(9.0, 0.1)]
    # In order of strength, not of the rows.
    assert drawn["caa"] == [(9.5, 0.2), (10.0, 0.4)]
    assert drawn["not beaten in both"] == [(9.0, 0.1), (9.5, 0.2), (10.0, 0.4)]
    assert {each.get_text() for each in axes.texts} == {"1", "2", "3"}
    several = Table("methods", (*ROWS, {**ROWS[1], "layer": 2}), "score", "ppl")
    again = axes.figure.add_subplot()
    plot_pareto(several, again, gain="ppl", cost="score")
    assert lines(again)["caa, layer 2"] == [(0.4, 10.0)]
    with pytest.raises(ValueError, match="there is no column 'x'"):
        plot_pareto(TABLE, axes, gain="x")


def test_layers(axes):
    plot_layers(LAYERS, axes)
    assert lines(axes)["linear accuracy"] == [(1, 0.6), (2, 0.7), (4, 0.9)]
    assert "caa length" not in lines(axes)
    # A number that could not be had.
    part = Table("layers", ({**LAYERS.rows[0], "linear_accuracy": None}, *LAYERS.rows[1:]), "caa_accuracy", "layer")
    plot_layers(part, again := axes.figure.add_subplot())
    assert lines(again)["linear accuracy"] == [(2, 0.7), (4, 0.9)]
    assert len(lines(again)["caa accuracy"]) == 3
    with pytest.raises(ValueError, match="must be one that sweep_layers made"):
        plot_layers(TABLE, axes)


def test_path(axes):
    plot_trajectory(path(), axes)
    [line] = axes.lines
    assert line.get_ydata().tolist() == [-2, -1, 0, 1]
    plot_trajectory(path(ratios=False), again := axes.figure.add_subplot())
    [line] = again.lines
    # The medians of 0 and of 0, 90 and 180 degrees, after the first, second and third step.
    assert line.get_xdata().tolist() == [1, 2, 3]
    assert line.get_ydata().tolist() == pytest.approx([0, 45, 90])


def test_plane_of_the_classes(axes):
    pos, neg = torch.tensor([[3.0, 0, 1], [5, 0.1, 1]]), torch.tensor([[-3.0, 0, 1], [-5, -0.1, 1]])
    plot_pca(pos, neg, axes, moved=[(neg, neg + torch.tensor([2.0, 0, 7]))])
    # The positive class is on the right, whatever the sign of the component.
    negative, positive = (collection.get_offsets() for collection in axes.collections[:2])
    assert positive[:, 0].min() > 0 > negative[:, 0].max()
    arrows = axes.collections[2]
    assert arrows.U.tolist() == pytest.approx([2.0, 2.0], rel=1e-3)
    assert arrows.V.tolist() == pytest.approx([0.0, 0.0], abs=0.1)
    for wrong in ((pos, neg[:, :2]), (pos[:1], neg[:0]), (pos[:, :1], neg[:, :1])):
        with pytest.raises(ValueError, match="must be at least two rows of one width"):
            plot_pca(*wrong, axes)


def test_few_arrows_of_many_rows(axes):
    rows = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    plot_pca(rows, rows - 1, axes, moved=[(rows, rows + 1)], arrows=7)
    assert len(axes.collections[2].U) == 7


def test_files_are_pictures_and_the_same_each_time(tmp_path):
    had_pyplot = "matplotlib.pyplot" in sys.modules
    first, second = (tmp_path / name for name in ("a.svg", "b.SVG"))
    plot_trajectory(path(), first)
    plot_trajectory(path(), second)
    assert first.read_bytes() == second.read_bytes()
    assert re.search(rb"<svg[^>]*>", first.read_bytes())
    plot_layers(LAYERS, str(tmp_path / "c.png"))
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 3
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_what_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"c\.pdf must end in \.png or \.svg"):
        plot_pareto(TABLE, tmp_path / "c.pdf")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        plot_pareto(TABLE, tmp_path / "no" / "c.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'bodes-steer\[plot\]'"):
        plot_pareto(TABLE, tmp_path / "c.png")
    assert list(tmp_path.iterdir()) == []
