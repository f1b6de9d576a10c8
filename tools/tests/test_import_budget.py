import json
import sys

import import_budget
import pytest
import workspace


@pytest.fixture
def house(tmp_path, monkeypatch):
    """Three members; `torch` and `scipy` are small stand-ins, since the real ones cost seconds."""
    (tmp_path / "pyproject.toml").write_text('[tool.uv.workspace]\nmembers = ["shared/*", "packages/*"]\n')
    site = tmp_path / "site"
    site.mkdir()
    (site / "torch.py").write_text("import time\ntime.sleep(0.3)\nimport csv\n")
    (site / "scipy.py").write_text("")

    def member(group, name, dependencies, code):
        folder = tmp_path / group / name
        folder.mkdir(parents=True)
        folder.joinpath("pyproject.toml").write_text(
            f'[project]\nname = "{name}"\nversion = "0.1.0"\ndependencies = {json.dumps(dependencies)}\n'
        )
        (site / f"{name}.py").write_text(code)

    member("shared", "corelike", ["torch>=2"], "import torch, csv\n")
    member("packages", "alpha", ["corelike>=0.1,<0.2"], "import corelike\n")
    member("packages", "chatty", [], "import json.tool\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    return tmp_path


def run(house, *arguments):
    return import_budget.main(["--root", str(house), "--repeats", "2", *arguments])


def report(capsys):
    return {record["module"]: record for record in json.loads(capsys.readouterr().out)["imports"]}


def test_what_torch_costs_and_loads_is_not_charged(house, capsys):
    assert run(house, "--json") == 0
    records = report(capsys)
    assert records["alpha"]["above"] == "torch"
    assert records["alpha"]["ms"] < 150
    assert records["alpha"]["loaded"] == ["alpha", "corelike"]
    assert records["chatty"]["above"] is None
    assert "json.tool" in records["chatty"]["loaded"]


def test_table_names_every_package(house, capsys):
    assert run(house) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["module", "chatty", "alpha", "corelike"]
    assert all(line.endswith("none") for line in lines[1:])


@pytest.mark.parametrize(
    ("name", "code", "finding"),
    [
        ("alpha", "import scipy", "loads scipy"),
        ("alpha", "import time; time.sleep(0.2)", "more than 150"),
        ("alpha", "import nowhere_at_all", "does not import: ModuleNotFoundError"),
        ("alpha", "import sys; sys.exit('no')", "does not import: SystemExit: no"),
        ("alpha", "import os; os.kill(os.getpid(), 9)", "does not import: the process died"),
        ("chatty", "import torch", "loads torch, which it does not declare"),
    ],
)
def test_findings(house, capsys, name, code, finding):
    (house / "site" / f"{name}.py").write_text(code)
    assert run(house, name, "--json") == 1
    assert any(finding in text for text in report(capsys)[name]["findings"])


def test_what_an_import_prints_does_not_disturb_the_report(house, capsys):
    (house / "site" / "alpha.py").write_text("print('hello', flush=True)")
    assert run(house, "alpha", "--json") == 0
    assert list(report(capsys)) == ["alpha"]


def test_triton_counts_only_above_what_torch_loads():
    loaded = import_budget.Measurement("m", "torch", 1.0, ("m", "triton.language", "tritonic", "vllm"))
    assert loaded.findings(150) == ["loads triton", "loads vllm"]


def test_torch_is_found_through_another_member(house):
    loaded = workspace.Workspace.load(house)
    needing = [member.name for member in loaded.members if import_budget.needs_torch(member, loaded)]
    assert needing == ["alpha", "corelike"]


def test_unknown_package_is_wrong_usage(house, capsys):
    assert run(house, "alpa") == 2
    assert "did you mean 'alpha'" in capsys.readouterr().err


def test_repeats_below_one_are_refused(house, capsys):
    assert run(house, "--repeats", "0") == 2
    assert "--repeats must be at least 1, it is 0" in capsys.readouterr().err


@pytest.mark.parametrize("python", ["/nowhere/python", sys.executable])
def test_unusable_interpreter_is_one_line(house, capsys, python):
    (house / "site" / "torch.py").write_text("raise ImportError('no such library')")
    assert run(house, "alpha", "--python", python) == 1
    assert capsys.readouterr().err.count("\n") == 1
