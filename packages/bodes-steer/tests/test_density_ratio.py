import math

import numpy as np
import pytest
import torch
from bodes_steer import density_ratio
from bodes_steer.density_ratio import LogDensityRatio
from bodes_steer.features import IdentityFeatures, PolynomialCountSketch, RandomFourierFeatures
from sklearn.base import clone, is_classifier
from sklearn.calibration import calibration_curve
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

D = 8


def task(rows=400, seed=0, dtype=torch.float64):
    """Equal signs of two coordinates against opposite ones: no linear classifier tells them apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(rows) % 2).to(torch.int64)
    first = torch.randint(0, 2, (rows,), generator=generator) * 2 - 1
    a = 0.5 * torch.randn(rows, D, dtype=dtype, generator=generator)
    a[:, 0] += 2 * first
    a[:, 1] += 2 * first * (2 * labels - 1)
    a[:, 2] += 3
    return a, labels


SKETCH = PolynomialCountSketch(n_components=200, gamma=1.0, random_state=0)
A, Y = task()


@pytest.fixture(scope="module")
def fitted():
    return LogDensityRatio(SKETCH, C=100.0).fit(A, Y)


def test_it_finds_what_is_not_linear(fitted):
    held_out, labels = task(seed=1)
    assert fitted.score(held_out, labels) > 0.97
    assert LogDensityRatio(IdentityFeatures(), C=100.0).fit(A, Y).score(held_out, labels) < 0.65
    h = fitted.log_ratio(held_out)
    assert h[labels == 1].median() > 0 > h[labels == 0].median()


def test_the_correction_for_the_classes_shares():
    # log N(1, 1) / N(-1, 1) = 2 a; the intercept of 3 to 1 samples is log 3, which h is without.
    random = np.random.RandomState(0)
    rows = np.concatenate([random.normal(1, 1, (30_000, 1)), random.normal(-1, 1, (10_000, 1))])
    made = LogDensityRatio(IdentityFeatures(), C=1e6).fit(rows, np.arange(40_000) < 30_000)
    assert made.prior_ == 0.75
    assert float(made.coef_[0]) == pytest.approx(2.01, abs=0.01)
    assert made.intercept_ == pytest.approx(1.097, abs=1e-3)
    assert float(made.log_ratio([[0.0]])[0]) == pytest.approx(-0.002, abs=5e-4)
    assert float(made.decision_function([[0.0]])[0]) == pytest.approx(made.intercept_, abs=1e-9)


def test_it_is_scikit_learns_classifier(fitted):
    theirs = LogisticRegression(C=100.0, tol=1e-10, max_iter=10_000).fit(fitted.feature_map_.transform(A), Y.numpy())
    tight = LogDensityRatio(SKETCH, C=100.0, tol=1e-11).fit(A, Y)
    assert tight.coef_.numpy() == pytest.approx(theirs.coef_[0], abs=1e-3)
    assert tight.predict_proba(A).numpy() == pytest.approx(
        theirs.predict_proba(tight.feature_map_.transform(A)), abs=1e-4
    )
    assert fitted.objective_ == pytest.approx(tight.objective_, rel=1e-6)
    assert fitted.converged_
    assert fitted.n_iter_ > 0
    assert fitted.gradient_norm_ < 1


@pytest.mark.parametrize("normalize", [True, False])
def test_dense_and_fourier_agree(normalize):
    sketch = clone(SKETCH).set_params(normalize=normalize)
    dense, fourier = (LogDensityRatio(sketch, backend=backend).fit(A, Y) for backend in ("dense", "fft"))
    torch.testing.assert_close(dense.log_ratio(A), fourier.log_ratio(A), rtol=0, atol=1e-10)
    torch.testing.assert_close(dense.grad(A), fourier.grad(A), rtol=0, atol=1e-10)
    form = fourier.quadratic()
    torch.testing.assert_close(form.value(A), fourier.log_ratio(A), rtol=0, atol=1e-10)
    torch.testing.assert_close(form.gradient(A), fourier.grad(A), rtol=0, atol=1e-10)
    if normalize:
        torch.testing.assert_close(dense.log_ratio(3 * A), dense.log_ratio(A), rtol=0, atol=1e-10)
        for each in (dense, fourier):
            assert (each.grad(A) * A).sum(dim=1).abs().max() < 1e-10


def test_auto_takes_the_cheaper_way(fitted, monkeypatch):
    def refuse(*_):
        raise AssertionError

    small, wide = (
        fitted,
        LogDensityRatio(PolynomialCountSketch(n_components=2, random_state=0)).fit(
            torch.eye(40, 30), torch.arange(40) % 2
        ),
    )
    with monkeypatch.context() as patch:
        patch.setattr(PolynomialCountSketch, "features", refuse)
        assert small.log_ratio(A).isfinite().all()
        with pytest.raises(AssertionError):
            wide.log_ratio(torch.ones(1, 30))
    assert density_ratio.DENSE_LIMIT * 2 < 30**2
    cubic = LogDensityRatio(PolynomialCountSketch(degree=3, n_components=200, random_state=0)).fit(A, Y)
    assert cubic.quadratic() is None
    assert cubic.score(A, Y) > 0.5


@pytest.mark.parametrize(
    "feature_map",
    [
        IdentityFeatures(),
        RandomFourierFeatures(100, random_state=0),
        PolynomialCountSketch(degree=3, n_components=64, random_state=0),
        PolynomialCountSketch(n_components=64, random_state=0),
    ],
    ids=str,
)
def test_grad_is_the_gradient(feature_map):
    made = LogDensityRatio(feature_map).fit(A, Y)
    a = A[:9].clone().requires_grad_()
    h = made.feature_map_.features(a) @ made.coef_ + made.offset
    torch.testing.assert_close(made.log_ratio(A[:9]), h.detach(), rtol=0, atol=1e-10)
    (expected,) = torch.autograd.grad(h.sum(), a)
    torch.testing.assert_close(made.grad(A[:9]), expected, rtol=1e-8, atol=1e-12)
    assert isinstance(made.grad(A.numpy()), np.ndarray)


def test_the_same_seed_gives_the_same_bits():
    single = A.float()
    first, second = (LogDensityRatio(random_state=3, max_iter=50).fit(single[:60], Y[:60]) for _ in range(2))
    assert first.feature_map_.n_components == 8000
    assert torch.equal(first.feature_map_.index_hash_, second.feature_map_.index_hash_)
    assert torch.equal(first.coef_, second.coef_)
    assert torch.equal(first.log_ratio(single), second.log_ratio(single))
    assert first.coef_.dtype == first.log_ratio(single).dtype == torch.float32
    seeded = PolynomialCountSketch(n_components=16)
    by_map, by_own = (
        LogDensityRatio(clone(seeded).set_params(random_state=own), random_state=3).fit(A, Y) for own in (None, 4)
    )
    assert not torch.equal(by_map.feature_map_.index_hash_, by_own.feature_map_.index_hash_)
    assert by_map.feature_map_.random_state == 3
    assert seeded.random_state is None


def test_features_that_do_not_fit_into_memory_are_computed_anew():
    kept = LogDensityRatio(SKETCH).fit(A, Y)
    anew = LogDensityRatio(SKETCH, feature_memory=0).fit(A, Y)
    assert torch.equal(kept.coef_, anew.coef_)
    assert anew.objective_ == kept.objective_


def test_svm():
    made = LogDensityRatio(SKETCH, classifier="svm", C=10.0).fit(A, Y)
    assert made.score(A, Y) > 0.97
    assert not hasattr(made, "predict_proba")
    with pytest.raises(AttributeError, match="predict_proba"):
        made.calibration_curve(A, Y)


def test_probabilities_and_their_calibration():
    labels = torch.arange(4000) % 2
    rows = torch.randn(4000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + labels[:, None]
    made = LogDensityRatio(IdentityFeatures()).fit(rows[:2000], labels[:2000])
    held_out, truth = rows[2000:], labels[2000:]
    probabilities = made.predict_proba(held_out)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(2000, dtype=torch.float64))
    torch.testing.assert_close(probabilities[:, 1].logit(), made.decision_function(held_out))
    assert torch.equal(made.predict(held_out), (probabilities[:, 1] > 0.5).long())
    for X in (held_out, held_out.numpy()):  # noqa: N806  # scikit-learn's letter
        observed, predicted = made.calibration_curve(X, truth, n_bins=5)
        expected = calibration_curve(truth.numpy(), probabilities[:, 1].numpy(), n_bins=5)
        assert observed == pytest.approx(expected[0])
        assert predicted == pytest.approx(expected[1])
        assert observed == pytest.approx(predicted, abs=0.1)


def test_labels_are_any_two_values():
    words = np.where(Y.numpy() == 1, "good", "bad")
    made = LogDensityRatio(SKETCH).fit(A.numpy(), words)
    assert made.classes_.tolist() == ["bad", "good"]
    plain = LogDensityRatio(SKETCH).fit(A, Y)
    assert torch.equal(made.coef_, plain.coef_)
    assert made.score(A, words) == plain.score(A, Y)
    assert set(made.predict(A).tolist()) == {"bad", "good"}
    signs = LogDensityRatio(SKETCH).fit(A, 2 * Y - 1)
    assert torch.equal(signs.predict(A), 2 * plain.predict(A) - 1)


def test_a_copy_elsewhere(fitted):
    moved = fitted.to("meta")
    assert moved.coef_.is_meta
    assert moved.feature_map_.index_hash_.is_meta
    assert moved.quadratic is not None
    assert not fitted.coef_.is_meta
    assert not fitted.feature_map_.index_hash_.is_meta
    again = moved.to("meta").get_params()
    assert again["C"] == fitted.C


@pytest.mark.parametrize("classifier", ["lr", "svm"])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks(classifier):
    # It passes values of wrong types to the constructor, which the test run's own checks refuse.
    expected = {"check_do_not_raise_errors_in_init_or_set_params": "types are checked while tests run"}
    made = LogDensityRatio(PolynomialCountSketch(n_components=32, random_state=0), classifier=classifier)
    check_estimator(made, expected_failed_checks=expected)


def test_within_pipelines_searches_and_cross_validation():
    made = LogDensityRatio(SKETCH, C=100.0)
    assert is_classifier(made)
    assert clone(made).get_params()["feature_map__gamma"] == 1.0
    assert cross_val_score(made, A.numpy(), Y.numpy(), cv=3).min() > 0.95
    doubled = make_pipeline(FunctionTransformer(lambda rows: 2 * rows), made).fit(A.numpy(), Y.numpy())
    assert doubled.score(A.numpy(), Y.numpy()) > 0.95
    search = GridSearchCV(made, {"feature_map__n_components": [1, 200]}, cv=2).fit(A.numpy(), Y.numpy())
    assert search.best_params_ == {"feature_map__n_components": 200}
    with pytest.raises(NotFittedError):
        clone(search.best_estimator_).grad(A)
    with pytest.raises(NotFittedError):
        clone(made).quadratic()


@pytest.mark.parametrize(
    ("wrong", "X", "y", "message"),
    [
        ({"classifier": "tree"}, A, Y, "classifier is 'tree'"),
        ({"backend": "gpu"}, A, Y, "backend is 'gpu'"),
        ({"backend": "dense", "feature_map": IdentityFeatures()}, A, Y, "only a PolynomialCountSketch of degree 2"),
        ({"C": -1.0}, A, Y, "C is -1.0"),
        ({}, A, None, "y is None"),
        ({}, A, torch.ones(400), "1 class"),
        ({}, A, torch.arange(400) % 3, "Only binary classification is supported"),
        ({}, A, Y[:-1], "inconsistent numbers of samples"),
        ({}, A * math.nan, Y, "3200 values that are NaN or inf, in 400 of 400 rows"),
        ({}, A[:0], Y[:0], "0 rows"),
    ],
)
def test_what_is_refused(wrong, X, y, message):  # noqa: N803  # scikit-learn's letter
    with pytest.raises(ValueError, match=message):
        LogDensityRatio(SKETCH).set_params(**wrong).fit(X, y)


def test_rows_of_another_width(fitted):
    with pytest.raises(ValueError, match=f"{D - 1} features"):
        fitted.log_ratio(A[:, 1:])


def test_what_is_warned_of():
    with pytest.warns(UserWarning, match="positive and 4 negative"):
        LogDensityRatio(SKETCH).fit(A[:100], torch.arange(100) > 3)
    with pytest.warns(UserWarning, match="all activations of both classes are equal"):
        made = LogDensityRatio(SKETCH).fit(torch.ones(6, 4), torch.arange(6) % 2)
    assert made.log_ratio(torch.ones(1, 4)).abs().max() < 1e-6
    with pytest.warns(UserWarning, match="did not converge in 1 steps"):
        LogDensityRatio(SKETCH, C=1e4, max_iter=1, tol=1e-12).fit(A, Y)


def test_float16_is_read_and_zero_has_no_gradient(fitted):
    half = A[:4].half()
    torch.testing.assert_close(fitted.log_ratio(half), fitted.log_ratio(half.float()))
    assert fitted.grad(half).dtype == torch.float32
    assert fitted.grad(torch.zeros(1, D)).tolist() == [[0.0] * D]
