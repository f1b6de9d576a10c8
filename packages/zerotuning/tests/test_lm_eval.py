import json
import sys

import pytest
import torch
import zerotuning
from separata_testing.models import tiny_model
from tiny_task import TASK, talkative_model, word_tokenizer, write_files
from zerotuning import ZeroTuningConfig
from zerotuning.lm_eval import MODEL_NAME, harness_model, main, register

PROMPTS = ["w1", "w5 w6 w7 w8 w9 w10 w11", "w3 w2", "w40 w41 w42 w43"]
QUIET = pytest.mark.filterwarnings("ignore")  # the harness's own


def tokenizer_with_end():
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "<eos>"
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = write_files(tmp_path_factory.mktemp("lm_eval"))
    tokenizer_with_end().save_pretrained(place / "model")
    return place


@pytest.fixture
def tuned():
    """A model, its tokenizer and a configuration that acts."""
    model = talkative_model()
    return model, tokenizer_with_end(), ZeroTuningConfig.uniform(model, 5.0)


def requests(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def log_likelihoods(harness):
    return [pair[0] for pair in harness.loglikelihood(requests("loglikelihood", [(p, " yes") for p in PROMPTS]))]


@torch.no_grad()
def by_hand(model, tokenizer):
    """Log-likelihood of " yes" after each prompt, one at a time."""
    yes = tokenizer("yes")["input_ids"][0]
    found = []
    for prompt in PROMPTS:
        logits = model(**tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)).logits
        found.append(float(logits[0, -1].log_softmax(-1)[yes]))
    return found


@QUIET
def test_log_likelihoods_of_a_padded_batch_are_ours(tuned):
    model, tokenizer, config = tuned
    plain = by_hand(model, tokenizer)
    with zerotuning.apply(model, config):
        ours = by_hand(model, tokenizer)
    assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) > 1e-2
    harness = harness_model(model, tokenizer, config, batch_size=4)
    assert log_likelihoods(harness) == pytest.approx(ours, abs=1e-4)
    zerotuning.detach(model)
    assert log_likelihoods(harness) == pytest.approx(plain, abs=1e-4)


@QUIET
def test_a_block_around_the_harness_does_the_same(tuned):
    from lm_eval.models.huggingface import HFLM

    model, tokenizer, config = tuned
    with zerotuning.apply(model, config):
        ours = by_hand(model, tokenizer)
        assert log_likelihoods(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3)) == pytest.approx(
            ours, abs=1e-4
        )


@QUIET
def test_texts_generated_from_a_left_padded_batch_are_those_of_single_prompts():
    model, tokenizer = tiny_model("llama"), tokenizer_with_end()
    with torch.no_grad():
        model.get_output_embeddings().weight[:4] = 0  # no text ends
    config = ZeroTuningConfig.uniform(model, 1e4)

    def by_hand():
        texts = []
        for prompt in PROMPTS:
            inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            whole = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
            texts.append(tokenizer.decode(whole[inputs["input_ids"].shape[1] :]).split())
        return texts

    plain = by_hand()
    harness = harness_model(model, tokenizer, config, batch_size=4)
    options = {"until": ["<eos>"], "max_gen_toks": 12, "do_sample": False}
    texts = harness.generate_until(requests("generate_until", [(prompt, options) for prompt in PROMPTS]))
    assert [each.split() for each in texts] == by_hand() != plain


def test_a_harness_that_cannot_be_made_leaves_the_model_alone(tuned):
    model, tokenizer, config = tuned
    with pytest.raises(TypeError):
        harness_model(model, tokenizer, config, tokenizer=tokenizer)
    with pytest.raises(AssertionError):
        harness_model(model, tokenizer, config, parallelize=True)
    with zerotuning.apply(model, config):
        pass


def local_task(folder):
    """A task of local data: its name, and a task manager that knows nothing else."""
    from lm_eval.tasks import TaskManager

    place = folder / "task"
    place.mkdir()
    rows = [{"text": f"{each} Answer:", "label": index % 2} for index, each in enumerate(PROMPTS)]
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(place / "data.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": list(TASK.labels),
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    }
    (place / "local.yaml").write_text(json.dumps(task))  # YAML reads JSON
    return "local", TaskManager(include_path=str(place), include_defaults=False)


@QUIET
def test_the_model_by_name_on_a_local_task(folder):
    from lm_eval import simple_evaluate

    register()
    name, manager = local_task(folder)
    results = simple_evaluate(
        model=MODEL_NAME,
        model_args=f"pretrained={folder / 'model'},config={folder / 'config.json'},dtype=float32",
        tasks=[name],
        task_manager=manager,
        device="cpu",
        bootstrap_iters=0,
    )
    config = ZeroTuningConfig.load(folder / "config.json")
    assert results["config"]["zerotuning_fingerprint"] == config.fingerprint
    answers = [[float(pair[0][0]) for pair in each["resps"]] for each in results["samples"][name]]
    right = [max(pair) == pair[index % 2] for index, pair in enumerate(answers)]
    assert results["results"][name]["acc,none"] == sum(right) / len(right)
    model, tokenizer = talkative_model(), word_tokenizer()
    yes, no = (tokenizer(word)["input_ids"][0] for word in TASK.labels)
    with zerotuning.apply(model, config), torch.no_grad():
        for prompt, found in zip(PROMPTS, answers, strict=True):
            inputs = tokenizer(f"{prompt} Answer:", return_tensors="pt", return_token_type_ids=False)
            expected = model(**inputs).logits[0, -1].log_softmax(-1)[[yes, no]].tolist()
            assert found == pytest.approx(expected, abs=1e-4)


def test_the_command_line_is_the_harness_s_own(monkeypatch):
    import lm_eval.__main__
    from lm_eval.api.registry import get_model

    found = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: found.append(get_model(MODEL_NAME)))
    assert main() == 0
    assert found == [register()]


@QUIET
def test_without_a_configuration_the_model_is_untouched(folder):
    harness = register()(pretrained=str(folder / "model"), device="cpu", dtype="float32")
    assert harness.zerotuning_config is None
    assert log_likelihoods(harness) == pytest.approx(by_hand(talkative_model(), word_tokenizer()), abs=1e-4)


@pytest.mark.parametrize(("missing", "named"), [("lm_eval.models.huggingface", "lm_eval"), ("tqdm", None)])
def test_without_the_extra(tuned, capsys, monkeypatch, missing, named):
    monkeypatch.delitem(sys.modules, "lm_eval.models.huggingface", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    register.cache_clear()
    if named is None:
        with pytest.raises(ModuleNotFoundError, match=missing):
            main()
        return
    with pytest.raises(ImportError, match=r"pip install 'zerotuning\[lm-eval\]'"):
        harness_model(*tuned)
    assert main() == 1
    assert "error: lm-evaluation-harness needs the extra 'lm-eval'" in capsys.readouterr().err
