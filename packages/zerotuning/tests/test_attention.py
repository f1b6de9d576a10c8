"""Every attention implementation, every mode, every exact way."""

import contextlib
import math
import warnings

import pytest
import torch
import zerotuning
from fake_flash import pretend
from separata_testing.models import WINDOW, tiny_model
from transformers import DynamicCache, StaticCache
from zerotuning import ZeroTuningConfig, apply, reweight
from zerotuning.operator import scale_keys, scale_queries

IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2")
MODES = ("exact", "key", "query")


@pytest.fixture
def load(monkeypatch):
    """Loads tiny models under any implementation: flash kernels are stood in for, flex runs uncompiled."""
    with contextlib.ExitStack() as stack:

        def load(implementation, architecture="llama", dtype=None, **config):
            # In float64 the eager attention of transformers gives nan to padding: its softmax is in float32.
            dtype = dtype or (torch.float32 if implementation == "eager" else torch.float64)
            model = tiny_model(architecture, dtype=dtype, **config)
            if implementation == "flash_attention_2":
                pretend(monkeypatch)
            elif implementation == "flex_attention":
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile")
            model.config._attn_implementation = implementation
            return model

        yield load


def tokens(rows=2, length=12, seed=0):
    return torch.randint(4, 260, (rows, length), generator=torch.Generator().manual_seed(seed))


def config_of(model, mode="exact", seed=0):
    """Random factors; equal within a group of query heads, so that every mode takes them."""
    values = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed)).repeat_interleave(2, dim=1)
    return ZeroTuningConfig(values, zerotuning.ModelId.of(model), "layer_head", mode)


@torch.no_grad()
def logits(model, ids, **kwargs):
    return model(input_ids=ids, **kwargs).logits


def close(a, b, atol=5e-5):
    # For float32, in which eager attention and some sums of FlexAttention are computed.
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-5, check_dtype=False)


def by_definition(ids, config, monkeypatch, **kwargs):
    """A model whose eager attention is written out with the mode in the middle of it."""
    import transformers.models.llama.modeling_llama as modeling

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
        log_gamma = config.log_gamma[module.layer_idx].to(query.dtype)
        if config.mode == "query":
            query = scale_queries(query, log_gamma)
        if config.mode == "key":
            key = scale_keys(key, log_gamma[::2])
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = query @ key.transpose(2, 3) * scaling
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        if config.mode == "exact":
            weights = reweight(weights, log_gamma)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    with monkeypatch.context() as patch:
        patch.setattr(modeling, "eager_attention_forward", attention)
        return logits(tiny_model("llama", dtype=torch.float64, attn_implementation="eager"), ids)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestEveryImplementationAndMode:
    def test_equals_the_definition_in_every_layer(self, load, implementation, mode, monkeypatch):
        model, ids = load(implementation), tokens()
        config = config_of(model, mode)
        with apply(model, config):
            found = logits(model, ids)
        close(found, by_definition(ids, config, monkeypatch))
        assert (found - logits(model, ids)).abs().max() > 1e-3

    def test_bit_identical_at_gamma_one_and_afterwards(self, load, implementation, mode):
        model, ids = load(implementation), tokens()
        before = logits(model, ids)
        with apply(model, ZeroTuningConfig.uniform(model, 1.0, mode=mode)):
            assert torch.equal(logits(model, ids), before)
        with contextlib.suppress(RuntimeError), apply(model, config_of(model, mode)):
            assert not torch.equal(logits(model, ids), before)
            raise RuntimeError
        assert torch.equal(logits(model, ids), before)
        assert model.config._attn_implementation == implementation

    def test_padding_windows_and_a_cache(self, load, implementation, mode):
        model = load(implementation, "mistral")
        ids = tokens(2, WINDOW + 7)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with apply(model, config_of(model, mode)):
            alone = logits(model, ids[:1, 3:]), logits(model, ids[1:])
            full = logits(model, ids, attention_mask=mask, position_ids=positions)
            parts, cache = [], DynamicCache(config=model.config)
            for first, last in [(0, 6), (6, 11), (11, 12), (12, 13), (13, 14), (14, 15)]:
                arguments = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:last]}
                parts.append(logits(model, ids[:, first:last], past_key_values=cache, use_cache=True, **arguments))
            right = logits(model, ids, attention_mask=mask.flip(-1))
        stepwise = torch.cat(parts, dim=1)
        for found in (full, stepwise):
            close(found[0, 3:], alone[0][0])
            close(found[1], alone[1][0])
        close(right[1], alone[1][0])

    def test_static_cache(self, load, implementation, mode):
        model, ids = load(implementation), tokens(2, 9)
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        with apply(model, config_of(model, mode)):
            expected = logits(model, ids, attention_mask=mask)
            cache, parts = StaticCache(config=model.config, max_cache_len=16), []
            for first, last in [(0, 7), (7, 8), (8, 9)]:
                arguments = {"attention_mask": mask[:, :last], "past_key_values": cache, "use_cache": True}
                parts.append(logits(model, ids[:, first:last], **arguments))
        found = torch.cat(parts, dim=1)
        close(found[0, 2:], expected[0, 2:])
        close(found[1], expected[1])

    def test_rows_with_their_own_configurations(self, load, implementation, mode):
        model, ids = load(implementation), tokens(2)
        configs = [config_of(model, mode, seed) for seed in (1, 2)]
        with apply(model, configs):
            together = logits(model, ids)
        for row, config in enumerate(configs):
            with apply(model, config):
                close(together[row], logits(model, ids[row : row + 1])[0])

    def test_packed_sequences_equal_separate_runs(self, load, implementation, mode):
        model, ids = load(implementation), tokens(1, 11)
        lengths = (4, 2, 5)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        with apply(model, config_of(model, mode)):
            packed = logits(model, ids, position_ids=positions, use_cache=False)
            alone = [logits(model, part) for part in ids.split(lengths, dim=1)]
        close(packed, torch.cat(alone, dim=1))


