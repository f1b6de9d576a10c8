import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import libcst
import pytest
import vendor as tool
import workspace
from import_rewriter import ImportRewriter
from vendor import BASE, MANIFEST, VendorError
from workspace import Workspace

Write = Callable[[Path, Mapping[str, str]], None]


def run(house: Path, *arguments: str | Path) -> int:
    return tool.main([str(argument) for argument in arguments], root=house)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def source(house: Path, name: str) -> Path:
    return house / "packages/alpha/src/alpha" / name


def core(house: Path, name: str) -> Path:
    return house / "shared/core/src/separata_core" / name


def test_copies_just_what_is_used(house: Path, tmp_path: Path) -> None:
    into = tmp_path / "app"
    assert run(house, "alpha", "--into", into, "--namespace", "app.vendored") == 0
    assert set(tree(into / "app/vendored/alpha")) == {
        "LICENSE",
        MANIFEST,
        BASE,
        "__init__.py",
        "__main__.py",
        "_core/__init__.py",
        "_core/attention.py",
        "_core/internal/__init__.py",
        "_core/internal/scale.py",
        "_core/internal/types.py",
        "_core/kernels/__init__.py",
        "_core/kernels/fused.py",
        "adapters/__init__.py",
        "adapters/absent.py",
        "cli.py",
        "config.py",
        "demo.py",
        "operator.py",
        "py.typed",
        "tests/data/numbers.txt",
        "tests/pytest.ini",
        "tests/test_operator.py",
        "words.json",
    }
    assert [path.name for path in into.iterdir()] == ["app"]


def test_imports_become_relative_and_the_rest_stays(house: Path, tmp_path: Path) -> None:
    assert run(house, "alpha", "--into", tmp_path / "app") == 0
    text = (tmp_path / "app/alpha/operator.py").read_text()
    assert "import json\nfrom ._core import attention  # comments stay\n" in text
    assert "from .config import Config  # beside their line\n" in text
    assert "    from ._core.internal.types import Shape\n" in text
    assert "            from .kernels import fused\n".strip() in (tmp_path / "app/alpha/_core/attention.py").read_text()
    assert "from ..operator import apply" in (tmp_path / "app/alpha/adapters/absent.py").read_text()
    assert (tmp_path / "app/alpha/_core/__init__.py").read_text() == '"""Tensor operations."""\n'


def test_a_shared_package_asked_for_a_name_is_copied_with_all_that_it_names(
    house: Path, write: Write, tmp_path: Path
) -> None:
    write(source(house, "."), {"more.py": "from separata_core import attend\n"})
    assert run(house, "alpha", "--into", tmp_path / "app") == 0
    copy = tmp_path / "app/alpha"
    assert "from ._core import attend" in (copy / "more.py").read_text()
    assert "from .models import layers" in (copy / "_core/__init__.py").read_text()
    assert (copy / "_core/models.py").exists()
    assert not (copy / "_core/unused.py").exists()


