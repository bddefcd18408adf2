"""Trainings on conversations: those of plain PyTorch, one conversation at a time, whatever the layout."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.data.chats import TEMPLATES, unmarked, write_chats, write_tokenizer
from tests.train.reference import Plan, relative_difference, sample_order
from tests.train.small import LLAMA_SIZES
from tests.train.test_agreement import load
from tests.train.test_restore import numbers, same, state
from zerofit.app.inference import evaluate
from zerofit.data.opening import open_data
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run

LENGTH, BATCH, STEPS = 48, 4, 5
ARGS = {**LLAMA_SIZES, "vocab_size": 400}


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("chats")
    (folder / "template.jinja").write_text(unmarked(TEMPLATES["chatml"]))
    return {
        "model": "llama-tiny",
        "model_args": ARGS,
        "data": f"jsonl:{write_chats(folder / 'chats.jsonl', 100)}",
        "tokenizer": str(write_tokenizer(folder / "tokenizer")),
        "chat_template": folder / "template.jinja",
        "seq_len": LENGTH,
        "global_batch": BATCH,
        "steps": STEPS,
        "schedule": "constant",
        "warmup_steps": 0,
        "optimizer": "sgd",
        "lr": 0.1,
        "gradient_clipping": 0.5,
        "weight_decay": 0.0,
    }


@pytest.fixture(scope="module")
def alone(options):
    """Losses and weights of plain PyTorch, which sees one conversation at a time."""

    def train(packing: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        fields = {name: options[name] for name in ("data", "tokenizer", "chat_template", "seq_len")}
        data = open_data(Run(**fields, packing=packing), "causal-lm", LENGTH, Reporter())
        torch.manual_seed(0)
        model: Any = build(find("llama-tiny"), replace(data.inputs, packed=False), ARGS).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plan = Plan("llama-tiny", data.inputs, ARGS, lambda *_: None, len(data.train), global_batch=BATCH)
        losses = []
        for step in range(STEPS):
            rows = sample_order(plan, range(step * BATCH, (step + 1) * BATCH))
            batch = data.train.batch(rows, rows)
            total, targets = torch.zeros(()), int((batch["labels"] >= 0).sum())
            for place, row in enumerate(rows):
                at = 0
                for places in data.train.lengths(row):
                    ids, labels = (batch[name][place, at : at + places] for name in ("inputs", "labels"))
                    total += functional.cross_entropy(model(input_ids=ids[None]).logits[0], labels, reduction="sum")
                    at += places
            optimizer.zero_grad()
            (total / targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(total.item() / targets)
        return losses, model.state_dict()

    return train


LAYOUTS = {
    "stage 2": {"ds_config": "zero2"},
    "stage 3, checkpointing": {"ds_config": "zero3", "activation_checkpointing": True},
    "tensor": {"ds_config": "zero1", "tensor_parallel": 2},
    "unpacked": {"packing": False},
    "unpacked pipeline": {"packing": False, "pipeline": 2, "micro_batch": 2},
    "unpacked sequence": {"packing": False, "sequence_parallel": 2, "ds_config": "zero2"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_each_conversation_alone(pools, tmp_path, options, alone, layout):
    how = LAYOUTS[layout]
    trained = pools(2).train(tmp_path / "run", **options | how)
    losses, weights = alone(how.get("packing", True))
    np.testing.assert_allclose(trained.losses, losses, rtol=1e-5)
    assert relative_difference(load(trained), weights) < 1e-5
    assert trained.result["conversations"]["truncated"] == trained.steps[0]["truncated"] > 0


def test_going_on_is_bit_for_bit_and_eval_is_the_run_s(pools, tmp_path, options):
    pool = pools(2)
    whole = pool.train(tmp_path / "whole", save_every=3, **options)
    checkpoint = str(tmp_path / "whole/checkpoints/step-00000003")
    resumed = pool.train(tmp_path / "resumed", save_every=STEPS, resume=checkpoint, **options)
    assert numbers(resumed) == numbers(whole)[3:]
    entries, other = state(whole, STEPS), state(resumed, STEPS)
    assert [name for name in entries if not same(entries[name], other[name])] == []
    assert (whole.folder.model / "chat_template.jinja").read_text() == unmarked(TEMPLATES["chatml"])
    scores = evaluate(whole.folder.path)
    assert scores.loss == pytest.approx(whole.result["eval"]["loss"], rel=1e-6)
    assert scores.loss == pytest.approx(evaluate(whole.folder.path, packing=False).loss, rel=1e-6)
    other_template = tmp_path / "other.jinja"
    other_template.write_text(TEMPLATES["tags"])
    changed = options | {"chat_template": other_template, "output": tmp_path / "whole"}
    with pytest.raises(UserError, match="--chat-template"):
        pool.train(**changed)


@pytest.mark.parametrize(
    ("how", "word"),
    [({"pipeline": 2}, "--pipeline 2"), ({"sequence_parallel": 2}, "--sequence-parallel 2")],
)
def test_layouts_that_would_mix_conversations_are_refused(pools, tmp_path, options, how, word):
    with pytest.raises(UserError) as caught:
        pools(2).train(tmp_path / "run", **options | how)
    (problem,) = caught.value.problems
    assert problem.kind == "packing" and word in problem.message and "--no-packing" in problem.hint


def test_models_without_a_place_for_it_are_refused(pools, tmp_path, options):
    how = {"model": "mamba-130m", "model_args": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 400}}
    with pytest.raises(UserError, match="separate conversations"):
        pools(2).train(tmp_path / "run", **options | how)


def test_records_of_another_version_go_on(tmp_path, pools):
    """A run folder that knows nothing of conversations is that of the same run."""
    how = {"model": "mlp", "data": "digits", "steps": 2, "micro_batch": 8, "save_every": 1}
    first = pools(2).train(tmp_path / "run", **how)
    kept = json.loads(first.folder.run.read_text())
    del kept["packing"], kept["chat_template"]
    first.folder.run.write_text(json.dumps(kept))
    again = pools(2).train(tmp_path / "run", **{**how, "steps": 3})
    assert again.result["resumed_from"].endswith("step-00000002")
