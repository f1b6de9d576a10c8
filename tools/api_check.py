"""Hold the public surface of each member against its last release.

The surface is what `__init__` names in `__all__`, with everything public below it; of what lies in shared/, which the
packages import by module, also the public names of the modules, except under a part that begins with an underscore
or is called `internal` or `kernels`. A break (something gone, a parameter gone, moved, renamed, new and required, or
with another default) needs a major step of the version since the release tag; below 1.0 a minor step. Types are not
compared. Everything is read without being executed, so a name that is imported only on use must also be imported
under `if TYPE_CHECKING:`.

Example:
    python tools/api_check.py
    python tools/api_check.py zerotuning separata-core

Exit codes: 0 no break that the version does not announce; 1 a break, or a surface that cannot be read; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from workspace import ROOT, Member, UnknownMemberError, Workspace, WorkspaceError, fail, needs

try:
    import griffe
    from packaging.version import InvalidVersion, Version
except ModuleNotFoundError as error:
    sys.exit(needs(error))

_PRIVATE_PARTS = ("internal", "kernels")


class ApiError(Exception):
    """The surface cannot be read; the message is one line."""


def _git(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    if done.returncode:
        raise ApiError(f"git {' '.join(arguments[:2])}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def last_release(root: Path, name: str) -> tuple[str, Version] | None:
    """Returns the tag `name-vX.Y.Z` of the highest version among the ancestors of HEAD, or None without any."""
    prefix = f"{name}-v"
    found: list[tuple[Version, str]] = []
    for tag in _git(root, "tag", "--list", f"{prefix}*", "--merged", "HEAD").decode().split():
        try:
            found.append((Version(tag.removeprefix(prefix)), tag))
        except InvalidVersion:
            continue
    if not found:
        return None
    version, tag = max(found)
    return tag, version


@contextmanager
def from_tag(root: Path, member: Member, tag: str) -> Iterator[Path]:
    """Yields a folder on which the member's package lies as it was at a tag.

    Raises:
        ApiError: The tag does not hold the member where it lies today.
    """
    inside = member.source.parent.relative_to(root).as_posix()
    archive = _git(root, "archive", "--format=tar", tag, "--", inside)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder, inside)


def _read(search: Path, module: str) -> griffe.Module:
    try:
        loaded = griffe.load(
            module,
            search_paths=[search],
            try_relative_path=False,
            allow_inspection=False,
            resolve_aliases=True,
            resolve_external=False,
            resolve_implicit=True,
        )
    except (ImportError, griffe.GriffeError, SyntaxError) as error:
        raise ApiError(f"{search / module} cannot be read: {error}") from error
    if not isinstance(loaded, griffe.Module):
        raise ApiError(f"{search / module} is not a package")
    return loaded


def _public_modules(module: griffe.Module) -> Iterator[griffe.Module]:
    for name, child in sorted(module.modules.items()):
        if not child.is_alias and not name.startswith("_") and name not in _PRIVATE_PARTS:
            yield child
            yield from _public_modules(child)


def _names(module: griffe.Module) -> list[str]:
    if module.exports is not None:
        return sorted({name if isinstance(name, str) else name.name for name in module.exports})
    return sorted(
        name
        for name, child in module.members.items()
        if not name.startswith("_") and not child.is_alias and not child.is_module
    )


def surface(search: Path, member: Member) -> dict[str, griffe.Object | None]:
    """Reads what a member promises.

    Args:
        search: Folder that holds the package.
        member: The member; its module name is what is read.

    Returns:
        The objects by public dotted name; None for what comes from another library.

    Raises:
        ApiError: `__all__` names something that cannot be found, or that leads nowhere.
    """
    top = _read(search, member.module)
    modules = [top, *([] if member.is_package else _public_modules(top))]
    found: dict[str, griffe.Object | None] = {}
    for module in modules:
        for name in _names(module):
            path = f"{module.path}.{name}"
            try:
                child = module.members[name]
            except KeyError as error:
                raise ApiError(
                    f"{module.path}.__all__ names {name!r}, which cannot be found without running the code; "
                    "import it under `if TYPE_CHECKING:`"
                ) from error
            if not isinstance(child, griffe.Alias):
                found[path] = child
                continue
            try:
                found[path] = child.final_target
            except griffe.CyclicAliasError as error:
                raise ApiError(f"{path} leads back to itself") from error
            except griffe.AliasResolutionError as error:
                if _end(child, top).startswith(f"{member.module}."):
                    raise ApiError(f"{path} leads to {child.target_path}, which does not exist") from error
                found[path] = None
    return found


def _end(alias: griffe.Alias, top: griffe.Module) -> str:
    """Returns the last path that can be named on the way from an alias to what it stands for."""
    path, seen = alias.target_path, set[str]()
    while path.startswith(f"{top.path}.") and path not in seen:
        seen.add(path)
        try:
            following = top[path.removeprefix(f"{top.path}.")]
        except KeyError:
            break
        if not isinstance(following, griffe.Alias):
            break
        path = following.target_path
    return path


def breaks(old: dict[str, griffe.Object | None], new: dict[str, griffe.Object | None]) -> list[str]:
    """Lists what a user of the old surface would stumble over in the new one, one line each."""
    lines = []
    for path, before in old.items():
        if path not in new:
            lines.append(f"{path}: gone")
            continue
        after = new[path]
        if before is None or after is None:
            continue
        # griffe compares the members of two objects, and takes imported ones for private.
        holders = []
        for item in (before, after):
            holder = griffe.Module(path.rpartition(".")[0])
            item.public = True
            holder.members[path.rpartition(".")[2]] = item
            holders.append(holder)
        for found in griffe.find_breaking_changes(*holders):
            said = found.explain(griffe.ExplanationStyle.MARKDOWN).removeprefix("- ").replace("*", "").replace("`", "")
            lines.append(f"{path.rpartition('.')[0]}.{said}")
    return lines


def announced(old: Version, new: Version) -> bool:
    """Whether a version may break what an older one promised: a major step, below 1.0 a minor step."""
    if old.major:
        return new.major > old.major
    return (new.major, new.minor) > (old.major, old.minor)


def check(root: Path, member: Member) -> tuple[bool, list[str]]:
    """Compares the working tree of one member with its last release.

    Args:
        root: Root of the repository.
        member: The member to check.

    Returns:
        Whether its version allows what was found, and what to print about it.

    Raises:
        ApiError: A surface cannot be read.
    """
    now = surface(member.source.parent, member)
    release = last_release(root, member.name)
    if release is None:
        return True, [f"{member.name}: no release yet"]
    tag, before = release
    with from_tag(root, member, tag) as search:
        lines = breaks(surface(search, member), now)
    if not lines:
        return True, [f"{member.name}: nothing broken since {tag}"]
    allowed = announced(before, Version(member.version))
    if allowed:
        return True, [f"{member.name}: broken since {tag}, as {member.version} announces", *(f"  {x}" for x in lines)]
    step = f"{before.major + 1}.0.0" if before.major else f"0.{before.minor + 1}.0"
    head = f"{member.name}: broken since {tag}; its version must be {step} or higher, it is {member.version}"
    return False, [head, *(f"  {line}" for line in lines)]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the command line and returns the exit code."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="api_check.py", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", metavar="package", help="distribution or module name (default: all)")
    given = parser.parse_args(arguments)
    code = 0
    try:
        house = Workspace.load(root)
        members = [house.member(name) for name in given.packages] or house.members
    except UnknownMemberError as error:
        return fail(str(error), 2)
    except WorkspaceError as error:
        return fail(str(error), 1)
    for member in members:
        try:
            passed, lines = check(house.root, member)
        except ApiError as error:
            code = fail(f"{member.name}: {error}", 1)
            continue
        print("\n".join(lines))
        code = code if passed else 1
    return code


if __name__ == "__main__":
    sys.exit(main())
