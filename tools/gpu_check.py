"""Run every kernel test and every kernel benchmark on whatever GPU machine this is, within five minutes.

For the few minutes that somebody has a GPU. Nothing is installed, nothing is fetched: our packages are taken from their
source folders, Python, torch and Triton are what the machine has, and libraries that only check or generate (jaxtyping,
hypothesis) are replaced by stand-ins where they are missing. Every part runs in a process of its own with a deadline;
one that hangs is killed, recorded, and the others go on. The report is one JSON file, complete after every part.

A kernel test is any `test_kernels_*.py` of a member; a kernel benchmark is a `bench_*.py` with a function
`run(device, seconds)`, whose return value goes into the report.
"""

import argparse
import ast
import contextlib
import importlib.util
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workspace

# Ending what hangs and writing the report take some of the five minutes.
LIMIT_S = 290.0
# A benchmark that measures longer than this tells no more.
MEASURE_S = 20.0
# What a process needs before it measures anything: starting, loading torch, waking the GPU.
START_S = 12.0
PROBE_S = 60.0

PROBE = """
import importlib.util, json, platform, sys
found = {"versions": {"python": platform.python_version()}, "device": {"name": platform.processor() or "CPU"}}
missing = [n for n in ("torch", "triton", "pytest", "jaxtyping", "hypothesis", "beartype", "transformers")
           if importlib.util.find_spec(n) is None]
found["missing"] = missing
for name in ("pytest", "triton", "transformers"):
    if name not in missing:
        import importlib.metadata
        found["versions"][name] = importlib.metadata.version(name)
if "torch" not in missing:
    import torch
    found["versions"]["torch"], found["versions"]["cuda"] = torch.__version__, torch.version.cuda
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        properties = torch.cuda.get_device_properties(0)
        found["device"] = {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "count": torch.cuda.device_count(),
        }
print("\\n" + json.dumps(found))
"""

# Annotations are all that the packages use jaxtyping for.
JAXTYPING = """
class _Array(type):
    def __getitem__(cls, item):
        return item[0]

class _Shaped(metaclass=_Array):
    pass

class _Hook:
    def uninstall(self):
        pass

def install_import_hook(*arguments, **named):
    return _Hook()

def jaxtyped(*arguments, **named):
    return lambda function: function

def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    return _Shaped
"""
# Tests that draw their input are skipped, the others run.
HYPOTHESIS = """
import pytest
from hypothesis import strategies

class _Profiles(type):
    def __getattr__(cls, name):
        return strategies.anything

class settings(metaclass=_Profiles):
    def __init__(self, *arguments, **named):
        pass

    def __call__(self, function):
        return function

def given(*arguments, **named):
    return pytest.mark.skip(reason="hypothesis is not installed")

def example(*arguments, **named):
    return lambda function: function

def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    return strategies.anything
"""
STRATEGIES = """
class _Anything:
    def __getattr__(self, name):
        return self

    def __call__(self, *arguments, **named):
        return self

    def __or__(self, other):
        return self

    def __iter__(self):
        return iter(())

anything = _Anything()

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return anything
"""


@dataclass(frozen=True)
class Part:
    """What is run in one process: a member's kernel tests or one benchmark.

    Attributes:
        kind: `"tests"` or `"benchmark"`.
        member: Distribution name.
        files: The test files, or the one benchmark.
    """

    kind: str
    member: str
    files: tuple[Path, ...]


def find_parts(house: workspace.Workspace) -> list[Part]:
    """List what there is to run, all tests before all benchmarks."""
    tests, benchmarks = [], []
    for member in house.members:
        files = tuple(sorted(member.tests.rglob("test_kernels_*.py")))
        if files:
            tests.append(Part("tests", member.name, files))
        benchmarks += [
            Part("benchmark", member.name, (file,))
            for file in sorted(member.benchmarks.glob("bench_*.py"))
            if is_kernel_benchmark(file.read_text(encoding="utf-8"))
        ]
    return tests + benchmarks


