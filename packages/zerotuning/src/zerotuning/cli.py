"""The command line; see `zerotuning --help`."""

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from zerotuning.tasks import TASKS, TaskSpec

app = typer.Typer(
    help="Re-weight the attention to the initial token of a frozen language model, per head.",
    epilog="Example: zerotuning demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 and the number of the signal."""

_DTYPES = ("float32", "bfloat16", "float16")

Model = Annotated[str | None, typer.Option(help="Folder or name of a transformers model; SmolLM2-135M if not given.")]
Dtype = Annotated[
    str | None, typer.Option(help=f"Type of the weights: {', '.join(_DTYPES)}; the faster one if not given.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
BatchRows = Annotated[int, typer.Option(min=1, help="Rows in one forward.")]
Heads = Annotated[str, typer.Option(help="'profile' finds and scales effective heads, 'uniform' scales all.")]
TaskName = Annotated[str, typer.Option(help=f"Built-in task: {', '.join(TASKS)}.")]
Template = Annotated[str | None, typer.Option(help="Prompt with {text} in it, in place of the task's own.")]
Labels = Annotated[str | None, typer.Option(help="Label words, separated by commas, in place of the task's own.")]
TextColumn = Annotated[str | None, typer.Option(help="Column of the text, in place of the task's own.")]
LabelColumn = Annotated[str | None, typer.Option(help="Column of the label, in place of the task's own.")]
Data = Annotated[Path, typer.Option(help="Labelled texts, .jsonl or .csv.")]
ConfigFile = Annotated[Path, typer.Option(help="A configuration written by 'calibrate' or 'demo'.")]


@app.command(epilog="Example: zerotuning demo --seed 1 --json")
def demo(
    model: Model = None,
    dtype: Dtype = None,
    heads: Heads = "profile",
    calibration: Annotated[int, typer.Option(min=2, help="Texts to calibrate on; an even number.")] = 240,
    test: Annotated[int, typer.Option(min=2, help="Other texts to evaluate on; an even number.")] = 400,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longer texts are left out.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the choice of texts.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the configuration is written.")] = Path("zerotuning-demo.json"),
    batch_rows: BatchRows = 16,
    as_json: AsJson = False,
) -> None:
    """Calibrate on real film-review snippets and evaluate on others."""
    # Inside the commands, so that help and wrong usage need not wait for torch.
    from zerotuning.demo import embedded, report, run_demo

    _choice("--heads", heads, ("profile", "uniform"))
    loaded, tokenizer = _load(model, dtype)
    texts = embedded().rated_texts("movie")
    result = run_demo(
        loaded,
        tokenizer,
        texts,
        source=f"film reviews ({texts.source})",
        out=out,
        heads="uniform" if heads == "uniform" else "profile",
        calibration_items=calibration,
        test_items=test,
        max_tokens=max_tokens,
        seed=seed,
        batch_rows=batch_rows,
    )
    _print(result.to_json() if as_json else report(result))


@app.command("calibrate", epilog="Example: zerotuning calibrate --task sst2 --data dev.jsonl --out sst2.json")
def calibrate_command(
    data: Data,
    out: Annotated[Path, typer.Option(help="Where the configuration is written.")],
    model: Model = None,
    dtype: Dtype = None,
    task: TaskName = "mr",
    template: Template = None,
    labels: Labels = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    heads: Heads = "profile",
    grid: Annotated[str | None, typer.Option(help="Factors to try, separated by commas.")] = None,
    metric: Annotated[str, typer.Option(help="'accuracy' or 'constrained_accuracy'.")] = "accuracy",
    gamma_probe: Annotated[float, typer.Option(help="Factor for the profile.")] = 2.0,
    p: Annotated[float, typer.Option(help="Share of the heads to scale after profiling.")] = 0.4,
    combine: Annotated[str, typer.Option(help="'dominant', 'up', 'down' or 'both'.")] = "dominant",
    limit: Annotated[int | None, typer.Option(min=2, help="Use the first so many examples.")] = None,
    resume: Annotated[Path | None, typer.Option(help="File of evaluated points, continued if it exists.")] = None,
    batch_rows: BatchRows = 16,
    as_json: AsJson = False,
) -> None:
    """Choose heads and gamma on labelled texts."""
    _choice("--heads", heads, ("profile", "uniform"))
    _choice("--metric", metric, ("accuracy", "constrained_accuracy"))
    _choice("--combine", combine, ("dominant", "up", "down", "both"))
    spec = _task(task, template, labels, text_column, label_column)
    gammas = None if grid is None else _grid(grid)
    # Before torch is loaded, so that a mistake in the data is told at once.
    examples = spec.read(data)[:limit]
    from zerotuning.calibration import DEFAULT_GRID, calibrate
    from zerotuning.config import check_writable
    from zerotuning.report import describe_choice

    check_writable(out)
    loaded, tokenizer = _load(model, dtype)
    options: dict[str, Any] = {"heads": heads, "metric": metric, "combine": combine}
    result = calibrate(
        loaded,
        tokenizer,
        examples,
        spec,
        grid=gammas or DEFAULT_GRID,
        gamma_probe=gamma_probe,
        p=p,
        batch_rows=batch_rows,
        resume=resume,
        progress=True,
        **options,
    )
    result.config.save(out)
    if as_json:
        _print({**result.to_json(), "config": str(out)})
        return
    lines = [f"{'gamma':>6}  {'accuracy':>8}  {'parsed':>6}  {'among parsed':>12}  {'constrained':>11}"]
    for point in result.curve:
        scores = point.scores
        lines.append(
            f"{point.gamma:>6g}  {scores.accuracy.value:>8.3f}  {scores.parse_rate.value:>6.3f}  "
            f"{scores.accuracy_parsed.value:>12.3f}  {scores.constrained_accuracy.value:>11.3f}"
        )
    lines += ["", describe_choice(result), *(f"note: {each}" for each in result.warnings), f"configuration: {out}"]
    _print("\n".join(lines))


@app.command("eval", epilog="Example: zerotuning eval --task sst2 --data test.jsonl --config sst2.json")
def eval_command(
    data: Data,
    config: ConfigFile,
    model: Model = None,
    dtype: Dtype = None,
    task: TaskName = "mr",
    template: Template = None,
    labels: Labels = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Use the first so many examples.")] = None,
    batch_rows: BatchRows = 16,
    as_json: AsJson = False,
) -> None:
    """Compare a configuration with the untouched model on labelled texts."""
    spec = _task(task, template, labels, text_column, label_column)
    examples = spec.read(data)[:limit]
    from zerotuning.config import ZeroTuningConfig
    from zerotuning.evaluation import evaluate
    from zerotuning.report import comparison_table

    loaded_config = ZeroTuningConfig.load(config)
    loaded, tokenizer = _load(model, dtype)
    result = evaluate(loaded, tokenizer, spec, examples, loaded_config, batch_rows=batch_rows, progress=True)
    _print(result.to_json() if as_json else "\n".join(comparison_table(result)))


@app.command(epilog="Example: zerotuning show zerotuning-demo.json")
def show(
    config: Annotated[Path, typer.Argument(help="A configuration written by 'calibrate' or 'demo'.")],
    as_json: AsJson = False,
) -> None:
    """Print what a configuration does."""
    from zerotuning.config import ZeroTuningConfig

    loaded = ZeroTuningConfig.load(config)
    identity = loaded.model_id
    gammas = loaded.log_gamma.exp()
    if as_json:
        _print(
            {
                "model": {"type": identity.type, "layers": identity.layers, "query_heads": identity.query_heads},
                "granularity": loaded.granularity,
                "mode": loaded.mode,
                "gamma": gammas.tolist(),
                "meta": dict(loaded.meta),
            }
        )
        return
    lines = [
        f"{identity.type}, {identity.layers} layers of {identity.query_heads} query heads; mode {loaded.mode}",
        f"{len(loaded.layers)} layers touched" if loaded.layers else "nothing is touched: every gamma is 1",
    ]
    for head in range(identity.query_heads if loaded.layers else 0):
        values = sorted({round(value, 4) for value in gammas[:, head].tolist()})
        lines.append(f"head {head:>3}: gamma {', '.join(f'{value:g}' for value in values)}")
    for name, value in loaded.meta.get("calibration", {}).items():
        lines.append(f"{name}: {value}")
    _print("\n".join(lines))


@app.command(epilog="Example: zerotuning generate --config zerotuning-demo.json 'The capital of France is'")
def generate(
    prompt: Annotated[str, typer.Argument(help="Raw text; no chat template is applied.")],
    config: ConfigFile,
    model: Model = None,
    dtype: Dtype = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, greedily.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with the untouched model and under a configuration."""
    from zerotuning.adapter import apply
    from zerotuning.config import ZeroTuningConfig

    loaded_config = ZeroTuningConfig.load(config)
    loaded, tokenizer = _load(model, dtype)
    loaded_config.check_fits(loaded)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(loaded.device)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("the prompt is empty")
    longest, limit = inputs["input_ids"].shape[1] + max_new_tokens, loaded.config.max_position_embeddings
    if longest > limit:
        raise ValueError(f"prompt and new tokens are {longest} tokens; the model takes {limit}: shorten the prompt")
    texts = {}
    for name, each in (("vanilla", ZeroTuningConfig.uniform(loaded_config.model_id, 1.0)), ("tuned", loaded_config)):
        with apply(loaded, each):
            output = loaded.generate(
                **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
            )
        texts[name] = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    _print(texts if as_json else "\n".join(f"{name}: {text!r}" for name, text in texts.items()))


def run(arguments: Sequence[str]) -> int:
    """Run the command line on given arguments.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code: 0 if it ran, 1 if it failed, 2 for wrong usage, 130 if it was interrupted.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            app(args=list(arguments), prog_name="zerotuning")
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 0
            if code == INTERRUPTED:
                print("interrupted", file=sys.stderr)
            return code
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            # What to do about it may stand in a later line of the message.
            print(f"error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
            return 1
    return 0


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _print(result: str | Mapping[str, Any]) -> None:
    print(result if isinstance(result, str) else json.dumps(result, indent=1, allow_nan=False))


def _choice(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(allowed)}", param_hint=option)


def _grid(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers", param_hint="--grid") from None


def _task(
    name: str, template: str | None, labels: str | None, text_column: str | None, label_column: str | None
) -> TaskSpec:
    _choice("--task", name, tuple(TASKS))
    base = TASKS[name]
    return TaskSpec(
        name=name if template is None and labels is None else "own",
        template=base.template if template is None else template.replace("\\n", "\n"),
        labels=base.labels if labels is None else tuple(word.strip() for word in labels.split(",")),
        text_column=text_column or base.text_column,
        label_column=label_column or base.label_column,
    )


def _load(place: str | None, dtype: str | None) -> tuple[Any, Any]:
    import torch

    if dtype is None:
        dtype = "bfloat16" if torch.cuda.is_available() or _has_fast_bfloat16() else "float32"
    _choice("--dtype", dtype, _DTYPES)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if place is None:
        from zerotuning.demo import embedded

        return embedded().load_smollm2(dtype=dtype, device=device)  # type: ignore[no-any-return]  # optional package
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # What looks like a path is one: only a plain name, with or without its owner, is asked for on the model hub.
    if not Path(place).is_dir() and (Path(place).exists() or place[:1] in "/.~" or place.count("/") > 1):
        raise ValueError(f"--model {place}: there is no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, dtype), trust_remote_code=False)
    except Exception as error:  # files can be broken in more ways than their readers have errors for
        raise ValueError(f"--model {place} cannot be loaded: {error}") from None
    return model.to(device).eval(), tokenizer


def _has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 natively; without that it is slower than float32."""
    import torch

    # Not in every torch that this package runs with.
    read = getattr(torch.cpu, "get_capabilities", dict)
    capabilities: Mapping[str, Any] = read()
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "sve_bf16"))
