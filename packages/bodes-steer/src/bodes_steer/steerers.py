# ruff: noqa: N802, N803 -- T is the paper's letter and X is that of scikit-learn
"""Steerers: what is fitted to two sets of activations and then moves others towards the first (section 3 of the paper).

All of them have one interface, `Steerer`. The simpler methods that the paper compares with lie in `baselines`.
"""

import copy
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Float
from sklearn.base import BaseEstimator  # type: ignore[import-untyped]  # it ships no types
from torch import Tensor

from bodes_steer.checks import as_given, as_rows, check_classes
from bodes_steer.solver import Trajectory

if TYPE_CHECKING:
    from bodes_steer.files import Origin

# What is moved by more than this share of its own length is no longer an activation that the model would make.
_FLUENT_SHARE = 0.5

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

    def fit(self, pos: Any, neg: Any) -> Self:
        """Learn from activations of both kinds.

        Args:
            pos: `[N+, d]`, activations of what is wanted; tensor or array.
            neg: `[N-, d]`, of what is not.

        Returns:
            Itself.

        Raises:
            ValueError: An empty class, widths that differ, or values that are not finite.
        """
        positive, negative = check_classes(pos, neg)
        self.__dict__.pop("origin_", None)
        self._forget()
        self.n_features_in_ = positive.shape[1]
        norms = torch.linalg.vector_norm(torch.cat([positive, negative]), dim=1)
        self.median_norm_ = norms.median()
        self._fit(positive, negative)
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
            The moved activations, of the same kind, type and shape.

        Raises:
            ValueError: A wrong width, values that are not finite, or a T that is not finite.
            OverflowError: The result does not fit into float16.
        """
        strength = self._strength(T)
        x, whole = self._rows(X)
        moved = self.flow(x, strength)
        self._warn_of_length(x, strength)
        result = x if strength == 0 else moved
        return _restored(cast_back(result, whole.dtype), whole, X)

    @torch.no_grad()
    def vector_field(self, X: Any) -> Any:
        """The velocity at activations.

        Args:
            X: `[..., d]`, tensor or array.

        Returns:
            `v(a)`, of the same kind and shape.

        Raises:
            ValueError: A wrong width, or values that are not finite.
        """
        x, whole = self._rows(X)
        return _restored(cast_back(self._velocity(x.to(self._dtype_for(x))), whole.dtype), whole, X)

    @torch.no_grad()
    def log_ratio(self, X: Any) -> Any:
        """The barrier h, the learned `log p+(a) / p-(a)`: above 0 where an activation looks like a positive one.

        Args:
            X: `[..., d]`, tensor or array.

        Returns:
            `[...]`, of the same kind, in float32 or float64.

        Raises:
            NotImplementedError: The method has no barrier; see `has_barrier`.
            ValueError: A wrong width, or values that are not finite.
        """
        x, whole = self._rows(X)
        return as_given(self._barrier(x.to(self._dtype_for(x))).reshape(whole.shape[:-1]), X)

    @torch.no_grad()
    def trajectory(self, X: Any, T: float | None = None) -> Trajectory:
        """Record the way that rows take.

        Args:
            X: `[rows, d]`, tensor or array.
            T: Strength; the estimator's own by default.

        Returns:
            The states, the barrier along them, and how far the direction turned.

        Raises:
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

    def to(self, device: torch.device | str) -> Self:
        """A steerer whose fitted tensors lie on a device.

        Args:
            device: Where to.

        Returns:
            Itself if they lie there already, else a copy, the same one each time until the steerer is fitted anew.
        """
        wanted = torch.empty(0, device=device).device  # "cuda" means the current one, and tensors name it
        if wanted == self.device:
            return self
        copies: dict[torch.device, Self] = self.__dict__.setdefault("_copies", {})
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

    def __getstate__(self) -> dict[str, Any]:
        """Copies on other devices are made anew where they are needed."""
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_copies"}

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

    def restore(self, state: Mapping[str, Tensor]) -> Self:
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
        self._forget()
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
        """Checked rows on the fitted tensors' device, and the input as a tensor of its own shape and type."""
        self._check_fitted()
        whole = X if isinstance(X, Tensor) else torch.as_tensor(np.asarray(X))
        flat = whole.reshape(-1, whole.shape[-1]) if whole.ndim > 1 else whole.unsqueeze(0)
        x = as_rows(flat, "X", width=self.n_features_in_).detach()
        # What `as_rows` makes of integers is also what comes back.
        return x.to(self.device), whole if whole.is_floating_point() else whole.to(x.dtype)

    def _fitted_dtype(self) -> torch.dtype:
        return self.median_norm_.dtype

    def _dtype_for(self, x: Tensor) -> torch.dtype:
        both = x.dtype == torch.float64 and self._fitted_dtype() == torch.float64
        return torch.float64 if both else torch.float32

    def _warn_of_length(self, x: Tensor, T: float) -> None:
        speed = self._speed()
        if not speed or T == 0:
            return
        far = int((abs(T) * speed > _FLUENT_SHARE * torch.linalg.vector_norm(x, dim=-1)).sum())
        if far:
            warnings.warn(
                f"T={T:g} moves {far} of {len(x)} rows by more than half of their own length, which ruins the fluency "
                f"of a model; the median length is {float(torch.linalg.vector_norm(x, dim=-1).median()):.4g}, use a "
                "smaller T (see absolute_T)",
                stacklevel=4,  # past torch's decorator
            )


def _restored(rows: Tensor, whole: Tensor, given: Any) -> Any:
    return as_given(rows.reshape(whole.shape).to(whole.device), given)


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
    offered = sorted(kind._get_param_names())
    unknown = sorted(set(params) - set(offered))
    if unknown:
        raise ValueError(
            f"the method {method!r} takes no parameter {', '.join(unknown)}; it takes {', '.join(offered)}"
        )
    return kind(**params)


# The baselines enter the registry, and they are made of the class above.
from bodes_steer import baselines as _baselines  # noqa: E402, F401  # for the line above
