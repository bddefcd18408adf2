"""Facts of one host, asked of the real process, against other ways to learn them."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
import torch

from zerofit.doctor import system
from zerofit.doctor.facts import answer, code_hash, collect, model_code
from zerofit.doctor.serve import MARK
from zerofit.spec import local_machine


def ask(*questions: dict[str, object], env: dict[str, str] | None = None) -> list[dict]:
    """Answers of a process of its own."""
    text = "".join(json.dumps(question) + "\n" for question in questions)
    argv = [sys.executable, "-P", "-m", "zerofit.doctor.facts"]
    done = subprocess.run(
        argv, input=text, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines()]
    assert lines[0] == {"greeting": True} and len(lines) == len(questions) + 1
    return lines[1:]


def test_what_it_says_is_so():
    (found,) = ask({"ask": "facts", "compilers": True})
    versions = found["versions"]
    for name in ("zerofit", "deepspeed", "transformers"):
        assert versions[name] == importlib.metadata.version(name)
    assert versions["torch"] == torch.__version__ and versions["torch_git"] == torch.version.git_version
    assert (versions["cuda"], versions["hip"]) == (torch.version.cuda, torch.version.hip)
    assert found["limits"]["nofile"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 0 < found["memory"]["free_bytes"] <= found["memory"]["total_bytes"] <= psutil.virtual_memory().total
    addresses = {row.address.split("%")[0] for rows in psutil.net_if_addrs().values() for row in rows}
    assert {one["address"] for one in found["addresses"]} <= addresses
    loop = next(one for one in found["addresses"] if one["address"] == "127.0.0.1")
    assert loop["mtu"] == psutil.net_if_stats()["lo"].mtu
    first = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    assert found["compilers"]["g++"] == first
    assert abs(found["clock"][0] - time.time()) < 30


def test_it_starts_without_torch():
    code = "import zerofit.doctor.facts, sys; print([m for m in ('torch', 'deepspeed', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    code = "import zerofit.doctor.preflight, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_it_costs_little():
    """0.3 s of processor time with the compiler that looks for libaio; the least of three, since caches may be cold."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ask({"ask": "facts"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 1.5


def test_memory_is_the_control_groups(tmp_path, monkeypatch):

    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2**29}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**28}\n")
    monkeypatch.setattr(local_machine, "control_groups", lambda controller: [tmp_path])
    assert local_machine.host_memory() == (2**30, 2**29 + 2**28)
    (tmp_path / "memory.max").write_text("max\n")
    assert local_machine.host_memory()[0] == psutil.virtual_memory().total


def test_all_cores_count_if_the_physical_ones_are_unknown(monkeypatch):
    """Some sandboxes have no topology in /sys, so psutil returns None."""
    monkeypatch.setattr(local_machine, "CPUS", Path("nowhere"))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert system.cores()["usable"] == local_machine.usable_cores() == 3


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "250000 100000"}, 3),  # Docker's --cpus 2.5 (cgroup v2)
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}, 4),  # cgroup v1
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 8),
        ({}, 8),
    ],
)
def test_a_quota_of_cpu_time_limits_the_cores(tmp_path, monkeypatch, files, cores):
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(local_machine, "CPUS", tmp_path / "nowhere")
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(local_machine, "control_groups", lambda controller: [tmp_path] if controller == "cpu" else [])
    assert local_machine.usable_cores() == cores


def test_both_threads_of_a_core_are_one_core(tmp_path, monkeypatch):
    """Slurm may give a job both threads of 2 cores of a host with 64: it started 4 threads per rank."""
    for number in range(128):
        (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(
            f"{number % 64},{number % 64 + 64}\n"
        )
    monkeypatch.setattr(local_machine, "control_groups", lambda controller: [])
    assert local_machine.usable_cores() == min(psutil.cpu_count(logical=False), len(os.sched_getaffinity(0)))
    monkeypatch.setattr(local_machine, "CPUS", tmp_path)
    for allowed, cores in (({5, 6, 69, 70}, 2), ({5, 6}, 2), (set(range(128)), 64)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        assert local_machine.usable_cores() == cores


def test_memory_of_a_gpu_is_no_place_for_a_cpu_rank(tmp_path, monkeypatch):
    """As on Grace Hopper: the kernel lists one node with cores, the GPU's memory, and seven nodes for MIG."""
    for number in range(9):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text("\n" if number else "0-71\n")
    monkeypatch.setattr(local_machine, "NODES", tmp_path)
    assert local_machine.cpu_ranks(72) == 2


def test_hashes_follow_the_bytes(tmp_path):
    (tmp_path / "net").mkdir()
    module = tmp_path / "net" / "a.py"
    module.write_text("x = 1\n")
    asked = {"ask": "facts", "code": str(tmp_path / "net"), "run_file": str(module)}
    (before,) = ask(asked)
    (tmp_path / "net" / "__pycache__").mkdir()
    (tmp_path / "net" / "__pycache__" / "a.py").write_text("passed over")
    (same,) = ask(asked)
    module.write_text("x = 2\n")
    (after,) = ask(asked)
    assert before["code"] == same["code"] != after["code"] and before["run_file"] != after["run_file"]
    assert before["code"]["zerofit"] == after["code"]["zerofit"]
    (missing,) = ask({**asked, "code": str(tmp_path / "no"), "run_file": str(tmp_path / "no")})
    assert missing["code"]["model"] is None and missing["run_file"] is None


def test_the_code_of_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "single.py").touch()
    assert model_code("own.nets:make") == Path("own") and model_code("single:Net") == Path("single.py")
    assert [model_code(name) for name in ("gpt2", "/models/x:y", "no_such_thing:make", "a b:c")] == [None] * 4
    (tmp_path / "single").mkdir()  # weights of the model; Python imports single.py
    assert model_code("single:Net") == Path("single.py")
    (tmp_path / "single" / "__init__.py").touch()
    assert model_code("single:Net") == Path("single")
    (tmp_path / "own" / "net.py").write_text("x = 1")
    before = code_hash(tmp_path)
    for aside in (".git", "__pycache__", "venv"):
        (tmp_path / aside).mkdir()
        (tmp_path / aside / "a.py").touch()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "run.json").touch()
    assert code_hash(tmp_path) == before
    (tmp_path / "own" / "more.py").touch()
    assert code_hash(tmp_path) != before


