import pytest
import torch
from bodes_steer.quadratic import Quadratic, Spectral, normalise, normalised_gradient
from hypothesis import given
from hypothesis import strategies as st


def random_form(d, normalize, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(d, d, dtype=dtype, generator=generator)
    linear = torch.randn(d, dtype=dtype, generator=generator)
    return Quadratic(half + half.T, linear, 0.75, normalize), 3 * torch.randn(6, d, dtype=dtype, generator=generator)


@given(st.integers(1, 9), st.booleans(), st.integers(0, 1000))
def test_the_gradient_is_that_of_the_value(d, normalize, seed):
    form, a = random_form(d, normalize, seed)
    a.requires_grad_()
    (expected,) = torch.autograd.grad(form.value(a).sum(), a)
    torch.testing.assert_close(form.gradient(a), expected, rtol=1e-9, atol=1e-10)


@given(st.integers(1, 9), st.booleans(), st.integers(0, 1000))
def test_the_spectral_form_is_the_same_field(d, normalize, seed):
    form, a = random_form(d, normalize, seed)
    spectral = form.spectral()
    y = spectral.to_basis(a)
    torch.testing.assert_close(spectral.from_basis(y), a, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y.norm(dim=1), a.norm(dim=1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(spectral.value(y), form.value(a), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(spectral.from_basis(spectral.gradient(y)), form.gradient(a), rtol=1e-9, atol=1e-10)
    assert (spectral.eigenvalues.diff() >= 0).all()


def test_by_hand():
    # 0.5 (x_1^2 - x_2^2) of the unit vector: at angle t its value is cos(2t)/2, its slope along the circle -sin(2t).
    form = Quadratic(torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64)), torch.zeros(2).double(), 0.0, True)
    angle = torch.tensor(1.0, dtype=torch.float64)
    a = 2 * torch.stack([angle.cos(), angle.sin()])
    tangent = torch.stack([-angle.sin(), angle.cos()])
    torch.testing.assert_close(form.value(a), (2 * angle).cos() / 2)
    torch.testing.assert_close(form.gradient(a), -(2 * angle).sin() / 2 * tangent)
    raw = Quadratic(form.matrix, torch.tensor([0.0, 3.0]).double(), 1.0, False)
    point = torch.tensor([2.0, 1.0], dtype=torch.float64)
    assert float(raw.value(point)) == 0.5 * (4 - 1) + 3 + 1
    assert raw.gradient(point).tolist() == [2.0, -1.0 + 3.0]


def test_of_directions_only():
    form, a = random_form(5, True)
    torch.testing.assert_close(form.value(3 * a), form.value(a), rtol=0, atol=1e-10)
    assert (form.gradient(a) * a).sum(dim=1).abs().max() < 1e-10
    torch.testing.assert_close(normalise(a).norm(dim=1), torch.ones(6).double(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_zero_there_is_no_gradient(dtype):
    form, _ = random_form(4, True, dtype=dtype)
    zero = torch.zeros(2, 4, dtype=dtype)
    assert form.gradient(zero).tolist() == zero.tolist()
    assert form.spectral().gradient(zero).tolist() == zero.tolist()
    assert form.value(zero).tolist() == [0.75, 0.75]
    tiny = torch.full((1, 4), 1e-30, dtype=dtype)
    assert normalised_gradient(tiny, torch.ones_like(tiny)).isfinite().all()


def test_any_leading_shape():
    form, a = random_form(5, True)
    stacked = a.reshape(2, 3, 5)
    assert torch.equal(form.value(stacked), form.value(a).reshape(2, 3))
    torch.testing.assert_close(form.gradient(stacked), form.gradient(a).reshape(2, 3, 5))
    assert form.value(a[0]).shape == ()
    spectral = form.spectral()
    assert spectral.gradient(stacked).shape == (2, 3, 5)


def test_types_and_devices():
    form, a = random_form(6, True)
    spectral = form.spectral()
    single = form.to(dtype=torch.float32)
    assert single.matrix.dtype == single.linear.dtype == torch.float32
    assert (single.constant, single.normalize) == (form.constant, form.normalize)
    # Decomposed in float64 whatever the type: no worse than rounding the exact decomposition.
    from_single = single.spectral()
    assert from_single.basis.dtype == torch.float32
    identity = from_single.basis.double().T @ from_single.basis.double()
    assert (identity - torch.eye(6)).abs().max() < 5e-7
    torch.testing.assert_close(from_single.eigenvalues, spectral.eigenvalues.float(), rtol=1e-5, atol=1e-5)
    assert spectral.to(dtype=torch.float32).basis.dtype == torch.float32
    assert isinstance(spectral.to("meta"), Spectral)
    assert spectral.to("meta").basis.is_meta
    # The result has the type of the activations.
    assert form.value(a.float()).dtype == form.gradient(a.float()).dtype == torch.float32
    torch.testing.assert_close(single.value(a), form.value(a), rtol=1e-5, atol=1e-5)


def test_signs_of_eigenvectors_are_fixed():
    form, _ = random_form(7, True)
    basis = form.spectral().basis
    assert (basis.gather(0, basis.abs().argmax(dim=0, keepdim=True)) > 0).all()
