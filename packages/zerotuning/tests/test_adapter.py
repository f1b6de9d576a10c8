import copy
import functools
import math
import threading

import pytest
import torch
import zerotuning
from separata_testing.models import ARCHITECTURES, WINDOW, tiny_model, tiny_tokenizer
from separata_testing.suites import BatchConsistency, ModelUnchangedAfterExit
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from zerotuning import ZeroTuningConfig, apply, attach, detach, reweight

LAYERS, HEADS = 3, 4


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    # Soft-capped logits are beyond torch's SDPA, so transformers gives that architecture its eager attention.
    return tiny_model(request.param, attn_implementation="eager" if request.param == "gemma2" else None)


@pytest.fixture
def llama():
    return tiny_model("llama")


def tokens(rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 260, (rows, length), generator=torch.Generator().manual_seed(seed))


def some_config(model, seed: int = 0) -> ZeroTuningConfig:
    values = torch.randn(LAYERS, HEADS, generator=torch.Generator().manual_seed(seed))
    return ZeroTuningConfig(values, zerotuning.ModelId.of(model))


@torch.no_grad()
def logits(model, ids, **kwargs) -> torch.Tensor:
    return model(input_ids=ids, **kwargs).logits


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-4)


class TestEveryArchitecture:
    def test_gamma_one_is_bit_identical(self, model):
        ids = tokens()
        before = logits(model, ids)
        with apply(model, ZeroTuningConfig.uniform(model, 1.0)):
            assert torch.equal(logits(model, ids), before)

    def test_bit_identical_after_exit(self, model):
        ids = tokens()
        before, implementation = logits(model, ids), model.config._attn_implementation
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with apply(model, some_config(model)):
            assert (logits(model, ids) - before).abs().max() > 1e-3
        assert torch.equal(logits(model, ids), before)
        assert torch.equal(logits(model, ids), before)
        assert model.config._attn_implementation == implementation
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())

    def test_left_padding_changes_nothing(self, model):
        ids = tokens(1, 11)
        padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
        mask = (torch.arange(16) >= 5).long()[None]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with apply(model, some_config(model)):
            alone = logits(model, ids)
            together = logits(
                model,
                torch.cat([padded, tokens(1, 16, seed=1)]),
                attention_mask=torch.cat([mask, torch.ones_like(mask)]),
                position_ids=torch.cat([positions, torch.arange(16)[None]]),
            )
        close(together[:1, 5:], alone)
        # The same prompt without the operator is something else, so a bias on the padding would have shown.
        assert (logits(model, ids) - alone).abs().max() > 1e-3

    def test_right_padding_changes_nothing(self, model):
        ids = tokens(1, 11)
        padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], dim=1)
        with apply(model, some_config(model)):
            close(
                logits(model, padded, attention_mask=(torch.arange(15) < 11).long()[None])[:, :11], logits(model, ids)
            )

    def test_decoding_with_a_cache_equals_one_forward(self, model):
        # Longer than the window of the layers that have one.
        ids = tokens(2, 2 * WINDOW + 5)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with apply(model, some_config(model)):
            full = logits(model, ids, attention_mask=mask, position_ids=positions)
            cache = DynamicCache(config=model.config)
            parts = []
            for first, last in [(0, 6), (6, 7), (7, 13), *((at, at + 1) for at in range(13, ids.shape[1]))]:
                parts.append(
                    logits(
                        model,
                        ids[:, first:last],
                        attention_mask=mask[:, :last],
                        position_ids=positions[:, first:last],
                        past_key_values=cache,
                        use_cache=True,
                    )
                )
        joined = torch.cat(parts, dim=1)
        close(joined[1], full[1])
        close(joined[0, 3:], full[0, 3:])

    def test_rows_with_their_own_configurations(self, model):
        ids = tokens(3)
        configs = [some_config(model, seed) for seed in range(3)]
        with apply(model, configs):
            together = logits(model, ids)
        for row, config in enumerate(configs):
            with apply(model, config):
                close(together[row], logits(model, ids[row : row + 1])[0])

    def test_generation_equals_the_loop_without_a_cache(self, model):
        ids = tokens(2, 9)
        with apply(model, some_config(model)):
            generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
            expected = ids
            for _ in range(generated.shape[1] - 9):
                expected = torch.cat([expected, logits(model, expected)[:, -1:].argmax(-1)], dim=1)
        at_end = generated == model.config.pad_token_id
        assert torch.equal(generated[~at_end], expected[~at_end])


