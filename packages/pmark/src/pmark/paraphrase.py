"""Attacks that write a text anew with another model: any chat endpoint, a local chat model, a seq2seq paraphraser.

They are attacks as in `pmark.attacks`. A paraphrase that comes back empty or cut off keeps the original;
`unchanged` tells how many did in the last call.
"""

import os
import re
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Float
from separata_kit.extras import load

from pmark.attacks import Attack
from pmark.decoding import generate_rows
from pmark.encoders import as_encoder
from pmark.metrics import n_grams
from pmark.openai_sampler import shown_address

_FORMS = {
    "sentence": ["Say the following sentence in other words. Keep its meaning. Answer with the new sentence only.\n\n"],
    "document": [
        "Say the following text in other words, sentence by sentence. Keep the meaning of each sentence and their "
        "order. Answer with the new text only.\n\n"
    ],
}
_TRANSLATE = "Translate the following text into {}. Answer with the translation only.\n\n"
_THOUGHTS = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)


class ChatAttack(Attack):
    """Paraphrases by asking a chat model; the place where it runs is left to subclasses.

    Attributes:
        unchanged: Texts or sentences that kept their original in the last call, for want of an answer.
    """

    def __init__(
        self, name: str, mode: str, language_name: str = "English", pivot: str = "French", **options: Any
    ) -> None:
        """Takes what to ask.

        Args:
            name: See `Attack`.
            mode: "sentence" rewrites each sentence by itself, "document" the text at once, "back_translation"
                translates the text into another language and back.
            language_name: Language of the texts, in words, for the way back.
            pivot: The other language, in words.
            options: `keep_first`, `segmenter` and `language` of `Attack`.

        Raises:
            ValueError: There is no such mode.
        """
        if mode not in (*_FORMS, "back_translation"):
            raise ValueError(f"mode must be 'sentence', 'document' or 'back_translation', not {mode!r}")
        super().__init__(f"{name}-{mode.replace('_', '-')}", **options)
        self.unchanged = 0
        self._by_sentence = mode == "sentence"
        self._forms = _FORMS.get(mode) or [_TRANSLATE.format(each) for each in (pivot, language_name)]

    @abstractmethod
    def ask(self, messages: Sequence[str], seeds: Sequence[int]) -> list[str]:
        """Return the model's answer to each message; empty where there is none or it was cut off. One seed for each."""

    def alter(self, documents: Sequence[list[str]], rngs: Sequence[np.random.Generator]) -> list[list[str]]:
        """Paraphrase documents; see `Attack`. All of them are asked for at once."""
        pieces = [each if self._by_sentence else [" ".join(each)] for each in documents]
        originals = [piece for each in pieces for piece in each]
        answers = originals
        for form in self._forms:
            seeds = [int(rng.integers(2**31)) for rng, each in zip(rngs, pieces, strict=True) for _ in each]
            # An answer that is missing stays missing on the way back.
            asked = [index for index, answer in enumerate(answers) if answer]
            found = self.ask([form + answers[index] for index in asked], [seeds[index] for index in asked])
            answers = [""] * len(originals)
            for index, answer in zip(asked, found, strict=True):
                answers[index] = " ".join(_THOUGHTS.sub("", answer).split())
        self.unchanged = sum(not each for each in answers)
        kept = iter([answer or original for answer, original in zip(answers, originals, strict=True)])
        return [[next(kept) for _ in each] for each in pieces]


