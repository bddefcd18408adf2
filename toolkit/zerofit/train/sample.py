"""A sample of what a language model has learned, written by all ranks together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zerofit.models.build import forward_logits
from zerofit.train.engines import ZeroTrainer

TEMPERATURE = 0.7


@torch.no_grad()
def continue_text(driver: ZeroTrainer, prompt: list[int], count: int, seed: int) -> list[int]:
    """Token ids that follow the prompt, drawn one at a time from the model at temperature 0.7.

    Every rank runs the same forward, since under ZeRO-3 and tensor parallelism each holds only a part of the weights;
    rank 0 draws, so that ranks cannot come apart.
    """
    engine, device = driver.engine, driver.device
    engine.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        context = torch.tensor([tokens[-driver.job.run.seq_len :]], device=device)
        logits, _ = forward_logits(engine, context)
        odds = torch.softmax(logits[0, -1].float().cpu() / TEMPERATURE, dim=-1)
        drawn = torch.multinomial(odds, 1, generator=generator).to(device)
        dist.broadcast(drawn, src=0)
        tokens.append(int(drawn))
    engine.train()
    return tokens
