"""Simulate a trainer whose vLLM is a server on other GPUs (TRL's `vllm_mode="server"`).

The server's memory is not simulated. On the trainer's GPUs, rank 0 copies the weights into buffers that it
sends, so it needs more memory than the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from zerofit.rollout.phases import SENT_BUFFERS, SENT_BYTES
from zerofit.simulate.engine.phases import PhaseLog
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.script.errors import not_simulated
from zerofit.simulate.script.generation import GENERATION
from zerofit.simulate.script.rollout_phases import SYNC, begin, end, plain_token
from zerofit.simulate.script.tracker import ScriptTracker

if TYPE_CHECKING:
    from trl.generation.vllm_generation import VLLMGeneration  # pyright: ignore[reportMissingImports]

_TRAINERS = 'use GRPOTrainer or RLOOTrainer of TRL 1.16, or vllm_mode="colocate"'


def connect_server(meter: ScriptTracker, log: PhaseLog) -> None:
    """Replace TRL's client, which would wait for a vLLM server.

    (trl/generation/vllm_generation.py)
    """
    try:
        from trl.generation.vllm_client import VLLMClient  # pyright: ignore[reportMissingImports]
        from trl.generation.vllm_generation import VLLMGeneration  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise not_simulated('vllm_mode="server" of this trainer', _TRAINERS) from None
    original = VLLMGeneration._init_vllm

    def connected(self: VLLMGeneration) -> None:
        if self.mode != "server":
            original(self)
            return
        if not self.accelerator.is_main_process:
            raise not_simulated('vllm_mode="server" on this rank', "use rank 0, which sends the weights")
        vars(self)["vllm_client"] = ServerClient(meter, log, self.model.config)

    def refused(*_: object, **__: object) -> None:
        raise not_simulated('vllm_mode="server" of this trainer', _TRAINERS)

    replace_in(VLLMGeneration, "_init_vllm", connected)
    replace_in(VLLMClient, "__init__", refused)


class ServerClient:
    """Replaces TRL's VLLMClient, with the methods that TRL's trainers call."""

    def __init__(self, meter: ScriptTracker, log: PhaseLog, config: PreTrainedConfig):
        self._log, self._token = log, plain_token(config)
        meter.note("vLLM's server runs on its own GPUs: zerofit plan MODEL --serve forecasts their memory")

    def get_server_info(self) -> dict[str, object]:
        """Return the part of the server's configuration that TRL reads."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int = 1, max_tokens: int = 16, logprobs: int | None = 0, **_: object
    ) -> dict[str, object]:
        """Return `n` completions of the maximum length for each prompt, in TRL's format."""
        begin(self._log, GENERATION)
        ids = [[self._token] * max_tokens for _ in range(n * len(prompts))]
        wanted = logprobs is not None
        end(self._log)
        return {
            "prompt_ids": [list(prompt) for prompt in prompts],
            "completion_ids": ids,
            "logprobs": [[[0.0]] * max_tokens for _ in ids] if wanted else None,
            "logprob_token_ids": [[[self._token]] * max_tokens for _ in ids] if wanted else None,
        }

    def update_named_params(self, metadata: object, named_params: Iterator[tuple[str, Tensor]]) -> None:
        """Pack all weights into buffers, as vLLM's code does.

        It fills one buffer while it sends another.
        """
        begin(self._log, SYNC)
        sent: list[Tensor | None] = [None] * SENT_BUFFERS
        for slot in cycle(range(SENT_BUFFERS)):
            sent[slot] = None  # vLLM frees a buffer before it fills the next one
            sent[slot] = _packed(named_params)
            if sent[slot] is None:
                return

    def reset_prefix_cache(self) -> None:
        """End the weight synchronization, after which TRL always calls this method."""
        end(self._log)


def _packed(weights: Iterator[tuple[str, Tensor]]) -> Tensor | None:
    """Return the next weights in one buffer; None after the last."""
    # Gathered weights live until they are copied.
    parts: list[Tensor] = []
    for _, weight in weights:
        parts.append(weight.contiguous().view(torch.uint8).view(-1))
        if sum(part.numel() for part in parts) > SENT_BYTES:
            break
    return torch.cat(parts) if parts else None
