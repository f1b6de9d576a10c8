"""Sizes and memory layouts at which code that was tried on round numbers breaks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy
    from torch import Tensor

# Around the powers of two that kernels take as block sizes, and one more than a warp or a block.
ODD_SIZES = (1, 2, 3, 5, 7, 15, 17, 31, 33, 63, 65, 127, 129)

LAYOUTS = ("contiguous", "transposed", "strided", "offset", "sliced")


def with_layout(tensor: "Tensor", layout: str) -> "Tensor":
    """Gives a tensor of equal values that lies differently in memory.

    Elements of the storage between those of the tensor are poisoned (see `separata_testing.poison`).

    Args:
        tensor: At least one dimension.
        layout: One of `LAYOUTS`. `contiguous`; `transposed`: first and last dimension swapped in memory; `strided`:
            every second element of the last dimension; `offset`: contiguous, but starting at an odd element of its
            storage; `sliced`: rows longer than the last dimension.

    Returns:
        A new tensor that shares no memory with the one given.

    Raises:
        ValueError: The layout is unknown.
    """
    import torch

    from separata_testing.poison import poison_

    shape = list(tensor.shape)
    if layout == "contiguous":
        return tensor.clone(memory_format=torch.contiguous_format)
    if layout == "transposed":
        return tensor.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    if layout == "strided":
        view = poison_(tensor.new_zeros([*shape[:-1], 2 * shape[-1]]))[..., ::2]
    elif layout == "offset":
        view = poison_(tensor.new_zeros(tensor.numel() + 1))[1:].view(shape)
    elif layout == "sliced":
        view = poison_(tensor.new_zeros([*shape[:-1], shape[-1] + 3]))[..., 1 : 1 + shape[-1]]
    else:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    return view.copy_(tensor)


def odd_shapes(
    dimensions: int, *, largest: int = 65, elements: int = 20_000, empty: bool = False
) -> "SearchStrategy[tuple[int, ...]]":
    """Hypothesis strategy for shapes whose sizes are next to powers of two.

    Args:
        dimensions: Number of dimensions.
        largest: Bound for every size.
        elements: Bound for the product of the sizes, so that tests stay fast.
        empty: Whether a size may be 0.

    Returns:
        A strategy for tuples of sizes.
    """
    import math

    from hypothesis import strategies

    sizes = [size for size in ODD_SIZES if size <= largest]
    if empty:
        sizes.insert(0, 0)
    side = strategies.sampled_from(sizes)
    return strategies.tuples(*[side] * dimensions).filter(lambda shape: math.prod(shape) <= elements)
