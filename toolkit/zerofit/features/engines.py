"""The training engines whose layouts `plan` ranks. Each has one entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Engine = Literal["deepspeed", "fsdp2", "torchtitan", "verl-fsdp", "verl-fsdp2"]


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """An engine, its models, and how it handles gradients."""

    title: str  # its name in the description of a layout
    reduces_in_float32: bool = False  # after a 16-bit backward, gradients are reduced in float32
    accumulates_full_gradients: bool = False  # micro batches before the last leave full gradients
    builds_in_parts: bool = False  # no rank ever has a full parameter in float32
    releases_head: bool = False  # the head is released after the forward; the loss is computed outside the model
    single_thread: bool = False  # backward runs in the thread of forward
    loss_in_chunks: bool = False  # the head runs forward and backward for each chunk of the sequence
    flattens: bool = False  # FSDP 1: one flat parameter for each block, and one for embedding, norm and head
    only_methods: bool = False  # trains only by the methods of `plan --method`
    own_models: tuple[str, ...] = ()  # model types that it trains with its own code, not with transformers'
    configurations: Mapping[int, tuple[str, str]] = field(default_factory=dict)  # its own: parameters -> module, name


ENGINES: dict[Engine, EngineEntry] = {
    "deepspeed": EngineEntry(title="ZeRO"),
    # accelerate/utils/dataclasses.py, set_mixed_precision: one dtype for everything; accelerator.py, no_sync: gradients
    # are scattered once per step
    "fsdp2": EngineEntry(title="FSDP2", accumulates_full_gradients=True),
    # torchtitan/config/configs.py, mixed_precision_reduce; trainer.py, to_empty; distributed/utils.py:477;
    # components/loss.py, ChunkedLossWrapper
    "torchtitan": EngineEntry(
        title="torchtitan",
        reduces_in_float32=True,
        builds_in_parts=True,
        single_thread=True,
        loss_in_chunks=True,
        own_models=("llama", "qwen3"),
        configurations={  # torchtitan/models/*/config_registry.py
            6_163_712: ("llama3", "llama3_debugmodel"),
            8_030_261_248: ("llama3", "llama3_8b"),
            70_553_706_496: ("llama3", "llama3_70b"),
            596_049_920: ("qwen3", "qwen3_0_6b"),
            1_720_574_976: ("qwen3", "qwen3_1_7b"),
            14_768_307_200: ("qwen3", "qwen3_14b"),
            32_762_123_264: ("qwen3", "qwen3_32b"),
        },
    ),
    # verl/workers/engine/fsdp/transformer_impl.py, _build_fsdp_module and _gradient_sync_context; utils/fsdp_utils.py,
    # apply_fsdp2: the root gets an explicit reshard_after_forward, which torch obeys (_fsdp_state.py, _lazy_init)
    "verl-fsdp2": EngineEntry(
        title="FSDP2",
        reduces_in_float32=True,
        accumulates_full_gradients=True,
        releases_head=True,
        only_methods=True,
    ),
    # its default; get_fsdp_wrap_policy wraps each block
    "verl-fsdp": EngineEntry(
        title="FSDP 1", reduces_in_float32=True, accumulates_full_gradients=True, flattens=True, only_methods=True
    ),
}
