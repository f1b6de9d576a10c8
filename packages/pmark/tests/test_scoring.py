import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pmark.scoring import Null, among_other_bits, expected_z, flip_bound, gaussian_null, p_value, soft_counts, z_score

ONE, ZERO = np.array([True]), np.array([False])


@pytest.mark.parametrize(
    ("total", "n", "z", "p"),
    [
        (48, 48, 6.9282, 2.13e-12),
        (36, 48, 3.4641, 2.66e-4),
        (33.3, 48, 2.6847, 3.63e-3),
        (24, 48, 0, 0.5),
        (12, 12, 3.4641, 2.66e-4),
    ],
)
def test_z_and_p(total, n, z, p):
    assert z_score(total, n) == pytest.approx(z, abs=5e-5)
    assert p_value(z_score(total, n)) == pytest.approx(p, rel=2e-3)


@pytest.mark.parametrize(
    ("proxy", "bit", "count"),
    [
        (-0.0005, ONE, 1),
        (-0.002, ONE, 0.606531),
        (0.5, ONE, 1),
        (0.01, ZERO, 0.082085),
        (0.0005, ZERO, 1),
        (-0.5, ZERO, 1),
        (-0.001 - 1e-9, ONE, 0.7788),
    ],
)
def test_soft_counts(proxy, bit, count):
    for m in (0.0, 0.3):
        assert soft_counts(np.array([m + proxy]), np.array([m]), bit)[0] == pytest.approx(count, abs=1e-4)


def test_hard_counts():
    proxies, m = np.array([-0.1, -1e-12, 0.0, 1e-12, 0.1]), np.zeros(5)
    hard = {"tolerance": 0.0, "decay": math.inf}
    assert soft_counts(proxies, m, np.full(5, True), **hard).tolist() == [0, 0, 1, 1, 1]
    assert soft_counts(proxies, m, np.full(5, False), **hard).tolist() == [1, 1, 1, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.floats(-1, 1), st.floats(-1, 1), st.booleans(), st.floats(0, 1e-4))
def test_counts_fall_with_the_distance(proxy, m, bit, step):
    def count(value):
        return float(soft_counts(np.array([value]), np.array([m]), np.array([bit]))[0])

    here, worse = count(proxy), count(proxy - step if bit else proxy + step)
    assert 0 <= worse <= here <= 1
    # Continuous, but for the jump at the tolerance.
    assert here - worse <= 250 * step + 1e-9 or (here == 1 and worse <= math.exp(-0.25))


def test_thresholds_and_bits_may_be_shared():
    proxies = np.random.default_rng(0).standard_normal((3, 4))
    m, bits = np.zeros((1, 4)), np.array([[True, False, True, False]])
    shared = soft_counts(proxies, m, bits)
    assert (shared == soft_counts(proxies, np.zeros((3, 4)), np.repeat(bits, 3, 0))).all()


@pytest.mark.parametrize(("dimension", "mean", "std"), [(384, 0.5324, 0.484), (768, 0.5448, 0.477)])
def test_unmarked_text_counts_more_than_half(dimension, mean, std):
    analytic = gaussian_null(dimension)
    assert analytic == pytest.approx((mean, std), abs=2e-3)
    proxies = np.random.default_rng(1).standard_normal(200_000) / math.sqrt(dimension)
    drawn = soft_counts(proxies, np.zeros(1), ONE)
    assert analytic == pytest.approx((drawn.mean(), drawn.std()), abs=5e-3)


def test_gaussian_null_by_quadrature():
    for d, tolerance, decay in [(384, 1e-3, 250.0), (16, 0.1, 3.0), (768, 0.0, 1e4), (10, 0.05, 0.0)]:
        edges = np.linspace(-9, tolerance * math.sqrt(d), 100_001), np.linspace(tolerance * math.sqrt(d), 9, 100_001)
        moments = np.zeros(2)
        # Either side of the jump by itself.
        for edge in edges:
            x = (edge[1:] + edge[:-1]) / 2
            weight = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (edge[1] - edge[0])
            counts = soft_counts(-x / math.sqrt(d), np.zeros(1), ONE, tolerance=tolerance, decay=decay)
            moments += (counts * weight).sum(), (counts**2 * weight).sum()
        expected = moments[0], math.sqrt(max(0, moments[1] - moments[0] ** 2))
        assert gaussian_null(d, tolerance=tolerance, decay=decay) == pytest.approx(expected, abs=1e-4)
    assert gaussian_null(384, tolerance=0, decay=math.inf) == (0.5, 0.5)


def human_counts(texts, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.choice([0.3, 1.0], (rng.integers(1, 20), 4)) for _ in range(texts)]


def test_calibrated_scores_of_human_text_are_standard():
    counts = [*human_counts(400), np.zeros((0, 4))]
    null = Null.fit(counts, key_id="k")
    assert (null.num_texts, len(null.sample)) == (400, 400)
    assert (null.mean, null.std) == pytest.approx((0.65, 0.35), abs=0.03)
    scores = [null.z(each.sum(), each.size) for each in counts if each.size]
    np.testing.assert_allclose(sorted(scores), null.sample)
    assert np.std(scores) == pytest.approx(1, abs=0.01)


def test_dependent_counts_widen_the_null():
    # Every count of a text is the same coin: x - n/2 is +-n/2, not of size sqrt(n)/2.
    counts = [np.full((4, 4), float(i % 2)) for i in range(100)]
    assert Null.fit(counts).std == pytest.approx(0.5 * 4, rel=0.01)


