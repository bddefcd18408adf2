"""Find the longest sequence that a script allows, and lengthen batches to that length."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.ops.tracker import user_line
from zerofit.simulate.script.value_tracker import ValueTracker

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter
    from transformers import Trainer

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
        self.trainers: weakref.WeakValueDictionary[int, Trainer] = weakref.WeakValueDictionary()
        self.has_trainer = False
        self.dataset: object = None  # source of the last batch with tokens
        self.padded_at = ""  # the script's line that padded rows to the maximum
        self.packed = 0  # samples that were packed into the first batch if it has one row, else 1; 0: no batch yet
        self._of_targets = False
        self._rows: dict[int, int] = {}  # id of a data set -> tokens of its longest row

    def limit(self) -> tuple[int, str]:
        """Return the longest allowed sequence in tokens and what limits it; (0, "") without a limit."""
        # reading all rows takes seconds, so only if the data set decides
        if not self.trainer and not self.tokenizer and id(self.dataset) not in self._rows:
            self._rows[id(self.dataset)] = max(_sizes(self.dataset, _tokens), default=0)
        # the first limit that the script sets decides: a trainer truncates what its tokenizer returned
        limits = {
            "the trainer's max_length": self.trainer,
            "max_length of the tokenizer": self.tokenizer,
            "the longest row of the data set": self._rows.get(id(self.dataset), 0),
            "the model's max_position_embeddings": self.positions,
        }
        return next(((tokens * max(1, self.packed), by) for by, tokens in limits.items() if tokens), (0, ""))

    def learn_model(self, model: nn.Module) -> None:
        """Record how many positions a model has, and its special tokens."""
        config = getattr(model, "config", None)
        if config is None:
            return
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.positions = max(self.positions, getattr(text, "max_position_embeddings", None) or 0)
        for owner in (config, text) if hasattr(config, "to_dict") else ():
            values = [value for name, value in owner.to_dict().items() if name.endswith(_SPECIAL)]
            self.special |= {value for value in values if isinstance(value, int)}

    def learn_batch(self, loader: _BaseDataLoaderIter, batch: object) -> None:
        """Record where a batch with tokens comes from."""
        tokens = token_tensors(batch)
        if tokens:
            self.dataset = loader._dataset
            # a collator that packs makes one row of all samples: then this row may be `batch_size` samples long
            rows = getattr(loader._index_sampler, "batch_size", None) or 1
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
        rows: Tensor = torch.full((1, seen), -1)  # unknown tokens: every row repeats all columns
        if isinstance(ids, Tensor) and not isinstance(ids, FakeTensor) and ids.dim() == 2 and ids.shape[1] == seen:
            rows = ids
        columns = list[Tensor]()
        for row in rows:
            # the row's own columns, and then again and again the columns of its text
            text = torch.arange(seen)
            if self.special:
                text = (~torch.isin(row, torch.tensor(sorted(self.special)))).nonzero()[:, 0]
                text = text if len(text) else torch.arange(seen)
            columns.append(torch.cat([torch.arange(seen), text[torch.arange(wanted - seen) % len(text)]]))
        return _longer(batch, seen, torch.stack(columns), self.targets)


def token_tensors(batch: object) -> list[Tensor]:
    """Return the tensors that may contain tokens: integers of shape (samples, tokens)."""
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    leaves = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
    return [t for t in leaves if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)]


def padded_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape. A jagged tensor counts as padded to its longest row."""
    if not isinstance(tensor, NestedTensor):
        return tuple(tensor.shape)
    ragged = tensor._ragged_idx
    return tuple(tensor._get_max_seqlen() if n == ragged else int(size) for n, size in enumerate(tensor.shape))


