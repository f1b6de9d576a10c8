"""The tools are scripts, not a package: their tests import them from this folder and try them on a little workspace."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

_PROJECT = """
    [build-system]
    requires = ["hatchling>=1.27"]
    build-backend = "hatchling.build"

    [project]
    name = "{name}"
    version = "{version}"
    description = "One of the members."
    license = "Apache-2.0"
    requires-python = ">=3.11"
    dependencies = [{dependencies}]
"""

# `alpha` uses part of the core in every way that an import can be written, `beta` uses little of it.
_FILES = {
    "pyproject.toml": """
        [tool.uv.workspace]
        members = ["shared/*", "packages/*"]

        [tool.uv.sources]
        separata-core = { workspace = true }
    """,
    "LICENSE": "Do as you like.\n",
    "README.md": "# house\n\n<!-- catalogue:begin -->\n<!-- catalogue:end -->\n",
    "shared/core/src/separata_core/__init__.py": '''
        """Tensor operations."""

        from separata_core.attention import attend
        from separata_core.models import layers

        __all__ = ["attend", "layers"]
    ''',
    "shared/core/src/separata_core/py.typed": "",
    "shared/core/src/separata_core/attention.py": '''
        """Attention."""

        from separata_core.internal.scale import SCALE


        def attend(value: float) -> float:
            """Attends."""
            from separata_core.kernels import fused

            return fused.run(value) * SCALE
    ''',
    "shared/core/src/separata_core/models.py": '''
        """Models."""


        def layers() -> int:
            """Counts."""
            return 3
    ''',
    "shared/core/src/separata_core/unused.py": '"""Nobody uses this."""\n',
    "shared/core/src/separata_core/kernels/__init__.py": '"""Kernels."""\n',
    "shared/core/src/separata_core/kernels/fused.py": '''
        """A kernel."""

        NAME = __name__.replace(".", "_")


        def run(value: float) -> float:
            """Runs."""
            return value
    ''',
    "shared/core/src/separata_core/internal/__init__.py": "",
    "shared/core/src/separata_core/internal/scale.py": "SCALE = 2.0\n",
    "shared/core/src/separata_core/internal/types.py": "class Shape:\n    rank = 2\n",
    "shared/embedded/src/separata_embedded/__init__.py": '''
        """Weights."""


        def load() -> str:
            return "weights"
    ''',
    "shared/testing/src/separata_testing/__init__.py": '"""Fixtures."""\n',
    "packages/alpha/src/alpha/__init__.py": '''
        """Alpha, the first method."""

        from __future__ import annotations

        from typing import TYPE_CHECKING

        from alpha.config import Config

        if TYPE_CHECKING:
            from alpha.operator import apply

        __all__ = ["Config", "apply"]


        def __getattr__(name: str) -> object:
            if name == "apply":
                from alpha.operator import apply

                return apply
            raise AttributeError(name)
    ''',
    "packages/alpha/src/alpha/py.typed": "",
    "packages/alpha/src/alpha/words.json": '["one", "two"]\n',
    "packages/alpha/src/alpha/config.py": '''
        """Settings."""

        from importlib.metadata import version


        class Config:
            """Settings of one run."""

            gamma = 2.0  # dimensionless

            def versions(self) -> str:
                """Names what made it."""
                return version("alpha")
    ''',
    "packages/alpha/src/alpha/operator.py": '''
        """The equations."""

        from __future__ import annotations

        from typing import TYPE_CHECKING

        import json, separata_core.attention as attention  # comments stay

        from alpha.config import Config  # beside their line

        if TYPE_CHECKING:
            from separata_core.internal.types import Shape


        def apply(value: float, shape: Shape | None = None) -> float:
            """Applies it."""
            return attention.attend(value) * Config.gamma + len(json.dumps(""))
    ''',
    "packages/alpha/src/alpha/adapters/__init__.py": "",
    "packages/alpha/src/alpha/adapters/absent.py": '''
        """Needs what is not installed."""

        import a_library_that_nobody_has

        from alpha.operator import apply

        run = a_library_that_nobody_has.wrap(apply)
    ''',
    "packages/alpha/src/alpha/cli.py": '''
        """The verbs."""


        def demo() -> str:
            """Shows it."""
            from alpha.demo import show

            return show()
    ''',
    "packages/alpha/src/alpha/__main__.py": '''
        """The script."""

        import sys

        from alpha.config import Config


        def main() -> int:
            """Prints a number."""
            print(Config.gamma)
            return 0


        if __name__ == "__main__":
            sys.exit(main())
    ''',
    "packages/alpha/src/alpha/demo.py": '''
        """Shows it."""

        from separata_embedded import load


        def show() -> str:
            """Shows it."""
            return load()
    ''',
    "packages/alpha/tests/test_operator.py": """
        import subprocess
        import sys

        import alpha
        import pytest
        from alpha.operator import apply
        from separata_core import attention


        def test_value():
            assert alpha.apply(1.0) == 6.0
            assert apply is alpha.apply


        def test_patched(monkeypatch):
            monkeypatch.setattr("alpha.config.Config.gamma", 3.0)
            assert apply(1.0) == 8.0


        def test_core():
            assert attention.attend(2.0) == 4.0


        def test_script():
            done = subprocess.run([sys.executable, "-m", "alpha"], capture_output=True, text=True, check=True)
            assert done.stdout == "2.0\\n"


        def test_snippet():
            code = "import alpha; from alpha.operator import apply; print(apply(1.0))"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert done.stdout == "6.0\\n"


        @pytest.mark.parametrize("name", ["Config"])
        def test_formatted(name):
            code = f"from alpha.config import {name}; print({name}.gamma)"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert done.stdout == "2.0\\n"
    """,
    "packages/alpha/tests/test_demo.py": """
        from alpha.demo import show


        def test_demo():
            assert show() == "weights"
    """,
    "packages/alpha/tests/data/numbers.txt": "1 2 3\n",
    "packages/beta/src/beta/__init__.py": '''
        """Beta, the second method."""

        from separata_core.models import layers as layers

        __all__ = ["layers"]
    ''',
    "packages/beta/src/beta/py.typed": "",
}
_MEMBERS = {
    "shared/core": ("separata-core", "0.3.1", '"jaxtyping>=0.3", "torch>=2.10"'),
    "shared/embedded": ("separata-embedded", "0.1.0", ""),
    "shared/testing": ("separata-testing", "0.1.0", ""),
    "packages/alpha": ("alpha", "0.2.0", '"separata-core>=0.3,<0.4", "numpy>=1.26"'),
    "packages/beta": ("beta", "0.1.0", '"separata-core>=0.3,<0.4"'),
}
_ALPHA_EXTRAS = """
    [project.optional-dependencies]
    cli = ["typer>=0.15"]
    demo = ["separata-embedded>=0.1,<0.2", "alpha[cli]"]

    [project.scripts]
    alpha = "alpha.__main__:main"

    [dependency-groups]
    test = ["separata-testing"]
    all = [{ include-group = "test" }, "beta"]
