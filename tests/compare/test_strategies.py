"""Every strategy that a CPU can run, on two ranks of gloo: the same weights as one device, bytes as counted by hand."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.compare.ranks import Ranks
from zerofit.app.comparing.processes import one_server
from zerofit.compare.benchmark_task import PACE_S, STRAGGLER, pause_s
from zerofit.compare.job import MOMENTUM, STRATEGIES, CompareJob
from zerofit.data.loader import Order
from zerofit.data.opening import open_data
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.spec.events import Reporter

JOB = CompareJob(
    strategy="single", model="lenet", data="digits", ranks=2, global_batch=32, steps=9, lr=0.05, eval_samples=100
)
PARTED = [name for name, one in STRATEGIES.items() if one.synchronous and name != "single"]
NOT_ON_A_CPU = {"device-map": "two devices", "data-parallel-threads": "two CUDA devices"}
if importlib.util.find_spec("horovod") is None:  # benchmarks/build_horovod
    NOT_ON_A_CPU["horovod"] = "C++20 or later"
BY_HAND = [name for name in PARTED if name.startswith("all-reduce-")]
RUNNING = [name for name in PARTED if name not in (*NOT_ON_A_CPU, *BY_HAND, "hybrid")]


@pytest.fixture(scope="module", autouse=True)
def server():
    """All rows of this file are forked from one process."""
    with one_server():
        yield


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


@pytest.mark.parametrize("name", BY_HAND)
def test_all_reduces_by_hand_of_four_ranks(ranks, name):
    row = ranks.row(replace(JOB, strategy=name, ranks=4))
    assert row.status == "ok", row
    assert row.max_weight_difference <= 1e-5
    assert row.comm_bytes_per_step == pytest.approx(2 * 3 * 4 * parameters(), rel=0.05)  # whatever the way


def test_halving_takes_a_power_of_two(ranks):
    row = ranks.row(replace(JOB, strategy="all-reduce-halving", ranks=3, global_batch=33))
    assert (row.status, "not 3" in row.reason) == ("not-here", True)


def test_epochs_on_two_ranks_are_those_of_plain_pytorch(ranks):
    """Two phases with sizes and rates of their own; every other validation sample is kept for the test."""
    job = replace(JOB, phases=[(1, 64, 0.05), (2, 32, 0.02)], eval_samples=200)
    (one,), two = (ranks.words(replace(job, strategy=name)) for name in ("single", "ddp"))
    data = open_data(job.run, "image", None, Reporter())
    torch.manual_seed(0)
    model, order, start, step, points = build(find("lenet"), data.inputs, {}), Order(len(data.train), 0), 0, 0, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=MOMENTUM)
    for epoch, (size, lr) in enumerate([(64, 0.05), (32, 0.02), (32, 0.02)], start=1):
        optimizer.param_groups[0]["lr"] = lr
        while start < epoch * len(data.train):
            batch = data.train.batch(order.indices(start, start + size), order.keys(start, start + size))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"]).backward()
            optimizer.step()
            start, step = start + size, step + 1
        with torch.no_grad():
            valid, test = (data.valid.batch(range(n, 200, 2), range(n, 200, 2)) for n in (0, 1))
            loss = float(torch.nn.functional.cross_entropy(model(valid["inputs"]), valid["labels"]))
            right = float((model(test["inputs"]).argmax(-1) == test["labels"]).float().mean())
        points.append({"epoch": epoch, "steps": step, "samples": start, "loss": loss, "test_accuracy": right})
    for found in (one, two[0]):
        assert [{name: point[name] for name in points[0]} for point in found["curve"]] == [
            pytest.approx(point, rel=1e-3) for point in points
        ]
    assert two[1] == {}
    assert one["noise_scale"] > 1 and two[0]["noise_scale"] is None


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


def test_bounded_staleness_holds_the_fast_ones_back(ranks):
    """While a slow worker computes, the other one makes at most one step more than the bound."""
    slow = replace(JOB, slow={"1": 24.0}, steps=12, target=0.9)  # slower than the other one on a busy machine
    free, bound = (ranks.row(replace(slow, strategy=f"parameter-server-{name}")) for name in ("async", "ssp"))
    assert (free.status, bound.status) == ("ok", "ok"), (free, bound)
    assert len(free.staleness) == len(bound.staleness) == 24
    assert max(bound.staleness) <= 4 < max(free.staleness)
    seconds = [point["seconds"] for point in bound.curve]
    assert seconds[0] == 0.0 and seconds == sorted(seconds) and seconds[-1] >= 12 * 24 * PACE_S
    assert bound.curve[-1]["accuracy"] == bound.accuracy
    assert next((p["seconds"] for p in bound.curve if p["accuracy"] >= 0.9), None) == bound.seconds_to_target


def test_backup_workers_step_without_the_slowest(ranks):
    """Rank 1 is so slow that no step takes its gradient: plain SGD on the first half of each batch."""
    row = ranks.row(replace(JOB, strategy="backup-workers", slow={"1": 40.0}))
    assert row.status == "ok", row
    assert row.dropped == 1
    data = open_data(JOB.run, "image", None, Reporter())
    torch.manual_seed(0)
    model = build(find("lenet"), data.inputs, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=JOB.lr, momentum=MOMENTUM)
    order = Order(len(data.train), 0)
    for step in range(JOB.steps):
        indices = order.indices(step * 32, step * 32 + 16)
        batch = data.train.batch(indices, indices)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"]).backward()
        optimizer.step()
    single = load_file(ranks.folder / "single.safetensors")
    theirs = max(float((p.detach() - single[name]).abs().max()) for name, p in model.named_parameters())
    assert row.max_weight_difference == pytest.approx(theirs, abs=1e-5)


def test_who_straggles_follows_from_the_seed():
    job = replace(JOB, straggle=0.25, slow={"1": 3.0})
    pauses = [[round(pause_s(job, rank, step) / PACE_S, 6) for step in range(2000)] for rank in (0, 1)]
    assert set(pauses[0]) == {1.0, STRAGGLER} and set(pauses[1]) == {3.0, 3 * STRAGGLER}
    assert all(one.count(max(one)) == pytest.approx(500, abs=100) for one in pauses)
    assert pauses[0] != [round(pause_s(replace(job, seed=1), 0, step) / PACE_S, 6) for step in range(2000)]
    assert pause_s(JOB, 0, 3) == 0.0


@pytest.mark.parametrize("name", ["amp", "amp-fp16"])
def test_mixed_precision_is_near_but_not_the_same(ranks, name):
    row = ranks.row(replace(JOB, strategy=name))
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
