import http.server
import json
import math
import os
import threading

import pytest
import tokenizers
import torch
from bodes_steer.judges import (
    ClassifierJudge,
    EndpointJudge,
    Judge,
    JudgeError,
    each_completion,
    judge_scores,
    number,
    yes_or_no,
)
from hypothesis import given
from hypothesis import strategies as st
from separata_testing.models import tiny_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

KEY = "sk-not-to-be-seen"


def test_any_callable_is_a_judge_and_is_held_to_the_form():
    judge = each_completion(len)
    assert isinstance(judge, Judge)
    assert judge_scores(judge, ["a", "b"], ["xyz", ""]) == [3.0, 0.0]
    with pytest.raises(ValueError, match="1 prompts and 2 completions"):
        judge_scores(judge, ["a"], ["b", "c"])
    with pytest.raises(JudgeError, match="1 scores for 2 completions"):
        judge_scores(lambda prompts, completions: [1.0], ["a", "b"], ["c", "d"])
    with pytest.raises(JudgeError, match="1 scores that are not finite, the first nan for completion 1: 'd'"):
        judge_scores(lambda prompts, completions: [1.0, math.nan], ["a", "b"], ["c", "d"])
    for nothing in (None, [None]):
        with pytest.raises(JudgeError, match="must return a list of numbers"):
            judge_scores(lambda prompts, completions, given=nothing: given, ["a"], ["b"])


def classifier(labels):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=272, pad_token_id=0, num_labels=labels, initializer_range=0.5, **sizes)
    if labels == 3:
        config.id2label = {0: "bad", 1: "fair", 2: "good"}
    return LlamaForSequenceClassification(config)


PROMPTS = ["p", "q{completion}", "r"]
COMPLETIONS = ["short", "a longer one with {prompt}", ""]


def test_the_classifiers_probability_of_a_label_does_not_depend_on_the_batch():
    model, tokenizer = classifier(3), tiny_tokenizer()
    model.train()
    template = "{prompt}>{completion}"
    found = ClassifierJudge(model, tokenizer, label="good", template=template, batch_size=3)(PROMPTS, COMPLETIONS)
    assert model.training
    model.eval()
    for prompt, completion, score in zip(PROMPTS, COMPLETIONS, found, strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(f"{prompt}>{completion}", return_tensors="pt")).logits[0]
        assert score == pytest.approx(float(logits.softmax(-1)[2]), rel=1e-4)
    by_index = ClassifierJudge(model, tokenizer, label=2, template=template, batch_size=1)(PROMPTS, COMPLETIONS)
    assert by_index == pytest.approx(found, rel=1e-4)


def test_a_single_output_is_the_score_and_long_texts_are_cut():
    model, tokenizer = classifier(1), tiny_tokenizer()
    judge = ClassifierJudge(model, tokenizer, max_length=4)
    long, cut = judge(["", ""], ["abcdefgh", "abc"])
    assert long == pytest.approx(cut)
    assert min(judge([""] * 20, [chr(97 + i) for i in range(20)])) < 0  # no probability


def test_a_classifier_judge_refuses_what_does_not_fit():
    model, tokenizer = classifier(3), tiny_tokenizer()
    for options, message in [
        ({}, "label is None and the model has 3 labels"),
        ({"label": "best"}, "'bad', 'fair', 'good'"),
        ({"label": 3}, "label is 3"),
        ({"label": 0, "batch_size": 0}, "batch_size is 0"),
        ({"label": 0, "max_length": 0}, "max_length is 0"),
        ({"label": 0, "template": "{text}"}, "must hold {completion}"),
    ]:
        with pytest.raises(ValueError, match=message):
            ClassifierJudge(model, tokenizer, **options)
    with pytest.raises(ValueError, match="single output"):
        ClassifierJudge(classifier(1), tokenizer, label="good")
    model.config.pad_token_id = 5
    with pytest.raises(ValueError, match=r"pads with token 0, but model\.config\.pad_token_id is 5"):
        ClassifierJudge(model, tokenizer, label=0)
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="no pad token"):
        ClassifierJudge(model, tokenizer, label=0)


@pytest.mark.parametrize("size", [1, 2])
def test_a_text_without_tokens_cannot_be_classified(size):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A $B")
    with pytest.raises(JudgeError, match="a text has no tokens"):
        ClassifierJudge(classifier(3), tokenizer, label=0, batch_size=size)(["p", "p"], ["", "long"])


@given(st.floats(-1e6, 1e6).map(lambda value: round(value, 3)))
def test_numbers_are_read_from_replies(value):
    assert number(f"Score: {value:.3f}.") == value
    assert number(f"{value!r}, I think, not 5") == value


