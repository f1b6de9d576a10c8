"""What the verbs do, with a scripted sampler in place of a model."""

import csv
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pmark import __main__, cli, evaluation, hf_sampler, kgw, openai_sampler, paraphrase, plots, samplers
from pmark.attacks import Attack
from pmark.key import PMarkKey
from pmark.samplers import Continuation
from pmark.scoring import Null
from pmark.sentence_watermark import Unmarked
from pmark.watermark import PMark
from separata_kit import language_models

WORDS = [
    line.split()
    for line in (
        "A The One This That",
        "old young tall quiet happy angry clever",
        "farmer doctor sailor baker singer judge painter",
        "saw heard met liked feared",
        "birds ships clouds letters houses songs wolves",
        "yesterday today again twice slowly",
    )
]
PROMPTS = ["It was a long day.", "The market opened early.", "Nobody knew why.", "The road was wet.", "Snow fell."]
LOAD_SAMPLER, LOAD_ENCODER = cli._Source.load, cli._load_encoder
SMALL = ["--samples", "8", "--max-sentences", "6", "--documents", "2"]


class Words:
    """Draws sentences from a small grammar; seeded as a real sampler is."""

    def __init__(self, wait=0.0):
        self.wait = wait

    def sample(self, contexts, counts, *, is_complete=None, seed=None):
        time.sleep(self.wait)
        rng = np.random.default_rng(seed)
        return [[Continuation(self._sentence(rng)) for _ in range(count)] for count in counts]

    def _sentence(self, rng):
        return " " + " ".join(options[rng.integers(len(options))] for options in WORDS) + ". And"


def encode(texts):
    """Vectors that depend on nothing but the text."""
    seeds = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") for text in texts]
    return np.stack([np.random.default_rng(seed).normal(size=16) for seed in seeds])


