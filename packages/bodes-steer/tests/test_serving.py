"""Serving, without vLLM: the arithmetic, and the way through stand-ins for what vLLM's worker and runners offer.

The stand-in is a model whose every token has states of its own, so that each row of each step can be compared with what
the definition says about its token's place in its request; the real runner and engine are in test_vllm_bodes_steer.py.
"""
# ruff: noqa: N803 -- T is the paper's letter

import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from bodes_steer import vllm as serving
from bodes_steer.baselines import CAA, LinAcT
from bodes_steer.files import Origin, save_steerer
from bodes_steer.steerers import GaussianODE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

WIDTH, LAYERS, LAYER, VOCAB = 8, 3, 1, 50
KEY = serving._PREFIX


def fitted(kind=CAA):
    generator = torch.Generator().manual_seed(0)
    return kind().fit(*torch.randn(2, 5, WIDTH, generator=generator))


@pytest.fixture(scope="module")
def caa():
    return fitted()


@pytest.fixture
def file(caa, tmp_path):
    path = tmp_path / "caa.safetensors"
    save_steerer(caa, path, model=Origin("tiny", "llama", WIDTH, LAYERS), layer=LAYER)
    return path


# --- what requests say


@pytest.mark.parametrize(
    ("asked", "on", "off"),
    [
        (None, 3.0, 0.0),
        ({}, 3.0, 0.0),
        ({"other": 1}, 3.0, 0.0),
        ({KEY: None}, 3.0, 0.0),
        ({KEY: True}, 3.0, 3.0),
        ({KEY: "on"}, 3.0, 3.0),
        ({KEY: False}, 0.0, 0.0),
        ({KEY: "off"}, 0.0, 0.0),
        ({KEY: {"T": -2}}, -2.0, -2.0),
        ({KEY: "1.5"}, 1.5, 1.5),
        ({KEY: {"T": 0}}, 0.0, 0.0),
    ],
)
def test_what_a_request_says(asked, on, off):
    assert serving.request_strength(asked, 3.0) == on
    assert serving.request_strength(asked, 3.0, default_on=False) == off


@pytest.mark.parametrize(
    "asked",
    [
        1,
        0,
        5.0,
        "yes",
        "",
        "nan",
        "1e300",
        [],
        {},
        {"t": 1},
        {"T": 1, "U": 2},
        {"T": True},
        {"T": "5"},
        {"T": None},
        {"T": math.inf},
        {"T": -1e7},
        {"T": 10**400},
    ],
    ids=repr,
)
def test_what_a_request_may_not_say(asked):
    with pytest.raises(ValueError, match=rf"extra_args\['{KEY}'\] is "):
        serving.request_strength({KEY: asked}, 3.0)


# --- which rows


@given(chunks=st.lists(st.integers(1, 7), min_size=1, max_size=6), prompt=st.integers(1, 20), begin=st.integers(0, 5))
def test_rows_of_all_steps_are_the_positions_from_the_end_of_the_prompt(chunks, prompt, begin):
    steered, computed = [], 0
    for count in chunks:
        rows = serving.steered_rows(begin, computed, count, prompt)
        assert set(rows) <= set(range(begin, begin + count))
        steered += [row - begin + computed for row in rows]
        computed += count
    assert steered == list(range(prompt - 1, computed))


# --- states


@pytest.mark.parametrize("kind", [CAA, LinAcT])
@given(strengths=st.lists(st.sampled_from([-1.0, 0.5, 2.0]), min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
def test_each_row_has_its_own_strength(kind, strengths):
    steerer = fitted(kind)
    states = torch.randn(len(strengths), WIDTH, generator=torch.Generator().manual_seed(1))
    found = serving.steer_states(states, strengths, steerer)
    expected = torch.cat([steerer.flow(row[None], T) for row, T in zip(states, strengths, strict=True)])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_low_precision_is_rounded_once_and_float16_stays_finite(caa):
    states = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = serving.steer_states(states, [2.0] * 4, caa)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, caa.flow(states.float(), 2.0).bfloat16())
    huge = serving.steer_states(states.half(), [1e6, -1e6, 1.0, 1.0], caa)
    assert huge.isfinite().all()
    assert huge[0].abs().max() == torch.finfo(torch.float16).max
    assert torch.equal(huge[2:], caa.flow(states[2:].float(), 1.0).half())


# --- stand-ins


class LayerBase:
    pass


class Attention(nn.Module, LayerBase):
    pass


class PairBlock(nn.Module):
    """As most of vLLM's: the residual stream is the sum of what comes out."""

    takes_residual = True

    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, positions, hidden_states, residual):
        residual = hidden_states if residual is None else hidden_states + residual
        return torch.tanh(self.linear(residual)), residual


