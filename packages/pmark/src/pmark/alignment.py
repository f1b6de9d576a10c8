"""Evidence that survives sentences put in or taken out: a banded alignment of a text with its key (ours)."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from pmark.scoring import DECAY, TOLERANCE, soft_counts

WINDOW = 2
"""Greatest shift."""
PENALTY = 1.5
"""What each step of a shift costs, in counts."""


class Alignment(NamedTuple):
    """The best alignment of a text with a key."""

    score: float
    """Sum of its counts less the penalties."""
    z: float
    """Score in standard deviations above its mean over random bits; not to be mixed with the plain z."""
    p_value: float
    """(1 + how many random keys score as high) / (1 + draws)."""
    shifts: tuple[int, ...]
    """For every sentence, how many rows further on in the key its bits were found; of equals the smallest move."""


def aligned_p_value(
    proxies: Float[np.ndarray, "sentences channels"],
    thresholds: Float[np.ndarray, "sentences channels"],
    bits: Bool[np.ndarray, "rows channels"],
    *,
    window: int = WINDOW,
    penalty: float = PENALTY,
    tolerance: float = TOLERANCE,
    decay: float = DECAY,
    draws: int = 999,
    seed: int = 0,
) -> Alignment:
    """Let every sentence count with a row of the key near its own, and compare with the same search under random bits.

    A text written without the key knows nothing of its bits, so they are one more draw among those of random keys: the
    p-value is valid whatever the text, its thresholds and the search.

    Args:
        proxies: F_j of the observed sentences, at least one.
        thresholds: m_j.
        bits: Rows of the key from sentence 1 on, at least as many as sentences; `window` more let the last ones shift.
        window: Greatest shift, in either direction.
        penalty: What each step of a shift costs, in counts. Rows may be passed over, or used again for a sentence
            that was put in; never backwards.
        tolerance: tau of the soft counts.
        decay: K of the soft counts.
        draws: Number of random keys, at least 2.
        seed: Of those.

    Returns:
        The alignment.

    Raises:
        ValueError: No sentence, too few rows or draws, a negative window or penalty.
    """
    if len(proxies) < 1 or len(bits) < len(proxies):
        raise ValueError(f"{len(proxies)} sentences and {len(bits)} rows of bits; both need one, and rows no fewer")
    if window < 0 or not penalty >= 0 or draws < 2:
        raise ValueError(
            f"window={window}, penalty={penalty}, draws={draws}; the first two must be at least 0, draws 2"
        )
    zero, one = (
        soft_counts(proxies, thresholds, np.full(proxies.shape, bit), tolerance=tolerance, decay=decay)
        for bit in (False, True)
    )
    random_bits = np.random.default_rng(seed).random((draws, *bits.shape)) < 0.5
    null = _tables(_scores(zero, one, random_bits, window), penalty)[-1].max(axis=-1)
    tables = [table[0] for table in _tables(_scores(zero, one, bits[None], window), penalty)]
    shifts = np.arange(-window, window + 1)
    path = [_best(tables[-1], shifts, 0)]
    for table in reversed(tables[:-1]):
        # From any row up to one further on than the next sentence's shift says.
        reached = np.where(shifts <= path[-1] + 1, table - penalty * np.abs(shifts - path[-1]), -np.inf)
        path.append(_best(reached, shifts, path[-1]))
    score, spread = float(tables[-1].max()), float(null.std())
    return Alignment(
        score,
        (score - float(null.mean())) / spread if spread > 0 else 0.0,
        (1 + int((null >= score - 1e-9).sum())) / (1 + draws),
        tuple(reversed(path)),
    )


def _best(values: Float[np.ndarray, "shifts"], shifts: np.ndarray, near: int) -> int:
    """The shift with the greatest value; of equals, up to rounding, that closest to `near`."""
    best = shifts[values >= values.max() - 1e-9]
    return int(best[np.abs(best - near).argmin()])


def _scores(
    zero: Float[np.ndarray, "sentences channels"],
    one: Float[np.ndarray, "sentences channels"],
    bits: Bool[np.ndarray, "keys rows channels"],
    window: int,
) -> Float[np.ndarray, "sentences keys shifts"]:
    """Count of every sentence with every row within the window, from those for either bit; else minus infinity."""
    sentences, (keys, rows, _) = len(zero), bits.shape
    scores = np.full((sentences, keys, 2 * window + 1), -np.inf)
    for place, shift in enumerate(range(-window, window + 1)):
        first, last = max(0, -shift), min(sentences, rows - shift)
        if first < last:
            inside, rows_there = slice(first, last), bits[:, first + shift : last + shift]
            gained = np.einsum("ktb,tb->tk", rows_there, (one - zero)[inside])
            scores[inside, :, place] = gained + zero[inside].sum(axis=1)[:, None]
    return scores


def _tables(
    scores: Float[np.ndarray, "sentences keys shifts"], penalty: float
) -> list[Float[np.ndarray, "keys shifts"]]:
    """For every sentence the best score of an alignment that ends there, by its shift."""
    window = scores.shape[-1] // 2
    climb = penalty * np.arange(-window, window + 1)
    tables = [scores[0] - np.abs(climb)]
    for score in scores[1:]:
        before = tables[-1]
        # Rows passed over: from any smaller shift. A row used again: from the shift one greater.
        best = np.maximum.accumulate(before + climb, axis=1) - climb
        best[:, :-1] = np.maximum(best[:, :-1], before[:, 1:] - penalty)
        tables.append(best + score)
    return tables
