"""The hidden states from which steerers are fitted: read by hooks, where steering writes them.

All layers come from one pass over texts sorted by length. With a path the rows go to their places in a safetensors file
as they come, so that no more than a batch is in memory, and a journal beside it says which ones are there: a run that
was killed goes on where it stopped.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int, Int64
from separata_core.models import decoder_layers, edit_hidden_states
from separata_kit.files import digest as json_digest
from separata_kit.files import lock_file, refuse_special
from separata_kit.language_models import weights_digest
from torch import Tensor, nn

from bodes_steer.files import Origin
from bodes_steer.model import input_device

SCHEMA = "bodes-steer/activations"
SCHEMA_VERSION = 1

Position = Literal["last", "mean", "all"]
Dtype = Literal["float32", "float64", "float16", "bfloat16"]

# Names of the types in safetensors.
_DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "F32"),
    "float64": (torch.float64, "F64"),
    "float16": (torch.float16, "F16"),
    "bfloat16": (torch.bfloat16, "BF16"),
}
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8}
_NO_DIGEST = "0" * 64
_BLOCK = 1 << 24


class ActivationsError(ValueError):
    """A file that holds no activations, or damaged ones."""


class Activations:
    """Hidden states of texts, one row for each (or, with `position="all"`, for each token).

    Attributes:
        model: The model that they come from.
        layers: Indices of the decoder blocks, ascending.
        position: Which tokens the rows are.
        labels: `[texts]`, 1 for what is wanted and 0 for what is not; None if none were given.
        text_index: `[rows]`, the text that each row belongs to.
        truncated: How many texts were too long and so lost their last tokens.
        duplicates: How many texts appear with both labels.
        path: The file; None for those in memory.
    """

    def __init__(
        self,
        tensors: Mapping[int, Float[Tensor, "rows d"]],
        *,
        model: Origin,
        position: Position = "last",
        labels: Int[Tensor, "texts"] | None = None,
        text_index: Int[Tensor, "entries"] | None = None,
        truncated: int = 0,
        duplicates: int = 0,
    ) -> None:
        """Hold activations in memory.

        Args:
            tensors: For each layer, its rows.
            model: Where they come from.
            position: Which tokens they are.
            labels: 1 or 0 for each text.
            text_index: The text of each row; by default row i is text i.
            truncated: How many texts lost their last tokens.
            duplicates: How many texts appear with both labels.

        Raises:
            ValueError: Shapes that do not go together.
        """
        self._tensors = {layer: tensors[layer] for layer in sorted(tensors)}
        shapes = {tuple(each.shape) for each in self._tensors.values()}
        if len(shapes) != 1:
            raise ValueError(f"tensors have the shapes {sorted(shapes)}; all layers need one, [rows, d]")
        ((rows, _),) = shapes
        self.layers = tuple(self._tensors)
        self.model = model
        self.position = position
        self.text_index = torch.arange(rows) if text_index is None else text_index
        self.labels = labels
        self.truncated = truncated
        self.duplicates = duplicates
        self.path: Path | None = None
        if len(self.text_index) != rows:
            raise ValueError(f"text_index has {len(self.text_index)} entries for {rows} rows")
        if labels is not None and rows and int(self.text_index.max()) >= len(labels):
            raise ValueError(f"labels has {len(labels)} entries, and a row is of text {int(self.text_index.max())}")

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.text_index)

    def layer(self, index: int) -> Float[Tensor, "rows d"]:
        """The rows of one layer.

        Args:
            index: The decoder block, from 0.

        Returns:
            `[rows, d]`; of a file, mapped into memory and checked against its digest when first asked for.

        Raises:
            ValueError: The layer was not extracted.
            ActivationsError: The file was damaged.
        """
        if index not in self.layers:
            raise ValueError(f"layer {index!r} was not extracted; there are {', '.join(map(str, self.layers))}")
        return self._tensors[index]

    def pair(self, index: int) -> tuple[Float[Tensor, "positives d"], Float[Tensor, "negatives d"]]:
        """The rows of one layer by label, as `fit` takes them.

        Args:
            index: The decoder block, from 0.

        Returns:
            The rows with label 1, and those with label 0.

        Raises:
            ValueError: There are no labels, or as `layer`.
        """
        if self.labels is None:
            raise ValueError("these activations have no labels; pass labels to extract_activations")
        rows, wanted = self.layer(index), self.labels[self.text_index] == 1
        return rows[wanted], rows[~wanted]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them to a file, whole or not at all; the same activations give the same bytes.

        Args:
            path: The file, replaced if it exists.

        Raises:
            OSError: It cannot be written.
        """
        path = Path(path)
        rows = self.layer(self.layers[0])
        layout = _Layout(self.layers, len(rows), rows.shape[1], _name_of(rows.dtype), self.text_index, self.labels)
        about = self._about()
        with _Writer(path, layout, about) as writer:
            for layer in self.layers:
                writer.put(layer, 0, self.layer(layer))
            writer.finish()

    def _about(self) -> dict[str, Any]:
        return {
            "model": dataclasses.asdict(self.model),
            "position": self.position,
            "truncated": self.truncated,
            "duplicates": self.duplicates,
        }

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Activations":
        """Open a file; the rows stay on the disk until they are used.

        Args:
            path: What `save` or `extract_activations` wrote.

        Returns:
            The activations.

        Raises:
            ActivationsError: It is another kind of file, a later version's, or damaged.
            OSError: It cannot be read.
        """
        path = Path(path)
        tensors = _Mapped(path)
        about = tensors.about
        try:
            found = cls.__new__(cls)
            found._tensors = tensors  # type: ignore[assignment]  # it gives the same, on demand
            found.layers = tensors.layers
            found.model = Origin(**about["model"])
            found.position = about["position"]
            found.truncated, found.duplicates = int(about["truncated"]), int(about["duplicates"])
            found.text_index, found.labels = tensors.text_index, tensors.labels
            found.path = path
        except (KeyError, TypeError, ValueError) as error:
            raise ActivationsError(f"{path} is damaged: {error!r}") from None
        return found


