"""Causes of errors at the start of vLLM's and SGLang's engines, which allocate their cache before the first token.

vLLM's errors are in vllm/v1/worker/utils.py (request_memory) and vllm/v1/core/kv_cache_utils.py
(_check_enough_kv_cache_memory), and before 0.8 in vllm/worker/worker.py (raise_if_cache_size_invalid).
"""

from __future__ import annotations

import re

from zerofit.explain.advice import NVIDIA_SMI, PLAN_SERVE
from zerofit.explain.evidence import Cause, LogEvidence

_FREE = re.compile(r"\(([\d.]+)/([\d.]+) ?GiB\) on startup .*?utilization \(([\d.]+), ([\d.]+) ?GiB\)")
_NEEDED = re.compile(r"max seq len \((\d+)\).*?([\d.]+) ?GiB KV cache is needed.*?KV cache memory \(([\d.]+) ?GiB\)")
_LONGEST = re.compile(r"estimated maximum model length is (\d+)")
_TOKENS = re.compile(r"max seq len \((\d+)\) is larger than .*? KV cache \((\d+)\)")


def vllm(evidence: LogEvidence) -> Cause | None:
    """Find why vLLM's engine did not start."""
    text = evidence.shortage.message
    if "on startup" in text:
        return _not_free(text)
    if "mem-fraction-static" in text:
        summary = "SGLang's weights fill its share of the GPU. Nothing is left for the KV cache."
        return Cause(name="sglang-no-cache", summary=summary)
    if "max seq len" in text:
        return _too_long(text)
    if "warming up" in text:
        return Cause(
            name="vllm-warm-up",
            summary="After vLLM had allocated its cache, too little memory was left to warm up the sampler.",
            run_next=PLAN_SERVE,
        )
    return Cause(
        name="vllm-no-cache",
        summary="vLLM's weights and activations fill its share of the GPU. Nothing is left for the KV cache.",
        run_next=PLAN_SERVE,
    )


def _not_free(text: str) -> Cause:
    shown = []
    if found := _FREE.search(text):
        free, total, share, wanted = found.groups()
        shown.append(f"{free} GiB of {total} GiB were free, and gpu_memory_utilization={share} needs {wanted} GiB")
        shown.append(f"to run vLLM without freeing memory, set gpu_memory_utilization={_share_below(free, total):.2f}")
    summary = "vLLM needs a share of the whole GPU, and other tensors or processes use a part of that share."
    return Cause(name="vllm-gpu-not-free", summary=summary, evidence=tuple(shown), run_next=NVIDIA_SMI)


def _share_below(free: str, total: str) -> float:
    """Return the utilization that needs exactly the free memory, rounded down to hundredths."""
    try:
        return int(100 * float(free) / float(total)) / 100
    except (ValueError, ZeroDivisionError):
        return 0.0


def _too_long(text: str) -> Cause:
    shown, longest = [], ""
    if found := _NEEDED.search(text):
        shown.append(f"one sequence of {found[1]} tokens needs {found[2]} GiB, and the cache has {found[3]} GiB")
    elif found := _TOKENS.search(text):
        shown.append(f"one sequence has up to {found[1]} tokens, and the cache holds {found[2]}")
        longest = found[2]
    if found := _LONGEST.search(text):
        longest = found[1]
    if longest:
        shown.append(f"vLLM starts with max_model_len={longest} or less")
    return Cause(
        name="vllm-sequence-too-long",
        summary="vLLM's KV cache is too small for one sequence of the maximum length.",
        evidence=tuple(shown),
        run_next=PLAN_SERVE,
    )
