"""The way into a transformers decoder: layers, attention modules, head counts, output projection, hidden states.

Everything is found by role and shape, so that wrappers (adapters, multimodal models) need no case of their own: decoder
layers are the `ModuleList` whose entries hold causal self-attention with a place in the key-value cache.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

__all__ = [
    "HeadCounts",
    "attention_modules",
    "capture_hidden_states",
    "decoder_layers",
    "edit_hidden_states",
    "final_norm",
    "head_counts",
    "logit_scaling",
    "output_projection",
]

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_HEAD_DIM = ("head_dim", "head_size", "attention_head_size", "qk_head_dim")


@dataclass(frozen=True)
class HeadCounts:
    """Sizes of a decoder's attention.

    Attributes:
        layers: Layers that hold causal self-attention.
        query_heads: Query heads per layer.
        kv_heads: Key-value heads per layer; divides `query_heads`.
        head_dim: Width of one query and key head.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal language model, in order.

    Args:
        model: A transformers model, with or without its head, or anything that wraps one.

    Returns:
        The model's own `ModuleList`.

    Raises:
        ValueError: The model is an encoder, an encoder-decoder, no transformer at all, or holds several decoders.
    """
    return _find_decoder(model)[1]


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The causal self-attention module of every decoder layer that has one, in order.

    In hybrid models, where some layers mix tokens in another way, the list is shorter than `decoder_layers`.

    Args:
        model: As for `decoder_layers`.

    Returns:
        One module per layer with attention.

    Raises:
        ValueError: As `decoder_layers`.
    """
    layers = decoder_layers(model)
    strict = _strict(model)
    found = ([m for m in layer.modules() if _is_attention(m, strict=strict) and _is_causal(m)] for layer in layers)
    return [modules[0] for modules in found if modules]


def head_counts(model: nn.Module) -> HeadCounts:
    """Number and width of the attention heads.

    Args:
        model: As for `decoder_layers`.

    Returns:
        The counts, which must be the same in every layer.

    Raises:
        ValueError: As `decoder_layers`; or the layers differ; or the counts cannot be told.
    """
    modules = attention_modules(model)
    counts = [_module_counts(module, model) for module in modules]
    if len(set(counts)) > 1:
        odd = next(place for place, have in enumerate(counts) if have != counts[0])
        raise ValueError(
            f"attention {odd} has (query heads, key-value heads, head_dim) {counts[odd]} and the first one "
            f"{counts[0]}; models whose layers differ have no common head counts"
        )
    return HeadCounts(len(modules), *counts[0])


def output_projection(
    model: nn.Module,
) -> tuple[Float[Tensor, "vocab hidden"], Float[Tensor, "vocab"] | None]:
    """Weight and bias of the layer that turns final hidden states into logits.

    Args:
        model: A causal language model with its head, or anything that wraps one.

    Returns:
        The parameters themselves, not copies, and None for a head without bias. Some models also scale or cap the
        logits: see `logit_scaling`.

    Raises:
        ValueError: There is no head, or it is quantised or carries an unmerged adapter.
    """
    head = _output_head(model)
    if head is None:
        raise ValueError(
            f"{type(model).__name__} has no output projection; pass the causal language model, not its base model"
        )
    weight = getattr(head, "weight", None)
    if hasattr(head, "base_layer") or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ValueError(
            f"the output projection is a {type(head).__name__}, not a plain linear layer; merge the adapter (PEFT: "
            "merge_and_unload) or load the head unquantised"
        )
    features = getattr(head, "out_features", weight.shape[0])
    if not weight.is_floating_point() or weight.shape[0] != features:
        raise ValueError(
            f"the output projection holds {weight.dtype} of shape {tuple(weight.shape)} for {features} outputs; load "
            "the head unquantised"
        )
    bias = getattr(head, "bias", None)
    return weight, bias


def logit_scaling(model: nn.Module) -> tuple[float, float | None]:
    """What the model does to `hidden @ weight.T + bias` before it calls it logits: `cap * tanh(scale * x / cap)`.

    Args:
        model: A causal language model whose configuration uses the common names (`final_logit_softcapping`,
            `logit_scale`, `logits_scaling`).

    Returns:
        The factor (1.0 if there is none) and the cap (None if there is none).
    """
    config = _text_config(model)
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return scale, None if cap is None else float(cap)


