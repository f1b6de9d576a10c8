"""Serving, without vLLM: the arithmetic, and the way through stand-ins for what vLLM's worker offers.

The stand-in keeps keys and values in a paged cache and computes attention as vLLM's kernels do, so that batches of
unequal sequences, prefill in chunks, cached prefixes, windows and decoding are there; the real kernels and engine are
in test_vllm_zerotuning.py.
"""

import contextlib
import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zerotuning import ZeroTuningConfig, reweight
from zerotuning import vllm as serving
from zerotuning.config import ModelId

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 16, 8
SCALE = 0.25


@dataclasses.dataclass
class Metadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True


@dataclasses.dataclass(frozen=True)
class Spec:
    head_size: int
    head_size_v: int


class Builder:
    def build(self, common_prefix_len, common_attn_metadata):
        return common_attn_metadata


class Implementation:
    """Attention over a paged cache `[blocks, kv_heads, block, 2 * head_size]`."""

    def __init__(
        self, heads, size, scale, kv_heads, alibi, window, cache_dtype, soft_cap, attn_type, shared, sinks=None
    ):
        self.head_size, self.scale, self.window = size, scale, window
        self.logits_soft_cap, self.alibi_slopes, self.sinks = soft_cap or 0, alibi, sinks
        self.loaded = False

    def process_weights_after_loading(self, dtype):
        self.loaded = True

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        blocks, places = slot_mapping // BLOCK, slot_mapping % BLOCK
        kv_cache[blocks, :, places] = torch.cat([key, value], dim=-1)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None):
        if attn_metadata is None:
            return output.fill_(0)
        starts = attn_metadata.query_start_loc.tolist()
        for row, length in enumerate(attn_metadata.seq_lens.tolist()):
            here = slice(starts[row], starts[row + 1])
            pages = kv_cache[attn_metadata.block_table_tensor[row].long()].transpose(1, 2).flatten(0, 1)[:length]
            keys, values = pages.repeat_interleave(HEADS // KV_HEADS, dim=1).split(self.head_size, dim=-1)
            ages = torch.arange(length - (here.stop - here.start), length)[:, None] - torch.arange(length)
            hidden = (ages < 0) | (ages >= (self.window or length))
            logits = torch.einsum("qhd,khd->hqk", query[here].float(), keys.float()) * self.scale
            weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            output[here] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(output.dtype)
        return output


class Backend:
    forward_includes_kv_cache_update = False
    name = "CPU_ATTN"

    @classmethod
    def get_name(cls):
        return cls.name

    @classmethod
    def supports_head_size(cls, size):
        return size % 16 == 0 and size <= 64

    @classmethod
    def customize_spec(cls, spec):
        return spec


class LayerBase:
    pass


class Attention(nn.Module, LayerBase):
    def __init__(self, index, dtype=torch.float32, window=None, heads=HEADS, kv_heads=KV_HEADS, backend=Backend):
        super().__init__()
        self.layer_name = f"model.layers.{index}.attn"
        self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v = heads, kv_heads, SIZE, SIZE
        self.dtype = self.kv_cache_torch_dtype = dtype
        self.sliding_window, self.kv_cache_dtype, self.attn_type = window, "auto", "decoder"
        self.use_mm_prefix, self.kv_sharing_target_layer_name = False, None
        self.attn_backend = backend
        self.impl = Implementation(heads, SIZE, SCALE, kv_heads, None, window, "auto", None, "decoder", None)
        self.register_buffer("_k_scale", torch.tensor(1.0))

    def allocate(self):
        spec = self.attn_backend.customize_spec(Spec(SIZE, SIZE))
        assert spec.head_size == spec.head_size_v == self.impl.head_size
        self.kv_cache = torch.full((12, KV_HEADS, BLOCK, 2 * spec.head_size), torch.nan, dtype=self.dtype)

    def forward(self, query, key, value):
        context = Attention.context
        states = (each.unflatten(-1, (-1, SIZE)) for each in (query, key, value))
        query, key, value = states
        output = torch.full_like(query, torch.nan)
        slots = context.slot_mapping[self.layer_name]
        self.impl.do_kv_cache_update(self, key, value, self.kv_cache, slots)
        metadata = context.attn_metadata[self.layer_name]
        self.impl.forward(self, query, key, value, self.kv_cache, metadata, output=output, output_scale=None)
        return output.flatten(1)


class Mamba(LayerBase):
    pass


@contextlib.contextmanager
def set_forward_context(attn_metadata, vllm_config, slot_mapping):
    Attention.context = SimpleNamespace(attn_metadata=attn_metadata, slot_mapping=slot_mapping, additional_kwargs={})
    yield
    del Attention.context


class CPUWorker:
    """What the platform's worker does, in the order in which the engine asks for it."""

    def __init__(self, vllm_config, rank):
        self.vllm_config, self.rank = vllm_config, rank
        self.model_runner = SimpleNamespace()

    def load_model(self, *, load_dummy_weights=False):
        return "loaded"

    def initialize_from_config(self, kv_cache_config):
        layers = self.vllm_config.compilation_config.static_forward_context
        for layer in layers.values():
            layer.allocate()
        self.model_runner.attn_groups = [[group(name)] for name in layers]
        return "initialised"


def group(*names):
    return SimpleNamespace(layer_names=list(names), get_metadata_builder=Builder)


PLATFORM = SimpleNamespace(is_cpu=lambda: True, is_cuda_alike=lambda: False, device_name="abacus")
POINTS = {
    "vllm": {"__version__": "0.1"},
    "vllm.config": {"set_current_vllm_config": contextlib.nullcontext},
    "vllm.distributed": {
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
    },
    "vllm.forward_context": {
        "set_forward_context": set_forward_context,
        "get_forward_context": lambda: Attention.context,
    },
    "vllm.logger": {"init_logger": lambda name: SimpleNamespace(info=lambda *values: None)},
    "vllm.model_executor.layers.attention": {"Attention": Attention},
    "vllm.model_executor.layers.attention.attention": {
        "get_attention_context": lambda name: (Attention.context.attn_metadata[name], None, None, None)
    },
    "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": LayerBase},
    "vllm.model_executor.models.utils": {"extract_layer_index": lambda name: int(name.split(".")[2])},
    "vllm.platforms": {"current_platform": PLATFORM},
    "vllm.v1.attention.backend": {
        "AttentionType": SimpleNamespace(DECODER="decoder"),
        "CommonAttentionMetadata": Metadata,
    },
    "vllm.v1.worker.cpu_worker": {"CPUWorker": CPUWorker},
}


