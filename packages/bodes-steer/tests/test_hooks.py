"""Steering tiny models: every way to decode gives what a plain loop gives that steers whole sequences anew."""

import copy
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from bodes_steer import CAA, ODESteer, steer
from bodes_steer.files import Origin
from separata_core.models import capture_hidden_states, edit_hidden_states
from separata_testing.models import ARCHITECTURES, tiny_model
from separata_testing.suites import BatchConsistency, ModelUnchangedAfterExit

LAYER, T, NEW = 1, 6.0, 6
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}


def fitted(seed=0, d=32, **options):
    generator = torch.Generator().manual_seed(seed)
    pos = torch.randn(40, d, generator=generator, dtype=torch.float64) + 0.5
    neg = torch.randn(40, d, generator=generator, dtype=torch.float64)
    return ODESteer(n_components=64, steps=3, C=100.0, random_state=seed, **options).fit(pos, neg)


@pytest.fixture(scope="module")
def steerer():
    return fitted()


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", dtype=torch.float64)


def prompt(rows=1, length=7, seed=3):
    return torch.randint(4, 260, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference_logits(model, tokens, ends, steerers):
    """Logits of unpadded rows, with blocks steered from the index `ends` on; `steerers`: by block, with its T."""

    def edit(each, strength):
        def apply(states):
            tail = states[:, ends:]
            return torch.cat([states[:, :ends], each.flow(tail.reshape(-1, 32), strength).view_as(tail)], 1)

        return apply

    with edit_hidden_states(model, {layer: edit(*pair) for layer, pair in steerers.items()}):
        return model(input_ids=tokens, use_cache=False).logits


def reference_loop(model, tokens, steerers):
    """Greedy continuation without a cache, row for row."""
    ends = tokens.shape[1] - 1
    for _ in range(NEW):
        logits = reference_logits(model, tokens, ends, steerers)[:, -1]
        logits[:, 2] = float("-inf")  # the end of a text, which min_new_tokens forbids
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return tokens


@torch.no_grad()
def logits(model, tokens, **options):
    return model(input_ids=tokens, use_cache=False, **options).logits


WAYS = {
    "with a cache": {},
    "without": {"use_cache": False},
    "prefill in chunks": {"prefill_chunk_size": 3},
    "prefill token by token": {"prefill_chunk_size": 1},
    "static cache": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "drafts": {},
    "embeddings": {},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_decoding_is_the_plain_loop(llama, steerer, way):
    from transformers import DynamicCache

    tokens = prompt()
    expected = reference_loop(llama, tokens, {LAYER: (steerer, T)})
    options = {**GREEDY, **WAYS[way]}
    if way == "drafts":
        options["assistant_model"] = tiny_model("llama", dtype=torch.float64, seed=1)
        # The first releases draft without a least length only.
        options = {**options, "min_new_tokens": None, "suppress_tokens": [2]}
    if way.startswith("prefill"):
        options["past_key_values"] = DynamicCache(config=llama.config)  # which the first releases do not make here
    given = {"inputs_embeds": llama.get_input_embeddings()(tokens)} if way == "embeddings" else {"input_ids": tokens}
    with steer(llama, steerer, layer=LAYER, T=T):
        found = llama.generate(**given, attention_mask=torch.ones_like(tokens), **options)
    assert found[:, -NEW:].tolist() == expected[:, -NEW:].tolist()


def test_steering_acts(llama, steerer):
    tokens = prompt()
    plain, moved = logits(llama, tokens), reference_logits(llama, tokens, 6, {LAYER: (steerer, T)})
    assert (plain[:, 6] - moved[:, 6]).abs().max() > 1e-3
    with steer(llama, steerer, layer=LAYER, T=T):
        torch.testing.assert_close(logits(llama, tokens), moved, atol=1e-9, rtol=1e-9)
    # A negative T goes the other way.
    with steer(llama, steerer, layer=LAYER, T=-T):
        back = logits(llama, tokens)
    torch.testing.assert_close(back, reference_logits(llama, tokens, 6, {LAYER: (steerer, -T)}), atol=1e-9, rtol=1e-9)


def test_the_default_is_not_the_literal_last_position(llama, steerer):
    tokens = torch.cat([prompt(), prompt(1, 4, 8)], 1)
    with steer(llama, steerer, layer=LAYER, T=T, prompt_lengths=[7]):
        from_end = logits(llama, tokens)
    with steer(llama, steerer, layer=LAYER, T=T, positions="last"):
        last = logits(llama, tokens)
    torch.testing.assert_close(from_end, reference_logits(llama, tokens, 6, {LAYER: (steerer, T)}))
    torch.testing.assert_close(last, reference_logits(llama, tokens, 10, {LAYER: (steerer, T)}))
    assert (from_end[:, -1] - last[:, -1]).abs().max() > 1e-4
    # With a cache both are the same, as in the paper's code.
    with_cache = {}
    for rule in ("from_prompt_end", "last"):
        with torch.no_grad(), steer(llama, steerer, layer=LAYER, T=T, positions=rule):
            cache = llama(input_ids=tokens[:, :7]).past_key_values
            steps = [llama(input_ids=tokens[:, i : i + 1], past_key_values=cache).logits for i in range(7, 11)]
            with_cache[rule] = torch.cat(steps, 1)
        torch.testing.assert_close(with_cache[rule], from_end[:, 7:], atol=1e-9, rtol=1e-9)


def falcon():
    from transformers import AutoModelForCausalLM, FalconConfig

    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=272, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, pad_token_id=0, eos_token_id=2
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


@pytest.mark.parametrize("architecture", [*(a for a in ARCHITECTURES if a != "llama"), "falcon"])
def test_families(architecture, steerer):
    model = falcon() if architecture == "falcon" else tiny_model(architecture, dtype=torch.float64)
    tokens = prompt(2, 9)
    expected = reference_loop(model, tokens, {LAYER: (steerer, T)})
    with steer(model, steerer, layer=LAYER, T=T):
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **GREEDY)
    assert found.tolist() == expected.tolist()


def test_several_blocks_at_once_and_by_nesting(llama, steerer):
    other = fitted(5)
    tokens = prompt(2)
    expected = reference_loop(llama, tokens, {0: (steerer, 2.0), 2: (other, 5.0)})
    with steer(llama, {0: steerer, 2: other}, T={0: 2.0, 2: 5.0}):
        assert llama.generate(tokens, **GREEDY).tolist() == expected.tolist()
    with steer(llama, steerer, layer=0, T=2.0):
        with steer(llama, other, layer=2, T=5.0):
            assert llama.generate(tokens, **GREEDY).tolist() == expected.tolist()
        once = llama.generate(tokens, **GREEDY)
    assert once.tolist() == reference_loop(llama, tokens, {0: (steerer, 2.0)}).tolist()
    assert "generate" not in vars(llama)


@torch.no_grad()
def test_beams_score_what_the_steered_model_says(llama, steerer):
    tokens = prompt(2)
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True}
    with steer(llama, steerer, layer=LAYER, T=T):
        found = llama.generate(tokens, attention_mask=torch.ones_like(tokens), output_scores=True, **options)
    log_probs = reference_logits(llama, found.sequences, 6, {LAYER: (steerer, T)}).log_softmax(-1)
    scores = log_probs[:, 6:-1].gather(2, found.sequences[:, 7:, None]).sum((1, 2)) / NEW
    torch.testing.assert_close(found.sequences_scores.double(), scores, atol=1e-5, rtol=1e-5)


