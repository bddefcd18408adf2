"""Nothing starts that cannot fit: the memory gate before a training, on this machine and on hosts that were asked."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import zerofit as zf
from zerofit.app.clusters import restarts
from zerofit.app.clusters.hosts import HostRequest, machine_of
from zerofit.app.clusters.restarts import RestartingRun
from zerofit.app.job.requests import as_request
from zerofit.app.job.resolve import resolve_job
from zerofit.app.simulation import runs
from zerofit.app.simulation.runs import KnobSimulations
from zerofit.app.training import memory_forecast, memory_gate
from zerofit.app.training.memory_gate import MemoryGate
from zerofit.checkpoint.store import expected_bytes
from zerofit.config.ds_json import read_for_run
from zerofit.doctor.preflight import Preflight
from zerofit.launch.hostfile import Host
from zerofit.simulate.endings import why_ended
from zerofit.simulate.forecast import processes
from zerofit.simulate.record import RankRecord
from zerofit.spec import reservations
from zerofit.spec.errors import Problem
from zerofit.spec.events import Event, Reporter
from zerofit.spec.overhead import CPU_LIBRARY_BYTES, CPU_PROCESS_HIGH_BYTES, CPU_PROCESS_LOW_BYTES, HOST_PROCESS_BYTES
from zerofit.spec.reservations import reserved_on_host
from zerofit.spec.run_folder import Job, MemoryForecast, RunFolder
from zerofit.worker import refuse_small_host

LLAMA = {"model": "llama-tiny", "data": "pysource", "steps": 2, "micro_batch": 64, "seq_len": 128, "ranks": 1}
LLAMA |= {"eval_samples": 8}
GIB = 2**30
PROCESS = (CPU_PROCESS_LOW_BYTES + CPU_PROCESS_HIGH_BYTES) // 2
H100 = {"name": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0", "total_bytes": 80 * GIB}


def held_against(run: zf.Run, output: Path, on_event=None, **options) -> MemoryForecast | None:
    asked, held = as_request(run), MemoryGate(Reporter(on_event), **options)
    try:
        return held(asked, resolve_job(asked), output)
    finally:
        held.close()


def held_on(hosts: dict[str, dict], run: zf.Run, slots: int, **options) -> MemoryForecast | None:
    """Hold a run against hosts that have said what they have."""
    asked, listed = as_request(run), [Host(name, slots) for name in hosts]
    resolved = resolve_job(asked, machine=machine_of(listed, Preflight(facts=hosts)))
    return MemoryGate(Reporter(options.pop("on_event", None)), hosts=listed, facts=hosts, **options)(
        asked, resolved, Path("runs/many")
    )


def host(free_bytes: int, gpus: int = 0, reserved_bytes: int = 0) -> dict:
    memory = {"total_bytes": 64 * GIB, "free_bytes": free_bytes, "reserved_bytes": reserved_bytes}
    devices = [{**H100, "index": n, "uuid": f"GPU-{n}", "used_bytes": 0, "reserved_bytes": 0} for n in range(gpus)]
    return {"memory": memory, "gpus": devices}


@pytest.fixture
def unhinted(monkeypatch):
    """Refusals that simulate no changes, which takes seconds for each."""
    monkeypatch.setattr(KnobSimulations, "__call__", lambda self, on_event=None: ())


@pytest.fixture
def tight(monkeypatch, tmp_path):
    leave_four_fifths(monkeypatch, zf.Run(**LLAMA), tmp_path)


def leave_four_fifths(monkeypatch, run: zf.Run, folder: Path) -> None:
    """Have a machine with four fifths of what a rank needs free, beside the rank's process."""
    needed = held_against(run, folder / "any")
    assert needed
    free = CPU_PROCESS_LOW_BYTES + CPU_LIBRARY_BYTES + needed.reserved_bytes * 4 // 5
    monkeypatch.setattr(reservations, "host_memory", lambda: (free, free))


