"""Running some of a decoder's layers only.

Layers below the first one that a configuration touches compute the same under all configurations. Their result is kept
and put in where it is needed, whatever the modelling file does around the layers: for the length of a `with` block a
layer that is not to run hands on its input, and the last of those below hands on the kept states. Until then no other
thread may run the model.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtyping import Float, Int
from separata_core.models import attention_modules, decoder_layers
from torch import Tensor, nn

Form = Callable[[Tensor], Any]
"""Puts hidden states into the form in which a layer returns them."""


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that owns the decoder layers: embeddings, layers and final norm, without the head.

    Args:
        model: A decoder-only transformers model.

    Returns:
        The module itself.
    """
    layers = decoder_layers(model)
    return next(module for module in model.modules() if any(child is layers for child in module.children()))


def attention_layers(model: nn.Module) -> list[int]:
    """The decoder layer of each attention module; in hybrid models some layers have none.

    Args:
        model: A decoder-only transformers model.

    Returns:
        Indices into the decoder layers, ascending.
    """
    modules = attention_modules(model)
    layers = [set(layer.modules()) for layer in decoder_layers(model)]
    return [next(index for index, inside in enumerate(layers) if module in inside) for module in modules]


def output_forms(layers: Sequence[nn.Module], run: Callable[[], object]) -> list[Form] | None:
    """Learn in what form each decoder layer returns its hidden states: alone, or first in a tuple.

    Args:
        layers: All decoder layers.
        run: Runs them once, on anything.

    Returns:
        One form for each layer; None if a layer returns more than hidden states, so that it cannot be left out.
    """
    forms: dict[int, Form | None] = {}

    def watch(index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                forms[index] = _alone
            elif isinstance(output, tuple) and all(each is None for each in output[1:]):
                forms[index] = _first_of(len(output))

        return hook

    with contextlib.ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_hook(watch(index)).remove)
        run()
    known = [forms.get(index) for index in range(len(layers))]
    found = [form for form in known if form is not None]
    return found if len(found) == len(layers) else None


def _alone(states: Tensor) -> Tensor:
    return states


def _first_of(length: int) -> Form:
    def form(states: Tensor) -> tuple[Tensor | None, ...]:
        return (states, *[None] * (length - 1))

    return form


@contextlib.contextmanager
def only_layers(
    layers: Sequence[nn.Module],
    forms: Sequence[Form],
    first: int,
    end: int,
    states: Float[Tensor, "rows tokens hidden"] | None = None,
) -> Iterator[list[Tensor]]:
    """Let the layers `first` to `end - 1` run and no others, for the length of a `with` block.

    Args:
        layers: All decoder layers.
        forms: See `output_forms`.
        first: The first layer to run.
        end: The first one above that is not to run; the number of layers to run all above.
        states: Input of layer `first` in place of what comes from below; None to take that.

    Yields:
        A list that receives the input of layer `end`, if there is one, at each forward.
    """
    found: list[Tensor] = []

    def instead(index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            if index == end:
                found.append(hidden)
            return forms[index](states if states is not None and index == first - 1 else hidden)

        return forward

    with contextlib.ExitStack() as stack:
        for index, layer in enumerate(layers):
            if not first <= index < end:
                stack.callback(_restore, layer, layer.__dict__.get("forward"))
                layer.forward = instead(index)
        yield found


def last_feed_forward(model: nn.Module) -> nn.Module | None:
    """What the last decoder layer has besides attention and norms; it should look at each position by itself.

    Args:
        model: A decoder-only transformers model.

    Returns:
        The one child that holds projections and no attention; None if there is no such child, or more than one.
    """
    attention = set(attention_modules(model))
    found = [
        child
        for child in decoder_layers(model)[-1].children()
        if not attention & set(child.modules()) and any(each.ndim > 1 for each in child.parameters())
    ]
    return found[0] if len(found) == 1 else None


@contextlib.contextmanager
def at_places(module: nn.Module, index: Int[Tensor, "rows places 1"], tokens: int) -> Iterator[None]:
    """Let a module that looks at each position by itself work at some only, for the length of a `with` block.

    Args:
        module: See `last_feed_forward`.
        index: The positions of each row.
        tokens: Number of positions; states of another shape are not narrowed.

    Yields:
        Nothing. At all other positions the module gives 0.
    """
    whole = module.forward

    def forward(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or hidden.ndim != 3 or hidden.shape[:2] != (len(index), tokens):
            return whole(hidden, *args, **kwargs)
        at = index.to(hidden.device).expand(-1, -1, hidden.shape[-1])
        output = whole(hidden.gather(1, at))
        narrow = output[0] if isinstance(output, tuple) else output
        wide = narrow.new_zeros(hidden.shape).scatter(1, at, narrow)
        return (wide, *output[1:]) if isinstance(output, tuple) else wide

    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        _restore(module, own)


def _restore(layer: nn.Module, forward: Any) -> None:
    # Libraries that move weights about put a forward of their own on the instance too.
    if forward is None:
        del layer.forward
    else:
        layer.forward = forward
