"""vLLM's memory, and the bytes left for its KV cache, by the rule of each release.

    KV cache = gpu_memory_utilization x total - weights - activations of the profile run - memory outside torch
               - CUDA graphs (from 0.21)

The rule is `determine_available_memory` in vllm/worker/worker.py (V0) and v1/worker/gpu_worker.py. The profile run
feeds `max_num_batched_tokens` tokens and samples `max_num_seqs` sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

from zerofit.rollout.cache import BLOCK, CachePlan, Need, plan_cache
from zerofit.rollout.served import BITS, MARLIN_MULTIPLE, TRITON_MULTIPLE, ServedModel
from zerofit.spec.device_file import GIB, Device
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import ELEMENT_BYTES, PRECISIONS
from zerofit.spec.overhead import context_figure

Release = tuple[int, int]
RELEASE: Release = (0, 27)
V1: Release = (0, 8)  # the first release whose engine is V1 by default
GRAPHS_COUNTED: Release = (0, 21)
# Memory of sampling in the profile run, in units of one row of fp32 logits per sequence. torch's sort for top-p kept
# values, indices, probabilities and sums; 0.17 replaced it with a kernel. These and the following constants are fitted
# to start-up logs (benchmarks/serving_memory.py).
SORTED, KERNEL, KERNEL_FROM = 9.5, 3.73, (0, 17)
# Alive next to an MLP's activations, in rows of the hidden size: residual and input, and output of attention and its
# buffer, which tensor parallelism divides.
HIDDEN_ROWS, DIVIDED_ROWS = 2.0, 2.2
GRAPH_BYTES = 0.0075 * GIB  # of the CUDA graph of one batch size
# Outside torch's allocator: GiB of context, kernels and cuBLAS by release; bytes of tensor parallel communicators.
OUTSIDE = {(0, 0): 0.07, (0, 15): 0.13, (0, 18): 0.25, (0, 25): 0.35}
NVLINK_BYTES, PCIE_BYTES = 0.35 * GIB, 0.15 * GIB
# NCCL's buffers for reductions in the switch, from Hopper on (nvls.cc: not for two GPUs).
HOPPER = (9, 0)
SWITCH_BYTES, SWITCH_RANKS = 1.5 * GIB, 3
TRITON_FROM: Release = (0, 12)  # on Hopper; before, only where triton_kernels is installed
UNSEEN_BYTES = 0.3 * GIB  # fragmentation and kernels loaded after the profile run
STEP = 100  # utilizations are in hundredths
FULL = "none"  # `quantization` of weights in `dtype`, also if the published ones are quantized


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """vLLM's arguments that decide its memory, under vLLM's names. None: vLLM's default."""

    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    dtype: str = "bf16"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    enforce_eager: bool = False
    block_size: int = BLOCK
    release: Release = RELEASE
    v1: bool | None = None

    @classmethod
    def read(cls, values: Mapping[str, object], where: str) -> EngineSettings:
        """Return the settings of `name=value` pairs. Raises UserError with all problems."""
        problems, known = Problems(), set(cls.__dataclass_fields__)
        settings = dict(values)
        for name in settings.keys() - known:
            problems.add("usage", f"{where}: no setting {name!r}", f"settings: {', '.join(sorted(known))}", where)
            settings.pop(name)
        if "release" in settings:
            parts = str(settings["release"]).split(".")
            if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
                problems.add("bad-value", f"release={settings['release']}", "use a release of vLLM, like 0.19", where)
            else:
                settings["release"] = int(parts[0]), int(parts[1])
        share = settings.get("gpu_memory_utilization", 0.9)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            problems.add("bad-value", f"gpu_memory_utilization={share}", "use a fraction above 0, at most 1", where)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "block_size"):
            size = settings.get(name, 1)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                problems.add("bad-value", f"{name}={size}", "use an integer of at least 1", where)
        choices = {
            "quantization": (None, FULL, *BITS),
            "kv_cache_dtype": ("auto", "fp8", "bf16", "fp16"),
            "dtype": PRECISIONS,
            **dict.fromkeys(("enforce_eager", "v1"), (None, False, True)),
        }
        for name, allowed in choices.items():
            if name in settings and settings[name] not in allowed:
                words = ", ".join(str(word).lower() for word in allowed if word is not None)
                problems.add("bad-value", f"{name}={settings[name]}", f"use one of {words}", where)
        problems.raise_if_any()
        return cls(**cast(dict[str, Any], settings))  # their types were checked

    # The defaults depend on the model and the device (engine/arg_utils.py).
    def settled(self, model: ServedModel, device: Device) -> EngineSettings:
        """Return the settings with vLLM's defaults in place of None."""
        length = self.max_model_len or model.positions or 2048
        large = device.memory_bytes >= 70 * GIB and "A100" not in device.name
        batched = (8192 if large else 2048) if self.is_v1 else 2048 if length > 32768 else max(length, 2048)
        return replace(
            self,
            quantization=None if self.quantization == FULL else self.quantization or model.published,
            max_model_len=length,
            max_num_batched_tokens=self.max_num_batched_tokens or batched,
            max_num_seqs=self.max_num_seqs or (1024 if large and self.is_v1 else 256),
        )

    @property
    def is_v1(self) -> bool:
        """Whether the engine is V1."""
        return self.release >= V1 if self.v1 is None else self.v1

    @property
    def is_early_v1(self) -> bool:
        """Whether the engine is V1 in a release where V1 was still experimental."""
        return self.is_v1 and self.release < V1


