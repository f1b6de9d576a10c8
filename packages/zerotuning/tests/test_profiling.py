import json
import math

import pytest
import torch
from tiny_task import TASK, examples, talkative_model, word_tokenizer
from zerotuning import ZeroTuningConfig
from zerotuning.config import ModelId
from zerotuning.metrics import sign_test
from zerotuning.profiling import HeadProfile, HeadProfiler, unit_config
from zerotuning.scoring import Scorer

DATA = examples()


def profile(
    deltas, gamma_probe=2.0, tolerance="example", p_values=None, items=100, granularity="head_index", shape=None
):
    shape = shape or (2, len(deltas))
    return HeadProfile(
        granularity=granularity,
        shape=shape,
        layers=tuple(range(shape[0])),
        method="exhaustive",
        metric="accuracy",
        gamma_probe=gamma_probe,
        baseline=0.5,
        deltas=tuple(deltas),
        p_values=tuple(p_values or [0.01] * len(deltas)),
        tolerance=tolerance,
        items=items,
    )


PROFILE = profile((0.10, -0.04, 0.01, 0.06, -0.20, 0.0, 0.03, -0.01, 0.02, 0.05))


def test_kinds_of_heads():
    found = [PROFILE.kind(head) for head in range(10)]
    assert found == ["up", "down", "neutral", "up", "down", "neutral", "up", "neutral", "up", "up"]
    # Probed downwards, what falls wants more.
    assert profile((-0.1, 0.1), gamma_probe=0.5).kind(0) == "up"
    with pytest.raises(ValueError, match="unit is 10"):
        PROFILE.kind(10)


def test_kinds_by_the_sign_test():
    p_values = [sign_test(*each) for each in ((9, 2), (8, 3), (2, 9), (0, 0))]
    assert p_values == pytest.approx([2 * 67 / 2048, 2 * 232 / 2048, 2 * 67 / 2048, 1.0])
    found = profile((0.07, 0.05, -0.07, 0.0), tolerance="sign_test", p_values=p_values)
    assert [found.kind(head) for head in range(4)] == ["up", "neutral", "down", "neutral"]


def test_selection():
    # Top four of each type: up 0.10 0.06 0.05 0.03 (mean 0.06), down 0.20 0.04 (mean 0.12).
    assert PROFILE.select(0.4) == {4: -1, 1: -1}
    assert PROFILE.select(0.4, "up") == {0: 1, 3: 1, 9: 1, 6: 1}
    assert PROFILE.select(0.2, "up") == {0: 1, 3: 1}
    assert PROFILE.select(0.3, "both") == {4: -1, 0: 1, 3: 1}
    assert PROFILE.select(0.01, "down") == {4: -1}
    assert profile((0.0, 0.01)).select() == {}
    for p in (0, 1.5):
        with pytest.raises(ValueError, match=f"p is {p}"):
            PROFILE.select(p)
    # In these tests the check of types comes first.
    with pytest.raises((ValueError, TypeError), match="combine"):
        PROFILE.select(0.4, "best")


def test_random_control_is_as_many_in_the_same_direction():
    drawn = [PROFILE.select(0.4, "random", seed=seed) for seed in range(20)]
    assert all(set(each.values()) == {-1} and len(each) == 2 for each in drawn)
    assert PROFILE.select(0.4, "random", seed=3) == drawn[3]
    # Drawn from all ten, effective or not.
    assert len({unit for each in drawn for unit in each}) > 5