def extract_activations(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[Any],
    layers: Iterable[int] | None = None,
    *,
    position: Position = "last",
    batch_size: int = 8,
    out: str | os.PathLike[str] | None = None,
    max_length: int | None = None,
    labels: Any = None,
    resume: bool = True,
    progress: bool = True,
    dtype: Dtype = "float32",
) -> Activations:
    """Hidden states behind decoder blocks (paper, section on data: the last token of the whole text, without pooling).

    The processes of `torch.distributed` share the texts out. All of them get the whole result; the first one writes, to
    a path that all must see.

    Args:
        model: A decoder-only transformers model; wrapped by PEFT or spread over devices is fine.
        tokenizer: Its tokenizer.
        texts: Texts, or conversations (each a list of messages), which the tokenizer's chat template turns into text.
        layers: Indices of decoder blocks, from 0; all by default. Blocks above the highest one are not run.
        position: `"last"`: the last token, before an end-of-text or padding token where the tokenizer adds one.
            `"mean"`: the mean over all tokens, in float32 or better. `"all"`: a row for each token. Both leave out the
            token that begins all texts, whose states are like no other's.
        batch_size: Texts in one forward.
        out: The file, a memory-mapped safetensors; without it the result is in memory.
        max_length: Longer texts lose their last tokens, are counted, and warned of; by default what the model's
            configuration says that it can take.
        labels: 1 (wanted) or 0 for each text.
        resume: Go on with what a run that was interrupted left at `out`, or take what a finished one did. Otherwise
            start anew.
        progress: Show texts done on standard error.
        dtype: Of the result.

    Returns:
        The activations, in the order of the texts.

    Raises:
        ValueError: No texts, texts without tokens (which ones), layers that do not exist, labels that are not 0 or 1 or
            not as many, another argument that makes no sense, or a file at `out` that was made from something else.
        OSError: The file cannot be written, or another run has it open.
    """
    count = len(decoder_layers(model))
    wanted = sorted(set(range(count) if layers is None else layers))
    if not wanted or not set(wanted) <= set(range(count)):
        raise ValueError(f"layers={wanted}; they must be among 0 to {count - 1}, and at least one")
    for name, number in (("batch_size", batch_size), ("max_length", max_length)):
        if number is not None and number < 1:
            raise ValueError(f"{name}={number}; it must be 1 or more")
    for name, value, known in (("position", position, get_args(Position)), ("dtype", dtype, get_args(Dtype))):
        if value not in known:
            raise ValueError(f"{name}={value!r}; it must be one of {', '.join(map(repr, known))}")
    if isinstance(texts, str) or not len(texts):
        raise ValueError("texts must be a list of texts or conversations, not empty")
    classes = _checked_labels(labels, len(texts))
    duplicates = _duplicates(texts, classes)
    limit = max_length if max_length is not None else _longest(model)
    spans, truncated = _tokenize(tokenizer, texts, limit)
    if duplicates:
        warnings.warn(f"{duplicates} texts appear with both labels", UserWarning, stacklevel=2)
    if truncated:
        warnings.warn(
            f"{truncated} of {len(spans)} texts have more than {limit} tokens and lose their last ones, at which "
            "activations are read; raise max_length or shorten them",
            UserWarning,
            stacklevel=2,
        )
    origin = Origin.of(model)
    lengths = torch.tensor([len(span) if position == "all" else 1 for span in spans])
    layout = _Layout(
        tuple(wanted),
        int(lengths.sum()),
        _width(model, origin),
        dtype,
        torch.arange(len(spans)).repeat_interleave(lengths),
        classes,
    )
    about = {
        "model": dataclasses.asdict(origin),
        "position": position,
        "truncated": truncated,
        "duplicates": duplicates,
    }
    first_rows = (lengths.cumsum(0) - lengths).tolist()
    job = _Job(model, tokenizer, spans, wanted, position, batch_size, first_rows, dtype, progress)
    if out is None:
        memory = _Memory(layout)
        job.run(memory, set())
        result = Activations(
            memory.tensors,
            model=origin,
            position=position,
            labels=classes,
            text_index=layout.text_index,
            truncated=truncated,
            duplicates=duplicates,
        )
    else:
        run = {
            "weights": weights_digest(model),
            "texts": json_digest([[s.ids, s.begin] for s in spans]),
            "limit": limit,
        }
        _to_file(Path(out), job, layout, about, run, resume=resume)
        result = Activations.open(out)
    if job.not_finite:
        warnings.warn(
            f"{job.not_finite} texts have activations that are NaN or infinite; no steerer can be fitted on them",
            UserWarning,
            stacklevel=2,
        )
    return result


