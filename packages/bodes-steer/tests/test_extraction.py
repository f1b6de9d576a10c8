"""Activations of texts: the right tensor at the right token, in files that survive."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bodes_steer import extract_activations
from bodes_steer.extraction import Activations, ActivationsError
from bodes_steer.files import Origin
from separata_core.models import capture_hidden_states
from separata_testing.models import tiny_model, tiny_tokenizer
from separata_testing.suites import FileFormat

TEXTS = ["a", "a longer text", "bc", "one more, the longest of them all", "x y z", "e"]
LABELS = [1, 0, 1, 0, 1, 0]


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float64)


def extract(model, texts=TEXTS, layers=None, **options):
    options = {"batch_size": 4, "progress": False, "dtype": "float64", **options}
    return extract_activations(model, tiny_tokenizer(), texts, layers, **options)


@torch.no_grad()
def alone(model, ids):
    """Outputs of all blocks for one text, `[layers, tokens, d]`."""
    with capture_hidden_states(model) as records:
        model(torch.tensor([ids]))
    return torch.stack([records[layer][0][0] for layer in range(3)])


def tokens(text):
    return tiny_tokenizer()(text)["input_ids"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_layer_and_position_is_that_of_the_text_alone(model, side):
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    whole = [alone(model, tokens(text)) for text in TEXTS]
    expected = {
        "last": torch.stack([each[:, -1] for each in whole], 1),
        "mean": torch.stack([each[:, 1:].mean(1) for each in whole], 1),
        "all": torch.cat([each[:, 1:] for each in whole], 1),
    }
    for position, rows in expected.items():
        found = extract_activations(
            model, tokenizer, TEXTS, position=position, batch_size=4, dtype="float64", progress=False
        )
        assert found.layers == (0, 1, 2)
        for layer in range(3):
            torch.testing.assert_close(found.layer(layer), rows[layer], atol=1e-10, rtol=1e-10)
    counts = [len(tokens(text)) - 1 for text in TEXTS]
    assert found.text_index.tolist() == [text for text, count in enumerate(counts) for _ in range(count)]
    assert len(found) == sum(counts)


def test_the_last_layer_is_read_before_the_final_norm(model):
    found = extract(model, layers=[2])
    with torch.no_grad():
        out = model(torch.tensor([tokens(TEXTS[1])]), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(model.model.norm(found.layer(2)[1]).detach(), out[0, -1])
    assert (found.layer(2)[1] - out[0, -1]).abs().max() > 1e-3


def test_blocks_above_the_highest_are_not_run(model):
    ran = []
    handles = [block.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, block in enumerate(model.model.layers)]
    try:
        found = extract(model, layers=[1, 0, 1], batch_size=6)
    finally:
        for handle in handles:
            handle.remove()
    assert set(ran) <= {0, 1}
    assert found.layers == (0, 1)


def test_labels_split_the_rows(model):
    found = extract(model, labels=LABELS)
    positive, negative = found.pair(1)
    assert torch.equal(positive, found.layer(1)[[0, 2, 4]])
    assert torch.equal(negative, found.layer(1)[[1, 3, 5]])
    everything = extract(model, labels=LABELS, position="all")
    assert len(everything.pair(0)[0]) == sum(len(TEXTS[i]) for i in (0, 2, 4))
    assert found.model == Origin.of(model)
    with pytest.raises(ValueError, match="no labels"):
        extract(model).pair(1)
    with pytest.raises(ValueError, match=r"layer 5 was not extracted; there are 0, 1, 2"):
        found.layer(5)


def test_conversations_go_through_the_chat_template(model):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    found = extract(model, [talk], [1])
    rendered = tiny_tokenizer()("user: Hi\nassistant: Ho\n", add_special_tokens=False)["input_ids"]
    torch.testing.assert_close(found.layer(1)[0], alone(model, rendered)[1, -1])
    with pytest.raises(ValueError, match="both texts and conversations"):
        extract(model, [talk, "text"])


def test_tokens_that_end_all_texts_are_not_read(model):
    class Ending:
        eos_token_id, pad_token_id, bos_token_id = 2, 0, 1

        def __call__(self, texts, **_):
            return {"input_ids": [[*tokens(text), 2, 0, 0] for text in texts]}

    found = extract_activations(model, Ending(), TEXTS, dtype="float64", progress=False)
    torch.testing.assert_close(found.layer(2), extract(model).layer(2))


def test_what_is_told(model, tmp_path):
    with pytest.warns(UserWarning, match="2 of 6 texts have more than 8 tokens"):
        cut = extract(model, max_length=8)
    assert cut.truncated == 2
    torch.testing.assert_close(cut.layer(1)[3], alone(model, tokens(TEXTS[3])[:8])[1, -1])
    with pytest.warns(UserWarning, match="1 texts appear with both labels"):
        double = extract(model, ["a", "b", "a", "a"], labels=[1, 0, 0, 1], out=tmp_path / "a.safetensors")
    assert double.duplicates == Activations.open(tmp_path / "a.safetensors").duplicates == 1
    small = tiny_model(max_position_embeddings=16)
    with pytest.warns(UserWarning, match="1 of 6 texts have more than 16 tokens"):
        extract(small)
    with torch.no_grad():
        small.get_input_embeddings().weight[tokens("b")[1]] = float("nan")
    with pytest.warns(UserWarning, match="2 texts have activations that are NaN"):
        extract(small, ["a", "b", "bb"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_types(model, dtype, tmp_path):
    found = extract(model, dtype=dtype, out=tmp_path / "a.safetensors")
    assert found.layer(0).dtype == getattr(torch, dtype)
    assert torch.equal(found.layer(0), extract(model).layer(0).to(found.layer(0).dtype))


def test_float16_that_overflows_is_refused():
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e6)
    with pytest.raises(ValueError, match="range of float16"):
        extract(model, dtype="float16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": []}, "texts must be a list"),
        ({"texts": ["a", "", "b", ""]}, r"2 texts have no tokens \(index 1, 3\)"),
        ({"layers": [3]}, r"layers=\[3\]; they must be among 0 to 2"),
        ({"layers": []}, "at least one"),
        ({"labels": [1, 0]}, "0 or 1 for each of the 6 texts"),
        ({"labels": [2] * 6}, "0 or 1"),
        ({"labels": [0.5] * 6}, "0 or 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_length": 0}, "max_length=0"),
        ({"texts": [{"role": "user", "content": "a"}]}, "single messages"),
    ],
)
def test_bad_input(model, options, message):
    with pytest.raises(ValueError, match=message):
        extract(model, **options)


def test_a_file_holds_what_memory_does(model, tmp_path):
    path = tmp_path / "a.safetensors"
    for position in ("last", "all"):
        memory = extract(model, labels=LABELS, position=position)
        file = extract(model, labels=LABELS, position=position, out=path, resume=False)
        assert Activations.open(path).path == path
        for layer in range(3):
            assert torch.equal(file.layer(layer), memory.layer(layer))
        assert file.layer(1) is file.layer(1)
        assert torch.equal(file.text_index, memory.text_index)
        assert torch.equal(file.labels, memory.labels)
        assert (file.position, file.model) == (position, memory.model)
        assert [each.name for each in tmp_path.iterdir()] == ["a.safetensors"]


def test_runs_go_on_where_they_stopped_and_only_there(model, tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    expected = extract(model)
    forward, calls = model.forward, []

    def failing(*args, **kwargs):
        calls.append(len(kwargs["input_ids"]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        extract(model, out=path, batch_size=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.safetensors.journal", "a.safetensors.part"]
    # Another run does not go on with it.
    with pytest.raises(ValueError, match="belongs to a run with another model, other texts"):
        extract(model, TEXTS[1:], out=path)
    # What was written and is not what was noted is done again; the batch size may differ.
    part = tmp_path / "a.safetensors.part"
    done = [json.loads(line) for line in part.with_suffix(".journal").read_text().splitlines()][1:]
    assert len(done) == 2
    data = bytearray(part.read_bytes())
    data[-3] ^= 1  # the last row of the last layer: text 5
    part.write_bytes(data)
    calls[:] = [0, 0, 0]
    found = extract(model, out=path, batch_size=3)
    redone = 6 - sum(len(each["texts"]) for each in done) + 2 * (5 in [t for each in done for t, _, _ in each["texts"]])
    assert sum(calls) == redone
    for layer in range(3):
        torch.testing.assert_close(found.layer(layer), expected.layer(layer), atol=1e-10, rtol=1e-10)
    # A finished run is taken as it is, another one's file is left alone.
    calls[:] = [0, 0, 0]
    extract(model, out=path)
    assert sum(calls) == 0
    with pytest.raises(ValueError, match="was made with another model"):
        extract(model, TEXTS[1:], out=path)
    extract(model, TEXTS[1:], out=path, resume=False)
    assert len(Activations.open(path)) == 5


def test_names_that_are_none(model):
    unchecked = inspect.unwrap(extract_activations)  # the tests' check of annotations would come first
    for options, message in [({"position": "first"}, "'last', 'mean', 'all'"), ({"dtype": "int8"}, "'float32', ")]:
        with pytest.raises(ValueError, match=message):
            unchecked(model, tiny_tokenizer(), TEXTS, progress=False, **options)


def test_what_a_kill_or_a_fault_left_half_done_is_done_again(model, tmp_path, monkeypatch):
    """A kill loses what the system did not have yet: the beginning of the file, in front of the rows."""
    path, part, journal = (tmp_path / f"a.safetensors{end}" for end in ("", ".part", ".journal"))
    expected = extract(model, labels=LABELS)
    forward, calls = model.forward, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        extract(model, labels=LABELS, out=path, batch_size=2)
    rows = 3 * 6 * 32 * 8
    data = part.read_bytes()
    part.write_bytes(bytes(len(data) - rows) + data[-rows:])
    # A text that was not run is noted in place of one that was.
    header, first, second = journal.read_text().splitlines()
    record = json.loads(first)
    missing = next(i for i in range(6) if f"[{i}," not in first + second)
    record["texts"][0][0] = missing
    journal.write_text("\n".join([header, json.dumps(record), second]) + "\n")
    found = extract(model, labels=LABELS, out=path, batch_size=2)
    assert found.labels.tolist() == LABELS
    assert found.text_index.tolist() == list(range(6))
    for layer in range(3):
        torch.testing.assert_close(found.layer(layer), expected.layer(layer), atol=1e-10, rtol=1e-10)


def test_places_that_cannot_be_written(model, tmp_path):
    with pytest.raises(OSError, match="is a folder"):
        extract(model, out=tmp_path)
    path = tmp_path / "a.safetensors"
    (tmp_path / "a.safetensors.journal").write_text("{}\n")
    (tmp_path / "a.safetensors.part").write_text("")
    with pytest.raises(ValueError, match=r"journal is damaged"):
        extract(model, out=path)
    fcntl = pytest.importorskip("fcntl", reason="no file locks on this system")
    with (tmp_path / "a.safetensors.journal").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="in use by another run"):
            extract(model, out=path)


def test_shapes_that_do_not_go_together():
    origin = Origin()
    with pytest.raises(ValueError, match="all layers need one"):
        Activations({0: torch.zeros(2, 3), 1: torch.zeros(3, 3)}, model=origin)
    with pytest.raises(ValueError, match="1 entries for 2 rows"):
        Activations({0: torch.zeros(2, 3)}, model=origin, text_index=torch.tensor([0]))
    with pytest.raises(ValueError, match="labels has 1 entries"):
        Activations({0: torch.zeros(2, 3)}, model=origin, labels=torch.tensor([0]))


class TestFile(FileFormat):
    error = ActivationsError
    file_name = "saved.safetensors"

    def example(self):
        generator = torch.Generator().manual_seed(0)
        tensors = {layer: torch.randn(4, 3, generator=generator) for layer in (2, 5)}
        return Activations(tensors, model=Origin("m", "llama", 3, 6), labels=torch.tensor([1, 0, 1, 0]), truncated=1)

    def save(self, value, path):
        value.save(path)

    def load(self, path):
        found = Activations.open(path)
        for layer in found.layers:
            found.layer(layer)
        return found

    def equal(self, first, second):
        return all(
            getattr(first, name) == getattr(second, name)
            for name in ("layers", "model", "position", "truncated", "duplicates")
        ) and all(
            torch.equal(a, b)
            for a, b in [
                (first.labels, second.labels),
                (first.text_index, second.text_index),
                *((first.layer(layer), second.layer(layer)) for layer in first.layers),
            ]
        )


_SLOWLY = """
import sys, time
sys.path.insert(0, {here!r})
from test_extraction import killed_run
killed_run(sys.argv[1], lambda *_: time.sleep(0.5))
"""


def killed_run(path, wait=lambda *_: None):
    model = tiny_model()
    model.model.layers[0].register_forward_hook(wait)
    texts = [f"text {i}" for i in range(12)]
    return extract_activations(
        model, tiny_tokenizer(), texts, out=path, labels=[0, 1] * 6, batch_size=2, progress=False
    )


# In the first batch, where nothing but the header is there, and in the midst.
@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 4])
def test_killed_process_resumes_with_nothing_lost_or_doubled(tmp_path, lines):
    path, journal = tmp_path / "a", tmp_path / "a.journal"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    command = [sys.executable, "-c", _SLOWLY.format(here=str(Path(__file__).parent)), str(path)]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        end = time.monotonic() + 120
        while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not path.exists()
    whole, found = killed_run(tmp_path / "whole"), killed_run(path)
    assert not journal.exists()
    assert torch.equal(found.labels, whole.labels)
    for layer in whole.layers:
        assert torch.equal(found.layer(layer), whole.layer(layer))


_SECOND = """
import sys
import time
sys.path.insert(0, {here!r})
import torch
from test_extraction import shared
torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=1, world_size=2)
shared(sys.argv[2])
torch.distributed.destroy_process_group()
"""


def shared(path):
    """What two processes do together; the tiny model counts its forwards."""
    model, texts, ran = tiny_model(dtype=torch.float64), [f"text {i}" * (1 + i % 3) for i in range(11)], []
    model.model.layers[0].register_forward_hook(lambda *_: ran.append(1))
    file = extract(model, texts, out=path, batch_size=2, position="all")
    extract(model, texts, out=path, batch_size=2, position="all")
    refused = False
    try:
        extract(model, texts[1:], out=path)
    except (ValueError, OSError):
        refused = True
    memory = extract(model, texts, batch_size=2)
    assert refused
    return model, texts, file, memory, len(ran)


@pytest.mark.slow
def test_two_processes_share_the_texts(tmp_path):
    meeting, path = f"file://{tmp_path / 'meeting'}", tmp_path / "a.safetensors"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    command = [sys.executable, "-c", _SECOND.format(here=str(Path(__file__).parent)), meeting, str(path)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=2)
        try:
            model, texts, file, memory, forwards = shared(path)
        finally:
            _, errors = process.communicate(timeout=120)
            torch.distributed.destroy_process_group()
    assert process.returncode == 0, errors.decode()
    assert forwards == 2 * 3  # of the six batches of each run
    for layer in range(3):
        torch.testing.assert_close(file.layer(layer), extract(model, texts, position="all").layer(layer))
        torch.testing.assert_close(memory.layer(layer), extract(model, texts).layer(layer))


def test_progress_is_shown_on_standard_error(model, capfd):
    extract(model, progress=True)
    assert "6/6" in capfd.readouterr().err
