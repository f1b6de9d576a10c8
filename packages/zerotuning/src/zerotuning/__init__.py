"""Re-weight the attention to the initial token of a frozen language model, per head."""

from zerotuning.adapter import apply, attach, detach
from zerotuning.calibrate import DEFAULT_GRID, CalibrationResult, HeadProfile, calibrate
from zerotuning.config import ModelId, ZeroTuningConfig
from zerotuning.evaluate import Evaluation, evaluate
from zerotuning.metrics import PairedComparison, Proportion, Scores
from zerotuning.operator import reweight
from zerotuning.tasks import TASKS, Example, TaskSpec

__all__ = [
    "DEFAULT_GRID",
    "TASKS",
    "CalibrationResult",
    "Evaluation",
    "Example",
    "HeadProfile",
    "ModelId",
    "PairedComparison",
    "Proportion",
    "Scores",
    "TaskSpec",
    "ZeroTuningConfig",
    "apply",
    "attach",
    "calibrate",
    "detach",
    "evaluate",
    "reweight",
]