def test_prompts_padded_on_either_side_and_sampled_copies(llama, steerer):
    rows = [prompt(1, length, length)[0] for length in (3, 7, 5)]
    alone = [reference_loop(llama, row[None], {LAYER: (steerer, T)})[0, -NEW:].tolist() for row in rows]
    left = torch.stack([torch.nn.functional.pad(row, (7 - len(row), 0)) for row in rows])
    for given in ({"attention_mask": (left != 0).long()}, {}):
        with steer(llama, steerer, layer=LAYER, T=T):
            found = llama.generate(left, **given, **GREEDY)
        assert found[:, -NEW:].tolist() == alone
    # On the right `generate` puts the new tokens behind the padding; the last token of each prompt is steered still.
    right = torch.stack([torch.nn.functional.pad(row, (0, 7 - len(row))) for row in rows])
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 1}
    seen = {}
    with steer(llama, steerer, layer=LAYER, T=T), capture_hidden_states(llama, [LAYER]) as records:
        llama.generate(right, attention_mask=(right != 0).long(), **{**options, "min_new_tokens": 1})
        seen["steered"] = records[LAYER][0]
    with capture_hidden_states(llama, [LAYER]) as records:
        llama.generate(right, attention_mask=(right != 0).long(), **{**options, "min_new_tokens": 1})
    changed = (seen["steered"] - records[LAYER][0]).abs().amax(-1) > 1e-9
    assert changed.nonzero().tolist() == [[0, 2], [1, 6], [2, 4]]


