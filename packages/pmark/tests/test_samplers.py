"""Asking a sampler until there are enough."""

import time

import jaxtyping
import pytest
from pmark.samplers import CallableSampler, Continuation, Remembering, SamplerError, check_sampling, draw, spread_seed


@pytest.fixture
def unchecked():
    """Takes the run-time check of annotations away, which would refuse a wrong argument first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


class Scripted:
    """Answers as the script says, call by call: an error to raise, or how many of those asked to give."""

    def __init__(self, *script):
        self.script = list(script)
        self.calls = []

    def sample(self, contexts, counts, *, is_complete=None, seed=None):
        self.calls.append((list(contexts), list(counts), seed))
        step = self.script.pop(0) if self.script else 1.0
        if isinstance(step, Exception):
            raise step
        marks = [[is_complete(i, c) for i, c in enumerate(contexts)]] if is_complete else []
        self.marks = marks
        return [
            [Continuation(f"{context}{len(self.calls)}.{k}") for k in range(int(count * step))]
            for context, count in zip(contexts, counts, strict=True)
        ]


def test_a_function_is_a_sampler(unchecked):
    sampler = CallableSampler(lambda context, n: [Continuation(context, ended=True)] + [f" {context}"] * (n - 1))
    assert sampler.sample(["a", "b"], [2, 1]) == [
        [Continuation("a", ended=True), Continuation(" a")],
        [Continuation("b", ended=True)],
    ]
    with pytest.raises(TypeError, match="callable with a context and a number"):
        CallableSampler("a text")
    with pytest.raises(SamplerError, match="list of texts"):
        draw(CallableSampler(lambda context, n: "one text"), ["a"], [2])


def test_one_call_serves_all_contexts():
    sampler = Scripted()
    rows = draw(sampler, ["a", "b"], [2, 3], seed=5)
    assert [len(row) for row in rows] == [2, 3]
    assert sampler.calls == [(["a", "b"], [2, 3], 5)]


def test_what_is_missing_is_asked_for_again_with_another_seed():
    sampler = Scripted(0.5, 0.5)
    rows = draw(sampler, ["a", "b"], [4, 0], seed=5)
    assert [len(row) for row in rows] == [4, 0]
    assert [counts for _, counts, _ in sampler.calls] == [[4], [2], [1]]
    assert len({seed for _, _, seed in sampler.calls}) == 3
    assert len({c.text for c in rows[0]}) == 4
    assert draw_calls(5) == sampler.calls


def draw_calls(seed):
    sampler = Scripted(0.5, 0.5)
    draw(sampler, ["a", "b"], [4, 0], seed=seed)
    return sampler.calls


def test_more_than_asked_is_cut_and_less_for_ever_ends():
    assert draw(Scripted(2.0), ["a"], [2]) == [[Continuation("a1.0"), Continuation("a1.1")]]
    nothing = Scripted(*[0.0] * 10)
    assert draw(nothing, ["a"], [2], retries=3) == [[]]
    assert len(nothing.calls) == 4


def test_errors_pass_after_pauses_that_double(monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    sampler = Scripted(RuntimeError("busy"), TimeoutError(), RuntimeError("busy"))
    assert [len(row) for row in draw(sampler, ["a"], [2], wait=0.5)] == [2]
    assert pauses == [0.5, 1.0, 2.0]


def test_an_error_that_stays_ends_with_what_there_is_and_one_warning(monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    sampler = Scripted(0.5, *[RuntimeError("down for repair")] * 9)
    with pytest.warns(UserWarning, match="1 of 1 contexts.*down for repair") as caught:
        rows = draw(sampler, ["a"], [2], retries=3)
    assert len(caught) == 1
    assert [len(row) for row in rows] == [1]
    assert len(sampler.calls) == 4
    assert len(pauses) == 2  # none after the last failure


def test_one_context_that_cannot_be_continued_costs_the_others_nothing():
    calls = []

    def refuse_long(context, n):
        calls.append(context)
        if len(context) > 3:
            raise ValueError(f"{context} is too long")
        return [context] * n

    with pytest.warns(UserWarning, match="1 of 3 contexts.*ValueError: long is too long"):
        rows = draw(CallableSampler(refuse_long), ["a", "long", "b"], [1, 2, 1], wait=100)
    assert [len(row) for row in rows] == [1, 0, 1]
    assert calls.count("long") == 2


def test_rows_keep_their_contexts_own_end_when_asked_one_by_one():
    sampler = Scripted(ValueError("one of them"))
    asked = []
    draw(sampler, ["a", "b"], [1, 1], is_complete=lambda i, text: asked.append((i, text)) or True, seed=1)
    assert asked == [(0, "a"), (1, "b")]
    assert [contexts for contexts, _, _ in sampler.calls] == [["a", "b"], ["a"], ["b"]]


def test_what_can_never_work_is_raised_at_once(unchecked):
    sampler = Scripted(SamplerError("no such model"))
    with pytest.raises(SamplerError, match="no such model"):
        draw(sampler, ["a"], [1])
    assert len(sampler.calls) == 1

    class Wrong:
        def __init__(self, answer):
            self.answer = answer

        def sample(self, contexts, counts, *, is_complete=None, seed=None):
            return self.answer

    missing = Scripted(ModuleNotFoundError("install it"))
    with pytest.raises(ImportError, match="install it"):
        draw(missing, ["a"], [1])
    for answer, message in (
        ([], "each of the 1 contexts"),
        ([["text"]], "not str"),
        (None, "must return a list"),
        ([None], "must return a list"),
    ):
        with pytest.raises(SamplerError, match=message):
            draw(Wrong(answer), ["a"], [1])


@pytest.mark.parametrize("counts", [[1], [1, -1]])
def test_counts_that_do_not_fit_are_refused(counts):
    with pytest.raises(ValueError, match="a number >= 0 for each of the 2 contexts"):
        draw(Scripted(), ["a", "b"], counts)


def test_settings_out_of_range_are_refused():
    check_sampling(0.7, 1.0, 1)
    for settings, name in (
        ((0.0, 0.9, 5), "temperature"),
        ((float("nan"), 0.9, 5), "temperature"),
        ((1.0, 0.0, 5), "top_p"),
        ((1.0, 1.1, 5), "top_p"),
        ((1.0, 0.9, 0), "max_new_tokens"),
    ):
        with pytest.raises(ValueError, match=name):
            check_sampling(*settings)


def test_seeds_of_one_differ_and_are_the_same_each_time():
    seeds = spread_seed(3, 0, 50)
    assert len(set(seeds)) == 50
    assert seeds[10:12] == spread_seed(3, 10, 2)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert spread_seed(None, 0, 2) == [None, None]


def test_what_was_drawn_is_remembered_by_context_number_and_seed():
    asked = []

    class Counting:
        def sample(self, contexts, counts, *, is_complete=None, seed=None):
            asked.append(([*contexts], [*counts], seed))
            assert is_complete is None or is_complete(0, contexts[0])
            return [
                [Continuation(f"{context} {seed} {i}") for i in range(count)]
                for context, count in zip(contexts, counts, strict=True)
            ]

    sampler = Remembering(Counting())
    contexts = ["a", "b", "c"]
    first = sampler.sample(contexts[:1], [2], seed=1)
    # The index that is asked about is that of the whole call.
    both = sampler.sample(contexts[:2], [2, 1], seed=1, is_complete=lambda i, text: text == contexts[i])
    assert both[0] == first[0]
    assert sampler.sample(contexts[:2], [2, 1], seed=1) == both
    sampler.sample(contexts[:1], [3], seed=1)
    sampler.sample(contexts[:1], [2], seed=2)
    assert asked == [(["a"], [2], 1), (["b"], [1], 1), (["a"], [3], 1), (["a"], [2], 2)]
