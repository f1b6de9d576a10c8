"""Rows of tokens through `generate` of transformers, for what needs whole texts and not sentences of them."""

from collections.abc import Sequence
from typing import Any

from separata_kit.extras import load


def generate_rows(
    model: Any, tokenizer: Any, rows: Sequence[list[int]], *, seed: int, batch_size: int, **settings: Any
) -> list[tuple[list[int], bool]]:
    """Continue rows of tokens; the global random state is left as it was.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        rows: At least one token each.
        seed: Of the draws. All rows of a batch share one random stream.
        batch_size: Rows run together.
        settings: Of `generate`.

    Returns:
        For each row the new tokens, up to the one that ended it, and whether one did.

    Raises:
        ImportError: The extra `transformers` is not installed.
    """
    torch = load("torch", "local models need", "pmark[transformers]")
    known = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(known if isinstance(known, list) else [known])} - {None}
    padding = min(ends, default=0)
    found = []
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, len(rows), batch_size):
            some = rows[start : start + batch_size]
            width = max(map(len, some))
            # Padded on the left by hand: a tokenizer may have no padding token.
            ids = torch.tensor([[padding] * (width - len(row)) + row for row in some], device=model.device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in some], device=model.device)
            written = model.generate(ids, attention_mask=mask, pad_token_id=padding, **settings)[:, width:].tolist()
            for row in written:
                stop = next((place for place, token in enumerate(row) if token in ends), len(row))
                found.append((row[:stop], stop < len(row)))
    return found
