"""The Triton kernel of the whole path: in the interpreter, or on a GPU where there is one."""

import pytest
import torch
from bodes_steer.spectral_flow import Diagonal, euler_change, spectral_change
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(rows: int, d: int, *, normalize: bool = True, seed: int = 0) -> tuple[Diagonal, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    eigenvalues, linear = (torch.randn(d, generator=generator).to(DEVICE) for _ in range(2))
    y = 4.0 * torch.randn(rows, d, generator=generator).to(DEVICE)
    return Diagonal(eigenvalues, linear, 0.2, normalize), y


@settings(max_examples=12)  # the interpreter takes its time
@given(
    st.integers(1, 5),
    st.sampled_from([1, 2, 31, 64]),
    st.integers(1, 3),
    st.sampled_from([3.0, -2.0]),
    st.sampled_from([None, 0.3]),
    st.booleans(),
    st.booleans(),
)
def test_against_the_reference(
    rows: int,
    d: int,
    steps: int,
    strength: float,
    stop_at: float | None,
    only_when_negative: bool,
    normalize: bool,
) -> None:
    from bodes_steer.kernels import spectral as kernels

    slope, y = case(rows, d, normalize=normalize)
    y[-1] = 0.0
    double = Diagonal(slope.eigenvalues.double(), slope.linear.double(), slope.constant, normalize)
    arguments = {"steps": steps, "stop_at": stop_at, "only_when_negative": only_when_negative}
    expected = euler_change(double, y.double(), strength, **arguments)
    found = kernels.spectral_change(slope, y, strength, **arguments)
    if d == 1 and normalize:
        # A direction in one dimension has no gradient: what is left of it is rounding, followed at unit speed.
        assert float(found.abs().max()) <= abs(strength) * 1.001
        return
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=0)


def test_buffers_and_strides(poison: None) -> None:
    from bodes_steer.kernels import spectral as kernels

    slope, y = case(6, 48)
    expected = kernels.spectral_change(slope, y, 2.0, steps=3)
    wide = torch.full((6, 100), float("nan"), device=DEVICE)
    wide[:, 7:55] = y
    assert torch.equal(kernels.spectral_change(slope, wide[:, 7:55], 2.0, steps=3), expected)
    turned = y.T.contiguous().T
    assert torch.equal(kernels.spectral_change(slope, turned, 2.0, steps=3), expected)
    assert kernels.spectral_change(slope, y[:0], 2.0, steps=3).shape == (0, 48)


def test_the_door_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from bodes_steer.kernels import spectral as kernels

    slope, y = case(2, 16)
    assert kernels.available(y)
    assert not kernels.available(y.double())
    assert not kernels.available(y.new_zeros(1, kernels.WIDEST + 1))
    called = []
    monkeypatch.setattr(kernels, "spectral_change", lambda *_, **__: called.append(1) or y)
    spectral_change(slope, y, 1.0, steps=2)
    assert called
    double = Diagonal(slope.eigenvalues.double(), slope.linear.double(), slope.constant, normalize=True)
    spectral_change(double, y.double(), 1.0, steps=2)
    assert len(called) == 1


def test_cases_to_compile_name_every_argument() -> None:
    from bodes_steer.kernels import spectral as kernels

    cases = kernels.compile_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert max(case.constexprs["BLOCK"] for case in cases) == kernels.WIDEST
    for each in cases:
        assert set(each.signature) | set(each.constexprs) == set(each.fn.arg_names)
        assert not set(each.signature) & set(each.constexprs)
