import hashlib

import numpy as np
import pytest
from pmark.samplers import CallableSampler
from pmark.semstamp import KSemStamp, SemStamp, count_test, distortion, first_accepted, spherical_k_means
from pmark.sentence_watermark import Document, Pool

PROMPTS = ["The storm had passed.", "A train left the city."]


def encode(texts):
    rngs = (np.random.default_rng(list(hashlib.sha256(text.encode()).digest()[:8])) for text in texts)
    return np.array([rng.normal(size=24) for rng in rngs])


def sampler(seed=0):
    rng = np.random.default_rng(seed)
    return CallableSampler(lambda _, count: [f" Sentence {rng.integers(10**9)} was said." for _ in range(count)])


@pytest.fixture(scope="module", params=["semstamp", "k-semstamp"])
def scheme(request):
    if request.param == "semstamp":
        return SemStamp(encode, seed=0)
    return KSemStamp.fit(encode, [f"Sentence {index} of the domain." for index in range(150)], seed=0)


@pytest.mark.parametrize(
    ("gamma", "masses", "variation"),
    [
        (0.25, [0.25, 0.25, 0.25, 0.25], 0.2),
        (0.5, [0.3397, 0.2964, 0.2333, 0.1306], 0.0639),
        (0.75, None, 0.0210),
        (0.99, [0.4, 0.3, 0.2, 0.1], 0.0),
    ],
)
def test_rejection_sampling_distorts_as_the_framework_says(gamma, masses, variation):
    natural = np.array([0.4, 0.3, 0.2, 0.1])
    found = distortion(natural, gamma)
    assert found.sum() == pytest.approx(1)
    assert np.abs(found - natural).sum() / 2 == pytest.approx(variation, abs=5e-5)
    if masses is not None:
        np.testing.assert_allclose(found, masses, atol=5e-5)


def test_equal_masses_and_only_they_are_left_alone():
    np.testing.assert_allclose(distortion(np.full(8, 0.125), 0.25), 0.125)
    # The closed form against the scheme itself: draw a green set, then sentences until one is in it.
    rng, natural = np.random.default_rng(0), np.array([0.4, 0.3, 0.2, 0.1])
    counts = np.zeros(4)
    for _ in range(4000):
        green = rng.permutation(4)[:2]
        counts[rng.choice(green, p=natural[green] / natural[green].sum())] += 1
    np.testing.assert_allclose(counts / 4000, distortion(natural, 0.5), atol=0.03)


def test_marked_text_is_found_and_other_text_is_not(scheme):
    texts = scheme.generate_batch(sampler(), PROMPTS, max_sentences=10)
    found = scheme.detect_batch(texts)
    # All ten green: (10 - 2.5) / sqrt(10 / 4 * 3 / 4).
    assert [each.z for each in found] == pytest.approx([5.4772] * 2, abs=1e-4)
    assert all(each.is_watermarked and each.num_sentences == 10 for each in found)
    assert all(record["accepted"] for text in texts for record in text.trace)
    # One in four regions is green, less what the margin costs; chunks of eight.
    assert 4 * 10 * 2 <= sum(text.samples for text in texts) <= 40 * 10 * 2
    rng = np.random.default_rng(5)
    human = [" ".join(f"Human sentence {rng.integers(10**9)} stood." for _ in range(9)) for _ in range(40)]
    assert abs(np.mean([each.z for each in scheme.detect_batch(human)])) < 4 / np.sqrt(40)


def test_a_sentence_with_none_before_it_is_no_evidence(scheme):
    [result] = scheme.detect_batch(["One here. Two there. Three now."], has_prompt=False)
    assert result.num_sentences == 2
    assert np.isnan(result.counts[0, 0])
    assert result.per_sentence[0]["count"] is None
    [result] = scheme.detect_batch(["Only one."], has_prompt=False)
    assert (result.p_value, result.is_watermarked) == (1.0, False)
    assert "before it" in result.reason


