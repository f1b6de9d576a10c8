"""SemStamp and k-SemStamp, to compare with: sentences are drawn until one lies in a green region.

The embedding space is cut into regions, by random hyperplanes or by the centres of k-means; which regions are green
depends on the region of the sentence before. Regions of unequal mass distort the text: `distortion`.
"""

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from pmark.encoders import as_encoder
from pmark.scoring import p_value
from pmark.sentence_watermark import LOW_POWER, DetectionResult, Document, Pool, Selection, SentenceWatermark

HASH_KEY = 15485863
"""The millionth prime, by which the authors seed the green regions."""


def distortion(masses: Float[np.ndarray, " regions"], gamma: float) -> Float64[np.ndarray, " regions"]:
    """Return the masses of regions after rejection sampling into random green sets (the paper's framework).

    `P_w(u) = q(u) / C(M, m) * sum over green sets S of m regions that hold u of 1 / q(S)`; equal to `q` for every
    `gamma` below 1 only where all masses are equal.

    Args:
        masses: Natural masses q of the M regions, all above 0; scaled to sum to 1.
        gamma: Share of green regions; `m` is the nearest number to `gamma * M`, at least 1.

    Raises:
        ValueError: A mass is not above 0, or `gamma` is not in 0 to 1.
    """
    q = np.asarray(masses, dtype=np.float64)
    if q.ndim != 1 or not len(q) or not (np.isfinite(q) & (q > 0)).all():
        raise ValueError(f"masses must be a list of finite numbers above 0, not {masses!r}")
    q, size = q / q.sum(), _green_size(len(q), gamma)
    found = np.zeros_like(q)
    for green in itertools.combinations(range(len(q)), size):
        found[list(green)] += q[list(green)] / q[list(green)].sum()
    return np.asarray(found / math.comb(len(q), size))


class RegionWatermark(SentenceWatermark):
    """Draws sentences until one lies in a green region, off its border; after `num_samples` the last one is taken.

    The border counts when writing only; detection tests the region alone, as the authors do.
    """

    def __init__(
        self,
        encoder: Any,
        *,
        regions: int,
        gamma: float = 0.25,
        margin: float = 0.02,
        key: int = 0,
        alpha: float = 0.05,
        num_samples: int = 100,
        chunk: int = 8,
        **options: Any,
    ) -> None:
        """Takes what both schemes share.

        Args:
            encoder: See `as_encoder`.
            regions: Number of regions.
            gamma: Share of green ones.
            margin: Distance from the border that a written sentence must have, as a cosine; MarkLLM takes 0.01.
            key: Seeds, with `HASH_KEY * r`, the green regions after region `r`. 0 is the authors' rule, which everybody
                knows: take a number of your own. numpy permutes, where the authors have torch.
            alpha: Level of the decision.
            num_samples: Trials for a sentence.
            chunk: Trials drawn at once.
            options: Of `SentenceWatermark`.

        Raises:
            ValueError: `gamma` is not in 0 to 1 or leaves no region that is not green, or `key` is below 0.
        """
        super().__init__(encoder, num_samples=num_samples, chunk=chunk, **options)
        if key < 0:
            raise ValueError(f"key must be at least 0, not {key}")
        self.key, self.margin, self.alpha = key, margin, alpha
        size = _green_size(regions, gamma)
        if size >= regions:
            raise ValueError(f"gamma={gamma} makes all of {regions} regions green: take a smaller one or more regions")
        self.gamma = size / regions
        self._green = np.zeros((regions, regions), dtype=bool)
        for region, row in enumerate(self._green):
            # A key of 0 is as good as none there. Were it a factor, region 0 would be alike under all keys.
            row[np.random.default_rng([HASH_KEY * region, key]).permutation(regions)[:size]] = True

    @property
    def settings(self) -> dict[str, Any]:
        """What made a text, for its trace; nothing secret."""
        return {**super().settings, "regions": len(self._green), "gamma": self.gamma, "margin": self.margin}

    @abstractmethod
    def locate(
        self, embeddings: Float[np.ndarray, "sentences dim"]
    ) -> tuple[Int[np.ndarray, " sentences"], Float64[np.ndarray, " sentences"]]:
        """Return the region of each sentence and its distance from the border."""

    def green(
        self, previous: Float[np.ndarray, "sentences dim"], embeddings: Float[np.ndarray, "sentences dim"]
    ) -> Bool[np.ndarray, " sentences"]:
        """Return whether sentences lie in regions that are green after the sentences before."""
        return np.asarray(self._green[self.locate(previous)[0], self.locate(embeddings)[0]])

    def select(self, pools: Sequence[Pool], rng: np.random.Generator) -> list[Selection]:
        """Choose the first candidate that is accepted; see `SentenceWatermark`."""
        selections = []
        for pool in pools:
            green = self.green(np.broadcast_to(pool.previous, pool.embeddings.shape), pool.embeddings)
            accepted = green & (self.locate(pool.embeddings)[1] >= self.margin)
            selections.append(first_accepted(accepted, pool))
        return selections

    def score(self, documents: Sequence[Document]) -> list[DetectionResult]:
        """Count sentences in green regions, against a share `gamma` of them; see `SentenceWatermark`."""
        return [
            count_test(each, self.green(each.previous, each.embeddings).astype(np.float64), self.gamma, self.alpha)
            for each in documents
        ]


