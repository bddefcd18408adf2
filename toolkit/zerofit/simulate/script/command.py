"""Read the command that starts a user's training, and define the input of its simulation.

Imports torch only if the launcher's parser imports it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path

from zerofit.simulate.record import SentTensors
from zerofit.spec.devices import Device
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.process import deepspeed_quiet
from zerofit.spec.units import counted

# options of the interpreter that are followed by a value
_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")
_AS_MODULE = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate launch",
}
_LAUNCHES = re.compile(r"[^#]*\b(torchrun|deepspeed|accelerate launch|python3?)\s")
_MANY = 1 << 16  # devices of a host whose number is unknown

Parser = Callable[[list[str]], Namespace]
# changes of `edits`, as a user would write them into the script
CHECKPOINTS, EIGHT_BITS, HALVES = "checkpoints", "8-bit moments", "half batches"
SHARDED, SHARDED_STATES = "FSDP2 for DDP", "ZeroRedundancyOptimizer"
LATER_STAGE = "later-stage"  # kind of the problem of a rank whose input is unknown


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """A training script with its arguments, and how many ranks its launcher starts."""

    words: tuple[str, ...]  # as typed
    launcher: str  # "python", "torchrun", "deepspeed" or "accelerate launch"
    script: str  # a file, or a module's name
    arguments: tuple[str, ...]
    is_module: bool = False
    launcher_words: tuple[str, ...] = ()  # the launcher's options, and all after them
    gpus: int | None = None  # ranks per node; None if the launcher's options do not set it
    nodes: int | None = None
    config_file: str = ""  # that `accelerate launch` reads, from its option or as its default; "" if there is none
    local_rank_argument: str = ""  # the option with the local rank that the launcher adds; "" if none
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int | None:
        """The number of ranks; None if the launcher's options do not set it."""
        return None if self.gpus is None else self.gpus * (self.nodes or 1)


def read_command(words: Sequence[str]) -> ScriptCommand:
    """Read a start command that is split into words.

    Raises UserError if no word names a Python script.
    """
    if not words:
        raise _refused("no command after --", "add the command you would run, e.g. -- torchrun train.py --epochs 3")
    program, rest = words[0], list(words[1:])
    name = os.path.basename(program)
    if name.startswith("python") or name == Path(sys.executable).name:
        found = shutil.which(program)
        notes = ()
        if found and Path(found).parent != Path(sys.executable).parent:
            notes = (f"{program} is {found}, but the simulation uses the packages of {sys.executable}",)
        return _python(rest, tuple(words), notes)
    if name == "accelerate" and rest[:1] == ["launch"]:
        return _accelerate(rest[1:], tuple(words))
    if name in ("torchrun", "deepspeed"):
        return _READERS[name](rest, tuple(words))
    if name.endswith(".py"):
        return _python(list(words), tuple(words), ())
    if name == "zerofit":
        raise _refused("zerofit does not simulate its own training as a script", "run zerofit simulate MODEL ...")
    installed = _installed_program(program)
    if installed:
        return _python([installed, *rest], tuple(words), ())
    message = f"{program!r} is not python, torchrun, deepspeed, accelerate launch or a program that pip installed"
    hint = "give the command that starts the training script itself, without shell or job scripts"
    place = _starting_line(words)
    raise _refused(message, f"put the command of {place} after --, with its variables filled in" if place else hint)


def _starting_line(words: Sequence[str]) -> str:
    """Return the "file:line" of a shell script that starts a launcher or Python; "" if none does."""
    for file in (Path(word) for word in words[:3]):
        if file.suffix in (".sh", ".slurm", ".sbatch") and file.is_file():
            lines = file.read_text(errors="replace").splitlines()
            # the last one: scripts prepare data, or print versions, before they train
            found = [n for n, line in enumerate(lines, 1) if _LAUNCHES.match(line)]
            return f"{file}:{found[-1]}" if found else ""
    return ""


def started_inside(words: Sequence[str]) -> ScriptCommand | None:
    """Return the launcher command that a program (such as llamafactory-cli or axolotl) starts.

    On one GPU, an installed program (such as swift) may use no launcher: it starts Python with a file of its package.
    Then return this Python command. Return None if the command starts no ranks, e.g. a launcher with options only
    (--help).
    """
    if _is_of_package(words):
        return read_command(words)
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    program = os.path.basename(words[0]) if words else ""
    if program not in ("torchrun", "deepspeed", "accelerate") and module not in _AS_MODULE:
        return None
    if all(word.startswith("-") or word == module for word in words[1:]):
        return None
    found = read_command(words)
    return None if found.launcher == "python" else found


