"""Op builds: they end with the command that asked for them; a lock is removed only where nobody builds any more."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from zerofit.doctor.measured import MeasurementJob, measured
from zerofit.doctor.remote import INSIDE, ask_all, conversations
from zerofit.launch import ops
from zerofit.launch.ops import build_ops
from zerofit.spec.errors import RunFailed

# stands in for DeepSpeed: a build that starts a compiler in a process group of its own, as ninja does
ACCELERATOR = """
import os, pathlib, subprocess, sys

PLACE = pathlib.Path(os.environ["PLACE"])

class Builder:
    def __init__(self, name):
        self.name = name

    def is_compatible(self, verbose):
        if self.name == "NoBuilder":
            print("it lacks a header")
        return self.name != "NoBuilder"

    def load(self):
        if self.name == "QuickBuilder":
            return
        compiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
        (PLACE / "pids").write_text(f"{os.getpid()} {compiler.pid}")
        compiler.wait()

class Accelerator:
    def get_op_builder(self, name):
        return lambda: Builder(name)

def get_accelerator():
    return Accelerator()
"""
BUILD = """
import os, sys
from zerofit.launch.ops import build_ops
build_ops([sys.argv[1]], dict(os.environ), print)
"""


@pytest.fixture
def env(tmp_path):
    (tmp_path / "lib" / "deepspeed").mkdir(parents=True)
    (tmp_path / "lib" / "deepspeed" / "__init__.py").touch()
    (tmp_path / "lib" / "deepspeed" / "accelerator.py").write_text(ACCELERATOR)
    (tmp_path / "ops").mkdir()
    place = {"PLACE": str(tmp_path), "PYTHONPATH": str(tmp_path / "lib")}
    return {**os.environ, **place, "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}


def wait_for(path: Path) -> str:
    end = time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_build_ends_with_its_command_compilers_and_all(env, tmp_path, number):
    command = [sys.executable, "-c", BUILD, "SlowBuilder"]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # where tests run behind nohup, it is ignored
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, preexec_fn=heed) as asking:
        pids = [int(pid) for pid in wait_for(tmp_path / "pids").split()]
        processes = [psutil.Process(pid) for pid in pids]
        asking.send_signal(number)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert len(pids) == 2 and not alive


def test_what_cannot_be_built_says_why(env):
    said: list[str] = []
    build_ops(["QuickBuilder"], env, said.append)
    assert any("compiling DeepSpeed's Quick op" in words for words in said)
    with pytest.raises(RunFailed) as failed:
        build_ops(["NoBuilder"], env, said.append)
    assert "NoBuilder is not compatible" in failed.value.problem.message


def test_what_is_compiled_is_not_looked_for_again(env, tmp_path):
    """Nor by another process; for another environment it is, and where DeepSpeed or torch was installed since."""
    build_ops(["QuickBuilder"], env, lambda words: None)
    build_ops(["QuickBuilder"], env, pytest.fail)
    (built,) = (tmp_path / "ops").glob(".QuickBuilder.*.built")
    built.rename(built.with_name(".QuickBuilder.other.built"))
    said: list[str] = []
    build_ops(["QuickBuilder"], env, said.append)
    assert any("compiling" in words for words in said)
    installed = Path(torch.__file__).stat().st_mtime
    os.utime(built, (installed - 1, installed - 1))
    said.clear()
    build_ops(["QuickBuilder"], env, said.append)
    assert any("compiling" in words for words in said)
    build_ops(["QuickBuilder"], env, pytest.fail)


BATON = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print(1, flush=True)
time.sleep(600)
"""


@pytest.fixture
def old_torch(monkeypatch):
    """A torch for which a lock file that exists is held."""
    monkeypatch.setattr(ops, "locks_by_existence", lambda: True)


def test_a_lock_of_a_build_that_lives_is_waited_for(env, tmp_path, old_torch):
    """With torch's own lock, held by another process that is then killed."""
    op = tmp_path / "ops" / "cpu_adam"
    op.mkdir()
    said: list[str] = []
    with subprocess.Popen([sys.executable, "-c", BATON, str(op / "lock")], stdout=subprocess.PIPE) as owner:
        try:
            owner.stdout.readline()
            assert ops.lock_owner(op / "lock") == f"process {owner.pid}"
            start = time.monotonic()

            def show(words: str) -> None:
                said.append(words)
                if time.monotonic() - start > 1.0:
                    owner.kill()

            build_ops(["QuickBuilder"], env, show)
        finally:
            owner.kill()
    assert f"waiting for process {owner.pid}, which compiles DeepSpeed's cpu_adam op" in said
    assert not (op / "lock").exists() and time.monotonic() - start > 1.0


