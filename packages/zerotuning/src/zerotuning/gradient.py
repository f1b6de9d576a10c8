"""The derivative of a metric with respect to every head's `log gamma`, at gamma 1.

An extension of the paper's profiling, which measures one unit of heads at a time. One forward and one backward pass
over the prompts give the first-order effect of all L * Hq heads; the weights need no gradients.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from separata_core.models import logit_scaling, output_projection
from separata_core.vocab import vocab_entropy, vocab_log_probs
from torch import Tensor, nn

from zerotuning import parallel
from zerotuning.adapter import apply_log_gamma
from zerotuning.config import ModelId
from zerotuning.partial import decoder_of
from zerotuning.scoring import Criterion, distribution_entropy, evaluating, tokenize_prompts
from zerotuning.tasks import Example, TaskSpec, is_one_token, true_labels


def log_gamma_gradients(
    model: nn.Module,
    tokenizer: Any,
    task: TaskSpec,
    data: Sequence[Example],
    metric: Criterion,
    *,
    batch_rows: int = 16,
    advance: Callable[[int], None] = lambda prompts: None,
) -> tuple[Float[Tensor, " items"], Float[Tensor, "items layers heads"]]:
    """Differentiate each item's metric.

    Args:
        model: A decoder-only transformers model; its weights get no gradients.
        tokenizer: Its tokenizer.
        task: What to ask.
        data: The items.
        metric: `"log_likelihood"` of the true label, or `"entropy"` at the answer position or `"label_entropy"`, both
            negated.
        batch_rows: Rows in one forward. Activations of all layers are kept for the backward pass.
        advance: Told how many prompts are done.

    Returns:
        The metric of each item and its derivatives with respect to the `log gamma` of each layer and head at gamma 1,
        both float64 on the CPU.

    Raises:
        ValueError: A metric without derivative, missing labels, or an output projection that cannot be read.
        RuntimeError: The model gave NaN.
    """
    if metric not in ("log_likelihood", "entropy", "label_entropy"):
        raise ValueError(f"metric is {metric!r}, which has no gradient; use 'log_likelihood' or an entropy")
    if batch_rows < 1:
        raise ValueError(f"batch_rows is {batch_rows}; it must be at least 1")
    spots = _spots(tokenizer, task, data, metric)
    most = max(len({spot.tokens for spot in each}) for each in spots)
    together = max(1, batch_rows // most)
    order = sorted(range(len(data)), key=lambda item: len(spots[item][0].tokens))
    part, parts = parallel.share(model)
    order = order[part::parts]

    identity = ModelId.of(model)
    values = torch.zeros(len(data), dtype=torch.float64)
    gradients = torch.zeros(len(data), identity.layers, identity.query_heads, dtype=torch.float64)
    head = _head(model)
    done = 0
    with evaluating(model), _frozen(model), torch.enable_grad():
        for first in range(0, len(order), together):
            items = order[first : first + together]
            log_gamma = torch.zeros(len(items), *gradients.shape[1:], dtype=_wide(model), requires_grad=True)
            of_items = _values(model, head, metric, [spots[item] for item in items], len(task.labels), log_gamma)
            [found] = torch.autograd.grad(of_items.sum(), log_gamma)
            values[items] = of_items.detach().double().cpu()
            gradients[items] = found.double().cpu()
            share = len(data) * (first + len(items)) // len(order)
            advance(share - done)
            done = share
    values, gradients = parallel.add_up(values, model), parallel.add_up(gradients, model)
    if bool(values.isnan().any() | gradients.isnan().any()):
        raise RuntimeError("the model gave NaN under gamma 1 (the untouched model); use bfloat16 or float32")
    return values, gradients


@dataclasses.dataclass(frozen=True)
class _Spot:
    """A position at which a distribution is wanted, and the token of a label that is to follow there."""

    tokens: tuple[int, ...]
    position: int
    label: int
    target: int


def _spots(tokenizer: Any, task: TaskSpec, data: Sequence[Example], metric: Criterion) -> list[list[_Spot]]:
    """What has to be known of each item."""
    prompts = [tuple(each) for each in tokenize_prompts(tokenizer, task, data)]
    if metric == "entropy":
        return [[_Spot(prompt, len(prompt) - 1, 0, 0)] for prompt in prompts]
    label_tokens = task.label_tokens(tokenizer)
    if metric == "log_likelihood":
        wanted = [[label] for label in true_labels(data)]
    else:
        wanted = [[task.labels.index(word) for word in task.options(item)] for item in data]
    one_token = is_one_token(task, label_tokens)
    found = []
    for prompt, labels in zip(prompts, wanted, strict=True):
        of_item = []
        for label in labels:
            tokens = prompt if one_token else (*prompt, *label_tokens[label][:-1])
            of_item += [
                _Spot(tokens, len(prompt) - 1 + at, label, target) for at, target in enumerate(label_tokens[label])
            ]
        found.append(of_item)
    return found


def _values(
    model: Any,
    head: Callable[[Tensor, Tensor | None], Tensor],
    metric: Criterion,
    spots: Sequence[Sequence[_Spot]],
    labels: int,
    log_gamma: Float[Tensor, "items layers heads"],
) -> Float[Tensor, " items"]:
    rows = [(item, tokens) for item, each in enumerate(spots) for tokens in dict.fromkeys(s.tokens for s in each)]
    where = {row: index for index, row in enumerate(rows)}
    device = model.get_input_embeddings().weight.device
    length = max(len(tokens) for _, tokens in rows)
    # On the right no token sees the padding, so what fills it is of no account and no mask is needed.
    tokens = torch.tensor([[*row, *row[-1:] * (length - len(row))] for _, row in rows], device=device)
    with apply_log_gamma(model, log_gamma[[item for item, _ in rows]]):
        states = decoder_of(model)(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False
        ).last_hidden_state
    flat = [(item, spot) for item, each in enumerate(spots) for spot in each]
    hidden = states[[where[item, spot.tokens] for item, spot in flat], [spot.position for _, spot in flat]]
    if metric == "entropy":
        return -head(hidden, None)
    found = head(hidden, torch.tensor([spot.target for _, spot in flat], device=hidden.device))
    places = torch.tensor([item * labels + spot.label for item, spot in flat], device=found.device)
    scores = found.new_zeros(len(spots) * labels).index_add(0, places, found).view(-1, labels)
    if metric == "log_likelihood":
        # Only the true label has been scored.
        return scores.sum(-1)
    lacking = torch.ones_like(scores, dtype=torch.bool).view(-1).index_fill(0, places, False).view(-1, labels)
    return -distribution_entropy(scores.masked_fill(lacking, -torch.inf).log_softmax(-1))


def _head(model: nn.Module) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Log-probabilities of targets, or without targets the entropies, from hidden states."""
    weight, bias = output_projection(model)
    scale, cap = logit_scaling(model)
    weight, bias = weight.detach(), None if bias is None else scale * bias.detach()

    def head(hidden: Tensor, targets: Tensor | None) -> Tensor:
        if targets is None:
            return vocab_entropy(scale * hidden, weight, bias=bias, logit_softcap=cap)
        return vocab_log_probs(scale * hidden, weight, targets, bias=bias, logit_softcap=cap)

    return head


def _wide(model: nn.Module) -> torch.dtype:
    return torch.promote_types(next(model.parameters()).dtype, torch.float32)


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Keep the weights out of the graph, so that nothing is stored for their sake."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
