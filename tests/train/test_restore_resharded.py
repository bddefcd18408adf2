"""Going on in another layout is the run that never stopped (benchmarks/resume_matrix.py has all the others)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.checkpoint.made import JOB
from tests.train.small import GPT2, LLAMA
from zerofit.checkpoint.compatible import OBSTACLES, obstacles
from zerofit.checkpoint.full_state import FullState
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Job, Layout

AT, STEPS = 3, 6
EXACT = 1e-5  # relative, fp32: sums in another order
CLOSE = 1e-4  # the same of whole tensors: Adam divides by the root of small numbers
COUNTED = ("step", "global_steps", "skipped_steps", "lr_scheduler")
RUN = {"data": "synthetic:64", "seq_len": 16, "global_batch": 4, "steps": STEPS, "lr": 3e-3, "weight_decay": 0.1}
RUN |= {"eval_samples": 4, "warmup_steps": 2}
TENSOR, PIPE = {"tensor_parallel": 2}, {"pipeline": 2, "micro_batch": 2}
DUAL = {"pipeline": 2, "pipeline_schedule": "dualpipev", "micro_batch": 1}
SEQUENCE, EXPERTS = {"sequence_parallel": 2}, {"expert_parallel": 2}
TIED = {**LLAMA["model_args"], "num_attention_heads": 4, "tie_word_embeddings": True}
WIDE = {**LLAMA, "model_args": TIED}
# the router's loss of a micro batch is not a sum over its samples: ranks would add up to another one
MIXTRAL = {"model": "mixtral-tiny", "model_args": {**LLAMA["model_args"], "router_aux_loss_coef": 0.0}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "stage 3 on two ranks to 0 on one": (LLAMA, {"ranks": 2, "ds_config": "zero3"}, {"ranks": 1, "ds_config": "zero0"}),
    "tensor parallel to offload": (LLAMA, {"ranks": 2, **TENSOR}, {"ranks": 1, "ds_config": "zero2_offload"}),
    "pipeline to stage 3": (GPT2, {"ranks": 2, **PIPE}, {"ranks": 2, "ds_config": "zero3"}),
    "one rank to a pipeline": (GPT2, {"ranks": 1, "ds_config": "zero2"}, {"ranks": 2, **PIPE}),
    "DualPipeV to the usual schedule": (WIDE, {"ranks": 2, **DUAL}, {"ranks": 2, **PIPE}),
    "stage 3 to DualPipeV": (GPT2, {"ranks": 2, "ds_config": "zero3"}, {"ranks": 2, **DUAL}),
    "PP2 x TP2 to one rank": (WIDE, {"ranks": 4, **PIPE, **TENSOR}, {"ranks": 1, "ds_config": "zero2"}),
    "stage 3 to PP2 x SP2": (WIDE, {"ranks": 2, "ds_config": "zero3"}, {"ranks": 4, **PIPE, **SEQUENCE}),
    "spread experts to one rank": (
        MIXTRAL,
        {"ranks": 2, **EXPERTS, "ds_config": "zero3"},
        {"ranks": 1, "ds_config": "zero2"},
    ),
    "stage 3 to spread experts": (MIXTRAL, {"ranks": 2, "ds_config": "zero3"}, {"ranks": 2, **EXPERTS}),
    "PP2 x EP2 to another degree": (
        MIXTRAL,
        {"ranks": 4, **PIPE, **EXPERTS},
        {"ranks": 4, "expert_parallel": 4, "ds_config": "zero3"},
    ),
    "spread experts to PP2 x EP2": (MIXTRAL, {"ranks": 2, **EXPERTS}, {"ranks": 4, **PIPE, **EXPERTS}),
    "PP2 x SP2 to TP2 x SP2": (
        WIDE,
        {"ranks": 4, **PIPE, **SEQUENCE},
        {"ranks": 4, **TENSOR, **SEQUENCE, "ds_config": "zero3"},
    ),
}


def train(pools, output: Path, options: dict[str, Any]):
    ranks = options["ranks"]
    return pools(ranks).train(output, **{k: v for k, v in (RUN | options).items() if k != "ranks"})


@pytest.mark.parametrize("case", CASES)
def test_going_on(pools, tmp_path, case):
    model, old, new = CASES[case]
    whole = train(pools, tmp_path / "whole", model | old | {"save_every": str(AT)})
    checkpoint = tmp_path / f"whole/checkpoints/step-{AT:08}"
    options = model | new | {"resume": str(checkpoint), "save_every": str(STEPS)}
    resumed = train(pools, tmp_path / "resumed", options)
    assert not resumed.job.start.same_layout
    np.testing.assert_allclose(resumed.losses, whole.losses[AT:], rtol=EXACT)
    assert [s["lr"] for s in resumed.steps] == pytest.approx([s["lr"] for s in whole.steps[AT:]])
    ends = [FullState(tmp_path / run / f"checkpoints/step-{STEPS:08}") for run in ("whole", "resumed")]
    same_state(*ends)
    same_as_saved(ends[0], tmp_path / "whole/model")


def same_state(one: FullState, other: FullState) -> None:
    """Weights and both moments of Adam of two runs, up to sums in another order."""
    assert set(one.names) == set(other.names)
    assert {k: one.counters[k] for k in COUNTED} == {k: other.counters[k] for k in COUNTED}
    for name in one.names:
        assert one.kinds(name) == ["fp32", "exp_avg", "exp_avg_sq"]
        for kind in one.kinds(name):
            mine, theirs = one.read(name, kind), other.read(name, kind)
            assert float((mine - theirs).norm()) <= CLOSE * float(mine.norm()), (name, kind)


def same_as_saved(seen: FullState, folder: Path) -> None:
    """The whole view of the last checkpoint against the model that the run itself has put together."""
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert set(weights) <= {*seen.names, *seen.ties}
    assert {*weights, *seen.ties} >= set(seen.names)
    for name, tensor in weights.items():
        assert torch.equal(seen.read(name), tensor), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_own_tool_sees_the_same(pools, tmp_path, stage):
    options = LLAMA | {"ranks": 2, "ds_config": f"zero{stage}", "precision": "bf16", "steps": 1, "save_every": "1"}
    train(pools, tmp_path / "run", options)
    checkpoint = tmp_path / "run/checkpoints/step-00000001"
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag="state")
    ours = FullState(checkpoint)
    assert set(theirs) == set(ours.names)
    assert all(torch.equal(ours.read(name), tensor) for name, tensor in theirs.items())


def test_batch_statistics_are_the_mean_over_ranks(pools, tmp_path):
    """As an evaluation and the saved model have them."""
    options = {
        "model": "resnet18-small",
        "model_args": {"width": 8},
        "data": "digits",
        "image_size": 16,
        "global_batch": 8,
        "steps": 2,
        "optimizer": "adamw",
    }
    options |= {"save_every": "2", "eval_samples": 4, "ds_config": "zero3"}
    pools(2).train(tmp_path / "run", **options)
    seen = FullState(tmp_path / "run/checkpoints/step-00000002")
    saved = load_file(tmp_path / "run/model/model.safetensors")
    assert set(saved) == {*seen.names, *seen.buffers}
    assert any("running_mean" in name for name in seen.buffers)
    for name in seen.buffers:
        torch.testing.assert_close(seen.buffer(name), saved[name])


OLD = replace(
    JOB,
    run=Run(model="mlp", data="digits", precision="bf16", pipeline_balance="parameters"),
    layout=Layout(dp=2, zero_stage=3),
)


def job(config: dict[str, Any], **layout: int) -> Job:
    ds_config = {"optimizer": {"type": "AdamW"}, **config}
    return replace(OLD, layout=replace(OLD.layout, **layout), ds_config=ds_config)


def offload(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", **keys}}}


REFUSED = {
    "zero_optimization.offload_optimizer.ratio": offload(ratio=0.4),
    "zero_optimization.offload_optimizer.super_offload": offload(super_offload=True),
    "zero_optimization.zenflow": {"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}},
    "optimizer.type": {"optimizer": {"type": "OneBitAdam"}},
    "data_efficiency": {"data_efficiency": {"enabled": True}},
}


def test_obstacles_are_found_on_either_side():
    plain = job(offload())
    assert set(REFUSED) == {one.key for one in OBSTACLES}
    for one in OBSTACLES:
        special = job(REFUSED[one.key], dp=1)
        for old, new in ((plain, special), (special, plain)):
            assert one.key in [p.where for p in obstacles(old, new)]
        assert bool(obstacles(special, special)) == one.always
    assert obstacles(plain, job({}, dp=4, zero_stage=1, tp=2)) == []


@pytest.mark.parametrize("kind", ["AdamW8bit", "PagedAdamW8bit", "Adafactor"])
def test_states_of_blocks_rows_and_columns_stay_in_their_layout(kind):
    one = job({"optimizer": {"type": kind}})
    assert obstacles(one, one) == []
    assert {p.where for p in obstacles(one, replace(one, layout=replace(one.layout, dp=4)))} == {"optimizer.type"}


def test_states_of_another_optimizer_do_not_fit():
    found = obstacles(job({}), job({"optimizer": {"type": "SGD"}}))
    assert [p.kind for p in found] == ["optimizer"]
    assert obstacles(job({"optimizer": {"type": "Adam"}}), job({})) == []


def test_the_document_has_every_obstacle():
    text = (Path(__file__).parents[2] / "docs/another-layout.md").read_text()
    rows = [f"| `{one.key}` | {one.why} | {one.instead} |" for one in OBSTACLES]
    assert [row for row in rows if row not in text] == []
