"""Save and load a script's fake tensors. The files contain shapes, dtypes and known values."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import EllipsisType
from typing import IO, cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map

from zerofit.simulate.fakes.patches import PlainContext, replace_in
from zerofit.simulate.script.files import ScratchFiles
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.simulate.script.value_tracker import HOLDS_NOTHING_BYTES
from zerofit.simulate.script.values import keep, known_value

_MARK = b"zerofit: tensors without values\n"  # a file begins with it
_VOCABULARY = ("vocab", "merges")  # files of a tokenizer's model
_torch_save: Callable[..., None] = torch.save
_torch_load: Callable[..., object] = torch.load
Replaced = list[tuple[object, object]]  # functions, and the functions that replace them
StrPath = str | os.PathLike[str]
# Of the files that are being loaded: the tracker, and the device for a saved device. pickle passes no such context to
# `_restored` and `_real`. It is a stack, since an object may load another file while it is restored.
_loading: list[tuple[ScriptTracker, Callable[[torch.device], torch.device]]] = []


@dataclass(eq=False)
class _SavedStorage:
    """The storage behind saved tensors. A view saves and loads its full storage."""

    elements: int
    dtype: torch.dtype
    device: str

    @cached_property
    def loaded(self) -> Tensor:
        """The storage's elements as a tensor, which is allocated once for all views."""
        meter, place = _loading[-1]
        made = torch.empty(self.elements, dtype=self.dtype, device=place(torch.device(self.device)))
        if isinstance(made, FakeTensor):
            return made
        fake = meter.fakes.from_tensor(made)
        meter.adopt(made, fake)  # of the host: without values, too
        return fake


def _restored(
    storage: _SavedStorage,
    view: tuple[tuple[int, ...], tuple[int, ...], int],
    is_parameter: bool,
    grad: bool,
    known: bytes | None,
) -> Tensor:
    """Return a saved tensor: a view of its storage with this shape, stride and offset."""
    elements = storage.loaded
    with torch.no_grad():
        tensor = elements if tuple(elements.shape) == view[0] else elements.as_strided(*view)
    if known is not None and isinstance(tensor, FakeTensor):
        keep(tensor, _value(known))
    return nn.Parameter(tensor, requires_grad=grad) if is_parameter else tensor.requires_grad_(grad)


class _Pickler(pickle.Pickler):
    """Writes fake tensors as shapes and known values, and real tensors with their values."""

    def __init__(self, file: IO[bytes]):
        super().__init__(file, protocol=4)
        self.fakes = 0
        self._storages: dict[int, _SavedStorage] = {}

    def reducer_override(self, obj: object) -> object:
        # a function that restores the tensor; pickle calls it with these arguments
        if isinstance(obj, FakeTensor):
            self.fakes += 1
            storage = obj.untyped_storage()
            saved = _SavedStorage(storage.nbytes() // obj.itemsize, obj.dtype, str(obj.device))
            saved = self._storages.setdefault(storage._cdata, saved)  # views of a storage share it in the file, too
            view = tuple(obj.shape), obj.stride(), obj.storage_offset()
            value = known_value(obj)
            known = None if value is None else _bytes_of(value)
            return _restored, (saved, view, isinstance(obj, nn.Parameter), obj.requires_grad, known)
        if type(obj) is Tensor:
            return _real, (_bytes_of(obj),)
        return NotImplemented


def _bytes_of(tensor: Tensor) -> bytes:
    file = io.BytesIO()
    _torch_save(tensor, file)
    return file.getvalue()


def _real(content: bytes) -> Tensor:
    """Return a saved real tensor on its new device."""
    value = _value(content)
    return value.to(_loading[-1][1](value.device))  # on the simulated device it becomes a fake


def _value(content: bytes) -> Tensor:
    with unset_fake_temporarily():  # else torch would load no values
        return torch.load(io.BytesIO(content), weights_only=True)


def _write(value: object, file: IO[bytes]) -> bool:
    """Write `value` in zerofit's format if it contains fake tensors.

    Return whether it was written.
    """
    # only pickling finds fakes inside of any object, so it is done even if torch.save pickles the object again
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(value)
    if pickler.fakes:
        file.write(_MARK + content.getvalue())
    return bool(pickler.fakes)


def _read(file: IO[bytes], meter: ScriptTracker, map_location: MapLocation) -> object:
    """Return the object that `_write` wrote. The file must be positioned after the mark."""
    _loading.append((meter, _placed(map_location)))
    try:
        return pickle.load(file)
    finally:
        _loading.pop()


def _is_saved(path: StrPath) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_MARK)) == _MARK


