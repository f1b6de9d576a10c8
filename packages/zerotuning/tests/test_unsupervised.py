import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_task import TASK, answers, sink_model, talkative_model, word_tokenizer
from zerotuning import DEFAULT_GRID, Example, ZeroTuningConfig, calibrate, reweight
from zerotuning.metrics import UNPARSED, histogram_entropy
from zerotuning.scoring import Scorer, distribution_entropy

TEXTS = [" ".join([word] * 3) for word in ("w0", "w1")] * 50
LABELLED = [Example(text, index % 2) for index, text in enumerate(TEXTS)]


def peak():
    """The right label keeps a logit of 6; the other words rise to both sides of s = 1/4, which gamma = 4 gives."""
    labels = dict.fromkeys(["yes", "no"], (6 - 4, 4))
    return sink_model(
        {
            **labels,
            **{f"w{index}": (-20 / 4, 20) for index in range(10, 18)},
            **{f"w{index}": (20 / 4, -20) for index in range(20, 28)},
        },
        text=4,
    )


def collapse():
    """With gamma "yes" rises whatever the text is, and is certain until other words overtake it."""
    return sink_model(
        {"yes": (2 - 60 / 13, 60), "no": (2, 0), **{f"w{index}": (-60, 200) for index in range(10, 18)}}, text=1
    )


def run(model, data=TEXTS, **options):
    return calibrate(model, word_tokenizer(), data, TASK, mode="unsupervised", batch_rows=128, **options)


def test_entropy_of_a_row_is_not_monotone_in_gamma():
    weights = torch.tensor([[[[0.2, 0.4, 0.4]]]], dtype=torch.float64)
    found = [
        float(distribution_entropy(reweight(weights, torch.tensor([math.log(gamma)], dtype=torch.float64)).log()))
        for gamma in (1 / 4, 1 / 2, 1, 2, 4)
    ]
    assert found == pytest.approx([0.876092, 0.964963, 1.054920, 1.098612, 1.039721], abs=1e-6)
    # The maximum is where a_0' / (1 - a_0') = exp(-H_rest), here 1 / 2.
    assert max(found) == pytest.approx(math.log(3))


@given(st.floats(0.05, 0.9), st.floats(0.05, 0.95))
def test_entropy_is_greatest_where_the_rest_says(initial, share):
    rest = torch.tensor([share, 1 - share], dtype=torch.float64)
    weights = torch.cat([torch.tensor([initial], dtype=torch.float64), (1 - initial) * rest])
    at = -float(distribution_entropy(rest.log())) - math.log(initial / (1 - initial))
    below, greatest, above = (
        float(distribution_entropy(reweight(weights[None, None, None], torch.tensor([at + step]).double()).log()))
        for step in (-0.05, 0, 0.05)
    )
    assert max(below, above) < greatest


def test_entropy_of_impossible_outcomes():
    assert float(distribution_entropy(torch.tensor([0.0, -torch.inf]))) == 0
    assert distribution_entropy(torch.tensor([0.5, 0.5, 0.0]).log()).item() == pytest.approx(math.log(2))
    assert distribution_entropy(torch.tensor([torch.nan, 0.0])).isnan()


def test_spread_of_answers():
    assert histogram_entropy([5, 5]) == pytest.approx(math.log(2))
    assert histogram_entropy([3, 1]) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert [histogram_entropy(each) for each in ([7, 0], [0, 0], [])] == [0, 0, 0]


def test_label_entropy_is_renormalised():
    found = answers([0, 1])
    first = 1 / (1 + math.exp(-2))
    expected = -first * math.log(first) - (1 - first) * math.log(1 - first)
    assert found.label_entropies == pytest.approx([expected] * 2)
    assert found.label_probs[1] == pytest.approx((1 - first, first))
    assert found.values("label_entropy") == pytest.approx([-expected] * 2)
    assert found.values("entropy") == [-1.0, -1.0]


@pytest.mark.parametrize("heads", ["uniform", "profile"])
def test_search_finds_the_gamma_of_the_sink(heads):
    # Oracle: the entropy is lowest at gamma 4, found within one step of the grid.
    result = run(peak(), heads=heads)
    steps = [DEFAULT_GRID.index(gamma) for gamma in (4.0, result.gamma)]
    assert abs(steps[0] - steps[1]) <= 1
    assert result.warnings == ()
    assert result.config.meta["calibration"]["mode"] == "unsupervised"
    best = next(point for point in result.curve if point.gamma == result.gamma)
    assert best.entropy == min(point.entropy for point in result.curve) == -best.value
    assert best.label_counts == (50, 50)
    assert best.scores is None


