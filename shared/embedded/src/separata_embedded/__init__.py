"""The small real models and texts that demos and tests run on, without a network."""

from separata_embedded.cache import cache_directory
from separata_embedded.errors import CacheError, EmbeddedError, FetchError, IntegrityError, ModelNotInstalledError
from separata_embedded.minilm import load_sentence_encoder, sentence_encoder_folder
from separata_embedded.smollm2 import load_smollm2, smollm2_folder
from separata_embedded.texts import RatedText, RatedTexts, rated_texts

__all__ = [
    "CacheError",
    "EmbeddedError",
    "FetchError",
    "IntegrityError",
    "ModelNotInstalledError",
    "RatedText",
    "RatedTexts",
    "cache_directory",
    "load_sentence_encoder",
    "load_smollm2",
    "rated_texts",
    "sentence_encoder_folder",
    "smollm2_folder",
]
