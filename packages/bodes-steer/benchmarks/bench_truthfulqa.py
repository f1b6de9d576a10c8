"""MC1 and MC2 on TruthfulQA with SmolLM2: the plain model, CAA, ITI, one step and ten steps of the flow.

Prompt, answers, scores, folds and the choice of T are as `bodes_steer.truthfulqa` states them. Two things stand beside:

* The probes' accuracy on the half that was not fitted on: how much of truth can be read off the block's output at all.
* Random directions at every strength of the grid, on all questions: what MC1 and MC2 do when one pushes just anywhere.

Run as `python bench_truthfulqa.py --csv TruthfulQA.csv [--json FILE] [--journal FILE] [--questions 100]`.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from bodes_steer.baselines import CAA
from bodes_steer.metrics import paired_bootstrap
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


def probe_accuracy(scorer: AnswerScorer, states: Sequence[torch.Tensor], seed: int) -> dict[str, float]:
    """Share of held-out answers on the right side of h = 0, mean of both classes and both folds."""
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


def random_directions(
    scorer: AnswerScorer, plain: Sequence[Sequence[float]], states: Sequence[torch.Tensor], seed: int
) -> list[dict[str, Any]]:
    """MC1 and MC2 by strength when activations are moved in random directions, and the change of MC2 from the plain."""
    rows = torch.cat(list(states))
    settings = []
    for number, share in enumerate(STRENGTHS):
        # A direction for each strength: those of one draw only would stand or fall together.
        generator = torch.Generator().manual_seed(seed + number)
        steerer = CAA().fit(rows, rows + torch.randn(rows.shape[1], generator=generator))
        settings.append((steerer, steerer.absolute_T(share)))
    found = [scorer.steered(place, settings) for place in range(len(scorer.questions))]
    before = [question.scores(each)[1] for question, each in zip(scorer.questions, plain, strict=True)]
    rows_of_table = []
    for number, share in enumerate(STRENGTHS):
        pairs = [question.scores(each[number]) for question, each in zip(scorer.questions, found, strict=True)]
        mc1, mc2 = zip(*pairs, strict=True)
        change = paired_bootstrap(before, mc2, seed=seed).to_json()
        rows_of_table.append({"share": share, "mc1": sum(mc1) / len(mc1), "mc2": sum(mc2) / len(mc2), "change": change})
    return rows_of_table


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

    resumed = arguments.journal is not None and arguments.journal.exists()
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
    scorer = AnswerScorer(model, tokenizer, questions, found.layer)
    plain, states = zip(*(scorer.plain(place) for place in range(len(questions))), strict=True)
    accuracy = probe_accuracy(scorer, states, arguments.seed)
    print("held-out probe accuracy: " + ", ".join(f"{name} {value:.3f}" for name, value in accuracy.items()))
    control = random_directions(scorer, plain, states, arguments.seed)
    for each in control:
        low, high = each["change"]["interval"]
        print(
            f"random direction, share {each['share']:g}: MC1 {100 * each['mc1']:.1f} %, MC2 {100 * each['mc2']:.1f} % "
            f"({100 * each['change']['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}])"
        )
    print(f"{seconds:.0f} s for the scores" + ", some of them known before" * resumed)

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
            # How long it took says nothing where a journal was continued.
            "seconds": None if resumed else round(seconds),
            "probe_accuracy": accuracy,
            "random_directions": control,
            **found.to_json(),
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
