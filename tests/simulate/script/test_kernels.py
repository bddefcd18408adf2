"""Triton kernels in simulated scripts: they allocate nothing, what their callers allocate and keep counts."""

from __future__ import annotations

import pytest

from tests.simulate.script.scripts import facts, simulated
from zerofit.spec.overhead import CUBLAS_HOPPER_BYTES

pytest.importorskip("triton")

# as Liger's fused linear cross entropy: gradients are made in forward, of a part of the logits at a time
FUSED = """\
import torch
import triton
import triton.language as tl
from torch import nn

TOKENS, WIDTH, WORDS, PART = 512, 64, 2048, 128

@triton.jit
def loss_and_gradient(logits, losses, words: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, words)
    values = tl.load(logits + row * words + columns)
    tl.store(losses + row, tl.sum(values))
    tl.store(logits + row * words + columns, values)

@triton.jit
def scale(x, factor, size: tl.constexpr):
    where = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(x + where, tl.load(x + where) * tl.load(factor))

class FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        losses = torch.zeros(TOKENS, dtype=torch.float32, device=x.device)
        grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
        for start in range(0, TOKENS, PART):
            part = x[start : start + PART]
            logits = part @ weight.t()
            loss_and_gradient[(PART,)](logits, losses[start:], WORDS)
            grad_x[start : start + PART] = logits @ weight
            grad_weight += logits.t() @ part
        ctx.save_for_backward(grad_x, grad_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad):
        for kept in ctx.saved_tensors:
            scale[(kept.numel() // 64,)](kept, grad, 64)
        return ctx.saved_tensors

norm, head = nn.LayerNorm(WIDTH, device="cuda"), nn.Linear(WIDTH, WORDS, bias=False, device="cuda")
optimizer = torch.optim.SGD([*norm.parameters(), *head.parameters()], lr=0.1)
taken = torch.cuda.memory_allocated
for i in range(50):
    x = norm(torch.randn(TOKENS, WIDTH, device="cuda"))
    before = taken()
    loss = FusedLoss.apply(x, head.weight)
    # both gradients, which are kept, and the loss; beside the first product torch makes its workspace
    assert i == 0 or taken() - before == 4 * (TOKENS * WIDTH + WORDS * WIDTH + 1), taken() - before
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del x, loss
"""


def test_a_fused_loss_keeps_gradients_and_no_logits(folder):
    result = simulated(FUSED, gpus=1)
    notes = {note.text: note.count for note in facts(result).facts.notes}
    assert notes["Triton kernel loss_and_gradient: assumed to write only into its arguments"] == 2 * 4
    assert notes["Triton kernel scale: assumed to write only into its arguments"] == 2 * 2
    weight, x, part, row, norm = (4 * n for n in (2048 * 64, 512 * 64, 128 * 2048, 512, 2 * 64))
    (forward,) = [p for p in result.phases if (p.name, p.step) == ("forward", 1)]
    # weights; the norm's input, output, mean and spread; losses, gradients; a part of the logits and the next one
    held = (weight + norm) + (2 * x + 2 * row) + (row + x + weight) + 2 * part
    assert forward.peak_bytes == CUBLAS_HOPPER_BYTES + held
