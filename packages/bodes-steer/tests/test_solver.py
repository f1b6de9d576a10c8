"""The solvers: exact results, bounds, and what a row may not know of its neighbours."""

import math
from typing import Any

import pytest
import torch
from bodes_steer import solver as solvers
from bodes_steer.quadratic import Quadratic
from bodes_steer.solver import Trajectory, integrate, unit_speed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

SOLVERS = ["euler", "midpoint", "rk4", "dopri5"]


def random_quadratic(d: int, seed: int = 0) -> Quadratic:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(d, d, generator=generator, dtype=torch.float64)
    linear = torch.randn(d, generator=generator, dtype=torch.float64)
    return Quadratic(matrix + matrix.T, linear, 0.3, normalize=True)


def rows_of_length(length: float, rows: int, d: int) -> Tensor:
    x = torch.randn(rows, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return length * x / x.norm(dim=1, keepdim=True)


def follow(field: Quadratic, x: Tensor, T: float, **options: Any) -> Tensor:  # noqa: N803  # the paper's letter
    moved = integrate(lambda a: unit_speed(field.gradient(a)), x, T, **options)
    assert isinstance(moved, Tensor)
    return moved


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("steps", [1, 7])
def test_a_constant_field_is_one_addition(solver: str, steps: int) -> None:
    vector = torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64)
    x = rows_of_length(2.0, 4, 3)
    for strength in (4.0, -2.5):
        moved = integrate(lambda a: vector.expand_as(a), x, strength, steps=steps, solver=solver)
        torch.testing.assert_close(moved, x + strength * vector, atol=1e-6, rtol=0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_time_returns_the_input(solver: str) -> None:
    x = rows_of_length(2.0, 3, 4).float()
    assert torch.equal(integrate(lambda a: a + 1.0, x, 0.0, solver=solver), x)


class TestPlane:
    """h = (x_1^2 - x_2^2) / 2 of the direction, started at angle 1 and radius 2: the exact flow turns by T / 2."""

    field = Quadratic(torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64)), torch.zeros(2).double(), 0.0, True)
    start = 2.0 * torch.tensor([[math.cos(1.0), math.sin(1.0)]], dtype=torch.float64)

    def polar(self, **options: Any) -> tuple[float, float]:
        ((first, second),) = follow(self.field, self.start, 1.0, **options).tolist()
        return math.atan2(second, first), math.hypot(first, second)

    def test_one_euler_step(self) -> None:
        assert self.polar(steps=1) == pytest.approx((1 - math.atan(0.5), math.sqrt(5)), abs=1e-9)

    def test_ten_euler_steps(self) -> None:
        assert self.polar(steps=10) == pytest.approx((0.503189, 2.024846), abs=1e-6)

    @pytest.mark.parametrize(("solver", "error"), [("midpoint", 3e-4), ("rk4", 1e-6), ("dopri5", 1e-5)])
    def test_higher_orders_are_on_the_exact_flow(self, solver: str, error: float) -> None:
        assert self.polar(solver=solver) == pytest.approx((0.5, 2.0), abs=error)

    def test_the_direction_turns(self) -> None:
        path = integrate(lambda a: unit_speed(self.field.gradient(a)), self.start, 1.0, record=True)
        assert isinstance(path, Trajectory)
        # At right angles to the rows where the two steps begin.
        first, last = (torch.atan2(state[0, 1], state[0, 0]).item() for state in (path.states[0], path.states[-2]))
        assert path.angle.item() == pytest.approx(first - last, abs=1e-9)

    def test_there_and_back(self) -> None:
        there = follow(self.field, self.start, 1.0, solver="dopri5")
        back = follow(self.field, there, -1.0, solver="dopri5")
        torch.testing.assert_close(back, self.start, atol=1e-5, rtol=0)


class TestNorm:
    """A barrier of the direction pushes at right angles, so Euler gains `T^2 / steps` in the squared norm."""

    @pytest.mark.parametrize(("steps", "gain"), [(1, 25.0), (10, 2.5), (100, 0.25)])
    def test_euler(self, steps: int, gain: float) -> None:
        x = rows_of_length(4.0, 5, 20)
        moved = follow(random_quadratic(20), x, 5.0, steps=steps)
        gained = moved.square().sum(dim=1) - x.square().sum(dim=1)
        torch.testing.assert_close(gained, torch.full_like(gained, gain), atol=1e-8, rtol=0)

    def test_fourth_order_keeps_it(self) -> None:
        strong = random_quadratic(20)
        field = Quadratic(strong.matrix / 20, strong.linear, 0.0, normalize=True)
        x = rows_of_length(4.0, 50, 20)
        # More than a right angle, 6.3 at this radius, from the maximum: past it every solver turns to and fro.
        x = torch.where((x @ field.linear > 0).unsqueeze(-1), -x, x)
        moved = follow(field, x, 5.0, solver="rk4")
        assert float((moved.square().sum(dim=1) - 16.0).abs().max()) < 1e-3


