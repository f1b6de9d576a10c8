"""From proxies to evidence: soft counts, z, and what they are on text without a watermark."""

import dataclasses
import math
import os
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from separata_kit.files import read_json, write_json

SCHEMA = "pmark/null"
SCHEMA_VERSION = 1

TOLERANCE = 1e-3
"""How far on the wrong side of its threshold a proxy still counts whole (tau)."""
DECAY = 250.0
"""Rate K at which the count falls with the distance behind that."""

_STEPS = 100
"""Into which a count is divided where sums are told apart."""
_MOST_EXACT = 400
"""Counts of a text of which all sums are gone through, in some milliseconds."""


def soft_counts(
    proxies: Float[np.ndarray, "*shape"],
    thresholds: Float[np.ndarray, "*#shape"],
    bits: Bool[np.ndarray, "*#shape"],
    *,
    tolerance: float = TOLERANCE,
    decay: float = DECAY,
) -> Float[np.ndarray, "*shape"]:
    """Evidence of every sentence and channel (soft count of the detection).

    Args:
        proxies: F_j of the observed sentences.
        thresholds: m_j.
        bits: Private bits, True where the proxy should be the greater.
        tolerance: tau.
        decay: K; infinity with a tolerance of 0 gives hard counts.

    Returns:
        1 on the right side or at most `tolerance` beyond the threshold, else exp(-K |F - m|); within 0 and 1.

    Raises:
        ValueError: A negative tolerance or decay.
    """
    _check_shape(tolerance, decay)
    beyond = np.where(bits, thresholds - proxies, proxies - thresholds)
    right = beyond <= tolerance
    return np.asarray(np.where(right, 1.0, np.exp(-decay * np.where(right, 1.0, beyond))))


def z_score(total: float, n: int, mean: float = 0.5, std: float = 0.5) -> float:
    """Standard score (x - n mean) / (std sqrt(n)) of a sum of counts; by default that of fair coins.

    Args:
        total: Sum x of the counts.
        n: How many: sentences times channels.
        mean: Of a count without a watermark.
        std: Its standard deviation.

    Returns:
        z. With the defaults it is too great for soft counts of unmarked text; `Null.z` is not.

    Raises:
        ValueError: `n` below 1.
    """
    if n < 1:
        raise ValueError(f"n={n}; there must be at least one count")
    return (total - n * mean) / (std * math.sqrt(n))


def p_value(z: float) -> float:
    """1 - Phi(z), accurate far into the tail.

    Args:
        z: Standard score.

    Returns:
        Probability that a standard normal value is at least `z`.
    """
    return math.erfc(z / math.sqrt(2)) / 2


def gaussian_null(dimension: int, *, tolerance: float = TOLERANCE, decay: float = DECAY) -> tuple[float, float]:
    """Mean and standard deviation of a soft count of unmarked text, if F - m is Gaussian with variance 1/d.

    That is the cosine with a random direction in a high dimension, its true median the threshold. Closed form (ours).

    Args:
        dimension: Width d of the embeddings.
        tolerance: tau.
        decay: K.

    Returns:
        Mean and standard deviation.

    Raises:
        ValueError: `dimension` below 1, a negative tolerance or decay.
    """
    _check_shape(tolerance, decay)
    if dimension < 1:
        raise ValueError(f"dimension={dimension}; it must be at least 1")
    from scipy.special import erfcx  # type: ignore[import-untyped]  # scipy ships no types

    scale = math.sqrt(dimension)

    def tail(rate: float) -> float:
        """E[exp(-rate g); g > tau] for g ~ N(0, 1/d); erfcx keeps the huge and the tiny factor apart."""
        if rate == math.inf:
            return 0.0
        end = (tolerance * scale + rate / scale) / math.sqrt(2)
        return float(erfcx(end)) / 2 * math.exp(-((tolerance * scale) ** 2) / 2 - rate * tolerance)

    whole = 1 - p_value(tolerance * scale)
    mean = whole + tail(decay)
    return mean, math.sqrt(max(0.0, whole + tail(2 * decay) - mean**2))


