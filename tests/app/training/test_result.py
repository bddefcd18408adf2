"""How a run ended, from what its ranks left in the run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from zerofit.app.training.result import outcome
from zerofit.launch.local import started
from zerofit.spec.errors import DOES_NOT_FIT, DoesNotFit, RunFailed
from zerofit.spec.foreign import parse_json
from zerofit.spec.run_folder import RunFolder
from zerofit.watch.json_lines import LONGEST
from zerofit.worker import _report_failure, translate


def folder_with(tmp_path, *words: dict) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    for word in words:
        folder.rank_error(word["rank"]).write_text(json.dumps(word))
    return folder


def word(rank: int, kind: str, time_s: float) -> dict:
    problem = {"kind": kind, "message": f"{kind} on {rank}", "hint": "", "where": ""}
    return {"rank": rank, "time_s": time_s, "problems": [problem]}


def test_the_cause_is_shown_not_the_consequences(tmp_path):
    folder = folder_with(tmp_path, word(0, "peer-lost", 1.0), word(1, "out-of-memory", 2.0), word(2, "peer-lost", 1.5))
    with pytest.raises(RunFailed) as error:
        outcome(folder, 1)
    assert error.value.problem.kind == "out-of-memory"
    assert error.value.problem.message == "rank 1: out-of-memory on 1"


def test_a_host_without_room_is_a_finding_as_for_a_command_that_could_ask_it(tmp_path):
    with pytest.raises(DoesNotFit):
        outcome(folder_with(tmp_path, word(1, DOES_NOT_FIT, 1.0)), 1)


def test_an_error_outweighs_a_result(tmp_path):
    folder = folder_with(tmp_path, word(0, "rank-failed", 1.0))
    folder.result.write_text("{}")
    with pytest.raises(RunFailed):
        outcome(folder, 0)


def test_a_rank_that_was_killed_left_no_word(tmp_path):
    folder = folder_with(tmp_path)
    (folder.logs / "launcher.log").write_text("[ERROR] [launch.py] Process exits with return code = -9\n")
    with pytest.raises(RunFailed) as error:
        outcome(folder, 1)
    assert error.value.problem.kind == "killed"
    with started(folder, ["false"], os.environ, None) as process:  # the next start, whose launcher fails by itself
        process.wait()
    with pytest.raises(RunFailed) as error:
        outcome(folder, 1)
    assert error.value.problem.kind == "launcher"


def test_exit_code_0_without_a_result_is_a_failure(tmp_path):
    with pytest.raises(RunFailed, match="without a result"):
        outcome(folder_with(tmp_path), 0)


def test_library_errors_are_translated(tmp_path):
    import torch

    oom = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    assert translate(oom, tmp_path).kind == "out-of-memory"
    assert "--micro-batch" in translate(oom, tmp_path).hint
    peer = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")
    assert translate(peer, tmp_path).kind == "peer-lost"
    other = translate(ValueError("first\nsecond"), tmp_path)
    assert (other.kind, other.message) == ("rank-failed", "ValueError: first; second")


class Sent(list):
    """A heartbeat that keeps what a rank sends."""

    send = list.append


def test_a_report_arrives_whatever_its_text_is(tmp_path):
    """A name in Latin-1 has no UTF-8, and some libraries print a whole tensor."""
    folder, sent = folder_with(tmp_path), Sent()
    _report_failure(folder, 1, RuntimeError("cannot read caf\udce9.png " + "9" * 3_000_000), sent)
    line = json.dumps(sent[0]).encode()
    assert len(line) < LONGEST
    (problem,) = parse_json(line)["failure"]["problems"]
    assert r"cannot read caf\udce9.png 99" in problem["message"]
    with pytest.raises(RunFailed, match="rank 1: RuntimeError: cannot read caf"):
        outcome(folder, 3)


def test_a_log_takes_every_character(tmp_path):
    log = "zerofit.worker._log_to(pathlib.Path(sys.argv[1]))"
    program = rf"import sys, pathlib, zerofit.worker; {log}; print('caf\udce9 \u65e5')"
    env = {"PATH": "", "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", program, tmp_path / "log"], check=True, env=env)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "caf\\udce9 \u65e5\n"


def raised(work) -> BaseException:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_only_torch_distributed_loses_ranks(tmp_path):
    """A refused connection of W&B's, of a hub's or of a loader's says nothing of another rank."""
    import socket
    from datetime import timedelta

    import torch.distributed as dist
    from torch._utils import ExceptionWrapper

    from zerofit.launch.local import free_port

    port = free_port()
    refused = raised(lambda: socket.create_connection(("127.0.0.1", port)))
    assert "Connection refused" in str(refused)
    assert translate(refused, tmp_path).kind == "rank-failed"

    def outage() -> None:
        raise RuntimeError(f"wandb: https://api.wandb.ai: {refused}")

    assert translate(raised(outage), tmp_path).kind == "rank-failed"
    loader = ExceptionWrapper((ConnectionRefusedError, refused, None), "in DataLoader worker process 0")
    assert translate(raised(loader.reraise), tmp_path).kind == "rank-failed"

    def meet() -> None:
        dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=1))

    lost = raised(meet)
    assert type(lost).__module__ == "torch.distributed"
    assert translate(lost, tmp_path).kind == "peer-lost"


def test_a_port_that_another_process_has_is_no_lost_rank(tmp_path):
    import socket

    import torch.distributed as dist

    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        taken = raised(lambda: dist.TCPStore("127.0.0.1", port, 1, is_master=True))
    problem = translate(taken, tmp_path)
    assert (problem.kind, str(port) in problem.message) == ("port-in-use", True), problem
