"""The functions of the flash-attn library, written in torch, to test what transformers does around them."""

import sys
import types
from typing import Any

import torch


def _attend(query: Any, key: Any, value: Any, scale: float, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    """`[rows, heads, dim]` each; the last query stands at the last key."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1], "flash kernels want one width"
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = torch.einsum("qhd,khd->hqk", query, key) * scale
    at, of = torch.arange(key.shape[0])[None], torch.arange(query.shape[0])[:, None] + key.shape[0] - query.shape[0]
    seen = at <= of if causal else torch.ones(len(of), at.shape[1], dtype=torch.bool)
    if window[0] >= 0:
        seen = seen & (of - at <= window[0])
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(), value)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False
):
    return torch.stack([_attend(*each, softmax_scale, causal, window_size) for each in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
):
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    pieces = [
        _attend(q[a:b], k[c:d], v[c:d], softmax_scale, causal, window_size)
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
    ]
    return torch.cat(pieces)


def pad_input(hidden, indices, batch, length):
    padded = hidden.new_zeros(batch * length, *hidden.shape[1:])
    padded[indices] = hidden
    return padded.view(batch, length, *hidden.shape[1:])


def unpad_input(hidden, mask):
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden.flatten(0, 1)[indices], indices, ends, int(lengths.max()), lengths


def pretend(monkeypatch) -> None:
    """Let transformers find these functions where it looks for flash-attn 2."""
    import transformers.modeling_flash_attention_utils as utils

    library, padding = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    library.flash_attn_func, library.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    library.flash_attn_with_kvcache = None
    padding.pad_input, padding.unpad_input = pad_input, unpad_input
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda *_, **__: True)
    for version in (3, 4):  # else they would look for the library's files, and keep what they find
        monkeypatch.setattr(utils, f"is_flash_attn_{version}_available", lambda *_, **__: False, raising=False)
    # What it has loaded before is kept there.
    monkeypatch.setattr(utils, "_loaded_implementation", None, raising=False)
