"""Constant directions as a control vector for llama.cpp; needs the extra `gguf`.

The file is laid out as repeng writes it: `general.architecture` is `controlvector`, `controlvector.model_hint` names
the kind of model, `controlvector.layer_count` the number of directions, and `direction.<k>` is a float32 vector.

llama.cpp adds `direction.<k>` to the residual stream after its layer k, counted from 0: that is the output of the
transformers model's block k (`model.layers[k]`), so layer numbers are the same here and there. It knows no
`direction.0`, so block 0 cannot be steered by such a file. It adds the vector at every position, those of the prompt
too, where `steer(...)` begins at the last token of the prompt: the same as `positions="all"`.
"""

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from separata_kit.files import check_writable, write_atomically

if TYPE_CHECKING:
    from bodes_steer.steerers import Steerer

ARCHITECTURE = "controlvector"


def export_gguf(
    steerer: "Steerer | Mapping[int, Steerer]",
    path: "str | os.PathLike[str]",
    *,
    layer: int | None = None,
    T: float | None = None,  # noqa: N803  # the paper's name
    model_hint: str | None = None,
) -> dict[int, float]:
    """Write a llama.cpp control vector.

    The strength is in the vectors; llama.cpp's `--control-vector-scaled FILE SCALE` multiplies it once more.

    Args:
        steerer: A fitted steerer whose step is the same vector everywhere, or several by layer.
        path: The file, `.gguf`.
        layer: The block whose output it is for, counted from 0; the one it was fitted on if not given.
        T: Strength; each steerer's own if not given.
        model_hint: Kind of model, such as `"llama"`; that of the model it was fitted on if not given.

    Returns:
        The length of the direction of each layer.

    Raises:
        ValueError: A steerer whose step depends on where it starts, no layer, layer 0 or one that its model does not
            have, or directions of different lengths or kinds of model.
        ImportError: The extra `gguf` is not installed.
        OSError: The file cannot be written.
    """
    if isinstance(steerer, Mapping):
        if layer is not None:
            raise ValueError(f"layer={layer} is for one steerer; several come with their layers")
        by_layer = dict(steerer)
    else:
        origin: Any = getattr(steerer, "origin_", None)
        layer = layer if layer is not None or origin is None else origin.layer
        if layer is None:
            raise ValueError("the steerer does not say on which layer it was fitted; give layer")
        by_layer = {layer: steerer}
    if not by_layer:
        raise ValueError("there is no steerer to export")
    directions = {each: _direction(by_layer[each], each, T) for each in sorted(by_layer)}
    if len({len(each) for each in directions.values()}) > 1:
        raise ValueError(f"the directions differ in length: { {k: len(v) for k, v in directions.items()} }")
    hints = {getattr(getattr(each, "origin_", None), "model_type", None) for each in by_layer.values()} - {None, ""}
    if len(hints) > 1:
        raise ValueError(f"the steerers were fitted on models of different types: {', '.join(sorted(map(str, hints)))}")
    if model_hint is None:
        model_hint = str(hints.pop()) if hints else "unknown"
    check_writable(path)
    gguf = _gguf()

    def write(temporary: Any) -> None:
        writer = gguf.GGUFWriter(temporary, ARCHITECTURE)
        writer.add_string(f"{ARCHITECTURE}.model_hint", model_hint)
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(directions))
        for number, direction in directions.items():
            writer.add_tensor(f"direction.{number}", direction)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write_atomically(path, write)
    return {number: float((direction**2).sum() ** 0.5) for number, direction in directions.items()}


def _direction(steerer: "Steerer", layer: int, T: float | None) -> Any:  # noqa: N803  # the paper's name
    if layer < 1:
        raise ValueError(f"layer={layer!r}: llama.cpp steers the outputs of blocks from 1 on, counted from 0")
    origin: Any = getattr(steerer, "origin_", None)
    blocks, fitted = getattr(origin, "num_layers", None), getattr(origin, "layer", None)
    if blocks is not None and layer >= blocks:
        raise ValueError(f"layer={layer} does not exist; the model has the blocks 0 to {blocks - 1}")
    if fitted not in (None, layer):
        warnings.warn(
            f"the steerer was fitted on the output of block {fitted} and is exported for block {layer}, whose "
            "activations are others",
            stacklevel=3,
        )
    vector = steerer.constant_vector
    if vector is None:
        raise ValueError(
            f"{type(steerer).__name__} is not one vector: its step depends on where it starts, and llama.cpp adds the "
            "same vector everywhere; export a constant method such as CAA, RepE, ITI or LinearODE"
        )
    strength = float(steerer.T if T is None else T)
    direction = (strength * vector.detach().cpu().double()).float()
    if not bool(direction.isfinite().all()):
        raise ValueError(f"T={strength}: the direction of layer {layer} is not finite in float32")
    return direction.numpy()


def _gguf() -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise ImportError("GGUF files need the extra 'gguf': pip install 'bodes-steer[gguf]'") from None
    return gguf
