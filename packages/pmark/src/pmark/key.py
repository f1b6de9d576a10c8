"""The secret that a watermark hangs on: private bits for every sentence and channel, and private pivots."""

import hashlib
import hmac
import json
import os
import secrets
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Bool, Float64
from separata_kit.files import read_json, write_json

SCHEMA = "pmark/key"
SCHEMA_VERSION = 1
_LEAST_SECRET = 16


class PMarkKey:
    """A private key: a bit for every sentence and channel, and one pivot for every channel.

    Bits are the lowest bit of HMAC-SHA256(secret, "bit|t|j"), so there are as many as a text needs. Pivots, the
    orthonormal directions of the proxy functions, come from the QR decomposition of a Gaussian matrix out of an
    HMAC-seeded SHAKE-256 stream, the diagonal of R positive: the same on every machine, up to rounding. The paper's
    authors draw both from seeded generators; deriving them from a secret is ours.

    A key cannot be changed or pickled, copies are the key itself, and its `repr` shows the public id only. Made by
    `generate`, `load` or `from_authors`.
    """

    __slots__ = ("_pivots", "_secret", "_seed", "_table", "channels")

    channels: int
    _secret: bytes
    _table: Bool[np.ndarray, "sentences channels"] | None
    _seed: int
    _pivots: dict[int, Float64[np.ndarray, "channels dimension"]]

    def __init__(
        self, channels: int, secret: bytes, table: Bool[np.ndarray, "bits"] | None = None, seed: int = 0
    ) -> None:
        """See `generate` and `from_authors`."""
        if type(channels) is not int or channels < 1:
            raise ValueError(f"channels={channels!r}; it must be a whole number of at least 1")
        rows = None
        if not isinstance(secret, bytes):
            raise TypeError(f"secret is a {type(secret).__name__}; it must be bytes")
        if table is None and len(secret) < _LEAST_SECRET:
            raise ValueError(f"secret has {len(secret)} bytes; it must have at least {_LEAST_SECRET}")
        if table is not None:
            if len(table) < 2 * channels:
                raise ValueError(f"bits has {len(table)} values; channels={channels} needs at least {2 * channels}")
            rows = table[: len(table) // channels * channels].reshape(-1, channels)
            secret = f"authors|{seed}|".encode() + rows.tobytes()
        values = {"channels": channels, "_secret": secret, "_table": rows, "_seed": seed, "_pivots": {}}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def generate(cls, channels: int = 4, secret: bytes | None = None) -> "PMarkKey":
        """Make a key.

        Args:
            channels: Number b of channels, at least 1.
            secret: At least 16 bytes that nobody else knows; by default 32 from the operating system.

        Returns:
            The key; the same secret and channels give the same one.

        Raises:
            ValueError: Too few channels, or too short a secret.
            TypeError: The secret is not bytes.
        """
        return cls(channels, secrets.token_bytes(32) if secret is None else secret)

    @classmethod
    def from_authors(
        cls, bits: Sequence[int] | str | os.PathLike[str], channels: int = 4, seed: int = 42
    ) -> "PMarkKey":
        """Take over a table of bits as the authors' code does: for their published tables, not for secrets.

        Row t of the table, cut in rows of `channels` bits, belongs to sentence t; row 0 is the prompt's and unused.
        Pivots are the columns of Q of numpy's QR of `default_rng(seed).standard_normal((dimension, channels))`, with
        whatever signs the LAPACK in use gives them.

        Args:
            bits: Zeros and ones, or the path of a JSON file that holds a list of them.
            channels: Number b of channels.
            seed: Of the pivots.

        Returns:
            The key.

        Raises:
            ValueError: Something else than zeros and ones, fewer than two rows, or a bad number of channels or seed.
            OSError: The file cannot be read.
        """
        values: Any = _read_json(bits) if isinstance(bits, str | os.PathLike) else list(bits)
        if not isinstance(values, list) or any(bit not in (0, 1) for bit in values):
            raise ValueError("bits must be a flat list of zeros and ones")
        if type(seed) is not int or seed < 0:
            raise ValueError(f"seed={seed!r}; it must be a whole number of at least 0")
        return cls(channels, b"", np.array(values, dtype=bool), seed)

    @property
    def id(self) -> str:
        """16 hexadecimal digits that tell keys apart and may be shown to anyone."""
        return self._hmac(f"id|{self.channels}").hex()[:16]

    def _hmac(self, message: str) -> bytes:
        return hmac.digest(self._secret, message.encode(), "sha256")

    def bits(self, count: int, first: int = 1) -> Bool[np.ndarray, "sentences channels"]:
        """The private bits g[t, j] of consecutive sentences.

        Args:
            count: Number of sentences.
            first: Number of the first of them; 1 is the first sentence behind the prompt.

        Returns:
            Row i belongs to sentence `first + i`. True: that channel's upper half.

        Raises:
            ValueError: `count` below 0, `first` below 1, or beyond the table of `from_authors`.
        """
        if count < 0 or first < 1:
            raise ValueError(f"count={count}, first={first}; count must be at least 0 and first at least 1")
        if self._table is not None:
            if first + count > len(self._table):
                raise ValueError(
                    f"the table of this key ends at sentence {len(self._table) - 1}; "
                    f"sentences {first} to {first + count - 1} were asked for"
                )
            return self._table[first : first + count].copy()
        rows = [[self._hmac(f"bit|{first + i}|{j}")[-1] & 1 for j in range(self.channels)] for i in range(count)]
        return np.array(rows, dtype=bool).reshape(count, self.channels)

    def pivots(self, dimension: int) -> Float64[np.ndarray, "channels dimension"]:
        """The pivots v_j of the proxy functions (section "Notation" of the method: orthonormal columns of Q).

        Args:
            dimension: Width d of the embeddings.

        Returns:
            Orthonormal rows; read-only, computed once per dimension.

        Raises:
            ValueError: More channels than dimensions.
        """
        if self.channels > dimension:
            raise ValueError(
                f"the key has {self.channels} channels, but embeddings of dimension {dimension} have room for "
                f"{max(dimension, 0)} at most"
            )
        if dimension not in self._pivots:
            shape = (dimension, self.channels)
            if self._table is not None:
                q, _ = np.linalg.qr(np.random.default_rng(self._seed).standard_normal(shape))
            else:
                from scipy.special import ndtri  # type: ignore[import-untyped]  # scipy ships no types

                seed = self._hmac(f"pivots|{dimension}|{self.channels}")
                stream = np.frombuffer(hashlib.shake_256(seed).digest(8 * dimension * self.channels), dtype="<u8")
                # 52 bits and a half: every value is a float strictly between 0 and 1, where the quantile is finite.
                gaussian = ndtri(((stream >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52).reshape(shape)
                q, r = np.linalg.qr(gaussian)
                q = q * np.where(np.diag(r) < 0, -1.0, 1.0)
            rows = np.ascontiguousarray(q.T)
            rows.setflags(write=False)
            self._pivots[dimension] = rows
        return self._pivots[dimension]

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the key, secret and all, to a JSON file that only its owner may read.

        Args:
            path: The file.
            overwrite: Whether an existing file may be replaced.

        Raises:
            FileExistsError: There is such a file already: texts marked under that key would be lost to detection.
            OSError: The file cannot be written.
        """
        if os.path.lexists(path) and not overwrite:
            raise FileExistsError(f"{os.fspath(path)} exists and may be the only copy; overwrite=True replaces it")
        value: dict[str, Any] = {"schema": SCHEMA, "version": SCHEMA_VERSION, "id": self.id, "channels": self.channels}
        if self._table is None:
            value["secret"] = self._secret.hex()
        else:
            value |= {"bits": "".join(map(str, self._table.astype(int).ravel())), "seed": self._seed}
        write_json(path, value, mode=0o600)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PMarkKey":
        """Read a key that `save` wrote; warn if others may read the file.

        Args:
            path: The file.

        Returns:
            The key.

        Raises:
            ValueError: It is no key file, is damaged, or comes from a newer version. The message shows no secret.
            OSError: It cannot be read.
        """
        value = read_json(path, schema=SCHEMA, version=SCHEMA_VERSION, what="key")
        try:
            channels = value["channels"]
            if "bits" in value:
                key = cls.from_authors([int(bit) for bit in value["bits"]], channels, value["seed"])
            else:
                key = cls.generate(channels, bytes.fromhex(value["secret"]))
            intact = key.id == value["id"]
        except (KeyError, TypeError, ValueError):
            intact = False
        if not intact:
            raise ValueError(f"{os.fspath(path)}: damaged: its values do not give the id that it names")
        if os.name == "posix" and os.stat(path).st_mode & 0o077:
            warnings.warn(f"others may read the key {os.fspath(path)}; chmod 600 it", stacklevel=2)
        return key

    def __repr__(self) -> str:
        """The public part."""
        return f"PMarkKey(id={self.id!r}, channels={self.channels})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refused."""
        raise AttributeError(f"{name} cannot be set; a PMarkKey does not change")

    def __copy__(self) -> "PMarkKey":
        """Itself."""
        return self

    def __deepcopy__(self, memo: object) -> "PMarkKey":
        """Itself."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refused: a pickle would carry the secret to wherever it is written."""
        raise TypeError("a PMarkKey is not pickled, since the secret would go along; pass the path of its file")


def _read_json(path: str | os.PathLike[str]) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{os.fspath(path)}: not a JSON list of zeros and ones") from None
