"""How a module of Triton kernels says what is to be compiled ahead of time."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelCase:
    """One specialisation of a Triton kernel, complete enough to be compiled without a GPU.

    Every module in a `kernels` folder has a function `compile_cases` that returns a list of these.

    Attributes:
        name: Names the case in reports.
        fn: The `triton.jit` function (not the autotuned wrapper around it).
        signature: Argument name to Triton type, such as `{"x_ptr": "*bf16", "n": "i32"}`.
        constexprs: Argument name to value, for the `tl.constexpr` arguments.
        num_warps: Warps of 32 threads per program.
        num_stages: Depth of the software pipeline.
    """

    name: str
    fn: Any
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