def test_only_later_blocks_and_positions_see_a_change_of_strength(llama, steerer):
    tokens = prompt(2, 8)
    seen = []
    for strength in (2.0, 5.0):
        with steer(llama, steerer, layer=LAYER, T=strength, prompt_lengths=4), capture_hidden_states(llama) as records:
            logits(llama, tokens)
        seen.append(records)
    for layer in range(3):
        first, second = (each[layer][0] for each in seen)
        same = first.eq(second).all(-1)
        assert same[:, :3].all()
        assert bool(same.all()) == (layer < LAYER)
        assert layer < LAYER or not same[:, 3:].any()


def test_no_strength_changes_nothing(llama, steerer):
    tokens = prompt()
    plain = logits(llama, tokens)
    with steer(llama, steerer, layer=LAYER, T=0):
        assert torch.equal(logits(llama, tokens), plain)
        assert "generate" not in vars(llama)
    with steer(llama, {0: steerer, 2: steerer}, T={0: 0.0, 2: 1.0}):
        assert not torch.equal(logits(llama, tokens), plain)
    assert torch.equal(logits(llama, tokens), plain)


def test_a_strength_that_ruins_fluency_is_warned_of(llama, steerer):
    most = steerer.absolute_T(0.5)
    with (
        pytest.warns(UserWarning, match="more than half of their median length"),
        steer(llama, steerer, layer=1, T=-1.01 * most),
    ):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with steer(llama, steerer, layer=1, T=0.99 * most):
            pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_types_are_steered_in_float32(steerer, dtype):
    model, tokens = tiny_model("llama", dtype=dtype), prompt()
    with capture_hidden_states(model, [LAYER]) as plain:
        logits(model, tokens)
    with steer(model, steerer, layer=LAYER, T=T), capture_hidden_states(model, [LAYER]) as moved:
        assert logits(model, tokens).dtype == dtype
    expected = steerer.flow(plain[LAYER][0][:, -1].float(), T).to(dtype)
    assert torch.equal(moved[LAYER][0][:, -1], expected)
    assert torch.equal(moved[LAYER][0][:, :-1], plain[LAYER][0][:, :-1])


def test_float16_that_overflows_is_told():
    far = CAA().fit(torch.full((2, 32), 6e4), torch.zeros(2, 32))
    model = tiny_model("llama", dtype=torch.float16)
    with steer(model, far, layer=LAYER, T=2.0), pytest.raises(ValueError, match=r"float16.*bfloat16"):
        logits(model, prompt())


def test_blocks_that_return_tuples(llama, steerer):
    tokens = prompt()
    model = copy.deepcopy(llama)
    expected = reference_logits(model, tokens, 6, {LAYER: (steerer, T)})
    block = model.model.layers[LAYER]
    forward, seen = block.forward, []
    block.forward = lambda *args, **kwargs: (forward(*args, **kwargs), "weights")

    def unpack(module, args, output):
        seen.append(output[1])
        return output[0]

    with steer(model, steerer, layer=LAYER, T=T):
        handle = block.register_forward_hook(unpack)  # as an older decoder would take it apart
        torch.testing.assert_close(logits(model, tokens), expected, atol=1e-9, rtol=1e-9)
        handle.remove()
        block.forward = lambda *args, **kwargs: forward(*args, **kwargs)[None]
        with pytest.raises(ValueError, match=r"model.layers.1 returned states of 4 dimensions"):
            logits(model, tokens)
    assert seen == ["weights"]


