"""The demo with a scripted sampler: what it compares, what it prints, and where its models come from."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pmark import cli, demo, hf_sampler, report
from separata_kit import language_models
from test_cli import LOAD_ENCODER, Words, encode


def test_the_demo(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_load_encoder", lambda place: encode)
    monkeypatch.setattr(cli, "_load_model", lambda place: ("model", "tokenizer"))
    monkeypatch.setattr(hf_sampler, "HFSampler", lambda *model, **options: Words())
    judged = []

    def perplexity(texts, model, tokenizer, *, prompts):
        judged.append(texts)
        return np.array([[1.0, 1.0, 1.0], [2.0, 3.0, 4.0]])[len(judged) % 2, : len(texts)]

    monkeypatch.setattr(demo, "perplexity", perplexity)
    command = ["demo", "--prompts", "3", "--max-sentences", "5", "--out", str(tmp_path / "demo.jsonl")]
    assert cli.run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    conditions = found["conditions"]
    marked, unmarked, wrong = (conditions[name] for name in (report.MARKED, report.UNMARKED, report.WRONG_KEYS))
    assert (marked["tests"], unmarked["tests"], wrong["tests"]) == (3, 3, 24)
    assert marked["mean_z"] > 1 + max(unmarked["mean_z"], wrong["mean_z"])
    assert marked["standard_error"] == pytest.approx(np.std(marked["z"], ddof=1) / 3**0.5)
    ratios = np.log([2.0, 3.0, 4.0])
    assert found["log_perplexity"]["marked_less_unmarked"] == pytest.approx(ratios.mean())
    assert found["log_perplexity"]["standard_error"] == pytest.approx(ratios.std(ddof=1) / 3**0.5)
    texts = [row["text"] for row in map(json.loads, (tmp_path / "demo.jsonl").read_text().splitlines())]
    assert judged[0] == texts
    assert found["example"] == texts[0]
    assert cli.run([*command, "--max-sentences", "1", "--seed", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"{report.MARKED} " in shown
    assert "+- " in shown
    assert "perplexity, marked less unmarked" in shown
    assert cli.run(["demo", "--prompts", "13"]) == 2


def test_verdict_says_what_is_not_shown():
    quiet, loud = (demo.Condition(z, 3, 0) for z in ((0.0, 0.2, -0.2), (3.0, 3.2, 2.8)))
    settings = dict.fromkeys(("prompts", "sentences", "samples", "channels", "seed"), 1)

    def result(marked):
        conditions = {report.MARKED: marked, report.UNMARKED: quiet, report.WRONG_KEYS: quiet}
        return demo.DemoResult(settings, conditions, (0.1, 0.11, 0.12), "text", Path("x"), 1.0)

    assert "not shown to be above" not in report.verdict(result(loud))
    assert report.verdict(result(quiet)).count("not shown to be above") == 2
    assert "no difference shown" not in report.demo_report(result(loud))


def test_default_models(monkeypatch, block_imports):
    embedded = SimpleNamespace(
        load_smollm2=lambda dtype, device: ("model", dtype), load_sentence_encoder=lambda: "encoder"
    )
    monkeypatch.setitem(sys.modules, "separata_embedded", embedded)
    monkeypatch.setattr(language_models, "default_dtype", lambda: "float16")
    monkeypatch.setattr(language_models, "default_device", lambda: "cpu")
    assert LOAD_ENCODER(None) == "encoder"
    assert cli._load_model(None) == ("model", "float16")
    block_imports("separata_embedded")
    with pytest.raises(ImportError, match=r"pmark\[demo\].*--model and --encoder"):
        LOAD_ENCODER(None)
    block_imports("torch")
    with pytest.raises(ImportError, match=r"pmark\[demo\].*--model and --encoder"):
        cli._load_model(None)
    with pytest.raises(ImportError, match=r"'pmark\[transformers\]'"):
        cli._load_model("folder")
