"""The suites for models pass a right implementation and fail wrong ones, each in the test that is meant to notice."""

import contextlib

import torch
from separata_testing.models import tiny_model
from separata_testing.suites import BatchConsistency, ModelUnchangedAfterExit
from separata_testing.suites.model import model_state, state_differences


class Edit:
    # Scales the output projection of every attention by a hook.
    exit_on_error = True

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        projections = [layer.self_attn.o_proj for layer in self.model.model.layers]
        self.handles = [part.register_forward_hook(lambda *given: 2 * given[2]) for part in projections]

    def __exit__(self, kind, *_):
        if kind is None or self.exit_on_error:
            for handle in self.handles:
                handle.remove()


class ForgetsErrors(ModelUnchangedAfterExit):
    def context(self, model):
        edit = Edit(model)
        edit.exit_on_error = False
        return edit


class DoesNothing(ModelUnchangedAfterExit):
    def context(self, model):
        return contextlib.nullcontext()


class Rounds(ModelUnchangedAfterExit):
    @contextlib.contextmanager
    def context(self, model):
        weight = model.lm_head.weight
        with torch.no_grad():
            weight.mul_(3)
            try:
                yield
            finally:
                weight.div_(3)


class Swallows(ModelUnchangedAfterExit):
    @contextlib.contextmanager
    def context(self, model):
        edit = Edit(model)
        edit.__enter__()
        try:
            with contextlib.suppress(Exception):
                yield
        finally:
            edit.__exit__(None)


class LeavesForward(ModelUnchangedAfterExit):
    @contextlib.contextmanager
    def context(self, model):
        head = model.lm_head
        original = head.forward
        head.forward = lambda x: 2 * original(x)
        try:
            yield
        finally:
            head.forward = original  # the same function, but now an attribute of the instance


class Draws(ModelUnchangedAfterExit):
    @contextlib.contextmanager
    def context(self, model):
        edit = Edit(model)
        torch.rand(1)
        edit.__enter__()
        try:
            yield
        finally:
            edit.__exit__(None)


class WearsOff(ModelUnchangedAfterExit):
    @contextlib.contextmanager
    def context(self, model):
        used = getattr(self, "used", 0)
        self.used = used + 1
        edit = Edit(model)
        if not used:
            edit.__enter__()
        try:
            yield
        finally:
            if not used:
                edit.__exit__(None)


class Configuration(ModelUnchangedAfterExit):
    @contextlib.contextmanager
    def context(self, model):
        edit = Edit(model)
        edit.__enter__()
        model.config._attn_implementation = "eager"
        try:
            yield
        finally:
            edit.__exit__(None)


class TestRunning(BatchConsistency):
    # A running sum over the tokens, with its state as the cache; no model at all.
    def model(self):
        return None

    def new_cache(self, model):
        return {"sum": 0, "count": 0}

    def values(self, model, input_ids, attention_mask, cache):
        new = input_ids.shape[1]
        kept = (input_ids * attention_mask[:, -new:]).double()
        past = cache["sum"] if cache else torch.zeros(len(input_ids), 1, dtype=torch.float64)
        sums = past + kept.cumsum(1)
        if cache is not None:
            cache["sum"] = sums[:, -1:]
            cache["count"] += new
        return sums


class CountsPadding(TestRunning):
    def values(self, model, input_ids, attention_mask, cache):
        return super().values(model, input_ids + 1, torch.ones_like(attention_mask), cache)


class ForgetsThePast(TestRunning):
    def values(self, model, input_ids, attention_mask, cache):
        return super().values(model, input_ids, attention_mask, None)


class MixesRows(TestRunning):
    def values(self, model, input_ids, attention_mask, cache):
        sums = super().values(model, input_ids, attention_mask, cache)
        return sums - sums.mean(0)


class Constant(TestRunning):
    def values(self, model, input_ids, attention_mask, cache):
        return torch.ones(input_ids.shape)


class Uncached(ForgetsThePast):
    supports_cache = False


class TestHooksThatComeOff(ModelUnchangedAfterExit):
    def context(self, model):
        return Edit(model)


class TestGroupedAttention(BatchConsistency):
    pass


class TestSlidingWindow(BatchConsistency):
    def model(self):
        return tiny_model("gemma3", dtype=torch.float64)


class TestFusedProjection(BatchConsistency):
    def model(self):
        return tiny_model("gpt_neox", dtype=torch.float64)


class TestLearnedPositions(BatchConsistency):
    def model(self):
        return tiny_model("gpt2", dtype=torch.float64)


def test_model_unchanged_after_exit_notices(failing):
    assert failing(ForgetsErrors) == {
        "test_unchanged_after_an_exception",
        "test_unchanged_after_an_exception_inside_the_model",
    }
    assert failing(DoesNothing) == {"test_output_differs_inside"}
    assert "test_unchanged_after_exit" in failing(Rounds)
    assert "test_unchanged_after_an_exception" in failing(Swallows)
    assert "test_unchanged_after_exit" in failing(LeavesForward)
    assert failing(Draws) == {"test_random_state_is_left_alone"}
    assert failing(WearsOff) == {"test_same_effect_when_entered_again"}
    assert "test_unchanged_after_exit_without_use" in failing(Configuration)


def test_batch_consistency_notices(failing):
    assert failing(CountsPadding) == {
        "test_padded_equals_unpadded[0-left]",
        "test_padded_equals_unpadded[3-left]",
        "test_cached_with_left_padding_equals_unpadded[(7, 6)]",
        "test_cached_with_left_padding_equals_unpadded[(9, 1, 1, 1, 1)]",
    }
    assert {name.partition("[")[0] for name in failing(ForgetsThePast)} == {
        "test_cached_equals_uncached",
        "test_cached_with_left_padding_equals_unpadded",
    }
    assert "test_batch_equals_single" in failing(MixesRows)
    assert failing(Constant) == {"test_values_depend_on_the_tokens"}
    assert failing(Uncached) == set()


def test_model_state_sees_tensors_and_gradients():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    before = model_state(module)
    assert state_differences(before, model_state(module)) == []

    module[0].weight.grad = torch.zeros(2, 2)
    module[0].bias.requires_grad_(False)
    module[1].running_mean.fill_(-0.0)  # equal to 0.0, and still another value
    module[1].eval()
    module[0].extra = 1
    assert state_differences(before, model_state(module)) == [
        "0.extra is new",
        "1.training has changed",
        "0.weight: gradient has changed",
        "0.bias: requires_grad has changed",
        "1.running_mean: values has changed",
    ]
