# ruff: noqa: N803 -- T is the paper's letter and X is that of scikit-learn
"""The steering methods that the paper compares with, as steerers (its appendix on baselines)."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from bodes_steer.features import IdentityFeatures
from bodes_steer.solver import unit_speed
from bodes_steer.steerers import Steerer, fit_ratio, linear_part, prior_corrected, warn_of_zero


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


class RepE(_ConstantSteerer):
    """Representation engineering (Zou et al., 2023): `a + T v`, v the first principal component of paired differences.

    Row i of the positives is paired with row i of the negatives; rows without a partner are left out. The sign of a
    principal component is arbitrary: it is chosen so that v points from the negatives to the positives.

    Attributes:
        vector_: `[d]`, of length 1.
    """

    method: ClassVar[str] = "repe"

    def __init__(self, T: float = 5.0) -> None:
        """Prepare.

        Args:
            T: Length of the vector that is added.
        """
        super().__init__(T)

    def _fit(self, pos: Tensor, neg: Tensor) -> None:
        from sklearn.decomposition import PCA  # type: ignore[import-untyped]  # it ships no types

        pairs = min(len(pos), len(neg))
        differences = (pos[:pairs].double() - neg[:pairs].double()).cpu()
        centred = differences - differences.mean(dim=0)
        if bool(centred.any()):
            # For one component the iterative solver takes a small part of the time; it needs more than one dimension.
            small = min(centred.shape) <= 16
            pca = PCA(n_components=1, svd_solver="full" if small else "arpack", random_state=0).fit(centred.numpy())
            component = torch.from_numpy(pca.components_[0].copy())
        else:
            component = torch.zeros(pos.shape[1], dtype=torch.float64)
        if float(differences.mean(dim=0) @ component) < 0:
            component = -component
        self.vector_ = component.to(pos)
        warn_of_zero(self.vector_, self.method)


class ITI(_ConstantSteerer):
    """Inference-time intervention (Li et al., 2023) on the residual stream: `a + T v`, v the unit normal of a probe.

    The probe is logistic regression with C = 1 on raw activations. The original acts on the outputs of chosen attention
    heads; this is the version that the paper compares with.

    Attributes:
        vector_: `[d]`, of length 1.
        coef_: `[d]`, the weights of the probe.
        intercept_: `[]`.
        prior_: `[]`, the share of positives.
    """

    method: ClassVar[str] = "iti"
    fitted: ClassVar[tuple[str, ...]] = ("vector_", "coef_", "intercept_", "prior_")

    coef_: Tensor
    intercept_: Tensor
    prior_: Tensor

    def __init__(self, T: float = 5.0, C: float = 1.0) -> None:
        """Prepare.

        Args:
            T: Length of the vector that is added.
            C: Inverse strength of the probe's L2 penalty.
        """
        super().__init__(T)
        self.C = C

    def _fit(self, pos: Tensor, neg: Tensor) -> None:
        ratio = fit_ratio(pos, neg, IdentityFeatures(), "lr", self.C)
        self.coef_, self.intercept_, self.prior_ = linear_part(ratio, pos)
        self.vector_ = unit_speed(self.coef_)
        warn_of_zero(self.vector_, self.method)

    def _barrier(self, x: Tensor) -> Tensor:
        return x @ self.coef_.to(x.dtype) + prior_corrected(self.intercept_, self.prior_)


class LinAcT(Steerer):
    """Linear activation transport: the monotone affine map of each coordinate on its own (Rodriguez et al., 2025).

    Centred negatives s and positives t are sorted in each coordinate; `w = sum(t s) / (sum(s^2) + 1e-10)`,
    `b = mean(t) - w mean(s)`, and `a -> (1 - T) a + T (w a + b)`. The strength T is that of the original, which the
    paper leaves out. Where the classes differ in size, the larger is read at the quantiles of the smaller (ours).

    Attributes:
        scale_: `[d]`, w.
        shift_: `[d]`, b.
    """

    method: ClassVar[str] = "linact"
    fitted: ClassVar[tuple[str, ...]] = ("scale_", "shift_")

    scale_: Tensor
    shift_: Tensor

    def __init__(self, T: float = 1.0) -> None:
        """Prepare.

        Args:
            T: Share of the way, from 0 to 1.
        """
        super().__init__(T)

    def _fit(self, pos: Tensor, neg: Tensor) -> None:
        targets, sources = pos.double(), neg.double()
        target_mean, source_mean = targets.mean(dim=0), sources.mean(dim=0)
        count = min(len(targets), len(sources))
        t, s = _quantiles(targets - target_mean, count), _quantiles(sources - source_mean, count)
        scale = (t * s).sum(dim=0) / (s.square().sum(dim=0) + 1e-10)
        if bool((pos == neg[0]).all()) and bool((neg == neg[0]).all()):
            # Equal activations say nothing of others, which the quotient 0 would all move to the same place.
            scale = torch.ones_like(scale)
        self.scale_ = scale.to(pos.dtype)
        self.shift_ = (target_mean - scale * source_mean).to(pos.dtype)
        if torch.allclose(scale, torch.ones_like(scale)) and torch.allclose(target_mean, source_mean):
            warn_of_zero(torch.zeros_like(scale), self.method)

    def _velocity(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift_.to(x.dtype), x, self.scale_.to(x.dtype) - 1.0)

    def _flow(self, x: Tensor, T: float) -> Tensor:
        return torch.add(x, self._velocity(x), alpha=T)


def _quantiles(rows: Tensor, count: int) -> Tensor:
    """`[count, d]`: each column sorted and read at the middles of `count` equal shares."""
    ordered = rows.sort(dim=0).values
    if len(rows) == count:
        return ordered
    middles = torch.arange(count, dtype=torch.float64, device=rows.device) + 0.5
    places = (middles * (len(rows) / count) - 0.5).clamp(0, len(rows) - 1)
    below = places.floor().long()
    above = (below + 1).clamp(max=len(rows) - 1)
    return torch.lerp(ordered[below], ordered[above], (places - below).unsqueeze(-1))


class MiMiC(Steerer):
    """Optimal transport between two Gaussians, for what a probe calls negative (Singh et al., 2024).

    `mu+ + B (a - mu-)` with `B = S-^{-1/2} (S-^{1/2} S+ S-^{1/2})^{1/2} S-^{-1/2}` and `1e-2 I` added to both
    covariances. It has no strength: T = 0 leaves all rows as they are, and any other T applies the map.

    Attributes:
        map_: `[d, d]`, B, symmetric.
        positive_mean_: `[d]`, mu+.
        negative_mean_: `[d]`, mu-.
        coef_: `[d]`, the weights of the probe.
        intercept_: `[]`.
        prior_: `[]`, the share of positives.
    """

    method: ClassVar[str] = "mimic"
    fitted: ClassVar[tuple[str, ...]] = (
        *("map_", "positive_mean_", "negative_mean_"),
        *("coef_", "intercept_", "prior_"),
    )

    map_: Tensor
    positive_mean_: Tensor
    negative_mean_: Tensor
    coef_: Tensor
    intercept_: Tensor
    prior_: Tensor

    def __init__(self, T: float = 1.0, ridge: float = 1e-2, C: float = 1.0) -> None:
        """Prepare.

        Args:
            T: 0 or not.
            ridge: Added to the diagonals of both covariances.
            C: Inverse strength of the probe's L2 penalty.
        """
        super().__init__(T)
        self.ridge = ridge
        self.C = C

    def _fit(self, pos: Tensor, neg: Tensor) -> None:
        if not self.ridge >= 0:
            raise ValueError(f"ridge={self.ridge!r}; it must be 0 or above")
        ratio = fit_ratio(pos, neg, IdentityFeatures(), "lr", self.C)
        self.coef_, self.intercept_, self.prior_ = linear_part(ratio, pos)
        self.positive_mean_ = pos.double().mean(dim=0).to(pos.dtype)
        self.negative_mean_ = neg.double().mean(dim=0).to(pos.dtype)
        self.map_ = gaussian_map(_covariance(neg, self.ridge), _covariance(pos, self.ridge)).to(pos.dtype)

    def _width(self) -> int:
        width = super()._width()
        if tuple(self.map_.shape) != (width, width):
            raise ValueError(f"a map of shape {tuple(self.map_.shape)} does not fit means of width {width}")
        return width

    def _barrier(self, x: Tensor) -> Tensor:
        return x @ self.coef_.to(x.dtype) + prior_corrected(self.intercept_, self.prior_)

    def _mapped(self, x: Tensor) -> Tensor:
        target = self.positive_mean_.to(x.dtype) + (x - self.negative_mean_.to(x.dtype)) @ self.map_.to(x.dtype)
        # The probe's own decision, as in the method; the log ratio corrects it for the share of positives.
        negative = x @ self.coef_.to(x.dtype) + float(self.intercept_) < 0
        return torch.where(negative.unsqueeze(-1), target, x)

    def _velocity(self, x: Tensor) -> Tensor:
        return self._mapped(x) - x

    def _flow(self, x: Tensor, T: float) -> Tensor:
        return self._mapped(x)


def _covariance(rows: Tensor, ridge: float) -> Tensor:
    centred = rows.double() - rows.double().mean(dim=0)
    # As numpy and scikit-learn's estimators disagree on the divisor: that of an unbiased estimate, where it exists.
    covariance = centred.T @ centred / max(1, len(rows) - 1)
    return covariance + ridge * torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)


def gaussian_map(source: Float[Tensor, "d d"], target: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """The linear part of the optimal transport from one Gaussian to another.

    Args:
        source: Covariance S, positive definite, float64.
        target: Covariance to be reached.

    Returns:
        `B = S^{-1/2} (S^{1/2} S' S^{1/2})^{1/2} S^{-1/2}`, symmetric, with `B S B = S'`.

    Raises:
        ValueError: `source` is singular.
    """
    values, vectors = torch.linalg.eigh(source)
    if not bool(values[0] > 0):
        raise ValueError(
            f"the covariance of the negatives is singular (smallest eigenvalue {float(values[0]):.3g}); use ridge > 0"
        )
    root = (vectors * values.sqrt()) @ vectors.T
    inverse = (vectors * values.rsqrt()) @ vectors.T
    inner = root @ target @ root
    inner_values, inner_vectors = torch.linalg.eigh(0.5 * (inner + inner.T))
    middle = (inner_vectors * inner_values.clamp_min(0).sqrt()) @ inner_vectors.T
    found: Tensor = inverse @ middle @ inverse
    return 0.5 * (found + found.T)
