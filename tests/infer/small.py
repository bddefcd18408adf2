"""Small trained models on the disk, and what plain torch says of them."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from tests.models.small import TEXT, TRANSFORMERS
from zerofit.checkpoint.model_folder import ModelInfo
from zerofit.data.base import Data
from zerofit.data.loader import eval_indices
from zerofit.data.opening import open_data
from zerofit.infer.evaluate import EvalSamples, evaluate, figures_of
from zerofit.infer.limits import MemoryLimits, uncounted_bytes
from zerofit.infer.placement import Placement, place
from zerofit.infer.saved_model import SavedModel, open_saved
from zerofit.infer.session import InferenceSession
from zerofit.models.build import build, forward_logits
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs, Inputs
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run

SAMPLES = 20
CPU = torch.device("cpu")
WORKING = 1 << 20  # bytes
IMAGES = ImageInputs(channels=3, size=32, classes=8)


def save(folder: Path, name: str, args: dict[str, Any] | None = None, inputs: Inputs | None = None) -> nn.Module:
    """A model with random weights and statistics, written as a run writes it; the model itself."""
    source, args = find(name), args or {}
    inputs = inputs or (IMAGES if source.task in ("image", "custom") else TEXT)
    task = "image" if source.task == "custom" else source.task
    torch.manual_seed(3)
    model = build(source, inputs, args).eval()
    for name_of, tensor in model.state_dict().items():  # away from zeros and ones, so that all of it matters
        if tensor.is_floating_point() and isinstance(inputs, ImageInputs):
            tensor.uniform_(0.5, 1.5) if "running" in name_of else tensor.add_(0.05 * torch.randn_like(tensor))
    folder.mkdir()
    if source.family == "transformers":
        model.save_pretrained(folder)
    else:
        save_file({key: tensor.clone() for key, tensor in model.state_dict().items()}, folder / "model.safetensors")
    data = f"synthetic:{inputs.classes}" if isinstance(inputs, ImageInputs) else f"synthetic:{TEXT.vocab_size}"
    run = Run(model=name, model_args=args, data=data, seq_len=TEXT.seq_len)
    ModelInfo.of_run(run, task, inputs, step=7, dtype="float32").write(folder)
    return model


def save_small(folder: Path, key: str) -> nn.Module:
    """One of tests.models.small's models of transformers."""
    return save(folder, *TRANSFORMERS[key])


def data_of(saved: SavedModel) -> Data:
    image = isinstance(saved.inputs, ImageInputs)
    run = Run(data=saved.info.data, image_size=saved.inputs.size if image else None)
    return open_data(run, saved.task, None if image else TEXT.seq_len, Reporter())


def reference(model: nn.Module, data: Data, top: int = 5) -> tuple[float, float, float]:
    """Mean cross entropy and shares of right answers over the first evaluated samples, in float64 by plain torch."""
    from zerofit.data.loader import eval_batches

    batches = list(eval_batches(data.valid, 0, 1, SAMPLES, SAMPLES))
    assert len(batches) == 1
    assert batches[0]["indices"].tolist() == eval_indices(len(data.valid), SAMPLES).tolist()
    x = batches[0]["inputs"]
    if x.is_floating_point():
        x = x.to(next(model.parameters()).dtype)
    with torch.no_grad():
        logits, _ = forward_logits(model, x)
    labels = batches[0]["labels"].reshape(-1)
    flat = logits.reshape(-1, logits.shape[-1]).double()[labels != -100]
    labels = labels[labels != -100]
    places = (flat > flat.gather(1, labels.unsqueeze(1))).sum(1)  # how many logits are larger than the label's
    loss = functional.cross_entropy(flat, labels)
    return loss.item(), (places == 0).double().mean().item(), (places < top).double().mean().item()


def session(folder: Path, share: float, scratch: Path, dtype: torch.dtype = torch.float32) -> InferenceSession:
    """The model in that folder, with memory for this share of its weights, or the least that it can do with."""
    made = InferenceSession(
        saved=open_saved(folder, trust_model_code=True),
        dtype=dtype,
        limits=MemoryLimits(memory={"cpu": 0}),
        scratch=Path(mkdtemp(dir=scratch)),
        report=Reporter(),
    )
    least = place(made.empty, made.limits, WORKING).rows[0].needed
    weights = sum(p.nbytes for p in made.empty.parameters())
    made.limits = MemoryLimits(memory={"cpu": max(least, WORKING + uncounted_bytes("cpu") + int(share * weights))})
    return made


def loaded(
    folder: Path, share: float, scratch: Path, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Placement]:
    """The model in that folder, brought where such a share lets it."""
    return session(folder, share, scratch, dtype).load(WORKING, "")


def figures(folder: Path, model: nn.Module) -> dict[str, Any]:
    """What an evaluation in several batches says, the last of them not full."""
    saved = open_saved(folder, trust_model_code=True)
    judged = figures_of(saved, model, torch.float32)
    return vars(evaluate(model, judged, data_of(saved), EvalSamples(at_once=8, limit=SAMPLES), CPU, Reporter()))
