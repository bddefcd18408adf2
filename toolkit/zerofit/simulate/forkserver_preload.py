"""Imported once by the process that simulations are forked from: all that takes seconds."""

from __future__ import annotations

import importlib
import os
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's to answer
os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed must not look for a GPU: the simulated one takes its place
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"

for name in (
    "torchvision",
    "transformers.integrations.deepspeed",
    "transformers.models.auto.modeling_auto",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "zerofit.simulate.rank",
):
    importlib.import_module(name)