class TestPacked:
    def test_rows_may_be_cut_differently(self, load):
        model, ids = load("sdpa"), tokens(2, 6)
        positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3]])
        with apply(model, config_of(model)):
            packed = logits(model, ids, position_ids=positions, use_cache=False)
            close(packed[0], logits(model, ids[:1])[0])
            close(packed[1, 2:], logits(model, ids[1:, 2:])[0])

    @pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
    def test_sequences_that_are_not_kept_apart_are_refused(self, load, implementation):
        model = load(implementation)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
        with apply(model, config_of(model)), pytest.raises(ValueError, match="use_cache=False"):
            logits(model, tokens(1, 6), position_ids=positions, use_cache=True)

    def test_flash_takes_lengths_over_several_rows(self, load):
        model, ids = load("flash_attention_2"), tokens(2, 6)
        ends = torch.tensor([0, 2, 6, 12], dtype=torch.int32)
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 6, "max_length_k": 6}
        positions = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
        with apply(model, config_of(model)):
            packed = logits(model, ids, position_ids=positions, **lengths)
            close(packed[0, 2:], logits(model, ids[:1, 2:])[0])
            close(packed[1], logits(model, ids[1:])[0])
            with pytest.raises(ValueError, match="batch of 2 rows"):
                logits(model, ids, position_ids=positions)

    def test_decoding_after_packing_is_refused(self, load):
        model, ids = load("flash_attention_2"), tokens(1, 6)
        with torch.no_grad(), apply(model, config_of(model)):
            cache = model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=True)
            with pytest.raises(ValueError, match="hold packed sequences"):
                logits(model, ids[:, :1], past_key_values=cache.past_key_values)

    def test_closed_form_of_eager_attention_takes_one_initial_token(self, load):
        model = load("eager")
        config = ZeroTuningConfig.uniform(model, 2.0)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
        with apply(model, config, path="post_softmax"):
            exact = logits(model, tokens(1, 6), position_ids=positions, use_cache=False)
        with apply(model, config):
            close(logits(model, tokens(1, 6), position_ids=positions, use_cache=False), exact)
        with apply(model, config, path="closed_form"), pytest.raises(ValueError, match="one initial token"):
            logits(model, tokens(1, 6), position_ids=positions, use_cache=False)


