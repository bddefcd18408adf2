"""A run and a DeepSpeed JSON become one plain DeepSpeed JSON, or an error that names both places."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from zerofit.check.document import of_data
from zerofit.check.dotted import get
from zerofit.config.decide import decide, resolve, with_recipe
from zerofit.config.ds_json import bundled, find_config, read_document, read_for_run
from zerofit.config.validate import check_machine, check_model
from zerofit.launch.ops import needed_ops
from zerofit.spec.errors import Problems, UserError
from zerofit.spec.model_facts import Machine, ModelFacts
from zerofit.spec.run import load_run

CPU = Machine(accelerator="cpu", devices=2, cores=2, device_name="CPU", fp16=False, bf16=True)
GPUS = Machine(accelerator="cuda", devices=8, cores=64, device_name="NVIDIA H100", fp16=True, bf16=True)
LLAMA = ModelFacts(
    task="causal-lm",
    parameters=7_000_000,
    largest_parameter=500_000,
    hidden_size=256,
    forward_flops=1,
    attention_heads=8,
    kv_heads=2,
    model_type="llama",
    layers=6,
)
CNN = ModelFacts(task="image", parameters=60_000, largest_parameter=9_000, hidden_size=94, forward_flops=1, layers=5)


def resolved(config: dict | str, machine=CPU, facts=LLAMA, kind="transformer", **flags):
    """Decision and plain JSON; raises what is wrong."""
    if isinstance(config, str):
        config = read_for_run(config).config
    problems = Problems()
    decision = decide(load_run(None, flags), of_data(config), "ds.json", machine, problems, kind)
    check_machine(decision.run, decision.layout, machine, problems)
    problems.raise_if_any()
    check_model(decision.run, decision.layout, facts, problems)
    decision = with_recipe(decision, kind, facts, 100)
    plain = resolve(config, decision, facts, machine, 100, problems)
    problems.raise_if_any()
    return decision, plain


def refused(config: dict | str, **kwargs) -> list:
    with pytest.raises(UserError) as error:
        resolved(config, **kwargs)
    return list(error.value.problems)


def with_nvme_at(path: str, name: str = "zero3_nvme") -> dict:
    return json.loads(json.dumps(read_for_run(name).config).replace("/local_nvme", path))


@pytest.mark.parametrize("name", sorted(bundled()))
def test_every_bundled_file_resolves_to_plain_json(name, tmp_path):
    config = with_nvme_at(str(tmp_path), name)
    flags = {"pipeline": 2} if name == "pipeline" else {}
    flags |= {"tensor_parallel": 2} if name.startswith("tensor_parallel") else {}
    precision = "fp16" if get(config, "fp16.enabled") is True else "bf16"
    _, plain = resolved(config, machine=GPUS, precision=precision, **flags)
    assert '"auto"' not in json.dumps(plain)
    assert {name: get(plain, f"{name}.enabled", False) for name in ("bf16", "fp16")} == {
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
    }
    assert plain["optimizer"]["type"] == "AdamW"


def test_no_offloading_may_be_written_as_null():
    _, plain = resolved({"zero_optimization": {"stage": 2, "offload_optimizer": None, "offload_param": None}})
    assert plain["zero_optimization"] == {"stage": 2}
    assert needed_ops(plain, CPU) == []


@pytest.mark.parametrize("block", [{"bf16": None}, {"optimizer": {"type": "AdamW", "params": None}}])
def test_other_objects_may_be_null(block):
    plain = resolved({**block, "zero_optimization": {"stage": 2}}, precision="bf16")[1]
    assert plain["bf16"] == {"enabled": True} and plain["optimizer"]["params"]["lr"] > 0


def test_the_batch_identity_is_solved_from_any_two():
    for flags in (
        {"micro_batch": 4, "gradient_accumulation_steps": 3},
        {"micro_batch": 4, "global_batch": 24},
        {"gradient_accumulation_steps": 3, "global_batch": 24},
    ):
        decision, plain = resolved("zero2", **flags)
        assert (decision.batch.micro, decision.batch.accumulation, decision.batch.total) == (4, 3, 24)
        assert plain["train_batch_size"] == 24
        assert plain["train_micro_batch_size_per_gpu"] == 4
        assert plain["gradient_accumulation_steps"] == 3


def test_the_batch_identity_counts_tensor_parallel_ranks_once():
    decision, plain = resolved("tensor_parallel", machine=GPUS, tensor_parallel=2, global_batch=16, micro_batch=2)
    assert decision.layout.dp == 4
    assert decision.batch.accumulation == 2
    assert "train_batch_size" not in plain  # DeepSpeed would count 8 data parallel ranks


def test_tensor_parallel_ranks_see_all_logits():
    whole = {"tensor_parallel": {"autotp_size": 2}}
    assert resolved(whole, tensor_parallel=2)[1]["tensor_parallel"]["vocab_parallel_lm_head"] is False
    (problem,) = refused({"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}}, tensor_parallel=2)
    assert problem.kind == "vocab-parallel"


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ({"global_batch": 30, "micro_batch": 4, "gradient_accumulation_steps": 2}, "--global-batch"),
        ({"global_batch": 7}, "6 or 8"),
        ({"global_batch": 10, "micro_batch": 4}, "divides 5"),
    ],
)
def test_batch_sizes_that_do_not_multiply_out(flags, hint):
    (problem,) = refused("zero2", **flags)
    assert problem.kind == "batch-size"
    assert hint in problem.hint


def test_a_value_in_both_that_differs_names_both_places():
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    problems = refused(config, micro_batch=2, lr=1e-3, optimizer="sgd")
    assert {p.where for p in problems} == {
        "--micro-batch and ds.json: train_micro_batch_size_per_gpu",
        "--lr and ds.json: optimizer.params.lr",
        "--optimizer and ds.json: optimizer.type",
    }


def test_a_value_only_in_the_json_is_the_runs():
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 5e-4, "weight_decay": 0.0}},
    }
    decision, plain = resolved(config)
    assert (decision.run.micro_batch, decision.run.gradient_clipping) == (4, 0.5)
    assert (decision.run.precision, decision.run.lr) == ("bf16", 5e-4)
    assert plain["optimizer"]["type"] == "Adam"


def test_a_cnn_has_the_defaults_of_a_cnn_where_none_are_named():
    decision, plain = resolved("zero2", facts=CNN, kind="cnn", global_batch=512)
    assert plain["optimizer"]["type"] == "SGD"
    named = {name: plain["optimizer"]["params"][name] for name in ("lr", "momentum", "weight_decay")}
    assert named == {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}
    assert (decision.run.optimizer, decision.run.lr) == ("sgd", 0.2)
    decision, _ = resolved("zero2", facts=CNN, kind="cnn", optimizer="adamw", weight_decay=0.3)
    assert (decision.run.lr, decision.run.weight_decay) == (1.9e-3, 0.3)
    _, plain = resolved("zero2_offload", facts=CNN, kind="cnn")
    assert plain["optimizer"]["type"] == "AdamW"  # DeepSpeed offloads Adam
    own = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    assert resolved(own, facts=CNN, kind="cnn")[1]["optimizer"]["params"] == {"lr": 0.5}


def test_old_names_are_read_as_deepspeed_reads_them():
    decision, _ = resolved({"bfloat16": {"enabled": True}, "zero_optimization": True})
    assert (decision.run.precision, decision.layout.zero_stage) == ("bf16", 1)
    decision, _ = resolved({"zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert decision.run.optimizer == "adamw"  # what is offloaded


def test_an_auto_that_nothing_fills():
    problems = refused({"zero_optimization": {"stage": 2, "sub_group_size": "auto"}})
    assert [p.where for p in problems] == ["ds.json: zero_optimization.sub_group_size"]


def test_no_cpp_op_on_the_cpu():
    for name in ("zero2", "zero3_offload"):
        _, plain = resolved(name)
        assert plain["optimizer"]["params"]["torch_adam"] is True
    assert plain["zero_force_ds_cpu_optimizer"] is False
    _, plain = resolved("zero2", machine=GPUS)
    assert "torch_adam" not in plain["optimizer"]["params"]


def test_buckets_follow_the_model():
    _, plain = resolved("zero2")
    assert plain["zero_optimization"]["reduce_bucket_size"] == LLAMA.parameters
    _, plain = resolved("zero3")
    assert plain["zero_optimization"]["stage3_param_persistence_threshold"] == 2560


def test_scheduler_blocks_are_filled_and_exclude_ours():
    block = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    _, plain = resolved({"scheduler": block})
    assert plain["scheduler"]["params"] == {"warmup_max_lr": 6.8e-4, "warmup_num_steps": 5}
    (problem,) = refused({"scheduler": block}, schedule="linear")
    assert problem.where == "--schedule and ds.json: scheduler"


TENSOR_AND_SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": 2, "ranks": 4}


@pytest.mark.parametrize(
    ("config", "flags", "word"),
    [
        ("zero2", {"pipeline": 2}, "stage 2"),
        ("zero2", {"pipeline": 2, "tensor_parallel": 2, "ranks": 4}, "stage 2"),
        ("zeropp_hpz", {**TENSOR_AND_SEQUENCE}, "is not supported: it was not verified against training on one device"),
        ("zenflow", {**TENSOR_AND_SEQUENCE}, "is not supported: it was not verified against training on one device"),
        ({"tensor_parallel": {"vocab_parallel_lm_head": True}}, {**TENSOR_AND_SEQUENCE}, "remove the key"),
        ("zero1", {**TENSOR_AND_SEQUENCE, "compile": True}, "leave it out"),
        ("zero1", {**TENSOR_AND_SEQUENCE, "sequence_parallel": 8, "ranks": 16}, "the 4 attention heads of each of 2"),
        ("zero1", {**TENSOR_AND_SEQUENCE, "optimizer": "muon"}, "full matrices"),
        ("zero1", {"tensor_parallel": 4, "ranks": 4}, "2 key-value heads"),
        ("zero1", {"sequence_parallel": 2, "seq_len": 33}, "does not divide --seq-len 33"),
        ("zero1", {"sequence_parallel": 2, "attn_implementation": "eager"}, "with eager attention"),
        ("zero2", {"ranks": 3, "tensor_parallel": 2}, "not a multiple"),
        ("pipeline", {"pipeline": 8, "ranks": 8}, "has 6"),
        ("zero2", {"precision": "fp16"}, "not supported"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, {}, "ignores offload_param"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, {}, "offloads nothing"),
        pytest.param(with_nvme_at("/proc/local_nvme"), {}, "not a folder", id="zero3_nvme"),
        ({"zero_optimization": {"stage": 7}}, {}, "allowed: 0, 1, 2, 3"),
        ("zero2", {"optimizer": "muon", "gradient_clipping": 1.0}, "--gradient-clipping 0"),
        ("pipeline", {"pipeline": 2, "optimizer": "muon"}, "find embedding and head"),
        ("zero2", {"momentum": 0.9}, "sets no momentum for AdamW"),
        ("zero2", {"optimizer": "adafactor"}, "use --ds-config zero0, or --optimizer adamw8bit"),
        ("zero0", {"optimizer": "adafactor", "pipeline": 2, "precision": "bf16"}, "use --precision fp32"),
        ("zero0", {"optimizer": "adafactor", "tensor_parallel": 2, "ranks": 2}, "use --tensor-parallel 1"),
        ("zero0", {"optimizer": "adafactor", "momentum": 0.9}, "sets no momentum for Adafactor"),
        ("zero2_offload", {"optimizer": "adamw8bit"}, "unpacks all states to float32"),
        ("zero3_offload", {"optimizer": "paged-adamw8bit"}, "remove offload_optimizer"),
        (
            {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
            {"optimizer": "adamw8bit"},
            "split 8-bit states in the middle of their blocks",
        ),
        ("zero2", {"loss": "mse"}, "leave --loss out"),
        ("zero2", {"mlp_chunk": 64, "compile": True}, "leave one of them out"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "both true"),
        ("zero1", {"lora": 8, "tensor_parallel": 2, "ranks": 2}, "silently drops the adapters"),
        ("zero1", {"freeze": ["lm_head"], "tensor_parallel": 2, "ranks": 2}, "trains all of them"),
        ("zero2", {"lora": 8, "freeze": ["lm_head"]}, "give --lora, or patterns"),
        ("zero2", {"lora_alpha": 16, "dora": True}, "--lora-alpha, --dora without --lora"),
        ("zero2", {"lora": 8, "optimizer": "muon"}, "two factors"),
        ("zero2", {"lora": 8, "lora_dropout": 0.1, "mlp_chunk": 64}, "another dropout mask"),
        ("zero2", {"quantize": "nf4"}, "--quantize nf4 without --lora"),
        ("zero3", {"lora": 8, "quantize": "int8"}, "a second reference to the full weight"),
        pytest.param(with_nvme_at("/tmp"), {"lora": 8, "quantize": "nf4"}, "of the training precision", id="nf4_nvme"),
        ("zero2", {"lora": 8, "quantize": "int8", "dora": True}, "--quantize int8 with --dora"),
        ("zero3", {"lora": 8, "quantize": "nf4", "dora": True}, "the norm of full weights"),
        ("zero2", {"lora": 8, "double_quant": True}, "--double-quant without --quantize nf4"),
        ("zenflow", {"train": ["lm_head"]}, "is not supported: it was not verified against training on one device"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(config, flags, word):
    assert any(word in p.message + p.hint for p in refused(config, **flags))


MIXTRAL = replace(LLAMA, model_type="mixtral", experts=8)
EXPERTS = {"facts": MIXTRAL, "ranks": 4, "expert_parallel": 2}


@pytest.mark.parametrize(
    ("config", "changed", "word"),
    [
        ("zero0", {}, "averages the gradient norm"),
        ("zero3", {"tensor_parallel": 2}, "only counts the experts of the first tensor rank"),
        ("pipeline", {"pipeline": 2, "tensor_parallel": 2}, "leave --tensor-parallel at 1"),
        ("pipeline", {"pipeline": 2, "expert_parallel": 4}, "does not divide the 2 data and sequence parallel ranks"),
        ("zero1", {"expert_parallel": 3, "ranks": 6, "facts": MIXTRAL}, "allowed: 1, 2, 4, 8"),
        ("zero1", {"expert_parallel": 8}, "does not divide the 4 data and sequence parallel ranks"),
        ("zero1", {"optimizer": "muon"}, "muon with --expert-parallel"),
        ("zero1", {"optimizer": "adamw8bit"}, "splits the parameter groups of experts only"),
        ("zero1", {"facts": LLAMA}, "mixtral"),
        ("zeropp_hpz", {}, "leave out --expert-parallel"),
        ({"expert_parallel": {"enabled": True, "top_k": 1}}, {}, "remove the key"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, {}, "make them equal"),
    ],
)
def test_spread_experts_that_would_train_wrongly_are_refused(config, changed, word):
    assert any(word in p.message + p.hint for p in refused(config, **EXPERTS | changed))


def test_experts_are_spread_by_zerofit_itself():
    """DeepSpeed sees neither the degree nor the batch's identity, by a flag or by the JSON's own words."""
    block = {"expert_parallel": {"enabled": True, "autoep_size": 2}, "zero_optimization": {"stage": 2}}
    for config, flags in (("zero2", EXPERTS), (block, {"facts": MIXTRAL, "ranks": 4})):
        decision, plain = resolved(config, **flags)
        assert (decision.layout.ep, decision.layout.dp, decision.run.expert_parallel) == (2, 4, 2)
        assert not {"train_batch_size", "expert_parallel"} & set(plain)
    switched_off = {"expert_parallel": {"enabled": False, "autoep_size": 2}}
    assert resolved(switched_off, facts=MIXTRAL, ranks=4)[0].layout.ep == 1


def test_mlps_in_tiles_are_those_that_map_each_token_by_itself():
    resolved("zero2", mlp_chunk=64)
    for facts in (replace(LLAMA, model_type="mixtral"), replace(LLAMA, model_type="gpt2"), CNN):
        (problem,) = refused("zero2", facts=facts, mlp_chunk=64)
        assert problem.where == "--mlp-chunk" and "llama" in problem.hint


def test_checkpoints_on_the_host_by_flag_or_by_json():
    for config, flags in (("zero2", {"activation_offload": True}), ("activation_checkpointing", {})):
        run = resolved(config, **flags)[0].run
        assert run.activation_checkpointing and run.activation_offload
    assert not resolved("zero2", activation_checkpointing=True)[0].run.activation_offload


@pytest.mark.parametrize("flags", [{"tensor_parallel": 2}, {"activation_offload": True}, {"compile": True}])
def test_selective_checkpointing_is_for_data_parallel_ranks_and_pipelines(flags):
    run = resolved("zero2", ranks=2, activation_checkpointing="selective")[0].run
    assert run.activation_checkpointing == "selective"
    (problem,) = refused("zero2", ranks=2, facts=LLAMA, activation_checkpointing="selective", **flags)
    assert "selective" in problem.message


def test_with_more_than_one_dimension_the_groups_are_zerofits():
    """DeepSpeed sees one data axis, of data x sequence ranks, and splits no layer itself."""
    decision, plain = resolved("tensor_parallel", pipeline=2, tensor_parallel=2, ranks=8)
    assert decision.layout.combined
    assert not {"train_batch_size", "tensor_parallel", "sequence_parallel_size"} & set(plain)
    assert plain["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False}
    facts = replace(LLAMA, attention_heads=8, kv_heads=8)
    _, plain = resolved("sequence_parallel", facts=facts, **TENSOR_AND_SEQUENCE)
    assert not {"train_batch_size", "tensor_parallel", "sequence_parallel_size"} & set(plain)


DUAL = {"pipeline": 2, "pipeline_schedule": "dualpipev", "ranks": 4}


def test_dualpipev_fills_its_parts_and_sends_whole_activations():
    decision, plain = resolved("pipeline", tensor_parallel=2, global_batch=8, **DUAL)
    assert (decision.batch.micro, decision.batch.accumulation) == (2, 4)
    assert plain["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False}
    assert resolved("pipeline", **DUAL)[0].batch.accumulation == 4


@pytest.mark.parametrize(
    ("config", "flags", "knob"),
    [
        ("pipeline", {"pipeline": 1}, "--pipeline 2"),
        ("zero0", {}, "stage 1"),
        ("pipeline", {"gradient_accumulation_steps": 3}, "--gradient-accumulation-steps 4"),
        ({"zero_optimization": {"stage": 1}, "pipeline": {"grad_partitioned": True}}, {"tensor_parallel": 2}, "remove"),
        ("pipeline", {"compile": True}, "leave one of them out"),
        ("pipeline", {"facts": replace(LLAMA, layers=3)}, "leave --pipeline-schedule out"),
        ("pipeline", {"facts": replace(LLAMA, layers=6), "pipeline": 4}, "use --pipeline 3 or less"),
    ],
)
def test_what_dualpipev_does_not_take(config, flags, knob):
    (problem,) = refused(config, **{**DUAL, **flags})
    assert knob in problem.hint


def test_beside_another_dimension_tensor_parallelism_follows_transformers_plan():
    bert = replace(LLAMA, model_type="bert")
    resolved("zero1", facts=bert, tensor_parallel=2)
    (problem,) = refused("pipeline", facts=bert, pipeline=2, tensor_parallel=2, ranks=4)
    assert "bert" in problem.message
    assert "llama" in problem.hint


def test_key_value_heads_are_repeated_where_sequence_ranks_outnumber_them():
    resolved("zero1", sequence_parallel=4, ranks=4)  # 8 heads, 2 key-value heads
    resolved("zero1", **TENSOR_AND_SEQUENCE)
    assert "allowed: 1, 2, 3, 6" in refused("zero1", facts=SIX, sequence_parallel=4, ranks=4)[0].hint


SIX = replace(LLAMA, attention_heads=12, kv_heads=6)


def test_a_cnn_has_no_heads_to_split():
    problems = refused("zero1", facts=CNN, tensor_parallel=2)
    assert "does not have" in problems[0].message
    assert "Ulysses" in refused("zero1", facts=CNN, sequence_parallel=2)[0].message


def test_more_ranks_than_gpus():
    assert "one GPU per rank" in refused("zero2", machine=GPUS, ranks=16)[0].message


@pytest.mark.parametrize(("text", "place"), [('{"a": 1,\n "b": }', ":2:7"), ("[1]", "")])
def test_json_that_does_not_parse(tmp_path, text, place):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_document(path)
    assert error.value.problems[0].where == f"{path}{place}"


def test_an_unknown_name_offers_the_nearest():
    with pytest.raises(UserError) as error:
        find_config("zero2_ofload")
    assert "zero2_offload" in error.value.problems[0].hint


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"train_batch_size": "32"}, "train_batch_size"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"gradient_clipping": -1}, "gradient_clipping"),
        ({"bf16": True}, "bf16"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled"),
        ({"optimizer": "AdamW"}, "optimizer"),
        ({"optimizer": {"type": "Adam", "params": "auto"}}, "optimizer.params"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}, "optimizer.params.lr"),
        ({"scheduler": {"type": "WarmupLR", "params": "auto"}}, "scheduler.params"),
        ({"tensor_parallel": {"autotp_size": -1}}, "tensor_parallel.autotp_size"),
        ({"zero_optimization": 2}, "zero_optimization"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, "zero_optimization.offload_optimizer"),
    ],
)
def test_values_of_wrong_types_and_ranges(config, path):
    (problem,) = refused(config)
    assert problem.where.startswith("ds.json:") and problem.where.endswith(f": {path}")
    assert "allowed" in problem.message or problem.kind in ("auto-unfilled", "number-as-string")


def test_a_precision_that_the_json_switches_off():
    (problem,) = refused({"bf16": {"enabled": False}}, precision="bf16")
    assert problem.where == "--precision and ds.json: bf16.enabled"


@pytest.mark.parametrize(
    ("machine", "config", "precision"),
    [
        (CPU, {}, "fp32"),
        (GPUS, {}, "bf16"),
        (GPUS, {"bf16": {"enabled": "auto"}}, "bf16"),
        (replace(GPUS, bf16=False), {}, "fp16"),
        (GPUS, {"fp16": {"enabled": False}}, "fp32"),
        (GPUS, {"fp16": {"enabled": True}}, "fp16"),
        (GPUS, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "fp32"),
    ],
)
def test_the_precision_of_a_run_that_names_none(machine, config, precision):
    _, plain = resolved(config, machine=machine)
    assert [name for name in ("bf16", "fp16") if get(plain, f"{name}.enabled") is True] == [
        name for name in ("bf16", "fp16") if name == precision
    ]


def test_an_optimizer_block_keeps_what_it_leaves_out():
    _, plain = resolved({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, machine=GPUS)
    assert plain["optimizer"]["params"] == {"lr": 0.1}
    _, plain = resolved({"optimizer": {"type": "Adam", "params": {"lr": "auto", "weight_decay": "auto"}}}, machine=GPUS)
    assert plain["optimizer"]["params"] == {"lr": 1.4e-3, "weight_decay": 0.01}


def test_a_resolved_run_with_a_scheduler_block_can_be_fed_back():
    block = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
    decision, _ = resolved(block)
    again = decision.run.model_dump(exclude={"ds_config"})
    assert resolved(block, **{k: v for k, v in again.items() if v is not None})[0].run == decision.run


def test_an_odd_parameter_count_gets_an_even_bucket():
    from dataclasses import replace

    _, plain = resolved("zero2", facts=replace(LLAMA, parameters=7_000_001))
    assert plain["zero_optimization"]["allgather_bucket_size"] == 7_000_002


def test_tensor_parallelism_is_for_models_that_were_tried():
    from dataclasses import replace

    problems = refused("tensor_parallel", facts=replace(LLAMA, model_type="gpt2"), tensor_parallel=2)
    assert "bert, llama" in problems[0].hint
