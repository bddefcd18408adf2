"""Read the attributes of a layout that options, a run or a DeepSpeed JSON fix."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict

from zerofit.check.document import of_data
from zerofit.check.dotted import drop, get
from zerofit.config.decide import precision_of, where
from zerofit.config.ds_json import read_for_run
from zerofit.features.checkpointing import Checkpointing
from zerofit.features.optimizers import OPTIMIZERS, PLANNED, Optimizer, has_weight_decay, run_name
from zerofit.features.zero import GRADIENTS_IN_FP32, ZERO, features_on
from zerofit.plan.layout import KEYS, OFFLOADS, OPTIONS, SIZES, UNSET, Offload, steps_early
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import AttentionKernel
from zerofit.spec.partial_training import Bits, LoraInit
from zerofit.spec.profile import NOTHING_SAVED, Savings
from zerofit.spec.run import DS_KEYS, PipelineSchedule, Precision

STAGES = (0, 1, 2, 3)
DEGREES = ("tp", "pp", "sp", "ep")


class LayoutPins(TypedDict, total=False):
    """Values that a plan keeps fixed. Other values are searched."""

    model_args: dict[str, Any]
    task: Literal["classify", "tag", "seq2seq"] | None
    seq_len: int | None
    precision: Precision | None
    optimizer: Optimizer | None
    weight_decay: float | None
    global_batch: int | None
    micro_batch: int | None
    micro_batch_by_rank: str | None
    gradient_accumulation_steps: int | None
    activation_checkpointing: Checkpointing | None
    ema: float | None
    tensor_parallel: int | None
    pipeline: int | Literal["auto"] | None
    pipeline_schedule: PipelineSchedule | None
    sequence_parallel: int | None
    expert_parallel: int | None
    zero_stage: Literal[0, 1, 2, 3] | None
    offload: Offload | None  # optimizer states
    offload_param: Offload | None
    overlap_comm: bool | None
    pin_memory: bool | None  # offloaded states and parameters in page-locked host memory
    attn_implementation: AttentionKernel | None
    compile: bool | None
    liger_kernel: bool | None
    tensor_sequence_parallel: bool | None
    cpu_threads: int | None  # OMP_NUM_THREADS of each rank
    activation_offload: bool | None
    loss_chunk: int | None
    mlp_chunk: int | None
    lora: int | None
    lora_alpha: int | None
    lora_dropout: float
    lora_targets: str
    lora_init: LoraInit
    dora: bool
    rslora: bool
    train: Sequence[str]
    freeze: Sequence[str]
    quantize: Bits | None
    double_quant: bool
    ds_config: str | dict[str, Any] | None  # a file, a bundled name, or the content


# An attribute of a layout can be fixed in three places. An option of `plan` wins over a field of the run, and that wins
# over the DeepSpeed JSON. "auto" fixes nothing. An attribute that no place fixes is searched.
def written_attributes(pins: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a layout that options, fields of a run or a DeepSpeed JSON contain."""
    written = {attribute: get(config, key, "auto") for attribute, key in KEYS.items()}
    # DeepSpeed reads the degree only if expert parallelism is enabled.
    if get(config, "expert_parallel.enabled") is not True:
        written.pop("ep")
    written |= {attribute: pins[option] for attribute, option in OPTIONS.items() if pins.get(option) is not None}
    if written.get("optimizer") not in ("auto", None):
        name = run_name(str(written["optimizer"]))
        written["optimizer"] = name if name in PLANNED else "adamw"  # most other optimizers have the same states
    if savings_of(pins, config).activation_offload:  # only checkpoints are offloaded
        written["checkpointing"] = True
    if steps_early(config):
        written["steps_early"] = True
    if not (has_weight_decay(config) if pins.get("weight_decay") is None else pins["weight_decay"]):
        written["has_weight_decay"] = False
    written = {attribute: value for attribute, value in written.items() if value not in ("auto", None)}
    # JSON writes large sizes as floats, like 5e8, and 0 is degree 1 in DeepSpeed
    written = {attribute: int(value) if isinstance(value, float) else value for attribute, value in written.items()}
    written |= {degree: max(1, written[degree]) for degree in DEGREES if degree in written}
    return written | ({"ema": pins["ema"]} if pins.get("ema") else {})


