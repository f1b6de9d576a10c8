# ruff: noqa: D102  # the tests of a suite say by their names what they check
"""Batched equals single, padded equals unpadded, cached equals uncached."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

if TYPE_CHECKING:
    from torch import Tensor


class BatchConsistency:
    """Tests for anything that computes values per token: what a row gives must not depend on what lies beside it.

    Attributes:
        tolerance: Bound for the absolute and for the relative difference. The default suits float64, the type of the
            default model: a mistake shows at 1e-3, rounding does not.
        lengths: Of the sequences that are padded into one batch; 1 is among them, since one token has no past.
        supports_cache: Whether the values can be computed in pieces with `past_key_values`.
    """

    tolerance = 1e-9
    lengths: ClassVar[tuple[int, ...]] = (1, 4, 13, 9)
    supports_cache = True

    def model(self) -> Any:
        """Hook: a fresh model. By default the tiny Llama in float64."""
        import torch

        from separata_testing.models import tiny_model

        return tiny_model(dtype=torch.float64)

    def context(self, model: Any) -> AbstractContextManager[Any]:
        """Hook: a context manager in which the values are computed, such as the edit under test. None by default."""
        return nullcontext()

    def new_cache(self, model: Any) -> Any:
        """Hook: an empty cache, changed in place by `values`. By default a transformers DynamicCache."""
        from transformers import DynamicCache

        return DynamicCache(config=model.config)

    def values(self, model: Any, input_ids: "Tensor", attention_mask: "Tensor", cache: Any) -> "Tensor":
        """Hook: computes the values. By default the logits of a transformers model.

        Args:
            model: What `model` returned.
            input_ids: Tokens, [batch, new]: those that are not in the cache yet.
            attention_mask: 1 at tokens and 0 at padding, [batch, past + new].
            cache: What `new_cache` returned, after earlier calls; None for a call without a cache.

        Returns:
            [batch, new, ...]. What stands at padding is not looked at.
        """
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        logits: Tensor = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        ).logits
        return logits

    def _sequences(self, lengths: tuple[int, ...]) -> "list[Tensor]":
        import torch

        generator = torch.Generator().manual_seed(7)
        return [torch.randint(4, 200, (length,), generator=generator) for length in lengths]

    def _run(self, model: Any, tokens: "Tensor", mask: "Tensor", pieces: tuple[int, ...] | None = None) -> "Tensor":
        """Values [batch, time, ...]; with `pieces` (their lengths) through a cache."""
        import torch

        with torch.no_grad(), self.context(model):
            if pieces is None:
                return self.values(model, tokens, mask, None)
            cache, start, found = self.new_cache(model), 0, []
            for piece in pieces:
                end = start + piece
                found.append(self.values(model, tokens[:, start:end], mask[:, :end], cache))
                start = end
        return torch.cat(found, dim=1)

    def _single(self, model: Any, sequence: "Tensor") -> "Tensor":
        import torch

        return self._run(model, sequence[None], torch.ones_like(sequence[None]))[0]

    def _pad(self, sequences: "list[Tensor]", side: str, extra: int = 0) -> "tuple[Tensor, Tensor]":
        import torch

        width = max(len(sequence) for sequence in sequences) + extra
        tokens = torch.zeros(len(sequences), width, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, sequence in enumerate(sequences):
            where = slice(None, len(sequence)) if side == "right" else slice(width - len(sequence), None)
            tokens[row, where], mask[row, where] = sequence, 1
        return tokens, mask

    def _assert_rows(self, model: Any, found: "Tensor", mask: "Tensor", sequences: "list[Tensor]", what: str) -> None:
        import torch

        for row, sequence in enumerate(sequences):
            here, alone = found[row][mask[row] == 1], self._single(model, sequence)
            assert here.shape == alone.shape, f"row {row}: shape {list(here.shape)} instead of {list(alone.shape)}"
            difference = (here - alone).abs().max().item()
            torch.testing.assert_close(
                here,
                alone,
                atol=self.tolerance,
                rtol=self.tolerance,
                msg=f"row {row} of the batch, {what}, differs from its own run by up to {difference:.3g}",
            )

    def test_values_depend_on_the_tokens(self) -> None:
        """Without this the other tests would hold for a constant."""
        import torch

        model = self.model()
        first, second = (self._single(model, sequence) for sequence in self._sequences((6, 6)))
        assert not torch.allclose(first, second, atol=self.tolerance, rtol=self.tolerance)

    def test_batch_equals_single(self) -> None:
        model = self.model()
        sequences = self._sequences((11, 11, 11))
        tokens, mask = self._pad(sequences, "right")
        self._assert_rows(model, self._run(model, tokens, mask), mask, sequences, "without padding")

    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("extra", [0, 3])
    def test_padded_equals_unpadded(self, side: str, extra: int) -> None:
        model = self.model()
        sequences = self._sequences(self.lengths)
        tokens, mask = self._pad(sequences, side, extra)
        self._assert_rows(model, self._run(model, tokens, mask), mask, sequences, f"padded on the {side}")

    @pytest.mark.parametrize("pieces", [(6, 5), (1,) * 11, (8, 1, 1, 1), (1, 10)], ids=str)
    def test_cached_equals_uncached(self, pieces: tuple[int, ...]) -> None:
        if not self.supports_cache:
            pytest.skip("supports_cache is False")
        model = self.model()
        sequences = self._sequences((11, 11))
        tokens, mask = self._pad(sequences, "right")
        found = self._run(model, tokens, mask, pieces)
        self._assert_rows(model, found, mask, sequences, f"cached in pieces of {pieces}")

    @pytest.mark.parametrize("pieces", [(7, 6), (9, 1, 1, 1, 1)], ids=str)
    def test_cached_with_left_padding_equals_unpadded(self, pieces: tuple[int, ...]) -> None:
        if not self.supports_cache:
            pytest.skip("supports_cache is False")
        model = self.model()
        sequences = self._sequences((13, 8, 2))
        tokens, mask = self._pad(sequences, "left")
        found = self._run(model, tokens, mask, pieces)
        self._assert_rows(model, found, mask, sequences, f"padded on the left and cached in pieces of {pieces}")
