"""Log-density ratios that are quadratic in the (normalised) activation: dense, and in the basis of eigenvectors."""

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

NORM_EPSILON = 1e-12


def normalise(a: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
    """The direction `a / (||a|| + 1e-12)` of each row (section 3.2 of the paper, step 1).

    Args:
        a: Activations.

    Returns:
        Rows of length 1; a zero row stays zero.
    """
    norm: Tensor = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
    return a / (norm + NORM_EPSILON)


def normalised_gradient(a: Float[Tensor, "*rows d"], u: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
    """The gradient with respect to `a` of a function of `normalise(a)`.

    Args:
        a: Activations.
        u: The function's gradient with respect to the normalised activation.

    Returns:
        `(u - x (x . u)) / ||a||` with x the direction; 0 where a is 0, where there is no gradient.
    """
    norm = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
    x = a / norm.clamp_min(torch.finfo(a.dtype).tiny)
    along = (x * u).sum(dim=-1, keepdim=True)
    scaled = norm + NORM_EPSILON
    return torch.where(norm > 0, (u - x * (along * (norm / scaled))) / scaled, 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Quadratic:
    """The field `h(a) = 0.5 x' M x + m . x + c`, with x the direction of a, or a itself.

    Every degree-2 sketch with its weights is one (see `PolynomialCountSketch.quadratic`), and so is the log-density
    ratio of two Gaussians. One product with a d x d matrix then stands for all the Fourier transforms.

    Attributes:
        matrix: M, symmetric.
        linear: m.
        constant: c.
        normalize: Whether x is `a / (||a|| + 1e-12)`.
    """

    matrix: Float[Tensor, "d d"]
    linear: Float[Tensor, " d"]
    constant: float
    normalize: bool

    def value(self, a: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows"]:
        """The value h(a), in the type of `a`.

        Args:
            a: Activations, on the device of the matrix.

        Returns:
            One number for each row.
        """
        x = normalise(a) if self.normalize else a
        matrix, linear = self.matrix.to(a.dtype), self.linear.to(a.dtype)
        return (x * (0.5 * (x @ matrix) + linear)).sum(dim=-1) + self.constant

    def gradient(self, a: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """The gradient of h with respect to `a`, through the normalisation, in the type of `a`.

        Args:
            a: Activations, on the device of the matrix.

        Returns:
            One gradient for each row; 0 where a normalised activation is 0.
        """
        x = normalise(a) if self.normalize else a
        u = x @ self.matrix.to(a.dtype) + self.linear.to(a.dtype)
        return normalised_gradient(a, u) if self.normalize else u

    def spectral(self) -> "Spectral":
        """The same field in the basis of eigenvectors of its matrix.

        The decomposition is computed in float64; the result has the type of the matrix. Signs of the eigenvectors are
        fixed (the largest entry of each is positive).

        Returns:
            A field of diagonal form.
        """
        eigenvalues, basis = torch.linalg.eigh(self.matrix.to(torch.float64))
        largest = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))
        basis = torch.where(largest < 0, -basis, basis)
        dtype = self.matrix.dtype
        return Spectral(
            basis=basis.to(dtype),
            eigenvalues=eigenvalues.to(dtype),
            linear=(basis.T @ self.linear.to(torch.float64)).to(dtype),
            constant=self.constant,
            normalize=self.normalize,
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Quadratic":
        """The same field elsewhere or in another type.

        Args:
            device: Where its tensors are to lie; where they are without it.
            dtype: Their type; the one that they have without it.

        Returns:
            A field that shares what need not change.
        """
        return dataclasses.replace(self, **_moved(self, device, dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class Spectral:
    """A `Quadratic` in coordinates `y = V' a`, where `M = V diag(lambda) V'`.

    There the field works on every coordinate alone, and norms are those of a. So a path of k steps costs two products
    with V, one on the way in and one on the way out, and k elementwise steps.

    Attributes:
        basis: V; its columns are the eigenvectors.
        eigenvalues: lambda, ascending.
        linear: `V' m`.
        constant: c.
        normalize: Whether the field sees directions only.
    """

    basis: Float[Tensor, "d d"]
    eigenvalues: Float[Tensor, " d"]
    linear: Float[Tensor, " d"]
    constant: float
    normalize: bool

    def to_basis(self, a: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """Coordinates of activations.

        Args:
            a: Activations.

        Returns:
            `V' a` for each row.
        """
        return a @ self.basis.to(a.dtype)

    def from_basis(self, y: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """Activations that have these coordinates.

        Args:
            y: Coordinates.

        Returns:
            `V y` for each row.
        """
        return y @ self.basis.to(y.dtype).T

    def value(self, y: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows"]:
        """The value of h at the activations with these coordinates, in the type of `y`.

        Args:
            y: Coordinates.

        Returns:
            One number for each row.
        """
        x = normalise(y) if self.normalize else y
        return (x * (0.5 * self.eigenvalues.to(y.dtype) * x + self.linear.to(y.dtype))).sum(dim=-1) + self.constant

    def gradient(self, y: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """The gradient of h in these coordinates, in the type of `y`.

        Args:
            y: Coordinates.

        Returns:
            `V'` times the gradient at the activations; 0 where a normalised one is 0.
        """
        x = normalise(y) if self.normalize else y
        u = self.eigenvalues.to(y.dtype) * x + self.linear.to(y.dtype)
        return normalised_gradient(y, u) if self.normalize else u

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Spectral":
        """The same field elsewhere or in another type.

        Args:
            device: Where its tensors are to lie; where they are without it.
            dtype: Their type; the one that they have without it.

        Returns:
            A field that shares what need not change.
        """
        return dataclasses.replace(self, **_moved(self, device, dtype))


def _moved(field: Quadratic | Spectral, device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    tensors = {each.name: getattr(field, each.name) for each in dataclasses.fields(field)}
    return {
        name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items() if isinstance(tensor, Tensor)
    }
