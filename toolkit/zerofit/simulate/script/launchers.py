"""Set the environment of a script's launcher, and stop launchers that a program would start."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import dropwhile, takewhile
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.multiprocessing

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.ops.tracker import is_own
from zerofit.simulate.script.command import ScriptCommand, ScriptTarget, rank_problems, started_inside
from zerofit.simulate.script.errors import NotSimulated
from zerofit.spec.errors import UserError

_Default = TypeVar("_Default")

_STARTERS = ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher", "tpu_launcher")  # of accelerate
_PLACED = ("RANK", "WORLD_SIZE", "MASTER_", "OMP_", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")  # zerofit sets these itself

_ASSIGNMENT = re.compile(r"\w+=")  # before a command in a shell
_PREFIXES = ("env", "exec", "nohup", "time")


class LaunchedInside(BaseException):
    """Raised when a program would start a launcher and then only wait for its ranks.

    It is not an Exception, so that the program does not catch it.
    """

    def __init__(self, command: ScriptCommand, variables: Mapping[str, str]):
        super().__init__(" ".join(command.words))
        self.command, self.variables = command, variables


def launchers_inside() -> None:
    """Keep programs such as llamafactory-cli from starting ranks, so that one rank runs here.

    Replaces subprocess.Popen.__init__, os.system, os.execv and os.execve, which the other functions of os call.
    """
    original: Callable[..., None] = subprocess.Popen.__init__

    def init(
        self: subprocess.Popen[str] | subprocess.Popen[bytes],
        args: object,
        *rest: object,
        **options: object,
    ) -> None:
        _raise_if_launched(args, cast("Mapping[str, str] | None", options.get("env")))
        original(self, args, *rest, **options)

    def replaced(execute: Callable[..., object]) -> Callable[..., object]:
        def run(file: object, args: object, *variables: Mapping[str, str]) -> object:
            _raise_if_launched(args, *variables)
            return execute(file, args, *variables)

        return run

    def system(command: str) -> int:
        _raise_if_launched(command)
        return shell(command)

    shell = os.system
    replace_in(subprocess.Popen, "__init__", init)
    replace_in(os, "system", system)
    for name in ("execv", "execve"):
        replace_in(os, name, replaced(getattr(os, name)))


def spawned_ranks(target: ScriptTarget) -> None:
    """Run one rank in this process when a script would spawn ranks.

    (torch.multiprocessing.spawn)
    """

    def spawn(
        fn: Callable[..., object],
        args: Sequence[object] = (),
        nprocs: int = 1,
        join: bool = True,
        *_: object,
        **__: object,
    ) -> object:
        started = replace(target.command, gpus=nprocs, nodes=target.nodes)
        for problem in rank_problems(started, target.gpus, target.nodes):
            raise NotSimulated(problem)
        fn(target.rank % target.gpus, *args)
        return None if join else SimpleNamespace(join=lambda *_, **__: True, processes=[])

    for name in ("spawn", "start_processes"):
        replace_in(torch.multiprocessing, name, spawn)


def ranks_in_processes(target: ScriptTarget) -> Callable[[], None]:
    """Run one rank in this process when a script starts a process for each rank, or trains in a process of its own.

    Return the function that a model's first forward calls. In another process it ends the process, which `join` then
    replaces by the function that the process would run.

    (multiprocessing.process.BaseProcess.start, join)
    """
    start, join, main = BaseProcess.start, BaseProcess.join, os.getpid()
    jobs = WeakKeyDictionary[BaseProcess, dict[str, object]]()  # what each process runs
    folder = Path(tempfile.gettempdir())

    def began(self: BaseProcess) -> None:
        jobs[self] = {name: vars(self)[name] for name in ("_target", "_args", "_kwargs")}  # `start` deletes them
        start(self)

    def joined(self: BaseProcess, timeout: float | None = None) -> None:
        join(self, timeout)
        if not (mark := folder / f"trains-{self.pid}").exists():
            return
        mark.unlink()
        if self not in jobs:  # the simulated rank has run
            return
        # with a class of its own, a process has no target
        ranks = [one for one in jobs if (type(one), jobs[one]["_target"]) == (type(self), jobs[self]["_target"])]
        started = replace(target.command, gpus=len(ranks), nodes=target.nodes)
        for problem in rank_problems(started, target.gpus, target.nodes):
            raise NotSimulated(problem)
        if ranks.index(self) == target.rank % target.gpus:
            vars(self).update(jobs[self])
            jobs.clear()  # a next process, e.g. of another trial, is the first one again
            self.run()

    def trains() -> None:
        if os.getpid() != main:
            (folder / f"trains-{os.getpid()}").touch()
            os._exit(0)

    replace_in(BaseProcess, "start", began)
    replace_in(BaseProcess, "join", joined)
    return trains


def _raise_if_launched(args: object, variables: Mapping[str, str] | None = None) -> None:
    for words in _commands(args):
        assigned = dict(word.split("=", 1) for word in takewhile(_is_before_command, words) if "=" in word)
        try:
            command = started_inside(list(dropwhile(_is_before_command, words)))
        except UserError as error:
            raise NotSimulated(error.problems[0]) from None
        if command is not None:
            raise LaunchedInside(command, {**(variables or {}), **assigned})


def _is_before_command(word: str) -> bool:
    return word in _PREFIXES or bool(_ASSIGNMENT.match(word))


def _commands(args: object) -> Iterator[list[str]]:
    """Yield the words of each command that a list, a shell string or `bash -c` runs.

    A string that cannot be split has no command.
    """
    if isinstance(args, str):
        lexer = shlex.shlex(args.replace("\\\n", " "), posix=True, punctuation_chars=";&|\n<>")
        # unlike shlex, a shell ends a command at a line's end, and finds "#" inside of words, e.g. in URLs
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
        words = list[str]()
        with suppress(ValueError):  # e.g. a quote inside a here-document
            for word in lexer:
                if set(word) <= set(";&|\n"):
                    yield words
                    words = []
                elif set(word) <= set("&<>"):  # of a redirection, such as 2>&1
                    words = words[:-1] if words[-1:] in (["1"], ["2"]) else words
                    next(lexer, None)
                else:
                    words.append(word)
            yield words
    elif isinstance(args, (list, tuple)):
        words = [os.fsdecode(word) for word in args]
        yield words
        if words and os.path.basename(words[0]) in ("sh", "bash"):
            # options such as -lc: the next word is the command
            flags = [place for place, word in enumerate(words[1:-1], 1) if re.fullmatch(r"-\w*c", word)]
            yield from _commands(words[flags[0] + 1]) if flags else ()


class _WithoutLauncher(os._Environ):
    """The environment of a script that `python` starts on one GPU.

    The script's own code finds no rank's number. nanoGPT and others look with `get` or `in` whether a launcher has
    started them, and otherwise use neither DistributedDataParallel nor its buckets. Libraries find the numbers, so that
    a DeepSpeed script needs no launcher.
    """

    hidden = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})

    def get(self, key: str, default: _Default | None = None) -> str | _Default | None:
        """Return the variable's value, or `default`."""
        return default if key in self.hidden and _script_asks() else super().get(key, default)

    def __contains__(self, key: object) -> bool:
        return not (key in self.hidden and _script_asks()) and super().__contains__(key)

    def __setitem__(self, key: str, value: str) -> None:
        self.hidden -= {key}  # now it is the script's own
        super().__setitem__(key, value)


