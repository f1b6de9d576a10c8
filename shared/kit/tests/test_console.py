import builtins
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from separata_kit import console

Context = typer.Context.__base__


def program():
    app = typer.Typer(name="prog", no_args_is_help=True, add_completion=False, rich_markup_mode=None)

    @app.command()
    def work(context: Context, kind: str = "fine", mode: str = "a", as_json: bool = False, layers: str = "0") -> None:
        console.choice("--mode", mode, ("a", "b"))
        if kind == "idle":
            console.refuse_idle(context, ("mode", "as_json"), "to --kind idle")
        warnings.warn("twice\n  told", stacklevel=1)
        warnings.warn("twice told", stacklevel=1)
        raised = {
            "value": ValueError("force=True\nhelps"),
            "bare": ValueError(),
            "os": FileNotFoundError(2, "No such file", "x"),
            "import": ImportError("needs the extra"),
            "runtime": RuntimeError("no"),
            "bug": KeyError("x"),
            "exit": typer.Exit(3),
            "abort": typer.Abort(),
            "interrupt": KeyboardInterrupt(),
            "system": SystemExit(4),
        }.get(kind)
        if raised is not None:
            raise raised
        console.print_json({"layers": console.layer_numbers(layers)})

    @app.command()
    def other() -> None: ...

    return app


def ended(capsys, *arguments):
    code = console.run(program(), arguments, arguments_called={"force=True": "--force"})
    told = capsys.readouterr()
    return code, told.out, told.err.removeprefix("warning: twice told\n")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["work", "--kind", "value"], 1, "error: --force helps\n"),
        (["work", "--kind", "bare"], 1, "error: ValueError\n"),
        (["work", "--kind", "os"], 1, "error: [Errno 2] No such file: 'x'\n"),
        (["work", "--kind", "import"], 1, "error: needs the extra\n"),
        (["work", "--kind", "runtime"], 1, "error: no\n"),
        (["work", "--kind", "exit"], 3, ""),
        (["work", "--kind", "system"], 4, ""),
        (["work", "--kind", "abort"], 1, "error: aborted\n"),
        (["work", "--kind", "interrupt"], 130, "interrupted\n"),
        (["work", "--mode", "c"], 2, "error: Invalid value for --mode: 'c' is none of a, b (see 'prog work --help')\n"),
        (["work", "--kind", "idle"], 0, ""),
        (
            ["work", "--kind", "idle", "--as-json"],
            2,
            "error: Invalid value for --as-json: it is of no account to --kind idle; leave it out "
            "(see 'prog work --help')\n",
        ),
    ],
)
def test_each_end(capsys, arguments, code, told):
    assert ended(capsys, *arguments)[::2] == (code, told)


def test_a_verb_that_is_missing_or_wrong(capsys):
    code, out, err = ended(capsys)
    assert (code, out) == (2, "")
    assert "Usage: prog" in err
    for words, told in (
        (["nothing"], "error: No such command 'nothing'"),
        (["work", "--zzz"], "error: No such option"),
    ):
        code, out, err = ended(capsys, *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(told)
    assert ended(capsys, "--help")[0] == 0


def test_a_result(capsys):
    code, out, err = ended(capsys, "work", "--layers", "3,0-2")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"layers": [3, 0, 1, 2]}


def test_a_bug_is_not_made_pretty(capsys):
    with pytest.raises(KeyError):
        ended(capsys, "work", "--kind", "bug")


@pytest.mark.parametrize(
    ("arguments", "variable", "shown"),
    [
        (["--debug", "work", "--kind", "value"], None, True),
        (["work", "--kind", "value", "--debug"], None, True),
        (["work", "--kind", "value"], "1", True),
        (["work", "--kind", "value"], "0", False),
    ],
)
def test_the_traceback_on_request(capsys, monkeypatch, arguments, variable, shown):
    if variable is not None:
        monkeypatch.setenv("SEPARATA_DEBUG", variable)
    code, _, err = ended(capsys, *arguments)
    assert code == 1
    assert ("Traceback" in err) == shown
    assert err.endswith("\nerror: --force helps\n" if shown else "error: --force helps\n")


def test_behind_two_dashes_it_is_a_word(capsys):
    assert ended(capsys, "work", "--", "--debug")[0] == 2


