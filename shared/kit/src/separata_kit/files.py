"""Files that are there completely or not at all."""

import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Name = str | os.PathLike[str]


def write_atomically(path: Name, write: Callable[[Path], object], *, mode: int | None = None) -> None:
    """Write a file beside its place and move it there.

    Args:
        path: The file, replaced if it exists; where it is a link, what the link leads to is replaced.
        write: Writes the contents to the existing, empty file that it is given.
        mode: Its permissions, from the first byte on, such as `0o600`; those of any new file if not given.

    Raises:
        OSError: It cannot be written, or is a folder, a device or the like.
    """
    refuse_special(path)
    target = Path(os.path.realpath(path))
    # Not all of a long name: with what is added it would be too long.
    temporary = target.with_name(f".{target.name[:50]}.{secrets.token_hex(6)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        handle = os.open(temporary, flags, 0o666 if mode is None else mode)
    except OSError as error:
        raise _unwritable(path, target, error) from None
    try:
        if mode is not None and hasattr(os, "fchmod"):  # there is none on Windows
            os.fchmod(handle, mode)
        os.close(handle)
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Name, text: str, *, mode: int | None = None) -> None:
    """Write a text file in UTF-8, whole or not at all.

    Args:
        path: The file, as for `write_atomically`.
        text: Its contents.
        mode: As for `write_atomically`.

    Raises:
        OSError: It cannot be written.
    """

    def write(file: Path) -> None:
        # Encoded at once, so that line ends stay what they are on every system.
        file.write_bytes(text.encode())

    write_atomically(path, write, mode=mode)


def write_json(path: Name, value: Any, *, mode: int | None = None) -> None:
    """Write a JSON file, whole or not at all.

    Args:
        path: The file, as for `write_atomically`.
        value: What JSON can hold.
        mode: As for `write_atomically`.

    Raises:
        TypeError: JSON cannot hold it.
        ValueError: It holds a number that is not finite.
        OSError: It cannot be written.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n", mode=mode)


def read_json(path: Name, *, schema: str, version: int, what: str) -> dict[str, Any]:
    """Read a JSON object that says of what kind and version it is.

    Args:
        path: The file.
        schema: What its `schema` must be: the package's name, a slash, and the kind.
        version: The newest `version` that is understood; the oldest is 1.
        what: What the file should be, for messages: `"head profile"`.

    Returns:
        The object, `schema` and `version` included.

    Raises:
        ValueError: It is no complete JSON object, of another kind, or from a newer version; the message names the file.
        OSError: It cannot be read.
    """
    body = read_json_object(path)
    if body.get("schema") != schema:
        raise ValueError(f"{path} is no {what}: its 'schema' is not {schema!r}")
    found = body.get("version")
    if type(found) is not int or found < 1:
        raise ValueError(f"{path} has no valid 'version' (found {found!r})")
    if found > version:
        package = schema.partition("/")[0]
        raise ValueError(
            f"{path} has version {found}; this {package} reads up to version {version}: install a newer one"
        )
    return body


def read_json_object(path: Name) -> dict[str, Any]:
    """Read any JSON object.

    Args:
        path: The file, in UTF-8.

    Returns:
        The object.

    Raises:
        ValueError: It is no complete JSON, or no object; the message names the file.
        OSError: It cannot be read.
    """
    try:
        # Some editors put a byte order mark before UTF-8.
        body = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a complete JSON file ({error}); it may be truncated") from None
    if not isinstance(body, dict):
        raise ValueError(f"{path} holds no JSON object")  # noqa: TRY004  # the file is wrong, not the caller's type
    return body


def check_writable(path: Name) -> None:
    """Refuse, before the work, a place where a file cannot be written after it.

    Args:
        path: The file to come.

    Raises:
        OSError: Its folder does not exist or may not be written to, or a folder or a device is in its place.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    refuse_special(path)
    target = Path(os.path.realpath(path))
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise _unwritable(path, target, error) from None


def refuse_special(path: Name) -> None:
    """Refuse what is there and no ordinary file: to move a file into the place of a device would replace the device.

    Args:
        path: Where a file is to be.

    Raises:
        OSError: It is a folder, a device or the like.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        kind = "folder" if path.is_dir() else "device or the like"
        raise OSError(f"{path} is a {kind}; name an ordinary file")


def _unwritable(path: Name, target: Path, error: OSError) -> OSError:
    if not target.parent.is_dir():
        return FileNotFoundError(f"the folder of {path} does not exist")
    return type(error)(f"the folder of {path} cannot be written to: {error.strerror}")


def lock_file(file: Any, path: Name) -> None:
    """Keep other runs out of an open file until it is closed, as two would write into each other's lines.

    Args:
        file: The open file.
        path: Its name, for the message.

    Raises:
        OSError: Another run has it.
    """
    try:
        import fcntl
    except ImportError:  # there is none on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"{path} is in use by another run; wait for it, or give another file") from None
    except OSError:  # some network file systems have no locks
        return


def digest(value: Any) -> str:
    """A digest of what JSON can hold; objects are equal whatever the order of their keys.

    Args:
        value: The value.

    Returns:
        64 hexadecimal digits of SHA-256.

    Raises:
        TypeError: JSON cannot hold it.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def versions(*distributions: str) -> dict[str, str]:
    """Which versions are installed, for a file to name what wrote it.

    Args:
        distributions: Names of distributions.

    Returns:
        Their versions, `"unknown"` for one that is not installed, as a vendored copy is not.
    """
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