def test_refinement_comes_nearer():
    coarse, fine = (run(peak(), grid=[1.5, 3.0, 9.0], refine=refine) for refine in (False, True))
    assert len(fine.curve) == len(coarse.curve) + 6
    assert [point.gamma for point in fine.curve] == sorted(point.gamma for point in fine.curve)
    entropy = {point.gamma: point.entropy for point in fine.curve}
    assert entropy[fine.gamma] < entropy[coarse.gamma]
    assert abs(math.log(fine.gamma / 4)) < 0.15 < abs(math.log(coarse.gamma / 4))


def test_collapse_is_refused():
    # Oracle: the lowest entropy is that of a constant answer, inside the grid.
    result = run(collapse())
    lowest = min(result.curve, key=lambda point: point.entropy)
    assert lowest.gamma not in (1, DEFAULT_GRID[0], DEFAULT_GRID[-1])
    assert lowest.entropy < 0.05
    assert 0 in lowest.label_counts
    assert result.gamma == 1.0
    assert result.config.is_identity
    [warning] = result.warnings
    assert "collapse onto few labels" in warning


@pytest.mark.parametrize(
    ("vanilla", "best", "kept"),
    [
        # Entropies of 3:7 and 1:9 are 88 % and 47 % of that of 1:1.
        ([0] * 5 + [1] * 5, [0] * 3 + [1] * 7, True),
        ([0] * 5 + [1] * 5, [0] * 1 + [1] * 9, False),
        ([0] * 10, [1] * 10, True),
        # Nothing but a few answers parses any more; or at last all do.
        ([0] * 5 + [1] * 5, [0, 1] + [UNPARSED] * 8, False),
        ([0, 1] + [UNPARSED] * 8, [0] * 5 + [1] * 5, True),
        ([0] * 5 + [1] * 5, [UNPARSED] * 10, False),
    ],
)
def test_how_far_answers_may_collapse(monkeypatch, vanilla, best, kept):
    def predict(self, configs, *, advance):
        found = {1.0: (vanilla, 1.0), 2.0: (best, 0.5), 3.0: (vanilla, 0.8)}
        chosen = [found[round(float(config.log_gamma[0, 0].exp()), 3)] for config in configs]
        return [dataclasses.replace(answers(parsed, vanilla), entropies=(value,) * 10) for parsed, value in chosen]

    monkeypatch.setattr(Scorer, "predict", predict)
    result = run(talkative_model(), TEXTS[:10], grid=[2.0, 3.0])
    assert result.gamma == (2.0 if kept else 1.0)
    assert any("collapse" in each for each in result.warnings) == (not kept)


def test_an_edge_of_the_grid_is_refused():
    result = run(peak(), grid=[2.0, 3.0])
    assert result.gamma == 1.0
    assert any("edge of the grid" in each for each in result.warnings)


def test_labels_are_of_no_account():
    plain = run(peak(), grid=[2.0, 4.0, 6.0])
    labelled = run(peak(), LABELLED, grid=[2.0, 4.0, 6.0])
    assert labelled.config == plain.config
    assert labelled.curve[-1].scores.accuracy.value is not None
    assert [point.entropy for point in labelled.curve] == [point.entropy for point in plain.curve]
    single = run(peak(), LABELLED[::2], grid=[2.0])
    assert len(single.curve) == 2


def test_label_entropy_is_another_objective():
    result = run(talkative_model(), [f"w{index}" for index in range(12)], objective="label_entropy", grid=[0.2, 5.0])
    assert result.metric == "label_entropy"
    assert [point.value for point in result.curve] == [-point.label_entropy for point in result.curve]


def test_empty_data_are_refused():
    with pytest.raises(ValueError, match="empty"):
        run(talkative_model(), [])


@pytest.mark.parametrize("tokens", [2, 4])
@torch.no_grad()
def test_longer_answers_average_the_entropy_of_their_tokens(tokens):
    model, tokenizer = talkative_model(), word_tokenizer()
    texts = [f"w{index} w{index + 7}" for index in range(8)]
    found = Scorer(model, tokenizer, TASK, texts, batch_rows=3, answer_tokens=tokens)
    end = found.tokenizer.convert_tokens_to_ids("yes")
    tokenizer.eos_token_id = end
    # A model may have further ones.
    model.generation_config.eos_token_id = further = [2, 3]
    expected, lengths, decoded = [], [], []
    for text in texts:
        ids, entropies = tokenizer(TASK.prompt(text))["input_ids"], []
        for _ in range(tokens):
            log_probs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            entropies.append(float(distribution_entropy(log_probs)))
            ids = [*ids, int(log_probs.argmax())]
            if ids[-1] in (end, *further):
                break
        expected.append(sum(entropies) / len(entropies))
        lengths.append(len(entropies))
        decoded.append(TASK.parse(tokenizer.decode(ids[-len(entropies) :])))
    one = ZeroTuningConfig.uniform(model, 1.0)
    for answer in found.predict([one, one]):
        assert answer.entropies == pytest.approx(expected, abs=1e-4)
        assert answer.parsed == tuple(decoded)