class SingleBlock(PairBlock):
    """As those of GPT-2."""

    takes_residual = False

    def forward(self, hidden_states):
        return hidden_states + torch.tanh(self.linear(hidden_states))


class EmptyPairBlock(SingleBlock):
    """As those of MiniCPM."""

    takes_residual = True

    def forward(self, positions, hidden_states, residual):
        return super().forward(hidden_states), None


class TupleBlock(SingleBlock):
    """A pair that is no sum."""

    def forward(self, hidden_states):
        return super().forward(hidden_states), hidden_states


class DeepBlock(PairBlock):
    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        return hidden_states, residual[None]


class Model(nn.Module):
    def __init__(self, block=PairBlock):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.layers = nn.ModuleList(block() for _ in range(LAYERS))

    def forward(self, tokens):
        hidden, residual = self.embed(tokens), None
        for layer in self.layers:
            output = layer(None, hidden, residual) if layer.takes_residual else layer(hidden)
            hidden, residual = output if isinstance(output, tuple) else (output, None)
        return hidden if residual is None else hidden + residual

    @torch.no_grad()
    def definition(self, token, steered):
        """What comes out for a token whose states after the block are changed by a function."""
        hidden = self.embed(torch.tensor([token]))
        for index, layer in enumerate(self.layers):
            hidden = hidden + torch.tanh(layer.linear(hidden))
            hidden = steered(hidden) if index == LAYER else hidden
        return hidden[0]


class Runner:
    """vLLM's first runner: the batch is its own. Rows come in an order of its own, and padding after them."""

    def __init__(self, model):
        self.model = model
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=np.zeros(16, dtype=np.int64))
        self.tokens, self.outputs = {}, {}

    def order(self, scheduled):
        return sorted(scheduled.num_scheduled_tokens, key=lambda name: (scheduled.num_scheduled_tokens[name], name))

    def computed(self, scheduled):
        cached = scheduled.scheduled_cached_reqs
        return {
            **{new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs},
            **dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True)),
        }

    def prepare(self, scheduled):
        names, computed = self.order(scheduled), self.computed(scheduled)
        self.input_batch.req_ids = names
        self.input_batch.num_computed_tokens_cpu[: len(names)] = [computed[name] for name in names]
        return names, computed

    @torch.inference_mode()
    def execute_model(self, scheduled):
        if not scheduled.total_num_scheduled_tokens:
            return
        names, computed = self.prepare(scheduled)
        places = [
            (name, place)
            for name in names
            for place in range(computed[name], computed[name] + scheduled.num_scheduled_tokens[name])
        ]
        tokens = [self.tokens[name][place] for name, place in places] + [0] * (-len(places) % 4)
        output = self.model(torch.tensor(tokens))
        self.outputs.update(zip(places, output, strict=False))
        padding = output[len(places) :]
        torch.testing.assert_close(padding, self.model.definition(0, lambda hidden: hidden).expand_as(padding))

    @torch.inference_mode()
    def _dummy_run(self):
        return self.model(torch.zeros(2, dtype=torch.long))


class SecondRunner(Runner):
    """vLLM's second runner: the batch goes from function to function."""

    def __init__(self, model):
        super().__init__(model)
        del self.input_batch

    def prepare_inputs(self, scheduled):
        names, computed = self.order(scheduled), self.computed(scheduled)
        return SimpleNamespace(req_ids=names, num_computed_tokens_np=np.array([computed[name] for name in names]))

    def prepare(self, scheduled):
        batch = self.prepare_inputs(scheduled)
        return batch.req_ids, dict(zip(batch.req_ids, batch.num_computed_tokens_np.tolist(), strict=True))