def among_other_bits(
    counts: Float[np.ndarray, "sentences channels"], opposite: Float[np.ndarray, "sentences channels"]
) -> tuple[float, float]:
    """Where a text's sum of counts lies among its sums under all other bits: a test that needs no model (ours).

    Bits are fair coins that know nothing of an unmarked text, so under them each count is either of two values. The
    p-value is exact for differences rounded to hundredths, up to 400 counts; beyond that it is the normal one.

    Args:
        counts: Under the key's bits.
        opposite: What each would be under the opposite bit.

    Returns:
        The sum's standard score and the share of bits that give as much or more; 0 and 1 where bits change nothing.
    """
    differences = (counts - opposite).ravel()
    spread = math.sqrt(float(differences @ differences))
    if not spread:
        return 0.0, 1.0
    z = float(differences.sum()) / spread
    steps = np.rint(differences * _STEPS).astype(np.int64)
    if len(steps) > _MOST_EXACT:
        return z, p_value(z)
    shares = np.ones(1)  # of sums from the least to the greatest, two steps apart
    for width in np.abs(steps[steps != 0]):
        wider = np.zeros(len(shares) + width)
        wider[: len(shares)] = shares / 2
        wider[width:] += shares / 2
        shares = wider
    # The sum of all |steps| less twice those on the wrong side.
    return z, min(1.0, float(shares[int(steps[steps > 0].sum()) :].sum()))


