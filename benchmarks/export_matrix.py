"""Every kind of model in every layout: trained on two ranks, exported, loaded plainly, evaluated.

    python -m benchmarks.export_matrix [--only WORD ...] [--out FILE]

Two independent references for each: the weights that the run leaves in `model/`, which the engine itself gathers, bit
for bit; and the loss of the engine's evaluation, which transformers (or a plain torch module) must give on the exported
weights. Then universal checkpoints of five layouts are loaded by plain DeepSpeed engines at stages 1 to 3 on one and
two ranks, which must hold every master weight and moment bit for bit and train on alike.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from tests.ranks.pool import ROOT, RankPool, Trained
from zerofit.checkpoint.export import export
from zerofit.checkpoint.model_folder import read_model_info
from zerofit.checkpoint.store import locate
from zerofit.checkpoint.universal import convert
from zerofit.data.loader import eval_batches
from zerofit.data.opening import open_data
from zerofit.launch.host import environment, this_machine
from zerofit.launch.local import free_port, launcher
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter

PACKAGES = ("zerofit", "torch", "torchvision", "deepspeed", "transformers", "accelerate", "safetensors")
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SHAPE, "vocab_size": 260, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 256}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 260, "bos_token_id": None, "eos_token_id": 256}
TEXT = {"steps": 3, "micro_batch": 2, "seq_len": 16, "save_every": "3", "lr": 1e-2, "eval_samples": 8}
IMAGES = {"steps": 2, "micro_batch": 4, "save_every": "2", "data": "digits", "eval_samples": 16}
EXPERTS = {**GROUPED, "num_local_experts": 4}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model": "llama-tiny", "model_args": GROUPED, **TEXT},
    "llama, tied": {"model": "llama-tiny", "model_args": {**GROUPED, "tie_word_embeddings": True}, **TEXT},
    "qwen2, tied": {"model": "qwen2.5-0.5b", "model_args": GROUPED, **TEXT},
    "qwen3": {
        "config": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8, **GROUPED},
        **TEXT,
    },
    "mistral": {"config": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **GROUPED}, **TEXT},
    "mixtral": {"model": "mixtral-8x7b", "model_args": EXPERTS, **TEXT},
    "gpt2, tied": {"model": "gpt2", "model_args": GPT2, **TEXT},
    "bert, tied": {"model": "bert-base", "model_args": {**SHAPE, "vocab_size": 260}, **TEXT},
    "vit": {"model": "vit-b-16-hf", "model_args": {**SHAPE, "patch_size": 4}, "image_size": 8, **IMAGES},
    "resnet18": {"model": "resnet18", "image_size": 16, **IMAGES},
    "mobilenet_v2": {"model": "mobilenet_v2", "image_size": 16, **IMAGES},
    "resnet18-small": {"model": "resnet18-small", "model_args": {"width": 4}, "image_size": 8, **IMAGES},
    "dcgan": {"model": "dcgan", "model_args": {"width": 8}, "image_size": 8, **IMAGES},
    "own": {"model": "tests.train.own_models:OwnLoss", "image_size": 8, **IMAGES},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"ds_config": "zero0"},
    "zero1": {"ds_config": "zero1"},
    "zero2": {"ds_config": "zero2"},
    "zero3": {"ds_config": "zero3"},
    "tp2 zero1": {"ds_config": "tensor_parallel", "tensor_parallel": 2},
    "tp2 zero2": {"ds_config": "tensor_parallel_zero2", "tensor_parallel": 2},
    "tp2 zero3": {"ds_config": "tensor_parallel_zero3", "tensor_parallel": 2},
    "pp2 zero1": {"ds_config": "pipeline", "pipeline": 2},
}
PRECISIONS = ("fp32", "bf16")
UNIVERSAL = ("zero1", "zero2", "zero3", "tp2 zero1", "pp2 zero1")  # of the first model, in fp32
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # of the loss; in bf16 two ways to sum a batch differ by this much


def main() -> None:
    """Run the matrix; the exit code is 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="rows with all of these words, e.g. llama zero3")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp())
    (scratch / "text.txt").write_text("".join(f"line {i}: numbers that go up to {i * i}\n" for i in range(80)))
    pool = RankPool(2, scratch)
    try:
        rows = list(_rows(pool, scratch, arguments.only))
        loads = _universal(scratch)
    finally:
        pool.close()
        shutil.rmtree(scratch)
    if arguments.out:
        about = {
            "date": datetime.date.today().isoformat(),
            "hardware": {"device": this_machine().device_name, "cores": this_machine().cores},
            "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
            "tolerance": TOLERANCE,
        }
        arguments.out.write_text(json.dumps({**about, "rows": rows, "universal": loads}, indent=1) + "\n")
    bad = [row for row in rows if row["status"] == "different"] + [row for row in loads if not row["same"]]
    raise SystemExit(bool(bad))


def _rows(pool: RankPool, scratch: Path, only: list[str]):
    for name, model in MODELS.items():
        for layout, how in LAYOUTS.items():
            for precision in PRECISIONS:
                label = f"{name} | {layout} | {precision}"
                if not all(word in label for word in only):
                    continue
                row = {"model": name, "layout": layout, "precision": precision}
                row |= _one(pool, scratch, label, {**_options(model, scratch), **how, "precision": precision})
                print(f"{label:42} {row['status']:10} {row.get('reason', '')[:90]}{_losses(row)}", flush=True)
                yield row


