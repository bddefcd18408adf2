"""Profile a model: trace each layer's costs, without allocating it and without DeepSpeed."""

from __future__ import annotations

import importlib.metadata
import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zerofit.models import checkpointing as models_checkpointing
from zerofit.models.build import empty_batch, extra_inputs, forward_logits, forward_named, output_part
from zerofit.models.catalog import ModelError, ModelSource, is_cnn
from zerofit.models.depth import of_all_layers
from zerofit.models.inputs import Inputs, NamedInputs, TextInputs, are_packed, are_padded, tensors_of
from zerofit.models.layer_drop import EveryLayer
from zerofit.models.layers import as_layers
from zerofit.models.liger import fused_linear_loss, fused_loss
from zerofit.models.sections import ModelSection, watched
from zerofit.models.titan import TitanModel
from zerofit.simulate.costs.layers import MICRO_BATCHES, ProfileRecorder, cost_of, layer_of
from zerofit.simulate.costs.traced_model import TracedModel, TraceSetting, cast_by_zero3, make_subject, without_ranks
from zerofit.simulate.fakes.kernels import as_on
from zerofit.simulate.fakes.quantized import traced_bits
from zerofit.simulate.ops.costs import scratch_on
from zerofit.spec.errors import reason_of
from zerofit.spec.model_facts import LIGER_TYPES, Task
from zerofit.spec.profile import SINGLE, ZERO3, LayerCost, LayerRun, Linear, Profile, setting
from zerofit.train import loss as train_loss
from zerofit.train.loss import head_loss, weighted_cross_entropy
from zerofit.train.probe import expert_count


# Steps of a trace:
#   1. build the model on the meta device with two of each run of equal layers, as one rank's shard (`traced_model`);
#   2. divide it into units: embedding, blocks, head;
#   3. run forward, loss and backward at two micro batches, and follow every storage (`layers.ProfileRecorder`);
#   4. turn both recordings into one line per quantity and unit, and count equal layers.
# A step in each setting (precision, checkpointing, degrees) takes a second, since no kernel runs.
def profile_model(
    source: ModelSource,
    task: Task,
    inputs: Inputs,
    args: dict[str, object],
    settings: Iterable[TraceSetting],
    device: str = "cuda",
) -> Profile:
    """Return the profile of a model: its layers, and their costs on these inputs.

    `device` is "cpu" or "cuda". Bytes are for a rank with the full model. Only a few of many equal layers are
    traced, unless the trace would then miss parameters. Raises ModelError if the model has no tensor or sequence
    parallel form. Also raises it if the model cannot run on the meta device (the message names the op).
    """
    wanted = list(dict.fromkeys(settings))
    if all(one.tp * one.ep > 1 for one in wanted):  # the full layers are needed, too
        wanted.append(wanted[0]._replace(tp=1, ep=1))
    traced = {one: _traced(source, task, inputs, args, one, device) for one in wanted}
    subject, layers, _ = next(traced[one] for one in reversed(wanted) if one.tp * one.ep == 1)
    costs = {_key(one): here for one, (_, _, here) in traced.items()}
    for one in wanted:
        if one.titan:
            costs[f"{_key(one)}{SINGLE}"] = _traced(source, task, inputs, args, one, device, (1, 1))[2]
    others = [one._replace(zero3=True) for one in wanted if _differs_at_zero3(subject.model, one)]
    zero3 = {f"{_key(one)}{ZERO3}": _traced(source, task, inputs, args, one, device)[2] for one in others}
    config = subject.config
    heads = of_all_layers(config, "num_attention_heads")
    tensors = tensors_of(inputs)
    profile = Profile(
        model=source.name,
        task=task,
        seq_len=getattr(inputs, "seq_len", None),
        layers=layers,
        costs=costs,
        zero3=zero3,
        attention_heads=heads,
        kv_heads=of_all_layers(config, "num_key_value_heads") or heads,
        hidden_size=of_all_layers(config, "hidden_size"),
        sample_bytes=sum(math.prod(one.shape) * (4 if one.ids is None else 8) for one in tensors),  # float32, int64
        experts=expert_count(config),
        model_type=getattr(config, "model_type", None),
        cnn=is_cnn(source) and not (source.partial and source.partial.lora),
        pipelines=source.family != "custom" and not are_packed(inputs) and _is_list_of_layers(subject.model),
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    )
    if profile.parameters != subject.parameters and not wanted[0].whole:  # e.g. MPNet's blocks share a position table
        return profile_model(source, task, inputs, args, [one._replace(whole=True) for one in wanted], device)
    return profile


def _key(one: TraceSetting) -> str:
    return setting(one.precision, one.checkpointing, one.tp, one.sp, one.ep)


