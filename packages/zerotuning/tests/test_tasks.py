import json
import math
import re
import sys

import pytest
from separata_testing.models import tiny_tokenizer
from separata_testing.suites import FileFormat
from zerotuning import TASKS, Example, TaskSpec
from zerotuning.metrics import UNPARSED
from zerotuning.tasks import check_examples, check_unlabelled, is_one_token, true_labels

LETTERS = TaskSpec("letters", "Pick one.\n{text}\nAnswer:", ("a", "b"))
CHOICE = TaskSpec(
    "choice", "{text}\n{choices}\nAnswer:", tuple("ABCDE"), kind="multiple_choice", choice_columns=("choices",)
)
THREE = Example("Which?", 2, ("one", "two", "three"))

# For each data set a row in its layout, what the prompt says of it, and the word of its label.
ROWS = {
    "sst2": ({"sentence": "a warm little film ", "label": 1, "idx": 7}, "Sentence: a warm little film\n", "positive"),
    "sst5": ({"text": "watchable , no more", "label": 2}, "Sentence: watchable , no more\n", "okay"),
    "mr": ({"text": "two hours of fog .", "label": 0}, "Review: two hours of fog .\n", "negative"),
    "subj": ({"text": "i loved every minute", "label": 1}, "Sentence: i loved every minute\n", "subjective"),
    "dbpedia": (
        {"label": 9, "title": "Grey loach", "content": " The grey loach is a fish of slow rivers."},
        "Article: The grey loach is a fish of slow rivers.\nCategory:",
        "animal",
    ),
    "agnews": ({"text": "Rower wins third gold", "label": 1}, "Article: Rower wins third gold\nCategory:", "sports"),
    "trec": (
        {"text": "How many strings has a lute ?", "coarse_label": 5, "fine_label": 40},
        "Question: How many strings has a lute ?\nType:",
        "number",
    ),
    "cb": (
        {"premise": "Did she say that it rained?", "hypothesis": "it rained", "idx": 0, "label": 2},
        "Text: Did she say that it rained?\nStatement: it rained\nAnswer:",
        "maybe",
    ),
    "boolq": (
        {"question": "is tin a metal", "passage": "Tin is a soft metal.", "answer": True},
        "Text: Tin is a soft metal.\nQuestion: is tin a metal\nAnswer:",
        "yes",
    ),
    "arc_easy": (
        {
            "id": "x1",
            "question": "Which is a gas at noon in summer?",
            "choices": {"text": ["iron", "air", "salt"], "label": ["1", "2", "3"]},
            "answerKey": "2",
        },
        "Question: Which is a gas at noon in summer?\nA. iron\nB. air\nC. salt\nAnswer:",
        "B",
    ),
    "arc_challenge": (
        {
            "id": "x2",
            "question": "Why do ponds freeze from above?",
            "choices": {"text": ["fish", "density", "wind", "salt", "mud"], "label": ["A", "B", "C", "D", "E"]},
            "answerKey": "E",
        },
        "Question: Why do ponds freeze from above?\nA. fish\nB. density\nC. wind\nD. salt\nE. mud\nAnswer:",
        "E",
    ),
    "hellaswag": (
        {
            "ind": 3,
            "activity_label": "Baking",
            "ctx_a": "A man opens an oven.",
            "ctx_b": "he",
            "ctx": "A man opens an oven. he",
            "endings": ["takes out a loaf.", "swims off.", "reads {text}.", "is a spoon."],
            "label": "0",
        },
        "Text: A man opens an oven. he\nA. takes out a loaf.\nB. swims off.\nC. reads {text}.\nD. is a spoon.\nAnswer:",
        "A",
    ),
    "piqa": (
        {"goal": "Dry a wet boot", "sol1": "Put it in a bath.", "sol2": "Stuff it with paper.", "label": 1},
        "Goal: Dry a wet boot\nA. Put it in a bath.\nB. Stuff it with paper.\nAnswer:",
        "B",
    ),
    "openbookqa": (
        {
            "id": "7-1",
            "question_stem": "A magnet picks up",
            "choices": {"text": ["wool", "a nail", "milk", "chalk"], "label": ["A", "B", "C", "D"]},
            "answerKey": "B",
        },
        "Question: A magnet picks up\nA. wool\nB. a nail\nC. milk\nD. chalk\nAnswer:",
        "B",
    ),
    "copa": (
        {
            "premise": "The kettle whistled.",
            "choice1": "The water boiled.",
            "choice2": "The tea was cold.",
            "question": "cause",
            "idx": 4,
            "label": 0,
        },
        "Text: The kettle whistled.\nQuestion: What is the more likely cause?\n"
        "A. The water boiled.\nB. The tea was cold.\nAnswer:",
        "A",
    ),
    "csqa": (
        {
            "id": "c",
            "question": "Where does one keep a rake?",
            "question_concept": "rake",
            "choices": {"label": ["A", "B", "C", "D", "E"], "text": ["shed", "sea", "pocket", "oven", "sky"]},
            "answerKey": "A",
        },
        "Question: Where does one keep a rake?\nA. shed\nB. sea\nC. pocket\nD. oven\nE. sky\nAnswer:",
        "A",
    ),
    "aqua": (
        {
            "question": "A cart goes 12 km in 3 h. How fast?",
            "options": ["A)2 km/h", "B)3 km/h", "C)4 km/h", "D)5 km/h", "E)(6) km/h"],
            "rationale": "12 / 3",
            "correct": "C",
        },
        "How fast?\nA. 2 km/h\nB. 3 km/h\nC. 4 km/h\nD. 5 km/h\nE. (6) km/h\nAnswer:",
        "C",
    ),
    "mmlu": (
        {"question": "7 squared is", "subject": "arithmetic", "choices": ["14", "47", "49", "77"], "answer": 2},
        "Question: 7 squared is\nA. 14\nB. 47\nC. 49\nD. 77\nAnswer:",
        "C",
    ),
    "mathqa": (
        {
            "Problem": "a rope of 1,200 cm is cut in 4 . how long is a part ?",
            "Rationale": "1200 / 4",
            "options": "a ) 3 , b ) 30 ( a + b ) , c ) 1,300 , d ) rs . 300 , e ) none of these",
            "correct": "d",
        },
        "how long is a part ?\nA. 3\nB. 30 ( a + b )\nC. 1,300\nD. rs . 300\nE. none of these\nAnswer:",
        "D",
    ),
    "logiqa": (
        {
            "context": "All ferns are green. Mo is a fern.",
            "query": "What follows?",
            "options": ["Mo is red.", "Mo is green.", "Mo is tall.", "Nothing."],
            "correct_option": 1,
        },
        "Text: All ferns are green. Mo is a fern.\nQuestion: What follows?\n"
        "A. Mo is red.\nB. Mo is green.\nC. Mo is tall.\nD. Nothing.\nAnswer:",
        "B",
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_layout_of_the_data_set(name):
    task, (row, prompt, word) = TASKS[name], ROWS[name]
    (example,) = task.examples([row])
    assert prompt in task.prompt(example)
    assert task.prompt(example).endswith(":")
    options = task.options(example)
    assert options == (task.labels if task.kind == "classification" else tuple("ABCDE"[: len(example.choices)]))
    assert options[example.label] == word
    assert task.parse(f" {word}", example) == example.label
    check_unlabelled(task, [example])


@pytest.mark.parametrize("name", TASKS)
def test_a_missing_column_names_itself(name):
    task, row = TASKS[name], ROWS[name][0]
    needed = 0
    for column in row:
        rest = {each: row[each] for each in row if each != column}
        try:
            examples = task.examples([row, rest])
        except ValueError as error:
            assert re.match(rf"row 1: no .*'{column}'", str(error))  # noqa: PT017  # most columns may be missing
            needed += 1
        else:
            assert examples[0] == examples[1]
    fields = re.findall(r"{([^}]*)}", task.body) or [task.text_column]
    assert needed == len(fields) + len(task.choice_columns) + 1


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("sst2", {"sentence": "text"}),
        ("boolq", {"answer": "label"}),
        ("logiqa", {"query": "question", "correct_option": "label"}),
    ],
)
def test_second_layout(name, renamed):
    row = ROWS[name][0]
    other = {renamed.get(key, key): value for key, value in row.items()}
    assert TASKS[name].examples([other]) == TASKS[name].examples([row])


