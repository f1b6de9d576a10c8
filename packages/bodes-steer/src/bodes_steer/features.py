"""Features that the density ratio is linear in: polynomial sketches, random waves, the activation itself.

Each map has `transform` (the features) and `vjp` (the exact gradient of a weighted sum of them, without a Jacobian) for
users, and `features` and `gradient`, the same on checked tensors, for code that runs in a model.
"""

import abc
import copy
import functools
import math
import warnings
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from sklearn.base import BaseEstimator, TransformerMixin  # type: ignore[import-untyped]  # it ships no types
from sklearn.utils import check_random_state  # type: ignore[import-untyped]  # it ships no types
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]  # it ships no types
from torch import Tensor

from bodes_steer.checks import Rows, as_given, as_rows
from bodes_steer.quadratic import Quadratic, normalise, normalised_gradient

MEDIAN_ROWS = 1000
"""Of more rows than these, the median distance is that of a sample."""


def block_rows(device: torch.device) -> int:
    """How many rows are worth computing at once.

    Args:
        device: Where they lie.

    Returns:
        On one thread, as many as have their features in a core's cache; more where each operation has to wait for
        several threads, or to be launched.
    """
    if device.type == "cpu":
        return 64 if torch.get_num_threads() == 1 else 512
    return 4096


def estimator_rows(estimator: Any, X: Rows, *, reset: bool) -> Float[Tensor, "rows d"]:  # noqa: N803  # scikit-learn's letter
    """What an estimator was given, as `as_rows` makes it, noted or compared as scikit-learn does.

    Args:
        estimator: Gets `n_features_in_` and, from tables with names, `feature_names_in_`.
        X: Activations `[rows, d]`.
        reset: Whether to note the width and the names of columns, in `fit`; else they are compared.

    Returns:
        `[rows, d]`.

    Raises:
        TypeError: As `as_rows`.
        ValueError: As `as_rows`.
    """
    if not reset:
        check_is_fitted(estimator)
    rows = as_rows(X, "X")
    named = X if hasattr(X, "columns") else np.empty((1, rows.shape[1]))
    validate_data(estimator, named, reset=reset, skip_check_array=True)
    return rows


