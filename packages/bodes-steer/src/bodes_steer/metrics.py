"""What generated texts and scored answers are measured by, with paired uncertainty.

Two versions of a model are always compared on the same prompts or questions, pairwise: a steered model answers most of
them as the plain one does, so that the difference is known far better than either mean.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from separata_core.models import logit_scaling, output_projection
from separata_core.vocab import vocab_log_probs
from torch import Tensor, nn

_IGNORED = -100

# Numbers of one block of resamples: enough for the loop to cost nothing, little memory.
_BLOCK = 2**20


def dist_n(texts: Sequence[str], n: int) -> float:
    """Share of distinct n-grams among all n-grams of whitespace-separated words, over all texts together.

    Args:
        texts: Completions.
        n: Words in an n-gram.

    Returns:
        Between 0 and 1; nan if no text has n words.

    Raises:
        ValueError: `n` is below 1, or `texts` is a single string.
    """
    if n < 1:
        raise ValueError(f"n is {n}; it must be at least 1")
    total, distinct = 0, set()
    for text in _texts("texts", texts):
        words = text.split()
        grams = [tuple(words[first : first + n]) for first in range(len(words) - n + 1)]
        total += len(grams)
        distinct.update(grams)
    return len(distinct) / total if total else math.nan


def win_rate(scores: Sequence[float], baseline: Sequence[float]) -> float:
    """Share of prompts whose score beats the baseline's; a tie counts half, as in the paper.

    Args:
        scores: One score per prompt; larger is better.
        baseline: The baseline's scores of the same prompts.

    Returns:
        Between 0 and 1; 0.5 for two equal models.

    Raises:
        ValueError: The lengths differ, there are no scores, or one is not finite.
    """
    ours, theirs = _pairs(scores, baseline, "scores", "baseline")
    return float(np.mean((ours > theirs) + 0.5 * (ours == theirs)))


def percentile(scores: Sequence[float], percent: float = 90.0) -> float:
    """The value below which so many per cent of the scores lie, linearly interpolated (P90 of a reward by default).

    Args:
        scores: One score per completion.
        percent: Between 0 and 100.

    Returns:
        The percentile.

    Raises:
        ValueError: There are no scores, one is not finite, or `percent` lies outside 0 to 100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}; it must lie between 0 and 100")
    return float(np.percentile(_numbers("scores", scores), percent))


def true_and_informative(truthful: Sequence[float], informative: Sequence[float], *, threshold: float = 0.5) -> float:
    """True x Info: the share of answers that are judged truthful and informative, both.

    Args:
        truthful: The truth judge's score of each answer.
        informative: The information judge's score of the same answers.
        threshold: A score counts as a yes where it is larger.

    Returns:
        Between 0 and 1. This is the share of answers judged both, not the product of two shares.

    Raises:
        ValueError: The lengths differ, there are no scores, or one is not finite.
    """
    first, second = _pairs(truthful, informative, "truthful", "informative")
    return float(np.mean((first > threshold) & (second > threshold)))


@dataclasses.dataclass(frozen=True)
class PairedBootstrap:
    """How much a mean changes between two conditions on the same units.

    Attributes:
        before: Mean under the first condition.
        after: Mean under the second.
        interval: Percentile interval of `difference` at `confidence`.
        p_value: Two-sided: twice the smaller share of resampled differences on either side of 0, at most 1; no smaller
            than 2 / (resamples + 1), nor than 2 / 2^units, the least that a test by signs gives so few units.
        units: Number of units (questions, prompts).
        resamples: How often the units were drawn again.
        confidence: Coverage of `interval`.
    """

    before: float
    after: float
    interval: tuple[float, float]
    p_value: float
    units: int
    resamples: int
    confidence: float

    @property
    def difference(self) -> float:
        """`after - before`."""
        return self.after - self.before

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        found = {**dataclasses.asdict(self), "difference": self.difference}
        return {**found, "interval": list(self.interval)}


