"""`zerofit.plan` from Python: typed layouts that are runs, pins, questions; from a stored profile, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

import zerofit as zf
from tests.plan.stub import make_profile
from zerofit.app.job.requests import as_request
from zerofit.app.planning.request import PlanningRequest
from zerofit.app.planning.training_methods import compare_methods
from zerofit.app.simulation.runs import prepare_simulation
from zerofit.cli.main import main
from zerofit.plan.layout import PlannedLayout
from zerofit.spec.hybrid_engine import HYBRID_ENGINE_FAULTS

H100 = zf.Cluster("h100-80gb", gpus=8)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(json.dumps(replace(make_profile(), model="[/x] [y]").as_dict()))
    return path


def test_layouts_are_runs(profile, tmp_path):
    plan = zf.plan(profile=profile, cluster=H100, global_batch=64, top=50)
    assert [one.step_s for one in plan.layouts] == sorted(one.step_s for one in plan.layouts)
    for one in plan.layouts:
        run = one.to_run()
        assert (run.ranks, run.micro_batch, run.ds_config) == (8, one.layout.micro_batch, one.ds_config)
        assert one.ds_config["zero_optimization"]["stage"] == one.layout.zero_stage
        assert not zf.check(one.ds_config, cluster=H100).errors
    config, run_file = plan.write(tmp_path)
    best = plan.layouts[plan.result.plainest or 0]
    assert json.loads(config.read_text()) == best.ds_config
    assert f"micro_batch: {best.layout.micro_batch}" in run_file.read_text()
    with pytest.raises(zf.UserError, match="exists"):
        plan.write(tmp_path)
    assert len(plan.to_dict()["layouts"]) == len(plan.layouts) and plan.considered > len(plan.layouts)


def test_the_fields_of_a_run_are_pins(profile):
    pinned = zf.plan(profile=profile, cluster=H100, global_batch=64, micro_batch=2, tensor_parallel=2)
    assert {(one.layout.tp, one.layout.micro_batch) for one in pinned.layouts} == {(2, 2)}
    run = zf.Run(model="llama-tiny", global_batch=64, micro_batch=3)
    with pytest.raises(zf.UserError, match="does not divide"):
        zf.plan(run, H100)
    with pytest.raises(zf.UserError, match="--optimizer muon: plan cannot forecast its states"):
        zf.plan(zf.Run(model="llama-tiny", optimizer="muon"), H100)
    with pytest.raises(zf.UserError) as error:
        zf.plan("gpt2", H100, seq_len=5000, micro_batch=0, image="image:3x2")
    assert {p.where for p in error.value.problems} == {"--seq-len", "--micro-batch", "--input"}


def test_layouts_have_the_optimizer_that_train_takes(profile, tmp_path):
    """SGD for a CNN, but where its states are on the host; what is asked for comes first."""
    cnn = tmp_path / "cnn.json"
    cnn.write_text(
        json.dumps(replace(make_profile(), model="resnet18", task="image", seq_len=None, cnn=True).as_dict())
    )
    for asked, here in ((None, "sgd"), ("adamw", "adamw"), ("sgd", "sgd")):
        pins = {"global_batch": 64, "optimizer": asked}
        found = zf.plan(profile=cnn, cluster=H100, top=500, **pins).layouts
        on_host = {one.layout.optimizer for one in found if one.layout.offload_optimizer != "none"}
        assert {one.layout.optimizer for one in found if one.layout.offload_optimizer == "none"} == {here}
        assert on_host == {asked or "adamw"}
    offloads = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    plain = {"zero_optimization": {"stage": 2}}
    without_decay = plain | {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 0}}}
    for config, decay in ((plain, None), (offloads, None), (without_decay, None), (plain, 0.0)):
        pins = {"ds_config": config, "micro_batch": 2, "weight_decay": decay}
        run = zf.Run(model="resnet18", data="synthetic", **pins)
        best = zf.plan(profile=cnn, cluster=H100, **pins).layouts[0]
        planned, job = best.layout, prepare_simulation(as_request(run), H100).job
        assert (planned.optimizer, planned.offload) == (job.run.optimizer, PlannedLayout.of(job).offload)
        assert planned.has_weight_decay is (job.ds_config["optimizer"]["params"]["weight_decay"] > 0)
        assert PlannedLayout.of(job).has_weight_decay is planned.has_weight_decay
        assert best.to_run().weight_decay == decay
    assert {one.layout.optimizer for one in zf.plan(profile=profile, cluster=H100, global_batch=64).layouts} == {
        "adamw"
    }


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_json_says_whether_what_is_offloaded_is_page_locked(profile, device):
    here, disked = {}, replace(H100, nvme="30TB")
    for pinned in (True, False):
        zero = {"stage": 3, "offload_optimizer": {"device": device, "pin_memory": pinned, "nvme_path": "/tmp"}}
        config = {"zero_optimization": zero}
        here[pinned] = zf.plan(profile=profile, cluster=disked, ds_config=config, micro_batch=1).layouts[0]
        assert here[pinned].ds_config["zero_optimization"]["offload_optimizer"]["pin_memory"] is pinned
        run = zf.Run(model="llama-tiny", data="synthetic", ds_config=config, micro_batch=1)
        assert PlannedLayout.of(prepare_simulation(as_request(run), disked).job).pin_optimizer is pinned
    assert here[False].step_s > here[True].step_s


def test_questions_and_boxes(profile):
    small = replace(H100, device_memory="2GiB", host_memory="3GiB")  # less than processes take
    nothing = zf.plan(profile=profile, cluster=small, minimum="gpus")
    assert not nothing.layouts and nothing.remedies and nothing.answer.cluster is None
    assert "devices are not enough" in str(nothing.answer)
    with pytest.raises(zf.UserError, match="nothing to write"):
        nothing.write("nowhere")
    fewest = zf.plan(profile=profile, cluster=replace(H100, host_memory="64GiB"), minimum="gpus")
    assert fewest.cluster.ranks == fewest.answer.cluster.ranks == 1
    deep = zf.plan(profile=profile, cluster=zf.Cluster("l4", gpus=1), maximum="micro-batch")
    assert deep.to_dict()["asked"]["value"] == deep.layouts[0].layout.micro_batch


def test_several_clusters_are_compared(profile):
    plan = zf.plan(profile=profile, cluster=[zf.Cluster("l4", gpus=8), H100], global_batch=64)
    assert [box.cluster.device.kind for box in plan.boxes] == ["h100-80gb", "l4"] and plan.cluster == H100


def test_names_and_reasons_are_text(profile):
    args = ["plan", "--profile", str(profile), "--gpu", "h100-80gb", "--gpus", "8"]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0 and "model         [/x] [y], " in done.stdout
    done = CliRunner().invoke(main, [*args, "--device-memory", "1GiB", "--host-memory", "3GiB"])
    assert done.exit_code == 1 and done.stdout.startswith("NOTHING FITS") and "[/x] [y], " in done.stdout
    assert "[/x] [y] in bf16" in zf.plan(profile=profile, cluster=H100)._repr_html_()


def test_no_torch_for_a_stored_profile(profile):
    code = f"import sys, zerofit as zf; zf.plan(profile={str(profile)!r}, cluster=zf.Cluster('h100-80gb', gpus=8))"
    done = subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=False)
    assert done.returncode == 0


def test_methods_stand_in_one_table():
    args = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "bos_token_id": 0, "eos_token_id": 0}
    asked = PlanningRequest(model="gpt2", pins={"model_args": args, "seq_len": 256, "global_batch": 8})
    full, lora = compare_methods(asked, ("full", "lora"), H100).rows
    assert (full.method, lora.method) == ("full", "lora")
    assert full.plan.profile.trained == full.plan.profile.parameters
    # rank 8 beside c_attn, two c_proj and c_fc of three blocks
    assert lora.plan.profile.trained == 3 * 8 * (4 * 64 + 2 * 64 + 5 * 64 + 5 * 64)
    assert full.longest.value == lora.longest.value == 512
    assert lora.best.peak_bytes < full.best.peak_bytes
    assert lora.best.to_run().lora == 8 and full.best.to_run().lora is None
    assert any("AutoTP" in one.message for one in lora.plan.result.rejections)


@pytest.mark.slow
def test_quantized_weights_are_a_method():
    pytest.importorskip("bitsandbytes")
    args = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    args |= {"num_key_value_heads": 4, "max_position_embeddings": 256}  # nothing longer is traced
    asked = PlanningRequest(model="llama-tiny", pins={"model_args": args, "seq_len": 256, "global_batch": 8})
    lora, qlora = compare_methods(asked, ("qlora", "lora"), H100).rows
    assert (qlora.method, qlora.plan.profile.trained) == ("qlora", lora.plan.profile.trained)
    assert qlora.plan.profile.parameters == lora.plan.profile.parameters
    numbers = 3 * (4 * 256 * 256 + 3 * 256 * 512)
    # half a byte a number, 4 bytes for each 64, a table of 16 for each of seven layers in three blocks
    packed = numbers // 2 + 4 * numbers // 64 + 3 * 7 * 16 * 4
    assert qlora.best.memory.breakdown["quantised weights"] == packed
    assert "quantised weights" not in lora.best.memory.breakdown
    assert qlora.best.to_run().quantize == "nf4" and lora.best.to_run().quantize is None
    assert all(one.layout.offload_param == "none" for one in qlora.plan.layouts)


def test_ligers_kernels_keep_what_they_keep(tmp_path: Path):
    """The peak of a real script: liger-kernel 0.8.5 in the Trainer with ZeRO-2, simulated.

    A Llama of 4 layers, 32 samples of 1024 tokens: 22,572,481,412 bytes in backward.
    """
    shape = {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 4, "intermediate_size": 8192}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    model = tmp_path / "llama.json"
    model.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape, **heads}))
    options = {"seq_len": 1024, "micro_batch": 32, "gradient_accumulation_steps": 1, "precision": "bf16"}
    config = {"zero_optimization": {"stage": 2}}
    plan = zf.plan(
        str(model),
        zf.Cluster("h100-80gb", gpus=1),
        **options,
        activation_checkpointing=False,
        liger_kernel=True,
        ds_config=config,
    )
    assert plan.layouts[0].peak_bytes == pytest.approx(22_572_481_412, rel=1e-4)


def test_a_hybrid_engine_is_refused_for_models_that_it_fails_with(profile):
    config = {"hybrid_engine": {"enabled": True}}
    for model_type, fault in (("llama", HYBRID_ENGINE_FAULTS["llama"]), ("qwen2", None)):
        file = profile.parent / f"{model_type}.json"
        file.write_text(json.dumps(json.loads(profile.read_text()) | {"model_type": model_type}))
        planning = partial(zf.plan, profile=file, cluster=H100, ds_config=config)
        if fault is None:
            assert planning().layouts
            continue
        with pytest.raises(zf.UserError) as caught:
            planning()
        assert fault in caught.value.problems[0].message
    with pytest.raises(zf.UserError) as caught:  # a run of zerofit generates nothing
        zf.simulate(zf.Run(model="llama-tiny", data="synthetic", ds_config=config), H100)
    assert [problem.kind for problem in caught.value.problems] == ["hybrid-engine"]
