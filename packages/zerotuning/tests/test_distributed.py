"""Prompts shared out among processes. The first process is that of the tests, so that what it does is seen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_task import TASK, examples, talkative_model, word_tokenizer
from zerotuning import calibrate, parallel
from zerotuning.gradient import log_gamma_gradients
from zerotuning.points import PointLog, run_identity
from zerotuning.scoring import Scorer

DATA = examples(9)

_SECOND = """
import datetime, json, sys
sys.path.insert(0, {here!r})
import torch
from test_distributed import run
torch.distributed.init_process_group(
    "gloo", init_method=sys.argv[1], rank=1, world_size=2, timeout=datetime.timedelta(seconds=120)
)
print(json.dumps(run(sys.argv[2])))
torch.distributed.destroy_process_group()
"""


def run(points):
    """Everything that is shared out; each process has a place of its own for files."""
    model, tokenizer = talkative_model(), word_tokenizer()
    options = {"batch_rows": 4, "grid": [0.5, 3.0], "progress": True}
    first = calibrate(model, tokenizer, DATA, TASK, heads="profile", resume=points, **options)
    again = calibrate(model, tokenizer, DATA, TASK, heads="profile", resume=points, **options)
    values, gradients = log_gamma_gradients(model, tokenizer, TASK, DATA, "log_likelihood", batch_rows=4)
    try:
        calibrate(model, tokenizer, DATA[1:], TASK, resume=points)
        refused = ""
    except ValueError as error:
        refused = str(error)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    try:
        calibrate(model, tokenizer, DATA, TASK)
        failed = ""
    except RuntimeError as error:
        failed = str(error)
    return {
        "first": first.to_json(),
        "again": again.to_json(),
        "values": values.tolist(),
        "gradients": gradients.flatten().tolist(),
        "refused": "different data" in refused,
        "failed": "NaN" in failed,
    }


def flat(value):
    """Numbers of a JSON value apart from its shape."""
    if isinstance(value, dict):
        return [each for key in sorted(value) for each in flat(value[key])]
    if isinstance(value, list):
        return [each for inner in value for each in flat(inner)]
    return [value]


@pytest.fixture
def group(tmp_path):
    yield f"file://{tmp_path / 'meeting'}"
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path, group, capfd):
    script = _SECOND.format(here=str(Path(__file__).parent))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    command = [sys.executable, "-c", script, group, str(tmp_path / "second.jsonl")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        alone = run(tmp_path / "alone.jsonl")
        capfd.readouterr()
        torch.distributed.init_process_group("gloo", init_method=group, rank=0, world_size=2)
        assert parallel.share(talkative_model()) == (0, 2)
        first = run(tmp_path / "first.jsonl")
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
    # Before it Gloo itself may have written.
    second = json.loads(output.splitlines()[-1])
    # Both the same, to the last bit; one process runs other batches.
    assert second == json.loads(json.dumps(first))
    assert first["first"] == first["again"]
    assert (first["refused"], first["failed"]) == (True, True)
    for found, expected in zip(flat(first), flat(alone), strict=True):
        assert found == (pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected)
    # The first process writes and shows for all.
    lines = (tmp_path / "first.jsonl").read_text().splitlines()
    assert len(lines) == len((tmp_path / "alone.jsonl").read_text().splitlines())
    assert len({json.loads(line)["config"] for line in lines[1:]}) == len(lines) - 1
    assert not (tmp_path / "second.jsonl").exists()
    assert b"calibrate" not in errors
    assert "calibrate: 100%" in capfd.readouterr().err


def test_one_process_in_a_group_is_as_without(tmp_path, group):
    before = run(tmp_path / "a")
    torch.distributed.init_process_group("gloo", init_method=group, rank=0, world_size=1)
    assert parallel.share(talkative_model()) == (0, 1)
    assert parallel.from_first(b"x") == b"x"
    with PointLog(tmp_path / "b", {}):
        pass
    (tmp_path / "b").unlink()
    assert run(tmp_path / "b") == before


def test_a_model_spread_over_processes_is_not_shared_out(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=group, rank=0, world_size=1)
    model = torch.nn.Linear(2, 2)
    spread = distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,)), [Replicate()])
    model.weight = torch.nn.Parameter(spread)
    assert parallel.is_spread(model)
    assert not parallel.is_spread(torch.nn.Linear(2, 2))
    assert parallel.is_spread(
        FullyShardedDataParallel(
            torch.nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
        )
    )


def test_weights_that_lie_elsewhere_can_be_told_from_others(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=group, rank=0, world_size=1)
    model = talkative_model()
    scorer = Scorer(model, word_tokenizer(), TASK, DATA)
    whole = run_identity(scorer)
    weight = model.lm_head.weight
    mesh = init_device_mesh("cpu", (1,))
    model.lm_head.weight = torch.nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
    assert run_identity(scorer) == whole
    model.lm_head.weight = torch.nn.Parameter(distribute_tensor(weight.detach() + 1, mesh, [Shard(0)]))
    assert run_identity(scorer) != whole
    # As accelerate leaves those that it moved to the main memory or to the disk.
    model.lm_head.weight = torch.nn.Parameter(weight.detach().to("meta"))
    assert run_identity(scorer) != whole
