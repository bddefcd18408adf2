"""Micro batches of each rank's own give the losses and weights of one process of plain PyTorch on the global batch."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.torch_version import TorchVersion

import zerofit as zf
from tests.train.own_models import Unequal
from zerofit.app.job.resolve import InputSource, resolve_job
from zerofit.config.batch import shared_out
from zerofit.data.loader import Order
from zerofit.data.opening import open_data
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.plan.layout import PlannedLayout
from zerofit.simulate.forecast.result import SimulatedRun
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import IGNORE_INDEX
from zerofit.spec.run import Run, RunRequest
from zerofit.spec.run_folder import Batch, Layout
from zerofit.train.loop import Loop
from zerofit.train.loss import weighted_cross_entropy

LR, MOMENTUM, SEED = 0.05, 0.9, 3
RUN = {"data": "digits", "image_size": 8, "optimizer": "sgd", "lr": LR, "momentum": MOMENTUM, "weight_decay": 0.0}
RUN |= {"schedule": "constant", "warmup_steps": 0, "gradient_clipping": 0.0, "seed": SEED}
OWN = {**RUN, "model": "tests.train.own_models:Unequal", "loss": "cross-entropy", "steps": 6, "eval_samples": 32}


def plain(model: nn.Module, global_batch: int, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """SGD of one process on whole global batches."""
    data = open_data(Run(**RUN), "image", None, Reporter()).train
    order, losses = Order(len(data), SEED), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for step in range(steps):
        indices = order.indices(step * global_batch, (step + 1) * global_batch)
        batch = data.batch(indices, indices)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def agree(trained, reference: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, weights = reference
    np.testing.assert_allclose(trained.losses, losses, atol=1e-6, rtol=0)
    found = load_file(trained.folder.model / "model.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=0)


def test_ignored_targets_of_unequal_micro_batches_count_for_nothing():
    """Ranks have 5 and 3 positions. 2 of rank 1 are ignored, so its weight of 2/6 times 3 positions is 1."""
    batch = Batch(micro=5, accumulation=1, dp=2, by_rank=(5, 3))
    job = SimpleNamespace(batch=batch, layout=Layout(dp=2), samples_after=lambda step: 0)
    data = SimpleNamespace(train=SimpleNamespace(targets=lambda indices: 6))
    loop: Any = SimpleNamespace(job=job, data=data)
    order: Any = SimpleNamespace(indices=lambda start, stop: np.arange(start, stop))
    (micro,) = Loop._step_batches(loop, 0, iter([{"indices": np.arange(5, 8)}]), order, [])
    logits, labels = torch.randn(3, 4), torch.tensor([1, IGNORE_INDEX, IGNORE_INDEX])
    wanted = nn.functional.cross_entropy(logits[:1], labels[:1]) * 2 / 6
    torch.testing.assert_close(weighted_cross_entropy(logits, labels, micro["weight"]), wanted)


@pytest.mark.parametrize(("stage", "steps"), [(0, 2), (3, 1)])
def test_unequal_micro_batches_are_exact(pools, tmp_path, stage, steps):
    more = {"micro_batch_by_rank": "7,2", "gradient_accumulation_steps": steps, "ds_config": f"zero{stage}"}
    trained = pools(2).train(tmp_path / "run", model="lenet", steps=8, **RUN, **more)
    assert trained.job.batch.total == 9 * steps == trained.steps[0]["samples"]
    torch.manual_seed(SEED)
    data = open_data(Run(**RUN), "image", None, Reporter())
    agree(trained, plain(build(find("lenet"), data.inputs, {}).train(), 9 * steps, 8))


def test_auto_measures_the_ranks_and_a_resume_keeps_the_split(pools, tmp_path):
    options = {**OWN, "micro_batch": 8, "micro_batch_by_rank": "auto", "ds_config": "zero1", "save_every": "3"}
    first = pools(2).train(tmp_path / "run", **options)
    shares = json.loads(first.folder.plan.read_text())["batch"]["by_rank"]
    assert sum(shares) == 16 and 11 <= shares[0] <= 13  # three times as fast: 12 and 4
    events = [json.loads(line) for line in first.folder.events.read_text().splitlines()]
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert notes[0].startswith(f"micro batches by rank: {shares[0]}, {shares[1]} ")
    second = pools(2).train(tmp_path / "run", **{**options, "steps": 8})
    assert second.job.start.step == 6 and list(second.job.batch.by_rank) == shares
    torch.manual_seed(SEED)
    agree(second, plain(Unequal().train(), 16, 8))


def test_samples_go_to_who_is_done_with_them_first():
    assert shared_out(16, [300.0, 100.0], 16) == (12, 4)
    assert shared_out(16, [300.0, 100.0], 10) == (10, 6)  # the most that memory was forecast for
    assert shared_out(4, [1.0, 1e-9, 1.0, 1.0], 2) == (1, 1, 1, 1)
    assert shared_out(7, [2.0, 1.0], 14) == (5, 2)  # 2.5 and 2 s; 4 and 3 would take 3 s


def test_what_cannot_be_unequal_is_refused():
    def problems(**options) -> str:
        with pytest.raises(UserError) as refused:
            resolve_job(RunRequest.of(Run(**{"model": "llama-tiny", "data": "synthetic", "ranks": 2, **options})))
        return "\n".join(problem.message for problem in refused.value.problems)

    assert "3 micro batches (6,2,3) for 2 data parallel ranks" in problems(micro_batch_by_rank="6,2,3")
    assert "(6+2) x 1 accumulation steps = 8" in problems(micro_batch_by_rank="6,2", global_batch=12)
    assert "sets it for each rank" in problems(micro_batch_by_rank=[6, 2], micro_batch=4)
    assert "activations of one size" in problems(micro_batch_by_rank="6,2", pipeline=2)
    assert "the same samples" in problems(micro_batch_by_rank="auto", tensor_parallel=2)
    assert "wait for each other in every layer" in problems(micro_batch_by_rank="auto", ds_config="zero3")
    assert "averaged over ranks" in problems(model="dcgan", data="digits", micro_batch_by_rank="6,2")
    with pytest.raises(UserError, match="neither auto nor a positive integer"):
        Run(micro_batch_by_rank="6,x")


def test_plan_and_simulation_know_them(cache):
    run = {"model": "llama-tiny", "seq_len": 32, "precision": "bf16"}
    cluster = zf.Cluster("l4", gpus=2)
    layout = zf.plan("llama-tiny", cluster, seq_len=32, micro_batch_by_rank="6,2", zero_stage=1).layouts[0].layout
    assert (layout.micro_batch, layout.by_rank, layout.global_batch) == (6, (6, 2), 8)
    unequal = Run(**run, micro_batch_by_rank="6,2", ds_config="zero1", ranks=2)
    heavy, light = zf.simulate(unequal, cluster), zf.simulate(unequal, cluster, rank=1)
    alike = zf.simulate(Run(**run, micro_batch=2, ds_config="zero1", ranks=2), cluster, rank=1)
    assert isinstance(heavy.run, SimulatedRun) and isinstance(light.run, SimulatedRun)
    assert (heavy.rank, heavy.run.micro_batch, light.run.micro_batch) == (0, 6, 2)
    assert (light.peak_bytes, light.flops) == (alike.peak_bytes, alike.flops)
    older = TorchVersion(transformers.__version__) < "5.23"  # which makes angles by a product, once per micro batch
    angles = 2 * 32 * 40 // 2 if older else 0  # of 32 tokens and half of a head's 40 places
    assert heavy.flops == 3 * light.flops - 2 * angles
    auto = Run(model="llama-tiny", seq_len=32, ranks=2, micro_batch=4, micro_batch_by_rank="auto")
    job = resolve_job(RunRequest.of(auto), inputs=InputSource(kind="assumed")).job
    assert PlannedLayout.of(job).micro_batch == 8  # a rank may get twice its share
