import json

import pytest
import torch
from bodes_steer.baselines import CAA
from bodes_steer.evaluation import GenerationReport, evaluate_generation
from bodes_steer.judges import each_completion
from bodes_steer.metrics import perplexity
from separata_testing.models import HIDDEN, tiny_model, tiny_tokenizer

PROMPTS = ["Once upon", "The sea", "A", "Why is it"]
OPTIONS = {"layer": 1, "batch_size": 3, "resamples": 50, "progress": False, "max_new_tokens": 6, "do_sample": True}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def steerer():
    generator = torch.Generator().manual_seed(0)
    neg = torch.randn(30, HIDDEN, generator=generator)
    return CAA().fit(neg + torch.randn(HIDDEN, generator=generator), neg)


def length(prompts, completions):
    return [float(len(each)) for each in completions]


def test_without_strength_both_models_write_the_same(model, steerer):
    state = torch.random.get_rng_state()
    found = evaluate_generation(model, tiny_tokenizer(), steerer, PROMPTS, length, T=0.0, **OPTIONS)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert found.plain == found.steered
    assert (found.score.difference, found.win_rate) == (0.0, 0.5)


def test_texts_scores_and_fluency_belong_together(model, steerer):
    tokenizer = tiny_tokenizer()
    found = evaluate_generation(model, tokenizer, steerer, PROMPTS, length, T=20.0, **OPTIONS)
    assert found.steered.completions != found.plain.completions
    for texts in (found.plain, found.steered):
        assert list(texts.scores) == length(PROMPTS, texts.completions)
        assert texts.mean == pytest.approx(sum(map(len, texts.completions)) / 4)
        # Under the plain model, whoever wrote them.
        expected = perplexity(model, tokenizer, PROMPTS, texts.completions)
        assert texts.perplexity.value == pytest.approx(expected.value, rel=1e-4)
    assert found.score.difference == pytest.approx(found.steered.mean - found.plain.mean)
    again = evaluate_generation(model, tokenizer, steerer, PROMPTS, length, T=20.0, **OPTIONS)
    assert again.steered.completions == found.steered.completions
    assert not model.model.layers[1]._forward_hooks


def test_reports_are_for_people_and_machines(model, steerer):
    # A judge of another kind, and another model for fluency.
    other = tiny_model(seed=1)
    judge = each_completion(lambda text: 1.0)
    found = evaluate_generation(
        model, tiny_tokenizer(), steerer, PROMPTS, judge, fluency=(other, tiny_tokenizer()), **OPTIONS
    )
    assert isinstance(found, GenerationReport)
    assert "win rate 0.500 over 4 prompts" in found.table()
    record = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert record["plain"]["completions"] == list(found.plain.completions)
    expected = perplexity(other, tiny_tokenizer(), PROMPTS, found.plain.completions).value
    assert record["plain"]["perplexity"] == pytest.approx(expected, rel=1e-4)


def test_bad_input_is_refused(model, steerer):
    for prompts, options, message in [
        ([], {}, "prompts is"),
        (["a", ""], {}, "none of them empty"),
        ("one", {}, "prompts is 'one'"),
        (["a"], {"batch_size": 0}, "batch_size is 0"),
        (["a"], {"resamples": 0}, "resamples is 0"),
        (["a"], {"seed": -1}, "seed is -1"),
        (["a"], {"num_return_sequences": 2}, "2 completions of 1 prompts"),
    ]:
        with pytest.raises(ValueError, match=message):
            evaluate_generation(model, tiny_tokenizer(), steerer, prompts, length, **{**OPTIONS, **options})
