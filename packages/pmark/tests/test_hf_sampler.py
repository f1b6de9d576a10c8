"""Candidates from local models: the right distribution, whatever shares a batch, a prefix or a seed."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pmark import hf_sampler
from pmark.hf_sampler import HFSampler
from pmark.samplers import Continuation, SamplerError
from pmark.shared_prefix import ExpandedRows, SharedPrefixRows, next_tokens, run_prefix, usable_with
from pmark.tokens import added_text, encoded
from pmark.vllm_sampler import VLLMSampler
from separata_testing.models import VOCABULARY, tiny_model, tiny_tokenizer

TEXTS = ["The old harbour.", "A railway came to the town one day, and then"]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def after(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0, -1]


def numbers(count, seed):
    return np.random.default_rng(seed).integers(4, VOCABULARY, count).tolist()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gpt2", "mistral"])
@torch.inference_mode()
def test_every_row_has_the_distribution_of_a_plain_forward(architecture):
    """Prefixes of unequal length, longer and shorter than the window of 8, rows that leave, more tokens than room."""
    # Eager, since the SDPA of some releases leaves soft caps out.
    model = tiny_model(architecture, attn_implementation="eager")
    assert usable_with(model)
    implementation = model.config._attn_implementation
    prefixes = [numbers(3, 1), numbers(17, 2)]
    rows = SharedPrefixRows(model, [run_prefix(model, ids) for ids in prefixes], [0, 1, 1, 0])
    live = [list(prefixes[d]) for d in (0, 1, 1, 0)]
    for step in range(36):
        if step == 9:
            rows.keep([0, 3, 2])
            live = [live[0], live[3], live[2]]
        if step == 20:
            rows.keep([2])
            live = live[2:]
        tokens = numbers(len(live), 100 + step)
        logits = rows.step(tokens)
        live = [[*ids, token] for ids, token in zip(live, tokens, strict=True)]
        if step in (0, 8, 9, 20, 35):
            torch.testing.assert_close(logits, torch.stack([after(model, ids) for ids in live]), atol=1e-4, rtol=0)
    assert model.config._attn_implementation == implementation


@torch.inference_mode()
def test_a_prefix_runs_on_from_what_it_shares_with_another():
    model = tiny_model("gemma2")
    known = run_prefix(model, numbers(20, 3))
    for ids in (numbers(20, 3)[:12] + numbers(6, 4), numbers(20, 3)[:9], [*numbers(20, 3), 7], numbers(5, 9)):
        again = run_prefix(model, ids, known)
        torch.testing.assert_close(again.logits, after(model, ids).float(), atol=1e-4, rtol=0)
        assert [layer.shape[2] for layer in again.keys] == [len(ids)] * 3
    assert run_prefix(model, known.ids, known) is known


@torch.inference_mode()
def test_rows_with_copies_of_their_prefix_have_the_same_distribution(model):
    ids = numbers(9, 5)
    rows = ExpandedRows(model, ids, 3)
    torch.testing.assert_close(rows.first, after(model, ids), atol=1e-4, rtol=0)
    rows.step([4, 5, 6])
    rows.keep([0, 2])
    logits = rows.step([7, 8])
    wanted = torch.stack([after(model, [*ids, 4, 7]), after(model, [*ids, 6, 8])])
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


def bloom():
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2)).eval()


def gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(vocab_size=VOCABULARY, **sizes, **heads, initializer_range=0.5)
    model = GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, 2.0)
    return model


@torch.inference_mode()
def test_the_trial_tells_rounding_from_another_attention():
    assert usable_with(tiny_model("llama", dtype=torch.bfloat16))
    assert not usable_with(gpt_oss().to(torch.bfloat16))


class Wrapped(torch.nn.Module):
    """As PEFT wraps a model: all arguments are handed on, and what is asked of it is the model's."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, input_ids, **kwargs):
        return self.inner(input_ids=input_ids, **kwargs)

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)


