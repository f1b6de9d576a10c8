"""Cutting into sentences: the same on both sides, whatever is added, and never for ever."""

import builtins
import re
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import jaxtyping
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pmark.segmentation import Segmenter, clean, first_sentence, is_complete, join, make_segmenter, round_trips

PYSBD = make_segmenter()
RULES = make_segmenter("regex")


class Foreign:
    """Cuts like ours, but is none of ours: nothing is known of its cuts."""

    name = "foreign"

    def split(self, text):
        return PYSBD.split(text)


@pytest.fixture
def seen_by_pysbd(monkeypatch):
    import pysbd

    seen = []
    original = pysbd.Segmenter.segment
    monkeypatch.setattr(pysbd.Segmenter, "segment", lambda self, text: seen.append(text) or original(self, text))
    return seen


def squeezed(text):
    return "".join(text.split())


# What has fooled segmenters: abbreviations, quotes, lists, dots of all kinds, and characters that pysbd uses itself.
PIECES = st.sampled_from(
    ["The old man ran", "It rained", "she said", "and it went on and on for more than forty characters", "Dr", "Mr",
     "e.g", "U.S", "Inc", "is", "in 1999", "3", "1", "a", "No", ".", ".", ".", "?", "!", "...", ",", ";", ":", '"',
     "\u201c", "\u201d", "'", "(", ")", "[", "]", "\n", "\n\n", "\r\n", "\r", " ", " ", " ", " ", "\t", "\u2028",
     "- item", "* x", "i)", "§", "&", "∯", "ȸ", "ᓰ", "☉", "今天天气很好", "。", "\uff01", "\uff1f", "「", "」",
     "\uff08", "Ärger", "¿Qué", "x=f(y);"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=25).map("".join)


@pytest.mark.parametrize("segmenter", [PYSBD, RULES], ids=["pysbd", "regex"])
@given(text=TEXTS)
@example("a ∯ b. ȸ c. & d")
def test_no_character_is_lost_and_no_sentence_is_empty(segmenter, text):
    sentences = segmenter.split(text)
    assert squeezed("".join(sentences)) == squeezed(text)
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)
    place = 0
    for sentence in sentences:
        place = text.index(sentence, place) + len(sentence)


@given(context=TEXTS, addition=TEXTS)
@example("It was a line so long that it was wrapped, right about\n1)", " It is a list. And more of it.")
@example("It was a line so long that it was wrapped, right about\n", "and it rained. Then.")
@example("The old man ran over the hill to the sea. Then it", " rained\nand we left. We")
@example("The old man ran over the hill to the sea. Then it rained\nand we", " left. We ran.")
def test_looking_at_the_end_of_the_context_is_enough(context, addition):
    foreign = Foreign()
    assert first_sentence(PYSBD, context, addition) == first_sentence(foreign, context, addition)
    assert is_complete(PYSBD, context, addition) == is_complete(foreign, context, addition)
    assert round_trips(PYSBD, context, addition) == round_trips(foreign, context, addition)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("The dog ran. It hid.  Then it slept", ["The dog ran.", "It hid.", "Then it slept"]),
        ("It was Dr. Smith. He saw Mr. Jones at 3.5 p.m.", ["It was Dr. Smith.", "He saw Mr. Jones at 3.5 p.m."]),
        ('He said "I go. You stay." Then he left.', ['He said "I go. You stay."', "Then he left."]),
        ("It rained (see Fig. 3. Yes.) all day. We left.", ["It rained (see Fig. 3. Yes.) all day.", "We left."]),
        ("Is it? Yes! Good...", ["Is it?", "Yes!", "Good..."]),
        ("A title\n\nThe text. It goes on.", ["A title", "The text.", "It goes on."]),
        ("Things:\n- one\n- two\n1. three\n2. four", ["Things:", "- one", "- two", "1. three", "2. four"]),
        ("def f(x):\n    return x\n\nf(1)", ["def f(x):", "return x", "f(1)"]),
        ("今天天气很好。我们去公园。你好吗\uff1f好。", ["今天天气很好。", "我们去公园。", "你好吗\uff1f", "好。"]),
        ("Bring these things with you to the old house\n1. bread\n2. wine", [
            "Bring these things with you to the old house", "1. bread", "2. wine"]),
        ("好。。。走吧。好吗\uff1f\uff01走", ["好。。。", "走吧。", "好吗\uff1f\uff01", "走"]),
        ("Well. . . Yes. . .", ["Well. . .", "Yes. . ."]),
        ("", []),
        (" \n\t ", []),
    ],
)  # fmt: skip
def test_sentences(text, sentences):
    assert PYSBD.split(text) == sentences


def test_a_wrapped_line_ends_no_sentence():
    text = "The quick brown fox jumped over the lazy dog near the bank. It ran from the old man who had come. The end."
    for width in (60, 75, 90):
        place = text.rindex(" ", 0, width)
        wrapped = text[:place] + "\n" + text[place + 1 :]
        assert [" ".join(sentence.split()) for sentence in PYSBD.split(wrapped)] == PYSBD.split(text)


