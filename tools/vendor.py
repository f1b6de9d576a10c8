"""Copy one package, and just those modules of what is shared that it uses, into another tree.

The copy lies in `DIR/<namespace>/<package>/`; what it uses of separata_core and separata_kit lies inside it, in
`_core/` and `_kit/`, so that two copies of different ages never meet. Imports become relative. Beside the code lie the
licence, the manifest `VENDORED.json` and `VENDORED.base.zip`, the files as they were written, from which `--update`
merges: that works in any tree, without this repository's history. What needs separata_embedded is left out, and the
manifest says so.

Example:
    python tools/vendor.py zerotuning --into ../serving/src --namespace serving.third_party
    python tools/vendor.py zerotuning --into ../serving/src --check
    python tools/vendor.py zerotuning --into ../serving/src --update

Exit codes: 0 done or clean; 1 the copy is edited or behind, has conflicts, or could not be made; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import io
import json
import keyword
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions
from pathlib import Path, PurePosixPath
from typing import Any

from workspace import (
    ROOT,
    Import,
    Member,
    UnknownMemberError,
    Workspace,
    WorkspaceError,
    blocker,
    fail,
    needs,
    normalise,
    parse_imports,
    requirement_name,
)

try:
    import libcst as cst
    from import_rewriter import ImportRewriter, Inspector, RewriteError, StringRewriter
    from libcst.metadata import MetadataWrapper
except ModuleNotFoundError as error:
    sys.exit(needs(error))

TOOL_VERSION = "1"
MANIFEST = "VENDORED.json"
BASE = "VENDORED.base.zip"
# Shared distributions of which nothing is ever copied: model weights, and the plugin that runs the tests.
NEVER_COPIED = ("separata-embedded", "separata-testing")
_IGNORED = ("__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache")


class VendorError(RewriteError):
    """The copy cannot be made or judged; the message is one line."""


class UsageError(VendorError):
    """The command cannot mean what it says."""

    code = 2


@dataclass(frozen=True)
class CopiedFile:
    """One file of a copy.

    Attributes:
        content: What is written.
        origin: Path of the original below the repository, with forward slashes.
        original: Content of the original.
    """

    content: bytes
    origin: str
    original: bytes


@dataclass
class Copy:
    """Everything that one copy consists of.

    Attributes:
        member: The package that is copied.
        namespace: Dotted name under which it is put, or "".
        files: What is written, by path relative to the copy's folder.
        modules: Modules that the copy is proved to import, by dotted name relative to it ("" is the package).
        manifest: Content of `VENDORED.json`.
    """

    member: Member
    namespace: str
    files: dict[str, CopiedFile] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Dotted name under which the copy is imported."""
        return f"{self.namespace}.{self.member.module}" if self.namespace else self.member.module


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Planner:
    """Decides which files make up a copy and what each of them says."""

    def __init__(self, house: Workspace, member: Member, namespace: str, *, tests: bool) -> None:
        self.house = house
        self.member = member
        self.copy = Copy(member, namespace)
        self.with_tests = tests
        never = {other.module for other in house.members if other.name in NEVER_COPIED}
        self.shared = {m.module: m for m in house.shared if m.module not in never and m is not member}
        self.never = never
        self.own = member.modules()
        self.pool = {name: path for shared in self.shared.values() for name, path in shared.modules().items()}
        self.imports = member.imports()
        self.left_out: dict[str, str] = {}
        self.stubs: set[str] = set()
        self.used: dict[str, set[str]] = {}
        self.whole: set[str] = set()

    def place(self, dotted: str) -> tuple[str, ...] | None:
        top, *rest = dotted.split(".")
        if top == self.member.module:
            return tuple(rest)
        if top in self.shared:
            return (self.corner(top), *rest)
        return None

    def corner(self, top: str) -> str:
        """Folder inside the copy for a shared module: `_core` for `separata_core`."""
        return "_" + top.removeprefix("separata_")

    def is_module(self, dotted: str) -> bool:
        return dotted in self.own or dotted in self.pool

    def run(self) -> Copy:
        self._leave_out()
        test_files = self._choose_tests() if self.with_tests else {}
        kept = {name: imports for name, imports in self.imports.items() if name not in self.left_out}
        for name, imports in kept.items():
            self._follow(imports, self._at(self.own[name]))
        for path, text in test_files.items():
            if path.suffix == ".py" and text is not None:
                self._follow(parse_imports(text, path.stem), self._at(path))
        self._write_own(kept)
        self._write_shared()
        self._write_tests(test_files)
        licence = next((p for p in (self.member.path / "LICENSE", self.house.root / "LICENSE") if p.is_file()), None)
        if licence is None:
            raise VendorError(f"{self.member.path}: there is no LICENSE to copy")
        self._add("LICENSE", licence)
        self.copy.files = dict(sorted(self.copy.files.items()))
        self._verify()
        self.copy.manifest = self._manifest()
        return self.copy

    def _at(self, path: Path) -> str:
        return path.relative_to(self.house.root).as_posix()

    def _candidates(self, found: Import) -> Iterator[str]:
        yield found.module
        if found.name is not None:
            yield f"{found.module}.{found.name}"

    def _leave_out(self) -> None:
        """Finds the modules that need what is never copied, at import time or at all, and those that need these."""
        for name, imports in self.imports.items():
            for found in imports:
                if found.top in self.never and not found.typing_only:
                    self.left_out[name] = f"needs {found.top}"
                other = next((m for m in self.house.packages if m.module == found.top and m is not self.member), None)
                if other is not None:
                    raise VendorError(f"{self._at(self.own[name])}:{found.line}: imports another package, {other.name}")
        demo = f"{self.member.module}.demo"
        for name in self.own:
            if name == demo or name.startswith(f"{demo}."):
                self.left_out.setdefault(name, "demo")
        while reached := self._reaching_left_out(nested=False):
            self.left_out.update({name: f"imports {gone}" for name, gone in reached})
        # Who asks for one of them only on a call, or for its types, stays, and finds a stand-in that says so.
        wanted = {gone for _, gone in self._reaching_left_out(nested=True)}
        self.stubs = {name for name in wanted if name.rpartition(".")[0] not in self.left_out}
        if self.member.module in self.left_out:
            raise VendorError(
                f"{self.member.module} itself {self.left_out[self.member.module]}, so nothing can be copied"
            )

    def _reaching_left_out(self, *, nested: bool) -> list[tuple[str, str]]:
        """Lists the modules that are kept and import one that is not, with that one."""
        return [
            (name, gone)
            for name, imports in self.imports.items()
            if name not in self.left_out
            for found in imports
            if (found.nested or found.typing_only) == nested
            for gone in self._candidates(found)
            if gone in self.left_out
        ]

    def _choose_tests(self) -> dict[Path, str | None]:
        """Returns the files of the tests with the text of those that are Python."""
        chosen: dict[Path, str | None] = {}
        for path in _files(self.member.tests):
            if path.suffix != ".py":
                chosen[path] = None
                continue
            text = path.read_text(encoding="utf-8")
            reason = None
            for found in parse_imports(text, path.stem):
                if found.top in self.never and found.top != "separata_testing" and not found.nested:
                    reason = f"needs {found.top}"
                gone = next((c for c in self._candidates(found) if c in self.left_out), None)
                if gone is not None:
                    reason = f"imports {gone}"
            if reason is None:
                chosen[path] = text
            else:
                self.left_out[f"tests/{path.relative_to(self.member.tests).as_posix()}"] = reason
        return chosen

    def _follow(self, imports: Sequence[Import], where: str) -> None:
        """Adds the shared modules that some imports reach, and those that these reach."""
        for found in imports:
            if found.top not in self.shared:
                continue
            if found.module not in self.pool:
                raise VendorError(f"{where}:{found.line}: imports {found.module}, which does not exist")
            named = f"{found.module}.{found.name}"
            if found.module == found.top and named not in self.pool:
                self._use(found.top, whole=True)
            else:
                self._use(found.module)
            if named in self.pool:
                self._use(named)

    def _use(self, dotted: str, *, whole: bool = False) -> None:
        top = dotted.partition(".")[0]
        used = self.used.setdefault(top, set())
        # Nothing but a list of public names: copied only if something asks the package itself for one.
        if whole and top not in self.whole:
            self.whole.add(top)
            self._follow_file(top)
        if dotted in used:
            return
        used.add(dotted)
        if dotted == top:
            return
        self._use(dotted.rpartition(".")[0])
        self._follow_file(dotted)

    def _follow_file(self, dotted: str) -> None:
        path = self.pool[dotted]
        text = path.read_text(encoding="utf-8")
        self._follow(parse_imports(text, dotted, is_package=path.name == "__init__.py"), self._at(path))

    def _add(self, target: str, path: Path, content: bytes | None = None) -> None:
        original = path.read_bytes()
        if target in self.copy.files or target in (MANIFEST, BASE):
            raise VendorError(f"{self._at(path)}: the copy has its own use for the name {target!r}")
        written = original if content is None else content
        self.copy.files[target] = CopiedFile(written, self._at(path), original)

    def _rewritten(self, path: Path, here: tuple[str, ...] | None, *, inspect: bool) -> bytes:
        original = path.read_bytes()
        try:
            module = cst.parse_module(original)
        except cst.ParserSyntaxError as error:
            raise VendorError(f"{self._at(path)}:{error.raw_line}: {error.message}") from error
        if inspect:
            tops = [self.member.module, *self.shared]
            distributions = [self.member.name, *(m.name for m in self.shared.values())]
            MetadataWrapper(module).visit(Inspector(tops, distributions, self._at(path)))
        versions = {normalise(m.name): m.version for m in (self.member, *self.shared.values())}
        kind = ImportRewriter if here is not None else StringRewriter
        rewriter = kind(self.place, versions, self._at(path), here, self.copy.name, self.is_module)
        return module.visit(rewriter).bytes

    def _write_own(self, kept: Mapping[str, Sequence[Import]]) -> None:
        paths = {path: name for name, path in self.own.items()}
        for path in _files(self.member.source):
            target = path.relative_to(self.member.source).as_posix()
            if target.partition("/")[0].removesuffix(".py") in {"tests", *map(self.corner, self.shared)}:
                raise VendorError(f"{self._at(path)}: the copy has its own use for the name {target!r}")
            name = paths.get(path)
            if name is None:
                self._add(target, path)
            elif name in kept:
                here = tuple(PurePosixPath(target).parent.parts)
                self._add(target, path, self._rewritten(path, here, inspect=True))
                self.copy.modules.append(".".join(name.split(".")[1:]))
            elif name in self.stubs:
                self._add(target, path, self._stub(name))

    def _stub(self, name: str) -> bytes:
        return (
            f'"""Left out of this copy of {self.member.name}."""\n\n'
            f'message = "{name} is not part of this copy ({self.left_out[name]}): install {self.member.name} for it"\n'
            "raise ModuleNotFoundError(message, name=__name__)\n"
        ).encode()

    def _write_shared(self) -> None:
        for top, used in sorted(self.used.items()):
            source, corner = self.shared[top].source, self.corner(top)
            for name in sorted(used):
                path = self.pool[name]
                inside = path.relative_to(source).as_posix()
                target = f"{corner}/{inside}"
                if name == top and top not in self.whole:
                    self._add(target, path, _docstring_only(path.read_bytes()))
                else:
                    here = (corner, *PurePosixPath(inside).parent.parts)
                    self._add(target, path, self._rewritten(path, here, inspect=True))
                self.copy.modules.append(".".join([corner, *name.split(".")[1:]]))
            folders = {self.pool[name].parent for name in used}
            for path in _files(source):
                if path.parent in folders and path.suffix != ".py" and path.name != "py.typed":
                    self._add(f"{corner}/{path.relative_to(source).as_posix()}", path)

    def _write_tests(self, files: Mapping[Path, str | None]) -> None:
        for path, text in files.items():
            target = f"tests/{path.relative_to(self.member.tests).as_posix()}"
            self._add(target, path, None if text is None else self._rewritten(path, None, inspect=False))
        if files and "tests/pytest.ini" not in self.copy.files:
            # Without a root of their own, pytest would import the folder above the tests under a name that is too
            # short wherever the namespace is a folder without `__init__.py`.
            up = "/".join([".."] * (1 + len(self.copy.name.split("."))))
            content = f"[pytest]\npythonpath = {up}\n".encode()
            self.copy.files["tests/pytest.ini"] = CopiedFile(content, "generated", content)

    def _verify(self) -> None:
        """Reads what is to be written and holds every import of ours, nested ones too, against the copy's files."""
        ours = {member.module for member in self.house.members}
        allowed = self.never
        present = set(self.copy.files)
        for target, file in self.copy.files.items():
            if not target.endswith(".py"):
                continue
            path = PurePosixPath(target)
            parts = path.with_suffix("").parts
            is_package = parts[-1] == "__init__"
            dotted = ".".join([self.copy.name, *(parts[:-1] if is_package else parts)])
            for found in parse_imports(file.content.decode("utf-8"), dotted, is_package=is_package):
                inside = found.module == self.copy.name or found.module.startswith(f"{self.copy.name}.")
                if not inside and found.top in ours:
                    if parts[0] == "tests" and found.top in allowed:
                        continue
                    if found.typing_only and found.top in allowed:
                        continue
                    raise VendorError(f"{file.origin}: the copy would still import {found.module}")
                if inside:
                    rest = found.module.removeprefix(self.copy.name).strip(".").replace(".", "/")
                    if not {f"{rest}.py", f"{rest}/__init__.py".lstrip("/")} & present:
                        raise VendorError(f"{file.origin}: imports {found.module}, which the copy does not have")

    def _manifest(self) -> dict[str, Any]:
        owned = {normalise(member.name) for member in self.house.members}
        requirements = {r for r in self.member.dependencies if requirement_name(r) not in owned}
        extras = {
            name: sorted(r for r in listed if requirement_name(r) not in owned)
            for name, listed in self.member.extras.items()
        }
        for top in self.used:
            member = self.shared[top]
            names = {
                found.top
                for name in self.used[top]
                if name != top or top in self.whole
                for found in member.imports()[name]
            }
            requirements |= {r for r in member.dependencies if _import_names(r) & names}
            for extra, listed in member.extras.items():
                wanted = [r for r in listed if _import_names(r) & names and requirement_name(r) not in owned]
                if wanted:
                    extras[extra] = sorted({*extras.get(extra, ()), *wanted})
        main = f"{self.member.module}.__main__"
        if main in self.left_out:
            console = f"left out: {self.left_out[main]}"
        else:
            console = f"python -m {self.copy.name}" if main in self.own else "none"
        return {
            "schema": "separata.vendored/1",
            "origin": "separata",
            "path": self._at(self.member.path),
            "distribution": self.member.name,
            "version": self.member.version,
            "shared": {self.shared[top].name: self.shared[top].version for top in sorted(self.used)},
            "commit": _commit(self.house.root),
            "tool": TOOL_VERSION,
            "name": self.copy.name,
            "namespace": self.copy.namespace,
            "tests": self.with_tests,
            "console": console,
            "left_out": dict(sorted(self.left_out.items())),
            "requirements": sorted(requirements),
            "optional_requirements": {name: listed for name, listed in sorted(extras.items()) if listed},
            "files": {
                path: {"origin": file.origin, "original": _sha(file.original), "written": _sha(file.content)}
                for path, file in self.copy.files.items()
            },
        }


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _is_debris(PurePosixPath(path.relative_to(folder)))
    ]


