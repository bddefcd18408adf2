"""Every file in ds_configs/ trains as it is; on the CPU where its feature runs there."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.config.ds_readers import GPU_ONLY
from zerofit.app.checking import check
from zerofit.check.dotted import autos, get
from zerofit.check.reader import READERS
from zerofit.config.ds_json import RUN_DECIDES, bundled, read_for_run
from zerofit.launch.ops import libaio_problems

NEEDS_GPU = {
    "zeropp": "quantized weights go through a CUDA kernel",
    "zenflow": "its stage 3 allocates on the CUDA device by name (runtime/zenflow/engine_stage3.py:192)",
    "superoffload": "DeepSpeed refuses every other device (runtime/superoffload/superoffload_stage3.py:23)",
    "deepcompile": "its C++ op includes CUDA's headers",
}
ON_CPU = sorted(set(bundled()) - set(NEEDS_GPU), key=lambda name: (name == "diagnose", name))
LOW_PRECISION = {"bf16": "bf16", "bf16_master_weights": "bf16", "fp16": "fp16", "zeropp": "fp16"}
DEGREES = {
    "pipeline": "pipeline",
    "sequence_parallel": "sequence_parallel",
    "tensor_parallel": "tensor_parallel",
    "tensor_parallel_zero2": "tensor_parallel",
    "tensor_parallel_zero3": "tensor_parallel",
}
# README.md of ds_configs says why: torch, not DeepSpeed, checkpoints what others train, and the folder is the user's
KNOWN_FINDINGS = {"activation_checkpointing": {"activations-host"}, "zero3_nvme": {"nvme-path", "nvme-disk"}}
BY_RUN = (*RUN_DECIDES, "zero_force_ds_cpu_optimizer")
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
HOW = {"model": "llama-tiny", "model_args": TINY, "data": "synthetic", "seq_len": 32, "steps": 3, "global_batch": 8}
HOW |= {"eval_samples": 4}


@pytest.fixture(scope="module")
def plain_losses(pools, tmp_path_factory):
    return pools(2).train(tmp_path_factory.mktemp("plain") / "run", **HOW, ds_config="zero0").losses


def test_nvme_holds_parameters_and_states(pools, tmp_path):
    wide = HOW | {"model_args": TINY | {"hidden_size": 512, "intermediate_size": 2048}}  # more than a block of aio
    trained = pools(2).train(tmp_path / "run", **wide, ds_config=on_this_disk("zero3_nvme", tmp_path))
    plain = pools(2).train(tmp_path / "plain", **wide, ds_config="zero0")
    np.testing.assert_allclose(trained.losses, plain.losses, rtol=1e-4)
    assert list(tmp_path.glob("zero_stage_3/float32params/rank*/*_param.tensor.swp"))
    assert list(tmp_path.glob("zero_stage_3/optimizer/rank*/*.tensor.swp"))


def test_bf16_master_weights_are_bf16(pools, tmp_path):
    """Rounded masters take another way than float32 ones, by no more than bf16's precision."""
    rounded, full = (
        pools(2).train(tmp_path / name, **HOW, lr=1e-4, ds_config=name).losses
        for name in ("bf16_master_weights", "bf16")
    )
    assert rounded != full
    np.testing.assert_allclose(rounded, full, rtol=1e-2)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_file_trains_on_the_cpu(pools, tmp_path, plain_losses, monkeypatch, name):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)  # as the ranks of a pool do
    degree = {DEGREES[name]: 2} if name in DEGREES else {}
    trained = pools(2).train(tmp_path / "run", **HOW, **degree, ds_config=on_this_disk(name, tmp_path))
    assert len(trained.losses) == 3
    np.testing.assert_allclose(trained.losses, plain_losses, rtol=1e-2 if name in LOW_PRECISION else 1e-4)
    assert as_written(content(name), trained.job.ds_config, BY_RUN)
    assert trained.job.run.precision == LOW_PRECISION.get(name, "fp32")
    assert trained.job.layout.world_size == 2
    assert max(trained.job.layout.tp, trained.job.layout.pp, trained.job.layout.sp) == (2 if degree else 1)
    if name == "diagnose":
        log = (pools(2)._inbox / "log").read_text()
        pools(2).close()  # the comms logger and the log level stay as they are in a process: the last to run
        assert len(re.findall(r"time \(ms\) \| fwd: ", log)) == 3
        assert "fwd FLOPS per GPU = " in log
        assert "comm op: all_gather_into_tensor | time (ms)" in log


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(NEEDS_GPU))
def test_a_file_trains_on_a_gpu(pools, tmp_path, name):
    ranks = min(2, torch.cuda.device_count())
    how = HOW | {"compile": name == "deepcompile"}
    if name == "zenflow":  # it cannot start from a model that zero.Init has partitioned
        how = {"model": "mlp", "data": "digits", "steps": 3, "global_batch": 8}
    trained = pools(ranks).train(tmp_path / "run", **how, ds_config=name)
    assert len(trained.losses) == 3
    assert np.isfinite(trained.losses).all()
    assert as_written(content(name), trained.job.ds_config, BY_RUN)


