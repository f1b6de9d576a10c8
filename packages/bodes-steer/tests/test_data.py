import json
import sys

import pytest
from bodes_steer.data import (
    Example,
    read_examples,
    read_prompts,
    split_groups,
)
from hypothesis import given
from hypothesis import strategies as st


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(rows, **options):
    return [(each.text, each.label) for each in read_examples(rows, **options)]


def test_pairs_of_texts(tmp_path):
    rows = [{"prompt": "p{", "chosen": "a}", "rejected": "b"}, {"prompt": "q", "chosen": "c", "rejected": "d"}]
    found = read_examples(lines(tmp_path / "d.jsonl", rows))
    assert found == [
        Example("p{\na}", 1, "p{"),
        Example("p{\nb", 0, "p{"),
        Example("q\nc", 1, "q"),
        Example("q\nd", 0, "q"),
    ]
    assert texts(rows, template="Q: {prompt} A: {response}.")[0] == ("Q: p{ A: a}.", 1)
    assert texts(rows, chat=True)[1] == ([user("p{"), assistant("b")], 0)
    # Without a prompt the answers are all there is.
    assert texts([{"chosen": "a", "rejected": "b"}]) == [("a", 1), ("b", 0)]


@pytest.mark.parametrize(
    ("row", "group"),
    [
        ({"prompt": [user("p")], "chosen": [assistant("a")], "rejected": [assistant("b")]}, [user("p")]),
        ({"prompt": "p", "chosen": [assistant("a")], "rejected": [assistant("b")]}, [user("p")]),
        ({"prompt": [user("p")], "chosen": "a", "rejected": "b"}, [user("p")]),
        ({"chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("b")]}, [user("p")]),
        # As UltraFeedback has it: the prompt is in the answers too.
        (
            {"prompt": "p", "chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("b")]},
            [user("p")],
        ),
    ],
)
def test_every_form_of_a_preference_is_the_same_conversation(row, group):
    found = read_examples([row])
    assert [each.text for each in found] == [[user("p"), assistant("a")], [user("p"), assistant("b")]]
    assert {each.group for each in found} == {json.dumps(group)}


def test_pairs_that_say_nothing_are_left_out():
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 3.0, "score_rejected": 2},
        {"prompt": "p", "chosen": "a", "rejected": "c", "score_chosen": 2.0, "score_rejected": 2.0},
        {"prompt": "p", "chosen": "a", "rejected": "a", "score_chosen": 2.0, "score_rejected": 1.0},
    ]
    with pytest.warns(UserWarning, match="2 pairs of the data are left out"):
        assert len(read_examples(rows)) == 2
    with pytest.raises(ValueError, match="row 0: 'score_chosen' and 'score_rejected' must be numbers"):
        read_examples([{**rows[0], "score_chosen": "x"}])


def test_labelled_texts(tmp_path):
    path = tmp_path / "d.csv"
    # With the mark that spreadsheets put first.
    path.write_text('\ufefftext,label\n"one, two",1\nthree,Negative\n', encoding="utf-8")
    assert texts(path) == [("one, two", 1), ("three", 0)]
    rows = [{"t": "a", "l": "clean"}, {"t": [user("b")], "l": "toxic"}, {"t": "c", "l": "mild"}]
    options = {"text_column": "t", "label_column": "l"}
    assert texts(rows, **options, positive="clean") == [("a", 1), ([user("b")], 0), ("c", 0)]
    assert texts([{"messages": [user("a")], "label": True}, {"text": "b", "label": 0.0}])[0] == ([user("a")], 1)
    with pytest.raises(ValueError, match="row 0: 'l' is 'clean'; it must be 1 or 0"):
        read_examples(rows, **options)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"text": "a"', "line 1: not JSON"),
        ('{"text": "a", "label": 1}\n\n[]', "line 3: expected a JSON object, found list"),
        ('{"x": 1}', r"line 1: the columns are \['x'\]; wanted are 'chosen'"),
        ('{"text": "a", "label": 1}\n{"text": "b"}', r"line 2: no 'label'; the columns are \['text'\]"),
        ('{"text": " ", "label": 1}', "line 1: 'text' must be a text that is not empty"),
        ('{"text": "\\udc80", "label": 1}', "half of a surrogate"),
        ('{"text": "a", "label": 1}', "holds no negative example"),
        ('{"chosen": "a", "rejected": 3}', "line 1: 'rejected' must be a text"),
        ('{"prompt": "p", "chosen": "a"}', "line 1: no 'rejected'"),
        ('{"chosen": ["a"], "rejected": ["b"]}', "'chosen' must hold messages with 'role' and 'content'; one is 'a'"),
        ('{"chosen": [], "rejected": []}', "'chosen' holds no message"),
        ('{"chosen": [], "rejected": "b"}', "must both be texts or both be lists"),
        ("", "holds no positive example"),
    ],
)
def test_errors_name_line_and_field(tmp_path, rows, message):
    path = tmp_path / "d.jsonl"
    path.write_text(rows)
    with pytest.raises(ValueError, match=message) as caught:
        read_examples(path)
    assert str(path) in str(caught.value)


