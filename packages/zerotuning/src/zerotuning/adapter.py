"""Putting the operator into a transformers model, and taking it out again.

The way in is the attention interface of transformers: an attention function and its mask function are registered under
a name of ours, and the decoder is told to use that name. No modelling file is patched and no weight is touched; a layer
in which every factor is 1 runs the library's own attention function.

A hook in front of the decoder reads the attention mask of each forward and from it the initial token of each row, so
padding on either side, beam search (which reorders rows, and the mask with them) and decoding with a cache need nothing
from the caller. A cache is marked with the configuration that filled it.
"""

import contextlib
import dataclasses
import inspect
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from separata_core.attention import attention_with_key_bias, key_bias_mask
from separata_core.models import attention_modules, decoder_layers
from torch import Tensor, nn

from zerotuning.config import ZeroTuningConfig
from zerotuning.operator import clamp_log_gamma, start_indices, start_indices_4d, warn_if_extreme

# Derived, so that a vendored copy beside an installed original registers under another name.
_PREFIX = __name__.rpartition(".")[0].replace(".", "_")
_CACHE_MARK = f"_{_PREFIX}_mark"


def apply(
    model: nn.Module, config: ZeroTuningConfig | Sequence[ZeroTuningConfig]
) -> contextlib.AbstractContextManager[nn.Module]:
    """Run a model under a configuration for the length of a `with` block.

    Args:
        model: A decoder-only transformers model, loaded with `attn_implementation="sdpa"` (the default) or `"eager"`.
        config: The configuration, or one for each row of the batches to come (with beam search or several returned
            sequences each row stands for all of its copies).

    Returns:
        A context manager that gives the model; afterwards, also after an exception, the model computes bit for bit what
        it did before.

    Raises:
        ValueError: The configuration is for another model, or the model's attention cannot be wrapped.
        RuntimeError: A configuration is already attached.
    """
    return _applied(model, config)


@contextlib.contextmanager
def _applied(model: nn.Module, config: ZeroTuningConfig | Sequence[ZeroTuningConfig]) -> Iterator[nn.Module]:
    attach(model, config)
    try:
        yield model
    finally:
        detach(model)


def attach(model: nn.Module, config: ZeroTuningConfig | Sequence[ZeroTuningConfig]) -> None:
    """Put a model under a configuration until `detach`.

    Args:
        model: See `apply`.
        config: See `apply`.

    Raises:
        ValueError: The configuration is for another model, or the model's attention cannot be wrapped.
        RuntimeError: A configuration is already attached.
    """
    configs = [config] if isinstance(config, ZeroTuningConfig) else list(config)
    if not configs:
        raise ValueError("config is an empty sequence; give one configuration, or one for each batch row")
    modules = list(attention_modules(model))
    if any(module in _SLOTS for module in modules):
        raise RuntimeError("a configuration is already attached to this model; call detach(model) first")
    decoder = _decoder(model)
    _check_supported(model, decoder)
    for each in configs:
        each.check_fits(model)

    original = _original(decoder.config._attn_implementation)
    stacked = clamp_log_gamma(torch.stack([each.log_gamma for each in configs]))
    warn_if_extreme(stacked, next(model.parameters()).dtype)
    attachment = _Attachment(
        original=original,
        log_gamma=[
            None if not bool(layer.any()) else (layer[0] if len(configs) == 1 else layer)
            for layer in stacked.unbind(dim=1)
        ],
        rows=len(configs),
        marks=tuple(None if each.is_identity else each.fingerprint for each in configs),
        parameters=tuple(inspect.signature(decoder.forward).parameters),
        pad_token_id=_pad_token_id(model),
    )
    _register()
    attachment.handles = [
        decoder.register_forward_pre_hook(attachment.before_forward, with_kwargs=True),
        decoder.register_forward_hook(attachment.after_forward),
    ]
    for index, module in enumerate([*modules, decoder]):
        _SLOTS[module] = _Slot(attachment, index)
    try:
        decoder.set_attn_implementation(_NAMES[original])
    except BaseException:
        detach(model)
        raise


