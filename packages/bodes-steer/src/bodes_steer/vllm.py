r"""Serving a steered model in vLLM, with the strength of each request its own.

The output of one decoder block is steered at the positions that `steer` calls `from_prompt_end`: from the last token of
a request's prompt on. vLLM computes stretches of many requests at once, in an order of its own; for each step its
scheduler says how many tokens of every request were computed before and how many come now, so that a token's place in
its request, and with it whether it is steered, is known without a look at the device. Prefill in chunks, preemption and
unequal batches therefore need nothing more.

A block of vLLM returns its states in two parts whose sum is the residual stream. They are added in the model's type, as
transformers adds them, steered in float32, and put back into the second part.

The way in is vLLM's own: a worker class, which loads the model with the platform's worker and hooks the block, and a
check of each request's arguments in the process that takes requests, where what is wrong fails that request only::

    LLM(model, **engine_arguments("steerer.safetensors", T=5.0))

    vllm serve MODEL --enforce-eager --no-enable-prefix-caching --worker-cls bodes_steer.vllm.Worker \
        --logits-processors bodes_steer.vllm:RequestCheck --additional-config '{"bodes_steer": "steerer.safetensors"}'

A request says in `SamplingParams.extra_args` what it wants other than the engine's default, under the key
`"bodes_steer"`: `False`, `True`, or `{"T": 5.0}`. Over HTTP (`vllm_xargs`) it is `"off"`, `"on"` or `"5.0"`, since
vLLM's server takes no objects there and makes numbers of true and false.

vLLM's own beam search asks for every token anew, with all before it as the prompt, so that it steers no more than the
last one; sampling, also of several answers to one prompt, is steered as it should be.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bodes_steer.files import load_steerer
from bodes_steer.steerers import Steerer

# Derived, so that a vendored copy beside an installed original keeps its own settings and its own requests.
_PREFIX = __name__.rpartition(".")[0].replace(".", "_")

# Squares of such a length are still far from the end of float32, so that no request makes NaN of its own states.
_LARGEST = 1e6


def engine_arguments(
    steerer: str | os.PathLike[str],
    *,
    layer: int | None = None,
    T: float | None = None,  # noqa: N803  # the paper's letter
    default_on: bool = True,
) -> dict[str, Any]:
    """What to hand to `vllm.LLM` or `AsyncEngineArgs` beside the model, to serve it steered.

    Args:
        steerer: A file written by `save_steerer`, for the model to be served.
        layer: Decoder block whose output is steered, counted from 0; by default the one whose activations the steerer
            was fitted on, which its file names.
        T: Strength of requests that name none; by default the steerer's own.
        default_on: Whether requests that say nothing are steered.

    Returns:
        Keyword arguments. Compilation and the prefix cache are turned off: a compiled model passes over hooks, and a
        cached token would carry one request's strength into another.

    Raises:
        ValueError: The file is truncated, altered, of another kind or from a newer version; it names no layer and none
            is given; or an argument has a value that makes no sense.
        OSError: It cannot be read.
    """
    path = Path(steerer).absolute()
    given: dict[str, Any] = {"steerer": str(path), "layer": layer, "T": T, "default_on": default_on}
    settings = {name: value for name, value in given.items() if value is not None}
    read = _Settings.read({_PREFIX: settings})
    loaded = load_steerer(path)
    origin = _layer_of_origin(loaded)
    if origin is not None and read.layer_for(loaded) != origin:
        warnings.warn(
            f"layer={layer}, but the steerer was fitted on activations of layer {origin}; those of another layer "
            "differ in scale and direction",
            UserWarning,
            stacklevel=2,
        )
    return {
        "worker_cls": f"{__name__}.Worker",
        "logits_processors": [f"{__name__}:RequestCheck"],
        "additional_config": {_PREFIX: settings},
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }


def request_strength(extra_args: Mapping[str, Any] | None, default: float, *, default_on: bool = True) -> float:
    """How strongly a request is steered.

    Args:
        extra_args: `SamplingParams.extra_args`.
        default: Strength of a request that names none.
        default_on: Whether a request that says nothing is steered.

    Returns:
        T, an absolute length in activation space for methods of unit speed; 0 is not steered, to the bit.

    Raises:
        ValueError: The request says something else.
    """
    asked = (extra_args or {}).get(_PREFIX)
    if asked is None:
        return default if default_on else 0.0
    if isinstance(asked, bool):
        return default if asked else 0.0
    if asked in ("on", "off"):
        return default if asked == "on" else 0.0
    if isinstance(asked, str):
        with contextlib.suppress(ValueError):
            return _strength(float(asked), f"extra_args[{_PREFIX!r}]")
    if isinstance(asked, Mapping) and set(asked) == {"T"}:
        return _strength(asked["T"], f"T in extra_args[{_PREFIX!r}]")
    raise ValueError(
        f"extra_args[{_PREFIX!r}] is {asked!r}; it must be True, False or {{'T': 5.0}}, or as a string 'on', 'off' or "
        "'5.0' (a number alone could be a true or false that a server took for one), with a finite T of at most "
        f"{_LARGEST:g} in size"
    )


def steered_rows(begin: int, computed: int, count: int, prompt: int) -> range:
    """Which rows of a step belong to the tokens of one request that are steered.

    Args:
        begin: Row of the request's first token in this step.
        computed: How many of the request's tokens were computed in earlier steps.
        count: How many come in this step.
        prompt: How many tokens its prompt has.

    Returns:
        The rows whose tokens stand at position `prompt - 1` of the request or later.
    """
    untouched = min(max(prompt - 1 - computed, 0), count)
    return range(begin + untouched, begin + count)


def steer_states(
    states: Float[Tensor, "rows d"], strengths: Sequence[float], steerer: Steerer
) -> Float[Tensor, "rows d"]:
    """Steers rows of which each has its own strength.

    Args:
        states: Outputs of the block, in the model's type.
        strengths: T of each row; the fewer runs of equal ones, the fewer calls of the steerer.
        steerer: Fitted, on the device of the states.

    Returns:
        Steered states, computed in float32 and rounded once to the type of `states`; in float16, whose range they may
        leave, to its largest number.
    """
    states32 = states.float()
    vector = steerer.constant_vector if len(set(strengths)) > 1 else None
    if vector is not None:
        lengths = torch.tensor(strengths, dtype=torch.float32).to(states.device, non_blocking=True)
        steered = states32 + lengths[:, None] * vector.float()
    else:
        runs = [(strength, len(list(run))) for strength, run in itertools.groupby(strengths)]
        parts = torch.split(states32, [count for _, count in runs])
        steered = torch.cat([steerer.flow(part, strength) for part, (strength, _) in zip(parts, runs, strict=True)])
    if states.dtype == torch.float16:
        largest = torch.finfo(torch.float16).max
        steered = steered.clamp(-largest, largest)
    return steered.to(states.dtype)


def _strength(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}; it must be a number")  # noqa: TRY004  # vLLM's front end knows no other
    if not abs(value) <= _LARGEST or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be finite and at most {_LARGEST:g} in size")
    return float(value)


def _layer_of_origin(steerer: Steerer) -> int | None:
    layer: int | None = getattr(getattr(steerer, "origin_", None), "layer", None)
    return layer


@dataclass(frozen=True)
class _Settings:
    """What `additional_config` says."""

    steerer: Path
    layer: int | None = None
    T: float | None = None
    default_on: bool = True

    @classmethod
    def read(cls, additional_config: Any) -> "_Settings":
        found = additional_config.get(_PREFIX) if isinstance(additional_config, Mapping) else None
        how = f'set additional_config to {{"{_PREFIX}": "FILE"}}, or use engine_arguments(FILE)'
        if found is None:
            raise ValueError(f"the engine uses {__name__}.Worker but names no steerer: {how}")
        if isinstance(found, str):
            found = {"steerer": found}
        names = {"steerer", "layer", "T", "default_on"}
        if not isinstance(found, Mapping) or not set(found) <= names or not isinstance(found.get("steerer"), str):
            raise ValueError(f"additional_config[{_PREFIX!r}] is {found!r}; {how}")
        layer, strength, default_on = found.get("layer"), found.get("T"), found.get("default_on", True)
        if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int) or layer < 0):
            raise ValueError(f"layer is {layer!r}; it must be the index of a decoder block, counted from 0")
        if not isinstance(default_on, bool):
            raise ValueError(f"default_on is {default_on!r}; it must be true or false")  # noqa: TRY004  # from a file
        strength = None if strength is None else _strength(strength, "T")
        return cls(Path(found["steerer"]), layer, strength, default_on)

    def layer_for(self, steerer: Steerer) -> int:
        layer = _layer_of_origin(steerer) if self.layer is None else self.layer
        if layer is None:
            raise ValueError(f"{self.steerer.name} does not say which layer it was fitted on; pass layer=")
        return layer


@dataclass
class _Request:
    prompt: int
    strength: float


class _Steering:
    """The steerer at its block, and what the scheduler says about the step that is running."""

    def __init__(self, steerer: Steerer, settings: _Settings) -> None:
        self.steerer = steerer
        self.layer = settings.layer_for(steerer)
        self.T = float(steerer.T) if settings.T is None else settings.T
        self.default_on = settings.default_on
        self.module = ""
        self.pair = False
        self.steered_tokens = 0
        self.runner: Any = None
        self._requests: dict[str, _Request] = {}
        self._step: Any = None
        self._batch: Any = None
        self._seen = False
        self._trial = False

    def report(self) -> dict[str, Any]:
        names = ("layer", "module", "T", "default_on", "steered_tokens")
        return {"method": self.steerer.method, **{name: getattr(self, name) for name in names}}

    def attach(self, model: nn.Module, runner: Any, layers: Mapping[str, Any]) -> None:
        """Hooks the block of a loaded model."""
        self.module, block = _decoder_block(model, self.layer, layers)
        # What the next block calls its second argument is what tells two summands from any other pair.
        self.pair = "residual" in inspect.signature(block.forward).parameters
        parameter = next((p for p in block.parameters() if p.is_floating_point()), None)
        self.steerer = self.steerer.to(torch.device("cpu") if parameter is None else parameter.device)
        if hasattr(self.steerer, "prepare"):
            # What it would else compute at the first request, which for eigenvectors takes seconds.
            self.steerer.prepare()
        self.runner = runner
        if not hasattr(runner, "input_batch"):
            # vLLM's second runner hands the batch from function to function.
            if not hasattr(runner, "prepare_inputs"):
                raise _unknown("input_batch or prepare_inputs of its model runner")
            prepare = runner.prepare_inputs

            def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
                self._batch = prepare(*args, **kwargs)
                return self._batch

            runner.prepare_inputs = prepare_inputs
        block.register_forward_hook(self._hook)

    @contextlib.contextmanager
    def step(self, scheduled: Any) -> Iterator[None]:
        """While it is open, the block steers the step that the scheduler describes."""
        for name in scheduled.finished_req_ids:
            self._requests.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            # One that is already known was preempted, or takes more input: where its steering begins does not move.
            if new.req_id not in self._requests:
                extra = getattr(new.sampling_params, "extra_args", None)
                strength = request_strength(extra, self.T, default_on=self.default_on)
                self._requests[new.req_id] = _Request(new.prompt_len, strength)
        self._step, self._batch, self._seen = scheduled, None, False
        try:
            yield
            if scheduled.total_num_scheduled_tokens and not self._seen:
                raise RuntimeError(f"the step passed over {self.module}, whose output is to be steered")
        finally:
            self._step = self._batch = None

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """While it is open, the block's output is looked at, and steered for nothing."""
        self._trial, self._seen = True, False
        try:
            yield
            if not self._seen:
                raise RuntimeError(f"a trial run passed over {self.module}, whose output is to be steered")
        finally:
            self._trial = False

    def strengths(self) -> tuple[list[int], list[float]]:
        """The rows of the running step that are steered, and the strength of each."""
        if self._batch is None:
            batch = self.runner.input_batch
            names, computed = list(batch.req_ids), batch.num_computed_tokens_cpu
        else:
            names, computed = self._batch.req_ids, self._batch.num_computed_tokens_np
        counts = self._step.num_scheduled_tokens
        known = {new.req_id: new.num_computed_tokens for new in self._step.scheduled_new_reqs}
        cached = self._step.scheduled_cached_reqs
        known.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        if {name: int(before) for name, before in zip(names, computed, strict=False)} != {
            name: known.get(name) for name in counts
        }:
            raise RuntimeError("vLLM's model runner and its scheduler do not agree about the requests of a step")
        found: list[tuple[float, int]] = []
        begin = 0
        for name in names:
            request = self._requests[name]
            if request.strength:
                rows = steered_rows(begin, known[name], counts[name], request.prompt)
                found.extend((request.strength, row) for row in rows)
            begin += counts[name]
        # Those of equal strength beside each other, so that the steerer takes them together.
        found.sort()
        return [row for _, row in found], [strength for strength, _ in found]

    def _hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._step is None and not self._trial:
            return None
        self._seen = True
        states, residual = self._parts(output)
        if self._trial:
            steer_states(states[:1] if residual is None else states[:1] + residual[:1], [self.T], self.steerer)
            return None
        rows, strengths = self.strengths()
        if not rows:
            return None
        self.steered_tokens += len(rows)
        places = torch.tensor(rows).to(states.device, non_blocking=True)
        chosen = states.index_select(0, places)
        if residual is None:
            new = states.index_copy(0, places, steer_states(chosen, strengths, self.steerer))
            return (new, None) if isinstance(output, tuple) else new
        steered = steer_states(chosen + residual.index_select(0, places), strengths, self.steerer)
        return states.index_fill(0, places, 0), residual.index_copy(0, places, steered.to(residual.dtype))

    def _parts(self, output: Any) -> tuple[Tensor, Tensor | None]:
        """The states that a block returned, and the second summand where there is one."""
        first, *others = output if isinstance(output, tuple) else (output,)
        residual = others[0] if others else None
        if (
            isinstance(first, Tensor)
            and first.shape[1:] == (self.steerer.n_features_in_,)
            and len(others) <= self.pair
            and (residual is None or (isinstance(residual, Tensor) and residual.shape == first.shape))
        ):
            return first, residual
        shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in (first, *others)]
        raise RuntimeError(
            f"{self.module} returns {shapes}; what can be steered are states [tokens, {self.steerer.n_features_in_}], "
            "alone or with a residual of the same shape that is added to them"
        )


