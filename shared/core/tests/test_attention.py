"""Attention with a bias on one key: values, properties, and what happens at the rim."""

import inspect
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from separata_core import _attention_ops as ops
from separata_core.attention import (
    MAX_KEY_BIAS,
    attention_with_key_bias,
    augment_states,
    closed_form_floor,
    correct_output,
    key_bias_mask,
    key_weight,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

BACKENDS = ("reference", "bias", "augmented", "correction", "auto")
F64 = torch.float64


def states(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def qkv(batch: int, heads: int, kv_heads: int, rows: int, keys: int, dim: int, **kwargs: Any) -> tuple[Tensor, ...]:
    return (
        states(batch, heads, rows, dim, seed=1, **kwargs),
        states(batch, kv_heads, keys, dim, seed=2, **kwargs),
        states(batch, kv_heads, keys, dim, seed=3, **kwargs),
    )


def exact(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, index: Any, visible: Tensor, scale: float) -> Tensor:
    """Textbook attention in float64 with the bias on the logit: loops, no shared code."""
    query, key, value, bias = (t.to(F64) for t in (query, key, value, bias))
    batch, heads, rows, _ = query.shape
    groups = heads // key.shape[1]
    result = torch.zeros(batch, heads, rows, value.shape[-1], dtype=F64)
    for b in range(batch):
        at = index if isinstance(index, int) else int(index[b])
        for h in range(heads):
            logits = scale * query[b, h] @ key[b, h // groups].T
            logits[:, at] += bias[h] if bias.dim() == 1 else bias[b, h]
            for t in range(rows):
                seen = visible[b, h, t].nonzero()[:, 0]
                if seen.numel():
                    weights = torch.softmax(logits[t, seen], 0)
                    result[b, h, t] = weights @ value[b, h // groups][seen]
    return result


def weights_case(weights: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor, float]:
    """A query and keys whose plain attention weights are the given ones, and values that show the weights."""
    count = len(weights)
    key = torch.zeros(1, 1, count, count, dtype=F64)
    key[0, 0, :, 0] = torch.tensor(weights, dtype=F64).log()
    query = torch.zeros(1, 1, 1, count, dtype=F64)
    query[..., 0] = 1.0
    return query, key, torch.eye(count, dtype=F64)[None, None], 1.0


def log(*gammas: float) -> Tensor:
    return torch.tensor(gammas, dtype=F64).log()


@pytest.mark.parametrize("backend", BACKENDS)
class TestStatedValues:
    @pytest.mark.parametrize(
        ("gamma", "expected"), [(2.0, (2 / 3, 0.2, 2 / 15)), (0.5, (1 / 3, 0.4, 4 / 15)), (1.0, (0.5, 0.3, 0.2))]
    )
    def test_three_weights(self, backend: Any, gamma: float, expected: tuple[float, ...]) -> None:
        query, key, value, scale = weights_case((0.5, 0.3, 0.2))
        result = attention_with_key_bias(query, key, value, log(gamma), scale=scale, backend=backend)
        torch.testing.assert_close(result[0, 0, 0], torch.tensor(expected, dtype=F64), atol=1e-12, rtol=0)

    def test_gap_of_the_others_shrinks_with_the_weight_of_the_key(self, backend: Any) -> None:
        query, key, value, scale = weights_case((0.5, 0.3, 0.2))
        result = attention_with_key_bias(query, key, value, log(2.0), scale=scale, backend=backend)[0, 0, 0]
        gap = float(result[1] - result[2])
        assert gap == pytest.approx(0.066667, abs=1e-6)
        assert 0.1 - gap == pytest.approx(0.1 * (2 - 1) * 0.5 / 1.5, abs=1e-12)

    def grouped(self) -> tuple[Tensor, Tensor, Tensor]:
        query = torch.tensor([[[[1, 0], [0, 1], [1, 1]], [[0, 1], [1, 0], [1, -1]]]], dtype=F64)
        key = torch.tensor([[[[1, 0], [0, 1], [1, -1]]]], dtype=F64)
        value = torch.tensor([[[[1, 0], [0, 1], [2, 2]]]], dtype=F64)
        return query, key, value

    def test_two_query_heads_over_one_key_head(self, backend: Any) -> None:
        result = attention_with_key_bias(*self.grouped(), log(2.0, 0.5), is_causal=True, backend=backend)[0]
        expected = {
            (0, 2): (0.854875, 0.568594),
            (1, 2): (1.644117, 1.551421),
            (0, 1): (0.496510, 0.503490),
            (1, 1): (0.503490, 0.496510),
            (0, 0): (1.0, 0.0),
            (1, 0): (1.0, 0.0),
        }
        for (head, row), values in expected.items():
            torch.testing.assert_close(result[head, row], torch.tensor(values, dtype=F64), atol=1e-6, rtol=0)

    def test_weights_of_the_two_heads(self, backend: Any) -> None:
        query, key, _ = self.grouped()
        show = torch.eye(3, dtype=F64)[None, None]
        # Wider states with nothing in them, so that the weights fit into the values of every kernel.
        query, key = (torch.nn.functional.pad(t, (0, 1)) for t in (query, key))
        plain = attention_with_key_bias(query, key, show, log(1.0, 1.0), scale=2**-0.5, is_causal=True, backend=backend)
        biased = attention_with_key_bias(
            query, key, show, log(2.0, 0.5), scale=2**-0.5, is_causal=True, backend=backend
        )
        for result, first, second in (
            (plain, (0.401112, 0.401112, 0.197776), (0.305695, 0.074320, 0.619985)),
            (biased, (0.572562, 0.286281, 0.141156), (0.180425, 0.087729, 0.731846)),
        ):
            expected = torch.tensor([first, second], dtype=F64)
            torch.testing.assert_close(result[0, :, 2], expected, atol=1e-6, rtol=0)

    def test_not_the_same_as_a_scaled_key(self, backend: Any) -> None:
        query, key, value = self.grouped()
        scaled = key.clone()
        scaled[:, :, 0] *= 2
        other = scaled_dot_product_attention(query, scaled, value, is_causal=True, enable_gqa=True)
        for row, expected in ((0, (0.575975 + 2 * 0.140029, 0.283995 + 2 * 0.140029)), (1, (1.415178, 0.999999))):
            torch.testing.assert_close(other[0, row, 2], torch.tensor(expected, dtype=F64), atol=2e-6, rtol=0)
        result = attention_with_key_bias(query, key, value, log(2.0, 0.5), is_causal=True, backend=backend)
        assert float((result - other)[0, 1, 2].abs().max()) > 0.2

    def test_a_negative_logit_is_raised_too(self, backend: Any) -> None:
        key = torch.tensor([[[[-1.0, 0.0], [0.0, 0.0]]]], dtype=F64)
        query = torch.tensor([[[[1.0, 0.0]]]], dtype=F64)
        show = torch.eye(2, dtype=F64)[None, None]
        for gamma, expected in ((1.0, (0.268941, 0.731059)), (2.0, (0.423883, 0.576117))):
            result = attention_with_key_bias(query, key, show, log(gamma), scale=1.0, backend=backend)
            torch.testing.assert_close(result[0, 0, 0], torch.tensor(expected, dtype=F64), atol=1e-6, rtol=0)

    def test_entropy_has_a_maximum_in_between(self, backend: Any) -> None:
        query, key, value, scale = weights_case((0.2, 0.4, 0.4))
        found = []
        for gamma in (0.25, 0.5, 1.0, 2.0, 4.0):
            weights = attention_with_key_bias(query, key, value, log(gamma), scale=scale, backend=backend)[0, 0, 0]
            found.append(float(-(weights * weights.log()).sum()))
        assert found == pytest.approx([0.876092, 0.964963, 1.054920, 1.098612, 1.039721], abs=1e-6)

    def test_large_factor_gives_the_value_exactly(self, backend: Any) -> None:
        query, key, value = qkv(2, 4, 2, 9, 9, 8, dtype=torch.float32)
        bias = torch.full((4,), math.log(1e30))
        result = attention_with_key_bias(query, key, value, bias, is_causal=True, backend=backend)
        expected = value[:, :, :1].repeat_interleave(2, 1).expand_as(result)
        assert torch.isfinite(result).all()
        if backend in ("correction", "auto"):
            assert torch.equal(result, expected)
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)

    def test_small_factor_is_a_masked_key(self, backend: Any) -> None:
        query, key, value = qkv(2, 4, 2, 9, 9, 8, dtype=torch.float32)
        bias = torch.full((4,), math.log(1e-30))
        if backend == "correction":
            with pytest.raises(ValueError, match=r"key_bias reaches -69.*below -4.159.*'augmented'"):
                attention_with_key_bias(query, key, value, bias, is_causal=True, backend=backend)
            return
        result = attention_with_key_bias(query, key, value, bias, is_causal=True, backend=backend)
        mask = torch.ones(9, 9, dtype=torch.bool).tril()
        mask[1:, 0] = False
        expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(result, expected, atol=2e-6, rtol=1e-5)

    @pytest.mark.parametrize("sign", [-1, 1])
    def test_beyond_the_clamp(self, backend: Any, sign: int) -> None:
        if backend == "correction" and sign < 0:
            pytest.skip("the closed form refuses such a bias; tested above")
        query, key, value = qkv(1, 2, 1, 5, 5, 8, dtype=torch.float32)
        far = attention_with_key_bias(query, key, value, torch.full((2,), sign * 1e4), is_causal=True, backend=backend)
        at = attention_with_key_bias(
            query, key, value, torch.full((2,), sign * MAX_KEY_BIAS), is_causal=True, backend=backend
        )
        assert torch.isfinite(far).all()
        assert torch.equal(far, at)

    def test_first_row_never_changes(self, backend: Any) -> None:
        query, key, value = qkv(2, 4, 2, 6, 6, 8)
        for gamma in (0.3, 1.0, 3.0, 1e6):
            result = attention_with_key_bias(query, key, value, log(*[gamma] * 4), is_causal=True, backend=backend)
            torch.testing.assert_close(result[:, :, 0], value[:, :, 0].repeat_interleave(2, 1), atol=1e-14, rtol=1e-14)

    def test_permuting_the_other_keys_changes_nothing(self, backend: Any) -> None:
        query, key, value = qkv(2, 4, 2, 3, 7, 8)
        order = torch.tensor([0, 5, 3, 1, 6, 2, 4])
        bias = states(4, seed=9)
        first = attention_with_key_bias(query, key, value, bias, backend=backend)
        second = attention_with_key_bias(query, key[:, :, order], value[:, :, order], bias, backend=backend)
        torch.testing.assert_close(first, second, atol=1e-12, rtol=1e-12)
        # Not so for the biased key itself.
        third = attention_with_key_bias(query, key.flip(2), value.flip(2), bias, backend=backend)
        assert float((first - third).abs().max()) > 1e-3

    def test_a_bias_per_batch_row_equals_separate_runs(self, backend: Any) -> None:
        query, key, value = qkv(3, 4, 2, 6, 6, 8)
        bias = states(3, 4, seed=9)
        together = attention_with_key_bias(query, key, value, bias, is_causal=True, backend=backend)
        for row in range(3):
            part = slice(row, row + 1)
            alone = attention_with_key_bias(
                query[part], key[part], value[part], bias[row], is_causal=True, backend=backend
            )
            torch.testing.assert_close(together[part], alone, atol=1e-12, rtol=1e-12)

    def test_left_padding_with_a_start_per_row(self, backend: Any) -> None:
        query, key, value = qkv(2, 4, 2, 8, 8, 8)
        starts = torch.tensor([0, 3])
        position = torch.arange(8)
        mask = (position[None, :, None] >= position[None, None]) & (position[None, None] >= starts[:, None, None])
        bias = states(4, seed=9)
        padded = attention_with_key_bias(query, key, value, bias, starts, attention_mask=mask[:, None], backend=backend)
        alone = attention_with_key_bias(
            query[1:, :, 3:], key[1:, :, 3:], value[1:, :, 3:], bias, is_causal=True, backend=backend
        )
        torch.testing.assert_close(padded[1:, :, 3:], alone, atol=1e-12, rtol=1e-12)
        # Biasing column 0 of a padded row does nothing at all: that mistake must show.
        wrong = attention_with_key_bias(query, key, value, bias, 0, attention_mask=mask[:, None], backend=backend)
        assert float((wrong[1:, :, 3:] - alone).abs().max()) > 1e-3

    def test_decoding_step_by_step_equals_one_forward(self, backend: Any) -> None:
        query, key, value = qkv(2, 4, 2, 7, 7, 8)
        bias = states(4, seed=9)
        whole = attention_with_key_bias(query, key, value, bias, is_causal=True, backend=backend)
        for row in range(7):
            step = attention_with_key_bias(
                query[:, :, row : row + 1], key[:, :, : row + 1], value[:, :, : row + 1], bias, backend=backend
            )
            torch.testing.assert_close(step, whole[:, :, row : row + 1], atol=1e-12, rtol=1e-12)

    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 2e-2)]
    )
    def test_lower_precision(self, backend: Any, dtype: torch.dtype, tolerance: float) -> None:
        query, key, value = qkv(2, 4, 2, 33, 33, 16, dtype=dtype)
        bias = torch.tensor([0.7, -0.7, 2.0, -1.3])
        result = attention_with_key_bias(query, key, value, bias, is_causal=True, backend=backend)
        assert result.dtype == dtype
        visible = torch.ones(33, 33, dtype=torch.bool).tril().expand(2, 4, 33, 33)
        expected = exact(query, key, value, bias, 0, visible, 0.25)
        assert float((result.to(F64) - expected).abs().max()) < tolerance

    def test_shapes_without_rows_or_batch(self, backend: Any) -> None:
        if backend in ("correction",):
            with pytest.raises(ValueError, match="needs a kernel that returns its log-sum-exp"):
                attention_with_key_bias(*qkv(1, 4, 2, 0, 5, 8), torch.zeros(4), backend=backend)
            return
        for batch, rows in ((0, 3), (2, 0)):
            query, key, value = qkv(batch, 4, 2, rows, 5, 8)
            query.requires_grad_()
            result = attention_with_key_bias(query, key, value, torch.ones(4), backend=backend)
            assert result.shape == (batch, 4, rows, 8)
            result.sum().backward()
            assert query.grad is not None