def test_plain_rules():
    assert RULES.split("Dr. J. Smith ran. It rained. \"Yes!\" No. 5 won. So did I. He left.") == [
        "Dr. J. Smith ran.", "It rained.", '"Yes!"', "No. 5 won.", "So did I.", "He left.",
    ]  # fmt: skip
    assert make_segmenter("regex", "zh").split("好。好吗\uff1f好") == ["好。", "好吗\uff1f", "好"]


def test_languages():
    assert make_segmenter(language="zh").split("今天好。我们去") == ["今天好。", "我们去"]
    assert make_segmenter(language="de").split("Am 3. Mai kam er. Er blieb.") == ["Am 3. Mai kam er.", "Er blieb."]
    assert make_segmenter(language="hi").split("यह एक है। वह दो है।") == ["यह एक है।", "वह दो है।"]
    assert len({make_segmenter(kind, code).name for kind in ("pysbd", "regex") for code in ("en", "de")}) == 4


def test_an_open_quote_does_not_swallow_the_rest(seen_by_pysbd):
    text = 'He said "and ' + "then the old man ran. Then it rained on us. " * 60
    assert len(make_segmenter().split(text)) > 100
    assert max(map(len, seen_by_pysbd)) < 600


@pytest.mark.parametrize(
    "text",
    ["x" * 10_000, "word " * 20_000, "." * 10_000, "(" * 10_000, '"' * 9_999, "a.b." * 5_000, "\n" * 10_000,
     " " * 10_000, "今" * 10_000, "1. " * 5_000, "x = f(y);\n" * 5_000, "Mr. " * 5_000, "The man ran. " * 10_000,
     "'" * 9_999, ". " * 9_999],
    ids=lambda text: repr(text[:6]),
)  # fmt: skip
def test_odd_text_takes_no_longer_than_other_text(text):
    start = time.perf_counter()
    sentences = PYSBD.split(text)
    assert time.perf_counter() - start < 10
    assert squeezed("".join(sentences)) == squeezed(text)


def test_what_was_cut_before_is_not_cut_again(seen_by_pysbd):
    segmenter = make_segmenter()
    context = " ".join(f"The man of year {i} ran over the hill." for i in range(40))
    segmenter.split(context)
    seen_by_pysbd.clear()
    assert first_sentence(segmenter, context, " The dog came. And") == "The dog came."
    assert round_trips(segmenter, context, "The dog came.")
    assert sum(map(len, seen_by_pysbd)) < 200


def test_threads_share_a_segmenter():
    texts = [f"Man {i} ran. Dog {i} hid. " * 5 for i in range(40)]
    alone = [make_segmenter().split(text) for text in texts]
    segmenter, start = make_segmenter(), threading.Barrier(4)

    def work(_):
        start.wait()
        return [segmenter.split(text) for text in texts]

    with ThreadPoolExecutor(4) as pool:
        assert all(result == alone for result in pool.map(work, range(4)))


def test_a_segmenters_fault_stays_in_its_stretch(monkeypatch):
    import pysbd

    original = pysbd.Segmenter.segment

    def fail(self, text):
        if "bad" in text:
            raise IndexError(text)
        return ["lost"] if "lose" in text else original(self, text)

    monkeypatch.setattr(pysbd.Segmenter, "segment", fail)
    split = make_segmenter().split
    assert split("It was bad? 5 came. We lose it! 3 went. Dr. No left.") == [
        "It was bad?", "5 came.", "We lose it!", "3 went.", "Dr. No left.",
    ]  # fmt: skip


def test_the_first_sentence_of_a_continuation():
    context = "The dog ran. It was Dr. Smith."
    for segmenter in (PYSBD, Foreign()):
        assert first_sentence(segmenter, context, " He left. She") == "He left."
        assert first_sentence(segmenter, context, "He left. She") == "He left."
        assert first_sentence(segmenter, context, " He le") == "He le"
        assert first_sentence(segmenter, context, "\n\nHe left.\nShe") == "He left."
        assert first_sentence(segmenter, context, " ") is None
        assert first_sentence(segmenter, "", "He left. She") == "He left."
        assert first_sentence(segmenter, "The dog", " ran off") is None
        assert first_sentence(segmenter, "The dog", " ran off. It hid.") == "It hid."


def test_a_sentence_is_complete_when_the_next_one_begins():
    for segmenter in (PYSBD, Foreign()):
        assert not is_complete(segmenter, "The dog ran.", " It hid.")
        assert is_complete(segmenter, "The dog ran.", " It hid. T")
        assert not is_complete(segmenter, "The dog ran.", " It was Dr. S")
        assert not is_complete(segmenter, "The dog ran.", "")


