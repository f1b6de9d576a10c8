"""MC1 and MC2 on TruthfulQA with SmolLM2: the plain model, CAA, ITI, one step and ten steps of the flow.

Prompt, answers, scores, folds and the choice of T are as `bodes_steer.truthfulqa` states them. The probes' accuracy on
the half that was not fitted on is shown beside: how much of truth can be read off the block's output at all.

Run as `python bench_truthfulqa.py --csv TruthfulQA.csv [--json FILE] [--journal FILE] [--questions 100]`.
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
from bodes_steer.steerers import make_steerer
from bodes_steer.truthfulqa import (
    METHODS,
    PROMPT,
    STRENGTHS,
    AnswerScorer,
    evaluate_truthfulqa,
    read_truthfulqa,
    two_halves,
)
from separata_embedded import load_smollm2

PROBES = {"sketch": "step-odesteer", "raw linear": "linear-ode"}


def probe_accuracy(scorer: AnswerScorer, seed: int) -> dict[str, float]:
    """Share of held-out answers on the right side of h = 0, mean of both classes and both folds."""
    states = [scorer.plain(place)[1] for place in range(len(scorer.questions))]
    correct = [len(question.correct) for question in scorer.questions]
    halves = two_halves(len(states), seed)
    shares: dict[str, list[float]] = {name: [] for name in PROBES}
    for fold, held_out in enumerate(halves):
        fitting = halves[1 - fold]
        classes = [
            [torch.cat([states[each][part(correct[each])] for each in places]) for part in (slice, _after)]
            for places in (fitting, held_out)
        ]
        for name, method in PROBES.items():
            params: dict[str, Any] = {"random_state": seed} if name == "sketch" else {}
            steerer = make_steerer(method, **params).fit(*classes[0])
            pos, neg = (steerer.log_ratio(each) for each in classes[1])
            shares[name] += [float((pos > 0).float().mean()), float((neg < 0).float().mean())]
    return {name: sum(values) / len(values) for name, values in shares.items()}


def _after(count: int) -> slice:
    return slice(count, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--journal", type=Path, help="scores go here as they come, and a run continues it")
    parser.add_argument("--questions", type=int, help="the first so many; all by default")
    parser.add_argument("--layer", type=int, default=14)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()

    began = time.monotonic()
    model, tokenizer = load_smollm2(dtype=arguments.dtype)
    questions = read_truthfulqa(arguments.csv)[: arguments.questions]
    answers = sum(len(each.answers) for each in questions)
    print(f"{len(questions)} questions, {answers} answers, block {arguments.layer}, {arguments.dtype}", flush=True)
    found = evaluate_truthfulqa(
        model, tokenizer, questions, layer=arguments.layer, seed=arguments.seed, journal=arguments.journal
    )
    seconds = time.monotonic() - began
    print(found.table(), flush=True)
    accuracy = probe_accuracy(AnswerScorer(model, tokenizer, questions, arguments.layer), arguments.seed)
    print("held-out probe accuracy: " + ", ".join(f"{name} {value:.3f}" for name, value in accuracy.items()))
    print(f"{seconds:.0f} s for the scores")

    if arguments.json:
        record = {
            "benchmark": "TruthfulQA MC1 and MC2",
            "machine": arguments.machine,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "model": "SmolLM2-135M-Instruct",
            "dtype": arguments.dtype,
            "prompt": PROMPT + " {answer}",
            "answers": answers,
            "strengths": list(STRENGTHS),
            "methods": list(METHODS),
            "seconds": round(seconds),
            "probe_accuracy": accuracy,
            **found.to_json(),
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
