"""A hand-made profile and a memory formula of a few lines, so that the search can be tested by itself."""

from __future__ import annotations

from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import Device, find_device
from zerofit.spec.model_facts import ELEMENT_BYTES
from zerofit.spec.profile import Kernel, LayerCost, LayerRun, Linear, Profile, setting

GIB = 2**30
BLOCKS, WIDTH = 8, 1024
BLOCK = 12 * WIDTH * WIDTH  # elements
DEGREES = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8)]


def kernels(flops: float, weights: float, activations: float) -> tuple[Kernel, Kernel]:
    """A product of so many FLOPs a sample that reads `weights` bytes, and kernels that move `activations` bytes."""
    shape = (Linear(per_sample=1024), Linear(fixed=WIDTH), Linear(fixed=WIDTH))
    return (
        Kernel(
            kind="product",
            dtype="bfloat16",
            count=4,
            flops=Linear(per_sample=flops),
            moved_bytes=Linear(fixed=weights),
            shape=shape,
        ),
        Kernel(kind="elementwise", dtype="bfloat16", count=16, moved_bytes=Linear(per_sample=activations)),
    )


def cost(checkpointing: bool, tp: int, sp: int, width: int = WIDTH, on_host: bool = False) -> LayerCost:
    """A block of 2 FLOP a parameter and token on 1024 tokens, and activations of 34 bytes per token and width.

    `on_host`: what checkpointing keeps lies in host memory.
    """
    tokens, share = 1024, tp * sp
    out = 2 * tokens * width / sp
    flops = 2 * BLOCK * tokens / share
    kept = out if checkpointing and on_host else 0.0
    saved = out - kept if checkpointing else 17 * out / tp
    return LayerCost(
        saved_bytes=Linear(per_sample=saved),
        forward_peak_bytes=Linear(per_sample=17 * out / tp),
        backward_peak_bytes=Linear(per_sample=20 * out / tp),
        output_bytes=Linear(per_sample=out),
        host_bytes=Linear(per_sample=kept),
        forward_kernels=kernels(flops, 2 * BLOCK / tp, 20 * out / tp),
        backward_kernels=kernels((3 if checkpointing else 2) * flops, 4 * BLOCK / tp, 40 * out / tp),
        tp_allreduce_bytes=Linear(per_sample=2 * out if tp > 1 else 0.0),
        sp_alltoall_bytes=Linear(per_sample=4 * out if sp > 1 else 0.0),
        matrices=(BLOCK // tp,) if tp > 1 else (),
    )


def make_profile(
    blocks: int = BLOCKS,
    model_type: str | None = "llama",
    heads: int = 16,
    kv_heads: int = 8,
    on_host: bool = False,
) -> Profile:
    """A Llama-like model of `blocks` blocks and nothing else, in bf16."""
    settings = [(c, tp, sp) for c in (False, True) for tp, sp in DEGREES]
    return Profile(
        model="hand-made",
        task="causal-lm",
        seq_len=1024,
        layers=(LayerRun(name="block", count=blocks, matrices=(BLOCK,), vectors=()),),
        costs={setting("bf16", *one): (cost(*one, on_host=on_host),) for one in settings},
        attention_heads=heads,
        kv_heads=kv_heads,
        hidden_size=WIDTH,
        model_type=model_type,
    )


def make_cluster(kind: str = "h100-80gb", gpus: int = 8, nodes: int = 1, **device: object) -> Cluster:
    """A cluster of the catalog; `device` overrides fields of its devices."""
    found: Device = find_device(kind)
    if device:
        found = Device(**{**{f: getattr(found, f) for f in found.__dataclass_fields__}, **device})
    return Cluster(found, gpus=gpus, nodes=nodes, host_memory=found.node.host_bytes)


class Formula:
    """The usual formula: states by stage, saved activations, one block's peak."""

    def __init__(self, profile: Profile):
        self.profile, self.calls = profile, 0

    def __call__(self, layout: PlannedLayout) -> LayoutMemory:
        self.calls += 1
        (one,) = self.profile.costs[setting(layout.precision, layout.checkpointing, layout.tp, layout.sp)]
        b, p = ELEMENT_BYTES[layout.precision], self.profile.parameters / layout.tp / layout.pp
        blocks, shards = self.profile.layers[0].count / layout.pp, layout.dp * layout.sp
        parameters = b * p / (shards if layout.zero_stage == 3 else 1)
        gradients = b * p / (shards if layout.zero_stage >= 2 else 1)
        states = 12 * p / (shards if layout.zero_stage else 1)
        host = states if layout.offload_optimizer == "cpu" else 0
        nvme = states if layout.offload_optimizer == "nvme" else 0
        if layout.offload_param != "none":
            host, parameters = host + parameters, 0
        saved = blocks * one.saved_bytes.at(layout.micro_batch)
        parts = {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer state": states - host - nvme if layout.offload_optimizer == "none" else 0,
            "activations": saved + one.backward_peak_bytes.at(layout.micro_batch),
            "buckets": b * layout.bucket * (2 if layout.overlap else 1),
        }
        parts = {kind: int(size) for kind, size in parts.items()}
        return LayoutMemory(
            peak_bytes=sum(parts.values()),
            peak_phase="backward",
            static_bytes=int(parameters + parts["optimizer state"]),
            host_bytes=int(host),
            nvme_bytes=int(nvme),
            breakdown=parts,
        )
