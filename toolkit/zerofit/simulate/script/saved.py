"""Save and load a script's fake tensors. The files contain shapes, dtypes and known values."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.script.files import ScratchFiles
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.simulate.script.value_tracker import HOLDS_NOTHING_BYTES
from zerofit.simulate.script.values import keep, known_value

_MARK = b"zerofit: tensors without values\n"  # a file begins with it
_torch_save, _torch_load = torch.save, torch.load
Replaced = list[tuple[object, object]]  # functions, and the functions that replace them
# of the files that are being loaded: the tracker, and the device for a saved device
_loading: list[tuple[ScriptTracker, Callable[[torch.device], torch.device]]] = []


@dataclass(eq=False)
class _SavedStorage:
    """The storage behind saved tensors. A view saves and loads its full storage."""

    elements: int
    dtype: torch.dtype
    device: str

    def loaded(self) -> Tensor:
        """Return the storage's elements as a tensor, which is allocated once for all views."""
        if "_made" not in vars(self):
            meter, place = _loading[-1]
            made = torch.empty(self.elements, dtype=self.dtype, device=place(torch.device(self.device)))
            self._made = made if isinstance(made, FakeTensor) else meter.fakes.from_tensor(made)
            if made is not self._made:
                meter.adopt(made, self._made)  # of the host: without values, too
        return self._made


def _restored(storage: _SavedStorage, view: tuple[Any, Any, int], is_parameter: bool, grad: bool, known: Any) -> Any:
    """Return a saved tensor: a view of its storage with this shape, stride and offset."""
    whole = storage.loaded()
    with torch.no_grad():
        tensor = whole if tuple(whole.shape) == view[0] else whole.as_strided(*view)
    if known is not None and isinstance(tensor, FakeTensor):
        keep(tensor, _value(known))
    return nn.Parameter(tensor, requires_grad=grad) if is_parameter else tensor.requires_grad_(grad)


class _Pickler(pickle.Pickler):
    """Writes fake tensors as shapes and known values, and real tensors with their values."""

    def __init__(self, file: Any):
        super().__init__(file, protocol=4)
        self.fakes = 0
        self._storages: dict[int, _SavedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FakeTensor):
            self.fakes += 1
            storage = obj.untyped_storage()
            known = known_value(obj)
            saved = self._storages.setdefault(
                storage._cdata, _SavedStorage(storage.nbytes() // obj.itemsize, obj.dtype, str(obj.device))
            )
            view = tuple(obj.shape), obj.stride(), obj.storage_offset()
            is_parameter = isinstance(obj, nn.Parameter)
            return _restored, (
                saved,
                view,
                is_parameter,
                obj.requires_grad,
                None if known is None else _bytes_of(known),
            )
        if type(obj) is Tensor:
            return _real, (_bytes_of(obj),)
        return NotImplemented


def _bytes_of(tensor: Tensor) -> bytes:
    file = io.BytesIO()
    _torch_save(tensor, file)
    return file.getvalue()


def _real(content: bytes) -> Tensor:
    """Return a saved real tensor on its new device. On the simulated device it becomes a fake."""
    value = _value(content)
    return value.to(_loading[-1][1](value.device))


def _value(content: bytes) -> Tensor:
    with unset_fake_temporarily():  # else torch would load no values
        return _torch_load(io.BytesIO(content), weights_only=True)


def _write(value: object, file: Any) -> bool:
    """Write `value` in zerofit's format if it contains fake tensors. Return whether it was written."""
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(value)
    if pickler.fakes:
        file.write(_MARK + content.getvalue())
    return bool(pickler.fakes)


def _read(file: Any, meter: ScriptTracker, map_location: Any) -> Any:
    """Return the object that `_write` wrote. The file must be positioned after the mark at its beginning."""
    _loading.append((meter, _placed(map_location)))
    try:
        return pickle.load(file)
    finally:
        _loading.pop()


def _is_saved(path: Any) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_MARK)) == _MARK


