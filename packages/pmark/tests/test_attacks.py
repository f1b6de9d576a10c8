import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pmark.attacks import (
    ATTACKS,
    SentenceDrop,
    SentenceMerge,
    SentenceShuffle,
    SentenceSplit,
    SynonymSubstitution,
    WordDeletion,
)
from pmark.metrics import WORD

PROMPT = "The storm had passed in the night."
BODY = [
    "Anna walked along the quiet shore.",
    "She found a small boat, and it was almost new!",
    "Her brother wanted to help, but he was late.",
    "They began the journey before noon.",
    "The sea stayed calm.",
]
TEXT = " ".join([PROMPT, *BODY])
SENTENCES = st.lists(
    st.lists(
        st.sampled_from(["small", "quick", "The", "sea,", "and", "Anna", "help", "12"]), min_size=1, max_size=9
    ).map(lambda words: "X " + " ".join(words) + "."),
    min_size=1,
    max_size=6,
)


def plain(name):
    return ATTACKS[name]() if name == "sentence-shuffle" else ATTACKS[name](0.5)


def sentences(text):
    assert text.startswith(PROMPT)
    return text[len(PROMPT) :].strip()


@given(SENTENCES, st.sampled_from(sorted(ATTACKS)), st.integers(0, 3))
def test_every_attack_leaves_the_prompt_alone_and_repeats_itself(body, name, seed):
    text = f"{PROMPT} {' '.join(body)}"
    attack = plain(name)
    [once] = attack([text], seed=seed)
    assert once.startswith(PROMPT)
    assert once[len(PROMPT) :].strip()
    assert attack(["A word. Another one.", text], seed=seed)[1] == once
    assert attack([text], seed=seed, prompts=[PROMPT]) == [once]


@pytest.mark.parametrize("rate", [0.1, 0.3, 1.0])
def test_deletion_takes_its_share_of_words_and_leaves_punctuation(rate):
    words = [word for each in BODY for word in WORD.findall(each)]
    left = WORD.findall(sentences(WordDeletion(rate)([TEXT], seed=1)[0]))
    if rate == 1:
        # Something must be left of a text: its first sentence.
        assert left == WORD.findall(BODY[0])
    else:
        assert len(left) == len(words) - round(rate * len(words))
        assert not Counter(left) - Counter(words)
        assert WordDeletion(rate)([TEXT], seed=2) != WordDeletion(rate)([TEXT], seed=1)
    [halved] = WordDeletion(0.5, keep_first=0)(["Yes, we can, of course, go home."])
    assert halved.endswith(".")
    assert " ," not in halved


def test_synonyms_stand_in_the_place_of_their_words_in_the_same_case():
    attack = SynonymSubstitution(1.0, {"small": ["tiny"], "anna": ["eve"], "sea": ["ocean"], "late": ["late"]})
    [text] = attack([TEXT + " SMALL!"], seed=0)
    assert "a tiny boat" in text
    assert "Eve walked" in text
    assert text.endswith("TINY!")
    assert text.count(" ") == (TEXT + " SMALL!").count(" ")
    assert "he was late" in text


def test_our_own_synonyms_replace_a_share_of_all_words_and_no_more_than_have_one():
    changed = []
    for rate in (0.1, 1.0):
        found = WORD.findall(sentences(SynonymSubstitution(rate)([TEXT], seed=0)[0]))
        before = [word for each in BODY for word in WORD.findall(each)]
        changed.append(sum(a != b for a, b in zip(before, found, strict=True)))
    assert changed[0] == round(0.1 * len(before))
    # walked, quiet, found, small, almost, new, wanted, help, began, journey, sea
    assert changed[1] == 11


class Net:
    """WordNet as nltk gives it; the import of nltk itself takes seconds."""

    def __init__(self, there):
        self.there = there

    def ensure_loaded(self):
        if not self.there:
            raise LookupError("Resource wordnet not found.")

    def synsets(self, word):
        found = SimpleNamespace(lemma_names=lambda: ["Small", "little", "pocket-size", "bantam"])
        return [found] if word == "small" else []


def nltk(monkeypatch, there):
    monkeypatch.setitem(sys.modules, "nltk", ModuleType("nltk"))
    monkeypatch.setitem(sys.modules, "nltk.corpus", SimpleNamespace(wordnet=Net(there)))


