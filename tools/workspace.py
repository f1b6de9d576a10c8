"""What the tools and the noxfile know about this repository: its members and who imports whom.

Pure standard library, so that it loads in any environment. Scripts beside it say `import workspace`; others put
`tools/` on `sys.path` first.

Example:
    >>> import workspace
    >>> house = workspace.Workspace.load()
    >>> house.member("separata-core").module
    'separata_core'
    >>> [member.name for member in house.dependants("separata-core")]  # doctest: +SKIP
    ['zerotuning']
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What stands in tools/ for the derived `uv.lock`.
PINS = ("lock.sha256", "requirements.txt")

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:\[([^\]]*)\])?")


class WorkspaceError(Exception):
    """The workspace, or what was asked of it, is not right; the message is one line for the person who asked."""


class UnknownMemberError(WorkspaceError):
    """No member has the given name; the message suggests the nearest one."""


def normalise(name: str) -> str:
    """Returns a distribution name in its canonical form: lower case, one dash for every run of `-`, `_` and `.`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement: str) -> str:
    """Returns the canonical distribution name of a requirement such as `"torch>=2.10 ; python_version > '3'"`.

    Raises:
        WorkspaceError: The string does not begin with a distribution name.
    """
    match = _REQUIREMENT.match(requirement)
    if match is None:
        raise WorkspaceError(f"requirement {requirement!r} does not begin with a distribution name")
    return normalise(match[1])


def requirement_extras(requirement: str) -> tuple[str, ...]:
    """Returns the extras that a requirement such as `"zerotuning[cli,demo]>=0.1"` asks for."""
    match = _REQUIREMENT.match(requirement)
    if match is None or match[2] is None:
        return ()
    return tuple(extra.strip() for extra in match[2].split(",") if extra.strip())


@dataclass(frozen=True)
class Import:
    """One import of one module or name, as a source file states it.

    Attributes:
        module: Absolute dotted name of the module; relative imports are resolved.
        name: The name after `from module import`, `"*"` for a star, None for a plain `import module`.
        line: Line number, from 1.
        nested: True inside a function, that is, the import happens on a call and not with its module.
        typing_only: True under `if TYPE_CHECKING:`, that is, the import never happens.
    """

    module: str
    name: str | None
    line: int
    nested: bool = False
    typing_only: bool = False

    @property
    def top(self) -> str:
        """First part of the dotted name."""
        return self.module.partition(".")[0]


class _Reader(ast.NodeVisitor):
    def __init__(self, module: str, is_package: bool) -> None:
        self.found: list[Import] = []
        self._package = module.split(".") if is_package else module.split(".")[:-1]
        self._nested = False
        self._typing = False

    def _add(self, module: str, name: str | None, line: int) -> None:
        self.found.append(Import(module, name, line, self._nested, self._typing))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, None, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            base = self._package[: len(self._package) - node.level + 1]
            module = ".".join([*base, *([module] if module else [])])
        for alias in node.names:
            self._add(module, alias.name, node.lineno)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        before, self._nested = self._nested, True
        self.generic_visit(node)
        self._nested = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def visit_If(self, node: ast.If) -> None:
        test = node.test
        name = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else ""
        if name != "TYPE_CHECKING":
            self.generic_visit(node)
            return
        before, self._typing = self._typing, True
        for child in node.body:
            self.visit(child)
        self._typing = before
        for child in node.orelse:
            self.visit(child)


def parse_imports(text: str, module: str, *, is_package: bool = False) -> list[Import]:
    """Lists every import of a module's source text, those inside functions and `TYPE_CHECKING` blocks too.

    Args:
        text: Python source.
        module: Dotted name of the module, against which relative imports are resolved.
        is_package: Whether the text is that of an `__init__.py`.

    Raises:
        SyntaxError: The text is not Python.
    """
    reader = _Reader(module, is_package)
    reader.visit(ast.parse(text))
    return reader.found


def module_files(source: Path, module: str) -> dict[str, Path]:
    """Maps the dotted name of every module below a package folder to its file.

    Args:
        source: Folder of the package, the one with `__init__.py`.
        module: Dotted name of that package.
    """
    files: dict[str, Path] = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        files[".".join([module, *parts])] = path
    return files


def read_imports(source: Path, module: str) -> dict[str, list[Import]]:
    """Lists the imports of every module below a package folder, by dotted name of the importing module."""
    found = {}
    for name, path in module_files(source, module).items():
        try:
            text = path.read_text(encoding="utf-8")
            found[name] = parse_imports(text, name, is_package=path.name == "__init__.py")
        except SyntaxError as error:
            raise WorkspaceError(f"{path}:{error.lineno}: {error.msg}") from error
    return found


