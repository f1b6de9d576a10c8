# ruff: noqa: N802, N803 -- T is the letter of the paper, C and X are those of scikit-learn
"""Steerers: what is fitted to two sets of activations and then moves others towards the first (section 3 of the paper).

All of them have one interface, `Steerer`. The simpler methods that the paper compares with lie in `baselines`.
"""

import copy
import inspect
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float
from sklearn.base import BaseEstimator  # type: ignore[import-untyped]  # it ships no types
from torch import Tensor

from bodes_steer.checks import as_given, as_rows, check_classes
from bodes_steer.features import IdentityFeatures, PolynomialCountSketch, RandomFourierFeatures
from bodes_steer.quadratic import Quadratic, Spectral, normalise, normalised_gradient
from bodes_steer.solver import Trajectory, check_solver, integrate, unit_speed
from bodes_steer.spectral_flow import (
    PACKED_ROWS,
    Dense,
    Diagonal,
    Packed,
    Slope,
    cheapest_backend,
    euler_change,
    spectral_flow,
)

if TYPE_CHECKING:
    from bodes_steer.density_ratio import LogDensityRatio
    from bodes_steer.files import Origin

# Parameters that a fit does not depend on.
_OF_THE_PATH = {"T", "steps", "solver", "backend", "only_when_negative", "stop_at"}

# What is moved by more than this share of its own length is no longer an activation that the model would make.
_FLUENT_SHARE = 0.5

SteererT = TypeVar("SteererT", bound="Steerer")

STEERERS: dict[str, type["Steerer"]] = {}
"""The steerers by the name of their method, baselines included."""


def cast_back(result: Tensor, dtype: torch.dtype) -> Tensor:
    """Give a result the type of the input.

    Args:
        result: What was computed in float32 or float64.
        dtype: What the input had.

    Returns:
        The result in that type.

    Raises:
        OverflowError: A finite value is beyond what the type can hold (65504 for float16).
    """
    narrow = result.to(dtype)
    if dtype == torch.float16:
        lost = int((narrow.isinf() & result.isfinite()).sum())
        if lost:
            raise OverflowError(
                f"{lost} values of the result are beyond 65504, the largest of float16; use a smaller T, or "
                "activations in bfloat16 or float32"
            )
    return narrow


