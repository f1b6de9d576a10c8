"""Build the documentation site, one page per distribution, from the READMEs and the docstrings.

The pages keep the paths that their files have in the repository, so that a link that works in a README works in the
site; what a README links to is copied along. Below each distribution's README comes a reference of the names in its
`__all__`, read from the sources without importing them. Any warning fails the build: a link to nowhere, a docstring
that describes an argument which is not there, a public name without a docstring.

The site is made with Zensical, the maintained successor of Material for MkDocs, whose own life ends in May 2027.
"""

import argparse
import ast
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import workspace

# Inline links and images, reference definitions, and HTML attributes; the target is the one group that matched.
_LINK = re.compile(r'\]\(\s*<?([^)\s>]+)>?[^)]*\)|^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)|(?:href|src)="([^"]+)"', re.M)
_CODE = re.compile(r"^( {0,3})(```+|~~~+)[^\n]*\n.*?(?:^ {0,3}\2[`~]*\s*?$|\Z)|(`+)(?!`).+?(?<!`)\3(?!`)", re.M | re.S)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
TIMEOUT_S = 600


class DocsError(Exception):
    """A site that cannot be built for a reason of the tools; the message is one line."""


def local_links(text: str) -> list[tuple[int, int, str]]:
    """Find the links of a Markdown text that lead to files, passing over code.

    Args:
        text: The Markdown.

    Returns:
        Start, end and target of each, in order. Links with a scheme and links within the page are left out.
    """
    blanked = _CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    found = []
    for match in _LINK.finditer(blanked):
        group = next(number for number in (1, 2, 3) if match[number])
        if not re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:|#|//", match[group]):
            found.append((match.start(group), match.end(group), match[group]))
    return found


