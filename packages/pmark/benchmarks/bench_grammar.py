"""The paper's comparison in small: a toy language whose every sentence has a paraphrase, and a real sentence encoder.

The language model draws uniformly from 10 subjects x 10 verbs x 10 objects x 4 adverbials, 4,000 sentences; every word
has a synonym, so every sentence has a paraphrase that shares nothing but the sense. Each method marks texts of 12
sentences, each with a key of its own. What is reported: z and power (at 1 % of false positives over unmarked texts) as
they are and paraphrased, and the distortion: how far the subjects' frequencies in marked text are from uniform. For
this PMark's pivots are the same in all texts, as they are for the owner of one key; over random pivots even the offline
scheme's distortion averages out. A method without distortion has a chi-square of about 9, for 9 degrees of freedom.

Run as `python bench_grammar.py [--json FILE] [--texts 150] [--null 1000]`.
"""

import argparse
import itertools
import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pmark import CallableSampler, KSemStamp, PMark, PMarkKey, SemStamp
from pmark.encoders import TextEncoder, as_encoder
from pmark.semstamp import spherical_k_means
from separata_embedded import load_sentence_encoder

SUBJECTS = {
    "The doctor": "A physician", "My neighbour": "A neighbour of mine", "The old farmer": "An elderly grower",
    "A young girl": "One small child", "The thief": "Some burglar", "Our teacher": "An instructor of ours",
    "The king": "The monarch", "A soldier": "A trooper", "The lawyer": "An attorney", "His wife": "His spouse",
}  # fmt: skip
VERBS = {
    "bought": "purchased", "hid": "concealed", "broke": "smashed", "found": "discovered", "painted": "coloured in",
    "lost": "mislaid", "cleaned": "washed", "described": "spoke about", "carried": "hauled", "wanted": "longed for",
}  # fmt: skip
OBJECTS = {
    "the car": "an automobile", "a picture": "some artwork", "the house": "that dwelling", "a horse": "a mare",
    "the letter": "a written note", "some bread": "a loaf", "the boat": "a small vessel", "a coat": "the jacket",
    "the stone": "a piece of rock", "the money": "all that cash",
}  # fmt: skip
ADVERBIALS = {
    "in the morning": "at dawn", "with great care": "cautiously", "near the river": "beside the stream",
    "without a reason": "for no cause",
}  # fmt: skip

SENTENCES = [
    (f"{a} {b} {c} {d}.", f"{SUBJECTS[a]} {VERBS[b]} {OBJECTS[c]} {ADVERBIALS[d]}.")
    for a, b, c, d in itertools.product(SUBJECTS, VERBS, OBJECTS, ADVERBIALS)
]
PARAPHRASE = dict(SENTENCES)
PROMPT = "This is what happened."
LENGTH = 12


def language(seed: int) -> Callable[[str, int], Sequence[str]]:
    rng = np.random.default_rng(seed)
    return lambda context, count: [
        " " + SENTENCES[each][0] + " Then" for each in rng.integers(len(SENTENCES), size=count)
    ]


def plain(count: int, seed: int) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    return [[SENTENCES[each][0] for each in rng.integers(len(SENTENCES), size=LENGTH)] for _ in range(count)]


def text_of(sentences: Sequence[str]) -> str:
    return " ".join([PROMPT, *sentences])


def subject_test(texts: Sequence[Sequence[str]]) -> tuple[float, float]:
    """Chi-square of the subjects' counts against uniform ones, and the total variation."""
    counts = Counter(
        next(each for each in SUBJECTS if sentence.startswith(each)) for text in texts for sentence in text
    )
    observed = np.array([counts[each] for each in SUBJECTS], dtype=float)
    expected = observed.sum() / len(SUBJECTS)
    return float(((observed - expected) ** 2 / expected).sum()), float(
        np.abs(observed / observed.sum() - 0.1).sum() / 2
    )