class Steerer(BaseEstimator, ABC):  # type: ignore[misc]  # scikit-learn ships no types
    """What all steerers share.

    Arithmetic is in float32, or in float64 where both the fitted tensors and the input have it, whatever the type of
    the model; results come back in the type of the input.

    A subclass stores what it fitted in the attributes named by `fitted`.

    Attributes:
        method: Name of the method, in files and on the command line.
        fitted: Names of the attributes that hold fitted tensors.
        n_features_in_: Width d of the activations it was fitted on.
        median_norm_: Median length of those activations.
        origin_: Which model and layer it was fitted on, if that is known.
    """

    method: ClassVar[str]
    fitted: ClassVar[tuple[str, ...]] = ()

    n_features_in_: int
    median_norm_: Tensor
    origin_: "Origin | None"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Enter the method into `STEERERS`."""
        super().__init_subclass__(**kwargs)
        if "method" in cls.__dict__:
            STEERERS[cls.method] = cls

    def __init__(self, T: float = 5.0) -> None:
        """Prepare.

        Args:
            T: Strength; what it measures is said by each method.
        """
        self.T = T

    def __setattr__(self, name: str, value: Any) -> None:
        """Forget what another value of a parameter led to."""
        if name in _OF_THE_PATH:
            self.__dict__.pop("_copies", None)
        elif not name.startswith("_") and not name.endswith("_") and self.__dict__.get(name, value) != value:
            self._forget_fit()
        super().__setattr__(name, value)

    def fit(self: SteererT, pos: Any, neg: Any) -> SteererT:
        """Learn from activations of both kinds.

        Args:
            pos: `[N+, d]`, activations of what is wanted; tensor or array.
            neg: `[N-, d]`, of what is not.

        Returns:
            Itself.

        Raises:
            TypeError: Something that holds no real numbers.
            ValueError: An empty class, widths that differ, values that are not finite, or a parameter out of range;
                then it is not fitted.
        """
        positive, negative = check_classes(pos, neg)
        self._forget_fit()
        self._fit(positive, negative)
        self.median_norm_ = torch.linalg.vector_norm(torch.cat([positive, negative]), dim=1).median()
        self.n_features_in_ = positive.shape[1]
        for name, tensor in self.state().items():
            # In the order in which a file gives it back: the same product in another order has other last bits.
            setattr(self, name, tensor.contiguous())
        return self

    @abstractmethod
    def _fit(self, pos: Float[Tensor, "positives d"], neg: Float[Tensor, "negatives d"]) -> None:
        """Set the fitted attributes from checked activations."""

    @abstractmethod
    def _flow(self, x: Float[Tensor, "rows d"], T: float) -> Float[Tensor, "rows d"]:
        """Move rows that have the type of the arithmetic; T is not 0."""

    @abstractmethod
    def _velocity(self, x: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        """The velocity at rows that have the type of the arithmetic."""

    def _barrier(self, x: Float[Tensor, "rows d"]) -> Float[Tensor, "rows"]:
        """The barrier at rows that have the type of the arithmetic."""
        raise NotImplementedError(f"the method {self.method!r} has no barrier, so no log ratio")

    @property
    def has_barrier(self) -> bool:
        """Whether `log_ratio` can be asked for."""
        return type(self)._barrier is not Steerer._barrier

    @property
    def constant_vector(self) -> Float[Tensor, "d"] | None:
        """The v with `steer(a, T) == a + T v` for every a; None if there is none."""
        return None

    def _speed(self) -> float | None:
        """How far a row moves for T = 1; None where that depends on the row."""
        vector = self.constant_vector
        return None if vector is None else float(torch.linalg.vector_norm(vector))

    @torch.no_grad()
    def flow(self, x: Float[Tensor, "rows d"], T: float) -> Float[Tensor, "rows d"]:
        """Move rows, without a check: what adapters call on the activations of a running model.

        Args:
            x: `[rows, d]`, float32 or float64, on the device of the fitted tensors (see `to`).
            T: Strength. 0 returns `x` itself.

        Returns:
            The moved rows, in the type of `x`.
        """
        if T == 0:
            return x
        return self._flow(x.to(self._dtype_for(x)), T).to(x.dtype)

    @torch.no_grad()
    def steer(self, X: Any, T: float | None = None) -> Any:
        """Move activations.

        Args:
            X: `[..., d]`, tensor or array of any float type.
            T: Strength; the estimator's own `T` by default. 0 returns the input, bit for bit.

        Returns:
            The moved activations, of the same kind, type and shape; float64 for integers of an array or a list.

        Raises:
            TypeError: `X` holds no real numbers, is sparse, or is a tensor of integers.
            ValueError: A wrong width, values that are not finite, or a T that is not finite.
            OverflowError: The result does not fit into float16.
        """
        strength = self._strength(T)
        x, like = self._rows(X)
        moved = self.flow(x, strength)
        self._warn_of_length(x, strength)
        return _restored(cast_back(moved, like.dtype), like, X)

    @torch.no_grad()
    def vector_field(self, X: Any) -> Any:
        """The velocity at activations.

        Args:
            X: `[..., d]`, tensor or array.

        Returns:
            `v(a)`, of the same kind and shape.

        Raises:
            TypeError: As `steer`.
            ValueError: A wrong width, or values that are not finite.
        """
        x, like = self._rows(X)
        return _restored(cast_back(self._velocity(x.to(self._dtype_for(x))), like.dtype), like, X)

    @torch.no_grad()
    def log_ratio(self, X: Any) -> Any:
        """The barrier h, the learned `log p+(a) / p-(a)`: above 0 where an activation looks like a positive one.

        Args:
            X: `[..., d]`, tensor or array.

        Returns:
            `[...]`, of the same kind, in float32 or float64.

        Raises:
            NotImplementedError: The method has no barrier; see `has_barrier`.
            TypeError: As `steer`.
            ValueError: A wrong width, or values that are not finite.
        """
        x, like = self._rows(X)
        return _restored(self._barrier(x.to(self._dtype_for(x))), like[..., 0], X)

    @torch.no_grad()
    def trajectory(self, X: Any, T: float | None = None) -> Trajectory:
        """Record the way that rows take.

        Args:
            X: `[rows, d]`, tensor or array.
            T: Strength; the estimator's own by default.

        Returns:
            The states, the barrier along them, and how far the direction turned, on the device of the steerer.

        Raises:
            TypeError: As `steer`.
            ValueError: As `steer`.
        """
        strength = self._strength(T)
        x, _ = self._rows(X)
        x = x.to(self._dtype_for(x))
        return self._trajectory(x, strength)

    def _trajectory(self, x: Tensor, T: float) -> Trajectory:
        """The way of rows that have the type of the arithmetic; straight, in a method without steps of its own."""
        end = x if T == 0 else self._flow(x, T)
        times = torch.tensor([0.0, T], dtype=x.dtype, device=x.device)
        return Trajectory.of(torch.stack([x, end]), times, self._barrier if self.has_barrier else None)

    def absolute_T(self, T_rel: float) -> float:
        """The T that moves a row by a given share of the median length of the activations fitted on.

        The same T is weak on one model and ruins another, since the length of activations differs; the share does not.

        Args:
            T_rel: The share, such as 0.1.

        Returns:
            `T_rel * median ||a|| / ||v||`; for a field of unit speed `T_rel = T / median ||a||`.

        Raises:
            ValueError: How far a row moves depends on the row, or the field is 0.
        """
        speed = self._speed()
        if not speed:
            raise ValueError(
                f"T_rel has no meaning for the method {self.method!r}: "
                + ("its vector is 0" if speed == 0 else "its T is a share already")
            )
        return float(T_rel) * float(self.median_norm_) / speed

    @property
    def device(self) -> torch.device:
        """Where the fitted tensors lie."""
        return self.median_norm_.device

    def to(self: SteererT, device: torch.device | str) -> SteererT:
        """A steerer whose fitted tensors lie on a device.

        Args:
            device: Where to.

        Returns:
            Itself if they lie there already, else a copy, the same one each time until the steerer is fitted anew.
        """
        wanted = torch.empty(0, device=device).device  # "cuda" means the current one, and tensors name it
        if wanted == self.device:
            return self
        copies: dict[torch.device, SteererT] = self.__dict__.setdefault("_copies", {})
        if wanted not in copies:
            moved = copy.copy(self)
            moved._forget()
            for name, tensor in self.state().items():
                setattr(moved, name, tensor.to(wanted))
            copies[wanted] = moved
        return copies[wanted]

    def _forget(self) -> None:
        """Drop what was derived from fitted tensors."""
        self.__dict__.pop("_copies", None)

    def _forget_fit(self) -> None:
        """Be as if not fitted."""
        self._forget()
        for name in ("n_features_in_", "origin_"):
            self.__dict__.pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        """Copies on other devices are made anew where they are needed."""
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in ("_copies", "_made")}

    def state(self) -> dict[str, Tensor]:
        """What was fitted, for a file.

        Returns:
            The tensors by name.

        Raises:
            ValueError: It is not fitted.
        """
        self._check_fitted()
        names = ("median_norm_", *self.fitted)
        return {name: getattr(self, name) for name in names if getattr(self, name, None) is not None}

    def restore(self: SteererT, state: Mapping[str, Tensor]) -> SteererT:
        """Take back what `state` gave.

        Args:
            state: The tensors by name.

        Returns:
            Itself.

        Raises:
            ValueError: A tensor is missing, unknown, or has a shape that does not fit.
        """
        known = {"median_norm_", *self.fitted}
        missing = sorted(known - state.keys() - self._optional())
        unknown = sorted(state.keys() - known)
        if missing or unknown:
            raise ValueError(
                f"a steerer of the method {self.method!r} holds {', '.join(sorted(known))}; "
                f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
            )
        self._forget_fit()
        for name in known:
            if name in state:
                setattr(self, name, state[name])
            else:
                self.__dict__.pop(name, None)
        self.n_features_in_ = self._width()
        return self

    def _optional(self) -> set[str]:
        return set()

    def _width(self) -> int:
        """Width d, read off the fitted tensors; raises ValueError where their shapes disagree."""
        widths = {getattr(self, name).shape[-1] for name in self.fitted if getattr(self, name).ndim}
        if len(widths) != 1:
            raise ValueError(f"the tensors of the method {self.method!r} have different widths {sorted(widths)}")
        return int(widths.pop())

    def save(self, path: str | os.PathLike[str], model: Any = None, layer: int | None = None) -> None:
        """Write it to a file; see `bodes_steer.files.save_steerer`.

        Args:
            path: The file, replaced if it exists.
            model: The model it was fitted on, to be checked when the file is used.
            layer: Index of the decoder block, from 0.

        Raises:
            ValueError: It is not fitted, or its width is not that of the model.
            OSError: The file cannot be written.
        """
        from bodes_steer.files import save_steerer

        save_steerer(self, path, model=model, layer=layer)

    def _check_fitted(self) -> None:
        if not hasattr(self, "n_features_in_"):
            raise ValueError(f"this {type(self).__name__} is not fitted; call fit(pos, neg) first")

    def _strength(self, T: float | None) -> float:
        value = float(self.T if T is None else T)
        if not math.isfinite(value):
            raise ValueError(f"T={value!r}; it must be a finite number")
        return value

    def _rows(self, X: Any) -> tuple[Tensor, Tensor]:
        """Checked rows on the fitted tensors' device, and a tensor without values, of the input's shape and type."""
        self._check_fitted()
        given = X if isinstance(X, Tensor) else np.asarray(X)
        shape = tuple(given.shape)
        flat = given if len(shape) == 2 else given.reshape(math.prod(shape[:-1]), *(shape[-1:] or (1,)))
        x = as_rows(flat, "X", width=self.n_features_in_)
        # What `as_rows` makes of integers is also what comes back.
        own = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float16, np.dtype(np.float16): torch.float16}
        return x.to(self.device), torch.empty(shape, dtype=own.get(given.dtype, x.dtype), device="meta")

    def _fitted_dtype(self) -> torch.dtype:
        return self.median_norm_.dtype

    def _dtype_for(self, x: Tensor) -> torch.dtype:
        both = x.dtype == torch.float64 and self._fitted_dtype() == torch.float64
        return torch.float64 if both else torch.float32

    def _warn_of_length(self, x: Tensor, T: float) -> None:
        speed = self._speed()
        if not speed or T == 0:
            return
        lengths = torch.linalg.vector_norm(x, dim=-1)
        # A row of zeros has no length to compare with.
        far = int(((abs(T) * speed > _FLUENT_SHARE * lengths) & (lengths > 0)).sum())
        if far:
            warnings.warn(
                f"T={T:g} moves {far} of {len(x)} rows by more than half of their own length, which ruins the fluency "
                f"of a model; their median length is {float(lengths.median()):.4g}, use a smaller T (see absolute_T)",
                stacklevel=4,  # past torch's decorator
            )


class _BarrierSteerer(Steerer):
    """Follows the gradient of a barrier at unit speed: `da/dt = grad h / (||grad h|| + 1e-10)` (section 3.3)."""

    T: float
    steps: int
    solver: str
    only_when_negative: bool
    stop_at: float | None

    @abstractmethod
    def _gradient(self, x: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        """The gradient of the barrier."""

    def _check_params(self) -> None:
        check_solver(self.solver, self.steps)
        if self.stop_at is not None and not math.isfinite(self.stop_at):
            raise ValueError(f"stop_at={self.stop_at!r}; it must be a finite value of the log ratio, or None")

    def _velocity(self, x: Tensor) -> Tensor:
        return unit_speed(self._gradient(x))

    def _flow(self, x: Tensor, T: float) -> Tensor:
        return cast("Tensor", self._integrate(x, T, record=False))

    def _trajectory(self, x: Tensor, T: float) -> Trajectory:
        return cast("Trajectory", self._integrate(x, T, record=True))

    def _integrate(self, x: Tensor, T: float, *, record: bool) -> Tensor | Trajectory:
        return integrate(
            self._velocity,
            x,
            T,
            steps=self.steps,
            solver=self.solver,
            barrier=self._barrier,
            stop_at=self.stop_at,
            active=self._barrier(x) < 0 if self.only_when_negative else None,
            record=record,
        )

    def _speed(self) -> float | None:
        return 1.0

    def _derived(self, name: str, dtype: torch.dtype, make: Callable[[], Any]) -> Any:
        """What is computed from fitted tensors on first use."""
        made: dict[tuple[str, torch.dtype], Any] = self.__dict__.setdefault("_made", {})
        if (name, dtype) not in made:
            made[name, dtype] = make()
        return made[name, dtype]


class _QuadraticSteerer(_BarrierSteerer):
    """A barrier that is quadratic in the activation or in its direction, followed in the cheapest of several ways.

    Attributes:
        basis_: `[d, d]`, eigenvectors of the quadratic form, once they were needed; likewise
        eigenvalues_: `[d]`.
        linear_: `[d]`, the linear term in their coordinates.
        constant_: `[]`.
    """

    backend: str

    _SPECTRAL: ClassVar[tuple[str, ...]] = ("basis_", "eigenvalues_", "linear_", "constant_")
    _BACKENDS: ClassVar[tuple[str, ...]] = ("dense", "spectral")

    basis_: Tensor
    eigenvalues_: Tensor
    linear_: Tensor
    constant_: Tensor

    @abstractmethod
    def _quadratic(self) -> Quadratic:
        """The barrier, in the type of the fitted tensors."""

    def _check_params(self) -> None:
        super()._check_params()
        if self.backend not in ("auto", *self._BACKENDS):
            offered = ", ".join(map(repr, ("auto", *self._BACKENDS)))
            raise ValueError(f"backend={self.backend!r} is not offered; use one of {offered}")

    def _optional(self) -> set[str]:
        return set(self._SPECTRAL)

    def _forget(self) -> None:
        super()._forget()
        self.__dict__.pop("_made", None)
        for name in self._SPECTRAL:
            self.__dict__.pop(name, None)

    def _evaluations(self) -> int:
        return {"euler": 1, "midpoint": 2, "rk4": 4, "dopri5": 7}[self.solver] * self.steps

    def _choose(self, rows: int, evaluations: int) -> str:
        """Name of the backend."""
        if self.backend != "auto":
            return self.backend
        return cheapest_backend(
            self.n_features_in_, self._components(), evaluations, rows, cuda=self.device.type != "cpu"
        )

    def _components(self) -> int | None:
        """Number of features n, where Fourier transforms can be used."""
        return None

    def prepare(self: SteererT, rows: Sequence[int] = (1, 64, 4096)) -> SteererT:
        """Compute now what the first call would compute, such as the eigenvectors, which a file then holds too.

        Args:
            rows: Numbers of rows that will be moved at once.

        Returns:
            Itself.
        """
        self._check_fitted()
        like = torch.empty(0, dtype=torch.float32, device=self.device)
        for name in {self._choose(count, self._evaluations()) for count in rows}:
            self._slope(name, like)
        return self

    def _slope(self, name: str, like: Tensor) -> Slope:
        """The barrier in the form of a backend, in the type of a tensor."""
        dtype = like.dtype
        if name == "spectral":
            field = self._spectral_in(dtype)
            return Diagonal(field.eigenvalues, field.linear, field.constant, field.normalize)
        made: Slope = self._derived("dense", dtype, lambda: Dense.of(self._quadratic(), like))
        return made

    def _spectral_in(self, dtype: torch.dtype) -> Spectral:
        found: Spectral = self._derived("spectral", dtype, lambda: self._spectral().to(dtype=dtype))
        return found

    def _spectral(self) -> Spectral:
        """The barrier in the basis of eigenvectors, computed once and kept among the fitted tensors."""
        if getattr(self, "basis_", None) is None:
            found = self._quadratic().spectral()
            self.basis_ = found.basis.contiguous()  # see `fit`
            self.eigenvalues_, self.linear_ = found.eigenvalues, found.linear
            self.constant_ = torch.tensor(found.constant, dtype=torch.float64, device=found.basis.device)
            # Copies elsewhere would compute it again.
            self.__dict__.pop("_copies", None)
        return Spectral(self.basis_, self.eigenvalues_, self.linear_, float(self.constant_), self._normalizes())

    @abstractmethod
    def _normalizes(self) -> bool:
        """Whether the barrier sees directions only."""

    def _at(self, x: Tensor) -> tuple[Slope, Tensor, Tensor]:
        """A slope, what it is a function of, and its value there."""
        name = self._choose(len(x), 1)
        # A single evaluation gains nothing in other coordinates.
        slope = self._slope("dense" if name == "spectral" else name, x)
        at = normalise(x) if slope.normalize else x
        return slope, at, slope(at)

    def _barrier(self, x: Tensor) -> Tensor:
        slope, at, value = self._at(x)
        return 0.5 * (at * (value + slope.linear)).sum(dim=-1) + slope.constant

    def _gradient(self, x: Tensor) -> Tensor:
        slope, _, value = self._at(x)
        return normalised_gradient(x, value) if slope.normalize else value

    def _flow(self, x: Tensor, T: float) -> Tensor:
        name = self._choose(len(x), self._evaluations())
        if self.solver == "euler":
            settings: dict[str, Any] = {
                "steps": self.steps,
                "stop_at": self.stop_at,
                "only_when_negative": self.only_when_negative,
            }
            if name == "spectral":
                return spectral_flow(self._spectral_in(x.dtype), x, T, **settings)
            slope = self._slope(name, x)
            if name == "fft" and len(x) > PACKED_ROWS:
                # The whole path of a few rows after that of others: what it works on stays in the cache.
                blocks = torch.split(x, PACKED_ROWS)
                return torch.cat([block + euler_change(slope, block, T, **settings) for block in blocks])
            return x + euler_change(slope, x, T, **settings)
        if name == "spectral":
            field = self._spectral_in(x.dtype)
            y = field.to_basis(x)
            end = integrate(
                lambda at: unit_speed(field.gradient(at)),
                y,
                T,
                steps=self.steps,
                solver=self.solver,
                barrier=field.value,
                stop_at=self.stop_at,
                active=field.value(y) < 0 if self.only_when_negative else None,
            )
            return x + field.from_basis(cast("Tensor", end) - y)
        return super()._flow(x, T)


class ODESteer(_QuadraticSteerer):
    """Several small steps along the gradient of a log-density ratio learned on a polynomial sketch (the method itself).

    The barrier is `h(a) = w . phi(a) + b + log((1 - pi) / pi)`: logistic regression on the count sketch of the
    normalised activation, corrected for the share pi of positives. It is followed at unit speed from 0 to T. For the
    default degree 2 the sketch is a quadratic form, evaluated in whichever way costs least; see `backend`.

    Attributes:
        index_hash_: `[degree, d + 1]` (`d` without coef0), where each coordinate goes in the sketch.
        sign_hash_: Its signs.
        coef_: `[n_components]`, the weights w.
        intercept_: `[]`, b.
        prior_: `[]`, the share pi of positives among the activations fitted on.
    """

    method: ClassVar[str] = "odesteer"
    fitted: ClassVar[tuple[str, ...]] = (
        *("index_hash_", "sign_hash_", "coef_", "intercept_", "prior_"),
        *_QuadraticSteerer._SPECTRAL,
    )
    _BACKENDS: ClassVar[tuple[str, ...]] = ("fft", "dense", "spectral")

    index_hash_: Tensor
    sign_hash_: Tensor
    coef_: Tensor
    intercept_: Tensor
    prior_: Tensor

    def __init__(
        self,
        T: float = 5.0,
        steps: int = 10,
        solver: str = "euler",
        n_components: int = 8000,
        degree: int = 2,
        gamma: float = 0.1,
        coef0: float = 1.0,
        normalize: bool = True,
        C: float = 1.0,
        classifier: str = "lr",
        backend: str = "auto",
        only_when_negative: bool = False,
        stop_at: float | None = None,
        random_state: Any = None,
    ) -> None:
        """Prepare.

        Args:
            T: Length of the path in the space of activations; negative steers the other way. 5 suits models of 7 to 8
                billion parameters, whose activations are of a certain length: see `absolute_T` and `auto_T`.
            steps: Number of steps.
            solver: `"euler"`, `"midpoint"`, `"rk4"` or `"dopri5"`.
            n_components: Number of features of the sketch.
            degree: Degree of the polynomial.
            gamma: Its factor of inner products; larger makes the barrier less linear.
            coef0: Its constant.
            normalize: Whether activations are normalised first.
            C: Inverse strength of the regression's L2 penalty.
            classifier: `"lr"`, or `"svm"` for a linear support vector machine.
            backend: `"fft"`, `"dense"`, `"spectral"` (degree 2 only), or `"auto"`: which of them is a fixed rule in the
                width, the features, the steps, the rows and the device; see `cheapest_backend`.
            only_when_negative: Whether to move only rows with `h < 0`. Ours: the paper moves all.
            stop_at: Value of h at which a row stops. Ours.
            random_state: Seed of the hashes, which are drawn on the CPU.
        """
        super().__init__(T)
        self.steps = steps
        self.solver = solver
        self.n_components = n_components
        self.degree = degree
        self.gamma = gamma
        self.coef0 = coef0
        self.normalize = normalize
        self.C = C
        self.classifier = classifier
        self.backend = backend
        self.only_when_negative = only_when_negative
        self.stop_at = stop_at
        self.random_state = random_state

    def _check_params(self) -> None:
        super()._check_params()
        if self.degree != 2 and self.backend not in ("auto", "fft"):
            raise ValueError(f"backend={self.backend!r} is for degree 2; with degree={self.degree} use 'fft' or 'auto'")

    def _sketch(self) -> PolynomialCountSketch:
        return PolynomialCountSketch(
            self.degree, self.n_components, self.gamma, self.coef0, self.normalize, self.random_state
        )

    def _fit(self, pos: Tensor, neg: Tensor) -> None:
        self._check_params()
        ratio = fit_ratio(pos, neg, self._sketch(), self.classifier, self.C)
        self.index_hash_ = ratio.feature_map_.index_hash_
        self.sign_hash_ = ratio.feature_map_.sign_hash_
        self.coef_, self.intercept_, self.prior_ = linear_part(ratio, pos)
        warn_of_zero(self.coef_, self.method)

    def _width(self) -> int:
        index, sign, weights = self.index_hash_, self.sign_hash_, self.coef_
        width = index.shape[-1] - (self.coef0 != 0)
        square = getattr(self, "basis_", None)
        if (
            index.shape != sign.shape
            or index.shape[:1] != (self.degree,)
            or tuple(weights.shape) != (self.n_components,)
            or (square is not None and tuple(square.shape) != (width, width))
        ):
            raise ValueError(
                f"hashes {tuple(index.shape)} and {tuple(sign.shape)}, weights {tuple(weights.shape)} do not fit "
                f"degree={self.degree} and n_components={self.n_components}"
            )
        return width

    def _components(self) -> int | None:
        return self.n_components

    def _normalizes(self) -> bool:
        return self.normalize

    def _choose(self, rows: int, evaluations: int) -> str:
        return "fft" if self.degree != 2 else super()._choose(rows, evaluations)

    def _feature_map(self) -> PolynomialCountSketch:
        def make() -> PolynomialCountSketch:
            hashes = (self.index_hash_.cpu().numpy(), self.sign_hash_.cpu().numpy())
            return self._sketch().fit_hashes(*hashes).to(self.device)

        found: PolynomialCountSketch = self._derived("sketch", torch.float32, make)
        return found

    def _offset(self) -> float:
        return prior_corrected(self.intercept_, self.prior_)

    def _quadratic(self) -> Quadratic:
        found = self._feature_map().quadratic(self.coef_, self._offset())
        assert found is not None
        return found

    def _slope(self, name: str, like: Tensor) -> Slope:
        if name != "fft":
            return super()._slope(name, like)
        make = Packed.of
        made: Slope = self._derived(
            "fft", like.dtype, lambda: make(self._feature_map(), self.coef_, self._offset(), like)
        )
        return made

    def _generic(self, rows: int) -> bool:
        """Whether the sketch itself has to be used, without a slope of its own."""
        # Off the CPU the packed sketch would add in no fixed order.
        return self.degree != 2 or (self.device.type != "cpu" and self._choose(rows, 1) == "fft")

    def prepare(self: SteererT, rows: Sequence[int] = (1, 64, 4096)) -> SteererT:
        """As in the class above; any degree."""
        self._check_fitted()
        if self._generic(1):
            self._feature_map()
            return self
        return super().prepare(rows)

    def _barrier(self, x: Tensor) -> Tensor:
        if self._generic(len(x)):
            return self._feature_map().features(x) @ self.coef_.to(x.dtype) + self._offset()
        return super()._barrier(x)

    def _gradient(self, x: Tensor) -> Tensor:
        if self._generic(len(x)):
            return self._feature_map().gradient(x, self.coef_.to(x.dtype))
        return super()._gradient(x)

    def _flow(self, x: Tensor, T: float) -> Tensor:
        if self._generic(len(x)):
            return _BarrierSteerer._flow(self, x, T)
        return super()._flow(x, T)


class StepODESteer(ODESteer):
    """`ODESteer` in one step: the direction at the start, kept to the end."""

    method: ClassVar[str] = "step-odesteer"

    steps = 1
    solver = "euler"

    def __init__(
        self,
        T: float = 5.0,
        n_components: int = 8000,
        degree: int = 2,
        gamma: float = 0.1,
        coef0: float = 1.0,
        normalize: bool = True,
        C: float = 1.0,
        classifier: str = "lr",
        backend: str = "auto",
        only_when_negative: bool = False,
        random_state: Any = None,
    ) -> None:
        """Prepare; see `ODESteer`."""
        Steerer.__init__(self, T)
        self.n_components = n_components
        self.degree = degree
        self.gamma = gamma
        self.coef0 = coef0
        self.normalize = normalize
        self.C = C
        self.classifier = classifier
        self.backend = backend
        self.only_when_negative = only_when_negative
        self.random_state = random_state

    stop_at = None


BODES = ODESteer
"""The name that the method had when it was submitted."""


class RFFODESteer(_BarrierSteerer):
    """The same path along a barrier learned on random Fourier features of the raw activation.

    Attributes:
        frequencies_: `[n_components, d]`, W.
        phases_: `[n_components]`, c.
        coef_: `[n_components]`, the weights.
        intercept_: `[]`.
        prior_: `[]`, the share of positives.
    """

    method: ClassVar[str] = "rff-odesteer"
    fitted: ClassVar[tuple[str, ...]] = ("frequencies_", "phases_", "coef_", "intercept_", "prior_")

    frequencies_: Tensor
    phases_: Tensor
    coef_: Tensor
    intercept_: Tensor
    prior_: Tensor

    def __init__(
        self,
        T: float = 5.0,
        steps: int = 10,
        solver: str = "euler",
        n_components: int = 8000,
        sigma: float | None = None,
        C: float = 1.0,
        classifier: str = "lr",
        only_when_negative: bool = False,
        stop_at: float | None = None,
        random_state: Any = None,
    ) -> None:
        """Prepare.

        Args:
            T: As in `ODESteer`, like all that is not named here.
            steps: Likewise.
            solver: Likewise.
            n_components: Number of features.
            sigma: Width of the kernel; None for the median distance between activations over sqrt 2.
            C: As in `ODESteer`.
            classifier: Likewise.
            only_when_negative: Likewise.
            stop_at: Likewise.
            random_state: Seed of the frequencies and phases.
        """
        super().__init__(T)
        self.steps = steps
        self.solver = solver
        self.n_components = n_components
        self.sigma = sigma
        self.C = C
        self.classifier = classifier
        self.only_when_negative = only_when_negative
        self.stop_at = stop_at
        self.random_state = random_state

    def _fit(self, pos: Tensor, neg: Tensor) -> None:
        self._check_params()
        waves = RandomFourierFeatures(self.n_components, self.sigma, self.random_state)
        ratio = fit_ratio(pos, neg, waves, self.classifier, self.C)
        self.frequencies_, self.phases_ = ratio.feature_map_.frequencies_, ratio.feature_map_.phases_
        self.coef_, self.intercept_, self.prior_ = linear_part(ratio, pos)
        warn_of_zero(self.coef_, self.method)

    def _width(self) -> int:
        shape = tuple(self.frequencies_.shape)
        if len(shape) != 2 or not tuple(self.phases_.shape) == tuple(self.coef_.shape) == shape[:1]:
            raise ValueError(
                f"frequencies {shape}, phases {tuple(self.phases_.shape)} and weights {tuple(self.coef_.shape)} do not "
                "fit each other"
            )
        return shape[1]

    def _angles(self, x: Tensor) -> Tensor:
        return torch.addmm(self.phases_.to(x.dtype), x, self.frequencies_.to(x.dtype).T)

    def _weights(self, x: Tensor) -> Tensor:
        return math.sqrt(2.0 / len(self.coef_)) * self.coef_.to(x.dtype)

    def _barrier(self, x: Tensor) -> Tensor:
        return self._angles(x).cos() @ self._weights(x) + prior_corrected(self.intercept_, self.prior_)

    def _gradient(self, x: Tensor) -> Tensor:
        return (-self._weights(x) * self._angles(x).sin()) @ self.frequencies_.to(x.dtype)


class LinearODE(_BarrierSteerer):
    """The same path along a barrier learned on the raw activation, and so a straight one: any number of steps is one.

    Attributes:
        coef_: `[d]`, the weights.
        intercept_: `[]`.
        prior_: `[]`, the share of positives.
    """

    method: ClassVar[str] = "linear-ode"
    fitted: ClassVar[tuple[str, ...]] = ("coef_", "intercept_", "prior_")

    coef_: Tensor
    intercept_: Tensor
    prior_: Tensor

    def __init__(
        self,
        T: float = 5.0,
        steps: int = 10,
        solver: str = "euler",
        C: float = 1.0,
        classifier: str = "lr",
        only_when_negative: bool = False,
        stop_at: float | None = None,
    ) -> None:
        """Prepare; see `ODESteer`.

        Args:
            T: Length of the path.
            steps: Counts with `stop_at` only, and for recorded states.
            solver: Likewise.
            C: Inverse strength of the regression's L2 penalty.
            classifier: `"lr"` or `"svm"`.
            only_when_negative: As in `ODESteer`.
            stop_at: Likewise.
        """
        super().__init__(T)
        self.steps = steps
        self.solver = solver
        self.C = C
        self.classifier = classifier
        self.only_when_negative = only_when_negative
        self.stop_at = stop_at

    def _fit(self, pos: Tensor, neg: Tensor) -> None:
        self._check_params()
        ratio = fit_ratio(pos, neg, IdentityFeatures(), self.classifier, self.C)
        self.coef_, self.intercept_, self.prior_ = linear_part(ratio, pos)
        warn_of_zero(self.coef_, self.method)

    @property
    def constant_vector(self) -> Float[Tensor, "d"] | None:
        """The unit normal of the classifier; None where rows may stop or stay."""
        self._check_fitted()
        if self.only_when_negative or self.stop_at is not None:
            return None
        return unit_speed(self.coef_)

    def _barrier(self, x: Tensor) -> Tensor:
        return x @ self.coef_.to(x.dtype) + prior_corrected(self.intercept_, self.prior_)

    def _gradient(self, x: Tensor) -> Tensor:
        return self.coef_.to(x.dtype).expand_as(x)

    def _flow(self, x: Tensor, T: float) -> Tensor:
        if self.stop_at is not None:
            return super()._flow(x, T)
        moved = torch.add(x, unit_speed(self.coef_.to(x.dtype)), alpha=T)
        return torch.where((self._barrier(x) < 0).unsqueeze(-1), moved, x) if self.only_when_negative else moved


class GaussianODE(_QuadraticSteerer):
    """The same path along the log-density ratio of two Gaussians, with covariances shrunk towards round ones. Ours.

    `h(a) = log N(a; mu+, S+) - log N(a; mu-, S-)`, an exact quadratic of the raw activation.

    Attributes:
        matrix_: `[d, d]`, `S-^-1 - S+^-1`.
        vector_: `[d]`, `S+^-1 mu+ - S-^-1 mu-`.
        offset_: `[]`, the constant.
    """

    method: ClassVar[str] = "gaussian-ode"
    fitted: ClassVar[tuple[str, ...]] = ("matrix_", "vector_", "offset_", *_QuadraticSteerer._SPECTRAL)

    matrix_: Tensor
    vector_: Tensor
    offset_: Tensor

    def __init__(
        self,
        T: float = 5.0,
        steps: int = 10,
        solver: str = "euler",
        shrinkage: float | None = None,
        backend: str = "auto",
        only_when_negative: bool = False,
        stop_at: float | None = None,
    ) -> None:
        """Prepare; see `ODESteer`.

        Args:
            T: Length of the path.
            steps: Number of steps.
            solver: As in `ODESteer`.
            shrinkage: Share, from 0 to 1, of `trace(S) / d I` in each covariance; None for the one that Ledoit and Wolf
                (2004) estimate.
            backend: `"dense"`, `"spectral"` or `"auto"`.
            only_when_negative: As in `ODESteer`.
            stop_at: Likewise.
        """
        super().__init__(T)
        self.steps = steps
        self.solver = solver
        self.shrinkage = shrinkage
        self.backend = backend
        self.only_when_negative = only_when_negative
        self.stop_at = stop_at

    def _fit(self, pos: Tensor, neg: Tensor) -> None:
        self._check_params()
        if self.shrinkage is not None and not 0.0 <= self.shrinkage <= 1.0:
            raise ValueError(f"shrinkage={self.shrinkage!r}; it must be from 0 to 1, or None")
        moments = [_gaussian(each, self.shrinkage) for each in (pos, neg)]
        # Where a class does not vary in some direction, its density has none; this much everywhere gives it one.
        ridge = 1e-6 * sum(float(covariance.diagonal().mean()) for _, covariance in moments)
        terms = [_log_density_terms(mean, covariance, ridge) for mean, covariance in moments]
        matrix, vector, offset = (positive - negative for positive, negative in zip(*terms, strict=True))
        self.matrix_ = (0.5 * (matrix + matrix.T)).to(pos.dtype)
        self.vector_, self.offset_ = vector.to(pos.dtype), offset.to(pos.dtype)
        if not bool(self.matrix_.any()):
            warn_of_zero(self.vector_, self.method)

    def _width(self) -> int:
        width = len(self.vector_)
        if self.vector_.ndim != 1 or tuple(self.matrix_.shape) != (width, width):
            raise ValueError(
                f"a matrix {tuple(self.matrix_.shape)} and a vector {tuple(self.vector_.shape)} do not fit each other"
            )
        return width

    def _normalizes(self) -> bool:
        return False

    def _quadratic(self) -> Quadratic:
        return Quadratic(self.matrix_, self.vector_, float(self.offset_), normalize=False)


def _gaussian(rows: Tensor, shrinkage: float | None) -> tuple[Tensor, Tensor]:
    """Mean and shrunk covariance, float64."""
    from sklearn.covariance import ledoit_wolf, shrunk_covariance  # type: ignore[import-untyped]  # it ships no types

    rows = rows.double()
    mean = rows.mean(dim=0)
    if shrinkage is None:
        # For one column there is nothing to shrink towards, of which it would warn.
        covariance = ledoit_wolf(rows.cpu().numpy())[0] if rows.shape[1] > 1 else [[float(rows.var(correction=0))]]
    else:
        centred = rows - mean
        covariance = shrunk_covariance((centred.T @ centred / len(rows)).cpu().numpy(), shrinkage)
    return mean, torch.as_tensor(covariance, dtype=torch.float64, device=rows.device)


def _log_density_terms(mean: Tensor, covariance: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    """M, m and c with `log N(a) = 0.5 a' M a + m . a + c`, but for what two Gaussians share."""
    if ridge == 0.0:  # nothing varies at all, of which the user was warned
        return torch.zeros_like(covariance), torch.zeros_like(mean), covariance.new_zeros(())
    factor = torch.linalg.cholesky(covariance + ridge * torch.eye(len(mean), dtype=mean.dtype, device=mean.device))
    precision = torch.cholesky_inverse(factor)
    slope = precision @ mean
    return -precision, slope, -0.5 * (mean @ slope) - factor.diagonal().log().sum()


def fit_ratio(pos: Tensor, neg: Tensor, feature_map: Any, classifier: str = "lr", C: float = 1.0) -> "LogDensityRatio":
    """Fit a log-density ratio on checked activations of two classes.

    Args:
        pos: `[N+, d]`.
        neg: `[N-, d]`.
        feature_map: Not yet fitted.
        classifier: `"lr"` or `"svm"`.
        C: Inverse strength of the penalty.

    Returns:
        The fitted classifier.
    """
    from bodes_steer.density_ratio import LogDensityRatio

    labels = torch.cat([torch.ones(len(pos), dtype=torch.int64), torch.zeros(len(neg), dtype=torch.int64)])
    ratio = LogDensityRatio(feature_map, classifier=cast("Any", classifier), C=C)
    with warnings.catch_warnings():
        # Said of the classes already, where they came in.
        warnings.filterwarnings("ignore", message=r"all activations of both classes|there are \d+ positive")
        return ratio.fit(torch.cat([pos, neg]), labels)


def linear_part(ratio: "LogDensityRatio", like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, intercept and share of positives of a fitted ratio.

    Args:
        ratio: The classifier.
        like: Gives type and device.

    Returns:
        `[n]`, `[]` and `[]`; the last two in float64.
    """
    weights = torch.as_tensor(ratio.coef_).to(like).reshape(-1)
    intercept = torch.as_tensor(ratio.intercept_, dtype=torch.float64, device=like.device).reshape(())
    prior = torch.as_tensor(ratio.prior_, dtype=torch.float64, device=like.device).reshape(())
    return weights, intercept, prior


