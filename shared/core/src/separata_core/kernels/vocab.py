# ruff: noqa: N803 -- arguments in capitals are compile-time constants, as everywhere in Triton
# Kernels are typed by how they are launched, and Triton declares no types:
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels behind `separata_core.vocab`.

Forward: one program takes a block of tokens and a share of the vocabulary, forms its logits block by block with float32
accumulation and keeps the running sums; the shares are joined in torch. Backward: one program forms a block of logits
again, in the same way, and writes the gradient of each. The two products that remain, with `weight` and with `hidden`,
are left to the matrix library: it runs them at full speed and in a fixed order, where a fused kernel would have to add
into locations that programs share with atomics, whose order changes from run to run.
"""

import math
from typing import Any

import torch
import triton  # type: ignore[import-untyped]  # it ships no types
import triton.language as tl  # type: ignore[import-untyped]  # it ships no types
from torch import Tensor

from separata_core.internal.kernels import KernelCase
from separata_core.vocab import LOWEST_EXPONENT

# Programs per multiprocessor that the forward pass aims at, so that none of them waits long for the last.
_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _logits_block(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    first_row,
    first_column,
    tokens,
    vocab,
    dim,
    stride_hidden_row,
    stride_hidden_dim,
    stride_weight_row,
    stride_weight_dim,
    stride_bias,
    temperature,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Logits [BLOCK_ROWS, BLOCK_COLUMNS] in float32, -inf beyond the vocabulary, and tanh of the softcap (or 0)."""
    # The block's first row in 64 bits (262144 by 8192 is 2**31 elements), the rest relative to it in 32.
    offsets = tl.arange(0, BLOCK_DIM)
    hidden_ptr += first_row.to(tl.int64) * stride_hidden_row
    weight_ptr += first_column.to(tl.int64) * stride_weight_row
    local_rows = tl.arange(0, BLOCK_ROWS)
    local_columns = tl.arange(0, BLOCK_COLUMNS)
    hidden_offsets = local_rows[:, None] * stride_hidden_row + offsets[None, :] * stride_hidden_dim
    weight_offsets = local_columns[None, :] * stride_weight_row + offsets[:, None] * stride_weight_dim
    in_rows = (local_rows < tokens - first_row)[:, None]
    in_columns = (local_columns < vocab - first_column)[None, :]
    logits = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, dim, BLOCK_DIM):
        in_dim = offsets < dim - start
        hidden = tl.load(hidden_ptr + hidden_offsets, mask=in_rows & in_dim[None, :], other=0.0)
        weight = tl.load(weight_ptr + weight_offsets, mask=in_columns & in_dim[:, None], other=0.0)
        if WIDEN:
            hidden, weight = hidden.to(tl.float32), weight.to(tl.float32)
        logits = tl.dot(hidden, weight, logits, input_precision=PRECISION)
        hidden_ptr += BLOCK_DIM * stride_hidden_dim
        weight_ptr += BLOCK_DIM * stride_weight_dim
    tanh = tl.zeros((1, 1), dtype=tl.float32)
    if HAS_BIAS:
        bias_offsets = (first_column + local_columns).to(tl.int64) * stride_bias
        bias = tl.load(bias_ptr + bias_offsets[None, :], mask=in_columns, other=0.0).to(tl.float32)
        logits += bias
    if HAS_SOFTCAP:
        tanh = 2 * tl.sigmoid(2 * (logits / softcap)) - 1
        logits = tanh * softcap
        if HAS_BIAS:
            logits = tl.where(bias == float("-inf"), float("-inf"), logits)
    logits = tl.where(in_columns, logits / temperature, float("-inf"))
    return logits, tanh


