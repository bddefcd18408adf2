"""Failures that are no shortage of memory: real errors of the installed libraries, and logs of whole machines."""

from __future__ import annotations

import os
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
COMPILER = "Command '['/usr/bin/gcc', '/tmp/t/main.c', '-lcuda']' returned non-zero exit status 1."

# cause -> logs that no test can produce on a CPU
LOGS = {
    "collective-timeout": [
        WATCHDOG.format(rank=0) + WATCHDOG.format(rank=2) + LAUNCHER.format(code=-6, signal="6 (SIGABRT)"),
        "RuntimeError: [unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation to complete",
        "EI0002: The wait execution of the Notify register times out.",
        WATCHDOG.format(rank=0) + "DistBackendError: NCCL communicator was aborted on rank 0.",
    ],
    "illegal-memory-access": [
        CUDA.format("an illegal memory access was encountered"),
        "Memory access fault by GPU node-1 (Agent handle: 0x55d) on address 0x7f0. Reason: Page not present.",
    ],
    "index-out-of-range": [ASSERTION + logged("out = model(x)", error=NOT_INITIALIZED)],
    "device-assertion": [
        "Loss.cu:106: block: [0,0,0], thread: [1,0,0] Assertion `input_val >= zero && input_val <= one` failed.\n"
        + CUDA.format("device-side assert triggered")
    ],
    "not-permitted": [
        "[rank1]: PermissionError: [Errno 13] Permission denied: '/.cache'",
        logged("save()", error="OSError: [Errno 30] Read-only file system: 'out'"),
    ],
    "other-ranks-in-checkpoint": [
        "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 8 but the current world size is 16.",
        logged(
            "engine.load_checkpoint(path)",
            error="FileNotFoundError: [Errno 2] No such file or directory: 'zero_pp_rank_4_mp_rank_00_optim_states.pt'",
        ),
    ],
    "no-ssh": [
        "node2: Permission denied (publickey,password).\npdsh@node1: node2: ssh exited with exit code 255",
        "RuntimeError: Using hostfile at hostfile but host=node2 was not reachable via ssh.",
    ],
    "wrong-arguments": ["usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --local_rank=0"],
    "not-started": [
        "srun: error: Task launch for 36.0 failed on node cn131: Job credential expired",
        "Warning  FailedScheduling  default-scheduler  0/5 nodes are available: 5 Insufficient nvidia.com/gpu.",
    ],
    "device-not-visible": ["RuntimeError: Unexpected error. Error 802: system not yet initialized"],
    "crash": [
        "returned non-zero exit status 245.",
        "code -1073741819 (0xC0000005)",
        LAUNCHER.format(code=-11, signal=11),
    ],
    "aborted": ["['python', 'train.py'] exits with return code = -6", "Aborted (core dumped)"],
    "gpu-hardware": [
        CUDA.format("uncorrectable ECC error encountered"),
        "NVRM: Xid (PCI:0000:c1:00): 79, pid=8, GPU has fallen off the bus.",
    ],
    "disk-full": ["SafetensorError: Error while serializing: IoError(Os { kind: FilesystemQuotaExceeded, code: 122 })"],
    "dataloader-worker-ended": [
        logged(
            "for batch in loader:",
            ("torch/multiprocessing/reductions.py", 538, "rebuild_storage_fd", "fd = df.detach()"),
            ("multiprocessing/connection.py", 399, "_recv", "raise EOFError"),
            error="EOFError",
        )
    ],
    "connection-lost": [
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.12]:55122",
        "DistBackendError: NCCL error in: ProcessGroup.cpp:3699, remote process exited or there was a network error",
    ],
    "ranks-share-device": [
        "init.cc:943 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000"
    ],
    "time-limit": ["slurmstepd: error: *** JOB 1132 ON node7 CANCELLED AT 2025-01-02T13:09:33 DUE TO TIME LIMIT ***"],
    "stopped-by-scheduler": ["*** STEP 1132.0 ON node7 CANCELLED AT 2025-01-02T13:09:33 DUE TO PREEMPTION ***"],
    "no-download": [
        "requests.exceptions.ReadTimeout: (ReadTimeoutError(\"HTTPSConnectionPool(host='huggingface.co'): Read timed",
        "RuntimeError: Data processing error: CAS service error : Reqwest Error: HTTP status client error (416)",
    ],
    "bus-error": [
        LAUNCHER.format(code=-7, signal="7 (SIGBUS)"),
        "RuntimeError: Step 1 exited with non-zero status 249",
    ],
    "stopped": ["SignalException: Process 7 got signal: 15"],
    "versions-do-not-match": [
        "Failed to initialize NVML: Driver/library version mismatch",
        CUDA.format("no kernel image is available for execution on the device"),
        "ImportError: flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEab",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
    ],
    "not-finite": [
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
        "{'loss': 1.3, 'grad_norm': 2.0}\n{'loss': 0.0, 'grad_norm': nan}\n{'loss': nan, 'grad_norm': nan}",
        "{'loss': 0.0, 'grad_norm': nan}\n{'train_runtime': 5.1, 'train_loss': 0.2}",
    ],
    "exception": [
        logged("y = x.view(3, 5)", error="RuntimeError: shape '[3, 5]' is invalid for input of size 16")
        + WATCHDOG.format(rank=1)
        + "[launch.py:325:sigkill_handler] ['python'] exits with return code = -9"
    ],
    "partitioned-weight": [
        logged(
            "model.load_state_dict(w)",
            error="RuntimeError: Error(s) in loading state_dict for N:\n\tsize mismatch for "
            "embed.weight: copying a param with torch.Size([9, 4]) from checkpoint, the shape in current model is "
            "torch.Size([0]).",
        ),
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2048x4096 and 1x8388608)",
        "AssertionError: {'id': 291, 'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 4096, 'shape': (0,)}",
    ],
    "lost-gradients": [
        logged(
            "engine.backward(loss)", error="AssertionError: loss must be a scalar tensor. If you need to pass output"
        )
    ],
    "accumulation-under-zero": [
        "AssertionError: no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 2"
    ],
    "op-not-built": ["ninja: build stopped: subcommand failed.\nRuntimeError: Error building extension 'cpu_adam'"],
    "kernel-not-compiled": [
        logged("check_call(cc)", error="torch._inductor.exc.InductorError: CalledProcessError: " + COMPILER),
        logged("check_call(cc)", error="subprocess.CalledProcessError: " + COMPILER),
    ],
    "cuda-after-fork": [
        "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 0 terminated with the following error:\n"
        + logged("torch.cuda.set_device(0)", error=CUDA.format("initialization error"))
    ],
    "objects-in-file": [
        "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded.\n"
        "\tWeightsUnpickler error: Unsupported global: GLOBAL deepspeed.runtime.fp16.loss_scaler.LossScaler"
    ],
    "file-damaged": [
        "_pickle.UnpicklingError: Weights only load failed. WeightsUnpickler error: Unsupported operand 118",
        "_pickle.UnpicklingError: invalid load key, 'v'.",
    ],
    "gradient-twice": [
        "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following",
        "AssertionError: The parameter 12 has already been reduced. Gradient computed twice for this partition.",
    ],
    "access-denied": ["huggingface_hub.errors.GatedRepoError: 401 Client Error.\nCannot access gated repo"],
    "gpu-too-old": [
        "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
        "RuntimeError: FlashInfer requires GPUs with sm75 or higher",
    ],
    "rendezvous": [
        "[W] [c10d] The IPv6 network addresses of (node1, 29500) cannot be retrieved (gai error: -2 - Name or service)",
        "RuntimeError: Timed out initializing process group in store based barrier on rank: 0",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 joined.",
    ],
    "saving-in-host-memory": [
        "{'loss': 2.1}\n  5%|#         | 200/4443 [11:11<25:23]Saving model checkpoint to out/checkpoint-200\n"
        "failed (exitcode: -9) local_rank: 3 (pid: 180497) of binary: /opt/env/bin/python3.11"
    ],
    "pinned-memory": ["mlock failed: Cannot allocate memory"],
    "host-memory": [
        "OSError: [WinError 1455] The paging file is too small for this operation to complete.",
        "systemd-oomd[812]: Killed /user.slice/app-python.scope due to memory used (634) / total (671) and swap used",
        "Your session crashed after using all available RAM.",
    ],
    "sglang-no-cache": ["RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."],
    "unknown": [
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        LAUNCHER.format(code=-9, signal="9 (SIGKILL)"),
        LAUNCHER.format(code=1, signal=""),
        "  Last State: Terminated\n    Reason: Error\n    Exit Code:    137",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. Lease ID: 0a00",
        "subprocess.CalledProcessError: Command '['/opt/gcc/bin/python', 'train.py']' returned non-zero exit status 1.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>.",
        "step 120 loss 2.31\nzsh: killed     python train.py",
        "Saving model checkpoint to out\n{'loss': 2.0}\n" + LAUNCHER.format(code=-9, signal="9 (SIGKILL)"),
        "AsyncIOLoopKernelRestarter: restarting kernel (1/5)\nkernel 6f2 died, restarting",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17 bytes.",
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


def test_nccl_s_own_message_is_shown():
    error = "DistBackendError: NCCL error, unhandled cuda error\nLast error:\nCuda failure 304 'OS call failed'"
    assert explained(error).evidence == ("Cuda failure 304 'OS call failed'",)


def test_an_error_of_a_spawned_process_is_named():
    spawned = "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 0 terminated with this error:\n"
    found = explained(spawned + logged("run()", error="ValueError: no such file"))
    assert "ValueError: no such file" in found.summary


def test_the_line_of_an_index_is_asked_for_only_where_the_traceback_lacks_it():
    """On a CPU the traceback has the line; a GPU's kernels run later than their calls."""
    on_cpu = explained(logged("out = model(x)", error="IndexError: index out of range in self"))
    assert on_cpu.cause == "index-out-of-range" and on_cpu.at and not on_cpu.run_next
    for runtime, variable in {"CUDA": "CUDA_LAUNCH_BLOCKING=1 ", "HIP": "AMD_SERIALIZE_KERNEL=3 "}.items():
        assert explained(f"RuntimeError: {runtime} error: device-side assert triggered").run_next.startswith(variable)


def test_memory_that_ran_out_on_one_rank_explains_the_timeouts_of_the_others():
    text = f"[rank3]: {MESSAGES['2.2 to 2.4']}\n" + WATCHDOG.format(rank=0) + LAUNCHER.format(code=-6, signal=6)
    assert explained(text).place == "device"
    assert explained(WATCHDOG.format(rank=0) + LAUNCHER.format(code=-9, signal=9)).cause == "unknown"  # killed
    assert explained(LOGS["collective-timeout"][0]).ranks == ("0", "2")
    assert explained(LOGS["collective-timeout"][0]).evidence == ("ALLREDUCE waited for 600 s",)


def test_exceptions_that_did_not_end_the_run_are_no_failure():
    handled = logged("wandb.log(x)", error="requests.exceptions.ReadTimeout: read timed out").replace("<module>", "run")
    steps = "".join(f"{{'loss': 1.{step}}}\n" for step in range(3))
    assert explain_log(lines_of(handled + steps)) is None
    assert explained(steps + handled).cause == "exception"
    assert "KeyError" in explained(handled + steps + logged("d[k]", error="KeyError: 3")).summary
    ignored = "Exception ignored in: <function D.__del__ at 0x7f>\n" + logged("self.f", error="AttributeError: f")
    assert "KeyError" in explained(ignored + logged("d[k]", error="KeyError: 3")).summary
    failed = "--- Logging error ---\n" + logged("log.info('a', 3)", error="TypeError: not all arguments converted")
    assert explain_log(lines_of(failed + 'Call stack:\n  File "train.py", line 3, in f\n    g()\nMessage: a')) is None
    first = (
        f"{logged('d[k]', error='KeyError: 3')}\nDuring handling of the above exception, another exception occurred:"
    )
    assert "ValueError" in explained(first + "\n\n" + logged("f(d)", error="ValueError: no layer 3")).summary


HARMLESS = {
    "a socket that is tried again": "[W] [c10d] The client socket has failed to connect to [localhost]:29500",
    "a port of another program": "The server socket has failed to bind to [::]:6006 (98 - Address already in use)",
    "a batch that is halved": "CUDA out of memory. Tried to allocate 2.00 GiB; the batch size is halved",
    "an fp16 step that is skipped": "{'loss': 2.2, 'grad_norm': nan}",
    "the initial value of a minimum": "best_loss=inf",
}


@pytest.mark.parametrize("line", HARMLESS.values(), ids=HARMLESS.keys())
def test_a_line_after_which_the_run_continued_explains_nothing(line):
    steps = "{'loss': 2.1}\n{'loss': 2.0}\n"
    assert explain_log(lines_of(f"{line}\n{steps}")) is None
    assert "KeyError" in explained(f"{line}\n{steps}" + logged("d[k]", error="KeyError: 3")).summary


def test_an_error_explains_better_than_a_warning_before_it():
    warning = "hub.py:12: UserWarning: cannot write the cache: [Errno 13] Permission denied: '/cache'\n"
    assert explained(warning).cause == "not-permitted"
    assert "KeyError" in explained(warning + logged("d[k]", error="KeyError: 3")).summary


def test_steps_that_a_process_had_buffered_come_after_its_error(tmp_path):
    """With -m, Python writes the buffer of standard output after the traceback."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    script = "for step in range(3):\n  print('step', step, 'loss:', 1.2)\nraise ValueError('CUDA out of memory')"
    for text in (script, script.replace("CUDA out of memory", "bad")):
        (tmp_path / "job.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "job"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert done.stdout.index("ValueError") < done.stdout.index("step 0")
        assert explained(done.stdout).place == ("device" if "CUDA" in text else "")
        assert explain_log(lines_of(done.stdout + bars(*range(1, 9)))) is None  # bars have no buffer


def bars(*done):
    return "".join(f" 1%|1  | {step}/9 [00:01<00:10]\n" for step in done)


def test_one_more_step_of_another_rank_does_not_hide_an_error():
    error = "".join(f"[rank3]: {line}\n" for line in logged("model(x)", error="CUDA out of memory. Tried").splitlines())
    assert explained(bars(0, 1, 2) + error + bars(2, 3, 3)).ranks == ("3",)
    assert explained("{'loss': 2.1}\nCUDA out of memory. Tried\n" + bars(3) + "{'loss': 2.0}\n").place == "device"
    assert explain_log(lines_of(bars(0, 1) + error + bars(2, 3))) is None


def test_bars_that_start_again_in_each_epoch_show_that_the_run_continued():
    error = "CUDA out of memory. Tried to allocate 2.00 GiB; the batch size is halved\n"
    assert explain_log(lines_of(bars(*range(10), 0, 1, 2) + error + bars(3, 4))) is None


def test_a_step_after_the_traceback_of_an_ignored_exception_is_no_part_of_it():
    ignored = "Exception ignored in: <function D.__del__ at 0x7f>\n" + logged("self.f", error="AttributeError: f")
    assert explain_log(lines_of(ignored + "{'loss': 2.2, 'grad_norm': nan}\n{'loss': 2.1}\n{'loss': 2.0}\n")) is None


def test_exceptions_are_found_by_their_order_and_each_is_handled_alone():
    first = "".join(f"[rank3]: {line}\n" for line in logged("d[k]", error="KeyError: 3").splitlines())
    assert explained(first + logged("start()", error="ValueError: rank 3 failed")).ranks == ("3",)
    handled = logged("pipe.send(x)", error="BrokenPipeError: no reader") + "\nDuring handling of the above exception, "
    handled += "another exception occurred:\n\n" + logged("stop()", error="SystemExit: 1")
    assert "KeyError" in explained(logged("d[k]", error="KeyError: 3") + handled).summary


def test_exceptions_whose_class_is_called_error():
    for name in ("cv2.error", "struct.error", "socket.gaierror"):
        found = explained(logged("f(x)", error=f"{name}: bad input") + "Epoch: 2\n")
        assert found.summary.endswith(f"{name}: bad input")


TITLE = "Traceback (most recent call last):\n"
FAILED = TITLE + '  File "/home/me/train.py", line 7, in <module>\n    d[k]\nKeyError: 3\n'
LOGGERS = (
    *("[2024-09-15 20:18:0{}] [INFO] [rank2]: ", "2024-07-24 08:45:13,61{} ", "2024-07-24T08:45:13.61{}Z stderr F "),
    *("Jul 24 08:45:1{} node7 python[1234]: ", "stderr: ", "[1,mpirank:2,algo-1]<stderr>:", "> ", "    | "),
)


@pytest.mark.parametrize("prefix", LOGGERS)
def test_prefixes_of_loggers_are_no_part_of_a_traceback(prefix):
    lines = FAILED.splitlines()
    found = explained("starting\n" + "\n".join(prefix.format(at) + line for at, line in enumerate(lines)))
    assert found.at == "/home/me/train.py:7" and found.summary.endswith("KeyError: 3")
    assert found.ranks == (("2",) if "rank2]" in prefix else ())


def test_a_traceback_without_its_first_lines():
    for text in (FAILED.removeprefix(TITLE), "KeyError: 3", '  File "t.py", line 3\n    f(\n     ^\nSyntaxError: 3'):
        assert explained(text).summary.endswith("Error: 3")


def test_the_rank_that_failed_first_is_named_although_others_are_printed_before():
    text = "".join(f"[rank{rank}]: {line}\n" for rank in (0, 3) for line in FAILED.splitlines())
    report = "Root Cause (first observed failure):\n[0]:\n  time  : {}\n  host  : n\n  rank  : {} (local_rank: 0)\n"
    assert explained(text).ranks == ("0",)
    assert explained(
        text + report.format("2025-02-17_16:43:27", 0) + report.format("2025-02-17_16:43:26", 3)
    ).ranks == ("3",)
    step = "slurmstepd: error: *** STEP 1132.0 ON node7 CANCELLED AT 2025-01-02T13:09:33 ***\n"
    assert explained(step + text).cause == "exception"  # srun stops the other ranks
    assert explained(step).cause == "stopped-by-scheduler"


def test_an_exception_in_a_dataloader_worker_is_named_with_its_line():
    caught = logged("for batch in loader:", error="KeyError: Caught KeyError in DataLoader worker process 0.")
    found = explained(caught + "Original " + FAILED)
    assert (found.at, found.summary.split(" with ")[1]) == ("/home/me/train.py:7", "KeyError: 3")


def test_a_process_that_ended_without_a_message_may_have_run_out_of_memory():
    for cause in ("dataloader-worker-ended", "connection-lost"):
        assert "Memory did not run out" not in explained(LOGS[cause][0]).summary


def test_a_step_that_each_rank_prints_is_one_step():
    steps = "".join(f"step {step} loss: 1.0\n" * 2 for step in range(2))
    assert explained(steps + LOGS["dataloader-worker-ended"][0]).steps == 2
    swift = '{"loss": 1.39, "global_step/max_steps": "8275/11043"}\n{"loss": 0.0, "grad_norm": NaN}\n'
    console = "{'loss': 0.49, 'epoch': 0.26, 'global_step/max_steps': '12/94'}\n{'loss': nan}\n"
    assert (explained(swift).steps, explained(console).steps) == (8275, 12)


def test_the_traceback_of_a_launcher_names_no_line():
    frame = (
        '  File "/opt/env/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 300, in launch_agent\n'
    )
    log = f'Traceback (most recent call last):\n  File "<frozen runpy>", line 88, in _run_code\n{frame}'
    assert explained(log + LAUNCHER.format(code=-11, signal="11 (SIGSEGV)")).at == ""


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


def recomputed_otherwise(folder: Path) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    weight, sizes = torch.nn.Parameter(torch.ones(4)), iter((4, 0))
    checkpoint(lambda x: (x * weight[: next(sizes)]).sin().sum(), torch.ones(1), use_reentrant=False).backward()


def no_trained_weight(folder: Path) -> None:
    import torch

    torch.nn.Linear(2, 2).requires_grad_(False)(torch.ones(1, 2)).sum().backward()


def empty_embedding(folder: Path) -> None:
    import torch

    torch.nn.functional.embedding(torch.zeros(1, dtype=torch.long), torch.empty(0))


def other_types(folder: Path) -> None:
    import torch

    torch.nn.Linear(2, 2).bfloat16()(torch.ones(1, 2))


def other_devices(folder: Path) -> None:
    import torch

    torch.nn.Linear(2, 2)(torch.ones(1, 2, device="meta"))


def other_batch_sizes(folder: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    DeepSpeedConfig({"train_batch_size": 16, **sizes})


REAL = {
    recomputed_otherwise: "recomputation-differs",
    no_trained_weight: "lost-gradients",
    empty_embedding: "partitioned-weight",
    other_types: "types-differ",
    other_devices: "devices-differ",
    other_batch_sizes: "batch-sizes",
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
