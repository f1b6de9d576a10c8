"""Hold every distribution to the same few files, so that who knows one knows all.

Each has README.md, CHANGELOG.md, LICENSE, py.typed, tests and a pyproject.toml of one shape; a package also has the
README's sections in their order, one console script named after it, benchmarks, and a `[tool.separata]` table. All
Python files are searched for what can run foreign code (pickles, eval, a shell, `torch.load` of more than weights) and
for escapes without a reason. One line per finding.

A line that needs one of the forbidden calls says why: `# unsafe: <reason>`. What belongs to shared/ is held to the part
that applies: it needs no README sections, no script, no benchmarks.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import workspace
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

# In this order; other sections may stand between them. What it does comes first, without a heading.
SECTIONS = ("Install", "Use", "Command line", "Measured", "Limits", "Citation")
INIT_LINES = 60
PYTHON = ">=3.11"
LICENSE_NAME = "Apache-2.0"
SDIST = ["src", "tests", "README.md", "CHANGELOG.md", "LICENSE"]
TESTING = "separata-testing"
PRIVATE = "Private :: Do Not Upload"
SEPARATA_KEYS = ("title", "paper", "engines")
SKIPPED_FOLDERS = {"__pycache__", "build", "dist", "node_modules", "site", "venv"}

_PICKLES = {"_pickle", "cPickle", "cloudpickle", "dill", "jsonpickle", "marshal", "pickle", "shelve"}
_ESCAPE = re.compile(
    r"#\s*(noqa|type:\s*ignore|pragma:\s*no (?:cover|branch))(\[[\w\-, ]*\]|:\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*)?"
)
_UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX)\b")

Finding = tuple[Path, int, str]


def check(member: workspace.Member, root: Path) -> Iterator[Finding]:
    """Looks at one distribution.

    Args:
        member: The distribution.
        root: Folder of the workspace, whose licence all share.

    Yields:
        File, line (0 where it is about the whole file) and what is wrong.
    """
    yield from _files(member, root)
    yield from _readme(member)
    yield from _changelog(member)
    yield from _init(member)
    yield from _project(member)
    yield from _requirements(member)
    if member.is_package:
        yield from _package(member)


def _files(member: workspace.Member, root: Path) -> Iterator[Finding]:
    inside = (f"src/{member.module}/__init__.py", f"src/{member.module}/py.typed")
    for name in ("README.md", "CHANGELOG.md", "LICENSE", *inside):
        if not (member.path / name).is_file():
            yield member.path / name, 0, "is missing"
    licence = member.path / "LICENSE"
    if licence.is_file() and licence.read_bytes() != (root / "LICENSE").read_bytes():
        yield licence, 0, "differs from the LICENSE of the workspace; copy that one"
    if not list(member.tests.rglob("test_*.py")):
        yield member.tests, 0, "holds no test_*.py"
    for path in sorted((member.path / "src").glob("*")):
        if path.name not in (member.module, "__pycache__") and not path.name.startswith("."):
            yield path, 0, f"stands beside {member.module}; a distribution has one top-level module"


def _headings(text: str) -> Iterator[tuple[int, int, str]]:
    """Line, level and text of a Markdown text's headings, outside code fences."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r" {0,3}(```+|~~~+)", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        elif not fence and (heading := re.match(r"(#{1,6}) +(.*?) *#*$", line)):
            yield number, len(heading[1]), heading[2]


def _readme(member: workspace.Member) -> Iterator[Finding]:
    file = member.path / "README.md"
    if not file.is_file():
        return
    text = file.read_text(encoding="utf-8")
    headings = list(_headings(text))
    if not headings or headings[0] != (1, 1, member.name):
        yield file, 1, f"must begin with the heading '# {member.name}'"
        return
    after = headings[1][0] if len(headings) > 1 else len(text.splitlines()) + 1
    if not "".join(text.splitlines()[1 : after - 1]).strip():
        yield file, 2, "must say below its title what the package does"
    if not member.is_package:
        return
    present = [(line, name) for line, level, name in headings if level == 2 and name in SECTIONS]
    names = [name for _, name in present]
    for name in SECTIONS:
        if name not in names:
            yield file, 0, f"lacks the section '## {name}'"
    for (line, name), (_, before) in zip(present[1:], present[:-1], strict=True):
        if SECTIONS.index(name) <= SECTIONS.index(before):
            yield file, line, f"'## {name}' comes after '## {before}'; the order is {', '.join(SECTIONS)}, each once"
    lines = text.splitlines()
    for index, (line, level, name) in enumerate(headings):
        end = headings[index + 1][0] - 1 if index + 1 < len(headings) else len(lines)
        has_parts = index + 1 < len(headings) and headings[index + 1][1] > level
        if level == 2 and name in SECTIONS and not has_parts and not "".join(lines[line:end]).strip():
            yield file, line, f"'## {name}' is empty"