def test_a_lock_of_a_killed_build_is_removed_at_once(tmp_path, old_torch):
    for name in ("cpu_adam", "async_io"):
        (tmp_path / "ops" / name).mkdir(parents=True)
        (tmp_path / "ops" / name / "lock").touch()
    with subprocess.Popen(["sleep", "600"], cwd=tmp_path / "ops" / "async_io") as compiler:
        try:
            assert ops.lock_owner(tmp_path / "ops" / "cpu_adam" / "lock") is None
            assert ops.lock_owner(tmp_path / "ops" / "async_io" / "lock") == f"process {compiler.pid}"
        finally:
            compiler.kill()
    start = time.monotonic()
    ops.clear_stale_locks(tmp_path / "ops", lambda words: pytest.fail(words))
    assert time.monotonic() - start < 2 and not list((tmp_path / "ops").glob("*/lock"))


def test_a_lock_in_the_kernel_needs_no_clearing(tmp_path):
    """torch 2.14: what killed builds leave is no lock, and removing what another host holds would end it."""
    import inspect

    from torch.utils import cpp_extension

    assert ops.locks_by_existence() == ("FileBaton" in inspect.getsource(cpp_extension))
    if not ops.locks_by_existence():
        assert "FileLock(os.path.join(build_directory, 'lock'))" in inspect.getsource(cpp_extension)
        (tmp_path / "cpu_adam").mkdir()
        (tmp_path / "cpu_adam" / "lock").touch()
        ops.clear_stale_locks(tmp_path, lambda words: pytest.fail(words))
        assert (tmp_path / "cpu_adam" / "lock").exists()


def test_on_a_shared_file_system_a_build_may_be_another_hosts(tmp_path, monkeypatch):
    monkeypatch.setattr(ops, "_file_system", lambda path: "nfs4")
    op = tmp_path / "cpu_adam"
    op.mkdir()
    (op / "lock").touch()
    assert ops.lock_owner(op / "lock") == "another host that shares this folder"
    long_ago = time.time() - 2 * ops.QUIET_S
    for path in (op / "lock", op):
        os.utime(path, (long_ago, long_ago))
    assert ops.lock_owner(op / "lock") is None


def test_the_kind_of_a_file_system_is_known(tmp_path):
    said = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout.strip()
    assert ops._file_system(tmp_path)[:3] in (said[:3], "ove") and ops._file_system(Path("/proc/self")) == "proc"


def test_hosts_are_asked_to_build(env, monkeypatch):
    """The question that `--build-ops` puts to each host, and what it says on the way."""
    for name in ("PLACE", "PYTHONPATH", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.setenv(name, env[name])
    said: list[str] = []

    async def ask():
        async with conversations(["localhost"], module=INSIDE) as there:
            question = {"ask": "build", "ops": ["QuickBuilder", "NoBuilder"]}
            return (await ask_all(there, question, 60, said.append))["localhost"]

    failed = asyncio.run(ask())["failed"]
    assert failed.keys() == {"NoBuilder"} and failed["NoBuilder"]["kind"] == "op-build"
    assert any("compiling DeepSpeed's Quick op" in words for words in said)


def test_a_build_on_a_host_ends_with_the_connection(env, tmp_path):
    question = '{"ask": "build", "ops": ["SlowBuilder"]}\n'
    argv = [sys.executable, "-P", "-m", "zerofit.doctor.torch_probe"]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as there:
        there.stdin.write(question)
        there.stdin.flush()
        pids = [int(pid) for pid in wait_for(tmp_path / "pids").split()]
        processes = [psutil.Process(pid) for pid in pids]
        there.stdin.close()
        _, alive = psutil.wait_procs(processes, timeout=10)
    assert len(pids) == 2 and not alive


def test_a_rank_that_cannot_measure_is_named():
    job = MeasurementJob(ranks=1, threads=0, seconds=0.01)
    with pytest.raises(RunFailed, match=r"rank 0 could not measure: .*set_num_threads expects a positive integer"):
        measured(job, 1, lambda words: None)


def test_a_rank_that_takes_too_long_is_named(monkeypatch):
    monkeypatch.setattr("zerofit.doctor.measured.LIMIT_S", 0)
    job = MeasurementJob(ranks=1, threads=1, seconds=0.01)
    with pytest.raises(RunFailed, match="rank 0 did not finish measuring within 0 minutes"):
        measured(job, 1, lambda words: None)
