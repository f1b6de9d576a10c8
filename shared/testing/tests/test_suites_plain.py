"""The suites without torch pass a right implementation and fail wrong ones, in the test that is meant to notice."""

import hashlib
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from separata_testing.suites import CommandLine, FileFormat, Resumable


class BadFileError(Exception):
    pass


def digest(values):
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


class Checked(FileFormat):
    """A JSON file with a version and a checksum, written beside and renamed; wrong ones override a part of it."""

    error = BadFileError

    def example(self):
        return [1.5, -2, "é", {"a": None}]

    def save(self, value, path):
        beside = path.with_name(path.name + ".part")
        try:
            beside.write_text(json.dumps({"version": 1, "sha256": digest(value), "values": value}, indent=1) + "\n")
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)

    def read(self, path):
        try:
            found = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise BadFileError(f"{path} is not JSON: {error}") from error
        if not isinstance(found, dict) or not isinstance(found.get("version"), int):
            raise BadFileError(f"{path} has no version")
        if found["version"] > 1:
            raise BadFileError(f"{path} has version {found['version']}, which is newer than 1")
        return found

    def load(self, path):
        found = self.read(path)
        if set(found) != {"version", "sha256", "values"} or digest(found["values"]) != found["sha256"]:
            raise BadFileError(f"{path} has been altered")
        return found["values"]


class TestChecked(Checked):
    pass


class TestCheckedSafetensors(Checked):
    """The same with a safetensors file; its checksum is a tensor, as several metadata come in an order of chance."""

    file_name = "saved.safetensors"

    def example(self):
        import numpy

        return {"a": numpy.arange(12, dtype=numpy.float32).reshape(3, 4)}

    def equal(self, first, second):
        return all((first[name] == second[name]).all() for name in second)

    def checksum(self, array):
        import numpy

        return numpy.frombuffer(hashlib.sha256(array.tobytes()).digest(), numpy.uint8)

    def save(self, value, path):
        from safetensors.numpy import save_file

        beside = path.with_name("beside")
        save_file({**value, "sha256": self.checksum(value["a"])}, beside, {"version": "1"})
        try:
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def load(self, path):
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "numpy") as file:
                metadata = file.metadata()
                if not metadata or not metadata.get("version", "").isdigit():
                    raise BadFileError(f"{path} has no version")
                if int(metadata["version"]) > 1:
                    raise BadFileError(f"{path} has version {metadata['version']}, which is newer than 1")
                found = {name: file.get_tensor(name) for name in ("a", "sha256")}
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, TypeError) as error:
            raise BadFileError(f"{path}: {error}") from error
        array, checksum = found["a"], found["sha256"]
        if (
            array.shape != (3, 4)
            or array.dtype != "float32"
            or checksum.dtype != "uint8"
            or checksum.tobytes() != self.checksum(array).tobytes()
            or metadata["version"] != "1"
        ):
            raise BadFileError(f"{path} has been altered")
        return found


class TestFolder(Checked):
    """A folder with two files, replaced as a whole."""

    file_name = "saved"

    def save(self, value, path):
        import shutil

        beside = path.with_name("beside")
        beside.mkdir()
        try:
            for name, part in (("a.json", value[:2]), ("b.json", value[2:])):
                super().save(part, beside / name)
            if path.exists():
                os.replace(path, path.with_name("older"))
            os.replace(beside, path)
            shutil.rmtree(path.with_name("older"), ignore_errors=True)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def load(self, path):
        return super().load(path / "a.json") + super().load(path / "b.json")


class NoChecksum(Checked):
    def load(self, path):
        return self.read(path).get("values")


class TestLooseButHonest(NoChecksum):
    detects_alteration = False

    def load(self, path):
        found = self.read(path)
        if not isinstance(found.get("values"), list):
            raise BadFileError(f"{path} has no values")
        return found["values"]


class AnotherException(Checked):
    def read(self, path):
        return json.loads(path.read_text("utf-8"))


class IgnoresVersion(Checked):
    def read(self, path):
        try:
            return super().read(path)
        except BadFileError as error:
            if "newer" in str(error):
                raise BadFileError(f"{path} has been altered") from error
            raise


class NamesNoFile(Checked):
    def load(self, path):
        try:
            return super().load(path)
        except BadFileError as error:
            raise BadFileError(str(error).replace(str(path), "it")) from error


class WritesInPlace(Checked):
    def save(self, value, path):
        path.write_text(json.dumps({"version": 1, "sha256": digest(value), "values": value}))


class LeavesParts(Checked):
    def save(self, value, path):
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps({"version": 1, "sha256": digest(value), "values": value}))
        os.replace(beside, path)


class TimeInside(Checked):
    count = 0

    def save(self, value, path):
        type(self).count += 1
        super().save(value, path)
        path.write_text(path.read_text() + " " * self.count)


