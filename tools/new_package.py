"""Make a new package: a room that passes every check before the first line of the method is written.

It gets the files that every package has, a command line with one verb that tells which paper the package implements,
a benchmark of its import time, and tests. Nothing is left behind if it fails.
"""

import argparse
import importlib.util
import json
import keyword
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from string import Template

import workspace

TEMPLATES = Path(__file__).resolve().parent / "templates" / "package"
ENGINES = ("transformers",)
LONGEST_NAME = 30

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_ARXIV = re.compile(r"\d{4}\.\d{4,5}(v\d+)?")
_RESERVED = {"benchmarks", "conftest", "noxfile", "packages", "separata", "shared", "src", "test", "tests", "tools"}


class NewPackageError(Exception):
    """The package cannot be made; the message is one line for the person who asked."""


def check_name(name: str, house: workspace.Workspace) -> str:
    """Checks the name of a new package.

    Args:
        name: Distribution name.
        house: The workspace, whose members' names are taken.

    Returns:
        The name of its module.

    Raises:
        NewPackageError: The name is malformed, taken, too close to a taken one, or that of another library.
    """
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise NewPackageError(
            f"name {name!r} must be lower-case words of letters and digits, joined by single hyphens, "
            f"of at most {LONGEST_NAME} characters"
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise NewPackageError(f"name {name!r}: the module {module!r} would hide one of Python's own")
    if module in _RESERVED or module.startswith("separata_"):
        raise NewPackageError(f"name {name!r} is reserved for the workspace itself")
    for member in house.members:
        if _bare(member.name) == _bare(name):
            folder = member.path.relative_to(house.root)
            raise NewPackageError(f"name {name!r} is taken: {member.name!r} is in {folder}")
    if name in _pinned(house.root) or importlib.util.find_spec(module) is not None:
        raise NewPackageError(f"name {name!r} is that of a library that is installed here; both could not be imported")
    return module


def _bare(name: str) -> str:
    return workspace.normalise(name).replace("-", "")


def _pinned(root: Path) -> set[str]:
    """Names of the third-party distributions that the workspace pins."""
    file = root / "tools" / "requirements.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return {workspace.requirement_name(line) for line in lines if re.match(r"[A-Za-z0-9]", line)}


def paper_link(paper: str) -> str:
    """Brings an arXiv number or an address into the form that the catalogue reads.

    Raises:
        NewPackageError: It is neither.
    """
    number = paper.removeprefix("arXiv:")
    if _ARXIV.fullmatch(number):
        return f"arXiv:{number}"
    if re.fullmatch(r"https://[^\s\"'<>]{4,90}", paper):
        return paper
    raise NewPackageError(f"--paper {paper!r} must be an arXiv number such as 2505.11739, or an https address")


def _one_line(option: str, text: str, longest: int = 300) -> str:
    text = text.strip()
    if not text or not text.isprintable() or len(text) > longest:
        raise NewPackageError(f"{option} {text!r} must be one line of text, of at most {longest} characters")
    return text


def _literal(text: str) -> str:
    """A Python string literal of printable text, with the quotes that the formatter prefers."""
    quote = "'" if text.count('"') > text.count("'") else '"'
    return quote + text.replace("\\", "\\\\").replace(quote, "\\" + quote) + quote


def _wrapped(text: str) -> str:
    """The same for a keyword argument; a long one in several lines."""
    pieces = textwrap.wrap(text, 90, drop_whitespace=False)
    if len(pieces) == 1:
        return _literal(text)
    return "\n".join(["(", *(f"        {_literal(piece)}" for piece in pieces), "    )"])


def kit_range(house: workspace.Workspace) -> str:
    """Returns the requirement on today's kit: from its minor version up to the next one."""
    major, minor = (int(part) for part in house.member("separata-kit").version.split(".")[:2])
    above = f"{major}.{minor + 1}" if major == 0 else f"{major + 1}.0"
    return f"separata-kit>={major}.{minor},<{above}"


def make(
    name: str, title: str, paper: str, summary: str | None, engines: Sequence[str], house: workspace.Workspace
) -> Path:
    """Makes the package.

    Args:
        name: Distribution name.
        title: Title of the paper.
        paper: arXiv number or https address.
        summary: One sentence on what the package does; one that names the paper without it.
        engines: What the method will run on, such as `transformers`.
        house: The workspace.

    Returns:
        The new folder.

    Raises:
        NewPackageError: An argument is not right, or the folder exists.
    """
    module = check_name(name, house)
    target = house.root / "packages" / name
    if target.exists():
        raise NewPackageError(f"{target.relative_to(house.root)} exists already; remove it or choose another name")
    link = paper_link(paper)
    title = _one_line("--title", title)
    sentence = _one_line("--summary", summary or f"The method of {link}", 100).removesuffix(".") + "."
    url = f"https://arxiv.org/abs/{link.removeprefix('arXiv:')}" if link.startswith("arXiv:") else link
    values = {
        "name": name,
        "module": module,
        "title": title,
        "summary": sentence,
        "link": link,
        "url": url,
        # JSON's escapes are also those of TOML.
        "title_wrapped": _wrapped(title),
        "title_quoted": json.dumps(title, ensure_ascii=False),
        "summary_quoted": json.dumps(sentence, ensure_ascii=False),
        "summary_docstring": sentence.replace("\\", "\\\\").replace('"', "'"),
        "link_quoted": json.dumps(link),
        "url_literal": _literal(url),
        "title_markdown": re.sub(r"([\\\[\]<>*_`])", r"\\\1", title),
        "engines_quoted": json.dumps([_one_line("--engine", engine) for engine in engines], ensure_ascii=False),
        "kit": kit_range(house),
    }
    target.parent.mkdir(exist_ok=True)
    # In the same folder, so that the last step is a rename; one level deeper, where the workspace does not look.
    with tempfile.TemporaryDirectory(prefix=f".new-{name}-", dir=target.parent) as temporary:
        draft = Path(temporary) / name
        for source in sorted(TEMPLATES.rglob("*.in")):
            relative = str(source.relative_to(TEMPLATES)).removesuffix(".in").replace("MODULE", module)
            file = draft / relative
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(source.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
        (draft / "src" / module / "py.typed").touch()
        shutil.copyfile(house.root / "LICENSE", draft / "LICENSE")
        draft.rename(target)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `--help`."""
    parser = argparse.ArgumentParser(
        description="Make a new package in packages/.",
        epilog='example: python tools/new_package.py zerotuning --title "ZeroTuning: ..." --paper 2505.11739',
    )
    parser.add_argument("name", help="name of the distribution: lower-case words joined by hyphens")
    parser.add_argument("--title", required=True, help="title of the paper")
    parser.add_argument("--paper", required=True, help="arXiv number, or https address")
    parser.add_argument("--summary", help="what it does for its user, in one short sentence")
    parser.add_argument("--engine", action="append", help="what it runs on; may be repeated (transformers)")
    parser.add_argument("--root", type=Path, default=workspace.ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        house = workspace.Workspace.load(options.root)
        engines = options.engine or ENGINES
        folder = make(options.name, options.title, options.paper, options.summary, engines, house)
    except (NewPackageError, workspace.WorkspaceError) as error:
        return workspace.fail(str(error), 2)
    except OSError as error:
        return workspace.fail(str(error), 1)
    print(
        f"{folder.relative_to(house.root)} is ready. Next:\n"
        f"  python tools/lock.py --write       # the workspace has a new member\n"
        f"  python tools/catalogue.py          # and its README's table a new line\n"
        f"  uv sync --all-packages --all-extras --all-groups\n"
        f"  uv run pytest {folder.relative_to(house.root)}/tests\n"
        f"Then write the method in src/{options.name.replace('-', '_')}, named in the paper's own terms."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
