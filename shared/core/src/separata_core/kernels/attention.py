# Kernels are typed by how they are launched, and Triton declares no types:
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The closed-form correction of attention with a bias on one key, in one kernel.

Reads the output of any attention kernel with its log-sum-exp, and per row the query; recomputes the weight of the
biased key and writes the corrected output, in place or elsewhere. All arithmetic is in float32.
"""

import functools
from typing import Any

import torch
import triton  # type: ignore[import-untyped]  # it ships no types
import triton.language as tl  # type: ignore[import-untyped]  # it ships no types
from torch import Tensor

from separata_core.internal.kernels import KernelCase

# Rows of a program and its warps. At most 32 elements of each operand for a thread at a width of 128: with 64,
# registers spill on sm_80.
_TILES = ((1, 1), (4, 1), (8, 2), (16, 4), (32, 8), (64, 8))

_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


# Only there to tune by: programs for different lengths are the same.
@triton.jit(do_not_specialize=["rows_bucket"])
def correct_kernel(
    result_ptr,
    output_ptr,
    lse_ptr,
    query_ptr,
    key_at_ptr,
    value_at_ptr,
    bias_ptr,
    visible_ptr,
    offset_ptr,
    heads,
    groups,
    rows,
    rows_bucket,
    scale,
    result_batch,
    result_head,
    result_row,
    result_dim,
    output_batch,
    output_head,
    output_row,
    output_dim,
    lse_batch,
    lse_head,
    lse_row,
    query_batch,
    query_head,
    query_row,
    query_dim,
    key_batch,
    key_head,
    key_dim,
    value_batch,
    value_head,
    value_dim,
    bias_batch,
    bias_head,
    visible_batch,
    visible_head,
    visible_row,
    offset_batch,
    offset_head,
    offset_row,
    head_width: tl.constexpr,
    value_width: tl.constexpr,
    has_visible: tl.constexpr,
    has_offset: tl.constexpr,
    block_rows: tl.constexpr,
    block_head: tl.constexpr,
    block_value: tl.constexpr,
):
    """Correct `block_rows` rows of one head."""
    # One grid dimension, since the others end at 65535; and 64 bits, since batch * stride passes 2**31.
    blocks = tl.cdiv(rows, block_rows)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    batch = pair // heads
    head = pair % heads
    kv_head = head // groups
    row = (tl.program_id(0) % blocks).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    inside = row < rows
    dim = tl.arange(0, block_head)
    column = tl.arange(0, block_value)

    key_at = tl.load(
        key_at_ptr + batch * key_batch + kv_head * key_head + dim * key_dim, mask=dim < head_width, other=0.0
    ).to(tl.float32)
    query = tl.load(
        query_ptr + batch * query_batch + head * query_head + row[:, None] * query_row + dim[None, :] * query_dim,
        mask=inside[:, None] & (dim[None, :] < head_width),
        other=0.0,
    ).to(tl.float32)
    logit = tl.sum(query * (key_at * scale)[None, :], axis=1)
    if has_offset:
        place = batch * offset_batch + head * offset_head + row * offset_row
        logit += tl.load(offset_ptr + place, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + batch * lse_batch + head * lse_head + row * lse_row, mask=inside, other=0.0)
    weight = tl.exp(tl.minimum(logit - lse.to(tl.float32), 0.0))
    if has_visible:
        place = batch * visible_batch + head * visible_head + row * visible_row
        seen = tl.load(visible_ptr + place, mask=inside, other=0) != 0
        weight = tl.where(seen, weight, 0.0)

    bias = tl.load(bias_ptr + batch * bias_batch + head * bias_head).to(tl.float32)
    # exp(b) - 1 loses its digits near 0, where the series is exact to float32.
    series = bias * (1.0 + bias * (0.5 + bias * (1.0 / 6.0 + bias * (1.0 / 24.0 + bias / 120.0))))
    excess = tl.where(tl.abs(bias) < 0.125, series, tl.exp(bias) - 1.0) * weight
    share = excess / tl.maximum(1.0 + excess, 1.1920929e-07)

    spot = inside[:, None] & (column[None, :] < value_width)
    value_at = tl.load(
        value_at_ptr + batch * value_batch + kv_head * value_head + column * value_dim,
        mask=column < value_width,
        other=0.0,
    ).to(tl.float32)
    place = batch * output_batch + head * output_head + row[:, None] * output_row + column[None, :] * output_dim
    output = tl.load(output_ptr + place, mask=spot, other=0.0).to(tl.float32)
    way = value_at[None, :] - output
    # From the nearer end: share 0 keeps the bits of the output, share 1 gives exactly the value.
    mixed = tl.where(
        share[:, None] < 0.5, output + share[:, None] * way, value_at[None, :] - way * (1.0 - share[:, None])
    )
    mixed = tl.where(share[:, None] == 0.0, output, mixed)
    place = batch * result_batch + head * result_head + row[:, None] * result_row + column[None, :] * result_dim
    tl.store(result_ptr + place, mixed.to(result_ptr.dtype.element_ty), mask=spot)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (`TRITON_INTERPRET=1` when triton was imported)."""
    return not isinstance(correct_kernel, triton.runtime.JITFunction)


