import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tiny_task import TASK, answers, examples, talkative_model, word_tokenizer
from zerotuning import DEFAULT_GRID, ZeroTuningConfig, calibrate
from zerotuning.points import PointLog, _Lines
from zerotuning.profiling import unit_config
from zerotuning.scoring import Predictions, Scorer

DATA = examples()


def run(model=None, **options):
    return calibrate(model or talkative_model(), word_tokenizer(), options.pop("data", DATA), TASK, **options)


def accuracy(model, config, data=DATA):
    return Scorer(model, word_tokenizer(), TASK, data).predict([config])[0].scores(data).accuracy.value


def test_uniform_takes_the_best_of_the_grid():
    model = talkative_model()
    result = run(model, grid=[0.2, 0.5, 3.0, 8.0])
    values = {gamma: accuracy(model, ZeroTuningConfig.uniform(model, gamma)) for gamma in (0.2, 0.5, 1.0, 3.0, 8.0)}
    assert {point.gamma: point.scores.accuracy.value for point in result.curve} == values
    assert values[result.gamma] == max(values.values())
    assert result.config == ZeroTuningConfig.uniform(model, result.gamma)
    assert result.config.meta["calibration"]["vanilla"] == values[1.0]
    assert any("only 24 examples" in each for each in result.warnings)


def test_ties_go_to_the_gamma_nearest_one():
    # Factors that nothing can tell apart.
    result = run(grid=[0.999999, 1.000001])
    assert result.gamma == 1.0
    assert result.config.is_identity


@pytest.fixture
def more_is_better(monkeypatch):
    """Answers of which ever more are right as gamma grows, up to 20 of 24."""

    def predict(self, configs, *, advance):
        found = []
        for config in configs:
            right = min(20, 10 + round(5 * float(config.log_gamma[0, 0])))
            found.append(answers([each.label if index < right else 1 - each.label for index, each in enumerate(DATA)]))
        return found

    monkeypatch.setattr(Scorer, "predict", predict)


@pytest.mark.usefixtures("more_is_better")
def test_a_grid_without_the_direction_of_the_profile_is_told():
    result = run(heads="profile", grid=[0.5])
    assert set(result.profile.select().values()) == {1}
    assert result.config.is_identity
    assert any("no factor in the direction" in each for each in result.warnings)


@pytest.mark.usefixtures("more_is_better")
def test_edge_of_the_grid_is_told():
    result = run(grid=[0.5, 2.0, 4.0])
    assert result.gamma == 4.0
    assert any("edge of the grid" in each for each in result.warnings)


@pytest.mark.usefixtures("more_is_better")
def test_refinement_looks_between_the_neighbours():
    result = run(grid=[0.5, 1.5, 30.0, 60.0], refine=True)
    # 20 of 24 are right from log gamma 1.9 on; ties go to the gamma nearest 1.
    assert min(point.gamma for point in result.curve if point.value == 20 / 24) == result.gamma
    assert math.exp(1.9) <= result.gamma < 30
    assert len(result.curve) == 5 + 6
    # At the edge of a grid there is nothing between neighbours.
    assert len(run(grid=[0.5, 2.0, 4.0], refine=True).curve) == 4


@pytest.mark.usefixtures("more_is_better")
def test_the_inside_of_the_grid_needs_no_warning():
    # From 7.4 on nothing is gained any more, so the tie goes to the smaller factor.
    result = run(grid=[0.5, 2.0, 8.0, 20.0])
    assert result.gamma == 8.0
    assert not any("edge" in each for each in result.warnings)


@pytest.mark.parametrize("together", [1, 4])
def test_profile_probes_each_head_alone(together):
    model = talkative_model()
    result = run(model, heads="profile", grid=[0.3, 3.0], configs_per_pass=together)
    base = accuracy(model, ZeroTuningConfig.uniform(model, 1.0))
    for head, delta in enumerate(result.profile.deltas):
        assert delta == pytest.approx(accuracy(model, ZeroTuningConfig.uniform(model, 2.0, heads=[head])) - base)
    chosen = result.profile.select(0.4)
    wanted = {1.0, 3.0} if set(chosen.values()) == {1} else {0.3, 1.0}
    assert {point.gamma for point in result.curve} == (wanted if chosen else {1.0})
    touched = set(result.config.log_gamma.abs().amax(dim=0).nonzero().flatten().tolist())
    assert touched in (set(), set(chosen))


