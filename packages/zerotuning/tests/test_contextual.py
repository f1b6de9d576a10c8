import math

import pytest
import torch
from tiny_task import TASK, examples, talkative_model, word_tokenizer
from zerotuning import TaskSpec, ZeroTuningConfig
from zerotuning.contextual import calibrate_label_log_probs, contextual_calibration
from zerotuning.evaluation import compare
from zerotuning.scoring import Scorer

DATA = examples(8)


def log(rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def test_probabilities_are_divided_by_those_of_nothing():
    # (0.6, 0.4) / (0.75, 0.25) = (0.8, 1.6).
    found = calibrate_label_log_probs(log([[0.6, 0.4], [0.3, 0.1]]), log([[0.75, 0.25]]))
    assert torch.allclose(found.exp(), torch.tensor([[1 / 3, 2 / 3], [0.5, 0.5]], dtype=torch.float64))


def test_texts_without_content_are_averaged_as_probabilities():
    # (0.9, 0.1) and (0.2, 0.2), normalised (0.5, 0.5): mean (0.7, 0.3).
    found = calibrate_label_log_probs(log([[0.7, 0.3]]), log([[0.9, 0.1], [0.2, 0.2]]))
    assert torch.allclose(found.exp(), torch.tensor([[0.5, 0.5]], dtype=torch.float64))


def test_labels_that_an_item_lacks_stay_impossible():
    found = calibrate_label_log_probs(log([[0.5, 0.25, 0.0]]), log([[0.25, 0.25, 0.5]]))
    assert torch.allclose(found.exp(), torch.tensor([[2 / 3, 1 / 3, 0]], dtype=torch.float64))


def test_what_cannot_be_divided_by():
    with pytest.raises(ValueError, match="content_free is empty"):
        calibrate_label_log_probs(log([[0.5, 0.5]]), torch.zeros(0, 2))
    with pytest.raises(ValueError, match="above 0"):
        calibrate_label_log_probs(log([[0.5, 0.5]]), log([[1.0, 0.0]]))
    with pytest.raises(ValueError, match="content_free is empty"):
        contextual_calibration(talkative_model(), word_tokenizer(), TASK, DATA, content_free=())


def test_baseline_on_a_model():
    model, tokenizer = talkative_model(), word_tokenizer()
    config = ZeroTuningConfig.per_head(model, {1: 3.0})
    for used in (None, config):
        vanilla = used or ZeroTuningConfig.uniform(model, 1.0)
        found = contextual_calibration(model, tokenizer, TASK, DATA, content_free=("w5", ""), config=used)
        plain, nothing = (Scorer(model, tokenizer, TASK, items).predict([vanilla])[0] for items in (DATA, ["w5", ""]))
        favour = [sum(each) / 2 for each in zip(*nothing.label_probs, strict=True)]
        for before, after in zip(plain.label_probs, found.label_probs, strict=True):
            weights = [p / q for p, q in zip(before, favour, strict=True)]
            assert after == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-6)
        assert found.entropies == plain.entropies
        # Always one of the words, so everything parses.
        assert found.parsed == found.constrained
        assert compare(DATA, plain, found).tuned.parse_rate.value == 1


def test_multiple_choice_is_asked_about_nothing_too():
    task = TaskSpec(
        "choice", "{text} {choices} Answer:", ("A", "B", "C"), kind="multiple_choice", choice_columns=("choices",)
    )
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["A", "B", "C"])
    data = [type(DATA[0])("w1", 0, ("w2", "w3"))]
    found = contextual_calibration(talkative_model(), tokenizer, task, data)
    assert found.label_log_probs[0][2] == -math.inf
    assert sum(found.label_probs[0]) == pytest.approx(1)
