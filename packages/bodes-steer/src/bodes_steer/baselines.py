# ruff: noqa: N803 -- T is the paper's letter and X is that of scikit-learn
"""The steering methods that the paper compares with, as steerers (its appendix on baselines)."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from bodes_steer.steerers import Steerer, warn_of_zero


class _ConstantSteerer(Steerer):
    """`a + T v` with one vector v for every activation.

    Attributes:
        vector_: `[d]`, v.
    """

    fitted: ClassVar[tuple[str, ...]] = ("vector_",)

    vector_: Tensor

    @property
    def constant_vector(self) -> Float[Tensor, "d"] | None:
        """The v with `steer(a, T) == a + T v` for every a."""
        self._check_fitted()
        return self.vector_

    def _velocity(self, x: Tensor) -> Tensor:
        return self.vector_.to(x.dtype).expand_as(x)

    def _flow(self, x: Tensor, T: float) -> Tensor:
        return torch.add(x, self.vector_.to(x.dtype), alpha=T)


class CAA(_ConstantSteerer):
    """Contrastive activation addition: `a + T (mean+ - mean-)` (Rimsky et al., 2024).

    Attributes:
        vector_: `[d]`, the difference of the means.
    """

    method: ClassVar[str] = "caa"

    def __init__(self, T: float = 1.0) -> None:
        """Prepare.

        Args:
            T: How many times the difference of the means is added.
        """
        super().__init__(T)

    def _fit(self, pos: Tensor, neg: Tensor) -> None:
        self.vector_ = (pos.double().mean(dim=0) - neg.double().mean(dim=0)).to(pos.dtype)
        warn_of_zero(self.vector_, self.method)
