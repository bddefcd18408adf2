"""Run sixty commands, keep what scripts read of them (exit code and `--json`), and compare it with an earlier record.

    python benchmarks/commands.py record FILE     # on the code before a change
    python benchmarks/commands.py compare FILE    # on the code after it: exit code 1 if anything differs

Forecasts, checks and listings are compared byte by byte. Of commands that measure (training, evaluation), the keys and
types of values are compared. Dates, versions, places and sentences never are. It takes about ten minutes on two cores.
"""

from __future__ import annotations

import importlib
import json
import lzma
import os
import re
import shlex
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

FAULTY = '{\n "train_batch_size": 8,\n "zero_optimisation": {"stage": 2},\n "fp16": {"enabled": true}\n}\n'
SCRIPT = """
import deepspeed, torch
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(3):
    x = torch.randn(4, 256, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(x).float().square().mean())
    engine.step()
"""
PLAN, H100 = "plan llama-3.1-8b --gpus 8 --gpu h100-80gb", "--gpus 8 --gpu h100-80gb"
SIMULATE = "simulate llama-tiny --gpus 2 --gpu h100-80gb --seq-len 64 --no-knobs"
SMALL = "--data pysource --seq-len 64 --micro-batch 2 --steps 4 --eval-samples 8 --ranks 1"
COMMANDS = (
    PLAN,
    f"{PLAN} --top 20 --seq-len 8192",
    f"{PLAN} --global-batch 64 --tokens 1T",
    f"{PLAN} --ds-config zero3 --max micro-batch",
    "plan llama-3.1-8b --gpu h100-80gb --gpus 8 --min gpus",
    f"{PLAN} --precision bf16 --optimizer adamw8bit",
    f"{PLAN} --optimizer muon",
    f"{PLAN} --optimizer adafactor",
    f"{PLAN} --optimizer sgd --precision fp32",
    f"{PLAN} --lora 16",
    f"{PLAN} --offload cpu",
    "plan llama-3.1-8b --gpus 1 --gpu l4",
    "plan llama-3.1-8b --gpu p5.48xlarge --columns memory,step,hours,cost",
    "plan gpt2 --gpus 4 --gpu a100-40gb --seq-len 1024",
    "plan llama-3.1-70b --gpus 64 --gpu h100-80gb --seq-len 4096",
    "plan mixtral-8x7b --gpus 64 --gpu h100-80gb",
    "plan resnet50 --gpus 4 --gpu a100-40gb",
    "plan llama-3.1-8b --gpus 8 --gpu nosuch",
    "plan nosuch-model --gpus 8 --gpu h100-80gb",
    f"{PLAN} --seq-len 0",
    f"{SIMULATE} --ds-config zero0",
    f"{SIMULATE} --ds-config zero1",
    f"{SIMULATE} --ds-config zero2 --precision bf16",
    f"{SIMULATE} --ds-config zero3",
    f"{SIMULATE} --ds-config zero3_offload",
    f"{SIMULATE} --ds-config zero2_offload --precision bf16",
    f"{SIMULATE} --ds-config zeropp",
    f"{SIMULATE} --ds-config zero2 --optimizer muon",
    f"{SIMULATE} --ds-config zero0 --optimizer adafactor",
    f"{SIMULATE} --ds-config zero2 --optimizer sgd",
    f"{SIMULATE} --ds-config zero1 --optimizer adamw8bit",
    f"{SIMULATE} --ds-config zero2 --lora 8",
    f"{SIMULATE} --ds-config zero2 --lora 8 --quantize nf4 --precision bf16",
    f"{SIMULATE} --ds-config zero1 --tensor-parallel 2",
    f"{SIMULATE} --ds-config zero1 --sequence-parallel 2",
    f"{SIMULATE} --ds-config pipeline --pipeline 2",
    f"{SIMULATE} --ds-config zero1 --activation-checkpointing",
    "simulate llama-tiny --gpus 2 --gpu h100-80gb --device-memory 2GiB --ds-config zero1 --seq-len 512 --micro-batch 8",
    "simulate resnet18 --gpus 2 --gpu h100-80gb --data synthetic --ds-config zero2 --no-knobs",
    "simulate --gpu h100-80gb --no-knobs {json} -- deepspeed --num_gpus 2 script.py",
    "simulate --gpu h100-80gb --device-memory 1MiB {json} -- deepspeed --num_gpus 8 script.py",
    f"{SIMULATE} --ds-config zero2 --precision fp16 --micro-batch -1",
    "check ds.json",
    "check zero3 --explain",
    "check zero2_offload",
    "check nosuch.json",
    "models llama",
    "data pysource --show 0 --seq-len 64",
    f"train llama-tiny {SMALL} --output runs/llama",
    "train lenet --data digits --epochs 1 --ranks 1 --output runs/lenet",
    "train lenet --data digits --micro-batch 0 --epochs 2",
    "ckpt ls runs/lenet",
    "ckpt show runs/lenet",
    "ckpt verify runs/lenet",
    "ckpt export runs/lenet exported",
    "ckpt convert runs/lenet universal",
    "ckpt diff runs/lenet exported",
    "eval runs/lenet",
    "generate runs/llama --prompt def --max-new-tokens 8 --temperature 0",
    "launch lenet --data digits --slurm job.sbatch --nodes 2 --slots 8 --time 1:00:00 --output runs/job",
)
MEASURED = ("train ", "eval ", "ckpt ", "generate ", "data ")  # their values differ from run to run
VOLATILE = re.compile(
    r"elapsed|_at$|date|version|path|folder|^file|python|command|created|message|hint|why|note|^seconds$|total_s|^profile$|^line$"
)