def _is_debris(path: PurePosixPath) -> bool:
    """Whether a file was left by an interpreter or a checker and is nobody's work."""
    return path.suffix in (".pyc", ".pyo") or not set(path.parts).isdisjoint(_IGNORED)


def _docstring_only(content: bytes) -> bytes:
    docstring = ast.get_docstring(ast.parse(content), clean=False)
    if docstring is None:
        return b""
    first = cst.parse_module(content).body[0]
    return cst.Module([first.with_changes(leading_lines=[])]).bytes


@functools.cache
def _installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def _import_names(requirement: str) -> set[str]:
    wanted = requirement_name(requirement)
    names = {top for top, owners in _installed().items() if wanted in map(normalise, owners)}
    return names or {wanted.replace("-", "_")}


def _commit(root: Path) -> str | None:
    """Returns the commit that the originals come from, with `+` for a tree that differs from it; None outside git."""
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head.strip() + ("+" if _git(root, "status", "--porcelain", "--", "packages", "shared").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout


def copyable(house: Workspace) -> list[Member]:
    """Lists the members that can be copied on their own."""
    return [member for member in house.members if member.name not in NEVER_COPIED]


def plan(house: Workspace, package: str, namespace: str = "", *, tests: bool = True) -> Copy:
    """Works out a copy without writing anything.

    Args:
        house: The workspace to copy from.
        package: Distribution or module name of a package.
        namespace: Dotted name of the package under which the copy is put; "" puts it at the top.
        tests: Whether the package's tests come along.

    Raises:
        UnknownMemberError: There is no such package.
        VendorError: The namespace is no dotted name, or the package cannot be copied as it is.
    """
    member = house.member(package, copyable(house))
    for part in namespace.split(".") if namespace else ():
        if not part.isidentifier() or keyword.iskeyword(part):
            raise UsageError(f"namespace {namespace!r} is not a dotted Python name (as in company.third_party)")
    if namespace.partition(".")[0] in {m.module for m in house.members}:
        raise UsageError(f"namespace {namespace!r} begins with the name of one of our own packages")
    return _Planner(house, member, namespace, tests=tests).run()


_PROOF = """
import importlib, json, sys
stage, name, blocked, modules = sys.argv[1], sys.argv[2], set(sys.argv[3].split(",")), sys.argv[4].split(",")
sys.path.insert(0, stage)
failed, skipped = {}, {}
for module in modules:
    full = f"{name}.{module}" if module else name
    try:
        loaded = importlib.import_module(full)
        if not (loaded.__file__ or "").startswith(stage):
            failed[full] = f"was loaded from {loaded.__file__}"
    except BaseException as error:
        cause = error
        while isinstance(cause, ImportError) and not isinstance(cause, ModuleNotFoundError) and cause.__cause__:
            cause = cause.__cause__
        top = (getattr(cause, "name", None) or "").partition(".")[0]
        ours = top in blocked or top == name.partition(".")[0] or top in sys.stdlib_module_names
        if isinstance(cause, ModuleNotFoundError) and top and not ours:
            skipped[full] = top
        else:
            failed[full] = f"{type(error).__name__}: {error}"
json.dump({"failed": failed, "skipped": skipped}, sys.stdout)
"""


def prove(copy: Copy, stage: Path, house: Workspace, python: str = sys.executable) -> dict[str, str]:
    """Imports every module of a staged copy in a fresh interpreter that cannot see our packages.

    Args:
        copy: The copy that was staged.
        stage: Folder under which the copy lies by its full dotted name.
        house: The workspace whose names are blocked.
        python: Interpreter to import with; it needs the libraries that the package needs.

    Returns:
        For each module that could not be tried, the third-party module that is not installed here.

    Raises:
        VendorError: A module needs one of ours, fails, or the package itself could not be tried.
    """
    blocked = {member.module for member in house.members}
    modules = [m for m in copy.modules if m.rpartition(".")[2] != "__main__"]
    code = blocker(blocked, but=copy.name) + _PROOF
    command = [python, "-I", "-B", "-c", code, str(stage), copy.name, ",".join(sorted(blocked)), ",".join(modules)]
    try:
        done = subprocess.run(command, cwd=stage, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(f"--python {python!r} cannot be run: {error.strerror}") from error
    try:
        result = json.loads(done.stdout[done.stdout.rindex('{"failed"') :])
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise VendorError(f"importing the copy ended with exit code {done.returncode}: {last}") from error
    for module, reason in result["failed"].items():
        raise VendorError(f"the copy is not self-contained: import {module}: {reason}")
    skipped: dict[str, str] = result["skipped"]
    if copy.name in skipped:
        raise VendorError(f"cannot prove the copy: import {copy.name} needs {skipped[copy.name]}, not installed here")
    return skipped


def _zip(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in sorted(files.items()):
            # A fixed time keeps the archive the same for the same content.
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return buffer.getvalue()


def _dump(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=2) + "\n").encode()


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _content(copy: Copy, unproved: Mapping[str, str]) -> dict[str, bytes]:
    """Returns what a fresh copy consists of, manifest and base included."""
    files = {path: file.content for path, file in copy.files.items()}
    manifest = {**copy.manifest, "unproved": dict(sorted(unproved.items()))}
    return {**files, MANIFEST: _dump(manifest), BASE: _zip(files)}


def load_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest of a copy.

    Raises:
        VendorError: There is none, or it is not one of ours.
    """
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{folder} holds no {MANIFEST}: it is not a copy made by this tool") from error
    except ValueError as error:
        raise VendorError(f"{file} is not JSON: {error}") from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != "separata.vendored/1":
        raise VendorError(f"{file} has the schema {schema!r}; this tool reads 'separata.vendored/1'")
    assert isinstance(manifest, dict)
    files = manifest.get("files")
    for key, sound in {
        "distribution": isinstance(manifest.get("distribution"), str),
        "namespace": isinstance(manifest.get("namespace"), str),
        "tests": isinstance(manifest.get("tests"), bool),
        "files": isinstance(files, dict)
        and all(isinstance(entry, dict) and isinstance(entry.get("written"), str) for entry in files.values()),
    }.items():
        if not sound:
            raise VendorError(f"{file} is damaged at {key!r}; take it from your version control, or make the copy anew")
    return manifest


def _present(folder: Path) -> dict[str, bytes]:
    """Returns the files of a copy on disk, without the tool's own two."""
    own = (MANIFEST, BASE)
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in sorted(found.items())
        if name not in own
        and path.suffix not in (".pyc", ".pyo")
        and not set(PurePosixPath(name).parts) & set(_IGNORED)
    }


def edits(folder: Path) -> list[str]:
    """Lists how a copy differs from what was written: one `edited`, `missing` or `unknown` line for each file."""
    written = {path: entry["written"] for path, entry in load_manifest(folder)["files"].items()}
    present = _present(folder)
    lines = []
    for path in sorted({*written, *present}):
        if path not in present:
            lines.append(f"missing: {path}")
        elif path not in written:
            lines.append(f"unknown: {path}")
        elif _sha(present[path]) != written[path]:
            lines.append(f"edited: {path}")
    return lines


def check(folder: Path, house: Workspace) -> list[str]:
    """Lists how a copy differs from what was written and from what would be written now; empty means clean."""
    manifest = load_manifest(folder)
    fresh = plan(house, manifest["distribution"], manifest["namespace"], tests=manifest["tests"])
    before = {path: entry["written"] for path, entry in manifest["files"].items()}
    now = {path: _sha(file.content) for path, file in fresh.files.items()}
    lines = edits(folder)
    for path in sorted({*before, *now}):
        if path not in now:
            lines.append(f"behind: {path} (gone from the origin)")
        elif path not in before:
            lines.append(f"behind: {path} (new in the origin)")
        elif before[path] != now[path]:
            lines.append(f"behind: {path}")
    return lines


def locate(into: Path, member: Member, namespace: str | None) -> Path:
    """Returns the folder of a package's copy below `into`; without a namespace it is searched for by its manifest.

    Raises:
        VendorError: There is none, or there are several.
    """
    if namespace is not None:
        folder = into.joinpath(*namespace.split("."), member.module) if namespace else into / member.module
        load_manifest(folder)
        return folder
    found = []
    for file in sorted(into.rglob(MANIFEST)):
        if any(part.startswith(".vendoring-") for part in file.parts):
            continue
        try:
            if load_manifest(file.parent).get("distribution") == member.name:
                found.append(file.parent)
        except VendorError:
            continue
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{into} holds {len(found)} copies of {member.name}; say which with --namespace")
    raise UsageError(f"{into} holds no copy of {member.name}")


@contextmanager
def _staging(into: Path, folder: Path) -> Iterator[Path]:
    """Yields a folder beside the target that is gone afterwards, with every folder that was made for nothing."""
    made = [path for path in (folder.parent, *folder.parent.parents) if not path.exists()]
    into.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".vendoring-{folder.name}-", dir=into))
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _swap(new: Path, target: Path, stage: Path) -> None:
    """Puts a finished folder in place; the one that was there comes back if that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    old = stage / "old"
    if not target.exists():
        new.rename(target)
        return
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise


def _recover(into: Path, target: Path) -> None:
    """Puts an old copy back that a run killed between its two renames left aside."""
    if not target.exists() and into.is_dir():
        for old in into.glob(f".vendoring-{target.name}-*/old"):
            old.rename(target)
            shutil.rmtree(old.parent)
            return


def _target(into: Path, copy: Copy) -> Path:
    return into.joinpath(*copy.name.split("."))


def vendor(
    house: Workspace,
    package: str,
    into: Path,
    namespace: str = "",
    *,
    tests: bool = True,
    force: bool = False,
    python: str = sys.executable,
) -> Copy:
    """Writes a copy, or replaces one that nobody has edited.

    Args:
        house: The workspace to copy from.
        package: Distribution or module name of a package.
        into: Folder that is on the import path of the other tree.
        namespace: Dotted name of the package under which the copy is put; "" puts it at the top.
        tests: Whether the package's tests come along.
        force: Replace a copy that was edited. Files that this tool did not write stay.
        python: Interpreter that the copy is proved with.

    Raises:
        VendorError: The copy was edited, the folder is no copy, or the copy would not be self-contained. Nothing is
            changed then.
    """
    copy = plan(house, package, namespace, tests=tests)
    into = into.resolve()
    target = _target(into, copy)
    _recover(into, target)
    kept: dict[str, bytes] = {}
    if target.exists():
        if not target.is_dir() or (any(target.iterdir()) and not (target / MANIFEST).exists()):
            raise VendorError(f"{target} exists and is not a copy made by this tool; move it away first")
        if (target / MANIFEST).exists():
            changed = edits(target)
            if changed and not force:
                raise VendorError(
                    f"{target} holds edits ({'; '.join(changed[:3])}{'; ...' if len(changed) > 3 else ''}): "
                    "--update merges them, --force overwrites them"
                )
            written = load_manifest(target)["files"]
            kept = {path: content for path, content in _present(target).items() if path not in written}
    with _staging(into, target) as stage:
        new = stage.joinpath(*copy.name.split("."))
        _write(new, {path: file.content for path, file in copy.files.items()})
        unproved = prove(copy, stage, house, python)
        content = _content(copy, unproved)
        _write(new, {**kept, **content})
        _swap(new, target, stage)
    return copy


def _merge(edited: bytes, base: bytes, new: bytes, label: str) -> tuple[bytes, bool]:
    """Merges three versions of a text as `git merge-file` does; returns the result and whether it has conflicts."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("edited", "base", "origin")]
        for path, content in zip(paths, (edited, base, new), strict=True):
            path.write_bytes(content)
        labels = [part for name in ("edited here", "base", label) for part in ("-L", name)]
        command = ["git", "merge-file", "-p", "-q", *labels, *map(str, paths)]
        done = subprocess.run(command, capture_output=True, check=False)
    # The exit code is the number of conflicts, at most 127; an error is above.
    if done.returncode > 127:
        raise VendorError(f"git merge-file: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout, done.returncode > 0


def _is_text(content: bytes) -> bool:
    return b"\0" not in content[:8000]


def merge_trees(
    edited: Mapping[str, bytes], base: Mapping[str, bytes], new: Mapping[str, bytes], label: str
) -> tuple[dict[str, bytes], list[str]]:
    """Merges three trees of files.

    Args:
        edited: Files as they are in the copy.
        base: Files as they were written into the copy.
        new: Files as they would be written now.
        label: What to call the new version in conflict marks.

    Returns:
        The merged files, and one line for each conflict.
    """
    merged: dict[str, bytes] = {}
    conflicts: list[str] = []
    for path in sorted({*edited, *base, *new}):
        mine, old, theirs = edited.get(path), base.get(path), new.get(path)
        if mine in (old, theirs):
            result = theirs
        elif theirs == old:
            result = mine
        elif theirs is None:
            result = mine
            conflicts.append(f"conflict: {path} (edited here, gone from the origin; the edited file was kept)")
        elif mine is None:
            result = theirs
            conflicts.append(f"conflict: {path} (deleted here, changed in the origin; the new file was written)")
        elif not all(map(_is_text, (mine, old or b"", theirs))):
            result = mine
            merged[f"{path}.origin"] = theirs
            conflicts.append(f"conflict: {path} (not text; the new version lies beside it as {path}.origin)")
        else:
            result, marks = _merge(mine, old or b"", theirs, label)
            if marks:
                conflicts.append(f"conflict: {path}")
        if result is not None:
            merged[path] = result
    return merged, conflicts


def _base(folder: Path, manifest: Mapping[str, Any]) -> dict[str, bytes]:
    file = folder / BASE
    try:
        with zipfile.ZipFile(file) as archive:
            base = {name: archive.read(name) for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile, EOFError) as error:
        raise VendorError(
            f"{file} cannot be read ({error}), so there is nothing to merge from; --force overwrites"
        ) from error
    if {name: _sha(content) for name, content in base.items()} != {
        name: entry["written"] for name, entry in manifest["files"].items()
    }:
        raise VendorError(
            f"{file} does not agree with {MANIFEST}, so there is nothing to merge from; --force overwrites"
        )
    return base


def update(folder: Path, house: Workspace, into: Path, python: str = sys.executable) -> list[str]:
    """Brings a copy up to date and keeps its edits.

    What would be written now is proved self-contained first; the merged copy is swapped in whole.

    Args:
        folder: The copy.
        house: The workspace to copy from.
        into: Folder that is on the import path of the other tree; the copy lies below it.
        python: Interpreter that the new copy is proved with.

    Returns:
        One line for each conflict; the marks are in the files.

    Raises:
        VendorError: The base cannot be read or the new copy is not self-contained. Nothing is changed then.
    """
    manifest = load_manifest(folder)
    base = _base(folder, manifest)
    copy = plan(house, manifest["distribution"], manifest["namespace"], tests=manifest["tests"])
    into = into.resolve()
    with _staging(into, folder) as stage:
        proof = stage.joinpath("proof", *copy.name.split("."))
        _write(proof, {path: file.content for path, file in copy.files.items()})
        content = _content(copy, prove(copy, stage / "proof", house, python))
        new = {path: text for path, text in content.items() if path not in (MANIFEST, BASE)}
        merged, conflicts = merge_trees(_present(folder), base, new, f"{copy.member.name} {copy.member.version}")
        result = stage / "new"
        _write(result, {**merged, MANIFEST: content[MANIFEST], BASE: content[BASE]})
        _swap(result, folder, stage)
    return conflicts


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the command line and returns the exit code."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="vendor.py", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", help="distribution or module name")
    parser.add_argument(
        "--into", required=True, type=Path, metavar="DIR", help="folder on the import path of your tree"
    )
    parser.add_argument("--namespace", metavar="x.y", help="package below DIR to put the copy into (default: none)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="say whether the copy was edited or is behind")
    mode.add_argument("--update", action="store_true", help="merge what is new into the copy, three ways")
    mode.add_argument("--force", action="store_true", help="overwrite a copy that was edited")
    parser.add_argument("--no-tests", action="store_true", help="leave the package's tests out")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter that has the package's libraries (default: this one)"
    )
    given = parser.parse_args(arguments)
    try:
        house = Workspace.load(root)
        member = house.member(given.package, copyable(house))
        if given.into.exists() and not given.into.is_dir():
            raise UsageError(f"--into {str(given.into)!r} is not a folder")
        if given.check:
            lines = check(locate(given.into, member, given.namespace), house)
            print("\n".join(lines) if lines else f"{member.name}: clean and up to date")
            return 1 if lines else 0
        if given.update:
            folder = locate(given.into, member, given.namespace).resolve()
            lines = update(folder, house, given.into, given.python)
            print("\n".join(lines) if lines else f"{member.name}: updated to {member.version}")
            return 1 if lines else 0
        copy = vendor(
            house,
            given.package,
            given.into,
            given.namespace or "",
            tests=not given.no_tests,
            force=given.force,
            python=given.python,
        )
        versions = {member.name: member.version, **copy.manifest["shared"]}
        parts = " and ".join(f"{name} {version}" for name, version in versions.items())
        print(f"{copy.name}: {len(copy.files)} files of {parts}")
    except UnknownMemberError as error:
        return fail(str(error), 2)
    except WorkspaceError as error:
        return fail(str(error), 1)
    except RewriteError as error:
        return fail(str(error), error.code)
    except OSError as error:
        return fail(str(error), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
