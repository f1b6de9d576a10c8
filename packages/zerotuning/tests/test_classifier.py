import builtins
import warnings
from importlib import reload

import numpy as np
import pytest
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from tiny_task import TASK, examples, talkative_model, word_tokenizer
from zerotuning import ZeroTuningConfig, calibrate
from zerotuning.classifier import ZeroTuningClassifier
from zerotuning.scoring import Scorer

pytestmark = pytest.mark.filterwarnings("ignore:only .* examples", "ignore:the best gamma", "ignore:.*gamma 1 is kept")

DATA = examples(12)
TEXTS = [each.text for each in DATA]
INDICES = [each.label for each in DATA]
WORDS = [TASK.labels[label] for label in INDICES]


@pytest.fixture(scope="module")
def model():
    return talkative_model()


def classifier(model, labels=TASK.labels, **options):
    options = {"template": TASK.template, "grid": (0.2, 4.0), **options}
    return ZeroTuningClassifier(model, word_tokenizer(), labels, **options)


def test_it_calibrates_and_answers_as_the_functions_do(model):
    made = classifier(model).fit(TEXTS, WORDS)
    expected = calibrate(model, word_tokenizer(), DATA, TASK, metric="constrained_accuracy", grid=(0.2, 4.0))
    assert made.config_ == expected.config
    assert made.calibration_.curve == expected.curve
    assert made.classes_.tolist() == ["no", "yes"]
    [answers] = Scorer(model, word_tokenizer(), TASK, DATA).predict([expected.config])
    found = made.predict_proba(TEXTS)
    assert found == pytest.approx(np.array(answers.label_probs)[:, ::-1])
    assert found.sum(axis=1) == pytest.approx(np.ones(len(TEXTS)))
    assert made.predict(TEXTS).tolist() == [TASK.labels[label] for label in answers.constrained]
    assert made.score(TEXTS, WORDS) == answers.scores(DATA).constrained_accuracy.value


@pytest.mark.parametrize(
    ("labels", "y", "classes"),
    [
        (TASK.labels, INDICES, [0, 1]),
        (TASK.labels, np.array(INDICES, dtype=bool), [False, True]),
        (TASK.labels, np.array(INDICES, dtype=np.uint8), [0, 1]),
        ({5: "yes", -5: "no"}, [-5 if label else 5 for label in INDICES], [-5, 5]),
        ({"good": "yes", "bad": "no"}, ["bad" if label else "good" for label in INDICES], ["bad", "good"]),
        (["yes", "no", "w1"], WORDS, ["no", "w1", "yes"]),
    ],
)
def test_classes_are_any_values(model, labels, y, classes):
    made = classifier(model, labels, grid=(4.0,)).fit(np.array(TEXTS)[:, None], y)
    assert made.classes_.tolist() == classes
    words = list(labels.values()) if isinstance(labels, dict) else list(labels)
    assert made.task_.labels == tuple(words)
    # Whatever stands for it, the word is the same.
    of_words = classifier(model, words, grid=(4.0,)).fit(TEXTS, WORDS)
    word_of = dict(labels) if isinstance(labels, dict) else {**dict(enumerate(words)), **{w: w for w in words}}
    assert {type(each) for each in made.classes_.tolist()} == {type(each) for each in classes}
    assert [word_of[each] for each in made.predict(TEXTS).tolist()] == of_words.predict(TEXTS).tolist()


def test_without_classes_it_is_unsupervised(model):
    made = classifier(model, {1: "yes", 0: "no"}, objective="label_entropy").fit(TEXTS)
    assert made.calibration_.mode == "unsupervised"
    assert made.calibration_.metric == "label_entropy"
    assert set(made.predict(TEXTS).tolist()) <= {0, 1}


def test_a_clone_shares_the_model_and_nothing_else(model):
    grid = [0.5, 2.0]
    made = classifier(model, grid=grid, p=0.3).fit(TEXTS, WORDS)
    copy = clone(made)
    assert copy.model is made.model
    assert copy.tokenizer is made.tokenizer
    assert copy.grid == grid
    assert copy.grid is not grid
    assert copy.get_params().keys() == made.get_params().keys()
    assert copy.p == 0.3
    with pytest.raises(NotFittedError):
        copy.predict(TEXTS)
    assert clone(make_pipeline(made))[-1].model is model
    assert copy.set_params(p=0.7) is copy
    assert (copy.p, made.p) == (0.7, 0.3)
    with pytest.raises(ValueError, match="Invalid parameter"):
        copy.set_params(no=1)


def test_metadata_requests_are_cloned(model):
    import sklearn

    with sklearn.config_context(enable_metadata_routing=True):
        made = classifier(model)
        made._metadata_requests = {"kept": [1]}
        copy = clone(made)
    assert copy._metadata_requests == {"kept": [1]}
    assert copy._metadata_requests is not made._metadata_requests