def manual_attention(model, ids, config):
    """The eager attention of transformers with the definition in the middle of it."""
    import transformers.models.llama.modeling_llama as modeling

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        logits = query @ key.transpose(2, 3) * scaling
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
        weights = reweight(weights, config.log_gamma[module.layer_idx])
        return (weights @ value).transpose(1, 2).contiguous(), weights

    original = modeling.eager_attention_forward
    modeling.eager_attention_forward = attention
    try:
        model.set_attn_implementation("eager")
        return logits(model, ids)
    finally:
        modeling.eager_attention_forward = original
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_model_equals_the_definition_in_every_layer(implementation):
    model = tiny_model("llama", attn_implementation=implementation, dtype=torch.float64)
    config, ids = some_config(model), tokens()
    expected = manual_attention(tiny_model("llama", dtype=torch.float64), ids, config)
    with apply(model, config):
        # The eager attention of transformers takes its softmax in float32.
        atol = 1e-9 if implementation == "sdpa" else 1e-5
        torch.testing.assert_close(logits(model, ids), expected, atol=atol, rtol=0)


def test_bfloat16_stays_near(llama):
    config, ids = some_config(llama), tokens()
    with apply(llama, config):
        exact = logits(llama, ids)
    half = tiny_model("llama", dtype=torch.bfloat16)
    vanilla_error = (logits(half, ids).float() - logits(llama, ids)).abs().max()
    with apply(half, config):
        error = (logits(half, ids).float() - exact).abs().max()
    assert error < 2 * vanilla_error


@torch.no_grad()
def test_initial_token_never_changes(model):
    ids = tokens()
    plain = model(input_ids=ids, output_hidden_states=True).hidden_states
    with apply(model, some_config(model)):
        tuned = model(input_ids=ids, output_hidden_states=True).hidden_states
    for before, after in zip(plain, tuned, strict=True):
        close(before[:, 0], after[:, 0])
    assert (plain[-1][:, 1:] - tuned[-1][:, 1:]).abs().max() > 1e-3


@torch.no_grad()
def test_nothing_changes_below_the_touched_layer(llama):
    ids = tokens()
    plain = llama(input_ids=ids, output_hidden_states=True)
    with apply(llama, ZeroTuningConfig.uniform(llama, 3.0, heads=[1], layers=[1])):
        tuned = llama(input_ids=ids, output_hidden_states=True)
    # Entry 0 is the embedding, entry l + 1 the output of layer l.
    assert torch.equal(plain.hidden_states[1], tuned.hidden_states[1])
    assert not torch.equal(plain.hidden_states[2], tuned.hidden_states[2])
    for layer, same in ((0, True), (1, True), (2, False)):
        keys = plain.past_key_values.layers[layer].keys, tuned.past_key_values.layers[layer].keys
        assert torch.equal(*keys) is same


@torch.no_grad()
def test_siblings_of_a_grouped_head_keep_their_weights():
    model = tiny_model("llama", attn_implementation="eager")
    ids = tokens()
    plain = model(input_ids=ids, output_attentions=True).attentions[0]
    with apply(model, ZeroTuningConfig.uniform(model, 3.0, heads=[1], layers=[0])):
        tuned = model(input_ids=ids, output_attentions=True).attentions[0]
    assert torch.equal(plain[:, [0, 2, 3]], tuned[:, [0, 2, 3]])
    close(tuned[:, 1:2], reweight(plain[:, 1:2], torch.tensor([math.log(3.0)])))


