"""Read the facts about a model once and store them. Later runs do not import transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter
from torch import nn

from zerofit.app.job.result_cache import result_file
from zerofit.models.build import source_max_positions
from zerofit.models.catalog import ModelSource
from zerofit.models.inputs import Inputs
from zerofit.models.pretrained import weight_file
from zerofit.models.without_dynamo import without_dynamo
from zerofit.spec.errors import models_say
from zerofit.spec.files import write_json
from zerofit.spec.foreign import Unreadable, read_json, shaped
from zerofit.spec.model_facts import ModelFacts, Task
from zerofit.spec.run import Run
from zerofit.train.probe import probe

T = TypeVar("T")


def facts_of(
    source: ModelSource, task: Task, inputs: Inputs | None, run: Run, model: nn.Module | None = None
) -> ModelFacts:
    """Return the facts of a model with these inputs; without `inputs`, FLOPs are not counted.

    `model`: an existing model to use instead of the model of `source`. Raises UserError if model and data do not
    match.
    """
    args, pipelined = dict(run.model_args), run.pipeline != 1
    if model is not None:
        return probe(source, task, inputs, args, pipelined, model)
    key: list[object] = ["facts", task, inputs and {type(inputs).__name__: asdict(inputs)}, args, pipelined]
    if source.pretrained:  # another file of initial weights may have the same name
        with models_say("--pretrained"):
            stat = weight_file(Path(source.pretrained)).stat()
        key += [stat.st_size, stat.st_mtime_ns]
    return _stored(source, key, TypeAdapter(ModelFacts), lambda: probe(source, task, inputs, args, pipelined))


def max_positions_of(source: ModelSource, args: dict[str, object]) -> int | None:
    """Return the longest sequence that a model supports, in tokens; None without a limit.

    Raises UserError if the model has no such `args`.
    """
    with models_say("MODEL"), without_dynamo():
        return _stored(source, ["positions", args], TypeAdapter(int | None), lambda: source_max_positions(source, args))


def _stored(source: ModelSource, key: list[object], form: TypeAdapter[T], read: Callable[[], T]) -> T:
    """Return the stored result of `read`, or call `read` and store its result."""
    if source.family == "custom":  # the name of a user's own model does not identify its code
        return read()
    path = Path(source.path) if source.path else None
    content = path and (path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8", errors="replace")
    file = result_file("facts", [asdict(source), content, *key])
    try:
        return shaped(read_json(file, object), form)
    except (OSError, Unreadable):  # never written, or truncated
        result = read()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, form.dump_python(result, mode="json"))
    return result
