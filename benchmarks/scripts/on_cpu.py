"""on_cpu.py SCRIPT ARGS: run a script that was written for GPUs in a group of CPU ranks.

Accelerate under DeepSpeed takes each CPU rank for the only one, unless it is told of the group beforehand. Kernels of
Triton (Liger's) do not run on a CPU: zeros are written into what they are given; their callers allocate the same.
"""

import os
import runpy
import sys
from contextlib import suppress

import deepspeed
import torch
from accelerate import PartialState


def write_zeros(kernel, *args, **kwargs):
    for given in (*args, *kwargs.values()):
        if isinstance(given, torch.Tensor) and given.is_floating_point():
            given.data.zero_()  # autograd does not hear of it


with suppress(ImportError):  # beside CPU builds of torch
    from triton.runtime.jit import JITFunction

    JITFunction.run = write_zeros
deepspeed.init_distributed("gloo")
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(backend="gloo")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
