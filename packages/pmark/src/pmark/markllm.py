"""The interface of the toolkit MarkLLM, so that its pipelines and attacks run on these watermarks."""

from typing import Any

from pmark.samplers import Sampler
from pmark.sentence_watermark import SentenceWatermark, Unmarked


class MarkLLMWatermark:
    """A sentence watermark as MarkLLM's algorithms look; nothing of MarkLLM is needed.

    Args:
        watermark: A `PMark`, or one of the baselines.
        sampler: The model.
        has_prompt: Whether texts to test begin with a sentence that is the prompt, as generated ones do.
        **options: Of `SentenceWatermark.generate_batch`, such as `max_sentences`.
    """

    def __init__(
        self, watermark: SentenceWatermark, sampler: Sampler, *, has_prompt: bool = True, **options: Any
    ) -> None:
        """See the class."""
        self.watermark = watermark
        self.sampler = sampler
        self.has_prompt = has_prompt
        self.options = options

    def generate_watermarked_text(self, prompt: str, *args: Any, **kwargs: Any) -> str:
        """Returns prompt and marked text; MarkLLM's further arguments are ignored."""
        return self.watermark.generate(self.sampler, prompt, **self.options).text

    def generate_unwatermarked_text(self, prompt: str, *args: Any, **kwargs: Any) -> str:
        """Returns prompt and text of the same sampler, cut and cleaned alike, without a choice."""
        like = self.watermark
        options = {name: getattr(like, name) for name in ("segmenter", "round_trip", "redraws", "joiner", "seed")}
        plain = Unmarked(like.encoder, num_samples=1, **options)
        return plain.generate(self.sampler, prompt, **self.options).text

    def detect_watermark(
        self, text: str, return_dict: bool = True, *args: Any, **kwargs: Any
    ) -> dict[str, Any] | tuple[bool, float]:
        """Says whether a text is marked.

        Args:
            text: The text.
            return_dict: Return a dictionary; otherwise a pair.
            *args: Ignored.
            **kwargs: Ignored.

        Returns:
            `is_watermarked`, and as `score` the calibrated z.
        """
        result = self.watermark.detect_batch([text], has_prompt=self.has_prompt, sampler=self.sampler)[0]
        answer = {"is_watermarked": result.is_watermarked, "score": result.z_calibrated}
        return answer if return_dict else (result.is_watermarked, result.z_calibrated)
