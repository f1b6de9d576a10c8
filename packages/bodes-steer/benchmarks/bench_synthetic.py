"""Where a nonlinear barrier and several steps pay: a task whose classes differ in the sign of a product.

Activations of 32 dimensions lie around 6 on axis 0. Those of positives have +-2 on the axes 1 and 2 with equal signs
and +0.6 on axis 3; negatives have opposite signs and -0.6. Noise of 0.7 everywhere. Each method moves held-out
negatives by the same length, 6 (but LinAcT and MiMiC, which have lengths of their own), and the exact log-density ratio
says how many of them it now takes for positives.

Run as `python bench_synthetic.py [--json FILE] [--seeds 2]`.
"""

import argparse
import json
import os
import platform
import statistics
import warnings
from pathlib import Path

import torch
from bodes_steer import CAA, ITI, GaussianODE, LinAcT, MiMiC, ODESteer, RFFODESteer, StepODESteer
from torch import Tensor

T = 6.0
WIDTH, OFFSET, NOISE, SIDE, SHIFT = 32, 6.0, 0.7, 2.0, 0.6


def sample(count: int, *, positive: bool, generator: torch.Generator) -> Tensor:
    """`[count, 32]` activations of one class."""
    rows = NOISE * torch.randn(count, WIDTH, generator=generator)
    sign = (2 * torch.randint(0, 2, (count,), generator=generator) - 1).float()
    rows[:, 0] += OFFSET
    rows[:, 1] += SIDE * sign
    rows[:, 2] += SIDE * sign * (1 if positive else -1)
    rows[:, 3] += SHIFT if positive else -SHIFT
    return rows


def exact_ratio(rows: Tensor) -> Tensor:
    """The log-density ratio of the two mixtures."""
    one, two, three = rows[:, 1], rows[:, 2], rows[:, 3]

    def mixture(relative: int, shift: float) -> Tensor:
        parts = [(one - s * SIDE) ** 2 + (two - relative * s * SIDE) ** 2 for s in (1, -1)]
        return torch.logsumexp(-torch.stack(parts) / (2 * NOISE**2), dim=0) - (three - shift) ** 2 / (2 * NOISE**2)

    return mixture(1, SHIFT) - mixture(-1, -SHIFT)


def shares(seed: int, count: int = 2000, features: int = 2000) -> dict[str, float]:
    """For each method the share of moved negatives that are taken for positives."""
    generator = torch.Generator().manual_seed(seed)
    pos, neg = (sample(count, positive=each, generator=generator) for each in (True, False))
    held_out = sample(count, positive=False, generator=generator)
    mean_vector = CAA().fit(pos, neg)
    common = {"n_components": features, "random_state": seed}
    sharp = {**common, "gamma": 1.0, "C": 100.0}
    methods = {
        "CAA, of length 6": (mean_vector, T / float(mean_vector.vector_.norm())),
        "ITI": (ITI().fit(pos, neg), T),
        "LinAcT": (LinAcT().fit(pos, neg), 1.0),
        "MiMiC": (MiMiC().fit(pos, neg), 1.0),
        "one step": (StepODESteer(**common).fit(pos, neg), T),
        "ten steps": (ODESteer(**common).fit(pos, neg), T),
        "one step, gamma=1, C=100": (StepODESteer(**sharp).fit(pos, neg), T),
        "ten steps, gamma=1, C=100": (ODESteer(**sharp).fit(pos, neg), T),
        "ten steps, Fourier features": (RFFODESteer(**common).fit(pos, neg), T),
        "ten steps, two Gaussians": (GaussianODE().fit(pos, neg), T),
    }
    found = {"unsteered": float((exact_ratio(held_out) > 0).float().mean())}
    for name, (steerer, strength) in methods.items():
        found[name] = float((exact_ratio(steerer.steer(held_out, strength)) > 0).float().mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()
    # A path of 6 is as long as the activations: here fluency is nothing to lose.
    warnings.filterwarnings("ignore", message="T=")
    by_seed = [shares(seed) for seed in range(arguments.seeds)]
    results = []
    print(f"{'share taken for positives':<30}" + "".join(f"{f'seed {seed}':>10}" for seed in range(arguments.seeds)))
    baseline = statistics.mean(each["CAA, of length 6"] for each in by_seed)
    for name in by_seed[0]:
        values = [each[name] for each in by_seed]
        print(f"{name:<30}" + "".join(f"{value:>10.3f}" for value in values))
        mean = statistics.mean(values)
        results.append(
            {
                "name": name,
                "value": mean,
                "unit": "share",
                "peer": "CAA, of length 6",
                "ratio": mean / baseline,
                "by_seed": values,
            }
        )
    if arguments.json:
        record = {
            "benchmark": "bodes-steer synthetic task",
            "machine": arguments.machine,
            "versions": {"torch": torch.__version__},
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
