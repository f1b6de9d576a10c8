"""Classification tasks: the prompt, the label words, and where the data lies."""

import csv
import dataclasses
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerotuning.metrics import UNPARSED


@dataclasses.dataclass(frozen=True)
class Example:
    """One labelled text.

    Attributes:
        text: The text.
        label: Index of its label in the task's `labels`.
    """

    text: str
    label: int


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """How to ask for a label, and how to read the answer.

    Attributes:
        name: For reports.
        template: The prompt, with `{text}` once where the text goes. It ends where the label word is to follow.
        labels: The label words, without the leading space that the model puts before them.
        text_column: Column (CSV) or key (JSON Lines) of the text.
        label_column: Column or key of the label.
        values: What the label column holds for each label; if empty, its word, or its index unless words are numbers.
    """

    name: str
    template: str
    labels: tuple[str, ...]
    text_column: str = "text"
    label_column: str = "label"
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what is given.

        Raises:
            ValueError: No single `{text}`, fewer than two labels, empty or equal label words, or values that do not
                match.
        """
        if self.template.count("{text}") != 1:
            raise ValueError(f"template must contain '{{text}}' once; it is {self.template!r}")
        words = [word.lower() for word in self.labels]
        if len(words) < 2 or len(set(words)) != len(words) or any(not word or word != word.strip() for word in words):
            raise ValueError(
                f"labels must be two or more different words without blanks around them; they are {self.labels!r}"
            )
        if self.values and len(self.values) != len(self.labels):
            raise ValueError(f"values has {len(self.values)} entries for {len(self.labels)} labels")

    def prompt(self, text: str) -> str:
        """The prompt for one text.

        Args:
            text: The text; blanks around it are dropped.

        Returns:
            The prompt.
        """
        return self.template.replace("{text}", text.strip())

    def parse(self, answer: str) -> int:
        """Read a label from generated text: the first label word in it, whatever its case.

        Args:
            answer: What the model wrote.

        Returns:
            The label's index, or `UNPARSED`.
        """
        answer = answer.lower()
        found = [(answer.find(word.lower()), -len(word), index) for index, word in enumerate(self.labels)]
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
        stem = self.prompt("x")
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

    def read(self, path: str | os.PathLike[str]) -> list[Example]:
        """Read labelled texts from a file.

        Args:
            path: A `.csv` (with a header) or `.jsonl` file, UTF-8.

        Returns:
            The examples, in order.

        Raises:
            ValueError: Another kind of file, a missing column, an empty text, an unknown label; the line is named.
            OSError: The file cannot be read.
        """
        path = Path(path)
        read = {".csv": _csv_rows, ".jsonl": _json_rows, ".ndjson": _json_rows}.get(path.suffix)
        if read is None:
            raise ValueError(f"{path} must end in .csv or .jsonl")
        try:
            # Spreadsheets put a byte order mark before UTF-8.
            with path.open(encoding="utf-8-sig", newline="") as file:
                return self._examples(path, read(path, file))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from None

    def _examples(self, path: Path, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> list[Example]:
        meanings = {word.lower(): index for index, word in enumerate(self.labels)}
        if self.values:
            meanings = {value.lower(): index for index, value in enumerate(self.values)}
        elif not any(word.isdigit() for word in meanings):
            # Where label words are numbers, an index could be taken for another label's word.
            meanings |= {str(index): index for index in range(len(self.labels))}
        examples = []
        for line, row in rows:
            for column in (self.text_column, self.label_column):
                if row.get(column) is None:
                    raise ValueError(f"{path}, line {line}: no {column!r}; the columns are {sorted(map(str, row))}")
            text, value = row[self.text_column], str(row[self.label_column]).strip().lower()
            if not _is_text(text):
                raise ValueError(f"{path}, line {line}: {self.text_column!r} must be a text that is not empty")
            if value not in meanings:
                raise ValueError(f"{path}, line {line}: label {value!r} is none of {sorted(meanings)}")
            examples.append(Example(text, meanings[value]))
        return examples


def _is_text(value: object) -> bool:
    # JSON can escape half of a surrogate pair, which no tokenizer takes.
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= each <= "\udfff" for each in value)


def _csv_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(lines)
    try:
        for row in reader:
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


def check_examples(task: TaskSpec, examples: Sequence[Example]) -> None:
    """Refuse data on which an accuracy says nothing.

    Args:
        task: The task.
        examples: The labelled texts.

    Raises:
        ValueError: There are none, all have one label, or a label is not of the task.
    """
    if not examples:
        raise ValueError("the data are empty; at least one example of two labels is needed")
    found = sorted({example.label for example in examples})
    if found[0] < 0 or found[-1] >= len(task.labels):
        raise ValueError(f"labels {found} occur in the data; {task.name} has labels 0 to {len(task.labels) - 1}")
    if len(found) == 1:
        raise ValueError(
            f"all {len(examples)} examples have the label {task.labels[found[0]]!r}; at least two labels are needed"
        )


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

TASKS: Mapping[str, TaskSpec] = {
    "sst2": TaskSpec(
        name="sst2",
        template=_SENTIMENT.format(what="sentence", short="Sentence"),
        labels=("negative", "positive"),
        text_column="sentence",
    ),
    "mr": TaskSpec(
        name="mr",
        template=_SENTIMENT.format(what="movie review", short="Review"),
        labels=("negative", "positive"),
    ),
}
"""Tasks by name, in the layouts that the data sets are usually stored in: SST-2 (`sentence`, `label` 0/1) and MR
(`text`, `label`)."""
