import subprocess
import sys

import separata_embedded

HEAVY = ("torch", "transformers", "safetensors", "gguf", "filelock", "platformdirs", "sentence_transformers")


def test_import_is_cheap():
    code = f"import sys, separata_embedded; print([name for name in {HEAVY} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_public_names_exist():
    for name in separata_embedded.__all__:
        assert getattr(separata_embedded, name).__doc__
