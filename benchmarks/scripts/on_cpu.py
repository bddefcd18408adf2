"""on_cpu.py SCRIPT ARGS: run a script that was written for GPUs in a group of CPU ranks.

Accelerate under DeepSpeed takes each CPU rank for the only one, unless it is told of the group beforehand. Kernels of
Triton (Liger's) are not run, a CPU has none: what they would write stays as it was, what their callers allocate counts.
"""

import os
import runpy
import sys
from contextlib import suppress

import deepspeed
from accelerate import PartialState

with suppress(ImportError):  # beside CPU builds of torch
    from triton.runtime.jit import JITFunction

    JITFunction.run = lambda *_, **__: None
deepspeed.init_distributed("gloo")
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(backend="gloo")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
