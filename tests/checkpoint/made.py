"""Checkpoints made without an engine: files in the shape that DeepSpeed's ZeRO stage 2 writes, with their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerofit.checkpoint.store import Manifest, files_of, marks_of
from zerofit.models.inputs import Inputs
from zerofit.spec.model_facts import ModelFacts
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Batch, Job, Layout

KINDS = ("fp32", "exp_avg", "exp_avg_sq")
MODEL_STATES = "state/mp_rank_00_model_states.pt"
OPTIM_STATES = "state/zero_pp_rank_{}_mp_rank_00_optim_states.pt"
JOB = Job(
    run=Run(model="mlp", data="digits"),
    layout=Layout(dp=2, zero_stage=2),
    batch=Batch(micro=2, accumulation=1, dp=2),
    steps=2,
    facts=ModelFacts(task="image", parameters=10, largest_parameter=10, hidden_size=3, forward_flops=None),
    ds_config={},
)
Values = Callable[[str, str, torch.Size], Tensor]  # name, kind, shape


@dataclass(frozen=True, kw_only=True)
class Made:
    """A model at a step, and the ranks that are to have saved it; the model may be on the meta device."""

    model: nn.Module
    run: Run
    task: str
    inputs: Inputs
    ranks: int = 2
    step: int = 2


def make(run_folder: Path, made: Made, values: Values) -> Path:
    """Write the checkpoint of a step into a run's folder; its path.

    `values` is called several times for each tensor. Memory: one tensor; what is written is mapped from scratch files.
    """
    folder = run_folder / "checkpoints" / f"step-{made.step:08}"
    (folder / "state").mkdir(parents=True)
    (folder / "ranks").mkdir()
    (folder / "latest").write_text("state")
    groups = [group for group in _groups(made.model) if group]
    counters = {"global_steps": made.step, "global_samples": 4 * made.step, "skipped_steps": 0, "step": made.step}
    buffers = {k: v for k, v in made.model.state_dict().items() if k not in _parameters(made.model)}
    _save_model_states(folder, made, groups, counters, buffers, values)
    for rank in range(made.ranks):
        _save_partition(folder, made, groups, rank, values)
        engine = {
            "names": [name for name, _ in made.model.named_parameters()],
            "parameters": [e for number in range(len(groups)) for e in _entries(groups[number], number, rank, made)],
            "buffers": [{"name": n, "file": MODEL_STATES, "keys": ["module", n]} for n in buffers if rank == 0],
            "ties": _ties(made.model),
            "counters": counters,
            "unsupported": None,
        }
        said = {"rank": rank, "world_size": made.ranks, "engines": {"state": engine}}
        (folder / "ranks" / f"rank-{rank:05}.json").write_text(json.dumps(said))
    _write_manifest(folder, made)
    return folder


def _save_model_states(
    folder: Path,
    made: Made,
    groups: list[dict[str, torch.Size]],
    counters: dict[str, int],
    buffers: dict[str, Tensor],
    values: Values,
) -> None:
    weights = {}
    for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
        weights[name] = _mapped(folder, shape.numel(), torch.bfloat16).view(shape)
        weights[name].copy_(values(name, "fp32", shape))
    ties = _ties(made.model)
    saved = {
        "module": weights | {alias: weights[name] for alias, name in ties.items()} | buffers,
        "buffer_names": list(buffers),
        "param_shapes": groups,
        "shared_params": ties,
        "ds_version": "0.19.8",
        "dp_world_size": made.ranks,
        "mp_world_size": 1,
        "lr_scheduler": None,
    }
    torch.save(saved | counters, folder / MODEL_STATES)


def _save_partition(folder: Path, made: Made, groups: list[dict[str, torch.Size]], rank: int, values: Values) -> None:
    """A rank's share of each flat group, as its optimizer's file has it."""
    shares: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for kind, group in ((kind, group) for kind in KINDS for group in groups):
        share = _mapped(folder, _share(group, made.ranks), torch.float32).zero_()
        for name, start, end, place in _stretches(group, rank, made.ranks):
            share[place : place + end - start] = values(name, kind, group[name]).reshape(-1)[start:end]
        total = sum(shape.numel() for shape in group.values())
        real = min(len(share), total - rank * len(share))  # DeepSpeed saves it without its padding
        shares[kind].append(share[:real])
    step = torch.tensor(float(made.step))
    states = {i: {"step": step, **{kind: shares[kind][i] for kind in KINDS[1:]}} for i in range(len(groups))}
    param_groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [i]} for i in range(len(groups))]
    saved = {
        "base_optimizer_state": {"state": states, "param_groups": param_groups},
        "single_partition_of_fp32_groups": shares["fp32"],
        "zero_stage": 2,
        "partition_count": [made.ranks] * len(groups),
        "overflow": False,
        "ds_version": "0.19.8",
    }
    torch.save({"optimizer_state_dict": saved}, folder / OPTIM_STATES.format(rank))


def _share(group: dict[str, torch.Size], ranks: int) -> int:
    """Elements of a group that one rank holds: rounded up to an even number, as DeepSpeed rounds it."""
    return -(-sum(shape.numel() for shape in group.values()) // (2 * ranks)) * 2


def _stretches(group: dict[str, torch.Size], rank: int, ranks: int) -> Iterator[tuple[str, int, int, int]]:
    """What a rank's share holds: (name, first and last element + 1 of the parameter, place in the share)."""
    size, offset = _share(group, ranks), 0
    for name, shape in group.items():
        start, end = max(offset, rank * size), min(offset + shape.numel(), (rank + 1) * size)
        if start < end:
            yield name, start - offset, end - offset, start - rank * size
        offset += shape.numel()


