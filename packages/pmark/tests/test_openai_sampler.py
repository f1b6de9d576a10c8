"""Drawing from a server: a real one on the loopback, which answers as it is told."""

import builtins
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pmark import openai_sampler
from pmark.openai_sampler import OpenAISampler
from pmark.samplers import Continuation, Sampler, SamplerError, draw

KEY = "sk-do-not-tell-anyone"


class Server(ThreadingHTTPServer):
    """Answers each request by `answer(request) -> (status, body, headers)`, and keeps the requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = []
        self.answer = choices()
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        request |= {"path": self.path, "key": self.headers["authorization"]}
        with server.lock:
            server.requests.append(request)
            number = len(server.requests)
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        status, body, headers = server.answer(request, number)
        with server.lock:
            server.at_once -= 1
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (
            {"content-type": "application/json", "content-length": str(len(content))} | headers
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


def choices(most=1000, finish="stop", wait=0.0):
    def answer(request, number):
        time.sleep(wait)
        made = [
            {"index": k, "text": f" {number}.{k}", "finish_reason": finish, "message": {"content": f"{number}.{k}"}}
            for k in range(min(request["n"], most))
        ]
        return 200, {"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": made}, {}

    return answer


def failing(status, body=None, *, first=10**9):
    """Answers the first requests with a status, asking the client for no pause, and the others well."""

    def answer(request, number):
        if number > first:
            return choices()(request, number)
        return status, {"error": {"message": "out of order"}} if body is None else body, {"retry-after-ms": "1"}

    return answer


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_one_request_asks_for_all_of_a_context(server, monkeypatch):
    monkeypatch.setenv("HOUSE_KEY", KEY)
    sampler = OpenAISampler(server.url, "m", api_key_env="HOUSE_KEY", temperature=0.5, top_p=0.9, max_new_tokens=7)
    assert isinstance(sampler, Sampler)
    rows = sampler.sample(["One.", "Two."], [3, 2], seed=4)
    assert [len(row) for row in rows] == [3, 2]
    assert all(continuation.ended and continuation.text.startswith(" ") for row in rows for continuation in row)
    first, second = sorted(server.requests, key=lambda request: request["n"], reverse=True)
    assert first["seed"] != second["seed"]
    wanted = {"prompt": "One.", "n": 3, "model": "m", "temperature": 0.5, "top_p": 0.9, "max_tokens": 7}
    assert first.items() >= (wanted | {"path": "/v1/completions", "key": f"Bearer {KEY}"}).items()


def test_a_chat_models_turn_goes_on(server):
    server.answer = choices(finish="length")
    [row] = OpenAISampler(server.url, "m", mode="chat", instruction="Tell.").sample(["One."], [2])
    assert row == [Continuation("1.0"), Continuation("1.1")]
    [request] = server.requests
    assert request["path"] == "/v1/chat/completions"
    assert [(turn["role"], turn["content"]) for turn in request["messages"]] == [
        ("user", "Tell."),
        ("assistant", "One."),
    ]
    assert request["continue_final_message"] is True
    assert request["add_generation_prompt"] is False
    assert "seed" not in request


def test_a_server_that_ignores_n_is_asked_for_one_at_a_time(server):
    server.answer = choices(most=1)
    sampler = OpenAISampler(server.url, "m")
    [row] = sampler.sample(["One."], [5], seed=0)
    assert len({continuation.text for continuation in row}) == 5
    assert [request["n"] for request in server.requests] == [5, 1, 1, 1, 1]
    assert len({request["seed"] for request in server.requests}) == 5
    sampler.sample(["One."], [2])
    assert [request["n"] for request in server.requests[5:]] == [1, 1]


def test_requests_keep_to_their_size_and_number(server):
    server.answer = choices(wait=0.02)
    [row, none] = OpenAISampler(server.url, "m", max_n=2, concurrency=3).sample(["One.", "Two."], [11, 0])
    assert (len(row), none) == (11, [])
    assert sorted(request["n"] for request in server.requests) == [1, 2, 2, 2, 2, 2]
    assert 1 < server.most_at_once <= 3


@pytest.mark.parametrize("status", [429, 500])
def test_a_busy_server_is_asked_again(server, status):
    server.answer = failing(status, first=2)
    assert [len(row) for row in OpenAISampler(server.url, "m").sample(["One."], [2])] == [2]
    assert len(server.requests) == 3


def test_what_some_requests_gave_is_kept_when_others_fail(server):
    def answer(request, number):
        return (failing(500) if request["prompt"] == "Bad." else choices())(request, number)

    server.answer = answer
    sampler = OpenAISampler(server.url, "m")
    assert [len(row) for row in sampler.sample(["Good.", "Bad."], [2, 2])] == [2, 0]
    with pytest.warns(UserWarning, match="1 of 2 contexts.*InternalServerError.*out of order"):
        assert [len(row) for row in draw(sampler, ["Good.", "Bad."], [2, 2], retries=1, wait=0)] == [2, 0]


@pytest.mark.parametrize("body", ["{not json", "[]", '{"choices": null}', '{"choices": [3]}', {}])
def test_an_answer_that_is_none_is_an_error_that_may_pass(server, body):
    server.answer = failing(200, body)
    with pytest.raises(RuntimeError, match=r"http://127.0.0.1:\d+/v1: "):
        OpenAISampler(server.url, "m").sample(["One."], [2])


def test_a_choice_without_text_is_an_empty_one(server):
    server.answer = failing(200, {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]})
    for mode in ("chat", "completions"):
        assert OpenAISampler(server.url, "m", mode=mode).sample(["One."], [1]) == [[Continuation("", ended=True)]]


def test_an_answer_cut_off_or_too_slow_is_an_error_that_may_pass(server, monkeypatch):
    monkeypatch.setattr("pmark.openai_sampler._CLIENT_RETRIES", 0)
    server.answer = lambda request, number: (200, "{", {"content-length": "1000"})
    with pytest.raises(RuntimeError, match="Connection"):
        OpenAISampler(server.url, "m", timeout=0.5).sample(["One."], [2])
    server.answer = choices(wait=0.3)
    with pytest.raises(RuntimeError, match="Timeout"):
        OpenAISampler(server.url, "m", timeout=0.05).sample(["One."], [2])


def test_choices_alike_are_all_kept(server):
    same = [{"index": k, "text": " Yes.", "finish_reason": "stop"} for k in range(3)]
    server.answer = failing(200, {"choices": same})
    assert OpenAISampler(server.url, "m").sample(["One."], [3]) == [[Continuation(" Yes.", ended=True)] * 3]


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [(401, SamplerError, "variable HOUSE_KEY"), (403, SamplerError, "HOUSE_KEY"), (404, SamplerError, "model: m"),
     (400, ValueError, "max_n=1"), (422, ValueError, "max_n=1")],
)  # fmt: skip
def test_refusals_are_told_apart_and_never_tell_the_key(server, monkeypatch, status, kind, message):
    monkeypatch.setenv("HOUSE_KEY", KEY)
    server.answer = failing(status, {"error": {"message": f"no, not with {KEY}"}})
    with pytest.raises(kind, match=message) as caught:
        OpenAISampler(server.url, "m", api_key_env="HOUSE_KEY").sample(["One."], [2])
    assert len(server.requests) == 1
    error = caught.value
    while error is not None:
        assert KEY not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_a_password_in_the_address_is_not_told(monkeypatch):
    monkeypatch.setattr(openai_sampler, "_CLIENT_RETRIES", 0)
    sampler = OpenAISampler("http://me:hidden@127.0.0.1:9/v1", "m", timeout=1.0)
    with pytest.raises(Exception, match=r"^http://127.0.0.1:9/v1: \w+") as caught:
        sampler.sample(["a"], [1])
    assert "hidden" not in str(caught.value)


def test_bad_settings_are_refused():
    for change, message in (
        ({"base_url": "localhost:8000"}, "base_url must begin"),
        ({"mode": "responses"}, "mode must be"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout": 0.0}, "timeout"),
        ({"max_n": 0}, "max_n"),
        ({"temperature": 0.0}, "temperature"),
    ):
        with pytest.raises(ValueError, match=message):
            OpenAISampler(**({"base_url": "http://localhost/v1", "model": "m"} | change))


@pytest.mark.parametrize(("missing", "message"), [("openai", r"pmark\[openai\]"), ("httpx", "no httpx")])
def test_a_missing_library_is_named_and_others_faults_are_not_hidden(monkeypatch, missing, message):
    original = builtins.__import__

    def fail(name, *arguments, **options):
        if name == "openai":
            raise ModuleNotFoundError(f"no {missing}", name=missing)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(ImportError, match=message):
        OpenAISampler("http://localhost/v1", "m").sample(["a"], [1])
