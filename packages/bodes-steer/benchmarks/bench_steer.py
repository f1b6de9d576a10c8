"""What it costs to steer a row: `ODESteer` against a straightforward torch implementation of the equations, in one run.

The peer builds the two sketches anew for every evaluation of the field, multiplies their Fourier transforms, and takes
the vector-Jacobian product by autograd. Both follow 10 Euler steps with the same hashes and weights. "ratio" is the
median over the rounds, "best" that of the shortest times, which others on the machine disturb least.

Run as `python bench_steer.py [--json FILE] [--rounds 15]`.
"""

import argparse
import functools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bodes_steer import ODESteer
from torch import Tensor

STEPS = 10
FEATURES = 8000


def fitted(d: int, **params: object) -> ODESteer:
    """A steerer with hashes and weights as a fit leaves them; which activations they came from costs nothing later."""
    generator = torch.Generator().manual_seed(d)
    steerer = ODESteer(steps=STEPS, n_components=FEATURES, **params)
    size = (2, d + 1)
    return steerer.restore(
        {
            "median_norm_": torch.tensor(10.0),
            "index_hash_": torch.randint(0, FEATURES, size, generator=generator),
            "sign_hash_": (2 * torch.randint(0, 2, size, generator=generator) - 1).to(torch.int8),
            "coef_": 0.05 * torch.randn(FEATURES, generator=generator),
            "intercept_": torch.tensor(0.1, dtype=torch.float64),
            "prior_": torch.tensor(0.5, dtype=torch.float64),
        }
    )


def plain(steerer: ODESteer) -> Callable[[Tensor, float], Tensor]:
    """The equations, one after the other."""
    index, sign, weights = steerer.index_hash_, steerer.sign_hash_.float(), steerer.coef_
    gamma, coef0, n, offset = steerer.gamma, steerer.coef0, steerer.n_components, float(steerer.intercept_)

    def features(a: Tensor) -> Tensor:
        x = a / (a.norm(dim=-1, keepdim=True) + 1e-12)
        z = torch.cat([math.sqrt(gamma) * x, math.sqrt(coef0) * torch.ones_like(x[:, :1])], dim=1)
        product = None
        for r in range(2):
            sketch = torch.zeros(len(a), n).index_add(1, index[r], z * sign[r])
            transform = torch.fft.rfft(sketch)
            product = transform if product is None else product * transform
        return torch.fft.irfft(product, n=n)

    def field(a: Tensor) -> Tensor:
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            h = features(a) @ weights + offset
            (gradient,) = torch.autograd.grad(h.sum(), a)
        return gradient / (gradient.norm(dim=-1, keepdim=True) + 1e-10)

    def flow(a: Tensor, T: float) -> Tensor:  # noqa: N803  # the paper's letter
        for _ in range(STEPS):
            a = a + T / STEPS * field(a)
        return a

    return flow


def paired(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of both in each round, run in turn so that a busy machine slows both."""
    first(), second()
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds):
        for which in (0, 1) if round_ % 2 else (1, 0):
            began = time.perf_counter()
            (first, second)[which]()
            times[which].append(time.perf_counter() - began)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    results = []
    print(f"{'':<22}{'backend':>10}{'plain us':>10}{'ours us':>10}{'ratio':>8}{'best':>8}   (a row, {STEPS} steps)")
    for d in (576, 4096):
        ours = fitted(d)
        began = time.perf_counter()
        ours.prepare()
        print(f"prepared for d={d} in {time.perf_counter() - began:.2f} s")
        peer = plain(ours)
        for rows in (1, 10, 64):
            x = 6.0 * torch.randn(rows, d, generator=torch.Generator().manual_seed(rows))
            difference = float((peer(x, 5.0) - ours.flow(x, 5.0)).abs().max())
            assert difference < 1e-4, f"the two disagree by {difference}"
            both = (functools.partial(peer, x, 5.0), functools.partial(ours.flow, x, 5.0))
            before, after = paired(*both, arguments.rounds * (4 if rows < 64 else 1))
            ratio = statistics.median(slow / fast for slow, fast in zip(before, after, strict=True))
            best = min(before) / min(after)
            name, backend = f"d={d}, {rows} rows", ours._choose(rows, STEPS)
            plain_us, ours_us = (statistics.median(each) / rows * 1e6 for each in (before, after))
            print(f"{name:<22}{backend:>10}{plain_us:>10.1f}{ours_us:>10.1f}{ratio:>8.1f}{best:>8.1f}")
            results.append(
                {
                    "name": name,
                    "backend": backend,
                    "value": ours_us,
                    "unit": "us a row",
                    "peer": "sketch rebuilt for each evaluation, vector-Jacobian product by autograd",
                    "ratio": ratio,
                    "ratio_of_best_times": best,
                    "largest_difference": difference,
                }
            )
    if arguments.json:
        record = {
            "benchmark": "bodes-steer steering",
            "machine": arguments.machine,
            "threads": arguments.threads,
            "features": FEATURES,
            "steps": STEPS,
            "versions": {"torch": torch.__version__},
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
