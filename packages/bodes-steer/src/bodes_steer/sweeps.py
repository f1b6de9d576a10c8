"""Which layer, which method, how strongly: tables of what each choice gives on held-out data."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from separata_kit.files import read_json_object, write_text
from separata_kit.journal import Journal
from torch import Tensor, nn

from bodes_steer.data import split_groups
from bodes_steer.steerers import Steerer, make_steerer

if TYPE_CHECKING:
    from bodes_steer.evaluation import Positions, Texts
    from bodes_steer.extraction import Activations
    from bodes_steer.judges import Judge

_SCHEMA = "bodes-steer/table"
_LOG_SCHEMA = "bodes-steer/sweep-points"
_VERSION = 1

UNTOUCHED = "none"
"""What the `method` column says of the row without steering."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One choice to be judged.

    Attributes:
        steerer: The fitted steerer; None for the model as it is.
        layer: The block whose output is steered, counted from 0.
        T: Strength, in the steerer's own unit; 0 without one.
        neg: Held-out activations of the negative class at that layer, `[rows, d]`.
        pos: Those of the positive class.
    """

    steerer: Steerer | None
    layer: int
    T: float
    neg: Float[Tensor, "negatives d"]
    pos: Float[Tensor, "positives d"]


Metric = Callable[[Point], Mapping[str, float]]
"""What judges a choice: it gives numbers by name, the same names each time."""


@dataclasses.dataclass(frozen=True)
class Table:
    """What a sweep found.

    Attributes:
        of: `"methods"` or `"layers"`.
        rows: One for each choice: its columns.
        gain: The column that is to be high.
        cost: The column that is to be low.
    """

    of: str
    rows: tuple[Mapping[str, Any], ...]
    gain: str
    cost: str

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in order."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def _check_columns(self, *names: str) -> None:
        for name in names:
            if name not in self.columns:
                raise ValueError(f"there is no column {name!r}; the columns are {self.columns}")

    def known(self, *names: str) -> list[Mapping[str, Any]]:
        """The rows that have a number in each of some columns.

        Args:
            names: The columns.

        Returns:
            Rows, in order; those where a number could not be had, such as the perplexity of nothing, are left out.
        """
        return [row for row in self.rows if all(row.get(name) is not None for name in names)]

    def pareto(self, *, gain: str | None = None, cost: str | None = None) -> list[Mapping[str, Any]]:
        """The rows that no other one beats: none is at least as good in both columns and better in one.

        Args:
            gain: The column that is to be high; `self.gain` if not given.
            cost: The column that is to be low; `self.cost` if not given.

        Returns:
            Rows, in order of the cost.

        Raises:
            ValueError: There is no such column.
        """
        gain, cost = gain or self.gain, cost or self.cost
        self._check_columns(gain, cost)
        # At one cost only the first of the best gains can stay, and then only one with a gain above all before it.
        known = self.known(gain, cost)
        order = sorted(known, key=lambda row: (float(row[cost]), -float(row[gain])))
        front: list[Mapping[str, Any]] = []
        for row in order:
            same = bool(front) and (row[gain], row[cost]) == (front[-1][gain], front[-1][cost])
            if not front or same or float(row[gain]) > float(front[-1][gain]):
                front.append(row)
        return front

    def best(self, *, most_cost: float = math.inf) -> Mapping[str, Any]:
        """The row with the highest gain.

        Args:
            most_cost: Rows that cost more are left out.

        Returns:
            The row; of equal ones the cheapest.

        Raises:
            ValueError: No row costs so little.
        """
        affordable = [row for row in self.known(self.gain, self.cost) if float(row[self.cost]) <= most_cost]
        if not affordable:
            raise ValueError(f"most_cost={most_cost}: no row has a lower {self.cost}")
        return max(affordable, key=lambda row: (float(row[self.gain]), -float(row[self.cost])))

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "schema": _SCHEMA,
            "version": _VERSION,
            "of": self.of,
            "gain": self.gain,
            "cost": self.cost,
            "rows": [dict(row) for row in self.rows],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Table":
        """Back from `to_json`.

        Args:
            body: What it gave.

        Returns:
            The table.

        Raises:
            ValueError: It is no such thing, or of a newer version.
        """
        if body.get("schema") != _SCHEMA:
            raise ValueError(f"it is no table of a sweep: its 'schema' is not {_SCHEMA!r}")
        if body.get("version") != _VERSION:
            raise ValueError(f"it has version {body.get('version')!r}; this bodes-steer reads version {_VERSION}")
        try:
            rows = tuple({str(name): value for name, value in row.items()} for row in body["rows"])
            table = cls(str(body["of"]), rows, str(body["gain"]), str(body["cost"]))
            # What no picture or choice could be made of.
            for row in table.rows:
                numbers = [row["layer"], *(row[name] for name in (table.gain, table.cost) if row[name] is not None)]
                if table.of == "methods":
                    numbers.append(row["T"])
                    str(row["method"])
                if not all(type(each) in (int, float) and math.isfinite(each) for each in numbers):
                    raise ValueError(f"not all of {numbers} are finite numbers")  # noqa: TRY301  # told like all that is wrong
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"it is no valid table ({type(error).__name__}: {error})") from None
        if not rows:
            raise ValueError("it is no valid table: it has no rows")
        return table

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Write it as JSON, whole or not at all.

        Args:
            path: The file.

        Raises:
            OSError: It cannot be written.
        """
        write_text(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "Table":
        """Read what `save` wrote.

        Args:
            path: The file.

        Returns:
            The table.

        Raises:
            ValueError: The file is no such table, truncated or of a newer version.
            OSError: It cannot be read.
        """
        body = read_json_object(path)
        try:
            return cls.from_json(body)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def probe_metric(point: Point) -> dict[str, float]:
    """Judge a choice without the model, by activations alone.

    A linear probe, fitted on every other held-out row, is asked about the rest: it has seen neither the rows on which
    the steerer was fitted nor those that are steered. It cannot tell whether the model still writes well; the length
    of the step stands in for that.

    Args:
        point: The choice.

    Returns:
        `shifted`: the share of steered negatives that the probe calls positive. `displacement`: the median length of
        the step, as a share of the activation's norm.
    """
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]  # scikit-learn ships no types

    rows = torch.cat([point.neg[::2], point.pos[::2]]).double()
    # A probe of whatever unit the model has.
    scale = float(rows.norm(dim=1).median()) or 1.0
    labels = [0] * len(point.neg[::2]) + [1] * len(point.pos[::2])
    probe = LogisticRegression(C=100.0, max_iter=1000).fit((rows / scale).numpy(), labels)
    before = point.neg[1::2]
    after = before if point.steerer is None else point.steerer.steer(before, point.T)
    length = ((after - before).norm(dim=1) / before.norm(dim=1).clamp_min(1e-12)).median()
    shifted = probe.predict((after.double() / scale).numpy()).mean()
    return {"shifted": float(shifted), "displacement": float(length)}


