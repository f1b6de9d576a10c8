"""How often human text is taken for marked: newspaper editorials under many keys, offline, against the nominal rate.

Half of the editorials calibrate, the others are tested. Soft counts are biased and the proxies of real sentences are
not centred, so the nominal p-value errs and the calibrated one is what to use. The spread over keys is reported
because a provider has one key: its rate is a draw from these.

Run as `python bench_false_positives.py [--json FILE] [--keys 40]`.
"""

import argparse
import json
import os
import platform
from pathlib import Path

import numpy as np
from pmark import PMark, PMarkKey
from pmark.encoders import as_encoder
from pmark.scoring import p_value
from separata_embedded import load_sentence_encoder, rated_texts


def editorials() -> list[str]:
    found: dict[str, list[str]] = {}
    texts = rated_texts("nytimes")
    assert texts.source != "built-in", "the editorials could not be fetched"
    for each in texts:
        found.setdefault(each.id.partition("_")[0], []).append(each.text)
    return [" ".join(each) for each in found.values() if len(each) >= 6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keys", type=int, default=40)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()

    texts = editorials()
    encoder = as_encoder(load_sentence_encoder())
    half = len(texts) // 2
    rates: dict[str, list[list[float]]] = {}
    powers = (0.01, 0.05)
    for number in range(arguments.keys):
        key = PMarkKey.generate(4, secret=number.to_bytes(32, "big"))
        hard = PMark(encoder, key, mode="offline", tolerance=0.0, decay=float("inf"))
        soft = PMark(encoder, key, mode="offline")
        centred = PMark(encoder, key, mode="offline", prior="calibrated")
        for name, method in (
            ("hard counts", hard),
            ("soft counts", soft),
            ("soft counts, calibrated medians", centred),
        ):
            calibrated = method.with_null(method.calibrate(texts[:half]))
            results = calibrated.detect_batch(texts[half:])
            z = np.array([each.z for each in results])
            p = np.array([each.p_calibrated for each in results])
            nominal = np.array([p_value(each) for each in z])
            rates.setdefault(f"{name}: nominal p", []).append([float((nominal < a).mean()) for a in powers])
            rates.setdefault(f"{name}: p from the null", []).append([float((p <= a).mean()) for a in powers])
    results = []
    print(f"{len(texts) - half} editorials tested under {arguments.keys} keys: mean rate (and the highest of a key)")
    for name, values in rates.items():
        means, most = np.mean(values, axis=0), np.max(values, axis=0)
        error = np.std(values, axis=0, ddof=1) / len(values) ** 0.5
        print(
            f"{name:<50}"
            + "   ".join(
                f"at {a:.2f}: {m:.3f} +- {e:.3f} ({w:.3f})"
                for a, m, e, w in zip(powers, means, error, most, strict=True)
            )
        )
        for level, mean, deviation, worst in zip(powers, means, error, most, strict=True):
            results.append(
                {"name": f"{name}, at {level}", "value": float(mean), "unit": "false positives", "nominal": level,
                 "standard_error": float(deviation), "highest_of_a_key": float(worst)}
            )  # fmt: skip
    if arguments.json:
        record = {
            "benchmark": "pmark on human text",
            "machine": arguments.machine,
            "versions": {"numpy": np.__version__},
            "texts": len(texts) - half,
            "keys": arguments.keys,
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