def kept(value: Any, measured: bool, key: str = "") -> Any:
    """Return what is compared of a `--json` value: if it is measured, keys and types alone."""
    if isinstance(value, dict):
        return {name: kept(entry, measured, name) for name, entry in value.items()}
    if isinstance(value, list) and not measured:
        return [kept(entry, measured, key) for entry in value]
    if measured or VOLATILE.search(key):
        return type(value).__name__
    return value


def compared(words: str, record: dict[str, Any]) -> dict[str, Any]:
    """Return what is compared of a command's record."""
    return record | {"json": kept(record["json"], words.startswith(MEASURED))}


def outcome(words: str) -> dict[str, Any]:
    """Run a command line in a forked process: `main` has imported the libraries, once for all."""
    words = words.format(json="--json") if "{json}" in words else f"{words} --json"
    with tempfile.TemporaryFile("w+") as answer:
        if not (child := os.fork()):
            code = 70
            try:
                os.dup2(answer.fileno(), 1)
                os.dup2(os.open("errors.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                from zerofit.cli.main import main

                main(shlex.split(words), prog_name="zerofit")
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answer.seek(0)
        text = answer.read().replace(os.getcwd(), "FOLDER")
    try:
        content = json.loads(text)
    except ValueError:
        content = [json.loads(line) if line.startswith("{") else "text" for line in text.splitlines()[:1]]
    return {"exit code": code, "json": content}


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Return each place at which two values differ, with both."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [*before, *(name for name in after if name not in before)]
        return [d for n in names for d in differences(before.get(n, "-"), after.get(n, "-"), f"{place}.{n}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            d for i, (b, a) in enumerate(zip(before, after, strict=True)) for d in differences(b, a, f"{place}[{i}]")
        ]
    return [] if before == after else [f"{place}: {str(before)[:100]} -> {str(after)[:100]}"]


def main(action: str, place: str) -> int:
    """Record all commands into a file, or compare them with that file; return the exit code."""
    file = Path(place).absolute()
    before: dict[str, Any] = json.loads(lzma.decompress(file.read_bytes())) if action == "compare" else {}
    records: dict[str, Any] = {}
    wrong = 0
    for library in ("torch", "deepspeed", "transformers"):
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ.update(COLUMNS="80", ZEROFIT_CACHE=f"{folder}/cache")
        Path("ds.json").write_text(FAULTY)
        Path("script.py").write_text(SCRIPT)
        for words in COMMANDS:
            records[words] = outcome(words)
            earlier = compared(words, before.get(words, records[words]))
            found = differences(earlier, compared(words, records[words]))
            wrong += bool(found)
            print(f"{records[words]['exit code']}  {words}", *found[:8], sep="\n     ", flush=True)
        if os.environ.get("KEEP_ERRORS"):
            print(Path("errors.log").read_text()[-20000:])
    if action == "record":
        file.write_bytes(lzma.compress(json.dumps(records).encode()))
    print(f"{len(records)} commands, {wrong} differ")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
