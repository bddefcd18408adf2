"""Micro batches of the data's shape without any data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zerofit.models.inputs import ImageInputs, Inputs
from zerofit.spec.run_folder import Job


def batches(job: Job, inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Micro batches on the CPU for one rank, in the form of the loader's (`zerofit.data.micro_batches`), without end.

    Inputs are float32 (micro, channels, size, size) or int64 (micro, seq_len); labels int64 (micro,) or (micro,
    seq_len).
    """
    micro = job.batch.micro
    while True:
        if isinstance(inputs, ImageInputs):
            x = torch.zeros(micro, inputs.channels, inputs.size, inputs.size)
            labels, targets = torch.zeros(micro, dtype=torch.long), 1
        else:
            x = torch.zeros(micro, inputs.seq_len, dtype=torch.long)
            labels, targets = torch.zeros(micro, inputs.seq_len, dtype=torch.long), inputs.seq_len
        batch = {"inputs": x, "labels": labels, "weight": job.layout.sp / (micro * targets)}
        del x, labels
        yield batch
        del batch
