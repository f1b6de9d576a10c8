"""Attention kernels of torch that also return the log-sum-exp of every row, and the correction wrapped around them."""

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: What a kernel hands to its own backward beside output and log-sum-exp.
Extra = tuple[Any, ...]
Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor, Extra]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Extra, Tensor | None, bool, float],
    tuple[Tensor, Tensor, Tensor],
]
#: `(output, lse, query, key_at, value_at, key_bias, visible, offset, scale)` to the corrected output, maybe in place.
Fuse = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float], Tensor]


@dataclass(frozen=True)
class LseKernel:
    """A fused attention kernel whose forward also returns the log-sum-exp of every row.

    Attributes:
        name: Names the kernel in messages and tests.
        forward: `(query, key, value, mask, is_causal, scale)` to `(output, lse[B, Hq, T], extra)`.
        backward: `(grad_output, query, key, value, output, lse, extra, mask, is_causal, scale)` to the gradients of
            query, key and value. It must take the weights from `lse` and the row sums from `output`, as FlashAttention
            does; the gradient of the corrected output rests on that.
        takes_mask: Whether an additive mask is understood.
        takes_groups: Whether key and value may have fewer heads than query.
    """

    name: str
    forward: Forward
    backward: Backward
    takes_mask: bool
    takes_groups: bool


#: What attention is defined for; narrower types need scales that these functions do not take.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which autocast is off on this device."""
    if torch.compiler.is_compiling():
        # torch 2.10 cannot trace the question whether there is autocast for a device.
        available = device.type in ("cpu", "cuda")
    else:
        available = torch.amp.is_autocast_available(device.type)
    if not (available and torch.is_autocast_enabled(device.type)):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which logits, weights and biases of tensors of `dtype` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def repeat_heads(states: Tensor, groups: int) -> Tensor:
    """Give every query head its own copy of its key or value head: `[B, Hkv, S, D]` to `[B, Hkv * groups, S, D]`."""
    if groups == 1:
        return states
    batch, heads, keys, dim = states.shape
    return states[:, :, None].expand(batch, heads, groups, keys, dim).reshape(batch, heads * groups, keys, dim)


def key_weight(
    query: Tensor, key_at: Tensor, lse: Tensor, scale: float, visible: Tensor | None, offset: Tensor | None
) -> Tensor:
    """`exp(scale * q.k + offset - lse)`, 0 where not visible; see `separata_core.attention.key_weight`."""
    batch, heads, rows, dim = query.shape
    kv_heads = key_at.shape[1]
    dtype = accumulate_dtype(query.dtype)
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, rows, dim).to(dtype)
    # Product and sum: a matrix product with a single column takes four times as long on the CPU, for its copies.
    logit = (grouped * (key_at.to(dtype) * scale)[:, :, None, None]).sum(-1).reshape(batch, heads, rows)
    if offset is not None:
        logit = logit + offset
    # A row without any visible key has an arbitrary log-sum-exp (0, or an infinity of either sign, by kernel).
    weight = torch.exp((logit - lse).clamp(max=0.0))
    return (
        weight if visible is None else torch.where(visible, weight, torch.zeros((), dtype=dtype, device=weight.device))
    )


def mixing_weight(weight: Tensor, key_bias: Tensor) -> Tensor:
    """The share w in `o' = o + w (v - o)`: `(gamma-1) a / (1 + (gamma-1) a)`, exactly 0 where the bias or a is 0."""
    excess = torch.expm1(key_bias) * weight
    # The floor only keeps the quotient finite; biases that get there are outside of what the closed form can do.
    return excess / (1.0 + excess).clamp(min=torch.finfo(weight.dtype).eps)


def value_rows(value_at: Tensor, heads: int) -> Tensor:
    """`[B, Hkv, Dv]` to `[B, Hq, 1, Dv]`, without a copy where the heads are not grouped."""
    batch, kv_heads, dim = value_at.shape
    groups = heads // kv_heads
    return value_at[:, :, None].expand(batch, kv_heads, groups, dim).reshape(batch, heads, 1, dim)