def test_the_forecast_is_what_simulate_says_and_is_kept(tmp_path, monkeypatch):
    simulated = zf.simulate(zf.Run(**LLAMA), zf.Cluster("cpu", gpus=1))
    found = held_against(zf.Run(**LLAMA), tmp_path)
    assert found is not None and found.reserved_bytes == simulated.peak_bytes == max(found.phases.values())
    assert list(found.phases) == ["build", "init", "forward", "backward", "step", "save"]
    monkeypatch.setattr(memory_forecast, "simulate_ranks", lambda targets, show: pytest.fail("simulated"))
    same = {"ds_config": read_for_run("zero2").config}  # the default
    again = held_against(zf.Run(**{**LLAMA, **same, "steps": 9, "lr": 1e-2, "seed": 5}), tmp_path)
    assert again and again.host_margin_bytes > 0
    assert replace(again, host_margin_bytes=found.host_margin_bytes) == found  # what is free changes


def test_the_forecast_is_of_the_rank_that_keeps_most_gradients(tmp_path):
    run = zf.Run(**{**LLAMA, "ranks": 4, "micro_batch": 4, "gradient_accumulation_steps": 2})
    first, second = (zf.simulate(run, zf.Cluster("cpu", gpus=4), rank=rank).peak_bytes for rank in (0, 1))
    found = held_against(run, tmp_path)
    assert found is not None and found.reserved_bytes == second > first, (first, second)


@pytest.mark.slow
def test_the_rank_that_needs_most_is_held_against_what_is_free():
    args = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 24, "vocab_size": 32768}
    how = {"model": "llama-tiny", "model_args": args, "data": "pysource", "precision": "bf16", "micro_batch": 1}
    run, cluster = zf.Run(**how, seq_len=16, gradient_accumulation_steps=2), zf.Cluster("h100-80gb", gpus=4)
    first, most = (zf.simulate(run, cluster, rank=rank) for rank in (0, 1))
    assert most.peak_bytes > 1.005 * first.peak_bytes
    found = held_on({"n1": host(32 * GIB, gpus=4)}, run, slots=4)
    assert found and max(found.phases.values()) == most.peak_bytes


@pytest.mark.slow
def test_all_layers_are_simulated_where_few_leave_open_if_it_fits(monkeypatch):
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = dict.fromkeys((*sizes, "stage3_max_live_parameters", "stage3_max_reuse_distance"), 100)
    args = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 24, "vocab_size": 32768}
    how = {"model": "llama-tiny", "model_args": args, "data": "pysource", "precision": "bf16", "micro_batch": 1}
    run = zf.Run(**how, seq_len=16, ds_config={"zero_optimization": {"stage": 3, **zero}})
    exact = zf.simulate(run, zf.Cluster("h100-80gb", gpus=4), exact=True)
    there = host(32 * GIB, gpus=4)
    ample = held_on({"n1": there}, run, slots=4)
    assert ample and max(ample.phases.values()) == pytest.approx(exact.peak_bytes, rel=0.002)
    beside = sum(one.high_bytes for one in exact.overheads)
    taken = 80 * GIB - beside - round(1.1 * exact.reserved_ahead_bytes)
    tight = {**there, "gpus": [{**gpu, "used_bytes": taken} for gpu in there["gpus"]]}
    found = held_on({"n1": tight}, run, slots=4)
    assert found and max(found.phases.values()) == exact.peak_bytes
    monkeypatch.setattr(memory_forecast, "simulate_ranks", lambda *_, **__: pytest.fail("simulated"))
    again = held_on({"n1": there}, run, slots=4)
    assert again and again.phases == found.phases


def test_what_cannot_fit_is_refused_with_the_nearest_changes_and_leaves_nothing(tmp_path, monkeypatch):
    run = zf.Run(**{**LLAMA, "micro_batch": 256}, output=tmp_path / "run")
    leave_four_fifths(monkeypatch, run, tmp_path)
    with pytest.raises(zf.DoesNotFit) as caught:
        zf.train(run)
    problem = caught.value.problems[0]
    assert problem.kind == "does-not-fit"
    assert "llama-tiny needs" in problem.message and "per rank in " in problem.message
    assert "are free on this machine. torch reserves" in problem.message
    assert problem.hint.startswith("these would fit: --") and problem.hint.endswith(memory_gate.ANYWAY)
    assert not (tmp_path / "run").exists()


