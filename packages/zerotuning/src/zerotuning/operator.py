"""The operator: give the initial token another share of the attention, and everything else its old proportions.

For one head and one query row with softmax weights `a_0 .. a_t` over the visible keys, key 0 being the initial token of
the sequence, and a factor `gamma > 0` (paper, section 3; the state kept everywhere is `log gamma`)::

    D    = 1 + (gamma - 1) a_0
    a_0' = gamma a_0 / D
    a_i' = a_i / D            for i >= 1

Adding `log gamma` to the scaled logit of key 0 before the softmax is the same function, and so is correcting the output
of an unmodified attention kernel, `o' = (o + (gamma - 1) a_0 v_0) / D`. `separata_core.attention` computes these; here
are the definition itself and what decides which key is the initial one.
"""

import warnings

import torch
from jaxtyping import Bool, Float, Int
from separata_core.attention import MAX_KEY_BIAS
from torch import Tensor

LOG_GAMMA_LIMIT = MAX_KEY_BIAS
"""Larger factors are clamped to `exp(+-80)`: beyond it float32 gains nothing and `gamma * a_0` could overflow."""

_FP16_LOG_GAMMA_LIMIT = 10.0


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
    start: Int[Tensor, " batch"] | int = 0,
) -> Float[Tensor, "batch heads query key"]:
    """Re-weight attention probabilities; the definition that every faster path is held against.

    Args:
        weights: Softmax weights; every row sums to 1, or to 0 where nothing is visible.
        log_gamma: Natural logarithm of the factor of each head, or of each batch row and head.
        start: Index of the initial key, of each batch row or common to all.

    Returns:
        Weights in which column `start` is multiplied by gamma and the rows are normalised again.
    """
    batch = weights.shape[0]
    index = torch.as_tensor(start, device=weights.device).expand(batch)
    column = index[:, None, None, None].expand(*weights.shape[:3], 1)
    gamma = clamp_log_gamma(log_gamma).to(weights.dtype).exp().expand(batch, -1)[:, :, None, None]
    initial = weights.gather(-1, column)
    return weights.scatter(-1, column, gamma * initial) / (1 + (gamma - 1) * initial)


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


def start_indices_4d(
    attention_mask: Bool[Tensor, "batch #heads query key"] | Float[Tensor, "batch #heads query key"],
) -> tuple[Int[Tensor, " batch"], Bool[Tensor, " batch"]]:
    """Find the initial token of each row in a ready-made mask.

    That is the first key that the last query sees, or where a window hides it, the first key that the query of that
    key sees, and so on back to a query that sees nothing earlier. The first queries are no guide, because rows that
    belong to padding are often given something to look at.

    Args:
        attention_mask: True (bool) or above half of the type's lowest value (float, additive) where a key is visible.

    Returns:
        As `start_indices`. Behind a window that is shorter than the keys of earlier forwards the index is that of the
        first key in sight.
    """
    seen = attention_mask[:, 0]
    if seen.dtype != torch.bool:
        seen = seen > torch.finfo(seen.dtype).min / 2
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
