import sys
from types import SimpleNamespace

import pytest
from separata_kit import language_models


class Digits(list):
    def flatten(self):
        return self

    float = flatten

    def __getitem__(self, key):
        return Digits(super().__getitem__(key))

    def tolist(self):
        return list(self)


class Weight:
    dtype = "float32"
    is_meta = False

    def __init__(self, values, is_meta=False):
        self.values, self.shape, self.is_meta = Digits(values), (len(values),), is_meta

    def detach(self):
        return self

    def flatten(self):
        return self.values


class Spread(Weight):
    """As torch spreads a weight over processes: only its whole can be read."""

    def full_tensor(self):
        return Weight(self.values)

    def flatten(self):
        raise AssertionError("only a part")


def model(*weights):
    return SimpleNamespace(named_parameters=lambda: [(f"w{index}", each) for index, each in enumerate(weights)])


def test_weights_are_told_apart_by_their_first_values():
    digest = language_models.weights_digest(model(Weight([1.0, 2.0])))
    assert len(digest) == 64
    assert digest == language_models.weights_digest(model(Spread([1.0, 2.0])))
    others = [model(Weight([1.0, 3.0])), model(Weight([1.0])), model(Weight([1.0, 2.0], is_meta=True))]
    assert len({digest, *map(language_models.weights_digest, others)}) == 4


class FakeModel:
    def to(self, device):
        self.device = device
        return self

    def eval(self):
        self.training = False
        return self


@pytest.fixture
def libraries(monkeypatch):
    """What torch and transformers are asked here, without loading them."""
    told = SimpleNamespace(missing=[], error=None, cuda=False, capabilities={}, asked=[])

    def load(place, **how):
        told.asked.append((place, how))
        if told.error:
            raise told.error
        return (FakeModel(), {"missing_keys": told.missing}) if "dtype" in how else "tokenizer"

    cpu = SimpleNamespace(get_capabilities=lambda: told.capabilities)
    told.torch = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: told.cuda), cpu=cpu, float32="f32", bfloat16="bf16", float16="f16"
    )
    auto = SimpleNamespace(from_pretrained=load)
    monkeypatch.setitem(sys.modules, "torch", told.torch)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=auto, AutoTokenizer=auto))
    return told


def test_it_is_loaded_without_code_of_its_own_and_for_inference(libraries, tmp_path):
    found, tokenizer = language_models.load_language_model(str(tmp_path), dtype="float16", device="meta")
    assert (found.device, found.training, tokenizer) == ("meta", False, "tokenizer")
    assert [how["trust_remote_code"] for _, how in libraries.asked] == [False, False]
    assert libraries.asked[1][1]["dtype"] == "f16"
    libraries.cuda = True
    assert language_models.load_language_model("owner/name")[0].device == "cuda"
    assert libraries.asked[-1][1]["dtype"] == "bf16"


def test_what_is_fast_here(libraries):
    assert (language_models.default_device(), language_models.default_dtype()) == ("cpu", "float32")
    libraries.capabilities = {"avx512_bf16": True}
    assert language_models.has_fast_bfloat16()
    assert language_models.default_dtype() == "bfloat16"
    del libraries.torch.cpu.get_capabilities
    assert not language_models.has_fast_bfloat16()


def test_bad_models_are_refused(libraries, tmp_path):
    with pytest.raises(ValueError, match="dtype='int8' is none of float32, bfloat16, float16"):
        language_models.load_language_model("a", dtype="int8")
    (tmp_path / "file").write_text("")
    for place in ("", "/no/such", "~/x", "./x", "a/b/c", str(tmp_path / "file")):
        with pytest.raises(ValueError, match=rf"^model='{place}': there is no such folder"):
            language_models.load_language_model(place)
    assert not libraries.asked
    libraries.missing = [f"w{index}" for index in range(7)]
    with pytest.raises(ValueError, match="its files lack the weights w0, w1, w2, w3, w4 and 2 more"):
        language_models.load_language_model("a")
    libraries.error = KeyError("x")
    with pytest.raises(ValueError, match="model='a' cannot be loaded: 'x'"):
        language_models.load_language_model("a")
    with pytest.raises(ValueError, match="judge=''"):
        language_models.check_place("judge", "")
