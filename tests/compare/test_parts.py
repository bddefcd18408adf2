"""Parts of comparisons, against cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zerofit.app.comparing import jobs
from zerofit.app.comparing.jobs import shortage_of_states
from zerofit.app.comparing.rows import (
    RowStore,
    SizeRow,
    StrategyRow,
    critical_batch,
    curve_figures,
    status_of,
    strategy_row,
    summarize_sizes,
    with_speedups,
)
from zerofit.app.training.free_memory import HostMemory
from zerofit.compare.benchmark_task import Noise, NotHereError, _even_cuts
from zerofit.compare.job import STRATEGIES, CompareJob, code_lines
from zerofit.report.comparison import page
from zerofit.spec.errors import UserError
from zerofit.spec.overhead import CPU_LIBRARY_BYTES
from zerofit.spec.overhead import CPU_PROCESS_LOW_BYTES as PROCESS

SOURCE = '''"""What it is.

At length.
"""

import torch
from os import (
    path,
)


def train(work, **options):
    """A line."""
    # a comment
    first = [
        1,
        2,
    ]
    for x in first:
        if x:
            print(x)
    return path
'''


def test_lines_of_code_without_imports_and_words():
    assert code_lines(SOURCE) == 9  # def, four of the list, for, if, print, return
    assert all(5 <= one.lines <= 60 for one in STRATEGIES.values())


def test_noise_scale_of_a_known_noise():
    """One parameter w and the loss w * (1 + noise): the gradient is 1, each sample's variance is 4, so 4 samples."""

    class Work:
        def loss(self, output, target):
            return output.mean()

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False).double()
    noise = Noise()
    for _ in range(4000):
        x, y = 1 + 2 * torch.randn(16, 1).double(), torch.zeros(16)
        noise.of_half(Work(), model, x, y)
        model.zero_grad()
        Work().loss(model(x), y).backward()
        noise.of_whole(model)
    assert noise.scale == pytest.approx(4.0, rel=0.1)
    assert Noise().scale is None


