"""Head profiling: how the metric answers to each unit of heads, scaled alone (paper, section 4).

A unit is a head index jointly over the layers, as the authors profile, or one pair of layer and head, or one layer with
all its heads. A unit is "up-effective" if the metric rises with more attention on the initial token and
"down-effective" if it falls. The gradient method is not the paper's: it takes the derivative with respect to every
`log gamma` at gamma 1 from one backward pass, and what follows from it to first order for the probe.
"""

import dataclasses
import functools
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from zerotuning.config import Mode, ModelId, ZeroTuningConfig
from zerotuning.evaluation import ProgressBar
from zerotuning.metrics import sign_test
from zerotuning.points import PointLog, run_identity
from zerotuning.scoring import Criterion, Predictions, Scorer
from zerotuning.tasks import Example, TaskSpec, check_examples, check_unlabelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UnitKind = Literal["head_index", "layer_head", "layer"]
Unit = int | tuple[int, int]
"""A head index, a layer, or a pair (layer, head)."""

Combine = Literal["dominant", "up", "down", "both", "random"]
Method = Literal["exhaustive", "gradient"]
Tolerance = Literal["example", "sign_test"]
Kind = Literal["up", "down", "neutral"]

_OFFERED = {
    "granularity": get_args(UnitKind),
    "method": get_args(Method),
    "metric": get_args(Criterion),
    "tolerance": get_args(Tolerance),
    "operator": get_args(Mode),
}

NEUTRAL_P = 0.1
"""From this p-value of the paired sign test on, a unit is neutral."""


def unit_config(
    model: ModelId,
    granularity: UnitKind,
    factors: Mapping[Unit, float],
    layers: Sequence[int] | None = None,
    *,
    operator: Mode = "exact",
    meta: Mapping[str, Any] | None = None,
) -> ZeroTuningConfig:
    """The configuration that gives units their factors.

    Args:
        model: The model's description.
        granularity: What a unit is.
        factors: Factor of each unit; the others are left alone.
        layers: For head indices, the layers they stand for; all if not given.
        operator: See `ZeroTuningConfig.mode`.
        meta: See `ZeroTuningConfig`.

    Returns:
        The configuration.

    Raises:
        ValueError: A factor is not finite or not above 0, or a unit does not exist.
    """
    if granularity == "head_index":
        by_index = cast("Mapping[int, float]", factors)
        return ZeroTuningConfig.per_head(model, by_index, layers, mode=operator, meta=meta)
    if granularity == "layer":
        by_layer = cast("Mapping[int, float]", factors)
        return ZeroTuningConfig.per_layer(model, by_layer, mode=operator, meta=meta)
    by_pair = cast("Mapping[tuple[int, int], float]", factors)
    return ZeroTuningConfig.per_layer_head(model, by_pair, mode=operator, meta=meta)