@pytest.fixture
def points(monkeypatch):
    """The stand-ins in the place of vLLM's modules."""
    for name, members in POINTS.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    caches = (serving._point, serving._worker_class)
    for cache in caches:
        cache.cache_clear()
    yield monkeypatch
    for cache in caches:
        cache.cache_clear()


def engine(*layers, **changes):
    text = SimpleNamespace(model_type="llama", num_attention_heads=HEADS)
    model = SimpleNamespace(
        hf_text_config=text,
        hf_config=text,
        dtype=torch.float32,
        get_total_num_hidden_layers=lambda: max(1, len(layers)),
        get_total_num_kv_heads=lambda: KV_HEADS,
    )
    parallel = dict.fromkeys(
        ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size"), 1
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(**{"use_ubatching": False, **parallel, **changes.get("parallel", {})}),
        compilation_config=SimpleNamespace(
            static_forward_context={layer.layer_name: layer for layer in layers},
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: changes.get("graphs", False)),
        ),
        speculative_config=changes.get("speculative"),
        kv_transfer_config=changes.get("transfer"),
        additional_config=changes.get("additional", {}),
    )


def identity(layers=1, **changes):
    return dataclasses.replace(ModelId("llama", "", layers, HEADS, KV_HEADS), **changes)


def factors(mode, layers=1):
    gammas = [0.2, 3.0, 1.0, 8.0, 0.5, 1.0] if mode != "key" else [0.2] * 3 + [3.0] * 3
    return ZeroTuningConfig.per_head(identity(layers), gammas, mode=mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(log_gamma=st.floats(-80, 80, width=32), scale=st.sampled_from([0.125, 0.0883883, 1.0]))
def test_the_parts_of_the_bias_add_up_to_it(dtype, log_gamma, scale):
    wanted = torch.tensor([log_gamma, 0.0])
    bias = serving.query_bias(wanted, scale, dtype, 8)
    assert bias.dtype == dtype
    total = bias.double().sum(dim=1)
    # Below the smallest normal number of float16, whose parts are that coarse, nothing is to be had.
    assert abs(total[0] * scale - log_gamma) <= max(2**-22 * abs(log_gamma), 1e-7)
    assert total[1] == 0
    assert not bias[:, serving.added_columns(dtype) :].any()


def test_huge_factors_are_clamped():
    assert serving.query_bias(torch.tensor([500.0, -500.0]), 1.0, torch.float32, 1).flatten().tolist() == [80, -80]


@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=5), padding=st.integers(0, 3)
)
def test_initial_tokens_are_those_before_which_nothing_was_computed(rows, padding):
    """Rows of `(tokens in this step, tokens before it)`; a row without tokens is padding."""
    flags = [past == 0 and place == 0 for count, past in rows for place in range(count)]
    start = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0).int()
    lens = torch.tensor([count + past if count else 0 for count, past in rows], dtype=torch.int32)
    found = serving.initial_tokens(start, lens, len(flags) + padding)
    assert found.tolist() == flags + [False] * padding


