"""Programs of other projects, simulated unmodified: whether each ends, its verdict, peak and seconds.

python benchmarks/programs.py [NAME ...] [--out FOLDER]

Runs those whose packages are installed and installs nothing. Scripts are in scripts/programs; torchtitan and
others are started as their users start them. Exit codes are those of zerofit simulate: 0 fits, 1 does not, 2 refused.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import time
from pathlib import Path

from meter.report import surroundings
from meter.script_cases import SCRIPTS, save_tokenizer

PROGRAMS = SCRIPTS / "programs"
TITAN = "-m torchtitan.train --hf_assets_path llama --module llama3 --config"
SHARDED = "--parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_shard_degree 2"
# name -> package, GPUs, command; {programs} is the folder of the scripts
CASES: dict[str, tuple[str, int, str]] = {
    **{f"TRL {kind}": ("trl", 1, f"python {{programs}}/trl_trainers.py {kind}") for kind in ("sft", "dpo", "kto")},
    **{f"TRL {kind}": ("trl", 1, f"python {{programs}}/trl_trainers.py {kind}") for kind in ("reward", "grpo", "rloo")},
    "Accelerate FSDP2": ("accelerate", 2, "accelerate launch --num_processes 2 {programs}/accelerate_fsdp2.py"),
    **{
        f"Lightning {strategy}": (
            "lightning",
            2,
            f"torchrun --nproc_per_node 2 {{programs}}/lightning_net.py {strategy}",
        )
        for strategy in ("ddp", "fsdp", "deepspeed_stage_2")
    },
    "timm": ("timm", 1, "python {programs}/timm_net.py"),
    "torchvision detection": ("torchvision", 1, "python {programs}/detection.py"),
    "Seq2SeqTrainer that generates": ("transformers", 1, "python {programs}/seq2seq_generate.py"),
    "torchtitan debug, FSDP 2 x TP 2": (
        "torchtitan",
        4,
        f"torchrun --nproc_per_node 4 {TITAN} llama3_debugmodel {SHARDED}",
    ),
    "torchtitan debug, FSDP 8": ("torchtitan", 8, f"torchrun --nproc_per_node 8 {TITAN} llama3_debugmodel"),
    "torchtitan 8B, FSDP 8": (
        "torchtitan",
        8,
        f"torchrun --nproc_per_node 8 {TITAN} llama3_8b --dataloader.dataset c4_test",
    ),
}
LLAMA = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    asked = parse()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for name in asked.names or CASES:
            package, gpus, command = CASES[name]
            if importlib.util.find_spec(package) is None:
                print(f"{name:32} {package} is not installed")
                continue
            found[name] = simulate(command.format(programs=PROGRAMS.resolve()), gpus)
            print(f"{name:32} {json.dumps(found[name])}", flush=True)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "programs.json").write_text(json.dumps({**surroundings(), "cases": found}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--out", type=Path, help="folder for programs.json")
    return parser.parse_args()


def prepare(folder: Path) -> None:
    """Write a pretrained folder without weights and the text that torchtitan's debug model reads, and go there."""
    from transformers import LlamaConfig

    save_tokenizer(folder / "llama")
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig.from_dict({**LLAMA, **tokens, "vocab_size": 512, "architectures": ["LlamaForCausalLM"]})
    config.save_pretrained(folder / "llama")
    text = folder / "tests/assets/c4_test/data.json"
    text.parent.mkdir(parents=True)
    text.write_text("\n".join([json.dumps({"text": "one two three " * 400})] * 400))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(folder)


def simulate(command: str, gpus: int) -> dict[str, object]:
    """Return a program's exit code, seconds, and its peak or what was refused."""
    from zerofit.app.simulation.scripts import simulate_script
    from zerofit.spec.cluster import Cluster
    from zerofit.spec.errors import UserError

    start = time.monotonic()
    try:
        result = simulate_script(command.split(), Cluster("h100-80gb", gpus=gpus))
    except UserError as error:
        refused = error.problems[0]
        return {"exit_code": 2, "seconds": round(time.monotonic() - start, 1), "refused": refused.message}
    answer = {"peak_bytes": result.peak_bytes, "phase": result.peak_phase}
    return {"exit_code": int(not result.fits), "seconds": round(time.monotonic() - start, 1), **answer}


if __name__ == "__main__":
    main()