def detach(model: nn.Module) -> None:
    """Undo `attach`; without an attached configuration, do nothing.

    Args:
        model: The model.
    """
    decoder = _decoder(model)
    slot = _SLOTS.pop(decoder, None)
    if slot is None:
        return
    for module in attention_modules(model):
        _SLOTS.pop(module, None)
    for handle in slot.attachment.handles:
        handle.remove()
    decoder.set_attn_implementation(slot.attachment.original)


def select_cache_rows(cache: Any, rows: Int[Tensor, " rows"]) -> None:
    """Keep chosen batch rows of a cache, in order and with repeats, and its mark with them.

    Args:
        cache: A transformers `Cache`, changed in place.
        rows: Indices of its rows.
    """
    cache.reorder_cache(rows)
    mark = getattr(cache, _CACHE_MARK, None)
    if isinstance(mark, _Mark):
        fingerprints = mark.fingerprints if len(mark.fingerprints) > 1 else mark.fingerprints * (int(rows.max()) + 1)
        setattr(
            cache,
            _CACHE_MARK,
            _Mark(
                _shortest(tuple(fingerprints[row] for row in rows.tolist())),
                None if mark.start is None else mark.start[rows],
            ),
        )


@dataclasses.dataclass(frozen=True)
class _Mark:
    """What a cache remembers: which configuration filled it, row by row, and where its rows start."""

    fingerprints: tuple[str | None, ...]
    start: Tensor | None


@dataclasses.dataclass(frozen=True)
class _Forward:
    """What the layers need to know of the forward that is running.

    `end` counts the positions up to the last query. `start` is None where every row starts at key 0, `live` where every
    row has a token at all.
    """

    batch: int
    end: int
    start: Tensor | None
    live: Tensor | None


