"""Encoders: unit rows, each text once, nothing wrong goes further."""

import builtins
import sys
import threading
import warnings

import jaxtyping
import numpy as np
import pytest
from pmark.encoders import TextEncoder, as_encoder


@pytest.fixture
def unchecked():
    """Takes the run-time check of annotations away, which would refuse a wrong argument first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def lengths(texts):
    return np.array([[len(text), 1.0, 0.0] for text in texts])


class Counting:
    """An object with `encode`, which notes what it was asked for."""

    def __init__(self, function=lengths):
        self.function = function
        self.batches = []

    def encode(self, texts):
        self.batches.append(list(texts))
        return self.function(texts)


def test_rows_have_length_one_whatever_their_scale():
    expected = np.array([[3, 4, 0], [4, 3, 0]]) / 5
    for scale in (1.0, 1e-200, 1e200, 7e-310):
        encoder = as_encoder(lambda texts, scale=scale: np.array([[3.0, 4, 0], [4, 3, 0]]) * scale)
        np.testing.assert_allclose(encoder.encode(["a", "b"]), expected, rtol=1e-12)
    assert encoder.dimension == 3
    assert encoder.encode(["a"]).dtype == np.float64


def test_each_text_is_encoded_once_in_one_batch():
    model = Counting()
    encoder = as_encoder(model)
    assert encoder.dimension is None
    rows = encoder.encode(["aa", "b", "aa", "ccc"])
    np.testing.assert_array_equal(rows[0], rows[2])
    np.testing.assert_allclose(rows[:, 0] / rows[:, 1], [2, 1, 2, 3])
    encoder.encode(["ccc", "dddd"])
    assert model.batches == [["aa", "b", "ccc"], ["dddd"]]
    assert encoder.encode([]).shape == (0, 3)


def test_the_cache_forgets_what_was_not_used_for_longest():
    model = Counting()
    encoder = as_encoder(model, cache_size=2)
    for texts in (["a", "bb"], ["a"], ["ccc"], ["a"], ["bb"]):
        encoder.encode(texts)
    assert model.batches == [["a", "bb"], ["ccc"], ["bb"]]
    none = as_encoder(Counting(), cache_size=0)
    np.testing.assert_array_equal(none.encode(["a", "a"])[0], none.encode(["a"])[0])
    with pytest.raises(ValueError, match="cache_size"):
        as_encoder(lengths, cache_size=-1)


def test_what_is_returned_can_be_changed_without_changing_the_cache():
    encoder = as_encoder(lengths)
    first = encoder.encode(["a"])
    kept = first.copy()
    first[:] = 0
    np.testing.assert_array_equal(encoder.encode(["a"]), kept)


@pytest.mark.parametrize(("value", "what"), [(np.nan, "NaN or infinity"), (-np.inf, "NaN or infinity"), (0.0, "zeros")])
def test_a_row_that_means_nothing_is_refused_with_its_texts_index(value, what):
    encoder = as_encoder(lambda texts: np.array([[value] * 2 if text == "bad" else [1.0, 2] for text in texts]))
    encoder.encode(["good", "better"])
    with pytest.raises(ValueError, match=rf"{what} for texts\[3\]"):
        encoder.encode(["good", "good", "new", "bad"])
    assert encoder.encode(["new"]).shape == (1, 2)


def test_an_array_of_another_shape_is_refused():
    for answer in (np.ones(2), np.ones((1, 3)), np.ones((2, 3, 1)), np.ones((2, 0)), np.float64(3)):
        with pytest.raises(ValueError, match=r"must return an array of \(2, dimension\)"):
            as_encoder(lambda texts, answer=answer: answer).encode(["a", "b"])
    encoder = as_encoder(lambda texts: np.ones((len(texts), len(texts[0]))))
    encoder.encode(["abc"])
    with pytest.raises(ValueError, match=r"array of \(1, 3\), not of \(1, 2\)"):
        encoder.encode(["ab"])


def test_other_things_than_texts_and_encoders_are_refused(unchecked):
    with pytest.raises(TypeError, match=r"texts\[1\] must be a string, not int"):
        as_encoder(lengths).encode(["a", 3])
    with pytest.raises(TypeError, match="not one string"):
        as_encoder(lengths).encode("a")
    with pytest.raises(TypeError, match="not int"):
        as_encoder(3)


def test_names():
    encoder = TextEncoder(lengths, "mine")
    assert as_encoder(encoder) is encoder
    assert as_encoder(lengths).name == "lengths"
    assert as_encoder(Counting()).name == "Counting"
    named = Counting()
    named.name = "house model"
    assert as_encoder(named).name == "house model"


def test_a_model_has_one_name_wherever_it_came_from(tmp_path, monkeypatch):
    folder = tmp_path / "my-encoder"
    folder.mkdir()
    loaded = Counting()
    loaded.tokenizer = type("Tokenizer", (), {"name_or_path": str(folder)})
    monkeypatch.chdir(folder)
    for encoder in (str(folder), f"{folder}/", ".", "my-encoder", "someone/my-encoder", loaded):
        assert as_encoder(encoder).name == "my-encoder"


def test_the_fingerprint_tells_other_weights_but_not_rounding():
    def turned(angle):
        return lambda texts: np.tile([np.cos(angle), np.sin(angle), -0.0], (len(texts), 1))

    prints = [TextEncoder(turned(angle), "e").fingerprint() for angle in (0.3002, 0.3002 + 1e-7, 0.31)]
    assert prints[0] == prints[1] != prints[2]
    assert prints[0].startswith("e#")
    assert TextEncoder(turned(0.3002), "f").fingerprint() != prints[0]


def test_a_tensor_is_taken_to_numpy():
    class Tensor:
        def detach(self):
            return self

        cpu = float = detach

        def numpy(self):
            return np.array([[3.0, 4.0]], dtype=np.float32)

    np.testing.assert_allclose(as_encoder(lambda texts: Tensor()).encode(["a"]), [[0.6, 0.8]], atol=1e-7)


def test_sentences_beyond_what_the_encoder_reads_are_told():
    class Tokenizer:
        model_max_length = 10

        def __call__(self, text, truncation, verbose):
            return {"input_ids": text.split()}

    model = Counting()
    model.tokenizer, model.max_seq_length = Tokenizer(), 10
    encoder = as_encoder(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.encode(["word " * 10, "a" * 50])
    with pytest.warns(UserWarning, match="more than the 10 tokens"):
        encoder.encode(["word " * 11])


def test_a_named_model_is_loaded_at_the_first_use_only(monkeypatch):
    loaded = []

    def load(name, **arguments):
        loaded.append((name, arguments))
        return Counting()

    monkeypatch.setitem(sys.modules, "sentence_transformers", type("fake", (), {"SentenceTransformer": load}))
    encoder = as_encoder("someone/model")
    assert loaded == []
    threads = [threading.Thread(target=encoder.encode, args=([name],)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == [("someone/model", {"trust_remote_code": False})]


@pytest.mark.parametrize(
    ("missing", "message"), [("sentence_transformers", r"pmark\[encoder\]"), ("torch", "no torch")]
)
def test_a_missing_library_is_named_and_others_faults_are_not_hidden(monkeypatch, missing, message):
    original = builtins.__import__

    def fail(name, *arguments, **options):
        if name == "sentence_transformers":
            raise ModuleNotFoundError(f"no {missing}", name=missing)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(ImportError, match=message):
        as_encoder("someone/model").encode(["a"])
