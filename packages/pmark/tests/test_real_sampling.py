"""Candidates from SmolLM2 itself: the distribution of the model, and sentences that stop where they end."""

import pytest
import torch
from pmark.hf_sampler import HFSampler
from pmark.segmentation import is_complete, make_segmenter
from pmark.shared_prefix import SharedPrefixRows, run_prefix

pytestmark = pytest.mark.real_model

CONTEXTS = [
    "The old harbour town had slept for years before the railway came. Then everything changed at once.",
    "My grandmother kept bees behind the house.",
]


@pytest.fixture(scope="module")
def smollm2():
    from separata_embedded import load_smollm2

    return load_smollm2(dtype="float32", device="cpu")


@torch.inference_mode()
def test_rows_over_one_prefix_have_the_distribution_of_a_plain_forward(smollm2):
    model, tokenizer = smollm2
    prefixes = [tokenizer.encode(context) for context in CONTEXTS]
    said = [tokenizer.encode(" It was late"), tokenizer.encode(" And so they")]
    rows = SharedPrefixRows(model, [run_prefix(model, ids) for ids in prefixes], [0, 0, 1])
    for tokens in zip(said[0], said[1], said[0], strict=True):
        logits = rows.step(tokens)
    for row, ids in zip(logits, (prefixes[0] + said[0], prefixes[0] + said[1], prefixes[1] + said[0]), strict=True):
        plain = model(input_ids=torch.tensor([ids])).logits[0, -1]
        # 30 layers in float32, in another order of summation; logits reach 20.
        torch.testing.assert_close(row, plain, atol=2e-3, rtol=0)
        assert (row.softmax(0) - plain.softmax(0)).abs().sum() < 1e-4


def test_candidates_are_single_sentences_and_the_likeliest_is_that_of_generate(smollm2):
    model, tokenizer = smollm2
    segmenter = make_segmenter()
    sampler = HFSampler(model, tokenizer, max_new_tokens=32)
    drawn = sampler.sample(
        CONTEXTS, [6, 6], is_complete=lambda i, text: is_complete(segmenter, CONTEXTS[i], text), seed=1
    )
    for context, rows in zip(CONTEXTS, drawn, strict=True):
        assert len({row.text for row in rows}) > 2
        assert all(row.text[:1].isspace() for row in rows if row.text)
        stopped = [row.text for row in rows if is_complete(segmenter, context, row.text)]
        assert len(stopped) > 2
        # Nothing but the first word of the next sentence is drawn in vain.
        assert all(not is_complete(segmenter, context, text.rsplit(maxsplit=1)[0]) for text in stopped)
    sampler = HFSampler(model, tokenizer, top_p=1e-9, max_new_tokens=8)
    [[row, _], _] = sampler.sample(CONTEXTS, [2, 1], seed=0)
    inputs = tokenizer(CONTEXTS[0], return_tensors="pt")
    whole = model.generate(**inputs, do_sample=False, max_new_tokens=8, pad_token_id=tokenizer.eos_token_id)
    assert row.text == tokenizer.decode(whole[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