def _to_file(
    path: Path, job: "_Job", layout: "_Layout", about: Mapping[str, Any], run: Mapping[str, Any], *, resume: bool
) -> None:
    """Run a job into a file, going on where an earlier run stopped."""
    plain = {**about, "model": {k: v for k, v in about["model"].items() if k not in ("model_name", "versions")}}
    run = {**run, "about": plain, "layout": layout.describe()}
    digest = json_digest(run)
    failure: BaseException | None = None
    done: set[int] = set()
    writer: _Writer | None = None
    finished = False
    if _is_first():
        try:
            path = _ordinary(path)
            finished = resume and path.exists() and _made_by(path, digest)
            if not finished:
                writer = _Writer(path, layout, {**about, "run": digest}, journal=True, resume=resume)
                writer.__enter__()
                done = writer.done
        except (OSError, ValueError) as error:
            failure = error
    # Told to the others before it is raised, as they would wait for ever.
    state = _from_first(None if failure else {"finished": finished, "done": sorted(done)})
    if failure is not None:
        raise failure
    if state is None:
        raise OSError(f"the first process cannot write {path}")
    if not state["finished"]:
        with contextlib.ExitStack() as stack:
            if writer is not None:
                stack.push(writer)
            job.run(writer, set(state["done"]))
            if writer is not None:
                writer.finish()
    _barrier()