def test_what_is_far_too_large_is_refused_without_a_simulation(tmp_path, monkeypatch):
    monkeypatch.setattr(reservations, "host_memory", lambda: (20 * GIB, 20 * GIB))

    def simulate_none(targets, show, *, exact=False):
        assert not targets
        return []

    for module in (memory_forecast, runs):
        monkeypatch.setattr(module, "simulate_ranks", simulate_none)
    run = zf.Run(**{**LLAMA, "model": "llama-3.1-8b", "ranks": 2, "ds_config": "zero3", "precision": "fp32"})
    with pytest.raises(zf.DoesNotFit) as caught:
        held_against(run, tmp_path / "run")
    parameters = 8_030_261_248  # of the published model
    needed = f"{parameters * (4 + 4 + 4) / GIB:.1f} GiB"  # weights and Adam's two moments
    assert caught.value.problems[0].message == (
        f"llama-3.1-8b needs at least {needed} for the parameters and optimizer state of 2 ranks; 20.0 GiB are free "
        "on this machine."
    )
    assert "no single change makes this run fit" in caught.value.problems[0].hint


@pytest.mark.parametrize("failure", [MemoryError(), RuntimeError("the server has ended (-9)"), None])
def test_a_search_for_changes_that_fails_leaves_the_refusal(tmp_path, monkeypatch, failure):
    """Of a run that is refused without a simulation; the kernel ends its changes, or all that looks for them."""
    monkeypatch.setattr(reservations, "host_memory", lambda: (2 * GIB, 2 * GIB))
    monkeypatch.setattr(memory_gate, "least_bytes", lambda job: 3 * GIB if job.run.micro_batch == 64 else GIB)

    def simulate(targets, show, *, exact=False):
        if failure and targets:
            raise failure
        return [why_ended(9, ran_short=True) for _ in targets]

    monkeypatch.setattr(runs, "simulate_ranks", simulate)
    with pytest.raises(zf.DoesNotFit) as caught:
        held_against(zf.Run(**LLAMA), tmp_path / "run")
    problem = caught.value.problems[0]
    assert "llama-tiny needs at least 3.00 GiB" in problem.message and "these would fit" not in problem.hint
    why = "the server has ended" if isinstance(failure, RuntimeError) else "this machine has too little memory"
    assert "left out, because" in problem.hint and why in problem.hint and problem.hint.endswith(memory_gate.ANYWAY)


def forecast_of_two_ranks(run: zf.Run) -> list[RankRecord]:
    """Forecast the ranks of a run. No layout keeps less than the least."""
    asked, cluster = as_request(run), zf.Cluster("cpu", gpus=2)
    resolved = resolve_job(asked)
    known = memory_forecast.forecast_ranks(memory_gate.prepared_for(asked, resolved, cluster), cluster, Reporter())
    assert isinstance(known, memory_forecast.RankForecasts)
    records = [known.of(rank).record for rank in range(2)]
    kept = sum(sum(record.kept.values()) for record in records)
    assert 0.5 * kept < memory_forecast.least_bytes(resolved.job) <= kept
    return records


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (2, "fp32"), (3, "fp32")])  # others: see the copy
def test_no_layout_keeps_less_than_the_least(stage, precision):
    forecast_of_two_ranks(zf.Run(**{**LLAMA, "ranks": 2, "ds_config": f"zero{stage}", "precision": precision}))


def test_anyway_starts_it_with_a_warning_and_the_forecast_lies_in_the_folder(tmp_path, tight, monkeypatch):
    """When ranks start, nothing is left of what simulated them."""
    told: list[Event] = []
    monkeypatch.setattr(memory_gate, "end_server", processes.end_server)
    result = zf.train(zf.Run(**LLAMA, output=tmp_path / "run"), on_event=told.append, anyway=True)
    warnings = [event.text for event in told if event.kind == "warning"]
    assert len(warnings) == 1 and "started anyway" in warnings[0]
    assert processes._running is None
    plan = json.loads(Path(result.run_dir, "plan.json").read_text())
    assert plan["forecast"]["reserved_bytes"] == max(plan["forecast"]["phases"].values())