class CPUWorker:
    """What the platform's worker does, in the order in which the engine asks for it."""

    block, runner, skip = PairBlock, Runner, False

    def __init__(self, vllm_config, rank):
        self.vllm_config, self.rank = vllm_config, rank

    def load_model(self, *, load_dummy_weights=False):
        self.model_runner = self.runner(Model(self.block))
        layers = self.vllm_config.compilation_config.static_forward_context
        for index, block in enumerate(self.get_model().layers):
            layers[f"model.layers.{index}.attn"] = block.attn
        layers["model.layers.0.experts"] = nn.Identity()  # it registers itself there too, and is let be
        return "loaded"

    def get_model(self):
        return self.model_runner.model

    def compile_or_warm_up_model(self):
        return "warm"

    def execute_dummy_batch(self):
        if not self.skip:
            self.model_runner._dummy_run()

    def execute_model(self, scheduler_output):
        return self.model_runner.execute_model(scheduler_output)


class LogitsProcessor:
    @classmethod
    def validate_params(cls, sampling_params):
        raise NotImplementedError


class SecondLogitsProcessor(LogitsProcessor):
    pass


PLATFORM = SimpleNamespace(is_cpu=lambda: True, is_cuda_alike=lambda: False, device_name="abacus")
POINTS = {
    "vllm": {"__version__": "0.1"},
    "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": LayerBase},
    "vllm.model_executor.models.utils": {"extract_layer_index": lambda name: int(name.split(".")[2])},
    "vllm.platforms": {"current_platform": PLATFORM},
    "vllm.v1.sample.logits_processor": {"LogitsProcessor": type("FirstLogitsProcessor", (LogitsProcessor,), {})},
    "vllm.v1.worker.gpu.sample.logits_processor": {"LogitsProcessor": SecondLogitsProcessor},
    "vllm.v1.worker.cpu_worker": {"CPUWorker": CPUWorker},
}


@pytest.fixture
def points(monkeypatch):
    """The stand-ins in the place of vLLM's modules."""
    for name, members in POINTS.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    caches = (serving._point, serving._worker_class, serving._request_check)
    for cache in caches:
        cache.cache_clear()
    yield monkeypatch
    for cache in caches:
        cache.cache_clear()


def engine(arguments=None, **changes):
    """A configuration of vLLM, as far as it is looked at."""
    arguments = arguments or {}
    text = SimpleNamespace(model_type="llama")
    parallel = dict.fromkeys(
        ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size"), 1
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=text,
            hf_config=text,
            get_total_num_hidden_layers=lambda: LAYERS,
            get_hidden_size=lambda: WIDTH,
            **{
                "runner_type": "generate",
                "is_diffusion": False,
                "enforce_eager": arguments.get("enforce_eager", True),
                "logits_processors": arguments.get("logits_processors", [f"{serving.__name__}:RequestCheck"]),
                **changes.pop("model", {}),
            },
        ),
        parallel_config=SimpleNamespace(**{"use_ubatching": False, **parallel, **changes.pop("parallel", {})}),
        cache_config=SimpleNamespace(
            **{
                "enable_prefix_caching": arguments.get("enable_prefix_caching", False),
                "kv_sharing_fast_prefill": False,
                **changes.pop("cache", {}),
            }
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
        additional_config=arguments.get("additional_config", {}),
        **{"speculative_config": None, "kv_transfer_config": None, "ec_transfer_config": None, **changes},
    )


def started(path, **arguments):
    worker = serving.Worker(engine(serving.engine_arguments(path, **arguments)), rank=0)
    assert worker.load_model(load_dummy_weights=False) == "loaded"
    assert worker.compile_or_warm_up_model() == "warm"
    return worker


