import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from zerotuning.metrics import UNPARSED, PairedComparison, Proportion, Scores, wilson_interval


@given(st.integers(1, 500).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_wilson_equals_scipy(counts):
    successes, total = counts
    expected = binomtest(successes, total).proportion_ci(method="wilson")
    assert wilson_interval(successes, total) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_wilson_at_the_rim():
    assert wilson_interval(0, 0) == (0, 1)
    assert wilson_interval(0, 10)[0] == 0
    assert wilson_interval(10, 10)[1] == 1
    with pytest.raises(ValueError, match="successes=3"):
        wilson_interval(3, 2)


def test_the_four_numbers():
    scores = Scores.of([0, 0, 1, 1, 1], [0, 1, 1, UNPARSED, UNPARSED], [0, 0, 1, 1, 0])
    assert scores.accuracy == Proportion(2, 5)
    assert scores.parse_rate == Proportion(3, 5)
    assert scores.accuracy_parsed == Proportion(2, 3)
    assert scores.constrained_accuracy == Proportion(4, 5)
    assert scores.to_json()["accuracy_parsed"]["value"] == pytest.approx(2 / 3)


def test_nothing_parses():
    scores = Scores.of([0, 1], [UNPARSED, UNPARSED], [0, 1])
    assert math.isnan(scores.accuracy_parsed.value)
    assert scores.to_json()["accuracy_parsed"]["value"] is None


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 labels"):
        Scores.of([0, 1], [0], [0, 1])
    with pytest.raises(ValueError, match="as many"):
        PairedComparison.of([True], [])


def test_paired_comparison():
    before = [True] * 3 + [False] * 12 + [True] * 5
    after = [False] * 3 + [True] * 12 + [True] * 5
    paired = PairedComparison.of(before, after)
    assert (paired.gained, paired.lost, paired.total) == (12, 3, 20)
    assert paired.difference == pytest.approx(0.45)
    # Twice the lower tail of a fair coin: 3 or fewer of 15.
    assert paired.p_value == pytest.approx(2 * sum(math.comb(15, k) for k in range(4)) / 2**15)
    low, high = paired.interval
    assert 0 < low < 0.45 < high < 1


def test_no_disagreement():
    paired = PairedComparison.of([True, False], [True, False])
    assert paired.p_value == 1
    assert paired.difference == 0
    assert math.isnan(PairedComparison.of([], []).difference)
    assert PairedComparison.of([], []).to_json()["difference"] is None


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 200))
def test_swapping_the_two_mirrors_the_comparison(gained, lost, agreed):
    one = PairedComparison(gained, lost, gained + lost + agreed)
    other = PairedComparison(lost, gained, gained + lost + agreed)
    assert one.p_value == pytest.approx(other.p_value)
    assert one.interval == pytest.approx(tuple(-end for end in reversed(other.interval)))
