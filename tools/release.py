"""Release one member: changelog, version, checks, commit, tag and files in dist/. Never uploads anything.

The tree must be clean, the version newer than the last release, and the changelog must say under "Unreleased" what is
new. The README's table of packages gets the new version. A release of something shared also moves its range in every
member that depends on it, with a line in the changelog of each. The checks run on the tree as it will be tagged.
Whatever fails, tree, commits, tags and dist/ are as before.

Example:
    python tools/release.py zerotuning 0.2.0 --dry-run
    python tools/release.py zerotuning 0.2.0

Exit codes: 0 released; 1 refused or failed; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import catalogue
from workspace import (
    ROOT,
    Member,
    UnknownMemberError,
    Workspace,
    WorkspaceError,
    fail,
    needs,
    normalise,
    requirement_extras,
    requirement_name,
)

try:
    from packaging.version import InvalidVersion, Version
except ModuleNotFoundError as error:
    sys.exit(needs(error))

# Sessions of the noxfile that must pass, by what is released. `{name}` is the distribution.
SHARED_CHECKS = ("lock", "lint", "types", "imports", "api", "kernels", "tests({name})", "minimum({name})", "wheels")
PACKAGE_CHECKS = (*SHARED_CHECKS, "vendor({name})")
NEVER_PUBLISHED = ("separata-testing",)

Runner = Callable[[Path, Sequence[str]], bool]
"""Runs nox sessions in a folder and says whether all passed."""
Builder = Callable[[Path, str, Path], None]
"""Builds the wheel and the sdist of a distribution of a workspace into a folder."""


class ReleaseError(Exception):
    """The release is refused or has failed; the message is one line."""


class UsageError(ReleaseError):
    """The command cannot mean what it says."""


def run_sessions(root: Path, sessions: Sequence[str]) -> bool:
    """Runs nox sessions and says whether all passed."""
    return subprocess.run(["uvx", "nox", "-s", *sessions], cwd=root, check=False).returncode == 0


def build_distributions(root: Path, name: str, out: Path) -> None:
    """Builds the wheel and the sdist of a member, as its users will get them, into a folder.

    Raises:
        ReleaseError: The build failed.
    """
    command = ["uv", "build", "--quiet", "--no-sources", "--package", name, "--out-dir", str(out)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"uv build: {done.stderr.strip()}")


def pin_again(root: Path) -> None:
    """Derives the lock's digest and the pinned requirements anew, since a range of ours has moved.

    Raises:
        ReleaseError: The resolution failed.
    """
    command = [sys.executable, str(root / "tools" / "lock.py"), "--write", "--root", str(root)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"tools/lock.py --write: {done.stderr.strip()}")


def relist(root: Path) -> None:
    """Writes the README's table of packages anew, since it names their versions.

    Raises:
        ReleaseError: A package does not say what the table needs.
    """
    file = root / "README.md"
    try:
        table = catalogue.render(Workspace.load(root))
        file.write_text(catalogue.insert(file.read_text(encoding="utf-8"), table), encoding="utf-8")
    except catalogue.CatalogueError as error:
        raise ReleaseError(f"tools/catalogue.py: {error}") from error


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def compatible_range(version: Version) -> str:
    """Returns the range of versions that keep the promises of one: `>=0.3,<0.4` for 0.3.1, `>=2.1,<3` for 2.1.0."""
    floor = f"{version.major}.{version.minor}"
    return f">={floor},<{version.major + 1}" if version.major else f">={floor},<0.{version.minor + 1}"


def date_changelog(text: str, version: str, date: datetime.date) -> str:
    """Moves what stands under "Unreleased" below a heading with the version and the date.

    Raises:
        ReleaseError: There is no such heading, or nothing stands below it.
    """
    head, entries, rest = _unreleased(text)
    if not entries.strip():
        raise ReleaseError('nothing stands under "## Unreleased"')
    return f"{head}## Unreleased\n\n## {version} ({date.isoformat()})\n{entries}{rest}"


def add_entry(text: str, entry: str) -> str:
    """Adds a line to the end of what stands under "Unreleased"."""
    head, entries, rest = _unreleased(text)
    before = entries.strip()
    # A list goes on; a sentence ends before a list begins.
    gap = "\n" if before.rpartition("\n")[2].startswith(("- ", "  ")) else "\n\n"
    listed = f"{before}{gap}- {entry}" if before else f"- {entry}"
    return f"{head}## Unreleased\n\n{listed}\n{chr(10) if rest else ''}{rest}"


def _unreleased(text: str) -> tuple[str, str, str]:
    match = re.search(r"^## Unreleased[ \t]*\n", text, re.MULTILINE)
    if match is None:
        raise ReleaseError('there is no heading "## Unreleased"')
    following = re.search(r"^## ", text[match.end() :], re.MULTILINE)
    end = match.end() + following.start() if following else len(text)
    return text[: match.start()], text[match.end() : end], text[end:]


def set_version(text: str, version: str) -> str:
    """Writes a version into the `[project]` table of a `pyproject.toml`; everything else stays as it is.

    Raises:
        ReleaseError: The table has no line with a version.
    """
    table = re.search(r"^\[project\][ \t]*\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    line = re.search(r'^version[ \t]*=[ \t]*"[^"\n]*"', table[1], re.MULTILINE) if table else None
    if table is None or line is None:
        raise ReleaseError("[project] has no version")
    start = table.start(1) + line.start()
    return f'{text[:start]}version = "{version}"{text[start + len(line[0]) :]}'


def set_range(text: str, name: str, specifier: str) -> str:
    """Writes the range of one distribution wherever a `pyproject.toml` requires it by a range.

    A requirement without a version, as in dependency groups, stays as it is; so do extras and markers.
    """

    def replace(match: re.Match[str]) -> str:
        requirement = match[1]
        if requirement_name(requirement) != normalise(name):
            return match[0]
        body, semicolon, marker = requirement.partition(";")
        if not re.search(r"[<>=~!]", body):
            return match[0]
        extras = requirement_extras(requirement)
        head = re.match(r"\s*[A-Za-z0-9._-]+", body)
        assert head is not None
        bracket = f"[{','.join(extras)}]" if extras else ""
        return f'"{head[0]}{bracket}{specifier}{" ;" + marker if semicolon else ""}"'

    return re.sub(r'"([A-Za-z0-9][A-Za-z0-9._-]*[^"\n]*)"', replace, text)


@dataclass(frozen=True)
class Plan:
    """What a release will do.

    Attributes:
        member: What is released.
        version: Its new version.
        edits: New content of the files that change.
        moved: Members whose range of the released one moves.
    """

    member: Member
    version: Version
    edits: dict[Path, str]
    moved: tuple[Member, ...]

    @property
    def tag(self) -> str:
        """Name of the release tag."""
        return f"{self.member.name}-v{self.version}"

    @property
    def sessions(self) -> list[str]:
        """Sessions of the noxfile that must pass."""
        checks = PACKAGE_CHECKS if self.member.is_package else SHARED_CHECKS
        return [check.format(name=self.member.name) for check in checks]


def plan(root: Path, package: str, version: str, today: datetime.date) -> Plan:
    """Works out a release without writing anything.

    Args:
        root: Root of the repository.
        package: Distribution or module name.
        version: Version to release, in its canonical form.
        today: Date for the changelog.

    Raises:
        ReleaseError: The tree is dirty, the version is not newer, the tag exists, or the changelog has no entries.
        UsageError: There is no such package to release, or the version is not one.
    """
    house = Workspace.load(root)
    member = house.member(package, [m for m in house.members if m.name not in NEVER_PUBLISHED])
    try:
        wanted = Version(version)
    except InvalidVersion as error:
        raise UsageError(f"version {version!r} is not a version by PEP 440 (as in 0.2.0 or 1.0.0rc1)") from error
    if str(wanted) != version or wanted.local is not None:
        raise UsageError(f"version {version!r} must be written {wanted.public!r}")
    if len(wanted.release) != 3:
        raise UsageError(f"version {version!r} must have three parts, as in 0.2.0")
    dirty = _git(house.root, "status", "--porcelain").splitlines()
    if dirty:
        raise ReleaseError(
            f"the tree has {len(dirty)} uncommitted changes ({dirty[0].strip()}, ...); commit them first"
        )
    tags = _git(house.root, "tag", "--list", f"{member.name}-v*").split()
    if f"{member.name}-v{wanted}" in tags:
        raise ReleaseError(f"the tag {member.name}-v{wanted} exists already")
    released = [_version(tag.removeprefix(f"{member.name}-v")) for tag in tags]
    last = max((v for v in released if v is not None), default=None)
    if last is not None and wanted <= last:
        raise ReleaseError(f"version {wanted} is not newer than the last release, {last}")
    if wanted < Version(member.version):
        raise ReleaseError(f"version {wanted} is older than {member.version}, which pyproject.toml says")
    edits: dict[Path, str] = {}

    def edit(path: Path, change: Callable[[str], str]) -> bool:
        before = edits.get(path) or path.read_text(encoding="utf-8")
        try:
            after = change(before)
        except ReleaseError as error:
            raise ReleaseError(f"{path.relative_to(house.root)}: {error}") from error
        if after != before:
            edits[path] = after
        return after != before

    edit(member.path / "CHANGELOG.md", lambda text: date_changelog(text, version, today))
    edit(member.path / "pyproject.toml", lambda text: set_version(text, version))
    moved = []
    specifier = compatible_range(wanted)
    if not member.is_package:
        for other in house.members:
            if other is member or not edit(
                other.path / "pyproject.toml", lambda text: set_range(text, member.name, specifier)
            ):
                continue
            edit(other.path / "CHANGELOG.md", lambda text: add_entry(text, f"Needs `{member.name}{specifier}`."))
            moved.append(other)
    return Plan(member, wanted, edits, tuple(moved))


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def release(
    root: Path,
    package: str,
    version: str,
    *,
    today: datetime.date | None = None,
    runner: Runner = run_sessions,
    builder: Builder = build_distributions,
    relock: Callable[[Path], None] = pin_again,
) -> tuple[Plan, list[Path]]:
    """Releases one member.

    Args:
        root: Root of the repository.
        package: Distribution or module name.
        version: Version to release.
        today: Date for the changelog; the date of today by default.
        runner: What runs the checks.
        builder: What builds the distributions.
        relock: What derives the pins anew after a range of ours has moved.

    Returns:
        What was done, and the files in dist/.

    Raises:
        ReleaseError: The release is refused, or a step failed. Everything is as before then.
    """
    root = root.resolve()
    work = plan(root, package, version, today or datetime.datetime.now(tz=datetime.UTC).date())
    with _undone_on_failure(root, work) as touched:
        for path, text in work.edits.items():
            path.write_text(text, encoding="utf-8")
        if work.member.is_package:
            relist(root)
        if work.moved:
            relock(root)
        _pass(runner, root, work.sessions)
        paths = [str(path.relative_to(root)) for path, old in touched.items() if _content(path) != old]
        _git(root, "add", "--", *paths)
        _git(root, "commit", "--quiet", "-m", f"Release {work.member.name} {work.version}", "--", *paths)
        _git(root, "tag", "-a", work.tag, "-m", f"{work.member.name} {work.version}")
        with tempfile.TemporaryDirectory(prefix=".release-", dir=root) as folder:
            builder(root, work.member.name, Path(folder))
            return work, _move(_distributions(Path(folder), work), root / "dist")


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _pass(runner: Runner, root: Path, sessions: Sequence[str]) -> None:
    if not runner(root, sessions):
        raise ReleaseError(f"the checks failed: nox -s {' '.join(sessions)}")


@contextmanager
def _undone_on_failure(root: Path, work: Plan) -> Iterator[Mapping[Path, bytes | None]]:
    """Yields the files that a release may change as they are, and brings tree, commits and tags back if it fails."""
    start = _git(root, "rev-parse", "HEAD").strip()
    derived = (root / "README.md", root / "tools" / "lock.sha256", root / "tools" / "requirements.txt")
    before = {path: _content(path) for path in (*work.edits, *derived)}
    try:
        yield before
    except BaseException:
        for path, old in before.items():
            if old is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(old)
        if _git(root, "tag", "--list", work.tag).strip():
            _git(root, "tag", "-d", work.tag)
        # Moves the branch and the index; the files were put back above.
        _git(root, "reset", "--quiet", "--mixed", start)
        raise


def _move(files: Sequence[Path], folder: Path) -> list[Path]:
    """Moves all of some files into a folder, or none."""
    folder.mkdir(exist_ok=True)
    moved: list[Path] = []
    try:
        for path in files:
            moved.append(path.replace(folder / path.name))  # noqa: PERF401 - what was moved counts when one fails
    except OSError:
        for path in moved:
            path.unlink()
        raise
    return moved


def _distributions(out: Path, work: Plan) -> list[Path]:
    stem = f"{normalise(work.member.name).replace('-', '_')}-{work.version}"
    wheels, sdists = sorted(out.glob(f"{stem}-*.whl")), sorted(out.glob(f"{stem}.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        found = ", ".join(sorted(path.name for path in out.iterdir() if not path.name.startswith("."))) or "nothing"
        raise ReleaseError(f"the build should have made one wheel and one sdist of {stem}, it made {found}")
    return [*wheels, *sdists]


def main(
    arguments: Sequence[str] | None = None,
    root: Path = ROOT,
    *,
    runner: Runner = run_sessions,
    builder: Builder = build_distributions,
    relock: Callable[[Path], None] = pin_again,
) -> int:
    """Runs the command line and returns the exit code."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="release.py", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", help="distribution or module name")
    parser.add_argument("version", help="version to release, as in 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done and change nothing")
    given = parser.parse_args(arguments)
    try:
        if given.dry_run:
            work = plan(root, given.package, given.version, datetime.datetime.now(tz=datetime.UTC).date())
            for path in work.edits:
                print(f"would change {path.relative_to(root.resolve())}")
            if work.member.is_package:
                print("would change README.md, its table of packages")
            if work.moved:
                print("would change tools/lock.sha256 and tools/requirements.txt, if the pins move")
            print(f"would check  nox -s {' '.join(work.sessions)}")
            print(f"would tag    {work.tag}")
            return 0
        work, files = release(root, given.package, given.version, runner=runner, builder=builder, relock=relock)
    except (UsageError, UnknownMemberError) as error:
        return fail(str(error), 2)
    except (ReleaseError, WorkspaceError, OSError) as error:
        return fail(str(error), 1)
    names = [str(path.relative_to(root.resolve())) for path in files]
    print(f"released {work.tag}. Nothing has been uploaded or pushed; to do so:")
    print(f"  git push origin HEAD {work.tag}")
    print(f"  uv publish {' '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