class Scheduler:
    """Requests, and steps of some of their tokens, as vLLM's scheduler describes them to its workers."""

    def __init__(self, worker, again_as_new=False):
        self.worker, self.runner, self.again_as_new = worker, worker.model_runner, again_as_new
        self.requests, self.computed, self.known, self.finished = {}, {}, set(), set()

    def add(self, name, tokens, prompt, extra_args=None):
        self.runner.tokens[name] = tokens
        self.computed[name] = 0
        self.requests[name] = SimpleNamespace(
            req_id=name, prompt_len=prompt, sampling_params=SimpleNamespace(extra_args=extra_args)
        )

    def preempt(self, name):
        self.computed[name] = 0
        if self.again_as_new:
            self.known.discard(name)

    def finish(self, name):
        self.finished.add(name)
        self.known.discard(name)
        del self.requests[name], self.computed[name]

    def step(self, counts):
        new = [name for name in counts if name not in self.known]
        old = [name for name in counts if name in self.known]
        scheduled = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(**vars(self.requests[name]), num_computed_tokens=self.computed[name]) for name in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=old, num_computed_tokens=[self.computed[name] for name in old]
            ),
            num_scheduled_tokens=dict(counts),
            total_num_scheduled_tokens=sum(counts.values()),
            finished_req_ids=self.finished,
        )
        self.known |= set(new)
        self.finished, self.described = set(), scheduled
        self.worker.execute_model(scheduled)
        for name, count in counts.items():
            self.computed[name] += count

    def check(self, name, prompt, T, steerer):
        """All that was computed of a request is what the definition says."""
        for place in range(self.computed[name]):
            token = self.runner.tokens[name][place]
            expected = self.runner.model.definition(
                token, (lambda hidden: steerer.flow(hidden, T)) if place >= prompt - 1 else (lambda hidden: hidden)
            )
            torch.testing.assert_close(self.runner.outputs[name, place], expected, atol=1e-5, rtol=1e-5)


ASKS = {"default": None, "off": {KEY: False}, "strong": {KEY: {"T": 2.5}}, "back": {KEY: "-1.0"}}
STRENGTHS = {"default": 1.0, "off": 0.0, "strong": 2.5, "back": -1.0}


@pytest.mark.parametrize(
    ("runner", "block"),
    [(Runner, PairBlock), (SecondRunner, PairBlock), (Runner, SingleBlock), (SecondRunner, EmptyPairBlock)],
)
def test_every_token_of_every_schedule_is_steered_as_its_request_says(points, file, caa, runner, block):
    points.setattr(CPUWorker, "runner", runner)
    points.setattr(CPUWorker, "block", block)
    worker = started(file)

    @given(data=st.data())
    @settings(max_examples=15, deadline=None)
    def schedules(data):
        scheduler = Scheduler(worker, again_as_new=runner is SecondRunner)
        prompts = {name: data.draw(st.integers(1, 6), label=f"prompt of {name}") for name in ASKS}
        for place, (name, asked) in enumerate(ASKS.items()):
            scheduler.add(name, [(7 * place + 3 * token) % VOCAB for token in range(12)], prompts[name], asked)
        for _ in range(data.draw(st.integers(1, 6), label="steps")):
            left = {name: 12 - scheduler.computed[name] for name in ASKS}
            counts = {name: data.draw(st.integers(0, min(4, most)), label=name) for name, most in left.items()}
            counts = {name: counts[name] for name in data.draw(st.permutations(sorted(ASKS))) if counts[name]}
            scheduler.step(counts)
            if data.draw(st.booleans(), label="preemption"):
                scheduler.preempt(data.draw(st.sampled_from(sorted(ASKS))))
        for name in ASKS:
            scheduler.check(name, prompts[name], STRENGTHS[name], caa)
        scheduler.finished |= set(ASKS)
        scheduler.step({})

    schedules()
    report = worker.steering_report()
    assert report["method"] == "caa"
    assert report["module"] == "layers.1"
    assert report["layer"] == LAYER
    assert report["steered_tokens"] > 0