@torch.no_grad()
def test_rows_past_the_window_are_vanilla():
    model = tiny_model("mistral")
    ids = tokens(1, 3 * WINDOW)

    def first_layer():
        return model(input_ids=ids, output_hidden_states=True).hidden_states[1]

    plain = first_layer()
    with apply(model, ZeroTuningConfig.uniform(model, 5.0, layers=[0])):
        tuned = first_layer()
    assert torch.equal(plain[:, WINDOW:], tuned[:, WINDOW:])
    assert (plain[:, 1:WINDOW] - tuned[:, 1:WINDOW]).abs().amax(-1).min() > 1e-5


@pytest.mark.filterwarnings("ignore:a gamma outside")
@pytest.mark.parametrize("gamma", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extreme_gammas_stay_finite(gamma, dtype):
    ids = tokens()
    ways = {"sdpa": ("auto", "bias", "augmented"), "eager": ("auto", "post_softmax")}
    with apply(exact := tiny_model("llama"), ZeroTuningConfig.uniform(exact, gamma)):
        expected = logits(exact, ids)
    for implementation, paths in ways.items():
        model = tiny_model("llama", dtype=dtype, attn_implementation=implementation)
        for path in paths:
            with apply(model, ZeroTuningConfig.uniform(model, gamma), path=path):
                error = (logits(model, ids).float() - expected).abs().max()
            assert error < {torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.8}[dtype]


def test_tiny_gamma_masks_the_initial_token(llama):
    ids = tokens(1, 10)
    mask = torch.zeros(1, 1, 10, 10).masked_fill(
        torch.ones(10, 10, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min
    )
    mask[..., 1:, 0] = torch.finfo(torch.float32).min
    with apply(llama, ZeroTuningConfig.uniform(llama, 1e-30)):
        tuned = logits(llama, ids)
    close(tuned, logits(llama, ids, attention_mask=mask), atol=1e-4)


def test_composition(llama):
    ids = tokens()
    one, two = some_config(llama, 1), some_config(llama, 2)
    with apply(llama, one.compose(two)):
        joint = logits(llama, ids)
    summed = ZeroTuningConfig(one.log_gamma + two.log_gamma, one.model_id)
    with apply(llama, summed):
        assert torch.equal(logits(llama, ids), joint)


@pytest.mark.parametrize("hides", [torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_ready_masks_are_kept_and_their_padding_understood(implementation, hides):
    model = tiny_model("llama", attn_implementation=implementation)
    ids = tokens(2, 10)
    padding = torch.ones(2, 10, dtype=torch.long)
    padding[0, :4] = 0
    seen = torch.ones(10, 10, dtype=torch.bool).tril()[None, None] & padding[:, None, None].bool()
    ready = torch.zeros(2, 1, 10, 10).masked_fill(~seen, hides)
    with apply(model, some_config(model)):
        expected = logits(model, ids, attention_mask=padding, position_ids=torch.arange(10)[None])
        result = logits(model, ids, attention_mask=ready, position_ids=torch.arange(10)[None])
    close(result[0, 4:], expected[0, 4:])
    close(result[1], expected[1])


def test_beam_search_reorders_rows(llama):
    # One row is padded, so that beams carry different start indices.
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    ids[0, :4] = 0
    with apply(llama, some_config(llama)):
        batched = llama.generate(ids, attention_mask=mask, max_new_tokens=5, num_beams=3, do_sample=False)
        alone = llama.generate(ids[:1, 4:], attention_mask=mask[:1, 4:], max_new_tokens=5, num_beams=3, do_sample=False)
    assert (
        batched[0, 9 : 4 + alone.shape[1]].tolist() == alone[0, 5 : 5 + batched.shape[1]].tolist()[: alone.shape[1] - 5]
    )


def test_beams_of_rows_with_their_own_configurations(llama):
    ids = tokens(2, 9)
    configs = [some_config(llama, 1), some_config(llama, 2)]
    arguments = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "min_new_tokens": 5}
    with apply(llama, configs):
        together = llama.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    for row, config in enumerate(configs):
        with apply(llama, config):
            alone = llama.generate(ids[row : row + 1], attention_mask=torch.ones(1, 9, dtype=torch.long), **arguments)
        assert torch.equal(together[row], alone[0])


def test_static_cache(llama):
    ids = tokens(2, 9)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :2] = 0
    with apply(llama, some_config(llama)):
        expected = logits(llama, ids, attention_mask=mask[:, :9])
        cache = StaticCache(config=llama.config, max_cache_len=32)
        first = logits(llama, ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache, use_cache=True)
        last = logits(llama, ids[:, 8:], attention_mask=mask[:, :9], past_key_values=cache, use_cache=True)
    close(torch.cat([first, last], dim=1)[0, 2:], expected[0, 2:])
    close(torch.cat([first, last], dim=1)[1], expected[1])


@pytest.mark.parametrize(
    ("architecture", "prompt", "pads"),
    [("mistral", WINDOW - 2, 2), ("mistral", WINDOW + 5, 0), ("mistral", WINDOW + 5, 3), ("llama", WINDOW + 5, 3)],
)
def test_static_cache_in_generation(architecture, prompt, pads):
    # transformers hands the model ready 4-D masks then, in which a window hides the start.
    model = tiny_model(architecture)
    ids, mask = tokens(2, prompt), torch.ones(2, prompt, dtype=torch.long)
    mask[1, :pads] = 0
    length = WINDOW + 4
    options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_logits": True, "attention_mask": mask}
    with apply(model, some_config(model)):
        expected = model.generate(ids, **options)
        found = model.generate(ids, **options, cache_implementation="static")
    assert torch.equal(found.sequences, expected.sequences)
    close(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("additive", [False, True])
def test_ready_mask_with_a_window(additive):
    model = tiny_model("mistral")
    ids = tokens(1, 3 * WINDOW)
    at = torch.arange(3 * WINDOW)
    seen = ((at[None] <= at[:, None]) & (at[:, None] - at[None] < WINDOW))[None, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min) if additive else seen
    with apply(model, some_config(model)):
        close(logits(model, ids, attention_mask=mask), logits(model, ids))


def test_static_cache_without_a_mask(llama):
    ids = tokens(2, 9)
    with apply(llama, some_config(llama)):
        cache = StaticCache(config=llama.config, max_cache_len=32)
        close(logits(llama, ids, past_key_values=cache, use_cache=True), logits(llama, ids))


def test_start_is_remembered_where_decoding_passes_no_mask(llama):
    ids = tokens(1, 9)
    with apply(llama, some_config(llama)):
        expected = logits(llama, ids)
        cache = llama(input_ids=ids[:, :5], use_cache=True).past_key_values
        close(logits(llama, ids[:, 5:], past_key_values=cache, use_cache=True), expected[:, 5:])


def test_rows_that_multiplied_without_a_mask(llama):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad(), apply(llama, some_config(llama)):
        cache = llama(input_ids=tokens(2, 9), attention_mask=mask, use_cache=True).past_key_values
        cache.batch_repeat_interleave(2)
        with pytest.raises(ValueError, match=r"filled by 2 rows, now there are 4.* pass the attention_mask"):
            llama(input_ids=tokens(4, 1), past_key_values=cache)


class TestCaches:
    def test_other_configuration_is_refused(self, llama):
        ids = tokens()
        with apply(llama, some_config(llama, 1)):
            cache = llama(input_ids=ids, use_cache=True).past_key_values
        with apply(llama, some_config(llama, 2)), pytest.raises(ValueError, match="another configuration"):
            llama(input_ids=ids[:, :1], past_key_values=cache)

    def test_vanilla_cache_is_refused_and_fine_at_gamma_one(self, llama):
        ids = tokens()
        cache = llama(input_ids=ids, use_cache=True).past_key_values
        with apply(llama, some_config(llama)), pytest.raises(ValueError, match="another configuration"):
            llama(input_ids=ids[:, :1], past_key_values=cache)
        with apply(llama, ZeroTuningConfig.uniform(llama, 1.0)):
            llama(input_ids=ids[:, :1], past_key_values=cache)

    @torch.no_grad()
    def test_copy_and_an_equal_configuration_are_accepted(self, llama):
        ids = tokens()
        with apply(llama, some_config(llama)):
            cache = llama(input_ids=ids, use_cache=True).past_key_values
        with apply(llama, some_config(llama)):
            llama(input_ids=ids[:, :1], past_key_values=copy.deepcopy(cache))

    def test_emptied_cache_may_be_used_again(self, llama):
        ids, cache = tokens(), DynamicCache(config=llama.config)
        with apply(llama, some_config(llama, 1)):
            llama(input_ids=ids, past_key_values=cache, use_cache=True)
        with apply(llama, some_config(llama, 2)):
            llama(input_ids=ids, past_key_values=DynamicCache(config=llama.config), use_cache=True)


class TestBadInput:
    def test_row_of_padding_is_left_alone(self, llama):
        ids, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
        mask[1] = 0
        with apply(llama, some_config(llama)):
            with pytest.warns(UserWarning, match=r"rows \[1\] .* padding"):
                padded = logits(llama, ids, attention_mask=mask)
            close(padded[0], logits(llama, ids[:1])[0])
        close(padded[1], logits(llama, ids, attention_mask=mask)[1])

    def test_pads_without_a_mask_warn(self, llama):
        ids = tokens(2, 6)
        ids[0, 0] = llama.config.pad_token_id
        with apply(llama, some_config(llama)), pytest.warns(UserWarning, match="attention_mask is None"):
            logits(llama, ids)

    def test_packed_rows_are_refused(self, llama):
        with apply(llama, some_config(llama)), pytest.raises(ValueError, match="packed"):
            logits(llama, tokens(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))

    def test_batch_that_is_no_multiple(self, llama):
        with apply(llama, [some_config(llama, 1), some_config(llama, 2)]), pytest.raises(ValueError, match="3 rows"):
            logits(llama, tokens(3))

    def test_configuration_of_another_model(self, llama):
        other = ZeroTuningConfig.uniform(zerotuning.ModelId("llama", "", 2, 4, 2), 2.0)
        with pytest.raises(ValueError, match=r"layers 2 \(this model: 3\)"):
            attach(llama, other)
        assert llama.config._attn_implementation == "sdpa"

    def test_attached_twice(self, llama):
        attach(llama, some_config(llama))
        with pytest.raises(RuntimeError, match="already attached"):
            attach(llama, some_config(llama))
        detach(llama)
        detach(llama)

    def test_implementation_changed_beneath(self, llama):
        before = logits(llama, tokens())
        with apply(llama, some_config(llama)):
            llama.set_attn_implementation("eager")
            with pytest.raises(RuntimeError, match="implementation was set to 'eager' while a configuration"):
                logits(llama, tokens())
        assert torch.equal(logits(llama, tokens()), before)

    def test_models_that_share_a_config_object(self, llama):
        twin = type(llama)(llama.config).eval()
        twin.load_state_dict(llama.state_dict())
        before = logits(twin, tokens())
        with apply(llama, some_config(llama)):
            tuned = logits(llama, tokens())
            with apply(twin, some_config(llama)):
                assert torch.equal(logits(twin, tokens()), tuned)
            assert torch.equal(logits(twin, tokens()), before)
            assert torch.equal(logits(llama, tokens()), tuned)
        assert llama.config._attn_implementation == "sdpa"

    def test_no_configuration(self, llama):
        with pytest.raises(ValueError, match="empty"):
            attach(llama, [])

    def test_custom_attention_names_the_way_out(self, llama):
        class Custom(LlamaForCausalLM):
            pass

        custom = Custom(LlamaConfig(**{**llama.config.to_dict(), "num_hidden_layers": 1}))
        custom.config._attn_implementation_internal = "my_kernel"
        with pytest.raises(ValueError, match='attn_implementation="eager"'):
            attach(custom, ZeroTuningConfig.uniform(custom, 2.0))

    def test_layer_without_its_decoder(self, llama):
        states = torch.randn(2, 5, llama.config.hidden_size)
        rotary = llama.model.rotary_emb(states, torch.arange(5)[None])
        with apply(llama, some_config(llama)):
            logits(llama, tokens(2, 5))
            with pytest.raises(RuntimeError, match="outside a forward of its decoder"):
                llama.model.layers[0](states, position_embeddings=rotary)

    def test_layers_that_their_model_keeps_arguments_from(self):
        from transformers import StableLmConfig, StableLmForCausalLM

        config = StableLmConfig(
            vocab_size=500, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        torch.manual_seed(0)
        model = StableLmForCausalLM(config).eval()
        ids, mask = tokens(1, 6), torch.ones(1, 8, dtype=torch.long)
        mask[:, :2] = 0
        padded = torch.nn.functional.pad(ids, (2, 0))
        plain = logits(model, ids)
        with apply(model, ZeroTuningConfig.uniform(model, 6.0)):
            tuned = logits(model, ids)
            torch.testing.assert_close(logits(model, padded, attention_mask=mask)[:, 2:], tuned, atol=1e-5, rtol=0)
            with pytest.raises(ValueError, match="dimensions"):
                logits(model, ids, attention_mask=mask[None])
            states = torch.randn(1, 6, 32)
            rotary = model.model.rotary_emb(states, torch.arange(6)[None])
            with pytest.raises(RuntimeError, match="outside a forward of its decoder"):
                model.model.layers[0](states, position_embeddings=rotary)
            # A forward within another stands for two threads.
            handle = model.model.layers[1].register_forward_pre_hook(lambda *_: logits(model, ids))
            with pytest.raises(RuntimeError, match="several forwards run at once"):
                logits(model, ids)
            handle.remove()
            assert torch.equal(logits(model, ids), tuned)
        assert (tuned - plain).abs().max() > 1e-4

    def test_what_sdpa_cannot_do_names_the_way_out(self, llama):
        # Whatever the model passes on to its attention arrives there.
        with (
            apply(llama, ZeroTuningConfig.uniform(llama, 2.0)),
            pytest.raises(ValueError, match=r"softcap.*attn_implementation=\"eager\""),
        ):
            logits(llama, tokens(), softcap=30.0)

    def test_encoder_decoder(self):
        from transformers import T5Config, T5ForConditionalGeneration

        model = T5ForConditionalGeneration(
            T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
        )
        with pytest.raises(ValueError, match="decoder"):
            ZeroTuningConfig.uniform(model, 2.0)


def test_dropout_in_training_keeps_the_operator_exact():
    model = tiny_model("llama", attention_dropout=0.5).train()
    ids = tokens()
    config = ZeroTuningConfig.uniform(model, 1e30)
    # With all weight on the initial token a kept weight is 2 v_0 and a dropped one 0: nothing in between.
    seen = []
    module = model.model.layers[0].self_attn

    def record(_, args):
        seen.append(args[0].detach())

    handle = module.o_proj.register_forward_pre_hook(record)
    torch.manual_seed(0)
    with apply(model, config):
        model(input_ids=ids)
    handle.remove()
    per_head = seen[0].unflatten(-1, (HEADS, -1))
    first = model.model.layers[0]
    value = module.v_proj(first.input_layernorm(model.model.embed_tokens(ids[:, :1]))).unflatten(-1, (2, -1))
    expected = 2 * value.repeat_interleave(2, dim=2).expand_as(per_head)
    kept = (per_head - expected).abs().amax(-1) < 1e-4
    dropped = per_head.abs().amax(-1) < 1e-4
    assert (kept | dropped).all()
    assert kept.any()
    assert dropped.any()


class TestForwardsThatOverlap:
    """Each forward knows its own initial tokens: three rows of padding are not taken for one of another forward."""

    def masks(self):
        masks = [torch.ones(2, 10, dtype=torch.long) for _ in range(2)]
        masks[0][:, :3] = 0
        return masks

    def test_in_threads(self, llama):
        ids, masks = tokens(2, 10), self.masks()
        both_begun = threading.Barrier(2)
        found = {}

        def wait(*_):
            # Within the forward, between the layers.
            both_begun.wait(timeout=60)

        def run(index):
            found[index] = logits(llama, ids, attention_mask=masks[index])

        with apply(llama, some_config(llama)):
            expected = [logits(llama, ids, attention_mask=mask) for mask in masks]
            handle = llama.model.layers[1].register_forward_pre_hook(wait)
            threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            handle.remove()
        for index in range(2):
            assert torch.equal(found[index][:, 3:], expected[index][:, 3:])

    def test_two_forwards_before_the_backward_with_checkpoints(self):
        model, ids = tiny_model("llama").train(), tokens(2, 10)

        def gradients():
            model.zero_grad()
            with apply(model, some_config(model)):
                losses = [model(ids, attention_mask=mask, labels=ids, use_cache=False).loss for mask in self.masks()]
                (losses[0] + 2 * losses[1]).backward()
            return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

        expected = gradients()
        layer = type(model.model.layers[0])
        for each in model.modules():
            if isinstance(each, layer):  # what `gradient_checkpointing_enable` sets, whose name changes
                each.gradient_checkpointing = True
                each._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
        torch.testing.assert_close(gradients(), expected)


def test_gradients_reach_the_weights(llama):
    ids = tokens()
    with apply(llama, some_config(llama)):
        llama(input_ids=ids, labels=ids).loss.backward()
        analytic = llama.model.layers[0].self_attn.q_proj.weight.grad.clone()
    eager = tiny_model("llama", attn_implementation="eager")
    with apply(eager, some_config(eager)):
        eager(input_ids=ids, labels=ids).loss.backward()
    close(analytic, eager.model.layers[0].self_attn.q_proj.weight.grad)


def test_a_copy_of_an_attached_model_is_vanilla(llama):
    ids = tokens()
    before = logits(llama, ids)
    with apply(llama, some_config(llama)):
        twin = copy.deepcopy(llama)
        tuned = logits(llama, ids)
        assert torch.equal(logits(twin, ids), before)
        cache = twin(input_ids=ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="another configuration"):
            llama(input_ids=ids[:, :1], past_key_values=cache)
    with apply(twin, some_config(llama)):
        assert torch.equal(logits(twin, ids), tuned)
    assert torch.equal(logits(twin, ids), before)
    assert twin.config._attn_implementation == "sdpa"


def test_tokenizer_generation_through_the_public_door(llama):
    tokenizer = tiny_tokenizer()
    batch = tokenizer(
        ["a short one", "a somewhat longer prompt"], padding=True, padding_side="left", return_tensors="pt"
    )
    batch.pop("token_type_ids", None)
    with apply(llama, ZeroTuningConfig.uniform(llama, 2.0)) as tuned:
        together = tuned.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        single = tokenizer("a short one", return_tensors="pt")
        single.pop("token_type_ids", None)
        alone = tuned.generate(**single, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert together[0, -4:].tolist() == alone[0, -4:].tolist()


class TestUnchangedAfterExit(ModelUnchangedAfterExit):
    def context(self, model):
        return apply(model, some_config(model))


class TestEagerUnchangedAfterExit(TestUnchangedAfterExit):
    def model(self):
        return tiny_model("llama", attn_implementation="eager")


# In the first piece of a prompt a row may still be padding altogether.
@pytest.mark.filterwarnings("ignore:rows .* are all padding")
class TestBatches(BatchConsistency):
    def context(self, model):
        return apply(model, some_config(model))


class TestBatchesWithWindows(TestBatches):
    def model(self):
        return tiny_model("mistral", dtype=torch.float64)


def test_first_column_of_a_padded_batch_would_do_nothing(llama):
    """What taking column 0 for the initial token comes to: the vanilla logits."""
    ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), tokens(1, 11)], dim=1)
    mask = (torch.arange(16) >= 5).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    vanilla = logits(llama, ids, attention_mask=mask, position_ids=positions)[:, 5:]
    with apply(llama, some_config(llama)):
        tuned = logits(llama, ids, attention_mask=mask, position_ids=positions)[:, 5:]
        unmasked = logits(llama, tokens(1, 11))
    assert (tuned - vanilla).abs().max() > 1e-3
    torch.testing.assert_close(tuned, unmasked, atol=1e-5, rtol=0)