def test_within_cross_validation_pipelines_and_searches(model):
    assert is_classifier(classifier(model))
    scores = cross_val_score(classifier(model), TEXTS, WORDS, cv=2)
    assert scores.shape == (2,)
    assert np.isfinite(scores).all()
    doubled = make_pipeline(FunctionTransformer(lambda texts: [f"{each} w1" for each in texts]), classifier(model))
    doubled.fit(TEXTS, WORDS)
    alone = classifier(model).fit([f"{each} w1" for each in TEXTS], WORDS)
    assert doubled.predict(TEXTS).tolist() == alone.predict([f"{each} w1" for each in TEXTS]).tolist()
    search = GridSearchCV(classifier(model), {"grid": [(4.0,), (1.0,)]}, cv=2).fit(TEXTS, WORDS)
    assert search.best_estimator_.model is model


def test_clones_in_threads_take_turns(model):
    import joblib

    alone = cross_val_score(classifier(model), TEXTS, WORDS, cv=3)
    with joblib.parallel_backend("threading"):
        together = cross_val_score(classifier(model), TEXTS, WORDS, cv=3, n_jobs=3, error_score="raise")
    assert together.tolist() == alone.tolist()


def test_the_tags_say_that_it_takes_texts(model):
    made = classifier(model)
    if not hasattr(super(ZeroTuningClassifier, made), "__sklearn_tags__"):
        pytest.skip("scikit-learn before 1.6 has no such tags")
    tags = made.__sklearn_tags__()
    assert tags.input_tags.string
    assert not tags.input_tags.two_d_array
    assert tags.estimator_type == "classifier"


def test_every_parameter_reaches_the_calibration(model, monkeypatch):
    told = {}

    def note(*_, **options):
        told.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr("zerotuning.classifier.calibrate", note)
    own = {
        "heads": "profile",
        "granularity": "layer",
        "method": "gradient",
        "metric": "log_likelihood",
        "objective": "label_entropy",
        "grid": (1.0, 3.0),
        "refine": True,
        "layers": [1],
        "gamma_probe": 3.0,
        "p": 0.2,
        "combine": "random",
        "operator": "query",
        "seed": 3,
        "batch_rows": 5,
        "progress": True,
    }
    with pytest.raises(KeyboardInterrupt):
        classifier(model, **own).fit(TEXTS, WORDS)
    assert {name: told[name] for name in own} == own


def test_a_default_prompt_names_the_labels(model):
    made = classifier(model, ("w1", "w2", "w3"), template=None)
    made.fit(TEXTS[:3], ["w1", "w2", "w3"])
    assert "w1, w2 or w3" in made.task_.template
    assert made.task_.prompt("w9").endswith("w9\nAnswer:")


def test_warnings_are_passed_on(model):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        classifier(model).fit(TEXTS, WORDS)
    assert any("only 12 examples" in str(each.message) for each in found)


@pytest.mark.parametrize(
    ("labels", "texts", "y", "message"),
    [
        (TASK.labels, "one text", None, "a single one"),
        (TASK.labels, [["a", "b"]], None, r"shape is \(1, 2\)"),
        (TASK.labels, ["a", 3], None, "number 1 is 3"),
        (TASK.labels, ["a", " "], None, "number 1 is ' '"),
        (TASK.labels, ["a", "b"], ["yes"], "2 texts and 1 values"),
        (TASK.labels, ["a", "b"], ["yes", "maybe"], "y holds 'maybe', which is none of .*mapping"),
        (TASK.labels, ["a", "b"], [0, 2], "y holds 2"),
        (TASK.labels, ["a", "b"], [0.5, 0.7], "label type"),
        (TASK.labels, ["a", "b"], ["yes", "yes"], "at least two labels"),
        (TASK.labels, [], None, "texts is empty"),
        ([], ["a", "b"], None, r"two or more words; it is \[\]"),
        ("yes", ["a", "b"], None, "several words"),
        ({0: "yes", "1": "no"}, ["a", "b"], None, "keys of several types"),
    ],
)
def test_what_is_refused(model, labels, texts, y, message):
    with pytest.raises(ValueError, match=message):
        classifier(model, labels, template=None).fit(texts, y)


def test_predictions_run_under_the_configuration(model):
    made = classifier(model).fit(TEXTS, WORDS)
    made.config_ = ZeroTuningConfig.uniform(model, 50.0)
    under = made.predict_proba(TEXTS)
    made.config_ = ZeroTuningConfig.uniform(model, 1.0)
    assert np.abs(under - made.predict_proba(TEXTS)).max() > 1e-3


@pytest.mark.parametrize(
    ("missing", "message"), [("sklearn", r"zerotuning\[sklearn\]"), ("inside_of_it", "inside_of_it")]
)
def test_without_the_extra(monkeypatch, missing, message):
    from zerotuning import classifier as module

    original = builtins.__import__

    def refuse(name, *rest, **more):
        if name == "sklearn.base":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=message):
        reload(module)
