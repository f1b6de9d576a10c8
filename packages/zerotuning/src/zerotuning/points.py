"""Answers by configuration, kept on the disk as they come, so that a long run continues where it stopped."""

import base64
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from separata_kit.files import digest
from separata_kit.journal import Journal
from separata_kit.language_models import weights_digest

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
        "weights": weights_digest(scorer.model)[:32],
        "task": digest(dataclasses.asdict(scorer.task))[:32],
        "data": digest([[each.text, *each.choices] for each in items])[:32],
        "tokens": digest([scorer.prompts, scorer.label_tokens])[:32],
        "answer_tokens": scorer.answer_tokens,
    }


class _Lines(Journal):
    """The file of points, with lines of its own form."""

    def open(self) -> bytes:
        """What the file holds, in every process of `torch.distributed`; the first one opens it."""
        content: bytes | None = None
        failure = None
        if parallel.is_first():
            try:
                content = super().open()
            except OSError as error:
                failure = error
        # Told to the others before it is raised, as they would wait for ever.
        found = parallel.from_first(content)
        if failure is not None:
            raise failure
        if found is None:
            raise OSError(f"the first process cannot read or write {self.path}")
        return found

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line, by the first process."""
        if parallel.is_first():
            super().write(record)

    def encode(self, key: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """The object of a line."""
        record = {"config": key, **row}
        return {**record, "sha256": digest(record)[:32]}

    def decode(self, record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """What it holds."""
        if record.pop("sha256") != digest(record)[:32]:
            raise ValueError("it was altered")
        return str(record.pop("config")), record


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
        self._lines = _Lines(path, run, schema=self.SCHEMA, version=self.VERSION, what="file of calibration points")
        self._points: dict[str, Predictions] = {}

    def __enter__(self) -> "PointLog":
        """Read what is there and open the file for appending.

        Raises:
            ValueError: It is another kind of file, belongs to another run or to another version of this package, or a
                line was damaged or altered.
            OSError: The file cannot be read or written, or another run has it open.
        """
        self._lines.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._lines.__exit__(kind, error, trace)

    def get(self, key: str) -> Predictions | None:
        """A point, if it was evaluated.

        Args:
            key: Fingerprint of its configuration.

        Returns:
            Its predictions, or None.
        """
        if key not in self._points and (row := self._lines.get(key)) is not None:
            self._points[key] = _predictions(row)
        return self._points.get(key)

    def append(self, key: str, predictions: Predictions) -> None:
        """Add a point and force it to the disk.

        Args:
            key: Fingerprint of its configuration.
            predictions: The answers.
        """
        flat = [value for each in predictions.label_log_probs for value in each]
        row = {
            "parsed": list(predictions.parsed),
            "label_log_probs": _pack(flat),
            "entropies": _pack(predictions.entropies),
        }
        self._lines.append(key, row)
        self._points[key] = predictions

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
