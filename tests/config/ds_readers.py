"""Gives each JSON named on the command line, unchanged, to DeepSpeed, the Trainer and Accelerate in one process.

    python -m tests.config.ds_readers said.json FILE...

For each file the answer has what plain DeepSpeed trained (losses, or None where a GPU is needed), and the
configuration that the Trainer and Accelerate handed to `deepspeed.initialize`. No C++ op is built for Adam or
collectives.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

STEPS, BATCH, LR = 2, 8, 1e-2
GPU_ONLY = ("zeropp", "zenflow", "superoffload")
HALF = {"bf16": {"bf16": True}, "bf16_master_weights": {"bf16": True}, "fp16": {"fp16": True}, "zeropp": {"fp16": True}}
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}


class HandedOver(Exception):
    """The configuration that a program has handed to `deepspeed.initialize`."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = json.loads(json.dumps(config))


class TorchAdam:
    """DeepSpeed's C++ Adam in torch: AdamW on tensors of the host."""

    def create_adam(self, *_: Any) -> int:
        return 0

    def destroy_adam(self, *_: Any) -> int:
        return 0

    def adam_update(self, _, step, lr, beta1, beta2, eps, decay, correct, weight, gradient, mean, square) -> int:
        assert correct
        gradient = gradient.float()
        weight.mul_(1 - lr * decay)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (square / (1 - beta2**step)).sqrt_().add_(eps)
        weight.addcdiv_(mean, size, value=-lr / (1 - beta1**step))
        return 0


def model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=4, use_cache=False, **shape))


def samples() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 64, (BATCH, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def plain_torch() -> list[float]:
    """Train in float32 without DeepSpeed, gradients clipped as all files have it."""
    whole, losses = model(), []
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LR, weight_decay=0.0)
    batch = torch.stack([sample["input_ids"] for sample in samples()])
    for _ in range(STEPS):
        loss = whole(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_deepspeed(path: str) -> list[float] | None:
    """Train with the file as `deepspeed.initialize` takes it."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.config import DeepSpeedConfig

    read = DeepSpeedConfig(path)
    assert (read.train_batch_size, read.gradient_accumulation_steps, read.gradient_clipping) == (BATCH, 1, 1.0)
    if Path(path).stem in GPU_ONLY:
        return None
    network, on_host = model(), read.zero_config.offload_optimizer is not None
    # DeepSpeed asks for its own Adam where the states are on the host
    optimizer = (DeepSpeedCPUAdam if on_host else torch.optim.AdamW)(network.parameters(), lr=LR, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=path)
    batch, losses = torch.stack([sample["input_ids"] for sample in samples()]), []
    for _ in range(STEPS):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def trainer(path: str) -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        silent = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        wanted = {"output_dir": folder, "max_steps": STEPS, **silent, **HALF.get(Path(path).stem, {})}
        Trainer(model=model(), args=TrainingArguments(deepspeed=path, **wanted), train_dataset=samples()).train()


def accelerate(path: str) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR)
    loader = torch.utils.data.DataLoader(samples(), batch_size=4)  # type: ignore[arg-type]
    Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=path)).prepare(network, optimizer, loader)


def handed_over(program: Any, path: str) -> dict[str, Any]:
    """Return what a program hands to DeepSpeed, and check that DeepSpeed takes it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    def initialize(*_: Any, config: Any = None, config_params: Any = None, **__: Any) -> None:
        raise HandedOver(config or config_params)

    try:
        with patch("deepspeed.initialize", initialize):
            program(path)
    except HandedOver as handed:
        DeepSpeedConfig(handed.config)
        return handed.config
    raise AssertionError(f"{program.__name__} did not reach DeepSpeed")


def main(answer: str, *paths: str) -> None:
    os.environ.update(ONE_RANK, MASTER_PORT=os.environ.get("MASTER_PORT", "29533"))
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import CPUAdamBuilder

    from zerofit.train.process_group import compile_no_collectives

    type(get_accelerator()).is_fp16_supported = lambda _: True  # CPUs without such instructions are slow at it
    CPUAdamBuilder.load = lambda *_, **__: TorchAdam()
    torch.set_num_threads(1)
    compile_no_collectives()
    deepspeed.init_distributed("gloo")
    found: dict[str, Any] = {"torch": plain_torch()}
    for path in sorted(paths, key=lambda path: Path(path).stem):  # zeropp_hpz last: its groups outlive its engine
        found[Path(path).stem] = {
            "trainer": handed_over(trainer, path),
            "accelerate": handed_over(accelerate, path),
            "losses": plain_deepspeed(path),
        }
        gc.freeze()  # the Trainer collects garbage at its end, and would walk through all that is imported
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
