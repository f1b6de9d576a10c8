# ruff: noqa: D102  # the tests of a suite say by their names what they check
"""A file is read back as it was written, and refused in one stated way when it is damaged, newer or of another kind."""

import errno
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest

# What people and programs really put where a file of another kind is expected, and what breaks parsers.
_WRONG_CONTENT = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "object": b"{}",
    "number": b"3",
    "huge number": b'{"version": 1e999}',
    "string": b'"text"',
    "prose": b"Une phrase, tout simplement.\n",
    "pickle": b"\x80\x04}\x94.",
    "zip": b"PK\x03\x04" + bytes(60),
    "zeros": bytes(64),
    "no UTF-8": b"\xff\xfe{\x00}\x00",
    "deeply nested": b"[" * 200_000,
    "length that lies": struct.pack("<Q", 2**60) + b"{}",
}


class FileFormat:
    """Tests for a pair of functions that save to a file, or to a folder of files, and load.

    Attributes:
        error: The one exception type for a file that cannot be used. Its message names the file.
        file_name: Of the file or folder that is saved.
        version_key: Name of the field that holds the format's version, a whole number: in the top object of a JSON file
            or of the first line of a JSON Lines file, or in the metadata of a safetensors file.
        detects_alteration: Whether a changed byte is always noticed, as with a checksum. Otherwise a changed file may
            load, but may not raise anything besides `error`.
    """

    error: type[Exception]
    file_name = "saved.json"
    version_key = "version"
    detects_alteration = True

    def example(self) -> Any:
        """Hook, required: an object to save."""
        raise NotImplementedError("example() must return an object that save() takes")

    def save(self, value: Any, path: Path) -> None:
        """Hook, required: saves the object."""
        raise NotImplementedError("save(value, path) must write the object")

    def load(self, path: Path) -> Any:
        """Hook, required: loads the object."""
        raise NotImplementedError("load(path) must read the object")

    def equal(self, first: Any, second: Any) -> bool:
        """Hook: whether two objects are the same. By default `==`."""
        return bool(first == second)

    def make_newer(self, path: Path) -> int:
        """Hook: rewrites a saved file as if by a later version of the program.

        Args:
            path: The file or folder that `save` wrote.

        Returns:
            The version that now stands in it.
        """
        file = self._files(path)[0]
        if file.suffix == ".safetensors":
            data = file.read_bytes()
            (length,) = struct.unpack("<Q", data[:8])
            header = json.loads(data[8 : 8 + length])
            newer = int(header["__metadata__"][self.version_key]) + 1
            header["__metadata__"][self.version_key] = str(newer)
            changed = json.dumps(header).encode()
            file.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + length :])
            return newer
        text = file.read_text("utf-8")
        head, rest = text, ""
        if file.suffix == ".jsonl":
            head, _, rest = text.partition("\n")
        top = json.loads(head)
        top[self.version_key] += 1
        file.write_text(json.dumps(top) + "\n" + rest, "utf-8")
        return int(top[self.version_key])

    def _files(self, path: Path) -> list[Path]:
        return sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]

    def _saved(self, folder: Path) -> Path:
        path = folder / self.file_name
        self.save(self.example(), path)
        return path

    def _assert_refused(self, path: Path, what: str, *, may_load: bool = False) -> None:
        """Fails unless loading raises the stated error, or (always allowed) gives back the very object saved."""
        try:
            loaded = self.load(path)
        except self.error as error:
            if not any(part.name in str(error) for part in (path, *self._files(path))):
                raise AssertionError(f"{what}: the message does not name the file: {error}") from error
        except Exception as error:
            raise AssertionError(
                f"{what}: raises {type(error).__name__} ({error}) instead of {self.error.__name__}"
            ) from error
        else:
            # A lost line break at the end, say, loses nothing.
            assert may_load or self.equal(loaded, self.example()), f"{what}: loads as something else, without an error"

    def test_round_trip(self, tmp_path: Path) -> None:
        assert self.equal(self.load(self._saved(tmp_path)), self.example())

    def test_saving_twice_gives_the_same_bytes(self, tmp_path: Path) -> None:
        written = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            path = self._saved(tmp_path / name)
            written.append({str(file.relative_to(path)): file.read_bytes() for file in self._files(path)})
        assert written[0] == written[1]

    def test_saving_over_an_older_file(self, tmp_path: Path) -> None:
        self._saved(tmp_path)
        path = self._saved(tmp_path)
        assert self.equal(self.load(path), self.example())
        assert [item.name for item in tmp_path.iterdir()] == [self.file_name], "something is left beside the file"

    def test_truncated(self, tmp_path: Path) -> None:
        path = self._saved(tmp_path)
        for file in self._files(path):
            data = file.read_bytes()
            size = len(data)
            # Nothing, inside the header, every part of the body, and all but the end.
            lengths = {0, 1, 2, 7, 8, 9, size // 8, size // 4, size // 2, size * 3 // 4, size - 9, size - 2, size - 1}
            lengths |= {index + 1 for index in range(size) if data[index : index + 1] == b"\n"}
            for length in sorted(lengths & set(range(size))):
                file.write_bytes(data[:length])
                self._assert_refused(path, f"{file.name} cut to {length} of {size} bytes")
            file.write_bytes(data)

    def test_altered(self, tmp_path: Path) -> None:
        path = self._saved(tmp_path)
        for file in self._files(path):
            data = file.read_bytes()
            places = range(len(data)) if len(data) <= 256 else [*range(96), *range(96, len(data), len(data) // 160 + 1)]
            for place in places:
                for flip in (0x01, 0x80):
                    changed = bytearray(data)
                    changed[place] ^= flip
                    file.write_bytes(changed)
                    what = f"{file.name} with byte {place} changed from {data[place]:#04x} to {changed[place]:#04x}"
                    self._assert_refused(path, what, may_load=not self.detects_alteration)
            file.write_bytes(data)

    def test_with_something_appended(self, tmp_path: Path) -> None:
        path = self._saved(tmp_path)
        for file in self._files(path):
            data = file.read_bytes()
            for tail in (b"{", b"\x00", data):
                file.write_bytes(data + tail)
                self._assert_refused(path, f"{file.name} with {tail[:9]!r} appended")
            file.write_bytes(data)

    def test_newer_version(self, tmp_path: Path) -> None:
        path = self._saved(tmp_path)
        newer = self.make_newer(path)
        with pytest.raises(self.error) as caught:
            self.load(path)
        message = str(caught.value).replace(str(path.parent), "")  # its name could hold the words looked for
        assert re.search(rf"\b{newer}\b", message), f"the message does not name version {newer}: {message}"
        assert "version" in message.lower(), f"the message does not say that it is about the version: {message}"

    @pytest.mark.parametrize("content", _WRONG_CONTENT.values(), ids=_WRONG_CONTENT.keys())
    def test_something_else(self, tmp_path: Path, content: bytes) -> None:
        path = self._saved(tmp_path)
        for file in self._files(path):
            data = file.read_bytes()
            file.write_bytes(content)
            with pytest.raises(self.error):
                self.load(path)
            file.write_bytes(data)

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises((self.error, FileNotFoundError), match="nothing-here"):
            self.load(tmp_path / f"nothing-here{Path(self.file_name).suffix}")

    def test_missing_part(self, tmp_path: Path) -> None:
        path = self._saved(tmp_path)
        for file in self._files(path):
            data = file.read_bytes()
            file.unlink()
            with pytest.raises((self.error, FileNotFoundError)):
                self.load(path)
            file.write_bytes(data)

    def test_folder_in_place_of_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / self.file_name
        path.mkdir()
        with pytest.raises((self.error, OSError)):
            self.load(path)

    def test_failed_save_leaves_the_older_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is saved reaches its name by renaming: a full disk or a kill before it leaves what was there."""
        path = self._saved(tmp_path)

        def full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            patch.setattr(os, "rename", full)
            with pytest.raises((self.error, OSError)):
                self.save(self.example(), path)
        assert self.equal(self.load(path), self.example())
        assert [item.name for item in tmp_path.iterdir()] == [self.file_name], "a failed save leaves something behind"
