import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from pmark.encoders import as_encoder
from pmark.key import PMarkKey
from pmark.samplers import CallableSampler, Continuation, SamplerError
from pmark.scoring import Null
from pmark.sentence_watermark import Pool
from pmark.watermark import PMark

SECRET = b"0123456789abcdef0123456789abcdef"
KEY = PMarkKey.generate(4, SECRET)
PROMPT = "Once there was a town."
SUBJECTS = [
    "The cat",
    "My aunt",
    "A judge",
    "Our cook",
    "The sailor",
    "A poet",
    "The baker",
    "His doctor",
    "That pilot",
    "Her cousin",
]
VERBS = ["paints", "sells", "hides", "breaks", "praises", "carries", "studies", "forgets", "repairs", "draws"]
OBJECTS = [
    "a boat",
    "the door",
    "an old map",
    "two clocks",
    "a chair",
    "the bell",
    "some letters",
    "a horse",
    "the bridge",
    "a coat",
]


def encode(texts):
    """Independent directions: the proxies of different sentences know nothing of each other."""
    seeds = [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") for text in texts]
    return np.stack([np.random.default_rng(seed).standard_normal(64) for seed in seeds])


def leaning(texts):
    """Embeddings crowded around one direction, as those of real encoders are."""
    return encode(texts) + 1.5 * np.linspace(-1, 1, 64)


class Grammar:
    """Uniform draws from a thousand sentences."""

    def sample(self, contexts, counts, *, is_complete=None, seed=None):
        rng = np.random.default_rng(seed)
        return [
            [Continuation(f" {SUBJECTS[a]} {VERBS[b]} {OBJECTS[c]}. Then") for a, b, c in rng.integers(0, 10, (n, 3))]
            for n in counts
        ]


def plain_texts(number, sentences=12, seed=0):
    drawn = Grammar().sample([""], [number * sentences], seed=seed)[0]
    cut = [each.text.removesuffix(" Then").strip() for each in drawn]
    return [" ".join([PROMPT, *cut[at : at + sentences]]) for at in range(0, len(cut), sentences)]


class Stops:
    """Cuts behind full stops; the real ones would take most of the time here."""

    name = "stops"

    def split(self, text):
        return [part for part in re.split(r"(?<=[.!])(?<!Dr\.)\s+", text.strip()) if part]


ENCODERS = {each: as_encoder(each) for each in (encode, leaning)}


def online(key=KEY, encoder=encode, **options):
    defaults = {"num_samples": 16, "seed": 0, "segmenter": Stops()}
    return PMark(ENCODERS.get(encoder, encoder), key, **defaults | options)


def offline(key=KEY, encoder=encode, **options):
    return online(key, encoder, **{"mode": "offline", "num_samples": 64} | options)


@pytest.fixture(scope="module")
def written_offline():
    return offline().generate_batch(Grammar(), [PROMPT] * 10)


@pytest.fixture(scope="module")
def written_online():
    return online().generate_batch(Grammar(), [PROMPT] * 12)


def pool(sentences=64):
    embeddings = encode([f"sentence {index}" for index in range(sentences)])
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    return Pool(1, embeddings[0], [str(n) for n in range(sentences)], embeddings, True, 0)


def test_every_candidate_is_equally_likely():
    # 64 candidates, 4 channels, 1,600 rows of bits: chi-square with 63 degrees of freedom, p > .001 below 103.4.
    one = pool()
    many = [Pool(n, one.previous, one.sentences, one.embeddings, True, 0) for n in range(1, 1601)]
    chosen = [each.index for each in online(num_samples=64).select(many, np.random.default_rng(0))]
    counts = np.bincount(chosen, minlength=64)
    assert ((counts - 25) ** 2 / 25).sum() < 103.4


def test_text_is_distributed_as_the_model_writes_it():
    # 5 candidates and 4 sentences, so that medians fall among equals and halves are odd; one in four is filtered out.
    weights = {
        (" Cats sleep. So", False): 0.3,
        (" Dogs sleep.", True): 0.2,
        (" Dogs sleep. So", False): 0.1,
        (" Owls sleep. So", False): 0.15,
        (" Hens met Dr.", False): 0.15,
        ("", True): 0.1,
    }

    class Few:
        def sample(self, contexts, counts, *, is_complete=None, seed=None):
            rng, draws = np.random.default_rng(seed), [Continuation(*each) for each in weights]
            return [[draws[i] for i in rng.choice(len(draws), n, p=list(weights.values()))] for n in counts]

    class OwnBits(PMark):
        def select(self, pools, rng):
            return super().select([replace(pool, number=pool.document + 1) for pool in pools], rng)

    texts = OwnBits(encode, PMarkKey.generate(2, SECRET), num_samples=5, seed=0, segmenter=Stops()).generate_batch(
        Few(), [PROMPT] * 1000, max_sentences=1
    )
    found = Counter((text.sentences[0][:4], text.finish_reason) for text in texts)
    kept = {("Cats", "length"): 0.4, ("Dogs", "eos"): 4 / 15, ("Dogs", "length"): 2 / 15, ("Owls", "length"): 0.2}
    assert found.keys() == kept.keys()
    # Three degrees of freedom: p > .001 below 16.3.
    assert sum((found[what] - 1000 * share) ** 2 / (1000 * share) for what, share in kept.items()) < 16.3


def test_green_rate_online(written_online):
    # 16 independent candidates, 4 channels: .811 of the hard counts, of 144 sentences here.
    results = online(tolerance=0, decay=math.inf).detect_batch(written_online, sampler=Grammar())
    counts = np.concatenate([result.counts for result in results])
    assert counts.shape == (144, 4)
    assert abs(counts.mean() - 0.811) < 0.05
    assert all(result.is_watermarked for result in results)
    z = (results[0].counts.sum() - 24) / math.sqrt(12)
    assert results[0].z == pytest.approx(z)
    # Fair counts: mean and deviation of the Gaussian model are those of a coin.
    assert results[0].z_calibrated == pytest.approx(z)


def test_parallel_channels_match_best():
    watermark = online(num_samples=64, selection="parallel")
    texts = watermark.generate_batch(Grammar(), [PROMPT] * 2, max_sentences=8)
    assert np.mean([row["matches"] for text in texts for row in text.trace]) / 4 > 0.95
    assert all("survivors" not in row for text in texts for row in text.trace)


def test_the_first_candidate_that_is_right_is_taken():
    whole = pool(64)
    key, watermark = KEY, offline()
    proxies = whole.embeddings @ key.pivots(64).T
    right = ((proxies >= 0) == key.bits(1)).all(axis=1)
    first = int(right.argmax())
    assert right[first:].sum() > 1
    known = watermark.thresholds([PROMPT], np.random.default_rng(0))[0]

    def ask(size, exhausted):
        part = Pool(1, whole.previous, whole.sentences[:size], whole.embeddings[:size], exhausted, 0, known)
        (selection,) = watermark.select([part], np.random.default_rng(size))
        return selection

    assert ask(64, False).index == ask(first + 1, False).index == first
    assert ask(first, False).index is None
    best = ask(first, True).index
    matches = ((proxies[:first] >= 0) == key.bits(1)).sum(axis=1)
    assert matches[best] == matches.max() == ask(first, True).record["matches"]


def test_offline_sampling_stops_early(written_offline):
    drawn = [row["drawn"] for text in written_offline for row in text.trace]
    # 16 draws on average, in chunks of 8, and 8 to 64 of them; 120 sentences.
    assert {n % 8 for n in drawn} == {0}
    assert 16 < np.mean(drawn) < 24
    assert np.mean([row["matches"] == 4 for text in written_offline for row in text.trace]) > 0.95
    results = offline().detect_batch([text.text for text in written_offline])
    assert min(result.z for result in results) > 5.5


def test_how_many_are_drawn_at_once_does_not_matter():
    class Fixed:
        def __init__(self):
            self.drawn = {}

        def sample(self, contexts, counts, *, is_complete=None, seed=None):
            rows = []
            for context, n in zip(contexts, counts, strict=True):
                at = self.drawn.get(context, 0)
                self.drawn[context] = at + n
                rows.append([Continuation(f" {SUBJECTS[i % 10]} has {i} coats. So") for i in range(at, at + n)])
            return rows

    sentences = [offline(chunk=chunk).generate(Fixed(), PROMPT, max_sentences=4).sentences for chunk in (1, 5, 64)]
    assert sentences[0] == sentences[1] == sentences[2]


def test_a_wrong_key_sees_nothing(written_offline):
    # 10 texts under 50 keys: hard counts of a coin.
    documents = offline().documents(written_offline)
    z = []
    for number in range(50):
        key = PMarkKey.generate(4, hashlib.sha256(b"wrong %d" % number).digest())
        z += [result.z for result in offline(key, tolerance=0, decay=math.inf).score(documents)]
    assert len(z) == 500
    assert abs(np.mean(z)) < 0.1
    assert abs(np.std(z) - 1) < 0.1


def test_soft_counts_are_biased_and_other_bits_show_by_how_much(written_offline):
    documents = offline().documents(written_offline)
    results = []
    for number in range(50):
        key = PMarkKey.generate(4, hashlib.sha256(b"other %d" % number).digest())
        results += offline(key).score(documents)
    assert np.mean([result.z for result in results]) > 0.1
    calibrated = np.array([result.z_calibrated for result in results])
    assert abs(np.mean(calibrated)) < 0.15
    assert abs(np.std(calibrated) - 1) < 0.1
    assert 0.02 < np.mean([result.is_watermarked for result in results]) < 0.08


def test_the_key_is_positional(written_offline):
    def shuffled(text, seed):
        order = np.random.default_rng(seed).permutation(len(text.sentences))
        return " ".join([text.prompt, *[text.sentences[i] for i in order]])

    results = offline().detect_batch([shuffled(text, seed) for seed, text in enumerate(written_offline)])
    assert np.mean([result.z for result in results]) < 1


def test_alignment_finds_what_a_deleted_sentence_hides(written_offline):
    texts = [" ".join([text.prompt, *text.sentences[1:]]) for text in written_offline[:8]]
    plain = offline().detect_batch(texts)
    assert abs(np.mean([result.z_calibrated for result in plain])) < 2
    found = offline().detect_batch(texts, align="window")
    assert np.mean([result.p_value <= 0.002 for result in found]) > 0.8
    assert found[0].reason == "aligned with the key"
    assert [row["shift"] for row in found[0].per_sentence].count(1) > 8
    unmarked = offline().detect_batch(plain_texts(40), align="window")
    assert np.mean([result.is_watermarked for result in unmarked]) < 0.2


def test_without_a_sentence_there_is_no_test():
    (result, blank) = offline().detect_batch([PROMPT, " \n"])
    for each in (result, blank):
        assert (each.p_value, each.p_calibrated, each.is_watermarked) == (1, 1, False)
        assert (each.reason, each.num_sentences, each.low_power) == ("no sentence to test", 0, True)
    assert result.counts.shape == (0, 4)
    assert [r.low_power for r in offline().detect_batch([plain_texts(1, n)[0] for n in (3, 4)])] == [True, False]
    assert offline().detect(" ".join([PROMPT, "It rained."]), has_prompt=False).num_sentences == 2


def test_lengths_of_embeddings_do_not_matter():
    def stretched(texts):
        return encode(texts) * np.array([[1e-3 + len(text)] for text in texts])

    same, other = (
        online(encoder=encoder).generate(Grammar(), PROMPT, max_sentences=4) for encoder in (encode, stretched)
    )
    assert same.sentences == other.sentences
    np.testing.assert_allclose(
        [row["proxies"] for row in same.trace], [row["proxies"] for row in other.trace], atol=1e-12
    )


def test_a_context_that_allows_one_sentence_only():
    script = CallableSampler(lambda context, n: [" It rained. Then"] * n)
    text = online().generate(script, PROMPT, max_sentences=5)
    assert [row["skipped"] for row in text.trace] == [True] * 5
    assert text.finish_reason == "length"
    # Nothing could be embedded, so nothing is counted: within the tolerance each would count as a whole one.
    result = online().detect(text, sampler=script)
    assert (result.num_sentences, result.p_value, result.is_watermarked) == (0, 1, False)
    assert result.reason == "5 of 5 sentences could carry no evidence"
    assert result.to_json()["counts"] == [[None] * 4] * 5
    assert not online().detect(text, sampler=script, align="window").is_watermarked


def test_sentences_without_evidence_are_left_out(written_online):
    class Stuck(Grammar):
        def sample(self, contexts, counts, **options):
            rows = super().sample(contexts, counts, **options)
            return [
                [Continuation(" It rained. So")] * len(row) if c.endswith("!") else row
                for c, row in zip(contexts, rows, strict=True)
            ]

    text = written_online[0].text
    cut = written_online[0].sentences[3]
    changed = text.replace(cut, cut[:-1] + "!", 1)
    result = online().detect(changed, sampler=Stuck())
    assert result.num_sentences == 11
    assert np.isnan(result.counts).all(axis=1).tolist() == [False] * 4 + [True] + [False] * 7
    assert result.z == pytest.approx((np.nansum(result.counts) - 22) / math.sqrt(11))


def test_a_draft_model_estimates_the_medians():
    watermark = online(encoder=leaning, draft=Grammar(), num_samples=32)
    text = watermark.generate(Grammar(), PROMPT, max_sentences=10)
    assert np.mean([row["drawn"] for row in text.trace]) < 32
    assert {"matches", "medians"} <= text.trace[0].keys()
    assert watermark.detect(text).z > 3
    silent = CallableSampler(lambda context, n: [])
    # Nothing to compare with but the middle of all directions.
    text = online(draft=silent).generate(Grammar(), PROMPT, max_sentences=2)
    assert text.trace[0]["medians"] == [0] * 4


def test_calibrated_medians_and_null():
    texts = plain_texts(60)
    measured = offline(encoder=leaning, prior="calibrated").calibrate(texts)
    assert (measured.num_texts, measured.key_id, measured.dimension) == (60, KEY.id, 64)
    assert measured.segmenter == "stops"
    watermark = offline(encoder=leaning, prior="calibrated", null=measured)
    # Half of unmarked sentences lie on either side of a domain's medians, few on one side of 0.
    sides = np.concatenate([result.thresholds for result in watermark.detect_batch(texts)])
    np.testing.assert_allclose(sides, np.tile(measured.medians, (720, 1)))
    others = watermark.detect_batch(plain_texts(60, seed=1))
    assert np.mean([result.is_watermarked for result in others]) < 0.15
    marked = watermark.generate(Grammar(), PROMPT)
    assert watermark.detect(marked).p_calibrated == pytest.approx(1 / 61)
    with pytest.raises(ValueError, match="prior='calibrated' needs a null with medians"):
        offline(prior="calibrated").generate(Grammar(), PROMPT)


def test_the_decision_is_that_of_the_nulls_threshold(written_offline):
    # 1/20 is the least p-value that 19 texts can show, and enough at this level.
    watermark = offline(null=offline().calibrate(plain_texts(19)), alpha=0.05)
    threshold = watermark.null.threshold(0.05)
    results = watermark.detect_batch([*written_offline, *plain_texts(20, seed=1)])
    assert [result.is_watermarked for result in results[:10]] == [True] * 10
    assert results[0].p_calibrated == 0.05
    assert [result.is_watermarked for result in results] == [result.z_calibrated > threshold for result in results]
    assert sum(result.is_watermarked for result in results[10:]) < 5


def test_a_null_measured_otherwise_is_warned_of(recwarn):
    watermark = offline()
    null = watermark.calibrate(plain_texts(5))
    assert null.medians is None
    assert not recwarn.list
    assert watermark.with_null(null).null is null
    assert watermark.null is None
    for other, what in (
        (offline(PMarkKey.generate(4)), "key_id"),
        (offline(encoder=leaning), "encoder"),
        (offline(segmenter="regex"), "segmenter"),
        (online(), "mode"),
        (offline(tolerance=0), "tolerance"),
        (offline(prior="calibrated"), "another prior"),
    ):
        with pytest.warns(UserWarning, match=what):
            other.with_null(null)
    with pytest.raises(ValueError, match="medians of 3 channels, the key has 4"):
        offline(prior="calibrated").with_null(Null(0.5, 0.5, medians=(0.0, 0.0, 0.0)))
    strange = watermark.with_null(Null(0.5, 0.5, dimension=32))
    with pytest.raises(ValueError, match="dimension 32, the encoder gives 64"):
        strange.detect(plain_texts(1)[0])


def test_online_calibration_draws(written_online):
    null = online().calibrate(plain_texts(4, 6), sampler=Grammar())
    assert (null.mode, null.num_texts) == ("online", 4)
    assert online(null=null).detect(written_online[0], sampler=Grammar()).p_calibrated == pytest.approx(1 / 5)
    with pytest.raises(ValueError, match="0 texts"):
        online().calibrate([PROMPT], sampler=Grammar())


@pytest.mark.parametrize("make", [online, offline])
def test_one_seed_gives_one_result(make):
    def run(seed):
        watermark = make(seed=seed)
        texts = watermark.generate_batch(Grammar(), [PROMPT, "It was a cold day."], max_sentences=4)
        return [text.text for text in texts], [r.z for r in watermark.detect_batch(texts, sampler=Grammar())]

    assert run(5) == run(5)
    assert run(5)[0] != run(6)[0]


def test_detection_draws_anew(written_online):
    # The draws of generation would come again under the same seed, and hold the sentence itself.
    seeds = []

    class Listening(Grammar):
        def sample(self, contexts, counts, *, is_complete=None, seed=None):
            seeds.append(seed)
            return super().sample(contexts, counts, seed=seed)

    text = online().generate(Listening(), PROMPT, max_sentences=2)
    written = set(seeds)
    online().detect(text, sampler=Listening())
    assert len(seeds) == 3
    assert seeds[2] not in written


def test_many_contexts_are_drawn_for_in_portions(written_online, monkeypatch):
    asked = []

    class Listening(Grammar):
        def sample(self, contexts, counts, **options):
            asked.append(list(contexts))
            return super().sample(contexts, counts, **options)

    monkeypatch.setattr("pmark.watermark._BLOCK", 16 * 9)
    results = online().detect_batch(written_online[:2], sampler=Listening())
    assert [len(contexts) for contexts in asked] == [9, 9, 6]
    assert asked[1][3] == PROMPT
    assert min(result.z for result in results) > 3


def test_nothing_secret_is_written(written_online):
    result = online().detect(written_online[0], sampler=Grammar())
    made = json.dumps([written_online[0].to_json(), result.to_json()], allow_nan=False)
    for form in (SECRET.decode(), SECRET.hex(), str(list(SECRET)), "bits"):
        assert form not in made
    settings = json.loads(made)[0]["settings"]
    assert settings["key_id"] == KEY.id
    assert (settings["mode"], settings["segmenter"]) == ("online", "stops")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 15}, "num_samples=15: 4 channels need at least 16"),
        ({"mode": "on"}, "mode"),
        ({"median": "mean"}, "median"),
        ({"selection": "both"}, "selection"),
        ({"prior": "flat"}, "prior"),
        ({"alpha": 1}, "alpha=1"),
        ({"tolerance": -1.0}, "tolerance=-1"),
        ({"mode": "offline", "draft": Grammar()}, "draft"),
        ({"prior": "calibrated"}, "prior='calibrated' is for mode='offline'"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        online(**options)


def test_a_key_too_wide_for_the_encoder():
    with pytest.raises(ValueError, match=r"70 channels.*dimension 64"):
        offline(PMarkKey.generate(70)).detect(plain_texts(1)[0])
    with pytest.raises(TypeError, match="key"):
        online("secret")


def test_online_detection_needs_a_model():
    with pytest.raises(ValueError, match="mode='offline'"):
        online().detect(plain_texts(1)[0])
    with pytest.raises(SamplerError, match="no sentence"):
        online().detect(plain_texts(1)[0], sampler=CallableSampler(lambda context, n: []))
    with pytest.raises((ValueError, TypeError), match="align"):
        offline().detect(plain_texts(1)[0], align="local")
