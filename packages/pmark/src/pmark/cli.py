"""The command line; see `pmark --help`."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from jaxtyping import Float64
from separata_kit import console
from separata_kit.files import check_writable, digest, write_text
from separata_kit.rows import column, read_rows, text

from pmark.attacks import ATTACKS

if TYPE_CHECKING:
    from typer import Context

    from pmark.attacks import Attack
    from pmark.evaluation import Method
    from pmark.samplers import Sampler
    from pmark.scoring import Null
    from pmark.watermark import PMark

if not TYPE_CHECKING:
    # What typer gives to a command is not of its own class but of the base.
    Context = typer.Context.__base__

app = typer.Typer(
    name="pmark",
    help="Watermark the text of a language model sentence by sentence, and find the watermark again.",
    epilog="Example: pmark demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

FOUND = 3
"""Exit code of `detect --fail` where a text is watermarked."""

_MODES = ("online", "offline")
_PRIORS = ("zero", "calibrated")
_SEGMENTERS = ("pysbd", "punkt", "regex")
_TABLES = (".jsonl", ".ndjson", ".csv", ".parquet")
_METHODS = ("online", "offline", "unmarked", "semstamp", "k-semstamp", "simmark", "kgw")
_PICTURES = ("histogram", "roc", "power")
_PRIVATE = 0o600
"""Mode of files that hold proxies, counts or thresholds: from many of them the pivots of a key can be computed."""

_PARAPHRASES = {
    "paraphrase": "sentence",
    "paraphrase-document": "document",
    "back-translation": "back_translation",
}

# Arguments that messages advise, as they are called here.
_ARGUMENTS = {
    "has_prompt=False": "--no-prompt",
    "overwrite=True": "--overwrite",
    'mode="offline"': "--mode offline",
    "mode='offline'": "--mode offline",
    "num_samples": "--samples",
}

KeyFile = Annotated[Path, typer.Option("--key", help="The key, a file written by 'keygen'.")]
Model = Annotated[
    str | None,
    typer.Option(
        help="Folder or name of a transformers model, SmolLM2-135M-Instruct if not given; with --endpoint, the name of "
        "the model there."
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        help="An OpenAI-compatible server, up to '/v1', in place of a local model. The key is taken from "
        "OPENAI_API_KEY."
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Continue an assistant's turn at the endpoint, in place of plain completions.")
]
Encoder = Annotated[
    str | None,
    typer.Option(help="Folder or name of a sentence-transformers model; all-MiniLM-L6-v2 if not given."),
]
Mode = Annotated[
    str,
    typer.Option(help="'online' draws medians from the model at both ends, 'offline' detects without a model."),
]
Samples = Annotated[int, typer.Option(min=1, help="Candidates for each sentence.")]
NullFile = Annotated[
    Path | None, typer.Option("--null", help="What human text looks like, a file written by 'calibrate'.")
]
Segmenter = Annotated[str, typer.Option(help=f"What finds sentences: {', '.join(_SEGMENTERS)}; the same at both ends.")]
Language = Annotated[str, typer.Option(help="Language of the texts, such as 'en' or 'zh'.")]
Sentences = Annotated[int, typer.Option("--max-sentences", min=1, help="Sentences to generate for each prompt.")]
Temperature = Annotated[float, typer.Option(help="Of the drawing.")]
TopP = Annotated[float, typer.Option(min=0, max=1, help="Draw from the likeliest tokens that have this share.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Longest sentence, in tokens.")]
Documents = Annotated[int, typer.Option(min=1, help="Texts that go through the model together.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use the first so many texts.")]
NoPrompt = Annotated[
    bool, typer.Option("--no-prompt", help="The texts have no prompt in front: test their first sentence too.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of what is drawn by chance.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Plot = Annotated[Path | None, typer.Option(help="Draw it into this .png or .svg; needs the extra 'plot'.")]
TextsOut = Annotated[Path, typer.Option(help="Where the texts are written, .jsonl; an interrupted run is continued.")]


@dataclass(frozen=True)
class _Source:
    """Which model to draw from, and how; the fields are the options of the same names."""

    model: str | None
    endpoint: str | None
    chat: bool
    temperature: float = 0.7
    top_p: float = 0.95
    new_tokens: int = 128

    def check(self) -> None:
        """Refuse options that do not go together, before anything is loaded."""
        if self.endpoint is None and self.chat:
            raise typer.BadParameter("it is of no account without --endpoint", param_hint="--chat")
        if self.endpoint is not None and self.model is None:
            raise typer.BadParameter("--endpoint needs the name of a model there", param_hint="--model")

    def load(self) -> "Sampler":
        """The sampler."""
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.new_tokens,
        }
        if self.endpoint is not None:
            from pmark.openai_sampler import OpenAISampler

            options["mode"] = "chat" if self.chat else "completions"
            return OpenAISampler(self.endpoint, str(self.model), **options)
        from pmark.hf_sampler import HFSampler

        return HFSampler(*_load_model(self.model), **options)

    def digest(self) -> str:
        """What tells it from others in a file: the endpoint's URL may hold a password."""
        return digest(asdict(self))


