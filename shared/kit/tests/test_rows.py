import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from separata_kit.rows import column, is_text, read_rows, shown, text

ROWS = [{"text": "one, two", "label": "1"}, {"text": 'a "quote"\nand a line', "label": "0"}]


def test_each_kind_of_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    (tmp_path / "a.jsonl").write_text("\n".join(["", *map(json.dumps, ROWS)]))
    (tmp_path / "a.NDJSON").write_text("".join(json.dumps(row) + "\r\n" for row in ROWS), encoding="utf-8-sig")
    (tmp_path / "a.csv").write_text('text,label\n"one, two",1\n"a ""quote""\nand a line",0\n', encoding="utf-8-sig")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    places = {"a.jsonl": ("line 2", "line 3"), "a.csv": ("line 2", "line 4"), "a.parquet": ("row 0", "row 1")}
    for name in ("a.jsonl", "a.NDJSON", "a.csv", "a.parquet"):
        found = list(read_rows(tmp_path / name))
        assert [dict(row) for _, row in found] == ROWS
        if name in places:
            assert tuple(where for where, _ in found) == tuple(f"{tmp_path / name}, {each}" for each in places[name])
    (tmp_path / "a.txt").write_text("one two \n\n {three}\r\n")
    assert [dict(row) for _, row in read_rows(str(tmp_path / "a.txt"), text_column="prompt")] == [
        {"prompt": "one two "},
        {"prompt": " {three}"},
    ]


def test_rows_in_memory():
    assert list(read_rows(iter(ROWS))) == [("row 0", ROWS[0]), ("row 1", ROWS[1])]
    with pytest.raises(ValueError, match="row 1 is a str; it must be a mapping of columns"):
        list(read_rows([{}, "a"]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.xml", b"", r"d\.xml must end in \.jsonl, \.csv, \.txt or \.parquet"),
        ("d.csv", b"text,label\na,1\nb,1,2\n", "line 3: more cells than the 2 of the header"),
        ("d.csv", b'text\n"' + b"x" * 200_000, "line 2: field larger"),
        ("d.jsonl", b'{"a": 1}\n{"a"\n', "line 2: not JSON"),
        ("d.jsonl", b"[" * 99_999, "line 1: not JSON"),
        ("d.jsonl", b"[1]", "line 1: expected a JSON object, found list"),
        ("d.csv", b'text,label\n"a,1\nb,2\n', "line 2: unexpected end of data"),
        ("d.txt", b"\xff", "d.txt is not UTF-8 .byte 0xff: invalid start byte.; convert it"),
        ("d.parquet", b"x", "d.parquet is no complete Parquet file"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        list(read_rows(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


def test_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(ImportError, match=r"d\.parquet: Parquet needs the extra 'data': pip install 'pack\[data\]'"):
        list(read_rows(tmp_path / "d.parquet", extra="pack[data]"))
    with pytest.raises(ImportError, match="Parquet needs pyarrow: pip install pyarrow"):
        list(read_rows(tmp_path / "d.parquet"))


def test_an_error_within_the_library_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "pyarrow").mkdir()
    (tmp_path / "pyarrow/__init__.py").write_text("import what_pyarrow_needs")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match="what_pyarrow_needs"):
        list(read_rows(tmp_path / "d.parquet", extra="pack[data]"))


def test_columns():
    row = {"a": None, "b": float("nan"), "c": 0, "x|y": 1, "": "e"}
    assert column(row, "a|b|c") == ("c", 0)
    assert column(row, "x|y") == ("x|y", 1)
    with pytest.raises(ValueError, match=r"no 'a' or 'b'; the columns are \['', 'a', 'b', 'c', 'x\|y'\]"):
        column(row, "a|b")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (" \n", "must be a text that is not empty; it is ' \\\\n'"),
        (3, "must be a text that is not empty; it is 3"),
        ("x" * 100, None),
        ("a\ud800b", "holds half of a surrogate pair: 'a\\\\ud800b'"),
        (None, "no 't'"),
    ],
)
def test_texts(value, message):
    assert is_text(value) == (message is None)
    if message is None:
        assert text({"t": value}, "t") == value
    else:
        with pytest.raises(ValueError, match=message):
            text({"t": value}, "t")


@given(st.text(), st.integers(8, 99))
def test_shown_is_ascii_and_short(value, limit):
    found = shown(value, limit)
    assert found.isascii()
    assert len(found) <= limit
    assert found == ascii(value) or found.endswith("...")
