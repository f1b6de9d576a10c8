"""The method on SmolLM2 itself: the operator against a second path through the model, and the demo's procedure."""

import pytest
import torch
import zerotuning
from zerotuning import ZeroTuningConfig
from zerotuning.demo import run_demo

pytestmark = [pytest.mark.real_model, pytest.mark.filterwarnings("ignore:The rated texts")]


@pytest.fixture(scope="module")
def smollm2():
    from separata_embedded import load_smollm2

    return load_smollm2(dtype="float32")


def test_fused_and_materialised_attention_agree_on_a_padded_batch(smollm2):
    model, tokenizer = smollm2
    tokenizer.padding_side = "left"
    inputs = tokenizer(
        ["The capital of France is", "One, two, three, four, five, six,"], padding=True, return_tensors="pt"
    )
    config = ZeroTuningConfig.per_head(model, {0: 0.5, 4: 3.0, 8: 2.0})
    logits = {}
    try:
        for path in ("sdpa", "eager"):
            model.set_attn_implementation(path)
            with torch.no_grad():
                plain = model(**inputs).logits[:, -1]
                with zerotuning.apply(model, config):
                    logits[path] = model(**inputs).logits[:, -1]
                assert torch.equal(model(**inputs).logits[:, -1], plain)
                assert (logits[path] - plain).abs().max() > 0.1
    finally:
        model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits["sdpa"], logits["eager"], atol=2e-3, rtol=0)


def test_greedy_answers_with_a_cache_are_those_without(smollm2):
    model, tokenizer = smollm2
    inputs = tokenizer("The three primary colours are", return_tensors="pt")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    with zerotuning.apply(model, ZeroTuningConfig.uniform(model, 2.0)):
        cached = model.generate(**inputs, **options)
        again = model.generate(**inputs, **options, use_cache=False)
    assert cached.tolist() == again.tolist()
    assert cached.shape[1] > inputs["input_ids"].shape[1]


def test_the_demo_calibrates_and_evaluates(smollm2, tmp_path, monkeypatch):
    from separata_embedded import rated_texts

    # Each further point runs the same code once more.
    monkeypatch.setattr("zerotuning.demo.DEMO_GRID", (0.5, 1.0))
    texts = rated_texts("movie", offline=True)
    out = tmp_path / "c.json"
    result = run_demo(
        *smollm2,
        list(texts)[:2500],
        source=texts.source,
        out=out,
        heads="uniform",
        calibration_items=4,
        test_items=12,
        max_tokens=14,
        progress=False,
    )
    # This model nearly always answers with one of the two words, and better than a coin between them.
    assert result.evaluation.vanilla.parse_rate.value > 0.5
    assert result.evaluation.vanilla.constrained_accuracy.value >= 0.5
    assert [point.gamma for point in result.calibration.curve] == [0.5, 1.0]
    assert ZeroTuningConfig.load(out).model_id.layers == 30
