"""What all steerers share, and those that follow a barrier."""

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from bodes_steer import CAA, GaussianODE, LinearODE, LogDensityRatio, ODESteer, RFFODESteer, StepODESteer, auto_T
from bodes_steer.steerers import BODES, STEERERS, Steerer, make_steerer
from sklearn.base import clone
from torch import Tensor

# Rows are short here and paths long, so that what is looked for is seen.
pytestmark = pytest.mark.filterwarnings("ignore:T=")

D = 12
SMALL: dict[str, dict[str, Any]] = {
    name: {"n_components": 64, "random_state": 0} for name in ("odesteer", "step-odesteer", "rff-odesteer")
}


def classes(seed: int = 0, rows: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pos, neg = (torch.randn(rows, D, generator=generator, dtype=torch.float64) for _ in range(2))
    pos[:, 0] += 6.0
    neg[:, 0] += 6.0
    pos[:, 1] += 1.0
    return pos, 1.2 * neg


@pytest.fixture(scope="module")
def fitted() -> dict[str, Steerer]:
    pos, neg = classes()
    return {name: make_steerer(name, **SMALL.get(name, {})).fit(pos, neg) for name in STEERERS}


@pytest.fixture(scope="module")
def x() -> Tensor:
    return classes(seed=1, rows=6)[1]


def test_the_registry_holds_every_method() -> None:
    assert set(STEERERS) == {
        *("odesteer", "step-odesteer", "rff-odesteer", "linear-ode", "gaussian-ode"),
        *("caa", "repe", "iti", "linact", "mimic"),
    }
    assert BODES is ODESteer
    with pytest.raises(ValueError, match=r"method='ode'.*'odesteer'"):
        make_steerer("ode")
    with pytest.raises(ValueError, match=r"takes no parameter steps; it takes T"):
        make_steerer("caa", steps=3)


@pytest.mark.parametrize("name", sorted(STEERERS))
class TestEveryMethod:
    def test_interface(self, name: str, fitted: dict[str, Steerer], x: Tensor) -> None:
        steerer = fitted[name]
        assert steerer.n_features_in_ == D
        moved = steerer.steer(x, 1.0)
        assert moved.dtype == torch.float64
        assert torch.equal(steerer.flow(x, 1.0), moved)
        assert torch.equal(steerer.steer(x, 0.0), x)
        shaped = steerer.steer(x.reshape(2, 3, D), 1.0)
        torch.testing.assert_close(shaped.reshape(6, D), moved)
        torch.testing.assert_close(steerer.steer(x[0], 1.0), moved[0])
        array = steerer.steer(x.numpy(), 1.0)
        assert isinstance(array, np.ndarray)
        torch.testing.assert_close(torch.from_numpy(array), moved)
        torch.testing.assert_close(steerer.steer(x.float(), 1.0), moved.float(), atol=1e-4, rtol=1e-4)
        half = steerer.steer(x.bfloat16(), 1.0)
        assert half.dtype == torch.bfloat16
        assert steerer.steer(x.numpy().astype(np.float16), 1.0).dtype == np.float16
        whole = x.round()
        for same in (whole.int().numpy(), whole.int().tolist(), whole.numpy().astype(">f4")):
            assert np.array_equal(steerer.steer(same, 1.0), steerer.steer(whole.numpy(), 1.0))

    def test_velocity_is_the_start_of_the_path(self, name: str, fitted: dict[str, Steerer], x: Tensor) -> None:
        steerer = fitted[name]
        velocity = steerer.vector_field(x)
        small = 1e-4
        if name == "mimic":
            small = 1.0
        torch.testing.assert_close((steerer.flow(x, small) - x) / small, velocity, atol=2e-3, rtol=0)
        vector = steerer.constant_vector
        if vector is not None:
            torch.testing.assert_close(steerer.flow(x, -2.0), x - 2.0 * vector)

    def test_trajectory(self, name: str, fitted: dict[str, Steerer], x: Tensor) -> None:
        steerer = fitted[name]
        path = steerer.trajectory(x, 1.0)
        assert torch.equal(path.states[0], x)
        torch.testing.assert_close(path.states[-1], steerer.flow(x, 1.0))
        assert path.times[-1].item() == pytest.approx(1.0)
        assert (path.log_ratios is not None) == steerer.has_barrier
        if path.log_ratios is not None:
            torch.testing.assert_close(path.log_ratios[-1], steerer.log_ratio(path.states[-1]))
        if steerer.constant_vector is not None:
            assert float(path.angle.abs().max()) < 1e-3
        assert torch.equal(steerer.trajectory(x, 0.0).states[-1], x)

    def test_copies(self, name: str, fitted: dict[str, Steerer], x: Tensor) -> None:
        steerer = fitted[name]
        assert steerer.to("cpu") is steerer
        elsewhere = steerer.to("meta")
        assert elsewhere.device.type == "meta"
        assert steerer.to("meta") is elsewhere
        assert steerer.device.type == "cpu"
        again = copy.deepcopy(steerer)
        assert torch.equal(again.flow(x, 2.0), steerer.flow(x, 2.0))
        fresh = clone(steerer)
        with pytest.raises(ValueError, match="not fitted"):
            fresh.steer(x)
        assert fresh.get_params() == steerer.get_params()

    def test_what_is_refused(self, name: str, fitted: dict[str, Steerer], x: Tensor) -> None:
        steerer = fitted[name]
        with pytest.raises(ValueError, match=f"{D}"):
            steerer.steer(x[:, :-1])
        bad = x.clone()
        bad[1, 2] = float("nan")
        with pytest.raises(ValueError, match="1 value"):
            steerer.steer(bad)
        with pytest.raises(ValueError, match="T=inf"):
            steerer.steer(x, float("inf"))
        with pytest.raises(ValueError, match=r"0 feature"):
            steerer.steer(x[:, :0])
        with pytest.raises(TypeError, match="sparse"):
            steerer.steer(x.to_sparse())
        state = steerer.state()
        with pytest.raises(ValueError, match="missing: median_norm_"):
            clone(steerer).restore({key: value for key, value in state.items() if key != "median_norm_"})
        with pytest.raises(ValueError, match="unknown: extra"):
            clone(steerer).restore({**state, "extra": x})


def test_a_shape_that_does_not_fit_is_refused(fitted: dict[str, Steerer]) -> None:
    for name, tensor in (
        ("odesteer", "coef_"),
        ("rff-odesteer", "phases_"),
        ("gaussian-ode", "matrix_"),
        ("mimic", "map_"),
        ("linact", "shift_"),
    ):
        state = fitted[name].state()
        with pytest.raises(ValueError, match=r"fit|width"):
            clone(fitted[name]).restore({**state, tensor: state[tensor][:-1]})


def test_a_fit_that_fails_leaves_nothing_fitted() -> None:
    pos, neg = classes()
    steerer = ODESteer(n_components=64, random_state=0).fit(pos, neg)
    steerer.set_params(solver="heun")
    with pytest.raises(ValueError, match="solver='heun'"):
        steerer.fit(pos, neg)
    with pytest.raises(ValueError, match="not fitted"):
        steerer.state()
    fitted_state = CAA().fit(pos, neg).state()
    other = LinearODE().fit(pos, neg)
    with pytest.raises(ValueError, match="unknown: vector_"):
        other.restore(fitted_state)
    assert other.steer(neg).shape == neg.shape, "what is refused at the door changes nothing"


def test_parameters_of_the_path_may_change_and_those_of_the_fit_need_another(x: Tensor) -> None:
    pos, neg = classes()
    steerer = ODESteer(n_components=64, random_state=0).fit(pos, neg)
    assert steerer.to("meta").steps == 10
    steerer.steps = 3
    assert steerer.to("meta").steps == 3
    steerer.set_params(stop_at=0.5, gamma=0.1)
    assert steerer.to("meta").stop_at == 0.5
    steerer.set_params(gamma=0.2)
    with pytest.raises(ValueError, match="not fitted"):
        steerer.steer(x)


class TestODESteer:
    def test_every_backend_gives_the_same(self, x: Tensor) -> None:
        pos, neg = classes()
        path = {}
        for backend in ("fft", "dense", "spectral"):
            steerer = ODESteer(n_components=64, backend=backend, random_state=0, stop_at=0.1).fit(pos, neg)
            path[backend] = [steerer.flow(x, 3.0), steerer.flow(x, -3.0)]
            steerer.set_params(solver="rk4", only_when_negative=True)
            path[backend] += [steerer.flow(x, 3.0), steerer.log_ratio(x), steerer.vector_field(x)]
        for other in ("dense", "spectral"):
            for first, second in zip(path["fft"], path[other], strict=True):
                torch.testing.assert_close(first, second, atol=1e-9, rtol=0)

    def test_its_barrier_is_the_fitted_ratio(self, x: Tensor) -> None:
        pos, neg = classes()
        neg = neg[:40]
        labels = torch.cat([torch.ones(len(pos)), torch.zeros(len(neg))])
        steerer = ODESteer(n_components=64, random_state=0, C=10.0).fit(pos, neg)
        ratio = LogDensityRatio(clone(steerer._sketch()), C=10.0).fit(torch.cat([pos, neg]), labels.long())
        torch.testing.assert_close(steerer.log_ratio(x), ratio.log_ratio(x), atol=1e-9, rtol=0)
        gradient = ratio.grad(x)
        expected = gradient / gradient.norm(dim=1, keepdim=True)
        torch.testing.assert_close(steerer.vector_field(x), expected, atol=1e-7, rtol=0)

    @pytest.mark.parametrize("degree", [1, 3])
    def test_other_degrees_use_the_sketch_itself(self, degree: int, x: Tensor) -> None:
        pos, neg = classes()
        steerer = ODESteer(n_components=64, degree=degree, random_state=0).fit(pos, neg)
        assert steerer.prepare() is steerer
        point = x.clone().requires_grad_()
        barrier = steerer._barrier(point)
        (gradient,) = torch.autograd.grad(barrier.sum(), point)
        torch.testing.assert_close(
            steerer.vector_field(x), gradient / gradient.norm(dim=1, keepdim=True), atol=1e-6, rtol=0
        )
        assert (steerer.log_ratio(steerer.steer(x, 1.0)) > steerer.log_ratio(x)).all()
        with pytest.raises(ValueError, match="backend='dense' is for degree 2"):
            ODESteer(degree=degree, backend="dense").fit(pos, neg)

    def test_one_step_is_the_first_direction(self, x: Tensor) -> None:
        pos, neg = classes()
        one = StepODESteer(n_components=64, random_state=0).fit(pos, neg)
        torch.testing.assert_close(one.steer(x, 2.0), x + 2.0 * one.vector_field(x), atol=1e-7, rtol=0)
        same = ODESteer(n_components=64, random_state=0, steps=1).fit(pos, neg)
        assert torch.equal(one.flow(x, 2.0), same.flow(x, 2.0))

    def test_conditions(self) -> None:
        pos, neg = classes()
        both = torch.cat([pos, neg])
        steerer = ODESteer(n_components=64, random_state=0, only_when_negative=True).fit(pos, neg)
        before = steerer.log_ratio(both)
        moved = (steerer.steer(both, 2.0) != both).any(dim=1)
        assert torch.equal(moved, before < 0)
        steerer.set_params(only_when_negative=False, stop_at=0.0, steps=40)
        after = steerer.log_ratio(steerer.steer(neg, 5.0))
        assert (after[steerer.log_ratio(neg) < 0] >= 0).all()
        assert float(after[steerer.log_ratio(neg) < 0].max()) < float(before.max())

    def test_preparing_stores_the_eigenvectors(self) -> None:
        pos, neg = classes()
        steerer = ODESteer(n_components=64, random_state=0).fit(pos.float(), neg.float())
        assert "basis_" not in steerer.state()
        steerer.prepare()
        assert steerer.state()["basis_"].shape == (D, D)
        again = ODESteer(n_components=64).restore(steerer.state())
        x = neg.float()
        assert torch.equal(again.flow(x, 2.0), steerer.flow(x, 2.0))
        with pytest.raises(ValueError, match="do not fit"):
            ODESteer(n_components=64).restore({**steerer.state(), "basis_": torch.zeros(2, 2)})
        steerer.fit(pos[:, 1:], neg[:, 1:])
        assert "basis_" not in steerer.state(), "a new fit forgets them"

    def test_what_is_refused(self) -> None:
        pos, neg = classes()
        with pytest.raises(ValueError, match=r"backend='gpu'.*'spectral'"):
            ODESteer(backend="gpu").fit(pos, neg)
        with pytest.raises(ValueError, match="solver='heun'"):
            ODESteer(solver="heun").fit(pos, neg)
        with pytest.raises(ValueError, match=r"steps=2\.0"):
            ODESteer().set_params(steps=2.0).fit(pos, neg)
        with pytest.raises(ValueError, match="stop_at=inf"):
            ODESteer(stop_at=float("inf")).fit(pos, neg)
        with pytest.raises(ValueError, match="shrinkage=2"):
            GaussianODE(shrinkage=2.0).fit(pos, neg)
        with pytest.raises(ValueError, match="one layer"):
            ODESteer().fit(pos, neg[:, 1:])


def test_fourier_features_have_the_gradient_of_their_barrier(fitted: dict[str, Steerer], x: Tensor) -> None:
    steerer = fitted["rff-odesteer"]
    assert isinstance(steerer, RFFODESteer)
    point = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(steerer._barrier(point).sum(), point)
    torch.testing.assert_close(steerer._gradient(x), gradient, atol=1e-10, rtol=0)


class TestLinearODE:
    def test_steps_do_not_count(self, x: Tensor) -> None:
        pos, neg = classes()
        one, ten = (LinearODE(steps=steps).fit(pos, neg) for steps in (1, 10))
        assert torch.equal(one.steer(x, 3.0), ten.steer(x, 3.0))
        torch.testing.assert_close(ten.trajectory(x, 3.0).states[-1], ten.steer(x, 3.0), atol=1e-12, rtol=0)
        assert ten.constant_vector is not None
        assert float(ten.constant_vector.norm()) == pytest.approx(1.0, abs=1e-6)

    def test_conditions(self) -> None:
        pos, neg = classes()
        both = torch.cat([pos, neg])
        steerer = LinearODE(only_when_negative=True).fit(pos, neg)
        assert steerer.constant_vector is None
        assert torch.equal((steerer.steer(both, 2.0) != both).any(dim=1), steerer.log_ratio(both) < 0)
        steerer.set_params(only_when_negative=False, stop_at=0.0)
        assert torch.equal((steerer.steer(both, 2.0) != both).any(dim=1), steerer.log_ratio(both) < 0)


class TestGaussianODE:
    def test_its_barrier_is_the_ratio_of_two_densities(self, x: Tensor) -> None:
        pos, neg = classes()
        steerer = GaussianODE(shrinkage=0.3).fit(pos, neg)

        def log_density(rows: Tensor) -> Tensor:
            covariance = torch.cov(rows.T, correction=0)
            covariance = 0.7 * covariance + 0.3 * covariance.trace() / D * torch.eye(D, dtype=torch.float64)
            return torch.distributions.MultivariateNormal(rows.mean(dim=0), covariance).log_prob(x)

        torch.testing.assert_close(steerer.log_ratio(x), log_density(pos) - log_density(neg), atol=1e-3, rtol=1e-3)
        assert (GaussianODE().fit(pos, neg).log_ratio(pos).median() > 0).item()

    def test_one_dimension_and_no_variance(self) -> None:
        pos, neg = classes()
        narrow = GaussianODE().fit(pos[:, 1:2], neg[:, 1:2])
        assert float(narrow.steer(neg[:1, 1:2], 0.1) - neg[:1, 1:2]) == pytest.approx(0.1, abs=1e-6)
        same = torch.ones(3, 2)
        with pytest.warns(UserWarning, match="the fitted vector is 0"):
            still = GaussianODE().fit(same, same)
        assert torch.equal(still.steer(same, 0.5), same)


class TestStrength:
    def test_a_share_of_the_median_length(self, fitted: dict[str, Steerer]) -> None:
        pos, neg = classes()
        median = float(torch.cat([pos, neg]).norm(dim=1).median())
        assert fitted["odesteer"].absolute_T(0.1) == pytest.approx(0.1 * median)
        vector = fitted["caa"].constant_vector
        assert vector is not None
        assert fitted["caa"].absolute_T(0.1) * float(vector.norm()) == pytest.approx(0.1 * median)
        with pytest.raises(ValueError, match="share already"):
            fitted["linact"].absolute_T(0.1)

    def test_too_far_warns(self, fitted: dict[str, Steerer], x: Tensor) -> None:
        for name in ("odesteer", "caa", "linear-ode"):
            with pytest.warns(UserWarning, match=r"6 of 6 rows.*half of their own length"):
                fitted[name].steer(x, 100.0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                fitted[name].steer(x, 0.1)
        long = 10.0 * x / x.norm(dim=1, keepdim=True)
        with pytest.warns(UserWarning, match="T=-5.01 moves 6 of 6 rows"):
            fitted["odesteer"].steer(long, -5.01)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fitted["odesteer"].steer(long, 4.99)

    def test_float16_overflows_with_an_error(self, fitted: dict[str, Steerer]) -> None:
        rows = torch.full((1, D), 60000.0, dtype=torch.float16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(OverflowError, match=r"\d values.*65504"):
                fitted["caa"].steer(rows, 10000.0)

    def test_auto(self, fitted: dict[str, Steerer]) -> None:
        pos, neg = classes(seed=2)
        for name in ("odesteer", "linear-ode"):
            steerer = fitted[name]
            goal = float(steerer.log_ratio(pos).median())
            strength = auto_T(steerer, neg, pos, tolerance=1e-5)
            assert float(steerer.log_ratio(steerer.flow(neg, strength)).median()) == pytest.approx(goal, abs=1e-3)
            assert float(steerer.log_ratio(steerer.flow(neg, 0.99 * strength)).median()) < goal
        assert auto_T(steerer, pos, neg) == 0.0
        with pytest.raises(ValueError, match="below the median positive"):
            auto_T(steerer, neg, pos, most=0.01)
        with pytest.raises(NotImplementedError, match="no barrier"):
            auto_T(fitted["caa"], neg, pos)
        assert auto_T(fitted["caa"], neg, pos, barrier=steerer) == pytest.approx(1.0, abs=0.5)
        assert 0 < auto_T(fitted["linact"], neg, pos - 0.5 * (pos - pos.mean(dim=0)), barrier=steerer, most=2.0) < 2


@pytest.mark.parametrize("name", sorted(STEERERS))
def test_classes_that_are_equal_move_nothing(name: str, x: Tensor) -> None:
    row = x[:1].float()
    with pytest.warns(UserWarning, match="all activations of both classes are equal") as caught:
        steerer = make_steerer(name, **SMALL.get(name, {})).fit(row.repeat(7, 1), row.repeat(3, 1))
    torch.testing.assert_close(steerer.steer(x.float(), 2.0), x.float(), atol=1e-5, rtol=0)
    assert name == "mimic" or any("the fitted vector is 0" in str(each.message) for each in caught)
    if name == "caa":
        with pytest.raises(ValueError, match="its vector is 0"):
            steerer.absolute_T(0.1)
