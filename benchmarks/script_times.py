"""What simulating a script takes: seconds, CPU seconds and host memory, from a tiny model to 70B on 64 GPUs.

python benchmarks/script_times.py [--out FOLDER]

HF Trainer, micro batch 2 of 1024 tokens, activation checkpointing, bf16; each in a process of its own with its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from meter.report import surroundings
from meter.script_cases import SCRIPTS, save_tokenizer

RESULTS = Path(__file__).parent / "results"
SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
# name -> model, ZeRO stage, GPUs of a node, nodes
CASES: dict[str, tuple[dict[str, int], int, int, int]] = {
    "tiny, ZeRO-2, 8 GPUs": (SMALL, 2, 8, 1),
    "Llama 8B, ZeRO-2, 8 GPUs": (LLAMA_8B, 2, 8, 1),
    "Llama 8B, ZeRO-3, 8 GPUs": (LLAMA_8B, 3, 8, 1),
    "Llama 70B, ZeRO-3, 64 GPUs": (LLAMA_70B, 3, 8, 8),
}
ARGUMENTS = """
--model model --length 1024 --output_dir out --report_to none --bf16 True --gradient_checkpointing True
--per_device_train_batch_size 2 --max_steps 10 --deepspeed ds.json
"""


def main() -> None:
    asked = parse()
    if asked.one:
        print(json.dumps(simulate(asked.one)))
        return
    found = {}
    for name in CASES:
        answer = subprocess.run(
            [sys.executable, __file__, "--one", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        found[name] = json.loads(answer.stdout.splitlines()[-1])
        print(f"{name:28} {json.dumps(found[name])}", flush=True)
        if asked.out:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / "script-times.json").write_text(
                json.dumps({**surroundings(), "cases": found}, indent=1) + "\n"
            )


def simulate(name: str) -> dict[str, Any]:
    """Simulate rank 0 of a case in this process."""
    start = time.monotonic()
    from zerofit.simulate.script.command import ScriptTarget, read_command
    from zerofit.simulate.script.rank import simulate_script_rank
    from zerofit.spec.cluster import Cluster

    sizes, stage, gpus, nodes = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), sizes, stage)
        launcher = ["torchrun", "--nnodes", str(nodes), "--nproc_per_node", str(gpus)]
        command = read_command([*launcher, str(SCRIPTS / "trainer.py"), *ARGUMENTS.split()])
        device = Cluster("h100-80gb", gpus=gpus, nodes=nodes).device
        record = simulate_script_rank(ScriptTarget(command=command, device=device, gpus=gpus, nodes=nodes))
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "memory_bytes": used.ru_maxrss * 1024,
        "peak_bytes": record.peaks[0].bytes,
    }


def prepare(folder: Path, sizes: dict[str, int], stage: int) -> None:
    """Write a pretrained folder without weights and a DeepSpeed JSON, and go there."""
    from transformers import LlamaConfig

    os.chdir(folder)
    save_tokenizer(folder / "model")
    shape: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "dtype": "bfloat16", **sizes}
    LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "model")
    autos = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
    (folder / "ds.json").write_text(json.dumps({**dict.fromkeys(autos, "auto"), **zero}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help=f"write JSON into this folder (ours: {RESULTS.name}/)")
    parser.add_argument("--one", choices=CASES, help="this one, in this process")
    return parser.parse_args()


if __name__ == "__main__":
    main()