def test_measuring_noise_leaves_running_statistics_alone():
    class Work:
        def loss(self, output, target):
            return output.square().mean()

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Noise().of_half(Work(), model, torch.randn(8, 3), torch.zeros(8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(torch.randn(8, 3))
    assert model[1].num_batches_tracked == 1


def test_when_the_target_is_reached():
    accuracies = [(0.5, 0.45), (0.9, 0.8), (0.96, 0.93), (0.94, 0.95)]
    curve = [
        {"epoch": n, "steps": 10 * n, "seconds": 2.0 * n, "accuracy": valid, "test_accuracy": test}
        for n, (valid, test) in enumerate(accuracies, start=1)
    ]
    assert curve_figures(curve, 0.95) == {
        "steps": 40,
        "seconds": 8.0,
        "seconds_per_epoch": 2.0,
        "epochs_to_target": 3,
        "steps_to_target": 30,
        "seconds_to_target": 6.0,
        "final_accuracy": 0.94,
        "best_accuracy": 0.96,
        "best_epoch": 3,
        "test_accuracy": 0.93,  # of the epoch that is best on the others
    }
    assert curve_figures(curve, 0.99)["seconds_to_target"] is None


def test_the_critical_batch_size_takes_twice_the_samples():
    def summary(samples_by_size):
        rows = [
            SizeRow(batch_size=size, seed=0, lr=0.1, status="ok", steps_to_target=round(samples / size))
            for size, samples in samples_by_size.items()
        ]
        return summarize_sizes(rows)

    of_a_law = {size: 10_000 * (1 + size / 200) for size in (25, 50, 100, 200, 400)}
    assert critical_batch(summary(of_a_law)) == pytest.approx(200, rel=0.02)
    assert critical_batch(summary({16: 5000, 64: 5000})) is None  # two points prove no line
    assert critical_batch(summary({16: 8000, 64: 5000, 256: 3000})) is None  # larger batches took fewer


def test_sizes_over_their_seeds():
    def row(size, **figures):
        return SizeRow(batch_size=size, seed=0, lr=0.1, **{"status": "ok", **figures})

    rows = [
        row(16, seconds_to_target=s, steps_to_target=10, final_accuracy=0.9, seconds=5.0, noise_scale=n)
        for s, n in ((1.0, 10.0), (3.0, None), (2.0, 30.0))
    ]
    rows += [row(64, final_accuracy=0.5, test_accuracy=a, seconds=4.0) for a in (0.0, 0.4, 0.8)]
    rows += [row(64, status="failed", reason="x")]
    first, second = summarize_sizes(rows)
    assert (first.batch_size, first.runs, first.reached) == (16, 3, 3)
    assert first.seconds_to_target == [2.0, 1.0, 3.0]
    assert first.samples_to_target == [160, 160, 160]
    assert first.noise_scale == [20.0, 10.0, 30.0]
    assert (second.runs, second.reached, second.seconds_to_target) == (3, 0, None)
    assert second.test_accuracy == [0.4, 0.0, 0.8]


@pytest.mark.parametrize(
    ("sizes", "parts", "cuts"),
    [
        ([1, 1, 1, 1], 2, [(0, 2), (2, 4)]),
        ([10, 1, 1, 1], 2, [(0, 1), (1, 4)]),
        ([0, 5, 0, 5], 2, [(0, 2), (2, 4)]),
        ([0, 1, 0, 1, 1], 3, [(0, 2), (2, 4), (4, 5)]),
        ([1, 2, 3, 4, 5, 6], 3, [(0, 3), (3, 5), (5, 6)]),
    ],
)
def test_stages_of_about_the_same_size(sizes, parts, cuts):
    assert _even_cuts(sizes, parts) == cuts


def test_no_stage_is_without_parameters():
    with pytest.raises(NotHereError, match="1 layers with parameters are too few for 2 stages"):
        _even_cuts([0, 10, 0], 2)


def test_the_reason_is_that_of_whoever_knew():
    assert status_of([{"ended": "gone"}, {"error": "ValueError: x"}]) == ("failed", "ValueError: x")
    assert status_of([{"error": "lost its peer"}, {"not_here": "no GPU"}])[0] == "not-here"
    assert status_of([{"loss": 1.0}]) == ("ok", None)


def test_only_what_cannot_fit_is_refused(tmp_path, monkeypatch):
    parameters, job = 10**8, CompareJob(strategy="", model="mlp", ranks=4)

    def lacks(name: str, free_bytes: int, job: CompareJob = job) -> str | None:
        there = HostMemory(name="", ranks=range(4), host_bytes=free_bytes, gpu_bytes=free_bytes)
        monkeypatch.setattr(jobs, "memory_here", lambda ranks, run: there)
        return shortage_of_states(STRATEGIES[name], job, parameters, tmp_path)

    state = 12 * parameters
    needed = {"single": state + PROCESS, "ddp": 4 * (state + PROCESS), "zero3": state + 4 * PROCESS}
    for name, size in needed.items():
        assert lacks(name, size + CPU_LIBRARY_BYTES) is None
        words = lacks(name, size + CPU_LIBRARY_BYTES - 1)
        assert words and words.startswith("does not fit: weights, gradients and momentum need at least")
    gpus = replace(job, accelerator="cuda")
    assert lacks("zero3", state // 4, job=gpus) is None and lacks("zero3", state // 4 - 1, job=gpus)
    assert lacks("ddp", state, job=gpus) is None and lacks("ddp", state - 1, job=gpus)
    assert strategy_row(STRATEGIES["ddp"], job, [{"does_not_fit": "why"}], 0.0).status == "does-not-fit"


def test_traffic_of_a_step_if_the_first_rank_is_slow():
    job = CompareJob(strategy="backup-workers", model="mlp", global_batch=64)
    report = {"seconds": 2.0, "tokens_a_sample": None, "sent_bytes": 100, "received_bytes": 0}
    report |= {"peak_bytes": 1, "host_bytes": 1}
    judged = {"timed_steps": 10, "loss": 1.0, "accuracy": 0.5, "batch_norm": False}
    row = strategy_row(STRATEGIES[job.strategy], job, [{**report, "timed_steps": 2}, {**report, **judged}], 3.0)
    assert (row.samples_per_s, row.comm_bytes_per_step) == (320.0, 20.0)


def strategy(name, **figures):
    fixed = {"title": name, "processes": 2, "synchronous": True, "lines": 9, "seconds": 1.0, "ranks": 2}
    return StrategyRow(strategy=name, **{"status": "ok", **fixed, **figures})


def test_speed_up_and_efficiency():
    rows = [strategy("single", samples_per_s=100.0), strategy("ddp", samples_per_s=150.0), strategy("horovod")]
    rows = with_speedups(rows, lambda row, base: base.strategy == "single")
    assert (rows[1].speedup, rows[1].efficiency) == (1.5, 0.75)
    assert rows[2].speedup is None


def test_a_comparison_goes_on_and_another_one_does_not_mix_with_it(tmp_path, monkeypatch):
    mlp, lenet = ({"job": {"model": name}} for name in ("mlp", "lenet"))
    store = RowStore(tmp_path / "out", "strategies", mlp)
    store.save("ddp", strategy("ddp", samples_per_s=1.0))
    store.save("zero3", strategy("zero3", status="failed", reason="x"))
    again = RowStore(tmp_path / "out", "strategies", mlp)
    assert again.load("ddp", StrategyRow) == strategy("ddp", samples_per_s=1.0)
    assert again.load("zero3", StrategyRow) is None
    assert again.load("amp", StrategyRow) is None
    (tmp_path / "out" / "rows" / "ddp.json").write_text('{"strategy": "ddp", "sta')
    assert again.load("ddp", StrategyRow) is None
    with pytest.raises(UserError, match="another comparison"):
        RowStore(tmp_path / "out", "strategies", lenet)
    monkeypatch.chdir(tmp_path)
    own = [RowStore(None, "scaling", {"job": {"model": "../my models:net"}, "n": n}).folder for n in (1, 1, 2)]
    assert own[0] == own[1] != own[2]
    assert own[0].parent == tmp_path / "runs"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="other files"):
        RowStore(tmp_path / "mine", "strategies", mlp)


def test_a_page_is_escaped_and_needs_no_network(tmp_path):
    (tmp_path / "x.png").write_bytes(b"png")
    about = {"model": "<script>alert(1)</script>", "data": "digits", "ranks": 2}
    rows = [{"strategy": "ddp", "title": '"quoted" & <b>', "status": "failed", "reason": "<img src=x onerror=y>"}]
    text = page("strategies", about, rows, tmp_path / "x.png")
    assert "<script>" not in text
    assert "<img src=x" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert "&lt;img src=x onerror=y&gt;" in text
