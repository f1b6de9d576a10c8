"""Contextual calibration of label words (Zhao et al. 2021, "Calibrate Before Use"): a baseline without attention.

A model favours some label words whatever the text. Asked about a text without content, its probabilities show by how
much; the probabilities of the label words are divided by these and normalised again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from zerotuning.config import ModelId, ZeroTuningConfig
from zerotuning.scoring import Predictions, Scorer
from zerotuning.tasks import Example, TaskSpec

CONTENT_FREE = ("N/A", "", "[MASK]")
"""The paper's texts without content."""


def calibrate_label_log_probs(
    label_log_probs: Float[Tensor, "items labels"], content_free: Float[Tensor, "inputs labels"]
) -> Float[Tensor, "items labels"]:
    """Divide the probabilities of the label words by those of texts without content (their equation 1, W diagonal).

    Args:
        label_log_probs: Log-probabilities (nats) of the label words of each item, normalised over the labels or not;
            -inf for labels that an item does not have.
        content_free: The same for texts without content; their normalised probabilities are averaged.

    Returns:
        Log-probabilities, normalised over the labels of each item.

    Raises:
        ValueError: There are no texts without content, or some label has probability 0 after all of them.
    """
    if not len(content_free):
        raise ValueError("content_free is empty; give at least one text without content")
    favour = content_free.log_softmax(-1).logsumexp(0)
    if not bool(favour.isfinite().all()):
        raise ValueError("content_free must give every label a probability above 0")
    return (label_log_probs.log_softmax(-1) - favour).log_softmax(-1)


def contextual_calibration(
    model: nn.Module,
    tokenizer: Any,
    task: TaskSpec,
    data: Sequence[Example | str],
    *,
    content_free: Sequence[str] = CONTENT_FREE,
    config: ZeroTuningConfig | None = None,
    batch_rows: int = 16,
) -> Predictions:
    """Answer with label words calibrated by texts without content.

    Args:
        model: A decoder-only transformers model.
        tokenizer: Its tokenizer.
        task: What to ask.
        data: What to ask about.
        content_free: Texts without content; for multiple choice they stand in place of question and choices.
        config: Run under this configuration; the untouched model if not given.
        batch_rows: Rows in one forward.

    Returns:
        The answers. As one of the label words is always chosen, all of them parse, as the chosen label.

    Raises:
        ValueError: There are no items or no texts without content.
    """
    if not content_free:
        raise ValueError("content_free is empty; give at least one text without content")
    used = ZeroTuningConfig.uniform(ModelId.of(model), 1.0) if config is None else config
    blank: list[Example | str] = [
        Example(text, choices=(text,) * len(task.labels)) if task.kind == "multiple_choice" else text
        for text in content_free
    ]
    plain, without = (
        Scorer(model, tokenizer, task, items, batch_rows=batch_rows, reuse_layers=False).predict([used])[0]
        for items in (data, blank)
    )
    calibrated = calibrate_label_log_probs(
        torch.tensor(plain.label_log_probs, dtype=torch.float64),
        torch.tensor(without.label_log_probs, dtype=torch.float64),
    )
    answers = dataclasses.replace(plain, label_log_probs=tuple(map(tuple, calibrated.tolist())))
    return dataclasses.replace(answers, parsed=answers.constrained)
