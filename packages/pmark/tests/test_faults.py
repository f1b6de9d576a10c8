"""Samplers that fail, encoders that give nonsense, texts that are none: an answer or an error, never a hang."""

import itertools
import time
import warnings

import numpy as np
import pytest
from pmark.key import PMarkKey
from pmark.samplers import CallableSampler, Continuation
from pmark.watermark import PMark

CHINESE = ["我去了市场。", "今天下雨了！", "你呢？", "明天见。"]  # noqa: RUF001  Chinese stops
KEY = PMarkKey.generate(2, b"0123456789abcdef")
PROMPT = "Once there was a town."


def encode(texts):
    return np.stack([np.cos(np.arange(8) * (1 + sum(map(ord, text)))) for text in texts])


def watermark(**options):
    return PMark(encode, KEY, **{"num_samples": 8, "seed": 0, **options})


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def birds(context, count):
    return [f" He saw {number} birds. Then" for number in range(count)]


class Failing:
    """Raises at some calls, counted from 1, and gives `birds` at the others."""

    def __init__(self, failures):
        self.failures, self.calls = failures, 0

    def sample(self, contexts, counts, *, is_complete=None, seed=None):
        self.calls += 1
        if self.calls in self.failures:
            raise ConnectionError("gone")
        return CallableSampler(birds).sample(contexts, counts)


def test_a_passing_failure_costs_a_pause(no_waiting):
    sampler = Failing({1, 3})
    text = watermark().generate(sampler, PROMPT, max_sentences=3)
    assert (len(text.sentences), text.finish_reason, text.samples) == (3, "length", 24)
    assert sampler.calls == 5
    assert len(no_waiting) == 2


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_sampler_that_dies_ends_the_text(mode):
    sampler = Failing(range(3, 1000))
    with pytest.warns(UserWarning, match="gone"):
        text = watermark(mode=mode, chunk=None).generate(sampler, PROMPT)
    assert text.finish_reason == "sampler_exhausted"
    assert 1 <= len(text.sentences) <= 2
    assert text.round_trips
    # It is asked again five times, and then no more.
    assert sampler.calls == 2 + 1 + 5


def test_one_document_that_cannot_go_on_leaves_the_others():
    def draw(context, count):
        if context.startswith("Bad"):
            raise ValueError("too long")
        return birds(context, count)

    with pytest.warns(UserWarning, match="too long"):
        texts = watermark().generate_batch(CallableSampler(draw), [PROMPT, "Bad luck.", PROMPT], max_sentences=2)
    assert [text.finish_reason for text in texts] == ["length", "sampler_exhausted", "length"]
    assert [len(text.sentences) for text in texts] == [2, 0, 2]


@pytest.mark.parametrize(
    ("give", "left"),
    [
        # A server that ignores the number is asked until it has given 8.
        (lambda context, count: birds(context, 1), 8),
        (lambda context, count: birds(context, count + 3), 8),
        (lambda context, count: [" It rained. Then"] * count, 8),
    ],
)
def test_fewer_than_asked_and_nothing_but_duplicates(give, left):
    text = watermark().generate(CallableSampler(give), PROMPT, max_sentences=2)
    assert [row["candidates"] for row in text.trace] == [left, left]
    assert (len(text.sentences), text.finish_reason) == (2, "length")


def test_what_is_there_is_enough_if_the_channels_can_be_halved():
    def limited(most):
        calls = itertools.count()
        return CallableSampler(lambda context, count: birds(context, most) if next(calls) == 0 else [])

    enough = watermark(redraws=0).generate(limited(4), PROMPT, max_sentences=1)
    assert (enough.trace[0]["candidates"], enough.trace[0]["survivors"]) == (4, [2, 1])
    short = watermark(redraws=0).generate(limited(3), PROMPT, max_sentences=1)
    assert (short.sentences, short.finish_reason, short.samples) == ([], "sampler_exhausted", 3)


@pytest.mark.parametrize("text", ["", "   ", "\n\n", "\t"])
def test_empty_continuations_end_the_text(text):
    calls = itertools.count()

    def give(context, count):
        next(calls)
        return [text] * count

    result = watermark(redraws=5).generate(CallableSampler(give), PROMPT)
    assert (result.text, result.finish_reason) == (PROMPT, "sampler_exhausted")
    assert next(calls) == 1 + 5
    assert result.samples == 6 * 8