def savings_of(given: Mapping[str, object], config: Mapping[str, object]) -> Savings:
    """Return the memory savings of a run's fields and a DeepSpeed JSON, without checkpointing."""
    savings = {name: given[name] for name in Savings._fields if given.get(name)}
    if get(config, "activation_checkpointing.cpu_checkpointing") is True:
        savings["activation_offload"] = True
    return NOTHING_SAVED._replace(**savings)


def read_config(ds_config: str | Mapping[str, object] | None) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a file, bundled name or dictionary; {} for None.

    Keys have their documented names. Raises UserError with unknown and removed keys and with wrong values.
    """
    if ds_config is None:
        return {}
    # Only for a JSON: these imports are a tenth of the time of a plan from a shipped profile.
    from zerofit.check.aliases import documented_config
    from zerofit.check.catalog import catalog
    from zerofit.check.keys import keys
    from zerofit.check.subject import TargetHardware

    document = read_for_run(ds_config) if isinstance(ds_config, str) else of_data(dict(ds_config))
    name, problems = ds_config if isinstance(ds_config, str) else "--ds-config", Problems()
    # Only faults of single keys are certain. A rule about several keys may depend on a value that the plan searches.
    for fault in keys(document.config, catalog(), TargetHardware()):
        if fault.severity == "error" and fault.code != "auto-unfilled":  # "auto" fixes nothing
            position = document.place(fault.path)
            located = replace(fault, line=position.line, column=position.column)
            problems.add(fault.code, f"{fault.message}. {fault.why}", fault.fix, where(located, document, name))
    problems.raise_if_any()
    return documented_config(document.config)


def fixed_attributes(pins: Mapping[str, object], config: Mapping[str, object]) -> dict[str, Any]:
    """Return the attributes of all layouts of a plan that pins and a DeepSpeed JSON fix.

    Sizes are as in training: zerofit fills in "auto", and missing keys get DeepSpeed's defaults.
    """
    fixed = {}
    if ZERO in config:  # what this JSON does not offload stays on the device
        fixed = {"offload_optimizer": "none", "offload_param": "none"}
        fixed |= {size: get(config, KEYS[size], UNSET) for size in SIZES}
    fixed |= written_attributes(pins, config)
    if fixed.get("zero_stage") == 0:
        fixed.pop("overlap", None)  # the value has no effect at stage 0
    return fixed


def without_pinned(pins: Mapping[str, object], config: Mapping[str, object]) -> dict[str, Any]:
    """Return the DeepSpeed JSON without the keys that pins replace."""
    kept = copy.deepcopy(dict(config))
    replaced = [(OPTIONS.get(attribute, ""), key) for attribute, key in KEYS.items() if attribute != "optimizer"]
    replaced += [*DS_KEYS.items(), ("precision", "bf16.enabled"), ("precision", "fp16.enabled")]
    for option, key in replaced:
        if pins.get(option) is not None:
            drop(kept, key.removesuffix(".device") if pins[option] == "none" else key)
    named = run_name(str(get(config, "optimizer.type", "auto")))
    if pins.get("optimizer") is not None and named not in ("auto", pins["optimizer"]):
        kept.pop("optimizer", None)  # the parameters of another optimizer have another meaning
    return kept


def batch_and_precision(pins: Mapping[str, object], config: Mapping[str, object]) -> dict[str, Any]:
    """Return the global batch and the precision; values that are not pinned are the JSON's."""
    of_json = {"global_batch": get(config, "train_batch_size", "auto"), "precision": precision_of(None, config)[0]}
    of_json = {name: value for name, value in of_json.items() if value != "auto"}
    return of_json | {name: pins[name] for name in ("global_batch", "precision") if pins.get(name) is not None}


