import dataclasses
import math
import re
import sys

import pytest
import torch
from zerotuning import CalibrationResult, ModelId, ZeroTuningConfig
from zerotuning.calibration import CurvePoint
from zerotuning.metrics import Scores
from zerotuning.plots import plot_config, plot_curve, plot_profile
from zerotuning.profiling import HeadProfile

MODEL = ModelId("llama", "", 3, 4, 2)
DELTAS = {"head_index": 4, "layer": 3, "layer_head": 12}


def profile(granularity="layer_head", **changes):
    count = DELTAS[granularity]
    made = HeadProfile(
        granularity=granularity,
        shape=(3, 4),
        layers=(0, 1, 2),
        method="exhaustive",
        metric="accuracy",
        gamma_probe=2.0,
        baseline=0.5,
        deltas=tuple(0.1 * (index - 2) for index in range(count)),
        p_values=(0.5,) * count,
        tolerance="example",
        items=100,
    )
    return dataclasses.replace(made, **changes)


def result(labelled=True):
    counts = {0.5: (6, 2), 1.0: (5, 4), 2.0: (4, 6)}
    curve = [
        CurvePoint(
            gamma,
            0.5,
            Scores.of([0, 1] * 5, [0] * a + [1] * b + [-1] * (10 - a - b), [0] * 10) if labelled else None,
            (a, b),
            entropy=3.0 / gamma,
            label_entropy=0.5 * gamma,
        )
        for gamma, (a, b) in counts.items()
    ]
    config = ZeroTuningConfig.uniform(MODEL, 2.0, meta={"calibration": {"examples": 10}})
    return CalibrationResult(
        config=config,
        gamma=2.0,
        curve=tuple(curve),
        mode="supervised" if labelled else "unsupervised",
        metric="accuracy" if labelled else "entropy",
        profile=None,
        warnings=(),
    )


@pytest.fixture
def axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


def image(axes):
    [found] = axes.get_images()
    return torch.tensor(found.get_array().filled(math.nan))


@pytest.mark.parametrize(("granularity", "shape"), [("layer_head", (3, 4)), ("head_index", (1, 4)), ("layer", (3, 1))])
def test_a_profile_is_a_map_of_its_units(axes, granularity, shape):
    made = profile(granularity)
    plot_profile(made, axes)
    cells = image(axes)
    assert tuple(cells.shape) == shape
    assert cells.flatten().tolist() == pytest.approx(made.deltas)
    low, high = axes.get_images()[0].get_clim()
    assert low == -high == -max(map(abs, made.deltas))
    # Each dot is on a unit beyond the tolerance, at (head, layer).
    dots = {(int(row), int(column)) for column, row in axes.collections[0].get_offsets()}
    assert dots == {(row, column) for row in range(shape[0]) for column in range(shape[1]) if cells[row, column]}


def test_layers_that_were_not_profiled_are_empty(axes):
    made = profile(layers=(0, 2), deltas=(0.1,) * 8, p_values=(0.5,) * 8)
    plot_profile(made, axes)
    cells = image(axes)
    assert bool(cells[1].isnan().all())
    assert not bool(cells[[0, 2]].isnan().any())


def test_a_profile_says_what_it_is_of(axes):
    made = profile(metric="entropy", method="gradient", tolerance="sign_test")
    plot_profile(made, axes)
    for words in ("entropy (nats)", "gamma 2", "untouched 0.500", "by gradient"):
        assert words in axes.get_title()


def test_a_configuration_is_a_map_of_log_gamma(axes):
    config = ZeroTuningConfig.per_layer_head(MODEL, {(0, 1): 2.0, (2, 3): 0.25})
    plot_config(config, axes)
    assert torch.equal(image(axes), config.log_gamma)


def test_the_curve_has_the_four_numbers(axes):
    made = result()
    made.plot(axes)
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.5", "1", "2"]
    numbers = {line.get_label(): line.get_ydata().tolist() for line in axes.lines if len(line.get_ydata()) == 3}
    assert numbers["accuracy over all items"] == [point.scores.accuracy.value for point in made.curve]
    assert numbers["answers that parse"] == [0.8, 0.9, 1.0]
    assert len(axes.collections) == len(numbers) == 4
    # The band of the accuracy reaches from end to end of its intervals.
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    ends = [end for point in made.curve for end in point.scores.accuracy.interval]
    assert (band.min(), band.max()) == pytest.approx((min(ends), max(ends)))


def test_without_labels_the_curve_has_the_entropies(axes):
    made = result(labelled=False)
    plot_curve(made.to_json(), axes)
    assert axes.lines[0].get_ydata().tolist() == [6.0, 3.0, 1.5]
    # What was minimised comes first.
    again = axes.figure.add_subplot()
    plot_curve(dataclasses.replace(made, metric="label_entropy"), again)
    assert again.lines[0].get_ydata().tolist() == [0.25, 0.5, 1.0]


def test_how_answers_spread_over_labels(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = {}

    def bar(self, left, heights, width, bottom, label, **rest):
        drawn[label] = (list(bottom), heights)
        return original(self, left, heights, width, bottom=bottom, label=label, **rest)

    original = Axes.bar
    monkeypatch.setattr(Axes, "bar", bar)
    plot_curve(result(), tmp_path / "c.png", labels=["no", "yes"])
    assert drawn == {
        "no": ([0, 0, 0], [6, 5, 4]),
        "yes": ([6, 5, 4], [2, 4, 6]),
        "did not parse": ([8, 9, 10], [2, 1, 0]),
    }
    drawn.clear()
    # Without labels it is the metadata that tell how many items there were.
    plot_curve(result(labelled=False), tmp_path / "c.png")
    assert drawn["did not parse"][1] == [2, 1, 0]
    assert "label 0" in drawn


def test_files_are_pictures_and_the_same_each_time(tmp_path):
    had_pyplot = "matplotlib.pyplot" in sys.modules
    first, second = (tmp_path / name for name in ("a.svg", "b.SVG"))
    plot_profile(profile(), first)
    profile().plot(second)
    assert first.read_bytes() == second.read_bytes()
    assert re.search(rb"<svg[^>]*>", first.read_bytes())
    plot_config(ZeroTuningConfig.uniform(MODEL, 2.0), str(tmp_path / "c.png"))
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 3
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_what_is_refused(tmp_path, monkeypatch):
    for wrong in ({"gamma": -1.0, "curve": [{"gamma": 1.0}]}, {"gamma": 1.0, "curve": [{"gamma": 0.0}]}):
        with pytest.raises(ValueError, match=r"no curve of a calibration .*a gamma is not a finite number above 0"):
            plot_curve(wrong, tmp_path / "c.png")
    with pytest.raises(ValueError, match=r"c\.pdf must end in \.png or \.svg"):
        plot_curve(result(), tmp_path / "c.pdf")
    for wrong in ({"gamma": 1.0}, {"gamma": 1.0, "curve": []}, {"gamma": 1.0, "curve": [{"gamma": 1.0}]}):
        with pytest.raises(ValueError, match="holds no curve"):
            plot_curve(wrong, tmp_path / "c.png")
    with pytest.raises(FileNotFoundError):
        plot_curve(result(), tmp_path / "no" / "c.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'zerotuning\[plot\]'"):
        plot_curve(result(), tmp_path / "c.png")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_moved_into_place_leaves_nothing(tmp_path, monkeypatch):
    from pathlib import Path

    def fail(*_):
        raise OSError("disk is gone")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk is gone"):
        plot_config(ZeroTuningConfig.uniform(MODEL, 2.0), tmp_path / "c.svg")
    assert list(tmp_path.iterdir()) == []