def _placed(map_location: MapLocation) -> Callable[[torch.device], torch.device]:
    """Return a function from a tensor's saved device to its new one.

    `map_location`: as in torch.load.
    """

    def place(saved: torch.device) -> torch.device:
        if map_location is None:
            return saved
        if isinstance(map_location, Mapping):
            return torch.device(map_location.get(str(saved), saved))
        if callable(map_location):
            on_host = _PlacedStorage(torch.device("cpu"))  # torch loads on the host first
            storage = map_location(on_host, str(saved))
            return saved if storage is None else torch.device(storage.device)
        return torch.device(map_location)

    return place


class _PlacedStorage:
    """A storage for a function that chooses devices.

    An example of such a function is `lambda storage, location: storage.cuda(0)`.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def cuda(self, device: int | str | torch.device | None = None, **_: object) -> _PlacedStorage:
        return _PlacedStorage(torch.device("cuda" if device is None else device))

    def cpu(self) -> _PlacedStorage:
        return _PlacedStorage(torch.device("cpu"))


_Device = torch.device | str | int
MapLocation = Callable[[_PlacedStorage, str], _PlacedStorage | None] | Mapping[str, _Device] | _Device | None


def _opened(file: StrPath | IO[bytes], mode: str) -> AbstractContextManager[IO[bytes]]:
    is_path = isinstance(file, (str, os.PathLike))
    return cast("IO[bytes]", open(file, mode)) if is_path else nullcontext(file)


def saved_by_torch(meter: ScriptTracker, files: ScratchFiles) -> Replaced:
    """Save and load objects with fake tensors in zerofit's own format. (torch.save, torch.load)

    Files in other formats are loaded with their values.
    """

    def save(obj: object, f: StrPath | IO[bytes], *args: object, **kwargs: object) -> None:
        with _opened(f, "wb") as file:
            try:
                written = _write(obj, file)
            except Exception as error:  # an object of another library refuses to be pickled
                meter.note(f"torch.save(): writes nothing ({type(error).__name__}: {error})", here=True)
                return
            if not written:
                _torch_save(obj, file, *args, **kwargs)

    def load(f: StrPath | IO[bytes], map_location: MapLocation = None, *args: object, **kwargs: object) -> object:
        with _opened(f, "rb") as file:
            start = file.tell()
            if file.read(len(_MARK)) == _MARK:
                return _read(file, meter, map_location)
            file.seek(start)
            # mmap keeps a large file out of host memory; torch maps only zip files that it opens by path
            is_path = isinstance(f, (str, os.PathLike))
            large = is_path and os.path.getsize(f) >= HOLDS_NOTHING_BYTES and zipfile.is_zipfile(file)
            file.seek(start)
            source = os.fspath(files.to_read(f)) if is_path and large else file
            saved_on: dict[int, torch.device] = {}  # address of a storage -> the device it was saved on

            def leave_on_host(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
                saved_on[storage._cdata] = torch.device(device)
                return storage

            # with a fake mode, torch would load no values (torch/serialization.py: `detect_fake_mode` in _load)
            with unset_fake_temporarily():
                value = _torch_load(source, leave_on_host, *args, **{**kwargs, "mmap": large})

        place = _placed(map_location)
        moved: dict[int, Tensor] = {}  # address of a storage -> its copy, which all views share

        def move(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
                return leaf
            storage = leaf.untyped_storage()
            device = place(saved_on.get(storage._cdata, leaf.device))
            if device == leaf.device:
                return leaf
            with torch.no_grad():
                if storage._cdata not in moved:
                    moved[storage._cdata] = leaf.new_empty(0).set_(storage).to(device)
                view = moved[storage._cdata].as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
            if isinstance(leaf, nn.Parameter):
                return nn.Parameter(view, leaf.requires_grad)
            return view.requires_grad_(leaf.requires_grad)

        return tree_map(move, value)

    return [(_torch_save, save), (_torch_load, load)]


def replace_everywhere(pairs: Replaced) -> None:
    """Replace functions in every loaded module that has them as attributes, except zerofit's."""
    # one pass for all pairs: it touches every attribute, so the OS copies memory that a fork shares
    functions = {id(original): function for original, function in pairs}
    for module in list(sys.modules.values()):
        for name in [name for name, value in list(vars(module).items()) if id(value) in functions]:
            if not module.__name__.startswith("zerofit."):
                replace_in(module, name, functions[id(vars(module)[name])])


