"""Whether a watermark changes what a model says: the first sentences of many texts, each marked under a key of its own.

SmolLM2-135M-Instruct proposes pools of candidates after one prompt. From each pool every scheme chooses one sentence,
under several keys, each time from the pool in another order. Without distortion each candidate is chosen with the same
probability, so the choices are spread over the regions of the encoder's space (eight k-means clusters, fitted on other
sentences), and over lengths, as the pools themselves are. That is tested, given the pools, by a chi-square statistic.
A scheme without distortion has p-values spread over 0 to 1; one that distorts is caught, if the test has the power,
which the rejection-sampling schemes show that it has.

Run as `python bench_distortion.py [--json FILE] [--pools 300] [--keys 12]`.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pmark import CallableSampler, HFSampler, KSemStamp, PMark, PMarkKey, SemStamp
from pmark.encoders import as_encoder
from pmark.samplers import Continuation
from pmark.segmentation import is_complete
from pmark.semstamp import spherical_k_means
from pmark.sentence_watermark import SentenceWatermark, Unmarked
from scipy.stats import chi2
from separata_embedded import load_sentence_encoder, load_smollm2
from separata_kit.language_models import has_fast_bfloat16

PROMPT = "It was a quiet morning in the village."
SAMPLES = 16
CLUSTERS = 8


def from_pool(pool: Sequence[Continuation]) -> CallableSampler:
    """Hands out a pool in its order; what is spent stays spent."""
    rest: Iterator[Continuation] = iter(pool)
    return CallableSampler(lambda context, count: [each for each, _ in zip(rest, range(count), strict=False)])


def test(chosen: np.ndarray, pools: np.ndarray, repeats: int) -> tuple[float, float]:
    """The p-value of `repeats` choices from each pool being uniform, and their total variation from the pools.

    `chosen` counts choices by class; `pools` [pools, classes] are the shares of the classes in each pool.
    """
    expected = repeats * pools.sum(axis=0)
    covariance = repeats * (np.diag(pools.sum(axis=0)) - pools.T @ pools)
    difference = chosen - expected
    # The classes sum to the whole, so one of them is implied by the rest.
    statistic = float(difference @ np.linalg.pinv(covariance) @ difference)
    variation = float(np.abs(difference).sum() / 2 / expected.sum())
    return float(chi2.sf(statistic, len(chosen) - 1)), variation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pools", type=int, default=300)
    parser.add_argument("--keys", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    dtype = "bfloat16" if has_fast_bfloat16() else "float32"
    sampler = HFSampler(*load_smollm2(dtype=dtype), max_new_tokens=48)
    encoder = as_encoder(load_sentence_encoder(), cache_size=100_000)
    unmarked = Unmarked(encoder, num_samples=1, min_candidates=0)

    def another_begins(_: int, text: str) -> bool:
        return is_complete(unmarked.segmenter, PROMPT, text)

    began = time.perf_counter()
    # The pools, and a quarter as many sentences to fit the classes on.
    drawn: list[Continuation] = []
    for block in range(-(-5 * arguments.pools * SAMPLES // (4 * 256))):
        drawn += sampler.sample([PROMPT], [256], is_complete=another_begins, seed=block)[0]
    print(f"{len(drawn)} continuations in {time.perf_counter() - began:.0f} s", flush=True)

    def first(method: SentenceWatermark, pool: Sequence[Continuation]) -> str:
        return method.generate(from_pool(pool), PROMPT, max_sentences=1).sentences[0]

    def usable(continuation: Continuation) -> str | None:
        """What the model writes, cut and cleaned like what is marked."""
        found = unmarked.generate(from_pool([continuation]), PROMPT, max_sentences=1)
        return found.sentences[0] if found.sentences else None

    plain = [(each, sentence) for each in drawn if (sentence := usable(each)) is not None]
    some = [sentence for _, sentence in plain[: len(plain) // 5]]
    rest = plain[len(some) :]
    pools = [rest[at : at + SAMPLES] for at in range(0, len(rest) - SAMPLES + 1, SAMPLES)]
    centres = spherical_k_means(encoder.encode(some), CLUSTERS)
    edges = np.quantile([len(each.split()) for each in some], np.linspace(0, 1, 6)[1:-1])

    def clusters(sentences: Sequence[str]) -> np.ndarray:
        return np.bincount((encoder.encode(sentences) @ centres.T).argmax(axis=1), minlength=CLUSTERS)

    def lengths(sentences: Sequence[str]) -> np.ndarray:
        return np.bincount(np.searchsorted(edges, [len(each.split()) for each in sentences]), minlength=len(edges) + 1)

    shares = {
        observe: np.stack([observe([sentence for _, sentence in pool]) / SAMPLES for pool in pools])
        for observe in (clusters, lengths)
    }

    def pmark(number: int, **options: Any) -> PMark:
        # The same pivots for all, as they are for the owner of one key: over random ones much would average out.
        key = PMarkKey.from_authors(np.random.default_rng([number, 2]).integers(2, size=4).tolist(), channels=2)
        return PMark(encoder, key, num_samples=SAMPLES, seed=number, min_candidates=4, redraws=0, **options)

    rejecting: dict[str, Any] = {"num_samples": SAMPLES, "redraws": 0, "margin": 0.0}
    schemes: dict[str, Callable[[int], SentenceWatermark]] = {
        "unmarked": lambda number: Unmarked(encoder, num_samples=1, min_candidates=0),
        "PMark, online": lambda number: pmark(number, mode="online"),
        "PMark, online, parallel": lambda number: pmark(number, mode="online", selection="parallel"),
        "PMark, offline": lambda number: pmark(number, mode="offline"),
        "SemStamp": lambda number: SemStamp(encoder, key=number + 1, seed=number, **rejecting),
        "k-SemStamp": lambda number: KSemStamp(encoder, centres, key=number + 1, seed=number, **rejecting),
    }
    results = []
    print(f"{'':<26}{'p (region)':>12}{'TV':>8}{'p (length)':>12}{'TV':>8}")
    for name, make in schemes.items():
        chosen = []
        for number in range(arguments.keys * len(pools)):
            order = np.random.default_rng([number, 1]).permutation(SAMPLES)
            chosen.append(first(make(number), [pools[number % len(pools)][each][0] for each in order]))
        (p, variation), (p_length, variation_length) = (
            test(observe(chosen), share, arguments.keys) for observe, share in shares.items()
        )
        print(f"{name:<26}{p:>12.2g}{variation:>8.3f}{p_length:>12.2g}{variation_length:>8.3f}", flush=True)
        results.append(
            {"name": name, "value": p, "unit": "p-value, regions", "total_variation": variation,
             "p_length": p_length, "total_variation_length": variation_length, "texts": len(chosen)}
        )  # fmt: skip
    if arguments.json:
        record = {
            "benchmark": "pmark distortion",
            "machine": arguments.machine,
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
            "model": f"SmolLM2-135M-Instruct, {dtype}",
            "prompt": PROMPT,
            "samples": SAMPLES,
            "pools": len(pools),
            "shares": (shares[clusters].mean(axis=0)).tolist(),
            "keys": arguments.keys,
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