def test_boolq_with_numbers_and_words():
    row = ROWS["boolq"][0]
    rows = [{**row, "answer": value} for value in (1, 0, False, "true", "No", "1")]
    assert true_labels(TASKS["boolq"].examples(rows)) == [1, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    "options",
    [
        ["red", "blue (b)"],
        ("red", "blue (b)"),
        {"text": ["red", "blue (b)"], "label": ["x", "y"]},
        {"text": ["red", "blue (b)"]},
        [{"text": "red", "label": "x"}, {"text": "blue (b)", "label": "y"}],
        [{"text": "red"}, {"text": "blue (b)"}],
        '["red", "blue (b)"]',
        '{"text": ["red", "blue (b)"], "label": ["x", "y"]}',
        ["A) red", "B) blue (b)"],
        ["a. red", "b. blue (b)"],
        ["(A) red", "(B) blue (b)"],
        "a ) red , b ) blue (b)",
        "['a ) red', 'b ) blue (b)']",
    ],
)
def test_forms_of_options(options):
    assert CHOICE.examples([{"text": "Sky?", "choices": options}], labelled=False) == [
        Example("Sky?", None, ("red", "blue (b)"))
    ]


@pytest.mark.parametrize("options", [["A.D.", "B.C."], ["a) x", "y"], ["b) x", "a) y"], ["A)", "B)"]])
def test_what_only_looks_like_letters_stays(options):
    assert CHOICE.examples([{"text": "x", "choices": options}], labelled=False)[0].choices == tuple(options)