@dataclasses.dataclass(frozen=True)
class _Span:
    """The tokens of a text, and where its own begin."""

    ids: list[int]
    begin: int

    def __len__(self) -> int:
        return len(self.ids) - self.begin


class _StopForwardError(Exception):
    """All layers that are asked for have run."""


@dataclasses.dataclass
class _Job:
    """Texts to run, and how."""

    model: nn.Module
    tokenizer: Any
    spans: list[_Span]
    layers: list[int]
    position: Position
    batch_size: int
    first_rows: list[int]
    dtype: Dtype
    progress: bool
    not_finite: int = 0

    def run(self, sink: "_Memory | _Writer | None", done: set[int]) -> None:
        """Run what is not done; `sink` takes the rows, None in processes that only help."""
        from tqdm import tqdm  # type: ignore[import-untyped]  # it ships no types

        # The longest first: what does not fit into memory fails at once. Batches are the same whoever runs them.
        order = sorted((i for i in range(len(self.spans)) if i not in done), key=lambda i: -len(self.spans[i].ids))
        batches = [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]
        rank, parts = _share(self.model)
        bar = tqdm(
            total=len(self.spans),
            initial=len(done),
            desc="extract",
            unit="text",
            disable=not self.progress or not _is_first(),
        )
        with bar, torch.no_grad():
            for first in range(0, len(batches), parts):
                group = batches[first : first + parts]
                found = [
                    self._forward(batch) if index == rank or parts == 1 else None for index, batch in enumerate(group)
                ]
                for batch, rows in zip(group, found, strict=True):
                    whole = rows if parts == 1 else self._summed(rows, batch)
                    assert whole is not None
                    self._deliver(batch, whole, sink)
                    bar.update(len(batch))

    def _rows_of(self, text: int) -> int:
        return len(self.spans[text]) if self.position == "all" else 1

    def _deliver(self, batch: list[int], rows: Tensor, sink: "_Memory | _Writer | None") -> None:
        start = 0
        places = []
        for text in batch:
            end = start + self._rows_of(text)
            places.append((text, self.first_rows[text], rows[:, start:end]))
            start = end
        self.not_finite += sum(not bool(each.isfinite().all()) for _, _, each in places)
        if sink is not None:
            sink.take(places)

    def _summed(self, rows: Tensor | None, batch: list[int]) -> Tensor:
        """What one process found, in all of them."""
        if rows is None:
            total = sum(self._rows_of(text) for text in batch)
            rows = torch.zeros(len(self.layers), total, _width(self.model, None), dtype=_DTYPES[self.dtype][0])
        there = rows.to(_group_device())
        torch.distributed.all_reduce(there)
        return there.cpu()

    def _forward(self, batch: list[int]) -> Tensor:
        """`[layers, rows, d]` of a batch, on the CPU."""
        spans = [self.spans[text] for text in batch]
        width = max(len(span.ids) for span in spans)
        device = input_device(self.model)
        # Padded on the right: in a causal model nothing before sees it, whatever the positions are.
        pad = next((i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if i is not None), 0)
        tokens = torch.tensor([[*span.ids, *[pad] * (width - len(span.ids))] for span in spans], device=device)
        ends = torch.tensor([len(span.ids) for span in spans], device=device)
        begins = torch.tensor([span.begin for span in spans], device=device)
        columns = torch.arange(width, device=device)
        mask = columns < ends[:, None]
        own = mask & (columns >= begins[:, None])
        found: dict[int, Tensor] = {}
        stop = self.layers[-1] if _may_stop(self.model) else None

        def reader(layer: int) -> Callable[[Tensor], Tensor]:
            def read(states: Tensor) -> Tensor:
                found[layer] = self._pick(states, ends.to(states.device), own.to(states.device))
                if layer == stop:
                    raise _StopForwardError
                return states

            return read

        readers = {layer: reader(layer) for layer in self.layers}
        with contextlib.suppress(_StopForwardError), edit_hidden_states(self.model, readers):
            self.model(input_ids=tokens, attention_mask=mask.long(), use_cache=False)
        return torch.stack([_converted(found[layer], self.dtype) for layer in self.layers])

    def _pick(self, states: Tensor, ends: Tensor, own: Tensor) -> Tensor:
        if self.position == "last":
            return states[torch.arange(len(ends), device=states.device), ends - 1]
        if self.position == "all":
            return states[own]
        exact = states.to(torch.promote_types(states.dtype, torch.float32)).masked_fill(~own[:, :, None], 0)
        return exact.sum(1) / own.sum(1, keepdim=True)