def test_the_files_that_need_a_gpu_exist():
    assert set(NEEDS_GPU) <= set(bundled())
    assert set(DEGREES) | set(LOW_PRECISION) <= set(bundled())


def test_the_readme_names_every_file_once():
    page = (bundled()["zero0"].parent / "README.md").read_text().partition("\n## ")[0]
    table = [line for line in page.splitlines() if line[:3] == "| `"]
    assert sorted(line.split("`")[1] for line in table) == sorted(bundled())


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What DeepSpeed, the Trainer and Accelerate make of every file that is tested, in one process."""
    folder = tmp_path_factory.mktemp("readers")
    files = {name: str(path) for name, path in bundled().items()}
    tested = [item.name for item in request.session.items if item.path == request.path]
    if not any("as_it_is[zero3_nvme]" in name for name in tested) or libaio_problems(content("zero3_nvme")):
        del files["zero3_nvme"]
    else:
        on_nvme = folder / "zero3_nvme.json"  # its folder is the user's to name
        on_nvme.write_text(Path(files["zero3_nvme"]).read_text().replace("/local_nvme", str(folder)))
        files["zero3_nvme"] = str(on_nvme)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.config.ds_readers", str(folder / "said.json")]
    done = subprocess.run(
        [*command, *files.values()],
        env={**os.environ, "MASTER_PORT": port},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "said.json").read_text())


# with the newest versions all but one: its op is compiled for minutes, and no reader reads it otherwise
OFTEN = [name if name == "zero3_nvme" else pytest.param(name, marks=pytest.mark.versions) for name in sorted(bundled())]


@pytest.mark.parametrize("name", OFTEN)
def test_deepspeed_the_trainer_and_accelerate_take_a_file_as_it_is(request, name):
    if missing := libaio_problems(content(name)):
        pytest.skip(missing[0].hint)
    said = request.getfixturevalue("said")
    found = said[name]
    for program in ("trainer", "accelerate"):
        assert as_written(content(name), found[program]), program
        assert not list(autos(found[program]))
    assert found["accelerate"]["train_micro_batch_size_per_gpu"] == 8  # DeepSpeed's word, not the data loader's
    if name not in GPU_ONLY:
        tolerance = 5e-3 if name in LOW_PRECISION else 1e-5
        np.testing.assert_allclose(found["losses"], said["torch"], rtol=tolerance)


@pytest.mark.parametrize("name", sorted(bundled()))
def test_check_has_nothing_to_say(name):
    for reader in (None, *READERS):
        found = check(bundled()[name], reader=reader)
        codes = {finding.code for finding in found.findings}
        assert codes <= KNOWN_FINDINGS.get(name, set()), (reader, found.findings)
        assert reader or found.reader.name == "zerofit"


@pytest.mark.parametrize("name", sorted(bundled()))
def test_a_file_has_no_auto_and_no_key_that_deepspeed_drops(name):
    from zerofit.check.catalog import catalog

    config = content(name)
    assert not list(autos(config))
    assert all(catalog().node(key) for key in config)


def content(name: str) -> dict[str, Any]:
    return json.loads(bundled()[name].read_text())


def on_this_disk(name: str, folder: Path) -> dict[str, Any] | str:
    """The file's name; where it has a path on an NVMe disk, its content with a path that exists here."""
    config = read_for_run(name).config
    parts = [part for part in config["zero_optimization"].values() if isinstance(part, dict) and "nvme_path" in part]
    for part in parts:
        part["nvme_path"] = str(folder)
    return config if parts else name


def as_written(source: dict[str, Any], resolved: dict[str, Any], left: tuple[str, ...] = (), path: str = "") -> bool:
    """Whether every value of the file that is no path stands in the engine's JSON; of a run, but what that decides."""
    for key, value in source.items():
        if isinstance(value, dict):
            if not as_written(value, resolved, left, f"{path}{key}."):
                return False
        elif key != "nvme_path" and f"{path}{key}" not in left and get(resolved, f"{path}{key}") != value:
            return False
    return True
