"""Sharing prompts among the processes of `torch.distributed`."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


def share(model: nn.Module) -> tuple[int, int]:
    """Which part of the prompts is this process's own.

    Args:
        model: The model. Where its weights are spread over processes (tensor parallel, FSDP), all of these have to run
            the same prompts, so nothing is shared out.

    Returns:
        Index of this part, and the number of parts.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or is_spread(model):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def is_first() -> bool:
    """Whether this process is the one that writes files and shows progress."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def add_up(values: Float[Tensor, "*shape"], model: nn.Module) -> Float[Tensor, "*shape"]:
    """The sum over all parts, the same in every process.

    Args:
        values: What this process found, 0 where another one looks.
        model: The model, see `share`.

    Returns:
        The sum, on the device of `values`.
    """
    if share(model)[1] == 1:
        return values
    there = values.to(_device())
    torch.distributed.all_reduce(there)
    return there.to(values.device)


def from_first(content: bytes | None) -> bytes | None:
    """What the first process has, in every process.

    Args:
        content: The bytes; looked at in the first process only.

    Returns:
        The first process's bytes, or None if it has none.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return content
    size = torch.tensor([-1 if content is None else len(content)], device=_device())
    distributed.broadcast(size, 0)
    if int(size) < 0:
        return None
    data = torch.zeros(int(size), dtype=torch.uint8)
    if content and distributed.get_rank() == 0:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    data = data.to(_device())
    if len(data):
        distributed.broadcast(data, 0)
    return bytes(data.cpu().numpy().tobytes())


def _device() -> torch.device:
    # NCCL moves what is on a GPU only.
    backend = str(torch.distributed.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")


def is_spread(model: nn.Module) -> bool:
    """Whether the weights lie in several processes, which then all have to run the same.

    Args:
        model: The model.

    Returns:
        True for tensor parallel and FSDP models.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters()) or any(
        isinstance(module, FullyShardedDataParallel) for module in model.modules()
    )