@torch.inference_mode()
def test_models_that_take_no_positions_are_told(model):
    class Deaf(Wrapped):
        def forward(self, input_ids, position_ids=None, **kwargs):
            return self.inner(input_ids=input_ids, **kwargs)

    class Narrow(Wrapped):
        def forward(self, input_ids, past_key_values, use_cache, logits_to_keep=0):
            return self.inner(input_ids, past_key_values=past_key_values, logits_to_keep=logits_to_keep)

    assert not usable_with(Deaf(model))
    assert not usable_with(Narrow(model))


def test_wrapped_models_share_prefixes_too(model, tokenizer):
    sampler = HFSampler(Wrapped(model).eval(), tokenizer, max_new_tokens=6)
    assert sampler.shares_prefixes
    assert sampler.sample(TEXTS, [2, 1], seed=0) == HFSampler(model, tokenizer, max_new_tokens=6).sample(
        TEXTS, [2, 1], seed=0
    )


@pytest.mark.parametrize("make", [bloom, gpt_oss])
def test_attention_of_another_kind_is_told_and_drawn_from_all_the_same(make, tokenizer):
    other = make()
    sampler = HFSampler(other, tokenizer, max_new_tokens=6, top_p=1e-9)
    assert not sampler.shares_prefixes
    drawn = sampler.sample(TEXTS, [2, 1], seed=0)
    assert [row.text for row in drawn[0]] == [greedy(other, tokenizer, TEXTS[0], 6)] * 2
    assert drawn[1][0].text == greedy(other, tokenizer, TEXTS[1], 6)


def greedy(model, tokenizer, text, count):
    ids = tokenizer.encode(text)
    with torch.inference_mode():
        whole = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=[0, 1, 2, 3])
    return added_text(tokenizer, ids, whole[0, len(ids) :].tolist())


def test_the_likeliest_tokens_are_those_of_generate(model, tokenizer):
    sampler = HFSampler(model, tokenizer, top_p=1e-9, max_new_tokens=24)
    assert sampler.shares_prefixes
    drawn = sampler.sample(TEXTS, [1, 3], seed=0)
    assert [row.text for row in drawn[0] + drawn[1]] == [
        greedy(model, tokenizer, text, 24) for text in (TEXTS[0], *[TEXTS[1]] * 3)
    ]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1000), st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]), st.floats(0.2, 2), st.sampled_from([1, 4, 64])
)
def test_tokens_are_drawn_by_temperature_and_top_p(seed, top_p, temperature, candidates):
    """Against the definition: the whole row sorted, cut where the mass reaches top_p, and its distribution function."""
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(seed)) * 3
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    for row in logits:
        drawn = next_tokens(row.expand(400, -1), grid, temperature, top_p, candidates)
        probabilities = (row.double() / temperature).softmax(0)
        order = probabilities.argsort(descending=True)
        before = probabilities[order].cumsum(0) - probabilities[order]
        kept = order[before < top_p]
        wanted = torch.zeros(60, dtype=torch.float64)
        wanted[kept] = probabilities[kept] / probabilities[kept].sum()
        share = torch.bincount(drawn, minlength=60) / 400
        assert (share - wanted).abs().max() <= 1 / 400 + 1e-6


