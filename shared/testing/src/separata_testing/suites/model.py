# ruff: noqa: D102  # the tests of a suite say by their names what they check
"""A model is bit-identical after a context that edits it has exited, also by an exception."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

# What torch keeps on a module itself, and what is compared apart from it.
_TENSOR_FIELDS = {"_parameters", "_buffers", "_modules"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class _InterruptionError(Exception):
    """Raised by the suite inside the context; no code under test knows it."""


class _Identity:
    """Equal only to itself around the same object, which it keeps alive so that no other gets its address."""

    __hash__ = None  # type: ignore[assignment]  # never a key

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value


def model_state(model: Any) -> dict[str, Any]:
    """Describes everything about a model that an edit could leave changed.

    Parameters and buffers with their values, gradients and identities, hooks, classes and instance attributes of all
    modules (a replaced `forward` is one), and the configuration.

    Args:
        model: A torch module; a transformers model brings its configuration.

    Returns:
        What has been found, by name, to be given to `state_differences`.
    """
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        state[f"{path}: class"] = type(module)
        for name, value in vars(module).items():
            if name in _TENSOR_FIELDS:
                continue
            if name.endswith("_hooks"):
                state[f"{path}: {name}"] = [_Identity(hook) for hook in value.values()]
            else:
                state[f"{path}.{name}"] = value if isinstance(value, _PLAIN) else _Identity(value)
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state[f"{path}: which tensor"] = _Identity(tensor)
        state[f"{path}: requires_grad"] = tensor.requires_grad
        state[f"{path}: values"] = tensor.detach().clone()
        state[f"{path}: gradient"] = None if tensor.grad is None else tensor.grad.clone()
    for name in ("config", "generation_config"):
        configuration = getattr(model, name, None)
        if configuration is not None:
            state[name] = configuration.to_dict()
            state[f"{name}: attention"] = getattr(configuration, "_attn_implementation", None)
    return state


def state_differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Compares two descriptions by `model_state`.

    Args:
        before: The older one.
        after: The newer one.

    Returns:
        A line for every difference; empty if there is none.
    """
    found = [f"{name} has gone" for name in before if name not in after]
    found += [f"{name} is new" for name in after if name not in before]
    found += [f"{name} has changed" for name in before if name in after and not _same(before[name], after[name])]
    return found


def _same(first: Any, second: Any) -> bool:
    import torch

    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        # Bits, not values: NaN equals itself, -0.0 is not 0.0.
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and torch.equal(
                first.contiguous().reshape(-1).view(torch.uint8), second.contiguous().reshape(-1).view(torch.uint8)
            )
        )
    return type(first) is type(second) and bool(first == second)


class ModelUnchangedAfterExit:
    """Tests for a context manager that edits a model.

    Attributes:
        has_effect: Whether the output inside the context differs from the output outside.
    """

    has_effect = True

    def model(self) -> Any:
        """Hook: a fresh model. By default the tiny Llama of `separata_testing.models`."""
        from separata_testing.models import tiny_model

        return tiny_model()

    def context(self, model: Any) -> AbstractContextManager[Any]:
        """Hook, required: the context manager under test, not yet entered."""
        raise NotImplementedError("context(model) must return the context manager under test")

    def output(self, model: Any) -> "Tensor":
        """Hook: what the model computes, the same for the same model. By default logits for fixed tokens."""
        import torch

        size = model.config.vocab_size
        tokens = torch.randint(4, size, (2, 9), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits

    def _assert_unchanged(self, model: Any, before: dict[str, Any], output: "Tensor") -> None:
        differences = state_differences(before, model_state(model))
        assert not differences, "after the context: " + "; ".join(differences)
        assert _same(output, self.output(model)), "after the context the model computes something else"

    def test_output_differs_inside(self) -> None:
        """Without this the other tests would hold for a context that does nothing."""
        model = self.model()
        outside = self.output(model)
        with self.context(model):
            inside = self.output(model)
        assert _same(outside, inside) != self.has_effect, f"has_effect is {self.has_effect}, the output says otherwise"

    def test_unchanged_after_exit(self) -> None:
        model = self.model()
        output, before = self.output(model), model_state(model)
        with self.context(model):
            self.output(model)
        self._assert_unchanged(model, before, output)

    def test_unchanged_after_exit_without_use(self) -> None:
        model = self.model()
        output, before = self.output(model), model_state(model)
        with self.context(model):
            pass
        self._assert_unchanged(model, before, output)

    def test_unchanged_after_an_exception(self) -> None:
        model = self.model()
        output, before = self.output(model), model_state(model)
        with pytest.raises(_InterruptionError), self.context(model):  # noqa: PT012  # where it is raised is the matter
            self.output(model)
            raise _InterruptionError
        self._assert_unchanged(model, before, output)

    def test_unchanged_after_an_exception_inside_the_model(self) -> None:
        model = self.model()
        output, before = self.output(model), model_state(model)

        def interrupt(*_: Any) -> None:
            raise _InterruptionError

        innermost = [module for module in model.modules() if not list(module.children())]
        # The last one: everything before it has run, and whatever the edit keeps between modules is in use.
        handle = innermost[-1].register_forward_hook(interrupt)
        try:
            with pytest.raises(_InterruptionError), self.context(model):
                self.output(model)
        finally:
            handle.remove()
        self._assert_unchanged(model, before, output)

    def test_same_effect_when_entered_again(self) -> None:
        model = self.model()
        outputs = []
        for _ in range(2):
            with self.context(model):
                outputs.append(self.output(model))
        assert _same(*outputs), "the second time the context does something else"

    def test_random_state_is_left_alone(self) -> None:
        import torch

        model = self.model()
        before = torch.random.get_rng_state()
        with self.context(model):
            pass
        assert torch.equal(before, torch.random.get_rng_state()), "the context draws from torch's global generator"
