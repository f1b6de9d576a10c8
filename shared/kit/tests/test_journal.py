import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from separata_kit.journal import Journal

RUN = {"model": "m", "seeds": (1, 2)}


def journal(path, run=RUN, kind=Journal, **change):
    return kind(path, run, **{"schema": "pack/points", "version": 2, "what": "file of points", **change})


def filled(path, rows=3):
    with journal(path) as made:
        for index in range(rows):
            made.append(f"k{index}", {"x": index, "t": (index, "ä\n")})
    return path.read_bytes()


@pytest.mark.parametrize("kept", [True, False])
def test_rows_in_order(tmp_path, kept):
    with journal(tmp_path / "j" if kept else None) as made:
        assert (len(made), made.rows(), made.get("a")) == (0, [], None)
        made.append("a", {"x": (1, 2)})
        made.append("b", {"x": 2})
        made.append("a", {"x": 3.5})
        assert ("a" in made, "c" in made, len(made), list(made)) == (True, False, 2, ["b", "a"])
        assert made.get("a") == {"x": 3.5}
        assert made.rows() == [{"x": 2}, {"x": 3.5}]
    if kept:
        with journal(tmp_path / "j") as again:
            assert again.rows() == [{"x": 2}, {"x": 3.5}]
            assert list(again) == ["b", "a"]


def test_a_row_is_the_same_before_and_after(tmp_path):
    with journal(tmp_path / "j") as made:
        made.append("a", {"t": (1, 2), 3: "x"})
        before = made.get("a")
    with journal(tmp_path / "j") as made:
        assert made.get("a") == before == {"t": [1, 2], "3": "x"}


@settings(max_examples=25)
@given(st.data())
def test_cut_off_anywhere_it_continues(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "j"
    whole = filled(path)
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    with journal(path) as made:
        assert len(made) == max(whole[:cut].count(b"\n") - 1, 0)
        for index in range(len(made), 3):
            made.append(f"k{index}", {"x": index, "t": (index, "ä\n")})
    assert path.read_bytes() == whole


@settings(max_examples=25)
@given(st.data())
def test_an_altered_byte_is_seen_or_changes_nothing(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "j"
    whole = filled(path)
    with journal(path) as made:
        rows = made.rows()
    place = data.draw(st.integers(0, len(whole) - 2))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte not in (whole[place], 10, 13)))
    path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    try:
        with journal(path) as made:
            # A line break that is gone makes one line of two; then only the last one may be lost.
            assert made.rows() == rows
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017  # either is right


def test_lines_without_a_digest_are_read(tmp_path):
    lines = [{"schema": "pack/points", "version": 2, "model": "m", "seeds": [1, 2]}, {"id": "a", "row": {"x": 1}}]
    (tmp_path / "j").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with journal(tmp_path / "j") as made:
        assert made.get("a") == {"x": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("something else", "is no file of points; it is left as it is"),
        ("x\n", "is no file of points"),
        ("[1]\n", "is no file of points"),
        ('{"schema": "pack/other"}\n', "is no file of points"),
        (
            '{"schema": "pack/points", "version": 3}\n',
            "has version 3 of a file of points, and this pack continues version 2",
        ),
        ('{"schema":"pack/points","version":2,"model":"o","seeds":[1,2]}\n', r"another run \(different model\)"),
        ('{"schema":"pack/points","version":2,"model":"m","seeds":[1,2],"x":1}\n', r"another run \(different x\)"),
        ('{"schema":"pack/points","version":2,"model":"m","seeds":[1,2]}\n{"id": 1\n', "line 2, is damaged"),
        ('{"schema":"pack/points","version":2,"model":"m","seeds":[1,2]}\n[]\n', "line 2, is damaged"),
        ('{"schema":"pack/points","version":2,"model":"m","seeds":[1,2]}\n{"id":"a"}\n', "line 2, is damaged"),
        ('{"schema":"pack/points","version":2,"model":"m","seeds":[1,2]}\n{"id":"a","row":1}\n', "line 2, is damaged"),
        (
            '{"schema":"pack/points","version":2,"model":"m","seeds":[1,2]}\n' + "[" * 99_999 + "\n",
            "line 2, is damaged",
        ),
    ],
)
def test_other_files_are_refused_and_left_as_they_are(tmp_path, content, message):
    path = tmp_path / "j"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught, journal(path):
        pass
    assert str(path) in str(caught.value)
    assert path.read_text() == content
    # It is closed again.
    path.unlink()
    filled(path)


def test_one_run_at_a_time(tmp_path):
    with journal(tmp_path / "j"), pytest.raises(OSError, match="in use by another run"), journal(tmp_path / "j"):
        pass
    with journal(tmp_path / "j"):
        pass


def test_what_json_cannot_hold_is_refused(tmp_path):
    with journal(tmp_path / "j") as made:
        for row, error in (({"x": float("nan")}, ValueError), ({"x": {1}}, TypeError)):
            with pytest.raises(error):
                made.append("a", row)
        assert len(made) == 0
    with pytest.raises(ValueError, match="JSON compliant"):
        journal(None, {"x": float("inf")})
    with journal(tmp_path / "j") as made:
        assert len(made) == 0


def test_a_journal_that_is_not_open(tmp_path):
    made = journal(tmp_path / "j")
    with pytest.raises(ValueError, match=r"/j is not open; open the journal by `with`"):
        made.append("a", {})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a device or the like"), journal(tmp_path / "pipe"):
        pass
    with pytest.raises(FileNotFoundError), journal(tmp_path / "no" / "j"):
        pass


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_and_ctrl_c_leave_no_half_line(tmp_path, fault):
    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, line):
            if len(line) < 30:
                raise fault
            return self.file.write(line[:30])

    with journal(tmp_path / "j") as made:
        made.append("a", {"x": 1})
        whole = (tmp_path / "j").read_bytes()
        made._file = Full(made._file)
        with pytest.raises(type(fault)):
            made.append("b", {"x": "long enough for two writes"})
        assert "b" not in made
    assert (tmp_path / "j").read_bytes() == whole


class Own(Journal):
    def encode(self, key, row):
        return {"stage": key, **row}

    def decode(self, record):
        return record.pop("stage"), record


def test_lines_of_another_form(tmp_path):
    with journal(tmp_path / "j", kind=Own) as made:
        made.append("a", {"x": 1})
    assert json.loads((tmp_path / "j").read_text().splitlines()[1]) == {"stage": "a", "x": 1}
    with journal(tmp_path / "j", kind=Own) as made:
        assert made.get("a") == {"x": 1}
