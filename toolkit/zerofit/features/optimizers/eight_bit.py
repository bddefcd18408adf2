"""bitsandbytes' AdamW with moments of 8 bits, which DeepSpeed cannot build by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from zerofit.features.optimizer import (
    ADAM_BYTES,
    OptimizerEntry,
    Refusal,
    StateBytes,
    States,
    StepCost,
    TrainingSetting,
)
from zerofit.features.optimizers.adamw import RATES

KERNEL = "optimizer_update_8bit_blockwise"  # below torch.ops.bitsandbytes
# from bitsandbytes 0.50.2 (optim/optimizer.py, init_state, get_state_buffer)
EIGHT_BIT_ELEMENTS = 4096  # smaller tensors keep 32-bit states (min_8bit_size)
BLOCK_ELEMENTS, BLOCK_BYTES = 256, 4  # each state has a float32 scale per block
MAPS_BYTES = 2 * 256 * 4  # the float32 values of the 256 codes of both states, once per optimizer
PAGED_ELEMENTS = 100_000  # from this size on, states are in memory that the driver pages between host and device


@dataclass(frozen=True, kw_only=True)
class BlockStates(States):
    """Two 8-bit moments: one byte each per weight, and a scale for each block."""

    paged: bool = False

    def of_tensors(self, numels: Iterable[int], gpu: bool) -> StateBytes:
        """Return the bytes of these tensors' moments, and of the lookup table of their codes."""
        sizes = list(numels)
        host = 2 * sum(n for n in sizes if self.paged and gpu and n >= PAGED_ELEMENTS)
        maps = MAPS_BYTES if any(n >= EIGHT_BIT_ELEMENTS for n in sizes) else 0
        return StateBytes(sum(map(_tensor_bytes, sizes)) + maps - host, host)


def _tensor_bytes(numel: int) -> int:
    """Return the bytes of a tensor's two moments, without the lookup table of their codes."""
    if numel < EIGHT_BIT_ELEMENTS:
        return 2 * 4 * numel
    return 2 * (numel + BLOCK_BYTES * -(-numel // BLOCK_ELEMENTS))


def _refusing(name: str) -> Callable[[TrainingSetting], Iterator[Refusal]]:
    """Return the function `refuses` of the entry `name`."""

    def refuses(setting: TrainingSetting) -> Iterator[Refusal]:
        flag = f"--optimizer {name}"
        if setting.offload != "none":
            yield Refusal(
                f"{flag} with offload_optimizer.device {setting.offload}: on the host, bitsandbytes unpacks all "
                "states to float32 in each step, which needs more memory than it saves",
                "remove offload_optimizer, or use --optimizer adamw (DeepSpeed's CPU Adam)",
            )
        if setting.ep > 1:
            yield Refusal(
                f"{flag} with --expert-parallel {setting.ep}: DeepSpeed splits the parameter groups of experts only "
                "for optimizers that it builds itself (runtime/engine.py:2330)",
                "use --optimizer adamw, or --expert-parallel 1",
            )
        if setting.elastic:
            yield Refusal(
                f"{flag} with elastic_checkpoint: DeepSpeed would split 8-bit states in the middle of their blocks",
                "remove the key: zerofit's checkpoints have their own index",
                where="zero_optimization.elastic_checkpoint",
            )

    return refuses


_WHY = "in another layout, the blocks of 8-bit moments would begin at other elements, which rounds all moments again"
ADAMW8BIT = OptimizerEntry(
    name="adamw8bit",
    json_type="AdamW8bit",
    docs="2 bytes per parameter, plus 8 bytes for each 256 parameters; small tensors (below 4,096 elements) 8 bytes "
    "per parameter. ZeRO 0 to 3.",
    cpu_class="bitsandbytes.optim:AdamW8bit",
    gpu_class="bitsandbytes.optim:AdamW8bit",
    library="bitsandbytes",
    kernel=KERNEL,
    rates=RATES,
    states=BlockStates(by_weight=False, unconvertible=_WHY),
    step=StepCost(
        # the CPU kernel allocates the gradient, a root and a quotient, and unpacks moments that have 8 bits
        # (bitsandbytes/backends/cpu/ops.py)
        temporary=lambda numel, gpu: 0 if gpu else (20 if numel >= EIGHT_BIT_ELEMENTS else 12) * numel,
        late=lambda gpu: 0,
        moved_bytes=ADAM_BYTES - 12,  # moments of one byte
    ),
    refuses=_refusing("adamw8bit"),
)
PAGED_ADAMW8BIT = replace(
    ADAMW8BIT,
    name="paged-adamw8bit",
    json_type="PagedAdamW8bit",
    docs="Like adamw8bit; tensors of 100,000 elements or more are in memory that CUDA pages to the host. ZeRO 0 to 3.",
    cpu_class="bitsandbytes.optim:PagedAdamW8bit",
    gpu_class="bitsandbytes.optim:PagedAdamW8bit",
    states=BlockStates(by_weight=False, unconvertible=_WHY, paged=True),
    refuses=_refusing("paged-adamw8bit"),
)