def test_other_files_are_refused(tmp_path):
    for name, content, message in (
        ("d.xml", b"", "must end in .jsonl, .csv, .txt or .parquet"),
        ("d.csv", b"text,label\na,1,2\n", "line 2: more cells than the 2"),
        ("d.jsonl", b"\xff", "is not UTF-8"),
        ("d.parquet", b"x", "is no complete Parquet file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_examples(tmp_path / name)
    with pytest.raises(ValueError, match="is a file"):
        read_examples(lines(tmp_path / "e.jsonl", []), split="train")
    for wrong, message in (
        ({"kind": "x"}, "kind='x' is none of"),
        ({"template": "{response}{prompt}"}, "must hold {prompt} and, after it"),
        ({"split": "x"}, "the data set has no parts"),
    ):
        with pytest.raises(ValueError, match=message):
            read_examples([], **wrong)
    with pytest.raises(ValueError, match="no 'prompt', which the chat template needs"):
        read_examples([{"chosen": "a", "rejected": "b"}], chat=True)
    with pytest.raises(ValueError, match="row 0 is a str"):
        read_examples(["a"])


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'data' is not installed")
    import pyarrow.parquet as parquet

    path = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": [1.0, 0.0]}), path)
    assert texts(path) == [("a", 1), ("b", 0)]


@pytest.mark.slow
def test_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra 'data' is not installed")
    rows = [{"prompt": [user("p")], "chosen": [assistant("a")], "rejected": [assistant("b")]}]
    made = datasets.Dataset.from_list(rows)
    expected = read_examples(rows)
    assert read_examples(made) == expected
    parts = datasets.DatasetDict({"train": made, "test": made})
    assert read_examples(parts, split="train") == expected
    with pytest.raises(ValueError, match="split=None must name one of the parts: train, test"):
        read_examples(parts)
    made.save_to_disk(str(tmp_path / "saved"))
    assert read_examples(tmp_path / "saved") == expected
    with pytest.raises(ValueError, match="is no folder of a saved data set"):
        read_examples(tmp_path)


def test_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install 'bodes-steer\[data\]'"):
        read_examples(tmp_path)
    (tmp_path / "d.parquet").write_bytes(b"")
    with pytest.raises(ImportError, match=r"pip install 'bodes-steer\[data\]'"):
        read_examples(tmp_path / "d.parquet")


def test_prompts(tmp_path):
    (tmp_path / "p.txt").write_text("one two \n\n{three}\r\n")
    assert read_prompts(tmp_path / "p.txt") == ["one two ", "{three}"]
    rows = [{"prompt": "a", "text": "no"}, {"messages": [user("b")]}, {"text": "c"}]
    assert read_prompts(lines(tmp_path / "p.jsonl", rows)) == ["a", [user("b")], "c"]
    assert read_prompts(rows, chat=True) == [[user("a")], [user("b")], [user("c")]]
    with pytest.raises(ValueError, match=r"line 1: no 'prompt'; the columns are \['x'\]"):
        read_prompts(lines(tmp_path / "p.jsonl", [{"x": 1}]))
    with pytest.raises(ValueError, match="there is no prompt"):
        read_prompts([])


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2), st.floats(0.01, 0.99), st.integers(0, 9))
def test_a_split_parts_no_group_and_loses_nothing(groups, share, seed):
    if len(set(groups)) < 2:
        with pytest.raises(ValueError, match="at least two are needed"):
            split_groups(groups, share, seed)
        return
    first, second = split_groups(groups, share, seed)
    assert sorted(first + second) == list(range(len(groups)))
    assert first
    assert second
    assert not {groups[i] for i in first} & {groups[i] for i in second}
    assert split_groups(groups, share, seed) == (first, second)


def test_share_and_seed_of_a_split():
    groups = [str(i) for i in range(100)]
    assert len(split_groups(groups, 0.25, 0)[1]) == 25
    assert split_groups(groups, 0.25, 0) != split_groups(groups, 0.25, 1)
    with pytest.raises(ValueError, match="share=1 must lie above 0 and below 1"):
        split_groups(groups, 1, 0)
