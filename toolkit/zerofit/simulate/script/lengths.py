"""Find the longest sequence that a script allows, and lengthen batches to that length."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.ops.tracker import own_line
from zerofit.simulate.script.value_tracker import ValueTracker

ROWS_S = 3.0  # time limit for reading a data set's rows
_OF_ARGUMENTS = ("max_length", "max_seq_length")  # of TrainingArguments of TRL and others
_SPECIAL = ("_token_id", "_token_index")
_UNLIMITED = 1 << 24  # transformers uses 1e30 for "no limit"


class Lengths:
    """Limits on sequence length set by a script's tokenizer, trainer, data set and model."""

    def __init__(self) -> None:
        self.trainer = self.tokenizer = self.targets = 0  # tokens; 0: no limit
        self.positions = 0  # of the model
        self.special: set[int] = set()  # tokens that the model's configuration names, such as image_token_id
        # id -> live instance of transformers' Trainer, whose subclass may be a dataclass, which has no hash
        self.trainers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.has_trainer = False
        self.dataset: Any = None  # source of the last batch with tokens
        self.padded_at = ""  # the script's line that padded rows to the maximum
        self.packed = 0  # samples that were packed into the first batch if it has one row, else 1; 0: no batch yet
        self._of_targets = False
        self._rows: dict[int, int] = {}  # id of a data set -> tokens of its longest row

    def limit(self) -> tuple[int, str]:
        """Return the longest allowed sequence in tokens and what limits it; (0, "") without a limit."""
        if not self.trainer and not self.tokenizer and id(self.dataset) not in self._rows:
            self._rows[id(self.dataset)] = _longest_row(self.dataset)
        said = {
            "the trainer's max_length": self.trainer,
            "max_length of the tokenizer": self.tokenizer,
            "the longest row of the data set": self._rows.get(id(self.dataset), 0),
            "the model's max_position_embeddings": self.positions,
        }
        return next(((tokens * max(1, self.packed), by) for by, tokens in said.items() if tokens), (0, ""))

    def learn_model(self, model: nn.Module) -> None:
        """Record how many positions a model has, and its special tokens."""
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.positions = max(self.positions, getattr(text, "max_position_embeddings", None) or 0)
        for owner in (config, text) if hasattr(config, "to_dict") else ():
            named = [value for name, value in owner.to_dict().items() if name.endswith(_SPECIAL)]
            self.special |= {value for value in named if isinstance(value, int)}

    def learn_batch(self, loader: Any, batch: object) -> None:
        """Record where a batch with tokens comes from."""
        tokens = token_tensors(batch)
        if tokens:
            self.dataset = loader._dataset
            rows = getattr(getattr(loader, "_index_sampler", None), "batch_size", None) or 1
            self.packed = self.packed or (rows if all(t.shape[0] == 1 for t in tokens) else 1)

    def longer(self, batch: object) -> object:
        """Return a batch with every sequence at the longest allowed length.

        Each row repeats its own values. It does not repeat special tokens, since a model counts those of images.
        """
        seen = max((padded_shape(t)[1] for t in token_tensors(batch)), default=0)
        wanted = self.limit()[0]
        if not 0 < seen < wanted:
            return batch
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        rows: Tensor = torch.full((1, seen), -1)
        if isinstance(ids, Tensor) and not isinstance(ids, FakeTensor) and ids.dim() == 2 and ids.shape[1] == seen:
            rows = ids
        columns = [_columns(row, wanted, self.special) for row in rows]
        return _longer(batch, seen, torch.stack(columns), self.targets)


def token_tensors(batch: object) -> list[Tensor]:
    """Return the tensors that may contain tokens: integers of shape (samples, tokens)."""
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    leaves = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
    return [t for t in leaves if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)]


