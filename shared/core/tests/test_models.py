"""Finding one's way into decoders of many kinds, and hooks that come off."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from separata_core.models import (
    HeadCounts,
    attention_modules,
    capture_hidden_states,
    decoder_layers,
    edit_hidden_states,
    final_norm,
    head_counts,
    logit_scaling,
    output_projection,
)
from separata_testing.models import ARCHITECTURES, tiny_model
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(4, 11)[None]
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
OLD_SMALL = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}

# What each adds: no `is_causal` on its attention (bloom, mpt, codegen); one key head, fused with the query (falcon,
# gpt_bigcode); qkv in one (phi3); layers under `decoder` (opt, bart); sinks and experts (gpt_oss); attention in one
# layer of four (qwen3_next); an encoder's code used as a decoder (bert).
OTHERS: dict[str, tuple[str, str, dict[str, Any], HeadCounts]] = {
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 4},
        HeadCounts(3, 4, 4, 8),
    ),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        {"vocab_size": 64, "d_model": 32, "n_layers": 3, "n_heads": 4},
        HeadCounts(3, 4, 4, 8),
    ),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {**OLD_SMALL, "rotary_dim": 4}, HeadCounts(3, 4, 4, 8)),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "multi_query": True},
        HeadCounts(3, 4, 1, 8),
    ),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", OLD_SMALL, HeadCounts(3, 4, 1, 8)),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        HeadCounts(3, 4, 2, 8),
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
        },
        HeadCounts(3, 4, 4, 8),
    ),
    "bart": (
        "BartConfig",
        "BartForCausalLM",
        {"vocab_size": 64, "d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
        HeadCounts(3, 4, 4, 8),
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2},
        HeadCounts(3, 4, 2, 8),
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **SMALL,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 4,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
        },
        HeadCounts(1, 4, 2, 16),
    ),
    "bert": ("BertConfig", "BertLMHeadModel", {**SMALL, "is_decoder": True}, HeadCounts(3, 4, 4, 8)),
}


def build(config: str, model: str, arguments: dict[str, Any]) -> nn.Module:
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**arguments)).eval()
    return made


def other(name: str) -> nn.Module:
    return build(*OTHERS[name][:3])


class Adapted(nn.Module):
    """A wrapper as adapter libraries make them: the model two levels down, attributes passed through."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model").model, name)


