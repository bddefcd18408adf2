"""Commands of scripts as launchers read them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zerofit.simulate.script.command import ScriptCommand, read_command, started_inside
from zerofit.spec.errors import UserError

CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 2
num_machines: 2
num_processes: 8
machine_rank: 0
use_cpu: false
"""


def read(text: str) -> ScriptCommand:
    return read_command(text.split())


@pytest.mark.parametrize(
    ("text", "launcher", "script", "arguments"),
    [
        ("python train.py --lr 1e-3", "python", "train.py", ("--lr", "1e-3")),
        ("python3 -u -W ignore train.py -m x", "python", "train.py", ("-m", "x")),
        ("train.py --lr 1", "python", "train.py", ("--lr", "1")),
        ("torchrun train.py --nproc_per_node 3", "torchrun", "train.py", ("--nproc_per_node", "3")),
        ("python -m torch.distributed.run train.py a", "torchrun", "train.py", ("a",)),
        ("python -m torch.distributed.launch --use_env train.py a", "torchrun", "train.py", ("a",)),
        ("deepspeed train.py --deepspeed ds.json", "deepspeed", "train.py", ("--deepspeed", "ds.json")),
        ("accelerate launch --cpu train.py a", "accelerate launch", "train.py", ("a",)),
        ("python -m accelerate.commands.launch --cpu train.py", "accelerate launch", "train.py", ()),
    ],
)
def test_what_runs(text, launcher, script, arguments):
    found = read(text)
    assert (found.launcher, found.script, found.arguments) == (launcher, script, arguments)
    assert found.words == tuple(text.split()) and not found.is_module


@pytest.mark.parametrize("text", ["python -m pkg.train a", "torchrun -m pkg.train a", "deepspeed --module pkg.train a"])
def test_modules(text):
    found = read(text)
    assert (found.script, found.arguments, found.is_module) == ("pkg.train", ("a",), True)


@pytest.mark.parametrize(
    ("text", "gpus", "nodes"),
    [
        ("python train.py", None, None),
        ("torchrun train.py", None, None),
        ("torchrun --nproc_per_node 4 train.py", 4, 1),
        ("torchrun train.py --nproc_per_node 4 --nnodes 2", None, None),
        ("python -m torch.distributed.launch --nproc_per_node=4 train.py", 4, 1),
        ("torchrun --nproc-per-node=gpu --nnodes 2 train.py", None, 2),
        ("torchrun --nnodes 1:3 --nproc_per_node 8 train.py", 8, 3),
        ("deepspeed train.py", None, None),
        ("deepspeed --num_gpus 4 --num_nodes 2 train.py", 4, 2),
        ("deepspeed --include localhost:0,2,5 train.py", 3, 1),
        ("accelerate launch --num_processes 8 --num_machines 2 train.py", 4, 2),
    ],
)
def test_ranks_that_the_launcher_starts(text, gpus, nodes):
    found = read(text)
    assert (found.gpus, found.nodes) == (gpus, nodes)


def test_files_of_launchers(tmp_path: Path):
    hosts, config = tmp_path / "hosts", tmp_path / "acc.yaml"
    hosts.write_text("a slots=8\nb slots=8\nc slots=8\n")
    config.write_text(CONFIG)
    found = read(f"deepspeed --hostfile {hosts} --exclude c train.py")
    assert (found.gpus, found.nodes, found.ranks) == (8, 2, 16)
    found = read(f"accelerate launch --config_file {config} train.py")
    assert (found.gpus, found.nodes, found.ranks) == (4, 2, 8)
    assert read(f"accelerate launch --config_file {config} --num_processes 2 train.py").gpus == 1
    assert read(f"accelerate launch --cpu --config_file {config} train.py").ranks == 8


def test_deepspeed_adds_the_local_rank():
    assert read("deepspeed train.py").local_rank_argument == "--local_rank"
    assert not read("deepspeed --no_local_rank train.py").local_rank_argument
    assert read("python -m torch.distributed.launch train.py").local_rank_argument == "--local-rank"
    for words in ("python -m torch.distributed.launch --use-env train.py", "torchrun train.py"):
        assert not read(words).local_rank_argument


def test_another_interpreter_is_said(tmp_path: Path):
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    (note,) = read(f"{other} train.py").notes
    assert str(other) in note and sys.executable in note


@pytest.mark.parametrize("first", [f"#!{sys.executable}", f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\""])
def test_programs_that_pip_installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str):
    program = tmp_path / "trainer-cli"
    program.write_text(f"{first}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = read("trainer-cli train x.yaml")
    assert (found.launcher, found.script, found.arguments) == ("python", str(program), ("train", "x.yaml"))


def test_a_shell_script_is_no_program_of_pips(tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/bash\npython train.py\n")
    script.chmod(0o755)
    for words in (str(script), f"bash {script} --lr 1"):
        with pytest.raises(UserError) as caught:
            read(words)
        assert f"the command of {script}:2 after --" in caught.value.problems[0].hint


@pytest.mark.parametrize(
    ("text", "launcher"),
    [
        ("/bin/torchrun --nproc_per_node 8 x.py", "torchrun"),
        (f"{sys.executable} -m torch.distributed.run -m pkg.x", "torchrun"),
        ("accelerate launch -m pkg.train x.yaml", "accelerate launch"),
        ("accelerate env", None),
        ("deepspeed --version", None),
        (f"{sys.executable} -m torch.distributed.run --help", None),
        ("git describe", None),
        (f"{sys.executable} x.py -m", None),
    ],
)
def test_launchers_that_a_program_starts(text, launcher):
    found = started_inside(text.split())
    assert (found and found.launcher) == launcher


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no command after --"),
        ("bash run.sh", "'bash' is not python, torchrun, deepspeed, accelerate launch or a program"),
        ("no-such-program train x.yaml", "'no-such-program' is not python"),
        ("zerofit train lenet", "its own training"),
        ("python", "names no script"),
        ("python -c pass", "names no script"),
        ("torchrun --nproc_per_node", "torchrun: "),
        ("deepspeed --bogus train.py", "deepspeed: unrecognized arguments: --bogus"),
        ("accelerate launch --config_file nowhere.yaml train.py", "configuration file nowhere.yaml does not exist"),
        ("accelerate launch --num_processes 3 --num_machines 2 train.py", "3 processes on 2 machines"),
    ],
)
def test_refusals(text, said):
    with pytest.raises(UserError) as caught:
        read(text)
    assert said in caught.value.problems[0].message and caught.value.problems[0].hint
