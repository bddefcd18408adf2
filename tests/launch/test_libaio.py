"""A machine without libaio: NVMe offload is refused before anything starts, with the package to install."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from zerofit.app.clusters.restarts import _check_libaio
from zerofit.cli.main import main
from zerofit.config.ds_json import read_for_run
from zerofit.doctor.preflight import Preflight
from zerofit.launch.ops import libaio_problems
from zerofit.spec.errors import UserError
from zerofit.spec.local_machine import libaio

ON_NVME = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}}


@pytest.fixture
def without(tmp_path, monkeypatch):
    """Hide libaio's header, its library or both from the compiler."""

    def hide(*words: str) -> None:
        compiler = tmp_path / "c++"
        hidden = "|".join(f"*{word}*" for word in words)
        compiler.write_text(
            '#!/bin/sh\nprogram=$(cat)\ncase "$* $program" in\n'
            f'{hidden}) exit 1;;\nesac\nprintf "%s\\n" "$program" | c++ "$@"\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))

    return hide


def test_what_the_compiler_does_not_find(without, monkeypatch):
    without("libaio.h", "-laio")
    assert libaio() == {"header": False, "library": False}
    without("libaio.h")
    assert libaio()["header"] is False
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert libaio() == {"compiler": False}


def test_training_with_nvme_names_the_package(without, tmp_path):
    without("libaio.h", "-laio")
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(read_for_run("zero3_nvme").config).replace("/local_nvme", str(tmp_path)))
    run = [
        "llama-tiny",
        "--data",
        "synthetic",
        "--seq-len",
        "16",
        "--steps",
        "1",
        "--global-batch",
        "7",
        "--ranks",
        "2",
    ]
    argv = ["train", *run, "--ds-config", str(config), "--output", str(tmp_path / "run"), "--json"]
    done = CliRunner().invoke(main, argv)
    assert done.exit_code == 2, done.output
    problems = {one["kind"]: one for one in json.loads(done.stdout.strip().splitlines()[-1])["errors"]}
    assert set(problems) == {"batch-size", "libaio"}  # with everything else that is wrong
    assert "libaio-dev (Debian, Ubuntu) or libaio-devel" in problems["libaio"]["hint"]
    assert "header and library" in problems["libaio"]["message"]
    assert not (tmp_path / "run").exists()


def test_only_nvme_offload_needs_it():
    missing = {"header": False, "library": True}
    (problem,) = libaio_problems(ON_NVME, missing)
    assert problem.where == "zero_optimization.offload_param.device"
    assert not libaio_problems(ON_NVME, {"header": True, "library": True})
    for device in ("cpu", "none"):
        assert not libaio_problems({"zero_optimization": {"offload_optimizer": {"device": device}}}, missing)
    for broken in ({}, {"zero_optimization": 3}, {"zero_optimization": {"offload_param": "nvme"}}):
        assert not libaio_problems(broken, missing)
    assert "g++" in libaio_problems(ON_NVME, {"compiler": False})[0].hint


def test_every_host_is_asked():
    there, lacks = {"header": True, "library": True}, {"header": False, "library": True}
    _check_libaio(Preflight(checks=(), facts={"a": {"libaio": there}, "b": {"libaio": there}}), ON_NVME)
    with pytest.raises(UserError) as caught:
        _check_libaio(Preflight(checks=(), facts={"a": {"libaio": there}, "b": {"libaio": lacks}}), ON_NVME)
    (problem,) = caught.value.problems
    assert problem.message.startswith("b: ") and "libaio-devel" in problem.hint
