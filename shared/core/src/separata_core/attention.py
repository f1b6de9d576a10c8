"""Attention with a bias, per query head, on the logit of one key: exact, and as fast as attention without it.

For one head and one query row with weights `a_j` over the visible keys, adding `log gamma` to the scaled logit of key 0
gives `a_0' = gamma a_0 / D` and `a_j' = a_j / D` with `D = 1 + (gamma - 1) a_0`. So the output of any unmodified kernel
can be corrected afterwards, `o' = (o + (gamma - 1) a_0 v_0) / D`, if only `a_0 = exp(scale q.k_0 - LSE)` is known. That
keeps the causal fast path, reads no mask and costs O(batch * heads * rows * head_dim).
"""

import functools
import importlib.util
import math
import operator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from separata_core import _attention_ops as ops

__all__ = [
    "MAX_KEY_BIAS",
    "Backend",
    "attention_with_key_bias",
    "augment_states",
    "closed_form_floor",
    "correct_output",
    "key_bias_mask",
    "key_weight",
]

Backend = Literal["auto", "reference", "bias", "augmented", "correction", "triton"]
_BACKENDS = get_args(Backend)

#: Biases are clamped to this modulus; `exp(80)` and its inverse are finite in float32 and far beyond any use.
MAX_KEY_BIAS = 80.0


def attention_with_key_bias(
    query: Float[Tensor, "batch q_heads query head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    key_bias: Float[Tensor, "q_heads"] | Float[Tensor, "batch q_heads"],
    key_index: int | Int[Tensor, "batch"] | Bool[Tensor, "batch keys"] = 0,
    *,
    attention_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    backend: Backend = "auto",
    bias_range: tuple[float, float] | None = None,
) -> Float[Tensor, "batch q_heads query value_dim"]:
    """Softmax attention with `key_bias` added to the scaled logit of the key at `key_index`.

    Equals `softmax(scale * query @ key^T + mask + key_bias * 1[j == key_index]) @ value`. Rows that do not see such a
    key (a causal row before it, a masked key, a row of padding) come out as without the bias, bit for bit, and so does
    a head whose bias is exactly 0, against the kernel that the backend runs.

    Backends:

    - `reference`: weights materialised in float32 (float64 for float64), multiplied and renormalised; what the others
      are tested against.
    - `bias`: an additive mask for `scaled_dot_product_attention`. Any bias, but a mask of [batch, heads, query, keys].
    - `augmented`: one more (in 16 bit, three more) query and key dimension that carries the bias. Any bias, any kernel.
    - `correction`: an unmodified kernel that returns its log-sum-exp, then the closed form. For biases of at least
      `closed_form_floor(dtype)`: below it, where the key holds almost all weight, the closed form cancels digits.
      Its gradients are exact, of first order only: `create_graph=True` raises RuntimeError.
    - `triton`: the same, the closed form in one kernel. CUDA (or Triton's interpreter), without gradients.
    - `auto`: `triton` or `correction` where possible and accurate, else whichever of `augmented` and `bias` allocates
      less.

    Args:
        query: Queries.
        key: Keys; `q_heads` must be a multiple of `kv_heads`.
        value: Values.
        key_bias: Bias in natural-log units, per query head or per batch row and query head. Clamped to +-80.
        key_index: Which key, for all batch rows or one per row; or which keys, as marks: the bias goes to the logit of
            every marked key (an initial token for each of several packed sequences, say). Marks are for the backends
            `reference`, `bias` and `augmented`, among which `auto` then chooses.
        attention_mask: Boolean (True: visible) or additive, broadcastable to [batch, q_heads, query, keys]. A key whose
            additive mask is below -1e6 (half the lowest float16 for float16) counts as not visible.
        is_causal: As in torch: row i sees keys 0..i, counted from the first row also where query and keys differ in
            length. Not together with `attention_mask`.
        scale: Multiplies the logits; `head_dim ** -0.5` by default. Positive.
        backend: See above.
        bias_range: Smallest and largest value of `key_bias`. Without it they are read from the tensor, which on a GPU
            waits for the stream. Under `torch.compile` nothing is read, and without it `auto` avoids the closed form.
            It is trusted: biases below it lose digits, and (0, 0) leaves the bias out.

    Returns:
        The attention output, in the dtype of `query`, also under autocast.

    Raises:
        ValueError: Shapes, heads, dtypes, devices, `key_index`, `scale` or `backend` that do not fit, a bias that is
            not finite, or a backend that cannot do what is asked.
    """
    _check_states(query, key, value)
    bias, index = _check_bias(query, key, key_bias, key_index)
    scale = _check_scale(query, scale)
    mask = _check_mask(query, key, attention_mask, is_causal=is_causal)
    if backend not in _BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(_BACKENDS)}")
    low, high = _read_range(key_bias, bias_range)
    visible, offset = _visibility(query, index, mask, is_causal=is_causal)
    problem = _Problem(query, key, value, bias, index, mask, is_causal, scale, visible, offset)

    # Autocast would change the type of some products and not of others.
    with ops.no_autocast(query.device):
        return _run(problem, backend, low, high)


