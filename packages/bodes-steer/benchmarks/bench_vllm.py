"""What steering costs in vLLM: an engine that steers every request against one that was started without, taking turns.

A ratio above 1 is slower.

Run as `python bench_vllm.py [--json FILE] [--dtype bfloat16] [--tokens 512] [--rounds 9]` where vLLM is installed.
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
LAYER = 14
WIDTH = 576


def requests(count: int, tokens: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of random tokens."""
    draw = random.Random(seed)
    return [{"prompt_token_ids": [draw.randrange(5, 40_000) for _ in range(tokens)]} for _ in range(count)]


def seconds(engine: Any, prompts: list[dict[str, list[int]]], new_tokens: int) -> float:
    import vllm

    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    began = time.perf_counter()
    engine.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began


def measure(engines: dict[str, Any], rounds: int, tokens: int, batch: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round for each engine; all take turns within a round, in alternating order."""
    work = {
        f"prefill of {tokens} tokens": (requests(1, tokens, 1), 1),
        "writing, batch 1": (requests(1, 8, 2), NEW_TOKENS),
        f"writing, batch {batch}": (requests(batch, 8, 3), NEW_TOKENS),
    }
    times: dict[str, dict[str, list[float]]] = {what: {name: [] for name in engines} for what in work}
    for round_ in range(-1, rounds):  # the first is not counted
        for what, (prompts, new_tokens) in work.items():
            for name in list(engines) if round_ % 2 else list(engines)[::-1]:
                taken = seconds(engines[name], prompts, new_tokens)
                if round_ >= 0:
                    times[what][name].append(taken)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here; nothing is measured")
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import torch
    import vllm
    from bodes_steer import CAA, ODESteer, StepODESteer
    from bodes_steer.files import save_steerer
    from bodes_steer.vllm import engine_arguments
    from separata_embedded import smollm2_folder

    # What the activations are does not matter to the time; they are as long as those of the model.
    generator = torch.Generator().manual_seed(0)
    positive, negative = 6 * torch.randn(2, 64, WIDTH, generator=generator)
    steerers = {
        "CAA": CAA(T=0.1),
        "one step": StepODESteer(T=1.0, random_state=0),
        "10 steps": ODESteer(T=1.0, random_state=0),
    }
    engines: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, steerer in {"nothing": None, **steerers}.items():
                more: dict[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False}
                if steerer is not None:
                    path = Path(folder, f"{len(engines)}.safetensors")
                    save_steerer(steerer.fit(positive, negative), path, layer=LAYER)
                    more = engine_arguments(path)
                engines[name] = vllm.LLM(
                    str(smollm2_folder(arguments.dtype)),
                    dtype=arguments.dtype,
                    max_model_len=2 * arguments.tokens,
                    max_num_seqs=arguments.batch,
                    **more,
                )
            times = measure(engines, arguments.rounds, arguments.tokens, arguments.batch)
            reports = {name: engines[name].collective_rpc("steering_report")[0] for name in steerers}
        finally:
            for engine in engines.values():
                engine.llm_engine.engine_core.shutdown()
    for name, report in reports.items():
        if not report["steered_tokens"]:
            raise RuntimeError(f"{name} steered nothing")

    results = []
    print(f"{'':<28}{'':<10}{'best ms':>11}{'against nothing':>17}{'against CAA':>13}")
    for what, by_name in times.items():
        for name, own in by_name.items():
            # The best of the rounds, since what else runs on a machine only ever slows one down.
            best = min(own)
            ratios = {peer: best / min(by_name[peer]) for peer in ("nothing", "CAA")}
            print(f"{what:<28}{name:<10}{best * 1e3:>11.1f}{ratios['nothing']:>17.3f}{ratios['CAA']:>13.3f}")
            peers = {"nothing": "the engine started without", "CAA": "an engine with CAA"}
            results += [
                {"name": f"{what}, {name}", "value": best * 1e3, "unit": "ms", "peer": peers[peer], "ratio": ratio}
                for peer, ratio in ratios.items()
            ]
    if arguments.json:
        record = {
            "benchmark": "bodes-steer in vLLM",
            "machine": arguments.machine,
            "versions": {"torch": torch.__version__, "vllm": vllm.__version__},
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
