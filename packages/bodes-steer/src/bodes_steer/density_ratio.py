"""The log-density ratio of two classes of activations, as a classifier of scikit-learn."""

import copy
import math
import warnings
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from sklearn.base import BaseEstimator, ClassifierMixin, clone  # type: ignore[import-untyped]  # it ships no types
from sklearn.utils.metaestimators import available_if  # type: ignore[import-untyped]  # it ships no types
from sklearn.utils.multiclass import (  # type: ignore[import-untyped]  # it ships no types
    check_classification_targets,
    type_of_target,
)
from sklearn.utils.validation import (  # type: ignore[import-untyped]  # it ships no types
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
)
from torch import Tensor

from bodes_steer.checks import Rows, as_given, warn_about_classes
from bodes_steer.features import FeatureMap, PolynomialCountSketch, estimator_rows
from bodes_steer.logistic import Blocks, fit_logistic
from bodes_steer.quadratic import Quadratic

DENSE_LIMIT = 400
"""Up to d^2 = 400 n one product with a d x d matrix costs less than the Fourier transforms of n (measured on a CPU, for
batches of 64 rows, n of 2000 and 8000)."""

ROWS = 1024


class LogDensityRatio(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """The barrier `h(a) = log p+(a) / p-(a)`, from a classifier on features of a (section 3.2).

    `h(a) = w . phi(a) + b + log((1 - pi) / pi)`, with pi the share of positives in the training data. The classifier is
    fitted to the optimum of scikit-learn's objective (see `fit_logistic`). Where the feature map is a sketch of degree
    2, h is a quadratic form, and both ways to compute it agree to rounding.

    Args:
        feature_map: Any map of `bodes_steer.features`; cloned at `fit`. None is `PolynomialCountSketch()`.
        classifier: `"lr"`, logistic regression, or `"svm"`, a linear support-vector machine with squared hinge; then h
            is a margin and no log-density ratio, and there are no probabilities.
        C: Weight of the classifier's loss; small means strong shrinkage.
        backend: How h and its gradient are computed: `"fft"`, by the features; `"dense"`, by a d x d matrix, for
            sketches of degree 2; `"auto"`, what costs less by a fixed rule in d and n.
        max_iter: Steps of the classifier's solver at most.
        tol: Largest distance of its objective from the minimum, relatively.
        random_state: Seed of a feature map that has a `random_state` of None.
        feature_memory: Bytes of features that `fit` may keep; of more it computes each block anew in each step.

    Attributes:
        classes_: The two labels; the second is the positive one.
        feature_map_: The fitted map.
        coef_: w, `[n]`, in the type and on the device of the activations at `fit`.
        intercept_: b.
        prior_: pi.
        n_iter_: Steps taken.
        objective_: `0.5 ||w||^2 + C sum loss`.
        gradient_norm_: Norm of its gradient.
        converged_: Whether `tol` was reached.
        n_features_in_: d.
    """

    classes_: npt.NDArray[Any]
    feature_map_: FeatureMap
    coef_: Float[Tensor, " n"]
    intercept_: float
    prior_: float
    n_iter_: int
    objective_: float
    gradient_norm_: float
    converged_: bool
    n_features_in_: int

    def __init__(  # noqa: D107  # the class says it
        self,
        feature_map: FeatureMap | None = None,
        classifier: Literal["lr", "svm"] = "lr",
        C: float = 1.0,  # noqa: N803  # scikit-learn's letter
        backend: Literal["fft", "dense", "auto"] = "auto",
        max_iter: int = 1000,
        tol: float = 1e-6,
        random_state: int | np.random.RandomState | None = None,
        feature_memory: int = 4 * 2**30,
    ) -> None:
        self.feature_map = feature_map
        self.classifier = classifier
        self.C = C
        self.backend = backend
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.feature_memory = feature_memory

    def fit(self, X: Rows, y: Any) -> "LogDensityRatio":  # noqa: N803  # scikit-learn's letter
        """Fits the feature map and the classifier.

        Args:
            X: Activations `[rows, d]` of both classes.
            y: A label for each row; of two values, of which the larger (1 of 0 and 1) is the positive class.

        Returns:
            Itself.

        Raises:
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`; labels that are not of two classes, or not as many as rows; a parameter out
                of range; the dense backend for a map that has none.

        Warns:
            UserWarning: The classifier did not converge; more than 20 rows of one class for each of the other's; or all
                activations are equal.
        """
        self._check()
        if y is None:
            raise ValueError("This LogDensityRatio estimator requires y to be passed, but the target y is None")
        rows = estimator_rows(self, X, reset=True)
        given = _labels(y)
        check_consistent_length(rows, given)
        self.classes_, index = np.unique(given, return_inverse=True)
        if len(self.classes_) != 2:
            raise ValueError(f"y must have two classes; it has {len(self.classes_)} class: {self.classes_.tolist()}")
        positives = int(index.sum())
        warn_about_classes(positives, len(rows) - positives, bool((rows == rows[0]).all()))
        self.prior_ = positives / len(rows)
        self.feature_map_ = self._map().fit(rows)
        if self.backend == "dense" and self.feature_map_.quadratic(rows.new_zeros(self.feature_map_.width)) is None:
            raise ValueError("backend is 'dense'; only a PolynomialCountSketch of degree 2 has a dense form")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = fit_logistic(
                self._blocks(rows),
                torch.from_numpy(index),
                C=self.C,
                max_iter=self.max_iter,
                tol=self.tol,
                loss="logistic" if self.classifier == "lr" else "squared_hinge",
            )
        for each in caught:
            warnings.warn(each.message, stacklevel=2)
        self.coef_, self.intercept_ = found.coef, found.intercept
        self.n_iter_, self.converged_ = found.iterations, found.converged
        self.objective_, self.gradient_norm_ = found.objective, found.gradient_norm
        self._dense: Quadratic | None = None
        self._form()
        return self

    def _check(self) -> None:
        if self.classifier not in ("lr", "svm"):
            raise ValueError(f"classifier is {self.classifier!r}; it must be 'lr' or 'svm'")
        if self.backend not in ("fft", "dense", "auto"):
            raise ValueError(f"backend is {self.backend!r}; it must be 'fft', 'dense' or 'auto'")

    def _map(self) -> FeatureMap:
        if self.feature_map is None:
            return PolynomialCountSketch(random_state=self.random_state)
        made: FeatureMap = clone(self.feature_map)
        if getattr(made, "random_state", self) is None:
            made.set_params(random_state=self.random_state)
        return made

    def _blocks(self, rows: Tensor) -> Blocks:
        if len(rows) * self.feature_map_.width * rows.element_size() <= self.feature_memory:
            return list(self.feature_map_.blocks(rows))
        return lambda: self.feature_map_.blocks(rows)

    @property
    def offset(self) -> float:
        """What stands beside `w . phi(a)` in h: the intercept and the correction for the classes' shares."""
        return self.intercept_ + math.log((1 - self.prior_) / self.prior_)

    def quadratic(self) -> Quadratic | None:
        """The fitted h as a dense quadratic, the prior correction included.

        Returns:
            The same field as `log_ratio` and `grad`, or None where the feature map is no sketch of degree 2.

        Raises:
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        check_is_fitted(self)
        return self.feature_map_.quadratic(self.coef_, self.offset)

    def _form(self) -> Quadratic | None:
        """The quadratic, where it is what this backend computes with."""
        d, n = self.n_features_in_, len(self.coef_)
        if self.backend == "fft" or (self.backend == "auto" and d * d > DENSE_LIMIT * n):
            return None
        if getattr(self, "_dense", None) is None:
            self._dense = self.quadratic()
        return self._dense

    def _values(self, X: Rows) -> Tensor:  # noqa: N803  # scikit-learn's letter
        rows = estimator_rows(self, X, reset=False)
        form = self._form()
        with torch.no_grad():
            if form is not None:
                form = form.to(rows.device, rows.dtype)
                return torch.cat([form.value(part) for part in torch.split(rows, ROWS)])
            w = self.coef_.to(rows)
            return torch.cat([block @ w for block in self.feature_map_.blocks(rows)]) + self.offset

    def log_ratio(self, X: Rows) -> Any:  # noqa: N803  # scikit-learn's letter
        """The barrier h of each row: positive where an activation looks more like the positive class.

        Args:
            X: Activations `[rows, d]`.

        Returns:
            `[rows]`; a tensor for a tensor, else an array.

        Raises:
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`, or another width than at `fit`.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        return as_given(self._values(X), X)

    def grad(self, X: Rows) -> Any:  # noqa: N803  # scikit-learn's letter
        """The gradient of h at each row.

        Args:
            X: Activations `[rows, d]`.

        Returns:
            `[rows, d]`; a tensor for a tensor, else an array.

        Raises:
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`, or another width than at `fit`.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        rows = estimator_rows(self, X, reset=False)
        form = self._form()
        if form is None:
            return as_given(self.feature_map_.vjp(rows, self.coef_), X)
        form = form.to(rows.device, rows.dtype)
        with torch.no_grad():
            return as_given(torch.cat([form.gradient(part) for part in torch.split(rows, ROWS)]), X)

    def decision_function(self, X: Rows) -> Any:  # noqa: N803  # scikit-learn's letter
        """The classifier's score `w . phi(a) + b`, without the prior correction; its sign is the prediction.

        Args:
            X: Activations `[rows, d]`.

        Returns:
            `[rows]`; a tensor for a tensor, else an array.

        Raises:
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`, or another width than at `fit`.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        return as_given(self._scores(X), X)

    def _scores(self, X: Rows) -> Tensor:  # noqa: N803  # scikit-learn's letter
        values = self._values(X)
        return values - (self.offset - self.intercept_)

    def predict(self, X: Rows) -> Any:  # noqa: N803  # scikit-learn's letter
        """The more likely class of each row, at the shares of the classes in the training data.

        Args:
            X: Activations `[rows, d]`.

        Returns:
            Values of `classes_`, `[rows]`; a tensor for a tensor if they are numbers, else an array.

        Raises:
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`, or another width than at `fit`.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        chosen = (self._scores(X) > 0).cpu().numpy().astype(np.intp)
        labels: npt.NDArray[Any] = self.classes_[chosen]
        if isinstance(X, Tensor) and labels.dtype.kind in "iufb":
            return torch.from_numpy(labels).to(X.device)
        return labels

    @available_if(lambda self: self.classifier == "lr")  # type: ignore[untyped-decorator]  # scikit-learn ships no types
    def predict_proba(self, X: Rows) -> Any:  # noqa: N803  # scikit-learn's letter
        """Probabilities of the classes, at their shares in the training data; for `classifier="lr"` only.

        Args:
            X: Activations `[rows, d]`.

        Returns:
            `[rows, 2]`, in the order of `classes_`; a tensor for a tensor, else an array.

        Raises:
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`, or another width than at `fit`.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        scores = self._scores(X)
        return as_given(torch.stack([torch.sigmoid(-scores), torch.sigmoid(scores)], dim=1), X)

    def score(self, X: Rows, y: Any, sample_weight: Any = None) -> float:  # noqa: N803  # sklearn's
        """The share of rows whose class is predicted.

        Args:
            X: Activations `[rows, d]`.
            y: Their labels.
            sample_weight: Weights of the rows, `[rows]`.

        Returns:
            From 0 to 1.

        Raises:
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`, or another width than at `fit`.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        from sklearn.metrics import accuracy_score  # type: ignore[import-untyped]  # it ships no types

        predicted = self.predict(X)
        if isinstance(predicted, Tensor):
            predicted = predicted.cpu().numpy()
        return float(accuracy_score(_labels(y), predicted, sample_weight=sample_weight))

    def calibration_curve(
        self,
        X: Rows,  # noqa: N803  # scikit-learn's letter
        y: Any,
        n_bins: int = 10,
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """How often rows are positive, against how probable the classifier holds it.

        Args:
            X: Activations `[rows, d]`, other than those of `fit`.
            y: Their labels.
            n_bins: Bins of equal width.

        Returns:
            For each bin that holds rows: the share of positives, and the mean predicted probability.

        Raises:
            AttributeError: The classifier is `"svm"`, which has no probabilities.
            TypeError: As `checks.as_rows`.
            ValueError: As `checks.as_rows`, or another width than at `fit`.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        from sklearn.calibration import calibration_curve  # type: ignore[import-untyped]  # it ships no types

        probabilities = self.predict_proba(X)
        if isinstance(probabilities, Tensor):
            probabilities = probabilities.cpu().numpy()
        observed, predicted = calibration_curve(
            _labels(y), probabilities[:, 1], n_bins=n_bins, pos_label=self.classes_[1]
        )
        return observed, predicted

    def to(self, device: torch.device | str) -> "LogDensityRatio":
        """A copy whose fitted tensors lie on a device.

        Args:
            device: Where.

        Returns:
            The copy; parameters are shared.
        """
        made = copy.copy(self)
        for name in ("feature_map_", "coef_", "_dense"):
            if getattr(self, name, None) is not None:
                setattr(made, name, getattr(self, name).to(device))
        return made

    def __sklearn_tags__(self) -> Any:
        """That there are two classes."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


def _labels(y: Any) -> npt.NDArray[Any]:
    """Labels as an array, refused where they are none of two classes."""
    array: npt.NDArray[Any] = column_or_1d(y.detach().cpu().numpy() if isinstance(y, Tensor) else y, warn=True)
    check_classification_targets(array)
    kind = type_of_target(array, input_name="y")
    if kind != "binary":
        raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
    return array