@triton.jit
def _sums_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    target_ptr,
    peak_ptr,
    total_ptr,
    weighted_ptr,
    target_logit_ptr,
    tokens,
    vocab,
    dim,
    share,
    stride_hidden_row,
    stride_hidden_dim,
    stride_weight_row,
    stride_weight_dim,
    stride_bias,
    temperature,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TARGET: tl.constexpr,
    ENTROPY: tl.constexpr,
    LOWEST_EXPONENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # Token blocks vary fastest, so that programs of the same time read the same weights.
    first_row = tl.program_id(0) * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    part = tl.program_id(1)
    in_rows = rows < tokens
    peak = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    target_logit = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    if HAS_TARGET:
        target = tl.load(target_ptr + rows, mask=in_rows, other=-1)
    first = part * share
    for offset in range(0, tl.minimum(share, vocab - first), BLOCK_COLUMNS):
        first_column = first + offset
        columns = first_column + tl.arange(0, BLOCK_COLUMNS)
        logits, _ = _logits_block(
            hidden_ptr,
            weight_ptr,
            bias_ptr,
            first_row,
            first_column,
            tokens,
            vocab,
            dim,
            stride_hidden_row,
            stride_hidden_dim,
            stride_weight_row,
            stride_weight_dim,
            stride_bias,
            temperature,
            softcap,
            HAS_BIAS,
            HAS_SOFTCAP,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            BLOCK_DIM,
            PRECISION,
            WIDEN,
        )
        if HAS_TARGET:
            target_logit += tl.sum(tl.where(columns[None, :] == target[:, None], logits, 0.0), 1)
        higher = tl.maximum(peak, tl.max(logits, 1))
        # A block of nothing but -inf: subtracting its peak would give NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        drop = tl.maximum(peak - shift, LOWEST_EXPONENT)
        exponent = logits - shift[:, None]
        exp = tl.exp(exponent)
        if ENTROPY:
            exponent = tl.where(exponent < LOWEST_EXPONENT, LOWEST_EXPONENT, exponent)
            weighted = tl.exp(drop) * (weighted + drop * total) + tl.sum(exp * exponent, 1)
        total = tl.exp(drop) * total + tl.sum(exp, 1)
        peak = higher
    offsets = part * tokens + rows
    tl.store(peak_ptr + offsets, peak, mask=in_rows)
    tl.store(total_ptr + offsets, total, mask=in_rows)
    if ENTROPY:
        tl.store(weighted_ptr + offsets, weighted, mask=in_rows)
    if HAS_TARGET:
        tl.store(target_logit_ptr + offsets, target_logit, mask=in_rows)


@triton.jit
def _logit_gradient_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    target_ptr,
    shift_ptr,
    flat_ptr,
    entropy_ptr,
    log_probs_ptr,
    out_ptr,
    tokens,
    vocab,
    dim,
    stride_hidden_row,
    stride_hidden_dim,
    stride_weight_row,
    stride_weight_dim,
    stride_bias,
    temperature,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LOG_PROBS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    LOWEST_EXPONENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    first_row = tl.program_id(0) * BLOCK_ROWS
    first_column = tl.program_id(1) * BLOCK_COLUMNS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    in_rows = rows < tokens
    logits, tanh = _logits_block(
        hidden_ptr,
        weight_ptr,
        bias_ptr,
        first_row,
        first_column,
        tokens,
        vocab,
        dim,
        stride_hidden_row,
        stride_hidden_dim,
        stride_weight_row,
        stride_weight_dim,
        stride_bias,
        temperature,
        softcap,
        HAS_BIAS,
        HAS_SOFTCAP,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        BLOCK_DIM,
        PRECISION,
        WIDEN,
    )
    exponent = logits - tl.load(shift_ptr + rows, mask=in_rows, other=0.0)[:, None]
    factor = tl.load(flat_ptr + rows, mask=in_rows, other=0.0)[:, None]
    exp = tl.exp(exponent)
    if HAS_ENTROPY:
        exponent = tl.where(exponent < LOWEST_EXPONENT, LOWEST_EXPONENT, exponent)
        factor = factor - tl.load(entropy_ptr + rows, mask=in_rows, other=0.0)[:, None] * exponent
    gradient = exp * factor
    if HAS_LOG_PROBS:
        target = tl.load(target_ptr + rows, mask=in_rows, other=-1)[:, None]
        at_target = tl.load(log_probs_ptr + rows, mask=in_rows, other=0.0)[:, None]
        gradient += tl.where(columns[None, :] == target, at_target, 0.0)
    if HAS_SOFTCAP:
        gradient *= 1 - tanh * tanh
    offsets = rows.to(tl.int64)[:, None] * vocab + columns[None, :]
    mask = in_rows[:, None] & (columns < vocab)[None, :]
    tl.store(out_ptr + offsets, gradient.to(out_ptr.dtype.element_ty), mask=mask)


def sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    temperature: float,
    softcap: float | None,
    *,
    entropy: bool,
    parts: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Peak, sum of exp, sum of exp times exponent (0 without `entropy`) and target logit of each token.

    Args:
        hidden: [tokens, dim]; float32, float16 or bfloat16, of any strides, as is `weight`.
        weight: [vocab, dim].
        bias: [vocab] or None.
        target: int64 [tokens], contiguous, or None; values outside the vocabulary have logit 0.
        temperature: Divides the logits, after the softcap.
        softcap: Bound of the logits or None.
        entropy: Whether the third result is wanted.
        parts: Shares of the vocabulary that are summed apart; None chooses by the size of the GPU.
    """
    (tokens, dim), vocab = hidden.shape, len(weight)
    blocks = _blocks(hidden.dtype)
    row_blocks = triton.cdiv(tokens, blocks["BLOCK_ROWS"])
    column_blocks = triton.cdiv(vocab, blocks["BLOCK_COLUMNS"])
    if parts is None:
        parts = _processors(hidden.device) * _PROGRAMS_PER_PROCESSOR // max(row_blocks, 1)
    share = triton.cdiv(column_blocks, max(1, min(parts, column_blocks))) * blocks["BLOCK_COLUMNS"]
    parts = triton.cdiv(vocab, share)
    empty = hidden.new_empty
    peak, total = empty((parts, tokens), dtype=torch.float32), empty((parts, tokens), dtype=torch.float32)
    weighted = torch.empty_like(peak) if entropy else torch.zeros_like(peak)
    target_logit = torch.zeros_like(peak) if target is None else torch.empty_like(peak)
    if tokens:
        _sums_kernel[(row_blocks, parts)](
            hidden,
            weight,
            bias,
            target,
            peak,
            total,
            weighted,
            target_logit,
            tokens,
            vocab,
            dim,
            share,
            *hidden.stride(),
            *weight.stride(),
            0 if bias is None else bias.stride(0),
            temperature,
            softcap or 1.0,
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_TARGET=target is not None,
            ENTROPY=entropy,
            LOWEST_EXPONENT=LOWEST_EXPONENT,
            **blocks,
            **_launch(hidden.dtype),
        )
    highest = peak.amax(0)
    drop = (peak - highest.masked_fill(highest == -math.inf, 0)).clamp_(min=LOWEST_EXPONENT)
    joined = drop.exp()
    return (
        highest,
        (joined * total).sum(0),
        (joined * (weighted + drop * total)).sum(0),
        target_logit.sum(0),
    )


def logit_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    temperature: float,
    softcap: float | None,
    *,
    shift: Tensor,
    flat: Tensor,
    entropy: Tensor | None,
    log_probs: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Gradient of each logit before softcap and temperature, [tokens, vocab], written to `out`.

    It is `exp(l - shift) * (flat - entropy * (l - shift))`, plus `log_probs` at the target, times the softcap's slope.

    Args:
        hidden: As for `sums`, and so on down to `softcap`.
        weight: As there.
        bias: As there.
        target: As there.
        temperature: As there; its slope is taken to be in `flat`, `entropy` and `log_probs` already.
        softcap: As there.
        shift: float32 [tokens], contiguous, as are the next three.
        flat: As above.
        entropy: As above; None for 0.
        log_probs: As above; None for 0.
        out: [tokens, vocab], contiguous.
    """
    (tokens, dim), vocab = hidden.shape, len(weight)
    blocks = _blocks(hidden.dtype)
    grid = (triton.cdiv(tokens, blocks["BLOCK_ROWS"]), triton.cdiv(vocab, blocks["BLOCK_COLUMNS"]))
    _logit_gradient_kernel[grid](
        hidden,
        weight,
        bias,
        target,
        shift,
        flat,
        entropy,
        log_probs,
        out,
        tokens,
        vocab,
        dim,
        *hidden.stride(),
        *weight.stride(),
        0 if bias is None else bias.stride(0),
        temperature,
        softcap or 1.0,
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_LOG_PROBS=log_probs is not None,
        HAS_ENTROPY=entropy is not None,
        LOWEST_EXPONENT=LOWEST_EXPONENT,
        **blocks,
        **_launch(hidden.dtype),
    )
    return out


