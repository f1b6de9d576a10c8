import math

import numpy as np
import pytest
import torch
from bodes_steer.metrics import (
    Perplexity,
    completion_log_probs,
    dist_n,
    encode_pair,
    head_input,
    paired_bootstrap,
    percentile,
    perplexity,
    true_and_informative,
    win_rate,
)
from hypothesis import given
from hypothesis import strategies as st
from separata_testing.models import tiny_model, tiny_tokenizer
from torch import nn

VALUES = st.integers(-3, 3).map(float)
PAIRS = st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=20)
PROMPTS = ["Once", "The sea is", "A"]
COMPLETIONS = [" upon a time", " blue", " b c d e f"]


def test_distinct_n_grams_are_counted_over_all_texts_together():
    assert dist_n(["a b a b"], 1) == 2 / 4
    assert dist_n(["a b a b"], 2) == 2 / 3
    assert dist_n(["a b", "a  b\n"], 2) == 1 / 2
    assert math.isnan(dist_n(["a b", ""], 3))


@given(PAIRS)
def test_what_one_side_wins_the_other_loses(pairs):
    ours, theirs = zip(*pairs, strict=True)
    rate = win_rate(ours, theirs)
    assert rate + win_rate(theirs, ours) == pytest.approx(1)
    assert rate * len(pairs) == pytest.approx(sum((a > b) + (a == b) / 2 for a, b in pairs))


def test_p90_and_true_x_info():
    assert percentile([float(value) for value in range(11)]) == 9.0
    assert percentile([0.0, 1.0]) == pytest.approx(0.9)
    # Half are true and half informative, but none both: no product of shares.
    assert true_and_informative([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]) == 0.0
    assert true_and_informative([0.9, 0.9, 0.5], [0.6, 0.4, 0.9]) == pytest.approx(1 / 3)


def test_bootstrap_intervals_are_those_of_the_normal_approximation():
    generator = np.random.default_rng(1)
    before = generator.normal(size=900)
    after = before + generator.normal(0.2, 1.0, size=900)
    found = paired_bootstrap(list(before), list(after))
    change = after - before
    half = 1.96 * change.std() / 30
    assert found.difference == pytest.approx(change.mean())
    assert found.interval == pytest.approx((change.mean() - half, change.mean() + half), abs=0.1 * half)
    assert found.p_value < 0.001
    assert (found.units, found.resamples) == (900, 10_000)
    assert found.to_json()["interval"] == list(found.interval)
    # Without pairs the interval would be far wider than this one.
    near = paired_bootstrap(list(before), list(before + 0.01 * change), resamples=500)
    assert near.interval[1] - near.interval[0] < 0.01


def test_bootstrap_without_a_change_and_with_the_same_one_everywhere():
    nothing = paired_bootstrap([0.1, 0.7, 0.3], [0.1, 0.7, 0.3], resamples=100)
    assert (nothing.difference, nothing.interval, nothing.p_value) == (0.0, (0.0, 0.0), 1.0)
    same = paired_bootstrap(range(20), range(1, 21), resamples=999)
    assert same.interval == (1.0, 1.0)
    assert same.p_value == 2 / 1000


def test_few_units_show_little_however_alike_they_change():
    assert paired_bootstrap([0.0], [1.0]).p_value == 1.0
    assert paired_bootstrap([0.0, 0.0], [1.0, 2.0]).p_value == 0.5


def test_bootstrap_is_that_of_the_exact_distribution():
    # The mean of 12 draws, by convolving one draw's distribution with itself; resampled in more than one block.
    change = np.array([-2, -2, -1, 0, 0, 0, 1, 1, 2, 2, 2, 2])
    one = np.bincount(change + 2, minlength=5) / 12
    exact = np.array([1.0])
    for _ in range(12):
        exact = np.convolve(exact, one)
    values = (np.arange(len(exact)) - 24) / 12
    found = paired_bootstrap([0.0] * 12, change.tolist(), resamples=100_000)
    share = exact.cumsum()
    # The exact quantile is a step; chance may take the one beside it.
    expected = values[np.searchsorted(share, [0.025, 0.975])]
    assert found.interval == pytest.approx(tuple(expected), abs=1.01 / 12)
    assert found.p_value == pytest.approx(2 * float(exact[values <= 0].sum()), rel=0.05)