def mix(output: Tensor, share: Tensor, value_at: Tensor, *, in_place: bool = False) -> Tensor:
    """`o + w (v - o)`, computed in float32 or better, returned in the dtype of `output`."""
    dtype = accumulate_dtype(output.dtype)
    rows = value_rows(value_at, output.shape[1]).to(dtype)
    if output.dtype == dtype:
        return output.lerp_(rows, share[..., None]) if in_place else torch.lerp(output, rows, share[..., None])
    return torch.lerp(output.to(dtype), rows, share[..., None]).to(output.dtype)


def take_key(states: Tensor, key_index: int | Tensor) -> Tensor:
    """The state at the biased key: `[B, H, S, D]` to `[B, H, D]`."""
    if isinstance(key_index, int):
        return states[:, :, key_index]
    return states[torch.arange(states.shape[0], device=states.device), :, key_index]


class CorrectedAttention(torch.autograd.Function):
    """Attention with a bias on one key: a fused kernel, then the closed-form correction.

    The backward needs no second kernel. With `LSE' = LSE + log D` in place of LSE, the fused backward recomputes the
    *corrected* weight of every other key and takes its row sums from the corrected output; only the weight of the
    biased key comes out too small by the factor gamma, and the terms of that one key are added here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_bias: Tensor,
        key_index: int | Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        visible: Tensor | None,
        offset: Tensor | None,
        kernel: LseKernel,
    ) -> Tensor:
        """Run the kernel and correct its output; `key_bias` is `[B|1, Hq, 1]` in the accumulating dtype."""
        output, lse, extra = kernel.forward(query, key, value, mask, is_causal, scale)
        weight = key_weight(query, take_key(key, key_index), lse, scale, visible, offset)
        corrected = mix(output, mixing_weight(weight, key_bias), take_key(value, key_index))
        rows = lse[..., : query.shape[2]] + torch.log1p(torch.expm1(key_bias) * weight)
        tensors = [item for item in extra if isinstance(item, Tensor)]
        ctx.plain_extra = [None if isinstance(item, Tensor) else item for item in extra]
        ctx.tensor_slots = [slot for slot, item in enumerate(extra) if isinstance(item, Tensor)]
        ctx.has_mask = mask is not None
        ctx.index_tensor = isinstance(key_index, Tensor)
        ctx.key_index = None if ctx.index_tensor else key_index
        ctx.kernel, ctx.is_causal, ctx.scale = kernel, is_causal, scale
        kept = [query, key, value, key_bias, corrected, weight, rows]
        kept += [mask] if mask is not None else []
        kept += [key_index] if isinstance(key_index, Tensor) else []
        ctx.save_for_backward(*kept, *tensors)
        return corrected

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value and key_bias."""
        # torch's once_differentiable would take the gradient for a constant wherever the upstream one is.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the closed form of attention with a key bias has no second derivatives, which create_graph=True asks "
                "for; backend='reference' has them"
            )
        query, key, value, key_bias, corrected, weight, lse, *more = ctx.saved_tensors
        mask = more.pop(0) if ctx.has_mask else None
        key_index = more.pop(0) if ctx.index_tensor else ctx.key_index
        extra = list(ctx.plain_extra)
        for slot, item in zip(ctx.tensor_slots, more, strict=True):
            extra[slot] = item
        grad_output = grad_output.contiguous()
        grad_query, grad_key, grad_value = ctx.kernel.backward(
            grad_output, query, key, value, corrected, lse, tuple(extra), mask, ctx.is_causal, ctx.scale
        )

        batch, heads, rows, dim = query.shape
        kv_heads = key.shape[1]
        grouped = (batch, kv_heads, heads // kv_heads, rows)
        dtype = accumulate_dtype(query.dtype)
        key_at, value_at = take_key(key, key_index).to(dtype), take_key(value, key_index).to(dtype)
        grad = grad_output.to(dtype)
        small = weight / (1.0 + torch.expm1(key_bias) * weight)
        full = small * torch.exp(key_bias)
        missing = full - small
        drop = (grad * corrected.to(dtype)).sum(-1)
        along = torch.matmul(grad.reshape(*grouped, -1), value_at[:, :, None, :, None]).reshape(drop.shape)
        grad_logit = along - drop
        step = (missing * grad_logit).reshape(grouped)
        queries = query.reshape(*grouped, dim).to(dtype)
        grad_key_at = torch.einsum("bhgt,bhgtd->bhd", step, queries) * ctx.scale
        grad_value_at = torch.einsum("bhgt,bhgtd->bhd", missing.reshape(grouped), grad.reshape(*grouped, -1))
        extra_query = (step[..., None] * (key_at * ctx.scale)[:, :, None, None]).reshape(query.shape)
        grad_query = (grad_query.to(dtype) + extra_query).to(query.dtype)
        _add_at(grad_key, key_index, grad_key_at)
        _add_at(grad_value, key_index, grad_value_at)
        grad_bias = (full * grad_logit).sum(-1, keepdim=True)
        if key_bias.shape[0] != batch:
            grad_bias = grad_bias.sum(0, keepdim=True)
        return grad_query, grad_key, grad_value, grad_bias, None, None, None, None, None, None, None


def _add_at(grad: Tensor, key_index: int | Tensor, update: Tensor) -> None:
    """Add `update[B, H, D]` to `grad[B, H, S, D]` at the biased key, in place."""
    if isinstance(key_index, int):
        grad[:, :, key_index] = (grad[:, :, key_index].to(update.dtype) + update).to(grad.dtype)
    else:
        batch = torch.arange(grad.shape[0], device=grad.device)
        grad[batch, :, key_index] = (grad[batch, :, key_index].to(update.dtype) + update).to(grad.dtype)


def corrected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    key_index: int | Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    visible: Tensor | None,
    offset: Tensor | None,
    kernel: LseKernel,
    *,
    fuse: Fuse | None = None,
) -> Tensor:
    """Run `kernel` and correct its output, with gradients where any are asked for.

    `fuse`, where given, does the correction in one kernel; no gradient passes through it.
    """
    groups = query.shape[1] // key.shape[1]
    if not kernel.takes_groups:
        key, value = repeat_heads(key, groups), repeat_heads(value, groups)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, key_bias)):
        result: Tensor = CorrectedAttention.apply(
            query, key, value, key_bias, key_index, mask, is_causal, scale, visible, offset, kernel
        )
        return result
    output, lse, _ = kernel.forward(query, key, value, mask, is_causal, scale)
    key_at, value_at = take_key(key, key_index), take_key(value, key_index)
    if fuse is not None:
        return fuse(output, lse, query, key_at, value_at, key_bias, visible, offset, scale)
    weight = key_weight(query, key_at, lse, scale, visible, offset)
    return mix(output, mixing_weight(weight, key_bias), value_at, in_place=True)


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Extra]:
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return output, lse, ()


