"""`zerofit.check` from Python: typed findings, fixes, reasons; what its command prints."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import zerofit as zf

BROKEN = {"train_batch_size": 8, "zero_optimisation": {"stage": 2}}


def test_findings_are_typed_and_to_dict_is_the_json(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BROKEN))
    result = zf.check(path)
    (finding,) = result.errors
    assert (finding.code, finding.line, finding.path) == ("unknown-key", 1, "zero_optimisation")
    command = [sys.executable, "-m", "zerofit.cli", "check", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and json.loads(done.stdout) == json.loads(json.dumps(result.to_dict()))
    assert result.write(result.fixed(), "fixed") == tmp_path / "ds.fixed.json"
    assert not zf.check(tmp_path / "ds.fixed.json").errors


def test_the_cluster_says_ranks_and_precisions():
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    config |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}

    def codes(cluster: zf.Cluster | str) -> set[str]:
        return {f.code for f in zf.check(config, cluster=cluster).findings}

    assert codes("h100-80gb") == {"batch-ranks"}  # which says the number that fits
    assert codes(zf.Cluster("h100-80gb", gpus=4)) == set()
    assert codes(zf.Cluster("h100-80gb", gpus=8)) == {"batch-identity"}
    assert codes(zf.Cluster("v100-32gb", gpus=4)) == {"bf16-device"}


def test_a_run_with_a_model_is_resolved(tmp_path):
    run = zf.Run(model="llama-tiny", precision="bf16", micro_batch=4)
    resolved = zf.check("zero3_offload", run, zf.Cluster("h100-80gb", gpus=2)).resolve()
    assert resolved.config["train_batch_size"] == 8 and resolved.config["bf16"]["enabled"]
    assert all(row["why"] for row in resolved.reasons)
    with pytest.raises(zf.UserError, match="needs a model"):
        zf.check("zero3_offload").resolve()
    data = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    assert zf.check(data, run, "h100-80gb").resolve().config["train_batch_size"] == 4


def test_a_notebook_shows_a_table_of_text():
    html = zf.check({"train_batch_size": 8, "<b>[/x]</b>": 1})._repr_html_()
    assert html.startswith("<table>") and "&lt;b&gt;[/x]&lt;/b&gt;" in html and "<b>" not in html