def test_only_what_the_detector_finds_again_round_trips():
    for segmenter in (PYSBD, Foreign()):
        assert round_trips(segmenter, "The dog ran.", "It hid.")
        assert not round_trips(segmenter, "The dog ran.", "It hid. It slept.")
        assert not round_trips(segmenter, "It was Dr.", "Smith came.")
        assert not round_trips(segmenter, "The dog", "It hid.")
        assert not round_trips(segmenter, "The dog ran.", " It hid.")


def test_cleaning():
    assert clean("a.\nB ") == "a. B."
    assert clean("a.\nB ", joiner="") == "a.B."
    assert clean(" one  \r\n\n two\u2028three“x” ") == 'one two three"x"'
    assert [clean(s) for s in ("Yes!", "Yes?", "Yes.", 'x"', "Yes", "Yes;", "x'")] == [
        "Yes!", "Yes?", "Yes.", 'x"', "Yes.", "Yes;.", "x'.",
    ]  # fmt: skip
    assert clean(" \n ") == clean("", joiner="") == ""


@pytest.mark.parametrize(
    ("language", "context", "sentence"),
    [
        ("zh", "今天好。", "我们去吗\uff1f"),
        ("ja", "猫がいた。", "行く\uff01"),
        ("hi", "यह एक है।", "वह दो है।"),
        ("hy", "Ես եմ։", "Նա է։"),  # noqa: RUF001  Armenian stops
        ("my", "သွားတယ်။", "လာတယ်။"),
        ("ar", "ذهبت.", "هل أنت هنا؟"),
    ],
)
def test_stops_of_other_scripts_end_a_sentence(language, context, sentence):
    segmenter = make_segmenter(language=language)
    assert clean(f"{sentence} \n") == sentence
    assert round_trips(segmenter, context, sentence)
    assert round_trips(segmenter, f"{context} {sentence}", "Then it rained.")


@given(text=TEXTS)
def test_cleaning_twice_is_cleaning_once(text):
    once = clean(text)
    assert clean(once) == once
    assert len(once.splitlines()) <= 1
    assert once == "" or re.search('[.?!"\u3002\uff01\uff1f]$', once)


def test_joining():
    assert join("", "A.") == "A."
    assert join("A.", "B.") == "A. B."
    assert join("A.\n", "B.") == "A.\nB."


@pytest.fixture
def unchecked():
    """Takes the run-time check of annotations away, which would refuse a wrong argument first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_names_and_objects(unchecked):
    foreign = Foreign()
    assert make_segmenter(foreign) is foreign
    assert isinstance(PYSBD, Segmenter)
    assert PYSBD.name == "pysbd:en"
    for wrong, message in (
        ("spacy", "'pysbd', 'punkt' or 'regex', not 'spacy'"),
        ("pysbd", "not 'xx'"),
        ("punkt", "not 'xx'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_segmenter(wrong, "xx")
    with pytest.raises(TypeError, match="name and split, not int"):
        make_segmenter(3)
    with pytest.raises(TypeError, match="must be a string, not int"):
        PYSBD.split(3)


def fake_nltk(monkeypatch, tokenizer):
    monkeypatch.setitem(sys.modules, "nltk", type("nltk", (), {}))
    monkeypatch.setitem(sys.modules, "nltk.tokenize", type("nltk.tokenize", (), {"PunktTokenizer": tokenizer}))


def test_punkt_cuts_what_is_not_certain(monkeypatch):
    class Tokenizer:
        def __init__(self, language):
            assert language == "german"

        def tokenize(self, text):
            return text.replace("! ", "!|").split("|")

    fake_nltk(monkeypatch, Tokenizer)
    segmenter = make_segmenter("punkt", "de")
    assert segmenter.name == "punkt:de"
    assert segmenter.split("Er kam. Ja! ja! 3. Mai.") == ["Er kam.", "Ja!", "ja!", "3. Mai."]


def test_punkt_without_its_data_is_pysbd_and_says_so(monkeypatch):
    def tokenizer(language):
        raise LookupError("punkt_tab not found")

    fake_nltk(monkeypatch, tokenizer)
    with pytest.warns(UserWarning, match="no punkt data") as caught:
        segmenter = make_segmenter("punkt")
    assert len(caught) == 1
    assert segmenter.name == PYSBD.name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert segmenter.split("A man ran. It rained.") == ["A man ran.", "It rained."]


@pytest.mark.parametrize(("missing", "message"), [("nltk", r"pmark\[nltk\]"), ("regex", "no regex")])
def test_a_missing_library_is_named_and_others_faults_are_not_hidden(monkeypatch, missing, message):
    original = builtins.__import__

    def fail(name, *arguments, **options):
        if name.startswith("nltk"):
            raise ModuleNotFoundError(f"no {missing}", name=missing)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(ImportError, match=message):
        make_segmenter("punkt")
