"""Every way to train gives the losses and the weights of plain PyTorch in float32 (tests/train/reference.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.train.reference import Plan, digits, follow, relative_difference, text_windows, train, write_corpus
from zerofit.config.ds_json import read_for_run
from zerofit.config.validate import TENSOR_PARALLEL_TYPES
from zerofit.data.loader import Order, eval_indices
from zerofit.data.opening import open_data
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs, TextInputs
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run

STEPS = 6
SEQ_LEN = 32
MaskedLM = transformers.AutoModelForMaskedLM
EXACT = 1e-4  # relative, fp32: sums in another order
TINY_LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 260, "n_positions": 64}
TINY_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TINY_BERT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_BERT |= {"vocab_size": 260, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TINY_VIT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_VIT |= {"patch_size": 4}

SGD = {"optimizer": "sgd", "lr": 0.02}

RUN = {"steps": STEPS, "schedule": "constant", "warmup_steps": 0}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture(scope="module")
def references(corpus: Path):
    """Plans by name and their results, each trained once."""
    count, windows = text_windows(corpus, SEQ_LEN)
    text = TextInputs(vocab_size=260, seq_len=SEQ_LEN, mask_id=257)
    masked_count, masked_samples = masked(corpus)
    causal = Plan("llama-tiny", text, TINY_LLAMA, windows, count, global_batch=8, steps=STEPS)
    count, small = digits(image_size=8)
    images = ImageInputs(channels=1, size=8, classes=10)
    vision = Plan("lenet", images, {}, small, count, global_batch=8, steps=STEPS)
    # batch norm over a handful of values makes training chaotic: rounding would decide it
    count, larger = digits(image_size=16)
    images = ImageInputs(channels=1, size=16, classes=10)
    large = Plan(
        "resnet18-small", images, {"width": 8}, larger, count, global_batch=32, steps=STEPS, optimizer="sgd", lr=1e-4
    )
    plans = {
        "llama": causal,
        "llama-sgd": replace(causal, **SGD),
        "gpt2": replace(causal, model="gpt2", args=TINY_GPT2),
        "lenet": vision,
        "resnet": replace(large, parts=4, ranks=2),
        "resnet-whole": large,
        "bert": replace(causal, model="bert-base", args=TINY_BERT, samples=masked_samples, count=masked_count),
        "vit": replace(vision, model="vit-b-16-hf", args=TINY_VIT),
    }
    trained: dict[str, tuple] = {}

    def get(name: str):
        if name not in trained:
            trained[name] = train(plans[name])
        return trained[name]

    return plans, get


# Masked text comes from zerofit, as digits do: tests/data checks the masking. What is checked here is that the engine
# trains on it like plain PyTorch.


def masked(corpus: Path):
    data = open_data(Run(data=f"text:{corpus}"), "masked-lm", SEQ_LEN, Reporter()).train

    def samples(indices: np.ndarray, positions: range):
        batch = data.batch(indices, Order(len(data), seed=0).keys(positions.start, positions.stop))
        return batch["inputs"], batch["labels"]

    return len(data), samples


def agree(trained, reference, tolerance: float = EXACT) -> None:
    losses, weights = reference
    assert len(trained.losses) == STEPS
    np.testing.assert_allclose(trained.losses, losses, rtol=tolerance)
    assert relative_difference(load(trained), weights) < tolerance


def load(trained) -> dict[str, torch.Tensor]:
    """The run folder's model as its users load it."""
    folder = trained.folder.model
    if not (folder / "config.json").exists():
        return load_file(folder / "model.safetensors")
    auto = transformers.AutoModelForImageClassification
    if trained.job.facts.task != "image":
        auto = transformers.AutoModelForCausalLM if trained.job.facts.task == "causal-lm" else MaskedLM
    model, info = auto.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.state_dict()


def options(plan: Plan, corpus: Path, **more) -> dict:
    data = f"text:{corpus}" if isinstance(plan.inputs, TextInputs) else "digits"
    seq_len = {"seq_len": SEQ_LEN} if isinstance(plan.inputs, TextInputs) else {}
    how = {
        "optimizer": plan.optimizer,
        "lr": plan.lr,
        "global_batch": plan.global_batch,
        "model": plan.model,
        "model_args": plan.args,
        "data": data,
    }
    size = {"image_size": plan.inputs.size} if isinstance(plan.inputs, ImageInputs) else {}
    return RUN | how | seq_len | size | more


def in_all_versions(cases, chosen):
    """Cases, of which the chosen ones run with the newest torch, DeepSpeed, transformers and accelerate too."""
    return [pytest.param(case, marks=[pytest.mark.versions] if case in chosen else []) for case in cases]


