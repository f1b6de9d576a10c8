"""Halving of many documents' candidates at once against one document after another in torch, in the same run.

The peer is the plain way: for every document and channel sort the living candidates, keep a half, and note the median.
Both split by rank and report Harrell-Davis medians.

Run as `python bench_halving.py [--json FILE] [--documents 1000] [--candidates 64] [--channels 4] [--rounds 9]`.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from pmark.medians import harrell_davis_weights
from pmark.selection import halve


def one_by_one(proxies: torch.Tensor, bits: torch.Tensor, weights: dict[int, torch.Tensor]) -> list[int]:
    chosen = []
    for values, row in zip(proxies, bits, strict=True):
        alive, medians = torch.arange(len(values)), []
        for j, bit in enumerate(row.tolist()):
            ranked, order = values[alive, j].sort()
            medians.append(float(ranked @ weights[len(alive)]))
            half, odd = divmod(len(alive), 2)
            kept = half + (odd and bool(torch.rand(()) < (len(alive) + 1) / (2 * len(alive))))
            alive = alive[order[len(alive) - kept :] if bit else order[:kept]]
        chosen.append(int(alive[torch.randint(len(alive), ())]))
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    options = parser.parse_args()

    rng = np.random.default_rng(0)
    proxies = rng.standard_normal((options.documents, options.candidates, options.channels))
    bits = rng.random((options.documents, options.channels)) < 0.5
    tensors = torch.from_numpy(proxies), torch.from_numpy(bits)
    weights = {n: torch.from_numpy(harrell_davis_weights(n).copy()) for n in range(1, options.candidates + 1)}

    halve(proxies, bits, rng)
    times = []
    for _ in range(options.rounds):  # in turn, so that a busy machine slows both
        began = time.perf_counter()
        one_by_one(*tensors, weights)
        between = time.perf_counter()
        halve(proxies, bits, rng)
        times.append((between - began, time.perf_counter() - between))
    loop, batch = (statistics.median(each) for each in zip(*times, strict=True))
    ratio = statistics.median(first / second for first, second in times)

    shape = f"{options.documents} x {options.candidates} x {options.channels}"
    print(f"{'halving of ' + shape:<28}{'ms':>8}\n{'one document at a time':<28}{loop * 1e3:>8.1f}")
    print(f"{'all at once':<28}{batch * 1e3:>8.1f}\n{'ratio':<28}{ratio:>8.1f}")
    if options.json:
        row = {"name": f"halving of {shape}", "value": batch * 1e3, "unit": "ms"}
        row |= {"peer": "one document at a time in torch", "ratio": ratio, "target": "under 50 ms"}
        record = {
            "benchmark": "pmark halving",
            "machine": options.machine,
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
            "results": [row],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
