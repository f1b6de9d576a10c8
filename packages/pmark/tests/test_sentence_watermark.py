import hashlib
import json
import re
import tracemalloc
import warnings
from itertools import count, cycle, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pmark.samplers import CallableSampler, Continuation
from pmark.sentence_watermark import Document, Pool, Selection, SentenceWatermark, Unmarked

PROMPT = "Once there was a town."


def encode(texts):
    seeds = [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") for text in texts]
    return np.stack([np.random.default_rng(seed).standard_normal(16) for seed in seeds])


class Script:
    """Gives for every request the next line of a script, and remembers what it was asked."""

    def __init__(self, *lines):
        self.lines, self.asked = list(lines), []

    def sample(self, contexts, counts, *, is_complete=None, seed=None):
        self.asked.append((list(contexts), list(counts)))
        line = self.lines[min(len(self.asked), len(self.lines)) - 1]
        line = [each if isinstance(each, Continuation) else Continuation(each) for each in line]
        return [list(islice(cycle(line), n)) for n in counts]


class Longest(SentenceWatermark):
    """Takes the longest candidate of all that may be drawn."""

    def select(self, pools, rng):
        best = [int(np.argmax([len(text) for text in pool.sentences])) for pool in pools]
        return [
            Selection(index if pool.exhausted else None, {"of": len(pool.sentences)})
            for pool, index in zip(pools, best, strict=True)
        ]

    def score(self, documents):
        raise AssertionError("there is nothing to score")


def unmarked(**options):
    return Unmarked(encode, **{"num_samples": 2, "seed": 0, **options})


def test_documents_are_written_in_step():
    numbers = count(1)
    asked = []

    def draw(context, n):
        asked.append(context)
        return [f" Sentence {next(numbers)} came. More" for _ in range(n)]

    texts = unmarked().generate_batch(CallableSampler(draw), [PROMPT, "It was cold. It snowed."], max_sentences=3)
    assert texts[0].sentences == ["Sentence 1 came.", "Sentence 5 came.", "Sentence 9 came."]
    assert texts[0].text == " ".join([PROMPT, *texts[0].sentences])
    assert asked == [
        PROMPT,
        "It was cold. It snowed.",
        f"{PROMPT} Sentence 1 came.",
        "It was cold. It snowed. Sentence 3 came.",
        f"{PROMPT} Sentence 1 came. Sentence 5 came.",
        "It was cold. It snowed. Sentence 3 came. Sentence 7 came.",
    ]
    assert [text.finish_reason for text in texts] == ["length", "length"]
    assert [text.samples for text in texts] == [6, 6]
    assert all(text.round_trips for text in texts)
    assert [row["number"] for row in texts[1].trace] == [1, 2, 3]


def test_candidates_are_cut_and_cleaned():
    script = Script(["  She said “go” to all who had come from there\nand left", " It rained. It snowed."], [" X."])
    text = Longest(encode, num_samples=2).generate(script, PROMPT, max_sentences=1)
    assert text.sentences == ['She said "go" to all who had come from there and left.']


def test_the_text_ends_with_a_chosen_sentence_that_the_model_ended():
    script = Script(
        [Continuation(" It rained. It snowed.", ended=True)],
        [Continuation(" It was dark.", ended=True), " It was bright."],
    )
    text = unmarked().generate(script, PROMPT, max_sentences=5)
    assert text.sentences == ["It rained.", "It was dark."]
    assert text.finish_reason == "eos"


def test_the_text_ends_where_the_model_says_nothing_more():
    script = Script([" It rained. So"] * 2, [Continuation("", ended=True)] * 2)
    text = unmarked(redraws=2).generate(script, PROMPT)
    assert (text.sentences, text.finish_reason) == (["It rained."], "eos")
    assert len(script.asked) == 1 + 1 + 2


def test_what_would_not_be_found_again_is_dropped():
    # Behind "Dr." no segmenter sees a boundary, so the next sentence would be swallowed.
    script = Script([" He met Dr.", " He met a friend. Then"])
    watermark = Longest(encode, num_samples=2, redraws=0)
    text = watermark.generate(script, PROMPT, max_sentences=1)
    assert (text.sentences, text.trace[0]["candidates"]) == (["He met a friend."], 1)
    loose = Longest(encode, num_samples=2, round_trip=False)
    assert loose.generate(script, PROMPT, max_sentences=1).trace[0]["candidates"] == 2


def test_a_text_says_when_its_sentences_are_not_found():
    class Quotes:
        """Knows curly quotes only, which cleaning makes straight."""

        name = "quotes"

        def split(self, text):
            return [part.strip() for part in re.findall(r"(?:“[^”]*”|[^.“])+\.?", text) if part.strip()]

    script = Script([" “Go. Now” he said. Then"])
    text = unmarked(segmenter=Quotes(), round_trip=False).generate(script, PROMPT, max_sentences=1)
    assert text.sentences == ['"Go. Now" he said.']
    assert not text.round_trips
    filtered = unmarked(segmenter=Quotes()).generate(script, PROMPT)
    assert (filtered.sentences, filtered.finish_reason) == ([], "sampler_exhausted")


@pytest.mark.parametrize(
    ("usable", "rounds", "reason"),
    [
        (8, [8], "length"),
        # 4 of 8 are left; 11 are wanted, or all 8 when no more are drawn.
        (4, [8, 4], "length"),
        (0, [8, 8, 8, 8], "sampler_exhausted"),
    ],
)
def test_more_are_drawn_when_too_few_are_left(usable, rounds, reason):
    good = [f" The {animal} slept. Then" for animal in ("cat", "dog", "cow", "hen", "pig", "fox", "owl", "bee")]
    script = Script([*good[:usable], *["  "] * (8 - usable)], good)
    script.lines = script.lines if usable else script.lines[:1]
    text = Longest(encode, num_samples=8, redraws=3).generate(script, PROMPT, max_sentences=1)
    assert [counts for _, counts in script.asked] == [[n] for n in rounds]
    assert text.finish_reason == reason
    assert text.samples == sum(rounds)


def test_chunks_are_drawn_until_something_is_chosen():
    script = Script([" A cat slept. Then"] * 3, [" A dog slept. Then"] * 3, [" An elephant slept. Then"] * 3)
    text = Longest(encode, num_samples=8, chunk=3).generate(script, PROMPT, max_sentences=1)
    assert [counts for _, counts in script.asked] == [[3], [3], [2]]
    assert text.sentences == ["An elephant slept."]
    assert text.trace[0]["of"] == text.trace[0]["candidates"] == text.samples == 8


def test_asking_more_of_an_exhausted_pool_is_an_error():
    class Undecided(Longest):
        def select(self, pools, rng):
            return [Selection(None) for _ in pools]

    with pytest.raises(RuntimeError, match="exhausted"):
        Undecided(encode, num_samples=4, chunk=2).generate(Script([" It rained. Then"] * 2), PROMPT)


def test_deduplication_is_by_choice():
    same = Script([" It rained. Then"] * 4)
    assert Longest(encode, num_samples=4).generate(same, PROMPT, max_sentences=1).trace[0]["candidates"] == 4
    few = Longest(encode, num_samples=4, deduplicate=True, redraws=1).generate(same, PROMPT, max_sentences=1)
    assert few.trace[0]["candidates"] == 1


def test_pools_carry_the_sentence_before():
    seen = []

    class Watching(Longest):
        def select(self, pools, rng):
            seen.extend((pool.number, pool.document, pool.previous) for pool in pools)
            return [Selection(0) for _ in pools]

    prompts = [PROMPT, "It was cold. It snowed."]
    texts = Watching(encode, num_samples=1).generate_batch(Script([" It rained. Then"]), prompts, max_sentences=2)
    before = [PROMPT, "It snowed.", *[text.sentences[0] for text in texts]]
    assert [(number, document) for number, document, _ in seen] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    expected = encode(before)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose([previous for _, _, previous in seen], expected)


def test_a_prompt_that_stops_within_a_sentence_is_finished_first():
    script = Script([" a king of Spain. He"], [" He slept well. Then"], [" It rained. Then"])
    text = unmarked().generate(script, "Once upon a time there lived ", max_sentences=2)
    assert text.text == "Once upon a time there lived a king of Spain. He slept well. It rained."
    assert (text.opening, text.prompt) == (" a king of Spain.", "Once upon a time there lived")
    assert text.sentences == ["He slept well.", "It rained."]
    (document,) = unmarked().documents([text])
    assert document.sentences == text.sentences
    assert document.contexts[0] == document.prompt == "Once upon a time there lived a king of Spain."
    ended = unmarked().generate(Script([Continuation(" a king", ended=True)]), "There was")
    assert (ended.text, ended.finish_reason) == ("There was a king.", "eos")
    assert unmarked().detect(ended).reason == "no sentence to test"


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        ({"max_sentences": 3}, 3),
        # Three words each.
        ({"max_sentences": 2, "min_tokens": 8}, 3),
        ({"max_sentences": 2, "min_tokens": 9}, 4),
        ({"max_sentences": 9, "max_tokens": 5}, 2),
        ({"max_sentences": 2, "min_tokens": 4, "count_tokens": lambda text: 0}, 5),
    ],
)
def test_where_a_text_ends(options, sentences):
    text = unmarked().generate(Script([" It rained again. Then"]), PROMPT, **options)
    assert (len(text.sentences), text.finish_reason) == (sentences, "length")


