"""Decoding many continuations of few prefixes, with one copy of each prefix.

Rows that continue the same prefix would each carry a copy of its keys and values, and every token would read all of
them. Here the rows of a document form one matrix of queries against its one prefix, and each row attends to its own new
tokens apart; the two parts are joined by their log-sum-exps, which is the same softmax. The way in is the attention
interface of transformers. Models that do not go through it, or whose attention is more than a softmax of scaled
products, keep their own attention and an expanded cache.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from pmark.samplers import SamplerError

# Derived, so that a vendored copy beside an installed original registers its own function.
_NAME = f"{__name__.replace('.', '_')}_attention"
_ACTIVE: ContextVar["SharedPrefixRows"] = ContextVar("_ACTIVE")
_FIRST_ROOM = 32


@dataclass(frozen=True)
class Prefix:
    """A prefix that has been run.

    Attributes:
        ids: Its tokens.
        keys: Of each layer, `[1, kv_heads, tokens, width]`.
        values: Likewise.
        logits: Of the token that follows it.
    """

    ids: tuple[int, ...]
    keys: list[Tensor]
    values: list[Tensor]
    logits: Float[Tensor, " vocab"]

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return sum(each.nbytes for each in (*self.keys, *self.values, self.logits))

    def shared_with(self, ids: Sequence[int]) -> int:
        """How many tokens `ids` begins with that are also the first ones of this prefix."""
        pairs = zip(self.ids, ids, strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(self.ids), len(ids)))


def run_prefix(model: Any, ids: Sequence[int], known: Prefix | None = None) -> Prefix:
    """Runs a prefix of at least one token through the model's own attention, save what it shares with a known one."""
    shared = 0 if known is None else known.shared_with(ids)
    if known is not None and shared == len(ids) == len(known.ids):
        return known
    shared = min(shared, len(ids) - 1)
    # Without the model's configuration every layer keeps all of its keys, also one with a sliding window, whose mask
    # hides what is too far away.
    cache: Any = DynamicCache()
    if known is not None and shared:
        for layer, (key, value) in enumerate(zip(known.keys, known.values, strict=True)):
            cache.update(key[:, :, :shared], value[:, :, :shared], layer)
    tokens = torch.tensor([ids[shared:]], device=model.device)
    logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float()
    keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
    return Prefix(tuple(ids), keys, values, logits)


class Rows(Protocol):
    """Rows that are being continued, all by the same number of tokens."""

    def step(self, tokens: Sequence[int]) -> Float[Tensor, "rows vocab"]:
        """Appends a token to each row and gives the logits of the next ones."""
        ...

    def keep(self, order: Sequence[int]) -> None:
        """Keeps the rows of these places, in this order; a row may move only to the place of one that goes."""
        ...


