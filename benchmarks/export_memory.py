"""What `zerofit ckpt export` needs: memory and time for a model of a billion parameters, beside DeepSpeed's own tool.

    python -m benchmarks.export_memory [--model llama-3.2-1b] [--out FILE] [--folder SCRATCH]

The checkpoint is made without training: files of the shape that two ranks of ZeRO stage 2 write in bf16, random
numbers in them. Memory is what a process has for itself (RssAnon); pages of mapped files, which the kernel takes back
when it needs room, stand beside it. Where a memory cgroup can be made (version 1, as root), an export runs in one of
2 GiB too, in which those pages count. Every exported tensor is compared with what went into the checkpoint.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tests.checkpoint.made import Made, make
from zerofit.launch.host import this_machine
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs
from zerofit.spec.run import Run

GIB = 2**30
PACKAGES = ("zerofit", "torch", "deepspeed", "transformers", "safetensors")
POLL_S = 0.02
LIMIT_BYTES = 2 * GIB
CGROUPS = Path("/sys/fs/cgroup/memory")
DEEPSPEED = """
import sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
convert(sys.argv[1], sys.argv[2], max_shard_size=sys.argv[3], safe_serialization=sys.argv[4] == "safetensors")
"""
# transformers' own way: a state dict in memory, then save_pretrained
STATE_DICT = """
import sys, torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as read
from zerofit.models.build import build
from zerofit.models.catalog import find
with torch.device("meta"):
    model = build(find(sys.argv[3]), None, {})
model.save_pretrained(sys.argv[2], state_dict=read(sys.argv[1]), max_shard_size="1GB")
"""


def values(name: str, kind: str, shape: torch.Size) -> Tensor:
    """The same numbers for the same name: normal weights, constant moments."""
    if kind != "fp32":
        return torch.full(shape, 1e-3)
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


def watched(command: list[str]) -> dict[str, Any]:
    """Run a command; its time and the most memory that it had."""
    start, anonymous, resident = time.perf_counter(), 0, 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except OSError:
                break
            said = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in status if line.endswith("kB")}
            anonymous = max(anonymous, said.get("RssAnon", 0))
            resident = max(resident, said.get("VmHWM", 0))
            time.sleep(POLL_S)
        code = process.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        log.seek(0)
        said = log.read().strip().splitlines()
    seconds = time.perf_counter() - start
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 2)}
    row |= {"peak_bytes": anonymous, "peak_with_mapped_files_bytes": resident}
    reason = next((line for line in said if "Error" in line), "".join(said[-1:]))
    return row if code == 0 else row | {"failed": reason[:200]}


@contextmanager
def limited(command: list[str], limit: int = LIMIT_BYTES) -> Iterator[list[str] | None]:
    """The command in a memory cgroup of its own; None where none can be made."""
    group = CGROUPS / f"zerofit-export-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    (group / "memory.limit_in_bytes").write_text(str(limit))
    yield ["sh", "-c", f"echo $$ > {group}/cgroup.procs && exec {shlex.join(command)}"]
    group.rmdir()


def compare(folder: Path, dtype: torch.dtype) -> int:
    """How many tensors of an exported folder hold what went into the checkpoint; raises where one does not."""
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                found = opened.get_tensor(name)
                assert torch.equal(found, values(name, "fp32", found.shape).to(dtype)), name
                count += 1
    return count


def main() -> None:
    """Make the checkpoint, export it in several ways, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--folder", type=Path, help="scratch folder with room for 20 bytes a parameter")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        result = measure(arguments.model, scratch)
    finally:
        shutil.rmtree(scratch)
    for row in result["rows"]:
        print(f"{row['what']:58} {row['seconds']:6.1f} s  {row['peak_bytes'] / GIB:6.2f} GiB  {row.get('failed', '')}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(name: str, scratch: Path) -> dict[str, Any]:
    """All rows for one model."""
    with torch.device("meta"):
        model = build(find(name), None, {})
    inputs = TextInputs(vocab_size=256, seq_len=128)
    run = Run(model=name, data="pysource", precision="bf16", seq_len=128)
    checkpoint = make(scratch, Made(model=model, run=run, task="causal-lm", inputs=inputs), values)
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    largest = 4 * max(p.numel() for p in model.parameters())
    rows = list(_rows(name, checkpoint, scratch))
    import_only = watched([sys.executable, "-c", "import zerofit.checkpoint.export, transformers"])
    return {
        "date": datetime.date.today().isoformat(),
        "hardware": {"device": this_machine().device_name, "cores": this_machine().cores},
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "checkpoint": "made by tests/checkpoint/made.py in the shape of ZeRO stage 2, two ranks, bf16; not trained",
        "checkpoint_bytes": size,
        "largest_tensor_fp32_bytes": largest,
        "imports_alone_bytes": import_only["peak_bytes"],
        "rows": rows,
    }


def _rows(name: str, checkpoint: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    out = scratch / "out"
    zerofit = [sys.executable, "-m", "zerofit.cli", "ckpt"]
    verify = watched([*zerofit, "verify", str(checkpoint), "--json"])
    yield {"what": "zerofit ckpt verify (export begins with it)", **verify}
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        row = watched([*zerofit, "export", str(checkpoint), str(out), "--dtype", dtype, "--json"])
        row["tensors_compared"] = compare(out, kind)
        shutil.rmtree(out)
        yield {"what": f"zerofit ckpt export --dtype {dtype}", **row}
    with limited([*zerofit, "export", str(checkpoint), str(out), "--dtype", "fp32", "--json"]) as command:
        if command:
            row = watched(command)
            row["tensors_compared"] = compare(out, torch.float32)
            shutil.rmtree(out)
            yield {"what": f"zerofit ckpt export --dtype fp32 in a cgroup of {LIMIT_BYTES / GIB:.0f} GiB", **row}
    for shard, kind in (("1GB", "safetensors"), ("1GB", "bin"), ("5GB", "bin")):
        command = [sys.executable, "-c", DEEPSPEED, str(checkpoint), str(out), shard, kind]
        yield {"what": f"DeepSpeed zero_to_fp32, {kind}, shards of {shard}", **watched(command)}
        shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-c", STATE_DICT, str(checkpoint), str(out), name]
    yield {"what": "get_fp32_state_dict_from_zero_checkpoint, save_pretrained", **watched(command)}
    shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    main()
