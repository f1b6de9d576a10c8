"""The command line; see `bodes-steer --help`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from separata_kit import console
from separata_kit.console import (
    check_different_files,
    choice,
    layer_numbers,
    numbers,
    print_result,
    refuse_idle,
)
from separata_kit.files import check_writable, read_json, write_text
from separata_kit.language_models import DTYPES, check_place, default_device, has_fast_bfloat16, load_language_model
from separata_kit.pictures import check_picture

from bodes_steer.data import KINDS, TEMPLATE, read_examples, read_prompts

if TYPE_CHECKING:
    from typer import Context

    from bodes_steer.extraction import Activations
    from bodes_steer.steerers import Steerer

if not TYPE_CHECKING:
    # What typer gives to a command is not of its own class but of the base.
    Context = typer.Context.__base__

app = typer.Typer(
    name="bodes-steer",
    help="Steer the hidden states of a frozen language model along the gradient of a learned log-density ratio.",
    epilog="Example: bodes-steer demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
evaluation = typer.Typer(
    help="Compare a steered model with the model as it is.",
    epilog="Example: bodes-steer eval generation --steerer s.safetensors --prompts prompts.txt",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(evaluation, name="eval")

_POSITIONS = ("from_prompt_end", "last", "all")
_JUDGES = ("vader", "classifier", "endpoint")
_PICTURES = ("trajectory", "pca")
_FACTS_SCHEMA = "bodes-steer/groups"

# Arguments that messages advise, as they are called here.
_ARGUMENTS = {
    "resume=False": "--restart",
    "force=True": "--force",
    "positive=...": "--positive",
    "judge_model='": "--judge-model '",
    "model='": "--model '",
}

Model = Annotated[
    str | None, typer.Option(help="Folder or name of a transformers model; SmolLM2-135M-Instruct if not given.")
]
Dtype = Annotated[
    str | None,
    typer.Option(help=f"Type of the weights: {', '.join(DTYPES)}; bfloat16 on a GPU and float32 without if not given."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Layers = Annotated[str | None, typer.Option(help="Blocks, counted from 0, such as '10-20,25'; all if not given.")]
Layer = Annotated[int | None, typer.Option(min=0, help="Block to steer; the one it was fitted on if not given.")]
Strength = Annotated[
    float | None, typer.Option("--T", help="Strength in the method's own unit; that of the steerer if not given.")
]
Relative = Annotated[
    float | None, typer.Option(help="Strength as a share of the median activation norm, in place of --T.")
]
Positions = Annotated[str, typer.Option(help=f"Which positions are steered: {', '.join(_POSITIONS)}.")]
SteererFile = Annotated[Path, typer.Option(help="A steerer written by 'fit' or 'demo'.")]
ActivationsFile = Annotated[Path, typer.Argument(help="Labelled activations written by 'extract'.")]
Force = Annotated[bool, typer.Option("--force", help="Also for a model that it was not fitted on.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of what is drawn by chance.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Texts in one forward.")]
TestShare = Annotated[float, typer.Option(min=0, max=0.9, help="Share that is held out.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put plain prompts into the model's chat template.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate.")]
Sample = Annotated[bool, typer.Option("--sample", help="Draw tokens by chance in place of the likeliest ones.")]
Temperature = Annotated[float, typer.Option(help="Of the drawing.")]
TopP = Annotated[
    float, typer.Option(min=0, max=1, help="Draw from the likeliest tokens that have this share of the probability.")
]
Prompts = Annotated[Path | None, typer.Option(help="Prompts: .txt (one in a line), .jsonl, .csv or .parquet.")]
JudgeName = Annotated[
    str, typer.Option(help="Who scores the texts: 'vader' (a lexicon of sentiment), 'classifier' or 'endpoint'.")
]
JudgeModel = Annotated[
    str | None, typer.Option(help="Folder or name of the classifier, or the model's name at the endpoint.")
]
JudgeLabel = Annotated[
    str | None, typer.Option(help="The classifier's label whose probability is the score; none for a reward model.")
]
JudgeUrl = Annotated[
    str | None,
    typer.Option(help="The endpoint, up to '/v1'; OPENAI_BASE_URL if not given. The key is taken from OPENAI_API_KEY."),
]
JudgeCache = Annotated[Path | None, typer.Option(help="File of the endpoint's replies, continued if it exists.")]


@app.command(epilog="Example: bodes-steer demo --seed 1 --json")
def demo(
    model: Model = None,
    dtype: Dtype = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Block to steer; 14 of 30 if not given.")] = None,
    relative: Annotated[float, typer.Option(help="Length of the step by the median activation norm.")] = 0.1,
    fit_items: Annotated[int, typer.Option(min=2, help="Texts of each mood to fit on.")] = 200,
    test_items: Annotated[int, typer.Option(min=2, help="Others of each mood to test on.")] = 50,
    samples: Annotated[int, typer.Option(min=1, help="Continuations of each prompt.")] = 2,
    new_tokens: NewTokens = 24,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Where the steerer is written.")] = Path("bodes-steer-demo.safetensors"),
    batch_size: BatchSize = 32,
    as_json: AsJson = False,
) -> None:
    """Fit on film-review snippets, steer what the model writes, and let a lexicon judge it.

    Without --dtype the weights are in bfloat16 where the processor multiplies it natively.
    """
    if not (math.isfinite(relative) and relative > 0):
        raise typer.BadParameter(f"{relative} is no share above 0", param_hint="--relative")
    check_writable(out)
    # Inside the commands, so that help and wrong usage need not wait for torch.
    from bodes_steer.demo import embedded, run_demo
    from bodes_steer.lexicon import vader_judge
    from bodes_steer.report import demo_report

    vader_judge()  # a missing extra is told before the work
    texts = embedded().rated_texts("movie")
    # Half the time, where the processor can; what is steered is computed in float32 all the same.
    loaded, tokenizer = _load(model, dtype or ("bfloat16" if has_fast_bfloat16() else None))
    result = run_demo(
        loaded,
        tokenizer,
        texts,
        source=f"film reviews ({texts.source})",
        out=out,
        layer=layer,
        strength=relative,
        fit_items=fit_items,
        test_items=test_items,
        samples=samples,
        new_tokens=new_tokens,
        seed=seed,
        batch_size=batch_size,
    )
    print_result(result.to_json() if as_json else demo_report(result))


@app.command(epilog="Example: bodes-steer extract --data pairs.jsonl --layers 10-20 --out activations.safetensors")
def extract(
    context: Context,
    data: Annotated[
        Path,
        typer.Option(
            help="Preferences (prompt, chosen, rejected) or labelled texts (text, label): .jsonl, .csv, "
            ".parquet, or a folder of a saved data set."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where the activations are written, .safetensors.")],
    model: Model = None,
    dtype: Dtype = None,
    kind: Annotated[str, typer.Option(help=f"What a row is: {', '.join(KINDS)}.")] = "auto",
    template: Annotated[
        str, typer.Option(help="How a plain prompt and response become one text; \\n is a new line.")
    ] = TEMPLATE.replace("\n", "\\n"),
    chat: Annotated[
        bool, typer.Option("--chat", help="Put plain prompts and responses into the chat template.")
    ] = False,
    text_column: Annotated[str, typer.Option(help="Column of a labelled text.")] = "text",
    label_column: Annotated[str, typer.Option(help="Column of its label.")] = "label",
    positive: Annotated[str | None, typer.Option(help="The label that is positive, all others are negative.")] = None,
    split: Annotated[str | None, typer.Option(help="Part of a saved data set.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many examples of each class, the first.")] = None,
    layers: Layers = None,
    position: Annotated[str, typer.Option(help="'last' token of the text, or the 'mean' over its tokens.")] = "last",
    max_length: Annotated[int | None, typer.Option(min=1, help="Cut longer texts to so many tokens.")] = None,
    batch_size: BatchSize = 8,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew where an unfinished run could go on.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read the activations of labelled texts, for all layers in one pass; started again it goes on where it was."""
    choice("--kind", kind, KINDS)
    choice("--position", position, ("last", "mean"))
    if chat:
        refuse_idle(context, ("template",), "beside --chat")
    chosen = layer_numbers(layers)
    check_different_files(data=data, out=out)
    examples = read_examples(
        data,
        kind=kind,
        template=template.replace("\\n", "\n"),
        chat=chat,
        text_column=text_column,
        label_column=label_column,
        positive=positive,
        split=split,
    )
    if limit is not None:
        kept = {label: [each for each in examples if each.label == label][:limit] for label in (1, 0)}
        together = {id(each) for part in kept.values() for each in part}
        examples = [each for each in examples if id(each) in together]
    check_writable(out)
    from bodes_steer.extraction import extract_activations

    loaded, tokenizer = _load(model, dtype)
    told: dict[str, Any] = {"position": position}
    found = extract_activations(
        loaded,
        tokenizer,
        [each.text for each in examples],
        chosen,
        labels=[each.label for each in examples],
        batch_size=batch_size,
        max_length=max_length,
        out=out,
        resume=not restart,
        progress=True,
        **told,
    )
    groups = [each.group for each in examples]
    if len(set(groups)) < len(groups):
        body = {"schema": _FACTS_SCHEMA, "version": 1, "groups": _numbers(groups)}
        write_text(_groups_file(out), json.dumps(body) + "\n")
    else:
        _groups_file(out).unlink(missing_ok=True)
    facts = _activation_facts(found, out)
    if as_json:
        print_result(facts)
        return
    print_result(
        f"{facts['positives']} positive and {facts['negatives']} negative texts, d = {facts['d']}, blocks "
        f"{_spans(facts['layers'])}\nactivations: {out}"
    )


