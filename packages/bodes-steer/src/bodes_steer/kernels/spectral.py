# ruff: noqa: N803 -- T is the paper's letter, and compile-time constants are in capitals, as everywhere in Triton
# Kernels are typed by how they are launched, and Triton declares no types:
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The whole Euler path in the basis of eigenvectors, in one kernel: one program for each row.

A row, the eigenvalues and the linear term stay in registers for all steps, so that memory is read once and written once
where the torch reference reads and writes the row about ten times in each step and launches as many kernels.
"""

import math
from typing import Any

import torch
import triton  # type: ignore[import-untyped]  # it ships no types
import triton.language as tl  # type: ignore[import-untyped]  # it ships no types
from separata_core.internal.kernels import KernelCase
from torch import Tensor

from bodes_steer.quadratic import NORM_EPSILON
from bodes_steer.solver import SPEED_FLOOR
from bodes_steer.spectral_flow import Diagonal

WIDEST = 8192
"""The widest rows taken: at twice that, a row does not fit into the registers of the most threads of a program."""


@triton.jit
def path_kernel(
    change_ptr,
    y_ptr,
    eigenvalues_ptr,
    linear_ptr,
    change_row,
    y_row,
    width,
    steps,
    step,
    direction,
    constant,
    stop_at,
    norm_epsilon,
    speed_floor,
    NORMALIZE: tl.constexpr,
    HAS_STOP: tl.constexpr,
    ONLY_NEGATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Follow one row and write how far it went."""
    row = tl.program_id(0).to(tl.int64)  # rows times width passes 2**31
    column = tl.arange(0, BLOCK)
    inside = column < width
    start = tl.load(y_ptr + row * y_row + column, mask=inside, other=0.0)
    eigenvalues = tl.load(eigenvalues_ptr + column, mask=inside, other=0.0)
    linear = tl.load(linear_ptr + column, mask=inside, other=0.0)
    y = start
    moving = 1.0
    if NORMALIZE:
        moving = tl.where(tl.sum(y * y, axis=0) > 0.0, 1.0, 0.0)
    for index in range(steps):
        floor = speed_floor
        x = y
        if NORMALIZE:
            length = tl.sqrt(tl.sum(y * y, axis=0)) + norm_epsilon
            x = y / length
            floor = speed_floor * length
        slope = eigenvalues * x + linear
        gradient = slope
        if NORMALIZE or HAS_STOP or ONLY_NEGATIVE:
            along = tl.sum(x * slope, axis=0)
            if NORMALIZE:
                gradient = slope - x * along
            if HAS_STOP or ONLY_NEGATIVE:
                value = 0.5 * (along + tl.sum(x * linear, axis=0)) + constant
                if ONLY_NEGATIVE:
                    moving = tl.where((index == 0) & (value >= 0.0), 0.0, moving)
                if HAS_STOP:
                    moving = tl.where(value * direction < stop_at * direction, moving, 0.0)
        speed = tl.sqrt(tl.sum(gradient * gradient, axis=0)) + floor
        y += gradient * (step / speed * moving)
    tl.store(change_ptr + row * change_row + column, y - start, mask=inside)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (`TRITON_INTERPRET=1` when triton was imported)."""
    return not isinstance(path_kernel, triton.runtime.JITFunction)


def available(y: Tensor) -> bool:
    """Whether the kernel can run on rows like these: float32, at most 8192 wide, on a CUDA device."""
    if y.dtype != torch.float32 or y.shape[1] > WIDEST:
        return False
    return interpreted() or (y.device.type == "cuda" and torch.version.cuda is not None)


def _warps(block: int) -> int:
    """16 elements of each operand for a thread; with 32, registers spill."""
    return max(1, min(16, block // 512))


def spectral_change(
    slope: Diagonal,
    y: Tensor,
    T: float,
    *,
    steps: int,
    stop_at: float | None = None,
    only_when_negative: bool = False,
) -> Tensor:
    """The change along the Euler path; see `bodes_steer.spectral_flow.euler_change`.

    Args:
        slope: The barrier, float32, on the device of `y`.
        y: Coordinates `[rows, d]`, float32; rows may be any distance apart.
        T: Length of the path.
        steps: Number of steps.
        stop_at: Value of the barrier at which a row is frozen.
        only_when_negative: Whether rows that begin at 0 or above stay.

    Returns:
        `[rows, d]`.
    """
    rows, width = y.shape
    y = y if y.stride(-1) == 1 else y.contiguous()
    change = torch.empty((rows, width), dtype=y.dtype, device=y.device)
    if not rows:
        return change
    block = triton.next_power_of_2(width)
    arguments = (
        *(change, y, slope.eigenvalues.contiguous(), slope.linear.contiguous()),
        *(change.stride(0), y.stride(0), width, steps, T / steps, math.copysign(1.0, T), slope.constant),
        *(0.0 if stop_at is None else stop_at, NORM_EPSILON, SPEED_FLOOR),
    )
    constants: dict[str, Any] = {
        "NORMALIZE": slope.normalize,
        "HAS_STOP": stop_at is not None,
        "ONLY_NEGATIVE": only_when_negative,
        "BLOCK": block,
    }
    if interpreted():
        path_kernel[(rows,)](*arguments, **constants)
    else:
        with torch.cuda.device(y.device):
            path_kernel[(rows,)](*arguments, **constants, num_warps=_warps(block), num_stages=1)
    return change


def compile_cases() -> list[KernelCase]:
    """What to compile ahead of time: widths of real models up to the widest, plain and with all conditions."""
    signature = {
        **dict.fromkeys(("change_ptr", "y_ptr", "eigenvalues_ptr", "linear_ptr"), "*fp32"),
        **dict.fromkeys(("change_row", "y_row", "width", "steps"), "i32"),
        **dict.fromkeys(
            ("step", "direction", "constant", "stop_at", "norm_epsilon", "speed_floor"),
            "fp32",
        ),
    }
    cases = []
    for block in (64, 1024, 4096, WIDEST):
        for normalize, conditions in ((True, False), (True, True), (False, True)):
            constants = {
                "NORMALIZE": normalize,
                "HAS_STOP": conditions,
                "ONLY_NEGATIVE": conditions,
                "BLOCK": block,
            }
            name = f"path_{'direction' if normalize else 'raw'}_{'conditions' if conditions else 'plain'}_d{block}"
            cases.append(KernelCase(name, path_kernel, signature, constants, num_warps=_warps(block), num_stages=1))
    return cases
