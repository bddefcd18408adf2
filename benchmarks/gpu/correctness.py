"""Losses and gradient norms against plain PyTorch on the same device, checkpoints, batch norm in half precision.

This process is the only rank of all trainings: a start of its own would cost each of them ten seconds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import zerofit as zf
from zerofit.app.training.prepare_folder import make_ready
from zerofit.app.training.train import prepare
from zerofit.config.ds_json import read_for_run
from zerofit.data.loader import Order
from zerofit.data.opening import open_data
from zerofit.launch.host import environment, this_machine
from zerofit.launch.local import free_port
from zerofit.launch.ops import build_ops, needed_ops
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run, load_run
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.train.build import batch_norm_in_fp32
from zerofit.train.process_group import start
from zerofit.train.run import train

from .part import Measure

STEPS = 10
# largest relative difference of a loss, and of a gradient's norm, from float32 in plain PyTorch
TOLERANCES = {"fp16": (5e-3, 3e-2), "bf16": (2e-2, 1e-1), "fp32": (1e-4, 1e-3)}
TEXT = {"seq_len": 64, "global_batch": 8}
NO_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob")
GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 260, **dict.fromkeys(NO_DROPOUT[:3], 0.0)}
BERT = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 260,
    **dict.fromkeys(NO_DROPOUT[3:], 0.0),
}
MODELS: dict[str, dict[str, Any]] = {
    "lenet": {"model": "lenet", "data": "digits", "global_batch": 16},
    "resnet18": {"model": "resnet18-small", "data": "digits", "image_size": 32, "global_batch": 64, "micro_batch": 64},
    "llama": {"model": "llama-tiny", **TEXT},
    "gpt2": {"model": "gpt2", "model_args": GPT2, **TEXT},
    "bert": {"model": "bert-base", "model_args": BERT, **TEXT},
}
BEFORE_CHAOS = {"resnet18": 3}  # steps: batch norm under Adam makes of 1e-7 some percent in ten
COMMON = {"steps": STEPS, "schedule": "constant", "warmup_steps": 0, "ranks": 1, "save_every": "0"}
COMMON |= {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.01, "gradient_clipping": 1.0}


def cases(rehearse: bool) -> list[str]:
    """Models by precision, stage and offload; rehearsed, a few of them."""
    plain = [f"{m} {p} zero{stage}" for p in TOLERANCES for stage in range(4) for m in MODELS]
    offloaded = [f"{m} bf16 {ds}" for ds in ("zero2_offload", "zero3_offload") for m in MODELS]
    if rehearse:
        return ["lenet fp32 zero0", "llama bf16 zero3", "checkpoint", "batch norm bf16"]
    return [*plain, *offloaded, "checkpoint", "batch norm fp16", "batch norm bf16"]


@contextmanager
def measuring(cases: list[str], folder: Path, rehearse: bool) -> Iterator[Measure]:
    """Join a process group of one."""
    place, machine = folder / "correctness", this_machine()
    place.mkdir(exist_ok=True)
    text = place / "text.txt"
    words = random.Random(7)
    text.write_text("".join("".join(words.choices("abcdefgh ", k=63)) + "\n" for _ in range(2000)))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= environment(machine.accelerator, machine.cores, 1) | alone | {"MASTER_PORT": str(free_port())}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    start(timedelta(minutes=5))
    try:
        yield lambda case: _measure(case, place, text)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _measure(case: str, place: Path, text: Path) -> dict[str, Any]:
    if case == "checkpoint":
        return _checkpoint(place)
    if case.startswith("batch norm"):
        return _batch_norm({"fp16": torch.float16, "bf16": torch.bfloat16}[case.split()[-1]])
    model, precision, ds_config = case.split()
    options = {"data": f"text:{text}", **MODELS[model], **COMMON, "precision": precision}
    options["ds_config"] = _config(ds_config)
    records = _trained(place / case.replace(" ", "-"), options)
    losses, norms = _reference(model, str(text))
    compared = BEFORE_CHAOS.get(model, STEPS)
    differences = [
        _largest([record[name] for record in records[:compared]], theirs[:compared])
        for name, theirs in (("loss", losses), ("grad_norm", norms))
    ]
    agrees = all(d <= most for d, most in zip(differences, TOLERANCES[precision], strict=True))
    found = {"loss_difference": differences[0], "norm_difference": differences[1], "agrees": agrees}
    return found | {"losses": [r["loss"] for r in records]}


def _config(name: str) -> dict[str, Any]:
    """A bundled JSON whose fp16 begins with a loss scale that skips no step."""
    config = read_for_run(name).config
    return config | {"fp16": {**config.get("fp16", {}), "initial_scale_power": 8}}


def _trained(folder: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train here as a rank does; return the records of its steps."""
    prepared = prepare(load_run(None, {**options, "output": folder}), Reporter())
    make_ready(prepared.folder, prepared.job.start)
    build_ops(needed_ops(prepared.job.ds_config, prepared.machine), dict(os.environ), lambda _: None)
    train(Job.read(prepared.folder), prepared.folder)
    return _records(prepared.folder)