def is_kernel_benchmark(text: str) -> bool:
    """Say whether a benchmark has a function `run(device, seconds)`."""
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name == "run"
        and {"device", "seconds"} <= {argument.arg for argument in node.args.args + node.args.kwonlyargs}
        for node in ast.parse(text).body
    )


def write_stand_ins(folder: Path, house: workspace.Workspace, missing: Sequence[str]) -> None:
    """Write what the packages need to run from their source folders.

    Args:
        folder: Where to write; goes on `PYTHONPATH`.
        house: The workspace, whose members get the metadata that an installed distribution would have.
        missing: Libraries that this machine lacks.
    """
    for member in house.members:
        info = folder / f"{member.module}-{member.version}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {member.name}\nVersion: {member.version}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
    if "jaxtyping" in missing:
        (folder / "jaxtyping.py").write_text(JAXTYPING, encoding="utf-8")
    if "hypothesis" in missing:
        (folder / "hypothesis").mkdir()
        (folder / "hypothesis" / "__init__.py").write_text(HYPOTHESIS, encoding="utf-8")
        (folder / "hypothesis" / "strategies.py").write_text(STRATEGIES, encoding="utf-8")


def run_process(command: Sequence[str], environment: Mapping[str, str], limit_s: float, log: Path) -> int | None:
    """Run a command and end it, with everything that it started, when its time is over.

    Args:
        command: Program and arguments.
        environment: The whole environment.
        limit_s: Seconds that it may take.
        log: File for what it prints.

    Returns:
        Its exit code, None if it was ended.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Its own session, so the group is the process and its children and nobody else.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def probe(environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Ask a process of this Python what the machine has.

    Returns:
        `device`, `versions` and `missing`, and `error` if torch or the driver fails or hangs.
    """
    log = folder / "probe.log"
    code = run_process([sys.executable, "-P", "-c", PROBE], environment, PROBE_S, log)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    if code == 0:
        found: dict[str, Any] = json.loads(lines[-1])
    else:
        reason = f"no answer within {PROBE_S:.0f} s" if code is None else lines[-1]
        found = {"device": {"name": "unknown"}, "versions": {"python": platform.python_version()}, "missing": []}
        found["error"] = f"torch does not start: {reason}"
    found["device"]["driver"] = _driver()
    return found


def _driver() -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip().partition("\n")[0] or None
    return None


def run_part(part: Part, options: Mapping[str, Any], environment: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """Run one part in a process of its own.

    Args:
        part: What to run.
        options: `device`, `measure_s` for a benchmark at most, `arguments` for pytest, `folder` for temporary files.
        environment: The whole environment of the process.
        limit_s: Seconds that the part may take.

    Returns:
        The part's record in the report: outcome (`passed`, `failed`, `killed`), seconds, the last lines that it
        printed if something is wrong, and its tests or its figures.
    """
    folder = Path(options["folder"])
    events, log = folder / "events.jsonl", folder / "part.log"
    events.unlink(missing_ok=True)
    job = {
        "kind": part.kind,
        "files": [str(file) for file in part.files],
        "events": str(events),
        "device": options["device"],
        "seconds": max(1.0, min(options["measure_s"], 0.5 * (limit_s - START_S))),
        "arguments": options["arguments"],
    }
    command = [sys.executable, __file__, "--worker", json.dumps(job)]
    start = time.monotonic()
    code = run_process(command, environment, limit_s, log)
    seen = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()] if events.is_file() else []
    record: dict[str, Any] = {
        "kind": part.kind,
        "member": part.member,
        "files": [file.name for file in part.files],
        "outcome": "killed" if code is None else "failed" if code else "passed",
        "seconds": round(time.monotonic() - start, 2),
    }
    if part.kind == "tests":
        record["tests"] = collect_tests(seen)
    else:
        record["figures"] = next((event["figures"] for event in seen if "figures" in event), None)
    if code is None:
        record["detail"] = f"killed after {limit_s:.0f} s"
    if code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        record["output"] = lines[-40:]
    return record


