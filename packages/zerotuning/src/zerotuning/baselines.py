"""The attention methods that ZeroTuning is compared with, run through the same machinery.

- PASTA (Zhang et al., "Tell Your Model Where to Attend", ICLR 2024) steers attention to a span that the user marks.
- ACT (Yu et al., "Unveiling and Harnessing Hidden Attention Sinks", ICML 2024) takes weight from sinks in mid-sequence.
- A temperature on all keys of a head.

All come off again like a configuration, and one at a time is on a model. A key-value cache belongs to the context that
filled it.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from zerotuning.adapter import Attachment, check_free, detach, install, window, wrappable
from zerotuning.attention import Change
from zerotuning.config import ModelId, ZeroTuningConfig, checked_indices

Heads = Mapping[int, Sequence[int] | None]


@contextlib.contextmanager
def pasta(
    model: nn.Module,
    heads: Heads,
    emphasized: Bool[Tensor, "batch length"],
    alpha: float = 0.01,
    scale_position: Literal["exclude", "include"] = "exclude",
) -> Iterator[nn.Module]:
    """Run a model with attention steered towards a part of its prompts, for the length of a `with` block.

    Chosen heads have `log(alpha)` added to their logits of the prompt tokens outside the emphasised part (PASTA, its
    equation 2, written as a logit bias; rows stay normalised). Tokens that come after the prompt are not scaled.

    Args:
        model: See `zerotuning.apply`.
        heads: The query heads of each layer that are steered; None for all heads of a layer.
        emphasized: True at the emphasised tokens of the prompts, in the columns of `input_ids`: padding counts, and its
            value is ignored. With beam search one row for each prompt.
        alpha: The factor on the weights before they are normalised again.
        scale_position: `"exclude"` scales what is outside the emphasised part, `"include"` the part itself.

    Yields:
        The model.

    Raises:
        ValueError: A head or layer does not exist, `alpha` is not finite or not above 0, `scale_position` is unknown,
            or the model's attention cannot be wrapped.
        RuntimeError: A configuration is already attached.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha is {alpha!r}; it must be a finite number above 0 (1 changes nothing)")
    if scale_position not in ("exclude", "include"):
        raise ValueError(f"scale_position is {scale_position!r}; it must be 'exclude' or 'include'")
    if emphasized.dtype != torch.bool or emphasized.ndim != 2:
        raise ValueError(
            f"emphasized is {emphasized.dtype} of shape {tuple(emphasized.shape)}; it must be bool of shape "
            "[batch, length], True at the emphasised tokens"
        )
    scaled = emphasized.clone() if scale_position == "include" else ~emphasized
    chosen = _chosen(model, heads)
    attachment = _Pasta(chosen, math.log(alpha), scaled)
    with _installed(model, attachment):
        yield model


@contextlib.contextmanager
def act(model: nn.Module, heads: Heads | None = None, threshold: float = 0.1, beta: float = 0.4) -> Iterator[nn.Module]:
    """Run a model with weight taken from its attention sinks in mid-sequence, for the length of a `with` block.

    See `sink_tokens` and `spread` for the two steps. Which tokens are sinks is found on the prompt, which must be run
    in one forward, in each layer and head and row of the batch; while decoding, the same tokens stay sinks and no new
    ones are looked for.

    Args:
        model: See `zerotuning.apply`; loaded with `attn_implementation="eager"`.
        heads: The query heads of each layer to calibrate, None for all heads of a layer; without it all heads of the
            layers 2 to L - 2, counted from 0. The method chooses heads on held-out data; all of them together can ruin
            a small model.
        threshold: Tokens with more weight than this, on average over later rows, are sinks.
        beta: What the weights of sinks are multiplied by.

    Yields:
        The model.

    Raises:
        ValueError: A head or layer does not exist, `threshold` or `beta` is outside [0, 1], or the model's attention is
            not eager.
        RuntimeError: A configuration is already attached.
    """
    for name, value in (("threshold", threshold), ("beta", beta)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value!r}; it must be in [0, 1]")
    if (implementation := wrappable(model)) != "eager":
        raise ValueError(
            f"ACT edits attention weights, which attn_implementation={implementation!r} does not give; load the model "
            'with attn_implementation="eager"'
        )
    if heads is None:
        heads = dict.fromkeys(range(2, ModelId.of(model).layers - 1))
    chosen = _chosen(model, heads)
    with _installed(model, _Act(chosen, threshold, beta)):
        yield model


def temperature(model: nn.Module | ModelId, gamma: float, heads: Sequence[int] | None = None) -> ZeroTuningConfig:
    """A temperature of `1 / gamma` on all keys, as a configuration for `zerotuning.apply`.

    Args:
        model: The model, or its description.
        gamma: What the queries are multiplied by; above 1 sharpens.
        heads: Query-head indices, the same in each layer; all if not given.

    Returns:
        The configuration, of the mode `"query"`.

    Raises:
        ValueError: `gamma` is not finite or not above 0, or a head does not exist.
    """
    return ZeroTuningConfig.uniform(model, gamma, heads, mode="query")


