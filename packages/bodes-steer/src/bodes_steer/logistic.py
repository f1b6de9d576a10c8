"""Regularised linear classifiers over features that need not fit into memory, by L-BFGS on a streamed objective."""

import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from bodes_steer.features import block_rows

Blocks: TypeAlias = Tensor | Sequence[Tensor] | Callable[[], Iterable[Tensor]]
"""Features `[rows, n]`: whole, in blocks of rows, or as a function that yields the same blocks at each call."""

Loss: TypeAlias = Literal["logistic", "squared_hinge"]

PARTIAL_BLOCKS = 8
"""Gradients of so many blocks are added up in the type of the features before they go into the float64 sum."""

HISTORY = 50
"""Steps that L-BFGS remembers: more than is usual, since a vector costs little beside a pass over the features."""

ROUNDING = 1e-8
"""A gradient of this share of the first one is as small as float64 can tell, if no step makes it smaller."""


@dataclasses.dataclass(frozen=True, eq=False)
class LogisticFit:
    """A fitted linear classifier.

    Attributes:
        coef: Weights w, in the type and on the device of the features.
        intercept: b; 0 if none was to be fitted.
        objective: `0.5 ||w||^2 + C sum loss` there.
        gradient_norm: Euclidean norm of the objective's gradient there, the intercept's part included.
        iterations: Steps of L-BFGS taken.
        converged: Whether the objective is within `tol` of its minimum, relatively, or as near as float64 can tell.
    """

    coef: Float[Tensor, " n"]
    intercept: float
    objective: float
    gradient_norm: float
    iterations: int
    converged: bool


def fit_logistic(
    blocks: Blocks,
    labels: Bool[Tensor, " rows"] | Int[Tensor, " rows"] | Float[Tensor, " rows"],
    *,
    C: float = 1.0,  # noqa: N803  # scikit-learn's letter
    fit_intercept: bool = True,
    max_iter: int = 1000,
    tol: float = 1e-6,
    loss: Loss = "logistic",
) -> LogisticFit:
    """Minimises `0.5 ||w||^2 + C sum_i loss(y_i (w . phi_i + b))`, the objective of scikit-learn's classifiers.

    `"logistic"` is `log(1 + exp(-m))`, as `LogisticRegression`; `"squared_hinge"` is `max(0, 1 - m)^2`, as `LinearSVC`.
    The intercept is penalised in neither. `LinearSVC` does penalise it, which makes its result depend on a constant
    that is added to all features; this is a deviation from it (with `fit_intercept=False` the two agree).

    Each evaluation reads each block once, for the value and the gradient. The features' mean is taken out of them on
    the way, which changes the intercept only and spares many steps. Since the objective is 1-strongly convex in w, half
    the squared gradient bounds its distance from the minimum, and the search stops when that is below `tol` of the
    objective (the intercept's part is that of its parabola). Float32 features are multiplied in float32; the end is
    checked in float64, each block cast for itself, and where float32 was too coarse for `tol` the search goes on so.

    Args:
        blocks: Features: a tensor `[rows, n]`, a sequence of blocks of its rows, or a function that yields such blocks
            and will be called once for each evaluation.
        labels: True or 1 for the positive class, False or 0 for the other, in the order of the rows.
        C: Weight of the loss; large means little shrinkage.
        fit_intercept: Whether there is an intercept b.
        max_iter: Steps of L-BFGS at most.
        tol: Largest distance of the objective from its minimum, relative to the objective.
        loss: Which loss.

    Returns:
        The weights and how good they are.

    Raises:
        ValueError: A parameter out of range, labels that are not of two classes, or blocks that have not as many rows
            as there are labels.

    Warns:
        UserWarning: The search ended before it reached `tol`; says the gradient's norm.
    """
    if not (math.isfinite(C) and C > 0):
        raise ValueError(f"C is {C!r}; it must be a number above 0")
    if not tol > 0:
        raise ValueError(f"tol is {tol!r}; it must be above 0")
    if max_iter < 1:
        raise ValueError(f"max_iter is {max_iter!r}; it must be at least 1")
    if loss not in ("logistic", "squared_hinge"):
        raise ValueError(f"loss is {loss!r}; it must be 'logistic' or 'squared_hinge'")
    if not bool(((labels == 0) | (labels == 1)).all()) or bool((labels == labels[:1]).all()):
        raise ValueError(
            f"labels must be 0 and 1, both present; they are {sorted(set(labels[:1000].tolist()))[:5]} among the first "
            f"{min(len(labels), 1000)}"
        )
    objective = _Objective(_stream(blocks), labels, C, fit_intercept, loss)
    search = _Search(objective, tol)
    point = search.run(objective.start(), max_iter)
    if objective.dtype != torch.float64:
        objective.precise = True
        point = search.run(point, max_iter - search.iterations)
    norm = search.gradient_norm
    if not search.converged:
        warnings.warn(
            f"the classifier did not converge in {search.iterations} steps: the gradient's norm is {norm:.3g}, the "
            f"objective {search.value:.6g}; raise max_iter, or scale the features",
            stacklevel=2,
        )
    coef, intercept = objective.split(point)
    return LogisticFit(
        coef=torch.from_numpy(coef).to(objective.device, objective.dtype),
        intercept=intercept,
        objective=search.value,
        gradient_norm=norm,
        iterations=search.iterations,
        converged=search.converged,
    )


def _stream(blocks: Blocks) -> Callable[[], Iterable[Tensor]]:
    if isinstance(blocks, Tensor):
        parts = torch.split(blocks, block_rows(blocks.device))
        return lambda: parts
    if callable(blocks):
        return blocks
    return lambda: blocks


