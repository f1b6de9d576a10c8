import json
import subprocess
import sys
import textwrap
from pathlib import Path

import compile_kernels
import pytest

pytest.importorskip("triton", reason="Triton is what compiles")

# No module of ours is needed: a case is whatever has these attributes.
KERNELS = """
from types import SimpleNamespace
import triton
import triton.language as tl


@triton.jit
def helper(x):
    return x + 1


@triton.jit
def add_one(x_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < n)
    tl.store(x_ptr + index, helper(x), mask=index < n)


@triton.jit
def column_sum(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :])
    tl.store(out_ptr + columns, tl.sum(x, 0))
    tl.store(x_ptr + columns[:, None] * ROWS + rows[None, :], tl.trans(x))


def case(name, fn, signature, constexprs, **more):
    return SimpleNamespace(
        name=name, fn=fn, signature=signature, constexprs=constexprs, num_warps=4, num_stages=2, **more
    )


"""
SOUND = """
def compile_cases():
    return [
        case("add_one fp32", add_one, {"x_ptr": "*fp32", "n": "i32"}, {"BLOCK": 128}),
        case("sum 64x64", column_sum, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"ROWS": 64, "COLUMNS": 64}),
    ]
"""


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def house(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.uv.workspace]\nmembers = ["packages/*"]\n')
    return tmp_path


def member(house, name, code):
    """Adds a member whose modules have names that no other test has imported."""
    folder = house / "packages" / name
    kernels = folder / "src" / name / "kernels"
    kernels.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "0.1.0"\n')
    for path in (kernels.parent / "__init__.py", kernels / "__init__.py"):
        path.write_text("")
    (kernels / "ops.py").write_text(code)
    return folder / "src"


@pytest.fixture
def compile_here(house, cache, monkeypatch):
    """Compiles a member's module in this process."""

    def run(name, code):
        for variable in ("TRITON_DUMP_PTXAS_LOG", "TRITON_CACHE_DIR", "TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION"):
            monkeypatch.setenv(variable, "1")
        monkeypatch.setattr(sys, "path", list(sys.path))
        return compile_kernels.compile_module(f"{name}.kernels.ops", member(house, name, code), cache)

    return run


def test_sound_kernels_compile_for_both_architectures(compile_here):
    results = compile_here("kernels_sound", KERNELS + SOUND)
    assert [one.findings for one in results] == [()] * 4
    assert [(one.case, one.arch) for one in results] == [
        *(("add_one fp32", arch) for arch in (80, 90)),
        *(("sum 64x64", arch) for arch in (80, 90)),
    ]
    assert all(8 <= one.registers <= 255 for one in results)
    # Transposing moves the tile through shared memory, adding one does not.
    assert [one.shared_bytes > 0 for one in results] == [False, False, True, True]


def test_cached_kernel_reports_the_same(compile_here, cache):
    def figures(results):
        return [(one.registers, one.spill_bytes, one.shared_bytes, one.findings) for one in results]

    code = KERNELS + SOUND
    first = figures(compile_here("kernels_first", code))
    assert figures(compile_here("kernels_again", code)) == first
    for log in (cache / "ptxas").iterdir():
        log.unlink()
    assert figures(compile_here("kernels_third", code)) == first


def spilling(allowed):
    # A tile of 256 x 256 has 512 numbers for each of 128 threads, twice what fits into registers.
    shape = '{"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"ROWS": 256, "COLUMNS": 256}'
    add = 'case("add", add_one, {"x_ptr": "*fp32", "n": "i32"}, {"BLOCK": 128})'
    return KERNELS + f"def compile_cases():\n    return [{add}, case('big', column_sum, {shape}{allowed})]\n"


def test_spills_and_shared_memory_are_findings(compile_here):
    big = [one for one in compile_here("kernels_big", spilling("")) if one.case == "big"]
    assert all(one.spill_bytes > 0 for one in big)
    assert all(any(text.startswith("spills") for text in one.findings) for one in big)


