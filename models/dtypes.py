"""Map the precisions of a run to torch's dtypes."""

from __future__ import annotations

import torch

from zerofit.spec.model_facts import Precision

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES: dict[torch.dtype, Precision] = {dtype: name for name, dtype in DTYPES.items()}


def torch_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")
