"""A node that waits for node 0 (`--no-ssh`)."""

from __future__ import annotations

import json

import pytest

from zerofit.app.clusters import restarts
from zerofit.app.clusters.hosts import HostRequest
from zerofit.spec.errors import RunFailed
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run


def test_the_result_of_an_earlier_run_ends_no_wait(tmp_path, monkeypatch):
    (tmp_path / "result.json").write_text(json.dumps({"steps": 20}))
    for name, seconds in {"POLL_S": 0.01, "GONE_S": 0.05, "LEADER_S": 0.5}.items():
        monkeypatch.setattr(restarts, name, seconds)

    def follow(steps: int):
        run = Run(model="lenet", output=tmp_path, steps=steps)
        options = HostRequest(nodes=2, slots=1, no_ssh=True, node_rank=1, master_addr="127.0.0.1")
        return restarts.follow(run, [], options, Reporter(None))

    assert follow(20).path == tmp_path
    with pytest.raises(RunFailed, match="node 0 did not start this run"):
        follow(30)