def _placed(map_location: Any) -> Callable[[torch.device], torch.device]:
    """Return a function from a tensor's saved device to its new one. `map_location`: as in torch.load."""

    def place(saved: torch.device) -> torch.device:
        if map_location is None:
            return saved
        if isinstance(map_location, Mapping):
            return torch.device(map_location.get(str(saved), saved))
        if callable(map_location):
            found: Any = map_location(_PlacedStorage(torch.device("cpu")), str(saved))  # torch loads on the host first
            return saved if found is None else torch.device(found.device)
        return torch.device(map_location)

    return place


class _PlacedStorage:
    """A storage for a function that chooses devices, such as `lambda storage, location: storage.cuda(0)`."""

    def __init__(self, device: torch.device):
        self.device = device

    def cuda(self, device: Any = None, **_: object) -> _PlacedStorage:
        return _PlacedStorage(torch.device("cuda" if device is None else device))

    def cpu(self) -> _PlacedStorage:
        return _PlacedStorage(torch.device("cpu"))


@contextmanager
def _opened(file: Any, mode: str) -> Iterator[Any]:
    if isinstance(file, (str, os.PathLike)):
        with open(file, mode) as opened:
            yield opened
    else:
        yield file


def saved_by_torch(meter: ScriptTracker, files: ScratchFiles) -> Replaced:
    """Save and load objects with fake tensors in zerofit's own format. (torch.save, torch.load)

    Files in other formats are loaded with their values. While a fake mode is active, torch itself loads no values.
    (torch/serialization.py: `detect_fake_mode` in _load)
    """

    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        with _opened(f, "wb") as file:
            try:
                written = _write(obj, file)
            except Exception as error:  # an object of another library refuses to be pickled
                meter.note(f"torch.save(): writes nothing ({type(error).__name__}: {error})", here=True)
                return
            if not written:
                _torch_save(obj, file, *args, **kwargs)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        with _opened(f, "rb") as file:
            start = file.tell()
            if file.read(len(_MARK)) == _MARK:
                return _read(file, meter, map_location)
            file.seek(start)
            named = isinstance(f, (str, os.PathLike))
            large = named and os.path.getsize(f) >= HOLDS_NOTHING_BYTES and zipfile.is_zipfile(file)
            file.seek(start)
            saved_on: dict[int, torch.device] = {}

            def kept(storage: Any, where: str) -> Any:
                saved_on[storage._cdata] = torch.device(where)
                return storage

            source = os.fspath(files.to_read(f)) if large else file
            with unset_fake_temporarily():
                value = _torch_load(source, kept, *args, **{**kwargs, "mmap": large})

        place = _placed(map_location)
        moved: dict[int, Tensor] = {}  # address of a storage -> its copy, which all views share

        def placed(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                return tensor
            storage = tensor.untyped_storage()
            to = place(saved_on.get(storage._cdata, tensor.device))
            if to == tensor.device:
                return tensor
            with torch.no_grad():
                if storage._cdata not in moved:
                    moved[storage._cdata] = tensor.new_empty(0).set_(storage).to(to)
                view = moved[storage._cdata].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(view, tensor.requires_grad)
            return view.requires_grad_(tensor.requires_grad)

        return tree_map(placed, value)

    return [(_torch_save, save), (_torch_load, load)]


def replace_everywhere(pairs: Replaced) -> None:
    """Replace functions in every loaded module that has them as attributes, except zerofit's.

    One pass replaces all pairs. Each pass touches every attribute, so the OS copies memory that a fork shares.
    """
    functions = {id(original): function for original, function in pairs}
    for module in list(sys.modules.values()):
        for name in [name for name, value in list(vars(module).items()) if id(value) in functions]:
            if not module.__name__.startswith("zerofit."):
                replace_in(module, name, functions[id(vars(module)[name])])


class _Safetensors:
    """A file of tensors without values, as safetensors.safe_open opens it."""

    def __init__(self, path: Any, meter: ScriptTracker, device: Any):
        with open(path, "rb") as file:
            file.seek(len(_MARK))
            self._tensors, self._metadata = _read(file, meter, device)

    def __enter__(self) -> _Safetensors:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._tensors)

    offset_keys = keys

    def metadata(self) -> Any:
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

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


