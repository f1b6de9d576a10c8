import math

import numpy as np
import pytest
import torch
from bodes_steer import features
from bodes_steer.features import IdentityFeatures, PolynomialCountSketch, RandomFourierFeatures
from hypothesis import given
from hypothesis import strategies as st
from sklearn import kernel_approximation
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

GENERATOR = torch.Generator().manual_seed(0)
ROWS = 2 * torch.randn(70, 9, dtype=torch.float64, generator=GENERATOR) + 1
MAPS = [
    PolynomialCountSketch(n_components=50, random_state=3),
    PolynomialCountSketch(degree=3, n_components=33, gamma=0.7, coef0=0.4, random_state=3),
    PolynomialCountSketch(degree=3, n_components=32, coef0=0.0, normalize=False, random_state=3),
    PolynomialCountSketch(degree=1, n_components=20, random_state=3),
    RandomFourierFeatures(n_components=31, random_state=3),
    IdentityFeatures(),
]


@pytest.mark.parametrize("coef0", [1.0, 0.0])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_features_are_scikit_learns(degree, coef0):
    options = {"gamma": 0.1, "degree": degree, "coef0": coef0, "n_components": 50}
    theirs = kernel_approximation.PolynomialCountSketch(**options, random_state=3).fit(ROWS.numpy())
    expected = theirs.transform(ROWS.numpy())
    by_seed = PolynomialCountSketch(**options, normalize=False, random_state=3).fit(ROWS)
    assert np.array_equal(by_seed.index_hash_.numpy(), theirs.indexHash_)
    assert np.array_equal(by_seed.sign_hash_.numpy(), theirs.bitHash_)
    taken = PolynomialCountSketch(**options, normalize=False).fit_hashes(theirs.indexHash_, theirs.bitHash_)
    for ours in (by_seed, taken):
        assert ours.n_features_in_ == 9
        assert np.abs(ours.transform(ROWS.numpy()) - expected).max() < 1e-12


def test_inner_products_are_the_kernel_on_average():
    x, y = torch.eye(40, dtype=torch.float64)[:2]
    pairs = torch.stack([x, y, -x])
    found = []
    for seed in range(30):
        phi = PolynomialCountSketch(random_state=seed).fit(pairs).transform(pairs)
        found.append([float(phi[0] @ phi[other]) for other in range(3)])
    # The standard error of the mean is about 0.004 / sqrt(30); five of them.
    assert np.mean(found, axis=0) == pytest.approx([1.21, 1.0, 0.81], abs=0.004)
    assert (np.std(found, axis=0) < 0.02).all()


