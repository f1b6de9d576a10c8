from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
from pmark.kgw import KGW

torch = pytest.importorskip("torch", reason="needs the extra 'transformers'")
pytest.importorskip("transformers", reason="needs the extra 'transformers'")

END = 2


class Letters:
    """A tokenizer with a letter for each token, so that text and tokens tell the same; nothing ends a text."""

    eos_token_id = None

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) - 0x400 for letter in text]

    def __call__(self, text, **_):
        return {"input_ids": torch.tensor([self.encode(text)])}

    def decode(self, ids, **_):
        return "".join(chr(0x400 + each) for each in ids)


class Parrot:
    """A model that writes given sentences, and a tokenizer for them."""

    config = SimpleNamespace(bos_token_id=None, is_encoder_decoder=False, vocab_size=50)
    generation_config = SimpleNamespace(eos_token_id=[END, 3])
    device = torch.device("cpu")
    eos_token_id = END
    words = (" It rained.", " The sun came.", " We went ho", " It rained.")

    def __init__(self, *ids):
        self.ids = list(ids)

    def encode(self, text, add_special_tokens=True):
        return [5, 6, 7]

    def __call__(self, text, **_):
        return {"input_ids": torch.tensor([self.encode(text)])}

    def decode(self, ids, **_):
        return "".join(self.words[each - 10] for each in ids if each >= 10)

    def generate(self, ids, **_):
        return torch.cat([ids, torch.tensor([self.ids] * len(ids))], dim=1)


@pytest.fixture(scope="module")
def scheme(tiny_models):
    model = tiny_models("llama")
    model.generation_config.eos_token_id = None
    return KGW(model, Letters(), delta=60.0, max_new_tokens=40, batch_size=2, seed=0, key=7)


def test_marked_text_is_found_by_its_key_only(scheme):
    prompts = [scheme._tokenizer.decode(ids) for ids in ([30, 31, 40], [77, 90], [120] * 7)]
    state = torch.get_rng_state()
    texts = scheme.generate_batch(None, prompts)
    assert torch.equal(torch.get_rng_state(), state)
    assert [each.text for each in texts] == [each.text for each in scheme.generate_batch(None, prompts)]
    assert all(text.text.startswith(prompt) and text.samples == 1 for text, prompt in zip(texts, prompts, strict=True))
    found = scheme.detect_batch(texts)
    other = KGW(scheme._model, Letters(), key=8).detect_batch(texts)
    for text, right, wrong in zip(texts, found, other, strict=True):
        count = len(text.text) - len(text.prompt)
        assert count == 40
        # With such a bias only green tokens are drawn, so all but the first, which nothing stands before.
        assert right.z == pytest.approx((count - 1) * 0.75 / np.sqrt((count - 1) * 0.25 * 0.75))
        assert right.is_watermarked
        assert right.p_value == pytest.approx(NormalDist().cdf(-right.z), rel=1e-6)
        assert f"{count - 1} of {count - 1} tokens are green" == right.reason
        assert wrong.z < right.z
    [human] = scheme.detect_batch([scheme._tokenizer.decode(np.random.default_rng(0).integers(10, 270, 800))])
    assert abs(human.z) < 4.5
    assert 7 not in scheme.settings.values()


def test_text_without_a_prompt_is_judged_as_well(scheme):
    [text] = scheme.generate_batch(None, [scheme._tokenizer.decode([30, 31])])
    body = text.text[len(text.prompt) :]
    right = scheme.detect_batch([body], has_prompt=False)[0]
    assert right.z == scheme.detect_batch([text])[0].z == scheme.detect_batch([text.text], prompts=[text.prompt])[0].z
    [nothing] = scheme.detect_batch([body])
    assert (nothing.p_value, nothing.reason) == (1.0, "no token to test")


@pytest.mark.parametrize(
    ("ids", "limit", "written", "reason"),
    [
        # A sentence that the budget breaks off goes, unless it is the only one.
        ([10, 11, 12], None, ["It rained.", "The sun came."], "length"),
        ([12], None, ["We went ho"], "length"),
        ([10, 11, END, END], None, ["It rained.", "The sun came."], "eos"),
        ([10, 11, 13, 3, END], 2, ["It rained.", "The sun came."], "length"),
        ([10, 13, 10, 3], 1, ["It rained."], "length"),
    ],
)
def test_texts_are_cut_to_whole_sentences(ids, limit, written, reason):
    parrot = Parrot(*ids)
    [text] = KGW(parrot, parrot).generate_batch(None, ["Hi."], max_sentences=limit)
    assert text.sentences == written
    assert text.text == "Hi. " + " ".join(written)
    assert text.finish_reason == reason


def test_a_model_without_a_first_token_is_judged():
    parrot = Parrot(10)
    [result] = KGW(parrot, parrot).detect_batch(["Hello. And"])
    assert "of 2 tokens are green" in result.reason
    assert result.low_power


def test_the_extra_is_named(block_imports):
    block_imports("transformers")
    with pytest.raises(ImportError, match=r"pip install 'pmark\[transformers\]'"):
        KGW(None, None)