class SharedPrefixRows(DynamicCache):
    """Rows that continue several prefixes; one copy of each prefix (see the module)."""

    def __init__(self, model: Any, prefixes: Sequence[Prefix], documents: Sequence[int]) -> None:
        """Lays the prefixes that a model ran side by side; `documents` says of each row which one it continues."""
        super().__init__()
        self.model = model
        self.lengths = [len(prefix.ids) for prefix in prefixes]
        self.longest = max(self.lengths)
        self.prefix_keys = [self._padded(layers) for layers in zip(*(p.keys for p in prefixes), strict=True)]
        self.prefix_values = [self._padded(layers) for layers in zip(*(p.values for p in prefixes), strict=True)]
        self.own: dict[int, tuple[Tensor, Tensor]] = {}
        self.count = 0
        self.layer = 0
        self.masks: dict[int | None, Tensor | None] = {}
        self._arrange(list(documents))

    def _padded(self, layers: Sequence[Tensor]) -> Tensor:
        # In float32 as all of the attention here: the products of a 16-bit type, rounded, would move the distribution.
        padded = [torch.nn.functional.pad(each.float(), (0, 0, 0, self.longest - each.shape[2])) for each in layers]
        return padded[0] if len(padded) == 1 else torch.cat(padded)

    def _arrange(self, documents: list[int]) -> None:
        """Gives every row a slot beside the other rows of its document."""
        self.documents = documents
        filled = [0] * len(self.lengths)
        slots = []
        for document in documents:
            slots.append(filled[document])
            filled[document] += 1
        self.depth = max(filled)
        places = [document * self.depth + slot for document, slot in zip(documents, slots, strict=True)]
        self.places = torch.tensor(places, device=self.model.device)
        self.positions = torch.tensor([[self.lengths[d]] for d in documents], device=self.model.device)

    def step(self, tokens: Sequence[int]) -> Float[Tensor, "rows vocab"]:
        """See `Rows`."""
        self.count += 1
        self.masks = {}
        column = torch.tensor(tokens, device=self.model.device)[:, None]
        with _active(self):
            output = self.model(
                input_ids=column, position_ids=self.positions + self.count - 1, past_key_values=self, use_cache=True
            )
        logits: Tensor = output.logits[:, -1]
        return logits

    def keep(self, order: Sequence[int]) -> None:
        """See `Rows`."""
        moved = [(to, origin) for to, origin in enumerate(order) if to != origin]
        if moved:
            to, origin = torch.tensor(moved, device=self.model.device).unbind(1)
            for pair in self.own.values():
                for buffer in pair:
                    buffer[to, :, : self.count] = buffer[origin, :, : self.count]
        self._arrange([self.documents[origin] for origin in order])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes a layer's newest keys and values, and gives those of all of the rows' own tokens."""
        self.layer = layer_idx
        rows = len(key_states)
        old = self.own.get(layer_idx)
        if old is None or old[0].shape[2] < self.count:
            room = _FIRST_ROOM if old is None else 2 * old[0].shape[2]
            new = tuple(
                each.new_empty(rows, each.shape[1], room, each.shape[3], dtype=torch.float32)
                for each in (key_states, value_states)
            )
            if old is not None:
                for buffer, before in zip(new, old, strict=True):
                    buffer[:, :, : self.count - 1] = before[:rows, :, : self.count - 1]
            self.own[layer_idx] = (new[0], new[1])
        keys, values = self.own[layer_idx]
        keys[:rows, :, self.count - 1] = key_states[:, :, 0]
        values[:rows, :, self.count - 1] = value_states[:, :, 0]
        return keys[:rows, :, : self.count], values[:rows, :, : self.count]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Length of the longest row before the step that is running."""
        return self.longest + self.count - 1

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """What is added to the logits of the prefixes' keys, `[documents, 1, 1, longest]`; None for nothing.

        Of a window, the query sees itself and `window - 1` tokens before it. Hidden keys have a large finite number, so
        that a row which sees nothing of its prefix gives it the weight 0 rather than NaN.
        """
        if window not in self.masks:
            first = [0 if window is None else max(0, length + self.count - window) for length in self.lengths]
            mask = None
            if any(first) or len(set(self.lengths)) > 1:
                keys = torch.arange(self.longest, device=device)
                bounds = torch.tensor([first, self.lengths], device=device)[..., None]
                hidden = (keys < bounds[0]) | (keys >= bounds[1])
                mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -1e30)[:, None, None]
            self.masks[window] = mask
        return self.masks[window]

    def gathered(self, rows: Tensor) -> Tensor:
        """From `[rows, kv_heads, group, width]` to `[documents, kv_heads, depth * group, width]`."""
        if len(self.lengths) > 1:
            padded = rows.new_zeros(len(self.lengths) * self.depth, *rows.shape[1:])
            rows = padded.index_copy_(0, self.places.to(rows.device), rows)
        heads, group, width = rows.shape[1:]
        by_document = rows.view(len(self.lengths), self.depth, heads, group, width).transpose(1, 2)
        return by_document.reshape(len(self.lengths), heads, self.depth * group, width)

    def scattered(self, documents: Tensor, group: int) -> Tensor:
        """The way back from `gathered`."""
        count, heads, _, width = documents.shape
        rows = documents.view(count, heads, self.depth, group, width).transpose(1, 2).flatten(0, 1)
        return rows if count == 1 else rows[self.places.to(rows.device)]


class ExpandedRows:
    """Rows that continue one prefix, each with its own copy of the keys and values; for any model with a cache."""

    def __init__(self, model: Any, ids: Sequence[int], rows: int) -> None:
        """Runs the prefix once and copies its cache."""
        self.model = model
        output = model(input_ids=torch.tensor([ids], device=model.device), use_cache=True)
        self.first: Float[Tensor, " vocab"] = output.logits[0, -1].float()
        self.cache = output.past_key_values
        self.cache.batch_repeat_interleave(rows)

    def step(self, tokens: Sequence[int]) -> Float[Tensor, "rows vocab"]:
        """See `Rows`."""
        column = torch.tensor(tokens, device=self.model.device)[:, None]
        logits: Tensor = self.model(input_ids=column, past_key_values=self.cache, use_cache=True).logits[:, -1]
        return logits

    def keep(self, order: Sequence[int]) -> None:
        """See `Rows`."""
        self.cache.batch_select_indices(torch.tensor(order, device=self.model.device))


