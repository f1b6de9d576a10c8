import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
from pmark.paraphrase import CausalParaphraser, ChatAttack, ChatParaphraser, Seq2SeqParaphraser, pick_bigram

PROMPT = "The storm had passed."
TEXT = f"{PROMPT} Anna walked along the shore. She found a boat."


class Scripted(ChatAttack):
    """Answers by a function of the message, and keeps what it was asked."""

    def __init__(self, mode, answer, **options):
        super().__init__("scripted", mode, **options)
        self.answer, self.asked = answer, []

    def ask(self, messages, seeds):
        self.asked.append((list(messages), list(seeds)))
        return [self.answer(message) for message in messages]


def last_line(message):
    return message.rpartition("\n")[2]


def test_sentences_are_rewritten_one_by_one():
    attack = Scripted("sentence", lambda message: f" <think>Hm.\n</think> So:\n{last_line(message)} ")
    assert attack([TEXT, PROMPT]) == [f"{PROMPT} So: Anna walked along the shore. So: She found a boat.", PROMPT]
    assert attack.name == "scripted-sentence"
    assert len(attack.asked[0][0]) == 2


def test_a_document_is_rewritten_at_once_and_braces_are_its_own():
    attack = Scripted("document", lambda message: last_line(message).upper())
    assert attack([f"{PROMPT} A {{b}} c. D."], seed=1) == [f"{PROMPT} A {{B}} C. D."]
    attack([f"{PROMPT} A {{b}} c. D."], seed=2)
    assert attack.asked[0][1] != attack.asked[1][1]


def test_back_translation_asks_for_the_other_language_and_back():
    attack = Scripted("back_translation", lambda message: last_line(message) + "!", pivot="Danish")
    assert attack([TEXT]) == [TEXT + "!!"]
    (there, _), (back, _) = attack.asked
    assert "into Danish" in there[0]
    assert "into English" in back[0]
    assert attack.name == "scripted-back-translation"


def test_what_has_no_answer_stays_and_is_counted():
    attack = Scripted("sentence", lambda message: "" if "Anna" in message else "New.")
    assert attack([TEXT]) == [f"{PROMPT} Anna walked along the shore. New."]
    assert attack.unchanged == 1
    lost = Scripted("back_translation", lambda message: "<think>never ends")
    assert lost([TEXT]) == [TEXT]
    assert lost.unchanged == 1
    # Nothing was there to translate back.
    assert lost.asked[1][0] == []
    with pytest.raises(ValueError, match="not 'poem'"):
        Scripted("poem", str)


