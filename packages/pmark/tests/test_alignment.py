import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pmark.alignment import aligned_p_value
from pmark.key import PMarkKey
from pmark.scoring import soft_counts, z_score
from pmark.selection import halve

KEY = PMarkKey.generate(4, b"a secret of some length")
ROWS = KEY.bits(40)


def marked(rng, texts, sentences, dimension=384):
    """Proxies [texts, sentences, channels] of sentences chosen by halving, medians 0."""
    pool = rng.standard_normal((texts * sentences, 64, 4)) / np.sqrt(dimension)
    chosen = halve(pool, np.tile(ROWS[:sentences], (texts, 1)), rng).chosen
    return pool[np.arange(len(pool)), chosen].reshape(texts, sentences, 4)


def plain_z(proxies):
    counts = soft_counts(proxies, np.zeros(proxies.shape), ROWS[: len(proxies)])
    return z_score(float(counts.sum()), counts.size)


def align(proxies, **options):
    return aligned_p_value(proxies, np.zeros(proxies.shape), ROWS[: len(proxies) + 2], **options)


def test_a_lost_sentence_costs_the_plain_score_everything():
    texts = marked(np.random.default_rng(0), 30, 13)
    plain = [plain_z(text[:12]) for text in texts]
    lost = [plain_z(text[1:]) for text in texts]
    aligned = [align(text[1:], draws=199) for text in texts]
    assert np.mean(plain) > 5
    assert np.mean(lost) < 2
    assert np.mean([each.z for each in aligned]) > 4
    assert np.mean([each.p_value <= 0.01 for each in aligned]) >= 0.9
    assert np.mean([each.shifts == (1,) * 12 for each in aligned]) > 0.8


@pytest.mark.parametrize("place", [0, 4])
def test_a_sentence_put_in(place):
    rng = np.random.default_rng(1)
    texts = marked(rng, 30, 12)
    texts = np.insert(texts, place, rng.standard_normal((30, 4)) / np.sqrt(384), axis=1)
    aligned = [align(text, draws=199) for text in texts]
    assert np.mean([each.p_value <= 0.01 for each in aligned]) >= 0.9
    # The sentence behind the intruder is found one row back.
    assert np.mean([each.shifts[place + 1 :] == (-1,) * (12 - place) for each in aligned]) > 0.8


def test_unmarked_text_is_flagged_as_often_as_said():
    rng = np.random.default_rng(2)
    # Far from the Gaussian model: every channel has a bias of its own, so that only random bits are a fair null.
    texts = rng.standard_normal((300, 6, 4)) / 20 + rng.standard_normal((300, 1, 4)) / 20
    found = []
    for text in texts:
        bits = rng.random((8, 4)) < 0.5
        found.append(aligned_p_value(text, np.zeros(text.shape), bits, draws=99))
    p_values = np.array([each.p_value for each in found])
    for level in (0.05, 0.2, 0.5):
        assert (p_values <= level).mean() <= level + 4 * np.sqrt(level * (1 - level) / 300)
    assert np.mean([each.z for each in found]) == pytest.approx(0, abs=0.25)
    assert np.std([each.z for each in found]) == pytest.approx(1, abs=0.25)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2), st.floats(0, 3))
def test_score_is_that_of_the_best_path(seed, sentences, more, window, penalty):
    rng = np.random.default_rng(seed)
    proxies, m = rng.standard_normal((2, sentences, 2)) / 100
    bits = rng.random((sentences + more, 2)) < 0.5
    best = -np.inf
    for path in itertools.product(range(-window, window + 1), repeat=sentences):
        rows = np.arange(sentences) + path
        moves = np.diff(path, prepend=0)
        if rows.min() >= 0 and rows.max() < len(bits) and (moves[1:] >= -1).all():
            best = max(best, soft_counts(proxies, m, bits[rows]).sum() - penalty * np.abs(moves).sum())
    found = aligned_p_value(proxies, m, bits, window=window, penalty=penalty, draws=9)
    assert found.score == pytest.approx(best)
    rows = np.arange(sentences) + found.shifts
    paid = penalty * np.abs(np.diff(found.shifts, prepend=0)).sum()
    assert soft_counts(proxies, m, bits[rows]).sum() - paid == pytest.approx(best)


def test_without_a_window_it_is_the_plain_sum():
    text = marked(np.random.default_rng(3), 1, 8)[0]
    counts = soft_counts(text, np.zeros(text.shape), ROWS[:8])
    found = align(text, window=0)
    assert found.score == pytest.approx(counts.sum())
    # Random keys have about the mean 1/2 per count, and the variance that goes with it.
    assert found.z == pytest.approx(plain_z(text), rel=0.15)


def test_nothing_to_choose_between():
    # All on the threshold: any bits fit, so that nothing speaks for these.
    found = align(np.zeros((5, 4)))
    assert (found.score, found.z, found.p_value, found.shifts) == (20, 0, 1, (0,) * 5)


def test_same_seed_same_result():
    text = marked(np.random.default_rng(4), 1, 8)[0]
    assert align(text, seed=1) == align(text, seed=1)
    assert align(text, seed=1).score == align(text, seed=2).score


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((0, 4), {}, "0 sentences"),
        ((41, 4), {}, "40 rows"),
        ((4, 4), {"window": -1}, "window=-1"),
        ((4, 4), {"penalty": -0.5}, "penalty=-0.5"),
        ((4, 4), {"draws": 1}, "draws=1"),
    ],
)
def test_bad_arguments(shape, options, message):
    with pytest.raises(ValueError, match=message):
        align(np.zeros(shape), **options)
