"""Which positions are steered, against rules written out one position at a time."""

import pytest
import torch
from bodes_steer.positions import Call, Masked, OnePerRow, Prompt, Rest, check_positions, plain_mask, select
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")


def steered(call, positions="from_prompt_end", lengths=None):
    """The positions that a selection moves, as a mask [batch, query]."""
    rule, lengths = check_positions(positions, lengths)
    states = torch.zeros(call.batch, call.query, 3)
    moved = select(call, rule, lengths).apply(states, lambda rows: rows + 1)
    assert not states.any()
    return moved[:, :, 0] == 1


@st.composite
def padded(draw):
    """A batch [rows, columns], padded on one side in each row, and a call's columns in it."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    mask = torch.ones(rows, columns, dtype=torch.long)
    for row in range(rows):
        cut = draw(st.integers(0, columns - 1))
        side = draw(st.booleans())
        mask[row, :cut] = 1 - int(side)
        if not side and cut:
            mask[row, columns - cut :] = 0
    past = draw(st.integers(0, columns - 1))
    return mask, past


@given(padded(), st.integers(1, 4))
def test_prompt_lengths_count_real_tokens_whatever_the_padding_and_the_cache(batch, length):
    mask, past = batch
    query = mask.shape[1] - past
    found = steered(Call(len(mask), query, past, CPU, mask), lengths=length)
    for row in range(len(mask)):
        real = mask[row].nonzero()[:, 0].tolist()
        expected = {column for column in real[length - 1 :] if column >= past}
        assert {past + int(c) for c in found[row].nonzero()[:, 0]} == expected


@given(padded())
def test_a_plain_call_is_its_own_prompt_and_a_cache_has_the_prompt_behind(batch):
    mask, past = batch
    query = mask.shape[1] - past
    found = steered(Call(len(mask), query, past, CPU, mask))
    real = mask[:, past:] != 0
    for row in range(len(mask)):
        tokens = real[row].nonzero()[:, 0].tolist()
        assert found[row].nonzero()[:, 0].tolist() == (tokens if past else tokens[-1:])
    assert torch.equal(steered(Call(len(mask), query, past, CPU, mask), "all"), real)


@given(padded(), st.integers(1, 2), st.integers(0, 5))
def test_inside_generate_the_prompt_is_what_generate_was_given(batch, copies, new):
    mask, past = batch
    width = mask.shape[1]
    prompt = Prompt(width, mask != 0, CPU)
    past, query = past + new // 2, width - past + new
    call = Call(len(mask) * copies, query, past, CPU, None, prompt)
    found = steered(call)
    for row in range(len(found)):
        end = int(mask[row // copies].nonzero()[-1])
        expected = [past + i >= width or past + i == end for i in range(query)]
        assert found[row].tolist() == expected
        everything = [past + i >= width or bool(mask[row // copies, past + i]) for i in range(query)]
        assert steered(call, "all")[row].tolist() == everything


@given(st.integers(1, 6), st.integers(0, 8), st.integers(1, 6))
def test_without_padding_only_a_slice_is_taken(width, past, query):
    prompt = Prompt(width, torch.ones(2, width, dtype=torch.bool), CPU)
    selection = select(Call(2, query, past, CPU, None, prompt), "from_prompt_end", None)
    assert isinstance(selection, Rest)
    expected = [past + i >= width - 1 for i in range(query)]
    assert steered(Call(2, query, past, CPU, None, prompt))[1].tolist() == expected


def test_no_work_for_what_is_not_steered():
    def refuse(rows):
        raise AssertionError("nothing is to be steered")

    states = torch.randn(2, 3, 4)
    for selection in (Rest(3), Masked(torch.zeros(2, 3, dtype=torch.bool), False)):
        assert selection.apply(states, refuse) is states
    whole = Rest(0).apply(states, lambda rows: rows)
    assert whole.data_ptr() == states.data_ptr()
    moved = []
    OnePerRow(torch.ones(2, 3, dtype=torch.bool), False).apply(states, lambda rows: moved.append(len(rows)) or rows)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    Masked(mask, False).apply(states, lambda rows: moved.append(len(rows)) or rows)
    assert moved == [2, 3]


def test_last_is_the_last_token_of_the_call():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    assert steered(Call(3, 3, 0, CPU, mask), "last").int().tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert steered(Call(2, 3, 5, CPU), "last").int().tolist() == [[0, 0, 1]] * 2


@pytest.mark.parametrize("floating", [False, True])
def test_masks_of_four_dimensions_say_where_padding_is(floating):
    flat = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])
    causal = torch.ones(4, 4).tril().bool()
    full = (causal & (flat != 0)[:, None, :])[:, None]
    if floating:
        full = torch.zeros(full.shape).masked_fill(~full, torch.finfo(torch.float32).min)
    for past in (0, 2):
        call = Call(3, 4 - past, past, CPU, full[:, :, past:])
        assert torch.equal(steered(call, "all"), flat[:, past:] != 0)
    assert torch.equal(steered(Call(3, 4, 0, CPU, full), lengths=2), steered(Call(3, 4, 0, CPU, flat), lengths=2))
    # A window keeps the latest keys only; a static cache has room for more.
    assert steered(Call(3, 1, 9, CPU, full[:, :, 3:]), "all")[:, 0].tolist() == [True, True, False]
    wider = torch.nn.functional.pad(full, (0, 3), value=full.min().item())
    assert torch.equal(steered(Call(3, 4, 0, CPU, wider), "all"), flat != 0)
    with pytest.raises(ValueError, match="two-dimensional"):
        steered(Call(3, 2, 2, CPU, full[:, :, 2:]), lengths=2)


def test_given_masks_and_functions():
    mask = torch.tensor([[False, True, False, True]])
    real = torch.tensor([[1, 1, 1, 0]])
    assert steered(Call(1, 4, 0, CPU, real), mask).tolist() == [[False, True, False, False]]
    assert steered(Call(2, 2, 2, CPU), mask[0]).tolist() == [[False, True]] * 2
    with pytest.raises(ValueError, match=r"mask of 4 columns.*column 5"):
        steered(Call(1, 1, 4, CPU), mask)
    with pytest.raises(ValueError, match=r"3 rows.*2 given"):
        steered(Call(3, 4, 0, CPU), mask.expand(2, -1))
    with pytest.raises(ValueError, match=r"4 rows.*the same number of the 2 given"):  # there are no beams here
        steered(Call(4, 4, 0, CPU), mask.expand(2, -1))
    beams = torch.tensor([[True, False], [False, False]])
    assert steered(Call(4, 2, 0, CPU, None, Prompt(2, None, CPU)), beams)[:, 0].tolist() == [True, True, False, False]

    def second(call):
        return call.ordinals() == 1

    assert steered(Call(1, 4, 0, CPU, torch.tensor([[0, 1, 1, 1]])), second).tolist() == [[False, False, True, False]]
    prompt = Prompt(3, torch.tensor([[False, True, True]]), CPU)
    assert steered(Call(2, 3, 1, CPU, None, prompt), lambda c: c.ordinals() == 2)[0].tolist() == [False, False, True]
    for wrong in (lambda call: torch.ones(1, 4), lambda call: True):
        with pytest.raises(ValueError, match="must return a boolean tensor"):
            steered(Call(1, 4, 0, CPU), wrong)


@pytest.mark.parametrize(
    ("positions", "lengths", "message"),
    [
        ("end", None, "'from_prompt_end', 'last', 'all'"),
        (torch.ones(3), None, "boolean mask"),
        ("all", [3], "only positions='from_prompt_end'"),
        ("from_prompt_end", [], "whole number"),
        ("from_prompt_end", [0], "whole number"),
        ("from_prompt_end", [1.5], "whole number"),
        ("from_prompt_end", [[2]], "whole number"),
    ],
)
def test_what_is_no_rule(positions, lengths, message):
    with pytest.raises(ValueError, match=message):
        check_positions(positions, lengths)


def test_attention_masks_of_other_kinds():
    ready = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    assert plain_mask({"full_attention": None, "sliding_attention": ready}) is ready
    assert plain_mask({}) is None
    with pytest.raises(ValueError, match="two-dimensional"):
        plain_mask(object())
