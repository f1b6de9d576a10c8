"""A fresh package has no finding; each thing that can be wrong gives its own, at its line."""

import shutil

import layout_check
import new_package
import pytest
import workspace

PYPROJECT = "pyproject.toml"
README = "README.md"


@pytest.fixture
def room(house, write_kit):
    """A fresh package in the little workspace, with the dependencies that tensors take."""
    write_kit(house)
    arguments = ["probe", "--title", "A Probe", "--paper", "2505.11739", "--root", str(house)]
    assert new_package.main(arguments) == 0
    file = house / "packages" / "probe" / PYPROJECT
    kit, core = '    "separata-kit>=0.3,<0.4",\n', '    "separata-core>=0.3,<0.4",\n    "torch>=2.10",\n'
    assert kit in file.read_text()
    file.write_text(file.read_text().replace(kit, core))
    return file.parent


def findings(room, capsys):
    capsys.readouterr()
    code = layout_check.main([room.name, "--root", str(room.parents[1])])
    lines = capsys.readouterr().out.splitlines()
    assert code == (1 if lines else 0)
    return lines


def line_of(path, words):
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if words in line)


def test_fresh_package_has_none(room, capsys):
    assert findings(room, capsys) == []


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "src/probe/py.typed",
        "src/probe/__init__.py",
        "src/probe/__main__.py",
    ],
)
def test_missing_file(room, capsys, name):
    (room / name).unlink()
    found = findings(room, capsys)
    assert len(found) == 1
    assert found[0].startswith(f"packages/probe/{name}: is missing")


