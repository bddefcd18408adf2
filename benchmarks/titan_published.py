"""Peaks that torchtitan's team published, beside `zerofit simulate` of the same command.

    PYTHONPATH=FOLDER python -m benchmarks.titan_published [--output FILE]

FOLDER: `pip install --no-deps --target FOLDER torchtitan==0.1.0 torchdata`, and what torchtitan imports (`tiktoken`,
`tomli`, `tyro` with `docstring_parser`, `typeguard` and `shtab`). It is the release next to the published runs:
github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (H100 with 96 GB; memory torch reserves).
zerofit simulates compiled models as eager, and these runs without float8.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zerofit.spec.local_machine import versions

GIB = 1 << 30
SELECTIVE = "--training.local_batch_size 2 --training.seq_len 8192 --activation_checkpoint.mode selective"
SELECTIVE += " --activation_checkpoint.selective_ac_option op"
LONG = "--training.local_batch_size 1 --activation_checkpoint.mode full --parallelism.context_parallel_degree {} "
LONG += "--training.seq_len {}"
LARGE = "--training.local_batch_size 16 --training.seq_len 8192 --activation_checkpoint.mode full"
LARGE += " --parallelism.tensor_parallel_degree 8"
# name -> nodes of 8 GPUs, flavor, options, published GiB, and what the published run had besides
CASES: dict[str, tuple[int, str, str, float, str]] = {
    "8B, FSDP 8": (1, "8B", SELECTIVE, 82.4, ""),
    "8B, FSDP 128": (16, "8B", SELECTIVE, 67.0, ""),
    "8B, FSDP 8, compiled": (1, "8B", f"{SELECTIVE} --training.compile", 77.0, ""),
    "70B, FSDP 32 x TP 8": (32, "70B", LARGE, 71.9, "compiled, float8"),
    "8B, FSDP 8, 32,768 tokens": (1, "8B", LONG.format(1, 32768), 83.9, "compiled, float8"),
    "8B, FSDP 4 x CP 2, 65,536 tokens": (1, "8B", LONG.format(2, 65536), 84.2, "compiled, float8"),
    "8B, FSDP 2 x CP 4, 131,072 tokens": (1, "8B", LONG.format(4, 131072), 84.0, "compiled, float8"),
}


def main() -> None:
    """Simulate all cases; print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/titan-published.json")
    output = parser.parse_args().output.absolute()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        cases = {name: row(Path(folder), *case) for name, case in CASES.items()}
    found = {"date": time.strftime("%Y-%m-%d"), "torchtitan": "0.1.0", "versions": versions(), "cases": cases}
    output.write_text(json.dumps(found, indent=1) + "\n")


def prepare(folder: Path) -> None:
    """Write a vocabulary of Llama 3's size and a text, which torchtitan reads from its working directory."""
    words = [bytes([n]) for n in range(256)] + [b"\xff\xfe%d" % n for n in range(256, 128000)]
    lines = (f"{base64.b64encode(word).decode()} {n}\n" for n, word in enumerate(words))
    (folder / "tokenizer.model").write_text("".join(lines))
    text = folder / "tests/assets/c4_test/data.json"
    text.parent.mkdir(parents=True)
    text.write_text("".join(json.dumps({"text": f"line {n} of a text " * 2000}) + "\n" for n in range(200)))


def row(folder: Path, nodes: int, flavor: str, options: str, published: float, besides: str) -> dict[str, Any]:
    """Return the simulated and the published figures of a case, in GiB."""
    launcher = f"torchrun --nnodes {nodes} --nproc_per_node 8 -m torchtitan.train --model.name llama3 --model.flavor"
    words = f"{launcher} {flavor} --model.tokenizer_path tokenizer.model --training.dataset c4_test {options}"
    simulate = f"zerofit.cli simulate --gpu h100-80gb --device-memory 96GB --gpus 8 --nodes {nodes} --no-knobs --json"
    start = time.monotonic()
    command = [sys.executable, "-m", *simulate.split(), "--", *words.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout.splitlines()[-1])
    if "reserved_bytes" not in answer:
        sys.exit(f"{words}: {answer}")
    reserved = answer["reserved_bytes"] / GIB
    found = {"command": words, "published_gib": published, "published_with": besides}
    found |= {"peak_gib": round(answer["peak_bytes"] / GIB, 2), "reserved_gib": round(reserved, 2)}
    found |= {"error_percent": round(100 * (reserved / published - 1), 1)}
    print(
        f"{flavor} on {8 * nodes}: {reserved:.1f} GiB, published {published} ({found['error_percent']:+.1f} %)",
        flush=True,
    )
    return found | {"seconds": round(time.monotonic() - start, 1)}


if __name__ == "__main__":
    main()