class Loses(Checked):
    def load(self, path):
        return super().load(path)[:-1]


@pytest.mark.parametrize(
    ("suite", "expected"),
    [
        (NoChecksum, {"test_altered"}),
        (AnotherException, {"test_altered", "test_something_else", "test_truncated", "test_with_something_appended"}),
        (IgnoresVersion, {"test_newer_version"}),
        (NamesNoFile, {"test_altered", "test_truncated", "test_with_something_appended"}),
        (WritesInPlace, {"test_failed_save_leaves_the_older_file"}),
        (LeavesParts, {"test_failed_save_leaves_the_older_file"}),
        (TimeInside, {"test_saving_twice_gives_the_same_bytes"}),
        (Loses, {"test_round_trip", "test_saving_over_an_older_file", "test_failed_save_leaves_the_older_file"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_file_format_notices(suite, expected, failing):
    found = failing(suite)
    assert expected <= found
    assert "test_missing" not in found


# A run over eight items, one after the other. What it does wrong is chosen by its second argument.
RUN = """
import json, os, sys, time
folder, flaw = sys.argv[1:]
path = os.path.join(folder, "results.jsonl")
done = []
if os.path.exists(path):
    with open(path, "r+b") as file:
        data = file.read()
        whole = data[: data.rfind(b"\\n") + 1]
        if flaw != "keeps half lines":
            file.truncate(len(whole))
    done = [json.loads(line)["id"] for line in whole.splitlines()]
todo = [item for item in range(8) if item not in done]
if flaw == "starts anew":
    todo = list(range(8))
if flaw == "skips one" and done:
    todo = todo[1:]
if flaw == "fails":
    sys.exit("no luck")
for item in todo:
    time.sleep(0.03)
    value = item * item + (len(done) if flaw == "forgets its state" else 0)
    with open(path, "a") as file:
        file.write(json.dumps({"id": item, "value": value, "seconds": time.time()}) + "\\n")
if flaw == "touches a finished run" and not todo:
    open(path, "a").write('{"id": 9, "value": 81, "seconds": 0}\\n')
"""


class Run(Resumable):
    volatile = ("seconds",)
    flaw = "none"
    timeout_s = 20.0

    def command(self, folder):
        return [sys.executable, "-I", "-c", RUN, str(folder), self.flaw]


class TestRun(Run):
    pass


class StartsAnew(Run):
    flaw = "starts anew"


class SkipsOne(Run):
    flaw = "skips one"


class KeepsHalfLines(Run):
    flaw = "keeps half lines"


class ForgetsItsState(Run):
    flaw = "forgets its state"


class TouchesAFinishedRun(Run):
    flaw = "touches a finished run"


class Fails(Run):
    flaw = "fails"


@pytest.mark.parametrize(
    ("suite", "test", "words"),
    [
        (StartsAnew, "test_killed_once", "doubled"),
        (SkipsOne, "test_killed_again_and_again", "lost"),
        (KeepsHalfLines, "test_half_a_line_at_the_end", "Expecting|Extra data|lost|delimiter"),
        (ForgetsItsState, "test_killed_again_and_again", "another result"),
        (TouchesAFinishedRun, "test_finished_run_changes_nothing", "assert b"),
        (Fails, "test_without_interruption", "no luck"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_resumable_notices(suite, test, words, tmp_path):
    # A broken file shows where the suite parses it, so any exception type will do.
    with pytest.raises(Exception, match=words):
        getattr(suite(), test)(tmp_path)


def test_resumable_refuses_a_run_that_is_over_too_soon(tmp_path):
    class Quick(Run):
        def _run_until(self, folder, results):
            return False  # as if it had ended before the kill, which a real one does only sometimes

    with pytest.raises(AssertionError, match="slow it down"):
        Quick().test_killed_again_and_again(tmp_path)


def test_resumable_stops_a_run_that_hangs(tmp_path):
    class Hangs(Run):
        timeout_s = 0.3

        def command(self, folder):
            return [sys.executable, "-I", "-c", "import time; time.sleep(60)"]

    with pytest.raises(AssertionError, match="not done after"):
        Hangs().test_without_interruption(tmp_path)


GOOD_MAIN = """
import json
import sys


def main():
    try:
        import typer
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit('error: the command line needs the extra "cli": pip install "sample-tool[cli]"')
    return run(sys.argv[1:])


def run(arguments):
    if "--help" in arguments:
        print("Usage: sample-tool square NUMBER\\n\\nExample:\\n  sample-tool square 3")
        return 0
    if not arguments or arguments[0] not in ("square", "slow") or "--no-such-option" in arguments:
        print("error: no such command", file=sys.stderr)
        return 2
    print("working", file=sys.stderr)
    if arguments[1] == "minus":
        print("error: NUMBER is 'minus'; it must be a number", file=sys.stderr)
        return 1
    print(json.dumps({"square": int(arguments[1]) ** 2}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
"""


class Tool(CommandLine):
    """A package made on the fly; wrong ones replace a piece of its source."""

    extra_imports = ("typer",)
    change = ("", "")

    def succeeding(self, folder):
        return [["square", "4"]]

    def failing(self, folder):
        return [["square", "minus"]]

    def wrong_usage(self, folder):
        return [["cube", "3"]]

    def json_commands(self, folder):
        return [["square", "4", "--json"]]

    def slow_commands(self, folder):
        return [["slow", "1"]]


FLAWS = {
    "test_help_shows_an_example": [("Example:", "Mind:"), ("sample-tool square 3", "square 3")],
    "test_success_is_0": [("    return 0\n\n\nif __name__", "    return 3\n\n\nif __name__")],
    "test_failure_is_1_with_one_line": [
        ("        return 1", "        return 0"),
        ("        return 1", "        raise ValueError('minus')"),
        ("error: NUMBER", "NUMBER"),
        ("        return 1", "        print('bye', file=sys.stderr)\n        return 1"),
        ("error: NUMBER", "\\x1b[31merror: NUMBER"),
    ],
    "test_wrong_usage_is_2": [("return 2", "return 1"), ('no such command", file=sys.stderr', 'no such command"')],
    "test_json_parses": [
        ('print("working", file=sys.stderr)', 'print("working")'),
        ("int(arguments[1]) ** 2", "1e999"),
    ],
    "test_slow_commands_show_progress": [('    print("working", file=sys.stderr)\n', "")],
    "test_missing_extra_is_named": [
        ("        import typer\n", "        pass\n"),
        ("sample-tool[cli]", "sample-tool"),
        ("pip install ", ""),
        ("        if error.name", "        raise\n        if error.name"),
    ],
    "test_broken_extra_is_not_called_missing": [('if error.name != "typer"', "if False")],
}


@pytest.fixture
def make_tool(tmp_path, monkeypatch):
    """Writes the package, changed, where the subprocesses find it, and gives the suite for it."""

    def make(old="", new=""):
        folder = tmp_path / "path" / "sample_tool"
        folder.mkdir(parents=True)
        assert old in GOOD_MAIN
        (folder / "__init__.py").write_text("")
        (folder / "__main__.py").write_text(GOOD_MAIN.replace(old, new) if old else GOOD_MAIN)
        typer = tmp_path / "path" / "typer"  # of our own, so that these tests need none installed
        typer.mkdir()
        (typer / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(folder.parent))
        monkeypatch.delitem(sys.modules, "sample_tool", raising=False)
        import sample_tool

        class Made(Tool):
            package = sample_tool

        return Made()

    return make


def run_test(suite, name, folder):
    test = getattr(suite, name)
    return test(folder) if test.__code__.co_argcount == 2 else test()


def test_command_line_passes_a_right_tool(make_tool, tmp_path):
    suite = make_tool()
    for name in FLAWS:
        run_test(suite, name, tmp_path)


@pytest.mark.parametrize(
    ("name", "old", "new"), [(name, old, new) for name, flaws in FLAWS.items() for old, new in flaws]
)
def test_command_line_notices(make_tool, tmp_path, name, old, new):
    suite = make_tool(old, new)
    with pytest.raises(AssertionError):
        run_test(suite, name, tmp_path)


def test_command_line_wants_a_console_script(make_tool):
    import pluggy

    class Pluggy(CommandLine):
        package = pluggy

    with pytest.raises(AssertionError, match="a script named 'pluggy' is wanted"):
        Pluggy().test_console_script()
    with pytest.raises(pytest.skip.Exception, match="a vendored copy has no script"):
        make_tool().test_console_script()


def test_command_line_of_a_copy_leaves_the_script_of_the_original_alone():
    class Copy(CommandLine):
        package = types.ModuleType("company.pluggy")  # pluggy is installed and has no script

    with pytest.raises(pytest.skip.Exception, match="belongs to the original"):
        Copy().test_console_script()


def test_command_line_accepts_a_real_console_script():
    import hypothesis

    class Hypothesis(CommandLine):
        package = hypothesis

    Hypothesis().test_console_script()


def test_required_hooks_say_that_they_are_missing(tmp_path):
    for suite, hook in ((FileFormat, "example"), (Resumable, "command")):
        arguments = () if hook == "example" else (tmp_path,)
        with pytest.raises(NotImplementedError, match=re.escape(hook)):
            getattr(suite(), hook)(*arguments)


def test_suites_load_no_torch():
    code = "import sys, separata_testing.suites, separata_testing.plugin; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "False"