def test_heads_become_no_wider_than_they_must():
    def some(size):
        return size in (64, 80, 96)

    assert serving.wider_head(64, 3, some) == 80
    assert serving.wider_head(64, 1, lambda size: True) == 72
    assert serving.wider_head(64, 3, some, wanted=96) == 96
    with pytest.raises(ValueError, match="head_size=100 is not possible; use one of 80, 96"):
        serving.wider_head(64, 3, some, wanted=100)
    with pytest.raises(ValueError, match="take no head size from 259 up; the model's is 256"):
        serving.wider_head(256, 3, lambda size: size <= 256)


def test_engine_arguments_name_worker_and_file(tmp_path, monkeypatch):
    factors("exact").save(tmp_path / "c.json")
    monkeypatch.chdir(tmp_path)
    arguments = serving.engine_arguments("c.json")
    assert arguments["worker_cls"].endswith("zerotuning.vllm.Worker")
    ((key, value),) = arguments["additional_config"].items()
    assert key.endswith("zerotuning")
    assert value == str(tmp_path / "c.json")
    ((_, value),) = serving.engine_arguments("c.json", head_size=96)["additional_config"].items()
    assert value == {"config": str(tmp_path / "c.json"), "head_size": 96}


def test_engine_arguments_refuse_what_would_fail_later(tmp_path):
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ValueError, match="not a complete JSON file"):
        serving.engine_arguments(tmp_path / "c.json")
    with pytest.raises(FileNotFoundError):
        serving.engine_arguments(tmp_path / "none.json")
    factors("exact").save(tmp_path / "c.json")
    with pytest.raises(ValueError, match="head_size is -1; it must be a positive number"):
        serving.engine_arguments(tmp_path / "c.json", head_size=-1)


