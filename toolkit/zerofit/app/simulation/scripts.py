"""`zerofit.simulate_script`: simulate a user's unmodified training script as one rank."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zerofit.app.planning.output_files import TRACE_FLAG, write_trace
from zerofit.app.simulation.rank_trace import script_step_s, trace_of_script
from zerofit.config.ds_json import write_for_trainer
from zerofit.simulate.endings import MAY_FIT, note_failed, optional
from zerofit.simulate.forecast.assess import SimulatedScriptRank, assess
from zerofit.simulate.forecast.processes import simulate_all
from zerofit.simulate.forecast.result import (
    KnobResult,
    LongestBatch,
    SimulatedScript,
    Simulation,
    WorstCase,
    first_that_fits,
    in_order,
    severity,
    stage_peaks,
)
from zerofit.simulate.forecast.script_knobs import ScriptKnob, script_knobs
from zerofit.simulate.memory.alloc_conf import read_alloc_conf
from zerofit.simulate.record import RankRecord
from zerofit.simulate.script.command import LATER_STAGE, ScriptCommand, ScriptTarget, rank_problems, read_command
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.files import refuse_target
from zerofit.spec.overhead import blas_workspace_bytes

STEPS = 2  # from the second step on ZeRO-3 prefetches, which needs more memory


def simulate_script(
    command: Sequence[str],
    cluster: Cluster | None = None,
    *,
    rank: int | None = None,
    steps: int = STEPS,
    longest: bool = False,
    alloc_conf: str = "",
    trace: str | Path | None = None,
    snapshot: str | Path | None = None,
    on_event: OnEvent | None = None,
) -> Simulation:
    """Run the first steps of an unmodified training script as one rank on a fake device.

    Args:
        command: the start command with all options: python, torchrun, deepspeed or accelerate launch.
        cluster: the hardware; this machine if None.
        rank: the rank to simulate; the heaviest if None.
        steps: optimizer steps after which the script is stopped.
        longest: also simulate batches of the longest length that the script allows.
        alloc_conf: options of torch's allocator, in the format of PYTORCH_CUDA_ALLOC_CONF.
        trace: file for a Chrome trace of the last step of the returned rank.
        snapshot: file for the rank's allocations in torch's format for memory snapshots.
        on_event: gets progress.

    Raises UserError with all problems of the command, the script's own error, or what cannot be simulated.

    >>> import zerofit as zf
    >>> from pathlib import Path
    >>> lines = ["import torch, deepspeed", "net = torch.nn.Linear(1024, 1024)"]
    >>> lines += ["adam = {'type': 'AdamW', 'params': {'lr': 1e-3}}"]
    >>> lines += ["config = {'train_micro_batch_size_per_gpu': 8, 'optimizer': adam}"]
    >>> lines += ["engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)"]
    >>> lines += ["while True:", "    loss = engine(torch.randn(8, 1024, device=engine.device)).mean()"]
    >>> lines += ["    engine.backward(loss)", "    engine.step()"]
    >>> _ = Path("train.py").write_text("\\n".join(lines))
    >>> simulation = zf.simulate_script(["deepspeed", "--num_gpus", "2", "train.py"], zf.Cluster("l4", gpus=2))
    >>> simulation.fits, simulation.peak_bytes > 4 * 4 * 1024 * 1025  # weights, gradients, Adam's moments in fp32
    (True, True)
    """
    start, report = time.perf_counter(), Reporter(on_event)
    script = read_command(command)
    cluster = Cluster.here() if cluster is None else cluster
    read_alloc_conf(alloc_conf)
    refuse_target(trace, TRACE_FLAG)
    refuse_target(snapshot, "--snapshot")
    check_command(script, cluster, rank=rank or 0, steps=steps)
    target = ScriptTarget(
        command=script,
        device=cluster.device,
        gpus=cluster.gpus,
        nodes=cluster.nodes,
        host_bytes=cluster.host_bytes,
        rank=rank or 0,
        workspace_bytes=blas_workspace_bytes(cluster.device),
        alloc_conf=alloc_conf,
        steps=steps,
        stacks=snapshot is not None,
    )
    targets = [target, replace(target, longest=True)] if longest else [target]
    # the list grows during the loop: the record of a stage contains what the next stage receives
    stages = [(targets, _simulate_stages(targets, report.status))]
    assessed = list[tuple[ScriptTarget, RankRecord, Simulation]]()
    for targets, records in stages:
        if rank is None:
            stages += _next_stage(targets, records, report)
            targets, records = _heaviest(targets, records, report)
        usual, *with_longest = [_assessed(*pair, cluster) for pair in zip(targets, records, strict=True)]
        assert isinstance(records[0], RankRecord)
        simulation = _with_longest(usual, with_longest[0]) if with_longest else usual
        assessed.append((targets[0], records[0], simulation))
    target, record, worst = max(assessed, key=lambda entry: severity(entry[2]))
    if record.routed:
        worst = _with_worst_routing(worst, target, cluster, report)
    if trace is not None:
        write_trace(Path(trace), trace_of_script(record, worst.rank, cluster))
    if snapshot is not None:
        worst = worst.write_snapshot(Path(snapshot))
    return replace(
        worst,
        stages=stage_peaks([simulation for *_, simulation in assessed]),
        trace=Path(trace) if trace is not None else None,
        seconds=round(time.perf_counter() - start, 1),
        simulate_knobs=ScriptKnobSimulations(target=target, record=record, simulation=worst, cluster=cluster),
    )


def _simulate_stages(targets: Sequence[ScriptTarget], show: Callable[[str], None]) -> list[RankRecord | Problem]:
    """Return the record of each target's rank."""
    # A rank of a later pipeline stage runs after the earlier stages.
    records = simulate_all(targets, show)
    # A rank of a later stage needs the activations that it receives. So a rank of each stage before it runs first, from
    # stage 0 on, and its record has what it sends.
    later = [n for n, record in enumerate(records) if isinstance(record, Problem) and record.kind == LATER_STAGE]
    running = {n: replace(targets[n], rank=0, received=None) for n in later}
    while running:
        for n, record in zip(list(running), simulate_all(list(running.values()), show), strict=True):
            records[n] = record
            if isinstance(record, Problem) or running[n].rank == targets[n].rank or record.pipeline is None:
                del running[n]
                continue
            last_stage, stage = record.pipeline.stage_of_rank[targets[n].rank], record.pipeline.stage + 1
            rank = targets[n].rank if stage == last_stage else record.pipeline.stage_of_rank.index(stage)
            running[n] = replace(running[n], rank=rank, received=record.pipeline.sends)
    return records