@pytest.mark.parametrize("how", in_all_versions([(1, 3), (2, 0), (2, 1), (2, 2), (2, 3)], [(1, 3), (2, 3)]))
def test_zero_stages(pools, tmp_path, corpus, references, how):
    (plans, get), (ranks, stage) = references, how
    trained = pools(ranks).train(tmp_path / "run", **options(plans["llama"], corpus, ds_config=f"zero{stage}"))
    agree(trained, get("llama"))


MODELS = [("gpt2", 2), ("resnet", 2), *((name, 3) for name in ("gpt2", "bert", "lenet", "resnet", "vit"))]


@pytest.mark.parametrize("how", in_all_versions(MODELS, [("bert", 3), ("vit", 3)]), ids=str)
def test_models(pools, tmp_path, corpus, references, how):
    (plans, get), (name, stage) = references, how
    trained = pools(2).train(tmp_path / "run", **options(plans[name], corpus, ds_config=f"zero{stage}"))
    agree(trained, get(name))


FOUR = [{"pipeline": 2, "tensor_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": 2, "ds_config": "zero3"}]


@pytest.mark.parametrize("how", [{"ds_config": "zero1"}, {"ds_config": "zero3"}, {"pipeline": 2}, *FOUR], ids=str)
def test_weights_out_of_a_pretrained_folder(pools, tmp_path, corpus, references, how):
    plans, get = references
    plan = replace(plans["llama"], model=str(tmp_path / "pretrained"), args={})
    torch.manual_seed(plan.seed)
    weights: Any = build(find("llama-tiny"), plan.inputs, TINY_LLAMA)
    weights.save_pretrained(plan.model)
    trained = pools(4 if how in FOUR else 2).train(tmp_path / "run", **options(plan, corpus, tokenizer="bytes", **how))
    agree(trained, get("llama"))


LONG = {"loss_chunk": 20, "mlp_chunk": 6, "activation_offload": True}  # alone and tied: benchmarks/layouts.py
LAYOUTS = {
    "accumulation": {"ranks": 1, "micro_batch": 2, "gradient_accumulation_steps": 4},
    "accumulation on 2": {"ranks": 2, "micro_batch": 2, "gradient_accumulation_steps": 2, "ds_config": "zero3"},
    "checkpointing": {"ranks": 2, "activation_checkpointing": True},
    "checkpointing at 3": {"ranks": 2, "activation_checkpointing": True, "ds_config": "zero3"},
    "optimizer offload": {"ranks": 2, "ds_config": "zero2_offload"},
    "full offload": {"ranks": 2, "ds_config": "zero3_offload"},
    "pipeline": {"ranks": 2, "pipeline": 2, "micro_batch": 2},
    "pipeline by time": {"ranks": 2, "pipeline": 2, "micro_batch": 2, "pipeline_balance": "time"},
    "pipeline, checkpointing": {"ranks": 2, "pipeline": 2, "micro_batch": 2, "activation_checkpointing": True},
    "tensor, stage 0": {"ranks": 2, "tensor_parallel": 2, "ds_config": "zero0"},
    "tensor, stage 1": {"ranks": 2, "tensor_parallel": 2, "ds_config": "zero1"},
    "tensor, stage 2": {"ranks": 2, "tensor_parallel": 2, "ds_config": "zero2"},
    "sequence": {"ranks": 2, "sequence_parallel": 2, "ds_config": "zero1"},
    "sequence, stage 0": {"ranks": 2, "sequence_parallel": 2, "ds_config": "zero0"},
    "sequence, stage 2": {"ranks": 2, "sequence_parallel": 2, "ds_config": "zero2"},
    "sequence, stage 3": {"ranks": 2, "sequence_parallel": 2, "ds_config": "zero3"},
    "long sequences": {"ranks": 2, **LONG, "ds_config": "zero2"},
    "long sequences, sequence parallel": {"ranks": 2, **LONG, "sequence_parallel": 2, "ds_config": "zero3"},
    "long sequences, pipeline": {"ranks": 2, **LONG, "pipeline": 2, "micro_batch": 2},
    "DP2 x PP2": {"ranks": 4, "pipeline": 2, "micro_batch": 2},
    "DP2 x TP2": {"ranks": 4, "tensor_parallel": 2, "ds_config": "zero1"},
}


