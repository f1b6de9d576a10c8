"""Reading a Llama model and its tokenizer out of a GGUF file, in one pass over the file.

transformers reads GGUF too (`gguf_file=`). It parses the file's header three times, refuses to save what it has read,
and its tokenizer leaves out the rule that SmolLM2 keeps each digit apart, so that "    10" becomes other tokens than
the model was trained on. Weights and logits are the same, which the tests check.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, PreTrainedTokenizerBase

_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3


@dataclass(frozen=True)
class LlamaParts:
    """A Llama model in parts.

    Args:
        state: Name in transformers and tensor in float32. A tied output projection is left out.
        config: Its configuration.
        tokenizer: Its tokenizer with chat template.
    """

    state: "dict[str, torch.Tensor]"
    config: "LlamaConfig"
    tokenizer: "PreTrainedTokenizerBase"


def read_llama(path: Path) -> LlamaParts:
    """Read a GGUF file of architecture "llama" with a byte-level BPE tokenizer.

    Args:
        path: The file.

    Returns:
        Its parts, weights dequantised to float32, which loses nothing.

    Raises:
        ValueError: The file holds something else.
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = (fields["general.architecture"], fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("llama", "gpt2", "smollm"):
        raise ValueError(
            f'{path} must have the architecture "llama" and the tokenizer "gpt2", "smollm", got {", ".join(kind)}'
        )
    state = _state(reader, fields)
    return LlamaParts(state, _config(fields, tied="lm_head.weight" not in state), _tokenizer(fields))


def _state(reader: Any, fields: dict[str, Any]) -> "dict[str, torch.Tensor]":
    import torch
    from gguf.quants import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    state = {}
    for tensor in reader.tensors:
        # A copy, since what needs no dequantising is a read-only view of the file.
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = tensor.name.removesuffix(".weight")
        if name in _MODEL:
            state[f"{_MODEL[name]}.weight"] = weight
            continue
        _, layer, part = name.split(".")
        if part in heads:
            # GGUF keeps the two members of a rotated pair side by side, transformers half a head apart.
            pairs = weight.reshape(heads[part], -1, 2, weight.shape[1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        state[f"model.layers.{layer}.{_LAYER[part]}.weight"] = weight.contiguous()
    return state


def _config(fields: dict[str, Any], *, tied: bool) -> "LlamaConfig":
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=tied,
    )


def _tokenizer(fields: dict[str, Any]) -> "PreTrainedTokenizerBase":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([token for token, kind in kinds if kind == _CONTROL_TOKEN])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
