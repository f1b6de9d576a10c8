import numpy as np
import pytest
import torch
from bodes_steer.checks import as_given, as_rows, check_classes


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_the_type_is_at_least_float32(dtype, expected):
    given = torch.tensor([[1.5, -2.0], [0.25, 0.0]], dtype=dtype)
    rows = as_rows(given, "a")
    assert rows.dtype == expected
    assert torch.equal(rows, given.to(expected))
    assert as_rows(given, "a", dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("given", [[[1, 2], [3, 4]], np.array([[1, 2], [3, 4]]), np.array([["1", "2"], ["3", "4"]])])
def test_numbers_of_arrays_and_lists_become_float64(given):
    assert torch.equal(as_rows(given, "a"), torch.tensor([[1, 2], [3, 4]], dtype=torch.float64))


def test_arrays_that_torch_cannot_share_are_copied():
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    assert as_rows(array, "a").tolist() == array.tolist()
    assert as_rows(array[:, ::-1], "a").tolist() == array[:, ::-1].tolist()
    assert as_rows(array.astype(">f4"), "a").tolist() == array.tolist()
    assert not as_rows(torch.ones(1, 2, requires_grad=True), "a").requires_grad


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.ones(2, 2, dtype=torch.int64), TypeError, "a is a tensor of torch.int64"),
        (torch.ones(2, 2).to_sparse(), TypeError, "sparse"),
        (np.ones((2, 2), dtype=complex), ValueError, "Complex data not supported"),
        ([["x", "y"]], ValueError, "no number"),
        (np.array([["2020-01-01"]], dtype="datetime64[D]"), TypeError, "datetime64"),
        (torch.ones(3), ValueError, r"a has shape \[3\].*reshape"),
        (torch.ones(1, 2, 3), ValueError, r"a has shape \[1, 2, 3\]; it must be \[rows, d\]$"),
        (torch.ones(0, 3), ValueError, "0 rows"),
        (torch.ones(3, 0), ValueError, r"0 feature\(s\)"),
        (torch.ones(3, 4), ValueError, "a has 4 values in a row; it must have 5"),
    ],
)
def test_what_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        as_rows(given, "a", width=5)


def test_values_that_are_not_finite_are_counted():
    bad = torch.zeros(5, 4)
    bad[1, 0], bad[1, 3], bad[4, 2] = torch.nan, torch.inf, -torch.inf
    with pytest.raises(ValueError, match="pos holds 3 values that are NaN or inf, in 2 of 5 rows"):
        as_rows(bad, "pos")
    with pytest.raises(ValueError, match=r"pos as torch.float32 holds 1 values that are NaN or inf, in 1 of 1 rows"):
        as_rows(np.array([[1e300, 1.0]]), "pos", dtype=torch.float32)


def test_classes_come_back_in_the_wider_type():
    positive, negative = check_classes(torch.ones(2, 3), np.zeros((4, 3)))
    assert positive.dtype == negative.dtype == torch.float64
    assert (positive.shape, negative.shape) == ((2, 3), (4, 3))


def test_classes_that_cannot_be_compared():
    with pytest.raises(ValueError, match="pos has 3 values in a row and neg 4"):
        check_classes(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"neg has shape .*0 rows"):
        check_classes(torch.ones(2, 3), torch.ones(0, 3))
    with pytest.raises(ValueError, match=r"pos has shape .*0 rows"):
        check_classes(torch.ones(0, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match="neg holds 6 values"):
        check_classes(torch.ones(2, 3), torch.full((2, 3), torch.nan))


def test_classes_that_say_little_are_warned_of(recwarn):
    check_classes(torch.eye(20, 3), torch.ones(1, 3))
    assert not recwarn.list
    with pytest.warns(UserWarning, match="21 positive and 1 negative"):
        check_classes(torch.eye(21, 3), torch.ones(1, 3))
    with pytest.warns(UserWarning, match="all activations of both classes are equal"):
        check_classes(torch.ones(2, 3), torch.ones(3, 3))


def test_arrays_come_back_as_arrays_and_tensors_as_tensors():
    array = np.array([[1.5, -2.0], [0.25, 1e6]])
    rows = as_rows(array, "a")
    back = as_given(rows, array)
    assert isinstance(back, np.ndarray)
    assert np.array_equal(back, array)
    assert as_given(rows, rows) is rows
    assert isinstance(as_given(rows, array.tolist()), np.ndarray)
