"""The attention functions that a model runs while it is under a configuration.

One is registered beside each attention function of transformers, under a name of ours. It asks what its layer is to do
differently in the forward that runs; where that is nothing, it calls the function that it stands beside with what it
was given. Otherwise:

- modes `"key"` and `"query"` scale the states and call that function;
- mode `"exact"` goes one of four ways that compute the same (see `Path`), the fastest that the implementation offers if
  none is asked for. FlexAttention and the flash kernels of transformers return neither weights nor, in full precision,
  their log-sum-exp; there one more dimension of query and key carries the bias.
"""

import dataclasses
import functools
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Bool, Float, Int
from separata_core.attention import (
    attention_with_key_bias,
    augment_states,
    closed_form_floor,
    correct_output,
    key_bias_mask,
)
from torch import Tensor, nn

from zerotuning.operator import reweight, scale_keys, scale_queries

Path = Literal["auto", "post_softmax", "bias", "closed_form", "augmented"]
Family = Literal["sdpa", "eager", "flex", "flash"]

# Derived, so that a vendored copy beside an installed original registers under another name.
PREFIX = __name__.rpartition(".")[0].replace(".", "_")

FORWARD = f"{PREFIX}_forward"
"""The argument with which the layers learn what the hook of their decoder found."""

PATHS: dict[Family, tuple[Path, ...]] = {
    "sdpa": ("auto", "bias", "closed_form", "augmented"),
    "eager": ("auto", "post_softmax", "bias", "closed_form"),
    "flex": ("auto", "augmented"),
    "flash": ("auto", "augmented"),
}
_BACKENDS: dict[str, Literal["auto", "bias", "correction", "augmented"]] = {
    "auto": "auto",
    "bias": "bias",
    "closed_form": "correction",
    "augmented": "augmented",
}

# Name of ours: the attention that it stands for.
_ORIGINALS: dict[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Change:
    """What one layer does differently in one forward.

    Attributes:
        mode: `"exact"`, `"key"`, `"query"`, or `"weights"` where `edit` says all.
        path: The way taken for `"exact"`.
        log_gamma: `[batch, heads]`.
        at: The initial key of each row, `[batch]`, or marks `[batch, keys]` where a row has several.
        bounds: Values between which `log_gamma` lies.
        edit: What is done to materialised weights.
    """

    mode: Literal["exact", "key", "query", "weights"]
    path: Path
    log_gamma: Float[Tensor, "batch heads"]
    at: Int[Tensor, " batch"] | Bool[Tensor, "batch keys"]
    bounds: tuple[float, float]
    edit: Callable[[Tensor], Tensor] | None = None


class Source(Protocol):
    """What knows the changes of every layer of one model."""

    def change(self, index: int, forward: Any, query: Tensor, keys: int, mask: Any) -> Change | None:
        """The change of one layer in one forward; None if nothing changes."""
        ...


@dataclasses.dataclass(frozen=True)
class Slot:
    """Which layer of which source a module is."""

    source: Any
    layer: int


SLOTS: "weakref.WeakKeyDictionary[nn.Module, Slot]" = weakref.WeakKeyDictionary()


def original_of(implementation: Any) -> str:
    """The attention that a name stands for: a copy of an attached model still has the name of ours."""
    return _ORIGINALS.get(str(implementation), str(implementation))


def family_of(implementation: str) -> Family | None:
    """Which kind of attention function goes by a name, None for one that is not known.

    A flash kernel, one from the hub too, is what takes the mask that transformers makes for flash kernels.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    if implementation in ("sdpa", "eager"):
        return "sdpa" if implementation == "sdpa" else "eager"
    if implementation == "flex_attention":
        return "flex"
    if implementation in MASKS and MASKS[implementation] is MASKS["flash_attention_2"]:
        return "flash"
    return None


def register(implementation: str) -> str:
    """Register the attention function of ours that stands beside one of transformers.

    Args:
        implementation: The name of the latter.

    Returns:
        The name of ours.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = f"{PREFIX}_{implementation.replace('/', '_')}"
    family = family_of(implementation)
    interface: Any = AttentionInterface  # untyped
    plain = None if family == "eager" else interface()[implementation]
    AttentionInterface.register(name, functools.partial(_attention, family, implementation, plain))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    _ORIGINALS[name] = implementation
    return name


def use(decoder: Any, name: str) -> None:
    """Tell a decoder to use an attention function.

    Args:
        decoder: The module that holds the decoder layers.
        name: What the function is registered under.
    """
    if family_of(original_of(name)) == "flash":
        # `set_attn_implementation` takes every name with "flash" in it for a kernel that it must load, and other places
        # take the right kind of mask and cache by that word.
        decoder.config._attn_implementation = name
    else:
        decoder.set_attn_implementation(name)


def eager_of(module: nn.Module) -> Any:
    """The eager attention function that every modelling file of transformers carries for its own layers."""
    return getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)


