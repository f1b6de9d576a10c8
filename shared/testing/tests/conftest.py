"""Runs a suite's tests on a class without handing it to pytest, so that they may fail."""

import itertools

import pytest


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A function that runs all tests of a suite's heir and gives the names of those that fail."""
    numbers = itertools.count()

    def run(suite):
        found = set()
        for name in dir(suite):
            if not name.startswith("test_"):
                continue
            test = getattr(suite, name)
            marks = {mark.args[0]: list(mark.args[1]) for mark in getattr(test, "pytestmark", ())}
            for values in itertools.product(*marks.values()):
                place = tmp_path / str(next(numbers))
                place.mkdir()
                given = {"tmp_path": place, "monkeypatch": monkeypatch, **dict(zip(marks, values, strict=True))}
                wanted = test.__code__.co_varnames[1 : test.__code__.co_argcount]
                try:
                    test(suite(), **{key: given[key] for key in wanted})
                except pytest.skip.Exception:
                    continue
                except (Exception, pytest.fail.Exception):
                    label = "-".join(str(value) for value in values if not isinstance(value, bytes))
                    found.add(f"{name}[{label}]" if label else name)
        return found

    return run
