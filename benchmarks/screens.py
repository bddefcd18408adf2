"""Run a typical command line of every command at 80 columns, and write the answers to docs/screens.md.

    python benchmarks/screens.py [docs/screens.md]

It shows standard output, and standard error where a command fails. It takes some minutes on two cores.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

WIDTH, LINES = 80, 24  # columns; lines of an answer that are shown
SHORT = {"doctor --quick": 10, "calibrate --seconds 0.05": 8, "schema": 4}  # of lists
FAULTY = '{\n  "train_batch_size": 8,\n  "zero_optimisation": {"stage": 2},\n  "fp16": {"enabled": true},\n'
FAULTY += '  "bf16": {"enabled": true}\n}\n'
# for `generate`: README's quickstart, two minutes or more
PREPARED = "train llama-tiny --data pysource --steps 400 --micro-batch 8 --seq-len 256 --lr 3e-3 --output runs/llama"
# for `replay`
DIVERGED = "train lenet --data digits --steps 40 --lr 1e6 --gradient-clipping 0 --check-loss --output runs/diverged"
OUT_OF_MEMORY = """Traceback (most recent call last):
  File "train.py", line 61, in <module>
    trainer.train()
  File "/env/lib/python3.11/site-packages/transformers/models/qwen2/modeling_qwen2.py", line 900, in forward
    logits = self.lm_head(hidden_states)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 79.10 GiB of which
4.12 GiB is free. Including non-PyTorch memory, this process has 74.97 GiB memory in use. Of the allocated memory 72.85
GiB is allocated by PyTorch, and 1.06 GiB is reserved by PyTorch but unallocated.
"""
SCREENS = (  # in an order in which each finds what it needs
    "train lenet --data digits --epochs 2 --output runs/lenet",
    "plan llama-3.1-8b --gpus 8 --gpu h100-80gb --top 5",
    "plan llama-3.1-8b --gpus 1 --gpu l4 --top 3",
    "simulate llama-tiny --gpus 2 --gpu h100-80gb --device-memory 2GiB --ds-config zero1 --seq-len 512 --micro-batch 8",
    "check ds.json",
    "explain train.log",
    "replay runs/diverged",
    "ckpt ls runs/lenet",
    "ckpt show runs/lenet",
    "ckpt verify runs/lenet",
    "ckpt export runs/lenet exported",
    "ckpt convert runs/lenet universal",
    "ckpt diff runs/lenet exported",
    "eval runs/lenet",
    "generate runs/llama --prompt 'def ' --max-new-tokens 60 --temperature 0",
    "data pysource --show 0 --seq-len 64",
    "models gpt2",
    "plot runs/lenet --out runs.png",
    "report runs/lenet",
    "compare strategies lenet --data digits --strategies single,ddp --ranks 2 --steps 12 --output compared",
    "tune mlp --data digits --ranks 1 --trials 2 --minutes 5 --output tuned",
    "launch lenet --data digits --slurm job.sbatch --nodes 2 --slots 8 --time 1:00:00 --output runs/job",
    "doctor --quick",
    "calibrate --seconds 0.05",
    "schema",
    "train lenet --data digits --micro-batch 0 --epochs 2",
)


def shown(words: str) -> str:
    """Run a command line in this process and return its answer, as a block of Markdown."""
    from click.testing import CliRunner

    from zerofit.cli.main import main

    done = CliRunner().invoke(main, shlex.split(words), prog_name="zerofit")
    text = done.stdout if done.exit_code < 2 else done.stderr + done.stdout
    places = {os.getcwd(): ".", sys.prefix: "~/zerofit/.venv", str(Path.home()): "~"}
    for place, short in places.items():
        text = text.replace(place, short)
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    count = SHORT.get(words, LINES)
    if words == "schema":  # one long line
        lines = [line[:WIDTH] for line in lines]
    more = ["..."] if len(lines) > count else []
    print(f"{done.exit_code}  zerofit {words}", file=sys.stderr)
    return "\n".join(["```console", f"$ zerofit {words}", *lines[:count], *more, "```"])


def write(page: Path) -> None:
    """Write the page of all screens."""
    title = (
        "# Screens\n\nWhat each command prints at 80 columns without color: the verdict first, then a line for each "
    )
    title += "fact.\n`benchmarks/screens.py` makes this page, on a machine with two cores and no GPU.\n"
    os.environ.update(COLUMNS=str(WIDTH), PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["ZEROFIT_CACHE"] = f"{folder}/cache"
        Path("ds.json").write_text(FAULTY)
        Path("train.log").write_text(OUT_OF_MEMORY)
        shown(PREPARED)
        shown(DIVERGED)
        blocks = [title]
        for name, words in ((words.partition(" ")[0], words) for words in SCREENS):
            heading = f"## {name}\n"
            blocks += [f"{shown(words)}\n"] if heading in blocks else [heading, f"{shown(words)}\n"]
        page.write_text("\n".join(blocks))


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/screens.md").absolute())
