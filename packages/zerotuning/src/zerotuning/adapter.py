"""Putting the operator into a transformers model, and taking it out again.

The way in is the attention interface of transformers: an attention function and its mask function are registered under
a name of ours (see `zerotuning.attention`), and the decoder is told to use that name. No modelling file is patched and
no weight is touched; a layer in which every factor is 1 runs the library's own attention function.

A hook in front of the decoder reads the attention mask of each forward and from it the initial token of each row, so
padding on either side, packed sequences, beam search (which reorders rows, and the mask with them) and decoding with a
cache need nothing from the caller. What it found goes down to the attention with the other arguments of the layers, so
that forwards in several threads, and layers that are run again by gradient checkpointing, keep their own. A cache is
marked with the configuration that filled it.
"""

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from separata_core.models import attention_modules, decoder_layers
from torch import Tensor, nn

from zerotuning.attention import (
    FORWARD,
    PREFIX,
    SLOTS,
    Change,
    Path,
    Slot,
    check_floor,
    check_path,
    eager_of,
    family_of,
    original_of,
    register,
    use,
)
from zerotuning.config import Mode, ZeroTuningConfig
from zerotuning.operator import clamp_log_gamma, start_indices, start_indices_4d, visible, warn_if_extreme

_CACHE_MARK = f"_{PREFIX}_mark"


@contextlib.contextmanager
def apply(
    model: nn.Module, config: ZeroTuningConfig | Sequence[ZeroTuningConfig], path: Path = "auto"
) -> Iterator[nn.Module]:
    """Run a model under a configuration for the length of a `with` block.

    Args:
        model: A decoder-only transformers model, with the attention implementation `"sdpa"` (the default), `"eager"`,
            `"flex_attention"`, or a flash kernel. Wrapped by PEFT or quantised is fine.
        config: The configuration, or one for each row of the batches to come (with beam search or several returned
            sequences each row stands for all of its copies). All have one mode.
        path: The way taken for the mode `"exact"`; all compute the same:

            - `"auto"`: the fastest that is accurate.
            - `"post_softmax"`: materialised weights, multiplied and normalised again. Eager attention only.
            - `"bias"`: `log gamma` in an additive mask. Eager and SDPA.
            - `"closed_form"`: the output of the unmodified kernel, corrected. Eager and SDPA; not for a gamma below
              `separata_core.attention.closed_form_floor`, where digits are lost, nor with dropout.
            - `"augmented"`: one more dimension of query and key. SDPA, FlexAttention, flash.

    Yields:
        The model; afterwards, also after an exception, it computes bit for bit what it did before. With gradient
        checkpointing the backward runs layers again, and so belongs into the block too.

    Raises:
        ValueError: The configuration is for another model, the configurations differ in mode, the model's attention
            cannot be wrapped, or it does not offer the path.
        RuntimeError: A configuration is already attached.
    """
    attach(model, config, path)
    try:
        yield model
    finally:
        detach(model)


def attach(model: nn.Module, config: ZeroTuningConfig | Sequence[ZeroTuningConfig], path: Path = "auto") -> None:
    """Put a model under a configuration until `detach`.

    Args:
        model: See `apply`.
        config: See `apply`.
        path: See `apply`.

    Raises:
        ValueError: See `apply`.
        RuntimeError: A configuration is already attached.
    """
    configs = [config] if isinstance(config, ZeroTuningConfig) else list(config)
    if not configs:
        raise ValueError("config is an empty sequence; give one configuration, or one for each batch row")
    mode = configs[0].mode
    if other := next((each.mode for each in configs if each.mode != mode), None):
        raise ValueError(
            f"config holds configurations of the modes {mode!r} and {other!r}; the rows of one batch need one mode"
        )
    check_free(model)
    implementation = wrappable(model)
    check_path(path, mode, implementation)
    for each in configs:
        each.check_fits(model)
    stacked = clamp_log_gamma(torch.stack([each.log_gamma for each in configs]))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    warn_if_extreme(stacked, dtype)
    if path == "closed_form":
        check_floor(stacked, dtype)
    install(
        model,
        Attachment(
            mode=mode,
            path=path,
            log_gamma=[
                None if not bool(layer.any()) else (layer[0] if len(configs) == 1 else layer)
                for layer in stacked.unbind(dim=1)
            ],
            rows=len(configs),
            marks=tuple(None if each.is_identity else each.fingerprint for each in configs),
        ),
    )


