import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pmark.medians import median
from pmark.scoring import soft_counts
from pmark.selection import best_match, halve


def every_key(channels):
    return np.array(list(itertools.product([False, True], repeat=channels)))


def fair_bits(rng, *shape):
    return rng.random(shape) < 0.5


def repeated(proxies, times):
    return np.repeat(proxies[None], times, axis=0)


def test_every_candidate_is_equally_likely_exactly():
    # Over the 4 keys; each leaves 4 of the 16 alive, among which the choice is uniform.
    proxies = np.random.default_rng(0).standard_normal((16, 2))
    found = halve(repeated(proxies, 4), every_key(2), np.random.default_rng(1))
    assert (found.survivors == [8, 4]).all()
    assert (found.alive.sum(0) == 1).all()
    assert found.alive[np.arange(4), found.chosen].all()


def test_lower_median_would_distort():
    # What the authors' comparison with torch's lower median does: 8 are kept or 7, and 0.0625 of the mass moves.
    proxies = np.random.default_rng(0).standard_normal((16, 2))
    chance = np.zeros(16)
    for bits in every_key(2):
        alive = np.arange(16)
        for j in range(2):
            values = proxies[alive, j]
            lower = np.sort(values)[(len(values) - 1) // 2]
            alive = alive[(values >= lower) == bits[j]]
        chance[alive] += 1 / 4 / len(alive)
    assert np.abs(chance - 1 / 16).sum() / 2 == pytest.approx(0.0625)
    found = halve(repeated(proxies, 4), every_key(2), np.random.default_rng(1))
    fair = (found.alive / found.alive.sum(1, keepdims=True)).mean(0)
    assert np.abs(fair - 1 / 16).sum() / 2 == pytest.approx(0)


@pytest.mark.parametrize(("candidates", "channels"), [(5, 1), (7, 2), (3, 3)])
def test_odd_numbers_are_uniform(candidates, channels):
    rng = np.random.default_rng(2)
    proxies = repeated(rng.standard_normal((candidates, channels)), 40_000)
    found = halve(proxies, fair_bits(rng, 40_000, channels), rng)
    share = np.bincount(found.chosen, minlength=candidates) / 40_000
    # Four standard errors; a fair coin for the middle would be off by 1/30 at n = 5, dropping it by 1/5.
    np.testing.assert_allclose(share, 1 / candidates, atol=4 * np.sqrt(1 / candidates / 40_000))
    if candidates == 5:
        middle = np.argsort(proxies[0, :, 0])[2]
        assert abs(found.alive[:, middle].mean() - 0.6) < 0.01


def test_choice_is_uniform_at_the_size_of_the_paper():
    rng = np.random.default_rng(3)
    # Not exchangeable: one candidate stands far off in every channel, others in some.
    proxies = np.linspace(-1, 1, 64)[:, None] ** [1, 2, 3, 4] + rng.standard_normal((64, 4)) / 9
    counts = np.zeros(64)
    for _ in range(64):
        counts += np.bincount(halve(repeated(proxies, 1000), fair_bits(rng, 1000, 4), rng).chosen, minlength=64)
    assert ((counts - 1000) ** 2 / 1000).sum() < 103


def test_equal_candidates_are_equally_likely_under_one_key():
    rng = np.random.default_rng(4)
    bits = np.ones((16_000, 4), dtype=bool)
    counts = np.bincount(halve(np.zeros((16_000, 16, 4)), bits, rng).chosen, minlength=16)
    assert ((counts - 1000) ** 2 / 1000).sum() < 37.7
    chosen = best_match(np.zeros((16_000, 16, 4)), np.zeros((16_000, 4)), bits, rng).chosen
    counts = np.bincount(chosen, minlength=16)
    assert ((counts - 1000) ** 2 / 1000).sum() < 37.7


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 4), st.booleans())
def test_halves_are_those_of_a_plain_loop(seed, candidates, channels, tied):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, candidates + 1, 5)
    proxies = rng.integers(0, 3, (5, candidates, channels)) / 2 if tied else rng.random((5, candidates, channels))
    proxies[np.arange(candidates) >= sizes[:, None]] = np.nan
    bits = fair_bits(rng, 5, channels)
    found = halve(proxies, bits, rng, sizes=sizes, median="sample")
    for doc, n in enumerate(sizes):
        assert found.alive[doc, found.chosen[doc]]
        assert not found.alive[doc, n:].any()
        assert found.alive[doc].sum() == found.survivors[doc, -1]
        assert found.medians[doc, 0] == np.median(proxies[doc, :n, 0])
        left = n
        for j in range(channels):
            assert found.survivors[doc, j] in {left // 2, -(-left // 2)} - {0}
            left = found.survivors[doc, j]
        if not tied:
            # Who is left was, in every channel, on the right side of everyone who fell there.
            alive = np.arange(n)
            for j, left in enumerate(found.survivors[doc]):
                alive = alive[np.argsort(proxies[doc, alive, j])]
                alive = alive[len(alive) - left :] if bits[doc, j] else alive[:left]
            assert set(alive) == set(np.nonzero(found.alive[doc])[0])


def test_padding_and_neighbours_change_nothing():
    rng = np.random.default_rng(5)
    proxies, bits = rng.random((3, 8, 2)), fair_bits(rng, 3, 2)
    padded = np.concatenate([proxies, np.full((3, 4, 2), np.inf)], axis=1)
    alone = halve(proxies[1:2], bits[1:2], rng)
    among = halve(padded, bits, rng, sizes=np.full(3, 8))
    # Distinct values and even numbers leave nothing to chance but the last choice.
    assert (among.alive[1, :8] == alone.alive[0]).all()
    np.testing.assert_allclose(among.medians[1], alone.medians[0])


def test_same_seed_same_choice():
    proxies, bits = np.random.default_rng(6).random((4, 9, 2)), np.ones((4, 2), dtype=bool)
    first, second = (halve(proxies, bits, np.random.default_rng(7)) for _ in range(2))
    assert (first.chosen == second.chosen).all()
    assert (first.alive == second.alive).all()


def green_rates(rng, candidates, channels, fresh=4000):
    """Share of halved choices on the right side of the medians of another sample (detection), per channel."""
    proxies = rng.random((fresh, candidates, channels))
    bits = fair_bits(rng, fresh, channels)
    chosen = proxies[np.arange(fresh), halve(proxies, bits, rng).chosen]
    medians = median(np.swapaxes(rng.random((fresh, candidates, channels)), 1, 2))
    return soft_counts(chosen, medians, bits, tolerance=0, decay=np.inf).mean(0)


def test_green_rates_at_detection():
    rng = np.random.default_rng(8)
    np.testing.assert_allclose(green_rates(rng, 64, 4), [0.930, 0.912, 0.892, 0.858], atol=0.01)
    assert green_rates(rng, 64, 1)[0] == pytest.approx(0.924, abs=0.01)
    assert green_rates(rng, 16, 4).mean() == pytest.approx(0.811, abs=0.01)
    assert green_rates(rng, 128, 4).mean() == pytest.approx(0.927, abs=0.01)


@pytest.mark.parametrize(("candidates", "channels", "expected"), [(64, 4, 0.9955), (16, 4, 0.911), (64, 8, 0.891)])
def test_share_of_matches_with_true_medians(candidates, channels, expected):
    rng = np.random.default_rng(9)
    proxies, bits = rng.standard_normal((4000, candidates, channels)), fair_bits(rng, 4000, channels)
    found = best_match(proxies, np.zeros((4000, channels)), bits, rng)
    assert found.matches.mean() / channels == pytest.approx(expected, abs=0.005)
    of_chosen = (proxies[np.arange(4000), found.chosen] >= 0) == bits
    assert (of_chosen.sum(1) == found.matches).all()


def test_best_match_heeds_sizes():
    proxies = np.array([[[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0]]])
    bits, zero, rng = np.ones((1, 2), dtype=bool), np.zeros((1, 2)), np.random.default_rng(0)
    assert best_match(proxies, zero, bits, rng) == (2, 2)
    assert best_match(proxies, zero, bits, rng, sizes=np.array([2])) == (1, 1)
    assert best_match(proxies, zero, ~bits, rng, sizes=np.array([1])) == (0, 2)


def test_the_first_that_is_right_or_any_of_the_best():
    proxies = np.array([[-1.0, -1], [-1, 1], [1, 1], [1, 1], [1, -1]])
    bits = np.array([[True, True]] * 200 + [[False, False]] * 200)
    padded, sizes = repeated(proxies, 400), np.repeat([5, 2], 200)
    found = best_match(padded, np.full((400, 2), [0.0, -2.0]), bits, np.random.default_rng(0), sizes=sizes, first=True)
    assert set(found.chosen[:200]) == {2}
    assert set(found.matches[:200]) == {2}
    # Nothing lies below -2, so none of the first two is right in all.
    assert set(found.chosen[200:]) == {0, 1}
    assert set(best_match(padded, np.zeros((400, 2)), bits, np.random.default_rng(0)).chosen[:200]) == {2, 3}


def test_threshold_itself_is_the_upper_side():
    rng, zero = np.random.default_rng(0), np.zeros((1, 1))
    assert best_match(zero[None], zero, np.array([[True]]), rng).matches == 1
    assert best_match(zero[None], zero, np.array([[False]]), rng).matches == 0


def test_no_documents():
    found = halve(np.zeros((0, 4, 2)), np.zeros((0, 2), dtype=bool), np.random.default_rng(0))
    assert found.chosen.shape == (0,)


def test_bad_arguments():
    rng, proxies, bits = np.random.default_rng(0), np.zeros((2, 3, 2)), np.zeros((2, 2), dtype=bool)
    proxies[1, 2, 0] = np.nan
    with pytest.raises(ValueError, match=r"\(1, 2\) are not finite"):
        halve(proxies, bits, rng)
    assert (best_match(proxies, np.zeros((2, 2)), bits, rng, sizes=np.array([3, 2])).matches == 0).all()
    with pytest.raises(ValueError, match="needs 1 to 3 candidates"):
        halve(proxies, bits, rng, sizes=np.array([0, 1]))
    with pytest.raises(ValueError, match="needs 1 to 3 candidates"):
        best_match(proxies, np.zeros((2, 2)), bits, rng, sizes=np.array([4, 1]))
