"""fp16, bf16, autocast, loss scaling, master weights, and the type in which gradients are summed."""

from __future__ import annotations

from zerofit.check.finding import Rule
from zerofit.check.subject import ZERO, CheckSubject
from zerofit.features.optimizers import of_json

# fp16's largest number is 65504: with a loss scale far above it, step after step overflows until the scale is lower
HIGH_SCALE_POWER = 24
BF16_MASTERS = "bf16.bf16_master_weights_and_grads"
FP16_MASTERS = "fp16.fp16_master_weights_and_grads"
ACCUMULATION = "data_types.grad_accum_dtype"


def _dynamic(c: CheckSubject) -> bool:
    return c.fp16 and not c.number("fp16.loss_scale")


def _at_most_zero(value: float | None) -> bool:
    return value is not None and value <= 0


def _masters(c: CheckSubject) -> bool:
    """Return whether the config has 16-bit master weights, which need DeepSpeed's CPU Adam."""
    bf16 = c.on(BF16_MASTERS) and not c.on("bf16.bf16_optimizer_states")
    return bf16 or c.on(FP16_MASTERS)


def _fused(c: CheckSubject) -> bool:
    entry = of_json(c.optimizer)
    return entry is not None and entry.step.fused


def bf16_optimizer(c: CheckSubject) -> bool:
    """Return whether DeepSpeed uses its BF16_Optimizer (runtime/engine.py:2305)."""
    return c.bf16 and c.stage == 1 and c.word(ACCUMULATION) in ("fp32", "float32")


def _mode(c: CheckSubject) -> str:
    return "bf16" if c.bf16 else "fp16" if c.fp16 else "fp32"


def _accumulates_otherwise(c: CheckSubject) -> bool:
    kind = c.word(ACCUMULATION)
    known = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
    settled = all(c.get(f"{name}.enabled") != "auto" for name in ("bf16", "fp16"))
    return c.stage == 0 and settled and kind in known and known[kind] != _mode(c)


