"""Effects of a DeepSpeed JSON: which keys take effect, which are ignored and why, and which defaults apply."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from zerofit.check.catalog import catalog, documented
from zerofit.check.document import Document
from zerofit.check.dotted import get, leaves
from zerofit.check.finding import Finding
from zerofit.check.settled import Settled, settle
from zerofit.check.subject import ZERO, CheckSubject, TargetHardware
from zerofit.features.optimizers import ENTRIES

OPTIMIZER, PARAM = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"

READ_WHEN_OFF = (
    "comms_logger",
    "data_efficiency",
)  # `enabled: false` does not switch them off

# findings about keys that DeepSpeed does not use
IGNORED = frozenset(
    {
        "unknown-key",
        "own-key",
        "key-stage",
        "feature-stage",
        "never-read",
        "offload-param-stage",
        "offload-without-zero",
        "super-offload-stage",
        "overflow-check-ignored",
        "adamw-mode",
        "optimizer-legacy-fusion",
        "compile-passes",
        "deepcompile-stage",
        "activations-host",
        "activations-partition",
        "aio-unused",
        "data-parallel-alone",
        "tensor-parallel-nested",
        "contiguous-gradients",
    }
)


@dataclass(frozen=True, kw_only=True)
class KeyRow:
    """One key: its value and its effect."""

    path: str
    value: Any
    status: Literal["takes effect", "ignored", "wrong", "auto", "default"]
    text: str

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return asdict(self)


def _always(c: CheckSubject) -> bool:
    return True


_FULL = ", ".join(entry.json_type for entry in ENTRIES if entry.full_gradients)
# surprising defaults of DeepSpeed 0.19.8, and when they matter
DEFAULTS: tuple[tuple[str, Callable[[CheckSubject], object], str], ...] = (
    (f"{ZERO}.stage", _always, "no ZeRO: every rank has all states"),
    ("gradient_clipping", _always, "gradients are clipped to this norm; 0 switches it off (0 in releases before 2026)"),
    ("gradient_accumulation_steps", _always, "1, or computed from the other two batch sizes"),
    ("steps_per_print", _always, "nothing is printed (every 10 steps in older releases)"),
    (
        f"{ZERO}.reduce_bucket_size",
        lambda c: c.stage > 0,
        "elements; allocated in full, twice with overlap_comm",
    ),
    (f"{ZERO}.allgather_bucket_size", lambda c: c.stage in (1, 2), "unused if torch gathers into one tensor"),
    (f"{ZERO}.overlap_comm", lambda c: c.stage > 0, "true at stage 3, false at 1 and 2"),
    (f"{ZERO}.contiguous_gradients", lambda c: c.stage > 0, "gradients are copied into one buffer"),
    (f"{ZERO}.reduce_scatter", lambda c: c.stage > 1, f"not with {_FULL} at stage 3 or gradient predivision"),
    (f"{ZERO}.sub_group_size", lambda c: c.stage == 3, "elements per optimizer update"),
    (f"{ZERO}.stage3_prefetch_bucket_size", lambda c: c.stage == 3, "elements gathered ahead of use"),
    (f"{ZERO}.stage3_param_persistence_threshold", lambda c: c.stage == 3, "smaller parameters are never partitioned"),
    (f"{ZERO}.stage3_max_live_parameters", lambda c: c.stage == 3, "smaller models are never released"),
    (
        f"{ZERO}.stage3_max_reuse_distance",
        lambda c: c.stage == 3,
        "parameters used again this soon stay gathered",
    ),
    (
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        lambda c: c.stage == 3,
        "save_16bit_model writes nothing (zerofit gathers the weights itself)",
    ),
    (f"{OPTIMIZER}.pin_memory", lambda c: c.offload("optimizer"), "page-locked (false in older releases)"),
    (f"{PARAM}.pin_memory", lambda c: c.offload("param"), "page-locked (false in older releases)"),
    ("fp16.loss_scale", lambda c: c.fp16, "dynamic loss scaling"),
    ("fp16.initial_scale_power", lambda c: c.fp16, "the scale starts at two to this power"),
    ("bf16.check_grad_overflow", lambda c: c.bf16, "steps with an infinite gradient are skipped"),
    ("data_types.grad_accum_dtype", lambda c: c.bf16 or c.fp16, "gradients are summed in the model's own type"),
    ("communication_data_type", lambda c: c.bf16 or c.fp16, "gradients are sent in the model's own type"),
    (
        "optimizer.params.adam_w_mode",
        lambda c: c.optimizer == "adam",
        "true: weight decay is decoupled from the gradient",
    ),
    ("zero_allow_untested_optimizer", lambda c: c.stage > 0 and c.has("optimizer.type"), "only listed optimizers run"),
    (
        "wall_clock_breakdown",
        lambda c: c.on("flops_profiler.enabled"),
        "true: the flops profiler switches the timers on for the whole run",
    ),
    ("timers.throughput.synchronized", _always, "the device is synchronised to time the printed steps"),
)


def explain(document: Document, findings: Sequence[Finding], setting: TargetHardware) -> list[KeyRow]:
    """Return a row for each key of the JSON, in its order, then for the defaults that matter."""
    known = catalog()
    settled = settle(document.config, known, setting)
    subject = settled.subject
    verdicts = {f.path: f for f in reversed(findings)}
    rows = [_row(path, value, verdicts, document.config, settled) for path, value in leaves(document.config)]
    for path, matters, text in DEFAULTS:
        if matters(subject) and not subject.has(path):
            rows.append(KeyRow(path=path, value=known.default(path), status="default", text=text))
    return rows


def _row(path: str, value: Any, verdicts: Mapping[str, Finding], config: Mapping[str, Any], settled: Settled) -> KeyRow:
    parts = path.split(".")
    above = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    finding = next((verdicts[p] for p in above if p in verdicts and (p == path or verdicts[p].code in IGNORED)), None)
    if finding is not None and finding.code in IGNORED:
        return KeyRow(path=path, value=value, status="ignored", text=finding.why)
    if finding is not None and finding.severity == "error":
        return KeyRow(path=path, value=value, status="wrong", text=finding.message)
    unread = next((text for p in reversed(above) if (text := _unread(p, path, config))), None)
    if unread:
        return KeyRow(path=path, value=value, status="ignored", text=unread)
    if value == "auto":
        by = settled.filled.get(path)
        text = f"{json.dumps(by.value)}: {by.by}" if by else "filled in by zerofit or Hugging Face"
        return KeyRow(path=path, value=value, status="auto", text=text)
    node = catalog().node(path) or {}
    return KeyRow(path=path, value=value, status="takes effect", text=node.get("description", ""))


def _unread(section: str, path: str, config: Mapping[str, Any]) -> str | None:
    """Return why DeepSpeed ignores a key: its section is off, or also exists under its documented name."""
    known = catalog()
    parent, _, key = section.rpartition(".")
    prefix = f"{parent}." if parent else ""
    name = documented(prefix, key, known.deprecated)
    if name != key and get(config, f"{prefix}{name}", None) is not None:
        return f"{prefix}{name} is there too and is used instead"
    switch = f"{section}.enabled"
    if section == path or path == switch or known.node(switch) is None or section in READ_WHEN_OFF:
        return None
    on = get(config, switch, known.default(switch))
    return None if on in (True, "auto") else f"{section} is not enabled"


def shown(value: Any) -> str:
    """Return a value as at most 24 characters."""
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
