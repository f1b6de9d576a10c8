"""What is refused at the door: activations of the wrong shape or type, or with values that are not finite."""

import warnings
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

Rows: TypeAlias = Any
"""Activations as users have them: a tensor, an array, a table or a nested list, of shape `[rows, d]`."""

LARGEST_RATIO = 20
"""More rows of one class than this for each of the other are worth a warning."""


def as_rows(
    X: Rows,  # noqa: N803  # scikit-learn's letter
    name: str,
    *,
    dtype: torch.dtype | None = None,
    width: int | None = None,
) -> Float[Tensor, "rows d"]:
    """Activations as a tensor of finite floating-point numbers.

    Float32 and float64 stay as they are, float16 and bfloat16 become float32. Integers of an array or a list become
    float64; a tensor of integers is refused, because those are token ids more often than activations.

    Args:
        X: Activations `[rows, d]`, at least one row.
        name: What messages call it.
        dtype: Type of the result, instead of the above.
        width: What d must be.

    Returns:
        `[rows, d]`, on the device of `X`, detached from any graph; it shares memory where it can.

    Raises:
        TypeError: `X` holds no real numbers, or is sparse.
        ValueError: It has another shape, no row or no column, or values that are NaN or infinite.
    """
    rows = _tensor(X, name)
    if rows.ndim != 2:
        hint = ". Reshape your data: a single row with .reshape(1, -1)" if rows.ndim < 2 else ""
        raise ValueError(f"{name} has shape {list(rows.shape)}; it must be [rows, d]{hint}")
    if not rows.shape[0]:
        raise ValueError(f"{name} has shape {list(rows.shape)}: 0 rows where at least one is needed")
    if not rows.shape[1]:
        raise ValueError(f"{name} has 0 feature(s) (shape={tuple(rows.shape)}) while a minimum of 1 is required.")
    if width is not None and rows.shape[1] != width:
        raise ValueError(f"{name} has {rows.shape[1]} values in a row; it must have {width}, as what was fitted")
    if rows.dtype not in (torch.float32, torch.float64):
        rows = rows.to(torch.float32)
    _refuse_not_finite(rows, name, "")
    if dtype is not None and rows.dtype != dtype:
        rows = rows.to(dtype)
        _refuse_not_finite(rows, name, f" as {dtype}")
    return rows


def _tensor(X: Rows, name: str) -> Tensor:  # noqa: N803  # scikit-learn's letter
    if isinstance(X, Tensor):
        if X.layout != torch.strided:
            raise TypeError(f"{name} is a sparse tensor; it must be dense")
        if not X.is_floating_point():
            raise TypeError(f"{name} is a tensor of {X.dtype}; activations are floating-point numbers")
        return X.detach()
    if hasattr(X, "toarray"):
        raise TypeError(f"{name} is a sparse matrix; dense data is required, use .toarray()")
    array: npt.NDArray[Any] = np.asarray(X)
    if array.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: {name} is an array of {array.dtype}")
    if array.dtype.kind in "OUS":
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} holds something that is no number: {error}") from error
    if array.dtype.kind in "iub":
        array = array.astype(np.float64)
    if array.dtype.kind != "f":
        raise TypeError(f"{name} is an array of {array.dtype}; activations are floating-point numbers")
    if array.dtype.itemsize > 8 or not array.dtype.isnative:
        array = array.astype(np.float64)
    # Torch shares memory of neither read-only arrays nor those with negative strides.
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def _refuse_not_finite(rows: Tensor, name: str, form: str) -> None:
    finite = rows.isfinite()
    if not bool(finite.all()):
        values, bad_rows = int((~finite).sum()), int((~finite).any(dim=1).sum())
        raise ValueError(
            f"{name}{form} holds {values} values that are NaN or inf, in {bad_rows} of {len(rows)} rows; "
            "activations must be finite"
        )


def check_classes(pos: Rows, neg: Rows) -> tuple[Float[Tensor, "rows_pos d"], Float[Tensor, "rows_neg d"]]:
    """Activations of the two classes, fit to be compared.

    Args:
        pos: Activations of the wanted class, `[rows, d]`.
        neg: Activations of the other, `[rows, d]`.

    Returns:
        Both as `as_rows` makes them, in the wider of their two types.

    Raises:
        TypeError: As `as_rows`.
        ValueError: As `as_rows`, or they have different d or lie on different devices.

    Warns:
        UserWarning: One class has more than 20 rows for each of the other's, or all activations are equal.
    """
    positive, negative = as_rows(pos, "pos"), as_rows(neg, "neg")
    if positive.shape[1] != negative.shape[1]:
        raise ValueError(
            f"pos has {positive.shape[1]} values in a row and neg {negative.shape[1]}; they must be of one layer"
        )
    if positive.device != negative.device:
        raise ValueError(f"pos is on {positive.device} and neg on {negative.device}; they must be on one device")
    dtype = torch.promote_types(positive.dtype, negative.dtype)
    positive, negative = positive.to(dtype), negative.to(dtype)
    equal = bool((positive == positive[0]).all()) and bool((negative == positive[0]).all())
    warn_about_classes(len(positive), len(negative), equal, stacklevel=3)
    return positive, negative


def warn_about_classes(positive: int, negative: int, equal: bool, *, stacklevel: int = 2) -> None:
    """Warns of classes from which little can be learnt.

    Args:
        positive: Rows of the wanted class.
        negative: Rows of the other.
        equal: Whether all rows of both are the same.
        stacklevel: As in `warnings.warn`, counted from the caller.

    Warns:
        UserWarning: One class has more than 20 rows for each of the other's, or all rows are equal.
    """
    few, many = sorted((positive, negative))
    if many > LARGEST_RATIO * few:
        warnings.warn(
            f"there are {positive} positive and {negative} negative activations, more than {LARGEST_RATIO} to 1; the "
            "prior correction allows for it, but the smaller class says little",
            stacklevel=stacklevel + 1,
        )
    if equal:
        warnings.warn(
            "all activations of both classes are equal: no direction leads from one to the other",
            stacklevel=stacklevel + 1,
        )


def as_given(result: Tensor, given: object) -> Tensor | npt.NDArray[Any]:
    """A result in the form of what it was made from.

    Args:
        result: Any tensor.
        given: What the user passed.

    Returns:
        The tensor where `given` is one, else a numpy array.
    """
    return result if isinstance(given, Tensor) else result.detach().cpu().numpy()