class _Safetensors(PlainContext):
    """A file of tensors without values, as safetensors.safe_open opens it."""

    def __init__(self, path: StrPath, meter: ScriptTracker, device: _Device):
        with open(path, "rb") as file:
            file.seek(len(_MARK))
            content = cast("tuple[dict[str, Tensor], dict[str, str] | None]", _read(file, meter, device))
        self._tensors, self._metadata = content

    def keys(self) -> list[str]:
        return list(self._tensors)

    offset_keys = keys

    def metadata(self) -> dict[str, str] | None:
        return self._metadata

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._tensors[name])


class _Slice:
    """A tensor of a file, as safetensors' get_slice returns it."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return next(name for name, dtype in safetensors.torch._TYPES.items() if dtype == self._tensor.dtype)

    def __getitem__(self, index: EllipsisType | int | slice | tuple[int | slice, ...]) -> Tensor:
        return self._tensor[index]


def saved_by_safetensors(meter: ScriptTracker, files: ScratchFiles) -> Replaced:
    """Save and load fake tensors as `saved_by_torch` does.

    (safetensors.safe_open; safetensors.torch.save_file, load_file)
    """
    open_file = cast("Callable[..., object]", safetensors.safe_open)
    save: Callable[..., None] = safetensors.torch.save_file
    load: Callable[..., dict[str, Tensor]] = safetensors.torch.load_file

    def safe_open(filename: StrPath, framework: str = "pt", device: _Device = "cpu", **kwargs: object) -> object:
        if _is_saved(filename):
            return _Safetensors(filename, meter, device)
        return open_file(files.to_read(filename), framework=framework, device=device, **kwargs)

    def save_file(tensors: Mapping[str, Tensor], filename: StrPath, metadata: dict[str, str] | None = None) -> None:
        with open(filename, "wb") as file:
            written = _write((dict(tensors), metadata), file)
        if not written:
            save(tensors, files.to_write(filename), metadata)

    def load_file(filename: StrPath, device: _Device = "cpu", **kwargs: object) -> dict[str, Tensor]:
        if _is_saved(filename):
            return _Safetensors(filename, meter, device)._tensors
        return load(files.to_read(filename), device, **kwargs)

    return [(open_file, safe_open), (save, save_file), (load, load_file)]


def saved_models() -> None:
    """Save a model's configuration without weights.

    `pretrained.pretrained` builds the model from this file. (transformers.PreTrainedModel.save_pretrained)
    """
    from transformers import PreTrainedModel

    def save_pretrained(self: PreTrainedModel, save_directory: StrPath, *_: object, **__: object) -> None:
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.config.architectures = [type(self).__name__.removeprefix("FSDP")]  # fully_shard renames the class
        self.config.dtype = self.dtype
        self.config.save_pretrained(folder)
        if self.can_generate():
            self.generation_config.save_pretrained(folder)

    replace_in(PreTrainedModel, "save_pretrained", save_pretrained)


def saved_tokenizers(scratch: ScratchFiles) -> None:
    """Redirect the files that compiled code of tokenizers reads and writes.

    (tokenizers.Tokenizer.save, from_file, train; Model.save; BPE.from_file, read_file and those of other models)
    """
    from tokenizers import Tokenizer, models

    original, train = Tokenizer.save, cast("Callable[..., None]", Tokenizer.train)
    save_model = cast("Callable[..., list[str]]", models.Model.save)

    def save(self: Tokenizer, path: str, pretty: bool = True) -> None:
        original(self, scratch.to_write(path, update=False), pretty)

    def trained(self: Tokenizer, files: str | Sequence[str], trainer: object = None) -> None:
        texts = [files] if isinstance(files, str) else files
        train(self, list(map(scratch.to_read, texts)), trainer)

    # the returned paths begin with the folder as the script named it
    def saved(self: models.Model, folder: str, *args: object, **kwargs: object) -> list[str]:
        written = save_model(self, scratch.to_write(folder), *args, **kwargs)
        return [os.path.join(folder, os.path.basename(path)) for path in written]

    def reading(read: Callable[..., object], number: int) -> Callable[..., object]:
        """Return `read`, whose first `number` arguments are paths, for the script's paths."""

        def call(*args: str, **kwargs: str) -> object:
            named = {name: scratch.to_read(value) if name in _VOCABULARY else value for name, value in kwargs.items()}
            return read(*map(scratch.to_read, args[:number]), *args[number:], **named)

        return call

    replace_in(Tokenizer, "from_file", staticmethod(scratch.redirected(Tokenizer.from_file, scratch.to_read)))
    replace_in(Tokenizer, "save", save)
    replace_in(Tokenizer, "train", trained)
    replace_in(models.Model, "save", saved)
    for kind, number in ((models.BPE, 2), (models.WordPiece, 1), (models.WordLevel, 1)):
        for name in ("from_file", "read_file"):
            replace_in(kind, name, staticmethod(reading(getattr(kind, name), number)))


