"""The method as a classifier of scikit-learn; needs the extra `sklearn`."""

import copy
import threading
import warnings
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import nn

from zerotuning.calibration import DEFAULT_GRID, calibrate
from zerotuning.config import Mode
from zerotuning.profiling import Combine, Method, UnitKind
from zerotuning.scoring import Metric, Objective, Scorer
from zerotuning.tasks import Example, TaskSpec

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, clone  # type: ignore[import-untyped]  # it ships no types
    from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]  # it ships no types
    from sklearn.utils.validation import check_is_fitted, column_or_1d  # type: ignore[import-untyped]  # it ships no types
except ModuleNotFoundError as _error:
    if _error.name is None or _error.name.partition(".")[0] != "sklearn":
        raise
    raise ImportError("ZeroTuningClassifier needs the extra 'sklearn': pip install 'zerotuning[sklearn]'") from None

Labels = Sequence[str] | Mapping[Any, str]

# Clones share their model, which carries one configuration at a time.
_turns: "weakref.WeakKeyDictionary[nn.Module, threading.Lock]" = weakref.WeakKeyDictionary()


class ZeroTuningClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # its classes have no types
    """Classifies texts by the likelihood of label words, under a configuration calibrated by `fit`.

    Fits into `cross_val_score`, `GridSearchCV` and `Pipeline`. `clone` copies all parameters but model and tokenizer,
    which all clones share, as nothing here changes them. Clones in threads take turns; other processes, as `n_jobs` has
    them, get a copy of the model each.

    Attributes:
        classes_: What `predict` answers with, sorted.
        task_: Prompt and label words.
        config_: The configuration found, see `ZeroTuningConfig`.
        calibration_: How it was found, see `CalibrationResult`.
    """

    _SHARED = ("model", "tokenizer")

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        labels: Labels,
        template: str | None = None,
        *,
        heads: Literal["uniform", "profile"] = "uniform",
        granularity: UnitKind = "head_index",
        method: Method = "exhaustive",
        metric: Metric = "constrained_accuracy",
        objective: Objective = "entropy",
        grid: Sequence[float] = DEFAULT_GRID,
        refine: bool = False,
        layers: Sequence[int] | None = None,
        gamma_probe: float = 2.0,
        p: float = 0.4,
        combine: Combine = "dominant",
        operator: Mode = "exact",
        seed: int = 0,
        batch_rows: int = 16,
        progress: bool = False,
    ) -> None:
        """Take note of the parameters; `fit` checks them.

        Args:
            model: A decoder-only transformers model.
            tokenizer: Its tokenizer.
            labels: The label words; or a mapping to them from the values that `y` has and `predict` answers with.
                Without a mapping `y` holds label words or their indices.
            template: The prompt, with `{text}` where the text goes; one that names the label words if not given.
            heads: See `calibrate`, also for what follows.
            granularity: What a unit of the profile is.
            method: How to profile.
            metric: What to maximise with `y`. The default is the accuracy of `predict` itself.
            objective: What to minimise without `y`.
            grid: Factors to try.
            refine: Go on between the neighbours of the best factor.
            layers: The layers to scale.
            gamma_probe: The factor for profiling.
            p: Share of the units to scale after profiling.
            combine: Which units to scale.
            operator: Which operator, see `ZeroTuningConfig.mode`.
            seed: For `combine="random"`.
            batch_rows: Rows in one forward.
            progress: Show a progress bar on standard error.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.labels = labels
        self.template = template
        self.heads = heads
        self.granularity = granularity
        self.method = method
        self.metric = metric
        self.objective = objective
        self.grid = grid
        self.refine = refine
        self.layers = layers
        self.gamma_probe = gamma_probe
        self.p = p
        self.combine = combine
        self.operator = operator
        self.seed = seed
        self.batch_rows = batch_rows
        self.progress = progress

    def fit(self, texts: Sequence[str] | npt.ArrayLike, y: npt.ArrayLike | None = None) -> "ZeroTuningClassifier":
        """Calibrate.

        Args:
            texts: The texts, one for each item; an array may have one column.
            y: Their classes. Without them the calibration is unsupervised, by `objective`.

        Returns:
            Itself.

        Raises:
            ValueError: Texts that are none, classes that the labels do not tell, or whatever `calibrate` refuses.
        """
        content = _texts(texts)
        words, values = self._words(y)
        if len(words) < 2 or not all(isinstance(word, str) for word in words):
            raise ValueError(f"labels must be two or more words; it is {self.labels!r}")
        task = TaskSpec(name="classifier", template=self.template or _default_template(words), labels=words)
        index = {value: position for position, value in enumerate(values)}
        labels: list[int] | None = None
        if y is not None:
            given = column_or_1d(y)
            check_classification_targets(given)
            if len(given) != len(content):
                raise ValueError(f"there are {len(content)} texts and {len(given)} values of y")
            if unknown := [each for each in dict.fromkeys(given.tolist()) if each not in index]:
                raise ValueError(
                    f"y holds {unknown[0]!r}, which is none of {list(values)}; give labels as a mapping from the "
                    "values of y to label words"
                )
            labels = [index[each] for each in given.tolist()]
        with self._turn():
            result = calibrate(
                self.model,
                self.tokenizer,
                [Example(text, None if labels is None else labels[number]) for number, text in enumerate(content)],
                task,
                mode="unsupervised" if labels is None else "supervised",
                metric=self.metric,
                objective=self.objective,
                heads=self.heads,
                granularity=self.granularity,
                method=self.method,
                grid=self.grid,
                refine=self.refine,
                layers=self.layers,
                gamma_probe=self.gamma_probe,
                p=self.p,
                combine=self.combine,
                operator=self.operator,
                seed=self.seed,
                batch_rows=self.batch_rows,
                progress=self.progress,
            )
        for each in result.warnings:
            warnings.warn(each, stacklevel=2)
        self.classes_, order = np.unique(np.array(values), return_index=True)
        self._order = order.tolist()
        self.task_, self.calibration_, self.config_ = task, result, result.config
        return self

    def predict_proba(self, texts: Sequence[str] | npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Probabilities of the classes, by the likelihoods of their label words.

        Args:
            texts: As for `fit`.

        Returns:
            `[items, classes]`, in the order of `classes_`; rows sum to 1.

        Raises:
            ValueError: Texts that are none.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        check_is_fitted(self)
        scorer = Scorer(
            self.model,
            self.tokenizer,
            self.task_,
            _texts(texts),
            batch_rows=self.batch_rows,
            reuse_layers=False,
        )
        with self._turn():
            [answers] = scorer.predict([self.config_])
        return np.array(answers.label_probs, dtype=np.float64)[:, self._order]

    def predict(self, texts: Sequence[str] | npt.ArrayLike) -> npt.NDArray[Any]:
        """The most likely class of each text.

        Args:
            texts: As for `fit`.

        Returns:
            Values of `classes_`.

        Raises:
            ValueError: Texts that are none.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        probabilities = self.predict_proba(texts)
        chosen: npt.NDArray[Any] = self.classes_[probabilities.argmax(axis=1)]
        return chosen

    def __sklearn_is_fitted__(self) -> bool:
        """Whether `fit` was called."""
        return hasattr(self, "config_")

    def __sklearn_tags__(self) -> Any:
        """That the input are texts."""
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.one_d_array, tags.input_tags.two_d_array = True, False
        return tags

    def __sklearn_clone__(self) -> "ZeroTuningClassifier":
        """An unfitted copy on the same model: a model is large, and not changed."""
        params = self.get_params(deep=False)
        made = type(self)(
            **{name: value if name in self._SHARED else clone(value, safe=False) for name, value in params.items()}
        )
        # What `set_fit_request` and its like have noted, as in scikit-learn's own way of cloning.
        for name in ("_metadata_requests", "_sklearn_output_config"):
            if hasattr(self, name):
                setattr(made, name, copy.deepcopy(getattr(self, name)))
        return made

    def _words(self, y: npt.ArrayLike | None) -> tuple[tuple[str, ...], tuple[Hashable, ...]]:
        """The label words, and the value of `y` that stands for each."""
        if isinstance(self.labels, Mapping):
            values = tuple(self.labels)
            if len({type(value) for value in values}) > 1:
                raise ValueError(f"labels has keys of several types ({values!r}); they must be of one")
            return tuple(self.labels.values()), values
        if isinstance(self.labels, str):
            raise ValueError(f"labels must be several words; it is the text {self.labels!r}")  # noqa: TRY004  # a wrong value
        words = tuple(self.labels)
        if y is None:
            return words, words
        # Indices stand for words unless words are given.
        given = np.asarray(y).ravel().tolist()
        if len(words) == 2 and all(isinstance(each, bool) for each in given):
            return words, (False, True)
        return words, tuple(range(len(words))) if all(isinstance(each, int) for each in given) else words

    def _turn(self) -> threading.Lock:
        # As one step, so that two threads get the same one.
        return _turns.setdefault(self.model, threading.Lock())


def _default_template(words: Sequence[str]) -> str:
    return f"Choose what fits the text: {', '.join(words[:-1])} or {words[-1]}.\nText: {{text}}\nAnswer:"


def _texts(texts: Any) -> list[str]:
    if isinstance(texts, str):
        raise ValueError("texts must be a sequence of texts; it is a single one")  # noqa: TRY004  # scikit-learn has it so
    content = np.asarray(texts, dtype=object)
    if content.ndim == 2 and content.shape[1] == 1:
        content = content[:, 0]
    if content.size == 0:
        raise ValueError("texts is empty; at least one text is needed")
    if content.ndim != 1:
        raise ValueError(f"texts must have one dimension, or one column; its shape is {content.shape}")
    for number, each in enumerate(content):
        if not isinstance(each, str) or not each.strip():
            raise ValueError(f"texts must hold texts that are not empty; number {number} is {each!r}")
    return [str(each) for each in content]
