import errno
import json
import multiprocessing
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from separata_embedded import CacheError, cache, cache_directory
from separata_embedded.cache import MANIFEST, STAMP, cached_folder, existing_folder

ORIGIN = {"sha256": "abc", "dtype": "float32"}


def content_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (MANIFEST, STAMP)
    }


class Maker:
    """Writes two files and counts how often it had to."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.write

    @staticmethod
    def write(folder):
        (folder / "inner").mkdir()
        (folder / "inner" / "a.bin").write_bytes(b"a" * 5000)
        (folder / "b.json").write_text("{}")


EXPECTED = {"inner/a.bin": b"a" * 5000, "b.json": b"{}"}


@pytest.fixture
def maker():
    return Maker()


def make(maker, root, origin=ORIGIN):
    return cached_folder("thing", maker, origin=origin, cache_dir=root)


def others_than(root, *names):
    return sorted(path.name for path in root.iterdir() if path.name not in {*names, "thing.lock"})


def test_made_once_and_kept(maker, tmp_path):
    root = tmp_path / "not" / "there"
    folder = make(maker, root)
    assert content_of(folder) == EXPECTED
    assert make(maker, root) == folder == root / "thing"
    assert maker.calls == 1
    assert others_than(root) == ["thing"]


def test_manifest_tells_what_it_is_made_from(maker, tmp_path):
    manifest = json.loads((make(maker, tmp_path) / MANIFEST).read_text())
    assert manifest["origin"] == ORIGIN
    assert manifest["files"]["inner/a.bin"]["size"] == 5000
    assert manifest["made_with"]["torch"]


def test_existing_folder_makes_nothing(maker, tmp_path):
    assert existing_folder("thing", origin=ORIGIN, cache_dir=tmp_path / "empty") is None
    assert not (tmp_path / "empty").exists()
    folder = make(maker, tmp_path)
    assert existing_folder("thing", origin=ORIGIN, cache_dir=tmp_path) == folder


def test_another_origin_is_made_anew(maker, tmp_path):
    make(maker, tmp_path)
    make(maker, tmp_path, {**ORIGIN, "dtype": "bfloat16"})
    assert maker.calls == 2


def test_directory_by_argument_variable_and_default(tmp_path, monkeypatch):
    monkeypatch.setenv("SEPARATA_CACHE", str(tmp_path / "variable"))
    assert cache_directory(tmp_path / "argument") == tmp_path / "argument"
    assert cache_directory() == tmp_path / "variable"
    monkeypatch.setenv("SEPARATA_CACHE", "~/somewhere")
    assert cache_directory() == Path.home() / "somewhere"
    monkeypatch.setenv("SEPARATA_CACHE", "")
    assert cache_directory().name == "separata"
    assert cache_directory().is_absolute()
    monkeypatch.chdir(tmp_path)
    assert cache_directory("relative") == tmp_path / "relative"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "b.json").unlink(),
        lambda folder: (folder / "b.json").write_text(""),
        lambda folder: os.truncate(folder / "inner" / "a.bin", 4999),
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_text('{"format": 1, "orig'),
        lambda folder: (folder / MANIFEST).write_text("[]"),
        lambda folder: (folder / MANIFEST).write_text('{"format": 1}'),
        lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe"),
        lambda folder: (folder / MANIFEST).write_text(json.dumps({"format": 1, "origin": ORIGIN, "files": [1]})),
    ],
)
def test_damage_is_found_and_mended(maker, tmp_path, damage, caplog):
    damage(make(maker, tmp_path))
    assert existing_folder("thing", origin=ORIGIN, cache_dir=tmp_path) is None
    assert content_of(make(maker, tmp_path)) == EXPECTED
    assert maker.calls == 2
    assert caplog.text.count("made anew") == 1


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(position=st.integers(0, 4999), value=st.integers(0, 255).filter(lambda value: value != ord("a")))
def test_any_altered_byte_is_found(tmp_path_factory, position, value):
    root, maker = tmp_path_factory.mktemp("altered"), Maker()
    path = make(maker, root) / "inner" / "a.bin"
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([value]))
    assert content_of(make(maker, root)) == EXPECTED
    assert maker.calls == 2


def test_a_file_where_the_folder_should_be_is_replaced(maker, tmp_path):
    (tmp_path / "thing").write_text("in the way")
    assert content_of(make(maker, tmp_path)) == EXPECTED


def test_files_are_hashed_only_when_touched(maker, tmp_path, monkeypatch):
    folder = make(maker, tmp_path)
    hashed = []
    real = cache.sha256_of
    monkeypatch.setattr(cache, "sha256_of", lambda path: hashed.append(path.name) or real(path))
    make(maker, tmp_path)
    assert hashed == []
    os.utime(folder / "b.json", ns=(1, 1))
    make(maker, tmp_path)
    make(maker, tmp_path)
    assert hashed == ["b.json"]
    (folder / STAMP).write_text("[]")
    make(maker, tmp_path)
    assert sorted(hashed) == ["a.bin", "b.json", "b.json"]
    assert maker.calls == 1


def test_a_failing_preparation_leaves_nothing_and_is_not_a_cache_error(tmp_path):
    def prepare():
        raise OSError("the source is broken")

    with pytest.raises(OSError, match="the source is broken"):
        cached_folder("thing", prepare, origin=ORIGIN, cache_dir=tmp_path)
    assert others_than(tmp_path) == []


def test_directory_of_an_unknown_user(monkeypatch):
    monkeypatch.setenv("SEPARATA_CACHE", "~no-such-user-here/cache")
    with pytest.raises(CacheError, match="~no-such-user-here/cache begins with a home directory that is not known"):
        cache_directory()


def test_looking_into_a_damaged_folder_promises_nothing(maker, tmp_path, caplog):
    folder = make(maker, tmp_path)
    (folder / "b.json").write_text("[1]")
    assert existing_folder("thing", origin=ORIGIN, cache_dir=tmp_path) is None
    assert not caplog.text
    assert (folder / "b.json").read_text() == "[1]"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), PermissionError(13, "Denied")])
def test_an_error_while_writing_names_directory_and_override(maker, tmp_path, error):
    def write(folder):
        (folder / "half").write_bytes(b"half")
        raise error

    with pytest.raises(CacheError) as caught:
        cached_folder("thing", lambda: write, origin=ORIGIN, cache_dir=tmp_path)
    for part in (str(tmp_path), "SEPARATA_CACHE", "cache_dir", error.strerror):
        assert part in str(caught.value)
    assert others_than(tmp_path) == []
    assert content_of(make(maker, tmp_path)) == EXPECTED


def test_interruption_by_keyboard_leaves_nothing(tmp_path):
    def write(folder):
        (folder / "half").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("thing", lambda: write, origin=ORIGIN, cache_dir=tmp_path)
    assert others_than(tmp_path) == []


def test_directory_below_a_regular_file(maker, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"SEPARATA_CACHE"):
        make(maker, tmp_path / "file" / "cache")
    assert maker.calls == 0


def in_a_child(function, *arguments):
    """Run a function in a forked process and return what it returned or raised, as text."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def body():
        try:
            sender.send(repr(function(*arguments)))
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=body)
    process.start()
    assert receiver.poll(30)
    answer = receiver.recv()
    process.join()
    return answer


