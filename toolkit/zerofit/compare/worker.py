"""Run one process of one strategy, with RANK and related variables in its environment.

The process writes `rank-N.json` with its measurements, or with the reason why there are none. At the end, the rank that
has the full model evaluates the model. This rank also compares the model's weights with those that the strategy
`single` trained on one device.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError
from zerofit.compare.job import STRATEGIES, CompareJob, RankReport
from zerofit.models.batch_norm import batch_norms
from zerofit.models.catalog import ModelError
from zerofit.models.without_dynamo import without_dynamo
from zerofit.spec.files import write_json
from zerofit.spec.local_machine import host_memory
from zerofit.spec.memory_limit import end_first, limit_memory

# All strategies train on the same samples from the same weights with SGD. So strategies that only reorder sums must end
# with the weights of the single device, up to rounding. The single device is measured first, and its weights are the
# reference.
REFERENCE = "single.safetensors"  # in the folder of the strategies' folders


def measure(folder: Path) -> NoReturn:
    """Run this process's part of the job in `folder`, write its measurements, and exit."""
    rank = int(os.environ["RANK"])
    job = CompareJob.read(folder / "job.json")
    end_first()  # if the machine runs out of memory, the kernel kills this process, not the command
    if job.accelerator == "cpu":
        limit_memory(host_memory()[1])  # per process: strategies do not divide memory evenly
    try:
        with without_dynamo():
            report = _train(job, folder, rank)
    except (NotHereError, ModelError) as reason:
        report = {"not_here": str(reason)}
    except BaseException as error:
        traceback.print_exc()
        report = {"error": f"{type(error).__name__}: {str(error).strip() or 'no message'}"}
    write_json(folder / f"rank-{rank}.json", report)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if "error" in report else 0)  # shutting down process groups would take seconds


def _train(job: CompareJob, folder: Path, rank: int) -> RankReport:
    """Train with the job's strategy. Return this process's measurements."""
    work = BenchmarkTask(job, folder, rank)
    strategy = STRATEGIES[job.strategy]
    state = strategy.load().train(work, **strategy.options)
    report = work.measurements()
    if dist.is_initialized():
        dist.barrier()  # no process exits while another one still gathers
    if job.phases:
        return work.epochs.measurements()
    if curve := work.curve():
        report["curve"] = curve
    # Only one rank has the full model.
    if state is not None:
        report |= _evaluate(work, state, folder)
    return report


def _evaluate(work: BenchmarkTask, state: dict[str, Tensor], folder: Path) -> RankReport:
    """Return loss, accuracy and the largest difference to the weights of the single device."""
    model = work.model()
    model.load_state_dict(state)
    names = [name for name, _ in model.named_parameters()]
    reference = folder.parent / REFERENCE
    if work.job.strategy == "single":
        save_file({name: state[name].contiguous() for name in names}, reference)
    report: RankReport = {**work.evaluate(model), "batch_norm": bool(batch_norms(model))}
    if reference.exists():
        single = load_file(reference)
        report["max_weight_difference"] = max(float((state[n].float() - single[n].float()).abs().max()) for n in names)
    return report