def _records(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


@cache
def _reference(model: str, text: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of plain PyTorch in float32: the same weights, samples, AdamW and clipping."""
    run = Run(**{"data": f"text:{text}", **MODELS[model], **COMMON})
    source, device = find(run.model), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert source.task != "custom" and run.global_batch
    data = open_data(run, source.task, run.seq_len, Reporter())
    torch.manual_seed(run.seed)
    net = build(source, data.inputs, dict(run.model_args)).train().to(device)
    decayed = [[p for p in net.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)]
    groups = [{"params": ps, "weight_decay": d} for ps, d in zip(decayed, (0.01, 0.0), strict=True) if ps]
    optimizer, order = torch.optim.AdamW(groups, lr=1e-3), Order(len(data.train), run.seed)
    losses, norms = [], []
    for step in range(STEPS):
        span = (step * run.global_batch, (step + 1) * run.global_batch)
        batch = data.train.batch(order.indices(*span).tolist(), order.keys(*span).tolist())
        loss = _cross_entropy(net(batch["inputs"].to(device)), batch["labels"].to(device))
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def _cross_entropy(output: Any, labels: Tensor) -> Tensor:
    return functional.cross_entropy(getattr(output, "logits", output).flatten(0, -2), labels.flatten())


def _largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def _checkpoint(place: Path) -> dict[str, Any]:
    """Train 8 steps at once, and 4 and 4 with a stop between: the same weights? Export, and read with transformers."""
    from transformers import AutoModelForCausalLM

    run = zf.Run(model="llama-tiny", data="synthetic", seq_len=64, global_batch=8, ranks=1, ds_config="zero2")
    run = run.model_copy(update={"precision": "bf16", "schedule": "constant", "warmup_steps": 0, "save_every": "4"})
    whole = zf.train(run.model_copy(update={"steps": 8, "output": place / "whole"}))
    for steps in (4, 8):
        parts = zf.train(run.model_copy(update={"steps": steps, "output": place / "parts"}))
    there = [zf.Checkpoint.latest(result.run_dir) for result in (whole, parts)]
    exported = there[1].export(str(place / "exported"))
    model = AutoModelForCausalLM.from_pretrained(place / "exported")
    return {
        "resumed_from": parts.resumed_from is not None,
        "equal": there[0].diff(str(there[1].path)).equal,
        "exported": list(exported.files),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _batch_norm(dtype: torch.dtype) -> dict[str, Any]:
    """Half-precision input through zerofit's batch norm, against float64: output, gradient, statistics, bytes saved."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(32, 16, 24, 24, device=device, dtype=dtype)
    ours, exact = nn.BatchNorm2d(16).to(device), nn.BatchNorm2d(16).to(device).double()
    batch_norm_in_fp32(ours)
    inputs, saved = (x.clone().requires_grad_(), x.double().requires_grad_()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = ours(inputs[0])
    reference = exact(inputs[1])
    for result in (out, reference):
        (result * torch.linspace(-1, 1, result.shape[-1], device=device, dtype=result.dtype)).sum().backward()
    pairs: dict[str, tuple[Any, Any]] = {
        "output": (out, reference),
        "gradient": (inputs[0].grad, inputs[1].grad),
        "running_mean": (ours.running_mean, exact.running_mean),
        "running_var": (ours.running_var, exact.running_var),
    }
    found: dict[str, Any] = {name: (a.double() - b).abs().max().item() for name, (a, b) in pairs.items()}
    return found | {"input_bytes": x.nbytes, "saved_bytes": sum(t.nbytes for t in saved), "dtype": str(out.dtype)}
