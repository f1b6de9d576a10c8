"""What the verbs print, and what becomes of an error, without a process for each."""

import json
import re
import sys

import pytest
from pmark import PAPER, __main__, cli


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["pmark", *arguments])
    return __main__.main()


def test_about(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "about")
    assert not ended.value.code
    assert capsys.readouterr().out == f"{PAPER.title}\n{PAPER.url}\n"


def test_about_as_json(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "about", "--json")
    assert json.loads(capsys.readouterr().out) == {"title": PAPER.title, "url": PAPER.url}


def test_an_error_is_one_line_and_1(monkeypatch, capsys):
    def fail(**_):
        raise ValueError("gamma is -1; it must be positive")

    monkeypatch.setattr(cli, "app", fail)
    assert run(monkeypatch, "about") == 1
    assert capsys.readouterr().err == "error: gamma is -1; it must be positive\n"


def test_missing_extra(monkeypatch, capsys, block_imports):
    block_imports("typer")
    monkeypatch.delitem(sys.modules, cli.__name__)
    assert run(monkeypatch) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_module_of_our_own_is_another_matter(monkeypatch, block_imports):
    block_imports(cli.__name__)
    with pytest.raises(ModuleNotFoundError, match=re.escape(cli.__name__)):
        run(monkeypatch)
