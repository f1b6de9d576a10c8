# ruff: noqa: D102  # the tests of a suite say by their names what they check
"""The command line: exit codes, one-line errors, help with an example, JSON for machines, a missing extra."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

_CODE_WITHOUT_EXTRA = """
import runpy, sys
for name in {blocked!r}:
    sys.modules[name] = None
sys.argv = [{package!r}]
runpy.run_module({package!r}, run_name="__main__", alter_sys=True)
"""


class CommandLine:
    """Tests for a package that is run as `python -m package` and by a console script named after it.

    Every command runs as a process of its own. Hooks that return commands give arguments only, without the program.

    Attributes:
        package: The package, imported: not its name, which differs in a vendored copy.
        extra: The extra that brings what the command line needs.
        extra_imports: The modules of that extra; without them the program must say how to get it.
        help_for: Arguments before `--help` for which help must show an example: none, and verbs.
        timeout_s: For one command.
    """

    package: ModuleType
    extra = "cli"
    extra_imports: ClassVar[tuple[str, ...]] = ("typer", "rich")
    help_for: ClassVar[tuple[tuple[str, ...], ...]] = ((),)
    timeout_s = 90.0

    def succeeding(self, folder: Path) -> list[list[str]]:
        """Hook: commands that work, with exit code 0. `folder` is empty and may be written to."""
        return []

    def failing(self, folder: Path) -> list[list[str]]:
        """Hook: commands that are well formed and fail, or whose answer is no, with exit code 1."""
        return []

    def wrong_usage(self, folder: Path) -> list[list[str]]:
        """Hook: commands that are not well formed, with exit code 2, besides an unknown option and an unknown verb."""
        return []

    def json_commands(self, folder: Path) -> list[list[str]]:
        """Hook: commands with `--json` that print one JSON document."""
        return []

    def slow_commands(self, folder: Path) -> list[list[str]]:
        """Hook: commands that take more than two seconds, and so show progress on standard error."""
        return []

    @property
    def _distribution(self) -> str:
        return self.package.__name__.rpartition(".")[2].replace("_", "-")

    def _execute(self, arguments: list[str], path: list[str] | None = None) -> "subprocess.CompletedProcess[str]":
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*(path or []), *(part for part in sys.path if part)]),
            "PYTHONIOENCODING": "utf-8",
            "COLUMNS": "100",
        }
        return subprocess.run(  # noqa: S603  # the program is this interpreter, the arguments are the test's
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=self.timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def _run(self, arguments: list[str], code: int) -> "subprocess.CompletedProcess[str]":
        done = self._execute(["-m", self.package.__name__, *arguments])
        shown = f"{' '.join(arguments) or '(no arguments)'}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        assert "Traceback (most recent call last)" not in done.stdout + done.stderr, f"a traceback: {shown}"
        assert done.returncode == code, f"exit code {done.returncode} instead of {code}: {shown}"
        assert "\x1b[" not in done.stdout + done.stderr, f"colours in a pipe: {shown}"
        return done

    def _assert_one_line_error(self, done: "subprocess.CompletedProcess[str]") -> None:
        lines = [line for line in re.split(r"[\r\n]+", done.stderr) if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error: ")]
        assert len(errors) == 1, f"one line that starts with 'error: ' is wanted on standard error, not {lines}"
        assert lines[-1] == errors[0], f"something follows the error: {lines}"

    def test_help_shows_an_example(self) -> None:
        for verb in self.help_for:
            done = self._run([*verb, "--help"], 0)
            assert not done.stderr
            assert re.search(r"\bexamples?\b", done.stdout, re.IGNORECASE), f"no example: {done.stdout}"
            example = " ".join([self._distribution, *verb])
            shown = re.split(r"\bexamples?\b", done.stdout, maxsplit=1, flags=re.IGNORECASE)[1]
            assert example in shown, f"the example does not run {example!r}: {done.stdout}"

    def test_success_is_0(self, tmp_path: Path) -> None:
        for arguments in self.succeeding(tmp_path):
            self._run(arguments, 0)

    def test_failure_is_1_with_one_line(self, tmp_path: Path) -> None:
        for arguments in self.failing(tmp_path):
            self._assert_one_line_error(self._run(arguments, 1))

    def test_wrong_usage_is_2(self, tmp_path: Path) -> None:
        for arguments in [["--no-such-option"], ["no-such-verb"], *self.wrong_usage(tmp_path)]:
            done = self._run(arguments, 2)
            assert not done.stdout, f"{arguments}: the error belongs on standard error: {done.stdout}"
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            assert 1 <= len(lines) <= 8, f"{arguments}: a short message is wanted: {done.stderr}"

    def test_json_parses(self, tmp_path: Path) -> None:
        for arguments in self.json_commands(tmp_path):
            done = self._run(arguments, 0)
            try:
                json.loads(done.stdout, parse_constant=self._refuse_constant)
            except ValueError as error:
                raise AssertionError(f"{arguments}: standard output is not one JSON document: {error}") from error

    def _refuse_constant(self, name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    def test_slow_commands_show_progress(self, tmp_path: Path) -> None:
        for arguments in self.slow_commands(tmp_path):
            assert self._run(arguments, 0).stderr.strip(), f"{arguments}: no progress on standard error"

    def test_missing_extra_is_named(self) -> None:
        code = _CODE_WITHOUT_EXTRA.format(blocked=self.extra_imports, package=self.package.__name__)
        done = self._execute(["-c", code])
        wanted = f"{self._distribution}[{self.extra}]"
        assert done.returncode == 1, f"exit code {done.returncode} instead of 1: {done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        self._assert_one_line_error(done)
        assert wanted in done.stderr, f"the message does not name {wanted}: {done.stderr}"
        assert "pip install" in done.stderr, f"the message does not say what to run: {done.stderr}"

    def test_broken_extra_is_not_called_missing(self, tmp_path: Path) -> None:
        """An ImportError from inside the optional library must be seen, or nobody finds its cause."""
        broken = tmp_path / self.extra_imports[0]
        broken.mkdir()
        (broken / "__init__.py").write_text("import no_such_module_inside\n")
        done = self._execute(["-m", self.package.__name__, "--help"], path=[str(tmp_path)])
        assert done.returncode != 0
        assert "no_such_module_inside" in done.stderr, f"the cause is hidden: {done.stderr}"

    def test_console_script(self) -> None:
        if "." in self.package.__name__:
            pytest.skip(f"{self.package.__name__} is a vendored copy: the script belongs to the original")
        try:
            importlib.metadata.distribution(self._distribution)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("the package is not installed as a distribution: a vendored copy has no script")
        scripts = importlib.metadata.entry_points(group="console_scripts", name=self._distribution)
        assert len(scripts) == 1, f"a script named {self._distribution!r} is wanted; found {list(scripts)}"
        assert callable(next(iter(scripts)).load())
