"""zerofit.train: in any thread, behind a handle, and back to the caller with what went wrong."""

from __future__ import annotations

import json
import threading
import time

import pytest

import zerofit as zf
from zerofit.app.training.run_ranks import metrics_event
from zerofit.spec.overhead import CPU_HEAP, CPU_PROCESS_BYTES

MLP = {"model": "mlp", "data": "digits", "ranks": 1, "eval_samples": 16}
LARGEST_BYTES = 4 * 64 * 256  # its largest parameter


def test_a_line_of_metrics_has_the_peaks_beside_their_forecasts():
    record = {"step": 2, "loss": 1.0, "memory_bytes": 1 << 29, "host_bytes": 3 << 30}
    assert metrics_event(record, 9).text.endswith("memory 0.50 GiB")
    on_cpu = record | {"reserved_bytes": None, "forecast_bytes": 1 << 30, "forecast_host_bytes": None}
    assert metrics_event(on_cpu, 9).text.endswith("memory 0.50 of 1.00 GiB forecast")
    on_gpu = on_cpu | {"reserved_bytes": 1 << 30, "forecast_bytes": 3 << 29, "forecast_host_bytes": 4 << 30}
    assert metrics_event(on_gpu, 9).text.endswith("memory 1.00 of 1.50 GiB forecast  host 3.00 of 4.00 GiB forecast")


def test_stopped_and_gone_on_with(tmp_path):
    """Two handles in one process; the second, in a thread, resumes where the first was stopped, and reports events."""
    folder = tmp_path / "run"
    run = zf.Run(**MLP, steps=2_000_000, output=folder)
    job = zf.train(run, wait=False)
    with pytest.raises(TimeoutError):
        job.result(timeout=0)
    with pytest.raises(zf.UserError, match="another zerofit is using"):
        zf.train(run)
    deadline = time.monotonic() + 300
    while len(job.metrics()) < 5 and time.monotonic() < deadline:
        time.sleep(0.1)
    # NULs that a network file system shows must not end the run
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\0" * 10 + b"\n")
    job.stop()
    with pytest.raises(zf.Stopped, match="stopped on request"):
        job.result(timeout=60)
    assert job.done()
    (saved,) = (folder / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    ended, told, steps = [], [], step + 3

    def resume() -> None:
        second = zf.train(run.model_copy(update={"steps": steps}), wait=False, on_event=told.append)
        assert second.folder == folder
        ended.append((second.result(timeout=120), second.metrics()[-1]["step"]))

    thread = threading.Thread(target=resume)
    thread.start()
    thread.join(150)
    ((result, last),) = ended
    assert (result.steps, result.world_size, result.run_dir, last) == (steps, 1, str(folder), steps)
    assert result.resumed_from == str(saved)
    assert result.to_dict() == {"run_dir": result.run_dir, **json.loads((folder / "result.json").read_text())}
    assert [event.data["step"] for event in told if event.kind == "metrics"] == list(range(step + 1, steps + 1))
    assert {event.kind for event in told} >= {"phase", "training", "metrics", "evaluated", "saved"}
    assert f"<td>{steps}</td>" in result._repr_html_()
    forecast = json.loads((folder / "plan.json").read_text())["forecast"]
    wanted = forecast["reserved_bytes"] + forecast["beside_bytes"]
    assert result.against_forecast["memory_bytes"]["forecast"] == wanted
    low, high = CPU_PROCESS_BYTES["torch"]
    assert abs(result.against_forecast["memory_bytes"]["difference"]) < 0.15
    beside = (high - low) // 2 + LARGEST_BYTES  # from nothing to twice that
    heap = round(CPU_HEAP * forecast["reserved_bytes"])  # from nothing to this
    assert forecast["margin_bytes"] == round(0.03 * forecast["reserved_bytes"]) + beside + heap - heap // 2


def test_a_bad_run_raises_in_the_caller(tmp_path):
    run = zf.Run(model="lenett", data="digitz", output=tmp_path / "run")
    with pytest.raises(zf.UserError) as caught:
        zf.train(run, wait=False)
    assert {problem.kind for problem in caught.value.problems} == {"unknown-model", "unknown-data"}
    assert not (tmp_path / "run").exists()


def test_signal_handlers_only_where_python_sets_them(tmp_path):
    with pytest.raises(zf.UserError, match="main thread"):
        zf.train(zf.Run(**MLP, steps=1, output=tmp_path / "run"), wait=False, handle_signals=True)  # type: ignore
