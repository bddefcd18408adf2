"""This process: its signals, exit, resident memory, and its connections' traffic."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import re
import resource
import signal
import socket
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from mmap import PAGESIZE
from pathlib import Path
from typing import NamedTuple

_COUNTS = struct.Struct("QQ")  # linux/tcp.h: tcpi_bytes_acked and tcpi_bytes_received
_COUNTS_AT, _RETRANSMITS_AT = 120, 2  # offsets in tcp_info; tcpi_retransmits counts since the last acknowledgement
_QUEUED = struct.Struct("I52xQQ")  # tcpi_notsent_bytes, tcpi_bytes_sent and tcpi_bytes_retrans: Linux 4.19 and later
_QUEUED_AT = 144
SELDOM = 50_000  # new objects per garbage collection; with Python's 700 it takes a fifth of torch's import time
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PAGES = Path("/proc/self/pagemap")


class ResidentMemory(NamedTuple):
    """Resident host memory of this process in bytes, from the kernel.

    `file` and `shared` are 0 except on Linux.
    """

    now: int
    peak: int  # since `forget_resident_peak`; includes interpreter, libraries and mapped files
    file: int  # part of `now`: pages of libraries and mapped files
    shared: int  # part of `now`: shared with other processes, or pinned for a GPU

    @property
    def without_files(self) -> int:
        """The bytes of `now` that are not pages of files, which the kernel can drop."""
        return self.now - self.file


def resident_memory() -> ResidentMemory:
    """Return the resident memory of this process, in about 30 microseconds."""
    if not _STATUS.exists():
        # getrusage(2) counts bytes on macOS, and KiB on other systems.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return ResidentMemory(now=peak, peak=peak, file=0, shared=0)
    lines = re.findall(r"^(VmRSS|VmHWM|RssFile|RssShmem):\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    found = {name: int(kib) << 10 for name, kib in lines}
    return ResidentMemory(*(found.get(name, 0) for name in ("VmRSS", "VmHWM", "RssFile", "RssShmem")))


def forget_resident_peak() -> None:
    """Reset the peak of resident memory to the present value, if the kernel allows it."""
    with suppress(OSError):
        # 5 resets VmHWM, the peak that this module reads (clear_refs in Documentation/filesystems/proc.rst of Linux).
        _RESET.write_text("5")


def mapped_pages() -> list[tuple[int, int]]:
    """Return address and bytes of all file-backed pages in memory; [] except on Linux."""
    found: list[tuple[int, int]] = []
    if not _PAGES.exists():
        return found
    with _PAGES.open("rb", buffering=0) as pages:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, mode, _, _, inode = line.split()[:5]
            first, end = (int(address, 16) for address in span.split("-"))
            if inode == "0" or mode[0] != "r":
                continue
            # an entry of 8 bytes for each page; its highest bit: the page is in memory (admin-guide/mm/pagemap)
            pages.seek(first // PAGESIZE * 8)
            entries = array("Q", pages.read((end - first) // PAGESIZE * 8))
            present = (first + n * PAGESIZE for n, entry in enumerate(entries) if entry >> 63)
            for address in present:
                if found and sum(found[-1]) == address:
                    found[-1] = (found[-1][0], found[-1][1] + PAGESIZE)
                else:
                    found.append((address, PAGESIZE))
    return found


def touch(pages: Iterable[tuple[int, int]]) -> None:
    """Read one byte of each of the parent's `mapped_pages`."""
    # a fork on Linux begins without these pages
    for address, size in pages:
        (ctypes.c_char * size).from_address(address)[::PAGESIZE]


def stop_requests() -> list[signal.Signals]:
    """Return the signals that stop a command, without ignored ones."""
    # nohup ignores SIGHUP, which is sent when the terminal closes
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def deepspeed_quiet() -> Iterator[None]:
    """Keep DeepSpeed from printing on import that there is no GPU."""
    import torch

    # DeepSpeed chooses its accelerator on import, and prints a warning if it falls back to the CPU. With the variable
    # it does not have to guess.
    is_quiet = "DS_ACCELERATOR" in os.environ or torch.cuda.is_available()
    if not is_quiet:
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        yield
    finally:
        if not is_quiet:
            del os.environ["DS_ACCELERATOR"]


# The bytes that a rank has sent and received show whether a collective advances, while Python waits in it for minutes.
# The kernel counts the bytes of each TCP connection (`struct tcp_info` in linux/tcp.h). A connection of another library
# is reached through /proc/self/fd: a duplicate of its descriptor becomes a socket object for a moment.


class Flow(NamedTuple):
    """The traffic of one connection."""

    written: int  # bytes that this process has written, sent or not
    sent: int  # bytes that the other end has acknowledged
    received: int
    resending: bool  # whether lost data is being sent again


def flows() -> dict[str, Flow]:
    """Return the traffic of each TCP connection of this process, by the kernel's socket name.

    Empty if the kernel does not list the connections.
    """
    found: dict[str, Flow] = {}
    if socket.getdefaulttimeout() is not None:
        return found  # creating a socket object would make the connection non-blocking
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # not Linux, or no descriptor left
        return found
    for name in names:
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
            if not link.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUED_AT + _QUEUED.size)
        except OSError:
            continue  # closed meanwhile, or not TCP
        if len(info) >= _COUNTS_AT + _COUNTS.size:
            sent, received = _COUNTS.unpack_from(info, _COUNTS_AT)
            written = sent
            if len(info) >= _QUEUED_AT + _QUEUED.size:
                waiting, out, repeated = _QUEUED.unpack_from(info, _QUEUED_AT)
                written = waiting + out - repeated
            found[link] = Flow(written, sent, received, info[_RETRANSMITS_AT] > 0)
    return found


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable garbage collection within the block."""
    # it takes a fifth of the time of imports, and finds little
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def run_and_exit(work: Callable[[], object]) -> None:
    """Run `work`, then exit with the status that Python would return.

    Exit handlers run and threads are joined as usual.
    """
    # Python's last garbage collection is skipped, since it takes 2 to 8 s with torch and transformers. `gc.freeze` is
    # not used, because nanobind (in Triton) would report leaks.
    status = 1
    gc.set_threshold(SELDOM)

    def end() -> None:
        failed = False
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                failed = True
        # Python itself exits with 120 if it cannot flush its streams, for example to a closed pipe (sys.exit).
        os._exit(120 if failed and status == 0 else status)

    atexit.register(end)  # registered first, so it runs after the handlers of modules that `work` imports
    try:
        work()
        status = 0
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else int(request.code is not None)
        raise
