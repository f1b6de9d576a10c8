"""Drawing from a server that speaks OpenAI's API: vLLM, llama.cpp, and most providers."""

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pmark.samplers import Continuation, SamplerError, check_sampling, spread_seed

# The client's own repetitions, which keep to the pause that a server asks for.
_CLIENT_RETRIES = 3
_NO_KEY = "none"


class OpenAISampler:
    """Draws continuations from a server; a `Sampler`.

    One request asks for many choices. A server that gives fewer, as some know only one, is asked again for the rest and
    from then on for as many as it gives. Rows run on to `max_new_tokens`: no server can be told where a sentence ends.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        mode: str = "completions",
        instruction: str = "Write a text. Answer with nothing but the text.",
        api_key_env: str = "OPENAI_API_KEY",
        temperature: float = 0.7,
        top_p: float = 0.95,
        max_new_tokens: int = 128,
        concurrency: int = 8,
        timeout: float = 120.0,
        max_n: int = 128,
    ) -> None:
        """Remembers where to ask; nothing is sent yet.

        Args:
            base_url: Such as "http://localhost:8000/v1".
            model: Name of the model there.
            mode: "completions", which suits best, or "chat", where the context is an assistant's turn that goes on: a
                vLLM server does that, others may begin a new one.
            instruction: In chat mode, the user's turn before.
            api_key_env: Which environment variable holds the key, if the server wants one. It is read at each call, and
                appears in no message.
            temperature: What the logits are divided by.
            top_p: Share of the probability that is drawn from.
            max_new_tokens: Longest continuation, in tokens.
            concurrency: Requests at a time.
            timeout: Seconds until a request counts as failed.
            max_n: Most choices in one request; 1 for servers that refuse more.

        Raises:
            ValueError: One of them is out of its range.
        """
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, not {shown_address(base_url)!r}")
        if mode not in ("completions", "chat"):
            raise ValueError(f"mode must be 'completions' or 'chat', not {mode!r}")
        for name, number in {"concurrency": concurrency, "timeout": timeout, "max_n": max_n}.items():
            if not number > 0:
                raise ValueError(f"{name} must be above 0, not {number}")
        check_sampling(temperature, top_p, max_new_tokens)
        self.base_url, self.model, self.mode, self.instruction = base_url, model, mode, instruction
        self.api_key_env, self.concurrency, self.timeout, self.max_n = api_key_env, concurrency, timeout, max_n
        self._settings = {"temperature": temperature, "top_p": top_p, "max_tokens": max_new_tokens}

    def sample(
        self,
        contexts: Sequence[str],
        counts: Sequence[int],
        *,
        is_complete: Callable[[int, str], bool] | None = None,
        seed: int | None = None,
    ) -> list[list[Continuation]]:
        """Draws continuations; see `Sampler`.

        `is_complete` is ignored. Every request carries another seed; whether it is heeded is up to the server. Where
        some requests fail there are fewer continuations than asked.

        Raises:
            ValueError: The server refused all of it, as it does with a context that is too long.
            SamplerError: It knows no such model, or refused the key.
            RuntimeError: All requests failed otherwise.
            ImportError: openai is not installed.
        """
        client, error_of = self._connect()
        rows: list[list[Continuation]] = [[] for _ in contexts]
        errors: list[Exception] = []
        sent = 0
        with client, ThreadPoolExecutor(self.concurrency) as pool:
            # The second time for what the server left out, in the portions that it gives.
            for _ in range(2):
                requests = [
                    (i, min(self.max_n, counts[i] - first))
                    for i in range(len(contexts))
                    for first in range(len(rows[i]), counts[i], self.max_n)
                ]
                seeds = spread_seed(seed, sent, len(requests))
                futures = [
                    pool.submit(self._ask, client, contexts[i], n, request_seed)
                    for (i, n), request_seed in zip(requests, seeds, strict=True)
                ]
                sent += len(requests)
                for (i, n), future in zip(requests, futures, strict=True):
                    try:
                        choices = future.result()
                    except Exception as raised:
                        errors.append(error_of(raised))
                        if isinstance(errors[-1], SamplerError):
                            pool.shutdown(wait=False, cancel_futures=True)
                            raise errors[-1] from None
                        continue
                    rows[i] += choices[: counts[i] - len(rows[i])]
                    if 0 < len(choices) < n:
                        self.max_n = min(self.max_n, len(choices))
                if errors:
                    break
        if errors and not any(rows):
            raise errors[-1]
        return rows

    def _ask(self, client: Any, context: str, n: int, seed: int | None) -> list[Continuation]:
        settings = {"model": self.model, "n": n, **self._settings} | ({} if seed is None else {"seed": seed})
        if self.mode == "completions":
            answer = client.completions.create(prompt=context, **settings)
        else:
            answer = client.chat.completions.create(
                messages=[{"role": "user", "content": self.instruction}, {"role": "assistant", "content": context}],
                extra_body={"continue_final_message": True, "add_generation_prompt": False},
                **settings,
            )
        return [
            Continuation(
                (choice.text if self.mode == "completions" else choice.message.content) or "",
                ended=choice.finish_reason == "stop",
            )
            for choice in answer.choices
        ]

    def _connect(self) -> tuple[Any, Callable[[Exception], Exception]]:
        try:
            import openai
        except ModuleNotFoundError as error:
            if error.name != "openai":
                raise
            raise ImportError("sampling from a server needs openai: pip install 'pmark[openai]'") from error
        key = os.environ.get(self.api_key_env) or _NO_KEY

        def error_of(error: Exception) -> Exception:
            # Some servers repeat the key that they refuse.
            told = str(error).replace(key, "***") if key != _NO_KEY else str(error)
            text = f"{shown_address(self.base_url)}: {type(error).__name__}: {told[:500]}"
            if isinstance(error, (openai.AuthenticationError, openai.PermissionDeniedError)):
                return SamplerError(f"{text} (the key is read from the environment variable {self.api_key_env})")
            if isinstance(error, openai.NotFoundError):
                return SamplerError(f"{text} (model: {self.model}, mode: {self.mode})")
            if isinstance(error, (openai.BadRequestError, openai.UnprocessableEntityError)):
                return ValueError(f"{text} (a server that takes no n needs max_n=1)")
            return RuntimeError(text)

        client = openai.OpenAI(base_url=self.base_url, api_key=key, timeout=self.timeout, max_retries=_CLIENT_RETRIES)
        return client, error_of


def shown_address(url: str) -> str:
    """Returns an address for messages: without the user and password that may stand in it."""
    return re.sub(r"//[^/@]*@", "//", url)