@pytest.mark.parametrize(("folder", "what"), [("tests", "test_*.py"), ("benchmarks", "bench_*.py")])
def test_empty_folder(room, capsys, folder, what):
    shutil.rmtree(room / folder)
    assert findings(room, capsys) == [f"packages/probe/{folder}: holds no {what}"]


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("LICENSE", "", "!", ": differs from the LICENSE"),
        (README, "# probe", "# Probe", ":1: must begin with the heading '# probe'"),
        (README, "## Limits\n\n", "", ": lacks the section '## Limits'"),
        (README, "## Install", "## Installing", ": lacks the section '## Install'"),
        (README, "The method is not there yet.\n", "", "@## Limits: '## Limits' is empty"),
        (README, "## Citation", "### Part\n\nText.\n\n## Citation", None),
        (README, "## Measured", "## How it works\n\nSo.\n\n## Measured", None),
        (README, "## Citation", "## Use\n\nAgain.\n\n## Citation", ": '## Use' comes after '## Limits'"),
        ("CHANGELOG.md", "# Changelog", "# Changes", ":1: must begin with the heading '# Changelog'"),
        ("CHANGELOG.md", "Unreleased", "0.2.0 (2026-01-01)", "first section must be '## Unreleased'"),
        ("CHANGELOG.md", "First release.\n", "\n## 0.1.0 (2026-01-01)\n\nFirst.\n", None),
        ("CHANGELOG.md", "First release.\n", "\n## 0.1.0\n\nFirst.\n", ":6: '## 0.1.0' must be a version and its date"),
        ("src/probe/__init__.py", '"""The method of arXiv:2505.11739."""\n', "", ":1: must begin with a docstring"),
        ("src/probe/__init__.py", "__all__", "\n" * 60 + "__all__", "must fit on one screen, which is 60"),
        ("src/probe/__init__.py", "__all__", "__all__ ((", ": is no Python:"),
        (
            PYPROJECT,
            '"hatchling.build"',
            '"setuptools.build_meta"',
            "@build-backend: build-system.build-backend",
        ),
        (PYPROJECT, '\nname = "probe"', '\nname = "sonde"', '@name =: project.name must be "probe", it is "sonde"'),
        (PYPROJECT, 'version = "0.1.0"', 'version = "one"', "@version =: project.version 'one' is no version"),
        (PYPROJECT, 'readme = "README.md"\n', "", 'project.readme must be "README.md", it is null'),
        (PYPROJECT, '"Apache-2.0"', '"MIT"', '@license =: project.license must be "Apache-2.0"'),
        (PYPROJECT, 'files = ["LICENSE"]', "files = []", "project.license-files must be"),
        (PYPROJECT, '">=3.11"', '">=3.12"', '@requires-python: project.requires-python must be ">=3.11"'),
        (PYPROJECT, '["src/probe"]', '["src/probe", "src/extra"]', "wheel.packages must be"),
        (PYPROJECT, '"src", "tests", ', '"src", ', "sdist.include must be"),
        (PYPROJECT, '11739."\nreadme', '11739"\nreadme', "@description =: project.description must be a sentence"),
        (PYPROJECT, "license-files", 'classifiers = ["Private :: Do Not Upload"]\nlicense-files', "must not hold"),
        (PYPROJECT, 'test = ["separata-testing"]', "test = []", "dependency-groups.test must be there, and name"),
        (PYPROJECT, 'test = ["separata-testing"]', "", "dependency-groups.test must be there, and name"),
        (PYPROJECT, "probe.__main__:main", "probe.cli:run", "@[project.scripts]: project.scripts must be"),
        (PYPROJECT, "\n[dependency-groups]", 'other = "probe.cli:run"\n[dependency-groups]', "and no other"),
        (PYPROJECT, 'cli = ["typer>=0.20"]', 'plot = ["matplotlib>=3"]', "needs 'cli'"),
        (PYPROJECT, "[tool.separata]", "[tool.separate]", "[tool.separata] is missing"),
        (PYPROJECT, 'title = "A Probe"\n', "", "tool.separata.title is missing or empty"),
        (PYPROJECT, 'paper = "arXiv:2505.11739"', 'paper = ""', "@paper =: tool.separata.paper is missing or empty"),
        (PYPROJECT, '["transformers"]', "[]", "@engines: tool.separata.engines is missing or empty"),
        (PYPROJECT, '    "separata-core>=0.3,<0.4",\n', "", "project.keywords must hold 'separata'"),
        (
            PYPROJECT,
            "separata-core>=0.3,<0.4",
            "separata-core==0.3.1",
            "@separata-core: 'separata-core==0.3.1'",
        ),
        (PYPROJECT, "separata-core>=0.3,<0.4", "separata-core>=0.3", "must be a range of one minor version"),
        (PYPROJECT, "separata-core>=0.3,<0.4", "separata-core>=0.3,<0.5", "must be a range of one minor version"),
        (PYPROJECT, "separata-core>=0.3,<0.4", "separata-core>=1.3,<2", None),
        (PYPROJECT, '"torch>=2.10"', '"torch>=2.10", "separata-testing>=0.1,<0.2"', "is never published"),
        (PYPROJECT, '"torch>=2.10"', '"torch"', "@\"torch\": 'torch' in dependencies has no lower bound"),
        (PYPROJECT, '"torch>=2.10"', '"torch>=2.10,<3"', "has a pin or an upper bound without a comment"),
        (PYPROJECT, '"torch>=2.10"', '"torch==2.10"', "has a pin or an upper bound without a comment"),
        (PYPROJECT, '"torch>=2.10"', '"torch~=2.10"', "has a pin or an upper bound without a comment"),
        (PYPROJECT, '"torch>=2.10"', '"torch>=2.10,!=2.11"', "has a pin or an upper bound without a comment"),
        (PYPROJECT, '"torch>=2.10",', '"torch>=2.10,<3",  # 3 drops the kernels', None),
        (PYPROJECT, '    "torch>=2.10",', '    # 3 drops the kernels.\n    "torch>=2.10,<3",', None),
        (PYPROJECT, '"torch>=2.10"', '"torch @ https://a.example/t.whl"', "names an address"),
        (PYPROJECT, '"torch>=2.10"', '"torch>=2.10 # new"', "is no requirement"),
        (PYPROJECT, 'cli = ["typer>=0.20"]', 'cli = ["typer>=0.15"]\nall = ["probe[cli]"]', None),
        (PYPROJECT, 'cli = ["typer>=0.20"]', 'cli = ["typer<1"]', "'typer<1' in cli has no lower bound"),
        (PYPROJECT, 'test = ["separata-testing"]', 'test = ["separata-testing", "x==1"]', "'x==1' in test has a pin"),
        (PYPROJECT, 'test = ["separata-testing"]', 'test = ["separata-testing", "x"]', None),
    ],
)
def test_each_finding(room, capsys, name, old, new, expected):
    file = room / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1) if old else text + new)
    if 'name = "sonde"' in new:
        found = findings(room.parent / "sonde", capsys)
        found = [line for line in found if "project.name" in line]
    else:
        found = findings(room, capsys)
    if expected is None:
        assert found == []
        return
    where, what = "", expected
    if expected.startswith("@"):
        words, _, what = expected[1:].partition(": ")
        where = f"packages/probe/{name}:{line_of(file, words)}: "
    matching = [line for line in found if what in line and line.startswith(where or "packages/probe/")]
    assert matching, found
    if "typer<1" not in expected:
        assert len(found) == len(matching) == 1, found


