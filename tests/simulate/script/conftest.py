"""A folder for a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.simulate.script.scripts import CONFIG


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path