class TestUnchanged:
    """What must not change does not, bit for bit."""

    def plain(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True, **kwargs)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("backend", ["auto", "correction"])
    def test_heads_with_bias_zero(self, backend: Any, dtype: torch.dtype) -> None:
        query, key, value = qkv(2, 6, 2, 21, 21, 16, dtype=dtype)
        bias = torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0, 3.0])
        result = attention_with_key_bias(query, key, value, bias, is_causal=True, backend=backend)
        plain = self.plain(query, key, value, is_causal=True)
        assert torch.equal(result[:, ::2], plain[:, ::2])
        assert not torch.equal(result[:, 1::2], plain[:, 1::2])

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_bias_zero_everywhere(self, backend: Any) -> None:
        query, key, value = qkv(2, 6, 2, 21, 21, 16, dtype=torch.float32)
        none = torch.zeros(6)
        result = attention_with_key_bias(query, key, value, none, is_causal=True, backend=backend)
        torch.testing.assert_close(result, self.plain(query, key, value, is_causal=True), atol=1e-6, rtol=1e-6)
        if backend in ("auto", "correction"):
            assert torch.equal(result, self.plain(query, key, value, is_causal=True))
        # A zero that is to be differentiated takes another way to the same bits.
        none.requires_grad_()
        again = attention_with_key_bias(query, key, value, none, is_causal=True, backend=backend)
        if backend == "bias":  # torch differentiates a mask in another kernel
            torch.testing.assert_close(again, result, atol=1e-6, rtol=1e-6)
        else:
            assert torch.equal(again, result)

    @pytest.mark.parametrize("backend", ["reference", "bias", "augmented", "correction"])
    def test_rows_before_the_key(self, backend: Any) -> None:
        query, key, value = qkv(2, 4, 2, 9, 9, 8, dtype=torch.float32)
        index = torch.tensor([4, 7])
        zero, bias = torch.zeros(4), torch.tensor([2.0, -1.0, 3.0, 0.5])
        biased = attention_with_key_bias(query, key, value, bias, index, is_causal=True, backend=backend)
        plain = attention_with_key_bias(query, key, value, zero, index, is_causal=True, backend=backend)
        for row, first in enumerate(index.tolist()):
            assert torch.equal(biased[row, :, :first], plain[row, :, :first])
            assert (biased[row, :, first:] != plain[row, :, first:]).any(-1).all()

    @pytest.mark.parametrize("backend", ["reference", "bias", "augmented", "correction"])
    @pytest.mark.parametrize("kind", ["bool", "infinite", "lowest"])
    def test_window_that_has_left_the_key_behind(self, backend: Any, kind: str) -> None:
        window = 4
        query, key, value = qkv(1, 4, 2, 12, 12, 8, dtype=torch.float32)
        position = torch.arange(12)
        distance = position[:, None] - position
        mask: Tensor = (distance >= 0) & (distance < window)
        if kind != "bool":
            low = -math.inf if kind == "infinite" else torch.finfo(torch.float32).min
            mask = torch.zeros(12, 12).masked_fill(~mask, low)
        run = {"attention_mask": mask, "backend": backend}
        biased = attention_with_key_bias(query, key, value, torch.full((4,), 2.0), **run)
        plain = attention_with_key_bias(query, key, value, torch.zeros(4), **run)
        assert torch.equal(biased[:, :, window:], plain[:, :, window:])
        assert (biased[:, :, 1:window] != plain[:, :, 1:window]).any(-1).all()

    @pytest.mark.parametrize("backend", ["reference", "bias", "augmented", "correction"])
    @pytest.mark.parametrize("low", [None, -math.inf, torch.finfo(torch.float32).min, -1e9])
    def test_rows_of_padding(self, backend: Any, low: float | None) -> None:
        query, key, value = qkv(2, 4, 2, 5, 5, 8, dtype=torch.float32)
        mask: Tensor = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
        mask[1, :, :3] = False
        if low is not None:
            mask = torch.zeros(2, 1, 5, 5).masked_fill(~mask, low)
        run = {"attention_mask": mask, "backend": backend}
        biased = attention_with_key_bias(query, key, value, torch.tensor([2.0, -1.0, 3.0, 0.5]), **run)
        plain = attention_with_key_bias(query, key, value, torch.zeros(4), **run)
        assert torch.isfinite(biased).all()
        assert torch.equal(biased[1, :, :3], plain[1, :, :3])
        assert (biased[1, :, 3:] != plain[1, :, 3:]).any(-1).all()


