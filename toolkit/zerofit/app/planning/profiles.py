"""The profile that a plan is made from: a file, one that was kept, or traced now (which imports torch)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofit.app.model_inputs import assumed_inputs
from zerofit.app.planning.code_digest import code_digest
from zerofit.models.catalog import ModelError, names_callable
from zerofit.models.presets import PRESETS
from zerofit.plan.degrees import Degrees, heads_take, settings_of
from zerofit.spec.cache import cache_root
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import write_json
from zerofit.spec.profile import Profile
from zerofit.spec.run import Run
from zerofit.spec.task import DEFAULT_SEQ_LEN, Task

TRACED_RANKS = 8  # the largest tensor and sequence parallel degree that is traced


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What is to be profiled."""

    model: str
    precision: str
    device: str  # "cpu" or "cuda"
    seq_len: int | None = None
    image: str | None = None  # "3x224x224"
    model_args: dict[str, Any] = field(default_factory=dict)
    checkpointings: tuple[bool, ...] = (False, True)
    degrees: tuple[Degrees, ...] | None = None  # None: all that are worth it


def read_profile(path: Path) -> Profile:
    """Read a stored profile. Raises UserError."""
    try:
        return Profile.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        message = f"cannot read {path}: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is not a profile: {type(error).__name__}: {error}"
    hint = "`zerofit plan MODEL` keeps one and says where"
    raise UserError(Problem(kind="profile", message=message, hint=hint, where="--profile"))


def get_profile(wanted: ProfileRequest, report: Reporter) -> tuple[Profile, Path | None]:
    """Return the kept profile, or trace and keep it; and its file (None: that of a user's own code is not kept).

    Raises UserError and ModelError.
    """
    path = _place(wanted)
    if path is not None and path.is_file():
        try:
            return Profile.from_dict(json.loads(path.read_text(encoding="utf-8"))), path
        except (ValueError, KeyError, TypeError, AttributeError):
            path.unlink()  # half written, or of another version
    report.status(f"tracing {wanted.model} without memory ...")
    profile = trace(wanted, report)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, profile.as_dict())
    return profile, path


def trace(wanted: ProfileRequest, report: Reporter) -> Profile:
    """Run the model without memory; notes the degrees that it does not take. Raises UserError and ModelError."""
    with _deepspeed_quiet():
        from zerofit.simulate.profile import TraceSetting, profile_model
    from zerofit.models.catalog import find
    from zerofit.train.probe import models_say, task_of

    with models_say("MODEL"):
        source = find(wanted.model)
    task = task_of(source, Run(model=wanted.model, model_args=wanted.model_args))
    if task == "gan":
        message = f"{wanted.model} trains two engines, which no profile describes"
        raise UserError(Problem(kind="model-task", message=message, hint="plan for another model", where="MODEL"))
    with models_say("MODEL"):
        inputs, config = _inputs(wanted, source, task)
        degrees = _degrees(wanted, config, getattr(inputs, "seq_len", None))
        checkpointings = wanted.checkpointings
        while True:
            # the largest first: where one does not divide every layer, it shows at once
            ordered = sorted(degrees, reverse=True)
            settings = [TraceSetting(wanted.precision, c, d.tp, d.sp) for d in ordered for c in checkpointings]
            try:
                return profile_model(source, task, inputs, wanted.model_args, settings, wanted.device)
            except ModelError as error:
                if error.kind == "model-checkpointing" and len(checkpointings) > 1:
                    report.note(f"left out: {error.message}")
                    checkpointings = (False,)
                    continue
                if error.kind != "profile-tp" or wanted.degrees or ordered[0].tp == 1:
                    raise
                report.note(f"left out: {error.message}")
                degrees.remove(ordered[0])


@contextmanager
def _deepspeed_quiet() -> Iterator[None]:
    """Where there is no GPU, DeepSpeed says so on standard output when it is imported, unless it is told."""
    import torch

    told = "DS_ACCELERATOR" in os.environ or torch.cuda.is_available()
    if not told:
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        yield
    finally:
        if not told:
            del os.environ["DS_ACCELERATOR"]


def _inputs(wanted: ProfileRequest, source: Any, task: Task) -> tuple[Any, Any]:
    """What the model is fed, and its transformers config if it has one."""
    from zerofit.models.hf import make_config, max_positions

    config = make_config(source, None, wanted.model_args) if source.family == "transformers" else None
    longest = max_positions(config) if task != "image" and config is not None else None
    seq_len = wanted.seq_len or min(DEFAULT_SEQ_LEN, longest or DEFAULT_SEQ_LEN)
    inputs = assumed_inputs(source, task, seq_len, wanted.image, wanted.model_args)
    return inputs, None if task == "image" else config


def _degrees(wanted: ProfileRequest, config: Any, seq_len: int | None) -> list[Degrees]:
    """All that are worth it, or the asked ones; what cannot be is not traced, and the search says why it cannot."""
    attention = getattr(config, "num_attention_heads", None)
    heads = (attention, getattr(config, "num_key_value_heads", None) or attention)
    model_type = getattr(config, "model_type", None)
    found = wanted.degrees or settings_of(heads, model_type, TRACED_RANKS)
    return [d for d in found if heads_take(d, heads, model_type) and not (seq_len or 0) % d.sp]


def _place(wanted: ProfileRequest) -> Path | None:
    """Where the profile is kept: by the model's config and everything else that it depends on."""
    content = _content(wanted.model)
    if content is None:
        return None
    names = ("torch", "torchvision", "transformers", "zerofit")
    key = {
        "model": content,
        "args": wanted.model_args,
        "inputs": [wanted.seq_len, wanted.image],
        "settings": [wanted.precision, wanted.checkpointings, wanted.degrees],
        "device": wanted.device,
        "versions": {name: importlib.metadata.version(name) for name in names},
        "code": code_digest(__name__),  # a profile of older code is made anew
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    stem = "".join(c if c.isalnum() or c in ".-" else "-" for c in Path(wanted.model).name)
    return cache_root() / "profiles" / f"{stem}-{wanted.precision}-{digest}.json"


def _content(model: str) -> Any:
    """What stands behind a model's name, as plain data; None where it is a user's own code."""
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    return None if names_callable(model) else model


def longest_sequence(wanted: ProfileRequest) -> int | None:
    """The longest sequence that the model takes; None without a limit of its own."""
    from zerofit.models.build import source_max_positions
    from zerofit.models.catalog import find
    from zerofit.train.probe import models_say

    with models_say("MODEL"):
        source = find(wanted.model)
        return source_max_positions(source, wanted.model_args) if source.family == "transformers" else None
