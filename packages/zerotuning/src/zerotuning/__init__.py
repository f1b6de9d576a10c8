"""Re-weight the attention to the initial token of a frozen language model, per head."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotuning.adapter import apply, attach, detach
    from zerotuning.calibration import DEFAULT_GRID, CalibrationResult, calibrate
    from zerotuning.config import ModelId, ZeroTuningConfig
    from zerotuning.contextual import contextual_calibration
    from zerotuning.evaluation import Evaluation, evaluate
    from zerotuning.operator import reweight
    from zerotuning.profiling import HeadProfile, HeadProfiler
    from zerotuning.tasks import TASKS, Example, TaskSpec

# Looked up on first use, so that the command line can say how torch is to wait before torch is loaded.
_MODULES = {
    "adapter": ("apply", "attach", "detach"),
    "calibration": ("DEFAULT_GRID", "CalibrationResult", "calibrate"),
    "config": ("ModelId", "ZeroTuningConfig"),
    "contextual": ("contextual_calibration",),
    "evaluation": ("Evaluation", "evaluate"),
    "operator": ("reweight",),
    "profiling": ("HeadProfile", "HeadProfiler"),
    "tasks": ("TASKS", "Example", "TaskSpec"),
}

__all__ = [
    "DEFAULT_GRID",
    "TASKS",
    "CalibrationResult",
    "Evaluation",
    "Example",
    "HeadProfile",
    "HeadProfiler",
    "ModelId",
    "TaskSpec",
    "ZeroTuningConfig",
    "apply",
    "attach",
    "calibrate",
    "contextual_calibration",
    "detach",
    "evaluate",
    "reweight",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