@dataclasses.dataclass(frozen=True)
class HeadProfile:
    """How the metric answers to each unit, scaled alone.

    Attributes:
        granularity: What a unit is.
        shape: Layers and query heads of the model.
        layers: The layers that were profiled.
        method: `"exhaustive"`: measured. `"gradient"`: derivative times `log(gamma_probe)`.
        metric: What the deltas are changes of; larger is better.
        gamma_probe: The factor that each unit was given.
        baseline: The metric of the untouched model.
        deltas: Change of the metric for each unit, in the order of `units`.
        p_values: Paired sign test of each change over the items.
        tolerance: When a unit is neutral: `"example"`, a change of at most one item, or `"sign_test"`, a p-value of
            10 % or more.
        items: Number of items.
        operator: See `ZeroTuningConfig.mode`.
    """

    granularity: UnitKind
    shape: tuple[int, int]
    layers: tuple[int, ...]
    method: Method
    metric: Criterion
    gamma_probe: float
    baseline: float
    deltas: tuple[float, ...]
    p_values: tuple[float, ...]
    tolerance: Tolerance
    items: int
    operator: Mode = "exact"

    def __post_init__(self) -> None:
        """Check what a file may have wrong.

        Raises:
            ValueError: An option that is not offered, another shape than layers and heads, a layer that does not exist,
                a number that is not finite, or not as many deltas or p-values as units.
        """
        _check_offered(
            granularity=self.granularity,
            method=self.method,
            metric=self.metric,
            tolerance=self.tolerance,
            operator=self.operator,
        )
        layers, _ = self.shape
        numbers = (self.gamma_probe, self.baseline, *self.deltas, *self.p_values)
        if not all(map(math.isfinite, numbers)) or self.items < 1 or not set(self.layers) <= set(range(layers)):
            raise ValueError("a number is not finite, there are no items, or a layer does not exist")
        if not len(self.units) == len(self.deltas) == len(self.p_values):
            raise ValueError(
                f"{len(self.units)} units have {len(self.deltas)} deltas and {len(self.p_values)} p_values; there must "
                "be one of each for every unit"
            )

    @functools.cached_property
    def units(self) -> tuple[Unit, ...]:
        """The units, by layer first."""
        return profile_units(self.granularity, self.shape, self.layers)

    @property
    def table(self) -> Float[Tensor, "layers heads"]:
        """The deltas as a table of layers and query heads; nan in layers that were not profiled."""
        table = torch.full(self.shape, math.nan)
        for unit, delta in zip(self.units, self.deltas, strict=True):
            table[_places(self.granularity, unit, self.layers)] = delta
        return table

    @functools.cached_property
    def _places_of_units(self) -> dict[Unit, int]:
        return {unit: index for index, unit in enumerate(self.units)}

    def kind(self, unit: Unit) -> Kind:
        """Whether a unit wants more attention on the initial token, less, or does not matter.

        Args:
            unit: One of `units`.

        Returns:
            `"up"`, `"down"` or `"neutral"`.

        Raises:
            ValueError: There is no such unit.
        """
        index = self._places_of_units.get(unit)
        if index is None:
            raise ValueError(f"unit is {unit!r}; it must be one of the {len(self.units)} units of the profile")
        delta = self.deltas[index] if self.gamma_probe > 1 else -self.deltas[index]
        # Deltas of counts are multiples of one example, up to rounding.
        small = abs(delta) <= 1.001 / self.items if self.tolerance == "example" else self.p_values[index] >= NEUTRAL_P
        if small or delta == 0:
            return "neutral"
        return "up" if delta > 0 else "down"

    def select(self, p: float = 0.4, combine: Combine = "dominant", *, seed: int = 0) -> dict[Unit, int]:
        """Choose the units to scale.

        Args:
            p: Share of all units to take, by |delta|.
            combine: The type to take them from: `"up"`, `"down"`, `"both"`, or `"dominant"`, the one whose chosen units
                have the larger mean |delta|. `"random"` is the control: as many units as `"dominant"` takes, in the
                same direction, drawn from all.
            seed: Of the draw.

        Returns:
            The chosen units, each with +1 (gamma above 1) or -1 (below).

        Raises:
            ValueError: `p` is not in (0, 1], or `combine` is none of the five.
        """
        check_selection(p, combine)
        count = max(1, round(p * len(self.units)))
        delta = dict(zip(self.units, self.deltas, strict=True))
        kinds = {unit: self.kind(unit) for unit in self.units}
        # Equal ones in the order of the units.
        strongest = sorted(self.units, key=lambda unit: -abs(delta[unit]))
        sign = {"up": 1, "down": -1}
        if combine == "both":
            return {unit: sign[kinds[unit]] for unit in [u for u in strongest if kinds[u] != "neutral"][:count]}
        if combine == "random":
            dominant = self.select(p)
            drawn = random.Random(seed).sample(self.units, len(dominant))  # noqa: S311  # a control, no secret
            return dict(zip(drawn, dominant.values(), strict=True))
        top = {kind: [unit for unit in strongest if kinds[unit] == kind][:count] for kind in sign}
        if combine == "dominant":
            strength = {
                kind: sum(abs(delta[unit]) for unit in units) / max(1, len(units)) for kind, units in top.items()
            }
            combine = "up" if strength["up"] >= strength["down"] else "down"
        return dict.fromkeys(top[combine], sign[combine])

    def plot(self, target: "str | os.PathLike[str] | Axes") -> None:
        """Draw the profile as a heat map; see `zerotuning.plots.plot_profile`.

        Args:
            target: A file that ends in `.png` or `.svg`, or axes to draw into.
        """
        from zerotuning.plots import plot_profile

        plot_profile(self, target)

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            **dataclasses.asdict(self),
            "shape": list(self.shape),
            "layers": list(self.layers),
            "deltas": list(self.deltas),
            "p_values": list(self.p_values),
            "units": [list(unit) if isinstance(unit, tuple) else unit for unit in self.units],
            "kinds": [self.kind(unit) for unit in self.units],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "HeadProfile":
        """Read what `to_json` gave.

        Args:
            body: The JSON object.

        Returns:
            The profile.

        Raises:
            ValueError: It is no profile.
        """
        try:
            # Profiles were of the exact operator, and did not say so.
            body = {"operator": "exact", **body}
            fields: dict[str, Any] = {field.name: body[field.name] for field in dataclasses.fields(cls)}
            for name in ("shape", "layers", "deltas", "p_values"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no head profile: {error!r}") from None


class HeadProfiler:
    """Profiles the heads of one model on one task."""

    def __init__(self, model: nn.Module, tokenizer: Any, task: TaskSpec, data: Sequence[Example | str]) -> None:
        """Prepare; nothing is run yet.

        Args:
            model: A decoder-only transformers model.
            tokenizer: Its tokenizer.
            task: What to ask.
            data: What to ask about; labelled, unless the metric is an entropy.
        """
        self.model, self.tokenizer, self.task = model, tokenizer, task
        self.data = as_examples(data)

    def run(
        self,
        gamma_probe: float = 2.0,
        method: Method = "exhaustive",
        *,
        granularity: UnitKind = "head_index",
        metric: Criterion | None = None,
        layers: Sequence[int] | None = None,
        tolerance: Tolerance | None = None,
        operator: Mode = "exact",
        batch_rows: int = 16,
        configs_per_pass: int = 1,
        resume: str | os.PathLike[str] | None = None,
        progress: bool = False,
    ) -> HeadProfile:
        """Profile.

        Args:
            gamma_probe: The factor that each unit is given; not 1.
            method: `"exhaustive"` runs all data once for each unit; `"gradient"` (an extension of the paper) once
                forwards and once backwards in all.
            granularity: What a unit is.
            metric: What to look at. If not given: with all data labelled the accuracy (by gradient the log-likelihood
                of the true labels, as counts have no derivative), else the entropy.
            layers: The layers to profile; all if not given.
            tolerance: See `HeadProfile`; `"example"` for counts and `"sign_test"` for anything else if not given.
            operator: See `ZeroTuningConfig.mode`; the gradient is of `"exact"`.
            batch_rows: Rows in one forward.
            configs_per_pass: Configurations whose rows share batches.
            resume: A file of evaluated points, see `calibrate`; of no use to the gradient.
            progress: Show a progress bar on standard error.

        Returns:
            The profile.

        Raises:
            ValueError: Data that are empty, or lack the labels that the metric needs; an option that is not offered or
                does not fit the others.
        """
        labelled = all(example.label is not None for example in self.data)
        if metric is None:
            metric = ("accuracy" if method == "exhaustive" else "log_likelihood") if labelled else "entropy"
        check_passes(configs_per_pass)
        check_data(self.task, self.data, metric)
        plan = ProfilePlan.of(
            ModelId.of(self.model), granularity, method, metric, gamma_probe, layers, tolerance, operator
        )
        with ProgressBar(progress, len(self.data) * plan.passes, "profile") as advance:
            if method == "gradient":
                return plan.by_gradient(self.model, self.tokenizer, self.task, self.data, batch_rows, advance)
            scorer = Scorer(self.model, self.tokenizer, self.task, self.data, batch_rows=batch_rows)
            with PointLog(resume, run_identity(scorer)) as log:

                def answers(configs: Sequence[ZeroTuningConfig]) -> list[Predictions]:
                    return log.answers(scorer, configs, configs_per_pass=configs_per_pass, advance=advance)

                return plan.by_measuring(answers, self.data)


@dataclasses.dataclass(frozen=True)
class ProfilePlan:
    """What is to be profiled, checked."""

    identity: ModelId
    granularity: UnitKind
    method: Method
    metric: Criterion
    gamma_probe: float
    layers: tuple[int, ...]
    tolerance: Tolerance
    operator: Mode

    @classmethod
    def of(
        cls,
        identity: ModelId,
        granularity: UnitKind,
        method: Method,
        metric: Criterion,
        gamma_probe: float,
        layers: Sequence[int] | None,
        tolerance: Tolerance | None,
        operator: Mode,
    ) -> "ProfilePlan":
        """Check the options; see `HeadProfiler.run`."""
        counts = metric in ("accuracy", "constrained_accuracy")
        tolerance = tolerance or ("example" if counts else "sign_test")
        _check_offered(granularity=granularity, method=method, metric=metric, tolerance=tolerance, operator=operator)
        if not (math.isfinite(gamma_probe) and gamma_probe > 0 and gamma_probe != 1):
            raise ValueError(f"gamma_probe is {gamma_probe}; it must be a finite number above 0, and not 1")
        if method == "gradient" and counts:
            raise ValueError(f"metric is {metric!r}, which has no gradient; use 'log_likelihood' or an entropy")
        if method == "gradient" and operator != "exact":
            raise ValueError(f"operator is {operator!r}; the gradient is of 'exact'")
        if tolerance == "example" and not counts:
            raise ValueError(f"tolerance is 'example', but {metric!r} counts no examples; use 'sign_test'")
        if layers is not None and not layers:
            raise ValueError("layers is empty; leave it out for all layers")
        chosen = range(identity.layers) if layers is None else sorted(set(layers))
        for layer in chosen:
            if not 0 <= layer < identity.layers:
                raise ValueError(f"layer {layer} does not exist; the model has layers 0 to {identity.layers - 1}")
        return cls(
            identity,
            granularity,
            method,
            metric,
            gamma_probe,
            tuple(chosen),
            tolerance,
            operator,
        )

    @property
    def passes(self) -> int:
        """How often all data are run."""
        return 1 if self.method == "gradient" else 1 + len(self.units)

    @property
    def units(self) -> tuple[Unit, ...]:
        """What is to be profiled, lower layers first."""
        return profile_units(self.granularity, self._shape, self.layers)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.identity.layers, self.identity.query_heads

    def by_measuring(
        self, answers: Callable[[Sequence[ZeroTuningConfig]], list[Predictions]], data: Sequence[Example]
    ) -> HeadProfile:
        """Run everything once for each unit.

        Args:
            answers: Gives the answers under configurations.
            data: The items.

        Returns:
            The profile.
        """
        vanilla = ZeroTuningConfig.uniform(self.identity, 1.0, mode=self.operator)
        probes = [
            unit_config(self.identity, self.granularity, {unit: self.gamma_probe}, self.layers, operator=self.operator)
            for unit in self.units
        ]
        base, *probed = [each.values(self.metric, data) for each in answers([vanilla, *probes])]
        changes = [[after - before for before, after in zip(base, each, strict=True)] for each in probed]
        # Means before their difference, so that equal counts give exactly 0.
        deltas = [_mean(each) - _mean(base) for each in probed]
        return self._profile(_mean(base), deltas, changes)

    def by_gradient(
        self,
        model: nn.Module,
        tokenizer: Any,
        task: TaskSpec,
        data: Sequence[Example],
        batch_rows: int,
        advance: Callable[[int], None],
    ) -> HeadProfile:
        """Differentiate once.

        Args:
            model: The model.
            tokenizer: Its tokenizer.
            task: What to ask.
            data: The items.
            batch_rows: Rows in one forward.
            advance: Told how many prompts are done.

        Returns:
            The profile.
        """
        from zerotuning.gradient import log_gamma_gradients

        values, gradients = log_gamma_gradients(
            model, tokenizer, task, data, self.metric, batch_rows=batch_rows, advance=advance
        )
        gradients = gradients * math.log(self.gamma_probe)
        changes = [
            gradients[(slice(None), *_places(self.granularity, unit, self.layers))]
            .reshape(len(data), -1)
            .sum(1)
            .tolist()
            for unit in self.units
        ]
        return self._profile(float(values.mean()), [_mean(each) for each in changes], changes)

    def _profile(self, baseline: float, deltas: Sequence[float], changes: Sequence[Sequence[float]]) -> HeadProfile:
        return HeadProfile(
            granularity=self.granularity,
            shape=self._shape,
            layers=self.layers,
            method=self.method,
            metric=self.metric,
            gamma_probe=self.gamma_probe,
            baseline=baseline,
            deltas=tuple(deltas),
            p_values=tuple(
                sign_test(sum(value > 0 for value in each), sum(value < 0 for value in each)) for each in changes
            ),
            tolerance=self.tolerance,
            items=len(changes[0]),
            operator=self.operator,
        )


def profile_units(granularity: UnitKind, shape: tuple[int, int], layers: Sequence[int]) -> tuple[Unit, ...]:
    """All units, lower layers first.

    Args:
        granularity: What a unit is.
        shape: Layers and query heads of the model.
        layers: The layers to take them from.

    Returns:
        The units.
    """
    if granularity == "head_index":
        return tuple(range(shape[1]))
    if granularity == "layer":
        return tuple(layers)
    return tuple((layer, head) for layer in layers for head in range(shape[1]))


def _places(granularity: UnitKind, unit: Unit, layers: Sequence[int]) -> tuple[Any, Any]:
    """Where a unit lies in a table of layers and heads."""
    if isinstance(unit, tuple):
        return unit
    return (list(layers), unit) if granularity == "head_index" else (unit, slice(None))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def as_examples(data: Sequence[Example | str]) -> list[Example]:
    """Texts as examples without a label.

    Args:
        data: Examples or texts.

    Returns:
        Examples.
    """
    return [each if isinstance(each, Example) else Example(each) for each in data]


def check_data(task: TaskSpec, data: Sequence[Example], metric: Criterion) -> None:
    """Refuse data from which a metric cannot be told.

    Args:
        task: The task.
        data: The items.
        metric: The metric.

    Raises:
        ValueError: See `check_examples`, and for entropies `check_unlabelled`.
    """
    if metric in ("entropy", "label_entropy"):
        check_unlabelled(task, data)
    else:
        check_examples(task, data)


def check_passes(configs_per_pass: int) -> None:
    """Refuse less than one configuration at a time.

    Args:
        configs_per_pass: Configurations whose rows share batches.

    Raises:
        ValueError: It is below 1.
    """
    if configs_per_pass < 1:
        raise ValueError(f"configs_per_pass is {configs_per_pass}; it must be at least 1")


def _check_offered(**options: str) -> None:
    for name, value in options.items():
        if value not in _OFFERED[name]:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, _OFFERED[name]))}")


def check_selection(p: float, combine: str) -> None:
    """Refuse what `HeadProfile.select` cannot do.

    Args:
        p: See there.
        combine: See there.

    Raises:
        ValueError: See there.
    """
    if not 0 < p <= 1:
        raise ValueError(f"p is {p}; it must be above 0 and at most 1")
    if combine not in get_args(Combine):
        raise ValueError(f"combine is {combine!r}; it must be one of {', '.join(map(repr, get_args(Combine)))}")