def _decoder_block(model: nn.Module, layer: int, layers: Mapping[str, Any]) -> tuple[str, nn.Module]:
    """The block that holds what vLLM knows as the attention, or its like, of a layer."""
    index_of = _point("vllm.model_executor.models.utils", "extract_layer_index")
    base = _point("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase")
    mixers = {id(mixer): index_of(name) for name, mixer in layers.items() if isinstance(mixer, base)}
    blocks: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        if (index := mixers.get(id(module))) is not None:
            parts = path.split(".")
            if str(index) in parts:
                blocks.setdefault(index, set()).add(".".join(parts[: parts.index(str(index)) + 1]))
    if len(blocks.get(layer, ())) != 1:
        names = [path for paths in blocks.values() for path in sorted(paths)]
        raise ValueError(f"layer {layer} is not one of the decoder blocks of the model, which are {', '.join(names)}")
    (name,) = blocks[layer]
    return name, model.get_submodule(name)


def check_engine(vllm_config: Any, steerer: Steerer, layer: int) -> None:
    """Refuse an engine, before it loads its model, that cannot serve it steered.

    Args:
        vllm_config: A `vllm.config.VllmConfig`.
        steerer: The steerer, as loaded.
        layer: The decoder block to be steered.

    Raises:
        ValueError: The steerer was fitted on another model, or the engine has a feature that is not covered.
    """
    model = vllm_config.model_config
    text = model.hf_text_config
    origin = getattr(steerer, "origin_", None)
    types = dict.fromkeys((model.hf_config.model_type, text.model_type))
    layers, width = model.get_total_num_hidden_layers(), model.get_hidden_size()
    wrong = []
    if (kind := getattr(origin, "model_type", None)) and kind not in types:
        wrong.append(f"model type {kind!r} (this model: {' or '.join(map(repr, types))})")
    if (count := getattr(origin, "num_layers", None)) and count != layers:
        wrong.append(f"layers {count} (this model: {layers})")
    if steerer.n_features_in_ != width:
        wrong.append(f"hidden size {steerer.n_features_in_} (this model: {width})")
    if wrong:
        raise ValueError(f"the steerer was fitted on another model: {', '.join(wrong)}; fit one on this model")
    if layer >= layers:
        raise ValueError(f"layer is {layer}; the model has the decoder blocks 0 to {layers - 1}")
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    refused = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "the prefix cache (pass enable_prefix_caching=False)": cache.enable_prefix_caching,
        "compilation or CUDA graphs (pass enforce_eager=True)": not model.enforce_eager,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "dual-batch overlap or microbatches": parallel.use_ubatching,
        "transfer of its KV cache (kv_transfer_config)": vllm_config.kv_transfer_config is not None,
        "transfer of its encoder cache (ec_transfer_config)": vllm_config.ec_transfer_config is not None,
        "fast prefill over a shared KV cache (kv_sharing_fast_prefill)": cache.kv_sharing_fast_prefill,
        "a model that does not generate": model.runner_type != "generate",
        "a model that writes by diffusion": model.is_diffusion,
    }
    for feature, used in refused.items():
        if used:
            raise ValueError(f"an engine with {feature} cannot be steered")
    if f"{__name__}:RequestCheck" not in (model.logits_processors or ()):
        raise ValueError(
            f"the engine does not check its requests: pass logits_processors=[{__name__ + ':RequestCheck'!r}], or use "
            "engine_arguments(FILE); without it a request with a wrong strength would end the engine"
        )


