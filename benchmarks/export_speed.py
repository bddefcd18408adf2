"""Speed of `zerofit ckpt export` beside DeepSpeed's zero_to_fp32, and its memory for a ZeRO-3 state of 70B.

    python -m benchmarks.export_speed [--work FOLDER] [--output FILE] [--only engine|sparse]

`engine`: a DeepSpeed engine of ZeRO 3 on two ranks writes a checkpoint of 368M parameters. Both programs export it in
turns in one process; each time ends when the files are on the disk. `sparse`: the files of eight ranks of a 70B, whose
tensors are holes. An export of it discards what it writes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from safetensors import safe_open

from benchmarks.export_memory import GIB, limited, watched
from benchmarks.foreign_writer import start_ranks
from zerofit.app.checkpoints import Checkpoint
from zerofit.launch.host import this_machine
from zerofit.spec.files import sync_file
from zerofit.spec.local_machine import versions

MIDDLE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
MIDDLE |= {"vocab_size": 32000, "num_key_value_heads": 16}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
LLAMA_70B |= {"vocab_size": 128256, "num_key_value_heads": 8}
RANKS_70B, SUB_GROUP = 8, 10**9
LIMIT_BYTES = 4 * GIB
TURNS = 2
OURS, THEIRS = "zerofit ckpt export --dtype fp32", "zero_to_fp32, safetensors"
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
# what an export writes is discarded; its files get their headers and sizes
DISCARDING = """
import os, pathlib, runpy, shutil

class Discarded:
    def __init__(self, path):
        self.path, self.end = path, 0
    def __enter__(self):
        return self
    def __exit__(self, *_):
        os.truncate(self.path, max(self.end, os.path.getsize(self.path)))
    def seek(self, offset):
        self.end = offset
    def write(self, piece):
        self.end += len(piece)

def opened(path, mode="r", *rest, real=pathlib.Path.open, **named):
    discard = mode == "r+b" and path.suffix == ".safetensors"
    return Discarded(path) if discard else real(path, mode, *rest, **named)

