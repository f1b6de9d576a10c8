import json

import pytest
import zerotuning
from separata_testing.suites import CommandLine
from tiny_task import TASK, write_files
from zerotuning import ZeroTuningConfig
from zerotuning.cli import run

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


def test_calibrate_then_eval_then_show(folder, tmp_path, capsys):
    out = tmp_path / "out.json"
    points = tmp_path / "points.jsonl"
    command = on(folder, "calibrate", "--out", str(out), "--grid", "0.2,3,8", "--heads", "uniform")
    captured = output(capsys, [*command, "--resume", str(points)])
    assert "calibration chose gamma" in captured.out
    assert "calibrate: 100%" in captured.err
    as_json = json.loads(output(capsys, [*command, "--json", "--resume", str(points)]).out)
    assert [point["gamma"] for point in as_json["curve"]] == [0.2, 1, 3, 8]
    assert ZeroTuningConfig.load(out).meta["calibration"]["gamma"] == as_json["gamma"]

    shown = output(capsys, on(folder, "eval", "--config", str(out))).out
    for line in ("accuracy over all items", "answers that parse", "accuracy among parsed", "label-constrained"):
        assert line in shown
    numbers = json.loads(output(capsys, on(folder, "eval", "--config", str(out), "--json", "--limit", "10")).out)
    assert numbers["vanilla"]["accuracy"]["total"] == 10

    assert "mode exact" in output(capsys, ["show", str(out)]).out
    gamma = json.loads(output(capsys, ["show", str(out), "--json"]).out)["gamma"]
    assert len(gamma) == 3
    assert len(gamma[0]) == 4


def test_profile(folder, tmp_path, capsys):
    command = on(folder, "calibrate", "--out", str(tmp_path / "o.json"), "--grid", "0.5,2", "--json")
    assert len(json.loads(output(capsys, command).out)["profile"]["deltas"]) == 4


def test_generate_sets_the_two_beside_each_other(folder, capsys):
    arguments = ["generate", "w1 w2 w3", "--model", str(folder / "model"), "--config", str(folder / "config.json")]
    arguments += ["--dtype", "float32", "--max-new-tokens", "4"]
    texts = json.loads(output(capsys, [*arguments, "--json"]).out)
    assert set(texts) == {"vanilla", "tuned"}
    assert "tuned: " in output(capsys, arguments).out


def test_show_names_heads(folder, capsys):
    assert "head   1: gamma 3" in output(capsys, ["show", str(folder / "config.json")]).out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "{folder}/missing.json"], 1, "error: "),
        (["show", "{folder}/data.jsonl"], 1, "error: "),
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
            "/cut cannot be loaded: ",
        ),
    ],
)
def test_what_goes_wrong(folder, capsys, arguments, code, message):
    assert run([each.format(folder=folder) for each in arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_ctrl_c_is_one_line(folder, tmp_path, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("zerotuning.evaluation.Scorer.predict", interrupt)
    out = tmp_path / "out.json"
    assert run(on(folder, "calibrate", "--out", str(out))) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert list(tmp_path.iterdir()) == []


class TestCommandLine(CommandLine):
    package = zerotuning
    help_for = ((), ("demo",), ("calibrate",), ("eval",), ("show",), ("generate",))

    def _config(self, folder):
        path = folder / "config.json"
        ZeroTuningConfig.uniform(zerotuning.ModelId("llama", "", 2, 4, 2), 2.0).save(path)
        return str(path)

    def failing(self, folder):
        return [["calibrate", "--data", str(folder / "missing.jsonl"), "--out", str(folder / "c.json")]]

    def wrong_usage(self, folder):
        return [["show"]]

    def json_commands(self, folder):
        return [["show", self._config(folder), "--json"]]


def test_a_warning_is_one_line(folder, tmp_path, capsys):
    # One label word of two tokens.
    arguments = ["eval", "--model", str(folder / "model"), "--data", str(tmp_path / "d.jsonl"), "--dtype", "float32"]
    arguments += ["--template", TASK.template, "--labels", "yes w1,no", "--config", str(folder / "config.json")]
    (tmp_path / "d.jsonl").write_text('{"text": "w1", "label": 0}\n{"text": "w2", "label": 1}\n')
    assert any(line.startswith("warning: the label words") for line in output(capsys, arguments).err.splitlines())
