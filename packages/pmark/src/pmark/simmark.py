"""SimMark, to compare with: sentences are drawn until the similarity to the sentence before lies in an interval."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Float64

from pmark.scoring import DECAY
from pmark.semstamp import count_test, first_accepted
from pmark.sentence_watermark import DetectionResult, Document, Pool, Selection, SentenceWatermark

COSINE, EUCLIDEAN, EUCLIDEAN_PCA = (0.68, 0.76), (0.4, 0.55), (0.28, 0.36)
"""The authors' intervals for Instructor-large; other encoders need others."""
COMPONENTS = 16
"""Dimensions that the authors keep of the principal component analysis."""


class SimMark(SentenceWatermark):
    """Draws sentences until the similarity to the one before lies in an interval; after `num_samples` takes the last.

    There is no key: who knows the interval can test a text.
    """

    name = "simmark"

    def __init__(
        self,
        encoder: Any,
        *,
        measure: str = "cosine",
        interval: tuple[float, float] | None = None,
        gamma: float | None = None,
        components: Float[np.ndarray, "components dim"] | None = None,
        decay: float = DECAY,
        alpha: float = 0.05,
        num_samples: int = 100,
        chunk: int = 8,
        **options: Any,
    ) -> None:
        """Takes the measure.

        Args:
            encoder: See `as_encoder`.
            measure: "cosine" of consecutive sentences, or "euclidean" distance of their unit embeddings.
            interval: Accepted values, ends included; the authors' one for the measure if not given.
            gamma: Share of consecutive human sentences within the interval; `calibrate` measures it.
            components: Principal axes on which distances are taken, see `principal_axes`.
            decay: Rate at which a count falls with the distance from the interval.
            alpha: Level of the decision.
            num_samples: Trials for a sentence.
            chunk: Trials drawn at once.
            options: Of `SentenceWatermark`.

        Raises:
            ValueError: There is no such measure, the interval is empty, components are given for the cosine, or `gamma`
                is not in 0 to 1.
        """
        super().__init__(encoder, num_samples=num_samples, chunk=chunk, **options)
        if measure not in ("cosine", "euclidean"):
            raise ValueError(f"measure must be 'cosine' or 'euclidean', not {measure!r}")
        if measure == "cosine" and components is not None:
            raise ValueError("components are for measure='euclidean' only")
        own = COSINE if measure == "cosine" else EUCLIDEAN if components is None else EUCLIDEAN_PCA
        self.interval = own if interval is None else interval
        if not self.interval[0] < self.interval[1]:
            raise ValueError(f"interval must go from a lower to a higher value, not {self.interval}")
        if gamma is not None and not 0 <= gamma <= 1:
            raise ValueError(f"gamma must lie in 0 to 1, not {gamma}")
        self.measure, self.gamma, self.components = measure, gamma, components
        self.decay, self.alpha = decay, alpha

    @property
    def settings(self) -> dict[str, Any]:
        """What made a text, for its trace."""
        own = {"measure": self.measure, "interval": list(self.interval), "gamma": self.gamma, "decay": self.decay}
        return {**super().settings, **own, "components": None if self.components is None else len(self.components)}

    def similarity(
        self, previous: Float[np.ndarray, "sentences dim"], embeddings: Float[np.ndarray, "sentences dim"]
    ) -> Float64[np.ndarray, " sentences"]:
        """Return the cosine or distance of each sentence to the one before."""
        if self.measure == "cosine":
            return np.asarray((previous.astype(np.float64) * embeddings).sum(axis=1))
        difference = embeddings.astype(np.float64) - previous
        if self.components is not None:
            # The mean that the analysis takes off falls out of a difference.
            difference = difference @ np.asarray(self.components, dtype=np.float64).T
        return np.asarray(np.linalg.norm(difference, axis=1))

    def select(self, pools: Sequence[Pool], rng: np.random.Generator) -> list[Selection]:
        """Choose the first candidate whose similarity lies in the interval; see `SentenceWatermark`."""
        return [
            first_accepted(
                self._outside(np.broadcast_to(each.previous, each.embeddings.shape), each.embeddings) == 0, each
            )
            for each in pools
        ]

    def score(self, documents: Sequence[Document]) -> list[DetectionResult]:
        """Sum soft counts, 1 in the interval and `exp(-decay * distance)` outside; see `SentenceWatermark`.

        Raises:
            ValueError: `gamma` is not known.
        """
        if self.gamma is None:
            raise ValueError("gamma is not known: give it, or measure it with calibrate(human_texts)")
        # The authors' term in the root, for an interval that no human sentence hits.
        return [count_test(each, self._counts(each), self.gamma, self.alpha, ridge=1e-12) for each in documents]

    def calibrate(self, human_texts: Sequence[str], **options: Any) -> "SimMark":
        """Return a copy whose `gamma` is the share of consecutive human sentences within the interval.

        It is at least half a pair's share and at most all but that: with 0 or 1 there would be no test.

        Soft counts have a mean above that share, so z of unmarked text is biased upwards, as with the authors.

        Args:
            human_texts: Texts of at least two sentences.
            options: `prompts` and `has_prompt` of `SentenceWatermark.documents`.

        Raises:
            ValueError: No text has two consecutive sentences.
        """
        outside = [
            self._outside(each.previous, each.embeddings)[each.previous.any(axis=1)]
            for each in self.documents(human_texts, **options)
            if each.sentences
        ]
        every = np.concatenate(outside) if outside else np.zeros(0)
        if not len(every):
            raise ValueError("human_texts hold no two consecutive sentences")
        other = copy.copy(self)
        half = 0.5 / len(every)
        other.gamma = float(np.clip((every == 0).mean(), half, 1 - half))
        return other

    def _counts(self, document: Document) -> Float64[np.ndarray, " sentences"]:
        outside = self._outside(document.previous, document.embeddings)
        # An infinite decay (hard counts) times 0 would be no number.
        return np.where(outside > 0, np.exp(-self.decay * np.maximum(outside, np.finfo(np.float64).tiny)), 1.0)

    def _outside(
        self, previous: Float[np.ndarray, "sentences dim"], embeddings: Float[np.ndarray, "sentences dim"]
    ) -> Float64[np.ndarray, " sentences"]:
        """Distance from the interval, 0 within."""
        values, (low, high) = self.similarity(previous, embeddings), self.interval
        return np.asarray(np.maximum(0, np.maximum(low - values, values - high)))


def principal_axes(
    embeddings: Float[np.ndarray, "sentences dim"], components: int = COMPONENTS
) -> Float64[np.ndarray, "components dim"]:
    """Return the first principal axes (orthonormal rows) of sentences of the domain, for `SimMark`.

    Raises:
        ValueError: There are not more sentences than components.
    """
    rows = embeddings.astype(np.float64)
    if not 1 <= components < len(rows):
        raise ValueError(f"components must lie in 1 to the number of sentences less one, {len(rows) - 1}")
    return np.asarray(np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)[2][:components])