def _converted(rows: Tensor, dtype: Dtype) -> Tensor:
    new = rows.to(device="cpu", dtype=_DTYPES[dtype][0])
    if dtype == "float16" and bool((new.isinf() & rows.cpu().isfinite()).any()):
        raise ValueError("activations leave the range of float16; pass dtype='bfloat16' or 'float32'")
    return new


def _checked_labels(labels: Any, count: int) -> Int64[Tensor, "texts"] | None:
    if labels is None:
        return None
    found = torch.as_tensor(labels)
    if found.shape != (count,) or not bool(((found == 0) | (found == 1)).all()):
        raise ValueError(f"labels has shape {tuple(found.shape)}; it must hold 0 or 1 for each of the {count} texts")
    return found.to("cpu", torch.int64)


def _duplicates(texts: Sequence[Any], labels: Tensor | None) -> int:
    """How many different texts have both labels."""
    if labels is None:
        return 0
    seen: dict[str, set[int]] = {}
    for text, label in zip(texts, labels.tolist(), strict=True):
        seen.setdefault(text if isinstance(text, str) else json.dumps(text, sort_keys=True), set()).add(label)
    return sum(len(each) > 1 for each in seen.values())


def _tokenize(tokenizer: Any, texts: Sequence[Any], limit: int | None) -> tuple[list[_Span], int]:
    """The tokens of each text, and how many were cut."""
    plain = [text for text in texts if isinstance(text, str)]
    if plain and len(plain) < len(texts):
        raise ValueError("texts holds both texts and conversations; pass one kind")
    if any(isinstance(text, Mapping) for text in texts):
        raise ValueError("texts holds single messages; pass a list of conversations, each a list of messages")
    if plain:
        rows = tokenizer(plain, add_special_tokens=True, truncation=False)["input_ids"]
    else:
        rendered = [tokenizer.apply_chat_template(list(messages), tokenize=False) for messages in texts]
        # The template writes the tokens that begin a text itself.
        rows = tokenizer(rendered, add_special_tokens=False, truncation=False)["input_ids"]
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
    spans, empty, truncated = [], [], 0
    for index, row in enumerate(rows):
        ids = list(row)
        while ids and ids[-1] in ends:
            ids.pop()
        if limit is not None and len(ids) > limit:
            ids, truncated = ids[:limit], truncated + 1
        begin = int(bool(ids) and ids[0] == tokenizer.bos_token_id)
        if len(ids) == begin:
            empty.append(index)
        spans.append(_Span(ids, begin))
    if empty:
        named = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise ValueError(f"{len(empty)} texts have no tokens (index {named}); leave them out")
    return spans, truncated


def _config(model: nn.Module) -> Any:
    configs = (getattr(module, "config", None) for module in model.modules())
    config: Any = next((each for each in configs if each is not None), None)
    return config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config