def _changelog(member: workspace.Member) -> Iterator[Finding]:
    file = member.path / "CHANGELOG.md"
    if not file.is_file():
        return
    headings = [(line, level, name) for line, level, name in _headings(file.read_text(encoding="utf-8")) if level < 3]
    if not headings or headings[0] != (1, 1, "Changelog"):
        yield file, 1, "must begin with the heading '# Changelog'"
    sections = [(line, name) for line, level, name in headings if level == 2]
    if not sections or sections[0][1] != "Unreleased":
        yield file, 0, "its first section must be '## Unreleased'"
    for line, name in sections[1:]:
        if not re.fullmatch(r"\d+\.\d+\.\d+\S* \(\d{4}-\d{2}-\d{2}\)", name):
            yield file, line, f"'## {name}' must be a version and its date, such as '## 0.1.0 (2026-01-31)'"


def _init(member: workspace.Member) -> Iterator[Finding]:
    file = member.source / "__init__.py"
    if not file.is_file():
        return
    text = file.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if lines > INIT_LINES:
        yield file, 0, f"has {lines} lines; it must fit on one screen, which is {INIT_LINES}"
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return  # reported with the sources
    if not ast.get_docstring(tree):
        yield file, 1, "must begin with a docstring that says what the package does"


def _project(member: workspace.Member) -> Iterator[Finding]:
    file = member.path / "pyproject.toml"
    data = member.pyproject
    project: Any = data["project"]
    own = member.path.name if member.is_package else f"separata-{member.path.name}"
    module = member.name.replace("-", "_")
    build = data.get("build-system", {})
    targets = data.get("tool", {}).get("hatch", {}).get("build", {}).get("targets", {})
    wanted: dict[str, tuple[Any, Any]] = {
        "project.name": (project["name"], own),
        "project.readme": (project.get("readme"), "README.md"),
        "project.license": (project.get("license"), LICENSE_NAME),
        "project.license-files": (project.get("license-files"), ["LICENSE"]),
        "project.requires-python": (project.get("requires-python"), PYTHON),
        "build-system.build-backend": (build.get("build-backend"), "hatchling.build"),
        "tool.hatch.build.targets.wheel.packages": (targets.get("wheel", {}).get("packages"), [f"src/{module}"]),
        "tool.hatch.build.targets.sdist.include": (targets.get("sdist", {}).get("include"), SDIST),
    }
    for key, (found, right) in wanted.items():
        if found != right:
            yield file, _line(file, key), f"{key} must be {json.dumps(right)}, it is {json.dumps(found)}"
    try:
        Version(project["version"])
    except InvalidVersion:
        yield file, _line(file, "project.version"), f"project.version {project['version']!r} is no version"
    if not project.get("description", "").endswith("."):
        yield file, _line(file, "project.description"), "project.description must be a sentence, with its full stop"
    classifiers = project.get("classifiers", [])
    if (member.name == TESTING) != (PRIVATE in classifiers):
        must = "must" if member.name == TESTING else "must not"
        yield file, 0, f"project.classifiers {must} hold {PRIVATE!r}, which keeps it from being uploaded"
    groups = member.pyproject.get("dependency-groups", {})
    tests = {workspace.requirement_name(item) for item in member.groups.get("test", ())}
    if "test" not in groups or (member.name != TESTING and TESTING not in tests):
        yield file, 0, f"dependency-groups.test must be there, and name {TESTING}"


def _line(file: Path, key: str) -> int:
    """Line of a dotted key, or of the heading of a table, in a TOML file written the usual way; or 0."""
    table, _, name = key.rpartition(".")
    current = ""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if heading := re.match(r"\[([^\[\]]+)\]", line):
            current = heading[1]
            if current == key:
                return number
        elif current == table and re.match(rf"{re.escape(name)}\s*=", line):
            return number
    return 0


