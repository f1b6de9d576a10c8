import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import workspace
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from workspace import Import, UnknownMemberError, Workspace, WorkspaceError

Write = Callable[[Path, Mapping[str, str]], None]


def names(members: tuple[workspace.Member, ...]) -> list[str]:
    return [member.name for member in members]


def test_members_are_read_from_the_root(house: Path) -> None:
    loaded = Workspace.load(house)
    assert names(loaded.packages) == ["alpha", "beta"]
    assert names(loaded.shared) == ["separata-core", "separata-embedded", "separata-testing"]
    alpha = loaded.member("alpha")
    assert alpha.path == house.resolve() / "packages/alpha"
    assert alpha.source == alpha.path / "src/alpha"
    assert alpha.version == "0.2.0"
    assert alpha.dependencies == ("separata-core>=0.3,<0.4", "numpy>=1.26")
    assert alpha.extras["cli"] == ("typer>=0.15",)
    assert alpha.scripts == {"alpha": "alpha.__main__:main"}
    assert alpha.groups["all"] == ("separata-testing", "beta")
    assert alpha.is_package
    assert loaded.member("separata-core").module == "separata_core"
    assert not loaded.member("separata-core").is_package
    assert len({alpha, loaded.member("beta"), Workspace.load(house).member("alpha")}) == 2


def test_a_folder_without_a_project_is_no_member(house: Path, write: Write) -> None:
    write(house / "packages", {"notes/README.md": "nothing\n"})
    assert names(Workspace.load(house).packages) == ["alpha", "beta"]
    text = (house / "pyproject.toml").read_text()
    (house / "pyproject.toml").write_text(text.replace("]\n", ']\nexclude = ["packages/beta"]\n', 1))
    assert names(Workspace.load(house).packages) == ["alpha"]


def test_who_imports_whom(house: Path) -> None:
    loaded = Workspace.load(house)
    assert loaded.graph["alpha"] == {"separata-core", "separata-embedded"}
    assert loaded.graph["separata-core"] == set()
    assert loaded.wide_graph["alpha"] == {"separata-core", "separata-embedded", "separata-testing", "beta"}
    assert names(loaded.dependants("separata-core")) == ["alpha", "beta"]
    assert names(loaded.dependants("separata-testing")) == []
    assert names(loaded.dependants("separata-testing", wide=True)) == ["alpha"]
    assert names(loaded.dependants("beta", wide=True)) == ["alpha"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["packages/beta/src/beta/__init__.py"], ["alpha", "beta"]),
        (["packages/alpha/README.md"], ["alpha"]),
        (["shared/core/src/separata_core/attention.py"], ["alpha", "beta", "separata-core"]),
        (["README.md"], []),
        (["tools/vendor.py", "tools/tests/test_vendor.py"], []),
        (["tools/lock.sha256"], ["alpha", "beta", "separata-core", "separata-embedded", "separata-testing"]),
        ([], []),
        (["noxfile.py"], ["alpha", "beta", "separata-core", "separata-embedded", "separata-testing"]),
        (["packages/alphabet/x.py"], ["alpha", "beta", "separata-core", "separata-embedded", "separata-testing"]),
    ],
)
def test_what_a_change_affects(house: Path, changed: list[str], expected: list[str]) -> None:
    assert names(Workspace.load(house).affected(changed)) == expected


@pytest.mark.parametrize("spelling", ["separata-core", "separata_core", "Separata.Core", "SEPARATA__core"])
def test_a_member_is_found_by_any_spelling(house: Path, spelling: str) -> None:
    assert Workspace.load(house).member(spelling).name == "separata-core"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("alhpa", "did you mean 'alpha'?"),
        ("separata-cor", "did you mean 'separata-core'?"),
        ("qqq", "known are: alpha, beta, separata-core"),
    ],
)
def test_an_unknown_member_is_answered_with_the_nearest(house: Path, wrong: str, said: str) -> None:
    with pytest.raises(UnknownMemberError, match=f"unknown package '{wrong}'") as caught:
        Workspace.load(house).member(wrong)
    assert said in str(caught.value)


def test_only_those_asked_for_are_suggested(house: Path) -> None:
    loaded = Workspace.load(house)
    with pytest.raises(UnknownMemberError):
        loaded.member("separata-core", loaded.packages)
    assert loaded.nearest("betta", loaded.packages) == "beta"
    assert loaded.nearest("betta", loaded.shared) is None


SOURCE = """
import os, json as j
import a.b
from . import sibling
from .sibling import thing as other
from .. import *
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import c
else:
    import d

class K:
    import e

def f():
    import g
    h = lambda: __import__("x")

async def k():
    from l import m
"""


def test_every_import_is_seen() -> None:
    found = workspace.parse_imports(SOURCE, "top.inner.module")
    assert found == [
        Import("os", None, 2),
        Import("json", None, 2),
        Import("a.b", None, 3),
        Import("top.inner", "sibling", 4),
        Import("top.inner.sibling", "thing", 5),
        Import("top", "*", 6),
        Import("typing", "TYPE_CHECKING", 7),
        Import("c", None, 9, typing_only=True),
        Import("d", None, 11),
        Import("e", None, 14),
        Import("g", None, 17, nested=True),
        Import("l", "m", 21, nested=True),
    ]
    assert found[2].top == "a"


