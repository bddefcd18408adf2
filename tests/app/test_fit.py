"""`--fit`: what is chosen for the memory that is free, what stays as given, what a resume or a failure makes of it."""

from __future__ import annotations

import json
import shlex
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import zerofit as zf
from zerofit.app.clusters.hosts import HostRequest
from zerofit.app.clusters.restarts import RestartingRun
from zerofit.app.fitting import fit
from zerofit.app.fitting.fit import ALIKE, FitSearch, Refused
from zerofit.app.fitting.options import LayoutOption, _lean_savings, written_attributes
from zerofit.app.job.requests import as_request, read_request
from zerofit.app.training.memory_gate import MemoryGate
from zerofit.launch.hostfile import Host
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.simulate.forecast.result import FITS, NOT, WITHIN, Overhead
from zerofit.spec import reservations
from zerofit.spec.events import Event, Reporter
from zerofit.spec.overhead import CPU_LIBRARY_BYTES, CPU_PROCESS_BYTES, CPU_PROCESS_HIGH_BYTES
from zerofit.spec.profile import NOTHING_SAVED
from zerofit.spec.run import RunRequest
from zerofit.spec.run_folder import FittedLayout, RunFolder

MIB = 2**20
RANKS = 2
LLAMA = {"model": "llama-tiny", "model_args": {"num_hidden_layers": 2}, "data": "pysource", "seq_len": 256}
LLAMA |= {"ranks": RANKS, "steps": 2}


@pytest.fixture
def with_free(monkeypatch):
    """A machine with so many bytes free for the tensors of each rank, beside its process."""

    def set_free(tensors: int, ranks: int = RANKS) -> zf.Cluster:
        rank = CPU_PROCESS_BYTES["transformers"][1] + tensors
        free = CPU_LIBRARY_BYTES + ranks * rank
        monkeypatch.setattr(reservations, "host_memory", lambda: (free, free))
        return replace(zf.Cluster("cpu", gpus=ranks), device_memory=rank)

    return set_free


def fitted(asked: RunRequest, folder: RunFolder, on_event=None) -> tuple[RunRequest, FittedLayout | None]:
    report = Reporter(on_event)
    return fit.fitted(asked, folder, report=report, gate=MemoryGate(report))


def chosen(run: zf.Run | Path, folder: Path, on_event=None) -> tuple[zf.Run, FittedLayout]:
    asked, found = fitted(as_request(run), RunFolder(folder), on_event)
    assert found is not None
    return asked.run, found


def zero_of(run: zf.Run) -> dict:
    assert isinstance(run.ds_config, dict)
    return run.ds_config["zero_optimization"]


@pytest.mark.slow
def test_experts_stay_spread_and_train(tmp_path, with_free):
    """A degree that is given stays; ZeRO 0 has no gradients of spread experts for clipping, and is not chosen."""
    with_free(4096 * MIB)
    mixtral = {
        "model": "mixtral-tiny",
        "data": "pysource",
        "seq_len": 32,
        "ranks": RANKS,
        "steps": 1,
        "eval_samples": 8,
    }
    trained = zf.train(zf.Run(**mixtral, expert_parallel=2, fit=True, output=tmp_path / "run"))
    config = json.loads((tmp_path / "run" / "ds_config.json").read_text())
    assert (trained.layout["ep"], trained.steps) == (2, 1)
    assert config["zero_optimization"]["stage"] >= 1


@pytest.mark.slow
def test_less_memory_brings_a_leaner_layout_with_the_same_global_batch(tmp_path, with_free):
    for tensors in (4096 * MIB, 40 * MIB):
        cluster, told = with_free(tensors), list[Event]()
        run, found = chosen(zf.Run(**LLAMA, fit=True), tmp_path, told.append)
        assert run.global_batch == 8 * RANKS
        assert (run.micro_batch or 0) * (run.gradient_accumulation_steps or 0) == 8
        assert not run.fit and [event.text for event in told if event.kind == "note"] == list(found.why)
        assert len(found.why) == 5
        if tensors > 1024 * MIB:
            plain = (zero_of(run)["stage"], run.activation_checkpointing, run.loss_chunk)
            assert plain == (0, False, None) and run.micro_batch == 8 and found.reserved_bytes > 40 * MIB
    simulated = zf.simulate(run, cluster)
    assert simulated.fits and simulated.reserved_bytes == found.reserved_bytes < 40 * MIB