def test_both_directions_get_inverse_factors():
    model = talkative_model()
    result = run(model, heads="profile", combine="both", p=1.0, grid=[0.5, 2.0, 4.0], gamma_probe=4.0)
    assert min(point.gamma for point in result.curve) == 1
    chosen = result.profile.select(1.0, "both")
    config = ZeroTuningConfig.per_head(
        model, {head: result.gamma if sign > 0 else 1 / result.gamma for head, sign in chosen.items()}
    )
    assert result.config == config


@pytest.mark.parametrize(
    ("granularity", "method", "combine"),
    [("layer_head", "gradient", "both"), ("layer", "exhaustive", "up"), ("head_index", "gradient", "random")],
)
def test_units_that_the_profile_selects_are_scaled(granularity, method, combine):
    model = talkative_model()
    result = run(
        model, heads="profile", granularity=granularity, method=method, combine=combine, metric="log_likelihood",
        layers=[0, 2], grid=[0.2, 0.5, 2.0, 5.0], tolerance="sign_test", seed=4,
    )  # fmt: skip
    profile = result.profile
    assert (profile.granularity, profile.method, profile.metric) == (granularity, method, "log_likelihood")
    signs = profile.select(0.4, combine, seed=4)
    both = combine == "both"
    factors = {unit: 1 / result.gamma if both and sign < 0 else result.gamma for unit, sign in signs.items()}
    assert result.config == unit_config(result.config.model_id, granularity, factors, [0, 2])
    assert set(result.config.layers) <= {0, 2}
    scaled = result.config.meta["calibration"]["heads_scaled" if granularity == "head_index" else "units_scaled"]
    assert len(scaled) == len(signs)


def test_temperature_as_a_baseline():
    model = talkative_model()
    result = run(model, operator="query", grid=[0.5, 2.0], metric="constrained_accuracy")
    assert result.config.mode == "query"
    profiled = run(model, operator="query", grid=[0.5, 2.0], heads="profile", configs_per_pass=3)
    assert (profiled.config.mode, profiled.profile.operator) == ("query", "query")
    with pytest.raises(ValueError, match="operator is 'exact', but the profile is of 'query'"):
        run(model, heads="profile", profile=profiled.profile)
    with pytest.raises(ValueError, match="the gradient is of 'exact'"):
        run(model, operator="query", heads="profile", method="gradient")


def test_chosen_layers_and_metric():
    result = run(layers=[1], grid=[3.0, 6.0], metric="constrained_accuracy")
    assert set(result.config.layers) <= {1}
    assert result.to_json()["metric"] == "constrained_accuracy"


def test_nothing_effective_scales_nothing():
    # A factor that changes no answer makes every head neutral.
    result = run(heads="profile", gamma_probe=1.000001)
    assert result.config.is_identity
    assert any("nothing is scaled" in each for each in result.warnings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": [0.0]}, "grid contains"),
        ({"grid": [float("nan")]}, "grid contains"),
        ({"gamma_probe": 1.0}, "gamma_probe is 1.0"),
        ({"configs_per_pass": 0}, "configs_per_pass is 0"),
        ({"p": 0.0}, "p is 0"),
        ({"data": []}, "empty"),
        ({"data": ["w1", "w2"]}, "no label"),
        ({"mode": "guessed"}, "mode"),
        ({"objective": "accuracy"}, "objective"),
        ({"layers": [9]}, "layer 9"),
        ({"data": DATA[::2]}, "have the label"),
    ],
)
def test_bad_input(options, message):
    # In these tests the check of types may come first.
    with pytest.raises((ValueError, TypeError), match=message):
        run(**options)


def test_default_grid_is_symmetric_about_one():
    assert 1.0 in DEFAULT_GRID
    assert list(DEFAULT_GRID) == sorted(DEFAULT_GRID)
    assert DEFAULT_GRID[0] * DEFAULT_GRID[-1] == pytest.approx(1)