@pytest.mark.parametrize("namespace", ["", "app", "app.third_party"])
def test_the_copied_tests_pass_with_the_originals_blocked(house: Path, namespace: str, tmp_path: Path) -> None:
    into = tmp_path / "app"
    assert run(house, "alpha", "--into", into, "--namespace", namespace) == 0
    folder = into.joinpath(*namespace.split("."), "alpha") if namespace else into / "alpha"
    blocked = ["separata_core", "separata_embedded", *(["alpha"] if namespace else [])]
    # `sitecustomize` reaches the interpreters that the tests start, too.
    (into / "sitecustomize.py").write_text(workspace.blocker(blocked, but="" if namespace else "alpha"))
    environment = {**os.environ, "PYTHONPATH": str(into), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests")]
    done = subprocess.run(command, cwd=into, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


def test_two_packages_share_a_tree(house: Path, tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        assert run(house, name, "--into", tmp_path / "app", "--namespace", "app") == 0
    code = "import app.alpha, app.beta; assert app.beta.layers() == 3; print(app.alpha.apply(1.0))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "app", capture_output=True, text=True, check=True
    )
    assert done.stdout == "6.0\n"
    assert not (tmp_path / "app/app/beta/_core/attention.py").exists()


def test_names_derived_from_the_module_differ_between_copies(house: Path, tmp_path: Path) -> None:
    assert run(house, "alpha", "--into", tmp_path / "app", "--namespace", "app") == 0
    code = "from app.alpha._core.kernels import fused; print(fused.NAME)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "app", capture_output=True, text=True, check=True
    )
    assert done.stdout == "app_alpha__core_kernels_fused\n"


def test_manifest_tells_where_everything_comes_from(repository: Path, git: Callable[..., str], tmp_path: Path) -> None:
    assert run(repository, "alpha", "--into", tmp_path / "app", "--namespace", "app") == 0
    copy = tmp_path / "app/app/alpha"
    manifest = json.loads((copy / MANIFEST).read_text())
    assert manifest["distribution"] == "alpha"
    assert manifest["version"] == "0.2.0"
    assert manifest["shared"] == {"separata-core": "0.3.1"}
    assert manifest["commit"] == git(repository, "rev-parse", "HEAD").strip()
    assert manifest["requirements"] == ["numpy>=1.26"]
    assert manifest["optional_requirements"] == {"cli": ["typer>=0.15"]}
    assert manifest["console"] == "python -m app.alpha"
    assert manifest["left_out"] == {
        "alpha.demo": "needs separata_embedded",
        "tests/test_demo.py": "imports alpha.demo",
    }
    assert manifest["unproved"] == {"app.alpha.adapters.absent": "a_library_that_nobody_has"}
    entry = manifest["files"]["operator.py"]
    original = source(repository, "operator.py")
    assert entry["origin"] == "packages/alpha/src/alpha/operator.py"
    assert entry["original"] == tool._sha(original.read_bytes())
    assert entry["written"] == tool._sha((copy / "operator.py").read_bytes())
    assert set(manifest["files"]) == set(tree(copy)) - {MANIFEST, BASE}


def test_a_library_of_the_core_is_required_only_where_it_is_used(house: Path, tmp_path: Path) -> None:
    edit(core(house, "kernels/fused.py"), "NAME =", "import jaxtyping\n\nNAME =")
    house_now = Workspace.load(house)
    assert tool.plan(house_now, "alpha").manifest["requirements"] == ["jaxtyping>=0.3", "numpy>=1.26"]
    assert tool.plan(house_now, "beta").manifest["requirements"] == []


def test_an_uncommitted_origin_is_marked(repository: Path) -> None:
    edit(source(repository, "config.py"), "2.0", "2.5")
    assert str(tool.plan(Workspace.load(repository), "alpha").manifest["commit"]).endswith("+")


def test_version_of_the_copy_is_the_one_that_was_copied(house: Path, tmp_path: Path) -> None:
    assert run(house, "alpha", "--into", tmp_path / "app", "--namespace", "app") == 0
    code = "from app.alpha import Config; print(Config().versions())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "app", capture_output=True, text=True, check=True
    )
    assert done.stdout == "0.2.0\n"


def test_what_was_left_out_says_so_when_it_is_called(house: Path, tmp_path: Path) -> None:
    assert run(house, "alpha", "--into", tmp_path / "app", "--namespace", "app") == 0
    code = "from app.alpha.cli import demo; demo()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "app", capture_output=True, text=True, check=False
    )
    assert "ModuleNotFoundError: alpha.demo is not part of this copy (needs separata_embedded)" in done.stderr


def test_a_script_that_cannot_work_is_left_out(house: Path, tmp_path: Path) -> None:
    edit(source(house, "__main__.py"), "import sys\n", "import sys\n\nfrom alpha.demo import show\n")
    assert run(house, "alpha", "--into", tmp_path / "app") == 0
    assert not (tmp_path / "app/alpha/__main__.py").exists()
    manifest = json.loads((tmp_path / "app/alpha" / MANIFEST).read_text())
    assert manifest["console"] == "left out: imports alpha.demo"


