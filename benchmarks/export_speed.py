"""Speed of `zerofit ckpt export` beside DeepSpeed's zero_to_fp32, and its memory for a ZeRO-3 state of 70B.

    python -m benchmarks.export_speed [--work FOLDER] [--output FILE] [--only engine|large|sparse]

`engine`: DeepSpeed engines of ZeRO 2 and 3 on two ranks write checkpoints of 168M parameters. Both programs export
them in turns in one process; a ratio is the median of the turns, because other work may disturb a turn. `large`: the
files of eight ranks of a 7B with random weights (the moments are holes), not in the page cache; both programs run in
turns as commands, with their imports. For the limit of the disk, a third program reads and writes as many bytes in
both measurements, and computes nothing. `sparse`: the files of eight ranks of a 70B, whose tensors are holes, in a
memory cgroup of 4 GiB; the disk is smaller than the result, so an observer frees finished shards.
Each time ends when the files are on the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import io
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch._subclasses import FakeTensorMode

from benchmarks.export_memory import GIB, limited, watched
from benchmarks.foreign_writer import start_ranks
from zerofit.app.checkpoints import Checkpoint
from zerofit.checkpoint.direct_file import BLOCK, PIECE, DirectFile
from zerofit.checkpoint.published import THREADS
from zerofit.launch.host import this_machine
from zerofit.spec.files import sync_file
from zerofit.spec.local_machine import versions


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, words: int = 32000) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": words}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


MIDDLE = _llama(1024, 2816, 8, 16, 16)
LLAMA_7B = _llama(4096, 11008, 32, 32, 32)
LLAMA_70B = _llama(8192, 28672, 80, 64, 8, words=128256)
RANKS, SUB_GROUP = 8, 10**9
LIMIT_BYTES = 4 * GIB
TURNS = 2
PAIRS = 4  # turns of `engine`
REST_S = 3  # before each program of a turn: a virtual disk limits its mean rate
OURS, THEIRS, DISK = "zerofit ckpt export", "zero_to_fp32, safetensors", "read and write only"
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
LARGE_DISK = """
import runpy, shutil
shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 50, 0, 1 << 50)
runpy.run_module("zerofit.cli", run_name="__main__")
"""
ZERO_TO_FP32 = """
import sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_state_dict as convert
convert(sys.argv[1], sys.argv[2], dtype=sys.argv[3], max_shard_size="1GB", safe_serialization=True)
"""
PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, which needs FALLOC_FL_KEEP_SIZE
HEADER = 1 << 20  # bytes at the beginning of a shard that stay


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="scratch folder with 60 GB of free space; its checkpoints are kept")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/export_speed.json")
    parser.add_argument("--only", choices=("engine", "large", "sparse"))
    parser.add_argument("--dtypes", nargs="*", default=["bf16", "fp32"], help="of `large`")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        start_ranks(2, write, arguments.write, arguments.stage)
    scratch = arguments.work or Path(tempfile.mkdtemp())
    result = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    try:
        for name, work in {"engine": beside, "large": large, "sparse": sparse}.items():
            if arguments.only in (None, name):
                result[name] = work(scratch, arguments.dtypes) if name == "large" else work(scratch)
                result[name]["date"] = datetime.date.today().isoformat()
    finally:
        if not arguments.work:
            shutil.rmtree(scratch)
    hardware = {"device": this_machine().device_name, "cores": this_machine().cores}
    result |= {"hardware": hardware, "versions": versions()}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def llama(shape: dict[str, Any]) -> Any:
    """Return a Llama of this shape."""
    import transformers

    config = transformers.LlamaConfig(**shape)
    config.architectures = ["LlamaForCausalLM"]
    return transformers.LlamaForCausalLM(config)


def write(folder: Path, stage: int) -> None:
    """Train one step at a ZeRO stage as one rank, and save."""
    import deepspeed

    torch.manual_seed(1)
    model = llama(MIDDLE)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
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
    """Export checkpoints of two ZeRO stages with both programs in turns, from the page cache, without their imports."""
    return {"shape": MIDDLE, **{f"zero{stage}": beside_at(stage, scratch) for stage in (2, 3)}}


def beside_at(stage: int, scratch: Path) -> dict[str, Any]:
    """Export a checkpoint with both programs in turns; return the times and their ratios, and compare all weights."""
    saved, ours, theirs, copy = scratch / f"saved-zero{stage}", scratch / "ours", scratch / "theirs", scratch / "copy"
    if not (saved / "latest").is_file():
        watched([sys.executable, "-m", "benchmarks.export_speed", "--write", str(saved), "--stage", str(stage)])
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as zero_to_fp32

    works: dict[str, tuple[Path, Callable[[], object]]] = {
        OURS: (ours, lambda: Checkpoint(saved).export(ours, dtype="fp32")),
        THEIRS: (theirs, lambda: zero_to_fp32(str(saved), str(theirs), "1GB", safe_serialization=True)),
        DISK: (copy, lambda: copy_weights(saved, copy, "fp32")),
    }
    turns: list[dict[str, dict[str, float]]] = []
    equal = 0
    for number in range(PAIRS + 1):
        turn = {}
        for name, (out, work) in works.items():
            shutil.rmtree(out, ignore_errors=True)
            os.sync()  # the disk frees the blocks of the previous turn
            time.sleep(REST_S)
            turn[name] = until_on_disk(work, out)
        equal = equal or same_weights(ours, theirs)
        if number:  # the first turn reads the checkpoint from the disk
            turns.append(turn)
        print(json.dumps(turn), flush=True)
    ratios = {key: [turn[THEIRS][key] / turn[OURS][key] for turn in turns] for key in ("seconds", "cpu_seconds")}
    times = {f"times_{key}": round(statistics.median(values), 2) for key, values in ratios.items()}
    size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    return {"checkpoint_bytes": size, "tensors_equal": equal, **times, "turns": turns}


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


def large(scratch: Path, dtypes: list[str]) -> dict[str, Any]:
    """Export a 7B with both programs in turns, as commands with their imports; compare all weights."""
    saved, ours, theirs = scratch / "large", scratch / "ours", scratch / "theirs"
    shapes = written(saved, LLAMA_7B, torch.randn)
    rows = []
    for dtype in dtypes:
        commands = {
            OURS: [sys.executable, "-m", "zerofit.cli", "ckpt", "export", str(saved), str(ours), "--dtype", dtype],
            THEIRS: [sys.executable, "-c", ZERO_TO_FP32, str(saved), str(theirs), dtype],
        }
        for turn in range(TURNS):
            for program, command in commands.items():
                out = ours if program == OURS else theirs
                for old in (ours, theirs) if dtype == "fp32" else (out,):  # both results in fp32 need too much disk
                    shutil.rmtree(old, ignore_errors=True)
                leave_cache(saved)
                rows.append({"program": program, "dtype": dtype, "turn": turn, **timed(command, out)})
                print(json.dumps(rows[-1]), flush=True)
        rows[-1]["tensors_equal"] = same_weights(ours, theirs) if dtype == "bf16" else None
        for out in (ours, theirs):
            shutil.rmtree(out, ignore_errors=True)
        leave_cache(saved)
        rows.append(
            {"program": DISK, "dtype": dtype, **until_on_disk(lambda d=dtype: copy_weights(saved, ours, d), ours)}
        )
        shutil.rmtree(ours)
    return {**sizes(saved, shapes), "rows": rows}


def leave_cache(saved: Path) -> None:
    """Remove a checkpoint's files from the page cache, and wait until the disk has no other work."""
    os.sync()
    for path in saved.rglob("*.pt"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_weights(saved: Path, out: Path, dtype: str) -> None:
    """Read the weights of all ranks, and write them, or half the bytes for bf16, unchanged."""
    size = PIECE // (2 if dtype == "bf16" else 1)
    spans = [span for path in sorted(saved.rglob("*_optim_states.pt")) for span in weight_pieces(path)]
    out.mkdir()
    (out / "weights").touch()
    os.truncate(out / "weights", len(spans) * size)
    with DirectFile(out / "weights", os.O_RDWR) as file, ThreadPoolExecutor(THREADS) as pool:
        file.allocate()

        def move(number: int) -> None:
            path, place = spans[number]
            with DirectFile(path) as source:
                file.write_bytes(number * size, source.read_bytes(place, PIECE)[:size])

        list(pool.map(move, range(len(spans))))


def weight_pieces(path: Path) -> list[tuple[Path, int]]:
    """Return the places of a rank's weights in its file, in pieces."""
    with FakeTensorMode():
        saved = torch.load(path, weights_only=False)["optimizer_state_dict"]
    spans = []
    for group in saved.get("fp32_flat_groups") or saved["single_partition_of_fp32_groups"]:
        first = group.untyped_storage()._checkpoint_offset // BLOCK * BLOCK
        spans += [(path, place) for place in range(first, first + 4 * len(group), PIECE)]
    return spans


def sparse(scratch: Path) -> dict[str, Any]:
    """Export a 70B whose tensors are holes, in a memory cgroup of 4 GiB, which counts cached pages too."""
    saved, out = scratch / "sparse", scratch / "out"
    for folder in (out, *scratch.glob(".out.writing*")):
        shutil.rmtree(folder, ignore_errors=True)
    shapes = written(saved, LLAMA_70B, hole)
    command = [sys.executable, "-c", LARGE_DISK, "ckpt", "export", str(saved), str(out), "--json"]
    freed: list[int] = []
    ended = threading.Event()
    observer = threading.Thread(target=free_finished, args=(scratch, ended, freed))
    observer.start()
    try:
        with limited(command, LIMIT_BYTES) as inside:
            row = timed(inside or command, out)
    finally:
        ended.set()
        observer.join()
    facts = {"complete": out.is_dir(), "output_bytes": sum(file.stat().st_size for file in out.glob("*.safetensors"))}
    facts |= {"freed_bytes": sum(freed), "cgroup_limit_bytes": LIMIT_BYTES if inside else None}
    return sizes(saved, shapes) | facts | row


def sizes(saved: Path, shapes: dict[str, torch.Size]) -> dict[str, Any]:
    """Return the facts about a checkpoint."""
    stats = [file.stat() for file in saved.rglob("*") if file.is_file()]
    return {
        "parameters": sum(shape.numel() for shape in shapes.values()),
        "ranks": RANKS,
        "checkpoint_bytes": sum(stat.st_size for stat in stats),
        "checkpoint_bytes_on_disk": sum(stat.st_blocks * 512 for stat in stats),
    }


def timed(command: list[str], out: Path) -> dict[str, Any]:
    """Measure a command until its files are on the disk."""
    row, start = watched(command), time.perf_counter()
    for file in out.glob("*"):
        sync_file(file)
    return row | {"seconds": round(row["seconds"] + time.perf_counter() - start, 1)}


def free_finished(scratch: Path, ended: threading.Event, freed: list[int]) -> None:
    """Free the disk space of shards that an export has written: those before the last two that have numbers."""
    fallocate, done = ctypes.CDLL(None, use_errno=True).fallocate, set()
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    while not ended.wait(0.2):
        begun = [
            file
            for file in sorted(scratch.glob(".out.writing*/*.safetensors"))
            if file.stat().st_blocks > HEADER // 512
        ]
        for file in begun[:-2]:
            if file in done:
                continue
            done.add(file)
            with file.open("r+b") as opened:
                freed.append(file.stat().st_blocks * 512)
                assert not fallocate(opened.fileno(), PUNCH_HOLE, HEADER, file.stat().st_size - HEADER)


def written(saved: Path, shape: dict[str, Any], weights: Callable[[int], torch.Tensor]) -> dict[str, torch.Size]:
    """Write the files of eight ranks, unless they exist. Return the shapes of the parameters."""
    with torch.device("meta"):
        model = llama(shape)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    tag = saved / "global_step1"
    if not (saved / "latest").is_file():
        tag.mkdir(parents=True, exist_ok=True)
        model.config.save_pretrained(saved)
        for rank in range(RANKS):
            write_rank(tag, rank, shapes, weights)
        (saved / "latest").write_text(tag.name)
    return shapes


def write_rank(tag: Path, rank: int, shapes: dict[str, torch.Size], weights: Callable[[int], torch.Tensor]) -> None:
    """Write a rank's files of ZeRO 3; the moments are holes (runtime/zero/stage3.py)."""
    groups: list[dict[str, torch.Size]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if size >= SUB_GROUP:
            groups, size = [*groups, {}], 0
        groups[-1][name] = shape
        size += -(-shape.numel() // RANKS)
    lengths = [sum(-(-shape.numel() // RANKS) for shape in group.values()) for group in groups]
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    common = {"ds_version": "0.19.8", "ds_config": config}
    states = {
        number: {"step": torch.tensor(1.0), "exp_avg": hole(length), "exp_avg_sq": hole(length)}
        for number, length in enumerate(lengths)
    }
    optimizer = {
        "zero_stage": 3,
        "partition_count": RANKS,
        "optimizer_state_dict": {"state": states, "param_groups": [{"lr": 1e-4, "params": [*range(len(groups))]}]},
        "fp32_flat_groups": [hole(length) for length in lengths],
    }
    module = {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes}
    model = {"module": module, "buffer_names": [], "param_shapes": groups, "shared_params": {}, "dp_world_size": 8}
    model |= {"global_steps": 1, "global_samples": 8, "skipped_steps": 0, "lr_scheduler": None}
    name = f"zero_pp_rank_{rank}_mp_rank_00"
    path = tag / f"bf16_{name}_optim_states.pt"
    with torch.serialization.skip_data():
        torch.save({"optimizer_state_dict": optimizer, **common}, path)
        torch.save(model | common, tag / f"{name}_model_states.pt")
    if weights is not hole:
        fill(path, rank, weights)


def fill(path: Path, rank: int, weights: Callable[[int], torch.Tensor]) -> None:
    """Write weights into the holes of a rank's file."""
    torch.manual_seed(rank)
    with FakeTensorMode():
        saved = torch.load(path)["optimizer_state_dict"]["fp32_flat_groups"]
    with path.open("r+b") as file:
        for group in saved:
            file.seek(group.untyped_storage()._checkpoint_offset)
            for piece in torch.empty(len(group), device="meta").split(1 << 24):
                file.write(weights(len(piece)).numpy().data)


def hole(count: int) -> torch.Tensor:
    """Return numbers for which no memory is reserved."""
    space = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(space, dtype=torch.float32)


if __name__ == "__main__":
    main()
