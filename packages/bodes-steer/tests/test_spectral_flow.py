"""The three ways to the slope of a quadratic barrier, and the path that follows it."""

from typing import Any

import pytest
import torch
from bodes_steer.features import PolynomialCountSketch
from bodes_steer.quadratic import Quadratic
from bodes_steer.solver import integrate, unit_speed
from bodes_steer.spectral_flow import (
    PACKED_ROWS,
    Dense,
    Packed,
    cheapest_backend,
    coprime_factors,
    euler_change,
    spectral_flow,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor


def case(
    d: int, n: int, *, coef0: float = 1.0, normalize: bool = True, rows: int = 5
) -> tuple[Quadratic, Packed, PolynomialCountSketch, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(d * n)
    x = 3.0 * torch.randn(rows, d, generator=generator, dtype=torch.float64)
    weights = torch.randn(n, generator=generator, dtype=torch.float64)
    sketch = PolynomialCountSketch(n_components=n, coef0=coef0, normalize=normalize, random_state=0).fit(x)
    field = sketch.quadratic(weights, 0.4)
    assert field is not None
    return field, Packed.of(sketch, weights, 0.4, x), sketch, weights, x


class TestPacked:
    # 272 = 16 * 17 has a transform in two dimensions for few rows.
    @pytest.mark.parametrize("n", [64, 61, 272])
    @pytest.mark.parametrize("coef0", [1.0, 0.0])
    @pytest.mark.parametrize("rows", [1, 2, 3, PACKED_ROWS + 1])
    def test_equals_the_dense_form(self, n: int, coef0: float, rows: int, poison: None) -> None:
        field, packed, _, _, x = case(9, n, coef0=coef0, rows=rows)
        dense = Dense.of(field, x)
        torch.testing.assert_close(packed(x), dense(x), atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(packed.linear, dense.linear, atol=1e-12, rtol=1e-10)
        assert packed.constant == pytest.approx(dense.constant, abs=1e-12)
        assert (packed.few is not None) == (n == 272)

    def test_it_is_the_gradient_of_the_features(self) -> None:
        _, packed, sketch, weights, x = case(9, 64, normalize=False)
        torch.testing.assert_close(packed(x), sketch.gradient(x, weights), atol=1e-11, rtol=1e-10)

    def test_coprime_factors(self) -> None:
        assert coprime_factors(8000) == (64, 125)
        assert coprime_factors(8192) is None
        assert coprime_factors(2 * 8191) is None, "what is hardly split is not split"


@given(
    st.booleans(),
    st.integers(1, 4),
    st.sampled_from([2.0, -3.0]),
    st.sampled_from([None, 0.1]),
    st.booleans(),
)
def test_all_ways_follow_the_same_path(
    normalize: bool, steps: int, strength: float, stop_at: float | None, only_when_negative: bool
) -> None:
    field, packed, _, _, x = case(6, 64, normalize=normalize, rows=8)
    x = torch.cat([x, torch.zeros_like(x[:1])])
    settings: dict[str, Any] = {"steps": steps, "stop_at": stop_at, "only_when_negative": only_when_negative}
    expected = integrate(
        lambda a: unit_speed(field.gradient(a)),
        x,
        strength,
        steps=steps,
        barrier=field.value,
        stop_at=stop_at,
        active=field.value(x) < 0 if only_when_negative else None,
    )
    for slope in (packed, Dense.of(field, x)):
        torch.testing.assert_close(x + euler_change(slope, x, strength, **settings), expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(spectral_flow(field.spectral(), x, strength, **settings), expected, atol=1e-9, rtol=0)


def test_no_time_returns_the_input() -> None:
    field, *_, x = case(6, 64)
    assert spectral_flow(field.spectral(), x, 0.0) is x


def test_rows_that_stay_keep_their_bits() -> None:
    field, *_, x = case(6, 64, rows=40)
    single = Quadratic(field.matrix.float(), field.linear.float(), field.constant, True)
    stays = field.value(x) >= 0
    assert stays.any()
    assert not stays.all()
    moved = spectral_flow(single.spectral(), x.float(), 2.0, only_when_negative=True)
    assert torch.equal(moved[stays], x.float()[stays])
    assert (moved[~stays] != x.float()[~stays]).any(dim=1).all()


class TestRule:
    def test_small_rows_take_few_products(self) -> None:
        assert cheapest_backend(576, 8000, 10, 1) == "spectral"
        assert cheapest_backend(576, 8000, 1, 1) == "dense"

    def test_wide_rows_are_transformed(self) -> None:
        assert {cheapest_backend(4096, 8000, steps, rows) for steps in (1, 10) for rows in (1, 10, 64)} == {"fft"}

    def test_without_a_sketch_nothing_is_transformed(self) -> None:
        assert cheapest_backend(4096, None, 10, 1) == "spectral"
        assert cheapest_backend(4096, None, 1, 1) == "dense"

    def test_a_gpu_always_takes_products(self) -> None:
        assert cheapest_backend(4096, 8000, 10, 1, cuda=True) == "spectral"
        assert cheapest_backend(4096, 8000, 1, 64, cuda=True) == "dense"
