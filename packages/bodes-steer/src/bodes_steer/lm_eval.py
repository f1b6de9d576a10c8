"""A steered model in lm-evaluation-harness.

    python -m bodes_steer.lm_eval --model bodes_steer --model_args pretrained=FOLDER,steerer=FILE,T=5 --tasks ...

is the harness's own `lm_eval` with one more model. (`lm_eval` alone cannot find it: the harness looks for models in its
own list only, without entry points.) `harness_model` makes the same from objects.

The model is steered during the harness's calls and untouched between them. Log-likelihoods are steered from the last
token of each request's context on, whatever shares its batch; texts are from the last token of their prompt on.
"""

import functools
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from bodes_steer.steerers import Steerer

MODEL_NAME = (__package__ or "bodes_steer").replace(".", "_")
"""The model's name in the harness's registry; a vendored copy beside an installed original has another one."""

_FIRST_BATCH = 64


class _ExtraMissingError(ImportError):
    """The extra is not there, as opposed to what goes wrong inside of it."""


def harness_model(
    model: "nn.Module",
    tokenizer: Any,
    steerer: "Steerer | Mapping[int, Steerer]",
    *,
    layer: int | None = None,
    T: float | Mapping[int, float] | None = None,  # noqa: N803  # the paper's name
    **hflm_arguments: Any,
) -> Any:
    """Hand a model to the harness, with what steers it.

    Args:
        model: A decoder-only transformers model.
        tokenizer: Its tokenizer; the harness gives it a padding token if it has none.
        steerer: See `bodes_steer.steer`.
        layer: See `bodes_steer.steer`.
        T: See `bodes_steer.steer`.
        hflm_arguments: Further arguments of the harness's `HFLM`, such as `batch_size=16`.

    Returns:
        An `lm_eval.models.huggingface.HFLM`, for `lm_eval.simple_evaluate(model=...)`.

    Raises:
        ValueError: As `bodes_steer.steer`.
        ImportError: The extra `lm-eval` is not installed.
    """
    return register()(model, steerer=steerer, layer=layer, T=T, tokenizer=tokenizer, **hflm_arguments)