def _cpu_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    extra: Extra,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, lse, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return grads


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Extra]:
    output, lse, cum_q, cum_k, max_q, max_k, seed, unused, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, False, scale=scale
    )
    return output, lse, (cum_q, cum_k, max_q, max_k, seed, unused)


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    extra: Extra,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    cum_q, cum_k, max_q, max_k, seed, unused = extra
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, output, lse, cum_q, cum_k, max_q, max_k, 0.0, is_causal, seed, unused, scale=scale
    )
    return grads


def _aligned(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The mask as the efficient kernel wants it: full shape by strides, rows that start at multiples of 16 elements."""
    keys = mask.shape[-1]
    if keys % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - keys % 16))[..., :keys]
    return mask.expand(shape)


def _efficient_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Extra]:
    bias = None if mask is None else _aligned(mask, (*query.shape[:3], key.shape[2]))
    output, lse, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, is_causal, scale=scale
    )
    # The kernel pads its log-sum-exp to whole blocks of rows.
    return output, lse[..., : query.shape[2]], (seed, offset)


def _efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    extra: Extra,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    seed, offset = extra
    bias = None if mask is None else _aligned(mask, (*query.shape[:3], key.shape[2]))
    rows = lse.shape[-1]
    padded = torch.nn.functional.pad(lse, (0, -rows % 32), value=math.inf)
    grad_query, grad_key, grad_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad,
        query,
        key,
        value,
        bias,
        output,
        padded,
        seed,
        offset,
        0.0,
        [True, True, True, False],
        is_causal,
        scale=scale,
    )
    return grad_query, grad_key, grad_value


CPU_FLASH = LseKernel("flash_cpu", _cpu_forward, _cpu_backward, takes_mask=True, takes_groups=True)
CUDA_FLASH = LseKernel("flash_cuda", _flash_forward, _flash_backward, takes_mask=False, takes_groups=True)
CUDA_EFFICIENT = LseKernel(
    "efficient_cuda", _efficient_forward, _efficient_backward, takes_mask=True, takes_groups=False
)


def find_lse_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> LseKernel | None:
    """The kernel that returns a log-sum-exp for these tensors on this machine, or None."""
    if query.shape[-1] != value.shape[-1] or 0 in (*query.shape, *key.shape):
        return None
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
        return None
    grouped = query.shape[1] != key.shape[1]
    for kernel in _candidates(query, key, value, mask, is_causal):
        if mask is not None and not kernel.takes_mask:
            continue
        if torch.compiler.is_compiling() or _works(kernel, query.device, query.dtype, grouped and kernel.takes_groups):
            return kernel
    return None


def _candidates(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> list[LseKernel]:
    if query.device.type == "cpu":
        return [CPU_FLASH]
    if query.device.type != "cuda":
        return []
    groups = query.shape[1] // key.shape[1]
    found = []
    # The flash kernel aligns a causal mask that is not square to the last row, torch's SDPA to the first.
    square = query.shape[2] == key.shape[2]
    params = torch.backends.cuda.SDPAParams(query, key, value, mask, 0.0, is_causal, groups != 1)
    if mask is None and (square or not is_causal) and torch.backends.cuda.can_use_flash_attention(params):
        found.append(CUDA_FLASH)
    key, value = repeat_heads(key, groups), repeat_heads(value, groups)
    params = torch.backends.cuda.SDPAParams(query, key, value, mask, 0.0, is_causal, False)
    if torch.backends.cuda.can_use_efficient_attention(params):
        found.append(CUDA_EFFICIENT)
    return found


@functools.cache
def _works(kernel: LseKernel, device: torch.device, dtype: torch.dtype, grouped: bool) -> bool:
    """Try the kernel on a small input: it is private to torch, and may be absent, or mean something else, elsewhere."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, 16, 64)
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    if grouped:
        key, value = key[:, :1], value[:, :1]
    try:
        output, lse, _ = kernel.forward(query, key, value, None, True, 0.125)
    except (AttributeError, TypeError, RuntimeError):  # not there, another signature, or not for this device and dtype
        return False
    wide = accumulate_dtype(dtype)
    logits = 0.125 * query.to(wide) @ repeat_heads(key, 2 if grouped else 1).to(wide).transpose(-1, -2)
    logits = logits.masked_fill(torch.ones(16, 16, dtype=torch.bool, device=device).triu(1), -math.inf)
    values = repeat_heads(value, 2 if grouped else 1).to(wide)
    expected = torch.softmax(logits, -1) @ values
    tolerance = max(64 * torch.finfo(dtype).eps, 1e-5)
    return bool(
        output.shape == expected.shape
        and lse.shape == logits.shape[:3]
        and torch.allclose(output.to(wide), expected, atol=tolerance, rtol=tolerance)
        and torch.allclose(lse.to(wide), torch.logsumexp(logits, -1), atol=tolerance, rtol=tolerance)
    )