class Sequences:
    """Random states of some sequences, computed step by step in a layer, and what should come out."""

    def __init__(self, layer, lengths, shared=0):
        generator = torch.Generator().manual_seed(7)
        self.layer = layer
        self.states = [
            [
                torch.randn(length, heads, SIZE, generator=generator).to(layer.dtype)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            ]
            for length in lengths
        ]
        # Each has blocks of its own; the last sequence begins like the first one and uses its first blocks.
        self.blocks = [[4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3] for row in range(len(lengths))]
        if shared:
            for first, last in zip(self.states[0], self.states[-1], strict=True):
                last[:shared] = first[:shared]
            self.blocks[-1][: shared // BLOCK] = self.blocks[0][: shared // BLOCK]
        self.outputs = [[] for _ in lengths]

    def step(self, *stretches):
        """Computes `(row, begin, end)` stretches together."""
        counts = [end - begin for _, begin, end in stretches]
        start = torch.tensor([0, *counts]).cumsum(0).int()
        slots = torch.tensor(
            [
                self.blocks[row][place // BLOCK] * BLOCK + place % BLOCK
                for row, begin, end in stretches
                for place in range(begin, end)
            ]
        )
        ends = torch.tensor([end for _, _, end in stretches], dtype=torch.int32)
        table = torch.tensor([self.blocks[row] for row, _, _ in stretches], dtype=torch.int32)
        metadata = Metadata(start, start, ends, len(counts), sum(counts), max(counts), int(ends.max()), table, slots)
        states = (
            torch.cat([self.states[row][which][begin:end] for row, begin, end in stretches]).flatten(1)
            for which in range(3)
        )
        name = self.layer.layer_name
        with set_forward_context({name: metadata}, None, {name: slots}):
            output = self.layer(*states).unflatten(-1, (HEADS, SIZE))
        for (row, _, _), part in zip(stretches, output.split(counts), strict=True):
            self.outputs[row].append(part)

    def expected(self, row, config):
        """By the definition: the weights, changed after the softmax, or states that are scaled."""
        query, key, value = (each.double() for each in self.states[row])
        log_gamma = config.log_gamma[0].double()
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (key, value))
        if config.mode == "query":
            query = query * log_gamma.exp()[:, None]
        if config.mode == "key":
            key[0] *= log_gamma.exp()[:, None]
        ages = torch.arange(len(query))[:, None] - torch.arange(len(query))
        window = self.layer.sliding_window or len(query)
        logits = torch.einsum("qhd,khd->hqk", query, key) * SCALE
        weights = logits.masked_fill((ages < 0) | (ages >= window), -torch.inf).softmax(dim=-1)
        if config.mode == "exact":
            weights = reweight(weights[None], log_gamma)[0]
        return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["exact", "key", "query"])
def test_steps_of_unequal_sequences_compute_the_definition(points, mode, dtype, window):
    layer = Attention(0, dtype, window)
    config = factors(mode)
    report = serving.tune_layers(engine(layer), config)
    assert report["head_size"] == [SIZE, 32 if mode == "exact" else SIZE]
    assert layer.impl.loaded
    layer.allocate()
    run = Sequences(layer, lengths=(11, 1, 12), shared=8)
    run.step((0, 0, 5), (1, 0, 1))
    run.step((0, 5, 9))
    run.step((0, 9, 10), (2, 8, 11))  # the third finds its first block in the cache
    run.step((2, 11, 12), (0, 10, 11))
    for row, begin in ((0, 0), (1, 0), (2, 8)):
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        found = torch.cat(run.outputs[row]).double()
        torch.testing.assert_close(found, run.expected(row, config)[begin:], atol=tolerance, rtol=0)


def test_heads_with_factor_1_are_left_alone(points):
    plain, tuned = Attention(0), Attention(0)
    serving.tune_layers(engine(tuned), factors("exact"))
    found = []
    for layer in (plain, tuned):
        layer.allocate()
        run = Sequences(layer, lengths=(9,))
        run.step((0, 0, 9))
        found.append(run.outputs[0][0])
    changes = (found[0] - found[1]).abs().amax(dim=(0, 2))
    assert (changes > 1e-5).tolist() == [True, True, False, True, True, False]


