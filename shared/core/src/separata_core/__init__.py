"""Tensor operations, Triton kernels and access to the inside of transformers models."""

from separata_core.attention import (
    attention_with_key_bias,
    augment_states,
    closed_form_floor,
    correct_output,
    key_bias_mask,
    key_weight,
)
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
from separata_core.vocab import (
    VocabStatistics,
    vocab_entropy,
    vocab_log_probs,
    vocab_statistics,
    vocab_topk,
)

__all__ = [
    "HeadCounts",
    "VocabStatistics",
    "attention_modules",
    "attention_with_key_bias",
    "augment_states",
    "capture_hidden_states",
    "closed_form_floor",
    "correct_output",
    "decoder_layers",
    "edit_hidden_states",
    "final_norm",
    "head_counts",
    "key_bias_mask",
    "key_weight",
    "logit_scaling",
    "output_projection",
    "vocab_entropy",
    "vocab_log_probs",
    "vocab_statistics",
    "vocab_topk",
]
