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
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bodes_steer.features import PolynomialCountSketch
from bodes_steer.quadratic import NORM_EPSILON, Quadratic, Spectral
from bodes_steer.solver import SPEED_FLOOR


class Slope(Protocol):
    """A barrier that is quadratic in x, which is the activation or its direction.

    Attributes:
        linear: `[d]`, m.
        constant: c.
        normalize: Whether x is the direction of the activation.
    """

    @property
    def linear(self) -> Tensor:
        """The linear term m."""
        ...

    @property
    def constant(self) -> float:
        """The constant term c."""
        ...

    @property
    def normalize(self) -> bool:
        """Whether x is the direction."""
        ...

    def __call__(self, x: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        """The slope `M x + m`."""
        ...


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

    Attributes:
        scatter: `[2 d]`, places in q, seen as `[2 n]` real numbers, to which the d entries of S_2 and of S_1 go.
        gather: `[2 d]`, places in `C_1 + i C_2`, likewise, from which the slope comes.
        scatter_signs: `[2, d]`, s_2 and s_1 times sqrt(gamma).
        gather_signs: `[2, d]`, s_1 and s_2 times sqrt(gamma).
        origin: `[2 n]`, q of the constant coordinate alone.
        transform: `[n]`, complex, the transform of w over n.
        linear: `[d]`, m, the slope at 0.
        constant: c.
        normalize: Whether x is the direction of the activation.
    """

    scatter: Int[Tensor, "places"]
    gather: Int[Tensor, "places"]
    scatter_signs: Float[Tensor, "2 d"]
    gather_signs: Float[Tensor, "2 d"]
    origin: Float[Tensor, "doubled"]
    transform: Tensor
    linear: Float[Tensor, "d"]
    constant: float
    normalize: bool

    @classmethod
    def of(cls, sketch: PolynomialCountSketch, weights: Tensor, constant: float, like: Tensor) -> "Packed":
        """Take a fitted sketch of degree 2 and the weights of its features.

        Args:
            sketch: The sketch.
            weights: `[n]`.
            constant: Added to `w . phi`.
            like: Gives type and device.
        """
        n, d = sketch.n_components, sketch.n_features_in_
        index = sketch.index_hash_.to(like.device)
        signs = sketch.sign_hash_.to(like)
        weights = weights.to(like)
        origin = like.new_zeros(2 * n)
        if sketch.coef0:
            root = math.sqrt(sketch.coef0)
            origin[2 * index[1, d]] += root * signs[1, d]
            origin[2 * index[0, d] + 1] += root * signs[0, d]
            place = (index[0, d] + index[1, d]) % n
            constant += float(sketch.coef0 * signs[0, d] * signs[1, d] * weights[place])
        scale = math.sqrt(sketch.gamma)
        made = cls(
            scatter=torch.cat([2 * index[1, :d], 2 * index[0, :d] + 1]),
            gather=torch.cat([2 * index[0, :d], 2 * index[1, :d] + 1]),
            scatter_signs=scale * torch.stack([signs[1, :d], signs[0, :d]]),
            gather_signs=scale * torch.stack([signs[0, :d], signs[1, :d]]),
            origin=origin,
            transform=torch.fft.fft(weights) / n,
            linear=like.new_zeros(d),
            constant=constant,
            normalize=sketch.normalize,
        )
        made.linear.copy_(made(like.new_zeros(1, d))[0])
        return made

    def __call__(self, x: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        """The slope `M x + m`."""
        rows, d = x.shape
        values = (x.unsqueeze(1) * self.scatter_signs).view(rows, 2 * d)
        packed = self.origin.repeat(rows, 1).index_add_(1, self.scatter, values)
        spectrum = torch.fft.ifft(torch.view_as_complex(packed.view(rows, -1, 2)), norm="forward")
        correlations = torch.view_as_real(torch.fft.ifft(spectrum.mul_(self.transform), norm="forward"))
        found = correlations.view(rows, -1).index_select(1, self.gather).view(rows, 2, d)
        return found.mul_(self.gather_signs).sum(dim=1)


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
            length = torch.linalg.vector_norm(at, dim=-1, keepdim=True) + NORM_EPSILON
            x = at / length
            u = slope(x)
            along = (x * u).sum(dim=-1, keepdim=True)
            gradient = torch.addcmul(u, x, along, value=-1.0)
            # The gradient is this over the length, by which numerator and denominator of the field are multiplied.
            floor = SPEED_FLOOR * length
        else:
            x = at
            gradient = slope(x)
            along = (x * gradient).sum(dim=-1, keepdim=True) if stop_at is not None or only_when_negative else x
            floor = SPEED_FLOOR
        speed = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True) + floor
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
    # A compiler fuses the reference itself, and cannot look into the launcher of the kernel.
    if not torch.compiler.is_compiling() and _may_use_kernel(y):
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
    return "spectral" if evaluations > 1 else "dense"
