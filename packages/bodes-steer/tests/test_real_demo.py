import json

import pytest
from bodes_steer.cli import run
from bodes_steer.files import load_steerer

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


def test_demo(tmp_path, capsys):
    out = tmp_path / "s.safetensors"
    assert run(["demo", "--json", "--samples", "1", "--new-tokens", "16", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"]["layers"], found["layer"]) == (30, 14)
    probe = found["probe"]
    # Review snippets are told apart far above chance, and steering makes bad ones look good to the ratio.
    assert probe["sketch_accuracy"] > 0.7
    assert probe["linear_accuracy"] > 0.7
    assert probe["before"] < 0 < probe["after"]
    # At these settings the kernel is nearly linear, and so is the field nearly constant.
    assert probe["first_and_last"] > 0.9
    assert probe["field_and_caa"] > 0.8
    # What is written leans the way that it is steered.
    against = found["against_untouched"]
    assert against["ten steps"]["difference"] > against["ten steps, reversed"]["difference"]
    steerer = load_steerer(out)
    assert (steerer.method, steerer.origin_.layer, steerer.n_features_in_) == ("odesteer", 14, 576)