class Pages:
    """Collects the pages of the site and the files that they link to.

    Attributes:
        root: The repository.
        folder: Where the pages go; they lie there as in the repository.
        findings: Links that lead nowhere, as `file:line: what`.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        """Starts with no page."""
        self.root = root.resolve()
        self.folder = folder
        self.findings: list[str] = []
        self._seen: set[Path] = set()

    def add(self, page: Path, appendix: str = "") -> None:
        """Copies a page, and whatever it links to, into the folder.

        Args:
            page: Path of the Markdown file, relative to the repository.
            appendix: Markdown that is written below the page's own.
        """
        if page in self._seen:
            return
        self._seen.add(page)
        text = (self.root / page).read_text(encoding="utf-8")
        pieces, end = [], 0
        for start, stop, link in local_links(text):
            pieces += [text[end:start], self._follow(page, text.count("\n", 0, start) + 1, link)]
            end = stop
        target = self.folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join([*pieces, text[end:]]) + appendix, encoding="utf-8")

    def _follow(self, page: Path, line: int, link: str) -> str:
        path, mark, fragment = link.partition("#")
        wanted = posixpath.normpath(posixpath.join(page.parent.as_posix(), urllib.parse.unquote(path)))
        target = self.root / wanted
        if target.is_dir() and (target / "README.md").is_file():
            target, path = target / "README.md", posixpath.join(path, "README.md")
        if not target.is_file() or not target.resolve().is_relative_to(self.root):
            self.findings.append(f"{page}:{line}: the link {link!r} leads to no file of the repository")
            return link
        copy = target.relative_to(self.root)
        if copy.suffix == ".md":
            self.add(copy)
        elif copy not in self._seen:
            self._seen.add(copy)
            (self.folder / copy).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, self.folder / copy)
        return path + mark + fragment


def public_names(source: Path) -> list[str]:
    """Read `__all__` of a package without importing it.

    Args:
        source: The package's folder.

    Returns:
        The names, sorted; none if there is no `__all__`.
    """
    for node in ast.parse((source / "__init__.py").read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if value is not None and any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return sorted(ast.literal_eval(value))
    return []


def hidden_names(member: workspace.Member) -> dict[str, str]:
    """Find public names that a module of the same name hides from whoever reads the sources.

    Args:
        member: The distribution.

    Returns:
        Name to the dotted path of what it stands for: `from pkg.run import run` gives `{"run": "pkg.run.run"}`.
    """
    modules = member.modules()
    hidden = {name for name in public_names(member.source) if f"{member.module}.{name}" in modules}
    imports = member.imports()[member.module] if hidden else []
    return {found.name: f"{found.module}.{found.name}" for found in imports if found.name in hidden}


def reference(member: workspace.Member) -> str:
    """Write the part of a page that the docstrings are put into."""
    parts = [f"\n\n## Reference\n\n::: {member.module}\n"]
    alone = json.dumps({"show_root_heading": True, "show_root_toc_entry": True})
    parts += [f"\n::: {path}\n    options: {alone}\n" for path in hidden_names(member).values()]
    return "".join(parts)


def configuration(house: workspace.Workspace, pages: Path, site: Path) -> dict[str, Any]:
    """Make the settings of the site generator.

    Args:
        house: The workspace.
        pages: Folder of the pages.
        site: Folder that the site is built into.

    Returns:
        What goes into `mkdocs.yml`, whose form Zensical reads.
    """

    def entries(members: Iterable[workspace.Member]) -> list[dict[str, str]]:
        ordered = sorted(members, key=lambda member: member.name)
        return [{member.name: f"{member.path.relative_to(house.root).as_posix()}/README.md"} for member in ordered]

    base = pages.parent
    options = {
        "allow_inspection": False,  # sources are read; importing them would need every optional library
        "docstring_style": "google",
        "filters": ["!^_"],
        "heading_level": 3,
        "members_order": "source",
        "separate_signature": True,
        "show_root_heading": False,
        "show_root_toc_entry": False,
        "show_signature_annotations": True,
        "show_source": False,
    }
    handler = {"paths": [str(member.source.parent) for member in house.members], "options": options}
    navigation: list[dict[str, Any]] = [{"Home": "README.md"}]
    navigation += [{"Packages": entries(house.packages)}] if house.packages else []
    navigation += [{"Shared": entries(house.shared)}] if house.shared else []
    return {
        "site_name": "separata",
        "docs_dir": os.path.relpath(pages, base),
        "site_dir": os.path.relpath(site, base),
        "nav": navigation,
        # Fonts would be fetched from elsewhere by whoever reads the page.
        "theme": {"font": False},
        "markdown_extensions": [
            *("admonition", "attr_list", "footnotes", "md_in_html", "tables", {"toc": {"permalink": True}}),
            *("pymdownx.highlight", "pymdownx.superfences"),
        ],
        "plugins": ["search", {"mkdocstrings": {"handlers": {"python": handler}}}],
    }


def run_generator(config: Path) -> list[str]:
    """Build the site, strictly.

    Args:
        config: The settings file.

    Returns:
        What the generator complains of, one line per complaint.

    Raises:
        DocsError: The generator is not installed beside this Python, or hangs.
    """
    program = Path(sys.executable).parent / "zensical"
    if not program.is_file():
        raise DocsError("zensical is not installed; it comes with the dependency group `docs`")
    command = [str(program), "build", "--clean", "--strict", "--config-file", str(config)]
    try:
        done = subprocess.run(
            command, cwd=config.parent, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise DocsError(f"zensical was still building after {TIMEOUT_S} s") from error
    return complaints(done.stdout + done.stderr, done.returncode)


def complaints(output: str, code: int) -> list[str]:
    """Read what the generator printed.

    Args:
        output: Its standard output and error.
        code: Its exit code; it does not count complaints about docstrings.

    Returns:
        One line per complaint, with the place in front where it is known.
    """
    found = []
    lines = _ANSI.sub("", output).splitlines()
    for number, line in enumerate(lines):
        level, _, text = line.partition(":")
        if level.strip().lower() in {"warning", "error"} and text.strip():
            following = lines[number + 1].strip() if number + 1 < len(lines) else ""
            place = re.search(r"\[ (\S+) \]", following)
            found.append(f"{place[1]}: {text.strip()}" if place else text.strip())
        elif re.match(r"(griffe|mkdocstrings|mkdocs_autorefs|autorefs)\b.*:", line):
            found.append(text.strip())
    if code and not found:
        found.append(f"zensical ended with {code}: {next((line for line in reversed(lines) if line.strip()), '')}")
    return found


def missing_names(house: workspace.Workspace, site: Path) -> list[str]:
    """Name the public names that have no entry on their page."""
    found = []
    for member in house.members:
        page = site / member.path.relative_to(house.root) / "index.html"
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        hidden = hidden_names(member)
        found += [
            f"{member.module}: the public name {name!r} is not on its page; it has no docstring or cannot be found"
            for name in public_names(member.source)
            if not name.startswith("_") and f'id="{hidden.get(name, f"{member.module}.{name}")}"' not in text
        ]
    return found


def build(house: workspace.Workspace, out: Path) -> list[str]:
    """Build the site.

    Args:
        house: The workspace.
        out: Where the site goes; replaced only if nothing is wrong.

    Returns:
        One line per finding; empty if the site is there.

    Raises:
        DocsError: A README is missing, or the generator does not run.
    """
    work = house.root / ".build" / "docs"
    shutil.rmtree(work, ignore_errors=True)
    pages = Pages(house.root, work / "pages")
    readmes = {member.path.relative_to(house.root) / "README.md": member for member in house.members}
    for page in (Path("README.md"), *readmes):
        if not (house.root / page).is_file():
            raise DocsError(f"{page} is missing")
    # Before the root's README, whose links would bring them along without their references.
    for page, member in readmes.items():
        pages.add(page, reference(member))
    pages.add(Path("README.md"))
    config = work / "mkdocs.yml"
    # YAML holds JSON, which needs no library to be written.
    settings = configuration(house, pages.folder, work / "site")
    config.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    findings = pages.findings + run_generator(config)
    if not findings:
        findings = missing_names(house, work / "site")
    if not findings:
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(work / "site", out)
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `--help`."""
    parser = argparse.ArgumentParser(
        description="Build the documentation site; exit code 1 on any warning. Needs no network.",
        epilog="example: python tools/build_docs.py && python -m http.server --directory site",
    )
    parser.add_argument("--out", type=Path, help="folder of the site (site/ in the repository)")
    parser.add_argument("--root", type=Path, default=workspace.ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        house = workspace.Workspace.load(options.root)
        out = options.out or house.root / "site"
        findings = build(house, out)
    except (DocsError, workspace.WorkspaceError) as error:
        return workspace.fail(str(error), 1)
    for finding in findings:
        print(finding)
    if findings:
        return workspace.fail(f"{len(findings)} findings, so no site", 1)
    print(f"{out} holds {len(house.members) + 1} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