class TestProperties:
    @settings(max_examples=60)
    @given(data=st.data())
    def test_every_backend_is_textbook_attention(self, data: st.DataObject) -> None:
        batch, kv_heads, groups = (data.draw(st.integers(1, 3)) for _ in range(3))
        rows, keys, dim = (data.draw(st.integers(1, 9)) for _ in range(3))
        heads = kv_heads * groups
        query, key, value = qkv(batch, heads, kv_heads, rows, keys, dim)
        low = data.draw(st.sampled_from([-60.0, -6.0, -0.5]))
        shape = (heads,) if data.draw(st.booleans()) else (batch, heads)
        bias = low + (8.0 - low) * torch.rand(shape, generator=torch.Generator().manual_seed(4), dtype=F64)
        index: Any = data.draw(st.integers(0, keys - 1))
        if data.draw(st.booleans()):
            index = torch.randint(0, keys, (batch,), generator=torch.Generator().manual_seed(index))
        kind = data.draw(st.sampled_from(["none", "causal", "bool", "additive"]))
        scale = data.draw(st.sampled_from([1e-4, 0.3, 2.0]))
        visible = torch.ones(batch, heads, rows, keys, dtype=torch.bool)
        mask = None
        if kind == "causal":
            visible = visible.tril()
        elif kind != "none":
            small = (data.draw(st.sampled_from([1, batch])), data.draw(st.sampled_from([1, heads])), rows, keys)
            mask = torch.rand(small, generator=torch.Generator().manual_seed(5)) > 0.4
            visible = mask.expand_as(visible)
            if kind == "additive":
                mask = torch.zeros(small, dtype=F64).masked_fill(~mask, -math.inf)
        expected = exact(query, key, value, bias, index, visible, scale)
        for backend in BACKENDS:
            if backend == "correction" and low == -60.0:
                continue
            result = attention_with_key_bias(
                query,
                key,
                value,
                bias,
                index,
                attention_mask=mask,
                is_causal=kind == "causal",
                scale=scale,
                backend=backend,  # type: ignore[arg-type]  # a plain string to mypy
            )
            torch.testing.assert_close(result, expected, atol=1e-10, rtol=1e-10, msg=lambda m, b=backend: f"{b}: {m}")

    @given(
        gamma=st.floats(-6, 6),
        weight=st.floats(0, 1),
    )
    def test_composition(self, gamma: float, weight: float) -> None:
        output, value = states(1, 1, 1, 4, seed=1), states(1, 1, 4, seed=2)
        held = torch.tensor([[[weight]]], dtype=F64)
        first = torch.tensor([gamma], dtype=F64)
        second = torch.tensor([0.4], dtype=F64)
        once = correct_output(output, held, value, first + second)
        moved = held * first.exp() / (1 + torch.expm1(first) * held)
        twice = correct_output(correct_output(output, held, value, first), moved, value, second)
        torch.testing.assert_close(once, twice, atol=1e-10, rtol=1e-10)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_the_closed_form_keeps_its_promise_down_to_the_floor(self, dtype: torch.dtype) -> None:
        promise = {F64: 1e-8, torch.float32: 2e-4, torch.float16: 8e-3, torch.bfloat16: 2e-2}[dtype]
        query, key, value = qkv(1, 2, 1, 64, 64, 16, dtype=dtype)
        worst = 0.0
        first = key[:, :, :1]
        for logit in (0.0, 4.0, 8.0, 12.0):
            # Queries drawn to the key, so that it holds from little to almost all weight.
            drawn = (query + (logit / 0.25 - (query * first).sum(-1, True)) * first / first.square().sum()).to(dtype)
            bias = torch.full((2,), closed_form_floor(dtype), dtype=F64)
            result = attention_with_key_bias(drawn, key, value, bias, is_causal=True, backend="correction")
            visible = torch.ones(1, 2, 64, 64, dtype=torch.bool).tril()
            error = result.to(F64) - exact(drawn, key, value, bias, 0, visible, 0.25)
            worst = max(worst, float(error.abs().max()))
        # The output itself is rounded too.
        assert worst < (promise + torch.finfo(dtype).eps) * float(value.abs().max())

    def test_below_the_floor_another_way_is_taken(self) -> None:
        query, key, value = qkv(1, 2, 1, 40, 40, 16, dtype=torch.float32)
        query = query + 30 * key[:, :, :1] / key[:, :, :1].norm()
        bias = torch.tensor([-12.0, 1.0])
        visible = torch.ones(1, 2, 40, 40, dtype=torch.bool).tril()
        expected = exact(query, key, value, bias, 0, visible, 0.25)
        result = attention_with_key_bias(query, key, value, bias, is_causal=True)
        assert float((result.to(F64) - expected).abs().max()) < 2e-5
        # The closed form, asked for by hand through its pieces, does lose what the door avoids.
        plain = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        logits = 0.25 * query @ key.repeat_interleave(2, 1).transpose(-1, -2)
        lse = torch.logsumexp(logits.masked_fill(~visible, -math.inf), -1)
        weight = key_weight(query, key[:, :, 0], lse, 0.25)
        lost = correct_output(plain, weight, value[:, :, 0], bias)
        assert torch.isfinite(lost).all()
        assert float((lost.to(F64) - expected).abs().max()) > 1e-3

    def test_nothing_as_large_as_the_weights_is_allocated(self) -> None:
        query, key, value = qkv(1, 4, 2, 256, 256, 8, dtype=torch.float32)
        for bias in (torch.tensor([1.0, 0.0, -1.0, 2.0]), torch.full((4,), -30.0)):
            with _Largest() as seen:
                attention_with_key_bias(query, key, value, bias, is_causal=True)
            assert 0 < seen.elements < 256 * 256

    def test_long_causal_prefill_with_a_strong_bias_uses_no_mask(self) -> None:
        query, key, value = qkv(1, 2, 2, 300, 300, 8)
        bias = torch.tensor([-30.0, 30.0], dtype=F64)
        visible = torch.ones(1, 2, 300, 300, dtype=torch.bool).tril()
        result = attention_with_key_bias(query, key, value, bias, is_causal=True)
        torch.testing.assert_close(result, exact(query, key, value, bias, 0, visible, 8**-0.5), atol=1e-12, rtol=1e-9)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_the_augmented_form_keeps_the_bias_in_half_precision(self, dtype: torch.dtype) -> None:
        query, key, value = qkv(1, 2, 1, 16, 16, 16, dtype=dtype)
        for scale in (0.25, 1e-3):
            # A bias that three parts hold and one does not, against a logit that balances it.
            bias = torch.tensor([5.4321, 7.001])
            visible = torch.ones(1, 2, 16, 16, dtype=torch.bool).tril()
            expected = exact(query, key, value, bias, 0, visible, scale)
            result = attention_with_key_bias(query, key, value, bias, is_causal=True, scale=scale, backend="augmented")
            eps = torch.finfo(dtype).eps
            assert float((result.to(F64) - expected).abs().max()) < 2 * eps * float(value.abs().max())

    def test_value_width_may_differ(self) -> None:
        query, key, _ = qkv(2, 4, 2, 6, 6, 8)
        value = states(2, 2, 6, 13, seed=7)
        bias = states(4, seed=9)
        visible = torch.ones(2, 4, 6, 6, dtype=torch.bool).tril()
        expected = exact(query, key, value, bias, 0, visible, 8**-0.5)
        for backend in ("reference", "bias", "augmented", "auto"):
            result = attention_with_key_bias(
                query,
                key,
                value,
                bias,
                is_causal=True,
                backend=backend,  # type: ignore[arg-type]  # a plain string to mypy
            )
            torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)

    def test_strided_states_as_models_have_them(self, poison: None) -> None:
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(2, 6, 2, 9, 9, 8))
        bias = states(6, seed=9)
        visible = torch.ones(2, 6, 9, 9, dtype=torch.bool).tril()
        expected = exact(query, key, value, bias, 0, visible, 8**-0.5)
        reversed_dims = [torch.stack(t.unbind(-1)[::-1], 0).movedim(0, -1) for t in (query, key, value)]
        for backend in BACKENDS:
            result = attention_with_key_bias(
                query,
                key,
                value,
                bias,
                is_causal=True,
                backend=backend,  # type: ignore[arg-type]  # a plain string to mypy
            )
            torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)
        # A last dimension that is not dense suits no fused kernel; the door finds another way.
        result = attention_with_key_bias(*reversed_dims, bias, is_causal=True)
        torch.testing.assert_close(result, expected.flip(-1), atol=1e-12, rtol=1e-12)


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple) else (result,):
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.numel())
        return result


