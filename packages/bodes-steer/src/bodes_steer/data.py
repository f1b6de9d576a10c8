"""Labelled texts and prompts from files and data sets.

What a row may hold:

- a preference: `prompt`, `chosen` and `rejected`, as texts or as lists of messages, with or without the prompt as a
  column of its own (all the forms that TRL takes);
- a labelled text: `text` (or a list of messages in `messages`) and `label`.
"""

import dataclasses
import json
import os
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from separata_kit import extras
from separata_kit.rows import has_half_pair, read_rows, shown, text

Text = str | list[dict[str, str]]
"""A plain text, or the messages of a conversation for the chat template."""

KINDS = ("auto", "preference", "labelled")
"""What rows may be."""

TEMPLATE = "{prompt}\n{response}"
"""How a prompt and a response become one text (as the paper does it for UltraFeedback)."""

_POSITIVE = ("1", "true", "positive", "pos")
_NEGATIVE = ("0", "false", "negative", "neg")

_Rows = Iterator[tuple[str, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Example:
    """One text of one class.

    Attributes:
        text: The text, or messages.
        label: 1 for positive (where steering is to lead), 0 for negative.
        group: What the examples that belong together share, such as the two answers to one prompt; a split never
            parts them.
    """

    text: Text
    label: int
    group: str


def read_examples(
    source: "str | os.PathLike[str] | Iterable[Any]",
    *,
    kind: str = "auto",
    template: str = TEMPLATE,
    chat: bool = False,
    text_column: str = "text",
    label_column: str = "label",
    positive: str | None = None,
    split: str | None = None,
) -> list[Example]:
    r"""Read labelled texts.

    Args:
        source: A `.jsonl`, `.csv` or `.parquet` file, a folder written by `datasets.Dataset.save_to_disk`, or rows
            such as a `datasets.Dataset`.
        kind: `"preference"` (`prompt`, `chosen`, `rejected`), `"labelled"` (`text`, `label`), or `"auto"`, which takes
            what the first row has.
        template: How a plain prompt and response are put together; of account only for these.
        chat: Make messages, for the chat template, of a plain prompt and response.
        text_column: Column of a labelled text.
        label_column: Column of its label.
        positive: The label that is positive, all others are negative. Without it labels must be 1 or 0, true or
            false, positive or negative.
        split: Which part of a `datasets.DatasetDict`.

    Returns:
        The examples, in the order of the rows, the chosen one of a pair first. Pairs whose two answers are the same,
        or whose `score_chosen` is not above `score_rejected`, are left out with a warning.

    Raises:
        ValueError: A row that is not as it should be: the message names the line and the column. Or there is no
            example of one of the classes.
        ImportError: A Parquet file or a folder without the extra `data`.
        OSError: The file cannot be read.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is none of {', '.join(KINDS)}")
    parts = _template_parts(template)
    found: list[Example] = []
    left_out = 0
    name = source if isinstance(source, str | os.PathLike) else "the data"
    for number, (where, row) in enumerate(_rows(source, split)):
        if kind == "auto":
            kind = _kind_of(row, where, text_column, label_column)
        try:
            if kind == "preference":
                pair = _pair(row, number, parts, chat)
                left_out += not pair
                found += pair
            else:
                found.append(_labelled(row, number, text_column, label_column, positive))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if left_out:
        warnings.warn(
            f"{left_out} pairs of {name} are left out: their two answers are the same, or score_chosen is not above "
            "score_rejected",
            stacklevel=2,
        )
    for label, word in ((1, "positive"), (0, "negative")):
        if not any(each.label == label for each in found):
            raise ValueError(f"{name} holds no {word} example; both classes are needed")
    return found


def read_prompts(source: "str | os.PathLike[str] | Iterable[Any]", *, chat: bool = False) -> list[Text]:
    """Read prompts to continue.

    Args:
        source: A `.txt` file with one prompt in each line, or what `read_examples` takes, with the column `prompt` (or
            `messages`, or else `text`).
        chat: Make a user's message of each plain prompt.

    Returns:
        The prompts, in order.

    Raises:
        ValueError: A row without a prompt, or no row; the message names the line.
        ImportError: A Parquet file or a folder without the extra `data`.
        OSError: The file cannot be read.
    """
    found: list[Text] = []
    for where, row in _rows(source, None):
        try:
            name = next((each for each in ("prompt", "messages", "text") if row.get(each) is not None), "prompt")
            value = row.get(name)
            prompt: Text = _messages(value, name) if isinstance(value, list | tuple) else text(row, name)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        found.append([{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt)
    if not found:
        raise ValueError(f"{source if isinstance(source, str | os.PathLike) else 'the data'}: there is no prompt")
    return found


def split_groups(groups: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Part examples by chance, those of one group together.

    Args:
        groups: The group of each example.
        share: Of the groups that go into the second part, above 0 and below 1.
        seed: Seed of the choice.

    Returns:
        Indices of the first part and of the second, both in order; at least one group in each.

    Raises:
        ValueError: `share` is no such number, or there are fewer than two groups.
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share!r} must lie above 0 and below 1")
    names = list(dict.fromkeys(groups))
    if len(names) < 2:
        raise ValueError(
            f"there are {len(names)} groups of examples (those of one prompt are one group); at least two are "
            "needed to hold some out"
        )
    random.Random(seed).shuffle(names)  # noqa: S311  # a choice of examples, no secret
    held_out = set(names[: min(max(round(share * len(names)), 1), len(names) - 1)])
    first = [index for index, group in enumerate(groups) if group not in held_out]
    return first, [index for index, group in enumerate(groups) if group in held_out]


def _template_parts(template: str) -> tuple[str, str, str]:
    before, first, rest = template.partition("{prompt}")
    between, second, after = rest.partition("{response}")
    if not first or not second:
        raise ValueError(f"template={template!r} must hold {{prompt}} and, after it, {{response}}")
    return before, between, after


def _kind_of(row: Mapping[str, Any], where: str, text_column: str, label_column: str) -> str:
    if "chosen" in row or "rejected" in row:
        return "preference"
    if (text_column in row or "messages" in row) and label_column in row:
        return "labelled"
    raise ValueError(
        f"{where}: the columns are {sorted(map(str, row))}; wanted are 'chosen' and 'rejected' (and 'prompt'), or "
        f"{text_column!r} and {label_column!r}"
    )


def _labelled(
    row: Mapping[str, Any], number: int, text_column: str, label_column: str, positive: str | None
) -> Example:
    if text_column not in row and row.get("messages") is not None:
        return Example(_messages(row["messages"], "messages"), _label(row, label_column, positive), str(number))
    said: Text = (
        _messages(row[text_column], text_column)
        if isinstance(row.get(text_column), list | tuple)
        else text(row, text_column)
    )
    return Example(said, _label(row, label_column, positive), str(number))


def _label(row: Mapping[str, Any], name: str, positive: str | None) -> int:
    value = row.get(name)
    if value is None or value == "":
        raise ValueError(f"no {name!r}; the columns are {sorted(map(str, row))}")
    # JSON and Parquet may hold the number 1.0.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    word = str(value).strip()
    if positive is not None:
        return int(word == positive)
    if word.lower() not in (*_POSITIVE, *_NEGATIVE):
        raise ValueError(
            f"{name!r} is {shown(value)}; it must be 1 or 0, true or false, positive or negative, or say which label "
            "is the positive one (positive=...)"
        )
    return int(word.lower() in _POSITIVE)


def _pair(row: Mapping[str, Any], number: int, parts: tuple[str, str, str], chat: bool) -> list[Example]:
    """The chosen and the rejected example of a row, or none where they are not to be told apart."""
    answers = [row.get("chosen"), row.get("rejected")]
    prompt = row.get("prompt")
    conversational = [isinstance(each, list | tuple) for each in answers]
    if any(conversational):
        if not all(conversational):
            raise ValueError("'chosen' and 'rejected' must both be texts or both be lists of messages")
        chosen, rejected = (_messages(row[name], name) for name in ("chosen", "rejected"))
        before: list[dict[str, str]] = []
        if isinstance(prompt, list | tuple):
            before = _messages(prompt, "prompt")
        elif prompt is not None and chosen[0]["role"] != "user":
            before = [{"role": "user", "content": text(row, "prompt")}]
        texts: list[Text] = [before + chosen, before + rejected]
        shared = [*before, *chosen[:-1]] or None
        group = json.dumps(shared) if shared else str(number)
    else:
        strings = [text(row, name) for name in ("chosen", "rejected")]
        group = str(number)
        texts = [*strings]
        if isinstance(prompt, list | tuple):
            messages = _messages(prompt, "prompt")
            texts = [[*messages, {"role": "assistant", "content": each}] for each in strings]
            group = json.dumps(messages)
        elif prompt is not None and prompt != "":
            group = text(row, "prompt")
            before_it, between, after = parts
            texts = [
                [{"role": "user", "content": group}, {"role": "assistant", "content": each}]
                if chat
                else f"{before_it}{group}{between}{each}{after}"
                for each in strings
            ]
        elif chat:
            raise ValueError("no 'prompt', which the chat template needs beside 'chosen' and 'rejected'")
    if texts[0] == texts[1] or not _better(row):
        return []
    return [Example(texts[0], 1, group), Example(texts[1], 0, group)]


def _better(row: Mapping[str, Any]) -> bool:
    high, low = row.get("score_chosen"), row.get("score_rejected")
    if high is None or low is None:
        return True
    try:
        return float(high) > float(low)
    except (TypeError, ValueError):
        raise ValueError(
            f"'score_chosen' and 'score_rejected' must be numbers; they are {shown(high)} and {shown(low)}"
        ) from None


def _messages(value: Any, name: str) -> list[dict[str, str]]:
    made = []
    for each in value:
        if not isinstance(each, Mapping) or not all(isinstance(each.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{name!r} must hold messages with 'role' and 'content'; one is {shown(each)}")
        if has_half_pair(each["content"]):
            raise ValueError(f"{name!r} holds half of a surrogate pair: {shown(each)}")
        made.append({"role": each["role"], "content": each["content"]})
    if not made:
        raise ValueError(f"{name!r} holds no message")
    return made


def _rows(source: "str | os.PathLike[str] | Iterable[Any]", split: str | None) -> _Rows:
    """The rows of whatever it is, each with the place where it stands."""
    before = ""
    if isinstance(source, str | os.PathLike):
        if not Path(source).is_dir():
            if split is not None:
                raise ValueError(f"split={split!r} is for data sets with parts; {source} is a file")
            yield from read_rows(source, extra="bodes-steer[data]", text_column="prompt")
            return
        source, before = _from_disk(Path(source)), f"{source}, "
    # A data set in parts is a mapping of them.
    if isinstance(source, Mapping):
        if split is None or split not in source:
            raise ValueError(f"{before}split={split!r} must name one of the parts: {', '.join(map(str, source))}")
        source = source[split]
    elif split is not None:
        raise ValueError(f"{before}split={split!r}: the data set has no parts")
    for where, row in read_rows(source):
        yield f"{before}{where}", row


def _from_disk(path: Path) -> Any:
    datasets = extras.load("datasets", f"{path}: a folder of a data set needs", "bodes-steer[data]")
    try:
        return datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{path} is no folder of a saved data set ({error})") from None
