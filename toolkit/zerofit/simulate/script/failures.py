"""Explain why a script ended before it trained.

How the script would end on the real machine is unknown.
"""

from __future__ import annotations

import dis
import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor

from zerofit.simulate.endings import EXITED, first_lines, lacks_memory, out_of_memory, shown_path
from zerofit.simulate.ops.tracker import is_own
from zerofit.simulate.script import files, phases, tracker
from zerofit.simulate.script.command import ScriptTarget
from zerofit.simulate.script.phases import ScriptPhases
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.spec.errors import Problem, UserError

_ON_FAKES = ScriptTracker._on_fakes.__name__
_FEW = 100  # items of a list that are searched: a data set in memory has millions
_SIMULATE = str(Path(__file__).resolve().parents[1]) + os.sep
_FAKES = str(Path(torch.__file__).parent / "_subclasses")
_NAMES = re.compile(r"simgpu|privateuse|fake ?tensor|fake_tensor|\bmeta (device|tensor)|device \"?meta", re.IGNORECASE)
_TYPES = re.compile(r"\bsimgpu(\w+)Type\b")  # as autograd writes the type of a tensor
_SIGNATURE = re.compile(r"^(\w+)[\w.<>]*\(\) (got|takes|missing)")  # of Python's TypeError: the function's name
RETRY = "run the command without zerofit to see whether it ends the same way"


