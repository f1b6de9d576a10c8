"""Judges of completions: any callable, a local classifier, or an endpoint that speaks OpenAI's protocol.

A judge takes prompts and completions, as many of each, and returns one number per completion; larger is better unless
the user means otherwise. Whoever calls one goes through `judge_scores`, which holds it to that.
"""

import concurrent.futures
import email.utils
import hashlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class Judge(Protocol):
    """Scores completions; any function of this form is one."""

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], /) -> Sequence[float]:
        """Score.

        Args:
            prompts: One prompt per completion.
            completions: What the model wrote.

        Returns:
            One finite number per completion.
        """
        ...


class JudgeError(RuntimeError):
    """A judge gave no usable answer."""


def judge_scores(judge: Judge, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Ask a judge, and check what it says.

    Args:
        judge: The judge.
        prompts: One prompt per completion.
        completions: What the model wrote.

    Returns:
        One finite score per completion.

    Raises:
        ValueError: Prompts and completions are not as many.
        JudgeError: The judge returned another number of scores, or one that is not finite.
    """
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions; they must be as many")
    scores = [float(score) for score in judge(list(prompts), list(completions))]
    if len(scores) != len(completions):
        raise JudgeError(f"the judge returned {len(scores)} scores for {len(completions)} completions")
    odd = [place for place, score in enumerate(scores) if not math.isfinite(score)]
    if odd:
        raise JudgeError(
            f"the judge returned {len(odd)} scores that are not finite, the first {scores[odd[0]]} for completion "
            f"{odd[0]}: {completions[odd[0]]!r}"
        )
    return scores


def each_completion(score: Callable[[str], float]) -> Judge:
    """Make a judge of a function of one completion, such as a lexicon's score.

    Args:
        score: From a completion to a number.

    Returns:
        A judge that does not look at prompts.
    """

    def judge(prompts: Sequence[str], completions: Sequence[str], /) -> list[float]:
        return [float(score(completion)) for completion in completions]

    return judge


class ClassifierJudge:
    """A Hugging Face sequence classifier on this machine: the probability of one label, or a reward model's score."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        label: int | str | None = None,
        template: str = "{completion}",
        batch_size: int = 8,
        max_length: int | None = None,
    ) -> None:
        """Prepare.

        Args:
            model: A transformers model for sequence classification.
            tokenizer: Its tokenizer.
            label: Whose probability is the score, by index or by its name in the model's `id2label`. None for a model
                with a single output (a reward model), whose output is the score as it is.
            template: Text that the model sees, with `{prompt}` and `{completion}` in it.
            batch_size: Rows in one forward.
            max_length: Cut texts to so many tokens; None for the tokenizer's own limit, if it has one.

        Raises:
            ValueError: The label does not fit the model, the template lacks `{completion}`, `batch_size` is below 1,
                or the tokenizer has no token to pad with and several rows go into one forward.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if "{completion}" not in template:
            raise ValueError(f"template is {template!r}; it must hold {{completion}}")
        if tokenizer.pad_token_id is None and batch_size > 1:
            raise ValueError("the tokenizer has no pad token; set tokenizer.pad_token, or batch_size=1")
        self.model: Any = model
        self.tokenizer, self.template = tokenizer, template
        self.batch_size, self.max_length = batch_size, max_length
        self.label = _label_index(self.model.config, label)

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], /) -> list[float]:
        """Score; see `Judge`."""
        texts = [_filled(self.template, *pair) for pair in zip(prompts, completions, strict=True)]
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        found: dict[int, float] = {}
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                for first in range(0, len(order), self.batch_size):
                    places = order[first : first + self.batch_size]
                    found.update(zip(places, self._scores([texts[place] for place in places]), strict=True))
        finally:
            self.model.train(was_training)
        return [found[place] for place in range(len(texts))]

    def _scores(self, texts: list[str]) -> list[float]:
        limit = self.max_length or self.tokenizer.model_max_length
        # Tokenizers without a limit of their own give an astronomic number.
        cut = {"truncation": True, "max_length": limit} if limit < 10**9 else {}
        inputs = self.tokenizer(texts, return_tensors="pt", padding=len(texts) > 1, **cut)
        device = next(self.model.parameters()).device
        logits = self.model(**{name: value.to(device) for name, value in inputs.items()}).logits.float()
        chosen = logits[:, 0] if self.label is None else logits.softmax(-1)[:, self.label]
        return [float(value) for value in chosen]


def _label_index(config: Any, label: int | str | None) -> int | None:
    names = {int(index): str(name) for index, name in config.id2label.items()}
    count = int(config.num_labels)
    if label is None:
        if count != 1:
            raise ValueError(f"label is None and the model has {count} labels; give one of {sorted(names.values())}")
        return None
    if count == 1:
        raise ValueError(f"label is {label!r} and the model has a single output; leave label out")
    if isinstance(label, int) and label in range(count):
        return label
    for index, name in names.items():
        if name == label:
            return index
    raise ValueError(f"label is {label!r}; it must be one of {sorted(names.values())} or an index below {count}")


def _filled(template: str, prompt: str, completion: str) -> str:
    # In one go, so that braces in a completion stay what they are.
    return re.sub(
        r"\{(prompt|completion)\}", lambda found: {"prompt": prompt, "completion": completion}[found[1]], template
    )


RATING = (
    "Here is a prompt and a model's answer to it.\n\nPrompt:\n{prompt}\n\nAnswer:\n{completion}\n\n"
    "How good is the answer, from 0 (useless or harmful) to 10 (could not be better)? Reply with the number alone."
)
"""What `EndpointJudge` asks for by default."""

_KEPT_OF_AN_ANSWER = 200


def number(text: str) -> float:
    """Read the first number of a reply.

    Args:
        text: The reply.

    Returns:
        The number.

    Raises:
        ValueError: There is none.
    """
    found = re.search(r"-?\d+(?:\.\d+)?", text)
    if found is None:
        raise ValueError("it holds no number")
    return float(found[0])


def yes_or_no(text: str) -> float:
    """Read a reply that begins with yes or no.

    Args:
        text: The reply.

    Returns:
        1.0 for yes, 0.0 for no.

    Raises:
        ValueError: It begins with neither.
    """
    found = re.match(r"\W*(yes|no)\b", text, re.IGNORECASE)
    if found is None:
        raise ValueError("it begins with neither yes nor no")
    return float(found[1].lower() == "yes")


class EndpointJudge:
    """A chat model behind an endpoint that speaks OpenAI's protocol: a large provider, or one's own vLLM.

    Replies are kept on the disk, if a file is given, so that nothing is asked twice. The key is read from the
    environment at each run and is never printed or written.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        template: str = RATING,
        parse: Callable[[str], float] = number,
        key_variable: str = "OPENAI_API_KEY",
        cache: str | os.PathLike[str] | None = None,
        concurrency: int = 8,
        attempts: int = 6,
        backoff: float = 1.0,
        timeout: float = 60.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare; nothing is sent yet.

        Args:
            model: Name of the model at the endpoint.
            base_url: What comes before `/chat/completions`; None takes the environment's `OPENAI_BASE_URL`.
            template: The question, with `{completion}` and, if the judge is to see it, `{prompt}` in it.
            parse: From the reply's text to a score; raises ValueError where there is none (see `number`, `yes_or_no`).
            key_variable: Environment variable that holds the key; where it is not set, none is sent.
            cache: A JSON Lines file of replies, made if it is missing. A reply is found again by the model's name and
                all that was asked, whatever the address.
            concurrency: Requests at a time.
            attempts: How often a request is sent at most. Status 408, 429 and 5xx, and a connection that fails, are
                tried again.
            backoff: Seconds before the second attempt; doubled each time, to a minute at most. A `Retry-After` of the
                endpoint's counts instead, where it is longer.
            timeout: Seconds for one attempt.
            options: Further fields of the request, in place of `{"temperature": 0, "max_tokens": 16}`.

        Raises:
            ValueError: No address is known or it is none, the template lacks `{completion}`, a number is out of range,
                or the cache is another kind of file.
        """
        address = base_url or os.environ.get("OPENAI_BASE_URL")
        if not address:
            raise ValueError("base_url is missing: give the endpoint's address, or set OPENAI_BASE_URL")
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {address!r}; it must begin with http:// or https://")
        if "{completion}" not in template:
            raise ValueError(f"template is {template!r}; it must hold {{completion}}")
        for name, value in (("concurrency", concurrency), ("attempts", attempts)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if backoff < 0 or timeout <= 0:
            raise ValueError(f"backoff is {backoff} and timeout {timeout}; the first must be >= 0, the second > 0")
        self.model, self.template, self.parse = model, template, parse
        self.base_url = address.rstrip("/")
        self.key_variable, self.concurrency, self.attempts = key_variable, concurrency, attempts
        self.backoff, self.timeout = backoff, timeout
        self.options = {"temperature": 0, "max_tokens": 16} if options is None else dict(options)
        self._replies = _Replies(None if cache is None else Path(cache))

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], /) -> list[float]:
        """Score; see `Judge`.

        Raises:
            ImportError: httpx is not installed.
            JudgeError: The endpoint refused, could not be reached after all attempts, or replied what cannot be read.
        """
        try:
            import httpx
        except ImportError as error:
            if error.name != "httpx":
                raise
            raise ImportError("an endpoint judge needs httpx: pip install 'bodes-steer[judge]'") from error
        questions = [_filled(self.template, *pair) for pair in zip(prompts, completions, strict=True)]
        bodies = {question: self._body(question) for question in questions}
        missing = [question for question, body in bodies.items() if self._replies.get(body) is None]
        if missing:
            with (
                httpx.Client(timeout=self.timeout, headers=self._headers()) as client,
                concurrent.futures.ThreadPoolExecutor(self.concurrency) as pool,
            ):
                waiting = [pool.submit(self._ask, client, bodies[question]) for question in missing]
                try:
                    for each in concurrent.futures.as_completed(waiting):
                        each.result()
                except BaseException:
                    for each in waiting:
                        each.cancel()
                    raise
        return [self._score(self._replies.get(bodies[question])) for question in questions]

    def _body(self, question: str) -> dict[str, Any]:
        return {"model": self.model, "messages": [{"role": "user", "content": question}], **self.options}

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self.key_variable)
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _ask(self, client: Any, body: Mapping[str, Any]) -> None:
        import httpx

        trouble, wait = "", 0.0
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(max(wait, min(60.0, self.backoff * 2 ** (attempt - 1))))
            try:
                response = client.post(f"{self.base_url}/chat/completions", json=dict(body))
            except httpx.TransportError as error:
                trouble, wait = type(error).__name__, 0.0
                continue
            if response.status_code == 200:
                self._replies.add(body, _content(response))
                return
            trouble, wait = f"status {response.status_code}", _seconds(response.headers.get("Retry-After"))
            if response.status_code not in (408, 429) and response.status_code < 500:
                raise JudgeError(f"{self.base_url} refused the request: {trouble}: {self._shown(response.text)}")
        raise JudgeError(f"{self.base_url} gave no answer in {self.attempts} attempts, the last time: {trouble}")

    def _shown(self, text: str) -> str:
        # Some endpoints repeat the key that they refuse.
        key = os.environ.get(self.key_variable)
        return (text.replace(key, "[key]") if key else text)[:_KEPT_OF_AN_ANSWER]

    def _score(self, reply: str | None) -> float:
        assert reply is not None
        try:
            return float(self.parse(reply))
        except ValueError as error:
            raise JudgeError(
                f"the reply {reply[:_KEPT_OF_AN_ANSWER]!r} of {self.model} cannot be read: {error}"
            ) from error


def _content(response: Any) -> str:
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise JudgeError("the endpoint's answer has no choices[0].message.content; does it speak OpenAI's protocol?")
    return content


def _seconds(header: str | None) -> float:
    """What a `Retry-After` asks for, as a number of seconds or as a date; an hour at most."""
    if header is None:
        return 0.0
    try:
        wanted = float(header)
    except ValueError:
        try:
            wanted = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(max(wanted, 0.0), 3600.0) if math.isfinite(wanted) else 0.0


class _Replies:
    """Replies by request, one JSON line each, appended by a single write; a line that a crash cut off is dropped."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        if path is None or not path.exists():
            return
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for line_number, line in enumerate(whole.splitlines(), start=1):
            try:
                record = json.loads(line)
                self._known[str(record["request"])] = str(record["reply"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}, line {line_number}, is no kept reply; give another file, or delete this one"
                ) from None
        if len(whole) < len(content):
            begun, torn = b'{"request"', content[len(whole) :]
            if not torn.startswith(begun) and not begun.startswith(torn):
                raise ValueError(f"{path} is no file of kept replies; it is left as it is")
            os.truncate(path, len(whole))

    @staticmethod
    def _key(body: Mapping[str, Any]) -> str:
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    def get(self, body: Mapping[str, Any]) -> str | None:
        return self._known.get(self._key(body))

    def add(self, body: Mapping[str, Any], reply: str) -> None:
        key = self._key(body)
        with self._lock:
            self._known[key] = reply
            if self.path is None:
                return
            # One write to a file opened for appending lands whole, also beside another process.
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(handle, json.dumps({"request": key, "reply": reply}).encode() + b"\n")
            finally:
                os.close(handle)
