import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from separata_core.attention import attention_with_key_bias
from zerotuning.operator import (
    clamp_log_gamma,
    reweight,
    scale_keys,
    scale_queries,
    start_indices,
    start_indices_4d,
    visible,
    warn_if_extreme,
)

# Query heads 2, key/value heads 1, three tokens, width 2.
QUERY = torch.tensor([[[[1, 0], [0, 1], [1, 1]], [[0, 1], [1, 0], [1, -1]]]], dtype=torch.float64)
KEY = torch.tensor([[[[1, 0], [0, 1], [1, -1]]]], dtype=torch.float64)
VALUE = torch.tensor([[[[1, 0], [0, 1], [2, 2]]]], dtype=torch.float64)
GAMMA = torch.tensor([2.0, 0.5], dtype=torch.float64)


def one_row(*weights: float) -> torch.Tensor:
    return torch.tensor(weights, dtype=torch.float64)[None, None, None]


def log(gamma: float) -> torch.Tensor:
    return torch.tensor([math.log(gamma)], dtype=torch.float64)


def causal_weights(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    logits = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -math.inf).softmax(-1)


@pytest.mark.parametrize(
    ("gamma", "expected"), [(2.0, [2 / 3, 0.2, 2 / 15]), (0.5, [1 / 3, 0.4, 4 / 15]), (1.0, [0.5, 0.3, 0.2])]
)
def test_three_weights(gamma, expected):
    result = reweight(one_row(0.5, 0.3, 0.2), log(gamma))[0, 0, 0]
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=0)


def test_gap_of_the_others_shrinks_as_the_paper_says():
    row = reweight(one_row(0.5, 0.3, 0.2), log(2.0))[0, 0, 0]
    assert (0.3 - 0.2) - float(row[1] - row[2]) == pytest.approx(0.1 * 1 * 0.5 / 1.5, abs=1e-7)


def test_grouped_heads_untouched():
    weights = causal_weights(QUERY, KEY)
    expected = torch.tensor([[0.401112, 0.401112, 0.197776], [0.305695, 0.074320, 0.619985]], dtype=torch.float64)
    torch.testing.assert_close(reweight(weights, torch.zeros(2))[0, :, 2], expected, atol=1e-6, rtol=0)
    output = attention_with_key_bias(QUERY, KEY, VALUE, torch.zeros(2), is_causal=True)[0, :, 2]
    expected = torch.tensor([[0.796664, 0.796664], [1.545665, 1.314290]], dtype=torch.float64)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)


def test_grouped_heads_by_hand():
    weights = reweight(causal_weights(QUERY, KEY), GAMMA.log())
    expected = torch.tensor([[0.572562, 0.286281, 0.141156], [0.180425, 0.087729, 0.731846]], dtype=torch.float64)
    torch.testing.assert_close(weights[0, :, 2], expected, atol=1e-6, rtol=0)
    output = weights @ VALUE
    torch.testing.assert_close(
        output[0],
        torch.tensor(
            [
                [[1, 0], [0.496510, 0.503490], [0.854875, 0.568594]],
                [[1, 0], [0.503490, 0.496510], [1.644117, 1.551421]],
            ],
            dtype=torch.float64,
        ),
        atol=1e-6,
        rtol=0,
    )


@pytest.mark.parametrize("backend", ["reference", "bias", "augmented", "correction", "auto"])
def test_all_paths_are_the_definition(backend):
    expected = reweight(causal_weights(QUERY, KEY), GAMMA.log()) @ VALUE
    result = attention_with_key_bias(QUERY, KEY, VALUE, GAMMA.log(), is_causal=True, backend=backend)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)


def test_scaling_the_key_is_another_function():
    scaled = KEY.clone()
    scaled[:, :, 0] *= 2
    weights = causal_weights(QUERY, scaled)[0, :, 2]
    expected = torch.tensor([[0.575975, 0.283995, 0.140029], [0.471726, 0.056547, 0.471726]], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)
    ours = reweight(causal_weights(QUERY, KEY), GAMMA.log())[0, :, 2]
    assert (ours - weights).abs().max() > 1e-3


