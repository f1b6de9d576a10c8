"""How often marked text is found, by the number of its sentences, with a real model, real prompts and real attacks.

SmolLM2-135M-Instruct goes on from the first sentences of newspaper editorials, MiniLM encodes. Marked texts are written
under several keys; unmarked ones, written by the same model after the same prompts, are tested under many keys, and
their z give the thresholds: the plain z, and the one calibrated by the text's own counts under other bits. Counts are
those of the first sentences of each text, so that one run gives all lengths.

Run as `python bench_power.py [--json FILE] [--plot FILE] [--texts 40] [--modes online offline] [--attacks ...]`.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pmark import HFSampler, PMark, PMarkKey
from pmark.attacks import Attack, SentenceDrop, SentenceShuffle, SynonymSubstitution, WordDeletion
from pmark.encoders import as_encoder
from pmark.metrics import auc, bootstrap, perplexity, rep_n, tpr_at_fpr
from pmark.paraphrase import CausalParaphraser
from pmark.plots import plot_power
from pmark.samplers import Remembering, Sampler
from pmark.scoring import soft_counts, z_score
from pmark.segmentation import make_segmenter
from pmark.sentence_watermark import SentenceWatermark, Unmarked
from pmark.watermark import Mode
from separata_embedded import load_sentence_encoder, load_smollm2, rated_texts
from separata_kit.language_models import has_fast_bfloat16

LENGTHS = (2, 4, 6, 8, 10, 12)
FEWEST = 6
# Offline candidates drawn at once: more than the 8 of the default, since few rows cost as much as many.
CHUNK = 32
CHANNELS = 4
REQUEST = "Write a long newspaper editorial in plain sentences."
# Online N is held at 16, the least for 4 channels: detection draws as much as generation did.
SAMPLES: dict[Mode, int] = {"online": 16, "offline": 64}


def editorials(count: int, sentences: int = 10) -> list[list[str]]:
    """Newspaper editorials as lists of their sentences, those of at least some length."""
    found: dict[str, list[str]] = {}
    texts = rated_texts("nytimes")
    assert texts.source != "built-in", "the editorials could not be fetched"
    for each in texts:
        found.setdefault(each.id.partition("_")[0], []).append(each.text)
    return [each for each in found.values() if len(each) >= sentences][:count]


@dataclass(frozen=True)
class Evidence:
    """Counts of a text, and what they would be under the opposite bits."""

    counts: np.ndarray
    opposite: np.ndarray

    def z(self, length: int) -> float:
        counts = self.counts[:length]
        counts = counts[~np.isnan(counts).any(axis=1)]
        return z_score(float(counts.sum()), counts.size) if counts.size else 0.0

    def calibrated(self, length: int) -> float:
        difference = (self.counts - self.opposite)[:length]
        spread = float(np.nansum(difference**2)) ** 0.5
        return float(np.nansum(difference)) / spread if spread else 0.0


def scored(texts: Sequence[Evidence], null: Sequence[Evidence], length: int) -> dict[str, Any] | None:
    # Texts that the model ended earlier say nothing about this length.
    groups = [[each for each in group if len(each.counts) >= length] for group in (texts, null)]
    if min(map(len, groups)) < FEWEST:
        return None
    found: dict[str, Any] = {"texts": len(groups[0]), "null": len(groups[1])}
    for name, statistic in (("plain", Evidence.z), ("calibrated", Evidence.calibrated)):
        marked, unmarked = ([statistic(each, length) for each in group] for group in groups)
        found[name] = {"z": float(np.mean(marked)), "null_z": float(np.mean(unmarked)), "auc": auc(marked, unmarked)}
        for percent in (1, 5):
            rate = bootstrap(lambda some, u=unmarked, x=percent: tpr_at_fpr(some, u, x / 100), marked)
            found[name][f"tpr{percent}"] = {"value": rate.value, "interval95": [rate.low, rate.high]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--keys", type=int, default=2, help="that mark")
    parser.add_argument("--null-keys", type=int, default=30, help="under which unmarked texts are tested")
    parser.add_argument("--modes", nargs="+", default=["online", "offline"])
    parser.add_argument("--attacks", nargs="+", default=["deletion", "synonyms", "drop", "shuffle", "paraphrase"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    dtype = "bfloat16" if has_fast_bfloat16() else "float32"
    model, tokenizer = load_smollm2(dtype=dtype)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": REQUEST}], add_generation_prompt=True, tokenize=False
    )
    plain_sampler = HFSampler(model, tokenizer, wrap=lambda context: asked + context, max_new_tokens=64)
    encoder = as_encoder(load_sentence_encoder())
    segmenter = make_segmenter()
    # A first sentence that the segmenter cuts in two would be no prompt of one sentence.
    prompts = [each[0] for each in editorials(10 * arguments.texts) if len(segmenter.split(each[0])) == 1]
    prompts = prompts[: arguments.texts]

    def method(mode: Mode, number: int, seed: int) -> PMark:
        key = PMarkKey.generate(CHANNELS, secret=number.to_bytes(32, "big"))
        return PMark(encoder, key, mode=mode, num_samples=SAMPLES[mode], seed=seed, chunk=CHUNK)

    def written(watermark: SentenceWatermark, some: Sequence[str]) -> list[Any]:
        return watermark.generate_batch(plain_sampler, some, max_sentences=max(LENGTHS))

    began = time.perf_counter()
    unmarked = written(Unmarked(encoder, num_samples=1, min_candidates=0, seed=1), prompts)
    print(f"{len(prompts)} prompts, unmarked texts in {time.perf_counter() - began:.0f} s", flush=True)
    attacks: dict[str, Attack] = {
        "deletion": WordDeletion(0.1),
        "synonyms": SynonymSubstitution(0.3),
        "drop": SentenceDrop(0.1),
        "shuffle": SentenceShuffle(),
        "paraphrase": CausalParaphraser(model, tokenizer, "sentence"),
    }
    record: dict[str, Any] = {
        "benchmark": "pmark detection power",
        "machine": arguments.machine,
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "model": f"SmolLM2-135M-Instruct, {dtype}",
        "texts": len(prompts),
        "channels": CHANNELS,
        "samples": SAMPLES,
        "keys": arguments.keys,
        "null_keys": arguments.null_keys,
        "quality": {},
        "results": [],
    }
    curves: dict[str, list[tuple[int, float, float, float]]] = {}

    def quality(name: str, texts: Sequence[Any]) -> None:
        values = np.log(
            perplexity([each.text for each in texts], model, tokenizer, prompts=[each.prompt for each in texts])
        )
        rep = [rep_n(" ".join(each.sentences), 3) for each in texts]
        record["quality"][name] = found = {
            "log_perplexity": float(values.mean()),
            "standard_error": float(values.std(ddof=1) / len(values) ** 0.5),
            "rep3": float(np.mean(rep)),
            "sentences": float(np.mean([len(each.sentences) for each in texts])),
            "samples_per_sentence": sum(each.samples for each in texts) / sum(len(each.sentences) for each in texts),
        }
        print(f"{name}: {found}", flush=True)

    quality("unmarked", unmarked)
    for mode in arguments.modes:
        sampler = Remembering(plain_sampler)
        began = time.perf_counter()
        marked, of = [], []
        for key in range(arguments.keys):
            some = prompts[key :: arguments.keys]
            marked += written(method(mode, key, seed=key), some)
            of += [key] * len(some)
        seconds = time.perf_counter() - began
        print(f"{mode}: {len(marked)} texts written in {seconds:.0f} s", flush=True)
        quality(mode, marked)

        def detected(
            texts: Sequence[str],
            opened: Sequence[str],
            keys: Sequence[int],
            mode: Mode = mode,
            sampler: Sampler = sampler,
        ) -> list[Evidence]:
            found: dict[int, Evidence] = {}
            for key in sorted(set(keys)):
                places = [index for index, each in enumerate(keys) if each == key]
                judge = method(mode, key, seed=7)
                documents = judge.documents(
                    [texts[index] for index in places], prompts=[opened[index] for index in places]
                )
                for index, document, result in zip(
                    places, documents, judge.score(documents, sampler=sampler), strict=True
                ):
                    bits = judge.key.bits(len(result.counts))
                    opposite = soft_counts(judge.proxies(document.embeddings), result.thresholds, ~bits)
                    found[index] = Evidence(result.counts, np.where(np.isnan(result.counts), np.nan, opposite))
            return [found[index] for index in range(len(texts))]

        began = time.perf_counter()
        wrong = range(100, 100 + arguments.null_keys)
        null = [
            result
            for key in wrong
            for result in detected(
                [t.text for t in unmarked], [t.prompt + t.opening for t in unmarked], [key] * len(unmarked)
            )
        ]
        print(f"{mode}: {len(null)} tests of unmarked texts in {time.perf_counter() - began:.0f} s", flush=True)
        opened = [each.prompt + each.opening for each in marked]
        variants = {"none": [each.text for each in marked]}
        for attack in (attacks[each] for each in arguments.attacks):
            variants[attack.name] = attack(variants["none"], seed=3, prompts=opened)
        for name, texts in variants.items():
            results = detected(texts, opened, of)
            cells = []
            for length in LENGTHS:
                found = scored(results, null, length)
                if found is None:
                    continue
                rate = found["calibrated"]["tpr1"]
                record["results"].append(
                    {"name": f"{mode}, {name}, {length} sentences", "mode": mode, "attack": name, "sentences": length,
                     "value": rate["value"], "unit": "TPR at 1 % FPR, calibrated z", **found}
                )  # fmt: skip
                curves.setdefault(f"{mode}, {name}", []).append((length, rate["value"], *rate["interval95"]))
                cells.append(
                    f"{length}: "
                    + " ".join(
                        f"{each['tpr1']['value']:.2f}/{each['tpr5']['value']:.2f}/{each['auc']:.3f}"
                        for each in (found["plain"], found["calibrated"])
                    )
                )
            print(f"{mode:>8} {name:<20}" + " | ".join(cells), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.plot:
        plot_power(curves, arguments.plot)


if __name__ == "__main__":
    main()
