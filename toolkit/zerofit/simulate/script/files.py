"""Redirect a script's writes to a scratch folder.

Its later reads find the written files there. Experiment trackers and the hub get nothing.
"""

from __future__ import annotations

import builtins
import errno
import functools
import importlib
import importlib.util
import multiprocessing
import multiprocessing.context
import os
import shutil
import sqlite3
import sqlite3.dbapi2
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import reduce
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import multiprocess  # of dill's authors; datasets needs it and pyarrow
import pyarrow
from numpy.lib import _datasource  # pyright: ignore[reportAttributeAccessIssue] - private

from zerofit.simulate.fakes.patches import PlainContext, replace_in
from zerofit.simulate.script.tracker import ScriptTracker

_CACHES = ("HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")  # variables that name cache folders
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READING = ("stat", "lstat", "access", "readlink", "statvfs")
_UPDATING = ("chmod", "chown", "utime", "truncate")
# module -> attributes that save on several ranks together, or on the hub
SAVERS = {
    "transformers.utils.hub": ("PushToHubMixin.push_to_hub",),
    "deepspeed.runtime.engine": ("DeepSpeedEngine.save_16bit_model",),
    "huggingface_hub": ("HfApi.create_repo", "HfApi.upload_folder", "HfApi.upload_file", "HfApi.create_commit"),
    "torch.distributed.checkpoint": ("async_save",),
}
# the same of packages that a script may import
OF_PACKAGES = {
    "lightning.fabric.plugins.io.torch_io": ("TorchCheckpointIO.save_checkpoint",),
    "lightning_fabric.plugins.io.torch_io": ("TorchCheckpointIO.save_checkpoint",),
}
# Functions whose compiled code opens a path: module, function, position of the path.
_COMPILED_WRITING = (
    ("torch.jit", "save", 1),
    ("torch._C", "PyTorchFileWriter.__init__", 1),
    ("torch.autograd.profiler", "profile.export_chrome_trace", 1),
    ("torchvision.io.image", "write_file", 0),
    ("pyarrow.parquet.core", "ParquetWriter.__init__", 1),
)
_COMPILED_READING = (
    ("torch.jit", "load", 0),
    ("torch._C", "PyTorchFileReader.__init__", 1),
    ("torchvision.io.image", "read_file", 0),
    ("pyarrow.parquet.core", "_resolve_filesystem_and_path", 0),
)
# environment variables that turn trackers off
TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
}


if hasattr(os, "listxattr"):  # on Linux; shutil.copy2 calls it
    _READING, _UPDATING = (*_READING, "listxattr", "getxattr"), (*_UPDATING, "setxattr", "removexattr")
_OWN = ("open", "mkdir", "remove", "unlink", "rmdir", "rename", "replace", "link", "symlink")
_OWN += ("listdir", "scandir", "chdir", "getcwd")
_os: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in (*_READING, *_UPDATING, *_OWN)}
_open: Callable[..., object] = builtins.open

FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
ScriptPath = FilePath | int | None  # int: a file descriptor
_Path = TypeVar("_Path", bound=ScriptPath)
_Result = TypeVar("_Result")