@pytest.fixture
def server():
    """A chat endpoint: `answers` maps what a message holds to a list of (status, body), the last one repeated."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.seen.append((body, self.headers["authorization"]))
            message = body["messages"][0]["content"]
            [key] = [key for key in state.answers if key in message]
            with state.lock:
                status, answer = state.answers[key].pop(0) if len(state.answers[key]) > 1 else state.answers[key][0]
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = SimpleNamespace(answers={}, seen=[], lock=threading.Lock(), url=f"http://127.0.0.1:{http.server_port}/v1")
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


def said(text, reason="stop"):
    message = {"role": "assistant", "content": text}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [
        {"index": 0, "message": message, "finish_reason": reason}]}  # fmt: skip


def test_an_endpoint_is_asked_and_asked_again(server, monkeypatch):
    pytest.importorskip("openai", reason="needs the extra 'openai'")
    monkeypatch.setenv("THE_KEY", "sk-secret")
    server.answers = {"Anna": [(429, {}), (500, {}), (200, said("Anna went."))], "boat": [(200, said("It floats."))]}
    attack = ChatParaphraser(server.url, "m", api_key_env="THE_KEY")
    assert attack([TEXT]) == [f"{PROMPT} Anna went. It floats."]
    assert attack.name == "chat-sentence"
    assert len(server.seen) == 4
    body, key = server.seen[0]
    assert key == "Bearer sk-secret"
    assert (body["model"], body["temperature"]) == ("m", 0.7)
    # The same seed asks the same.
    first = {each["messages"][0]["content"]: each["seed"] for each, _ in server.seen}
    server.seen.clear()
    attack([TEXT])
    assert {each["messages"][0]["content"]: each["seed"] for each, _ in server.seen} == first


def test_an_answer_that_is_cut_or_missing_keeps_the_original(server):
    pytest.importorskip("openai", reason="needs the extra 'openai'")
    server.answers = {"Anna": [(200, said("Anna wen", "length"))], "boat": [(200, said(None))]}
    attack = ChatParaphraser(server.url, "m")
    assert attack([TEXT]) == [TEXT]
    assert attack.unchanged == 2


def test_a_failing_endpoint_is_told_without_the_key(server, monkeypatch):
    pytest.importorskip("openai", reason="needs the extra 'openai'")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    attack = ChatParaphraser(server.url, "m", retries=0)
    for answer, told in [
        ((401, {"error": {"message": "bad key sk-secret"}}), r"AuthenticationError \(status 401\)$"),
        ((500, {}), r"InternalServerError \(status 500\)$"),
        ((200, b"{"), "no paraphrase from http"),
        ((200, {"choices": []}), "no paraphrase from http"),
        ((200, {"choices": [{"message": None, "finish_reason": "stop"}]}), "no paraphrase from http"),
        ((200, b'"words"'), "no paraphrase from http"),
    ]:
        server.answers = {"the": [answer], "She": [answer]}
        with pytest.raises(ConnectionError, match=told) as caught:
            attack([TEXT])
        assert "sk-secret" not in str(caught.value)


def test_the_endpoint_names_its_extra(block_imports):
    block_imports("openai")
    with pytest.raises(ImportError, match=r"pip install 'pmark\[openai\]'"):
        ChatParaphraser("http://localhost", "m")


class Answering:
    """A local model that answers with given tokens."""

    device = "cpu"
    generation_config = SimpleNamespace(eos_token_id=2)

    def __init__(self, answers):
        self.answers, self.inputs = iter(answers), []

    def generate(self, ids, attention_mask, **settings):
        import torch

        self.inputs.append((ids, attention_mask, settings))
        rows = [next(self.answers) for _ in ids]
        width = max(map(len, rows))
        return torch.cat([ids, torch.tensor([row + [2] * (width - len(row)) for row in rows])], dim=1)


def test_a_local_chat_model_is_asked_by_its_template(tiny_tokenizer):
    pytest.importorskip("torch", reason="needs the extra 'transformers'")
    encode = lambda text: tiny_tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731  # one line
    model = Answering([[*encode("Anna strolled."), 2], encode("It was a boat, and so on")])
    attack = CausalParaphraser(model, tiny_tokenizer, max_new_tokens=24, batch_size=2)
    # The second answer fills its budget without an end.
    assert attack([TEXT]) == [f"{PROMPT} Anna strolled. She found a boat."]
    assert attack.unchanged == 1
    [(ids, mask, settings)] = model.inputs
    assert settings["max_new_tokens"] == 24
    for row, kept, sentence in zip(ids, mask, ["Anna walked along the shore.", "She found a boat."], strict=True):
        read = tiny_tokenizer.decode(row[kept.bool()])
        assert read.startswith("user: Say the following sentence")
        assert read.endswith(f"{sentence}\nassistant: ")


def test_a_local_model_repeats_itself_and_leaves_the_random_state(tiny_models, tiny_tokenizer):
    import torch

    attack = CausalParaphraser(tiny_models("llama"), tiny_tokenizer, "document", max_new_tokens=8)
    state = torch.get_rng_state()
    messages = ["Hello.", "A longer message."]
    assert attack.ask(messages, [3, 4]) == attack.ask(messages, [3, 4])
    assert torch.equal(torch.get_rng_state(), state)
    tiny_tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        CausalParaphraser(tiny_models("llama"), tiny_tokenizer)


def test_the_bigram_attack_picks_what_overlaps_least_and_still_means_it():
    original = "the cat sat on the mat"
    candidates = ["the cat sat on a mat", "a dog sat on the rug", "on rugs there are cats", "no idea at all"]
    similarities = np.array([0.9, 0.85, 0.81, 0.2])
    assert pick_bigram(original, candidates, similarities) == 2
    assert pick_bigram(original, candidates, similarities, max_drop=0.06) == 1
    assert pick_bigram(original, candidates, similarities, max_drop=1.0) == 2
    assert pick_bigram(original, candidates[:1], np.array([-0.5])) == 0


class Beams:
    """An encoder-decoder whose beams are written out, and its tokenizer."""

    device = "cpu"

    def __init__(self, *beams):
        self.beams, self.read, self.settings = beams, [], []

    def __call__(self, texts, **_):
        import torch

        self.read += texts
        ones = torch.ones(len(texts), 3, dtype=torch.long)
        return {"input_ids": ones, "attention_mask": ones}

    def generate(self, ids, attention_mask, num_return_sequences, **settings):
        self.settings.append(settings)
        return list(range(len(ids) * num_return_sequences))

    def batch_decode(self, written, skip_special_tokens):
        assert skip_special_tokens
        return [self.beams[each % len(self.beams)] for each in written]


def encode(texts):
    """Closeness to the original is what a text says of it."""
    angles = [0.3 if "close" in text else 1.4 if "far" in text else 0.0 for text in texts]
    return np.array([[np.cos(each), np.sin(each)] for each in angles])


def test_a_seq2seq_model_gives_its_best_beam_or_the_bigram_attack():
    pytest.importorskip("torch", reason="needs the extra 'transformers'")
    model = Beams("Anna walked\nalong.", "a close one", "far off", "")
    plain = Seq2SeqParaphraser(model, model, prefix="paraphrase: ", batch_size=1)
    assert plain([TEXT]) == [f"{PROMPT} Anna walked along. Anna walked along."]
    assert model.read == ["paraphrase: Anna walked along the shore.", "paraphrase: She found a boat."]
    assert model.settings[0]["num_beams"] == 25
    bigram = Seq2SeqParaphraser(model, model, bigram=True, encoder=encode, num_beams=4)
    assert bigram([f"{PROMPT} Anna walked along the shore."]) == [f"{PROMPT} a close one"]
    assert (plain.name, bigram.name) == ("seq2seq", "seq2seq-bigram")
    silent = Seq2SeqParaphraser(Beams(""), Beams(""))
    assert silent([TEXT]) == [TEXT]
    assert silent.unchanged == 2
    with pytest.raises(ValueError, match="encoder must be given"):
        Seq2SeqParaphraser(model, model, bigram=True)


def test_a_real_encoder_decoder_writes_text(tiny_tokenizer):
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=272, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    ).eval()
    tiny_tokenizer.model_max_length = 64
    attack = Seq2SeqParaphraser(model, tiny_tokenizer, bigram=True, encoder=encode, num_beams=3, max_new_tokens=5)
    [text] = attack([TEXT])
    assert text.startswith(PROMPT)
    assert attack([TEXT]) == [text]