@functools.cache
def _point(module: str, name: str) -> Any:
    """Something of vLLM's; what it promises to nobody is named in this file only."""
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not module.startswith(str(error.name)):
            raise
        raise _unknown(f"{module}.{name}") from error


def _unknown(what: str) -> RuntimeError:
    try:
        version = importlib.import_module("vllm").__version__
    except ModuleNotFoundError:
        return RuntimeError("vLLM is not installed; see its documentation for the wheel of your machine")
    return RuntimeError(f"vLLM {version} has no {what}, which serving a steered model needs; known to work: 0.32")


if TYPE_CHECKING:
    Worker: Any
    """The worker class for `--worker-cls`: the platform's own, which steers the model that it loads."""
    RequestCheck: Any
    """For `--logits-processors`: it refuses requests whose arguments are wrong, and never sees a logit."""


def __getattr__(name: str) -> Any:
    # Made when asked for, since their bases are vLLM's, and only vLLM knows the platform.
    if name == "Worker":
        return _worker_class()
    if name == "RequestCheck":
        return _request_check()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _worker_class() -> type:
    platform = _point("vllm.platforms", "current_platform")
    if platform.is_cpu():
        base = _point("vllm.v1.worker.cpu_worker", "CPUWorker")
    elif platform.is_cuda_alike():
        base = _point("vllm.v1.worker.gpu_worker", "Worker")
    else:
        raise RuntimeError(f"vLLM on {platform.device_name} cannot be steered; use a CPU or a GPU")

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # it becomes a method
        settings = _Settings.read(vllm_config.additional_config)
        steerer = load_steerer(settings.steerer)
        self._steering = _Steering(steerer, settings)
        check_engine(vllm_config, steerer, self._steering.layer)
        model = vllm_config.model_config
        # Requests are checked where they come in. Here it would only make the sampler keep all that was written.
        own = f"{__name__}:RequestCheck"
        model.logits_processors = [each for each in model.logits_processors if each != own] or None
        base.__init__(self, vllm_config, *args, **kwargs)

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = base.load_model(self, *args, **kwargs)
        layers = self.vllm_config.compilation_config.static_forward_context
        self._steering.attach(self.get_model(), self.model_runner, layers)
        return result

    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = base.compile_or_warm_up_model(self, *args, **kwargs)
        with self._steering.trial():
            self.execute_dummy_batch()
        self._steering.steered_tokens = 0
        logging.getLogger(f"vllm.{_PREFIX}").info("%s: %s", _PREFIX, self._steering.report())
        return result

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with self._steering.step(scheduler_output):
            return base.execute_model(self, scheduler_output, *args, **kwargs)

    def steering_report(self: Any) -> dict[str, Any]:
        report: dict[str, Any] = self._steering.report()
        return report

    changed = {
        "__init__": __init__,
        "load_model": load_model,
        "compile_or_warm_up_model": compile_or_warm_up_model,
        "execute_model": execute_model,
    }
    for method in (*changed, "execute_dummy_batch", "get_model"):
        if not hasattr(base, method):
            raise _unknown(f"{base.__name__}.{method}")
    return type("Worker", (base,), {**changed, "steering_report": steering_report, "__module__": __name__})


@functools.cache
def _request_check() -> type:
    bases = [_point("vllm.v1.sample.logits_processor", "LogitsProcessor")]
    # Each of vLLM's two model runners wants a class of its own kind; the second is not in every release.
    with contextlib.suppress(RuntimeError):
        bases.append(_point("vllm.v1.worker.gpu.sample.logits_processor", "LogitsProcessor"))

    def validate_params(cls: Any, sampling_params: Any) -> None:
        request_strength(sampling_params.extra_args, 0.0)

    def __init__(self: Any, *args: Any) -> None:  # noqa: N807  # it becomes a method
        """Without the worker, which takes it off the engine's list, it is made and does nothing."""

    def apply(self: Any, logits: Tensor, *args: Any) -> Tensor:
        return logits

    members = {
        "__module__": __name__,
        "__init__": __init__,
        "validate_params": classmethod(validate_params),
        "apply": apply,
        "is_argmax_invariant": lambda self: True,
        "update_state": lambda self, batch_update: None,
        "add_request": lambda self, index, sampling_params: False,
    }
    return type("RequestCheck", tuple(bases), members)
