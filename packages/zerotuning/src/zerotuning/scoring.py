"""What a model answers to the prompts of a task under one or many configurations.

Prompts are sorted by length and padded on the right; the head, and what the last layer does after its attention, work
at the answer positions only; the tokens that all prompts begin with (the instruction) go through the model once for
each configuration; layers below the first one that a configuration touches are not run again. Rows of one batch may
belong to different configurations, and the prompts are shared out among the processes of `torch.distributed`, if there
are several.
"""

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from separata_core.models import decoder_layers
from torch import Tensor, nn

from zerotuning import parallel
from zerotuning.adapter import apply
from zerotuning.config import ZeroTuningConfig
from zerotuning.metrics import UNPARSED, Scores
from zerotuning.partial import (
    Form,
    at_places,
    attention_layers,
    decoder_of,
    last_feed_forward,
    only_layers,
    output_forms,
)
from zerotuning.tasks import Example, TaskSpec, is_one_token, true_labels

Metric = Literal["accuracy", "constrained_accuracy", "log_likelihood"]
"""What labelled data can be judged by; `log_likelihood` is the mean log-probability of the true label word."""

Objective = Literal["entropy", "label_entropy"]
"""What is to be low without labels: the entropy over the vocabulary, or over the label words alone."""

Criterion = Literal["accuracy", "constrained_accuracy", "log_likelihood", "entropy", "label_entropy"]
"""Any of them. Larger is better: entropies count negatively."""

# Below this many shared tokens the second forward costs more than it saves.
_SHORTEST_PREFIX = 8

