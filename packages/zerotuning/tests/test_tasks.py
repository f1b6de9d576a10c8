import json
import re

import pytest
from separata_testing.models import tiny_tokenizer
from zerotuning import TASKS, Example, TaskSpec
from zerotuning.metrics import UNPARSED
from zerotuning.tasks import check_examples, is_one_token

LETTERS = TaskSpec("letters", "Pick one.\n{text}\nAnswer:", ("a", "b"))


class WordTokenizer:
    """One token for each blank-led word; the last one knows no context."""

    def __init__(self):
        self.ids = {}

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [self.ids.setdefault(word, len(self.ids)) for word in text.split(" ")]}


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.kind == "classification"])
def test_built_in_tasks_name_their_labels_and_end_where_one_follows(name):
    task = TASKS[name]
    prompt = task.prompt("  a {text} film \n")
    assert re.search(r": a {text} film\n(Answer|Category|Type):$", prompt)
    assert all(word in prompt for word in task.labels)


@pytest.mark.parametrize(
    ("answer", "label"),
    [(" positive", 1), ("Negative.", 0), ("not positive but negative", 1), ("fine", UNPARSED), ("", UNPARSED)],
)
def test_parse(answer, label):
    assert TASKS["mr"].parse(answer) == label


def test_longer_of_two_words_at_one_place():
    task = TaskSpec("x", "{text}", ("very good", "very good indeed"))
    assert task.parse("Very good indeed!") == 1


def test_label_tokens_follow_the_prompt():
    # One token for each byte, and the blank is one.
    tokens = LETTERS.label_tokens(tiny_tokenizer())
    assert [tiny_tokenizer().decode(ids) for ids in tokens] == [" a", " b"]
    with pytest.warns(UserWarning, match=r"\['a', 'b'\] have several tokens"):
        assert not is_one_token(LETTERS, tokens)
    assert is_one_token(LETTERS, [[3], [4]])


def test_label_tokens_without_context():
    tokens = LETTERS.label_tokens(WordTokenizer())
    assert len({tuple(ids) for ids in tokens}) == 2


def test_labels_that_cannot_be_told_apart():
    class Blind:
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [7] * len(text.split())}

    with pytest.raises(ValueError, match="cannot tell"):
        LETTERS.label_tokens(Blind())


@pytest.mark.parametrize(
    "arguments",
    [
        {"template": "no place"},
        {"template": "{text} {text}"},
        {"labels": ("one",)},
        {"labels": ("same", "Same")},
        {"labels": ("", "x")},
        {"labels": (" x", "y")},
        {"values": ("0",)},
    ],
)
def test_bad_task(arguments):
    with pytest.raises(ValueError, match=r"template|labels"):
        TaskSpec(**{"name": "x", "template": "{text}", "labels": ("a", "b"), **arguments})


def test_read_json_lines_and_csv(tmp_path):
    rows = [("fine, really", 1), ("dull", 0)]
    lines = tmp_path / "data.jsonl"
    lines.write_text("".join(json.dumps({"sentence": text, "label": label}) + "\n" for text, label in rows))
    table = tmp_path / "data.csv"
    table.write_text('sentence,label\n"fine, really",positive\ndull,Negative\n')
    expected = [Example("fine, really", 1), Example("dull", 0)]
    assert TASKS["sst2"].read(lines) == TASKS["sst2"].read(table) == expected


def test_byte_order_mark_and_empty_lines(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes("text,label\r\nfine,1\r\n".encode("utf-8-sig"))
    assert TASKS["mr"].read(path) == [Example("fine", 1)]
    path = tmp_path / "x.jsonl"
    path.write_bytes('{"text": "fine", "label": 1}\r\n\r\n'.encode("utf-8-sig"))
    assert TASKS["mr"].read(path) == [Example("fine", 1)]


def test_numbers_as_label_words_are_words(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "fine", "label": 1}\n')
    task = TaskSpec("stars", "{text}", ("2", "1", "0"))
    assert task.read(path) == [Example("fine", 1)]
    path.write_text('{"text": "fine", "label": 0}\n')
    assert task.read(path) == [Example("fine", 2)]


def test_read_with_own_values(tmp_path):
    task = TaskSpec("x", "{text}", ("bad", "good"), values=("-1", "1"))
    path = tmp_path / "x.csv"
    path.write_text("text,label\nyes,1\nno,-1\n")
    assert [example.label for example in task.read(path)] == [1, 0]
    path.write_text("text,label\nyes,0\n")
    with pytest.raises(ValueError, match=r"line 2: label '0' is none of"):
        task.read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x", "label": 0}\n{broken', "line 2: not JSON"),
        ("a.jsonl", "[]\n", "line 1: expected a JSON object"),
        ("a.jsonl", '{"text": "x"}\n', "line 1: no 'label'"),
        ("a.csv", "text\nx\n", "line 2: no 'label'"),
        ("a.txt", "", r"must end in \.csv or \.jsonl"),
        ("a.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("a.jsonl", '\n{"text": " ", "label": 0}\n', "line 2: 'text' must be a text"),
        ("a.jsonl", '{"text": ["x"], "label": 0}\n', "line 1: 'text' must be a text"),
        ("a.jsonl", '{"text": "\\ud800", "label": 0}\n', "line 1: 'text' must be a text"),
        ("a.csv", f"text,label\n{'x' * 200_000},0\n", "line 2: field larger"),
        ("a.csv", "text,label\ncaf\xe9,0\n".encode("latin-1"), r"a\.csv is not UTF-8"),
    ],
)
def test_bad_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        TASKS["mr"].read(tmp_path / name)


@pytest.mark.parametrize(
    ("labels", "message"), [([], "empty"), ([1, 1], "all 2 examples have the label 'b'"), ([0, 2], "occur in the data")]
)
def test_data_that_say_nothing(labels, message):
    with pytest.raises(ValueError, match=message):
        check_examples(LETTERS, [Example("x", label) for label in labels])
