"""The table of DeepSpeed's hybrid engine is what the installed DeepSpeed and transformers do; `check` reports it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from tests.check.corpus import TINY
from zerofit.check.check import check
from zerofit.check.document import of_data
from zerofit.check.finding import Finding
from zerofit.check.subject import TargetHardware
from zerofit.spec.hybrid_engine import HYBRID_ENGINE_FAULTS


@pytest.mark.versions
def test_installed_releases_do_what_the_table_says(tmp_path: Path):
    root, out = Path(__file__).parents[2], tmp_path / "found.json"
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env = os.environ | ranks | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.check.hybrid_engine", str(out)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    native = {"qwen2"} if Version(version("transformers")) >= Version("5.24") else {"opt", "qwen2"}
    assert {kind for kind, what in found.items() if what == "transformers"} == native
    assert found.keys() - native == HYBRID_ENGINE_FAULTS.keys()
    assert "exceeds version 4.43.4" in found.pop("bloom")
    assert all(found[kind] in fault for kind, fault in HYBRID_ENGINE_FAULTS.items() if kind in found)


def findings(model_type: str | None, enabled: bool = True) -> list[Finding]:
    config = {"train_batch_size": 8, "gradient_clipping": 1.0, "hybrid_engine": {"enabled": enabled}}
    facts = replace(TINY, model_type=model_type) if model_type else None
    return [f for f in check(of_data(config), TargetHardware(facts=facts)) if f.code == "hybrid-engine"]


@pytest.mark.parametrize(
    ("model_type", "severity", "effect"),
    [
        ("llama", "error", "stops"),
        ("gpt_neo", "error", "changes"),
        ("qwen2", "warning", "ignored"),
        (None, "warning", "ignored"),
    ],
)
def test_check_names_what_happens_to_the_model(model_type: str | None, severity: str, effect: str):
    (finding,) = findings(model_type)
    assert (finding.severity, finding.effect) == (severity, effect)
    assert finding.why == HYBRID_ENGINE_FAULTS.get(model_type or "", finding.why)


def test_a_hybrid_engine_that_is_off_is_no_fault():
    assert findings("llama", enabled=False) == []
