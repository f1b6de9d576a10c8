"""A vLLM engine under a configuration computes what the model does under it in transformers.

Engines take half a minute each to start, so four of them, each run once over the same requests, serve all the tests.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import zerotuning
from zerotuning import ZeroTuningConfig
from zerotuning import vllm as serving
from zerotuning.config import ModelId

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.real_model, pytest.mark.slow]

# Heads 0 to 2 share a key/value head, likewise 3 to 5 and 6 to 8.
GAMMAS = (0.1, 3.0, 1.0, 10.0, 1.0, 0.3, 2.0, 0.5, 6.0)
STORY = "Once upon a time there was a fox who lived in a forest near a river, and every day it went to the water. "
PROMPTS = (
    "The capital of France is",
    "Water freezes at",
    "Chapter    10: 1, 2, 3, 4,",
    STORY * 3 + "One day, when it was so cold that the river",
)
SHARING = STORY * 3 + "Then the old bear"
LENGTH = 16
STEP = 32
BLOCK = 32
BLOCKS = 7
"""One is vLLM's own, and the others are one too few for all the prompts with their answers."""

LAYERS_OF_SMOLLM2 = 30


def folder_of(dtype):
    from separata_embedded import smollm2_folder

    return str(smollm2_folder(dtype))


@pytest.fixture(scope="module", autouse=True)
def environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        yield


class Reference:
    """The model in transformers."""

    def __init__(self, dtype):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = folder_of(dtype)
        self.model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=getattr(torch, dtype))
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
        self.config = ZeroTuningConfig.per_head(self.model, GAMMAS)

    @torch.no_grad()
    def greedy(self, prompts, config):
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True)
        with zerotuning.apply(self.model, config):
            tokens = self.model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
        return tokens[:, inputs["input_ids"].shape[1] :].tolist()

    @torch.no_grad()
    def log_probs(self, prompt, continuation, config=None):
        """Of every next token, `[LENGTH, V]`, at the places where the continuation's tokens were chosen."""
        tokens = torch.tensor([[*self.tokenizer(prompt)["input_ids"], *continuation]])
        with contextlib.nullcontext() if config is None else zerotuning.apply(self.model, config):
            logits = self.model(tokens).logits[0, -len(continuation) - 1 : -1]
        return logits.float().log_softmax(dim=-1)


def counts_of(engine):
    return {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}


def serve(dtype, arguments):
    """What an engine answers: the prompts in one batch, and then a prompt that begins like one of them."""
    import vllm

    engine = vllm.LLM(
        folder_of(dtype),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=4 * BLOCK,
        num_gpu_blocks_override=BLOCKS,
        max_num_seqs=4,
        max_num_batched_tokens=STEP,
        block_size=BLOCK,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **arguments,
    )
    try:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, logprobs=1)
        answers = engine.generate(list(PROMPTS), sampling, use_tqdm=False)
        before = counts_of(engine)
        answers += engine.generate([SHARING], sampling, use_tqdm=False)
        reports = engine.collective_rpc("tuning_report") if arguments else None
        after = counts_of(engine)
    finally:
        # Left to the interpreter's exit, the engine's process would be killed after a wait.
        engine.llm_engine.engine_core.shutdown()
    return SimpleNamespace(
        tokens=[list(answer.outputs[0].token_ids) for answer in answers],
        log_probs=[
            [step[token].logprob for token, step in zip(a.outputs[0].token_ids, a.outputs[0].logprobs, strict=True)]
            for a in answers
        ],
        prompt_tokens=[len(answer.prompt_token_ids) for answer in answers],
        hits=after["vllm:prefix_cache_hits"] - before["vllm:prefix_cache_hits"],
        preemptions=before["vllm:num_preemptions"],
        reports=reports,
    )


def saved(config, folder):
    config.save(folder / "config.json")
    return serving.engine_arguments(folder / "config.json")


@pytest.fixture(scope="module")
def reference():
    return Reference("float32")


@pytest.fixture(scope="module")
def tuned(reference, tmp_path_factory):
    return serve("float32", saved(reference.config, tmp_path_factory.mktemp("tuned")))


@pytest.fixture(scope="module")
def plain():
    return serve("float32", {})


def test_greedy_tokens_are_those_of_transformers(reference, tuned):
    prompts = [*PROMPTS, SHARING]
    assert tuned.tokens == reference.greedy(prompts, reference.config)
    for prompt, tokens, log_probs in zip(prompts, tuned.tokens, tuned.log_probs, strict=True):
        expected = reference.log_probs(prompt, tokens, reference.config)
        best, second = expected.topk(2, dim=-1).values.unbind(dim=-1)
        # No choice is so close that equality would be luck.
        assert (best - second).min() > 2e-3
        torch.testing.assert_close(torch.tensor(log_probs), best, atol=1e-3, rtol=0)


