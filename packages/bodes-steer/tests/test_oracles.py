"""Right values for the whole method: known flows, a rising barrier, and a task whose exact ratio is known."""

from typing import Any

import pytest
import torch
from bodes_steer import CAA, ITI, GaussianODE, ODESteer, StepODESteer
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:T=")

FIRST, SECOND = 2.0, 0.6


def gaussian_ode(matrix: Tensor, vector: Tensor, **params: Any) -> GaussianODE:
    offset = torch.zeros((), dtype=torch.float64)
    state = {"matrix_": matrix, "vector_": vector, "offset_": offset, "median_norm_": torch.ones_like(offset)}
    return GaussianODE(**params).restore(state)


class TestTwoGaussians:
    def test_equal_covariances_give_the_difference_of_means(self) -> None:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(50, 4, generator=generator, dtype=torch.float64)
        shift = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
        # The same sample twice, so that both covariances are the same round one, shrunk all the way.
        steerer = GaussianODE(shrinkage=1.0).fit(noise + shift, noise)
        x = 3.0 * torch.randn(7, 4, generator=generator, dtype=torch.float64)
        direction = CAA().fit(noise + shift, noise).vector_
        torch.testing.assert_close(steerer.vector_field(x), (direction / direction.norm()).expand_as(x))
        torch.testing.assert_close(steerer.steer(x, 2.0), x + 2.0 * direction / direction.norm())

    @pytest.mark.parametrize("backend", ["dense", "spectral"])
    @pytest.mark.parametrize("solver", ["euler", "rk4"])
    def test_a_narrow_one_draws_inwards(self, backend: str, solver: str) -> None:
        """N(0, 1) against N(0, 4): h = -3 ||a||^2 / 8 and a constant."""
        matrix = -0.75 * torch.eye(3, dtype=torch.float64)
        steerer = gaussian_ode(matrix, torch.zeros(3, dtype=torch.float64), backend=backend, solver=solver)
        x = torch.tensor([[4.0, 0.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
        for strength in (2.0, -2.0):
            moved = steerer.steer(x, strength)
            torch.testing.assert_close(moved[0], x[0] * (5.0 - strength) / 5.0)
            assert torch.equal(moved[1], x[1]), "where there is no gradient nothing moves"

    def test_the_narrow_one_is_estimated(self) -> None:
        generator = torch.Generator().manual_seed(0)
        pos = torch.randn(20000, 2, generator=generator, dtype=torch.float64)
        neg = 2.0 * torch.randn(20000, 2, generator=generator, dtype=torch.float64)
        steerer = GaussianODE(shrinkage=0.0).fit(pos, neg)
        torch.testing.assert_close(0.5 * steerer.matrix_, -0.375 * torch.eye(2).double(), rtol=0.05, atol=0.02)


def sample(count: int, *, positive: bool, generator: torch.Generator) -> Tensor:
    """Classes that differ in the sign of the product of two axes, and a little on a third."""
    rows = 0.7 * torch.randn(count, 32, generator=generator)
    sign = (2 * torch.randint(0, 2, (count,), generator=generator) - 1).float()
    rows[:, 0] += 6.0
    rows[:, 1] += FIRST * sign
    rows[:, 2] += FIRST * sign * (1 if positive else -1)
    rows[:, 3] += SECOND if positive else -SECOND
    return rows


def share_positive(rows: Tensor) -> float:
    """By the exact log-density ratio."""

    def mixture(relative: int, shift: float) -> Tensor:
        parts = [(rows[:, 1] - s * FIRST) ** 2 + (rows[:, 2] - relative * s * FIRST) ** 2 for s in (1, -1)]
        return torch.logsumexp(-torch.stack(parts) / 0.98, dim=0) - (rows[:, 3] - shift) ** 2 / 0.98

    return float((mixture(1, SECOND) > mixture(-1, -SECOND)).float().mean())


@pytest.mark.slow  # four fits on 4000 rows and 2000 features
@pytest.mark.parametrize("seed", [0, 1])
def test_the_nonlinear_task(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pos, neg = (sample(2000, positive=each, generator=generator) for each in (True, False))
    held_out = sample(2000, positive=False, generator=generator)
    assert share_positive(held_out) == pytest.approx(0.003, abs=0.05)
    vector = CAA().fit(pos, neg).vector_
    assert share_positive(held_out + 6.0 * vector / vector.norm()) == pytest.approx(0.52, abs=0.02 + 0.05)
    assert share_positive(ITI().fit(pos, neg).steer(held_out, 6.0)) == pytest.approx(0.50, abs=0.05)

    common = {"n_components": 2000, "random_state": seed}
    ten = ODESteer(**common).fit(pos, neg)
    one = StepODESteer(**common).restore(ten.state())
    assert share_positive(one.steer(held_out, 6.0)) == pytest.approx(0.62, abs=0.02 + 0.05)
    assert share_positive(ten.steer(held_out, 6.0)) == pytest.approx(0.83, abs=0.05)
    sharp = ODESteer(gamma=1.0, C=100.0, **common).fit(pos, neg)
    one = StepODESteer(gamma=1.0, C=100.0, **common).restore(sharp.state())
    assert share_positive(one.steer(held_out, 6.0)) == pytest.approx(0.54, abs=0.05 + 0.05)
    assert share_positive(sharp.steer(held_out, 6.0)) >= 0.99 - 0.05

    # Along the path of the default the barrier rises at every step, while it is below that of the positives.
    path = ten.trajectory(held_out, 6.0)
    assert path.log_ratios is not None
    goal = ten.log_ratio(pos).median()
    rises = path.log_ratios[1:] > path.log_ratios[:-1]
    counts = path.log_ratios[:-1] < goal
    assert float((rises | ~counts).all(dim=0).float().mean()) >= 0.99


def test_the_barrier_rises_along_the_path() -> None:
    generator = torch.Generator().manual_seed(0)
    pos, neg = (sample(300, positive=each, generator=generator) for each in (True, False))
    steerer = ODESteer(n_components=200, random_state=0).fit(pos, neg)
    held_out = sample(300, positive=False, generator=generator)
    path = steerer.trajectory(held_out, 6.0)
    assert path.log_ratios is not None
    rises = path.log_ratios[1:] > path.log_ratios[:-1]
    counts = path.log_ratios[:-1] < steerer.log_ratio(pos).median()
    assert float((rises | ~counts).all(dim=0).float().mean()) >= 0.99
    assert share_positive(held_out) < 0.05 < share_positive(path.states[-1])


def test_the_same_seed_gives_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    pos, neg = (sample(50, positive=each, generator=generator) for each in (True, False))
    first, second = (ODESteer(n_components=100, random_state=3).fit(pos, neg) for _ in range(2))
    assert torch.equal(first.index_hash_, second.index_hash_)
    assert torch.equal(first.steer(neg, 1.0), second.steer(neg, 1.0))
    other = ODESteer(n_components=100, random_state=4).fit(pos, neg)
    assert not torch.equal(first.index_hash_, other.index_hash_)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "fft", "dense", "spectral"])
def test_a_gpu_gives_what_the_cpu_gives(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pos, neg = (sample(200, positive=each, generator=generator) for each in (True, False))
    steerer = ODESteer(n_components=500, random_state=0, backend=backend).fit(pos, neg)
    there = steerer.to("cuda")
    torch.testing.assert_close(there.flow(neg.cuda(), 3.0).cpu(), steerer.flow(neg, 3.0), atol=1e-4, rtol=0)
    torch.testing.assert_close(there.log_ratio(neg.cuda()).cpu(), steerer.log_ratio(neg), atol=1e-4, rtol=0)
