"""What is done to which head: the configuration, and its file."""

import dataclasses
import hashlib
import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from separata_core.models import head_counts
from separata_kit.files import digest, read_json, versions, write_text
from torch import Tensor, nn

from zerotuning.operator import clamp_log_gamma

SCHEMA = "zerotuning/config"
SCHEMA_VERSION = 2

_LEAST_LOG_GAMMA = 1e-8

Granularity = Literal["uniform", "head_index", "layer_head", "layer"]
Mode = Literal["exact", "key", "query"]

# All that files of version 1 could say. Such contents are still written as version 1, so that older readers, for which
# they mean the same, go on reading them.
_VERSION_1 = {"mode": ("exact",), "granularity": ("uniform", "head_index")}


@dataclasses.dataclass(frozen=True)
class ModelId:
    """What a configuration has to fit.

    Attributes:
        type: The architecture, such as `"llama"` (`config.model_type` in transformers).
        name: Where the model came from; for people, never compared.
        layers: Number of decoder layers L.
        query_heads: Number of query heads Hq in each layer.
        key_value_heads: Number of key/value heads Hkv in each layer.
    """

    type: str
    name: str
    layers: int
    query_heads: int
    key_value_heads: int

    @classmethod
    def of(cls, model: nn.Module) -> "ModelId":
        """Read it off a transformers model.

        Args:
            model: A decoder-only transformers model.

        Returns:
            The description.

        Raises:
            ValueError: It is no decoder, or its layers differ in their number of heads.
        """
        counts = head_counts(model)
        config: Any = getattr(model, "config", None)
        name = str(getattr(config, "_name_or_path", ""))
        # Of a folder only its own name: where it lay is of no use to others.
        name = Path(name).name if Path(name).is_dir() else name
        return cls(
            type=str(getattr(config, "model_type", "")),
            name=name,
            layers=counts.layers,
            query_heads=counts.query_heads,
            key_value_heads=counts.kv_heads,
        )


def _log_of(gamma: Any, what: str) -> float:
    try:
        value = math.nan if isinstance(gamma, str | bool) else float(gamma)
    except (TypeError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"gamma of {what} is {gamma!r}; it must be a finite number above 0 (1 changes nothing)")
    return math.log(value)


def checked_indices(values: Any, count: int, what: str) -> list[int]:
    """Refuse layers or heads that a model does not have.

    Args:
        values: Their indices; None for all.
        count: How many there are.
        what: What one is called in the message.

    Returns:
        The indices in order, each once.

    Raises:
        ValueError: One is no whole number from 0 to `count - 1`.
    """
    if values is None:
        return list(range(count))
    found = set()
    for value in values:
        try:
            # True is 1 to Python: of a mask of heads it would make heads 0 and 1.
            index = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            index = -1
        if not 0 <= index < count:
            raise ValueError(f"{what} {value!r} does not exist; the model has {what}s 0 to {count - 1}")
        found.add(index)
    return sorted(found)


def _factors(gammas: object, of: str) -> Mapping[Any, float]:
    if not isinstance(gammas, Mapping):
        raise ValueError(  # noqa: TRY004  # like all that is refused here
            f"gammas is a {type(gammas).__name__}; it must be a mapping from {of} to factors"
        )
    return gammas


