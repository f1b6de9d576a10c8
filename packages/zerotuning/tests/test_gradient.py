import math

import pytest
import torch
from separata_testing.models import tiny_model
from tiny_task import TASK, examples, talkative_model, word_tokenizer
from zerotuning import Example, TaskSpec, ZeroTuningConfig, apply
from zerotuning.gradient import log_gamma_gradients
from zerotuning.profiling import HeadProfiler
from zerotuning.scoring import Scorer, distribution_entropy

DATA = examples(5)
CHOICES = TaskSpec(
    "choice", TASK.template.replace("{text}", "{text} {choices}"), ("A", "B", "C"), kind="multiple_choice",
    choice_columns=("choices",),
)  # fmt: skip


def gradients(model, metric="log_likelihood", task=TASK, data=DATA, **options):
    return log_gamma_gradients(model, word_tokenizer(), task, data, metric, **options)


@torch.no_grad()
def measured(model, metric, data, task=TASK):
    """The metric of each item in the model's own precision, one prompt at a time."""
    tokenizer = word_tokenizer()
    found = []
    for item in data:
        ids = tokenizer(task.prompt(item))["input_ids"]
        scores = []
        for word in task.labels:
            label = tokenizer(word)["input_ids"]
            log_probs = model(torch.tensor([ids + label])).logits[0].log_softmax(-1)
            scores.append(log_probs[range(len(ids) - 1, len(ids) - 1 + len(label)), label].sum())
        found.append(
            {
                "log_likelihood": scores[item.label],
                "entropy": -distribution_entropy(log_probs[len(ids) - 1]),
                "label_entropy": -distribution_entropy(torch.stack(scores).log_softmax(-1)),
            }[metric]
        )
    return torch.stack(found)


@pytest.mark.parametrize("metric", ["log_likelihood", "entropy", "label_entropy"])
def test_gradients_are_central_differences(metric):
    # Oracle: step 1e-3 in log gamma, relative 1e-3, in float64; norms of Llama would compute in float32.
    model = talkative_model("gpt2").double()
    values, found = gradients(model, metric, batch_rows=3)
    assert torch.allclose(values, measured(model, metric, DATA), rtol=1e-9)
    assert found.shape == (len(DATA), 3, 4)
    for place in ((0, 0), (0, 3), (1, 2), (2, 1)):
        around = []
        for step in (1e-3, -1e-3):
            with apply(model, ZeroTuningConfig.per_layer_head(model, {place: math.exp(step)})):
                around.append(measured(model, metric, DATA))
        expected = (around[0] - around[1]) / 2e-3
        # Beside these the error of the difference itself, which is of the order of the squared step.
        assert torch.allclose(found[:, *place], expected, rtol=1e-3, atol=1e-6 * float(found.abs().max()))


