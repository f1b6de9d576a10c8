"""The command line; see `zerotuning --help`."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from separata_kit import console
from separata_kit.console import (
    alternatives,
    check_different_files,
    choice,
    layer_numbers,
    numbers,
    print_result,
    refuse_idle,
)
from separata_kit.files import check_writable, read_json, read_json_object, write_text
from separata_kit.language_models import DTYPES, default_device, default_dtype, load_language_model
from separata_kit.pictures import check_picture

from zerotuning.tasks import TASKS, TaskSpec

if TYPE_CHECKING:
    from typer import Context

    from zerotuning.calibration import CalibrationResult
    from zerotuning.config import ModelId, ZeroTuningConfig
    from zerotuning.profiling import HeadProfile

if not TYPE_CHECKING:
    # What typer gives to a command is not of its own class but of the base.
    Context = typer.Context.__base__

app = typer.Typer(
    name="zerotuning",
    help="Re-weight the attention to the initial token of a frozen language model, per head.",
    epilog="Example: zerotuning demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_METRICS = ("accuracy", "constrained_accuracy", "log_likelihood")
_OBJECTIVES = ("entropy", "label_entropy")
_CRITERIA = (*_METRICS, *_OBJECTIVES)
_COMBINE = ("dominant", "up", "down", "both", "random")
_BASELINES = ("contextual", "random_heads")
_PATHS = ("auto", "post_softmax", "bias", "closed_form", "augmented")

_PROFILE_SCHEMA = "zerotuning/profile"
_CALIBRATION_SCHEMA = "zerotuning/calibration"

_SHOWN_UNITS = 40

# Options of 'calibrate', by what they are about.
_OF_PROFILING = ("granularity", "method", "gamma_probe", "tolerance")
_OF_SELECTION = ("p", "combine")


Model = Annotated[str | None, typer.Option(help="Folder or name of a transformers model; SmolLM2-135M if not given.")]
Dtype = Annotated[
    str | None, typer.Option(help=f"Type of the weights: {', '.join(DTYPES)}; the faster one if not given.")
]
Attention = Annotated[
    str | None, typer.Option(help="Attention implementation of the model, such as 'eager'; its own if not given.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Plot = Annotated[Path | None, typer.Option(help="Draw it into this .png or .svg; needs the extra 'plot'.")]
BatchRows = Annotated[int, typer.Option(min=1, help="Rows in one forward.")]
ConfigsPerPass = Annotated[int, typer.Option(min=1, help="Configurations whose rows share batches.")]
Heads = Annotated[str, typer.Option(help="'profile' finds and scales effective heads, 'uniform' scales all.")]
TaskName = Annotated[str, typer.Option(help=f"A .json file of a task, or one of {', '.join(TASKS)}.")]
Template = Annotated[str | None, typer.Option(help="Prompt with {text} in it, in place of the task's own.")]
Labels = Annotated[str | None, typer.Option(help="Label words, separated by commas, in place of the task's own.")]
TextColumn = Annotated[str | None, typer.Option(help="Column of the text, in place of the task's own.")]
LabelColumn = Annotated[str | None, typer.Option(help="Column of the label, in place of the task's own.")]
Data = Annotated[Path, typer.Option(help="Texts, .jsonl, .csv or .parquet; labelled, unless an entropy is looked at.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use the first so many examples.")]
ConfigFile = Annotated[Path, typer.Option(help="A configuration written by 'calibrate' or 'demo'.")]
Granularity = Annotated[str, typer.Option(help="What is profiled alone: 'head_index', 'layer_head' or 'layer'.")]
ProfileMethod = Annotated[
    str, typer.Option(help="'exhaustive' runs all data for each unit, 'gradient' forwards and backwards once in all.")
]
GammaProbe = Annotated[float, typer.Option(help="Factor for the profile.")]
Layers = Annotated[str | None, typer.Option(help="Layers to scale, such as '0-9,12'; all if not given.")]
Tolerance = Annotated[
    str | None,
    typer.Option(help="When a unit is neutral: 'example' or 'sign_test'; what suits the metric if not given."),
]
Operator = Annotated[str, typer.Option(help="'exact', or the variants 'key' and 'query', which are other functions.")]
AnswerTokens = Annotated[
    int, typer.Option(min=1, help="Tokens to generate, to read the answer from and average the entropy over.")
]
Resume = Annotated[Path | None, typer.Option(help="File of evaluated points, continued if it exists.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of what is drawn by chance.")]


@app.command(epilog="Example: zerotuning demo --seed 1 --json")
def demo(
    model: Model = None,
    dtype: Dtype = None,
    attention: Attention = None,
    heads: Heads = "profile",
    calibration: Annotated[int, typer.Option(min=2, help="Texts to calibrate on; an even number.")] = 240,
    test: Annotated[int, typer.Option(min=2, help="Other texts to evaluate on; an even number.")] = 400,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longer texts are left out.")] = 32,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Where the configuration is written.")] = Path("zerotuning-demo.json"),
    batch_rows: BatchRows = 16,
    as_json: AsJson = False,
) -> None:
    """Calibrate on real film-review snippets and evaluate on others."""
    # Inside the commands, so that help and wrong usage need not wait for torch.
    from zerotuning.demo import embedded, report, run_demo

    choice("--heads", heads, ("profile", "uniform"))
    loaded, tokenizer = _load(model, dtype, attention)
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
    print_result(result.to_json() if as_json else report(result))


@app.command("profile", epilog="Example: zerotuning profile --task sst2 --data dev.jsonl --out profile.json")
def profile_command(
    context: Context,
    data: Data,
    out: Annotated[Path, typer.Option(help="Where the profile is written, for 'calibrate --profile' and 'plot'.")],
    model: Model = None,
    dtype: Dtype = None,
    attention: Attention = None,
    task: TaskName = "mr",
    template: Template = None,
    labels: Labels = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    method: ProfileMethod = "exhaustive",
    granularity: Granularity = "head_index",
    metric: Annotated[
        str | None,
        typer.Option(
            help=f"{alternatives(_CRITERIA)}; the accuracy if not given, or the log-likelihood by gradient. The two "
            "entropies need no labels."
        ),
    ] = None,
    gamma_probe: GammaProbe = 2.0,
    layers: Layers = None,
    tolerance: Tolerance = None,
    operator: Operator = "exact",
    limit: Limit = None,
    resume: Resume = None,
    batch_rows: BatchRows = 16,
    configs_per_pass: ConfigsPerPass = 1,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """See how each unit of heads answers when it is scaled alone."""
    _check_profile_options(method, granularity, tolerance, operator)
    if metric is not None:
        choice("--metric", metric, _CRITERIA)
    if method == "gradient":
        refuse_idle(context, ("resume", "configs_per_pass"), "to --method gradient, which is one pass")
    check_different_files(data=data, out=out, plot=plot, resume=resume)
    spec = _task(task, template, labels, text_column, label_column)
    chosen_layers = layer_numbers(layers)
    examples = spec.read(data, labelled=metric not in _OBJECTIVES)[:limit]
    from zerotuning.config import ModelId
    from zerotuning.plots import plot_profile
    from zerotuning.profiling import HeadProfiler

    check_writable(out)
    if plot is not None:
        check_picture(plot, extra="zerotuning[plot]")
    loaded, tokenizer = _load(model, dtype, attention)
    options: dict[str, Any] = {
        "method": method,
        "granularity": granularity,
        "metric": metric,
        "tolerance": tolerance,
        "operator": operator,
    }
    found = HeadProfiler(loaded, tokenizer, spec, examples).run(
        gamma_probe,
        layers=chosen_layers,
        batch_rows=batch_rows,
        configs_per_pass=configs_per_pass,
        resume=resume,
        progress=True,
        **options,
    )
    body = _save_profile(found, ModelId.of(loaded), spec.name, out)
    if plot is not None:
        plot_profile(found, plot)
    if as_json:
        print_result(body)
        return
    lines = [
        f"{found.metric} {found.baseline:.4f} untouched; change with gamma {found.gamma_probe:g} on one unit alone"
    ]
    name = {"head_index": "head", "layer": "layer", "layer_head": "layer, head"}[found.granularity]
    rows = sorted(zip(found.units, found.deltas, found.p_values, strict=True), key=lambda row: -abs(row[1]))
    for unit, delta, p_value in rows[:_SHOWN_UNITS]:
        which = ", ".join(map(str, unit)) if isinstance(unit, tuple) else str(unit)
        lines.append(f"{name} {which:>6}  {delta:>+9.4f}  sign test p = {p_value:<8.2g} {found.kind(unit)}")
    if len(rows) > _SHOWN_UNITS:
        lines.append(f"and {len(rows) - _SHOWN_UNITS} units with smaller changes")
    print_result("\n".join([*lines, "", f"profile: {out}", *([] if plot is None else [f"picture: {plot}"])]))


@app.command("calibrate", epilog="Example: zerotuning calibrate --task sst2 --data dev.jsonl --out sst2.json")
def calibrate_command(
    context: Context,
    data: Data,
    out: Annotated[Path, typer.Option(help="Where the configuration is written.")],
    model: Model = None,
    dtype: Dtype = None,
    attention: Attention = None,
    task: TaskName = "mr",
    template: Template = None,
    labels: Labels = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    mode: Annotated[
        str, typer.Option(help="'supervised' by labels, or 'unsupervised' by the model's own entropy.")
    ] = "supervised",
    metric: Annotated[str, typer.Option(help=f"What to maximise with labels: {alternatives(_METRICS)}.")] = "accuracy",
    objective: Annotated[
        str, typer.Option(help="What to minimise without: 'entropy' over the vocabulary or 'label_entropy'.")
    ] = "entropy",
    heads: Heads = "profile",
    profile: Annotated[
        Path | None, typer.Option(help="A profile written by 'profile', to take the heads from; none is made then.")
    ] = None,
    method: ProfileMethod = "exhaustive",
    granularity: Granularity = "head_index",
    gamma_probe: GammaProbe = 2.0,
    p: Annotated[float, typer.Option(help="Share of the units to scale after profiling.")] = 0.4,
    combine: Annotated[str, typer.Option(help=f"Which of them: {alternatives(_COMBINE)}.")] = "dominant",
    tolerance: Tolerance = None,
    grid: Annotated[str | None, typer.Option(help="Factors to try, separated by commas.")] = None,
    refine: Annotated[bool, typer.Option("--refine", help="Search on between the best factor's neighbours.")] = False,
    layers: Layers = None,
    operator: Operator = "exact",
    answer_tokens: AnswerTokens = 1,
    seed: Seed = 0,
    limit: Limit = None,
    resume: Resume = None,
    batch_rows: BatchRows = 16,
    configs_per_pass: ConfigsPerPass = 1,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Choose heads and gamma, on labelled texts or on the model's own certainty."""
    _check_profile_options(method, granularity, tolerance, operator)
    for option, value, allowed in (
        ("--mode", mode, ("supervised", "unsupervised")),
        ("--heads", heads, ("profile", "uniform")),
        ("--metric", metric, _METRICS),
        ("--objective", objective, _OBJECTIVES),
        ("--combine", combine, _COMBINE),
    ):
        choice(option, value, allowed)
    if profile is not None and heads == "uniform":
        raise typer.BadParameter("it says which heads to scale, and --heads uniform scales all", param_hint="--profile")
    if mode == "supervised":
        refuse_idle(context, ("objective",), "to --mode supervised, which maximises --metric")
    else:
        refuse_idle(context, ("metric",), "to --mode unsupervised, which minimises --objective")
    if heads == "uniform":
        refuse_idle(context, (*_OF_PROFILING, *_OF_SELECTION, "seed"), "to --heads uniform, which makes no profile")
    if profile is not None:
        refuse_idle(context, (*_OF_PROFILING, "layers"), "beside --profile, which has its own")
    if combine != "random":
        refuse_idle(context, ("seed",), f"to --combine {combine}, which draws nothing")
    check_different_files(data=data, out=out, profile=profile, plot=plot, resume=resume)
    spec = _task(task, template, labels, text_column, label_column)
    gammas, chosen_layers = None if grid is None else numbers("--grid", grid), layer_numbers(layers)
    # Before torch is loaded, so that a mistake in the data is told at once.
    examples = spec.read(data, labelled=mode == "supervised")[:limit]
    from zerotuning.calibration import DEFAULT_GRID, calibrate
    from zerotuning.config import ModelId
    from zerotuning.plots import plot_curve
    from zerotuning.report import describe_choice

    check_writable(out)
    if plot is not None:
        check_picture(plot, extra="zerotuning[plot]")
    given = None if profile is None else _read_profile(profile)
    loaded, tokenizer = _load(model, dtype, attention)
    options: dict[str, Any] = {
        "mode": mode,
        "metric": metric,
        "objective": objective,
        "heads": heads,
        "granularity": granularity,
        "method": method,
        "combine": combine,
        "tolerance": tolerance,
        "operator": operator,
    }
    if given is not None:
        _check_profile_fits(given[1], ModelId.of(loaded), profile)
        options["profile"] = given[0]
    result = calibrate(
        loaded,
        tokenizer,
        examples,
        spec,
        grid=gammas or DEFAULT_GRID,
        refine=refine,
        layers=chosen_layers,
        gamma_probe=gamma_probe,
        p=p,
        seed=seed,
        answer_tokens=answer_tokens,
        batch_rows=batch_rows,
        configs_per_pass=configs_per_pass,
        resume=resume,
        progress=True,
        **options,
    )
    result.config.save(out)
    if plot is not None:
        plot_curve(result, plot, labels=spec.labels)
    if as_json:
        print_result(
            {
                "schema": _CALIBRATION_SCHEMA,
                "version": 1,
                **result.to_json(),
                "labels": list(spec.labels),
                "examples": len(examples),
                "config": str(out),
            }
        )
        return
    lines = [*_curve_table(result, spec.labels), "", describe_choice(result)]
    lines += [*(f"note: {each}" for each in result.warnings), f"configuration: {out}"]
    print_result("\n".join([*lines, *([] if plot is None else [f"picture: {plot}"])]))