def detach(model: nn.Module) -> None:
    """Undo `attach`; without an attached configuration, do nothing.

    Args:
        model: The model.
    """
    decoder = _decoder(model)
    slot = SLOTS.pop(decoder, None)
    if slot is None:
        return
    for module in attention_modules(model):
        SLOTS.pop(module, None)
    for handle in slot.source.handles:
        handle.remove()
    # Another model may share the config object, and go on under a configuration.
    if not any(getattr(module, "config", None) is decoder.config for module in SLOTS):
        use(decoder, slot.source.original)


@contextlib.contextmanager
def apply_log_gamma(model: nn.Module, log_gamma: Float[Tensor, "rows layers heads"]) -> Iterator[nn.Module]:
    """Run a model under factors through which gradients flow, for the length of a `with` block.

    Args:
        model: See `apply`.
        log_gamma: Natural logarithm of the factor of each layer and query head, for each row of the batches to come.

    Yields:
        The model.

    Raises:
        ValueError: The shape does not fit the model, or its attention cannot be wrapped.
        RuntimeError: A configuration is already attached.
    """
    untouched = ZeroTuningConfig.uniform(model, 1.0)
    if log_gamma.ndim != 3 or log_gamma.shape[1:] != untouched.log_gamma.shape:
        raise ValueError(
            f"log_gamma has shape {tuple(log_gamma.shape)}; the model needs [rows, L, Hq] with [L, Hq] = "
            f"{list(untouched.log_gamma.shape)}"
        )
    check_free(model)
    clamped = clamp_log_gamma(log_gamma)
    attachment = Attachment(log_gamma=list(clamped.unbind(1)), rows=len(log_gamma), marks=(None,))
    install(model, attachment)
    try:
        yield model
    finally:
        detach(model)


@dataclasses.dataclass(frozen=True)
class _Mark:
    """What a cache remembers.

    Which configuration filled it, row by row; where its rows start; whether they are packed sequences; and the number
    of the forward that began it.
    """

    fingerprints: tuple[str | None, ...]
    start: Tensor | None
    packed: bool
    run: int | None


@dataclasses.dataclass(frozen=True)
class _Forward:
    """What the layers need to know of the forward that is running.

    `past` counts the positions before the first query, `end` those up to the last one. `run` is the number of the
    forward that began the cache, None where it is unknown. `start` is None where every row starts at key 0, `live`
    where every row has a token at all. `marks` are given where rows have several initial tokens, `[batch, end]`. `real`
    says which positions are no padding, where a 2-D attention mask was given. `unchecked` holds row and position of a
    second sequence until it is known that the layers keep it from the first.
    """

    batch: int
    past: int
    end: int
    run: int | None
    start: Tensor | None = None
    live: Tensor | None = None
    marks: Tensor | None = None
    real: Tensor | None = None
    unchecked: list[tuple[int, int]] = dataclasses.field(default_factory=list)


