import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import api_check as tool
import pytest
import workspace
from packaging.version import Version

Git = Callable[..., str]
Write = Callable[[Path, Mapping[str, str]], None]

SHAPES = '''
    """Shapes."""

    from dataclasses import dataclass


    @dataclass(frozen=True)
    class Box:
        """A box."""

        width: int
        height: int = 1

        def area(self, scale: float = 1.0) -> float:
            """Measures."""
            return self.width * self.height * scale


    def grow(box: Box, by: int, *, both: bool = False) -> Box:
        """Grows."""
        return Box(box.width + by, box.height + by * both)


    def _hidden(value: int) -> int:
        return value
'''
INIT = '''
    """Alpha."""

    from typing import TYPE_CHECKING

    from separata_core.models import layers

    from alpha.shapes import Box

    if TYPE_CHECKING:
        from alpha.shapes import grow

    __all__ = [{names}]


    def __getattr__(name: str) -> object:
        import alpha.shapes

        return getattr(alpha.shapes, name)
'''


def source(root: Path) -> Path:
    return root / "packages/alpha/src/alpha"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def bump(root: Path, version: str, folder: str = "packages/alpha") -> None:
    path = root / folder / "pyproject.toml"
    lines = [f'version = "{version}"' if x.startswith("version = ") else x for x in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def released(repository: Path, git: Git, write: Write) -> Path:
    """A repository whose package alpha, 0.2.0, was released with a few shapes."""
    write(source(repository), {"shapes.py": SHAPES})
    write(source(repository), {"__init__.py": INIT.format(names='"Box", "grow", "layers"')})
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "shapes")
    git(repository, "tag", "-a", "alpha-v0.2.0", "-m", "alpha 0.2.0")
    return repository


def run(root: Path, *arguments: str) -> int:
    return tool.main(arguments, root=root)