def test_a_disk_without_room_for_the_model_and_a_checkpoint_is_refused(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    facts = resolve_job(as_request(zf.Run(**LLAMA))).job.facts
    monkeypatch.setattr(memory_gate.shutil, "disk_usage", lambda path: usage(GIB, GIB, facts.weight_bytes("fp32")))
    with pytest.raises(zf.DoesNotFit, match=r"the model with a checkpoint needs .* MiB, and .* MiB free"):
        held_against(zf.Run(**LLAMA), tmp_path / "new" / "run")
    assert held_against(zf.Run(**LLAMA, save_every="0"), tmp_path / "new" / "run")
    monkeypatch.setattr(memory_gate.shutil, "disk_usage", lambda path: usage(GIB, GIB, facts.weight_bytes("fp32") - 1))
    with pytest.raises(zf.DoesNotFit, match="the model needs"):
        held_against(zf.Run(**LLAMA, save_every="0"), tmp_path / "new" / "run")


def test_rank_0_puts_the_model_together_where_ranks_hold_parts_of_it():
    run = zf.Run(**{**LLAMA, "ranks": 2, "ds_config": "zero3"})
    found = held_on({"n1": host(8 * GIB)}, run, slots=2)
    assert found
    weights = resolve_job(as_request(run)).job.facts.weight_bytes("fp32")
    (other,) = found.stages
    after = found.phases["save"] - weights
    beside = found.beside_bytes
    assert found.first_bytes == beside + max(other - beside, after + weights) and beside >= PROCESS
    assert 0 < after < found.phases["step"]


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (3, "bf16")])
def test_the_copy_that_is_written_while_it_trains_is_what_is_saved(pools, tmp_path, stage, precision):
    how = {**LLAMA, "ranks": 2, "micro_batch": 2, "ds_config": f"zero{stage}", "precision": precision}
    trained = pools(2).train(tmp_path / "run", **how, save_every="1")
    (saved, *_) = sorted((trained.folder.path / "checkpoints").glob("step-*"))
    sizes = {path.name: path.stat().st_size for path in saved.rglob("*_states.pt")}
    first = sum(size for name, size in sizes.items() if "pp_rank_1_" not in name)
    assert expected_bytes(Job.read(trained.folder)) == pytest.approx(sum(sizes.values()), rel=0.03)
    found = [forecast_of_two_ranks(zf.Run(**how, save_async=background)) for background in (False, True)]
    for plain, copied, size in zip(*found, [first, sum(sizes.values()) - first], strict=True):
        grown = [a.end_bytes - b.end_bytes for a, b in zip(copied.phases, plain.phases, strict=True)]
        assert grown[0] == grown[1] == 0 and set(grown[2:]) == {grown[2]}  # not yet while it is built
        assert grown[2] == pytest.approx(size, rel=0.02, abs=2**16)


def test_one_data_parallel_rank_of_each_pipeline_stage_copies_its_parameters():
    run = zf.Run(**{**LLAMA, "ranks": 4, "pipeline": 2, "ds_config": "zero1", "precision": "bf16", "save_every": "1"})
    kept, grown = [], []
    for background in (False, True):
        asked, cluster = as_request(run.model_copy(update={"save_async": background})), zf.Cluster("cpu", gpus=4)
        prepared = memory_gate.prepared_for(asked, resolve_job(asked), cluster)
        known = memory_forecast.forecast_ranks(prepared, cluster, Reporter())
        assert isinstance(known, memory_forecast.RankForecasts)
        kept = [known.of(rank).record.kept for rank in (0, 1, 2)]
        grown.append([known.of(rank).record.phases[-2].end_bytes for rank in (0, 1, 2)])
    copies = [copied - plain for plain, copied in zip(*grown, strict=True)]
    of_optimizer = [rank["optimizer state"] + rank["master weights"] for rank in kept]
    assert copies == [of_optimizer[0] + kept[0]["parameters"], of_optimizer[1], of_optimizer[2] + kept[2]["parameters"]]