@pytest.mark.parametrize(("ends", "reason"), [(5, "eos"), (2, "sampler_exhausted")])
def test_a_model_that_would_rather_end_ends_the_text(ends, reason):
    # Three candidates of the four that two channels need.
    drawn = [*birds("", 3), *[Continuation("", ended=True)] * ends, *[" "] * (5 - ends)]
    calls = itertools.count()
    sampler = CallableSampler(lambda context, count: drawn if next(calls) == 0 else [])
    assert watermark(redraws=0).generate(sampler, PROMPT).finish_reason == reason


def test_an_open_prompt_that_nobody_finishes():
    sampler = CallableSampler(lambda context, count: [" and"] * count if len(context) < 10 else [])
    text = watermark().generate(sampler, "And Mr.")
    assert text.finish_reason in ("sampler_exhausted", "eos")
    nothing = watermark().generate(CallableSampler(lambda context, count: []), "It was")
    assert (nothing.text, nothing.finish_reason, nothing.samples) == ("It was", "sampler_exhausted", 0)


def test_duplicates_only_and_no_repetition_wanted():
    same = CallableSampler(lambda context, count: [" It rained. Then"] * count)
    text = watermark(deduplicate=True).generate(same, PROMPT)
    assert (text.finish_reason, text.samples) == ("sampler_exhausted", 8 + 5 * 7)


def test_embeddings_that_are_none():
    def broken(texts):
        return np.where(np.array([["7" in text] for text in texts]), np.nan, encode(texts))

    with pytest.raises(ValueError, match=r"NaN or infinity for texts\[7\]"):
        PMark(broken, KEY, num_samples=8).generate(CallableSampler(birds), PROMPT)
    with pytest.raises(ValueError, match=r"NaN or infinity for texts\[2\]"):
        PMark(broken, KEY, mode="offline").detect_batch(["It rained. It snowed.", "I saw 7 birds."])


TEXTS = {
    "no stop": "word " * 3000,
    "one word": "x" * 20_000,
    "code": "def f(x):\n    return x[0].y(1.5)\n\nprint(f([2.5]))  # twice.\n" * 20,
    "list": "1. Milk\n2. Bread\n3. A. B. Smith\n- e.g. this\n* that" * 20,
    "other": "".join(CHINESE) * 20,
    "surrogate": "It rained. \ud800 fell. It snowed.",
    "quotes": '"' * 5000,
}


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_that_are_hardly_sentences(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = watermark(mode="offline").detect(TEXTS[kind], has_prompt=False)
    assert result.num_sentences >= 1
    assert 0 <= result.p_value <= 1
    assert result.low_power == (result.num_sentences < 4)


def test_chinese_is_cut_by_its_own_rules():
    result = watermark(mode="offline", language="zh").detect("".join(CHINESE))
    assert [row["sentence"] for row in result.per_sentence] == CHINESE[1:]
    calls = itertools.count(1)
    sampler = CallableSampler(lambda context, count: [f"他有{next(calls)}只鸟。然后" for _ in range(count)])
    written = watermark(language="zh").generate(sampler, CHINESE[0], max_sentences=3)
    assert (len(written.sentences), written.round_trips) == (3, True)


def test_a_key_from_a_table_ends():
    key = PMarkKey.from_authors([0, 1] * 4, channels=2)
    with pytest.raises(ValueError, match="ends at sentence 3"):
        PMark(encode, key, num_samples=8, seed=0).generate(CallableSampler(birds), PROMPT)
    assert len(PMark(encode, key, num_samples=8).generate(CallableSampler(birds), PROMPT, max_sentences=3).trace) == 3


def test_a_sampler_of_the_wrong_kind():
    class Texts:
        def sample(self, contexts, counts, *, is_complete=None, seed=None):
            return [["a text"] * n for n in counts]

    with pytest.raises(OSError, match="Continuation"):
        watermark().generate(Texts(), PROMPT)
    ended = CallableSampler(lambda context, count: [Continuation("", ended=True)] * count)
    assert watermark().generate(ended, PROMPT).finish_reason == "eos"
