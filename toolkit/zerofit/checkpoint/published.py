"""Write a published model tensor by tensor: a transformers folder, or a safetensors file."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from zerofit.checkpoint.model_folder import LazyTensor, TensorEntry, TensorFile, check_file, cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 1 << 30  # some tools, such as accelerate, load a full shard into host memory
THREADS = 8  # that read and write at the same time
INDEX = "model.safetensors.index.json"


# transformers may rename, split or fuse tensors between its modules and its files. The outputs of each tensor are
# found on the meta device, where they cost nothing. Tensors can then be converted and written one at a time, in any
# order.
class PublishedFiles:
    """The files of a published model: safetensors files and configs.

    A safetensors file has at most `max_shard_bytes`. Parameters are in `dtype`; buffers keep their type.
    """

    def __init__(self, published: PublishedModel, dtype: torch.dtype, max_shard_bytes: int = SHARD_BYTES):
        self.published, self._dtype = published, dtype
        model = published.model
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        dtypes = {
            name: dtype if name in parameters and t.is_floating_point() else t.dtype
            for name, t in model.state_dict().items()
        }
        entries = [
            TensorEntry(name=name, shape=shape, dtype=dtypes[part.source])
            for part in published.parts
            for name, shape in part.outputs.items()
        ]
        self.bytes = sum(entry.bytes for entry in entries)
        shards = cut(entries, lambda entry: entry.bytes, max_shard_bytes) if published.transformers else [entries]
        self._files = {"model.safetensors": shards[0]}
        if len(shards) > 1:  # named as in transformers
            number = len(shards)
            self._files = {f"model-{i:05}-of-{number:05}.safetensors": s for i, s in enumerate(shards, start=1)}

    def write(
        self,
        folder: Path,
        tensors: Iterable[tuple[str, Tensor | LazyTensor]],
        wrote: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Write (name in the model, tensor) pairs, in any order.

        Names that are not published are skipped. `wrote` gets the number of bytes after each write. Raises RunFailed if
        the files cannot be read back.
        """
        parts = {part.source: part for part in self.published.parts}
        files = {name: TensorFile(folder / name, entries) for name, entries in self._files.items()}
        where = {entry.name: file for file in files.values() for entry in file.entries}
        with ThreadPoolExecutor(THREADS) as pool:
            running: deque[Future[int]] = deque()

            def wait(most: int) -> None:
                while len(running) > most:
                    wrote(running.popleft().result())

            for name, tensor in tensors:
                if name not in parts:
                    continue
                for output, content in self._outputs(parts.pop(name), tensor).items():
                    for piece in where[output].pieces(output, content):
                        running.append(pool.submit(piece))
                        wait(2 * THREADS)
                    # Pieces of a tensor in memory keep it alive until they are written. Lazy tensors have no memory of
                    # their own.
                    if isinstance(content, Tensor):  # free its memory before the next tensor is read
                        wait(0)
            wait(0)
        assert not parts, f"no tensors for {', '.join(parts)}"
        for name, entries in self._files.items():
            check_file(folder / name, entries)
        if self.published.transformers:
            self._write_configs(folder)

    def _outputs(self, part: PublishedTensor, tensor: Tensor | LazyTensor) -> Mapping[str, Tensor | LazyTensor]:
        """Return the tensors that the files store for one tensor of the model, by name.

        If the model's tensor cannot be written in pieces, it is read now.
        """
        if isinstance(tensor, LazyTensor):
            if part.unchanged and tensor.in_pieces:
                return dict.fromkeys(part.outputs, tensor)
            # 16 bits halve the memory, but fp16's range is checked in float32
            tensor = tensor.read(torch.bfloat16 if self._dtype == torch.bfloat16 else torch.float32)
        return self.published.tensors(part, tensor)

    def _write_configs(self, folder: Path) -> None:
        model = cast("PreTrainedModel", self.published.model)
        config = model.config
        config.dtype = self._dtype
        # `PreTrainedModel.save_pretrained` sets this key, but `config.save_pretrained` does not.
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        if len(self._files) > 1:
            total = {"total_parameters": model.num_parameters(), "total_size": self.bytes}
            where = {entry.name: file for file, entries in self._files.items() for entry in entries}
            index = {"metadata": total, "weight_map": dict(sorted(where.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class PublishedTensor:
    """One tensor of the model, and the tensors for it in the files."""

    source: str  # its name in the model's state_dict
    outputs: dict[str, tuple[int, ...]]  # names in the files, and shapes
    unchanged: bool = True  # the only output has the same numbers


class PublishedModel:
    """The published form of a model on meta: transformers' format, or its state_dict."""

    def __init__(self, model: nn.Module, transformers: bool):
        self.model, self.transformers = model, transformers
        self._converts = False
        left_out: set[str] = set()
        if transformers:  # transformers saves neither tied tensors nor tensors that it recreates on loading
            published = cast("PreTrainedModel", model)
            left_out = {*published.all_tied_weights_keys, *(published._keys_to_ignore_on_save or ())}
        state = {name: t for name, t in model.state_dict().items() if name not in left_out}
        self.parts = [PublishedTensor(source=name, outputs={name: tuple(t.shape)}) for name, t in state.items()]
        if transformers:
            self._convert(state)

    def tensors(self, part: PublishedTensor, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors that the files store for a part, by name."""
        return self._converted({part.source: tensor}) if self._converts else {part.source: tensor}

    def _convert(self, state: dict[str, Tensor]) -> None:
        """Switch to the names that transformers uses in files, if they differ.

        For example, files have one tensor per expert of a mixture. If a published tensor would need several of the
        model's tensors, keep the model's names. transformers can load these too.
        """
        together = self._converted(dict(state))
        if together.keys() == state.keys() and all(together[name] is state[name] for name in state):
            return
        try:
            parts = [(name, self._converted({name: tensor})) for name, tensor in state.items()]
        except (RuntimeError, ValueError, IndexError, KeyError):
            return
        # The names are usable only if each file tensor comes from exactly one model tensor, in the same shape as in a
        # conversion of all tensors together. Otherwise two tensors would have to be in memory at once, or a fusion
        # would be missed.
        times = Counter(name for _, outputs in parts for name in outputs)
        alone = {name: t.shape for _, outputs in parts for name, t in outputs.items()}
        if max(times.values()) == 1 and alone == {name: t.shape for name, t in together.items()}:
            self._converts = True
            self.parts = [
                PublishedTensor(
                    source=source,
                    outputs={name: tuple(t.shape) for name, t in outputs.items()},
                    unchanged=[id(t) for t in outputs.values()] == [id(state[source])],
                )
                for source, outputs in parts
            ]

    def _converted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(cast("PreTrainedModel", self.model), tensors)
