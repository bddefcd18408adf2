"""The trained model in the run folder, as other tools load it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from zerofit.checkpoint.model_card import ModelInfo
from zerofit.data.tokenizer import load_transformers
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import Inputs, TextInputs
from zerofit.spec.run_folder import Job
from zerofit.train.trainer import EngineTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_model(trainer: EngineTrainer, job: Job, inputs: Inputs, folder: Path, scratch: Path) -> None:
    """Write the trained model into a folder: transformers' own format, or one safetensors file for other models.

    All ranks call this; rank 0 writes, holding one whole copy of the weights in host memory. `scratch`: see
    `EngineTrainer.whole_weights`.
    """
    weights = trainer.whole_weights(scratch)
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        source = find(job.run.model)
        weights = {name: tensor.contiguous() for name, tensor in weights.items()}
        dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
        if source.family == "transformers":
            with torch.device("meta"):
                built = build(source, inputs, dict(job.run.model_args)).to(dtype)  # config.json names the type
            model = cast("PreTrainedModel", built)
            # stages of a pipeline step on copies of a tied weight, which can come apart in the last bit
            ties = model.all_tied_weights_keys
            weights |= {name: weights[first] for name, first in ties.items() if name in weights and first in weights}
            model.save_pretrained(folder, state_dict=weights)  # takes the weights out of the dictionary
            if isinstance(inputs, TextInputs) and job.run.tokenizer != "bytes":
                load_transformers(job.run.tokenizer).save_pretrained(folder)
        else:
            save_file(_without_shared(weights), folder / "model.safetensors")
        said = ModelInfo.of_run(job.run, job.facts.task, inputs, job.steps, str(dtype).removeprefix("torch."))
        said.write(folder)
    dist.barrier()


def _without_shared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors keeps no aliases: tensors that share memory are copied."""
    seen: set[int] = set()
    out = {}
    for name, tensor in weights.items():
        pointer = tensor.untyped_storage().data_ptr()
        out[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return out
