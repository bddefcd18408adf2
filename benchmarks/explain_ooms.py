"""Run out of memory on purpose, in a dozen ways, and compare what `zerofit explain` says of each log with the fault.

    python benchmarks/explain_ooms.py [NAME ...]

Each case is a small script on the CPU, in one process of plain torch or in two ranks of DeepSpeed (gloo), each with a
limited data segment. It runs twice: with its fault, which must end it, and with the change that `explain` names, which
must let it end well.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from zerofit.explain.from_log import explain_log
from zerofit.explain.log import read_log

MIB = 1 << 20
M_MMAP_THRESHOLD = -3  # malloc.h
LIMIT_BYTES = 400 * MIB  # above what the process has after it imported torch
MODEL = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self, width=256, vocabulary=1000, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.lm_head = nn.Linear(width, vocabulary)
    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.lm_head(x)
def batch(samples, tokens=128, vocabulary=1000):
    return torch.randint(0, vocabulary, (samples, tokens))
def evaluate(model, batches, keep):
    all_preds = []
    with torch.no_grad():
        for x in batches:
            logits = model(x)
            all_preds.append(logits if keep else logits.argmax(-1))
    return torch.cat(all_preds)
"""
# name -> (cause, script, part of the change); `fixed` is whether the script runs with the change
CASES: dict[str, tuple[str, str, str]] = {
    "a batch that is too large": (
        "activations",
        "model = Model(vocabulary=50)\nx = batch(8 if fixed else 2000, vocabulary=50)\nmodel(x).sum().backward()",
        "micro batch",
    ),
    "a large vocabulary": (
        "logits",
        "model = Model(vocabulary=30000, width=64)\nx = batch(4, vocabulary=30000)\n"
        "hidden = torch.tanh(model.embedding(x))\n"
        "if fixed:\n    for part in hidden.flatten(0, 1).split(64):\n"
        "        F.cross_entropy(model.lm_head(part), torch.zeros(64, "
        "dtype=torch.long)).backward(retain_graph=True)\n"
        "else:\n    logits = [model.lm_head(hidden) for _ in range(8)]",
        "loss in chunks",
    ),
    "the optimizer's first step": (
        "optimizer-state",
        "model = nn.Linear(5000, 6000)\n"
        "optimizer = (torch.optim.SGD if fixed else torch.optim.Adam)(model.parameters())\n"
        "model(torch.randn(2, 5000)).sum().backward()\noptimizer.step()",
        "optimizer",
    ),
    "weights that are too large": (
        "weights-in-host-memory",
        "model = nn.Sequential(*(nn.Linear(4000, 4000) for _ in range(5)))\n"
        "model.to(torch.bfloat16 if fixed else torch.float64)",
        "bfloat16",
    ),
    "an evaluation that keeps logits": (
        "evaluation",
        "model = Model()\nevaluate(model, (batch(8) for _ in range(200)), keep=not fixed)",
        "argmax",
    ),
    "an evaluation with a large batch": (
        "evaluation",
        "model = Model(vocabulary=50)\nevaluate(model, [batch(8 if fixed else 4000, vocabulary=50)], keep=False)",
        "eval_batch_size",
    ),
    "an attention matrix": (
        "activations",
        "def forward(x):\n    return (x[:, None] if not fixed else x) * x\nforward(torch.ones(30000)).sum()",
        "micro batch",
    ),
    "a loss that is kept": (
        "unknown",
        "model, losses = Model(vocabulary=50), []\nfor step in range(200):\n"
        "    loss = model(batch(16, vocabulary=50)).sum()\n"
        "    losses.append(loss.item() if fixed else loss)\n"
        "    print(f'step {step} loss: {float(loss):.1f}', flush=True)\n"
        "    if fixed:\n        loss.backward()",
        "rss",
    ),
    "a batch that is longer than before": (
        "unknown",
        "model = Model(vocabulary=50)\nfor step in range(5):\n    tokens = 128 if fixed or step < 4 else 60000\n"
        "    loss = model(batch(8, tokens, vocabulary=50)).sum()\n    loss.backward()\n"
        "    print(f'step {step} loss: {float(loss):.1f}', flush=True)",
        "rss",
    ),
    "data as one large array": (
        "host-memory",
        "import numpy\ndata = numpy.zeros((1000, 10 if fixed else 600000))",
        "memory for the job",
    ),
    "generation": (
        "generation",
        "model = Model()\ndef generate(x, steps):\n    cache = []\n    for _ in range(steps):\n"
        "        cache.append(model(x))\n"
        "    return cache\nwith torch.no_grad():\n    generate(batch(32), 2 if fixed else 200)",
        "fewer or shorter",
    ),
    "saving a copy of everything": (
        "saving-in-host-memory",
        "model = nn.Linear(5000, 6000)\ndef save_checkpoint(copies):\n"
        "    return [{k: v.clone() for k, v in model.state_dict().items()} for _ in range(copies)]\n"
        "save_checkpoint(1 if fixed else 8)",
        "save shards",
    ),
}
RANKS = 2
ENGINE = """
from contextlib import nullcontext
import deepspeed, torch
from torch import nn
deepspeed.init_distributed()
rank = torch.distributed.get_rank()
torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
config |= {"zero_force_ds_cpu_optimizer": False}
def linears(number, width=1024):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(number)))
"""
# name -> (cause, script after ENGINE, part of the change, ranks that may run out first)
RANK_CASES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "weights that every rank loads": (
        "weights-in-host-memory",
        'config |= {"zero_optimization": {"stage": 3}}\n'
        "with deepspeed.zero.Init(config_dict_or_path=config) if fixed else nullcontext():\n"
        "    model = linears(112)\n"
        "deepspeed.initialize(model=model, config=config)[0](torch.ones(1, 1024))",
        "under ZeRO-3",
        ("0", "1"),
    ),
    "a rank whose batch is longer": (
        "activations",
        'config |= {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000000}}\n'
        "model = linears(8, 256)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]\n"
        "batch = torch.ones(4, 12000 if rank == 1 else 1000, 256)\n"
        "for x in batch.split(1 if fixed else 4):\n"
        "    engine.backward(engine(x).square().mean())\n    engine.step()",
        "micro batch",
        ("1",),
    ),
    "Adam's states without ZeRO": (
        "states",
        'config |= {"zero_optimization": {"stage": 1 if fixed else 0, "reduce_bucket_size": 1000000}}\n'
        'config |= {"bf16": {"enabled": True}}\n'
        "model = linears(28)\ngroups = [{'params': layer.parameters()} for layer in model]\n"
        "optimizer = torch.optim.Adam(groups, foreach=False)\n"
        "engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]\n"
        "engine.backward(engine(torch.ones(1, 1024).bfloat16()).square().mean())\nengine.step()",
        "a higher ZeRO stage",
        ("0", "1"),
    ),
}