def test_what_is_shared_can_be_copied_alone(house: Path, tmp_path: Path) -> None:
    assert run(house, "separata-core", "--into", tmp_path / "app", "--namespace", "app") == 0
    copy = tmp_path / "app/app/separata_core"
    assert "from .models import layers" in (copy / "__init__.py").read_text()
    assert (copy / "unused.py").exists()


def test_the_interpreter_of_the_proof_can_be_chosen(
    house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho it was me >&2\nexit 7\n")
    script.chmod(0o755)
    assert run(house, "alpha", "--into", tmp_path / "app", "--python", script) == 1
    assert capsys.readouterr().err == "error: importing the copy ended with exit code 7: it was me\n"


def test_no_tests(house: Path, tmp_path: Path) -> None:
    assert run(house, "alpha", "--into", tmp_path / "app", "--no-tests") == 0
    assert not (tmp_path / "app/alpha/tests").exists()
    assert run(house, "alpha", "--into", tmp_path / "app", "--check") == 0


def test_same_origin_same_bytes(house: Path, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        assert run(house, "alpha", "--into", tmp_path / folder) == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    before = tree(tmp_path / "one")
    assert run(house, "alpha", "--into", tmp_path / "one") == 0
    assert tree(tmp_path / "one") == before


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import separata_core.attention as a", "from ._core import attention as a"),
        ("import separata_core", "from . import _core as separata_core"),
        ("import os, separata_core as c", "import os\nfrom . import _core as c"),
        (
            "import separata_core.kernels.fused",
            "from . import _core as separata_core\nfrom ._core.kernels import fused as _separata_core_kernels_fused",
        ),
        (
            "from separata_core.attention import (\n    attend,  # why\n)",
            "from ._core.attention import (\n    attend,  # why\n)",
        ),
        ("from alpha import config", "from . import config"),
        ("import alpha.config as c", "from . import config as c"),
        (
            "try:\n    import separata_core.models as m\nexcept ImportError:\n    m = None",
            "try:\n    from ._core import models as m\nexcept ImportError:\n    m = None",
        ),
    ],
)
def test_forms_of_import(house: Path, write: Write, statement: str, expected: str) -> None:
    write(source(house, "."), {"form.py": f"{statement}\n"})
    written = tool.plan(Workspace.load(house), "alpha").files["form.py"].content.decode()
    assert written == f"{expected}\n"


def test_an_import_without_a_relative_form_is_refused(
    house: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(source(house, "."), {"form.py": "import alpha.config\n"})
    assert run(house, "alpha", "--into", tmp_path / "app") == 1
    assert "packages/alpha/src/alpha/form.py: `import alpha.config` has no relative form" in capsys.readouterr().err
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import alpha", "from x.y import alpha"),
        ("import alpha as a", "from x.y import alpha as a"),
        ("import alpha.config as c", "from x.y.alpha import config as c"),
        ("from alpha.config import Config", "from x.y.alpha.config import Config"),
        (
            "import separata_core.models",
            "from x.y.alpha import _core as separata_core\nfrom x.y.alpha._core import models as _separata_core_models",
        ),
        ('m.setattr("separata_core.models.layers", 1)', 'm.setattr("x.y.alpha._core.models.layers", 1)'),
        ('importlib.import_module("alpha")', 'importlib.import_module("x.y.alpha")'),
        ('label = "alpha"', 'label = "alpha"'),
        ('schema = "alpha/1"', 'schema = "alpha/1"'),
        ('run(["-m", "alpha", "show"])', 'run(["-m", "x.y.alpha", "show"])'),
        (
            'CODE = """\n    import alpha\n    print(alpha)\n"""',
            'CODE = """\n    from x.y import alpha\n    print(alpha)\n"""',
        ),
        ('code = f"import alpha; {x}"', 'code = f"from x.y import alpha; {x}"'),
        ('text = "please import alpha now"', 'text = "please import alpha now"'),
    ],
)
def test_forms_in_tests(house: Path, write: Write, statement: str, expected: str) -> None:
    write(house / "packages/alpha/tests", {"test_form.py": f"{statement}\n"})
    written = tool.plan(Workspace.load(house), "alpha", "x.y").files["tests/test_form.py"].content.decode()
    assert written == f"{expected}\n"


