import math
import warnings

import numpy as np
import pytest
import torch
from bodes_steer.logistic import fit_logistic
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_expit
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC


def problem(rows=300, d=12, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % 3 == 0
    features = torch.randn(rows, d, dtype=dtype, generator=generator)
    features[:, 0] += 1.2 * labels + 5.0
    return features, labels


def logistic_objective(features, labels, coef, intercept, C):  # noqa: N803  # scikit-learn's letter
    margins = np.where(labels, 1, -1) * (features.double().numpy() @ coef + intercept)
    return 0.5 * coef @ coef - C * log_expit(margins).sum()


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([0.01, 1.0, 100.0]), st.booleans())
def test_it_is_scikit_learns_optimum(seed, C, fit_intercept):  # noqa: N803  # scikit-learn's letter
    features, labels = problem(80, 5, seed)
    ours = fit_logistic(features, labels, C=C, fit_intercept=fit_intercept, tol=1e-10)
    theirs = LogisticRegression(C=C, fit_intercept=fit_intercept, tol=1e-10, max_iter=10_000)
    theirs.fit(features.numpy(), labels.numpy())
    least = logistic_objective(features, labels, theirs.coef_[0], float(np.ravel(theirs.intercept_)[0]), C)
    assert ours.converged
    assert ours.objective == pytest.approx(least, rel=1e-8)
    assert ours.coef.numpy() == pytest.approx(theirs.coef_[0], abs=1e-3)
    # What it says of itself is so.
    assert logistic_objective(features, labels, ours.coef.numpy(), ours.intercept, C) == pytest.approx(ours.objective)
    assert fit_intercept or ours.intercept == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("C", [1.0, 1e3])
@pytest.mark.parametrize("tol", [1e-4, 1e-7])
def test_the_distance_from_the_optimum_is_what_was_asked(dtype, C, tol):  # noqa: N803  # scikit-learn's letter
    features, labels = problem(2000, 30, dtype=dtype)
    least = fit_logistic(features.double(), labels, C=C, tol=1e-13).objective
    found = fit_logistic(features, labels, C=C, tol=tol)
    assert found.converged
    assert found.coef.dtype == dtype
    reached = logistic_objective(features, labels, found.coef.double().numpy(), found.intercept, C)
    assert found.objective == pytest.approx(reached, rel=1e-9)
    assert least * (1 - 1e-12) <= found.objective <= least * (1 + tol)
    assert found.gradient_norm > 0


def test_float32_goes_on_in_float64_where_it_is_too_coarse():
    features, labels = problem(2000, 30, dtype=torch.float32)
    exact = fit_logistic(features.double(), labels, C=1e5, tol=1e-13)
    found = fit_logistic(features, labels, C=1e5, tol=1e-12)
    assert exact.converged
    assert found.converged
    assert found.objective == pytest.approx(exact.objective, rel=2e-12)
    assert found.coef.dtype == torch.float32


