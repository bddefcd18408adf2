"""Lion (Chen et al., 2023): the sign of one moment is the step."""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.features.optimizer import (
    UNSTEPPED_BYTES,
    JsonRule,
    LearningRates,
    OptimizerEntry,
    Refusal,
    States,
    StepCost,
    TrainingSetting,
)

BETAS = {"betas": [0.9, 0.99]}


def _refuses(setting: TrainingSetting) -> Iterator[Refusal]:
    if setting.ep > 1:
        yield Refusal(
            "lion with --expert-parallel is not supported: it was not verified against training on one device",
            "use another optimizer, or leave --expert-parallel at 1",
        )


LION = OptimizerEntry(
    name="lion",
    json_type="Lion",
    # the ops take the sign of 0 as +1 (cpu_lion_impl.cpp:51) or -1 (multi_tensor_lion.cu:84), not as 0
    docs="4 bytes per parameter. On CPUs and if offloaded, DeepSpeed allocates 8 and uses 4. ZeRO 0 to 3. Each "
    "step moves a weight by the learning rate even if its gradient is 0, as for embeddings of unused tokens.",
    # DeepSpeed chooses FusedLion, which has no op for CPUs
    cpu_class="deepspeed.ops.lion:DeepSpeedCPULion",
    device_op="FusedLionBuilder",
    host_op="CPULionBuilder",
    zero_tested=True,
    # a tenth of AdamW's rate with ten times its decay (Chen et al., 2023, section 5)
    rates=LearningRates(scratch=1e-4, pretrained=2e-6, adapters=2e-5, gan=2e-5),
    weight_decay=0.1,
    auto=BETAS,
    params=BETAS,  # DeepSpeed's default is Adam's: 0.999
    params_why="Lion's usual values (Chen et al., 2023)",
    # DeepSpeedCPULion also allocates a second moment, which nothing reads (ops/lion/cpu_lion.py:111)
    states=States(numbers=1, host_numbers=2),
    # both ops work in place: they read gradient, weight and moment, and write weight and moment
    step=StepCost(temporary=lambda numel, gpu: 0, late=lambda gpu: 0, moved_bytes=UNSTEPPED_BYTES + 20),
    refuses=_refuses,
    rules=(
        JsonRule(
            code="needs-cuda",
            path="optimizer.type",
            when="optimizer == 'lion' and on_cpu and offload('optimizer') is None",
            message="Lion without a GPU and without offload",
            why="DeepSpeed stops: its fused Lion needs CUDA; with offload to the CPU it uses another op",
            fix="use AdamW, or offload the optimizer to the CPU",
            source="ops/lion/fused_lion.py:36, ops/op_builder/cpu/ (no fused_lion)",
            settled=True,
        ),
    ),
    cycled_betas=True,
)
