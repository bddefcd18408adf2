"""DeepSpeed's Ulysses attention within any process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zerofit.spec.run_folder import Job


def exchange_heads(config: Any, job: Job, group: Any) -> None:
    """Make transformers' attention exchange sequences for heads over the group.

    `UlyssesSPAttentionHF.register_with_transformers` does so over groups of neighbouring ranks that it creates itself,
    and for all heads of the config. Tensor ranks have only a part of the heads (ulysses_sp.py:401).
    """
    seq_len, heads = job.run.seq_len, config.num_attention_heads
    assert seq_len  # a job's run on text is resolved
    ulysses: Any = UlyssesSPAttentionHF(
        attn=ALL_ATTENTION_FUNCTIONS["sdpa"],
        batch_size=job.batch.micro,
        attn_head_count=heads // job.layout.tp,
        attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        kv_head_count=config.num_key_value_heads // job.layout.tp,
        num_hidden_layers=config.num_hidden_layers,
        process_group=group,
        local_seq_length=seq_len // dist.get_world_size(group),
        global_seq_length=seq_len,
    )
    ulysses.core_attn_implementation = "sdpa"

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Any:
        # the mask covers only this rank's tokens; attention over the full sequence is causal without it
        return ulysses(module, query, key, value, None, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
