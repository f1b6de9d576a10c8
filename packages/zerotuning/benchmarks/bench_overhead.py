"""What the operator costs: a model under a configuration against the same model without one, in one run.

Prefill is also set against two other ways to have the same function: the bias in a mask for SDPA, and edited weights in
eager attention, which is how the paper's authors do it.

Run as `python bench_overhead.py [--json FILE] [--dtype float32] [--tokens 2048] [--rounds 7]`.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from zerotuning import ZeroTuningConfig, apply
from zerotuning.attention import Path as Way


def make_model(dtype: torch.dtype, layers: int) -> LlamaForCausalLM:
    """The shape of SmolLM2-135M with fewer layers and a small vocabulary, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def paired(plain: Callable[[], object], tuned: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median seconds of both and the median of their ratios, run in turn so that a busy machine slows both."""
    plain(), tuned()
    times: list[tuple[float, float]] = []
    for round_ in range(rounds):
        pair = [0.0, 0.0]
        for which in (0, 1) if round_ % 2 else (1, 0):
            began = time.perf_counter()
            (plain, tuned)[which]()
            pair[which] = time.perf_counter() - began
        times.append((pair[0], pair[1]))
    before, after = (statistics.median(each[i] for each in times) for i in (0, 1))
    return before, after, statistics.median(tuned_s / plain_s for plain_s, tuned_s in times)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()

    model = make_model(getattr(torch, arguments.dtype), arguments.layers)
    config = ZeroTuningConfig.uniform(model, 2.0)
    prompt = torch.randint(5, 1000, (1, arguments.tokens))
    results = []

    def run(
        name: str,
        plain: Callable[[], object],
        tuned: Callable[[], object],
        unit_count: int,
        peer: str = "the untouched model (SDPA)",
    ) -> None:
        before, after, ratio = paired(plain, tuned, arguments.rounds)
        print(f"{name:<28}{before * 1e3 / unit_count:>10.2f}{after * 1e3 / unit_count:>10.2f}{ratio:>8.3f}")
        results.append(
            {
                "name": name,
                "value": after * 1e3 / unit_count,
                "unit": "ms",
                "peer": peer,
                "ratio": ratio,
            }
        )

    def forward(cache: DynamicCache | None = None, tokens: torch.Tensor = prompt) -> DynamicCache:
        return model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    def under(function: Callable[[], object], path: Way = "auto", attention: str = "sdpa") -> Callable[[], object]:
        def inside() -> object:
            model.set_attn_implementation(attention)
            try:
                with apply(model, config, path):
                    return function()
            finally:
                model.set_attn_implementation("sdpa")

        return inside

    print(f"{'':<28}{'peer ms':>10}{'tuned ms':>10}{'ratio':>8}")
    run(f"prefill of {arguments.tokens} tokens", forward, under(forward), 1)
    run("  against a mask", under(forward, "bias"), under(forward), 1, "the bias in a mask (SDPA)")
    edited = under(forward, "post_softmax", "eager")
    run("  against edited weights", edited, under(forward), 1, "edited weights (eager)")

    steps = 16
    caches = {"plain": forward()}
    with apply(model, config):
        caches["tuned"] = forward()

    def decode(which: str) -> Callable[[], object]:
        def inside() -> object:
            cache = copy.deepcopy(caches[which])
            for step in range(steps):
                forward(cache, prompt[:, step : step + 1])
            return None

        return inside

    run(f"decoding after {arguments.tokens} tokens", decode("plain"), under(decode("tuned")), steps)

    if arguments.json:
        record = {
            "benchmark": "zerotuning overhead",
            "machine": arguments.machine,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
