import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bodes_steer.baselines import CAA
from bodes_steer.export import export_gguf
from bodes_steer.files import Origin
from bodes_steer.steerers import ODESteer

D = 32


@pytest.fixture(scope="module")
def steerer():
    generator = torch.Generator().manual_seed(0)
    pos, neg = torch.randn(2, 20, D, generator=generator)
    return CAA().fit(pos + 1, neg)


def read(path):
    gguf = pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return fields, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def test_the_file_is_laid_out_as_llama_cpp_reads_it(tmp_path, steerer):
    path = tmp_path / "v.gguf"
    lengths = export_gguf(steerer, path, layer=14, T=2.0, model_hint="llama")
    fields, tensors = read(path)
    assert fields == {
        "general.architecture": "controlvector",
        "controlvector.model_hint": "llama",
        "controlvector.layer_count": 1,
    }
    assert list(tensors) == ["direction.14"]
    direction = tensors["direction.14"]
    assert (direction.dtype, direction.shape) == (np.float32, (D,))
    assert direction == pytest.approx(2 * steerer.constant_vector.numpy(), rel=1e-6)
    assert lengths == {14: pytest.approx(float(np.linalg.norm(direction)), rel=1e-6)}


def test_what_llama_cpp_adds_is_the_step(tmp_path, steerer):
    export_gguf(steerer, tmp_path / "v.gguf", layer=1)
    a = 10 * torch.randn(5, D, generator=torch.Generator().manual_seed(1))
    added = a + torch.from_numpy(read(tmp_path / "v.gguf")[1]["direction.1"])
    assert bool(((steerer.steer(a) - added).abs() <= 1e-5).all())


def test_several_layers_and_where_a_steerer_comes_from(tmp_path, steerer, monkeypatch):
    export_gguf({3: steerer, 2: steerer}, tmp_path / "v.gguf")
    fields, tensors = read(tmp_path / "v.gguf")
    assert fields["controlvector.layer_count"] == 2
    assert fields["controlvector.model_hint"] == "unknown"
    assert sorted(tensors) == ["direction.2", "direction.3"]
    monkeypatch.setattr(steerer, "origin_", SimpleNamespace(layer=7, model_type="qwen2"), raising=False)
    export_gguf(steerer, tmp_path / "v.gguf")
    fields, tensors = read(tmp_path / "v.gguf")
    assert (fields["controlvector.model_hint"], list(tensors)) == ("qwen2", ["direction.7"])
    with pytest.warns(UserWarning, match="was fitted on the output of block 7 and is exported for block 8"):
        export_gguf(steerer, tmp_path / "v.gguf", layer=8)


def test_blocks_and_models_that_do_not_fit_are_refused(tmp_path, steerer, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    other = CAA().fit(*torch.randn(2, 20, D, generator=generator))
    monkeypatch.setattr(steerer, "origin_", Origin(model_type="qwen2", num_layers=8, layer=7), raising=False)
    monkeypatch.setattr(other, "origin_", Origin(model_type="llama", num_layers=8, layer=6), raising=False)
    for given, layer, message in (
        (steerer, 8, r"layer=8 does not exist; the model has the blocks 0 to 7"),
        ({7: steerer, 6: other}, None, "different types: llama, qwen2"),
    ):
        with pytest.raises(ValueError, match=message):
            export_gguf(given, tmp_path / "v.gguf", layer=layer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layer", "strength", "message"),
    [
        (0, None, "layer=0: llama.cpp steers the outputs of blocks from 1 on"),
        (None, None, "does not say on which layer"),
        (1, math.inf, "not finite"),
        (1, 1e39, "not finite in float32"),
    ],
)
def test_what_is_refused(tmp_path, steerer, layer, strength, message):
    with pytest.raises(ValueError, match=message):
        export_gguf(steerer, tmp_path / "v.gguf", layer=layer, T=strength)
    assert list(tmp_path.iterdir()) == []


def test_steps_that_depend_on_where_they_start_are_refused(tmp_path, steerer):
    generator = torch.Generator().manual_seed(0)
    pos, neg = torch.randn(2, 20, D, generator=generator)
    nonlinear = ODESteer(n_components=64, random_state=0).fit(pos + 1, neg)
    for given in (nonlinear, {2: steerer, 3: nonlinear}):
        with pytest.raises(ValueError, match="ODESteer is not one vector: its step depends on where it starts"):
            export_gguf(given, tmp_path / "v.gguf", layer=None if isinstance(given, dict) else 3)
    other = CAA().fit(pos[:, :16] + 1, neg[:, :16])
    for given, message in (({}, "no steerer to export"), ({1: steerer, 2: other}, "differ in length")):
        with pytest.raises(ValueError, match=message):
            export_gguf(given, tmp_path / "v.gguf")
    with pytest.raises(ValueError, match="layer=3 is for one steerer"):
        export_gguf({1: steerer}, tmp_path / "v.gguf", layer=3)
    assert list(tmp_path.iterdir()) == []


def test_the_extra_is_named(tmp_path, steerer, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'bodes-steer\[gguf\]'"):
        export_gguf(steerer, tmp_path / "v.gguf", layer=1)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        export_gguf(steerer, tmp_path / "no" / "v.gguf", layer=1)
