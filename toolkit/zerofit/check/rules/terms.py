"""Terms and functions that the rules' conditions use.

A term is a value that DeepSpeed computes from several keys, and a function converts or tests one value.
A rule names a term without parentheses (`uses_bf16_optimizer`) and calls a function (`is_folder(value)`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from zerofit.check.subject import CheckSubject
from zerofit.features.optimizer import FLOAT_BYTES
from zerofit.features.optimizers import ENTRIES, of_json
from zerofit.features.zero import ZERO
from zerofit.spec.hybrid_engine import HYBRID_ENGINE_FAULTS, SHORT_MASK
from zerofit.spec.mesh import pipeline_parts
from zerofit.spec.overhead import HOST_RESERVE
from zerofit.spec.units import shown_bytes

ACCUMULATION = "data_types.grad_accum_dtype"
_DTYPES = {"fp32": ("float32", "float"), "bf16": ("bfloat16",), "fp16": ("float16", "half")}
DTYPES = {f"{torch}{word}": name for name, words in _DTYPES.items() for word in words for torch in ("", "torch.")}
DTYPES |= {name: name for name in _DTYPES}
TENSOR = "tensor_parallel"
BLOCKS = Path("/sys/class/block")


def precision(c: CheckSubject) -> str:
    """Return the precision that DeepSpeed trains in: "bf16", "fp16" or "fp32"."""
    return "bf16" if c.bf16 else "fp16" if c.fp16 else "fp32"


def precision_is_known(c: CheckSubject) -> bool:
    """Return whether the precision is known, that is, does not depend on an "auto"."""
    return all(c.get(f"{name}.enabled") != "auto" for name in ("bf16", "fp16"))


def has_other_parameter_type(c: CheckSubject) -> bool:
    """Return whether data_types.param_dtype differs from the enabled precision."""
    dtype = DTYPES.get(c.word("data_types.param_dtype") or "")
    return precision_is_known(c) and dtype not in (None, precision(c))


def accumulates_in_another_type(c: CheckSubject) -> bool:
    """Return whether ZeRO is off and gradients are summed in another type than the model has."""
    dtype = DTYPES.get(c.word(ACCUMULATION) or "")
    return c.stage == 0 and precision_is_known(c) and dtype not in (None, precision(c))


def scales_loss_dynamically(c: CheckSubject) -> bool:
    """Return whether fp16 is on and no fixed loss scale is set."""
    return c.fp16 and not c.number("fp16.loss_scale")


def masters_in_16_bits(c: CheckSubject) -> bool:
    """Return whether the master weights have 16 bits and need DeepSpeed's CPU Adam."""
    bf16 = c.on("bf16.bf16_master_weights_and_grads") and not c.on("bf16.bf16_optimizer_states")
    return bf16 or c.on("fp16.fp16_master_weights_and_grads")


def uses_bf16_optimizer(c: CheckSubject) -> bool:
    """Return whether DeepSpeed uses its BF16_Optimizer with ZeRO (runtime/engine.py:2305)."""
    in_fp32 = c.word(ACCUMULATION) in ("fp32", "float32")
    return c.bf16 and c.stage == 1 and in_fp32 and c.offload("optimizer") != "cpu"


def steps_in_one_copy(c: CheckSubject) -> bool:
    """Return whether the optimizer steps in one flat float32 copy per parameter group."""
    # This matters in 16-bit training without ZeRO.
    entry = of_json(c.optimizer)
    return entry is not None and entry.step.fused


def needs_full_gradients(c: CheckSubject) -> bool:
    """Return whether the optimizer needs the gradients of full matrices."""
    entry = of_json(c.optimizer)
    return entry is not None and entry.full_gradients


def full_gradient_optimizers(c: CheckSubject) -> str:
    """Return the names of all optimizers that need the gradients of full matrices."""
    return ", ".join(entry.json_type for entry in ENTRIES if entry.full_gradients)


def has_betas(c: CheckSubject) -> bool:
    """Return whether the optimizer has betas, which the scheduler OneCycle overwrites."""
    entry = of_json(c.optimizer)
    return entry is not None and entry.cycled_betas


def reduces_by_scatter(c: CheckSubject) -> bool:
    """Return whether ZeRO sums gradients with reduce-scatter."""
    return c.stage in (2, 3) and c.on(f"{ZERO}.reduce_scatter")