def test_a_trial_run_and_a_quantised_output(points):
    layer = Attention(0)
    serving.tune_layers(engine(layer), factors("exact"))
    query = torch.zeros(2, HEADS, SIZE)
    states = (layer, query, query, query, torch.empty(0))
    output = torch.full_like(query, torch.nan)
    layer.impl.forward(*states, None, output=output, output_scale=None)
    assert not output.any()
    with pytest.raises(ValueError, match="quantises"):
        layer.impl.forward(*states, None, output=output, output_scale=torch.ones(1))
    assert not layer.impl.fused_output_quant_supported("key")
    assert not layer.impl.fused_rope_kvcache_supported()
    assert not layer.impl.fused_qk_norm_rope_kvcache_supported()
    assert not layer.impl.fused_qk_norm_mrope_kvcache_supported()


@pytest.mark.parametrize("mode", ["exact", "key"])
def test_a_trial_run_marks_no_key(points, mode):
    """It may come when there is a cache already: the update is asked for, with nowhere to write to."""
    layer = Attention(0)
    serving.tune_layers(engine(layer), factors(mode))
    key, value = torch.randn(2, 3, KV_HEADS, SIZE)
    with set_forward_context({layer.layer_name: None}, None, {}):
        keys, values = layer.impl.operator.keys_and_values(key, value, layer.layer_name)
    assert torch.equal(keys[..., :SIZE], key)
    assert torch.equal(values[..., :SIZE], value)
    assert not keys[..., SIZE:].any()


def test_only_touched_layers_become_wider_unless_caches_must_match(points):
    config = ZeroTuningConfig.uniform(identity(3), 2.0, layers=[1])
    layers = [Attention(index) for index in range(3)]
    report = serving.tune_layers(engine(*layers), config)
    assert [layer.impl.head_size for layer in layers] == [16, 32, 16]
    assert type(layers[0].impl) is Implementation
    per_width = 2 * KV_HEADS * 4
    assert report["cache_bytes_per_token"] == [48 * per_width, 64 * per_width]
    layers = [Attention(0), Attention(1), Attention(2, window=3)]
    assert serving.tune_layers(engine(*layers), config)["layers"] == [0, 1, 2]
    assert [layer.impl.head_size for layer in layers] == [32, 32, 32]
    assert not layers[0].impl.operator.values.any()