@app.command(epilog="Example: bodes-steer fit activations.safetensors --layer 14 --out steerer.safetensors")
def fit(
    context: Context,
    activations: ActivationsFile,
    out: Annotated[Path, typer.Option(help="Where the steerer is written, .safetensors.")],
    layer: Annotated[int | None, typer.Option(min=0, help="Block; may be left out where there is one only.")] = None,
    method: Annotated[
        str, typer.Option(help="'odesteer', 'step-odesteer', 'caa', 'iti', 'repe', 'linact', ...")
    ] = "odesteer",
    param: Annotated[
        list[str] | None, typer.Option(help="A parameter of the method, such as C=100; can be given several times.")
    ] = None,
    strength: Annotated[float | None, typer.Option("--T", help="Strength in the method's own unit.")] = None,
    relative: Relative = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="The least strength that makes the median held-out negative look positive.")
    ] = False,
    test_share: TestShare = 0.2,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Fit a steerer to labelled activations, and see what it finds in others that were held out."""
    if sum((strength is not None, relative is not None, auto)) > 1:
        raise typer.BadParameter("only one of --T, --relative and --auto can be given", param_hint="--T")
    if auto and not test_share:
        raise typer.BadParameter("it looks at held-out activations, and --test-share is 0", param_hint="--auto")
    check_different_files(activations=activations, out=out)
    params = _params(param)
    check_writable(out)
    from bodes_steer.steerers import auto_T, make_steerer

    _check_kinds(method, params)
    steerer = make_steerer(method, **params)
    if "random_state" in steerer.get_params():
        if "random_state" not in params:
            steerer.set_params(random_state=seed)
    elif not test_share:
        refuse_idle(context, ("seed",), f"to --method {method} without a held-out part, as nothing is drawn")
    opened, groups = _open(activations)
    layer = _one_layer(opened, layer)
    (fit_pos, fit_neg), (test_pos, test_neg) = _held_out(opened, groups, layer, test_share, seed)
    steerer.fit(fit_pos, fit_neg)
    if relative is not None:
        strength = steerer.absolute_T(_finite("--relative", relative))
    elif auto:
        strength = auto_T(steerer, test_neg, test_pos)
    if strength is not None:
        steerer.set_params(T=_finite("--T", strength))
    found = {
        "steerer": str(out),
        "method": method,
        "layer": layer,
        "fitted_on": {"positives": len(fit_pos), "negatives": len(fit_neg)},
        "held_out": {"positives": len(test_pos), "negatives": len(test_neg)},
        "T": float(steerer.T),
        "median_norm": float(steerer.median_norm_),
        **_held_out_facts(steerer, (fit_pos, fit_neg), (test_pos, test_neg)),
    }
    steerer.save(out, model=opened.model, layer=layer)
    print_result(found if as_json else "\n".join([*_fit_lines(found, steerer), f"steerer: {out}"]))


@app.command(epilog="Example: bodes-steer generate --steerer bodes-steer-demo.safetensors 'The film begins with'")
def generate(
    context: Context,
    steerer: SteererFile,
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts; or give --prompts.")] = None,
    prompts: Prompts = None,
    model: Model = None,
    dtype: Dtype = None,
    layer: Layer = None,
    strength: Strength = None,
    relative: Relative = None,
    positions: Positions = "from_prompt_end",
    chat: Chat = False,
    max_new_tokens: NewTokens = 32,
    sample: Sample = False,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    seed: Seed = 0,
    batch_size: BatchSize = 8,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Continue prompts with the model as it is and with the steered one."""
    if bool(prompt) == (prompts is not None):
        raise typer.BadParameter("give prompts, or a file of them with --prompts", param_hint="prompt")
    if not sample:
        refuse_idle(context, ("temperature", "top_p", "seed"), "without --sample, as nothing is drawn")
    choice("--positions", positions, _POSITIONS)
    for each in prompt or ():
        try:
            each.encode()
        except UnicodeEncodeError:
            raise typer.BadParameter("it is no text in the encoding of this terminal", param_hint="prompt") from None
    given = read_prompts(prompts if prompts is not None else [{"prompt": each} for each in prompt or ()], chat=chat)
    import torch

    from bodes_steer.model import SteeredModel

    loaded, tokenizer, fitted, length = _load_steered(model, dtype, steerer, strength, relative, force=force)
    texts = [_prompt_text(tokenizer, each) for each in given]
    how = _how_to_generate(max_new_tokens, sample, temperature, top_p)
    told: dict[str, Any] = {"layer": layer, "positions": positions}
    found: dict[str, list[str]] = {}
    with _bar(2 * len(texts), "generate") as bar:
        for name, its in (("plain", 0.0), ("steered", length)):
            steered = SteeredModel(loaded, tokenizer, fitted, T=its, **told)
            found[name] = []
            for first in range(0, len(texts), batch_size):
                batch = texts[first : first + batch_size]
                with torch.random.fork_rng():
                    torch.manual_seed(seed + first)
                    found[name] += steered.generate(batch, **how)
                bar.update(len(batch))
    if as_json:
        rows = [
            {"prompt": text, "plain": plain, "steered": moved}
            for text, plain, moved in zip(texts, found["plain"], found["steered"], strict=True)
        ]
        print_result({"T": length, "texts": rows})
        return
    print_result(
        "\n".join(
            f"prompt:  {text!r}\nplain:   {plain!r}\nsteered: {moved!r}"
            for text, plain, moved in zip(texts, found["plain"], found["steered"], strict=True)
        )
    )