def _options(model: dict[str, Any], scratch: Path) -> dict[str, Any]:
    options = {"data": f"text:{scratch / 'text.txt'}", **model}
    if config := options.pop("config", None):
        file = scratch / f"{config['model_type']}.json"
        file.write_text(json.dumps(config))
        options["model"] = str(file)
    return options


def _losses(row: dict[str, Any]) -> str:
    return f"loss {row['engine_loss']:.6f} and {row['loaded_loss']:.6f}" if "loaded_loss" in row else ""


def _one(pool: RankPool, scratch: Path, label: str, options: dict[str, Any]) -> dict[str, Any]:
    folder = scratch / "runs" / label.replace(" ", "")
    try:
        trained = pool.train(folder, **options)
    except UserError as error:
        return {"status": "refused", "reason": error.problems[0].message}
    checkpoint = locate(folder)
    try:
        export(checkpoint, folder / "out", trust_model_code=True)
    except UserError as error:
        return {"status": "refused", "reason": error.problems[0].message}
    row = _compare(trained, folder / "out")
    if not label.startswith("llama |"):
        shutil.rmtree(folder)
    return row


def _compare(trained: Trained, out: Path) -> dict[str, Any]:
    """The exported weights against the engine's own, and the loss of a plain model with them."""
    ours, theirs = (_tensors(folder) for folder in (out, trained.folder.model))
    same = ours.keys() == theirs.keys() and all(
        ours[n].dtype == theirs[n].dtype and torch.equal(ours[n], theirs[n]) for n in ours
    )
    row: dict[str, Any] = {"tensors": len(ours), "weights_bit_for_bit": same}
    close = True
    if trained.job.facts.task != "gan" and not trained.job.facts.own:
        row |= {"engine_loss": trained.result["eval"]["loss"], "loaded_loss": _eval_loss(_load(out, trained), trained)}
        close = abs(row["engine_loss"] - row["loaded_loss"]) <= TOLERANCE[trained.job.precision]
    return row | {"status": "equal" if same and close else "different"}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def _load(out: Path, trained: Trained) -> nn.Module:
    autos = {
        "causal-lm": transformers.AutoModelForCausalLM,
        "masked-lm": transformers.AutoModelForMaskedLM,
        "image": transformers.AutoModelForImageClassification,
    }
    if (out / "config.json").exists():
        model, found = autos[trained.job.facts.task].from_pretrained(out, output_loading_info=True)
        assert not any(found.values()), found
        return model
    about = read_model_info(out)
    assert about
    model = build(find(about.model), about.inputs, about.model_args)
    model.load_state_dict(_tensors(out))
    # weights of a narrower type are computed with in it, batch norm in fp32, as training does
    return model.float().eval()


@torch.no_grad()
def _eval_loss(model: nn.Module, trained: Trained) -> float:
    run = trained.job.run
    data = open_data(run, trained.job.facts.task, run.seq_len, Reporter())
    total, targets = 0.0, 0
    for batch in eval_batches(data.valid, 0, 1, 4, run.eval_samples):
        x = batch["inputs"]
        out = model(x.to(next(model.parameters()).dtype) if x.is_floating_point() else x)
        logits = getattr(out, "logits", out).float().flatten(0, -2)
        labels = batch["labels"].reshape(-1)
        total += functional.cross_entropy(logits, labels, reduction="sum").item()
        targets += int((labels != -100).sum())
    return total / targets


def _universal(scratch: Path) -> list[dict[str, Any]]:
    """Universal checkpoints of the first model's runs, in plain engines."""
    sources = {layout: scratch / "runs" / f"llama|{layout.replace(' ', '')}|fp32" for layout in UNIVERSAL}
    sources = {layout: folder for layout, folder in sources.items() if folder.exists()}
    for folder in sources.values():
        convert(locate(folder), folder / "universal")
    rows: list[dict[str, Any]] = []
    for ranks in (1, 2):
        words = [f"{layout}={folder}" for layout, folder in sources.items()]
        answers = scratch / f"universal-{ranks}.json"
        command = [*launcher(ranks, free_port()), "--module", "benchmarks.universal_rank", str(answers), *words]
        machine = this_machine()
        environ = environment(machine.accelerator, machine.cores, ranks) | {"PYTHONPATH": str(ROOT)}
        if sources:
            subprocess.run(command, env=environ, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            rows += json.loads(answers.read_text())
    for row in rows:
        alike = [r["losses"] for r in rows if r["source"] == row["source"]]
        near = max(abs(one - other) for a in alike for one, other in zip(a, row["losses"], strict=True)) < 1e-5
        row["same"] = row["states_bit_for_bit"] and near and row["first_step"] == 3
        print(
            f"universal of {row['source']:10} at stage {row['stage']} on {row['ranks']}: {row['same']} {row['losses']}"
        )
    return rows


if __name__ == "__main__":
    main()
