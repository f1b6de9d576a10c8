"""Serving a model in vLLM under a configuration, exactly.

vLLM's attention kernels read keys and values from a paged cache and give back neither weights nor, on every backend,
their log-sum-exp. What every kernel computes is dot products, so the bias is put into them: the heads of the layers in
question are made wider than the model's, the key of position 0 of each sequence carries 1 in the added dimensions
where all other keys carry 0, and the query carries `log(gamma) / scale`, so that the kernel itself adds `log(gamma)` to
the scaled logit of the initial token (in 16 bit the query carries it in three parts that add up to float32's
precision). It is the same function as everywhere in this package. Since the mark of the initial token lies in the cache
beside its key, decoding, prefill in chunks, cached prefixes, sliding windows and unequal batches need nothing more.

The price is the width: cache and attention of these layers grow by the padding, to the next width that the backend's
kernels take. The other layers keep theirs.

The way in is vLLM's own: a worker class. It loads the model with the platform's worker, then gives each attention layer
in question a wider implementation of the same backend, before vLLM asks the layers how much cache they need::

    LLM(model, **engine_arguments("sst2.json"))

    vllm serve MODEL --worker-cls zerotuning.vllm.Worker --additional-config '{"zerotuning": "sst2.json"}'

One engine has one configuration for its whole life, so its prefix cache never mixes two.
"""

import dataclasses
import functools
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from zerotuning.config import ZeroTuningConfig
from zerotuning.operator import clamp_log_gamma, warn_if_extreme

# Derived, so that a vendored copy beside an installed original keeps its own settings and marks.
_PREFIX = __name__.rpartition(".")[0].replace(".", "_")

# Whose metadata says where sequences begin, and whose buffers follow the width in the cache's description. Others size
# theirs by the model's head size (Triton's), or keep their lengths elsewhere (FlashInfer's).
_BACKENDS = ("CPU_ATTN", "FLASH_ATTN")


def engine_arguments(config: str | os.PathLike[str], *, head_size: int | None = None) -> dict[str, Any]:
    """What to hand to `vllm.LLM` or `AsyncEngineArgs` beside the model, to serve it under a configuration.

    Args:
        config: A file written by `ZeroTuningConfig.save`, for the model to be served.
        head_size: Width of the heads of the layers in question, instead of the smallest one possible. A kernel may be
            faster at a somewhat larger one, such as a multiple of 32 on CPUs with AMX.

    Returns:
        Keyword arguments.

    Raises:
        ValueError: The file is truncated, altered, of another kind or from a newer version, or `head_size` is no
            positive number.
        OSError: It cannot be read.
    """
    path = Path(config).absolute()
    ZeroTuningConfig.load(path)
    settings = str(path) if head_size is None else {"config": str(path), "head_size": head_size}
    _Settings.read({_PREFIX: settings})
    return {"worker_cls": f"{__name__}.Worker", "additional_config": {_PREFIX: settings}}


def query_bias(
    log_gamma: Float[Tensor, " heads"], scale: float, dtype: torch.dtype, columns: int
) -> Float[Tensor, "heads columns"]:
    """What the added dimensions of the queries hold.

    Args:
        log_gamma: Natural logarithm of the factor of each head.
        scale: What the kernel multiplies the logits by.
        dtype: Type of the queries.
        columns: How many dimensions are added; at least `added_columns(dtype)`.

    Returns:
        Values in `dtype` whose exact sum over the columns is `log_gamma / scale` in float32, to a unit of its last
        place.
    """
    rest = clamp_log_gamma(log_gamma).double() / scale
    bias = rest.new_zeros(len(rest), columns, dtype=dtype)
    for column in range(added_columns(dtype)):
        bias[:, column] = rest.to(dtype)
        rest = rest - bias[:, column].double()
    return bias


def added_columns(dtype: torch.dtype) -> int:
    """How many added dimensions hold a bias to the precision of float32.

    Args:
        dtype: Type of queries and keys.

    Returns:
        1 for float32, 3 for types of 16 bit.
    """
    return 1 if dtype.itemsize >= torch.float32.itemsize else 3