@pytest.mark.parametrize(
    "layout", in_all_versions(LAYOUTS, ["full offload", "pipeline", "tensor, stage 2", "sequence"])
)
def test_layouts(pools, tmp_path, corpus, references, layout):
    # SGD, since Adam would hide a gradient that is too large by a factor; offload is for Adam
    plans, get = references
    how, name = LAYOUTS[layout], "llama" if "offload" in layout else "llama-sgd"
    trained = pools(how["ranks"]).train(tmp_path / "run", **options(plans[name], corpus, **how))
    agree(trained, get(name))
    assert all(step["grad_norm"] > 0 for step in trained.steps)


# benchmarks/layouts.py has these in all combinations, on 8 and 16 ranks too
DIMENSIONS = {
    "PP2 x TP2": {"pipeline": 2, "tensor_parallel": 2, "activation_checkpointing": True},
    "PP2 x TP2, stage 0": {"pipeline": 2, "tensor_parallel": 2, "ds_config": "zero0"},
    "PP2 x SP2": {"pipeline": 2, "sequence_parallel": 2},
    "TP2 x SP2, stage 0": {"tensor_parallel": 2, "sequence_parallel": 2, "ds_config": "zero0"},
    "TP2 x SP2, stage 3": {"tensor_parallel": 2, "sequence_parallel": 2, "ds_config": "zero3"},
    "TP2 x SP2, stage 3, long sequences": {"tensor_parallel": 2, "sequence_parallel": 2, "ds_config": "zero3", **LONG},
    "PP4, stage 0": {"pipeline": 4, "ds_config": "zero0"},
    "PP2, DualPipeV": {"ranks": 2, "pipeline": 2, "pipeline_schedule": "dualpipev"},
    "PP2 x TP2, DualPipeV": {"pipeline": 2, "tensor_parallel": 2, "pipeline_schedule": "dualpipev", **LONG},
}


@pytest.fixture(scope="module")
def qwen(corpus: Path, tmp_path_factory: pytest.TempPathFactory):
    """A Qwen3 (norms of heads, tied embeddings, two heads for a key-value head), and its training on one process."""
    path = tmp_path_factory.mktemp("qwen3") / "config.json"
    shape = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.12}
    path.write_text(json.dumps({"model_type": "qwen3", **TINY_BERT, **shape, "tie_word_embeddings": True}))
    count, windows = text_windows(corpus, SEQ_LEN)
    text = TextInputs(vocab_size=260, seq_len=SEQ_LEN)
    plan = Plan(str(path), text, {}, windows, count, global_batch=8, steps=3, optimizer="sgd", lr=0.3, clip=0.5)
    return plan, follow(plan)


@pytest.mark.parametrize("layout", DIMENSIONS)
def test_more_than_one_dimension(pools, tmp_path, corpus, qwen, layout):
    plan, (losses, norms, weights) = qwen
    how = {"steps": plan.steps, "micro_batch": 2, "gradient_clipping": plan.clip, "eval_samples": 8}
    asked = options(plan, corpus, **{"ranks": 4} | DIMENSIONS[layout]) | how
    trained = pools(asked["ranks"]).train(tmp_path / "run", **asked)
    np.testing.assert_allclose(trained.losses, losses, rtol=1e-5)
    np.testing.assert_allclose([step["grad_norm"] for step in trained.steps], norms, rtol=1e-6)
    assert relative_difference(load(trained), weights) < 1e-6


def test_dualpipev_evaluates_in_rounds(pools, tmp_path, corpus, qwen):
    """Seven micro batches where training accumulates four."""
    plan, _ = qwen
    how = {"pipeline": 2, "pipeline_schedule": "dualpipev", "micro_batch": 2, "steps": 1, "eval_samples": 14}
    trained = pools(2).train(tmp_path / "run", **options(plan, corpus, **how))
    model = transformers.AutoModelForCausalLM.from_pretrained(trained.folder.model, dtype="auto")
    valid = open_data(trained.job.run, "causal-lm", SEQ_LEN, Reporter()).valid
    batch = valid.batch(eval_indices(len(valid), 14), range(14))
    with torch.no_grad():
        logits = model(batch["inputs"]).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())
    assert trained.result["eval"]["loss"] == pytest.approx(float(loss), rel=1e-6)


# benchmarks/layouts.py has these at all stages, with Qwen3-MoE and on 4 ranks too
SPREAD = {
    "EP2, stage 1": {"ds_config": "zero1", "activation_checkpointing": True},
    "EP2, stage 3": {"ds_config": "zero3"},
    "SP2 x EP2, stage 2": {"ds_config": "zero2", "sequence_parallel": 2},
}


