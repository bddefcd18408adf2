"""Imported once by the process that simulations are forked from: all that takes seconds."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed must not look for a GPU: the simulated one takes its place
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"


import zerofit.simulate.rank  # noqa: F401
