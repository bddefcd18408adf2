"""A user's own DeepSpeed script, as its autotuner wants it: `peer.py --model NAME ... --deepspeed_config FILE`.

It trains the model of the tuning on random samples of the same shape until the autotuner, inside the engine, ends it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import deepspeed
import torch
from torch.nn import functional

from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs, TextInputs

STEPS = 200


def main() -> None:
    asked = parse()
    tokens = asked.seq_len > 0
    inputs = TextInputs(vocab_size=asked.classes, seq_len=asked.seq_len) if tokens else image(asked)
    torch.manual_seed(0)
    model = build(find(asked.model), inputs, json.loads(asked.model_args)).train()
    parameters: Any = model.parameters()  # DeepSpeed's annotation takes a module only
    engine, *_ = deepspeed.initialize(args=asked, model=model, model_parameters=parameters)
    micro = engine.train_micro_batch_size_per_gpu()
    for _ in range(STEPS * engine.gradient_accumulation_steps()):
        if isinstance(inputs, TextInputs):
            x = torch.randint(asked.classes, (micro, asked.seq_len))
            labels = x
        else:
            x = torch.rand(micro, inputs.channels, inputs.size, inputs.size)
            labels = torch.randint(asked.classes, (micro,))
        x, labels = x.to(engine.device), labels.to(engine.device)
        output = engine(x)
        logits = getattr(output, "logits", output)
        loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        engine.backward(loss)
        engine.step()


def image(asked: argparse.Namespace) -> ImageInputs:
    channels, size, _ = map(int, asked.image.split("x"))
    return ImageInputs(channels=channels, size=size, classes=asked.classes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-args", default="{}")
    parser.add_argument("--seq-len", type=int, default=0)
    parser.add_argument("--image", default="1x8x8")
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args()


if __name__ == "__main__":
    main()
