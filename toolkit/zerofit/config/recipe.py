"""Default learning rate, warm-up and weight decay."""

from __future__ import annotations

import math
from typing import Literal

from zerofit.features.optimizers import OPTIMIZERS
from zerofit.features.optimizers.adamw import ADAMW
from zerofit.spec.run import Run

Kind = Literal["cnn", "transformer", "pretrained", "pretrained-cnn", "adapters", "gan"]  # first two: from scratch

CNNS: tuple[Kind, ...] = ("cnn", "pretrained-cnn")
BATCH, PARAMETERS = 16, 1.2e6  # the rates are for this number of samples per step and this model size (llama-tiny)
SIZE_EXPONENT = -0.22  # between 6e-4 at 125 million parameters (Brown et al., 2020) and 1.5e-4 at 70 billion (Llama 3)
LARGEST_SMALL = 3.0  # limit for smaller models, relative to the rate for 1.2 million parameters
SGD_LINEAR_FROM, SGD_LINEAR_TO = 256, 8192  # samples

# Loshchilov & Hutter, 2019, appendix B.1: the best decay falls with the square root of the steps. This gives the usual
# 5e-4 and 2e-4 of CIFAR-10 and ImageNet (78,000 and 450,000 steps), and was best for LeNet on digits (1,800 steps).
CNN_DECAY = 0.16


def peak_lr(kind: Kind, optimizer: str, batch: int, parameters: int) -> float:
    """Return the default peak learning rate, to two digits.

    The rate depends on the optimizer:
    - SGD: the rate grows linearly above 256 samples (Goyal et al., 2017).
    - Adafactor: the rate is fixed and relative to the weights.
    - Other optimizers normalize their step. The rate grows with the square root of the batch between 4 and 64 samples
      (Malladi et al., 2022). Above 64, good rates of language models hardly depend on the batch.

    With these other optimizers, larger models from scratch get a lower rate, except with Muon. The rate of pretrained
    models does not depend on their size. A GAN's rate is fixed, except with SGD.
    """
    rates = OPTIMIZERS.get(optimizer, ADAMW).rates
    if rates.by_batch == "linear":
        scale = min(max(batch, SGD_LINEAR_FROM), SGD_LINEAR_TO) / SGD_LINEAR_FROM
    elif kind == "gan" or rates.by_batch == "fixed":
        scale = 1.0
    else:
        scale = math.sqrt(min(max(batch / BATCH, 0.25), 4.0))
        if kind not in ("pretrained", "pretrained-cnn", "adapters") and rates.by_size:
            scale *= min((parameters / PARAMETERS) ** SIZE_EXPONENT, LARGEST_SMALL)
    # the rate for a batch of BATCH samples and a model of PARAMETERS parameters; fine-tuning uses smaller steps
    own = {"pretrained": rates.pretrained, "adapters": rates.adapters, "gan": rates.gan}
    base = rates.scratch / 10 if kind == "pretrained-cnn" else own.get(kind)
    return float(f"{(base or rates.scratch) * scale:.2g}")


def weight_decay(kind: Kind, optimizer: str | None, steps: int) -> float:
    """Return the default weight decay, to two digits."""
    entry = OPTIMIZERS.get(optimizer or "", ADAMW)
    if kind in CNNS and entry.coupled_decay:
        return min(entry.weight_decay, float(f"{CNN_DECAY / math.sqrt(steps):.2g}"))
    return entry.weight_decay


def warmup_steps(run: Run, steps: int) -> int:
    """Return the warm-up steps: the run's, else 5 % of all steps, rounded up."""
    return -(-steps // 20) if run.warmup_steps is None else run.warmup_steps