def test_arrays_as_pandas_gives_them():
    np = pytest.importorskip("numpy")
    rows = [{"text": "x", "choices": {"text": np.array(["u", "v"]), "label": np.array(["A", "B"])}, "label": "B"}]
    assert CHOICE.examples(rows) == [Example("x", 1, ("u", "v"))]
    for label in (np.int64(1), np.float32(1), np.bool_(1), np.array(1), np.str_("positive")):
        assert TASKS["mr"].examples([{"text": "x", "label": label}]) == [Example("x", 1)]
    assert CHOICE.examples([{"text": "x", "choices": [np.int64(3), np.int64(4)], "label": 0}])[0].choices == ("3", "4")


@pytest.mark.parametrize("label", [1, 1.0, True, "1", "1.0", " Positive", "TRUE"])
def test_labels_of_any_type(label):
    assert TASKS["mr"].examples([{"text": "x", "label": label}]) == [Example("x", 1)]


@pytest.mark.parametrize("label", [2, 0.5, "1.5", "10", [1], "\u0661", math.inf, "nan", -2])
def test_labels_that_are_none(label):
    for labelled in (True, False, None):
        with pytest.raises(ValueError, match=r"row 0: label .* is none of"):
            TASKS["mr"].examples([{"text": "x", "label": label}], labelled)


def test_missing_as_pandas_has_it():
    row = {"text": "x", "label": math.nan}
    assert TASKS["mr"].examples([row], labelled=False) == [Example("x")]
    with pytest.raises(ValueError, match="row 0: no 'label'"):
        TASKS["mr"].examples([row])
    with pytest.raises(ValueError, match="row 0: no 'text'"):
        TASKS["mr"].examples([{"text": math.nan, "label": 1}])
    assert TASKS["mr"].examples([{"text": "x", "label": -1.0}]) == [Example("x")]


@pytest.mark.parametrize("text", ["\0", "\u202e\x1b[31m", "x" * 1_000_000, "{" * 1000])
def test_odd_texts_go_through_as_they_are(text):
    (example,) = TASKS["mr"].examples([{"text": text, "label": 1}])
    assert text in TASKS["mr"].prompt(example)


def test_half_a_surrogate_pair_is_refused_where_no_file_was_read():
    for item in ("x\ud800", Example("x", None, ("y", "\udc00"))):
        with pytest.raises(ValueError, match=r"half of a surrogate pair at character [12]"):
            (LETTERS if isinstance(item, str) else CHOICE).prompt(item)


