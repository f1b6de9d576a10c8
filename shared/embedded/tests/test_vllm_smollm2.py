"""vLLM reads the folder and continues a prompt with the tokens that transformers chooses."""

import pytest
from separata_embedded import smollm2_folder

pytestmark = [pytest.mark.vllm, pytest.mark.real_model]

PROMPTS = ["The capital of France is", "Water freezes at", "Chapter    10: 1, 2, 3, 4,"]
LENGTH = 8


def test_greedy_tokens_agree_with_transformers(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder("bfloat16")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    engine = vllm.LLM(str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=128, max_num_seqs=4)
    try:
        outputs = engine.generate(PROMPTS, vllm.SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True))
    finally:
        # Left to the interpreter's exit, the engine's process would be killed after a wait.
        engine.llm_engine.engine_core.shutdown()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.prompt_token_ids) == tokenizer(prompt)["input_ids"]
        chosen = list(output.outputs[0].token_ids)
        assert len(chosen) == LENGTH
        inputs = torch.tensor([[*output.prompt_token_ids, *chosen]])
        with torch.no_grad():
            logits = model(inputs).logits[0, -LENGTH - 1 : -1].float()
        # In bfloat16 two tokens may tie, so each choice must be within rounding of the best, not equal to it.
        best = logits.max(dim=-1).values
        assert (best - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]).max() <= 0.25
    assert "Paris" in outputs[0].outputs[0].text
