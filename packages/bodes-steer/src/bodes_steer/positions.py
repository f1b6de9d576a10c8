"""Which positions of a forward call are steered.

In the paper's code a hook changes the last position of each call: the last token of the prompt, then every generated
token. What "the last position of the call" is depends on how the caller decodes: with a cache or without, in chunks,
with drafts, padded on either side. The rule `"from_prompt_end"` says the same in a way that does not: every position
from the last token of the prompt on.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Rule: TypeAlias = Literal["from_prompt_end", "last", "all"]

RULES: tuple[Rule, ...] = ("from_prompt_end", "last", "all")

Move: TypeAlias = Callable[[Tensor], Tensor]
"""Steers rows, `[rows, hidden]` to the same."""


class Prompt:
    """What `generate` was given.

    Attributes:
        width: Columns of the prompt, padding included.
        width_tensor: The same on the device of the tokens, so that compiled code need not be made anew for each width.
        real: `[batch, width]`, False at padding; None where there is none.
        last: `[batch]`, the column of the last token of each row; None where it is the last column in all of them.
    """

    def __init__(self, width: int, real: Bool[Tensor, "batch width"] | None, device: torch.device) -> None:
        """Take note.

        Args:
            width: Columns of the prompt.
            real: False at padding; None without any.
            device: Where the tokens are.
        """
        self.width = width
        self.width_tensor = torch.tensor(width, device=device)
        self.real = None if real is None or bool(real.all()) else real
        # Padded on the left or not at all, as it should be: then no row needs a look.
        self.last = None if self.real is None or bool(self.real[:, -1].all()) else self._last(self.real)

    def _last(self, real: Tensor) -> Tensor:
        # A row without any token has no end: it is steered from its first generated token on.
        return torch.where(real.any(1), last_true(real), self.width)


class Call:
    """One forward call of the decoder, as a function given for `positions` sees it.

    Attributes:
        batch: Rows.
        query: Columns of this call.
        past: Columns before this call, padding included; a tensor without dimensions in compiled code with a static
            cache.
        device: Where the tokens are.
        mask: `[batch, past + query]`, 0 at padding, or of four dimensions, as attention wants it; None without padding.
        prompt: What `generate` was given; None outside `generate`.
    """

    # No dataclass: the compiler cannot follow one whose fields are checked.
    def __init__(
        self,
        batch: int,
        query: int,
        past: int | Tensor,
        device: torch.device,
        mask: Tensor | None = None,
        prompt: Prompt | None = None,
    ) -> None:
        """Take note.

        Args:
            batch: See above.
            query: See above.
            past: See above.
            device: See above.
            mask: See above.
            prompt: See above.
        """
        self.batch = batch
        self.query = query
        self.past = past
        self.device = device
        self.mask = mask
        self.prompt = prompt

    def columns(self) -> Int[Tensor, "query"]:
        """The column of each position in the whole sequence, padding included."""
        return torch.arange(self.query, device=self.device) + self.past

    def real(self) -> Bool[Tensor, "batch query"] | None:
        """False at padding; None where there is none."""
        if self.prompt is not None:
            return self._real_in_generate(self.prompt)
        if self.mask is None:
            return None
        if self.mask.ndim == 4:
            return self._on_diagonal(self.mask)
        mask = self.mask != 0
        if mask.shape[1] == self.query:
            return mask
        if isinstance(self.past, int):
            return mask[:, self.past : self.past + self.query]
        return mask.index_select(1, self.columns())

    def ordinals(self) -> Int[Tensor, "batch query"]:
        """How many tokens of its row come before each position, padding not counted.

        Raises:
            ValueError: Padding of earlier calls is unknown.
        """
        columns = self.columns()
        if self.prompt is not None:
            if self.prompt.real is None:
                return columns.expand(self.batch, -1)
            counts = self.of_rows(self.prompt.real).cumsum(1)
            inside = counts.index_select(1, columns.clamp(max=self.prompt.width - 1))
            return inside + (columns - (self.prompt.width - 1)).clamp(min=0) - 1
        real = self.real()
        if self.mask is None or real is None:
            return columns.expand(self.batch, -1)
        if self.mask.ndim == 2 and self.mask.shape[1] > self.query:
            return ((self.mask != 0).cumsum(1) - 1).index_select(1, columns)
        if isinstance(self.past, int) and self.past == 0:
            return real.cumsum(1) - 1
        raise ValueError(
            "attention_mask says nothing of the padding of earlier calls; pass the two-dimensional one of "
            "[batch, past + new] columns"
        )

    def of_rows(self, values: Tensor) -> Tensor:
        """Values of the prompts for the rows of this call; inside `generate` each may stand for several (beams).

        Args:
            values: `[prompts, ...]`, or one for all rows.

        Returns:
            `[batch, ...]`.

        Raises:
            ValueError: The batch has another number of rows.
        """
        count = values.shape[0]
        if self.batch % count or (self.prompt is None and count not in (1, self.batch)):
            which = "the same number" if self.prompt is None else "a multiple"
            raise ValueError(f"the batch has {self.batch} rows, which is not {which} of the {count} given")
        values = values.to(self.device)
        return values if self.batch == count else values.repeat_interleave(self.batch // count, dim=0)

    def _real_in_generate(self, prompt: Prompt) -> Tensor | None:
        if prompt.real is None or (isinstance(self.past, int) and self.past >= prompt.width):
            return None
        columns = self.columns()
        inside = self.of_rows(prompt.real).index_select(1, columns.clamp(max=prompt.width - 1))
        return inside | (columns >= prompt.width)

    def _on_diagonal(self, mask: Tensor) -> Tensor:
        """Every token sees itself, and nothing sees padding."""
        keys = mask.shape[-1]
        within = torch.arange(self.query, device=mask.device)
        whole = not isinstance(self.past, int) or keys >= self.past + self.query
        # A window keeps its latest keys only.
        at = within + (self.past if whole else keys - self.query)
        diagonal = mask[:, 0].gather(2, at.expand(mask.shape[0], -1)[:, :, None])[:, :, 0]
        seen = diagonal if diagonal.dtype == torch.bool else diagonal > torch.finfo(diagonal.dtype).min / 2
        return seen.to(self.device).expand(self.batch, -1)


class Rest:
    """All positions of all rows from one column of the call on: no mask, no copy of rows."""

    compiled = False

    def __init__(self, start: int) -> None:
        """Take note.

        Args:
            start: The column; from `query` on nothing is steered.
        """
        self.start = start

    def apply(self, states: Tensor, move: Move) -> Tensor:
        """Steer.

        Args:
            states: `[batch, query, hidden]`; never written to.
            move: Steers rows.

        Returns:
            The new states.
        """
        if self.start >= states.shape[1]:
            return states
        chosen = states[:, self.start :]
        moved = move(chosen.reshape(-1, chosen.shape[-1])).view(chosen.shape)
        return moved if self.start == 0 else torch.cat([states[:, : self.start], moved], dim=1)


class OnePerRow:
    """One position of each row that has one."""

    def __init__(self, real: Bool[Tensor, "batch query"], compiled: bool) -> None:
        """Take the last token of each row.

        Args:
            real: False at padding.
            compiled: Whether this is traced.
        """
        self.compiled = compiled
        self.columns = last_true(real)
        self.present = real.any(1, keepdim=True)

    def apply(self, states: Tensor, move: Move) -> Tensor:
        """As `Rest.apply`."""
        columns = self.columns.to(states.device)
        rows = torch.arange(states.shape[0], device=states.device)
        chosen = states[rows, columns]
        moved = torch.where(self.present.to(states.device), move(chosen), chosen)
        return states.index_put((rows, columns), moved)


class Masked:
    """Any positions. Where many are left out they are not computed."""

    def __init__(self, mask: Bool[Tensor, "batch query"], compiled: bool) -> None:
        """Take note.

        Args:
            mask: True where to steer.
            compiled: Whether this is traced; then nothing may depend on how many positions there are.
        """
        self.compiled = compiled
        self.mask = mask
        # One column (decoding): most rows are steered, and counting would make a GPU wait.
        self.found = None if compiled or mask.shape[1] == 1 else mask.nonzero(as_tuple=True)

    def apply(self, states: Tensor, move: Move) -> Tensor:
        """As `Rest.apply`."""
        if self.found is None:
            moved = move(states.reshape(-1, states.shape[-1])).view(states.shape)
            return torch.where(self.mask.to(states.device)[:, :, None], moved, states)
        rows, columns = (each.to(states.device) for each in self.found)
        if not len(rows):
            return states
        return states.index_put((rows, columns), move(states[rows, columns]))


Selection: TypeAlias = Rest | OnePerRow | Masked

Positions: TypeAlias = Rule | Tensor | Callable[[Call], Tensor]


def check_positions(positions: Any, prompt_lengths: Any) -> tuple[Positions, Tensor | None]:
    """Refuse what is no rule.

    Args:
        positions: As `steer` takes it.
        prompt_lengths: Likewise.

    Returns:
        The rule, and the lengths as a tensor `[1 or batch]`.

    Raises:
        ValueError: Neither a name, nor a function, nor a boolean mask; or lengths that are none, or another rule's.
    """
    if isinstance(positions, str):
        if positions not in RULES:
            raise ValueError(f"positions={positions!r}; it must be one of {', '.join(map(repr, RULES))}")
    elif not callable(positions):
        positions = torch.as_tensor(positions)
        if positions.dtype != torch.bool or positions.ndim not in (1, 2):
            raise ValueError(
                f"positions is a tensor {tuple(positions.shape)} of {positions.dtype}; it must be a boolean mask "
                "[columns] or [batch, columns]"
            )
        positions = positions if positions.ndim == 2 else positions[None]
    rule: Positions = positions
    if prompt_lengths is None:
        return rule, None
    if not (isinstance(positions, str) and positions == "from_prompt_end"):
        raise ValueError("prompt_lengths say where prompts end, which only positions='from_prompt_end' asks for")
    lengths = torch.as_tensor(prompt_lengths)
    lengths = lengths[None] if lengths.ndim == 0 else lengths
    if lengths.ndim != 1 or not len(lengths) or lengths.is_floating_point() or bool((lengths < 1).any()):
        raise ValueError(f"prompt_lengths={prompt_lengths!r}; it must hold a whole number from 1 on for each row")
    return rule, lengths


def select(call: Call, positions: Positions, prompt_lengths: Tensor | None) -> Selection:
    """The positions of one forward call that are steered, found once and used by every layer.

    Args:
        call: The call.
        positions: The rule.
        prompt_lengths: `[1 or batch]`, tokens of each prompt.

    Returns:
        The positions.

    Raises:
        ValueError: A mask does not fit the call, or what a function returned is none.
    """
    compiled = torch.compiler.is_compiling()
    if not isinstance(positions, str):
        wanted = _given_mask(call, positions) if isinstance(positions, Tensor) else _asked(call, positions)
        real = call.real()
        return Masked(wanted if real is None else wanted & real, compiled)
    if positions == "last":
        return _last(call, compiled)
    if positions == "all":
        return _where(call.real(), compiled)
    if prompt_lengths is not None:
        mask, real = call.ordinals() >= call.of_rows(prompt_lengths)[:, None] - 1, call.real()
        return Masked(mask if real is None else mask & real, compiled)
    return _from_prompt_end(call, compiled)


def _from_prompt_end(call: Call, compiled: bool) -> Selection:
    past, prompt = call.past, call.prompt
    if prompt is not None and prompt.last is not None and not (isinstance(past, int) and past >= prompt.width):
        columns = call.columns()
        return Masked((columns == call.of_rows(prompt.last)[:, None]) | (columns >= prompt.width), compiled)
    if prompt is not None:
        if isinstance(past, int) and not compiled:
            return Rest(max(prompt.width - 1 - past, 0))
        return Masked((call.columns() >= prompt.width_tensor - 1).expand(call.batch, -1), compiled)
    if isinstance(past, int):
        return _last(call, compiled) if past == 0 else _where(call.real(), compiled)
    real = call.real()
    real = torch.ones(call.batch, call.query, dtype=torch.bool, device=call.device) if real is None else real
    last = torch.arange(call.query, device=call.device) == last_true(real)[:, None]
    return Masked((last | (past > 0)) & real, compiled)


def _last(call: Call, compiled: bool) -> Selection:
    real = call.real()
    return Rest(call.query - 1) if real is None else OnePerRow(real, compiled)


def _where(real: Tensor | None, compiled: bool) -> Selection:
    return Rest(0) if real is None else Masked(real, compiled)


def _given_mask(call: Call, mask: Tensor) -> Tensor:
    if isinstance(call.past, int) and call.past + call.query > mask.shape[1]:
        raise ValueError(
            f"positions is a mask of {mask.shape[1]} columns, and this call goes up to column "
            f"{call.past + call.query}: give one for all columns, or a function"
        )
    return call.of_rows(mask).index_select(1, call.columns())


def _asked(call: Call, function: Callable[[Call], Tensor]) -> Tensor:
    mask: Any = function(call)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (call.batch, call.query):
        what = f"{tuple(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(
            f"the function given for positions returned {what}; it must return a boolean tensor "
            f"({call.batch}, {call.query})"
        )
    found: Tensor = mask.to(call.device)
    return found


def last_true(real: Bool[Tensor, "batch query"]) -> Int[Tensor, "batch"]:
    """The last column of each row that is True.

    Args:
        real: The rows.

    Returns:
        The columns; 0 for a row without any.
    """
    return (real * torch.arange(1, real.shape[1] + 1, device=real.device)).argmax(1)


def plain_mask(attention_mask: Any) -> Tensor | None:
    """The attention mask of a call, of the kinds that say where padding is.

    Args:
        attention_mask: A tensor, a mapping with one ready mask for each kind of layer, or None.

    Returns:
        A tensor of two or four dimensions, or None.

    Raises:
        ValueError: Another kind.
    """
    if isinstance(attention_mask, Mapping):
        attention_mask = next((each for each in attention_mask.values() if each is not None), None)
    if attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.ndim in (2, 4)):
        return attention_mask
    raise ValueError(
        f"attention_mask is a {type(attention_mask).__name__}, which does not say where padding is; pass the "
        "two-dimensional one, 1 at tokens and 0 at padding"
    )
