"""Is `--max-memory cpu=` a limit? Models of more than a gigabyte, evaluated in a few hundred MiB from the disk.

    python -m benchmarks.offloaded_eval [--out FILE] [--folder SCRATCH] [--models llama]

Two models with random weights, a Llama of 1.2 GiB and torchvision's ViT-L/16 of 1.1 GiB, are saved as a run saves them
and evaluated by `zerofit eval` whole and under limits, each time in a process of its own. What a process takes is its
resident memory, mapped files included: the most of it since just before the weights were loaded, less what was
resident then, as the kernel's high-water mark has it. `polled_bytes` is the same seen from outside over the whole life
of the process, what came before the weights included. The same is done with accelerate's
load_checkpoint_and_dispatch alone, the limit given as its max_memory.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from zerofit.checkpoint.model_folder import ModelInfo
from zerofit.launch.host import this_machine
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs, TextInputs
from zerofit.spec.run import Run
from zerofit.spec.units import parse_bytes, shown_bytes

PACKAGES = ("torch", "accelerate", "transformers", "safetensors")
POLL_S = 0.01
VOCABULARY, SEQ_LEN, SIZE, CLASSES = 32_000, 128, 224, 1000
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
    "eos_token_id": None,
}
EVALUATE = {
    "llama": ("--micro-batch", "2", "--eval-samples", "4"),
    "vit": ("--micro-batch", "2", "--eval-samples", "4"),
}
LIMITS = {
    "llama": [None, "cpu=600MiB", "cpu=300MiB", ("cpu=240MiB", "--dtype", "bf16")],
    "vit": [None, "cpu=500MiB", "cpu=200MiB"],
}
ALONE = """
import json, re, sys, torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoConfig, AutoModelForCausalLM
import transformers.models.llama.modeling_llama
from zerofit.infer.memory import start_counting
from zerofit.spec.process import resident_memory
folder, limit, offload, vocabulary, length = sys.argv[1:]
ids = torch.randint(0, int(vocabulary), (2, int(length)))
before = start_counting([])
with init_empty_weights():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
model = load_checkpoint_and_dispatch(model, folder + "/model.safetensors", device_map="sequential",
    max_memory={"cpu": int(limit)}, no_split_module_classes=["LlamaDecoderLayer"], offload_folder=offload)
with torch.no_grad():
    for _ in range(2):
        model(input_ids=ids, use_cache=False)
print(json.dumps({"peak_host_bytes": resident_memory().peak, "host_bytes_before": before}))
"""


def main() -> None:
    """Print a row a model and limit, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--folder", type=Path, help="where the models are put meanwhile")
    parser.add_argument("--models", nargs="*", choices=list(LIMITS), default=list(LIMITS))
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=asked.folder) as scratch:
        for name in asked.models:
            print(f"{name}: making the model ...", file=sys.stderr, flush=True)
            folder = save(name, Path(scratch) / name)
            for limit in LIMITS[name]:
                rows.append(evaluate(name, folder, *([limit] if isinstance(limit, str) else limit or ())))
                print(shown(rows[-1]), flush=True)
            if name == "llama":
                rows.append(alone(folder, "300MiB", Path(scratch) / "alone"))
                print(shown(rows[-1]), flush=True)
    within = [row for row in rows if row["limit_bytes"] and row["by"] == "zerofit"]
    assert all(row["taken_bytes"] <= row["limit_bytes"] for row in within), "a limit was exceeded"
    if asked.out:
        machine = this_machine()
        about = {
            "date": datetime.date.today().isoformat(),
            "device": machine.device_name,
            "cores": machine.cores,
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        }
        asked.out.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


def save(name: str, folder: Path) -> Path:
    """The model with random weights, in the files that a run leaves."""
    torch.manual_seed(0)
    folder.mkdir()
    if name == "llama":
        inputs = TextInputs(vocab_size=VOCABULARY, seq_len=SEQ_LEN)
        run = Run(model="llama-tiny", model_args=LLAMA, data=f"synthetic:{VOCABULARY}", seq_len=SEQ_LEN)
        model = build(find(run.model), inputs, LLAMA)
        assert isinstance(model, PreTrainedModel)
        model.save_pretrained(folder)
        ModelInfo.of_run(run, "causal-lm", inputs, 0, "float32").write(folder)
    else:
        images = ImageInputs(channels=3, size=SIZE, classes=CLASSES)
        run = Run(model="vit_l_16", data=f"synthetic:{CLASSES}", image_size=SIZE)
        model = build(find(run.model), images, {})
        torch.nn.init.normal_(model.get_parameter("heads.head.weight"), std=0.02)  # torchvision begins with zeros
        save_file(model.state_dict(), folder / "model.safetensors")
        ModelInfo.of_run(run, "image", images, 0, "float32").write(folder)
    return folder


def evaluate(name: str, folder: Path, limit: str | None = None, *more: str) -> dict[str, Any]:
    """One `zerofit eval` in a process of its own."""
    command = ["-m", "zerofit.cli", "eval", str(folder), *EVALUATE[name], "--json", *more]
    start = time.perf_counter()
    got, polled = child([*command, *(["--max-memory", limit] if limit else [])])
    forecast = next(row for row in got["placement"] if row["device"] == "cpu")
    return {
        "by": "zerofit",
        "model": name,
        "dtype": got["dtype"],
        "weights_bytes": sum(row["weights_bytes"] for row in got["placement"]),
        "limit_bytes": parse_bytes(limit.removeprefix("cpu="), "limit") if limit else None,
        "kept_in_memory_bytes": forecast["weights_bytes"],
        "forecast_bytes": forecast["needed_bytes"],
        "taken_bytes": got["peak_host_bytes"] - got["host_bytes_before"],
        "polled_bytes": polled - got["host_bytes_before"],
        "loss": got["loss"],
        "samples_per_s": got["samples_per_s"],
        "seconds": round(time.perf_counter() - start, 1),
    }


def alone(folder: Path, limit: str, offload: Path) -> dict[str, Any]:
    """accelerate's own way with the same limit."""
    size = parse_bytes(limit, "limit")
    got, polled = child(["-c", ALONE, str(folder), str(size), str(offload), str(VOCABULARY), str(SEQ_LEN)])
    before = got["host_bytes_before"]
    taken = {"taken_bytes": got["peak_host_bytes"] - before, "polled_bytes": polled - before}
    return {"by": "accelerate alone", "model": "llama", "dtype": "fp32", "limit_bytes": size, **taken}


def child(command: list[str]) -> tuple[dict[str, Any], int]:
    """The last line of a Python process as JSON, and the most memory that was seen resident in it."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seen, watched = 0, psutil.Process(process.pid)
    while process.poll() is None:
        try:
            seen = max(seen, watched.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(POLL_S)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out.strip().splitlines()[-1]), seen


def shown(row: dict[str, Any]) -> str:
    """A row as a line."""
    limit = shown_bytes(row["limit_bytes"]) if row["limit_bytes"] else "none"
    text = (
        f"{row['by']:17} {row['model']:6} {row['dtype']}  limit {limit:>9}  taken {shown_bytes(row['taken_bytes']):>9}"
    )
    if "loss" in row:
        text += f"  forecast {shown_bytes(row['forecast_bytes']):>9}  loss {row['loss']:.6f}  {row['seconds']:.0f} s"
    return text


if __name__ == "__main__":
    main()
