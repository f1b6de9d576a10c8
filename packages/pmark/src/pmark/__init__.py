"""Watermark the text of a language model sentence by sentence, without distortion and robust to paraphrase."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pmark.evaluation import evaluate
    from pmark.hf_sampler import HFSampler
    from pmark.key import PMarkKey
    from pmark.kgw import KGW
    from pmark.openai_sampler import OpenAISampler
    from pmark.samplers import CallableSampler
    from pmark.scoring import Null
    from pmark.semstamp import KSemStamp, SemStamp
    from pmark.sentence_watermark import DetectionResult, WatermarkedText
    from pmark.simmark import SimMark
    from pmark.vllm_sampler import VLLMSampler
    from pmark.watermark import PMark
_MODULES = {
    "evaluation": ("evaluate",),
    "hf_sampler": ("HFSampler",),
    "key": ("PMarkKey",),
    "kgw": ("KGW",),
    "openai_sampler": ("OpenAISampler",),
    "samplers": ("CallableSampler",),
    "scoring": ("Null",),
    "semstamp": ("KSemStamp", "SemStamp"),
    "sentence_watermark": ("DetectionResult", "WatermarkedText"),
    "simmark": ("SimMark",),
    "vllm_sampler": ("VLLMSampler",),
    "watermark": ("PMark",),
}

__all__ = [
    "KGW",
    "CallableSampler",
    "DetectionResult",
    "HFSampler",
    "KSemStamp",
    "Null",
    "OpenAISampler",
    "PMark",
    "PMarkKey",
    "SemStamp",
    "SimMark",
    "VLLMSampler",
    "WatermarkedText",
    "evaluate",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