def tokenizers(lengths: Lengths) -> None:
    """Record the length to which a tokenizer truncates.

    (transformers.PreTrainedTokenizerBase._get_padding_truncation_strategies, __call__)
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.tokenization_utils_base import TruncationStrategy
    from transformers.utils.generic import PaddingStrategy

    strategies = cast(
        "Callable[..., tuple[PaddingStrategy, TruncationStrategy, int | None, object]]",
        PreTrainedTokenizerBase._get_padding_truncation_strategies,
    )
    call = cast("Callable[..., object]", PreTrainedTokenizerBase.__call__)

    def noted(
        self: PreTrainedTokenizerBase, *args: object, **kwargs: object
    ) -> tuple[PaddingStrategy, TruncationStrategy, int | None, object]:
        padding, truncation, most, rest = strategies(self, *args, **kwargs)
        if padding.value == "max_length":
            lengths.padded_at = user_line()
        if most and most < _UNLIMITED and truncation.value != "do_not_truncate":
            if lengths._of_targets:
                lengths.targets = max(lengths.targets, most)
            else:
                lengths.tokenizer = max(lengths.tokenizer, most)
        return padding, truncation, most, rest

    def called(self: PreTrainedTokenizerBase, text: object = None, *args: object, **kwargs: object) -> object:
        # transformers calls `_get_padding_truncation_strategies` for inputs and for targets
        lengths._of_targets = text is None and kwargs.get("text_target") is not None
        try:
            return call(self, text, *args, **kwargs)
        finally:
            lengths._of_targets = False

    replace_in(PreTrainedTokenizerBase, "_get_padding_truncation_strategies", noted)
    replace_in(PreTrainedTokenizerBase, "__call__", called)


def trainer_arguments(lengths: Lengths) -> None:
    """Record the length to which a trainer (of TRL, for example) truncates texts.

    (transformers.Trainer.__init__)
    """
    from transformers import Trainer

    original: Callable[..., None] = Trainer.__init__

    def init(self: Trainer, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        lengths.trainers[id(self)] = self
        lengths.has_trainer = True  # also when the trainer itself is gone (`trainers` is weak)
        lengths.trainer = max(lengths.trainer, *(getattr(self.args, name, None) or 0 for name in _OF_ARGUMENTS))

    replace_in(Trainer, "__init__", init)


def replaced_arguments(values: Mapping[str, object]) -> None:
    """Overwrite `values` in every TrainingArguments. (TrainingArguments.__post_init__)"""
    from transformers import TrainingArguments

    original = TrainingArguments.__post_init__

    def overwrite(self: TrainingArguments) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        original(self)  # it computes other fields from these, e.g. the DeepSpeed plugin from `deepspeed`

    replace_in(TrainingArguments, "__post_init__", overwrite)


def largest_samples(meter: ValueTracker) -> None:
    """Replace each batch's samples with the largest samples of the data set.

    `_sample_size` defines a sample's size. If all samples have the same size, the batches stay unchanged.
    (torch.utils.data: _MapDatasetFetcher.fetch)
    """
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    original, orders = _MapDatasetFetcher.fetch, dict[int, list[int]]()  # id of a data set -> `_by_size`

    def fetch(self: _MapDatasetFetcher, index: object) -> object:
        # a sampler may also return keys of the user's own data set, or one sample at a time
        if not isinstance(index, list) or not all(isinstance(n, int) for n in index):
            return original(self, index)
        if id(self.dataset) not in orders:
            orders[id(self.dataset)] = _by_size(self.dataset, meter)
        return original(self, orders[id(self.dataset)][: len(index)] or index)

    replace_in(_MapDatasetFetcher, "fetch", fetch)


def _by_size(dataset: Sequence[object], meter: ValueTracker) -> list[int]:
    """Return the samples' indices, largest first; [] if all have the same size."""
    sizes = _sizes(dataset, _sample_size)
    if 0 < len(sizes) < len(dataset):
        meter.note(f"--longest: the sizes of {len(sizes)} of {len(dataset)} samples were read")
    return sorted(range(len(sizes)), key=lambda n: -sizes[n]) if len(set(sizes)) > 1 else []


def _sizes(rows: Any, size_of: Callable[[object], int]) -> list[int]:
    """Return the sizes of a data set's rows. Stop after ROWS_S seconds, or if a row cannot be read."""
    sizes, deadline = list[int](), time.monotonic() + ROWS_S
    with suppress(Exception), _disable_current_modes(), unset_fake_temporarily():  # a row's code can raise anything
        for n in range(len(rows)):
            sizes.append(size_of(rows[n]))
            if time.monotonic() > deadline:
                break
    return sizes


def _sample_size(sample: object) -> int:
    """Return the number of pixels, of floats, and of integers in arrays of several dimensions."""
    # Integers in one dimension are tokens or labels: `Lengths.longer` lengthens tokens, whichever sample they are from.
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
    """Record each batch's source. With `longest`, lengthen the batch to the limit.

    (torch.utils.data.dataloader: _BaseDataLoaderIter.__next__)
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original = _BaseDataLoaderIter.__next__

    def following(self: _BaseDataLoaderIter) -> object:
        batch = original(self)
        lengths.learn_batch(self, batch)
        return lengths.longer(batch) if longest else batch

    replace_in(_BaseDataLoaderIter, "__next__", following)


def _tokens(row: object) -> int:
    """Return the number of tokens in a row; 0 without tokens."""
    # a row of a TensorDataset is a tuple, and a row of a list of token lists is the list itself
    tokens = row.get("input_ids") if isinstance(row, Mapping) else row[0] if isinstance(row, tuple) else row
    is_list = isinstance(tokens, list) or getattr(tokens, "ndim", 0) == 1
    return len(cast("Sequence[object]", tokens)) if is_list else 0


def _longer(value: object, seen: int, columns: Tensor, targets: int) -> object:
    """Lengthen dimensions of `seen` elements to `columns`: (rows, wanted), or (1, wanted).

    Labels or decoder inputs that have fewer than `targets` elements are lengthened to `targets` instead.
    """
    if isinstance(value, Tensor):
        tensor: Tensor = value
        for dimension in range(1, tensor.dim()):
            if tensor.shape[dimension] == seen and len(tensor) == len(columns) > 1:
                rows = [row.index_select(dimension - 1, c) for row, c in zip(tensor, columns, strict=True)]
                tensor = torch.stack(rows)
            elif tensor.shape[dimension] == seen:
                tensor = tensor.index_select(dimension, columns[0])
        return tensor
    if isinstance(value, MutableMapping):
        for name, entry in value.items():
            of_decoder = name == "labels" or name.startswith("decoder_")
            if of_decoder and isinstance(entry, Tensor) and entry.dim() == 2 and 0 < entry.shape[1] < targets:
                own = entry.shape[1]
                value[name] = _longer(entry, own, torch.arange(targets)[None] % own, 0)
            else:
                value[name] = _longer(entry, seen, columns, targets)
        return value
    if isinstance(value, (list, tuple)):
        entries = [_longer(entry, seen, columns, targets) for entry in value]
        kind = cast("Callable[..., object]", type(value))
        return kind(*entries) if hasattr(value, "_fields") else kind(entries)
    return value
