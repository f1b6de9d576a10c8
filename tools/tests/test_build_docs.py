import sys
from pathlib import Path

import build_docs
import pytest
import workspace

ROOT = """# house

[alpha](packages/alpha/README.md#reference), [its folder](packages/alpha/), [terms](LICENSE), [how](HOW.md),
[elsewhere](https://host.example/x), [here](#house)
"""
ALPHA = """# alpha

[measured](benchmarks/results/demo.json) and [home](../../README.md)

```python
table["[x](nowhere)"]
```
"""
INIT = '''"""What alpha does."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alpha.middle import apply
    from alpha.run import run

__all__ = ["VALUE", "apply", "run"]

VALUE = 3
"""A number."""


def __getattr__(name: str) -> object:
    raise AttributeError(name)
'''
MIDDLE = '''"""The middle."""

import a_library_that_nobody_has


def apply(x: int) -> int:
    """Apply the method.

    Args:
        x: How much.

    Returns:
        More than that.
    """
    return a_library_that_nobody_has.more(x)


def untold(x: int) -> int:
    """Nobody is told of this."""
    return x
'''
RUN = '"""Running."""\n\n\ndef run() -> None:\n    """Run it all."""\n'


@pytest.fixture
def house(tmp_path):
    files = {
        "pyproject.toml": '[tool.uv.workspace]\nmembers = ["packages/*"]\n',
        "README.md": ROOT,
        "HOW.md": "# How\n\n[back](README.md)\n",
        "LICENSE": "Do as you like.\n",
        "packages/alpha/pyproject.toml": '[project]\nname = "alpha"\nversion = "0.1.0"\n',
        "packages/alpha/README.md": ALPHA,
        "packages/alpha/benchmarks/results/demo.json": "{}",
        "packages/alpha/src/alpha/__init__.py": INIT,
        "packages/alpha/src/alpha/middle.py": MIDDLE,
        "packages/alpha/src/alpha/run.py": RUN,
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.fixture
def change(house):
    def edit(path, old, new):
        text = (house / path).read_text()
        assert old in text
        (house / path).write_text(text.replace(old, new))

    return edit


@pytest.fixture
def run(house, capsys):
    """Builds the site and returns the exit code, what was found and what was said about it."""
    if not (Path(sys.executable).parent / "zensical").is_file():
        pytest.skip("zensical is not installed; it comes with the dependency group `docs`")

    def build():
        code = build_docs.main(["--root", str(house)])
        output = capsys.readouterr()
        return code, output.out.splitlines(), output.err

    return build


def test_site_has_readmes_public_names_and_linked_files(house, run):
    code, out, _ = run()
    assert (code, out) == (0, [f"{house}/site holds 2 pages"])
    page = (house / "site/packages/alpha/index.html").read_text()
    for shown in ("What alpha does.", "alpha.VALUE", "alpha.apply", "How much.", "More than that.", "Run it all."):
        assert shown in page
    for hidden in ("untold", "__getattr__"):
        assert hidden not in page
    for copied in ("LICENSE", "HOW/index.html", "packages/alpha/benchmarks/results/demo.json"):
        assert (house / "site" / copied).is_file()
    assert 'href="packages/alpha/#reference"' in (house / "site/index.html").read_text()


def test_page_loads_nothing_from_elsewhere(house, run):
    run()
    for page in (house / "site").rglob("*.html"):
        assert 'src="http' not in page.read_text()
        assert 'rel="stylesheet" href="http' not in page.read_text()


@pytest.mark.parametrize(
    ("path", "old", "new", "finding"),
    [
        ("README.md", "HOW.md", "NOWHERE.md", "README.md:3: the link 'NOWHERE.md' leads to no file"),
        ("HOW.md", "(README.md)", "(README.md#nothing)", "HOW.md:3:18: anchor does not exist"),
        ("packages/alpha/README.md", "results/demo.json", "results", "README.md:3: the link 'benchmarks/results'"),
        ("packages/alpha/README.md", "../../README.md", "../../../x", "leads to no file of the repository"),
        ("packages/alpha/src/alpha/middle.py", "x: How", "y: How", "Parameter 'y' does not appear in the function"),
        ("packages/alpha/src/alpha/__init__.py", '"""A number."""', "", "the public name 'VALUE' is not on its page"),
        ("packages/alpha/src/alpha/__init__.py", '"apply",', '"apply", "absent",', "'absent'"),
    ],
)
def test_warnings_fail_the_build_and_leave_the_old_site(house, run, change, path, old, new, finding):
    site = house / "site"
    site.mkdir()
    (site / "old").write_text("")
    change(path, old, new)
    code, out, error = run()
    assert code == 1
    assert any(finding in line for line in out), out
    assert "so no site" in error
    assert [entry.name for entry in site.iterdir()] == ["old"]


def test_missing_readme_is_one_line(house, capsys):
    (house / "packages/alpha/README.md").unlink()
    assert build_docs.main(["--root", str(house)]) == 1
    assert capsys.readouterr().err == "error: packages/alpha/README.md is missing\n"


def test_missing_generator_says_where_it_comes_from(house, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    assert build_docs.main(["--root", str(house)]) == 1
    assert "dependency group `docs`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("[a](b.md) ![c](d.png 'title') [e](<f g.md>)", ["b.md", "d.png", "f"]),
        ('[a]: b.md "title"\n[c]: <d.md>', ["b.md", "d.md"]),
        ('<img src="a.png"> <a href="b.md#c">', ["a.png", "b.md#c"]),
        ("[a](https://x) [b](mailto:c@d) [e](#f) [g](//h)", []),
        ("`[a](b.md)` ``[c](`d`.md)`` [e](f.md)", ["f.md"]),
        ("```\n[a](b.md)\n```\n[c](d.md)\n~~~~ text\n[e](f.md)\n~~~~", ["d.md"]),
        ("```\n[a](b.md)", []),
    ],
)
def test_local_links(text, links):
    found = build_docs.local_links(text)
    assert [link for *_, link in found] == links
    assert [text[start:end] for start, end, _ in found] == links


OUTPUT = (
    "griffe: src/a.py:6: Parameter 'y' does not appear\n\x1b[33mWarning:\x1b[0m page does not exist\n"
    "   \x1b[38m[\x1b[0m index.md:3:10 \x1b[0m]\nRuntimeError: Aborted\n"
)


def test_output_of_the_generator_becomes_one_line_each():
    assert build_docs.complaints(OUTPUT, 1) == [
        "src/a.py:6: Parameter 'y' does not appear",
        "index.md:3:10: page does not exist",
    ]
    assert build_docs.complaints("Build started\nKilled\n", -9) == ["zensical ended with -9: Killed"]
    assert build_docs.complaints("Build started\n", 0) == []


def test_public_names_are_read_without_importing(tmp_path):
    (tmp_path / "__init__.py").write_text("import nowhere\n__all__: list[str] = ['b', 'a']\n")
    assert build_docs.public_names(tmp_path) == ["a", "b"]
    (tmp_path / "__init__.py").write_text("x = y = 1\n")
    assert build_docs.public_names(tmp_path) == []


def test_name_that_a_module_hides_is_found_behind_it(house):
    (member,) = workspace.Workspace.load(house).members
    assert build_docs.hidden_names(member) == {"run": "alpha.run.run"}
