"""Detection: texts in one batch against one sentence at a time, and offline against online, in the same run.

Texts are film-review sentences strung together, the encoder is MiniLM, the model SmolLM2. One sentence at a time means:
every sentence is encoded in a call of its own, as it comes. Both ways find the same z, which is asserted. Online
detection draws its candidates from the model again; since nothing but the number of sentences decides what that costs,
few texts are enough.

    python bench_detection.py --json detection.json
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pmark.encoders import as_encoder
from pmark.hf_sampler import HFSampler
from pmark.key import PMarkKey
from pmark.scoring import soft_counts, z_score
from pmark.segmentation import clean, make_segmenter
from pmark.watermark import PMark
from separata_embedded import load_sentence_encoder, load_smollm2, rated_texts

KEY = PMarkKey.generate(4, b"a key for times only")


def review_texts(count: int, sentences: int) -> list[str]:
    found = [clean(each.text) for each in rated_texts("movie")]
    segmenter = make_segmenter()
    single = [each for each in found[: 3 * count * sentences] if segmenter.split(each) == [each]]
    return [" ".join(single[at : at + sentences]) for at in range(0, count * sentences, sentences)]


def one_at_a_time(encoder: Any, texts: list[str]) -> list[float]:
    segmenter, scores = make_segmenter(), []
    for text in texts:
        total, sentences = 0.0, segmenter.split(text)[1:]
        for number, sentence in enumerate(sentences, 1):
            embedding = np.asarray(encoder.encode([sentence]), np.float64)
            proxies = embedding / np.linalg.norm(embedding) @ KEY.pivots(embedding.shape[1]).T
            total += soft_counts(proxies, np.zeros_like(proxies), KEY.bits(1, number)).sum()
        scores.append(z_score(float(total), len(sentences) * KEY.channels))
    return scores


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--sentences", type=int, default=13, help="in each text; the first is the prompt")
    parser.add_argument("--online-texts", type=int, default=1)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    options = parser.parse_args()

    encoder = load_sentence_encoder()
    texts = review_texts(options.texts, options.sentences)
    encoder.encode(texts[0].split())  # the first call is slower

    def offline(some: list[str]) -> list[float]:
        # A fresh cache, and a fresh segmenter with its own.
        fresh = PMark(as_encoder(encoder), KEY, mode="offline")
        return [result.z for result in fresh.detect_batch(some)]

    ratios, single, batched = [], [], []
    for _ in range(options.rounds):  # in turn, so that a busy machine slows both
        slow, expected = timed(lambda: one_at_a_time(encoder, texts))
        fast, found = timed(lambda: offline(texts))
        np.testing.assert_allclose(found, expected, atol=1e-3)
        single.append(slow)
        batched.append(fast)
        ratios.append(slow / fast)
    model, tokenizer = load_smollm2(dtype="float32")
    few = texts[: options.online_texts]
    watermark = PMark(as_encoder(encoder), KEY, num_samples=options.samples, seed=0)
    online, _ = timed(lambda: watermark.detect_batch(few, sampler=HFSampler(model, tokenizer)))
    alone = float(np.median([timed(lambda: offline(few))[0] for _ in range(options.rounds)]))

    rows = [
        {
            "name": "offline detection, texts a second",
            "value": options.texts / float(np.median(batched)),
            "unit": "texts/s",
            "peer": f"one sentence at a time: {options.texts / float(np.median(single)):.1f} texts/s",
            "ratio": float(np.median(ratios)),
            "target": ">= 3",
        },
        {
            "name": f"offline detection of {len(few)} text",
            "value": alone,
            "unit": "s",
            "peer": f"online, {options.samples} samples a sentence: {online:.1f} s",
            "ratio": online / alone,
            "target": ">= 20",
        },
    ]
    for row in rows:
        print(f"{row['name']:<36}{row['value']:>8.2f} {row['unit']:<8} {row['peer']:<48} ratio {row['ratio']:.1f}")
    if options.json:
        record = {
            "benchmark": "pmark detection",
            "machine": options.machine,
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
            "results": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