def test_case_may_allow_spills(compile_here):
    results = compile_here("kernels_allowed", spilling(", spill_bytes=100000"))
    assert not any(text.startswith("spills") for one in results for text in one.findings)
    assert any(one.spill_bytes for one in results)


@pytest.mark.parametrize(
    ("name", "cases", "finding"),
    [
        ("kernels_none", "", "has kernels but no compile_cases()"),
        ("kernels_broken", "1 / 0", "ZeroDivisionError"),
        (
            "kernels_short",
            'def compile_cases():\n    return [case("a", add_one, {"x_ptr": "*fp32"}, {"BLOCK": 128})]\n',
            "signature and constexprs do not match the kernel's arguments: n",
        ),
        (
            "kernels_wrong",
            'def compile_cases():\n    return [case("a", add_one, {"x_ptr": "fp32", "n": "i32"}, {"BLOCK": 128})]\n',
            "CompilationError",
        ),
        (
            "kernels_part",
            'def compile_cases():\n    return [case("a", add_one, {"x_ptr": "*fp32", "n": "i32"}, {"BLOCK": 128})]\n',
            "kernel 'column_sum' is in no compile case",
        ),
    ],
)
def test_wrong_modules_are_findings(compile_here, name, cases, finding):
    findings = [text for one in compile_here(name, KERNELS + cases) for text in one.findings]
    assert any(finding in text for text in findings), findings
    assert not any("helper" in text for text in findings)


def run(house, cache, *arguments):
    return compile_kernels.main(["--root", str(house), "--cache", str(cache), *arguments])


def test_report_of_a_whole_workspace(house, cache, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    member(house, "kernels_one", KERNELS + SOUND)
    member(house, "kernels_crash", "import os\nimport triton.language\nos.abort()\ndef compile_cases(): ...\n")
    out = house / "deep" / "report.json"
    assert run(house, cache, "--out", str(out)) == 1
    printed = capsys.readouterr().out
    assert "kernels_crash.kernels.ops: the compiler's process ended with -6" in printed
    kernels = json.loads(out.read_text())["kernels"]
    assert [one["arch"] for one in kernels if one["module"] == "kernels_one.kernels.ops"] == [80, 90, 80, 90]
    assert [path.name for path in out.parent.iterdir()] == ["report.json"]
    assert run(house, cache, "kernels-one") == 0


def test_hung_compiler_is_a_finding(house, cache, monkeypatch):
    monkeypatch.setattr(compile_kernels, "TIMEOUT_S", 0.2)
    source = member(house, "kernels_hung", KERNELS + "import time\n\ntime.sleep(600)\n")
    (result,) = compile_kernels.compile_apart("kernels_hung.kernels.ops", source, cache)
    assert "still compiling after 0.2 s" in result.findings[0]


def test_workspace_without_kernels_passes(house, cache, capsys):
    member(house, "kernels_plain", "def plain(): ...\n")
    assert run(house, cache) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_unknown_package_is_wrong_usage(house, cache, capsys):
    member(house, "kernels_known", "")
    assert run(house, cache, "kernels-knwn") == 2
    assert "did you mean 'kernels_known'" in capsys.readouterr().err


LOG = """
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    64 bytes stack frame, 32 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem
"""


def test_assembler_output_is_read():
    assert compile_kernels.parse_ptxas(LOG) == (168, 48, 1024)
    with pytest.raises(ValueError, match="no register count"):
        compile_kernels.parse_ptxas("ptxas fatal")


@pytest.mark.parametrize(
    ("arch", "shared", "count"), [(80, 166912, 0), (80, 166913, 1), (90, 232448, 0), (90, 232449, 1)]
)
def test_shared_memory_limit_is_what_a_block_can_opt_in_to(arch, shared, count):
    assert len(compile_kernels.judge(32, 0, shared, arch, 0)) == count


def test_help_shows_an_example():
    script = Path(compile_kernels.__file__)
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, check=True)
    assert "example: python tools/compile_kernels.py" in " ".join(textwrap.dedent(done.stdout).split())
