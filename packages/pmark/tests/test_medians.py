from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pmark.medians import harrell_davis_weights, median

SAMPLES = st.lists(st.floats(-1, 1), min_size=1, max_size=20).map(np.array)
METHODS = st.sampled_from(["hd", "sample", "kde"])


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 3, 4], 2.5), ([0, 1, 10], 83 / 27), ([0, 0, 0, 1], 0.1265849976), ([1, 2, 4, 8, 16], 5.04032)],
)
def test_harrell_davis(values, expected):
    assert median(np.array(values, dtype=float)) == pytest.approx(expected, abs=1e-10)


def test_weights_are_masses_of_a_beta_distribution():
    x = (np.arange(64_000) + 0.5) / 64_000
    density = (x * (1 - x)) ** ((64 + 1) / 2 - 1)
    np.testing.assert_allclose(harrell_davis_weights(64), density.reshape(64, -1).sum(1) / density.sum(), atol=1e-8)


def test_kernel_estimate_on_a_grid():
    values = np.random.default_rng(0).gamma(2, size=64)
    spread = NormalDist(0, values.std(ddof=1) * 64 ** (-1 / 5))
    grid = np.linspace(values.min(), values.max(), 10_000)
    below = [sum(map(spread.cdf, x - values)) / 64 < 0.5 for x in grid[2800:4400]]
    assert below[0] > below[-1]
    assert median(values, "kde") == pytest.approx(grid[2800 + sum(below)], abs=2 * (grid[1] - grid[0]))


@settings(max_examples=50, deadline=None)
@given(SAMPLES, METHODS, st.floats(0.1, 5), st.floats(-2, 2), st.randoms())
def test_properties(values, method, factor, offset, random):
    found = float(median(values, method))
    assert values.min() - 1e-12 <= found <= values.max() + 1e-12
    shuffled = values.tolist()
    random.shuffle(shuffled)
    assert float(median(np.array(shuffled), method)) == pytest.approx(found, abs=1e-12)
    # Values closer together than rounding lose their order when they are moved.
    moved = np.round(values, 6) * factor + offset
    assert float(median(moved, method)) == pytest.approx(
        float(median(np.round(values, 6), method)) * factor + offset, abs=1e-9
    )


@settings(max_examples=20, deadline=None)
@given(METHODS)
def test_batched_is_single(method):
    values = np.random.default_rng(1).random((2, 3, 7)).astype(np.float32)
    values[0, 0] = 0.25
    batched = median(values, method)
    assert batched.shape == (2, 3)
    assert batched.dtype == np.float64
    assert batched[0, 0] == pytest.approx(0.25)
    for i in np.ndindex(2, 3):
        assert batched[i] == pytest.approx(float(median(values[i], method)), abs=1e-12)


def test_prior_is_zero():
    assert (median(np.ones((2, 5)), "prior") == np.zeros(2)).all()


def test_weights():
    for n in (1, 2, 33, 64, 500):
        weights = harrell_davis_weights(n)
        assert weights.sum() == pytest.approx(1)
        np.testing.assert_allclose(weights, weights[::-1], atol=1e-12)
    np.testing.assert_allclose(harrell_davis_weights(2), [0.5, 0.5])


def test_bad_arguments():
    with pytest.raises(ValueError, match="no value"):
        median(np.zeros((2, 0)))
    with pytest.raises(ValueError, match="n=0"):
        harrell_davis_weights(0)
