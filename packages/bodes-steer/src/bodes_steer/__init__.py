"""Steer the hidden states of a frozen language model along the gradient of a learned log-density ratio."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bodes_steer.baselines import CAA, ITI, LinAcT, MiMiC, RepE
    from bodes_steer.density_ratio import LogDensityRatio
    from bodes_steer.extraction import extract_activations
    from bodes_steer.features import PolynomialCountSketch
    from bodes_steer.files import load_steerer
    from bodes_steer.hooks import steer
    from bodes_steer.model import SteeredModel
    from bodes_steer.steerers import GaussianODE, LinearODE, ODESteer, RFFODESteer, StepODESteer, auto_T
    from bodes_steer.sweeps import sweep

# Looked up on first use, so that the command line can say how torch is to wait before torch is loaded.
_MODULES = {
    "baselines": ("CAA", "ITI", "LinAcT", "MiMiC", "RepE"),
    "density_ratio": ("LogDensityRatio",),
    "extraction": ("extract_activations",),
    "features": ("PolynomialCountSketch",),
    "files": ("load_steerer",),
    "hooks": ("steer",),
    "model": ("SteeredModel",),
    "steerers": ("GaussianODE", "LinearODE", "ODESteer", "RFFODESteer", "StepODESteer", "auto_T"),
    "sweeps": ("sweep",),
}

__all__ = [
    "CAA",
    "ITI",
    "GaussianODE",
    "LinAcT",
    "LinearODE",
    "LogDensityRatio",
    "MiMiC",
    "ODESteer",
    "PolynomialCountSketch",
    "RFFODESteer",
    "RepE",
    "SteeredModel",
    "StepODESteer",
    "auto_T",
    "extract_activations",
    "load_steerer",
    "steer",
    "sweep",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
