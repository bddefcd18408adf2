"""Collect facts from a script's run: its engines, batches and approximations."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from pathlib import PurePath
from typing import cast
from weakref import ref

import torch
from accelerate.state import AcceleratorState
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from zerofit.simulate.memory.categories import optimizer_chain
from zerofit.simulate.record import Note, ScriptFacts
from zerofit.simulate.script.command import ScriptTarget
from zerofit.simulate.script.edits import repeated_blocks, unwrapped
from zerofit.simulate.script.lengths import Lengths, padded_shape, token_tensors
from zerofit.simulate.script.phases import ScriptPhases, has_optimizer
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.spec.model_facts import LIGER_TYPES
from zerofit.train.probe import expert_count

_PRECISIONS: dict[torch.dtype | None, str] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class BatchShapes:
    """The shapes of a model's inputs, and the length of the longest sequence."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[int, ...]] = Counter()  # shape of the largest tensor of each micro batch
        self.longest = 0  # tokens of the longest batch; 0 if none has tokens
        self._steps_first: set[tuple[int, ...]] = set()  # (steps, samples) of inputs of layers with batch_first=False

    def note(self, args: object, kwargs: object) -> None:
        """Record the inputs of a micro batch."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if tensors:
            largest = padded_shape(max(tensors, key=lambda t: t.numel()))
            images = args[0] if isinstance(args, (list, tuple)) and args else None  # a list, for a detection model
            if isinstance(images, (list, tuple)) and all(isinstance(t, Tensor) and t.dim() == 3 for t in images):
                largest = (len(images), *largest) if images else largest
            self.seen[largest] += 1
        self.longest = max([self.longest, *(padded_shape(t)[1] for t in token_tensors(tensors))])

    def note_layer(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Record a layer's input if its shape is (steps, samples, features).

        Recurrent layers and attention without `batch_first` have inputs of this shape.
        """
        x = args[0] if args and getattr(module, "batch_first", True) is False else None
        if isinstance(x, Tensor) and x.dim() == 3:
            self._steps_first.add(tuple(x.shape[:2]))

    @property
    def micro_batch(self) -> int:
        """The number of samples in the largest micro batch; 0 before the first."""
        samples = (shape[1] if shape[:2] in self._steps_first else shape[0] for shape in self.seen if shape)
        return max(samples, default=0)


def script_facts(
    target: ScriptTarget, meter: ScriptTracker, phases: ScriptPhases, shapes: BatchShapes, lengths: Lengths, how: str
) -> ScriptFacts:
    """Return the facts about a script, except its memory. `how`: how the simulation ended."""
    allowed, allowed_by = lengths.limit() if shapes.longest else (0, "")
    # together, since `phases` releases both when a module is built
    engine, optimizers = next(filter(has_optimizer, phases.engines), None), phases.optimizers
    # a script that trains plain tensors, such as an image, calls no module
    models = [cast("nn.Module", engine.module)] if engine else phases.models or [nn.Module()]
    parameters = {id(p): p for model in models for p in model.parameters() if not is_lazy(p)}.values()
    sizes = [elements_of(p) for p in parameters]
    trained = sum(size for size, p in zip(sizes, parameters, strict=True) if p.requires_grad)
    steps = max(phases.steps.values())
    # Lightning Fabric steps the optimizer, not the engine, whose batch sizes then are placeholders (1 x 1).
    sizing = engine if engine and (engine.global_steps or not phases.steps[ref(engine)]) else None
    main = max(models, key=lambda model: sum(map(elements_of, model.parameters())))
    model = unwrapped(main)
    blocks, repeated = repeated_blocks(model)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return ScriptFacts(
        name=PurePath(target.command.script).name,
        # fully_shard gives the model a subclass of its class and of FSDPModule
        model=next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule)),
        blocks=blocks,
        block=type(repeated[0]).__name__ if repeated else "",
        checkpointing_switch=bool(getattr(model, "supports_gradient_checkpointing", False)),
        takes_liger=model_type in LIGER_TYPES and "liger_kernel" not in sys.modules,
        parameters=sum(sizes),
        trained_parameters=trained,
        largest_parameter=max(sizes, default=0),
        experts=expert_count(getattr(model, "config", None)),
        engines=len(phases.engines),
        pipeline_stages=getattr(engine, "num_stages", 1),
        trainer=lengths.has_trainer,
        accelerate=bool(AcceleratorState._shared_state),  # empty until an Accelerator is made
        zero_stage=engine.zero_optimization_stage() if engine else 0,
        sharding=f"ZeRO-{engine.zero_optimization_stage()}" if engine else _sharding(main),
        precision=_precision(engine, main, parameters, meter.autocast),
        optimizer=_optimizer(engine or next(iter(optimizers), None)),
        micro_batch=sizing.train_micro_batch_size_per_gpu() if sizing else shapes.micro_batch,
        accumulation=sizing.gradient_accumulation_steps() if sizing else max(1, phases.micro_batches // steps),
        checkpointing=any(getattr(m, "gradient_checkpointing", False) for model in models for m in model.modules()),
        shapes=tuple(sorted(shapes.seen)),
        longest_seen=shapes.longest,
        longest_allowed=allowed,
        allowed_by=allowed_by,
        ended=how,
        notes=tuple(
            Note(text=text, count=n, bound=text in meter.inexact, missing=text in meter.missing)
            for text, n in meter.notes.items()
        ),
    )


def elements_of(parameter: Tensor) -> int:
    """Return a parameter's number of elements in full, even if it is partitioned or packed."""
    packed = getattr(parameter, "quant_state", None)
    return packed.shape.numel() if packed is not None else int(getattr(parameter, "ds_numel", parameter.numel()))


def _sharding(model: nn.Module) -> str:
    kinds = {FSDPModule: "FSDP2", FullyShardedDataParallel: "FSDP", DistributedDataParallel: "DDP"}
    name = next((kinds[kind] for kind in kinds if any(isinstance(m, kind) for m in model.modules())), "")
    # the mesh of the model's part that is sharded in most ways, e.g. by FSDP and tensor parallelism
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    mesh = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    if mesh is None or not mesh.mesh_dim_names:
        return name
    dimensions = " x ".join(f"{dim} {size}" for dim, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    return f"{name} ({dimensions})" if name else dimensions


def _precision(
    engine: DeepSpeedEngine | None, model: nn.Module, parameters: Collection[Tensor], autocast: torch.dtype | None
) -> str:
    """Return the precision of the computation. If autocast decides it, " autocast" is appended."""
    if engine is not None:
        weights = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else None
        enabled = getattr(engine, "torch_autocast_enabled", lambda: True)  # if not, it disables an outer autocast
        autocast = autocast if enabled() else None
    else:
        # FSDP2 may cast gathered weights (MixedPrecisionPolicy)
        states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
        gathered = next((dtype for state in states if (dtype := state._mp_policy.param_dtype)), None)
        kinds = Counter(p.dtype for p in parameters)
        weights = gathered or (kinds.most_common(1)[0][0] if kinds else None)
    by_autocast = autocast not in (None, torch.float32, weights)  # a region in float32 is no precision of training
    return _PRECISIONS.get(autocast if by_autocast else weights, "fp32") + " autocast" * by_autocast


def _optimizer(optimizer: object) -> str:
    """Return the class of the innermost optimizer; "" for None. DeepSpeed's engine and optimizers wrap it."""
    innermost = next(optimizer_chain(optimizer), None)
    return type(innermost).__name__ if innermost is not None else ""
