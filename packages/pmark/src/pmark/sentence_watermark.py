"""What sentence-level watermarks share: drawing and filtering candidates, writing in step, taking texts apart.

A watermark is two decisions: which of the candidates for the next sentence is taken (`select`), and what the sentences
of a text say (`score`). The rest is here once, because both sides must cut, clean and filter alike.

Nothing before `select` may prefer one candidate to another for its place or its company: each is cut, cleaned and
tested for itself, and whether more are drawn depends on how many are left, not on which. So the candidates that
`select` sees are independent draws from one distribution, in the order in which they were drawn.
"""

import importlib.metadata
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64

from pmark.encoders import TextEncoder, as_encoder
from pmark.samplers import Continuation, Sampler, draw
from pmark.segmentation import Segmenter, clean, first_sentence, is_complete, join, make_segmenter, round_trips

# Whether a text ends with a sentence shows when another follows.
_PROBE = "Then it rained."
LOW_POWER = 4
"""Fewer sentences than this cannot show much."""


@dataclass(frozen=True, eq=False)
class Pool:
    """The candidates for the next sentence of one document.

    Attributes:
        number: Which sentence of the document it will be; the first generated one is 1.
        previous: Embedding of the sentence before.
        sentences: The candidates, in the order in which they were drawn.
        embeddings: Their embeddings, rows of unit length.
        exhausted: No more may be drawn, so one of these must be chosen.
        document: Index of the document in its batch.
        thresholds: What `SentenceWatermark.thresholds` said for this sentence.
    """

    number: int
    previous: Float64[np.ndarray, " dim"]
    sentences: list[str]
    embeddings: Float64[np.ndarray, "candidates dim"]
    exhausted: bool
    document: int
    thresholds: Float64[np.ndarray, " channels"] | None = None


@dataclass(frozen=True)
class Selection:
    """What was chosen from a pool.

    Attributes:
        index: The candidate; None asks for another chunk.
        record: What the trace says about it; values that JSON knows, nothing secret.
        skipped: The sentence can carry no evidence.
    """

    index: int | None
    record: dict[str, Any] = field(default_factory=dict)
    skipped: bool = False


@dataclass(frozen=True, eq=False)
class Document:
    """A text taken apart for detection; sentence `t` of the watermark is row `t - 1`.

    Attributes:
        prompt: The text before the first tested sentence.
        sentences: The tested sentences.
        embeddings: Their embeddings.
        previous: Embeddings of the sentences before each; zeros where there is none.
        text: The whole text.
        starts: Where the tested sentences begin in it.
    """

    prompt: str
    sentences: list[str]
    embeddings: Float64[np.ndarray, "sentences dim"]
    previous: Float64[np.ndarray, "sentences dim"]
    text: str
    starts: list[int]

    @property
    def contexts(self) -> list[str]:
        """The text before each tested sentence; as long as the text squared, so made only where it is needed."""
        return [self.text[:start].rstrip(" ") for start in self.starts]


@dataclass(frozen=True)
class WatermarkedText:
    """A generated text. Its trace is for its owner: from many proxies the pivots of a key can be computed.

    Attributes:
        text: Prompt and generated text.
        prompt: The prompt, without spaces at its end.
        opening: What the model added to a prompt that stopped within a sentence; carries no watermark.
        sentences: The generated sentences.
        trace: One record for each sentence.
        finish_reason: "length", "eos" (the model ended it: with the chosen sentence, or in more draws than were left as
            candidates where those were too few) or "sampler_exhausted" (too few were left otherwise).
        samples: How many continuations were drawn.
        round_trips: The segmenter finds exactly these sentences in the text; without it detection sees others.
        settings: What made it: method, key id, encoder, segmenter, versions. Nothing secret.
    """

    text: str
    prompt: str
    opening: str
    sentences: list[str]
    trace: list[dict[str, Any]]
    finish_reason: str
    samples: int
    round_trips: bool
    settings: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, as JSON knows them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, eq=False)