class Lora(nn.Module):
    """A linear layer with a low-rank addition, in the place of the original."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = self.base_layer(states) + self.lora_B(self.lora_A(states))
        return result


class TestFinding:
    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_counts_are_those_of_the_cache(self, name: str) -> None:
        model = tiny_model(name)
        with torch.no_grad():
            cache = model(TOKENS, use_cache=True, attention_mask=torch.ones_like(TOKENS)).past_key_values
        keys = cache.layers[0].keys
        counts = head_counts(model)
        assert (counts.layers, counts.kv_heads, counts.head_dim) == (3, keys.shape[1], keys.shape[3])
        assert counts.query_heads == model.config.num_attention_heads

    @pytest.mark.parametrize("name", OTHERS)
    def test_other_architectures(self, name: str) -> None:
        model = other(name)
        assert head_counts(model) == OTHERS[name][3]
        config = model.config
        assert len(decoder_layers(model)) == getattr(config, "decoder_layers", config.num_hidden_layers)

    @pytest.mark.parametrize("name", [*ARCHITECTURES, "bloom", "opt", "falcon", "mpt"])
    def test_layers_norm_and_projection_make_the_logits(self, name: str) -> None:
        model = tiny_model(name) if name in ARCHITECTURES else other(name)
        with torch.no_grad(), capture_hidden_states(model) as records:
            logits = model(TOKENS, attention_mask=torch.ones_like(TOKENS)).logits
        norm = final_norm(model)
        weight, bias = output_projection(model)
        scale, cap = logit_scaling(model)
        assert norm is not None
        made = norm(records[len(decoder_layers(model)) - 1][0]) @ weight.T + (0.0 if bias is None else bias)
        made = made * scale
        made = made if cap is None else cap * torch.tanh(made / cap)
        torch.testing.assert_close(made, logits, atol=1e-5, rtol=1e-5)

    def test_projection_is_the_parameter_itself(self) -> None:
        model = tiny_model("llama")
        weight, bias = output_projection(model)
        assert weight is model.lm_head.weight
        assert bias is None
        head = nn.Linear(32, 272)
        model.lm_head = head
        assert output_projection(model)[1] is head.bias

    @pytest.mark.parametrize(
        ("field", "given", "expected"), [("logit_scale", 0.25, 0.25), ("logits_scaling", 4.0, 0.25)]
    )
    def test_scaled_logits(self, field: str, given: float, expected: float) -> None:
        model = tiny_model("llama")
        setattr(model.config, field, given)
        assert logit_scaling(model) == (expected, None)

    def test_capped_logits(self) -> None:
        assert logit_scaling(tiny_model("gemma2")) == (1.0, 30.0)

    def test_attention_modules_are_in_order_and_causal(self) -> None:
        model = tiny_model("qwen2")
        assert attention_modules(model) == [layer.self_attn for layer in model.model.layers]
        hybrid = other("qwen3_next")
        assert [m.layer_idx for m in attention_modules(hybrid)] == [3]

    def test_base_models_without_head(self) -> None:
        model = tiny_model("gpt2")
        assert decoder_layers(model.transformer) is model.transformer.h
        assert final_norm(model.transformer) is model.transformer.ln_f
        with pytest.raises(ValueError, match="GPT2Model has no output projection; pass the causal language model"):
            output_projection(model.transformer)

    def test_no_final_norm(self) -> None:
        assert final_norm(other("bert")) is None

    def test_a_wrapper_changes_nothing(self) -> None:
        model = tiny_model("llama")
        counts, layers, weight = head_counts(model), decoder_layers(model), output_projection(model)[0]
        for layer in layers:
            layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
            layer.self_attn.o_proj = Lora(layer.self_attn.o_proj)
        wrapped = Adapted(model)
        assert head_counts(wrapped) == counts
        assert decoder_layers(wrapped) is layers
        assert output_projection(wrapped)[0] is weight
        assert final_norm(wrapped) is model.model.norm
        with capture_hidden_states(wrapped, [1]) as records:
            wrapped(TOKENS)
        assert records[1][0].shape == (1, 7, 32)

    def test_a_wrapper_that_passes_nothing_through(self) -> None:
        model = tiny_model("gpt_neox")
        wrapped = nn.Sequential(model)
        assert decoder_layers(wrapped) is model.gpt_neox.layers
        assert head_counts(wrapped) == HeadCounts(3, 4, 4, 8)
        assert output_projection(wrapped)[0] is model.get_output_embeddings().weight

    @pytest.mark.parametrize("kind", ["llava", "gemma3"])
    def test_language_model_of_a_multimodal_one(self, kind: str) -> None:
        text = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
        if kind == "llava":
            arguments = {
                "vision_config": transformers.CLIPVisionConfig(**VISION),
                "text_config": transformers.LlamaConfig(**text),
                "image_token_index": 5,
            }
            model = build("LlavaConfig", "LlavaForConditionalGeneration", arguments)
        else:
            arguments = {"vision_config": VISION, "text_config": text}
            model = build("Gemma3Config", "Gemma3ForConditionalGeneration", arguments)
        assert decoder_layers(model) is model.model.language_model.layers
        assert final_norm(model) is model.model.language_model.norm
        assert head_counts(model) == HeadCounts(3, 4, 2, 8)
        assert output_projection(model)[0] is model.lm_head.weight


class TestRefused:
    @pytest.mark.parametrize(
        ("config", "name", "arguments", "message"),
        [
            ("BertConfig", "BertModel", SMALL, "BertModel: its attention is not causal"),
            (
                "T5Config",
                "T5ForConditionalGeneration",
                {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4},
                "T5ForConditionalGeneration is an encoder-decoder; only decoder-only",
            ),
            (
                "ViTConfig",
                "ViTModel",
                {k: v for k, v in VISION.items() if k != "image_size"},
                "holds no attention layers",
            ),
            (
                "MambaConfig",
                "MambaForCausalLM",
                {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
                "MambaForCausalLM: it holds no attention layers",
            ),
            (
                "Mamba2Config",
                "Mamba2ForCausalLM",
                {
                    "vocab_size": 64,
                    "hidden_size": 32,
                    "num_hidden_layers": 2,
                    "num_heads": 4,
                    "head_dim": 16,
                    "n_groups": 1,
                    "bos_token_id": 1,
                    "eos_token_id": 2,
                },
                "Mamba2ForCausalLM: it holds no attention layers",
            ),
        ],
    )
    def test_what_is_no_decoder(self, config: str, name: str, arguments: dict[str, Any], message: str) -> None:
        model = build(config, name, arguments)
        for call in (decoder_layers, attention_modules, head_counts, final_norm):
            with pytest.raises(ValueError, match=message):
                call(model)
        with pytest.raises(ValueError, match=message), capture_hidden_states(model):
            pass

    def test_any_other_module(self) -> None:
        with pytest.raises(ValueError, match="no decoder layers in Linear"):
            decoder_layers(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="Linear has no output projection"):
            output_projection(nn.Linear(2, 2))

    def test_two_decoders(self) -> None:
        both = nn.ModuleDict({"draft": tiny_model("llama"), "target": tiny_model("gpt2")})
        with pytest.raises(ValueError, match=r"several decoders, at draft\.model\.layers, target\.transformer\.h"):
            decoder_layers(both)
        assert len(decoder_layers(both["draft"])) == 3

    def test_layers_that_differ(self) -> None:
        model = tiny_model("llama")
        model.model.layers[2].self_attn.head_dim = 4
        with pytest.raises(ValueError, match=r"attention 2 has .* \(4, 2, 4\) and the first one \(4, 2, 8\)"):
            head_counts(model)

    def test_head_with_an_adapter_or_packed_weights(self) -> None:
        model = tiny_model("llama")
        head = model.lm_head
        model.lm_head = Lora(head)
        with pytest.raises(ValueError, match="output projection is a Lora, not a plain linear layer; merge"):
            output_projection(model)
        packed = nn.Linear(32, 272, bias=False)
        packed.weight = nn.Parameter(torch.zeros(32 * 272 // 2, 1, dtype=torch.uint8), requires_grad=False)
        model.lm_head = packed
        with pytest.raises(ValueError, match=r"holds torch.uint8 of shape \(4352, 1\) for 272 outputs; load"):
            output_projection(model)

    def test_head_with_a_trained_copy_gives_the_copy_in_use(self) -> None:
        model = tiny_model("llama")
        both = nn.Module()
        both.original_module = model.lm_head
        both.modules_to_save = nn.ModuleDict({"default": nn.Linear(32, 272, bias=False)})
        both.active_adapter = "default"
        model.lm_head = both
        assert output_projection(model)[0] is both.modules_to_save["default"].weight


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
class TestHiddenStates:
    def test_captured_are_those_the_model_reports(self, name: str) -> None:
        model = tiny_model(name)
        with torch.no_grad():
            states = model(TOKENS, output_hidden_states=True).hidden_states
        before = hooks(model)  # transformers leaves its own in place
        with torch.no_grad(), capture_hidden_states(model, [0, 1]) as records:
            model(TOKENS)
            model(TOKENS[:, :3])
        assert list(records) == [0, 1]
        for layer in (0, 1):
            assert torch.equal(records[layer][0], states[layer + 1])
            assert records[layer][1].shape == (1, 3, 32)
        assert hooks(model) == before

    def test_detached_unless_asked(self, name: str) -> None:
        model = tiny_model(name)
        with capture_hidden_states(model, [1]) as cut, capture_hidden_states(model, [1], detach=False) as whole:
            model(TOKENS)
        assert not cut[1][0].requires_grad
        whole[1][0].sum().backward()
        assert next(decoder_layers(model)[0].parameters()).grad is not None

    def test_an_edit_acts_on_what_comes_after(self, name: str) -> None:
        model = tiny_model(name)
        with torch.no_grad():
            plain = model(TOKENS, output_hidden_states=True)
            with (
                edit_hidden_states(model, {1: lambda states: states.flip(-1)}),
                capture_hidden_states(model) as records,
            ):
                edited = model(TOKENS).logits
            after = model(TOKENS).logits
        assert torch.equal(records[0][0], plain.hidden_states[1])
        assert torch.equal(records[1][0], plain.hidden_states[2].flip(-1))
        assert float((edited - plain.logits).abs().max()) > 1e-3
        assert torch.equal(after, plain.logits)

    def test_nested_edits_act_in_the_order_of_opening(self, name: str) -> None:
        model = tiny_model(name)
        with (
            torch.no_grad(),
            edit_hidden_states(model, {0: lambda states: states + 1.0}),
            edit_hidden_states(model, {0: lambda states: states * 2.0}),
            capture_hidden_states(model, [0]) as records,
        ):
            model(TOKENS)
        with torch.no_grad(), capture_hidden_states(model, [0]) as plain:
            model(TOKENS)
        torch.testing.assert_close(records[0][0], 2.0 * (plain[0][0] + 1.0))
        assert hooks(model) == 0

    def test_generation_runs_through_edits(self, name: str) -> None:
        model = tiny_model(name)
        run = {"max_new_tokens": 3, "do_sample": False, "min_new_tokens": 3, "attention_mask": torch.ones_like(TOKENS)}
        with capture_hidden_states(model, [2]) as records:
            model.generate(TOKENS, **run)
        assert [states.shape[1] for states in records[2]] == [7, 1, 1]

    def test_off_after_an_exception(self, name: str) -> None:
        model = tiny_model(name)
        with pytest.raises(ZeroDivisionError), capture_hidden_states(model):
            assert 1 // (hooks(model) - 3)
        assert hooks(model) == 0

        def fail(states: Tensor) -> Tensor:
            raise RuntimeError("inside")

        with pytest.raises(RuntimeError, match="inside"), edit_hidden_states(model, {1: fail}):
            model(TOKENS)
        assert hooks(model) == 0

    def test_off_after_a_generator_is_closed_or_forgotten(self, name: str) -> None:
        model = tiny_model(name)

        def walk() -> Iterator[int]:
            with edit_hidden_states(model, {0: lambda states: states}), capture_hidden_states(model, [0]) as records:
                while True:
                    model(TOKENS)
                    yield len(records[0])

        steps = walk()
        assert [next(steps), next(steps)] == [1, 2]
        assert hooks(model) == 2
        steps.close()
        assert hooks(model) == 0
        steps = walk()
        next(steps)
        del steps
        gc.collect()
        assert hooks(model) == 0

    def test_hooks_of_others_stay(self, name: str) -> None:
        model = tiny_model(name)
        handle = decoder_layers(model)[0].register_forward_hook(lambda *args: None)
        with capture_hidden_states(model), edit_hidden_states(model, {0: lambda states: states}):
            assert hooks(model) == 5
        assert hooks(model) == 1
        handle.remove()

    @pytest.mark.parametrize(
        ("edit", "found"),
        [
            (lambda states: states[:, :2], r"\(1, 2, 32\) torch.float32 cpu"),
            (lambda states: states.double(), r"\(1, 7, 32\) torch.float64 cpu"),
            (lambda states: None, "a NoneType"),
        ],
    )
    def test_an_edit_of_another_kind(self, name: str, edit: Any, found: str) -> None:
        model = tiny_model(name)
        with (
            pytest.raises(ValueError, match=rf"the edit of layer 1 returned {found}.*must return \(1, 7, 32\)"),
            edit_hidden_states(model, {1: edit}),
        ):
            model(TOKENS)
        assert hooks(model) == 0

    @pytest.mark.parametrize("layer", [-1, 3])
    def test_layers_that_do_not_exist(self, name: str, layer: int) -> None:
        model = tiny_model(name)
        message = rf"layer is {layer}; it must be an int in \[0, 3\)"
        with pytest.raises(ValueError, match=message), capture_hidden_states(model, [0, layer]):
            pass
        with pytest.raises(ValueError, match=message), edit_hidden_states(model, {layer: lambda states: states}):
            pass
        assert hooks(model) == 0


def test_compiled_models_would_pass_over_hooks() -> None:
    model = tiny_model("llama")
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="OptimizedModule is compiled"), capture_hidden_states(compiled):
        pass
    decoder_layers(model)[1].compile(backend="eager")
    with (
        pytest.raises(ValueError, match=r"model\.layers\.1 is compiled"),
        edit_hidden_states(model, {0: lambda states: states}),
    ):
        pass
    assert hooks(model) == 0


def test_what_a_wrapper_without_configuration_hides() -> None:
    wrapped = nn.Sequential(tiny_model("llama"))
    wrapped[0].config.final_logit_softcapping = 30.0
    assert logit_scaling(wrapped) == (1.0, 30.0)


def test_a_layer_that_returns_more_than_its_states() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.Module()
            self.attention.layer_idx, self.attention.is_causal, self.attention.num_heads = 0, True, 2
            self.attention.q_proj = nn.Linear(4, 4)

        def forward(self, states: Tensor) -> tuple[Tensor, str]:
            return self.attention.q_proj(states), "cache"

    model = nn.Module()
    model.config = type("Config", (), {"hidden_size": 4})()
    model.layers = nn.ModuleList([Layer()])
    assert head_counts(model) == HeadCounts(1, 2, 2, 2)
    with edit_hidden_states(model, {0: torch.zeros_like}):
        states, rest = model.layers[0](torch.ones(1, 2, 4))
    assert torch.equal(states, torch.zeros(1, 2, 4))
    assert rest == "cache"
    del model.layers[0].attention.num_heads
    with pytest.raises(ValueError, match="does not tell how many query heads"):
        head_counts(model)
    model.layers[0].attention.num_heads, model.config.hidden_size = 2, None
    with pytest.raises(ValueError, match="does not tell how wide its heads are"):
        head_counts(model)
    model.layers[0].attention.head_dim, model.layers[0].attention.num_key_value_heads = 2, 3
    with pytest.raises(ValueError, match="has 2 query heads over 3 key-value heads"):
        head_counts(model)
