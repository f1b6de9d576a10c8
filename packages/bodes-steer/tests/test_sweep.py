import json
import math

import pytest
import torch
from bodes_steer.baselines import CAA, LinAcT, MiMiC
from bodes_steer.extraction import Activations
from bodes_steer.files import Origin
from bodes_steer.sweeps import Point, Table, probe_metric, strength_of, sweep, sweep_layers
from hypothesis import given
from hypothesis import strategies as st

D = 12


def rows(seed=0, count=40, apart=3.0):
    """Two classes that lie apart along the first axis, on a base that all share."""
    generator = torch.Generator().manual_seed(seed)
    pos, neg = torch.randn(2, count, D, generator=generator)
    pos[:, 0] += apart / 2
    neg[:, 0] -= apart / 2
    base = torch.zeros(D)
    base[1] = 16.0
    return pos + base, neg + base


# In the second layer the classes are the same.
LAYERS = {4: rows(0), 7: rows(1, apart=0.0)}
METHODS = ("caa", "linear-ode")


class Counting:
    """A metric of ours: how far along the first axis negatives end."""

    def __init__(self):
        self.asked = []

    def __call__(self, point):
        self.asked.append((point.layer, None if point.steerer is None else point.steerer.method, point.T))
        moved = point.neg if point.steerer is None else point.steerer.steer(point.neg, point.T)
        return {"along": float(moved[:, 0].mean()), "length": float((moved - point.neg).norm(dim=1).mean())}


def swept(metric, **options):
    given = {"methods": METHODS, "Ts": (0.05, 0.2), "gain": "along", "cost": "length", "progress": False, **options}
    return sweep(LAYERS, metric=metric, **given)


def test_every_choice_is_judged_once_after_the_untouched_model():
    metric = Counting()
    table = swept(metric, layers=[7, 4])
    heads = [(row["layer"], row["method"], row["T_rel"]) for row in table.rows]
    assert heads == [(7, "none", 0.0), *((layer, name, T) for layer in (7, 4) for name in METHODS for T in (0.05, 0.2))]
    assert table == swept(Counting(), layers=[7, 4, 7], methods=(*METHODS, "caa"), Ts=(0.05, 0.2, 0.05))
    assert [each[0:2] for each in metric.asked] == [(7, None), *(head[:2] for head in heads[1:])]
    assert table.columns == ["layer", "method", "T", "T_rel", "along", "length"]


def test_relative_strengths_make_steps_of_one_length():
    table = swept(Counting(), layers=[4])
    norm = torch.cat(LAYERS[4]).norm(dim=1).median()
    for row in table.rows[1:]:
        # The median is over the part that was fitted on.
        assert row["length"] == pytest.approx(row["T_rel"] * float(norm), rel=0.05)
    lengths = {
        row["T_rel"]: [each["length"] for each in table.rows if each["T_rel"] == row["T_rel"]] for row in table.rows
    }
    for each in lengths.values():
        assert each == pytest.approx([each[0]] * len(each), rel=1e-5)
    absolute = swept(Counting(), layers=[4], relative=False)
    assert [row["T"] for row in absolute.rows] == [0, 0.05, 0.2, 0.05, 0.2]
    assert {row["T_rel"] for row in absolute.rows} == {None}


def test_held_out_rows_are_not_fitted_on(monkeypatch):
    seen = {}

    def fit(self, pos, neg):
        seen["fit"] = pos, neg
        return original(self, pos, neg)

    original = CAA.fit
    monkeypatch.setattr(CAA, "fit", fit)

    def metric(point):
        seen["test"] = point.pos, point.neg
        return {"along": 0.0, "length": 0.0}

    swept(metric, layers=[4], methods=["caa"], Ts=[1])
    for fitted, held_out, every in zip(seen["fit"], seen["test"], LAYERS[4], strict=True):
        together = {tuple(each) for each in torch.cat([fitted, held_out]).tolist()}
        assert together == {tuple(each) for each in every.tolist()}
        assert (len(fitted), len(held_out)) == (30, 10)