def _is_of_package(words: Sequence[str]) -> bool:
    # a user's own train.py may start helpers with Python, e.g. to prepare data: these are no ranks
    if sys.argv[0].endswith(".py") or len(words) < 2 or not os.path.basename(words[0]).startswith("python"):
        return False
    return words[1].endswith(".py") and (Path(words[1]).parent / "__init__.py").is_file()


def rank_problems(command: ScriptCommand, gpus: int, nodes: int) -> list[Problem]:
    """Return problems: the command's ranks per node or nodes differ from `gpus` and `nodes`."""
    if command.gpus is not None and (command.gpus, command.nodes or 1) != (gpus, nodes):
        asked = f"--gpus is {gpus}" + (f" on --nodes {nodes}" if nodes > 1 else "")
        on = f" on {command.nodes} nodes" if (command.nodes or 1) > 1 else ""
        ranks = counted(command.gpus * (command.nodes or 1), "rank")
        message, where = f"the command starts {ranks}{on}, but {asked}", "--gpus"
    elif command.gpus is None and command.nodes is not None and command.nodes != nodes:
        message, where = f"the command starts ranks on {command.nodes} nodes, but --nodes is {nodes}", "--nodes"
    else:
        return []
    return [Problem(kind="ranks", message=message, hint="set only one of them, or make them equal", where=where)]