# What a path of the script means. S is the scratch folder:
#
#   S/home/me/out/log.txt exists   the script wrote it: this file
#   /home/me/out is in `_gone`     the script removed it: the user's files in it are invisible
#   otherwise                      the user's own file, which is copied to S before a change
#
# Other compiled code that opens files itself (HDF5, LMDB) sees and changes the user's files.
class ScratchFiles:
    """The files that a script wrote, changed or removed."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="files-")
        self._here = os.getcwd()  # as the script names it; the process may be in the scratch folder
        self._gone = set[str]()
        self._own = threading.local()  # .busy: whether this class itself calls os in this thread
        caches = (os.path.abspath(os.environ[name]) for name in _CACHES if os.environ.get(name))
        # Caches are shared between runs, so a download is kept. TMPDIR is removed after the simulation
        # (`forecast.processes`).
        places = (os.path.expanduser("~/.cache"), tempfile.gettempdir(), "/dev", "/proc", "/sys", *caches)
        self._direct = tuple(place + os.sep for place in places)

    def to_read(self, path: _Path) -> _Path | str:
        """Return the file to read at a path: the scratch file if it exists, else the user's."""
        full = self._full(path)
        if full is None:
            return path
        with self._busy():
            scratch = self._folder + full
            return scratch if os.path.lexists(scratch) or self._is_gone(full) else full

    def to_write(self, path: _Path, *, update: bool = True) -> _Path | str:
        """Return the scratch file to write for a path.

        With `update`, it begins as a copy of the user's file.
        """
        full = self._full(path)
        if full is None:
            return path
        with self._busy():
            scratch, visible = self._folder + full, not self._is_gone(full) and os.path.exists(full)
            if os.path.lexists(scratch):
                return scratch
            if visible and not os.path.isdir(full) and not os.path.isfile(full):
                return path  # a pipe or a device
            if not visible:
                parent = os.path.dirname(full)
                parent_is_visible = os.path.isdir(parent) and not self._is_gone(parent)
                if not parent_is_visible and not os.path.isdir(self._folder + parent):
                    return scratch  # opening it raises the usual error
            os.makedirs(scratch if visible and os.path.isdir(full) else os.path.dirname(scratch), exist_ok=True)
            if visible and update and os.path.isfile(full):
                if os.path.getsize(full) > shutil.disk_usage(self._folder).free:
                    # the script must neither change the user's file nor fill a disk
                    raise OSError(errno.ENOSPC, f"no space in {self._folder} for the simulation's copy", full)
                shutil.copy2(full, scratch)
            return scratch

    def open(self, file: ScriptPath, mode: str = "r", *args: object, **kwargs: object) -> object:
        """Open a file like Python's open()."""
        # mode "x" fails if the file exists: the user's own file raises this error, too, and is not copied for it
        reads = not set(mode) & set("wax+") or ("x" in mode and self._exists(file))
        actual = self.to_read(file) if reads else self.to_write(file, update="w" not in mode)
        return _open(actual, mode, *args, **kwargs)

    def descriptor(self, path: ScriptPath, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Open a file like os.open()."""
        if dir_fd is not None:
            return _os["open"](path, flags, mode, dir_fd=dir_fd)
        reads = not flags & _WRITING or (flags & os.O_EXCL and self._exists(path))
        actual = self.to_read(path) if reads else self.to_write(path, update=not flags & os.O_TRUNC)
        return _os["open"](actual, flags, mode)

    def mkdir(self, path: FilePath, *args: object, **kwargs: object) -> None:
        """Make a folder."""
        # a folder that exists is not written to, so that os raises its usual error
        actual = self.to_read(path) if self._exists(path) else self.to_write(path)
        _os["mkdir"](actual, *args, **kwargs)

    def remove(self, path: FilePath) -> None:
        """Remove a file. The user's own file stays."""
        self._remove(path, "remove")

    def rmdir(self, path: FilePath) -> None:
        """Remove an empty folder. The user's own folder stays."""
        # the scratch folder may be empty although the user's folder is not
        if self._full(path) is not None and self.listdir(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(path))
        self._remove(path, "rmdir")

    def replace(self, src: FilePath, dst: FilePath) -> None:
        """Rename a file or folder. If it is the user's own, a copy is renamed."""
        full = self._full(src)
        # a folder in the scratch folder has only the files that the script wrote: copy the others before the rename
        for folder, _, names in os.walk(os.fsdecode(src)):
            for name in names:
                self.to_write(os.path.join(folder, name))
        _os["replace"](self.to_write(src), self.to_write(dst, update=False))
        if full is not None:
            self._gone.add(full)

    def link(self, src: FilePath, dst: FilePath, *args: object, **kwargs: object) -> None:
        """Make a hard link. If the file is the user's own, link a copy."""
        _os["link"](self.to_write(src), self.to_write(dst, update=False), *args, **kwargs)

    def symlink(self, src: FilePath, dst: FilePath, *args: object, **kwargs: object) -> None:
        """Make a symbolic link."""
        actual = self.to_read(src) if os.path.isabs(os.fspath(src)) else src
        _os["symlink"](actual, self.to_write(dst, update=False), *args, **kwargs)

    def scandir(self, path: ScriptPath = ".") -> _Entries:
        """Return the entries of a folder."""
        if isinstance(path, int) or (path is not None and self._full(path) is None):
            return _Entries(_os["scandir"](path))
        folder = os.fsdecode(path or ".")
        return _Entries(_Entry(entry, folder) for entry in self._entries(folder))

    def _entries(self, path: ScriptPath) -> Iterable[os.DirEntry[str]]:
        full = self._full(path)
        if full is None:
            return _os["scandir"](path)
        entries: dict[str, os.DirEntry[str]] = {}
        with self._busy():
            scratch, hidden = self._folder + full, self._is_gone(full)
            # if neither is a folder, os raises its usual error for the user's path
            if not hidden and (os.path.isdir(full) or not os.path.isdir(scratch)):
                entries |= {e.name: e for e in _os["scandir"](full) if os.path.join(full, e.name) not in self._gone}
            if hidden or os.path.isdir(scratch):
                entries |= {e.name: e for e in _os["scandir"](scratch)}
        return entries.values()

    def listdir(self, path: ScriptPath = ".") -> list[str]:
        """Return the names in a folder."""
        return _os["listdir"](path) if isinstance(path, int) else [entry.name for entry in self._entries(path or ".")]

    def chdir(self, path: ScriptPath) -> None:
        """Change the current folder."""
        full, actual = self._full(path), self.to_read(path)
        with self._busy():
            exists = full is not None and os.path.isdir(full) and not self._is_gone(full)
        _os["chdir"](full if exists else actual)
        self._here = full or _os["getcwd"]()

    def _full(self, path: ScriptPath) -> str | None:
        """Return the absolute path; None if the path is not redirected."""
        # functions that open paths may also get a file that is open
        if not isinstance(path, (str, bytes, os.PathLike)) or getattr(self._own, "busy", False):
            return None
        full = os.path.normpath(os.path.join(self._here, os.fsdecode(path)))
        return None if (full + os.sep).startswith(self._direct) else full

    @contextmanager
    def _busy(self) -> Iterator[None]:
        before, self._own.busy = getattr(self._own, "busy", False), True
        try:
            yield
        finally:
            self._own.busy = before

    def _is_gone(self, full: str) -> bool:
        while self._gone and full not in self._gone and full != os.sep:
            full = os.path.dirname(full)
        return full in self._gone

    def _exists(self, path: ScriptPath) -> bool:
        actual = self.to_read(path)
        with self._busy():
            return actual is not None and not isinstance(actual, int) and os.path.lexists(actual)

    def _remove(self, path: ScriptPath, function: str) -> None:
        full, actual = self._full(path), self.to_read(path)
        # the user's own file stays: it only becomes invisible
        if full is None or str(actual).startswith(self._folder):
            _os[function](actual)
        else:
            _os["lstat"](actual)  # raises an error if it does not exist
        if full is not None:
            self._gone.add(full)

    def redirected(
        self, original: Callable[..., _Result], actual_path: Callable[[Any], object], position: int = 0
    ) -> Callable[..., _Result]:
        """Return a function that calls `original` with `actual_path(path)` instead of the path at `position`."""

        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> _Result:
            before, path, after = args[:position], args[position : position + 1], args[position + 1 :]
            named = {name: actual_path(value) if name == "path" else value for name, value in kwargs.items()}
            return original(*before, *map(actual_path, path), *after, **named)

        return call

    def named(self, method: Callable[..., _Result], original: Callable[..., _Result]) -> Callable[..., _Result]:
        """Wrap `method`, so that errors name the script's path.

        Calls relative to a descriptor use `original`.
        """

        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> _Result:
            try:
                # callers may pass the default `dir_fd=None`, which the methods of this class do not accept
                kwargs = {name: value for name, value in kwargs.items() if value is not None or name[-2:] != "fd"}
                return (original if any(name.endswith("dir_fd") for name in kwargs) else method)(*args, **kwargs)
            except OSError as error:
                if isinstance(error.filename, str):
                    error.filename = error.filename.removeprefix(self._folder)
                raise

        return call


class _Entry:
    """An os.DirEntry whose path begins with the folder as the script named it."""

    def __init__(self, entry: os.DirEntry[str], folder: str):
        self._entry, self.name, self.path = entry, entry.name, os.path.join(folder, entry.name)

    def __fspath__(self) -> str:
        return self.path

    def __getattr__(self, name: str) -> object:
        return getattr(self._entry, name)


class _Entries(PlainContext):
    """The iterator that os.scandir returns. A script may use it as a context manager."""

    def __init__(self, entries: Iterable[os.DirEntry[str] | _Entry]):
        self._entries = iter(list(entries))

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> os.DirEntry[str] | _Entry:
        return next(self._entries)

    def close(self) -> None:
        """Do nothing."""


def processes() -> None:
    """Fork processes that a library (e.g. datasets) would spawn, to keep the redirection.

    (BaseContext.get_context of multiprocessing and multiprocess)
    """
    for package in (multiprocessing, multiprocess):
        original = package.context.BaseContext.get_context

        def get_context(self: object, method: str | None = None, original: Callable[..., object] = original) -> object:
            return original(self, method and "fork")

        replace_in(package.context.BaseContext, "get_context", get_context)
        # Python 3.14 starts a server of processes by default; set_start_method would keep the script from calling it
        package.context._default_context._default_context = original(package.context._default_context, "fork")


def opening(files: ScratchFiles) -> list[tuple[object, object]]:
    """Redirect open(), also in modules such as bz2 that have imported it by name.

    (builtins, io, ...; numpy.savetxt, loadtxt)
    """
    redirected = files.named(files.open, builtins.open)
    _datasource._file_openers._file_openers[None] = redirected  # pyright: ignore[reportAttributeAccessIssue] - private
    return [(builtins.open, redirected)]


def scratch_files() -> ScratchFiles:
    """Redirect all writes of the script except open().

    (os, pathlib, shutil, tempfile; sqlite3; pyarrow; _COMPILED_READING, _COMPILED_WRITING)
    """
    files, connect_to = ScratchFiles(), sqlite3.connect

    # SQLite opens files in C code
    def connect(database: FilePath, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        name, options = os.fsdecode(database), ""
        if is_uri := bool(kwargs.get("uri")) and name.startswith("file:"):
            name, _, options = name.removeprefix("file:").partition("?")
        if name in ("", ":memory:") or "mode=memory" in options:  # no file, or a temporary one
            return connect_to(database, *args, **kwargs)
        actual = os.fspath(files.to_write(unquote(name) if is_uri else name))
        return connect_to(f"file:{quote(actual)}?{options}" if is_uri else actual, *args, **kwargs)

    own = {"open": files.descriptor, "unlink": files.remove, "rename": files.replace}
    own |= {"getcwd": lambda: files._here}
    for name in _OWN:
        replace_in(os, name, files.named(own.get(name) or getattr(files, name), _os[name]))
    for names, actual_path in ((_READING, files.to_read), (_UPDATING, files.to_write)):
        for name in names:
            replace_in(os, name, files.named(files.redirected(_os[name], actual_path), _os[name]))
    replace_in(shutil, "_use_fd_functions", False)  # else shutil.rmtree would remove by descriptors
    sys.dont_write_bytecode = True
    for module in (sqlite3, sqlite3.dbapi2):  # SQLAlchemy, and so MLflow and Optuna, import the latter
        replace_in(module, "connect", connect)

    def by_mode(original: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(original)
        def call(path: FilePath, mode: str = "r", *args: object, **kwargs: object) -> object:
            actual = files.to_read(path) if mode in ("r", "rb") else files.to_write(path)
            return original(actual, mode, *args, **kwargs)

        return call

    for name in ("OSFile", "memory_map"):  # pandas opens Parquet files with the first one
        replace_in(pyarrow, name, by_mode(getattr(pyarrow, name)))
    for places, actual_path in ((_COMPILED_READING, files.to_read), (_COMPILED_WRITING, files.to_write)):
        for module, name, position in places:
            with suppress(ImportError):
                *path, last = name.split(".")
                owner = reduce(getattr, path, importlib.import_module(module))
                replace_in(owner, last, files.redirected(getattr(owner, last), actual_path, position))
    return files


class SilentWriter(PlainContext):
    """A tensorboard writer that accepts every call and writes nothing."""

    def __init__(self, *_: object, **__: object):
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def saving(meter: ScriptTracker, savers: Mapping[str, tuple[str, ...]] = SAVERS) -> None:
    """Skip pushes to the hub, and skip saves that need all ranks.

    (functions in SAVERS and OF_PACKAGES)
    """
    for module, names in savers.items():
        if savers is OF_PACKAGES and module not in sys.modules:
            continue
        for name in names:
            *path, last = name.split(".")
            owner = reduce(getattr, path, importlib.import_module(module))
            replace_in(owner, last, _left_out(meter, name))


def tracking() -> None:
    """Send no metrics to a tracker, and write no event files.

    (torch.utils.tensorboard.SummaryWriter)
    """
    os.environ |= TRACKERS_OFF
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            replace_in(importlib.import_module(module), "SummaryWriter", SilentWriter)
        except ImportError:
            continue
    sys.meta_path.insert(0, _Disabling())


class _Disabling:
    """Disables W&B when the script imports it, even if the script sets mode="offline".

    (wandb.init)
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "wandb":
            return None
        # else importlib would call this finder again for the same name
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType] - it has what a finder needs
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                original = vars(module)["init"]
                vars(module)["init"] = lambda *args, **kwargs: original(*args, **(kwargs | {"mode": "disabled"}))

            replace_in(spec.loader, "exec_module", executed)
        return spec


def _left_out(meter: ScriptTracker, name: str) -> Callable[..., object]:
    def nothing(*_: object, **__: object) -> object:
        meter.note(f"{name.partition('.')[2] or name}(): writes nothing", here=True)
        if name == "async_save":  # its callers wait for the future that it returns
            done = Future[None]()
            done.set_result(None)
            return done
        return True if "DeepSpeedEngine" in name else None

    return nothing