class TestPointLog:
    HEADER: ClassVar[dict[str, str]] = {"run": "mine"}

    def test_points_are_found_again(self, tmp_path):
        path = tmp_path / "points.jsonl"
        with PointLog(path, self.HEADER) as log:
            log.append("a", answers((0, 1), (1, 1)))
        with PointLog(path, self.HEADER) as log:
            assert log.get("a") == answers((0, 1), (1, 1))
            assert log.get("b") is None

    def test_half_a_line_is_dropped(self, tmp_path):
        path = tmp_path / "points.jsonl"
        with PointLog(path, self.HEADER) as log:
            log.append("a", answers((0,)))
        whole = path.read_bytes()
        path.write_bytes(whole + b'{"config": "b", "par')
        with PointLog(path, self.HEADER) as log:
            assert log.get("a") is not None
            assert log.get("b") is None
        assert path.read_bytes() == whole

    def test_other_files_are_refused(self, tmp_path):
        path = tmp_path / "points.jsonl"
        with PointLog(path, self.HEADER):
            pass
        with pytest.raises(ValueError, match=r"another run \(different run\)"), PointLog(path, {"run": "yours"}):
            pass
        for content in ('{"schema": "something"}\n', "[]\n", "notes\n", "a line without an end", '{"schema":"zerotun?'):
            path.write_text(content)
            with pytest.raises(ValueError, match="no file of calibration points"), PointLog(path, self.HEADER):
                pass
            assert path.read_text() == content

    def test_a_header_cut_short_is_begun_anew(self, tmp_path):
        path = tmp_path / "points.jsonl"
        with PointLog(path, self.HEADER):
            pass
        whole = path.read_bytes()
        for end in (0, 5, len(whole) - 1):
            path.write_bytes(whole[:end])
            with PointLog(path, self.HEADER):
                pass
            assert path.read_bytes() == whole

    def test_other_runs_are_kept_out(self, tmp_path):
        path = tmp_path / "points.jsonl"
        with PointLog(path, self.HEADER) as log:
            with pytest.raises(OSError, match="in use by another run"), PointLog(path, self.HEADER):
                pass
            log.append("a", answers((0,)))
        with PointLog(path, self.HEADER) as log:
            assert log.get("a") is not None
            assert log.get("b") is None

    def test_a_full_disk_costs_one_point(self, tmp_path):
        path = tmp_path / "points.jsonl"
        with PointLog(path, self.HEADER) as log:
            log.append("a", answers((0,)))
        whole = path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"), PointLog(path, self.HEADER) as log:
                log.append("b", answers((1,)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        assert path.read_bytes() == whole
        with PointLog(path, self.HEADER) as log:
            assert log.get("a") is not None
            assert log.get("b") is None

    def test_impossible_labels_and_exact_numbers_survive(self, tmp_path):
        path = tmp_path / "points.jsonl"
        numbers = torch.rand(6).log().tolist()
        made = Predictions((2, -1), ((numbers[0], -math.inf, numbers[1]), tuple(numbers[2:5])), (numbers[5], 0.0))
        with PointLog(path, self.HEADER) as log:
            log.append("a", made)
        with PointLog(path, self.HEADER) as log:
            assert log.get("a") == made

    @pytest.mark.parametrize("version", [1, 2, 4])
    def test_other_versions_are_told(self, tmp_path, version):
        path = tmp_path / "points.jsonl"
        path.write_text(json.dumps({"schema": PointLog.SCHEMA, "version": version, **self.HEADER}) + "\n")
        before = path.read_bytes()
        with pytest.raises(ValueError, match=f"has version {version}"), PointLog(path, self.HEADER):
            pass
        assert path.read_bytes() == before

    def test_a_place_that_cannot_be_written_is_told(self, tmp_path):
        with pytest.raises(OSError, match="points"), PointLog(tmp_path / "nowhere" / "points", self.HEADER):
            pass

    @pytest.mark.parametrize("line", ["not json", '{"parsed": []}', "[]", '{"sha256": "0"}'])
    def test_damage_inside_is_refused(self, tmp_path, line):
        path = tmp_path / "points.jsonl"
        with PointLog(path, self.HEADER):
            pass
        path.write_text(path.read_text() + line + "\n")
        with pytest.raises(ValueError, match="line 2, is damaged or was altered"), PointLog(path, self.HEADER):
            pass

    def test_an_altered_answer_is_refused(self, tmp_path):
        path = tmp_path / "points.jsonl"
        with PointLog(path, self.HEADER) as log:
            log.append("a", answers((0, 1)))
        path.write_text(path.read_text().replace('"parsed":[0,1]', '"parsed":[1,1]'))
        with pytest.raises(ValueError, match="was altered"), PointLog(path, self.HEADER):
            pass


def test_resume_computes_nothing_twice(tmp_path, monkeypatch):
    points = tmp_path / "points.jsonl"
    first = run(grid=[0.5, 2.0], resume=points)
    calls = []
    original = Scorer.predict
    monkeypatch.setattr(
        Scorer, "predict", lambda self, configs, **k: calls.append(configs) or original(self, configs, **k)
    )
    second = run(grid=[0.5, 2.0], resume=points)
    assert calls == []
    assert second.to_json() == first.to_json()
    run(grid=[0.5, 2.0, 4.0], resume=points)
    assert [len(each) for each in calls] == [1]


def test_resume_of_another_run_is_refused(tmp_path):
    points = tmp_path / "points.jsonl"
    run(grid=[2.0], resume=points)
    with pytest.raises(ValueError, match="different data"):
        run(grid=[2.0], resume=points, data=examples(seed=1))
    other = talkative_model()
    with torch.no_grad():
        next(other.parameters()).flatten()[0] += 1
    with pytest.raises(ValueError, match="different weights"):
        run(other, grid=[2.0], resume=points)
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([DATA[0].text])
    with pytest.raises(ValueError, match=r"different tokens\)"):
        calibrate(talkative_model(), tokenizer, DATA, TASK, grid=[2.0], resume=points)


def test_resume_from_any_moment_loses_and_doubles_nothing(tmp_path, monkeypatch):
    # What the file holds before each point, and lines cut within; the test after this one kills a real process.
    whole, begun = tmp_path / "whole.jsonl", tmp_path / "points.jsonl"
    options = {"heads": "profile", "gamma_probe": 4.0, "grid": [1.5, 2, 0.5]}
    moments = []
    original = _Lines._write

    def write(self, record):
        moments.append(whole.read_bytes())
        original(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(_Lines, "_write", write)
        expected = run(resume=whole, **options)
    complete = whole.read_bytes()
    assert len(moments) >= 6
    # Whatever was computed is on the disk before the next point is begun.
    assert [moment.count(b"\n") for moment in moments] == list(range(len(moments)))
    cut = complete.rfind(b"\n", 0, -1) - 20
    for left in (*moments[::2], complete[:cut], complete[:10]):
        begun.write_bytes(left)
        assert run(resume=begun, **options).to_json() == expected.to_json()
        # In the order of the whole run, so nothing was done twice and nothing is missing.
        assert begun.read_bytes() == complete


_RUN_TO_BE_KILLED = """
import sys, time
sys.path.insert(0, {here!r})
from tiny_task import *
from zerotuning import calibration
from zerotuning.points import _Lines
original = _Lines._write
written = []
def wait_for_the_end(self, record):
    original(self, record)
    written.append(record)
    if len(written) == 4:
        time.sleep(600)
_Lines._write = wait_for_the_end
calibration.calibrate(talkative_model(), word_tokenizer(), examples(), TASK, heads="profile", gamma_probe=4.0,
                      grid=[1.5, 2, 0.5], resume=sys.argv[1])
"""


@pytest.mark.slow
def test_killed_process_resumes_with_nothing_lost_or_doubled(tmp_path):
    points, whole = tmp_path / "points.jsonl", tmp_path / "whole.jsonl"
    options = {"heads": "profile", "gamma_probe": 4.0, "grid": [1.5, 2, 0.5]}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    script = _RUN_TO_BE_KILLED.format(here=str(Path(__file__).parent))
    process = subprocess.Popen([sys.executable, "-c", script, str(points)], env=environment, start_new_session=True)
    try:
        # While the other one imports.
        expected = run(resume=whole, **options)
        end = time.monotonic() + 120
        while not points.exists() or points.read_bytes().count(b"\n") < 4:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    left = points.read_bytes()
    assert left.count(b"\n") == 4 < whole.read_bytes().count(b"\n")
    assert run(resume=points, **options).to_json() == expected.to_json()
    assert points.read_bytes() == whole.read_bytes()
    assert points.read_bytes().startswith(left)


def test_progress_goes_to_standard_error(capsys):
    run(grid=[2.0], progress=True)
    captured = capsys.readouterr()
    assert "calibrate: 100%" in captured.err
    assert captured.out == ""


def test_result_is_json():
    assert json.loads(json.dumps(run(heads="profile", grid=[2.0]).to_json(), allow_nan=False))["profile"]["kinds"]