@pytest.mark.parametrize("feature_map", MAPS, ids=str)
def test_the_vjp_is_the_gradient(feature_map):
    fitted = clone(feature_map).fit(ROWS)
    phi = fitted.transform(ROWS)
    own = torch.randn(phi.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a = ROWS.clone().requires_grad_()
    for w in (own[0], own):
        (expected,) = torch.autograd.grad((fitted.features(a) * w).sum(), a)
        found = fitted.vjp(ROWS, w)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    single = fitted.vjp(ROWS[4:5], own[0])
    torch.testing.assert_close(single, fitted.vjp(ROWS, own[0])[4:5], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(fitted.transform(ROWS[4:5]), phi[4:5], rtol=1e-10, atol=1e-14)
    arrays = fitted.vjp(ROWS.numpy(), own[0].numpy())
    assert isinstance(arrays, np.ndarray)
    assert np.array_equal(arrays, fitted.vjp(ROWS, own[0]).numpy())


@given(
    d=st.integers(1, 12),
    n=st.integers(1, 40),
    coef0=st.sampled_from([0.0, 0.5, 1.0]),
    normalize=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_a_sketch_of_degree_2_is_a_quadratic_form(d, n, coef0, normalize, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(5, d, dtype=torch.float64, generator=generator)
    w = torch.randn(n, dtype=torch.float64, generator=generator)
    sketch = PolynomialCountSketch(n_components=n, gamma=0.3, coef0=coef0, normalize=normalize, random_state=seed).fit(
        a
    )
    form = sketch.quadratic(w, 0.25)
    assert torch.equal(form.matrix, form.matrix.T)
    torch.testing.assert_close(form.value(a), sketch.transform(a) @ w + 0.25, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(form.gradient(a), sketch.vjp(a, w), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_normalised_features_see_directions_only(degree):
    sketch = PolynomialCountSketch(degree=degree, n_components=40, random_state=0).fit(ROWS)
    w = torch.linspace(-1, 1, 40, dtype=torch.float64)
    torch.testing.assert_close(sketch.transform(3 * ROWS), sketch.transform(ROWS), rtol=0, atol=1e-10)
    assert (sketch.vjp(ROWS, w) * ROWS).sum(dim=1).abs().max() < 1e-10
    zero = torch.zeros(1, 9)
    assert sketch.vjp(zero, w).tolist() == zero.tolist()
    assert sketch.transform(zero).isfinite().all()


def test_the_same_seed_gives_the_same_bits():
    first, second = (PolynomialCountSketch(n_components=50, random_state=7).fit(ROWS.float()) for _ in range(2))
    assert torch.equal(first.index_hash_, second.index_hash_)
    assert torch.equal(first.sign_hash_, second.sign_hash_)
    assert torch.equal(first.transform(ROWS.float()), second.transform(ROWS.float()))
    other = PolynomialCountSketch(n_components=50, random_state=8).fit(ROWS)
    assert not torch.equal(first.index_hash_, other.index_hash_)
    waves = [RandomFourierFeatures(8, random_state=7).fit(ROWS).transform(ROWS) for _ in range(2)]
    assert torch.equal(*waves)


def test_columns_are_added_one_of_each_hash_at_a_time(monkeypatch):

    values = torch.arange(12.0).reshape(2, 6)
    index = torch.tensor([3, 1, 3, 3, 0, 1])
    expected = torch.tensor([[4.0, 6.0, 0.0, 5.0], [10.0, 18.0, 0.0, 23.0]])
    assert torch.equal(features._scattered(values, index, 4, ordered=False), expected)
    levels = []
    plain = torch.Tensor.index_add

    def note(out, dim, columns, added):
        levels.append(columns.tolist())
        return plain(out, dim, columns, added)

    monkeypatch.setattr(torch.Tensor, "index_add", note)
    assert torch.equal(features._scattered(values, index, 4, ordered=True), expected)
    assert levels == [[0, 1, 3], [1, 3], [3]]


def test_waves_have_the_gaussian_kernel():
    waves = RandomFourierFeatures(20_000, sigma=3.0, random_state=0).fit(ROWS)
    assert waves.sigma_ == 3.0
    phi = waves.transform(ROWS[:20].numpy())
    expected = rbf_kernel(ROWS[:20].numpy(), gamma=1 / (2 * 3.0**2))
    assert np.abs(phi @ phi.T - expected).max() < 0.05


def test_the_width_of_the_waves_is_the_median_distance():
    distances = torch.pdist(ROWS).numpy()
    assert RandomFourierFeatures(4).fit(ROWS).sigma_ == pytest.approx(np.median(distances) / math.sqrt(2))
    many = torch.randn(1300, 3, generator=torch.Generator().manual_seed(0))
    sampled = RandomFourierFeatures(4, random_state=0).fit(many).sigma_
    assert sampled == pytest.approx(float(np.median(torch.pdist(many).numpy())) / math.sqrt(2), rel=0.05)
    with pytest.warns(UserWarning, match="all activations are equal"):
        assert RandomFourierFeatures(4).fit(torch.ones(3, 2)).sigma_ == 1.0


def test_types_and_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(features, "block_rows", lambda device: 64)
    sketch = PolynomialCountSketch(n_components=50, random_state=0).fit(ROWS)
    exact = sketch.transform(ROWS)
    assert exact.dtype == torch.float64
    single = sketch.transform(ROWS.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-6)
    assert sketch.transform(ROWS.to(torch.bfloat16)).dtype == torch.float32
    blocks = list(sketch.blocks(ROWS))
    assert len(blocks) > 1
    assert torch.equal(torch.cat(blocks), exact)
    assert RandomFourierFeatures(4).fit(ROWS.half()).frequencies_.dtype == torch.float32


def test_more_rows_at_once_where_operations_wait(monkeypatch):

    rows = {}
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        rows[threads] = features.block_rows(torch.device("cpu"))
    assert rows[1] < rows[2] < features.block_rows(torch.device("cuda"))


def test_a_copy_elsewhere():
    sketch = PolynomialCountSketch(n_components=50, random_state=0).fit(ROWS)
    moved = sketch.to("meta")
    assert moved.index_hash_.is_meta
    assert moved.sign_hash_.is_meta
    assert not sketch.index_hash_.is_meta
    assert moved.get_params() == sketch.get_params()


def test_only_degree_2_is_quadratic():
    w = torch.ones(50)
    assert PolynomialCountSketch(degree=3, n_components=50).fit(ROWS).quadratic(w) is None
    assert IdentityFeatures().fit(ROWS).quadratic(torch.ones(9)) is None
    with pytest.raises(NotFittedError):
        PolynomialCountSketch().quadratic(w)


@pytest.mark.parametrize(
    ("made", "wrong", "message"),
    [
        (PolynomialCountSketch(), {"degree": 0}, "degree is 0"),
        (PolynomialCountSketch(), {"degree": 1.5}, "degree is 1.5"),
        (PolynomialCountSketch(), {"n_components": True}, "n_components is True"),
        (PolynomialCountSketch(), {"gamma": 0.0}, "gamma is 0.0; it must be a number above 0"),
        (PolynomialCountSketch(), {"gamma": "x"}, "gamma is 'x'"),
        (PolynomialCountSketch(), {"coef0": -1.0}, "coef0 is -1.0; it must be a number of at least 0"),
        (RandomFourierFeatures(), {"sigma": math.inf}, "sigma is inf"),
        (RandomFourierFeatures(), {"n_components": -1}, "n_components is -1"),
    ],
    ids=str,
)
def test_parameters_out_of_range(made, wrong, message):
    with pytest.raises(ValueError, match=message):
        made.set_params(**wrong).fit(ROWS)


@pytest.mark.parametrize(
    ("index", "sign", "message"),
    [
        (np.zeros((2, 1), int), np.ones((2, 1)), r"must be \[2, d \+ 1\]"),
        (np.zeros((3, 4), int), np.ones((3, 4)), "index_hash has shape"),
        (np.zeros((2, 4), int), np.ones((2, 5)), "sign_hash"),
        (np.full((2, 4), 50), np.ones((2, 4)), "integers from 0 to 49"),
        (np.zeros((2, 4)), np.ones((2, 4)), "integers from 0 to 49"),
        (np.zeros((2, 4), int), np.zeros((2, 4)), r"\+1 and -1"),
    ],
)
def test_hashes_that_are_none(index, sign, message):
    with pytest.raises(ValueError, match=message):
        PolynomialCountSketch(n_components=50).fit_hashes(index, sign)


def test_bad_rows_and_weights():
    sketch = PolynomialCountSketch(n_components=50)
    with pytest.raises(NotFittedError):
        sketch.transform(ROWS)
    sketch.fit(ROWS)
    with pytest.raises(ValueError, match="8 features"):
        sketch.transform(ROWS[:, 1:])
    with pytest.raises(ValueError, match="w has shape"):
        sketch.vjp(ROWS, torch.ones(49))
    with pytest.raises(ValueError, match="NaN or inf"):
        sketch.vjp(ROWS * torch.nan, torch.ones(50))


@pytest.mark.parametrize(
    "feature_map",
    [
        PolynomialCountSketch(n_components=16, random_state=0),
        RandomFourierFeatures(16, random_state=0),
        IdentityFeatures(),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks(feature_map):
    # It passes values of wrong types to the constructor, which the test run's own checks refuse.
    expected = {"check_do_not_raise_errors_in_init_or_set_params": "types are checked while tests run"}
    check_estimator(feature_map, expected_failed_checks=expected)


def test_in_a_pipeline():
    rows = np.random.RandomState(0).standard_normal((300, 3))
    labels = rows[:, 0] * rows[:, 1] > 0
    made = make_pipeline(
        PolynomialCountSketch(n_components=300, gamma=1.0, random_state=0), LogisticRegression(C=100.0)
    )
    made.set_params(polynomialcountsketch__n_components=400)
    assert clone(made)[0].n_components == 400
    assert cross_val_score(made, rows, labels, cv=3).mean() > 0.9
    assert cross_val_score(LogisticRegression(), rows, labels, cv=3).mean() < 0.65