# The compiler cannot follow how objects are made whose annotations are checked: these run in a process without.
UNCHECKED = "BODES_STEER_TESTS_UNCHECKED"
only_unchecked = pytest.mark.skipif(UNCHECKED not in os.environ, reason="runs inside test_compiled")


@pytest.mark.slow
def test_compiled():
    environment = {**os.environ, UNCHECKED: "1", "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    command = [sys.executable, "-m", "pytest", "--typecheck", "none", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", "test_inside_"], env=environment, capture_output=True, text=True, check=False
    )
    assert "2 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


@only_unchecked
def test_inside_compiled_without_a_break(llama, steerer):
    tokens, mask = prompt(2), torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    plain = logits(llama, tokens)
    compiled = torch.compile(llama, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled, tokens), plain)
    for strength in (T, 2.0):
        with steer(llama, steerer, layer=LAYER, T=strength):
            torch.testing.assert_close(logits(compiled, tokens), logits(llama, tokens))
            torch.testing.assert_close(
                logits(compiled, tokens, attention_mask=mask)[:, 2:],
                logits(llama, tokens, attention_mask=mask)[:, 2:],
            )
    assert torch.equal(logits(compiled, tokens), plain)


@only_unchecked
def test_inside_generate_compiled_with_a_static_cache(llama, steerer):
    from transformers import StaticCache

    tokens = prompt(1, 5)
    expected = reference_loop(llama, tokens, {LAYER: (steerer, T)})[0].tolist()
    model = copy.deepcopy(llama)
    with torch.no_grad(), steer(model, steerer, layer=LAYER, T=T):
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        cache = StaticCache(config=model.config, max_cache_len=16)
        given, found = tokens, tokens
        for step in range(3):
            place = torch.arange(found.shape[1] - given.shape[1], found.shape[1])
            out = compiled(input_ids=given, position_ids=place[None], past_key_values=cache, use_cache=True).logits
            out[:, -1, 2] = float("-inf")
            given = out[:, -1].argmax(-1, keepdim=True)
            found = torch.cat([found, given], 1)
            assert found[0].tolist() == expected[: 6 + step]