def available(query: Tensor) -> bool:
    """Whether the kernel can run on tensors like `query`."""
    if query.dtype not in _DTYPES:
        return False
    return interpreted() or (query.device.type == "cuda" and torch.version.cuda is not None)


@functools.cache
def _tuned() -> Any:
    configs = [triton.Config({"block_rows": block}, num_warps=warps, num_stages=1) for block, warps in _TILES]
    # Trials would correct an output in place again and again.
    return triton.autotune(configs, key=["rows_bucket", "head_width", "value_width"], restore_value=["result_ptr"])(
        correct_kernel
    )


def correct_output(
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key_at: Tensor,
    value_at: Tensor,
    key_bias: Tensor,
    visible: Tensor | None,
    offset: Tensor | None,
    scale: float,
    *,
    result: Tensor | None = None,
) -> Tensor:
    """Correct `output` for a bias on one key; see `separata_core.attention.correct_output`.

    Args:
        output: Output of the unmodified kernel, [batch, q_heads, query, value_dim], any strides.
        lse: Its log-sum-exp, [batch, q_heads, query].
        query: [batch, q_heads, query, head_dim].
        key_at: The biased key, [batch, kv_heads, head_dim].
        value_at: Its value, [batch, kv_heads, value_dim].
        key_bias: [batch or 1, q_heads, 1] (or without the last dimension), float32.
        visible: Bool, broadcastable to [batch, q_heads, query]; None: every row sees the key.
        offset: What a mask added to the key's logit, likewise.
        scale: Multiplies the logits.
        result: Where to write, `output` itself included; fresh by default.

    Returns:
        `result`.
    """
    batch, heads, rows, head_width = query.shape
    value_width = output.shape[-1]
    if result is None:
        result = torch.empty_like(output)
    if 0 in (batch, rows, value_width):
        return result
    whole = (batch, heads, rows)
    bias = key_bias.reshape(-1, heads).expand(batch, heads)
    # Where there is nothing to read, some pointer must still be passed.
    seen = lse if visible is None else visible.expand(whole)
    added = lse if offset is None else offset.expand(whole)
    arguments = (
        *(result, output, lse, query, key_at, value_at, bias, seen, added),
        *(heads, heads // key_at.shape[1], rows, triton.next_power_of_2(rows), scale),
        *result.stride(),
        *output.stride(),
        *lse.stride(),
        *query.stride(),
        *key_at.stride(),
        *value_at.stride(),
        *bias.stride(),
        *seen.stride(),
        *added.stride(),
    )
    constants = {
        "head_width": head_width,
        "value_width": value_width,
        "has_visible": visible is not None,
        "has_offset": offset is not None,
        "block_head": triton.next_power_of_2(head_width),
        "block_value": triton.next_power_of_2(value_width),
    }
    if interpreted():
        block = 16
        correct_kernel[(triton.cdiv(rows, block) * batch * heads,)](*arguments, **constants, block_rows=block)
    else:
        with torch.cuda.device(query.device):
            _tuned()[lambda meta: (triton.cdiv(rows, meta["block_rows"]) * batch * heads,)](*arguments, **constants)
    return result


def correct_in_place(
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key_at: Tensor,
    value_at: Tensor,
    key_bias: Tensor,
    visible: Tensor | None,
    offset: Tensor | None,
    scale: float,
) -> Tensor:
    """As `correct_output`, over the output that it is given."""
    return correct_output(output, lse, query, key_at, value_at, key_bias, visible, offset, scale, result=output)


def compile_cases() -> list[KernelCase]:
    """What to compile ahead of time: the three dtypes at the two usual head widths, prefill and decode."""
    names = correct_kernel.arg_names
    strides = names[names.index("result_batch") : names.index("head_width")]
    cases = []
    for dtype in _DTYPES.values():
        for width in (64, 128):
            for use, (block, warps) in (("prefill", _TILES[-1]), ("decode", _TILES[0])):
                states = dict.fromkeys(
                    ("result_ptr", "output_ptr", "query_ptr", "key_at_ptr", "value_at_ptr"), f"*{dtype}"
                )
                signature = {
                    **states,
                    "lse_ptr": "*fp32",
                    "bias_ptr": "*fp32",
                    "visible_ptr": "*i1",
                    "offset_ptr": "*fp32",
                    **dict.fromkeys(("heads", "groups", "rows", "rows_bucket"), "i32"),
                    "scale": "fp32",
                    **dict.fromkeys(strides, "i32"),
                }
                constants = {
                    "head_width": width,
                    "value_width": width,
                    "has_visible": True,
                    "has_offset": True,
                    "block_rows": block,
                    "block_head": width,
                    "block_value": width,
                }
                name = f"correct_{dtype}_d{width}_{use}"
                cases.append(KernelCase(name, correct_kernel, signature, constants, num_warps=warps, num_stages=1))
    return cases
