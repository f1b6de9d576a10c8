"""A model, its tokenizer and a steerer in one object, for texts in and texts out."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, overload

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from bodes_steer.hooks import steer

if TYPE_CHECKING:
    from bodes_steer.steerers import Steerer


class SteeredModel:
    """A language model that answers steered.

    The model is steered during each call and untouched between them.

    Attributes:
        model: The transformers model.
        tokenizer: Its tokenizer.
        steerer: What steers it.
        layer: Index of the decoder block, see `steer`.
        T: Strength, see `steer`; may be changed.
        positions: Which positions are steered, see `steer`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        steerer: "Steerer | Mapping[int, Steerer]",
        *,
        layer: int | None = None,
        T: float | Mapping[int, float] | None = None,  # noqa: N803  # the paper's name
        positions: Any = "from_prompt_end",
    ) -> None:
        """Put them together.

        Args:
            model: See `steer`.
            tokenizer: The model's tokenizer.
            steerer: See `steer`.
            layer: See `steer`.
            T: See `steer`.
            positions: See `steer`.

        Raises:
            ValueError: As `steer`.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.steerer = steerer
        self.layer = layer
        self.T = T
        self.positions = positions
        with self.steered():  # so that a mistake is told here
            pass

    def steered(self, prompt_lengths: Any = None) -> AbstractContextManager[nn.Module]:
        """The context in which calls run.

        Args:
            prompt_lengths: See `steer`.

        Returns:
            A context manager that gives the model.
        """
        ends = isinstance(self.positions, str) and self.positions == "from_prompt_end"
        return steer(
            self.model,
            self.steerer,
            layer=self.layer,
            T=self.T,
            positions=self.positions,
            prompt_lengths=prompt_lengths if ends else None,
        )

    @torch.no_grad()
    def generate(self, prompts: str | Sequence[str] | Mapping[str, Tensor], **generate_kwargs: Any) -> list[str]:
        """Continue prompts.

        Args:
            prompts: One prompt, several, or what the tokenizer made of them (`input_ids` and `attention_mask`); batches
                that are padded on the right are padded anew on the left.
            generate_kwargs: As transformers' `generate` takes them.

        Returns:
            The continuations without the prompts, `num_return_sequences` for each prompt.

        Raises:
            ValueError: No prompts, or one without tokens.
        """
        if isinstance(prompts, Mapping):
            ids = prompts["input_ids"]
            mask = prompts.get("attention_mask")
            mask = torch.ones_like(ids) if mask is None else mask
            rows = [row[real != 0].tolist() for row, real in zip(ids, mask, strict=True)]
        else:
            texts = [prompts] if isinstance(prompts, str) else list(prompts)
            rows = [] if not texts else [list(row) for row in self.tokenizer(texts)["input_ids"]]
        return self._continue(rows, generate_kwargs)

    @overload
    def chat(self, messages: Sequence[Mapping[str, Any]], **generate_kwargs: Any) -> str: ...

    @overload
    def chat(self, messages: Sequence[Sequence[Mapping[str, Any]]], **generate_kwargs: Any) -> list[str]: ...

    @torch.no_grad()
    def chat(self, messages: Sequence[Any], **generate_kwargs: Any) -> str | list[str]:
        """Answer a conversation, or several.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]`, or a list of such lists.
            generate_kwargs: As transformers' `generate` takes them.

        Returns:
            The answer, or a list with one for each conversation.

        Raises:
            ValueError: No messages.
        """
        if not messages:
            raise ValueError("messages is empty; give at least one")
        one = isinstance(messages[0], Mapping)
        texts = [
            self.tokenizer.apply_chat_template(list(each), tokenize=False, add_generation_prompt=True)
            for each in ([messages] if one else messages)
        ]
        # The template writes the tokens that begin a text itself.
        rows = [list(row) for row in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]
        found = self._continue(rows, generate_kwargs)
        return found[0] if one and len(found) == 1 else found

    @overload
    def score(self, question: str, answers: Sequence[str], *, batch_size: int = 8) -> list[float]: ...

    @overload
    def score(
        self, question: str, answers: Sequence[str], *, batch_size: int = 8, per_token: bool
    ) -> list[float] | list[Float[Tensor, "tokens"]]: ...

    @torch.no_grad()
    def score(
        self, question: str, answers: Sequence[str], *, batch_size: int = 8, per_token: bool = False
    ) -> list[float] | list[Tensor]:
        r"""Log-likelihoods of answers, steered from the last token of the question on.

        Args:
            question: The text before each answer, with what joins them (`"Q: ...\nA:"`).
            answers: The answers, each with what separates it from the question (`" Yes"`).
            batch_size: Answers in one forward.
            per_token: Whether to give one number for each token of an answer.

        Returns:
            For each answer the sum of the natural log-probabilities of its tokens, or a tensor `[tokens]` of them.

        Raises:
            ValueError: No answers, one without tokens, or a question without.
        """
        if isinstance(answers, str) or not answers:
            raise ValueError(f"answers={answers!r}; it must be a list of at least one text")
        begin, rows = split_tokens(self.tokenizer, question, answers)
        with self.steered(len(begin)):
            found = score_rows(
                self.model, [begin] * len(rows), rows, batch_size=batch_size, pad=_pad_of(self.tokenizer)
            )
        return found if per_token else [float(each.sum(dtype=torch.float64)) for each in found]

    def _continue(self, rows: list[list[int]], options: dict[str, Any]) -> list[str]:
        if not rows:
            raise ValueError("prompts is empty; give at least one")
        if empty := [index for index, row in enumerate(rows) if not row]:
            raise ValueError(f"prompts {empty} have no tokens; a prompt needs at least one")
        pad = _pad_of(self.tokenizer)
        width = max(map(len, rows))
        device = input_device(self.model)
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        options = dict(options)
        config = options.get("generation_config") or getattr(self.model, "generation_config", None)
        if getattr(config, "pad_token_id", None) is None:
            options.setdefault("pad_token_id", pad)
        with self.steered():
            generate: Any = self.model.generate
            found = generate(input_ids=ids, attention_mask=mask, **options)
        sequences = getattr(found, "sequences", found)
        texts: list[str] = self.tokenizer.batch_decode(sequences[:, width:], skip_special_tokens=True)
        return texts


def split_tokens(tokenizer: Any, question: str, answers: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """The tokens of a question and of the answers behind it.

    White space at the end of the question goes to the answers, as tokenizers put it in front of words.

    Args:
        tokenizer: The tokenizer.
        question: The text before each answer.
        answers: The answers.

    Returns:
        The question's tokens, with those that begin all texts, and each answer's.

    Raises:
        ValueError: An answer or the question has no tokens.
    """
    bare = question.rstrip() or question
    space = question[len(bare) :]
    begin = list(tokenizer(bare)["input_ids"])
    end = tokenizer.eos_token_id
    while len(begin) > 1 and begin[-1] == end:
        begin.pop()  # where the tokenizer ends all texts, too
    if not begin:
        raise ValueError("question has no tokens; give at least one")
    rows = []
    for index, answer in enumerate(answers):
        whole = list(tokenizer(bare + space + answer)["input_ids"])
        while len(whole) > 1 and whole[-1] == end:
            whole.pop()
        if whole[: len(begin)] == begin:
            row = whole[len(begin) :]
        else:  # the last token of the question would change with the answer
            row = list(tokenizer(space + answer, add_special_tokens=False)["input_ids"])
        if not row:
            raise ValueError(f"answers[{index}]={answer!r} has no tokens")
        rows.append(row)
    return begin, rows


def score_rows(
    model: nn.Module, begins: Sequence[list[int]], ends: Sequence[list[int]], *, batch_size: int, pad: int = 0
) -> list[Float[Tensor, "tokens"]]:
    """Log-probabilities of tokens that follow others.

    Args:
        model: The causal language model.
        begins: The tokens before, at least one in each row.
        ends: The tokens to score.
        batch_size: Rows in one forward.
        pad: Id of a token to pad with.

    Returns:
        For each row a tensor `[tokens]` on the CPU, float32 or better, in the order given.
    """
    order = sorted(range(len(ends)), key=lambda i: -(len(begins[i]) + len(ends[i])))
    found: dict[int, Tensor] = {}
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        for row, logits in zip(
            batch, answer_logits(model, [begins[i] for i in batch], [ends[i] for i in batch], pad), strict=True
        ):
            log_probs = logits.log_softmax(-1)
            targets = torch.tensor(ends[row], device=logits.device)
            found[row] = log_probs.gather(1, targets[:, None])[:, 0].cpu()
    return [found[row] for row in range(len(ends))]


def answer_logits(
    model: nn.Module, begins: Sequence[list[int]], ends: Sequence[list[int]], pad: int = 0
) -> list[Float[Tensor, "tokens vocab"]]:
    """Logits of each token of an answer, of one batch.

    Args:
        model: The causal language model.
        begins: The tokens before, at least one in each row.
        ends: The tokens of the answers.
        pad: Id of a token to pad with.

    Returns:
        For each row `[tokens, vocab]`, float32 or better.
    """
    # The last token has no next one, so it need not be run.
    rows = [[*begin, *end[:-1]] for begin, end in zip(begins, ends, strict=True)]
    width = max(map(len, rows))
    device = input_device(model)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=device)
    mask: Int64[Tensor, "batch width"] = torch.tensor(
        [[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device
    )
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    exact = torch.promote_types(logits.dtype, torch.float32)
    return [
        logits[place, len(begin) - 1 : len(begin) + len(end) - 1].to(exact)
        for place, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]


def _pad_of(tokenizer: Any) -> int:
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def input_device(model: nn.Module) -> torch.device:
    """Where a model wants its tokens.

    Args:
        model: The model.

    Returns:
        The device of its embeddings; the CPU for weights that lie elsewhere until they are needed, as what fetches them
        takes the tokens along.
    """
    embeddings = getattr(model, "get_input_embeddings", None)
    module = embeddings() if callable(embeddings) else None
    parameters = (module if isinstance(module, nn.Module) else model).parameters()
    return next((p.device for p in parameters if p.device.type != "meta"), torch.device("cpu"))