class DetectionResult:
    """What a text says about a key. For the key's owner: who may ask often can learn the key.

    Attributes:
        z: Standardised sum of the counts.
        p_value: Its nominal p-value.
        z_calibrated: Standardised with mean and deviation of unmarked text, or of this text under other bits.
        p_calibrated: Its p-value; this one decides.
        is_watermarked: Whether it is at most the level.
        counts: Evidence of every sentence in every channel, from 0 to 1; NaN where a sentence can carry none.
        thresholds: What the proxies were compared with.
        num_sentences: How many sentences were tested.
        low_power: Fewer than four were.
        reason: Why the answer is what it is, where that is not its p-value.
        per_sentence: One record for each sentence.
    """

    z: float
    p_value: float
    z_calibrated: float
    p_calibrated: float
    is_watermarked: bool
    counts: Float64[np.ndarray, "sentences channels"]
    thresholds: Float64[np.ndarray, "sentences channels"] | None
    num_sentences: int
    low_power: bool
    reason: str = ""
    per_sentence: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def nothing(cls, channels: int, reason: str = "no sentence to test") -> "DetectionResult":
        """Returns the answer about a text without a testable sentence: no evidence."""
        return cls(0.0, 1.0, 0.0, 1.0, False, np.zeros((0, channels)), None, 0, True, reason)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, as JSON knows them; NaN is None."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("counts", "thresholds"):
            array = values[name]
            values[name] = (
                None if array is None else [[None if np.isnan(x) else float(x) for x in row] for row in array]
            )
        return values


@dataclass
class _Writing:
    """One document on its way."""

    document: int
    prompt: str
    text: str
    opening: str = ""
    sentences: list[str] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""
    samples: int = 0


@dataclass
class _Turn:
    """The candidates gathered for one context."""

    context: str
    candidates: list[Continuation] = field(default_factory=list)
    asked: int = 0
    redraws: int = 0
    drawn: int = 0
    silent: bool = False
    spent: bool = False
    ends: int = 0

    @property
    def sentences(self) -> list[str]:
        return [each.text for each in self.candidates]


