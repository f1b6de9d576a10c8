"""Poisoned buffers, memory layouts, blocked imports, tiny models."""

import sys

import pytest
import torch
from hypothesis import given
from separata_testing.imports import blocked_imports
from separata_testing.models import ARCHITECTURES, LAYERS, VOCABULARY, tiny_model, tiny_tokenizer
from separata_testing.poison import Guarded, poison_, poisoned_buffers
from separata_testing.tensors import LAYOUTS, ODD_SIZES, odd_shapes, with_layout


def cumulative(x, forget=()):
    """A running sum written into a fresh buffer; `forget` are the elements that it does not write."""
    out = torch.empty_like(x)
    total = torch.zeros((), dtype=x.dtype)
    for index in range(len(x)):
        total = total + x[index]
        if index not in forget:
            out[index] = total
    return out


def test_poison_shows_an_element_that_nobody_wrote(poison):
    x = torch.arange(1.0, 6.0)
    assert torch.equal(cumulative(x), torch.tensor([1.0, 3.0, 6.0, 10.0, 15.0]))
    found = cumulative(x, forget=(3,))
    assert found.isnan().tolist() == [False, False, False, True, False]
    assert found.sum().isnan()
    assert cumulative(torch.arange(3), forget=(0,))[0] == torch.iinfo(torch.int64).max


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty(5, 3),
        torch.empty_like,
        lambda x: x.new_empty(4),
        lambda x: torch.empty_strided((3, 3), (3, 1)),
        lambda x: x.new_empty_strided((2, 2), (2, 1)),
        lambda x: torch.empty_permuted((2, 3), (1, 0)),
        lambda x: torch.empty(0).resize_(7),
        lambda x: torch.empty(3, dtype=torch.bfloat16),
        lambda x: torch.empty(3, dtype=torch.float16),
        lambda x: torch.empty(3, dtype=torch.float64),
        lambda x: torch.empty(3, dtype=torch.complex64),
        lambda x: torch.Tensor(3),
    ],
)
def test_every_way_to_a_fresh_buffer_gives_nan(poison, make):
    assert make(torch.ones(2, 3)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_fresh_integers_are_large_and_odd(poison, dtype):
    assert (torch.empty(3, dtype=dtype) == torch.iinfo(dtype).max).all()
    assert poison_(torch.zeros(2, dtype=dtype)).tolist() == [torch.iinfo(dtype).max] * 2


def test_poison_on_booleans_and_floats():
    assert poison_(torch.zeros(2, dtype=torch.bool)).all()
    assert poison_(torch.zeros(2)).isnan().all()


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize(("enabled", "warn_only"), [(False, False), (True, False), (True, True)])
def test_poison_leaves_settings_as_they_were(fail, enabled, warn_only):
    from torch.utils import deterministic

    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    deterministic.fill_uninitialized_memory = False
    try:
        with pytest.raises(ZeroDivisionError if fail else StopIteration), poisoned_buffers():  # noqa: PT012  # either way out
            assert torch.empty(2).isnan().all()
            raise ZeroDivisionError if fail else StopIteration
        assert torch.are_deterministic_algorithms_enabled() == enabled
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
        assert not deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = True


def test_poison_does_not_disturb_real_computing(poison):
    """A model that allocates buffers everywhere gives what it gives without poison."""
    tokens = torch.randint(4, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    model = tiny_model("gemma2", dtype=torch.float64)
    poisoned = model(input_ids=tokens).logits
    torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(poisoned, model(input_ids=tokens).logits, rtol=1e-12, atol=1e-12)


def test_guarded_tensor_shows_reads_and_writes_beside_it():
    guarded = Guarded(torch.arange(6.0).view(2, 3), margin=4)
    assert torch.equal(guarded.tensor, torch.arange(6.0).view(2, 3))
    assert guarded.tensor.is_contiguous()
    guarded.tensor.add_(1)
    guarded.assert_margins_untouched()
    after = guarded.tensor.as_strided((7,), (1,), guarded.tensor.storage_offset())
    assert after[6].isnan()
    after[6] = 0.0
    with pytest.raises(AssertionError, match="written after the tensor"):
        guarded.assert_margins_untouched()

    guarded = Guarded(torch.arange(3), margin=1)
    guarded.tensor.as_strided((1,), (1,), 0).zero_()
    with pytest.raises(AssertionError, match="written before the tensor"):
        guarded.assert_margins_untouched()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 3, 4), (0, 3)])
