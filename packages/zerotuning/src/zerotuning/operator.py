"""The operator: give the initial token another share of the attention, and everything else its old proportions.

For one head and one query row with softmax weights `a_0 .. a_t` over the visible keys, key 0 being the initial token of
the sequence, and a factor `gamma > 0` (paper, section 3; the state kept everywhere is `log gamma`)::

    D    = 1 + (gamma - 1) a_0
    a_0' = gamma a_0 / D
    a_i' = a_i / D            for i >= 1

Adding `log gamma` to the scaled logit of key 0 before the softmax is the same function, and so is correcting the output
of an unmodified attention kernel, `o' = (o + (gamma - 1) a_0 v_0) / D`. `separata_core.attention` computes these; here
are the definition itself, what decides which key is the initial one, and the two variants that the paper names for
kernels that hide their weights. Those two are other functions, not other ways to this one.
"""

import warnings

import torch
from jaxtyping import Bool, Float, Int
from separata_core.attention import MAX_KEY_BIAS
from torch import Tensor

LOG_GAMMA_LIMIT = MAX_KEY_BIAS
"""Larger factors are clamped to `exp(+-80)`: beyond it float32 gains nothing and `gamma * a_0` could overflow."""

_FP16_LOG_GAMMA_LIMIT = 10.0

# Additive masks hide with the lowest value of their type, with -inf, with -1e9 or, in older code, with -1e4 (which
# bfloat16 rounds to -9984).
_HIDES = -9e3