def test_rows_that_are_no_mappings():
    # What iterating over a table of pandas or over all splits of a data set gives.
    with pytest.raises(ValueError, match=r"row 0: expected a mapping .* found str; of a pandas\.DataFrame"):
        TASKS["mr"]._example("text", "row 0", None)


def test_options_may_be_numbers():
    assert CHOICE.examples([{"text": "x", "choices": [1, 2.5], "label": 1}]) == [Example("x", 1, ("1", "2.5"))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["one"], "row 0: an item has 1 choices; choice takes 2 to 5"),
        (list("uvwxyz"), "row 0: an item has 6 choices; choice takes 2 to 5"),
        ([], "has 0 choices"),
        (["x", " "], "row 0: 'choices' must hold options that are texts and not empty; one is ' '"),
        (["x", None], "one is None"),
        (["x", True], "one is True"),
        ([1, math.nan], "one is nan"),
        ({"text": ["x", "y"], "label": ["A", " a"]}, "one label for several options"),
        (["x", "\ud800"], "one is"),
        ({"label": ["A"]}, "'choices' must hold the options"),
        ({"text": ["x", "y"], "label": ["A"]}, "'choices' has 1 labels for 2 options"),
        ({"text": ["x", "y"], "label": 3}, "must hold the options"),
        ("just words", "'choices' must hold the options; it is 'just words'"),
        ("[broken", "must hold the options"),
        ("a ) alone", "must hold the options"),
        (3, "must hold the options; it is 3"),
        (None, r"row 0: no 'choices'; the columns are \['choices', 'label', 'text'\]"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        CHOICE.examples([{"text": "x", "choices": options, "label": 0}])


@pytest.mark.parametrize(
    ("label", "values", "index"),
    [(0, (), 0), ("2", (), 2), ("c", (), 2), (" B ", (), 1), (1, tuple("12345"), 0), (5, tuple("12345"), None)],
)
def test_label_of_options_without_names(label, values, index):
    task = TaskSpec(**{**CHOICE.to_json(), "values": values, "choice_columns": ("choices",), "labels": CHOICE.labels})
    row = {"text": "x", "choices": ["u", "v", "w"], "label": label}
    if index is None:
        with pytest.raises(ValueError, match=r"label '5' is none of \['1', '2', '3'\]"):
            task.examples([row])
    else:
        assert task.examples([row])[0].label == index


def test_names_of_options_win_over_their_index():
    row = {"text": "x", "choices": {"text": ["u", "v"], "label": ["1", "2"]}, "label": 1}
    assert CHOICE.examples([row])[0].label == 0
    with pytest.raises(ValueError, match=r"label 'a' is none of \['1', '2'\]"):
        CHOICE.examples([{**row, "label": "A"}])


@pytest.mark.parametrize(
    "text", ["{text}", "{choices}", "{question}", "{passage}", "{}", "\\1", "{0.__class__}", "A. x\nB. y"]
)
def test_braces_in_data_stay(text):
    assert LETTERS.prompt(f"x {text}") == f"Pick one.\nx {text}\nAnswer:"
    item = Example(f"x {text}", None, (f"{text} y", text))
    assert CHOICE.prompt(item) == f"x {text}\nA. {text} y\nB. {text}\nAnswer:"
    task = TaskSpec("x", "{text}", ("a", "b"), body="{passage}: {question}")
    rows = [{"passage": text, "question": f"x {text}"}]
    assert task.prompt(task.examples(rows, labelled=False)[0]) == f"{text}: x {text}"


def test_multiple_choice_needs_its_options():
    for item in ("x", Example("x"), Example("x", 0, ("y",)), Example("x", 0, tuple("uvwxyz"))):
        with pytest.raises(ValueError, match=r"has \d choices; choice takes 2 to 5"):
            CHOICE.prompt(item)
    with pytest.raises(ValueError, match="has 1 choices"):
        CHOICE.options(Example("x", 0, ("y",)))
    assert CHOICE.options() == CHOICE.options("x") == CHOICE.labels
    assert CHOICE.options(THREE) == ("A", "B", "C")


@pytest.mark.parametrize(
    ("answer", "label", "of_five"),
    [
        (" B", 1, 1),
        ("c. three", 2, 2),
        ("3", 2, 2),
        ("(a)", 0, 0),
        (" E", UNPARSED, 4),
        ("5 or 2", 1, 4),
        ("Only C", 2, 2),
        ("6", UNPARSED, UNPARSED),
        ("²", UNPARSED, UNPARSED),
        ("", UNPARSED, UNPARSED),
    ],
)
def test_parse_letters(answer, label, of_five):
    assert CHOICE.parse(answer, THREE) == label
    assert CHOICE.parse(answer) == CHOICE.parse(answer, "x") == of_five


def test_more_options_than_digits():
    task = TaskSpec("x", "{text}{choices}", tuple("ABCDEFGHIJ"), kind="multiple_choice", choice_columns=("options",))
    (example,) = task.examples([{"text": "x", "options": list("0123456789"), "label": 9}])
    assert task.options(example)[example.label] == "J"
    assert [task.parse(answer, example) for answer in ("J", "9", "0")] == [9, 8, UNPARSED]


def test_letters_follow_the_prompt():
    tokens = CHOICE.label_tokens(tiny_tokenizer())
    assert [tiny_tokenizer().decode(ids) for ids in tokens] == [" A", " B", " C", " D", " E"]


def test_hidden_labels():
    task = TASKS["mr"]
    rows = [{"text": "x", "label": -1}, {"text": "y", "label": ""}, {"text": "z", "label": 1}]
    expected = [Example("x"), Example("y"), Example("z", 1)]
    assert task.examples(rows) == task.examples(rows, labelled=False) == expected
    with pytest.raises(ValueError, match="row 0: label '-1' is none of"):
        task.examples(rows, labelled=True)
    with pytest.raises(ValueError, match="2 of 3 examples have no label, the first is example 0"):
        check_examples(task, expected)
    check_unlabelled(task, expected)


def test_unlabelled_file_must_be_asked_for(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("text\nfine\n")
    assert TASKS["mr"].read(path, labelled=False) == [Example("fine")]
    for labelled in (None, True):
        with pytest.raises(ValueError, match="line 2: no 'label'"):
            TASKS["mr"].read(path, labelled=labelled)
    # Labels that are there are read, and must be right.
    with pytest.raises(ValueError, match="'fresh' is none of"):
        TASKS["mr"].examples([{"text": "x", "label": "fresh"}], labelled=False)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "empty"),
        ([Example("x")], "example 0 has 0 choices; choice takes 2 to 5"),
        ([THREE, Example("x", None, tuple("uvwxyz"))], "example 1 has 6 choices"),
    ],
)
def test_items_that_cannot_be_asked(examples, message):
    with pytest.raises(ValueError, match=message):
        check_unlabelled(CHOICE, examples)


