"""Training written with plain PyTorch in float32, one process, no code of zerofit beyond the model itself and `digits`.

What it must know of a run is public: the order of samples (numpy's Philox permutation of an epoch), the text windows,
the loss (mean cross entropy over all targets of the global batch), and AdamW without decay for vectors.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from zerofit.data.opening import open_data
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import Inputs
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run

Sample = tuple[Tensor, Tensor]


@dataclass
class Plan:
    """One run as the reference sees it."""

    model: str
    inputs: Inputs
    args: dict
    samples: Callable[[np.ndarray, range], Sample]  # inputs and labels of sample indices at global positions
    count: int  # training samples
    global_batch: int
    parts: int = 1  # batch norm sees the batch in so many parts (and routers have a loss of each),
    ranks: int = 1  # which so many ranks take in turns; each keeps running statistics of its own
    steps: int = 20
    lr: float | Callable[[int], float] = 1e-3
    weight_decay: float = 0.01
    clip: float = 1.0
    optimizer: str = "adamw"
    seed: int = 0


def train(plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of every step and the final weights."""
    losses, _, weights = follow(plan)
    return losses, weights


def follow(
    plan: Plan, change: Callable[[nn.Module], Any] = lambda model: None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The loss of every step, the gradient's norm before it is clipped, and the final weights.

    `change` may put hooks into the model.
    """
    torch.manual_seed(plan.seed)
    model = build(find(plan.model), plan.inputs, plan.args).train()
    change(model)
    optimizer = _optimizer(plan, model)
    statistics = [{name: b.clone() for name, b in model.named_buffers()} for _ in range(plan.ranks)]
    losses, norms = [], []
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr(step) if callable(plan.lr) else plan.lr
        positions = range(step * plan.global_batch, (step + 1) * plan.global_batch)
        x, labels = plan.samples(sample_order(plan, positions), positions)
        targets = int((labels != -100).sum())
        optimizer.zero_grad()
        total = 0.0
        for n, (part_x, part_labels) in enumerate(zip(x.chunk(plan.parts), labels.chunk(plan.parts), strict=True)):
            _swap(model, statistics[n % plan.ranks])
            loss = _loss_sum(model, part_x, part_labels) / targets + _router_loss(model, part_x) / plan.parts
            loss.backward()
            total += loss.item()
            _swap(model, statistics[n % plan.ranks])
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), plan.clip or float("inf")).item())
        optimizer.step()
        losses.append(total)
    for name, buffer in model.named_buffers():
        mean = torch.stack([one[name].double() for one in statistics]).mean(0)
        buffer.copy_(mean)
    return losses, norms, model.state_dict()


def _swap(model: nn.Module, kept: dict[str, Tensor]) -> None:
    """Exchange the model's buffers with those kept for another rank."""
    for name, buffer in model.named_buffers():
        now = buffer.clone()
        buffer.copy_(kept[name])
        kept[name] = now


def sample_order(plan: Plan, positions: range) -> np.ndarray:
    """Sample indices at global positions."""
    picked = []
    for position in positions:
        epoch, offset = divmod(position, plan.count)
        key = np.array([plan.seed, epoch], dtype=np.uint64)
        picked.append(np.random.Generator(np.random.Philox(key=key)).permutation(plan.count)[offset])
    return np.array(picked)


def _optimizer(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    lr = plan.lr(0) if callable(plan.lr) else plan.lr
    if plan.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    if plan.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr)
    if plan.optimizer.endswith("adamw8bit"):
        import bitsandbytes as bnb

        return bnb.optim.AdamW8bit(groups, lr=lr)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8)


def _loss_sum(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    out = model(x)
    logits = out if isinstance(out, Tensor) else out.logits
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")


def _router_loss(model: nn.Module, x: Tensor) -> Tensor | float:
    """The mean over parts of transformers' own loss for the balance of a mixture's routers."""
    coefficient = getattr(getattr(model, "config", None), "router_aux_loss_coef", 0)
    return coefficient * model(x, output_router_logits=True).aux_loss if coefficient else 0.0


def quantize_linears(model: nn.Module, kind: str) -> None:
    """Put bitsandbytes' layers in place of all linear ones but the head, as a user does before peft's."""
    import bitsandbytes as bnb

    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and name != "lm_head":
            size = (linear.in_features, linear.out_features, False)
            if kind == "nf4":
                made = bnb.nn.Linear4bit(
                    *size, compute_dtype=torch.float32, compress_statistics=False, quant_type="nf4"
                )
            else:
                made = bnb.nn.Linear8bitLt(*size, has_fp16_weights=False)
            made.load_state_dict(linear.state_dict())
            model.set_submodule(name, made.to("cpu"))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind == "nf4", kind == "int8"


def write_corpus(path: Path) -> Path:
    """Write 2,000 lines of 32 bytes, so that windows come out even."""
    words = random.Random(7)
    path.write_text("".join("".join(words.choices("abcdefgh ", k=31)) + "\n" for _ in range(2000)))
    return path


def text_windows(path: Path, seq_len: int) -> tuple[int, Callable[[np.ndarray, range], Sample]]:
    """Causal windows over the training part of one file of bytes: the lines begun in its first 95 %, and an end token.

    The file must make whole windows.
    """
    text = path.read_bytes()
    text = text[: text.index(b"\n", round(len(text) * 0.95)) + 1]
    tokens = torch.from_numpy(np.append(np.frombuffer(text, dtype=np.uint8).astype(np.int64), 256))
    assert len(text) % seq_len == 0, "the last window would be padded"

    def samples(indices: np.ndarray, positions: range) -> Sample:
        windows = torch.stack([tokens[i * seq_len : (i + 1) * seq_len + 1] for i in indices])
        return windows[:, :-1], windows[:, 1:]

    return (len(tokens) - 1) // seq_len, samples


def digits(image_size: int) -> tuple[int, Callable[[np.ndarray, range], Sample]]:
    """Digits as zerofit reads them: tests/data checks their split and scaling."""
    data = open_data(Run(data="digits", image_size=image_size), "image", None, Reporter()).train

    def samples(indices: np.ndarray, positions: range) -> Sample:
        batch = data.batch(indices, positions)
        return batch["inputs"], batch["labels"]

    return len(data), samples


def relative_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| (Euclidean norms over all weights and buffers together).

    Together, since Adam makes steps of arbitrary sign out of gradients that are zero but for rounding (a key's bias),
    so that one small tensor says nothing. One that was not trained at all would still show: 20 steps move a weight by
    about 20 x lr = 0.02, a hundred times the tolerance.
    """
    assert not set(theirs) - set(ours), f"missing: {set(theirs) - set(ours)}"
    names = [name for name, tensor in theirs.items() if tensor.is_floating_point()]
    gaps = torch.stack([(ours[n].double() - theirs[n].double()).norm() for n in names])
    return (gaps.norm() / torch.stack([theirs[n].double().norm() for n in names]).norm()).item()
