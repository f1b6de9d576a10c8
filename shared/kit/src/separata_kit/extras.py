"""Libraries that only some users need."""

from importlib import import_module
from typing import Any


def load(module: str, what: str, extra: str | None = None) -> Any:
    """Import an optional library, or say how to get it.

    Args:
        module: Such as `"matplotlib.figure"`.
        what: What needs it, in the plural or with its article, for the message: `"pictures need"`.
        extra: What brings it, such as `"zerotuning[plot]"`; the library itself if not given.

    Returns:
        The module.

    Raises:
        ImportError: The library is not installed: the message names what to install. An ImportError from inside the
            library is passed on as it is.
    """
    library = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
    if extra is None:
        raise ImportError(f"{what} {library}: pip install {library}")
    name = extra.partition("[")[2].rstrip("]")
    raise ImportError(f"{what} the extra '{name}': pip install '{extra}'")