@dataclasses.dataclass(frozen=True)
class Null:
    """What detection gives on text without a watermark, under one key, encoder, segmenter and mode.

    Attributes:
        mean: Mean mu0 of a count.
        std: sigma0: standard deviation of a text's sum of counts, over the root of their number.
        sample: Calibrated z of the human texts, ascending; empty for the Gaussian model.
        medians: Per channel, the median of the proxies of the human sentences; None if not measured.
        key_id: Public id of the key.
        encoder: Fingerprint of the encoder.
        segmenter: Name of the segmenter.
        mode: Mode of the detection.
        num_texts: Number of human texts behind it.
        dimension: Width of the embeddings.
        tolerance: tau of the soft counts.
        decay: K of the soft counts.
    """

    mean: float
    std: float
    sample: tuple[float, ...] = ()
    medians: tuple[float, ...] | None = None
    key_id: str = ""
    encoder: str = ""
    segmenter: str = ""
    mode: str = ""
    num_texts: int = 0
    dimension: int | None = None
    tolerance: float = TOLERANCE
    decay: float = DECAY

    def __post_init__(self) -> None:
        """Refuse, as a ValueError, figures that cannot be."""
        figures = [self.mean, self.std, self.tolerance, *self.sample, *(self.medians or ())]
        if not all(math.isfinite(each) for each in figures) or self.std <= 0:
            raise ValueError("mean, std, tolerance, sample and medians must be finite numbers, and std positive")
        if list(self.sample) != sorted(self.sample):
            raise ValueError("sample must be ascending")
        _check_shape(self.tolerance, self.decay)

    @classmethod
    def gaussian(cls, dimension: int, *, tolerance: float = TOLERANCE, decay: float = DECAY, **about: Any) -> "Null":
        """The analytic model of `gaussian_null`, for where there is no human text to measure on.

        Args:
            dimension: Width d of the embeddings.
            tolerance: tau.
            decay: K.
            **about: Further fields, such as `key_id`.

        Returns:
            A null without sample, whose p-values are those of a normal distribution.

        Raises:
            ValueError: As `gaussian_null`.
        """
        mean, std = gaussian_null(dimension, tolerance=tolerance, decay=decay)
        return cls(mean, std, dimension=dimension, tolerance=tolerance, decay=decay, **about)

    @classmethod
    def fit(cls, counts: Sequence[Float[np.ndarray, "_ _"]], **about: Any) -> "Null":
        """Measure on human texts.

        The standard deviation is taken over whole texts, since counts within one text are not independent: then
        the calibrated z of human text has variance 1.

        Args:
            counts: Soft counts [sentences, channels] of every text; texts without sentence are left out.
            **about: Further fields, such as `key_id`; not `num_texts`.

        Returns:
            The null.

        Raises:
            ValueError: Fewer than two texts, or texts whose counts do not differ.
        """
        sizes = np.array([each.size for each in counts if each.size], dtype=np.float64)
        totals = np.array([each.sum() for each in counts if each.size], dtype=np.float64)
        if len(sizes) < 2:
            raise ValueError(f"{len(sizes)} texts with sentences to test; calibration needs at least 2, better 100")
        mean = float(totals.sum() / sizes.sum())
        scores = (totals - sizes * mean) / np.sqrt(sizes)
        std = math.sqrt(float((scores**2).sum()) / (len(scores) - 1))
        if std < 1e-9:
            raise ValueError("the texts all have the same counts; nothing can be calibrated on them")
        return cls(mean, std, tuple(sorted((scores / std).tolist())), num_texts=len(sizes), **about)

    def z(self, total: float, n: int) -> float:
        """Calibrated standard score (x - n mu0) / (sigma0 sqrt(n)).

        Args:
            total: Sum x of the counts.
            n: How many.

        Returns:
            The score.

        Raises:
            ValueError: `n` below 1.
        """
        return z_score(total, n, self.mean, self.std)

    def p_value(self, z_calibrated: float) -> float:
        """Share of unmarked text with a score at least as great.

        Args:
            z_calibrated: What `z` gave.

        Returns:
            (1 + how many of the sample are as great) / (1 + its size): valid whatever the distribution. Without
            sample that of the normal distribution.
        """
        if not self.sample:
            return p_value(z_calibrated)
        greater = len(self.sample) - int(np.searchsorted(self.sample, z_calibrated, side="left"))
        return (1 + greater) / (1 + len(self.sample))

    def threshold(self, fpr: float) -> float:
        """The calibrated z above which a text counts as watermarked.

        Args:
            fpr: False-positive rate, between 0 and 1.

        Returns:
            The least threshold such that every score above it has a `p_value` of at most `fpr`.

        Raises:
            ValueError: `fpr` out of range, or less than the sample can show.
        """
        if not 0 < fpr < 1:
            raise ValueError(f"fpr={fpr}; it must lie between 0 and 1")
        if not self.sample:
            return NormalDist().inv_cdf(1 - fpr)
        size = len(self.sample)
        # The small number lets 100 * 0.01 count as 1.
        above = math.floor(fpr * (1 + size) + 1e-9) - 1
        if above < 0:
            raise ValueError(
                f"fpr={fpr} needs a sample of at least {math.ceil(1 / fpr - 1e-9) - 1} human texts; this has {size}"
            )
        return self.sample[size - 1 - above]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a JSON file, whole or not at all.

        Args:
            path: The file, replaced if it exists.

        Raises:
            OSError: It cannot be written.
        """
        value = dataclasses.asdict(self) | {"decay": None if self.decay == math.inf else self.decay}
        write_json(path, {"schema": SCHEMA, "version": SCHEMA_VERSION} | value)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Null":
        """Read what `save` wrote.

        Args:
            path: The file.

        Returns:
            The null.

        Raises:
            ValueError: The file holds none, is damaged, or comes from a newer version.
            OSError: It cannot be read.
        """
        value = read_json(path, schema=SCHEMA, version=SCHEMA_VERSION, what="null")
        try:
            fields = {each.name: value[each.name] for each in dataclasses.fields(cls)}
            fields["decay"] = math.inf if fields["decay"] is None else fields["decay"]
            fields["sample"] = tuple(fields["sample"])
            fields["medians"] = None if fields["medians"] is None else tuple(fields["medians"])
            return cls(**fields)
        except KeyError as error:
            raise ValueError(f"{os.fspath(path)}: damaged null: {error} is missing") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)}: damaged null: {error}") from None


def expected_z(channels: int, sentences: int, flip: float) -> float:
    """Mean of z when every count of a marked text is lost with the same probability: (1 - 2 eps) sqrt(T b).

    Args:
        channels: b.
        sentences: T.
        flip: eps.

    Returns:
        The mean.
    """
    return (1 - 2 * flip) * math.sqrt(sentences * channels)


def flip_bound(threshold: float, channels: int, sentences: int, flip: float) -> float:
    """Bound on the probability that a marked text is missed, its counts hard and lost independently.

    P(z < threshold) <= exp(-2 T b (1/2 - eps - threshold / (2 sqrt(T b)))^2), Hoeffding's inequality. The paper's own
    bound may differ; this one is ours.

    Args:
        threshold: Of z.
        channels: b.
        sentences: T.
        flip: eps.

    Returns:
        The bound; 1 where the threshold is above the expected z.
    """
    n = channels * sentences
    margin = 0.5 - flip - threshold / (2 * math.sqrt(n))
    return math.exp(-2 * n * margin**2) if margin > 0 else 1.0


def _check_shape(tolerance: float, decay: float) -> None:
    if not tolerance >= 0 or not decay >= 0:
        raise ValueError(f"tolerance={tolerance}, decay={decay}; both must be at least 0")
