"""The Triton kernel of the correction: in the interpreter, or on a GPU where there is one."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from separata_core.attention import attention_with_key_bias, correct_output, key_weight
from torch import Tensor

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [(torch.float32, 3e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]


def states(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def case(
    batch: int, kv_heads: int, groups: int, rows: int, dim: int, width: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """An output, a log-sum-exp that makes weights from 0 to 1, and the rest."""
    heads = kv_heads * groups
    return {
        "output": states(batch, heads, rows, width, seed=1, dtype=dtype),
        "lse": states(batch, heads, rows, seed=2) + 1.0,
        "query": states(batch, heads, rows, dim, seed=3, dtype=dtype),
        "key_at": states(batch, kv_heads, dim, seed=4, dtype=dtype),
        "value_at": states(batch, kv_heads, width, seed=5, dtype=dtype),
        "key_bias": (states(1, heads, 1, seed=6)).clamp(min=-1.0),
    }


def by_pieces(given: dict[str, Tensor], scale: float, visible: Tensor | None, offset: Tensor | None) -> Tensor:
    weight = key_weight(given["query"], given["key_at"], given["lse"], scale, visible, offset)
    bias = given["key_bias"].squeeze(-1)
    return correct_output(given["output"], weight, given["value_at"], bias if bias.shape[0] > 1 else bias[0])


def fused(given: dict[str, Tensor], scale: float, visible: Any = None, offset: Any = None, **kwargs: Any) -> Tensor:
    from separata_core.kernels import attention as kernels

    return kernels.correct_output(**given, visible=visible, offset=offset, scale=scale, **kwargs)


class TestAgainstTheReference:
    @settings(max_examples=12)  # the interpreter takes its time, and a GPU compiles anew for each width
    @given(data=st.data())
    def test_odd_shapes(self, data: st.DataObject) -> None:
        batch, kv_heads, groups = (data.draw(st.integers(1, 3)) for _ in range(3))
        rows = data.draw(st.sampled_from([1, 2, 15, 16, 17, 33]))
        dim, width = data.draw(st.sampled_from([(1, 3), (20, 8)]))
        inputs = case(batch, kv_heads, groups, rows, dim, width)
        heads = kv_heads * groups
        if data.draw(st.booleans()):
            inputs["key_bias"] = states(batch, heads, 1, seed=7)
        visible = offset = None
        if data.draw(st.booleans()):
            shape = (data.draw(st.sampled_from([1, batch])), data.draw(st.sampled_from([1, heads])), rows)
            visible = states(*shape, seed=8) > 0
        if data.draw(st.booleans()):
            offset = states(data.draw(st.sampled_from([1, batch])), 1, rows, seed=9)
        result = fused(inputs, 0.3, visible, offset)
        torch.testing.assert_close(result, by_pieces(inputs, 0.3, visible, offset), atol=3e-6, rtol=1e-5)

    @pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
    def test_fresh_buffers_hold_nothing_readable(self, dtype: torch.dtype, tolerance: float, poison: None) -> None:
        inputs = case(2, 2, 3, 37, 24, 40, dtype)
        result = fused(inputs, 0.2)
        assert result.dtype == dtype
        expected = by_pieces({name: t.float() for name, t in inputs.items()}, 0.2, None, None)
        assert float((result.float() - expected).abs().max()) < tolerance * 4

    def test_strides_of_every_argument(self, poison: None) -> None:
        inputs = case(2, 2, 3, 19, 8, 8)
        expected = by_pieces(inputs, 0.3, None, None)

        def spread(tensor: Tensor) -> Tensor:
            """The same values, every dimension strided, NaN in between."""
            wide = torch.full([2 * n for n in tensor.shape], math.nan, device=tensor.device, dtype=tensor.dtype)
            view = wide[tuple(slice(None, None, 2) for _ in tensor.shape)]
            return view.copy_(tensor)

        strided = {name: spread(t) for name, t in inputs.items()}
        result = spread(torch.full_like(inputs["output"], math.nan))
        assert fused(strided, 0.3, result=result) is result
        torch.testing.assert_close(result, expected, atol=3e-6, rtol=1e-5)
        transposed = {
            n: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t for n, t in inputs.items()
        }
        torch.testing.assert_close(fused(transposed, 0.3), expected, atol=3e-6, rtol=1e-5)

    def test_nothing_is_written_outside(self) -> None:
        inputs = case(1, 1, 2, 5, 8, 8)
        frame = torch.full((1, 2, 9, 12), 7.0, device=DEVICE)
        fused(inputs, 0.3, result=frame[:, :, 2:7, 1:9])
        frame[:, :, 2:7, 1:9] = 7.0
        assert (frame == 7.0).all()

    def test_in_place(self) -> None:
        from separata_core.kernels import attention as kernels

        inputs = case(2, 2, 2, 19, 8, 8)
        expected = fused(inputs, 0.3)
        output = inputs.pop("output")
        result = kernels.correct_in_place(output, **inputs, visible=None, offset=None, scale=0.3)
        assert result is output
        assert torch.equal(result, expected)

    @pytest.mark.parametrize(("batch", "rows"), [(0, 3), (2, 0)])
    def test_empty(self, batch: int, rows: int) -> None:
        assert fused(case(batch, 2, 2, rows, 8, 8), 0.3).shape == (batch, 4, rows, 8)

    def test_bias_zero_and_hidden_rows_keep_their_bits(self) -> None:
        inputs = case(2, 2, 2, 19, 8, 8)
        inputs["key_bias"][:, ::2] = 0.0
        visible = torch.arange(19, device=DEVICE)[None, None] >= 5
        # What is not seen may be anything.
        inputs["lse"][:, :, :5] = -math.inf
        result = fused(inputs, 0.3, visible)
        assert torch.equal(result[:, ::2], inputs["output"][:, ::2])
        assert torch.equal(result[:, :, :5], inputs["output"][:, :, :5])
        assert (result[:, 1::2, 5:] != inputs["output"][:, 1::2, 5:]).any(-1).all()

    def test_large_bias_gives_the_value_exactly(self) -> None:
        inputs = case(2, 2, 2, 19, 8, 8)
        inputs["key_bias"] = torch.full((1, 4, 1), 80.0, device=DEVICE)
        expected = inputs["value_at"].repeat_interleave(2, 1)[:, :, None].expand_as(inputs["output"])
        assert torch.equal(fused(inputs, 0.3), expected)

    @pytest.mark.parametrize("bias", [1e-6, -1e-6, 1e-3, 0.1249, 0.1251, -0.1249, -0.1251])
    def test_small_bias_keeps_its_digits(self, bias: float) -> None:
        inputs = case(1, 1, 1, 1, 1, 1)
        inputs.update(
            output=torch.zeros(1, 1, 1, 1, device=DEVICE),
            value_at=torch.ones(1, 1, 1, device=DEVICE),
            key_at=torch.zeros(1, 1, 1, device=DEVICE),
            lse=torch.full((1, 1, 1), math.log(2.0), device=DEVICE),
            key_bias=torch.full((1, 1, 1), bias, device=DEVICE),
        )
        excess = math.expm1(bias) / 2
        assert float(fused(inputs, 1.0)) == pytest.approx(excess / (1 + excess), rel=3e-6)


class TestDoor:
    @pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
    @pytest.mark.parametrize("kind", ["causal", "mask", "decode"])
    def test_the_door_gives_the_same(self, dtype: torch.dtype, tolerance: float, kind: str) -> None:
        rows = 1 if kind == "decode" else 21
        query = states(2, 6, rows, 16, seed=1, dtype=dtype)
        key, value = (states(2, 2, 21, 16, seed=seed, dtype=dtype) for seed in (2, 3))
        bias = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5], device=DEVICE)
        index = torch.tensor([0, 4], device=DEVICE)
        mask = torch.zeros(2, 1, 21, 21, device=DEVICE).masked_fill(
            torch.ones(21, 21, dtype=torch.bool, device=DEVICE).triu(1), -math.inf
        )
        mask += states(2, 1, 21, 21, seed=5)
        run: dict[str, Any] = {"attention_mask": mask} if kind == "mask" else {"is_causal": kind == "causal"}
        result = attention_with_key_bias(query, key, value, bias, index, backend="triton", **run)
        expected = attention_with_key_bias(query, key, value, bias, index, backend="reference", **run)
        assert float((result.float() - expected.float()).abs().max()) < 2 * tolerance

    def test_gradients_are_refused(self) -> None:
        query, key, value = (states(1, 2, 3, 8, seed=seed) for seed in (1, 2, 3))
        bias = torch.zeros(2, device=DEVICE, requires_grad=True)
        with pytest.raises(ValueError, match="backend 'triton' has no gradient"):
            attention_with_key_bias(query, key, value, bias, backend="triton")
        with torch.no_grad():
            attention_with_key_bias(query, key, value, bias, backend="triton")

    def test_float64_is_refused(self) -> None:
        query, key, value = (states(1, 2, 3, 8, seed=seed, dtype=torch.float64) for seed in (1, 2, 3))
        with pytest.raises(ValueError, match=r"'triton' (cannot run|needs a kernel)"):
            attention_with_key_bias(query, key, value, torch.ones(2, device=DEVICE), backend="triton")
