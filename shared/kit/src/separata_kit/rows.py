"""Rows of data files, and what lies in their columns."""

import csv
import json
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from separata_kit import extras

Rows = Iterator[tuple[str, Mapping[str, Any]]]


def read_rows(
    source: str | os.PathLike[str] | Iterable[Any], *, extra: str | None = None, text_column: str = "text"
) -> Rows:
    """The rows of a file, or of a table in memory, one after the other.

    Args:
        source: A `.csv` (with a header), `.jsonl`, `.ndjson`, `.txt` (a row for each line that is not blank) or
            `.parquet` file; texts are UTF-8. Or mappings of columns, such as a `datasets.Dataset`.
        extra: What brings pyarrow for `.parquet`, such as `"zerotuning[data]"`.
        text_column: The column that a line of a `.txt` becomes.

    Yields:
        Where the row stands, for messages, and its columns.

    Raises:
        ValueError: Another kind of file, one that cannot be read as what it says it is, or a row that is no mapping;
            the place is named.
        ImportError: A `.parquet` file without pyarrow.
        OSError: The file cannot be opened.
    """
    if not isinstance(source, str | os.PathLike):
        yield from _given_rows(source)
        return
    path = Path(source)
    kind = path.suffix.lower()
    if kind == ".parquet":
        yield from _parquet_rows(path, extra)
        return
    read: Callable[[Path, Iterable[str]], Iterator[tuple[int, Mapping[str, Any]]]]
    if kind == ".csv":
        read = _csv_rows
    elif kind in (".jsonl", ".ndjson"):
        read = _json_rows
    elif kind == ".txt":

        def read(_: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, {text_column: line.rstrip("\r\n")}
    else:
        raise ValueError(f"{path} must end in .jsonl, .csv, .txt or .parquet")
    try:
        # Spreadsheets put a byte order mark before UTF-8.
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, row in read(path, file):
                yield f"{path}, line {line}", row
    except UnicodeDecodeError as error:
        # Where it stands is not told: the error counts from the beginning of a block.
        byte = error.object[error.start]
        raise ValueError(f"{path} is not UTF-8 (byte 0x{byte:02x}: {error.reason}); convert it") from None


def _given_rows(source: Iterable[Any]) -> Rows:
    for number, row in enumerate(source):
        if not isinstance(row, Mapping):
            raise ValueError(f"row {number} is a {type(row).__name__}; it must be a mapping of columns")  # noqa: TRY004  # as for files
        yield f"row {number}", row


def _csv_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    # Strict, or all that follows a quote that is not closed would be one cell.
    reader = csv.DictReader(lines, strict=True)
    try:
        for row in reader:
            if None in row:
                # A text with commas and no quotes, of which only the beginning would be taken.
                raise ValueError(
                    f"{path}, line {reader.line_num}: more cells than the {len(reader.fieldnames or ())} of the "
                    "header; put texts that hold commas in quotes"
                )
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num + 1}: {error}") from None


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(  # noqa: TRY004  # the file is wrong, not the caller's type
                f"{path}, line {number}: expected a JSON object, found {type(row).__name__}"
            )
        yield number, row


def _parquet_rows(path: Path, extra: str | None) -> Rows:
    parquet = extras.load("pyarrow.parquet", f"{path}: Parquet needs", extra)
    number = 0
    with path.open("rb") as handle:
        try:
            for batch in parquet.ParquetFile(handle).iter_batches():
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
        except (extras.load("pyarrow", "Parquet needs").ArrowException, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no complete Parquet file ({error})") from None


def column(row: Mapping[str, Any], names: str) -> tuple[str, Any]:
    """What a row holds in a column.

    Args:
        row: The row.
        names: The column's name, or several of which one row has one, separated by `|`.

    Returns:
        The name that the row has, and its value.

    Raises:
        ValueError: It has none of them, or `None` or the number nan there.
    """
    for name in (names, *names.split("|")):
        value = row.get(name)
        if value is not None and not (isinstance(value, numbers.Real) and value != value):
            return name, value
    wanted = " or ".join(repr(name) for name in names.split("|"))
    raise ValueError(f"no {wanted}; the columns are {sorted(map(str, row))}")


def text(row: Mapping[str, Any], names: str) -> str:
    """A text of a row.

    Args:
        row: The row.
        names: As for `column`.

    Returns:
        The text.

    Raises:
        ValueError: It is missing, empty or no text, or holds half of a surrogate pair.
    """
    name, value = column(row, names)
    if is_text(value):
        return str(value)
    if isinstance(value, str) and value.strip():
        raise ValueError(f"{name!r} holds half of a surrogate pair: {shown(value)}")
    raise ValueError(f"{name!r} must be a text that is not empty; it is {shown(value)}")


def is_text(value: object) -> bool:
    """Whether a value is a text that a tokenizer takes and that says something.

    Args:
        value: Anything.

    Returns:
        True if so.
    """
    return isinstance(value, str) and bool(value.strip()) and not has_half_pair(value)


def has_half_pair(value: str) -> bool:
    """Whether a text holds half of a surrogate pair, which JSON can escape and no tokenizer takes.

    Args:
        value: The text.

    Returns:
        True if so.
    """
    return any("\ud800" <= each <= "\udfff" for each in value)


def shown(value: object, limit: int = 60) -> str:
    """A value as a message shows it: in ASCII, so that every terminal can, and not too long.

    Args:
        value: Anything.
        limit: The most characters.

    Returns:
        Its representation, or the beginning of it.
    """
    whole = ascii(value)
    return whole if len(whole) <= limit else f"{whole[: limit - 3]}..."