def _longest(model: nn.Module) -> int | None:
    found = getattr(_config(model), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _width(model: nn.Module, origin: Origin | None) -> int:
    size = None if origin is None else origin.hidden_size
    size = getattr(_config(model), "hidden_size", None) if size is None else size
    if size is None:
        raise ValueError(f"the configuration of {type(model).__name__} has no hidden_size")
    return int(size)


def _may_stop(model: nn.Module) -> bool:
    """Whether a forward may be left in the middle: not where other processes wait for its end."""
    return not _is_spread(model)


# Files.


@dataclasses.dataclass(frozen=True)
class _Layout:
    """What lies where in a file; known before the first forward."""

    layers: tuple[int, ...]
    rows: int
    width: int
    dtype: str
    text_index: Tensor
    labels: Tensor | None

    def describe(self) -> dict[str, Any]:
        labels = None if self.labels is None else _bytes_digest(self.labels)
        return {
            "layers": list(self.layers),
            "rows": self.rows,
            "width": self.width,
            "dtype": self.dtype,
            "text_index": _bytes_digest(self.text_index),
            "labels": labels,
        }

    def tensors(self) -> dict[str, tuple[str, list[int]]]:
        """Name, type and shape of each tensor, in the order of the file."""
        kind = _DTYPES[self.dtype][1]
        found = {"text_index": ("I64", [self.rows])}
        if self.labels is not None:
            found["labels"] = ("I64", [len(self.labels)])
        return {**found, **{f"layer.{layer}": (kind, [self.rows, self.width]) for layer in self.layers}}


def _header(
    tensors: Mapping[str, tuple[str, list[int]]], about: Mapping[str, Any], digests: Mapping[str, str]
) -> bytes:
    """The beginning of a safetensors file; of the same length whatever the digests are."""
    body = {**about, "digests": dict(digests)}
    entry = {"schema": SCHEMA, "version": str(SCHEMA_VERSION), "about": json.dumps(body, sort_keys=True)}
    entry["sha256"] = json_digest([entry["about"], {name: list(each) for name, each in tensors.items()}])
    header: dict[str, Any] = {"__metadata__": entry}
    start = 0
    for name, (kind, shape) in tensors.items():
        end = start + _SIZES[kind] * torch.Size(shape).numel()
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        start = end
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


class _Writer:
    """Writes a file at its places, under another name until it is whole."""

    def __init__(
        self, path: Path, layout: _Layout, about: Mapping[str, Any], *, journal: bool = False, resume: bool = False
    ) -> None:
        self.path = path = _ordinary(path)
        self.layout = layout
        self.about = about
        self.tensors = layout.tensors()
        self.part = path.with_name(path.name + ".part")
        self.journal_path = path.with_name(path.name + ".journal") if journal else None
        self.resume = resume
        self.done: set[int] = set()
        self.file: Any = None
        self.journal: Any = None
        blank = _header(self.tensors, about, dict.fromkeys(self.tensors, _NO_DIGEST))
        self.begin = len(blank)
        self.offsets: dict[str, int] = {}
        place = self.begin
        for name, (kind, shape) in self.tensors.items():
            self.offsets[name] = place
            place += _SIZES[kind] * torch.Size(shape).numel()
        self.size = place
        self.blank = blank

    def __enter__(self) -> "_Writer":
        try:
            self._open()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _open(self) -> None:
        if self.journal_path is not None:
            self.journal = self.journal_path.open("a+b")
            lock_file(self.journal, self.journal_path)
        known = self._read_journal() if self.resume and self.part.exists() else []
        self.file = self.part.open("r+b" if known else "w+b")
        # Anew each time: the journal vouches for rows only, and an earlier run may have died before these were written.
        self.file.write(self.blank)
        self.file.truncate(self.size)
        self.put("text_index", 0, self.layout.text_index)
        if self.layout.labels is not None:
            self.put("labels", 0, self.layout.labels)
        self.file.flush()
        if not known and self.journal is not None:
            self.journal.truncate(0)
            self._note({"schema": f"{SCHEMA}-journal", "version": SCHEMA_VERSION, "run": self.about.get("run")})
        for record in known:
            self.done |= self._intact(record)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self.file, self.journal):
            if file is not None:
                file.close()
        self.file = None
        if self.journal is None:
            self.part.unlink(missing_ok=True)
        self.journal = None

    def _read_journal(self) -> list[dict[str, Any]]:
        """The records of an earlier run, without a last line that a crash cut off."""
        self.journal.seek(0)
        content = self.journal.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if not lines:
            return []
        try:
            header, *records = [json.loads(line) for line in lines]
            matches = header["run"] == self.about.get("run") and header["version"] == SCHEMA_VERSION
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.journal_path} is damaged; delete it, or pass resume=False") from None
        if not matches:
            raise ValueError(
                f"{self.journal_path} belongs to a run with another model, other texts or other options; delete it, "
                "give another path, or pass resume=False"
            )
        self.journal.truncate(len(whole))
        return [header, *records]

    def _intact(self, record: Mapping[str, Any]) -> set[int]:
        """The texts of a record whose rows are on the disk as they were written."""
        if "texts" not in record:
            return set()
        digest = hashlib.sha256(json.dumps(record["texts"]).encode())
        for _, first, rows in record["texts"]:
            for layer in self.layout.layers:
                digest.update(self._get(f"layer.{layer}", first, rows))
        return {text for text, _, _ in record["texts"]} if digest.hexdigest() == record["sha256"] else set()

    def _row_bytes(self, name: str) -> int:
        kind, shape = self.tensors[name]
        return _SIZES[kind] * (shape[1] if len(shape) > 1 else 1)

    def _get(self, name: str, first: int, rows: int) -> bytes:
        size = self._row_bytes(name)
        self.file.seek(self.offsets[name] + first * size)
        found: bytes = self.file.read(rows * size)
        return found

    def put(self, name: str | int, first: int, rows: Tensor) -> None:
        """Write rows to their place."""
        key = name if isinstance(name, str) else f"layer.{name}"
        self.file.seek(self.offsets[key] + first * self._row_bytes(key))
        self.file.write(_raw(rows))

    def take(self, places: list[tuple[int, int, Tensor]]) -> None:
        """Write the rows `[layers, rows, d]` of texts, and note that they are there."""
        texts = [[text, first, rows.shape[1]] for text, first, rows in places]
        digest = hashlib.sha256(json.dumps(texts).encode())
        for _, first, rows in places:
            for layer, each in zip(self.layout.layers, rows, strict=True):
                self.put(layer, first, each)
                digest.update(_raw(each))
        self.file.flush()
        os.fsync(self.file.fileno())
        self._note({"texts": texts, "sha256": digest.hexdigest()})

    def _note(self, record: Mapping[str, Any]) -> None:
        if self.journal is not None:
            self.journal.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            self.journal.flush()
            os.fsync(self.journal.fileno())

    def finish(self) -> None:
        """Give the file its name."""
        digests = {}
        for name, (kind, shape) in self.tensors.items():
            self.file.seek(self.offsets[name])
            digests[name] = _stream_digest(self.file, _SIZES[kind] * torch.Size(shape).numel())
        self.file.seek(0)
        self.file.write(_header(self.tensors, self.about, digests))
        self.file.flush()
        os.fsync(self.file.fileno())
        os.replace(self.part, self.path)
        if self.journal_path is not None:
            self.journal_path.unlink(missing_ok=True)