class _Attachment:
    """One configuration on one model. Holds no module, so that the weak keys of `_SLOTS` can die."""

    def __init__(
        self,
        *,
        original: str,
        log_gamma: list[Tensor | None],
        rows: int,
        marks: tuple[str | None, ...],
        parameters: tuple[str, ...],
        pad_token_id: int | None,
    ) -> None:
        self.original = original
        self.log_gamma = log_gamma
        # Known here, so that no layer has to wait for a GPU to read them. Rows left alone have 0.
        self.bounds = [
            (0.0, 0.0) if each is None else (min(0.0, float(each.min())), max(0.0, float(each.max())))
            for each in log_gamma
        ]
        self.rows = rows
        self.marks = _shortest(marks)
        self.parameters = parameters
        self.pad_token_id = pad_token_id
        self.handles: list[Any] = []
        self.forward: _Forward | None = None

    def _is_on(self, decoder: nn.Module) -> bool:
        # A copy of the model carries copies of the hooks, but it runs as it is.
        slot = _SLOTS.get(decoder)
        return slot is not None and slot.attachment is self

    def before_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_on(decoder):
            return
        arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        input_ids: Tensor | None = arguments.get("input_ids")
        tokens: Tensor = arguments["inputs_embeds"] if input_ids is None else input_ids
        batch, length = int(tokens.shape[0]), int(tokens.shape[1])
        if batch % self.rows:
            raise ValueError(
                f"the batch has {batch} rows, which is no multiple of the {self.rows} configurations attached"
            )
        cache = arguments.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        mark = self._checked_mark(cache, past)
        start, live = self._starts(arguments, tokens, input_ids, past, mark)
        self.forward = _Forward(batch, past + length, start, live)
        if cache is not None:
            setattr(cache, _CACHE_MARK, _Mark(self.marks, start))

    def after_forward(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._is_on(decoder):
            return
        # The decoder makes the cache itself when the caller only said `use_cache=True`.
        cache = getattr(output, "past_key_values", None)
        if cache is not None and self.forward is not None:
            setattr(cache, _CACHE_MARK, _Mark(self.marks, self.forward.start))

    def _checked_mark(self, cache: Any, past: int) -> _Mark | None:
        if not past:
            return None
        mark = getattr(cache, _CACHE_MARK, None)
        filled_by = mark.fingerprints if isinstance(mark, _Mark) else (None,)
        if filled_by != self.marks:
            raise ValueError(
                "past_key_values were computed under another configuration than the one attached, and keys and values "
                "depend on it: start from an empty cache"
            )
        return mark if isinstance(mark, _Mark) else None

    def _starts(
        self, arguments: dict[str, Any], tokens: Tensor, input_ids: Tensor | None, past: int, mark: _Mark | None
    ) -> tuple[Tensor | None, Tensor | None]:
        attention_mask = arguments.get("attention_mask")
        if isinstance(attention_mask, dict):
            # Models with several kinds of layers accept one ready mask for each kind.
            attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values()), None))
        if attention_mask is None:
            if past and mark is not None:
                return mark.start, None
            self._refuse_packed(arguments.get("position_ids"), past)
            self._warn_of_pads(input_ids, past)
            return None, None
        if attention_mask.ndim not in (2, 4):
            raise ValueError(
                f"attention_mask has {attention_mask.ndim} dimensions; expected [batch, length] or a 4-D mask"
            )
        find = start_indices if attention_mask.ndim == 2 else start_indices_4d
        start, live = find(attention_mask)
        batch = tokens.shape[0]
        start, live = start.to(tokens.device).expand(batch), live.to(tokens.device).expand(batch)
        if attention_mask.ndim == 4 and past and mark is not None:
            # The mask may belong to layers whose window has passed the start, and then counts from there.
            known = torch.zeros_like(start) if mark.start is None else mark.start.to(start.device)
            start = known if known.shape == start.shape else start
        all_live = bool(live.all())
        if not all_live:
            warnings.warn(
                f"rows {(~live).nonzero().flatten().tolist()} of the batch are all padding; they are left alone",
                stacklevel=4,
            )
        return (start if bool(start.any()) else None), (None if all_live else live)

    def _warn_of_pads(self, input_ids: Tensor | None, past: int) -> None:
        if self.pad_token_id is None or input_ids is None or past:
            return
        if bool((input_ids[:, 0] == self.pad_token_id).any()):
            warnings.warn(
                "attention_mask is None but some rows begin with the padding token; their initial token is taken to "
                "be at index 0: pass the attention_mask",
                stacklevel=5,
            )

    def _refuse_packed(self, position_ids: Any, past: int) -> None:
        if (
            position_ids is not None
            and not past
            and position_ids.ndim == 2
            and bool((position_ids.diff(dim=-1) != 1).any())
        ):
            raise ValueError(
                "position_ids restart within a row (packed sequences), where a row has several initial tokens; "
                "pass one sequence per row"
            )

    def layer(self, index: int, query: Tensor, keys: int) -> tuple[Tensor, Tensor, tuple[float, float]] | None:
        """The bias `[batch, heads]`, the key `[batch]` it belongs to, bounds of the bias; None if nothing changes."""
        log_gamma = self.log_gamma[index]
        if log_gamma is None:
            return None
        forward = self.forward
        if forward is None or forward.batch != query.shape[0]:
            raise RuntimeError(
                "an attention layer was run outside a forward of its decoder, so the initial token of its rows is "
                "unknown; call the model, or detach first"
            )
        if log_gamma.device != query.device:
            log_gamma = self.log_gamma[index] = log_gamma.to(query.device)
        batch = query.shape[0]
        bias = (
            log_gamma.expand(batch, -1)
            if log_gamma.ndim == 1
            else log_gamma.repeat_interleave(batch // self.rows, dim=0)
        )
        start = forward.start
        start = query.new_zeros(batch, dtype=torch.long) if start is None else start.to(query.device)
        if forward.live is not None:
            bias = bias * forward.live.to(query.device)[:, None]
        if (offset := forward.end - keys) > 0:
            # A sliding-window layer keeps its latest keys only, so its first key is a later token.
            start = start - offset
            bias = bias * (start >= 0)[:, None]
            start = start.clamp(min=0)
        return bias, start, self.bounds[index]


@dataclasses.dataclass(frozen=True)
class _Slot:
    attachment: _Attachment
    layer: int


_SLOTS: "weakref.WeakKeyDictionary[nn.Module, _Slot]" = weakref.WeakKeyDictionary()


def _layer_of(module: nn.Module, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, tuple[float, float]] | None:
    # Absent for a copy of the model, or for another one that shares the config object: those run as they are.
    slot = _SLOTS.get(module)
    return None if slot is None else slot.attachment.layer(slot.layer, query, key.shape[2])


def _sdpa_forward(
    module: nn.Module,
    query: Float[Tensor, "batch heads query dim"],
    key: Float[Tensor, "batch kv_heads key dim"],
    value: Float[Tensor, "batch kv_heads key value_dim"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layer = _layer_of(module, query, key)
    if layer is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return output, None
    for name in ("softcap", "position_bias", "cache", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name!r} to its attention, which the SDPA path does not cover; "
                'load the model with attn_implementation="eager"'
            )
    bias, start, bounds = layer
    length = query.shape[2]
    causal = (
        length > 1
        and attention_mask is None
        and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    )
    if causal and key.shape[2] > length:
        # Prefill into a static cache: the keys behind the prompt are still empty.
        key, value = key[:, :, :length], value[:, :, :length]
    if dropout:
        # Dropout acts on the weights, so their total cannot be corrected afterwards: write the bias into the mask
        # instead.
        mask = key_bias_mask(query, key, bias, start, attention_mask=attention_mask, is_causal=causal)
        output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return output, None
    corrected = attention_with_key_bias(
        query,
        key,
        value,
        bias,
        start,
        attention_mask=attention_mask,
        is_causal=causal,
        scale=scaling,
        bias_range=bounds,
    )
    return corrected.transpose(1, 2).contiguous(), None


def _eager_forward(
    module: nn.Module,
    query: Float[Tensor, "batch heads query dim"],
    key: Float[Tensor, "batch kv_heads key dim"],
    value: Float[Tensor, "batch kv_heads key value_dim"],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    layer = _layer_of(module, query, key)
    if layer is not None:
        bias, start, _ = layer
        # transformers always builds the mask for eager attention, so causality is in it.
        attention_mask = key_bias_mask(query, key, bias, start, attention_mask=attention_mask)
    output: tuple[Tensor, Tensor | None] = _eager_of(module)(module, query, key, value, attention_mask, **kwargs)
    return output


def _eager_of(module: nn.Module) -> Any:
    """The eager attention function that every modelling file of transformers carries for its own layers."""
    return getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)


_NAMES = {"sdpa": f"{_PREFIX}_sdpa", "eager": f"{_PREFIX}_eager"}


def _original(implementation: Any) -> str:
    """The attention that a name stands for: a copy of an attached model still has the name of ours."""
    return next((name for name, ours in _NAMES.items() if ours == implementation), str(implementation))


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for original, forward in (("sdpa", _sdpa_forward), ("eager", _eager_forward)):
        AttentionInterface.register(_NAMES[original], forward)
        AttentionMaskInterface.register(_NAMES[original], ALL_MASK_ATTENTION_FUNCTIONS[original])


def _decoder(model: nn.Module) -> Any:
    """The module that holds the decoder layers: it receives the attention mask and the cache."""
    layers = decoder_layers(model)
    return next(module for module in model.modules() if any(child is layers for child in module.children()))


def _check_supported(model: nn.Module, decoder: Any) -> None:
    config = getattr(decoder, "config", None)
    if config is None or not hasattr(decoder, "set_attn_implementation"):
        raise _not_wrappable(model, "custom code")
    implementation = _original(config._attn_implementation)
    # No public name says whether a model's code goes through the attention interface.
    if implementation not in _NAMES or not decoder._can_set_attn_implementation():
        raise _not_wrappable(model, implementation)
    if implementation == "eager":
        for module in attention_modules(model):
            if _eager_of(module) is None:
                raise _not_wrappable(model, implementation)


def _not_wrappable(model: nn.Module, implementation: str) -> ValueError:
    return ValueError(
        f"the attention of {type(model).__name__} ({implementation}) cannot be wrapped: it must go through the "
        "attention interface of transformers; load a model class of transformers, with "
        'attn_implementation="eager" (or "sdpa")'
    )


def _pad_token_id(model: nn.Module) -> int | None:
    """The padding token, where seeing it first in a row can mean nothing but padding."""
    config = getattr(model, "config", None)
    pad = getattr(config, "pad_token_id", None)
    return pad if isinstance(pad, int) and pad >= 0 and pad != getattr(config, "bos_token_id", None) else None


def _shortest(marks: tuple[str | None, ...]) -> tuple[str | None, ...]:
    return marks[:1] if len(set(marks)) == 1 else marks