@dataclass(frozen=True)
class Member:
    """One distribution of the workspace, as its `pyproject.toml` describes it.

    Attributes:
        path: Absolute folder of the member.
        group: Name of the folder it lies in, `"packages"` or `"shared"`.
        name: Distribution name as written.
        module: Name of its one top-level module.
        version: Version as written.
        description: One line of what it is.
        dependencies: Requirements as written.
        extras: Requirements of each extra.
        groups: Requirements of each dependency group; `include-group` entries are resolved.
        scripts: Console scripts and their entry points.
        pyproject: The whole parsed `pyproject.toml`, for whatever is not listed here.
    """

    path: Path
    group: str
    name: str
    module: str
    version: str
    description: str
    dependencies: tuple[str, ...]
    extras: Mapping[str, tuple[str, ...]] = field(hash=False)
    groups: Mapping[str, tuple[str, ...]] = field(hash=False)
    scripts: Mapping[str, str] = field(hash=False)
    pyproject: Mapping[str, Any] = field(repr=False, compare=False, hash=False)

    @classmethod
    def load(cls, path: Path) -> Member:
        """Reads the member in a folder.

        Raises:
            WorkspaceError: `pyproject.toml` is missing, is not TOML, or lacks a name or a static version.
        """
        file = path / "pyproject.toml"
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise WorkspaceError(f"{file}: {error}") from error
        project = data.get("project", {})
        for key in ("name", "version"):
            if not isinstance(project.get(key), str):
                raise WorkspaceError(f"{file}: project.{key} must be a string, it is {project.get(key)!r}")
        wheel = data.get("tool", {}).get("hatch", {}).get("build", {}).get("targets", {}).get("wheel", {})
        packages = wheel.get("packages", [])
        module = Path(packages[0]).name if packages else normalise(project["name"]).replace("-", "_")
        return cls(
            path=path.resolve(),
            group=path.resolve().parent.name,
            name=project["name"],
            module=module,
            version=project["version"],
            description=project.get("description", ""),
            dependencies=tuple(project.get("dependencies", ())),
            extras={key: tuple(value) for key, value in project.get("optional-dependencies", {}).items()},
            groups=_groups(data.get("dependency-groups", {})),
            scripts=dict(project.get("scripts", {})),
            pyproject=data,
        )

    @property
    def source(self) -> Path:
        """Folder of the importable package."""
        return self.path / "src" / self.module

    @property
    def tests(self) -> Path:
        """Folder of the tests; it may not exist."""
        return self.path / "tests"

    @property
    def benchmarks(self) -> Path:
        """Folder of the benchmarks; it may not exist."""
        return self.path / "benchmarks"

    @property
    def is_package(self) -> bool:
        """True for a method in `packages/`, False for what lies in `shared/`."""
        return self.group == "packages"

    def modules(self) -> dict[str, Path]:
        """Maps the dotted name of every module of the package to its file."""
        return module_files(self.source, self.module)

    def imports(self) -> dict[str, list[Import]]:
        """Lists the imports of every module of the package, by dotted name of the importing module."""
        return read_imports(self.source, self.module)

    def requirements(self) -> Iterator[str]:
        """Yields every requirement as written: dependencies, then extras, then dependency groups."""
        yield from self.dependencies
        for table in (self.extras, self.groups):
            for requirements in table.values():
                yield from requirements


