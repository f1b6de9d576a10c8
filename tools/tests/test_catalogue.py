import json

import catalogue
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

README = f"# house\n\n{catalogue.BEGIN}\nold\n{catalogue.END}\n\nrest\n"
TABLE = """
[tool.separata]
title = "A Method"
paper = "arXiv:2501.00001"
summary = "Does one | thing."
engines = ["transformers", "vLLM"]
headline = {{ text = "{text}", source = "benchmarks/results/demo.json" }}
"""
FIGURES = {"vanilla": {"accuracy": 0.6123}, "gain": 0.0717, "runs": [1, 3.456], "name": "demo", "odd": float("nan")}


@pytest.fixture
def house(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.uv.workspace]\nmembers = ["packages/*"]\n')
    (tmp_path / "README.md").write_text(README)
    return tmp_path


@pytest.fixture
def add(house):
    def write(table, name="alpha", figures=FIGURES):
        folder = house / "packages" / name
        (folder / "benchmarks/results").mkdir(parents=True, exist_ok=True)
        project = f'[project]\nname = "{name}"\nversion = "0.2.0"\ndescription = "The description."\n'
        (folder / "pyproject.toml").write_text(project + table)
        if figures is not None:
            (folder / "benchmarks/results/demo.json").write_text(json.dumps(figures))

    return write


def run(house, *arguments):
    return catalogue.main(["--root", str(house), *arguments])


def row(house, name="alpha"):
    (line,) = [line for line in (house / "README.md").read_text().splitlines() if line.startswith(f"| [{name}]")]
    return line


def test_row_says_what_the_package_says(house, add):
    add(TABLE.format(text="{gain:+.1%} accuracy"))
    assert run(house) == 0
    assert row(house) == (
        "| [alpha](packages/alpha/README.md) | Does one \\| thing. | transformers, vLLM"
        " | [+7.2% accuracy](packages/alpha/benchmarks/results/demo.json)"
        " | [A Method](https://arxiv.org/abs/2501.00001) | 0.2.0 |"
    )
    text = (house / "README.md").read_text()
    assert text.startswith("# house\n")
    assert text.endswith("\nrest\n")
    assert "old" not in text


def test_check_notices_what_changed_and_writes_nothing(house, add, capsys):
    add(TABLE.format(text="{gain:+.1%} accuracy"))
    assert run(house, "--check") == 1
    assert (house / "README.md").read_text() == README
    assert "run `python tools/catalogue.py`" in capsys.readouterr().err
    run(house)
    assert run(house, "--check") == 0
    add(TABLE.format(text="{gain:+.1%} accuracy"), figures={"gain": 0.08})
    assert run(house, "--check") == 1


def test_packages_are_sorted_and_the_unmeasured_say_so(house, add):
    bare = '[tool.separata]\ntitle = "B"\npaper = "proceedings, p. 7"\nengines = ["any"]\n'
    add(bare, name="beta")
    add(TABLE.format(text="{gain}"))
    run(house)
    lines = [line for line in (house / "README.md").read_text().splitlines() if line.startswith("| [")]
    assert [line.split("]")[0] for line in lines] == ["| [alpha", "| [beta"]
    assert (
        row(house, "beta").split(" | ", 1)[1]
        == "The description. | any | not measured yet | B (proceedings, p. 7) | 0.2.0 |"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{vanilla.accuracy:.1%} before", "61.2% before"),
        ("61.2 % before, 3.46 after", "61.2 % before, 3.46 after"),
        ("{runs.1:.2f} times on 2 cores", "3.46 times on 2 cores"),
        ("61% on SST-2", "61% on SST-2"),
        ("in {{braces}} {gain:.2f}", "in {braces} 0.07"),
    ],
)
def test_figures_that_the_source_holds(house, add, text, shown):
    add(TABLE.format(text=text))
    assert run(house) == 0
    assert f"[{shown}](" in row(house)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("62.2 % before", "holds no 62.2"),
        ("61.3 % before", "holds no 61.3"),
        ("{gain:.1%} of 7.5", "holds no 7.5"),
        ("twice as good", "names no figure"),
        ("{vanilla.f1:.1%}", "has no 'vanilla.f1'"),
        ("{vanilla}", "has no figure at 'vanilla' but a dict"),
        ("{runs.7}", "has no 'runs.7'"),
        ("{gain.__class__}", "has no 'gain.__class__'"),
        ("{name:.1%}", "cannot be formatted"),
        ("{gain", "cannot be formatted"),
    ],
)
def test_figures_that_it_does_not_hold(house, add, capsys, text, finding):
    add(TABLE.format(text=text))
    assert run(house) == 1
    error = capsys.readouterr().err
    assert finding in error
    assert error.startswith("error: packages/alpha/benchmarks/results/demo.json")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("[tool.separata]", "[tool.other]", "tool.separata is missing"),
        ('title = "A Method"', "", "title must be a text, it is None"),
        ('paper = "arXiv:2501.00001"', 'paper = ""', "paper must be a text, it is ''"),
        ('engines = ["transformers", "vLLM"]', 'engines = "vLLM"', "engines must be a list"),
        ("summary", "sumary", "sumary is unknown"),
        (', source = "benchmarks/results/demo.json"', "", "headline must be"),
        ("results/demo.json", "results/none.json", "cannot be read: No such file"),
        ("benchmarks/results/demo.json", "../../README.md", "must lie in the package"),
        ("benchmarks/results/demo.json", "pyproject.toml", "is no JSON"),
    ],
)
def test_wrong_metadata_names_the_file_and_the_key(house, add, capsys, old, new, finding):
    add(TABLE.format(text="{gain}").replace(old, new))
    assert run(house, "--check") == 1
    error = capsys.readouterr().err
    assert finding in error
    assert "packages/alpha/" in error


def test_settings_of_other_tools_are_left_alone(house, add):
    add(TABLE.format(text="{gain}") + 'wheel-budget-kb = 2000\nwheel-budget-reason = "words"\n')
    assert run(house) == 0


@pytest.mark.parametrize("readme", ["", catalogue.BEGIN, f"{catalogue.END}{catalogue.BEGIN}", README + README])
def test_marks_must_be_there_once(house, add, capsys, readme):
    add(TABLE.format(text="{gain}"))
    (house / "README.md").write_text(readme)
    assert run(house) == 1
    assert "once each" in capsys.readouterr().err
    assert (house / "README.md").read_text() == readme


def test_missing_readme_is_one_line(house, add, capsys):
    add(TABLE.format(text="{gain}"))
    (house / "README.md").unlink()
    assert run(house) == 1
    assert "README.md cannot be read" in capsys.readouterr().err


@given(before=st.text(), after=st.text(), table=st.text())
def test_inserting_twice_is_inserting_once(before, after, table):
    assume(not any("<!--" in text for text in (before, after, table)))
    readme = f"{before}{catalogue.BEGIN}{catalogue.END}{after}"
    once = catalogue.insert(readme, table)
    assert catalogue.insert(once, table) == once
    assert once.startswith(before)
    assert once.endswith(after)
