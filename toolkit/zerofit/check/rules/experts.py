"""Expert parallelism (AutoEP)."""

from __future__ import annotations

from zerofit.check.edit import Assignment, Removal
from zerofit.check.rules.rule import Rule
from zerofit.check.subject import ZERO, CheckSubject

EP = "expert_parallel"


def _experts(c: CheckSubject) -> int:
    return c.degree(f"{EP}.autoep_size")


EXPERTS = (
    Rule(
        code="experts-off",
        path=EP,
        when=lambda c: len(c.section(EP)) > 0 and not c.has(f"{EP}.enabled"),
        message="expert_parallel without enabled",
        why="DeepSpeed leaves it off, without a word",
        fix='add "enabled": true',
        edits=(Assignment(f"{EP}.enabled", True),),
        source="module_inject/auto_ep_config.py:48",
    ),
    Rule(
        code="experts-balance",
        path=f"{EP}.load_balance_coeff",
        when=lambda c: c.get(f"{EP}.load_balance_coeff") is not None,
        message="expert_parallel.load_balance_coeff is not supported",
        why='DeepSpeed stops: "load_balance_coeff=... is not supported in this AutoEP build"',
        fix="remove it",
        edits=(Removal(f"{EP}.load_balance_coeff"),),
        source="module_inject/auto_ep_config.py:76",
    ),
    Rule(
        code="experts-zero3",
        path=f"{EP}.enabled",
        when=lambda c: (
            c.on(f"{EP}.enabled")
            and c.stage == 3
            and (
                c.sequence_parallel > 1
                or c.on(f"{ZERO}.zero_quantized_gradients")
                or (c.number(f"{ZERO}.zero_hpz_partition_size") or 1) > 1
            )
        ),
        message="expert_parallel at ZeRO stage 3 with sequence parallelism, hpZ or quantized gradients",
        why='DeepSpeed stops: "AutoEP with ZeRO Stage 3 does not support ... yet"',
        fix="take stage 2",
        edits=(Assignment(f"{EP}.enabled", False),),
        source="runtime/engine.py:2218",
    ),
    Rule(
        code="experts-tensor-parallel",
        path=f"{EP}.enabled",
        when=lambda c: (
            c.on(f"{EP}.enabled")
            and c.tensor_parallel > 1
            and (
                c.on("compile.deepcompile")
                or c.pipeline > 1
                or c.sequence_parallel > 1
                or bool(c.section(f"{ZERO}.offload_optimizer"))
                or bool(c.section(f"{ZERO}.offload_param"))
            )
        ),
        message="expert_parallel with tensor_parallel beside DeepCompile, a pipeline, sequence parallelism or offload",
        why='DeepSpeed stops: "... with AutoEP+AutoTP folding is not supported"',
        fix="leave one of them out",
        edits=(Assignment(f"{EP}.enabled", False),),
        source="module_inject/auto_ep_folding.py:202",
    ),
    Rule(
        code="experts-ranks",
        path=f"{EP}.autoep_size",
        when=lambda c: c.on(f"{EP}.enabled") and bool(c.ranks) and (c.ranks // c.pipeline) % _experts(c) != 0,
        message=lambda c: f"autoep_size {{value}} does not divide {c.ranks // c.pipeline} ranks",
        why='DeepSpeed stops once the ranks run: "autoep_size * expert_tensor_parallel_size must divide the stage '
        'size"',
        fix="take a divisor of the number of ranks, and of the experts",
        edits=lambda c: (
            Assignment(
                f"{EP}.autoep_size",
                max(d for d in range(1, _experts(c) + 1) if (c.ranks // c.pipeline) % d == 0),
            ),
        ),
        source="module_inject/auto_ep_folding.py:112",
    ),
)