class ChatParaphraser(ChatAttack):
    """Paraphrases through any endpoint that speaks OpenAI's chat completions (extra `openai`)."""

    def __init__(
        self,
        base_url: str,
        model: str,
        mode: str = "sentence",
        *,
        api_key_env: str = "OPENAI_API_KEY",
        temperature: float = 0.7,
        max_tokens: int = 2048,
        concurrency: int = 8,
        timeout: float = 120.0,
        retries: int = 5,
        **options: Any,
    ) -> None:
        """Takes the endpoint.

        Args:
            base_url: Address of the endpoint, with its version, such as `http://localhost:8000/v1`.
            model: The model's name there.
            mode: See `ChatAttack`.
            api_key_env: Environment variable that holds the key; a local server needs none.
            temperature: Of the answers.
            max_tokens: Longest answer; one that is cut off counts as missing.
            concurrency: Requests at a time.
            timeout: Seconds that one request may take.
            retries: How often a request that fails is sent again, with growing pauses.
            options: The languages of `ChatAttack`; `keep_first`, `segmenter` and `language` of `Attack`.

        Raises:
            ValueError: There is no such mode.
            ImportError: The extra `openai` is not installed.
        """
        super().__init__("chat", mode, **options)
        self._client = load("openai", "ChatParaphraser needs", "pmark[openai]").OpenAI(
            base_url=base_url, api_key=os.environ.get(api_key_env) or "none", timeout=timeout, max_retries=retries
        )
        self._settings: dict[str, Any] = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._concurrency = concurrency

    def ask(self, messages: Sequence[str], seeds: Sequence[int]) -> list[str]:
        """Return the answers, in order; see `ChatAttack`.

        Raises:
            ConnectionError: A request failed for good; no key is shown.
        """
        with ThreadPoolExecutor(self._concurrency) as pool:
            waiting = [pool.submit(self._one, *each) for each in zip(messages, seeds, strict=True)]
            try:
                return [each.result() for each in waiting]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _one(self, message: str, seed: int) -> str:
        from openai import APIStatusError, OpenAIError

        try:
            answer = self._client.chat.completions.create(
                messages=[{"role": "user", "content": message}], seed=seed, **self._settings
            )
            [choice] = answer.choices
            text = choice.message.content or ""
        except (OpenAIError, TypeError, ValueError, AttributeError) as error:
            # An answer's body may repeat the key, so only the kind of error is told.
            status = f" (status {error.status_code})" if isinstance(error, APIStatusError) else ""
            raise ConnectionError(
                f"no paraphrase from {shown_address(str(self._client.base_url))}: {type(error).__name__}{status}"
            ) from None
        return text if choice.finish_reason != "length" else ""