def test_what_is_off_is_untouched_to_the_bit(points, file):
    worker = started(file, default_on=False)
    scheduler = Scheduler(worker)
    scheduler.add("off", list(range(10)), 3)
    scheduler.add("zero", list(range(10)), 3, {KEY: {"T": 0}})
    scheduler.add("on", list(range(10)), 3, {KEY: True})
    scheduler.step(dict.fromkeys(scheduler.requests, 10))
    found = worker.model_runner.outputs
    plain = Runner(Model())
    plain.tokens = worker.model_runner.tokens
    plain.execute_model(scheduler.described)
    for name, place in found:
        same = torch.equal(found[name, place], plain.outputs[name, place])
        assert same == (name != "on" or place < 2)
    assert worker.steering_report()["steered_tokens"] == 8


def test_a_name_that_is_used_again_is_another_request(points, file, caa):
    scheduler = Scheduler(started(file, T=0.5))
    scheduler.add("a", list(range(6)), 2)
    scheduler.step({"a": 6})
    scheduler.check("a", 2, 0.5, caa)
    scheduler.finish("a")
    scheduler.add("a", list(range(6)), 5, {KEY: {"T": 3.0}})
    scheduler.step({"a": 6})
    scheduler.check("a", 5, 3.0, caa)


def test_a_request_that_takes_more_input_goes_on_as_it_began(points, file, caa):
    """What was steered is in the cache, so the place where steering begins must not move."""
    scheduler = Scheduler(started(file), again_as_new=True)
    scheduler.add("a", list(range(12)), 3)
    scheduler.step({"a": 6})
    scheduler.known.clear()
    scheduler.requests["a"].prompt_len = 10
    scheduler.step({"a": 6})
    scheduler.check("a", 3, caa.T, caa)


def test_what_a_steerer_computes_once_is_computed_at_the_start(points, tmp_path):
    path = tmp_path / "gaussian.safetensors"
    save_steerer(fitted(GaussianODE), path, layer=LAYER)
    worker = started(path, T=0.5)
    made = dict(vars(worker._steering.steerer))
    scheduler = Scheduler(worker)
    scheduler.add("a", list(range(6)), 2)
    scheduler.step({"a": 6})
    scheduler.check("a", 2, 0.5, fitted(GaussianODE))
    assert vars(worker._steering.steerer).keys() == made.keys()


def test_requests_of_equal_strength_are_steered_together(points, file):
    worker = started(file)
    calls = []
    steerer = fitted(LinAcT)
    points.setattr(worker._steering, "steerer", steerer)
    points.setattr(steerer, "flow", lambda x, T: calls.append((len(x), T)) or x)
    scheduler = Scheduler(worker)
    for place in range(6):
        scheduler.add(str(place), list(range(4)), 3, {KEY: {"T": 1.0 + place % 2}})
    scheduler.step(dict.fromkeys(scheduler.requests, 4))
    assert calls == [(6, 1.0), (6, 2.0)]


def test_a_run_outside_of_a_step_is_not_steered(points, file):
    worker = started(file)
    assert torch.equal(worker.model_runner._dummy_run(), Model()(torch.zeros(2, dtype=torch.long)))
    assert worker.steering_report()["steered_tokens"] == 0


def test_a_runner_that_disagrees_with_the_scheduler_is_refused(points, file):
    scheduler = Scheduler(started(file))
    scheduler.add("a", list(range(6)), 2)
    points.setattr(Runner, "computed", lambda self, scheduled: {"a": 1})
    with pytest.raises(RuntimeError, match="do not agree about the requests"):
        scheduler.step({"a": 4})


@pytest.mark.parametrize("block", [TupleBlock, DeepBlock])
def test_a_block_of_another_kind_is_refused_at_the_start(points, file, block):
    points.setattr(CPUWorker, "block", block)
    with pytest.raises(RuntimeError, match=r"layers\.1 returns \[\(.*2, 8\), \(.*2, 8\)\]; what can be steered"):
        started(file)


def test_a_model_that_passes_over_the_block_is_refused(points, file):
    points.setattr(CPUWorker, "skip", True)
    with pytest.raises(RuntimeError, match=r"a trial run passed over layers\.1"):
        started(file)
    points.setattr(CPUWorker, "skip", False)
    worker = started(file)
    scheduler = Scheduler(worker)
    scheduler.add("a", list(range(6)), 2)
    points.setattr(Model, "forward", lambda self, tokens: self.embed(tokens))
    points.setattr(Model, "definition", lambda self, token, steered: self.embed(torch.tensor(token)))
    with pytest.raises(RuntimeError, match=r"the step passed over layers\.1"):
        scheduler.step({"a": 4})