def usable_with(model: Any) -> bool:
    """Whether a model computes the same with a shared prefix as by itself, which is found by trying.

    It does not where its attention does not go through the interface of transformers, or is another function than a
    softmax of scaled products (learned sinks, ALiBi, linear attention and so on).
    """
    config = model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ())
    # No public name says whether a model's code goes through the attention interface; without this one, the trial does.
    settable = getattr(model, "_can_set_attn_implementation", lambda: hasattr(model, "set_attn_implementation"))
    if not types <= {"full_attention", "sliding_attention"} or not settable():
        return False
    ids = [(37 * i + 11) % min(config.vocab_size, 997) for i in range(12)]
    try:
        rows = SharedPrefixRows(model, [run_prefix(model, ids[:5]), run_prefix(model, ids[:8])], [0, 0, 1])
        rows.step([ids[5], ids[6], ids[8]])
        rows.keep([0, 2])
        shared = rows.step([ids[6], ids[9]])
    except Exception:  # a model that does its attention otherwise can fail in any way
        return False
    plain = torch.stack([run_prefix(model, ids[:7]).logits, run_prefix(model, ids[:10]).logits])
    error = (shared.float() - plain).square().mean().sqrt()
    return bool(error <= (0.1 if model.dtype.itemsize < 4 else 1e-3) * plain.std())


@contextlib.contextmanager
def _active(rows: SharedPrefixRows) -> Iterator[None]:
    model = rows.model
    original = model.config._attn_implementation
    AttentionInterface.register(_NAME, _attention)
    token = _ACTIVE.set(rows)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(original)
        _ACTIVE.reset(token)


def _attention(
    module: Any,
    query: Float[Tensor, "rows heads 1 width"],
    key: Float[Tensor, "rows kv_heads count width"],
    value: Float[Tensor, "rows kv_heads count value_width"],
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "rows 1 heads value_width"], None]:
    """The softmax over a row's prefix and its own tokens, in two parts."""
    rows = _ACTIVE.get()
    heads, width = query.shape[1], query.shape[3]
    group = heads // key.shape[1]
    dtype = query.dtype
    query = query.reshape(len(query), key.shape[1], group, width).float() * (
        width**-0.5 if scaling is None else scaling
    )
    if sliding_window is not None:
        key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
    own, own_sum = _part(query, key, value, softcap, None)
    layer = rows.layer
    prefix, prefix_sum = _part(
        rows.gathered(query),
        rows.prefix_keys[layer],
        rows.prefix_values[layer],
        softcap,
        rows.mask(sliding_window, query.device),
    )
    share = torch.sigmoid(rows.scattered(prefix_sum, group) - own_sum)
    output = torch.lerp(own, rows.scattered(prefix, group), share)
    return output.to(dtype).reshape(len(query), 1, heads, value.shape[3]), None


def _part(
    query: Float[Tensor, "batch kv_heads queries width"],
    key: Float[Tensor, "batch kv_heads keys width"],
    value: Float[Tensor, "batch kv_heads keys value_width"],
    softcap: float | None,
    mask: Tensor | None,
) -> tuple[Float[Tensor, "batch kv_heads queries value_width"], Float[Tensor, "batch kv_heads queries 1"]]:
    logits = query @ key.transpose(-1, -2)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if mask is not None:
        logits = logits + mask
    total = logits.logsumexp(-1, keepdim=True)
    return (logits - total).exp() @ value, total


def next_tokens(
    logits: Float[Tensor, "rows vocab"],
    uniforms: Float[Tensor, " rows"],
    temperature: float,
    top_p: float,
    candidates: int = 128,
) -> Int[Tensor, " rows"]:
    """Draws a token for each row by its place in the row's distribution function.

    Args:
        logits: Of the next tokens.
        uniforms: Numbers in [0, 1), one for each row.
        temperature: What the logits are divided by, above 0.
        top_p: The fewest tokens that together have this probability are drawn from.
        candidates: How many tokens are looked at first; more are where they do not have `top_p`, so that the result is
            exact without a sort of the vocabulary.

    Returns:
        Token ids.

    Raises:
        SamplerError: Logits are NaN or infinite.
    """
    vocabulary = logits.shape[1]
    candidates = vocabulary if top_p >= 1 else min(candidates, vocabulary)
    logits = logits.float()
    best, tokens = logits.topk(candidates) if candidates < vocabulary else logits.sort(descending=True)
    total = ((logits - best[:, :1]) / temperature).logsumexp(-1, keepdim=True)
    if not bool(total.isfinite().all()):
        raise SamplerError("the model's logits are NaN or infinite; float16 may be too narrow for it")
    probabilities = ((best - best[:, :1]) / temperature - total).double().exp()
    reached = probabilities.cumsum(-1)
    # Kept: every token before which the mass is below top_p.
    kept = (reached - probabilities < top_p).sum(-1, keepdim=True).clamp(min=1)
    mass = reached.gather(1, kept - 1)
    place = torch.searchsorted(reached, uniforms.to(reached)[:, None] * mass, right=True)
    drawn = tokens.gather(1, torch.minimum(place, kept - 1))[:, 0]
    short = (reached[:, -1] < top_p) & (candidates < vocabulary)
    if bool(short.any()):
        drawn[short] = next_tokens(
            logits[short], uniforms[short.to(uniforms.device)], temperature, top_p, 8 * candidates
        )
    return drawn
