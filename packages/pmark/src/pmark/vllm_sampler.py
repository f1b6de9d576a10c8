"""Drawing candidates from a vLLM engine in this process."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pmark.samplers import Continuation, check_sampling
from pmark.tokens import added_text, encoded

# Where a sentence may have ended, told cheaply; whether it has is asked of the segmenter.
_STOPS = [f"{end}{space}" for end in ".!?\u2026\u061f\u0964" for space in (" ", "\n", '" ')]
_STOPS += ["\n", "\u3002", "\uff01", "\uff1f"]


class VLLMSampler:
    """Draws continuations from a `vllm.LLM`.

    The continuations of a context are one request (`n`), which shares its prefix; prefixes are shared from sentence to
    sentence where the engine caches them. A row halts at each string that may end a sentence; where it has not, it is
    continued from its very tokens, so that the distribution is the model's.
    """

    def __init__(self, llm: Any, *, temperature: float = 0.7, top_p: float = 0.95, max_new_tokens: int = 128) -> None:
        """Takes the engine.

        Args:
            llm: A `vllm.LLM`.
            temperature: What the logits are divided by (the paper: 0.7).
            top_p: Share of the probability that is drawn from (the paper: 0.95).
            max_new_tokens: Longest continuation.

        Raises:
            ValueError: A setting is out of its range.
        """
        check_sampling(temperature, top_p, max_new_tokens)
        self.llm = llm
        self.tokenizer = llm.get_tokenizer()
        self.temperature = temperature
        self.top_p = top_p
        self.max_new_tokens = max_new_tokens
        config: Any = getattr(getattr(llm, "llm_engine", None), "vllm_config", None)
        if getattr(getattr(config, "cache_config", None), "enable_prefix_caching", None) is False:
            warnings.warn(
                "the engine runs without prefix caching, so every sentence runs all the text before it again; make it "
                "with enable_prefix_caching=True",
                stacklevel=2,
            )

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
            is_complete: Called with the index of a context and the text of a row so far, where a sentence may have
                ended; the row stops once it returns true.
            seed: Of the draws; None for fresh randomness.

        Returns:
            For each context its continuations.

        Raises:
            ValueError: A context leaves no room for `max_new_tokens` within the engine's longest sequence, or is empty
                while the tokenizer knows no first token.
        """
        longest = getattr(getattr(self.llm, "model_config", None), "max_model_len", None)
        room = None if longest is None else longest - self.max_new_tokens
        ids = [encoded(self.tokenizer, context, index, room) for index, context in enumerate(contexts)]
        seeds = np.random.default_rng(seed)
        # By place, since rows that stop early must not come before those drawn ahead of them.
        drawn: list[dict[int, Continuation]] = [{} for _ in contexts]
        # Document, tokens so far, places of its rows: whole documents first, then single rows that go on.
        waiting: list[tuple[int, list[int], list[int]]] = [
            (document, [], list(range(count))) for document, count in enumerate(counts) if count
        ]
        while waiting:
            outputs = self.llm.generate(
                [{"prompt_token_ids": ids[document] + tokens} for document, tokens, _ in waiting],
                [self._params(len(tokens), len(rows), is_complete is not None, seeds) for _, tokens, rows in waiting],
                use_tqdm=False,
            )
            going: list[tuple[int, list[int], list[int]]] = []
            for (document, before, places), output in zip(waiting, outputs, strict=True):
                for place, row in zip(places, output.outputs, strict=False):
                    ended = row.finish_reason == "stop" and not isinstance(row.stop_reason, str)
                    tokens = before + list(row.token_ids)
                    text = added_text(self.tokenizer, ids[document], tokens)
                    full = ended or row.finish_reason != "stop" or len(tokens) >= self.max_new_tokens
                    if full or is_complete is None or is_complete(document, text):
                        drawn[document][place] = Continuation(text, ended)
                    else:
                        going.append((document, tokens, [place]))
            waiting = going
        return [[rows[place] for place in sorted(rows)] for rows in drawn]

    def _params(self, used: int, n: int, stop: bool, seeds: np.random.Generator) -> Any:
        from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]  # has an environment of its own

        return SamplingParams(
            n=n,
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_new_tokens - used,
            # Below the largest, since vLLM counts on from it for the rows of a request.
            seed=int(seeds.integers(2**31 - 2**20)),
            stop=_STOPS if stop else None,
            include_stop_str_in_output=True,
        )
