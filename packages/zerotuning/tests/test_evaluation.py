import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_task import TASK, answers, examples, talkative_model, word_tokenizer
from torch.distributions import Categorical
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, Lfm2Config, Lfm2ForCausalLM
from zerotuning import Example, ModelId, TaskSpec, ZeroTuningConfig, apply, evaluate
from zerotuning.evaluation import compare
from zerotuning.metrics import UNPARSED
from zerotuning.partial import at_places, last_feed_forward, only_layers, output_forms
from zerotuning.scoring import Predictions, Scorer, batch_sizes

DATA = examples(12)
TEXTS = [example.text for example in DATA]


def configs(model):
    """Nothing, opposite factors by head, and one that changes many answers of every architecture."""
    return [
        ZeroTuningConfig.uniform(model, 1.0),
        ZeroTuningConfig.per_head(model, {0: 1e4, 2: 1e-4}),
        ZeroTuningConfig.uniform(model, 100.0),
    ]


_SINGLE = {}


def one_by_one(model, config, task=TASK):
    """Answers without batches, padding or shared prefixes; kept, since every model of an architecture is the same."""
    key = (model.config.model_type, config.fingerprint, task)
    if key not in _SINGLE:
        _SINGLE[key] = _one_by_one(model, config, task)
    return _SINGLE[key]


@torch.no_grad()
def _one_by_one(model, config, task, texts=TEXTS):
    tokenizer = word_tokenizer()
    parsed, rows, entropies = [], [], []
    labels = [tokenizer(word)["input_ids"] for word in task.labels]
    with apply(model, config):
        for text in texts:
            ids = tokenizer(task.prompt(text))["input_ids"]
            # Labels of one token share a forward.
            inputs = {tuple(label[:-1]): torch.tensor([ids + label[:-1]]) for label in labels}
            found = {rest: model(tokens).logits[0, len(ids) - 1 :].log_softmax(-1) for rest, tokens in inputs.items()}
            log_probs = [found[tuple(label[:-1])] for label in labels]
            rows.append(
                tuple(float(each[range(len(ids_)), ids_].sum()) for each, ids_ in zip(log_probs, labels, strict=True))
            )
            parsed.append(task.parse(tokenizer.decode(log_probs[0][0].argmax())))
            entropies.append(float(Categorical(logits=log_probs[0][0].double()).entropy()))
    return Predictions(tuple(parsed), tuple(rows), tuple(entropies))


def assert_same(found, expected):
    """Equal but for the rounding of other batches."""
    assert found.parsed == expected.parsed
    assert found.constrained == expected.constrained
    assert torch.tensor(found.label_log_probs) == pytest.approx(torch.tensor(expected.label_log_probs), abs=1e-4)
    assert found.entropies == pytest.approx(expected.entropies, abs=1e-4)


@pytest.mark.parametrize(
    ("architecture", "rows"),
    [("llama", 1), *((name, rows) for name in ("llama", "mistral", "gpt2") for rows in (5, 64))],
)
def test_batches_answer_as_single_prompts_do(architecture, rows):
    model = talkative_model(architecture)
    scorer = Scorer(model, word_tokenizer(), TASK, TEXTS, batch_rows=rows)
    assert len(scorer.prefix) == 9
    several = configs(model)
    told = []
    together = scorer.predict(several, advance=told.append)
    assert sum(told) == 3 * len(TEXTS)
    for config, found in zip(several, together, strict=True):
        assert_same(found, one_by_one(model, config))
        assert_same(found, scorer.predict([config])[0])
    # Else rows under the wrong configuration would go unnoticed.
    first, last = (torch.tensor(together[index].label_log_probs) for index in (0, 2))
    assert (first - last).abs().max() > 0.1


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
@torch.no_grad()
def test_configurations_of_the_batches_act(architecture):
    model = talkative_model(architecture)
    ids = torch.tensor([word_tokenizer()(TASK.prompt(TEXTS[0]))["input_ids"]])
    plain = model(ids).logits[0, -1]
    for config in configs(model)[1:]:
        with apply(model, config):
            assert (model(ids).logits[0, -1] - plain).abs().max() > 0.1


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_layers_below_are_run_once_and_nothing_changes(architecture):
    # Of these Gemma scales its embeddings and has windows.
    model = talkative_model(architecture)
    several = [ZeroTuningConfig.per_layer_head(model, {(layer, head): 1e3}) for layer in (1, 2) for head in (0, 3)]
    plain, reusing = (
        Scorer(model, word_tokenizer(), TASK, TEXTS[:8], batch_rows=3, reuse_layers=reuse) for reuse in (False, True)
    )
    runs = []
    hooks = [
        layer.register_forward_hook(lambda module, args, output, index=index: runs.append((index, args[0].shape[1])))
        for index, layer in enumerate(inner_modules(model))
    ]
    # The way back to layer 1 starts anew.
    for config in (*several, several[0]):
        expected = plain.predict([config])[0]
        runs.clear()
        # Bit for bit: equal batches of equal states.
        assert reusing.predict([config])[0] == expected
    for config, again in ((several[1], 1), (several[3], 2)):
        reusing.predict([config])
        runs.clear()
        reusing.predict([config])
        prefix = len(reusing.prefix)
        assert {index for index, tokens in runs if tokens != prefix} == set(range(again, 3))
    for hook in hooks:
        hook.remove()
    together = reusing.predict(several)
    for config, found in zip(several, together, strict=True):
        assert_same(found, plain.predict([config])[0])
    assert all("forward" not in vars(module) for module in model.modules())


