"""The command line; needs the extra `cli`."""

import dataclasses
import json
import sys
from typing import Annotated

import typer

from pmark.paper import PAPER

EXAMPLE = "Example: pmark about --json"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback(epilog=EXAMPLE)
def program() -> None:
    """Watermarks LLM text sentence by sentence, without distortion."""


@app.command(epilog=EXAMPLE)
def about(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Tell which paper this package is for."""
    if as_json:
        print(json.dumps(dataclasses.asdict(PAPER)))
    else:
        print(f"{PAPER.title}\n{PAPER.url}")


def run() -> int:
    """Runs the command line on the arguments of this process.

    Returns:
        The exit code, 1, if it failed; otherwise typer ends the process with 0 or 2.
    """
    try:
        app(prog_name="pmark")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
