"""Answers of a model to a task under one or many configurations.

Prompts are sorted by length and padded on the right; the head is applied at the answer positions only; the tokens that
all prompts begin with (the instruction) go through the model once for each configuration. Rows of one batch may belong
to different configurations.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from zerotuning.adapter import apply, select_cache_rows
from zerotuning.config import ZeroTuningConfig
from zerotuning.metrics import UNPARSED, PairedComparison, Scores
from zerotuning.tasks import Example, TaskSpec, check_examples, is_one_token

# Below this many shared tokens the second forward costs more than it saves.
_SHORTEST_PREFIX = 8


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a model answered, one entry per item.

    Attributes:
        parsed: Label read from the generated token, `UNPARSED` if none.
        constrained: Most likely label word.
    """

    parsed: tuple[int, ...]
    constrained: tuple[int, ...]

    def scores(self, examples: Sequence[Example]) -> Scores:
        """The four numbers against the true labels.

        Args:
            examples: The items, in the same order.

        Returns:
            The scores.
        """
        return Scores.of([example.label for example in examples], self.parsed, self.constrained)


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
        examples: The items.
        vanilla: Answers of the untouched model.
        tuned: Answers under a configuration.

    Returns:
        The comparison.
    """

    def right(answers: Sequence[int]) -> list[bool]:
        return [answer == example.label for answer, example in zip(answers, examples, strict=True)]

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
        batch_rows: Rows in one forward.
        progress: Show a progress bar on standard error.

    Returns:
        The four numbers of both, and the paired comparisons.

    Raises:
        ValueError: The data are empty or have one label, or the configuration is for another model.
    """
    check_examples(task, data)
    config.check_fits(model)
    scorer = Scorer(model, tokenizer, task, [example.text for example in data], batch_rows=batch_rows)
    vanilla = ZeroTuningConfig.uniform(config.model_id, 1.0)
    with ProgressBar(progress, 2 * len(data), "evaluate") as advance:
        answers = [scorer.predict([each], advance=advance)[0] for each in (vanilla, config)]
    return compare(data, *answers)


class ProgressBar:
    """A tqdm bar of prompts on standard error, or nothing."""

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
            "disable": not enabled,
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


@dataclasses.dataclass(frozen=True)
class _Row:
    """One sequence to run: a prompt, with the tokens of a label behind it where that is to be scored."""

    item: int
    config: int
    label: int
    tokens: list[int]
    answer_at: int


