"""Weights written once as they are needed, where each forward reads them from the disk."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from zerofit.checkpoint.aside import refuse_small_disk
from zerofit.checkpoint.safe import load
from zerofit.checkpoint.shards import Entry, write_file
from zerofit.data import Progress
from zerofit.infer.saved import Saved
from zerofit.infer.weights import read_weights

FILE = "model.safetensors"


def rewritten(saved: Saved, dtypes: dict[str, torch.dtype], scratch: Path, progress: Progress) -> Saved:
    """The model with its weights in one safetensors file inside `scratch`, each in the type that `dtypes` has for it.

    A tensor at a time is in memory. Raises UserError where a number has no place in the type ("overflow").
    """
    folder = scratch / "rewritten"
    folder.mkdir()
    stored = saved.weights.tensors

    def read(name: str) -> Tensor:
        where = stored[name]
        if saved.weights.pickled:
            return load(where.file)[name]  # opened anew: what a mapping has shown stays in memory until it is closed
        with safe_open(where.file, framework="pt") as file:
            return file.get_tensor(name)

    entries = [Entry(name=name, shape=where.shape, dtype=dtypes[name]) for name, where in stored.items()]
    total = sum(entry.bytes for entry in entries)
    refuse_small_disk(folder, total, "--offload-folder")
    with progress.task(f"writing the weights to {folder}", total, "bytes") as task:
        write_file(folder / FILE, entries, read, task.advance)
    for config in saved.folder.glob("*config.json"):
        shutil.copy(config, folder)
    return replace(saved, folder=folder, weights=read_weights(folder))