def clips(c: CheckSubject) -> bool:
    """Return whether gradients are clipped. DeepSpeed clips by default."""
    clipping = c.get("gradient_clipping")
    return clipping == "auto" or clipping is None or bool(c.number("gradient_clipping"))


def stage_is_set(c: CheckSubject) -> bool:
    """Return whether the file has a ZeRO stage."""
    return c.has(f"{ZERO}.stage") and c.get(f"{ZERO}.stage") != "auto"


def zero_section_of_2020(c: CheckSubject) -> dict[str, int]:
    """Return the section that `"zero_optimization": true` meant in 2020."""
    size = c.number("allgather_size")
    return {"stage": 1} | ({"allgather_bucket_size": int(size)} if size else {})


def scheduler_is_deepspeeds(c: CheckSubject) -> bool:
    """Return whether the scheduler is from DeepSpeed, not from torch."""
    return bool(c.schedulers.get(c.word("scheduler.type") or "", {}).get("own"))


def optimizer_is_wrapped(c: CheckSubject) -> bool:
    """Return whether the scheduler gets DeepSpeed's own optimizer object."""
    # That object is no torch Optimizer, which torch's schedulers need.
    return c.stage > 0 or c.fp16 or c.bf16


def nested_tensor_parallel(c: CheckSubject) -> int:
    """Return the tensor parallel degree that the JSON sets in the key for inference."""
    return c.degree(f"{TENSOR}.tp.tp_size") if c.has(f"{TENSOR}.tp") else c.degree(f"{TENSOR}.tensor_parallel.tp_size")


def dualpipev_parts(c: CheckSubject) -> int:
    """Return the number of parts that DualPipeV splits the layers into."""
    return pipeline_parts(c.pipeline, "dualpipev")


def refused_with_split_experts(c: CheckSubject) -> bool:
    """Return whether the JSON uses a feature that AutoEP together with AutoTP does not support."""
    offloads = c.section(f"{ZERO}.offload_optimizer") or c.section(f"{ZERO}.offload_param")
    return bool(c.deepcompile or c.pipeline > 1 or c.sequence_parallel > 1 or offloads)


def compile_passes(c: CheckSubject) -> list[str]:
    """Return the compiler passes of the compile section."""
    passes = c.get("compile.passes")
    return [str(name) for name in passes] if isinstance(passes, list) else []


def uses_lora(c: CheckSubject) -> bool:
    """Return whether the arguments of TRL, axolotl or LLaMA-Factory ask for adapters."""
    adapters = (c.argument("adapter"), c.argument("finetuning_type"))
    return c.argument("use_peft") is True or any(name in ("lora", "qlora") for name in adapters)


def hybrid_engine_fault(c: CheckSubject) -> str | None:
    """Return how the model fails in DeepSpeed's hybrid engine; None if it works or is unknown."""
    return HYBRID_ENGINE_FAULTS.get(c.facts.model_type or "") if c.facts else None


def hybrid_engine_stops(c: CheckSubject) -> bool:
    """Return whether the model's failure in DeepSpeed's hybrid engine is an error, and not wrong tokens."""
    return hybrid_engine_fault(c) != SHORT_MASK


def hybrid_engine_models(_: CheckSubject) -> str:
    """Return the model types that DeepSpeed's hybrid engine does not work with."""
    return ", ".join(HYBRID_ENGINE_FAULTS)


def reference_argument(c: CheckSubject) -> str | None:
    """Return the argument that makes a trainer load a reference model; None if there is none."""
    # With adapters, a trainer computes the reference with the trained model and its adapters switched off.
    if uses_lora(c) or c.argument("precompute_ref_log_probs") is True:
        return None
    # axolotl (src/axolotl/train.py, setup_reference_model)
    if c.argument("rl") in ("dpo", "ipo", "kto"):
        return "rl"
    # LLaMA-Factory (hparams/finetuning_args.py, use_ref_model)
    has_reference = c.argument("pref_loss") not in ("orpo", "simpo")
    return "stage" if c.argument("stage") == "kto" or (c.argument("stage") == "dpo" and has_reference) else None


