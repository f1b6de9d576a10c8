import dataclasses
import hashlib
import json
import math

import numpy as np
import pytest
from pmark import evaluation
from pmark.attacks import SentenceShuffle, WordDeletion
from pmark.evaluation import evaluate
from pmark.metrics import auc
from pmark.samplers import Continuation
from pmark.semstamp import SemStamp
from pmark.sentence_watermark import Unmarked

PROMPTS = [f"The storm number {number} had passed." for number in range(3)]
HUMAN = [" ".join(f"On day {text} the tide {line} came." for line in range(5)) for text in range(12)]


def encode(texts):
    rngs = (np.random.default_rng(list(hashlib.sha256(text.encode()).digest()[:8])) for text in texts)
    return np.array([rng.normal(size=16) for rng in rngs])


class Draws:
    """A model that says a seed's sentences and breaks down at a call."""

    def __init__(self, breaks_at=None):
        self.calls, self.breaks_at = 0, breaks_at

    def sample(self, contexts, counts, *, is_complete=None, seed=None):
        self.calls += 1
        if self.calls == self.breaks_at:
            raise KeyboardInterrupt
        rng = np.random.default_rng(seed)
        words = ("river", "market", "harbour", "garden", "station")
        return [
            [Continuation(f" Anna left the {words[rng.integers(5)]} at {rng.integers(10**6)}.") for _ in range(count)]
            for count in counts
        ]


def run(sampler, journal=None, methods=("semstamp", "unmarked"), **options):
    made = {"semstamp": SemStamp(encode), "unmarked": Unmarked(encode, num_samples=1)}
    return evaluate(
        {name: made[name] for name in methods},
        PROMPTS,
        HUMAN,
        options.pop("attacks", [SentenceShuffle()]),
        sampler=sampler,
        max_sentences=4,
        journal=journal,
        batch_size=2,
        draws=60,
        progress=False,
        **options,
    )


@pytest.fixture(scope="module")
def table():
    pytest.importorskip("sklearn", reason="needs the extra 'evaluation'")
    return run(Draws(), encoder=encode, clusters=3)


def test_rows_tell_how_well_each_is_found_and_what_it_costs(table):
    rows = {(row.method, row.attack): row for row in table.rows}
    assert list(rows) == [
        (name, attack) for name in ("semstamp", "unmarked") for attack in ("none", "sentence-shuffle")
    ]
    marked, shuffled, plain = rows["semstamp", "none"], rows["semstamp", "sentence-shuffle"], rows["unmarked", "none"]
    # All four sentences green: (4 - 1) / sqrt(4 / 4 * 3 / 4).
    assert marked.mean_z == pytest.approx([3.4641] * 3, abs=1e-4)
    assert marked.tpr_5.value == 1
    assert marked.auc.value == auc(table.scores["semstamp"]["none"], table.scores["semstamp"]["human"])
    assert shuffled.mean_z.value < marked.mean_z.value
    assert plain.auc == (0.5, 0.5, 0.5)
    # One region in four is green, the border costs some; drawn by eights.
    assert 4 <= marked.samples.value <= 40
    assert plain.samples.value == 1
    assert marked.rep_3 == shuffled.rep_3
    assert 0 < marked.distinct_2 < 1
    assert 0 < marked.entropy <= math.log(3)
    assert marked.perplexity is None
    assert len(table.scores["semstamp"]["human"]) == 12


def test_the_table_is_read_and_saved(table, tmp_path):
    lines = table.text().splitlines()
    assert len(lines) == 7
    assert lines[0].split()[:3] == ["method", "attack", "auc"]
    assert "1 [1, 1]" in lines[1]
    assert lines[6] == "tpr_1 and tpr_5: only 12 human texts, so the threshold is the largest of them"
    enough = dataclasses.replace(table, settings={**table.settings, "human_texts": 20})
    assert enough.text().endswith("\n\ntpr_1: only 20 human texts, so the threshold is the largest of them")
    assert "only" not in dataclasses.replace(table, settings={**table.settings, "human_texts": 100}).text()
    table.save(tmp_path / "table.json")
    body = json.loads((tmp_path / "table.json").read_text())
    assert body["schema"] == "pmark/table"
    assert body["rows"][0]["mean_z"] == list(table.rows[0].mean_z)
    assert body["rows"][0]["perplexity"] is None
    assert body["settings"]["methods"]["semstamp"]["margin"] == 0.02