def test_a_run_folder_is_the_same_one_or_not(tmp_path):
    (tmp_path / "token").touch()
    with ExitStack() as stack:
        same = collect({"run_folder": str(tmp_path), "token": "token"}, stack)["run_folder"]
        assert same["same"] and same["writable"] and (tmp_path / same["mark"]).exists()
        other = collect({"run_folder": str(tmp_path), "token": "another"}, stack)["run_folder"]
        assert not other["same"] and other["writable"] and other["mark"] is None
        missing = collect({"run_folder": str(tmp_path / "a" / "b"), "token": "token"}, stack)["run_folder"]
        assert not missing["same"] and not missing["exists"] and not (tmp_path / "a").exists()
        # stat fails, as in a folder of another user
        refused = collect({"run_folder": str(tmp_path / ("a" * 300)), "token": "token"}, stack)["run_folder"]
        assert not refused["same"] and not refused["exists"]
    assert [p.name for p in tmp_path.iterdir()] == ["token"]


def test_a_process_of_a_run_is_seen():
    code = "import time; print(1, flush=True); time.sleep(60)"
    env = {**os.environ, "ZEROFIT_RUN": "that-run"}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as stray:
        try:
            stray.stdout.readline()
            (found,) = ask({"ask": "facts"})
            assert [s for s in found["strays"] if s["pid"] == stray.pid and s["run"] == "that-run"]
        finally:
            stray.kill()


def test_ports(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        taken, reached = ask({"ask": "listen", "port": port}, {"ask": "reach", "targets": [["127.0.0.1", port]]})
    assert f"port {port} is in use by" in taken["error"] and str(os.getpid()) in taken["error"]
    (row,) = reached["reached"]
    assert row["error"] is None and row["address"] == "127.0.0.1" and row["interface"] == "lo"
    free, refused = ask({"ask": "listen", "port": port}, {"ask": "reach", "targets": [["127.0.0.1", 1]]})
    assert free == {"error": None, "port": port, "clock": free["clock"]}
    assert refused["reached"] == [{"error": "refused"}]


def test_a_port_that_only_root_may_use_is_not_in_use(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket, "create_server", refuse)
    with ExitStack() as stack:
        found = answer({"ask": "listen", "port": 80}, stack, lambda words: None)
    assert found == {"error": "port 80: Permission denied"}


SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) echo "0, GPU-a, NVIDIA H200, 143771, 1024, 9.0, 580.82.07"
               echo "1, GPU-b, NVIDIA H200, [N/A], [N/A], 9.0, 580.82.07" ;;
*) echo 'GPU-a, 4711, /usr/bin/python, train.py' ;;
esac
"""


def test_nvidia_smi_is_read(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = system.gpus()
    assert found["driver"] == "580.82.07" and found["gpu_error"] is None
    first, second = found["gpus"]
    assert first["total_bytes"] == 143771 * 2**20 and first["used_bytes"] == 2**30 and second["total_bytes"] is None
    assert first["processes"] == [{"pid": 4711, "name": "/usr/bin/python, train.py"}]
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    assert system.gpus()["gpus"] == [] and "version mismatch" in system.gpus()["gpu_error"]


@pytest.mark.gpu
def test_gpus_are_torchs():
    found = system.gpus()["gpus"]
    assert [gpu["name"] for gpu in found] == [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    for gpu in found:
        assert gpu["total_bytes"] >= torch.cuda.get_device_properties(gpu["index"]).total_memory
