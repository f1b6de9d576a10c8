import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pmark.metrics import auc, bootstrap, distinct_n, n_grams, perplexity, rep_n, semantic_entropy, tpr_at_fpr

SCORES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12)


def test_repetition_counts_n_grams_that_came_before():
    assert rep_n("a b c a b c a b c") == pytest.approx(1 - 3 / 7)
    assert rep_n("The end. THE END!", 2) == pytest.approx(1 / 3)
    assert rep_n("all of these words differ") == 0
    assert rep_n("too short") == 0
    assert n_grams("Don't stop-gap 我们", 1) == [("don't",), ("stop-gap",), ("我",), ("们",)]
    with pytest.raises(ValueError, match="n must be at least 1, not 0"):
        rep_n("a", 0)


def test_distinct_counts_over_all_texts_together():
    assert distinct_n(["a b c", "a b d"]) == pytest.approx(3 / 4)
    assert math.isnan(distinct_n(["", "one"]))


@given(SCORES, SCORES)
def test_auc_is_the_share_of_pairs_in_order(positive, negative):
    pairs = [(p > n) + (p == n) / 2 for p in positive for n in negative]
    assert auc(positive, negative) == pytest.approx(np.mean(pairs))


@given(SCORES, SCORES, st.floats(0, 1))
def test_power_is_the_best_that_the_false_positive_rate_allows(positive, negative, fpr):
    thresholds = [*positive, *negative, -math.inf]
    allowed = [t for t in thresholds if np.mean(np.array(negative) > t) <= fpr + 1e-9]
    best = max((np.mean(np.array(positive) > t) for t in allowed), default=0.0)
    # At a rate of 1 everything counts as detected, above any threshold or not.
    assert tpr_at_fpr(positive, negative, fpr) == pytest.approx(best)


def test_power_agrees_with_scikit_learn():
    roc_curve = pytest.importorskip("sklearn.metrics", reason="needs the extra 'evaluation'").roc_curve
    rng = np.random.default_rng(0)
    positive, negative = rng.normal(1.5, 1, 180).round(1), rng.normal(0, 1, 250).round(1)
    false, true, _ = roc_curve(
        np.repeat([1, 0], [180, 250]), np.concatenate([positive, negative]), drop_intermediate=False
    )
    for fpr in (0.01, 0.05, 0.3):
        assert tpr_at_fpr(positive, negative, fpr) == pytest.approx(true[false <= fpr].max())


@pytest.mark.parametrize("scores", [[], [1.0, math.nan]])
def test_scores_that_order_nothing_are_refused(scores):
    with pytest.raises(ValueError, match="negative must be a list of at least one score without NaN"):
        auc([1.0], scores)
    with pytest.raises(ValueError, match="positive must be"):
        tpr_at_fpr(scores, [1.0], 0.01)
    with pytest.raises(ValueError, match="fpr must lie in 0 to 1, not 2"):
        tpr_at_fpr([1.0], [1.0], 2)


def test_the_bootstrap_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(60):
        mean = bootstrap(np.mean, rng.normal(3, 2, 60), draws=200, seed=trial)
        assert mean.low <= mean.value <= mean.high
        covered += mean.low <= 3 <= mean.high
    # 95 % of 60, less four standard deviations.
    assert covered >= 50
    power = bootstrap(lambda a, b: tpr_at_fpr(a, b, 0.05), [3.0] * 20, [0.0] * 50, draws=50)
    assert power == (1.0, 1.0, 1.0)
    again = bootstrap(np.mean, [1.0, 2.0, 4.0], draws=50, seed=7)
    assert again == bootstrap(np.mean, [1.0, 2.0, 4.0], draws=50, seed=7)


def test_semantic_entropy_is_that_of_the_clusters():
    pytest.importorskip("sklearn", reason="needs the extra 'evaluation'")
    rng = np.random.default_rng(0)
    centres = np.eye(4)
    rows = centres[[0] * 20 + [1] * 10 + [2] * 10] + rng.normal(0, 0.01, (40, 4))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    expected = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert semantic_entropy(rows, clusters=3) == pytest.approx(expected)
    assert semantic_entropy(rows, clusters=1) == 0
    with pytest.raises(ValueError, match="clusters must lie in 1 to the number of texts, 40, not 41"):
        semantic_entropy(rows, clusters=41)


def test_semantic_entropy_names_its_extra(block_imports):
    block_imports("sklearn")
    with pytest.raises(ImportError, match=r"pip install 'pmark\[evaluation\]'"):
        semantic_entropy(np.eye(3), clusters=2)


def test_perplexity_judges_what_follows_the_prompt(tiny_models, tiny_tokenizer):
    import torch

    model = tiny_models("llama")
    texts, prompts = ["Hello there.", "Hi.", "A longer text than those.", "Hi."], ["Hello", "", "A longer", "Hi."]
    found = perplexity(texts, model, tiny_tokenizer, prompts=prompts, batch_size=3)
    for text, prompt, value in zip(texts[:3], prompts, found, strict=False):
        ids = tiny_tokenizer(text)["input_ids"]
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        first = 1 + len(prompt.encode())
        losses = [-logs[place - 1, ids[place]].item() for place in range(first, len(ids))]
        assert value == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    assert math.isnan(found[3])
    # Without prompts everything behind the begin-of-text token is judged.
    [whole] = perplexity(["Hi."], model, tiny_tokenizer)
    assert whole == pytest.approx(found[1], rel=1e-4)


def test_perplexity_cuts_what_the_model_cannot_read(tiny_models, tiny_tokenizer):
    model = tiny_models("gpt2", n_positions=16)
    with pytest.warns(UserWarning, match=r"texts\[0\] is longer than the model's 16 positions"):
        [cut] = perplexity(["0123456789abcdefghi"], model, tiny_tokenizer)
    [short] = perplexity(["0123456789abcde"], model, tiny_tokenizer)
    assert cut == pytest.approx(short, rel=1e-5)
    with pytest.raises(ValueError, match=r"texts\[0\] does not begin with its prompt"):
        perplexity(["Hi."], model, tiny_tokenizer, prompts=["Ho"])
