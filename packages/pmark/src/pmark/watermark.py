"""PMark: the next sentence is chosen by which side of the median it lies on, along private directions."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from pmark.alignment import PENALTY, WINDOW, aligned_p_value
from pmark.key import PMarkKey
from pmark.medians import MedianMethod, median
from pmark.samplers import Sampler, SamplerError
from pmark.scoring import DECAY, TOLERANCE, Null, among_other_bits, p_value, soft_counts, z_score
from pmark.selection import best_match, halve
from pmark.sentence_watermark import (
    LOW_POWER,
    DetectionResult,
    Document,
    Pool,
    Selection,
    SentenceWatermark,
    WatermarkedText,
)

_CHUNK = 8
# Candidates held at once in online detection: 50 MiB of embeddings of 384 numbers.
_BLOCK = 16384

Mode = Literal["online", "offline"]
Strategy = Literal["sequential", "parallel"]
Prior = Literal["zero", "calibrated"]


class PMark(SentenceWatermark):
    """The watermark of the paper.

    Online, sequential: of all candidates the half on the right side of their median stays, channel by channel. Over
    keys every candidate is equally likely to be chosen, so the text is distributed as the model's own, given that it
    goes on; detection must ask the model again. Online, parallel: most channels on the right side of the medians of
    all. Offline: the same with 0 in place of medians, stopping at the first candidate that is right in all channels;
    detection needs encoder and key only, but where proxies are not centred at 0 the text is distorted.

    Args:
        encoder: Sentence encoder, see `as_encoder`.
        key: Private bits and pivots.
        mode: "online" or "offline".
        num_samples: Candidates for each sentence, at most; online at least 2 to the number of channels.
        median: Estimator, see `pmark.medians.median`.
        selection: Online: "sequential" or "parallel".
        prior: Offline: thresholds "zero", or "calibrated": medians of a domain, measured by `calibrate` (ours).
        tolerance: tau of the soft counts.
        decay: K of the soft counts.
        alpha: Level of the decision: a text whose calibrated p-value is at most that is watermarked.
        null: What unmarked text gives. Without it a text is compared with what it would give under other bits (ours:
            it needs no model of the embeddings; `Null.gaussian` is the analytic one).
        draft: Online: a small model that estimates the medians, in generation and in detection; the first sentence of
            the large one that is right in all channels is taken, and if there is none the best match.
        chunk: Candidates drawn at once where the first right one is taken.
        **options: As `SentenceWatermark`.

    Raises:
        ValueError: An argument is out of range, or too few candidates for the channels.
    """

    name = "pmark"

    def __init__(
        self,
        encoder: Any,
        key: PMarkKey,
        *,
        mode: Mode = "online",
        num_samples: int = 64,
        median: MedianMethod = "hd",
        selection: Strategy = "sequential",
        prior: Prior = "zero",
        tolerance: float = TOLERANCE,
        decay: float = DECAY,
        alpha: float = 0.05,
        null: Null | None = None,
        draft: Sampler | None = None,
        chunk: int | None = None,
        **options: Any,
    ) -> None:
        """See the class."""
        for argument, value, allowed in (
            ("mode", mode, get_args(Mode)),
            ("median", median, get_args(MedianMethod)),
            ("selection", selection, get_args(Strategy)),
            ("prior", prior, get_args(Prior)),
        ):
            if value not in allowed:
                raise ValueError(f"{argument}={value!r}: must be one of {', '.join(allowed)}")
        if not isinstance(key, PMarkKey):
            raise TypeError(f"key is {type(key).__name__}: must be a PMarkKey")
        if not 0 < alpha < 1:
            raise ValueError(f"alpha={alpha}: must lie between 0 and 1")
        least = 2**key.channels
        if mode == "online" and num_samples < least:
            raise ValueError(f"num_samples={num_samples}: {key.channels} channels need at least {least}")
        if mode == "offline" and draft is not None:
            raise ValueError("draft estimates medians, and mode='offline' has none: use mode='online'")
        if mode == "online" and prior != "zero":
            raise ValueError(f"prior={prior!r} is for mode='offline'; online, medians are drawn")
        self._first_right = mode == "offline" or draft is not None
        if not self._first_right:
            chunk = None
        elif chunk is None:
            chunk = _CHUNK
        super().__init__(encoder, num_samples=num_samples, chunk=chunk, **options)
        self.smallest_pool = 1 if self._first_right else least
        self.channels = key.channels
        self.key = key
        self.mode = mode
        self.median = median
        self.selection = selection
        self.prior = prior
        self.tolerance = tolerance
        self.decay = decay
        self.alpha = alpha
        self.draft = draft
        self.null = null
        soft_counts(np.zeros(1), np.zeros(1), np.zeros(1, bool), tolerance=tolerance, decay=decay)  # refuses bad ones
        if null is not None:
            self._check_null(null)

    @property
    def settings(self) -> dict[str, Any]:
        """What made a text, for its trace; nothing secret."""
        names = ("mode", "selection", "prior", "median", "channels", "tolerance", "decay")
        return {**super().settings, "key_id": self.key.id, **{name: getattr(self, name) for name in names}}

    def with_null(self, null: Null) -> "PMark":
        """Returns a copy that judges by `null`; warns where that was measured under another key, encoder or cut."""
        self._check_null(null)
        other = copy.copy(self)
        other.null = null
        return other

    def _check_null(self, null: Null) -> None:
        names = ("key_id", "encoder", "segmenter", "mode", "tolerance", "decay")
        recorded = {name: getattr(null, name) for name in names}
        self.check_recorded({name: value for name, value in recorded.items() if value != ""}, names)
        if (null.medians is None) != (self.prior == "zero"):
            message = f"the null was measured with another prior than {self.prior!r}: its p-values mean nothing"
            warnings.warn(message, stacklevel=3)
        if null.medians is not None and len(null.medians) != self.channels:
            raise ValueError(f"the null has medians of {len(null.medians)} channels, the key has {self.channels}")

    def proxies(self, embeddings: Float[np.ndarray, "*batch dim"]) -> Float64[np.ndarray, "*batch channels"]:
        """Returns F_j of unit embeddings: their cosines with the pivots (section "Proxy function").

        Raises:
            ValueError: The key has more channels than the embeddings dimensions, or the null knows another dimension.
        """
        dimension = embeddings.shape[-1]
        if self.null is not None and self.null.dimension not in (None, dimension):
            raise ValueError(
                f"the null was measured on embeddings of dimension {self.null.dimension}, the encoder gives {dimension}"
            )
        return np.asarray(embeddings.astype(np.float64) @ self.key.pivots(dimension).T)

    def thresholds(
        self, contexts: Sequence[str], rng: np.random.Generator
    ) -> Sequence[Float64[np.ndarray, " channels"] | None]:
        """Returns the medians that the draft model estimates, or those known beforehand; None where neither is."""
        if self.mode == "offline":
            return [self._prior()] * len(contexts)
        if self.draft is None:
            return [None] * len(contexts)
        # Where the draft model has no choice to offer, the middle of all directions stands in.
        return list(np.nan_to_num(self._drawn_medians(self.draft, contexts, rng)[0]))

    def select(self, pools: Sequence[Pool], rng: np.random.Generator) -> list[Selection]:
        """Chooses a sentence for each document; see the class."""
        proxies, sizes = self._padded(pools)
        rows = {number: self.key.bits(1, number)[0] for number in {pool.number for pool in pools}}
        bits = np.stack([rows[pool.number] for pool in pools])
        if not self._first_right and self.selection == "sequential":
            halving = halve(proxies, bits, rng, sizes=sizes, median=self.median)
            chosen, records = halving.chosen, [{"survivors": row.tolist()} for row in halving.survivors]
            thresholds = halving.medians
        else:
            thresholds = np.stack(
                [
                    median(values[:size].T, self.median) if pool.thresholds is None else pool.thresholds
                    for pool, values, size in zip(pools, proxies, sizes, strict=True)
                ]
            )
            chosen, matches = best_match(proxies, thresholds, bits, rng, sizes=sizes, first=self._first_right)
            records = [{"matches": int(count)} for count in matches]
        selections = []
        for row, pool in enumerate(pools):
            index = int(chosen[row])
            final = pool.exhausted or records[row].get("matches", self.channels) == self.channels
            records[row] |= {"proxies": proxies[row, index].tolist(), "medians": thresholds[row].tolist()}
            skipped = pool.exhausted and len(set(pool.sentences)) == 1
            selections.append(Selection(index if final else None, records[row], skipped))
        return selections

    def detect_batch(
        self,
        texts: Sequence[str | WatermarkedText],
        *,
        prompts: Sequence[str | None] | None = None,
        has_prompt: bool = True,
        sampler: Sampler | None = None,
        align: Literal["window"] | None = None,
        window: int = WINDOW,
        penalty: float = PENALTY,
    ) -> list[DetectionResult]:
        """Says which texts are marked; the sentences of all are encoded at once.

        Args:
            texts: As `SentenceWatermark.detect_batch`.
            prompts: As there.
            has_prompt: As there.
            sampler: Online: the model that wrote marked texts; draws what else could have stood at each sentence.
            align: "window" searches for the sentences of the key near their places, for texts where some were put in
                or taken out; z and p-values are then those of the search, not to be mixed with the plain ones (ours).
            window: How far, in sentences.
            penalty: What a shift by one costs, in counts.

        Returns:
            One result for each text.

        Raises:
            ValueError: Online without a sampler, or as `SentenceWatermark.detect_batch`.
            SamplerError: The sampler gave nothing for any text.
        """
        if align not in (None, "window"):
            raise ValueError(f"align={align!r}: must be None or 'window'")
        documents = self.documents(texts, prompts=prompts, has_prompt=has_prompt)
        return self._scored(
            documents, lambda some: self.score(some, sampler=sampler, align=align, window=window, penalty=penalty)
        )

    def score(
        self,
        documents: Sequence[Document],
        *,
        sampler: Sampler | None = None,
        align: Literal["window"] | None = None,
        window: int = WINDOW,
        penalty: float = PENALTY,
    ) -> list[DetectionResult]:
        """Scores documents; see `detect_batch`."""
        results = []
        for document, thresholds in zip(documents, self._expected(documents, sampler), strict=True):
            proxies, total = self.proxies(document.embeddings), len(document.sentences)
            tested = ~np.isnan(thresholds).any(axis=1)
            rows, shifts, reason = np.arange(total), [0] * total, ""
            bits = self.key.bits(total + (window if align else 0))
            z = calibrated = 0.0
            p = p_calibrated = 1.0
            if align and tested.any():
                # A threshold at the proxy itself counts alike under every key: no evidence.
                filled = np.where(tested[:, None], thresholds, proxies)
                found = aligned_p_value(
                    proxies,
                    filled,
                    bits,
                    window=window,
                    penalty=penalty,
                    tolerance=self.tolerance,
                    decay=self.decay,
                    seed=self.seed or 0,
                )
                z = calibrated = found.z
                p = p_calibrated = found.p_value
                rows, shifts, reason = rows + found.shifts, list(found.shifts), "aligned with the key"
            counts = self._counts(proxies, thresholds, bits[rows])
            if tested.any() and not align:
                size, sum_ = int(tested.sum()) * self.channels, float(np.nansum(counts))
                z = z_score(sum_, size)
                p = p_value(z)
                if self.null is None:
                    opposite = self._counts(proxies, thresholds, ~bits[rows])
                    calibrated, p_calibrated = among_other_bits(counts[tested], opposite[tested])
                else:
                    calibrated = self.null.z(sum_, size)
                    p_calibrated = self.null.p_value(calibrated)
            if not tested.all():
                reason = f"{total - int(tested.sum())} of {total} sentences could carry no evidence"
            results.append(
                DetectionResult(
                    z=z,
                    p_value=p,
                    z_calibrated=calibrated,
                    p_calibrated=p_calibrated,
                    is_watermarked=p_calibrated <= self.alpha,
                    counts=counts,
                    thresholds=thresholds,
                    num_sentences=int(tested.sum()),
                    low_power=bool(tested.sum() < LOW_POWER),
                    reason=reason,
                    per_sentence=[
                        {"number": t + 1, "sentence": text, "tested": bool(tested[t]), "shift": shifts[t]}
                        for t, text in enumerate(document.sentences)
                    ],
                )
            )
        return results

    def calibrate(
        self,
        human_texts: Sequence[str],
        *,
        prompts: Sequence[str | None] | None = None,
        has_prompt: bool = True,
        sampler: Sampler | None = None,
    ) -> Null:
        """Measures what text gives that is not marked; some hundred texts of the domain make a null.

        Args:
            human_texts: Texts.
            prompts: As `detect_batch`.
            has_prompt: As `detect_batch`; must be as there.
            sampler: Online: as `detect_batch`.

        Returns:
            The null, for `with_null`; with `prior="calibrated"` it holds the medians too.

        Raises:
            ValueError: Fewer than two texts with sentences to test, or as `detect_batch`.
        """
        every = self.documents(human_texts, prompts=prompts, has_prompt=has_prompt)
        documents = [each for each in every if each.sentences]
        proxies = [self.proxies(each.embeddings) for each in documents]
        medians = None
        if self.mode == "offline" and self.prior == "calibrated" and proxies:
            medians = median(np.concatenate(proxies).T, self.median)
            expected = [np.tile(medians, (len(each), 1)) for each in proxies]
        else:
            expected = self._expected(documents, sampler) if documents else []
        counts = [
            self._counts(values, limits, self.key.bits(len(values)))
            for values, limits in zip(proxies, expected, strict=True)
        ]
        return Null.fit(
            [each[~np.isnan(each).any(axis=1)] for each in counts],
            medians=None if medians is None else tuple(medians.tolist()),
            key_id=self.key.id,
            encoder=self.encoder.fingerprint(),
            segmenter=self.segmenter.name,
            mode=self.mode,
            dimension=documents[0].embeddings.shape[1] if documents else None,
            tolerance=self.tolerance,
            decay=self.decay,
        )

    def _prior(self) -> Float64[np.ndarray, " channels"]:
        if self.prior == "zero":
            return np.zeros(self.channels)
        if self.null is None or self.null.medians is None:
            raise ValueError("prior='calibrated' needs a null with medians: with_null(calibrate(texts))")
        return np.array(self.null.medians, np.float64)

    def _padded(
        self, pools: Sequence[Pool]
    ) -> tuple[Float64[np.ndarray, "docs candidates channels"], Int[np.ndarray, " docs"]]:
        sizes = np.array([len(pool.sentences) for pool in pools])
        padded = np.zeros((len(pools), sizes.max(), self.channels))
        padded[np.arange(sizes.max()) < sizes[:, None]] = self.proxies(np.concatenate([p.embeddings for p in pools]))
        return padded, sizes

    def _counts(
        self,
        proxies: Float64[np.ndarray, "sentences channels"],
        thresholds: Float64[np.ndarray, "sentences channels"],
        bits: Bool[np.ndarray, "sentences channels"],
    ) -> Float64[np.ndarray, "sentences channels"]:
        counts = soft_counts(proxies, thresholds, bits, tolerance=self.tolerance, decay=self.decay)
        return np.where(np.isnan(thresholds), np.nan, counts)

    def _expected(
        self, documents: Sequence[Document], sampler: Sampler | None
    ) -> list[Float64[np.ndarray, "sentences channels"]]:
        """The thresholds of every sentence; NaN where the model could not have said anything else."""
        if self.mode == "offline":
            return [np.tile(self._prior(), (len(each.sentences), 1)) for each in documents]
        model = self.draft or sampler
        if model is None:
            raise ValueError(
                "online detection draws from the model that wrote marked texts: pass sampler=..., or write and detect "
                "with mode='offline', which needs none"
            )
        # Another stream than generation's, whose draws would otherwise come again and match by more than the key.
        rng = np.random.default_rng(None if self.seed is None else [self.seed, 1])
        contexts = [context for each in documents for context in each.contexts]
        medians, heard = self._drawn_medians(model, contexts, rng)
        if not heard:
            raise SamplerError("the sampler gave no sentence for any of the contexts")
        return np.split(medians, np.cumsum([len(each.contexts) for each in documents])[:-1])

    def _drawn_medians(
        self, sampler: Sampler, contexts: Sequence[str], rng: np.random.Generator
    ) -> tuple[Float64[np.ndarray, "contexts channels"], bool]:
        """Medians over the candidates of each context, NaN where there is no choice; and whether any candidate came."""
        medians = np.full((len(contexts), self.channels), np.nan)
        step, heard = max(1, _BLOCK // self.num_samples), False
        for at in range(0, len(contexts), step):
            groups = self.candidates(sampler, contexts[at : at + step], rng)
            heard = heard or any(groups)
            for row, (group, embeddings) in enumerate(zip(groups, self.embed(groups), strict=True), at):
                if len(group) >= self.smallest_pool and len(set(group)) > 1:
                    medians[row] = median(self.proxies(embeddings).T, self.median)
        return medians, heard
