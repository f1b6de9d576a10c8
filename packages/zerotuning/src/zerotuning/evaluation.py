"""A configuration beside the untouched model, on the same items."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zerotuning import parallel
from zerotuning.config import ZeroTuningConfig
from zerotuning.metrics import PairedComparison, Scores
from zerotuning.scoring import Predictions, Scorer
from zerotuning.tasks import Example, TaskSpec, check_examples, true_labels


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Vanilla beside tuned on the same items.

    Attributes:
        vanilla: Scores of the untouched model.
        tuned: Scores under the configuration.
        accuracy: Paired comparison of the accuracies over all items.
        constrained_accuracy: The same for the label-constrained accuracies.
    """

    vanilla: Scores
    tuned: Scores
    accuracy: PairedComparison
    constrained_accuracy: PairedComparison

    @property
    def verdict(self) -> str:
        """`"helped"` or `"hurt"` where the paired test of the accuracy says so at 5 %, else `"no difference shown"`."""
        if self.accuracy.p_value >= 0.05:
            return "no difference shown"
        return "helped" if self.accuracy.difference > 0 else "hurt"

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "vanilla": self.vanilla.to_json(),
            "tuned": self.tuned.to_json(),
            "paired": {
                "accuracy": self.accuracy.to_json(),
                "constrained_accuracy": self.constrained_accuracy.to_json(),
            },
            "verdict": self.verdict,
        }


def compare(examples: Sequence[Example], vanilla: Predictions, tuned: Predictions) -> Evaluation:
    """Set two sets of answers against each other.

    Args:
        examples: The items, all labelled.
        vanilla: Answers of the untouched model.
        tuned: Answers under a configuration.

    Returns:
        The comparison.
    """
    labels = true_labels(examples)

    def right(answers: Sequence[int]) -> list[bool]:
        return [answer == label for answer, label in zip(answers, labels, strict=True)]

    return Evaluation(
        vanilla=vanilla.scores(examples),
        tuned=tuned.scores(examples),
        accuracy=PairedComparison.of(right(vanilla.parsed), right(tuned.parsed)),
        constrained_accuracy=PairedComparison.of(right(vanilla.constrained), right(tuned.constrained)),
    )


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    task: TaskSpec,
    data: Sequence[Example],
    config: ZeroTuningConfig,
    *,
    answer_tokens: int = 1,
    batch_rows: int = 16,
    progress: bool = False,
) -> Evaluation:
    """Compare a configuration with the untouched model on labelled texts.

    Args:
        model: A decoder-only transformers model.
        tokenizer: Its tokenizer.
        task: What to ask.
        data: Labelled texts that the configuration was not calibrated on.
        config: The configuration.
        answer_tokens: How many tokens are generated to read the answer from; as in the calibration.
        batch_rows: Rows in one forward.
        progress: Show a progress bar on standard error.

    Returns:
        The four numbers of both, and the paired comparisons.

    Raises:
        ValueError: The data are empty or have one label, or the configuration is for another model.
    """
    check_examples(task, data)
    config.check_fits(model)
    scorer = Scorer(
        model, tokenizer, task, data, batch_rows=batch_rows, answer_tokens=answer_tokens, reuse_layers=False
    )
    vanilla = ZeroTuningConfig.uniform(config.model_id, 1.0)
    with ProgressBar(progress, 2 * len(data), "evaluate") as advance:
        answers = [scorer.predict([each], advance=advance)[0] for each in (vanilla, config)]
    return compare(data, *answers)


class ProgressBar:
    """A tqdm bar of prompts on standard error, or nothing; of several processes the first one shows it."""

    def __init__(self, enabled: bool, total: int, description: str) -> None:
        """Make it; it shows from `with` on.

        Args:
            enabled: Whether to show it.
            total: Prompts to come.
            description: What is being done.
        """
        self._arguments = {
            "total": total,
            "desc": description,
            "unit": "prompt",
            "disable": not (enabled and parallel.is_first()),
            "dynamic_ncols": True,
        }

    def __enter__(self) -> Callable[[int], None]:
        """Show the bar and give the function that advances it."""
        from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

        self._bar = tqdm(**self._arguments)

        def advance(prompts: int) -> None:
            self._bar.update(prompts)

        return advance

    def __exit__(self, *_: object) -> None:
        """Close the bar."""
        self._bar.close()