def test_a_host_whose_memory_is_not_enough_is_named(unhinted):
    found = held_on({"n1": host(8 * GIB)}, zf.Run(**{**LLAMA, "ranks": 2}), slots=2)
    assert found
    needed = sum([found.first_bytes, *found.stages]) + CPU_LIBRARY_BYTES
    run = zf.Run(**{**LLAMA, "ranks": 4})
    with pytest.raises(zf.DoesNotFit) as caught:
        held_on({"n1": host(8 * GIB), "n2": host(needed // 2)}, run, slots=2)
    assert "are free for each of 2 ranks on n2" in caught.value.problems[0].message
    assert caught.value.problems[0].where == "n2"
    with pytest.raises(zf.DoesNotFit, match="on n1"):  # what others there have reserved is not free
        held_on({"n1": host(8 * GIB, reserved_bytes=8 * GIB - needed // 2), "n2": host(8 * GIB)}, run, slots=2)
    told: list[Event] = []
    assert held_on({"n1": host(8 * GIB), "n2": host(needed // 2)}, run, slots=2, anyway=True, on_event=told.append)
    assert [event.kind for event in told if "started anyway" in event.text] == ["warning"]


def test_beside_gpus_the_memory_of_their_host_is_held_too(unhinted):
    run = zf.Run(**{**LLAMA, "ranks": 2, "ds_config": "zero2_offload", "precision": "bf16"})
    simulated = zf.simulate(run, zf.Cluster("h100-80gb", gpus=2, host_memory="64GiB"))
    kept = simulated.host_phases
    assert max(kept.values()) == sum(simulated.host_bytes.values()) and kept["build"] > 0
    largest = resolve_job(as_request(run)).job.facts.largest_parameter * 2  # rank 0 saves a tensor at a time
    most, saving, processes = max(kept.values()), kept["step"] + largest, 2 * HOST_PROCESS_BYTES
    needed = max(2 * most, saving + kept["step"]) + processes  # in one phase
    found = held_on({"n1": host(2 * needed, gpus=2)}, run, slots=2)
    assert found and found.first_bytes + sum(found.stages) == max(most, saving) + most + processes
    with pytest.raises(zf.DoesNotFit) as caught:
        held_on({"n1": host(needed - 1, gpus=2)}, run, slots=2)
    said = caught.value.problems[0].message
    assert "of host memory in " in said and "are free on n1. 2 ranks need " in said
    assert " pinned) and 6.00 GiB for processes." in said


def test_a_host_that_could_not_be_asked_looks_for_itself(tmp_path, monkeypatch, unhinted):
    """Node 0 of two that start by themselves judges its own ranks; what node 1 finds ends the launch as a refusal."""
    run, hosts = zf.Run(**{**LLAMA, "ranks": 4}), [Host("node-0", 2), Host("node-1", 2)]
    asked = as_request(run)
    resolved = resolve_job(asked, machine=machine_of(hosts, None))
    found = MemoryGate(Reporter(), hosts=hosts)(asked, resolved, tmp_path)
    assert found and found.judged_ranks == 2
    assert MemoryGate(Reporter(), hosts=hosts, facts={})(asked, resolved, tmp_path).judged_ranks == 0  # under Slurm
    assert MemoryGate(Reporter(), hosts=hosts, anyway=True)(asked, resolved, tmp_path).judged_ranks == 4
    (tmp_path / "plan.json").write_text(json.dumps({"forecast": dataclasses.asdict(found)}))
    place = {"LOCAL_SIZE": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "DS_ACCELERATOR": "cpu"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    free = CPU_LIBRARY_BYTES + 2 * found.stages[0]
    monkeypatch.setattr(reservations, "host_memory", lambda: (free, free))
    refuse_small_host(RunFolder(tmp_path), 2)
    monkeypatch.setattr(reservations, "host_memory", lambda: (free - 1, free - 1))
    refuse_small_host(RunFolder(tmp_path), 0)  # of a host that was judged
    with pytest.raises(zf.RunFailed, match=r"forecast to need .* of host memory for 2 ranks") as caught:
        refuse_small_host(RunFolder(tmp_path), 2)

    def refused(*_, **__):
        raise zf.DoesNotFit(caught.value.problem)  # as `launch.outcome` does

    monkeypatch.setattr(restarts, "run_ranks", refused)
    options = HostRequest(no_ssh=True, nodes=2, slots=2, node_rank=0, master_addr="127.0.0.1")
    launch = RestartingRun(
        request=as_request(run.model_copy(update={"output": tmp_path / "run"})),
        hosts=hosts,
        options=options,
        report=Reporter(),
        run_file=None,
        max_restarts=3,
        anyway=True,
    )
    with pytest.raises(zf.DoesNotFit):
        launch.run()


@pytest.mark.parametrize("error", [zf.UserError, zf.DoesNotFit, KeyboardInterrupt])
def test_a_launch_that_starts_no_rank_leaves_no_folder(tmp_path, monkeypatch, error):
    def fail(*_):
        assert (tmp_path / "runs" / "new").is_dir()
        raise error(zf.Problem(kind="host", message="node1 did not answer"))

    monkeypatch.setattr(restarts, "examine_hosts", fail)
    launch = RestartingRun(
        request=as_request(zf.Run(output=tmp_path / "runs" / "new")),
        hosts=[Host("localhost", 1)],
        options=HostRequest(),
        report=Reporter(),
        run_file=None,
        max_restarts=0,
    )
    with pytest.raises(error):
        launch.run()
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_others_have_taken_is_not_free(unhinted):
    run = zf.Run(**{**LLAMA, "precision": "bf16"})
    there = host(32 * GIB, gpus=1)
    assert held_on({"n1": there}, run, slots=1)
    for name, said in (("used_bytes", ""), ("reserved_bytes", r" \(79.9 GiB reserved by other runs\)")):
        (gpu,) = there["gpus"]
        taken = {**there, "gpus": [{**gpu, name: 80 * GIB - 2**26}]}
        with pytest.raises(zf.DoesNotFit, match=rf"64.0 MiB are free on n1{said}\. torch reserves"):
            held_on({"n1": taken}, run, slots=1)
    with pytest.raises(zf.DoesNotFit, match=r"needs at least .* of 1 rank; 0 B are free on n1\."):
        held_on({"n1": {**there, "gpus": [{**gpu, "used_bytes": 80 * GIB}]}}, run, slots=1)


def test_a_gpu_that_nobody_knows_is_a_note(unhinted, monkeypatch):
    def unknown():
        raise zf.UserError(Problem(kind="bad-value", message="the GPU Card [9] is not known"))

    monkeypatch.setattr(memory_gate.Cluster, "here", unknown)
    there = host(32 * GIB, gpus=1)
    there["gpus"] = [{**there["gpus"][0], "name": "Card [9]", "used_bytes": 80 * GIB}]
    told: list[Event] = []
    assert held_on({"n1": there}, zf.Run(**LLAMA), slots=1, on_event=told.append) is None
    (note,) = [event.text for event in told if event.kind == "note"]
    assert note == "cannot forecast the memory of this run: the GPU Card [9] is not known"


def test_what_was_let_through_is_reserved_until_the_gate_closes(tmp_path, monkeypatch, unhinted):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))
    asked, first = as_request(zf.Run(**LLAMA)), MemoryGate(Reporter())
    resolved = resolve_job(asked)
    found = first(asked, resolved, tmp_path / "first")
    assert found and reserved_on_host() == found.first_bytes and reserved_on_host(except_run=tmp_path / "first") == 0
    free = CPU_LIBRARY_BYTES + found.first_bytes * 3 // 2  # for one of two
    monkeypatch.setattr(reservations, "host_memory", lambda: (free, free))
    with pytest.raises(zf.DoesNotFit):
        held_against(zf.Run(**LLAMA), tmp_path / "second")
    first.close()
    assert reserved_on_host() == 0
    assert held_against(zf.Run(**LLAMA), tmp_path / "second")


def test_what_cannot_be_simulated_starts_with_a_note(tmp_path, monkeypatch):
    (tmp_path / "valued.py").write_text(
        textwrap.dedent("""
        import torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(64, 10)
            def forward(self, x):
                x = x.flatten(1)
                return self.head(x) if float(x.sum()) > -1e30 else x
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    told: list[Event] = []
    run = zf.Run(model="valued:Net", data="digits", loss="cross-entropy", steps=1, ranks=1)
    assert held_against(run, tmp_path / "run", told.append) is None
    notes = [event.text for event in told if event.kind == "note"]
    assert len(notes) == 1 and notes[0].startswith("cannot forecast the memory of this run: valued:Net cannot be")
    assert held_against(zf.Run(model="dcgan", data="digits", steps=1, ranks=1), tmp_path / "run") is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits of Linux")
def test_a_rank_that_takes_more_than_its_share_fails_by_itself(tmp_path, monkeypatch):
    """The forecast is wrong here on purpose: the memory is taken outside of torch, which no simulation sees."""
    share = psutil.virtual_memory().total * 3 // 4
    (tmp_path / "hungry.py").write_text(
        textwrap.dedent(f"""
        import os, numpy, torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(64, 10)
            def forward(self, x):
                if os.environ.get("LOCAL_SIZE"):
                    self.more = numpy.empty({share}, dtype=numpy.uint8)
                return self.head(x.flatten(1))
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(zf.RunFailed) as caught:
        zf.train(zf.Run(model="hungry:Net", data="digits", loss="cross-entropy", steps=2, ranks=2, output="run"))
    assert caught.value.problem.kind == "out-of-memory"
    assert "--micro-batch" in caught.value.problem.hint