def _traced(
    source: ModelSource,
    task: Task,
    inputs: Inputs,
    args: dict[str, object],
    one: TraceSetting,
    device: str,
    samples: tuple[int, int] = MICRO_BATCHES,
) -> tuple[TracedModel, tuple[LayerRun, ...], tuple[LayerCost, ...]]:
    """Return the model, its layers and their costs in one setting."""
    # If both `samples` are equal, costs have no slope.
    subject = make_subject(source, inputs, args, one)
    if one.zero3:
        for module, name in cast_by_zero3(subject.model):
            module._buffers[name] = module.get_buffer(name).to(one.dtype)
    bits = traced_bits(device) if source.partial and source.partial.quantization else nullcontext()
    linear = patch.object(nn.functional, "linear", zero3_linear_wrap) if one.zero3 else nullcontext()
    with as_on(device, one.sp, are_packed(inputs), are_padded(inputs)), bits, linear:
        few, more = (_run(subject, task, inputs, count, one, device) for count in samples)
        if not all(("forward", unit) in few.before for unit in range(len(subject.units))):
            # e.g. SqueezeBERT calls its blocks' forward directly, so no hook runs: the model becomes one layer
            subject = replace(subject, units=[ModelSection(name="model", start=None)])
            few, more = (_run(subject, task, inputs, count, one, device) for count in samples)
    units = [n for n, unit in enumerate(subject.units) if unit.count]
    layers = tuple(layer_of(subject, few, unit) for unit in units)
    costs = _layer_costs([cost_of(subject, (few, more), unit) for unit in range(len(subject.units))], subject)
    pairs = zip(costs, layers, strict=True)
    return subject, layers, tuple(_on_one_rank(cost, layer, subject.config, one) for cost, layer in pairs)


def _differs_at_zero3(model: nn.Module, one: TraceSetting) -> bool:
    """Return whether ZeRO-3 changes a step's memory, apart from the memory of the parameters."""
    # DeepSpeed's linear layer keeps its input even if the weight is frozen (runtime/zero/linear.py), unlike torch's
    frozen = any(not module.weight.requires_grad for module in model.modules() if isinstance(module, nn.Linear))
    return frozen or (one.precision != "fp32" and bool(cast_by_zero3(model)))


def _layer_costs(costs: list[LayerCost], subject: TracedModel) -> tuple[LayerCost, ...]:
    """Return the costs of the units that count as layers."""
    layers: list[LayerCost] = []
    for cost, after, unit in zip(costs, [*costs[1:], costs[-1]], subject.units, strict=True):
        if unit.count:
            layers.append(cost)
        elif layers:
            # If activations are in host memory, the model still keeps the first block's input. These extra bytes are
            # added to the layer before the first block.
            before, first, second = layers[-1].saved_bytes, cost.saved_bytes, after.saved_bytes
            saved = Linear(
                fixed=before.fixed + first.fixed - second.fixed,
                per_sample=before.per_sample + first.per_sample - second.per_sample,
            )
            layers[-1] = replace(layers[-1], saved_bytes=saved)
    return tuple(layers)


def _is_list_of_layers(model: nn.Module) -> bool:
    try:
        as_layers(model)
    except ModelError:
        return False
    return True


def _on_one_rank(cost: LayerCost, layer: LayerRun, config: Any, one: TraceSetting) -> LayerCost:
    out = cost.output_bytes
    if one.tp * one.ep > 1:
        cost = replace(cost, matrices=layer.matrices, vectors=layer.vectors)
    if one.tp > 1 and layer.name == "block":  # the outputs of attention and of the MLP are all-reduced
        times = 2 * one.tp if one.titan else 2  # gathered and scattered: a block's output is a part of the tokens
        sent = Linear(fixed=times * out.fixed, per_sample=times * out.per_sample)
        cost = replace(cost, tp_allreduce_bytes=sent)
    if one.sp > 1 and layer.name == "block":
        # Ulysses (Jacobs and others, 2023) sends queries and the output with all heads, keys and values with theirs:
        #   bytes = (2 * heads + 2 * kv heads) * head_dim of each token, and a tensor rank has its share of the heads
        # Fewer heads of keys than ranks are repeated first, so that each rank gets one (ulysses_sp.py:186).
        heads = config.num_attention_heads
        kv_heads = max(getattr(config, "num_key_value_heads", None) or heads, one.sp * one.tp)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size / heads
        width = head_dim * heads / config.hidden_size / one.tp  # of all heads, relative to the hidden size
        share = (2 + 2 * kv_heads / heads) * width
        sent = Linear(fixed=share * out.fixed, per_sample=share * out.per_sample)
        cost = replace(cost, sp_alltoall_bytes=sent)
    return cost


