import inspect
import sys

import pytest
from separata_embedded import load_sentence_encoder, minilm


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"backend must be .* got 'tensorflow'"):
        inspect.unwrap(load_sentence_encoder)(backend="tensorflow")  # without the tests' own check of annotations


def test_missing_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(minilm, "sentence_encoder_folder", lambda: tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'separata-embedded\[sentence-transformers\]'"):
        load_sentence_encoder(backend="sentence-transformers")


def test_an_import_error_inside_the_library_is_not_swallowed(monkeypatch, tmp_path):
    package = tmp_path / "sentence_transformers"
    package.mkdir()
    (package / "__init__.py").write_text("import module_that_the_library_lacks")
    monkeypatch.setattr(minilm, "sentence_encoder_folder", lambda: tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sentence_transformers", raising=False)
    with pytest.raises(ImportError, match="module_that_the_library_lacks"):
        load_sentence_encoder(backend="sentence-transformers")
