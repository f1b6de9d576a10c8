"""KGW, the token-level watermark, to compare with: that of transformers with our surface (extra `transformers`)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from separata_kit.extras import load

from pmark.decoding import generate_rows
from pmark.scoring import p_value
from pmark.segmentation import Segmenter, make_segmenter
from pmark.sentence_watermark import DetectionResult, WatermarkedText
from pmark.tokens import added_text, encoded


class KGW:
    """Raises the logits of a green share of the vocabulary that depends on the token before.

    Texts are judged by their own tokens, found anew by the tokenizer, which may differ from those that were drawn.
    """

    name = "kgw"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        gamma: float = 0.25,
        delta: float = 2.0,
        key: int = 15485863,
        alpha: float = 0.05,
        temperature: float = 0.7,
        top_p: float = 0.95,
        max_new_tokens: int = 300,
        batch_size: int = 8,
        segmenter: str | Segmenter = "pysbd",
        language: str = "en",
        seed: int | None = None,
    ) -> None:
        """Takes the model.

        Args:
            model: A causal language model of transformers.
            tokenizer: Its tokenizer.
            gamma: Share of green tokens.
            delta: What is added to their logits.
            key: Hashing key; transformers' own if not given, so take another one to keep it secret.
            alpha: Level of the decision.
            temperature: Of the draws.
            top_p: Share of the probability that is drawn from.
            max_new_tokens: Longest text, in tokens.
            batch_size: Texts written together.
            segmenter: See `make_segmenter`; cuts what was written to a number of sentences.
            language: Of the segmenter.
            seed: Of the draws; None takes fresh entropy at each call.

        Raises:
            ImportError: The extra `transformers` is not installed.
        """
        transformers = load("transformers", "KGW needs", "pmark[transformers]")
        self.config = transformers.WatermarkingConfig(greenlist_ratio=gamma, bias=delta, hashing_key=key)
        self._detector = transformers.WatermarkDetector(model.config, str(model.device), self.config)
        if self._detector.bos_token_id is None:
            # The detector compares it with tokens, and would fail for models that have none.
            self._detector.bos_token_id = -1
        self._model, self._tokenizer = model, tokenizer
        self._drawing = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens}
        self._drawing |= {"do_sample": True, "top_k": 0}
        self._batch_size = batch_size
        self._segmenter = make_segmenter(segmenter, language)
        self.alpha, self.seed = alpha, seed

    @property
    def settings(self) -> dict[str, Any]:
        """What made a text; without the key."""
        return {
            "method": self.name,
            "gamma": self.config.greenlist_ratio,
            "delta": self.config.bias,
            "segmenter": self._segmenter.name,
            **self._drawing,
        }

    def generate_batch(
        self, sampler: object, prompts: Sequence[str], *, max_sentences: int | None = None
    ) -> list[WatermarkedText]:
        """Write marked texts; the global random state is left as it was.

        Args:
            sampler: Ignored: the model itself is needed, not draws from it.
            prompts: One for each text.
            max_sentences: Where to cut what was written; the sentence that `max_new_tokens` breaks off goes too, unless
                it is the only one.

        Returns:
            One text for each prompt, without a trace; `samples` is 1.
        """
        rows = [encoded(self._tokenizer, prompt, index, None) for index, prompt in enumerate(prompts)]
        written = generate_rows(
            self._model,
            self._tokenizer,
            rows,
            seed=int(np.random.SeedSequence(self.seed).generate_state(1)[0]),
            batch_size=self._batch_size,
            watermarking_config=self.config,
            **self._drawing,
        )
        return [
            self._text(prompt, added_text(self._tokenizer, row, ids), ended, max_sentences)
            for prompt, row, (ids, ended) in zip(prompts, rows, written, strict=True)
        ]

    def detect_batch(
        self,
        texts: Sequence[str | WatermarkedText],
        *,
        prompts: Sequence[str | None] | None = None,
        has_prompt: bool = True,
        sampler: object = None,
    ) -> list[DetectionResult]:
        """Count green tokens behind the prompt.

        Args:
            texts: What to test. A `WatermarkedText` knows its prompt.
            prompts: What stood before each; the text may begin with it or not.
            has_prompt: Where the prompt is not given: the first sentence is it.
            sampler: Ignored.

        Returns:
            One result for each text; it has no counts of sentences, and `reason` tells the number of tokens.
        """
        prompts = [None] * len(texts) if prompts is None else prompts
        results = []
        for given, prompt in zip(texts, prompts, strict=True):
            text = given.text if isinstance(given, WatermarkedText) else given
            head = given.prompt if prompt is None and isinstance(given, WatermarkedText) else prompt
            if head is None:
                text = text.lstrip()
                head = "".join(self._segmenter.split(text)[: int(has_prompt)])
            results.append(self._judge(text.removeprefix(head)))
        return results

    def _judge(self, text: str) -> DetectionResult:
        ids = self._tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].long()
        if ids.shape[1] <= self.config.context_width:
            return DetectionResult.nothing(0, "no token to test")
        found = self._detector(ids.to(self._model.device), return_dict=True)
        z = float(found.z_score[0])
        # That of transformers is an approximation, wrong by orders of magnitude where z is large.
        p = p_value(z)
        sentences = len(self._segmenter.split(text))
        return DetectionResult(
            z=z,
            p_value=p,
            z_calibrated=z,
            p_calibrated=p,
            is_watermarked=p <= self.alpha,
            counts=np.zeros((0, 0)),
            thresholds=None,
            num_sentences=sentences,
            low_power=bool(found.num_tokens_scored[0] < 25),
            reason=f"{int(found.num_green_tokens[0])} of {int(found.num_tokens_scored[0])} tokens are green",
        )

    def _text(self, prompt: str, written: str, ended: bool, max_sentences: int | None) -> WatermarkedText:
        sentences = self._segmenter.split(written)
        if not ended and len(sentences) > 1:
            # Sentences hold the text's own characters, so the last one is found where it stands.
            written = written[: written.rindex(sentences.pop())]
        cut = max_sentences is not None and len(sentences) > max_sentences
        if cut:
            for sentence in reversed(sentences[max_sentences:]):
                written = written[: written.rindex(sentence)]
            del sentences[max_sentences:]
        return WatermarkedText(
            text=prompt + written.rstrip(),
            prompt=prompt,
            opening="",
            sentences=sentences,
            trace=[],
            finish_reason="eos" if ended and not cut else "length",
            samples=1,
            round_trips=True,
            settings=self.settings,
        )
