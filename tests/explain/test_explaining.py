"""`zerofit explain`: run folders, the forecast of the command beside it, exit codes, and no torch."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tests.explain.logs import PHASES, full, traceback
from tests.explain.snapshots import MIB, ran_out_in_forward
from zerofit.app.explaining import _with_simulation, explain
from zerofit.cli.main import main
from zerofit.spec.errors import UserError
from zerofit.spec.model_facts import ModelFacts
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Batch, Job, Layout, MemoryForecast, RunFolder

GIB = 1 << 30
FACTS = ModelFacts(task="image", parameters=10, largest_parameter=10, hidden_size=3, forward_flops=None)


def run(*words: object, stdin: str | None = None):
    return CliRunner().invoke(main, ["explain", *map(str, words)], input=stdin)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    """A run folder whose rank 1 ran out at step 3."""
    phases = {"build": GIB, "init": 4 * GIB, "forward": 12 * GIB, "backward": 16 * GIB, "step": 10 * GIB}
    forecast = MemoryForecast(
        phases=phases, reserved_bytes=17 * GIB, beside_bytes=GIB, margin_bytes=GIB, host_bytes=GIB, pinned_bytes=0
    )
    batch = Batch(micro=1, accumulation=1, dp=2)
    job = Job(
        run=Run(model="llama-tiny"),
        layout=Layout(dp=2),
        batch=batch,
        steps=9,
        facts=FACTS,
        ds_config={},
        forecast=forecast,
    )
    found = RunFolder(tmp_path)
    found.logs.mkdir()
    job.write(found, {})
    found.metrics.write_text(json.dumps({"step": 3, "memory_bytes": 15 * GIB, "forecast_bytes": 18 * GIB}) + "\n")
    found.rank_log(0).write_text("fine\n")
    found.rank_log(1).write_text(PHASES["logits"][0])
    return found


def test_a_run_folder_with_its_forecast(folder):
    found = explain(folder.path)
    assert (found.source, found.cause, found.steps, found.ranks) == ("run folder", "logits", 3, ("1",))
    assert found.forecast.allocated_bytes == 12 * GIB and found.forecast.phase == "forward"
    assert found.forecast.parts == ("at step 3 a rank used 15.0 GiB; forecast 18.0 GiB",)
    on_gpu = {"step": 3, "memory_bytes": 11 * GIB, "reserved_bytes": 16 * GIB, "forecast_bytes": 17 * GIB}
    folder.metrics.write_text(json.dumps(on_gpu) + "\n")
    assert explain(folder.path).forecast.parts == ("at step 3 a rank used 16.0 GiB; forecast 17.0 GiB",)
    done = run(folder.path)
    assert done.exit_code == 0 and "forecast      12.0 GiB in tensors in forward" in done.stdout


def test_a_rank_that_left_its_error_only(folder):
    folder.rank_log(1).write_text("")
    folder.rank_error(1).write_text(json.dumps({"problems": [{"message": f"out of memory: {full()}"}]}))
    folder.rank_error(0).write_text("[1")
    assert explain(folder.path).figures.total_bytes == 24 * GIB
    folder.rank_error(1).unlink()  # a killed rank leaves none
    assert explain(folder.path).run_next.startswith("sudo dmesg")


def test_a_run_folder_with_the_last_allocations(folder):
    folder.rank_memory(1).write_bytes(pickle.dumps(ran_out_in_forward(6, leaks=4 * MIB).snapshot()))
    found = explain(folder.path)
    assert (found.source, found.cause, found.ranks, found.steps) == ("run folder", "leak", ("1",), 3)
    assert "/home/me/train.py:66" in [line.place for line in found.lines]
    assert found.message and found.alive


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(UserError, match=r"is not a zerofit run folder: plan\.json is missing"):
        explain(tmp_path)


def simulation(**fields):
    """A simulation as far as `explain` reads it."""
    phases = [
        SimpleNamespace(name="backward", peak_bytes=20 * GIB),
        SimpleNamespace(name="forward", peak_bytes=12 * GIB),
    ]
    knobs = [
        SimpleNamespace(change="--a", reserved_bytes=23 * GIB, fits=False, slowdown=None, cost_rank=0),
        SimpleNamespace(change="--b", reserved_bytes=15 * GIB, fits=True, slowdown=0.2, cost_rank=1),
        SimpleNamespace(change="--c", reserved_bytes=30 * GIB, fits=False, slowdown=None, cost_rank=2),
    ]
    base = {
        "phases": phases,
        "peak_phase": "backward",
        "peak_bytes": 20 * GIB,
        "reserved_bytes": 25 * GIB,
        "tried": knobs,
    }
    base |= {"breakdown": {"activations": 15 * MIB}, "fits": True, "overheads": [], "smi_bytes": 25 * GIB}
    return SimpleNamespace(**{**base, "device_total_bytes": 24 * GIB, "device": "l4", **fields})


def test_where_a_run_parts_from_its_simulation(tmp_path):
    log = tmp_path / "log"
    log.write_text(traceback("loss.backward()", error=full(asked="1.00 GiB", allocated="22.00 GiB")))
    found = _with_simulation(explain(log), simulation())
    assert found.forecast.allocated_bytes == 20 * GIB
    assert found.forecast.parts[0] == "tensors need 23.0 GiB, 3.00 GiB more than the forecast"
    assert [change.change for change in found.changes] == ["--b", "--a"]
    fits = _with_simulation(explain(log), simulation(fits=False))
    assert fits.forecast.parts[0] == "the forecast does not fit either: it needs 25.0 GiB of 24.0 GiB on l4"


def test_a_snapshot_parts_by_kind(tmp_path):
    file = tmp_path / "oom.pickle"
    file.write_bytes(pickle.dumps(ran_out_in_forward(2, loads=900 * MIB).snapshot()))
    found = _with_simulation(explain(file), simulation(peak_bytes=GIB))
    assert found.forecast.parts == (
        "900 MiB more parameters than forecast: each rank has the full model, or there is a second model",
    )


def test_exit_codes_and_standard_input(tmp_path):
    assert run("-", stdin=full()).exit_code == 1  # no traceback
    done = run("-", "--json", stdin=PHASES["weights"][0])
    assert done.exit_code == 0 and json.loads(done.stdout)["cause"] == "weights"
    assert run(tmp_path / "none").exit_code == 2
    log = tmp_path / "log"
    log.write_text(full())
    assert run(log, "--gpu", "l4").exit_code == 2  # hardware of which command?
    assert run(log, "--", "python", "none.py").exit_code == 2


@pytest.mark.parametrize("gpus", ["0", "2"])
def test_hardware_of_a_log_needs_its_command(tmp_path, gpus):
    log = tmp_path / "train.log"
    log.write_text("nothing\n")
    done = run(log, "--gpus", gpus)
    assert done.exit_code == 2 and "hardware without a command" in done.stderr


def test_every_line_fits_the_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for texts in PHASES.values():
        done = run("-", stdin=texts[0])
        assert len(done.stdout.splitlines()) <= 24
        assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith("run next"))


def test_it_needs_no_torch(tmp_path):
    log = tmp_path / "log"
    log.write_text(PHASES["logits"][0])
    code = "import sys; sys.modules.update(dict.fromkeys(('torch', 'deepspeed', 'transformers')));"
    code += f"from zerofit.cli.main import main; main(['explain', {str(log)!r}])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.startswith("\nLOGITS")