class TestPastAMaximum:
    x = torch.tensor([[0.95]], dtype=torch.float64)

    @staticmethod
    def field(a: Tensor) -> Tensor:
        return -a.sign()

    @staticmethod
    def barrier(a: Tensor) -> Tensor:
        return -a.abs().squeeze(-1)

    def test_euler_chatters_within_a_step(self) -> None:
        path = integrate(self.field, self.x, 2.4, steps=8, record=True)
        assert isinstance(path, Trajectory)
        expected = [0.95, 0.65, 0.35, 0.05, -0.25, 0.05, -0.25, 0.05, -0.25]
        assert path.states.flatten().tolist() == pytest.approx(expected, abs=1e-12)
        assert path.times.tolist() == pytest.approx([0.3 * index for index in range(9)])

    def test_it_stops_at_a_value(self) -> None:
        options: dict[str, Any] = {"steps": 8, "barrier": self.barrier, "stop_at": -0.4, "record": True}
        path = integrate(self.field, self.x, 2.4, **options)
        assert isinstance(path, Trajectory)
        assert path.states.flatten().tolist() == pytest.approx([0.95, 0.65] + 7 * [0.35])
        assert path.log_ratios is not None
        assert path.log_ratios[-1].item() == pytest.approx(-0.35)

    def test_backwards_it_stops_from_above(self) -> None:
        end = integrate(self.field, self.x, -2.4, steps=8, barrier=self.barrier, stop_at=-1.5)
        assert isinstance(end, Tensor)
        assert end.item() == pytest.approx(1.55)

    def test_the_adaptive_solver_finds_the_crossing_and_says_when_it_cannot_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options: dict[str, Any] = {"solver": "dopri5", "steps": 6}
        two = torch.tensor([[0.95], [0.2]], dtype=torch.float64)
        path = integrate(self.field, two, 2.4, barrier=self.barrier, stop_at=-0.5, record=True, **options)
        assert isinstance(path, Trajectory)
        assert path.states[:, 0, 0].tolist() == pytest.approx([0.95, 0.55, 0.5, 0.5, 0.5, 0.5, 0.5], abs=1e-6)
        assert torch.equal(path.states[:, 1], two[1].expand(7, 1)), "a row that is there already stays"
        monkeypatch.setattr(solvers, "_MOST_EVALUATIONS", 500)
        with pytest.raises(RuntimeError, match=r"500 times.*euler"):
            integrate(lambda a: -a.sign() * 1e6, self.x, 2.4, **options)

    def test_no_gradient_is_no_motion(self) -> None:
        assert torch.equal(unit_speed(torch.zeros(2, 3)), torch.zeros(2, 3))
        x = torch.zeros(2, 3)
        assert torch.equal(integrate(lambda a: unit_speed(a * 0.0), x, 5.0), x)


@settings(max_examples=30)  # the adaptive one takes its time
@given(st.sampled_from(SOLVERS), st.integers(1, 4), st.floats(-3.0, 3.0))
def test_a_row_knows_nothing_of_its_neighbours(solver: str, rows: int, strength: float) -> None:
    field = random_quadratic(4)
    x = rows_of_length(4.0, rows, 4)
    active = torch.arange(rows) % 2 == 0
    options: dict[str, Any] = {"solver": solver, "steps": 2, "barrier": field.value, "stop_at": 1.5}
    together = follow(field, x, strength, active=active, **options)
    for index in range(rows):
        alone = follow(field, x[index : index + 1], strength, active=active[index : index + 1], **options)
        torch.testing.assert_close(together[index : index + 1], alone, atol=1e-12, rtol=0)
        assert active[index] or torch.equal(together[index], x[index])


def test_what_is_refused() -> None:
    x = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"solver='heun'.*'euler'"):
        integrate(lambda a: a, x, 1.0, solver="heun")
    for steps in (0, True, -1):
        with pytest.raises(ValueError, match="steps="):
            integrate(lambda a: a, x, 1.0, steps=steps)
    with pytest.raises(ValueError, match=r"stop_at=0\.5 needs a barrier"):
        integrate(lambda a: a, x, 1.0, stop_at=0.5)
