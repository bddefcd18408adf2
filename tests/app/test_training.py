"""zerofit.train: in any thread, behind a handle, and back to the caller with what went wrong."""

from __future__ import annotations

import json
import threading
import time

import pytest

import zerofit as zf

MLP = {"model": "mlp", "data": "digits", "ranks": 1, "eval_samples": 16}


def test_in_a_thread_with_what_happens_told(tmp_path):
    ended, told = [], []
    run = zf.Run(**MLP, steps=12, output=tmp_path / "run")
    thread = threading.Thread(target=lambda: ended.append(zf.train(run, on_event=told.append)))
    thread.start()
    thread.join(150)
    (result,) = ended
    assert (result.steps, result.world_size, result.run_dir) == (12, 1, str(tmp_path / "run"))
    assert result.to_dict() == {"run_dir": result.run_dir, **json.loads((tmp_path / "run" / "result.json").read_text())}
    assert [event.data["step"] for event in told if event.kind == "metrics"] == list(range(1, 13))
    kinds = {event.kind for event in told}
    assert kinds >= {"phase", "training", "metrics", "evaluated", "saved"}
    assert "<td>12</td>" in result._repr_html_()


def test_stopped_and_gone_on_with(tmp_path):
    """Two handles after each other in one process, of which the second goes on where the first was stopped."""
    run = zf.Run(**MLP, steps=2_000_000, output=tmp_path / "run")
    job = zf.train(run, wait=False)
    with pytest.raises(TimeoutError):
        job.result(timeout=0)
    with pytest.raises(zf.UserError, match="another zerofit is at work"):
        zf.train(run)
    deadline = time.monotonic() + 120
    while len(job.metrics()) < 5 and time.monotonic() < deadline:
        time.sleep(0.1)
    # NULs that a network file system shows must not end the run
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b"\0" * 10 + b"\n")
    job.stop()
    with pytest.raises(zf.Stopped, match="stopped on request"):
        job.result(timeout=60)
    assert job.done()
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    second = zf.train(run.model_copy(update={"steps": step + 3}), wait=False)
    assert second.folder == tmp_path / "run"
    result = second.result(timeout=120)
    assert (result.steps, result.resumed_from) == (step + 3, str(saved))
    assert second.metrics()[-1]["step"] == step + 3


def test_a_bad_run_raises_in_the_caller(tmp_path):
    run = zf.Run(model="lenett", data="digitz", output=tmp_path / "run")
    with pytest.raises(zf.UserError) as caught:
        zf.train(run, wait=False)
    assert {problem.kind for problem in caught.value.problems} == {"unknown-model", "unknown-data"}
    assert not (tmp_path / "run").exists()


def test_signal_handlers_only_where_python_sets_them(tmp_path):
    with pytest.raises(zf.UserError, match="main thread"):
        zf.train(zf.Run(**MLP, steps=1, output=tmp_path / "run"), wait=False, handle_signals=True)  # type: ignore
