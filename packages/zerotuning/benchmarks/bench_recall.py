"""What tuning gains where the truth is known: small models trained to recall, half finished, then frozen and tuned.

A prompt is a list of key-value pairs and one of its keys; the answer is that key's value. For each seed a Llama of two
layers is trained from scratch until it answers about 80 % of held-out prompts. It is calibrated on 200 others and
tested on fresh ones, as long as those of its training and twice as long: with heads chosen by the profile, with all
heads, and with as many random heads, whose gamma is searched on the whole grid.

Run as `python bench_recall.py [--json FILE] [--seeds 5] [--tests 3000] [--jobs 2]`. A job has one thread; the
same seeds give the same figures on the same machine, whatever the number of jobs.
"""

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import scipy
import torch
import transformers
import zerotuning
from scipy.stats import ttest_1samp
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from zerotuning import DEFAULT_GRID, Example, TaskSpec, ZeroTuningConfig
from zerotuning.metrics import PairedComparison

SPECIALS = ("<pad>", "<bos>", "<unk>")
KEYS = tuple(f"k{index:02}" for index in range(32))
VALUES = tuple(f"v{index:02}" for index in range(16))
WORDS = (*SPECIALS, *KEYS, *VALUES)
FIRST_KEY, FIRST_VALUE = len(SPECIALS), len(SPECIALS) + len(KEYS)
TASK = TaskSpec("recall", "{text}", VALUES)

TRAINED_PAIRS, LONGER_PAIRS = 16, 32
STOP_AT = 0.8
CALIBRATION = 200
P = 0.4
HOWS = ("profile", "uniform", "random")
METRICS = ("constrained", "full")


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word, `<bos>` in front."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>")


