"""Samples, their order and batches; sources of images, tables and text, and their caches."""

from zerofit.data.base import Data, Dataset
from zerofit.data.loader import (
    Order,
    default_workers,
    eval_batch_count,
    eval_batches,
    eval_indices,
    micro_batches,
)
from zerofit.data.mixing import StepImages, mixes
from zerofit.data.opening import KINDS, check_data, default_data, open_data, split_name

__all__ = [
    "KINDS",
    "Data",
    "Dataset",
    "Order",
    "StepImages",
    "check_data",
    "default_data",
    "default_workers",
    "eval_batch_count",
    "eval_batches",
    "eval_indices",
    "micro_batches",
    "mixes",
    "open_data",
    "split_name",
]