def test_drawn_first_tokens_have_the_models_frequencies(model, tokenizer):
    sampler = HFSampler(model, tokenizer, temperature=1.0, top_p=1.0, max_new_tokens=1, max_rows=500)
    drawn = sampler.sample([TEXTS[0]], [4000], seed=1)[0]
    probabilities = after(model, tokenizer.encode(TEXTS[0])).double().softmax(0)
    ended = probabilities[:4].sum()
    assert abs(np.mean([row.ended for row in drawn]) - ended) < 4 * (ended * (1 - ended) / 4000) ** 0.5 + 1e-9
    letters = tokenizer.encode("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)
    best = max(letters, key=lambda token: probabilities[token])
    share = np.mean([row.text == tokenizer.decode([best]) for row in drawn])
    p = float(probabilities[best])
    assert abs(share - p) < 4 * (p * (1 - p) / 4000) ** 0.5


def test_a_row_depends_on_the_seed_and_its_number_alone(model, tokenizer):
    contexts = [TEXTS[1], TEXTS[0], TEXTS[1] + " more."]
    one = HFSampler(model, tokenizer, max_new_tokens=8)
    drawn = one.sample(contexts, [3, 5, 2], seed=7)
    assert HFSampler(model, tokenizer, max_new_tokens=8, max_rows=2).sample(contexts, [3, 5, 2], seed=7) == drawn
    assert one.sample(contexts, [3, 5, 2], seed=7) == drawn
    assert one.sample(contexts, [3, 5, 2], seed=8) != drawn
    assert one.sample(contexts, [3, 5, 2]) != one.sample(contexts, [3, 5, 2])
    one.clear()
    assert one.sample([], [], seed=1) == []
    assert one.sample(contexts, [0, 1, 0], seed=1)[0] == []
    assert len({row.text for row in drawn[1]}) == 5


def test_rows_stop_where_they_are_complete_and_change_no_other(model, tokenizer, monkeypatch):
    monkeypatch.setattr(hf_sampler, "_BOUNDARY", re.compile(""))
    sampler = HFSampler(model, tokenizer, max_new_tokens=40, temperature=1.5, top_p=1.0)
    free = sampler.sample(TEXTS, [12, 12], seed=3)
    asked = []

    def is_complete(index, text):
        asked.append((index, text))
        return index == 0

    stopped = sampler.sample(TEXTS, [12, 12], is_complete=is_complete, seed=3)
    assert stopped[1] == free[1]
    assert asked
    shorter = 0
    for row, whole in zip(stopped[0], free[0], strict=True):
        assert whole.text.startswith(row.text)
        shorter += len(row.text) < len(whole.text)
    assert shorter == sum(index == 0 for index, _ in asked) > 0


class Scripted(HFSampler):
    """Says the given words, whatever the model computes."""

    def script(self, monkeypatch, text):
        ids = iter(self.tokenizer.encode(text, add_special_tokens=False))
        monkeypatch.setattr(
            "pmark.shared_prefix.next_tokens", lambda logits, *rest: torch.tensor([next(ids)] * len(logits))
        )


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("He left. Then", "He left. T"),
        ("At 3.5 m. Then", "At 3.5 m"),
        ('"Go!" She', '"Go!" S'),
        ("One\n\nTwo", "One\n\nT"),
        ("\u597d\u3002\u5929", "\u597d\u3002\u5929"),
        ("no end in sight", None),
    ],
)
def test_it_is_asked_where_a_sentence_may_have_begun(model, tokenizer, monkeypatch, text, stop):
    sampler = Scripted(model, tokenizer, max_new_tokens=len(text.encode()))
    sampler.script(monkeypatch, text)
    asked = []
    drawn = sampler.sample(["x"], [1], is_complete=lambda index, so_far: not asked.append(so_far), seed=0)
    assert asked == ([] if stop is None else [stop])
    assert drawn == [[Continuation(stop or text)]]


def test_it_is_asked_though_the_tokenizer_drops_leading_spaces(model, monkeypatch):
    words = {1: " x", 4: " He", 5: " left", 6: ".", 7: " Then"}
    metaspace = SimpleNamespace(
        encode=lambda text, **_: [1], decode=lambda ids, **_: "".join(map(words.get, ids)).lstrip(), all_special_ids=[]
    )
    sampler = Scripted(model, metaspace, max_new_tokens=8)
    said = iter([4, 5, 6, 7, 1])
    monkeypatch.setattr("pmark.shared_prefix.next_tokens", lambda logits, *rest: torch.tensor([next(said)]))
    assert sampler.sample(["x"], [1], is_complete=lambda *_: True) == [[Continuation(" He left. Then")]]


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
def test_after_an_exception_the_model_is_as_before(tokenizer, fault):
    model = tiny_model("llama", attn_implementation="sdpa")
    sampler, other = (HFSampler(model, tokenizer, max_new_tokens=8) for _ in range(2))
    drawn = sampler.sample(TEXTS, [3, 3], seed=0)

    def fail(module, arguments):
        if model.config._attn_implementation != "sdpa":
            raise fault

    with model.model.layers[1].register_forward_pre_hook(fail), pytest.raises(fault):
        sampler.sample(TEXTS, [3, 3], seed=0)
    assert model.config._attn_implementation == "sdpa"
    assert other.sample(TEXTS, [3, 3], seed=0) == sampler.sample(TEXTS, [3, 3], seed=0) == drawn