def test_negative_logit_rises():
    plain = torch.tensor([-1.0, 0.0], dtype=torch.float64).softmax(-1)
    row = reweight(plain[None, None, None], log(2.0))[0, 0, 0]
    torch.testing.assert_close(row, torch.tensor([0.423883, 0.576117], dtype=torch.float64), atol=1e-6, rtol=0)
    # Twice the key is twice the logit: it moves the other way.
    scaled = torch.tensor([-2.0, 0.0], dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(scaled, torch.tensor([0.119203, 0.880797], dtype=torch.float64), atol=1e-6, rtol=0)
    assert scaled[0] < plain[0] < row[0]


@pytest.mark.parametrize(
    ("gamma", "entropy"), [(0.25, 0.876092), (0.5, 0.964963), (1, 1.054920), (2, 1.098612), (4, 1.039721)]
)
def test_entropy_is_not_monotone(gamma, entropy):
    row = reweight(one_row(0.2, 0.4, 0.4), log(gamma))
    assert float(-(row * row.log()).sum()) == pytest.approx(entropy, abs=1e-6)


@given(st.lists(st.floats(0.05, 1), min_size=3, max_size=6))
def test_entropy_is_greatest_where_the_others_say(parts):
    row = one_row(*parts) / sum(parts)
    initial, others = float(row[..., 0]), row[..., 1:] / row[..., 1:].sum()
    best = math.exp(float((others * others.log()).sum())) * (1 - initial) / initial

    def entropy(gamma):
        changed = reweight(row, log(gamma))
        return float(-(changed * changed.log()).sum())

    assert entropy(best) > max(entropy(best * 1.2), entropy(best / 1.2))


def test_limits():
    weights = one_row(0.5, 0.3, 0.2)
    torch.testing.assert_close(reweight(weights, log(1e-30))[0, 0, 0], one_row(0, 0.6, 0.4)[0, 0, 0])
    torch.testing.assert_close(reweight(weights, log(1e30))[0, 0, 0], one_row(1, 0, 0)[0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_small_factor_where_the_initial_weight_rounds_to_one(dtype):
    # The initial token's own row, and one whose other weights are lost beside the 1.
    other = torch.tensor([0.0, -9.0, -10.0] if dtype == torch.float16 else [0.0, -17.5, -18.5]).softmax(-1)
    weights = torch.stack([torch.tensor([1.0, 0, 0]), other]).to(dtype)[None, None]
    result = reweight(weights, log(1e-30))[0, 0]
    assert result[0].tolist() == [1, 0, 0]
    expected = torch.stack([torch.zeros(()), 1 / (1 + torch.tensor(-1.0).exp()), 1 / (1 + torch.tensor(1.0).exp())])
    torch.testing.assert_close(result[1].float(), expected, atol=5e-3, rtol=0)


@given(
    first=st.floats(0.01, 100),
    second=st.floats(0.01, 100),
    parts=st.lists(st.integers(1, 1000), min_size=2, max_size=9),
)
def test_composition_and_ratios(first, second, parts):
    weights = one_row(*(float(Fraction(part, sum(parts))) for part in parts))
    both = reweight(reweight(weights, log(first)), log(second))
    once = reweight(weights, log(first) + log(second))
    torch.testing.assert_close(both, once, atol=1e-6, rtol=1e-5)
    assert float(once.sum()) == pytest.approx(1)
    ratio = once[..., 1:] / once[..., 1:2]
    torch.testing.assert_close(ratio, weights[..., 1:] / weights[..., 1:2])


def test_each_row_has_its_start_and_its_factor():
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.6, 0.4]], dtype=torch.float64)[:, None, None]
    result = reweight(weights, torch.tensor([[0.0], [math.log(2)]]), torch.tensor([0, 1]))
    torch.testing.assert_close(result[0], weights[0])
    torch.testing.assert_close(result[1, 0, 0], torch.tensor([0, 0.75, 0.25], dtype=torch.float64), atol=1e-7, rtol=0)


