"""Results of a long run, each on the disk before the next is begun, so that it continues where it stopped."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from separata_kit.files import digest, lock_file, refuse_special

Kind = TypeVar("Kind", bound="Journal")


class Journal:
    """Rows by key in a JSON Lines file that is only appended to.

    The first line says which run the file belongs to. A last line that was cut off by a crash is dropped, and other
    runs are kept out while one has the file open. Rows are what JSON makes of them, the same before and after a crash.

    A subclass that has lines of its own gives `encode` and `decode`.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, header: Mapping[str, Any], *, schema: str, version: int, what: str
    ) -> None:
        """Prepare; the file is touched by `with` only.

        Args:
            path: The file, or None to keep rows in memory.
            header: What the results depend on, as JSON: rows are continued only where it is the same.
            schema: Kind of the file: the package's name, a slash, and the kind.
            version: Version of its lines; no other one is continued.
            what: What the file is, for messages: `"file of calibration points"`.

        Raises:
            TypeError: JSON cannot hold the header.
            ValueError: The header holds a number that is not finite.
        """
        self.path = None if path is None else Path(path)
        self._header = _plain({"schema": schema, "version": version, **header})
        self._what = what
        self._rows: dict[str, dict[str, Any]] = {}
        self._file: Any = None

    def __enter__(self: Kind) -> Kind:
        """Read what is there and open the file for appending.

        Raises:
            ValueError: It is another kind of file, belongs to another run or version, or a line is damaged.
            OSError: The file cannot be read or written, or another run has it open.
        """
        if self.path is None:
            return self
        try:
            self.take(self.open())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def open(self) -> bytes:
        """Open and lock the file.

        Returns:
            What it holds.

        Raises:
            OSError: It cannot be read or written, or another run has it open.
        """
        assert self.path is not None
        refuse_special(self.path)
        self._file = self.path.open("a+b", buffering=0)
        lock_file(self._file, self.path)
        self._file.seek(0)
        content: bytes = self._file.readall()
        return content

    def take(self, content: bytes) -> None:
        """Take over what a file holds; of the process that has the file open, mend its end too.

        Args:
            content: What `open` returned.

        Raises:
            ValueError: As for `__enter__`.
        """
        whole = content[: content.rfind(b"\n") + 1]
        # Without a line of its own it must be the beginning of ours.
        lines = whole.splitlines() or ([] if _line(self._header).startswith(content) else [content])
        for number, line in enumerate(lines, start=1):
            self._read(number, line)
        if self._file is not None:
            self._file.truncate(len(whole))
            if not whole:
                self._write(self._header)

    def __contains__(self, key: object) -> bool:
        """Whether there is a row of that key."""
        return key in self._rows

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        """The keys, in the order in which their rows were appended."""
        return iter(self._rows)

    def get(self, key: str) -> dict[str, Any] | None:
        """A row.

        Args:
            key: Its key.

        Returns:
            The row, or None where there is none.
        """
        return self._rows.get(key)

    def rows(self) -> list[dict[str, Any]]:
        """All rows, in the order in which they were appended.

        Returns:
            One row for each key.
        """
        return list(self._rows.values())

    def append(self, key: str, row: Mapping[str, Any]) -> None:
        """Keep a row, on the disk before this returns.

        Args:
            key: Its key; an earlier row of the same key is forgotten.
            row: The row, as JSON.

        Raises:
            TypeError: JSON cannot hold the row.
            ValueError: It holds a number that is not finite, or the file is not open (`with` opens it).
            OSError: It cannot be written; nothing of it is left in the file then.
        """
        try:
            plain = _plain(row)
        except ValueError as error:
            raise ValueError(f"the row {key!r} of the {self._what} cannot be kept: {error}") from None
        self.write(self.encode(key, plain))
        self._rows.pop(key, None)
        self._rows[key] = plain

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line, on the disk before this returns; nothing where rows are kept in memory.

        Args:
            record: The line's object.

        Raises:
            ValueError: The file is not open.
            OSError: It cannot be written.
        """
        if self.path is None:
            return
        if self._file is None:
            raise ValueError(f"{self.path} is not open; open the journal by `with`")
        self._write(record)

    def encode(self, key: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """The object of a row's line.

        Args:
            key: The row's key.
            row: The row.

        Returns:
            What `decode` takes apart.
        """
        record = {"id": key, "row": row}
        return {**record, "sha256": digest(record)[:16]}

    def decode(self, record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """What the object of a line holds.

        Args:
            record: The object.

        Returns:
            The key and the row.

        Raises:
            KeyError, TypeError, ValueError: It is damaged.
        """
        # Lines of the first releases have none.
        if record.pop("sha256", digest(record)[:16]) != digest(record)[:16]:
            raise ValueError("it was altered")
        return str(record["id"]), {**record["row"]}

    def _read(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            if number > 1:
                key, row = self.decode(record)
                self._rows.pop(key, None)
                self._rows[key] = row
                return
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if number > 1:
                raise ValueError(
                    f"{self.path}, line {number}, is damaged or was altered; give another file, or delete it to start "
                    "anew"
                ) from None
            record = None
        if not isinstance(record, dict) or record.get("schema") != self._header["schema"]:
            raise ValueError(f"{self.path} is no {self._what}; it is left as it is")
        if record.get("version") != self._header["version"]:
            raise ValueError(
                f"{self.path} has version {record.get('version')!r} of a {self._what}, and this "
                f"{self._header['schema'].partition('/')[0]} continues version {self._header['version']}: give another "
                "file, or delete it"
            )
        wrong = sorted(key for key in {*record, *self._header} if record.get(key) != self._header.get(key))
        if wrong:
            raise ValueError(
                f"{self.path} was made for another run (different {', '.join(wrong)}); give another file, or delete it"
            )

    def _write(self, record: Mapping[str, Any]) -> None:
        end = self._file.seek(0, os.SEEK_END)
        line = _line(record)
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except BaseException:
            # Half a line would spoil the next one.
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps({**value}, allow_nan=False))
    return plain


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
