"""Run requests from what users name: a run made in Python, a run file, a run folder, or a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerofit.spec.load import RunRequest, load_run
from zerofit.spec.run import Run
from zerofit.spec.run_folder import RunFolder

LAYOUT = {"ranks", "tensor_parallel", "pipeline", "sequence_parallel", "micro_batch"}


def as_request(run: Run | RunRequest | str | Path) -> RunRequest:
    """Return the request of a run, of a run file or run folder (a path), or of a model's name. Raises UserError."""
    return RunRequest.of(run) if isinstance(run, Run | RunRequest) else read_request(str(run), {})


def read_request(target: str | None, flags: Mapping[str, Any]) -> RunRequest:
    """Return the request of a model's name, a run file or a run folder, overridden by flags. Raises UserError.

    A run folder goes on with its own run; where flags change the layout, the batch sizes of a rank are chosen anew
    and the global batch is kept.
    """
    flags = dict(flags)
    if target and RunFolder(Path(target)).plan.is_file():
        free = {"micro_batch": None, "gradient_accumulation_steps": None} if LAYOUT & set(flags) else {}
        return load_run(RunFolder(Path(target)).run, {"output": Path(target), **free, **flags})
    if target and is_run_file(target):
        return load_run(Path(target), flags)
    return load_run(None, {"model": target, **flags} if target else flags)


def is_run_file(target: str) -> bool:
    """Whether a name is that of a YAML file, or of a JSON file that is not a transformers config."""
    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        return True
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        return "model_type" not in json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return True  # the loader says what is wrong with it