def scripted(monkeypatch, wait=0.0):
    monkeypatch.setattr(cli._Source, "load", lambda self: Words(wait))
    monkeypatch.setattr(cli, "_load_encoder", lambda place: LOAD_ENCODER(place) if place == "" else encode)


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    scripted(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    """A key of two channels, and prompts."""
    PMarkKey.generate(2, b"sixteen bytes or more").save(tmp_path / "key.json")
    PMarkKey.generate(2, b"sixteen bytes or less").save(tmp_path / "wrong.json")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return tmp_path


def output(capsys, *arguments, code=0):
    capsys.readouterr()
    assert cli.run([str(each) for each in arguments]) == code, capsys.readouterr().err
    return capsys.readouterr()


def as_json(capsys, *arguments, code=0):
    return json.loads(output(capsys, *arguments, "--json", code=code).out, parse_constant=pytest.fail)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(capsys, folder, *more, out="marked.jsonl"):
    arguments = ("--key", folder / "key.json", "--data", folder / "prompts.txt", "--out", folder / out)
    return as_json(capsys, "generate", *arguments, *SMALL, *more)


def test_a_key_is_shown_by_its_id_only(tmp_path, capsys):
    path = tmp_path / "key.json"
    shown = output(capsys, "keygen", "--out", path, "--channels", "3")
    key = PMarkKey.load(path)
    assert shown.out == f"key {key.id} with 3 channels: {path}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "--overwrite" in output(capsys, "keygen", "--out", path, code=1).err
    assert PMarkKey.load(path).id == key.id
    assert as_json(capsys, "keygen", "--out", path, "--overwrite")["id"] != key.id


def test_generated_texts_are_found_again(folder, capsys):
    found = generate(capsys, folder)
    assert (found["texts"], found["sentences"]) == (5, 30)
    assert found["ended"] == {"length": 5}
    texts = rows(folder / "marked.jsonl")
    assert [row["prompt"] for row in texts] == PROMPTS
    assert all(row["text"].startswith(row["prompt"]) and len(row["trace"]) == 6 for row in texts)
    assert [row["id"] for row in texts][1] == f"{folder / 'prompts.txt'}, line 2"
    detect = ("detect", folder / "marked.jsonl", "--samples", "16")
    right = as_json(capsys, *detect, "--key", folder / "key.json", "--fail", code=cli.FOUND)
    assert right["watermarked"] >= 4
    wrong = as_json(capsys, *detect, "--key", folder / "wrong.json", "--fail", "--alpha", "0.001")
    assert wrong["watermarked"] == 0
    assert np.mean([row["z"] for row in right["results"]]) > 2 + np.mean([row["z"] for row in wrong["results"]])


def test_no_output_holds_the_secret(folder, capsys):
    generate(capsys, folder)
    detect = ("detect", folder / "marked.jsonl", "--key", folder / "key.json", "--out", folder / "r.jsonl")
    shown = output(capsys, *detect, "--samples", "8")
    secret = json.loads((folder / "key.json").read_text())["secret"]
    for each in (shown.out, shown.err, (folder / "marked.jsonl").read_text(), (folder / "r.jsonl").read_text()):
        assert secret not in each
        assert b"sixteen bytes".hex() not in each
    # Proxies and counts give the pivots away.
    for name in ("marked.jsonl", "r.jsonl"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


def test_detection_of_files_and_what_it_writes(folder, capsys):
    (folder / "letter.txt").write_text("Dear Ann.\nThe birds sang.\n")
    (folder / "short.md").write_text("Only one sentence.")
    detect = ("detect", folder / "letter.txt", folder / "short.md", "--key", folder / "key.json", "--mode", "offline")
    found = as_json(capsys, *detect, "--no-prompt", "--out", folder / "r.csv")
    assert [row["num_sentences"] for row in found["results"]] == [2, 1]
    assert stat.S_IMODE((folder / "r.csv").stat().st_mode) == 0o600
    with (folder / "r.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["id"] for row in table] == [str(folder / "letter.txt"), str(folder / "short.md")]
    assert float(table[0]["z"]) == found["results"][0]["z"]
    shown = output(capsys, *detect, "--out", folder / "r.jsonl").out
    assert "no sentence to test" in shown
    assert "few sentences" in shown
    assert "0 of 2 texts" in shown
    assert rows(folder / "r.jsonl")[1]["p_value"] == 1
    assert not list(folder.glob("*.journal"))
    aligned = as_json(capsys, *detect, "--no-prompt", "--window", "1")["results"][0]
    assert "aligned" in aligned["reason"]
    assert len(aligned["counts"]) == 2


def test_a_text_without_words_is_a_result(folder, capsys):
    (folder / "empty.txt").write_text("")
    table = [{"text": ""}, {"text": " \n", "prompt": "It rained."}, {"text": "It rained. Ann slept."}]
    (folder / "holes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    detect = ("detect", folder / "empty.txt", folder / "holes.jsonl", "--key", folder / "key.json")
    for more in (("--mode", "offline"), ("--samples", "4")):
        found = as_json(capsys, *detect, *more)["results"]
        assert [row["num_sentences"] for row in found] == [0, 0, 0, 1]
        assert [row["reason"] for row in found[:3]] == ["no sentence to test"] * 3


def test_calibration(folder, capsys):
    human = [
        {"text": " ".join(Words()._sentence(np.random.default_rng(i * 9 + j))[1:-4] for j in range(6))}
        for i in range(30)
    ]
    (folder / "human.jsonl").write_text("".join(json.dumps(row) + "\n" for row in human))
    common = ("--key", folder / "key.json", "--mode", "offline")
    calibrate = ("calibrate", *common, "--data", folder / "human.jsonl", "--out", folder / "null.json", "--no-prompt")
    found = as_json(capsys, *calibrate)
    assert found["texts"] == 30
    assert found["thresholds"].keys() == {"0.05"}, "30 texts say nothing about 1 %"
    assert "30 texts" in output(capsys, *calibrate).out
    detect = ("detect", folder / "human.jsonl", *common, "--no-prompt")
    results = as_json(capsys, *detect, "--null", folder / "null.json")["results"]
    assert np.mean([row["z_calibrated"] for row in results]) == pytest.approx(0, abs=1e-6)
    # By rank: exactly one of 30 in the highest of 31 places.
    assert min(row["p_calibrated"] for row in results) == pytest.approx(2 / 31)
    # Online it goes on where it stopped, and is what the library measures.
    online = ("calibrate", "--key", folder / "key.json", *SMALL[:2], "--no-prompt", "--documents", "4", "--limit", "4")
    online += ("--data", folder / "human.jsonl", "--out", folder / "online.json")
    found = as_json(capsys, *online)
    mark = PMark(encode, PMarkKey.load(folder / "key.json"), num_samples=8, seed=0)
    mark.seed = int(np.random.SeedSequence((0, 0)).generate_state(1)[0])
    null = mark.calibrate([row["text"] for row in human[:4]], has_prompt=False, sampler=Words())
    assert Null.load(folder / "online.json") == null
    assert found["mean"] == null.mean
    other = PMarkKey.generate(2)
    other.save(folder / "other.json")
    told = output(capsys, *detect[:2], "--key", folder / "other.json", *common[2:], "--null", folder / "null.json").err
    assert "warning: " in told
    assert other.id in told


def test_attacks(folder, capsys):
    generate(capsys, folder)
    attack = ("attack", "--data", folder / "marked.jsonl", "--out", folder / "attacked.jsonl")
    found = as_json(capsys, *attack, "--kind", "word-deletion", "--rate", "0.3", "--limit", "3")
    assert (found["attack"], found["texts"], found["changed"]) == ("word-deletion-0.3", 3, 3)
    before, after = rows(folder / "marked.jsonl"), rows(folder / "attacked.jsonl")
    for old, new in zip(before, after, strict=False):
        assert new["text"].startswith(old["prompt"])
        assert len(new["text"].split()) < len(old["text"].split())
        assert (new["id"], new["prompt"], new["settings"]) == (old["id"], old["prompt"], old["settings"])
    assert (
        output(capsys, "detect", folder / "attacked.jsonl", "--key", folder / "key.json", *SMALL[:2]).err.count(
            "warning"
        )
        == 0
    )
    # Without a known prompt the first sentence is it.
    plain = "One here. Two here. Three here. Four here."
    (folder / "plain.txt").write_text(plain)
    shuffle = ("attack", "--data", folder / "plain.txt", "--out", folder / "s.jsonl", "--kind", "sentence-shuffle")
    assert "texts changed" in output(capsys, *shuffle, "--seed", "3").out
    [row] = rows(folder / "s.jsonl")
    assert row["text"].startswith("One here. ")
    assert sorted(row["text"].split()) == sorted(plain.split())


def test_paraphrase_by_what_was_asked_for(folder, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(cli, "_load_model", lambda place: ("model", place))
    for name in ("ChatParaphraser", "CausalParaphraser"):

        def make(*arguments, name=name, **options):
            made.append((name, *arguments))
            return Shout(name, keep_first=options["keep_first"])

        monkeypatch.setattr(f"{paraphrase.__name__}.{name}", make)
    attack = ("attack", "--data", folder / "prompts.txt", "--out", folder / "a.jsonl", "--no-prompt", "--kind")
    assert as_json(capsys, *attack, "paraphrase-document", "--model", "small")["changed"] == 5
    assert rows(folder / "a.jsonl")[0]["text"] == "IT WAS A LONG DAY."
    as_json(capsys, *attack, "back-translation", "--model", "m", "--endpoint", "http://localhost:1/v1")
    assert made == [
        ("CausalParaphraser", "model", "small", "document"),
        ("ChatParaphraser", "http://localhost:1/v1", "m", "back_translation"),
    ]


class Shout(Attack):
    def alter(self, documents, rngs):
        return [[sentence.upper() for sentence in each] for each in documents]


def test_pictures(folder, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    for name, rate in (("key", 0.9), ("wrong", 0.5)):
        counts = rng.binomial(1, rate, (6, 2, 2))
        found = [{"z": each.sum() / 2.0, "num_sentences": 2, "counts": each.tolist()} for each in counts]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    plot = ("plot", folder / "key.jsonl", "--unmarked", folder / "wrong.jsonl", "--out", folder / "p.svg")
    drawn = set()
    for kind in ("histogram", "roc", "power"):
        assert as_json(capsys, *plot, "--kind", kind) == {"picture": str(folder / "p.svg")}
        drawn.add((folder / "p.svg").read_bytes())
    assert len(drawn) == 3
    # Six unmarked texts say nothing about 1 %; and files of one name in two folders are two curves.
    labels = []
    monkeypatch.setattr(plots, "plot_power", lambda curves, out, **options: labels.append((list(curves), options)))
    (folder / "more").mkdir()
    (folder / "more" / "key.jsonl").write_text((folder / "wrong.jsonl").read_text() * 17)
    as_json(capsys, *plot, folder / "more" / "key.jsonl", "--kind", "power")
    as_json(capsys, *plot[:2], "--unmarked", folder / "more" / "key.jsonl", *plot[4:], "--kind", "power")
    both = [str(folder / "key.jsonl"), str(folder / "more" / "key.jsonl")]
    assert labels == [(both, {"label": "share above all 6 unmarked texts"}), (both[:1], {})]
    same = ("plot", folder / "key.jsonl", "--unmarked", folder / "key.jsonl", "--out", folder / "p.svg")
    assert "names too" in output(capsys, *same, code=2).err
    (folder / "marked.jsonl").write_text('{"text": "no result"}\n')
    assert "no 'z'" in output(capsys, "plot", folder / "marked.jsonl", "--out", folder / "p.svg", code=1).err
    (folder / "flat.jsonl").write_text('{"z": 1, "num_sentences": 1, "counts": [0.5]}\n')
    assert "flat.jsonl" in output(capsys, "plot", folder / "flat.jsonl", "--out", folder / "p.svg", code=1).err


def test_bench(folder, capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "evaluate", partial(evaluation.evaluate, draws=20))
    human = [" ".join(Words()._sentence(np.random.default_rng(i * 9 + j))[1:-4] for j in range(4)) for i in range(5)]
    (folder / "human.txt").write_text("\n".join(human))
    common = ("bench", "--key", folder / "key.json", "--data", folder / "prompts.txt", "--human", folder / "human.txt")
    common += ("--out", folder / "table.json", "--samples", "8", "--max-sentences", "4", "--limit", "2")
    common += ("--attack", "sentence-drop=0.5")
    more = ("--endpoint", "http://localhost:1/v1", "--model", "m", "--plot", folder / "roc.svg")
    table = as_json(capsys, *common, *more)
    attacks = ["none", "sentence-drop-0.5"]
    assert [(row["method"], row["attack"]) for row in table["rows"]] == [
        (method, attack) for method in cli._METHODS[:-1] for attack in attacks
    ]
    assert table["rows"][0]["mean_z"][0] > 1
    assert (folder / "roc.svg").exists()
    assert json.loads((folder / "table.json").read_text())["rows"] == table["rows"]
    assert not list(folder.glob("*.journal"))
    # What has the model itself: perplexity, and the token-level watermark.
    made = []

    def make(*given, **options):
        made.append((*given, options["temperature"]))
        return Unmarked(encode, num_samples=1)

    with_model = SimpleNamespace(
        model="model", tokenizer="tokenizer", temperature=0.6, top_p=1.0, sample=Words().sample
    )
    monkeypatch.setattr(cli._Source, "load", lambda self: with_model)
    monkeypatch.setattr(kgw, "KGW", make)
    monkeypatch.setattr(evaluation, "perplexity", lambda texts, *model, prompts: np.full(len(texts), 7.0))
    shown = output(capsys, *common, "--method", "kgw").out
    assert made == [("model", "tokenizer", 0.6)]
    assert "7 [7, 7]" in shown


def test_an_interrupted_run_is_continued(folder, capsys, monkeypatch):
    whole = generate(capsys, folder, out="whole.jsonl")
    sample, calls = Words.sample, []

    def interrupted(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 9:  # in the second batch, whose first text is not there yet
            raise KeyboardInterrupt
        return sample(self, *arguments, **options)

    monkeypatch.setattr(Words, "sample", interrupted)
    command = ("generate", "--key", folder / "key.json", "--data", folder / "prompts.txt", *SMALL)
    output(capsys, *command, "--out", folder / "marked.jsonl", code=130)
    assert not (folder / "marked.jsonl").exists()
    journal = folder / "marked.jsonl.journal"
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 2
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600
    # A batch of which a kill left one text; and another run is not continued.
    journal.write_text("".join(lines[:2]) + lines[2][:40])
    told = output(capsys, *command, "--out", folder / "marked.jsonl", "--seed", "5", code=1).err
    assert "seed" in told
    again = generate(capsys, folder)
    assert {**again, "out": ""} == {**whole, "out": ""}
    assert (folder / "marked.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    assert not journal.exists()


def test_a_server_that_is_down_ends_the_run(folder, capsys, monkeypatch):
    monkeypatch.setattr(samplers, "time", SimpleNamespace(sleep=lambda seconds: None))
    sample, calls = Words.sample, []

    def down(self, *arguments, **options):
        calls.append(1)
        if len(calls) > 6:  # all sentences of the first batch are there
            raise RuntimeError("connection refused")
        return sample(self, *arguments, **options)

    generate(capsys, folder, out="whole.jsonl")
    monkeypatch.setattr(Words, "sample", down)
    command = ("generate", "--key", folder / "key.json", "--data", folder / "prompts.txt", *SMALL)
    command += ("--endpoint", "http://ann:password@localhost:1/v1", "--model", "m", "--out", folder / "marked.jsonl")
    told = output(capsys, *command, code=1).err
    assert "connection refused" in told
    assert f"prompts {folder / 'prompts.txt'}, line 3 to {folder / 'prompts.txt'}, line 4" in told
    assert not (folder / "marked.jsonl").exists()
    assert "password" not in (folder / "marked.jsonl.journal").read_text()
    monkeypatch.setattr(Words, "sample", sample)
    output(capsys, *command)
    assert (folder / "marked.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()


_SLOWLY = """
import sys
sys.path.insert(0, {here!r})
from test_cli import slowly
slowly(sys.argv[1:])
"""


def slowly(arguments):
    """The command line with a sampler that leaves time for a kill."""
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, wait=0.1)
        sys.exit(cli.run(arguments))


@pytest.mark.slow
def test_a_killed_run_is_continued(folder, capsys):
    small = [*SMALL, "--documents", "1", "--limit", "3", "--max-sentences", "3"]
    generate(capsys, folder, *small, out="whole.jsonl")
    command = ["generate", "--key", folder / "key.json", "--data", folder / "prompts.txt", *small]
    command += ["--out", folder / "marked.jsonl"]
    journal = folder / "marked.jsonl.journal"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    start = [sys.executable, "-c", _SLOWLY.format(here=str(Path(__file__).parent)), *map(str, command)]
    for texts in (1, 2):
        process = subprocess.Popen(start, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 100
            while not journal.exists() or journal.read_bytes().count(b"\n") < 1 + texts:
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert not (folder / "marked.jsonl").exists()
    generate(capsys, folder, *small)
    assert (folder / "marked.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "--mode", "sideways"], "'sideways' is none of online, offline"),
        (["generate", "--segmenter", "scissors"], "none of pysbd"),
        (["generate", "--chat"], "--endpoint"),
        (["generate", "--encoder", ""], "--encoder: it is empty"),
        (["generate", "--endpoint", "http://localhost:1/v1"], "--model"),
        (["detect", "--alpha", "1"], "--alpha"),
        (["detect", "--out", "results.xml"], ".csv"),
        (["calibrate", "--prior", "calibrated"], "--mode online"),
        (["attack", "--kind", "fire"], "none of word-deletion"),
        (["attack", "--kind", "paraphrase", "--rate", "0.5"], "--rate"),
        (["attack", "--kind", "sentence-drop", "--model", "m"], "--model"),
        (["bench", "--method", "magic"], "none of online"),
        (["bench", "--attack", "fire=0.3"], "none of word-deletion"),
        (["bench", "--attack", "sentence-drop=much"], "no list of numbers"),
        (["bench", "--method", "kgw", "--model", "m", "--endpoint", "http://localhost:1/v1"], "model itself"),
        (["plot", "--kind", "pie"], "none of histogram"),
        (["plot", "--kind", "roc"], "--unmarked"),
    ],
)
def test_wrong_usage(folder, capsys, arguments, told):
    verb, *rest = arguments
    data, key, out = str(folder / "prompts.txt"), str(folder / "key.json"), str(folder / "out.jsonl")
    needed = {
        "generate": ["--key", key, "--data", data, "--out", out],
        "detect": [data, "--key", key],
        "calibrate": ["--key", key, "--data", data, "--out", out],
        "attack": ["--data", data, "--out", out],
        "bench": ["--key", key, "--data", data, "--human", data, "--out", out],
        "plot": [data, "--out", str(folder / "p.svg")],
    }[verb]
    captured = output(capsys, verb, *needed, *rest, code=2)
    assert told in captured.err
    assert not captured.out


def test_what_goes_wrong(folder, capsys):
    (folder / "empty.jsonl").write_text("")
    (folder / "holes.jsonl").write_text('{"text": "It rained."}\n{"text": ""}\n')
    common = ("--key", folder / "key.json", "--out", folder / "out.jsonl")
    (folder / "number.jsonl").write_text('{"text": "It rained.", "prompt": 3}\n')
    for data, told in (
        ("number.jsonl", "'prompt' must be a text"),
        ("empty.jsonl", "there are no texts"),
        ("holes.jsonl", "line 2"),
        ("no.jsonl", "no.jsonl"),
    ):
        assert told in output(capsys, "generate", *common, "--data", folder / data, code=1).err
    (folder / "letter.md").write_bytes(b"Caf\xe9 is closed.")
    detect = ("detect", folder / "letter.md", "--key", folder / "key.json", "--mode", "offline")
    assert "letter.md is not UTF-8" in output(capsys, *detect, code=1).err
    (folder / "null.md").write_bytes(b"\xff")
    assert (
        "null.md"
        in output(capsys, *detect[:1], folder / "prompts.txt", *detect[2:], "--null", folder / "null.md", code=1).err
    )
    few = ("generate", *common, "--data", folder / "prompts.txt", "--samples", "3")
    assert "--samples" in output(capsys, *few, code=1).err
    same = ("generate", "--key", folder / "key.json", "--data", folder / "prompts.txt", "--out", folder / "prompts.txt")
    assert "names too" in output(capsys, *same, code=2).err
    assert sorted(path.suffix for path in folder.iterdir()) == [".json"] * 2 + [".jsonl"] * 3 + [".md"] * 2 + [".txt"]


def test_what_is_loaded(monkeypatch):
    made = []
    # A vendored copy has no demo.
    monkeypatch.setitem(sys.modules, f"{cli.__name__.rpartition('.')[0]}.demo", SimpleNamespace(embedded=None))
    monkeypatch.setattr(hf_sampler, "HFSampler", lambda *given, **options: made.append((given, options)))
    monkeypatch.setattr(openai_sampler, "OpenAISampler", lambda *given, **options: made.append((given, options)))
    monkeypatch.setattr(language_models, "load_language_model", lambda place: (place, "tokenizer"))
    drawing = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 9}
    LOAD_SAMPLER(cli._Source("folder", None, False, 0.5, 0.9, 9))
    LOAD_SAMPLER(cli._Source("name", "http://localhost:1/v1", True, 0.5, 0.9, 9))
    assert made == [
        (("folder", "tokenizer"), drawing),
        (("http://localhost:1/v1", "name"), {**drawing, "mode": "chat"}),
    ]
    assert LOAD_ENCODER("folder") == "folder"


def test_main_runs_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pmark", "--help"])
    assert __main__.main() == 0
    assert "pmark demo" in capsys.readouterr().out