def test_without_an_acceptable_sentence_the_last_one_is_taken(scheme):
    drawn = []

    def numbered(_, count):
        drawn.extend(f" It was number {len(drawn) + place}." for place in range(count))
        return drawn[-count:]

    strict = SemStamp(encode, margin=2.0, num_samples=20, seed=0)
    [text] = strict.generate_batch(CallableSampler(numbered), PROMPTS[:1], max_sentences=1)
    assert len(drawn) == text.samples == 20
    assert text.sentences == [drawn[-1].strip()]
    assert text.trace[0]["accepted"] is False
    # Of several that would do it is the first; without one more are wished for while there may be.
    pool = Pool(1, np.zeros(2), ["A.", "B.", "C."], np.zeros((3, 2)), exhausted=False, document=0)
    assert first_accepted(np.array([False, True, True]), pool).index == 1
    assert first_accepted(np.zeros(3, bool), pool).index is None


def test_regions_are_sides_of_the_normals_and_margins_their_cosines():
    scheme = SemStamp(encode, hyperplanes=3, key=7)
    vectors = encode([str(index) for index in range(4000)])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    regions, margins = scheme.locate(vectors)
    opposite, same = scheme.locate(-vectors)
    assert (regions + opposite == 7).all()
    np.testing.assert_allclose(margins, same)
    assert np.bincount(regions, minlength=8).min() > 0
    other = SemStamp(encode, hyperplanes=3, key=8).locate(vectors)[0]
    assert (regions == other).mean() < 0.5
    green = scheme.green(vectors[:-1], vectors[1:])
    assert green.mean() == pytest.approx(0.25, abs=0.05)
    assert "key" not in " ".join(scheme.settings)


def test_green_regions_are_the_authors_without_a_key_and_all_others_with_one():
    corners = np.eye(8)

    def table(**options):
        scheme = KSemStamp(lambda texts: np.ones((len(texts), 8)), corners, **options)
        return np.array([scheme.green(np.tile(before, (8, 1)), corners) for before in corners])

    for region, row in enumerate(table()):
        order = np.random.default_rng(15485863 * region).permutation(8)
        assert set(np.flatnonzero(row)) == set(order[:2])
    tables = np.array([table(key=key) for key in range(40)])
    assert (tables.sum(axis=2) == 2).all()
    # After every region, 0 as well, each other is green under a quarter of the keys, less five standard deviations.
    assert tables.mean(axis=0).min() > 0
    assert tables[:, 0].mean(axis=0).max() < 0.25 + 5 * np.sqrt(0.25 * 0.75 / 40)


def test_k_means_finds_directions_and_the_margin_is_to_the_second():
    rng = np.random.default_rng(0)
    centres = np.eye(6)[:3]
    rows = np.repeat(centres, 30, axis=0) + rng.normal(0, 0.05, (90, 6))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    found = spherical_k_means(rows, 3, seed=1)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1)
    assert (found @ centres.T).max(axis=0).min() > 0.99
    scheme = KSemStamp(encode, 3 * centres)
    region, margin = scheme.locate(np.array([[0.8, 0.6, 0, 0, 0, 0]]))
    assert region.tolist() == [0]
    assert margin[0] == pytest.approx(0.2)
    same = np.ones((5, 2)) / np.sqrt(2) + 1e-12 * np.arange(5)[:, None]
    with pytest.raises(ValueError, match="clusters must lie in 2 to the number of different sentences, 1, not 2"):
        spherical_k_means(same, 2)


def test_the_count_test_is_one_of_proportions():
    ones = np.ones((12, 2))
    document = Document("", ["A."] * 12, ones, ones, "", [0] * 12)
    result = count_test(document, np.array([1.0] * 8 + [0.0] * 4), 0.25, 0.05)
    assert result.z == pytest.approx(5 / np.sqrt(12 * 0.25 * 0.75))
    assert result.z_calibrated == result.z
    assert not result.low_power


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: distortion(np.array([0.5, 0.0]), 0.5), "masses must be"),
        (lambda: distortion(np.array([0.5, np.inf]), 0.5), "masses must be"),
        (lambda: SemStamp(encode, gamma=1.0), "gamma must lie between 0 and 1, not 1.0"),
        (lambda: SemStamp(encode, key=-1), "key must be at least 0, not -1"),
        (lambda: SemStamp(encode, hyperplanes=1, gamma=0.75), "all of 2 regions green"),
        (lambda: KSemStamp(encode, np.eye(24)[:1]), "all of 1 regions green"),
        (lambda: KSemStamp(encode, np.eye(24)[:2] * [[1], [0]]), "centres must be finite and not 0"),
    ],
)
def test_wrong_arguments_are_named(call, told):
    with pytest.raises(ValueError, match=told):
        call()