def test_samplers_in_two_threads_share_a_model(model, tokenizer):
    samplers = [HFSampler(model, tokenizer, max_new_tokens=12) for _ in range(2)]
    wanted = samplers[0].sample(TEXTS, [3, 3], seed=0)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda i: samplers[i % 2].sample(TEXTS, [3, 3], seed=0), range(4))) == [wanted] * 4


def test_half_a_character_is_left_out_and_spaces_are_kept(tokenizer):
    assert added_text(tokenizer, [1], tokenizer.encode(" a\u00e9", add_special_tokens=False)[:-1]) == " a"
    # A tokenizer that drops the space in front of a text, as those of sentencepiece do.
    metaspace = SimpleNamespace(decode=lambda ids, **_: "".join({1: " the", 2: " town"}[i] for i in ids).lstrip())
    assert added_text(metaspace, [1], [2, 1]) == " town the"
    assert added_text(metaspace, [], [2]) == "town"


def test_only_special_tokens_end_a_text(model, tokenizer, monkeypatch):
    sampler = Scripted(model, tokenizer, max_new_tokens=8)
    monkeypatch.setattr("pmark.shared_prefix.next_tokens", lambda logits, *rest: torch.tensor([2] * len(logits)))
    assert sampler.sample(["x"], [2]) == [[Continuation("", True)] * 2]


def test_prefixes_are_kept_within_their_bound(model, tokenizer):
    sampler = HFSampler(model, tokenizer, max_new_tokens=2)
    sampler.sample(["A town"], [1])
    sampler.sample(["A town by the sea"], [1])
    [prefix] = sampler._prefixes.values()
    sampler.cache_bytes = prefix.nbytes + 1
    sampler.sample(["Else where", "Nothing"], [1, 1])  # the shorter one runs first
    assert sum(each.nbytes for each in sampler._prefixes.values()) <= sampler.cache_bytes
    assert [tokenizer.decode(ids[1:]) for ids in sampler._prefixes][-1] == "Else where"
    sampler.cache_bytes = -1
    assert len(sampler.sample(["A"], [1])[0]) == 1
    assert not sampler._prefixes


def test_an_empty_context_begins_with_the_first_token(model, tokenizer):
    asked = tokenizer.encode("x", add_special_tokens=False)
    assert encoded(tokenizer, "", 0, None, special=False) == [1]
    assert encoded(tokenizer, "x", 0, 1, special=False) == asked
    nothing = SimpleNamespace(encode=lambda text, **_: [], bos_token_id=None, eos_token_id=None)
    with pytest.raises(ValueError, match=r"contexts\[4\] is empty"):
        encoded(nothing, "", 4, None)


def test_what_the_model_reads_can_be_wrapped(model, tokenizer):
    wrapped = HFSampler(model, tokenizer, max_new_tokens=9, wrap=lambda context: "<bos>user: go on" + context)
    plain = HFSampler(model, tokenizer, max_new_tokens=9)
    assert wrapped.sample(["A"], [2], seed=1) == plain.sample(["user: go onA"], [2], seed=1)