def test_numbers_are_read_however_they_are_written():
    assert [number(text) for text in (".5", "7/10", "-.25", "\u22123", "1e-3", "8 e", "**9.**")] == [
        0.5,
        7,
        -0.25,
        -3,
        0.001,
        8,
        9,
    ]
    with pytest.raises(ValueError, match="no number"):
        number("none.")


def test_yes_and_no_are_read_from_replies():
    assert (yes_or_no(" **Yes**, it is"), yes_or_no("no.")) == (1.0, 0.0)
    for reply in ("nothing", "perhaps yes"):
        with pytest.raises(ValueError, match="neither"):
            yes_or_no(reply)


class Endpoint:
    """A server on this machine that gives scripted answers and keeps what it was asked."""

    def __init__(self):
        self.script, self.seen, self.headers = [], [], []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.seen.append(body)
                outer.headers.append(dict(self.headers))
                status, answer, extra = outer.script.pop(0) if outer.script else (200, None, {})
                if answer is None:
                    # The length of the completion, which the question ends with.
                    content = str(len(body["messages"][0]["content"].split("|")[1]))
                    answer = json.dumps({"choices": [{"message": {"content": content}}]})
                self.send_response(status)
                for name, value in extra.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    made = Endpoint()
    yield made
    made.server.shutdown()
    made.server.server_close()


def judge_at(endpoint, **options):
    return EndpointJudge("m", base_url=endpoint.url + "/", template="{prompt}|{completion}", backoff=0.0, **options)


def test_an_endpoint_scores_all_and_is_asked_nothing_twice(endpoint, tmp_path):
    cache = tmp_path / "replies.jsonl"
    judge = judge_at(endpoint, cache=cache)
    assert judge(["p", "p", "p"], ["abc", "de", "abc"]) == [3.0, 2.0, 3.0]
    assert len(endpoint.seen) == 2
    assert {each["model"] for each in endpoint.seen} == {"m"}
    assert all(each["temperature"] == 0 for each in endpoint.seen)
    assert all(each["Authorization"] == f"Bearer {KEY}" for each in endpoint.headers)
    # Again, in another process as it were.
    assert judge_at(endpoint, cache=cache)(["p", "p"], ["de", "abcd"]) == [2.0, 4.0]
    assert len(endpoint.seen) == 3
    assert judge_at(endpoint, cache=cache, options={"temperature": 1})(["p"], ["de"]) == [2.0]
    assert len(endpoint.seen) == 4
    assert KEY not in cache.read_text() + repr(judge) + str(vars(judge))


