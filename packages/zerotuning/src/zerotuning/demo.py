"""The method on real text: calibrate on some film-review snippets, evaluate on others."""

import dataclasses
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from separata_kit.files import check_writable
from torch import nn

from zerotuning.calibration import CalibrationResult, calibrate
from zerotuning.config import ModelId
from zerotuning.evaluation import Evaluation, evaluate
from zerotuning.report import comparison_table, describe_choice, heads_of
from zerotuning.tasks import TASKS, Example

# Snippets rated nearer to neutral than this have no clear label.
_LEAST_RATING = 1.0

DEMO_GRID = (0.1, 0.25, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0, 10.0)
"""Half of the default grid, so that the demo takes under two minutes on two cores."""


def embedded() -> Any:
    """The package `separata_embedded`, which brings the default model and the texts.

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
            "the default model and texts need the extra 'demo': pip install 'zerotuning[demo]'; or give --model"
        ) from None
    return separata_embedded


@runtime_checkable
class RatedText(Protocol):
    """A text with a rating of its sentiment, negative to positive."""

    @property
    def rating(self) -> float:
        """Above 0 is positive."""

    @property
    def text(self) -> str:
        """The text."""


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes:
        model: What it ran on.
        dtype: The type of its weights.
        source: Where the texts are from.
        calibrated_on: Number of texts for calibration.
        evaluated_on: Number of other texts for evaluation.
        seed: Seed of the choice of texts.
        calibration: Curve, profile and chosen configuration.
        evaluation: Vanilla beside tuned.
        config_file: Where the configuration was written.
        seconds: How long calibration and evaluation took.
    """

    model: ModelId
    dtype: str
    source: str
    calibrated_on: int
    evaluated_on: int
    seed: int
    calibration: CalibrationResult
    evaluation: Evaluation
    config_file: Path
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "model": dataclasses.asdict(self.model),
            "dtype": self.dtype,
            "data": {"source": self.source, "calibration": self.calibrated_on, "test": self.evaluated_on},
            "seed": self.seed,
            "calibration": self.calibration.to_json(),
            "heads": heads_of(self.calibration),
            **self.evaluation.to_json(),
            "config": str(self.config_file),
            "seconds": round(self.seconds, 1),
        }


def choose_reviews(
    texts: Sequence[RatedText], tokenizer: Any, counts: tuple[int, int], *, max_tokens: int, seed: int
) -> tuple[list[Example], list[Example]]:
    """Choose disjoint sets, each half negative and half positive.

    Args:
        texts: Rated texts.
        tokenizer: Counts their tokens.
        counts: Wanted sizes of the two sets; if there are too few texts both shrink in proportion.
        max_tokens: Longer texts are left out.
        seed: Seed of the choice.

    Returns:
        The two sets; label 1 is positive.

    Raises:
        ValueError: The sizes are no positive even numbers, or fewer than two texts of each label are left.
    """
    if any(count < 2 or count % 2 for count in counts):
        raise ValueError(
            f"the numbers of texts are {counts}; they must be even and at least 2, to be half of each label"
        )
    clear = [each for each in texts if abs(each.rating) >= _LEAST_RATING]
    lengths = [len(ids) for ids in tokenizer([each.text for each in clear], add_special_tokens=False)["input_ids"]]
    # A text that occurs twice must not end up on both sides.
    short = dict.fromkeys(
        (each.text, int(each.rating > 0)) for each, length in zip(clear, lengths, strict=True) if length <= max_tokens
    )
    generator = random.Random(seed)  # noqa: S311  # a choice of examples, no secret
    by_label = []
    for label in (0, 1):
        examples = [Example(text, its) for text, its in short if its == label]
        generator.shuffle(examples)
        by_label.append(examples)
    available = min(map(len, by_label))
    if available < 2:
        raise ValueError(f"only {available} texts of a label have at most {max_tokens} tokens; allow longer ones")
    shrink = min(1.0, 2 * available / sum(counts))
    first = max(1, int(counts[0] / 2 * shrink))
    second = max(1, min(int(counts[1] / 2 * shrink), available - first))
    sets = []
    for low, high in ((0, first), (first, first + second)):
        chosen = [example for examples in by_label for example in examples[low:high]]
        generator.shuffle(chosen)
        sets.append(chosen)
    return sets[0], sets[1]


def run_demo(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[RatedText],
    *,
    source: str,
    out: Path,
    heads: Literal["uniform", "profile"] = "profile",
    calibration_items: int = 240,
    test_items: int = 400,
    max_tokens: int = 32,
    seed: int = 0,
    batch_rows: int = 16,
    progress: bool = True,
) -> DemoResult:
    """Calibrate on one part of the texts, evaluate on another, save the configuration.

    Args:
        model: A decoder-only transformers model.
        tokenizer: Its tokenizer.
        texts: Rated texts.
        source: Where they are from, for the report.
        out: Where the configuration is written.
        heads: As in `calibrate`.
        calibration_items: Number of texts to calibrate on.
        test_items: Number of other texts to evaluate on.
        max_tokens: Longer texts are left out.
        seed: Seed of the choice of texts.
        batch_rows: Rows in one forward.
        progress: Show progress bars on standard error.

    Returns:
        The result.

    Raises:
        ValueError: See `choose_reviews` and `calibrate`.
        OSError: `out` cannot be written.
    """
    check_writable(out)
    task = TASKS["mr"]
    chosen, held_out = choose_reviews(
        texts, tokenizer, (calibration_items, test_items), max_tokens=max_tokens, seed=seed
    )
    began = time.monotonic()
    found = calibrate(
        model, tokenizer, chosen, task, heads=heads, grid=DEMO_GRID, batch_rows=batch_rows, progress=progress
    )
    evaluation = evaluate(model, tokenizer, task, held_out, found.config, batch_rows=batch_rows, progress=progress)
    found.config.save(out)
    return DemoResult(
        model=found.config.model_id,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        source=source,
        calibrated_on=len(chosen),
        evaluated_on=len(held_out),
        seed=seed,
        calibration=found,
        evaluation=evaluation,
        config_file=out,
        seconds=time.monotonic() - began,
    )


def report(result: DemoResult) -> str:
    """The result for people.

    Args:
        result: What `run_demo` found.

    Returns:
        Several lines of text.
    """
    model = result.model
    lines = [
        f"{model.name or model.type}: {model.layers} layers of {model.query_heads} query heads, {result.dtype}",
        f"texts: {result.source}",
        f"calibrated on {result.calibrated_on} texts, evaluated on {result.evaluated_on} others (seed {result.seed}), "
        f"{result.seconds:.0f} s",
        "",
        describe_choice(result.calibration),
        *(f"note: {warning}" for warning in result.calibration.warnings),
        "",
        *comparison_table(result.evaluation),
        "",
        f"configuration: {result.config_file}",
    ]
    return "\n".join(lines)
