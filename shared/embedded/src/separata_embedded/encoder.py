"""A sentence encoder on transformers alone: token vectors, their mean, unit length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def mean_pooled(
    hidden_states: Float[Tensor, "texts tokens dim"], attention_mask: Int[Tensor, "texts tokens"]
) -> Float[Tensor, "texts dim"]:
    """Mean of the token vectors of each text, padding left out, scaled to unit length.

    Args:
        hidden_states: Vectors of the tokens.
        attention_mask: 1 for a token, 0 for padding.

    Returns:
        One vector of Euclidean length 1 per text; zeros for a text without tokens.
    """
    kept = attention_mask.bool().unsqueeze(-1)
    # `where` and not a product: padding may hold NaN or infinity.
    total = torch.where(kept, hidden_states, 0.0).sum(dim=1)
    mean = total / kept.sum(dim=1).clamp(min=1)
    return torch.nn.functional.normalize(mean, dim=-1)


@dataclass(frozen=True, eq=False)
class SentenceEncoder:
    """Turns sentences into vectors whose dot product is their cosine similarity.

    Args:
        model: An encoder with `last_hidden_state`, such as BERT, in evaluation mode.
        tokenizer: Its tokenizer.
        max_tokens: Tokens that are read of each text; the rest is cut off.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    max_tokens: int = 256

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self.model.config.hidden_size)

    @torch.no_grad()
    def encode(self, texts: Sequence[str], *, batch_size: int = 32) -> Float[Tensor, "texts dim"]:
        """Encode texts.

        Args:
            texts: The texts, in any number.
            batch_size: Texts in one forward pass. Texts of like length share one, so little of it is padding.

        Returns:
            One vector of unit length per text, in the order of `texts`, on the model's device.

        Raises:
            TypeError: `texts` is one string instead of a sequence of them.
            ValueError: `batch_size` is less than 1.
        """
        if isinstance(texts, str):
            raise TypeError(f"texts must be a sequence of strings, got the string {texts[:40]!r}; wrap it in a list")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        vectors = torch.empty(len(texts), self.dimension, dtype=self.model.dtype, device=self.model.device)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            inputs = self.tokenizer(
                [texts[index] for index in chosen],
                padding=True,
                truncation=True,
                max_length=self.max_tokens,
                return_tensors="pt",
            ).to(self.model.device)
            hidden_states = self.model(**inputs).last_hidden_state
            vectors[chosen] = mean_pooled(hidden_states, inputs["attention_mask"])
        return vectors
