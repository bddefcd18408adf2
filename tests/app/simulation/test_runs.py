"""`zerofit.simulate` from Python: in any process, from any thread, with knobs when they are asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import zerofit as zf
from tests.simulate.targets import TINY

RUN = {"model": "llama-tiny", "model_args": TINY, "ds_config": "zero2", "micro_batch": 2, "seq_len": 16}
# no `if __name__ == "__main__"`, torch imported before, and not in the main thread
SCRIPT = f"""
import threading
import torch
import zerofit as zf
print("begun")
def work():
    print(zf.simulate(zf.Run(**{RUN!r}), zf.Cluster("l4", gpus=2)).peak_bytes)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.fixture(scope="module")
def simulation(cache) -> zf.Simulation:
    return zf.simulate(zf.Run(**RUN), zf.Cluster("l4", gpus=2))


def test_a_run_without_a_precision_has_the_plans(simulation):
    plan = zf.plan("llama-tiny", zf.Cluster("l4", gpus=2), model_args=TINY, seq_len=16)
    assert simulation.run.precision == plan.layouts[0].layout.precision == "bf16"


def test_the_interval_of_nvidia_smi_is_wider_for_several_ranks(simulation):
    beside = [sum(getattr(one, f"{end}_bytes") for one in simulation.overheads) for end in ("low", "high")]
    low, high = simulation.smi_range_bytes
    assert low == simulation.reserved_bytes + beside[0] < simulation.smi_bytes < high
    assert high == max(simulation.reserved_ahead_bytes, int(1.09 * simulation.reserved_bytes)) + beside[1]
    assert replace(simulation, world_size=1).smi_range_bytes[1] < high
    assert replace(simulation, reserved_ahead_bytes=2 * high).smi_range_bytes[1] == 2 * high + beside[1]
    assert simulation.to_dict()["smi_range_bytes"] == [low, high]


def test_a_script_without_a_guard_runs_once(simulation, tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["begun", str(simulation.peak_bytes)], done.stderr


def test_knobs_are_simulated_when_asked_for(simulation):
    assert simulation.to_dict()["knobs"] == []
    heard: list[zf.Event] = []
    knobs = simulation.knobs(heard.append)
    assert {"--activation-checkpointing", "--ds-config zero3"} <= {knob.change for knob in knobs}
    assert heard and all(event.text.startswith("changes that may fit: ") for event in heard)
    assert simulation.knobs() is knobs and len(simulation.to_dict()["knobs"]) == len(knobs)


@pytest.mark.slow
def test_changes_are_combined_if_none_fits_alone(cache):
    """The combination has the memory of a run with its flags; a shorter one does not fit."""
    tight = zf.Cluster("l4", gpus=1, device_memory=900 << 20)
    run = {"model": "llama-tiny", "micro_batch": 8}
    knobs = zf.simulate(zf.Run(**run), tight).knobs()
    fitting = [knob for knob in knobs if knob.fits]
    assert [knob.change for knob in fitting] == [
        "--loss-chunk 1024 --micro-batch 4 --gradient-accumulation-steps 2 --activation-checkpointing"
    ]
    flags = {"loss_chunk": 1024, "micro_batch": 4, "gradient_accumulation_steps": 2, "activation_checkpointing": True}
    alone = zf.simulate(zf.Run(**run | flags), tight)
    assert alone.fits and alone.peak_bytes == fitting[0].peak_bytes
    assert not zf.simulate(zf.Run(**run | {**flags, "activation_checkpointing": False}), tight).fits


def test_the_rank_that_keeps_most_gradients_is_found(cache):
    """On three ranks the second one's partition is reached into by most of the parameters."""
    run, cluster = zf.Run(**RUN, gradient_accumulation_steps=2), zf.Cluster("l4", gpus=3)
    peaks = [zf.simulate(run, cluster, rank=rank).peak_bytes for rank in range(3)]
    found = zf.simulate(run, cluster)
    assert (found.rank, found.peak_bytes) == (1, max(peaks)) and peaks[0] < peaks[1] > peaks[2], peaks


@pytest.mark.slow
def test_changes_are_simulated_for_the_rank_that_needs_most_then(cache):
    run, cluster = zf.Run(**{**RUN, "ds_config": "zero1"}, gradient_accumulation_steps=2), zf.Cluster("l4", gpus=3)
    found = {row.change: row.peak_bytes for row in zf.simulate(run, cluster).knobs()}
    turned = zf.Run(**run.model_copy(update={"ds_config": "zero2"}).model_dump(exclude_unset=True))
    peaks = [zf.simulate(turned, cluster, rank=rank).peak_bytes for rank in range(3)]
    assert found["--ds-config zero2"] == max(peaks) > peaks[0], peaks


def test_a_simulation_that_is_killed_says_so():
    """The processes that simulate are killed; the one that they are forked from, and so the next call, is not."""
    answers: list[object] = []

    def work() -> None:
        with pytest.raises(zf.UserError) as error:
            zf.simulate(zf.Run(**{**RUN, "model_args": {}, "seq_len": 256}), zf.Cluster("l4", gpus=2))
        answers.append(error.value.problems[0].kind)

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + 300  # importing torch from a cold disk included
    while time.monotonic() < deadline and thread.is_alive() and not answers:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # killed a moment ago
                grandparent = process.parent() and process.parent().parent()
                if grandparent and grandparent.parent() and grandparent.parent().pid == os.getpid():
                    process.send_signal(signal.SIGKILL)
        time.sleep(0.05)
    thread.join(60)
    assert answers == ["killed"]


def test_a_notebook_shows_a_table(simulation):
    html = simulation._repr_html_()
    assert html.startswith("<table>") and "rank 0 of 2 on l4: fits" in html


def test_what_is_wrong_comes_at_once():
    run = zf.Run(model="lama-tiny", tensor_parallel=2, ranks=3)
    with pytest.raises(zf.UserError) as error:
        zf.simulate(run, zf.Cluster("l4", gpus=2))
    assert {p.kind for p in error.value.problems} >= {"unknown-model", "ranks"}