def test_wordnet_gives_the_other_lemmas_of_single_words(monkeypatch):
    nltk(monkeypatch, there=True)
    attack = SynonymSubstitution(1.0, "wordnet")
    assert attack.name == "synonyms-1-wordnet"
    found = {attack([TEXT], seed=seed)[0] for seed in range(12)}
    assert found == {TEXT.replace("small", "little"), TEXT.replace("small", "bantam")}


def test_wordnet_without_data_or_library_says_how_to_get_it(monkeypatch, block_imports):
    nltk(monkeypatch, there=False)
    with pytest.raises(ValueError, match=r"nltk\.downloader wordnet"):
        SynonymSubstitution(0.1, "wordnet")
    block_imports("nltk")
    with pytest.raises(ImportError, match=r"pip install 'pmark\[nltk\]'"):
        SynonymSubstitution(0.1, "wordnet")


def test_shuffle_and_drop_keep_sentences_whole():
    shuffled = {sentences(SentenceShuffle()([TEXT], seed=seed)[0]) for seed in range(20)}
    assert len(shuffled) > 10
    assert all(sum(each in text for each in BODY) == 5 for text in shuffled)
    dropped = sentences(SentenceDrop(0.4)([TEXT], seed=0)[0])
    kept = [each for each in BODY if each in dropped]
    assert dropped == " ".join(kept)
    assert len(kept) == 3
    assert sentences(SentenceDrop(1.0)([TEXT])[0]) == BODY[0]


def test_merging_joins_neighbours_and_keeps_names():
    merge = SentenceMerge(1.0)
    assert merge(['One. She said "no." Paris fell! It rained.']) == [
        'One. She said "no", and Paris fell, and it rained.'
    ]
    merged = sentences(SentenceMerge(0.5)([TEXT], seed=3)[0])
    assert merged.count(", and ") == 1 + 2
    assert merge([f"{PROMPT} {BODY[0]}"]) == [f"{PROMPT} {BODY[0]}"]


def test_splitting_cuts_at_a_clause_near_the_middle():
    split = SentenceSplit(1.0)
    assert sentences(split([TEXT])[0]) == " ".join(
        [
            BODY[0],
            "She found a small boat. It was almost new!",
            "Her brother wanted to help. He was late.",
            *BODY[3:],
        ]
    )
    assert split([PROMPT + " Well, we saw it because he asked and then she left us."])[0].endswith(
        "Well, we saw it because he asked. Then she left us."
    )


def test_the_prompt_may_be_several_sentences_or_none():
    prompt = " ".join([PROMPT, BODY[0]])
    assert SentenceDrop(1.0)([TEXT], prompts=[prompt]) == [f"{prompt} {BODY[1]}"]
    assert SentenceDrop(1.0, keep_first=0)([TEXT]) == [PROMPT]
    assert SentenceDrop(1.0, keep_first=3)([TEXT]) == [" ".join([PROMPT, *BODY[:3]])]
    assert SentenceShuffle()([PROMPT, "", "   "]) == [PROMPT, "", "   "]
    assert SentenceDrop(0.0)([f"{PROMPT} \ud800 fell."]) == [f"{PROMPT} \ud800 fell."]


def test_scripts_without_spaces_have_words_too():
    [text] = WordDeletion(0.5, keep_first=0, language="zh")(["我们去海边散步。"])
    assert len(text) == 8 - round(0.5 * 7)
    assert text.endswith("。")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: WordDeletion(1.5), "rate must lie in 0 to 1, not 1.5"),
        (lambda: SentenceShuffle(keep_first=-1), "keep_first must be at least 0, not -1"),
        (lambda: SynonymSubstitution(0.1, "thesaurus"), "not 'thesaurus'"),
        (lambda: SynonymSubstitution(0.1, {"small": "tiny"}), r"synonyms\['small'\] must be a list of words"),
        (lambda: SentenceShuffle()([TEXT], prompts=["Another prompt."]), r"texts\[0\] does not begin with its prompt"),
        (lambda: SentenceShuffle()([TEXT], prompts=[]), "0 prompts"),
    ],
)
def test_wrong_arguments_are_named(call, told):
    with pytest.raises(ValueError, match=told):
        call()


def test_one_text_is_no_list_of_texts():
    with pytest.raises(TypeError, match="list of texts"):
        SentenceShuffle()(TEXT)