class SentenceWatermark(ABC):
    """Chooses sentences among those that a model proposes, so that the choice can be shown later.

    Args:
        encoder: Sentence encoder, see `as_encoder`.
        segmenter: "pysbd", "punkt", "regex" or an object; the same one must be used for detection.
        language: Of the segmenter.
        num_samples: Candidates for each sentence, at most.
        chunk: Candidates drawn at once; None draws all, and `select` must choose among them.
        round_trip: Keep only candidates that the segmenter finds again, whole, in the text that they make, also when
            another sentence follows.
        redraws: How often more are drawn when too few are left.
        min_candidates: More than this many must be left, unless `num_samples` is smaller; only where all are drawn.
        joiner: What replaces line breaks; the authors put nothing.
        deduplicate: Drop repeated candidates. Changes the distribution of the text.
        seed: Of candidates and choices; None takes fresh entropy at each call.

    Raises:
        ValueError: A number is out of range.
    """

    name: ClassVar[str] = "sentence watermark"
    channels: int = 1
    """Counts for each sentence."""
    smallest_pool: int = 1
    """Fewer candidates than this end the text."""

    def __init__(
        self,
        encoder: Any,
        *,
        segmenter: Any = "pysbd",
        language: str = "en",
        num_samples: int,
        chunk: int | None = None,
        round_trip: bool = True,
        redraws: int = 5,
        min_candidates: int = 10,
        joiner: str = " ",
        deduplicate: bool = False,
        seed: int | None = None,
    ) -> None:
        """See the class."""
        for argument, value, least in (
            ("num_samples", num_samples, 1),
            ("chunk", chunk, 1),
            ("redraws", redraws, 0),
            ("min_candidates", min_candidates, 0),
            ("seed", seed, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{argument}={value}: must be at least {least}")
        self.encoder: TextEncoder = as_encoder(encoder)
        self.segmenter: Segmenter = make_segmenter(segmenter, language)
        self.num_samples = num_samples
        self.chunk = min(chunk or num_samples, num_samples)
        self.round_trip = round_trip
        self.redraws = redraws
        self.min_candidates = min_candidates
        self.joiner = joiner
        self.deduplicate = deduplicate
        self.seed = seed

    @abstractmethod
    def select(self, pools: Sequence[Pool], rng: np.random.Generator) -> list[Selection]:
        """Chooses a candidate from each pool, or asks for more.

        Args:
            pools: One for each document that is being written; none is empty.
            rng: Source of every random choice.

        Returns:
            One selection for each pool.
        """

    @abstractmethod
    def score(self, documents: Sequence[Document]) -> list[DetectionResult]:
        """Says for each document whether it is marked; documents have one tested sentence at least."""

    def thresholds(
        self, contexts: Sequence[str], rng: np.random.Generator
    ) -> Sequence[Float64[np.ndarray, " channels"] | None]:
        """Returns what is to be known about the next sentence of each context before candidates are seen."""
        return [None] * len(contexts)

    @property
    def settings(self) -> dict[str, Any]:
        """What made a text, for its trace; nothing secret."""
        return {
            "method": self.name,
            "encoder": self.encoder.fingerprint(),
            "segmenter": self.segmenter.name,
            "num_samples": self.num_samples,
            "version": _version(),
        }

    def check_recorded(self, settings: Mapping[str, Any], names: Sequence[str] = ("encoder", "segmenter")) -> None:
        """Warns of settings under which a text or a null was made and which differ from those of this object."""
        own = self.settings
        for name in names:
            recorded = settings.get(name)
            # An encoder is what it computes, whatever it was called where it was loaded from.
            same = [str(each).rpartition("#")[2] if name == "encoder" else each for each in (recorded, own[name])]
            if recorded is not None and same[0] != same[1]:
                message = f"made with {name} {recorded!r}, but this is {own[name]!r}: what detection says means nothing"
                warnings.warn(message, stacklevel=3)

    def generate(self, sampler: Sampler, prompt: str, **options: Any) -> WatermarkedText:
        """Writes one marked text; arguments as in `generate_batch`."""
        return self.generate_batch(sampler, [prompt], **options)[0]

    def generate_batch(
        self,
        sampler: Sampler,
        prompts: Sequence[str],
        *,
        max_sentences: int = 12,
        min_tokens: int = 0,
        max_tokens: int | None = None,
        count_tokens: Callable[[str], int] | None = None,
    ) -> list[WatermarkedText]:
        """Writes marked texts, all in step: for each sentence one call of sampler, encoder and `select` for all.

        A text ends when it has `max_sentences` sentences and more than `min_tokens` tokens (the paper's evaluation
        writes 12 and 205), when it has `max_tokens`, when the model ends it, or when too few candidates are left.
        A prompt that stops within a sentence is first continued to its end, without a mark.

        Args:
            sampler: Draws the candidates.
            prompts: One for each text; not empty.
            max_sentences: Generated sentences.
            min_tokens: In the generated text.
            max_tokens: In the generated text.
            count_tokens: Counts the tokens of a text; without it words are counted.

        Returns:
            One text for each prompt.

        Raises:
            TypeError: A prompt is no string.
            ValueError: A prompt is empty, or a number is out of range.
        """
        _check_texts("prompts", prompts)
        for index, prompt in enumerate(prompts):
            if not prompt.strip():
                raise ValueError(f"prompts[{index}]={prompt!r}: is empty; a text needs something to go on from")
        if max_sentences < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError(f"max_sentences={max_sentences}, max_tokens={max_tokens}: must be at least 1")
        count = count_tokens or (lambda text: len(text.split()))
        rng = np.random.default_rng(self.seed)
        writings = [_Writing(index, text, text) for index, text in enumerate(each.rstrip(" ") for each in prompts)]
        self._close_prompts(sampler, writings, rng)
        opened = [len(self.segmenter.split(each.text)) for each in writings]
        # Every sentence has a token, so this bound only stops a counter that does not count.
        for number in range(1, max(max_sentences, min_tokens + 1) + 1):
            live = [each for each in writings if not each.finish_reason]
            if not live:
                break
            self._write_sentence(sampler, live, number, rng)
            for each in live:
                tokens = count(each.text[len(each.prompt) :])
                long_enough = number >= max_sentences and tokens > min_tokens
                if long_enough or (max_tokens is not None and tokens >= max_tokens):
                    each.finish_reason = each.finish_reason or "length"
        settings = self.settings
        return [
            WatermarkedText(
                text=each.text,
                prompt=each.prompt,
                opening=each.opening,
                sentences=each.sentences,
                trace=each.trace,
                finish_reason=each.finish_reason or "length",
                samples=each.samples,
                round_trips=self.segmenter.split(each.text)[first:] == each.sentences,
                settings=settings,
            )
            for each, first in zip(writings, opened, strict=True)
        ]

    def detect(self, text: str | WatermarkedText, *, prompt: str | None = None, **options: Any) -> DetectionResult:
        """Says whether one text is marked; arguments as in `detect_batch`."""
        return self.detect_batch([text], prompts=[prompt], **options)[0]

    def detect_batch(
        self,
        texts: Sequence[str | WatermarkedText],
        *,
        prompts: Sequence[str | None] | None = None,
        has_prompt: bool = True,
        sampler: Sampler | None = None,
    ) -> list[DetectionResult]:
        """Says which texts are marked; the sentences of all are encoded at once.

        Args:
            texts: What to test. A `WatermarkedText` knows its prompt.
            prompts: What stood before each; the text may begin with it or not.
            has_prompt: Where the prompt is not given: the first sentence is it. Otherwise every sentence is tested.
            sampler: For schemes that ask the model again.

        Returns:
            One result for each text.

        Raises:
            TypeError: A text is no string.
            ValueError: There are not as many prompts as texts, or an embedding is not finite.
        """
        return self._scored(self.documents(texts, prompts=prompts, has_prompt=has_prompt), self.score)

    def documents(
        self,
        texts: Sequence[str | WatermarkedText],
        *,
        prompts: Sequence[str | None] | None = None,
        has_prompt: bool = True,
    ) -> list[Document]:
        """Takes texts apart, as `detect_batch` does."""
        given: Sequence[str | None] = [None] * len(texts) if prompts is None else prompts
        _check_texts("texts", texts, WatermarkedText)
        _check_texts("prompts", given, type(None))
        for each in texts:
            if isinstance(each, WatermarkedText):
                self.check_recorded(each.settings)
        if len(given) != len(texts):
            raise ValueError(f"{len(given)} prompts for {len(texts)} texts: must be as many")
        known = [
            each.prompt if prompt is None and isinstance(each, WatermarkedText) else prompt
            for each, prompt in zip(texts, given, strict=True)
        ]
        plain = [each.text if isinstance(each, WatermarkedText) else each for each in texts]
        parts = [self._part(text, prompt, has_prompt) for text, prompt in zip(plain, known, strict=True)]
        flat = [sentence for sentences, *_ in parts for sentence in sentences]
        encoded = np.asarray(self.encoder.encode(flat), np.float64) if flat else np.zeros((0, 0))
        documents, at = [], 0
        for sentences, whole, starts, first in parts:
            rows = encoded[at : at + len(sentences)]
            at += len(sentences)
            before = np.concatenate([np.zeros_like(rows[:1]), rows])[first : len(sentences)]
            prompt = whole[: starts[0]].rstrip(" ") if starts else whole
            documents.append(Document(prompt, sentences[first:], rows[first:], before, whole, starts))
        return documents

    def _scored(
        self, documents: Sequence[Document], score: Callable[[Sequence[Document]], list[DetectionResult]]
    ) -> list[DetectionResult]:
        testable = [each for each in documents if each.sentences]
        results = iter(score(testable) if testable else [])
        return [next(results) if each.sentences else DetectionResult.nothing(self.channels) for each in documents]

    def _part(self, text: str, prompt: str | None, has_prompt: bool) -> tuple[list[str], str, list[int], int]:
        """Returns all sentences, the whole text, where in it the tested ones begin, and the index of the first."""
        if prompt is None:
            first = int(has_prompt)
        else:
            first = len(self.segmenter.split(prompt))
            text = text if text.startswith(prompt.rstrip()) else join(prompt, text.lstrip())
        sentences = self.segmenter.split(text)
        # Sentences hold the text's characters in their order, except white space.
        places = [index for index, character in enumerate(text) if not character.isspace()]
        lengths = [sum(not character.isspace() for character in sentence) for sentence in sentences]
        begins = [places[at] for at in accumulate(lengths[:-1], initial=0)] if sentences else []
        return sentences, text, begins[first:], min(first, len(sentences))

    def _close_prompts(self, sampler: Sampler, writings: Sequence[_Writing], rng: np.random.Generator) -> None:
        """Lets the model finish the last sentence of prompts that stop within one."""
        unfinished = [each for each in writings if not self._is_closed(each.prompt)]
        if not unfinished:
            return
        prompts = [each.prompt for each in unfinished]
        lengths = [len(self.segmenter.split(prompt)) for prompt in prompts]
        answers = draw(
            sampler,
            prompts,
            [1 + self.redraws] * len(prompts),
            is_complete=lambda index, text: len(self.segmenter.split(prompts[index] + text)) > lengths[index],
            seed=int(rng.integers(2**31)),
        )
        for each, prompt, length, continuations in zip(unfinished, prompts, lengths, answers, strict=True):
            each.samples += len(continuations)
            each.finish_reason = "sampler_exhausted"
            for continuation in continuations:
                whole = prompt + continuation.text
                sentences, whole, starts, _ = self._part(whole, prompt, True)
                rest = (whole[: starts[0]].rstrip(" ") if starts else whole)[len(prompt) :]
                space = rest[: len(rest) - len(rest.lstrip())]
                opening = space + clean(rest, joiner=self.joiner)
                if self._is_closed(prompt + opening):
                    each.text, each.opening = prompt + opening, opening
                    over = len(sentences) == length
                    each.finish_reason = "eos" if over and continuation.ended else ""
                    break

    def _is_closed(self, text: str) -> bool:
        return round_trips(self.segmenter, text, _PROBE)

    def _write_sentence(
        self, sampler: Sampler, live: Sequence[_Writing], number: int, rng: np.random.Generator
    ) -> None:
        """Adds a sentence to each document, or ends it."""
        contexts = [each.text for each in live]
        known = self.thresholds(contexts, rng)
        last = [(each.sentences or self.segmenter.split(each.text))[-1] for each in live]
        (before,) = self.embed([last])
        pending = list(zip(live, [_Turn(context) for context in contexts], known, before, strict=True))
        while pending:
            self._fill(sampler, [turn for _, turn, _, _ in pending], rng, self.chunk)
            for writing, turn, _, _ in pending:
                if turn.spent and len(turn.candidates) < self.smallest_pool:
                    over = turn.ends > len(turn.candidates)
                    writing.finish_reason = "eos" if over else "sampler_exhausted"
                    writing.samples += turn.drawn
            pending = [each for each in pending if not each[0].finish_reason]
            pools = [
                Pool(number, previous, turn.sentences, embeddings, turn.spent, writing.document, thresholds)
                for (writing, turn, thresholds, previous), embeddings in zip(
                    pending, self.embed([turn.sentences for _, turn, _, _ in pending]), strict=True
                )
            ]
            selections = self.select(pools, rng) if pools else []
            again = []
            for each, pool, selection in zip(pending, pools, selections, strict=True):
                writing, turn, _, _ = each
                if selection.index is None:
                    if pool.exhausted:
                        raise RuntimeError(f"{self.name}: more was asked for, but the pool is exhausted")
                    again.append(each)
                    continue
                chosen = turn.candidates[selection.index]
                writing.text = join(writing.text, chosen.text)
                writing.sentences.append(chosen.text)
                writing.samples += turn.drawn
                writing.finish_reason = "eos" if chosen.ended else ""
                writing.trace.append(
                    {
                        "number": number,
                        "sentence": chosen.text,
                        "drawn": turn.drawn,
                        "candidates": len(turn.candidates),
                        "skipped": selection.skipped,
                        **selection.record,
                    }
                )
            pending = again

    def embed(self, groups: Sequence[Sequence[str]]) -> list[Float64[np.ndarray, "candidates dim"]]:
        """Encodes groups of sentences in one call."""
        flat = [sentence for group in groups for sentence in group]
        if not flat:
            return [np.zeros((0, 0)) for _ in groups]
        encoded = np.asarray(self.encoder.encode(flat), np.float64)
        return np.split(encoded, np.cumsum([len(group) for group in groups])[:-1])

    def candidates(self, sampler: Sampler, contexts: Sequence[str], rng: np.random.Generator) -> list[list[str]]:
        """Returns the candidates for the next sentence of each context, as generation would draw and filter them."""
        turns = [_Turn(context) for context in contexts]
        self._fill(sampler, turns, rng, self.num_samples)
        return [turn.sentences for turn in turns]

    def _fill(self, sampler: Sampler, turns: Sequence[_Turn], rng: np.random.Generator, chunk: int) -> None:
        """Draws a chunk for each turn, and more for those with too few candidates while they may have more."""
        whole = min(self.min_candidates + 1, self.num_samples) if chunk == self.num_samples else 1
        enough = max(whole, self.smallest_pool)
        pending = list(turns)
        while pending:
            counts = []
            for turn in pending:
                left = self.num_samples - turn.asked
                turn.redraws += left <= 0
                counts.append(min(chunk, left if left > 0 else self.num_samples - len(turn.candidates)))
            answers = self._draw(sampler, [turn.context for turn in pending], counts, rng)
            for turn, count, continuations in zip(pending, counts, answers, strict=True):
                turn.asked += count
                turn.drawn += len(continuations)
                # It was asked again and again by `draw`.
                turn.silent = not continuations
                self._add(turn, continuations)
                turn.spent = turn.silent or turn.asked >= self.num_samples
            pending = [
                turn
                for turn in pending
                if len(turn.candidates) < (enough if turn.spent else 1)
                and not (turn.silent or (turn.spent and turn.redraws >= self.redraws))
            ]

    def _draw(
        self, sampler: Sampler, contexts: Sequence[str], counts: Sequence[int], rng: np.random.Generator
    ) -> list[list[Continuation]]:
        return draw(
            sampler,
            contexts,
            counts,
            is_complete=lambda index, text: is_complete(self.segmenter, contexts[index], text),
            seed=int(rng.integers(2**31)),
        )

    def _add(self, turn: _Turn, continuations: Sequence[Continuation]) -> None:
        """Cuts, cleans and filters continuations, each for itself."""
        seen, cut = set(turn.sentences), dict[str, tuple[str, bool]]()
        for each in continuations:
            if each.text not in cut:
                cut[each.text] = self._cut(turn.context, each.text)
            sentence, is_all = cut[each.text]
            turn.ends += each.ended and not each.text.strip()
            if sentence and not (self.deduplicate and sentence in seen):
                seen.add(sentence)
                turn.candidates.append(Continuation(sentence, each.ended and is_all))

    def _cut(self, context: str, continuation: str) -> tuple[str, bool]:
        """Returns the candidate, empty if there is none, and whether the continuation holds nothing more."""
        sentence = clean(first_sentence(self.segmenter, context, continuation) or "", joiner=self.joiner)
        if self.round_trip and not (
            round_trips(self.segmenter, context, sentence) and self._is_closed(join(context, sentence))
        ):
            return "", False
        return sentence, not is_complete(self.segmenter, context, continuation)


class Unmarked(SentenceWatermark):
    """The first candidate of each sentence: what the model writes, cut, cleaned and filtered like marked text."""

    name = "unmarked"

    def select(self, pools: Sequence[Pool], rng: np.random.Generator) -> list[Selection]:
        """Chooses the first candidates."""
        return [Selection(0) for _ in pools]

    def score(self, documents: Sequence[Document]) -> list[DetectionResult]:
        """Finds nothing."""
        return [DetectionResult.nothing(self.channels, "there is no mark to look for") for _ in documents]


def _version() -> str:
    try:
        return importlib.metadata.version(__name__.partition(".")[0])
    except importlib.metadata.PackageNotFoundError:  # copied into another project
        return "unknown"


def _check_texts(argument: str, texts: Sequence[Any], *others: type) -> None:
    if isinstance(texts, str):
        raise TypeError(f"{argument} is one string: must be a list of them")
    for index, text in enumerate(texts):
        if not isinstance(text, (str, *others)):
            raise TypeError(f"{argument}[{index}] is {type(text).__name__}: must be str")