@given(PAIRS)
def test_bootstrap_turns_its_sign_with_the_conditions(pairs):
    before, after = zip(*pairs, strict=True)
    one = paired_bootstrap(before, after, resamples=50)
    other = paired_bootstrap(after, before, resamples=50)
    assert one.difference == pytest.approx(-other.difference)
    assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))
    assert one.p_value == other.p_value
    assert one.interval[0] <= one.interval[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dist_n(["a"], 0), "n is 0"),
        (lambda: dist_n("a b", 1), "texts is one string"),
        (lambda: win_rate([1.0], [1.0, 2.0]), "scores has 1 values and baseline 2"),
        (lambda: win_rate([], []), "shape"),
        (lambda: win_rate([math.nan, 1.0], [1.0, 2.0]), "1 values of 2 that are not finite"),
        (lambda: percentile([1.0], 101), "percent is 101"),
        (lambda: paired_bootstrap([1.0], [1.0], resamples=0), "resamples is 0"),
        (lambda: paired_bootstrap([1.0], [1.0], confidence=1.0), "confidence is 1.0"),
        (lambda: completion_log_probs(nn.Identity(), None, ["a"], ["b"], batch_size=0), "batch_size is 0"),
        (lambda: completion_log_probs(nn.Identity(), None, ["a"], []), "1 prompts and 0 completions"),
        (lambda: perplexity(nn.Identity(), None, ["a"], []), "1 prompts and 0 completions"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def expected_log_probs(model, tokenizer, prompt, completion):
    ids = tokenizer(prompt + completion)["input_ids"]
    start = len(tokenizer(prompt)["input_ids"])
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return log_probs[range(start - 1, len(ids) - 1), ids[start:]]


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt2"])  # tied, capped, tied to transposed blocks
def test_completions_are_scored_as_by_the_models_own_logits(architecture):
    model, tokenizer = tiny_model(architecture), tiny_tokenizer()
    model.train()
    found = completion_log_probs(model, tokenizer, PROMPTS, COMPLETIONS, batch_size=2)
    assert model.training
    model.eval()
    for prompt, completion, each in zip(PROMPTS, COMPLETIONS, found, strict=True):
        torch.testing.assert_close(each, expected_log_probs(model, tokenizer, prompt, completion), atol=2e-5, rtol=1e-5)


def test_the_head_runs_at_one_position_and_its_hook_comes_off():
    model = tiny_model()
    shapes = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    hidden = head_input(model, input_ids=torch.ones(2, 7, dtype=torch.long))
    assert hidden.shape[:2] == (2, 7)
    assert shapes == [(2, 1, 272)]
    handle.remove()
    with pytest.raises(IndexError):
        head_input(model, input_ids=torch.full((2, 7), 10**6))
    assert not model.lm_head._forward_pre_hooks


def test_perplexity_is_over_all_tokens_and_empty_completions_have_none():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    found = perplexity(model, tokenizer, [*PROMPTS, "Nothing"], [*COMPLETIONS, ""])
    each = [expected_log_probs(model, tokenizer, *pair) for pair in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert found.tokens == (12, 5, 10, 0)
    assert found.value == pytest.approx(float(torch.cat(each).mean().neg().exp()), rel=1e-5)
    assert found.per_text[:3] == pytest.approx([float(values.mean().neg().exp()) for values in each], rel=1e-5)
    assert math.isnan(found.per_text[3])
    assert math.isnan(Perplexity((), ()).value)
    assert Perplexity((-2 * math.log(7),), (2,)).value == pytest.approx(7)


class Greedy:
    """A tokenizer that takes the longest piece it knows, and ends every text if it is told to."""

    def __init__(self, *pieces, end=None):
        self.pieces, self.eos_token_id, self.bos_token_id = pieces, end, None

    def __call__(self, text, add_special_tokens=True):
        ids = []
        while text:
            piece = max((each for each in self.pieces if text.startswith(each)), key=len)
            ids.append(self.pieces.index(piece))
            text = text[len(piece) :]
        end = [] if self.eos_token_id is None or not add_special_tokens else [self.eos_token_id]
        return {"input_ids": ids + end}


def test_a_token_across_the_border_belongs_to_all_completions():
    tokenizer = Greedy("Q", ":", ": y", " ", "y", "n")
    assert encode_pair(tokenizer, "Q:", [" n", " nn"]) == ([0, 1], [[3, 5], [3, 5, 5]])
    # ": y" is one token, so that the others are scored from their ":" on, too.
    assert encode_pair(tokenizer, "Q:", [" n", " y"]) == ([0], [[1, 3, 5], [2]])
    # Nothing of the prompt would be left.
    assert encode_pair(tokenizer, ":", [" y", "n"]) == ([1], [[3, 4], [5]])
    with pytest.raises(ValueError, match="prompt '' has no tokens"):
        encode_pair(tokenizer, "", [" y"])
    with pytest.raises(ValueError, match="completion '' adds no token"):
        encode_pair(tokenizer, "Q", [""])


def test_an_end_token_is_dropped():
    tokenizer = Greedy("a", "b", end=9)
    assert encode_pair(tokenizer, "a", ["b"]) == ([0], [[1]])
