"""The console script: says what is missing, or hands over to the command line."""

import sys


def main() -> int:
    """Runs the command line.

    Returns:
        The exit code: 0, 1 if it failed or the extra `cli` is missing, 2 for wrong usage.
    """
    try:
        from pmark.cli import run
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print('error: the command line needs the extra "cli": pip install "pmark[cli]"', file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