def test_warnings_are_told_once_each(capsys):
    console.run(program(), ["work"])
    assert capsys.readouterr().err == "warning: twice told\n"


def test_a_reader_that_has_enough(tmp_path):
    code = (
        "import sys, typer\nfrom separata_kit import console\napp = typer.Typer()\n@app.command()\n"
        "def work():\n    for i in range(100000):\n        (print if len(sys.argv) > 2 else console.print_text)(i)\n"
        "sys.exit(console.run(app, []))\n"
    )
    for more in ([], ["plain"]):
        with subprocess.Popen(
            [sys.executable, "-c", code, "x", *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout.readline() == b"0\n"
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(20) == 1


def test_neither_tracebacks_nor_a_closed_output_tell_secrets_or_fall_over():
    code = (
        "import sys, typer\nfrom separata_kit import console\n"
        "app = typer.Typer(pretty_exceptions_show_locals=True)\n@app.command()\n"
        "def work():\n    password = 'se' + 'cret'\n    if sys.stdout: {}[1]\n"
        "sys.exit(console.run(app, []))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stderr.endswith("KeyError: 1\n")
    assert "secret" not in found.stderr
    found = subprocess.run([sys.executable, "-c", code], preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE)
    assert (found.returncode, found.stderr) == (0, b"")


def test_the_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prog", "a", "b"])
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert console.main(lambda: lambda arguments: len(arguments), "pack") == 2
    assert os.environ.pop("OMP_WAIT_POLICY") == "PASSIVE"

    def interrupted():
        raise KeyboardInterrupt

    assert console.main(interrupted, "pack") == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("missing", ["typer", "something_inside"])
def test_the_script_without_its_extra(monkeypatch, capsys, missing):
    original = builtins.__import__

    def refuse(name, *rest, **more):
        if name == "typer":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    if missing == "typer":
        assert console.main(lambda: len, "pack") == 1
        assert capsys.readouterr().err == "error: the command line needs typer: pip install 'pack[cli]'\n"
    else:
        with pytest.raises(ModuleNotFoundError, match=missing):
            console.main(lambda: len, "pack")


def test_alternatives():
    assert console.alternatives(["a"]) == "'a'"
    assert console.alternatives(("a", "b", "c")) == "'a', 'b' or 'c'"


def test_one_file_for_two_purposes(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    console.check_different_files(data=tmp_path / "a", out=tmp_path / "b", plot=None, resume=None)
    with pytest.raises(typer.BadParameter, match="link is what --data names too") as caught:
        console.check_different_files(data=tmp_path / "a", judge_cache=Path(tmp_path / "link"))
    assert caught.value.param_hint == "--judge-cache"


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "-1", "1,,2", "0-99999", "10000"])
def test_lists_of_layers(text):
    assert console.layer_numbers(None) is None
    assert console.layer_numbers("0-2, 7,1") == [0, 1, 2, 7, 1]
    with pytest.raises(typer.BadParameter) as caught:
        console.layer_numbers(text, "--at")
    assert caught.value.param_hint == "--at"


def test_lists_of_numbers():
    assert console.numbers("--grid", "0.5, 1,-2e3") == [0.5, 1.0, -2000.0]
    for text, message in (("1,x", "'1,x' is no list of numbers"), ("1,nan", "nan is no finite"), ("-inf", "no finite")):
        with pytest.raises(typer.BadParameter, match=message):
            console.numbers("--grid", text)


def test_an_app_without_a_name_is_called_by_its_script(capsys, monkeypatch):
    app = typer.Typer()
    app.command()(lambda: None)
    monkeypatch.setattr(sys, "argv", ["/bin/thing"])
    assert console.run(app, ["--no"]) == 2
    assert "(see '" in capsys.readouterr().err


def test_results(capsys):
    console.print_result("a\nb")
    console.print_result({"a": None})
    assert capsys.readouterr().out == 'a\nb\n{\n "a": null\n}\n'


def test_json_without_nan(capsys):
    with pytest.raises(ValueError, match="JSON compliant"):
        console.print_json(float("nan"))
    assert capsys.readouterr().out == ""
    assert console._code(SimpleNamespace()) == console._code(None) == console._code(True) == 0
