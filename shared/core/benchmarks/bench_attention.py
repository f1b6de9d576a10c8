"""Attention with a bias on one key against the ways to do without it.

Peers: plain `scaled_dot_product_attention` (what the bias costs), the same with the bias as an additive mask, and the
eager form that multiplies and renormalises materialised weights. All are timed in turn within one run, and the figure
is the median of the ratios. On a CPU one thread runs and its processor time is taken, so that other work on the machine
does not count.

    python shared/core/benchmarks/bench_attention.py --seconds 20 --json attention.json
"""

import argparse
import copy
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from separata_core.attention import attention_with_key_bias
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

QUERY_HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
#: Bias of the heads in turn: some left alone, some raised, some lowered, as a configuration would.
BIASES = (0.0, math.log(2.0), math.log(0.5))


def _eager(query: Tensor, key: Tensor, value: Tensor, gamma: Tensor) -> Tensor:
    """Materialised weights, column 0 multiplied, rows renormalised, on a copy of the weights as hooks return one."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows, keys = query.shape[2], key.shape[2]
    logits = query @ key.transpose(-1, -2) * HEAD_DIM**-0.5
    logits = logits + torch.full((rows, keys), -math.inf, dtype=query.dtype, device=query.device).triu(1)
    weights = torch.softmax(logits, -1, dtype=torch.float32)
    weights = copy.deepcopy(weights)
    weights[..., 0] *= gamma[:, None]
    weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(query.dtype) @ value


def _prefill(length: int, batch: int, device: str, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    generator = torch.Generator().manual_seed(length)

    def states(heads: int) -> Tensor:
        # Heads next to the head dimension in memory, as the projections of a model leave them.
        made = torch.randn(batch, length, heads, HEAD_DIM, generator=generator)
        return made.to(device, dtype).transpose(1, 2)

    query, key, value = states(QUERY_HEADS), states(KV_HEADS), states(KV_HEADS)
    bias = torch.tensor([BIASES[head % len(BIASES)] for head in range(QUERY_HEADS)], device=device)
    gamma = bias.exp()
    known = (min(BIASES), max(BIASES))

    def door(backend: str) -> Callable[[], Tensor]:
        return lambda: attention_with_key_bias(
            query, key, value, bias, is_causal=True, backend=backend, bias_range=known
        )

    calls = {
        "plain": lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
        "auto": door("auto"),
        "bias": door("bias"),
        "augmented": door("augmented"),
        "eager": lambda: _eager(query, key, value, gamma),
    }
    if device != "cpu":
        calls["correction"] = door("correction")
    return calls


def _decode(length: int, batch: int, device: str, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(batch, QUERY_HEADS, 1, HEAD_DIM, generator=generator).to(device, dtype)
    key, value = (
        torch.randn(batch, KV_HEADS, length, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(2)
    )
    bias = torch.tensor([BIASES[head % len(BIASES)] for head in range(QUERY_HEADS)], device=device)
    known = (min(BIASES), max(BIASES))
    return {
        "plain": lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True),
        "auto": lambda: attention_with_key_bias(query, key, value, bias, bias_range=known),
        "bias": lambda: attention_with_key_bias(query, key, value, bias, backend="bias"),
    }


def _times(calls: dict[str, Callable[[], Tensor]], seconds: float, device: str) -> list[dict[str, float]]:
    def once(call: Callable[[], Tensor]) -> float:
        if device == "cpu":
            start = time.process_time()
            call()
            return time.process_time() - start
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for call in calls.values():
        once(call)
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < 5 or time.perf_counter() < end:
        # The order turns, so that no call always follows the one that evicts its caches.
        names = list(calls)
        turn = len(rounds) % len(names)
        rounds.append({name: once(calls[name]) for name in names[turn:] + names[:turn]})
    return rounds


@torch.no_grad()
def run(device: str, seconds: float) -> list[dict[str, Any]]:
    """Measure on `device` for about `seconds`, and return one entry per figure.

    Args:
        device: `cpu` or `cuda`.
        seconds: Time for all sizes together.

    Returns:
        Entries with name, value (median seconds of ours), unit, peer, and ratio (median over rounds; the peer's time
        over ours, except against plain attention, where it is ours over the peer's: what the bias costs).
    """
    cpu = device == "cpu"
    threads = torch.get_num_threads()
    if cpu:
        torch.set_num_threads(1)
    try:
        return _run(device, seconds)
    finally:
        torch.set_num_threads(threads)


def _batch(length: int, device: str) -> int:
    """As many sequences, up to 16, as leave the eager form room for its copies of the weights."""
    if device == "cpu":
        return 1
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(16, free // 2 // (6 * 4 * QUERY_HEADS * length**2)))


def _run(device: str, seconds: float) -> list[dict[str, Any]]:
    cpu = device == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    cases: list[tuple[str, dict[str, Callable[[], Tensor]]]] = [
        (f"prefill T={length}", _prefill(length, _batch(length, device), device, dtype))
        for length in ((512, 1024, 2048) if cpu else (1024, 2048, 4096))
    ]
    cases.append(("decode S=2048", _decode(2048, 1 if cpu else 16, device, dtype)))
    results: list[dict[str, Any]] = []
    for name, calls in cases:
        rounds = _times(calls, seconds / len(cases), device)
        for peer in (peer for peer in calls if peer != "auto"):
            costs = peer == "plain"
            ratios = [r["auto"] / r[peer] if costs else r[peer] / r["auto"] for r in rounds]
            results.append(
                {
                    "name": name,
                    "value": statistics.median(r["auto"] for r in rounds),
                    "unit": "s",
                    "peer": peer,
                    "ratio": statistics.median(ratios),
                }
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    results = run(options.device, options.seconds)
    print(f"{'case':<16} {'ours, ms':>9} {'peer':<11} {'ratio':>7}")
    for entry in results:
        meaning = "x its time" if entry["peer"] == "plain" else "x faster"
        print(f"{entry['name']:<16} {entry['value'] * 1e3:9.2f} {entry['peer']:<11} {entry['ratio']:7.2f} {meaning}")
    if options.json:
        machine = (
            torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
        )
        report = {
            "benchmark": "attention",
            "machine": machine,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "results": results,
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