def _entries(group: dict[str, torch.Size], number: int, rank: int, made: Made) -> Iterator[dict[str, Any]]:
    """The index of a rank's share of a group."""
    inside = ["optimizer_state_dict", "base_optimizer_state", "state", number]
    keys = {"fp32": ["optimizer_state_dict", "single_partition_of_fp32_groups", number]}
    keys |= {kind: [*inside, kind] for kind in KINDS[1:]}
    for name, start, end, place in _stretches(group, rank, made.ranks):
        file = OPTIM_STATES.format(rank)
        where = {kind: {"file": file, "keys": path, "offset": place} for kind, path in keys.items()}
        piece = {"name": name, "shape": list(group[name]), "cut": None, "start": start, "numel": end - start}
        yield piece | {"where": where}


def _mapped(folder: Path, count: int, dtype: torch.dtype) -> Tensor:
    """Memory of a file that is gone as soon as nobody uses it."""
    file = folder / "scratch"
    tensor = torch.from_file(str(file), shared=True, size=count, dtype=dtype)
    file.unlink()
    return tensor


def _groups(model: nn.Module) -> list[dict[str, torch.Size]]:
    """Matrices and vectors, as training groups them."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return [{n: s for n, s in shapes.items() if (len(s) > 1) == wide} for wide in (True, False)]


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _ties(model: nn.Module) -> dict[str, str]:
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in _parameters(model).items() if first[id(p)] != name}


def _write_manifest(folder: Path, made: Made) -> None:
    layout = Layout(dp=made.ranks, zero_stage=2)
    batch = Batch(micro=2, accumulation=1, dp=made.ranks)
    sizes = [p.numel() for p in made.model.parameters()]
    facts = ModelFacts(
        task=made.task, parameters=sum(sizes), largest_parameter=max(sizes), hidden_size=1, forward_flops=None
    )
    job = Job(run=made.run, layout=layout, batch=batch, steps=made.step, facts=facts, ds_config={})
    Manifest(
        step=made.step,
        samples=made.step * batch.total,
        world_size=made.ranks,
        created="2026-01-01T00:00:00+00:00",
        versions={"zerofit": "0.1.0"},
        job=job,
        inputs=made.inputs,
        figures={"loss": 1.0},
        files=marks_of(folder, files_of(folder)),
    ).write(folder)
