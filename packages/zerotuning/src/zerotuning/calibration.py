"""Finding the configuration: which heads, and which gamma (paper, section 4).

Head profiling chooses the units of heads to scale, see `zerotuning.profiling`; without it all heads are scaled. They
share one gamma, which is searched on a grid: with labels for the best accuracy, without them for the lowest entropy of
the answers.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn

from zerotuning.config import Mode, ModelId, ZeroTuningConfig
from zerotuning.evaluation import ProgressBar
from zerotuning.metrics import Scores, histogram_entropy
from zerotuning.points import PointLog, run_identity
from zerotuning.profiling import (
    Combine,
    HeadProfile,
    Method,
    ProfilePlan,
    Tolerance,
    Unit,
    UnitKind,
    as_examples,
    check_data,
    check_passes,
    check_selection,
    unit_config,
)
from zerotuning.scoring import Criterion, Metric, Objective, Predictions, Scorer
from zerotuning.tasks import Example, TaskSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEFAULT_GRID = (0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
"""Symmetric in log gamma about 1. The paper's own full grid is not public."""

CalibrationMode = Literal["supervised", "unsupervised"]

REFINEMENTS = 6
"""Factors that refinement tries: they narrow the two steps around the best factor of the grid to an eleventh."""


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """One value of the grid.

    Attributes:
        gamma: The factor.
        value: What is maximised; an entropy counts negatively.
        scores: The four numbers with it; None without labels.
        label_counts: How often each label was read from an answer; what did not parse is missing.
        entropy: Mean entropy over the vocabulary, nats.
        label_entropy: Mean entropy over the label words, nats.
    """

    gamma: float
    value: float
    scores: Scores | None
    label_counts: tuple[int, ...]
    entropy: float
    label_entropy: float

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "gamma": self.gamma,
            "value": self.value,
            "label_counts": list(self.label_counts),
            "entropy": self.entropy,
            "label_entropy": self.label_entropy,
            **({} if self.scores is None else self.scores.to_json()),
        }


@dataclasses.dataclass(frozen=True)
class CalibrationResult:
    """What calibration found.

    Attributes:
        config: The chosen configuration; gamma 1 if nothing was better.
        gamma: Its factor (of up-effective units; the inverse belongs to down-effective ones when both are scaled).
        curve: What was found along the grid.
        mode: `"supervised"` or `"unsupervised"`.
        metric: What was maximised; an entropy counts negatively.
        profile: The head profile, if heads were profiled.
        warnings: What the user should know before he trusts the result.
    """

    config: ZeroTuningConfig
    gamma: float
    curve: tuple[CurvePoint, ...]
    mode: CalibrationMode
    metric: Criterion
    profile: HeadProfile | None
    warnings: tuple[str, ...]

    def plot(self, target: "str | os.PathLike[str] | Axes") -> None:
        """Draw what was found along gamma; see `zerotuning.plots.plot_curve`.

        Args:
            target: A file that ends in `.png` or `.svg`, or axes to draw into.
        """
        from zerotuning.plots import plot_curve

        plot_curve(self, target)

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "gamma": self.gamma,
            "mode": self.mode,
            "metric": self.metric,
            "curve": [point.to_json() for point in self.curve],
            "profile": None if self.profile is None else self.profile.to_json(),
            "warnings": list(self.warnings),
        }