def pads_to_maximum(c: CheckSubject) -> str | None:
    """Return the argument that needlessly pads each row to the maximum length, or None."""
    # Packing and compiling need fixed shapes.
    if c.argument("sample_packing") is True or c.argument("torch_compile") is True or c.deepcompile:
        return None
    return next((n for n in ("pad_to_max_length", "pad_to_sequence_len") if c.argument(n) is True), None)


def lost_below(c: CheckSubject) -> float:
    """Return the largest weight to which bf16 master weights can add Adam's update.

    Returns 0 if the master weights have 32 bits.
    """
    # Adam's update is about as large as the learning rate. bf16 has 8 significant bits, so a weight w is rounded to
    # multiples of at least w/256, and an update below half of such a multiple is lost.
    lr = c.number("optimizer.params.lr")
    in_16_bits = c.on("bf16.bf16_master_weights_and_grads") and c.on("bf16.bf16_optimizer_states")
    return 512 * lr if c.bf16 and in_16_bits and lr and c.optimizer in ("adam", "adamw") else 0.0


def gathered_experts(c: CheckSubject) -> str:
    """Return the classes whose experts ZeRO-3 gathers one by one; "" if none are known."""
    # ZeRO-3 gathers a leaf module's experts together.
    leaf = f"{ZERO}.leaf_module"
    classes = c.get(f"{leaf}.classes") or ()
    leaves = {classes} if isinstance(classes, str) else set(classes)
    if c.facts is None or c.get(f"{leaf}.names") or c.get(f"{leaf}.name_suffixes"):
        return ""
    return ", ".join(n for n in c.facts.expert_lists if not leaves & {n, n.rpartition(".")[2]})


def offloaded_bytes(c: CheckSubject) -> int:
    """Return the least host memory for offloaded states and weights, in bytes over all nodes.

    Returns 0 if it is unknown.
    """
    if c.facts is None or masters_in_16_bits(c) or not precision_is_known(c):
        return 0
    entry, share = of_json(c.optimizer), c.number(f"{ZERO}.offload_optimizer.ratio")
    states = weights = 0
    if entry is not None and c.stage > 0 and c.offload("optimizer") == "cpu":
        # float32 master weights, and for example Adam's two moments
        states = c.facts.trained_parameters * (FLOAT_BYTES + entry.states.least_bytes)
    if c.stage == 3 and c.offload("param") == "cpu":
        weights = c.facts.weight_bytes(precision(c))
    return int(states * (1 if share is None else share)) + weights


def exceeds_host(c: CheckSubject) -> bool:
    """Return whether the offloaded states and weights need more host memory than the nodes have."""
    return c.host_bytes is not None and offloaded_bytes(c) > c.host_bytes * (1 - HOST_RESERVE)


def is_installed(package: str) -> bool:
    """Return whether this Python can import a package."""
    return importlib.util.find_spec(package) is not None


def is_folder(path: str) -> bool:
    """Return whether a path is a folder on this machine."""
    return Path(path).is_dir()


def device_of(path: str) -> str | None:
    """Return the device of the file system that contains `path`; None if it is not known."""
    folder = Path(path).resolve()
    # Without `all`, psutil leaves out file systems without a device of their own, such as a container's overlay.
    mounts = {Path(p.mountpoint): p.device for p in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (folder, *folder.parents) if parent in mounts), None)


def is_nvme(path: str) -> bool:
    """Return whether a folder's file system is on an NVMe device, according to the mount table."""
    device = device_of(path)
    # The mount table names a logical volume by a link, /dev/mapper/NAME. The kernel names it dm-N.
    return device is not None and any(name.startswith("nvme") for name in _devices_below(Path(device).resolve().name))


def _devices_below(name: str) -> Iterator[str]:
    """Yield a block device, and the partitions or disks of a RAID, a logical or an encrypted volume."""
    yield name
    for lower in (BLOCKS / name / "slaves").glob("*"):
        yield from _devices_below(lower.name)


FUNCTIONS: dict[str, Callable[..., object]] = {
    function.__name__: function
    for function in (is_installed, is_folder, device_of, is_nvme, shown_bytes, format, int, len, min)
}
# all other functions of this module
TERMS: dict[str, Callable[[CheckSubject], object]] = {
    name: term
    for name, term in list(vars().items())
    if getattr(term, "__module__", "") == __name__ and not name.startswith("_") and name not in FUNCTIONS
}
