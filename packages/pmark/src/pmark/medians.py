"""Estimates of the median of a proxy function from a sample of sentences."""

from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Float64

MedianMethod = Literal["hd", "sample", "kde", "prior"]


@lru_cache(maxsize=256)
def harrell_davis_weights(n: int) -> Float64[np.ndarray, "n"]:
    """Weights of the order statistics in the Harrell-Davis estimate of a median.

    Args:
        n: Sample size.

    Returns:
        I_{i/n}(a, a) - I_{(i-1)/n}(a, a) for i = 1..n with a = (n+1)/2; read-only.

    Raises:
        ValueError: `n` below 1.
    """
    if n < 1:
        raise ValueError(f"n={n}; a sample has at least one value")
    from scipy.special import betainc  # type: ignore[import-untyped]  # scipy ships no types

    weights: Float64[np.ndarray, "n"] = np.diff(betainc((n + 1) / 2, (n + 1) / 2, np.arange(n + 1) / n))
    weights.setflags(write=False)
    return weights


def median(values: Float[np.ndarray, "*batch n"], method: MedianMethod = "hd") -> Float64[np.ndarray, "*batch"]:
    """Estimate the median along the last axis.

    Args:
        values: Samples of n values each.
        method: "hd" (Harrell-Davis, the default), "sample" (middle value, or midpoint of the middle two), "kde" (where
            the distribution function of a Gaussian kernel estimate with Scott's bandwidth is one half; found by
            bisection where the authors search a grid of 10,000 points), or "prior" (0: directions in a high dimension
            have proxies centred near 0).

    Returns:
        The medians.

    Raises:
        ValueError: Empty samples, or an unknown method.
    """
    if method not in get_args(MedianMethod):
        raise ValueError(f"method={method!r}; it must be one of {', '.join(get_args(MedianMethod))}")
    values = np.asarray(values, dtype=np.float64)
    if values.shape[-1] < 1:
        raise ValueError("values has no value to take a median of")
    if method == "prior":
        return np.zeros(values.shape[:-1])
    if method == "sample":
        return np.asarray(np.median(values, axis=-1))
    if method == "kde":
        return _kernel_median(values)
    return np.asarray(np.sort(values, axis=-1) @ harrell_davis_weights(values.shape[-1]))


def _kernel_median(values: Float64[np.ndarray, "*batch n"]) -> Float64[np.ndarray, "*batch"]:
    from scipy.special import ndtr

    n = values.shape[-1]
    low, high = values.min(-1), values.max(-1)
    width = (values.std(-1, ddof=1) if n > 1 else np.zeros(low.shape)) * n**-0.2
    # Where all values are equal any positive width gives them back.
    width = np.where(width > 0, width, 1.0)[..., None]
    # At the least value no kernel has more than half of its mass below, at the greatest none less.
    for _ in range(60):
        middle = (low + high) / 2
        below = ndtr((middle[..., None] - values) / width).mean(-1) < 0.5
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.asarray((low + high) / 2)
