import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from separata_testing.models import tiny_model
from separata_testing.suites import FileFormat
from zerotuning import ModelId, ZeroTuningConfig
from zerotuning.config import check_writable

IDENTITY = ModelId("llama", "somewhere", 3, 4, 2)


class TestFile(FileFormat):
    error = ValueError

    def example(self):
        return ZeroTuningConfig.per_head(
            IDENTITY, {0: 0.3, 3: 2.5}, layers=[0, 2], meta={"calibration": {"gamma": 2.5}}
        )

    def save(self, value, path):
        value.save(path)

    def load(self, path):
        return ZeroTuningConfig.load(path)

    def equal(self, first, second):
        return first == second and first.meta == second.meta and first.granularity == second.granularity


@given(st.lists(st.floats(-80, 80, width=32), min_size=12, max_size=12))
def test_file_keeps_every_bit(tmp_path_factory, values):
    config = ZeroTuningConfig(torch.tensor(values).view(3, 4), IDENTITY)
    path = tmp_path_factory.mktemp("config") / "c.json"
    config.save(path)
    assert torch.equal(ZeroTuningConfig.load(path).log_gamma, config.log_gamma)


def test_file_is_what_is_promised(tmp_path):
    path = tmp_path / "c.json"
    ZeroTuningConfig.uniform(IDENTITY, 2.0, heads=[1], layers=[2]).save(path)
    content = json.loads(path.read_text())
    assert content["schema"] == "zerotuning/config"
    assert content["model"] == {
        "type": "llama",
        "name": "somewhere",
        "layers": 3,
        "query_heads": 4,
        "key_value_heads": 2,
    }
    assert [entry[:2] for entry in content["gamma"]] == [[2, 1]]
    assert content["gamma"][0][2] == pytest.approx(2.0)
    assert set(content["versions"]) == {"zerotuning", "torch", "transformers"}


def test_uniform_reads_the_model():
    config = ZeroTuningConfig.uniform(tiny_model("llama"), 2.0)
    assert config.model_id.type == "llama"
    assert torch.allclose(config.log_gamma, torch.full((3, 4), math.log(2)))
    assert config.granularity == "uniform"
    assert config.layers == (0, 1, 2)


def test_chosen_heads_and_layers():
    config = ZeroTuningConfig.uniform(IDENTITY, 0.5, heads=[2, 0], layers=[1])
    assert config.log_gamma.nonzero().tolist() == [[1, 0], [1, 2]]
    assert config.granularity == "head_index"
    assert not config.is_identity
    assert ZeroTuningConfig.uniform(IDENTITY, 1.0).is_identity


def test_per_head_takes_all_or_some():
    assert torch.allclose(
        ZeroTuningConfig.per_head(IDENTITY, [1, 2, 1, 0.5]).log_gamma.exp(), torch.tensor([1, 2, 1, 0.5]).expand(3, 4)
    )
    with pytest.raises(ValueError, match="3 values"):
        ZeroTuningConfig.per_head(IDENTITY, [1, 2, 3])


@pytest.mark.parametrize("gamma", [0, -1, math.nan, math.inf])
def test_bad_gamma_names_the_head(gamma):
    with pytest.raises(ValueError, match="gamma of head 2 is"):
        ZeroTuningConfig.per_head(IDENTITY, {2: gamma})
    with pytest.raises(ValueError, match="gamma of all heads is"):
        ZeroTuningConfig.uniform(IDENTITY, gamma)


def test_bad_log_gamma_names_layer_and_head():
    values = torch.zeros(3, 4)
    values[1, 3] = math.nan
    with pytest.raises(ValueError, match="layer 1, head 3"):
        ZeroTuningConfig(values, IDENTITY)