def test_the_configuration_acts(reference, tuned, plain):
    assert tuned.tokens != plain.tokens
    for prompt, tokens, log_probs in zip([*PROMPTS, SHARING], tuned.tokens, tuned.log_probs, strict=True):
        without = reference.log_probs(prompt, tokens).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (torch.tensor(log_probs) - without).abs().max() > 0.05


def test_a_long_prompt_was_computed_in_chunks_and_a_shared_prefix_once(tuned):
    # No step computes more than STEP tokens.
    assert max(tuned.prompt_tokens) > 2 * STEP
    assert tuned.hits >= BLOCK
    assert len(set(tuned.prompt_tokens)) == len(PROMPTS) + 1


def test_a_sequence_gave_its_blocks_to_another_and_was_computed_again(tuned):
    assert tuned.preemptions >= 1


def test_the_engine_reports_what_it_did(reference, tuned):
    (report,) = tuned.reports
    assert report["mode"] == "exact"
    assert report["fingerprint"] == reference.config.fingerprint
    assert report["layers"] == list(range(LAYERS_OF_SMOLLM2))
    assert report["head_size"] == [64, 80]
    # Two of 4 bytes, 3 key/value heads, 30 layers.
    assert report["cache_bytes_per_token"] == [8 * 3 * 30 * 64, 8 * 3 * 30 * 80]


def test_the_identity_changes_no_bit(reference, plain, tmp_path):
    identity = serve("float32", saved(ZeroTuningConfig.uniform(reference.model, 1.0), tmp_path))
    assert identity.reports[0]["layers"] == []
    assert identity.tokens == plain.tokens
    assert identity.log_probs == plain.log_probs