def test_two_runs_do_not_share_a_file(tmp_path):
    path = tmp_path / "points.jsonl"

    def metric(point):
        with pytest.raises(OSError, match=r"points\.jsonl is in use by another run"):
            swept(Counting(), resume=path)
        return {"along": 0.0, "length": 0.0}

    swept(metric, layers=[4], methods=["caa"], Ts=[1], resume=path)


def test_a_run_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "points.jsonl"
    whole = swept(first := Counting(), resume=path)
    content = path.read_bytes()
    assert swept(again := Counting(), resume=path) == whole
    assert again.asked == []
    # A crash in the middle of the last line but two.
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:-2])[:-7])
    assert swept(rest := Counting(), resume=path) == whole
    assert rest.asked == first.asked[-3:]
    assert path.read_bytes() == content
    with pytest.raises(ValueError, match=r"was made for another run \(different seed\)"):
        swept(Counting(), resume=path, seed=1)
    with pytest.raises(ValueError, match=r"different about"):
        swept(Counting(), resume=path, about={"judge": "x"})
    path.write_bytes(content.replace(b'"along"', b"along", 1))
    with pytest.raises(ValueError, match="line 2, is damaged"):
        swept(Counting(), resume=path)
    for other in (b'{"a": 1}\n', b"text", b"[]\n"):
        path.write_bytes(other)
        with pytest.raises(ValueError, match="no file of judged choices"):
            swept(Counting(), resume=path)
        assert path.read_bytes() == other


def test_what_is_refused():
    for wrong, message in (
        ({"layers": [5]}, r"layers=\[5\] are not among those of the activations: \[4, 7\]"),
        ({"layers": []}, "no layer to look at"),
        ({"methods": []}, "must both name something"),
        ({"methods": ["x"]}, "method='x' is not offered"),
        ({"Ts": [math.nan]}, "must be finite"),
        ({"params": {"iti": {}}}, r"params are for \['iti'\]"),
        ({"gain": "x"}, "the metric gives .* and not 'x'"),
        ({"groups": ["a"]}, "groups are for activations that have labels"),
        ({"test_share": 0.01}, "1 held out are too few"),
    ):
        with pytest.raises(ValueError, match=message):
            swept(Counting(), **wrong)


def labelled(text_index=None):
    """The same as `extract_activations` gives it: the labels alternate."""
    pos, neg = LAYERS[4]
    together = torch.stack([pos, neg], 1).flatten(0, 1)
    labels = torch.tensor([1, 0] * (40 if text_index is None else 10))
    return Activations({4: together}, model=Origin(), labels=labels, text_index=text_index)