def prior_corrected(intercept: Tensor, prior: Tensor) -> float:
    """`b + log((1 - pi) / pi)` (section 3.2).

    Args:
        intercept: b.
        prior: pi.

    Returns:
        The constant of the barrier.
    """
    share = float(prior)
    return float(intercept) + math.log((1.0 - share) / share)


def auto_T(
    steerer: Steerer,
    neg: Any,
    pos: Any,
    *,
    barrier: Any = None,
    most: float | None = None,
    tolerance: float = 1e-3,
) -> float:
    """The smallest T that lifts the median of held-out negatives to the median of held-out positives. Ours.

    Args:
        steerer: Fitted.
        neg: `[rows, d]`, negatives that it was not fitted on.
        pos: `[rows, d]`, positives likewise.
        barrier: What measures, an object with `log_ratio`; by default the steerer itself.
        most: The largest T tried; by default the one that moves a row by the median length of `neg`, or 1 for methods
            whose T is a share.
        tolerance: Of the result, relative to `most`.

    Returns:
        T, above 0; 0 if the negatives are there already.

    Raises:
        ValueError: Even the largest T does not lift them that far.
        NotImplementedError: The method has no barrier, and none is given.
    """
    scale = steerer if barrier is None else barrier
    negatives = as_rows(neg, "neg", width=steerer.n_features_in_)
    goal = float(torch.as_tensor(scale.log_ratio(as_rows(pos, "pos", width=steerer.n_features_in_))).median())

    def shortfall(T: float) -> float:
        moved = steerer.flow(negatives.to(steerer.device), T).to(negatives.device)
        return goal - float(torch.as_tensor(scale.log_ratio(moved)).median())

    if shortfall(0.0) <= 0:
        return 0.0
    speed = steerer._speed()
    if most is None:
        median = float(torch.linalg.vector_norm(negatives, dim=1).median())
        most = median / speed if speed else 1.0
    # From below, since beyond its maximum the barrier falls again.
    low, high = 0.0, most / 64
    while shortfall(high) > 0:
        if high >= most:
            raise ValueError(
                f"even T={most:g} leaves the median held-out negative {shortfall(most):.3g} below the median positive; "
                "use another layer, more data, or a larger `most`"
            )
        low, high = high, min(2 * high, most)
    while high - low > tolerance * most:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if shortfall(middle) > 0 else (low, middle)
    return high