def test_no_release_yet(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(repository, "beta") == 0
    assert capsys.readouterr().out == "beta: no release yet\n"


def test_nothing_changed(released: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(released, "alpha") == 0
    assert capsys.readouterr().out == "alpha: nothing broken since alpha-v0.2.0\n"


BREAKS = [
    ("by: int, *", "by: int, size: int, *", "  alpha.grow(size): Parameter was added as required\n"),
    ("by: int, *", "*", "  alpha.grow(by): Parameter was removed\n"),
    ("both: bool = False", "both: bool = True", "Parameter default was changed"),
    ("box: Box, by: int", "by: int, box: Box", "Positional parameter was moved"),
    ("def grow", "def grew", "does not exist"),
    ("scale: float = 1.0", "scale: float", "  alpha.Box.area(scale): Parameter is now required\n"),
    ("def area", "def surface", "Public object was removed"),
    ("height: int = 1", "height: int", "Parameter is now required"),
    ("class Box:", "class Box:\n    depth: int", "Parameter was added as required"),
]


@pytest.mark.parametrize(("old", "new", "said"), BREAKS)
def test_a_break_is_named(released: Path, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    edit(source(released) / "shapes.py", old, new)
    assert run(released, "alpha") == 1
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


@pytest.mark.parametrize(
    ("version", "code"), [("0.2.0", 1), ("0.2.1", 1), ("0.3.0", 0), ("0.3.0.dev0", 0), ("1.0.0", 0), ("0.10.0", 0)]
)
def test_below_one_a_break_needs_a_minor_step(released: Path, version: str, code: int) -> None:
    edit(source(released) / "shapes.py", "by: int, *", "*")
    bump(released, version)
    assert run(released, "alpha") == code


@pytest.mark.parametrize(("version", "code"), [("1.4.3", 1), ("1.5.0", 1), ("2.0.0", 0)])
def test_from_one_on_a_break_needs_a_major_step(released: Path, git: Git, version: str, code: int) -> None:
    git(released, "tag", "-a", "alpha-v1.4.2", "-m", "alpha 1.4.2")
    edit(source(released) / "shapes.py", "by: int, *", "*")
    bump(released, version)
    assert run(released, "alpha") == code


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("by: int, *, both", "by: int, *, deep: int = 0, both"),
        ("def _hidden(value: int)", "def _concealed()"),
        ("    width: int", "    width: float"),
        ("def grow", "def shrink() -> int:\n    return 0\n\n\ndef grow"),
    ],
)
def test_an_addition_or_a_private_change_passes(released: Path, old: str, new: str) -> None:
    edit(source(released) / "shapes.py", old, new)
    assert run(released, "alpha") == 0


def test_a_removed_name_is_caught_though_it_is_resolved_on_use(
    released: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(source(released), {"__init__.py": INIT.format(names='"Box", "layers"')})
    assert run(released, "alpha") == 1
    assert "  alpha.grow: gone\n" in capsys.readouterr().out


def test_a_name_that_only_running_would_find_is_refused(
    released: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(source(released), {"__init__.py": INIT.format(names='"Box", "grow", "layers", "shrink"')})
    assert run(released, "alpha") == 1
    message = capsys.readouterr().err
    assert "alpha.__all__ names 'shrink'" in message
    assert "TYPE_CHECKING" in message


def test_what_comes_from_elsewhere_is_held_by_name(
    released: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(source(released), {"__init__.py": INIT.format(names='"Box", "grow"')})
    assert run(released, "alpha") == 1
    assert "alpha.layers: gone" in capsys.readouterr().out


def test_modules_of_a_shared_member_are_promised(
    repository: Path, git: Git, capsys: pytest.CaptureFixture[str]
) -> None:
    git(repository, "tag", "-a", "separata-core-v0.3.1", "-m", "x")
    core = repository / "shared/core/src/separata_core"
    edit(core / "internal/scale.py", "SCALE", "FACTOR")
    edit(core / "attention.py", "scale import SCALE", "scale import FACTOR")
    edit(core / "attention.py", "* SCALE", "* FACTOR")
    edit(core / "kernels/fused.py", "def run(value: float)", "def run(value: float, more: int)")
    assert run(repository, "separata-core") == 0
    edit(core / "__init__.py", '["attend", "layers"]', '["layers"]')
    edit(core / "attention.py", "def attend(value", "def attend(number")
    assert run(repository, "separata-core") == 1
    said = capsys.readouterr().out
    assert "separata_core.attend: gone" in said
    assert "separata_core.attention.attend(value): Parameter was removed" in said


def test_the_highest_tag_on_this_branch_counts(released: Path, git: Git) -> None:
    for tag in ("alpha-v0.10.0", "alpha-v0.9.0", "alpha-vnext", "alphabet-v3.0.0"):
        git(released, "tag", tag)
    git(released, "checkout", "-q", "-b", "other")
    git(released, "commit", "-q", "--allow-empty", "-m", "elsewhere")
    git(released, "tag", "alpha-v5.0.0")
    git(released, "checkout", "-q", "main")
    assert tool.last_release(released, "alpha") == ("alpha-v0.10.0", Version("0.10.0"))


def test_a_member_that_moved_since_its_release(released: Path, git: Git, capsys: pytest.CaptureFixture[str]) -> None:
    git(released, "mv", "packages/alpha", "packages/renamed")
    assert run(released, "alpha") == 1
    assert "git archive" in capsys.readouterr().err


def test_unknown_package(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(repository, "alfa") == 2
    assert capsys.readouterr().err == "error: unknown package 'alfa'; did you mean 'alpha'?\n"


def test_code_that_cannot_be_parsed(released: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source(released) / "__init__.py").write_text("def (:\n")
    assert run(released, "alpha") == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_is_executed(released: Path) -> None:
    edit(source(released) / "shapes.py", '"""Shapes."""', '"""Shapes."""\nraise SystemExit(3)')
    assert run(released, "alpha") == 0


def test_the_real_house_can_be_read_and_names_all_that_it_promises() -> None:
    for member in workspace.Workspace.load().members:
        found = tool.surface(member.source.parent, member)
        assert all(path.startswith(f"{member.module}.") for path in found)


def test_help_shows_an_example() -> None:
    done = subprocess.run(
        [sys.executable, str(workspace.ROOT / "tools/api_check.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "python tools/api_check.py zerotuning" in done.stdout