def test_other_bad_input():
    with pytest.raises(ValueError, match="head 4 does not exist"):
        ZeroTuningConfig.uniform(IDENTITY, 2.0, heads=[4])
    with pytest.raises(ValueError, match="layer -1 does not exist"):
        ZeroTuningConfig.uniform(IDENTITY, 2.0, layers=[-1])
    with pytest.raises(ValueError, match=r"needs \[L, Hq\] = \[3, 4\]"):
        ZeroTuningConfig(torch.zeros(2, 4), IDENTITY)


def test_modes_not_offered_say_so():
    from zerotuning.config import _check_options

    with pytest.raises(ValueError, match="mode='key' is not offered"):
        _check_options("key", "uniform")
    with pytest.raises(ValueError, match="granularity='layer' is not offered"):
        _check_options("exact", "layer")


def test_values_are_a_copy():
    values = torch.ones(3, 4)
    config = ZeroTuningConfig(values, IDENTITY)
    values.zero_()
    assert config.log_gamma.eq(1).all()


def test_compose_multiplies():
    both = ZeroTuningConfig.uniform(IDENTITY, 2.0).compose(ZeroTuningConfig.per_head(IDENTITY, {1: 3.0}))
    assert both.log_gamma.exp()[0].tolist() == pytest.approx([2, 6, 2, 2])
    assert both.granularity == "head_index"
    with pytest.raises(ValueError, match="different models"):
        both.compose(ZeroTuningConfig.uniform(ModelId("qwen2", "", 3, 4, 2), 2.0))


def test_equality_is_what_is_computed():
    one = ZeroTuningConfig.uniform(IDENTITY, 2.0, meta={"a": 1})
    same = ZeroTuningConfig.per_head(ModelId("llama", "elsewhere", 3, 4, 2), [2.0] * 4)
    assert one == same
    assert hash(one) == hash(same)
    assert one != ZeroTuningConfig.uniform(IDENTITY, 2.5)
    assert one != 2.0


def test_another_model_is_refused():
    config = ZeroTuningConfig.uniform(IDENTITY, 2.0)
    config.check_fits(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"model type 'llama' \(this model: 'qwen2'\)"):
        config.check_fits(tiny_model("qwen2"))


def test_layers_that_differ_are_refused():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.num_heads = 8
    with pytest.raises(ValueError, match="layers differ"):
        ModelId.of(model)


def test_metadata_come_back_as_json_has_them(tmp_path):
    path = tmp_path / "c.json"
    ZeroTuningConfig.uniform(IDENTITY, 2.0, meta={"sizes": {10: 1, 9: (1, 2)}}).save(path)
    assert ZeroTuningConfig.load(path).meta == {"sizes": {"10": 1, "9": [1, 2]}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "llama"}}, "no valid configuration"),
        ({"gamma": 5}, "no valid configuration"),
        ({"gamma": [[0, 0, -2.0]]}, "gamma of layer 0, head 0 is -2"),
        ({"gamma": [[-1, 0, 2.0]]}, "layer -1 does not exist"),
        ({"gamma": [[0, 4, 2.0]]}, "head 4 does not exist"),
        ({"meta": [1]}, "no valid configuration"),
        ({"mode": "key"}, "mode='key' is not offered"),
    ],
)
def test_contents_that_no_release_wrote(tmp_path, change, message):
    from zerotuning.config import _digest

    path = tmp_path / "c.json"
    ZeroTuningConfig.uniform(IDENTITY, 2.0).save(path)
    body = {**json.loads(path.read_text()), **change}
    del body["sha256"]
    path.write_text(json.dumps({**body, "sha256": _digest(body)}))
    with pytest.raises(ValueError, match=message):
        ZeroTuningConfig.load(path)


def test_place_of_a_file_is_checked_beforehand(tmp_path):
    check_writable(tmp_path / "c.json")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(IsADirectoryError, match="is a folder"):
        check_writable(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        check_writable(tmp_path / "no" / "c.json")


def test_folder_that_may_not_be_written_to(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    # Simulated, since nothing is forbidden to root.
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(PermissionError, match="cannot be written to: Permission denied"):
        check_writable(tmp_path / "c.json")