def test_a_layer_that_vllm_does_not_know_is_refused(points, file):
    worker = serving.Worker(engine(serving.engine_arguments(file)), rank=0)
    points.setattr(sys.modules["vllm.model_executor.models.utils"], "extract_layer_index", lambda name: 7)
    with pytest.raises(ValueError, match="layer 1 is not one of the decoder blocks of the model"):
        worker.load_model()


# --- what the engine is told


def test_engine_arguments_name_worker_check_and_file(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    arguments = serving.engine_arguments(file.name)
    assert arguments["worker_cls"] == f"{serving.__name__}.Worker"
    assert arguments["logits_processors"] == [f"{serving.__name__}:RequestCheck"]
    assert arguments["additional_config"] == {KEY: {"steerer": str(file), "default_on": True}}
    assert arguments["enforce_eager"] is True
    assert arguments["enable_prefix_caching"] is False
    with pytest.warns(UserWarning, match=r"layer=2, but the steerer was fitted on activations of layer 1"):
        arguments = serving.engine_arguments(file.name, layer=2, T=4, default_on=False)
    assert arguments["additional_config"] == {KEY: {"steerer": str(file), "layer": 2, "T": 4, "default_on": False}}


def test_engine_arguments_refuse_what_would_fail_later(points, file, caa, tmp_path):
    with pytest.raises(FileNotFoundError):
        serving.engine_arguments(tmp_path / "none.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"cut\.safetensors"):
        serving.engine_arguments(cut)
    with pytest.raises(ValueError, match=r"layer is -1; it must be the index"):
        serving.engine_arguments(file, layer=-1)
    with pytest.raises(ValueError, match=r"T is inf; it must be finite"):
        serving.engine_arguments(file, T=math.inf)
    bare = tmp_path / "bare.safetensors"
    save_steerer(caa, bare)
    with pytest.raises(ValueError, match=r"bare\.safetensors does not say which layer"):
        serving.Worker(
            engine(serving.engine_arguments(bare, layer=1) | {"additional_config": {KEY: str(bare)}}), rank=0
        )


@pytest.mark.parametrize("found", [None, 3, {"file": "c"}, {"steerer": 3}, {"steerer": "c", "more": 1}])
def test_a_worker_without_a_steerer_says_how_to_name_one(points, found):
    additional = {} if found is None else {KEY: found}
    with pytest.raises(ValueError, match=r"engine_arguments\(FILE\)"):
        serving.Worker(engine({"additional_config": additional}), rank=0)
    with pytest.raises(ValueError, match="default_on is 1; it must be true or false"):
        serving.Worker(engine({"additional_config": {KEY: {"steerer": "c", "default_on": 1}}}), rank=0)


def test_the_command_line_gives_a_file_and_no_more(points, file, caa):
    worker = serving.Worker(engine({"additional_config": {KEY: str(file)}}), rank=0)
    worker.load_model()
    assert worker.steering_report()["T"] == caa.T


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"kv_transfer_config": object()}, "transfer of its KV cache"),
        ({"ec_transfer_config": object()}, "transfer of its encoder cache"),
        ({"cache": {"enable_prefix_caching": True}}, "the prefix cache"),
        ({"cache": {"kv_sharing_fast_prefill": True}}, "fast prefill over a shared KV cache"),
        ({"model": {"enforce_eager": False}}, "compilation or CUDA graphs"),
        ({"model": {"runner_type": "pooling"}}, "a model that does not generate"),
        ({"model": {"is_diffusion": True}}, "a model that writes by diffusion"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "context parallelism"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "context parallelism"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline parallelism"),
        ({"parallel": {"use_ubatching": True}}, "dual-batch overlap or microbatches"),
    ],
)
def test_engines_that_are_not_covered_are_refused(caa, change, told):
    serving.check_engine(engine(), caa, LAYER)
    with pytest.raises(ValueError, match=f"an engine with {told}.* cannot be steered"):
        serving.check_engine(engine(**change), caa, LAYER)


