"""Tasks: the prompt, the label words, how an answer is read, and where the data lies."""

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from separata_kit.files import read_json_object, write_text
from separata_kit.rows import column, is_text, read_rows, text

from zerotuning.choices import choices
from zerotuning.metrics import UNPARSED

Kind = Literal["classification", "multiple_choice"]

SCHEMA = "zerotuning/task"
SCHEMA_VERSION = 1

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = "123456789"
_FIELD = re.compile(r"\{([^{}]+)\}")

# What data sets write where a label is kept secret.
_HIDDEN = ("-1", "")


@dataclasses.dataclass(frozen=True)
class Example:
    """One text, with its label if that is known.

    Attributes:
        text: The text, or the question of a multiple-choice item.
        label: Index of its label in the task's `labels`; None if unknown.
        choices: The options of a multiple-choice item, in order.
    """

    text: str
    label: int | None = None
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """How to ask for a label, and how to read the answer.

    A column may be given as `"a|b"`: whichever of the two a row has.

    Attributes:
        name: For reports.
        template: The prompt, with `{text}` once where the text goes, and for multiple choice `{choices}` once where the
            lines `A. ...` go. It ends where the label word is to follow.
        labels: The label words, without the leading space that the model puts before them. For multiple choice the
            letters from A on, as many as an item has options at most.
        text_column: Column (CSV, Parquet) or key (JSON Lines) of the text.
        label_column: Column or key of the label.
        values: What the label column holds for each label. If empty: for classification its word, its index (unless
            words are numbers) or, of two labels, false and true; for multiple choice the item's own name of the
            option, or else its letter or its index from 0.
        kind: `"classification"` or `"multiple_choice"`.
        body: What makes the text where it takes more than one column, such as `"{passage} {question}"`; in place
            of `text_column`.
        choice_columns: Of multiple choice: one column for each option, or one that holds them all.
    """

    name: str
    template: str
    labels: tuple[str, ...]
    text_column: str = "text"
    label_column: str = "label"
    values: tuple[str, ...] = ()
    kind: Kind = "classification"
    body: str = ""
    choice_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what is given.

        Raises:
            ValueError: No single `{text}` or `{choices}`, fewer than two labels, empty or equal label words, letters
                out of order, values that do not match, both a body and a text column, or choice columns for
                classification.
        """
        _check_kind(self.kind)
        is_choice = self.kind == "multiple_choice"
        for field in ("{text}", "{choices}")[: 1 + is_choice]:
            if self.template.count(field) != 1:
                raise ValueError(f"template must contain {field!r} once; it is {self.template!r}")
        words = [word.lower() for word in self.labels]
        if len(words) < 2 or len(set(words)) != len(words) or any(not word or word != word.strip() for word in words):
            raise ValueError(
                f"labels must be two or more different words without blanks around them; they are {self.labels!r}"
            )
        if is_choice and self.labels != tuple(_LETTERS[: len(words)]):
            raise ValueError(f"labels of multiple choice must be A, B and so on in order; they are {self.labels!r}")
        if is_choice != bool(self.choice_columns):
            raise ValueError(
                f"choice_columns must name columns for multiple choice only; it is {self.choice_columns!r}"
            )
        if self.values and len(self.values) != len(self.labels):
            raise ValueError(f"values has {len(self.values)} entries for {len(self.labels)} labels")
        if len({value.strip().lower() for value in self.values}) != len(self.values):
            raise ValueError(f"values must be different for each label; they are {self.values!r}")
        if self.body and (self.text_column != "text" or _FIELD.search(self.body) is None):
            raise ValueError(f"body must name columns in braces, and leaves none to text_column; it is {self.body!r}")

    def prompt(self, item: Example | str) -> str:
        """The prompt for one item, raw text without a chat template.

        Args:
            item: The item, or for classification its text; blanks around the text are dropped. Braces in it stay as
                they are.

        Returns:
            The prompt.

        Raises:
            ValueError: A multiple-choice item has no options, or more than there are labels, or its text cannot be
                encoded.
        """
        if isinstance(item, str):
            item = Example(item)
        try:
            "".join((item.text, *item.choices)).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"a text holds half of a surrogate pair at character {error.start}, which no tokenizer takes"
            ) from None
        fields = {"{text}": item.text.strip()}
        if self.kind == "multiple_choice":
            self._check_choices(item)
            lines = zip(self.labels, item.choices, strict=False)
            fields["{choices}"] = "\n".join(f"{letter}. {choice.strip()}" for letter, choice in lines)
        # In one pass, so that nothing within a text is taken for a field.
        return re.sub("|".join(map(re.escape, fields)), lambda found: fields[found[0]], self.template)

    def options(self, item: Example | str | None = None) -> tuple[str, ...]:
        """The label words among which an item's answer lies.

        Args:
            item: The item; without options of its own, or None, all labels.

        Returns:
            The words: all for classification, as many letters as the item has options for multiple choice.

        Raises:
            ValueError: A multiple-choice item has one option, or more than there are labels.
        """
        if self.kind == "classification" or not isinstance(item, Example) or not item.choices:
            return self.labels
        self._check_choices(item)
        return self.labels[: len(item.choices)]

    def parse(self, answer: str, item: Example | str | None = None) -> int:
        """Read a label from generated text (structure of the authors' scoring).

        For classification it is the first label word in the text, whatever its case; of two that begin at one place the
        longer. For multiple choice it is the first character that names an option, a letter in either case or a digit
        from 1 on, be it at the beginning or anywhere, within a word too. Deviation: only options that the item has
        count, the authors take a to e and 1 to 5 always.

        Args:
            answer: What the model wrote.
            item: What it was asked; None counts as an item with all labels.

        Returns:
            The label's index, or `UNPARSED`.
        """
        words = [word.lower() for word in self.options(item)]
        answer = answer.lower()
        if self.kind == "multiple_choice":
            names = {**dict(zip(_DIGITS, range(len(words)), strict=False)), **{w: i for i, w in enumerate(words)}}
            return next((names[each] for each in answer if each in names), UNPARSED)
        found = [(answer.find(word), -len(word), index) for index, word in enumerate(words)]
        found = [place for place in found if place[0] >= 0]
        return min(found)[2] if found else UNPARSED

    def label_tokens(self, tokenizer: Any) -> list[list[int]]:
        """The tokens of each label word as they follow a prompt.

        Args:
            tokenizer: A transformers tokenizer.

        Returns:
            One list of token ids for each label.

        Raises:
            ValueError: Two labels have the same tokens, or one has none.
        """
        stem = self.prompt(Example("x", choices=("x",) * len(self.labels)))
        before: list[int] = tokenizer(stem)["input_ids"]
        tokens = []
        for word in self.labels:
            # In context, because some tokenizers put a blank of their own before a text that stands alone.
            joint: list[int] = tokenizer(f"{stem} {word}")["input_ids"]
            alone: list[int] = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
            tokens.append(joint[len(before) :] if joint[: len(before)] == before else alone)
        if any(not ids for ids in tokens) or len({tuple(ids) for ids in tokens}) != len(tokens):
            raise ValueError(f"the tokenizer cannot tell the labels {self.labels!r} apart; choose other words")
        return tokens

    def read(self, path: str | os.PathLike[str], labelled: bool | None = None) -> list[Example]:
        """Read items from a file.

        Args:
            path: A `.csv` (with a header), `.jsonl` or, with the `data` extra, `.parquet` file; UTF-8. Without labels
                also a `.txt` file, of which each line is a text.
            labelled: As for `examples`.

        Returns:
            The examples, in order.

        Raises:
            ValueError: Another kind of file, a missing column, an empty text, an unknown label; the line is named.
            ImportError: A `.parquet` file without the `data` extra.
            OSError: The file cannot be read.
        """
        return [
            self._example(row, place, labelled)
            for place, row in read_rows(path, extra="zerotuning[data]", text_column=self.text_column)
        ]

    def examples(self, rows: Iterable[Mapping[str, Any]], labelled: bool | None = None) -> list[Example]:
        """Take items from rows, such as those of a `datasets.Dataset`.

        Args:
            rows: Mappings from column names to values.
            labelled: True: every row must have a label. False: rows may lack it, as the unsupervised mode needs none.
                None: the column must be there, and where it hides the label (-1 or an empty text, as the test splits
                of some data sets do) the example has none.

        Returns:
            The examples, in order.

        Raises:
            ValueError: No mapping, a missing column, an empty text, an unknown label; the row is named, counted from 0.
        """
        return [self._example(row, f"row {number}", labelled) for number, row in enumerate(rows)]

    def _example(self, row: object, place: str, labelled: bool | None) -> Example:
        try:
            if not isinstance(row, Mapping):
                raise ValueError(  # noqa: TRY004, TRY301  # told like all that is wrong with a row
                    f"expected a mapping from columns to values, found {type(row).__name__}; of a pandas.DataFrame "
                    'give to_dict("records"), of a datasets.DatasetDict one of its splits'
                )
            if self.body:
                content = _FIELD.sub(lambda found: text(row, found[1]).strip(), self.body)
            else:
                content = text(row, self.text_column)
            options, own = choices(row, self.choice_columns) if self.choice_columns else ((), ())
            example = Example(content, None, options)
            if self.kind == "multiple_choice":
                self._check_choices(example)
            return dataclasses.replace(example, label=self._label(row, example, own, labelled))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None

    def _label(
        self, row: Mapping[str, Any], example: Example, own: tuple[str, ...], labelled: bool | None
    ) -> int | None:
        try:
            name, value = column(row, self.label_column)
        except ValueError:
            if labelled is False:
                return None
            raise
        value = str(value).strip().lower()
        names = self.values or own
        words = self.options(example)
        if names:
            meanings = {name.strip().lower(): index for index, name in zip(range(len(words)), names, strict=False)}
        else:
            meanings = {word.lower(): index for index, word in enumerate(words)}
            # Where label words are numbers, an index could be taken for another label's word.
            if not any(word.isdigit() for word in words):
                meanings |= {str(index): index for index in range(len(words))}
            if len(words) == 2 and self.kind == "classification":
                meanings = {"false": 0, "true": 1} | meanings
        if value not in meanings:
            # Whole numbers beside missing ones are floats to pandas.
            value = re.sub(r"\.0+$", "", value)
        if value in meanings:
            return meanings[value]
        if value in _HIDDEN and not labelled:
            return None
        raise ValueError(f"{name} {value!r} is none of {sorted(meanings)}")

    def _check_choices(self, item: Example) -> None:
        if not 2 <= len(item.choices) <= len(self.labels):
            raise ValueError(
                f"an item has {len(item.choices)} choices; {self.name} takes 2 to {len(self.labels)}, one for each of "
                "its labels"
            )

    def to_json(self) -> dict[str, Any]:
        """A form for JSON, without what is at its default."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
            if value != defaults[name]
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "TaskSpec":
        """Make a task from the form that `to_json` gives.

        Args:
            body: The attributes by name; lists for tuples. What is left out has its default.

        Returns:
            The task.

        Raises:
            ValueError: An attribute is unknown, missing or of the wrong type, or the task is refused as it would be
                when made by hand.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(map(str, body.keys() - known.keys())):
            raise ValueError(f"a task has no {', '.join(map(repr, unknown))}; it has {', '.join(known)}")
        if missing := [name for name in ("name", "template", "labels") if name not in body]:
            raise ValueError(f"a task needs {', '.join(map(repr, missing))}")
        values: dict[str, Any] = {}
        for name, value in body.items():
            if known[name].type == tuple[str, ...]:
                if not isinstance(value, list | tuple) or not all(is_text(each) for each in value):
                    raise ValueError(f"{name} must be a list of texts; it is {value!r}")
                values[name] = tuple(value)
            elif not isinstance(value, str) or (value and not is_text(value)):
                raise ValueError(f"{name} must be a text; it is {value!r}")
            else:
                values[name] = value
        _check_kind(values.get("kind", cls.kind))
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the file is there completely or not at all.

        Args:
            path: The file, replaced if it exists.
        """
        body = {"schema": SCHEMA, "version": SCHEMA_VERSION, **self.to_json()}
        write_text(path, json.dumps(body, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TaskSpec":
        """Read a file written by `save` or by hand.

        Args:
            path: A JSON object as `from_json` takes it; `schema` and `version` may be left out.

        Returns:
            The task.

        Raises:
            ValueError: No JSON object, of another kind, from a newer version of this package, or no valid task.
            OSError: It cannot be read.
        """
        body = read_json_object(path)
        if body.pop("schema", SCHEMA) != SCHEMA:
            raise ValueError(f"{path} is no task: its 'schema' must be {SCHEMA!r} if it has one")
        version = body.pop("version", SCHEMA_VERSION)
        if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
            raise ValueError(
                f"{path} has version {version!r}; this zerotuning reads 1 to {SCHEMA_VERSION}: install a newer one"
            )
        try:
            return cls.from_json(body)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _check_kind(kind: object) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}; it is {kind!r}")


def check_examples(task: TaskSpec, examples: Sequence[Example]) -> None:
    """Refuse data on which an accuracy says nothing.

    Args:
        task: The task.
        examples: The labelled items.

    Raises:
        ValueError: There are none, one has no label or one that is not among its options, or all have the same.
    """
    check_unlabelled(task, examples)
    found = sorted(set(true_labels(examples)))
    if found[0] < 0 or found[-1] >= len(task.labels):
        raise ValueError(f"labels {found} occur in the data; {task.name} has labels 0 to {len(task.labels) - 1}")
    for number, example in enumerate(examples):
        words = task.options(example)
        if example.label not in range(len(words)):
            raise ValueError(f"example {number} has label {example.label}; its options are 0 to {len(words) - 1}")
    if len(found) == 1:
        raise ValueError(
            f"all {len(examples)} examples have the label {task.labels[found[0]]!r}; at least two labels are needed"
        )


def check_unlabelled(task: TaskSpec, examples: Sequence[Example]) -> None:
    """Refuse items that cannot be asked; labels are of no account.

    Args:
        task: The task.
        examples: The items.

    Raises:
        ValueError: There are none, or a multiple-choice item has too few or too many options.
    """
    if not examples:
        raise ValueError("the data are empty; at least one item is needed, and two with labels")
    if task.kind == "multiple_choice":
        for number, example in enumerate(examples):
            if not 2 <= len(example.choices) <= len(task.labels):
                raise ValueError(
                    f"example {number} has {len(example.choices)} choices; {task.name} takes 2 to {len(task.labels)}"
                )


def true_labels(examples: Sequence[Example]) -> list[int]:
    """The labels of labelled items.

    Args:
        examples: The items.

    Returns:
        Their labels, in order.

    Raises:
        ValueError: One has none.
    """
    labels = [example.label for example in examples if example.label is not None]
    if len(labels) < len(examples):
        first = next(number for number, example in enumerate(examples) if example.label is None)
        raise ValueError(
            f"{len(examples) - len(labels)} of {len(examples)} examples have no label, the first is example {first}; "
            "only the unsupervised mode does without"
        )
    return labels


def is_one_token(task: TaskSpec, tokens: Sequence[Sequence[int]]) -> bool:
    """Whether one generated token decides between the labels; warns if not.

    Args:
        task: The task.
        tokens: Its `label_tokens`.

    Returns:
        True if each label word is one token (and so a different one for each).
    """
    if all(len(ids) == 1 for ids in tokens):
        return True
    long = [word for word, ids in zip(task.labels, tokens, strict=True) if len(ids) > 1]
    warnings.warn(
        f"the label words {long} have several tokens: the constrained accuracy compares the likelihoods of whole "
        "words, but answers are parsed from their first token, which counts if just one label word begins with it",
        stacklevel=3,
    )
    return False


_SENTIMENT = "Choose the sentiment of the {what}: negative or positive.\n{short}: {{text}}\nAnswer:"
_QUESTION = "Choose the right answer.\nQuestion: {text}\n{choices}\nAnswer:"


def _multiple_choice(
    name: str,
    choice_columns: tuple[str, ...],
    label_column: str,
    *,
    template: str = _QUESTION,
    most: int = 4,
    **own: str,
) -> TaskSpec:
    return TaskSpec(
        name=name,
        template=template,
        labels=tuple(_LETTERS[:most]),
        label_column=label_column,
        kind="multiple_choice",
        choice_columns=choice_columns,
        **own,  # type: ignore[arg-type]  # only text_column and body are given
    )


_BUILT_IN = (
    TaskSpec(
        name="sst2",
        template=_SENTIMENT.format(what="sentence", short="Sentence"),
        labels=("negative", "positive"),
        text_column="sentence|text",
    ),
    TaskSpec(
        name="sst5",
        template="Choose the rating of the sentence: terrible, bad, okay, good or great.\nSentence: {text}\nAnswer:",
        labels=("terrible", "bad", "okay", "good", "great"),
    ),
    TaskSpec(
        name="mr",
        template=_SENTIMENT.format(what="movie review", short="Review"),
        labels=("negative", "positive"),
    ),
    TaskSpec(
        name="subj",
        template="Say whether the sentence is objective or subjective.\nSentence: {text}\nAnswer:",
        labels=("objective", "subjective"),
    ),
    TaskSpec(
        name="dbpedia",
        template="Choose what the article is about: company, school, artist, athlete, politician, vehicle, building, "
        "nature, village, animal, plant, album, film or book.\nArticle: {text}\nCategory:",
        labels=(
            *("company", "school", "artist", "athlete", "politician", "vehicle", "building"),
            *("nature", "village", "animal", "plant", "album", "film", "book"),
        ),
        text_column="content",
    ),
    TaskSpec(
        name="agnews",
        template="Choose the topic of the article: world, sports, business or technology.\nArticle: {text}\nCategory:",
        labels=("world", "sports", "business", "technology"),
    ),
    TaskSpec(
        name="trec",
        template="Choose what the question asks for: abbreviation, entity, description, person, location or number.\n"
        "Question: {text}\nType:",
        labels=("abbreviation", "entity", "description", "person", "location", "number"),
        label_column="coarse_label",
    ),
    TaskSpec(
        name="cb",
        template="Say whether the statement follows from the text: yes, no or maybe.\nText: {text}\nAnswer:",
        labels=("yes", "no", "maybe"),
        body="{premise}\nStatement: {hypothesis}",
    ),
    TaskSpec(
        name="boolq",
        template="Answer the question about the text: no or yes.\nText: {text}\nAnswer:",
        labels=("no", "yes"),
        label_column="answer|label",
        body="{passage}\nQuestion: {question}",
    ),
    _multiple_choice("arc_easy", ("choices",), "answerKey", text_column="question", most=5),
    _multiple_choice("arc_challenge", ("choices",), "answerKey", text_column="question", most=5),
    _multiple_choice(
        "hellaswag",
        ("endings",),
        "label",
        text_column="ctx",
        template="Choose how the text goes on.\nText: {text}\n{choices}\nAnswer:",
    ),
    _multiple_choice(
        "piqa",
        ("sol1", "sol2"),
        "label",
        text_column="goal",
        template="Choose the way that works.\nGoal: {text}\n{choices}\nAnswer:",
        most=2,
    ),
    _multiple_choice("openbookqa", ("choices",), "answerKey", text_column="question_stem"),
    _multiple_choice(
        "copa",
        ("choice1", "choice2"),
        "label",
        # The column `question` holds "cause" or "effect".
        body="{premise}\nQuestion: What is the more likely {question}?",
        template="Choose the right answer.\nText: {text}\n{choices}\nAnswer:",
        most=2,
    ),
    _multiple_choice("csqa", ("choices",), "answerKey", text_column="question", most=5),
    _multiple_choice("aqua", ("options",), "correct", text_column="question", most=5),
    _multiple_choice("mmlu", ("choices",), "answer", text_column="question"),
    _multiple_choice("mathqa", ("options",), "correct", text_column="Problem", most=5),
    _multiple_choice(
        "logiqa",
        ("options",),
        "correct_option|label",
        body="{context}\nQuestion: {query|question}",
        template="Choose the right answer.\nText: {text}\n{choices}\nAnswer:",
    ),
)

TASKS: Mapping[str, TaskSpec] = {task.name: task for task in _BUILT_IN}
"""Tasks by name, in the column layouts that the data sets have on the usual hub: SST-2, SST-5, MR, SUBJ, DBPedia, AG
News, TREC, CB, BoolQ; ARC (easy, challenge), HellaSwag, PIQA, OpenBookQA, COPA, CommonsenseQA, AQuA, MMLU, MathQA,
LogiQA. The prompts have the structure of the authors', in words of our own."""