def paired_bootstrap(
    before: Sequence[float],
    after: Sequence[float],
    *,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> PairedBootstrap:
    """Bootstrap of a difference of means, units drawn again in pairs (Efron and Tibshirani 1993, chapters 13 and 16).

    Args:
        before: One value per unit under the first condition.
        after: The values of the same units under the second.
        resamples: How often to draw as many units as there are, with replacement.
        confidence: Coverage of the interval, between 0 and 1.
        seed: The same seed draws the same units, so that several comparisons on the same units share their resamples.

    Returns:
        The difference with its percentile interval and two-sided p-value.

    Raises:
        ValueError: The lengths differ, there are no values, one is not finite, or a number is out of range.
    """
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; it must be at least 1")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must lie between 0 and 1")
    first, second = _pairs(before, after, "before", "after")
    change, units = second - first, len(first)
    generator = np.random.default_rng(seed)
    rows = max(1, _BLOCK // units)
    means = np.concatenate(
        [
            change[generator.integers(units, size=(min(rows, resamples - done), units))].mean(1)
            for done in range(0, resamples, rows)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    # Rounding of a mean of zeros and cancelled ones must not decide on which side of 0 it lies.
    means[np.abs(means) <= 1e-12 * np.abs(change).max()] = 0.0
    sides = min(int((means <= 0).sum()), int((means >= 0).sum()))
    return PairedBootstrap(
        before=float(first.mean()),
        after=float(second.mean()),
        interval=(float(low), float(high)),
        # Of few units that all change alike every resample changes alike, which shows little.
        p_value=min(1.0, max(2 * (sides + 1) / (resamples + 1), 2.0 ** (1 - units))),
        units=units,
        resamples=resamples,
        confidence=confidence,
    )


def encode_pair(tokenizer: Any, prompt: str, completions: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Tokens of a prompt, once, and of what follows it in each text `prompt + completion`.

    Each text is tokenised whole. What all of them share with the tokens of the prompt alone is the prompt; where a
    tokenizer merges characters across the border, the token in which they meet belongs to the completions, in all of
    them. Where nothing of the prompt or of a completion would be left, prompt and completions are tokenised apart. An
    end token that the tokenizer appends is dropped.

    Args:
        tokenizer: A transformers tokenizer.
        prompt: What comes first.
        completions: What may follow.

    Returns:
        The prompt's token ids, and those of each completion.

    Raises:
        ValueError: The prompt has no tokens, or a completion has none.
    """
    head, *texts = (_ids(tokenizer, text) for text in (prompt, *(prompt + each for each in completions)))
    shared = len(head)
    for text in texts:
        while head[:shared] != text[:shared]:
            shared -= 1
    rests = [text[shared:] for text in texts]
    if not shared or not all(rests):
        shared = len(head)
        rests = [_ids(tokenizer, completion, add_special_tokens=False) for completion in completions]
    if not shared:
        raise ValueError(
            f"prompt {prompt!r} has no tokens; give one of a token or more, or a tokenizer that begins each text with "
            "a token"
        )
    for rest, completion in zip(rests, completions, strict=True):
        if not rest:
            raise ValueError(f"completion {completion!r} adds no token to prompt {prompt!r}; leave it out")
    return head[:shared], rests


def _ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    ids: list[int] = list(tokenizer(text, **options)["input_ids"])
    end = tokenizer.eos_token_id
    # A text that is the end token alone, as for an empty prompt of GPT-2, keeps it: it stands for the beginning.
    return ids[:-1] if len(ids) > 1 and end is not None and ids[-1] == end and end != tokenizer.bos_token_id else ids


def completion_log_probs(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    batch_size: int = 8,
) -> list[Float[Tensor, " tokens"]]:
    """Log-probability of each token of each completion, given its prompt and the tokens before.

    No tensor of [tokens, vocabulary] is made: the model's logits are asked for one position only, and the head is
    applied in tiles to the hidden states of the completions' tokens.

    Args:
        model: A decoder-only transformers model with its head.
        tokenizer: Its tokenizer.
        prompts: One prompt per completion, of a token or more (see `encode_pair`).
        completions: What follows each, without a space between.
        batch_size: Rows in one forward; rows are sorted by length and padded on the right.

    Returns:
        For each completion one float32 tensor (float64 for a float64 model), in nats, on the CPU.

    Raises:
        ValueError: The lengths differ, `batch_size` is below 1, or see `encode_pair` and `output_projection`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    prompts, completions = _texts("prompts", prompts), _texts("completions", completions)
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions; they must be as many")
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        head, [rest] = encode_pair(tokenizer, prompt, [completion])
        rows.append((head, rest))
    order = sorted(range(len(rows)), key=lambda row: len(rows[row][0]) + len(rows[row][1]))
    found: dict[int, Tensor] = {}
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for first in range(0, len(order), batch_size):
                places = order[first : first + batch_size]
                found.update(zip(places, _forward([rows[place] for place in places], model, device), strict=True))
    finally:
        model.train(was_training)
    return [found[row] for row in range(len(rows))]


def _forward(rows: Sequence[tuple[list[int], list[int]]], model: nn.Module, device: torch.device) -> list[Tensor]:
    longest = max(len(head) + len(rest) for head, rest in rows)
    # Any token will do as padding: no real token sees what lies behind it.
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    targets = torch.full_like(tokens, _IGNORED)
    for row, (head, rest) in enumerate(rows):
        length = len(head) + len(rest)
        tokens[row, :length] = torch.tensor([*head, *rest])
        mask[row, :length] = 1
        targets[row, len(head) - 1 : length - 1] = torch.tensor(rest)
    hidden = head_input(model, input_ids=tokens.to(device), attention_mask=mask.to(device), use_cache=False)
    wanted = targets != _IGNORED
    scored = head_log_probs(model, hidden[wanted.to(hidden.device)], targets[wanted])
    return list(torch.split(scored, [len(rest) for _, rest in rows]))


def head_input(model: nn.Module, **inputs: Any) -> Float[Tensor, "rows tokens hidden"]:
    """Run a model and return what its output projection would be applied to, at every position.

    Args:
        model: A decoder-only transformers model with its head.
        inputs: Arguments of its forward.

    Returns:
        Final hidden states. Logits are computed for the last position at most where the model can leave them out.

    Raises:
        ValueError: The model has no output projection (see `separata_core.models.output_projection`).
    """
    weight, _ = output_projection(model)
    owner = next(module for module in model.modules() if getattr(module, "weight", None) is weight and _is_head(module))
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.append(args[0])
        return (args[0][:, -1:], *args[1:])

    handle = owner.register_forward_pre_hook(keep)
    try:
        model(**inputs)
    finally:
        handle.remove()
    return seen[-1]


def _is_head(module: nn.Module) -> bool:
    # A tied embedding has the same weight.
    return not isinstance(module, nn.Embedding)


def head_log_probs(
    model: nn.Module, hidden: Float[Tensor, "tokens hidden"], targets: Tensor
) -> Float[Tensor, " tokens"]:
    """Log-probability of each target under its token's final hidden state.

    Args:
        model: The model that the states come from.
        hidden: What the output projection is applied to (see `head_input`).
        targets: Token ids, one per state.

    Returns:
        Nats, float32 (float64 for float64 states), on the CPU.
    """
    weight, bias = output_projection(model)
    scale, cap = logit_scaling(model)
    return vocab_log_probs(
        hidden.to(weight.device), weight, targets.to(weight.device), bias=bias, temperature=1 / scale, logit_softcap=cap
    ).cpu()


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Perplexity of texts under a model.

    Attributes:
        log_likelihoods: Sum of the log-probabilities of each text's tokens, in nats.
        tokens: How many there are in each.
    """

    log_likelihoods: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def value(self) -> float:
        """The exponential of the mean negative log-likelihood of all tokens of all texts; nan without tokens."""
        return math.exp(-sum(self.log_likelihoods) / sum(self.tokens)) if sum(self.tokens) else math.nan

    @property
    def per_text(self) -> tuple[float, ...]:
        """The same for each text alone; nan where it has no tokens."""
        pairs = zip(self.log_likelihoods, self.tokens, strict=True)
        return tuple(math.exp(-total / count) if count else math.nan for total, count in pairs)


def perplexity(
    model: nn.Module, tokenizer: Any, prompts: Sequence[str], completions: Sequence[str], *, batch_size: int = 8
) -> Perplexity:
    """Perplexity of completions given their prompts, under a model that is not steered.

    Args:
        model: The judge of fluency: the model itself outside of any steering context, or another one.
        tokenizer: Its tokenizer.
        prompts: One prompt per completion.
        completions: The texts; one that is empty counts with no tokens.
        batch_size: Rows in one forward.

    Returns:
        Log-likelihoods and counts, from which the perplexities follow.

    Raises:
        ValueError: See `completion_log_probs`.
    """
    prompts, completions = _texts("prompts", prompts), _texts("completions", completions)
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions; they must be as many")
    filled = [place for place, completion in enumerate(completions) if completion]
    scored = completion_log_probs(
        model,
        tokenizer,
        [prompts[place] for place in filled],
        [completions[place] for place in filled],
        batch_size=batch_size,
    )
    found = dict(zip(filled, scored, strict=True))
    empty = torch.zeros(0)
    each = [found.get(place, empty) for place in range(len(completions))]
    return Perplexity(tuple(float(values.double().sum()) for values in each), tuple(map(len, each)))


def _texts(name: str, texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise ValueError(f"{name} is one string; it must be a list of strings")  # noqa: TRY004  # a str is a sequence of str
    return list(texts)


def _numbers(name: str, values: Sequence[float]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not len(found):
        raise ValueError(f"{name} has shape {found.shape}; it must be a list of one number or more")
    odd = int((~np.isfinite(found)).sum())
    if odd:
        raise ValueError(f"{name} holds {odd} values of {len(found)} that are not finite; leave those units out")
    return found


def _pairs(
    first: Sequence[float], second: Sequence[float], first_name: str, second_name: str
) -> "tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.float64]]]":
    ours, theirs = _numbers(first_name, first), _numbers(second_name, second)
    if len(ours) != len(theirs):
        raise ValueError(f"{first_name} has {len(ours)} values and {second_name} {len(theirs)}; pairs are compared")
    return ours, theirs
