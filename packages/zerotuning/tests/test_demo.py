from collections import namedtuple
from pathlib import Path

import pytest
from tiny_task import examples, talkative_model, word_tokenizer
from zerotuning import ZeroTuningConfig
from zerotuning.demo import choose_reviews, report, run_demo, verdict_line
from zerotuning.evaluation import Predictions, compare

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
    text = report(result)
    assert "texts of ours" in text
    assert verdict_line(result.evaluation) in text
    assert Path(result.to_json()["config"]) == out


def test_verdicts_are_honest():
    data = examples(24)
    right, wrong = (0, 1) * 12, (1, 0) * 12
    unparsed = (-1,) * 24

    def line(vanilla, tuned):
        return verdict_line(compare(data, vanilla, tuned))

    assert line(Predictions(wrong, wrong), Predictions(right, right)).startswith("It helped: accuracy +1.000")
    assert "by format" in line(Predictions(unparsed, right), Predictions(right, right))
    assert line(Predictions(right, right), Predictions(wrong, wrong)).startswith("It hurt: accuracy -1.000")
    assert line(Predictions(right, right), Predictions(right, right)).startswith("No difference shown")
