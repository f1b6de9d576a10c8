"""Log-probabilities, entropies and top-k over a vocabulary, without a tensor of [tokens, vocabulary].

A language model's last step is `logits = hidden @ weight.T`, and what is wanted of it is mostly one number per token.
With 4096 tokens and 49152 entries the logits alone take 0.8 GB, their log-softmax as much again. The functions here
walk over the logits in tiles and keep, per token, the running maximum `m`, the sum `S = sum exp(l - m)` and the sum
`Q = sum exp(l - m) (l - m)`, from which (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax")

    log p(target) = l(target) - m - log S        logsumexp = m + log S        entropy = log S - Q / S

follow. The backward pass computes each tile again instead of storing it, as Apple's cut cross-entropy does
(Wijmans et al. 2024, arXiv:2411.09009).

The logits are `l = softcap(hidden @ weight.T + bias) / temperature` with `softcap(z) = cap * tanh(z / cap)`. An entry
whose bias is -inf is out of the vocabulary, also under a softcap.

Memory: beside its results, its gradients and some numbers per token, a call holds at most six tiles of `TILE_ELEMENTS`
(CPU) or `ACCELERATOR_TILE_ELEMENTS` elements of at most 8 bytes, whatever the number of tokens and the size of the
vocabulary. In half precision the gradient of `hidden` is summed in float32, which takes another [tokens, dim].

Numerics: sums run in float32, or in float64 for float64 input, and results have that type. Against float64 on the same
inputs, float32 is within 1e-5 times the larger of 1 and the largest logit. In bfloat16 and float16 the Triton kernel
keeps logits in float32; the torch path lets the library round each logit to the input's type, as the model's own head
does (float16 on a CPU is computed in float32), so that its error is that of one rounding of the logits involved.
NaN and +inf among a token's logits make its results NaN; so does a vocabulary that is masked out entirely.
"""

import math
import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 -- the name that everyone gives it
from jaxtyping import Float, Int, Integer
from torch import Tensor

__all__ = ["VocabStatistics", "vocab_entropy", "vocab_log_probs", "vocab_statistics", "vocab_topk"]

Backend = Literal["auto", "triton", "torch", "reference"]

# Smaller tiles stay in a processor's cache, but its threads then wait for each other more often, the longer the busier
# the machine is; an accelerator needs larger ones to be busy.
TILE_ELEMENTS = 2**23
ACCELERATOR_TILE_ELEMENTS = 2**24

# exp of this is 0 in every type, so replacing a lower exponent by it changes nothing but 0 * -inf, which is NaN.
LOWEST_EXPONENT = -1e4


@dataclass(frozen=True)
class VocabStatistics:
    """What `vocab_statistics` returns; what was not asked for is None.

    Attributes:
        logsumexp: Logarithm of the sum of exp(logits), per token.
        log_probs: Log-probability of the target, per token, in nats; 0 where the target is `ignore_index`.
        entropy: Entropy of the distribution over the vocabulary, per token, in nats.
        top_log_probs: Log-probabilities of the k likeliest entries, largest first.
        top_indices: Their indices.
    """

    logsumexp: Float[Tensor, "*tokens"]
    log_probs: Float[Tensor, "*tokens"] | None = None
    entropy: Float[Tensor, "*tokens"] | None = None
    top_log_probs: Float[Tensor, "*tokens k"] | None = None
    top_indices: Int[Tensor, "*tokens k"] | None = None