@dataclasses.dataclass(frozen=True, eq=False)
class ZeroTuningConfig:
    """The factors of every head of one model, as `log gamma`, and what they multiply.

    Three operators are offered, and they are three different functions:

    - `"exact"`, the paper's equation: gamma multiplies the attention *weight* of the initial token before the row is
      normalised again, which adds `log gamma` to that token's scaled logit. The default.
    - `"key"`, the paper's variant for kernels that hide their weights: gamma multiplies the key state of the initial
      token (after its rotary embedding), and so its *logit*. What that does depends on the query: a positive logit
      grows with gamma > 1, a negative one falls further. Query heads that share a key/value head share the factor.
    - `"query"`, the other such variant: gamma multiplies the queries of the head, and so *all* its logits; a
      temperature of `1 / gamma`, which favours no token.

    Attributes:
        log_gamma: `[L, Hq]`, natural logarithm of the factor of each query head; 0 is untouched. Held in float32 and
            within `zerotuning.operator.LOG_GAMMA_LIMIT`, beyond which nothing changes any more.
        model_id: The model it was made for.
        granularity: How the heads were chosen: all together, by head index jointly over the layers, by layer and head,
            or by layer with all its heads.
        mode: Which operator; see above.
        meta: Anything about its origin that JSON can hold, such as the calibration that found it.
    """

    log_gamma: Float[Tensor, "layers heads"]
    model_id: ModelId
    granularity: Granularity = "uniform"
    mode: Mode = "exact"
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values and take a copy of them.

        Raises:
            ValueError: A wrong shape, a factor that is not finite, an unknown granularity or mode, or for `mode="key"`
                factors that differ among the query heads of one key/value head.
        """
        _check_options(self.mode, self.granularity)
        expected = (self.model_id.layers, self.model_id.query_heads)
        if tuple(self.log_gamma.shape) != expected:
            raise ValueError(
                f"log_gamma has shape {tuple(self.log_gamma.shape)}; the model needs [L, Hq] = {list(expected)}"
            )
        log_gamma = self.log_gamma.detach().to("cpu")
        if not log_gamma.isfinite().all():
            layer, head = (~log_gamma.isfinite()).nonzero()[0].tolist()
            raise ValueError(
                f"log_gamma of layer {layer}, head {head} is {log_gamma[layer, head].item()}; "
                "every gamma must be finite and above 0"
            )
        log_gamma = clamp_log_gamma(log_gamma).to(torch.float32, copy=True)
        # Below what float32 tells from gamma = 1, and what the file could not give back bit for bit.
        log_gamma[log_gamma.abs() < _LEAST_LOG_GAMMA] = 0.0
        if self.mode == "key":
            _check_groups(log_gamma, self.model_id.key_value_heads)
        object.__setattr__(self, "log_gamma", log_gamma)
        object.__setattr__(self, "meta", dict(self.meta))

    @classmethod
    def uniform(
        cls,
        model: nn.Module | ModelId,
        gamma: float,
        heads: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        mode: Mode = "exact",
    ) -> "ZeroTuningConfig":
        """One factor for all heads, or for chosen head indices and layers.

        Args:
            model: The model, or its description.
            gamma: The factor; in the exact mode above 1 moves attention to the initial token, below 1 away from it.
            heads: Query-head indices, the same in each layer; all if not given.
            layers: Layer indices; all if not given.
            meta: See the class.
            mode: See the class.

        Returns:
            The configuration.

        Raises:
            ValueError: `gamma` is not finite or not above 0, a head or layer does not exist, or `mode="key"` with only
                some heads of a group.
        """
        identity = model if isinstance(model, ModelId) else ModelId.of(model)
        rows = checked_indices(layers, identity.layers, "layer")
        columns = checked_indices(heads, identity.query_heads, "head")
        whose = "all heads" if heads is None else "head " + ", ".join(map(str, columns))
        log_gamma = torch.zeros(identity.layers, identity.query_heads)
        log_gamma[torch.tensor(rows, dtype=torch.long)[:, None], torch.tensor(columns, dtype=torch.long)] = _log_of(
            gamma, whose
        )
        return cls(log_gamma, identity, "uniform" if heads is None else "head_index", mode, meta or {})

    @classmethod
    def per_head(
        cls,
        model: nn.Module | ModelId,
        gammas: Sequence[float] | Mapping[int, float],
        layers: Sequence[int] | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        mode: Mode = "exact",
    ) -> "ZeroTuningConfig":
        """A factor for each head index, jointly over the layers.

        Args:
            model: The model, or its description.
            gammas: One factor for each of the Hq query-head indices, or a mapping from some of them.
            layers: Layer indices; all if not given.
            meta: See the class.
            mode: See the class.

        Returns:
            The configuration.

        Raises:
            ValueError: A factor is not finite or not above 0 (the head is named), a head or layer does not exist, or
                `mode="key"` with factors that differ within a group.
        """
        identity = model if isinstance(model, ModelId) else ModelId.of(model)
        if not isinstance(gammas, Mapping):
            if len(gammas) != identity.query_heads:
                raise ValueError(f"gammas has {len(gammas)} values; the model has {identity.query_heads} query heads")
            gammas = dict(enumerate(gammas))
        rows = torch.tensor(checked_indices(layers, identity.layers, "layer"), dtype=torch.long)
        log_gamma = torch.zeros(identity.layers, identity.query_heads)
        for head in checked_indices(list(gammas), identity.query_heads, "head"):
            log_gamma[rows, head] = _log_of(gammas[head], f"head {head}")
        return cls(log_gamma, identity, "head_index", mode, meta or {})

    @classmethod
    def per_layer_head(
        cls,
        model: nn.Module | ModelId,
        gammas: Mapping[tuple[int, int], float],
        meta: Mapping[str, Any] | None = None,
        *,
        mode: Mode = "exact",
    ) -> "ZeroTuningConfig":
        """A factor for each of some pairs of layer and query head.

        Args:
            model: The model, or its description.
            gammas: The factors, by `(layer, head)`.
            meta: See the class.
            mode: See the class.

        Returns:
            The configuration.

        Raises:
            ValueError: As `per_head`; layer and head are named.
        """
        identity = model if isinstance(model, ModelId) else ModelId.of(model)
        log_gamma = torch.zeros(identity.layers, identity.query_heads)
        for (layer, head), gamma in gammas.items():
            _set_one(log_gamma, layer, head, gamma)
        return cls(log_gamma, identity, "layer_head", mode, meta or {})

    @classmethod
    def per_layer(
        cls,
        model: nn.Module | ModelId,
        gammas: Mapping[int, float],
        meta: Mapping[str, Any] | None = None,
        *,
        mode: Mode = "exact",
    ) -> "ZeroTuningConfig":
        """A factor for all heads of each of some layers.

        Args:
            model: The model, or its description.
            gammas: The factors, by layer.
            meta: See the class.
            mode: See the class.

        Returns:
            The configuration.

        Raises:
            ValueError: A factor is not finite or not above 0 (the layer is named), or a layer does not exist.
        """
        identity = model if isinstance(model, ModelId) else ModelId.of(model)
        log_gamma = torch.zeros(identity.layers, identity.query_heads)
        for layer in checked_indices(list(_factors(gammas, "layers")), identity.layers, "layer"):
            log_gamma[layer] = _log_of(gammas[layer], f"layer {layer}")
        return cls(log_gamma, identity, "layer", mode, meta or {})

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers in which some head is touched."""
        return tuple(self.log_gamma.abs().amax(dim=1).nonzero().flatten().tolist())

    @property
    def is_identity(self) -> bool:
        """Whether every factor is 1."""
        return not self.layers

    @property
    def fingerprint(self) -> str:
        """A digest of factors and mode: equal for configurations that compute the same."""
        shape = "x".join(map(str, self.log_gamma.shape))
        values = (self.log_gamma + 0.0).contiguous().view(torch.int32).flatten().tolist()
        return hashlib.sha256(f"{self.mode}/{shape}/{values}".encode()).hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        """Equal factors and mode on an equal architecture; where the model came from and `meta` do not count."""
        if not isinstance(other, ZeroTuningConfig):
            return NotImplemented
        return self.fingerprint == other.fingerprint and self._architecture == other._architecture

    def __hash__(self) -> int:
        """Agrees with equality."""
        return hash((self.fingerprint, self._architecture))

    @property
    def _architecture(self) -> tuple[str, int, int, int]:
        identity = self.model_id
        return identity.type, identity.layers, identity.query_heads, identity.key_value_heads

    def compose(self, other: "ZeroTuningConfig") -> "ZeroTuningConfig":
        """Apply one after the other: the factors multiply, in each of the modes.

        Args:
            other: A configuration for the same architecture, of the same mode.

        Returns:
            The joint configuration, without metadata.

        Raises:
            ValueError: The two were made for different architectures, or have different modes.
        """
        if self._architecture != other._architecture:
            raise ValueError(
                f"the configurations were made for different models: {self._architecture} and {other._architecture} "
                "(type, layers, query heads, key/value heads)"
            )
        if self.mode != other.mode:
            raise ValueError(
                f"the configurations have the modes {self.mode!r} and {other.mode!r}, which are different operators "
                "without joint factors; make both for one mode"
            )
        kinds = {self.granularity, other.granularity}
        coarsest: Granularity = "uniform"
        if "layer_head" in kinds or kinds >= {"head_index", "layer"}:
            coarsest = "layer_head"
        elif kinds != {"uniform"}:
            coarsest = "layer" if "layer" in kinds else "head_index"
        return ZeroTuningConfig(self.log_gamma + other.log_gamma, self.model_id, coarsest, self.mode)

    def check_fits(self, model: nn.Module) -> None:
        """Refuse a model that this configuration was not made for.

        Args:
            model: The model it is about to be applied to.

        Raises:
            ValueError: Type, number of layers or number of heads differ.
        """
        actual = ModelId.of(model)
        wanted = self._architecture
        found = (actual.type, actual.layers, actual.query_heads, actual.key_value_heads)
        if wanted != found:
            names = ("model type", "layers", "query heads", "key/value heads")
            wrong = ", ".join(
                f"{n} {w!r} (this model: {f!r})" for n, w, f in zip(names, wanted, found, strict=True) if w != f
            )
            raise ValueError(f"the configuration was made for another model: {wrong}; calibrate one for this model")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the file is there completely or not at all.

        Args:
            path: The file, replaced if it exists.

        Raises:
            ValueError: `meta` holds what JSON cannot.
            OSError: It cannot be written.
        """
        entries = [
            [layer, head, math.exp(self.log_gamma[layer, head].item())]
            for layer, head in self.log_gamma.nonzero().tolist()
        ]
        body = {
            "schema": SCHEMA,
            "version": 1 if _fits_version_1(self.mode, self.granularity) else SCHEMA_VERSION,
            "model": dataclasses.asdict(self.model_id),
            "mode": self.mode,
            "granularity": self.granularity,
            "gamma": entries,
            "meta": dict(self.meta),
            "versions": versions("zerotuning", "torch", "transformers"),
        }
        # Through JSON once, so that the digest is of what will be read: keys become strings there, tuples lists.
        try:
            body = json.loads(json.dumps(body, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"meta must hold what JSON can, and no nan: {error}") from None
        write_text(path, json.dumps({**body, "sha256": digest(body)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ZeroTuningConfig":
        """Read a file written by `save`.

        Args:
            path: The file.

        Returns:
            The configuration.

        Raises:
            ValueError: The file is truncated, altered, of another kind, or from a newer version of this package.
            OSError: It cannot be read.
        """
        body = read_json(path, schema=SCHEMA, version=SCHEMA_VERSION, what="zerotuning configuration")
        if body.pop("sha256", None) != digest(body):
            raise ValueError(f"{path} was altered after it was written: its contents do not match its 'sha256'")
        _check_options(body.get("mode"), body.get("granularity"))
        if body["version"] == 1 and not _fits_version_1(body["mode"], body["granularity"]):
            raise ValueError(
                f"{path} is no valid configuration: version 1 has no mode {body['mode']!r} with granularity "
                f"{body['granularity']!r}"
            )
        try:
            identity = ModelId(**body["model"])
            log_gamma = torch.zeros(identity.layers, identity.query_heads)
            for layer, head, gamma in body["gamma"]:
                _set_one(log_gamma, layer, head, gamma)
            return cls(log_gamma, identity, body["granularity"], body["mode"], dict(body["meta"]))
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ValueError(f"{path} is no valid configuration: {error}") from None


def _set_one(log_gamma: Tensor, layer: Any, head: Any, gamma: Any) -> None:
    rows, columns = (
        checked_indices([layer], len(log_gamma), "layer"),
        checked_indices([head], log_gamma.shape[1], "head"),
    )
    log_gamma[rows[0], columns[0]] = _log_of(gamma, f"layer {layer}, head {head}")


def _check_options(mode: object, granularity: object) -> None:
    for name, value, offered in (("mode", mode, get_args(Mode)), ("granularity", granularity, get_args(Granularity))):
        if value not in offered:
            raise ValueError(f"{name}={value!r} is not offered; use one of {', '.join(map(repr, offered))}")


def _fits_version_1(mode: str, granularity: str) -> bool:
    return mode in _VERSION_1["mode"] and granularity in _VERSION_1["granularity"]


def _check_groups(log_gamma: Tensor, key_value_heads: int) -> None:
    grouped = log_gamma.reshape(len(log_gamma), key_value_heads, -1)
    differs = (grouped != grouped[..., :1]).any(dim=-1)
    if bool(differs.any()):
        layer, group = differs.nonzero()[0].tolist()
        size = grouped.shape[-1]
        heads = ", ".join(str(group * size + offset) for offset in range(size))
        gammas = ", ".join(f"{value:.4g}" for value in grouped[layer, group].exp().tolist())
        raise ValueError(
            f"mode='key' scales the key of a whole group of query heads, but in layer {layer} the heads {heads} of "
            f"key/value head {group} have the gammas {gammas}; give them one gamma, or use mode='exact'"
        )
