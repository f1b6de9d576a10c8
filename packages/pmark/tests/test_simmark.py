import hashlib

import numpy as np
import pytest
from pmark.samplers import CallableSampler
from pmark.sentence_watermark import Document
from pmark.simmark import COSINE, EUCLIDEAN, EUCLIDEAN_PCA, SimMark, principal_axes

INTERVAL = (0.1, 0.3)


def encode(texts):
    rngs = (np.random.default_rng(list(hashlib.sha256(text.encode()).digest()[:8])) for text in texts)
    return np.array([rng.normal(size=12) for rng in rngs])


def documents(angles):
    rows = np.array([[np.cos(angle), np.sin(angle)] for angle in angles])
    before = np.tile([1.0, 0.0], (len(angles), 1))
    return Document("", ["A."] * len(angles), rows, before, "", [0] * len(angles))


def test_marked_text_lies_in_the_interval_and_other_text_gives_gamma():
    rng = np.random.default_rng(3)
    human = [" ".join(f"Human sentence {rng.integers(10**9)} stood." for _ in range(11)) for _ in range(30)]
    scheme = SimMark(encode, interval=INTERVAL, seed=0).calibrate(human)
    assert 0.1 < scheme.gamma < 0.4
    sampler = CallableSampler(lambda _, count: [f" Sentence {rng.integers(10**9)} was said." for _ in range(count)])
    [text] = scheme.generate_batch(sampler, ["The storm had passed."], max_sentences=10)
    [found] = scheme.detect_batch([text])
    assert found.z == pytest.approx((10 - 10 * scheme.gamma) / np.sqrt(10 * scheme.gamma * (1 - scheme.gamma)))
    assert found.is_watermarked
    # What was measured tells apart what detects differently.
    assert scheme.settings["gamma"] == scheme.gamma
    hard = SimMark(encode, interval=INTERVAL, gamma=scheme.gamma, decay=np.inf)
    # The share was measured on these very texts.
    assert np.mean([each.z for each in hard.detect_batch(human)]) == pytest.approx(0, abs=1e-9)


def test_counts_fall_with_the_distance_from_the_interval():
    scheme = SimMark(encode, interval=(0.5, 0.6), gamma=0.2)
    [result] = scheme.score([documents(np.arccos([0.5, 0.6, 0.61, 0.496, -1.0]))])
    np.testing.assert_allclose(result.counts[:, 0], [1, 1, np.exp(-2.5), np.exp(-1), 0], atol=1e-6)


def test_an_interval_that_no_human_sentence_hits_has_a_finite_z():
    scheme = SimMark(encode, interval=(0.5, 0.6), gamma=0.0)
    hit, missed = scheme.score([documents([np.arccos(0.55)]), documents([np.pi])])
    assert hit.z == pytest.approx(1e6)
    assert missed.z == pytest.approx(0, abs=1e-3)


def test_a_share_measured_as_none_is_half_a_pair_s():
    human = [" ".join(f"Human sentence {number}{part} stood." for part in range(6)) for number in range(4)]
    assert SimMark(encode, interval=(0.999, 1.0)).calibrate(human).gamma == 0.5 / 20
    assert SimMark(encode, interval=(-1.0, 1.0)).calibrate(human).gamma == 1 - 0.5 / 20


def test_distances_are_taken_whole_or_on_principal_axes():
    vectors = encode([str(index) for index in range(40)])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    axes = principal_axes(vectors, 4)
    np.testing.assert_allclose(axes @ axes.T, np.eye(4), atol=1e-12)
    projected = (vectors - vectors.mean(axis=0)) @ axes.T
    # Nothing holds more of the variance than the first axis.
    assert projected.var(axis=0).tolist() == sorted(projected.var(axis=0), reverse=True)
    found = SimMark(encode, measure="euclidean", components=axes).similarity(vectors[:-1], vectors[1:])
    np.testing.assert_allclose(found, np.linalg.norm(np.diff(projected, axis=0), axis=1))
    whole = SimMark(encode, measure="euclidean").similarity(vectors[:-1], vectors[1:])
    np.testing.assert_allclose(whole, np.sqrt(2 - 2 * SimMark(encode).similarity(vectors[:-1], vectors[1:])))


def test_the_authors_interval_belongs_to_the_measure():
    assert SimMark(encode).interval == COSINE == (0.68, 0.76)
    assert SimMark(encode, measure="euclidean").interval == EUCLIDEAN == (0.4, 0.55)
    assert SimMark(encode, measure="euclidean", components=np.eye(12)[:3]).interval == EUCLIDEAN_PCA == (0.28, 0.36)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: SimMark(encode, measure="angle"), "measure must be 'cosine' or 'euclidean', not 'angle'"),
        (lambda: SimMark(encode, components=np.eye(12)), "measure='euclidean' only"),
        (lambda: SimMark(encode, interval=(0.5, 0.5)), "from a lower to a higher value"),
        (lambda: SimMark(encode, gamma=1.5), "gamma must lie in 0 to 1, not 1.5"),
        (lambda: SimMark(encode).detect("One here. Two there."), "measure it with calibrate"),
        (lambda: SimMark(encode).calibrate(["One only."], has_prompt=False), "no two consecutive sentences"),
        (lambda: SimMark(encode).calibrate([""]), "no two consecutive sentences"),
        (lambda: principal_axes(np.eye(3), 3), "number of sentences less one, 2"),
    ],
)
def test_wrong_arguments_are_named(call, told):
    with pytest.raises(ValueError, match=told):
        call()