def test_label_beyond_the_options_of_its_item():
    with pytest.raises(ValueError, match="example 1 has label 3; its options are 0 to 2"):
        check_examples(CHOICE, [THREE, Example("x", 3, ("u", "v", "w"))])


class TestFile(FileFormat):
    error = ValueError
    detects_alteration = False

    def example(self):
        return TASKS["logiqa"]

    def save(self, value, path):
        value.save(path)

    def load(self, path):
        return TaskSpec.load(path)


@pytest.mark.parametrize("name", TASKS)
def test_built_in_tasks_through_json(name):
    body = json.loads(json.dumps(TASKS[name].to_json()))
    assert TaskSpec.from_json(body) == TASKS[name]


def test_task_written_by_hand(tmp_path):
    path = tmp_path / "task.json"
    path.write_bytes('{"name": "x", "template": "{text}", "labels": ["a", "b"]}'.encode("utf-8-sig"))
    assert TaskSpec.load(path) == TaskSpec("x", "{text}", ("a", "b"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lables": []}, r"task\.json: a task has no 'lables'; it has name, template"),
        ({"labels": None}, "labels must be a list of texts; it is None"),
        ({"labels": "ab"}, "labels must be a list of texts"),
        ({"labels": ["a", 1]}, "labels must be a list of texts"),
        ({"template": 3}, "template must be a text; it is 3"),
        ({"name": "\ud800"}, "name must be a text"),
        ({"labels": ["a"]}, r"task\.json: labels must be two or more"),
        ({"schema": "zerotuning/config"}, r"task\.json is no task"),
        ({"version": 2}, r"task\.json has version 2; this zerotuning reads 1"),
        ({"version": "1"}, "has version '1'"),
        ({"kind": "essay"}, "kind must be one of classification, multiple_choice; it is 'essay'"),
    ],
)
def test_bad_task_file(tmp_path, change, message):
    path = tmp_path / "task.json"
    path.write_text(json.dumps({"name": "x", "template": "{text}", "labels": ["a", "b"], **change}))
    with pytest.raises(ValueError, match=message):
        TaskSpec.load(path)


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000, '{"name": "x"}'])
def test_no_task_at_all(tmp_path, content):
    path = tmp_path / "task.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"task\.json( is| holds no JSON object|: a task needs 'template', 'labels')"):
        TaskSpec.load(path)