def test_one_layer_has_an_analytic_gradient():
    # Oracle: the sum over rows of dL/do . a_0 (v_0 - o), o being the output of the head.
    model = tiny_model("gpt2", dtype=torch.float64, attn_implementation="eager", n_layer=1)
    attention = model.transformer.h[0].attn
    ids = word_tokenizer()(TASK.prompt(DATA[0]))["input_ids"]
    seen = {}
    hooks = [
        attention.c_attn.register_forward_hook(lambda module, args, output: seen.update(states=output)),
        attention.c_proj.register_forward_pre_hook(lambda module, args: seen.update(output=args[0])),
    ]
    result = model(torch.tensor([ids]), output_attentions=True)
    for hook in hooks:
        hook.remove()
    target = word_tokenizer()(TASK.labels[DATA[0].label])["input_ids"][0]
    log_likelihood = result.logits[0, -1].log_softmax(-1)[target]
    [by_output] = torch.autograd.grad(log_likelihood, seen["output"])
    output, by_output = (each.view(len(ids), 4, -1) for each in (seen["output"], by_output))
    value = seen["states"].chunk(3, dim=-1)[2].view(len(ids), 4, -1)
    weight = result.attentions[0][0, :, :, 0].T[..., None]
    expected = (by_output * weight * (value[0] - output)).sum((0, 2))
    _, found = gradients(model, data=DATA[:1])
    assert torch.allclose(found[0, 0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2"])
def test_batches_and_the_scorer_agree(architecture):
    model = tiny_model(architecture, attn_implementation="eager" if architecture == "gemma2" else None)
    told = []
    values, found = gradients(model, batch_rows=16, advance=told.append)
    alone, single = gradients(model, batch_rows=1)
    assert torch.allclose(values, alone, atol=1e-5)
    assert torch.allclose(found, single, atol=1e-5)
    # In every layer; but where a window has left the initial token behind nothing depends on it.
    assert (found.abs().amax((0, 2)) > 0).tolist() == ([True] * 3 if architecture == "gpt2" else [True, True, False])
    scorer = Scorer(model, word_tokenizer(), TASK, DATA)
    answers = scorer.predict([ZeroTuningConfig.uniform(model, 1.0)])[0]
    assert values.tolist() == pytest.approx(answers.values("log_likelihood", DATA), abs=1e-4)
    assert sum(told) == len(DATA)


def test_labels_of_several_tokens_and_items_with_fewer_labels():
    model = talkative_model().double()
    long = TaskSpec("long", TASK.template, ("yes w1 w2", "no"))
    for metric in ("log_likelihood", "label_entropy"):
        with pytest.warns(UserWarning, match="several tokens"):
            values, _ = gradients(model, metric, long, batch_rows=4)
        assert torch.allclose(values, measured(model, metric, DATA, long), rtol=1e-9)
    data = [Example("w1", 0, ("w2", "w3")), Example("w4", 2, ("w5", "w6", "w7"))]
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["A", "B", "C"])
    values, found = log_gamma_gradients(model, tokenizer, CHOICES, data, "label_entropy")
    answers = Scorer(model, tokenizer, CHOICES, data).predict([ZeroTuningConfig.uniform(model, 1.0)])[0]
    assert values.tolist() == pytest.approx(answers.values("label_entropy"), abs=1e-5)
    assert answers.label_log_probs[0][2] == -math.inf
    assert found.isfinite().all()


def test_weights_get_no_gradient_and_stay_trainable():
    model = talkative_model().train()
    model.lm_head.weight.requires_grad_(False)
    gradients(model)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["lm_head.weight"]
    with pytest.raises(ValueError, match="no label"):
        gradients(model, data=[Example("w1")])
    assert all(parameter.requires_grad for parameter in model.model.parameters())


def test_what_cannot_be_differentiated():
    model = talkative_model()
    with pytest.raises(ValueError, match="has no gradient"):
        gradients(model, "accuracy")
    with pytest.raises(ValueError, match="batch_rows is 0"):
        gradients(model, batch_rows=0)
    with torch.no_grad():
        model.lm_head.weight[7] = math.nan
    with pytest.raises(RuntimeError, match="NaN under gamma 1"):
        gradients(model)


def test_profile_sums_over_the_heads_of_a_unit():
    model = talkative_model()
    profiler = HeadProfiler(model, word_tokenizer(), TASK, DATA)
    pairs, heads, layers = (
        profiler.run(4.0, "gradient", granularity=granularity) for granularity in ("layer_head", "head_index", "layer")
    )
    _, found = gradients(model)
    assert pairs.metric == "log_likelihood"
    assert torch.allclose(pairs.table, (math.log(4) * found.mean(0)).float(), atol=1e-6)
    assert heads.deltas == pytest.approx(pairs.table.sum(0).tolist(), abs=1e-5)
    assert layers.deltas == pytest.approx(pairs.table.sum(1).tolist(), abs=1e-5)
    assert profiler.run(4.0, "gradient", layers=[2]).deltas == pytest.approx(pairs.table[2].tolist(), abs=1e-5)