PATHS = [
    ("sdpa", "auto"),
    ("sdpa", "bias"),
    ("sdpa", "closed_form"),
    ("sdpa", "augmented"),
    ("eager", "auto"),
    ("eager", "bias"),
    ("eager", "closed_form"),
    ("eager", "post_softmax"),
    ("flex_attention", "augmented"),
    ("flash_attention_2", "augmented"),
]


class TestPaths:
    @pytest.mark.parametrize(("implementation", "path"), PATHS)
    def test_all_compute_the_same(self, load, implementation, path, monkeypatch):
        model, ids = load(implementation), tokens()
        config = config_of(model)
        with apply(model, config, path=path):
            found = logits(model, ids)
        close(found, by_definition(ids, config, monkeypatch), atol=1e-9 if implementation == "sdpa" else 5e-5)

    @pytest.mark.parametrize(("implementation", "path"), PATHS)
    def test_padded_rows(self, load, implementation, path):
        model, ids = load(implementation), tokens()
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        with apply(model, config_of(model), path=path):
            padded = logits(model, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
            close(padded[0, 5:], logits(model, ids[:1, 5:])[0])

    @pytest.mark.parametrize(("implementation", "path"), [*PATHS[:4], *PATHS[6:8]])
    def test_bfloat16_stays_near(self, load, implementation, path):
        ids = tokens()
        exact = load("sdpa")
        half = load(implementation, dtype=torch.bfloat16)
        config = ZeroTuningConfig.per_head(exact, [2.0, 0.5, 1.0, 3.0])
        vanilla_error = (logits(half, ids).double() - logits(exact, ids)).abs().max()
        with apply(exact, config), apply(half, config, path=path):
            assert (logits(half, ids).double() - logits(exact, ids)).abs().max() < 2 * vanilla_error

    def test_what_is_not_offered_names_what_is(self, load):
        model = load("sdpa")
        config = ZeroTuningConfig.uniform(model, 2.0)
        with pytest.raises(ValueError, match=r"post_softmax.*attn_implementation=\"eager\""):
            apply(model, config, path="post_softmax").__enter__()
        with pytest.raises(ValueError, match=r"augmented.*not offered with attn_implementation='eager'.*sdpa"):
            apply(load("eager"), config, path="augmented").__enter__()
        with pytest.raises(ValueError, match="mode='key' has only path='auto'"):
            apply(model, ZeroTuningConfig.uniform(model, 2.0, mode="key"), path="bias").__enter__()
        with pytest.raises(ValueError, match="path='fast' is unknown"):
            zerotuning.attention.check_path("fast", "exact", "sdpa")
        assert model.config._attn_implementation == "sdpa"

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_closed_form_refuses_small_factors_and_auto_does_not(self, load, implementation):
        model = load(implementation, dtype=torch.float32)
        config = ZeroTuningConfig.per_layer_head(model, {(1, 2): 1e-3})
        with pytest.raises(ValueError, match=r"below 0.0156.*layer 1, head 2 is 0.001"):
            apply(model, config, path="closed_form").__enter__()
        with apply(model, config):
            assert logits(model, tokens()).isfinite().all()

    def test_dropout(self, load):
        model = load("sdpa", attention_dropout=0.5).train()
        config = ZeroTuningConfig.uniform(model, 2.0)
        with apply(model, config, path="closed_form"), pytest.raises(ValueError, match="not exact with dropout"):
            logits(model, tokens())
        eager = load("eager", attention_dropout=0.5).train()
        with apply(eager, config, path="post_softmax"), pytest.raises(ValueError, match="dropout has acted"):
            logits(eager, tokens())
        with apply(eager, config):
            logits(eager, tokens())


class TestOtherModels:
    def gpt_oss(self):
        from transformers import GptOssConfig, GptOssForCausalLM

        torch.manual_seed(0)
        config = GptOssConfig(
            vocab_size=272,
            hidden_size=32,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention"],
            num_local_experts=2,
            num_experts_per_tok=1,
            initializer_range=0.3,
            pad_token_id=0,
            attn_implementation="eager",
        )
        model = GptOssForCausalLM(config).eval()
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
        return model

    @torch.no_grad()
    def test_learned_sinks_stay_in_the_denominator(self):
        model, ids = self.gpt_oss(), tokens(2, 10)
        plain = model(ids, output_attentions=True).attentions[0]
        assert plain.sum(-1).mean() < 0.95
        config = ZeroTuningConfig.per_head(model, [3.0, 0.2, 1.0, 5.0])
        expected = reweight(plain, config.log_gamma[0])
        found = {}
        for path in ("auto", "post_softmax", "closed_form"):
            with apply(model, config, path=path):
                output = model(ids, output_attentions=True)
            found[path] = output.logits
            if path != "closed_form":
                close(output.attentions[0], expected)
            close(output.logits, found["auto"], atol=1e-4)
        assert (found["auto"] - model(ids).logits).abs().max() > 1e-3

    def test_soft_caps_bend_a_bias_that_comes_before_them(self, load):
        model = load("flex_attention", "gemma2")
        with (
            apply(model, ZeroTuningConfig.uniform(model, 2.0)),
            pytest.raises(ValueError, match=r"softcap.*attn_implementation=\"eager\""),
        ):
            logits(model, tokens())
        with apply(model, ZeroTuningConfig.uniform(model, 2.0, mode="query")):
            logits(model, tokens())

    def test_continuous_batching_is_refused(self, load):
        model = load("sdpa")
        with apply(model, ZeroTuningConfig.uniform(model, 2.0)), pytest.raises(ValueError, match="continuous batching"):
            logits(model, tokens(), cache=object())

    def test_float32_states_of_a_16_bit_model_lose_no_bias(self, load):
        # As layers do that were left in float32: the flash function rounds what it is given.
        model = load("flash_attention_2", dtype=torch.bfloat16)
        config = ZeroTuningConfig.uniform(model, 1.5)
        for name in ("q_proj", "k_proj", "v_proj"):
            for layer in model.model.layers:
                layer.self_attn.get_submodule(name).register_forward_hook(lambda _, __, output: output.float())
        widths = []
        with pytest.MonkeyPatch.context() as patch:
            import zerotuning.attention as ours

            augment = ours.augment_states

            def watched(*args, **kwargs):
                wide = augment(*args, **kwargs)
                carriers = wide[0][..., args[0].shape[-1] :].flatten(0, 2).any(dim=0)
                widths.append((wide[0].dtype, int(carriers.sum())))
                return wide

            patch.setattr(ours, "augment_states", watched)
            with contextlib.suppress(RuntimeError), apply(model, config):  # the rest of the model may not take them
                logits(model, tokens())
        assert widths
        assert all(dtype == torch.bfloat16 and parts > 1 for dtype, parts in widths)


class TestGeneration:
    @pytest.mark.parametrize("mode", MODES)
    def test_assisted_and_chunked_generation_change_nothing(self, load, mode):
        model, ids = load("sdpa"), tokens(1, 9)
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        with apply(model, config_of(model, mode)):
            expected = model.generate(ids, **options)
            assisted = model.generate(ids, **options, assistant_model=tiny_model("llama", dtype=torch.float64, seed=1))
            cache = DynamicCache(config=model.config)
            chunked = model.generate(ids, **options, prefill_chunk_size=4, past_key_values=cache)
        assert torch.equal(assisted, expected)
        assert torch.equal(chunked, expected)

    def test_modes_do_not_mix(self, load):
        model = load("sdpa")
        with pytest.raises(ValueError, match="modes 'key' and 'exact'"):
            apply(model, [config_of(model, "key"), config_of(model)]).__enter__()

    def test_a_cache_of_another_mode_is_refused(self, load):
        model, ids = load("sdpa"), tokens()
        with torch.no_grad(), apply(model, config_of(model, "key")):
            cache = model(ids, use_cache=True).past_key_values
        with apply(model, config_of(model, "query")), pytest.raises(ValueError, match="another configuration"):
            logits(model, ids[:, :1], past_key_values=cache)
