"""Redirect a script's writes to a scratch folder.

Its later reads find the written files there.
"""

from __future__ import annotations

import builtins
import errno
import functools
import multiprocessing
import multiprocessing.context
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import multiprocess  # of dill's authors, which datasets uses

from zerofit.simulate.fakes.patches import replace_in

_CACHES = ("HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")  # variables that name cache folders
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READING = ("stat", "lstat", "access", "readlink", "statvfs")
_UPDATING = ("chmod", "chown", "utime", "truncate")
if hasattr(os, "listxattr"):  # on Linux; shutil.copy2 calls it
    _READING, _UPDATING = (*_READING, "listxattr", "getxattr"), (*_UPDATING, "setxattr", "removexattr")
_OWN = ("open", "mkdir", "remove", "unlink", "rmdir", "rename", "replace", "link", "symlink")
_OWN += ("listdir", "scandir", "chdir", "getcwd")
_os: dict[str, Any] = {name: getattr(os, name) for name in (*_READING, *_UPDATING, *_OWN)}
_open = builtins.open


# What a path of the script means. S is the scratch folder:
#
#   S/home/me/out/log.txt exists   the script wrote it: this file
#   /home/me/out is in `_gone`     the script removed it: the user's files in it are invisible
#   otherwise                      the user's own file, which is copied to S before a change
#
# Compiled code that opens files itself sees only the user's files, except for the libraries of `scratch_files`.
class ScratchFiles:
    """The files that a script wrote, changed or removed."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="files-")
        self._here = os.getcwd()
        self._gone = set[str]()
        self._own = threading.local()  # .busy: whether this class itself calls os in this thread
        caches = (os.path.abspath(os.environ[name]) for name in _CACHES if os.environ.get(name))
        places = (os.path.expanduser("~/.cache"), tempfile.gettempdir(), "/dev", "/proc", "/sys", *caches)
        self._direct = tuple(place + os.sep for place in places)

    def to_read(self, path: Any) -> Any:
        """Return the file to read at a path: the scratch file if it exists, else the user's."""
        full = self._full(path)
        if full is None:
            return path
        with self._busy():
            kept = self._folder + full
            return kept if os.path.lexists(kept) or self._is_gone(full) else full

    def to_write(self, path: Any, *, update: bool = True) -> Any:
        """Return the scratch file to write for a path. With `update`, it begins as a copy of the user's file."""
        full = self._full(path)
        if full is None:
            return path
        with self._busy():
            kept, visible = self._folder + full, not self._is_gone(full) and os.path.exists(full)
            if os.path.lexists(kept):
                return kept
            if visible and not os.path.isdir(full) and not os.path.isfile(full):
                return path  # a pipe or a device
            if not visible and not self._is_folder(os.path.dirname(full)):
                return kept  # opening it raises the usual error
            os.makedirs(kept if visible and os.path.isdir(full) else os.path.dirname(kept), exist_ok=True)
            if visible and update and os.path.isfile(full):
                if os.path.getsize(full) > shutil.disk_usage(self._folder).free:
                    # the script must neither change the user's file nor fill a disk
                    raise OSError(errno.ENOSPC, f"no space in {self._folder} for the simulation's copy", full)
                shutil.copy2(full, kept)
            return kept

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file like Python's open()."""
        reads = not set(mode) & set("wax+") or ("x" in mode and self._exists(file))
        place = self.to_read(file) if reads else self.to_write(file, update="w" not in mode)
        return _open(place, mode, *args, **kwargs)

    def descriptor(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Open a file like os.open()."""
        if dir_fd is not None:
            return _os["open"](path, flags, mode, dir_fd=dir_fd)
        reads = not flags & _WRITING or (flags & os.O_EXCL and self._exists(path))
        place = self.to_read(path) if reads else self.to_write(path, update=not flags & os.O_TRUNC)
        return _os["open"](place, flags, mode)

    def mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Make a folder."""
        exists = self._exists(path)
        _os["mkdir"](self.to_read(path) if exists else self.to_write(path), *args, **kwargs)

    def remove(self, path: Any) -> None:
        """Remove a file. The user's own file stays."""
        self._remove(path, "remove")

    def rmdir(self, path: Any) -> None:
        """Remove an empty folder. The user's own folder stays."""
        if self._full(path) is not None and self.listdir(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(path))
        self._remove(path, "rmdir")

    def replace(self, source: Any, target: Any) -> None:
        """Rename a file or folder. If it is the user's own, a copy is renamed."""
        full = self._full(source)
        for folder, _, names in os.walk(source):
            for name in names:
                self.to_write(os.path.join(folder, name))
        _os["replace"](self.to_write(source), self.to_write(target, update=False))
        if full is not None:
            self._gone.add(full)

    def link(self, source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        """Make a hard link. If the file is the user's own, link a copy."""
        _os["link"](self.to_write(source), self.to_write(target, update=False), *args, **kwargs)

    def symlink(self, source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        """Make a symbolic link."""
        place = self.to_read(source) if os.path.isabs(os.fspath(source)) else source
        _os["symlink"](place, self.to_write(target, update=False), *args, **kwargs)

    def scandir(self, path: Any = ".") -> _Entries:
        """Return the entries of a folder."""
        if self._full(path) is None and path is not None:
            return _Entries(_os["scandir"](path))
        folder = os.fsdecode(path or ".")
        return _Entries(_Entry(entry, folder) for entry in self._entries(folder))

    def _entries(self, path: Any) -> Iterable[Any]:
        full = self._full(path)
        if full is None:
            return _os["scandir"](path)
        found: dict[str, Any] = {}
        with self._busy():
            kept, hidden = self._folder + full, self._is_gone(full)
            if not hidden and (os.path.isdir(full) or not os.path.isdir(kept)):
                found |= {e.name: e for e in _os["scandir"](full) if os.path.join(full, e.name) not in self._gone}
            if hidden or os.path.isdir(kept):
                found |= {e.name: e for e in _os["scandir"](kept)}
        return found.values()

    def listdir(self, path: Any = ".") -> list[str]:
        """Return the names in a folder."""
        return _os["listdir"](path) if isinstance(path, int) else [entry.name for entry in self._entries(path or ".")]

    def chdir(self, path: Any) -> None:
        """Change the current folder."""
        full, place = self._full(path), self.to_read(path)
        with self._busy():
            exists = full is not None and os.path.isdir(full) and not self._is_gone(full)
        _os["chdir"](full if exists else place)
        self._here = full or _os["getcwd"]()

    def _full(self, path: Any) -> str | None:
        if path is None or isinstance(path, int) or getattr(self._own, "busy", False):
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

    def _is_folder(self, full: str) -> bool:
        return os.path.isdir(self._folder + full) or (os.path.isdir(full) and not self._is_gone(full))

    def _exists(self, path: Any) -> bool:
        place = self.to_read(path)
        with self._busy():
            return not isinstance(place, int) and os.path.lexists(place)

    def _remove(self, path: Any, how: str) -> None:
        full, place = self._full(path), self.to_read(path)
        if full is None or str(place).startswith(self._folder):
            _os[how](place)
        else:
            _os["lstat"](place)  # raises an error if it does not exist
        if full is not None:
            self._gone.add(full)

    def redirected(self, original: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `original` with `place(path)` instead of `path`."""

        @functools.wraps(original)
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            return original(place(path), *args, **kwargs)

        return call

    def named(self, method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `method`, so that errors name the script's path. Calls relative to a descriptor use `original`."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                kwargs = {name: value for name, value in kwargs.items() if value is not None or name[-2:] != "fd"}
                return (original if any(name.endswith("dir_fd") for name in kwargs) else method)(*args, **kwargs)
            except OSError as error:
                if isinstance(error.filename, str):
                    error.filename = error.filename.removeprefix(self._folder)
                raise

        return call


class _Entry:
    """An os.DirEntry whose path begins with the folder as the script named it."""

    def __init__(self, entry: Any, folder: str):
        self._entry, self.name, self.path = entry, entry.name, os.path.join(folder, entry.name)

    def __fspath__(self) -> str:
        return self.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


class _Entries:
    def __init__(self, entries: Iterable[Any]):
        self._entries = iter(list(entries))

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    close = __exit__


def _database(files: ScratchFiles) -> Callable[[Any], Any]:
    return lambda path: path if str(path).startswith((":", "file:")) else files.to_write(path)


def processes() -> None:
    """Fork processes that a library (e.g. datasets) would spawn, to keep the redirection.

    (BaseContext.get_context of multiprocessing and multiprocess)
    """
    for package in (multiprocessing, multiprocess):
        original = package.context.BaseContext.get_context

        def get_context(self: Any, method: str | None = None, original: Callable[..., Any] = original) -> Any:
            return original(self, method and "fork")

        replace_in(package.context.BaseContext, "get_context", get_context)
        # Python 3.14 starts a server of processes by default; set_start_method would keep the script from calling it
        package.context._default_context._default_context = original(package.context._default_context, "fork")


def opening(files: ScratchFiles) -> list[tuple[object, object]]:
    """Redirect open(), also in modules such as bz2 that have imported it by name. (builtins, io, ...)"""
    return [(builtins.open, files.named(files.open, builtins.open))]


def scratch_files() -> ScratchFiles:
    """Redirect all writes of the script except open(). (os, pathlib, shutil, tempfile; sqlite3, pyarrow)"""
    files = ScratchFiles()
    own = {"open": files.descriptor, "unlink": files.remove, "rename": files.replace}
    own |= {"getcwd": lambda: files._here}
    for name in _OWN:
        replace_in(os, name, files.named(own.get(name) or getattr(files, name), _os[name]))
    for names, place in ((_READING, files.to_read), (_UPDATING, files.to_write)):
        for name in names:
            replace_in(os, name, files.named(files.redirected(_os[name], place), _os[name]))
    replace_in(shutil, "_use_fd_functions", False)  # else shutil.rmtree would remove by descriptors
    sys.dont_write_bytecode = True
    replace_in(sqlite3, "connect", files.redirected(sqlite3.connect, _database(files)))
    with suppress(ImportError):
        import pyarrow

        replace_in(pyarrow, "memory_map", files.redirected(pyarrow.memory_map, files.to_read))
    return files