def initial_tokens(
    query_start_loc: Int[Tensor, " requests_plus_1"], seq_lens: Int[Tensor, " requests"], tokens: int
) -> Bool[Tensor, " tokens"]:
    """Which tokens of a step are the first of their sequence.

    A step holds a stretch of each of its sequences; its first token is the sequence's first if nothing of the sequence
    was computed before, that is if the stretch is the whole sequence so far. Nothing here waits for a GPU.

    Args:
        query_start_loc: Where the stretch of each sequence begins among the tokens of the step, and the end.
        seq_lens: Length of each sequence at the end of the step.
        tokens: Number of tokens, padding included.

    Returns:
        True at initial tokens.
    """
    begin = query_start_loc[:-1]
    count = query_start_loc[1:] - begin
    fresh = (count > 0) & (seq_lens == count)
    # Sequences that began earlier, and padding, are sent to a place that is cut off.
    place = torch.where(fresh, begin, tokens).long()
    return torch.zeros(tokens + 1, dtype=torch.bool, device=begin.device).scatter_(0, place, True)[:tokens]


def wider_head(head_size: int, added: int, supports: Any, wanted: int | None = None) -> int:
    """The width of a head with room for the bias.

    Args:
        head_size: The model's.
        added: How many dimensions the bias needs.
        supports: A function that says whether the kernels take a width.
        wanted: A width to use instead of the smallest.

    Returns:
        A multiple of 8, so that every key stays aligned to 16 bytes.

    Raises:
        ValueError: There is none, or `wanted` is not one.
    """
    least = head_size + added
    possible = [width for width in range(-(-least // 8) * 8, 4 * least + 8, 8) if supports(width)]
    if not possible:
        raise ValueError(f"the attention kernels take no head size from {least} up; the model's is {head_size}")
    if wanted is not None and wanted not in possible:
        raise ValueError(f"head_size={wanted} is not possible; use one of {', '.join(map(str, possible))}")
    return possible[0] if wanted is None else wanted


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What `additional_config` says."""

    config: Path
    head_size: int | None = None

    @classmethod
    def read(cls, additional_config: Any) -> "_Settings":
        found = additional_config.get(_PREFIX) if isinstance(additional_config, Mapping) else None
        how = f'set additional_config to {{"{_PREFIX}": "FILE"}}, or use engine_arguments(FILE)'
        if found is None:
            raise ValueError(f"the engine uses {__name__}.Worker but names no configuration: {how}")
        if isinstance(found, str):
            found = {"config": found}
        if not isinstance(found, Mapping) or not set(found) <= {"config", "head_size"} or "config" not in found:
            raise ValueError(f"additional_config[{_PREFIX!r}] is {found!r}; {how}")
        head_size = found.get("head_size")
        if head_size is not None and (not isinstance(head_size, int) or head_size <= 0):
            raise ValueError(f"head_size is {head_size!r}; it must be a positive number")
        return cls(Path(found["config"]), head_size)


@dataclasses.dataclass(frozen=True)
class _Operator:
    """What one layer does to its states.

    Attributes:
        mode: That of the configuration.
        head_size: Width of the model's heads.
        width: Width of the heads that the kernel sees.
        values: On the layer's device; exact: `[heads, width - head_size]`, in addition to the queries; query: a factor
            on them, `[heads, 1]`; key: a factor on the initial key, `[kv_heads, 1]`.
    """

    mode: str
    head_size: int
    width: int
    values: Tensor

    def queries(self, query: Tensor) -> Tensor:
        if self.mode == "exact":
            return torch.cat([query, self.values.expand(len(query), -1, -1)], dim=-1)
        return (query.float() * self.values).to(query.dtype) if self.mode == "query" else query

    def keys_and_values(self, key: Tensor, value: Tensor, layer_name: str) -> tuple[Tensor, Tensor]:
        if self.mode == "query":
            return key, value
        if self.mode == "key":
            initial = _marks_of_step(layer_name, key, 1) != 0
            return torch.where(initial, (key.float() * self.values).to(key.dtype), key), value
        marks = _marks_of_step(layer_name, key, self.width - self.head_size)
        # What the values hold there does not matter: the output is cut off.
        return torch.cat([key, marks], dim=-1), torch.cat([value, marks], dim=-1)


class _Tuned:
    """Comes before an attention implementation of vLLM in the order of its bases."""

    operator: _Operator

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        update = super().do_kv_cache_update  # type: ignore[misc]  # the implementation that follows has it
        update(layer, *self.operator.keys_and_values(key, value, layer.layer_name), kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **scales: Tensor | None,
    ) -> Any:
        if any(scale is not None for scale in scales.values()):
            raise ValueError("an output that the attention quantises is not supported under a configuration")
        attend = super().forward  # type: ignore[misc]  # what follows has it
        if attn_metadata is None:  # a trial run, which computes nothing
            return attend(layer, query, key, value, kv_cache, attn_metadata, output)
        query = self.operator.queries(query)
        # Key and value are in the cache, which is where these kernels read them.
        if self.operator.mode != "exact":
            return attend(layer, query, key, value, kv_cache, attn_metadata, output)
        wide = output.new_empty(*output.shape[:-1], self.operator.width)
        attend(layer, query, key, value, kv_cache, attn_metadata, wide)
        return output.copy_(wide[..., : self.operator.head_size])

    # Fused operations of vLLM write keys or outputs of the model's width by themselves.
    def fused_output_quant_supported(self, *args: Any) -> bool:
        return False

    def fused_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_mrope_kvcache_supported(self) -> bool:
        return False


def _marks_of_step(layer_name: str, key: Tensor, columns: int) -> Tensor:
    """Ones at the initial tokens of the step that is running and zeros at the others, `[tokens, kv_heads, columns]`."""
    context = _point("vllm.forward_context", "get_forward_context")()
    # The context lives for one step, in which all layers have the same sequences.
    memo = context.additional_kwargs.setdefault(_PREFIX, {})
    name = (*key.shape[:2], columns, key.dtype)
    if name not in memo:
        metadata, *_ = _point("vllm.model_executor.layers.attention.attention", "get_attention_context")(layer_name)
        # A trial run, as when graphs are captured or a data-parallel rank is idle, has no sequences and no slots.
        initial = (
            torch.zeros(len(key), dtype=torch.bool, device=key.device)
            if metadata is None
            else initial_tokens(metadata.query_start_loc, metadata.seq_lens, len(key))
        )
        memo[name] = initial[:, None, None].expand(-1, key.shape[1], columns).to(key.dtype)
    marks: Tensor = memo[name]
    return marks


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
    return RuntimeError(f"vLLM {version} has no {what}, which serving under a configuration needs; known to work: 0.32")


@functools.cache
def _tuned_class(implementation: type) -> type:
    for method in ("do_kv_cache_update", "forward"):
        if not hasattr(implementation, method):
            raise _unknown(f"{implementation.__name__}.{method}")
    return type(f"Tuned{implementation.__name__}", (_Tuned, implementation), {})


@functools.cache
def _wide_backend(backend: Any, width: int) -> type:
    def customize_spec(cls: Any, spec: Any) -> Any:
        return dataclasses.replace(backend.customize_spec.__func__(cls, spec), head_size=width, head_size_v=width)

    if not hasattr(backend, "customize_spec"):
        raise _unknown(f"{backend.__name__}.customize_spec")
    # vLLM tells backends apart by module and qualified name.
    name = f"{backend.__name__}OfWidth{width}"
    members = {"customize_spec": classmethod(customize_spec), "__module__": __name__, "__qualname__": name}
    return type(name, (backend,), members)


def check_engine(vllm_config: Any, config: ZeroTuningConfig) -> None:
    """Refuse an engine, before it loads its model, that cannot serve under a configuration.

    Args:
        vllm_config: A `vllm.config.VllmConfig`.
        config: The configuration.

    Raises:
        ValueError: The model is another one, or the engine has a feature that is not covered.
    """
    model = vllm_config.model_config
    text = model.hf_text_config
    wanted = config.model_id
    found = {
        "layers": model.get_total_num_hidden_layers(),
        "query heads": getattr(text, "num_attention_heads", None),
        "key/value heads": model.get_total_num_kv_heads(),
    }
    needed = {
        "layers": wanted.layers,
        "query heads": wanted.query_heads,
        "key/value heads": wanted.key_value_heads,
    }
    wrong = [f"{name} {needed[name]} (this model: {found[name]})" for name in needed if needed[name] != found[name]]
    types = dict.fromkeys((model.hf_config.model_type, text.model_type))
    if wanted.type not in types:
        wrong.insert(0, f"model type {wanted.type!r} (this model: {' or '.join(map(repr, types))})")
    if wrong:
        raise ValueError(
            f"the configuration was made for another model: {', '.join(wrong)}; calibrate one for this model"
        )
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    refused = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "transfer of its KV cache (kv_transfer_config), which could mix configurations": (
            vllm_config.kv_transfer_config is not None
        ),
        "context parallelism": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        "dual-batch overlap or microbatches": parallel.use_ubatching,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        'full CUDA graphs (pass compilation_config={"cudagraph_mode": "PIECEWISE"}, or enforce_eager=True)': (
            compilation.cudagraph_mode.has_full_cudagraphs()
        ),
    }
    for feature, used in refused.items():
        if used:
            raise ValueError(f"an engine with {feature} is not supported under a configuration")


def tune_layers(vllm_config: Any, config: ZeroTuningConfig, head_size: int | None = None) -> dict[str, Any]:
    """Give the attention layers of a loaded model, which has no KV cache yet, their wider implementations.

    Args:
        vllm_config: The engine's `vllm.config.VllmConfig`, whose layers are changed.
        config: The configuration, not the identity.
        head_size: See `engine_arguments`.

    Returns:
        What was done: `layers`, their `head_size` before and after, bytes of cache per token likewise.

    Raises:
        ValueError: A layer is of a kind that is not covered.
        RuntimeError: This vLLM lacks something that is needed.
    """
    layers = _attention_layers(vllm_config, config.model_id.layers)
    # Where layers keep caches of several kinds, vLLM lets them share pages, which needs equal sizes.
    shared = config.mode == "exact" and any(layer.sliding_window is not None for layer in layers.values())
    chosen = list(layers) if shared else list(config.layers)
    rank = _point("vllm.distributed", "get_tensor_model_parallel_rank")()
    world = _point("vllm.distributed", "get_tensor_model_parallel_world_size")()
    report: dict[str, Any] = {"mode": config.mode, "layers": chosen, "fingerprint": config.fingerprint}
    before, after = 0, 0
    for index, layer in layers.items():
        _check_layer(index, layer)
        if layer.num_heads * world != config.model_id.query_heads:
            raise ValueError(
                f"layer {index} has {layer.num_heads * world} query heads, the configuration is for "
                f"{config.model_id.query_heads} in every layer"
            )
        size = width = layer.head_size
        if index in chosen:
            heads = config.log_gamma[index][rank * layer.num_heads : (rank + 1) * layer.num_heads]
            operator = _operator(config.mode, heads, layer, head_size)
            width = operator.width
            layer.impl = _tuned_implementation(index, layer, operator)
            if width != size:
                layer.attn_backend = _wide_backend(layer.attn_backend, width)
            report["head_size"] = [size, width]
        bytes_ = 2 * layer.num_kv_heads * layer.kv_cache_torch_dtype.itemsize
        before, after = before + size * bytes_, after + width * bytes_
    report["cache_bytes_per_token"] = [before, after]
    return report


def _attention_layers(vllm_config: Any, count: int) -> dict[int, Any]:
    base = _point("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase")
    attention = _point("vllm.model_executor.layers.attention", "Attention")
    index_of = _point("vllm.model_executor.models.utils", "extract_layer_index")
    found: dict[int, Any] = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if not isinstance(layer, base):
            continue
        if type(layer) is not attention:
            raise ValueError(
                f"layer {name} is a {type(layer).__name__}; only models whose layers are all plain causal "
                "self-attention can be served under a configuration"
            )
        found[index_of(name)] = layer
    if sorted(found) != list(range(count)):
        raise ValueError(
            f"the configuration is for {count} layers, but the model has attention in the layers {sorted(found)}"
        )
    return dict(sorted(found.items()))


def _check_layer(index: int, layer: Any) -> None:
    implementation = layer.impl
    decoder = _point("vllm.v1.attention.backend", "AttentionType").DECODER
    backend = layer.attn_backend.get_name()
    refused = {
        f"the attention backend {backend} (choose {' or '.join(_BACKENDS)})": backend not in _BACKENDS,
        f"attention of the type {layer.attn_type!r}": layer.attn_type != decoder,
        "a KV cache of another type than its keys (kv_cache_dtype)": layer.kv_cache_torch_dtype != layer.dtype,
        "the KV cache of another layer": layer.kv_sharing_target_layer_name is not None,
        "a prefix that attends in both directions": layer.use_mm_prefix,
        "values of another width than its keys": layer.head_size_v != layer.head_size,
        "a soft cap on its logits": bool(getattr(implementation, "logits_soft_cap", None)),
        "ALiBi": getattr(implementation, "alibi_slopes", None) is not None,
        "learned sinks": getattr(implementation, "sinks", None) is not None,
        "keys and values that the kernel itself writes": layer.attn_backend.forward_includes_kv_cache_update,
    }
    for feature, used in refused.items():
        if used:
            raise ValueError(f"layer {index} has {feature}, which is not supported under a configuration")


def _operator(mode: str, log_gamma: Tensor, layer: Any, head_size: int | None) -> _Operator:
    size, scale, device = layer.head_size, layer.impl.scale, next(layer.buffers()).device
    if mode == "exact":
        added = added_columns(layer.dtype)
        width = wider_head(size, added, layer.attn_backend.supports_head_size, head_size)
        bias = query_bias(log_gamma, scale, layer.dtype, width - size)
        return _Operator(mode, size, width, bias.to(device))
    if mode == "key":
        # The configuration has seen to it that the heads of a group agree.
        log_gamma = log_gamma[:: layer.num_heads // layer.num_kv_heads]
    elif mode != "query":
        raise ValueError(f"mode={mode!r} is not offered in vLLM; use 'exact', 'key' or 'query'")
    return _Operator(mode, size, size, clamp_log_gamma(log_gamma).exp()[:, None].to(device))


def _tuned_implementation(index: int, layer: Any, operator: _Operator) -> Any:
    old = layer.impl

    kind: Any = type(old)

    def make(class_: Any, size: int) -> Any:
        return class_(
            layer.num_heads,
            size,
            old.scale,
            layer.num_kv_heads,
            None,
            layer.sliding_window,
            layer.kv_cache_dtype,
            None,
            layer.attn_type,
            None,
        )

    # A twin shows whether these arguments are all that the model gave its layer.
    twin = vars(make(kind, layer.head_size))
    for name, value in vars(old).items():
        if isinstance(value, bool | int | float | str | tuple | None) and twin.get(name) != value:
            raise ValueError(
                f"layer {index} was made with {name}={value!r}, which is not supported under a configuration"
            )
    new = make(_tuned_class(kind), operator.width)
    new.operator = operator
    new.process_weights_after_loading(layer.dtype)
    return new


def check_computation(runner: Any, vllm_config: Any) -> None:
    """Let layers that have their cache compute on random states, in two steps, and compare with the definition.

    One layer of each group that shares a kernel stands for the others, with factors of its own for the occasion. So a
    kernel, width or cache layout that does not do what this module relies on is found before the first request.

    Args:
        runner: The worker's model runner.
        vllm_config: The engine's `vllm.config.VllmConfig`.

    Raises:
        RuntimeError: What the kernel computes is another function.
    """
    context = vllm_config.compilation_config.static_forward_context
    if not hasattr(runner, "attn_groups"):
        raise _unknown("attn_groups of its model runner")
    for group in (group for groups in runner.attn_groups for group in groups):
        name = next((name for name in group.layer_names if isinstance(context[name].impl, _Tuned)), None)
        if name is None:
            continue
        layer = context[name]
        served = layer.impl.operator
        heads = torch.linspace(-2, 2, layer.num_kv_heads)
        log_gamma = heads.repeat_interleave(layer.num_heads // layer.num_kv_heads)
        if served.mode != "key":
            log_gamma = log_gamma + torch.linspace(0, 0.5, layer.num_heads)
        try:
            layer.impl.operator = _operator(served.mode, log_gamma, layer, served.width)
            off = _deviation(name, layer, group, vllm_config, log_gamma)
        finally:
            layer.impl.operator = served
        # Outputs are of the order of 1, and kernels round weights and outputs to the layer's type.
        allowed = 8 * torch.finfo(layer.dtype).eps if layer.dtype.itemsize < 4 else 1e-4
        if not off <= allowed:
            raise RuntimeError(
                f"the attention backend {layer.attn_backend.get_name()} of this vLLM does not compute what it should "
                f"with heads of width {served.width}: it is off by {off:.2g} where {allowed:.2g} is allowed; use "
                "another backend or head_size"
            )


def _deviation(name: str, layer: Any, group: Any, vllm_config: Any, log_gamma: Tensor) -> float:
    """Largest error over two sequences that are computed in two steps."""
    device = next(layer.buffers()).device
    generator = torch.Generator().manual_seed(0)
    lengths, splits = (7, 5), ((4, 3), (3, 2))
    states = [
        [
            torch.randn(length, heads, layer.head_size, generator=generator).to(device, layer.dtype)
            for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        ]
        for length in lengths
    ]
    # The cache is a view of blocks, heads, tokens of a block, and content, whatever its layout.
    count, _, block_size, _ = layer.kv_cache.shape
    blocks = torch.tensor([count - 2, count - 1], dtype=torch.int32, device=device)
    outputs: list[list[Tensor]] = [[], []]
    done = [0, 0]
    for step in (0, 1):
        counts = [split[step] for split in splits]
        ends = [before + count for before, count in zip(done, counts, strict=True)]
        start = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
        slots = torch.cat(
            [
                torch.arange(before, end, device=device) + block.long() * block_size
                for before, end, block in zip(done, ends, blocks, strict=True)
            ]
        )
        common = _point("vllm.v1.attention.backend", "CommonAttentionMetadata")(
            query_start_loc=start.to(device),
            query_start_loc_cpu=start,
            seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            num_reqs=2,
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=max(ends),
            block_table_tensor=blocks[:, None],
            slot_mapping=slots,
            causal=True,
        )
        metadata = group.get_metadata_builder().build(0, common)
        set_context = _point("vllm.forward_context", "set_forward_context")
        query, key, value = (
            torch.cat([row[which][before:end] for row, before, end in zip(states, done, ends, strict=True)]).flatten(1)
            for which in range(3)
        )
        with set_context({name: metadata}, vllm_config, slot_mapping={name: slots}):
            output = layer(query, key, value).unflatten(-1, (layer.num_heads, layer.head_size))
        for row, part in enumerate(output.split(counts)):
            outputs[row].append(part)
        done = ends
    layer.kv_cache[blocks.long()] = 0
    window = layer.sliding_window or max(lengths)
    errors = [
        (torch.cat(parts).float() - _definition(layer.impl.operator.mode, log_gamma, row, layer.impl.scale, window))
        for parts, row in zip(outputs, states, strict=True)
    ]
    return max(float(error.abs().max()) for error in errors)


def _definition(mode: str, log_gamma: Tensor, states: list[Tensor], scale: float, window: int) -> Tensor:
    query, key, value = (each.float() for each in states)
    log_gamma = log_gamma.to(query.device)
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    logits = torch.einsum("qhd,khd->hqk", query, key) * scale
    if mode == "exact":
        logits[..., 0] += log_gamma[:, None]
    else:
        changed = slice(0, 1) if mode == "key" else slice(None)
        logits[..., changed] *= log_gamma.exp()[:, None, None]
    ages = torch.arange(len(query), device=query.device)
    ages = ages[:, None] - ages
    logits = logits.masked_fill((ages < 0) | (ages >= window), -torch.inf)
    return torch.einsum("hqk,khd->qhd", logits.softmax(dim=-1), value)


if TYPE_CHECKING:
    Worker: Any
    """The worker class for `--worker-cls`: the platform's own, which applies the configuration to what it loads."""


def __getattr__(name: str) -> Any:
    # Made when asked for, since its base is the platform's, and only vLLM knows the platform.
    if name == "Worker":
        return _worker_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _worker_class() -> type:
    platform = _point("vllm.platforms", "current_platform")
    if platform.is_cpu():
        base = _point("vllm.v1.worker.cpu_worker", "CPUWorker")
    elif platform.is_cuda_alike():
        base = _point("vllm.v1.worker.gpu_worker", "Worker")
    else:
        raise RuntimeError(f"vLLM on {platform.device_name} is not supported under a configuration; use a CPU or a GPU")

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # it becomes a method
        settings = _Settings.read(vllm_config.additional_config)
        config = ZeroTuningConfig.load(settings.config)
        check_engine(vllm_config, config)
        warn_if_extreme(config.log_gamma, vllm_config.model_config.dtype)
        self._tuning = (config, settings.head_size)
        self._tuning_report = {"mode": config.mode, "layers": [], "fingerprint": config.fingerprint}
        base.__init__(self, vllm_config, *args, **kwargs)

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = base.load_model(self, *args, **kwargs)
        config, head_size = self._tuning
        if not config.is_identity:
            with _point("vllm.config", "set_current_vllm_config")(self.vllm_config):
                self._tuning_report = tune_layers(self.vllm_config, config, head_size)
        logger = _point("vllm.logger", "init_logger")(f"vllm.{_PREFIX}")
        logger.info("%s: %s", _PREFIX, self._tuning_report)
        return result

    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = base.initialize_from_config(self, *args, **kwargs)
        with _point("vllm.config", "set_current_vllm_config")(self.vllm_config):
            check_computation(self.model_runner, self.vllm_config)
        return result

    def tuning_report(self: Any) -> dict[str, Any]:
        report: dict[str, Any] = self._tuning_report
        return report

    changed = {"__init__": __init__, "load_model": load_model, "initialize_from_config": initialize_from_config}
    for method in changed:
        if not hasattr(base, method):
            raise _unknown(f"{base.__name__}.{method}")
    return type("Worker", (base,), {**changed, "tuning_report": tuning_report, "__module__": __name__})
