import pytest
import torch
from tiny_task import TASK, answers, examples, talkative_model, word_tokenizer
from torch.distributions import Categorical
from zerotuning import TaskSpec, ZeroTuningConfig, apply, evaluate
from zerotuning.evaluation import compare
from zerotuning.metrics import UNPARSED
from zerotuning.scoring import Predictions, Scorer

DATA = examples()
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
def _one_by_one(model, config, task):
    tokenizer = word_tokenizer()
    parsed, rows, entropies = [], [], []
    for text in TEXTS:
        ids = tokenizer(task.prompt(text))["input_ids"]
        scores = []
        for word in task.labels:
            label = tokenizer(word)["input_ids"]
            with apply(model, config):
                log_probs = model(torch.tensor([ids + label])).logits[0].log_softmax(-1)
            scores.append(sum(float(log_probs[len(ids) - 1 + at, token]) for at, token in enumerate(label)))
        parsed.append(task.parse(tokenizer.decode(log_probs[len(ids) - 1].argmax())))
        rows.append(tuple(scores))
        entropies.append(float(Categorical(logits=log_probs[len(ids) - 1].double()).entropy()))
    return Predictions(tuple(parsed), tuple(rows), tuple(entropies))


def assert_same(found, expected):
    """Equal but for the rounding of other batches."""
    assert found.parsed == expected.parsed
    assert found.constrained == expected.constrained
    assert torch.tensor(found.label_log_probs) == pytest.approx(torch.tensor(expected.label_log_probs), abs=1e-4)
    assert found.entropies == pytest.approx(expected.entropies, abs=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("rows", [1, 5, 64])
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
    assert together[0].constrained != together[2].constrained


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
@torch.no_grad()
def test_configurations_of_the_batches_act(architecture):
    model = talkative_model(architecture)
    ids = torch.tensor([word_tokenizer()(TASK.prompt(TEXTS[0]))["input_ids"]])
    plain = model(ids).logits[0, -1]
    for config in configs(model)[1:]:
        with apply(model, config):
            assert (model(ids).logits[0, -1] - plain).abs().max() > 0.1


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


def test_model_is_left_as_it_was():
    model = talkative_model().train()
    Scorer(model, word_tokenizer(), TASK, TEXTS[:3]).predict(configs(model)[:1])
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_bad_input():
    model, tokenizer = talkative_model(), word_tokenizer()
    with pytest.raises(ValueError, match="batch_rows is 0"):
        Scorer(model, tokenizer, TASK, TEXTS, batch_rows=0)
    with pytest.raises(ValueError, match="items is empty"):
        Scorer(model, tokenizer, TASK, [])
    with pytest.raises(ValueError, match="the model takes 512: shorten"):
        Scorer(model, tokenizer, TASK, ["w1 " * 600])


def test_evaluate_pairs_the_two():
    model = talkative_model()
    vanilla, config, _ = configs(model)
    result = evaluate(model, word_tokenizer(), TASK, DATA, config, batch_rows=8)
    expected = compare(DATA, one_by_one(model, vanilla), one_by_one(model, config))
    assert result == expected
    assert result.to_json()["verdict"] == result.verdict


def test_evaluate_refuses_useless_data():
    model = talkative_model()
    with pytest.raises(ValueError, match="empty"):
        evaluate(model, word_tokenizer(), TASK, [], configs(model)[1])
    with pytest.raises(ValueError, match="have the label"):
        evaluate(model, word_tokenizer(), TASK, DATA[::2], configs(model)[1])


@pytest.mark.parametrize(
    ("vanilla", "tuned", "verdict"),
    [
        ((0,) * 24, (0, 1) * 12, "helped"),
        ((0, 1) * 12, (0,) * 24, "hurt"),
        ((0, 1) * 12, (0, 1) * 12, "no difference shown"),
    ],
)
def test_verdict(vanilla, tuned, verdict):
    assert compare(DATA, answers(vanilla), answers(tuned)).verdict == verdict
