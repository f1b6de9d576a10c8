"""Cutting text into sentences, the same way when it is written and when it is tested.

The watermark counts sentences, so a boundary that moves costs the evidence behind it. Segmenters in use look at the
whole text; here they see only short stretches of it. First the text is cut where nobody doubts that a sentence ends: at
breaks of lines that are no mere wraps, and after a full stop behind an ordinary word, outside quotes and brackets, with
a capital letter next. These cuts depend on nothing before the last cut and nothing behind the next letter, so text that
is added later moves none of them. Between two of them the segmenter decides, on its own. So whatever is wrong with a
stretch stays in it, the time is linear in the length, and stretches seen before come from a cache: testing the next
sentence of a long text costs a sentence, not the text.
"""

import contextlib
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

# A stretch longer than the first is cut even inside a quote or bracket, which was then left open by mistake; in one
# longer than the second plain rules decide, since some segmenters take quadratic time. No line shorter than the third
# is a wrapped one. Of the last so many characters of a context more text may still change where they are cut.
_RELAX, _LONGEST, _WRAP, _UNSETTLED = 500, 2000, 40, 8

_CJK_STOPS = "\u3002\uff01\uff1f"
# Full stops and question marks of other scripts; with a full stop behind them they would be no end of a sentence.
_OTHER_STOPS = "\u0589\u061f\u06d4\u0964\u104b\u1362"
_CJK_CLOSERS = "\u201d\u2019\u300d\u300f\uff09"
_BRACKETS = ("()", "[]", "\uff08\uff09", "\u300c\u300d", "\u300e\u300f")
_DOUBLE_QUOTES = '"\u201c\u201d\u201e\u00ab\u00bb'
_BREAK = re.compile("[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]\\s*")
_LIST_MARK = re.compile(r"(?:\d{1,3}|[A-Za-z])[.)]\s")
_BREAK_OR_STOP = re.compile(
    rf"(?P<line>{_BREAK.pattern})|(?<=[^\W\d_])[.?][ \t\xa0]+(?=[^\W\d_])"
    rf"|[{_CJK_STOPS}](?![{_CJK_STOPS}{_CJK_CLOSERS}])"
)
_WORD = re.compile("(?:^|[\\s\"'\u201c\u2018(\\[])([^\\W\\d_]{2,})$")
_END = re.compile(rf"(?<![.!?\u2026])[.!?\u2026]+[\"'\u201d\u2019\u00bb)\]]*\s+|[{_CJK_STOPS}]+[{_CJK_CLOSERS}]*")
_OPENING_QUOTE, _CLOSING_QUOTE = re.compile("(?<!\\w)['\u2018]"), re.compile("['\u2019](?!\\w)")

_STRAIGHT = str.maketrans("\u201c\u201d", '""')
_LANGUAGES = {
    "cs": "czech", "da": "danish", "de": "german", "el": "greek", "en": "english", "es": "spanish", "et": "estonian",
    "fi": "finnish", "fr": "french", "it": "italian", "nl": "dutch", "no": "norwegian", "pl": "polish",
    "pt": "portuguese", "ru": "russian", "sl": "slovene", "sv": "swedish", "tr": "turkish",
}  # fmt: skip


@runtime_checkable
class Segmenter(Protocol):
    """What cuts text into sentences.

    Attributes:
        name: Of kind and language; two segmenters of one name cut alike. It goes into traces and nulls.
    """

    @property
    def name(self) -> str:
        """Of kind and language."""
        ...

    def split(self, text: str) -> list[str]:
        """Cuts a text.

        Args:
            text: Any text.

        Returns:
            Its sentences, stripped, none empty; together they hold every character of the text but white space.
        """
        ...


def make_segmenter(segmenter: str | Segmenter = "pysbd", language: str = "en") -> Segmenter:
    """Gives a segmenter by name.

    Args:
        segmenter: "pysbd", the same on every machine; "punkt", nltk's; "regex", plain rules; or an object with `name`
            and `split`, which is returned as it is.
        language: Two-letter code.

    Returns:
        The segmenter. Where nltk's data is missing it is pysbd's, with a warning, and its name says so.

    Raises:
        ValueError: There is no such segmenter, or not for this language.
        TypeError: `segmenter` is neither a name nor a segmenter.
        ImportError: nltk is not installed.
    """
    if not isinstance(segmenter, str):
        if not isinstance(getattr(segmenter, "name", None), str) or not callable(getattr(segmenter, "split", None)):
            raise TypeError(f"segmenter must be a name or have name and split, not {type(segmenter).__name__}")
        return segmenter
    if segmenter not in ("pysbd", "punkt", "regex"):
        raise ValueError(f"segmenter must be 'pysbd', 'punkt' or 'regex', not {segmenter!r}")
    if segmenter == "punkt":
        judge = _punkt(language)
        if judge is not None:
            return _Segmenter("punkt", language, judge)
        warnings.warn(
            "nltk has no punkt data on this machine (`python -m nltk.downloader punkt_tab` fetches it): using pysbd",
            stacklevel=2,
        )
    return _Segmenter(
        *(("regex", language, _by_rules) if segmenter == "regex" else ("pysbd", language, _pysbd(language)))
    )