def test_a_package_is_its_own_base() -> None:
    assert workspace.parse_imports("from .x import y", "top", is_package=True) == [Import("top.x", "y", 1)]
    assert workspace.parse_imports("from . import y", "top.in", is_package=True) == [Import("top.in", "y", 1)]
    assert workspace.parse_imports("import typing\nif typing.TYPE_CHECKING:\n    import c", "m")[1].typing_only


def test_modules_by_their_dotted_names(house: Path) -> None:
    modules = Workspace.load(house).member("separata-core").modules()
    assert set(modules) == {
        "separata_core",
        *(f"separata_core.{name}" for name in ("attention", "models", "unused", "kernels", "kernels.fused")),
        *(f"separata_core.{name}" for name in ("internal", "internal.scale", "internal.types")),
    }
    assert modules["separata_core.kernels"].name == "__init__.py"


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("packages/beta/pyproject.toml", "[project", "packages/beta/pyproject.toml: "),
        ("packages/beta/pyproject.toml", "[project]\nname = 'beta'\n", "project.version must be a string"),
        ("packages/beta/pyproject.toml", "[project]\nname = 'Alpha'\nversion = '1'\n", "two members are named 'alpha'"),
        ("pyproject.toml", "[tool.uv]\n", "names no members"),
        ("pyproject.toml", "=", "pyproject.toml: "),
        (
            "packages/beta/pyproject.toml",
            "[project]\nname = 'beta'\nversion = '1'\n[dependency-groups]\na = [{ include-group = 'a' }]\n",
            "dependency group 'a' is missing or includes itself",
        ),
    ],
)
def test_a_damaged_project_is_named(house: Path, path: str, text: str, said: str) -> None:
    (house / path).write_text(text)
    with pytest.raises(WorkspaceError) as caught:
        Workspace.load(house)
    assert said in str(caught.value)


def test_a_module_that_is_no_python_is_named(house: Path) -> None:
    (house / "packages/beta/src/beta/__init__.py").write_text("x = 1\ndef (:\n")
    with pytest.raises(WorkspaceError, match=r"beta/__init__.py:2: "):
        _ = Workspace.load(house).graph


def test_no_workspace_at_all(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="No such file"):
        Workspace.load(tmp_path)


@given(st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,10}[A-Za-z0-9])?", fullmatch=True))
def test_names_are_normalised_as_the_index_does(name: str) -> None:
    assert workspace.normalise(name) == canonicalize_name(name)


@pytest.mark.parametrize(
    "requirement",
    ["torch", "torch>=2.10", "Typer [all,rich] >= 0.1 ; python_version > '3'", "a.b_c~=1.0", "x @ file:///y", "q!=3"],
)
def test_requirements_are_read_as_packaging_does(requirement: str) -> None:
    expected = Requirement(requirement)
    assert workspace.requirement_name(requirement) == canonicalize_name(expected.name)
    assert set(workspace.requirement_extras(requirement)) == expected.extras


def test_what_is_no_requirement_is_refused() -> None:
    with pytest.raises(WorkspaceError, match="'>=1'"):
        workspace.requirement_name(">=1")


def test_blocked_names_cannot_be_imported() -> None:
    code = workspace.blocker(["json", "email"], but="email.mime") + (
        "for name in ('json', 'email.mime', 'csv'):\n"
        "    try:\n"
        "        __import__(name)\n"
        "        print(name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        print('blocked', error.name)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["blocked json", "blocked email", "csv"]


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert workspace.fail("it\n  broke", 2) == 2
    assert capsys.readouterr().err == "error: it broke\n"


def test_needs_nothing_but_the_standard_library() -> None:
    imported = {found.top for found in workspace.parse_imports(Path(workspace.__file__).read_text(), "workspace")}
    assert imported <= set(sys.stdlib_module_names)


def test_the_real_house() -> None:
    loaded = Workspace.load()
    assert {"zerotuning", "separata-core"} <= {member.name for member in loaded.members}
    assert loaded.graph["separata-core"] == set()
    for member in loaded.members:
        assert (member.source / "__init__.py").is_file()


@pytest.mark.parametrize(
    ("script", "library"), [("vendor", "libcst"), ("release", "packaging"), ("api_check", "griffe")]
)
def test_a_tool_without_its_library_says_how_to_get_it(script: str, library: str) -> None:
    code = f"{workspace.blocker([library])}sys.path.insert(0, 'tools')\nimport {script}"
    done = subprocess.run([sys.executable, "-c", code], cwd=workspace.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: this tool needs {library}: ")
    assert done.stderr.count("\n") == 1


def test_a_missing_library_of_another_kind_is_not_explained_away() -> None:
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        workspace.needs(ModuleNotFoundError("No module named 'numpy'", name="numpy"))