class SemStamp(RegionWatermark):
    """Regions are the cells of random hyperplanes (locality-sensitive hashing)."""

    name = "semstamp"

    def __init__(self, encoder: Any, *, hyperplanes: int = 3, **options: Any) -> None:
        """Takes the number of hyperplanes; their normals are drawn from the key.

        Args:
            encoder: See `as_encoder`; the authors fine-tune one so that paraphrases share a region.
            hyperplanes: They cut the space into `2 ** hyperplanes` regions.
            options: Of `RegionWatermark` and `SentenceWatermark`.

        Raises:
            ValueError: See `RegionWatermark`.
        """
        super().__init__(encoder, regions=2**hyperplanes, **options)
        self._hyperplanes = hyperplanes
        self._normals = functools.cache(self._draw_normals)

    def _draw_normals(self, dimension: int) -> Float64[np.ndarray, "hyperplanes dim"]:
        normals = np.random.default_rng(self.key).normal(size=(self._hyperplanes, dimension))
        return np.asarray(normals / np.linalg.norm(normals, axis=1, keepdims=True))

    def locate(
        self, embeddings: Float[np.ndarray, "sentences dim"]
    ) -> tuple[Int[np.ndarray, " sentences"], Float64[np.ndarray, " sentences"]]:
        """Return the cell, one bit for each side, and the least cosine to a normal; see `RegionWatermark`."""
        cosines = embeddings.astype(np.float64) @ self._normals(embeddings.shape[1]).T
        return (cosines > 0) @ (1 << np.arange(self._hyperplanes)), np.abs(cosines).min(axis=1)


class KSemStamp(RegionWatermark):
    """Regions are those nearest to the centres of k-means on sentences of the domain."""

    name = "k-semstamp"

    def __init__(self, encoder: Any, centres: Float[np.ndarray, "regions dim"], **options: Any) -> None:
        """Takes the centres; `fit` finds them.

        Args:
            encoder: See `as_encoder`.
            centres: One for each region; scaled to length 1.
            options: Of `RegionWatermark` and `SentenceWatermark`.

        Raises:
            ValueError: A centre is 0 or not finite, or see `RegionWatermark`.
        """
        super().__init__(encoder, regions=len(centres), **options)
        lengths = np.linalg.norm(centres, axis=1, keepdims=True)
        if not (np.isfinite(lengths) & (lengths > 0)).all():
            raise ValueError("centres must be finite and not 0")
        self.centres = centres / lengths

    @classmethod
    def fit(
        cls, encoder: Any, sentences: Sequence[str], *, regions: int = 8, seed: int | None = None, **options: Any
    ) -> "KSemStamp":
        """Find the centres by spherical k-means.

        Args:
            encoder: See `as_encoder`.
            sentences: Of the domain, many times as many as regions.
            regions: Number of regions.
            seed: Of the k-means starts (0 if not given) and of the watermark, see `SentenceWatermark`.
            options: Of `RegionWatermark` and `SentenceWatermark`.

        Raises:
            ValueError: There are fewer different sentences than regions.
        """
        encoder = as_encoder(encoder)
        centres = spherical_k_means(encoder.encode(sentences), regions, seed=seed or 0)
        return cls(encoder, centres, seed=seed, **options)

    def locate(
        self, embeddings: Float[np.ndarray, "sentences dim"]
    ) -> tuple[Int[np.ndarray, " sentences"], Float64[np.ndarray, " sentences"]]:
        """Return the nearest centre, and how much farther the second is, in cosines; see `RegionWatermark`."""
        cosines = embeddings.astype(np.float64) @ self.centres.T
        second, first = np.sort(cosines, axis=1)[:, -2:].T
        return cosines.argmax(axis=1), first - second


