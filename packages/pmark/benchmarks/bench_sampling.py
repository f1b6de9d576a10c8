"""Candidate sentences per second, against drawing the candidates with one `generate` call each, in the same run.

The peers are (a) calls that always draw 128 new tokens, as the paper's authors do and (b) calls that stop at the end of
the sentence. Both are slow, so only `--calls` of them are timed, spread over the rounds; ours draws all the candidates
of a sentence, for one document and for four. The second part of the table has a longer text before the sentence.

Run as `python bench_sampling.py [--json FILE] [--candidates 64] [--dtype float32] [--rounds 3] [--calls 2]`.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from pmark.hf_sampler import HFSampler
from pmark.segmentation import is_complete, make_segmenter
from separata_embedded import load_smollm2

OPENINGS = (
    "The old harbour town had slept for years before the railway came. Then everything changed at once.",
    "My grandmother kept bees behind the house. Every morning she walked down to the hives with a cup of tea.",
    "Most people think of deserts as empty places. In truth they are full of life, if one knows where to look.",
    "The city council met on Tuesday to talk about the new bridge. Nobody had expected so many people to come.",
)
MORE = (
    " The first weeks were quiet, and few of them believed that it would last. A teacher wrote down what she saw in a "
    "small blue book, which is kept in the library today. She counted the boats, the carts and the strangers who asked "
    "for a room. In the spring a doctor from the coast opened a practice beside the mill. He had a loud voice and a "
    "great many opinions, and within a month everybody knew all of them. When the rain stayed away that summer, they "
    "dug a second well behind the church. It took eleven men and nine days, and the water tasted of iron. Some said "
    "that it was good for the heart. Others carried their buckets to the river as they always had. In September the "
    "first letter arrived, and it was read aloud in the square. It promised a great deal, and it asked for very little."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=2, help="calls of each peer in a round")
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    options = parser.parse_args()

    model, tokenizer = load_smollm2(dtype=options.dtype, device="cpu")
    sampler, segmenter = HFSampler(model, tokenizer), make_segmenter()
    sampler.sample([OPENINGS[0]], [2], seed=0)  # whether prefixes can be shared is found at the first use
    torch.manual_seed(0)

    def one_by_one(context: str, *, stop: bool) -> None:
        inputs = tokenizer(context, return_tensors="pt")
        length = inputs["input_ids"].shape[1]

        def ended(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.tensor([is_complete(segmenter, context, tokenizer.decode(ids[0, length:]))])

        sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0, "max_new_tokens": 128}
        criteria = transformers.StoppingCriteriaList([ended] if stop else [])
        for _ in range(options.calls):
            model.generate(**inputs, **sampling, stopping_criteria=criteria, pad_token_id=tokenizer.eos_token_id)

    def draw(contexts: list[str], seed: int) -> None:
        sampler.clear()
        counts = [options.candidates] * len(contexts)
        sampler.sample(
            contexts, counts, is_complete=lambda i, text: is_complete(segmenter, contexts[i], text), seed=seed
        )

    results = []
    print(f"{'sentences/s':<34}{'128 each':>10}{'stopped':>10}{'ours':>10}{'ratio':>9}{'ratio':>9}")
    for name, openings in (("", OPENINGS), (" of longer text", [opening + MORE for opening in OPENINGS])):
        rates: dict[str, list[float]] = {"full": [], "stopped": [], "1 document": [], "4 documents": []}
        for round_ in range(options.rounds):  # in turn, so that a busy machine slows all
            context = openings[round_ % len(openings)]
            rates["full"].append(rate(options.calls, one_by_one, context, stop=False))
            rates["stopped"].append(rate(options.calls, one_by_one, context, stop=True))
            rates["1 document"].append(rate(options.candidates, draw, [context], round_))
            rates["4 documents"].append(rate(4 * options.candidates, draw, list(openings), round_))
        full, stopped = (statistics.median(rates[peer]) for peer in ("full", "stopped"))
        for which in ("1 document", "4 documents"):
            ours = statistics.median(rates[which])
            ratios = [
                statistics.median(mine / theirs for mine, theirs in zip(rates[which], rates[peer], strict=True))
                for peer in ("full", "stopped")
            ]
            row = f"{which}{name}, {options.candidates} candidates"
            print(f"{row:<34}{full:>10.2f}{stopped:>10.2f}{ours:>10.2f}{ratios[0]:>8.1f}x{ratios[1]:>8.1f}x")
            for peer, ratio in zip(
                (
                    "one generate call of 128 tokens a candidate",
                    "one generate call a candidate, stopped at its sentence",
                ),
                ratios,
                strict=True,
            ):
                results.append({"name": row, "value": ours, "unit": "sentences/s", "peer": peer, "ratio": ratio})

    if options.json:
        record = {
            "benchmark": "pmark sampling",
            "machine": options.machine,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "dtype": options.dtype,
            "context_tokens": [len(tokenizer.encode(OPENINGS[0] + more)) for more in ("", MORE)],
            "results": results,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def rate(sentences: int, work: Callable[..., None], *args: Any, **kwargs: Any) -> float:
    began = time.perf_counter()
    work(*args, **kwargs)
    return sentences / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