def test_where_no_step_leads_down_any_more_is_the_minimum():
    # With next to no penalty the bound is loose, and rounding ends the search.
    features, labels = problem(2000, 30, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit_logistic(features, labels, C=1e9, tol=1e-15)
        # Steps in float32 count too, and are not those of the search in float64.
        assert fit_logistic(features, labels, C=1e9, tol=1e-15, max_iter=found.iterations + 1).converged
    assert found.converged


def test_squared_hinge_is_that_of_linear_svc():
    features, labels = problem()
    ours = fit_logistic(features, labels, C=0.5, fit_intercept=False, loss="squared_hinge", tol=1e-10)
    theirs = LinearSVC(C=0.5, fit_intercept=False, tol=1e-10, max_iter=100_000).fit(features.numpy(), labels.numpy())
    assert ours.coef.numpy() == pytest.approx(theirs.coef_[0], abs=1e-4)
    short = np.maximum(0, 1 - np.where(labels, 1, -1) * (features.numpy() @ theirs.coef_[0]))
    assert ours.objective == pytest.approx(0.5 * theirs.coef_[0] @ theirs.coef_[0] + 0.5 * short @ short, rel=1e-8)


@pytest.mark.parametrize("loss", ["logistic", "squared_hinge"])
def test_a_constant_added_to_the_features_moves_the_intercept_only(loss):
    features, labels = problem()
    shift = torch.linspace(-20, 20, features.shape[1], dtype=torch.float64)
    plain, moved = (fit_logistic(each, labels, loss=loss, tol=1e-12) for each in (features, features + shift))
    assert moved.objective == pytest.approx(plain.objective, rel=1e-10)
    torch.testing.assert_close(moved.coef, plain.coef, rtol=0, atol=1e-4)
    assert moved.intercept == pytest.approx(plain.intercept - float(moved.coef @ shift), abs=1e-3)


def test_blocks_of_any_kind_give_the_same():
    features, labels = problem(dtype=torch.float32)
    blocks = [features[:7], features[7:200], features[200:]]
    reads = []

    def read():
        reads.append(None)
        yield from blocks

    whole = fit_logistic(features, labels)
    in_blocks = fit_logistic(blocks, labels)
    streamed = fit_logistic(read, labels.int())
    assert torch.equal(streamed.coef, in_blocks.coef)
    assert in_blocks.objective == pytest.approx(whole.objective, rel=1e-6)
    # One pass for the mean, one for each evaluation, about one for each step of L-BFGS, and a last in float64.
    assert streamed.iterations < len(reads) < 2 * streamed.iterations + 8


def test_it_is_the_same_each_time():
    features, labels = problem(dtype=torch.float32)
    first, second = fit_logistic(features, labels), fit_logistic(features, labels)
    assert torch.equal(first.coef, second.coef)
    assert (first.intercept, first.objective, first.iterations) == (
        second.intercept,
        second.objective,
        second.iterations,
    )


@pytest.mark.parametrize("loss", ["logistic", "squared_hinge"])
def test_features_that_say_nothing_leave_the_shares(loss):
    labels = torch.arange(40) % 4 == 0
    found = fit_logistic(torch.ones(40, 3), labels, loss=loss)
    assert found.coef.abs().max() < 1e-6
    assert found.intercept == pytest.approx(math.log(1 / 3) if loss == "logistic" else -0.5, abs=1e-6)
    assert found.converged


def test_quadratic_features_of_two_gaussians():
    # log N(0, I) / N(0, 4 I) = -3/8 ||a||^2 + log 4 in two dimensions.
    random = np.random.RandomState(0)
    rows = torch.from_numpy(np.concatenate([random.normal(0, 1, (20_000, 2)), random.normal(0, 2, (20_000, 2))]))
    x, y = rows.T
    features = torch.stack([x, y, x * x, y * y, x * y], dim=1)
    found = fit_logistic(features, torch.arange(40_000) < 20_000, C=1e4)
    assert found.coef[2:4].numpy() == pytest.approx([-0.375, -0.375], rel=0.05)
    assert found.coef[[0, 1, 4]].abs().max() < 0.03
    assert found.intercept == pytest.approx(math.log(4), rel=0.03)


def test_no_convergence_is_warned_of():
    features, labels = problem()
    with pytest.warns(UserWarning, match=r"did not converge in 1 steps: the gradient's norm is \d") as caught:
        found = fit_logistic(features, labels, C=100.0, max_iter=1, tol=1e-12)
    assert len(caught) == 1
    assert not found.converged
    assert found.iterations == 1
    assert found.gradient_norm > 1e-3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"C": 0.0}, "C is 0.0"),
        ({"C": math.inf}, "C is inf"),
        ({"tol": 0.0}, "tol is 0.0"),
        ({"max_iter": 0}, "max_iter is 0"),
        ({"labels": torch.ones(300)}, r"labels must be 0 and 1, both present; they are \[1.0\]"),
        ({"labels": torch.arange(300)}, "labels must be 0 and 1"),
        ({"labels": torch.arange(299) % 2}, "blocks have 300 rows; there are 299 labels"),
        ({"blocks": []}, "blocks have 0 rows"),
    ],
)
def test_what_is_refused(wrong, message):
    features, labels = problem()
    with pytest.raises(ValueError, match=message):
        fit_logistic(**{"blocks": features, "labels": labels, **wrong})
