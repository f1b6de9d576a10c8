# ruff: noqa: D102  # the tests of a suite say by their names what they check
"""A long run that is killed at any point resumes with nothing lost or doubled."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar

import pytest


class Resumable:
    """Tests for a command that appends results to a JSON Lines file and, started again, goes on where it stopped.

    The command runs as a process of its own and is killed with SIGKILL, which no code can catch. The tests that kill it
    are marked `slow`, since they run it several times.

    Attributes:
        volatile: Fields of a record that differ between runs, such as times.
        appends: Whether records are appended to the file, so that a kill can leave half a line at its end. Set it to
            False where the file is replaced as a whole each time.
        timeout_s: For one run.
    """

    volatile: ClassVar[tuple[str, ...]] = ()
    appends = True
    timeout_s = 60.0

    _expected: ClassVar[dict[type, list[Any]]] = {}

    def command(self, folder: Path) -> list[str]:
        """Hook, required: the command line, the same for the first run and for the next ones.

        It should take between one and a few seconds and give at least five results, one after the other.

        Args:
            folder: An existing folder for everything that the run writes.

        Returns:
            Program and arguments; `sys.executable` for Python.
        """
        raise NotImplementedError("command(folder) must return the command line")

    def results_file(self, folder: Path) -> Path:
        """Hook: where the results are. By default `results.jsonl` in the folder."""
        return folder / "results.jsonl"

    def key(self, record: Any) -> Hashable:
        """Hook: what tells one result from another. By default the field `id`."""
        key: Hashable = record["id"]
        return key

    def _start(self, folder: Path) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
        with (folder / "stderr.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603  # the command is the test's own
                self.command(folder),
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # so that the kill reaches its children too
            )

    def _finish(self, folder: Path) -> None:
        process = self._start(folder)
        try:
            code = process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            self._kill(process)
            raise AssertionError(f"the run is not done after {self.timeout_s:g} seconds") from None
        log = (folder / "stderr.log").read_text("utf-8", "replace")
        assert code == 0, f"the run ended with exit code {code}; its standard error ends so:\n{log[-2000:]}"

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _count(self, folder: Path) -> int:
        file = self.results_file(folder)
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def _records(self, folder: Path) -> list[Any]:
        lines = self.results_file(folder).read_text("utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        return [
            {name: value for name, value in record.items() if name not in self.volatile}
            if isinstance(record, dict)
            else record
            for record in records
        ]

    def _expected_records(self, folder: Path) -> list[Any]:
        """The records of a run that nothing interrupts, made once per class."""
        if type(self) not in self._expected:
            folder.mkdir()
            self._finish(folder)
            self._expected[type(self)] = self._records(folder)
        return self._expected[type(self)]

    def _assert_complete(self, folder: Path, expected: list[Any], what: str) -> None:
        found = self._records(folder)
        keys, wanted = [self.key(record) for record in found], [self.key(record) for record in expected]
        doubled = {key for key in keys if keys.count(key) > 1}
        assert not doubled, f"{what}: doubled results {doubled}"
        assert set(keys) == set(wanted), f"{what}: lost {set(wanted) - set(keys)}, too many {set(keys) - set(wanted)}"
        by_key = {self.key(record): record for record in found}
        for record in expected:
            assert by_key[self.key(record)] == record, f"{what}: another result than without an interruption"

    def _run_until(self, folder: Path, results: int) -> bool:
        """Starts the run, kills it once the file has so many results, and says whether the kill came in time."""
        process = self._start(folder)
        end = time.monotonic() + self.timeout_s
        while process.poll() is None and self._count(folder) < results:
            if time.monotonic() > end:
                self._kill(process)
                raise AssertionError(f"no {results} results after {self.timeout_s:g} seconds")
            time.sleep(0.002)
        if process.poll() is not None:
            return False
        self._kill(process)
        return True

    def test_without_interruption(self, tmp_path: Path) -> None:
        expected = self._expected_records(tmp_path / "whole")
        keys = [self.key(record) for record in expected]
        assert len(keys) >= 5, f"{len(keys)} results are too few to interrupt; command() must give at least five"
        assert len(set(keys)) == len(keys), "key() does not tell the results apart"

    @pytest.mark.slow
    def test_killed_once(self, tmp_path: Path) -> None:
        expected = self._expected_records(tmp_path / "whole")
        for results in sorted({0, 1, len(expected) // 2, len(expected) - 1}):
            folder = tmp_path / f"killed-after-{results}"
            folder.mkdir()
            landed = self._run_until(folder, results)
            # At the last result the process may well be done before the kill; before that the test would test nothing.
            assert landed or results == len(expected) - 1, (
                f"the run was over before it could be killed after {results} of {len(expected)} results; slow it down"
            )
            self._finish(folder)
            self._assert_complete(folder, expected, f"killed after {results} results")

    @pytest.mark.slow
    def test_killed_again_and_again(self, tmp_path: Path) -> None:
        expected = self._expected_records(tmp_path / "whole")
        folder = tmp_path / "killed-often"
        folder.mkdir()
        kills = 0
        for results in range(1, len(expected), max(1, len(expected) // 4)):
            kills += self._run_until(folder, results)
        assert kills >= 2, "the run was over before it could be killed twice; slow it down"
        self._finish(folder)
        self._assert_complete(folder, expected, f"killed {kills} times")

    @pytest.mark.slow
    def test_half_a_line_at_the_end(self, tmp_path: Path) -> None:
        if not self.appends:
            return
        expected = self._expected_records(tmp_path / "whole")
        folder = tmp_path / "torn"
        folder.mkdir()
        self._run_until(folder, 2)
        file = self.results_file(folder)
        lines = file.read_bytes().splitlines(keepends=True)[:2]
        file.write_bytes(lines[0] + lines[1][: len(lines[1]) // 2])
        self._finish(folder)
        self._assert_complete(folder, expected, "with half a line at the end of the file")

    def test_finished_run_changes_nothing(self, tmp_path: Path) -> None:
        folder = tmp_path / "finished"
        folder.mkdir()
        self._finish(folder)
        before = self.results_file(folder).read_bytes()
        self._finish(folder)
        assert self.results_file(folder).read_bytes() == before