def test_a_row_that_sees_nothing_stays_zero():
    assert not reweight(one_row(0, 0, 0), log(5.0)).any()


def test_start_is_the_first_real_token():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
    start, live = start_indices(mask)
    assert start.tolist() == [2, 0, 0, 1]
    assert live.tolist() == [True, True, False, True]


@pytest.mark.parametrize("hidden", [False, -1e4, -1e9, torch.finfo(torch.float32).min, -math.inf])
def test_start_of_a_ready_mask(hidden):
    seen = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)[:, None, None].expand(2, 1, 4, 4)
    # The first rows belong to padding and may see anything.
    seen = seen.clone()
    seen[0, :, :2] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, hidden) if hidden else seen
    assert torch.equal(visible(mask), seen)
    assert not visible(torch.tensor([-1e4], dtype=torch.bfloat16)).any()
    start, live = start_indices_4d(mask)
    assert start.tolist() == [2, 0]
    assert live.all()


@pytest.mark.parametrize("padding_sees", ["all", "itself", "nothing"])
@pytest.mark.parametrize("window", [2, 3, 20])
def test_start_behind_a_window(window, padding_sees):
    starts, length = torch.tensor([0, 3, 8]), 9
    at = torch.arange(length)
    seen = (at[None] <= at[:, None]) & (at[:, None] - at[None] < window)
    seen = seen & (at >= starts[:, None])[:, None]
    padding = at < starts[:, None]
    others = {"all": torch.ones(length, length), "itself": torch.eye(length), "nothing": torch.zeros(length, length)}
    seen = torch.where(padding[..., None], others[padding_sees].bool(), seen)
    # A static cache has room behind.
    seen = torch.nn.functional.pad(seen, (0, 4))
    start, live = start_indices_4d(seen[:, None])
    assert start.tolist() == starts.tolist()
    assert live.all()
    assert start_indices_4d(torch.zeros(1, 1, 2, 3, dtype=torch.bool))[1].tolist() == [False]


def test_clamp_and_warning():
    assert clamp_log_gamma(torch.tensor([500.0, -500.0, 1.0])).tolist() == [80, -80, 1]
    with pytest.warns(UserWarning, match="float16"):
        warn_if_extreme(torch.tensor([11.0]), torch.float16)
    warn_if_extreme(torch.tensor([11.0]), torch.bfloat16)
    warn_if_extreme(torch.tensor([9.0]), torch.float16)


def random_states(dtype=torch.float64, length=17):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, length, 16), (2, 2, length, 16), (2, 2, length, 16)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def definition(query, key, value, log_gamma):
    """The last query's output, from weights written out."""
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    weights = (query[:, :, -1:] @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1)
    return reweight(weights, log_gamma) @ value


def test_order_of_the_other_keys_does_not_matter():
    query, key, value = random_states()
    log_gamma = torch.tensor([0.7, -1.3, 0.0, 3.0], dtype=torch.float64)
    order = torch.cat(
        [torch.zeros(1, dtype=torch.long), 1 + torch.randperm(16, generator=torch.Generator().manual_seed(1))]
    )
    shuffled = key[:, :, order], value[:, :, order]
    torch.testing.assert_close(
        definition(query, *shuffled, log_gamma), definition(query, key, value, log_gamma), atol=1e-12, rtol=0
    )
    last = attention_with_key_bias(query[:, :, -1:], *shuffled, log_gamma)
    torch.testing.assert_close(last, definition(query, key, value, log_gamma), atol=1e-12, rtol=0)


def test_all_weight_on_the_initial_token_gives_its_value():
    query, key, value = random_states(torch.float32)
    output = attention_with_key_bias(query, key, value, torch.full((4,), math.log(1e30)), is_causal=True)
    expected = value[:, :, :1].repeat_interleave(2, 1).expand_as(output)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", ["bias", "augmented", "correction", "auto"])
