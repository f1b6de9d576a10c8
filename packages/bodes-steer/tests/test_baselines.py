"""The methods that the paper compares with: exact values, symmetries, and the libraries of their field."""

import numpy as np
import pytest
import torch
from bodes_steer import CAA, ITI, LinAcT, MiMiC, RepE
from bodes_steer.baselines import gaussian_map
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:T=")


def classes(rows: int = 40, d: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pos, neg = (torch.randn(rows, d, generator=generator, dtype=torch.float64) for _ in range(2))
    return pos * torch.arange(1.0, d + 1) + 1.0, neg


def test_caa_adds_the_difference_of_means() -> None:
    steerer = CAA().fit(np.array([[1.0, 2.0], [3.0, 2.0]]), np.array([[0.0, 1.0]]))
    assert steerer.steer(np.zeros((1, 2)), 1.5).tolist() == [[3.0, 1.5]]


class TestRepE:
    def test_signs(self) -> None:
        pos, neg = classes()
        vector = RepE().fit(pos, neg).vector_
        assert float((pos - neg).mean(dim=0) @ vector) > 0
        torch.testing.assert_close(RepE().fit(neg, pos).vector_, -vector)
        torch.testing.assert_close(RepE().fit(-pos, -neg).vector_, -vector)
        torch.testing.assert_close(RepE().fit(pos + 7.0, neg + 7.0).vector_, vector)

    @pytest.mark.parametrize(("rows", "d"), [(40, 6), (30, 40)])
    def test_it_is_the_first_principal_component(self, rows: int, d: int) -> None:
        pos, neg = classes(rows, d)
        vector = RepE().fit(pos, torch.cat([neg, neg[:5]])).vector_
        differences = pos - neg
        _, _, right = torch.linalg.svd(differences - differences.mean(dim=0), full_matrices=False)
        assert abs(float(vector @ right[0])) == pytest.approx(1.0, abs=1e-9)

    def test_one_pair_has_none(self) -> None:
        with pytest.warns(UserWarning, match="the fitted vector is 0"):
            RepE().fit(torch.ones(1, 3), torch.zeros(1, 3))


def test_iti_is_the_normal_of_a_probe() -> None:
    from sklearn.linear_model import LogisticRegression

    pos, neg = classes()
    steerer = ITI().fit(pos, neg[:30])
    rows = torch.cat([pos, neg[:30]]).numpy()
    labels = [1] * 40 + [0] * 30
    reference = LogisticRegression(C=1.0, tol=1e-10, max_iter=5000).fit(rows, labels)
    normal = reference.coef_[0] / np.linalg.norm(reference.coef_[0])
    torch.testing.assert_close(steerer.vector_, torch.from_numpy(normal), atol=1e-3, rtol=0)
    corrected = reference.decision_function(rows) + np.log(30 / 40)
    torch.testing.assert_close(steerer.log_ratio(rows), corrected, atol=1e-2, rtol=0)


class TestLinAcT:
    def test_columns_are_mapped_monotonically(self) -> None:
        neg = torch.tensor([[0.0, 1.0], [1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
        pos = torch.tensor([[2.0, -1.0], [4.0, -2.0], [8.0, -5.0]], dtype=torch.float64)
        steerer = LinAcT().fit(pos, neg)
        assert steerer.scale_.tolist() == pytest.approx([2.0, 0.846154], abs=1e-6)
        assert steerer.shift_.tolist() == pytest.approx([2.0, -4.923077], abs=1e-6)
        half = steerer.steer(neg, 0.5)
        torch.testing.assert_close(half, 0.5 * neg + 0.5 * steerer.steer(neg, 1.0))

    @pytest.mark.filterwarnings("ignore:linact")  # of the relation that changes nothing
    @example(1.0, 0.0, 2)
    @given(st.floats(0.1, 5.0), st.floats(-3.0, 3.0), st.integers(2, 9))
    def test_an_affine_relation_is_found(self, scale: float, shift: float, rows: int) -> None:
        _, neg = classes(rows, 3)
        steerer = LinAcT().fit(scale * neg + shift, neg)
        torch.testing.assert_close(steerer.scale_, torch.full_like(steerer.scale_, scale), atol=1e-7, rtol=1e-7)
        torch.testing.assert_close(steerer.steer(neg, 1.0), scale * neg + shift, atol=1e-6, rtol=0)

    def test_classes_of_different_size(self) -> None:
        # An evenly spaced sample and a coarser one of the same spread have the same quantiles in between.
        many = (torch.arange(300, dtype=torch.float64) + 0.5).unsqueeze(1) / 300
        few = (torch.arange(30, dtype=torch.float64) + 0.5).unsqueeze(1) / 30
        for pos, neg in ((3 * many, few), (3 * few, many)):
            assert LinAcT().fit(pos, neg).scale_.item() == pytest.approx(3.0, abs=1e-9)

    def test_nothing_to_do_warns(self) -> None:
        _, neg = classes(4, 3)
        with pytest.warns(UserWarning, match="the fitted vector is 0"):
            LinAcT().fit(neg, neg)


class TestMiMiC:
    def test_scaled_covariance(self) -> None:
        _, neg = classes(500, 3)
        centred = neg - neg.mean(dim=0)
        whitened = centred @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(centred.T)).T)
        pos = 2.0 * whitened + torch.tensor([1.0, -2.0, 0.5])
        steerer = MiMiC(ridge=0.0).fit(pos, whitened)
        torch.testing.assert_close(steerer.map_, 2.0 * torch.eye(3, dtype=torch.float64), atol=1e-9, rtol=0)
        moved = steerer.steer(whitened, 1.0)
        expected = pos.mean(dim=0) + 2.0 * (whitened - whitened.mean(dim=0))
        called = whitened @ steerer.coef_ + float(steerer.intercept_) < 0
        assert called.any()
        assert not called.all()
        torch.testing.assert_close(moved[called], expected[called], atol=1e-9, rtol=0)
        assert torch.equal(moved[~called], whitened[~called])

    def test_against_the_optimal_transport_of_pot(self) -> None:
        import ot

        pos, neg = classes(200, 4)
        steerer = MiMiC().fit(pos, neg)
        covariances = [np.cov(each.T.numpy()) + 1e-2 * np.eye(4) for each in (neg, pos)]
        means = [each.mean(dim=0).numpy() for each in (neg, pos)]
        matrix, _ = ot.gaussian.bures_wasserstein_mapping(*means, *covariances)
        torch.testing.assert_close(steerer.map_, torch.from_numpy(matrix), atol=1e-8, rtol=0)

    def test_against_the_sorted_transport_of_pot(self) -> None:
        import ot

        generator = np.random.default_rng(0)
        neg, pos = generator.normal(size=20), generator.normal(size=20) * 2.0 + 1.0
        plan = ot.emd_1d(neg, pos)
        # The least-squares line through the pairs of the optimal plan is the map of the coordinate.
        targets = 20 * plan @ pos
        slope = np.polyfit(neg, targets, 1)[0]
        assert LinAcT().fit(pos[:, None], neg[:, None]).scale_.item() == pytest.approx(slope, abs=1e-9)

    def test_a_singular_covariance_is_refused(self) -> None:
        with pytest.raises(ValueError, match="ridge > 0"):
            gaussian_map(torch.zeros(2, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
        with pytest.raises(ValueError, match="ridge=-1"):
            MiMiC(ridge=-1.0).fit(*classes(5, 2))
