"""What fitting the density ratio costs, against scikit-learn's pipeline, to the same objective.

The peer is `Normalizer`, `PolynomialCountSketch` and `LogisticRegression`, all with the method's parameters and
otherwise as they come; with the same seed both sides have the same hashes, so the same objective
`0.5 ||w||^2 + C sum loss`. Both run in turn in one process and get the same float32 rows, of which scikit-learn makes
float64 features and we float32 ones; the figure is the median of the repetitions. Rows are made up like
those of a model: far from the origin, with variances that fall by a power law, and classes a tenth of their norm apart.

For each width and C:

- one whole fit, and its parts: features, classifier;
- the same against scikit-learn's classifier with the largest tol (1e-4, 1e-5, ...) at which it comes within 1e-6 of
  the optimum, as ours does, since at its default it often does not;
- how far the objectives are from the optimum, which is a fit in float64 to 1e-10. Our features are float32, which alone
  moves the objective by some 1e-8, either way.

    python bench_fit.py --threads 1 --json results/fit.json
"""

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy
import sklearn
import torch
from bodes_steer.density_ratio import LogDensityRatio
from bodes_steer.features import PolynomialCountSketch
from bodes_steer.logistic import LogisticFit, fit_logistic
from scipy.special import log_expit
from sklearn import kernel_approximation
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import Normalizer
from torch import Tensor

FEATURES = 8000
NEAR = 1e-6


def made_up(rows: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of norm about 150 and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % 2
    spectrum = torch.arange(1, d + 1) ** -0.5
    spectrum *= 60 / spectrum.norm()
    turned = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
    centre, apart = (torch.nn.functional.normalize(torch.randn(d, generator=generator), dim=0) for _ in range(2))
    noise = torch.randn(rows, d, generator=generator) * spectrum
    # The second class is also wider along some directions, which a linear classifier cannot use.
    noise[:, : d // 8] *= 1 + 0.3 * labels[:, None]
    return noise @ turned + 140 * centre + 15 * labels[:, None] * apart, labels


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that something takes; of one thread of a CPU its own, so that others on the machine do not count."""
    cuda = torch.cuda.is_available()
    clock = time.process_time if not cuda and torch.get_num_threads() == 1 else time.perf_counter
    if cuda:
        torch.cuda.synchronize()
    began = clock()
    found = work()
    if cuda:
        torch.cuda.synchronize()
    return clock() - began, found


def objective(
    features: npt.NDArray[np.float64],
    labels: npt.NDArray[np.int64],
    fitted: LogisticRegression,
    C: float,  # noqa: N803  # scikit-learn's letter
) -> float:
    coef, intercept = fitted.coef_[0].astype(np.float64), float(fitted.intercept_[0])
    return float(0.5 * coef @ coef - C * log_expit((2 * labels - 1) * (features @ coef + intercept)).sum())


def compare(
    rows: int,
    d: int,
    C: float,  # noqa: N803  # scikit-learn's letter
    repetitions: int,
    device: str,
) -> list[dict[str, Any]]:
    """The records of one width and one C."""
    activations, y = made_up(rows, d)
    array, labels = activations.numpy(), y.numpy()
    activations, y = activations.to(device), y.to(device)
    sketch = PolynomialCountSketch(n_components=FEATURES, random_state=0)
    seconds: dict[str, list[float]] = {name: [] for name in ("whole", "features", "classifier", "their features")}
    theirs: list[float] = []
    for _ in range(repetitions):
        taken, made = seconds_of(lambda: LogDensityRatio(sketch, C=C).fit(activations, y))
        seconds["whole"].append(taken)
        taken, ours = seconds_of(lambda: sketch.fit(activations).transform(activations))
        seconds["features"].append(taken)
        taken, found = seconds_of(lambda phi=ours: fit_logistic(phi, y, C=C))
        seconds["classifier"].append(taken)
        taken, features = seconds_of(
            lambda: kernel_approximation.PolynomialCountSketch(
                gamma=0.1, coef0=1.0, degree=2, n_components=FEATURES, random_state=0
            ).fit_transform(Normalizer().fit_transform(array))
        )
        seconds["their features"].append(taken)
        taken, fitted = seconds_of(lambda phi=features: LogisticRegression(C=C, max_iter=1000).fit(phi, labels))
        theirs.append(taken)
    assert np.abs(features - ours.cpu().numpy()).max() < 1e-5, "the features differ"
    assert abs(made.objective_ / found.objective - 1) < NEAR, "the two ways to ours differ"
    exact: LogisticFit = fit_logistic(torch.from_numpy(features), y.cpu(), C=C, tol=1e-10)
    distance = found.objective / exact.objective - 1
    default_distance = objective(features, labels, fitted, C) / exact.objective - 1
    for tol in (1e-4, 1e-5, 1e-6, 1e-7, 1e-8):
        equal_seconds, fitted = seconds_of(
            lambda tol=tol: LogisticRegression(C=C, max_iter=10_000, tol=tol).fit(features, labels)
        )
        equal_distance = objective(features, labels, fitted, C) / exact.objective - 1
        if equal_distance <= NEAR:
            break
    median = {name: statistics.median(values) for name, values in seconds.items()}
    median["theirs"] = statistics.median(theirs)
    peer = median["their features"] + median["theirs"]
    case = f"N={rows}, d={d}, C={C:g}"

    def record(name: str, ours: float, against: float, beside: str) -> dict[str, Any]:
        return {
            "name": f"{name}, {case}",
            "value": round(ours, 4),
            "unit": "s",
            "peer": f"{beside}: {against:.3f} s",
            "ratio": round(against / ours, 2),
        }

    return [
        record("whole fit", median["whole"], peer, f"scikit-learn as it comes, {default_distance:.0e} above")
        | {"optimum": exact.objective, "distance": distance, "peer_distance": default_distance},
        record(
            "whole fit, equal objective",
            median["whole"],
            median["their features"] + equal_seconds,
            f"scikit-learn with tol {tol:g}, {equal_distance:.0e} above",
        )
        | {"optimum": exact.objective, "distance": distance, "peer_distance": equal_distance},
        record("features", median["features"], median["their features"], "scikit-learn"),
        record("classifier", median["classifier"], median["theirs"], f"scikit-learn, {default_distance:.0e} above"),
        record("classifier, equal objective", median["classifier"], equal_seconds, f"scikit-learn with tol {tol:g}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--d", type=int, nargs="+", default=[576, 4096])
    parser.add_argument("--C", type=float, nargs="+", default=[1.0, 100.0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="threads of the CPU on both sides; default: as many as cores")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()
    if arguments.threads:
        from threadpoolctl import threadpool_limits

        torch.set_num_threads(arguments.threads)
        threadpool_limits(arguments.threads)
    warnings.simplefilter("ignore")
    compare(64, 8, 1.0, 1, arguments.device)
    results = [
        each
        for d in arguments.d
        for weight in arguments.C
        for each in compare(arguments.rows, d, weight, arguments.repetitions, arguments.device)
    ]
    print(f"{'':<52}{'ours':>9}  {'ratio':>7}  beside")
    for each in results:
        above = f" (ours {each['distance']:.0e} above)" if "distance" in each else ""
        print(f"{each['name']:<52}{each['value']:>8.3f}s  {each['ratio']:>7.2f}  {each['peer']}{above}")
    if arguments.json:
        record = {
            "benchmark": "bodes-steer fit",
            "machine": arguments.machine,
            "threads": torch.get_num_threads(),
            "features": FEATURES,
            "versions": {"torch": torch.__version__, "scikit-learn": sklearn.__version__, "scipy": scipy.__version__},
            "results": results,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