def saved_by_safetensors(meter: ScriptTracker, files: ScratchFiles) -> Replaced:
    """Save and load fake tensors as `saved_by_torch` does.

    (safetensors.safe_open; safetensors.torch.save_file, load_file)
    """
    opened, save, load = safetensors.safe_open, safetensors.torch.save_file, safetensors.torch.load_file

    def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any) -> Any:
        if _is_saved(filename):
            return _Safetensors(filename, meter, device)
        return opened(files.to_read(filename), framework=framework, device=device, **kwargs)

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        with open(filename, "wb") as file:
            written = _write((dict(tensors), metadata), file)
        if not written:
            save(tensors, files.to_write(filename), metadata)

    def load_file(filename: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        if _is_saved(filename):
            return _Safetensors(filename, meter, device)._tensors
        return load(files.to_read(filename), device, **kwargs)

    return [(opened, safe_open), (save, save_file), (load, load_file)]


def saved_models() -> None:
    """Save a model's configuration without weights. `from_pretrained` builds the model from this file.

    (transformers.PreTrainedModel.save_pretrained)
    """
    from transformers import PreTrainedModel

    def save_pretrained(self: Any, save_directory: Any, *_: object, **__: object) -> None:
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.config.architectures = [type(self).__name__]
        self.config.dtype = self.dtype
        self.config.save_pretrained(folder)
        if self.can_generate():
            self.generation_config.save_pretrained(folder)

    replace_in(PreTrainedModel, "save_pretrained", save_pretrained)


def saved_tokenizers(files: ScratchFiles) -> None:
    """Redirect the files that compiled code of tokenizers reads and writes. (Tokenizer.save, from_file)"""
    from tokenizers import Tokenizer

    replace_in(Tokenizer, "from_file", staticmethod(files.redirected(Tokenizer.from_file, files.to_read)))
    original = Tokenizer.save

    def save(self: Any, path: Any, pretty: bool = True) -> None:
        original(self, files.to_write(path, update=False), pretty)

    replace_in(Tokenizer, "save", save)


def saved_checkpoints() -> Replaced:
    """Let a script load the checkpoint that it saved. Loading changes nothing, since fake tensors have no values.

    (deepspeed.DeepSpeedEngine.save_checkpoint, load_checkpoint; torch.distributed.checkpoint.save, async_save, load)
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    states: dict[str, Any] = {}  # file of ours in a checkpoint -> DeepSpeed's client state
    load_engine, load_shards = DeepSpeedEngine.load_checkpoint, state_dict_loader.load

    def place(folder: Any, tag: Any = "") -> str:
        return os.path.abspath(os.path.join(folder, str(tag)))

    def save_engine(self: Any, save_dir: Any, tag: Any = None, client_state: Any = None, **_: object) -> bool:
        tag = tag or f"global_step{self.global_steps}"
        os.makedirs(place(save_dir, tag), exist_ok=True)
        Path(save_dir, "latest").write_text(str(tag))
        states[place(save_dir, tag)] = dict(client_state or {})
        return True

    def load(self: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        latest = Path(load_dir, "latest")
        name = tag or (latest.read_text().strip() if latest.is_file() else "")
        if place(load_dir, name) in states:
            return place(load_dir, name), dict(states[place(load_dir, name)])
        return load_engine(self, load_dir, tag, *args, **kwargs)

    def save_shards(state_dict: Any, *, checkpoint_id: Any = None, **_: object) -> None:
        if checkpoint_id is not None:
            os.makedirs(checkpoint_id, exist_ok=True)
            states[place(checkpoint_id)] = None

    def load_sharded(state_dict: Any, *, checkpoint_id: Any = None, **kwargs: Any) -> None:
        if checkpoint_id is None or place(checkpoint_id) not in states:
            load_shards(state_dict, checkpoint_id=checkpoint_id, **kwargs)

    replace_in(DeepSpeedEngine, "save_checkpoint", save_engine)
    replace_in(DeepSpeedEngine, "load_checkpoint", load)
    return [(state_dict_saver.save, save_shards), (load_shards, load_sharded)]