def spherical_k_means(
    embeddings: Float[np.ndarray, "sentences dim"], clusters: int, *, seed: int = 0
) -> Float64[np.ndarray, "clusters dim"]:
    """Return unit centres, each the direction of the sum of the rows nearest to it by cosine.

    Args:
        embeddings: Unit rows.
        clusters: Number of centres, at least 2.
        seed: Of the starting rows.

    Raises:
        ValueError: There are fewer different rows than clusters.
    """
    # What differs by rounding alone is the same sentence, and cannot be told apart by its cosine.
    rows = np.unique(embeddings.astype(np.float64).round(6), axis=0)
    if not 2 <= clusters <= len(rows):
        raise ValueError(f"clusters must lie in 2 to the number of different sentences, {len(rows)}, not {clusters}")
    rng = np.random.default_rng(seed)
    chosen = [int(rng.integers(len(rows)))]
    while len(chosen) < clusters:
        # As k-means++: a start is likely far from those before.
        far = np.maximum(1 - (rows @ rows[chosen].T).max(axis=1), 0)
        far[chosen] = 0
        chosen.append(int(rng.choice(len(rows), p=far / far.sum())))
    centres, labels = rows[chosen], np.full(len(embeddings), -1)
    for _ in range(100):
        nearest = (embeddings @ centres.T).argmax(axis=1)
        if (nearest == labels).all():
            break
        labels = nearest
        sums = np.zeros_like(centres)
        np.add.at(sums, labels, embeddings)
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        # A centre that nothing is nearest to stays where it was.
        centres = np.where(lengths > 1e-12, sums / np.maximum(lengths, 1e-12), centres)
    return np.asarray(centres)


def first_accepted(accepted: Bool[np.ndarray, " candidates"], pool: Pool) -> Selection:
    """Return the first accepted candidate of a pool; of a spent one without any the last, else a wish for more."""
    if accepted.any():
        return Selection(int(accepted.argmax()), {"accepted": True})
    return Selection(len(accepted) - 1, {"accepted": False}) if pool.exhausted else Selection(None)


def count_test(
    document: Document, counts: Float64[np.ndarray, " sentences"], gamma: float, alpha: float, ridge: float = 0.0
) -> DetectionResult:
    """Test a sum of counts against `gamma` for each sentence that has one before it.

    `z = (x - gamma T) / sqrt(T gamma (1 - gamma) + ridge)`, one-sided.

    Args:
        document: The text.
        counts: Evidence of each sentence, 0 to 1.
        gamma: Expected count of a sentence without watermark.
        alpha: Level of the decision.
        ridge: Keeps the root above 0 for a gamma of 0 or 1.

    Returns:
        The result; its calibrated values are the nominal ones.
    """
    tested = document.previous.any(axis=1)
    counts = np.where(tested, counts, np.nan)
    size = int(tested.sum())
    if not size:
        return DetectionResult.nothing(1, "no sentence to test that has one before it")
    z = float((np.nansum(counts) - gamma * size) / math.sqrt(size * gamma * (1 - gamma) + ridge))
    p = p_value(z)
    return DetectionResult(
        z=z,
        p_value=p,
        z_calibrated=z,
        p_calibrated=p,
        is_watermarked=p <= alpha,
        counts=counts[:, None],
        thresholds=None,
        num_sentences=size,
        low_power=size < LOW_POWER,
        per_sentence=[
            {"number": number, "sentence": sentence, "count": None if math.isnan(count) else float(count)}
            for number, (sentence, count) in enumerate(zip(document.sentences, counts, strict=True), start=1)
        ],
    )


def _green_size(regions: int, gamma: float) -> int:
    if not 0 < gamma < 1:
        raise ValueError(f"gamma must lie between 0 and 1, not {gamma}")
    return min(max(round(gamma * regions), 1), regions)
