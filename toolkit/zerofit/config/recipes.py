"""Default learning rate and weight decay by the kind of model; docs/defaults.md shows their results.

Values of the user or the DeepSpeed JSON take precedence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

Kind = Literal["cnn", "transformer", "pretrained", "pretrained-cnn", "adapters", "gan"]  # the first two from scratch

CNNS: tuple[Kind, ...] = ("cnn", "pretrained-cnn")
MOMENTUM = {"sgd": 0.9, "muon": 0.95}
BATCH, PARAMETERS = 16, 1.2e6  # samples per step and model size (llama-tiny) that the rates are for
# 0.01 is Adafactor's largest step, relative to the weights (Shazeer & Stern, 2018, algorithm 6)
FROM_SCRATCH = {"adamw": 1e-3, "sgd": 0.1, "muon": 0.02, "adafactor": 0.01}
RATES: Mapping[Kind, Mapping[str, float]] = {
    "cnn": FROM_SCRATCH,
    "transformer": FROM_SCRATCH,
    # 2e-5 is the lowest rate for fine-tuning BERT (Devlin et al., 2019, A.3), and usual for language models
    # 0.001 is the rate for fine-tuning T5 with Adafactor (Raffel et al., 2020, section 3.1.2)
    "pretrained": {"adamw": 2e-5, "sgd": 0.01, "muon": 0.002, "adafactor": 1e-3},
    "pretrained-cnn": {name: rate / 10 for name, rate in FROM_SCRATCH.items()},  # fine-tuning uses smaller steps
    # 2e-4 is the rate for adapters of models with 7 to 13 billion parameters (Dettmers et al., 2023, table 9)
    "adapters": {"adamw": 2e-4, "sgd": 0.1, "muon": 0.02, "adafactor": 0.01},
    "gan": {**FROM_SCRATCH, "adamw": 2e-4},  # DCGAN: Radford et al., 2016, section 4
}
SIZE_EXPONENT = -0.22  # between 6e-4 at 125 million parameters (Brown et al., 2020) and 1.5e-4 at 70 billion (Llama 3)
LARGEST_SMALL = 3.0  # smaller models get at most this times the rate for 1.2 million parameters
SGD_LINEAR_FROM, SGD_LINEAR_TO = 256, 8192  # samples
WEIGHT_DECAY = 0.01
# Loshchilov & Hutter, 2019, appendix B.1: the best decay falls with the square root of the steps. This gives the usual
# 5e-4 and 2e-4 of CIFAR-10 and ImageNet (78,000 and 450,000 steps), and was best for LeNet on digits (1,800 steps).
CNN_DECAY = 0.16


def peak_lr(kind: Kind, optimizer: str, batch: int, parameters: int) -> float:
    """Return the default peak learning rate, to two digits.

    For optimizers that normalise their step it grows with the square root of the batch (Malladi et al., 2022) between 4
    and 64 samples; above that, rates of language models hardly depend on the batch. For SGD it grows linearly above 256
    samples (Goyal et al., 2017). Adafactor's rate is relative to the weights and fixed. Models from scratch get a lower
    rate the larger they are; others have a fixed rate.
    """
    rate = RATES[kind].get(optimizer, RATES[kind]["adamw"])
    if optimizer == "sgd":
        scale = min(max(batch, SGD_LINEAR_FROM), SGD_LINEAR_TO) / SGD_LINEAR_FROM
    elif kind == "gan" or optimizer == "adafactor":
        scale = 1.0
    else:
        scale = math.sqrt(min(max(batch / BATCH, 0.25), 4.0))
        if kind not in ("pretrained", "pretrained-cnn", "adapters") and optimizer != "muon":
            scale *= min((parameters / PARAMETERS) ** SIZE_EXPONENT, LARGEST_SMALL)
    return float(f"{rate * scale:.2g}")


def weight_decay(kind: Kind, optimizer: str | None, steps: int) -> float:
    """Return the default weight decay, to two digits."""
    if kind in CNNS and optimizer == "sgd":
        return min(WEIGHT_DECAY, float(f"{CNN_DECAY / math.sqrt(steps):.2g}"))
    return WEIGHT_DECAY