def test_detection_sees_what_generation_saw():
    asked = []

    def draw(context, n):
        asked.append(context)
        return [f" He saw {len(context)} birds\nand “a fox”. Then"] * n

    prompt = "A title\n\nIt was cold. It snowed."
    text = unmarked(num_samples=1).generate(CallableSampler(draw), prompt, max_sentences=4)
    watermark = unmarked()
    for either in (text, text.text):
        (document,) = watermark.documents([either], prompts=[prompt])
        assert document.contexts == asked
        assert document.sentences == text.sentences
        assert document.prompt == prompt
    units = encode([*text.sentences])
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    np.testing.assert_allclose(document.embeddings, units)
    np.testing.assert_allclose(document.previous[1:], units[:-1])
    # The text may come without its prompt.
    (alone,) = watermark.documents([text.text[len(prompt) :]], prompts=[prompt])
    assert (alone.contexts, alone.sentences) == (asked, text.sentences)


def test_a_long_text_takes_no_more_memory_than_it_is_long():
    text = " ".join(f"Number {index} came." for index in range(4000))
    watermark = unmarked(segmenter="regex")
    watermark.documents([text])  # what is remembered of sentences counts once
    tracemalloc.start()
    (document,) = watermark.documents([text])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(document.sentences) == 3999
    assert peak < 200 * len(text)


