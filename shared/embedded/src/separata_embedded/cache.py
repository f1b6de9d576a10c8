"""Folders that are made once and kept in the user's cache directory.

A folder appears under its final name only when it is complete: it is written under another name beside it, forced to
disk and renamed. One process at a time makes it, held apart by a lock that the operating system drops when the
process dies, so whoever holds the lock may remove what a killed process left behind.
"""

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from separata_embedded.errors import CacheError
from separata_embedded.files import sha256_of

VARIABLE = "SEPARATA_CACHE"
"""Environment variable that names the cache directory."""

MANIFEST = "manifest.json"
STAMP = "verified.json"
FORMAT = 1
LOCK_SECONDS = 900.0

_log = logging.getLogger(__name__)


def cache_directory(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The directory that holds converted models and fetched texts.

    Args:
        cache_dir: The directory itself. None takes the environment variable `SEPARATA_CACHE`, and without that the
            operating system's place for a user's caches.

    Returns:
        Its absolute path. It need not exist yet.

    Raises:
        CacheError: It begins with `~name`, and there is no such user.
    """
    chosen = cache_dir if cache_dir is not None else os.environ.get(VARIABLE)
    if chosen:
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError as error:
            raise CacheError(
                f"The cache directory {os.fspath(chosen)} begins with a home directory that is not known. Write it "
                f"out in the environment variable {VARIABLE} or the argument cache_dir."
            ) from error
    import platformdirs

    return platformdirs.user_cache_path("separata", appauthor=False)


def existing_folder(
    name: str, *, origin: Mapping[str, str], cache_dir: str | os.PathLike[str] | None = None
) -> Path | None:
    """Return a folder of the cache if it is complete and undamaged, and make nothing.

    Args:
        name: As in `cached_folder`.
        origin: As in `cached_folder`.
        cache_dir: As in `cache_directory`.

    Returns:
        The folder, or None.
    """
    folder = cache_directory(cache_dir) / name
    return folder if _fault(folder, origin) is None else None


def cached_folder(
    name: str,
    prepare: Callable[[], Callable[[Path], None]],
    *,
    origin: Mapping[str, str],
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Return a folder of the cache, making it first where it is missing, damaged or of another origin.

    Every file's size and SHA-256 are in the folder's manifest. A call compares sizes and modification times with those
    at the last full reading, and reads and hashes a file only where they differ.

    Args:
        name: Name of the folder inside the cache directory.
        prepare: Does what can fail for reasons of its own, then returns a function that writes the files into the
            folder that it is given. Only errors of the latter are taken for errors of the cache.
        origin: What the content is made from, e.g. hashes and versions that matter. A folder of another origin is
            made anew.
        cache_dir: As in `cache_directory`.

    Returns:
        The complete folder.

    Raises:
        CacheError: The cache directory cannot be written to, or another process holds it for too long.
    """
    root = cache_directory(cache_dir)
    folder = root / name
    # Without the lock, so that a complete cache serves from a read-only file system too.
    if existing_folder(name, origin=origin, cache_dir=root):
        return folder
    with _locked(root, name):
        fault = _fault(folder, origin)
        if fault is None:
            return folder
        if fault:
            _log.warning("%s and is made anew", fault)
        with _errors_named(root):
            _remove(folder)
        writer = prepare()
        unfinished = root / f".{name}.{secrets.token_hex(4)}.tmp"
        try:
            with _errors_named(root):
                unfinished.mkdir()
                writer(unfinished)
                _write_manifest(unfinished, origin)
                _force_to_disk(*unfinished.rglob("*"), unfinished)
                unfinished.rename(folder)
                _force_to_disk(root)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(root / f"{name}.lock", timeout=LOCK_SECONDS)
    with _errors_named(root):
        root.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:
            raise CacheError(
                f"Another process has held {lock.lock_file} for more than {LOCK_SECONDS:.0f} seconds. Wait for it, or "
                f"set {VARIABLE} or cache_dir to another directory."
            ) from error
    try:
        with _errors_named(root):
            for leftover in root.glob(f".{name}.*.tmp"):
                _remove(leftover)
        yield
    finally:
        lock.release()


@contextmanager
def _errors_named(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"Cannot write to the cache directory {root}: {error}. Make room or give permission there, or choose "
            f"another directory with the environment variable {VARIABLE} or the argument cache_dir."
        ) from error


def _fault(folder: Path, origin: Mapping[str, str]) -> str | None:
    """What keeps a folder from being used: None if nothing does, "" if it is not there or of another origin."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return f"{folder} is incomplete" if folder.exists() else ""
    except (OSError, ValueError):
        return f"{folder} has no readable manifest"
    try:
        if manifest["format"] != FORMAT or manifest["origin"] != dict(origin):
            return ""
        seen = _read_stamp(folder)
        now: dict[str, list[int]] = {}
        for file, known in manifest["files"].items():
            status = (folder / file).stat()
            now[file] = [status.st_size, status.st_mtime_ns]
            if status.st_size != known["size"] or (
                seen.get(file) != now[file] and sha256_of(folder / file) != known["sha256"]
            ):
                return f"{folder / file} differs from its manifest"
    except (OSError, KeyError, TypeError, AttributeError) as error:
        return f"{folder} is damaged ({error!r})"
    if seen != now:
        _write_stamp(folder, now)
    return None


def _read_stamp(folder: Path) -> dict[str, object]:
    try:
        stamp = json.loads((folder / STAMP).read_bytes())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(folder: Path, stamp: Mapping[str, list[int]]) -> None:
    unfinished = folder / f".{STAMP}.{secrets.token_hex(4)}"
    try:
        unfinished.write_text(json.dumps(stamp))
        unfinished.replace(folder / STAMP)
    except OSError:  # read-only or full: the next call hashes once more, nothing else
        with suppress(OSError):
            unfinished.unlink()


def _write_manifest(folder: Path, origin: Mapping[str, str]) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    manifest = {
        "format": FORMAT,
        "origin": dict(origin),
        "made_with": _versions(),
        "files": {name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for name, path in names.items()},
    }
    stamp = {name: [path.stat().st_size, path.stat().st_mtime_ns] for name, path in names.items()}
    (folder / STAMP).write_text(json.dumps(stamp))
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for distribution in ("torch", "transformers", "tokenizers", "safetensors", "gguf"):
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return found


def _force_to_disk(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
