# ruff: noqa: N803 -- T is the paper's letter
"""The Euler path of a barrier `h(x) = 0.5 x' M x + m . x + c`, in three ways that agree (sections 3.2 and 3.3).

All three need one thing, the slope `u = M x + m`, and get it by a dense product (`Dense`), by Fourier transforms of the
sketch (`Packed`), or, in the basis of eigenvectors of M, as an elementwise `lambda x + c`. In the last, a path of k
steps is two products with the basis and k elementwise steps, since lengths and inner products are the same there; and
only the change of the activation goes back, `a_T - a_0 = V (y_T - y_0)`, so that what does not move keeps its bits.
"""

import functools
import importlib.util
import math
import os
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bodes_steer.features import PolynomialCountSketch
from bodes_steer.quadratic import NORM_EPSILON, Quadratic, Spectral
from bodes_steer.solver import SPEED_FLOOR

PACKED_ROWS = 16
"""Rows transformed at once: of more, the sketches do not stay in the cache of a core."""

FEW_ROWS = 2
"""Up to so many rows a transform in two dimensions takes less time (24 against 35 us for a row of 8000, on a CPU)."""


@dataclass(frozen=True, eq=False)
class Dense:
    """The slope by a product with the matrix.

    Attributes:
        matrix: `[d, d]`, M, symmetric.
        linear: `[d]`, m.
        constant: c.
        normalize: Whether x is the direction of the activation.
    """

    matrix: Float[Tensor, "d d"]
    linear: Float[Tensor, "d"]
    constant: float
    normalize: bool

    @classmethod
    def of(cls, field: Quadratic, like: Tensor) -> "Dense":
        """Take a quadratic in the type and on the device of a tensor."""
        return cls(field.matrix.to(like), field.linear.to(like), field.constant, field.normalize)

    def __call__(self, x: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        """The slope `M x + m`."""
        return torch.addmm(self.linear, x, self.matrix)


@dataclass(frozen=True, eq=False)
class Diagonal:
    """The slope in the basis of eigenvectors, elementwise.

    Attributes:
        eigenvalues: `[d]`, lambda.
        linear: `[d]`, `V' m`.
        constant: c.
        normalize: Whether x is the direction of the activation.
    """

    eigenvalues: Float[Tensor, "d"]
    linear: Float[Tensor, "d"]
    constant: float
    normalize: bool

    def __call__(self, x: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        """The slope `lambda x + V' m`."""
        return torch.addcmul(self.linear, self.eigenvalues, x)


@dataclass(frozen=True, eq=False)
class Packed:
    """The slope of a sketch of degree 2 by two complex Fourier transforms.

    The sketches S_1 and S_2 of the equations are real, and so are the correlations `C_r[m] = sum_k Q_r[k] w[k + m]`
    with `Q_1 = S_2` and `Q_2 = S_1`. Both fit into one complex vector, `q = S_2 + i S_1`, whose correlation with w is
    `C_1 + i C_2`, as w is real. That is `F^-1(F(w) n F^-1(q))`: two transforms in place of four.

    Where n is a product of two factors without a common divisor, indices modulo n are pairs of indices modulo the
    factors, and the transform is one in two dimensions, whose short transforms cost a single row less.

    Attributes:
        shape: `(n,)` or the two factors of n.
        scatter: `[2 d]`, places in q, seen as `[2 n]` real numbers, to which the d entries of S_2 and of S_1 go.
        gather: `[2 d]`, places in `C_1 + i C_2`, likewise, from which the slope comes.
        scatter_signs: `[2, d]`, s_2 and s_1 times sqrt(gamma).
        first_signs: `[d]`, s_1 times sqrt(gamma).
        second_signs: `[d]`, s_2 times sqrt(gamma).
        origin: `[2 n]`, q of the constant coordinate alone.
        transform: Complex, of the shape above, the transform of w over n.
        linear: `[d]`, m, the slope at 0.
        constant: c.
        normalize: Whether x is the direction of the activation.
        few: The same for few rows, where there is a better one.
    """

    shape: tuple[int, ...]
    scatter: Int[Tensor, "places"]
    gather: Int[Tensor, "places"]
    scatter_signs: Float[Tensor, "2 d"]
    first_signs: Float[Tensor, "d"]
    second_signs: Float[Tensor, "d"]
    origin: Float[Tensor, "doubled"]
    transform: Tensor
    linear: Float[Tensor, "d"]
    constant: float
    normalize: bool
    few: "Packed | None" = None

    @classmethod
    def of(cls, sketch: PolynomialCountSketch, weights: Tensor, constant: float, like: Tensor) -> "Packed":
        """Take a fitted sketch of degree 2 and the weights of its features.

        Args:
            sketch: The sketch.
            weights: `[n]`.
            constant: Added to `w . phi`.
            like: Gives type and device.

        Returns:
            The slope.
        """
        n, d = sketch.n_components, sketch.n_features_in_
        if sketch.coef0:
            signs, index = sketch.sign_hash_.to(like), sketch.index_hash_.to(like.device)
            place = (index[0, d] + index[1, d]) % n
            constant += float(sketch.coef0 * signs[0, d] * signs[1, d] * weights.to(like)[place])
        split = coprime_factors(n)
        few = None if split is None else cls._make(sketch, weights, constant, like, split, None)
        return cls._make(sketch, weights, constant, like, (n,), few)

    @classmethod
    def _make(
        cls,
        sketch: PolynomialCountSketch,
        weights: Tensor,
        constant: float,
        like: Tensor,
        shape: tuple[int, ...],
        few: "Packed | None",
    ) -> "Packed":
        n, d = sketch.n_components, sketch.n_features_in_
        # Where index k modulo n lies in memory; for one factor, at k itself.
        places = torch.arange(n, device=like.device)
        places = places % shape[0] * math.prod(shape[1:]) + (places % shape[1] if len(shape) > 1 else 0)
        index = places[sketch.index_hash_.to(like.device)]
        scale = math.sqrt(sketch.gamma)
        signs = sketch.sign_hash_.to(like)
        scattered = torch.empty(n, dtype=like.dtype, device=like.device)
        scattered[places] = weights.to(like)
        origin = like.new_zeros(2 * n)
        if sketch.coef0:
            root = math.sqrt(sketch.coef0)
            origin[2 * index[1, d]] += root * signs[1, d]
            origin[2 * index[0, d] + 1] += root * signs[0, d]
        made = cls(
            shape=shape,
            scatter=torch.cat([2 * index[1, :d], 2 * index[0, :d] + 1]),
            gather=torch.cat([2 * index[0, :d], 2 * index[1, :d] + 1]).int(),
            scatter_signs=scale * torch.stack([signs[1, :d], signs[0, :d]]),
            first_signs=scale * signs[0, :d],
            second_signs=scale * signs[1, :d],
            origin=origin,
            transform=torch.fft.fftn(scattered.view(shape)) / n,
            linear=like.new_zeros(d),
            constant=constant,
            normalize=sketch.normalize,
            few=few,
        )
        made.linear.copy_(made._slope(like.new_zeros(1, d))[0])
        return made

    def __call__(self, x: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        """The slope `M x + m`."""
        rows = len(x)
        if rows > PACKED_ROWS:
            return torch.cat([self._slope(block) for block in torch.split(x, PACKED_ROWS)])
        return self._slope(x) if self.few is None or rows > FEW_ROWS else self.few._slope(x)

    def _slope(self, x: Tensor) -> Tensor:
        rows, d = x.shape
        packed = x.new_empty(rows, len(self.origin)).copy_(self.origin)
        packed.index_add_(1, self.scatter, (x.unsqueeze(1) * self.scatter_signs).view(rows, 2 * d))
        sketch = torch.view_as_complex(packed.view(rows, *self.shape, 2))
        if len(self.shape) == 1:
            spectrum = torch.fft.ifft(sketch, norm="forward").mul_(self.transform)
            correlations = torch.fft.ifft(spectrum, norm="forward")
        else:
            spectrum = torch.fft.ifft2(sketch, norm="forward").mul_(self.transform)
            correlations = torch.fft.ifft2(spectrum, norm="forward")
        found = torch.view_as_real(correlations).view(rows, -1).index_select(1, self.gather)
        first, second = found.view(rows, 2, d).unbind(1)
        return torch.addcmul(first * self.first_signs, second, self.second_signs)


Slope: TypeAlias = Dense | Diagonal | Packed
"""A barrier that is quadratic in x, which is the activation or its direction: its slope, m and c."""


def coprime_factors(n: int) -> tuple[int, int] | None:
    """The two factors of a number that have no common divisor and differ least.

    Args:
        n: The number.

    Returns:
        The smaller and the larger one; None where the smaller is below 16, which makes nothing cheaper.
    """
    pairs = [(p, n // p) for p in range(16, math.isqrt(n) + 1) if n % p == 0 and math.gcd(p, n // p) == 1]
    return pairs[-1] if pairs else None


def euler_change(
    slope: Slope,
    y: Float[Tensor, "rows d"],
    T: float,
    *,
    steps: int,
    stop_at: float | None = None,
    only_when_negative: bool = False,
) -> Float[Tensor, "rows d"]:
    """How far the Euler path with unit speed goes from `y`: the reference, for any `Slope`.

    Args:
        slope: The barrier.
        y: `[rows, d]`, where to start.
        T: Length of the path; negative for the other way.
        steps: Number of equal steps.
        stop_at: A row is frozen at the first step at whose start it has reached this value of the barrier.
        only_when_negative: Whether rows whose barrier is 0 or above at the start stay where they are.

    Returns:
        `[rows, d]`, the end of the path less `y`.
    """
    step, direction = T / steps, math.copysign(1.0, T)
    at = y
    # At 0 a direction has no gradient. No step leads there from elsewhere: all are at right angles to the row.
    moving = torch.linalg.vector_norm(y, dim=-1, keepdim=True) > 0 if slope.normalize else None
    for index in range(steps):
        if slope.normalize:
            length = torch.linalg.vector_norm(at, dim=-1, keepdim=True).add_(NORM_EPSILON)
            x = at / length
            u = slope(x)
            along = (x * u).sum(dim=-1, keepdim=True)
            gradient = torch.addcmul(u, x, along, value=-1.0)
            # The gradient is this over the length, by which numerator and denominator of the field are multiplied.
            speed = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True).add_(length, alpha=SPEED_FLOOR)
        else:
            x = at
            gradient = slope(x)
            along = (x * gradient).sum(dim=-1, keepdim=True) if stop_at is not None or only_when_negative else x
            speed = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True).add_(SPEED_FLOOR)
        pace = step / speed
        if stop_at is not None or (only_when_negative and index == 0):
            value = 0.5 * (along + (x * slope.linear).sum(dim=-1, keepdim=True)) + slope.constant
            allowed = value < 0 if only_when_negative and index == 0 else torch.ones_like(value, dtype=torch.bool)
            if stop_at is not None:
                allowed = allowed & (value * direction < stop_at * direction)
            moving = allowed if moving is None else moving & allowed
        if moving is not None:
            pace = torch.where(moving, pace, 0.0)
        at = torch.addcmul(at, gradient, pace)
    return at - y


def spectral_change(
    slope: Diagonal,
    y: Float[Tensor, "rows d"],
    T: float,
    *,
    steps: int,
    stop_at: float | None = None,
    only_when_negative: bool = False,
) -> Float[Tensor, "rows d"]:
    """`euler_change` in the basis of eigenvectors: one kernel on a GPU, the reference elsewhere.

    Args:
        slope: The barrier.
        y: Coordinates `[rows, d]`.
        T: As in `euler_change`.
        steps: Likewise.
        stop_at: Likewise.
        only_when_negative: Likewise.

    Returns:
        The change of the coordinates, equal to the reference's to float32's rounding.
    """
    if _may_use_kernel(y):
        from bodes_steer.kernels import spectral as kernels

        if kernels.available(y):
            return kernels.spectral_change(
                slope, y, T, steps=steps, stop_at=stop_at, only_when_negative=only_when_negative
            )
    return euler_change(slope, y, T, steps=steps, stop_at=stop_at, only_when_negative=only_when_negative)


def spectral_flow(
    field: Spectral,
    x: Float[Tensor, "rows d"],
    T: float,
    *,
    steps: int = 10,
    stop_at: float | None = None,
    only_when_negative: bool = False,
) -> Float[Tensor, "rows d"]:
    """Follow the gradient of a quadratic barrier at unit speed, by Euler steps in the basis of its eigenvectors.

    Args:
        field: The barrier, in the type and on the device of `x`.
        x: Activations.
        T: Length of the path; 0 returns `x` itself, negative goes the other way.
        steps: Number of equal steps.
        stop_at: As in `euler_change`.
        only_when_negative: Likewise.

    Returns:
        The ends of the paths.
    """
    if T == 0:
        return x
    slope = Diagonal(field.eigenvalues, field.linear, field.constant, field.normalize)
    change = spectral_change(
        slope, x @ field.basis, T, steps=steps, stop_at=stop_at, only_when_negative=only_when_negative
    )
    return torch.addmm(x, change, field.basis.T)


def _may_use_kernel(y: Tensor) -> bool:
    """Whether it is worth importing Triton, which is slow, to ask."""
    return (y.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1") and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def cheapest_backend(width: int, components: int | None, evaluations: int, rows: int, *, cuda: bool = False) -> str:
    """Which way of following a quadratic barrier costs least: a fixed rule, so that results do not depend on the load.

    Args:
        width: d.
        components: n, or None where there is no sketch to transform.
        evaluations: How often the field is evaluated along a path.
        rows: Rows moved at once.
        cuda: Whether on a GPU.

    Returns:
        `"fft"`, `"dense"` or `"spectral"`.
    """
    if cuda:
        # Not measured, but counted: a product reads 4 d^2 bytes (67 MB at d = 4096, 20 to 35 us on an A100 or H100),
        # and transforms launch some fifteen kernels for every evaluation, 50 us or more whatever the size. So two
        # products and one kernel for all steps are less than several products or any number of transforms.
        return "spectral" if evaluations > 1 else "dense"
    # Milliseconds on one core (AMD EPYC, float32), fitted to d of 128 to 4096, 1 to 256 rows, 1 and 10 evaluations. At
    # n = 8000 and 10 evaluations transforms win from d of about 1500 for one row, and from about 3000 for many.
    product = width**2 * (1.4e-7 + 2.15e-8 * rows)
    elementwise = evaluations * (0.018 + 1e-6 * rows * width)
    costs = {"spectral": 2 * product + elementwise, "dense": evaluations * product + elementwise}
    if components is not None:
        costs["fft"] = evaluations * (0.06 + 5.5e-6 * rows * components)
    return min(costs, key=costs.__getitem__)
