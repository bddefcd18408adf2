"""Every strategy that a CPU can run, on two ranks of gloo: the same weights as one device, bytes as counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.compare.ranks import Ranks
from zerofit.compare.job import MOMENTUM, STRATEGIES, CompareJob
from zerofit.data import Order, open_data
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.spec.events import Reporter

JOB = CompareJob(
    strategy="single", model="lenet", data="digits", ranks=2, global_batch=32, steps=9, lr=0.05, eval_samples=100
)
PARTED = [name for name, one in STRATEGIES.items() if one.synchronous and name != "single"]
NOT_ON_A_CPU = {"device-map": "two devices", "data-parallel-threads": "two CUDA devices", "horovod": "pip install"}
RUNNING = [name for name in PARTED if name not in NOT_ON_A_CPU and name != "hybrid"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, cache):
    made = Ranks(tmp_path_factory.mktemp("strategies"))
    made.single = made.row(JOB)
    return made


@pytest.fixture(scope="module")
def rows(ranks):
    return {}


def parameters() -> int:
    data = open_data(JOB.run, "image", None, Reporter())
    return sum(p.numel() for p in build(find("lenet"), data.inputs, {}).parameters())


def test_the_single_device_is_plain_pytorch(ranks):
    data = open_data(JOB.run, "image", None, Reporter())
    torch.manual_seed(0)
    model = build(find("lenet"), data.inputs, {}).double()
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    order = Order(len(data.train), 0)
    for step in range(JOB.steps):
        indices = order.indices(step * 32, step * 32 + 32)
        batch = data.train.batch(indices, indices)
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(batch["inputs"].double()), batch["labels"]).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                velocity[name] = MOMENTUM * velocity[name] + p.grad
                p -= JOB.lr * velocity[name]
    found = load_file(ranks.folder / "single.safetensors")
    for name, p in model.named_parameters():
        assert found[name].double() == pytest.approx(p.detach().double(), abs=1e-6), name
    assert ranks.single.max_weight_difference == 0.0


@pytest.mark.parametrize("name", RUNNING)
def test_synchronous_strategies_end_with_the_same_weights(ranks, rows, name):
    row = rows[name] = ranks.row(replace(JOB, strategy=name))
    assert row.status == "ok", row
    assert row.max_weight_difference <= 1e-5
    assert row.agrees
    assert row.loss == pytest.approx(ranks.single.loss, abs=1e-4)
    assert row.samples_per_s > 0
    assert row.peak_bytes_per_rank <= row.host_bytes_per_rank


def test_deepspeed_does_not_clip(tmp_path):
    """Gradients pass a norm of 1 on the way, at which it clips where nothing is said."""
    made, job = Ranks(tmp_path), replace(JOB, lr=0.05, steps=45)
    made.row(job)
    assert made.row(replace(job, strategy="zero2")).max_weight_difference <= 1e-5


def test_a_hybrid_of_four_ranks(ranks):
    row = ranks.row(replace(JOB, strategy="hybrid", ranks=4))
    assert row.status == "ok", row
    assert row.max_weight_difference <= 1e-5


def test_bytes_on_the_wire_are_those_of_the_algorithm(rows):
    size = 4 * parameters()
    # a ring of two: each rank sends half of the gradients, then half of the sums
    assert rows["ddp"].comm_bytes_per_step == pytest.approx(2 * size, rel=0.1)
    assert rows["data-parallel"].comm_bytes_per_step == pytest.approx(2 * size, rel=0.1)
    # a gradient of each of two workers, and the weights back to both
    assert rows["parameter-server"].comm_bytes_per_step == pytest.approx(4 * size, rel=0.05)
    assert rows["model-parallel"].comm_bytes_per_step < 0.5 * size


def test_asynchronous_updates_are_stale(ranks):
    row = ranks.row(replace(JOB, strategy="parameter-server-async"))
    assert row.status == "ok", row
    stale = row.staleness
    assert len(stale) == 2 * JOB.steps
    assert stale[0] == 0
    assert max(stale) >= 1
    assert sum(stale) > 0
    assert row.agrees is None
    assert row.max_weight_difference > 1e-5


def test_mixed_precision_is_near_but_not_the_same(ranks):
    row = ranks.row(replace(JOB, strategy="amp"))
    assert row.status == "ok", row
    assert 1e-6 < row.max_weight_difference < 0.05


@pytest.mark.parametrize(("name", "reason"), NOT_ON_A_CPU.items())
def test_what_a_cpu_cannot_run_says_so(ranks, name, reason):
    row = ranks.row(replace(JOB, strategy=name))
    assert row.status == "not-here"
    assert reason in row.reason


@pytest.mark.parametrize("model", ["simplecnn", "mlp", "dcgan", "llama-tiny"])
def test_other_models(tmp_path, model):
    made = Ranks(tmp_path)
    text = {"data": "synthetic", "seq_len": 16} if model == "llama-tiny" else {}
    job = replace(JOB, **{"model": model, "steps": 5, "global_batch": 16, **text})
    assert made.row(job).status == "ok"
    row = made.row(replace(job, strategy="ddp"))
    assert row.status == "ok", row
    assert (row.tokens_per_s is None) == (model != "llama-tiny")
    assert (row.accuracy is None) == (model == "dcgan")
    if model != "dcgan":  # whose batch norm sees each rank's own share
        assert row.max_weight_difference <= 1e-5
