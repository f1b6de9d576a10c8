"""Models wrapped by PEFT."""

import pytest
import torch
from bodes_steer import CAA, extract_activations, steer
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from separata_testing.models import tiny_model


@pytest.fixture
def lora():
    torch.manual_seed(0)
    model = get_peft_model(
        tiny_model("llama", dtype=torch.float64),
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_alpha=8, task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,
    )
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.double()
        if "lora_B" in name:  # zero at first, so that the adapter would do nothing
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def test_an_adapter_and_merged_weights_are_steered_alike(lora, tiny_tokenizer):
    texts = [f"{'good' if index % 2 else 'bad'} {index}" for index in range(12)]
    labels = [index % 2 for index in range(12)]
    states = extract_activations(lora, tiny_tokenizer, texts, [1], labels=labels, dtype="float64", progress=False)
    steerer = CAA().fit(*states.pair(1))
    tokens = torch.tensor([tiny_tokenizer("once upon")["input_ids"]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    inner = lora.base_model.model
    with torch.no_grad():
        before = lora(input_ids=tokens).logits
        found = {}
        for outer in (lora, inner):
            with steer(outer, steerer, layer=1, T=4.0):
                found[id(outer)] = lora.generate(input_ids=tokens, **options).tolist()
                logits = lora(input_ids=tokens).logits
                assert lora.generate(input_ids=tokens, use_cache=False, **options).tolist() == found[id(outer)]
        assert found[id(lora)] == found[id(inner)]
        assert (logits - before).abs().max() > 1e-3
        assert torch.equal(lora(input_ids=tokens).logits, before)
        assert "generate" not in vars(inner)
        merged = lora.merge_and_unload()
        with steer(merged, steerer, layer=1, T=4.0):
            torch.testing.assert_close(merged(input_ids=tokens).logits, logits)
            assert merged.generate(tokens, **options).tolist() == found[id(lora)]


def test_virtual_tokens_are_refused():
    model = get_peft_model(
        tiny_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, token_dim=32)
    )
    steerer = CAA().fit(torch.ones(2, 32), torch.zeros(2, 32))
    with pytest.raises(ValueError, match="virtual tokens"), steer(model, steerer, layer=1):
        pass