def methods(encoder: TextEncoder, centres: np.ndarray) -> dict[str, Callable[..., Any]]:
    """For each name what makes the method with the key of a number; `fixed` keeps PMark's pivots."""

    def pmark(seed: int, fixed: bool, **options: Any) -> PMark:
        key = PMarkKey.generate(4, secret=seed.to_bytes(32, "big"))
        if fixed:
            key = PMarkKey.from_authors(np.random.default_rng(seed).integers(2, size=4 * (LENGTH + 1)).tolist())
        return PMark(encoder, key, num_samples=64, segmenter="regex", seed=seed, **options)

    return {
        "PMark, online": lambda seed, fixed=False: pmark(seed, fixed, mode="online"),
        "PMark, offline": lambda seed, fixed=False: pmark(seed, fixed, mode="offline"),
        "SemStamp": lambda seed, fixed=False: SemStamp(encoder, key=seed + 1, margin=0.0, segmenter="regex", seed=seed),
        "k-SemStamp": lambda seed, fixed=False: KSemStamp(
            encoder, centres, key=seed + 1, margin=0.0, segmenter="regex", seed=seed
        ),
    }


def measured(make: Callable[..., Any], texts: int, null: int) -> dict[str, float]:
    clean, paraphrased, samples = [], [], 0
    for seed in range(texts):
        method, sampler = make(seed), CallableSampler(language(seed))
        found = method.generate(sampler, PROMPT, max_sentences=LENGTH)
        samples += found.samples
        both = [found.text, text_of([PARAPHRASE[each] for each in found.sentences])]
        first, second = method.detect_batch(both, sampler=sampler)
        clean.append(first.z)
        paraphrased.append(second.z)
    unmarked = []
    for number, sentences in enumerate(plain(null, seed=1_000_000)):
        seed = 10_000 + number
        unmarked.append(make(seed).detect(text_of(sentences), sampler=CallableSampler(language(seed))).z)
    threshold = float(np.quantile(unmarked, 0.99))
    repeated = [
        make(seed, fixed=True).generate(CallableSampler(language(seed)), PROMPT, max_sentences=LENGTH).sentences
        for seed in range(50_000, 50_000 + texts)
    ]
    chi_square, variation = subject_test(repeated)
    return {
        "z": float(np.mean(clean)),
        "z_paraphrased": float(np.mean(paraphrased)),
        "tpr": float(np.mean(np.array(clean) > threshold)),
        "tpr_paraphrased": float(np.mean(np.array(paraphrased) > threshold)),
        "fpr_nominal": float(np.mean(np.array(unmarked) > 1.645)),
        "chi_square": chi_square,
        "total_variation": variation,
        "samples_per_sentence": samples / (texts * LENGTH),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--texts", type=int, default=150)
    parser.add_argument("--null", type=int, default=1000)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()

    encoder = as_encoder(load_sentence_encoder())
    originals, paraphrases = (encoder.encode([pair[place] for pair in SENTENCES]) for place in (0, 1))
    cosine = float((originals * paraphrases).sum(axis=1).mean())
    print(f"mean cosine of a sentence and its paraphrase: {cosine:.3f}")

    centres = spherical_k_means(originals[::7], 8)
    print(f"{'':<16}{'z':>6}{'TPR':>7}{'z para':>8}{'TPR':>7}{'FPR at 1.645':>14}{'chi2':>8}{'TV':>7}{'samples':>9}")
    results = []
    for name, make in methods(encoder, centres).items():
        found = measured(make, arguments.texts, arguments.null)
        print(
            f"{name:<16}{found['z']:>6.2f}{found['tpr']:>7.2f}{found['z_paraphrased']:>8.2f}{found['tpr_paraphrased']:>7.2f}"
            f"{found['fpr_nominal']:>14.3f}{found['chi_square']:>8.1f}{found['total_variation']:>7.3f}"
            f"{found['samples_per_sentence']:>9.1f}",
            flush=True,
        )
        results.append(
            {"name": name, "value": found["tpr_paraphrased"], "unit": "TPR at 1 % FPR, paraphrased", **found}
        )
    if arguments.json:
        record = {
            "benchmark": "pmark in a toy language",
            "machine": arguments.machine,
            "versions": {"numpy": np.__version__},
            "cosine_of_paraphrases": cosine,
            "texts": arguments.texts,
            "null_texts": arguments.null,
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