def test_table_and_json():
    pairs = profile((1.0, 2.0, 3.0, 4.0), granularity="layer_head", shape=(2, 2))
    assert pairs.table.tolist() == [[1, 2], [3, 4]]
    assert pairs.units == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert profile((1.0, 2.0), granularity="layer", shape=(2, 3)).table.tolist() == [[1] * 3, [2] * 3]
    assert profile((1.0, 2.0)).table.tolist() == [[1, 2], [1, 2]]
    for each in (pairs, PROFILE):
        assert HeadProfile.from_json(json.loads(json.dumps(each.to_json(), allow_nan=False))) == each
    old = PROFILE.to_json()
    del old["operator"]
    assert HeadProfile.from_json(old) == PROFILE
    for wrong in (
        {"granularity": "heads"}, {"metric": None}, {"operator": "other"}, {"layers": [0, 2]}, {"items": 0},
        {"deltas": [math.nan] * 10}, {"gamma_probe": "2"}, {"p_values": None}, {"shape": [2]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="no head profile"):
            HeadProfile.from_json({**PROFILE.to_json(), **wrong})
    with pytest.raises(ValueError, match="no head profile"):
        HeadProfile.from_json({})
    with pytest.raises(ValueError, match="3 deltas"):
        profile((1.0, 2.0, 3.0), granularity="layer", shape=(2, 3))


@pytest.mark.parametrize("granularity", ["head_index", "layer_head", "layer"])
def test_every_unit_is_probed_alone(granularity):
    model = talkative_model()
    found = HeadProfiler(model, word_tokenizer(), TASK, DATA).run(
        3.0, granularity=granularity, metric="log_likelihood", layers=[1, 2], configs_per_pass=3
    )
    assert (found.layers, found.tolerance, found.items) == ((1, 2), "sign_test", len(DATA))
    scorer = Scorer(model, word_tokenizer(), TASK, DATA, reuse_layers=False)
    base = torch.tensor(scorer.predict([ZeroTuningConfig.uniform(model, 1.0)])[0].values("log_likelihood", DATA))
    assert found.baseline == pytest.approx(float(base.mean()), abs=1e-6)
    for unit, delta, p_value in zip(found.units, found.deltas, found.p_values, strict=True):
        gammas = torch.ones(3, 4)
        place = {"head_index": (slice(1, 3), unit), "layer": (unit,), "layer_head": unit}[granularity]
        gammas[place] = 3.0
        config = ZeroTuningConfig(gammas.log(), ModelId.of(model))
        changes = torch.tensor(scorer.predict([config])[0].values("log_likelihood", DATA)) - base
        assert delta == pytest.approx(float(changes.mean()), abs=1e-5)
        assert p_value == pytest.approx(sign_test(int((changes > 0).sum()), int((changes < 0).sum())))
    assert [found.table[0].isnan().all(), found.table[1:].isnan().any()] == [True, False]


def test_unlabelled_data_are_profiled_by_entropy():
    texts = [example.text for example in DATA]
    model = talkative_model()
    found = HeadProfiler(model, word_tokenizer(), TASK, texts).run()
    assert (found.metric, found.tolerance) == ("entropy", "sign_test")
    assert found.baseline < 0
    assert any(found.deltas)
    assert HeadProfiler(model, word_tokenizer(), TASK, DATA[:4]).run().metric == "accuracy"


def test_resumed_profile_is_the_same(tmp_path):
    profiler = HeadProfiler(talkative_model(), word_tokenizer(), TASK, DATA)
    first = profiler.run(granularity="layer", metric="entropy", resume=tmp_path / "points")
    written = (tmp_path / "points").read_bytes()
    again = profiler.run(granularity="layer", metric="entropy", resume=tmp_path / "points")
    assert again == first
    assert (tmp_path / "points").read_bytes() == written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma_probe": 1.0}, r"gamma_probe is 1\.0"),
        ({"gamma_probe": math.nan}, "gamma_probe is nan"),
        ({"granularity": "heads"}, "granularity"),
        ({"method": "gradient", "metric": "accuracy"}, "has no gradient"),
        ({"method": "gradient", "operator": "query"}, "the gradient is of 'exact'"),
        ({"tolerance": "example", "metric": "entropy"}, "counts no examples"),
        ({"layers": [3]}, "layer 3 does not exist"),
        ({"layers": []}, "layers is empty"),
        ({"operator": "other"}, "operator"),
        ({"configs_per_pass": 0}, "configs_per_pass is 0"),
    ],
)
def test_bad_options(options, message):
    # In these tests the check of types may come first.
    with pytest.raises((ValueError, TypeError), match=message):
        HeadProfiler(talkative_model(), word_tokenizer(), TASK, DATA).run(**options)


def test_labels_are_needed_for_what_counts_them():
    with pytest.raises(ValueError, match="no label"):
        HeadProfiler(talkative_model(), word_tokenizer(), TASK, ["w1", "w2"]).run(metric="accuracy")


def test_units_get_their_factors():
    identity = ModelId("llama", "", 3, 4, 2)
    assert unit_config(identity, "head_index", {1: 2.0}, [0, 2]) == ZeroTuningConfig.uniform(identity, 2.0, [1], [0, 2])
    assert unit_config(identity, "layer", {1: 2.0}) == ZeroTuningConfig.uniform(identity, 2.0, layers=[1])
    pair = unit_config(identity, "layer_head", {(2, 3): 0.5}, meta={"a": 1})
    assert pair == ZeroTuningConfig.uniform(identity, 0.5, [3], [2])
    assert pair.meta == {"a": 1}
