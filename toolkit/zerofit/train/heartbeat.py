"""Report once a second to a rank's guard what the rank is doing."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from zerofit.spec.process import flows as tcp_flows

EVERY_S = 1.0
BUSY = 0.05  # share of one core; a process that uses more is working
FLOWING = 1000  # bytes per second on one connection; more than keep-alives
READING = 100_000  # bytes per second of file I/O; more than logs and heartbeats
FROZEN_S = 5.0  # time between looks that shows a process stopped by a cgroup freezer or debugger
COLLECTIVES = "distributed_c10d.py"
TRAINING = "training"
ENGINES = ("deepspeed/runtime/engine.py", "deepspeed/runtime/pipe/engine.py")
PARTS = {"forward": "forward", "backward": "backward", "step": "step", "_exec_optimizer_step": "step"}
PARTS |= {"_exec_forward_pass": "forward", "_exec_backward_pass": "backward", "_exec_load_micro_batch": "data"}
LOADER = "data/loader.py"


@dataclass
class RankProgress:
    """Progress of a rank, written by the loop and the event log, read by the heartbeat thread."""

    step: int = 0  # optimizer steps done
    first: int = 0  # steps done before this start
    phase: str = "starting"
    changed: threading.Event = field(default_factory=threading.Event)  # a phase began since the last heartbeat

    def begin(self, phase: str) -> None:
        """Record a phase, and send a heartbeat immediately."""
        self.phase = phase
        # without a heartbeat now, the last one of a killed rank could name a step before its last checkpoint
        self.changed.set()


# A separate thread inspects the main thread, so it does not slow the training.
class Heartbeat:
    """Writes a line of JSON every second: step, phase, collective, and seconds without progress."""

    def __init__(self, descriptor: int, on_gpu: bool, progress: RankProgress):
        """Write to the guard's pipe `descriptor`. `on_gpu`: ignore the use of cores."""
        # waiting for a GPU uses a core
        self._pipe, self._on_gpu, self._progress, self._lock = descriptor, on_gpu, progress, threading.Lock()
        self._main = threading.main_thread().ident or 0  # is None only before the thread starts
        self._seen: tuple[object, ...] = ()
        self._moved, self._last = time.monotonic(), time.monotonic()
        self._resent = 0.0  # when a connection was last seen retransmitting
        self._longest = 0.0  # longest pause in training after which the rank continued
        self._cpu_s, self._io, self._flows = time.process_time(), _io_bytes(), {}

    def start(self) -> None:
        """Send heartbeats until the process ends."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            beat = self.look()
            try:
                self.send(beat)
            except OSError:
                return  # the guard has died, and the kernel kills this process
            self._progress.changed.wait(EVERY_S)
            self._progress.changed.clear()

    def send(self, message: dict[str, object]) -> None:
        """Write one line to the guard. Raises OSError."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._pipe, data) :]

    def look(self) -> dict[str, object]:
        """Inspect the main thread, and return one heartbeat."""
        progress, frames, flows = self._progress, sys._current_frames(), tcp_flows()
        main = frames.get(self._main)
        collective = next((c for c in map(_collective, frames.values()) if c), None)
        frames.clear()  # breaks the cycle with this frame, which would keep the main thread's tensors alive
        stack = (progress.step, *((f.f_code, f.f_lasti) for f in _up(main)))
        now, cpu_s, io = time.monotonic(), time.process_time(), _io_bytes()
        seconds = max(now - self._last, 1e-3)
        if seconds > FROZEN_S:  # the process was stopped, not only its main thread
            self._moved += seconds
        # "Moved" means any sign of work since the last look: another line of Python, processor time, file I/O or
        # network traffic. The guard's command judges a rank by the seconds without a sign, so no sign may cause a false
        # alarm: a GPU rank that waits in a collective burns a core, and NFS or NCCL keep-alives send a few bytes.
        busy = not self._on_gpu and (cpu_s - self._cpu_s) / seconds > BUSY
        busy |= (io - self._io) / seconds > READING
        # per connection: keep-alives of hundreds of connections add up
        counts = {name: flow.sent + flow.received for name, flow in flows.items()}
        busy |= any((n - self._flows.get(name, n)) / seconds > FLOWING for name, n in counts.items())
        if stack != self._seen or busy:
            if progress.phase == TRAINING:
                self._longest = max(self._longest, self._last - self._moved)
            self._moved = now
        self._resent = now if any(flow.resending for flow in flows.values()) else self._resent
        self._seen, self._last, self._cpu_s, self._io, self._flows = stack, now, cpu_s, io, counts
        return {
            "step": progress.step,
            "phase": _part_of_step(main) if progress.phase == TRAINING else progress.phase,
            "training": progress.phase == TRAINING,
            "warm": progress.step > progress.first,  # the first step connects and compiles
            "collective": collective,
            "at": _zerofit_line(main),
            "resending": self._resent >= self._moved,
            "still_s": round(now - self._moved, 1),
            "longest_still_s": round(self._longest, 1),
        }


def _up(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _collective(frame: FrameType | None) -> str | None:
    """Return the collective in which a thread waits: its outermost torch.distributed function."""
    name = None
    for outer in _up(frame):
        code = outer.f_code
        if code.co_filename.endswith(COLLECTIVES) and not code.co_name.startswith(("_", "get_", "is_", "wrapper")):
            name = code.co_name
    return name


def _part_of_step(frame: FrameType | None) -> str:
    """Return the part of a step that a thread runs: the outermost engine call, or "data"."""
    part = "training loop"
    for outer in _up(frame):
        file, name = outer.f_code.co_filename, outer.f_code.co_name
        if file.endswith(ENGINES) and (name in PARTS or name.startswith("_exec_")):
            part = PARTS.get(name, name.removeprefix("_exec_").replace("_", " "))
        elif file.endswith(LOADER):
            part = "data"
    return part


def _zerofit_line(frame: FrameType | None) -> str:
    """Return file, line and function of zerofit, outside of models, that a thread runs."""
    for outer in _up(frame):
        path = Path(outer.f_code.co_filename)
        if len(path.parts) > 2 and path.parts[-3] == "zerofit" and path.parts[-2] != "models":
            return f"{path.parts[-2]}/{path.name}:{outer.f_lineno} {outer.f_code.co_name}"
    return ""


def _io_bytes() -> int:
    """Return the bytes that this process has read and written, including network file systems."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
