"""Check that a fresh resolution of the workspace is the one that is pinned here, or pin a new one.

`uv.lock` names the hosts that files were found on, so it is derived and not committed. Two files stand for it:
`tools/lock.sha256`, the digest of the lock without hosts, times and sizes, and `tools/requirements.txt`, every pinned
version with its hashes, for those who install without uv. Both are the same behind every mirror.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import workspace

DIGEST = Path("tools/lock.sha256")
REQUIREMENTS = Path("tools/requirements.txt")
HEADER = "# Derived from uv.lock by `python tools/lock.py --write`; install with `pip install --require-hashes -r`.\n"
SIZE_BUDGET = 500_000
EXPORT = (
    *("--all-packages", "--all-extras", "--all-groups", "--no-emit-workspace"),
    *("--no-header", "--no-annotate", "--format", "requirements.txt"),
)


class LockError(Exception):
    """A lock that cannot be made or read; the message is one line for the user."""


def manifests(root: Path) -> list[Path]:
    """List the pyproject files that the resolution depends on, relative to `root`."""
    members = workspace.Workspace.load(root).members
    return [Path("pyproject.toml"), *(member.path.relative_to(root.resolve()) / "pyproject.toml" for member in members)]


def normalise(text: str) -> dict[str, Any]:
    """Reduce a `uv.lock` to what every mirror agrees on.

    Args:
        text: The content of the lock.

    Returns:
        The lock without registries, hosts, sizes and upload times, files named by their file name and sorted. The
        versions of the workspace's own members go as well: a release of ours is no change of the pins.
    """
    lock: dict[str, Any] = _without_hosts(tomllib.loads(text))
    for package in lock.get("package", []):
        if not _is_registry(package):
            package.pop("version", None)
        package.get("wheels", []).sort(key=lambda file: str(file["file"]))
    return lock


def _without_hosts(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_hosts(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept: dict[str, Any] = {}
    for key, value in node.items():
        if key == "url":
            kept["file"] = urllib.parse.unquote(urllib.parse.urlsplit(value).path).rpartition("/")[2]
        elif key == "registry":
            kept[key] = True
        elif key not in {"size", "upload-time"}:
            kept[key] = _without_hosts(value)
    return kept


def _is_registry(package: Mapping[str, Any]) -> bool:
    return "registry" in package.get("source", {})


def digests(lock: Mapping[str, Any]) -> str:
    """Hash a normalised lock: the whole, then each part, so that a difference can be named.

    Args:
        lock: What `normalise` returned.

    Returns:
        The content of `tools/lock.sha256`: `sha256:` and the digest of the lock, then a line with the first twelve
        digits and the name for each package and each other part.
    """
    parts = {f"[{key}]": value for key, value in lock.items() if key != "package"}
    for package in lock.get("package", []):
        parts[" ".join(str(package[key]) for key in ("name", "version") if key in package)] = package
    lines = [f"{_hash(part)[:12]} {name}" for name, part in sorted(parts.items())]
    return "\n".join([f"sha256:{_hash(lock)}", *lines]) + "\n"


def _hash(part: Any) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def compare_digests(pinned: str, fresh: str) -> list[str]:
    """Name what differs between two files of digests.

    Args:
        pinned: The committed file's content.
        fresh: The content that a fresh resolution gives.

    Returns:
        One line per package, or other part of the lock, that differs; empty when both are the same.
    """
    old, new = (
        {name: value for value, _, name in (line.partition(" ") for line in text.splitlines()[1:])}
        for text in (pinned, fresh)
    )
    return [f"{name}: lock entry differs" for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]


def parse_requirements(text: str) -> dict[str, dict[str, Any]]:
    """Read an exported requirements file.

    Args:
        text: The content of the file, one requirement per logical line, hashes on continuation lines.

    Returns:
        Requirement without marker (`name==version`) to its marker and hashes. A name that is pinned twice, for
        different Pythons, has two entries.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        hashes = re.findall(r"--hash=(\S+)", line)
        requirement, _, marker = line.partition(" --hash=")[0].partition(";")
        found[requirement.strip()] = {"marker": marker.strip(), "hashes": sorted(hashes)}
    return found


def compare_requirements(pinned: str, fresh: str) -> list[str]:
    """Say how two requirements files differ, one line per package.

    Args:
        pinned: The committed file's content.
        fresh: The content that a fresh resolution gives.

    Returns:
        One line per package that differs, sorted by name; empty when both pin the same.
    """
    old, new = parse_requirements(pinned), parse_requirements(fresh)
    names = sorted({requirement.partition("==")[0] for requirement in old.keys() | new.keys()})
    findings = []
    for name in names:
        before, after = (
            {key: value for key, value in pins.items() if key.partition("==")[0] == name} for pins in (old, new)
        )
        if before == after:
            continue
        versions = [", ".join(key.partition("==")[2] for key in pins) or "absent" for pins in (before, after)]
        if versions[0] != versions[1]:
            findings.append(f"{name}: pinned {versions[0]}, fresh {versions[1]}")
        else:
            parts = [
                part for part in ("marker", "hashes") if any(before[key][part] != after[key][part] for key in before)
            ]
            findings.append(f"{name} {versions[0]}: other {' and '.join(parts)}")
    return findings