class EnginePart(NamedTuple):
    """A part of an engine's memory on one GPU."""

    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """The memory of an engine on one GPU, once it has started."""

    model: ServedModel
    settings: EngineSettings  # with vLLM's defaults filled in (`settled`)
    device: Device = field(repr=False)

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        s = self.settings
        with_triton = s.release >= TRITON_FROM and self.device.compute_capability == HOPPER
        multiple = TRITON_MULTIPLE if with_triton else MARLIN_MULTIPLE
        return self.model.weight_bytes(ELEMENT_BYTES[s.dtype], s.tensor_parallel_size, s.quantization, multiple)

    @cached_property
    def activations(self) -> int:
        """The peak of the profile run, without the weights: in an MLP or in sampling."""
        model, s = self.model, self.settings
        tokens = s.max_num_batched_tokens or 0
        element, ranks = ELEMENT_BYTES[s.dtype], s.tensor_parallel_size
        hidden = tokens * model.hidden * element
        routed = tokens * model.experts_of_token * element
        # Experts keep their workspaces after the forward.
        workspaces = routed * max(2 * model.expert // ranks, model.hidden) + routed * model.expert // ranks
        mlp = 0 if model.expert else tokens * model.mlp // ranks * element
        logits = min(s.max_num_seqs or 0, tokens) * model.vocabulary * 4
        factor = SORTED if s.release < KERNEL_FROM else KERNEL
        chunked_v0 = not s.is_v1 and s.release < V1 and (s.max_model_len or 0) > 32768  # then nothing is sampled
        sampling = 0 if chunked_v0 else round(factor * logits) + hidden
        if s.is_early_v1:  # logits of all tokens in 16 bits, and nothing is sampled (v1/worker/gpu_model_runner.py)
            sampling = tokens * model.vocabulary * element + hidden
        return round(max(mlp + (HIDDEN_ROWS + DIVIDED_ROWS / ranks) * hidden, sampling) + workspaces)

    @property
    def graphs(self) -> int:
        """Bytes of the CUDA graphs."""
        settings = self.settings
        if settings.enforce_eager:
            return 0
        # Batches of 1, 2 and 4 tokens, multiples of 8 up to 256 and multiples of 16 up to 512 have a graph each. From
        # 0.11 on, batches without prompts have graphs of their own.
        seqs = settings.max_num_seqs or 0
        mixed = 4 + min(seqs, 256) // 8 + max(0, min(2 * seqs, 512) - 256) // 16
        decode = 4 + min(seqs, 256) // 8 + max(0, min(seqs, 512) - 256) // 16 if settings.release >= (0, 11) else 0
        return round((mixed + decode) * GRAPH_BYTES)

    @property
    def outside(self) -> int:
        """Bytes outside torch's allocator."""
        size = OUTSIDE[max(release for release in OUTSIDE if release <= self.settings.release)] * GIB
        if self.settings.is_early_v1:  # it counts all memory in use, with the context (v1/worker/gpu_worker.py)
            size += context_figure(self.device).low_bytes
        ranks = self.settings.tensor_parallel_size
        if ranks == 1:
            return round(size)
        if "PCIe" in self.device.link_name:
            return round(size + PCIE_BYTES)
        switched = ranks >= SWITCH_RANKS and self.device.compute_capability >= HOPPER
        return round(size + NVLINK_BYTES + (SWITCH_BYTES if switched else 0))

    @property
    def requested(self) -> int:
        """Bytes that `gpu_memory_utilization` allows."""
        return math.ceil(self.settings.gpu_memory_utilization * self.device.memory_bytes)

    @property
    def counted(self) -> int:
        """Bytes that vLLM subtracts from `requested` when it starts."""
        graphs = self.graphs if self.settings.release >= GRAPHS_COUNTED else 0
        return self.weights + self.activations + self.outside + graphs

    @property
    def cache_bytes(self) -> int:
        """Bytes for the KV cache; negative if no memory is left."""
        return self.requested - self.counted

    @cached_property
    def cache(self) -> CachePlan:
        """How vLLM divides the KV cache."""
        s = self.settings
        element = ELEMENT_BYTES[s.dtype]
        of_cache = {"auto": element, "fp8": 1}.get(s.kv_cache_dtype, 2)
        kinds = self.model.cache_layers(of_cache, element, s.tensor_parallel_size)
        return plan_cache(kinds, s.block_size, hybrid=s.is_v1)

    @property
    def need(self) -> Need:
        """The limits on the longest request."""
        return Need(self.settings.max_model_len or 0, self.settings.max_num_batched_tokens or 0)

    @property
    def blocks(self) -> int:
        """Number of blocks in the KV cache."""
        return self.cache.blocks(self.cache_bytes)

    @property
    def sequences(self) -> float:
        """Number of sequences of `max_model_len` tokens that fit into the cache."""
        return self.cache.sequences(self.blocks, self.need)

    @property
    def fits(self) -> bool:
        """Whether vLLM starts: it fits on the GPU, and its cache can store the longest request."""
        return self.sequences >= 1 and self.settings.gpu_memory_utilization <= self.largest_utilization

    @property
    def largest_utilization(self) -> float:
        """The largest `gpu_memory_utilization`, in hundredths, that leaves what vLLM does not count."""
        uncounted = UNSEEN_BYTES + (self.graphs if self.settings.release < GRAPHS_COUNTED else 0)
        return math.floor(STEP * (1 - uncounted / self.device.memory_bytes)) / STEP

    @property
    def smallest_utilization(self) -> float:
        """The smallest `gpu_memory_utilization`, in hundredths, with which the longest request fits."""
        needed = self.counted + self.cache.blocks_of_request(self.need) * self.cache.block_bytes
        return math.ceil(STEP * needed / self.device.memory_bytes) / STEP

    @property
    def longest(self) -> int:
        """The largest `max_model_len` with which one request fits; 0 if none fits.

        It is at most the model's number of positions.
        """
        low, high = 0, self.model.positions or 2**20
        # The blocks of a request only grow with its length, so bisection finds the largest.
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.cache.blocks_of_request(self.need._replace(length=middle)) <= self.blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    @property
    def parts(self) -> tuple[EnginePart, ...]:
        """The memory of the GPU by kind."""
        kinds = {
            "weights": self.weights,
            "KV cache": max(0, self.cache_bytes),
            "activations": self.activations,
            "CUDA graphs": self.graphs,
            "outside torch": self.outside,
        }
        return tuple(EnginePart(name, size) for name, size in kinds.items() if size)