def test_groups_stay_together():
    groups = [str(index // 4) for index in range(80)]
    seen = {}

    def metric(point):
        seen["test"] = point.pos, point.neg
        return {"along": 0.0, "length": 0.0}

    sweep(
        labelled(), methods=["caa"], Ts=[1], metric=metric, gain="along", cost="length", groups=groups, progress=False
    )
    # Each group has two rows of either class, next to each other.
    for held_out, every in zip(seen["test"], LAYERS[4], strict=True):
        places = {int((every == row).all(1).nonzero()) for row in held_out}
        assert places == {place ^ 1 for place in places}
        assert len(places) == 10
    with pytest.raises(ValueError, match="79 groups for 80 texts"):
        sweep(labelled(), methods=["caa"], Ts=[1], groups=groups[1:], progress=False)


def test_rows_of_one_text_stay_together():
    # Twenty texts of alternating labels, of four rows each.
    index = torch.arange(20).view(10, 2).repeat(1, 4).flatten()
    seen = {}

    def metric(point):
        seen["test"] = point.pos, point.neg
        return {"along": 0.0, "length": 0.0}

    sweep(labelled(index), methods=["caa"], Ts=[1], metric=metric, gain="along", cost="length", progress=False)
    for held_out, every in zip(seen["test"], LAYERS[4], strict=True):
        texts = [int((every == row).all(1).nonzero()) // 4 for row in held_out]
        assert sorted(texts) == sorted(text for text in set(texts) for _ in range(4))
        assert len(set(texts)) == round(0.25 * 10)


def test_the_probe_sees_negatives_cross_over():
    pos, neg = LAYERS[4]
    steerer = CAA().fit(pos[:20], neg[:20])
    point = Point(None, 4, 0.0, neg[20:], pos[20:])
    untouched = probe_metric(point)
    assert untouched["displacement"] == 0
    assert untouched["shifted"] < 0.3
    steered = probe_metric(Point(steerer, 4, 1.4, neg[20:], pos[20:]))
    assert steered["shifted"] >= 0.9
    assert steered["displacement"] == pytest.approx(
        float((1.4 * steerer.constant_vector.norm() / neg[21::2].norm(dim=1)).median()), rel=1e-5
    )


def test_strengths_of_methods_without_a_speed():
    pos, neg = LAYERS[4]
    assert strength_of(MiMiC().fit(pos, neg), 0.3, neg) == 1.0
    linact = LinAcT().fit(pos, neg)
    share = strength_of(linact, 0.05, neg)
    moved = (linact.steer(neg, share) - neg).norm(dim=1).median() / neg.norm(dim=1).median()
    assert float(moved) == pytest.approx(0.05, rel=1e-4)
    assert strength_of(linact, 50.0, neg) == 1.0
    assert strength_of(linact, -1.0, neg) == 0.0


def test_layers_are_told_apart():
    table = sweep_layers(LAYERS, sketch=True, n_components=256, progress=False)
    first, second = table.rows
    assert [first["layer"], second["layer"]] == [4, 7]
    for name in ("linear_accuracy", "sketch_accuracy", "caa_accuracy"):
        assert first[name] > 0.8
        assert second[name] < 0.8
    assert first["caa_length"] > 2 * second["caa_length"]
    assert table.best()["layer"] == 4
    assert "sketch_accuracy" not in sweep_layers(LAYERS, layers=[7], progress=False).columns


def table(points):
    made = ({"layer": 0, "method": "m", "T": 1.0, "gain": gain, "cost": cost} for gain, cost in points)
    return Table("methods", tuple(made), "gain", "cost")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_the_front_is_what_nothing_beats(points):
    front = {(row["gain"], row["cost"]) for row in table(points).pareto()}
    expected = {
        (gain, cost)
        for gain, cost in points
        if not any(g >= gain and c <= cost and (g, c) != (gain, cost) for g, c in points)
    }
    assert front == expected


def test_the_best_that_one_can_afford():
    made = table([(1, 1), (3, 3), (3, 2), (9, 9)])
    assert made.best(most_cost=5)["cost"] == 2
    assert made.best()["gain"] == 9
    with pytest.raises(ValueError, match=r"most_cost=0: no row has a lower cost"):
        made.best(most_cost=0)


def test_numbers_that_could_not_be_had_are_left_out(tmp_path):
    made = swept(lambda point: {"along": point.T, "length": math.nan if point.T else 1.0, "other": math.inf})
    assert made.rows[1]["length"] is None
    assert [row["method"] for row in made.pareto()] == ["none"]
    assert made.best()["method"] == "none"
    made.save(tmp_path / "t.json")
    assert Table.load(tmp_path / "t.json") == made


def test_tables_in_files(tmp_path):
    made = table([(1, 1), (0.5, 0.25)])
    path = tmp_path / "t.json"
    made.save(path)
    assert Table.load(path) == made
    body = json.loads(path.read_text())
    for content, message in (
        (path.read_text()[:-20], "is not a complete JSON file"),
        ("[]", "holds no JSON object"),
        (json.dumps({**body, "schema": "x"}), "is no table of a sweep"),
        (json.dumps({**body, "version": 2}), "reads version 1"),
        (json.dumps({**body, "rows": [{"layer": 1}]}), "is no valid table"),
        (json.dumps({**body, "rows": []}), "has no rows"),
        *(
            (json.dumps({**body, "rows": [{**body["rows"][0], name: value}]}), "is no valid table")
            for name, value in (("gain", "0.5"), ("cost", math.nan), ("layer", None), ("T", None), ("T", True))
        ),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            Table.load(path)