@app.command("eval", epilog="Example: zerotuning eval --task sst2 --data test.jsonl --config sst2.json")
def eval_command(
    context: Context,
    data: Annotated[Path, typer.Option(help="Labelled texts, .jsonl, .csv or .parquet.")],
    config: ConfigFile,
    model: Model = None,
    dtype: Dtype = None,
    attention: Attention = None,
    task: TaskName = "mr",
    template: Template = None,
    labels: Labels = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="Set a baseline beside it too: 'contextual' (contextual calibration of the label words, Zhao et al. "
            "2021; no attention) or 'random_heads' (the same factors on other heads). Can be given twice."
        ),
    ] = None,
    seed: Seed = 0,
    answer_tokens: AnswerTokens = 1,
    limit: Limit = None,
    batch_rows: BatchRows = 16,
    as_json: AsJson = False,
) -> None:
    """Compare a configuration with the untouched model on labelled texts.

    The baselines PASTA and ACT are there in Python only: they need emphasised spans, or weights that are written out.
    """
    names = list(dict.fromkeys(baseline or ()))
    for name in names:
        choice("--baseline", name, _BASELINES)
    if "random_heads" not in names:
        refuse_idle(context, ("seed",), "without --baseline random_heads, as nothing is drawn")
    spec = _task(task, template, labels, text_column, label_column)
    examples = spec.read(data, labelled=True)[:limit]
    from zerotuning.config import ZeroTuningConfig
    from zerotuning.contextual import contextual_calibration
    from zerotuning.evaluation import ProgressBar, compare
    from zerotuning.report import comparison_table
    from zerotuning.scoring import Scorer
    from zerotuning.tasks import check_examples

    check_examples(spec, examples)
    loaded_config = ZeroTuningConfig.load(config)
    other_heads = _on_random_heads(loaded_config, seed) if "random_heads" in names else None
    loaded, tokenizer = _load(model, dtype, attention)
    loaded_config.check_fits(loaded)
    scorer = Scorer(
        loaded, tokenizer, spec, examples, batch_rows=batch_rows, answer_tokens=answer_tokens, reuse_layers=False
    )
    found = {}
    with ProgressBar(True, (2 + len(names)) * len(examples), "evaluate") as advance:
        for name, each in (
            ("vanilla", ZeroTuningConfig.uniform(loaded_config.model_id, 1.0)),
            ("tuned", loaded_config),
            ("random_heads", other_heads),
        ):
            if each is not None:
                [found[name]] = scorer.predict([each], advance=advance)
        if "contextual" in names:
            found["contextual"] = contextual_calibration(loaded, tokenizer, spec, examples, batch_rows=batch_rows)
            advance(len(examples))
    result = compare(examples, found["vanilla"], found["tuned"])
    beside = {name: compare(examples, found[name], found["tuned"]) for name in names}
    if as_json:
        of_baselines = {
            name: {"scores": each.vanilla.to_json(), "paired_with_tuned": each.to_json()["paired"]}
            for name, each in beside.items()
        }
        print_result({**result.to_json(), "baselines": of_baselines})
        return
    lines = comparison_table(result)
    for name, comparison in beside.items():
        _, *rest, _ = comparison_table(comparison)
        lines += ["", f"{'(tuned against a baseline)':<28}{name:<23}tuned", *rest]
    print_result("\n".join(lines))


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
        print_result(
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
        f"{identity.type}, {identity.layers} layers of {identity.query_heads} query heads; mode {loaded.mode}; "
        f"chosen by {loaded.granularity}",
        f"{len(loaded.layers)} layers touched" if loaded.layers else "nothing is touched: every gamma is 1",
    ]
    lines += _factor_lines(loaded)
    for name, value in loaded.meta.get("calibration", {}).items():
        lines.append(f"{name}: {value}")
    print_result("\n".join(lines))