def written_texts(
    model: nn.Module,
    tokenizer: Any,
    steerer: Steerer,
    prompts: Sequence[str],
    judge: "Judge",
    *,
    layer: int | None = None,
    T: float | None = None,  # noqa: N803  # the paper's name
    positions: "Positions" = "from_prompt_end",
    batch_size: int = 8,
    seed: int = 0,
    advance: Callable[[int], object] = lambda texts: None,
    **generate_kwargs: Any,
) -> "Texts":
    """Let a model write under one condition, and judge it.

    Args:
        model: A decoder-only transformers model.
        tokenizer: Its tokenizer.
        steerer: A fitted steerer; with `T=0` the model writes as it does without.
        prompts: What to complete, as the model is to see it.
        judge: Scores the completions.
        layer: As for `steer`.
        T: As for `steer`.
        positions: As for `steer`.
        batch_size: Prompts in one call of `generate`.
        seed: Every batch begins with the same random state under every condition.
        advance: Told how many more texts are written.
        generate_kwargs: As for `model.generate`.

    Returns:
        What was written, its scores, its perplexity under the model as it is, and its variety.
    """
    from bodes_steer.evaluation import Texts
    from bodes_steer.judges import judge_scores
    from bodes_steer.metrics import dist_n, perplexity
    from bodes_steer.model import SteeredModel

    steered = SteeredModel(model, tokenizer, steerer, layer=layer, T=T, positions=positions)
    written: list[str] = []
    for first in range(0, len(prompts), batch_size):
        with torch.random.fork_rng():
            torch.manual_seed(seed + first)
            batch = list(prompts[first : first + batch_size])
            written += steered.generate(batch, **generate_kwargs)
        advance(len(batch))
    return Texts(
        completions=tuple(written),
        scores=tuple(judge_scores(judge, prompts, written)),
        perplexity=perplexity(model, tokenizer, prompts, written, batch_size=batch_size),
        distinct={n: dist_n(written, n) for n in (1, 2, 3)},
    )