def vocab_log_probs(
    hidden: Float[Tensor, "*tokens dim"],
    weight: Float[Tensor, "vocab dim"],
    targets: Integer[Tensor, "*tokens"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    ignore_index: int = -100,
    backend: Backend = "auto",
) -> Float[Tensor, "*tokens"]:
    """Log-probability of each target under its token's hidden state.

    Args and errors are those of `vocab_statistics`. Differentiable in `hidden`, `weight` and `bias`.

    Returns:
        Log-probabilities in nats, float32 (float64 for float64 input); 0, with no gradient, at `ignore_index`.
    """
    log_probs = vocab_statistics(
        hidden,
        weight,
        targets,
        bias=bias,
        temperature=temperature,
        logit_softcap=logit_softcap,
        ignore_index=ignore_index,
        backend=backend,
    ).log_probs
    assert log_probs is not None
    return log_probs


def vocab_entropy(
    hidden: Float[Tensor, "*tokens dim"],
    weight: Float[Tensor, "vocab dim"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    backend: Backend = "auto",
) -> Float[Tensor, "*tokens"]:
    """Entropy of the distribution over the vocabulary at each token.

    Args and errors are those of `vocab_statistics`. Differentiable in `hidden`, `weight` and `bias`.

    Returns:
        Entropies in nats, float32 (float64 for float64 input).
    """
    entropy = vocab_statistics(
        hidden,
        weight,
        entropy=True,
        bias=bias,
        temperature=temperature,
        logit_softcap=logit_softcap,
        backend=backend,
    ).entropy
    assert entropy is not None
    return entropy


def vocab_topk(
    hidden: Float[Tensor, "*tokens dim"],
    weight: Float[Tensor, "vocab dim"],
    k: int,
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "*tokens k"], Int[Tensor, "*tokens k"]]:
    """The k likeliest entries of the vocabulary at each token.

    Args and errors are those of `vocab_statistics`. Not differentiable.

    Returns:
        Log-probabilities in nats, largest first, and indices (int64). Among equal logits the lower index comes first
        and is the one that is kept.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    statistics = vocab_statistics(
        hidden,
        weight,
        top_k=k,
        bias=bias,
        temperature=temperature,
        logit_softcap=logit_softcap,
        backend=backend,
    )
    assert statistics.top_log_probs is not None
    assert statistics.top_indices is not None
    return statistics.top_log_probs, statistics.top_indices


def vocab_statistics(
    hidden: Float[Tensor, "*tokens dim"],
    weight: Float[Tensor, "vocab dim"],
    targets: Integer[Tensor, "*tokens"] | None = None,
    *,
    entropy: bool = False,
    top_k: int = 0,
    bias: Float[Tensor, " vocab"] | None = None,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    ignore_index: int = -100,
    backend: Backend = "auto",
) -> VocabStatistics:
    """All of the above, in one pass over the logits.

    Autocast does not apply: products are taken in the type of the inputs. Gradients are those of `logsumexp`,
    `log_probs` and `entropy`, computed only for the inputs that want one. There are no second derivatives (but with the
    backend "reference"): a backward pass with `create_graph=True` raises RuntimeError.

    Args:
        hidden: Last hidden states, after the final norm, [..., dim].
        weight: Output projection, [vocab, dim], of the type and on the device of `hidden`.
        targets: Vocabulary indices whose log-probability is wanted, of the leading shape of `hidden`. On an accelerator
            their range check waits for the device once.
        entropy: Whether the entropy is wanted.
        top_k: How many of the likeliest entries are wanted.
        bias: Added to the logits, [vocab]; -inf removes an entry.
        temperature: The logits are divided by it, last.
        logit_softcap: Bound of the logits, as in Gemma 2: `cap * tanh(logits / cap)`; None for none.
        ignore_index: Targets of this value are skipped.
        backend: "triton" is the kernel (CUDA; float32, float16 or bfloat16; no top-k), "torch" the tiled computation in
            torch, "reference" the one that builds the whole logits tensor. "auto" takes the kernel where it can run and
            "torch" elsewhere.

    Raises:
        TypeError: A tensor has a type that does not fit.
        ValueError: Shapes, devices, a target, `top_k`, `temperature`, `logit_softcap` or `backend` do not fit.
    """
    _check(hidden, weight, targets, top_k, bias, temperature, logit_softcap, ignore_index)
    leading = hidden.shape[:-1]
    head = _Head(
        hidden.reshape(math.prod(leading), hidden.shape[-1]),
        weight,
        bias,
        temperature=float(temperature),
        softcap=None if logit_softcap is None else float(logit_softcap),
    )
    target = None if targets is None else targets.reshape(-1).long()
    if target is not None:
        target = target.masked_fill(target == ignore_index, _IGNORED)
    chosen = _choose(backend, hidden, top_k)
    # Autocast would change the type of some products and not of others.
    with torch.autocast(hidden.device.type, enabled=False):
        if chosen == "reference":
            results = _reference(head, target, entropy, top_k)
        else:
            results = _VocabStatistics.apply(
                head.hidden, weight, bias, target, head.temperature, head.softcap, entropy, top_k, chosen == "triton"
            )
    logsumexp, log_probs, entropies, top_log_probs, top_indices = results
    return VocabStatistics(
        logsumexp.view(leading),
        None if log_probs is None else log_probs.view(leading),
        None if entropies is None else entropies.view(leading),
        None if top_log_probs is None else top_log_probs.view(*leading, top_k),
        None if top_indices is None else top_indices.view(*leading, top_k),
    )


_IGNORED = -1  # stands for any `ignore_index` once the arguments are checked

# logsumexp, log_probs, entropy, top_log_probs, top_indices, of flattened tokens
_Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class _Head:
    """The map from hidden states [N, d] to logits [N, V]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32


def _reference(head: _Head, target: Tensor | None, entropy: bool, top_k: int) -> _Results:
    logits = F.linear(head.hidden, head.weight, head.bias).to(head.sum_dtype)
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
        if head.bias is not None:
            logits = logits.masked_fill(head.bias == -math.inf, -math.inf)
    logits = logits / head.temperature
    log_softmax = logits.log_softmax(-1)
    log_probs = entropies = top_log_probs = top_indices = None
    if target is not None:
        log_probs = log_softmax.gather(1, target.clamp(min=0)[:, None])[:, 0].masked_fill(target == _IGNORED, 0)
    if entropy:
        entropies = -(log_softmax.exp() * log_softmax.clamp(min=LOWEST_EXPONENT)).sum(-1)
    if top_k:
        order = log_softmax.detach().sort(dim=-1, descending=True, stable=True)
        top_log_probs, top_indices = order.values[:, :top_k], order.indices[:, :top_k]
    return logits.logsumexp(-1), log_probs, entropies, top_log_probs, top_indices


class _Tiles:
    """The logits in tiles of some tokens by some entries, each written over the one before."""

    def __init__(self, head: _Head) -> None:
        self.head = head
        tokens, dim = head.hidden.shape
        cpu = head.hidden.device.type == "cpu"
        elements = TILE_ELEMENTS if cpu else ACCELERATOR_TILE_ELEMENTS
        # Square tiles read hidden and weight the fewest times; `dim` bounds the copies of a few rows of either.
        most = max(1, min(math.isqrt(elements), elements // max(dim, 1)))
        side = math.ceil(tokens / math.ceil(tokens / most)) if tokens else 1
        self.rows = _slices(tokens, side)
        self.columns = _slices(len(head.weight), max(1, elements // max(side, dim)))
        # Processors multiply float16 many times slower than float32.
        self.product_dtype = torch.float32 if cpu and head.hidden.dtype == torch.float16 else head.hidden.dtype
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
        if name not in self._buffers:  # the first tile is the largest
            self._buffers[name] = torch.empty(shape, dtype=dtype, device=self.head.hidden.device).view(-1)
        return self._buffers[name][: shape[0] * shape[1]].view(shape)

    def hidden(self, rows: slice) -> Tensor:
        return self.head.hidden[rows].to(self.product_dtype)

    def weight(self, columns: slice) -> Tensor:
        return self.head.weight[columns].to(self.product_dtype)

    def logits(self, hidden: Tensor, weight: Tensor, columns: slice) -> Tensor:
        head, shape = self.head, (len(hidden), len(weight))
        logits = self.buffer("product", self.product_dtype, shape)
        bias = None if head.bias is None else head.bias[columns]
        if bias is None:
            torch.mm(hidden, weight.T, out=logits)
        else:
            torch.addmm(bias.to(self.product_dtype), hidden, weight.T, out=logits)
        if self.product_dtype != head.sum_dtype:
            logits = self.buffer("logits", head.sum_dtype, shape).copy_(logits)
        if head.softcap is not None:
            logits.div_(head.softcap).tanh_().mul_(head.softcap)
            if bias is not None:
                logits.masked_fill_(bias == -math.inf, -math.inf)
        if head.temperature != 1.0:
            logits.div_(head.temperature)
        return logits


@dataclass
class _Sums:
    """Per token: `m`, `S`, `Q` of the module's docstring, and the target's logit."""

    peak: Tensor
    total: Tensor
    weighted: Tensor
    target_logit: Tensor

    @property
    def shift(self) -> Tensor:
        """The peak, or 0 where all logits are -inf, so that subtracting it keeps them -inf."""
        return self.peak.masked_fill(self.peak == -math.inf, 0)


def _sums_of_tiles(head: _Head, target: Tensor | None, entropy: bool, top_k: int) -> tuple[_Sums, Tensor, Tensor]:
    tiles = _Tiles(head)
    tokens = len(head.hidden)
    new = head.hidden.new_zeros
    zeros = new((3, tokens), dtype=head.sum_dtype)
    sums = _Sums(torch.full_like(zeros[0], -math.inf), *zeros)
    top_logits = new((tokens, top_k), dtype=head.sum_dtype)
    top_indices = new((tokens, top_k), dtype=torch.long)
    for columns in tiles.columns:
        weight = tiles.weight(columns)
        for rows in tiles.rows:
            logits = tiles.logits(tiles.hidden(rows), weight, columns)
            if target is not None:
                here, index = _within(target[rows], columns)
                sums.target_logit[rows] += logits.gather(1, index)[:, 0].masked_fill(~here, 0)
            if top_k:
                known = min(columns.start, top_k)
                values, indices = _top_k(logits, min(top_k, logits.shape[1]))
                values = torch.cat([top_logits[rows, :known], values], 1)
                indices = torch.cat([top_indices[rows, :known], indices + columns.start], 1)
                # Known entries have the lower indices, and a stable sort leaves them ahead of their equals.
                values, order = values.sort(dim=1, descending=True, stable=True)
                kept = min(values.shape[1], top_k)
                top_logits[rows, :kept] = values[:, :kept]
                top_indices[rows, :kept] = indices.gather(1, order[:, :kept])
            _add_tile(sums, rows, logits, tiles if entropy else None)
    return sums, top_logits, top_indices


def _add_tile(sums: _Sums, rows: slice, logits: Tensor, tiles: _Tiles | None) -> None:
    """Online log-sum-exp; with a buffer from `tiles` also the sum for the entropy. Overwrites `logits`."""
    before = sums.peak[rows]
    peak = torch.maximum(before, logits.amax(1))
    shift = peak.masked_fill(peak == -math.inf, 0)
    drop = (before - shift).clamp_(min=LOWEST_EXPONENT)
    total, weighted = sums.total[rows], sums.weighted[rows]
    exponent = logits.sub_(shift[:, None])
    if tiles is None:
        exp = exponent.exp_()
    else:
        exponent.clamp_(min=LOWEST_EXPONENT)
        exp = torch.exp(exponent, out=tiles.buffer("exp", exponent.dtype, (exponent.shape[0], exponent.shape[1])))
        weighted.addcmul_(drop, total).mul_(drop.exp()).add_(torch.linalg.vecdot(exp, exponent))
    total.mul_(drop.exp()).add_(exp.sum(1))
    sums.peak[rows] = peak


def _gradients(
    head: _Head,
    target: Tensor | None,
    sums: _Sums,
    grad_logsumexp: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    wanted: tuple[bool, bool, bool],
    kernel: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias.

    With p = softmax(l), x = l - m and [v = t] for the target's entry, the gradient of logit v is

        p_v (g_logsumexp - g_log_prob + g_entropy (Q / S - x_v)) + g_log_prob [v = t]

    to be multiplied by the slope of softcap and temperature.
    """
    tiles = _Tiles(head)
    scale = 1 / (sums.total * head.temperature)
    flat = torch.zeros_like(sums.total)
    if grad_logsumexp is not None:
        flat = flat + grad_logsumexp
    if grad_log_probs is not None and target is not None:
        grad_log_probs = grad_log_probs.masked_fill(target == _IGNORED, 0)
        flat = flat - grad_log_probs
        grad_log_probs = grad_log_probs / head.temperature
    if grad_entropy is not None:
        flat = flat + grad_entropy * (sums.weighted / sums.total)
        grad_entropy = grad_entropy * scale
    rows_data = _RowGradients(sums.shift, flat * scale, grad_entropy, grad_log_probs, target)

    new = head.hidden.new_zeros
    grad_hidden = new(head.hidden.shape, dtype=head.sum_dtype) if wanted[0] else None
    grad_weight = torch.empty_like(head.weight, memory_format=torch.contiguous_format) if wanted[1] else None
    grad_bias = torch.empty_like(head.bias) if head.bias is not None and wanted[2] else None
    for columns in tiles.columns:
        weight = tiles.weight(columns)
        weight_sum = new(weight.shape, dtype=head.sum_dtype) if grad_weight is not None else None
        bias_sum = new(len(weight), dtype=head.sum_dtype) if grad_bias is not None else None
        for rows in tiles.rows:
            hidden = tiles.hidden(rows)
            if kernel:
                grad = _kernel_logit_gradient(tiles, hidden, weight, rows, columns, rows_data)
            else:
                grad = _logit_gradient(tiles, hidden, weight, rows, columns, rows_data)
            if bias_sum is not None:
                bias_sum += grad.sum(0, dtype=head.sum_dtype)
            if grad_hidden is not None:
                _add_product(grad_hidden[rows], grad, weight)
            if weight_sum is not None:
                _add_product(weight_sum, grad.T, hidden)
        if grad_weight is not None and weight_sum is not None:
            grad_weight[columns] = weight_sum
        if grad_bias is not None and bias_sum is not None:
            grad_bias[columns] = bias_sum
    return None if grad_hidden is None else grad_hidden.to(head.hidden.dtype), grad_weight, grad_bias


@dataclass(frozen=True)
class _RowGradients:
    """What the gradient of a logit takes from its token: `shift`, and three factors with all scales in them."""

    shift: Tensor
    flat: Tensor
    entropy: Tensor | None
    log_probs: Tensor | None
    target: Tensor | None


def _logit_gradient(
    tiles: _Tiles, hidden: Tensor, weight: Tensor, rows: slice, columns: slice, grads: _RowGradients
) -> Tensor:
    head = tiles.head
    exponent = tiles.logits(hidden, weight, columns)
    shape = (exponent.shape[0], exponent.shape[1])
    slope = None
    if head.softcap is not None:
        tanh = torch.mul(exponent, head.temperature / head.softcap, out=tiles.buffer("slope", exponent.dtype, shape))
        slope = tanh.clamp_(min=-1).square_().neg_().add_(1)
    exponent.sub_(grads.shift[rows, None])
    if grads.entropy is None:
        grad = exponent.exp_().mul_(grads.flat[rows, None])
    else:
        exponent.clamp_(min=LOWEST_EXPONENT)
        grad = torch.exp(exponent, out=tiles.buffer("exp", exponent.dtype, shape))
        grad.mul_(exponent.mul_(grads.entropy[rows, None]).neg_().add_(grads.flat[rows, None]))
    if grads.log_probs is not None and grads.target is not None:
        here, index = _within(grads.target[rows], columns)
        grad.scatter_add_(1, index, grads.log_probs[rows].masked_fill(~here, 0)[:, None])
    if slope is not None:
        grad.mul_(slope)
    if grad.dtype != tiles.product_dtype:
        grad = tiles.buffer("product", tiles.product_dtype, shape).copy_(grad)
    return grad


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class _VocabStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor | None,
        temperature: float,
        softcap: float | None,
        entropy: bool,
        top_k: int,
        kernel: bool,
    ) -> _Results:
        head = _Head(hidden, weight, bias, temperature, softcap)
        top_log_probs = top_indices = None
        if kernel:
            sums = _kernel_sums(head, target, entropy)
        else:
            sums, top_logits, top_indices = _sums_of_tiles(head, target, entropy, top_k)
        log_total = sums.total.log()
        log_probs = entropies = None
        if target is not None:
            log_probs = (sums.target_logit - sums.peak - log_total).masked_fill(target == _IGNORED, 0)
        if entropy:
            entropies = log_total - sums.weighted / sums.total
        if not kernel and top_k:
            top_log_probs = top_logits - sums.peak[:, None] - log_total[:, None]
            ctx.mark_non_differentiable(top_log_probs, top_indices)
        else:
            top_indices = None
        ctx.save_for_backward(hidden, weight, bias, target, sums.peak, sums.total, sums.weighted)
        ctx.settings = temperature, softcap, kernel
        ctx.set_materialize_grads(False)
        return sums.peak + log_total, log_probs, entropies, top_log_probs, top_indices

    @staticmethod
    def backward(
        ctx: Any, grad_logsumexp: Tensor | None, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        # torch's own once_differentiable would take the gradient for a constant wherever the upstream one is.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "vocabulary statistics have no second derivatives, which create_graph=True asks for; "
                'backend="reference" has them'
            )
        hidden, weight, bias, target, peak, total, weighted = ctx.saved_tensors
        temperature, softcap, kernel = ctx.settings
        head = _Head(hidden, weight, bias, temperature, softcap)
        sums = _Sums(peak, total, weighted, target_logit=peak)
        with torch.autocast(hidden.device.type, enabled=False):
            grads = _gradients(
                head,
                target,
                sums,
                grad_logsumexp,
                grad_log_probs,
                grad_entropy,
                ctx.needs_input_grad[:3],
                kernel,
            )
        return *grads, None, None, None, None, None, None


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _within(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in the columns, and an index into them, [rows, 1], that is valid for all."""
    index = target - columns.start
    width = columns.stop - columns.start
    return (index >= 0) & (index < width), index.clamp(0, width - 1)[:, None]


def _top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, lower columns first among equals; `torch.topk` leaves open which equals it returns."""
    top, index = values.topk(min(k + 1, values.shape[1]), dim=1)
    least = top[:, k - 1 : k]
    ambiguous = (top[:, k:] == least).nonzero()[:, 0]
    index = index[:, :k]
    if len(ambiguous):
        rest, level = values[ambiguous], least[ambiguous]
        above, equal = rest > level, rest == level
        places = k - above.sum(1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= places))
        index[ambiguous] = chosen.nonzero()[:, 1].view(-1, k)
    index = index.sort(dim=1).values
    top, order = values.gather(1, index).sort(dim=1, descending=True, stable=True)
    return top, index.gather(1, order)


def _kernel_sums(head: _Head, target: Tensor | None, entropy: bool) -> _Sums:
    from separata_core.kernels import vocab as kernels  # Triton is loaded only where it is used

    return _Sums(
        *kernels.sums(head.hidden, head.weight, head.bias, target, head.temperature, head.softcap, entropy=entropy)
    )


def _kernel_logit_gradient(
    tiles: _Tiles, hidden: Tensor, weight: Tensor, rows: slice, columns: slice, grads: _RowGradients
) -> Tensor:
    from separata_core.kernels import vocab as kernels  # Triton is loaded only where it is used

    head = tiles.head
    return kernels.logit_gradient(
        hidden,
        weight,
        None if head.bias is None else head.bias[columns],
        None if grads.target is None else grads.target[rows] - columns.start,
        head.temperature,
        head.softcap,
        shift=grads.shift[rows],
        flat=grads.flat[rows],
        entropy=None if grads.entropy is None else grads.entropy[rows],
        log_probs=None if grads.log_probs is None else grads.log_probs[rows],
        out=tiles.buffer("product", tiles.product_dtype, (len(hidden), len(weight))),
    )


def _choose(backend: str, hidden: Tensor, top_k: int) -> str:
    if backend not in ("auto", "triton", "torch", "reference"):
        raise ValueError(f'backend must be "auto", "triton", "torch" or "reference", got {backend!r}')
    if backend not in ("auto", "triton"):
        return backend
    reason = None
    if find_spec("triton") is None:
        reason = "Triton is not installed"
    elif hidden.device.type != "cuda" and not (backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"):
        reason = f"hidden is on {hidden.device}, not on a CUDA device"
    elif hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reason = f"hidden has type {hidden.dtype}"
    elif top_k:
        reason = 'the kernel has no top-k; backend="torch" has'
    if reason is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f'backend="triton" cannot run: {reason}')
    return "torch"


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    top_k: int,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
) -> None:
    if hidden.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"hidden must be float16, bfloat16, float32 or float64, got {hidden.dtype}")
    if hidden.is_meta:
        raise ValueError("hidden is on the device meta, which holds no numbers")
    if hidden.ndim < 1 or weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must be [vocab, dim] with the last dimension of hidden, got {list(weight.shape)} for hidden of "
            f"{list(hidden.shape)}"
        )
    vocab = len(weight)
    if vocab == 0:
        raise ValueError("weight has no rows; a vocabulary needs at least one entry")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(f"{name} has type {tensor.dtype}, hidden {hidden.dtype}; cast one to the other's")
    for name, tensor in (("weight", weight), ("bias", bias), ("targets", targets)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}")
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias must be [{vocab}], one number per row of weight, got {list(bias.shape)}")
    if not 0 <= top_k <= vocab:
        raise ValueError(f"k must be at most {vocab}, the size of the vocabulary, and not negative, got {top_k}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"logit_softcap must be positive and finite, or None, got {softcap}")
    if targets is None:
        return
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"targets must be integers, got {targets.dtype}")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets must be {list(hidden.shape[:-1])}, one per token of hidden, got {list(targets.shape)}"
        )
    targets = targets.long()  # narrow types cannot hold what they are compared with, unsigned ones have no comparison
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
    if wrong.any():
        raise ValueError(
            f"targets contains {targets[wrong][0].item()}; targets must be 0 to {vocab - 1} or ignore_index "
            f"({ignore_index})"
        )
