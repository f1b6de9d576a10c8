"""Steering a transformers model for the length of a `with` block.

A hook in front of the decoder reads from its arguments which positions of the call are steered (see
`bodes_steer.positions`); hooks behind the chosen decoder blocks move the hidden states there. No weight is touched and
no library is patched.

Where the prompt ends is known inside `generate` only. So while the block is open the model's own `generate` stands
behind one that first looks at its arguments; it is an attribute of this one model, and goes with the block.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import math
import threading
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from separata_core.models import decoder_layers
from torch import Tensor, nn

from bodes_steer.positions import Call, Positions, Prompt, Selection, check_positions, plain_mask, select

if TYPE_CHECKING:
    from bodes_steer.steerers import Steerer

# Arguments by which sequences laid end to end in one row are told apart.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")

# Arguments that hold what was computed in earlier calls.
_CACHES = ("past_key_values", "cache_params")


@contextlib.contextmanager
def steer(
    model: nn.Module,
    steerer: "Steerer | Mapping[int, Steerer]",
    *,
    layer: int | None = None,
    T: float | Mapping[int, float] | None = None,  # noqa: N803  # the paper's name
    positions: Any = "from_prompt_end",
    prompt_lengths: Any = None,
    layer_module: str | None = None,
) -> Iterator[nn.Module]:
    """Steer the output of decoder blocks for the length of a `with` block (paper, section on steering; blocks nest).

    The states of the chosen positions are moved in float32 (float64 in a model of float64) and cast back. They are cut
    off from the graph there: no gradient flows through what was steered.

    Args:
        model: A decoder-only transformers model; wrapped by PEFT, spread over devices, or compiled is fine.
        steerer: A fitted steerer, or one for each of several blocks, by index.
        layer: Index of the block, from 0; by default that of the activations on which the steerer was fitted.
        T: Strength, or one for each block; by default each steerer's own. 0 leaves the model as it is.
        positions: Which positions are steered, of those that are no padding:

            - `"from_prompt_end"`: every one from the last token of the prompt on. Inside `generate` the prompt is what
              `generate` was given. In a call of the model itself the prompt is the whole call, unless
              `prompt_lengths` says otherwise; with a filled cache it lies behind, and all positions are steered.
            - `"last"`: the last token of each row of each call, whatever the call. Without a cache this is not what it
              is with one.
            - `"all"`.
            - A boolean mask `[columns]` or `[batch, columns]` over the whole sequence, padding included.
            - A function from a `bodes_steer.positions.Call` to a boolean mask `[batch, query]`.
        prompt_lengths: Tokens of the prompt of each row, `[batch]`, padding not counted, or one number for all rows:
            for scoring, where prompt and answer are in one call.
        layer_module: Dotted name of the block as an alternative to `layer`, such as `"transformer.h.14"`, for models
            whose blocks are not found, or that hold several decoders.

    Yields:
        The model; afterwards, also after an exception, it computes bit for bit what it did before.

    Raises:
        ValueError: A block that does not exist (the valid ones are listed), a steerer that is not fitted or of another
            width than the model, a T that is not finite, positions that are none, or a model with virtual prompt
            tokens. Inside the block: a call whose positions cannot be told.
    """
    rule, lengths = check_positions(positions, prompt_lengths)
    targets = _targets(model, steerer, layer, T, layer_module)
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, Mapping) and any(getattr(c, "is_prompt_learning", False) for c in configs.values()):
            raise ValueError(
                "the model's adapter puts virtual tokens in front of the prompt, so where prompts end is unknown; use "
                "an adapter of weights (LoRA and its like)"
            )
    acting = [target for target in targets if target.T != 0]
    with contextlib.ExitStack() as stack:
        watches: dict[int, _Watch] = {}
        for target in acting:
            decoder, owner = _decoder_of(model, target.path)
            watch = watches.get(id(decoder))
            if watch is None:
                generate = None if owner is None else stack.enter_context(_watched(owner))
                watch = watches[id(decoder)] = _Watch(decoder, rule, lengths, generate)
                stack.callback(watch.close)
                handle = decoder.register_forward_pre_hook(watch.before_forward, with_kwargs=True)
                stack.callback(handle.remove)
            mover = _Mover(target, watch)
            stack.callback(mover.close)
            stack.callback(target.module.register_forward_hook(mover.after_block).remove)
            stack.enter_context(_noticed(target.module))
        yield model


@dataclass
class _Target:
    """A block, and what is to be done behind it."""

    path: str
    module: nn.Module
    steerer: "Steerer"
    T: float  # the paper's name


class _Watch:
    """Reads each call of one decoder. Copies of the model share it, and go unsteered when it is closed."""

    def __init__(
        self, decoder: nn.Module, positions: Positions, prompt_lengths: Tensor | None, generate: "_Generate | None"
    ) -> None:
        self.positions = positions
        self.prompt_lengths = prompt_lengths
        self.generate = generate
        self.parameters = tuple(inspect.signature(decoder.forward).parameters)
        self.is_open = True
        # Forwards in several threads keep their own; compiled code, which cannot look there, keeps it here.
        self.shared: Selection | None = None
        self.local = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Watch":
        return self

    def close(self) -> None:
        self.is_open = False
        self.shared = None

    def before_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook: find the positions of this call, once for all blocks."""
        if not self.is_open:
            return
        arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        if isinstance(self.positions, str) and self.positions != "all":
            for name in _PACKED:
                if arguments.get(name) is not None:
                    raise ValueError(
                        f"{name} is given: several sequences lie in one row, and where each one's prompt ends is "
                        "unknown; pass one sequence per row, or a mask or function for positions"
                    )
        tokens = arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise ValueError("the decoder was called without input_ids and inputs_embeds")
        prompt = None if self.generate is None else self.generate.prompt()
        cache = next((arguments[name] for name in _CACHES if arguments.get(name) is not None), None)
        if cache is None and prompt is not None and tokens.shape[1] < prompt.width:
            raise _untold("the model's own state")  # without any the whole sequence would come each time
        selection = select(
            Call(
                batch=tokens.shape[0],
                query=tokens.shape[1],
                past=0 if cache is None else _held(cache),
                device=tokens.device,
                mask=None if prompt is not None else plain_mask(arguments.get("attention_mask")),
                prompt=prompt,
            ),
            self.positions,
            self.prompt_lengths,
        )
        self.shared = selection
        if not torch.compiler.is_compiling():
            self.local.selection = selection

    def selection(self) -> Selection:
        """The positions of the call that is running."""
        found = self.shared
        if not torch.compiler.is_compiling() and (found is None or not found.compiled):
            found = getattr(self.local, "selection", None)
        if found is None:
            raise ValueError("a steered block was run outside a forward of its decoder; call the model")
        return found