def calibrate(
    model: nn.Module,
    tokenizer: Any,
    data: Sequence[Example | str],
    task: TaskSpec,
    *,
    mode: CalibrationMode = "supervised",
    metric: Metric = "accuracy",
    objective: Objective = "entropy",
    heads: Literal["uniform", "profile"] = "uniform",
    granularity: UnitKind = "head_index",
    method: Method = "exhaustive",
    profile: HeadProfile | None = None,
    grid: Sequence[float] = DEFAULT_GRID,
    refine: bool = False,
    layers: Sequence[int] | None = None,
    gamma_probe: float = 2.0,
    p: float = 0.4,
    combine: Combine = "dominant",
    tolerance: Tolerance | None = None,
    operator: Mode = "exact",
    seed: int = 0,
    answer_tokens: int = 1,
    batch_rows: int = 16,
    configs_per_pass: int = 1,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> CalibrationResult:
    """Choose heads and gamma by labelled texts, or by the model's own certainty on unlabelled ones.

    With `torch.distributed` initialised every process must call this with the same arguments; the prompts are shared
    out, every process gets the same result, and only the first one writes `resume` and shows progress.

    Args:
        model: A decoder-only transformers model.
        tokenizer: Its tokenizer.
        data: What to ask about, labelled for the supervised mode; the paper uses 500. Keep others for the evaluation.
        task: What to ask.
        mode: `"supervised"` maximises `metric`; `"unsupervised"` minimises `objective`, and keeps gamma 1, with a
            warning, where the minimum cannot be trusted: at an edge of the grid, or where answers collapse onto few
            labels (the entropy of how they spread, or the number of those that parse, falls by more than half).
        metric: What to maximise. Ties go to the gamma nearest 1.
        objective: What to minimise: mean entropy over the vocabulary, or over the label words.
        heads: `"uniform"` scales all heads; `"profile"` profiles units of heads and scales the effective ones.
        granularity: What a unit of the profile is.
        method: How to profile, see `HeadProfiler.run`. By gradient a supervised profile is of the log-likelihood of the
            true labels.
        profile: A profile made before, on which the heads are chosen; none is made then, and granularity and layers are
            its own.
        grid: Factors to try; 1 is always among them.
        refine: Go on between the neighbours of the best factor by golden-section search in log gamma.
        layers: The layers to scale; all if not given.
        gamma_probe: The factor for profiling; not 1.
        p: Share of the units to scale after profiling (paper: 40 %).
        combine: Which units to scale, see `HeadProfile.select`. With `"both"`, down-effective ones get 1/gamma.
        tolerance: When a unit is neutral, see `HeadProfile`.
        operator: See `ZeroTuningConfig.mode`.
        seed: For `combine="random"`.
        answer_tokens: How many tokens are generated to read the answer from and to average the entropy over.
        batch_rows: Rows in one forward.
        configs_per_pass: Configurations whose rows share batches; more than 1 fills a GPU when data are few.
        resume: A JSON Lines file to which every evaluated point is appended; points found there are not computed again.
        progress: Show a progress bar on standard error.

    Returns:
        The curve, the chosen configuration and warnings.

    Raises:
        ValueError: Empty data, single-class data or missing labels in the supervised mode, factors that are not finite
            and above 0, an unknown option, a profile of a model of another shape or of another operator, or a `resume`
            file that belongs to another run.
        RuntimeError: The model gave NaN under a configuration.
    """
    for name, value, offered in (
        ("mode", mode, get_args(CalibrationMode)),
        ("metric", metric, get_args(Metric)),
        ("objective", objective, get_args(Objective)),
        ("heads", heads, ("uniform", "profile")),
    ):
        if value not in offered:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, offered))}")
    check_passes(configs_per_pass)
    check_selection(p, combine)
    criterion: Criterion = metric if mode == "supervised" else objective
    examples = as_examples(data)
    check_data(task, examples, criterion)
    identity = ModelId.of(model)
    if profile is not None:
        if heads != "profile":
            raise ValueError(f"heads is {heads!r}, but a profile is given; with one it must be 'profile'")
        if tuple(profile.shape) != (identity.layers, identity.query_heads):
            raise ValueError(
                f"profile is of {profile.shape[0]} layers of {profile.shape[1]} query heads; the model has "
                f"{identity.layers} of {identity.query_heads}"
            )
        if profile.operator != operator:
            raise ValueError(f"operator is {operator!r}, but the profile is of {profile.operator!r}")
        granularity, layers = profile.granularity, profile.layers
    gammas = _checked_grid(grid)
    profiled: Criterion = "log_likelihood" if method == "gradient" and mode == "supervised" else criterion
    plan = ProfilePlan.of(identity, granularity, method, profiled, gamma_probe, layers, tolerance, operator)

    scorer = Scorer(model, tokenizer, task, examples, batch_rows=batch_rows, answer_tokens=answer_tokens)
    passes = (
        len(gammas) + (plan.passes if heads == "profile" and profile is None else 0) + (REFINEMENTS if refine else 0)
    )
    with (
        PointLog(resume, run_identity(scorer)) as log,
        ProgressBar(progress, len(examples) * passes, "calibrate") as advance,
    ):
        told = 0

        def count(prompts: int) -> None:
            nonlocal told
            told += prompts
            advance(prompts)

        def answers(configs: Sequence[ZeroTuningConfig]) -> list[Predictions]:
            return log.answers(scorer, configs, configs_per_pass=configs_per_pass, advance=count)

        warnings = []
        signs: dict[Unit, int] = {}
        if heads == "profile":
            if profile is None:
                profile = (
                    plan.by_measuring(answers, examples)
                    if method == "exhaustive"
                    else plan.by_gradient(model, tokenizer, task, examples, batch_rows, count)
                )
            signs = profile.select(p, combine, seed=seed)
            if not signs:
                warnings.append("no head changed the metric beyond its tolerance; nothing is scaled")
            gammas = _one_direction(gammas, signs, combine)
            if signs and gammas == [1.0]:
                warnings.append("the grid has no factor in the direction that the chosen units want; nothing is scaled")

        def config_of(gamma: float, meta: Mapping[str, Any] | None = None) -> ZeroTuningConfig:
            if heads == "uniform":
                return ZeroTuningConfig.uniform(identity, gamma, layers=layers, mode=operator, meta=meta)
            both = combine == "both"
            factors = {unit: 1 / gamma if both and sign < 0 else gamma for unit, sign in signs.items()}
            return unit_config(identity, granularity, factors, layers, operator=operator, meta=meta)

        def points(wanted: Sequence[float]) -> list[CurvePoint]:
            found = answers([config_of(gamma) for gamma in wanted])
            return [_point(gamma, each, examples, task, criterion) for gamma, each in zip(wanted, found, strict=True)]

        curve = points(gammas)
        if refine:
            curve = _refined(curve, points)
        advance(len(examples) * passes - told)

    best, doubts = _choose(curve, gammas, mode)
    warnings += doubts
    if len(examples) < 100:
        warnings.append(f"only {len(examples)} examples: the choice of gamma is mostly noise; use some hundreds")
    meta = {
        "calibration": {
            "task": task.name,
            "examples": len(examples),
            "mode": mode,
            "heads": heads,
            "gamma": best.gamma,
            "metric": criterion,
            "value": best.value,
            "vanilla": _vanilla(curve).value,
            "grid": list(gammas),
            **({} if profile is None else _profile_meta(profile, p, combine, signs)),
        }
    }
    config = config_of(best.gamma, meta)
    return CalibrationResult(config, best.gamma, tuple(curve), mode, criterion, profile, tuple(warnings))


