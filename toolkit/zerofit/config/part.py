"""Refuses combinations that adapters or frozen weights do not support, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping

from zerofit.check.dotted import get
from zerofit.features.zero import features_on
from zerofit.spec.errors import Problems
from zerofit.spec.run import Run, flag
from zerofit.spec.run_folder import Layout

LORA_FIELDS = ("lora_alpha", "lora_dropout", "lora_targets", "lora_init")


def part_flag(run: Run) -> str | None:
    """Return the flag by which the run trains only a part of the model, or None."""
    partial = run.partial
    return partial and ("--lora" if partial.lora else "--train" if partial.train else "--freeze")


def check_part(run: Run, layout: Layout, config: Mapping[str, object], problems: Problems) -> None:
    """Check that adapters, frozen weights and the layout can be combined."""
    fields = type(run).model_fields
    of_lora = [name for name in (*LORA_FIELDS, "dora", "rslora") if getattr(run, name) != fields[name].default]
    if run.lora is None and of_lora:
        named = ", ".join(map(flag, of_lora))
        problems.add("conflict", f"{named} without --lora", "give --lora RANK, or leave it out", flag(of_lora[0]))
    _check_quantized(run, layout, config, problems)
    partial, asked = run.partial, part_flag(run)
    if partial is None or asked is None:
        return
    if partial.lora and (partial.train or partial.freeze):
        message = "--lora freezes the model, so --train and --freeze cannot be combined with it"
        problems.add("conflict", message, "give --lora, or patterns", "--train" if partial.train else "--freeze")
    if layout.tp > 1:
        why = "DeepSpeed's AutoTP replaces the layers that have adapters, and silently drops the adapters"
        if not partial.lora:
            why = "DeepSpeed's AutoTP rebuilds the layers that it splits, and trains all of them"
        hint = "leave --tensor-parallel at 1; ZeRO-3 partitions frozen weights over all ranks"
        problems.add("layout", f"{asked} with --tensor-parallel {layout.tp}: {why} (auto_tp.py:1079)", hint, asked)
    if layout.ep > 1:
        message = f"{asked} with --expert-parallel {layout.ep} is not supported: it was not verified against training "
        message += "on one device"
        problems.add("layout", message, "leave --expert-parallel at 1", asked)
    if run.mlp_chunk and run.lora_dropout:
        message = f"--lora-dropout {run.lora_dropout} with --mlp-chunk: recomputation would use another dropout mask"
        problems.add("conflict", message, "leave one of them out", "--lora-dropout")
    apart = [feature.path for feature in features_on(config) if not feature.partial]
    for path in apart + ["expert_parallel.enabled"] * bool(get(config, "expert_parallel.enabled")):
        message = f"{asked} with {path} is not supported: it was not verified against training on one device"
        problems.add("layout", message, "remove the key", path)


def _check_quantized(run: Run, layout: Layout, config: Mapping[str, object], problems: Problems) -> None:
    """Check quantized weights: they need adapters, and layouts that keep their bytes unchanged."""
    if run.double_quant and run.quantize != "nf4":
        message, hint = "--double-quant without --quantize nf4", "add --quantize nf4, or leave --double-quant out"
        problems.add("conflict", message, hint, "--double-quant")
    if run.quantize is None:
        return
    asked = f"--quantize {run.quantize}"
    if run.lora is None:
        message = f"{asked} without --lora: quantized weights have no gradient"
        problems.add("conflict", message, "add --lora RANK to train adapters", "--quantize")
    if run.quantize == "int8" and layout.zero_stage == 3:
        message = f"{asked} at ZeRO stage 3: bitsandbytes' Linear8bitLt keeps a second reference to the full weight"
        message += " (nn/modules.py, init_8bit_state), which is never freed"
        problems.add("layout", message, "use nf4, or --ds-config zero2", "--quantize")
    if get(config, "zero_optimization.offload_param.device") == "nvme":
        message = f"{asked} with offload_param on NVMe: DeepSpeed reads into buffers of the training precision"
        message += " (swap_tensor/partitioned_param_swapper.py), but quantized weights are bytes"
        problems.add("layout", message, "use --ds-config zero3_offload, which keeps them in host memory", "--quantize")
    if run.quantize == "int8" and run.dora:
        message = f"{asked} with --dora: peft computes weight norms when Linear8bitLt has no scales yet"
        problems.add("conflict", message, "use --quantize nf4, or leave --dora out", "--dora")
    if run.quantize == "nf4" and run.dora and layout.zero_stage == 3:
        message = f"{asked} with --dora at ZeRO stage 3: peft needs the norm of full weights, but these are partitioned"
        problems.add("layout", message, "use --ds-config zero2, or leave --dora out", "--dora")
    if run.compile:
        message = f"{asked} with --compile is not supported: it was not verified against training on one device"
        problems.add("layout", message, "leave --compile out", "--compile")