def test_each_rank_takes_the_factors_of_its_heads(points):
    points.setattr(sys.modules["vllm.distributed"], "get_tensor_model_parallel_rank", lambda: 1)
    points.setattr(sys.modules["vllm.distributed"], "get_tensor_model_parallel_world_size", lambda: 2)
    layer = Attention(0, heads=HEADS // 2, kv_heads=KV_HEADS // 2)
    serving.tune_layers(engine(layer), factors("exact"))
    expected = factors("exact").log_gamma[0, HEADS // 2 :] / SCALE
    torch.testing.assert_close(layer.impl.operator.values[:, 0], expected)


@pytest.mark.parametrize("mode", ["exact", "key", "query"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_at_the_start_passes_what_is_right(points, dtype, mode):
    layers = [Attention(0, dtype), Attention(1, dtype, window=3)]
    config = factors(mode, layers=2)
    serving.tune_layers(engine(*layers), config)
    for layer in layers:
        layer.allocate()
    before = [layer.impl.operator for layer in layers]
    serving.check_computation(
        SimpleNamespace(attn_groups=[[group(layer.layer_name)] for layer in layers]), engine(*layers)
    )
    assert [layer.impl.operator for layer in layers] == before
    assert all(not layer.kv_cache[-2:].any() for layer in layers)


def narrow(self, layer, query, *rest, **named):
    query = torch.cat([query[..., :SIZE], torch.zeros_like(query[..., SIZE:])], dim=-1)
    return Implementation.forward(self, layer, query, *rest, **named)


def one_late(self, layer, key, value, kv_cache, slot_mapping):
    Implementation.do_kv_cache_update(self, layer, key.roll(1, 0), value, kv_cache, slot_mapping)


def rescaled(self, *arguments, **named):
    self.scale = self.head_size**-0.5
    return Implementation.forward(self, *arguments, **named)


@pytest.mark.parametrize(
    "members",
    [{"forward": narrow}, {"do_kv_cache_update": one_late}, {"forward": rescaled}],
    ids=lambda m: str(list(m)),
)
def test_the_check_at_the_start_refuses_what_is_wrong(points, members):
    layer = Attention(0)
    layer.impl.__class__ = type("Wrong", (Implementation,), members)
    serving.tune_layers(engine(layer), factors("exact"))
    layer.allocate()
    runner = SimpleNamespace(attn_groups=[[group(layer.layer_name)]])
    with pytest.raises(RuntimeError, match=r"backend CPU_ATTN .* with heads of width 32: it is off by"):
        serving.check_computation(runner, engine(layer))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attn_type": "encoder_only"}, "attention of the type 'encoder_only'"),
        ({"kv_cache_torch_dtype": torch.float8_e4m3fn}, "a KV cache of another type"),
        ({"kv_sharing_target_layer_name": "x"}, "the KV cache of another layer"),
        ({"use_mm_prefix": True}, "attends in both directions"),
        ({"head_size_v": 8}, "values of another width"),
        ({"logits_soft_cap": 30.0}, "a soft cap"),
        ({"alibi_slopes": torch.ones(HEADS)}, "ALiBi"),
        ({"sinks": torch.ones(HEADS)}, "learned sinks"),
        ({"attn_backend": type("Other", (Backend,), {"name": "FLASHINFER"})}, "the attention backend FLASHINFER"),
        ({"attn_backend": type("Other", (Backend,), {"forward_includes_kv_cache_update": True})}, "itself writes"),
    ],
)
def test_layers_that_are_not_covered_are_refused(points, change, told):
    layer = Attention(0)
    ((name, value),) = change.items()
    setattr(layer if hasattr(layer, name) else layer.impl, name, value)
    with pytest.raises(ValueError, match=f"layer 0 has .*{told}.* not supported"):
        serving.tune_layers(engine(layer), factors("exact"))


def test_a_layer_made_with_unknown_arguments_is_refused(points):
    layer = Attention(0)
    layer.impl.chunk = 64
    with pytest.raises(ValueError, match="layer 0 was made with chunk=64"):
        serving.tune_layers(engine(layer), factors("exact"))


def test_other_kinds_and_numbers_of_layers_are_refused(points):
    with pytest.raises(ValueError, match="layer 0 has 4 query heads, the configuration is for 6"):
        serving.tune_layers(engine(Attention(0, heads=4)), factors("exact"))
    recurrent = Mamba()
    recurrent.layer_name = "model.layers.1.mixer"
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mixer is a Mamba"):
        serving.tune_layers(engine(Attention(0), recurrent), factors("exact", layers=2))
    with pytest.raises(ValueError, match=r"for 2 layers, but the model has attention in the layers \[0\]"):
        serving.tune_layers(engine(Attention(0)), factors("exact", layers=2))
    expert = SimpleNamespace(layer_name="model.layers.0.experts")  # it registers itself there too, and is let be
    assert serving.tune_layers(engine(Attention(0), expert), factors("exact"))["layers"] == [0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"speculative": object()}, "speculative decoding"),
        ({"transfer": object()}, "transfer of its KV cache"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "context parallelism"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "context parallelism"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline parallelism"),
        ({"parallel": {"use_ubatching": True}}, "dual-batch overlap or microbatches"),
        ({"graphs": True}, "full CUDA graphs"),
    ],
)
def test_engines_that_are_not_covered_are_refused(change, told):
    with pytest.raises(ValueError, match=f"an engine with {told}.* is not supported"):
        serving.check_engine(engine(**change), factors("exact"))


