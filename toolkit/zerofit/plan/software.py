"""Describe the software of a run, which decides how fast its kernels are on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zerofit.spec.model_facts import ATTENTION_KERNELS, AttentionKernel


@dataclass(frozen=True, kw_only=True)
class Software:
    """Kernels, compiler and threads; by default those of DeepSpeed, torch and transformers."""

    attn_implementation: AttentionKernel = "sdpa"
    compile: bool = False  # torch.compile
    liger_kernel: bool = False  # Liger's fused RMS norm, rotary embeddings, SwiGLU and cross-entropy
    tensor_sequence_parallel: bool = False  # tensor parallel ranks also split norms, embedding, head and loss
    cpu_threads: int | None = None  # of each rank; None: the node's cores, divided among its ranks

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Software:
        """Return the software that `values` name: a plan's fixed values or a run's fields.

        None stands for the default.
        """
        chosen = {field.name: values.get(field.name) for field in fields(cls)}
        kernel = (values.get("model_args") or {}).get("attn_implementation")
        chosen["attn_implementation"] = kernel if kernel in ATTENTION_KERNELS else None  # otherwise a user's own kernel
        return cls(**{name: value for name, value in chosen.items() if value is not None})


USUAL = Software()
