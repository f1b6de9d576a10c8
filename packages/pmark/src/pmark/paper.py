"""The paper whose method this package is for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper, as it is cited.

    Attributes:
        title: Its title.
        url: Where it can be read.
    """

    title: str
    url: str


PAPER = Paper(
    title=(
        "PMark: Towards Robust and Distortion-free Semantic-level Watermarking with (Multiple) "
        "Channel Constraints"
    ),
    url="https://arxiv.org/abs/2509.21057",
)
"""What this package is for, and what to cite."""