def _run(
    subject: TracedModel, task: Task, inputs: Inputs, count: int, one: TraceSetting, device: str
) -> ProfileRecorder:
    model, last = subject.model, len(subject.units) - 1
    recorder = ProfileRecorder(model, scratch_on(device))
    passing = True

    def begin(unit: int, tensors: object) -> None:
        if not passing:  # checkpointing is running a forward again
            return
        # until the next op, the caller still holds the block that has returned, and its input
        mark = recorder.mark_later if subject.units[unit].after else recorder.mark
        mark("forward", unit)
        tensor = next((t for t in tree_leaves(tensors) if isinstance(t, Tensor) and t.requires_grad), None)
        if tensor is not None:
            recorder.handed_on[unit - 1] = tensor.nbytes
            tensor.register_hook(lambda grad: recorder.mark("backward", unit - 1))

    handles = recorder.watch()
    try:
        with recorder, watched(subject.units, begin), torch.device("meta"), _stand_ins(recorder, device, one):
            handles += recorder.watch_modules()  # after the hooks that begin sections
            recorder.mark("forward", 0)
            batch, kept = _batch(inputs, count, one, device)
            loss = _loss(model, batch, inputs, task, one, recorder)
            passing = False
            del batch
            recorder.mark("backward", last)
            loss.backward()
            del kept
    except ModelError:
        raise
    except Exception as error:  # a model can raise anything
        where = f"in {recorder.last_op} of {subject.units[recorder.segments[-1].key[1]].name}"
        hint = "" if one.precision == "fp32" else f"if the model does not support {one.precision}, try --precision fp32"
        message = f"cannot be traced without data, {where}: {reason_of(error)}"
        raise ModelError("profile-trace", message, hint) from error
    finally:
        for handle in handles:
            handle.remove()
    return recorder


@contextmanager
def _stand_ins(recorder: ProfileRecorder, device: str, one: TraceSetting) -> Iterator[None]:
    """Within this context, replace what a trace cannot run.

    A chunked loss runs only two chunks. Offloaded activations count as host memory. AutoEP's layers run without other
    ranks. Liger's loss replaces torch's if the traced setting `one` has Liger's kernels.
    """
    to_host = recorder.keeping_on_host if device == "cuda" else lambda pin_memory: nullcontext()
    in_chunks = patch.object(train_loss, "chunk_starts", recorder.few_chunks)
    liger = patch.object(train_loss, "linear_cross_entropy", fused_linear_loss) if one.liger else nullcontext()
    alone = without_ranks(device, recorder.exchange)
    with in_chunks, liger, alone, patch.object(models_checkpointing, "save_on_cpu", to_host), EveryLayer():
        yield


def _batch(inputs: Inputs, count: int, one: TraceSetting, device: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the batch, and the other tensors that are alive during the entire step.

    Images arrive in float32 (train/engines.py, to_device). On the CPU, host and device are one, so both the images
    and their cast copies stay alive. torchtitan's step keeps its tokens and labels.
    """
    if isinstance(inputs, TextInputs):
        inputs = replace(inputs, seq_len=inputs.seq_len // one.sp)
    made = empty_batch(inputs, count, torch.empty)
    cast = {key: t.to(one.dtype) if t.is_floating_point() else t for key, t in made.items()}
    return cast, [t for t in made.values() if one.titan or (device == "cpu" and t.is_floating_point())]


def _loss(
    model: nn.Module, batch: dict[str, Tensor], inputs: Inputs, task: Task, one: TraceSetting, recorder: ProfileRecorder
) -> Tensor:
    if isinstance(inputs, NamedInputs):
        return forward_named(model, inputs, batch).loss
    x, labels, extra = batch["inputs"], batch["labels"], extra_inputs(inputs, batch)
    if isinstance(model, TitanModel):
        return model.loss(x, labels, recorder.few_chunks, recorder.begin_backward)
    if one.sp > 1:
        extra["position_ids"] = torch.arange(x.shape[1]).expand(len(x), -1)
    if not hasattr(model, "config") and "labels" in inspect.signature(model.forward).parameters:  # computes its loss
        out = model(input_ids=x, labels=labels) if task == "causal-lm" else model(x, labels=labels)
        return output_part(out, "loss")
    fused = one.liger and getattr(getattr(model, "config", None), "model_type", None) in LIGER_TYPES
    head = head_loss(model, one.savings.loss_chunk or (1 if fused else None), inside=True)  # Liger has its own chunks
    if head:
        with head.with_labels(labels):
            loss, aux = forward_logits(model, x, **extra)
        last = recorder.segments[-1].key[1]
        recorder.handed_on[last] = recorder.handed_on[last - 1]  # a pipeline's last stage sends the head's input
    else:
        logits, aux = forward_logits(model, x, **extra)
        logits = output_part(logits, "logits")
        recorder.handed_on[recorder.segments[-1].key[1]] = logits.nbytes
        cross_entropy = fused_loss if one.liger else weighted_cross_entropy
        loss = cross_entropy(logits, labels, 1.0, one.savings.loss_chunk)
    return loss if aux is None else loss + aux