# Whose error is it? In this order:
#   1. files missing from the hub's cache, too little memory here, a call of the GPU's driver: a problem of its own;
#   2. no fake tensor and no object of this package is involved: the script's own error, with its traceback;
#   3. otherwise the simulation may have caused it: the message names the op, the module and the line.
def failure(target: ScriptTarget, meter: ScriptTracker, error: BaseException) -> Problem:
    """Return the problem that ended a script.

    It is the script's own error with a traceback, or something that cannot be simulated.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if is_own(f.filename)] or frames
    where = f"{os.path.relpath(own[-1].filename)}:{own[-1].lineno}"
    missing = _missing_from_hub(error)
    if missing:
        message = f"the configuration of {missing} is not in the cache"
        hint = f"hf download {missing} --include 'config.json' 'tokenizer*' (weights are not needed)"
        return Problem(kind="not-in-cache", message=message, hint=hint, where=where)
    if lacks_memory(error):
        return replace(out_of_memory(), where=where)
    if isinstance(error, torch.AcceleratorError):
        message = f"{os.path.relpath(frames[-1].filename)}:{frames[-1].lineno} calls the GPU's driver, which is missing"
        hint = "zerofit cannot simulate kernels outside of torch's ops: if possible, turn this kernel off in the script"
        return Problem(kind="not-simulated", message=message, hint=hint, where=where)
    if meter.unknown_objects and isinstance(error, (TypeError, AttributeError)) and "NoneType" in str(error):
        message = f"{meter.unknown_objects}, but only one rank is simulated"
        hint = "simulate the rank that sends them (--rank), or let each rank make its own"
        return Problem(kind="not-simulated", message=message, hint=hint, where=where)
    if not _involves_stand_ins(error) or _is_plain_bug(error, meter):
        shown = traceback.TracebackException(type(error), error, _from_script(error))
        shown.stack = traceback.StackSummary.from_list([f for f in shown.stack if not f.filename.startswith(_SIMULATE)])
        text = "".join(shown.format())
        hint = RETRY
        if isinstance(error, ModuleNotFoundError):
            hint = f"the script runs with the packages of {sys.executable}: install the module there"
        said = ": ".join(filter(None, (type(error).__name__, first_lines(error))))
        if (assumed := _assumed(meter)) and isinstance(error, (ValueError, RuntimeError, AssertionError)):
            message = f"{target.command.script} fails, but zerofit had assumed values before: {said}"
            hint = f"only a GPU computes these values: {assumed}"
            return Problem(kind="not-simulated", message=message, hint=hint, where=where)
        message = f"this is the script's error: {said}\n{text.rstrip()}"
        return Problem(kind="script", message=message, hint=hint, where=where)
    message, hint = _not_simulated(target, meter, error)
    return Problem(kind="not-simulated", message=message, hint=hint, where=where)


def _not_simulated(target: ScriptTarget, meter: ScriptTracker, error: BaseException) -> tuple[str, str]:
    op, module = meter.last
    inside = f"module {module}" if module else "code outside of the model"
    last = traceback.extract_tb(error.__traceback__)[-1]
    first = _TYPES.sub(r"torch.cuda.\1Tensor", first_lines(error))
    first = first or f"{last.line} ({shown_path(last.filename)}:{last.lineno})"
    hint = "train it for a step instead, or rewrite it without reading the value (torch.where, masks)"
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"{op} in {inside}: the shape of the output depends on values that only a GPU computes", hint
    if meter.without_rule and isinstance(error, RuntimeError):
        hint = "add a shape rule with torch.library.register_fake if the op is yours; otherwise use another op"
        return f"{meter.without_rule} in {inside} has no shape rule, so its output is unknown", hint
    in_op = any(f.name == _ON_FAKES for f in traceback.extract_tb(error.__traceback__))
    place = f"{op} in {inside}" if in_op else inside
    if _is_of_zerofit(error):
        raised = f"{type(error).__name__} in {shown_path(last.filename)}:{last.lineno}"
        hint = "this is a limit of the simulation: please report it, with the command"
        return f"zerofit cannot simulate this: {place} raised {raised}: {first}", hint
    hint = "it may be the script's own error: the simulation checks shapes and types as the real machine does"
    if assumed := _assumed(meter):
        hint = f"only a GPU computes these values: {assumed}"
    place = place if in_op else f"{shown_path(last.filename)}:{last.lineno} in {inside}"
    return f"{target.command.script} fails at {place}: {type(error).__name__}: {first}", hint


def _assumed(meter: ScriptTracker) -> str:
    """Return the notes on sizes and arrays that the simulation made up; "" without any."""
    # Other notes that make the figures inexact are about memory only. Most scripts read a loss, so it does not count.
    sizes = {note for note in meter.inexact if "assumed" in note}
    return "; ".join(sorted(sizes.union(note for note in meter.notes if "these are zeros" in note)))


def _missing_from_hub(error: BaseException) -> str:
    """Return the repository that the hub's cache lacks; "" if the error has another cause."""
    if not isinstance(error, OSError):
        return ""
    # a local of `cached_files` in transformers/utils/hub.py: the error's text also contains other names
    named = [frame.f_locals.get("path_or_repo_id") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((str(name) for name in named if name), "")


def _from_script(error: BaseException) -> TracebackType | None:
    entry = error.__traceback__
    # the outer frames are `rank._run` and runpy, which started the script
    while entry is not None and entry.tb_frame.f_code.co_filename.startswith((_SIMULATE, "<frozen runpy")):
        entry = entry.tb_next
    return entry


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _entries(error: BaseException) -> list[TracebackType]:
    entry, found = _from_script(error), []
    while entry is not None:
        found.append(entry)
        entry = entry.tb_next
    return found


def _involves_stand_ins(error: BaseException) -> bool:
    """Return whether the error involves a fake tensor or a replacement object of this package."""
    # A frame that fails may have got a fake without an op on it, e.g. a C++ extension that reads its data.
    for one in _chain(error):
        entries = _entries(one)
        if entries and _raises_as_original(entries[-1], one):
            continue
        frames = [entry.tb_frame for entry in entries]
        on_fakes = any(f.f_code.co_name == _ON_FAKES and f.f_code.co_filename == tracker.__file__ for f in frames)
        in_files = frames and frames[-1].f_code.co_filename == files.__file__
        if on_fakes or _is_of_zerofit(one) or (frames and not in_files and _holds_fakes(frames[-1])):
            return True
    return False


def _is_of_zerofit(error: BaseException) -> bool:
    """Return whether the simulation caused the error.

    The simulation did if its code raised the error, or if the message names its code or the simulated device.
    """
    last, text = (_entries(error) or [None])[-1], _TYPES.sub("", str(error))
    called = _SIGNATURE.match(text) if isinstance(error, TypeError) else None
    file = last.tb_frame.f_code.co_filename if last else ""
    # torch's code for fakes raises RuntimeErrors for wrong shapes as the real op does; its other errors are limits
    return (
        (last is not None and file.startswith(_SIMULATE) and not _is_in_call(last))
        or (file.startswith(_FAKES) and not isinstance(error, RuntimeError))
        or bool(_NAMES.search(text))
        or (called is not None and _defined_here(called[1]))
        or _is_stand_in(getattr(error, "obj", None))  # whose attribute is missing
    )


def _is_in_call(entry: TracebackType) -> bool:
    """Return whether the error came from a C function that this frame called.

    Return False for a frame that neither replaces a function nor runs an op.
    """
    code = entry.tb_frame.f_code
    # e.g. the script opens a missing file: `open` of `files` is the last frame, but the error is the script's
    stands_for = "<locals>" in code.co_qualname or code.co_name == "__torch_dispatch__"
    stands_for = stands_for or code.co_filename in (files.__file__, phases.__file__)
    return stands_for and dis.opname[code.co_code[entry.tb_lasti]].startswith("CALL")


def _raises_as_original(entry: TracebackType, error: BaseException) -> bool:
    """Return whether a function of this package raised what the function that it replaces raises here.

    E.g. attention without an enabled kernel. Missing attributes and rules are other types.
    """
    code = entry.tb_frame.f_code
    raises = dis.opname[code.co_code[entry.tb_lasti]] == "RAISE_VARARGS"
    return raises and code.co_filename.startswith(_SIMULATE) and type(error) in (RuntimeError, ValueError, OSError)


def _defined_here(name: str) -> bool:
    modules = [module for key, module in sys.modules.items() if key.startswith("zerofit.simulate.")]
    return any(getattr(vars(m).get(name), "__module__", "").startswith("zerofit.simulate.") for m in modules)


def _holds_fakes(frame: FrameType) -> bool:
    values = list(frame.f_locals.values())
    for value in frame.f_locals.values():
        if isinstance(value, (list, tuple)):
            values += value[:_FEW]
        elif isinstance(value, dict) and len(value) <= _FEW:
            values += value.values()
    return any(map(_is_stand_in, values))


def _is_stand_in(value: object) -> bool:
    if isinstance(value, Tensor):
        return isinstance(getattr(value, "_local_tensor", value), FakeTensor)
    return type(value).__module__.startswith("zerofit.simulate.")


def _is_plain_bug(error: BaseException, meter: ScriptTracker) -> bool:
    """Return whether the script's own line uses a missing name, key or attribute.

    The result is False if the simulation has assumed a value before.
    """
    frames = traceback.extract_tb(error.__traceback__)
    # e.g. a dict whose key is a label that zerofit assumed
    made_up = any("assumed to be" in note for note in meter.notes)
    plain = isinstance(error, (NameError, LookupError, AttributeError)) and is_own(frames[-1].filename)
    return plain and not made_up and not _is_of_zerofit(error)


def no_training(target: ScriptTarget, how: str, phases: ScriptPhases, *, failed: bool) -> UserError:
    """Return the error for a script that ended without an optimizer step."""
    said, hint = f"{target.command.script} {how}", RETRY
    if failed:
        message = f"{said} before it trained"
    elif phases.engines:
        message, hint = f"{said} before its engine ran an optimizer step", "give the script data for at least one step"
    elif phases.micro_batches:
        message = f"{said} without a step of DeepSpeed or of an optimizer of torch"
        hint = "update the weights with an optimizer of torch.optim: zerofit counts its steps"
    else:
        message = f"{said} without creating a DeepSpeed engine or running an optimizer step"
        hint = "is DeepSpeed switched on? (Trainer: --deepspeed JSON, Accelerate: DeepSpeedPlugin or accelerate launch)"
    return UserError(Problem(kind=EXITED, message=message, hint=hint))