def test_bfloat16_paths_agree(backend):
    log_gamma = torch.tensor([0.7, -1.0, 0.0, 1.4])
    exact = definition(*(state.double() for state in random_states(torch.bfloat16)), log_gamma.double())
    found = attention_with_key_bias(*random_states(torch.bfloat16), log_gamma, is_causal=True, backend=backend)[
        :, :, -1:
    ]
    torch.testing.assert_close(found.double(), exact, atol=2e-2, rtol=0)


class TestVariants:
    """The modes "key" and "query" are other functions, not other ways to the operator."""

    def test_key_scaling_by_hand_and_unlike_the_operator(self):
        weights = causal_weights(QUERY, scale_keys(KEY, log(2.0)))[0, :, 2]
        expected = torch.tensor([[0.575975, 0.283995, 0.140029], [0.471726, 0.056547, 0.471726]], dtype=torch.float64)
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)
        operator = reweight(causal_weights(QUERY, KEY), log(2.0).expand(2))[0, :, 2]
        # exp(1 / sqrt 2) happens to be 2.03 here, where gamma is 2.
        assert (weights - operator).abs().amax(-1).min() > 3e-3

    def test_negative_logit_goes_the_other_way(self):
        query = torch.tensor([[[[1.0]]]], dtype=torch.float64)
        key = torch.tensor([[[[-1.0], [0.0]]]], dtype=torch.float64)

        def row(key):
            return (query @ key.transpose(-1, -2)).softmax(-1)[0, 0, 0].tolist()

        assert row(key) == pytest.approx([0.268941, 0.731059], abs=1e-6)
        operator = reweight((query @ key.transpose(-1, -2)).softmax(-1), log(2.0))[0, 0, 0].tolist()
        assert operator == pytest.approx([0.423883, 0.576117], abs=1e-6)
        assert row(scale_keys(key, log(2.0))) == pytest.approx([0.119203, 0.880797], abs=1e-6)

    def test_query_scaling_is_a_temperature_on_all_keys(self):
        plain = causal_weights(QUERY, KEY)
        sharp = causal_weights(scale_queries(QUERY, log(2.0).expand(2)), KEY)
        torch.testing.assert_close(sharp, plain**2 / (plain**2).sum(-1, keepdim=True))

    def test_only_the_marked_keys_and_chosen_heads_change(self):
        key = torch.randn(2, 2, 5, 3, dtype=torch.bfloat16)
        log_gamma = torch.tensor([[math.log(2.0), 0.0], [0.0, math.log(4.0)]])
        scaled = scale_keys(key, log_gamma, torch.tensor([0, 3]))
        expected = key.clone()
        expected[0, 0, 0] *= 2
        expected[1, 1, 3] *= 4
        assert torch.equal(scaled, expected)
        marks = torch.arange(10).reshape(2, 5) % 4 == 0
        assert torch.equal(
            scale_keys(key, log_gamma, marks)[0, 0], torch.where(marks[0, :, None], 2.0, 1.0) * key[0, 0]
        )
        assert torch.equal(scale_queries(key, torch.zeros(2)), key)


def test_marks_stand_for_the_initial_token_of_each_sequence():
    weights = torch.zeros(1, 1, 4, 4)
    weights[0, 0] = torch.tensor([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0, 0, 0.25, 0.75]])
    result = reweight(weights, torch.tensor([math.log(3.0)]), torch.tensor([[True, False, True, False]]))[0, 0]
    expected = torch.tensor([[1, 0, 0, 0], [0.75, 0.25, 0, 0], [0, 0, 1, 0], [0, 0, 0.5, 0.5]])
    torch.testing.assert_close(result, expected)


def test_learned_sink_stays_in_the_denominator():
    # Weights that sum to 0.8: the rest is the sink's, with a logit of its own.
    logits = torch.tensor([0.5, -0.2, 0.9, 0.1], dtype=torch.float64)
    plain, biased = logits.softmax(-1), (logits + torch.tensor([math.log(2.0), 0, 0, 0])).softmax(-1)
    torch.testing.assert_close(reweight(plain[None, None, None, :3], log(2.0))[0, 0, 0], biased[:3])
