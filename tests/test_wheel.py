"""The built wheel in an environment of its own: what works with the light dependencies alone, and training with all."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SOURCE = ("toolkit", "models", "ds_configs", "pyproject.toml", "README.md", "LICENSE")
HEAVY = ("torch", "deepspeed", "transformers", "accelerate", "datasets", "scipy", "matplotlib", "safetensors")


def run(command: list[str | Path], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ZEROFIT_CACHE": str(cwd / ".cache"), **environment}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built of a copy of the source as a checkout has it, links included."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCE:
        if (ROOT / name).is_dir():
            left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=left_out)
        else:
            shutil.copy(ROOT / name, folder / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = run([*pip, "--wheel-dir", folder / "dist", "."], folder)
    assert done.returncode == 0, done.stderr
    return next((folder / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Make environments that have the wheel."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        venv.create(folder, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-index"]
        done = run([*pip, "--no-deps", "--no-compile", wheel], folder)
        assert done.returncode == 0, done.stderr
        return folder

    return make


@pytest.fixture(scope="module")
def light(installed):
    """The environment that `pip install zerofit` makes: the wheel and what it requires without any extra."""
    folder = installed("light")
    site = _site(folder)
    left, found = ["zerofit"], set[str]()
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        here = importlib.metadata.Distribution.discover(name=name, path=[str(site)])
        distribution = next(iter(here), None) or importlib.metadata.distribution(name)
        requirements = map(Requirement, distribution.requires or ())
        left += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
        for file in distribution.files or ():
            top = site / file.parts[0]
            if name != "zerofit" and file.parts[0] not in ("..", "__pycache__") and not top.exists():
                top.symlink_to(distribution.locate_file(file.parts[0]))
    assert not found & set(HEAVY)
    return folder


def _site(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))


def test_without_torch_what_plans_and_checks_works(light, tmp_path):
    zerofit = light / "bin" / "zerofit"
    assert run([zerofit, "--help"], tmp_path).returncode == 0
    listed = json.loads(run([zerofit, "models", "llama-3.1", "--json"], tmp_path).stdout)["models"]
    assert {"llama-3.1-8b", "llama-3.1-70b"} <= {row["name"] for row in listed}

    plan = [zerofit, "plan", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100-80gb", "--json"]
    done = run([*plan, "--html", "plan.html"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "uPlot" in (tmp_path / "plan.html").read_text()
    planned = json.loads(done.stdout)
    assert planned["parameters"] == 8_030_261_248 and planned["layouts"]  # as published: 8.03 B

    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimisation": {"stage": 3}}')
    done = run([zerofit, "check", "ds.json", "--fix", "--json"], tmp_path)
    assert done.returncode == 2, done.stderr
    assert json.loads((tmp_path / "ds.fixed.json").read_text())["zero_optimization"] == {"stage": 3}
    assert json.loads(run([zerofit, "schema"], tmp_path).stdout)["properties"]["zero_optimization"]
    code = "import zerofit as zf; zf.check('ds.json')\n"
    code += "print(len(zf.plan('llama-3.1-8b', zf.Cluster('h100-80gb', gpus=8)).layouts))"
    assert run([light / "bin" / "python", "-c", code], tmp_path).stdout.strip() == "10"


def test_without_torch_the_error_in_python_names_the_extra(light, tmp_path):
    done = run([light / "bin" / "python", "-c", "import zerofit; zerofit.train"], tmp_path)
    assert done.stderr.strip().splitlines()[-1] == "pip install 'zerofit[train]'"


@pytest.mark.parametrize(
    "command",
    [
        ["train", "lenet"],
        ["simulate", "lenet", "--gpu", "l4"],
        ["tune", "lenet"],
        ["eval", "model"],
        ["ckpt", "ls", "."],
        ["calibrate"],
        ["compare", "strategies", "lenet"],
        ["plan", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100-80gb", "--seq-len", "384"],
    ],
    ids=lambda command: command[0],
)
def test_without_torch_a_command_names_the_extra(light, tmp_path, command):
    done = run([light / "bin" / "zerofit", *command, "--json"], tmp_path)
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert (done.returncode, error["kind"]) == (2, "not-installed"), done.stderr
    assert "pip install 'zerofit[train]'" in error["hint"] and "Traceback" not in done.stderr


@pytest.mark.slow
def test_with_everything_installed_the_wheel_trains(installed, tmp_path):
    folder = installed("all")
    libraries = [path for path in sys.path if path.endswith("site-packages")]  # behind the wheel's own
    (_site(folder) / "libraries.pth").write_text("\n".join(libraries) + "\n")
    command = ["train", "lenet", "--data", "synthetic", "--steps", "2", "--ranks", "1", "--output", "run", "--json"]
    done = run([folder / "bin" / "zerofit", *command], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2
    code = "import zerofit; print(zerofit.__file__)"
    assert str(_site(folder)) in run([folder / "bin" / "python", "-c", code], tmp_path).stdout