def generation_metric(
    model: nn.Module, tokenizer: Any, prompts: Sequence[str], judge: "Judge", **options: Any
) -> Metric:
    """What judges a choice by what the model writes with it.

    Args:
        model: A decoder-only transformers model.
        tokenizer: Its tokenizer.
        prompts: What to complete, as the model is to see it.
        judge: Scores the completions; larger is better.
        options: Further arguments of `written_texts`.

    Returns:
        A metric that gives `score` (the mean), `perplexity` and `dist_2`; for `sweep(..., gain="score",
        cost="perplexity")`.
    """

    def metric(point: Point) -> dict[str, float]:
        # Without strength any steerer leaves the model as it is.
        steerer = point.steerer or make_steerer("caa").fit(point.pos, point.neg)
        texts = written_texts(model, tokenizer, steerer, prompts, judge, layer=point.layer, T=point.T, **options)
        return {"score": texts.mean, "perplexity": texts.perplexity.value, "dist_2": texts.distinct[2]}

    return metric


def strength_of(steerer: Steerer, share: float, rows: Float[Tensor, "rows d"]) -> float:
    """The strength whose step is a given share of the activations' norm.

    So that methods with units of their own are compared at steps of one length.

    Args:
        steerer: A fitted steerer.
        share: Length of the step by the median norm of the activations it was fitted on; negative values lead the other
            way.
        rows: Activations such as those that will be steered.

    Returns:
        T. For a method that interpolates towards its target (LinAcT) the share of the way, at most 1; for one without
        a strength (MiMiC) 1.

    Raises:
        ValueError: The vector that the steerer adds is zero, see `Steerer.absolute_T`.
    """
    if steerer.method == "mimic":
        return 1.0
    if steerer.method == "linact":
        whole = (steerer.steer(rows, 1.0) - rows).norm(dim=1).median() / rows.norm(dim=1).median()
        return min(1.0, max(0.0, share / float(whole))) if whole else 0.0
    return steerer.absolute_T(share)


