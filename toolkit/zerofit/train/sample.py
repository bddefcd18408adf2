"""A sample of what a language model has learned, written by all ranks together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zerofit.models.build import forward_logits

TEMPERATURE = 0.7


@torch.no_grad()
def continue_text(
    engine: Any, device: torch.device, prompt: list[int], count: int, context: int, seed: int
) -> list[int]:
    """Return the prompt and `count` token ids that follow it, drawn one at a time at temperature 0.7.

    Every rank runs the same forward, since under ZeRO-3 and tensor parallelism each holds only a part of the weights;
    rank 0 draws, so that ranks cannot come apart.
    """
    engine.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        logits, _ = forward_logits(engine, torch.tensor([tokens[-context:]], device=device))
        odds = torch.softmax(logits[0, -1].float().cpu() / TEMPERATURE, dim=-1)
        drawn = torch.multinomial(odds, 1, generator=generator).to(device)
        dist.broadcast(drawn, src=0)
        tokens.append(int(drawn))
    engine.train()
    return tokens
