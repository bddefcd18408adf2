"""What flags of `zerofit plan` have wrong between them, before any model is traced and after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerofit.models.presets import PRESETS
from zerofit.spec.errors import Problem, Problems
from zerofit.spec.profile import Profile


def early_problems(model: str | None, options: dict[str, Any]) -> Iterator[Problem]:
    """Those that need neither torch nor a profile."""
    if model is not None and Path(model).suffix in (".yaml", ".yml"):
        hint = f"name its model; `zerofit simulate {model}` tells what that run needs"
        yield Problem(kind="usage", message=f"plan takes a MODEL, and {model} is a run", hint=hint, where="MODEL")
    asked, longest = options["seq_len"], _positions(model, options["model_args"] or {})
    if asked and longest and asked > longest:
        message = f"--seq-len {asked} is more than the {longest} positions of {model}"
        yield Problem(kind="seq-len", message=message, hint=f"take {longest} or less", where="--seq-len")
    batch = options["global_batch"] or 0
    if batch < 1:
        return
    for name in ("micro_batch", "gradient_accumulation_steps"):
        flag, size = "--" + name.replace("_", "-"), options[name] or 0
        if size > 0 and batch % size:
            message = f"{flag} {size} does not divide --global-batch {batch}"
            hint = f"leave {flag} out, or take one that does"
            yield Problem(kind="batch-size", message=message, hint=hint, where=flag)


def refuse_meaningless(profile: Profile, options: dict[str, Any]) -> None:
    """Raise a UserError for what says nothing of such a model."""
    problems = Problems()
    if profile.task == "image" and options["seq_len"]:
        message = f"{profile.model} takes images, which have no --seq-len"
        problems.add("flag", message, "leave it out; --input image:CxHxW sets their size", "--seq-len")
    if profile.seq_len is not None and options["image"]:
        message = f"{profile.model} takes tokens, and --input is for images"
        problems.add("flag", message, "leave it out; --seq-len sets how many tokens", "--input")
    problems.raise_if_any()


def _positions(model: str | None, model_args: dict[str, Any]) -> int | None:
    config = {**PRESETS.get(model or "", {}), **model_args}
    return config.get("n_positions") or config.get("max_position_embeddings")