@app.command(epilog="Example: zerotuning generate --config zerotuning-demo.json 'The capital of France is'")
def generate(
    prompt: Annotated[str, typer.Argument(help="Raw text; no chat template is applied.")],
    config: ConfigFile,
    model: Model = None,
    dtype: Dtype = None,
    attention: Attention = None,
    path: Annotated[
        str,
        typer.Option(help=f"Which of the ways to compute the exact operator: {alternatives(_PATHS)}."),
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, greedily.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with the untouched model and under a configuration."""
    choice("--path", path, _PATHS)
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("it is no text in the encoding of this terminal", param_hint="prompt") from None
    from zerotuning.adapter import apply
    from zerotuning.config import ZeroTuningConfig

    ways: dict[str, Any] = {"path": path}
    loaded_config = ZeroTuningConfig.load(config)
    loaded, tokenizer = _load(model, dtype, attention)
    loaded_config.check_fits(loaded)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(loaded.device)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("the prompt is empty")
    longest, limit = inputs["input_ids"].shape[1] + max_new_tokens, loaded.config.max_position_embeddings
    if longest > limit:
        raise ValueError(f"prompt and new tokens are {longest} tokens; the model takes {limit}: shorten the prompt")
    texts = {}
    for name, each in (("vanilla", ZeroTuningConfig.uniform(loaded_config.model_id, 1.0)), ("tuned", loaded_config)):
        with apply(loaded, each, **ways):
            output = loaded.generate(
                **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
            )
        texts[name] = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print_result(texts if as_json else "\n".join(f"{name}: {text!r}" for name, text in texts.items()))


@app.command("plot", epilog="Example: zerotuning plot profile.json --out profile.svg")
def plot_command(
    file: Annotated[
        Path,
        typer.Argument(help="A profile, a configuration, or what 'calibrate --json' printed."),
    ],
    out: Annotated[Path, typer.Option(help="The picture, .png or .svg; needs the extra 'plot'.")],
    as_json: AsJson = False,
) -> None:
    """Draw a head profile, a configuration, or the curve of a calibration."""
    from zerotuning.config import ZeroTuningConfig
    from zerotuning.plots import plot_config, plot_curve, plot_profile

    check_picture(out, extra="zerotuning[plot]")
    body = read_json_object(file)
    if body.get("schema") == _PROFILE_SCHEMA:
        plot_profile(_read_profile(file)[0], out)
    elif body.get("schema") == _CALIBRATION_SCHEMA:
        plot_curve(read_json(file, schema=_CALIBRATION_SCHEMA, version=1, what="calibration"), out)
    else:
        plot_config(ZeroTuningConfig.load(file), out)
    print_result({"picture": str(out)} if as_json else f"picture: {out}")


def run(arguments: Sequence[str]) -> int:
    """Run the command line on given arguments.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code: 0 if it ran, 1 if it failed, 2 for wrong usage, 130 if it was interrupted.
    """
    return console.run(app, arguments, arguments_called={"model=": "--model "})


def _check_profile_options(method: str, granularity: str, tolerance: str | None, operator: str) -> None:
    for option, value, allowed in (
        ("--method", method, ("exhaustive", "gradient")),
        ("--granularity", granularity, ("head_index", "layer_head", "layer")),
        ("--operator", operator, ("exact", "key", "query")),
    ):
        choice(option, value, allowed)
    if tolerance is not None:
        choice("--tolerance", tolerance, ("example", "sign_test"))


def _task(
    name: str, template: str | None, labels: str | None, text_column: str | None, label_column: str | None
) -> TaskSpec:
    if name.endswith(".json"):
        base = TaskSpec.load(name)
    else:
        choice("--task", name, tuple(TASKS))
        base = TASKS[name]
    changes: dict[str, Any] = {}
    if template is not None:
        changes["template"] = template.replace("\\n", "\n")
    if labels is not None:
        # What the column holds for each label belongs to the task's own labels.
        changes |= {"labels": tuple(word.strip() for word in labels.split(",")), "values": ()}
    if changes:
        changes["name"] = "own"
    if text_column is not None:
        changes |= {"text_column": text_column, "body": ""}
    if label_column is not None:
        changes["label_column"] = label_column
    return dataclasses.replace(base, **changes)


def _save_profile(profile: "HeadProfile", model: "ModelId", task: str, path: Path) -> dict[str, Any]:
    body = {
        "schema": _PROFILE_SCHEMA,
        "version": 1,
        "model": dataclasses.asdict(model),
        "task": task,
        **profile.to_json(),
    }
    write_text(path, json.dumps(body, indent=1, allow_nan=False) + "\n")
    return body


def _read_profile(path: Path) -> "tuple[HeadProfile, ModelId]":
    from zerotuning.config import ModelId
    from zerotuning.profiling import HeadProfile

    body = read_json(path, schema=_PROFILE_SCHEMA, version=1, what="head profile")
    try:
        return HeadProfile.from_json(body), ModelId(**body["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no valid head profile: {error}") from None


def _check_profile_fits(made_for: "ModelId", model: "ModelId", path: Path | None) -> None:
    if dataclasses.replace(made_for, name=model.name) != model:
        raise ValueError(
            f"{path} was made for another model ({made_for.type}, {made_for.layers} layers of {made_for.query_heads} "
            f"query heads, {made_for.key_value_heads} key/value heads); this one is {model.type}, {model.layers} "
            f"layers of {model.query_heads} query heads, {model.key_value_heads} key/value heads"
        )


def _on_random_heads(config: "ZeroTuningConfig", seed: int) -> "ZeroTuningConfig":
    """The same factors on heads drawn by chance, as many as the granularity of the configuration moves together."""
    import torch

    from zerotuning.config import ZeroTuningConfig

    identity = config.model_id
    # One column for each head that can have a factor of its own.
    width = identity.query_heads // identity.key_value_heads if config.mode == "key" else 1
    cells = config.log_gamma.view(identity.layers, -1, width)
    if config.granularity == "layer_head":
        cells = cells.reshape(1, -1, width)
    elif config.granularity == "layer":
        cells = cells.reshape(1, identity.layers, -1)
    if bool((cells == cells[:, :1]).all()):
        raise ValueError("the configuration scales all heads alike, so 'random_heads' would be the same one")
    generator = torch.Generator().manual_seed(seed)
    drawn = cells
    while torch.equal(drawn, cells):
        drawn = cells[:, torch.randperm(cells.shape[1], generator=generator)]
    log_gamma = drawn.reshape(identity.layers, identity.query_heads)
    return ZeroTuningConfig(log_gamma, identity, config.granularity, config.mode)


def _factor_lines(config: "ZeroTuningConfig") -> list[str]:
    """The factors, by what the configuration was chosen by."""
    gammas = [[float(f"{value:.4g}") for value in row] for row in config.log_gamma.exp().tolist()]
    if config.granularity in ("uniform", "head_index"):
        rows = {
            f"head {head:>3}": [row[head] for row in gammas] for head in range(len(gammas[0]) if config.layers else 0)
        }
    else:
        rows = {f"layer {layer:>3}": gammas[layer] for layer in config.layers}
    if config.granularity == "layer_head":
        touched = {layer: [head for head, value in enumerate(gammas[layer]) if value != 1] for layer in config.layers}
        return [
            f"layer {layer:>3}: " + ", ".join(f"head {head} gamma {gammas[layer][head]:g}" for head in heads)
            for layer, heads in touched.items()
        ]
    return [f"{name}: gamma {', '.join(f'{value:g}' for value in sorted(set(row)))}" for name, row in rows.items()]


def _curve_table(result: "CalibrationResult", labels: Sequence[str]) -> list[str]:
    """What was found at each gamma; the answers by label last, as there may be many labels."""
    scored = any(point.scores is not None for point in result.curve)
    shares = f"{'accuracy':>8}  {'parsed':>6}  {'among parsed':>12}  {'constrained':>11}  " if scored else ""
    lines = [f"{'gamma':>6}  {shares}{'entropy':>7}  {'of labels':>9}  answers ({', '.join(labels)})"]
    for point in result.curve:
        cells = f"{point.gamma:>6.4g}  "
        if point.scores is not None:
            scores = point.scores
            cells += f"{scores.accuracy.value:>8.3f}  {scores.parse_rate.value:>6.3f}  "
            cells += f"{scores.accuracy_parsed.value:>12.3f}  {scores.constrained_accuracy.value:>11.3f}  "
        counts = " ".join(map(str, point.label_counts))
        lines.append(f"{cells}{point.entropy:>7.3f}  {point.label_entropy:>9.3f}  {counts}")
    return lines


def _load(place: str | None, dtype: str | None, attention: str | None) -> tuple[Any, Any]:
    if dtype is not None:
        choice("--dtype", dtype, DTYPES)
    if place is None:
        from zerotuning.demo import embedded

        loaded = embedded().load_smollm2(dtype=dtype or default_dtype(), device=default_device())
    else:
        loaded = load_language_model(place, dtype=dtype)
    model, tokenizer = loaded
    if attention is not None:
        model.set_attn_implementation(attention)
    return model, tokenizer
