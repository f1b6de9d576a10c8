import json
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from tiny_task import examples, talkative_model, word_tokenizer, write_files
from zerotuning import DEFAULT_GRID, ZeroTuningConfig
from zerotuning.cli import run
from zerotuning.demo import DEMO_GRID, choose_reviews, report, run_demo
from zerotuning.report import verdict_line

Rated = namedtuple("Rated", "rating text")
TEXTS = [Rated(2.0 if each.label else -2.0, each.text) for each in examples(80)]


def test_parts_are_disjoint_and_balanced():
    first, second = choose_reviews(TEXTS, word_tokenizer(), (20, 40), max_tokens=8, seed=3)
    assert (len(first), len(second)) == (20, 40)
    assert not {each.text for each in first} & {each.text for each in second}
    for part in (first, second):
        assert sum(each.label for each in part) == len(part) // 2
    assert choose_reviews(TEXTS, word_tokenizer(), (20, 40), max_tokens=8, seed=3) == (first, second)
    assert choose_reviews(TEXTS, word_tokenizer(), (20, 40), max_tokens=8, seed=4) != (first, second)


def test_lukewarm_long_and_repeated_texts_are_left_out():
    texts = [
        Rated(0.5, "w1"),
        Rated(3, "w2 w3 w4"),
        *(Rated(2, f"w{i}") for i in (5, 5, 6)),
        *(Rated(-2, f"w{i}") for i in (7, 8)),
    ]
    first, second = choose_reviews(texts, word_tokenizer(), (2, 2), max_tokens=2, seed=0)
    assert {each.text for each in first + second} == {"w5", "w6", "w7", "w8"}


def test_too_few_texts_shrink_both_parts():
    first, second = choose_reviews(TEXTS, word_tokenizer(), (200, 400), max_tokens=8, seed=0)
    assert 2 <= len(first) < len(second)
    assert len(first) + len(second) <= 80
    with pytest.raises(ValueError, match="only 0 texts of a label"):
        choose_reviews(TEXTS[:1], word_tokenizer(), (2, 2), max_tokens=8, seed=0)
    with pytest.raises(ValueError, match="must be even"):
        choose_reviews(TEXTS, word_tokenizer(), (3, 2), max_tokens=8, seed=0)


def test_folder_is_checked_before_the_work(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        run_demo(talkative_model(), word_tokenizer(), TEXTS, source="x", out=tmp_path / "no" / "c.json")


def test_report_says_what_was_found(tmp_path):
    out = tmp_path / "c.json"
    result = run_demo(
        talkative_model(),
        word_tokenizer(),
        TEXTS,
        source="texts of ours",
        out=out,
        calibration_items=10,
        test_items=20,
        progress=False,
    )
    assert ZeroTuningConfig.load(out) == result.calibration.config
    assert {point.gamma for point in result.calibration.curve} <= set(DEMO_GRID) < set(DEFAULT_GRID)
    text = report(result)
    assert "texts of ours" in text
    assert verdict_line(result.evaluation) in text
    assert Path(result.to_json()["config"]) == out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("demo"))


def output(capsys, arguments):
    assert run(arguments) == 0
    return capsys.readouterr()


def test_demo_on_given_texts(folder, tmp_path, capsys, monkeypatch):
    import separata_embedded
    from separata_embedded import RatedText, RatedTexts

    texts = [RatedText(str(i), 2.0 if each.label else -2.0, each.text) for i, each in enumerate(examples(60))]
    monkeypatch.setattr(separata_embedded, "rated_texts", lambda name: RatedTexts(name, "ours", tuple(texts)))
    out = tmp_path / "demo.json"
    arguments = ["demo", "--model", str(folder / "model"), "--dtype", "float32", "--calibration", "12", "--test", "20"]
    shown = output(capsys, [*arguments, "--out", str(out)]).out
    assert "film reviews (ours)" in shown
    assert "calibrated on 12 texts, evaluated on 20 others" in shown
    assert str(out) in shown
    result = json.loads(output(capsys, [*arguments, "--out", str(out), "--json", "--heads", "uniform"]).out)
    assert result["data"] == {"source": "film reviews (ours)", "calibration": 12, "test": 20}
    assert result["verdict"] in ("helped", "hurt", "no difference shown")
    assert result["calibration"]["profile"] is None
    ZeroTuningConfig.load(out)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["demo", "--heads", "some"], 2, "none of profile"),
        (["demo", "--model", "{folder}/model", "--dtype", "int8"], 2, "none of float32"),
        (["demo", "--model", "{folder}/model", "--calibration", "13", "--dtype", "float32"], 1, "error: "),
    ],
)
def test_what_goes_wrong(folder, capsys, monkeypatch, arguments, code, message):
    import separata_embedded
    from separata_embedded import RatedTexts

    monkeypatch.setattr(separata_embedded, "rated_texts", lambda name: RatedTexts(name, "none", ()))
    assert run([each.format(folder=folder) for each in arguments]) == code
    captured = capsys.readouterr()
    assert message.format(folder=folder) in captured.err
    assert captured.out == ""


def test_default_model_without_the_demo_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "separata_embedded", None)
    assert run(["demo"]) == 1
    assert "pip install 'zerotuning[demo]'" in capsys.readouterr().err