def sink_tokens(
    weights: Float[Tensor, "batch heads query key"],
    threshold: float,
    first: Bool[Tensor, "batch key"],
    rows: Bool[Tensor, "batch query"] | None = None,
) -> Bool[Tensor, "batch heads key"]:
    """The attention sinks of a prompt: tokens that later rows give much weight to (ACT, section 4).

    Args:
        weights: Softmax weights of a whole prompt; row i belongs to key i, further keys are empty.
        threshold: What the mean of a column over the later rows must exceed.
        first: True at the initial token of each row of the batch, which is never taken for one.
        rows: True at the rows that are no padding; all without it.

    Returns:
        True at the sinks of each head.
    """
    length, keys = weights.shape[2:]
    later = torch.ones(length, keys, dtype=torch.bool, device=weights.device).tril(-1)[None]
    if rows is not None:
        later = later & rows[:, :, None]
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    mean = (wide * later[:, None]).sum(dim=2) / later.sum(dim=1).clamp(min=1)[:, None]
    return (mean > threshold) & ~first[:, None]


def spread(
    weights: Float[Tensor, "batch heads query key"], sinks: Bool[Tensor, "batch heads key"], beta: float
) -> Float[Tensor, "batch heads query key"]:
    """Multiply the weights of sinks, and hand what they lose to the other tokens in proportion to their weights.

    Args:
        weights: Softmax weights.
        sinks: As from `sink_tokens`; the weights of a head without any stay as they are.
        beta: The factor.

    Returns:
        Weights of the same row sums; a row that sees nothing but sinks is left alone.
    """
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    at_sink = sinks[:, :, None]
    held = (wide * at_sink).sum(dim=-1, keepdim=True)
    rest = (wide * ~at_sink).sum(dim=-1, keepdim=True)
    gain = 1 + (1 - beta) * held / rest
    changed = torch.where(at_sink, beta * wide, gain * wide)
    return torch.where((rest > 0) & (held > 0), changed, wide).to(weights.dtype)


@contextlib.contextmanager
def _installed(model: nn.Module, attachment: Attachment) -> Iterator[None]:
    check_free(model)
    install(model, attachment)
    try:
        yield
    finally:
        detach(model)


def _chosen(model: nn.Module, heads: Heads) -> list[Tensor | None]:
    """The heads of every layer as a bool tensor, None where there is none."""
    identity = ModelId.of(model)
    chosen: list[Tensor | None] = [None] * identity.layers
    for layer in checked_indices(list(heads), identity.layers, "layer"):
        row = torch.zeros(identity.query_heads, dtype=torch.bool)
        row[checked_indices(heads[layer], identity.query_heads, "head")] = True
        chosen[layer] = row if bool(row.any()) else None
    return chosen


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


class _Pasta(Attachment):
    """A bias on marked tokens of the prompt."""

    def __init__(self, chosen: list[Tensor | None], bias: float, scaled: Tensor) -> None:
        which = [None if each is None else each.tolist() for each in chosen]
        super().__init__(
            log_gamma=[None if each is None else bias * each for each in chosen],
            rows=len(scaled),
            marks=(_fingerprint("pasta", bias, which, scaled.tolist()),),
        )
        self.scaled = scaled

    def marked(self, forward: Any, device: torch.device) -> Tensor:
        length = self.scaled.shape[1]
        rows = self.scaled.to(device).repeat_interleave(forward.batch // self.rows, dim=0)
        marks = window(rows, length - forward.end) if forward.end > length else rows[:, : forward.end]
        if forward.real is not None:
            # Rows of padding see nothing else, and would show a bias.
            marks = marks & forward.real[:, : forward.end].to(device)
        return marks


class _Act(Attachment):
    """An edit of weights, with sinks remembered from the prompt for the tokens decoded after it."""

    def __init__(self, chosen: list[Tensor | None], threshold: float, beta: float) -> None:
        which = [None if each is None else each.tolist() for each in chosen]
        super().__init__(
            log_gamma=[None if each is None else each.float() for each in chosen],
            rows=1,
            marks=(_fingerprint("act", threshold, beta, which),),
            mode="weights",
        )
        self.threshold = threshold
        self.beta = beta
        self.sinks: dict[int, Tensor] = {}
        self.filled_by: int | None = None

    def change(self, index: int, forward: Any, query: Tensor, keys: int, mask: Any) -> Change | None:
        chosen = self.log_gamma[index]
        if chosen is None or forward is None:
            return None
        if forward.marks is not None:
            raise ValueError("position_ids restart within a row (packed sequences); ACT takes one sequence per row")
        batch, length = query.shape[0], query.shape[2]
        start = query.new_zeros(batch, dtype=torch.long) if forward.start is None else forward.start.to(query.device)
        if forward.past and forward.run != self.filled_by:
            raise ValueError(
                "past_key_values hold a prompt before the one that was run last, and its sinks are forgotten: decode a "
                "prompt before the next one is run"
            )

        def edit(weights: Tensor) -> Tensor:
            if forward.past:
                known = self.sinks[index]
            else:
                first = torch.arange(weights.shape[3], device=weights.device) == start[:, None]
                rows = None if forward.real is None else forward.real[:, :length].to(weights.device)
                found = sink_tokens(weights, self.threshold, first, rows) & chosen.to(weights.device).bool()[:, None]
                known = self.sinks[index] = found[..., :length]
                self.filled_by = forward.run
            known = window(known, known.shape[-1] - forward.end)
            return spread(weights, window(known, forward.end - keys), self.beta)

        return Change("weights", "auto", chosen.expand(batch, -1), start, (0.0, 1.0), edit)
