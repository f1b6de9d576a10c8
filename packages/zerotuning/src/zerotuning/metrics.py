"""The four numbers that every report shows, with their uncertainty.

Much of what re-weighting gains on a classification task is a better *format*: more answers that parse. One accuracy
hides that, so four are reported: over all items, the share that parses, over those that parse, and with the choice
constrained to the label words. "Vanilla" and "tuned" are always compared on the same items, pairwise.
"""

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

UNPARSED = -1
"""Stands for the label of an answer in which no label word was found."""


def wilson_interval(successes: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927).

    Args:
        successes: How often it happened.
        total: How often it could have.
        confidence: Coverage.

    Returns:
        Lower and upper end, within 0 and 1; (0, 1) if `total` is 0.

    Raises:
        ValueError: Counts that cannot be.
    """
    if not 0 <= successes <= total:
        raise ValueError(f"successes={successes} must lie between 0 and total={total}")
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / total
    centre = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # The closed form misses the exact ends by rounding only.
    low = 0.0 if successes == 0 else max(0.0, (centre - half) / scale)
    high = 1.0 if successes == total else min(1.0, (centre + half) / scale)
    return low, high


def sign_test(gained: int, lost: int) -> float:
    """Exact two-sided sign test: are gains and losses equally likely?

    Args:
        gained: Pairs that rose.
        lost: Pairs that fell; those that did neither do not count.

    Returns:
        The p-value; 1 if there is nothing to tell from.
    """
    if gained + lost == 0:
        return 1.0
    from scipy.stats import binomtest  # type: ignore[import-untyped]  # scipy ships no types

    return float(binomtest(gained, gained + lost, 0.5).pvalue)


def histogram_entropy(counts: Sequence[int]) -> float:
    """Shannon entropy of how answers spread over labels.

    Args:
        counts: How often each label was given.

    Returns:
        Nats; 0 if all answers are the same, or there is none.
    """
    total = sum(counts)
    return sum(-count / total * math.log(count / total) for count in counts if count) if total else 0.0


@dataclasses.dataclass(frozen=True)
class Proportion:
    """A share of counted items.

    Attributes:
        successes: How many have the property.
        total: How many there are.
    """

    successes: int
    total: int

    @property
    def value(self) -> float:
        """The share; nan if there are no items."""
        return self.successes / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95 % Wilson interval."""
        return wilson_interval(self.successes, self.total)

    def to_json(self) -> dict[str, object]:
        """A form for JSON, which has no nan."""
        return {
            "value": self.value if self.total else None,
            "interval95": list(self.interval),
            "successes": self.successes,
            "total": self.total,
        }


@dataclasses.dataclass(frozen=True)
class Scores:
    """The four numbers of one model on one set of items.

    Attributes:
        accuracy: Right answers over all items; an answer that does not parse is wrong.
        parse_rate: Answers in which a label word was found.
        accuracy_parsed: Right answers among those.
        constrained_accuracy: Items whose true label has the highest likelihood of all label words.
    """

    accuracy: Proportion
    parse_rate: Proportion
    accuracy_parsed: Proportion
    constrained_accuracy: Proportion

    @classmethod
    def of(cls, labels: Sequence[int], parsed: Sequence[int], constrained: Sequence[int]) -> "Scores":
        """Count.

        Args:
            labels: The true label of each item.
            parsed: The label read from each answer, `UNPARSED` if none.
            constrained: The most likely label word of each item.

        Returns:
            The scores.

        Raises:
            ValueError: The three differ in length.
        """
        if not len(labels) == len(parsed) == len(constrained):
            raise ValueError(f"{len(labels)} labels, {len(parsed)} parsed and {len(constrained)} constrained answers")
        total = len(labels)
        readable = sum(answer != UNPARSED for answer in parsed)
        right = sum(answer == label for answer, label in zip(parsed, labels, strict=True))
        chosen = sum(answer == label for answer, label in zip(constrained, labels, strict=True))
        return cls(
            accuracy=Proportion(right, total),
            parse_rate=Proportion(readable, total),
            accuracy_parsed=Proportion(right, readable),
            constrained_accuracy=Proportion(chosen, total),
        )

    def to_json(self) -> dict[str, object]:
        """A form for JSON."""
        return {field.name: getattr(self, field.name).to_json() for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True)
class PairedComparison:
    """Two models on the same items.

    Attributes:
        gained: Items right only with the second.
        lost: Items right only with the first.
        total: All items.
    """

    gained: int
    lost: int
    total: int

    @classmethod
    def of(cls, before: Sequence[bool], after: Sequence[bool]) -> "PairedComparison":
        """Count.

        Args:
            before: Whether the first model was right, per item.
            after: Whether the second was.

        Returns:
            The comparison.

        Raises:
            ValueError: The two differ in length.
        """
        if len(before) != len(after):
            raise ValueError(f"paired answers must be as many: {len(before)} before, {len(after)} after")
        pairs = list(zip(before, after, strict=True))
        return cls(sum(b and not a for a, b in pairs), sum(a and not b for a, b in pairs), len(pairs))

    @property
    def difference(self) -> float:
        """How much larger the second accuracy is, as a share of the items; nan if there are none."""
        return (self.gained - self.lost) / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference: Wald with half an item added to each cell (Agresti and Min 2005)."""
        total, gained, lost = self.total + 2, self.gained + 0.5, self.lost + 0.5
        centre = (gained - lost) / total
        half = NormalDist().inv_cdf(0.975) * math.sqrt(gained + lost - (gained - lost) ** 2 / total) / total
        return max(-1.0, centre - half), min(1.0, centre + half)

    @property
    def p_value(self) -> float:
        """Exact two-sided McNemar test: are gains and losses equally likely?"""
        return sign_test(self.gained, self.lost)

    def to_json(self) -> dict[str, object]:
        """A form for JSON."""
        return {
            "gained": self.gained,
            "lost": self.lost,
            "total": self.total,
            "difference": self.difference if self.total else None,
            "interval95": list(self.interval),
            "p_value": self.p_value,
        }