def test_wheel_of_another_module(room, capsys):
    (room / "src" / "extra").mkdir()
    assert findings(room, capsys) == [
        "packages/probe/src/extra: stands beside probe; a distribution has one top-level module"
    ]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import pickle", "imports pickle"),
        ("import json, cloudpickle as c", "imports cloudpickle"),
        ("from pickle import loads", "imports pickle"),
        ("from .pickle import mine", None),
        ("import pickles", None),
        ("eval('1')", "calls eval()"),
        ("model.eval()", None),
        ("exec(code)", "calls exec()"),
        ("import subprocess\nsubprocess.run('ls', shell=True)", "subprocess.run() runs a shell"),
        ("import subprocess\nsubprocess.run(['ls'], shell=False)", None),
        ("import os\nos.system('ls')", "os.system() runs a shell"),
        ("import torch\ntorch.load(path)", "torch.load() needs weights_only=True"),
        ("import torch\ntorch.load(path, weights_only=False)", "torch.load() needs weights_only=True"),
        ("import torch\ntorch.load(path, weights_only=True)", None),
        ("import numpy\nnumpy.load(path, allow_pickle=True)", "allow_pickle=True reads pickles"),
        ("import joblib\njoblib.load(path)", "joblib.load() reads a pickle"),
        ("import yaml\nyaml.load(text)", "use yaml.safe_load"),
        ("import tempfile\ntempfile.mktemp()", "use mkstemp or mkdtemp"),
        ("load(name, trust_remote_code=True)", "trust_remote_code=True runs code"),
        ("load(name, trust_remote_code=asked)", None),
        ("def load(name, trust_remote_code=True): ...", "must not be True by default"),
        ("def load(name, *, trust_remote_code=True): ...", "must not be True by default"),
        ("def load(name, *, trust_remote_code=False): ...", None),
        ("eval('1')  # unsafe: the text is a constant", None),
        ("eval('1')  # unsafe:", "calls eval()"),
        ("x = 1  # noqa: E501", "'noqa: E501' needs its reason"),
        ("x = 1  # noqa: E501  # a long address", None),
        ("x = 1  # noqa: E501, S101  (a long address)", None),
        ("x = 1  # noqa  # a long address", "'noqa' must name what it lets pass"),
        ("x = f()  # type: ignore[no-any-return]", "needs its reason"),
        ("x = f()  # type: ignore  # it is untyped", "must name what it lets pass"),
        ("x = f()  # type: ignore[misc]  # noqa: E501", "needs its reason"),
        ("x = f()  # type: ignore[misc]  # noqa: E501  # untyped, and long", None),
        ("x = 1  # pragma: no cover", "needs its reason"),
        ("x = 1  # pragma: no cover  # only on Windows", None),
        ("x = 1  # TODO: two", "belongs in an issue"),
        ("x = 'noqa TODO # type: ignore'", None),
        ("x = (", "is no Python"),
    ],
)
def test_search_of_sources(room, capsys, code, expected):
    file = room / "src" / "probe" / "extra.py"
    file.write_text(f"{code}\n")
    found = findings(room, capsys)
    if expected is None:
        assert found == []
    else:
        assert any(line.startswith("packages/probe/src/probe/extra.py:") and expected in line for line in found), found
        assert all(f"extra.py:{len(code.splitlines())}:" in line or "no Python" in line for line in found), found


def test_headings_in_code_are_none():
    text = "# a\n\n```sh\n# no heading\n~~~\n## neither\n```\n## b ##\n~~~\n# no\n~~~\n####### seven\n### c\n"
    assert list(layout_check._headings(text)) == [(1, 1, "a"), (8, 2, "b"), (13, 3, "c")]


def test_shared_member_is_held_to_what_applies(house, room, capsys, write):
    """Neither README sections, nor a script, nor benchmarks, nor a table are asked of it."""
    core = house / "shared" / "core"
    probe = (room / PYPROJECT).read_text()
    head, tail = probe.split("[project.optional-dependencies]")[0], probe.split("[dependency-groups]")[1]
    text = (
        head
        + "[dependency-groups]"
        + tail.split("[tool.separata]")[0]
        + "[tool.hatch"
        + tail.split("[tool.hatch", 1)[1]
    )
    text = text.replace('"probe"', '"separata-core"').replace("src/probe", "src/separata_core")
    text = text.replace('    "separata-core>=0.3,<0.4",\n', "")
    write(core, {"pyproject.toml": text, "README.md": "# separata-core\n\nTensors.\n", "tests/test_it.py": ""})
    shutil.copyfile(house / "LICENSE", core / "LICENSE")

    def found():
        capsys.readouterr()
        code = layout_check.main(["separata-core", "--root", str(house)])
        return code, capsys.readouterr().out.splitlines()

    assert found() == (0, [])
    (core / "README.md").write_text("# separata-core\n\n## Use\n")
    assert found() == (1, ["shared/core/README.md:2: must say below its title what the package does"])


def test_testing_must_not_be_published(house, capsys):
    layout_check.main(["separata-testing", "--root", str(house)])
    assert "project.classifiers must hold 'Private :: Do Not Upload'" in capsys.readouterr().out


def test_everything_is_looked_at_by_default(house, capsys, write):
    write(house, {"tools/mine.py": "eval('1')\n", ".venv/lib/theirs.py": "eval('1')\n", "dist/old.py": "eval('1')\n"})
    assert layout_check.main(["--root", str(house)]) == 1
    out = capsys.readouterr().out
    assert "tools/mine.py:1: calls eval()" in out
    assert "theirs.py" not in out
    assert "dist/" not in out
    for member in workspace.Workspace.load(house).members:
        assert str(member.path.relative_to(house)) in out


def test_unknown_member(house, capsys):
    assert layout_check.main(["alhpa", "--root", str(house)]) == 2
    assert capsys.readouterr().err == "error: unknown package 'alhpa'; did you mean 'alpha'?\n"
