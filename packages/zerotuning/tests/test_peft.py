"""Models wrapped by PEFT: what acts on activations does not care whose weights made them."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from separata_testing.models import tiny_model
from zerotuning import ModelId, ZeroTuningConfig, apply


@pytest.fixture
def lora():
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_alpha=8))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, so that the adapter would do nothing
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def tokens(rows=2, length=9):
    return torch.randint(4, 260, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=ids).logits


@pytest.mark.parametrize("mode", ["exact", "key", "query"])
def test_adapter_and_merged_weights_agree(lora, mode):
    ids = tokens()
    config = ZeroTuningConfig.per_layer(lora, {0: 3.0, 2: 0.4}, mode=mode)
    assert config.model_id == ModelId.of(tiny_model("llama"))
    before = logits(lora, ids)
    with apply(lora, config):
        tuned = logits(lora, ids)
    assert (tuned - before).abs().max() > 1e-3
    assert torch.equal(logits(lora, ids), before)
    merged = lora.merge_and_unload()
    with apply(merged, config):
        torch.testing.assert_close(logits(merged, ids), tuned, atol=2e-5, rtol=1e-4)


def test_training_an_adapter_under_a_configuration(lora):
    ids = tokens()
    with apply(lora.train(), ZeroTuningConfig.uniform(lora, 2.0)):
        lora(input_ids=ids, labels=ids).loss.backward()
    grads = {name: parameter.grad for name, parameter in lora.named_parameters()}
    assert all((grad is not None and bool(grad.any())) == ("lora_" in name) for name, grad in grads.items())


def test_attached_before_the_adapter_is_put_on():
    model, ids = tiny_model("llama"), tokens()
    config = ZeroTuningConfig.uniform(model, 2.0)
    with apply(model, config):
        tuned = logits(model, ids)
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        assert torch.equal(logits(wrapped, ids), tuned)
        generated = wrapped.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
    assert generated.shape[0] == 2
