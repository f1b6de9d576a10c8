"""Fresh buffers that hold NaN, and buffers with a margin, so that reading what nobody wrote shows."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """Fills every buffer that torch hands out uninitialised, on any device, until the context exits.

    Floats and complex numbers are filled with NaN, integers with the largest value of their type, booleans with True.
    It covers `torch.empty`, `empty_like`, `new_empty`, `empty_strided`, `Tensor.resize_` and what torch's own operators
    allocate. Not covered: `numpy.empty`, and a buffer that a kernel allocates for itself.

    The filling is torch's own and comes with its deterministic mode, so operators take their deterministic path here;
    one that has none runs as always. All settings are as before afterwards, also after an exception.
    """
    import torch
    from torch.utils import deterministic as module

    deterministic: Any = module  # what it offers are properties of its class, which a type checker does not see
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        deterministic.fill_uninitialized_memory = was_filling
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)


def poison_(tensor: "Tensor") -> "Tensor":
    """Overwrites a tensor with the values that fresh buffers are poisoned with.

    Args:
        tensor: Any shape and type; changed in place.

    Returns:
        The same tensor.
    """
    import torch

    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


class Guarded:
    """A tensor inside a larger poisoned buffer: reads beside it give NaN, writes beside it are found.

    Attributes:
        tensor: Equal to the tensor given, with the same strides as a contiguous copy of it.
    """

    def __init__(self, tensor: "Tensor", margin: int = 64) -> None:
        """Copies the tensor into the middle of a new buffer.

        Args:
            tensor: Any shape and type.
            margin: Number of poisoned elements before and after.
        """
        import torch

        count = tensor.numel()
        self._buffer = poison_(torch.zeros(count + 2 * margin, dtype=tensor.dtype, device=tensor.device))
        self._margin = margin
        self._count = count
        self._before = self._buffer.clone()
        self.tensor = self._buffer[margin : margin + count].view(tensor.shape)
        self.tensor.copy_(tensor)

    def assert_margins_untouched(self) -> None:
        """Fails where an element beside the tensor has been written."""
        import torch

        for name, part in (
            ("before", slice(None, self._margin)),
            ("after", slice(self._margin + self._count, None)),
        ):
            now, then = self._buffer[part].view(torch.uint8), self._before[part].view(torch.uint8)
            assert torch.equal(now, then), f"something was written {name} the tensor of shape {list(self.tensor.shape)}"
