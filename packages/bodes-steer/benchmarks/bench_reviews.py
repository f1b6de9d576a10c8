"""What steering does to the mood of what SmolLM2 writes: every method at the same lengths, both ways.

Steerers are fitted on film-review snippets that people rated; the texts are sampled continuations of neutral prompts.
The judge is the VADER lexicon, which knows nothing of the model; perplexity is that under the model as it is. All
comparisons are paired by prompt.

Run as `python bench_reviews.py [--json FILE] [--samples 2] [--seed 0]`.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from bodes_steer import CAA, ITI, LogDensityRatio, ODESteer, PolynomialCountSketch, StepODESteer, extract_activations
from bodes_steer.demo import PROMPTS, choose_reviews
from bodes_steer.features import IdentityFeatures
from bodes_steer.lexicon import vader_judge
from bodes_steer.metrics import PairedBootstrap, paired_bootstrap
from bodes_steer.steerers import Steerer
from bodes_steer.sweeps import written_texts
from separata_embedded import load_smollm2, rated_texts

LAYER = 14
SHARES = (0.05, 0.1, 0.15, -0.1)
HOW = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}


def by_prompt(scores: tuple[float, ...], samples: int) -> list[float]:
    return [sum(scores[at : at + samples]) / samples for at in range(0, len(scores), samples)]


def shown(found: PairedBootstrap) -> str:
    low, high = found.interval
    return f"{found.difference:>+7.3f} [{low:+.3f}, {high:+.3f}] p={found.p_value:<8.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()
    began, seed = time.monotonic(), arguments.seed

    model, tokenizer = load_smollm2(dtype="float32")
    parts = choose_reviews(rated_texts("movie"), (200, 50), seed=seed)
    (pos, neg), (test_pos, test_neg) = (
        extract_activations(
            model, tokenizer, [text for text, _ in part], [LAYER], labels=[label for _, label in part], batch_size=32
        ).pair(LAYER)
        for part in parts
    )
    fit_rows, fit_labels = torch.cat([neg, pos]), torch.tensor([0] * len(neg) + [1] * len(pos))
    test_rows, test_labels = torch.cat([test_neg, test_pos]), torch.tensor([0] * len(test_neg) + [1] * len(test_pos))

    print(f"held-out accuracy of probes ({len(test_rows)} texts)")
    probes: list[dict[str, Any]] = []
    for inverse in (1.0, 100.0):
        for name, features in (
            ("linear, raw", IdentityFeatures()),
            ("sketch, gamma 0.1", PolynomialCountSketch(random_state=seed)),
            ("sketch, gamma 1", PolynomialCountSketch(gamma=1.0, random_state=seed)),
        ):
            accuracy = float(
                LogDensityRatio(features, C=inverse).fit(fit_rows, fit_labels).score(test_rows, test_labels)
            )
            probes.append({"features": name, "C": inverse, "accuracy": accuracy})
            print(f"  {name:<20}C={inverse:<6g}{accuracy:.3f}")

    steerers: dict[str, Steerer] = {
        "CAA direction": CAA(),
        "ITI": ITI(),
        "one step": StepODESteer(random_state=seed),
        "ten steps": ODESteer(random_state=seed),
        "ten steps, C=100": ODESteer(C=100.0, random_state=seed),
        "ten steps, gamma=1, C=100": ODESteer(gamma=1.0, C=100.0, random_state=seed),
    }
    for steerer in steerers.values():
        steerer.fit(pos, neg)
    direction = steerers["CAA direction"].constant_vector
    assert direction is not None
    norm = float(steerers["CAA direction"].median_norm_)
    print(f"median activation norm {norm:.1f}, norm of the CAA vector {float(direction.norm()):.1f}")
    print("cosines on held-out negatives: field with CAA; first with last step by share of the norm")
    fields: list[dict[str, Any]] = []
    for name, steerer in steerers.items():
        if steerer.has_barrier and name != "one step":
            field = steerer.vector_field(test_neg)
            with_caa = float(torch.cosine_similarity(field, direction[None], dim=-1).mean())
            turns = {
                share: float(steerer.trajectory(test_neg, share * norm).angle.double().cos().mean())
                for share in (0.05, 0.1, 0.15, 0.3)
            }
            fields.append(
                {"name": name, "with_caa": with_caa, "first_with_last": {str(k): v for k, v in turns.items()}}
            )
            print(
                f"  {name:<27}{with_caa:.3f}; " + ", ".join(f"{share:g}: {each:.3f}" for share, each in turns.items())
            )

    conditions: list[tuple[str, Steerer, float, float | None]] = [
        ("untouched", steerers["ten steps"], 0.0, None),
        ("CAA, T=1", steerers["CAA direction"], 1.0, None),
    ]
    chosen = [(name, share) for share in SHARES for name in ("CAA direction", "ITI", "one step", "ten steps")]
    chosen += [("ten steps, C=100", 0.1), ("ten steps, gamma=1, C=100", 0.1)]
    conditions += [(name, steerers[name], steerers[name].absolute_T(share), share) for name, share in chosen]
    prompts = [prompt for prompt in PROMPTS for _ in range(arguments.samples)]
    judge = vader_judge()
    scores: dict[tuple[str, float | None], list[float]] = {}
    results: list[dict[str, Any]] = []
    print(f"\n{len(prompts)} continuations of {len(PROMPTS)} prompts, {arguments.tokens} tokens, seed {seed}")
    print(
        f"{'':<28}{'share':>6}{'T':>8}{'VADER':>8}{'ppl':>7}{'dist-2':>8}   {'against untouched':<39}"
        "against the CAA direction"
    )
    for name, steerer, strength, share in conditions:
        texts = written_texts(
            model, tokenizer, steerer, prompts, judge, layer=LAYER, T=strength, batch_size=32, seed=seed,
            max_new_tokens=arguments.tokens, **HOW,
        )  # fmt: skip
        scores[name, share] = by_prompt(texts.scores, arguments.samples)
        plain = paired_bootstrap(scores["untouched", None], scores[name, share], seed=seed)
        against = None
        if ("CAA direction", share) in scores and name != "CAA direction":
            against = paired_bootstrap(scores["CAA direction", share], scores[name, share], seed=seed)
        print(
            f"{name:<28}{'' if share is None else f'{share:g}':>6}{strength:>8.3g}{texts.mean:>8.3f}"
            f"{texts.perplexity.value:>7.2f}{texts.distinct[2]:>8.3f}   "
            f"{'' if name == 'untouched' else shown(plain):<39}{'' if against is None else shown(against)}".rstrip(),
            flush=True,
        )
        results.append(
            {
                "name": name if share is None else f"{name}, share {share:g}",
                "value": texts.mean,
                "unit": "mean VADER compound",
                "peer": "untouched",
                "ratio": texts.mean / results[0]["value"] if results else 1.0,
                "share": share,
                "T": strength,
                "perplexity": texts.perplexity.value,
                "dist_2": texts.distinct[2],
                "against_untouched": plain.to_json(),
                "against_caa_direction": None if against is None else against.to_json(),
            }
        )
    print(f"{time.monotonic() - began:.0f} s")

    if arguments.json:
        record = {
            "benchmark": "bodes-steer on film reviews",
            "machine": arguments.machine,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "model": "SmolLM2-135M-Instruct",
            "layer": LAYER,
            "fitted_on": len(fit_rows),
            "tested_on": len(test_rows),
            "prompts": len(PROMPTS),
            "samples": arguments.samples,
            "seed": seed,
            "median_norm": norm,
            "caa_norm": float(direction.norm()),
            "probes": probes,
            "fields": fields,
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
