"""A re-weighted model in lm-evaluation-harness.

A model under a configuration is an ordinary transformers model, so `HFLM(pretrained=model, tokenizer=tokenizer)` inside
a `with apply(model, config):` block is enough. `harness_model` is that in one line. From the command line

    python -m zerotuning.lm_eval --model zerotuning --model_args pretrained=FOLDER,config=sst2.json --tasks ...

is the harness's own `lm_eval` with one more model. (`lm_eval` alone cannot find it: the harness looks for models in its
own list only, without entry points.)
"""

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from zerotuning.config import ZeroTuningConfig

MODEL_NAME = (__package__ or "zerotuning").replace(".", "_")
"""The model's name in the harness's registry; a vendored copy beside an installed original has another one."""


class _ExtraMissingError(ImportError):
    """The extra is not there, as opposed to what goes wrong inside of it."""


def harness_model(model: "nn.Module", tokenizer: Any, config: "ZeroTuningConfig", **hflm_arguments: Any) -> Any:
    """Hand a model to the harness, with a configuration attached.

    Args:
        model: A decoder-only transformers model. The configuration stays on it until `zerotuning.detach(model)`.
        tokenizer: Its tokenizer; the harness gives it a padding token if it has none.
        config: The configuration.
        hflm_arguments: Further arguments of the harness's `HFLM`, such as `batch_size=16`.

    Returns:
        An `lm_eval.models.huggingface.HFLM`, for `lm_eval.simple_evaluate(model=...)`.

    Raises:
        ValueError: The configuration is for another model, or the model's attention cannot be wrapped.
        RuntimeError: A configuration is already attached.
        ImportError: The extra `lm-eval` is not installed.
    """
    hflm = _hflm()
    from zerotuning.adapter import attach, detach

    attach(model, config)
    try:
        return hflm(pretrained=model, tokenizer=tokenizer, **hflm_arguments)
    except BaseException:
        detach(model)
        raise


@functools.cache
def register() -> type[Any]:
    """Add the model `zerotuning` to the harness's registry, once.

    It takes the arguments of the harness's own `hf` and `config`, the file of a configuration; without it the model is
    untouched.

    Returns:
        Its class, which `lm_eval.api.registry.get_model("zerotuning")` now finds.

    Raises:
        ImportError: The extra `lm-eval` is not installed.
    """
    hflm = _hflm()
    from lm_eval.api.registry import register_model  # type: ignore[import-untyped]  # it ships no types

    class ZeroTuningLM(hflm):  # type: ignore[misc, valid-type]  # a class of a library that is imported when used
        """The harness's `hf` under a configuration."""

        def __init__(self, pretrained: Any, config: str | os.PathLike[str] | None = None, **hflm_arguments: Any):
            """Load the model and attach the configuration.

            Args:
                pretrained: Folder or name of a model, or a model.
                config: File of the configuration; none for the untouched model.
                hflm_arguments: As `hf` takes them.
            """
            from zerotuning.adapter import attach
            from zerotuning.config import ZeroTuningConfig

            # Before the model, so that a mistake in the file is told at once.
            self.zerotuning_config = None if config is None else ZeroTuningConfig.load(config)
            super().__init__(pretrained=pretrained, **hflm_arguments)
            if self.zerotuning_config is not None:
                attach(self.model, self.zerotuning_config)

        def get_model_info(self) -> dict[str, Any]:
            """What the harness writes beside its results, with the configuration's fingerprint."""
            found = self.zerotuning_config
            return {**super().get_model_info(), "zerotuning_fingerprint": None if found is None else found.fingerprint}

    register_model(MODEL_NAME)(ZeroTuningLM)
    return ZeroTuningLM


def main() -> int:
    """Run the harness's command line with the model `zerotuning` registered.

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
            "pip install 'zerotuning[lm-eval]'"
        ) from None
    found: type[Any] = HFLM
    return found


if __name__ == "__main__":
    sys.exit(main())
