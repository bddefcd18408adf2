"""What each of the last releases of DeepSpeed and transformers did to the memory of ten standard jobs.

python benchmarks/memory_by_version.py [--jobs WORDS] [--at-once N] [--out FOLDER]

Each release is installed by pip into an environment over this one, as for `zerofit simulate --deepspeed-version`: torch
is the same one everywhere. DeepSpeed is built from its source without its ops. One process a release simulates the jobs
as rank 0 of 8 H100 without a GPU. The peak is that of the highest phase, start-up included.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from meter.report import surroundings
from meter.script_cases import SCRIPTS, save_tokenizer

from zerofit.app.simulation.other_releases import python_with
from zerofit.spec.events import Reporter

RESULTS = Path(__file__).parent / "results"
RELEASES = {  # oldest first; the one of this environment is among them
    "deepspeed": ("0.19.5", "0.19.6", "0.19.7", "0.19.8"),
    "transformers": ("5.21.1", "5.22.2", "5.23.0", "5.24.0"),
}
LLAMA = {  # the widths of Llama 3.2 1B, half its layers
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
LLAMA |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 4096}
ARGUMENTS = "--output_dir out --report_to none --bf16 True --per_device_train_batch_size 2 --max_steps 10"
TEXTS = "--model model --length 1024"
CHECKPOINTED = "--gradient_checkpointing True"
TRAINER = f"torchrun --nproc_per_node 8 SCRIPTS/trainer.py {TEXTS} {ARGUMENTS}"
SFT = f"torchrun --nproc_per_node 8 SCRIPTS/sft.py --model model {ARGUMENTS} {CHECKPOINTED}"
SEQ2SEQ = f"torchrun --nproc_per_node 8 SCRIPTS/seq2seq.py --tokenizer model {ARGUMENTS}"
# name -> command; ZN.json are DeepSpeed's settings of that ZeRO stage
JOBS = {
    "plain engine, ZeRO-1": "deepspeed --num_gpus 8 SCRIPTS/plain.py --deepspeed --deepspeed_config own1.json",
    "plain engine, ZeRO-3": "deepspeed --num_gpus 8 SCRIPTS/plain.py --deepspeed --deepspeed_config own3.json",
    "Trainer, Llama, no DeepSpeed": f"{TRAINER} {CHECKPOINTED}",
    "Trainer, Llama, ZeRO-2": f"{TRAINER} --deepspeed auto2.json",
    "Trainer, Llama, ZeRO-3, checkpointing": f"{TRAINER} {CHECKPOINTED} --deepspeed auto3.json",
    "Trainer, Llama, ZeRO-3, all offloaded": f"{TRAINER} {CHECKPOINTED} --deepspeed offload.json",
    "Trainer, LoRA, ZeRO-2": f"{TRAINER} {CHECKPOINTED} --lora True --deepspeed auto2.json",
    "Seq2SeqTrainer, ZeRO-2": f"{SEQ2SEQ} --deepspeed auto2.json",
    "TRL SFT, Llama, ZeRO-3": f"{SFT} --deepspeed auto3.json",
    "Accelerate, Llama, ZeRO-2": "torchrun --nproc_per_node 8 SCRIPTS/accelerate_loop.py --model model --plugin",
}


@dataclass(frozen=True, kw_only=True)
class JobMemory:
    """A job's simulated memory on one rank."""

    job: str
    peak_bytes: int = 0
    phase: str = ""
    at: str = ""
    host_bytes: int = 0
    refused: str = ""


def main() -> None:
    asked = parse()
    if asked.one:
        for job in simulated(asked.jobs):
            print(json.dumps(asdict(job)), flush=True)
        return
    here = Path(sys.executable)
    releases = [(package, version) for package, versions in RELEASES.items() for version in versions]
    report = Reporter(lambda event: print(event.text, flush=True))
    pythons = {(p, v): here if v == importlib.metadata.version(p) else python_with({p: v}, report) for p, v in releases}
    with ThreadPoolExecutor(asked.at_once) as pool:
        answers = {python: pool.submit(of_release, python, asked) for python in set(pythons.values())}
    found = [{"package": p, "version": v, "jobs": answers[python].result()} for (p, v), python in pythons.items()]
    if asked.out:
        write(found, asked.out)
    print("\n".join(table(found)))