def test_layouts_hold_equal_values(layout, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    laid = with_layout(x, layout)
    assert torch.equal(laid, x)
    if x.numel():
        assert laid.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    if x.ndim > 1 and x.numel():
        assert laid.is_contiguous() == (layout in ("contiguous", "offset"))
    if layout == "offset":
        assert laid.storage_offset() == 1


def test_layout_refuses_unknown_names():
    with pytest.raises(ValueError, match=r"layout is 'diagonal'; it must be one of contiguous, transposed"):
        with_layout(torch.ones(2), "diagonal")


@given(odd_shapes(3, largest=33, elements=500, empty=True))
def test_odd_shapes_keep_their_bounds(shape):
    assert len(shape) == 3
    assert all(size == 0 or (size in ODD_SIZES and size <= 33) for size in shape)
    assert shape[0] * shape[1] * shape[2] <= 500


def test_generator_is_seeded(generator):
    assert torch.equal(
        torch.rand(3, generator=generator), torch.rand(3, generator=torch.Generator().manual_seed(20260430))
    )


def test_blocked_imports(block_imports):
    import json

    block_imports("json", "xml.dom")
    with pytest.raises(ModuleNotFoundError, match="'json'") as caught:
        import json.decoder
    assert caught.value.name == "json"
    with pytest.raises(ImportError):
        import xml.dom.minidom
    import xml.sax  # beside what is blocked

    assert xml.sax
    assert json.loads("1") == 1  # who holds the module already is not disturbed


def test_blocked_imports_come_back_the_same():
    import colorsys

    with blocked_imports("colorsys"):
        assert "colorsys" not in sys.modules
        with pytest.raises(ImportError):
            import colorsys
    import colorsys as again

    assert again is colorsys


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_models(tiny_models, architecture):
    tokens = torch.randint(4, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    model = tiny_models(architecture, attn_implementation="eager")
    with torch.no_grad():
        output = model(input_ids=tokens, output_attentions=True)
    assert output.logits.shape == (2, 12, VOCABULARY)
    assert output.logits.isfinite().all()
    assert output.logits.dtype == torch.float32
    assert len(output.attentions) == LAYERS
    # Far from uniform: twelve keys would have 0.08 each, eight in a window 0.125.
    assert all(weights[:, :, -1].amax(-1).mean() > 0.17 for weights in output.attentions)
    assert not model.training
    assert all(
        (parameter != 1).all() and (parameter != 0).any() for parameter in model.parameters() if parameter.ndim == 1
    )


def test_tiny_model_is_everyones_own_and_alike():
    first, second, other = tiny_model(), tiny_model(), tiny_model(seed=1)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    with torch.no_grad():
        first.lm_head.weight.zero_()
    assert not torch.equal(tiny_model().lm_head.weight, first.lm_head.weight)


def test_tiny_model_in_float64_and_with_other_sizes():
    model = tiny_model(dtype=torch.float64, num_hidden_layers=1, num_key_value_heads=1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert len(model.model.layers) == 1
    before = torch.random.get_rng_state()
    tiny_model("gpt2", seed=5)
    assert torch.equal(before, torch.random.get_rng_state())


def test_tiny_model_refuses_unknown_architectures():
    with pytest.raises(ValueError, match="architecture is 'lama'; it must be one of llama"):
        tiny_model("lama")


def test_tiny_tokenizer(tiny_tokenizer):
    encoded = tiny_tokenizer(["héllo\n wörld", ""], padding=True, return_tensors="pt")
    assert encoded.input_ids[0, 0] == encoded.input_ids[1, 0] == tiny_tokenizer.bos_token_id == 1
    assert encoded.attention_mask.sum(1).tolist() == [1 + 14, 1]
    assert tiny_tokenizer.decode(encoded.input_ids[0], skip_special_tokens=True) == "héllo\n wörld"
    assert len(tiny_tokenizer) < VOCABULARY
    said = tiny_tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert said == "user: hi\nassistant: "


def test_tiny_tokenizer_is_everyones_own():
    tiny_tokenizer().add_tokens(["more"])
    assert len(tiny_tokenizer()) == 260
