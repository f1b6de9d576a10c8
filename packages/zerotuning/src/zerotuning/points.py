"""Answers by configuration, kept on the disk as they come, so that a long run continues where it stopped."""

import base64
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zerotuning import parallel
from zerotuning.config import ModelId, ZeroTuningConfig
from zerotuning.scoring import Predictions, Scorer
from zerotuning.tasks import Example


def run_identity(scorer: Scorer) -> dict[str, Any]:
    """What the answers depend on, apart from the configuration.

    Args:
        scorer: The prompts and the model.

    Returns:
        A description that JSON can hold, equal for runs whose answers may be mixed.
    """
    identity = ModelId.of(scorer.model)
    items = [each if isinstance(each, Example) else Example(each) for each in scorer.items]
    return {
        "model": {key: value for key, value in dataclasses.asdict(identity).items() if key != "name"},
        "weights": _weights_digest(scorer.model),
        "task": _digest(dataclasses.asdict(scorer.task)),
        "data": _digest([[each.text, *each.choices] for each in items]),
        "tokens": _digest([scorer.prompts, scorer.label_tokens]),
        "answer_tokens": scorer.answer_tokens,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _weights_digest(model: nn.Module) -> str:
    """A digest of a few values of every weight: enough to tell models, checkpoints and types apart."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        # Those spread over processes are put together, one at a time; of those offloaded the shape has to do.
        whole: Any = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        values = None if whole.is_meta else whole.flatten()[:8].float().tolist()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {values}\n".encode())
    return digest.hexdigest()[:32]


class PointLog:
    """Evaluated points, each on the disk before the next is begun.

    The first line says which run the file belongs to. A last line that was cut off by a crash is dropped. Of the
    processes of `torch.distributed` the first one reads and writes, and all know the same points; other runs are kept
    out while one has the file open.
    """

    SCHEMA = "zerotuning/points"
    VERSION = 3

    def __init__(self, path: str | os.PathLike[str] | None, run: Mapping[str, Any]) -> None:
        """Prepare; files are touched by `with` only.

        Args:
            path: The file, or None to keep points in memory.
            run: What identifies the run, as JSON.
        """
        self.path = None if path is None else Path(path)
        self._header = {"schema": self.SCHEMA, "version": self.VERSION, **run}
        self._points: dict[str, Predictions] = {}
        self._file: Any = None

    def __enter__(self) -> "PointLog":
        """Read what is there and open the file for appending.

        Raises:
            ValueError: It is another kind of file, belongs to another run or to another version of this package, or a
                line was damaged or altered.
            OSError: The file cannot be read or written, or another run has it open.
        """
        if self.path is None:
            return self
        content = self._shared()
        whole = content[: content.rfind(b"\n") + 1]
        # Without a line of its own it must be the beginning of ours.
        lines = whole.splitlines() or ([] if _line(self._header).startswith(content) else [content])
        try:
            for number, line in enumerate(lines, start=1):
                self._read(number, line)
            if self._file is not None:
                if len(whole) < len(content):
                    self._file.truncate(len(whole))
                if not whole:
                    self._write(self._header)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _shared(self) -> bytes:
        """What the file holds, in every process; the first one opens it."""
        content: bytes | None = None
        failure = None
        if parallel.is_first() and self.path is not None:
            try:
                self._file = self.path.open("ab")
                _lock(self._file, self.path)
                content = self.path.read_bytes()
            except OSError as error:
                self.__exit__(None, None, None)
                failure = error
        # Told to the others before it is raised, as they would wait for ever.
        found = parallel.from_first(None if failure else content)
        if failure is not None:
            raise failure
        if found is None:
            raise OSError(f"the first process cannot read or write {self.path}")
        return found

    def get(self, key: str) -> Predictions | None:
        """A point, if it was evaluated.

        Args:
            key: Fingerprint of its configuration.

        Returns:
            Its predictions, or None.
        """
        return self._points.get(key)

    def append(self, key: str, predictions: Predictions) -> None:
        """Add a point and force it to the disk.

        Args:
            key: Fingerprint of its configuration.
            predictions: The answers.
        """
        self._points[key] = predictions
        if self._file is not None:
            flat = [value for each in predictions.label_log_probs for value in each]
            record = {
                "config": key,
                "parsed": list(predictions.parsed),
                "label_log_probs": _pack(flat),
                "entropies": _pack(predictions.entropies),
            }
            self._write({**record, "sha256": _digest(record)})

    def answers(
        self,
        scorer: Scorer,
        configs: Sequence[ZeroTuningConfig],
        *,
        configs_per_pass: int = 1,
        advance: Callable[[int], None] = lambda prompts: None,
    ) -> list[Predictions]:
        """The answers under each configuration, computed where they are not known.

        Args:
            scorer: The prompts and the model.
            configs: The configurations; those that touch lower layers first, to run as few layers as possible.
            configs_per_pass: How many of them share batches.
            advance: Told how many prompts are done.

        Returns:
            One set of answers for each configuration.
        """
        missing: dict[str, ZeroTuningConfig] = {}
        keys = [config.fingerprint for config in configs]
        for key, config in zip(keys, configs, strict=True):
            if self.get(key) is not None:
                advance(len(scorer.prompts))
            else:
                missing.setdefault(key, config)
        wanted = list(missing.items())
        for first in range(0, len(wanted), configs_per_pass):
            group = dict(wanted[first : first + configs_per_pass])
            for key, predictions in zip(group, scorer.predict(list(group.values()), advance=advance), strict=True):
                self.append(key, predictions)
        return [self._points[key] for key in keys]

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(_line(record))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            intact = number == 1 or record.pop("sha256") == _digest(record)
        except (ValueError, KeyError, TypeError, AttributeError):
            record, intact = None, number == 1
        if not intact:
            raise ValueError(f"{self.path}, line {number}, is damaged or was altered; delete the file to start anew")
        if number > 1:
            self._points[record["config"]] = _predictions(record)
        elif record != self._header:
            if not isinstance(record, dict) or record.get("schema") != self.SCHEMA:
                raise ValueError(f"{self.path} is no file of calibration points; it is left as it is")
            if record.get("version") != self.VERSION:
                raise ValueError(
                    f"{self.path} has version {record.get('version')!r} of the file of calibration points and this "
                    f"zerotuning continues version {self.VERSION}: give another file, or delete it"
                )
            wrong = ", ".join(sorted(key for key in self._header if record.get(key) != self._header[key]))
            raise ValueError(
                f"{self.path} was made for another run (different {wrong}); give another file, or delete it"
            )


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _lock(file: Any, path: Path) -> None:
    """Keep other runs out, as two of them would write into each other's lines."""
    try:
        import fcntl
    except ImportError:  # there is none on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"{path} is in use by another run; wait for it, or give another file") from None
    except OSError:  # some network file systems have no locks
        return


def _pack(values: Sequence[float]) -> str:
    """Float32 numbers, little endian, in base64: exact, and half as long as digits."""
    return base64.b64encode(torch.tensor(values, dtype=torch.float32).numpy().astype("<f4").tobytes()).decode()


def _unpack(text: str) -> list[float]:
    import numpy as np

    return [float(value) for value in np.frombuffer(base64.b64decode(text), dtype="<f4")]


def _predictions(record: Mapping[str, Any]) -> Predictions:
    parsed, flat = tuple(record["parsed"]), _unpack(record["label_log_probs"])
    labels = len(flat) // len(parsed)
    rows = [tuple(flat[first : first + labels]) for first in range(0, len(flat), labels)]
    return Predictions(parsed, tuple(rows), tuple(_unpack(record["entropies"])))