class Scorer:
    """Prompts made ready once, to be answered under many configurations."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, task: TaskSpec, texts: Sequence[str], *, batch_rows: int = 16
    ) -> None:
        """Tokenise the prompts.

        Args:
            model: A decoder-only transformers model; put into evaluation mode while it runs.
            tokenizer: Its tokenizer.
            task: What to ask.
            texts: The texts to ask about.
            batch_rows: Rows in one forward.

        Raises:
            ValueError: `batch_rows` is below 1, there are no texts, or a prompt is longer than the model's positions.
        """
        if batch_rows < 1:
            raise ValueError(f"batch_rows is {batch_rows}; it must be at least 1")
        if not texts:
            raise ValueError("texts is empty")
        self.model: Any = model
        self.tokenizer, self.task, self.batch_rows = tokenizer, task, batch_rows
        self.label_tokens = task.label_tokens(tokenizer)
        self.one_token = is_one_token(task, self.label_tokens)
        prompts: list[list[int]] = tokenizer([task.prompt(text) for text in texts])["input_ids"]
        # Some tokenizers end every text; behind that no answer follows.
        end = tokenizer.eos_token_id
        self.prompts = [ids[:-1] if end is not None and ids[-1:] == [end] else ids for ids in prompts]
        longest = max(map(len, self.prompts)) + max(map(len, self.label_tokens))
        limit = getattr(model.config, "max_position_embeddings", None)
        if isinstance(limit, int) and longest > limit:
            raise ValueError(
                f"the longest prompt has {longest} tokens with its label; the model takes {limit}: shorten the texts"
            )
        self.prefix = _common_prefix(self.prompts)
        if len(self.prefix) < _SHORTEST_PREFIX:
            self.prefix = []

    @torch.inference_mode()
    def predict(
        self, configs: Sequence[ZeroTuningConfig], *, advance: Callable[[int], None] = lambda prompts: None
    ) -> list[Predictions]:
        """Answer all prompts under each configuration, the rows of all in shared batches.

        Args:
            configs: The configurations.
            advance: Told how many prompts were answered, each time some are.

        Returns:
            One set of answers for each configuration.
        """
        rows = [
            row
            for config in range(len(configs))
            for item in range(len(self.prompts))
            for row in self._rows(item, config)
        ]
        # Rows of one configuration stay together where lengths are equal.
        rows.sort(key=lambda row: (len(row.tokens), row.config))
        label_scores = torch.full((len(configs), len(self.prompts), len(self.label_tokens)), -torch.inf)
        generated = torch.zeros(len(configs), len(self.prompts), dtype=torch.long)
        was_training = self.model.training
        self.model.eval()
        try:
            cache = self._run_prefix(configs)
            done = 0
            for first in range(0, len(rows), self.batch_rows):
                batch = rows[first : first + self.batch_rows]
                for row, log_probs in zip(batch, self._answer_log_probs(configs, batch, cache), strict=True):
                    if self.one_token:
                        label_scores[row.config, row.item] = log_probs[0, [ids[0] for ids in self.label_tokens]]
                    else:
                        target = torch.tensor(self.label_tokens[row.label])
                        label_scores[row.config, row.item, row.label] = log_probs.gather(1, target[:, None]).sum()
                    generated[row.config, row.item] = log_probs[0].argmax()
                share = len(self.prompts) * len(configs) * (first + len(batch)) // len(rows)
                advance(share - done)
                done = share
        finally:
            self.model.train(was_training)
        return [
            Predictions(tuple(self._parse(token) for token in tokens.tolist()), tuple(scores.argmax(-1).tolist()))
            for tokens, scores in zip(generated, label_scores, strict=True)
        ]

    def _rows(self, item: int, config: int) -> list[_Row]:
        prompt = self.prompts[item][len(self.prefix) :]
        if self.one_token:
            return [_Row(item, config, 0, prompt, len(prompt) - 1)]
        return [
            _Row(item, config, label, prompt + ids[:-1], len(prompt) - 1) for label, ids in enumerate(self.label_tokens)
        ]

    def _run_prefix(self, configs: Sequence[ZeroTuningConfig]) -> Any:
        """The keys and values of the shared prefix, one row for each configuration; None if nothing is shared."""
        if not self.prefix:
            return None
        from transformers import DynamicCache

        device = self.model.get_input_embeddings().weight.device
        tokens = torch.tensor([self.prefix], device=device).expand(len(configs), -1)
        cache = DynamicCache(config=self.model.config)
        with apply(self.model, configs):
            self.model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return cache

    def _answer_log_probs(
        self, configs: Sequence[ZeroTuningConfig], batch: Sequence[_Row], cache: Any
    ) -> list[Float[Tensor, "positions vocab"]]:
        """Log-probabilities from the answer position of each row to its end, in float32 on the CPU."""
        device = self.model.get_input_embeddings().weight.device
        length = max(len(row.tokens) for row in batch)
        # On the right no token sees the padding, so what fills it is of no account and no mask is needed.
        tokens = torch.tensor(
            [row.tokens + row.tokens[-1:] * (length - len(row.tokens)) for row in batch], device=device
        )
        positions = sorted({at for row in batch for at in range(row.answer_at, len(row.tokens))})
        past = {}
        if cache is not None:
            cache = copy.deepcopy(cache)
            select_cache_rows(cache, torch.tensor([row.config for row in batch], device=device))
            past = {"past_key_values": cache, "use_cache": True}
        mask = torch.ones(len(batch), len(self.prefix) + length, dtype=torch.long, device=device)
        with apply(self.model, [configs[row.config] for row in batch]):
            logits = self.model(
                input_ids=tokens, attention_mask=mask, logits_to_keep=torch.tensor(positions, device=device), **past
            ).logits
        log_probs = []
        for index, row in enumerate(batch):
            wanted = [positions.index(at) for at in range(row.answer_at, len(row.tokens))]
            log_probs.append(logits[index, wanted].float().log_softmax(-1).cpu())
        return log_probs

    def _parse(self, token: int) -> int:
        label = self.task.parse(self.tokenizer.decode([token]))
        if label != UNPARSED or self.one_token:
            return label
        begun = [index for index, ids in enumerate(self.label_tokens) if ids[0] == token]
        return begun[0] if len(begun) == 1 else UNPARSED


def _common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The tokens that all prompts begin with, one less than the shortest has at most."""
    shortest = min(map(len, prompts))
    for length, tokens in enumerate(zip(*prompts, strict=False)):
        if len(set(tokens)) > 1 or length == shortest - 1:
            return list(prompts[0][:length])
    return []