def _blocks(dtype: torch.dtype) -> dict[str, Any]:
    """Block sizes that fit the registers of sm_80 and sm_90 without spilling, and how float32 is multiplied."""
    blocks: dict[str, Any] = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 64, "BLOCK_DIM": 32, "PRECISION": "ieee"}
    if dtype == torch.float32:
        blocks |= {"BLOCK_ROWS": 64, "BLOCK_DIM": 16}
        if torch.get_float32_matmul_precision() != "highest":
            blocks["PRECISION"] = "tf32"
    # Triton's interpreter multiplies the bit patterns of bfloat16 as integers; in float32 their products are exact.
    blocks["WIDEN"] = dtype == torch.bfloat16 and bool(triton.knobs.runtime.interpret)
    return blocks


def _launch(dtype: torch.dtype) -> dict[str, int]:
    return {"num_warps": 8, "num_stages": 2 if dtype == torch.float32 else 4}


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def compile_cases() -> list[KernelCase]:
    """Both kernels in bfloat16 and float32: with everything on and any strides, and for the loss of a dense model.

    In the latter the width is a constant, that of SmolLM2-135M, so that loads are vectorised and pipelined as they are
    when Triton finds at launch that strides are multiples of 16.
    """
    cases = []
    for dtype, element in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for full in (False, True):
            names = {
                _sums_kernel: {"HAS_TARGET": True, "ENTROPY": full},
                _logit_gradient_kernel: {"HAS_LOG_PROBS": True, "HAS_ENTROPY": full},
            }
            for kernel, switches in names.items():
                constexprs: dict[str, Any] = {
                    "HAS_BIAS": full,
                    "HAS_SOFTCAP": full,
                    "LOWEST_EXPONENT": LOWEST_EXPONENT,
                    **switches,
                    **_blocks(dtype),
                }
                if not full:
                    constexprs |= {"bias_ptr": None, "stride_hidden_dim": 1, "stride_weight_dim": 1}
                    constexprs |= dict.fromkeys(("dim", "stride_hidden_row", "stride_weight_row"), 576)
                    constexprs |= {"entropy_ptr": None} if "HAS_ENTROPY" in switches else {}
                signature = {
                    name: "constexpr" if name in constexprs else _argument_type(name, element)
                    for name in kernel.arg_names
                }
                variant = "full" if full else "loss"
                cases.append(
                    KernelCase(
                        name=f"vocab.{kernel.__name__.strip('_')}.{variant}.{element}",
                        fn=kernel,
                        signature=signature,
                        constexprs=constexprs,
                        **_launch(dtype),
                    )
                )
    return cases


def _argument_type(name: str, element: str) -> str:
    if name in ("hidden_ptr", "weight_ptr", "bias_ptr", "out_ptr"):
        return f"*{element}"
    if name == "target_ptr":
        return "*i64"
    if name.endswith("_ptr"):
        return "*fp32"
    return "fp32" if name in ("temperature", "softcap") else "i32"