def final_norm(model: nn.Module) -> nn.Module | None:
    """The normalisation between the last decoder layer and the output projection.

    Args:
        model: As for `decoder_layers`.

    Returns:
        The module, or None for a model without one.

    Raises:
        ValueError: As `decoder_layers`.
    """
    parent, layers = _find_decoder(model)
    before, after, seen = None, None, False
    for child in parent.children():
        if child is layers:
            seen = True
        elif _is_norm(child):
            before, after = (before, child) if seen else (child, after)
    return after if after is not None else before


@contextlib.contextmanager
def capture_hidden_states(
    model: nn.Module, layers: Iterable[int] | None = None, *, detach: bool = True
) -> Iterator[dict[int, list[Tensor]]]:
    """Record the output of decoder layers while the context is open.

    Args:
        model: As for `decoder_layers`.
        layers: Which layers, counted from 0; all by default.
        detach: Cut the records off from the graph. Turn off to differentiate through them.

    Yields:
        For each layer, one tensor [batch, tokens, hidden] per forward call, in order; filled as the model runs, from
        whatever thread. The tensors are the model's own, not copies. The hooks are removed when the context is left,
        however that happens.

    Raises:
        ValueError: As `decoder_layers`, or a layer that does not exist, or a compiled model, whose code would pass over
            the hooks.
    """
    modules = _layers_to_hook(model)
    wanted = _check_layers(range(len(modules)) if layers is None else layers, len(modules))
    records: dict[int, list[Tensor]] = {layer: [] for layer in wanted}

    def recorder(layer: int) -> Callable[[Tensor], None]:
        def record(states: Tensor) -> None:
            records[layer].append(states.detach() if detach else states)

        return record

    with _hooked(modules, {layer: recorder(layer) for layer in wanted}):
        yield records


