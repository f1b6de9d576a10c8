import numpy as np
from pmark.key import PMarkKey
from pmark.markllm import MarkLLMWatermark
from pmark.samplers import Continuation
from pmark.watermark import PMark

PROMPT = "Once there was a town."


def encode(texts):
    return np.stack([np.random.default_rng(list(text.encode())).standard_normal(32) for text in texts])


class Birds:
    def sample(self, contexts, counts, *, is_complete=None, seed=None):
        rng = np.random.default_rng(seed)
        return [[Continuation(f" He saw {i} birds. Then") for i in rng.integers(10**6, size=n)] for n in counts]


def test_the_toolkit_s_three_calls():
    watermark = PMark(encode, PMarkKey.generate(2, b"0123456789abcdef"), num_samples=16, seed=0)
    adapter = MarkLLMWatermark(watermark, Birds(), max_sentences=10)
    marked = adapter.generate_watermarked_text(PROMPT)
    assert marked.startswith(PROMPT)
    assert marked == watermark.generate(Birds(), PROMPT, max_sentences=10).text
    found = adapter.detect_watermark(marked)
    assert found["is_watermarked"] is True
    assert found == adapter.detect_watermark(marked, return_dict=True)
    assert adapter.detect_watermark(marked, return_dict=False) == (True, found["score"])
    plain = adapter.generate_unwatermarked_text(PROMPT)
    assert plain.startswith(PROMPT)
    assert plain.count("birds.") == 10
    assert adapter.detect_watermark(plain)["score"] < found["score"]