def _script_asks() -> bool:
    frame = sys._getframe(2)
    # os.getenv calls `environ.get` itself: its caller decides
    if frame.f_code.co_filename == os.getenv.__code__.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return is_own(frame.f_code.co_filename)


def set_environment(target: ScriptTarget, outer: Mapping[str, str] | None = None) -> None:
    """Set a rank's environment variables. `outer`: those that an outer script has set."""
    # The object stays the same, since modules may have imported it by name. Only its class changes.
    os.environ.__class__ = os._Environ  # _WithoutLauncher would take these variables for the script's own
    os.environ |= {**(outer or {}), **environment(target)}
    alone = target.command.launcher == "python" and target.world_size == 1
    os.environ.__class__ = _WithoutLauncher if alone else os._Environ  # pyright: ignore[reportAttributeAccessIssue]


def environment(target: ScriptTarget) -> dict[str, str]:
    """Return a rank's environment variables: its numbers, and those that its launcher sets."""
    local, node = target.rank % target.gpus, target.rank // target.gpus
    # DeepSpeed's launcher sets LOCAL_SIZE, CROSS_RANK and CROSS_SIZE (launcher/launch.py), torchrun GROUP_RANK
    found: dict[str, object] = {
        "RANK": target.rank,
        "WORLD_SIZE": target.world_size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": target.gpus,
        "LOCAL_SIZE": target.gpus,
        "GROUP_RANK": node,
        "NODE_RANK": node,
        "CROSS_RANK": node,
        "CROSS_SIZE": target.nodes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    if target.command.launcher == "torchrun":
        found |= {
            "GROUP_WORLD_SIZE": target.nodes,
            "ROLE_NAME": "default",
            "ROLE_RANK": target.rank,
            "ROLE_WORLD_SIZE": target.world_size,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
        }
    of_accelerate = _of_accelerate(target) if target.command.launcher == "accelerate launch" else {}
    # threads do not inherit the fake mode
    single_threaded = {"TOKENIZERS_PARALLELISM": "false", "HF_DEACTIVATE_ASYNC_LOAD": "1"}
    return {**{name: str(value) for name, value in found.items()}, **of_accelerate, **single_threaded}


def _of_accelerate(target: ScriptTarget) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    options = launch.launch_command_parser().parse_args(list(target.command.launcher_words))
    options.num_processes, options.num_machines = target.world_size, target.nodes
    # run accelerate's own code up to the function that would start processes
    starts: list[tuple[str, argparse.Namespace]] = []
    stand_ins: dict[str, Any] = {name: lambda args, name=name: starts.append((name, args)) for name in _STARTERS}
    with patch.multiple(launch, **stand_ins):
        launch.launch_command(options)
    ((starter, args),) = starts
    args.main_process_port = args.main_process_port or 0  # prepare_simple_launcher_cmd_env needs one for several nodes
    with patch.object(prepare, "is_port_in_use", lambda port: False):  # a training on this machine may use the port
        if starter == "deepspeed_launcher":
            variables = prepare.prepare_deepspeed_cmd_env(args)[1]
        elif starter == "multi_gpu_launcher":
            variables = prepare.prepare_multi_gpu_env(args)
        else:
            variables = prepare.prepare_simple_launcher_cmd_env(args)[1]
    return {k: v for k, v in variables.items() if os.environ.get(k) != v and not k.startswith(_PLACED)}