def _next_stage(
    targets: list[ScriptTarget], records: list[RankRecord | Problem], report: Reporter
) -> list[tuple[list[ScriptTarget], list[RankRecord | Problem]]]:
    following = []
    for target, record in zip(targets, records, strict=True):
        if isinstance(record, Problem) or record.pipeline is None or record.pipeline.sends is None:
            return []
        rank = record.pipeline.stage_of_rank.index(record.pipeline.stage + 1)
        following.append(replace(target, rank=rank, received=record.pipeline.sends))
    return [(following, simulate_all(following, report.status))]


def _heaviest(
    targets: list[ScriptTarget], records: list[RankRecord | Problem], report: Reporter
) -> tuple[list[ScriptTarget], list[RankRecord | Problem]]:
    """Return the targets and records of the rank that needs the most memory.

    The first record may name a heavier rank. If that rank cannot be simulated or needs no more memory, return `targets`
    and `records`.
    """
    first = records[0]
    if isinstance(first, Problem) or first.heavier_rank is None:
        return targets, records
    heavier_targets = [replace(target, rank=first.heavier_rank) for target in targets]
    heavier_records = simulate_all(heavier_targets, report.status)
    heavier = heavier_records[0]
    # Which rank is heavier was estimated from one rank. Only the simulation of the other one decides.
    if isinstance(heavier, RankRecord) and heavier.needs > first.needs:
        return heavier_targets, heavier_records
    return targets, records