class _Segmenter:
    def __init__(self, kind: str, language: str, judge: Callable[[str], Sequence[str]]) -> None:
        self.name = f"{kind}:{language}"
        self._judge = judge
        self._split_stretch = functools.lru_cache(maxsize=8192)(self._split_uncached)
        self.settled = functools.lru_cache(maxsize=1024)(self._settled)

    def split(self, text: str, column: int = 0) -> list[str]:
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, not {type(text).__name__}")
        ends = [*_cuts(text, column), len(text)]
        stretches = (text[start:end].strip() for start, end in itertools.pairwise([0, *ends]))
        return [sentence for stretch in stretches for sentence in self._split_stretch(stretch)]

    def _settled(self, context: str) -> tuple[int, int, tuple[str, ...]]:
        start = max((cut for cut in _cuts(context, 0) if cut <= len(context) - _UNSETTLED), default=0)
        line = max((end.end() for end in _BREAK.finditer(context, 0, start)), default=0)
        return start, start - line, tuple(self.split(context[start:], start - line))

    def _split_uncached(self, stretch: str) -> tuple[str, ...]:
        sentences = None
        if len(stretch) <= _LONGEST:
            # A fault in one odd stretch must not cost the whole text; the rules below take over.
            with contextlib.suppress(Exception):
                # A wrapped line ends no sentence, which pysbd would think.
                sentences = _cut_like(stretch, self._judge(" ".join(stretch.splitlines())))
        return tuple(_cut_like(stretch, _by_rules(stretch)) or () if sentences is None else sentences)


def clean(sentence: str, *, joiner: str = " ") -> str:
    """Makes a candidate a sentence that can be appended (authors' code; stops of other scripts are ours).

    Args:
        sentence: As cut from what the model wrote.
        joiner: What stands for line breaks. The authors remove them without a trace (""), which glues words together.

    Returns:
        One line with straight double quotes that ends in `.`, `?`, `!`, `"` or a stop of another script, a full stop
        put there if need be; empty if there was only white space.
    """
    lines = (line.strip() if joiner else line for line in sentence.splitlines())
    text = joiner.join(line for line in lines if line).translate(_STRAIGHT).rstrip()
    return text if not text.strip() or text[-1] in f'.?!"{_CJK_STOPS}{_OTHER_STOPS}' else text + "."


def join(context: str, sentence: str) -> str:
    """Appends a sentence.

    Args:
        context: The text so far.
        sentence: What follows.

    Returns:
        Both, with one space between them unless there is white space, or nothing, before.
    """
    return context + sentence if not context or context[-1].isspace() else f"{context} {sentence}"


def first_sentence(segmenter: Segmenter, context: str, continuation: str) -> str | None:
    """The first sentence that a continuation adds to its context.

    Args:
        segmenter: What cuts.
        context: The text so far.
        continuation: What the model wrote after it.

    Returns:
        The sentence as written, or None where the continuation only prolongs the last sentence of the context.
    """
    before, sentences = _split_tail(segmenter, context, _continued(context, continuation))
    return sentences[len(before)] if len(before) < len(sentences) else None


def is_complete(segmenter: Segmenter, context: str, continuation: str) -> bool:
    """Whether a continuation holds its first sentence whole, since another one has begun.

    Args:
        segmenter: What cuts.
        context: The text so far.
        continuation: What the model wrote after it so far.

    Returns:
        Whether another sentence has begun. Rarely more text would still join the two: in 3 of 1,455 reviews of films.
    """
    before, sentences = _split_tail(segmenter, context, _continued(context, continuation))
    return len(sentences) > len(before) + 1


def round_trips(segmenter: Segmenter, context: str, sentence: str) -> bool:
    """Whether the detector will find a sentence as the generator appends it.

    Args:
        segmenter: What cuts.
        context: The text so far.
        sentence: What is to be appended.

    Returns:
        Whether the sentences of the whole are those of the context and then exactly this one.
    """
    before, sentences = _split_tail(segmenter, context, join(context, sentence))
    return sentences == [*before, sentence]


def _continued(context: str, continuation: str) -> str:
    # Chat models leave the space between sentences out.
    return context + continuation if continuation[:1].isspace() else join(context, continuation)


def _split_tail(segmenter: Segmenter, context: str, whole: str) -> tuple[Sequence[str], list[str]]:
    """The sentences of the context and of the whole, both from the last certain cut of the context on."""
    if not isinstance(segmenter, _Segmenter):
        return segmenter.split(context), segmenter.split(whole)
    start, column, sentences = segmenter.settled(context)
    return sentences, segmenter.split(whole[start:], column)


