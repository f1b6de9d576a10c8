"""Finding the configuration: which heads, and which gamma (paper, section 4, supervised mode).

Head profiling raises gamma on one head index at a time, jointly over the layers, and looks whether the metric rises
("up-effective") or falls ("down-effective"). The stronger type is kept, its strongest heads get one common gamma, and
that gamma is searched on a grid. Without profiling all heads share the gamma.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import nn

from zerotuning.config import ModelId, ZeroTuningConfig
from zerotuning.evaluation import Predictions, ProgressBar, Scorer
from zerotuning.metrics import Scores
from zerotuning.tasks import Example, TaskSpec, check_examples

DEFAULT_GRID = (0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
"""Symmetric in log gamma about 1. The paper's own full grid is not public."""

Metric = Literal["accuracy", "constrained_accuracy"]
Combine = Literal["dominant", "up", "down", "both"]


@dataclasses.dataclass(frozen=True)
class HeadProfile:
    """How the metric answers to each head index, raised alone.

    Attributes:
        gamma_probe: The factor that each was raised to.
        baseline: The metric of the untouched model.
        deltas: Change of the metric for each query-head index.
        tolerance: Changes of at most this much are neutral: one example.
    """

    gamma_probe: float
    baseline: float
    deltas: tuple[float, ...]
    tolerance: float

    def kind(self, head: int) -> Literal["up", "down", "neutral"]:
        """Whether a head wants more attention on the initial token, less, or does not matter.

        Args:
            head: Query-head index.

        Returns:
            `"up"`, `"down"` or `"neutral"`.
        """
        # Deltas are multiples of one example, up to rounding.
        delta = self.deltas[head] if self.gamma_probe > 1 else -self.deltas[head]
        if abs(delta) <= 1.001 * self.tolerance:
            return "neutral"
        return "up" if delta > 0 else "down"

    def select(self, p: float = 0.4, combine: Combine = "dominant") -> dict[int, int]:
        """Choose the heads to scale.

        Args:
            p: Share of all heads to take, by |delta|.
            combine: The type to take them from: `"up"`, `"down"`, `"both"`, or the one whose chosen heads have the
                larger mean |delta|.

        Returns:
            The chosen heads, each with +1 (gamma above 1) or -1 (below).

        Raises:
            ValueError: `p` is not in (0, 1], or `combine` is none of the four.
        """
        _check_selection(p, combine)
        count = max(1, round(p * len(self.deltas)))
        strongest = sorted(range(len(self.deltas)), key=lambda head: (-abs(self.deltas[head]), head))
        sign = {"up": 1, "down": -1}
        if combine == "both":
            return {head: sign[self.kind(head)] for head in [h for h in strongest if self.kind(h) != "neutral"][:count]}
        top = {kind: [head for head in strongest if self.kind(head) == kind][:count] for kind in sign}
        if combine == "dominant":
            strength = {
                kind: sum(abs(self.deltas[h]) for h in heads) / max(1, len(heads)) for kind, heads in top.items()
            }
            combine = "up" if strength["up"] >= strength["down"] else "down"
        return dict.fromkeys(top[combine], sign[combine])

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        kinds = [self.kind(head) for head in range(len(self.deltas))]
        return {**dataclasses.asdict(self), "deltas": list(self.deltas), "kinds": kinds}


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """One value of the grid.

    Attributes:
        gamma: The factor.
        scores: The four numbers with it.
        label_counts: How often each label was read from an answer; what did not parse is missing.
    """

    gamma: float
    scores: Scores
    label_counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CalibrationResult:
    """What calibration found.

    Attributes:
        config: The chosen configuration; gamma 1 if nothing was better.
        gamma: Its factor (of up-effective heads; the inverse belongs to down-effective ones when both are scaled).
        curve: The scores along the grid.
        metric: What was maximised.
        profile: The head profile, if heads were profiled.
        warnings: What the user should know before he trusts the result.
    """

    config: ZeroTuningConfig
    gamma: float
    curve: tuple[CurvePoint, ...]
    metric: Metric
    profile: HeadProfile | None
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "gamma": self.gamma,
            "metric": self.metric,
            "curve": [
                {"gamma": point.gamma, "label_counts": list(point.label_counts), **point.scores.to_json()}
                for point in self.curve
            ],
            "profile": None if self.profile is None else self.profile.to_json(),
            "warnings": list(self.warnings),
        }


