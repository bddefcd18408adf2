"""Checkpoints made without an engine: files in the shape that DeepSpeed's ZeRO stage 2 writes, with their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerofit.checkpoint.about import inputs_json
from zerofit.checkpoint.manifest import Manifest, files_of, marks_of
from zerofit.models.inputs import Inputs
from zerofit.spec.layout import Batch, Layout
from zerofit.spec.run import RunSpec

Values = Callable[[str, str, torch.Size], Tensor]  # name, kind, shape


@dataclass(frozen=True, kw_only=True)
class Made:
    """A model at a step, and the ranks that are to have saved it; the model may be on the meta device."""

    model: nn.Module
    run: RunSpec
    task: str
    inputs: Inputs
    ranks: int = 2
    step: int = 2


def make(run_folder: Path, made: Made, values: Values) -> Path:
    """Write the checkpoint of a step into a run's folder; its path."""
    folder = run_folder / "checkpoints" / f"step-{made.step:08}"
    (folder / "state").mkdir(parents=True)
    (folder / "ranks").mkdir()
    (folder / "latest").write_text("state")
    ties = _ties(made.model)
    groups = [group for group in _groups(made.model) if group]
    buffers = {k: v for k, v in made.model.state_dict().items() if k not in _parameters(made.model)}
    counters = {"global_steps": made.step, "global_samples": 4 * made.step, "skipped_steps": 0, "step": made.step}
    weights = {name: t.bfloat16() for g in groups for name, s in g.items() for t in [values(name, "fp32", s)]}
    torch.save(
        {
            "module": weights | {alias: weights[name] for alias, name in ties.items()} | buffers,
            "buffer_names": list(buffers),
            "param_shapes": groups,
            "shared_params": ties,
            "ds_version": "0.19.8",
            "dp_world_size": made.ranks,
            "mp_world_size": 1,
            "lr_scheduler": None,
            **counters,
        },
        folder / "state" / "mp_rank_00_model_states.pt",
    )
    del weights
    entries = _save_partitions(folder, made, groups, values)
    for rank in range(made.ranks):
        places = [
            {"name": name, "file": "state/mp_rank_00_model_states.pt", "keys": ["module", name]} for name in buffers
        ]
        engine = {
            "names": [name for name, _ in made.model.named_parameters()],
            "parameters": entries[rank],
            "buffers": places if rank == 0 else [],
            "ties": ties,
            "counters": counters,
            "unsupported": None,
        }
        said = {"rank": rank, "world_size": made.ranks, "engines": {"state": engine}}
        (folder / "ranks" / f"rank-{rank:05}.json").write_text(json.dumps(said))
    _write_manifest(folder, made)
    return folder


def _save_partitions(folder: Path, made: Made, groups: list[dict[str, torch.Size]], values: Values) -> list[list[Any]]:
    """Each rank's share of each flat group; the entries of its index."""
    entries: list[list[Any]] = [[] for _ in range(made.ranks)]
    shares: list[dict[str, list[Tensor]]] = [{} for _ in range(made.ranks)]
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        for number, group in enumerate(groups):
            flat = torch.cat([values(name, kind, shape).reshape(-1) for name, shape in group.items()])
            size = -(-len(flat) // (2 * made.ranks)) * 2  # as DeepSpeed rounds it
            for rank in range(made.ranks):
                shares[rank].setdefault(kind, []).append(flat[rank * size : (rank + 1) * size].clone())
                if kind == "fp32":
                    file = f"state/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
                    entries[rank] += _entries(group, number, rank * size, size, file)
    for rank, share in enumerate(shares):
        states = {i: {"step": torch.tensor(float(made.step)), **_moments(share, i)} for i in range(len(groups))}
        param_groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [i]} for i in range(len(groups))]
        saved = {
            "base_optimizer_state": {"state": states, "param_groups": param_groups},
            "single_partition_of_fp32_groups": share["fp32"],
            "zero_stage": 2,
            "partition_count": [made.ranks] * len(groups),
            "overflow": False,
            "ds_version": "0.19.8",
        }
        file = folder / "state" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": saved}, file)
        share.clear()
    return entries


def _moments(share: dict[str, list[Tensor]], group: int) -> dict[str, Tensor]:
    return {kind: share[kind][group] for kind in ("exp_avg", "exp_avg_sq")}


def _entries(group: dict[str, torch.Size], number: int, first: int, size: int, file: str) -> Iterator[dict[str, Any]]:
    """Where a rank's share [first, first + size) of a flat group holds pieces of its parameters."""
    offset = 0
    for name, shape in group.items():
        start, end = max(offset, first), min(offset + shape.numel(), first + size)
        if start < end:
            inside = ["optimizer_state_dict", "base_optimizer_state", "state", number]
            keys = {"fp32": ["optimizer_state_dict", "single_partition_of_fp32_groups", number]}
            keys |= {kind: [*inside, kind] for kind in ("exp_avg", "exp_avg_sq")}
            where = {kind: {"file": file, "keys": path, "offset": start - first} for kind, path in keys.items()}
            piece = {"name": name, "shape": list(shape), "cut": None, "start": start - offset, "numel": end - start}
            yield piece | {"where": where}
        offset += shape.numel()


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
    facts = {"task": made.task, "parameters": sum(p.numel() for p in made.model.parameters())}
    job = {
        "run": made.run.model_dump(mode="json"),
        "layout": vars(layout),
        "batch": vars(batch),
        "steps": made.step,
        "facts": facts,
        "ds_config": {},
        "inputs": inputs_json(made.inputs),
    }
    Manifest(
        step=made.step,
        samples=made.step * batch.total,
        world_size=made.ranks,
        created="2026-01-01T00:00:00+00:00",
        versions={"zerofit": "0.1.0"},
        job=job,
        figures={"loss": 1.0},
        files=marks_of(folder, files_of(folder)),
    ).write(folder)
