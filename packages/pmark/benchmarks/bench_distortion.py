"""Whether a watermark changes what a model says: the first sentences of many texts, each marked under a key of its own.

SmolLM2-135M-Instruct proposes pools of candidates after one prompt. Every scheme chooses one sentence from each pool,
and its choices are compared with sentences that nothing chose: by the region of the encoder's space in which they lie
(eight k-means clusters, fitted on other sentences) and by their length. Both are chi-square tests of two samples. A
scheme without distortion has p-values spread over 0 to 1; one that distorts is caught, if the test has the power, which
the rejection-sampling schemes show that it has.

Run as `python bench_distortion.py [--json FILE] [--pools 400]`.
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
from pmark.semstamp import spherical_k_means
from pmark.sentence_watermark import SentenceWatermark, Unmarked
from scipy.stats import chi2_contingency
from separata_embedded import load_sentence_encoder, load_smollm2
from separata_kit.language_models import has_fast_bfloat16

PROMPT = "It was a quiet morning in the village."
SAMPLES = 16
CLUSTERS = 8


def from_pool(pool: Sequence[Continuation]) -> CallableSampler:
    """Hands out a pool in its order; what is spent stays spent."""
    rest: Iterator[Continuation] = iter(pool)
    return CallableSampler(lambda context, count: [each for each, _ in zip(rest, range(count), strict=False)])


def test(counts: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """The p-value of two samples being one, and their total variation."""
    both = np.stack([counts, reference])
    both = both[:, both.sum(axis=0) > 0]
    p = float(chi2_contingency(both).pvalue)
    return p, float(np.abs(both[0] / both[0].sum() - both[1] / both[1].sum()).sum() / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pools", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    dtype = "bfloat16" if has_fast_bfloat16() else "float32"
    sampler = HFSampler(*load_smollm2(dtype=dtype), max_new_tokens=48)
    encoder = as_encoder(load_sentence_encoder(), cache_size=100_000)
    unmarked = Unmarked(encoder, num_samples=1, min_candidates=0)
    began = time.perf_counter()
    # The pools, and as many sentences again: one part to fit the clusters on, the other to compare with.
    drawn: list[Continuation] = []
    for block in range(2 * arguments.pools * SAMPLES // 256):
        done = lambda _, text: unmarked.segmenter.split(PROMPT + text)[2:] != []  # noqa: E731  # two lines for one test
        drawn += sampler.sample([PROMPT], [256], is_complete=done, seed=block)[0]
    print(f"{len(drawn)} continuations in {time.perf_counter() - began:.0f} s", flush=True)
    pools = [drawn[at : at + SAMPLES] for at in range(0, arguments.pools * SAMPLES, SAMPLES)]

    def first(method: SentenceWatermark, pool: Sequence[Continuation]) -> str | None:
        found = method.generate(from_pool(pool), PROMPT, max_sentences=1)
        return found.sentences[0] if found.sentences else None

    # What the model writes, cut and cleaned like what is marked.
    others = [first(unmarked, [each]) for each in drawn[arguments.pools * SAMPLES :]]
    plain = [each for each in others if each is not None]
    fitted, reference = plain[::4], [each for index, each in enumerate(plain) if index % 4]
    centres = spherical_k_means(encoder.encode(fitted), CLUSTERS)
    edges = np.quantile([len(each.split()) for each in fitted], np.linspace(0, 1, 6)[1:-1])

    def clusters(sentences: Sequence[str]) -> np.ndarray:
        return np.bincount((encoder.encode(sentences) @ centres.T).argmax(axis=1), minlength=CLUSTERS)

    def lengths(sentences: Sequence[str]) -> np.ndarray:
        return np.bincount(np.searchsorted(edges, [len(each.split()) for each in sentences]), minlength=len(edges) + 1)

    def pmark(number: int, **options: Any) -> PMark:
        key = PMarkKey.generate(2, secret=number.to_bytes(32, "big"))
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
        chosen = [first(make(number), pool) for number, pool in enumerate(pools)]
        sentences = [each for each in chosen if each is not None]
        (p, variation), (p_length, variation_length) = (
            test(observe(sentences), observe(reference)) for observe in (clusters, lengths)
        )
        print(f"{name:<26}{p:>12.2g}{variation:>8.3f}{p_length:>12.2g}{variation_length:>8.3f}", flush=True)
        results.append(
            {"name": name, "value": p, "unit": "p-value, regions", "total_variation": variation,
             "p_length": p_length, "total_variation_length": variation_length, "texts": len(sentences)}
        )  # fmt: skip
    if arguments.json:
        record = {
            "benchmark": "pmark distortion",
            "machine": arguments.machine,
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
            "model": f"SmolLM2-135M-Instruct, {dtype}",
            "prompt": PROMPT,
            "samples": SAMPLES,
            "reference": len(reference),
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