@evaluation.command(
    "generation", epilog="Example: bodes-steer eval generation --steerer s.safetensors --prompts prompts.txt --sample"
)
def eval_generation(
    context: Context,
    steerer: SteererFile,
    prompts: Annotated[Path, typer.Option(help="Prompts: .txt (one in a line), .jsonl, .csv or .parquet.")],
    judge: JudgeName = "vader",
    judge_model: JudgeModel = None,
    judge_label: JudgeLabel = None,
    judge_url: JudgeUrl = None,
    judge_cache: JudgeCache = None,
    model: Model = None,
    dtype: Dtype = None,
    layer: Layer = None,
    strength: Strength = None,
    relative: Relative = None,
    positions: Positions = "from_prompt_end",
    chat: Chat = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many prompts.")] = None,
    max_new_tokens: NewTokens = 32,
    sample: Sample = False,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    seed: Seed = 0,
    batch_size: BatchSize = 8,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Let both write, and compare score, perplexity and variety, paired by prompt.

    The seed is that of the bootstrap too.
    """
    if not sample:
        refuse_idle(context, ("temperature", "top_p"), "without --sample, as nothing is drawn")
    choice("--positions", positions, _POSITIONS)
    _check_judge(context, judge, judge_model)
    check_different_files(prompts=prompts, steerer=steerer, judge_cache=judge_cache)
    given = read_prompts(prompts, chat=chat)[:limit]
    scorer = _judge(judge, judge_model, judge_label, judge_url, judge_cache)
    from bodes_steer.evaluation import evaluate_generation

    loaded, tokenizer, fitted, length = _load_steered(model, dtype, steerer, strength, relative, force=force)
    told: dict[str, Any] = {"layer": layer, "positions": positions}
    found = evaluate_generation(
        loaded,
        tokenizer,
        fitted,
        [_prompt_text(tokenizer, each) for each in given],
        scorer,
        T=length,
        batch_size=batch_size,
        seed=seed,
        progress=True,
        **told,
        **_how_to_generate(max_new_tokens, sample, temperature, top_p),
    )
    print_result({"T": length, "judge": judge, **found.to_json()} if as_json else found.table())


@evaluation.command(
    "truthfulqa", epilog="Example: bodes-steer eval truthfulqa --csv TruthfulQA.csv --layer 14 --limit 100"
)
def eval_truthfulqa(
    csv: Annotated[Path, typer.Option(help="TruthfulQA.csv, as it is published.")],
    model: Model = None,
    dtype: Dtype = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Block to steer; the middle one if not given.")] = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, separated by commas; caa,iti,step-odesteer,odesteer if not given.")
    ] = None,
    strengths: Annotated[
        str | None,
        typer.Option(
            "--relative", help="Shares of the median activation norm to choose the strength from, separated by commas."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=8, help="Use the first so many questions.")] = None,
    seed: Seed = 42,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows in one forward.")] = 64,
    resume: Annotated[Path | None, typer.Option(help="File of scores, continued if it exists.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score the listed answers (MC1, MC2) in two folds by question, plain and under each method.

    Steerers are fitted, and their strength is chosen, on one half of the questions; the other half is scored.
    """
    check_different_files(csv=csv, resume=resume)
    from bodes_steer.truthfulqa import METHODS, STRENGTHS, evaluate_truthfulqa, read_truthfulqa

    names = METHODS if methods is None else _names("--methods", methods)
    grid = STRENGTHS if strengths is None else numbers("--relative", strengths)
    questions = read_truthfulqa(csv)[:limit]
    if resume is not None:
        check_writable(resume)
    loaded, tokenizer = _load(model, dtype)
    found = evaluate_truthfulqa(
        loaded,
        tokenizer,
        questions,
        layer=layer,
        methods=names,
        strengths=grid,
        seed=seed,
        batch_rows=batch_rows,
        journal=resume,
        progress=True,
    )
    print_result(found.to_json() if as_json else found.table())


@app.command(epilog="Example: bodes-steer sweep activations.safetensors --of layers --out layers.json")
def sweep(
    context: Context,
    activations: ActivationsFile,
    out: Annotated[Path, typer.Option(help="Where the table is written, for 'plot' and 'show'.")],
    of: Annotated[
        str,
        typer.Option(
            help="'methods' compares methods, layers and strengths; 'layers' how well each layer tells classes apart."
        ),
    ] = "methods",
    layers: Layers = None,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "caa,step-odesteer,odesteer",
    strengths: Annotated[
        str | None, typer.Option("--T", help="Strengths in the methods' own units, separated by commas.")
    ] = None,
    relative: Annotated[
        str, typer.Option(help="Strengths as shares of the median activation norm, separated by commas.")
    ] = "0.05,0.1,0.2",
    param: Annotated[
        list[str] | None,
        typer.Option(help="A parameter of a method, such as odesteer.C=100; can be given several times."),
    ] = None,
    sketch: Annotated[bool, typer.Option("--sketch", help="With --of layers, fit the nonlinear probe too.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="Judge by what the model writes after these prompts, and not by activations.")
    ] = None,
    judge: JudgeName = "vader",
    judge_model: JudgeModel = None,
    judge_label: JudgeLabel = None,
    judge_url: JudgeUrl = None,
    judge_cache: JudgeCache = None,
    model: Model = None,
    dtype: Dtype = None,
    chat: Chat = False,
    max_new_tokens: NewTokens = 32,
    sample: Sample = False,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    batch_size: BatchSize = 8,
    test_share: Annotated[float, typer.Option(min=0.01, max=0.9, help="Share that is held out.")] = 0.25,
    seed: Seed = 0,
    resume: Annotated[Path | None, typer.Option(help="File of judged choices, continued if it exists.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this .png or .svg; needs the extra 'plot'.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare layers, methods and strengths on held-out data."""
    choice("--of", of, ("methods", "layers"))
    of_model = ("model", "dtype", "chat", "max_new_tokens", "sample", "temperature", "top_p", "batch_size")
    of_judge = ("judge", "judge_model", "judge_label", "judge_url", "judge_cache")
    if of == "layers":
        of_methods = ("methods", "strengths", "relative", "param", "resume", "prompts")
        refuse_idle(context, (*of_methods, *of_model, *of_judge), "to --of layers, which steers nothing")
    else:
        refuse_idle(context, ("sketch",), "without --of layers")
    if prompts is None:
        refuse_idle(context, (*of_model, *of_judge), "without --prompts, as nothing is written")
    elif not sample:
        refuse_idle(context, ("temperature", "top_p"), "without --sample, as nothing is drawn")
    if strengths is not None:
        refuse_idle(context, ("relative",), "beside --T")
    if prompts is not None:
        _check_judge(context, judge, judge_model)
    check_different_files(
        activations=activations, out=out, prompts=prompts, judge_cache=judge_cache, resume=resume, plot=plot
    )
    chosen, names = layer_numbers(layers), _names("--methods", methods)
    grid = numbers("--T", strengths) if strengths is not None else numbers("--relative", relative)
    params = _params_by_method(param, names)
    for name, its in params.items():
        _check_kinds(name, its)
    check_writable(out)
    if resume is not None:
        check_writable(resume)
    from bodes_steer.plots import plot_layers, plot_pareto
    from bodes_steer.report import table_lines
    from bodes_steer.sweeps import generation_metric, sweep_layers
    from bodes_steer.sweeps import sweep as sweep_methods

    if plot is not None:
        check_picture(plot, extra="bodes-steer[plot]")
    given = [] if prompts is None else read_prompts(prompts, chat=chat)
    scorer = None if prompts is None else _judge(judge, judge_model, judge_label, judge_url, judge_cache)
    opened, groups = _open(activations)
    common: dict[str, Any] = {"layers": chosen, "groups": groups, "test_share": test_share, "seed": seed}
    if of == "layers":
        found = sweep_layers(opened, sketch=sketch, **common)
        draw = plot_layers
    else:
        options: dict[str, Any] = {}
        if scorer is not None:
            loaded, tokenizer = _load(model, dtype)
            _check_same_model(opened, loaded)
            texts = [_prompt_text(tokenizer, each) for each in given]
            how = _how_to_generate(max_new_tokens, sample, temperature, top_p)
            options = {
                "metric": generation_metric(loaded, tokenizer, texts, scorer, batch_size=batch_size, seed=seed, **how),
                "gain": "score",
                "cost": "perplexity",
                "about": {
                    "prompts": texts,
                    "judge": [judge, judge_model, judge_label],
                    "batch_size": batch_size,
                    **how,
                },
            }
        found = sweep_methods(
            opened,
            methods=names,
            Ts=grid,
            relative=strengths is None,
            params=params,
            resume=resume,
            **common,
            **options,
        )
        draw = plot_pareto
    found.save(out)
    if plot is not None:
        draw(found, plot)
    if as_json:
        print_result(found.to_json())
        return
    lines = table_lines(found.columns, [[row.get(name) for name in found.columns] for row in found.rows])
    best = found.best()
    what = (
        f"layer {best['layer']}"
        if of == "layers"
        else f"{best['method']} on layer {best['layer']}, T = {best['T']:.4g}"
    )
    lines += ["", f"highest {found.gain.replace('_', ' ')}: {what}", f"table: {out}"]
    print_result("\n".join([*lines, *([] if plot is None else [f"picture: {plot}"])]))


@app.command("plot", epilog="Example: bodes-steer plot table.json --out table.svg")
def plot_command(
    context: Context,
    file: Annotated[Path, typer.Argument(help="A table written by 'sweep', or a steerer, with --activations.")],
    out: Annotated[Path, typer.Option(help="The picture, .png or .svg; needs the extra 'plot'.")],
    activations: Annotated[Path | None, typer.Option(help="Activations to steer, written by 'extract'.")] = None,
    what: Annotated[
        str,
        typer.Option(
            help="Of a steerer: 'trajectory' (log ratio and direction along the path) or 'pca' (where rows go)."
        ),
    ] = "trajectory",
    strength: Strength = None,
    relative: Relative = None,
    as_json: AsJson = False,
) -> None:
    """Draw a sweep, or what a steerer does to activations."""
    choice("--what", what, _PICTURES)
    check_different_files(file=file, out=out, activations=activations)
    from bodes_steer.plots import plot_layers, plot_pareto, plot_pca, plot_trajectory
    from bodes_steer.sweeps import Table

    check_picture(out, extra="bodes-steer[plot]")
    if _is_json(file):
        refuse_idle(context, ("activations", "what", "strength", "relative"), "to a table")
        table = Table.load(file)
        (plot_layers if table.of == "layers" else plot_pareto)(table, out)
    else:
        from bodes_steer.files import load_steerer

        steerer = load_steerer(file)
        if activations is None:
            raise typer.BadParameter("a steerer is drawn on activations; give them", param_hint="--activations")
        opened, _ = _open(activations)
        origin = steerer.origin_
        layer = _one_layer(opened, None if origin is None else origin.layer)
        pos, neg = opened.pair(layer)
        T = _strength(steerer, strength, relative)  # noqa: N806  # the paper's name
        if what == "trajectory":
            plot_trajectory(steerer.trajectory(neg, T), out)
        else:
            plot_pca(pos, neg, out, moved=[(neg, steerer.steer(neg, T))])
    print_result({"picture": str(out)} if as_json else f"picture: {out}")


@app.command(epilog="Example: bodes-steer export steerer.safetensors --out vector.gguf")
def export(
    file: Annotated[list[Path], typer.Argument(help="Steerers of a constant method, one for each layer.")],
    out: Annotated[Path, typer.Option(help="The control vector, .gguf; needs the extra 'gguf'.")],
    layer: Layer = None,
    strength: Strength = None,
    relative: Relative = None,
    model_hint: Annotated[str | None, typer.Option(help="Kind of model, such as 'llama'.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a control vector for llama.cpp.

    Its direction.K is added to the output of block K, counted from 0 as everywhere here, at every position.
    """
    if len(file) > 1 and layer is not None:
        raise typer.BadParameter("it is for one steerer; several have their own", param_hint="--layer")
    for each in file:
        check_different_files(file=each, out=out)
    if out.suffix.lower() != ".gguf":
        raise typer.BadParameter(f"{out} must end in .gguf", param_hint="--out")
    check_writable(out)
    from bodes_steer.export import export_gguf
    from bodes_steer.files import load_steerer

    steerers = [load_steerer(each) for each in file]
    by_layer: dict[int, Steerer] = {}
    for name, steerer in zip(file, steerers, strict=True):
        at = layer if layer is not None else getattr(steerer.origin_, "layer", None)
        if at is None:
            raise ValueError(f"{name} does not say on which layer it was fitted; give --layer")
        if at in by_layer:
            raise ValueError(f"{name} is for layer {at} too; a control vector has one direction for each layer")
        if steerer.constant_vector is not None:
            steerer.set_params(T=_strength(steerer, strength, relative))
        by_layer[at] = steerer
    lengths = export_gguf(by_layer, out, model_hint=model_hint)
    if as_json:
        print_result({"control_vector": str(out), "lengths": {str(at): length for at, length in lengths.items()}})
        return
    lines = [
        f"direction.{at}: added to the output of block {at}, length {length:.4g}" for at, length in lengths.items()
    ]
    print_result("\n".join([*lines, f"control vector: {out}"]))


@app.command(epilog="Example: bodes-steer show bodes-steer-demo.safetensors")
def show(
    file: Annotated[Path, typer.Argument(help="A steerer, activations, or a table.")],
    as_json: AsJson = False,
) -> None:
    """Print what a file holds."""
    if _is_json(file):
        from bodes_steer.report import table_lines
        from bodes_steer.sweeps import Table

        table = Table.load(file)
        rows = [[row.get(name) for name in table.columns] for row in table.rows]
        print_result(table.to_json() if as_json else "\n".join(table_lines(table.columns, rows)))
        return
    from bodes_steer.files import load_steerer

    try:
        steerer = load_steerer(file)
    except ValueError as not_one:
        try:
            facts = _activation_facts(_activations(file), file)
        except ValueError:
            raise not_one from None
    else:
        facts = _steerer_facts(steerer)
    print_result(facts if as_json else "\n".join(f"{name}: {_words(value)}" for name, value in facts.items()))


def run(arguments: Sequence[str]) -> int:
    """Run the command line on given arguments.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code: 0 if it ran, 1 if it failed, 2 for wrong usage, 130 if it was interrupted.
    """
    return console.run(app, arguments, arguments_called=_ARGUMENTS)


def _bar(total: int, description: str) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

    return tqdm(total=total, desc=description, unit="text", dynamic_ncols=True)


def _finite(option: str, value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number", param_hint=option)
    return value


def _names(option: str, text: str) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise typer.BadParameter(f"{text!r} is no list of names", param_hint=option)
    return found


def _params(given: Sequence[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in given or ():
        name, sign, value = each.partition("=")
        if not sign or not name:
            raise typer.BadParameter(f"{each!r} is not of the form name=value", param_hint="--param")
        if name == "T":
            raise typer.BadParameter("the strength has an option of its own, --T", param_hint="--param")
        try:
            found[name] = json.loads(value)
        except ValueError:
            # A word, such as a solver's name; Python's own names are as good as JSON's.
            found[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return found


def _params_by_method(given: Sequence[str] | None, methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for each in given or ():
        method, dot, rest = each.partition(".")
        if not dot or method not in methods:
            raise typer.BadParameter(
                f"{each!r} is not of the form method.name=value with one of {', '.join(methods)}", param_hint="--param"
            )
        found.setdefault(method, {}).update(_params([rest]))
    return found


def _check_kinds(method: str, params: Mapping[str, Any]) -> None:
    """A value of another kind than the default, which the method itself would stumble over late or not at all."""
    from bodes_steer.steerers import make_steerer

    defaults = make_steerer(method).get_params()
    for name, value in params.items():
        default = defaults.get(name)
        # Where nothing is the default, a number is what can be given.
        kind: Any = type(default) if isinstance(default, bool | str) else (int, float)
        good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if name in defaults and not good and not (default is None and value is None):
            words = {bool: "true or false", str: "a word"}.get(kind, "a number")
            raise typer.BadParameter(f"{name}={value!r} must be {words}", param_hint="--param")


def _check_judge(context: Context, judge: str, judge_model: str | None) -> None:
    choice("--judge", judge, _JUDGES)
    if judge == "vader":
        refuse_idle(context, ("judge_model",), "to --judge vader")
    elif judge_model is None:
        raise typer.BadParameter(f"--judge {judge} needs a model", param_hint="--judge-model")
    if judge != "classifier":
        refuse_idle(context, ("judge_label",), f"to --judge {judge}")
    if judge != "endpoint":
        refuse_idle(context, ("judge_url", "judge_cache"), f"to --judge {judge}")


def _judge(judge: str, model: str | None, label: str | None, url: str | None, cache: Path | None) -> Any:
    if judge == "vader":
        from bodes_steer.lexicon import vader_judge

        return vader_judge()
    from bodes_steer.judges import ClassifierJudge, EndpointJudge

    assert model is not None  # refused before
    if judge == "endpoint":
        if cache is not None:
            check_writable(cache)
        return EndpointJudge(model, base_url=url, cache=cache)
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    check_place("judge_model", model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        classifier = AutoModelForSequenceClassification.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # files can be broken in more ways than their readers have errors for
        raise ValueError(f"judge_model={model!r} cannot be loaded: {error}") from None
    return ClassifierJudge(classifier.eval(), tokenizer, label=label)


def _how_to_generate(max_new_tokens: int, sample: bool, temperature: float, top_p: float) -> dict[str, Any]:
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sample}
    return {**how, "temperature": temperature, "top_p": top_p} if sample else how


def _prompt_text(tokenizer: Any, prompt: str | list[dict[str, str]]) -> str:
    """A prompt as the model is to see it."""
    if isinstance(prompt, str):
        return prompt
    if tokenizer.chat_template is None:
        raise ValueError("the model's tokenizer has no chat template; give plain prompts, without --chat")
    text = str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
    begin = tokenizer.bos_token
    # The tokenizer puts it in front once more.
    if begin and text.startswith(begin) and tokenizer("").get("input_ids", [])[:1] == [tokenizer.bos_token_id]:
        return text.removeprefix(begin)
    return text


def _strength(steerer: "Steerer", strength: float | None, relative: float | None) -> float:
    if strength is not None and relative is not None:
        raise typer.BadParameter("only one of --T and --relative can be given", param_hint="--T")
    if relative is not None:
        return steerer.absolute_T(_finite("--relative", relative))
    return float(steerer.T) if strength is None else _finite("--T", strength)


def _load_steered(
    model: str | None, dtype: str | None, file: Path, strength: float | None, relative: float | None, *, force: bool
) -> "tuple[Any, Any, Steerer, float]":
    from bodes_steer.files import check_model, load_steerer

    # Before the model is loaded, which takes longer.
    steerer = load_steerer(file)
    T = _strength(steerer, strength, relative)  # noqa: N806  # the paper's name
    loaded, tokenizer = _load(model, dtype)
    check_model(steerer, loaded, what=str(file), force=force)
    return loaded, tokenizer, steerer, T


def _check_same_model(opened: "Activations", model: Any) -> None:
    from bodes_steer.files import Origin

    here = Origin.of(model)
    for name in ("model_type", "hidden_size", "num_layers"):
        there, its = getattr(opened.model, name), getattr(here, name)
        if there and its and there != its:
            raise ValueError(f"the activations are of a model with {name} {there!r}, and --model has {its!r}")


def _activations(path: Path) -> "Activations":
    from bodes_steer.extraction import Activations

    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file of activations")
    return Activations.open(path)


def _open(path: Path) -> "tuple[Activations, list[str] | None]":
    """Labelled activations, and which of their texts belong together."""
    opened = _activations(path)
    if opened.labels is None:
        raise ValueError(f"{path} holds no labels, so there is no positive and no negative class")
    side = _groups_file(path)
    if not side.exists():
        return opened, None
    try:
        body = read_json(side, schema=_FACTS_SCHEMA, version=1, what="list of groups")
        groups = [str(int(each)) for each in body["groups"]]
        if len(groups) != len(opened.labels):
            raise ValueError("it does not fit the activations")  # noqa: TRY301  # told like all that is wrong
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{side} is damaged ({error}); run 'extract' again, or delete it") from None
    return opened, groups


def _groups_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.groups.json")


def _numbers(groups: Sequence[str]) -> list[int]:
    known: dict[str, int] = {}
    return [known.setdefault(each, len(known)) for each in groups]


def _one_layer(opened: "Activations", layer: int | None) -> int:
    known = [int(each) for each in opened.layers]
    if layer is None and len(known) == 1:
        return known[0]
    if layer not in known:
        raise ValueError(f"--layer {layer}: the activations are of the blocks {_spans(known)}; name one of them")
    return layer


def _held_out(
    opened: "Activations", groups: Sequence[str] | None, layer: int, share: float, seed: int
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    from bodes_steer.sweeps import held_out_parts

    if not share:
        pos, neg = opened.pair(layer)
        return (pos, neg), (pos[:0], neg[:0])
    part = held_out_parts(opened, layer, groups=groups, test_share=share, seed=seed)
    return (part.fit_pos, part.fit_neg), (part.pos, part.neg)


def _held_out_facts(steerer: "Steerer", fitted: tuple[Any, Any], held_out: tuple[Any, Any]) -> dict[str, Any]:
    """How well the barrier and a linear probe tell held-out classes apart, and what steering does to the barrier."""
    test_pos, test_neg = held_out
    if not len(test_pos) or not steerer.has_barrier:
        return {}
    import torch

    from bodes_steer.density_ratio import LogDensityRatio
    from bodes_steer.features import IdentityFeatures

    linear = LogDensityRatio(IdentityFeatures()).fit(torch.cat(fitted), [1] * len(fitted[0]) + [0] * len(fitted[1]))
    right = torch.cat([steerer.log_ratio(test_pos) > 0, steerer.log_ratio(test_neg) <= 0])
    path = steerer.trajectory(test_neg)
    assert path.log_ratios is not None  # it has a barrier
    labels = [1] * len(test_pos) + [0] * len(test_neg)
    return {
        "accuracy": float(right.double().mean()),
        "linear_accuracy": float(linear.score(torch.cat(held_out), labels)),
        "log_ratio": {
            "negatives": float(path.log_ratios[0].median()),
            "negatives_steered": float(path.log_ratios[-1].median()),
            "positives": float(steerer.log_ratio(test_pos).median()),
        },
        "angle_degrees": _number(float(torch.rad2deg(path.angle.double()).nanmedian())),
    }


def _fit_lines(found: Mapping[str, Any], steerer: "Steerer") -> list[str]:
    fitted, held = found["fitted_on"], found["held_out"]
    lines = [
        f"{found['method']} on block {found['layer']}: fitted on {fitted['positives']} positive and "
        f"{fitted['negatives']} negative texts, {held['positives']} and {held['negatives']} held out",
        f"T = {found['T']:.4g}; median activation norm {found['median_norm']:.4g}",
    ]
    if "accuracy" in found:
        ratios = found["log_ratio"]
        lines += [
            f"held-out accuracy {found['accuracy']:.3f}, of a linear probe {found['linear_accuracy']:.3f}",
            f"median log ratio of held-out negatives {ratios['negatives']:+.3f}, steered "
            f"{ratios['negatives_steered']:+.3f} (positives {ratios['positives']:+.3f})",
        ]
        nonlinear = steerer.constant_vector is None and found["method"] != "mimic"
        if nonlinear and found["angle_degrees"] is not None:
            lines.append(f"median angle between first and last step {found['angle_degrees']:.1f} degrees")
        if nonlinear and found["accuracy"] <= found["linear_accuracy"]:
            lines.append("the nonlinear part buys nothing in accuracy here")
    return lines


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _steerer_facts(steerer: "Steerer") -> dict[str, Any]:
    origin = steerer.origin_
    vector = steerer.constant_vector
    facts: dict[str, Any] = {
        "method": steerer.method,
        "model": None if origin is None else origin.model_name or origin.model_type or None,
        "layer": None if origin is None else origin.layer,
        "d": steerer.n_features_in_,
        "T": float(steerer.T),
        "median_norm": float(steerer.median_norm_),
        "vector_norm": None if vector is None else float(vector.norm()),
        "params": {name: value for name, value in steerer.get_params().items() if name != "T"},
        "versions": {} if origin is None else dict(origin.versions),
    }
    return {name: value for name, value in facts.items() if value not in (None, {})}


def _activation_facts(opened: "Activations", path: Path) -> dict[str, Any]:
    labels = None if opened.labels is None else [int(each) for each in opened.labels]
    layers = [int(each) for each in opened.layers]
    rows = opened.layer(layers[0])
    facts: dict[str, Any] = {"activations": str(path), "layers": layers, "texts": len(rows), "d": int(rows.shape[-1])}
    if labels is not None:
        facts |= {"positives": labels.count(1), "negatives": labels.count(0)}
    if opened.truncated:
        facts["truncated"] = opened.truncated
    if opened.duplicates:
        facts["duplicates"] = opened.duplicates
    return facts


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, list):
        return _spans(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _spans(layers: Sequence[int]) -> str:
    """Layers as an option takes them: '0-9,12'."""
    spans: list[list[int]] = []
    for each in sorted(layers):
        if spans and each == spans[-1][1] + 1:
            spans[-1][1] = each
        else:
            spans.append([each, each])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def _is_json(path: Path) -> bool:
    with path.open("rb") as file:
        # The length of a safetensors header comes first, and no header is that long.
        return file.read(8).lstrip()[:1] in (b"{", b"[") or path.suffix.lower() == ".json"


def _load(place: str | None, dtype: str | None) -> tuple[Any, Any]:
    if dtype is not None:
        choice("--dtype", dtype, DTYPES)
    device = default_device()
    # The paper's models are in float32; on a GPU that would halve the models that fit.
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    if place is None:
        from bodes_steer.demo import embedded

        return embedded().load_smollm2(dtype=dtype, device=device)  # type: ignore[no-any-return]  # optional package
    return load_language_model(place, dtype=dtype, device=device)
