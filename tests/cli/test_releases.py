"""`--deepspeed-version`: a script simulated with another release than the one that is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerofit.cli.main import main

NEW = "0.19.99"
BUCKET = "reduce_bucket_size: int = Field(pp_int(5e8)"
CUT = "len(self.bit16_groups_flat[i]) // dist"
CHANGED = {  # file -> what is changed in it: a smaller bucket, and a partition's length is a float, as up to 0.19.6
    "deepspeed/runtime/zero/config.py": (BUCKET, BUCKET.replace("5e8", "1e8")),
    "deepspeed/runtime/zero/stage_1_and_2.py": (CUT, CUT.replace("//", "/")),
}
SCRIPT = """
import deepspeed, torch

net = torch.nn.Linear(256, 256)
zero = {"stage": 3, "stage3_prefetch_bucket_size": 0}
config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": zero}
config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
for _ in range(4):
    x = torch.randn(4, 256, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(x).float().pow(2).mean())
    engine.step()
"""


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> Path:
    """A folder with a later release of the DeepSpeed that is installed: changed as in `CHANGED`."""
    folder, installed = tmp_path_factory.mktemp("releases"), metadata.distribution("deepspeed")
    old, found = f"deepspeed-{installed.version}.dist-info", []
    with zipfile.ZipFile(folder / f"deepspeed-{NEW}-py3-none-any.whl", "w") as wheel:
        for file in installed.files or ():
            if file.parts[0] not in ("deepspeed", old) or file.suffix == ".pyc" or file.name == "RECORD":
                continue
            content, name = Path(str(file.locate())).read_bytes(), str(file).replace(old, f"deepspeed-{NEW}.dist-info")
            if file.name == "METADATA":
                content = content.replace(f"\nVersion: {installed.version}".encode(), f"\nVersion: {NEW}".encode(), 1)
            if str(file) in CHANGED:
                old_text, new_text = (text.encode() for text in CHANGED[str(file)])
                assert old_text in content
                content = content.replace(old_text, new_text)
            wheel.writestr(name, content)
            found.append(f"{name},,")
        record = f"deepspeed-{NEW}.dist-info/RECORD"
        wheel.writestr(record, "\n".join([*found, f"{record},,", ""]))
    return folder


def simulate(folder: Path, releases: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "stage2.py").write_text(SCRIPT.replace('"stage": 3', '"stage": 2'))
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(releases)}
    argv = [
        sys.executable,
        "-m",
        "zerofit.cli",
        "simulate",
        "--gpu",
        "l4",
        "--gpus",
        "2",
        "--no-knobs",
        "--json",
        *words,
    ]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_script_is_simulated_with_another_release_that_is_installed_once(tmp_path, releases):
    command = ["--", "deepspeed", "--num_gpus", "2"]
    asked = ["--deepspeed-version", NEW]
    runs = ((*asked, *command, "train.py"), (*asked, *command, "stage2.py"), (*command, "train.py"))
    first, again, installed = (simulate(tmp_path, releases, *words) for words in runs)
    assert [done.returncode for done in (first, again, installed)] == [0, 0, 0], again.stderr
    assert [f"installing deepspeed=={NEW}" in done.stderr for done in (first, again, installed)] == [True, False, False]
    other, here = (json.loads(done.stdout.splitlines()[-1]) for done in (first, installed))
    assert here["peak_bytes"] - other["peak_bytes"] == int(4e8) * 2  # a bucket of bf16


def test_what_is_no_release_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def refused(*words: str) -> str:
        done = CliRunner().invoke(main, ["simulate", "--gpu", "l4", *words])
        assert done.exit_code == 2 and "Traceback" not in done.stderr
        return done.stderr

    said = refused("llama-tiny", "--deepspeed-version", "x.y", "--transformers-version", "4.0")
    assert "'x.y' is not a version" in said
    assert "zerofit trains with transformers>=5.17, not 4.0" in said and "-- COMMAND" in said
    command = ("--", "python", "train.py")
    for name in ("0.19.*", "=a/../../b", "0.19.5,<1"):
        assert f"{name!r} is not a version" in refused("--deepspeed-version", name, *command)
    said = refused("--deepspeed-version", "0.19.77", *command)
    assert "No matching distribution found for deepspeed==0.19.77" in said