def _checked_grid(grid: Sequence[float]) -> list[float]:
    for gamma in grid:
        if not (math.isfinite(gamma) and gamma > 0):
            raise ValueError(f"grid contains {gamma!r}; every gamma must be a finite number above 0")
    return sorted({1.0, *map(float, grid)})


def _one_direction(gammas: Sequence[float], signs: Mapping[Unit, int], combine: Combine) -> list[float]:
    """Above 1 for units that want more, below for those that want less."""
    if not signs:
        return [1.0]
    if combine == "both":
        return [gamma for gamma in gammas if gamma >= 1]
    up = next(iter(signs.values())) > 0
    return [gamma for gamma in gammas if gamma == 1 or (gamma > 1) == up]


def _point(
    gamma: float, predictions: Predictions, examples: Sequence[Example], task: TaskSpec, criterion: Criterion
) -> CurvePoint:
    labelled = all(example.label is not None for example in examples)
    values = predictions.values(criterion, examples)
    total = len(examples)
    return CurvePoint(
        gamma=gamma,
        value=math.fsum(values) / total,
        scores=predictions.scores(examples) if labelled else None,
        label_counts=predictions.label_counts(len(task.labels)),
        entropy=math.fsum(predictions.entropies) / total,
        label_entropy=math.fsum(predictions.label_entropies) / total,
    )