def test_empirical_p_value_and_threshold():
    null = Null(0.5, 0.5, tuple(float(i) for i in range(99)))
    assert null.p_value(1000) == 0.01
    assert null.p_value(98) == 0.02
    assert null.p_value(97.5) == 0.02
    assert null.p_value(-1) == 1
    assert null.threshold(0.01) == 98
    assert null.threshold(0.05) == 94
    with pytest.raises(ValueError, match=r"at least 199 human texts; this has 99"):
        null.threshold(0.005)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=20, max_size=60), st.integers(5, 95))
def test_threshold_says_what_the_p_value_says(sample, percent):
    fpr = percent / 100
    null = Null(0.5, 0.5, tuple(sorted(float(each) for each in sample)))
    threshold = null.threshold(fpr)
    for z in {*map(float, sample), threshold, -4.0, 4.0}:
        assert (null.p_value(z) <= fpr + 1e-9) == (z > threshold)
    assert sum(each > threshold for each in sample) <= fpr * len(sample)


def test_gaussian_model():
    null = Null.gaussian(384, key_id="k")
    assert (null.mean, null.std) == gaussian_null(384)
    assert null.p_value(null.threshold(0.01)) == pytest.approx(0.01)
    assert null.key_id == "k"


def test_file(tmp_path):
    path = tmp_path / "null.json"
    for null in (
        Null.fit(human_counts(30), medians=(0.0, 0.1), encoder="e", segmenter="s", mode="offline", dimension=384),
        Null.gaussian(384, tolerance=0, decay=math.inf),
    ):
        null.save(path)
        assert Null.load(path) == null


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"std": 0}, "std positive"),
        ({"mean": "x"}, "damaged"),
        ({"sample": [2, 1]}, "ascending"),
        ({"sample": 3}, "damaged"),
        ({"medians": [None]}, "damaged"),
        ({"decay": -1}, "at least 0"),
        ({"version": 99}, "version"),
        ({"schema": "other"}, "schema"),
        ({"mean": None}, "damaged"),
    ],
)
def test_damaged_files(tmp_path, change, message):
    path = tmp_path / "null.json"
    Null.gaussian(384).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=rf"(?s)null\.json.*{message}"):
        Null.load(path)


def test_file_without_a_field(tmp_path):
    path = tmp_path / "null.json"
    Null.gaussian(384).save(path)
    path.write_text(path.read_text().replace('"mean"', '"men"'))
    with pytest.raises(ValueError, match="'mean' is missing"):
        Null.load(path)


@pytest.mark.parametrize(("channels", "sentences", "flip", "threshold"), [(4, 12, 0.1, 2.33), (1, 40, 0.2, 1.6)])
def test_lost_counts(channels, sentences, flip, threshold):
    n = channels * sentences
    kept = np.random.default_rng(3).binomial(n, 1 - flip, 100_000)
    z = (kept - n / 2) / math.sqrt(n / 4)
    assert expected_z(channels, sentences, flip) == pytest.approx(z.mean(), abs=0.02)
    assert (z < threshold).mean() <= flip_bound(threshold, channels, sentences, flip) < 0.5
    assert flip_bound(100, channels, sentences, flip) == 1


def test_evidence_grows_with_the_root_of_the_channels():
    assert expected_z(4, 12, 0.1) == 2 * expected_z(1, 12, 0.1) == pytest.approx(0.8 * math.sqrt(48))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: z_score(0, 0), "n=0"),
        (lambda: gaussian_null(0), "dimension=0"),
        (lambda: gaussian_null(4, tolerance=-1), "tolerance=-1"),
        (lambda: soft_counts(np.zeros(1), np.zeros(1), ONE, decay=math.nan), "decay=nan"),
        (lambda: Null.gaussian(4).threshold(0), "fpr=0"),
        (lambda: Null.gaussian(4).z(0, 0), "n=0"),
        (lambda: Null.fit([np.ones((2, 2)), np.ones((0, 2))]), "1 texts"),
        (lambda: Null.fit([np.ones((2, 2)), np.ones((3, 2))]), "same counts"),
        (lambda: Null(math.nan, 1.0), "finite"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("hard", [False, True])
def test_other_bits_by_going_through_all(hard):
    rng = np.random.default_rng(4)
    for size in (1, 2, 5, 8):
        counts, opposite = rng.integers(0, 101, size=(2, size, 1)) / 100
        if hard:
            counts = np.round(counts)
            opposite = 1 - counts
        steps = np.rint(100 * (counts - opposite)).ravel()
        sums = np.array([np.dot(signs, np.abs(steps)) for signs in itertools.product((-1, 1), repeat=size)])
        z, p = among_other_bits(counts, opposite)
        assert p == pytest.approx(np.mean(sums >= steps.sum()), abs=1e-12)
        assert z == pytest.approx(steps.sum() / np.sqrt((steps**2).sum()))


def test_other_bits_at_the_ends():
    assert among_other_bits(np.ones((12, 4)), np.zeros((12, 4))) == (pytest.approx(48**0.5), pytest.approx(2.0**-48))
    assert among_other_bits(np.zeros((3, 2)), np.ones((3, 2)))[1] == 1
    # On the threshold either bit counts whole.
    assert among_other_bits(np.ones((3, 2)), np.ones((3, 2))) == (0.0, 1.0)
    rng = np.random.default_rng(5)
    counts, opposite = rng.random((2, 100, 4))
    long = among_other_bits(np.concatenate([counts, counts[:1]]), np.concatenate([opposite, opposite[:1]]))
    assert long[1] == p_value(long[0])
    assert among_other_bits(counts, opposite)[1] == pytest.approx(
        p_value(among_other_bits(counts, opposite)[0]), rel=0.05
    )