def without_rights(function, *arguments):
    if os.geteuid() == 0:  # permission bits do not bind root
        os.setgid(65534)
        os.setuid(65534)
    return function(*arguments)


@pytest.fixture
def open_to_all():
    """A folder that an unprivileged user reaches: pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="separata-test-"))
    if not all(parent.stat().st_mode & stat.S_IXOTH for parent in folder.parents):
        folder.rmdir()
        pytest.skip("the directory for temporary files is closed to unprivileged users")
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_read_only_directory(maker, open_to_all):
    import filelock  # noqa: F401 - the child may not be allowed to read it from disk

    root = open_to_all / "read-only"
    root.mkdir()
    root.chmod(0o555)
    try:
        answer = in_a_child(without_rights, make, maker, root)
    finally:
        root.chmod(0o755)
    assert answer.startswith("CacheError: Cannot write to the cache directory")
    assert str(root) in answer
    assert "SEPARATA_CACHE" in answer
    assert list(root.iterdir()) == []


def test_a_complete_cache_serves_from_a_read_only_directory(maker, open_to_all):
    root = open_to_all / "read-only"
    folder = make(maker, root)
    os.utime(folder / "b.json", ns=(1, 1))  # asks for a new stamp, which cannot be written
    for path in (folder, root):
        path.chmod(0o555)
    try:
        answer = in_a_child(without_rights, make, maker, root)
    finally:
        for path in (root, folder):
            path.chmod(0o755)
    assert answer == repr(folder)
    assert content_of(folder) == EXPECTED


def limited(root):
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    return make(Maker(), root)


def test_real_write_error_of_the_system(tmp_path):
    answer = in_a_child(limited, tmp_path)
    assert answer.startswith("CacheError: Cannot write to the cache directory")
    assert others_than(tmp_path) == []


def limited_safetensors(root):
    import torch
    from separata_embedded.smollm2 import write_tensors

    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    state = {"weight": torch.zeros(10_000)}
    return cached_folder("thing", lambda: lambda folder: write_tensors(state, folder), origin=ORIGIN, cache_dir=root)


def test_safetensors_on_a_full_disk_is_a_cache_error(tmp_path):
    import safetensors.torch  # noqa: F401 - before the fork, so that the child does not spend time on it

    answer = in_a_child(limited_safetensors, tmp_path)
    assert answer.startswith("CacheError: Cannot write to the cache directory")
    assert "too large" in answer
    assert others_than(tmp_path) == []


CHILD = """
import os, signal, sys, time
from pathlib import Path
from separata_embedded import cache