def test_an_engine_that_does_not_check_its_requests_is_refused(caa):
    with pytest.raises(ValueError, match="does not check its requests: pass logits_processors="):
        serving.check_engine(engine(model={"logits_processors": None}), caa, LAYER)


def test_a_steerer_of_another_model_is_refused(points, caa, tmp_path):
    path = tmp_path / "other.safetensors"
    save_steerer(caa, path, model=Origin("tiny", "gpt2", WIDTH, 7), layer=5)
    told = r"another model: model type 'gpt2' \(this model: 'llama'\), layers 7 \(this model: 3\); fit one"
    with pytest.raises(ValueError, match=told):
        serving.Worker(engine(serving.engine_arguments(path)), rank=0)
    wide = CAA().fit(*torch.randn(2, 5, WIDTH + 1, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match=r"another model: hidden size 9 \(this model: 8\)"):
        serving.check_engine(engine(), wide, LAYER)
    with pytest.raises(ValueError, match="layer is 3; the model has the decoder blocks 0 to 2"):
        serving.check_engine(engine(), caa, 3)


# --- the check of requests


def test_the_check_refuses_a_request_and_never_sees_a_logit(points, file):
    check = serving.RequestCheck
    assert issubclass(check, SecondLogitsProcessor)
    check.validate_params(SimpleNamespace(extra_args={KEY: {"T": 2.0}}))
    with pytest.raises(ValueError, match="must be True, False or"):
        check.validate_params(SimpleNamespace(extra_args={KEY: 2.0}))
    logits = torch.zeros(1, 3)
    made = check(None, None, False)
    assert made.is_argmax_invariant()
    assert made.update_state(None) is None
    assert made.apply(logits) is logits
    assert not made.add_request(0, None)
    config = engine(serving.engine_arguments(file))
    config.model_config.logits_processors = [*config.model_config.logits_processors, "theirs:Other"]
    serving.Worker(config, rank=0)
    assert config.model_config.logits_processors == ["theirs:Other"]


def test_the_check_without_the_second_runner(points):
    points.setitem(sys.modules, "vllm.v1.worker.gpu.sample.logits_processor", None)
    assert not issubclass(serving.RequestCheck, SecondLogitsProcessor)


# --- places in vLLM


def test_other_platforms(points):
    module = sys.modules["vllm.platforms"]
    points.setattr(module, "current_platform", SimpleNamespace(**{**vars(PLATFORM), "is_cpu": lambda: False}))
    with pytest.raises(RuntimeError, match="abacus cannot be steered"):
        _ = serving.Worker
    serving._point.cache_clear()
    on_gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)
    points.setattr(module, "current_platform", on_gpu)
    points.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=CPUWorker))
    assert issubclass(serving.Worker, CPUWorker)


def test_missing_places_in_vllm_are_named_with_its_version(points, file):
    worker = serving.Worker(engine(serving.engine_arguments(file)), rank=0)
    points.setattr(CPUWorker, "runner", lambda self, model: SimpleNamespace(model=model))
    with pytest.raises(RuntimeError, match=r"vLLM 0\.1 has no input_batch or prepare_inputs of its model runner"):
        worker.load_model()
    points.delattr(sys.modules["vllm.model_executor.models.utils"], "extract_layer_index")
    serving._point.cache_clear()
    with pytest.raises(RuntimeError, match=r"has no vllm\.model_executor\.models\.utils\.extract_layer_index"):
        worker.load_model()
    serving._worker_class.cache_clear()
    points.delattr(CPUWorker, "execute_dummy_batch")
    with pytest.raises(RuntimeError, match=r"has no CPUWorker\.execute_dummy_batch"):
        _ = serving.Worker


def test_without_vllm_it_is_asked_for(points):
    points.setitem(sys.modules, "vllm.platforms", None)
    points.setitem(sys.modules, "vllm", None)
    with pytest.raises(RuntimeError, match="vLLM is not installed"):
        _ = serving.Worker


def test_the_module_has_nothing_else():
    with pytest.raises(AttributeError, match="has no attribute 'Engine'"):
        _ = serving.Engine
