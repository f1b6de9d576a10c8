"""What the method gains on real text: film-review snippets that people rated, SmolLM2, and every baseline beside it.

Half of the snippets are to calibrate on, the other half to test on; all comparisons are paired, on the same test items,
against the untouched model. The baselines: the same factors on random heads, a temperature, contextual calibration of
the label words, PASTA with the review emphasised on the heads that the profile chose, and ACT on these and on all.

Run as `python bench_reviews.py [--json FILE] [--items 300] [--test 600] [--seed 0]`.
"""

import argparse
import contextlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from separata_embedded import load_smollm2, rated_texts
from zerotuning import (
    TASKS,
    CalibrationResult,
    Example,
    ModelId,
    ZeroTuningConfig,
    calibrate,
    contextual_calibration,
)
from zerotuning.baselines import act, pasta, temperature
from zerotuning.demo import DEMO_GRID, choose_reviews
from zerotuning.evaluation import compare
from zerotuning.scoring import Predictions, Scorer, distribution_entropy

TASK = TASKS["mr"]
CURVE = (0.25, 0.5, 1.0, 2.0, 4.0, 10.0)
RANDOM_DRAWS = 3
ROWS = 16


def answers_inside(
    model: Any, tokenizer: Any, data: Sequence[Example], inside: Callable[[torch.Tensor], Any]
) -> Predictions:
    """Answers of a model inside a context that is made for each batch from the marks of the review's tokens."""
    labels = [ids[0] for ids in TASK.label_tokens(tokenizer)]
    before, after = (len(tokenizer(part)["input_ids"]) for part in TASK.template.split("{text}"))
    found: list[tuple[int, tuple[float, ...], float]] = []
    for first in range(0, len(data), ROWS):
        prompts = [TASK.prompt(each) for each in data[first : first + ROWS]]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="right")
        lengths = batch["attention_mask"].sum(1, keepdim=True)
        at = torch.arange(batch["input_ids"].shape[1])
        with torch.inference_mode(), inside((at >= before) & (at < lengths - after)):
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        log_probs = logits[torch.arange(len(prompts)), lengths[:, 0] - 1].float().log_softmax(-1)
        for each in log_probs:
            parsed = TASK.parse(tokenizer.decode([int(each.argmax())]))
            found.append((parsed, tuple(each[labels].tolist()), float(distribution_entropy(each))))
    parsed_all, scores, entropies = zip(*found, strict=True)
    return Predictions(parsed_all, scores, entropies)