@pytest.mark.slow
def test_where_nothing_fits_the_leanest_is_named_and_nothing_is_written(tmp_path, with_free):
    low, high = CPU_PROCESS_BYTES["transformers"]
    with_free(low - high)
    with pytest.raises(zf.DoesNotFit) as caught:
        zf.train(zf.Run(**LLAMA, fit=True, output=tmp_path / "run"))
    problem = caught.value.problems[0]
    assert problem.kind == "does-not-fit" and "layouts of llama-tiny fits; the smallest is ZeRO-" in problem.message
    assert "are missing" in problem.message and "zerofit plan" in problem.hint
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_was_given_stays_as_it_is(tmp_path, with_free):
    with_free(4096 * MIB)
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 123456, "allgather_bucket_size": "auto"}}
    own = {"ds_config": config, "micro_batch": 2, "activation_checkpointing": True, "loss_chunk": 64}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**LLAMA, "fit": True, **own}))
    run, found = chosen(tmp_path / "run.yaml", tmp_path)
    zero = zero_of(run)
    assert (zero["stage"], zero["reduce_bucket_size"]) == (2, 123456) and "offload_optimizer" not in zero
    assert (run.micro_batch, run.activation_checkpointing, run.loss_chunk) == (2, True, 64)
    assert run.global_batch == 2 * RANKS  # the run's own without --fit
    assert found.given == {"ranks": RANKS, **own}
    with pytest.raises(zf.UserError, match="ZeRO stage 3 with a pipeline"):
        chosen(zf.Run(**LLAMA, fit=True, ds_config="zero3", pipeline=2), tmp_path)


def test_flags_and_the_json_s_keys_decide_knobs():
    config = {
        "train_micro_batch_size_per_gpu": 4.0,
        "gradient_accumulation_steps": "auto",
        "activation_checkpointing": {"cpu_checkpointing": True},
        "zero_optimization": {"stage": 3, "overlap_comm": False, "offload_param": {"device": "cpu"}},
    }
    assert written_attributes({"pipeline": 1}, config) == {
        "micro_batch": 4,
        "zero_stage": 3,
        "overlap": False,
        "offload_param": "cpu",
        "checkpointing": True,
        "pp": 1,
    }


@pytest.mark.slow
def test_a_training_takes_it_and_a_resume_keeps_it(tmp_path, with_free, monkeypatch):
    with_free(100 * MIB)
    given = {**LLAMA, "fit": True, "output": tmp_path / "run", "eval_samples": 8}
    first = zf.train(zf.Run(**given))
    folder = RunFolder(Path(first.run_dir))
    plan, run = (json.loads(path.read_text()) for path in (folder.plan, folder.run))
    assert run["fit"] is False and plan["batch"]["micro"] == run["micro_batch"] == plan["fit"]["chosen"]["micro_batch"]
    assert plan["fit"]["chosen"]["ds_config"] == run["ds_config"] and len(plan["fit"]["why"]) == 5
    assert plan["forecast"]["reserved_bytes"] == plan["fit"]["reserved_bytes"]
    with_free(8192 * MIB)
    monkeypatch.setattr(fit, "options_of", lambda *args: pytest.fail("chosen anew"))
    again = zf.train(zf.Run(**{**given, "steps": 3}))
    further = zf.train(as_request(folder.path), on_event=None)
    assert again.layout == further.layout == first.layout and (again.steps, further.steps) == (3, 3)
    kept = json.loads(folder.plan.read_text())
    assert kept["fit"] == plan["fit"] and kept["batch"] == plan["batch"]
    taken_over = read_request(str(folder.path), {"micro_batch": 4})
    assert fitted(taken_over, folder) == (taken_over, None)
    with pytest.raises(zf.RunFailed) as caught, fit.leaner_next(folder, "zerofit train"):
        raise zf.RunFailed(zf.Problem(kind=fit.OUT_OF_MEMORY, message="out of memory"))
    assert caught.value.problem.hint.startswith(f"`zerofit train {folder.path}` resumes")
    with pytest.raises(pytest.fail.Exception, match="chosen anew"):
        fitted(as_request(folder.path), folder)


