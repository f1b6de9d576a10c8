import json
import shlex

import pytest
import torch
import typer
from bodes_steer.cli import _params, _prompt_text, _spans, app, run
from bodes_steer.extraction import Activations
from bodes_steer.files import load_steerer
from bodes_steer.sweeps import Table
from separata_testing.models import tiny_model, tiny_tokenizer

GOOD, BAD = ("warm sun", "kind word", "sweet song", "bright day"), ("cold rain", "harsh noise", "sour milk", "dull fog")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, pairs, prompts, activations and steerers on the disk."""
    place = tmp_path_factory.mktemp("cli")
    tiny_model().save_pretrained(place / "model")
    tiny_tokenizer().save_pretrained(place / "model")
    rows = [
        {"prompt": f"q{index // 2}", "chosen": f"{GOOD[index % 4]} {index}", "rejected": f"{BAD[index % 4]} {index}"}
        for index in range(16)
    ]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "prompts.txt").write_text("ab\ncdef\ngh i\n")
    assert run(["extract", *on(place), "--out", str(place / "acts.safetensors"), "--json"]) == 0
    for method in ("caa", "odesteer"):
        command = ["fit", str(place / "acts.safetensors"), "--layer", "1", "--method", method, "--relative", "0.1"]
        command += ["--param", "n_components=64"] if method == "odesteer" else []
        assert run([*command, "--out", str(place / f"{method}.safetensors")]) == 0
    (place / "broken.safetensors").write_bytes((place / "caa.safetensors").read_bytes()[:-3])
    return place


def on(folder):
    return ["--model", str(folder / "model"), "--data", str(folder / "pairs.jsonl")]


def output(capsys, arguments):
    code = run([str(each) for each in arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured


def as_json(capsys, arguments):
    """What a command prints with `--json`: one document, without NaN."""
    return json.loads(output(capsys, [*arguments, "--json"]).out, parse_constant=pytest.fail)


def test_extract_reads_all_layers_and_what_belongs_together(folder, tmp_path, capsys):
    opened = Activations.open(folder / "acts.safetensors")
    assert list(opened.layers) == [0, 1, 2]
    assert opened.labels.tolist() == [1, 0] * 16
    groups = json.loads((folder / "acts.safetensors.groups.json").read_text())["groups"]
    assert groups == [index // 4 for index in range(32)]
    out = tmp_path / "a.safetensors"
    facts = as_json(capsys, ["extract", *on(folder), "--out", out, "--layers", "1-2", "--limit", "3", "--chat"])
    assert facts == {
        "activations": str(out), "layers": [1, 2], "texts": 6, "d": 32, "positives": 3, "negatives": 3
    }  # fmt: skip
    (tmp_path / "l.jsonl").write_text('{"t": "a", "l": "x"}\n{"t": "b", "l": "y"}\n')
    columns = ["--text-column", "t", "--label-column", "l", "--positive", "x", "--position", "mean", "--restart"]
    shown = output(capsys, ["extract", *on(folder)[:2], "--data", tmp_path / "l.jsonl", "--out", out, *columns])
    assert "1 positive and 1 negative texts, d = 32, blocks 0-2" in shown.out
    # Those of the file before would not fit.
    assert not (tmp_path / "a.safetensors.groups.json").exists()


def test_fit_says_what_it_found_in_what_was_held_out(folder, tmp_path, capsys):
    out = tmp_path / "s.safetensors"
    command = ["fit", folder / "acts.safetensors", "--out", out, "--layer", "1"]
    found = as_json(capsys, [*command, "--param", "n_components=64", "--param", "C=100", "--seed", "3"])
    # Eight prompts, of which two are held out with all of their answers.
    assert found["fitted_on"] == {"positives": 12, "negatives": 12}
    assert found["held_out"] == {"positives": 4, "negatives": 4}
    assert 0 <= found["accuracy"] <= 1
    assert found["log_ratio"]["negatives_steered"] > found["log_ratio"]["negatives"]
    steerer = load_steerer(out)
    assert (steerer.C, steerer.n_components, steerer.random_state, steerer.T) == (100, 64, 3, 5.0)
    assert (steerer.origin_.layer, steerer.origin_.model_type) == (1, "llama")
    shown = output(capsys, [*command, "--param", "n_components=64", "--relative", "0.1"]).out
    assert "held-out accuracy" in shown
    assert "of a linear probe" in shown
    steerer = load_steerer(out)
    assert pytest.approx(0.1 * float(steerer.median_norm_)) == steerer.T
    auto = as_json(capsys, [*command, "--param", "n_components=64", "--auto"])
    assert auto["log_ratio"]["negatives_steered"] >= auto["log_ratio"]["positives"] - 0.05 * abs(
        auto["log_ratio"]["positives"]
    )
    linear = output(capsys, [*command, "--method", "iti"]).out
    assert "held-out accuracy" in linear
    assert "nonlinear" not in linear
    everything = as_json(capsys, [*command, "--method", "caa", "--test-share", "0", "--T", "0.5"])
    assert everything["fitted_on"] == {"positives": 16, "negatives": 16}
    assert "accuracy" not in everything


def test_generate_sets_the_two_beside_each_other(folder, capsys):
    command = ["generate", "--steerer", folder / "odesteer.safetensors", "--model", folder / "model"]
    command += ["--max-new-tokens", "4"]
    found = as_json(capsys, [*command, "ab", "cdef"])
    assert [row["prompt"] for row in found["texts"]] == ["ab", "cdef"]
    still = as_json(capsys, [*command, "ab", "cdef", "--T", "0"])
    for row in still["texts"]:
        assert row["plain"] == row["steered"]
    assert [row["plain"] for row in still["texts"]] == [row["plain"] for row in found["texts"]]
    strong = as_json(
        capsys, [*command, "--prompts", folder / "prompts.txt", "--relative", "0.49", "--positions", "all"]
    )
    assert any(row["plain"] != row["steered"] for row in strong["texts"])
    assert len(strong["texts"]) == 3
    sampled = [*command, "ab", "--sample", "--temperature", "2", "--seed", "1", "--chat"]
    captured = output(capsys, sampled)
    assert "generate: 100%" in captured.err
    assert "steered: " in captured.out
    assert "user: ab" in captured.out
    assert output(capsys, sampled).out == captured.out


def test_eval_of_what_is_written(folder, capsys):
    command = ["eval", "generation", "--steerer", folder / "caa.safetensors", "--model", folder / "model"]
    command += ["--prompts", folder / "prompts.txt", "--max-new-tokens", "4"]
    found = as_json(capsys, [*command, "--limit", "2", "--sample"])
    assert len(found["prompts"]) == 2
    assert found["judge"] == "vader"
    assert found["score"]["units"] == 2
    assert "perplexity" in output(capsys, command).out


def test_eval_by_a_classifier(folder, tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=272, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1},
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    command = ["eval", "generation", "--steerer", folder / "caa.safetensors", "--model", folder / "model", "--T", "0"]
    command += ["--prompts", folder / "prompts.txt", "--max-new-tokens", "2", "--judge", "classifier"]
    found = as_json(capsys, [*command, "--judge-model", tmp_path / "judge", "--judge-label", "good"])
    assert all(0 < score < 1 for score in found["plain"]["scores"])
    # Nothing was steered.
    assert found["score"]["difference"] == 0
    assert run([str(each) for each in [*command, "--judge-model", tmp_path / "no"]]) == 1
    assert "there is no such folder" in capsys.readouterr().err


def test_eval_of_listed_answers(folder, tmp_path, capsys):
    header = "Question,Best Answer,Correct Answers,Incorrect Answers\n"
    rows = "".join(
        f"q{index}?,{GOOD[index % 4]} {index},{GOOD[index % 4]} {index},{BAD[index % 4]} {index}\n"
        for index in range(9)
    )
    (tmp_path / "t.csv").write_text(header + rows)
    command = ["eval", "truthfulqa", "--csv", tmp_path / "t.csv", "--model", folder / "model", "--layer", "1"]
    command += ["--methods", "caa,iti", "--relative", "0.1", "--limit", "8", "--resume", tmp_path / "points.jsonl"]
    found = as_json(capsys, command)
    assert found["questions"] == 8
    assert [each["method"] for each in found["conditions"]] == ["vanilla", "caa", "iti"]
    assert "| caa |" in output(capsys, command).out


def test_sweep_of_methods_then_plot_and_show(folder, tmp_path, capsys):
    out, points, picture = tmp_path / "t.json", tmp_path / "p.jsonl", tmp_path / "t.svg"
    command = ["sweep", folder / "acts.safetensors", "--out", out, "--layers", "1,2", "--relative", "0.1,0.3"]
    command += ["--methods", "caa,odesteer", "--param", "odesteer.n_components=64", "--resume", points]
    captured = output(capsys, [*command, "--plot", picture])
    assert "sweep: 100%" in captured.err
    assert "highest shifted: " in captured.out
    table = Table.load(out)
    assert len(table.rows) == 1 + 2 * 2 * 2
    before = points.read_bytes()
    assert Table.from_json(as_json(capsys, command)) == table
    assert points.read_bytes() == before
    assert as_json(capsys, ["plot", out, "--out", tmp_path / "again.svg"]) == {"picture": str(tmp_path / "again.svg")}
    assert (tmp_path / "again.svg").read_bytes() == picture.read_bytes()
    assert as_json(capsys, ["show", out]) == table.to_json()
    assert "displacement" in output(capsys, ["show", out]).out


def test_sweep_of_layers(folder, tmp_path, capsys):
    out = tmp_path / "t.json"
    command = ["sweep", folder / "acts.safetensors", "--of", "layers", "--out", out]
    shown = output(capsys, [*command, "--plot", tmp_path / "t.png"]).out
    assert "highest linear accuracy: layer" in shown
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert [row["layer"] for row in Table.load(out).rows] == [0, 1, 2]


def test_sweep_by_what_is_written(folder, tmp_path, capsys):
    command = ["sweep", folder / "acts.safetensors", "--out", tmp_path / "t.json", "--layers", "1", "--methods", "caa"]
    command += ["--T", "0,1", "--prompts", folder / "prompts.txt", "--model", folder / "model"]
    found = as_json(capsys, [*command, "--max-new-tokens", "3", "--sample"])
    assert (found["gain"], found["cost"]) == ("score", "perplexity")
    assert set(found["rows"][0]) == {"layer", "method", "T", "T_rel", "score", "perplexity", "dist_2"}
    # Without strength it is the model as it is.
    same = ("score", "perplexity", "dist_2")
    assert [found["rows"][0][name] for name in same] == [found["rows"][1][name] for name in same]


def test_pictures_of_a_steerer(folder, tmp_path, capsys):
    for what in ("trajectory", "pca"):
        command = ["plot", folder / "odesteer.safetensors", "--activations", folder / "acts.safetensors"]
        shown = output(capsys, [*command, "--what", what, "--out", tmp_path / f"{what}.png", "--relative", "0.2"]).out
        assert shown == f"picture: {tmp_path / what}.png\n"
    assert (tmp_path / "pca.png").read_bytes() != (tmp_path / "trajectory.png").read_bytes()


def test_export(folder, tmp_path, capsys):
    out = tmp_path / "v.gguf"
    found = as_json(capsys, ["export", folder / "caa.safetensors", "--out", out, "--relative", "0.25"])
    steerer = load_steerer(folder / "caa.safetensors")
    assert found["lengths"] == {"1": pytest.approx(0.25 * float(steerer.median_norm_), rel=1e-5)}
    shown = output(capsys, ["export", folder / "caa.safetensors", "--out", out, "--layer", "2"]).out
    assert "direction.2: added to the output of block 2, length" in shown


def test_show(folder, capsys):
    facts = as_json(capsys, ["show", folder / "odesteer.safetensors"])
    assert (facts["method"], facts["layer"], facts["d"], facts["params"]["n_components"]) == ("odesteer", 1, 32, 64)
    shown = output(capsys, ["show", folder / "caa.safetensors"]).out
    assert "vector_norm: " in shown
    assert "method: caa" in shown
    assert "layers: 0-2" in output(capsys, ["show", folder / "acts.safetensors"]).out


def test_words_of_layers_and_parameters():
    assert _spans([5, 0, 2, 1]) == "0-2,5"
    given = ["C=100", "solver=rk4", "normalize=False", "stop_at=null", "kind=None"]
    assert _params(given) == {"C": 100, "solver": "rk4", "normalize": False, "stop_at": None, "kind": None}


def test_the_first_token_of_a_chat_is_there_once():
    tokenizer = tiny_tokenizer()
    plain = _prompt_text(tokenizer, [{"role": "user", "content": "a"}])
    tokenizer.chat_template = "<bos>" + tokenizer.chat_template
    text = _prompt_text(tokenizer, [{"role": "user", "content": "a"}])
    assert text == plain
    assert tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) == 1
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        _prompt_text(tokenizer, [{"role": "user", "content": "a"}])


FIT = ["fit", "{folder}/acts.safetensors", "--layer", "1", "--out", "{folder}/o.safetensors"]
GENERATE = ["generate", "--steerer", "{folder}/caa.safetensors", "--model", "{folder}/model"]
EXTRACT = ["extract", "--model", "{folder}/model", "--out", "{folder}/o.safetensors", "--data"]
EVALUATE = ["eval", "generation", "--steerer", "{folder}/caa.safetensors", "--prompts", "{folder}/prompts.txt"]
SWEEP = ["sweep", "{folder}/acts.safetensors", "--out", "{folder}/o.json"]
PLOT = ["plot", "{folder}/caa.safetensors", "--out"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show"], 2, "Missing argument"),
        (["show", "{folder}/missing"], 1, "error: "),
        (["show", "{folder}/broken.safetensors"], 1, "error: "),
        (["show", "{folder}/pairs.jsonl"], 1, "not a complete JSON file"),
        ([*EXTRACT, "{folder}/missing.jsonl"], 1, "missing.jsonl"),
        ([*EXTRACT, "{folder}/prompts.txt"], 1, "line 1: the columns are"),
        ([*EXTRACT, "{folder}/pairs.jsonl", "--kind", "x"], 2, "none of auto"),
        ([*EXTRACT, "{folder}/pairs.jsonl", "--position", "all"], 2, "none of last"),
        ([*EXTRACT, "{folder}/pairs.jsonl", "--layers", "3-1"], 2, "no list of layers"),
        ([*EXTRACT, "{folder}/pairs.jsonl", "--layers", "0-99999"], 2, "no model has"),
        ([*EXTRACT, "{folder}/pairs.jsonl", "--layers", "3"], 1, "error: "),
        ([*EXTRACT, "{folder}/pairs.jsonl", "--template", "x"], 1, "must hold {{prompt}}"),
        ([*EXTRACT, "{folder}/pairs.jsonl", "--model", "./no"], 1, "there is no such folder"),
        ([*EXTRACT, "{folder}/pairs.jsonl", "--out", "{folder}/no/o"], 1, "does not exist"),
        ([*FIT, "--method", "x"], 1, "method='x' is not offered"),
        ([*FIT, "--param", "x=1"], 1, "takes no parameter x"),
        ([*FIT, "--param", "x"], 2, "not of the form name=value"),
        ([*FIT, "--param", "T=1"], 2, "option of its own"),
        ([*FIT, "--param", "C=abc"], 2, "C='abc' must be a number"),
        ([*FIT, "--param", "steps=true"], 2, "steps=True must be a number"),
        ([*FIT, "--param", "stop_at=high"], 2, "stop_at='high' must be a number"),
        ([*FIT, "--param", "normalize=maybe"], 2, "normalize='maybe' must be true or false"),
        ([*FIT, "--param", "solver=4"], 2, "solver=4 must be a word"),
        # Too large for the numbers of the activations, which shows after fitting.
        ([*FIT, "--param", "n_components=16", "--T", "1e300"], 1, "error: "),
        (["fit", "{folder}/model", "--layer", "1", "--out", "{folder}/o.safetensors"], 1, "no file of activations"),
        ([*FIT, "--layer", "9"], 1, "the activations are of the blocks 0-2"),
        ([*FIT[:2], *FIT[4:]], 1, "--layer None"),
        ([*FIT, "--T", "nan"], 2, "no finite number"),
        ([*FIT, "--method", "mimic", "--relative", "1"], 1, "T_rel has no meaning"),
        ([*FIT, "--test-share", "0.95"], 2, "--test-share"),
        ([*FIT, "--out", "{folder}"], 1, "is a folder"),
        (["fit", "{folder}/caa.safetensors", "--out", "{folder}/o.safetensors"], 1, "error: "),
        (GENERATE, 2, "give prompts"),
        ([*GENERATE, "a", "--prompts", "{folder}/prompts.txt"], 2, "give prompts"),
        ([*GENERATE, "\udc80"], 2, "no text in the encoding"),
        ([*GENERATE, "a", "--positions", "x"], 2, "none of from_prompt_end"),
        ([*GENERATE, "a", "--dtype", "int8"], 2, "none of float32"),
        ([*GENERATE, "a", "--sample", "--top-p", "2"], 2, "--top-p"),
        ([*GENERATE, "a", "--T", "1", "--relative", "1"], 2, "only one of --T and --relative"),
        ([*GENERATE, "a", "--layer", "7"], 1, "error: "),
        ([*EVALUATE, "--judge", "x"], 2, "none of vader"),
        ([*EVALUATE, "--judge", "classifier"], 2, "needs a model"),
        ([*EVALUATE, "--judge", "endpoint", "--judge-model", "m", "--judge-url", "x"], 1, "must begin with http"),
        (["eval", "truthfulqa", "--csv", "{folder}/pairs.jsonl"], 1, "is this TruthfulQA"),
        ([*SWEEP, "--of", "x"], 2, "none of methods"),
        ([*SWEEP, "--relative", "1,x"], 2, "no list of numbers"),
        ([*SWEEP, "--methods", "caa,"], 2, "no list of names"),
        ([*SWEEP, "--param", "iti.C=1"], 2, "not of the form method.name=value"),
        ([*SWEEP, "--param", "odesteer.C=x"], 2, "C='x' must be a number"),
        ([*SWEEP, "--layers", "5"], 1, "not among those of the activations"),
        ([*SWEEP, "--plot", "x.gif"], 1, "must end in .png or .svg"),
        ([*PLOT, "o.gif"], 1, "must end in .png or .svg"),
        ([*PLOT, "{folder}/o.png"], 2, "give them"),
        ([*PLOT, "{folder}/o.png", "--what", "x"], 2, "none of trajectory"),
        (["export", "{folder}/odesteer.safetensors", "--out", "{folder}/o.gguf"], 1, "ODESteer is not one vector"),
        (["export", "{folder}/caa.safetensors", "--out", "{folder}/o.bin"], 2, "must end in .gguf"),
        (["export", "{folder}/caa.safetensors", "--out", "{folder}/o.gguf", "--layer", "0"], 1, "blocks from 1 on"),
        (
            ["export", "{folder}/caa.safetensors", "{folder}/caa.safetensors", "--out", "{folder}/o.gguf"],
            1,
            "is for layer 1 too",
        ),
        (["demo", "--relative", "-1"], 2, "no share above 0"),
        (["demo", "--out", "{folder}/no/s.safetensors"], 1, "does not exist"),
    ],
)
def test_what_goes_wrong(folder, capsys, arguments, code, message):
    before = sorted(folder.iterdir())
    assert run([each.format(folder=folder) for each in arguments]) == code
    captured = capsys.readouterr()
    assert message.format() in captured.err
    assert captured.out == ""
    if code == 1:
        assert captured.err.splitlines()[-1].startswith("error: ")
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        (["extract", "--data", "d", "--out", "o", "--chat"], ["--template", "x"]),
        (["generate", "--steerer", "s", "p"], ["--temperature", "1"]),
        (["generate", "--steerer", "s", "p"], ["--top-p", "1"]),
        (["generate", "--steerer", "s", "p"], ["--seed", "1"]),
        (["eval", "generation", "--steerer", "s", "--prompts", "p"], ["--top-p", "1"]),
        (["eval", "generation", "--steerer", "s", "--prompts", "p"], ["--judge-model", "m"]),
        (["eval", "generation", "--steerer", "s", "--prompts", "p"], ["--judge-label", "m"]),
        (["eval", "generation", "--steerer", "s", "--prompts", "p"], ["--judge-url", "m"]),
        (["eval", "generation", "--steerer", "s", "--prompts", "p"], ["--judge-cache", "m"]),
        (["fit", "a", "--out", "o", "--method", "caa", "--test-share", "0"], ["--seed", "1"]),
        (["sweep", "a", "--out", "o", "--of", "layers"], ["--methods", "caa"]),
        (["sweep", "a", "--out", "o", "--of", "layers"], ["--T", "1"]),
        (["sweep", "a", "--out", "o", "--of", "layers"], ["--resume", "r"]),
        (["sweep", "a", "--out", "o", "--of", "layers"], ["--prompts", "r"]),
        (["sweep", "a", "--out", "o"], ["--sketch"]),
        (["sweep", "a", "--out", "o"], ["--model", "m"]),
        (["sweep", "a", "--out", "o"], ["--judge", "vader"]),
        (["sweep", "a", "--out", "o"], ["--sample"]),
        (["sweep", "a", "--out", "o", "--prompts", "p"], ["--temperature", "1"]),
        (["sweep", "a", "--out", "o", "--T", "1"], ["--relative", "1"]),
    ],
)
def test_options_without_an_effect_are_refused(tmp_path, monkeypatch, capsys, given, idle):
    monkeypatch.chdir(tmp_path)
    assert run([*given, *idle]) == 2
    assert f"Invalid value for {idle[0]}: it is of no account" in capsys.readouterr().err
    # Without it nothing is wrong but that there are no such files.
    assert run(given) == 1
    assert list(tmp_path.iterdir()) == []


def test_options_to_a_table_are_refused(tmp_path, capsys):
    Table("layers", ({"layer": 1, "linear_accuracy": 0.5, "caa_length": 0.1},), "linear_accuracy", "caa_length").save(
        tmp_path / "t.json"
    )
    for idle in (["--what", "pca"], ["--T", "1"], ["--relative", "1"], ["--activations", "a"]):
        assert run(["plot", str(tmp_path / "t.json"), "--out", str(tmp_path / "o.png"), *idle]) == 2
        assert "it is of no account to a table" in capsys.readouterr().err


def test_strengths_exclude_each_other(capsys):
    for two in (["--T", "1", "--relative", "1"], ["--T", "1", "--auto"], ["--auto", "--test-share", "0"]):
        assert run(["fit", "a", "--out", "o", *two]) == 2
    assert capsys.readouterr().err.count("Invalid value for") == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["extract", "--data", "d.jsonl", "--out", "./d.jsonl"], "--out: d.jsonl is what --data"),
        (["fit", "a", "--out", "a"], "--out: a is what --activations"),
        (["sweep", "a", "--out", "t.json", "--resume", "t.json"], "--resume: t.json is what --out"),
        (["plot", "t.png", "--out", "t.png"], "--out: t.png is what --file"),
        (["export", "v.gguf", "--out", "v.gguf"], "--out: v.gguf is what --file"),
    ],
)
def test_one_file_for_two_purposes_is_refused(capsys, arguments, told):
    assert run(arguments) == 2
    assert f"Invalid value for {told} names too" in capsys.readouterr().err


def test_damaged_groups_are_told(folder, tmp_path, capsys):
    import shutil

    shutil.copy(folder / "acts.safetensors", tmp_path / "a.safetensors")
    command = ["fit", str(tmp_path / "a.safetensors"), "--layer", "1", "--out", str(tmp_path / "s.safetensors")]
    for content in ("{", "[]", '{"schema": "bodes-steer/groups", "version": 1, "groups": [1]}'):
        (tmp_path / "a.safetensors.groups.json").write_text(content)
        assert run([*command, "--method", "caa"]) == 1
        assert "groups.json is damaged" in capsys.readouterr().err


def test_ctrl_c_is_one_line(folder, tmp_path, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("bodes_steer.extraction.extract_activations", interrupt)
    assert run(["extract", *on(folder), "--out", str(tmp_path / "a.safetensors")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert list(tmp_path.iterdir()) == []


def test_missing_weights_are_an_error(folder, tmp_path, capsys):
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    command = ["generate", "a", "--steerer", str(folder / "caa.safetensors"), "--model", str(tmp_path / "model")]
    assert run(command) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("lack the weights model.layers.1.mlp.up_proj.weight")


def test_a_steerer_of_another_model_is_refused_unless_forced(folder, tmp_path, capsys):
    other = tiny_model("qwen2")
    other.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    command = ["generate", "a", "--steerer", str(folder / "caa.safetensors"), "--model", str(tmp_path / "model")]
    assert run(command) == 1
    told = capsys.readouterr().err
    assert "was fitted on a model of type 'llama'" in told
    assert "--force" in told
    sweep = ["sweep", str(folder / "acts.safetensors"), "--out", str(tmp_path / "t.json"), "--methods", "caa"]
    sweep += ["--layers", "1", "--prompts", str(folder / "prompts.txt"), "--model", str(tmp_path / "model")]
    assert run(sweep) == 1
    assert "the activations are of a model with model_type 'llama', and --model has 'qwen2'" in capsys.readouterr().err
    assert "steered: " in output(capsys, [*command, "--max-new-tokens", "1", "--force"]).out


VERBS = (
    "demo", "extract", "fit", "generate", "eval generation", "eval truthfulqa", "sweep", "plot", "export", "show"
)  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_has_an_example_that_is_well_formed(capsys, verb):
    words = verb.split()
    shown = " ".join(output(capsys, [*words, "--help"]).out.split())
    example = shlex.split(shown.split("Example: ")[1])
    assert example[: 1 + len(words)] == ["bodes-steer", *words]
    # Up to the files, which are not there.
    command = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    with command.make_context(words[-1], example[1 + len(words) :]):
        pass


# In tests a warning that our code causes is an error.
@pytest.mark.filterwarnings("always::UserWarning")
def test_a_step_that_ruins_fluency_is_warned_of(folder, capsys):
    command = ["generate", "a", "--steerer", folder / "odesteer.safetensors", "--model", folder / "model"]
    command += ["--max-new-tokens", "1"]
    assert output(capsys, [*command, "--relative", "-0.6"]).err.count("ruins the fluency") == 1
    assert "ruins the fluency" not in output(capsys, [*command, "--relative", "0.4"]).err


# In tests a warning that our code causes is an error.
@pytest.mark.filterwarnings("always::UserWarning")
def test_warnings_are_one_line_each(folder, tmp_path, capsys):
    rows = [{"text": "same", "label": 1}, {"text": "same", "label": 0}, {"text": "other", "label": 0}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["extract", *on(folder)[:2], "--data", tmp_path / "d.jsonl", "--out", tmp_path / "a.safetensors"]
    assert any(line.startswith("warning: ") for line in output(capsys, command).err.splitlines())
    assert torch.equal(Activations.open(tmp_path / "a.safetensors").labels, torch.tensor([1, 0, 0]))
    facts = as_json(capsys, ["show", tmp_path / "a.safetensors"])
    assert facts["duplicates"] == 1
    assert "truncated" not in facts
