"""The options of multiple-choice items, in the forms in which data sets have them."""

import json
import math
import numbers
import re
from collections.abc import Mapping
from typing import Any

from separata_kit.rows import column, is_text, shown

# Options that carry their letters: "A)30 km" each, or all in one text, "a ) 30 km , b ) 40 km".
_MARKED = re.compile(r"\s*\(?([a-z])\s*(?:\)|[.:]\s)\s*(.*)", re.IGNORECASE | re.DOTALL)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


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
            f"{name!r} must hold the options; it is {shown(row.get(name))}"
        )
    texts = [str(each) if _is_number(each) else each for each in options]
    for each in texts:
        if not is_text(each):
            raise ValueError(f"{name!r} must hold options that are texts and not empty; one is {shown(each)}")
    if own and len(own) != len(texts):
        raise ValueError(f"{name!r} has {len(own)} labels for {len(texts)} options")
    if len({str(each).strip().lower() for each in own}) != len(own):
        raise ValueError(f"{name!r} has one label for several options: {shown(own)}")
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
