"""From a context to the tokens that a model reads, and from the tokens that it adds to the text that they are."""

from collections.abc import Sequence
from typing import Any

from separata_kit.rows import has_half_pair

_TAIL = 8


def encoded(tokenizer: Any, context: str, index: int, room: int | None, *, special: bool = True) -> list[int]:
    """Gives the tokens of a context, at least one and at most `room`.

    Args:
        tokenizer: A tokenizer of transformers.
        context: The text.
        index: Its number among the contexts, for errors.
        room: Most tokens that may be; None for any number.
        special: Whether the tokenizer adds the tokens that a text begins with.

    Returns:
        Token ids.

    Raises:
        ValueError: There are too many, or none and the tokenizer has no token to begin a text with; or the text holds
            half of a surrogate pair.
    """
    if has_half_pair(context):
        raise ValueError(f"contexts[{index}] holds half of a surrogate pair, which no tokenizer takes")
    ids: list[int] = list(tokenizer.encode(context, add_special_tokens=special))
    if not ids:
        ids = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
    if not ids:
        raise ValueError(f"contexts[{index}] is empty, and the tokenizer has no token to begin a text with")
    if room is not None and len(ids) > room:
        raise ValueError(
            f"contexts[{index}] has {len(ids)} tokens; with max_new_tokens more the model has positions for at most "
            f"{max(room, 0)}: shorten it, or lower max_new_tokens"
        )
    return ids


def added_text(tokenizer: Any, context: Sequence[int], tokens: Sequence[int]) -> str:
    """Gives the text that tokens add to a context, without half a character where the last token broke one up."""
    return decoded_behind(tokenizer, context, tokens).rstrip("\ufffd")


def decoded_behind(tokenizer: Any, context: Sequence[int], tokens: Sequence[int]) -> str:
    """Gives the text of tokens behind others, since some tokenizers drop the space in front of a text."""
    before = list(context[-_TAIL:])
    head, whole = decoded(tokenizer, before), decoded(tokenizer, before + list(tokens))
    return whole[len(head) :] if whole.startswith(head) else decoded(tokenizer, tokens)


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Gives the text of tokens as it is, without special tokens."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
