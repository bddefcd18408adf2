"""Selective checkpointing from the command line to the forecast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import zerofit as zf
from tests.app.test_plan_engines import CONFIG
from zerofit.app.planning.output_files import write_accelerate
from zerofit.cli.main import main
from zerofit.plan.layout import PlannedLayout
from zerofit.spec.run import load_run

H100 = zf.Cluster("h100-80gb", gpus=4)
SELECTIVE = "--selective-activation-checkpointing"
# FSDP2 by hand; the policy is written anew, by the names of ops
SCRIPT = """
import json, os, torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

def contexts():
    seen = {True: 0, False: 0}
    def policy(ctx, op, *args, **kwargs):
        name = str(op)
        if name in ("aten.mm.default", "aten.addmm.default", "aten.linear.default"):
            seen[ctx.is_recompute] += 1
            keep = seen[ctx.is_recompute] % 2 == 1
        else:
            keep = "scaled_dot_product" in name
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(policy)

torch.distributed.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
config = AutoConfig.for_model(**json.load(open("model.json")))
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).cuda()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts})
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
for part in (model.model.embed_tokens, *model.model.layers):
    fully_shard(part, mp_policy=policy)
fully_shard([model.model.norm, model.lm_head], mp_policy=policy, reshard_after_forward=False)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for _ in range(3):
    x = torch.randint(0, 1024, (4, 512), device="cuda")
    model(input_ids=x, labels=x, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_plan_is_the_peak_of_a_script_with_fsdp2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(CONFIG))
    Path("train.py").write_text(SCRIPT)
    batch = {"seq_len": 512, "micro_batch": 4, "gradient_accumulation_steps": 1}
    plan = zf.plan("model.json", H100, engines=["fsdp2"], offload="none", activation_checkpointing="selective", **batch)
    planned = next(run for run in plan.layouts if run.layout.reshard)
    simulation = zf.simulate_script(["torchrun", "--nproc_per_node", "4", "train.py"], H100)
    assert planned.peak_bytes == pytest.approx(simulation.peak_bytes, rel=1e-4)


def test_accelerates_file_cannot_name_it(tmp_path: Path):
    layout = PlannedLayout(engine="fsdp2", zero_stage=3, micro_batch=1, dp=4, checkpointing="selective")
    with pytest.raises(zf.UserError, match="cannot name selective checkpointing"):
        write_accelerate(tmp_path / "out", layout, H100)


@pytest.mark.parametrize("stage", [2, 3])
def test_plan_is_the_peak_of_the_engine(tmp_path: Path, stage: int):
    model = tmp_path / "model.json"
    model.write_text(json.dumps(CONFIG))
    found = {}
    for kind in (False, "selective", True):
        options = {"seq_len": 512, "micro_batch": 4, "activation_checkpointing": kind}
        pins = {"zero_stage": stage, "offload": "none", "tensor_parallel": 1, "gradient_accumulation_steps": 1}
        planned = zf.plan(str(model), H100, **options, **pins).layouts[0]
        run = zf.Run(model=str(model), data="synthetic", ranks=4, precision="bf16", ds_config=f"zero{stage}", **options)
        assert planned.peak_bytes == pytest.approx(zf.simulate(run, H100).peak_bytes, rel=1e-5)
        assert planned.layout.checkpointing == kind
        found[kind] = planned
    assert found[True].peak_bytes < found["selective"].peak_bytes < found[False].peak_bytes
    assert str(found["selective"].layout).endswith("selective checkpointing")


def test_the_last_flag_counts_and_a_written_run_has_the_word(tmp_path: Path):
    words = ["plan", "llama-tiny", "--gpus", "2", "--gpu", "l4", "--seq-len", "64", "--micro-batch", "1", "--json"]
    words += ["--tensor-parallel", "1", "--no-activation-checkpointing", SELECTIVE, "--write", str(tmp_path / "out")]
    answer = json.loads(CliRunner().invoke(main, words).stdout)
    assert {row["activation_checkpointing"] for row in answer["layouts"]} == {"selective"}
    assert load_run(tmp_path / "out" / "run.yaml", {}).run.activation_checkpointing == "selective"


def test_the_trainers_lack_it():
    result = CliRunner().invoke(main, ["plan", "gpt2", "--gpus", "2", "--gpu", "l4", "--method", "dpo", SELECTIVE])
    assert result.exit_code == 2 and "do not support selective checkpointing" in " ".join(result.output.split())
