"""The `compile` section: DeepCompile and its passes."""

from __future__ import annotations

from zerofit.check.finding import Rule
from zerofit.check.subject import CheckSubject

TP = "tensor_parallel"
OFFLOADS = ("offload_activation", "offload_opt_states", "offload_parameters")


def _passes(c: CheckSubject) -> list:
    passes = c.get("compile.passes")
    return passes if isinstance(passes, list) else []


COMPILE = (
    Rule(
        code="compile-passes",
        path="compile.passes",
        when=lambda c: _passes(c) and not c.deepcompile,
        message="compile.passes without deepcompile",
        why="DeepSpeed ignores them and compiles as torch does",
        fix="set compile.deepcompile to true, or remove them",
        source="runtime/engine.py:5921",
    ),
    Rule(
        code="deepcompile-stage",
        path="compile.deepcompile",
        when=lambda c: c.deepcompile and c.stage == 0 and not {"autosp", "autotp"} & set(map(str, _passes(c))),
        message="DeepCompile without ZeRO",
        why="DeepSpeed only logs this at level info and compiles as torch does",
        fix="use ZeRO stage 1, 2 or 3",
        source="runtime/engine.py:5806",
    ),
    Rule(
        code="needs-cuda",
        path="compile.deepcompile",
        when=lambda c: c.deepcompile and c.stage > 0 and c.on_cpu,
        message="DeepCompile without a GPU",
        why="DeepCompile's native op needs CUDA, and compiling fails",
        source="compile/util.py:29",
    ),
    Rule(
        code="autosp-stage",
        path="compile.passes",
        when=lambda c: c.deepcompile and "autosp" in _passes(c) and c.stage >= 2,
        message=lambda c: f"compile pass autosp at ZeRO stage {c.stage}",
        why="DeepSpeed only logs this at level info and compiles as torch does: sequences are not split",
        fix="use stage 1",
        source="runtime/engine.py:5773",
    ),
    Rule(
        code="compile-passes-mixed",
        path="compile.passes",
        when=lambda c: c.deepcompile and "autotp" in _passes(c) and len(_passes(c)) > 1,
        message="compile pass autotp together with others: {value}",
        why='DeepSpeed stops: "The AutoTP compile pass cannot yet be combined with AutoSP or the ZeRO passes."',
        fix="use only autotp",
        source="runtime/engine.py:5843",
    ),
    Rule(
        code="compile-offload-states",
        path="compile.offload_opt_states",
        when=lambda c: c.on("compile.offload_opt_states") and c.deepcompile and c.stage == 3 and c.offload("optimizer"),
        message="compile.offload_opt_states together with zero_optimization.offload_optimizer",
        why='DeepSpeed stops: "compile.offload_opt_states cannot be combined with ZeRO\'s ..."',
        fix="keep one",
        source="compile/init_z3.py:94",
    ),
    Rule(
        code="compile-offload-activation",
        path="compile.offload_activation",
        when=lambda c: (
            c.on("compile.offload_activation")
            and (c.on("compile.offload_parameters") or c.on("compile.offload_opt_states"))
        ),
        message="compile.offload_activation together with another offload of compile",
        why='DeepSpeed stops: "compile.offload_activation cannot be combined with ..."',
        fix="keep one",
        source="compile/init_z3.py:101",
    ),
    Rule(
        code="compile-offload-stage",
        severity="warning",
        path="compile",
        when=lambda c: c.deepcompile and c.stage in (1, 2) and any(c.on(f"compile.{key}") for key in OFFLOADS),
        message=lambda c: f"compile.offload_... at ZeRO stage {c.stage}",
        why="DeepSpeed reads it only at stage 3",
        fix="use stage 3, or remove it",
        source="compile/init_z1_and_2.py (no reader), compile/init_z3.py:94",
    ),
    Rule(
        code="compile-offload-parameters",
        path="compile.offload_opt_states",
        when=lambda c: (
            c.deepcompile and c.stage == 3 and c.on("compile.offload_opt_states") and c.on("compile.offload_parameters")
        ),
        message="compile.offload_opt_states together with compile.offload_parameters",
        why='DeepSpeed stops: "offload_parameters and offload_opt_states cannot be enabled together"',
        fix="keep one",
        source="compile/init_z3.py:148",
    ),
    Rule(
        code="compile-zero-pass",
        severity="warning",
        path="compile.passes",
        when=lambda c: c.deepcompile and "autotp" not in _passes(c) and {"z1", "z3"} & set(map(str, _passes(c))),
        message="compile.passes {value}: z1 and z3 select nothing",
        why="DeepSpeed uses the passes of the stage in zero_optimization.stage",
        fix="remove them",
        source="runtime/engine.py:1587,5817",
    ),
    Rule(
        code="compile-autotp",
        path="compile.passes",
        when=lambda c: (
            c.deepcompile and "autotp" in _passes(c) and c.tensor_parallel == 1 and c.get(f"{TP}.autotp_size") != "auto"
        ),
        message="compile pass autotp without tensor_parallel.autotp_size above 1",
        why="DeepSpeed only logs this at level info and compiles as torch does",
        fix="set tensor_parallel.autotp_size, or remove the pass",
        source="runtime/engine.py:5783",
    ),
)