def padded_shape(tensor: Any) -> tuple[int, ...]:
    """Return a tensor's shape. A jagged tensor counts as padded to its longest row."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    ragged = tensor._ragged_idx
    return tuple(tensor._get_max_seqlen() if n == ragged else int(size) for n, size in enumerate(tensor.shape))


def tokenizers(lengths: Lengths) -> None:
    """Record the length to which a tokenizer truncates. (PreTrainedTokenizerBase._get_padding_truncation_strategies)"""
    from transformers import PreTrainedTokenizerBase

    strategies, call = PreTrainedTokenizerBase._get_padding_truncation_strategies, PreTrainedTokenizerBase.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> object:
        found = strategies(self, *args, **kwargs)
        padding, truncation, most, _ = found
        if padding.value == "max_length":
            lengths.padded_at = own_line()
        if most and most < _UNLIMITED and truncation.value != "do_not_truncate":
            kind = "targets" if lengths._of_targets else "tokenizer"
            setattr(lengths, kind, max(getattr(lengths, kind), most))
        return found

    def called(self: Any, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        lengths._of_targets = text is None and kwargs.get("text_target") is not None
        try:
            return call(self, text, *args, **kwargs)
        finally:
            lengths._of_targets = False

    replace_in(PreTrainedTokenizerBase, "_get_padding_truncation_strategies", noted)
    replace_in(PreTrainedTokenizerBase, "__call__", called)


def trainer_arguments(lengths: Lengths) -> None:
    """Record the length to which a trainer (of TRL, for example) truncates texts. (transformers.Trainer.__init__)"""
    from transformers import Trainer

    original = Trainer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        lengths.trainers[id(self)] = self
        lengths.has_trainer = True
        lengths.trainer = max(lengths.trainer, *(getattr(self.args, name, None) or 0 for name in _OF_ARGUMENTS))

    replace_in(Trainer, "__init__", init)


def replaced_arguments(values: Mapping[str, object]) -> None:
    """Overwrite `values` in every TrainingArguments. (TrainingArguments.__post_init__)"""
    from transformers import TrainingArguments

    original = TrainingArguments.__post_init__

    def checked(self: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        original(self)

    replace_in(TrainingArguments, "__post_init__", checked)


def largest_samples(meter: ValueTracker) -> None:
    """Replace each batch's samples with the largest samples of the data set.

    A sample's size is its number of pixels and floats. Integer arrays with several dimensions count, too (see
    `_sample_size`). If all samples have the same size, the batches stay unchanged.
    (torch.utils.data: _MapDatasetFetcher.fetch)
    """
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    original, orders = _MapDatasetFetcher.fetch, dict[int, list[int]]()

    def fetch(self: Any, index: Any) -> object:
        if not isinstance(index, list) or not all(isinstance(n, int) for n in index):
            return original(self, index)
        if id(self.dataset) not in orders:
            orders[id(self.dataset)] = _by_size(self.dataset, meter)
        return original(self, orders[id(self.dataset)][: len(index)] or index)

    replace_in(_MapDatasetFetcher, "fetch", fetch)


def _by_size(dataset: Any, meter: ValueTracker) -> list[int]:
    """Return the samples' indices, largest first; [] if all have the same size.

    Reading the samples stops after ROWS_S seconds.
    """
    sizes, deadline = list[int](), time.monotonic() + ROWS_S
    with suppress(Exception), _disable_current_modes(), unset_fake_temporarily():  # a sample's code can raise anything
        for n in range(len(dataset)):
            sizes.append(_sample_size(dataset[n]))
            if time.monotonic() > deadline:
                meter.note(f"--longest: the sizes of {len(sizes)} of {len(dataset)} samples were read")
                break
    return sorted(range(len(sizes)), key=lambda n: -sizes[n]) if len(set(sizes)) > 1 else []


def _sample_size(sample: object) -> int:
    size = 0
    for leaf in tree_leaves(dict(sample) if isinstance(sample, Mapping) else sample):
        kind = getattr(leaf, "dtype", None)
        if isinstance(kind, torch.dtype):
            size += leaf.numel() if kind.is_floating_point or leaf.dim() > 2 else 0
        elif kind is not None:  # of numpy
            size += leaf.size if kind.kind == "f" or leaf.ndim > 1 else 0
        elif hasattr(leaf, "getbands"):  # of PIL
            size += leaf.size[0] * leaf.size[1]
    return size


def batches(lengths: Lengths, longest: bool) -> None:
    """Record each batch's source. With `longest`, lengthen the batch to the limit. (_BaseDataLoaderIter.__next__)"""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original = _BaseDataLoaderIter.__next__

    def following(self: Any) -> object:
        batch = original(self)
        lengths.learn_batch(self, batch)
        return lengths.longer(batch) if longest else batch

    replace_in(_BaseDataLoaderIter, "__next__", following)


def _longest_row(dataset: Any) -> int:
    """Return the number of tokens in the longest row; 0 without tokens. Reading the rows stops after ROWS_S seconds."""
    longest, deadline = 0, time.monotonic() + ROWS_S
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return 0
    with suppress(Exception), _disable_current_modes(), unset_fake_temporarily():  # a row's code can raise anything
        for n in range(len(dataset)):
            row: Any = dataset[n]
            row = row.get("input_ids") if isinstance(row, Mapping) else row[0] if isinstance(row, tuple) else row
            longest = max(longest, len(row) if isinstance(row, list) or getattr(row, "ndim", 0) == 1 else 0)
            if time.monotonic() > deadline:
                break
    return longest


def _columns(row: Tensor, wanted: int, special: set[int]) -> Tensor:
    """Return which `wanted` columns a longer row has: its own, and then again those of its text."""
    text = (~torch.isin(row, torch.tensor(sorted(special)))).nonzero()[:, 0] if special else torch.arange(len(row))
    text = text if len(text) else torch.arange(len(row))
    return torch.cat([torch.arange(len(row)), text[torch.arange(wanted - len(row)) % len(text)]])


def _longer(value: Any, seen: int, columns: Tensor, targets: int) -> Any:
    """Lengthen dimensions of `seen` elements to the columns (rows, wanted), or (1, wanted) for all rows.

    Labels or decoder inputs that have fewer than `targets` elements are lengthened to `targets` instead.
    """
    if isinstance(value, Tensor):
        for dimension in range(1, value.dim()):
            if value.shape[dimension] == seen and len(value) == len(columns) > 1:
                value = torch.stack([one.index_select(dimension - 1, c) for one, c in zip(value, columns, strict=True)])
            elif value.shape[dimension] == seen:
                value = value.index_select(dimension, columns[0])
        return value
    if isinstance(value, MutableMapping):
        for name, one in value.items():
            decoded = (name == "labels" or name.startswith("decoder_")) and isinstance(one, Tensor) and one.dim() == 2
            own = one.shape[1] if decoded and targets > one.shape[1] else 0
            of_targets = torch.arange(targets)[None] % own if own else columns
            value[name] = _longer(one, own or seen, of_targets, 0 if own else targets)
        return value
    if isinstance(value, (list, tuple)):
        made = [_longer(one, seen, columns, targets) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value
