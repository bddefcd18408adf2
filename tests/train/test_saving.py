"""Saving while training: in the background, and onto a disk that is full."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.train.test_restore import same, state
from zerofit.checkpoint.store import verify
from zerofit.train.checkpoint_engine import SyncedCheckpointEngine

MLP = {"model": "mlp", "data": "digits"}


@pytest.mark.versions(of="deepspeed")
def test_in_the_background_the_same_is_written(pools, tmp_path):
    """The copies are of the step that was saved, though training went on while they were written."""
    how = {**MLP, "steps": 12, "save_every": 4, "micro_batch": 4}
    runs = {name: pools(2).train(tmp_path / name, save_async=name == "async", **how) for name in ("async", "at once")}
    for step in (4, 8, 12):
        assert not verify(runs["async"].folder.checkpoints / f"step-{step:08}")
        one, other = (state(run, step) for run in runs.values())
        assert len(one) > 20
        assert [name for name in one if not same(one[name], other[name])] == []


def test_a_file_that_cannot_be_written_fails_the_save_and_not_the_rank(tmp_path):
    """Other ranks are in the same save, and a save before the last one is only a warning."""
    files = SyncedCheckpointEngine(zero_stage=1)
    for name in ("there", "missing"):
        (tmp_path / "there").mkdir(exist_ok=True)
        files.write_text("{}", tmp_path / name / "rank-00000.json")
        files.save({"a": 1}, tmp_path / name / "rank-00000.pt")
    with pytest.raises(OSError, match="missing"):
        files.marks()
    files.save({"a": 1}, tmp_path / "there" / "rank-00000.pt")
    assert list(files.marks()) == [tmp_path / "there" / "rank-00000.pt"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 68 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=68m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_met_before_the_old_checkpoint_is_touched(pools, small_disk):
    """Each checkpoint takes 2.9 MiB, and 64 MiB stay free for everything else: there is room for one."""
    words = pools(2).fail(small_disk / "run", **MLP, model_args={"hidden": 2400}, steps=6, save_every="2", keep_last=1)
    assert [word["kind"] for word in words] == ["save-failed"] * 2  # that of the last step; the ones before it warn
    (kept,) = (small_disk / "run" / "checkpoints").iterdir()
    assert kept.name == "step-00000002"
    assert not verify(kept)
    events = [json.loads(line) for line in (small_disk / "run/logs/events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "save-failed"] == [4, 6]