root, point = Path(sys.argv[1]), sys.argv[2]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name):
    real = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **more: die())

def after(owner, name):
    real = getattr(owner, name)
    def replaced(*arguments, **more):
        real(*arguments, **more)
        die()
    setattr(owner, name, replaced)

def write(folder):
    (folder / "inner").mkdir()
    with (folder / "inner" / "a.bin").open("wb") as file:
        file.write(b"a" * 2500)
        if point == "half a file":
            file.flush()
            die()
        file.write(b"a" * 2500)
    (folder / "b.json").write_text("{}")
    if point == "slowly":
        time.sleep(0.3)

def prepare():
    with (root / "prepared").open("ab") as file:
        file.write(b"x")
    if point == "before the first file":
        die()
    return write

if point == "before the manifest":
    before(cache, "_write_manifest")
elif point == "after the manifest":
    after(cache, "_write_manifest")
elif point == "before the rename":
    before(Path, "rename")
elif point == "after the rename":
    after(Path, "rename")
elif point == "while removing a damaged one":
    after(os, "unlink")
while point == "slowly" and time.time() < float(sys.argv[3]):
    time.sleep(0.001)
cache.cached_folder("thing", prepare, origin={"sha256": "abc", "dtype": "float32"}, cache_dir=root)
"""


def start_child(root, point, *more):
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(CHILD), str(root), point, *map(str, more)])


@pytest.mark.parametrize(
    ("point", "complete"),
    [
        ("before the first file", False),
        ("half a file", False),
        ("before the manifest", False),
        ("after the manifest", False),
        ("before the rename", False),
        ("after the rename", True),
    ],
)
def test_killed_at(tmp_path, maker, point, complete):
    child = start_child(tmp_path, point)
    assert child.wait(30) == -9
    assert (existing_folder("thing", origin=ORIGIN, cache_dir=tmp_path) is not None) == complete
    assert (tmp_path / "thing").exists() == complete
    assert content_of(make(maker, tmp_path)) == EXPECTED
    assert maker.calls == (0 if complete else 1)
    assert others_than(tmp_path, "prepared") == ["thing"]


def test_killed_while_removing_a_damaged_folder(tmp_path, maker):
    (make(maker, tmp_path) / "b.json").unlink()
    assert start_child(tmp_path, "while removing a damaged one").wait(30) == -9
    assert content_of(make(maker, tmp_path)) == EXPECTED
    assert others_than(tmp_path) == ["thing"]


def test_four_processes_at_once_make_it_once(tmp_path):
    start = time.time() + 1.0
    children = [start_child(tmp_path, "slowly", start) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0, 0, 0, 0]
    assert (tmp_path / "prepared").read_bytes() == b"x"
    assert content_of(tmp_path / "thing") == EXPECTED
    assert others_than(tmp_path, "prepared") == ["thing"]


def test_a_lock_that_is_held_too_long(tmp_path, maker, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    with FileLock(tmp_path / "thing.lock"), pytest.raises(CacheError, match=r"thing\.lock .*SEPARATA_CACHE"):
        make(maker, tmp_path)
    assert content_of(make(maker, tmp_path)) == EXPECTED
