"""Time and peak memory of `vocab_log_probs` against the plain path, which builds the logits and their log-softmax.

Time: both take turns, after one turn each that is not counted, and medians are compared. Memory on a CPU: each runs
once in a fresh process; what counts is the process's peak resident set (VmHWM of Linux; `ru_maxrss` would start from
that of the parent process) less its resident set just before the call, which holds inputs and libraries. Memory on a
GPU: the peak of torch's allocator less what was allocated before. On a GPU liger-kernel's fused linear cross entropy,
where it is installed, is a second peer.

    python bench_vocab.py --threads 1 --seconds 120 --json vocab.json
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from separata_core.vocab import vocab_entropy, vocab_log_probs, vocab_topk
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """What is computed; `task` is log_probs, train (log_probs and both gradients), hidden (frozen weight), ..."""

    task: str
    dtype: str
    tokens: int = 4096  # SmolLM2-135M's head
    vocab: int = 49152
    dim: int = 576

    def __str__(self) -> str:
        return f"{self.task} {self.dtype} {self.tokens}x{self.vocab}x{self.dim}"


CPU_CASES = [
    *(Case(task, dtype) for dtype in ("float32", "bfloat16") for task in ("log_probs", "train")),
    *(Case(task, "float32", tokens=1024) for task in ("hidden", "entropy", "topk")),
]
GPU_CASES = [
    Case(task, dtype, **shape)
    for shape in [{}, {"tokens": 8192, "vocab": 128256, "dim": 4096}]
    for task, dtype in [
        ("log_probs", "bfloat16"),
        ("train", "bfloat16"),
        ("entropy", "bfloat16"),
        ("log_probs", "float32"),
    ]
]


def inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    # Filled in place: no larger tensor may come and go before the memory measurement starts.
    hidden = torch.empty(case.tokens, case.dim, dtype=dtype, device=device).normal_()
    weight = torch.empty(case.vocab, case.dim, dtype=dtype, device=device).normal_(std=2 * case.dim**-0.5)
    targets = torch.randint(case.vocab, (case.tokens,), device=device)
    hidden.requires_grad_(case.task in ("train", "hidden"))
    weight.requires_grad_(case.task == "train")
    return hidden, weight, targets


def ours(case: Case, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    hidden.grad = weight.grad = None
    if case.task == "entropy":
        vocab_entropy(hidden, weight)
    elif case.task == "topk":
        vocab_topk(hidden, weight, 10)
    else:
        log_probs = vocab_log_probs(hidden, weight, targets)
        if case.task != "log_probs":
            log_probs.mean().backward()


def plain(case: Case, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    hidden.grad = weight.grad = None
    log_softmax = torch.log_softmax(hidden @ weight.T, -1)
    if case.task == "entropy":
        -(log_softmax.exp() * log_softmax).sum(-1)
    elif case.task == "topk":
        log_softmax.topk(10)
    else:
        log_probs = log_softmax.gather(1, targets[:, None])[:, 0]
        if case.task != "log_probs":
            log_probs.mean().backward()


def liger(case: Case, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    hidden.grad = weight.grad = None
    loss = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets)
    (loss[0] if isinstance(loss, tuple) else loss).backward()


SIDES: dict[str, Callable[..., None]] = {"separata": ours, "plain": plain, "liger": liger}


def peers(case: Case, device: str) -> list[str]:
    """Who is measured beside us; says on standard error who is not and why."""
    names = ["plain"]
    if case.task == "train":
        reason = None if device == "cuda" else "its Triton kernels need a GPU"
        try:
            import liger_kernel  # noqa: F401 -- only whether it is there
        except ImportError:
            reason = "not installed"
        if reason is None:
            names.append("liger")
        else:
            print(f"{case}: liger-kernel skipped: {reason}", file=sys.stderr)
    return names


def times(case: Case, names: list[str], device: str, seconds: float) -> dict[str, float]:
    tensors = inputs(case, device)
    measured: dict[str, list[float]] = {name: [] for name in names}
    stop = time.perf_counter() + seconds
    turn = 0
    while turn < 4 or time.perf_counter() < stop:
        for name in names:
            start = time.perf_counter()
            SIDES[name](case, *tensors)
            if device == "cuda":
                torch.cuda.synchronize()
            if turn > 0:
                measured[name].append(time.perf_counter() - start)
        turn += 1
    return {name: statistics.median(values) for name, values in measured.items()}


def peak_bytes(case: Case, name: str, device: str) -> int:
    if device == "cuda":
        tensors = inputs(case, device)
        SIDES[name](case, *tensors)
        tensors[0].grad = tensors[1].grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        SIDES[name](case, *tensors)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    command = [sys.executable, __file__, "--memory", name, "--threads", str(torch.get_num_threads())]
    command += ["--case", json.dumps(case.__dict__)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def resident_growth(case: Case, name: str) -> int:
    """Bytes by which one call raises the peak of this process above what it holds before."""
    small = Case(case.task, case.dtype, tokens=2, vocab=16, dim=16)
    SIDES[name](small, *inputs(small, "cpu"))  # loads the libraries' code
    tensors = inputs(case, "cpu")
    before = _resident("VmRSS")
    SIDES[name](case, *tensors)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def run(device: str, seconds: float) -> list[dict[str, Any]]:
    """Measures all cases on "cpu" or "cuda" in about `seconds`, but at least three counted turns each.

    A CPU that is given less than a second for each case gets an eighth of the tokens, which the names then say.
    """
    cases = CPU_CASES if device == "cpu" else GPU_CASES
    if device == "cpu" and seconds < len(cases):
        cases = [replace(case, tokens=case.tokens // 8) for case in cases]
    results = []
    for case in cases:
        names = ["separata", *peers(case, device)]
        seconds_of = times(case, names, device, seconds / len(cases))
        bytes_of = {name: peak_bytes(case, name, device) for name in names}
        for quantity, unit, scale, values in (
            ("time", "ms", 1e3, seconds_of),
            ("peak memory", "MiB", 2**-20, bytes_of),
        ):
            results.extend(
                {
                    "name": f"{case} {quantity}",
                    "value": round(values["separata"] * scale, 3),
                    "unit": unit,
                    "peer": f"{peer}: {values[peer] * scale:.3f}",
                    "ratio": round(values["separata"] / values[peer], 4),
                }
                for peer in names[1:]
            )
    return results


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{torch.get_num_threads()} of {os.cpu_count()} cores of {model} (CPU only)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=120.0, help="time to spend on timing, about")
    parser.add_argument("--threads", type=int, help="threads of the CPU; default: torch's own")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--memory", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.memory:
        print(resident_growth(Case(**args.case), args.memory))
        return
    results = run(args.device, args.seconds)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    report = {"benchmark": "vocab", "machine": machine(args.device), "versions": versions, "results": results}
    print(f"{report['machine']}, torch {torch.__version__}")
    for result in results:
        ours_is = f"{result['value']:.1f} {result['unit']}"
        print(f"{result['name']:<52} {ours_is:>14}   {result['peer']:<22} {result['ratio']:.3f}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