def test_blocks_do_not_share_their_draws():
    texts = []

    class Seen(Unmarked):
        def detect_batch(self, some, **options):
            texts.extend(some)
            found = super().detect_batch(some, **options)
            return [dataclasses.replace(each, z=3.0, z_calibrated=2.0) for each in found]

    seen = {"seen": Seen(encode, num_samples=1)}
    for _ in range(2):
        found = evaluate(seen, ["One."] * 2, HUMAN[:1], sampler=Draws(), batch_size=1, draws=2)
    # The second run said the same.
    assert texts[:3] == texts[3:]
    assert texts[0] != texts[1]
    # Detection goes by what is calibrated.
    assert found.rows[0].mean_z.value == 3
    assert found.scores["seen"] == {"human": [2.0], "none": [2.0, 2.0]}


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path):
    everything = Draws()
    whole = run(everything, methods=["semstamp"])
    journal, sampler = tmp_path / "journal.jsonl", Draws(breaks_at=everything.calls)
    with pytest.raises(KeyboardInterrupt):
        run(sampler, journal, methods=["semstamp"])
    rest = Draws()
    resumed = run(rest, journal, methods=["semstamp"])
    assert resumed == whole
    assert 0 < rest.calls < everything.calls
    finished = Draws()
    assert run(finished, journal, methods=["semstamp"]) == whole
    assert finished.calls == 0
    # Another attack needs no new texts, and another method only its own.
    more = run(finished, journal, methods=["semstamp"], attacks=[SentenceShuffle(), WordDeletion(0.5)])
    assert finished.calls == 0
    assert more.rows[:2] == whole.rows
    assert more.rows[2].attack == "word-deletion-0.5"
    with pytest.raises(ValueError, match="another run"):
        run(Draws(), journal, methods=["semstamp"], seed=1)
    assert "proxies" not in journal.read_text()


def test_perplexity_is_of_the_text_before_the_attack(monkeypatch):
    def judge(texts, *model, prompts):
        assert model == ("model", "tokenizer")
        assert all(text.startswith(prompt) and prompt in PROMPTS for text, prompt in zip(texts, prompts, strict=True))
        # A text without a value is left out of the mean.
        return np.array(
            [
                math.nan if prompt == PROMPTS[1] else float(len(text.split()))
                for text, prompt in zip(texts, prompts, strict=True)
            ]
        )

    monkeypatch.setattr(evaluation, "perplexity", judge)
    table = run(Draws(), methods=["unmarked"], attacks=[WordDeletion(0.9)], perplexity_model=("model", "tokenizer"))
    # Six words of prompt, and four sentences of six.
    assert [row.perplexity for row in table.rows] == [(30, 30, 30)] * 2


@pytest.mark.parametrize("missing", ["methods", "prompts", "human_texts"])
def test_there_must_be_something_to_compare(missing):
    given = {"methods": {"unmarked": Unmarked(encode, num_samples=1)}, "prompts": PROMPTS, "human_texts": HUMAN}
    with pytest.raises(ValueError, match=f"{missing} is empty"):
        evaluate(**{**given, missing: type(given[missing])()}, sampler=None)


def test_what_would_fail_at_the_end_fails_at_the_beginning(block_imports):
    sampler = Draws()
    with pytest.raises(ValueError, match="clusters must be at least 1, not 0"):
        run(sampler, encoder=encode, clusters=0)
    block_imports("sklearn")
    with pytest.raises(ImportError, match=r"pip install 'pmark\[evaluation\]'"):
        run(sampler, encoder=encode, clusters=3)
    assert sampler.calls == 0


def test_attacks_must_have_names_of_their_own():
    with pytest.raises(ValueError, match="names of their own"):
        run(Draws(), attacks=[WordDeletion(0.5), WordDeletion(0.5)])