def uncounted(pins: Mapping[str, object], config: Mapping[str, object]) -> list[str]:
    """Return the keys of the DeepSpeed JSON that affect this run but not its forecasts."""
    stage = fixed_attributes(pins, config).get("zero_stage", 3)
    precision = batch_and_precision(pins, config).get("precision")
    return [
        feature.path
        for feature in features_on(config)
        if not (feature.counted or (feature.ignored_below_3 and stage < 3))
        and not (feature is GRADIENTS_IN_FP32 and precision == "fp32")
    ]


def refuse_impossible(
    pins: Mapping[str, Any], fixed: Mapping[str, Any], config: Mapping[str, Any], problems: Problems
) -> None:
    """Add problems for invalid pins, unsupported combinations, and a JSON without a forecast."""
    for unforecast in filter(None, (feature.not_planned for feature in features_on(config))):
        problems.add("combination", unforecast.message, unforecast.hint, "--ds-config")
    for name, allowed in (("zero_stage", STAGES), ("offload", OFFLOADS), ("offload_param", OFFLOADS)):
        if pins.get(name) is not None and pins[name] not in allowed:
            flag, words = "--" + name.replace("_", "-"), ", ".join(map(str, allowed))
            problems.add("bad-value", f"{flag}: got {pins[name]!r}", f"use one of {words}", flag)
    if (threads := pins.get("cpu_threads")) is not None and threads < 1:
        problems.add("bad-value", f"--cpu-threads: got {threads}", "use 1 or more", "--cpu-threads")
    stage, optimizer = fixed.get("zero_stage"), fixed.get("offload_optimizer", "none")
    params = fixed.get("offload_param", "none")
    if stage in (1, 2, 3) and stage > 1 and fixed.get("pp", 1) > 1:
        message = f"--pipeline with ZeRO stage {stage}: DeepSpeed's pipeline supports stages 0 and 1"
        problems.add("combination", message, "remove one of them", "--pipeline, --zero-stage")
    if stage == 0 and fixed.get("ep", 1) > 1:
        message = "--expert-parallel at ZeRO stage 0: DeepSpeed averages the gradient norm over different experts, "
        message += "so the norm is too small and clipping starts too late"
        problems.add("combination", message, "use --zero-stage 1, 2 or 3", "--expert-parallel, --zero-stage")
    if stage in (0, 1, 2) and (params != "none" or optimizer == "nvme"):
        message = f"offloading parameters or offloading to disk needs ZeRO stage 3, but this is stage {stage}"
        problems.add("combination", message, "use --zero-stage 3, or another --offload", "--zero-stage, --offload")
    elif stage in (0, 1) and optimizer != "none":
        message = f"offloading the optimizer needs ZeRO stage 2 or 3, but this is stage {stage}"
        problems.add("combination", message, "use --zero-stage 2 or 3, or --offload none", "--zero-stage, --offload")
    if pins.get("activation_checkpointing") == "selective" and savings_of(pins, config).activation_offload:
        message, where = "selective checkpointing with --activation-offload is not supported", "--activation-offload"
        problems.add("combination", message, "remove one of them", where)
    entry = OPTIMIZERS.get(fixed.get("optimizer", ""))
    if entry and entry.states.factored and stage:
        message = f"--optimizer {entry.name} needs full matrices (states per row and column); ZeRO {stage} splits them"
        problems.add("combination", message, "use --zero-stage 0", "--optimizer, --zero-stage")
    # Only a pinned optimizer can contradict. Otherwise the search offloads it together with the parameters.
    if params != "none" and optimizer == "none" and "offload_optimizer" in fixed:
        message = f"offloading parameters to {params} needs the optimizer offloaded too, but it stays on the device"
        problems.add("combination", message, "also offload the optimizer", "--offload, --offload-param")