class TestGradients:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("case", ["causal", "index", "mask", "additive"])
    def test_against_finite_differences(self, backend: Any, case: str) -> None:
        query, key, value = (t.requires_grad_() for t in qkv(2, 4, 2, 4, 4, 3))
        bias = states(2, 4, seed=9).requires_grad_()
        index: Any = torch.tensor([1, 2]) if case == "index" else 1
        mask = None
        if case == "mask":
            mask = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(1)) > 0.4
            mask[0, 0, 2] = False
        elif case == "additive":
            mask = states(1, 4, 4, 4, seed=11)
        causal = case in ("causal", "index")

        def run(*inputs: Tensor) -> Tensor:
            return attention_with_key_bias(*inputs, index, attention_mask=mask, is_causal=causal, backend=backend)

        assert torch.autograd.gradcheck(run, (query, key, value, bias))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_of_a_bias_shared_by_the_batch_at_zero(self, backend: Any) -> None:
        query, key, value = qkv(3, 4, 2, 5, 5, 4)
        bias = torch.zeros(4, dtype=F64, requires_grad=True)
        result = attention_with_key_bias(query, key, value, bias, is_causal=True, backend=backend)
        upstream = states(*result.shape, seed=5)
        (result * upstream).sum().backward()
        # dL/d(log gamma) = dL/do . a (v - o), row by row.
        logits = 0.5 * query @ key.repeat_interleave(2, 1).transpose(-1, -2)
        weights = torch.softmax(logits.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf), -1)
        way = value[:, :, :1].repeat_interleave(2, 1) - result.detach()
        expected = (upstream * weights[..., :1] * way).sum((0, 2, 3))
        torch.testing.assert_close(bias.grad, expected, atol=1e-12, rtol=1e-10)

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
    def test_in_lower_precision(self, dtype: torch.dtype, tolerance: float) -> None:
        inputs = (*qkv(2, 4, 2, 19, 19, 8), torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=F64))
        wide = [t.to(dtype).to(F64).requires_grad_() for t in inputs]
        narrow = [t.detach().to(dtype if t.dim() == 4 else torch.float32).requires_grad_() for t in wide]
        upstream = states(2, 4, 19, 8, seed=5)
        expected = attention_with_key_bias(*wide, is_causal=True, backend="reference")
        result = attention_with_key_bias(*narrow, is_causal=True, backend="correction")
        (expected * upstream).sum().backward()
        (result.to(F64) * upstream).sum().backward()
        for have, want in zip(narrow, wide, strict=True):
            assert have.grad is not None
            assert want.grad is not None
            assert have.grad.dtype == have.dtype
            error = (have.grad.to(F64) - want.grad).abs().max()
            assert float(error) < tolerance * float(want.grad.abs().max())

    def test_outside_of_the_clamp_the_bias_has_none(self) -> None:
        query, key, value = qkv(1, 2, 1, 4, 4, 4)
        bias = torch.tensor([500.0, 1.0], dtype=F64, requires_grad=True)
        attention_with_key_bias(query, key, value, bias, is_causal=True).square().sum().backward()
        assert bias.grad is not None
        assert bias.grad[0] == 0
        assert bias.grad[1] != 0

    def test_only_what_asks_gets_one(self) -> None:
        query, key, value = qkv(1, 2, 1, 4, 4, 4)
        bias = torch.zeros(2, dtype=F64, requires_grad=True)
        with torch.no_grad():
            assert not attention_with_key_bias(query, key, value, bias, is_causal=True).requires_grad
        assert attention_with_key_bias(query, key, value, bias, is_causal=True).requires_grad
        assert not attention_with_key_bias(query, key, value, bias.detach(), is_causal=True).requires_grad

    def test_twice_goes_by_the_reference_and_is_refused_by_the_closed_form(self) -> None:
        inputs = tuple(t.requires_grad_() for t in (*qkv(1, 2, 1, 3, 3, 2), states(2, seed=9)))

        def run(*args: Tensor) -> Tensor:
            return attention_with_key_bias(*args, is_causal=True, backend="reference")

        assert torch.autograd.gradgradcheck(run, inputs)
        result = attention_with_key_bias(*inputs, is_causal=True, backend="correction")
        with pytest.raises(RuntimeError, match=r"no second derivatives.*backend='reference' has them"):
            torch.autograd.grad(result.sum(), inputs[0], create_graph=True)

    def test_through_a_learned_mask(self) -> None:
        query, key, value = qkv(1, 2, 1, 3, 3, 2)
        mask = states(1, 2, 3, 3, seed=4).requires_grad_()

        def run(additive: Tensor) -> Tensor:
            return attention_with_key_bias(query, key, value, log(2.0, 0.5), attention_mask=additive)

        assert torch.autograd.gradcheck(run, (mask,))
        with pytest.raises(ValueError, match="no mask with a gradient"):
            attention_with_key_bias(query, key, value, log(2.0, 0.5), attention_mask=mask, backend="correction")

    def test_through_the_pieces(self) -> None:
        query, key, value = (t.requires_grad_() for t in qkv(2, 4, 2, 3, 3, 4))
        bias = states(4, seed=9).requires_grad_()

        def by_hand(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
            logits = 0.5 * query @ key.repeat_interleave(2, 1).transpose(-1, -2)
            output = torch.softmax(logits, -1) @ value.repeat_interleave(2, 1)
            weight = key_weight(query, key[:, :, 0], torch.logsumexp(logits, -1), 0.5)
            return correct_output(output, weight, value[:, :, 0], bias)

        assert torch.autograd.gradcheck(by_hand, (query, key, value, bias))
        torch.testing.assert_close(by_hand(query, key, value, bias), attention_with_key_bias(query, key, value, bias))


class TestPieces:
    def test_weight_of_rows_that_do_not_see_the_key(self) -> None:
        query, key, _ = qkv(1, 2, 1, 3, 3, 4)
        lse = torch.tensor([[[0.0, math.inf, -math.inf]] * 2], dtype=F64)
        visible = torch.zeros(1, 1, 3, dtype=torch.bool)
        weight = key_weight(query, key[:, :, 0], lse, 0.5, visible)
        assert torch.equal(weight, torch.zeros_like(weight))

    def test_offset_of_an_additive_mask(self) -> None:
        query, key, _ = qkv(2, 4, 2, 3, 5, 4)
        mask = states(2, 1, 3, 5, seed=8)
        logits = 0.5 * query @ key.repeat_interleave(2, 1).transpose(-1, -2) + mask
        weight = key_weight(query, key[:, :, 2], torch.logsumexp(logits, -1), 0.5, offset=mask[..., 2])
        torch.testing.assert_close(weight, torch.softmax(logits, -1)[..., 2], atol=1e-14, rtol=1e-12)

    def test_one_row_per_sequence_as_servers_lay_them_out(self) -> None:
        # Tokens as batch entries of one row each, with the key of their own sequence.
        query, key, value = qkv(2, 4, 2, 6, 6, 8)
        bias = states(4, seed=9)
        expected = attention_with_key_bias(query, key, value, bias, is_causal=True, backend="reference")
        plain = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        logits = 8**-0.5 * query @ key.repeat_interleave(2, 1).transpose(-1, -2)
        lse = torch.logsumexp(logits.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf), -1)

        def flat(tensor: Tensor) -> Tensor:
            return tensor.transpose(1, 2).flatten(0, 1)[:, :, None]

        sequence = torch.arange(2).repeat_interleave(6)
        weight = key_weight(flat(query), key[sequence, :, 0], flat(lse).squeeze(-1)[..., None], 8**-0.5)
        result = correct_output(flat(plain), weight, value[sequence, :, 0], bias)
        torch.testing.assert_close(result, flat(expected), atol=1e-12, rtol=1e-12)

    def test_the_output_given_is_left_alone(self) -> None:
        output, weight = states(1, 2, 3, 4), torch.rand(1, 2, 3, dtype=F64)
        before = output.clone()
        correct_output(output, weight, states(1, 1, 4, seed=5), torch.ones(2, dtype=F64))
        assert torch.equal(output, before)

    def test_mask_with_bias_for_dropout(self) -> None:
        query, key, value = qkv(2, 4, 2, 5, 5, 8)
        bias = states(4, seed=9)
        mask = key_bias_mask(query, key, bias, is_causal=True)
        result = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        expected = attention_with_key_bias(query, key, value, bias, is_causal=True, backend="reference")
        torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)
        assert mask.shape == (1, 4, 5, 5)

    def test_mask_without_need_for_rows_has_one(self) -> None:
        query, key, _ = qkv(2, 4, 2, 5, 7, 8)
        mask = key_bias_mask(query, key, torch.ones(4), torch.tensor([1, 2]))
        assert mask.shape == (2, 4, 1, 7)
        assert torch.equal(mask.nonzero()[:, 3], torch.tensor([1] * 4 + [2] * 4))

    def test_mask_refuses_what_the_door_refuses(self) -> None:
        query, key, _ = qkv(1, 2, 1, 3, 3, 4)
        door = inspect.unwrap(key_bias_mask)
        with pytest.raises(ValueError, match="key_bias is nan for head 1"):
            door(query, key, torch.tensor([0.0, math.nan]))
        with pytest.raises(ValueError, match="exclude each other"):
            door(query, key, torch.zeros(2), attention_mask=torch.ones(3, 3, dtype=torch.bool), is_causal=True)

    def test_shapes_that_would_broadcast_are_refused(self) -> None:
        query, key, value = qkv(1, 2, 1, 3, 3, 4)
        with pytest.raises(ValueError, match=r"lse has shape \(1,\); it must be \(1, 2, 3\)"):
            inspect.unwrap(key_weight)(query, key[:, :, 0], torch.zeros(1), 0.5)
        correct: Any = inspect.unwrap(correct_output)
        with pytest.raises(ValueError, match=r"weight has shape \(1, 2, 1\); it must be \(1, 2, 3\)"):
            correct(query, torch.zeros(1, 2, 1), value[:, :, 0], torch.zeros(2))
        with pytest.raises(ValueError, match=r"key_bias is torch.float32 of shape \(1,\)"):
            correct(query, torch.zeros(1, 2, 3), value[:, :, 0], torch.zeros(1))


