"""Tensor, sequence, pipeline and expert parallelism (AutoEP)."""

from __future__ import annotations

from zerofit.check.edit import Removal
from zerofit.check.finding import Rule
from zerofit.check.subject import STEPS, ZERO, CheckSubject
from zerofit.spec.mesh import pipeline_parts

TP = "tensor_parallel"
EP = "expert_parallel"
PIPE_PARTITIONED = (
    "pipe_partitioned",
    "grad_partitioned",
)  # keys of "pipeline"
PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")


def _nested(c: CheckSubject) -> int:
    return c.degree(f"{TP}.tp.tp_size") if c.has(f"{TP}.tp") else c.degree(f"{TP}.tensor_parallel.tp_size")


def _data(c: CheckSubject) -> int:
    return int(c.number("data_parallel_size") or 0)


def _not_dividing(c: CheckSubject, degree: int) -> bool:
    return bool(c.ranks) and degree > 1 and c.ranks % degree != 0


def _heads(c: CheckSubject) -> tuple[int, int | None]:
    """Return the model's attention heads (0 if unknown) and its key-value heads."""
    facts = c.setting.facts
    return (facts.attention_heads or 0, facts.kv_heads) if facts else (0, None)


def _experts(c: CheckSubject) -> int:
    return c.degree(f"{EP}.autoep_size")


def _parts(c: CheckSubject) -> int:
    """Return the number of parts that DualPipeV splits the layers into."""
    return pipeline_parts(c.pipeline, "dualpipev")


def _refused_beside_tensor_slices(c: CheckSubject) -> bool:
    offloads = any(c.section(f"{ZERO}.{part}") for part in ("offload_optimizer", "offload_param"))
    return bool(c.deepcompile or c.pipeline > 1 or c.sequence_parallel > 1 or offloads)