def test_rewriting_what_holds_no_import_of_ours_changes_no_byte() -> None:
    text = "import os  # a\r\n\r\nif  os :\r\n\tx = ( 1,)\r\n"
    rewriter = ImportRewriter(lambda name: None, {}, "x.py", (), "x", lambda name: False)
    assert libcst.parse_module(text.encode()).visit(rewriter).bytes == text.encode()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('op = torch.library.custom_op("alpha::scale", f)', "operator name 'alpha::scale'"),
        ('lib.define("separata_core::x(Tensor a) -> Tensor")', "operator name"),
        ('name = f"alpha::{x}"', "operator name 'alpha::'"),
        ('lib = torch.library.Library("alpha", "DEF")', "operator library 'alpha'"),
        ("y = torch.ops.alpha.scale(x)", "`torch.ops.alpha` names"),
        ('AttentionInterface.register("alpha_sdpa", f)', "registry key 'alpha_sdpa'"),
        ('m = importlib.import_module("separata_core.attention")', "loads the original by name"),
        ('text = files("alpha").joinpath("words.json")', "loads the original by name"),
    ],
)
def test_a_written_out_name_is_refused(
    house: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    write(source(house, "."), {"names.py": f"import torch\n\n{line}\n"})
    assert run(house, "alpha", "--into", tmp_path / "app") == 1
    message = capsys.readouterr().err
    assert message.startswith("error: packages/alpha/src/alpha/names.py:3: ")
    assert said in message
    assert message.count("\n") == 1
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize("line", ['x = "alphabet::x"', 'registry.register("plain", f)', "y = torch.ops.aten.add(x)"])
def test_names_of_others_are_not_refused(house: Path, write: Write, line: str) -> None:
    write(source(house, "."), {"names.py": f"def f(x, registry, torch):\n    {line}\n"})
    assert "names.py" in tool.plan(Workspace.load(house), "alpha").files


def test_a_copy_that_needs_the_original_is_not_written(
    house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Put together at run time, so that only the proof can notice.
    edit(source(house, "operator.py"), "def apply", 'attention = __import__("sep" + "arata_core")\n\n\ndef apply')
    assert run(house, "alpha", "--into", tmp_path / "app" / "deep", "--namespace", "a.b") == 1
    message = capsys.readouterr().err
    assert "not self-contained" in message
    assert "separata_core is blocked" in message
    assert not (tmp_path / "app").exists()


def test_a_copy_under_another_name_must_not_need_its_own_original(
    house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(source(house, "config.py"), "class Config", 'original = __import__("al" + "pha")\n\n\nclass Config')
    assert run(house, "alpha", "--into", tmp_path / "app", "--namespace", "a") == 1
    assert "alpha is blocked" in capsys.readouterr().err


def test_a_copy_that_fails_on_import_leaves_the_old_one(
    house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(house, "alpha", "--into", tmp_path / "app") == 0
    before = tree(tmp_path / "app")
    edit(source(house, "config.py"), "class Config", "1 / 0\n\n\nclass Config")
    for mode in ("--force", "--update"):
        assert run(house, "alpha", "--into", tmp_path / "app", mode) == 1
        assert "ZeroDivisionError" in capsys.readouterr().err
        assert tree(tmp_path / "app") == before


def test_a_package_whose_libraries_are_absent_cannot_be_proved(
    house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(source(house, "config.py"), "from importlib", "import a_library_that_nobody_has\nfrom importlib")
    assert run(house, "alpha", "--into", tmp_path / "app") == 1
    assert "needs a_library_that_nobody_has, not installed here" in capsys.readouterr().err


def test_a_folder_of_the_caller_does_not_leak_into_the_proof(
    house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_library_that_nobody_has.py").write_text("raise SystemExit('leaked')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run(house, "alpha", "--into", tmp_path / "app") == 0


def test_importing_another_package_is_refused(house: Path, write: Write) -> None:
    write(source(house, "."), {"more.py": "import beta\n"})
    with pytest.raises(VendorError, match=r"more.py:1: imports another package, beta"):
        tool.plan(Workspace.load(house), "alpha")


def test_importing_what_the_core_does_not_have_is_refused(house: Path, write: Write) -> None:
    write(source(house, "."), {"more.py": "import os\nfrom separata_core.nothing import x\n"})
    with pytest.raises(VendorError, match=r"more.py:2: imports separata_core.nothing, which does not exist"):
        tool.plan(Workspace.load(house), "alpha")


def test_a_package_that_is_nothing_without_the_models_is_refused(house: Path) -> None:
    edit(source(house, "config.py"), "from importlib", "import separata_embedded\nfrom importlib")
    with pytest.raises(VendorError, match="alpha itself imports alpha"):
        tool.plan(Workspace.load(house), "alpha")


@pytest.mark.parametrize("name", ["_core.py", "tests.py"])
def test_a_name_that_the_copy_needs_is_refused(house: Path, write: Write, name: str) -> None:
    write(source(house, "."), {name: "x = 1\n"})
    with pytest.raises(VendorError, match="its own use for the name"):
        tool.plan(Workspace.load(house), "alpha")


def test_a_package_without_a_licence_is_refused(house: Path) -> None:
    (house / "LICENSE").unlink()
    with pytest.raises(VendorError, match="no LICENSE"):
        tool.plan(Workspace.load(house), "alpha")


def test_unknown_package(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(house, "alhpa", "--into", tmp_path / "app") == 2
    assert capsys.readouterr().err == "error: unknown package 'alhpa'; did you mean 'alpha'?\n"
    assert run(house, "separata-embedded", "--into", tmp_path / "app") == 2


@pytest.mark.parametrize("namespace", ["a..b", "1a", "a.class", "a-b", "separata_core.x", "beta"])
def test_wrong_namespace(house: Path, tmp_path: Path, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(house, "alpha", "--into", tmp_path / "app", "--namespace", namespace) == 2
    assert repr(namespace) in capsys.readouterr().err
    assert not (tmp_path / "app").exists()


def test_a_folder_that_is_no_copy_is_never_overwritten(
    house: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "app/alpha", {"mine.py": "x = 1\n"})
    for force in ([], ["--force"]):
        assert run(house, "alpha", "--into", tmp_path / "app", *force) == 1
        assert "is not a copy made by this tool" in capsys.readouterr().err
    assert set(tree(tmp_path / "app")) == {"alpha/mine.py"}


@pytest.mark.parametrize("mode", ["--check", "--update"])
def test_without_a_copy(house: Path, tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(house, "alpha", "--into", tmp_path, mode) == 2
    assert "holds no copy of alpha" in capsys.readouterr().err
    assert run(house, "alpha", "--into", tmp_path, mode, "--namespace", "a.b") == 2
    assert MANIFEST in capsys.readouterr().err


def test_several_copies_need_a_namespace(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for namespace in ("a", "b"):
        assert run(house, "alpha", "--into", tmp_path / "app", "--namespace", namespace) == 0
    assert run(house, "alpha", "--into", tmp_path / "app", "--check") == 2
    assert "2 copies" in capsys.readouterr().err
    assert run(house, "alpha", "--into", tmp_path / "app", "--check", "--namespace", "b") == 0


def test_help_shows_an_example() -> None:
    done = subprocess.run(
        [sys.executable, str(workspace.ROOT / "tools/vendor.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert "python tools/vendor.py zerotuning --into" in done.stdout


def test_check_names_every_difference(
    house: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = tmp_path / "app"
    assert run(house, "alpha", "--into", into, "--namespace", "app") == 0
    assert run(house, "alpha", "--into", into, "--check") == 0
    copy = into / "app/alpha"
    edit(copy / "operator.py", "Config.gamma", "Config.gamma * 1")
    (copy / "words.json").unlink()
    write(copy, {"mine.py": "x = 1\n", "__pycache__/x.pyc": ""})
    edit(core(house, "kernels/fused.py"), '"""Runs."""', '"""Runs it."""')
    write(source(house, "."), {"fresh.py": "y = 1\n"})
    source(house, "cli.py").unlink()
    source(house, "demo.py").unlink()
    (house / "packages/alpha/tests/test_demo.py").unlink()
    capsys.readouterr()
    before = tree(into)
    assert run(house, "alpha", "--into", into, "--check") == 1
    # The demo itself was left out; what goes is its stand-in, which the command line asked for.
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "unknown: mine.py",
        "edited: operator.py",
        "missing: words.json",
        "behind: _core/kernels/fused.py",
        "behind: cli.py (gone from the origin)",
        "behind: demo.py (gone from the origin)",
        "behind: fresh.py (new in the origin)",
    ]
    assert tree(into) == before


def test_a_damaged_manifest_is_named(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(house, "alpha", "--into", tmp_path / "app") == 0
    manifest = tmp_path / "app/alpha" / MANIFEST
    for text, said in (("{", "is not JSON"), ("[]", "schema None"), ('{"schema": "separata.vendored/9"}', "/9")):
        manifest.write_text(text)
        assert run(house, "alpha", "--into", tmp_path / "app", "--check", "--namespace", "") == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [("distribution", None), ("namespace", 3), ("tests", "yes"), ("files", ["x"]), ("files", {"cli.py": {}})],
)
def test_a_manifest_with_a_damaged_entry_is_named(
    house: Path, tmp_path: Path, key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(house, "alpha", "--into", tmp_path / "app") == 0
    manifest = tmp_path / "app/alpha" / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), key: value}))
    for mode in ("--check", "--update", "--force"):
        before = tree(tmp_path)
        assert run(house, "alpha", "--into", tmp_path / "app", mode, "--namespace", "") == 1
        assert f"is damaged at {key!r}" in capsys.readouterr().err
        assert tree(tmp_path) == before


def test_refuses_a_target_that_is_a_file_and_an_interpreter_that_is_not_there(
    house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "app").write_text("mine")
    assert run(house, "alpha", "--into", tmp_path / "app") == 2
    assert "is not a folder" in capsys.readouterr().err
    assert run(house, "alpha", "--into", tmp_path / "new", "--python", "/no/python") == 2
    assert capsys.readouterr().err == "error: --python '/no/python' cannot be run: No such file or directory\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["app", "house"]


def test_refuses_edits_without_force(
    house: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = tmp_path / "app"
    assert run(house, "alpha", "--into", into) == 0
    edit(into / "alpha/config.py", "2.0", "5.0")
    write(into / "alpha", {"mine.py": "x = 1\n"})
    before = tree(into)
    assert run(house, "alpha", "--into", into) == 1
    message = capsys.readouterr().err
    assert "edited: config.py" in message
    assert "--force" in message
    assert tree(into) == before
    assert run(house, "alpha", "--into", into, "--force") == 0
    assert "2.0" in (into / "alpha/config.py").read_text()
    assert (into / "alpha/mine.py").read_text() == "x = 1\n"


def test_a_failing_rename_brings_the_old_copy_back(
    house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    into = tmp_path / "app"
    assert run(house, "alpha", "--into", into) == 0
    before = tree(into)
    edit(source(house, "config.py"), "2.0", "5.0")
    rename = Path.rename

    def full(self: Path, target: Path) -> Path:
        if self.parent.name.startswith(".vendoring-") and self.name == "alpha":
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    assert run(house, "alpha", "--into", into) == 1
    assert capsys.readouterr().err == "error: no space left\n"
    assert tree(into) == before


def test_a_run_killed_between_its_renames_is_healed_by_the_next(house: Path, tmp_path: Path) -> None:
    into = tmp_path / "app"
    assert run(house, "alpha", "--into", into) == 0
    edit(into / "alpha/config.py", "2.0", "5.0")
    aside = into / ".vendoring-alpha-x/old"
    aside.parent.mkdir()
    (into / "alpha").rename(aside)
    assert run(house, "alpha", "--into", into) == 1
    assert "5.0" in (into / "alpha/config.py").read_text()
    assert not aside.parent.exists()


@pytest.fixture
def copied(house: Path, tmp_path: Path) -> Path:
    assert run(house, "alpha", "--into", tmp_path / "app", "--namespace", "app") == 0
    return tmp_path / "app/app/alpha"


def update(house: Path, copied: Path) -> int:
    return run(house, "alpha", "--into", copied.parents[1], "--update")


def test_update_merges_both_sides(house: Path, copied: Path, write: Write) -> None:
    edit(copied / "operator.py", "len(json", "0 * len(json")
    write(copied, {"mine.py": "x = 1\n"})
    edit(source(house, "operator.py"), '"""The equations."""', '"""The equations, anew."""')
    edit(core(house, "internal/scale.py"), "2.0", "4.0")
    write(source(house, "."), {"fresh.py": "from alpha.config import Config\n"})
    source(house, "adapters/absent.py").unlink()
    assert update(house, copied) == 0
    text = (copied / "operator.py").read_text()
    assert "anew" in text
    assert "0 * len(json" in text
    assert (copied / "_core/internal/scale.py").read_text() == "SCALE = 4.0\n"
    assert (copied / "fresh.py").read_text() == "from .config import Config\n"
    assert not (copied / "adapters/absent.py").exists()
    assert (copied / "mine.py").exists()
    assert tool.check(copied, Workspace.load(house)) == ["unknown: mine.py", "edited: operator.py"]
    assert [path.name for path in copied.parents[1].iterdir()] == ["app"]


def test_update_leaves_marks_on_a_conflict(house: Path, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(copied / "config.py", "gamma = 2.0", "gamma = 5.0")
    edit(source(house, "config.py"), "gamma = 2.0", "gamma = 3.0")
    capsys.readouterr()
    assert update(house, copied) == 1
    assert capsys.readouterr().out == "conflict: config.py\n"
    text = (copied / "config.py").read_text()
    assert "<<<<<<< edited here\n    gamma = 5.0" in text
    assert "gamma = 3.0  # dimensionless\n>>>>>>> alpha 0.2.0" in text
    # Resolved by hand, the next update has nothing to do.
    (copied / "config.py").write_text(text.partition("<<<<<<<")[0] + "    gamma = 4.0\n")
    assert update(house, copied) == 0
    assert tool.check(copied, Workspace.load(house)) == ["edited: config.py"]


def test_update_of_a_clean_copy_equals_a_fresh_one(house: Path, copied: Path, tmp_path: Path) -> None:
    edit(source(house, "config.py"), "2.0", "3.0")
    assert update(house, copied) == 0
    assert run(house, "alpha", "--into", tmp_path / "new", "--namespace", "app") == 0
    assert tree(copied) == tree(tmp_path / "new/app/alpha")


def test_update_needs_no_history_but_its_base(house: Path, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / BASE).write_bytes(b"not a zip")
    before = tree(copied)
    assert update(house, copied) == 1
    assert "nothing to merge from" in capsys.readouterr().err
    (copied / BASE).write_bytes(tool._zip({"config.py": b"other"}))
    assert update(house, copied) == 1
    assert "does not agree with" in capsys.readouterr().err
    (copied / BASE).write_bytes(before[BASE])
    assert tree(copied) == before


A, B, C = b"a\n", b"b\n", b"c\n"


@pytest.mark.parametrize(
    ("edited", "base", "new", "merged", "conflicts"),
    [
        ({"f": A}, {"f": A}, {"f": B}, {"f": B}, 0),
        ({"f": B}, {"f": A}, {"f": A}, {"f": B}, 0),
        ({"f": B}, {"f": A}, {"f": B}, {"f": B}, 0),
        ({}, {"f": A}, {"f": A}, {}, 0),
        ({}, {"f": A}, {"f": B}, {"f": B}, 1),
        ({"f": A}, {"f": A}, {}, {}, 0),
        ({"f": B}, {"f": A}, {}, {"f": B}, 1),
        ({}, {"f": A}, {}, {}, 0),
        ({}, {}, {"f": A}, {"f": A}, 0),
        ({"f": A}, {}, {}, {"f": A}, 0),
        ({"f": A}, {}, {"f": A}, {"f": A}, 0),
        ({"f": b"\0a"}, {"f": b"\0b"}, {"f": b"\0c"}, {"f": b"\0a", "f.origin": b"\0c"}, 1),
    ],
)
def test_merge_of_trees(
    edited: dict[str, bytes], base: dict[str, bytes], new: dict[str, bytes], merged: dict[str, bytes], conflicts: int
) -> None:
    result, lines = tool.merge_trees(edited, base, new, "new")
    assert result == merged
    assert len(lines) == conflicts


@pytest.mark.parametrize("base", [{"f": A}, {}])
def test_merge_marks_both_versions(base: dict[str, bytes]) -> None:
    result, lines = tool.merge_trees({"f": B}, base, {"f": C}, "new 1.0")
    assert result["f"] == b"<<<<<<< edited here\nb\n=======\nc\n>>>>>>> new 1.0\n"
    assert lines == ["conflict: f"]


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this workspace, which nobody edits while the tests run."""
    root = tmp_path_factory.mktemp("snapshot")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(workspace.ROOT / name, root / name)
    for name in ("packages", "shared"):
        shutil.copytree(workspace.ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return root


@pytest.mark.parametrize("package", ["zerotuning"])
def test_a_copy_and_its_original_load_side_by_side(snapshot: Path, package: str, tmp_path: Path) -> None:
    into = tmp_path / "app"
    assert run(snapshot, package, "--into", into, "--namespace", "app") == 0
    assert run(snapshot, package, "--into", into, "--check") == 0
    for path in into.rglob("*.py"):
        found = {imported.top for imported in workspace.parse_imports(path.read_text(), "x")}
        assert "separata_core" not in found
    modules = json.loads((tmp_path / "app/app" / package / MANIFEST).read_text())
    # What needs embedded models is left out; in its place stands a module that says so.
    stubs = {name.removeprefix(f"{package}.") for name in modules["left_out"]}
    loaded = [
        entry.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for entry in modules["files"]
        if entry.endswith(".py") and not entry.startswith("tests/") and "__main__" not in entry
    ]
    # Operators and registry keys of the two would collide here; Triton's kernels are in these modules as well.
    code = f"""
        import importlib, sys
        for name in {loaded!r}:
            original = "separata" + name if name.startswith(("_core", "_kit")) else "{package}." + name
            for module in (original, "app.{package}." + name):
                try:
                    importlib.import_module(module.removesuffix(".__init__"))
                except ModuleNotFoundError as error:
                    if module.startswith("app.") and name in {stubs!r}:
                        assert "is not part of this copy" in str(error), error
                        continue
                    assert error.name and not error.name.startswith(("separata", "app", "{package}")), error
        print(sum(name.startswith("app.") for name in sys.modules))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path / "app",
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                f"{snapshot}/{folder}/src" for folder in ("shared/core", "shared/kit", f"packages/{package}")
            ),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > len(loaded) / 2