def of_release(python: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what all jobs need with the packages of this Python."""
    quiet = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = [python, __file__, "--one", "--jobs", *asked.jobs]
    rows = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, **quiet}, text=True) as process:
        for line in process.stdout or ():
            if line.startswith('{"job"'):
                rows.append(json.loads(line))
                print(f"{python.parents[1].name:30} {line}", end="", flush=True)
    order = list(asked.jobs)
    missing = [
        {**asdict(JobMemory(job=job)), "refused": "ended"} for job in order if job not in {r["job"] for r in rows}
    ]
    return sorted([*rows, *missing], key=lambda row: order.index(row["job"]))


def simulated(jobs: list[str]) -> Iterator[JobMemory]:
    """Simulate jobs in processes forked from this one, which has imported everything, two at a time; as they end."""
    for module in ("zerofit.simulate.script.rank", "deepspeed.runtime.zero.muon.muon_optimizer"):
        importlib.import_module(module)
    waiting, running = list(jobs), dict[int, tuple[str, int]]()
    while waiting or running:
        while waiting and len(running) < 2:
            reading, writing = os.pipe()
            job = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                simulate_and_exit(job, writing)
            os.close(writing)
            running[pid] = job, reading
        job, reading = running.pop(os.wait()[0])
        with os.fdopen(reading) as file:
            yield JobMemory(**json.loads(file.read() or json.dumps({"job": job, "refused": "ended"})))


def simulate_and_exit(job: str, writing: int) -> NoReturn:
    """Write what was found into a pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    try:
        answer = in_this_process(job)
    except Exception as error:
        answer = JobMemory(job=job, refused=f"{type(error).__name__}: {error}"[:1000])
    os.write(writing, json.dumps(asdict(answer)).encode())
    os._exit(0)


def in_this_process(job: str) -> JobMemory:
    """Simulate rank 0 of a job; this process's torch is changed for good."""
    from zerofit.simulate.script.command import ScriptTarget, read_command
    from zerofit.simulate.script.rank import simulate_script_rank
    from zerofit.spec.cluster import Cluster
    from zerofit.spec.overhead import blas_workspace_bytes

    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        device = Cluster("h100-80gb", gpus=8).device
        target = ScriptTarget(
            command=read_command(JOBS[job].replace("SCRIPTS", str(SCRIPTS)).split()),
            device=device,
            gpus=8,
            nodes=1,
            workspace_bytes=blas_workspace_bytes(device),
        )
        record = simulate_script_rank(target)
    highest = record.peaks[0]
    host = sum(record.host.values())
    return JobMemory(job=job, peak_bytes=highest.bytes, phase=highest.phase, at=highest.at, host_bytes=host)


def prepare(folder: Path) -> None:
    """Write a pretrained folder without weights and DeepSpeed's settings, and go there."""
    from transformers import LlamaConfig

    os.chdir(folder)
    save_tokenizer(folder / "model")
    more: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}
    LlamaConfig(**LLAMA, **more, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "model")
    autos = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    base = {"bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
    host = {"device": "cpu", "pin_memory": True}
    for stage in (1, 2, 3):
        zero = {"zero_optimization": {"stage": stage}}
        adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "train_micro_batch_size_per_gpu": 4}
        _json(folder / f"own{stage}.json", {**base, **zero, **adam, "gradient_accumulation_steps": 2})
        _json(folder / f"auto{stage}.json", {**dict.fromkeys(autos, "auto"), **base, **zero})
    zero = {"stage": 3, "offload_optimizer": host, "offload_param": host}
    _json(folder / "offload.json", {**dict.fromkeys(autos, "auto"), **base, "zero_optimization": zero})


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def table(found: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table in Markdown: each release's peaks in GiB, and the change against the one before."""
    lines = []
    for package in RELEASES:
        mine = [row for row in found if row["package"] == package]
        if not mine:
            continue
        titles = ["job, peak in GiB", *(f"{package} {row['version']}" for row in mine)]
        lines += ["", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        for number, one in enumerate(mine[0]["jobs"]):
            cells, before = [], 0
            for row in mine:
                now = row["jobs"][number]["peak_bytes"]
                change = f" ({now / before - 1:+.2%})" if before and now not in (0, before) else ""
                cells.append(f"{now / 2**30:.3f}{change}" if now else "refused")
                before = now or before
            lines.append(f"| {one['job']} | {' | '.join(cells)} |")
    return lines


def write(found: list[dict[str, Any]], folder: Path) -> None:
    """Write all figures, with when and on what they were found."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = {**surroundings(), "releases": found}
    (folder / "memory-by-version.json").write_text(json.dumps(everything, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), help="only these")
    parser.add_argument("--at-once", type=int, default=2, help="releases that are simulated at a time")
    parser.add_argument("--out", type=Path, help=f"write JSON into this folder (ours: {RESULTS.name}/)")
    parser.add_argument("--one", action="store_true", help="with the packages as they are, in this process")
    return parser.parse_args()


if __name__ == "__main__":
    main()