def other_model(name):
    sizes = {
        "vocab_size": 260, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    if name == "lfm2":
        # A layer without attention keeps no keys and values of a prefix.
        return Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=["conv", "full_attention"] * 2)).eval()
    # Four streams of states; with `shared`, keys and values of a lower layer besides.
    return Gemma3nForCausalLM(
        Gemma3nTextConfig(
            **sizes, head_dim=8, num_kv_shared_layers=2 * (name == "shared"), vocab_size_per_layer_input=260,
            hidden_size_per_layer_input=8, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    ).eval()  # fmt: skip


@pytest.mark.parametrize("name", ["lfm2", "streams", "shared"])
def test_models_that_keep_something_else_between_layers_or_forwards(name):
    model = other_model(name)
    config = ZeroTuningConfig.uniform(model, 50.0, layers=[ModelId.of(model).layers - 1])
    found = Scorer(model, word_tokenizer(), TASK, TEXTS[:4], batch_rows=2).predict([config])[0]
    assert_same(found, _one_by_one(model, config, TASK, TEXTS[:4]))


def inner_modules(model):
    return [module for module in model.modules() if type(module).__name__.endswith("MLP")]


def test_a_model_that_hands_on_more_than_states_is_run_whole():
    model = talkative_model()
    kept = []
    first, _, last = model.model.layers
    first.register_forward_hook(lambda module, args, output: kept.append(output))
    last.register_forward_hook(lambda module, args, output: output + 0.3 * kept.pop())
    config = ZeroTuningConfig.per_layer_head(model, {(2, 1): 1e3})
    plain, reusing = (
        Scorer(model, word_tokenizer(), TASK, TEXTS[:8], reuse_layers=reuse).predict([config])[0]
        for reuse in (False, True)
    )
    assert reusing == plain


def test_layers_return_states_in_several_forms():
    class Layer(torch.nn.Module):
        def __init__(self, rest):
            super().__init__()
            self.rest = rest

        def forward(self, hidden_states):
            return hidden_states + 1 if self.rest is None else (hidden_states + 1, *self.rest)

    layers = [Layer(None), Layer((None, None)), Layer(())]
    moved = layers[1].forward
    layers[1].forward = moved

    def run():
        states = torch.zeros(1, 2, 3)
        for layer in layers:
            states = layer(hidden_states=states)
            states = states[0] if isinstance(states, tuple) else states
        return states

    forms = output_forms(layers, run)
    with only_layers(layers, forms, 1, 2) as found:
        assert run().unique().tolist() == [1]
    assert [each.unique().tolist() for each in found] == [[1]]
    with only_layers(layers, forms, 1, 3, torch.full((1, 2, 3), 7.0)) as found:
        assert run().unique().tolist() == [9]
    assert found == []
    assert run().unique().tolist() == [3]
    assert (layers[1].forward, "forward" in vars(layers[0])) == (moved, False)
    assert output_forms([*layers, Layer((torch.zeros(1),))], run) is None


def test_items_have_labels_of_their_own():
    model, tokenizer = talkative_model(), word_tokenizer()
    tokenizer.add_tokens(["A", "B", "C"])
    task = TaskSpec(
        "choice", "one two three {text} {choices} Answer:", ("A", "B", "C"), kind="multiple_choice",
        choice_columns=("choices",),
    )  # fmt: skip
    data = [Example("w1", 0, ("w2", "w3")), Example("w1", 2, ("w2", "w3", "w4"))]
    with torch.no_grad():
        model.lm_head.weight[tokenizer.convert_tokens_to_ids("C")] = 3 * model.lm_head.weight.mean(0)
    [found] = Scorer(model, tokenizer, task, data).predict([ZeroTuningConfig.uniform(model, 1.0)])
    assert [each == -math.inf for each in found.label_log_probs[0]] == [False, False, True]
    assert max(found.label_log_probs[1]) > -math.inf
    assert found.constrained[0] in (0, 1)
    assert found.label_probs[0][2] == 0
    assert found.scores(data).accuracy.total == 2
    with pytest.raises(ValueError, match="no label"):
        found.values("log_likelihood", ["w1", Example("w1")][1:] * 2)


@pytest.mark.parametrize("gammas", [{}, {0: 3.0, 1: 4.0}])
def test_nan_names_the_gamma(gammas):
    model = talkative_model()
    config = ZeroTuningConfig.per_head(model, gammas) if gammas else ZeroTuningConfig.uniform(model, 1.0)
    with torch.no_grad():
        model.lm_head.weight[9] = math.nan
    wanted = "gamma 3, 4 on 6 heads of 3 layers" if gammas else "gamma 1 "
    with pytest.raises(RuntimeError, match=f"NaN logits under {wanted}"):
        Scorer(model, word_tokenizer(), TASK, TEXTS[:3]).predict([config])


@pytest.mark.parametrize("looks_around", [False, True])
def test_the_last_feed_forward_works_at_the_answers_unless_it_looks_around(looks_around):
    model = talkative_model()
    last, config = inner_modules(model)[-1], configs(model)[1]
    if looks_around:
        whole = last.forward
        last.forward = lambda hidden: whole(hidden + hidden.roll(1, dims=1))
    own, seen = vars(last).get("forward"), []
    last.gate_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    scorer = Scorer(model, word_tokenizer(), TASK, TEXTS, batch_rows=5)
    found = scorer.predict([config])[0]
    assert vars(last).get("forward") is own
    assert (max(seen[-3:]) > 1) == looks_around
    assert_same(found, _one_by_one(model, config, TASK))


def test_two_feed_forwards_in_a_layer_are_left_whole():
    model = talkative_model()
    assert last_feed_forward(model) is inner_modules(model)[-1]
    model.model.layers[-1].second = torch.nn.Linear(2, 2)
    assert last_feed_forward(model) is None


def test_a_head_that_cannot_be_narrowed_gives_the_same():
    class Wrapped(torch.nn.Module):
        """Its head is not called as a module, so nothing tells it which places are wanted."""

        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def get_output_embeddings(self):
            return torch.nn.Identity()

        def forward(self, **inputs):
            return self.inner(**inputs)

    model = talkative_model()
    config = configs(model)[1]
    narrowed, whole = (
        Scorer(each, word_tokenizer(), TASK, TEXTS, batch_rows=5).predict([config])[0]
        for each in (model, Wrapped(model))
    )
    assert_same(whole, narrowed)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30).map(sorted), st.integers(1, 9))
