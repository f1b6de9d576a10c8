"""The contract is kept by the workspace as it is, and notices each way of breaking it."""

import tomllib
from pathlib import Path

import import_contract
import pytest
from workspace import Workspace


@pytest.fixture
def house(tmp_path):
    """Two packages, core, kit and embedded, an empty module each; returns a function that writes source into one."""
    (tmp_path / "pyproject.toml").write_text('[tool.uv.workspace]\nmembers = ["shared/*", "packages/*"]\n')
    for folder, name in {
        "shared/core": "separata-core",
        "shared/embedded": "separata-embedded",
        "shared/kit": "separata-kit",
        "packages/one": "one",
        "packages/two": "two",
    }.items():
        source = tmp_path / folder / "src" / name.replace("-", "_")
        source.mkdir(parents=True)
        (source / "__init__.py").touch()
        (tmp_path / folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "0.1.0"\n')

    def write(file: str, text: str) -> Workspace:
        (tmp_path / file).write_text(text)
        return Workspace.load(tmp_path)

    return write


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("packages/one/src/one/__init__.py", "import scipy.stats\n"),
        (
            "packages/one/src/one/__init__.py",
            "try:\n    from transformers import AutoModel\nexcept ImportError:\n    pass\n",
        ),
        ("packages/one/src/one/__init__.py", "class A:\n    import pandas\n"),
        ("packages/one/src/one/__init__.py", "if TYPE_CHECKING:\n    import os\nelse:\n    import matplotlib\n"),
    ],
)
def test_a_heavy_import_that_is_executed_is_found(house, file, text):
    (finding,) = import_contract.heavy_imports(house(file, text).members)
    assert "`import one` executes `import" in finding
    assert "__init__.py:" in finding


def test_a_heavy_import_is_found_behind_other_modules_and_members(house):
    house("shared/core/src/separata_core/deep.py", "import triton\n")
    house("packages/one/src/one/middle.py", "from separata_core import deep\n")
    findings = import_contract.heavy_imports(
        house("packages/one/src/one/__init__.py", "from .middle import x\n").members
    )
    assert [f.split(": ")[1] for f in findings] == ["`import one` executes `import triton`; import it where it is used"]


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    import transformers\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers\n",
        "import torch, numpy\n",
        "def __getattr__(name):\n    from .adapter import x\n    return x\n",
    ],
)
def test_a_late_import_is_allowed(house, text):
    house("packages/one/src/one/adapter.py", "import transformers\n")
    assert import_contract.heavy_imports(house("packages/one/src/one/__init__.py", text).members) == []


def test_contracts_cover_every_member(house):
    members = house("packages/one/src/one/demo.py", "import separata_embedded\n").members
    settings = tomllib.loads(import_contract.as_toml(import_contract.contracts(members)))["tool"]["importlinter"]
    assert set(settings["root_packages"]) == {"one", "two", "separata_core", "separata_embedded", "separata_kit"}
    kinds = {contract["name"]: contract for contract in settings["contracts"]}
    assert kinds["packages do not import each other"]["modules"] == ["one", "two"]
    assert "one.demo -> separata_embedded" in kinds["embedded is for demos alone"]["ignore_imports"]


@pytest.mark.parametrize(
    ("file", "text", "broken"),
    [
        ("packages/one/src/one/late.py", "def f():\n    import two\n", "packages do not import each other"),
        ("shared/core/src/separata_core/x.py", "import one\n", "shared imports no package"),
        ("shared/core/src/separata_core/x.py", "import separata_embedded\n", "core imports nothing of ours"),
        ("shared/kit/src/separata_kit/x.py", "import separata_core\n", "kit imports nothing of ours"),
        ("packages/one/src/one/cli.py", "import separata_embedded\n", "embedded is for demos alone"),
        ("packages/one/src/one/demo.py", "import separata_embedded\n", None),
    ],
)
def test_import_linter_breaks_on_each_wrong_arrow(house, monkeypatch, capfd, file, text, broken):
    workspace = house(file, text)
    monkeypatch.setattr(import_contract.Workspace, "load", lambda: workspace)
    monkeypatch.setattr("sys.argv", ["import_contract.py"])
    assert import_contract.main() == (0 if broken is None else 1)
    lines = {line for line in capfd.readouterr().out.splitlines() if line.endswith(" BROKEN")}
    assert lines == set() if broken is None else f"{broken} BROKEN" in lines


def test_this_workspace_keeps_it():
    assert import_contract.heavy_imports(Workspace.load(Path(__file__).parents[2]).members) == []