class TestRim:
    @pytest.mark.parametrize("backend", ["auto", "reference", "bias", "augmented", "correction"])
    def test_autocast_does_not_apply(self, backend: Any) -> None:
        query, key, value = qkv(1, 2, 1, 5, 5, 8, dtype=torch.float32)
        plain = attention_with_key_bias(query, key, value, log(2.0, 0.5).float(), is_causal=True, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            inside = attention_with_key_bias(query, key, value, log(2.0, 0.5).float(), is_causal=True, backend=backend)
        assert inside.dtype == torch.float32
        assert torch.equal(inside, plain)

    @pytest.mark.parametrize("backend", ["auto", "reference", "bias", "augmented", "correction"])
    def test_a_wider_mask(self, backend: Any) -> None:
        query, key, value = qkv(1, 2, 1, 5, 5, 8, dtype=torch.float32)
        mask = states(5, 5, seed=3)
        narrow, wide = (
            attention_with_key_bias(query, key, value, log(2.0, 0.5), attention_mask=m, backend=backend)
            for m in (mask.float(), mask)
        )
        assert wide.dtype == torch.float32
        torch.testing.assert_close(wide, narrow, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
    @pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
    def test_the_floor_itself_is_taken_however_it_is_rounded(self, dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
        query, key, value = qkv(1, 2, 1, 5, 5, 8, dtype=dtype)
        bias = torch.full((2,), closed_form_floor(dtype), dtype=bias_dtype)
        result = attention_with_key_bias(query, key, value, bias, is_causal=True, backend="correction")
        other = attention_with_key_bias(query, key, value, bias, is_causal=True, backend="reference")
        torch.testing.assert_close(result, other, atol=3e-2, rtol=3e-2)

    def test_tensors_without_data_have_shapes(self) -> None:
        query, key, value = (t.to("meta") for t in qkv(1, 2, 1, 5, 5, 8))
        assert attention_with_key_bias(query, key, value, torch.zeros(2, device="meta")).shape == (1, 2, 5, 8)


class TestCausalWithDifferentLengths:
    """As in torch: row i sees keys 0..i, whatever the number of keys."""

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(("rows", "keys"), [(3, 6), (6, 3), (1, 4)])
    def test_counted_from_the_first_row(self, backend: Any, rows: int, keys: int) -> None:
        query, key, value = qkv(2, 4, 2, rows, keys, 8)
        bias = states(4, seed=9)
        index = min(1, keys - 1)
        visible = torch.ones(2, 4, rows, keys, dtype=torch.bool).tril()
        result = attention_with_key_bias(query, key, value, bias, index, is_causal=True, backend=backend)
        expected = exact(query, key, value, bias, index, visible, 8**-0.5)
        torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)
        none = attention_with_key_bias(query, key, value, torch.zeros(4), index, is_causal=True, backend=backend)
        plain = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(none, plain, atol=1e-12, rtol=1e-12)


class TestBadInput:
    """Refused with the argument, the value and what would be right. Called past the annotation check of the tests."""

    def call(self, **changes: Any) -> Tensor:
        query, key, value = qkv(2, 4, 2, 3, 5, 8, dtype=torch.float32)
        given = {"query": query, "key": key, "value": value, "key_bias": torch.zeros(4), **changes}
        result: Tensor = inspect.unwrap(attention_with_key_bias)(**given)
        return result

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"query": torch.zeros(4, 3, 8)}, r"query has shape \(4, 3, 8\); it must be \[batch, heads, length, dim\]"),
            ({"key": torch.zeros(2, 2, 5, 8, dtype=F64)}, "key is torch.float64 on cpu and query torch.float32"),
            ({"value": torch.zeros(2, 2, 5, 8, dtype=torch.int64)}, "value is torch.int64"),
            ({"key": torch.zeros(3, 2, 5, 8)}, "batch sizes 2, 3 and 2"),
            ({"key": torch.zeros(2, 2, 5, 6)}, "query has head_dim 8 and key 6"),
            ({"value": torch.zeros(2, 2, 4, 8)}, "value has 2 heads of length 4, key 2 of 5"),
            (
                {"key": torch.zeros(2, 3, 5, 8), "value": torch.zeros(2, 3, 5, 8)},
                "query has 4 heads and key 3; the former must be a positive multiple",
            ),
            ({"key_bias": torch.zeros(2)}, r"key_bias is torch.float32 of shape \(2,\).*\(4,\) or \(2, 4\).*per query"),
            ({"key_bias": torch.zeros(4, dtype=torch.int64)}, "key_bias is torch.int64"),
            ({"key_bias": torch.tensor([0, 1, math.nan, 0])}, "key_bias is nan for head 2; it must be finite"),
            ({"key_bias": torch.tensor([[0.0] * 4, [0, 0, 0, math.inf]])}, "key_bias is inf for head 3"),
            ({"key_bias": torch.tensor([-math.inf, 0, 0, 0])}, "key_bias is -inf for head 0.*mask it"),
            ({"key_index": 5}, r"key_index is 5; it must be in \[0, 5\)"),
            ({"key_index": -1}, r"key_index is -1; it must be in \[0, 5\)"),
            ({"key_index": 1.0}, "key_index is 1.0; it must be an int or a tensor of integers"),
            ({"key_index": torch.tensor([0, 5])}, r"key_index holds 5; every value must be in \[0, 5\)"),
            ({"key_index": torch.tensor([0])}, r"key_index is torch.int64 of shape \(1,\).*\(2,\)"),
            ({"key_index": torch.tensor([0.0, 1.0])}, "key_index is torch.float32"),
            ({"scale": 0.0}, "scale is 0.0; it must be positive and finite"),
            ({"scale": math.nan}, "scale is nan"),
            ({"backend": "fast"}, "backend is 'fast'; it must be one of auto, reference, bias, augmented"),
            ({"bias_range": (1.0, 0.0)}, r"bias_range is \(1.0, 0.0\)"),
            ({"bias_range": (0.0, math.nan)}, "bias_range"),
            ({"attention_mask": torch.ones(2, 1, 3, 4, dtype=torch.bool)}, r"attention_mask has shape \(2, 1, 3, 4\)"),
            ({"attention_mask": torch.ones(3, 5, dtype=torch.int64)}, "attention_mask is torch.int64"),
            ({"attention_mask": torch.ones(1, 1, 1, 3, 5, dtype=torch.bool)}, "attention_mask has shape"),
            ({"attention_mask": torch.zeros(3, 5), "is_causal": True}, "exclude each other"),
            ({"attention_mask": torch.zeros(3, 5, device="meta")}, "attention_mask is on meta and query on cpu"),
        ],
    )
    def test_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            self.call(**changes)

    def test_integers_of_numpy_are_integers(self) -> None:
        numpy = pytest.importorskip("numpy")
        assert torch.equal(self.call(key_index=numpy.int64(2)), self.call(key_index=2))

    @pytest.mark.parametrize("shape", [(3, 5), (1, 5), (4, 3, 5), (2, 1, 3, 5), (1, 4, 1, 5)])
    def test_masks_broadcast_as_in_torch(self, shape: tuple[int, ...]) -> None:
        mask = states(*shape, seed=3, dtype=torch.float32)
        result = self.call(attention_mask=mask, key_bias=torch.ones(4))
        expected = self.call(attention_mask=mask.expand(2, 4, 3, 5), key_bias=torch.ones(4), backend="reference")
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)

    def test_a_stated_range_is_not_read_again(self) -> None:
        # The caller's word counts: this is what spares a GPU from waiting.
        result = self.call(key_bias=torch.full((4,), math.nan), bias_range=(-1.0, 1.0))
        assert torch.isnan(result).all()