"""
_CATALOGUED = """
    [tool.separata]
    title = "A Method"
    paper = "arXiv:2501.00001"
    engines = ["transformers"]
"""


def _write(root: Path, files: Mapping[str, str]) -> None:
    """Writes texts, without their common margin and leading line break, to paths below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).removeprefix("\n"), encoding="utf-8")


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Root of a little workspace with two packages and three shared members, in no git repository."""
    root = tmp_path / "house"
    _write(root, _FILES)
    for folder, (name, version, dependencies) in _MEMBERS.items():
        text = dedent(_PROJECT).format(name=name, version=version, dependencies=dependencies)
        text += dedent(_ALPHA_EXTRAS) if name == "alpha" else ""
        text += dedent(_CATALOGUED) if folder.startswith("packages/") else ""
        files = {"pyproject.toml": text, "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n- Something new.\n"}
        _write(root / folder, {**files, "README.md": f"# {name}\n"})
    return root


def _git(root: Path, *arguments: str) -> str:
    """Runs git in a folder, away from the settings of whoever runs the tests, and returns what it prints."""
    nobody = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t.example", *arguments]
    done = subprocess.run(command, cwd=root, env={**os.environ, **nobody}, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def write() -> Callable[[Path, Mapping[str, str]], None]:
    """`write(root, files)` writes texts below a folder."""
    return _write


@pytest.fixture
def write_kit() -> Callable[[Path], None]:
    """`write_kit(root)` adds the kit, on which every new package stands, to the little workspace."""

    def write(root: Path) -> None:
        text = dedent(_PROJECT).format(name="separata-kit", version="0.3.1", dependencies="")
        files = {"pyproject.toml": text, "README.md": "# Kit\n", "src/separata_kit/__init__.py": '"""The kit."""\n'}
        _write(root / "shared" / "kit", files)

    return write


@pytest.fixture
def git() -> Callable[..., str]:
    """`git(root, *arguments)` runs git and returns what it prints."""
    return _git


@pytest.fixture
def repository(house: Path) -> Path:
    """The little workspace as a git repository with one commit."""
    _git(house, "init", "-q", "-b", "main")
    _git(house, "config", "user.name", "t")
    _git(house, "config", "user.email", "t@t.example")
    for kind in ("commit", "tag"):
        _git(house, "config", f"{kind}.gpgsign", "false")
    (house / ".gitignore").write_text("__pycache__/\ndist/\n")
    _git(house, "add", "-A")
    _git(house, "commit", "-q", "-m", "first")
    return house
