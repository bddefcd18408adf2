"""zerofit.Session: a user's own loop inside ranks trains what plain PyTorch does, and leaves a run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import zerofit as zf
from zerofit.launch.local import free_port, launcher

SCRIPT = """
import copy, sys
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
import zerofit as zf

STEPS = {"steps": int(sys.argv[1])}
run = zf.Run(data="digits", micro_batch=4, gradient_accumulation_steps=2, lr=0.05, optimizer="sgd", momentum=0.9,
             schedule="constant", warmup_steps=0, weight_decay=0.0, gradient_clipping=0.0, ds_config="zero1",
             ema=0.5, output="run", **STEPS)
session = zf.Session(run)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
plain = copy.deepcopy(model)
engine, batches = session.prepare(model)
seen = []
for batch in batches:
    loss = cross_entropy(engine(batch["inputs"]), batch["labels"])
    engine.backward(loss)
    engine.step()
    session.step(loss)
    seen.append((batch["inputs"], batch["labels"]))

of_all = [None] * dist.get_world_size()
dist.all_gather_object(of_all, seen)
optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), []
averages = None
for step in range(0, len(seen), 2):
    parts = [one[step + k] for one in of_all for k in range(2)]
    loss = torch.stack([cross_entropy(plain(x), y) for x, y in parts]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    now = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    averages = {name: (averages[name] + now[name]) / 2 for name in now} if averages else now
if len(sys.argv) > 2:
    for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    recorded = [__import__("json").loads(line)["loss"] for line in open("run/metrics.jsonl")]
    torch.testing.assert_close(torch.tensor(recorded), torch.tensor(losses), rtol=1e-5, atol=1e-6)
    saved = __import__("safetensors.torch").torch.load_file("run/model-ema/model.safetensors")
    torch.testing.assert_close(saved, averages, rtol=1e-5, atol=1e-6)
if dist.get_rank() == 0:
    result = session.result
    sys.stdout.write(f"ENDED {result.steps} {result.world_size} {result.resumed_from}\\n")
"""


def test_an_own_loop_trains_what_plain_pytorch_does(tmp_path):
    """On two ranks; tests/test_docs_python.py starts such a script with python alone."""
    (tmp_path / "own.py").write_text(SCRIPT)

    def ended(*args: str) -> str:
        argv, env = [*launcher(2, free_port()), "own.py", *args], {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stderr[:6000]
        return next(line for line in done.stdout.splitlines() if line.startswith("ENDED"))

    assert ended("6", "compare") == "ENDED 6 2 None"
    folder = tmp_path / "run"
    assert json.loads((folder / "result.json").read_text())["samples"] == 6 * 8 * 2
    assert (folder / "model" / "model.safetensors").is_file()
    assert ended("9") == f"ENDED 9 2 {folder}/checkpoints/step-00000006"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 9


def test_a_loop_that_weights_no_losses_has_equal_micro_batches(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    session = zf.Session(zf.Run(model="lenet", data="digits", micro_batch_by_rank="2,1", output="run"))
    with pytest.raises(zf.UserError, match="micro_batch_by_rank 2,1: a custom loop"):
        session._request(None)


NAMED = """
import atexit, os, sys
import psutil
import torch.distributed as dist
atexit.register(lambda: sys.stdout.write(f"LEFT {not dist.is_initialized()}\\n"))
seen = psutil.virtual_memory
psutil.virtual_memory = lambda: seen()._replace(available=int(sys.argv[1]))
import zerofit as zf

run = zf.Run(model="lenet", data="digits", micro_batch=8, steps=2, output="run")
try:
    engine, batches = zf.Session(run).prepare()
except zf.DoesNotFit as error:
    sys.stdout.write(f"REFUSED {os.environ['RANK']} {error.problems[0].kind} {error}\\n")
else:
    sys.stdout.write(f"STARTED {len(next(batches)['labels'])}\\n")
"""


@pytest.mark.slow
def test_a_named_model_is_held_against_the_memory_that_is_free(tmp_path):
    (tmp_path / "named.py").write_text(NAMED)
    ranks = ["-m", "torch.distributed.run", "--nproc_per_node=2"]

    def said(*argv: str) -> list[str]:
        done = subprocess.run([sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stderr[:6000]
        lines = sorted(done.stdout.splitlines())
        # no rank ends with the group's threads running
        assert lines.count("LEFT True") == (2 if argv[0] == "-m" else 1)
        return [line for line in lines if line.startswith(("REFUSED", "STARTED"))]

    both = said(*ranks, "named.py", str(1 << 20))
    assert [line.split()[:3] for line in both] == [["REFUSED", "0", "does-not-fit"], ["REFUSED", "1", "does-not-fit"]]
    assert all("lenet needs " in line and "are free for each of 2 ranks" in line for line in both), both
    assert not (tmp_path / "run").exists()
    assert said("named.py", str(64 << 30)) == ["STARTED 8"]
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["forecast"]["reserved_bytes"] > 0