def _requirements(member: workspace.Member) -> Iterator[Finding]:
    file = member.path / "pyproject.toml"
    lines = file.read_text(encoding="utf-8").splitlines()
    tables = {"dependencies": member.dependencies, **member.extras, **member.groups}
    for table, requirements in tables.items():
        for text in dict.fromkeys(requirements):
            number = next((index for index, line in enumerate(lines, 1) if f'"{text}"' in line), 0)
            try:
                requirement = Requirement(text)
            except InvalidRequirement as error:
                yield file, number, f"{text!r} in {table} is no requirement: {str(error).splitlines()[0]}"
                continue
            yield from ((file, number, what) for what in _requirement(member, requirement, table, lines, number))


def _requirement(
    member: workspace.Member, requirement: Requirement, table: str, lines: list[str], number: int
) -> Iterator[str]:
    text = str(requirement)
    operators = {specifier.operator for specifier in requirement.specifier}
    published = table == "dependencies" or table in member.extras
    if requirement.url:
        yield f"{text!r} in {table} names an address; a published package can require only what the index has"
        return
    if workspace.normalise(requirement.name) == workspace.normalise(member.name):
        return  # an extra that includes another
    if requirement.name.startswith("separata-"):
        if requirement.name == TESTING and published:
            yield f"{text!r} in {table}: {TESTING} is never published; it belongs in a dependency group"
        if not published:
            return
        bounds = {specifier.operator: specifier.version for specifier in requirement.specifier}
        if operators != {">=", "<"} or not _one_minor_step(bounds[">="], bounds["<"]):
            yield f"{text!r} in {table} must be a range of one minor version, such as {requirement.name}>=0.3,<0.4"
        return
    if published and not operators & {">=", "==", "~=", ">"}:
        yield f"{text!r} in {table} has no lower bound, so that the lowest version cannot be tested"
    if operators - {">=", ">"} and not _has_reason(lines, number):
        yield f"{text!r} in {table} has a pin or an upper bound without a comment that gives the reason"


def _one_minor_step(low: str, high: str) -> bool:
    first, second = Version(low).release, Version(high).release
    (major, minor), (next_major, next_minor) = (part + (0,) * (2 - len(part)) for part in (first[:2], second[:2]))
    return (next_major, next_minor) == ((major, minor + 1) if major == 0 else (major + 1, 0))


def _has_reason(lines: list[str], number: int) -> bool:
    """Whether there is a comment behind the requirement on its line, or right above its line."""
    if number == 0:
        return False
    line = lines[number - 1]
    behind = line[line.rfind('"') + 1 :]
    return "#" in behind or (number > 1 and lines[number - 2].lstrip().startswith("#"))


def _package(member: workspace.Member) -> Iterator[Finding]:
    file = member.path / "pyproject.toml"
    script = {member.name: f"{member.module}.__main__:main"}
    if dict(member.scripts) != script:
        yield file, _line(file, "project.scripts"), f"project.scripts must be {json.dumps(script)} and no other"
    if not (member.source / "__main__.py").is_file():
        yield member.source / "__main__.py", 0, "is missing; it holds main() and says how to get the extra 'cli'"
    if "cli" not in member.extras:
        yield file, 0, "project.optional-dependencies needs 'cli', the extra for the command line"
    table = member.pyproject.get("tool", {}).get("separata")
    if not isinstance(table, dict):
        yield file, 0, "[tool.separata] is missing; it holds title, paper and engines"
    else:
        for key in SEPARATA_KEYS:
            if not table.get(key):
                yield file, _line(file, f"tool.separata.{key}"), f"tool.separata.{key} is missing or empty"
    names = {workspace.requirement_name(item) for item in member.dependencies}
    keywords = member.pyproject["project"].get("keywords", [])
    if "separata" not in keywords and not any(name.startswith("separata-") for name in names):
        without = "without it, or a dependency on separata-..., the tests leave annotations unchecked"
        yield file, 0, f"project.keywords must hold 'separata': {without}"
    if not list(member.benchmarks.glob("bench_*.py")):
        yield member.benchmarks, 0, "holds no bench_*.py"


