import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_check
import pytest
import workspace

TESTS = """
import os
import pytest

def test_fine():
    assert os.environ["HF_HUB_OFFLINE"] == "1"

@pytest.mark.parametrize("value", [1, 2])
def test_each(value):
    import alpha
    from importlib.metadata import version
    assert alpha.double(value) == 2 * value
    assert version("alpha") == "0.1.0"
"""
BENCHMARK = """
from helper import ratio

def run(device, seconds):
    return {"device": device, "ratio": ratio(), "worst": float("inf"), "rows": [(1, None)], "enough": seconds > 0}
"""


@pytest.fixture
def house(tmp_path):
    folder = tmp_path / "house" / "packages" / "alpha"
    for name in ("src/alpha", "tests", "benchmarks"):
        (folder / name).mkdir(parents=True)
    (tmp_path / "house/pyproject.toml").write_text('[tool.uv.workspace]\nmembers = ["packages/*"]\n')
    (folder / "pyproject.toml").write_text('[project]\nname = "alpha"\nversion = "0.1.0"\n')
    (folder / "src/alpha/__init__.py").write_text("def double(value):\n    return 2 * value\n")
    return tmp_path / "house"


@pytest.fixture
def add(house):
    def write(path, text):
        (house / "packages/alpha" / path).write_text(text)

    return write


@pytest.fixture
def machine(monkeypatch):
    """What the probe answers; the real one loads torch, which takes seconds."""
    found = {"device": {"name": "CPU"}, "versions": {}, "missing": []}
    monkeypatch.setattr(gpu_check, "probe", lambda environment, folder: found)
    return found


def run(house, *arguments):
    out = house.parent / "out" / "report.json"
    code = gpu_check.main(["--root", str(house), "--out", str(out), *arguments])
    return code, json.loads(out.read_text())


def outcomes(report):
    return {test["id"].rpartition("::")[2]: test["outcome"] for part in report["parts"] for test in part["tests"]}


def test_everything_that_passes_is_reported(house, add, machine):
    add("tests/test_kernels_a.py", TESTS)
    add("tests/test_other.py", "1 / 0")
    add("benchmarks/helper.py", "def ratio():\n    return 1.5\n")
    add("benchmarks/bench_a.py", BENCHMARK)
    add("benchmarks/bench_slow.py", "def main(): ...\n")
    code, report = run(house, "--dry-run")
    tests, benchmark = report["parts"]
    assert (code, report["passed"], report["mode"]) == (0, True, "interpreter")
    assert outcomes({"parts": [tests]}) == {"test_fine": "passed", "test_each[1]": "passed", "test_each[2]": "passed"}
    assert all(test["seconds"] >= 0 for test in tests["tests"])
    assert benchmark["files"] == ["bench_a.py"]
    assert benchmark["figures"] == {
        "device": "cpu",
        "ratio": 1.5,
        "worst": "inf",
        "rows": [[1, None]],
        "enough": True,
    }


def test_failures_do_not_stop_the_rest(house, add, machine):
    add("tests/test_kernels_a.py", "def test_wrong():\n    assert 1 == 2\n\ndef test_right(): ...\n")
    add("tests/test_kernels_b.py", "import a_library_that_nobody_has\n")
    add("benchmarks/bench_a.py", "def run(device, seconds):\n    raise RuntimeError('out of memory')\n")
    code, report = run(house, "--dry-run")
    assert code == 1
    found = outcomes(report | {"parts": report["parts"][:1]})
    assert found["test_wrong"] == "failed"
    assert found["test_right"] == "passed"
    assert [part["outcome"] for part in report["parts"]] == ["failed", "failed"]
    details = [test.get("detail", "") for test in report["parts"][0]["tests"]]
    assert any("assert 1 == 2" in detail for detail in details)
    assert any("a_library_that_nobody_has" in detail for detail in details)
    assert report["parts"][1]["figures"] is None
    assert "RuntimeError: out of memory" in report["parts"][1]["output"][-1]