def clamp_log_gamma(log_gamma: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Bring the logarithms of the factors into float32 or better and within `LOG_GAMMA_LIMIT`.

    Args:
        log_gamma: Natural logarithms of the factors; 0 leaves a head as it is.

    Returns:
        A tensor of the same shape on the same device, float64 if it was that before and float32 otherwise.
    """
    return log_gamma.to(torch.promote_types(log_gamma.dtype, torch.float32)).clamp(-LOG_GAMMA_LIMIT, LOG_GAMMA_LIMIT)


def warn_if_extreme(log_gamma: Float[Tensor, "*shape"], dtype: torch.dtype) -> None:
    """Warn where a factor reaches further than float16 attention can follow.

    Args:
        log_gamma: Natural logarithms of the factors.
        dtype: The type that the model computes its attention in.
    """
    if dtype == torch.float16 and log_gamma.numel() and float(log_gamma.abs().max()) > _FP16_LOG_GAMMA_LIMIT:
        warnings.warn(
            f"a gamma outside exp(+-{_FP16_LOG_GAMMA_LIMIT:g}) loses precision in float16; use bfloat16 or float32",
            stacklevel=3,
        )


def reweight(
    weights: Float[Tensor, "batch heads query key"],
    log_gamma: Float[Tensor, " heads"] | Float[Tensor, "batch heads"],
    start: int | Int[Tensor, " batch"] | Bool[Tensor, "batch key"] = 0,
) -> Float[Tensor, "batch heads query key"]:
    """Re-weight attention probabilities; the definition that every faster path is held against.

    Args:
        weights: Softmax weights. Rows sum to 1, to less where the model keeps a learned sink in the denominator, or to
            0 where nothing is visible.
        log_gamma: Natural logarithm of the factor of each head, or of each batch row and head.
        start: Index of the initial key, of each batch row or common to all; or marks where a row has several of which
            every query sees its own (packed sequences).

    Returns:
        Weights in which column `start` is multiplied by gamma and the rows are normalised again, in float32 or better.
    """
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    gamma = _gamma(log_gamma, wide.dtype).expand(weights.shape[0], -1)[:, :, None, None]
    at_start = marks_of(start, weights.shape[0], weights.shape[3], weights.device)[:, None, None]
    initial = (wide * at_start).sum(dim=-1, keepdim=True)
    rest = (wide * ~at_start).sum(dim=-1, keepdim=True)
    # What a learned sink holds, unless the weights were only rounded. 1 + (gamma - 1) a_0 would need no such sum, but
    # where a_0 rounds to 1 it has no digits left for a small gamma.
    sink = 1 - initial - rest
    sink = sink * (sink > max(0.51 * torch.finfo(weights.dtype).eps, 16 * torch.finfo(torch.float32).eps))
    rest = rest + sink
    return torch.where(at_start, gamma * wide, wide) * ((rest + initial) / (rest + gamma * initial))


def scale_keys(
    key: Float[Tensor, "batch kv_heads key dim"],
    log_gamma: Float[Tensor, " kv_heads"] | Float[Tensor, "batch kv_heads"],
    start: int | Int[Tensor, " batch"] | Bool[Tensor, "batch key"] = 0,
) -> Float[Tensor, "batch kv_heads key dim"]:
    """The mode `"key"`: multiply the key state of the initial token, and so its logit, by gamma.

    Not the operator of this module: what it does to the weight depends on the query, and for a negative logit it goes
    the other way.

    Args:
        key: Keys as the attention sees them, after the rotary embedding.
        log_gamma: Natural logarithm of the factor of each key/value head, or of each batch row and head.
        start: As in `reweight`.

    Returns:
        The keys, all others bit for bit.
    """
    gamma = _gamma(log_gamma, key.dtype).expand(key.shape[0], -1)[:, :, None]
    at_start = marks_of(start, key.shape[0], key.shape[2], key.device)[:, None]
    return (key * torch.where(at_start, gamma, 1.0)[..., None]).to(key.dtype)


def scale_queries(
    query: Float[Tensor, "batch heads query dim"],
    log_gamma: Float[Tensor, " heads"] | Float[Tensor, "batch heads"],
) -> Float[Tensor, "batch heads query dim"]:
    """The mode `"query"`: multiply the queries, and so every logit, by gamma; a temperature of `1 / gamma`.

    Args:
        query: Queries as the attention sees them.
        log_gamma: Natural logarithm of the factor of each head, or of each batch row and head.

    Returns:
        The queries.
    """
    gamma = _gamma(log_gamma, query.dtype).expand(query.shape[0], -1)
    return (query * gamma[:, :, None, None]).to(query.dtype)


def _gamma(log_gamma: Tensor, dtype: torch.dtype) -> Tensor:
    return clamp_log_gamma(log_gamma).to(torch.promote_types(dtype, torch.float32)).exp()


def marks_of(
    start: int | Int[Tensor, " batch"] | Bool[Tensor, "batch keys"], batch: int, keys: int, device: torch.device
) -> Bool[Tensor, "batch keys"]:
    """Bring what says where the initial keys are into one form.

    Args:
        start: As in `reweight`.
        batch: Number of batch rows.
        keys: Number of keys.
        device: Where the result is wanted.

    Returns:
        True at the initial keys.
    """
    if isinstance(start, Tensor) and start.dtype == torch.bool:
        return start.to(device)
    index = torch.as_tensor(start, device=device).expand(batch)
    return torch.arange(keys, device=device) == index[:, None]


def start_indices(
    attention_mask: Bool[Tensor, "batch length"] | Int[Tensor, "batch length"] | Float[Tensor, "batch length"],
) -> tuple[Int[Tensor, " batch"], Bool[Tensor, " batch"]]:
    """Find the initial token of each row: its first position that is not padding.

    Args:
        attention_mask: Non-zero at real tokens, zero at padding, on either side.

    Returns:
        The index of the first real token of each row, and whether the row has one at all (its index is 0 if not).
    """
    real = attention_mask != 0
    return _first(real), real.any(dim=-1)


def visible(attention_mask: Bool[Tensor, "*shape"] | Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Read a mask that is ready to be used.

    Args:
        attention_mask: True at visible keys, or additive: -9000 and less hides a key.

    Returns:
        True at visible keys.
    """
    return attention_mask if attention_mask.dtype == torch.bool else attention_mask > _HIDES


def start_indices_4d(
    attention_mask: Bool[Tensor, "batch #heads query key"] | Float[Tensor, "batch #heads query key"],
) -> tuple[Int[Tensor, " batch"], Bool[Tensor, " batch"]]:
    """Find the initial token of each row in a ready-made mask.

    That is the first key that the last query sees, or where a window hides it, the first key that the query of that
    key sees, and so on back to a query that sees nothing earlier. The first queries are no guide, because rows that
    belong to padding are often given something to look at.

    Args:
        attention_mask: As for `visible`.

    Returns:
        As `start_indices`. Behind a window that is shorter than the keys of earlier forwards the index is that of the
        first key in sight.
    """
    seen = visible(attention_mask[:, 0])
    keys = seen.shape[-1]
    live = seen.any(dim=-1)
    first, last = _first(seen), keys - 1 - _first(seen.flip(-1))
    # A query of a causal mask sees its own key last. A padding query that sees everything counts for the last key only,
    # which is nobody's predecessor.
    before = torch.arange(keys, device=seen.device).expand(seen.shape[0], -1)
    before = before.scatter(1, last, torch.where(live, first, last))
    start = first[:, -1]
    while bool(((further := before.gather(1, start[:, None])[:, 0]) < start).any()):
        start = torch.minimum(further, start)
    return start, live[:, -1]


def _first(seen: Tensor) -> Tensor:
    """Index of the first True along the last dimension, 0 if there is none."""
    # argmax of a bool tensor is not offered on every device; of equal values it gives the first.
    return seen.to(torch.int8).argmax(dim=-1)