class FeatureMap(TransformerMixin, BaseEstimator, abc.ABC):  # type: ignore[misc]  # scikit-learn ships no types
    """A map from activations `[rows, d]` to features `[rows, n]`.

    Attributes:
        n_features_in_: d, after `fit`.
    """

    n_features_in_: int

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """The number n of features of a row."""

    @abc.abstractmethod
    def features(self, a: Float[Tensor, "rows d"]) -> Float[Tensor, "rows n"]:
        """The features of checked activations, in their type and on their device, all rows at once.

        Args:
            a: Activations; derivatives pass.

        Returns:
            One row of features for each.
        """

    @abc.abstractmethod
    def gradient(self, a: Float[Tensor, "rows d"], w: Float[Tensor, "*rows n"]) -> Float[Tensor, "rows d"]:
        """The gradient of `w . phi(a)` with respect to `a`, of checked activations, all rows at once.

        Args:
            a: Activations.
            w: Weights, of all rows or of each.

        Returns:
            One gradient for each row.
        """

    def blocks(self, a: Float[Tensor, "rows d"]) -> Iterator[Float[Tensor, "block n"]]:
        """The features of checked activations, a few rows at a time.

        Args:
            a: Activations.

        Yields:
            Features of consecutive rows.
        """
        with torch.no_grad():
            for rows in torch.split(a, block_rows(a.device)):
                yield self.features(rows)

    def transform(self, X: Rows) -> Any:  # noqa: N803  # scikit-learn's letter
        """The features phi(a) of each row.

        Args:
            X: Activations `[rows, d]`.

        Returns:
            `[rows, n]`; a tensor for a tensor, else an array; without derivatives.

        Raises:
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`, or another width than at `fit`.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        rows = estimator_rows(self, X, reset=False)
        out = rows.new_empty((len(rows), self.width))
        first = 0
        for block in self.blocks(rows):
            out[first : first + len(block)] = block
            first += len(block)
        return as_given(out, X)

    def vjp(self, X: Rows, w: Any) -> Any:  # noqa: N803  # scikit-learn's letter
        """The exact gradient of `w . phi(a)` with respect to each row a, through the normalisation.

        Args:
            X: Activations `[rows, d]`.
            w: Weights `[n]`, or `[rows, n]` for others in each row.

        Returns:
            `[rows, d]`; a tensor for a tensor, else an array. The Jacobian `[rows, n, d]` is never made.

        Raises:
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`, another width than at `fit`, or weights of another shape.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        rows = estimator_rows(self, X, reset=False)
        weights = (w.detach() if isinstance(w, Tensor) else torch.as_tensor(np.asarray(w))).to(rows)
        if tuple(weights.shape) not in ((self.width,), (len(rows), self.width)):
            raise ValueError(
                f"w has shape {list(weights.shape)}; it must be [{self.width}] or [{len(rows)}, {self.width}]"
            )
        with torch.no_grad():
            size = block_rows(rows.device)
            if weights.ndim == 1:
                parts = [self.gradient(each, weights) for each in torch.split(rows, size)]
            else:
                pairs = zip(torch.split(rows, size), torch.split(weights, size), strict=True)
                parts = [self.gradient(each, own) for each, own in pairs]
        return as_given(torch.cat(parts), X)

    def quadratic(self, w: Float[Tensor, " n"], constant: float = 0.0) -> Quadratic | None:
        """The field `w . phi(a) + constant` as a dense quadratic, where it is one.

        Args:
            w: Weights.
            constant: Added to the field.

        Returns:
            The same field, or None.
        """
        return None

    def to(self, device: torch.device | str) -> "FeatureMap":
        """A copy whose fitted tensors lie on a device.

        Args:
            device: Where.

        Returns:
            The copy; parameters are shared.
        """
        made = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(made, name, value.to(device))
        return made


class PolynomialCountSketch(FeatureMap):
    """Features whose inner products approximate a polynomial kernel `(gamma x.x' + coef0)^degree` (section 3.2).

    The activation is normalised to x, extended to `z = [sqrt(gamma) x ; sqrt(coef0)]` (the constant only if coef0 is
    not 0), sketched `degree` times by random hashes and signs, `S_r[k] = sum_{j: i_r(j)=k} s_r(j) z_j`, and the
    sketches are convolved. With the same parameters and seed its hashes are those of
    `sklearn.kernel_approximation.PolynomialCountSketch`, and with `normalize=False` its features too.

    Args:
        degree: Of the polynomial; at least 1.
        n_components: Number n of features.
        gamma: Weight of the inner product; positive.
        coef0: The kernel's constant; 0 or more.
        normalize: Whether activations are divided by their norm first. scikit-learn's does not.
        random_state: A seed, a `numpy.random.RandomState`, or None for numpy's global state. Hashes are drawn on the
            CPU, so that they are the same for every device.

    Attributes:
        index_hash_: Integers in `0 .. n-1`, `[degree, d]`, or `[degree, d + 1]` with a constant.
        sign_hash_: +1 or -1, of the same shape, int8.
        n_features_in_: d.
    """

    index_hash_: Int[Tensor, "degree extended"]
    sign_hash_: Int[Tensor, "degree extended"]

    def __init__(  # noqa: D107  # the class says it
        self,
        degree: int = 2,
        n_components: int = 8000,
        gamma: float = 0.1,
        coef0: float = 1.0,
        normalize: bool = True,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.degree = degree
        self.n_components = n_components
        self.gamma = gamma
        self.coef0 = coef0
        self.normalize = normalize
        self.random_state = random_state

    @property
    def width(self) -> int:
        """The number of features, `n_components`."""
        return self.n_components

    def _check(self) -> None:
        _at_least_one("degree", self.degree)
        _at_least_one("n_components", self.n_components)
        _number("gamma", self.gamma, positive=True)
        _number("coef0", self.coef0, positive=False)

    def fit(self, X: Rows, y: object = None) -> "PolynomialCountSketch":  # noqa: N803  # scikit-learn's letter
        """Draws hashes for activations as wide as these.

        Args:
            X: Activations `[rows, d]`; only d counts.
            y: Ignored.

        Returns:
            Itself.

        Raises:
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`, or a parameter that is out of range.
        """
        self._check()
        rows = estimator_rows(self, X, reset=True)
        random = check_random_state(self.random_state)
        size = (self.degree, rows.shape[1] + (self.coef0 != 0))
        # In the order of scikit-learn, so that the same seed gives its hashes.
        index = random.randint(0, high=self.n_components, size=size, dtype=np.int64)
        sign = random.choice(a=[-1, 1], size=size)
        return self._with_hashes(index, sign, rows.device)

    def fit_hashes(self, index_hash: npt.ArrayLike, sign_hash: npt.ArrayLike) -> "PolynomialCountSketch":
        """Takes hashes drawn elsewhere instead of drawing some: scikit-learn's `indexHash_` and `bitHash_`.

        Args:
            index_hash: `[degree, d]`, or `[degree, d + 1]` if coef0 is not 0; integers in `0 .. n-1`.
            sign_hash: Of the same shape; +1 and -1.

        Returns:
            Itself, fitted.

        Raises:
            ValueError: Hashes of another shape or with other values, or a parameter that is out of range.
        """
        self._check()
        index, sign = np.asarray(index_hash), np.asarray(sign_hash)
        least = 2 if self.coef0 else 1
        if index.ndim != 2 or len(index) != self.degree or index.shape[1] < least or sign.shape != index.shape:
            raise ValueError(
                f"index_hash has shape {list(index.shape)} and sign_hash {list(sign.shape)}; both must be "
                f"[{self.degree}, {'d + 1' if self.coef0 else 'd'}]"
            )
        if index.dtype.kind not in "iu" or index.min() < 0 or index.max() >= self.n_components:
            raise ValueError(f"index_hash must hold integers from 0 to {self.n_components - 1}")
        if not np.isin(sign, (-1, 1)).all():
            raise ValueError("sign_hash must hold nothing but +1 and -1")
        self.n_features_in_ = index.shape[1] - (self.coef0 != 0)
        return self._with_hashes(index, sign, torch.device("cpu"))

    def _with_hashes(
        self, index: npt.NDArray[Any], sign: npt.NDArray[Any], device: torch.device
    ) -> "PolynomialCountSketch":
        self.index_hash_ = torch.from_numpy(index.astype(np.int64)).to(device)
        self.sign_hash_ = torch.from_numpy(sign.astype(np.int8)).to(device)
        return self

    def _spectra(self, a: Tensor) -> list[Tensor]:
        """The transforms of the sketches, one `[rows, n // 2 + 1]` for each degree."""
        n, d = self.n_components, self.n_features_in_
        index, sign = self.index_hash_.to(a.device), self.sign_hash_.to(a)
        x = math.sqrt(self.gamma) * (normalise(a) if self.normalize else a)
        spectra = []
        for r in range(self.degree):
            sketch = _scattered(x * sign[r, :d], index[r, :d], n, ordered=a.device.type != "cpu")
            if self.coef0:
                sketch[:, index[r, d]] += math.sqrt(self.coef0) * sign[r, d]
            spectra.append(torch.fft.rfft(sketch))
        return spectra

    def features(self, a: Float[Tensor, "rows d"]) -> Float[Tensor, "rows n"]:
        """As in `FeatureMap`."""
        found: Tensor = torch.fft.irfft(functools.reduce(torch.mul, self._spectra(a)), n=self.n_components)
        return found

    def gradient(self, a: Float[Tensor, "rows d"], w: Float[Tensor, "*rows n"]) -> Float[Tensor, "rows d"]:
        """As in `FeatureMap`, by circular correlations `C_r[m] = sum_k Q_r[k] w[k + m]`.

        Q_r is the convolution of the other sketches. No factor is left out, not even those that a division by the
        gradient's norm takes away again.
        """
        n, d = self.n_components, self.n_features_in_
        index, sign = self.index_hash_.to(a.device), self.sign_hash_.to(a)
        transformed = torch.fft.rfft(w)
        spectra = self._spectra(a) if self.degree > 1 else []
        u = torch.zeros_like(a)
        for r in range(self.degree):
            others = [spectrum for other, spectrum in enumerate(spectra) if other != r]
            if others:
                correlation = torch.fft.irfft(functools.reduce(torch.mul, others).conj() * transformed, n=n)
            else:
                correlation = w.expand(len(a), n)
            u = u + sign[r, :d] * correlation[:, index[r, :d]]
        u = math.sqrt(self.gamma) * u
        return normalised_gradient(a, u) if self.normalize else u

    def quadratic(self, w: Float[Tensor, " n"], constant: float = 0.0) -> Quadratic | None:
        """The field `w . phi(a) + constant` with one d x d matrix, exactly, where the degree is 2.

        `A_jk = s_1(j) s_2(k) w[(i_1(j) + i_2(k)) mod n]` over the extended coordinates; the matrix is
        `gamma (A + A')` without the constant's row and column, which give the linear and the constant term.

        Args:
            w: Weights.
            constant: Added to the field.

        Returns:
            The same field in the type of `w`, or None where the degree is not 2.

        Raises:
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        check_is_fitted(self)
        if self.degree != 2:
            return None
        index, sign = self.index_hash_.to(w.device), self.sign_hash_.to(w)
        places = (index[0][:, None] + index[1][None, :]) % self.n_components
        form = sign[0][:, None] * w[places] * sign[1][None, :]
        both = form + form.T
        d = self.n_features_in_
        if self.coef0:
            linear = math.sqrt(self.gamma * self.coef0) * both[:d, d]
            constant += self.coef0 * float(form[d, d])
        else:
            linear = w.new_zeros(d)
        return Quadratic(self.gamma * both[:d, :d], linear, constant, self.normalize)


def _scattered(
    values: Float[Tensor, "rows d"], index: Int[Tensor, " d"], n: int, *, ordered: bool
) -> Float[Tensor, "rows n"]:
    """Columns added up by their hashes; `ordered` is for devices that add to one place in no fixed order."""
    out = values.new_zeros((len(values), n))
    if not ordered:
        return out.index_add(1, index, values)
    # One column of each hash at a time, so that the same input gives the same bits.
    order = index.argsort(stable=True)
    hashes = index[order]
    depth = torch.arange(len(index), device=index.device) - torch.searchsorted(hashes, hashes)
    for level in range(int(depth.max()) + 1):
        columns = order[depth == level]
        out = out.index_add(1, index[columns], values[:, columns])
    return out


class RandomFourierFeatures(FeatureMap):
    """Random waves `sqrt(2/n) cos(W a + c)` of raw activations, `W ~ N(0, 1/sigma^2)`: a Gaussian kernel's features.

    Args:
        n_components: Number n of features.
        sigma: Width of the kernel, in units of the activations; None takes the median distance of two rows that
            differ over sqrt 2, from at most 1000 rows.
        random_state: A seed, a `numpy.random.RandomState`, or None for numpy's global state. Drawn on the CPU.

    Attributes:
        frequencies_: W, `[n, d]`, in the type of the activations at `fit`.
        phases_: c, `[n]`, from 0 to 2 pi.
        sigma_: The width taken.
        n_features_in_: d.
    """

    frequencies_: Float[Tensor, "n d"]
    phases_: Float[Tensor, " n"]
    sigma_: float

    def __init__(  # noqa: D107  # the class says it
        self,
        n_components: int = 8000,
        sigma: float | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_components = n_components
        self.sigma = sigma
        self.random_state = random_state

    @property
    def width(self) -> int:
        """The number of features, `n_components`."""
        return self.n_components

    def fit(self, X: Rows, y: object = None) -> "RandomFourierFeatures":  # noqa: N803  # scikit-learn's letter
        """Draws frequencies and phases, and takes the width of the kernel from the rows if it is not given.

        Args:
            X: Activations `[rows, d]`.
            y: Ignored.

        Returns:
            Itself.

        Raises:
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`, or a parameter that is out of range.

        Warns:
            UserWarning: All rows are equal, so that no width is better than another; 1 is taken.
        """
        _at_least_one("n_components", self.n_components)
        if self.sigma is not None:
            _number("sigma", self.sigma, positive=True)
        rows = estimator_rows(self, X, reset=True)
        random = check_random_state(self.random_state)
        self.sigma_ = self._median(rows, random) if self.sigma is None else float(self.sigma)
        frequencies = random.standard_normal((self.n_components, rows.shape[1])) / self.sigma_
        phases = random.uniform(0, 2 * math.pi, self.n_components)
        self.frequencies_ = torch.from_numpy(frequencies).to(rows)
        self.phases_ = torch.from_numpy(phases).to(rows)
        return self

    @staticmethod
    def _median(rows: Tensor, random: np.random.RandomState) -> float:
        if len(rows) > MEDIAN_ROWS:
            chosen = random.choice(len(rows), MEDIAN_ROWS, replace=False)
            rows = rows[torch.from_numpy(chosen).to(rows.device)]
        distances = torch.pdist(rows.to("cpu", torch.float64))
        distances = distances[distances > 0]
        if not len(distances):
            warnings.warn("all activations are equal; sigma is taken as 1", stacklevel=3)
            return 1.0
        return float(np.median(distances.numpy())) / math.sqrt(2)

    def _waves(self, a: Tensor) -> Tensor:
        return a @ self.frequencies_.to(a).T + self.phases_.to(a)

    def features(self, a: Float[Tensor, "rows d"]) -> Float[Tensor, "rows n"]:
        """As in `FeatureMap`."""
        return math.sqrt(2 / self.n_components) * torch.cos(self._waves(a))

    def gradient(self, a: Float[Tensor, "rows d"], w: Float[Tensor, "*rows n"]) -> Float[Tensor, "rows d"]:
        """As in `FeatureMap`."""
        return -math.sqrt(2 / self.n_components) * ((w * torch.sin(self._waves(a))) @ self.frequencies_.to(a))


class IdentityFeatures(FeatureMap):
    """The raw activation as its own features: the field of a linear classifier is constant.

    Attributes:
        n_features_in_: d.
    """

    @property
    def width(self) -> int:
        """The number of features, which is d."""
        return self.n_features_in_

    def fit(self, X: Rows, y: object = None) -> "IdentityFeatures":  # noqa: N803  # scikit-learn's letter
        """Notes the width.

        Args:
            X: Activations `[rows, d]`.
            y: Ignored.

        Returns:
            Itself.

        Raises:
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`.
        """
        estimator_rows(self, X, reset=True)
        return self

    def features(self, a: Float[Tensor, "rows d"]) -> Float[Tensor, "rows n"]:
        """As in `FeatureMap`."""
        return a

    def gradient(self, a: Float[Tensor, "rows d"], w: Float[Tensor, "*rows n"]) -> Float[Tensor, "rows d"]:
        """As in `FeatureMap`."""
        return w.expand_as(a).clone()


def _at_least_one(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")


def _number(name: str, value: Any, *, positive: bool) -> None:
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not (math.isfinite(number) and (number > 0 if positive else number >= 0)):
        raise ValueError(f"{name} is {value!r}; it must be a number {'above 0' if positive else 'of at least 0'}")
