"""Write the README's table of packages from what the packages say about themselves.

Each package's pyproject.toml holds a table::

    [tool.separata]
    title = "Title of the paper"
    paper = "https://..."                          # or "arXiv:2501.00001"
    summary = "What it does for you, in one line"  # the project's description if left out
    engines = ["transformers", "vLLM"]             # what it runs on
    headline = { text = "{gain:+.1%} accuracy on ...", source = "benchmarks/results/demo.json" }

The headline is what was measured. A field in braces is looked up in the JSON file by its dotted path and formatted, so
that the figure is the measured one; a decimal or percentage that is written out must occur in the file, as it is or
times 100, rounded alike. Without a headline the table says that nothing is measured yet.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import workspace

BEGIN = "<!-- catalogue:begin -->"
END = "<!-- catalogue:end -->"
KEYS = frozenset({"title", "paper", "summary", "engines", "headline"})
# Read by other tools from the same table.
OTHER_KEYS = frozenset({"wheel-budget-kb", "wheel-budget-reason"})
COLUMNS = ("Package", "What it does", "Runs on", "Measured", "Paper", "Version")

# A decimal, or a whole number of percent or times; other whole numbers are often no figures (SST-2, 2 cores).
_LITERAL = re.compile(r"(?<![\w.])(?:\d+\.\d+|\d+(?=\s?[%\u00d7]))")


class CatalogueError(Exception):
    """A table that cannot be made; the message is one line that names the file, the key and what would be right."""


class _Figures(Formatter):
    """Formats fields that are dotted paths into parsed JSON, and nothing else."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        value: Any = kwargs["figures"]
        for part in field_name.split("."):
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise CatalogueError(f"has no {field_name!r}")
        if isinstance(value, (dict, list)):
            raise CatalogueError(f"has no figure at {field_name!r} but a {type(value).__name__}")
        return value, field_name


def settings(member: workspace.Member) -> Mapping[str, Any]:
    """Read and check what a package says about itself.

    Args:
        member: The package.

    Returns:
        Its `[tool.separata]` table, with `summary` filled in.

    Raises:
        CatalogueError: A key is missing, unknown or of the wrong type.
    """
    where = f"{member.path.parent.name}/{member.path.name}/pyproject.toml: tool.separata"
    table = member.pyproject.get("tool", {}).get("separata")
    if not isinstance(table, dict):
        raise CatalogueError(f"{where} is missing; it holds title, paper, engines and, once measured, headline")
    for key in sorted(table.keys() - KEYS - OTHER_KEYS):
        raise CatalogueError(f"{where}.{key} is unknown; known are {', '.join(sorted(KEYS | OTHER_KEYS))}")
    filled = {"summary": member.description, **table}
    for key in ("title", "paper", "summary"):
        if not isinstance(filled.get(key), str) or not filled[key].strip():
            raise CatalogueError(f"{where}.{key} must be a text, it is {filled.get(key)!r}")
    engines = filled.get("engines")
    if not isinstance(engines, list) or not engines or not all(isinstance(item, str) for item in engines):
        raise CatalogueError(f'{where}.engines must be a list such as ["transformers"], it is {engines!r}')
    headline = filled.get("headline")
    if headline is not None and not (
        isinstance(headline, dict)
        and headline.keys() == {"text", "source"}
        and all(isinstance(value, str) for value in headline.values())
    ):
        raise CatalogueError(f"{where}.headline must be {{ text = ..., source = ... }}, it is {headline!r}")
    return filled