@dataclass(frozen=True, kw_only=True)
class ScriptKnobSimulations:
    """Changes of a command that would need less memory.

    Calling this object simulates each change.
    """

    target: ScriptTarget
    record: RankRecord  # of the unchanged command
    simulation: Simulation  # stage of the record
    cluster: Cluster

    def __call__(self, on_event: OnEvent | None = None) -> tuple[KnobResult, ...]:
        """Return the result of each change, least memory first.

        Changes that cannot be simulated are left out. If no change fits, add the shortest combination that fits or, if
        none does, the one closest to fitting.
        """
        assert isinstance(self.simulation.run, SimulatedScript)
        report = Reporter(on_event)
        with tempfile.TemporaryDirectory() as folder:
            knobs = script_knobs(self.target.command, self.simulation.run.facts, self.target, Path(folder))
            simulate = partial(self._simulated, folder=Path(folder), report=report)
            found = [(knob, row) for knob, row in zip(knobs, simulate(knobs), strict=True) if row]
            rows = [row for _, row in found]
            if not any(row.fits for row in rows):
                rows += self._combined(found, simulate)
        return in_order(rows)

    def _simulated(self, knobs: Sequence[ScriptKnob], *, folder: Path, report: Reporter) -> list[KnobResult | None]:
        """Return each change's result; None if it has no effect or cannot be simulated."""
        targets = [self._changed(knob, folder) for knob in knobs]
        records = _simulate_stages(targets, lambda text: report.status(f"{MAY_FIT}: {text}"))
        note_failed(records, MAY_FIT, report)
        before, rows = self._step_s(self.record, report), list[KnobResult | None]()
        for knob, target, record in zip(knobs, targets, records, strict=True):
            # an edit has no effect if the script does not create the replaced object in the usual way
            if isinstance(record, Problem) or (knob.edits and record.needs == self.record.needs):
                rows.append(None)
                continue
            after = self._step_s(record, report) if before else None
            row = KnobResult.of(_assessed(target, record, self.cluster), knob.change, knob.config)
            rows.append(replace(row, slowdown=after / before - 1 if after and before else None, file=knob.file))
        return rows

    def _combined(
        self,
        found: Sequence[tuple[ScriptKnob, KnobResult]],
        simulate: Callable[[Sequence[ScriptKnob]], list[KnobResult | None]],
    ) -> list[KnobResult]:
        """Add up changes, the cheapest first, and return the shortest combination that fits.

        Offloading is used only if nothing fits without it. If no combination fits, return the one with the least
        memory.
        """
        command, misfits = self.target.command, list[KnobResult]()
        for offloads in (False, True):
            order = [entry for entry in found if offloads or "offload" not in entry[0].change]
            order.sort(key=lambda entry: math.inf if entry[1].slowdown is None else entry[1].slowdown)
            sharding = [entry for entry in order if entry[0].shards(command)]
            least = min(sharding, key=lambda entry: entry[1].peak_bytes)[0] if sharding else None
            chain = list[ScriptKnob]()
            for knob in [knob for knob, _ in order if knob is least or not knob.shards(command)]:
                if merged := chain[-1].with_(knob, command) if chain else knob:
                    chain.append(merged)
            while chain and (halved := chain[-1].halved()):
                chain.append(halved)
            chain = chain[1:]  # more than one change
            if not chain or any(row.change == chain[-1].change for row in misfits):
                continue
            best = simulate(chain[-1:])[0]
            if best and best.fits:
                return [first_that_fits(chain, best, simulate)]
            misfits += [best] if best else []
        return sorted(misfits, key=lambda row: row.peak_bytes)[:1]

    def _step_s(self, record: RankRecord, report: Reporter) -> float | None:
        return optional(lambda: script_step_s(record, self.cluster), None, "step times", report)

    def _changed(self, knob: ScriptKnob, folder: Path) -> ScriptTarget:
        arguments = dict(knob.arguments)
        if knob.config:
            file = folder / f"{knob.config}.json"
            write_for_trainer(knob.config, file)
            arguments["deepspeed"] = str(file)
        return replace(
            self.target, command=knob.command, arguments=arguments, edits=knob.edits, stacks=False, received=None
        )


def _assessed(target: ScriptTarget, record: RankRecord | Problem, cluster: Cluster) -> Simulation:
    if isinstance(record, Problem):
        raise UserError(record)
    assert record.script
    return assess(SimulatedScriptRank(target=target, record=record, facts=record.script), cluster)


def _with_longest(usual: Simulation, longest: Simulation) -> Simulation:
    """Add the memory of the longest batches to a simulation."""
    # It then fits only if these batches fit too.
    assert isinstance(usual.run, SimulatedScript) and isinstance(longest.run, SimulatedScript)
    seen = longest.run.facts
    batch = LongestBatch.of(longest, tokens=seen.longest_seen, shape=max(seen.shapes, key=math.prod, default=()))
    run = replace(usual.run, longest=batch)
    if longest.fits or not usual.fits:
        return replace(usual, run=run)
    because = f"With batches of {batch.name}: {longest.because}"
    return replace(
        usual, run=run, fits=False, verdict=longest.verdict, margin_bytes=longest.margin_bytes, because=because
    )


def _with_worst_routing(usual: Simulation, target: ScriptTarget, cluster: Cluster, report: Reporter) -> Simulation:
    """Add a worst case to a simulation: the memory of a rank whose experts get all tokens.

    The verdict stays the same. These experts are on rank 0 or, in a pipeline, on the first rank of the stage.
    """
    crowded = replace(target, crowded=True, rank=target.rank if target.received else 0, stacks=False)
    records = simulate_all([crowded], lambda text: report.status(f"worst routing: {text}"))
    if isinstance(records[0], Problem):
        note_failed(records, "worst routing", report)
        return usual
    assert isinstance(usual.run, SimulatedScript)
    worst = WorstCase.of(_assessed(crowded, records[0], cluster))
    return replace(usual, run=replace(usual.run, worst_routing=worst))


def check_command(script: ScriptCommand, cluster: Cluster, *, rank: int, steps: int) -> None:
    """Check the command against the files and the hardware. Raises UserError with all problems."""
    problems = Problems()
    if not script.is_module and not Path(script.script).is_file():
        problems.add("command", f"no script {script.script}", "use a path relative to the current folder", "COMMAND")
    problems.extend(rank_problems(script, cluster.gpus, cluster.nodes))
    if not 0 <= rank < cluster.ranks:
        message, hint = f"no rank {rank}: there are {cluster.ranks} ranks", f"use 0 to {cluster.ranks - 1}"
        problems.add("bad-value", message, hint, "--rank")
    if steps < 1:
        hint = "use 2: the second step may need more memory"
        problems.add("bad-value", f"--steps {steps} is less than 1", hint, "--steps")
    problems.raise_if_any()