def collect_tests(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn what a test process wrote while it ran into one record per test.

    Args:
        events: `started` before each test, then its outcome; the last test has no outcome if it was killed.

    Returns:
        Records with `id`, `outcome` (`passed`, `failed`, `skipped`, `killed`), `seconds` and, unless it passed, the
        reason.
    """
    records: dict[str, dict[str, Any]] = {}
    for event in events:
        if "started" in event:
            records[event["started"]] = {"id": event["started"], "outcome": "killed", "seconds": None}
        elif "test" in event:
            record = records.setdefault(event["test"], {"id": event["test"]})
            record.update(outcome=event["outcome"], seconds=event["seconds"])
            if event["detail"]:
                record["detail"] = event["detail"]
    return list(records.values())


def work(job: Mapping[str, Any]) -> int:
    """Do one part in this process; what `--worker` calls.

    Returns:
        Exit code: 0 if every test passed or was skipped, or the benchmark ran.
    """
    events = Path(job["events"])
    # Python put this script's folder on the path, where its neighbours would hide modules of the same name.
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parent)]

    def emit(event: Mapping[str, Any]) -> None:
        with events.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(event, allow_nan=False) + "\n")

    if job["kind"] == "benchmark":
        file = Path(job["files"][0])
        sys.path.insert(0, str(file.parent))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None, "a .py file has a loader"
        assert spec.loader is not None, "likewise"
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
        emit({"figures": plain(module.run(device=job["device"], seconds=job["seconds"]))})
        return 0
    import pytest

    class Recorder:
        """Writes each outcome at once, so that a killed process leaves what it had."""

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
            emit({"started": item.nodeid})
            return (yield)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                detail = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-2000:]
                emit(_outcome(report.nodeid, report.outcome, round(report.duration, 3), detail))

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                emit(_outcome(report.nodeid, "failed", 0.0, report.longreprtext[-2000:]))
            elif report.skipped:
                emit(_outcome(report.nodeid, "skipped", 0.0, str(report.longrepr)[-2000:]))

    return int(pytest.main([*job["arguments"], *job["files"]], plugins=[Recorder()]))


def _outcome(test: str, outcome: str, seconds: float, detail: str) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "seconds": seconds, "detail": detail}


def plain(value: Any) -> Any:
    """Turn a benchmark's figures into what JSON holds; a number that is not finite becomes its name."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def pytest_arguments(missing: Sequence[str], house: workspace.Workspace) -> tuple[list[str], str | None]:
    """Choose the plugins of the test processes.

    Args:
        missing: Libraries that this machine lacks.
        house: The workspace.

    Returns:
        Arguments for pytest, and what the tests go without because of what is missing, None if nothing.
    """
    arguments = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--continue-on-collection-errors"]
    arguments += ["-c", os.devnull, "--rootdir", str(house.root)]
    testing = house.find("separata-testing")
    if testing is None or not (testing.source / "plugin.py").is_file():
        return arguments, "the fixtures of separata-testing, which this workspace does not have"
    arguments += ["-p", "separata_testing.plugin"]
    if {"beartype", "jaxtyping"} & set(missing):
        return [*arguments, "--typecheck", "none"], "the check of annotations, which needs jaxtyping and beartype"
    return arguments, None


def environment_of(house: workspace.Workspace, stand_ins: Path, interpret: bool) -> dict[str, str]:
    """Make the environment of the processes: sources and stand-ins on the path, no plugin but those named, no network.

    Args:
        house: The workspace.
        stand_ins: Folder of `write_stand_ins`.
        interpret: Run kernels in Triton's interpreter.
    """
    path = [str(stand_ins), *(str(member.source.parent) for member in house.members)]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # The same for every run on a machine, so that a second one does not compile again.
    environment.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "separata-triton-cache"))
    environment |= {
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return environment | ({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if interpret else {})


def verdict(report: Mapping[str, Any]) -> bool:
    """Say whether everything ran and passed; in a dry run a test may be skipped for want of a GPU."""
    tests = [test for part in report["parts"] for test in part.get("tests", ())]
    allowed = {"passed", "skipped"} if report["mode"] == "interpreter" else {"passed"}
    return (
        not report["errors"]
        and bool(report["parts"])
        and all(part["outcome"] == "passed" for part in report["parts"])
        and all(test["outcome"] in allowed for test in tests)
    )


def save(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def summary(record: Mapping[str, Any]) -> str:
    """Say in one line what became of a part."""
    tests = record.get("tests", ())
    counts = {outcome: sum(test["outcome"] == outcome for test in tests) for outcome in ("passed", "failed", "skipped")}
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    name = f"{record['member']} {' '.join(record['files'])}"
    return f"{record['outcome']:<8}{record['seconds']:>7.1f} s  {name}{f' ({told})' if told else ''}"


def check(house: workspace.Workspace, out: Path, dry_run: bool, limit_s: float) -> dict[str, Any]:
    """Run everything and write the report.

    Args:
        house: The workspace.
        out: Where the report goes; it is rewritten after every part.
        dry_run: Run on the CPU in Triton's interpreter instead of on a GPU.
        limit_s: Seconds for everything together.

    Returns:
        The report.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="separata-gpu-") as name:
        folder = Path(name)
        stand_ins = folder / "stand-ins"
        stand_ins.mkdir()
        environment = environment_of(house, stand_ins, dry_run)
        found = probe(environment, folder)
        write_stand_ins(stand_ins, house, found["missing"])
        arguments, without = pytest_arguments(found["missing"], house)
        report: dict[str, Any] = {
            "version": 1,
            "mode": "interpreter" if dry_run else "gpu",
            **{key: found[key] for key in ("device", "versions", "missing")},
            "errors": [found["error"]] if "error" in found else [],
            "without": [without] if without else [],
            "parts": [],
        }
        report["errors"] += [f"{name} is missing" for name in ("torch", "triton", "pytest") if name in found["missing"]]
        if not dry_run and not report["errors"] and "capability" not in found["device"]:
            report["errors"].append("no CUDA device; --dry-run runs the kernels in Triton's interpreter")
        # At once, so that a place that cannot be written to costs no minutes of a GPU.
        save(out, {**report, "seconds": round(time.monotonic() - start, 1), "passed": False})
        parts = [] if report["errors"] else find_parts(house)
        if not parts and not report["errors"]:
            report["errors"].append("there is no kernel test and no kernel benchmark")
        options: dict[str, Any] = {"arguments": arguments, "folder": name}
        options |= {"device": "cpu", "measure_s": 1.0} if dry_run else {"device": "cuda", "measure_s": MEASURE_S}
        for index, part in enumerate(parts):
            # What a part leaves of its share goes to those after it.
            share = (limit_s - (time.monotonic() - start)) / (len(parts) - index)
            record = run_part(part, options, environment, share)
            report["parts"].append(record)
            print(summary(record), file=sys.stderr, flush=True)
            save(out, {**report, "seconds": round(time.monotonic() - start, 1), "passed": False})
    report["seconds"] = round(time.monotonic() - start, 1)
    report["passed"] = verdict(report)
    save(out, report)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `--help`."""
    parser = argparse.ArgumentParser(
        description="Run every kernel test and benchmark on this machine's GPU and write one JSON file; exit code 0 "
        "only if everything ran and passed. Installs nothing, fetches nothing.",
        epilog="example: python3 tools/gpu_check.py --out gpu.json",
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="the report (gpu_check.json)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="for everything together (290)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, in Triton's interpreter")
    parser.add_argument("--root", type=Path, default=workspace.ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return work(options.worker)
    if not options.limit > 0:
        return workspace.fail(f"--limit must be more than 0 seconds, it is {options.limit:g}", 2)
    try:
        house = workspace.Workspace.load(options.root)
        report = check(house, options.out, options.dry_run, options.limit)
    except (workspace.WorkspaceError, OSError) as error:
        return workspace.fail(str(error), 1)
    for line in report["errors"]:
        workspace.fail(line, 1)
    print(f"{'passed' if report['passed'] else 'not passed'} in {report['seconds']:.0f} s; report in {options.out}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
