"""Language models of transformers, by the name of a folder or of a repository on the model hub."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

DTYPES = ("float32", "bfloat16", "float16")
"""Types that weights may be loaded in."""


def load_language_model(place: str, *, dtype: str | None = None, device: str | None = None) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, ready for inference.

    No code of the repository is run.

    Args:
        place: Folder, or name on the model hub.
        dtype: Type of the weights, of `DTYPES`; `default_dtype()` if not given.
        device: Where it is to be; `default_device()` if not given.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Raises:
        ValueError: `dtype` is another one, there is no such folder, it cannot be loaded, or its files lack weights.
        ImportError: torch or transformers is not installed.
    """
    dtype = dtype or default_dtype()
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is none of {', '.join(DTYPES)}")
    check_place("model", place)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        both: Any = AutoModelForCausalLM.from_pretrained(
            place, dtype=getattr(torch, dtype), trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # files can be broken in more ways than their readers have errors for
        raise ValueError(f"model={place!r} cannot be loaded: {error}") from None
    model, loading = both
    # transformers fills them with random numbers and only warns.
    if missing := sorted(loading["missing_keys"]):
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ValueError(f"model={place!r} cannot be loaded: its files lack the weights {shown}")
    return model.to(device or default_device()).eval(), tokenizer


def check_place(argument: str, place: str) -> None:
    """Refuse a path without a folder, which transformers would look for on the model hub.

    Args:
        argument: What the path was given as, for the message.
        place: Folder, or name on the model hub: only a plain name, with or without its owner, is one.

    Raises:
        ValueError: It looks like a path, and there is no such folder.
    """
    path = Path(place)
    if not place or (not path.is_dir() and (path.exists() or place[:1] in "/.~" or place.count("/") > 1)):
        raise ValueError(f"{argument}={place!r}: there is no such folder")


def default_device() -> str:
    """Where a model runs unless told otherwise.

    Returns:
        `"cuda"` where there is a GPU, or else `"cpu"`.
    """
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype() -> str:
    """The type of weights with which models run fastest here.

    Returns:
        `"bfloat16"` on a GPU or a CPU that multiplies it natively, or else `"float32"`.
    """
    return "bfloat16" if default_device() == "cuda" or has_fast_bfloat16() else "float32"


def has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 natively; without that it is slower than float32.

    Returns:
        True if so; False also where torch does not tell.
    """
    import torch

    # Not in every torch that is supported.
    read = getattr(torch.cpu, "get_capabilities", dict)
    capabilities: Mapping[str, Any] = read()
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "sve_bf16"))


def weights_digest(model: "nn.Module") -> str:
    """A digest of a few values of every weight: enough to tell models, checkpoints and types apart.

    Args:
        model: The model. Of weights that are offloaded the shape has to do.

    Returns:
        64 hexadecimal digits.
    """
    made = hashlib.sha256()
    for name, parameter in model.named_parameters():
        # Those spread over processes are put together, one at a time.
        whole: Any = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        values = None if whole.is_meta else whole.flatten()[:8].float().tolist()
        made.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {values}\n".encode())
    return made.hexdigest()
