import hashlib
import json
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from separata_kit import files

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    files.write_text(path, "old\r\n")
    link = tmp_path / "link"
    link.symlink_to(path)
    files.write_text(link, "new\r\n")
    assert path.read_bytes() == b"new\r\n"
    assert link.is_symlink()

    def fail(file):
        file.write_text("half")
        raise OSError("disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        files.write_atomically(path, fail)
    assert sorted(tmp_path.iterdir()) == [path, link]
    assert path.read_bytes() == b"new\r\n"


def test_a_link_that_leads_nowhere_yet(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "to")
    files.write_text(tmp_path / "link", "x")
    assert (tmp_path / "to").read_text() == "x"


def permissions(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("mode", "wanted"), [(0o600, 0o600), (0o666, 0o666), (None, 0o640)])
def test_permissions_hold_from_the_first_byte(tmp_path, mode, wanted):
    seen = []
    umask = os.umask(0o027)
    try:
        files.write_atomically(
            tmp_path / "key", lambda file: (seen.append(permissions(file)), file.write_text("secret")), mode=mode
        )
    finally:
        os.umask(umask)
    assert seen == [wanted]
    assert permissions(tmp_path / "key") == wanted


def test_permissions_of_an_earlier_file_do_not_stay(tmp_path):
    files.write_text(tmp_path / "key", "open")
    files.write_text(tmp_path / "key", "secret", mode=0o600)
    assert permissions(tmp_path / "key") == 0o600


def test_the_longest_names(tmp_path):
    path = tmp_path / ("ä" * 127)
    files.write_text(path, "x")
    assert path.read_text() == "x"


@pytest.mark.parametrize("act", [files.check_writable, lambda path: files.write_text(path, "x")])
def test_places_that_cannot_be_written(tmp_path, act):
    with pytest.raises(OSError, match="is a folder"):
        act(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"the folder of .*/no/a does not exist"):
        act(tmp_path / "no" / "a")
    (tmp_path / "link").symlink_to(tmp_path / "no" / "a")
    with pytest.raises(FileNotFoundError, match=r"the folder of .*/link does not exist"):
        act(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a device or the like"):
        act(tmp_path / "pipe")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_folder_without_permission_is_told(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("os.open", refuse)
    for act in (files.check_writable, lambda path: files.write_text(path, "x")):
        with pytest.raises(PermissionError, match=r"the folder of .* cannot be written to: Permission denied"):
            act(tmp_path / "a")


def test_a_writable_place_is_left_as_it_was(tmp_path):
    (tmp_path / "old").write_text("old")
    files.check_writable(tmp_path / "old")
    files.check_writable(tmp_path / "new")
    assert [each.name for each in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "old"


@settings(max_examples=25)
@given(value=PLAIN)
def test_json_comes_back(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "a.json"
    body = {"schema": "pack/thing", "version": 2, "value": value}
    if max(str(value), default="") >= "\ud800" and not str(value).isascii():
        body = json.loads(json.dumps(body))
    files.write_json(path, body)
    assert files.read_json(path, schema="pack/thing", version=2, what="thing") == body
    assert path.read_bytes().endswith(b"\n}\n")


def test_what_json_cannot_hold_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(tmp_path / "a", {"x": float("nan")})
    with pytest.raises(TypeError, match="not JSON serializable"):
        files.write_json(tmp_path / "a", {"x": {1, 2}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a complete JSON file"),
        ('{"schema": "pack/thing", "ver', "it may be truncated"),
        (b"\xff\xfe", "is not a complete JSON file"),
        ("[" * 100_000, "is not a complete JSON file"),
        ("[1]", "holds no JSON object"),
        ("{}", "is no thing: its 'schema' is not 'pack/thing'"),
        ('{"schema": "pack/other", "version": 1}', "is no thing"),
        ('{"schema": "pack/thing"}', "no valid 'version' .found None"),
        ('{"schema": "pack/thing", "version": true}', "no valid 'version' .found True"),
        ('{"schema": "pack/thing", "version": 0}', "no valid 'version' .found 0"),
        ('{"schema": "pack/thing", "version": 3}', "version 3; this pack reads up to version 2: install a newer one"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        files.read_json(path, schema="pack/thing", version=2, what="thing")
    assert str(caught.value).startswith(str(path))


def test_a_byte_order_mark_is_no_fault(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + b'{"schema": "pack/thing", "version": 1}')
    assert files.read_json(tmp_path / "a", schema="pack/thing", version=2, what="thing")["version"] == 1
    with pytest.raises(FileNotFoundError):
        files.read_json_object(tmp_path / "b")


def test_a_lock_keeps_others_out_until_the_file_is_closed(tmp_path):
    path = tmp_path / "a"
    with path.open("ab") as first, path.open("ab") as second:
        files.lock_file(first, path)
        with pytest.raises(OSError, match=r"/a is in use by another run; wait for it"):
            files.lock_file(second, path)
        first.close()
        files.lock_file(second, path)


def test_where_there_are_no_locks_there_is_no_error(tmp_path, monkeypatch):
    import fcntl

    def fail(*_):
        raise OSError("no locks available")

    with (tmp_path / "a").open("ab") as first, (tmp_path / "a").open("ab") as second:
        files.lock_file(first, tmp_path / "a")
        monkeypatch.setattr(fcntl, "flock", fail)
        files.lock_file(second, tmp_path / "a")
        monkeypatch.setitem(__import__("sys").modules, "fcntl", None)
        files.lock_file(second, tmp_path / "a")


def test_digest_and_versions():
    assert files.digest({"b": 1, "a": [2]}) == hashlib.sha256(b'{"a": [2], "b": 1}').hexdigest()
    assert files.digest({"a": [2], "b": 1}) == files.digest({"b": 1, "a": [2]}) != files.digest({"a": [2], "b": 2})
    with pytest.raises(TypeError):
        files.digest({1, 2})
    found = files.versions("pytest", "no-such-distribution")
    assert found["no-such-distribution"] == "unknown"
    assert found["pytest"] == pytest.__version__
