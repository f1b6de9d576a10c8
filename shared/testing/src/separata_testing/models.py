"""Tiny random language models of several architectures, and a tokenizer for them, made in memory."""

import copy
import functools
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Larger than the tokenizer's 260, as it often is in real models.
VOCABULARY = 272
LAYERS = 3
HIDDEN = 32
WINDOW = 8

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}

# Name: configuration class, its arguments. What each one adds to the others stands behind it.
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),  # grouped-query attention
    "qwen2": ("Qwen2Config", {**_GROUPED, "tie_word_embeddings": True}),  # biases at q, k, v; shared embedding
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 16}),  # norms on q and k; heads wider than hidden_size / heads
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": WINDOW}),  # a window in every layer
    "gemma2": (  # soft-capped logits, scale apart from the head's width, every other layer with a window
        "Gemma2Config",
        {**_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW},
    ),
    "gemma3": (  # two rotary bases; windows in all layers but the last
        "Gemma3TextConfig",
        {
            **_GROUPED,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {**_SIZES, "rotary_pct": 0.5}),  # q, k, v in one projection; parallel residual
    "gpt2": (  # learned positions, transposed weights (Conv1D)
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 512,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": 4,
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
}

ARCHITECTURES = tuple(_ARCHITECTURES)


def tiny_model(
    architecture: str = "llama",
    *,
    dtype: "torch.dtype | None" = None,
    attn_implementation: str | None = None,
    seed: int = 0,
    **config: Any,
) -> "PreTrainedModel":
    """Makes a small causal language model with random weights, in evaluation mode, on the CPU.

    It has 3 layers, 4 query heads, 2 key-value heads where the architecture groups them, 32 hidden units and a
    vocabulary of 272. Weights are large enough for attention to be far from uniform, and no bias or norm weight has its
    trivial value, so that leaving one out shows.

    Args:
        architecture: One of `ARCHITECTURES`.
        dtype: Type of the weights; float32 without it. Weights of another type are the float64 ones, rounded.
        attn_implementation: As in transformers: `"eager"`, `"sdpa"` and so on; the model's own choice without it.
        seed: For the weights.
        config: Overrides of the configuration's fields.

    Returns:
        A model of its own for every call: changing it changes no other test's.

    Raises:
        ValueError: The architecture is unknown.
    """
    import torch

    if architecture not in _ARCHITECTURES:
        raise ValueError(f"architecture is {architecture!r}; it must be one of {', '.join(ARCHITECTURES)}")
    built = _build(architecture, attn_implementation, seed, tuple(sorted(config.items())))
    model: Any = copy.deepcopy(built)  # transformers decorates `to` so that its type is lost
    return cast("PreTrainedModel", model.to(dtype or torch.float32))


@functools.cache
def _build(
    architecture: str, attn_implementation: str | None, seed: int, config: tuple[tuple[str, Any], ...]
) -> "PreTrainedModel":
    import torch
    import transformers

    class_name, arguments = _ARCHITECTURES[architecture]
    configuration = getattr(transformers, class_name)(**{**arguments, **dict(config)})
    if attn_implementation is not None:
        configuration._attn_implementation = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        factory: Any = transformers.AutoModelForCausalLM  # untyped
        model = factory.from_config(configuration, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return cast("PreTrainedModel", model.eval())


@functools.cache
def _tokenizer() -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<bos>", "<eos>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))  # noqa: S106  # no password
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    make: Any = PreTrainedTokenizerFast  # untyped
    tokenizer = make(
        tokenizer_object=backend,
        pad_token="<pad>",  # noqa: S106  # no password
        bos_token="<bos>",  # noqa: S106  # no password
        eos_token="<eos>",  # noqa: S106  # no password
        unk_token="<unk>",  # noqa: S106  # no password
        chat_template=(
            "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        ),
    )
    return cast("PreTrainedTokenizerFast", tokenizer)


def tiny_tokenizer() -> "PreTrainedTokenizerFast":
    """Makes the tokenizer of the tiny models: one token per byte of UTF-8, `<bos>` in front.

    Ids: 0 `<pad>`, 1 `<bos>`, 2 `<eos>`, 3 `<unk>`, then the 256 bytes. It has a plain chat template and reads and
    writes no file.

    Returns:
        A tokenizer of its own for every call.
    """
    return copy.deepcopy(_tokenizer())
