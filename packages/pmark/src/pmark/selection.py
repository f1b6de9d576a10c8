"""The choice among candidate sentences: exact halving (online), or the best match to thresholds (parallel, offline)."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int

from pmark.medians import MedianMethod, median


class Halving(NamedTuple):
    """What `halve` chose, and what a trace records of it."""

    chosen: Int[np.ndarray, "docs"]
    """Index of the chosen candidate."""
    alive: Bool[np.ndarray, "docs candidates"]
    """The candidates among which it was chosen."""
    survivors: Int[np.ndarray, "docs channels"]
    """How many candidates each channel left alive."""
    medians: Float64[np.ndarray, "docs channels"]
    """Median of the proxies of those that were alive before each channel."""


class Matching(NamedTuple):
    """What `best_match` chose."""

    chosen: Int[np.ndarray, "docs"]
    """Index of the chosen candidate."""
    matches: Int[np.ndarray, "docs"]
    """In how many channels it lies on the side that its bit asks for."""


def halve(
    proxies: Float64[np.ndarray, "docs candidates channels"],
    bits: Bool[np.ndarray, "docs channels"],
    rng: np.random.Generator,
    *,
    sizes: Int[np.ndarray, "docs"] | None = None,
    median: MedianMethod = "hd",
) -> Halving:
    """Choose one candidate per document by halving along every channel (generation, online).

    For each channel in turn the half of the living candidates with the greater proxies stays where the bit is 1, the
    other half where it is 0. Halves are split by rank, equal values in random order. Of an odd number n the middle
    candidate stays too with probability (n+1)/(2n), whichever side was chosen: so that over fair bits every candidate
    is chosen with probability exactly 1/N, whatever the proxies. Among those left the choice is uniform.

    Args:
        proxies: F_j of every candidate; finite.
        bits: The sentence's bits, True for the upper half.
        rng: Breaks ties, keeps or drops the middle, and chooses.
        sizes: How many candidates each document has, at least 1; the rest is padding. By default all.
        median: Estimator for the medians that are reported; the choice does not depend on it.

    Returns:
        The choice.

    Raises:
        ValueError: Shapes that do not fit, no candidate, or proxies that are not finite.
    """
    count = _check(proxies, bits, sizes)
    docs, candidates, channels = proxies.shape
    # One random order before stable sorts: ties then fall at random, the same way in every channel.
    alive = _random_order(count, candidates, rng)
    survivors = np.empty((docs, channels), dtype=np.int64)
    medians = np.empty((docs, channels))
    documents = np.arange(docs)[:, None]
    coins = rng.random((docs, channels))
    for j in range(channels):
        values = proxies[documents, alive, j]
        values[np.arange(alive.shape[1]) >= count[:, None]] = np.inf
        order = np.argsort(values, axis=1, kind="stable")
        medians[:, j] = _medians(values, count, median)
        # 2n times the coin is below n+1 with the probability that the middle is kept; for n = 1 that is certain.
        kept = count // 2 + (count % 2) * (2 * count * coins[:, j] < count + 1)
        start = np.where(bits[:, j], count - kept, 0)
        places = np.minimum(start[:, None] + np.arange(kept.max(initial=0)), alive.shape[1] - 1)
        alive = alive[documents, order[documents, places]]
        count = kept
        survivors[:, j] = kept
    chosen = alive[np.arange(docs), rng.integers(0, count)]
    mask = np.zeros((docs, candidates), dtype=bool)
    row, place = np.nonzero(np.arange(alive.shape[1]) < count[:, None])
    mask[row, alive[row, place]] = True
    return Halving(chosen, mask, survivors, medians)


def best_match(
    proxies: Float64[np.ndarray, "docs candidates channels"],
    thresholds: Float64[np.ndarray, "docs channels"],
    bits: Bool[np.ndarray, "docs channels"],
    rng: np.random.Generator,
    *,
    sizes: Int[np.ndarray, "docs"] | None = None,
    first: bool = False,
) -> Matching:
    """Choose, at random, one of the candidates with most channels on the right side (parallel and offline).

    The right side is F_j >= m_j for bit 1, below for bit 0.

    Args:
        proxies: F_j of every candidate; finite.
        thresholds: m_j of every channel: medians over all candidates, of a domain, or 0.
        bits: The sentence's bits.
        rng: Chooses among equals.
        sizes: How many candidates each document has, at least 1; the rest is padding. By default all.
        first: Of those right in all channels take the first, so that what was drawn after it does not matter.

    Returns:
        The choice.

    Raises:
        ValueError: Shapes that do not fit, no candidate, or proxies that are not finite.
    """
    count = _check(proxies, bits, sizes)
    if thresholds.shape != bits.shape:
        raise ValueError(f"thresholds has the shape {thresholds.shape}; bits has {bits.shape}")
    matches = ((proxies >= thresholds[:, None]) == bits[:, None]).sum(-1)
    matches[np.arange(proxies.shape[1]) >= count[:, None]] = -1
    most = matches.max(axis=1)
    ranks = rng.random(matches.shape)
    if first:
        ranks[most == proxies.shape[2]] = 0.0
    return Matching(np.where(matches == most[:, None], ranks, -1.0).argmax(axis=1), most)


def _check(
    proxies: Float64[np.ndarray, "docs candidates channels"],
    bits: Bool[np.ndarray, "docs channels"],
    sizes: Int[np.ndarray, "docs"] | None,
) -> Int[np.ndarray, "docs"]:
    """The number of candidates of every document, after a look at everything."""
    docs, candidates, channels = proxies.shape
    if bits.shape != (docs, channels):
        raise ValueError(f"bits has the shape {bits.shape}; proxies of the shape {proxies.shape} need {docs, channels}")
    count = np.full(docs, candidates) if sizes is None else np.asarray(sizes)
    if count.shape != (docs,) or candidates < 1 or (count < 1).any() or (count > candidates).any():
        raise ValueError(f"sizes={count}; every one of the {docs} documents needs 1 to {candidates} candidates")
    finite = np.isfinite(proxies).all(axis=2) | (np.arange(candidates) >= count[:, None])
    if not finite.all():
        raise ValueError(f"the proxies of document, candidate {tuple(np.argwhere(~finite)[0].tolist())} are not finite")
    return count


def _random_order(
    count: Int[np.ndarray, "docs"], candidates: int, rng: np.random.Generator
) -> Int[np.ndarray, "docs candidates"]:
    """The candidates of every document in random order, padding last."""
    draws = rng.random((len(count), candidates))
    draws[np.arange(candidates) >= count[:, None]] = 2.0
    return np.argsort(draws, axis=1)


def _medians(
    values: Float64[np.ndarray, "docs places"], count: Int[np.ndarray, "docs"], method: MedianMethod
) -> Float64[np.ndarray, "docs"]:
    """Medians of the first `count` values of every row."""
    result = np.empty(len(count))
    for n in np.unique(count):
        rows = count == n
        result[rows] = median(values[rows, :n], method)
    return result
