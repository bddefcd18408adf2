"""Failures that are no shortage of memory: real errors of the installed libraries, and logs of whole machines."""

from __future__ import annotations

import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from tests.explain.logs import MESSAGES
from tests.explain.logs import traceback as logged
from zerofit.explain.from_log import explain_log
from zerofit.explain.log import lines_of

LAUNCHER = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
  exitcode  : {code} (pid: 4020)
  traceback : Signal {signal} received by PID 4020
"""
WATCHDOG = (
    "[rank{rank}]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=15, OpType=ALLREDUCE, NumelIn=466, NumelOut=466, Timeout(ms)=600000) "
    "ran for 600060 milliseconds before timing out.\n"
)
ASSERTION = "Indexing.cu:1369: block: [26,0,0], thread: [3,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
NOT_INITIALIZED = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
CUDA = (
    "torch.AcceleratorError: CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call"
)

# cause -> logs that no test can produce on a CPU
LOGS = {
    "collective-timeout": [
        WATCHDOG.format(rank=0) + WATCHDOG.format(rank=2) + LAUNCHER.format(code=-6, signal="6 (SIGABRT)"),
        "RuntimeError: [unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation to complete",
    ],
    "illegal-memory-access": [
        CUDA.format("an illegal memory access was encountered"),
        "Memory access fault by GPU node-1 (Agent handle: 0x55d) on address 0x7f0. Reason: Page not present.",
    ],
    "index-out-of-range": [ASSERTION + logged("out = model(x)", error=NOT_INITIALIZED)],
    "gpu-hardware": [
        CUDA.format("uncorrectable ECC error encountered"),
        "NVRM: Xid (PCI:0000:c1:00): 79, pid=8, GPU has fallen off the bus.",
    ],
    "disk-full": ["SafetensorError: Error while serializing: IoError(Os { kind: FilesystemQuotaExceeded, code: 122 })"],
    "connection-lost": [
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.12]:55122",
        "DistBackendError: NCCL error in: ProcessGroup.cpp:3699, remote process exited or there was a network error",
    ],
    "ranks-share-device": [
        "init.cc:943 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000"
    ],
    "time-limit": ["slurmstepd: error: *** JOB 1132 ON node7 CANCELLED AT 2025-01-02T13:09:33 DUE TO TIME LIMIT ***"],
    "stopped-by-scheduler": ["*** STEP 1132.0 ON node7 CANCELLED AT 2025-01-02T13:09:33 DUE TO PREEMPTION ***"],
    "bus-error": [LAUNCHER.format(code=-7, signal="7 (SIGBUS)")],
    "versions-do-not-match": [
        CUDA.format("no kernel image is available for execution on the device"),
        "ImportError: flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEab",
    ],
    "not-finite": ["{'loss': 1.3, 'grad_norm': 2.0}\n{'loss': 0.0, 'grad_norm': nan}\n{'loss': nan, 'grad_norm': nan}"],
    "exception": [
        logged("y = x.view(3, 5)", error="RuntimeError: shape '[3, 5]' is invalid for input of size 16")
        + WATCHDOG.format(rank=1)
        + "[launch.py:325:sigkill_handler] ['python'] exits with return code = -9"
    ],
    "pinned-memory": ["mlock failed: Cannot allocate memory"],
    "host-memory": ["OSError: [WinError 1455] The paging file is too small for this operation to complete."],
    "sglang-no-cache": ["RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."],
    "unknown": [
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        LAUNCHER.format(code=-9, signal="9 (SIGKILL)"),
    ],
}


def explained(text: str):
    found = explain_log(lines_of(text))
    assert found is not None
    return found


@pytest.mark.parametrize(("cause", "text"), [(cause, text) for cause, texts in LOGS.items() for text in texts])
def test_a_failure_is_named_with_what_to_do_next(cause, text):
    found = explained(text)
    assert found.cause == cause
    assert found.run_next or found.changes or found.at


def test_memory_that_ran_out_on_one_rank_explains_the_timeouts_of_the_others():
    text = f"[rank3]: {MESSAGES['2.2 to 2.4']}\n" + WATCHDOG.format(rank=0) + LAUNCHER.format(code=-6, signal=6)
    assert explained(text).place == "device"
    assert explained(WATCHDOG.format(rank=0) + LAUNCHER.format(code=-9, signal=9)).cause == "unknown"  # killed
    assert explained(LOGS["collective-timeout"][0]).ranks == ("0", "2")
    assert explained(LOGS["collective-timeout"][0]).evidence == ("ALLREDUCE waited for 600 s",)


def test_exceptions_that_did_not_end_the_run_are_no_failure():
    handled = logged("wandb.log(x)", error="requests.exceptions.ReadTimeout: read timed out")
    steps = "".join(f"{{'loss': 1.{step}}}\n" for step in range(3))
    assert explain_log(lines_of(handled + steps)) is None
    assert explained(steps + handled).cause == "exception"
    first = (
        f"{logged('d[k]', error='KeyError: 3')}\nDuring handling of the above exception, another exception occurred:"
    )
    assert "ValueError" in explained(first + "\n\n" + logged("f(d)", error="ValueError: no layer 3")).summary


def damaged_weights(folder: Path) -> None:
    import torch

    (folder / "a.pt").write_bytes(b"PK\x03\x04" + b"x" * 50)
    torch.load(folder / "a.pt")


def damaged_safetensors(folder: Path) -> None:
    from safetensors.torch import load

    load(b"\x40\x00\x00\x00\x00\x00\x00\x00{")


def full_disk(folder: Path) -> None:
    import torch

    torch.save({"weight": torch.zeros(1 << 20)}, "/dev/full")


def loss_scale_at_minimum(folder: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(1, 9, 1, delayed_shift=1, consecutive_hysteresis=False)
    scaler.update_scale(overflow=True)


def used_port(folder: Path) -> None:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] torch documents this name

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        TCPStore("127.0.0.1", server.getsockname()[1], 1, is_master=True)


def missing_host(folder: Path) -> None:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] torch documents this name

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=1))


def not_a_number(folder: Path) -> None:
    import torch

    with torch.autograd.detect_anomaly(check_nan=True):
        torch.sqrt(torch.zeros(1, requires_grad=True) * 0).mul(0).sum().backward()


def unused_parameters(folder: Path) -> None:
    import torch
    from torch import distributed as dist

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(Half())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()


REAL = {
    damaged_weights: "file-damaged",
    damaged_safetensors: "file-damaged",
    full_disk: "disk-full",
    loss_scale_at_minimum: "loss-scale-at-minimum",
    used_port: "port-in-use",
    missing_host: "rendezvous",
    not_a_number: "not-finite",
    unused_parameters: "unused-parameters",
}


@pytest.mark.versions
@pytest.mark.parametrize(("fail", "cause"), REAL.items(), ids=lambda value: getattr(value, "__name__", value))
def test_errors_of_the_installed_libraries(fail: Callable[[Path], None], cause: str, tmp_path):
    with pytest.raises(Exception) as raised:
        fail(tmp_path)
    assert explained("".join(traceback.format_exception(raised.value))).cause == cause


def test_a_crash_and_a_process_with_too_many_open_files():
    crash = [*("bash", "-c"), f"{sys.executable} -c 'import os; os.kill(os.getpid(), 11)'; true"]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9)); [open('/dev/null') for _ in range(9)]"
    for command, cause in {(*crash,): "crash", (sys.executable, "-c", limit): "too-many-open-files"}.items():
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert explained(done.stdout + done.stderr).cause == cause