class TestKernelsOfTorch:
    """Kernels are private to torch: they are tried before they are trusted, and done without where they are missing."""

    def test_without_any_the_door_still_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "_candidates", lambda *args: [])
        for rows in (2, 64):
            query, key, value = qkv(2, 4, 2, rows, rows, 8)
            bias = states(4, seed=9)
            visible = torch.ones(2, 4, rows, rows, dtype=torch.bool).tril()
            result = attention_with_key_bias(query, key, value, bias, is_causal=True)
            expected = exact(query, key, value, bias, 0, visible, 8**-0.5)
            torch.testing.assert_close(result, expected, atol=1e-11, rtol=1e-11)
        with pytest.raises(ValueError, match="'correction' needs a kernel that returns its log-sum-exp"):
            attention_with_key_bias(query, key, value, bias, is_causal=True, backend="correction")

    @pytest.mark.parametrize("fault", ["missing", "signature", "no lse", "another base"])
    def test_one_that_does_not_do_what_it_should_is_not_used(self, fault: str) -> None:
        def forward(query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool, scale: float) -> Any:
            output, lse, extra = ops.CPU_FLASH.forward(query, key, value, mask, is_causal, scale)
            if fault == "missing":
                raise AttributeError("no such operator")
            if fault == "signature":
                raise TypeError("unexpected argument")
            return output, lse[..., :0] if fault == "no lse" else lse / math.log(2), extra

        kernel = ops.LseKernel(fault, forward, ops.CPU_FLASH.backward, takes_mask=True, takes_groups=True)
        assert not ops._works(kernel, torch.device("cpu"), torch.float32, True)
        assert ops._works(ops.CPU_FLASH, torch.device("cpu"), torch.float32, True)

    def test_one_that_takes_neither_groups_nor_masks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def forward(query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool, scale: float) -> Any:
            assert mask is None
            assert query.shape[1] == key.shape[1] == value.shape[1]
            output, lse, _ = ops.CPU_FLASH.forward(query, key, value, mask, is_causal, scale)
            return output, lse, (3, lse)

        def backward(*args: Any) -> Any:
            assert args[6][0] == 3
            return ops.CPU_FLASH.backward(*args)

        plain = ops.LseKernel("plain", forward, backward, takes_mask=False, takes_groups=False)
        monkeypatch.setattr(ops, "_candidates", lambda *args: [plain])
        inputs = tuple(t.requires_grad_() for t in (*qkv(2, 4, 2, 4, 4, 3), states(4, seed=9)))
        run = {"is_causal": True, "backend": "correction"}
        assert torch.autograd.gradcheck(lambda *args: attention_with_key_bias(*args, **run), inputs)
        with pytest.raises(ValueError, match="log-sum-exp"):
            attention_with_key_bias(*inputs, attention_mask=torch.ones(4, 4, dtype=torch.bool), backend="correction")

    @pytest.mark.parametrize(
        ("rows", "masked", "causal", "expected"),
        [
            (8, False, True, [ops.CUDA_FLASH, ops.CUDA_EFFICIENT]),
            (8, True, False, [ops.CUDA_EFFICIENT]),
            (5, False, False, [ops.CUDA_FLASH, ops.CUDA_EFFICIENT]),
            # The flash kernel would count a causal mask that is not square from the last row.
            (5, False, True, [ops.CUDA_EFFICIENT]),
        ],
    )
    def test_choice_on_cuda(
        self, rows: int, masked: bool, causal: bool, expected: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *args: args)
        for name in ("can_use_flash_attention", "can_use_efficient_attention"):
            monkeypatch.setattr(torch.backends.cuda, name, lambda params: True)
        query, key, value = qkv(1, 4, 2, rows, 8, 8)
        # Enough of a tensor on a device that is not there.
        placed: Any = SimpleNamespace(device=torch.device("cuda"), shape=query.shape)
        mask = torch.zeros(rows, 8) if masked else None
        assert inspect.unwrap(ops._candidates)(placed, key, value, mask, causal) == expected

    @pytest.mark.parametrize("kernel", [ops.CUDA_FLASH, ops.CUDA_EFFICIENT], ids=lambda kernel: kernel.name)
    @pytest.mark.parametrize("masked", [False, True])
    def test_signatures_of_the_cuda_kernels(self, kernel: ops.LseKernel, masked: bool) -> None:
        if masked and not kernel.takes_mask:
            pytest.skip("this kernel takes no mask")
        rows, keys = 37, 45
        query = torch.empty(2, 4, rows, 64, dtype=torch.float16, device="meta")
        key, value = (torch.empty(2, 4, keys, 64, dtype=torch.float16, device="meta") for _ in range(2))
        mask = torch.empty(1, 1, rows, keys, dtype=torch.float16, device="meta") if masked else None
        output, lse, extra = kernel.forward(query, key, value, mask, False, 0.125)
        assert output.shape == query.shape
        assert lse.shape == (2, 4, rows)
        assert lse.dtype == torch.float32
        grads = kernel.backward(output, query, key, value, output, lse, extra, mask, False, 0.125)
        assert [g.shape for g in grads] == [query.shape, key.shape, value.shape]

    def test_masks_for_the_efficient_kernel_start_rows_at_multiples_of_sixteen(self) -> None:
        mask = torch.randn(1, 1, 3, 21)
        aligned = ops._aligned(mask, (2, 4, 3, 21))
        assert aligned.shape == (2, 4, 3, 21)
        assert aligned.stride(-2) % 16 == 0
        assert torch.equal(aligned[1, 2], mask[0, 0])
        assert ops._aligned(torch.randn(1, 1, 3, 32), (1, 1, 3, 32)).stride(-2) == 32

    @pytest.mark.slow
    def test_compiled(self) -> None:
        # In a process of its own: the annotation check of the tests cannot be traced. Not by inductor, which would need
        # a C++ compiler.
        code = """
import torch
from separata_core.attention import attention_with_key_bias

inputs = *(torch.randn(1, heads, 9, 8) for heads in (4, 2, 2)), torch.tensor([1.0, 0.0, -1.0, 2.0])
for known in ((-1.0, 2.0), None):
    def run(*args):
        return attention_with_key_bias(*args, is_causal=True, bias_range=known)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    if known is None:
        torch.testing.assert_close(compiled(*inputs), run(*inputs))
        continue
    leaves = [t.clone().requires_grad_() for t in inputs]
    run(*leaves).square().sum().backward()
    again = [t.clone().requires_grad_() for t in inputs]
    compiled(*again).square().sum().backward()
    for one, other in zip(leaves, again):
        torch.testing.assert_close(one.grad, other.grad)
print("same")
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
        assert done.stdout.strip() == "same", done.stderr


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize("backend", ["bias", "augmented", "correction", "auto"])
    @pytest.mark.parametrize("kind", ["causal", "mask", "decode", "rectangle"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_against_float64(self, backend: Any, kind: str, dtype: torch.dtype) -> None:
        rows, keys = {"causal": (70, 70), "mask": (70, 70), "decode": (1, 70), "rectangle": (30, 70)}[kind]
        query, key, value = (t.to("cuda") for t in qkv(2, 6, 2, rows, keys, 64, dtype=dtype))
        bias = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -0.5], device="cuda")
        index = torch.tensor([0, 5], device="cuda")
        mask = torch.ones(2, 1, rows, keys, dtype=torch.bool, device="cuda").tril() if kind == "mask" else None
        causal = kind in ("causal", "rectangle")
        grads = []
        results = []
        for run, name in ((dtype, backend), (F64, "reference")):
            inputs = [t.detach().to(run).requires_grad_() for t in (query, key, value)]
            biases = bias.detach().clone().requires_grad_()
            with torch.no_grad():
                results.append(
                    attention_with_key_bias(*inputs, biases, index, attention_mask=mask, is_causal=causal, backend=name)
                )
            result = attention_with_key_bias(
                *inputs, biases, index, attention_mask=mask, is_causal=causal, backend=name
            )
            result.to(F64).square().sum().backward()
            grads.append([t.grad.to(F64) for t in (*inputs, biases)])
        tolerance = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}[dtype]
        assert float((results[0].to(F64) - results[1]).abs().max()) < tolerance
        for have, want in zip(*grads, strict=True):
            assert float((have - want).abs().max()) < 2 * tolerance * max(1.0, float(want.abs().max()))


class TestSeveralKeys:
    """Marks instead of an index: the bias goes to every marked key."""

    def expected(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, marks: Tensor, seen: Tensor) -> Tensor:
        """Textbook attention with the bias in the logits of the marked keys; rows that see nothing are 0."""
        groups = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) / math.sqrt(query.shape[-1])
        rows = bias.expand(query.shape[0], -1)
        logits = logits + rows[:, :, None, None] * marks[:, None, None]
        weights = logits.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num()
        return weights @ value.repeat_interleave(groups, 1)

    @pytest.mark.parametrize("backend", ["reference", "bias", "augmented", "auto"])
    @pytest.mark.parametrize("kind", ["none", "causal", "bool", "additive"])
    def test_against_the_textbook(self, backend: Any, kind: str) -> None:
        query, key, value = qkv(2, 4, 2, 7, 7, 5)
        marks = states(2, 7, seed=4) > 0.3
        bias = states(2, 4, seed=5)
        seen = torch.ones(2, 1, 7, 7, dtype=torch.bool)
        if kind != "none":
            seen = seen.tril()
        arguments: dict[str, Any] = {"is_causal": kind == "causal"}
        if kind in ("bool", "additive"):
            seen = seen & (states(2, 1, 7, 7, seed=6) > -1)
            seen[..., 0] = True
            mask = seen if kind == "bool" else torch.zeros(seen.shape, dtype=F64).masked_fill(~seen, -math.inf)
            arguments = {"attention_mask": mask}
        result = attention_with_key_bias(query, key, value, bias, marks, backend=backend, **arguments)
        torch.testing.assert_close(result, self.expected(query, key, value, bias, marks, seen), atol=1e-12, rtol=0)

    @pytest.mark.parametrize("backend", ["reference", "bias", "augmented"])
    def test_one_mark_is_an_index_bit_for_bit(self, backend: Any) -> None:
        query, key, value = qkv(2, 4, 2, 6, 6, 8, dtype=torch.float32)
        bias, index = states(4, dtype=torch.float32), torch.tensor([0, 3])
        marks = torch.arange(6)[None] == index[:, None]
        for arguments in ({}, {"is_causal": True}, {"attention_mask": torch.ones(6, 6, dtype=torch.bool).tril(2)}):
            single, several = (
                attention_with_key_bias(query, key, value, bias, which, backend=backend, **arguments)
                for which in (index, marks)
            )
            assert torch.equal(single, several)

    def test_packed_segments_equal_the_segments_alone(self) -> None:
        query, key, value = qkv(1, 4, 2, 9, 9, 8)
        bias, lengths = log(3.0, 0.2, 1.0, 40.0), (4, 2, 3)
        segment = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
        seen = (segment[:, None] == segment[None]) & torch.ones(9, 9, dtype=torch.bool).tril()
        marks = (segment.diff(prepend=torch.tensor([-1])) != 0)[None]
        packed = attention_with_key_bias(query, key, value, bias, marks, attention_mask=seen)
        at = 0
        for length in lengths:
            part = slice(at, at + length)
            alone = attention_with_key_bias(
                query[:, :, part], key[:, :, part], value[:, :, part], bias, is_causal=True, backend="reference"
            )
            torch.testing.assert_close(packed[:, :, part], alone, atol=1e-12, rtol=0)
            at += length

    @pytest.mark.parametrize("backend", ["reference", "bias", "augmented", "auto"])
    def test_rows_that_see_no_marked_key_keep_their_bits(self, backend: Any) -> None:
        query, key, value = qkv(2, 4, 2, 8, 8, 8, dtype=torch.float16)
        marks = torch.zeros(2, 8, dtype=torch.bool)
        marks[:, [4, 5]] = True
        # A finite float16 mask, under which a bias would show in a row that it masks altogether.
        mask = torch.zeros(8, 8, dtype=torch.float16).masked_fill(
            torch.ones(8, 8, dtype=torch.bool).triu(1), torch.finfo(torch.float16).min
        )
        mask[2] = torch.finfo(torch.float16).min
        for arguments in ({"attention_mask": mask}, {"is_causal": True}):
            biased, plain = (
                attention_with_key_bias(query, key, value, bias, marks, backend=backend, bias_range=(0, 5), **arguments)
                for bias in (torch.full((4,), 5.0), torch.zeros(4))
            )
            assert torch.equal(biased[:, :, :4], plain[:, :, :4])
            assert not torch.equal(biased[:, :, 4:], plain[:, :, 4:])

    def test_gradients(self) -> None:
        query, key, value = (each.requires_grad_() for each in qkv(1, 2, 1, 4, 4, 3))
        bias = log(3.0, 0.3).requires_grad_()
        marks = torch.tensor([[True, False, True, False]])

        def run(*inputs: Tensor) -> Tensor:
            return attention_with_key_bias(*inputs, marks, is_causal=True, backend="augmented")

        assert torch.autograd.gradcheck(run, (query, key, value, bias))

    @pytest.mark.parametrize("backend", ["correction", "triton"])
    def test_closed_form_refuses(self, backend: Any) -> None:
        query, key, value = qkv(1, 2, 1, 3, 3, 4)
        with pytest.raises(ValueError, match="key_index marks several"):
            attention_with_key_bias(
                query, key, value, log(2.0, 2.0), torch.ones(1, 3, dtype=torch.bool), backend=backend
            )

    def test_wrong_shape(self) -> None:
        query, key, value = qkv(2, 2, 1, 3, 3, 4)
        for marks in (torch.ones(2, dtype=torch.bool), torch.ones(1, 3, dtype=torch.bool), torch.ones(2, 3)):
            with pytest.raises(ValueError, match=r"integers of shape \(2,\).* or bool of shape \(2, 3\)"):
                inspect.unwrap(attention_with_key_bias)(query, key, value, log(2.0, 2.0), marks)

    def test_mask_for_other_kernels(self) -> None:
        query, key, value = qkv(2, 4, 2, 5, 5, 8)
        marks, bias = torch.arange(10).reshape(2, 5) % 3 == 0, log(2.0, 0.5, 4.0, 1.0)
        mask = key_bias_mask(query, key, bias, marks, is_causal=True)
        torch.testing.assert_close(
            scaled_dot_product_attention(query, key, value, mask, enable_gqa=True),
            attention_with_key_bias(query, key, value, bias, marks, is_causal=True, backend="reference"),
        )


class TestAugmentedStates:
    @pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
    @pytest.mark.parametrize("scale", [None, 0.02])
    def test_plain_attention_on_them_is_attention_with_the_bias(self, dtype: torch.dtype, scale: float | None) -> None:
        query, key, value = qkv(2, 4, 2, 9, 9, 12, dtype=dtype)
        bias, index = log(2.0, 0.5, 30.0, 1.0), torch.tensor([0, 2])
        wide = augment_states(query, key, value, bias, index, scale=scale)
        assert {states.shape[-1] for states in wide} == {16}
        result = scaled_dot_product_attention(
            *wide, is_causal=True, scale=12**-0.5 if scale is None else scale, enable_gqa=True
        )
        expected = attention_with_key_bias(
            query, key, value, bias, index, is_causal=True, scale=scale, backend="reference"
        )
        atol = 1e-12 if dtype == F64 else 2e-2
        torch.testing.assert_close(result[..., :12], expected, atol=atol, rtol=0)
        assert not result[..., 12:].any()

    def test_bias_of_zero_adds_nothing(self) -> None:
        query, key, value = qkv(1, 2, 1, 4, 4, 8)
        wide = augment_states(query, key, value, torch.zeros(2), torch.ones(1, 4, dtype=torch.bool))
        assert not wide[0][..., 8:].any()

    def test_bad_input(self) -> None:
        query, key, value = qkv(1, 2, 1, 4, 4, 8)
        with pytest.raises(ValueError, match="key_index is 4"):
            augment_states(query, key, value, torch.zeros(2), 4)
        with pytest.raises(ValueError, match="scale is -1"):
            augment_states(query, key, value, torch.zeros(2), scale=-1.0)
