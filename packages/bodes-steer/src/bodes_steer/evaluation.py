"""What steering does to generated texts: a judge's score, variety and fluency, paired with the plain model's texts."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from bodes_steer.judges import Judge, judge_scores
from bodes_steer.metrics import (
    PairedBootstrap,
    Perplexity,
    dist_n,
    paired_bootstrap,
    percentile,
    perplexity,
    win_rate,
)

if TYPE_CHECKING:
    from bodes_steer.steerers import Steerer

Positions = Literal["from_prompt_end", "last", "all"] | Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Texts:
    """What a model wrote under one condition, and what that is worth.

    Attributes:
        completions: One per prompt.
        scores: The judge's score of each.
        perplexity: Of the completions given their prompts, under the plain model.
        distinct: Share of distinct n-grams of words, by n (1, 2, 3).
    """

    completions: tuple[str, ...]
    scores: tuple[float, ...]
    perplexity: Perplexity
    distinct: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Mean score."""
        return sum(self.scores) / len(self.scores)

    @property
    def p90(self) -> float:
        """The score that a tenth of the completions exceeds."""
        return percentile(self.scores, 90)

    def to_json(self) -> dict[str, Any]:
        """A form for JSON, with None for what is not finite."""
        return {
            "mean": self.mean,
            "p90": self.p90,
            "perplexity": _json_number(self.perplexity.value),
            "distinct": {str(n): _json_number(value) for n, value in self.distinct.items()},
            "scores": list(self.scores),
            "completions": list(self.completions),
        }


@dataclasses.dataclass(frozen=True)
class GenerationReport:
    """The plain and the steered model on the same prompts.

    Attributes:
        prompts: What was asked.
        plain: Without steering.
        steered: With it.
        score: Change of the mean score, prompts drawn again in pairs.
        win_rate: Share of prompts whose steered completion scores higher than the plain one; a tie counts half.
    """

    prompts: tuple[str, ...]
    plain: Texts
    steered: Texts
    score: PairedBootstrap
    win_rate: float

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "prompts": list(self.prompts),
            "plain": self.plain.to_json(),
            "steered": self.steered.to_json(),
            "score": self.score.to_json(),
            "win_rate": self.win_rate,
        }

    def table(self) -> str:
        """Lines for people."""
        lines = [f"{'':<10}{'score':>9}{'P90':>9}{'perplexity':>12}{'dist-1':>8}{'dist-2':>8}{'dist-3':>8}"]
        for name, texts in (("plain", self.plain), ("steered", self.steered)):
            shares = "".join(f"{texts.distinct[n]:>8.3f}" for n in (1, 2, 3))
            lines.append(f"{name:<10}{texts.mean:>9.3f}{texts.p90:>9.3f}{texts.perplexity.value:>12.2f}{shares}")
        low, high = self.score.interval
        lines.append(
            f"score {self.score.difference:+.3f}, {self.score.confidence:.0%} interval {low:+.3f} to {high:+.3f}, "
            f"p = {self.score.p_value:.2g}; win rate {self.win_rate:.3f} over {len(self.prompts)} prompts"
        )
        return "\n".join(lines)


def evaluate_generation(
    model: nn.Module,
    tokenizer: Any,
    steerer: "Steerer",
    prompts: Sequence[str],
    judge: Judge,
    *,
    layer: int | None = None,
    T: float | None = None,  # noqa: N803  # the paper's name
    positions: Positions = "from_prompt_end",
    batch_size: int = 8,
    seed: int = 0,
    resamples: int = 10_000,
    fluency: tuple[nn.Module, Any] | None = None,
    progress: bool = True,
    **generate_kwargs: Any,
) -> GenerationReport:
    """Generate from the same prompts without and with steering, and compare.

    Both conditions go through the same code in the same batches, and begin each batch with the same random state, so
    that all differences come from the steering.

    Args:
        model: A decoder-only transformers model.
        tokenizer: Its tokenizer.
        steerer: A fitted steerer.
        prompts: What to complete, as the model is to see it (chat templates applied).
        judge: Scores the completions; larger is better.
        layer: Block after which to steer, counted from 0; None for the steerer's own.
        T: How far; None for the steerer's own.
        positions: Which positions to steer; see `steer`.
        batch_size: Prompts in one call of `generate`.
        seed: For sampling and for the bootstrap.
        resamples: Of the bootstrap.
        fluency: Another model and its tokenizer for the perplexity; None takes the plain model itself.
        progress: Show a bar on standard error.
        generate_kwargs: As for `model.generate`, for instance `max_new_tokens`.

    Returns:
        Texts, scores and the paired comparison.

    Raises:
        ValueError: There are no prompts, one is empty, `batch_size` or `resamples` is below 1, `seed` is negative, or
            `generate_kwargs` ask for several completions of a prompt; or see `steer`.
        JudgeError: See `judge_scores`.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

    from bodes_steer.model import SteeredModel

    if isinstance(prompts, str) or not prompts or not all(prompts):
        raise ValueError(f"prompts is {prompts!r}; it must be a list of one text or more, none of them empty")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    # What comes last is checked first: generating takes long.
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; it must be at least 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be at least 0")
    steered_model = SteeredModel(model, tokenizer, steerer, layer=layer, T=T, positions=positions)
    # With T = 0 the hook hands on what it is given, bit for bit.
    plain_model = SteeredModel(model, tokenizer, steerer, layer=layer, T=0.0, positions=positions)
    judged: list[Texts] = []
    with tqdm(total=2 * len(prompts), unit="text", disable=not progress) as bar:
        for each in (plain_model, steered_model):
            completions: list[str] = []
            for first in range(0, len(prompts), batch_size):
                batch = list(prompts[first : first + batch_size])
                with torch.random.fork_rng():
                    torch.manual_seed(seed + first)
                    written = each.generate(batch, **generate_kwargs)
                if len(written) != len(batch):
                    raise ValueError(
                        f"{len(written)} completions of {len(batch)} prompts; give each prompt as often as it is to be "
                        "completed, in place of num_return_sequences"
                    )
                completions += written
                bar.update(len(batch))
            judged.append(_judged(completions, prompts, judge, fluency or (model, tokenizer), batch_size))
    plain, steered = judged
    return GenerationReport(
        prompts=tuple(prompts),
        plain=plain,
        steered=steered,
        score=paired_bootstrap(plain.scores, steered.scores, resamples=resamples, seed=seed),
        win_rate=win_rate(steered.scores, plain.scores),
    )


def _judged(
    completions: Sequence[str], prompts: Sequence[str], judge: Judge, fluency: tuple[nn.Module, Any], batch_size: int
) -> Texts:
    return Texts(
        completions=tuple(completions),
        scores=tuple(judge_scores(judge, prompts, completions)),
        perplexity=perplexity(*fluency, prompts, completions, batch_size=batch_size),
        distinct={n: dist_n(completions, n) for n in (1, 2, 3)},
    )


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
