import pytest
from tiny_task import answers, examples
from zerotuning.calibration import CalibrationResult
from zerotuning.config import ModelId, ZeroTuningConfig
from zerotuning.evaluation import compare
from zerotuning.profiling import HeadProfile, unit_config
from zerotuning.report import comparison_table, describe_choice, heads_of, scaled_units, verdict_line

MODEL = ModelId("llama", "", 3, 4, 2)


def result(config, granularity=None, warnings=()):
    profile = None
    if granularity is not None:
        units = {"head_index": 4, "layer_head": 12, "layer": 3}[granularity]
        profile = HeadProfile(
            granularity, (3, 4), (0, 1, 2), "exhaustive", "accuracy", 2.0, 0.5, (0.1,) * units, (0.01,) * units,
            "example", 100,
        )  # fmt: skip
    return CalibrationResult(config, 2.0, (), "supervised", "accuracy", profile, tuple(warnings))


@pytest.mark.parametrize(
    ("granularity", "units", "words"),
    [
        ("head_index", [1, 3], "head 1, 3 (up-effective in the profile) of every layer"),
        ("layer", [0, 2], "all heads of layer 0, 2 (up-effective in the profile)"),
        ("layer_head", [(0, 1), (2, 3)], "2 pairs of layer and head (0.1, 2.3) (up-effective in the profile)"),
    ],
)
def test_choice_in_words(granularity, units, words):
    found = result(unit_config(MODEL, granularity, dict.fromkeys(units, 2.0)), granularity)
    assert describe_choice(found) == f"calibration chose gamma 2 on {words}"
    assert scaled_units(found) == units


def test_choice_without_a_profile():
    assert describe_choice(result(ZeroTuningConfig.uniform(MODEL, 2.0, layers=[1]))).endswith("all heads of 1 layers")
    untouched = ZeroTuningConfig.uniform(MODEL, 1.0)
    assert "no factor was better" in describe_choice(result(untouched))
    assert "cannot be trusted" in describe_choice(result(untouched, warnings=["...; gamma 1 is kept"]))
    assert "no unit" in describe_choice(result(untouched, warnings=["...; nothing is scaled"]))
    assert heads_of(result(untouched)) == scaled_units(result(untouched)) == []
    many = unit_config(MODEL, "layer_head", {(layer, head): 2.0 for layer in range(3) for head in range(4)})
    assert "12 pairs" in describe_choice(result(many, "layer_head"))
    assert "1.3, ...)" in describe_choice(result(many, "layer_head"))
    assert heads_of(result(many)) == [0, 1, 2, 3]


def test_table_sets_both_side_by_side():
    data = examples(24)
    lines = comparison_table(compare(data, answers((0,) * 24), answers((0, 1) * 12)))
    assert lines[1].startswith("accuracy over all items     0.500 [")
    assert "1.000 [" in lines[1]
    assert "+0.500" in lines[6]
    assert "12 gained, 0 lost" in lines[6]


def test_verdicts_are_honest():
    data = examples(24)
    right, wrong = (0, 1) * 12, (1, 0) * 12
    unparsed = (-1,) * 24

    def line(vanilla, tuned):
        return verdict_line(compare(data, vanilla, tuned))

    assert line(answers(wrong), answers(right)).startswith("It helped: accuracy +1.000")
    assert "by format" in line(answers(unparsed, right), answers(right))
    assert line(answers(right), answers(wrong)).startswith("It hurt: accuracy -1.000")
    assert line(answers(right), answers(right)).startswith("No difference shown")