def make_tokens(rows: int, pairs: int, asked: int, generator: torch.Generator) -> Tensor:
    """`[rows, 1 + 2 (pairs + asked)]`: `<bos>`, pairs of different keys, then some of them again with their values."""
    keys = torch.rand(rows, len(KEYS), generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(0, len(VALUES), (rows, pairs), generator=generator)
    again = torch.randint(0, pairs, (rows, asked), generator=generator)
    keys, values = (torch.cat([each, each.gather(1, again)], 1) for each in (keys, values))
    words = torch.stack([keys + FIRST_KEY, values + FIRST_VALUE], -1).flatten(1)
    return torch.cat([torch.full((rows, 1), WORDS.index("<bos>")), words], 1)


def to_examples(tokens: Tensor) -> list[Example]:
    return [Example(" ".join(WORDS[token] for token in row[1:-1]), row[-1] - FIRST_VALUE) for row in tokens.tolist()]


@torch.inference_mode()
def answers(model: LlamaForCausalLM, tokens: Tensor, config: ZeroTuningConfig | None = None) -> dict[str, list[bool]]:
    """Which items are right, when only the values compete and when all words do."""
    config = config or ZeroTuningConfig.uniform(model, 1.0)
    with zerotuning.apply(model, config):
        logits = torch.cat([model(input_ids=part[:, :-1], logits_to_keep=1).logits[:, 0] for part in tokens.split(250)])
    truth = tokens[:, -1]
    constrained = logits[:, FIRST_VALUE:].argmax(-1) + FIRST_VALUE
    return {"constrained": (constrained == truth).tolist(), "full": (logits.argmax(-1) == truth).tolist()}


def train(seed: int) -> tuple[LlamaForCausalLM, int, float]:
    """The frozen model, its training steps, and the held-out accuracy at which training stopped.

    The first lists have two pairs, and only the answers count: otherwise looking back to a key takes very long to be
    learnt. After that it is trained as a language model, on every token: what cannot be foretold is what makes a head
    want to look at nothing, which is at the initial token.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=128,
        attention_bias=True,
        initializer_range=0.1,
        bos_token_id=WORDS.index("<bos>"),
        pad_token_id=WORDS.index("<pad>"),
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    pairs, step, accuracy = 2, 0, 0.0
    held_out = {each: make_tokens(500, each, 1, generator) for each in (pairs, TRAINED_PAIRS)}
    while step < 3000:
        asked = 6 if pairs == 2 else TRAINED_PAIRS
        tokens = make_tokens(1536 // (2 * (pairs + asked) + 1), pairs, asked, generator)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20)
        hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        counted = slice(2 * pairs + 1, None, 2) if pairs == 2 else slice(None)
        logits, wanted = model.lm_head(hidden[:, counted]), tokens[:, 1:][:, counted]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        # Near the end recall improves by points in a few steps.
        if step % (20 if pairs == 2 else 2 if accuracy > 0.7 else 10) == 0:
            accuracy = statistics.mean(answers(model, held_out[pairs])["full"])
            if accuracy >= STOP_AT and pairs == TRAINED_PAIRS:
                return model.eval().requires_grad_(False), step, accuracy
            if accuracy >= STOP_AT:
                pairs, accuracy = TRAINED_PAIRS, 0.0
    raise RuntimeError(f"seed {seed}: training did not reach {STOP_AT} on {pairs} pairs in {step} steps")


def random_heads(model: LlamaForCausalLM, tokens: Tensor, count: int, seed: int) -> tuple[ZeroTuningConfig, float]:
    """The control: random head indices, their gamma the best of the whole grid, ties to the one nearest 1."""
    heads = torch.randperm(model.config.num_attention_heads, generator=torch.Generator().manual_seed(seed))[:count]
    configs = {gamma: ZeroTuningConfig.uniform(model, gamma, heads.tolist()) for gamma in DEFAULT_GRID}
    found = {gamma: sum(answers(model, tokens, config)["constrained"]) for gamma, config in configs.items()}
    best = max(DEFAULT_GRID, key=lambda gamma: (found[gamma], -abs(math.log(gamma)), gamma))
    return configs[best], best


def tune(model: LlamaForCausalLM, seed: int, pairs: int, tests: int) -> dict[str, Any]:
    """Calibrate in the three ways and test each; the record of one seed and one length."""
    generator = torch.Generator().manual_seed(1_000_000 + 1000 * seed + pairs)
    calibration = make_tokens(CALIBRATION, pairs, 1, generator)
    fresh = make_tokens(tests, pairs, 1, generator)
    configs, gammas, scaled = {}, {}, {}
    for how in ("profile", "uniform"):
        result = zerotuning.calibrate(
            model,
            word_tokenizer(),
            to_examples(calibration),
            TASK,
            heads=how,
            metric="constrained_accuracy",
            p=P,
            batch_rows=100,
        )
        configs[how], gammas[how] = result.config, result.gamma
        # Also where gamma 1 was best: then the control has as many heads as were to be scaled.
        chosen = range(model.config.num_attention_heads) if result.profile is None else result.profile.select(P)
        scaled[how] = sorted(chosen)
    count = len(scaled["profile"]) or max(1, round(P * model.config.num_attention_heads))
    configs["random"], gammas["random"] = random_heads(model, calibration, count, seed)
    scaled["random"] = configs["random"].log_gamma[0].nonzero().flatten().tolist()
    right = {"vanilla": answers(model, fresh), **{how: answers(model, fresh, configs[how]) for how in HOWS}}
    pairings = [("vanilla", how) for how in HOWS] + [("random", "profile")]
    return {
        "seed": seed,
        "pairs": pairs,
        "gamma": gammas,
        "heads": scaled,
        "accuracy": {
            metric: {who: statistics.mean(found[metric]) for who, found in right.items()} for metric in METRICS
        },
        "paired": {
            metric: {
                f"{after} against {before}": PairedComparison.of(right[before][metric], right[after][metric]).to_json()
                for before, after in pairings
            }
            for metric in METRICS
        },
    }


@dataclasses.dataclass(frozen=True)
class OverSeeds:
    """Differences of paired runs, one per seed.

    Attributes:
        mean: Their mean.
        t_test: Two-sided p of the paired t test.
        sign_flips: Two-sided p of the exact permutation test, which with n seeds is never below 2 / 2^n.
    """

    mean: float
    t_test: float
    sign_flips: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> "OverSeeds":
        count, total = len(differences), abs(sum(differences))
        flips = itertools.product((1, -1), repeat=count)
        extreme = sum(
            abs(sum(sign * each for sign, each in zip(signs, differences, strict=True))) >= total - 1e-12
            for signs in flips
        )
        varied = count > 1 and len(set(differences)) > 1
        return cls(
            mean=statistics.mean(differences),
            t_test=float(ttest_1samp(differences, 0.0).pvalue) if varied else 1.0,
            sign_flips=extreme / 2**count,
        )


def summarise(records: Sequence[dict[str, Any]], pairs: int, metric: str, after: str, before: str) -> dict[str, Any]:
    """One figure: an accuracy over the seeds beside its peer's."""
    rows = [record for record in records if record["pairs"] == pairs]
    accuracies = [row["accuracy"][metric] for row in rows]
    tests = [row["paired"][metric][f"{after} against {before}"] for row in rows]
    value, peer = (statistics.mean(each[who] for each in accuracies) for who in (after, before))
    return {
        "name": f"{pairs} pairs, {metric} accuracy, {after}",
        "value": value,
        "unit": "share of the items",
        "peer": before,
        "ratio": value / peer,
        "peer_value": peer,
        "difference_by_seed": [test["difference"] for test in tests],
        "over_seeds": dataclasses.asdict(OverSeeds.of([test["difference"] for test in tests])),
        "mcnemar_by_seed": [test["p_value"] for test in tests],
    }


def train_and_tune(seed: int, tests: int) -> list[dict[str, Any]]:
    """The records of one seed, one for each length; in a process of its own."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    model, steps, accuracy = train(seed)
    trained = time.perf_counter()
    training = {"steps": steps, "held_out_accuracy": accuracy}
    records = [{**tune(model, seed, pairs, tests), **training} for pairs in (TRAINED_PAIRS, LONGER_PAIRS)]
    print(
        f"seed {seed}: {steps} steps to {accuracy:.3f} in {trained - began:.0f} s, "
        f"calibrated and tested in {time.perf_counter() - trained:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return records


def run(seeds: int, tests: int, jobs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train, tune and test.

    Args:
        seeds: Models to train.
        tests: Fresh prompts for each model and length.
        jobs: Processes, one thread each.

    Returns:
        The figures over all seeds, and the record of each seed and length.
    """
    sample = make_tokens(1, TRAINED_PAIRS, 1, torch.Generator().manual_seed(0))
    assert word_tokenizer()(to_examples(sample)[0].text)["input_ids"] == sample[0, :-1].tolist()
    # Not forked: a process forked after torch has made its threads may hang.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        records = [each for found in pool.map(train_and_tune, range(seeds), [tests] * seeds) for each in found]
    figures = [
        summarise(records, pairs, metric, after, before)
        for pairs in (TRAINED_PAIRS, LONGER_PAIRS)
        for metric in METRICS
        for after, before in [*((how, "vanilla") for how in HOWS), ("profile", "random")]
    ]
    return figures, records


def print_tables(figures: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> None:
    for pairs in (TRAINED_PAIRS, LONGER_PAIRS):
        print(f"\n{pairs} pairs, gamma (and heads) that calibration chose, by seed")
        for how in HOWS:
            rows = [record for record in records if record["pairs"] == pairs]
            chosen = [
                f"{row['gamma'][how]:g}"
                + (f" ({','.join(map(str, row['heads'][how]))})" if how != "uniform" and row["gamma"][how] != 1 else "")
                for row in rows
            ]
            print(f"  {how:<8} " + "; ".join(chosen))
    print(f"\n{'in %':<40}{'peer':<9}{'before':>7}{'after':>7}{'diff':>7}{'t test':>8}{'flips':>7}  by seed (*: p<.05)")
    for figure in figures:
        over = figure["over_seeds"]
        each = " ".join(
            f"{100 * difference:+.1f}{'*' if p < 0.05 else ''}"
            for difference, p in zip(figure["difference_by_seed"], figure["mcnemar_by_seed"], strict=True)
        )
        print(
            f"{figure['name']:<40}{figure['peer']:<9}{100 * figure['peer_value']:>7.2f}{100 * figure['value']:>7.2f}"
            f"{100 * over['mean']:>+7.2f}{over['t_test']:>8.3f}{over['sign_flips']:>7.3f}  {each}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tests", type=int, default=3000)
    parser.add_argument("--jobs", type=int, default=2, help="models at work at the same time")
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()

    began = time.perf_counter()
    figures, records = run(arguments.seeds, arguments.tests, arguments.jobs)
    seconds = time.perf_counter() - began
    print_tables(figures, records)
    print(f"\n{arguments.seeds} seeds, {arguments.tests} test prompts each, {seconds:.0f} s")
    if arguments.json:
        report = {
            "benchmark": "zerotuning recall",
            "machine": arguments.machine,
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "scipy": scipy.__version__,
            },
            "settings": {
                "seeds": arguments.seeds,
                "tests": arguments.tests,
                "calibration": CALIBRATION,
                "jobs": arguments.jobs,
                "seconds": seconds,
            },
            "results": figures,
            "seeds": records,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