# What a forward costs apart from its tokens (reading the weights, starting operations), in tokens; measured on a CPU.
_BATCH_COST = 32


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a model answered, one entry per item.

    Attributes:
        parsed: Label read from the generated text, `UNPARSED` if none.
        label_log_probs: Log-probability (nats) of each label word after the prompt; -inf for labels that the item does
            not have.
        entropies: Entropy (nats) of the distribution over the vocabulary at the answer position, or its mean over the
            generated tokens where several were asked for.
    """

    parsed: tuple[int, ...]
    label_log_probs: tuple[tuple[float, ...], ...]
    entropies: tuple[float, ...]

    @functools.cached_property
    def constrained(self) -> tuple[int, ...]:
        """The most likely label word of each item."""
        return tuple(max(range(len(each)), key=each.__getitem__) for each in self.label_log_probs)

    @functools.cached_property
    def label_probs(self) -> tuple[tuple[float, ...], ...]:
        """Probabilities of the label words of each item, renormalised to sum to 1."""
        found = []
        for each in self.label_log_probs:
            highest = max(each)
            weights = [math.exp(value - highest) for value in each]
            found.append(tuple(weight / sum(weights) for weight in weights))
        return tuple(found)

    @functools.cached_property
    def label_entropies(self) -> tuple[float, ...]:
        """Entropy (nats) over the label words of each item, renormalised."""
        return tuple(sum(-p * math.log(p) for p in probs if p > 0) for probs in self.label_probs)

    def label_counts(self, labels: int) -> tuple[int, ...]:
        """How often each label was read from an answer; what did not parse is missing.

        Args:
            labels: Number of labels of the task.

        Returns:
            The counts.
        """
        return tuple(self.parsed.count(label) for label in range(labels))

    def scores(self, examples: Sequence[Example]) -> Scores:
        """The four numbers against the true labels.

        Args:
            examples: The items, in the same order, all labelled.

        Returns:
            The scores.
        """
        return Scores.of(true_labels(examples), self.parsed, self.constrained)

    def values(self, criterion: Criterion, examples: Sequence[Example] = ()) -> list[float]:
        """What each item contributes to a criterion, whose value is their mean.

        Args:
            criterion: Which one.
            examples: The items, in the same order; labelled unless the criterion is an entropy.

        Returns:
            One value per item; larger is better.

        Raises:
            ValueError: An item lacks the label that the criterion needs.
        """
        if criterion == "entropy":
            return [-each for each in self.entropies]
        if criterion == "label_entropy":
            return [-each for each in self.label_entropies]
        labels = true_labels(examples)
        if criterion == "log_likelihood":
            return [each[label] for each, label in zip(self.label_log_probs, labels, strict=True)]
        answers = self.parsed if criterion == "accuracy" else self.constrained
        return [float(answer == label) for answer, label in zip(answers, labels, strict=True)]


def distribution_entropy(log_probs: Float[Tensor, "*batch outcomes"]) -> Float[Tensor, "*batch"]:
    """Shannon entropy in nats.

    Args:
        log_probs: Normalised log-probabilities; -inf is allowed.

    Returns:
        One entropy per distribution.
    """
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """One sequence to run: a prompt, with the tokens of a label behind it where that is to be scored.

    `tokens` lack the shared prefix. `leads` marks the one sequence of its item from which the answer is generated.
    """

    item: int
    label: int
    tokens: list[int]
    answer_at: int
    leads: bool


class Scorer:
    """Prompts made ready once, to be answered under many configurations."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        task: TaskSpec,
        items: Sequence[Example | str],
        *,
        batch_rows: int = 16,
        answer_tokens: int = 1,
        reuse_layers: bool = True,
    ) -> None:
        """Tokenise the prompts.

        Args:
            model: A decoder-only transformers model; put into evaluation mode while it runs.
            tokenizer: Its tokenizer.
            task: What to ask.
            items: What to ask about; labels are not looked at.
            batch_rows: Rows in one forward.
            answer_tokens: How many tokens are generated, greedily, to read the answer from and to average the entropy
                over. More than one repeats the forward for each.
            reuse_layers: Keep the hidden states of all prompts below the first layer that a configuration touches, and
                do not run the layers below again. Needs room for one hidden state of each token.

        Raises:
            ValueError: A number is below 1, there are no items, a prompt has no tokens, or one is longer than the
                model's positions.
        """
        for name, number in (("batch_rows", batch_rows), ("answer_tokens", answer_tokens)):
            if number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        if not items:
            raise ValueError("items is empty")
        self.model: Any = model
        self.tokenizer, self.task, self.items = tokenizer, task, list(items)
        self.batch_rows, self.answer_tokens = batch_rows, answer_tokens
        self.label_tokens = task.label_tokens(tokenizer)
        self.one_token = is_one_token(task, self.label_tokens)
        self.prompts = tokenize_prompts(tokenizer, task, items)
        longest = max(map(len, self.prompts)) + max(answer_tokens, *map(len, self.label_tokens))
        limit = getattr(model.config, "max_position_embeddings", None)
        if isinstance(limit, int) and longest > limit:
            raise ValueError(
                f"the longest prompt has {longest} tokens with its label; the model takes {limit}: shorten the texts"
            )
        self.prefix = _common_prefix(self.prompts)
        if len(self.prefix) < _SHORTEST_PREFIX or not _may_share_prefix(model):
            self.prefix = []
        self.options = [[task.labels.index(word) for word in task.options(item)] for item in items]
        sequences = [each for item in range(len(items)) for each in self._sequences_of(item)]
        sequences.sort(key=lambda each: len(each.tokens))
        part, parts = parallel.share(model)
        # Every so manieth, so that each process has as many short and as many long ones.
        self.sequences = sequences[part::parts]
        # Not known to be right until it is tried.
        self._narrow = last_feed_forward(model)
        self._narrow_checked = False
        # Generating on needs the keys and values of all layers.
        self._kept = _KeptStates(model) if reuse_layers and answer_tokens == 1 else None

    def predict(
        self, configs: Sequence[ZeroTuningConfig], *, advance: Callable[[int], None] = lambda prompts: None
    ) -> list[Predictions]:
        """Answer all prompts under each configuration, the rows of all in shared batches.

        Args:
            configs: The configurations.
            advance: Told how many prompts were answered, each time some are.

        Returns:
            One set of answers for each configuration.

        Raises:
            RuntimeError: The model gave NaN under a configuration; its factors are named.
        """
        found: list[Predictions] = []
        with evaluating(self.model), torch.inference_mode():
            for first in range(0, len(configs), self.batch_rows):
                chunk = configs[first : first + self.batch_rows]
                results = parallel.add_up(self._run(chunk, advance), self.model)
                found += [self._predictions(each, config) for each, config in zip(results, chunk, strict=True)]
        return found

    def _sequences_of(self, item: int) -> list[_Sequence]:
        prompt = self.prompts[item][len(self.prefix) :]
        if self.one_token:
            return [_Sequence(item, 0, prompt, len(prompt) - 1, leads=True)]
        return [
            _Sequence(item, label, prompt + self.label_tokens[label][:-1], len(prompt) - 1, leads=index == 0)
            for index, label in enumerate(self.options[item])
        ]

    def _run(
        self, configs: Sequence[ZeroTuningConfig], advance: Callable[[int], None]
    ) -> Float[Tensor, "configs items numbers"]:
        """The numbers of each item under each configuration, those of other processes left at 0.

        First the log-probability of each label, then the entropy, then the generated tokens, counted from 1, 0 where
        none was generated any more.
        """
        labels = len(self.label_tokens)
        results = torch.zeros(len(configs), len(self.items), labels + 1 + self.answer_tokens, dtype=torch.float64)
        kept = self._kept_below(configs)
        with apply(self.model, configs):
            prefix = self._run_prefix(len(configs))
            ran = done = 0
            # As many prompts in a batch as let every configuration have its rows.
            for batch in self._batches(max(1, self.batch_rows // len(configs))):
                log_probs = self._answers(batch, len(configs), prefix, kept)
                self._record(results, batch, log_probs)
                if self.answer_tokens > 1:
                    self._generate(results, [each for each in batch if each.leads], prefix)
                ran += len(batch)
                share = len(self.items) * len(configs) * ran // len(self.sequences)
                advance(share - done)
                done = share
        return results

    def _batches(self, most: int) -> Iterator[list[_Sequence]]:
        first = 0
        for rows in batch_sizes([len(each.tokens) for each in self.sequences], most):
            yield self.sequences[first : first + rows]
            first += rows

    def _answers(
        self, batch: Sequence[_Sequence], configs: int, prefix: Any, kept: "_KeptStates | None"
    ) -> Float[Tensor, "configs sequences places vocab"]:
        if self._narrow is not None and not self._narrow_checked:
            self._check_narrow(batch[:1], configs, prefix)
        if kept is not None and not kept.checked:
            with kept.put_in(batch[:1], configs):
                found = self._log_probs(batch[:1], configs, prefix)
            kept.check(found, self._log_probs(batch[:1], configs, prefix))
        if kept is None or not kept.usable:
            return self._log_probs(batch, configs, prefix)
        with kept.put_in(batch, configs):
            return self._log_probs(batch, configs, prefix)

    def _check_narrow(self, batch: Sequence[_Sequence], configs: int, prefix: Any) -> None:
        """Hold one sequence, of which the last layer saw little, against the whole; do so no more where it differs."""
        found = self._log_probs(batch, configs, prefix)
        narrow, self._narrow = self._narrow, None
        dtype = self.model.get_input_embeddings().weight.dtype
        if _agree(found, self._log_probs(batch, configs, prefix), dtype):
            self._narrow = narrow
        self._narrow_checked = True

    def _record(
        self,
        results: Float[Tensor, "configs items numbers"],
        batch: Sequence[_Sequence],
        log_probs: Float[Tensor, "configs sequences places vocab"],
    ) -> None:
        labels = len(self.label_tokens)
        firsts = log_probs[:, :, 0]
        entropies, generated = distribution_entropy(firsts).cpu(), firsts.argmax(-1).cpu()
        if self.one_token:
            chosen = firsts[..., [ids[0] for ids in self.label_tokens]].cpu()
        for index, sequence in enumerate(batch):
            if self.one_token:
                results[:, sequence.item, :labels] = chosen[:, index].double()
            else:
                target = self.label_tokens[sequence.label]
                of_tokens = log_probs[:, index, range(len(target)), target]
                results[:, sequence.item, sequence.label] = of_tokens.sum(1).double().cpu()
            if sequence.leads:
                results[:, sequence.item, labels] = entropies[:, index].double()
                results[:, sequence.item, labels + 1] = generated[:, index].double() + 1

    def _generate(self, results: Tensor, batch: Sequence[_Sequence], prefix: Any) -> None:
        """The tokens after the first, and the mean of the entropies of all."""
        labels = len(self.label_tokens)
        items = [each.item for each in batch]
        tokens, entropies = results[:, items, labels + 1 :], results[:, items, labels]
        count = torch.ones_like(entropies)
        running = torch.ones_like(entropies, dtype=torch.bool)
        ends = torch.tensor(self._end_tokens(), dtype=tokens.dtype)
        for step in range(1, self.answer_tokens):
            # A text ends with its end token; what would follow belongs to no answer.
            running = running & ~torch.isin(tokens[..., step - 1] - 1, ends)
            if not bool(running.any()):
                break
            log_probs = self._log_probs_after(batch, tokens[..., :step], prefix)
            tokens[..., step] = torch.where(running, log_probs.argmax(-1).cpu().double() + 1, 0)
            entropies += torch.where(running, distribution_entropy(log_probs).cpu().double(), 0)
            count += running
        results[:, items, labels + 1 :] = tokens
        results[:, items, labels] = entropies / count

    def _end_tokens(self) -> list[int]:
        """The tokenizer's end token, and what else the model ends a text with."""
        more = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ends = [self.tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
        return [each for each in ends if each is not None]

    def _log_probs_after(
        self, batch: Sequence[_Sequence], tokens: Float[Tensor, "configs sequences step"], prefix: Any
    ) -> Float[Tensor, "configs sequences vocab"]:
        step = tokens.shape[-1]
        rows = []
        for config in range(len(tokens)):
            for sequence, generated in zip(batch, tokens[config].long().tolist(), strict=True):
                # Counted from 1; behind its end a text goes on with anything.
                rows.append(sequence.tokens[: sequence.answer_at + 1] + [max(0, token - 1) for token in generated])
        found = self._forward(rows, [[each.answer_at + step] for each in batch] * len(tokens), prefix)
        return found[:, 0].view(len(tokens), len(batch), -1)

    def _log_probs(
        self, batch: Sequence[_Sequence], configs: int, prefix: Any
    ) -> Float[Tensor, "configs sequences places vocab"]:
        """The log-probabilities of each sequence from its answer position on; behind its end they are of no account."""
        most = max(len(each.tokens) - each.answer_at for each in batch)
        places = [[min(each.answer_at + at, len(each.tokens) - 1) for at in range(most)] for each in batch]
        found = self._forward([each.tokens for each in batch] * configs, places * configs, prefix)
        return found.view(configs, len(batch), *found.shape[1:])

    def _forward(
        self, rows: Sequence[list[int]], places: Sequence[list[int]], prefix: Any
    ) -> Float[Tensor, "rows places vocab"]:
        """Log-probabilities of rows of tokens behind the prefix, at the same number of places in each, in float32."""
        tokens, mask, past = self._inputs(rows, prefix)
        index = torch.tensor(places)[..., None]
        taken = False

        def take(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            nonlocal taken
            if taken or not args or args[0].shape[:2] != tokens.shape:
                return None
            taken = True
            return _at(args[0], index), *args[1:]

        # The head goes over the vocabulary, so it is given each row's own places only. `logits_to_keep` would give it
        # those of all rows, and not every model has it or takes it from another device.
        with contextlib.ExitStack() as stack:
            stack.callback(self.model.get_output_embeddings().register_forward_pre_hook(take).remove)
            if self._narrow is not None:
                stack.enter_context(at_places(self._narrow, index, tokens.shape[1]))
            logits: Tensor = self.model(input_ids=tokens, attention_mask=mask, **past).logits
        return (logits if taken else _at(logits, index)).float().log_softmax(-1)

    def _inputs(self, rows: Sequence[list[int]], prefix: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
        device = self.model.get_input_embeddings().weight.device
        length = max(map(len, rows))
        # On the right no token sees the padding, so what fills it is of no account and no mask is needed.
        tokens = torch.tensor([row + row[-1:] * (length - len(row)) for row in rows], device=device)
        mask = torch.ones(len(rows), len(self.prefix) + length, dtype=torch.long, device=device)
        if prefix is None:
            return tokens, mask, {"use_cache": False}
        cache = copy.deepcopy(prefix)
        # The rows of one configuration follow each other, as the adapter has it.
        cache.batch_repeat_interleave(len(rows) // _rows_of(cache))
        return tokens, mask, {"past_key_values": cache, "use_cache": True}

    def _run_prefix(self, configs: int) -> Any:
        """The keys and values of the shared prefix, one row for each configuration; None if nothing is shared."""
        if not self.prefix:
            return None
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        device = self.model.get_input_embeddings().weight.device
        tokens = torch.tensor([self.prefix], device=device).expand(configs, -1)
        decoder_of(self.model)(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, use_cache=True
        )
        return cache

    def _kept_below(self, configs: Sequence[ZeroTuningConfig]) -> "_KeptStates | None":
        """The states of all prompts below the first layer that is touched; None if there is nothing to keep."""
        kept = self._kept
        touched = [each.layers[0] for each in configs if each.layers]
        if kept is None or not touched or not kept.usable or kept.layers[min(touched)] == 0:
            return None
        target = kept.layers[min(touched)]
        if kept.at != target:
            prefix = self._run_prefix(1)
            for batch in self._batches(self.batch_rows):
                if not kept.advance(batch, target, functools.partial(self._run_decoder, batch, prefix)):
                    return None
            kept.at, kept.checked = target, False
        return kept

    def _run_decoder(self, batch: Sequence[_Sequence], prefix: Any) -> None:
        tokens, mask, past = self._inputs([each.tokens for each in batch], prefix)
        decoder_of(self.model)(input_ids=tokens, attention_mask=mask, **past)

    def _predictions(self, results: Float[Tensor, "items numbers"], config: ZeroTuningConfig) -> Predictions:
        labels = len(self.label_tokens)
        if bool(results[:, : labels + 1].isnan().any()):
            raise RuntimeError(f"the model gave NaN logits under {_describe(config)}; use bfloat16 or float32")
        scores, entropies = [], []
        for item, options in enumerate(self.options):
            # What the model's float32 gave, whatever was added up in between.
            of_item = results[item, :labels].float().tolist()
            scores.append(tuple(of_item[label] if label in options else -math.inf for label in range(labels)))
            entropies.append(float(results[item, labels].float()))
        parsed = tuple(
            self._parse([int(token) - 1 for token in tokens if token > 0], self.items[item])
            for item, tokens in enumerate(results[:, labels + 1 :].tolist())
        )
        return Predictions(parsed, tuple(scores), tuple(entropies))

    def _parse(self, tokens: Sequence[int], item: Example | str | None = None) -> int:
        # An end token such as "<|im_end|>" is no answer, though letters of options are in its name.
        label = self.task.parse(self.tokenizer.decode(list(tokens), skip_special_tokens=True), item)
        if label != UNPARSED or self.one_token:
            return label
        begun = [index for index, ids in enumerate(self.label_tokens) if ids[: len(tokens)] == list(tokens[: len(ids)])]
        return begun[0] if len(begun) == 1 else UNPARSED


class _KeptStates:
    """Hidden states of all sequences at the input of one layer, under no configuration."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = attention_layers(model)
        self._all = list(decoder_layers(model))
        config: Any = model.config
        # Upper layers that take keys and values from lower ones fail without them.
        self.usable = not getattr(config.get_text_config(), "num_kv_shared_layers", 0)
        self.checked = False
        self.at = 0
        self._forms: list[Form] | None = None
        self._states: dict[tuple[int, int], Tensor] = {}

    def advance(self, batch: Sequence[_Sequence], target: int, run: Callable[[], object]) -> bool:
        """Bring the states of a batch to the input of layer `target`; False if this model does not allow it."""
        if self._forms is None:
            self._forms = output_forms(self._all, run)
            if self._forms is None:
                self.usable = False
                return False
        start = self.at if 0 < self.at < target else 0
        states = self._stacked(batch) if start else None
        with only_layers(self._all, self._forms, start, target, states) as found:
            run()
        # Some models hand on several streams of states.
        if len(found) != 1 or found[0].ndim != 3 or len(found[0]) != len(batch):
            self.usable = False
            return False
        for sequence, each in zip(batch, found[0], strict=True):
            self._states[sequence.item, sequence.label] = each[: len(sequence.tokens)]
        return True

    @contextlib.contextmanager
    def put_in(self, batch: Sequence[_Sequence], configs: int) -> Iterator[None]:
        """Run from the kept layer on, for the length of a `with` block."""
        assert self._forms is not None
        states = self._stacked(batch).repeat(configs, 1, 1)
        with only_layers(self._all, self._forms, self.at, len(self._all), states):
            yield

    def check(self, found: Tensor, plain: Tensor) -> None:
        """Hold one sequence from each layer against the whole model, and keep nothing where it differs.

        Some models pass more from layer to layer than hidden states, for instance keys and values of an earlier one.
        """
        self.checked = True
        self.usable = _agree(found, plain, next(iter(self._states.values())).dtype)

    def _stacked(self, batch: Sequence[_Sequence]) -> Float[Tensor, "rows tokens hidden"]:
        # No token sees what fills the padding.
        states = [self._states[each.item, each.label] for each in batch]
        return nn.utils.rnn.pad_sequence(states, batch_first=True)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for the length of a `with` block.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def batch_sizes(lengths: Sequence[int], most: int) -> list[int]:
    """Cut sequences into batches that waste little on padding.

    Args:
        lengths: Length of each sequence, ascending.
        most: Sequences in one batch at most.

    Returns:
        How many of them go into each batch, in order.
    """
    # Cost of the first so many sequences in tokens, and the size of their last batch.
    best: list[tuple[int, int]] = [(0, 0)]
    for end, length in enumerate(lengths, start=1):
        best.append(
            min((best[end - rows][0] + rows * length + _BATCH_COST, rows) for rows in range(1, min(most, end) + 1))
        )
    sizes, end = [], len(lengths)
    while end:
        sizes.append(best[end][1])
        end -= sizes[-1]
    return sizes[::-1]


def tokenize_prompts(tokenizer: Any, task: TaskSpec, items: Sequence[Example | str]) -> list[list[int]]:
    """The tokens of each prompt, without an end token.

    Args:
        tokenizer: A transformers tokenizer.
        task: What to ask.
        items: What to ask about.

    Returns:
        One list of token ids for each item.

    Raises:
        ValueError: A prompt has no tokens.
    """
    prompts: list[list[int]] = tokenizer([task.prompt(item) for item in items])["input_ids"]
    # Some tokenizers end every text; behind that no answer follows.
    end = tokenizer.eos_token_id
    prompts = [ids[:-1] if end is not None and ids[-1:] == [end] else ids for ids in prompts]
    if [] in prompts:
        raise ValueError(
            f"the prompt of item {prompts.index([])} has no tokens; the template must hold more than the text"
        )
    return prompts


def _agree(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    tolerance = math.sqrt(torch.finfo(dtype).eps)
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def _common_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """The tokens that all prompts begin with; each keeps one token of its own."""
    first, last = min(prompts), max(prompts)
    shared = 0
    while shared < min(map(len, prompts)) - 1 and first[shared] == last[shared]:
        shared += 1
    return first[:shared]


def _at(values: Float[Tensor, "rows tokens size"], index: Tensor) -> Float[Tensor, "rows places size"]:
    return values.gather(1, index.to(values.device).expand(-1, -1, values.shape[-1]))


def _may_share_prefix(model: nn.Module) -> bool:
    """Whether every layer remembers a beginning as keys and values; recurrent ones begin anew, or cannot be copied."""
    from transformers import DynamicCache

    config: Any = model.config
    remembered = DynamicCache(config=config).layers
    return len(attention_layers(model)) == len(decoder_layers(model)) and not any(
        hasattr(each, "recurrent_states") for each in remembered
    )


def _rows_of(cache: Any) -> int:
    return int(next(layer.keys.shape[0] for layer in cache.layers if layer.get_seq_length()))


def _describe(config: ZeroTuningConfig) -> str:
    gammas = sorted({float(f"{value:.4g}") for value in config.log_gamma[config.log_gamma != 0].exp().tolist()})
    if not gammas:
        return "gamma 1 (the untouched model)"
    shown = ", ".join(f"{gamma:g}" for gamma in gammas[:4]) + (", ..." if len(gammas) > 4 else "")
    return f"gamma {shown} on {int((config.log_gamma != 0).sum())} heads of {len(config.layers)} layers"