def test_bfloat16_chooses_within_its_rounding(reference, tmp_path):
    """With a configuration for every other layer, which are then wider than the rest.

    In 16 bit two tokens may tie, so that choices are compared by how far they are from the best one.
    """
    config = ZeroTuningConfig.per_head(reference.model, GAMMAS, layers=range(1, LAYERS_OF_SMOLLM2, 2))
    answer = serve("bfloat16", saved(config, tmp_path))
    assert answer.reports[0]["layers"] == list(range(1, LAYERS_OF_SMOLLM2, 2))
    exact = Reference("bfloat16")
    worst = {}
    for name, under in (("tuned", config), ("plain", None)):
        losses = []
        for prompt, tokens in zip([*PROMPTS, SHARING], answer.tokens, strict=True):
            expected = exact.log_probs(prompt, tokens, under)
            losses.append((expected.max(dim=-1).values - expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max())
        worst[name] = max(losses)
    assert worst["tuned"] <= 0.25
    assert worst["plain"] > 1.0


@pytest.fixture(scope="module")
def one_rank():
    """What vLLM's layers want to find in their process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.utils.network_utils import get_open_port

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        initialize_model_parallel(1)
    yield
    cleanup_dist_env_and_memory()


def engine_config(dtype="float32", **options):
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        folder_of("float32"), dtype=dtype, enforce_eager=True, max_model_len=256, block_size=BLOCK, **options
    )
    return arguments.create_engine_config()


def make_layers(vllm_config, dtype, windows=(None,), **options):
    """Attention layers of vLLM, without a model around them."""
    from vllm.model_executor.layers.attention import Attention

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return [
            Attention(
                9,
                64,
                0.125,
                3,
                cache_config=vllm_config.cache_config,
                prefix=f"model.layers.{index}.attn",
                per_layer_sliding_window=window,
                **options,
            )
            for index, window in enumerate(windows)
        ]
    finally:
        torch.set_default_dtype(before)


def with_caches(vllm_config, layers):
    """The part of a model runner that holds the caches."""
    from vllm.v1.worker.utils import AttentionGroup, customize_attention_spec

    groups = []
    for index, layer in enumerate(layers):
        spec = customize_attention_spec(layer.get_attn_backend(), layer.get_kv_cache_spec(vllm_config))
        group = AttentionGroup(layer.get_attn_backend(), [layer.layer_name], spec, index)
        group.create_metadata_builders(vllm_config, torch.device("cpu"), spec.block_size)
        layer.kv_cache = torch.zeros(4, spec.num_kv_heads, spec.block_size, 2 * spec.head_size, dtype=spec.dtype)
        groups.append([group])
    return SimpleNamespace(attn_groups=groups)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["exact", "key", "query"])
def test_a_layer_computes_each_mode(one_rank, dtype, mode):
    from vllm.config import set_current_vllm_config

    vllm_config = engine_config(dtype)
    config = ZeroTuningConfig.uniform(ModelId("llama", "", 2, 9, 3), 3.0, mode=mode)
    with set_current_vllm_config(vllm_config):
        layers = make_layers(vllm_config, dtype, windows=(None, 3))
        report = serving.tune_layers(vllm_config, config)
        runner = with_caches(vllm_config, layers)
        serving.check_computation(runner, vllm_config)
        assert report["layers"] == [0, 1]
        assert report["head_size"] == [64, 80 if mode == "exact" else 64]
        assert all(not layer.kv_cache.any() for layer in layers)

        # The check has power: it sees an operator that is only a little off.
        queries = serving._Operator.queries
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serving._Operator, "queries", lambda self, query: queries(self, query) * 1.1)
            with pytest.raises(RuntimeError, match="does not compute what it should with heads of width"):
                serving.check_computation(runner, vllm_config)


@pytest.mark.parametrize("mode", ["exact", "key"])
def test_a_trial_run_writes_nothing(one_rank, mode):
    """With a cache and no sequences, as when graphs are captured or another rank has all the requests."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    vllm_config = engine_config()
    config = ZeroTuningConfig.uniform(ModelId("llama", "", 1, 9, 3), 3.0, mode=mode)
    with set_current_vllm_config(vllm_config):
        [layer] = make_layers(vllm_config, "float32")
        serving.tune_layers(vllm_config, config)
        with_caches(vllm_config, [layer])
        slots = torch.full((5,), -1)
        with set_forward_context(None, vllm_config, slot_mapping={layer.layer_name: slots}):
            output = layer(torch.ones(5, 9 * 64), torch.ones(5, 3 * 64), torch.ones(5, 3 * 64))
    assert output.shape == (5, 9 * 64)
    assert not layer.kv_cache.any()


def test_a_layer_with_another_number_of_heads_is_refused(one_rank):
    from vllm.config import set_current_vllm_config

    vllm_config = engine_config()
    with set_current_vllm_config(vllm_config):
        make_layers(vllm_config, "float32")
        config = ZeroTuningConfig.uniform(ModelId("llama", "", 1, 12, 3), 3.0)
        with pytest.raises(ValueError, match="layer 0 has 9 query heads, the configuration is for 12"):
            serving.tune_layers(vllm_config, config)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"logits_soft_cap": 30.0}, "a soft cap on its logits"),
        ({"alibi_slopes": [0.1] * 9}, "ALiBi"),
        ({"sinks": torch.zeros(9)}, "learned sinks"),
        ({"attn_type": "encoder_only"}, "attention of the type"),
    ],
)
def test_layers_that_are_not_covered_are_refused(one_rank, options, told):
    from vllm.config import set_current_vllm_config

    vllm_config = engine_config()
    with set_current_vllm_config(vllm_config):
        make_layers(vllm_config, "float32", **options)
        config = ZeroTuningConfig.uniform(ModelId("llama", "", 1, 9, 3), 3.0)
        with pytest.raises(ValueError, match=f"layer 0 has {told}"):
            serving.tune_layers(vllm_config, config)


def test_an_engine_that_is_not_covered_is_refused():
    config = ZeroTuningConfig.uniform(ModelId("llama", "", 30, 9, 3), 3.0)
    serving.check_engine(engine_config(), config)
    draft = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with pytest.raises(ValueError, match="speculative decoding is not supported"):
        serving.check_engine(engine_config(speculative_config=draft), config)
    other = ZeroTuningConfig.uniform(ModelId("qwen2", "", 24, 14, 2), 3.0)
    told = "model type 'qwen2' .*'llama'.*, layers 24 .*30.*, query heads 14 .*9.*, key/value heads 2 .*3"
    with pytest.raises(ValueError, match=told):
        serving.check_engine(engine_config(), other)


def test_the_worker_refuses_before_it_loads_anything(tmp_path):
    ZeroTuningConfig.uniform(ModelId("llama", "", 4, 9, 3), 3.0).save(tmp_path / "config.json")
    vllm_config = engine_config(**serving.engine_arguments(tmp_path / "config.json"))
    assert vllm_config.parallel_config.worker_cls == f"{serving.__name__}.Worker"
    with pytest.raises(ValueError, match="made for another model: layers 4"):
        serving.Worker(vllm_config, local_rank=0, rank=0, distributed_init_method="")