def sweep(
    activations: "Activations | Mapping[int, tuple[Tensor, Tensor]]",
    *,
    layers: Sequence[int] | None = None,
    methods: Sequence[str] = ("caa", "step-odesteer", "odesteer"),
    Ts: Sequence[float] = (0.05, 0.1, 0.2),  # noqa: N803  # the paper's name
    relative: bool = True,
    metric: Metric | None = None,
    gain: str = "shifted",
    cost: str = "displacement",
    params: Mapping[str, Mapping[str, Any]] | None = None,
    groups: Sequence[str] | None = None,
    test_share: float = 0.25,
    seed: int = 0,
    resume: "str | os.PathLike[str] | None" = None,
    about: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Table:
    """Fit every method on every layer and judge it at every strength, on data that were held out.

    Args:
        activations: What `extract_activations` gave, with labels; or by layer the positive and the negative rows,
            `([positives, d], [negatives, d])`.
        layers: Which of its layers; all if not given.
        methods: Names of steerers, as in `bodes_steer.steerers.STEERERS`.
        Ts: Strengths.
        relative: Whether these are shares of the median activation norm (see `strength_of`), so that all methods take
            steps of one length, or each method's own T.
        metric: What judges a choice, for example by generating with it; `probe_metric` if not given. It is asked once
            about the model as it is, with no steerer.
        gain: The number of the metric that is to be high.
        cost: The number of the metric that is to be low.
        params: Parameters of methods, by name.
        groups: Of each text, in the order of the labels: those of one group are held out together.
        test_share: Share of the groups that is held out.
        seed: Seed of what is drawn: the held-out part and the sketches.
        resume: A file of judged choices, continued if it exists.
        about: What else the metric depends on, such as prompts and judge; a resumed file must agree.
        progress: Show a bar on standard error.

    Returns:
        The table: `layer`, `method`, `T`, `T_rel` (None where strengths are absolute) and the metric's numbers. The
        first row is the model as it is.

    Raises:
        ValueError: Unknown layers or methods, no strengths, a metric without `gain` or `cost`, or a file of another
            sweep.
        OSError: `resume` cannot be read or written.
    """
    if not methods or not Ts:
        raise ValueError(f"methods={list(methods)} and Ts={list(Ts)} must both name something")
    strengths = [float(each) for each in Ts]
    if not all(math.isfinite(each) for each in strengths):
        raise ValueError(f"Ts={strengths} must be finite numbers")
    options = {name: dict((params or {}).get(name, {})) for name in methods}
    if unknown := set(params or {}) - set(methods):
        raise ValueError(f"params are for {sorted(unknown)}, which are not among methods={list(methods)}")
    for name in methods:
        make_steerer(name, **options[name])  # a wrong name or parameter is told before the work
    by_layer = _pairs(activations, layers)
    judge = metric or probe_metric
    run = {
        "data": {str(layer): [_digest(each) for each in pair] for layer, pair in by_layer.items()},
        "groups": None if groups is None else _digest_text(json.dumps(list(groups))),
        "params": json.loads(json.dumps(options, sort_keys=True, default=str)),
        "relative": relative,
        "test_share": test_share,
        "seed": seed,
        "about": dict(about or {}),
    }
    named = dict.fromkeys(methods), dict.fromkeys(strengths)
    choices = [(layer, name, each) for layer in by_layer for name in named[0] for each in named[1]]
    rows: list[dict[str, Any]] = []
    log = Journal(resume, run, schema=_LOG_SCHEMA, version=_VERSION, what="file of judged choices")
    with log, _bar(progress, 1 + len(choices), "sweep") as bar:

        def judged(key: str, head: Mapping[str, Any], make: Callable[[], Point]) -> None:
            numbers = log.get(key)
            if numbers is None:
                point = make()
                # Of account only after fitting, so it is known here for the first time.
                head = {**head, "T": point.T}
                # JSON has no nan.
                found = {name: float(value) if math.isfinite(value) else None for name, value in judge(point).items()}
                for name in (gain, cost):
                    if name not in found:
                        raise ValueError(f"the metric gives {sorted(found)}, and not {name!r}")
                numbers = {**head, **found}
                log.append(key, numbers)
            rows.append(numbers)
            bar.update(1)

        first = next(iter(by_layer))
        parts = {layer: _parts(pair, groups, activations, test_share, seed) for layer, pair in by_layer.items()}
        judged(
            UNTOUCHED,
            {"layer": first, "method": UNTOUCHED, "T": 0.0, "T_rel": 0.0 if relative else None},
            lambda: Point(None, first, 0.0, parts[first].neg, parts[first].pos),
        )
        fitted: tuple[int, str, Steerer] | None = None
        for layer, name, strength in choices:
            part = parts[layer]

            def make(layer: int = layer, name: str = name, strength: float = strength, part: "Part" = part) -> Point:
                nonlocal fitted
                if fitted is None or fitted[:2] != (layer, name):
                    fitted = (layer, name, _fit(name, options[name], seed, part))
                steerer = fitted[2]
                T = strength_of(steerer, strength, part.fit_neg) if relative else strength  # noqa: N806  # the paper's name
                return Point(steerer, layer, T, part.neg, part.pos)

            head = {"layer": layer, "method": name, "T": 0.0, "T_rel": strength if relative else None}
            judged(f"{layer}/{name}/{strength!r}", head, make)
    return Table("methods", tuple(rows), gain, cost)


def sweep_layers(
    activations: "Activations | Mapping[int, tuple[Tensor, Tensor]]",
    *,
    layers: Sequence[int] | None = None,
    C: float = 1.0,  # noqa: N803  # scikit-learn's name
    groups: Sequence[str] | None = None,
    test_share: float = 0.25,
    seed: int = 0,
    sketch: bool = False,
    n_components: int = 8000,
    progress: bool = True,
) -> Table:
    """See how well each layer tells the classes apart, to choose one for steering.

    The paper chooses the layer by steering with CAA at each of them, which `sweep(methods=["caa"], metric=...)` does
    with a model; this is the cheap look before it.

    Args:
        activations: As for `sweep`.
        layers: Which of its layers; all if not given.
        C: Inverse strength of the regularisation of the probes.
        groups: As for `sweep`.
        test_share: Share of the groups that is held out.
        seed: Seed of what is drawn.
        sketch: Fit the nonlinear probe of ODESteer too, which takes longer.
        n_components: Its number of features.
        progress: Show a bar on standard error.

    Returns:
        The table, one row for each layer: `linear_accuracy` (held-out accuracy of a linear probe on the raw
        activations), `sketch_accuracy` (of ODESteer's probe), `caa_accuracy` (of the side of the middle between the two
        means on which a row lies), and `caa_length` (of the difference of the means, by the median activation norm).

    Raises:
        ValueError: Unknown layers, or a class without rows to hold out.
    """
    from bodes_steer.density_ratio import LogDensityRatio
    from bodes_steer.features import IdentityFeatures, PolynomialCountSketch

    by_layer = _pairs(activations, layers)
    rows = []
    with _bar(progress, len(by_layer), "sweep layers") as bar:
        for layer, pair in by_layer.items():
            part = _parts(pair, groups, activations, test_share, seed)
            fit_rows = torch.cat([part.fit_neg, part.fit_pos])
            fit_labels = torch.tensor([0] * len(part.fit_neg) + [1] * len(part.fit_pos))
            test_rows = torch.cat([part.neg, part.pos])
            test_labels = torch.tensor([0] * len(part.neg) + [1] * len(part.pos))
            row: dict[str, Any] = {"layer": layer}
            maps: dict[str, Any] = {"linear_accuracy": IdentityFeatures()}
            if sketch:
                maps["sketch_accuracy"] = PolynomialCountSketch(n_components=n_components, random_state=seed)
            for name, features in maps.items():
                probe = LogDensityRatio(features, C=C, random_state=seed).fit(fit_rows, fit_labels)
                row[name] = float(probe.score(test_rows, test_labels))
            means = part.fit_pos.mean(0), part.fit_neg.mean(0)
            side = (test_rows - (means[0] + means[1]) / 2) @ (means[0] - means[1]) > 0
            row["caa_accuracy"] = float((side == test_labels.bool()).double().mean())
            row["caa_length"] = float((means[0] - means[1]).norm() / fit_rows.norm(dim=1).median())
            rows.append(row)
            bar.update(1)
    # Of layers that are equally good the first: what it learns has the most blocks left to work in.
    return Table("layers", tuple(rows), "linear_accuracy", "layer")


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows of a layer.

    Attributes:
        fit_pos: `[rows, d]`, positives to fit on.
        fit_neg: `[rows, d]`, negatives to fit on.
        pos: `[rows, d]`, held-out positives.
        neg: `[rows, d]`, held-out negatives.
    """

    fit_pos: Float[Tensor, "positives d"]
    fit_neg: Float[Tensor, "negatives d"]
    pos: Float[Tensor, "test_positives d"]
    neg: Float[Tensor, "test_negatives d"]


def held_out_parts(
    activations: "Activations | Mapping[int, tuple[Tensor, Tensor]]",
    layer: int,
    *,
    groups: Sequence[str] | None = None,
    test_share: float = 0.25,
    seed: int = 0,
) -> Part:
    """Hold some rows of a layer out.

    Args:
        activations: As for `sweep`.
        layer: Which layer.
        groups: As for `sweep`.
        test_share: As for `sweep`.
        seed: As for `sweep`; the same seed holds the same texts out at every layer.

    Returns:
        The rows.

    Raises:
        ValueError: As `sweep`.
    """
    return _parts(_pairs(activations, [layer])[layer], groups, activations, test_share, seed)


def _pairs(
    activations: "Activations | Mapping[int, tuple[Tensor, Tensor]]", layers: Sequence[int] | None
) -> dict[int, tuple[Tensor, Tensor]]:
    known = list(activations) if isinstance(activations, Mapping) else list(activations.layers)
    wanted = known if layers is None else list(dict.fromkeys(layers))
    if missing := [each for each in wanted if each not in known]:
        raise ValueError(f"layers={missing} are not among those of the activations: {known}")
    if not wanted:
        raise ValueError("there is no layer to look at")
    read = activations.__getitem__ if isinstance(activations, Mapping) else activations.pair
    return {layer: read(layer) for layer in wanted}


def _parts(
    pair: tuple[Tensor, Tensor],
    groups: Sequence[str] | None,
    activations: "Activations | Mapping[int, tuple[Tensor, Tensor]]",
    test_share: float,
    seed: int,
) -> Part:
    pos, neg = pair
    texts, marks = _texts_of(activations, groups)
    if groups is None:
        # Of each class its share; the rows of one text stay together.
        of_pos, of_neg = (
            [f"row {index}" for index in range(len(rows))]
            if texts is None
            else [str(text) for text, mark in zip(texts, marks, strict=True) if mark == label]
            for label, rows in ((1, pos), (0, neg))
        )
        halves = [split_groups(of_pos, test_share, seed), split_groups(of_neg, test_share, seed)]
    else:
        held_out = {groups[index] for index in split_groups(groups, test_share, seed)[1]}
        halves = []
        for label in (1, 0):
            own = [groups[text] in held_out for text, mark in zip(texts or (), marks, strict=True) if mark == label]
            halves.append(([i for i, out in enumerate(own) if not out], [i for i, out in enumerate(own) if out]))
    for (fit, held), word in zip(halves, ("positive", "negative"), strict=True):
        if len(fit) < 1 or len(held) < 2:
            raise ValueError(
                f"{len(fit)} {word} rows to fit on and {len(held)} held out are too few; at least 1 and 2 are needed"
            )
    return Part(pos[halves[0][0]], neg[halves[1][0]], pos[halves[0][1]], neg[halves[1][1]])


def _texts_of(
    activations: "Activations | Mapping[int, tuple[Tensor, Tensor]]", groups: Sequence[str] | None
) -> tuple[list[int] | None, list[int]]:
    """The text and the label of each row; no texts where rows came without."""
    labels = None if isinstance(activations, Mapping) else activations.labels
    if isinstance(activations, Mapping) or labels is None:
        if groups is not None:
            raise ValueError("groups are for activations that have labels, in whose order they are")
        return None, []
    if groups is not None and len(groups) != len(labels):
        raise ValueError(f"there are {len(groups)} groups for {len(labels)} texts")
    return activations.text_index.tolist(), labels[activations.text_index].tolist()


def _fit(name: str, options: Mapping[str, Any], seed: int, part: Part) -> Steerer:
    steerer = make_steerer(name, **options)
    if "random_state" in steerer.get_params() and "random_state" not in options:
        steerer.set_params(random_state=seed)
    return steerer.fit(part.fit_pos, part.fit_neg)


def _bar(enabled: bool, total: int, description: str) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

    return tqdm(total=total, desc=description, unit="row", disable=not enabled, dynamic_ncols=True)


def _digest(rows: Tensor) -> str:
    """Of the shape and of a few rows: enough to tell data apart without reading a whole file of activations."""
    some = rows[torch.linspace(0, len(rows) - 1, min(64, len(rows))).round().long()].float().contiguous()
    return _digest_text(f"{tuple(rows.shape)} {some.tolist()}")


def _digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
