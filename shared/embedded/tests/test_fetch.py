import hashlib
import importlib.util
import os
import sys
import textwrap
import time
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest
from separata_embedded import FetchError, IntegrityError, fetch
from separata_embedded.files import KnownFile


@pytest.fixture
def no_client(monkeypatch, tmp_path):
    """An environment without pip and uv; a client can be put into the folder that it returns."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


@pytest.fixture
def pretend_client(no_client, monkeypatch):
    interpreter = os.path.realpath("/proc/self/exe") if os.path.exists("/proc/self/exe") else sys._base_executable

    def put(code, name="pip"):
        path = no_client / name
        path.write_text(f"#!{interpreter}\nimport os, sys, time\n{textwrap.dedent(code)}")
        path.chmod(0o755)
        return path

    return put


def test_no_client(no_client):
    with pytest.raises(FetchError, match="neither pip nor uv is at hand"):
        fetch.fetch_sdist(5)


def test_what_the_client_delivers(pretend_client):
    pretend_client("""
        folder = sys.argv[sys.argv.index("--dest") + 1]
        open(os.path.join(folder, "vaderSentiment-0.5.zip"), "w").write(" ".join(sys.argv[1:]))
    """)
    arguments = fetch.fetch_sdist(5).decode()
    assert arguments.startswith("download ")
    assert "--require-hashes" in arguments
    assert "--no-deps" in arguments


def test_client_that_fails(pretend_client):
    pretend_client("print('Collecting'); print('ERROR: no matching distribution'); print('after'); sys.exit(3)")
    with pytest.raises(FetchError, match=r"exit code 3: ERROR: no matching distribution$"):
        fetch.fetch_sdist(5)


def test_client_that_succeeds_without_a_file(pretend_client):
    pretend_client("print('done')")
    with pytest.raises(FetchError, match="exit code 0: done"):
        fetch.fetch_sdist(5)


def test_client_that_finds_another_hash(pretend_client):
    pretend_client("print('ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.'); sys.exit(1)")
    with pytest.raises(IntegrityError, match="5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a"):
        fetch.fetch_sdist(5)


def test_a_client_that_hangs_is_ended_with_its_children(pretend_client, tmp_path):
    marker = tmp_path / "child"
    pretend_client(f"""
        child = os.fork()
        if child == 0:
            time.sleep(60)
        open({str(marker)!r}, "w").write(str(child))
        time.sleep(60)
    """)
    start = time.monotonic()
    with pytest.raises(FetchError, match="took more than 2 seconds"):
        fetch.fetch_sdist(2)
    assert time.monotonic() - start < 20
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and is_running(int(marker.read_text())):
        time.sleep(0.02)
    assert not is_running(int(marker.read_text()))


def is_running(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_uv_is_found_and_its_index_goes_along(pretend_client):
    uv = str(pretend_client("", name="uv"))
    command, environment = fetch._client(
        {
            "UV_DEFAULT_INDEX": "https://mirror.invalid/simple",
            "UV_INDEX": "own=https://own.invalid/simple?a=b https://other.invalid/simple",
            "HTTPS_PROXY": "http://proxy.invalid",
        }
    )
    assert command == [uv, "tool", "run", "pip"]
    assert environment["PIP_INDEX_URL"] == "https://mirror.invalid/simple"
    assert environment["PIP_EXTRA_INDEX_URL"] == "https://own.invalid/simple?a=b https://other.invalid/simple"
    assert environment["HTTPS_PROXY"] == "http://proxy.invalid"


def test_settings_of_pip_itself_win(pretend_client):
    pretend_client("", name="uv")
    _, environment = fetch._client({"UV_INDEX_URL": "https://a.invalid", "PIP_INDEX_URL": "https://b.invalid"})
    assert environment["PIP_INDEX_URL"] == "https://b.invalid"


def test_the_uv_that_runs_us_is_taken_first(pretend_client):
    pretend_client("", name="uv")
    other = str(pretend_client("", name="other-uv"))
    assert fetch._client({"UV": other})[0][0] == other
    assert fetch._client({"UV": str(Path(other).with_name("gone"))})[0][0].endswith("/uv")


@pytest.fixture
def real_pip(monkeypatch):
    """A real pip that asks no index: the installed one, or the one that Python carries."""
    if importlib.util.find_spec("pip") is None:
        folder = files("ensurepip") / "_bundled"
        bundled = [path for path in folder.iterdir() if path.name.startswith("pip-")] if folder.is_dir() else []
        if not bundled:
            pytest.skip("neither pip nor the copy of it that Python carries is here")
        monkeypatch.syspath_prepend(str(bundled[0]))
        monkeypatch.setenv("PYTHONPATH", str(bundled[0]))
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def make_sdist(folder, marker):
    path = folder / "vaderSentiment-0.5.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("vaderSentiment-0.5/setup.py", f"open({str(marker)!r}, 'w')\n")
        file.writestr("vaderSentiment-0.5/PKG-INFO", "Metadata-Version: 1.0\nName: vaderSentiment\nVersion: 0.5\n")
    return path.read_bytes()


def test_real_pip_delivers_the_file_and_its_setup_never_runs(real_pip, monkeypatch, tmp_path):
    content = make_sdist(tmp_path, tmp_path / "setup-ran")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(fetch, "ARCHIVE", KnownFile(len(content), hashlib.sha256(content).hexdigest()))
    assert fetch.fetch_sdist(60) == content
    assert not (tmp_path / "setup-ran").exists()


def test_real_pip_refuses_another_hash(real_pip, monkeypatch, tmp_path):
    make_sdist(tmp_path, tmp_path / "setup-ran")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(IntegrityError, match="another file"):
        fetch.fetch_sdist(60)
    assert not (tmp_path / "setup-ran").exists()


def test_real_pip_without_the_file(real_pip):
    with pytest.raises(FetchError, match=r"ERROR: No matching distribution found for vaderSentiment==0\.5"):
        fetch.fetch_sdist(60)
