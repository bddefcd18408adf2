"""LoRA and frozen weights train as plain PyTorch with peft on one process does, and are taken up again elsewhere."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import is_tensor, nn
from torch.utils._pytree import tree_leaves

from tests.train.reference import Plan, follow, quantize_linears, relative_difference, text_windows, write_corpus
from zerofit.checkpoint import safe_load
from zerofit.checkpoint.export import export
from zerofit.checkpoint.store import read_manifest
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs

STEPS, SEQ_LEN, RANK = 10, 32, 4
EXACT = 1e-5  # relative, fp32
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 260, "n_positions": 64}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 256, "eos_token_id": 256}
ADAPTERS = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A small pretrained Llama and what it is trained on."""
    folder = tmp_path_factory.mktemp("base")
    corpus = write_corpus(folder / "text.txt")
    count, windows = text_windows(corpus, SEQ_LEN)
    inputs = TextInputs(vocab_size=260, seq_len=SEQ_LEN)
    torch.manual_seed(1)
    base = build(find("llama-tiny"), inputs, LLAMA)
    base.save_pretrained(folder / "llama")
    return Plan(str(folder / "llama"), inputs, {}, windows, count, global_batch=8, steps=STEPS, lr=0.01)


@pytest.fixture(scope="module")
def followed(plan: Plan):
    """Trainings on one process, each done once."""
    done = {}

    def get(change, **how):
        key = (change, json.dumps(how))
        if key not in done:
            done[key] = follow(plan, partial(change, **how))
        return done[key]

    return get


def adapt(model: nn.Module, **more) -> None:
    """What a user of peft writes."""
    torch.manual_seed(0)
    peft.get_peft_model(model, peft.LoraConfig(**{**ADAPTERS, **more}))


def freeze(model: nn.Module, patterns: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(patterns in name)


def options(plan: Plan, **more) -> dict:
    data = {"data": f"text:{Path(plan.model).parent}/text.txt", "seq_len": SEQ_LEN, "tokenizer": "bytes"}
    how = {"steps": STEPS, "lr": plan.lr, "schedule": "constant", "warmup_steps": 0, "eval_samples": 8}
    return {"model": plan.model, "model_args": plan.args, "global_batch": 8, **data, **how, "lora": RANK, **more}


LAYOUTS = {
    "stage 0": {"ds_config": "zero0"},
    "stage 2": {"ds_config": "zero2"},
    "stage 3": {"ds_config": "zero3", "activation_checkpointing": True},
    "full offload": {"ds_config": "zero3_offload"},
    "pipeline": {"pipeline": 2, "micro_batch": 2},
    "sequence": {"sequence_parallel": 2, "ds_config": "zero1"},
}


def follows(trained, plan: Plan, losses, norms, weights) -> peft.PeftModel:
    """Compare a run with what peft's own training gave; return the trained model, as peft loads it."""
    np.testing.assert_allclose(trained.losses, losses, rtol=EXACT)
    np.testing.assert_allclose([step["grad_norm"] for step in trained.steps], norms, rtol=EXACT)
    base = transformers.AutoModelForCausalLM.from_pretrained(plan.model)
    loaded = peft.PeftModel.from_pretrained(base, trained.folder.model)
    adapters = {name: tensor for name, tensor in weights.items() if "lora_" in name}
    assert relative_difference(loaded.base_model.model.state_dict(), adapters) < 10 * EXACT
    return loaded


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.versions] if name == "stage 3" else []) for name in LAYOUTS]
)
def test_adapters_train_as_pefts_do(pools, tmp_path, plan, followed, layout):
    trained = pools(2).train(tmp_path / "run", **options(plan, **LAYOUTS[layout]))
    follows(trained, plan, *followed(adapt))


def quantize(model: nn.Module, kind: str) -> None:
    """What a user of peft and bitsandbytes writes."""
    quantize_linears(model, kind)
    adapt(model)


QUANTIZED = {
    "stage 2": ("nf4", {"ds_config": "zero2"}),
    "stage 3": ("nf4", {"ds_config": "zero3", "activation_checkpointing": True}),
    "8 bits": ("int8", {"ds_config": "zero1"}),
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_adapters_beside_quantized_weights_train_as_pefts_do(pools, tmp_path, plan, followed, case):
    pytest.importorskip("bitsandbytes")
    kind, layout = QUANTIZED[case]
    trained = pools(2).train(tmp_path / "run", **options(plan, **layout, quantize=kind))
    loaded = follows(trained, plan, *followed(quantize, kind=kind))
    merged = export(trained.folder.model, tmp_path / "merged", merge=True).out
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert relative_difference(whole, loaded.merge_and_unload().state_dict()) < EXACT


KEPT = {"save_every": "5"}
TAKEN_UP = {
    "stage 2": ({"ds_config": "zero2"}, {"ds_config": "zero2"}),
    "stage 3": ({"ds_config": "zero3"}, {"ds_config": "zero3"}),
    "pipeline": ({"pipeline": 2, "micro_batch": 2}, {"pipeline": 2, "micro_batch": 2}),
    "4 bits": ({"ds_config": "zero2", "quantize": "nf4"}, {"ds_config": "zero2", "quantize": "nf4"}),
    "from stage 3 to a pipeline": ({"ds_config": "zero3"}, {"pipeline": 2, "micro_batch": 2}),
}


@pytest.mark.parametrize("case", TAKEN_UP)
def test_going_on_from_a_checkpoint_is_going_on(pools, tmp_path, plan, case):
    if case == "4 bits":
        pytest.importorskip("bitsandbytes")
    before, after = (options(plan, lora_dropout=0.1 if case == "stage 2" else 0.0, **how) for how in TAKEN_UP[case])
    whole = pools(2).train(tmp_path / "whole", **before, **KEPT)
    half = whole.folder.checkpoints / "step-00000005"
    went_on = pools(2).train(tmp_path / "on", **after, **KEPT, resume=str(half))
    ours, theirs = (load_file(one.folder.model / "adapter_model.safetensors") for one in (went_on, whole))
    if before == after:
        assert went_on.losses == whole.losses[5:]
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    else:
        np.testing.assert_allclose(went_on.losses, whole.losses[5:], rtol=EXACT)
        assert relative_difference(ours, theirs) < 1e-4
    trained = sum(tensor.numel() for tensor in theirs.values())
    whole_model = sum(tensor.numel() for tensor in load_file(f"{plan.model}/model.safetensors").values())
    assert read_manifest(half).frozen.parameters == whole_model
    files = [safe_load.load(file) for file in (half / "state").glob("*.pt")]
    saved = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() // 4 for t in tree_leaves(files) if is_tensor(t)}
    assert sum(saved.values()) < 4.5 * trained, "frozen weights are in the checkpoint"  # weights, masters, two moments
