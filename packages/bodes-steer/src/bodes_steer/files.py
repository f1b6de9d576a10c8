"""Fitted steerers in files: tensors in safetensors, everything else as one JSON entry of its metadata."""

import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from separata_kit.files import digest, versions, write_atomically
from torch import Tensor, nn

from bodes_steer.steerers import STEERERS, Steerer, make_steerer

SCHEMA = "bodes-steer/steerer"
SCHEMA_VERSION = 1

# One entry, because safetensors writes several of them in an order that changes from run to run.
_ENTRY = "bodes_steer"

_VERSIONS_OF = ("bodes-steer", "torch", "transformers", "scikit-learn")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the activations came from that a steerer was fitted on.

    Attributes:
        model_name: Name of the model or of its folder; for people, never compared.
        model_type: The architecture, such as `"llama"` (`config.model_type` in transformers).
        hidden_size: Width d of its hidden states.
        num_layers: Number of its decoder blocks.
        layer: Index, from 0, of the block whose output the activations are; None where it was not said.
        versions: Versions of the libraries that wrote the file.
    """

    model_name: str = ""
    model_type: str = ""
    hidden_size: int | None = None
    num_layers: int | None = None
    layer: int | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, layer: int | None = None) -> "Origin":
        """Describe a model.

        Args:
            model: A transformers model (also inside a wrapper), a description of one as an `Origin` or a mapping of
                its fields, or None.
            layer: Index of the decoder block, from 0; by default that of a given description.

        Returns:
            The description, with the versions of the libraries in use.

        Raises:
            ValueError: The model has no such layer, or is no decoder.
            TypeError: `model` is none of these.
        """
        if isinstance(model, nn.Module):
            origin = _describe(model)
        elif isinstance(model, Origin):
            origin = model
        elif isinstance(model, Mapping):
            names = {each.name for each in dataclasses.fields(cls)}
            origin = cls(**{name: value for name, value in model.items() if name in names})
        elif model is None:
            origin = cls()
        else:
            raise TypeError(f"model is a {type(model).__name__}; give a transformers model, an Origin or a mapping")
        layer = origin.layer if layer is None else layer
        if layer is not None:
            if isinstance(layer, bool) or layer < 0:
                raise ValueError(f"layer={layer!r}; it must be the index of a decoder block, from 0")
            if origin.num_layers is not None and layer >= origin.num_layers:
                raise ValueError(f"layer={layer} does not exist; the model has the layers 0 to {origin.num_layers - 1}")
        return dataclasses.replace(origin, layer=layer, versions=versions(*_VERSIONS_OF))


def _describe(model: nn.Module) -> Origin:
    from separata_core.models import decoder_layers

    layers = len(decoder_layers(model))
    configs = (getattr(module, "config", None) for module in model.modules())
    config: Any = next((each for each in configs if each is not None), None)
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    name = str(getattr(config, "_name_or_path", "") or "")
    # Of a folder only its own name: where it lay is of no use to others.
    name = Path(name).name if Path(name).is_dir() else name
    size = getattr(text, "hidden_size", None)
    return Origin(name, str(getattr(config, "model_type", "") or ""), None if size is None else int(size), layers)


def save_steerer(
    steerer: Steerer, path: str | os.PathLike[str], *, model: Any = None, layer: int | None = None
) -> None:
    """Write a fitted steerer to a file, whole or not at all.

    The same steerer gives the same bytes. What a steerer derived on its first use and would take long to derive again
    (the eigenvectors of its quadratic form) is stored too.

    Args:
        steerer: The steerer.
        path: The file, replaced if it exists.
        model: The model it was fitted on, or its description (`Activations.model`, an `Origin`), against which
            `load_steerer` then checks; by default what the steerer knows already.
        layer: Index, from 0, of the decoder block whose output it was fitted on; likewise.

    Raises:
        ValueError: It is not fitted, its width is not that of the model, the layer does not exist, or a parameter
            is a value that JSON cannot hold.
        OSError: The file cannot be written.
    """
    path = Path(path)
    known = getattr(steerer, "origin_", None)
    origin = Origin.of(known if model is None else model, layer if layer is not None or known is None else known.layer)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in steerer.state().items()}
    if origin.hidden_size not in (None, steerer.n_features_in_):
        raise ValueError(
            f"the steerer was fitted on activations of width {steerer.n_features_in_}, but the model has "
            f"hidden_size {origin.hidden_size}"
        )
    body = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "method": steerer.method,
        "params": _plain_params(steerer),
        "origin": dataclasses.asdict(origin),
        "tensors": _tensor_digest(state),
    }
    try:
        text = json.dumps({**body, "sha256": digest(body)}, sort_keys=True, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"a parameter of {steerer!r} is not finite: {error}") from None
    from safetensors.torch import save

    # Tensors that share memory are refused there.
    data = save({name: tensor.clone() for name, tensor in state.items()}, metadata={_ENTRY: text})
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def load_steerer(path: str | os.PathLike[str], *, model: Any = None, force: bool = False) -> Steerer:
    """Read a steerer back, as it was saved to the bit.

    Args:
        path: The file.
        model: The model it is to steer, or its description; checked against what the file says about the one it was
            fitted on.
        force: Take it also for another type or depth of model. A width that differs is refused all the same, since
            nothing could be computed.

    Returns:
        The steerer, with what is known about its origin in `origin_`.

    Raises:
        ValueError: The file is damaged, altered, newer than this package or of another kind, or it does not fit the
            model.
        OSError: The file cannot be read.
    """
    path = Path(path)
    data = path.read_bytes()
    body = _body(path, data)
    found = body.get("version")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"{path} has no valid 'version' (found {found!r})")
    if found > SCHEMA_VERSION:
        raise ValueError(
            f"{path} has version {found}; this bodes-steer reads up to version {SCHEMA_VERSION}: install a newer one"
        )
    if body.pop("sha256", None) != digest(body):
        raise ValueError(f"{path} was altered after it was written: its entry does not match its 'sha256'")
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        state = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no complete safetensors file: {error}") from None
    if _tensor_digest(state) != body.get("tensors"):
        raise ValueError(f"{path} was altered after it was written: its tensors do not match their digest")
    method = body.get("method")
    if not isinstance(method, str) or method not in STEERERS:
        raise ValueError(
            f"{path} holds a steerer of the method {method!r}, which this bodes-steer does not have; it has "
            f"{', '.join(sorted(STEERERS))}"
        )
    try:
        steerer = make_steerer(method, **body["params"]).restore(state)
        steerer.origin_ = Origin(**body["origin"])
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ValueError(f"{path} is no valid steerer: {error}") from None
    if model is not None:
        check_model(steerer, model, what=str(path), force=force)
    return steerer


def check_model(steerer: Steerer, model: Any, *, what: str = "the steerer", force: bool = False) -> None:
    """Refuse a model that a steerer was not fitted for.

    Args:
        steerer: The steerer.
        model: A model or its description, as for `Origin.of`.
        what: What the steerer is called in the message.
        force: Check the width only.

    Raises:
        ValueError: Width, type or number of layers differ.
    """
    here = Origin.of(model)
    if here.hidden_size not in (None, steerer.n_features_in_):
        raise ValueError(
            f"{what} was fitted on activations of width {steerer.n_features_in_}, and the model has hidden_size "
            f"{here.hidden_size}"
        )
    there: Origin | None = getattr(steerer, "origin_", None)
    if there is None or force:
        return
    for name, title in (("model_type", "type"), ("num_layers", "number of layers")):
        fitted, given = getattr(there, name), getattr(here, name)
        if fitted and given and fitted != given:
            raise ValueError(
                f"{what} was fitted on a model of {title} {fitted!r}, and the model has {given!r}; activations mean "
                "something else there (force=True takes it all the same)"
            )


def _plain_params(steerer: Steerer) -> dict[str, Any]:
    """The constructor's parameters, as JSON; a generator of random numbers is forgotten, as all it drew is stored."""
    params: dict[str, Any] = {}
    for name, value in steerer.get_params(deep=False).items():
        value = value.item() if hasattr(value, "item") else value
        if name == "random_state" and not isinstance(value, int):
            params[name] = None
            continue
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise ValueError(f"the parameter {name}={value!r} cannot be stored; it must be a number, a string or None")
        params[name] = value
    return params


def _body(path: Path, data: bytes) -> dict[str, Any]:
    """Our entry in the header of a safetensors file."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        if length > len(data) - 8:
            raise ValueError("the header is cut off")  # noqa: TRY301  # one place words all of these
        header = json.loads(data[8 : 8 + length])
        body = json.loads(header["__metadata__"][_ENTRY])
        if body["schema"] != SCHEMA:
            raise ValueError(f"its schema is {body['schema']!r}")  # noqa: TRY301  # one place words all of these
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise ValueError(
            f"{path} is no file of a steerer, or it was cut off: {type(error).__name__}: {str(error)[:200]}"
        ) from None
    return dict(body)


def _tensor_digest(state: Mapping[str, Tensor]) -> str:
    made = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        made.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()