def sources(root: Path, members: Sequence[workspace.Member] | None = None) -> Iterator[Path]:
    """Lists the Python files that are searched: of members, and without a choice also of tools and the root.

    Args:
        root: Folder of the workspace.
        members: The members to search; all, and the rest of the repository, without it.
    """
    folders = [member.path for member in members] if members is not None else [root]
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(root).parts
            if not any(part in SKIPPED_FOLDERS or part.startswith(".") for part in parts):
                yield path


def search(path: Path) -> Iterator[Finding]:
    """Searches a Python file for calls that can run foreign code, and for escapes without a reason.

    Args:
        path: The file.

    Yields:
        File, line and what is wrong.
    """
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, tokenize.TokenError) as error:
        yield path, getattr(error, "lineno", 0) or 0, f"is no Python: {error}"
        return
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    excused = {line for line, comment in comments.items() if re.search(r"# unsafe: \S+", comment)}
    for node in ast.walk(tree):
        for what in _unsafe(node):
            line: int = getattr(node, "lineno", 0)
            if not excused & set(range(line, (getattr(node, "end_lineno", line) or line) + 1)):
                yield path, line, what
    for line, comment in comments.items():
        yield from ((path, line, what) for what in _comment(comment))


def _comment(comment: str) -> Iterator[str]:
    if _UNFINISHED.search(comment):
        yield "an unfinished thing belongs in an issue, not in a comment"
    for match in _ESCAPE.finditer(comment):
        name, codes = match[1], match[2]
        if not name.startswith("pragma") and not codes:
            yield f"{name!r} must name what it lets pass"
        rest = _ESCAPE.sub("", comment[match.end() :])
        if len(re.findall(r"\w+", rest)) < 2:
            yield f"{match[0].lstrip('# ')!r} needs its reason on the same line"


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join([node.id, *parts]) if isinstance(node, ast.Name) else ""


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _unsafe(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        for name in names:
            if name.partition(".")[0] in _PICKLES and not (isinstance(node, ast.ImportFrom) and node.level):
                yield f"imports {name}; data goes to JSON and safetensors"
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs: list[tuple[ast.arg, ast.expr | None]] = [
            *zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        if any(argument.arg == "trust_remote_code" and _is(default, True) for argument, default in pairs):
            yield "trust_remote_code must not be True by default"
    elif isinstance(node, ast.Call):
        name = _dotted(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
            yield f"calls {name}()"
        if name in ("os.system", "os.popen") or _is(keywords.get("shell"), True):
            yield f"{name}() runs a shell; give a list of arguments"
        if name == "torch.load" and not _is(keywords.get("weights_only"), True):
            yield "torch.load() needs weights_only=True"
        if name in ("joblib.load", "pandas.read_pickle", "pd.read_pickle"):
            yield f"{name}() reads a pickle"
        if _is(keywords.get("allow_pickle"), True):
            yield f"{name}() with allow_pickle=True reads pickles"
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            yield f"{name}() builds any object; use yaml.safe_load"
        if name == "tempfile.mktemp":
            yield "tempfile.mktemp() leaves a moment in which another can take the name; use mkstemp or mkdtemp"
        if _is(keywords.get("trust_remote_code"), True):
            yield f"{name}() with trust_remote_code=True runs code from a model's repository"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `--help`."""
    parser = argparse.ArgumentParser(
        description="Hold every distribution to the same few files; exit code 1 if one differs.",
        epilog="example: python tools/layout_check.py zerotuning",
    )
    parser.add_argument("members", nargs="*", metavar="PACKAGE", help="distribution or module names; all by default")
    parser.add_argument("--root", type=Path, default=workspace.ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        house = workspace.Workspace.load(options.root)
        chosen = [house.member(name) for name in options.members] if options.members else list(house.members)
    except workspace.WorkspaceError as error:
        return workspace.fail(str(error), 2)
    findings = [finding for member in chosen for finding in check(member, house.root)]
    searched = sources(house.root, chosen if options.members else None)
    findings += [finding for path in searched for finding in search(path)]
    for path, line, what in findings:
        where = path.relative_to(house.root)
        print(f"{where}:{line}: {what}" if line else f"{where}: {what}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