class _Objective:
    """The objective in w and the intercept of centred features, as one float64 vector."""

    def __init__(
        self,
        stream: Callable[[], Iterable[Tensor]],
        labels: Tensor,
        C: float,  # noqa: N803  # scikit-learn's letter
        fit_intercept: bool,
        loss: Loss,
    ) -> None:
        self.stream, self.C, self.fit_intercept, self.loss = stream, C, fit_intercept, loss
        self.precise = False
        total: Tensor | None = None
        rows = 0
        for block in stream():
            part = block.sum(dim=0).double()
            total = part if total is None else total + part
            rows += len(block)
            self.device, self.dtype = block.device, block.dtype
        if total is None or rows != len(labels):
            raise ValueError(f"blocks have {rows} rows; there are {len(labels)} labels")
        self.labels = labels.to(self.device, torch.float64)
        # Of features far from the origin the intercept and the weights are hard to tell apart, which costs steps.
        self.mean = total / rows if fit_intercept else torch.zeros_like(total)

    def start(self) -> npt.NDArray[np.float64]:
        """No weights, and the intercept that is best then."""
        point = np.zeros(len(self.mean) + self.fit_intercept)
        if self.fit_intercept:
            share = float(self.labels.mean())
            point[-1] = math.log(share / (1 - share)) if self.loss == "logistic" else 2 * share - 1
        return point

    def split(self, point: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], float]:
        """The weights, and the intercept of features that are not centred."""
        if not self.fit_intercept:
            return point, 0.0
        return point[:-1], float(point[-1] - point[:-1] @ self.mean.cpu().numpy())

    def __call__(self, point: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64], float]:
        """Value, gradient, and the second derivative with respect to the intercept."""
        coef, intercept = self.split(point)
        weights = torch.from_numpy(coef).to(self.device)
        w = weights if self.precise else weights.to(self.dtype)
        gradient = torch.zeros_like(weights)
        partial = torch.zeros_like(w)
        parts: list[Tensor] = []
        first = 0
        for stored in self.stream():
            block = stored.to(w.dtype)
            logits = (block @ w).double() + intercept
            residuals = self._residuals(logits, self.labels[first : first + len(block)])
            partial.addmv_(block.T, residuals.to(w.dtype))
            parts.append(logits)
            first += len(block)
            if len(parts) % PARTIAL_BLOCKS == 0:
                gradient += partial
                partial.zero_()
        gradient += partial
        logits = torch.cat(parts)
        losses, curvatures = self._losses(logits)
        slope = self._residuals(logits, self.labels).sum()
        total = 0.5 * float(weights @ weights) + self.C * float(losses.sum())
        out = (weights + self.C * (gradient - slope * self.mean)).cpu().numpy()
        if self.fit_intercept:
            out = np.append(out, self.C * float(slope))
        return total, out, self.C * float(curvatures.sum())

    def _residuals(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The losses' first derivatives with respect to the logits."""
        if self.loss == "logistic":
            return torch.sigmoid(logits) - labels
        signs = 2 * labels - 1
        return -2 * signs * (1 - signs * logits).clamp_min(0)

    def _losses(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of all rows, and their second derivatives."""
        if self.loss == "logistic":
            probabilities = torch.sigmoid(logits)
            losses = functional.softplus(logits, threshold=700) - self.labels * logits
            return losses, probabilities * (1 - probabilities)
        short = (1 - (2 * self.labels - 1) * logits).clamp_min(0)
        return short.square(), 2 * (short > 0).double()


class _Search:
    """L-BFGS until the bound on the distance from the minimum is small enough."""

    def __init__(self, objective: _Objective, tol: float) -> None:
        self.objective, self.tol = objective, tol
        self.iterations = 0
        self.converged = False
        self.value, self.gradient_norm = math.inf, math.inf
        self._scale = 0.0

    def _note(self, point: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        value, gradient, curvature = self.objective(point)
        weights = gradient[:-1] if self.objective.fit_intercept else gradient
        bound = 0.5 * float(weights @ weights)
        if self.objective.fit_intercept:
            # The minimum over the intercept keeps the strong convexity in w; its own distance is that of its parabola.
            bound += 0.5 * float(gradient[-1]) ** 2 / max(curvature, sys.float_info.min)
        self._last = point.copy(), value, float(np.linalg.norm(gradient)), bound
        return value, gradient

    def run(self, point: npt.NDArray[np.float64], max_iter: int) -> npt.NDArray[np.float64]:
        """Searches from a point and returns the best one found."""
        from scipy.optimize import minimize  # type: ignore[import-untyped]  # scipy ships no types

        def watch(intermediate_result: Any) -> None:
            self.iterations += 1
            if np.array_equal(intermediate_result.x, self._last[0]) and self._accept():
                raise StopIteration

        before = self.iterations
        self._note(point)
        self._scale = max(self._scale, self._last[2])
        if not self._accept() and max_iter > 0:
            found = minimize(
                self._note,
                point,
                jac=True,
                method="L-BFGS-B",
                callback=watch,
                # Only the bound is to end the search, or a step that no longer leads down.
                options={"maxiter": max_iter, "maxfun": 20 * max_iter, "maxcor": HISTORY, "ftol": 0.0, "gtol": 0.0},
            )
            if not np.array_equal(found.x, self._last[0]):
                self._note(found.x)
            # Where the loss far outweighs the penalty the bound is loose, and rounding can end the search before it.
            self._accept(stalled=self.iterations - before < max_iter)
        return self._last[0]

    def _accept(self, stalled: bool = False) -> bool:
        _, self.value, self.gradient_norm, bound = self._last
        self.converged = bound <= self.tol * self.value
        if stalled and (self.objective.precise or self.objective.dtype == torch.float64):
            self.converged |= self.gradient_norm <= ROUNDING * self._scale
        return self.converged