def _cuts(text: str, column: int) -> Iterator[int]:
    """Where a text is certainly cut; `column` is how much of its first line lies before it."""
    start, line = 0, -column
    for stop in _BREAK_OR_STOP.finditer(text):
        if stop["line"]:
            certain = not _is_wrap(text, line, stop)
            line = stop.end()
        else:
            certain = _is_certain(text, start, stop)
        if certain:
            start = stop.end()
            yield start


def _is_wrap(text: str, line: int, stop: re.Match[str]) -> bool:
    before = text[max(line, 0) : stop.start()].rstrip()
    return (
        stop.start() - line >= _WRAP
        and before[-1:] not in tuple(f".!?:;\u2026{_CJK_STOPS}")
        and len(stop["line"].splitlines()) == 1
        and text[stop.end() : stop.end() + 1].isalnum()
        and not _LIST_MARK.match(text, stop.end())
    )


def _is_certain(text: str, start: int, stop: re.Match[str]) -> bool:
    if stop.group()[0] in ".?":
        word = _WORD.search(text, max(start, stop.start() - 40), stop.start())
        if not text[stop.end()].isupper() or word is None or word[1].casefold() in _abbreviations():
            return False
    if stop.end() - start > _RELAX:
        return True
    part = text[start : stop.start()]
    return (
        sum(map(part.count, _DOUBLE_QUOTES)) % 2 == 0
        and all(part.count(opening) <= part.count(closing) for opening, closing in map(tuple, _BRACKETS))
        and len(_OPENING_QUOTE.findall(part)) <= len(_CLOSING_QUOTE.findall(part))
    )


def _cut_like(stretch: str, pieces: Sequence[str]) -> list[str] | None:
    """The stretch cut where the pieces end, whatever they did to white space; None if they lost more than that."""
    pieces = ["".join(piece.split()) for piece in pieces]
    if "".join(pieces) != "".join(stretch.split()):
        return None
    places = [i for i, character in enumerate(stretch) if not character.isspace()]
    spans: list[tuple[int, int]] = []
    end = 0
    for piece in filter(None, pieces):
        start, end = end, end + len(piece)
        # Dots or quotes alone are no sentence, but the rest of the one before.
        if spans and not any(map(str.isalnum, piece)):
            start = spans.pop()[0]
        spans.append((start, end))
    return [stretch[places[start] : places[end - 1] + 1] for start, end in spans]


def _by_rules(text: str) -> list[str]:
    pieces, start = [], 0
    for end in _END.finditer(text):
        word = text[start : end.start()].rsplit(maxsplit=1)[-1:]
        short = end.group().rstrip() == "." and word and _is_short(word[0].lstrip("\"'\u201c\u2018([").casefold())
        if not short and not text[end.end() : end.end() + 1].islower():
            pieces.append(text[start : end.end()])
            start = end.end()
    return [*pieces, text[start:]]


def _is_short(word: str) -> bool:
    return word in _abbreviations() or (len(word) == 1 and word.isalpha() and word != "i")


@functools.cache
def _languages() -> Mapping[str, Any]:
    with warnings.catch_warnings():
        # Newer Pythons warn of its escape sequences when they compile it.
        warnings.simplefilter("ignore")
        from pysbd.languages import LANGUAGE_CODES  # type: ignore[import-untyped]  # it ships no types

    return cast("Mapping[str, Any]", LANGUAGE_CODES)


@functools.cache
def _abbreviations() -> frozenset[str]:
    return frozenset(_languages()["en"].Abbreviation.ABBREVIATIONS)


def _pysbd(language: str) -> Callable[[str], Sequence[str]]:
    if language not in _languages():
        raise ValueError(f"language must be one that pysbd knows ({', '.join(_languages())}), not {language!r}")
    import pysbd  # type: ignore[import-untyped]  # it ships no types

    # A fresh one each time, since it keeps the text in an attribute, which threads would share.
    return lambda text: cast("list[str]", pysbd.Segmenter(language=language, clean=False).segment(text))


def _punkt(language: str) -> Callable[[str], Sequence[str]] | None:
    if language not in _LANGUAGES:
        raise ValueError(f"language must be one that punkt knows ({', '.join(_LANGUAGES)}), not {language!r}")
    try:
        from nltk.tokenize import PunktTokenizer  # type: ignore[import-untyped]  # it ships no types
    except ModuleNotFoundError as error:
        if error.name != "nltk":
            raise
        raise ImportError("the punkt segmenter needs nltk: pip install 'pmark[nltk]'") from error
    try:
        return cast("Callable[[str], Sequence[str]]", PunktTokenizer(_LANGUAGES[language]).tokenize)
    except LookupError:
        return None