def test_without_a_key_none_is_sent(endpoint, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    assert EndpointJudge("m", template="|{completion}")(["p"], ["abc"]) == [3.0]
    assert "Authorization" not in endpoint.headers[0]


def test_busy_endpoints_are_asked_again(endpoint):
    long_ago = "Wed, 21 Oct 2015 07:28:00 GMT"
    endpoint.script = [
        (429, "busy", {"Retry-After": "0.01"}),
        (503, "", {"Retry-After": long_ago}),
        (500, "", {"Retry-After": "soon"}),
        (408, "", {}),
    ]
    assert judge_at(endpoint)(["p"], ["abc"]) == [3.0]
    assert len(endpoint.seen) == 5
    endpoint.script = [(500, "", {})] * 9
    with pytest.raises(JudgeError, match="no answer in 3 attempts, the last time: status 500"):
        judge_at(endpoint, attempts=3)(["p"], ["abc"])
    assert len(endpoint.seen) == 8


def test_a_refusal_is_told_at_once_and_without_the_key(endpoint):
    endpoint.script = [(401, f"wrong key {KEY}", {})]
    with pytest.raises(JudgeError, match=r"status 401: wrong key \[key\]") as caught:
        judge_at(endpoint)(["p"], ["abc"])
    assert KEY not in str(caught.value)
    assert len(endpoint.seen) == 1


def test_a_refusal_ends_waiting_for_others(endpoint):
    # Whichever of the two comes first is told to wait for an hour.
    endpoint.script = [(429, "", {"Retry-After": "3600"}), (403, "no", {})]
    with pytest.raises(JudgeError, match="status 403"):
        judge_at(endpoint, concurrency=2)(["p", "p"], ["abc", "de"])
    assert len(endpoint.seen) == 2


def test_keys_are_stripped_and_those_that_no_header_can_hold_are_not_shown(endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    assert judge_at(endpoint)(["p"], ["abc"]) == [3.0]
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"
    for odd in (KEY + "\u2026", KEY + "\n" + KEY):
        monkeypatch.setenv("OPENAI_API_KEY", odd)
        with pytest.raises(JudgeError, match="the key in OPENAI_API_KEY has characters") as caught:
            judge_at(endpoint)(["p"], ["abc"])
        assert KEY not in str(caught.value)
    assert len(endpoint.seen) == 1


@pytest.mark.parametrize("answer", ["no json", "{}", '{"choices": []}', '{"choices": [{"message": {"content": 1}}]}'])
def test_another_protocol_is_told(endpoint, answer):
    endpoint.script = [(200, answer, {})]
    with pytest.raises(JudgeError, match="choices"):
        judge_at(endpoint)(["p"], ["abc"])


def test_a_reply_that_cannot_be_read_is_shown(endpoint):
    with pytest.raises(JudgeError, match="the reply '3' of m cannot be read: it begins with neither"):
        judge_at(endpoint, parse=yes_or_no)(["p"], ["abc"])


def test_an_endpoint_that_is_not_there_is_told(endpoint):
    endpoint.server.shutdown()
    endpoint.server.server_close()
    with pytest.raises(JudgeError, match="no answer in 2 attempts, the last time: ConnectError"):
        judge_at(endpoint, attempts=2)(["p"], ["abc"])


def test_a_line_that_was_cut_off_is_asked_again_and_other_files_are_left_alone(endpoint, tmp_path):
    cache = tmp_path / "replies.jsonl"
    judge_at(endpoint, cache=cache, concurrency=1)(["p", "p"], ["abc", "de"])
    whole = cache.read_bytes()
    second = whole.index(b"\n") + 1
    for asked, length in enumerate((len(whole) - 5, second + 4), start=3):
        os.truncate(cache, length)
        assert judge_at(endpoint, cache=cache)(["p", "p"], ["abc", "de"]) == [3.0, 2.0]
        assert len(endpoint.seen) == asked
        assert cache.read_bytes() == whole
    cache.write_bytes(b"my diary\n" + whole)
    with pytest.raises(ValueError, match="line 1, is no kept reply"):
        judge_at(endpoint, cache=cache)
    cache.write_bytes(b"my diary")
    with pytest.raises(ValueError, match="no file of kept replies"):
        judge_at(endpoint, cache=cache)
    assert cache.read_bytes() == b"my diary"


def test_a_disk_that_is_full_leaves_no_half_of_a_line(endpoint, tmp_path):
    resource = pytest.importorskip("resource", reason="Windows has no such limits")
    cache = tmp_path / "replies.jsonl"
    judge = judge_at(endpoint, cache=cache, concurrency=1)
    judge(["p"], ["abc"])
    whole = cache.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 9, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            judge(["p"], ["de"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert cache.read_bytes() == whole


def test_a_cache_that_cannot_be_written_shows_before_anything_is_asked(endpoint, tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        judge_at(endpoint, cache=tmp_path / "nowhere" / "replies.jsonl")


def test_another_process_is_waited_for(endpoint, tmp_path):
    fcntl = pytest.importorskip("fcntl", reason="Windows has no such locks")
    cache = tmp_path / "replies.jsonl"
    judge_at(endpoint, cache=cache)(["p"], ["abc"])
    whole = cache.read_bytes()
    with cache.open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        # Half of a line, which is on its way.
        other.truncate(len(whole) - 5)
        found = []
        reader = threading.Thread(target=lambda: found.append(judge_at(endpoint, cache=cache)))
        reader.start()
        reader.join(0.1)
        assert not found
        other.seek(0)
        other.write(whole)
    reader.join()
    assert found[0](["p"], ["abc"]) == [3.0]
    assert len(endpoint.seen) == 1


def test_an_endpoint_judge_refuses_what_does_not_fit(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    for options, message in [
        ({}, "set OPENAI_BASE_URL"),
        ({"base_url": "localhost:8000"}, "must begin with http"),
        ({"base_url": "http://"}, "an address alone"),
        ({"base_url": f"https://me:{KEY}@x/v1"}, "an address alone"),
        ({"base_url": f"https://x/v1?key={KEY}"}, "an address alone"),
        ({"base_url": "http://x", "template": "none"}, "must hold {completion}"),
        ({"base_url": "http://x", "concurrency": 0}, "concurrency is 0"),
        ({"base_url": "http://x", "attempts": 0}, "attempts is 0"),
        ({"base_url": "http://x", "timeout": 0.0}, "timeout 0"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            EndpointJudge("m", **options)
        assert KEY not in str(caught.value)


def test_the_extra_is_named_where_httpx_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "httpx", None)
    with pytest.raises(ImportError, match=r"bodes-steer\[judge\]"):
        EndpointJudge("m", base_url="http://x")(["p"], ["c"])