def test_a_rank_that_runs_out_of_memory_gets_a_leaner_layout_from_the_newest_checkpoint(tmp_path, monkeypatch):
    """The forecast is wrong here on purpose: the ranks of a training fail where no simulation does."""
    (tmp_path / "greedy.py").write_text(
        textwrap.dedent("""
        import os, torch
        class Net(torch.nn.Module):
            calls = 0
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(64, 10)
            def forward(self, x):
                Net.calls += "RANK" in os.environ
                if len(x) > 4 and Net.calls > 3:
                    raise torch.OutOfMemoryError("out of memory: tried to allocate 1.00 GiB")
                wide = torch.sigmoid(x.flatten(1).repeat(1, 512) * self.head.weight.mean())
                return self.head(wide.view(len(x), 512, 64).mean(1))
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = {"model": "greedy:Net", "data": "digits", "loss": "cross-entropy", "steps": 5, "save_every": "2"}
    told: list[Event] = []
    result = RestartingRun(
        request=as_request(zf.Run(**run, fit=True, output=tmp_path / "run", eval_samples=8)),
        hosts=(Host("node-0", 1),),
        options=HostRequest(no_ssh=True, nodes=1, slots=1, node_rank=0, master_addr="127.0.0.1"),
        report=Reporter(told.append),
        run_file=None,
        max_restarts=2,
    ).run()
    assert result.steps == 5 and result.resumed_from and result.resumed_from.endswith("step-00000002")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["batch"]["micro"] * plan["batch"]["accumulation"] == 8 and plan["batch"]["micro"] <= 4
    assert not plan["fit"]["ran_out"] and "ran out of memory" in plan["fit"]["why"][3]
    warnings = [event.text for event in told if event.kind == "warning"]
    assert any("out of memory" in text and "restarting from the newest checkpoint" in text for text in warnings)


def test_the_command_of_the_hint_runs_in_a_shell(tmp_path):
    folder = RunFolder(tmp_path / "my run")
    folder.path.mkdir()
    choice = FittedLayout(given={}, chosen={"ranks": 1, "global_batch": 8}, why=("",), reserved_bytes=1)
    folder.plan.write_text(json.dumps({"fit": asdict(choice)}))
    with pytest.raises(zf.RunFailed) as caught, fit.leaner_next(folder, "zerofit train"):
        raise zf.RunFailed(zf.Problem(kind=fit.OUT_OF_MEMORY, message="out of memory"))
    assert shlex.split(caught.value.problem.hint.split("`")[1]) == ["zerofit", "train", str(folder.path)]
    assert json.loads(folder.plan.read_text())["fit"]["ran_out"]


def test_options_that_save_more_memory_keep_the_given_ones():
    facts = SimpleNamespace(task="causal-lm", own=False, model_type="llama")
    resolved: Any = SimpleNamespace(job=SimpleNamespace(run=zf.Run(model="llama-tiny"), facts=facts))
    given = {"activation_offload": True, "loss_chunk": 64}
    found = _lean_savings(resolved, given, zf.Cluster("l4", gpus=2))
    assert found and all(savings.activation_offload and savings.loss_chunk == 64 for savings in found)


def test_commands_that_start_nothing_refuse_it():
    with pytest.raises(zf.UserError, match="works only with `zerofit train` and `launch`"):
        zf.simulate(zf.Run(model="mlp", fit=True), zf.Cluster("cpu", gpus=1))


class Found:
    """What a search reads of a simulation."""

    host_node_bytes, overheads = 0, (Overhead("process", CPU_PROCESS_HIGH_BYTES, CPU_PROCESS_HIGH_BYTES, "test"),)

    def __init__(self, reserved_bytes: int, verdict: str):
        self.reserved_bytes = self.reserved_ahead_bytes = reserved_bytes
        self.verdict = verdict


def option(speed: float, peak: int, **knobs) -> LayoutOption:
    layout = PlannedLayout(**{"zero_stage": 0, "micro_batch": 1, **knobs})
    figures = dict.fromkeys(("static_bytes", "host_bytes", "nvme_bytes"), 0)
    memory = LayoutMemory(peak_bytes=peak, peak_phase="backward", breakdown={"activations": peak}, **figures)
    return LayoutOption(layout=layout, savings=NOTHING_SAVED, memory=memory, samples_per_s=speed)


def searched(options, real, free=1000 * MIB, **more):
    """Search where `real` gives each peak's factor; what it does not hold is refused."""
    cluster = replace(zf.Cluster("cpu", gpus=1), device_memory=CPU_PROCESS_HIGH_BYTES + free)

    def simulate(one) -> list[Any]:
        if one not in real:
            raise Refused
        needed = round(one.memory.peak_bytes * real[one])
        return [Found(needed, NOT if needed > free else WITHIN if needed > 0.9 * free else FITS)]

    search = FitSearch(options, cluster, simulate, **more)
    return search.run(), search


def test_the_search_takes_the_plainest_of_the_nearly_fastest_that_fit():
    large, fast, plainer, slow = (
        option(400, 2000 * MIB),
        option(100, 300 * MIB, zero_stage=2),
        option(100 * (1 - ALIKE) + 1, 500 * MIB, zero_stage=1),
        option(80, 100 * MIB),
    )
    every = [large, fast, plainer, slow]
    found, search = searched(every, dict.fromkeys(every, 1.0))
    assert found and found is plainer and list(search.seen) == [plainer] and search.faster_than(found) == [large]


def test_the_search_follows_the_simulations_where_plan_is_wrong():
    every = [option(500 - n, (1000 - 100 * n) * MIB) for n in range(9)]
    optimistic, search = searched(every, dict.fromkeys(every, 2.0))  # what plan says is half of what it takes
    assert optimistic and optimistic.memory.peak_bytes == 400 * MIB and len(search.seen) <= 3
    assert searched(every, dict.fromkeys(every, 0.1))[0] is every[0]


def test_the_search_passes_over_what_is_refused_and_takes_what_is_within_the_margin_last():
    refused, within, lean = option(300, 100 * MIB), option(200, 680 * MIB, tp=2), option(10, 200 * MIB, zero_stage=3)
    assert searched([refused, lean], {lean: 1.0})[0] is lean
    tight = {within: 1.4, lean: 6.0}
    assert searched([within, lean], tight)[0] is within
    assert searched([within, lean], {within: 2.0, lean: 6.0})[0] is None
    assert searched([within, lean], {within: 1.0, lean: 1.0}, most_bytes=300 * MIB)[0] is lean
