"""What serving under a configuration costs in vLLM: an engine under one against an engine without, taking turns.

Run as `python bench_vllm.py [--json FILE] [--tokens 1024] [--rounds 15]` where vLLM is installed.
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import tempfile
import time
from pathlib import Path
from typing import Any

NEW_TOKENS = 32


def requests(count: int, tokens: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of random tokens, which no prefix cache has seen."""
    draw = random.Random(seed)
    return [{"prompt_token_ids": [draw.randrange(5, 40_000) for _ in range(tokens)]} for _ in range(count)]


def seconds(engine: Any, prompts: list[dict[str, list[int]]], new_tokens: int) -> float:
    import vllm

    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    began = time.perf_counter()
    engine.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began


def measure(engines: dict[str, Any], rounds: int, tokens: int, batch: int) -> dict[str, dict[str, float]]:
    """Tokens per second of prefill and of decoding in the best of the rounds, for each engine.

    The best, since what else runs on a machine only ever slows a round. Decoding goes on from prompts that lie in the
    prefix cache but for their last token, so that every step computes one token of each sequence.
    """
    prompts = {"decode": requests(1, tokens + 1, 1001), "decode, batch": requests(batch, tokens // 4 + 1, 1002)}
    for engine in engines.values():
        seconds(engine, requests(1, tokens, 1003), 1)
        for each in prompts.values():
            seconds(engine, each, NEW_TOKENS)
    best = {what: dict.fromkeys(engines, 0.0) for what in ("prefill", *prompts)}
    for round_ in range(rounds):
        for name in list(engines) if round_ % 2 else list(engines)[::-1]:
            rates = {"prefill": tokens / seconds(engines[name], requests(1, tokens, round_), 1)}
            for what, each in prompts.items():
                rates[what] = len(each) * NEW_TOKENS / seconds(engines[name], each, NEW_TOKENS)
            for what, rate in rates.items():
                best[what][name] = max(best[what][name], rate)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here; nothing is measured")
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import torch
    import vllm
    from separata_embedded import smollm2_folder
    from zerotuning import ModelId, ZeroTuningConfig
    from zerotuning.vllm import engine_arguments

    identity = ModelId("llama", "SmolLM2-135M-Instruct", 30, 9, 3)
    configs = {
        "all 30 layers": ZeroTuningConfig.uniform(identity, 2.0),
        "10 layers": ZeroTuningConfig.uniform(identity, 2.0, layers=range(10)),
    }
    engines: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, config in {"plain": None, **configs}.items():
                more = {}
                if config is not None:
                    path = Path(folder, f"{len(engines)}.json")
                    config.save(path)
                    more = engine_arguments(path)
                engines[name] = vllm.LLM(
                    str(smollm2_folder(arguments.dtype)),
                    dtype=arguments.dtype,
                    enforce_eager=True,
                    max_model_len=2 * arguments.tokens,
                    max_num_seqs=arguments.batch,
                    **more,
                )
            found = measure(engines, arguments.rounds, arguments.tokens, arguments.batch)
            reports = {name: engines[name].collective_rpc("tuning_report")[0] for name in configs}
        finally:
            for engine in engines.values():
                engine.llm_engine.engine_core.shutdown()

    results = []
    print(f"{'':<34}{'plain':>10}{'tuned':>10}{'ratio':>8}")

    def add(name: str, unit: str, plain: float, tuned: float, ratio: float) -> None:
        print(f"{name:<34}{plain:>10.0f}{tuned:>10.0f}{ratio:>8.3f}")
        results.append({"name": name, "value": tuned, "unit": unit, "peer": "the same engine without", "ratio": ratio})

    for name, report in reports.items():
        for what, rates in found.items():
            # Above 1 the engine under a configuration is slower, as in the other benchmarks.
            add(f"{what}, {name}", "tokens/s", rates["plain"], rates[name], rates["plain"] / rates[name])
        before, after = report["cache_bytes_per_token"]
        add(f"cache of a token, {name}", "bytes", before, after, after / before)

    if arguments.json:
        record = {
            "benchmark": "zerotuning in vLLM",
            "machine": arguments.machine,
            "versions": {"torch": torch.__version__, "vllm": vllm.__version__},
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
