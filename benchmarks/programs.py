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
NO_GRAPHS = "--training.disable_cuda_graphs"  # torchtitan refuses them with pipelines and exchanged tokens
STAGES = f"--parallelism.pipeline_parallel_degree 2 {NO_GRAPHS} --parallelism.pipeline_parallel_schedule"
LAYOUTS = {  # name -> GPUs, options
    "FSDP 2 x TP 2": (4, "--parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_shard_degree 2"),
    "FSDP 8": (8, ""),
    "PP 2 (1F1B)": (2, f"{STAGES} 1F1B"),
    "PP 2 (interleaved)": (2, f"{STAGES} Interleaved1F1B"),
    "PP 2 x CP 2": (4, f"{STAGES} 1F1B --parallelism.context_parallel_degree 2"),
}
EXPERTS = f"--parallelism.expert_parallel_degree 2 {NO_GRAPHS}"
OTHERS = (  # torchtitan's module and configuration, layout on 4 GPUs, options
    ("deepseek_v3", "deepseek_v3_debugmodel", "FSDP 4, EP 2", EXPERTS),
    ("deepseek_v3", "deepseek_v3_debugmodel_mtp", "FSDP 4, EP 2", EXPERTS),
    ("qwen3", "qwen3_moe_debug", "FSDP 4, EP 2", EXPERTS),
    ("qwen3", "qwen3_moe_debug", "FSDP 2 x TP 2, EP 2", f"{EXPERTS} --parallelism.tensor_parallel_degree 2"),
    ("gpt_oss", "gpt_oss_debugmodel_flex", "FSDP 4", NO_GRAPHS),
    ("muse_glimmer", "muse_glimmer_debugmodel", "FSDP 4", NO_GRAPHS),
    ("llama3", "llama3_debugmodel_varlen_attn", "FSDP 4", ""),
    ("llama3", "llama3_debugmodel", "FSDP 4, offloaded", "--training.enable_cpu_offload"),
)
MODELS = {
    "ModernBERT": "modernbert",
    "Whisper that generates": "whisper",
    "LLaVA": "vlm",
    "SmolVLM": "smolvlm",
    "TRL sft of LLaVA": "trl-vlm",
}
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
        for strategy in ("ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3")
    },
    "timm": ("timm", 1, "python {programs}/timm_net.py"),
    "torchvision detection": ("torchvision", 1, "python {programs}/detection.py"),
    "torchvision segmentation": ("torchvision", 1, "python {programs}/segmentation.py"),
    "Seq2SeqTrainer that generates": ("transformers", 1, "python {programs}/seq2seq_generate.py"),
    **{
        name: ("trl" if kind == "trl-vlm" else "transformers", 1, f"python {{programs}}/transformers_models.py {kind}")
        for name, kind in MODELS.items()
    },
    **{
        f"torchtitan debug, {layout}": (
            "torchtitan",
            gpus,
            f"torchrun --nproc_per_node {gpus} {TITAN} llama3_debugmodel {options}",
        )
        for layout, (gpus, options) in LAYOUTS.items()
    },
    **{
        f"torchtitan {config}, {layout}": (
            "torchtitan",
            4,
            f"torchrun --nproc_per_node 4 {TITAN.replace('llama3', module)} {config} {options}",
        )
        for module, config, layout, options in OTHERS
    },
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
    out = asked.out.resolve() if asked.out else None  # each program runs in another folder
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for name in asked.names or CASES:
            package, gpus, command = CASES[name]
            if importlib.util.find_spec(package) is None:
                print(f"{name:32} {package} is not installed")
                continue
            found[name] = simulate(command.format(programs=PROGRAMS.resolve()), gpus)
            print(f"{name:32} {json.dumps(found[name])}", flush=True)
            if out:  # after each program, since all take half an hour
                out.mkdir(parents=True, exist_ok=True)
                (out / "programs.json").write_text(json.dumps({**surroundings(), "cases": found}, indent=1) + "\n")


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
    from zerofit.simulate.forecast.result import SimulatedScript
    from zerofit.spec.cluster import Cluster
    from zerofit.spec.errors import UserError

    start = time.monotonic()
    try:
        result = simulate_script(command.split(), Cluster("h100-80gb", gpus=gpus))
    except UserError as error:
        refused = error.problems[0]
        return {"exit_code": 2, "seconds": round(time.monotonic() - start, 1), "refused": refused.message}
    answer: dict[str, object] = {"peak_bytes": result.peak_bytes, "phase": result.peak_phase, "rank": result.rank}
    assert isinstance(result.run, SimulatedScript)
    answer |= {"upper_bound": result.run.is_upper_bound}
    if result.run.worst_routing:
        answer["worst_routing_bytes"] = result.run.worst_routing.peak_bytes
    return {"exit_code": int(not result.fits), "seconds": round(time.monotonic() - start, 1), **answer}


if __name__ == "__main__":
    main()
