"""on_cpu.py SCRIPT ARGS: run a script that was written for GPUs in a group of CPU ranks.

Accelerate under DeepSpeed takes each CPU rank for the only one, unless it is told of the group beforehand.
"""

import os
import runpy
import sys

import deepspeed
from accelerate import PartialState

deepspeed.init_distributed("gloo")
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(backend="gloo")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