def saved_checkpoints() -> Replaced:
    """Let a script load the checkpoint that it saved.

    Loading changes nothing, since fake tensors have no values.
    (deepspeed.DeepSpeedEngine.save_checkpoint, load_checkpoint; torch.distributed.checkpoint.save, async_save, load)
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    states: dict[str, dict[str, object]] = {}  # folder of a saved checkpoint -> DeepSpeed's client state
    load_engine = cast("Callable[..., object]", DeepSpeedEngine.load_checkpoint)
    load_shards: Callable[..., None] = state_dict_loader.load

    def folder_of(folder: StrPath, tag: object = "") -> str:
        return os.path.abspath(os.path.join(folder, str(tag)))

    def save_engine(
        self: DeepSpeedEngine,
        save_dir: StrPath,
        tag: object = None,
        client_state: Mapping[str, object] | None = None,
        *_: object,
        **__: object,
    ) -> bool:
        tag = tag or f"global_step{self.global_steps}"
        os.makedirs(folder_of(save_dir, tag), exist_ok=True)
        Path(save_dir, "latest").write_text(str(tag))
        states[folder_of(save_dir, tag)] = dict(client_state or {})  # a script reads its own counters from it
        return True

    def load(self: DeepSpeedEngine, load_dir: StrPath, tag: object = None, *args: object, **kwargs: object) -> object:
        latest = Path(load_dir, "latest")
        name = tag or (latest.read_text().strip() if latest.is_file() else "")
        folder = folder_of(load_dir, name)
        if folder in states:
            return folder, dict(states[folder])
        return load_engine(self, load_dir, tag, *args, **kwargs)

    def save_shards(state_dict: object, *, checkpoint_id: StrPath | None = None, **_: object) -> None:
        if checkpoint_id is not None:
            os.makedirs(checkpoint_id, exist_ok=True)
            states[folder_of(checkpoint_id)] = {}

    def load_sharded(state_dict: object, *, checkpoint_id: StrPath | None = None, **kwargs: object) -> None:
        if checkpoint_id is None or folder_of(checkpoint_id) not in states:
            load_shards(state_dict, checkpoint_id=checkpoint_id, **kwargs)

    replace_in(DeepSpeedEngine, "save_checkpoint", save_engine)
    replace_in(DeepSpeedEngine, "load_checkpoint", load)
    return [(state_dict_saver.save, save_shards), (load_shards, load_sharded)]