def outcome(script: Path, log: Path, fixed: bool, ranks: int) -> int:
    """Run a script in limited processes, with their output in a log; return the first exit code that is not zero."""
    log.unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    running = {
        started(script, log, fixed, place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    }
    first = 0
    while running:
        child, status = os.wait()
        running.remove(child)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code
            for other in running:  # as a launcher does
                os.kill(other, signal.SIGKILL)
    return first


def started(script: Path, log: Path, fixed: bool, env: dict[str, str]) -> int:
    """Start a script in a limited process; return its number."""
    if child := os.fork():
        return child
    os.environ |= env
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + LIMIT_BYTES, data + LIMIT_BYTES))
    code = 0
    try:
        runpy.run_path(str(script), {"fixed": fixed}, "__main__")
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # torch's, which names the rank
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def judged(name: str, folder: Path, show: Callable[[str], None]) -> bool:
    """Run a case with its fault and without; return whether cause, line and change were right."""
    if name in RANK_CASES:
        start, number, (cause, code, change, ranks) = ENGINE, RANKS, RANK_CASES[name]
    else:
        start, number, (cause, code, change), ranks = MODEL, 1, CASES[name], ()
    script, log = folder / "train.py", folder / "log"
    script.write_text(start + code + "\n")
    failed = outcome(script, log, False, number)
    found = explain_log(read_log(log))
    if not failed or found is None:
        show(f"{'WRONG':<8}{name}: exit code {failed}\n{log.read_text()[-600:]}")
        return False
    advice = f"{'; '.join(row.change for row in found.changes)} {found.run_next}"
    works = outcome(script, log, True, number) == 0
    right = found.cause == cause and str(script) in found.at and change in advice and works
    right = right and set(found.ranks) <= set(ranks) and len(found.ranks) >= bool(ranks)
    show(f"{'right' if right else 'WRONG':<8}{name}: {found.cause} at {Path(found.at).name}; with the change: {works}")
    if not right:
        show(f"        {found.phase} {advice}\n{log.read_text()[-300:]}")
    return right


def main() -> None:
    """Run the named cases, or all; exit with 1 if one is wrong."""
    import deepspeed  # imported once, before the processes fork
    import numpy  # noqa: F401
    import torch

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 4)  # else glibc's heap is fragmented, and no change makes room
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # only for inference; builds for 45 s
    torch.optim.Adam([torch.zeros(1)])  # imports torch._dynamo
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    with tempfile.TemporaryDirectory() as folder:
        results = [judged(name, Path(folder), print) for name in sys.argv[1:] or [*CASES, *RANK_CASES]]
    print(f"{sum(results)} of {len(results)}")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