def _restored(rows: Tensor, like: Tensor, given: Any) -> Any:
    return as_given(rows.reshape(like.shape).to(given.device if isinstance(given, Tensor) else "cpu"), given)


def warn_of_zero(vector: Tensor, method: str) -> None:
    """Warn where a fit found no direction.

    Args:
        vector: What was fitted.
        method: Name of the method.
    """
    if not bool(vector.any()):
        warnings.warn(f"{method}: the fitted vector is 0, so steering changes nothing", stacklevel=4)


def make_steerer(method: str, **params: Any) -> Steerer:
    """Make a steerer by the name of its method.

    Args:
        method: A key of `STEERERS`, such as `"odesteer"` or `"caa"`.
        params: What its class takes.

    Returns:
        The steerer, not yet fitted.

    Raises:
        ValueError: The method is unknown, or does not take a parameter.
    """
    if method not in STEERERS:
        raise ValueError(f"method={method!r} is not offered; use one of {', '.join(map(repr, sorted(STEERERS)))}")
    kind = STEERERS[method]
    offered = sorted(set(inspect.signature(kind).parameters))
    unknown = sorted(set(params) - set(offered))
    if unknown:
        raise ValueError(
            f"the method {method!r} takes no parameter {', '.join(unknown)}; it takes {', '.join(offered)}"
        )
    return kind(**params)


# The baselines enter the registry, and they are made of the class above.
from bodes_steer import baselines as _baselines  # noqa: E402, F401  # for the line above
