"""The launcher of this machine's ranks: what each rank is told, and how all end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from zerofit.launch.local import launcher

TOLD = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT")
names += ("CUDA_VISIBLE_DEVICES",)
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write(json.dumps({n: os.environ.get(n) for n in names}))
"""
ONE_FAILS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
if os.environ["RANK"] == "1":
    child.kill()
    while len(os.listdir(sys.argv[1])) < 2:
        time.sleep(0.05)
    os._exit(7) if len(sys.argv) < 3 else os.kill(os.getpid(), int(sys.argv[2]))
time.sleep(600)
"""

LATE = """
import subprocess, sys
from zerofit.launch import local_ranks

class Late(subprocess.Popen):
    def poll(self):
        polled, self.polled = getattr(self, "polled", False), True
        return self.wait() if polled else None

local_ranks.subprocess.Popen = Late
sys.exit(local_ranks.main())
"""


def ranks_of(tmp_path, text, *args, **environment) -> subprocess.Popen:
    program, said = tmp_path / "program.py", tmp_path / "said"
    program.write_text(text)
    said.mkdir()
    command = [*launcher(2, 29123), str(program), str(said), *args]
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)


def test_each_rank_is_told_its_place_and_keeps_the_users_gpus(tmp_path):
    """DeepSpeed's launcher writes "0,1" over CUDA_VISIBLE_DEVICES: two ranks would train on other GPUs."""
    assert ranks_of(tmp_path, TOLD, CUDA_VISIBLE_DEVICES="2,5").wait(60) == 0
    same = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1", "CUDA_VISIBLE_DEVICES": "2,5"}
    same |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29123"}
    for rank in "01":
        assert json.loads((tmp_path / "said" / rank).read_text()) == {"RANK": rank, "LOCAL_RANK": rank, **same}


@pytest.mark.parametrize(("args", "code", "shown"), [((), 7, 7), (("9",), 137, -9)])
def test_a_rank_that_fails_ends_the_others_and_their_children(tmp_path, args, code, shown):
    process = ranks_of(tmp_path, ONE_FAILS, *args)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"return code = {shown}" in errors
    pids = [int(pid) for path in (tmp_path / "said").iterdir() for pid in path.read_text().split()]
    assert len(pids) == 4
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_rank_that_fails_between_two_polls_is_noticed(tmp_path):
    """The launcher exited with 0: it dropped such a rank as if it had ended well."""
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    arguments = [str(os.getpid()), "1", "29123", str(tmp_path / "fails.py")]
    assert subprocess.run([sys.executable, tmp_path / "late.py", *arguments], timeout=60).returncode == 3


def test_a_terminated_launcher_ends_its_ranks(tmp_path):
    process = ranks_of(tmp_path, "import time, sys; open(sys.argv[1] + '/x', 'a').write('.'); time.sleep(600)")
    deadline = time.monotonic() + 60
    while not (tmp_path / "said" / "x").exists() or (tmp_path / "said" / "x").read_text() != "..":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = psutil.Process(process.pid).children()
    process.terminate()
    assert process.wait(60) == 1
    assert len(ranks) == 2 and not [rank for rank in ranks if rank.is_running()]


def test_it_imports_no_torch():
    code = "import sys, zerofit.launch.local_ranks; print(*{'torch', 'deepspeed', 'pydantic'} & {*sys.modules})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "\n"
