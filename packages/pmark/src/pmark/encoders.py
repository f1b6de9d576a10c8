"""Sentence encoders: text to unit vectors, whatever library they come from.

Only the direction of an embedding matters to the watermark, so every encoder's rows are scaled to length one here, and
checked: a NaN that went further would silently count as evidence.
"""

import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, cast

import numpy as np
from jaxtyping import Float64

_PROBE = "The quick brown fox jumps over the lazy dog."


class TextEncoder:
    """Encodes texts into unit vectors, each text once.

    Attributes:
        name: Of the encoder; it goes into traces and nulls.
        dimension: Of the embeddings; None until the first one.
    """

    def __init__(self, encode: Callable[[list[str]], Any], name: str, *, cache_size: int = 16384) -> None:
        """Takes a function; `as_encoder` is the usual way.

        Args:
            encode: Called with texts; returns an array of [texts, dimension].
            name: What to call it.
            cache_size: How many embeddings are kept, the latest used.

        Raises:
            ValueError: `cache_size` is negative.
        """
        if cache_size < 0:
            raise ValueError(f"cache_size must be at least 0, not {cache_size}")
        self.name = name
        self.dimension: int | None = None
        self._encode = encode
        self._cache: OrderedDict[bytes, Float64[np.ndarray, " dimension"]] = OrderedDict()
        self._cache_size = cache_size
        self._lock = Lock()
        self._fingerprint: str | None = None

    def encode(self, texts: Sequence[str]) -> Float64[np.ndarray, "texts dimension"]:
        """Encodes texts, in one batch; those seen before come from the cache.

        Args:
            texts: Any number of texts.

        Returns:
            One row of length one for each. No text gives an array of no rows.

        Raises:
            TypeError: A text is no string.
            ValueError: The encoder gave an array of another shape than before, or a row with NaN, infinity or nothing
                but zeros; the message names the text by its index.
        """
        if isinstance(texts, str):
            raise TypeError("texts must be a sequence of strings, not one string")
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"texts[{i}] must be a string, not {type(text).__name__}")
        keys = [hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in texts]
        with self._lock:
            found = {key: self._cache[key] for key in keys if key in self._cache}
        new = {key: i for i, key in reversed(list(enumerate(keys))) if key not in found}
        if new:
            places = sorted(new.values())
            rows = self._unit_rows([texts[i] for i in places], places)
            # Copies, since a view would keep its whole batch alive.
            found |= {keys[i]: row.copy() for i, row in zip(places, rows, strict=True)}
        with self._lock:
            for key in keys:
                self._cache[key] = found[key]
                self._cache.move_to_end(key)
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return np.stack([found[key] for key in keys]) if keys else np.empty((0, self.dimension or 0))

    def fingerprint(self) -> str:
        """What tells whether another encoder is the same.

        Returns:
            The name, and a hash of the embedding of a fixed sentence, to three decimals: so that another machine's
            rounding does not make it another encoder, while other weights do.
        """
        if self._fingerprint is None:
            # Adding zero makes one of minus zero.
            rounded = np.round(self.encode([_PROBE])[0], 3) + 0.0
            self._fingerprint = f"{self.name}#{hashlib.sha256(rounded.astype('<f8').tobytes()).hexdigest()[:12]}"
        return self._fingerprint

    def _unit_rows(self, texts: list[str], places: Sequence[int]) -> Float64[np.ndarray, "texts dimension"]:
        rows = np.asarray(_on_cpu(self._encode(texts)), dtype=np.float64)
        width = self.dimension or rows.shape[-1] if rows.ndim == 2 else 0
        if rows.shape != (len(texts), width) or width == 0:
            expected = f"({len(texts)}, {self.dimension or 'dimension'})"
            raise ValueError(f"the encoder {self.name} must return an array of {expected}, not of {rows.shape}")
        # The largest entry first, so that squares neither overflow nor vanish.
        largest = np.abs(rows).max(axis=1, keepdims=True)
        for row in np.flatnonzero(~np.isfinite(largest) | (largest == 0)).tolist():
            what = "only zeros" if largest[row, 0] == 0 else "NaN or infinity"
            raise ValueError(f"the encoder {self.name} gave {what} for texts[{places[row]}]")
        rows = rows / largest
        self.dimension = width
        return cast("np.ndarray", rows / np.linalg.norm(rows, axis=1, keepdims=True))


def as_encoder(encoder: Any, *, cache_size: int = 16384) -> TextEncoder:
    """Makes a `TextEncoder` of whatever encodes.

    Args:
        encoder: The name or folder of a sentence-transformers model, which is loaded at the first use; an object with
            `encode`, such as a SentenceTransformer; a function from a list of texts to an array of [texts, dimension];
            or a TextEncoder, which is returned as it is.
        cache_size: How many embeddings are kept.

    Returns:
        The encoder.

    Raises:
        TypeError: `encoder` is none of these.
    """
    if isinstance(encoder, TextEncoder):
        return encoder
    if isinstance(encoder, str):
        return TextEncoder(_Lazy(encoder), _name_of(encoder), cache_size=cache_size)
    if callable(getattr(encoder, "encode", None)):
        return TextEncoder(lambda texts: _encode_with(encoder, texts), _name_of(encoder), cache_size=cache_size)
    if callable(encoder):
        return TextEncoder(encoder, _name_of(encoder), cache_size=cache_size)
    raise TypeError(
        f"encoder must be a model's name, an object with encode or a function, not {type(encoder).__name__}"
    )


class _Lazy:
    def __init__(self, name: str) -> None:
        self._name = name
        self._model: Any = None
        self._lock = Lock()

    def __call__(self, texts: list[str]) -> Any:
        with self._lock:
            if self._model is None:
                try:
                    from sentence_transformers import SentenceTransformer
                except ModuleNotFoundError as error:
                    if error.name != "sentence_transformers":
                        raise
                    raise ImportError(
                        f"the encoder {self._name} needs sentence-transformers: pip install 'pmark[encoder]'"
                    ) from error
                self._model = SentenceTransformer(self._name, trust_remote_code=False)
        return _encode_with(self._model, texts)


def _encode_with(model: Any, texts: list[str]) -> Any:
    tokenizer = getattr(model, "tokenizer", None)
    limit = getattr(model, "max_seq_length", None) or getattr(model, "max_tokens", None)
    # No token is shorter than a byte, so most texts need no count.
    if tokenizer is not None and hasattr(tokenizer, "model_max_length") and isinstance(limit, int):
        long = (text for text in texts if len(text.encode("utf-8", "replace")) > limit)
        if any(len(tokenizer(text, truncation=False, verbose=False)["input_ids"]) > limit for text in long):
            warnings.warn(
                f"a sentence has more than the {limit} tokens that the encoder reads, and is cut off there; where the "
                "segmenter finds no sentences, the text may be in another language, a list or code",
                stacklevel=2,
            )
    return model.encode(texts)


def _on_cpu(rows: Any) -> Any:
    return rows.detach().cpu().float().numpy() if hasattr(rows, "detach") else rows


def _name_of(encoder: Any) -> str:
    if isinstance(encoder, str):
        name = str(Path(encoder).resolve()) if Path(encoder).is_dir() else encoder
    else:
        loaded_from = getattr(getattr(encoder, "tokenizer", None), "name_or_path", None)
        names = (getattr(encoder, "name", None), loaded_from, getattr(encoder, "__name__", None))
        name = next((name for name in names if isinstance(name, str) and name), type(encoder).__name__)
    # The last part: a folder lies elsewhere on the detector's machine, and hub names are given with or without owner.
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2]