def _rank(point: CurvePoint) -> tuple[float, float, float]:
    """The best point has the largest; ties go to the gamma nearest 1."""
    return point.value, -abs(math.log(point.gamma)), point.gamma


def _vanilla(curve: Sequence[CurvePoint]) -> CurvePoint:
    return next(point for point in curve if point.gamma == 1)


def _choose(
    curve: Sequence[CurvePoint], gammas: Sequence[float], mode: CalibrationMode
) -> tuple[CurvePoint, list[str]]:
    """The point to keep, and what there is to say against it."""
    best = max(curve, key=_rank)
    at_edge = best.gamma != 1 and best.gamma in (min(gammas), max(gammas))
    if mode == "supervised":
        edge = f"the best gamma, {best.gamma:g}, is at the edge of the grid; a wider grid may find a better one"
        return best, [edge] if at_edge else []
    vanilla = _vanilla(curve)
    spread, before = histogram_entropy(best.label_counts), histogram_entropy(vanilla.label_counts)
    doubts = []
    if at_edge:
        doubts.append(
            f"the entropy is lowest at gamma {best.gamma:g}, an edge of the grid, where answers may only degenerate; "
            "gamma 1 is kept"
        )
    # A collapse onto no label leaves a few answers that parse, and these may spread as before.
    if spread < 0.5 * before or 2 * sum(best.label_counts) < sum(vanilla.label_counts):
        doubts.append(
            f"at gamma {best.gamma:g}, where the entropy is lowest, answers collapse onto few labels or none (counts "
            f"{list(best.label_counts)}, untouched {list(vanilla.label_counts)}); gamma 1 is kept"
        )
    return (vanilla if doubts else best), doubts


def _refined(curve: Sequence[CurvePoint], points: Callable[[Sequence[float]], list[CurvePoint]]) -> list[CurvePoint]:
    """Golden-section search in log gamma between the neighbours of the best point."""
    best = max(range(len(curve)), key=lambda index: _rank(curve[index]))
    if not 0 < best < len(curve) - 1:
        return list(curve)
    low, middle, high = (math.log(curve[index].gamma) for index in (best - 1, best, best + 1))
    inner = (math.sqrt(5) - 1) / 2

    def at(share: float) -> float:
        return float(f"{math.exp(low + share * (high - low)):.6g}")

    left, right = points([at(1 - inner), at(inner)])
    found = [left, right]
    for _ in range(REFINEMENTS - 2):
        # Counts are often equal; then the side that holds the best known point is kept.
        if left.value > right.value or (left.value == right.value and middle <= math.log(left.gamma)):
            high, right = math.log(right.gamma), left
            [left] = points([at(1 - inner)])
            found.append(left)
        else:
            low, left = math.log(left.gamma), right
            [right] = points([at(inner)])
            found.append(right)
    known = {point.gamma: point for point in [*found, *curve]}
    return [known[gamma] for gamma in sorted(known)]


def _profile_meta(profile: HeadProfile, p: float, combine: Combine, signs: Mapping[Unit, int]) -> dict[str, Any]:
    return {
        "granularity": profile.granularity,
        "method": profile.method,
        "gamma_probe": profile.gamma_probe,
        "p": p,
        "combine": combine,
        ("heads_scaled" if profile.granularity == "head_index" else "units_scaled"): sorted(
            list(unit) if isinstance(unit, tuple) else unit for unit in signs
        ),
    }