class _Mover:
    """Steers behind one block."""

    def __init__(self, target: _Target, watch: _Watch) -> None:
        self.path = target.path
        self.steerer = target.steerer
        self.T = target.T
        self.watch = watch
        self.number = next(_NUMBERS)
        _STEERERS[self.number] = target.steerer

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Mover":
        return self

    def close(self) -> None:
        _STEERERS.pop(self.number, None)

    def after_block(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hook: the block's output, steered. Blocks return their states alone or first in a tuple."""
        if not self.watch.is_open:
            return None
        states = output[0] if isinstance(output, tuple) else output
        if not isinstance(states, Tensor) or states.ndim != 3:
            what = f"states of {states.ndim} dimensions" if isinstance(states, Tensor) else f"a {type(states).__name__}"
            raise ValueError(f"{self.path} returned {what}; only [batch, tokens, hidden] can be steered")
        new = self.watch.selection().apply(states, self.move)
        return (new, *output[1:]) if isinstance(output, tuple) else new

    def move(self, rows: Tensor) -> Tensor:
        """Steer rows `[rows, hidden]` of the model's type."""
        given = rows.detach()
        x = given if given.dtype in (torch.float32, torch.float64) else given.float()
        if torch.compiler.is_compiling():
            traced: Tensor = _flow(x, self.number, self.T)
            return traced.to(rows.dtype)
        with torch.no_grad():
            new: Tensor = self.steerer.to(x.device).flow(x, self.T).to(rows.dtype)
        if rows.dtype == torch.float16 and not bool((new.isfinite() | ~given.isfinite()).all()):
            raise ValueError(
                f"steering {self.path} with T={self.T:g} leaves the range of float16; use a smaller T, or load the "
                "model in bfloat16"
            )
        return new


# What compiled code calls: to the compiler it is one operation, so nothing of a steerer can break the graph.
_STEERERS: dict[int, "Steerer"] = {}
_NUMBERS = itertools.count()


@torch.library.custom_op(f"{__name__.replace('.', '_')}::flow", mutates_args=())
def _flow(x: Tensor, number: int, strength: float) -> Tensor:
    steerer = _STEERERS.get(number)
    new = x if steerer is None else steerer.to(x.device).flow(x, strength)
    return new.clone() if new is x else new


@_flow.register_fake
def _(x: Tensor, number: int, strength: float) -> Tensor:
    return torch.empty_like(x)


class _Generate:
    """Stands in for the `generate` of one model, and knows what it was given as long as it runs."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        self.own = vars(owner).get("generate")
        self.original: Any = getattr(owner, "generate")  # noqa: B009  # torch types attributes of modules as tensors
        self.users = 0
        self.local = threading.local()
        self.shared: Prompt | None = None
        functools.update_wrapper(self, self.original)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.owner))
        function: Any = getattr(self.original, "__func__", None)
        return copy.deepcopy(self.original, memo) if None in (copied, function) else types.MethodType(function, copied)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Drafting with its own lower layers, a model generates inside its generate: the outer prompt counts.
        if not self.users or self.prompt() is not None:
            return self.original(*args, **kwargs)
        self.local.prompt = self.shared = _prompt(self.owner, args, kwargs)
        try:
            return self.original(*args, **kwargs)
        finally:
            self.local.prompt = self.shared = None

    def prompt(self) -> Prompt | None:
        if torch.compiler.is_compiling():
            return self.shared
        found: Prompt | None = getattr(self.local, "prompt", None)
        return found


# Of each steered block its own `forward` (None without one), what stands there now, and the contexts that are open.
_MARKED: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any, int]]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _noticed(block: nn.Module) -> Iterator[None]:
    """Let compiled code notice that a block has another hook.

    Code compiled before would pass over it: torch does not look for hooks again, but it does for a `forward` of the
    instance. So the block gets one, which is its own.
    """
    there = vars(block).get("forward")
    own, current, users = _MARKED.get(block, (there, there, 0))
    if there is not current:
        own, users = there, 0  # another one was put there while the outer contexts were open
    _mark(block, own, users + 1)
    try:
        yield
    finally:
        own, current, users = _MARKED.get(block, (None, None, 0))
        if not users or vars(block).get("forward") is not current:
            _MARKED.pop(block, None)  # whoever put another one there has to take it away
        elif users > 1:
            _mark(block, own, users - 1)
        else:
            del _MARKED[block]
            if own is None:
                del block.forward
            else:
                block.forward = own


def _mark(block: nn.Module, own: Any, users: int) -> None:
    # Of a kind that is bound to the copy when the block is copied.
    function = types.MethodType(type(block).forward, block) if own is None else functools.partial(own)
    block.forward = function
    _MARKED[block] = (own, function, users)


@contextlib.contextmanager
def _watched(owner: nn.Module) -> Iterator[_Generate]:
    """Put a `_Generate` onto a model, or share the one that an outer context put there."""
    there = vars(owner).get("generate")
    generate = there if isinstance(there, _Generate) else _Generate(owner)
    if generate is not there:
        setattr(owner, "generate", generate)  # noqa: B010  # a plain assignment would be one to a method
    generate.users += 1
    try:
        yield generate
    finally:
        generate.users -= 1
        if not generate.users and vars(owner).get("generate") is generate:
            if generate.own is None:
                del owner.generate
            else:
                setattr(owner, "generate", generate.own)  # noqa: B010  # a plain assignment would be one to a method


def _prompt(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prompt:
    """What `generate(*args, **kwargs)` continues."""
    config = args[1] if len(args) > 1 else kwargs.get("generation_config")

    def option(name: str) -> Any:
        found = (kwargs.get(name), getattr(config, name, None), getattr(owner.generation_config, name, None))
        return next((each for each in found if each is not None), None)

    if option("guidance_scale") not in (None, 1, 1.0):
        raise ValueError(
            "guidance_scale runs a second prompt through the same model, and which of both a call belongs to is "
            "unknown; generate without it"
        )
    tokens = args[0] if args else kwargs.get("inputs")
    tokens = kwargs.get("input_ids") if tokens is None else tokens
    embeds = kwargs.get("inputs_embeds")
    given: Any = tokens if embeds is None else embeds
    device = next((p.device for p in owner.parameters()), torch.device("cpu"))
    if given is None:
        return Prompt(1, None, device)  # it begins with the token that begins all texts
    mask: Any = kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        # Beside a filled cache only the new tokens need be given, but the mask is whole.
        return Prompt(max(given.shape[1], mask.shape[1]), mask != 0, given.device)
    pad, ends = option("pad_token_id"), option("eos_token_id")
    ends = ends if isinstance(ends, Sequence) else [ends]
    if embeds is None and pad is not None and pad not in ends:
        return Prompt(given.shape[1], given != pad, given.device)  # as `generate` itself guesses
    return Prompt(given.shape[1], None, given.device)


def _held(cache: Any) -> int | Tensor:
    """How many columns a cache holds."""
    try:
        length = cache.get_seq_length()
    except (AttributeError, ValueError):  # one of another kind, or a state that is of one size whatever it has read
        raise _untold(f"the cache, a {type(cache).__name__},") from None
    return length if torch.compiler.is_compiling() else int(length)


def _untold(what: str) -> ValueError:
    return ValueError(
        f"{what} does not say how many tokens it holds, so where the prompt ends is unknown; pass use_cache=False"
    )


def _targets(
    model: nn.Module, steerer: Any, layer: int | None, strength: Any, layer_module: str | None
) -> list[_Target]:
    if isinstance(steerer, Mapping):
        if layer is not None or layer_module is not None:
            raise ValueError("steerer names its blocks; layer and layer_module go with a single one")
        if not steerer:
            raise ValueError("steerer is empty; give at least one block and its steerer")
        wanted: dict[int | None, Any] = dict(steerer)
    else:
        wanted = {layer: steerer}
    targets = []
    for index, each in wanted.items():
        width = _fitted_width(each)
        origin = getattr(getattr(each, "origin_", None), "layer", None)
        if index is None and layer_module is None:
            if origin is None:
                raise ValueError("layer is None, and the steerer does not know which one it was fitted on; give layer")
            index = origin
        place, path, module = _block(model, index, layer_module)
        if origin is not None and origin != place:
            warnings.warn(
                f"the steerer was fitted on the output of block {origin} and steers block {place}, whose "
                "activations are others",
                UserWarning,
                stacklevel=4,
            )
        hidden = _hidden_size(model)
        if hidden is not None and hidden != width:
            raise ValueError(
                f"the steerer was fitted on activations of width {width}, and the model's hidden states have {hidden}"
            )
        target = _Target(path, module, each, _strength(each, strength, place))
        _warn_of_strength(each, target.T)
        targets.append(target)
    if isinstance(strength, Mapping):
        _refuse_unknown(strength, wanted)
    return targets


def _refuse_unknown(strength: Mapping[int, float], wanted: Mapping[int | None, Any]) -> None:
    unknown = sorted(set(strength) - {place for place in wanted if place is not None})
    if unknown and None not in wanted:
        raise ValueError(f"T names the blocks {unknown}, which have no steerer")


def _strength(steerer: Any, strength: Any, place: int) -> float:
    if isinstance(strength, Mapping):
        if place not in strength:
            raise ValueError(f"T names no value for block {place}; give one for each, or a single number")
        strength = strength[place]
    value = steerer.T if strength is None else strength
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"T={value!r}; it must be a finite number")
    return float(value)


def _warn_of_strength(steerer: Any, strength: float) -> None:
    with contextlib.suppress(ValueError):  # how far a row moves depends on the row, or none moves
        most = steerer.absolute_T(0.5)
        if abs(strength) > most:
            warnings.warn(
                f"T={strength:g} moves activations by more than half of their median length (T={most:.4g}), which "
                "ruins the fluency of a model",
                UserWarning,
                stacklevel=5,
            )


def _fitted_width(steerer: Any) -> int:
    width = getattr(steerer, "n_features_in_", None)
    if width is None:
        from sklearn.exceptions import NotFittedError  # type: ignore[import-untyped]  # it ships no types

        raise NotFittedError(f"this {type(steerer).__name__} is not fitted; call fit(pos, neg), or load_steerer(path)")
    return int(width)


def _hidden_size(model: nn.Module) -> int | None:
    configs = (getattr(module, "config", None) for module in model.modules())
    config: Any = next((config for config in configs if config is not None), None)
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    size = getattr(text, "hidden_size", None)
    return size if isinstance(size, int) else None


def _block(model: nn.Module, index: int | None, name: str | None) -> tuple[int, str, nn.Module]:
    """Index, dotted name and module of a decoder block."""
    names = {id(module): path for path, module in model.named_modules()}
    if name is None:
        layers = decoder_layers(model)
        if index is None or isinstance(index, bool) or index not in range(len(layers)):
            raise ValueError(
                f"layer={index!r} does not exist: {type(model).__name__} has the blocks 0 to {len(layers) - 1} "
                f"({names[id(layers[0])]} to {names[id(layers[-1])]})"
            )
        return index, names[id(layers[index])], layers[index]
    stacks = _stacks(model)
    for stack in stacks:
        for place, module in enumerate(stack):
            if names[id(module)] == name:
                if index is not None and index != place:
                    raise ValueError(f"layer={index} and layer_module={name!r} name two blocks; give one of them")
                return place, name, module
    valid = "; ".join(f"{names[id(stack[0])]} to {names[id(stack[-1])]}" for stack in stacks) or "none"
    raise ValueError(f"layer_module={name!r} is no decoder block of {type(model).__name__}; valid names: {valid}")


def _stacks(model: nn.Module) -> list[nn.ModuleList]:
    """The decoder's blocks; where they cannot be told from others, every list of modules of one kind."""
    try:
        return [decoder_layers(model)]
    except ValueError:
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module))
        return [each for each in lists if len({type(module) for module in each}) == 1]


def _decoder_of(model: nn.Module, path: str) -> tuple[nn.Module, nn.Module | None]:
    """The module that is called with the tokens, and the one around it that generates."""
    decoder = None
    parts = path.split(".")
    for length in reversed(range(len(parts))):
        module = model.get_submodule(".".join(parts[:length]))
        if decoder is None:
            forward = None if isinstance(module, nn.ModuleList) else module.forward
            names = () if forward is None else inspect.signature(forward).parameters
            decoder = module if "input_ids" in names or "inputs_embeds" in names else None
        if decoder is not None and callable(getattr(type(module), "generate", None)):
            return decoder, module
    if decoder is None:
        raise ValueError(f"no module around {path} takes input_ids or inputs_embeds; is this a language model?")
    return decoder, None