def _attention(
    family: Family | None,
    implementation: str,
    registered: Any,
    module: nn.Module,
    query: Float[Tensor, "batch heads query dim"],
    key: Float[Tensor, "batch kv_heads key dim"],
    value: Float[Tensor, "batch kv_heads key value_dim"],
    attention_mask: Any,
    **kwargs: Any,
) -> Any:
    plain = eager_of(module) if family == "eager" else registered
    # Absent for a copy of the model, or for another one that shares the config object: those run as they are.
    slot = SLOTS.get(module)
    forward = kwargs.pop(FORWARD, None)
    change = None if slot is None else slot.source.change(slot.layer, forward, query, key.shape[2], attention_mask)
    if family == "flash":
        plain = functools.partial(_named, plain, implementation)
    if change is None:
        return plain(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("cache") is not None:
        raise _uncovered(module, "cache", "under a configuration; generate without continuous batching")
    if change.mode == "query":
        query = scale_queries(query, change.log_gamma)
        return plain(module, query, key, value, attention_mask, **kwargs)
    if change.mode == "key":
        groups = query.shape[1] // key.shape[1]
        key = scale_keys(key, change.log_gamma[:, ::groups], change.at)
        return plain(module, query, key, value, attention_mask, **kwargs)
    if family in ("sdpa", "eager") and isinstance(attention_mask, Tensor):
        # Some releases make it longer than the keys, and their own functions cut it.
        attention_mask = attention_mask[..., : key.shape[2]]
    run: Any = {"sdpa": _sdpa, "eager": _eager, "flex": _widened, "flash": _flash}[str(family)]
    return run(plain, change, module, query, key, value, attention_mask, **kwargs)


def _uncovered(module: nn.Module, name: str, instead: str) -> ValueError:
    return ValueError(f"{type(module).__name__} passes {name!r} to its attention, which is not covered {instead}")


_LOAD_EAGER = 'on this path; load the model with attn_implementation="eager"'


def _sdpa(
    plain: Any,
    change: Change,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    for name in ("softcap", "position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise _uncovered(module, name, _LOAD_EAGER)
    length, at = query.shape[2], change.at
    causal = (
        length > 1
        and attention_mask is None
        and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    )
    if causal and key.shape[2] > length:
        # Prefill into a static cache: the keys behind the prompt are still empty.
        key, value = key[:, :, :length], value[:, :, :length]
        at = at[:, :length] if at.dtype == torch.bool else at
    if dropout:
        # Dropout acts on the weights, so their total cannot be corrected afterwards: write the bias into the mask
        # instead.
        if change.path == "closed_form":
            raise ValueError(
                "path='closed_form' is not exact with dropout, which acts on the weights; use path='auto', or "
                "model.eval()"
            )
        mask = key_bias_mask(query, key, change.log_gamma, at, attention_mask=attention_mask, is_causal=causal)
        output, _ = plain(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return output, None
    corrected = attention_with_key_bias(
        query,
        key,
        value,
        change.log_gamma,
        at,
        attention_mask=attention_mask,
        is_causal=causal,
        scale=scaling,
        backend=_BACKENDS[change.path],
        bias_range=change.bounds,
    )
    return corrected.transpose(1, 2).contiguous(), None


def _eager(
    plain: Any,
    change: Change,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    if change.mode == "exact" and change.path in ("auto", "bias"):
        # transformers always builds the mask for eager attention, so causality is in it.
        mask = key_bias_mask(query, key, change.log_gamma, change.at, attention_mask=attention_mask)
        biased: tuple[Tensor, Tensor] = plain(module, query, key, value, mask, **kwargs)
        return biased
    if module.training and kwargs.get("dropout"):
        raise ValueError(
            "weights cannot be edited exactly once dropout has acted on them; call model.eval(), or use path='auto'"
        )
    output, weights = plain(module, query, key, value, attention_mask, **kwargs)
    if change.path == "closed_form":
        return _closed_form(change, output, weights, value), weights
    weights = (
        reweight(weights, change.log_gamma, change.at).to(weights.dtype)
        if change.edit is None
        else change.edit(weights)
    )
    groups = weights.shape[1] // value.shape[1]
    return (weights @ value.repeat_interleave(groups, dim=1)).transpose(1, 2).contiguous(), weights


def _closed_form(change: Change, output: Tensor, weights: Tensor, value: Tensor) -> Tensor:
    if change.at.dtype == torch.bool:
        raise ValueError(
            "path='closed_form' corrects for one initial token, and packed rows have several; use path='auto'"
        )
    rows = torch.arange(len(change.at), device=value.device)
    initial = weights[rows, :, :, change.at]
    wide = torch.promote_types(initial.dtype, torch.float32)
    corrected = correct_output(output.transpose(1, 2), initial.to(wide), value[rows, :, change.at], change.log_gamma)
    return corrected.transpose(1, 2).contiguous()


def _widened(
    plain: Any,
    change: Change,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> Any:
    if kwargs.get("softcap") is not None:
        # The cap is applied before the softmax, so it would bend the bias too.
        raise _uncovered(module, "softcap", _LOAD_EAGER)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    width = value.shape[-1]
    wide = augment_states(query, key, value, change.log_gamma, change.at, scale=scaling)
    output, *rest = plain(module, *wide, attention_mask, scaling=scaling, **kwargs)
    return (output[..., :width], *rest)


def _flash(
    plain: Any, change: Change, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> Any:
    # Layers that were left in float32 hand float32 to the flash function, which rounds the states to the type of the
    # weights; before, so that the bias is written into three of the narrow dimensions and not rounded itself.
    if query.dtype == torch.float32:
        if torch.is_autocast_enabled(query.device.type):
            narrow = torch.get_autocast_dtype(query.device.type)
        else:
            narrow = next((each.weight.dtype for each in module.modules() if isinstance(each, nn.Linear)), query.dtype)
        if narrow.is_floating_point and narrow.itemsize == 2:
            query, key, value = (states.to(narrow) for states in (query, key, value))
    return _widened(plain, change, module, query, key, value, mask, **kwargs)


class _Renamed:
    """An object with some attributes replaced: what a flash function of transformers reads its kernel's name from."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _named(
    plain: Any,
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    config = _Renamed(module.config, _attn_implementation=implementation)
    return plain(_Renamed(module, config=config), query, key, value, attention_mask, **kwargs)


def check_path(path: str, mode: str, implementation: str) -> None:
    """Refuse a way that an attention implementation does not offer.

    Args:
        path: One of `Path`.
        mode: The mode of the configuration.
        implementation: The name of the model's attention implementation.

    Raises:
        ValueError: The path is unknown, not offered there, or asked for in another mode than `"exact"`.
    """
    if path not in PATHS["sdpa"] + PATHS["eager"]:
        raise ValueError(
            f"path={path!r} is unknown; it must be 'auto', 'post_softmax', 'bias', 'closed_form' or 'augmented'"
        )
    if mode != "exact" and path != "auto":
        raise ValueError(f"path={path!r} is a way of mode='exact'; mode={mode!r} has only path='auto'")
    family = family_of(implementation)
    if family is not None and path not in PATHS[family]:
        where = [name for name, paths in PATHS.items() if path in paths]
        loaded = {"sdpa": "sdpa", "eager": "eager", "flex": "flex_attention", "flash": "flash_attention_2"}
        options = " or ".join(f'attn_implementation="{loaded[name]}"' for name in where)
        raise ValueError(
            f"path={path!r} is not offered with attn_implementation={implementation!r} (there: "
            f"{', '.join(map(repr, PATHS[family]))}); load the model with {options}"
        )


def check_floor(log_gamma: Float[Tensor, "rows layers heads"], dtype: torch.dtype) -> None:
    """Refuse factors for which the closed form would lose digits.

    Args:
        log_gamma: Natural logarithms of the factors.
        dtype: The type that the model computes its attention in.

    Raises:
        ValueError: One lies below `separata_core.attention.closed_form_floor`; layer and head are named.
    """
    floor = closed_form_floor(dtype)
    # The floor itself passes, also where it was rounded.
    below = (log_gamma < floor * (1 + 2**-8)).nonzero()
    if len(below):
        row, layer, head = below[0].tolist()
        raise ValueError(
            f"path='closed_form' loses too many digits in {dtype} for a gamma below {math.exp(floor):.4g}, and that of "
            f"layer {layer}, head {head} is {log_gamma[row, layer, head].exp():.4g}; use path='auto', which goes "
            "another way there"
        )
