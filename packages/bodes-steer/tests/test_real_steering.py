"""Steering SmolLM2 itself: from texts to steered answers, whatever the way to decode."""

import pytest
import torch
from bodes_steer import CAA, ODESteer, SteeredModel, extract_activations, load_steerer, steer
from separata_core.models import capture_hidden_states

pytestmark = pytest.mark.real_model

LAYER = 14
GOOD = ["What a wonderful film, I loved it", "A great and moving story", "Brilliant acting, pure joy", "A delight"]
BAD = ["What a dreadful film, I hated it", "A dull and stupid story", "Awful acting, pure pain", "A disaster"]


@pytest.fixture(scope="module")
def smollm2():
    from separata_embedded import load_smollm2

    return load_smollm2(dtype="float32")


@pytest.fixture(scope="module")
def states(smollm2):
    labels = [1] * len(GOOD) + [0] * len(BAD)
    return extract_activations(*smollm2, GOOD + BAD, [LAYER, 29], labels=labels, progress=False)


def test_activations_are_those_of_single_texts(smollm2, states):
    model, tokenizer = smollm2
    for index in (0, 5):
        with torch.no_grad(), capture_hidden_states(model, [LAYER, 29]) as records:
            model(**tokenizer([*GOOD, *BAD][index], return_tensors="pt"))
        for layer in (LAYER, 29):
            torch.testing.assert_close(states.layer(layer)[index], records[layer][0][0, -1], atol=2e-3, rtol=1e-3)


def test_steered_text_does_not_depend_on_cache_or_padding(smollm2, states, tmp_path):
    model, tokenizer = smollm2
    fitted = ODESteer(T=20.0, n_components=2000, random_state=0).fit(*states.pair(LAYER))
    fitted.save(tmp_path / "s.safetensors", model=model, layer=LAYER)
    steerer = load_steerer(tmp_path / "s.safetensors", model=model)
    steered = SteeredModel(model, tokenizer, steerer)
    assert steerer.origin_.layer == LAYER
    prompts = ["The film was", "I went to the cinema on Sunday, and the new film was"]
    options = {"max_new_tokens": 6, "do_sample": False}
    alone = [steered.generate(prompt, **options)[0] for prompt in prompts]
    assert steered.generate(prompts, **options) == alone
    assert [steered.generate(prompt, use_cache=False, **options)[0] for prompt in prompts] == alone
    inputs = tokenizer(prompts[1], return_tensors="pt")
    with torch.no_grad():
        plain = model(**inputs).logits
        with steer(model, steerer):
            moved = model(**inputs).logits
        assert torch.equal(model(**inputs).logits, plain)
    assert torch.equal(moved[:, :-1], plain[:, :-1])
    assert (moved[:, -1] - plain[:, -1]).abs().max() > 0.1


def test_answers_are_scored_alike_alone_and_together(smollm2, states):
    steered = SteeredModel(*smollm2, CAA(T=3.0).fit(*states.pair(LAYER)), layer=LAYER)
    answers = [" wonderful", " a complete waste of time", " bad"]
    together = steered.score("I think the film was", answers)
    alone = [steered.score("I think the film was", [answer])[0] for answer in answers]
    assert together == pytest.approx(alone, abs=2e-3)
    away = SteeredModel(*smollm2, steered.steerer, layer=LAYER, T=-3.0).score("I think the film was", answers)
    # What it was fitted to prefer gains against its opposite.
    assert together[0] - together[2] > away[0] - away[2]
