"""Rows of data files, and what lies in their columns."""

import csv
import json
import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

Rows = Iterator[tuple[str, Mapping[str, Any]]]

# Options that carry their letters: "A)30 km" each, or all in one text, "a ) 30 km , b ) 40 km".
_MARKED = re.compile(r"\s*\(?([a-z])\s*(?:\)|[.:]\s)\s*(.*)", re.IGNORECASE | re.DOTALL)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def read_rows(path: Path) -> Rows:
    """The rows of a file, one after the other.

    Args:
        path: A `.csv` (with a header), `.jsonl`, `.ndjson` or `.parquet` file; texts are UTF-8.

    Yields:
        Where the row stands, for messages, and its columns.

    Raises:
        ValueError: Another kind of file, or one that cannot be read as what it says it is; the line is named.
        ImportError: A `.parquet` file without the `data` extra.
        OSError: The file cannot be opened.
    """
    kind = path.suffix.lower()
    if kind == ".parquet":
        yield from _parquet_rows(path)
        return
    read = _TEXT_FILES.get(kind)
    if read is None:
        raise ValueError(f"{path} must end in .csv or .jsonl, or in .parquet with the extra 'data'")
    try:
        # Spreadsheets put a byte order mark before UTF-8.
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, row in read(path, file):
                yield f"{path}, line {line}", row
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from None


def _csv_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(lines)
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


def _parquet_rows(path: Path) -> Rows:
    try:
        # By name, since it has no types, installed or not.
        parquet = import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "pyarrow":
            raise
        raise ImportError(f"{path}: Parquet needs the extra 'data': pip install 'zerotuning[data]'") from None
    number = 0
    with path.open("rb") as handle:
        try:
            for batch in parquet.ParquetFile(handle).iter_batches():
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
        except (import_module("pyarrow").ArrowException, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no complete Parquet file ({error})") from None


_TEXT_FILES: Mapping[str, Callable[[Path, Iterable[str]], Iterator[tuple[int, Mapping[str, Any]]]]] = {
    ".csv": _csv_rows,
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
}


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
        ValueError: It is missing, empty or no text.
    """
    name, value = column(row, names)
    if not is_text(value):
        raise ValueError(f"{name!r} must be a text that is not empty; it is {_short(value)}")
    return str(value)


def is_text(value: object) -> bool:
    """Whether a value is a text that a tokenizer takes and that says something.

    Args:
        value: Anything.

    Returns:
        True if so.
    """
    # JSON can escape half of a surrogate pair, which no tokenizer takes.
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= each <= "\udfff" for each in value)


def choices(row: Mapping[str, Any], names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The options of a multiple-choice item.

    Args:
        row: The row.
        names: One column for each option, or one column with all of them: a list of texts, `{"text": [...],
            "label": [...]}`, a list of `{"text": ..., "label": ...}`, one text `"a ) ... , b ) ..."`, or JSON (as in a
            cell of a CSV file) of one of these. Letters in front of the options, such as `"A)"`, are dropped if all
            have them.

    Returns:
        The options, and the item's own labels for them (empty where it has none).

    Raises:
        ValueError: They are missing or of another form, or one is empty.
    """
    own: Any = ()
    if len(names) > 1:
        name = names[0]
        options: Any = [column(row, each)[1] for each in names]
    else:
        name, options = column(row, names[0])
        options = _plain(options)
        if isinstance(options, str):
            options = _marked_parts(options)
        if isinstance(options, Mapping):
            options, own = _plain(options.get("text")), _plain(options.get("label", ()))
        elif isinstance(options, list | tuple) and all(isinstance(each, Mapping) for each in options):
            own = [each["label"] for each in options if "label" in each]
            options = [each.get("text") for each in options]
    if not isinstance(options, list | tuple) or not isinstance(own, list | tuple):
        raise ValueError(  # noqa: TRY004  # the row is wrong, not the caller's type
            f"{name!r} must hold the options; it is {_short(row.get(name))}"
        )
    texts = [str(each) if _is_number(each) else each for each in options]
    for each in texts:
        if not is_text(each):
            raise ValueError(f"{name!r} must hold options that are texts and not empty; one is {_short(each)}")
    if own and len(own) != len(texts):
        raise ValueError(f"{name!r} has {len(own)} labels for {len(texts)} options")
    if len({str(each).strip().lower() for each in own}) != len(own):
        raise ValueError(f"{name!r} has one label for several options: {_short(own)}")
    return tuple(each.strip() for each in _without_letters(texts)), tuple(str(each) for each in own)


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)


def _plain(value: Any) -> Any:
    """Without numpy or JSON around it."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _marked_parts(value: str) -> list[str] | None:
    """The parts of `"a ) 30 km , b ) 40 km"`; None where there are not at least two."""
    is_list = value.lstrip().startswith("[")
    places = []
    at = 0
    for letter in _LETTERS:
        before = r"\s*\[?\s*['\"]?\s*" if letter == "a" else r".*?,\s*['\"]?\s*"
        found = re.compile(rf"{before}(?P<mark>\(?{letter}\s*\))", re.IGNORECASE | re.DOTALL).match(value, at)
        if found is None:
            break
        places.append(found.start("mark"))
        at = found.end()
    if len(places) < 2:
        return None
    parts = [value[start:end] for start, end in zip(places, [*places[1:], len(value)], strict=True)]
    return [part.strip(" ,'\"]" if is_list else " ,") for part in parts]


def _without_letters(options: list[str]) -> list[str]:
    marked = [_MARKED.fullmatch(each) for each in options]
    letters = "".join(each[1].lower() for each in marked if each is not None and each[2].strip())
    if len(letters) == len(options) and _LETTERS.startswith(letters):
        return [each[2] for each in marked if each is not None]
    return options


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