def test_without_a_prompt_every_sentence_is_tested():
    watermark = unmarked()
    text = "It rained. It snowed. It was dark."
    (document,) = watermark.documents([text], has_prompt=False)
    assert document.sentences == ["It rained.", "It snowed.", "It was dark."]
    assert document.contexts == ["", "It rained.", "It rained. It snowed."]
    assert not document.previous[0].any()
    (document,) = watermark.documents([text])
    assert document.sentences == ["It snowed.", "It was dark."]
    assert document.prompt == "It rained."


WORDS = st.lists(st.sampled_from(["Mr.", "it", "He", '"yes"', "3.5", "e.g.", "ran", "\n", "..", "U.S.", "?", "(so"]))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(WORDS.map(lambda words: " " + " ".join(words)), min_size=4, max_size=4),
    st.sampled_from([PROMPT, "And so it", "1. Buy milk", "def f(x):\n    return x"]),
)
def test_what_was_written_is_found(continuations, prompt):
    text = unmarked(num_samples=4, redraws=1).generate(Script(continuations), prompt, max_sentences=3)
    assert text.round_trips
    assert text.finish_reason in ("length", "sampler_exhausted", "eos")
    assert unmarked().documents([text])[0].sentences == text.sentences
    assert json.loads(json.dumps(text.to_json(), allow_nan=False))["sentences"] == text.sentences


def test_one_seed_gives_one_text():
    class Chance(Longest):
        def select(self, pools, rng):
            return [Selection(int(rng.integers(len(pool.sentences)))) for pool in pools]

    def sample(contexts, counts, *, is_complete=None, seed=None):
        rng = np.random.default_rng(seed)
        return [[Continuation(f" He saw {rng.integers(10**6)} birds. Then") for _ in range(n)] for n in counts]

    script = Script([])
    script.sample = sample

    def write(seed):
        return [t.text for t in Chance(encode, num_samples=4, seed=seed).generate_batch(script, [PROMPT] * 2)]

    assert write(3) == write(3)
    assert len({*write(3), *write(4), *write(None), *write(None)}) == 8


def test_what_made_a_text_is_compared():
    text = unmarked().generate(Script([" It rained. Then"]), PROMPT, max_sentences=1)
    assert text.settings["segmenter"] == unmarked().segmenter.name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unmarked().detect(text)
    with pytest.warns(UserWarning, match="segmenter 'pysbd:en', but this is 'regex:en'"):
        unmarked(segmenter="regex").detect(text)
    with pytest.warns(UserWarning, match="made with encoder"):
        Unmarked(lambda texts: encode(texts)[:, ::-1], num_samples=1).detect(text)


@pytest.mark.parametrize("argument", ["num_samples", "chunk", "redraws", "min_candidates", "seed"])
def test_numbers_out_of_range(argument):
    with pytest.raises(ValueError, match=f"{argument}=-1"):
        unmarked(**{argument: -1})


def test_texts_that_are_none():
    watermark, script = unmarked(), Script([" It rained. Then"])
    with pytest.raises(TypeError, match="prompts is one string"):
        watermark.generate_batch(script, PROMPT)
    # Run-time type checks, which look at one element at random, may say it first in their own words.
    with pytest.raises(TypeError):
        watermark.generate_batch(script, [PROMPT, None])
    with pytest.raises(ValueError, match=r"prompts\[0\]=' ': is empty"):
        watermark.generate(script, " ")
    with pytest.raises(ValueError, match="max_sentences=0"):
        watermark.generate(script, PROMPT, max_sentences=0)
    with pytest.raises(TypeError):
        watermark.detect_batch(["a", 7])
    with pytest.raises(TypeError, match="texts is one string"):
        watermark.detect_batch("It rained. It snowed.")
    with pytest.raises(TypeError, match="prompts is one string"):
        watermark.detect_batch(["a", "b"], prompts="ab")
    with pytest.raises(ValueError, match="1 prompts for 2 texts"):
        watermark.detect_batch(["a", "b"], prompts=["a"])
    assert watermark.detect_batch([]) == []
    assert watermark.generate_batch(script, []) == []


def test_dataclasses_hold_what_they_say():
    pool = Pool(1, np.zeros(2), ["a"], np.zeros((1, 2)), True, 0)
    assert pool.thresholds is None
    assert Document("", ["a"], np.zeros((1, 2)), np.zeros((1, 2)), "a", [0]).sentences == ["a"]