class CausalParaphraser(ChatAttack):
    """Paraphrases with a local chat model of transformers, through its chat template (extra `transformers`)."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        mode: str = "sentence",
        *,
        temperature: float = 0.7,
        max_new_tokens: int = 256,
        batch_size: int = 8,
        **options: Any,
    ) -> None:
        """Takes the model.

        Args:
            model: A causal language model tuned for chat.
            tokenizer: Its tokenizer.
            mode: See `ChatAttack`.
            temperature: Of the answers.
            max_new_tokens: Longest answer, in tokens; one that does not end within it counts as missing.
            batch_size: Messages run together. Answers depend on it, as all rows share one random stream.
            options: The languages of `ChatAttack`; `keep_first`, `segmenter` and `language` of `Attack`.

        Raises:
            ValueError: The tokenizer has no chat template or no end-of-text token, or there is no such mode.
        """
        super().__init__("local", mode, **options)
        if not tokenizer.chat_template or tokenizer.eos_token_id is None:
            raise ValueError("tokenizer has no chat template or no end-of-text token: give a model tuned for chat")
        self._model, self._tokenizer, self._batch_size = model, tokenizer, batch_size
        self._settings = {"do_sample": True, "temperature": temperature, "max_new_tokens": max_new_tokens}

    def ask(self, messages: Sequence[str], seeds: Sequence[int]) -> list[str]:
        """Return the answers, in order; see `ChatAttack`. The global random state is left as it was."""
        rows = [
            self._tokenizer(
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
                ),
                add_special_tokens=False,
            )["input_ids"]
            for message in messages
        ]
        seed = seeds[0] if seeds else 0
        answers = generate_rows(
            self._model, self._tokenizer, rows, seed=seed, batch_size=self._batch_size, **self._settings
        )
        return [self._tokenizer.decode(row, skip_special_tokens=True) if ended else "" for row, ended in answers]


class Seq2SeqParaphraser(Attack):
    """Paraphrases each sentence with an encoder-decoder of transformers, such as Pegasus or Parrot.

    Attributes:
        unchanged: Sentences that kept their original in the last call, for want of an answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        bigram: bool = False,
        encoder: Any = None,
        prefix: str = "",
        num_beams: int = 25,
        max_drop: float = 0.1,
        max_new_tokens: int = 64,
        batch_size: int = 4,
        **options: Any,
    ) -> None:
        """Takes the model.

        Args:
            model: An encoder-decoder of transformers.
            tokenizer: Its tokenizer.
            bigram: Whether to run the bigram attack: of all beams the one with the least bigram overlap that stays
                close in meaning, see `pick_bigram`. Otherwise the best beam.
            encoder: Sentence encoder that judges closeness, see `as_encoder`; needed by the bigram attack.
            prefix: What the model wants before a sentence, such as "paraphrase: ".
            num_beams: Beams of the search.
            max_drop: See `pick_bigram`.
            max_new_tokens: Longest paraphrase, in tokens.
            batch_size: Sentences run together.
            options: `keep_first`, `segmenter` and `language` of `Attack`.

        Raises:
            ValueError: The bigram attack has no encoder.
        """
        super().__init__("seq2seq-bigram" if bigram else "seq2seq", **options)
        if bigram and encoder is None:
            raise ValueError("encoder must be given for bigram=True: it judges how far a paraphrase strays")
        self.unchanged = 0
        self._model, self._tokenizer, self._prefix, self._batch_size = model, tokenizer, prefix, batch_size
        self._encoder = as_encoder(encoder) if bigram else None
        self._max_drop, self._beams = max_drop, num_beams if bigram else 1
        self._settings = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "do_sample": False}

    def alter(self, documents: Sequence[list[str]], rngs: Sequence[np.random.Generator]) -> list[list[str]]:
        """Paraphrase documents; see `Attack`. Nothing in it is random."""
        torch = load("torch", "local paraphrasers need", "pmark[transformers]")
        originals = [sentence for each in documents for sentence in each]
        chosen: list[str] = []
        for start in range(0, len(originals), self._batch_size):
            some = originals[start : start + self._batch_size]
            inputs = self._tokenizer(
                [self._prefix + each for each in some], padding=True, truncation=True, return_tensors="pt"
            )
            with torch.no_grad():
                written = self._model.generate(
                    inputs["input_ids"].to(self._model.device),
                    attention_mask=inputs["attention_mask"].to(self._model.device),
                    num_return_sequences=self._beams,
                    **self._settings,
                )
            decoded = [
                " ".join(each.split()) for each in self._tokenizer.batch_decode(written, skip_special_tokens=True)
            ]
            for index, original in enumerate(some):
                beams = [each for each in decoded[index * self._beams : (index + 1) * self._beams] if each]
                if len(beams) > 1 and self._encoder is not None:
                    vectors = self._encoder.encode([original, *beams])
                    beams = [beams[pick_bigram(original, beams, vectors[1:] @ vectors[0], self._max_drop)]]
                chosen.append(beams[0] if beams else "")
        self.unchanged = sum(not each for each in chosen)
        kept = iter([answer or original for answer, original in zip(chosen, originals, strict=True)])
        return [[next(kept) for _ in each] for each in documents]


def pick_bigram(
    original: str, candidates: Sequence[str], similarities: Float[np.ndarray, " candidates"], max_drop: float = 0.1
) -> int:
    """Return the candidate of the bigram attack: least overlap among those close enough in meaning.

    Args:
        original: The sentence.
        candidates: Paraphrases, the most likely first.
        similarities: Cosine of each to the original.
        max_drop: Largest fall of the similarity, as a share of the first candidate's.

    Returns:
        Index of the candidate that keeps the fewest of the original's bigrams among those whose similarity is at least
        `(1 - max_drop)` times the first one's; the most likely of several.
    """
    bigrams = set(n_grams(original, 2))
    close = [index for index, each in enumerate(similarities) if each >= (1 - max_drop) * similarities[0]]
    # Of a negative similarity no share can be kept, so that nothing may be close enough.
    return min(close or [0], key=lambda index: len(bigrams & set(n_grams(candidates[index], 2))))
