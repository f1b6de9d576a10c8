import builtins
import os
import sys

import bodes_steer
import pytest
from bodes_steer import __main__ as script


@pytest.fixture
def arguments(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)

    def give(*values):
        monkeypatch.setattr(sys, "argv", ["bodes-steer", *values])

    yield give
    os.environ.pop("OMP_WAIT_POLICY", None)


def test_threads_are_told_to_wait_quietly(arguments, capsys):
    arguments("--help")
    assert script.main() == 0
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "bodes-steer demo" in capsys.readouterr().out


@pytest.mark.parametrize(("missing", "code"), [("typer", 1), ("something_inside", None)])
def test_without_the_extra(arguments, capsys, monkeypatch, missing, code):
    arguments("--help")
    original = builtins.__import__

    def refuse(name, *rest, **more):
        if name == "typer":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    if code is None:
        with pytest.raises(ModuleNotFoundError):
            script.main()
        return
    assert script.main() == code
    assert "pip install 'bodes-steer[cli]'" in capsys.readouterr().err


def test_ctrl_c_while_modules_are_loaded(arguments, capsys, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    arguments("--help")
    monkeypatch.setattr("bodes_steer.cli.run", interrupt)
    assert script.main() == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_public_names_are_there():
    for name in bodes_steer.__all__ * 2:
        # Not a module of the same name, which an import puts in its place.
        assert callable(getattr(bodes_steer, name))
        assert name in dir(bodes_steer)
    with pytest.raises(AttributeError, match="nothing"):
        bodes_steer.nothing  # noqa: B018  # looking it up is the test
