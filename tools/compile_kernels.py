"""Compile every Triton kernel of the workspace for sm_80 and sm_90, without a GPU, and report what each one uses.

A module in a folder `kernels/` says with `compile_cases()` which specialisations are worth compiling; see
`separata_core.internal.kernels.KernelCase`. Pointers are taken to be aligned to 16 bytes, as those of fresh tensors
are. A kernel that does not compile, spills registers or needs more shared memory than the architecture has is a
finding, and so is a kernel that no case compiles. A case may allow spills with an attribute `spill_bytes`.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workspace

# Bytes of shared memory that one block can opt in to.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
TIMEOUT_S = 600


@dataclass(frozen=True)
class Result:
    """What became of one case on one architecture.

    Attributes:
        module: Dotted name of the module that holds the kernel.
        case: Name of the case; empty when the finding is about the module.
        arch: Compute capability, 80 or 90; 0 when the finding is about the module or the case.
        registers: Registers per thread.
        spill_bytes: Bytes per thread that are spilled to memory, the larger of stores and loads.
        shared_bytes: Shared memory per block.
        seconds: Time that the compiler took; next to nothing when its cache had the kernel.
        findings: What is wrong; empty if nothing is.
    """

    module: str
    case: str = ""
    arch: int = 0
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    seconds: float = 0.0
    findings: tuple[str, ...] = ()


def parse_ptxas(log: str) -> tuple[int, int, int]:
    """Read what the assembler says about a kernel.

    Args:
        log: Output of `ptxas -v`.

    Returns:
        Registers per thread, bytes spilled per thread, bytes of static shared memory per block. Functions that were
        not inlined count as well: the most registers, the sum of the spills.

    Raises:
        ValueError: The log holds no such line.
    """
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    if not registers:
        raise ValueError(f"no register count in the assembler's output: {log.strip()[:200]!r}")
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    shared = [int(number) for number in re.findall(r"(\d+) bytes smem", log)]
    return max(registers), sum(max(int(stores), int(loads)) for stores, loads in spills), max(shared, default=0)


def judge(registers: int, spill_bytes: int, shared_bytes: int, arch: int, spill_allowed: int) -> tuple[str, ...]:
    """Hold a compiled kernel against the limits.

    Args:
        registers: Registers per thread.
        spill_bytes: Bytes spilled per thread.
        shared_bytes: Shared memory per block.
        arch: Compute capability.
        spill_allowed: Bytes per thread that the case allows to be spilled.

    Returns:
        One phrase per limit that is exceeded.
    """
    found = []
    if spill_bytes > spill_allowed:
        found.append(f"spills {spill_bytes} bytes at {registers} registers, {spill_allowed} are allowed")
    if shared_bytes > SHARED_BYTES[arch]:
        found.append(f"needs {shared_bytes} bytes of shared memory, sm_{arch} has {SHARED_BYTES[arch]}")
    return tuple(found)


def compile_module(module: str, source: Path, cache: Path) -> list[Result]:
    """Compile every case of one module. Changes `sys.path` and the environment, so it is for a process of its own.

    Args:
        module: Dotted name.
        source: Folder that goes on `sys.path` to import it.
        cache: Folder for Triton's cache and the assembler's output.

    Returns:
        A result for every case and architecture, or one with a finding if the module itself is wrong.
    """
    # The assembler's output is the only place that tells spills apart from other uses of local memory.
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    # Under the interpreter `triton.jit` gives something that has no machine code.
    os.environ.pop("TRITON_INTERPRET", None)
    # Triton's default until 3.10; unset, it warns.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    sys.path.insert(0, str(source))
    try:
        loaded = importlib.import_module(module)
        if not hasattr(loaded, "compile_cases"):
            return [Result(module, findings=("has kernels but no compile_cases()",))]
        cases = list(loaded.compile_cases())
    except Exception as error:
        return [Result(module, findings=(f"{type(error).__name__}: {_one_line(error)}",))]
    missing = uncovered(vars(loaded), [case.fn for case in cases], module)
    results = [Result(module, findings=(f"kernel {name!r} is in no compile case",)) for name in missing]
    return results + [compile_case(module, case, arch, cache) for case in cases for arch in SHARED_BYTES]


def uncovered(namespace: dict[str, Any], compiled: Sequence[Any], module: str) -> list[str]:
    """Name the kernels of a module that no case compiles, neither as such nor as a function that another one calls.

    Args:
        namespace: The module's global names.
        compiled: The `triton.jit` functions of the cases.
        module: Dotted name of the module, to pass over what it imports.

    Returns:
        Names, sorted.
    """
    kernels = {
        kernel.__name__: kernel
        for kernel in map(_unwrap, namespace.values())
        if hasattr(kernel, "src") and hasattr(kernel, "arg_names") and kernel.__module__ == module
    }
    reached = {_unwrap(kernel).__name__ for kernel in compiled}
    pending = list(reached & kernels.keys())
    while pending:
        words = set(re.findall(r"\w+", kernels[pending.pop()].src))
        called = (words & kernels.keys()) - reached
        reached |= called
        pending += called
    return sorted(kernels.keys() - reached)


def _unwrap(kernel: Any) -> Any:
    # Autotuners and heuristics hold the function that they wrap as `fn`; a jit function holds a plain one.
    while hasattr(kernel, "fn") and hasattr(kernel.fn, "arg_names"):
        kernel = kernel.fn
    return kernel


def compile_case(module: str, case: Any, arch: int, cache: Path) -> Result:
    """Compile one case for one architecture.

    Args:
        module: Dotted name of the module that holds it.
        case: A `KernelCase`.
        arch: Compute capability, 80 or 90.
        cache: Folder for the assembler's output.

    Returns:
        The result; whatever the compiler raises is a finding in it.
    """
    import triton  # type: ignore[import-untyped]  # Triton ships no types
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]  # triton ships no types

    start = time.perf_counter()
    try:
        names = list(case.fn.arg_names)
        if set(names) != case.signature.keys() | case.constexprs.keys():
            odd = sorted(set(names) ^ (case.signature.keys() | case.constexprs.keys()))
            raise ValueError(f"signature and constexprs do not match the kernel's arguments: {', '.join(odd)}")  # noqa: TRY301  (one place turns every error into a finding)
        signature = {name: case.signature.get(name, "constexpr") for name in names}
        aligned = {
            (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name].startswith("*")
        }
        source = triton.compiler.ASTSource(case.fn, signature, dict(case.constexprs), aligned)
        target = GPUTarget("cuda", arch, 32)
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
        with contextlib.redirect_stdout(io.StringIO()) as output:
            compiled = triton.compile(source, target=target, options=options)
        saved = cache / "ptxas" / f"{compiled.metadata.hash}.log"
        if not output.getvalue() and not saved.is_file():
            # Triton had the kernel in its cache, from before this script saved what the assembler says.
            os.environ["TRITON_ALWAYS_COMPILE"] = "1"
            with contextlib.redirect_stdout(io.StringIO()) as output:
                compiled = triton.compile(source, target=target, options=options)
            del os.environ["TRITON_ALWAYS_COMPILE"]
        if output.getvalue():
            saved.parent.mkdir(parents=True, exist_ok=True)
            temporary = saved.with_suffix(f".{os.getpid()}")
            temporary.write_text(output.getvalue(), encoding="utf-8")
            temporary.replace(saved)
        registers, spills, static = parse_ptxas(saved.read_text(encoding="utf-8"))
    except Exception as error:
        return Result(module, case.name, arch, findings=(f"{type(error).__name__}: {_one_line(error)}",))
    shared = static + int(compiled.metadata.shared)
    findings = judge(registers, spills, shared, arch, int(getattr(case, "spill_bytes", 0)))
    seconds = time.perf_counter() - start
    return Result(module, case.name, arch, registers, spills, shared, seconds, findings)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


def find_modules(members: Iterable[workspace.Member]) -> list[tuple[str, Path]]:
    """List the modules in `kernels` folders that hold Triton kernels.

    Args:
        members: Where to look.

    Returns:
        Dotted name and the folder to import it from, sorted.
    """
    found = []
    for member in members:
        for name, path in member.modules().items():
            text = path.read_text(encoding="utf-8")
            if "kernels" in name.split(".")[:-1] and ("triton.jit" in text or "def compile_cases" in text):
                found.append((name, member.source.parent))
    return sorted(found)


def compile_apart(module: str, source: Path, cache: Path) -> list[Result]:
    """Compile one module in a process of its own, which a crash of the compiler takes down alone.

    Args:
        module: Dotted name.
        source: Folder that goes on `sys.path` to import it.
        cache: Folder for what can be reused.

    Returns:
        What `compile_module` returns there, or one result that says how the process ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        command = [sys.executable, __file__, "--worker", module, str(source), str(out), "--cache", str(cache)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return [Result(module, findings=(f"was still compiling after {TIMEOUT_S} s",))]
        if done.returncode or not out.is_file():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            return [Result(module, findings=(f"the compiler's process ended with {done.returncode}: {last}",))]
        records = json.loads(out.read_text(encoding="utf-8"))
    return [Result(**{**record, "findings": tuple(record["findings"])}) for record in records]


def table(results: Iterable[Result]) -> str:
    """Lay the results out, one line each."""
    lines = [f"{'kernel':<64}{'arch':>6}{'regs':>6}{'spill':>7}{'shared':>8}{'s':>7}"]
    for one in results:
        name = f"{one.module}: {one.case}" if one.case else one.module
        if one.arch and not (one.findings and not one.registers):
            lines.append(
                f"{name:<64}{one.arch:>6}{one.registers:>6}{one.spill_bytes:>7}{one.shared_bytes:>8}{one.seconds:>7.2f}"
            )
        lines += [f"{name}{f' sm_{one.arch}' if one.arch else ''}: {finding}" for finding in one.findings]
    return "\n".join(lines)


def write_json(path: Path, results: Sequence[Result]) -> None:
    """Write the report to a file, whole or not at all."""
    import triton

    report = {"version": 1, "triton": triton.__version__, "kernels": [dataclasses.asdict(one) for one in results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `--help`."""
    parser = argparse.ArgumentParser(
        description="Compile every Triton kernel for sm_80 and sm_90 without a GPU; exit code 1 if one is not sound.",
        epilog="example: python tools/compile_kernels.py separata-core --out .build/kernels.json",
    )
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="distribution or module names; all by default")
    parser.add_argument("--out", type=Path, help="write the report as JSON to this file")
    parser.add_argument("--cache", type=Path, default=workspace.ROOT / ".build" / "kernels", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, default=workspace.ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    cache = options.cache.resolve()
    if options.worker:
        module, source, out = options.worker
        results = compile_module(module, Path(source), cache)
        Path(out).write_text(json.dumps([dataclasses.asdict(one) for one in results]), encoding="utf-8")
        return 0
    try:
        house = workspace.Workspace.load(options.root)
        members = [house.member(name) for name in options.packages] or house.members
    except workspace.WorkspaceError as error:
        return workspace.fail(str(error), 2)
    modules = find_modules(members)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(lambda found: compile_apart(found[0], found[1], cache), modules))
    results = [one for results in done for one in results]
    if options.out:
        write_json(options.out, results)
    print(table(results))
    return 1 if any(one.findings for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
