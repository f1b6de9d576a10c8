"""Measure what `import <package>` costs above torch, and which libraries it pulls in.

A user who needs one function should not wait for transformers to load. Each package is imported in processes of its
own, forked from one that has imported nothing but torch, where the package declares it, or nothing at all: what torch
costs or loads by itself is therefore not charged to the package.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workspace

BUDGET_MS = 150.0
HEAVY = frozenset(
    {"matplotlib", "pandas", "scipy", "sentence_transformers", "sklearn", "transformers", "triton", "trl"}
)
NETWORK = frozenset({"aiohttp", "httpx", "httpx2", "huggingface_hub", "openai", "requests"})
FORBIDDEN = HEAVY | NETWORK | {"vllm"}
TIMEOUT_S = 300

# Runs in the measured Python, without anything else of ours loaded. A fork costs milliseconds where a new interpreter
# would import torch again, and still starts from the same modules each time.
PROBE = """
import importlib, json, os, sys, time
base, repeats, modules = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
if base:
    importlib.import_module(base)
known = set(sys.modules)
for module in modules:
    runs = []
    for _ in range(repeats):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            result = {}
            try:
                start = time.perf_counter()
                importlib.import_module(module)
                result = {"ms": 1e3 * (time.perf_counter() - start), "loaded": sorted(set(sys.modules) - known)}
            except BaseException as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            finally:
                with os.fdopen(writer, "w") as out:
                    json.dump(result, out)
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as lines:
            runs.append(json.loads(lines.read() or '{"error": "the process died"}'))
        os.waitpid(child, 0)
    print(json.dumps({"module": module, "runs": runs}), flush=True)
"""


@dataclass(frozen=True)
class Measurement:
    """What one import cost.

    Attributes:
        module: The module.
        base: What had been imported before, `"torch"` or `""`.
        ms: Milliseconds of the fastest of several imports; 0 if it failed.
        loaded: Every module that the import loaded and `base` had not, dotted names, sorted.
        error: Why the import failed; empty if it did not.
    """

    module: str
    base: str
    ms: float
    loaded: tuple[str, ...]
    error: str = ""

    def findings(self, budget_ms: float) -> list[str]:
        """Hold the import against the budget.

        Args:
            budget_ms: Milliseconds that it may take.

        Returns:
            One phrase per finding; empty if all is well.
        """
        if self.error:
            return [f"does not import: {self.error}"]
        tops = {name.partition(".")[0] for name in self.loaded}
        found = [f"loads {name}" for name in sorted(tops & FORBIDDEN)]
        if not self.base and "torch" in tops:
            found.append("loads torch, which it does not declare")
        if self.ms > budget_ms:
            found.append(f"takes {self.ms:.0f} ms, more than {budget_ms:.0f}")
        return found


def needs_torch(member: workspace.Member, house: workspace.Workspace) -> bool:
    """Say whether a member declares torch, itself or through another member that it requires."""
    seen: set[str] = set()
    pending = [member]
    while pending:
        current = pending.pop()
        seen.add(current.name)
        for requirement in current.dependencies:
            name = workspace.requirement_name(requirement)
            other = house.find(name)
            if name == "torch":
                return True
            if other is not None and other.name not in seen:
                pending.append(other)
    return False


def measure(python: str, base: str, modules: Sequence[str], repeats: int) -> list[Measurement]:
    """Import modules in fresh processes of a given Python.

    Args:
        python: The interpreter.
        base: What to import first, `"torch"` or `""` for nothing.
        modules: The modules.
        repeats: Imports per module; the fastest counts, since the others share the machine with something.

    Returns:
        One measurement per module, in their order.

    Raises:
        workspace.WorkspaceError: The interpreter does not start or cannot import `base`.
    """
    command = [python, "-P", "-c", PROBE, base, str(repeats), *modules]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise workspace.WorkspaceError(f"{python}: {error}") from error
    if done.returncode:
        last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise workspace.WorkspaceError(f"{python}: {last[-1]}")
    return [_best(base, json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"module"')]


def _best(base: str, record: dict[str, Any]) -> Measurement:
    errors = [run["error"] for run in record["runs"] if "error" in run]
    if errors:
        return Measurement(record["module"], base, 0.0, (), " ".join(errors[0].split()))
    best = min(record["runs"], key=lambda run: float(run["ms"]))
    return Measurement(record["module"], base, best["ms"], tuple(best["loaded"]))


def table(measurements: Iterable[Measurement], budget_ms: float) -> str:
    """Lay the measurements out, one line each."""
    lines = [f"{'module':<24}{'above':<8}{'ms':>8}{'modules':>9}  findings"]
    for one in measurements:
        found = "; ".join(one.findings(budget_ms)) or "none"
        lines.append(f"{one.module:<24}{one.base or 'nothing':<8}{one.ms:>8.1f}{len(one.loaded):>9}  {found}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `--help`."""
    parser = argparse.ArgumentParser(
        description="Hold `import <package>` against its budget of time and libraries; exit code 1 if one exceeds it.",
        epilog="example: .venv/bin/python tools/import_budget.py zerotuning --json",
    )
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="distribution or module names; all by default")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment to measure in")
    parser.add_argument("--repeats", type=int, default=5, help="imports per package, the fastest counts (5)")
    parser.add_argument("--budget-ms", type=float, default=BUDGET_MS, help="milliseconds above torch (150)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--root", type=Path, default=workspace.ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        return workspace.fail(f"--repeats must be at least 1, it is {options.repeats}", 2)
    try:
        house = workspace.Workspace.load(options.root)
        members = [house.member(name) for name in options.packages] or list(house.members)
    except workspace.WorkspaceError as error:
        return workspace.fail(str(error), 2)
    measurements: list[Measurement] = []
    try:
        for base in ("", "torch"):
            modules = [member.module for member in members if needs_torch(member, house) == bool(base)]
            if modules:
                measurements += measure(options.python, base, modules, options.repeats)
    except workspace.WorkspaceError as error:
        return workspace.fail(str(error), 1)
    failed = any(one.findings(options.budget_ms) for one in measurements)
    if options.json:
        records = [
            {
                "module": one.module,
                "above": one.base or None,
                "ms": round(one.ms, 2),
                "loaded": list(one.loaded),
                "findings": one.findings(options.budget_ms),
            }
            for one in measurements
        ]
        print(json.dumps({"version": 1, "budget_ms": options.budget_ms, "imports": records}, indent=2))
    else:
        print(table(measurements, options.budget_ms))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
