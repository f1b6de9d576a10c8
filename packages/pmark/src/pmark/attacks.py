"""Attacks that edit a text, to see how much of a watermark survives them.

Every attack is called as `attack(texts, seed=0, prompts=None)` and returns as many texts. The prompt is left alone: the
text in `prompts`, or else the first `keep_first` sentences. A text's randomness depends on the seed and on the text, so
batches give what single texts give. Attacks that write anew with a model are in `pmark.paraphrase`.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from separata_kit.extras import load

from pmark.metrics import WORD
from pmark.segmentation import Segmenter, join, make_segmenter

# Words of one line stand for each other in most sentences, in the same inflection.
_SYNONYMS = """
big large huge; small little tiny; quick fast rapid; slow gradual; important crucial vital; difficult hard tough;
easy simple; beautiful lovely pretty; happy glad cheerful; sad unhappy; angry furious; smart clever bright;
rich wealthy; strange odd peculiar; new recent; old ancient; good fine; great excellent superb; bad poor; whole entire;
many numerous; several various; famous renowned; quiet silent; dangerous risky; correct right; wrong incorrect;
clear obvious; enough sufficient; main primary; usual common; begin start; begins starts; began started; help assist;
helps assists; helped assisted; show demonstrate; shows demonstrates; showed demonstrated; get obtain; gets obtains;
got obtained; buy purchase; buys purchases; bought purchased; need require; needs requires; needed required;
use employ; uses employs; used employed; make create; makes creates; made created; keep retain; keeps retains;
kept retained; choose select; chose selected; try attempt; tries attempts; tried attempted; end finish; ended finished;
ask inquire; asked inquired; answer reply; answered replied; build construct; built constructed; allow permit;
allows permits; allowed permitted; improve enhance; improves enhances; improved enhanced; increase grow;
increased grew; decrease decline; happen occur; happens occurs; happened occurred; want desire; wants desires;
wanted desired; think believe; thinks believes; thought believed; walked strolled; shouted yelled; discovered found;
discover find; house home; child kid; children kids; job occupation; idea notion; ideas notions; problem issue;
problems issues; method approach; methods approaches; result outcome; results outcomes; goal aim; goals aims;
place location; places locations; error mistake; errors mistakes; road street; woods forest; journey trip;
chance opportunity; story tale; stories tales; doctor physician; car automobile; cars automobiles; street avenue;
part portion; parts portions; area region; areas regions; people folks; sea ocean; often frequently; quickly rapidly;
slowly gradually; almost nearly; maybe perhaps; also additionally; however nevertheless; therefore consequently;
about roughly; usually normally; finally eventually; completely entirely; very extremely; because since; while whereas;
although though; suddenly abruptly; really truly; mostly mainly; only merely
"""

_CLAUSE = re.compile(r"[,;:]\s+(?:(?:and|but|so|or|while|which)\s+)?|\s+(?:and|but|so|or|while)\s+", re.IGNORECASE)
_END = re.compile(r"[.!?\u3002\uff01\uff1f]+([\"'\u201d\u2019)\]]*)$")
# What begins a sentence without being a name, so that it may lose its capital inside one.
_STARTER = re.compile(
    "(?:an?|all|and|as|at|because|but|each|every|for|from|he|her|his|if|in|its?|many|most|my|no|on|one|our|she|so|some|"
    "that|the|their|then|there|these|they|this|those|to|we|what|when|where|while|who|with|you|your) ",
    re.IGNORECASE,
)


class Attack(ABC):
    """An attack on the sentences behind the prompt.

    Attributes:
        name: Name in tables, settings included.
        keep_first: Number of sentences at the beginning that count as prompt where no prompts are given.
    """

    def __init__(
        self, name: str, *, keep_first: int = 1, segmenter: str | Segmenter = "pysbd", language: str = "en"
    ) -> None:
        """Takes what all attacks share.

        Args:
            name: The name.
            keep_first: See the attribute.
            segmenter: How texts are cut into sentences; see `make_segmenter`.
            language: Of the texts.

        Raises:
            ValueError: `keep_first` is below 0, or there is no such segmenter.
        """
        if keep_first < 0:
            raise ValueError(f"keep_first must be at least 0, not {keep_first}")
        self.name, self.keep_first = name, keep_first
        self._segmenter = make_segmenter(segmenter, language)

    def __call__(self, texts: Sequence[str], *, seed: int = 0, prompts: Sequence[str] | None = None) -> list[str]:
        """Attack texts.

        Args:
            texts: The texts, prompts included.
            seed: Of the randomness.
            prompts: Beginning of each text that is left alone, character by character.

        Returns:
            The attacked texts, in order; one with nothing to attack comes back as it is.

        Raises:
            ValueError: A text does not begin with its prompt, or there are not as many prompts as texts.
        """
        if isinstance(texts, str):
            raise TypeError("texts must be a list of texts, not one text")
        heads, bodies = [], []
        for index, text in enumerate(texts):
            if prompts is None:
                sentences = self._segmenter.split(text)
                heads.append(" ".join(sentences[: self.keep_first]))
                bodies.append(sentences[self.keep_first :])
            elif len(prompts) != len(texts) or not text.startswith(prompts[index]):
                raise ValueError(f"texts[{index}] does not begin with its prompt ({len(prompts)} prompts)")
            else:
                heads.append(prompts[index])
                bodies.append(self._segmenter.split(text[len(prompts[index]) :]))
        busy = [(body, _generator(seed, text)) for text, body in zip(texts, bodies, strict=True) if body]
        attacked = iter(self.alter([body for body, _ in busy], [rng for _, rng in busy]))
        return [
            join(head, " ".join(next(attacked))) if body else text
            for text, head, body in zip(texts, heads, bodies, strict=True)
        ]

    @abstractmethod
    def alter(self, documents: Sequence[list[str]], rngs: Sequence[np.random.Generator]) -> list[list[str]]:
        """Return the attacked sentences of documents that have at least one; a generator for each."""


class _Edit(Attack):
    """An attack on one document at a time."""

    def alter(self, documents: Sequence[list[str]], rngs: Sequence[np.random.Generator]) -> list[list[str]]:
        return [self._edit(list(each), rng) for each, rng in zip(documents, rngs, strict=True)]

    @abstractmethod
    def _edit(self, sentences: list[str], rng: np.random.Generator) -> list[str]: ...


class _Rated(_Edit):
    """An attack with a strength."""

    _kind: str

    def __init__(self, rate: float, **options: Any) -> None:
        """Takes the strength.

        Args:
            rate: The share, 0 to 1.
            options: `keep_first`, `segmenter` and `language` of `Attack`.

        Raises:
            ValueError: `rate` is not in 0 to 1.
        """
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must lie in 0 to 1, not {rate}")
        super().__init__(f"{self._kind}-{rate:g}", **options)
        self.rate = rate

    def _pick(self, count: int, rng: np.random.Generator, of: int | None = None) -> set[int]:
        """Draw `rate * of` of `count` places (all, if there are fewer)."""
        wanted = round(self.rate * (count if of is None else of))
        return set(rng.choice(count, min(wanted, count), replace=False).tolist()) if count else set()


class WordDeletion(_Rated):
    """Deletes a share `rate` of the words; punctuation stays, and a sentence without words goes."""

    _kind = "word-deletion"

    def _edit(self, sentences: list[str], rng: np.random.Generator) -> list[str]:
        gone = self._pick(sum(len(WORD.findall(each)) for each in sentences), rng)
        edited = _each_word(sentences, lambda index, _: "" if index in gone else None)
        return [each for each in edited if WORD.search(each)] or sentences[:1]


class SynonymSubstitution(_Rated):
    """Puts synonyms in the place of a share `rate` of the words, or of as many as have one."""

    _kind = "synonyms"

    def __init__(self, rate: float, synonyms: Mapping[str, Sequence[str]] | str | None = None, **options: Any) -> None:
        """Takes the strength and the synonyms.

        Args:
            rate: Share of all words, 0 to 1.
            synonyms: Words (lower case) and what may stand for them; a small table of common English words of our own
                if not given; "wordnet" for all lemmas of a word in WordNet (extra `nltk`, and its data).
            options: `keep_first`, `segmenter` and `language` of `Attack`.

        Raises:
            ValueError: `rate` is not in 0 to 1, a word's synonyms are no list, or the data of WordNet are not on this
                machine.
            ImportError: The extra `nltk` is not installed.
        """
        super().__init__(rate, **options)
        if synonyms == "wordnet":
            self._find = _wordnet()
            self.name += "-wordnet"
        elif isinstance(synonyms, str):
            raise ValueError(f"synonyms must be a table or 'wordnet', not {synonyms!r}")
        else:
            table = _own_table() if synonyms is None else synonyms
            if single := next((word for word, others in table.items() if isinstance(others, str)), None):
                raise ValueError(f"synonyms[{single!r}] must be a list of words, not one word")
            self._find = lambda word: table.get(word, ())

    def _edit(self, sentences: list[str], rng: np.random.Generator) -> list[str]:
        words = [word for each in sentences for word in WORD.findall(each)]
        options = [[other for other in self._find(word.lower()) if other != word.lower()] for word in words]
        places = [index for index, others in enumerate(options) if others]
        chosen = {places[place] for place in self._pick(len(places), rng, of=len(words))}

        def change(index: int, word: str) -> str | None:
            if index not in chosen:
                return None
            other = options[index][rng.integers(len(options[index]))]
            return other.upper() if word.isupper() and len(word) > 1 else _like(word, other)

        return _each_word(sentences, change)


class SentenceShuffle(_Edit):
    """Puts the sentences in random order."""

    def __init__(self, **options: Any) -> None:
        """Takes `keep_first`, `segmenter` and `language` of `Attack`."""
        super().__init__("sentence-shuffle", **options)

    def _edit(self, sentences: list[str], rng: np.random.Generator) -> list[str]:
        return [sentences[index] for index in rng.permutation(len(sentences))]


class SentenceDrop(_Rated):
    """Drops a share `rate` of the sentences, never all of them."""

    _kind = "sentence-drop"

    def _edit(self, sentences: list[str], rng: np.random.Generator) -> list[str]:
        gone = self._pick(len(sentences), rng)
        return [each for index, each in enumerate(sentences) if index not in gone] or sentences[:1]


class SentenceMerge(_Rated):
    """Joins a share `rate` of the neighbours into one sentence with ", and"."""

    _kind = "sentence-merge"

    def _edit(self, sentences: list[str], rng: np.random.Generator) -> list[str]:
        joined = self._pick(len(sentences) - 1, rng)
        merged = sentences[:1]
        for index, each in enumerate(sentences[1:]):
            if index in joined:
                rest = each[:1].lower() + each[1:] if _STARTER.match(each) else each
                merged[-1] = _END.sub(r"\1", merged[-1]) + ", and " + rest
            else:
                merged.append(each)
        return merged


class SentenceSplit(_Rated):
    """Cuts a share `rate` of the sentences in two, at the comma or conjunction nearest to the middle.

    A sentence that has none with two words on either side stays.
    """

    _kind = "sentence-split"

    def _edit(self, sentences: list[str], rng: np.random.Generator) -> list[str]:
        cuts = [_middle(each) for each in sentences]
        places = [index for index, cut in enumerate(cuts) if cut]
        chosen = {places[place] for place in self._pick(len(places), rng, of=len(sentences))}
        split = []
        for index, (each, cut) in enumerate(zip(sentences, cuts, strict=True)):
            if cut and index in chosen:
                rest = each[cut.end() :]
                split += [f"{each[: cut.start()]}.", rest[:1].upper() + rest[1:]]
            else:
                split.append(each)
        return split


ATTACKS: Mapping[str, Callable[..., Attack]] = {
    "word-deletion": WordDeletion,
    "synonyms": SynonymSubstitution,
    "sentence-shuffle": SentenceShuffle,
    "sentence-drop": SentenceDrop,
    "sentence-merge": SentenceMerge,
    "sentence-split": SentenceSplit,
}
"""The attacks that need no model, by name; all but the shuffle take a rate first."""


def _generator(seed: int, text: str) -> np.random.Generator:
    # Half a surrogate pair is no text, but comes in texts.
    code = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng([seed, int.from_bytes(code[:8], "big")])


def _each_word(sentences: list[str], change: Callable[[int, str], str | None]) -> list[str]:
    """Replace words (counted over all sentences) by what `change` returns: None keeps one, "" takes it out."""
    index = -1

    def replace(match: "re.Match[str]") -> str:
        nonlocal index
        index += 1
        new = change(index, match[2])
        # The space before a word goes with it.
        return match[0] if new is None else "" if not new else match[1] + new

    pattern = re.compile(rf"(\s*)({WORD.pattern})")
    return [pattern.sub(replace, each).strip() for each in sentences]


def _like(word: str, other: str) -> str:
    return other[:1].upper() + other[1:] if word[:1].isupper() else other


def _middle(sentence: str) -> "re.Match[str] | None":
    cuts = [
        cut
        for cut in _CLAUSE.finditer(sentence)
        if min(len(WORD.findall(sentence[: cut.start()])), len(WORD.findall(sentence[cut.end() :]))) >= 2
    ]
    return min(cuts, key=lambda cut: abs(cut.start() + cut.end() - len(sentence)), default=None)


def _own_table() -> dict[str, list[str]]:
    table: dict[str, list[str]] = {}
    for line in _SYNONYMS.split(";"):
        for word in line.split():
            table.setdefault(word, []).extend(other for other in line.split() if other != word)
    return table


def _wordnet() -> Callable[[str], Sequence[str]]:
    wordnet = load("nltk.corpus", "synonyms='wordnet' needs", "pmark[nltk]").wordnet
    try:
        wordnet.ensure_loaded()
    except LookupError:
        raise ValueError(
            "synonyms='wordnet' needs WordNet's data (python -m nltk.downloader wordnet); leave synonyms out for the "
            "small table that comes with pmark"
        ) from None

    def find(word: str) -> Sequence[str]:
        lemmas = {lemma.lower() for synset in wordnet.synsets(word) for lemma in synset.lemma_names()}
        # In order, or a seed would not give the same text twice.
        return sorted(lemma for lemma in lemmas if lemma != word and lemma.isalpha())

    return find
