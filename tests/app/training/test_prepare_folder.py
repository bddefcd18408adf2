"""What a start finds in a folder that an earlier one was killed in."""

from __future__ import annotations

import json

from zerofit.app.training.prepare_folder import make_ready
from zerofit.spec.run_folder import RunFolder, Start


def test_leftovers_of_a_killed_start_are_cleared_and_undone_records_kept(tmp_path):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.model_parts.mkdir()
    (folder.model_parts / "stage-0.safetensors").write_bytes(bytes(1000))  # killed while it saved a pipeline's model
    for path in (folder.stop_request, folder.stopped, folder.logs / "rank-0.error.json", folder.result):
        path.write_text("{}")
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3)]
    folder.metrics.write_text("".join(lines) + '{"step": 4, "lo')
    start = Start(checkpoint="checkpoints/step-00000002", step=2, samples=32, same_layout=True)
    notes = make_ready(folder, start)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "metrics.jsonl"]
    assert folder.metrics.read_text() == "".join(lines[:2])
    assert (folder.logs / "metrics-undone-1.jsonl").read_text() == lines[2] + '{"step": 4, "lo'
    assert notes == ["moved 2 records of steps after step 2 to logs/metrics-undone-1.jsonl"]