def _groups(table: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    def resolve(name: str, seen: tuple[str, ...]) -> Iterator[str]:
        if name in seen or name not in table:
            raise WorkspaceError(f"dependency group {name!r} is missing or includes itself")
        for entry in table[name]:
            if isinstance(entry, str):
                yield entry
            else:
                yield from resolve(entry["include-group"], (*seen, name))

    return {name: tuple(resolve(name, ())) for name in table}


@dataclass(frozen=True)
class Workspace:
    """All members of the workspace, ordered by folder: what lies in `packages/`, then what lies in `shared/`."""

    root: Path
    members: tuple[Member, ...]

    @classmethod
    def load(cls, root: Path = ROOT) -> Workspace:
        """Reads the workspace whose root `pyproject.toml` lies in `root`.

        Raises:
            WorkspaceError: There is no such file, it declares no members, or two members share a name.
        """
        root = root.resolve()
        file = root / "pyproject.toml"
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise WorkspaceError(f"{file}: {error}") from error
        table = data.get("tool", {}).get("uv", {}).get("workspace", {})
        if not table.get("members"):
            raise WorkspaceError(f"{file}: tool.uv.workspace.members names no members")
        skipped = {path for pattern in table.get("exclude", ()) for path in root.glob(pattern)}
        folders = {path for pattern in table["members"] for path in root.glob(pattern)} - skipped
        members = [Member.load(path) for path in sorted(folders) if (path / "pyproject.toml").is_file()]
        names = [normalise(member.name) for member in members]
        for name in names:
            if names.count(name) > 1:
                raise WorkspaceError(f"{file}: two members are named {name!r}")
        return cls(root, tuple(members))

    @property
    def packages(self) -> tuple[Member, ...]:
        """The methods, without what is shared."""
        return tuple(member for member in self.members if member.is_package)

    @property
    def shared(self) -> tuple[Member, ...]:
        """What lies in `shared/`."""
        return tuple(member for member in self.members if not member.is_package)

    def find(self, name: str) -> Member | None:
        """Returns the member with this distribution or module name, or None."""
        wanted = normalise(name)
        return next((m for m in self.members if wanted in (normalise(m.name), normalise(m.module))), None)

    def member(self, name: str, among: Collection[Member] | None = None) -> Member:
        """Returns the member with this distribution or module name.

        Args:
            name: Distribution or module name; case and `-`, `_`, `.` do not matter.
            among: Members to choose from, all by default.

        Raises:
            UnknownMemberError: None has this name; the message suggests the nearest.
        """
        choice = self.members if among is None else among
        found = self.find(name)
        if found is None or found not in choice:
            near = self.nearest(name, choice)
            known = ", ".join(member.name for member in choice)
            hint = f"did you mean {near!r}?" if near else f"known are: {known}"
            raise UnknownMemberError(f"unknown package {name!r}; {hint}")
        return found

    def nearest(self, name: str, among: Collection[Member] | None = None) -> str | None:
        """Returns the distribution name that looks most like `name`, or None if none comes close."""
        names = {normalise(member.name): member.name for member in (self.members if among is None else among)}
        close = difflib.get_close_matches(normalise(name), names, n=1, cutoff=0.5)
        return names[close[0]] if close else None

    @cached_property
    def graph(self) -> dict[str, frozenset[str]]:
        """For each member's name, the names of the members that its package imports at any place."""
        return {member.name: self._imported([member.source], member) for member in self.members}

    @cached_property
    def wide_graph(self) -> dict[str, frozenset[str]]:
        """Like `graph`, with what tests and benchmarks import and what any requirement names."""
        wide = {}
        for member in self.members:
            folders = [member.source, member.tests, member.benchmarks]
            required = {self.find(requirement_name(requirement)) for requirement in member.requirements()}
            names = {other.name for other in required if other is not None and other is not member}
            wide[member.name] = self._imported(folders, member) | names
        return wide

    def _imported(self, folders: Iterable[Path], member: Member) -> frozenset[str]:
        owner = {other.module: other.name for other in self.members}
        tops = {
            found.top
            for folder in folders
            for imports in read_imports(folder, member.module if folder == member.source else folder.name).values()
            for found in imports
        }
        return frozenset(owner[top] for top in tops if top in owner) - {member.name}

    def dependants(self, name: str, *, wide: bool = False) -> tuple[Member, ...]:
        """Members that import the named one, directly or through others, without itself.

        Args:
            name: Distribution or module name.
            wide: Follow tests, benchmarks and requirements as well.
        """
        return self._closure({self.member(name).name}, wide=wide, include=False)

    def affected(self, changed: Iterable[Path | str]) -> tuple[Member, ...]:
        """Members whose checks a change can alter, by import graph and requirements.

        Args:
            changed: Changed files, absolute or relative to the root. A file outside every member concerns all of
                them, except for Markdown and for the scripts in tools/, which have tests of their own; the pins that
                lie there do concern all.
        """
        touched: set[str] = set()
        for entry in changed:
            path = (self.root / entry).resolve()
            owners = {member.name for member in self.members if path.is_relative_to(member.path)}
            script = path.is_relative_to(self.root / "tools") and path.name not in PINS
            if not owners and path.suffix != ".md" and not script:
                return self.members
            touched |= owners
        return self._closure(touched, wide=True, include=True)

    def _closure(self, start: set[str], *, wide: bool, include: bool) -> tuple[Member, ...]:
        graph = self.wide_graph if wide else self.graph
        reached = set(start)
        grown = True
        while grown:
            more = {name for name, imported in graph.items() if imported & reached} - reached
            reached |= more
            grown = bool(more)
        return tuple(m for m in self.members if m.name in reached and (include or m.name not in start))


def blocker(names: Iterable[str], but: str = "") -> str:
    """Returns Python source that makes every import of some top-level names fail, to be run before anything else.

    Args:
        names: Top-level module names to block.
        but: A dotted name that may be imported nevertheless, with all below it.
    """
    return (
        "import sys\n\n\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        allowed = name == {but!r} or name.startswith({but + '.'!r})\n"
        f"        if name.partition('.')[0] in {sorted(names)!r} and not allowed:\n"
        "            raise ModuleNotFoundError(f'{name} is blocked: the copy must not need it', name=name)\n\n\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )


def needs(error: ModuleNotFoundError) -> int:
    """Prints how to get a library that a tool cannot be without, and returns the exit code 1.

    Raises:
        ModuleNotFoundError: What is missing is none of the libraries of the dependency group `tools`.
    """
    if error.name not in ("griffe", "libcst", "packaging"):
        raise error
    return fail(
        f"this tool needs {error.name}: run it with the Python of an environment that has the dependency group "
        f"`tools`, such as .venv/bin/python after `uv sync --all-packages --all-groups`, or `pip install {error.name}`",
        1,
    )


def fail(message: str, code: int) -> int:
    """Prints one line to standard error, in the form that every tool uses, and returns the exit code."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
