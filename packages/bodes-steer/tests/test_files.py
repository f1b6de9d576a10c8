"""A steerer in a file: to the bit, refused in one way when damaged, and only for the model it was fitted on."""

import hashlib
import importlib.metadata
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bodes_steer import CAA, ODESteer, load_steerer
from bodes_steer.files import Origin, check_model, save_steerer
from bodes_steer.steerers import STEERERS, Steerer, make_steerer
from separata_testing.models import tiny_model
from separata_testing.suites.files import FileFormat
from torch import Tensor

D = 6
SMALL: dict[str, dict[str, Any]] = {
    name: {"n_components": 32, "random_state": 1} for name in ("odesteer", "step-odesteer", "rff-odesteer")
}


def classes(d: int = D, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pos, neg = (5.0 + torch.randn(30, d, generator=generator, dtype=dtype) for _ in range(2))
    return pos + 0.5, neg


def rewrite(path: Path, change: Any) -> None:
    """Change our entry, with a digest that fits again."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = json.loads(header["__metadata__"]["bodes_steer"])
    body.pop("sha256")
    change(body)
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    header["__metadata__"]["bodes_steer"] = json.dumps(body)
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + length :])


class TestFormat(FileFormat):
    error = ValueError
    file_name = "saved.safetensors"

    def example(self) -> Any:
        return ODESteer(T=2.0, n_components=32, random_state=1).fit(*classes())

    def save(self, value: Any, path: Path) -> None:
        save_steerer(value, path, layer=3)

    def load(self, path: Path) -> Any:
        return load_steerer(path)

    def equal(self, first: Any, second: Any) -> bool:
        pairs = ((first.state(), second.state()), (second.state(), first.state()))
        same = all(torch.equal(value, other[name]) for one, other in pairs for name, value in one.items())
        return same and first.get_params() == second.get_params()

    def make_newer(self, path: Path) -> int:
        rewrite(path, lambda body: body.update(version=7))
        return 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_method_steers_as_before(dtype: torch.dtype, tmp_path: Path) -> None:
    pos, neg = classes(dtype=dtype)
    for method in STEERERS:
        steerer = make_steerer(method, **SMALL.get(method, {})).fit(pos, neg)
        for prepared in (False, True):
            steerer.save(tmp_path / method, layer=2)
            again = load_steerer(tmp_path / method)
            assert type(again) is type(steerer)
            assert torch.equal(again.flow(neg, 1.0), steerer.flow(neg, 1.0))
            if steerer.has_barrier:
                assert torch.equal(again.log_ratio(neg), steerer.log_ratio(neg))
            assert prepared or again.state().keys() <= steerer.state().keys()
        origin = again.origin_
        assert origin is not None
        assert origin.layer == 2
        assert origin.versions["torch"] == importlib.metadata.version("torch")


def test_what_was_prepared_is_stored(tmp_path: Path) -> None:
    steerer = ODESteer(n_components=32, random_state=1, backend="spectral").fit(*classes())
    plain = steerer.state().keys()
    steerer.prepare()
    steerer.save(tmp_path / "file")
    assert load_steerer(tmp_path / "file").state().keys() - plain == {
        *("basis_", "eigenvalues_", "linear_", "constant_")
    }


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    steerer = CAA().fit(*classes(model.config.hidden_size))
    steerer.save(tmp_path / "file", model=model, layer=1)
    return tmp_path / "file"


class TestOrigin:
    def test_it_is_read_off_the_model(self, model: Any, saved: Path) -> None:
        origin = load_steerer(saved, model=model).origin_
        assert origin is not None
        assert (origin.model_type, origin.layer) == ("llama", 1)
        assert origin.hidden_size == model.config.hidden_size
        assert origin.num_layers == model.config.num_hidden_layers

    def test_it_is_kept(self, saved: Path, tmp_path: Path) -> None:
        steerer = load_steerer(saved)
        steerer.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == saved.read_bytes()
        assert steerer.fit(*classes()).state()
        assert not hasattr(steerer, "origin_"), "what is fitted anew has another origin"

    def test_another_model_is_refused(self, model: Any, saved: Path) -> None:
        size, layers = model.config.hidden_size, model.config.num_hidden_layers
        other = Origin("", "gpt2", size, layers)
        with pytest.raises(ValueError, match=r"type 'llama'.*'gpt2'.*force=True"):
            load_steerer(saved, model=other)
        with pytest.raises(ValueError, match="number of layers"):
            load_steerer(saved, model={"hidden_size": size, "num_layers": layers + 1, "of_no_interest": 1})
        assert load_steerer(saved, model=other, force=True).n_features_in_ == size
        with pytest.raises(ValueError, match=f"hidden_size {size + 1}"):
            load_steerer(saved, model=Origin(hidden_size=size + 1), force=True)
        check_model(CAA().fit(*classes()), Origin(model_type="gpt2", hidden_size=D))

    def test_what_does_not_fit_is_not_written(self, model: Any, tmp_path: Path) -> None:
        steerer = CAA().fit(*classes())
        with pytest.raises(ValueError, match=rf"width {D}.*hidden_size {model.config.hidden_size}"):
            steerer.save(tmp_path / "file", model=model)
        for layer in (-1, True, model.config.num_hidden_layers):
            with pytest.raises(ValueError, match="layer="):
                steerer.save(tmp_path / "file", model=model, layer=layer)
        with pytest.raises(TypeError, match="model is a str"):
            steerer.save(tmp_path / "file", model="llama")
        assert not list(tmp_path.iterdir())


def test_parameters(tmp_path: Path) -> None:
    pos, neg = classes()
    steerer: Steerer = ODESteer(T=np.float64(2.5), n_components=32, random_state=np.random.RandomState(0))
    steerer.fit(pos, neg).save(tmp_path / "file")
    assert load_steerer(tmp_path / "file").get_params()["random_state"] is None
    assert load_steerer(tmp_path / "file").get_params()["T"] == 2.5
    ODESteer(n_components=32, random_state=np.int64(3)).restore(steerer.state()).save(tmp_path / "file")
    assert load_steerer(tmp_path / "file").get_params()["random_state"] == 3
    for wrong, message in ((float("nan"), "not finite"), ([1.0], "cannot be stored")):
        with pytest.raises(ValueError, match=message):
            steerer.set_params(T=wrong).save(tmp_path / "file")
    with pytest.raises(ValueError, match="not fitted"):
        CAA().save(tmp_path / "file")


def test_foreign_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    steerer = CAA().fit(*classes())

    def altered(**fields: Any) -> None:
        steerer.save(path)
        rewrite(path, lambda body: body.update(fields))

    for method in ("dreaming", ["caa"]):
        altered(method=method)
        with pytest.raises(ValueError, match=r"file holds .*(dreaming|caa)"):
            load_steerer(path)
    rewrite(path, lambda body: body.pop("tensors"))
    with pytest.raises(ValueError, match="tensors do not match"):
        load_steerer(path)
    altered(version=0)
    with pytest.raises(ValueError, match="'version'"):
        load_steerer(path)
    altered(params={"steps": 3})
    with pytest.raises(ValueError, match="no parameter steps"):
        load_steerer(path)
    altered(schema="something/else")
    with pytest.raises(ValueError, match="something/else"):
        load_steerer(path)
    altered(tensors="0" * 64)
    with pytest.raises(ValueError, match="tensors do not match"):
        load_steerer(path)
    with pytest.raises(OSError, match="folder"):
        steerer.save(tmp_path)