def augment_states(
    query: Float[Tensor, "batch q_heads query head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    key_bias: Float[Tensor, "q_heads"] | Float[Tensor, "batch q_heads"],
    key_index: int | Int[Tensor, "batch"] | Bool[Tensor, "batch keys"] = 0,
    *,
    scale: float | None = None,
) -> tuple[
    Float[Tensor, "batch q_heads query width"],
    Float[Tensor, "batch kv_heads keys width"],
    Float[Tensor, "batch kv_heads keys width"],
]:
    """States whose plain attention is attention with the bias: a way through any kernel that takes a scale.

    Query and key get one more dimension (in 16 bit three, so that the bias is not rounded to 8 bits), in which their
    product is `key_bias / scale` at the biased keys and 0 elsewhere; the rest is zeros, up to a multiple of 8. Run the
    kernel on them with `scale` given, whatever mask it takes, and keep the first `value_dim` columns of its output.
    Kernels that bend the logits before the softmax (soft capping) bend the bias too, and are not served by this.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        key_bias: As in `attention_with_key_bias`.
        key_index: Likewise.
        scale: What the kernel will multiply the logits by; `head_dim ** -0.5` of the states given here by default,
            which is not what a kernel takes by default for the wider ones.

    Returns:
        Wide query, key and value, of one width.

    Raises:
        ValueError: As `attention_with_key_bias`.
    """
    _check_states(query, key, value)
    bias, index = _check_bias(query, key, key_bias, key_index)
    scale = _check_scale(query, scale)
    with ops.no_autocast(query.device):
        return _widen(_Problem(query, key, value, bias, index, None, False, scale, None, None))


def closed_form_floor(dtype: torch.dtype) -> float:
    """The smallest bias for which the closed form is used on tensors of `dtype`.

    The closed form divides by `D = 1 + (gamma - 1) a`, which is at least gamma and comes near it where the biased key
    holds almost all weight. There the rounding of the kernel's output and of its log-sum-exp is magnified by up to
    `1 / gamma`. At the floor, and with logits of modulus up to 12, the error stays below 1e-8 of the largest value for
    float64, 2e-4 for float32, 8e-3 for float16 and 2e-2 for bfloat16; it falls as `1 / gamma` above the floor, and
    nothing is magnified for gamma >= 1. For larger logits it grows in proportion to them, since their rounding does.

    Args:
        dtype: Dtype of query, key and value.

    Returns:
        A bias in natural-log units (negative).
    """
    smallest = {torch.float64: 1e-6, torch.float32: 1 / 64, torch.float16: 1 / 16}
    return math.log(smallest.get(dtype, 1 / 4))


def key_weight(
    query: Float[Tensor, "batch q_heads query head_dim"],
    key_at: Float[Tensor, "batch kv_heads head_dim"],
    lse: Float[Tensor, "batch q_heads query"],
    scale: float,
    visible: Bool[Tensor, "#batch #q_heads #query"] | None = None,
    offset: Float[Tensor, "#batch #q_heads #query"] | None = None,
) -> Float[Tensor, "batch q_heads query"]:
    """The attention weight of one key, from the log-sum-exp that the attention kernel returned.

    Args:
        query: Queries, as the kernel saw them (after rotary embedding).
        key_at: The key in question, one per batch row.
        lse: Natural log of the row sums of `exp(logit)`.
        scale: What the kernel multiplied the logits by.
        visible: Where False the weight is 0, whatever `lse` holds (kernels disagree on rows that see nothing).
        offset: What an additive mask added to this key's logit.

    Returns:
        Weights in [0, 1], float32 (float64 for float64 queries).

    Raises:
        ValueError: The shape of `lse` does not fit.
    """
    if lse.shape != query.shape[:3]:
        raise ValueError(f"lse has shape {tuple(lse.shape)}; it must be {tuple(query.shape[:3])}, one per query row")
    return ops.key_weight(query, key_at, lse, scale, visible, offset)


def correct_output(
    output: Float[Tensor, "batch q_heads query value_dim"],
    weight: Float[Tensor, "batch q_heads query"],
    value_at: Float[Tensor, "batch kv_heads value_dim"],
    key_bias: Float[Tensor, "q_heads"] | Float[Tensor, "batch q_heads"],
) -> Float[Tensor, "batch q_heads query value_dim"]:
    """Attention output with a bias on one key, from the output without it.

    `o' = (o + (gamma - 1) a v) / (1 + (gamma - 1) a)`, computed as a step from `o` towards (or away from) `v`, so that
    a head with bias 0 and a row with weight 0 keep their bits.

    Args:
        output: Output of the unmodified kernel.
        weight: Weight of the key there, as from `key_weight`.
        value_at: Value at that key, one per batch row.
        key_bias: `log gamma`. Accurate from `closed_form_floor(output.dtype)` upwards; finite, not accurate, below.

    Returns:
        The corrected output, a new tensor in the dtype of `output`.

    Raises:
        ValueError: Shapes of `weight` or `key_bias` that do not fit.
    """
    if weight.shape != output.shape[:3]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be {tuple(output.shape[:3])}, as output")
    bias = _check_bias_values(output, key_bias).to(output.device, weight.dtype)
    return ops.mix(output, ops.mixing_weight(weight, bias[..., None]), value_at)


def key_bias_mask(
    query: Float[Tensor, "batch q_heads query head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    key_bias: Float[Tensor, "q_heads"] | Float[Tensor, "batch q_heads"],
    key_index: int | Int[Tensor, "batch"] | Bool[Tensor, "batch keys"] = 0,
    *,
    attention_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "#batch q_heads #query keys"]:
    """The additive mask that carries the bias, for kernels that take one: with dropout, or to be differentiated twice.

    Second derivatives need torch's math kernel (`torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`); the fused ones have
    none.

    Args:
        query: Queries; only shape, dtype and device matter.
        key: Keys, likewise.
        key_bias: As in `attention_with_key_bias`.
        key_index: Likewise.
        attention_mask: Likewise; contained in the result.
        is_causal: Likewise; contained in the result.

    Returns:
        A mask for `scaled_dot_product_attention`, in the dtype of `query`; 1 long where it would only repeat itself.

    Raises:
        ValueError: As `attention_with_key_bias`.
    """
    bias, index = _check_bias(query, key, key_bias, key_index)
    mask = _check_mask(query, key, attention_mask, is_causal=is_causal)
    _read_range(key_bias, None)
    visible, _ = _visibility(query, index, mask, is_causal=is_causal)
    return _mask_with_bias(_Problem(query, key, key, bias, index, mask, is_causal, 1.0, visible, None))


@dataclass(frozen=True, slots=True)
class _Problem:
    """What one call computes, checked and in canonical form.

    Attributes:
        query: `[batch, heads, rows, head_dim]`; `key` and `value` likewise, with their own heads and length.
        bias: `[batch or 1, heads]` in the accumulating dtype.
        index: The biased key: an int, int64 `[batch]`, or bool `[batch, keys]` where there are several.
        mask: `[batch or 1, heads or 1, rows, keys]`.
        scale: Multiplies the logits.
        visible: Which rows see a biased key, `[batch or 1, heads or 1, rows]`; None: all.
        offset: What the mask adds to the logit of the biased key, of the same shape; None where it adds nothing, or
            where several keys are biased.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    index: int | Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    visible: Tensor | None
    offset: Tensor | None

    def at_key(self) -> Tensor:
        """Bool `[batch or 1, 1, 1, keys]`, True at the biased keys."""
        keys, device = self.key.shape[2], self.query.device
        if isinstance(self.index, int):
            return (torch.arange(keys, device=device) == self.index)[None, None, None]
        if self.index.dtype == torch.bool:
            return self.index[:, None, None]
        return (torch.arange(keys, device=device) == self.index[:, None])[:, None, None]

    def row_bias(self) -> Tensor:
        """The bias of every row: `[batch or 1, heads, rows or 1]`, 0 where no biased key is visible."""
        bias = self.bias[..., None]
        return bias if self.visible is None else torch.where(self.visible, bias, 0.0)

    def additive(self) -> Tensor | None:
        """The mask as fused kernels want it: additive, in the dtype of the query or (on the CPU) float32."""
        mask = self.mask
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            return torch.zeros(mask.shape, dtype=self.query.dtype, device=mask.device).masked_fill(~mask, -math.inf)
        if self.query.device.type == "cpu" and mask.dtype == torch.float32 and self.query.dtype.itemsize == 2:
            return mask
        return mask.to(self.query.dtype)

    def wants_grad(self) -> bool:
        return _wants_grad(self.query, self.key, self.value, self.bias)


def _run(problem: _Problem, backend: Backend, low: float, high: float) -> Tensor:
    if backend == "auto":
        return _auto(problem, low, high)
    if backend == "reference":
        return _reference(problem)
    if backend == "bias":
        return _bias(problem)
    if backend == "augmented":
        return _augmented(problem)

    if _has_several(problem.index):
        raise ValueError(
            f"backend {backend!r} corrects for one key, and key_index marks several; use 'auto', 'augmented' or 'bias'"
        )
    query, value = problem.query, problem.value
    additive = problem.additive()
    kernel = _find_kernel(problem, additive)
    if kernel is None:
        raise ValueError(
            f"backend {backend!r} needs a kernel that returns its log-sum-exp, and there is none for {query.dtype} on "
            f"{query.device} with query {tuple(query.shape)} and value {tuple(value.shape)} (it wants equal widths, a "
            "contiguous last dimension and no mask with a gradient); use 'augmented' or 'bias'"
        )
    if not _is_accurate(low, query.dtype) and not math.isinf(low):
        raise ValueError(
            f"key_bias reaches {low:g}, below {closed_form_floor(query.dtype):.4g}, where the closed form loses too "
            f"many digits in {query.dtype}; use backend 'auto', 'augmented' or 'bias'"
        )
    fuse = None
    if backend == "triton":
        if problem.wants_grad():
            raise ValueError(
                "backend 'triton' has no gradient; use 'auto' or 'correction', or run under torch.no_grad()"
            )
        fuse = _fused(query)
        if fuse is None:
            raise ValueError(
                f"backend 'triton' cannot run on {query.device}: it needs Triton (separata-core[triton]) and a CUDA "
                "device, or Triton's interpreter"
            )
    return _corrected(problem, additive, kernel, fuse)


def _auto(problem: _Problem, low: float, high: float) -> Tensor:
    query, key = problem.query, problem.key
    additive = problem.additive()
    if low == high == 0.0 and not problem.bias.requires_grad:
        return _sdpa(query, key, problem.value, additive, problem.is_causal, problem.scale)
    kernel = None if _has_several(problem.index) else _find_kernel(problem, additive)
    if kernel is not None and _is_accurate(low, query.dtype):
        fuse = None if query.device.type != "cuda" or problem.wants_grad() else _fused(query)
        return _corrected(problem, additive, kernel, fuse)
    # The mask of one path against the widened states of the other.
    heads, rows, keys = query.shape[1], query.shape[2], key.shape[2]
    widened = _augmented_width(query, problem.value) * (heads * rows + 2 * key.shape[1] * keys)
    return _bias(problem) if heads * rows * keys <= widened else _augmented(problem)


def _reference(problem: _Problem) -> Tensor:
    query, mask = problem.query, problem.mask
    dtype = ops.accumulate_dtype(query.dtype)
    groups = query.shape[1] // problem.key.shape[1]
    logits = problem.scale * query.to(dtype) @ ops.repeat_heads(problem.key, groups).to(dtype).transpose(-1, -2)
    rows, keys = logits.shape[-2:]
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask.to(dtype)
    if problem.is_causal:
        logits = logits.masked_fill(_future(rows, keys, query.device), -math.inf)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)

    at_key = problem.at_key()
    gamma = torch.exp(problem.row_bias())[..., None]
    held = (weights * at_key).sum(-1, keepdim=True)
    rest = (weights * ~at_key).sum(-1, keepdim=True)
    # A quotient of row sums, not 1 + (gamma - 1) a: exactly 1 for gamma = 1, and no digits lost for small gamma.
    total = torch.where(empty, torch.ones_like(held), (rest + gamma * held) / (rest + held))
    weights = torch.where(at_key, weights * gamma, weights) / total
    return (weights @ ops.repeat_heads(problem.value, groups).to(dtype)).to(query.dtype)


def _corrected(problem: _Problem, additive: Tensor | None, kernel: ops.LseKernel, fuse: ops.Fuse | None) -> Tensor:
    return ops.corrected_attention(
        problem.query,
        problem.key,
        problem.value,
        problem.bias[..., None],
        problem.index,
        additive,
        problem.is_causal,
        problem.scale,
        problem.visible,
        problem.offset,
        kernel,
        fuse=fuse,
    )


def _bias(problem: _Problem) -> Tensor:
    return _sdpa(problem.query, problem.key, problem.value, _mask_with_bias(problem), False, problem.scale)


def _mask_with_bias(problem: _Problem) -> Tensor:
    query, mask = problem.query, problem.mask
    carried = torch.where(problem.at_key(), problem.row_bias()[..., None], 0.0).to(query.dtype)
    if problem.is_causal:
        return carried.masked_fill(_future(query.shape[2], problem.key.shape[2], query.device), -math.inf)
    if mask is None:
        return carried
    if mask.dtype == torch.bool:
        return torch.where(mask, carried, -math.inf)
    return carried + mask.to(query.dtype)


def _augmented_width(query: Tensor, value: Tensor) -> int:
    carriers = 1 if query.dtype.itemsize > 2 else 3
    return -(-max(query.shape[-1] + carriers, value.shape[-1]) // 8) * 8


def _augmented(problem: _Problem) -> Tensor:
    query, key, value = _widen(problem)
    output = _sdpa(query, key, value, problem.additive(), problem.is_causal, problem.scale)
    return output[..., : problem.value.shape[-1]]


def _widen(problem: _Problem) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = problem.query, problem.key, problem.value
    batch, heads, rows, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    # The key's part is a power of two, so that the query's part stays in range for small scales too.
    unit = 2.0 ** max(0, math.ceil(math.log2(MAX_KEY_BIAS / problem.scale / 2**14)))
    rest = (problem.row_bias() / (problem.scale * unit)).expand(batch, heads, rows)
    parts = []
    for _ in range(1 if query.dtype.itemsize > 2 else 3):
        part = rest.to(query.dtype)
        parts.append(part)
        rest = rest - part.detach().to(rest.dtype)
        # Only the first part is differentiated; the others hold what it rounded away.
        rest = rest.detach()
    width = _augmented_width(query, value)
    at_key = (problem.at_key()[:, :, 0] * unit).to(query.dtype)
    columns = at_key[..., None].expand(batch, kv_heads, keys, len(parts))
    pad = width - dim - len(parts)
    wide_query = torch.cat([query, torch.stack(parts, -1), query.new_zeros(batch, heads, rows, pad)], -1)
    wide_key = torch.cat([key, columns, key.new_zeros(batch, kv_heads, keys, pad)], -1)
    return wide_query, wide_key, torch.nn.functional.pad(value, (0, width - value.shape[-1]))


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is not None and query.device.type == "cuda":
        # With grouped heads and a mask no fused CUDA kernel applies, and the fallback would materialise the weights.
        key, value, groups = ops.repeat_heads(key, groups), ops.repeat_heads(value, groups), 1
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=groups > 1
    )


def _fused(query: Tensor) -> ops.Fuse | None:
    if not _has_triton():
        return None
    from separata_core.kernels import attention as fused  # here, since Triton is slow to import

    return fused.correct_in_place if fused.available(query) else None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _wants_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _is_accurate(low: float, dtype: torch.dtype) -> bool:
    """Whether the closed form may be used for biases from `low` upwards."""
    # The floor itself passes, also after it was rounded to a tensor of 16 bits.
    return low >= closed_form_floor(dtype) * (1 + 2**-8)


def _find_kernel(problem: _Problem, additive: Tensor | None) -> ops.LseKernel | None:
    if additive is not None and _wants_grad(additive):
        return None
    return ops.find_lse_kernel(problem.query, problem.key, problem.value, additive, problem.is_causal)


def _future(rows: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(1)


def _has_several(index: int | Tensor) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _visibility(
    query: Tensor, index: int | Tensor, mask: Tensor | None, *, is_causal: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Which rows see a biased key ([batch or 1, heads or 1, rows]; None: all), and what a mask adds to its logit."""
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        return _several_visible(query, index, mask, is_causal=is_causal), None
    if is_causal:
        if isinstance(index, int) and index == 0:
            return None, None
        position = torch.arange(query.shape[2], device=query.device)
        first = index if isinstance(index, int) else index[:, None]
        return (position >= first).reshape(-1, 1, query.shape[2]), None
    if mask is None:
        return None, None
    if isinstance(index, int):
        column = mask[..., index]
    else:
        column = mask.expand(query.shape[0], -1, -1, -1)
        column = column[torch.arange(query.shape[0], device=query.device), :, :, index]
    if mask.dtype == torch.bool:
        return column, None
    visible = column > _unseen(mask)
    return visible, column.masked_fill(~visible, 0.0).to(ops.accumulate_dtype(query.dtype))


def _several_visible(query: Tensor, marks: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor | None:
    if is_causal:
        last = torch.arange(query.shape[2], device=query.device).clamp(max=marks.shape[1] - 1)
        passed = marks.cumsum(-1) > 0
        return passed[:, None, last]
    if mask is None:
        return None
    # Rows that see none keep their bits where a float16 mask is finite: adding the bias there would be seen.
    seen = mask if mask.dtype == torch.bool else mask > _unseen(mask)
    return (seen & marks[:, None, None]).any(dim=-1)


def _unseen(mask: Tensor) -> float:
    """What an additive mask must exceed for its key to count as visible."""
    return max(-1e6, torch.finfo(mask.dtype).min / 2)


def _check_states(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, states in (("query", query), ("key", key), ("value", value)):
        if states.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(states.shape)}; it must be [batch, heads, length, dim]")
        if states.dtype not in ops.DTYPES:
            raise ValueError(f"{name} is {states.dtype}; it must be float16, bfloat16, float32 or float64")
        if states.dtype != query.dtype or states.device != query.device:
            raise ValueError(
                f"{name} is {states.dtype} on {states.device} and query {query.dtype} on {query.device}; query, key "
                "and value must share one dtype and one device"
            )
    batch, heads, _, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    if key.shape[0] != batch or value.shape[0] != batch:
        raise ValueError(
            f"query, key and value have batch sizes {batch}, {key.shape[0]} and {value.shape[0]}; they must be equal"
        )
    if key.shape[-1] != dim or dim == 0:
        raise ValueError(f"query has head_dim {dim} and key {key.shape[-1]}; they must be equal and positive")
    if value.shape[1:3] != (kv_heads, keys):
        raise ValueError(
            f"value has {value.shape[1]} heads of length {value.shape[2]}, key {kv_heads} of {keys}; they must be equal"
        )
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads and key {kv_heads}; the former must be a positive multiple of the latter"
        )


def _check_bias(query: Tensor, key: Tensor, key_bias: Tensor, key_index: Any) -> tuple[Tensor, int | Tensor]:
    """The bias as [batch or 1, heads] in the accumulating dtype, and the index as `_Problem` has it."""
    batch, keys = query.shape[0], key.shape[2]
    bias = _check_bias_values(query, key_bias).to(query.device, ops.accumulate_dtype(query.dtype))
    if isinstance(key_index, Tensor):
        if key_index.dtype == torch.bool and key_index.shape == (batch, keys):
            return bias, key_index.to(query.device)
        if key_index.dtype == torch.bool or key_index.is_floating_point() or key_index.shape != (batch,):
            raise ValueError(
                f"key_index is {key_index.dtype} of shape {tuple(key_index.shape)}; it must be an int, integers of "
                f"shape ({batch},), one per batch row, or bool of shape ({batch}, {keys}), the marked keys"
            )
        # On a GPU the values stay unread, since that would wait for the stream; indexing asserts there by itself.
        key_index = key_index.to(torch.int64)
        if key_index.device.type == "cpu" and not torch.compiler.is_compiling():
            outside = key_index[(key_index < 0) | (key_index >= keys)]
            if outside.numel():
                raise ValueError(f"key_index holds {int(outside[0])}; every value must be in [0, {keys})")
        return bias, key_index.to(query.device)
    try:
        position = operator.index(key_index)
    except TypeError:
        raise ValueError(f"key_index is {key_index!r}; it must be an int or a tensor of integers") from None
    if not 0 <= position < keys:
        raise ValueError(f"key_index is {position}; it must be in [0, {keys})")
    return bias, position


def _check_bias_values(output: Tensor, key_bias: Tensor) -> Tensor:
    """The bias as [batch or 1, heads], clamped, for an output (or query) [batch, heads, ...]."""
    batch, heads = output.shape[:2]
    if key_bias.shape not in ((heads,), (batch, heads)) or not key_bias.is_floating_point():
        raise ValueError(
            f"key_bias is {key_bias.dtype} of shape {tuple(key_bias.shape)}; it must be floating point of shape "
            f"({heads},) or ({batch}, {heads}): one value per query head, not per key head"
        )
    return key_bias.reshape(-1, heads).clamp(-MAX_KEY_BIAS, MAX_KEY_BIAS)


def _read_range(key_bias: Tensor, bias_range: tuple[float, float] | None) -> tuple[float, float]:
    """Smallest and largest bias; minus and plus infinity where they are neither given nor may be read."""
    if bias_range is not None:
        low, high = map(float, bias_range)
        if not low <= high:
            raise ValueError(f"bias_range is {bias_range}; it must be the smallest and the largest bias, in this order")
        return low, high
    if torch.compiler.is_compiling() or key_bias.is_meta:
        return -math.inf, math.inf
    if key_bias.numel() == 0:
        return 0.0, 0.0
    low, high = (float(bound) for bound in torch.stack(torch.aminmax(key_bias.detach())).tolist())
    if not (math.isfinite(low) and math.isfinite(high)):
        flat = key_bias.detach().reshape(-1)
        place = int((~torch.isfinite(flat)).nonzero()[0])
        raise ValueError(
            f"key_bias is {float(flat[place])} for head {place % key_bias.shape[-1]}; it must be finite (to hide a "
            "key, mask it)"
        )
    return low, high


def _check_scale(query: Tensor, scale: float | None) -> float:
    if scale is None:
        return 1.0 / math.sqrt(query.shape[-1])
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it must be positive and finite")
    return float(scale)


def _check_mask(query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor | None:
    """The mask as [batch or 1, heads or 1, query, keys]."""
    if mask is None:
        return None
    if is_causal:
        raise ValueError("attention_mask and is_causal=True exclude each other, as in torch; put both into the mask")
    full = (*query.shape[:3], key.shape[2])
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() > 4 or any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; it must broadcast to {full}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"attention_mask is {mask.dtype}; it must be bool (True: visible) or floating point (added to the logits)"
        )
    if mask.device != query.device:
        raise ValueError(f"attention_mask is on {mask.device} and query on {query.device}; they must be on one device")
    return mask.reshape(shape).expand(-1, -1, *full[2:])