@app.command(epilog="Example: pmark demo --seed 1 --json")
def demo(
    model: Model = None,
    encoder: Encoder = None,
    prompts: Annotated[int, typer.Option(min=2, max=12, help="Prompts to continue.")] = 8,
    max_sentences: Sentences = 6,
    samples: Samples = 8,
    channels: Annotated[
        int, typer.Option(min=1, help="Bits in each sentence; --samples must be 2 to their power.")
    ] = 2,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Where the marked texts are written, .jsonl.")] = Path("pmark-demo.jsonl"),
    as_json: AsJson = False,
) -> None:
    """Mark what a small model writes, attack it, and look for the mark with the right key and with others."""
    # Inside the commands, so that help and wrong usage need not wait for torch.
    from pmark.demo import run_demo
    from pmark.report import demo_report

    check_writable(out)
    result = run_demo(
        *_load_model(model),
        _load_encoder(encoder),
        prompts=prompts,
        max_sentences=max_sentences,
        num_samples=samples,
        channels=channels,
        seed=seed,
        out=out,
    )
    _print(result.to_json() if as_json else demo_report(result))


@app.command(epilog="Example: pmark keygen --out key.json")
def keygen(
    out: Annotated[Path, typer.Option(help="Where the key is written; only you may read it.")],
    channels: Annotated[int, typer.Option(min=1, help="Bits in each sentence.")] = 4,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a key that is there; it is lost then.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a secret key; only its public id is printed."""
    from pmark.key import PMarkKey

    key = PMarkKey.generate(channels)
    key.save(out, overwrite=overwrite)
    found = {"key": str(out), "id": key.id, "channels": key.channels}
    _print(found if as_json else f"key {key.id} with {key.channels} channels: {out}")


@app.command(epilog="Example: pmark generate --key key.json --data prompts.txt --out marked.jsonl")
def generate(
    key: KeyFile,
    data: Annotated[Path, typer.Option(help="Prompts: .txt (one in a line), .jsonl, .csv or .parquet.")],
    out: TextsOut,
    model: Model = None,
    endpoint: Endpoint = None,
    chat: Chat = False,
    encoder: Encoder = None,
    mode: Mode = "online",
    samples: Samples = 64,
    null: NullFile = None,
    segmenter: Segmenter = "pysbd",
    language: Language = "en",
    max_sentences: Sentences = 12,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    new_tokens: NewTokens = 128,
    documents: Documents = 8,
    limit: Limit = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Continue prompts with watermarked text.

    The traces of many texts give a key away: hand on the column 'text' alone.
    """
    source = _Source(model, endpoint, chat, temperature, top_p, new_tokens)
    source.check()
    console.check_different_files(key=key, data=data, out=out, null=null)
    rows = _texts([data], "prompt|text")[:limit]
    make, header = _watermark(key, encoder, mode, samples, null, segmenter, language)
    header |= {"source": source.digest(), "max_sentences": max_sentences}
    sampler = source.load()

    def work(batch: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
        texts = make(seed).generate_batch(sampler, [row["text"] for row in batch], max_sentences=max_sentences)
        if not any(each.samples for each in texts):
            # Not kept as results: a server that is down would spoil all the rest.
            raise RuntimeError(
                f"the model gave nothing for any of the prompts {batch[0]['id']} to {batch[-1]['id']}; the same "
                "command goes on from there"
            )
        return [{"id": row["id"], **text.to_json()} for row, text in zip(batch, texts, strict=True)]

    found = _work_off("generate", rows, documents, out, header, work, seed)
    reasons = Counter(row["finish_reason"] for row in found)
    body = {"texts": len(found), "sentences": sum(len(row["sentences"]) for row in found), "ended": reasons}
    if as_json:
        _print({**body, "out": str(out)})
        return
    ends = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
    _print(f"{body['texts']} texts, {body['sentences']} sentences; ended by: {ends}\ntexts: {out}")


@app.command(epilog="Example: pmark detect --key key.json marked.jsonl letter.txt --fail")
def detect(
    files: Annotated[list[Path], typer.Argument(help="Texts: .jsonl, .csv or .parquet hold many, any other one.")],
    key: KeyFile,
    model: Model = None,
    endpoint: Endpoint = None,
    chat: Chat = False,
    encoder: Encoder = None,
    mode: Mode = "online",
    samples: Samples = 64,
    null: NullFile = None,
    segmenter: Segmenter = "pysbd",
    language: Language = "en",
    no_prompt: NoPrompt = False,
    window: Annotated[
        int, typer.Option(min=0, help="Look for up to so many sentences that were inserted or deleted.")
    ] = 0,
    alpha: Annotated[float, typer.Option(help="A text is watermarked if its p-value is at most this.")] = 0.05,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    new_tokens: NewTokens = 128,
    documents: Documents = 64,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the results are written, .jsonl or .csv; an interrupted run is continued."),
    ] = None,
    fail: Annotated[bool, typer.Option("--fail", help=f"Exit with {FOUND} if any text is watermarked.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tell which texts are watermarked with a key.

    A row's column 'prompt', if there is one, says which part in front of its text is not tested.
    """
    source = _Source(model, endpoint, chat, temperature, top_p, new_tokens)
    source.check()
    if not 0 < alpha < 1:
        raise typer.BadParameter(f"{alpha:g} is no probability between 0 and 1", param_hint="--alpha")
    if out is not None and out.suffix not in (".jsonl", ".ndjson", ".csv"):
        raise typer.BadParameter(f"{out} ends neither in .jsonl nor in .csv", param_hint="--out")
    for file in files:
        console.check_different_files(files=file, key=key, null=null, out=out)
    rows = _texts(files, "text", whole=True)
    make, header = _watermark(key, encoder, mode, samples, null, segmenter, language, alpha=alpha)
    header |= {"source": source.digest(), "no_prompt": no_prompt, "window": window}
    judge = make(seed)
    for row in rows:
        if isinstance(row.get("settings"), dict):
            judge.check_recorded(row["settings"], ("encoder", "segmenter", "mode"))
    options: dict[str, Any] = {"has_prompt": not no_prompt, "sampler": source.load() if mode == "online" else None}
    if window:
        options |= {"align": "window", "window": window}

    def work(batch: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
        prompts = None if no_prompt else [row.get("prompt") or None for row in batch]
        results = make(seed).detect_batch([row["text"] for row in batch], prompts=prompts, **options)
        return [{"id": row["id"], **result.to_json()} for row, result in zip(batch, results, strict=True)]

    found = _work_off("detect", rows, documents, out, header, work, seed)
    marked = sum(row["is_watermarked"] for row in found)
    if as_json:
        _print({"texts": len(found), "watermarked": marked, "results": found})
    else:
        from pmark.report import detection_table

        _print("\n".join(detection_table(found)))
    if fail and marked:
        raise typer.Exit(FOUND)


@app.command(epilog="Example: pmark calibrate --key key.json --data human.jsonl --mode offline --out null.json")
def calibrate(
    key: KeyFile,
    data: Annotated[Path, typer.Option(help="Texts by people: .txt (one in a line), .jsonl, .csv or .parquet.")],
    out: Annotated[Path, typer.Option(help="Where the result is written, for 'detect --null'.")],
    model: Model = None,
    endpoint: Endpoint = None,
    chat: Chat = False,
    encoder: Encoder = None,
    mode: Mode = "online",
    prior: Annotated[
        str,
        typer.Option(
            help="Offline: thresholds 'zero', or 'calibrated': medians of these texts, for 'generate' and 'detect'."
        ),
    ] = "zero",
    samples: Samples = 64,
    segmenter: Segmenter = "pysbd",
    language: Language = "en",
    no_prompt: NoPrompt = False,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    new_tokens: NewTokens = 128,
    documents: Documents = 8,
    limit: Limit = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure what texts by people look like, for p-values that hold and for medians of their kind."""
    source = _Source(model, endpoint, chat, temperature, top_p, new_tokens)
    source.check()
    console.choice("--prior", prior, _PRIORS)
    if prior == "calibrated" and mode == "online":
        raise typer.BadParameter("--mode online draws its medians; leave it out", param_hint="--prior")
    console.check_different_files(key=key, data=data, out=out)
    rows = _texts([data], "text")[:limit]
    check_writable(out)
    make, header = _watermark(key, encoder, mode, samples, None, segmenter, language, prior=prior)
    if mode == "offline":
        null = make(seed).calibrate([row["text"] for row in rows], has_prompt=not no_prompt)
        null.save(out)
    else:
        null = _calibrate_online(make, source, rows, documents, out, {**header, "no_prompt": no_prompt}, seed)
    # Fewer texts than 1 / rate say nothing about it.
    thresholds = {f"{rate:g}": null.threshold(rate) for rate in (0.01, 0.05) if rate * (null.num_texts + 1) >= 1}
    body = {"texts": null.num_texts, "mean": null.mean, "std": null.std, "thresholds": thresholds, "out": str(out)}
    if as_json:
        _print(body)
        return
    lines = [f"{null.num_texts} texts: counts of mean {null.mean:.4f} and deviation {null.std:.4f}"]
    lines += [f"z_calibrated above {z:.2f} in {float(rate):.0%} of such texts" for rate, z in thresholds.items()]
    _print("\n".join([*lines, f"null: {out}"]))


@app.command("attack", epilog="Example: pmark attack --kind word-deletion --data marked.jsonl --out attacked.jsonl")
def attack_command(
    context: Context,
    data: Annotated[Path, typer.Option(help="Texts: .txt (one in a line), .jsonl, .csv or .parquet.")],
    out: TextsOut,
    kind: Annotated[str, typer.Option(help=f"One of {', '.join((*ATTACKS, *_PARAPHRASES))}.")],
    rate: Annotated[float, typer.Option(min=0, max=1, help="Share of the words or sentences that are changed.")] = 0.15,
    model: Annotated[
        str | None,
        typer.Option(help="What paraphrases: folder or name of a chat model, or with --endpoint its name there."),
    ] = None,
    endpoint: Endpoint = None,
    segmenter: Segmenter = "pysbd",
    language: Language = "en",
    no_prompt: Annotated[bool, typer.Option("--no-prompt", help="Attack the first sentence too.")] = False,
    documents: Documents = 8,
    limit: Limit = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Change texts as somebody would who wants the watermark gone.

    A row's column 'prompt', if there is one, says which part in front of its text is left alone; without it that is
    the first sentence.
    """
    console.choice("--kind", kind, (*ATTACKS, *_PARAPHRASES))
    source = _Source(model, endpoint, False)
    source.check()
    if kind in _PARAPHRASES or kind == "sentence-shuffle":
        console.refuse_idle(context, ("rate",), f"to --kind {kind}")
    if kind not in _PARAPHRASES:
        console.refuse_idle(context, ("model", "endpoint"), f"to --kind {kind}")
    console.check_different_files(data=data, out=out)
    rows = _texts([data], "text")[:limit]
    options = {"keep_first": 0 if no_prompt else 1, "segmenter": segmenter, "language": language}
    attack = _attack(kind, rate, source, options)
    header = {"attack": attack.name, "source": source.digest(), "no_prompt": no_prompt, **options}

    def work(batch: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
        # Texts of which the prompt is known, and others, whose first sentence it is.
        found: dict[int, str] = {}
        for known in (True, False):
            some = [at for at, row in enumerate(batch) if known == (not no_prompt and bool(row.get("prompt")))]
            texts = [batch[at]["text"] for at in some]
            prompts = [batch[at]["prompt"] for at in some] if known else None
            found |= dict(zip(some, attack(texts, seed=seed, prompts=prompts) if some else (), strict=True))
        names = ("id", "prompt", "settings")
        return [
            {**{name: row[name] for name in names if name in row}, "text": found[at], "attack": attack.name}
            for at, row in enumerate(batch)
        ]

    found = _work_off("attack", rows, documents, out, header, work, seed)
    changed = sum(row["text"] != new["text"] for row, new in zip(rows, found, strict=True))
    body = {"attack": attack.name, "texts": len(found), "changed": changed, "out": str(out)}
    _print(body if as_json else f"{attack.name}: {changed} of {len(found)} texts changed\ntexts: {out}")


@app.command(epilog="Example: pmark bench --key key.json --data prompts.txt --human human.jsonl --out table.json")
def bench(
    key: KeyFile,
    data: Annotated[Path, typer.Option(help="Prompts: .txt (one in a line), .jsonl, .csv or .parquet.")],
    human: Annotated[Path, typer.Option(help="Texts by people, likewise; at least 100 for a rate of 1 %.")],
    out: Annotated[Path, typer.Option(help="Where the table is written, .json; an interrupted run is continued.")],
    method: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(_METHODS)}; all but 'kgw' if not given. Repeatable.")
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(ATTACKS)}, with its rate, such as 'synonyms=0.3'. Repeatable."),
    ] = None,
    model: Model = None,
    endpoint: Endpoint = None,
    chat: Chat = False,
    encoder: Encoder = None,
    samples: Samples = 64,
    segmenter: Segmenter = "pysbd",
    language: Language = "en",
    max_sentences: Sentences = 12,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    new_tokens: NewTokens = 128,
    documents: Documents = 8,
    limit: Limit = None,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Compare watermarks: how well each is found before and after attacks, and what it costs."""
    source = _Source(model, endpoint, chat, temperature, top_p, new_tokens)
    source.check()
    names = list(dict.fromkeys(method or _METHODS[:-1]))
    for name in names:
        console.choice("--method", name, _METHODS)
    if endpoint is not None and "kgw" in names:
        raise typer.BadParameter("'kgw' needs the model itself, not an endpoint", param_hint="--method")
    cut: dict[str, Any] = {"segmenter": segmenter, "language": language}
    attacks = []
    for each in attack or ():
        name, _, rate = each.partition("=")
        console.choice("--attack", name, tuple(ATTACKS))
        attacks.append(_attack(name, console.numbers("--attack", rate or "0.15")[0], source, cut))
    console.check_different_files(key=key, data=data, human=human, out=out, plot=plot)
    prompts = [row["text"] for row in _texts([data], "prompt|text")][:limit]
    texts = [row["text"] for row in _texts([human], "text")]
    check_writable(out)
    make, _ = _watermark(key, encoder, "online", samples, None, segmenter, language)
    from pmark.evaluation import HUMAN, evaluate

    if plot is not None:
        from separata_kit.pictures import check_picture

        check_picture(plot, extra="pmark[plot]")
    online = make(seed)
    sampler: Any = source.load()
    # Of its own for every model, since the journal knows the methods' settings only.
    journal = out.with_name(f"{out.name}.{source.digest()[:8]}.journal")
    table = evaluate(
        {name: _method(name, online, texts, sampler, cut) for name in names},
        prompts[:limit],
        texts,
        attacks,
        sampler=sampler,
        max_sentences=max_sentences,
        journal=journal,
        perplexity_model=None if endpoint is not None else (sampler.model, sampler.tokenizer),
        encoder=online.encoder,
        batch_size=documents,
        seed=seed,
    )
    table.save(out)
    journal.unlink()
    if plot is not None:
        from pmark.plots import plot_roc

        curves: dict[str, Any] = {}
        for name, found in table.scores.items():
            curves |= {f"{name}, {kind}": (z, found[HUMAN]) for kind, z in found.items() if kind != HUMAN}
        plot_roc(curves, plot)
    _print(table.to_json() if as_json else f"{table.text()}\n\ntable: {out}")


@app.command("plot", epilog="Example: pmark plot found.jsonl --unmarked human-found.jsonl --kind roc --out roc.svg")
def plot_command(
    files: Annotated[list[Path], typer.Argument(help="What 'detect --out' wrote, .jsonl; one curve for each file.")],
    out: Annotated[Path, typer.Option(help="The picture, .png or .svg; needs the extra 'plot'.")],
    kind: Annotated[
        str, typer.Option(help="'histogram' of z, 'roc', or 'power' against the number of sentences.")
    ] = "histogram",
    unmarked: Annotated[
        Path | None, typer.Option(help="The same for texts by people, which 'roc' and 'power' need.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw how far marked texts stand out."""
    console.choice("--kind", kind, _PICTURES)
    if unmarked is None and kind != "histogram":
        raise typer.BadParameter(f"--kind {kind} needs it", param_hint="--unmarked")
    for file in files:
        console.check_different_files(files=file, unmarked=unmarked)
    from separata_kit.pictures import check_picture

    from pmark import plots
    from pmark.report import power_by_length

    check_picture(out, extra="pmark[plot]")
    every = [*files, *([] if unmarked is None else [unmarked])]
    stems = Counter(file.stem for file in every)
    names = [file.stem if stems[file.stem] == 1 else str(file) for file in every]
    scores: dict[str, list[float]] = {}
    counts: dict[str, list[Float64[np.ndarray, "sentences channels"]]] = {}
    for name, file in zip(names, every, strict=True):
        rows = [row for _, row in read_rows(file)]
        try:
            scores[name] = [float(column(row, "z")[1]) for row in rows]
            counts[name] = [_counts(row) for row in rows if row["num_sentences"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is not what 'detect --out' wrote: {error}") from None
    marked, other = names[: len(files)], names[-1]
    if kind == "histogram":
        plots.plot_histogram(scores, out)
    elif kind == "roc":
        plots.plot_roc({name: (scores[name], scores[other]) for name in marked}, out)
    else:
        few = len(counts[other])
        # Fewer unmarked texts say nothing about 1 %.
        label = {} if few >= 100 else {"label": f"share above all {few} unmarked texts"}
        plots.plot_power({name: power_by_length(counts[name], counts[other]) for name in marked}, out, **label)
    _print({"picture": str(out)} if as_json else f"picture: {out}")


def run(arguments: Sequence[str]) -> int:
    """Run the command line on given arguments.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code: 0 if it ran, 1 if it failed, 2 for wrong usage, 3 if `detect --fail` found a watermark, 130 if
        it was interrupted.
    """
    return console.run(app, arguments, arguments_called=_ARGUMENTS)


def _print(result: str | Mapping[str, Any]) -> None:
    if isinstance(result, str):
        console.print_text(result)
    else:
        console.print_json(result)


def _counts(row: Mapping[str, Any]) -> Float64[np.ndarray, "sentences channels"]:
    found = np.array(column(row, "counts")[1], float)
    if found.ndim != 2:
        raise ValueError("'counts' must hold a list for each sentence")
    return found


def _load_model(place: str | None) -> tuple[Any, Any]:
    """A transformers model and its tokenizer."""
    from separata_kit import extras, language_models

    from pmark.demo import embedded

    models: Any = embedded() if place is None else None
    for library in ("torch", "transformers"):
        extras.load(library, "a local model needs", "pmark[transformers]")
    if place is not None:
        return language_models.load_language_model(place)
    options = {"dtype": language_models.default_dtype(), "device": language_models.default_device()}
    loaded: tuple[Any, Any] = models.load_smollm2(**options)
    return loaded


def _load_encoder(place: str | None) -> Any:
    if place == "":
        raise typer.BadParameter("it is empty", param_hint="--encoder")
    if place is not None:
        return place
    from pmark.demo import embedded

    return embedded().load_sentence_encoder()


def _watermark(
    key: Path,
    encoder: str | None,
    mode: str,
    samples: int,
    null: Path | None,
    segmenter: str,
    language: str,
    **options: Any,
) -> "tuple[Callable[[int], PMark], dict[str, Any]]":
    """What makes the watermark of the options, given the seed of a batch; and what tells it from others."""
    console.choice("--mode", mode, _MODES)
    console.choice("--segmenter", segmenter, _SEGMENTERS)
    from pmark.encoders import as_encoder
    from pmark.key import PMarkKey
    from pmark.scoring import Null
    from pmark.watermark import PMark

    secret = PMarkKey.load(key)
    options |= {"mode": mode, "num_samples": samples, "segmenter": segmenter, "language": language}
    description = {"key_id": secret.id, **options, "null": None}
    if null is not None:
        measured = Null.load(null)
        description["null"] = digest(asdict(measured))
        options |= {"null": measured, "prior": "zero" if measured.medians is None else "calibrated"}
    shared = as_encoder(_load_encoder(encoder))

    def make(seed: int) -> "PMark":
        return PMark(shared, secret, seed=seed, **options)

    make(0)  # what is wrong with the options is told before a model is loaded
    return make, {**description, "encoder": shared.fingerprint()}


def _calibrate_online(
    make: "Callable[[int], PMark]",
    source: _Source,
    rows: Sequence[Mapping[str, Any]],
    size: int,
    out: Path,
    header: Mapping[str, Any],
    seed: int,
) -> "Null":
    """As `PMark.calibrate`, some texts at a time, as it takes as long as writing them."""
    from pmark.scoring import Null

    online, sampler, fitted = make(seed), source.load(), []

    def work(batch: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
        texts = [row["text"] for row in batch]
        results = make(seed).detect_batch(texts, has_prompt=not header["no_prompt"], sampler=sampler)
        return [{"counts": result.to_json()["counts"]} for result in results]

    def fit(out: Path, found: Sequence[Mapping[str, Any]]) -> None:
        counts = [[each for each in row["counts"] if None not in each] for row in found]
        about = {"key_id": online.key.id, "encoder": online.encoder.fingerprint(), "segmenter": online.segmenter.name}
        fitted.append(
            Null.fit(
                [np.array(each, float).reshape(-1, online.channels) for each in counts],
                mode=online.mode,
                dimension=online.encoder.dimension,
                tolerance=online.tolerance,
                decay=online.decay,
                **about,
            )
        )
        fitted[0].save(out)

    _work_off("calibrate", rows, size, out, {**header, "source": source.digest()}, work, seed, fit)
    return fitted[0]


def _attack(kind: str, rate: float, source: _Source, options: Mapping[str, Any]) -> "Attack":
    if kind == "sentence-shuffle":
        return ATTACKS[kind](**options)
    if kind in ATTACKS:
        return ATTACKS[kind](rate, **options)
    from pmark.paraphrase import CausalParaphraser, ChatParaphraser

    mode: Any = _PARAPHRASES[kind]
    if source.endpoint is not None:
        return ChatParaphraser(source.endpoint, str(source.model), mode, **options)
    return CausalParaphraser(*_load_model(source.model), mode, **options)


def _method(name: str, online: "PMark", human: Sequence[str], sampler: Any, cut: Mapping[str, Any]) -> "Method":
    """A method of `bench`; what those beside PMark learn from text by people they learn from that of the comparison."""
    from pmark import semstamp
    from pmark.kgw import KGW
    from pmark.sentence_watermark import Unmarked
    from pmark.simmark import SimMark
    from pmark.watermark import PMark

    if name == "online":
        return online
    if name == "offline":
        return PMark(online.encoder, online.key, mode="offline", num_samples=online.num_samples, **cut)
    if name == "unmarked":
        return Unmarked(online.encoder, num_samples=1, **cut)
    if name == "semstamp":
        return semstamp.SemStamp(online.encoder, **cut)
    if name == "k-semstamp":
        sentences = [each for text in online.documents(human, has_prompt=False) for each in text.sentences]
        return semstamp.KSemStamp.fit(online.encoder, sentences, **cut)
    if name == "simmark":
        return SimMark(online.encoder, **cut).calibrate(human)
    drawing = {"temperature": sampler.temperature, "top_p": sampler.top_p}
    return KGW(sampler.model, sampler.tokenizer, **drawing, **cut)


def _texts(files: Sequence[Path], columns: str, *, whole: bool = False) -> list[dict[str, Any]]:
    """The rows of tables, each with an 'id' and its 'text'; with `whole`, any other file as one row, and empty ones."""
    found: list[dict[str, Any]] = []
    for file in files:
        if whole and file.suffix.lower() not in _TABLES:
            try:
                rows: Any = [(str(file), {"text": file.read_text("utf-8-sig")})]
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from None
        else:
            rows = read_rows(file, text_column=columns.partition("|")[0])
        for place, row in rows:
            try:
                if row.get("prompt"):
                    text(row, "prompt")
                name = place if row.get("id") is None else row["id"]
                # Parquet has more types than JSON.
                name = name if isinstance(name, str | int) else str(name)
                given = row.get("text")
                blank = whole and isinstance(given, str) and not given.strip()
                found.append({**row, "id": name, "text": "" if blank else text(row, columns)})
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
    if not found:
        raise ValueError(f"{', '.join(map(str, files))}: there are no texts")
    return found


def _work_off(
    label: str,
    rows: Sequence[Mapping[str, Any]],
    size: int,
    out: Path | None,
    header: Mapping[str, Any],
    work: Callable[[Sequence[Mapping[str, Any]], int], list[dict[str, Any]]],
    seed: int,
    write: Callable[[Path, list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Results row by row, `size` at a time, with a journal beside `out` that an interrupted run goes on from."""
    from separata_kit.journal import Journal
    from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

    journal_place = None
    if out is not None:
        check_writable(out)
        journal_place = out.with_name(out.name + ".journal")
        journal_place.touch(_PRIVATE)
    header = {
        **header,
        "rows": digest([[row["id"], row.get("prompt"), row["text"]] for row in rows]),
        "documents": size,
        "seed": seed,
    }
    with (
        Journal(
            journal_place, header, schema="pmark/journal", version=1, what=f"journal of 'pmark {label}'"
        ) as journal,
        tqdm(total=len(rows), desc=label, unit="text") as bar,
    ):
        for first in range(0, len(rows), size):
            keys = [str(number) for number in range(first, min(first + size, len(rows)))]
            # What one batch draws depends on all its texts, so it is done again as a whole: the same results.
            if not all(key in journal for key in keys):
                own_seed = int(np.random.SeedSequence((seed, first)).generate_state(1)[0])
                for key, result in zip(keys, work(rows[first : first + size], own_seed), strict=True):
                    if key not in journal:
                        journal.append(key, result)
            bar.update(len(keys))
        found = [journal.get(str(number)) or {} for number in range(len(rows))]
    if out is not None and journal_place is not None:
        (write or _write_table)(out, found)
        journal_place.unlink()
    return found


def _write_table(out: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if out.suffix != ".csv":
        write_text(
            out, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows), mode=_PRIVATE
        )
        return
    text = io.StringIO()
    # The columns that hold one value each.
    names = [name for name, value in rows[0].items() if not isinstance(value, list | dict)]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(out, text.getvalue(), mode=_PRIVATE)