def test_batches_cover_all_and_waste_little(lengths, most):
    sizes = batch_sizes(lengths, most)
    assert sum(sizes) == len(lengths)
    assert 1 <= min(sizes) <= max(sizes) <= most

    def cost(sizes):
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return sum(32 + size * lengths[end - 1] for size, end in zip(sizes, ends, strict=True))

    full = [most] * (len(lengths) // most)
    full += [len(lengths) - sum(full)] if sum(full) < len(lengths) else []
    assert cost(sizes) <= min(cost(full), cost([1] * len(lengths)))


def test_without_a_shared_prefix():
    model = talkative_model()
    task = TaskSpec("bare", "{text} Answer:", ("yes", "no"))
    scorer = Scorer(model, word_tokenizer(), task, TEXTS)
    assert scorer.prefix == []
    config = configs(model)[1]
    assert_same(scorer.predict([config])[0], one_by_one(model, config, task))


def test_labels_of_several_tokens_are_scored_whole():
    model = talkative_model()
    task = TaskSpec("long", TASK.template, ("yes w1 w2", "yes w3", "no w5"))
    with pytest.warns(UserWarning, match="several tokens"):
        scorer = Scorer(model, word_tokenizer(), task, TEXTS, batch_rows=7)
    config = configs(model)[1]
    found = scorer.predict([config])[0]
    expected = one_by_one(model, config, task)
    assert found.constrained == expected.constrained
    assert torch.tensor(found.label_log_probs) == pytest.approx(torch.tensor(expected.label_log_probs), abs=1e-4)
    # "yes" begins two labels and decides nothing; "no" begins one.
    assert set(found.parsed) <= {UNPARSED, 2}
    said = scorer.tokenizer.convert_tokens_to_ids(["yes", "no", "w1"])
    assert [scorer._parse([token]) for token in said] == [UNPARSED, 2, UNPARSED]


def test_tokenizer_that_ends_every_text():
    class Ending:
        eos_token_id = 2

        def __init__(self):
            self.inner = word_tokenizer()

        def __call__(self, text, add_special_tokens=True):
            found = self.inner(text)["input_ids"]
            if add_special_tokens:
                found = [*found, 2] if isinstance(text, str) else [[*ids, 2] for ids in found]
            return {"input_ids": found}

    model = talkative_model()
    scorer = Scorer(model, Ending(), TASK, TEXTS)
    plain = Scorer(model, word_tokenizer(), TASK, TEXTS)
    assert (scorer.prompts, scorer.label_tokens) == (plain.prompts, plain.label_tokens)


def test_an_end_token_is_no_answer():
    model, tokenizer = talkative_model(), word_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.add_tokens(["A", "B", "C", "D"])
    task = TaskSpec(
        "choice", "{text} {choices} Answer:", tuple("ABCD"), kind="multiple_choice", choice_columns=("choices",)
    )
    scorer = Scorer(model, tokenizer, task, [Example("w1", 0, ("w2",) * 4)])
    said = tokenizer.convert_tokens_to_ids(["<|end|>", "D"])
    assert [scorer._parse([token]) for token in said] == [UNPARSED, 3]


def test_model_is_left_as_it_was():
    model = talkative_model().train()
    Scorer(model, word_tokenizer(), TASK, TEXTS[:3]).predict(configs(model)[:1])
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_bad_input():
    model, tokenizer = talkative_model(), word_tokenizer()
    with pytest.raises(ValueError, match="batch_rows is 0"):
        Scorer(model, tokenizer, TASK, TEXTS, batch_rows=0)
    with pytest.raises(ValueError, match="answer_tokens is 0"):
        Scorer(model, tokenizer, TASK, TEXTS, answer_tokens=0)
    with pytest.raises(ValueError, match="items is empty"):
        Scorer(model, tokenizer, TASK, [])
    with pytest.raises(ValueError, match="item 1 has no tokens"):
        Scorer(model, tokenizer, TaskSpec("bare", "{text}", ("yes", "no")), ["w1", ""])
    with pytest.raises(ValueError, match="the model takes 512: shorten"):
        Scorer(model, tokenizer, TASK, ["w1 " * 600])


def test_evaluate_pairs_the_two():
    model = talkative_model()
    vanilla, config, _ = configs(model)
    result = evaluate(model, word_tokenizer(), TASK, DATA, config, batch_rows=8)
    expected = compare(DATA, one_by_one(model, vanilla), one_by_one(model, config))
    assert result == expected
    assert result.to_json()["verdict"] == result.verdict
    with pytest.raises(ValueError, match="answer_tokens is 0"):
        evaluate(model, word_tokenizer(), TASK, DATA, config, answer_tokens=0)


def test_evaluate_refuses_useless_data():
    model = talkative_model()
    with pytest.raises(ValueError, match="empty"):
        evaluate(model, word_tokenizer(), TASK, [], configs(model)[1])
    with pytest.raises(ValueError, match="have the label"):
        evaluate(model, word_tokenizer(), TASK, DATA[::2], configs(model)[1])


@pytest.mark.parametrize(
    ("vanilla", "tuned", "verdict"),
    [
        ((0,) * 12, (0, 1) * 6, "helped"),
        ((0, 1) * 6, (0,) * 12, "hurt"),
        ((0, 1) * 6, (0, 0, 0, 1) * 3, "no difference shown"),
    ],
)
def test_verdict(vanilla, tuned, verdict):
    assert compare(DATA, answers(vanilla), answers(tuned)).verdict == verdict


def test_narrowed_outputs_may_come_in_a_tuple_and_other_shapes_pass():
    class Routed(torch.nn.Module):
        def forward(self, hidden):
            return hidden + 1, len(hidden)

    module, hidden = Routed(), torch.randn(2, 3, 4)
    with at_places(module, torch.tensor([[[0]], [[2]]]), 3):
        wide, extra = module(hidden)
        assert torch.equal(module(hidden[:, :2])[0], hidden[:, :2] + 1)
    assert extra == 2
    expected = torch.zeros(2, 3, 4)
    expected[0, 0], expected[1, 2] = hidden[0, 0] + 1, hidden[1, 2] + 1
    assert torch.equal(wide, expected)
