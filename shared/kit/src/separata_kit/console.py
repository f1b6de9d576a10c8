"""Command lines made with typer: exit codes, one line for an error, what every verb needs.

Exit codes are 0 if it ran, 1 if it failed, 2 for wrong usage, 130 after Ctrl-C, or what a command ends with by
`typer.Exit`.
"""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 and the number of the signal."""

_MOST_LAYERS = 10_000
"""Far above any model, and few enough to be listed."""

_FAILURES = (ValueError, OSError, RuntimeError, ImportError, OverflowError)


def main(load: Callable[[], Callable[[Sequence[str]], int]], distribution: str) -> int:
    """The body of a console script.

    Args:
        load: Imports the command line and returns what runs it on given arguments.
        distribution: The package's name; its extra `cli` brings typer.

    Returns:
        The exit code.
    """
    # Threads that spin while they wait make small models ten times slower where the cores are shared. It counts only
    # before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import typer  # noqa: F401  # only to see whether it is there
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print(f"error: the command line needs typer: pip install '{distribution}[cli]'", file=sys.stderr)
        return 1
    try:
        return load()(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are loaded; later `run` answers it
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def run(app: "typer.Typer", arguments: Sequence[str], *, arguments_called: Mapping[str, str] | None = None) -> int:
    """Run a command line on given arguments.

    What goes wrong is told in one line on standard error, and so is each warning, once. `--debug` among the arguments,
    or `SEPARATA_DEBUG=1` in the environment, shows the traceback before it. Mistakes in the program itself, such as a
    `KeyError`, are not made pretty.

    Args:
        app: The command line; the name that it was given is that of the program.
        arguments: Without the program's name.
        arguments_called: What arguments of functions that messages name are called here, such as
            `{"force=True": "--force"}`.

    Returns:
        The exit code.
    """
    import typer

    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    debug = os.environ.get("SEPARATA_DEBUG", "0") not in ("", "0") or "--debug" in words[:end]
    words = [word for word in words[:end] if word != "--debug"] + words[end:]
    name = app.info.name if isinstance(app.info.name, str) else None
    # Tracebacks are Python's own: those of typer's older releases print local variables, keys and passwords among them.
    app.pretty_exceptions_enable = False
    with warnings.catch_warnings():
        warnings.showwarning = _each_once()
        try:
            code = _code(app(args=words, prog_name=name, standalone_mode=False))
            print(end="", flush=True)  # there may be no standard output at all
        except SystemExit as exit_:
            code = _code(exit_.code)
        except BrokenPipeError:
            # Who read it has enough; what is left in the buffer must not complain at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as error:
            # typer's own errors are of classes that it has in different places from release to release.
            if debug:
                traceback.print_exc()
            if hasattr(error, "format_message"):
                code = _wrong_usage(error)
            elif isinstance(error, typer.Abort):
                code = 1
                print("error: aborted", file=sys.stderr)
            elif isinstance(error, _FAILURES):
                code = 1
                # What to do about it may stand in a later line of the message.
                told = _one_line(str(error)) or type(error).__name__
                for argument, option in (arguments_called or {}).items():
                    told = told.replace(argument, option)
                print(f"error: {told}", file=sys.stderr)
            else:
                raise
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code


def _code(given: object) -> int:
    """What typer returns: the code of an `Exit`, or what the command returned."""
    return given if isinstance(given, int) and not isinstance(given, bool) else 0


def _wrong_usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
    else:
        hint = "" if context is None else f" (see '{context.command_path} --help')"
        print(f"error: {_one_line(error.format_message()).removesuffix('.')}{hint}", file=sys.stderr)
    return int(getattr(error, "exit_code", 2))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _each_once() -> Callable[..., None]:
    """A way of showing warnings that says the same thing once."""
    told: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        line = _one_line(str(message))
        if line not in told:
            told.add(line)
            print(f"warning: {line}", file=sys.stderr)

    return show


def print_text(text: str) -> None:
    """Print a result.

    Args:
        text: The text, without a newline at its end.
    """
    print(text, flush=True)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False)


def print_json(value: Any) -> None:
    """Print a result for machines.

    Args:
        value: What JSON can hold.

    Raises:
        TypeError: JSON cannot hold it.
        ValueError: It holds a number that is not finite.
    """
    print_text(_json(value))


def print_result(result: str | Mapping[str, Any]) -> None:
    """Print a result, for people or for machines.

    Args:
        result: Text, or an object that is printed as JSON.

    Raises:
        TypeError: JSON cannot hold it.
        ValueError: It holds a number that is not finite.
    """
    print_text(result if isinstance(result, str) else _json(result))


def alternatives(names: Iterable[str]) -> str:
    """Names in a sentence.

    Args:
        names: One or more.

    Returns:
        Such as `"'a', 'b' or 'c'"`.
    """
    *most, last = (f"'{name}'" for name in names)
    return f"{', '.join(most)} or {last}" if most else last


def choice(option: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value that an option does not have.

    Args:
        option: Such as `"--mode"`.
        value: What was given.
        allowed: What can be.

    Raises:
        typer.BadParameter: It is none of them.
    """
    if value not in allowed:
        raise _bad(option, f"{value!r} is none of {', '.join(allowed)}")


def check_different_files(**paths: "str | os.PathLike[str] | None") -> None:
    """Refuse one file for two purposes: the one would overwrite the other.

    Args:
        paths: Files by the parameter that names them; None where none was given.

    Raises:
        typer.BadParameter: Two are the same file.
    """
    seen: dict[str, str] = {}
    for name, path in paths.items():
        if path is not None:
            option = "--" + name.replace("_", "-")
            other = seen.setdefault(os.path.realpath(path), option)
            if other != option:
                raise _bad(option, f"{path} is what {other} names too")


def refuse_idle(context: Any, names: Sequence[str], why: str) -> None:
    """Refuse options that would be ignored: who gives them expects an effect.

    Args:
        context: The command's context.
        names: Its parameters that have no effect.
        why: When so, such as `"without --sample, as nothing is drawn"`.

    Raises:
        typer.BadParameter: One of them was given on the command line.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name)
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise _bad(parameter.opts[0], f"it is of no account {why}; leave it out")


def layer_numbers(text: str | None, option: str = "--layers") -> list[int] | None:
    """Read a list of layers, counted from 0.

    Args:
        text: Such as `"0-9,12"`; None where none was given.
        option: The option it was given by.

    Returns:
        The layers in the order given, or None.

    Raises:
        typer.BadParameter: It is no such list, or names a layer that no model has.
    """
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise _bad(option, f"{text!r} is no list of layers such as '0-9,12'")
        stretch = range(int(first), int(last if dash else first) + 1)
        if stretch.stop > _MOST_LAYERS:
            raise _bad(option, f"no model has a layer {stretch.stop - 1}")
        found += stretch
    return found


def numbers(option: str, text: str) -> list[float]:
    """Read a list of finite numbers.

    Args:
        option: The option it was given by.
        text: Such as `"0.5,1,2"`.

    Returns:
        The numbers.

    Raises:
        typer.BadParameter: It is no such list.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise _bad(option, f"{text!r} is no list of numbers") from None
    for each in found:
        if not abs(each) < float("inf"):
            raise _bad(option, f"{each} is no finite number")
    return found


def _bad(option: str, message: str) -> Exception:
    import typer

    return typer.BadParameter(message, param_hint=option)