def headline(member: workspace.Member, table: Mapping[str, Any]) -> str:
    """Make the sentence about what was measured, out of the file that holds it.

    Args:
        member: The package.
        table: What `settings` returned.

    Returns:
        The text with its figures, a link to their source; or that nothing is measured.

    Raises:
        CatalogueError: The source is missing or no JSON, or does not hold a figure of the text.
    """
    if table.get("headline") is None:
        return "not measured yet"
    text, source = table["headline"]["text"], table["headline"]["source"]
    file = (member.path / source).resolve()
    name = f"{member.path.parent.name}/{member.path.name}/{source}"
    if not file.is_relative_to(member.path):
        raise CatalogueError(f"{name}: headline.source must lie in the package")
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogueError(f"{name}: the source of the headline cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CatalogueError(f"{name}: the source of the headline is no JSON: {error}") from error
    try:
        parts = list(Formatter().parse(text))
        shown = _Figures().vformat(text, (), {"figures": figures})
    except CatalogueError as error:
        raise CatalogueError(f"{name} {error}, which the headline {text!r} shows") from error
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise CatalogueError(f"{name}: headline {text!r} cannot be formatted: {error}") from error
    written = [number for literal, *_ in parts for number in _LITERAL.findall(literal)]
    if not written and all(field is None for _, field, _, _ in parts):
        raise CatalogueError(f"{name}: headline {text!r} names no figure")
    for figure in written:
        if not _holds(figures, figure):
            raise CatalogueError(f"{name} holds no {figure}, which the headline {text!r} shows")
    return f"[{shown}]({name})"


def _holds(figures: Any, written: str) -> bool:
    digits = len(written.partition(".")[2])
    return any(
        math.isclose(round(abs(number) * scale, digits), float(written), rel_tol=1e-12, abs_tol=1e-12)
        for number in _numbers(figures)
        for scale in (1, 100)
    )


def _numbers(node: Any) -> Iterator[float]:
    if isinstance(node, (dict, list)):
        for item in node.values() if isinstance(node, dict) else node:
            yield from _numbers(item)
    elif isinstance(node, (int, float)) and not isinstance(node, bool) and math.isfinite(node):
        yield node


def _paper(title: str, paper: str) -> str:
    link = re.sub(r"(?i)^arxiv:\s*", "https://arxiv.org/abs/", paper)
    if link.startswith(("https://", "http://")):
        return f"[{title}]({link})"
    return f"{title} ({paper})"


def render(house: workspace.Workspace) -> str:
    """Make the table.

    Args:
        house: The workspace.

    Returns:
        Markdown, one row per package in the order of their names.

    Raises:
        CatalogueError: A package does not say what it must.
    """
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for member in sorted(house.packages, key=lambda member: member.name):
        table = settings(member)
        cells = (
            f"[{member.name}](packages/{member.path.name}/README.md)",
            table["summary"],
            ", ".join(table["engines"]),
            headline(member, table),
            _paper(table["title"], table["paper"]),
            member.version,
        )
        rows.append(tuple(" ".join(cell.split()).replace("|", "\\|") for cell in cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def insert(readme: str, table: str) -> str:
    """Put the table between the two marks of a README.

    Args:
        readme: The README's text.
        table: The table, with a line break at its end.

    Returns:
        The text with the table in place of whatever was between the marks.

    Raises:
        CatalogueError: The marks do not occur once each, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after or END in before:
        raise CatalogueError(f"README.md must hold the line {BEGIN} and, after it, the line {END}, once each")
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `--help`."""
    parser = argparse.ArgumentParser(
        description="Write the table of packages into README.md.", epilog="example: python tools/catalogue.py --check"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the table is stale")
    parser.add_argument("--root", type=Path, default=workspace.ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    file = options.root / "README.md"
    try:
        readme = file.read_text(encoding="utf-8")
        fresh = insert(readme, render(workspace.Workspace.load(options.root)))
    except (CatalogueError, workspace.WorkspaceError) as error:
        return workspace.fail(str(error), 1)
    except OSError as error:
        return workspace.fail(f"README.md cannot be read: {error.strerror}", 1)
    if fresh == readme:
        print("README.md is up to date")
    elif options.check:
        return workspace.fail("the table in README.md is stale; run `python tools/catalogue.py`", 1)
    else:
        temporary = file.with_name("README.md.tmp")
        temporary.write_text(fresh, encoding="utf-8")
        temporary.replace(file)
        print("README.md is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