def test_hung_part_is_killed_with_its_children_and_the_rest_runs(house, add, machine, monkeypatch):
    child = house.parent / "child"
    add(
        "tests/test_kernels_a.py",
        "import subprocess, time\n\ndef test_quick(): ...\n\ndef test_hung():\n"
        f"    child = subprocess.Popen(['sleep', '600'])\n    open({str(child)!r}, 'w').write(str(child.pid))\n"
        "    time.sleep(600)\n",
    )
    add("benchmarks/bench_a.py", "def run(device, seconds):\n    return seconds\n")
    code, report = run(house, "--dry-run", "--limit", "16")
    assert code == 1
    assert outcomes({"parts": report["parts"][:1]}) == {"test_quick": "passed", "test_hung": "killed"}
    assert [part["outcome"] for part in report["parts"]] == ["killed", "passed"]
    assert report["parts"][0]["detail"].startswith("killed after")
    state = Path(f"/proc/{child.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_benchmarks_are_told_how_long_to_measure(house, add, machine):
    add("benchmarks/bench_a.py", "def run(device, seconds):\n    return [device, seconds]\n")
    assert run(house, "--dry-run")[1]["parts"][0]["figures"] == ["cpu", 1.0]
    machine["device"] = {"name": "some GPU", "capability": [9, 0]}
    assert run(house)[1]["parts"][0]["figures"] == ["cuda", gpu_check.MEASURE_S]
    assert run(house, "--limit", "22")[1]["parts"][0]["figures"][1] == pytest.approx(5, abs=0.5)


def test_without_a_gpu_says_what_to_do(house, add, machine, capsys):
    add("tests/test_kernels_a.py", TESTS)
    code, report = run(house)
    assert code == 1
    assert report["parts"] == []
    assert "no CUDA device; --dry-run" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_said_first(house, add, machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "run_part", lambda *_: pytest.fail("something ran"))
    add("tests/test_kernels_a.py", TESTS)
    (tmp_path / "out").mkdir()
    assert gpu_check.main(["--dry-run", "--root", str(house), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["house", "out"]


def test_on_a_gpu_a_skipped_test_has_not_run(house, add, machine):
    machine["device"] = {"name": "some GPU", "capability": [9, 0]}
    add("tests/test_kernels_a.py", "import pytest\n\ndef test_a():\n    pytest.skip('needs two of them')\n")
    code, report = run(house)
    assert (code, report["mode"]) == (1, "gpu")
    (test,) = report["parts"][0]["tests"]
    assert test["outcome"] == "skipped"
    assert "needs two of them" in test["detail"]
    assert run(house, "--dry-run")[0] == 0


@pytest.mark.parametrize("name", ["torch", "triton", "pytest"])
def test_missing_library_is_said_clearly(house, add, machine, capsys, name):
    machine["missing"] = [name]
    add("tests/test_kernels_a.py", TESTS)
    assert run(house, "--dry-run")[0] == 1
    assert f"{name} is missing" in capsys.readouterr().err


def test_nothing_to_run_is_no_success(house, machine):
    code, report = run(house, "--dry-run")
    assert code == 1
    assert report["errors"] == ["there is no kernel test and no kernel benchmark"]


def test_stand_ins_let_annotated_code_and_drawn_tests_load(house, add, machine):
    machine["missing"] = ["jaxtyping", "hypothesis"]
    add(
        "src/alpha/__init__.py",
        "from jaxtyping import Float, Int\n\n"
        "def double(x: Float[int, 'n m'] | Int[int, ''] | None):\n    return 2 * x\n",
    )
    add(
        "tests/test_kernels_a.py",
        "import alpha\nfrom hypothesis import HealthCheck, example, given, settings\n"
        "from hypothesis import strategies as st\nimport hypothesis.strategies\n\n"
        "checks = (*settings.get_profile('default').suppress_health_check, HealthCheck.too_slow)\n"
        "settings.register_profile('ci', suppress_health_check=checks)\n\n"
        "@st.composite\ndef pairs(draw):\n    return draw(st.integers())\n\n"
        "@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])\n@example(1, 2)\n"
        "@given(a=st.integers(1, 3) | st.none(), b=pairs())\ndef test_drawn(a, b): ...\n\n"
        "def test_plain():\n    assert alpha.double(2) == 4\n",
    )
    code, report = run(house, "--dry-run")
    assert outcomes(report) == {"test_drawn": "skipped", "test_plain": "passed"}
    assert code == 0


def test_plugin_is_used_with_what_it_lacks_named(house, add, machine):
    testing = house / "packages/testing/src/separata_testing"
    testing.mkdir(parents=True)
    (house / "packages/testing/pyproject.toml").write_text('[project]\nname = "separata-testing"\nversion = "0.1.0"\n')
    (testing / "__init__.py").write_text("")
    (testing / "plugin.py").write_text(
        "import pytest\n\ndef pytest_addoption(parser):\n    parser.addoption('--typecheck')\n\n"
        "@pytest.fixture\ndef checked(request):\n    return request.config.getoption('typecheck')\n"
    )
    add("tests/test_kernels_a.py", "def test_a(checked):\n    assert checked == 'none'\n")
    machine["missing"] = ["beartype"]
    code, report = run(house, "--dry-run")
    assert code == 0
    assert report["without"] == ["the check of annotations, which needs jaxtyping and beartype"]
    machine["missing"] = []
    assert run(house, "--dry-run")[1]["without"] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def run(device, seconds): ...", True),
        ("def run(device='cpu', *, seconds=1.0): ...", True),
        ("def run(seconds): ...", False),
        ("class A:\n    def run(self, device, seconds): ...", False),
        ("def main(device, seconds): ...", False),
    ],
)
def test_kernel_benchmarks_are_known_by_their_function(text, expected):
    assert gpu_check.is_kernel_benchmark(text) == expected


def test_probe_survives_a_torch_that_does_not_start(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no driver')")
    found = gpu_check.probe({**os.environ, "PYTHONPATH": str(tmp_path)}, tmp_path)
    assert "torch does not start: ImportError: no driver" in found["error"]
    assert "driver" in found["device"]


def test_probe_of_this_machine_names_versions(tmp_path, monkeypatch):
    # Loading torch takes long where other tests run beside this one.
    monkeypatch.setattr(gpu_check, "PROBE_S", 110.0)
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed; it is what the probe looks at")
    found = gpu_check.probe(dict(os.environ), tmp_path)
    assert found["versions"]["torch"].startswith(importlib.metadata.version("torch"))
    assert found["device"]["name"]


def test_limit_of_nothing_is_wrong_usage(house, capsys):
    assert gpu_check.main(["--root", str(house), "--limit", "0"]) == 2
    assert "--limit must be more than 0" in capsys.readouterr().err


def test_worker_records_in_its_own_process(house, add, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    add("benchmarks/bench_here.py", "def run(device, seconds):\n    return float('nan')\n")
    events = tmp_path / "events.jsonl"
    job = {"kind": "benchmark", "files": [str(house / "packages/alpha/benchmarks/bench_here.py")], "device": "cpu"}
    assert gpu_check.main(["--worker", json.dumps({**job, "seconds": 1, "events": str(events)})]) == 0
    assert json.loads(events.read_text()) == {"figures": "nan"}


def test_worker_writes_each_outcome_at_once(house, add, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    add("tests/test_kernels_here.py", "import pytest\n\ndef test_a(): ...\n\ndef test_b():\n    pytest.skip('why')\n")
    add("tests/test_kernels_skipped.py", "import pytest\n\npytest.skip('not here', allow_module_level=True)\n")
    add("tests/test_kernels_broken.py", "1 / 0\n")
    events = tmp_path / "events.jsonl"
    files = [str(path) for path in sorted((house / "packages/alpha/tests").iterdir())]
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:cov", "-c", os.devnull, "--continue-on-collection-errors"]
    job = {"kind": "tests", "files": files, "events": str(events), "arguments": [*arguments, "--rootdir", str(house)]}
    assert gpu_check.work(job) == 1
    written = [json.loads(line) for line in events.read_text().splitlines()]
    tests = {Path(test["id"]).name: test for test in gpu_check.collect_tests(written)}
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_kernels_broken.py": "failed",
        "test_kernels_skipped.py": "skipped",
        "test_kernels_here.py::test_a": "passed",
        "test_kernels_here.py::test_b": "skipped",
    }
    assert "ZeroDivisionError" in tests["test_kernels_broken.py"]["detail"]
    assert "why" in tests["test_kernels_here.py::test_b"]["detail"]


def test_parts_of_this_repository_are_found_without_running_them():
    for part in gpu_check.find_parts(workspace.Workspace.load()):
        assert part.kind in {"tests", "benchmark"}
        assert all(file.is_file() for file in part.files)


def test_script_runs_from_anywhere(house, tmp_path):
    script = str(Path(gpu_check.__file__))
    done = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "example: python3 tools/gpu_check.py" in " ".join(done.stdout.split())