@contextlib.contextmanager
def edit_hidden_states(model: nn.Module, edits: Mapping[int, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Replace the output of decoder layers while the context is open.

    Contexts nest: the one opened first acts first, and captures opened later see its result.

    Args:
        model: As for `decoder_layers`.
        edits: For each layer, counted from 0, a function from its output [batch, tokens, hidden] to what stands in its
            place, of the same shape, dtype and device. It must not write into its argument.

    Yields:
        Nothing. The hooks are removed when the context is left, however that happens.

    Raises:
        ValueError: As `capture_hidden_states`; during the model's forward, an edit that returns something of another
            shape, dtype or device.
    """
    modules = _layers_to_hook(model)
    _check_layers(edits, len(modules))

    def editor(layer: int, edit: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def apply(states: Tensor) -> Tensor:
            new = edit(states)
            if _describe(new) != _describe(states):
                raise ValueError(
                    f"the edit of layer {layer} returned {_describe(new)}; it must return {_describe(states)}, like "
                    "what it was given"
                )
            return new

        return apply

    with _hooked(modules, {layer: editor(layer, edit) for layer, edit in edits.items()}):
        yield


def _layers_to_hook(model: nn.Module) -> nn.ModuleList:
    layers = decoder_layers(model)
    for path, module in model.named_modules():
        # Compiled code that has run once does not look for hooks again: they would be passed over without a word.
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{path or type(model).__name__} is compiled, and compiled code passes over hooks; use the model as it "
                "was before torch.compile"
            )
    return layers


@contextlib.contextmanager
def _hooked(modules: nn.ModuleList, actions: Mapping[int, Callable[[Tensor], Tensor | None]]) -> Iterator[None]:
    def hook_for(action: Callable[[Tensor], Tensor | None]) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            # Layers return their states alone, or first in a tuple with weights or a cache.
            if isinstance(output, tuple):
                new = action(output[0])
                return None if new is None else (new, *output[1:])
            return action(output)

        return hook

    with contextlib.ExitStack() as stack:
        for layer, action in actions.items():
            stack.callback(modules[layer].register_forward_hook(hook_for(action)).remove)
        yield


def _describe(states: object) -> str:
    if not isinstance(states, Tensor):
        return f"a {type(states).__name__}"
    return f"{tuple(states.shape)} {states.dtype} {states.device}"


def _check_layers(layers: Iterable[int], count: int) -> list[int]:
    wanted = list(layers)
    for layer in wanted:
        if layer not in range(count):
            raise ValueError(f"layer is {layer!r}; it must be an int in [0, {count})")
    return wanted


def _find_decoder(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The decoder layers and the module that owns them."""
    if getattr(_config(model), "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; only decoder-only models are supported")
    strict = _strict(model)
    stacks: dict[str, tuple[nn.Module, nn.ModuleList]] = {}
    others = False
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            if not isinstance(child, nn.ModuleList):
                continue
            kinds = {_is_causal(m) for m in child.modules() if _is_attention(m, strict=strict)}
            inside = any(f"{path}.{name}".startswith(f"{outer}.") for outer in stacks)
            if True in kinds and not inside:
                stacks[f"{path}.{name}".lstrip(".")] = (parent, child)
            others = others or False in kinds
    if not stacks:
        reason = "its attention is not causal (an encoder?)" if others else "it holds no attention layers"
        raise ValueError(f"no decoder layers in {type(model).__name__}: {reason}; only causal decoders are supported")
    if len(stacks) > 1:
        raise ValueError(
            f"{type(model).__name__} holds several decoders, at {', '.join(sorted(stacks))}; pass the one you mean, "
            "from model.get_submodule(...)"
        )
    return next(iter(stacks.values()))


def _strict(model: nn.Module) -> bool:
    """Whether the model marks its attention by `is_causal`, as newer code does; only where none does, shapes decide."""
    return any(_is_attention(module, strict=True) for module in model.modules())


def _is_attention(module: nn.Module, *, strict: bool) -> bool:
    # What keeps keys and values has a layer index to find them by in the cache; a vision tower's attention has none.
    if not hasattr(module, "layer_idx") or not any(True for _ in module.parameters()):
        return False
    if strict:
        return isinstance(getattr(module, "is_causal", None), bool)
    if any(isinstance(child, nn.Conv1d) for child in module.children()):
        return False  # a state-space mixer: it has heads and a place in the cache too, but runs a convolution
    return any(_is_projection(child) for child in module.children()) and any(
        isinstance(getattr(module, name, None), int) for name in _HEADS
    )


def _is_projection(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2


def _is_causal(module: nn.Module) -> bool:
    flag = getattr(module, "is_causal", None)
    return bool(getattr(module, "is_decoder", True) if flag is None else flag)


def _is_norm(module: nn.Module) -> bool:
    """A module whose only parameters are vectors: gain, and perhaps offset."""
    parameters = list(module.parameters())
    return bool(parameters) and all(p.dim() == 1 for p in parameters) and not any(True for _ in module.children())


def _module_counts(module: nn.Module, model: nn.Module) -> tuple[int, int, int]:
    sources = [module, getattr(module, "config", None), _text_config(model)]
    heads = _first_int(sources, _HEADS)
    if heads is None:
        raise ValueError(f"{type(module).__name__} does not tell how many query heads it has")
    groups = _first_int([module], ("num_key_value_groups",))
    kv_heads = _first_int(sources[:1], _KV_HEADS) or (heads // groups if groups else None)
    if kv_heads is None:
        kv_heads = 1 if getattr(module, "multi_query", False) else _first_int(sources[1:], _KV_HEADS) or heads
    head_dim = _first_int(sources[:1], _HEAD_DIM) or _first_int(sources[1:], _HEAD_DIM)
    if head_dim is None:
        hidden = _first_int(sources, ("hidden_size", "n_embd", "d_model"))
        if hidden is None:
            raise ValueError(f"{type(module).__name__} does not tell how wide its heads are")
        head_dim = hidden // heads
    if heads % kv_heads:
        raise ValueError(f"{type(module).__name__} has {heads} query heads over {kv_heads} key-value heads")
    return heads, kv_heads, head_dim


def _first_int(sources: Iterable[object], names: Iterable[str]) -> int | None:
    names = tuple(names)
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _config(model: nn.Module) -> Any:
    """The configuration of the model or, in a wrapper that has none, of the first module inside that has one."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((config for config in configs if config is not None), None)


def _text_config(model: nn.Module) -> Any:
    """The configuration of the language model, inside of a multimodal one too; None without any."""
    config = _config(model)
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else config


def _output_head(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    if callable(getter):
        head = getter()
        if isinstance(head, nn.Module):
            return _active(head)
    for name in ("lm_head", "embed_out", "output"):
        for path, module in model.named_modules():
            if path.rpartition(".")[2] == name:
                return _active(module)
    return None


def _active(head: nn.Module) -> nn.Module:
    """The module that runs where an adapter library keeps a trained copy beside the original."""
    copies = getattr(head, "modules_to_save", None)
    name = getattr(head, "active_adapter", None)
    if isinstance(copies, nn.ModuleDict) and isinstance(name, str) and name in copies:
        return copies[name]
    return head