def test_models_spread_over_devices_and_the_disk(llama, steerer, tmp_path):
    from accelerate import dispatch_model

    tokens = prompt(2)
    expected = reference_loop(llama, tokens, {LAYER: (steerer, T)})
    places = {name: "cpu" for name, _ in llama.named_children()} | {"model": "cpu"}
    del places["model"]
    places |= {f"model.{name}": "cpu" for name, _ in llama.model.named_children() if name != "layers"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    spread = dispatch_model(copy.deepcopy(llama), places, main_device="cpu", offload_dir=tmp_path)
    with steer(spread, steerer, layer=LAYER, T=T):
        assert spread.generate(tokens, **GREEDY).tolist() == expected.tolist()


def test_the_generate_of_the_instance_is_put_back(llama, steerer):
    model = copy.deepcopy(llama)
    own = model.generate
    model.generate = own
    tokens = prompt()
    with steer(model, steerer, layer=LAYER, T=T):
        assert model.generate.__name__ == "generate"
        inner = copy.deepcopy(model)
        assert inner.generate(tokens, **GREEDY).shape == (1, 7 + NEW)
    assert vars(model)["generate"] is own
    # A copy that was made inside goes unsteered afterwards.
    assert torch.equal(logits(inner, tokens), logits(llama, tokens))
    # Contexts that do not close in the order they were opened leave nothing either.
    expected = reference_loop(llama, tokens, {LAYER: (steerer, T)}).tolist()
    first, second = (steer(llama, steerer, layer=LAYER, T=T) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    found = llama.generate(tokens, **GREEDY).tolist()
    second.__exit__(None, None, None)
    assert found == expected
    assert "generate" not in vars(llama)


def test_a_forward_that_another_puts_on_a_block_meanwhile_stays(llama, steerer):
    model, tokens = copy.deepcopy(llama), prompt()
    expected = reference_logits(model, tokens, 6, {LAYER: (steerer, T)})
    block = model.model.layers[LAYER]
    outer, inner = steer(model, steerer, layer=LAYER, T=T), steer(model, steerer, layer=0, T=0.0)
    again = steer(model, {LAYER: steerer}, T=T, positions=lambda call: torch.zeros(1, 7, dtype=torch.bool))
    calls = []
    with outer:
        before = block.forward
        block.forward = other = lambda *args, **kwargs: calls.append(1) or before(*args, **kwargs)
        with inner, again:
            torch.testing.assert_close(logits(model, tokens), expected, atol=1e-9, rtol=1e-9)
        assert block.forward is other
    assert block.forward is other
    assert calls == [1]
    assert not block._forward_hooks


def test_threads_have_prompts_of_their_own(llama, steerer):
    prompts = [prompt(1, length, length) for length in (3, 12)]
    expected = [reference_loop(llama, tokens, {LAYER: (steerer, T)}).tolist() for tokens in prompts]
    found: dict[int, list] = {}

    def run(index):
        found[index] = [llama.generate(prompts[index], **GREEDY).tolist() for _ in range(3)]

    with steer(llama, steerer, layer=LAYER, T=T):
        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {index: [each] * 3 for index, each in enumerate(expected)}


def test_generate_goes_on_with_a_cache_and_from_nothing(llama, steerer):
    from transformers import DynamicCache

    tokens = prompt(1, 9)
    with torch.no_grad():
        cache = llama(input_ids=tokens[:, :5], past_key_values=DynamicCache(config=llama.config)).past_key_values
    expected = reference_loop(llama, tokens, {LAYER: (steerer, T)})
    with steer(llama, steerer, layer=LAYER, T=T):
        found = llama.generate(tokens, past_key_values=cache, attention_mask=torch.ones_like(tokens), **GREEDY)
        begun = llama.generate(**GREEDY)
    assert found.tolist() == expected.tolist()
    assert begun.tolist() == reference_loop(llama, torch.tensor([[1]]), {LAYER: (steerer, T)}).tolist()


def test_the_block_by_name_and_by_origin(llama, steerer):
    tokens = prompt()
    expected = reference_logits(llama, tokens, 6, {LAYER: (steerer, T)})
    known = copy.copy(steerer)
    known.origin_ = Origin(layer=LAYER)
    known.T = T
    for options in ({}, {"layer_module": "model.layers.1"}, {"layer": 1, "layer_module": "model.layers.1"}):
        with steer(llama, known, **options):
            torch.testing.assert_close(logits(llama, tokens), expected, atol=1e-9, rtol=1e-9)
    with pytest.warns(UserWarning, match="block 1 and steers block 2"), steer(llama, known, layer=2):
        pass


class Odd(torch.nn.Module):
    """A language model that no resolver knows."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 32)
        self.stack = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))

    def forward(self, input_ids):
        states = self.embed(input_ids)
        for block in self.stack:
            states = block(states)
        return states


def test_models_that_no_resolver_knows(steerer):
    model, tokens = Odd(), torch.tensor([[3, 4, 5]])
    with pytest.raises(ValueError, match="no decoder layers"), steer(model, steerer, layer=1):
        pass
    with torch.no_grad():
        plain = model(tokens)
        with steer(model, steerer, layer_module="stack.2", T=T):
            found = model(tokens)
    assert torch.equal(found[:, :2], plain[:, :2])
    torch.testing.assert_close(found[:, 2], steerer.flow(plain[:, 2], T))
    no_block = r"'stack' is no decoder block.*valid names: stack.0 to stack.2"
    with pytest.raises(ValueError, match=no_block), steer(model, steerer, layer_module="stack"):
        pass
    bare = torch.nn.Sequential(model.stack)
    with pytest.raises(ValueError, match="no module around"), steer(bare, steerer, layer_module="0.0"):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, r"layer=3 does not exist.*0 to 2 \(model.layers.0 to model.layers.2\)"),
        ({"layer": -1}, "layer=-1 does not exist"),
        ({}, "does not know which one it was fitted on"),
        ({"layer_module": "model.norm"}, "'model.norm' is no decoder block.*model.layers.0 to model.layers.2"),
        ({"layer": 0, "layer_module": "model.layers.1"}, "name two blocks"),
        ({"layer": 1, "T": float("nan")}, "T=nan; it must be a finite number"),
        ({"layer": 1, "T": {2: 1.0}}, "no value for block 1"),
        ({"layer": 1, "T": {1: 1.0, 2: 1.0}}, r"blocks \[2\], which have no steerer"),
        ({"layer": 1, "positions": "end"}, "from_prompt_end"),
    ],
)
def test_bad_arguments(llama, steerer, options, message):
    with pytest.raises(ValueError, match=message), steer(llama, steerer, **options):
        pass
    assert not llama.model.layers[1]._forward_hooks


def test_bad_steerers(llama, steerer):
    with pytest.raises(ValueError, match="not fitted"), steer(llama, ODESteer(), layer=1):
        pass
    with pytest.raises(ValueError, match=r"width 8.*have 32"), steer(llama, fitted(d=8), layer=1):
        pass
    with pytest.raises(ValueError, match="steerer is empty"), steer(llama, {}):
        pass
    with pytest.raises(ValueError, match="go with a single one"), steer(llama, {1: steerer}, layer=1):
        pass


def test_calls_whose_positions_cannot_be_told(llama, steerer):
    tokens = prompt()
    with steer(llama, steerer, layer=LAYER, T=T):
        with pytest.raises(ValueError, match="guidance_scale"):
            llama.generate(tokens, guidance_scale=2.0, **GREEDY)
        with pytest.raises(ValueError, match="cu_seq_lens_q is given"):
            logits(llama, tokens, cu_seq_lens_q=torch.tensor([0, 7]))
        with pytest.raises(ValueError, match="without input_ids and inputs_embeds"):
            llama.model(input_ids=None, inputs_embeds=None)
    for lengths in ([2, 3], [2, 3, 4]):  # of another batch
        with steer(llama, steerer, layer=LAYER, T=T, prompt_lengths=lengths), pytest.raises(ValueError, match="4 rows"):
            logits(llama, prompt(4))
    with steer(llama, steerer, layer=LAYER, T=T), pytest.raises(ValueError, match="outside a forward"):
        llama.model.layers[LAYER](
            torch.zeros(1, 2, 32, dtype=torch.float64),
            position_embeddings=(torch.zeros(1, 2, 8).double(), torch.zeros(1, 2, 8).double()),
        )


def state_space_models():
    from transformers import MambaConfig, MambaForCausalLM, RwkvConfig, RwkvForCausalLM

    sizes = {"vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 2}
    yield "backbone.layers.1", MambaForCausalLM(MambaConfig(state_size=4, **sizes)).eval()
    yield "rwkv.blocks.1", RwkvForCausalLM(RwkvConfig(attention_hidden_size=32, **sizes)).eval()


def test_states_that_do_not_count_tokens_are_refused_and_not_needed(steerer):
    tokens = prompt()
    options = {**GREEDY, "max_new_tokens": 2, "min_new_tokens": 2, "output_logits": True}
    options |= {"attention_mask": torch.ones_like(tokens), "return_dict_in_generate": True}
    for name, model in state_space_models():
        with steer(model, steerer, layer_module=name, T=T):
            with pytest.raises(ValueError, match=r"how many tokens it holds.*use_cache=False"):
                model.generate(tokens, **options)
            found = model.generate(tokens, use_cache=False, **options)
        with steer(model, steerer, layer_module=name, T=T, prompt_lengths=7):
            expected = logits(model, found.sequences)[:, -2]
        torch.testing.assert_close(found.logits[1], expected, atol=1e-4, rtol=1e-4)


class TestUnchanged(ModelUnchangedAfterExit):
    def context(self, model):
        return steer(model, fitted(), layer=LAYER, T=T)


class TestScoring(BatchConsistency):
    def context(self, model):
        return steer(model, fitted(), layer=LAYER, T=T, prompt_lengths=3)


class TestAll(BatchConsistency):
    lengths = (1, 9)

    def context(self, model):
        return steer(model, fitted(), layer=LAYER, T=T, positions="all")