pathlib.Path.open = opened
shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 50, 0, 1 << 50)
runpy.run_module("zerofit.cli", run_name="__main__")
"""


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="scratch folder with 12 GB of free space; its checkpoint is kept")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/export_speed.json")
    parser.add_argument("--only", choices=("engine", "sparse"))
    parser.add_argument("--seconds", type=int, help="stop the export of the 70B; the result then has its part")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        start_ranks(2, write, arguments.write)
    scratch = arguments.work or Path(tempfile.mkdtemp())
    result = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    try:
        if arguments.only != "sparse":
            result["engine"] = beside(scratch)
        if arguments.only != "engine":
            result["sparse"] = sparse(scratch, arguments.seconds)
    finally:
        if not arguments.work:
            shutil.rmtree(scratch)
    hardware = {"device": this_machine().device_name, "cores": this_machine().cores}
    result |= {"date": datetime.date.today().isoformat(), "hardware": hardware, "versions": versions()}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def llama(shape: dict[str, int]) -> Any:
    """Return a Llama of this shape."""
    import transformers

    config = transformers.LlamaConfig(**shape)
    config.architectures = ["LlamaForCausalLM"]
    return transformers.LlamaForCausalLM(config)


def write(folder: Path) -> None:
    """Train one step of ZeRO 3 as one rank, and save."""
    import deepspeed

    torch.manual_seed(1)
    model = llama(MIDDLE)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    tokens = torch.arange(16)[None]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(str(folder))
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder)


def beside(scratch: Path) -> dict[str, Any]:
    """Export a checkpoint with both programs in turns, without their imports; return the fastest, compare weights."""
    saved, ours, theirs = scratch / "saved", scratch / "ours", scratch / "theirs"
    if not (saved / "latest").is_file():
        watched([sys.executable, "-m", "benchmarks.export_speed", "--write", str(saved)])
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as zero_to_fp32

    works: dict[str, tuple[Path, Callable[[], object]]] = {
        OURS: (ours, lambda: Checkpoint(saved).export(ours, dtype="fp32")),
        THEIRS: (theirs, lambda: zero_to_fp32(str(saved), str(theirs), "1GB", safe_serialization=True)),
        "zerofit ckpt export (bf16)": (ours, lambda: Checkpoint(saved).export(ours)),
    }
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    equal = 0
    for _ in range(TURNS):
        for name, (out, work) in works.items():
            shutil.rmtree(out, ignore_errors=True)
            turns[name].append(until_on_disk(work, out))
            if name == THEIRS:
                equal = same_weights(ours, theirs)
    # the least disturbed turn: other processes and the first reading of the checkpoint only add time
    rows = {name: {key: min(row[key] for row in t) for key in t[0]} for name, t in turns.items()}
    times = {f"times_{key}": round(rows[THEIRS][key] / rows[OURS][key], 2) for key in ("seconds", "cpu_seconds")}
    size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    return {"shape": MIDDLE, "checkpoint_bytes": size, "tensors_equal": equal, **times, "rows": rows, "turns": turns}


def until_on_disk(work: Callable[[], object], out: Path) -> dict[str, float]:
    """Measure a call; its time ends when the files are on the disk, which only zerofit waits for itself."""
    start, cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        work()
    for file in out.glob("*"):
        sync_file(file)
    return {"seconds": round(time.perf_counter() - start, 2), "cpu_seconds": round(time.process_time() - cpu, 2)}


def same_weights(ours: Path, theirs: Path) -> int:
    """Count the tensors; raise if one differs."""
    count = 0
    places = {name: file for file in theirs.glob("*.safetensors") for name in _names(file)}
    for file in ours.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in _names(file):
                with safe_open(places[name], framework="pt") as other:
                    assert torch.equal(opened.get_tensor(name), other.get_tensor(name)), name
                count += 1
    return count


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def sparse(scratch: Path, seconds: int | None) -> dict[str, Any]:
    """Export a 70B whose tensors are holes, in a memory cgroup of 4 GiB, which counts cached pages too."""
    saved, out = scratch / "sparse", scratch / "out"
    for folder in (saved, out, *scratch.glob(".out.writing-*")):
        shutil.rmtree(folder, ignore_errors=True)
    tag = saved / "global_step1"
    tag.mkdir(parents=True)
    (saved / "latest").write_text(tag.name)
    with torch.device("meta"):
        model = llama(LLAMA_70B)
    model.config.save_pretrained(saved)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for rank in range(RANKS_70B):
        write_rank(tag, rank, shapes)
    files = list(tag.iterdir())
    script = f"import signal\nsignal.alarm({seconds or 0})\n{DISCARDING}"
    command = [sys.executable, "-c", script, "ckpt", "export", str(saved), str(out), "--json"]
    with limited(command, LIMIT_BYTES) as inside:
        row = watched(inside or command)
    written = [file for folder in scratch.glob("*out*") for file in folder.glob("*.safetensors")]
    return {
        "parameters": sum(shape.numel() for shape in shapes.values()),
        "ranks": RANKS_70B,
        "checkpoint_bytes": sum(file.stat().st_size for file in files),
        "checkpoint_bytes_on_disk": sum(file.stat().st_blocks * 512 for file in files),
        "complete": out.is_dir(),
        "output_bytes": sum(file.stat().st_size for file in written),
        "cgroup_limit_bytes": LIMIT_BYTES if inside else None,
        **row,
    }


def write_rank(tag: Path, rank: int, shapes: dict[str, torch.Size]) -> None:
    """Write a rank's files of ZeRO 3, without the content of the large tensors (runtime/zero/stage3.py)."""
    groups: list[dict[str, torch.Size]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if size >= SUB_GROUP:
            groups, size = [*groups, {}], 0
        groups[-1][name] = shape
        size += -(-shape.numel() // RANKS_70B)
    lengths = [sum(-(-shape.numel() // RANKS_70B) for shape in group.values()) for group in groups]
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    common = {"ds_version": "0.19.8", "ds_config": config}
    states = {
        number: {"step": torch.tensor(1.0), "exp_avg": hole(length), "exp_avg_sq": hole(length)}
        for number, length in enumerate(lengths)
    }
    optimizer = {
        "zero_stage": 3,
        "partition_count": RANKS_70B,
        "optimizer_state_dict": {"state": states, "param_groups": [{"lr": 1e-4, "params": [*range(len(groups))]}]},
        "fp32_flat_groups": [hole(length) for length in lengths],
    }
    module = {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes}
    model = {"module": module, "buffer_names": [], "param_shapes": groups, "shared_params": {}, "dp_world_size": 8}
    model |= {"global_steps": 1, "global_samples": 8, "skipped_steps": 0, "lr_scheduler": None}
    with torch.serialization.skip_data():
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer, **common}, tag / f"bf16_{name}_optim_states.pt")
        torch.save(model | common, tag / f"{name}_model_states.pt")


def hole(count: int) -> torch.Tensor:
    """Return numbers for which no memory is reserved."""
    space = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(space, dtype=torch.float32)


if __name__ == "__main__":
    main()