def _installed_program(program: str) -> str | None:
    """Return the file of a program in this environment or on the PATH.

    Return None if there is no such file, or if it is not a Python program that pip installed.
    """
    # first: an environment that is not activated is not on the PATH
    beside = str(Path(sys.executable).parent)
    found = shutil.which(program, path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if found is None:
        return None
    try:
        with open(found, "rb") as file:
            first, second = file.readline(), file.readline()
    except OSError:  # executable but not readable
        return None
    if second.startswith(b"'''exec'"):  # pip writes a shell line if the interpreter's path is long
        first += second
    return found if first.startswith(b"#!") and b"python" in first else None


def _python(rest: list[str], words: tuple[str, ...], notes: tuple[str, ...]) -> ScriptCommand:
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        rest = rest[2 if rest[0] in _PYTHON_VALUES else 1 :]
    is_module = rest[:1] == ["-m"] and len(rest) > 1
    if is_module:
        rest = rest[1:]
        launcher = _AS_MODULE.get(rest[0])
        if launcher:
            return _READERS[launcher](rest[1:], words)
    elif not rest or rest[0] == "-c":
        raise _refused("the command names no script", "write the script's file, or -m and a module")
    script, *arguments = rest
    return ScriptCommand(
        words=words, launcher="python", script=script, is_module=is_module, arguments=tuple(arguments), notes=notes
    )


def _torch(name: str, rest: list[str], words: tuple[str, ...]) -> ScriptCommand:
    from torch.distributed.launch import parse_args
    from torch.distributed.run import get_args_parser, get_use_env, parse_min_max_nnodes

    parse: Parser = get_args_parser().parse_args if name == "torchrun" else parse_args
    asked = _parsed(name, parse, rest)
    each, own = str(asked.nproc_per_node), rest[: len(rest) - len(asked.training_script_args)]
    # Without these options, the 1 rank of torchrun is only a default. On the user's machine, PET_NPROC_PER_NODE may
    # replace it (torch/distributed/argparse_util.py). So --gpus decides.
    given = any(word.startswith(("--nproc", "--nnodes")) for word in own)
    return ScriptCommand(
        words=words,
        launcher="torchrun",
        script=asked.training_script,
        is_module=asked.module,
        arguments=tuple(asked.training_script_args),
        launcher_words=tuple(rest),
        gpus=int(each) if each.isdigit() and given else None,  # "gpu" and "auto": as many as the host has devices
        nodes=parse_min_max_nnodes(asked.nnodes)[1] if given else None,  # "1:4" starts with 1 to 4 nodes
        local_rank_argument="" if get_use_env(asked) else "--local-rank",
    )


def _deepspeed(rest: list[str], words: tuple[str, ...]) -> ScriptCommand:
    with deepspeed_quiet():
        from deepspeed.launcher.runner import parse_args

    asked = _parsed("deepspeed", parse_args, rest)
    gpus, nodes = _deepspeed_resources(asked)
    return ScriptCommand(
        words=words,
        launcher="deepspeed",
        script=asked.user_script,
        is_module=asked.module,
        arguments=tuple(asked.user_args),
        launcher_words=tuple(rest),
        gpus=gpus,
        nodes=nodes,
        local_rank_argument="" if asked.no_local_rank else "--local_rank",
    )


def _deepspeed_resources(asked: Namespace) -> tuple[int | None, int | None]:
    """Return the devices per node and the number of nodes, from options and hostfile.

    They are read as in main() of DeepSpeed's runner.py.
    """
    from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion

    pool = fetch_hostfile(asked.hostfile) if Path(asked.hostfile).is_file() else None
    known = pool is not None or ":" in asked.include
    if known:
        pool = pool or OrderedDict({host.partition(":")[0]: _MANY for host in asked.include.split("@")})
        active = parse_inclusion_exclusion(pool, asked.include, asked.exclude)
        # DeepSpeed starts a rank for each slot, but zerofit simulates nodes with equally many ranks
        nodes, gpus = len(active), min(len(slots) for slots in active.values())
    else:
        nodes, gpus = None, None
    if asked.num_nodes > 0:
        nodes = asked.num_nodes
    return asked.num_gpus if asked.num_gpus > 0 else gpus, nodes


def _accelerate(rest: list[str], words: tuple[str, ...]) -> ScriptCommand:
    from accelerate.commands.config import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    asked = _parsed("accelerate launch", launch_command_parser().parse_args, rest)
    file = asked.config_file or default_config_file
    if asked.config_file and not Path(file).is_file():
        raise _refused(f"accelerate launch: configuration file {file} does not exist", "check --config_file")
    # as in accelerate's `_validate_launch_command`, --cpu disables only the default file
    reads = asked.config_file or (Path(file).is_file() and not asked.cpu)
    written = load_config_from_file(file) if reads else None
    ranks = asked.num_processes or getattr(written, "num_processes", None)
    nodes = asked.num_machines or getattr(written, "num_machines", None)
    if ranks and nodes and ranks % nodes:
        hint = "set --num_processes to a multiple of --num_machines"
        raise _refused(f"accelerate launch: {ranks} processes on {nodes} machines", hint)
    return ScriptCommand(
        words=words,
        launcher="accelerate launch",
        script=asked.training_script,
        is_module=asked.module,
        arguments=tuple(asked.training_script_args),
        launcher_words=tuple(rest),
        gpus=ranks // (nodes or 1) if ranks else None,
        nodes=nodes if ranks else None,
        config_file="" if written is None else str(file),
    )


_READERS = {
    **{name: partial(_torch, name) for name in ("torchrun", "torch.distributed.launch")},
    "deepspeed": _deepspeed,
    "accelerate launch": _accelerate,
}


def _parsed(launcher: str, parse: Parser, rest: list[str]) -> Namespace:
    said = StringIO()
    try:
        with redirect_stderr(said):
            return parse(rest)
    except SystemExit:  # argparse has written "PROGRAM: error: REASON" as the last line
        last = (said.getvalue().strip().splitlines() or ["it names no script"])[-1]
        raise _refused(f"{launcher}: {last.partition('error: ')[2] or last}", f"see {launcher} --help") from None


def _refused(message: str, hint: str) -> UserError:
    return UserError(Problem(kind="command", message=message, hint=hint, where="COMMAND"))


@dataclass(frozen=True, kw_only=True)
class ScriptTarget:
    """One rank of a script, and its device."""

    command: ScriptCommand
    device: Device
    gpus: int  # per node
    nodes: int
    host_bytes: int = 0  # of a node
    rank: int = 0
    workspace_bytes: int = 0  # kept by torch for matrix products, per thread and stream
    alloc_conf: str = ""  # PYTORCH_CUDA_ALLOC_CONF of its process
    steps: int = 2  # optimizer steps after which the script is stopped; the second has all states from its start
    stacks: bool = False  # record the origin of each allocation, for a memory snapshot
    longest: bool = False  # make every batch as long as the script allows
    crowded: bool = False  # let all tokens choose the same experts (worst routing)
    arguments: Mapping[str, object] = field(default_factory=dict)  # replace values of TrainingArguments
    edits: tuple[str, ...] = ()  # CHECKPOINTS, ...: changes of the script
    received: SentTensors | None = None  # input of the rank's pipeline stage; None for the first stage

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.gpus * self.nodes

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, with memory of its own."""
        return self.device.kind != "cpu"
