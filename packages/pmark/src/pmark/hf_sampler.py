"""Drawing candidates from a local transformers model."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from separata_kit.extras import load

from pmark.samplers import Continuation, check_sampling
from pmark.tokens import added_text, decoded_behind, encoded

if TYPE_CHECKING:
    from pmark.shared_prefix import Prefix, Rows

# Of wide scripts, which put no space between sentences; and of others.
_WIDE = "\u3002\uff01\uff1f"
_TERMINATORS = f".!?\u2026\u061f\u0964{_WIDE}"
_BOUNDARY = re.compile(rf"[{_TERMINATORS}]\S*\s+\S|\n\s*\S|[{_WIDE}]\S")


@dataclass
class _Row:
    document: int
    number: int = 0
    tokens: list[int] = field(default_factory=list)
    marked: bool = False  # whether a sentence may have ended in it
    spaced: bool = False  # whether its last token ends in white space
    ended: bool = False


class HFSampler:
    """Draws continuations from a transformers model.

    The prefix of a context runs once, whatever the number of continuations, and what it shares with an earlier call's
    runs not at all. The rows of many contexts make one batch and share one copy of each prefix where the model's
    attention allows it (`shares_prefixes`); a row leaves the batch when its sentence is complete. Tokens are drawn from
    the model's distribution under `temperature` and `top_p` and nothing else: other settings of a generation
    configuration, such as `top_k`, would distort what the watermark keeps.

    While it draws, the model must not be used by another thread; other samplers wait.
    """

    # One for all, since samplers may share a model, whose attention is another one while they draw.
    _lock = threading.RLock()

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        temperature: float = 0.7,
        top_p: float = 0.95,
        max_new_tokens: int = 128,
        max_rows: int = 256,
        wrap: Callable[[str], str] | None = None,
        cache_bytes: int = 1 << 30,
    ) -> None:
        """Takes the model.

        Args:
            model: A decoder-only language model of transformers, in evaluation mode.
            tokenizer: Its tokenizer.
            temperature: What the logits are divided by (the paper: 0.7).
            top_p: Share of the probability that is drawn from (the paper: 0.95).
            max_new_tokens: Longest continuation.
            max_rows: Most continuations that run at once.
            wrap: Makes what the model reads out of a context, such as an instruction and a chat template in front of
                it; it has to end in the context. Special tokens are then its business.
            cache_bytes: Most memory that prefixes may hold from one call to the next.

        Raises:
            ImportError: torch or transformers is missing.
            ValueError: A setting is out of its range, or the model is no decoder-only one, or in training mode.
        """
        for library in ("torch", "transformers"):
            load(library, "HFSampler needs", "pmark[transformers]")
        check_sampling(temperature, top_p, max_new_tokens)
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, not {max_rows}")
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"model must be a decoder-only language model, not {type(model).__name__}")
        if model.training:
            raise ValueError("model is in training mode, where dropout changes what it says; call model.eval() first")
        self.model = model
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.top_p = top_p
        self.max_new_tokens = max_new_tokens
        self.max_rows = max_rows
        self.wrap = wrap
        self.cache_bytes = cache_bytes
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._pieces: dict[int, str] = {}
        self._shares: bool | None = None
        configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        # A special token has no text that could be handed on, so the text ends with it.
        self._ends = {*tokenizer.all_special_ids, *([configured] if isinstance(configured, int) else configured or ())}

    @property
    def shares_prefixes(self) -> bool:
        """Whether the continuations of a context share its keys and values, which is found by trying."""
        import torch

        from pmark.shared_prefix import usable_with

        if self._shares is None:
            with torch.inference_mode():
                self._shares = usable_with(self.model)
        return self._shares

    def clear(self) -> None:
        """Forgets the prefixes of earlier calls: to free memory, or after the model's weights or adapters changed."""
        with self._lock:
            self._prefixes.clear()

    def sample(
        self,
        contexts: Sequence[str],
        counts: Sequence[int],
        *,
        is_complete: Callable[[int, str], bool] | None = None,
        seed: int | None = None,
    ) -> list[list[Continuation]]:
        """Draws continuations; see `Sampler`.

        Args:
            contexts: The texts to continue.
            counts: How many continuations of each.
            is_complete: Called with the index of a context and the text of a row so far, where a further sentence may
                have begun; the row stops once it returns true.
            seed: Of the draws; None for fresh randomness. A row's randomness depends on nothing but the seed and its
                number, so stopping others earlier or other batches change it only by rounding.

        Returns:
            For each context its continuations.

        Raises:
            ValueError: A context leaves no room for `max_new_tokens` within the model's positions, or is empty while
                the tokenizer knows no first token.
            SamplerError: The model's logits are no numbers.
        """
        import torch

        with self._lock, torch.inference_mode():
            longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
            room = None if longest is None else longest - self.max_new_tokens
            texts = contexts if self.wrap is None else [self.wrap(context) for context in contexts]
            ids = [
                encoded(self.tokenizer, text, index, room, special=self.wrap is None)
                for index, text in enumerate(texts)
            ]
            generator = torch.Generator()
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
            pairs = enumerate(zip(contexts, counts, strict=True))
            rows = [_Row(document) for document, (_, count) in pairs for _ in range(count)]
            for number, row in enumerate(rows):
                row.number = number
            uniforms = torch.rand(len(rows), self.max_new_tokens, dtype=torch.float64, generator=generator)
            # Of like length side by side, so that little is padded.
            queue = sorted(rows, key=lambda row: (len(ids[row.document]), row.document))
            while queue:
                size = self.max_rows
                if not self.shares_prefixes:
                    size = min(size, sum(row.document == queue[0].document for row in queue))
                batch, queue = queue[:size], queue[size:]
                self._run(batch, ids, uniforms, is_complete)
            drawn: list[list[Continuation]] = [[] for _ in contexts]
            for row in rows:
                drawn[row.document].append(
                    Continuation(added_text(self.tokenizer, ids[row.document], row.tokens), row.ended)
                )
            return drawn

    def _prefix(self, ids: list[int]) -> "Prefix":
        from pmark.shared_prefix import run_prefix

        known = max(self._prefixes.values(), key=lambda prefix: prefix.shared_with(ids), default=None)
        prefix = run_prefix(self.model, ids, known)
        if known is not None and known.shared_with(ids) == len(known.ids):
            del self._prefixes[known.ids]
        self._prefixes[prefix.ids] = prefix
        held = sum(each.nbytes for each in self._prefixes.values())
        while self._prefixes and held > self.cache_bytes:
            held -= self._prefixes.popitem(last=False)[1].nbytes
        return prefix

    def _run(
        self,
        live: list[_Row],
        ids: list[list[int]],
        uniforms: Any,
        is_complete: Callable[[int, str], bool] | None,
    ) -> None:
        """Continues rows until each is complete."""
        import torch

        from pmark.shared_prefix import ExpandedRows, SharedPrefixRows, next_tokens

        documents = list(dict.fromkeys(row.document for row in live))
        places = [documents.index(row.document) for row in live]
        state: Rows
        if self.shares_prefixes:
            prefixes = [self._prefix(ids[document]) for document in documents]
            state = SharedPrefixRows(self.model, prefixes, places)
            logits = torch.stack([prefix.logits for prefix in prefixes])[places]
        else:
            state = expanded = ExpandedRows(self.model, ids[documents[0]], len(live))
            logits = expanded.first.expand(len(live), -1)
        for step in range(self.max_new_tokens):
            numbers = uniforms[[row.number for row in live], step]
            tokens = next_tokens(logits, numbers, self.temperature, self.top_p).tolist()
            going = [
                not self._finish(row, token, ids, is_complete) and step + 1 < self.max_new_tokens
                for row, token in zip(live, tokens, strict=True)
            ]
            if not all(going):
                order = _fill_gaps(going)
                if not order:
                    return
                live, tokens = [live[i] for i in order], [tokens[i] for i in order]
                state.keep(order)
            logits = state.step(tokens)

    def _finish(
        self, row: _Row, token: int, ids: list[list[int]], is_complete: Callable[[int, str], bool] | None
    ) -> bool:
        """Appends a token; whether the row has its sentence then."""
        if token in self._ends:
            row.ended = True
            return True
        row.tokens.append(token)
        if is_complete is None:
            return False
        if token not in self._pieces:
            self._pieces[token] = decoded_behind(self.tokenizer, [token], [token])
        piece = self._pieces[token]
        begins = row.spaced or piece[:1].isspace() or not piece.isascii()
        worth_asking = row.marked and begins and not piece.isspace()
        row.marked = row.marked or any(character in piece for character in f"{_TERMINATORS}\n\ufffd")
        row.spaced = piece[-1:].isspace()
        if not worth_asking:
            return False
        text = added_text(self.tokenizer, ids[row.document], row.tokens)
        return _BOUNDARY.search(text) is not None and is_complete(row.document, text)


def _fill_gaps(going: list[bool]) -> list[int]:
    """Which rows stay, and where: each gap takes one of the last rows, so that few rows move."""
    order = [i for i, stays in enumerate(going) if stays]
    size = len(order)
    late = [i for i in order if i >= size]
    return [i if going[i] else late.pop() for i in range(size)]