def calibrate(
    model: nn.Module,
    tokenizer: Any,
    data: Sequence[Example],
    task: TaskSpec,
    *,
    mode: Literal["supervised"] = "supervised",
    heads: Literal["uniform", "profile"] = "uniform",
    grid: Sequence[float] = DEFAULT_GRID,
    metric: Metric = "accuracy",
    layers: Sequence[int] | None = None,
    gamma_probe: float = 2.0,
    p: float = 0.4,
    combine: Combine = "dominant",
    batch_rows: int = 16,
    configs_per_pass: int = 1,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> CalibrationResult:
    """Choose heads and gamma by the accuracy on labelled texts.

    Args:
        model: A decoder-only transformers model.
        tokenizer: Its tokenizer.
        data: Labelled texts; the paper uses 500. Keep others for the evaluation.
        task: What to ask.
        mode: `"supervised"`.
        heads: `"uniform"` scales all heads; `"profile"` profiles head indices and scales the effective ones.
        grid: Factors to try; 1 is always among them.
        metric: What to maximise. Ties go to the gamma nearest 1.
        layers: The layers to scale; all if not given.
        gamma_probe: The factor for profiling; not 1.
        p: Share of the heads to scale after profiling (paper: 40 %).
        combine: Which heads to scale, see `HeadProfile.select`. With `"both"`, down-effective heads get 1/gamma.
        batch_rows: Rows in one forward.
        configs_per_pass: Configurations whose rows share batches; more than 1 fills a GPU when data are few.
        resume: A JSON Lines file to which every evaluated point is appended; points found there are not computed again.
        progress: Show a progress bar on standard error.

    Returns:
        The curve, the chosen configuration and warnings.

    Raises:
        ValueError: Empty or single-class data, factors that are not finite and above 0, an unknown option, or a
            `resume` file that belongs to another run.
    """
    if mode != "supervised":
        raise ValueError(f"mode={mode!r} is not offered; the only mode is 'supervised'")
    if heads not in ("uniform", "profile"):
        raise ValueError(f"heads is {heads!r}; it must be 'uniform' or 'profile'")
    if metric not in ("accuracy", "constrained_accuracy"):
        raise ValueError(f"metric is {metric!r}; it must be 'accuracy' or 'constrained_accuracy'")
    if configs_per_pass < 1:
        raise ValueError(f"configs_per_pass is {configs_per_pass}; it must be at least 1")
    _check_selection(p, combine)
    check_examples(task, data)
    identity = ModelId.of(model)
    gammas = _checked_grid(grid)
    in_all = len(gammas)
    if not (math.isfinite(gamma_probe) and gamma_probe > 0 and gamma_probe != 1):
        raise ValueError(f"gamma_probe is {gamma_probe}; it must be a finite number above 0, and not 1")

    scorer = Scorer(model, tokenizer, task, [example.text for example in data], batch_rows=batch_rows)
    profiled = 0 if heads == "uniform" else identity.query_heads + 1
    with (
        PointLog(resume, _run_identity(model, identity, task, data)) as log,
        ProgressBar(progress, len(data) * (profiled + len(gammas)), "calibrate") as advance,
    ):

        def answers(configs: Sequence[ZeroTuningConfig]) -> list[Predictions]:
            return _answers(scorer, log, configs, configs_per_pass, advance)

        def value(predictions: Predictions) -> float:
            return _value(predictions.scores(data), metric)

        vanilla = ZeroTuningConfig.uniform(identity, 1.0)
        warnings = []
        profile = None
        signs = dict.fromkeys(range(identity.query_heads), 1)
        if heads == "profile":
            probes = [ZeroTuningConfig.uniform(identity, gamma_probe, [h], layers) for h in range(identity.query_heads)]
            baseline, *probed = [value(each) for each in answers([vanilla, *probes])]
            profile = HeadProfile(gamma_probe, baseline, tuple(each - baseline for each in probed), 1 / len(data))
            signs = profile.select(p, combine)
            if not signs:
                warnings.append("no head changed the metric by more than one example; nothing is scaled")
            # One direction only: above 1 for heads that want more, below for those that want less.
            if combine == "both":
                gammas = [gamma for gamma in gammas if gamma >= 1]
            elif signs:
                gammas = [gamma for gamma in gammas if gamma == 1 or (gamma > 1) == (next(iter(signs.values())) > 0)]
            else:
                gammas = [1.0]
            advance(len(data) * (in_all - len(gammas)))

        def config_of(gamma: float, meta: Mapping[str, Any] | None = None) -> ZeroTuningConfig:
            if heads == "uniform":
                return ZeroTuningConfig.uniform(identity, gamma, layers=layers, meta=meta)
            both = combine == "both"
            per_head = {head: 1 / gamma if both and sign < 0 else gamma for head, sign in signs.items()}
            return ZeroTuningConfig.per_head(identity, per_head, layers, meta=meta)

        curve = tuple(
            CurvePoint(
                gamma,
                predictions.scores(data),
                tuple(predictions.parsed.count(label) for label in range(len(task.labels))),
            )
            for gamma, predictions in zip(gammas, answers([config_of(gamma) for gamma in gammas]), strict=True)
        )

    best = max(curve, key=lambda point: (_value(point.scores, metric), -abs(math.log(point.gamma)), point.gamma))
    if best.gamma != 1 and len(gammas) > 1 and best.gamma in (min(gammas), max(gammas)):
        warnings.append(
            f"the best gamma, {best.gamma:g}, is at the edge of the grid; a wider grid may find a better one"
        )
    if len(data) < 100:
        warnings.append(f"only {len(data)} examples: the choice of gamma is mostly noise; use some hundreds")
    meta = {
        "calibration": {
            "task": task.name,
            "examples": len(data),
            "mode": mode,
            "heads": heads,
            "gamma": best.gamma,
            "metric": metric,
            "value": _value(best.scores, metric),
            "vanilla": _value(next(point.scores for point in curve if point.gamma == 1), metric),
            "grid": list(gammas),
            **(
                {}
                if profile is None
                else {"gamma_probe": gamma_probe, "p": p, "combine": combine, "heads_scaled": sorted(signs)}
            ),
        }
    }
    return CalibrationResult(config_of(best.gamma, meta), best.gamma, curve, metric, profile, tuple(warnings))


def _check_selection(p: float, combine: str) -> None:
    if not 0 < p <= 1:
        raise ValueError(f"p is {p}; it must be above 0 and at most 1")
    if combine not in ("dominant", "up", "down", "both"):
        raise ValueError(f"combine is {combine!r}; it must be 'dominant', 'up', 'down' or 'both'")


def _checked_grid(grid: Sequence[float]) -> list[float]:
    for gamma in grid:
        if not (math.isfinite(gamma) and gamma > 0):
            raise ValueError(f"grid contains {gamma!r}; every gamma must be a finite number above 0")
    return sorted({1.0, *map(float, grid)})


def _value(scores: Scores, metric: Metric) -> float:
    return (scores.accuracy if metric == "accuracy" else scores.constrained_accuracy).value


def _answers(
    scorer: Scorer,
    log: "PointLog",
    configs: Sequence[ZeroTuningConfig],
    configs_per_pass: int,
    advance: Callable[[int], None],
) -> list[Predictions]:
    missing = []
    for config in configs:
        if log.get(config.fingerprint) is not None:
            advance(len(scorer.prompts))
        elif config not in missing:
            missing.append(config)
    for first in range(0, len(missing), configs_per_pass):
        group = missing[first : first + configs_per_pass]
        for config, predictions in zip(group, scorer.predict(group, advance=advance), strict=True):
            log.append(config.fingerprint, predictions)
    found = [log.get(config.fingerprint) for config in configs]
    return [each for each in found if each is not None]


def _run_identity(model: nn.Module, identity: ModelId, task: TaskSpec, data: Sequence[Example]) -> dict[str, Any]:
    """What the points of a calibration depend on, apart from the configuration."""
    return {
        "model": {key: value for key, value in dataclasses.asdict(identity).items() if key != "name"},
        "weights": _weights_digest(model),
        "task": hashlib.sha256(json.dumps(dataclasses.asdict(task), sort_keys=True).encode()).hexdigest()[:32],
        "data": hashlib.sha256(json.dumps([[e.text, e.label] for e in data]).encode()).hexdigest()[:32],
    }


def _weights_digest(model: nn.Module) -> str:
    """A digest of a few values of every weight: enough to tell models, checkpoints and types apart."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:8].float().tolist()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {values}\n".encode())
    return digest.hexdigest()[:32]


class PointLog:
    """Evaluated points, each on the disk before the next is begun.

    The first line says which run the file belongs to. A last line that was cut off by a crash is dropped.
    """

    SCHEMA = "zerotuning/points"
    VERSION = 1

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
            ValueError: It belongs to another run, or a line other than the last is damaged.
        """
        if self.path is not None:
            content = self.path.read_bytes() if self.path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            for number, line in enumerate(whole.splitlines(), start=1):
                self._read(number, line)
            self._file = self.path.open("ab")
            if len(whole) < len(content):
                self._file.truncate(len(whole))
            if not whole:
                self._write(self._header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __iter__(self) -> Iterator[str]:
        """The keys of all points."""
        return iter(self._points)

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
            self._write({"config": key, **dataclasses.asdict(predictions)})

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            if number > 1:
                self._points[record["config"]] = Predictions(tuple(record["parsed"]), tuple(record["constrained"]))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path}, line {number}, is damaged; delete the file to start anew") from None
        if number == 1 and record != self._header:
            if not isinstance(record, dict) or record.get("schema") != self.SCHEMA:
                raise ValueError(f"{self.path} is no file of calibration points")
            wrong = ", ".join(sorted(key for key in self._header if record.get(key) != self._header[key]))
            raise ValueError(
                f"{self.path} was made for another run (different {wrong}); give another file, or delete it"
            )