@contextlib.contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def chosen(result: CalibrationResult) -> str:
    pairs = result.config.log_gamma.nonzero().tolist()
    heads = sorted({head for _, head in pairs})
    if not heads:
        return "gamma 1"
    if result.profile is not None and result.profile.granularity == "layer_head":
        return f"gamma {result.gamma:g} on {len(pairs)} pairs of layer and head"
    which = "all heads" if len(heads) == result.config.model_id.query_heads else f"heads {', '.join(map(str, heads))}"
    return f"gamma {result.gamma:g} on {which}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--test", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()

    began = time.monotonic()
    model, tokenizer = load_smollm2(dtype=arguments.dtype)
    dev, test = choose_reviews(
        rated_texts("movie"), tokenizer, (arguments.items, arguments.test), max_tokens=32, seed=arguments.seed
    )
    identity = ModelId.of(model)
    scorer = Scorer(model, tokenizer, TASK, test, batch_rows=ROWS)
    [vanilla] = scorer.predict([ZeroTuningConfig.uniform(identity, 1.0)])
    results: list[dict[str, Any]] = []

    def report(name: str, answers: Predictions, choice: str = "") -> None:
        found = compare(test, vanilla, answers)
        scores, paired, among = found.tuned, found.accuracy, found.constrained_accuracy
        entropy = sum(answers.entropies) / len(test)
        print(
            f"{name:<34}{scores.accuracy.value:>7.3f}{scores.parse_rate.value:>8.3f}{scores.accuracy_parsed.value:>8.3f}"
            f"{scores.constrained_accuracy.value:>8.3f}{entropy:>8.3f}   {paired.difference:>+6.3f} "
            f"p={paired.p_value:<8.2g}{among.difference:>+6.3f} p={among.p_value:<8.2g}{choice}",
            flush=True,
        )
        results.append(
            {
                "name": name,
                "value": scores.accuracy.value,
                "unit": "accuracy over all items",
                "peer": "the untouched model",
                "ratio": scores.accuracy.value / found.vanilla.accuracy.value,
                "choice": choice,
                "entropy": entropy,
                **found.to_json(),
            }
        )

    def under(config: ZeroTuningConfig) -> Predictions:
        return scorer.predict([config])[0]

    # What one calibration has evaluated, the others need not.
    points = tempfile.TemporaryDirectory()
    known = Path(points.name, "points.jsonl")

    def tuned(**options: Any) -> CalibrationResult:
        return calibrate(model, tokenizer, dev, TASK, batch_rows=ROWS, resume=known, **options)

    print(f"{len(dev)} snippets to calibrate on, {len(test)} to test on, seed {arguments.seed}, {arguments.dtype}")
    print(
        f"{'':<34}{'acc.':>7}{'parsed':>8}{'among':>8}{'constr.':>8}{'entropy':>8}   {'accuracy paired':<17}"
        "constrained paired"
    )
    report("untouched", vanilla)
    for gamma in CURVE:
        if gamma != 1:
            report(f"gamma {gamma:g} on all heads", under(ZeroTuningConfig.uniform(identity, gamma)))
    uniform = tuned()
    report("supervised, all heads", under(uniform.config), chosen(uniform))
    profiled = tuned(heads="profile")
    report("supervised, profiled heads", under(profiled.config), chosen(profiled))
    constrained = tuned(heads="profile", metric="constrained_accuracy")
    report("the same, by constrained accuracy", under(constrained.config), chosen(constrained))
    for metric in ("accuracy", "constrained_accuracy"):
        found = tuned(heads="profile", granularity="layer_head", method="gradient", metric=metric)
        name = "pairs by gradient" if metric == "accuracy" else "the same, by constrained accuracy"
        report(name, under(found.config), chosen(found))
    for objective in ("entropy", "label_entropy"):
        found = tuned(mode="unsupervised", objective=objective)
        report(f"unsupervised, {objective}", under(found.config), "; ".join([chosen(found), *found.warnings]))
    for seed in range(RANDOM_DRAWS):
        found = tuned(heads="profile", combine="random", seed=seed, grid=DEMO_GRID)
        report(f"random heads, draw {seed}", under(found.config), chosen(found))
    warmer = max(
        (temperature(identity, gamma) for gamma in (0.7, 0.85, 1.2, 1.5)),
        key=lambda config: (
            Scorer(model, tokenizer, TASK, dev, batch_rows=ROWS).predict([config])[0].scores(dev).accuracy.value
        ),
    )
    report("temperature", under(warmer), f"factor {warmer.log_gamma[0, 0].exp():.3g}")
    report("contextual calibration", contextual_calibration(model, tokenizer, TASK, test, batch_rows=ROWS))
    heads = {
        layer: [head for head in range(identity.query_heads) if profiled.config.log_gamma[layer, head]]
        for layer in profiled.config.layers
    }
    report("PASTA", answers_inside(model, tokenizer, test, lambda marks: pasta(model, heads, marks)), "profiled heads")
    with attention(model, "eager"):
        for name, of_layers in (("profiled heads", heads), ("all heads of layers 2 to L - 2", None)):
            report("ACT", answers_inside(model, tokenizer, test, lambda _, which=of_layers: act(model, which)), name)
    points.cleanup()
    print(f"{time.monotonic() - began:.0f} s")

    if arguments.json:
        record = {
            "benchmark": "zerotuning on film reviews",
            "machine": arguments.machine,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "model": "SmolLM2-135M-Instruct",
            "dtype": arguments.dtype,
            "calibration_items": len(dev),
            "test_items": len(test),
            "seed": arguments.seed,
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
