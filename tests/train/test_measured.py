"""When a run has left its forecast, and in what; what this process has resident."""

from __future__ import annotations

import mmap
import subprocess
import sys
from dataclasses import replace

import pytest

from zerofit.spec.overhead import HOST_PROCESS_BYTES
from zerofit.spec.run_folder import MemoryForecast
from zerofit.train.callbacks import MeasuredMemory
from zerofit.train.memory import CACHED, OUTSIDE, OWN, SHARED, TENSORS, memory_figures, outgrown

MIB, GIB = 2**20, 2**30
FORECAST = MemoryForecast(
    phases={"build": 2 * GIB, "backward": 8 * GIB, "step": 7 * GIB},
    reserved_bytes=10 * GIB,
    beside_bytes=GIB,
    margin_bytes=512 * MIB,
    free_bytes=20 * GIB,
    host_bytes=4 * GIB,
    pinned_bytes=3 * GIB,
    host_margin_bytes=GIB,
)
ON_CPU = replace(FORECAST, host_bytes=0, pinned_bytes=0)
TAKEN = 11 * GIB
CPU = MeasuredMemory(memory_bytes=TAKEN, reserved_bytes=None, outside_bytes=None, host_bytes=TAKEN, shared_bytes=0)
GPU = MeasuredMemory(
    memory_bytes=8 * GIB,
    reserved_bytes=10 * GIB,
    outside_bytes=GIB,
    host_bytes=4 * GIB + HOST_PROCESS_BYTES,
    shared_bytes=3 * GIB,
)


def on_cpu(more: int, shared: int = 0) -> MeasuredMemory:
    return CPU | {"memory_bytes": TAKEN + more, "host_bytes": TAKEN + more, "shared_bytes": shared}


def test_up_to_the_margin_a_run_is_within_its_forecast():
    assert outgrown(on_cpu(512 * MIB), ON_CPU) is None
    assert outgrown(GPU | {"memory_bytes": 9 * GIB, "reserved_bytes": 10 * GIB + 512 * MIB}, FORECAST) is None
    assert outgrown(GPU | {"host_bytes": GPU["host_bytes"] + GIB}, FORECAST) is None


@pytest.mark.parametrize(("shared", "kind", "most"), [(0, OWN, "768 MiB"), (640, SHARED, "640 MiB")])
def test_on_a_cpu_it_says_whether_the_process_or_shared_memory_grew(shared, kind, most):
    text = outgrown(on_cpu(768 * MIB, shared * MIB), ON_CPU)
    assert text == (
        f"a rank uses 11.8 GiB of memory, 768 MiB more than forecast (margin: 512 MiB); {kind} grew most, by {most}"
    )


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"memory_bytes": 9 * GIB, "reserved_bytes": 11 * GIB}, TENSORS),
        ({"memory_bytes": 8 * GIB, "reserved_bytes": 11 * GIB}, CACHED),
        ({"outside_bytes": 2 * GIB}, OUTSIDE),
    ],
)
def test_on_a_gpu_it_says_whether_tensors_fragmentation_or_what_is_outside_of_torch_grew(changed, kind):
    text = outgrown({**GPU, **changed}, FORECAST)
    assert text and text.startswith("a rank uses 12.0 GiB of memory of the device, 1.00 GiB more than forecast")
    assert text.endswith(f"{kind} grew most, by 1.00 GiB")


def test_a_smaller_context_makes_room_for_more_tensors():
    assert outgrown(GPU | {"reserved_bytes": 10 * GIB + 768 * MIB, "outside_bytes": 512 * MIB}, FORECAST) is None


@pytest.mark.parametrize(("pinned", "kind"), [(3, OWN), (5, SHARED)])
def test_host_memory_has_a_margin_of_its_own(pinned, kind):
    text = outgrown(GPU | {"host_bytes": GPU["host_bytes"] + 2 * GIB, "shared_bytes": pinned * GIB}, FORECAST)
    assert text and "9.00 GiB of host memory, 2.00 GiB more" in text and f"{kind} grew most, by 2.00 GiB" in text


def test_figures_stand_beside_the_forecast_of_the_same_thing():
    on_gpu = memory_figures(GPU | {"reserved_bytes": 11 * GIB}, FORECAST)
    assert {name: figure.forecast for name, figure in on_gpu.items()} == {
        "memory_bytes": 8 * GIB,
        "reserved_bytes": 10 * GIB,
        "outside_bytes": GIB,
        "host_bytes": 4 * GIB + HOST_PROCESS_BYTES,
    }
    assert on_gpu["reserved_bytes"].difference == pytest.approx(0.1)
    (alone,) = memory_figures(CPU, ON_CPU).items()
    assert alone[0] == "memory_bytes" and alone[1].forecast == TAKEN and alone[1].difference == 0
    unknown = memory_figures(GPU | {"outside_bytes": None}, None)
    assert set(unknown) == {"memory_bytes", "reserved_bytes", "host_bytes"}
    assert all(figure.to_dict()["difference"] is None for figure in unknown.values())


RESIDENT = """
import mmap, sys
from zerofit.spec.process import forget_resident_peak, resident_memory
start = resident_memory()
block = mmap.mmap(-1, 1 << 26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block.write(bytes([1]) * len(block))
block.close()
gone = resident_memory()
forget_resident_peak()
after = resident_memory()
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
    sum(mapped[n] for n in range(0, len(mapped), mmap.PAGESIZE))
    read = resident_memory()
shared = mmap.mmap(-1, 1 << 26)
shared.write(bytes([1]) * len(shared))
both = resident_memory()
print(gone.peak - start.now, gone.now - start.now, after.peak - start.now, read.file - after.file, both.shared)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's own counts")
def test_resident_memory_by_its_kinds(tmp_path):
    size = 1 << 26
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    done = subprocess.run([sys.executable, "-c", RESIDENT, str(file)], capture_output=True, text=True, check=True)
    peak, now, after, read, shared = map(int, done.stdout.split())
    near = pytest.approx(size, rel=0.25, abs=mmap.PAGESIZE)  # the text that fills a block is there for a moment, too
    assert size <= peak < 3 * size
    assert abs(now) < size // 4 and after < size
    assert read == near and shared == near
