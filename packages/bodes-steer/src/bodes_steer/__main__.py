"""The console script."""

import sys
from collections.abc import Callable, Sequence

from separata_kit import console


def main() -> int:
    """Run the command line.

    Returns:
        0 if it ran, 1 if it failed or the `cli` extra is missing, 2 for wrong usage, 130 after Ctrl-C.
    """
    return console.main(_load, "bodes-steer")


def _load() -> Callable[[Sequence[str]], int]:
    from bodes_steer.cli import run

    return run


if __name__ == "__main__":
    sys.exit(main())
