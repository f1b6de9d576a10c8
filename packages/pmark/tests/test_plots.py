import numpy as np
import pytest
from pmark.plots import plot_histogram, plot_power, plot_roc, roc

pytest.importorskip("matplotlib", reason="needs the extra 'plot'")


@pytest.fixture
def axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


def legend(axes):
    return [each.get_text() for each in axes.get_legend().get_texts()]


def test_roc_passes_every_threshold_and_moves_both_rates_at_ties():
    false, true = roc([3.0, 2.0, 2.0], [2.0, 0.0])
    np.testing.assert_allclose(false, [0, 0, 0.5, 1])
    np.testing.assert_allclose(true, [0, 1 / 3, 1, 1])
    with pytest.raises(ValueError, match="negative must be a list of at least one score"):
        roc([1.0], [])
    with pytest.raises(ValueError, match="positive must be a list of at least one score without NaN"):
        roc([np.nan], [1.0])


def test_roc_curves_reach_down_to_what_the_negatives_resolve(axes):
    plot_roc({"clean": ([5.0, 6.0], [0.0] * 10), "attacked": ([1.0, -1.0], [0.0] * 20)}, axes)
    assert legend(axes) == ["clean", "attacked", "guessing"]
    np.testing.assert_allclose(axes.get_xlim(), [1 / 40, 1])
    clean = axes.get_lines()[0]
    assert max(clean.get_ydata()[clean.get_xdata() <= 1 / 40]) == 1


def test_histograms_are_densities_on_common_bins(axes):
    plot_histogram({"human": [-1.0, 0.0, 0.5], "marked": [5.0, 6.0]}, axes, threshold=2.3)
    assert set(legend(axes)) == {"human (3)", "marked (2)", "N(0, 1)", "threshold 2.30"}
    areas = [sum(bar.get_height() * bar.get_width() for bar in bars) for bars in axes.containers]
    assert areas == pytest.approx([1, 1])


def test_power_is_drawn_in_the_order_of_lengths(axes):
    plot_power({"online": [(8, 0.9, 0.8, 1.0), (4, 0.5, 0.3, 0.7)]}, axes, label="AUC")
    [line] = axes.get_lines()
    assert list(line.get_xdata()) == [4, 8]
    assert list(line.get_ydata()) == [0.5, 0.9]
    assert axes.get_ylabel() == "AUC"


def test_a_file_is_the_same_each_time(tmp_path):
    for name in ("a.svg", "b.svg"):
        plot_histogram({"human": [0.0, 1.0]}, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda target: plot_roc({}, target), "curves is empty"),
        (lambda target: plot_power({}, target), "curves is empty"),
        (lambda target: plot_histogram({}, target), "groups is empty"),
        (lambda target: plot_histogram({"a": [np.nan]}, target), r"groups\['a'\] must hold"),
        (lambda target: plot_roc({"a": ([1.0], [0.0])}, "picture.pdf"), "must end in .png or .svg"),
    ],
)
def test_what_cannot_be_drawn_is_refused(axes, call, told):
    with pytest.raises(ValueError, match=told):
        call(axes)


def test_the_extra_is_named(tmp_path, block_imports):
    block_imports("matplotlib")
    with pytest.raises(ImportError, match=r"pip install 'pmark\[plot\]'"):
        plot_roc({"a": ([1.0], [0.0])}, tmp_path / "roc.png")
