"""Watermarks side by side: how well each is found, before and after attacks, and what it costs."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from separata_kit.extras import load
from separata_kit.files import digest, write_json
from separata_kit.journal import Journal
from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

from pmark.attacks import Attack
from pmark.encoders import as_encoder
from pmark.metrics import Interval, auc, bootstrap, distinct_n, perplexity, rep_n, semantic_entropy, tpr_at_fpr
from pmark.samplers import Sampler
from pmark.sentence_watermark import DetectionResult, WatermarkedText

NO_ATTACK, HUMAN = "none", "human"
"""Names of the conditions besides the attacks."""
_COLUMNS = ("auc", "tpr_1", "tpr_5", "mean_z", "samples", "perplexity", "rep_3", "distinct_2", "entropy")


@runtime_checkable
class Method(Protocol):
    """What can be compared: `PMark`, `Unmarked`, the baselines, and whatever looks like them.

    Attributes:
        seed: Of the draws; `evaluate` sets it, on copies.
    """

    seed: int | None

    @property
    def settings(self) -> Mapping[str, Any]:
        """What tells methods apart, as JSON; nothing secret."""
        ...

    def generate_batch(self, sampler: Any, prompts: Sequence[str], *, max_sentences: int) -> list[WatermarkedText]:
        """Write a marked text for each prompt."""
        ...

    def detect_batch(
        self, texts: Sequence[str], *, prompts: Sequence[str | None] | None = None, sampler: Any = None
    ) -> list[DetectionResult]:
        """Test texts."""
        ...


@dataclass(frozen=True)
class Row:
    """One method under one attack; intervals are of 95 %, by bootstrap over texts.

    Attributes:
        method: Name of the method.
        attack: Name of the attack, or `NO_ATTACK`.
        auc: Area under the ROC curve, calibrated z of attacked against human texts.
        tpr_1: True-positive rate where at most 1 % of the human texts are called marked.
        tpr_5: The same at 5 %.
        mean_z: Mean of the plain z.
        samples: Continuations drawn for each sentence. This and all that follows is of the text before the attack.
        perplexity: Mean over texts, prompts excluded; None without a model, or where no text has a value.
        rep_3: Mean share of repeated trigrams.
        distinct_2: Share of different bigrams in all texts together.
        entropy: Semantic entropy (nats) of the sentences; None without an encoder, or with fewer than two sentences for
            each cluster.
    """

    method: str
    attack: str
    auc: Interval
    tpr_1: Interval
    tpr_5: Interval
    mean_z: Interval
    samples: Interval
    perplexity: Interval | None
    rep_3: Interval
    distinct_2: float
    entropy: float | None


@dataclass(frozen=True)
class Table:
    """What an evaluation found.

    Attributes:
        rows: One for each method and attack.
        scores: Calibrated z of each method's texts by condition: `HUMAN`, `NO_ATTACK` and the attacks, for pictures.
        settings: Numbers of texts and sentences, the seed, and each method's settings.
    """

    rows: tuple[Row, ...]
    scores: Mapping[str, Mapping[str, Sequence[float]]]
    settings: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON; an interval is its value, its low and its high end."""
        rows = [{name: _plain(getattr(row, name)) for name in ("method", "attack", *_COLUMNS)} for row in self.rows]
        return {
            "rows": rows,
            "scores": {name: dict(each) for name, each in self.scores.items()},
            "settings": self.settings,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON.

        Raises:
            OSError: The file cannot be written.
        """
        write_json(path, {"schema": "pmark/table", "version": 1, **self.to_json()})

    def text(self) -> str:
        """Return the table for reading, one line for each row, and a note where a rate has too few human texts."""
        lines: list[tuple[str, ...]] = [("method", "attack", *_COLUMNS)]
        lines += [(row.method, row.attack, *(_shown(getattr(row, name)) for name in _COLUMNS)) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        human = self.settings["human_texts"]
        if few := [name for name, texts in (("tpr_1", 100), ("tpr_5", 20)) if human < texts]:
            shown += ["", f"{' and '.join(few)}: only {human} human texts, so the threshold is the largest of them"]
        return "\n".join(shown)


def evaluate(
    methods: Mapping[str, Method],
    prompts: Sequence[str],
    human_texts: Sequence[str],
    attacks: Sequence[Attack] = (),
    *,
    sampler: Sampler | None,
    max_sentences: int = 12,
    journal: str | os.PathLike[str] | None = None,
    perplexity_model: tuple[Any, Any] | None = None,
    encoder: Any = None,
    clusters: int = 50,
    batch_size: int = 16,
    draws: int = 1000,
    seed: int = 0,
    progress: bool = True,
) -> Table:
    """Write texts with each method, attack them, and test them and human texts.

    Args:
        methods: By name.
        prompts: One for each text.
        human_texts: Unmarked texts, at least 100 for a rate of 1 %. Their first sentence counts as prompt.
        attacks: See `pmark.attacks`; prompts are left alone.
        sampler: The model; None if no method needs one.
        max_sentences: Generated sentences of a text.
        journal: File that keeps what was done, so that a run that was stopped goes on there; also with further methods
            and attacks. It knows attacks by name and methods by their settings, and neither the models nor what is
            secret or was measured (keys, nulls, centres): take another file for others.
        perplexity_model: A causal model of transformers and its tokenizer.
        encoder: Sentence encoder of the semantic entropy (extra `evaluation`), see `as_encoder`.
        clusters: Of the semantic entropy.
        batch_size: Texts handled together.
        draws: Resamples of the bootstrap.
        seed: Of everything that is drawn: the methods' own seeds are set aside.
        progress: Show a progress bar on standard error.

    Raises:
        ValueError: There are no methods, prompts or human texts, two attacks share a name, a number is below 1, or the
            journal belongs to another run.
        ImportError: There is an encoder, but the extra `evaluation` is not installed.
        OSError: The journal cannot be written.
    """
    for name, given in (("methods", methods), ("prompts", prompts), ("human_texts", human_texts)):
        if not given:
            raise ValueError(f"{name} is empty: there is nothing to compare")
    for name, number in (("clusters", clusters), ("batch_size", batch_size), ("draws", draws)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    if encoder is not None and len(prompts) * max_sentences >= 2 * clusters:
        # What is missing for the last step shows before the first.
        load("sklearn", "semantic_entropy needs", "pmark[evaluation]")
    named = {attack.name: attack for attack in attacks}
    if len(named) < len(attacks) or {NO_ATTACK, HUMAN} & set(named):
        raise ValueError(f"attacks must have names of their own, other than {NO_ATTACK!r} and {HUMAN!r}")
    header = {
        "prompts": digest(list(prompts)),
        "human_texts": digest(list(human_texts)),
        "max_sentences": max_sentences,
        "batch_size": batch_size,
        "seed": seed,
    }
    steps = len(methods) * (len(prompts) * (2 + len(named)) + len(human_texts))
    rows: list[Row] = []
    scores: dict[str, dict[str, list[float]]] = {}
    with (
        Journal(journal, header, schema="pmark/evaluation", version=1, what="journal of an evaluation") as done,
        tqdm(total=steps, disable=not progress, desc="evaluate", unit="text") as bar,
    ):

        def kept(key: str, size: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            if key not in done:
                done.append(key, work())
            bar.update(size)
            row = done.get(key)
            assert row is not None
            return row

        for name, method in methods.items():
            # Rows of a method whose settings have changed are written anew.
            tag = f"{name}/{digest(dict(method.settings))[:8]}"
            texts: list[dict[str, Any]] = []
            found: dict[str, list[dict[str, float]]] = {each: [] for each in (HUMAN, NO_ATTACK, *named)}
            for start in range(0, len(prompts), batch_size):
                own, some = _seeded(method, seed, start, 0), prompts[start : start + batch_size]
                work = partial(_write, own, sampler, some, max_sentences, perplexity_model)
                written = kept(f"{tag}/write/{start}", len(some), work)["texts"]
                texts += written
                for attack in (NO_ATTACK, *named):
                    work = partial(_test, own, sampler, written, named.get(attack), seed)
                    found[attack] += kept(f"{tag}/{attack}/{start}", len(some), work)["results"]
            for start in range(0, len(human_texts), batch_size):
                own, some = _seeded(method, seed, start, 1), human_texts[start : start + batch_size]
                human = [{"text": text, "opened": None} for text in some]
                work = partial(_test, own, sampler, human, None, seed)
                found[HUMAN] += kept(f"{tag}/{HUMAN}/{start}", len(some), work)["results"]
            scores[name] = {each: [one["calibrated"] for one in results] for each, results in found.items()}
            costs = _costs(texts, encoder, clusters, draws, seed)
            for attack in (NO_ATTACK, *named):
                pair = scores[name][attack], scores[name][HUMAN]
                rows.append(
                    Row(
                        method=name,
                        attack=attack,
                        auc=bootstrap(auc, *pair, draws=draws, seed=seed),
                        tpr_1=bootstrap(lambda a, b: tpr_at_fpr(a, b, 0.01), *pair, draws=draws, seed=seed),
                        tpr_5=bootstrap(lambda a, b: tpr_at_fpr(a, b, 0.05), *pair, draws=draws, seed=seed),
                        mean_z=bootstrap(np.mean, [each["z"] for each in found[attack]], draws=draws, seed=seed),
                        **costs,
                    )
                )
    settings = {
        **{name: value for name, value in header.items() if isinstance(value, int)},
        "texts": len(prompts),
        "human_texts": len(human_texts),
        "methods": {
            name: {key: _plain(value) for key, value in method.settings.items()} for name, method in methods.items()
        },
    }
    return Table(tuple(rows), scores, settings)


def _seeded(method: Method, *seed: int) -> Method:
    # Blocks of one seed would share their draws.
    other = copy.copy(method)
    other.seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return other


def _write(
    method: Method, sampler: Any, prompts: Sequence[str], max_sentences: int, judge: tuple[Any, Any] | None
) -> dict[str, Any]:
    texts = method.generate_batch(sampler, prompts, max_sentences=max_sentences)
    values: Sequence[float | None] = [None] * len(texts)
    if judge is not None:
        found = perplexity([each.text for each in texts], *judge, prompts=[each.prompt for each in texts])
        values = [float(value) if np.isfinite(value) else None for value in found]
    # No trace: pivots can be computed from many of them.
    rows = [
        {
            "text": each.text,
            "opened": each.prompt + each.opening,
            "sentences": each.sentences,
            "samples": each.samples,
            "perplexity": value,
        }
        for each, value in zip(texts, values, strict=True)
    ]
    return {"texts": rows}


def _test(
    method: Method, sampler: Any, written: Sequence[Mapping[str, Any]], attack: Attack | None, seed: int
) -> dict[str, Any]:
    texts, opened = [each["text"] for each in written], [each["opened"] for each in written]
    if attack is not None:
        texts = list(attack(texts, seed=seed, prompts=opened))
    results = method.detect_batch(texts, prompts=opened, sampler=sampler)
    row = {"results": [{"z": each.z, "calibrated": each.z_calibrated} for each in results]}
    return {**row, **({} if attack is None else {"texts": texts})}


def _costs(texts: Sequence[Mapping[str, Any]], encoder: Any, clusters: int, draws: int, seed: int) -> dict[str, Any]:
    bodies = [" ".join(each["sentences"]) for each in texts]
    sentences = [sentence for each in texts for sentence in each["sentences"]]
    samples = np.array([each["samples"] for each in texts], dtype=np.float64)
    counts = np.array([len(each["sentences"]) for each in texts])

    def per_sentence(index: np.ndarray) -> float:
        return float(samples[index.astype(int)].sum() / max(counts[index.astype(int)].sum(), 1))

    judged = [each["perplexity"] for each in texts if each["perplexity"] is not None]
    enough = encoder is not None and len(sentences) >= 2 * clusters
    return {
        "samples": bootstrap(per_sentence, np.arange(len(texts)), draws=draws, seed=seed),
        "perplexity": bootstrap(np.mean, judged, draws=draws, seed=seed) if judged else None,
        "rep_3": bootstrap(np.mean, [rep_n(each) for each in bodies], draws=draws, seed=seed),
        "distinct_2": distinct_n(bodies),
        "entropy": semantic_entropy(as_encoder(encoder).encode(sentences), clusters=clusters, seed=seed)
        if enough
        else None,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return list(value)
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _shown(value: Interval | float | None) -> str:
    if isinstance(value, Interval):
        return f"{value.value:.3g} [{value.low:.3g}, {value.high:.3g}]"
    return "-" if value is None else f"{value:.3g}"
