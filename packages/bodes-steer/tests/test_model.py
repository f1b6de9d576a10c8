"""Texts in, texts out."""

import copy

import numpy as np
import pytest
import torch
from bodes_steer import ODESteer, SteeredModel, extract_activations, steer
from bodes_steer.files import Origin
from separata_testing.models import tiny_model

NEW = 5
PROMPTS = ["a", "What is it that walks?", "One, two,"]


@pytest.fixture(scope="module")
def steerer():
    generator = torch.Generator().manual_seed(0)
    pos, neg = (torch.randn(40, 32, generator=generator, dtype=torch.float64) + shift for shift in (0.5, 0.0))
    return ODESteer(T=6.0, n_components=64, steps=3, C=100.0, random_state=0).fit(pos, neg)


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float64)


@pytest.fixture
def steered(model, tiny_tokenizer, steerer):
    return SteeredModel(model, tiny_tokenizer, steerer, layer=1)


def alone(model, tokenizer, steerer, texts, **options):
    """Greedy continuations of single prompts, each a call of its own."""
    found = []
    for text in texts:
        ids = torch.tensor([tokenizer(text, **options)["input_ids"]])
        with steer(model, steerer, layer=1):
            whole = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        found.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
    return found


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_either_side_gives_what_single_prompts_give(steered, model, tiny_tokenizer, steerer, side):
    expected = alone(model, tiny_tokenizer, steerer, PROMPTS)
    options = {"max_new_tokens": NEW, "do_sample": False}
    steered.tokenizer.padding_side = side
    assert steered.generate(PROMPTS, **options) == expected
    tokens = tiny_tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert bool(tokens["attention_mask"][0, 0]) == (side == "right")
    assert steered.generate(dict(tokens), **options) == expected
    assert steered.generate(PROMPTS[1], **options) == expected[1:2]
    assert len(steered.generate(PROMPTS[:2], do_sample=True, num_return_sequences=3, max_new_tokens=1)) == 6
    assert "generate" not in vars(model)
    inside = steered.generate({"input_ids": tokens["input_ids"][1:2]}, return_dict_in_generate=True, **options)
    assert inside == expected[1:2]


def test_conversations(steered, model, tiny_tokenizer, steerer):
    talks = [[{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Why?"}]]
    texts = [f"user: {talk[0]['content']}\nassistant: " for talk in talks]
    expected = alone(model, tiny_tokenizer, steerer, texts, add_special_tokens=False)
    assert steered.chat(talks[0], max_new_tokens=NEW, do_sample=False) == expected[0]
    assert steered.chat(talks, max_new_tokens=NEW, do_sample=False) == expected


@torch.no_grad()
def test_scores_are_log_likelihoods_steered_from_the_last_token_of_the_question(
    steered, model, tiny_tokenizer, steerer
):
    question, answers = "Q: Is it?\nA:", [" yes", " no, never at all", " n"]
    found = steered.score(question, answers, batch_size=2)
    by_token = steered.score(question, answers, per_token=True)
    assert [float(each.sum()) for each in by_token] == pytest.approx(found)
    begin = len(tiny_tokenizer(question)["input_ids"])
    plain = []
    for answer, score, tokens in zip(answers, found, by_token, strict=True):
        ids = torch.tensor([tiny_tokenizer(question + answer)["input_ids"]])
        with steer(model, steerer, layer=1, prompt_lengths=[begin]):
            log_probs = model(ids).logits.log_softmax(-1)
        expected = log_probs[0, begin - 1 : -1].gather(1, ids[0, begin:, None])[:, 0]
        assert tokens.tolist() == pytest.approx(expected.tolist())
        assert score == pytest.approx(float(expected.sum()))
        log_probs = model(ids).logits.log_softmax(-1)
        plain.append(float(log_probs[0, begin - 1 : -1].gather(1, ids[0, begin:, None]).sum()))
    assert max(abs(a - b) for a, b in zip(plain, found, strict=True)) > 1e-3
    # One-token answers share nothing with each other's steering, and other rules may be given.
    other = SteeredModel(model, tiny_tokenizer, steerer, layer=1, positions="all")
    assert other.score(question, answers) != pytest.approx(found)
    # White space goes to the answer.
    assert steered.score(question + " ", ["yes"]) == pytest.approx(found[:1])


def test_layer_and_strength_come_from_the_steerer_unless_given(model, tiny_tokenizer, steerer):
    with pytest.raises(ValueError, match="give layer"):
        SteeredModel(model, tiny_tokenizer, steerer)
    question, answers = "a b", [" c"]
    expected = SteeredModel(model, tiny_tokenizer, steerer, layer=1).score(question, answers)
    steerer.origin_ = Origin(layer=1)
    try:
        steered = SteeredModel(model, tiny_tokenizer, steerer)
        assert steered.score(question, answers) == pytest.approx(expected)
        steered.T = 0.0
        assert steered.score(question, answers) != pytest.approx(expected)
    finally:
        del steerer.origin_


class Merging:
    """A tokenizer in which the question's last token depends on what follows, and that ends all texts."""

    eos_token_id, pad_token_id = 9, None

    def __call__(self, text, add_special_tokens=True):
        ids = [3 if part == "ab" else 4 for part in ([text] if len(text) == 1 else text.partition("b")[:2])]
        ids = [5] if text == "ab" else ids
        return {"input_ids": [*ids, 9] if add_special_tokens else ids}


def test_answers_that_would_merge_with_the_question():
    from bodes_steer.model import split_tokens

    assert split_tokens(Merging(), "a", ["b"]) == ([4], [[4]])


def test_weights_that_lie_on_the_disk(steered, model, tiny_tokenizer, steerer, tmp_path):
    from accelerate import dispatch_model

    spread = dispatch_model(
        copy.deepcopy(model), {"model": "disk", "lm_head": "disk"}, main_device="cpu", offload_dir=tmp_path
    )
    assert {each.device.type for each in spread.parameters()} == {"meta"}
    other = SteeredModel(spread, tiny_tokenizer, steerer, layer=1)
    options = {"max_new_tokens": NEW, "do_sample": False}
    assert other.generate(PROMPTS, **options) == steered.generate(PROMPTS, **options)
    assert other.score("a", ["b", "cd"]) == pytest.approx(steered.score("a", ["b", "cd"]))
    found, expected = (extract_activations(each, tiny_tokenizer, PROMPTS, progress=False) for each in (spread, model))
    torch.testing.assert_close(found.layer(1), expected.layer(1))


def test_a_mask_of_numpy_stands_for_positions(steered, model, tiny_tokenizer, steerer):
    everything = SteeredModel(model, tiny_tokenizer, steerer, layer=1, positions=np.ones(99, dtype=bool))
    expected = SteeredModel(model, tiny_tokenizer, steerer, layer=1, positions="all")
    assert everything.score("a", ["b"]) == pytest.approx(expected.score("a", ["b"]))


def test_bad_input(steered):
    with pytest.raises(ValueError, match="prompts is empty"):
        steered.generate([])
    with pytest.raises(ValueError, match=r"prompts \[0\] have no tokens"):
        steered.generate({"input_ids": torch.ones(1, 2).long(), "attention_mask": torch.zeros(1, 2)})
    with pytest.raises(ValueError, match="messages is empty"):
        steered.chat([])
    for answers in ([], "b"):
        with pytest.raises(ValueError, match="list of at least one text"):
            steered.score("a", answers)
    with pytest.raises(ValueError, match=r"answers\[1\]='' has no tokens"):
        steered.score("a", ["b", ""])
