"""The ranks of a pool, forked from one process that has imported torch and DeepSpeed: 3 s of CPU once, not for each.

`python -m zerofit.spec.server_process tests.ranks.server FOLDER`, with WORLD_SIZE and the master's address in the
environment; where DeepSpeed's launcher has put RANK there too, it is that rank alone. Each rank joins the process group
once, then trains every job that is put before it. A job is FOLDER/NNNN.job, which holds the path of a run folder; each
rank answers with FOLDER/NNNN.rankR: "ok" or a traceback.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import gc
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel import parallel_state_sp, ulysses_sp
from deepspeed.runtime.zero import parameter_offload
from deepspeed.utils import groups
from torch.distributed import distributed_c10d as c10d
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from zerofit.launch.parent_death import end_with_parent
from zerofit.spec.errors import RunFailed
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.train import engines
from zerofit.train.process_group import start
from zerofit.train.replay import replay
from zerofit.train.run import train

MODULES = (groups, parallel_state_sp)
IMPORTED = (ulysses_sp, modeling_llama)  # once, not in each rank that needs them
CACHES: list[functools._lru_cache_wrapper] = []  # DeepSpeed's
freeze = gc.freeze


def serve() -> None:
    """Fork the ranks; where one fails, the others end with it, as under DeepSpeed's launcher."""
    end_with_parent()
    faulthandler.register(signal.SIGUSR1)  # the pool asks hanging ranks where they are
    if "RANK" in os.environ:
        _serve(Path(sys.argv[-1]))
    _keep_caches()
    freeze()  # what is imported, half a million objects, is not walked through by collections, and stays shared
    ranks = list[int]()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        child = os.fork()
        if child == 0:
            end_with_parent()
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_SIZE": os.environ["WORLD_SIZE"]}
            try:
                _serve(Path(sys.argv[-1]))
            except BaseException:
                traceback.print_exc()
            os._exit(1)  # `_serve` ends by itself
        ranks.append(child)
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def _serve(inbox: Path) -> None:
    engines.SAMPLE_TOKENS = 2  # else the sample of a language model takes longer than its training
    # DeepSpeed refuses fp16 where a CPU has no instructions for it, although torch computes it everywhere
    type(get_accelerator()).is_fp16_supported = lambda _: True
    start(timeout=timedelta(minutes=30))  # the pool ends jobs that take too long
    rank = dist.get_rank()
    fresh = [{k: copy.copy(v) for k, v in vars(m).items() if k.startswith("_") or k == "mpu"} for m in MODULES]
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    mine, number = set(c10d._world.pg_map), 0
    gc.freeze = gc.unfreeze = lambda: None  # a training lets go of all at its end, and the next collection takes 1 s
    while not (inbox / "stop").exists():
        job = inbox / f"{number:04}.job"
        if not job.exists():
            time.sleep(0.05)
            continue
        word = _do(RunFolder(Path(job.read_text())), rank)
        aside = inbox / f".{number:04}.rank{rank}"
        aside.write_text(word)
        os.replace(aside, inbox / f"{number:04}.rank{rank}")
        number += 1
        _end_engines()
        for module, state in zip(MODULES, fresh, strict=True):  # process groups of the layout that has just ended
            vars(module).update({name: copy.copy(value) for name, value in state.items()})
        for group in set(c10d._world.pg_map) - mine:  # else threads of each would look for work 100 times a second
            dist.destroy_process_group(group)
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
        gc.collect()
        freeze()  # what has been imported since
    os._exit(0)  # as zerofit.worker ends: quickly


def _end_engines() -> None:
    """Let go of the job's engines: DeepSpeed's hooks and caches would keep their models and process groups."""
    for one in gc.get_objects():
        if issubclass(type(one), DeepSpeedEngine):  # `isinstance` would ask weak proxies, whose object may be gone
            with suppress(AttributeError):  # the making of an engine failed half way
                one.destroy()
    _keep_caches()
    for cache in CACHES:
        cache.cache_clear()
    parameter_offload.FWD_MODULE_STACK.clear()


def _keep_caches() -> None:
    """Add DeepSpeed's caches among the objects that are not frozen to `CACHES`."""
    wrappers = [one for one in gc.get_objects() if type(one) is functools._lru_cache_wrapper]
    CACHES.extend(one for one in wrappers if one.__module__.startswith("deepspeed.runtime.zero"))


def _do(folder: RunFolder, rank: int) -> str:
    try:
        job = Job.read(folder)
        (replay if job.replay else train)(job, folder)
    except RunFailed as error:
        return json.dumps(error.problem.as_dict())
    except BaseException:
        return traceback.format_exc()
    return "ok"
