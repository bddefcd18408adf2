"""Run out of memory on purpose, in a dozen ways, and compare what `zerofit explain` says of each log with the fault.

    python benchmarks/explain_ooms.py [NAME ...]

Each case is a small script of plain torch on the CPU, in a process of its own whose data segment is limited. It runs
twice: with its fault, which must end it, and with the change that `explain` names, which must let it end well.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import sys
import tempfile
import traceback
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


def outcome(script: Path, log: Path, fixed: bool) -> int:
    """Run a script in a limited process of its own, with its output in a log; return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + LIMIT_BYTES, data + LIMIT_BYTES))
    code = 0
    try:
        runpy.run_path(str(script), {"fixed": fixed}, "__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def judged(name: str, folder: Path, show: Callable[[str], None]) -> bool:
    """Run a case with its fault and without; return whether cause, line and change were right."""
    cause, code, change = CASES[name]
    script, log = folder / "train.py", folder / "log"
    script.write_text(MODEL + code + "\n")
    failed = outcome(script, log, fixed=False)
    found = explain_log(read_log(log))
    if not failed or found is None:
        show(f"{'WRONG':<8}{name}: exit code {failed}\n{log.read_text()[-600:]}")
        return False
    advice = f"{'; '.join(row.change for row in found.changes)} {found.run_next}"
    works = outcome(script, log, fixed=True) == 0
    right = found.cause == cause and str(script) in found.at and change in advice and works
    show(f"{'right' if right else 'WRONG':<8}{name}: {found.cause} at {Path(found.at).name}; with the change: {works}")
    if not right:
        show(f"        {found.phase} {advice}\n{log.read_text()[-300:]}")
    return right


def main() -> None:
    """Run the named cases, or all; exit with 1 if one is wrong."""
    import numpy  # noqa: F401  imported once, before the processes fork
    import torch

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 4)  # else glibc's heap is fragmented, and no change makes room
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    with tempfile.TemporaryDirectory() as folder:
        results = [judged(name, Path(folder), print) for name in sys.argv[1:] or CASES]
    print(f"{sum(results)} of {len(results)}")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
