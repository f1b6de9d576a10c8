"""Judges of completions: any callable, a local classifier, or an endpoint that speaks OpenAI's protocol.

A judge takes prompts and completions, as many of each, and returns one number per completion; larger is better unless
the user means otherwise. Whoever calls one goes through `judge_scores`, which holds it to that.
"""

import concurrent.futures
import contextlib
import email.utils
import io
import json
import math
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from separata_kit.files import digest
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
        JudgeError: The judge returned no numbers, another number of them, or one that is not finite.
    """
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions; they must be as many")
    given: Any = judge(list(prompts), list(completions))
    try:
        scores = [float(score) for score in given]
    except TypeError as error:
        raise JudgeError(f"the judge must return a list of numbers: {error}") from error
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
            ValueError: The label does not fit the model, the template lacks `{completion}`, `batch_size` or
                `max_length` is below 1, or several rows go into one forward and the tokenizer has no token to pad with,
                or another one than the model's configuration.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length is {max_length}; it must be at least 1")
        if "{completion}" not in template:
            raise ValueError(f"template is {template!r}; it must hold {{completion}}")
        if tokenizer.pad_token_id is None and batch_size > 1:
            raise ValueError("the tokenizer has no pad token; set tokenizer.pad_token, or batch_size=1")
        # By this token a decoder finds the last one of each text, whose output is the score.
        config: Any = model.config
        pad = getattr(config.get_text_config(), "pad_token_id", None)
        if pad != tokenizer.pad_token_id and batch_size > 1:
            raise ValueError(
                f"the tokenizer pads with token {tokenizer.pad_token_id}, but model.config.pad_token_id is {pad}; set "
                "both to the same, or batch_size=1"
            )
        self.model: Any = model
        self.tokenizer, self.template = tokenizer, template
        self.batch_size, self.max_length = batch_size, max_length
        self.label = _label_index(self.model.config, label)

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], /) -> list[float]:
        """Score; see `Judge`.

        Raises:
            JudgeError: A text has no tokens.
        """
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
        if not inputs["input_ids"].shape[1] or not inputs["attention_mask"].any(1).all():
            raise JudgeError("a text has no tokens; let the template hold more than an empty completion")
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
    found = re.search(r"[-\u2212]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?", text)
    if found is None:
        raise ValueError("it holds no number")
    return float(found[0].replace("\u2212", "-"))


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
            base_url: What comes before `/chat/completions`, without a query, a user's name or a password; None takes
                the environment's `OPENAI_BASE_URL`.
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
            OSError: The cache cannot be written.
        """
        address = base_url or os.environ.get("OPENAI_BASE_URL")
        if not address:
            raise ValueError("base_url is missing: give the endpoint's address, or set OPENAI_BASE_URL")
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {address!r}; it must begin with http:// or https://")
        parts = urllib.parse.urlsplit(address)
        if not parts.hostname or "@" in parts.netloc or parts.query or parts.fragment:
            # Not shown, as it may hold a key.
            raise ValueError(
                "base_url must be an address alone, without a user's name, a password or a query; a key is taken from "
                f"the environment variable {key_variable}"
            )
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
            JudgeError: The key has characters that no header can hold; the endpoint refused, could not be reached after
                all attempts, or replied what cannot be read.
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
            stop = threading.Event()
            with (
                httpx.Client(timeout=self.timeout, headers=self._headers()) as client,
                concurrent.futures.ThreadPoolExecutor(self.concurrency) as pool,
            ):
                waiting = [pool.submit(self._ask, client, bodies[question], stop) for question in missing]
                try:
                    for each in concurrent.futures.as_completed(waiting):
                        each.result()
                except BaseException:
                    # Nobody waits for attempts that are an hour off.
                    stop.set()
                    for each in waiting:
                        each.cancel()
                    raise
        return [self._score(self._replies.get(bodies[question])) for question in questions]

    def _body(self, question: str) -> dict[str, Any]:
        return {"model": self.model, "messages": [{"role": "user", "content": question}], **self.options}

    def _key(self) -> str:
        key = os.environ.get(self.key_variable, "").strip()
        if not key.isascii() or not key.isprintable():
            raise JudgeError(f"the key in {self.key_variable} has characters that no header can hold")
        return key

    def _headers(self) -> dict[str, str]:
        key = self._key()
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _ask(self, client: Any, body: Mapping[str, Any], stop: threading.Event) -> None:
        import httpx

        trouble, wait = "", 0.0
        for attempt in range(self.attempts):
            if attempt and stop.wait(max(wait, min(60.0, self.backoff * 2 ** (attempt - 1)))):
                return
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
        key = self._key()
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
    """Replies by request, one JSON line each, appended whole; a last line that a crash cut off is dropped."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        if path is None:
            return
        # Made at once: a file that cannot be written must show before replies are paid for.
        with self._opened(path) as file:
            file.seek(0)
            content = file.readall()
            whole = content[: content.rfind(b"\n") + 1]
            for line_number, line in enumerate(whole.splitlines(), start=1):
                try:
                    record = json.loads(line)
                    self._known[str(record["request"])] = str(record["reply"])
                except (ValueError, KeyError, TypeError):
                    raise ValueError(
                        f"{path}, line {line_number}, is no kept reply; give another file, or delete this one"
                    ) from None
            begun, torn = b'{"request"', content[len(whole) :]
            if not torn.startswith(begun) and not begun.startswith(torn):
                raise ValueError(f"{path} is no file of kept replies; it is left as it is")
            if torn:
                file.truncate(len(whole))

    @staticmethod
    @contextlib.contextmanager
    def _opened(path: Path) -> Iterator[io.FileIO]:
        """The file, with other processes kept out, so that a line on its way is not taken for one cut off."""
        with path.open("a+b", buffering=0) as file:
            with contextlib.suppress(ImportError, OSError):  # Windows, and some network file systems, have no locks
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    @staticmethod
    def _key(body: Mapping[str, Any]) -> str:
        return digest(body)

    def get(self, body: Mapping[str, Any]) -> str | None:
        return self._known.get(self._key(body))

    def add(self, body: Mapping[str, Any], reply: str) -> None:
        key = self._key(body)
        with self._lock:
            self._known[key] = reply
            if self.path is None:
                return
            with self._opened(self.path) as file:
                end = file.seek(0, os.SEEK_END)
                line = json.dumps({"request": key, "reply": reply}).encode() + b"\n"
                try:
                    while line:
                        line = line[file.write(line) :]
                except OSError:
                    file.truncate(end)  # half a line would spoil the next one
                    raise