class Attachment:
    """One configuration on one model. Holds no module, so that the weak keys of the slots can die.

    Attributes:
        original: The attention implementation of the model beneath.
        name: The implementation of ours that it has in its place.
        handles: Of the hooks.
    """

    def __init__(
        self,
        *,
        log_gamma: list[Tensor | None] | list[Tensor],
        rows: int,
        marks: tuple[str | None, ...],
        mode: Mode | Literal["weights"] = "exact",
        path: Path = "auto",
    ) -> None:
        """Take note of what to do.

        Args:
            log_gamma: Of each layer, `[heads]` or `[rows, heads]`; None where nothing changes.
            rows: Number of the configurations.
            marks: Of each row, what the cache is to be marked with; None for an unchanged model.
            mode: See `Change`.
            path: See `Change`.
        """
        self.log_gamma: list[Tensor | None] = list(log_gamma)
        # Known here, so that no layer has to wait for a GPU to read them. Rows left alone have 0.
        self.bounds = [
            (0.0, 0.0) if each is None else (min(0.0, float(each.detach().min())), max(0.0, float(each.detach().max())))
            for each in log_gamma
        ]
        self.rows = rows
        self.marks = _shortest(marks)
        self.mode = mode
        self.path = path
        self.original = ""
        self.name = ""
        self.parameters: tuple[str, ...] = ()
        self.pad_token_id: int | None = None
        self.flash = False
        self.handles: list[Any] = []
        self._run = 0
        self._running: list[_Forward] = []

    def _is_on(self, decoder: nn.Module) -> bool:
        # A copy of the model carries copies of the hooks, but it runs as it is.
        slot = SLOTS.get(decoder)
        return slot is not None and slot.source is self

    def before_forward(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hook: find the initial tokens, and let the layers know."""
        if not self._is_on(decoder):
            return None
        if (found := cast(Any, decoder).config._attn_implementation) != self.name:
            raise RuntimeError(
                f"the attention implementation was set to {found!r} while a configuration is attached, which therefore "
                "would do nothing; detach first, and attach again afterwards"
            )
        arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        input_ids: Tensor | None = arguments.get("input_ids")
        tokens: Tensor = arguments["inputs_embeds"] if input_ids is None else input_ids
        batch = int(tokens.shape[0])
        if batch % self.rows:
            raise ValueError(
                f"the batch has {batch} rows, which is no multiple of the {self.rows} configurations attached"
            )
        cache = arguments.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        mark = self._checked_mark(cache, past)
        forward = self._describe(arguments, tokens, input_ids, past, mark)
        if cache is not None:
            setattr(cache, _CACHE_MARK, self._mark(forward))
        self._running.append(forward)
        return args, {**kwargs, FORWARD: forward}

    def after_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Hook: mark the cache."""
        forward = kwargs.get(FORWARD)
        self._running = [each for each in self._running if each is not forward]
        # The decoder makes the cache itself when the caller only said `use_cache=True`.
        cache = getattr(output, "past_key_values", None)
        if cache is not None and forward is not None:
            setattr(cache, _CACHE_MARK, self._mark(forward))

    def _mark(self, forward: _Forward) -> _Mark:
        return _Mark(self.marks, forward.start, forward.marks is not None, forward.run)

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
        if isinstance(mark, _Mark) and mark.packed and any(each is not None for each in self.log_gamma):
            raise ValueError(
                "past_key_values hold packed sequences, and which of them the next tokens continue is unknown: decode "
                "one sequence per row"
            )
        return mark if isinstance(mark, _Mark) else None

    def _describe(
        self, arguments: dict[str, Any], tokens: Tensor, input_ids: Tensor | None, past: int, mark: _Mark | None
    ) -> _Forward:
        batch = int(tokens.shape[0])
        if not past:
            self._run += 1
        run = self._run if not past else (None if mark is None else mark.run)
        described = _Forward(batch, past, past + int(tokens.shape[1]), run)
        attention_mask = arguments.get("attention_mask")
        if isinstance(attention_mask, dict):
            # Models with several kinds of layers accept one ready mask for each kind.
            attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values()), None))
        if not past:
            marks = self._packed(arguments, tokens, attention_mask)
            if marks is not None:
                further = [] if self.flash else marks[:, 1:].nonzero()[:1].tolist()
                return dataclasses.replace(
                    described, marks=marks, unchecked=[(row, before + 1) for row, before in further]
                )
        if attention_mask is None:
            if past and mark is not None:
                if mark.start is not None and len(mark.start) != batch:
                    raise ValueError(
                        f"past_key_values were filled by {len(mark.start)} rows, now there are {batch}, and where each "
                        "begins is unknown: pass the attention_mask"
                    )
                return dataclasses.replace(described, start=mark.start)
            self._warn_of_pads(input_ids, past)
            return described
        real = None
        if hasattr(attention_mask, "mask_mod"):
            attention_mask = _dense(attention_mask, batch)
        if attention_mask.ndim == 2:
            real = attention_mask != 0
            start, live = start_indices(attention_mask)
        elif attention_mask.ndim == 4:
            start, live = start_indices_4d(attention_mask)
        else:
            raise ValueError(
                f"attention_mask has {attention_mask.ndim} dimensions; expected [batch, length] or a 4-D mask"
            )
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
        return dataclasses.replace(
            described, start=start if bool(start.any()) else None, live=None if all_live else live, real=real
        )

    def _warn_of_pads(self, input_ids: Tensor | None, past: int) -> None:
        if self.pad_token_id is None or input_ids is None or past:
            return
        if bool((input_ids[:, 0] == self.pad_token_id).any()):
            warnings.warn(
                "attention_mask is None but some rows begin with the padding token; their initial token is taken to "
                "be at index 0: pass the attention_mask",
                stacklevel=5,
            )

    def _packed(self, arguments: dict[str, Any], tokens: Tensor, attention_mask: Any) -> Tensor | None:
        """The first token of every sequence of packed rows, `[batch, length]`; None where each row holds one."""
        batch, length = int(tokens.shape[0]), int(tokens.shape[1])
        if attention_mask is not None and not (
            self.flash and getattr(attention_mask, "ndim", 0) == 2 and bool((attention_mask != 0).all())
        ):
            # A mask says what there is to see; flash kernels alone are not given one that hides nothing.
            return None
        lengths = arguments.get("cu_seq_lens_q")
        if self.flash and lengths is not None and arguments.get("cu_seq_lens_k") is not None:
            flat = torch.zeros(batch * length + 1, dtype=torch.bool, device=tokens.device)
            flat[lengths.to(tokens.device, torch.long)] = True
            return flat[:-1].reshape(batch, length)
        positions = arguments.get("position_ids")
        if positions is None or positions.ndim != 2 or length < 2:
            return None
        # As transformers tells them apart, for its masks and for its flash kernels.
        starts: Tensor = (
            positions == positions.min() if self.flash else positions.diff(dim=-1, prepend=positions[:, :1]) != 1
        )
        starts = starts.to(tokens.device).expand(batch, -1).clone()
        starts[:, 0] = True
        if not bool(starts[:, 1:].any()):
            return None
        if self.flash and batch > 1:
            raise ValueError(
                f"position_ids restart within a row (packed sequences) in a batch of {batch} rows, and flash kernels "
                "keep sequences apart in a batch of one row only; pass cu_seq_lens_q and its like, or one row"
            )
        return starts

    @staticmethod
    def _check_packed(forward: _Forward, mask: Any) -> None:
        """Whether the first query of a second sequence is kept from the sequence before; looked up once a forward."""
        if not forward.unchecked:
            return
        row, position = forward.unchecked.pop()
        if mask is None:
            apart = False
        elif hasattr(mask, "mask_mod"):
            indices = [torch.tensor(each, device=mask.kv_indices.device) for each in (row, 0, position, position - 1)]
            apart = not bool(mask.mask_mod(*indices))
        else:
            apart = not bool(visible(mask[row if mask.shape[0] > 1 else 0, 0, position, position - 1]))
        if not apart:
            raise ValueError(
                "position_ids restart within a row (packed sequences), but the model does not keep the sequences "
                "apart, as transformers does only where no cache is used; pass use_cache=False, or one sequence per row"
            )

    def change(self, index: int, forward: _Forward | None, query: Tensor, keys: int, mask: Any) -> Change | None:
        """What a layer is to do in a forward.

        Args:
            index: The layer.
            forward: What the decoder's hook said of the forward.
            query: Its queries.
            keys: The number of its keys.
            mask: The mask that it was given.

        Returns:
            The change, None if there is none.
        """
        log_gamma = self.log_gamma[index]
        if log_gamma is None:
            return None
        if forward is None:
            # Some models keep their arguments from their layers; then it can only be the one forward that runs.
            if len(self._running) > 1:
                raise RuntimeError(
                    "several forwards run at once, and this model does not hand on to its layers what they need to "
                    "know of their own; run one after the other"
                )
            if not self._running:
                raise RuntimeError(
                    "an attention layer was run outside a forward of its decoder, so the initial token of its rows is "
                    "unknown; call the model, or detach first"
                )
            [forward] = self._running
        if self.mode != "query":
            self._check_packed(forward, mask)
        if log_gamma.device != query.device:
            log_gamma = self.log_gamma[index] = log_gamma.to(query.device)
        batch = query.shape[0]
        bias = (
            log_gamma.expand(batch, -1)
            if log_gamma.ndim == 1
            else log_gamma.repeat_interleave(batch // self.rows, dim=0)
        )
        if forward.live is not None:
            bias = bias * forward.live.to(query.device)[:, None]
        offset = forward.end - keys
        at = self.marked(forward, query.device)
        if at is not None:
            return Change(self.mode, self.path, bias, window(at, offset), self.bounds[index])
        start = forward.start
        start = query.new_zeros(batch, dtype=torch.long) if start is None else start.to(query.device)
        if offset > 0 and self.mode != "query":
            # A sliding-window layer keeps its latest keys only, so its first key is a later token.
            start = start - offset
            bias = bias * (start >= 0)[:, None]
            start = start.clamp(min=0)
        return Change(self.mode, self.path, bias, start, self.bounds[index])

    def marked(self, forward: _Forward, device: torch.device) -> Tensor | None:
        """The keys to act on, `[batch, end]`, where they are not the one initial key of each row."""
        return None if forward.marks is None else forward.marks.to(device)


def window(marks: Tensor, offset: int) -> Tensor:
    """Of marks on all positions, those on the keys that a layer has.

    Args:
        marks: `[..., positions]`.
        offset: How many positions have left its window; negative where a static cache has room for more.

    Returns:
        `[..., keys]`.
    """
    return marks[..., offset:] if offset >= 0 else torch.nn.functional.pad(marks, (0, -offset))


def _dense(block_mask: Any, batch: int) -> Tensor:
    """A mask of FlexAttention as a bool tensor."""
    from torch.nn.attention.flex_attention import create_mask

    rows, keys = block_mask.shape[-2:]
    mask: Tensor = create_mask(block_mask.mask_mod, batch, 1, rows, keys, device=block_mask.kv_indices.device)
    return mask


def check_free(model: nn.Module) -> None:
    """Refuse a model that is under a configuration already.

    Args:
        model: The model.

    Raises:
        RuntimeError: It is.
    """
    if any(module in SLOTS for module in attention_modules(model)):
        raise RuntimeError("a configuration is already attached to this model; call detach(model) first")


def wrappable(model: nn.Module) -> str:
    """The name of a model's attention implementation, checked.

    Args:
        model: The model.

    Returns:
        The name that transformers has for it.

    Raises:
        ValueError: It cannot be wrapped.
    """
    decoder = _decoder(model)
    config = getattr(decoder, "config", None)
    if config is None or not hasattr(decoder, "set_attn_implementation"):
        raise _not_wrappable(model, "custom code")
    implementation = original_of(config._attn_implementation)
    # No public name says whether a model's code goes through the attention interface.
    if family_of(implementation) is None or not decoder._can_set_attn_implementation():
        raise _not_wrappable(model, implementation)
    if implementation == "eager" and any(eager_of(module) is None for module in attention_modules(model)):
        raise _not_wrappable(model, implementation)
    return implementation


def install(model: nn.Module, attachment: Attachment) -> None:
    """Put an attachment onto a model; `detach` takes it off.

    Args:
        model: The model, which has none.
        attachment: What the layers are to do.

    Raises:
        ValueError: The model's attention cannot be wrapped.
    """
    decoder = _decoder(model)
    attachment.original = wrappable(model)
    attachment.flash = family_of(attachment.original) == "flash"
    attachment.parameters = tuple(inspect.signature(decoder.forward).parameters)
    attachment.pad_token_id = _pad_token_id(model)
    attachment.name = register(attachment.original)
    attachment.handles = [
        decoder.register_forward_pre_hook(attachment.before_forward, with_kwargs=True),
        decoder.register_forward_hook(attachment.after_forward, with_kwargs=True, always_call=True),
    ]
    for index, module in enumerate([*attention_modules(model), decoder]):
        SLOTS[module] = Slot(attachment, index)
    try:
        use(decoder, attachment.name)
    except BaseException:
        detach(model)
        raise


def _decoder(model: nn.Module) -> Any:
    """The module that holds the decoder layers: it receives the attention mask and the cache."""
    layers = decoder_layers(model)
    return next(module for module in model.modules() if any(child is layers for child in module.children()))


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
