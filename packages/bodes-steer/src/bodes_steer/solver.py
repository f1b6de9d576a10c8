# ruff: noqa: N803 -- T is the paper's letter and X is that of scikit-learn
"""Integrates `da/dt = v(a)` from 0 to T for rows of activations; tensors in, tensors out (section 3 of the paper)."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Solver = Literal["euler", "midpoint", "rk4", "dopri5"]
Field = Callable[[Tensor], Tensor]

# Added to the length of a gradient before it is divided by it, so that the field is 0 where the gradient is.
SPEED_FLOOR = 1e-10

# Where a unit-speed field turns round within a step, an adaptive solver shortens its steps without end.
_MOST_EVALUATIONS = 20_000


@dataclass(frozen=True)
class Trajectory:
    """The way that rows take.

    Attributes:
        states: `[steps + 1, rows, d]`, the first of them the input.
        times: `[steps + 1]`, from 0 to T.
        log_ratios: `[steps + 1, rows]`, the barrier along the way; None where there is none.
        angle: `[rows]`, in radians, between the first and the last step; NaN where one of them is 0.
    """

    states: Float[Tensor, "points rows d"]
    times: Float[Tensor, "points"]
    log_ratios: Float[Tensor, "points rows"] | None
    angle: Float[Tensor, "rows"]

    @classmethod
    def of(cls, states: Tensor, times: Tensor, barrier: Field | None = None) -> "Trajectory":
        """Look at recorded states.

        Args:
            states: `[steps + 1, rows, d]`, at least two points.
            times: `[steps + 1]`.
            barrier: `[rows, d] -> [rows]`.

        Returns:
            The states with what was seen.
        """
        log_ratios = None if barrier is None else torch.stack([barrier(state) for state in states])
        first, last = states[1] - states[0], states[-1] - states[-2]
        lengths = torch.linalg.vector_norm(first, dim=-1) * torch.linalg.vector_norm(last, dim=-1)
        cosine = ((first * last).sum(dim=-1) / lengths).clamp(-1.0, 1.0)
        return cls(states, times, log_ratios, torch.arccos(cosine))


def unit_speed(gradient: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
    """The field that is followed: `g / (||g|| + 1e-10)`, 0 where the gradient is 0.

    Args:
        gradient: Gradient of the barrier, `[..., d]`.

    Returns:
        Its direction, of length 1.
    """
    length: Tensor = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    return gradient / (length + SPEED_FLOOR)


def check_solver(solver: str, steps: object) -> None:
    """Refuse a solver that is not offered.

    Args:
        solver: Its name.
        steps: Number of steps.

    Raises:
        ValueError: The name is unknown, or `steps` is no whole number above 0.
    """
    if solver not in get_args(Solver):
        raise ValueError(f"solver={solver!r} is not offered; use one of {', '.join(map(repr, get_args(Solver)))}")
    if isinstance(steps, bool) or not isinstance(steps, Integral) or int(steps) < 1:
        raise ValueError(f"steps={steps!r}; it must be a whole number above 0 (the paper uses 10)")


def integrate(
    field: Field,
    x: Float[Tensor, "rows d"],
    T: float,
    *,
    steps: int = 10,
    solver: str = "euler",
    barrier: Field | None = None,
    stop_at: float | None = None,
    active: Bool[Tensor, "rows"] | None = None,
    record: bool = False,
) -> Float[Tensor, "rows d"] | Trajectory:
    """Follow a field for the time T.

    A negative T follows it backwards. With `stop_at`, a row is frozen at the first step at whose start it has reached
    that value of the barrier: from below for positive T, from above for negative T. It is looked at between steps, so
    a row may pass the value by what one step gains (`"dopri5"` finds the crossing itself).

    Args:
        field: Velocity of each row, `[rows, d] -> [rows, d]`.
        x: Where to start.
        T: How long; with a field of unit speed, the length of the path.
        steps: Steps of equal length. For `"dopri5"`, which chooses its own, only the number of recorded points.
        solver: `"euler"`, `"midpoint"`, `"rk4"`, or scipy's adaptive Dormand-Prince method of order 5 (row by row in
            float64 on the CPU, so that no row's steps depend on another row: exact, and slow).
        barrier: `[rows, d] -> [rows]`, needed for `stop_at`.
        stop_at: Value of the barrier at which a row stops.
        active: Rows that move at all; all by default.
        record: Whether to keep the states between.

    Returns:
        The end of the path, or with `record` the whole of it.

    Raises:
        ValueError: An unknown solver, or `stop_at` without a barrier.
        RuntimeError: `"dopri5"` did not get to the end, because the field turns round within its steps.
    """
    check_solver(solver, steps)
    if stop_at is not None and barrier is None:
        raise ValueError(f"stop_at={stop_at!r} needs a barrier, the function whose value it is")
    if solver == "dopri5":
        whole, times = _adaptive(field, x, T, steps, barrier, stop_at, active)
        return Trajectory.of(whole, times, barrier) if record else whole[-1]
    step = T / steps
    states = [x]
    moving = active
    for _ in range(steps if T != 0 or record else 0):
        if stop_at is not None and barrier is not None:
            before = _before(barrier(x), stop_at, T)
            moving = before if moving is None else moving & before
        moved = _advance(field, x, step, solver)
        x = moved if moving is None else torch.where(moving.unsqueeze(-1), moved, x)
        if record:
            states.append(x)
    if not record:
        return x
    times = torch.arange(steps + 1, dtype=x.dtype, device=x.device) * step
    return Trajectory.of(torch.stack(states), times, barrier)


def _before(values: Tensor, stop_at: float, T: float) -> Tensor:
    return values < stop_at if T >= 0 else values > stop_at


def _advance(field: Field, x: Tensor, step: float, solver: str) -> Tensor:
    first = field(x)
    if solver == "euler":
        return torch.add(x, first, alpha=step)
    if solver == "midpoint":
        return torch.add(x, field(torch.add(x, first, alpha=step / 2)), alpha=step)
    second = field(torch.add(x, first, alpha=step / 2))
    third = field(torch.add(x, second, alpha=step / 2))
    fourth = field(torch.add(x, third, alpha=step))
    return torch.add(x, first + 2 * second + 2 * third + fourth, alpha=step / 6)


def _adaptive(
    field: Field,
    x: Tensor,
    T: float,
    points: int,
    barrier: Field | None,
    stop_at: float | None,
    active: Tensor | None,
) -> tuple[Tensor, Tensor]:
    # By index, so that the last time is T to the bit.
    times = [T * index / points for index in range(points + 1)]
    rows = []
    for index, row in enumerate(x):
        still = T == 0 or (active is not None and not bool(active[index]))
        if barrier is not None and stop_at is not None:
            still = still or not bool(_before(barrier(row.unsqueeze(0)), stop_at, T))
        if still:
            rows.append(row.expand(points + 1, -1))
        else:
            rows.append(_adaptive_row(field, row, times, barrier, stop_at))
    states = torch.stack(rows, dim=1) if rows else x.expand(points + 1, *x.shape)
    return states, torch.tensor(times, dtype=x.dtype, device=x.device)


def _adaptive_row(
    field: Field, row: Tensor, times: list[float], barrier: Field | None, stop_at: float | None
) -> Tensor:
    from scipy.integrate import solve_ivp  # type: ignore[import-untyped]  # it ships no types

    count = 0

    def tensor(state: Any) -> Tensor:
        return torch.as_tensor(state, dtype=row.dtype, device=row.device).unsqueeze(0)

    def velocity(_: float, state: Any) -> Any:
        nonlocal count
        count += 1
        if count > _MOST_EVALUATIONS:
            raise RuntimeError(
                f"dopri5 evaluated the field {_MOST_EVALUATIONS} times without reaching T={times[-1]}: the field turns "
                "round within a step, as at a maximum of the barrier; use solver='euler', or stop_at"
            )
        return field(tensor(state))[0].double().cpu().numpy()

    def crossing(_: float, state: Any) -> float:
        assert barrier is not None
        assert stop_at is not None
        return float(barrier(tensor(state))[0]) - stop_at

    crossing.terminal = True  # type: ignore[attr-defined]  # how scipy is told
    solution = solve_ivp(
        velocity,
        (0.0, times[-1]),
        row.double().cpu().numpy(),
        t_eval=times,
        events=None if barrier is None or stop_at is None else crossing,
        rtol=1e-6,
        atol=1e-8,
    )
    if solution.status < 0:
        raise RuntimeError(f"dopri5 failed: {solution.message}")
    states = [tensor(state)[0] for state in solution.y.T]
    if solution.status == 1:  # it reached the value, and stays there
        states += [tensor(solution.y_events[0][-1])[0]] * (len(times) - len(states))
    # The input itself, to the bit.
    return torch.stack([row, *states[1:]])