@functools.cache
def register() -> type[Any]:
    """Add the model `bodes_steer` to the harness's registry, once.

    It takes the arguments of the harness's own `hf` and `steerer`, the file of a fitted steerer (without it the model
    is untouched), `layer` and `T`.

    Returns:
        Its class, which `lm_eval.api.registry.get_model("bodes_steer")` now finds.

    Raises:
        ImportError: The extra `lm-eval` is not installed.
    """
    hflm = _hflm()
    from lm_eval.api.registry import register_model  # type: ignore[import-untyped]  # it ships no types

    class SteeredLM(hflm):  # type: ignore[misc, valid-type]  # a class of a library that is imported when used
        """The harness's `hf`, steered."""

        def __init__(
            self,
            pretrained: Any,
            steerer: Any = None,
            layer: int | str | None = None,
            T: Any = None,  # noqa: N803  # the paper's name
            **hflm_arguments: Any,
        ):
            """Load the model, and the steerer.

            Args:
                pretrained: Folder or name of a model, or a model.
                steerer: A fitted steerer, several by block, or the file of one; none for the untouched model.
                layer: See `bodes_steer.steer`.
                T: See `bodes_steer.steer`.
                hflm_arguments: As `hf` takes them.
            """
            if isinstance(steerer, (str, os.PathLike)):
                from bodes_steer.files import load_steerer

                # Before the model, so that a mistake in the file is told at once.
                steerer = load_steerer(steerer)
            self.steerer = steerer
            self.steering: dict[str, Any] = {
                "layer": None if layer is None else int(layer),
                "T": T if T is None or isinstance(T, Mapping) else float(T),
            }
            super().__init__(pretrained=pretrained, **hflm_arguments)
            with self.steered():  # so that a mistake is told before anything runs
                pass

        def steered(self, prompt_lengths: Any = None) -> Any:
            """The context in which the model is called."""
            import contextlib

            from bodes_steer.hooks import steer

            if self.steerer is None:
                return contextlib.nullcontext(self.model)
            return steer(self.model, self.steerer, prompt_lengths=prompt_lengths, **self.steering)

        def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
            with self.steered():
                return super()._model_generate(*args, **kwargs)

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            """The harness's own does not tell the model where contexts end, and shares rows between contexts."""
            if self.backend != "causal":
                raise ValueError(f"the model is of the kind {self.backend!r}; only causal ones can be steered")
            # Requests that differ in the last token only have one forward (multiple choice).
            rows: dict[tuple[tuple[int, ...], int], list[int]] = {}
            for index, (_, context, continuation) in enumerate(requests):
                if not context or not 0 < len(continuation) <= self.max_length:
                    raise ValueError(
                        f"request {index} has {len(context)} tokens of context and {len(continuation)} of "
                        f"continuation; it needs at least one of each, and at most {self.max_length} of the latter"
                    )
                whole = [*context, *continuation][-(self.max_length + 1) :]
                rows.setdefault((tuple(whole[:-1]), len(whole) - len(continuation)), []).append(index)
            answers: dict[int, tuple[float, bool]] = {}
            given = override_bs or self.batch_size
            size = int(given) if str(given).isdigit() else _FIRST_BATCH
            waiting = sorted(rows, key=lambda row: -len(row[0]))
            for batch, logits in _batches(self, waiting, size, disable=disable_tqdm or self.rank != 0):
                for row, scores in zip(batch, logits, strict=True):
                    for index in rows[row]:
                        answers[index] = _answer(scores, requests[index][2])
                        if requests[index][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
            return [answers[index] for index in range(len(requests))]

        def get_model_info(self) -> dict[str, Any]:
            """What the harness writes beside its results, with what steers."""
            found = getattr(self.steerer, "method", None)
            return {**super().get_model_info(), "steering": {"method": found, **self.steering}}

    register_model(MODEL_NAME)(SteeredLM)
    return SteeredLM


def _batches(harness: Any, waiting: list[tuple[tuple[int, ...], int]], size: int, *, disable: bool) -> Any:
    """Batches of rows with the logits of each row's continuation; smaller ones where the memory ends."""
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]  # it ships no types

    from bodes_steer.model import answer_logits

    with tqdm(total=len(waiting), desc="loglikelihood", unit="row", disable=disable) as bar, torch.no_grad():
        while waiting:
            batch = waiting[:size]
            begins = [list(tokens[:count]) for tokens, count in batch]
            # The last token of a continuation is looked up, never run.
            ends = [[*tokens[count:], 0] for tokens, count in batch]
            try:
                with harness.steered([count for _, count in batch]):
                    logits = answer_logits(harness.model, begins, ends)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                size //= 2
                continue
            yield batch, logits
            waiting = waiting[size:]
            bar.update(len(batch))


def _answer(logits: Any, continuation: list[int]) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether it is the greedy one."""
    import torch

    targets = torch.tensor(continuation, device=logits.device)
    found = logits.log_softmax(-1).gather(1, targets[:, None])
    return float(found.sum(dtype=torch.float64)), bool((logits.argmax(-1) == targets).all())


def main() -> int:
    """Run the harness's command line with the model `bodes_steer` registered.

    Returns:
        0; 1 without the extra `lm-eval`. What the harness itself exits with comes as `SystemExit`.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the package's own command line
    try:
        register()
    except _ExtraMissingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-untyped]  # it ships no types

    cli_evaluate()
    return 0


def _hflm() -> type[Any]:
    try:
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]  # it ships no types
    except ModuleNotFoundError as error:
        # The harness installs without what its transformers models need.
        if error.name is None or error.name.partition(".")[0] not in ("lm_eval", "accelerate", "peft"):
            raise
        raise _ExtraMissingError(
            f"lm-evaluation-harness needs the extra 'lm-eval' ({error.name} is missing): "
            "pip install 'bodes-steer[lm-eval]'"
        ) from None
    found: type[Any] = HFLM
    return found


if __name__ == "__main__":
    sys.exit(main())
