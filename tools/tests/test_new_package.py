"""A new package passes the checks as it comes, bad arguments are refused, and a failure leaves nothing behind."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import build_docs
import layout_check
import new_package
import pytest
import workspace

TITLE = (
    'Attention "Sinks" Probed: [A] \\Very Long Title Beyond What One Line of 120 Characters Can Hold With Its Name, Ü$x'
)


@pytest.fixture
def house(house, write_kit):
    """The little workspace with the kit."""
    write_kit(house)
    return house


@pytest.fixture
def real_house(house):
    """The little workspace with the settings and the licence of the real one."""
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copyfile(workspace.ROOT / name, house / name)
    return house


def make(root, *arguments, name="sink-probe"):
    return new_package.main([name, "--title", TITLE, "--paper", "2505.11739", *arguments, "--root", str(root)])


def run(room, *command, **environment):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=room,
        env={**os.environ, "PYTHONPATH": str(room / "src"), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_room_passes_every_check(real_house, capsys, tmp_path):
    assert make(real_house, "--summary", "Probe the attention sinks of a frozen model", "--engine", "vLLM") == 0
    assert "packages/sink-probe is ready" in capsys.readouterr().out
    room = real_house / "packages" / "sink-probe"

    assert layout_check.main(["sink-probe", "--root", str(real_house)]) == 0, capsys.readouterr().out
    run(room, "-m", "ruff", "check", "--no-cache", ".")
    run(room, "-m", "ruff", "format", "--no-cache", "--check", ".")
    settings = str(real_house / "pyproject.toml")
    run(room, "-m", "mypy", "--cache-dir", str(tmp_path), "--config-file", settings, "-p", "sink_probe")
    # Not installed, so the test of the console script is skipped.
    out = run(room, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--typecheck=sink_probe", "tests")
    assert "15 passed, 1 skipped" in out

    table = tomllib.loads((room / "pyproject.toml").read_text("utf-8"))
    assert table["tool"]["separata"] == {
        "title": TITLE,
        "paper": "arXiv:2505.11739",
        "summary": "Probe the attention sinks of a frozen model.",
        "engines": ["vLLM"],
    }
    assert table["project"]["dependencies"] == ["separata-kit>=0.3,<0.4"]
    # Every public name has its entry in the site; the others of the little workspace would not pass.
    for other in ("alpha", "beta"):
        shutil.rmtree(real_house / "packages" / other)
    assert build_docs.main(["--root", str(real_house)]) == 0, capsys.readouterr().out
    about = json.loads(run(room, "-m", "sink_probe", "about", "--json"))
    assert about == {"title": TITLE, "url": "https://arxiv.org/abs/2505.11739"}


def test_benchmark_measures(real_house, tmp_path):
    make(real_house)
    room = real_house / "packages" / "sink-probe"
    out = run(room, "benchmarks/bench_import.py", "--repeats", "2", "--json", str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["ratio"] == pytest.approx(found["package_s"] / found["python_s"])
    assert found["repeats"] == 2
    assert f"ratio {found['ratio']:.3f}" in out


def test_address_in_place_of_a_number(house):
    assert new_package.paper_link("arXiv:2505.11739v2") == "arXiv:2505.11739v2"
    address = "https://openreview.net/forum?id=x"
    assert new_package.paper_link(address) == address
    assert make(house, "--paper", address) == 0
    text = (house / "packages" / "sink-probe" / "README.md").read_text()
    assert f"]({address})" in text
    assert "\nThe method of https://openreview.net/forum?id=x.\n" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Probe", "lower-case words"),
        ("probe_it", "lower-case words"),
        ("9lives", "lower-case words"),
        ("probe--it", "lower-case words"),
        ("probe-", "lower-case words"),
        ("../probe", "lower-case words"),
        ("p" * 31, "at most 30"),
        ("lambda", "would hide one of Python's own"),
        ("json", "would hide one of Python's own"),
        ("separata-more", "reserved"),
        ("tests", "reserved"),
        ("alpha", "'alpha' is in packages/alpha"),
        ("al-pha", "'alpha' is in packages/alpha"),
        ("ruff", "a library that is installed here"),
        ("torch", "a library that is installed here"),
    ],
)
def test_names_that_are_refused(house, capsys, name, words):
    assert make(house, name=name) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sorted(path.name for path in (house / "packages").iterdir()) == ["alpha", "beta"]


def test_pinned_library_is_refused_where_it_is_not_installed(house, capsys, write):
    write(house, {"tools/requirements.txt": "# all\nfancy-sampling==1.0 \\\n    --hash=sha256:00\n"})
    assert make(house, name="fancy-sampling") == 2
    assert "a library" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--title", " "), "--title '' must be one line"),
        (("--title", "two\nlines"), "must be one line"),
        (("--summary", "long" * 30), "at most 100 characters"),
        (("--engine", ""), "--engine"),
        (("--paper", "Smith 2024"), "must be an arXiv number such as 2505.11739, or an https address"),
        (("--paper", "http://a.example/x"), "https"),
    ],
)
def test_arguments_that_are_refused(house, capsys, arguments, words):
    assert make(house, *arguments) == 2
    assert words in capsys.readouterr().err
    assert not (house / "packages" / "sink-probe").exists()


def test_existing_folder_is_refused_and_kept(house, capsys, write):
    write(house, {"packages/sink-probe/mine.txt": "mine"})
    assert make(house) == 2
    assert "packages/sink-probe exists already" in capsys.readouterr().err
    assert [path.name for path in (house / "packages" / "sink-probe").iterdir()] == ["mine.txt"]


def test_failure_leaves_nothing(house, capsys, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(new_package.shutil, "copyfile", fail)
    assert make(house) == 1
    assert capsys.readouterr().err == "error: no space left on device\n"
    assert sorted(path.name for path in (house / "packages").iterdir()) == ["alpha", "beta"]


@pytest.mark.parametrize("arguments", [["x", "--colour", "red"], ["x"], []])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        new_package.main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_kit_range_after_version_one(house):
    kit = house / "shared" / "kit" / "pyproject.toml"
    kit.write_text(kit.read_text().replace("0.3.1", "2.5.0"))
    assert new_package.kit_range(workspace.Workspace.load(house)) == "separata-kit>=2.5,<3.0"


def test_no_workspace(tmp_path, capsys):
    assert make(tmp_path) == 2
    assert "pyproject.toml" in capsys.readouterr().err


def test_templates_name_no_package():
    """Whatever was copied out of a package would stay in all later ones."""
    names = {member.name for member in workspace.Workspace.load().packages}
    for file in Path(new_package.TEMPLATES).rglob("*.in"):
        assert not names & set(file.read_text().replace("-", " ").replace(".", " ").split())