def check_committed(name: str, text: str) -> list[str]:
    """Look for what must not be in a committed file: a host, a place on a machine, too many bytes.

    Args:
        name: What to call the file in a finding.
        text: Its content.

    Returns:
        One line per finding.
    """
    findings = [
        f"{name}:{number}: names a place to download from: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(r"://| @ |--(extra-)?index-url|--find-links", line)
    ]
    if len(text) > SIZE_BUDGET:
        findings.append(f"{name}: {len(text)} bytes, more than {SIZE_BUDGET}")
    return findings


def resolve(root: Path, uv: str) -> tuple[str, str]:
    """Resolve the workspace from its pyproject files alone, in a temporary copy.

    Args:
        root: The workspace.
        uv: The uv executable.

    Returns:
        The content of the fresh `uv.lock` and of the requirements file that it gives.

    Raises:
        LockError: uv failed; the message holds its last line.
    """
    with tempfile.TemporaryDirectory(prefix="separata-lock-") as folder:
        for manifest in manifests(root):
            target = Path(folder) / manifest
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / manifest, target)
        _run([uv, "lock", "--quiet"], folder)
        exported = _run(
            [uv, "export", "--quiet", "--frozen", *EXPORT],
            folder,
        )
        return (Path(folder) / "uv.lock").read_text(encoding="utf-8"), HEADER + exported


def _run(command: Sequence[str], folder: str) -> str:
    # An active environment elsewhere makes uv print warnings; it plays no part in a resolution.
    environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise LockError(f"`{' '.join(command[:2])}` failed: {' '.join(lines)}")
    return done.stdout


def find_uv() -> str:
    """Return the uv executable: the one that started us, else the one on the path.

    Raises:
        LockError: There is none.
    """
    uv = os.environ.get("UV") or shutil.which("uv")
    if not uv:
        raise LockError("uv is not on the path; install it with `pip install uv`")
    return uv


def check(root: Path, lock_text: str, requirements: str) -> list[str]:
    """Hold a fresh resolution against the committed digest and requirements.

    Args:
        root: The workspace.
        lock_text: The fresh `uv.lock`.
        requirements: The fresh requirements file.

    Returns:
        One line per finding; empty when they agree.
    """
    findings: list[str] = []
    committed: dict[Path, str] = {}
    for path in (DIGEST, REQUIREMENTS):
        if (root / path).is_file():
            committed[path] = (root / path).read_text(encoding="utf-8")
            findings += check_committed(str(path), committed[path])
        else:
            findings.append(f"{path} is missing")
    if REQUIREMENTS in committed and committed[REQUIREMENTS] != requirements:
        differences = compare_requirements(committed[REQUIREMENTS], requirements)
        findings += differences or [f"{REQUIREMENTS}: written by hand or by another version of this script"]
    fresh = digests(normalise(lock_text))
    if DIGEST in committed and committed[DIGEST] != fresh:
        findings += compare_digests(committed[DIGEST], fresh)
        findings.append(f"{DIGEST} is not that of a fresh lock, {fresh.splitlines()[0]}")
    return findings


def write(root: Path, lock_text: str, requirements: str) -> None:
    """Pin a resolution: the two committed files and the working `uv.lock`.

    Args:
        root: The workspace.
        lock_text: The fresh `uv.lock`.
        requirements: The fresh requirements file.

    Raises:
        LockError: A file that would be committed names a place to download from or is too large.
    """
    contents = {DIGEST: digests(normalise(lock_text)), REQUIREMENTS: requirements}
    findings = [finding for path, text in contents.items() for finding in check_committed(str(path), text)]
    if findings:
        raise LockError(findings[0])
    for path, text in {Path("uv.lock"): lock_text, **contents}.items():
        temporary = root / path.with_name(path.name + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(root / path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `--help`."""
    parser = argparse.ArgumentParser(
        description="Check that a fresh resolution gives the pinned versions (exit code 1 if not), or pin a new one.",
        epilog="example: after moving `exclude-newer` in pyproject.toml, `python tools/lock.py --write`",
    )
    parser.add_argument("--write", action="store_true", help="refresh uv.lock and the two files in tools/")
    parser.add_argument("--root", type=Path, default=workspace.ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        lock_text, requirements = resolve(options.root, find_uv())
        if options.write:
            write(options.root, lock_text, requirements)
            print(f"pinned {len(parse_requirements(requirements))} requirements")
            return 0
        findings = check(options.root, lock_text, requirements)
    except (LockError, workspace.WorkspaceError) as error:
        return workspace.fail(str(error), 1)
    for finding in findings:
        print(finding)
    if findings:
        return workspace.fail("the pins are stale; if the change is meant, run `python tools/lock.py --write`", 1)
    print("a fresh lock agrees with the pinned versions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