PRECISION = (
    Rule(
        code="fp16-and-bf16",
        path="fp16.enabled",
        when=lambda c: c.fp16 and c.bf16,
        message="fp16.enabled and bf16.enabled are both true",
        why='DeepSpeed stops: "bfloat16 and fp16 modes cannot be simultaneously enabled"',
        fix="set one to false; prefer bf16, which needs no loss scaling, if the device supports it",
        source="runtime/config.py:511",
    ),
    Rule(
        code="fp16-device",
        path="fp16.enabled",
        when=lambda c: c.fp16 and not c.bf16 and "fp16" not in c.setting.precisions,
        message="fp16 on a device without fp16 arithmetic",
        why='DeepSpeed stops once the ranks run: "Type fp16 is not supported on your device."',
        fix="use bf16, or disable both",
        source="runtime/engine.py:2003",
    ),
    Rule(
        code="bf16-device",
        severity="warning",
        path="bf16.enabled",
        when=lambda c: c.bf16 and "bf16" not in c.setting.precisions,
        message="bf16 on a device without bf16 arithmetic",
        why='torch emulates it slowly, or DeepSpeed stops: "Type bf16 is not supported on your device."',
        fix="use fp16",
        source="runtime/engine.py:2006",
    ),
    Rule(
        code="bf16-without-zero",
        severity="warning",
        path="bf16.enabled",
        when=lambda c: c.bf16 and c.stage == 0 and c.pipeline == 1 and _fused(c),
        message="bf16 without ZeRO",
        why="DeepSpeed starts with an optimizer step on zero gradients, which counts as Adam's first: the first real "
        "steps are too small (zerofit undoes it)",
        fix="use ZeRO stage 1: it needs no more memory or time",
        source="runtime/fp16/unfused_optimizer.py:425",
    ),
    Rule(
        code="fp16-without-zero",
        severity="warning",
        path="fp16.enabled",
        when=lambda c: c.fp16 and not c.bf16 and c.stage == 0 and c.get(ZERO) is not True,  # True is stage 1
        message="fp16 without ZeRO",
        why="DeepSpeed does not scale the loss but divides the gradients by the scale: small gradients are lost, and "
        "they are 2^16 times too small for clipping (zerofit train scales the loss)",
        fix="use ZeRO stage 1: it needs no more memory or time",
        source="runtime/engine.py:3417",
    ),
    Rule(
        code="loss-scale-window",
        path="fp16.loss_scale_window",
        when=lambda c: _dynamic(c) and _at_most_zero(c.number("fp16.loss_scale_window")),
        message="fp16.loss_scale_window is {value}; allowed: a whole number from 1",
        why="DeepSpeed refuses it: the loss scale could never rise",
        fix="use 1000, or remove the key",
        source="runtime/precision_config.py:192",
    ),
    Rule(
        code="loss-scale-floor",
        path="fp16.min_loss_scale",
        when=lambda c: _dynamic(c) and _at_most_zero(c.number("fp16.min_loss_scale")),
        message="fp16.min_loss_scale is {value}; allowed: a whole number from 1",
        why="DeepSpeed refuses it: a loss scale of 0 makes every gradient zero",
        fix="use 1, or remove the key",
        source="runtime/precision_config.py:196",
    ),
    Rule(
        code="loss-scale-start",
        path="fp16.initial_scale_power",
        when=lambda c: (
            _dynamic(c)
            and 2.0 ** min(c.number("fp16.initial_scale_power") or 16, 1000) < (c.number("fp16.min_loss_scale") or 1)
        ),
        message=lambda c: (
            f"the loss scale starts at 2^{c.number('fp16.initial_scale_power') or 16}, below the minimum "
            f"fp16.min_loss_scale {c.number('fp16.min_loss_scale') or 1}"
        ),
        why="the first overflow raises the scale to the minimum, the next one ends the run",
        fix="use initial_scale_power 16 and min_loss_scale 1",
        source="runtime/fp16/loss_scaler.py:258",
    ),
    Rule(
        code="loss-scale-high",
        severity="warning",
        path="fp16.initial_scale_power",
        when=lambda c: _dynamic(c) and (c.number("fp16.initial_scale_power") or 0) > HIGH_SCALE_POWER,
        message="the loss scale starts at 2^{value}",
        why="fp16 ends at 65504: DeepSpeed halves the scale and skips a step until it fits",
        fix="use 16",
        source="runtime/fp16/loss_scaler.py:160",
    ),
    Rule(
        code="loss-scale-static",
        severity="warning",
        path="fp16.loss_scale",
        when=lambda c: (
            c.fp16
            and c.number("fp16.loss_scale")
            and any(c.has(f"fp16.{key}") for key in ("initial_scale_power", "loss_scale_window", "hysteresis"))
        ),
        message="a static loss scale of {value} together with settings of dynamic loss scaling",
        why="DeepSpeed scales by that number for the entire run and does not use the other settings",
        fix="set loss_scale to 0 for dynamic scaling, or remove the others",
        source="runtime/engine.py:2450",
    ),
    Rule(
        code="auto-cast-without-fp16",
        path="fp16.auto_cast",
        when=lambda c: c.on("fp16.auto_cast") and c.get("fp16.enabled") in (None, False),
        message="fp16.auto_cast is on while fp16 is off",
        why='DeepSpeed still casts the inputs to fp16 and fails: "mat1 and mat2 must have the same dtype"',
        fix="remove it, or enable fp16",
        source="runtime/engine.py:2957",
    ),
    Rule(
        code="master-weights-stage",
        path=BF16_MASTERS,
        when=lambda c: c.on(BF16_MASTERS) and c.stage == 0,
        message="bf16 master weights without ZeRO",
        why='DeepSpeed stops: "Bf16_master_weights_and_grads is only supported with ZeRO Stage 1, 2, or 3."',
        fix="use ZeRO stage 1 or higher",
        source="runtime/config.py:706",
    ),
    Rule(
        code="master-weights-stage",
        path=FP16_MASTERS,
        when=lambda c: c.on(FP16_MASTERS) and c.stage == 0,
        message="fp16 master weights without ZeRO",
        why='DeepSpeed stops: "Fp16_master_weights_and_grads is only supported with ZeRO Stage 1, 2, or 3."',
        fix="remove it: fp16 master weights lose small updates",
        source="runtime/config.py:702",
    ),
    Rule(
        code="optimizer-states-need-masters",
        path="bf16.bf16_optimizer_states",
        when=lambda c: c.on("bf16.bf16_optimizer_states") and not c.on(BF16_MASTERS),
        message="bf16.bf16_optimizer_states without bf16_master_weights_and_grads",
        why='DeepSpeed stops: "bf16_optimizer_states requires bf16_master_weights_and_grads to be enabled."',
        fix="set both",
        source="runtime/config.py:714",
    ),
    Rule(
        code="master-weights-both",
        path=FP16_MASTERS,
        when=lambda c: c.on(FP16_MASTERS) and c.on(BF16_MASTERS),
        message="master weights are set to both fp16 and bf16",
        why="DeepSpeed stops when it builds the optimizer: they exclude each other",
        fix="keep that of the enabled precision",
        source="runtime/base_optimizer.py:499",
    ),
    Rule(
        code="master-weights-need-offload",
        path=f"{ZERO}.offload_optimizer",
        when=lambda c: (
            c.stage > 0 and _masters(c) and not (c.offload("optimizer") and not c.on("optimizer.params.torch_adam"))
        ),
        message="16-bit master weights without optimizer offload",
        why='DeepSpeed stops when it builds the optimizer: "Master weights feature requires ZeRO-... Offload with '
        'DeepSpeedCPUAdam"',
        fix="for bf16 set bf16_optimizer_states too, or offload the optimizer to the CPU with DeepSpeed's Adam",
        source="runtime/zero/stage_1_and_2.py:332, stage3.py:300",
    ),
    Rule(
        code="master-weights-without-bf16",
        path=BF16_MASTERS,
        when=lambda c: c.on(BF16_MASTERS) and c.get("bf16.enabled") in (None, False),
        message="bf16 master weights while bf16 is off",
        why="DeepSpeed does not check bf16.enabled here and keeps 16-bit master weights of an fp32 model",
        fix="enable bf16",
        source="runtime/base_optimizer.py:523",
    ),
    Rule(
        code="overflow-check-ignored",
        severity="warning",
        path="bf16.check_grad_overflow",
        when=lambda c: c.off("bf16.check_grad_overflow") and (c.stage == 3 or bf16_optimizer(c)),
        message="bf16.check_grad_overflow false has no effect here",
        why="DeepSpeed always checks for overflow at stage 3 and at stage 1 with fp32 accumulation",
        source="runtime/zero/stage3.py:2816, runtime/bf16_optimizer.py",
    ),
    Rule(
        code="bf16-optimizer",
        severity="warning",
        path=ACCUMULATION,
        when=lambda c: bf16_optimizer(c) and c.get(f"{ZERO}.compute_grad_norm") is not False,
        message="bf16 at stage 1 with fp32 accumulation",
        why="DeepSpeed uses another optimizer class, which allocates fp32 gradients of the full model and uses no "
        "bucket sizes (measured once: 133 MB instead of 104 MB)",
        fix="use stage 2, which partitions the gradients",
        source="runtime/engine.py:2305, runtime/bf16_optimizer.py:191",
    ),
    Rule(
        code="accumulation-type",
        path=ACCUMULATION,
        when=_accumulates_otherwise,
        message="data_types.grad_accum_dtype {value} without ZeRO differs from the model's type",
        why='DeepSpeed stops: "unsupported mix of model_dtype and grad_accum_dtype"',
        fix="use ZeRO stage 1 or 2, or remove it",
        source="runtime/engine.py:2323",
    ),
    Rule(
        code="parameter-type",
        path="data_types.param_dtype",
        when=lambda c: (
            c.word("data_types.param_dtype") in ("fp16", "bf16", "fp32")
            and all(c.get(f"{name}.enabled") != "auto" for name in ("bf16", "fp16"))
            and c.word("data_types.param_dtype") != _mode(c)
        ),
        message=lambda c: f"data_types.param_dtype {{value}} while the enabled precision is {_mode(c)}",
        why='DeepSpeed stops: "data_types.param_dtype=... conflicts with the enabled precision mode"',
        fix="remove it: the enabled precision sets the type",
        source="runtime/engine.py:1827",
    ),
    Rule(
        code="autocast-and-precision",
        severity="warning",
        path="torch_autocast.enabled",
        when=lambda c: c.on("torch_autocast.enabled") and _mode(c) != "fp32",
        message=lambda c: f"torch_autocast and {_mode(c)} are both on",
        why="DeepSpeed applies both: it casts the parameters too, so autocast has no fp32 weights",
        fix="keep one",
        source="runtime/torch_autocast.py:111",
    ),
    Rule(
        code="autocast-type",
        severity="warning",
        path="torch_autocast.enabled",
        when=lambda c: c.on("torch_autocast.enabled") and c.get("torch_autocast.dtype") is None,
        message="torch_autocast is on without a dtype",
        why="torch uses the device's default (fp16 on CUDA), and DeepSpeed does not scale the loss for it",
        fix='set torch_autocast.dtype to "bfloat16" (or "float16")',
        source="runtime/config.py:194, runtime/torch_autocast.py:112",
    ),
    Rule(
        code="autocast-quantized",
        path="torch_autocast.enabled",
        when=lambda c: c.on("torch_autocast.enabled") and c.on(f"{ZERO}.zero_quantized_weights"),
        message="torch_autocast together with zero_quantized_weights",
        why='DeepSpeed stops: "Cannot enable both torch autocast and zero quantized weights"',
        fix="keep one",
        source="runtime/torch_autocast.py:32",
    ),
    Rule(
        code="hysteresis-without-zero",
        severity="warning",
        path="fp16",
        when=lambda c: (
            c.fp16
            and c.stage == 0
            and any(c.changed(f"fp16.{key}") for key in ("hysteresis", "consecutive_hysteresis"))
        ),
        message="fp16.hysteresis without ZeRO",
        why="DeepSpeed reads it only with ZeRO: here each overflow halves the loss scale",
        fix="use ZeRO stage 1, or remove it",
        source="runtime/fp16/loss_scaler.py:72-124, runtime/fp16/fused_optimizer.py:404",
    ),
    Rule(
        code="communication-type-sequence",
        severity="warning",
        path="communication_data_type",
        when=lambda c: (
            c.word("communication_data_type") is not None
            and c.sequence_parallel > 1
            and c.word("communication_data_type") != (c.word("seq_parallel_communication_data_type") or "fp32")
        ),
        message="communication_data_type {value} with sequence parallelism",
        why="DeepSpeed uses seq_parallel_communication_data_type instead (fp32 by default)",
        fix="set seq_parallel_communication_data_type",
        source="runtime/engine.py:2182, runtime/constants.py:236",
    ),
)
