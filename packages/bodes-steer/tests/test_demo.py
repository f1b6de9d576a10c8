import dataclasses
import json
import sys

import pytest
import torch
from bodes_steer.cli import run
from bodes_steer.demo import PROMPTS, choose_reviews, run_demo
from bodes_steer.files import load_steerer
from bodes_steer.lexicon import vader_judge
from bodes_steer.metrics import PairedBootstrap
from bodes_steer.report import REVERSED, TEN_STEPS, demo_report, difference, table_lines, verdict, verdict_lines
from separata_testing.models import tiny_model, tiny_tokenizer


@dataclasses.dataclass(frozen=True)
class Rated:
    rating: float
    text: str


TEXTS = [Rated(2.0 if index % 2 else -2.0, f"{'good' if index % 2 else 'poor'} film {index}") for index in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("demo")
    tiny_model().save_pretrained(place / "model")
    tiny_tokenizer().save_pretrained(place / "model")
    return place


@pytest.fixture(scope="module")
def result(folder):
    return run_demo(
        tiny_model(),
        tiny_tokenizer(),
        TEXTS,
        source="ours",
        out=folder / "s.safetensors",
        fit_items=8,
        test_items=4,
        samples=1,
        new_tokens=2,
        progress=False,
    )


def test_parts_are_disjoint_and_balanced():
    first, second = choose_reviews(TEXTS, (10, 5), seed=3)
    assert (len(first), len(second)) == (20, 10)
    assert not set(first) & set(second)
    for part in (first, second):
        assert sum(label for _, label in part) == len(part) // 2
        assert all(("good" in text) == bool(label) for text, label in part)
    assert choose_reviews(TEXTS, (10, 5), seed=3) == (first, second)
    assert choose_reviews(TEXTS, (10, 5), seed=4) != (first, second)


def test_lukewarm_and_repeated_texts_are_left_out():
    texts = [Rated(1.4, "x"), *TEXTS[:8], *TEXTS[:8]]
    first, second = choose_reviews(texts, (2, 2), seed=0)
    assert sorted(text for text, _ in first + second) == sorted(each.text for each in TEXTS[:8])
    # Too few for what is asked: both parts shrink.
    first, second = choose_reviews(TEXTS, (200, 50), seed=0)
    assert (len(first), len(second)) == (32, 8)
    with pytest.raises(ValueError, match=r"only 1 texts of a mood are rated 1.5 or more; 4 are needed"):
        choose_reviews(TEXTS[:3], (2, 2), seed=0)
    with pytest.raises(ValueError, match="must be at least 2"):
        choose_reviews(TEXTS, (2, 1), seed=0)


def test_prompts_say_nothing_about_a_mood():
    assert len(set(PROMPTS)) == len(PROMPTS) >= 30
    scores = vader_judge()(PROMPTS, PROMPTS)
    # The new colleague and the party are as near to neutral as words of people get.
    assert sum(abs(score) > 0.05 for score in scores) <= 2
    assert vader_judge()(["bad"], ["a wonderful, happy day"])[0] > 0.5


def test_every_condition_moves_equally_far(result):
    # All of them are written to a file, or are what is written there.
    steerer = load_steerer(result.file)
    assert (steerer.method, steerer.steps, steerer.origin_.layer) == ("odesteer", 10, 1)
    assert pytest.approx(0.1 * float(steerer.median_norm_)) == result.T
    assert steerer.T == result.T
    assert list(result.texts) == ["untouched", "CAA", "one step", "ten steps", "ten steps, reversed"]
    for texts in result.texts.values():
        assert len(texts.completions) == len(PROMPTS)
    assert result.against_plain[TEN_STEPS].units == len(PROMPTS)
    assert result.probe.after > result.probe.before


def test_report_says_what_was_found(result):
    shown = demo_report(result)
    assert "texts: ours; fitted on 16, tested on 8 others" in shown
    assert f"{len(PROMPTS)} sampled continuations of {len(PROMPTS)} neutral prompts" in shown
    for name in result.texts:
        assert f"\n{name} " in shown
    assert "Ten steps against CAA of the same length: " in shown
    body = result.to_json()
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert body["T_rel"] == pytest.approx(0.1)


def change(value, p_value):
    return PairedBootstrap(0.0, value, (value - 0.1, value + 0.1), p_value, 30, 1000, 0.95)


@pytest.mark.parametrize(
    ("up", "down", "caa", "words"),
    [
        (change(0.2, 0.01), change(-0.2, 0.01), change(0.0, 0.9), "works both ways"),
        (change(0.2, 0.01), change(-0.2, 0.2), change(0.2, 0.01), "one way only: forwards raised, reversed no diff"),
        (
            change(-0.2, 0.01),
            change(0.2, 0.01),
            change(-0.2, 0.01),
            "did not work here: forwards lowered, reversed raised",
        ),
    ],
)
def test_verdicts_are_honest(result, up, down, caa, words):
    found = dataclasses.replace(
        result, against_plain={**result.against_plain, TEN_STEPS: up, REVERSED: down}, against_caa=caa
    )
    first, against, *rest = verdict_lines(found)
    assert words in first
    expected = {"raised": "better", "lowered": "worse"}.get(verdict(caa), "no difference shown")
    assert f"{expected}, {difference(caa)}" in against
    # Where many steps are no better it says why.
    assert any("cosine" in line for line in rest) == (verdict(caa) != "raised")


def test_words():
    assert verdict(change(0.1, 0.05)) == "no difference shown"
    assert difference(change(0.25, 0.031)) == "+0.250 [+0.150, +0.350], p = 0.031"
    assert table_lines(["a", "b"], [[1, None], [0.12345, "x"]]) == ["     a  b", "     1", "0.1235  x"]


def test_demo_on_given_texts(folder, tmp_path, capsys, monkeypatch):
    import separata_embedded
    from separata_embedded import RatedText, RatedTexts

    texts = tuple(RatedText(str(index), each.rating, each.text) for index, each in enumerate(TEXTS))
    monkeypatch.setattr(separata_embedded, "rated_texts", lambda name: RatedTexts(name, "ours", texts))
    arguments = [
        "demo",
        "--model",
        str(folder / "model"),
        "--out",
        str(tmp_path / "s.safetensors"),
        "--new-tokens",
        "2",
    ]
    arguments += ["--fit-items", "6", "--test-items", "3", "--samples", "1", "--layer", "2"]
    native = {}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: native, raising=False)
    assert run([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out, parse_constant=pytest.fail)
    assert found["data"] == {"source": "film reviews (ours)", "fitted_on": 12, "tested_on": 6}
    assert (found["layer"], found["dtype"]) == (2, "float32")
    assert "write: 100%" in captured.err
    assert "extract" in captured.err
    # Half the time where the processor multiplies it natively, unless one wants it otherwise.
    native["avx512_bf16"] = True
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "bfloat16"
    assert run([*arguments, "--json", "--dtype", "float32"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float32"


def test_what_is_refused(folder, tmp_path, capsys, monkeypatch):
    with pytest.raises(ValueError, match="samples=0"):
        run_demo(tiny_model(), tiny_tokenizer(), TEXTS, source="", out=tmp_path / "s", samples=0)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        run_demo(tiny_model(), tiny_tokenizer(), TEXTS, source="", out=tmp_path / "no" / "s")
    monkeypatch.setitem(sys.modules, "separata_embedded", None)
    assert run(["demo", "--out", str(tmp_path / "s")]) == 1
    assert "pip install 'bodes-steer[demo]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    assert run(["demo", "--model", str(folder / "model"), "--out", str(tmp_path / "s")]) == 1
    assert "'vader' needs the extra 'demo': pip install 'bodes-steer[demo]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
