"""A steered model in lm-evaluation-harness."""

import sys

import pytest
import torch
from bodes_steer import ODESteer, steer
from bodes_steer.lm_eval import MODEL_NAME, harness_model, main, register
from separata_testing.models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's own

LAYER, T = 1, 6.0
# The third has the tokens of the second and another context.
PAIRS = [("Q: a", " yes"), ("Q: why is it so", " ab"), ("Q: why is it so a", "b"), ("Q: a", " no"), ("b", "c")]


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float64)


@pytest.fixture(scope="module")
def steerer():
    generator = torch.Generator().manual_seed(0)
    pos, neg = (torch.randn(40, 32, generator=generator, dtype=torch.float64) + shift for shift in (0.5, 0.0))
    return ODESteer(T=T, n_components=64, steps=3, C=100.0, random_state=0).fit(pos, neg)


def requests(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


@torch.no_grad()
def by_hand(model, steerer, pairs):
    """Log-likelihood and greediness of each continuation, alone."""
    tokenizer, found = tiny_tokenizer(), []
    for context, continuation in pairs:
        begin, whole = (tokenizer(text)["input_ids"] for text in (context, context + continuation))
        ids = torch.tensor([whole])
        with steer(model, steerer, layer=LAYER, prompt_lengths=[len(begin)]):
            log_probs = model(ids).logits[0, len(begin) - 1 : -1].log_softmax(-1)
        targets = ids[0, len(begin) :]
        score = float(log_probs.gather(1, targets[:, None]).sum())
        found.append((score, bool((log_probs.argmax(-1) == targets).all())))
    return found


@pytest.mark.parametrize("batch_size", [3, "auto"])
def test_log_likelihoods_are_steered_from_each_context_s_last_token(model, steerer, batch_size, monkeypatch):
    harness = harness_model(model, tiny_tokenizer(), steerer, layer=LAYER, batch_size=batch_size)
    if batch_size == "auto":
        forward = type(model).forward

        def small(self, *args, **kwargs):
            if len(kwargs.get("input_ids", ())) > 2:
                raise torch.OutOfMemoryError
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(type(model), "forward", small)
    found = harness.loglikelihood(requests("loglikelihood", PAIRS))
    expected = by_hand(model, steerer, PAIRS)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    plain = by_hand(model, ODESteerOff(steerer), PAIRS)
    assert max(abs(a[0] - b[0]) for a, b in zip(plain, found, strict=True)) > 1e-3
    assert harness.get_model_info()["steering"] == {"method": "odesteer", "layer": LAYER, "T": None}


def ODESteerOff(steerer):  # noqa: N802  # a steerer of no strength
    import copy

    off = copy.copy(steerer)
    off.T = 0.0
    return off


def test_whole_texts_and_generated_ones(model, steerer):
    harness = harness_model(model, tiny_tokenizer(), steerer, layer=LAYER, T=T, batch_size=2)
    (rolling,) = harness.loglikelihood_rolling(requests("loglikelihood_rolling", [("some text",)]))
    # The harness puts its prefix before what the tokenizer makes of the text.
    ids = torch.tensor([[harness.prefix_token_id, *harness.tok_encode("some text")]])
    with torch.no_grad(), steer(model, steerer, layer=LAYER, prompt_lengths=1):
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)
    assert rolling == pytest.approx(float(log_probs.gather(1, ids[0, 1:, None]).sum()))
    options = {"until": ["<eos>"], "max_gen_toks": 5, "do_sample": False}
    prompts = ["a", "a longer prompt"]
    found = harness.generate_until(requests("generate_until", [(prompt, options) for prompt in prompts]))
    for prompt, text in zip(prompts, found, strict=True):
        inputs = tiny_tokenizer()(prompt, return_tensors="pt", return_token_type_ids=False)
        with steer(model, steerer, layer=LAYER):
            whole = model.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert text == tiny_tokenizer().decode(whole[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "generate" not in vars(model)


def test_the_model_by_name(model, steerer, tmp_path):
    from lm_eval.api.registry import get_model

    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    steerer.save(tmp_path / "s.safetensors", tiny_model(), LAYER)
    register()
    arguments = {"pretrained": str(tmp_path / "model"), "device": "cpu", "dtype": "float32", "batch_size": 2}
    harness = get_model(MODEL_NAME)(steerer=str(tmp_path / "s.safetensors"), T="6", **arguments)
    expected = [score for score, _ in by_hand(model, steerer, PAIRS)]
    found = harness.loglikelihood(requests("loglikelihood", PAIRS))
    assert [score for score, _ in found] == pytest.approx(expected, abs=1e-3)
    plain = get_model(MODEL_NAME)(**arguments)
    untouched = [score for score, _ in by_hand(model, ODESteerOff(steerer), PAIRS)]
    found = plain.loglikelihood(requests("loglikelihood", PAIRS))
    assert [score for score, _ in found] == pytest.approx(untouched, abs=1e-3)
    assert plain.get_model_info()["steering"]["method"] is None


def test_mistakes_are_told_before_anything_runs(model, steerer):
    with pytest.raises(ValueError, match="layer=7 does not exist"):
        harness_model(model, tiny_tokenizer(), steerer, layer=7)
    harness = harness_model(model, tiny_tokenizer(), steerer, layer=LAYER, max_length=8)
    with pytest.raises(ValueError, match="request 0 has 2 tokens of context and 9"):
        harness._loglikelihood_tokens([(None, [1, 2], [3] * 9)])
    cut = harness._loglikelihood_tokens([(None, [1, 2, 3, 4, 5], [6, 7, 8, 9])], disable_tqdm=True)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    with torch.no_grad(), steer(model, steerer, layer=LAYER, prompt_lengths=5):
        expected = model(ids).logits[0, 4:].log_softmax(-1).gather(1, torch.tensor([[6], [7], [8], [9]])).sum()
    assert cut[0][0] == pytest.approx(float(expected))
    harness.backend = "seq2seq"
    with pytest.raises(ValueError, match="only causal ones"):
        harness._loglikelihood_tokens([])


def test_the_command_line_is_the_harness_s_own(monkeypatch):
    import lm_eval.__main__
    from lm_eval.api.registry import get_model

    found = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: found.append(get_model(MODEL_NAME)))
    assert main() == 0
    assert found == [register()]


@pytest.mark.parametrize(("missing", "named"), [("lm_eval.models.huggingface", "lm_eval"), ("tqdm", None)])
def test_without_the_extra(capsys, monkeypatch, missing, named):
    monkeypatch.delitem(sys.modules, "lm_eval.models.huggingface", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    register.cache_clear()
    if named is None:
        with pytest.raises(ModuleNotFoundError, match=missing):
            main()
        return
    with pytest.raises(ImportError, match=r"pip install 'bodes-steer\[lm-eval\]'"):
        harness_model(None, None, None)
    assert main() == 1
    assert "error: lm-evaluation-harness needs the extra 'lm-eval'" in capsys.readouterr().err