def test_data_set_objects():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    for name in ("boolq", "csqa"):
        row = ROWS[name][0]
        assert TASKS[name].examples(datasets.Dataset.from_list([row])) == TASKS[name].examples([row])


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'data' is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    row = ROWS["csqa"][0]
    parquet.write_table(pyarrow.Table.from_pylist([row, {**row, "answerKey": "Z"}]), path)
    with pytest.raises(ValueError, match=r"x\.parquet, row 1: answerKey 'z' is none of"):
        TASKS["csqa"].read(path)
    parquet.write_table(pyarrow.Table.from_pylist([row, row]), path)
    assert TASKS["csqa"].read(path) == TASKS["csqa"].examples([row, row])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"x\.parquet is no complete Parquet file"):
        TASKS["csqa"].read(path)
    no_text = pyarrow.array([b"\xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": no_text, "label": [0]}), path)
    with pytest.raises(ValueError, match=r"x\.parquet is no complete Parquet file .*can't decode"):
        TASKS["mr"].read(path)


def test_parquet_without_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(ImportError, match=r"needs the extra 'data': pip install 'zerotuning\[data\]'"):
        TASKS["mr"].read(tmp_path / "x.parquet")


def test_error_within_the_parquet_library_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "pyarrow").mkdir()
    (tmp_path / "pyarrow/__init__.py").write_text("import what_pyarrow_needs")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match="what_pyarrow_needs"):
        TASKS["mr"].read(tmp_path / "x.parquet")


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
        {"values": ("0", " 0")},
        {"labels": ("A", "C"), "kind": "multiple_choice", "template": "{text}{choices}", "choice_columns": ("c",)},
        {"labels": ("A", "B"), "kind": "multiple_choice", "choice_columns": ("c",)},
        {"labels": ("A", "B"), "kind": "multiple_choice", "template": "{text}{choices}"},
        {"choice_columns": ("choices",)},
        {"body": "no column"},
        {"body": "{passage}", "text_column": "sentence"},
    ],
)
def test_bad_task(arguments):
    with pytest.raises(ValueError, match=r"^(template|labels|values|choice_columns|body) "):
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
    assert TASKS["mr"].read(path.rename(tmp_path / "x.CSV")) == [Example("fine", 1)]
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
        ("a.csv", "label,text\n1,fine\n0,dull, and long\n", "line 3: more cells than the 2 of the header"),
        ("a.xml", "", r"must end in \.jsonl, \.csv, \.txt or \.parquet"),
        ("a.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("a.jsonl", '\n{"text": " ", "label": 0}\n', "line 2: 'text' must be a text"),
        ("a.jsonl", '{"text": ["x"], "label": 0}\n', "line 1: 'text' must be a text"),
        ("a.jsonl", '{"text": "\\ud800", "label": 0}\n', "line 1: 'text' holds half of a surrogate pair"),
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


def test_lines_of_a_text_file(tmp_path):
    (tmp_path / "a.txt").write_text("one, two\n\nthree\n")
    assert [example.text for example in TASKS["sst2"].read(tmp_path / "a.txt", labelled=False)] == ["one, two", "three"]
    with pytest.raises(ValueError, match=r"a\.txt, line 1: no 'label'"):
        TASKS["sst2"].read(tmp_path / "a.txt")