PARALLEL = (
    Rule(
        code="tensor-parallel-ranks",
        path=f"{TP}.autotp_size",
        when=lambda c: _not_dividing(c, c.tensor_parallel),
        message=lambda c: f"autotp_size {{value}} does not divide {c.ranks} ranks",
        why="DeepSpeed does not check this: it fails with an empty assertion or leaves ranks out",
        fix="use a divisor of the number of ranks",
        source="runtime/utils/groups.py:202",
    ),
    Rule(
        code="tensor-parallel-heads",
        path=f"{TP}.autotp_size",
        when=lambda c: _heads(c)[0] and any((n or 0) % c.tensor_parallel for n in _heads(c)),
        message=lambda c: (
            f"autotp_size {{value}} does not divide the model's {_heads(c)[0]} attention heads and {_heads(c)[1]} "
            "key-value heads"
        ),
        why="DeepSpeed makes uneven shards or leaves ranks without a head",
        fix="use a divisor of both",
        source="runtime/engine.py:1046",
    ),
    Rule(
        code="tensor-parallel-nested",
        path=f"{TP}.tp.tp_size",
        when=lambda c: _nested(c) > 1 and not c.number(f"{TP}.autotp_size") and c.get(f"{TP}.autotp_size") != "auto",
        message="tensor_parallel.tp.tp_size {value} without autotp_size",
        why="DeepSpeed splits nothing in training: it only reads autotp_size",
        fix="set tensor_parallel.autotp_size",
        source="runtime/engine.py:595",
    ),
    Rule(
        code="tensor-parallel-sizes",
        path=f"{TP}.tp.tp_size",
        when=lambda c: _nested(c) > 1 and c.tensor_parallel > 1 and _nested(c) != c.tensor_parallel,
        message=lambda c: f"tensor_parallel.tp.tp_size {{value}} differs from autotp_size {c.tensor_parallel}",
        why='DeepSpeed stops: "tensor_parallel.tp.tp_size does not match tensor_parallel.autotp_size"',
        fix="remove tp_size",
        source="runtime/engine.py:1020",
    ),
    Rule(
        code="tensor-parallel-type",
        path=f"{TP}.dtype",
        when=lambda c: c.has(f"{TP}.dtype") and c.get(f"{TP}.dtype") != "auto",
        message="tensor_parallel.dtype cannot be set in a JSON",
        why='DeepSpeed stops: "Input should be an instance of dtype"; nothing reads the value',
        fix="remove it: bf16 or fp16 sets the type",
        edits=(Removal(f"{TP}.dtype"),),
        source="runtime/tensor_parallel/config.py:40",
    ),
    Rule(
        code="tensor-parallel-preset",
        path=f"{TP}.preset_model",
        when=lambda c: c.word(f"{TP}.preset_model") is not None and c.word(f"{TP}.preset_model") not in PRESETS,
        message=f"tensor_parallel.preset_model is {{value}}; known: {', '.join(PRESETS)}",
        why="DeepSpeed silently uses no preset and guesses which layers to split",
        fix="use one of them, or remove it",
        source="module_inject/autotp_config.py:558",
    ),
    Rule(
        code="sequence-parallel-ranks",
        path="sequence_parallel_size",
        when=lambda c: _not_dividing(c, c.sequence_parallel),
        message=lambda c: f"sequence_parallel_size {{value}} does not divide {c.ranks} ranks",
        why="DeepSpeed does not check this and continues with a fraction of a data parallel rank",
        fix="use a divisor of the number of ranks",
        source="runtime/config.py:461",
    ),
    Rule(
        code="sequence-parallel-alone",
        severity="warning",
        path="sequence_parallel_size",
        when=lambda c: (
            c.sequence_parallel > 1 and not c.has("data_parallel_size") and not _not_dividing(c, c.sequence_parallel)
        ),
        message="sequence_parallel_size {value} without data_parallel_size",
        why="DeepSpeed only uses it to compute batch sizes: it builds no group unless data_parallel_size is set or "
        "your code passes an mpu (zerofit does)",
        fix="set data_parallel_size too, or register Ulysses in code",
        source="__init__.py:543",
    ),
    Rule(
        code="data-parallel-alone",
        severity="warning",
        path="data_parallel_size",
        when=lambda c: c.has("data_parallel_size") and not c.has("sequence_parallel_size"),
        message="data_parallel_size without sequence_parallel_size",
        why="DeepSpeed ignores it",
        fix="remove it: the number of ranks determines it",
        source="__init__.py:543",
    ),
    Rule(
        code="pipeline-print",
        path="steps_per_print",
        when=lambda c: (
            (c.pipeline > 1 or c.section("pipeline"))
            and (c.on("wall_clock_breakdown") or c.on("flops_profiler.enabled"))
            and c.number("steps_per_print") is None
        ),
        message="timers or the flops profiler with a pipeline, without steps_per_print",
        why="DeepSpeed fails at the first batch: \"unsupported operand type(s) for %: 'int' and 'NoneType'\"",
        fix="set steps_per_print",
        source="runtime/pipe/engine.py:1240",
    ),
    Rule(
        code="dualpipev-accumulation",
        path=STEPS,
        when=lambda c: c.dualpipev and 0 < (c.number(STEPS) or 0) < _parts(c),
        message=lambda c: f"only {{value}} gradient accumulation steps for DualPipeV on {c.pipeline} pipeline stages",
        why=lambda c: (
            "DeepSpeed stops after every rank has built its engine: "
            f'"DualPipeV needs gradient_accumulation_steps >= 2 * {c.pipeline}"'
        ),
        fix=lambda c: f"use {_parts(c)} or more, with a smaller micro batch",
        source="runtime/pipe/dualpipev.py:102",
    ),
    Rule(
        code="dualpipev-stage",
        path=f"{ZERO}.stage",
        when=lambda c: c.dualpipev and c.setting.reader == "zerofit" and c.stage == 0,
        message="DualPipeV at ZeRO stage 0",
        why="zerofit refuses it: DualPipeV was only tested to match one device at stage 1",
        fix="use stage 1",
        source="runtime/pipe/dualpipev.py",
    ),
    *(
        Rule(
            code="dualpipev-partitioned",
            path=f"pipeline.{key}",
            when=lambda c, path=f"pipeline.{key}": c.dualpipev and c.tensor_parallel > 1 and c.get(path) is True,
            message=f"{key} with DualPipeV and tensor parallel ranks",
            why="DeepSpeed stops after every rank has built its engine: "
            '"DualPipeV does not support pipe_partitioned or grad_partitioned"',
            fix="set it to false: stages then pass on full activations",
            source="runtime/pipe/dualpipev.py:104",
        )
        for key in PIPE_PARTITIONED
    ),
    Rule(
        code="managed-accumulation",
        path="managed_gradient_accumulation",
        when=lambda c: (
            c.off("managed_gradient_accumulation")
            and (c.pipeline > 1 or c.deepcompile or (c.stage <= 1 and c.on(f"{ZERO}.overlap_comm")))
        ),
        message="managed_gradient_accumulation false with a pipeline, DeepCompile, or overlap_comm below stage 2",
        why='DeepSpeed stops: "managed_gradient_accumulation=False is not supported with ..."',
        source="runtime/engine.py:2031-2035",
    ),
    Rule(
        code="mesh-ranks",
        path="data_parallel_size",
        when=lambda c: (
            c.has("sequence_parallel_size")
            and _data(c) > 0
            and c.ranks
            and not _not_dividing(c, c.sequence_parallel)
            and _data(c) * c.sequence_parallel != c.ranks
        ),
        message=lambda c: (
            f"data_parallel_size {{value}} x sequence_parallel_size {c.sequence_parallel} is not the number of ranks, "
            f"{c.ranks}"
        ),
        why='DeepSpeed does not check this: if it is more, torch stops ("Mesh should not be bigger than default world '
        'size"); if it is less, ranks are left out of every group',
        fix="set it to the number of ranks divided by sequence_parallel_size",
        source="__init__.py:545, comm/comm.py:817",
    ),
)
EXPERTS = (
    Rule(
        code="experts-off",
        path=EP,
        when=lambda c: len(c.section(EP)) > 0 and not c.has(f"{EP}.enabled"),
        message="expert_parallel without enabled",
        why="DeepSpeed silently leaves it off",
        fix='add "enabled": true',
        source="module_inject/auto_ep_config.py:48",
    ),
    Rule(
        code="experts-balance",
        path=f"{EP}.load_balance_coeff",
        when=lambda c: c.get(f"{EP}.load_balance_coeff") is not None,
        message="expert_parallel.load_balance_coeff is not supported",
        why='DeepSpeed stops: "load_balance_coeff=... is not supported in this AutoEP build"',
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
        fix="use stage 2",
        source="runtime/engine.py:2218",
    ),
    Rule(
        code="experts-tensor-parallel",
        path=f"{EP}.enabled",
        when=lambda c: c.on(f"{EP}.enabled") and c.tensor_parallel > 1 and _refused_beside_tensor_slices(c),
        message="expert_parallel, tensor_parallel and one of DeepCompile, pipeline, sequence parallelism or offload",
        why='DeepSpeed stops: "... with AutoEP+AutoTP folding is not supported"',
        fix="remove one of them",
        source="module_inject/auto_ep_folding.py:202",
    ),
    Rule(
        code="experts-clipping",
        severity="warning",
        path=f"{EP}.enabled",
        when=lambda c: c.on(f"{EP}.enabled") and c.stage == 0 and bool(c.number("gradient_clipping")),
        message="expert_parallel with gradient_clipping and without ZeRO",
        why="DeepSpeed averages the gradient norm over ranks with different experts: it is too small, so it clips "
        "too late",
        fix="use ZeRO stage 1, 2 or 3",
        source="runtime/utils.py:413-419",
    ),
    Rule(
        code="experts-tensor-gradients",
        severity="warning",
        path=f"{EP}.enabled",
        when=lambda c: (
            c.on(f"{EP}.enabled") and c.tensor_parallel > 1 and c.stage < 3 and not _refused_beside_tensor_slices(c)
        ),
        message=lambda c: f"expert_parallel with tensor_parallel at ZeRO stage {c.stage}",
        why="DeepSpeed only counts the experts of the first tensor parallel rank in the gradient norm; at stage 2 it "
        "corrects accumulated gradients again with each micro batch",
        fix="use ZeRO stage 3, or remove one of them",
        source="runtime/zero/stage_1_and_2.py:2682,1434",
    ),
    Rule(
        code="experts-ranks",
        path=f"{EP}.autoep_size",
        when=lambda c: c.on(f"{EP}.enabled") and c.ranks and (c.ranks // c.pipeline) % _experts(c) != 0,
        message=lambda c: f"autoep_size {{value}} does not divide {c.ranks // c.pipeline} ranks",
        why='DeepSpeed stops once the ranks run: "autoep_size * expert_tensor_parallel_size must divide the stage '
        'size"',
        fix="use a divisor of the ranks per pipeline stage and of the number of experts",
        source="module_inject/auto_ep_folding.py:112",
    ),
)
