"""Look into built wheels and sdists for what a user would stumble over.

Every wheel holds its type marker and licence and complete metadata, no tests, no path that another of the wheels owns,
no requirement that only this workspace can satisfy, and stays within its size budget. One line per finding.

A package that needs a larger wheel says so in its pyproject.toml, with the reason::

    [tool.separata]
    wheel-budget-kb = 2500
    wheel-budget-reason = "carries the rated text"
"""

import argparse
import email.message
import email.parser
import itertools
import posixpath
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import workspace
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

BUDGET_KB = 1000
# The pytest plugin is for the people who work here and is never published.
UNPUBLISHED = "separata-testing"
REQUIRED_FIELDS = ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "License-File")
SDIST_FILES = ("PKG-INFO", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")


class DistributionError(Exception):
    """A file that is no distribution; the message is one line that begins with its name."""


@dataclass(frozen=True)
class Wheel:
    """What one wheel holds.

    Attributes:
        file: The wheel's file name.
        name: Canonical distribution name.
        version: Version, normalised.
        size: Bytes of the file.
        paths: Every file in it but those of its own dist-info folder.
        info: Files of the dist-info folder by their path within it, as text (licences and lists are all text).
    """

    file: str
    name: str
    version: str
    size: int
    paths: tuple[str, ...]
    info: dict[str, str]

    @property
    def metadata(self) -> email.message.Message:
        """The parsed METADATA file; empty if there is none."""
        return email.parser.Parser().parsestr(self.info.get("METADATA", ""))

    @property
    def modules(self) -> set[str]:
        """First components of the paths."""
        return {path.split("/")[0] for path in self.paths}


@dataclass(frozen=True)
class Sdist:
    """What one source distribution holds.

    Attributes:
        file: The sdist's file name.
        name: Canonical distribution name.
        version: Version, normalised.
        size: Bytes of the file.
        paths: Every member's path as stored, top folder included.
        links: Paths of members that are links or devices instead of files.
        budget_kb: The wheel budget that its pyproject.toml states.
        budget_reason: The reason beside it; empty if there is none.
    """

    file: str
    name: str
    version: str
    size: int
    paths: tuple[str, ...]
    links: tuple[str, ...]
    budget_kb: int = BUDGET_KB
    budget_reason: str = ""


def read_wheel(path: Path) -> Wheel:
    """Read a wheel's list of files and metadata.

    Raises:
        DistributionError: The file is not a wheel: bad file name, not a zip archive.
    """
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            files = [item for item in archive.namelist() if not item.endswith("/")]
            folder = next((item.split("/")[0] for item in files if item.split("/")[0].endswith(".dist-info")), "")
            info = {
                item[len(folder) + 1 :]: archive.read(item).decode(errors="replace")
                for item in files
                if folder and item.startswith(f"{folder}/")
            }
    except (InvalidWheelFilename, zipfile.BadZipFile) as error:
        raise DistributionError(f"{path.name}: not a wheel: {error}") from error
    own = tuple(sorted(item for item in files if not folder or not item.startswith(f"{folder}/")))
    return Wheel(path.name, name, str(version), path.stat().st_size, own, info)


def read_sdist(path: Path) -> Sdist:
    """Read a source distribution's list of files and the size budget it states.

    Raises:
        DistributionError: The file is no sdist: bad name, no gzipped tar archive, unreadable pyproject.toml.
    """
    try:
        name, version = parse_sdist_filename(path.name)
        with tarfile.open(path, "r:gz") as archive:
            members = [member for member in archive.getmembers() if not member.isdir()]
            settings: dict[str, object] = {}
            for member in members:
                if posixpath.normpath(member.name).split("/")[1:] == ["pyproject.toml"] and member.isfile():
                    content = archive.extractfile(member)
                    assert content is not None, "a regular file has content"
                    settings = tomllib.loads(content.read().decode()).get("tool", {}).get("separata", {})
    except (InvalidSdistFilename, tarfile.TarError, EOFError, tomllib.TOMLDecodeError) as error:
        raise DistributionError(f"{path.name}: not an sdist: {error}") from error
    budget = settings.get("wheel-budget-kb", BUDGET_KB)
    if not isinstance(budget, int):
        raise DistributionError(f"{path.name}: wheel-budget-kb must be a whole number, it is {budget!r}")
    return Sdist(
        file=path.name,
        name=name,
        version=str(version),
        size=path.stat().st_size,
        paths=tuple(sorted(member.name for member in members)),
        links=tuple(member.name for member in members if not member.isfile()),
        budget_kb=budget,
        budget_reason=str(settings.get("wheel-budget-reason", "")).strip(),
    )


def check_wheel(wheel: Wheel, ours: frozenset[str], budget_kb: int = BUDGET_KB) -> Iterator[str]:
    """Find what is wrong with one wheel, without looking at the others.

    Args:
        wheel: The wheel.
        ours: Canonical names of our distributions, whose requirements must be ranges.
        budget_kb: Largest size in kB (1000 bytes).

    Yields:
        One line per finding, without the file's name.
    """
    if wheel.size > budget_kb * 1000:
        yield f"{wheel.size / 1000:.0f} kB, more than the budget of {budget_kb} kB"
    yield from _check_files(wheel)
    if "METADATA" not in wheel.info:
        yield "no METADATA"
        return
    yield from _check_metadata(wheel)
    for requirement in wheel.metadata.get_all("Requires-Dist", []):
        yield from _check_requirement(str(requirement), wheel.name, ours)
    yield from _check_scripts(wheel)


def _check_files(wheel: Wheel) -> Iterator[str]:
    if len(wheel.modules) != 1:
        yield f"has {len(wheel.modules)} top-level names instead of one module: {', '.join(sorted(wheel.modules))}"
    for module in sorted(wheel.modules):
        if f"{module}/py.typed" not in wheel.paths:
            yield f"{module}/py.typed is missing"
    for path in wheel.paths:
        *folders, file = path.split("/")
        if {"tests", "test", "benchmarks"} & set(folders) or re.fullmatch(r"(test_|bench_).*\.py|conftest\.py", file):
            yield f"holds a test or benchmark: {path}"
        elif "__pycache__" in folders or file.endswith((".pyc", ".so", ".pyd")):
            yield f"holds a compiled file: {path}"
    licences = [path for path, text in wheel.info.items() if path.startswith("licenses/") and text.strip()]
    if not licences:
        yield "no licence in dist-info/licenses"


def _check_metadata(wheel: Wheel) -> Iterator[str]:
    metadata = wheel.metadata
    for field in REQUIRED_FIELDS:
        if not str(metadata.get(field, "")).strip():
            yield f"metadata: {field} is missing"
    if canonicalize_name(str(metadata.get("Name", ""))) != wheel.name:
        yield f"metadata: Name {metadata.get('Name')!r} is not the file's"
    if str(metadata.get("Version", "")) != wheel.version:
        yield f"metadata: Version {metadata.get('Version')!r} is not the file's"
    if not str(metadata.get_payload() or metadata.get("Description", "")).strip():
        yield "metadata: no description; readme = 'README.md' is missing or the file is empty"
    elif metadata.get("Description-Content-Type", "").partition(";")[0] != "text/markdown":
        yield f"metadata: Description-Content-Type is {metadata.get('Description-Content-Type')!r}, not text/markdown"


def _check_requirement(text: str, name: str, ours: frozenset[str]) -> Iterator[str]:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        yield f"metadata: requirement {text!r} is not valid: {str(error).splitlines()[0]}"
        return
    wanted = canonicalize_name(requirement.name)
    if requirement.url:
        yield f"metadata: requirement {text!r} names a place instead of a version"
    if wanted == UNPUBLISHED and name != UNPUBLISHED:
        yield f"metadata: requires {UNPUBLISHED}, which is never published"
    elif wanted in ours and wanted != name:
        operators = {specifier.operator for specifier in requirement.specifier}
        if not operators & {">=", "~="} or not operators & {"<", "~="} or "==" in operators:
            yield f"metadata: requirement {text!r} of one of ours is not a range such as >=0.3,<0.4"


def _check_scripts(wheel: Wheel) -> Iterator[str]:
    section = ""
    for line in wheel.info.get("entry_points.txt", "").splitlines():
        if line.startswith("["):
            section = line.strip("[] ")
        elif "=" in line and section in {"console_scripts", "gui_scripts"}:
            script, _, target = (part.strip() for part in line.partition("="))
            module, _, function = target.partition("[")[0].strip().partition(":")
            base = module.strip().replace(".", "/")
            if f"{base}.py" not in wheel.paths and f"{base}/__init__.py" not in wheel.paths:
                yield f"console script {script!r} starts {module!r}, which is not in the wheel"
            elif not function.strip():
                yield f"console script {script!r} names no function in {target!r}"


def check_sdist(sdist: Sdist) -> Iterator[str]:
    """Find what is wrong with one source distribution, without looking at the others.

    Args:
        sdist: The source distribution.

    Yields:
        One line per finding, without the file's name.
    """
    top = sdist.paths[0].split("/")[0] if sdist.paths else ""
    for file in SDIST_FILES:
        if f"{top}/{file}" not in sdist.paths:
            yield f"{file} is missing"
    if not any(path.startswith(f"{top}/src/") and path.endswith("/py.typed") for path in sdist.paths):
        yield "src/<module>/py.typed is missing"
    for path in sdist.paths:
        parts = path.split("/")
        if path.startswith("/") or ".." in parts or parts[0] != top:
            yield f"unpacks outside its own folder: {path}"
        elif any(part.startswith(".") and part != ".gitignore" for part in parts) or "__pycache__" in parts:
            yield f"holds a hidden or derived file: {path}"
    for path in sdist.links:
        yield f"holds a link: {path}"
    if sdist.budget_kb > BUDGET_KB and not sdist.budget_reason:
        yield f"wheel-budget-kb is {sdist.budget_kb} without a wheel-budget-reason"


def check(folder: Path) -> tuple[list[str], int]:
    """Check every wheel and sdist of a folder, alone and against each other.

    Args:
        folder: Where the builds lie; other files in it are ignored.

    Returns:
        The findings, each with the name of its file in front, and how many files were looked at.
    """
    findings: list[str] = []
    wheels: list[Wheel] = []
    sdists: list[Sdist] = []
    for path in sorted(folder.iterdir()):
        try:
            if path.suffix == ".whl":
                wheels.append(read_wheel(path))
            elif path.name.endswith(".tar.gz"):
                sdists.append(read_sdist(path))
        except DistributionError as error:
            findings.append(str(error))
    ours = frozenset(wheel.name for wheel in wheels)
    sources = {(sdist.name, sdist.version): sdist for sdist in sdists}
    for wheel in wheels:
        source = sources.get((wheel.name, wheel.version))
        if source is None:
            findings.append(f"{wheel.file}: no sdist of the same version beside it")
        budget = source.budget_kb if source else BUDGET_KB
        findings += [f"{wheel.file}: {finding}" for finding in check_wheel(wheel, ours, budget)]
    built = {(wheel.name, wheel.version) for wheel in wheels}
    for sdist in sdists:
        if (sdist.name, sdist.version) not in built:
            findings.append(f"{sdist.file}: no wheel of the same version beside it")
        findings += [f"{sdist.file}: {finding}" for finding in check_sdist(sdist)]
    for one, other in itertools.combinations(wheels, 2):
        both = sorted(set(one.paths) & set(other.paths))
        findings += [f"{other.file}: {shared} is also in {one.file}" for shared in both]
    return findings, len(wheels) + len(sdists)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `--help`."""
    parser = argparse.ArgumentParser(
        description="Look into built wheels and sdists; exit code 1 if something is wrong with one.",
        epilog="example: uv build --all-packages --no-sources && python tools/wheel_check.py dist",
    )
    parser.add_argument("folder", type=Path, metavar="DIST_DIR", help="where the wheels and sdists lie")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        return workspace.fail(f"DIST_DIR {str(options.folder)!r} is not a folder", 2)
    findings, looked_at = check(options.folder)
    if not looked_at and not findings:
        return workspace.fail(f"DIST_DIR {str(options.folder)!r} holds no wheel and no sdist", 2)
    for finding in findings:
        print(finding)
    print(f"{looked_at} distributions, {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