class _Memory:
    """Takes rows into memory."""

    def __init__(self, layout: _Layout) -> None:
        dtype = _DTYPES[layout.dtype][0]
        self.tensors = {layer: torch.zeros(layout.rows, layout.width, dtype=dtype) for layer in layout.layers}

    def take(self, places: list[tuple[int, int, Tensor]]) -> None:
        """Put the rows of texts to their places."""
        for _, first, rows in places:
            for target, each in zip(self.tensors.values(), rows, strict=True):
                target[first : first + len(each)] = each


class _Mapped(Mapping[int, Tensor]):
    """The layers of a file, each opened and checked when it is asked for."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        try:
            opened: Any = safe_open
            self.file: Any = opened(path, framework="pt")
            entry = self.file.metadata() or {}
            names = {name: self.file.get_slice(name) for name in self.file.keys()}  # noqa: SIM118  # it is no mapping
        except (SafetensorError, ValueError) as error:
            raise ActivationsError(f"{path} is no safetensors file, or a damaged one: {error}") from None
        if entry.get("schema") != SCHEMA:
            raise ActivationsError(f"{path} holds no activations (schema {entry.get('schema')!r})")
        if entry.get("version") != str(SCHEMA_VERSION):
            raise ActivationsError(
                f"{path} has version {entry.get('version')} of the format, and this bodes-steer reads version "
                f"{SCHEMA_VERSION}"
            )
        tensors = {name: (each.get_dtype(), list(each.get_shape())) for name, each in names.items()}
        try:
            self.about: dict[str, Any] = json.loads(entry["about"])
            self.digests: dict[str, str] = dict(self.about.pop("digests"))
            ordered = {name: list(tensors[name]) for name in self.digests}
            if entry["sha256"] != json_digest([entry["about"], ordered]) or set(ordered) != set(tensors):
                raise ActivationsError(f"{path} was altered: its description does not match its digest")
            self.layers = tuple(sorted(int(name[6:]) for name in tensors if name.startswith("layer.")))
            self._open: dict[str, Tensor] = {}
            self.text_index = self._checked("text_index")
            self.labels = self._checked("labels") if "labels" in tensors else None
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ActivationsError(f"{path} is damaged: {error!r}") from None

    def __getitem__(self, layer: int) -> Tensor:
        return self._checked(f"layer.{layer}")

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def _checked(self, name: str) -> Tensor:
        if name not in self._open:
            tensor = self.file.get_tensor(name)
            if _bytes_digest(tensor) != self.digests[name]:
                raise ActivationsError(f"{self.path} is damaged: {name} does not match its digest")
            self._open[name] = tensor
        return self._open[name]


def _ordinary(path: Path) -> Path:
    refuse_special(path)
    # A link stays one, and the file that it leads to is replaced.
    return path.resolve()


def _made_by(path: Path, run: str) -> bool:
    """Whether a finished file is what this run would make.

    Raises:
        ValueError: It is something else.
    """
    if _Mapped(path).about.get("run") != run:
        raise ValueError(
            f"{path} was made with another model, other texts or other options; give another path, or pass "
            "resume=False to replace it"
        )
    return True


def _name_of(dtype: torch.dtype) -> str:
    name = next((name for name, (each, _) in _DTYPES.items() if each == dtype), None)
    if name is None:
        raise ValueError(f"activations have the type {dtype}; it must be one of {', '.join(_DTYPES)}")
    return name


def _raw(tensor: Tensor) -> bytes:
    data: bytes = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data


def _bytes_digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    digest = hashlib.sha256()
    for start in range(0, len(flat), _BLOCK):
        block: Any = flat[start : start + _BLOCK].numpy()
        digest.update(block)
    return digest.hexdigest()


def _stream_digest(file: Any, size: int) -> str:
    digest = hashlib.sha256()
    while size and (block := file.read(min(size, _BLOCK))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()


# Processes.


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _is_spread(model: nn.Module) -> bool:
    """Whether weights lie in several processes, which then all have to run the same texts."""
    if not _distributed():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters()) or any(
        isinstance(module, FullyShardedDataParallel) for module in model.modules()
    )


def _share(model: nn.Module) -> tuple[int, int]:
    """Index of this process's part of the texts, and the number of parts."""
    if not _distributed() or _is_spread(model):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _is_first() -> bool:
    return not _distributed() or torch.distributed.get_rank() == 0


def _group_device() -> torch.device:
    # NCCL moves what is on a GPU only.
    backend = str(torch.distributed.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")


def _from_first(value: Any) -> Any:
    """What the first process has (anything JSON can hold), in every process."""
    if not _distributed() or torch.distributed.get_world_size() == 1:
        return value
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(_group_device())
    size = torch.tensor([len(data)], device=data.device)
    torch.distributed.broadcast(size, 0)
    if not _is_first():
        data = torch.zeros(int(size), dtype=torch.uint8, device=data.device)
    torch.distributed.broadcast(data, 0)
    return json.loads(bytes(data.cpu().numpy().tobytes()))


def _barrier() -> None:
    if _distributed():
        torch.distributed.barrier()
