import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import typer
import zerotuning
from separata_testing.suites import CommandLine
from tiny_task import TASK, examples, write_files
from zerotuning import TASKS, ModelId, ZeroTuningConfig
from zerotuning.cli import _on_random_heads, _save_profile, _task, app, run
from zerotuning.profiling import HeadProfile

MODEL = ModelId("llama", "", 3, 4, 2)
OPTIONS = ["--template", TASK.template, "--labels", "yes,no", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, data and a configuration on the disk."""
    return write_files(tmp_path_factory.mktemp("cli"))


def on(folder, *arguments):
    return [*arguments, "--model", str(folder / "model"), "--data", str(folder / "data.jsonl"), *OPTIONS]


def output(capsys, arguments):
    code = run(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured


def as_json(capsys, arguments):
    """What a command prints with `--json`: one document, without NaN."""
    return json.loads(output(capsys, [*arguments, "--json"]).out, parse_constant=pytest.fail)


def test_calibrate_then_eval_then_show(folder, tmp_path, capsys):
    out, points, picture = tmp_path / "out.json", tmp_path / "points.jsonl", tmp_path / "curve.svg"
    command = on(folder, "calibrate", "--out", str(out), "--grid", "0.2,3,8", "--heads", "uniform")
    command += ["--resume", str(points)]
    captured = output(capsys, [*command, "--plot", str(picture)])
    assert "calibration chose gamma" in captured.out
    assert "calibrate: 100%" in captured.err
    evaluated = points.read_bytes()
    printed = as_json(capsys, command)
    assert points.read_bytes() == evaluated
    assert [point["gamma"] for point in printed["curve"]] == [0.2, 1, 3, 8]
    assert (printed["labels"], printed["examples"]) == (["yes", "no"], 24)
    assert ZeroTuningConfig.load(out).meta["calibration"]["gamma"] == printed["gamma"]
    # The same picture from what was printed.
    (tmp_path / "c.json").write_text(json.dumps(printed))
    again = as_json(capsys, ["plot", str(tmp_path / "c.json"), "--out", str(tmp_path / "again.svg")])
    assert again == {"picture": str(tmp_path / "again.svg")}
    assert (tmp_path / "again.svg").read_bytes() == picture.read_bytes()

    numbers = as_json(capsys, on(folder, "eval", "--config", str(out), "--limit", "10"))
    assert numbers["vanilla"]["accuracy"]["total"] == 10
    assert numbers["baselines"] == {}
    assert "mode exact; chosen by uniform" in output(capsys, ["show", str(out)]).out
    gamma = as_json(capsys, ["show", str(out)])["gamma"]
    assert (len(gamma), len(gamma[0])) == (3, 4)


def test_calibration_without_labels(folder, tmp_path, capsys):
    rows = [{"text": each.text} for each in examples(10)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["calibrate", "--model", str(folder / "model"), "--data", str(tmp_path / "data.jsonl"), *OPTIONS]
    command += ["--heads", "uniform", "--grid", "2", "--out", str(tmp_path / "c.json")]
    command += ["--mode", "unsupervised", "--objective", "label_entropy"]
    found = as_json(capsys, command)
    assert (found["mode"], found["metric"]) == ("unsupervised", "label_entropy")
    assert "accuracy" not in found["curve"][0]
    shown = output(capsys, command).out
    assert "of labels  answers (yes, no)" in shown
    assert "parsed" not in shown
    assert run([*command[:-4], "--mode", "supervised"]) == 1
    assert "no 'label'" in capsys.readouterr().err


def test_a_profile_is_drawn_and_calibrated_from(folder, tmp_path, capsys):
    profile, picture, out = tmp_path / "p.json", tmp_path / "p.png", tmp_path / "c.json"
    command = on(folder, "profile", "--out", str(profile), "--gamma-probe", "20", "--layers", "0-1")
    shown = output(capsys, [*command, "--plot", str(picture)])
    assert "profile: 100%" in shown.err
    assert shown.out.count("sign test") == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(profile.read_text())
    assert (found["gamma_probe"], found["layers"], len(found["deltas"])) == (20, [0, 1], 4)
    again = as_json(capsys, ["plot", str(profile), "--out", str(tmp_path / "again.png")])
    assert (tmp_path / "again.png").read_bytes() == picture.read_bytes()
    assert again == {"picture": str(tmp_path / "again.png")}

    command = on(folder, "calibrate", "--grid", "0.2,5", "--out", str(out), "--profile", str(profile))
    calibrated = as_json(capsys, [*command, "--p", "1", "--resume", str(tmp_path / "points")])
    # Nothing was run but the curve.
    assert len((tmp_path / "points").read_text().splitlines()) == 1 + len(calibrated["curve"])
    assert calibrated["profile"] == {name: found[name] for name in calibrated["profile"]}


@pytest.mark.parametrize(
    ("options", "units", "metric"),
    [
        (["--granularity", "layer"], 3, "accuracy"),
        (["--granularity", "layer_head", "--method", "gradient"], 12, "log_likelihood"),
        (["--method", "gradient", "--metric", "entropy"], 4, "entropy"),
    ],
)
def test_what_is_profiled(folder, tmp_path, capsys, options, units, metric):
    found = as_json(capsys, on(folder, "profile", "--out", str(tmp_path / "p.json"), "--limit", "6", *options))
    assert (len(found["deltas"]), found["metric"], found["items"]) == (units, metric, 6)
    assert found["method"] == ("gradient" if "gradient" in options else "exhaustive")


def test_options_reach_the_functions(folder, tmp_path, capsys, monkeypatch):
    told = {}

    def note(*_, **options):
        told.update(options)
        raise ValueError("noted")

    common = ["--granularity", "layer", "--gamma-probe", "3", "--tolerance", "sign_test"]
    common += ["--operator", "query", "--layers", "0,2", "--batch-rows", "5", "--configs-per-pass", "2"]
    values = {"granularity": "layer", "gamma_probe": 3.0, "tolerance": "sign_test"}
    values |= {"operator": "query", "layers": [0, 2], "batch_rows": 5, "configs_per_pass": 2, "progress": True}
    own = ["--p", "0.7", "--combine", "random", "--seed", "4", "--metric", "log_likelihood", "--refine"]
    own += ["--answer-tokens", "2", "--method", "gradient", "--resume", "points"]
    own_values = {"p": 0.7, "combine": "random", "seed": 4, "metric": "log_likelihood", "refine": True}
    own_values |= {"answer_tokens": 2, "method": "gradient", "resume": Path("points"), "heads": "profile"}
    monkeypatch.setattr("zerotuning.calibration.calibrate", note)
    assert run(on(folder, "calibrate", "--out", str(tmp_path / "c.json"), *common, *own)) == 1
    assert {name: told[name] for name in values | own_values} == values | own_values
    told.clear()
    monkeypatch.setattr(
        "zerotuning.profiling.HeadProfiler.run", lambda _, gamma_probe, **rest: note(gamma_probe=gamma_probe, **rest)
    )
    assert run(on(folder, "profile", "--out", str(tmp_path / "p.json"), *common)) == 1
    assert {name: told[name] for name in values} == values
    assert capsys.readouterr().err.count("error: noted") == 2


def test_baselines_beside_a_configuration(folder, capsys):
    command = on(folder, "eval", "--config", str(folder / "config.json"))
    command += ["--baseline", "contextual", "--baseline", "random_heads", "--seed", "1"]
    found = as_json(capsys, command)
    assert set(found["baselines"]) == {"contextual", "random_heads"}
    # One of the label words is always chosen.
    assert found["baselines"]["contextual"]["scores"]["parse_rate"]["value"] == 1
    gained = found["baselines"]["contextual"]["paired_with_tuned"]["accuracy"]
    right = (
        found["tuned"]["accuracy"]["successes"] - found["baselines"]["contextual"]["scores"]["accuracy"]["successes"]
    )
    assert gained["gained"] - gained["lost"] == right
    captured = output(capsys, command)
    assert "evaluate: 100%" in captured.err
    for line in ("accuracy over all items", "answers that parse", "accuracy among parsed", "label-constrained acc"):
        assert captured.out.count(line) == 3
    assert "contextual             tuned" in captured.out


@pytest.mark.parametrize(
    ("mode", "granularity", "gammas"),
    [
        ("exact", "head_index", [[2, 1, 1, 3]] * 3),
        ("exact", "layer", [[1] * 4, [2] * 4, [1] * 4]),
        ("exact", "layer_head", [[1, 2, 1, 1], [1] * 4, [1, 1, 1, 5]]),
        ("key", "head_index", [[2, 2, 1, 1]] * 3),
    ],
)
def test_random_heads_have_the_same_factors(mode, granularity, gammas):
    log_gamma = torch.tensor(gammas).log()
    config = ZeroTuningConfig(log_gamma, MODEL, granularity, mode)
    drawn = [_on_random_heads(config, seed) for seed in range(4)]
    assert _on_random_heads(config, 0) == drawn[0]
    assert len({each.fingerprint for each in drawn}) > (mode == "exact")
    for each in drawn:
        assert each != config
        assert (each.mode, each.granularity) == (mode, granularity)
        # Constructing it checks the groups of the key mode; the unit that moves is whole.
        assert sorted(each.log_gamma.flatten().tolist()) == sorted(config.log_gamma.flatten().tolist())
        if granularity == "head_index":
            assert torch.equal(each.log_gamma, each.log_gamma[:1].expand(3, -1))
        if granularity == "layer":
            assert torch.equal(each.log_gamma, each.log_gamma[:, :1].expand(-1, 4))


def test_random_heads_of_a_uniform_configuration_are_refused():
    with pytest.raises(ValueError, match="all heads alike"):
        _on_random_heads(ZeroTuningConfig.uniform(MODEL, 2.0), 0)


def test_generate_sets_the_two_beside_each_other(folder, capsys):
    arguments = ["generate", "w1 w2 w3", "--model", str(folder / "model"), "--config", str(folder / "config.json")]
    arguments += ["--dtype", "float32", "--max-new-tokens", "4"]
    texts = as_json(capsys, arguments)
    assert set(texts) == {"vanilla", "tuned"}
    assert "tuned: " in output(capsys, arguments).out
    # Materialised weights are to be had from eager attention only.
    assert run([*arguments, "--path", "post_softmax"]) == 1
    assert "error: " in capsys.readouterr().err
    assert as_json(capsys, [*arguments, "--path", "post_softmax", "--attention", "eager"]) == texts


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        (ZeroTuningConfig.per_head(MODEL, {1: 3.0}), ["head   0: gamma 1", "head   1: gamma 3"]),
        (ZeroTuningConfig.per_head(MODEL, {1: 3.0}, [0]), ["1 layers touched", "head   1: gamma 1, 3"]),
        (ZeroTuningConfig.per_layer(MODEL, {2: 0.5}), ["layer   2: gamma 0.5"]),
        (
            ZeroTuningConfig.per_layer_head(MODEL, {(1, 2): 0.5, (1, 3): 7}),
            ["layer   1: head 2 gamma 0.5, head 3 gamma 7"],
        ),
        (ZeroTuningConfig.uniform(MODEL, 1.0, mode="query"), ["nothing is touched", "mode query"]),
    ],
)
def test_show_names_what_is_scaled(tmp_path, capsys, config, lines):
    config.save(tmp_path / "c.json")
    shown = output(capsys, ["show", str(tmp_path / "c.json")]).out
    for line in lines:
        assert line in shown


def test_a_task_from_a_file(folder, tmp_path, capsys):
    TASK.save(tmp_path / "task.json")
    command = ["eval", "--model", str(folder / "model"), "--data", str(folder / "data.jsonl"), "--dtype", "float32"]
    command += ["--config", str(folder / "config.json")]
    ours = as_json(capsys, [*command, "--task", str(tmp_path / "task.json")])
    assert ours == as_json(capsys, [*command, *OPTIONS[:4]])


def test_eval_reads_as_many_tokens_as_it_is_told(folder, capsys, monkeypatch):
    from zerotuning import scoring

    lengths = []

    def parse(self, tokens, item=None):
        lengths.append(len(tokens))
        return -1

    monkeypatch.setattr(scoring.Scorer, "_parse", parse)
    command = on(folder, "eval", "--config", str(folder / "config.json"), "--limit", "4")
    output(capsys, command)
    assert set(lengths) == {1}
    output(capsys, [*command, "--answer-tokens", "3"])
    assert max(lengths) > 1


def test_columns_and_words_in_place_of_the_task_s_own():
    spec = _task("boolq", None, None, None, None)
    assert spec == TASKS["boolq"]
    changed = _task("boolq", "{text}\\nA:", "nope, yep", "t", "l")
    assert changed.template == "{text}\nA:"
    assert (changed.labels, changed.body, changed.text_column, changed.label_column) == (("nope", "yep"), "", "t", "l")


def test_missing_weights_are_an_error(folder, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    arguments = ["generate", "w1", "--config", str(folder / "config.json"), "--model", str(tmp_path / "model")]
    assert run(arguments) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("lack the weights model.layers.1.mlp.up_proj.weight")


def test_a_profile_of_another_model_is_refused(folder, tmp_path, capsys):
    other = HeadProfile(
        "layer", (2, 4), (0, 1), "exhaustive", "accuracy", 2.0, 0.5, (0.1, 0.0), (0.1, 1.0), "example", 9
    )
    _save_profile(other, ModelId("llama", "", 2, 4, 2), "x", tmp_path / "p.json")
    command = on(folder, "calibrate", "--out", str(tmp_path / "c.json"), "--profile", str(tmp_path / "p.json"))
    assert run(command) == 1
    assert "was made for another model (llama, 2 layers of 4" in capsys.readouterr().err
    assert run([*command, "--profile", str(folder / "config.json")]) == 1
    assert "is no head profile" in capsys.readouterr().err
    assert run([*command, "--heads", "uniform"]) == 2
    assert not (tmp_path / "c.json").exists()


def test_damaged_profiles_are_refused(tmp_path, capsys):
    command = ["plot", str(tmp_path / "p.json"), "--out", str(tmp_path / "p.png")]
    for change, message in (
        ({"version": 2}, "reads up to version 1"),
        ({"schema": "x"}, "is no zerotuning configuration"),
        ({"deltas": [1]}, "no valid head profile"),
        ({"model": 1}, "no valid head profile"),
    ):
        profile = HeadProfile(
            "layer", (2, 4), (0, 1), "exhaustive", "accuracy", 2.0, 0.5, (0.1, 0.0), (0.1, 1.0), "example", 9
        )
        body = _save_profile(profile, MODEL, "x", tmp_path / "p.json")
        (tmp_path / "p.json").write_text(json.dumps({**body, **change}))
        assert run(command) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "p.json").write_text('{"schema": "zerotuning/calibration", "version": 2}')
    assert run(command) == 1
    assert "reads up to version 1" in capsys.readouterr().err
    (tmp_path / "p.json").write_text("[]")
    assert run(command) == 1
    assert "holds no JSON object" in capsys.readouterr().err
    assert not (tmp_path / "p.png").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show"], 2, "Missing argument"),
        (["show", "{folder}/missing.json"], 1, "error: "),
        (["show", "{folder}/data.jsonl"], 1, "error: "),
        (["plot", "{folder}/config.json", "--out", "c.gif"], 1, "must end in .png or .svg"),
        (["plot", "{folder}/data.jsonl", "--out", "c.png"], 1, "not a complete JSON file"),
        (["profile", "--data", "{folder}/data.jsonl", "--out", "o", "--method", "x"], 2, "none of exhaustive"),
        (["profile", "--data", "{folder}/data.jsonl", "--out", "o", "--metric", "x"], 2, "none of accuracy"),
        (["profile", "--data", "{folder}/data.jsonl", "--out", "o", "--layers", "3-1"], 2, "no list of layers"),
        (["profile", "--data", "{folder}/data.jsonl", "--out", "o", "--layers", "0-99999999999"], 2, "no model has"),
        (["generate", "\udc80", "--config", "{folder}/config.json"], 2, "no text in the encoding"),
        (["generate", "w", "--config", "{folder}/config.json", "--model", ""], 1, "there is no such folder"),
        (["eval", "--data", "d", "--config", "c", "--baseline", "random_heads", "--seed", "-1"], 2, "'--seed'"),
        (["profile", "--data", "{folder}/data.jsonl", "--out", "o", "--tolerance", "x"], 2, "none of example"),
        (["eval", "--data", "d.jsonl", "--config", "c", "--baseline", "act"], 2, "none of contextual"),
        (["calibrate", "--data", "{folder}/data.jsonl", "--out", "o", "--task", "no.json"], 1, "no.json"),
        (["generate", "w", "--config", "{folder}/config.json", "--path", "x"], 2, "none of auto"),
        (["eval", "--data", "{folder}/missing.jsonl", "--config", "{folder}/config.json"], 1, "error: "),
        (["calibrate", "--data", "{folder}/data.jsonl", "--out", "o", "--heads", "some"], 2, "none of profile"),
        (["calibrate", "--data", "{folder}/data.jsonl", "--out", "o", "--grid", "1,x"], 2, "no list of numbers"),
        (["calibrate", "--data", "{folder}/data.jsonl", "--out", "o", "--task", "x"], 2, "none of sst2"),
        (["calibrate", "--data", "{folder}/data.jsonl", "--labels", "yes,no", "--out", "{folder}"], 1, "is a folder"),
        (
            [
                "generate",
                "w1 w2",
                "--config",
                "{folder}/config.json",
                "--model",
                "{folder}/model",
                "--max-new-tokens",
                "511",
            ],
            1,
            "513 tokens; the model takes 512",
        ),
        (["generate", "w", "--config", "{folder}/config.json", "--model", "{folder}/data.jsonl"], 1, "no such folder"),
        (["generate", "w", "--config", "{folder}/config.json", "--model", "./missing"], 1, "there is no such folder"),
        (
            ["generate", "w", "--config", "{folder}/config.json", "--model", "{folder}/cut"],
            1,
            "/cut' cannot be loaded: ",
        ),
    ],
)
def test_what_goes_wrong(folder, capsys, arguments, code, message):
    assert run([each.format(folder=folder) for each in arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


SUPERVISED, UNSUPERVISED = ("--mode", "supervised"), ("--mode", "unsupervised")


@pytest.mark.parametrize(
    ("verb", "given", "idle"),
    [
        ("calibrate", SUPERVISED, ["--objective", "entropy"]),
        ("calibrate", UNSUPERVISED, ["--metric", "accuracy"]),
        *(
            ("calibrate", ("--heads", "uniform"), idle)
            for idle in (
                ["--granularity", "layer"],
                ["--method", "gradient"],
                ["--gamma-probe", "2"],
                ["--tolerance", "sign_test"],
                ["--p", "0.4"],
                ["--combine", "up"],
                ["--seed", "1"],
            )
        ),
        *(
            ("calibrate", ("--profile", "p.json"), idle)
            for idle in (
                ["--granularity", "layer"],
                ["--method", "gradient"],
                ["--gamma-probe", "2"],
                ["--tolerance", "example"],
                ["--layers", "0"],
            )
        ),
        ("calibrate", ("--combine", "up"), ["--seed", "1"]),
        ("profile", ("--method", "gradient"), ["--resume", "points"]),
        ("profile", ("--method", "gradient"), ["--configs-per-pass", "2"]),
        ("eval", ("--baseline", "contextual", "--config", "c.json"), ["--seed", "1"]),
    ],
)
def test_options_without_an_effect_are_refused(capsys, verb, given, idle):
    out = [] if verb == "eval" else ["--out", "o.json"]
    assert run([verb, "--data", "missing.jsonl", *out, *given, *idle]) == 2
    captured = capsys.readouterr()
    assert f"Invalid value for {idle[0]}: it is of no account" in captured.err
    # Without it nothing is wrong but that there are no data.
    assert run([verb, "--data", "missing.jsonl", *out, *given]) == 1


@pytest.mark.parametrize(
    ("verb", "files", "told"),
    [
        ("calibrate", {"data": "d.jsonl", "out": "./d.jsonl"}, "--out: d.jsonl is what --data"),
        ("calibrate", {"data": "d.jsonl", "out": "c.png", "plot": "c.png"}, "--plot: c.png is what --out"),
        ("calibrate", {"data": "d.jsonl", "out": "p.json", "profile": "p.json"}, "--profile: p.json is what --out"),
        ("profile", {"data": "d.jsonl", "out": "p.json", "resume": "p.json"}, "--resume: p.json is what --out"),
    ],
)
def test_one_file_for_two_purposes_is_refused(capsys, verb, files, told):
    assert run([verb, *(part for name, file in files.items() for part in (f"--{name}", file))]) == 2
    assert f"Invalid value for {told} names too" in capsys.readouterr().err


def test_ctrl_c_is_one_line(folder, tmp_path, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("zerotuning.evaluation.Scorer.predict", interrupt)
    out = tmp_path / "out.json"
    assert run(on(folder, "calibrate", "--out", str(out))) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert list(tmp_path.iterdir()) == []


VERBS = ("demo", "profile", "calibrate", "eval", "show", "generate", "plot")


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_has_an_example_that_is_well_formed(capsys, verb):
    shown = " ".join(output(capsys, [verb, "--help"]).out.split())
    example = shlex.split(shown.split("Example: ")[1])
    assert example[:2] == ["zerotuning", verb]
    # Up to the files, which are not there.
    command = typer.main.get_command(app).commands[verb]
    with command.make_context(verb, example[2:]):
        pass


class TestCommandLine(CommandLine):
    package = zerotuning
    help_for = ((), ("calibrate",))

    def failing(self, folder):
        return [["calibrate", "--data", str(folder / "missing.jsonl"), "--out", str(folder / "c.json")]]


def test_a_warning_is_one_line(folder, tmp_path, capsys):
    # One label word of two tokens.
    arguments = ["eval", "--model", str(folder / "model"), "--data", str(tmp_path / "d.jsonl"), "--dtype", "float32"]
    arguments += ["--template", TASK.template, "--labels", "yes w1,no", "--config", str(folder / "config.json")]
    (tmp_path / "d.jsonl").write_text('{"text": "w1", "label": 0}\n{"text": "w2", "label": 1}\n')
    assert any(line.startswith("warning: the label words") for line in output(capsys, arguments).err.splitlines())
