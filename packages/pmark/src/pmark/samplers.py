"""Drawing candidates: what a language model must offer, and asking it until there are enough.

The watermark is black-box. All it needs of a model is draws of what might follow a context; a sampler gives them for
many contexts in one call, so that the documents of a batch share it.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import numpy as np


class SamplerError(OSError):
    """The sampler cannot work at all: a refused key, an unknown model, answers of a wrong kind."""


@dataclass(frozen=True)
class Continuation:
    """One draw of what follows a context.

    Attributes:
        text: The new text, without the context.
        ended: Whether the model ended the text there (its end-of-text token), rather than being cut off.
    """

    text: str
    ended: bool = False


@runtime_checkable
class Sampler(Protocol):
    """What draws continuations from a language model."""

    def sample(
        self,
        contexts: Sequence[str],
        counts: Sequence[int],
        *,
        is_complete: Callable[[int, str], bool] | None = None,
        seed: int | None = None,
    ) -> list[list[Continuation]]:
        """Draws continuations, independently of each other.

        Args:
            contexts: The texts to continue.
            counts: How many continuations of each.
            is_complete: Called with the index of a context and the text of a row so far; the row may stop once it
                returns true. A sampler may ignore it.
            seed: Of the draws; None for fresh randomness. A sampler that cannot be seeded ignores it.

        Returns:
            For each context its continuations, in the order drawn; fewer than asked where the model gave fewer.

        Raises:
            ValueError: A context can never be continued, such as one longer than the model takes.
            SamplerError: Nothing can ever be drawn.
            ImportError: As well.
            Exception: Anything else counts as passing.
        """
        ...


class CallableSampler:
    """A function as a sampler."""

    def __init__(self, function: Callable[[str, int], Sequence[str | Continuation]]) -> None:
        """Takes the function.

        Args:
            function: Called with a context and a number; returns that many continuations, as texts or `Continuation`.

        Raises:
            TypeError: `function` cannot be called.
        """
        if not callable(function):
            raise TypeError(f"function must be callable with a context and a number, not {type(function).__name__}")
        self.function = function

    def sample(
        self,
        contexts: Sequence[str],
        counts: Sequence[int],
        *,
        is_complete: Callable[[int, str], bool] | None = None,
        seed: int | None = None,
    ) -> list[list[Continuation]]:
        """Calls the function for each context; see `Sampler`. `is_complete` and `seed` are ignored."""
        rows = []
        for context, count in zip(contexts, counts, strict=True):
            drawn = self.function(context, count)
            if isinstance(drawn, str):
                raise SamplerError("the sampler's function must return a list of texts, not one text")
            rows.append([Continuation(item) if isinstance(item, str) else item for item in drawn])
        return rows


class Remembering:
    """A sampler that gives for a context and a seed what it gave before: other keys are tried on the same draws.

    For detection alone: contexts that are alike share their draws.
    """

    def __init__(self, sampler: Sampler) -> None:
        """Takes what draws.

        Args:
            sampler: Asked for what is not known yet.
        """
        self.sampler = sampler
        self._drawn: dict[tuple[str, int, int | None], list[Continuation]] = {}

    def sample(
        self,
        contexts: Sequence[str],
        counts: Sequence[int],
        *,
        is_complete: Callable[[int, str], bool] | None = None,
        seed: int | None = None,
    ) -> list[list[Continuation]]:
        """Draws continuations that were not drawn before; see `Sampler`."""
        wanted = [(context, count, seed) for context, count in zip(contexts, counts, strict=True)]
        new = [index for index, each in enumerate(wanted) if each not in self._drawn]
        if new:
            found = self.sampler.sample(
                [contexts[index] for index in new],
                [counts[index] for index in new],
                is_complete=_for_group(is_complete, new),
                seed=seed,
            )
            self._drawn |= {wanted[index]: each for index, each in zip(new, found, strict=True)}
        return [self._drawn[each] for each in wanted]


def draw(
    sampler: Sampler,
    contexts: Sequence[str],
    counts: Sequence[int],
    *,
    is_complete: Callable[[int, str], bool] | None = None,
    seed: int | None = None,
    retries: int = 5,
    wait: float = 0.5,
) -> list[list[Continuation]]:
    """Draws from a sampler that may fail or give fewer than asked.

    What is missing is asked for again, at most `retries` times. After an error the contexts are asked one by one, so
    that one which cannot be continued costs the others nothing, and after a pause that doubles each time. A context
    that the sampler refuses (ValueError) is given up at once. One warning tells of the last error where something
    stayed missing.

    Args:
        sampler: What draws.
        contexts: The texts to continue.
        counts: How many continuations of each.
        is_complete: See `Sampler.sample`.
        seed: Of the draws; every repetition draws with another one made from it.
        retries: How often to ask again.
        wait: The first pause, in seconds.

    Returns:
        For each context what could be drawn: at most what was asked, possibly nothing.

    Raises:
        ValueError: `contexts` and `counts` differ in length, or a count is negative.
        SamplerError: The sampler can never work, or gave something else than lists of continuations.
        ImportError: It lacks a library.
    """
    if len(contexts) != len(counts) or any(count < 0 for count in counts):
        raise ValueError(f"counts must hold a number >= 0 for each of the {len(contexts)} contexts, not {list(counts)}")
    drawn: list[list[Continuation]] = [[] for _ in contexts]
    refused: set[int] = set()
    error: Exception | None = None
    pause = wait
    for attempt in range(retries + 1):
        missing = [i for i in range(len(contexts)) if len(drawn[i]) < counts[i] and i not in refused]
        if not missing:
            break
        groups = [missing] if error is None else [[i] for i in missing]
        # Another seed each time: the same one would draw the same texts again, which are then no new draws.
        seeds = [seed] if attempt == 0 else spread_seed(seed, attempt * len(contexts), len(groups))
        passing = False
        for group, group_seed in zip(groups, seeds, strict=True):
            try:
                rows = sampler.sample(
                    [contexts[i] for i in group],
                    [counts[i] - len(drawn[i]) for i in group],
                    is_complete=_for_group(is_complete, group),
                    seed=group_seed,
                )
            except (SamplerError, ImportError):  # a missing library does not pass
                raise
            except Exception as raised:
                error, refusal = raised, isinstance(raised, ValueError)
                passing |= not refusal
                refused.update(group if refusal and len(group) == 1 else ())
                continue
            for i, row in zip(group, _checked(rows, len(group)), strict=True):
                drawn[i] += row[: counts[i] - len(drawn[i])]
        if passing and attempt < retries:
            time.sleep(pause)
            pause *= 2
    short = sum(len(row) < count for row, count in zip(drawn, counts, strict=True))
    if error is not None and short:
        warnings.warn(
            f"the sampler gave too few continuations for {short} of {len(contexts)} contexts; its last error: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
    return drawn


def check_sampling(temperature: float, top_p: float, max_new_tokens: int) -> None:
    """Refuses settings that no sampler can draw with.

    Args:
        temperature: What the logits are divided by.
        top_p: Share of the probability that is drawn from.
        max_new_tokens: Longest continuation, in tokens.

    Raises:
        ValueError: One of them is out of its range.
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be a number above 0, not {temperature}: candidates must differ")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], not {top_p}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")


def spread_seed(seed: int | None, first: int, count: int) -> list[int | None]:
    """Makes seeds of one.

    Args:
        seed: The seed; None gives none.
        first: Number of the first one wanted.
        count: How many.

    Returns:
        Seeds below 2**31, which all servers take.
    """
    if seed is None:
        return [None] * count
    return [int(np.random.SeedSequence([seed, i]).generate_state(1)[0] >> 1) for i in range(first, first + count)]


def _for_group(
    is_complete: Callable[[int, str], bool] | None, group: Sequence[int]
) -> Callable[[int, str], bool] | None:
    return is_complete and (lambda i, text: is_complete(group[i], text))


def _checked(rows: object, count: int) -> list[list[Continuation]]:
    if not isinstance(rows, list) or len(rows) != count or not all(isinstance(row, list) for row in rows):
        raise SamplerError(f"the sampler must return a list with one list for each of the {count} contexts")
    for row in rows:
        for item in row:
            if not isinstance(item, Continuation) or not isinstance(item.text, str):
                raise SamplerError(f"the sampler must return Continuation objects, not {type(item).__name__}")
    return cast("list[list[Continuation]]", rows)