def test_a_configuration_for_another_model_is_refused():
    serving.check_engine(engine(), factors("exact"))
    other = identity(7, type="gpt2", query_heads=4, key_value_heads=4)
    told = (
        r"another model: model type 'gpt2' \(this model: 'llama'\), layers 7 \(this model: 1\), "
        r"query heads 4 \(this model: 6\), key/value heads 4 \(this model: 2\); calibrate"
    )
    with pytest.raises(ValueError, match=told):
        serving.check_engine(engine(), ZeroTuningConfig.uniform(other, 2.0))


def started(config, path, *layers):
    config.save(path)
    arguments = serving.engine_arguments(path)
    vllm_config = engine(*layers, additional=arguments["additional_config"])
    worker = serving.Worker(vllm_config, rank=0)
    assert worker.load_model(load_dummy_weights=False) == "loaded"
    assert worker.initialize_from_config(None) == "initialised"
    return worker


def test_the_worker_tunes_what_it_loads_and_checks_it(points, tmp_path):
    layers = [Attention(0), Attention(1)]
    config = factors("exact", layers=2)
    worker = started(config, tmp_path / "c.json", *layers)
    assert isinstance(worker, CPUWorker)
    assert worker.tuning_report()["layers"] == [0, 1]
    assert worker.tuning_report()["fingerprint"] == config.fingerprint
    assert [layer.impl.head_size for layer in layers] == [32, 32]


def test_the_identity_touches_nothing(points, tmp_path):
    layer = Attention(0)
    implementation = layer.impl
    worker = started(ZeroTuningConfig.uniform(identity(), 1.0), tmp_path / "c.json", layer)
    assert layer.impl is implementation
    assert layer.attn_backend is Backend
    assert worker.tuning_report()["layers"] == []


@pytest.mark.parametrize("additional", [{}, None, {"zerotuning": 3}, {"zerotuning": {"file": "c.json"}}])
def test_a_worker_without_a_configuration_says_how_to_name_one(points, additional):
    if additional:
        additional = {serving._PREFIX: additional["zerotuning"]}
    with pytest.raises(ValueError, match=r"engine_arguments\(FILE\)"):
        serving.Worker(engine(additional=additional), rank=0)


def test_other_platforms(points):
    module = sys.modules["vllm.platforms"]
    points.setattr(
        module, "current_platform", SimpleNamespace(**{**vars(PLATFORM), "is_cpu": lambda: False}), raising=True
    )
    with pytest.raises(RuntimeError, match="abacus is not supported"):
        _ = serving.Worker
    serving._point.cache_clear()
    on_gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)
    points.setattr(module, "current_platform", on_gpu)
    points.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=CPUWorker))
    assert issubclass(serving.Worker, CPUWorker)


def test_missing_places_in_vllm_are_named_with_its_version(points):
    points.delattr(sys.modules["vllm.model_executor.models.utils"], "extract_layer_index")
    told = r"vLLM 0\.1 has no vllm\.model_executor\.models\.utils\.extract_layer_index"
    with pytest.raises(RuntimeError, match=told):
        serving.tune_layers(engine(Attention(0)), factors("exact"))
    with pytest.raises(RuntimeError, match="has no attn_groups"):
        serving.check_computation(SimpleNamespace(), engine())
    bare = type("Bare", (), {"get_name": lambda: "CPU_ATTN"})
    with pytest.raises(RuntimeError, match=r"has no Bare\.customize_spec"):
        serving._wide_backend(bare, 32)
    with pytest.raises(RuntimeError, match=r"has no Bare\.do_kv_cache_update"):
        serving._tuned_class(bare)
    points.delattr(CPUWorker, "initialize_from_config")
    with pytest.raises(RuntimeError, match=r"has no CPUWorker\.initialize_from_config"):
        _ = serving.Worker


def test_without_vllm_it_is_asked_for(points):
    points.setitem(sys.modules, "vllm.platforms", None)
    points.setitem(sys.modules, "vllm", None)
    with pytest.raises(RuntimeError, match="vLLM is not installed"):
        _ = serving.Worker


def test_the_module_has_nothing_else():
    with pytest.raises(AttributeError, match="has no attribute 'Engine'"):
        _ = serving.Engine
