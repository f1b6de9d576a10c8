"""What steering costs while SmolLM2 writes in transformers: several steps, one step, one fixed vector (CAA), nothing.

All take turns within a round. A ratio above 1 is slower than CAA.

Run as `python bench_generation.py [--json FILE] [--dtypes float32 bfloat16] [--batches 1 10] [--rounds 9]`.
"""

import argparse
import contextlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from bodes_steer import CAA, ODESteer, StepODESteer, steer
from separata_core.models import capture_hidden_states
from separata_embedded import load_smollm2

LAYER = 14
LIKED = (
    "What a lovely film, I loved every minute of it.",
    "Great acting, and a wonderful, moving story.",
    "This was the best day of my life!",
    "The food was delicious and the people were kind.",
)
DISLIKED = (
    "What an awful film, I hated every minute of it.",
    "Bad acting, and a terrible, boring story.",
    "This was the worst day of my life!",
    "The food was disgusting and the people were rude.",
)
PROMPT = "The film began, and the people in the seats around me"


def activations(model: Any, tokenizer: Any, texts: tuple[str, ...]) -> torch.Tensor:
    """Of the last token of each text."""
    with torch.no_grad(), capture_hidden_states(model, [LAYER]) as records:
        for text in texts:
            model(**tokenizer(text, return_tensors="pt"))
    return torch.cat([states[:, -1] for states in records[LAYER]]).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 10])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()

    results = []
    print(f"{'tokens/s':<24}{'':<16}{'steered':>10}{'against CAA':>14}")
    for dtype in arguments.dtypes:
        model, tokenizer = load_smollm2(dtype=dtype)
        texts = (activations(model, tokenizer, LIKED), activations(model, tokenizer, DISLIKED))
        ways: dict[str, Any] = {
            "nothing": None,
            "CAA": CAA(T=1.0).fit(*texts),
            "one step": StepODESteer(T=15.0, random_state=0).fit(*texts),
            "10 steps": ODESteer(T=15.0, random_state=0).fit(*texts),
        }
        for batch in arguments.batches:
            inputs = tokenizer([PROMPT] * batch, return_tensors="pt")

            def seconds(way: Any, model: Any = model, inputs: Any = inputs) -> float:
                with contextlib.nullcontext() if way is None else steer(model, way, layer=LAYER):
                    began = time.perf_counter()
                    model.generate(
                        **inputs,
                        max_new_tokens=arguments.tokens,
                        min_new_tokens=arguments.tokens,
                        do_sample=False,
                        pad_token_id=model.generation_config.eos_token_id,
                    )
                    return time.perf_counter() - began

            for way in ways.values():
                seconds(way)
            times: dict[str, list[float]] = {name: [] for name in ways}
            for round_ in range(arguments.rounds):
                for name in list(ways) if round_ % 2 else list(ways)[::-1]:
                    times[name].append(seconds(ways[name]))
            for name in ways:
                # The best of the rounds, since what else runs on a machine only ever slows one down.
                best = {each: min(taken) for each, taken in times.items()}
                rate, ratio = batch * arguments.tokens / best[name], best[name] / best["CAA"]
                print(f"{dtype + ', batch ' + str(batch):<24}{name:<16}{rate:>10.1f}{ratio:>14.3f}")
                results.append(
                    {
                        "name": f"{name}, {dtype}, batch {batch}",
                        "value": rate,
                        "unit": "tokens/s",
                        "peer": "CAA in the same run",
                        "ratio": ratio,
                    }
                )
    if arguments.json:
        record = {
            "benchmark": "bodes-steer generation",
            "machine": arguments.machine,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
