"""The console script."""

import os
import sys


def main() -> int:
    """Run the command line.

    Returns:
        0 if it ran, 1 if it failed or the `cli` extra is missing, 2 for wrong usage, 130 after Ctrl-C.
    """
    # Threads that spin while they wait make small models ten times slower where the cores are shared. It counts only
    # before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import typer  # noqa: F401  # only to see whether it is there
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print("error: the command line needs typer: pip install 'bodes-steer[cli]'", file=sys.stderr)
        return 1
    try:
        from bodes_steer.cli import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are loaded; later `run` answers it
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
