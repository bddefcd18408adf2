"""The whole trained model out of an engine's shards, and into the run folder as a model that other tools load."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from zerofit.checkpoint.model_card import ModelInfo
from zerofit.data.tokenizer import load_transformers
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import Inputs, TextInputs
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.run_folder import Job
from zerofit.train.loop import EngineTrainer
from zerofit.train.pipeline import PipelineTrainer


def save_model(driver: EngineTrainer, job: Job, inputs: Inputs, folder: Path) -> None:
    """Write the trained model into a folder: transformers' own format, or one safetensors file for other models.

    All ranks call this; rank 0 writes, holding one whole copy of the weights in host memory.
    """
    weights = _from_stages(driver, folder) if isinstance(driver, PipelineTrainer) else _from_engine(driver)
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        source = find(job.run.model)
        weights = {name: tensor.contiguous() for name, tensor in weights.items()}
        dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
        if source.family == "transformers":
            with torch.device("meta"):
                model = build(source, inputs, dict(job.run.model_args)).to(dtype)  # config.json names the type
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


def check_replicas(driver: EngineTrainer) -> None:
    """Raise RunFailed unless every parameter has the same float64 sum on all data parallel ranks.

    They step on the same gradients, so a difference means that a collective or a device has failed them. ZeRO-3 ranks
    hold no replicas.
    """
    if driver.job.layout.zero_stage == 3:
        return
    sums = [p.detach().double().sum() for p in driver.module.parameters()]
    mine, group = torch.stack(sums), driver.engine.seq_data_parallel_group
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    if not torch.equal(least, most):
        names = [name for name, _ in driver.module.named_parameters()]
        apart = [name for name, same in zip(names, (least == most).tolist(), strict=True) if not same]
        message = f"ranks have come apart: {len(apart)} of {len(names)} parameters differ, {apart[0]} the first"
        raise RunFailed(Problem(kind="ranks-apart", message=message, hint="look at every rank's log and device"))


def _from_engine(driver: EngineTrainer) -> dict[str, Tensor]:
    """Whole weights on rank 0 (elsewhere the answer may be empty)."""
    engine, layout = driver.engine, driver.job.layout
    if layout.zero_stage == 3 or layout.tp > 1:
        weights = engine._consolidated_16bit_state_dict() or {}
        turned = engine.zenflow  # ZenFlow partitions the transposed matrices
        return {name: w.t() if turned and w.ndim == 2 else w for name, w in weights.items()}
    return {name: tensor.detach().cpu() for name, tensor in driver.module.state_dict().items()}


def _from_stages(driver: PipelineTrainer, folder: Path) -> dict[str, Tensor]:
    """Each stage's first replica leaves its part in a file that rank 0 takes up."""
    place, bounds = driver.place, driver.bounds
    part = folder.with_name(f".stage-{place.pp_rank}.safetensors")
    if place.dp_rank == 0:
        weights: dict[str, Tensor] = {}
        for layer in driver.layers[bounds[place.pp_rank] : bounds[place.pp_rank + 1]]:
            own = layer.module.state_dict()
            weights |= {layer.names[name]: own[name].detach().cpu() for name in own if name in layer.names}
        save_file({name: tensor.clone() for name, tensor in weights.items()}, part)
    dist.barrier()
    if dist.get_rank() != 0:
        return {}
    whole: dict[str, Tensor] = {}
    for stage in range(driver.job.layout.pp):
        file = folder.with_name(f".stage-{stage}.safetensors")
        whole |= load_file(file)
        file.unlink()
    return whole


def _without_shared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors keeps no aliases: tensors that share memory are copied."""
    seen: set[int] = set()
    out = {}
    for name, tensor in weights.items():
        pointer = tensor.untyped_storage().data_ptr()
        out[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return out
