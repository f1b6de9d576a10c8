"""Picture files, drawn by matplotlib.

Drawn without pyplot, so nothing global changes and no display is needed. The same contents give the same file, byte for
byte, with the same matplotlib.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from separata_kit import extras
from separata_kit.files import check_writable, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
"""Endings of picture files."""


def check_picture(path: str | os.PathLike[str], *, extra: str | None = None) -> None:
    """Refuse, before the work, a picture that could not be drawn after it.

    Args:
        path: The file to come.
        extra: What brings matplotlib, such as `"zerotuning[plot]"`.

    Raises:
        ValueError: It ends neither in `.png` nor in `.svg`.
        ImportError: matplotlib is not installed; the message names the extra.
        OSError: The file cannot be written there.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"{path} must end in {' or '.join(FORMATS)}")
    _figure(extra)
    check_writable(path)


def save_picture(
    path: str | os.PathLike[str],
    draw: "Callable[[Figure], object]",
    *,
    size: tuple[float, float],
    name: str,
    extra: str,
) -> None:
    """Draw into a file, which is there completely or not at all.

    Args:
        path: The file, `.png` or `.svg`.
        draw: Draws into the figure that it is given.
        size: Width and height, in inches.
        name: Of the package: its identifiers in an `.svg` are derived from it.
        extra: As for `check_picture`.

    Raises:
        ValueError: The file's ending is another one.
        ImportError: matplotlib is not installed; the message names the extra.
        OSError: The file cannot be written.
    """
    check_picture(path, extra=extra)
    figure_class = _figure(extra)
    import matplotlib

    kind = Path(path).suffix.lower()[1:]
    # Without these, identifiers are random and the file carries the time it was written.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure = figure_class(figsize=size, layout="constrained")
        draw(figure)
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        write_atomically(path, lambda file: figure.savefig(file, format=kind, dpi=150, metadata=metadata))


def draw_on(
    target: "str | os.PathLike[str] | Axes",
    draw: "Callable[[Axes], object]",
    *,
    size: tuple[float, float],
    name: str,
    extra: str,
) -> None:
    """Draw into given axes, or into axes of their own in a file.

    Args:
        target: The axes, or the file.
        draw: Draws into the axes that it is given.
        size: As for `save_picture`.
        name: As for `save_picture`.
        extra: As for `check_picture`.

    Raises:
        ValueError: The file's ending is another one.
        ImportError: A file is asked for and matplotlib is not installed; the message names the extra.
        OSError: The file cannot be written.
    """
    if isinstance(target, str | os.PathLike):
        save_picture(target, lambda figure: draw(figure.subplots()), size=size, name=name, extra=extra)
    else:
        draw(target)


def _figure(extra: str | None) -> Any:
    return extras.load("matplotlib.figure", "pictures need", extra).Figure
