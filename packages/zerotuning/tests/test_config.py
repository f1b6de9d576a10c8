import json
import math
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from separata_kit.files import digest
from separata_testing.models import tiny_model
from separata_testing.suites import FileFormat
from zerotuning import ModelId, ZeroTuningConfig
from zerotuning.config import _check_options, _factors, _log_of, checked_indices

IDENTITY = ModelId("llama", "somewhere", 3, 4, 2)


class TestFile(FileFormat):
    error = ValueError

    def example(self):
        return ZeroTuningConfig.per_layer_head(
            IDENTITY, {(0, 0): 0.3, (2, 3): 2.5}, meta={"calibration": {"gamma": 2.5}}, mode="query"
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


@pytest.mark.parametrize("gamma", [0, -1, math.nan, math.inf, -math.inf, True, 10**400])
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


def test_wrong_types_are_named_too():
    # Below the public names, whose annotations refuse these in the tests before the code can.
    for gamma in (None, "2", 2j):
        with pytest.raises(ValueError, match=f"gamma of head 2 is {gamma!r}; it must be a finite number above 0"):
            _log_of(gamma, "head 2")
    for head in (1.0, "1", None):
        with pytest.raises(ValueError, match=f"head {head!r} does not exist"):
            checked_indices([0, head], 4, "head")
    assert checked_indices(torch.tensor([2, 1, 2]), 4, "head") == [1, 2]
    with pytest.raises(ValueError, match="gammas is a list; it must be a mapping from layers to factors"):
        _factors([2.0], "layers")


@pytest.mark.parametrize("head", [4, -1, True])
def test_a_head_that_is_none(head):
    for make in (
        lambda: ZeroTuningConfig.uniform(IDENTITY, 2.0, heads=[0, head]),
        lambda: ZeroTuningConfig.per_head(IDENTITY, {head: 2.0}),
        lambda: ZeroTuningConfig.per_layer_head(IDENTITY, {(0, head): 2.0}),
    ):
        with pytest.raises(ValueError, match=f"head {head!r} does not exist; the model has heads 0 to 3"):
            make()


def test_heads_given_twice_or_not_at_all():
    expected = ZeroTuningConfig.uniform(IDENTITY, 2.0, heads=[1, 2])
    assert ZeroTuningConfig.uniform(IDENTITY, 2.0, heads=[2, 1, 2]) == expected
    assert ZeroTuningConfig.uniform(IDENTITY, 2.0, heads=[]).is_identity


def test_factors_beyond_the_limit_are_the_limit_and_can_be_saved(tmp_path):
    for log_gamma, kept in ((1000.0, 80.0), (-1000.0, -80.0), (1e300, 80.0)):
        config = ZeroTuningConfig(torch.full((3, 4), log_gamma, dtype=torch.float64), IDENTITY)
        assert config.log_gamma.eq(kept).all()
        assert config.log_gamma.dtype == torch.float32
        config.save(tmp_path / "c.json")
        assert ZeroTuningConfig.load(tmp_path / "c.json") == config


@pytest.mark.parametrize("bad", [math.nan, object()])
def test_metadata_that_json_cannot_hold_are_named(tmp_path, bad):
    with pytest.raises(ValueError, match="meta must hold what JSON can"):
        ZeroTuningConfig.uniform(IDENTITY, 2.0, meta={"accuracy": bad}).save(tmp_path / "c.json")
    assert list(tmp_path.iterdir()) == []


def test_pairs_and_layers():
    pairs = ZeroTuningConfig.per_layer_head(IDENTITY, {(0, 3): 2.0, (2, 1): 0.5})
    assert pairs.log_gamma.nonzero().tolist() == [[0, 3], [2, 1]]
    assert pairs.log_gamma[0, 3].item() == pytest.approx(math.log(2))
    assert pairs.granularity == "layer_head"
    layers = ZeroTuningConfig.per_layer(IDENTITY, {1: 3.0})
    assert layers.log_gamma.exp()[1].tolist() == pytest.approx([3.0] * 4)
    assert layers.layers == (1,)
    assert layers.granularity == "layer"
    with pytest.raises(ValueError, match="gamma of layer 0, head 3 is 0"):
        ZeroTuningConfig.per_layer_head(IDENTITY, {(0, 3): 0})
    with pytest.raises(ValueError, match="head 4 does not exist"):
        ZeroTuningConfig.per_layer_head(IDENTITY, {(0, 4): 2.0})
    with pytest.raises(ValueError, match="gamma of layer 1 is nan"):
        ZeroTuningConfig.per_layer(IDENTITY, {1: math.nan})
    with pytest.raises(ValueError, match="layer 3 does not exist"):
        ZeroTuningConfig.per_layer(IDENTITY, {3: 2.0})


class TestModes:
    def test_key_needs_one_gamma_for_a_group(self):
        with pytest.raises(ValueError, match=r"layer 1 the heads 2, 3 of key/value head 1 have the gammas 1, 2"):
            ZeroTuningConfig.uniform(IDENTITY, 2.0, heads=[0, 1, 3], layers=[1], mode="key")
        config = ZeroTuningConfig.uniform(IDENTITY, 2.0, heads=[2, 3], mode="key")
        assert config.mode == "key"
        assert ZeroTuningConfig.uniform(IDENTITY, 2.0, heads=[3], mode="query").mode == "query"

    def test_every_constructor_takes_the_mode(self):
        assert ZeroTuningConfig.per_head(IDENTITY, {0: 2.0}, mode="query").mode == "query"
        assert ZeroTuningConfig.per_layer_head(IDENTITY, {(0, 0): 2.0}, mode="query").mode == "query"
        assert ZeroTuningConfig.per_layer(IDENTITY, {0: 2.0}, mode="key").mode == "key"

    def test_mode_is_part_of_what_is_computed(self):
        exact, key, query = (ZeroTuningConfig.uniform(IDENTITY, 2.0, mode=mode) for mode in ("exact", "key", "query"))
        assert len({config.fingerprint for config in (exact, key, query)}) == 3
        assert exact != key

    def test_compose_keeps_the_mode_and_wants_it_equal(self):
        key = ZeroTuningConfig.uniform(IDENTITY, 2.0, mode="key")
        both = key.compose(ZeroTuningConfig.per_layer(IDENTITY, {0: 3.0}, mode="key"))
        assert both.mode == "key"
        assert both.log_gamma.exp()[:2, 0].tolist() == pytest.approx([6.0, 2.0])
        with pytest.raises(ValueError, match="modes 'key' and 'exact'"):
            key.compose(ZeroTuningConfig.uniform(IDENTITY, 2.0))

    def test_unknown_names(self):
        with pytest.raises(ValueError, match="mode='value' is not offered; use one of 'exact', 'key', 'query'"):
            _check_options("value", "uniform")
        with pytest.raises(ValueError, match="granularity='token' is not offered"):
            _check_options("exact", "token")


@pytest.mark.parametrize(
    ("config", "version"),
    [
        (ZeroTuningConfig.uniform(IDENTITY, 2.0), 1),
        (ZeroTuningConfig.per_head(IDENTITY, {1: 2.0}), 1),
        (ZeroTuningConfig.per_layer(IDENTITY, {1: 2.0}), 2),
        (ZeroTuningConfig.per_layer_head(IDENTITY, {(1, 1): 2.0}), 2),
        (ZeroTuningConfig.uniform(IDENTITY, 2.0, mode="key"), 2),
        (ZeroTuningConfig.uniform(IDENTITY, 2.0, mode="query"), 2),
    ],
)
def test_older_readers_get_what_they_understand_and_refuse_the_rest(tmp_path, config, version):
    config.save(tmp_path / "c.json")
    assert json.loads((tmp_path / "c.json").read_text())["version"] == version
    loaded = ZeroTuningConfig.load(tmp_path / "c.json")
    assert loaded == config
    assert (loaded.mode, loaded.granularity) == (config.mode, config.granularity)


def test_values_are_a_copy():
    values = torch.ones(3, 4)
    config = ZeroTuningConfig(values, IDENTITY)
    values.zero_()
    assert config.log_gamma.eq(1).all()


def test_compose_multiplies():
    both = ZeroTuningConfig.uniform(IDENTITY, 2.0).compose(ZeroTuningConfig.per_head(IDENTITY, {1: 3.0}))
    assert both.log_gamma.exp()[0].tolist() == pytest.approx([2, 6, 2, 2])
    assert both.granularity == "head_index"
    assert both.compose(ZeroTuningConfig.per_layer(IDENTITY, {1: 3.0})).granularity == "layer_head"
    assert ZeroTuningConfig.uniform(IDENTITY, 2.0).compose(both).granularity == "head_index"
    layers = ZeroTuningConfig.per_layer(IDENTITY, {1: 3.0})
    assert ZeroTuningConfig.uniform(IDENTITY, 2.0).compose(layers).granularity == "layer"
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
        ({"mode": "value"}, "mode='value' is not offered"),
        ({"mode": "key"}, "version 1 has no mode 'key'"),
        ({"mode": "key", "version": 2, "gamma": [[0, 1, 2.0]]}, "no valid configuration: mode='key' scales the key"),
    ],
)
def test_contents_that_no_release_wrote(tmp_path, change, message):
    path = tmp_path / "c.json"
    ZeroTuningConfig.uniform(IDENTITY, 2.0).save(path)
    body = {**json.loads(path.read_text()), **change}
    del body["sha256"]
    path.write_text(json.dumps({**body, "sha256": digest(body)}))
    with pytest.raises(ValueError, match=message):
        ZeroTuningConfig.load(path)


def test_neither_devices_nor_links_are_replaced(tmp_path):
    config = ZeroTuningConfig.uniform(IDENTITY, 2.0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe is a device or the like"):
        config.save(pipe)
    assert pipe.is_fifo()
    link = tmp_path / "link.json"
    link.symlink_to("kept.json")
    config.save(link)
    assert link.is_symlink()
    assert ZeroTuningConfig.load(tmp_path / "kept.json") == config
    assert len(list(tmp_path.iterdir())) == 3