def test_what_cannot_be_sampled_from_is_refused(model, tokenizer):
    with pytest.raises(ValueError, match=r"contexts\[1\] holds half of a surrogate pair"):
        HFSampler(model, tokenizer).sample(["a", "a\ud800"], [1, 1])
    with pytest.raises(ValueError, match=r"argument 2 is shorter"):
        HFSampler(model, tokenizer).sample(["a", "b"], [1])
    with pytest.raises(SamplerError, match="logits are NaN or infinite"):
        next_tokens(torch.tensor([[0.0, 1.0], [0.0, float("nan")]]), torch.zeros(2), 1.0, 1.0)
    with pytest.raises(ValueError, match=r"contexts\[1\] has 401 tokens; .* at most 384"):
        HFSampler(model, tokenizer).sample(["a", "a" * 400], [1, 1])
    with pytest.raises(ValueError, match=r"at most 0: shorten it, or lower max_new_tokens"):
        HFSampler(model, tokenizer, max_new_tokens=600).sample(["a"], [1])
    with pytest.raises(ValueError, match="temperature"):
        HFSampler(model, tokenizer, temperature=0)
    with pytest.raises(ValueError, match="max_rows must be at least 1, not 0"):
        HFSampler(model, tokenizer, max_rows=0)
    with pytest.raises(ValueError, match=r"training mode.*model\.eval"):
        HFSampler(tiny_model("llama").train(), tokenizer)
    with pytest.raises(ValueError, match="decoder-only"):
        HFSampler(SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True)), tokenizer)


def test_a_missing_library_names_the_extra(monkeypatch, model, tokenizer):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"HFSampler needs the extra .*: pip install 'pmark\[transformers\]'"):
        HFSampler(model, tokenizer)


class Engine:
    """Stands for a vLLM engine that says a fixed text, halted at stop strings within a token of three characters."""

    def __init__(self, text, caching=True, longest=100):
        cache = SimpleNamespace(enable_prefix_caching=caching)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))
        self.model_config = SimpleNamespace(max_model_len=longest)
        self.text = text
        self.seeds = []

    def get_tokenizer(self):
        return tiny_tokenizer()

    def generate(self, prompts, params, use_tqdm):
        return [self.one(p["prompt_token_ids"], q) for p, q in zip(prompts, params, strict=True)]

    def one(self, ids, params):
        self.seeds.append(params.seed)
        said = len(tiny_tokenizer().decode(ids[1:])) - 1  # behind the context "x"
        left = self.text[said:]
        text, reason, why = left[: params.max_tokens], "length", None
        if len(text) == len(left):
            reason = "stop"
        ends = [text.find(stop) + len(stop) for stop in params.stop or () if stop in text]
        if ends:
            text, reason, why = text[: min(ends) + 1], "stop", "."
        tokens = tiny_tokenizer().encode(text, add_special_tokens=False)
        row = SimpleNamespace(token_ids=tokens, finish_reason=reason, stop_reason=why)
        return SimpleNamespace(outputs=[row] * params.n)


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))


def test_vllm_rows_go_on_until_their_sentence_is_complete(vllm):
    engine = Engine("Mr. Fox ran. He slept. The end.")
    sampler = VLLMSampler(engine, max_new_tokens=60)
    drawn = sampler.sample(["x", "x"], [2, 0], is_complete=lambda _, text: "ran. H" in text, seed=1)
    assert drawn == [[Continuation("Mr. Fox ran. H")] * 2, []]
    assert len(set(engine.seeds)) == 3
    assert sampler.sample(["x"], [1]) == [[Continuation(engine.text, ended=True)]]
    assert VLLMSampler(engine, max_new_tokens=9).sample(["x"], [1], is_complete=lambda *_: False) == [
        [Continuation(engine.text[:9])]
    ]


def test_vllm_rows_keep_their_order_whichever_is_complete_first(vllm):
    verdicts = iter([False, True, True])
    sampler = VLLMSampler(Engine("He ran. He slept. The end."), max_new_tokens=60)
    [drawn] = sampler.sample(["x"], [2], is_complete=lambda *_: next(verdicts), seed=1)
    assert len(drawn[0].text) > len(drawn[1].text)


def test_vllm_without_prefix_caching_is_warned_of_and_long_contexts_are_refused(vllm):
    with pytest.warns(UserWarning, match="enable_prefix_caching=True"):
        sampler = VLLMSampler(Engine("x", caching=False), max_new_tokens=90)
    with pytest.raises(ValueError, match=r"contexts\[0\] has 21 tokens; .* at most 10"):
        sampler.sample(["y" * 20], [1])