@pytest.fixture(scope="module")
def mixtral(corpus: Path, tmp_path_factory: pytest.TempPathFactory):
    """A Mixtral of four experts, and its training on one process, without the router's own loss."""
    path = tmp_path_factory.mktemp("mixtral") / "config.json"
    shape = {"num_key_value_heads": 2, "initializer_range": 0.12, "sliding_window": None}
    shape |= {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
    path.write_text(json.dumps({"model_type": "mixtral", **TINY_BERT, **shape}))
    count, windows = text_windows(corpus, SEQ_LEN)
    text = TextInputs(vocab_size=260, seq_len=SEQ_LEN)
    plan = Plan(str(path), text, {}, windows, count, global_batch=8, steps=3, optimizer="sgd", lr=0.1, clip=0.5)
    return plan, follow(plan)


def spread(pools, output: Path, corpus: Path, plan: Plan, **more):
    how = {"steps": plan.steps, "micro_batch": 2, "gradient_clipping": plan.clip, "eval_samples": 8}
    return pools(2).train(output, **options(plan, corpus, **how) | more)


@pytest.mark.parametrize("layout", in_all_versions(SPREAD, ["EP2, stage 3"]))
def test_spread_experts(pools, tmp_path, corpus, mixtral, layout):
    plan, (losses, norms, weights) = mixtral
    trained = spread(pools, tmp_path / "run", corpus, plan, expert_parallel=2, **SPREAD[layout])
    np.testing.assert_allclose(trained.losses, losses, rtol=1e-5)
    np.testing.assert_allclose([step["grad_norm"] for step in trained.steps], norms, rtol=1e-6)
    assert relative_difference(load(trained), weights) < 1e-6  # as transformers reads them
    for step in trained.steps:
        assert 0 <= step["expert_load_least"] <= 1 <= step["expert_load_most"] <= 2  # of four, two see a token


def test_the_routers_loss_is_the_same_where_experts_are_spread(pools, tmp_path, corpus, mixtral):
    plan = replace(mixtral[0], args={"router_aux_loss_coef": 0.5})
    whole, parts = (
        spread(pools, tmp_path / str(degree), corpus, plan, expert_parallel=degree, ds_config="zero1")
        for degree in (1, 2)
    )
    for key in ("loss", "router_loss", "grad_norm"):
        ours, theirs = ([step[key] for step in trained.steps] for trained in (parts, whole))
        np.testing.assert_allclose(ours, theirs, rtol=2e-6)
    assert whole.steps[0]["router_loss"] > 0.5


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_experts_on_the_stages_of_a_pipeline(pools, tmp_path, corpus, mixtral, schedule):
    """With the routers' loss, which is one of all stages' layers: here of each sample."""
    plan = replace(mixtral[0], args={"router_aux_loss_coef": 0.5, "num_hidden_layers": 4}, parts=8)
    losses, norms, weights = follow(plan)
    how = {"steps": plan.steps, "micro_batch": 1, "gradient_clipping": plan.clip, "eval_samples": 8}
    how |= {"pipeline": 2, "expert_parallel": 2, "pipeline_schedule": schedule}
    trained = pools(4).train(tmp_path / "run", **options(plan, corpus, **how))
    np.testing.assert_allclose(trained.losses, losses, rtol=1e-5)
    np.testing.assert_allclose([step["grad_norm"] for step in trained.steps], norms, rtol=1e-6)
    assert relative_difference(load(trained), weights) < 1e-6
    for step in trained.steps:
        assert 0 <= step["expert_load_least"] <= 1 <= step["expert_load_most"] <= 2
        assert 0.9 < step["router_loss"] < 1.5  # 1 where all experts get the same: half of the two that see a token


def test_a_stage_without_experts_is_refused(pools, tmp_path, corpus, mixtral):
    """DualPipeV's first stage has the embedding and the head of two layers."""
    how = {"steps": 1, "micro_batch": 1, "pipeline": 2, "expert_parallel": 2, "pipeline_schedule": "dualpipev"}
    problems = pools(4).fail(tmp_path / "run", **options(mixtral[0], corpus, **how))
    assert {problem["message"] for problem in problems} == {
        "stage 0 of --pipeline 2 has no layer with experts to spread"
    }


USUAL = {"gradient_accumulation_steps": 1}
DUAL = {"pipeline_schedule": "dualpipev", "gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("name", "how"), [*((name, USUAL) for name in ("gpt2", "bert", "lenet", "resnet-whole", "vit")), ("lenet", DUAL)]
)
def test_pipeline_of_models(pools, tmp_path, corpus, references, name, how):
    plans, get = references
    trained = pools(2).train(tmp_path / "run", **options(plans[name], corpus, pipeline=2, **how))
    agree(trained, get(name))


@pytest.mark.parametrize("model_type", TENSOR_PARALLEL_TYPES)
def test_tensor_parallel_of_models(pools, tmp_path, corpus, references, model_type):
    plans, _ = references
    path = tmp_path / "config.json"
    heads = {} if model_type == "bert" else {"num_key_value_heads": 2, "head_dim": 16}
    path.write_text(json.dumps({"model_type": model_type, **TINY_BERT, **heads}))
    name = "bert" if model_type == "bert" else "llama-sgd"
    plan = replace(plans[name], model=str(path), args={}, **SGD)
    how = {"tensor_parallel": 2, "ds_config": "zero1"}
    agree(pools(2).train(tmp_path / "run", **options(plan, corpus, **how)), train(plan))


def test_sgd(pools, tmp_path, corpus, references):
    plans, get = references
    trained = pools(2).train(tmp_path / "run", **options(plans["llama-sgd"], corpus))
    agree(trained, get("llama-sgd"))


@pytest.mark.parametrize("how", [{}, {"sequence_parallel": 2}, {"pipeline": 2}], ids=str)
def test_bf16_counts_the_slices_of_all_tensor_ranks(pools, tmp_path, corpus, qwen, how):
    plan, (losses, norms, _) = qwen
    ranks = 4 if how else 2
    how = {
        "steps": 2,
        "micro_batch": 2,
        "gradient_clipping": plan.clip,
        "precision": "bf16",
        "tensor_parallel": 2,
        **how,
    }
    trained = pools(ranks).train(tmp_path / "run", **options(plan, corpus, ds_config="zero0") | how)
    np.testing.assert_allclose([step["grad_norm"] for step in trained.steps], norms[:2], rtol=0.02)
    np.testing.assert_allclose(trained.losses, losses[:2], rtol=0.005)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_follows_fp32(pools, tmp_path, corpus, references, stage):
    """bf16 keeps 8 bits of each weight, activation and gradient: losses within 0.5 %, weights within 2 %."""
    plans, get = references
    how = {"precision": "bf16", "ds_config": f"zero{stage}"}
    trained = pools(2).train(tmp_path / "run", **options(plans["llama"], corpus, **how))
    losses, weights = get("llama")
    np.testing.assert_allclose(trained.losses, losses, rtol=0.005)
    assert relative_difference(load(trained), weights) < 0.02
    drops = np.array(trained.losses[0]) - np.array(trained.losses), losses[0] - np.array(losses)
    np.testing.assert_allclose(drops[0][4:], drops[1][4:], rtol=0.05)  # no first step lost, no learning rate off


FP16 = {"zero_optimization": {"stage": 0}, "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 4}}


@pytest.mark.parametrize("layout", ["0, sgd", "0, accumulation", "0, pipeline", "1", "3"])
def test_fp16_follows_fp32_whatever_the_loss_is_scaled_by(pools, tmp_path, corpus, references, monkeypatch, layout):
    """fp16 keeps 11 bits: losses within 0.2 %, gradient norms (clipped to 1) within 1 %, while the scale doubles."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)
    plans, _ = references
    stage, _, what = layout.partition(", ")
    more = {"accumulation": {"micro_batch": 2}, "pipeline": {"pipeline": 2, "micro_batch": 2}}.get(what, {})
    config = FP16 | {"zero_optimization": {"stage": int(stage)}}
    plan = plans["llama-sgd" if what == "sgd" else "llama"]
    trained = pools(2).train(tmp_path / "run", **options(plan, corpus, precision="fp16", ds_config=config) | more)
    losses, norms, _ = follow(plan)
    np.testing.assert_allclose(trained.losses, losses, rtol=0.002)
    np.testing.assert_allclose([step["grad_norm"] for step in trained.steps], norms, rtol=0.01)
    assert [step["skipped_steps"] for step in trained.steps] == [0] * STEPS
    assert trained.steps[-1]["loss_scale"] > trained.steps[0]["loss_scale"]


def test_nvme_offload(pools, tmp_path, corpus, references):
    plans, get = references
    config = json.dumps(read_for_run("zero3_nvme").config).replace("/local_nvme", str(tmp_path))
    trained = pools(2).train(tmp_path / "run", **options(plans["llama"], corpus, ds_config=json.loads(config)))
    agree(trained, get("llama"))
    assert (tmp_path / "zero_stage_3" / "optimizer").is_dir(), "nothing was written to the disk"
