"""Run a script as one simulated rank, in a process used for nothing else."""

from __future__ import annotations

import functools
import os
import pickle
import runpy
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath

import accelerate  # noqa: F401  # its modules bind what is replaced below
import deepspeed  # noqa: F401
import torch
import torch._dynamo  # zero.Init replaces Tensor.__new__: imported later, dynamo would fail in it
import torch.distributed as dist
import transformers.integrations.deepspeed  # noqa: F401
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import _utils as pipes
from torch.distributed.tensor import Replicate
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from zerofit.simulate.engine.partitions import GradientLog
from zerofit.simulate.engine.phases import PhaseLog, phase_name
from zerofit.simulate.engine.stage_input import give_input
from zerofit.simulate.fakes.device import install
from zerofit.simulate.fakes.gpu_patches import apply_common
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.fakes.quantized import moments_of_eight_bits
from zerofit.simulate.memory.categories import tag_optimizer, tag_owned_storages, watch_gradient
from zerofit.simulate.memory.snapshot import StackLog
from zerofit.simulate.ops.costs import Scratch, scratch_on
from zerofit.simulate.ops.issued import IssuedLog
from zerofit.simulate.ops.tracker import user_line
from zerofit.simulate.record import STEPS, RankRecord, ScriptStage, SentTensors
from zerofit.simulate.script import distributed, files, gpu, host, kernels, lengths, pretrained, saved
from zerofit.simulate.script.colocated import colocated_vllm
from zerofit.simulate.script.command import ScriptTarget, rank_problems
from zerofit.simulate.script.edits import edits
from zerofit.simulate.script.errors import NotSimulated, ScriptStop, later_stage, not_simulated
from zerofit.simulate.script.evaluation import Repeats, evaluate, evaluations, gather_to_save
from zerofit.simulate.script.facts import BatchShapes, script_facts
from zerofit.simulate.script.failures import failure, no_training
from zerofit.simulate.script.fault_log import FaultLog
from zerofit.simulate.script.faults import LOST_GRADIENTS, find_faults
from zerofit.simulate.script.files import opening, processes, scratch_files
from zerofit.simulate.script.generation import generation
from zerofit.simulate.script.launchers import (
    LaunchedInside,
    launchers_inside,
    ranks_in_processes,
    set_environment,
    spawned_ranks,
)
from zerofit.simulate.script.lengths import Lengths
from zerofit.simulate.script.phases import ScriptPhases
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.memory_kinds import PARAMETERS

LEAF_HINT = (
    "if the inputs of a leaf module need no gradient, DeepSpeed also fails on real ranks: "
    "call x.requires_grad_() on these inputs, or call set_z3_leaf_modules only with modules after the first layer"
)
COPIED_HINT = (
    "deepcopy does not copy weights that zero.Init has partitioned, on real ranks either; nn.TransformerEncoder "
    "copies its layer: create each layer instead, or build the model outside of zero.Init"
)
LIMIT_S = 600.0  # a phase of the largest models that were simulated takes a minute
POLL_S = 1.0
_BUSY = 0.5  # share of a core, below which the host counts as waiting


def simulate_script_rank(
    target: ScriptTarget,
    scratch: Scratch | None = None,
    say: Callable[[str], None] = lambda text: None,
    give_up: Callable[[Problem], object] | None = None,
) -> RankRecord:
    """Run the script until it has made the target's optimizer steps. Return the rank's record.

    If a phase does not end, `give_up` is called from a thread, and must end the process. Patches torch and
    DeepSpeed for the rest of this process. Raises UserError if the script cannot be simulated, or ends without
    training.
    """
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    shown = gpu.SHOWN if target.on_gpu else "cpu"
    chosen = scratch or scratch_on("cuda" if target.on_gpu else "cpu")
    meter = ScriptTracker(shown, chosen, fakes, target.workspace_bytes)
    meter.gpus, meter.local, meter.crowded = target.gpus, target.rank % target.gpus, target.crowded
    meter.capacity_bytes = target.device.memory_bytes
    meter.stacks = StackLog() if target.stacks else None
    apply_patches(meter, target)
    gradients = GradientLog(meter)
    set_environment(target)
    shapes, lengths_seen = BatchShapes(), Lengths()
    register_module_forward_pre_hook(shapes.note_layer)
    lengths.tokenizers(lengths_seen)
    lengths.trainer_arguments(lengths_seen)
    if target.arguments:
        lengths.replaced_arguments(target.arguments)
    lengths.batches(lengths_seen, target.longest)
    if target.longest:
        lengths.largest_samples(meter)
    log, watched, edit = PhaseLog(meter), FaultLog(meter), edits(target)
    watched.watch()

    def on_batch(args: object, kwargs: object) -> None:
        shapes.note(args, kwargs)
        watched.note_batch(args, kwargs)

    def on_end(engines: list[DeepSpeedEngine]) -> None:
        # first the faults: the detectors must not see the allocations of evaluation and saving
        find_faults(watched, target, phases, lengths_seen)
        for trainer in list(lengths_seen.trainers.values()):  # a copy: weak references may end meanwhile
            evaluate(trainer, log, meter)
        gather_to_save(engines, log)

    trains = ranks_in_processes(target)

    def learn(model: nn.Module) -> None:
        trains()
        _learn(meter, lengths_seen, watched, edit, model)

    phases = ScriptPhases(log, target.steps, learn, on_batch, on_end, Repeats(meter))
    generation(meter, log)
    colocated_vllm(meter, log, target)
    evaluations(log)
    joints = StageJoints(target.received)
    if give_up is not None:
        watch_progress(meter, log, give_up)
    issued = IssuedLog()

    def on_begin(name: str, step: int) -> None:
        _tag(meter, phases)
        meter.begin(name, step)
        meter.streams.issued = issued if name in STEPS and step == target.steps - 1 else None
        say(phase_name(name, step))

    log.on_begin = on_begin
    # torch gives an op to the mode that was entered last: `meter` gets it first, and runs it on `fakes` if necessary
    with fakes, meter:
        phases.cut()
        joints.join()
        how, failed = _run(target, meter, watched)
        heavier = gradients.heavier_rank(phases.engines)
    log.end()
    _tag(meter, phases)  # states that the last step allocated; `log.on_begin` has tagged those before it
    if not phases.steps:
        raise no_training(target, how, phases, failed=failed)
    host.missing_triton(meter)
    find_faults(watched, target, phases, lengths_seen)  # of a script that ended by itself
    facts = replace(script_facts(target, meter, phases, shapes, lengths_seen, how), faults=watched.faults)
    return replace(
        meter.record(log.done, target.alloc_conf),
        script=facts,
        pipeline=joints.stage,
        issued=tuple(issued.items),
        routed=meter.routed,
        heavier_rank=heavier,
    )


def apply_patches(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Apply all patches for the rest of this process."""
    # FakeTensorMode.__enter__ does this if it finds no GPU. The patches below show it one (`avoid_device_init`).
    torch._C._ensureCUDADeviceGuardSet()
    if target.on_gpu:
        gpu.install_gpu(meter, target)
    else:
        install(False, meter, target.device.memory_bytes)
    apply_common(target.on_gpu, meter)
    if target.on_gpu:
        for answers in (gpu.cuda_module, gpu.accelerator_module, gpu.graphs, gpu.autocast):
            answers(meter, target)
        distributed.flat_sharding()
        kernels.synchronized_norms(meter)
        kernels.flash_attention_package(meter)
        kernels.newer_flash_attention(meter)
        kernels.recurrent_layers(meter)
    else:
        kernels.host_layers()
    for on_host in (host.parameters, host.parameter_data, host.tensor_values, host.compiling, host.triton_kernels):
        on_host(meter)
    kernels.sparse_gradients(meter)
    kernels.missing_shapes(meter)
    host.lazy_modules(meter, partial(_watch, meter))
    host.autocast_types(meter)
    host.lbfgs(meter)
    host.equality()
    host.higher_order_ops(meter)
    host.addresses()
    host.subclasses()
    host.parameter_types()
    host.nested_lengths()
    host.loaders()
    distributed.process_groups(target)
    distributed.barriers()
    distributed.object_lists(meter, target)
    distributed.reductions(meter)
    distributed.coalesced()
    distributed.data_parallel(meter)
    distributed.replicas()
    distributed.hybrid_engine()
    distributed.handles(meter)
    distributed.fetched_parameters(meter)
    distributed.held_parameters(meter)
    distributed.resized_storages(meter)
    distributed.sharded_shapes()
    pretrained.pretrained(meter)
    pretrained.downloaded(meter)
    pretrained.flash_attention(meter)
    launchers_inside()
    spawned_ranks(target)
    files.saving(meter)
    files.tracking()
    # last, since `replace_everywhere` only finds modules that are already imported
    scratch = scratch_files()
    processes()
    pairs = [*opening(scratch), *saved.saved_by_torch(meter, scratch), *saved.saved_by_safetensors(meter, scratch)]
    saved.replace_everywhere([*pairs, *saved.saved_checkpoints()])
    saved.saved_models()
    saved.saved_tokenizers(scratch)


def _learn(
    meter: ScriptTracker, seen: Lengths, watched: FaultLog, edit: Callable[[nn.Module], None], model: nn.Module
) -> None:
    """Record a model that trains. Must be called before its first forward."""
    # packages that only some scripts import are patched once the script has imported them
    files.saving(meter, files.OF_PACKAGES)
    if "bitsandbytes" in sys.modules:
        moments_of_eight_bits(meter.device != "cpu")
    edit(model)
    seen.learn_model(model)
    watched.learn_model(model)
    meter.learn_names(model)
    for parameter in model.parameters():
        if not is_lazy(parameter):
            _watch(meter, parameter)


def _watch(meter: ScriptTracker, parameter: Tensor) -> None:
    watch_gradient(meter.tag, parameter)
    host.gradients(meter, parameter)


def watch_progress(meter: ScriptTracker, log: PhaseLog, give_up: Callable[[Problem], object]) -> None:
    """Call `give_up` from a thread once a phase has lasted LIMIT_S seconds.

    Time for work on the script's own data, such as tokenizing, does not count, because this work will end.
    """

    def watch() -> None:
        phase, ops, cpu, spent = (log.name, log.step), meter.ops_on_fakes, time.process_time(), 0.0
        while spent < LIMIT_S:
            time.sleep(POLL_S)
            before = phase, ops, cpu
            # A script that loops until a value changes runs ops on fakes. One that waits for a process uses no CPU.
            phase, ops, cpu = (log.name, log.step), meter.ops_on_fakes, time.process_time()
            works_on_data = ops == before[1] and cpu - before[2] > _BUSY * POLL_S
            spent = 0.0 if phase != before[0] else spent if works_on_data else spent + POLL_S
        message = f"{phase_name(*phase)} did not end within {LIMIT_S / 60:.0f} minutes"
        hint = "the script may loop until a value changes, or wait for another process: remove or limit such code"
        give_up(Problem(kind="not-simulated", message=message, hint=hint, where=user_line()))

    threading.Thread(target=watch, daemon=True).start()


def _tag(meter: ScriptTracker, phases: ScriptPhases) -> None:
    for engine in phases.engines:
        tag_owned_storages(meter.tag, engine)
    for optimizer in phases.optimizers:
        tag_optimizer(meter.tag, optimizer, PARAMETERS)


def _run(target: ScriptTarget, meter: ScriptTracker, watched: FaultLog) -> tuple[str, bool]:
    """Run the script. Return how it ended, and whether it called exit() with an error code.

    Raises UserError if the script fails.
    """
    try:
        _run_as_main(target)
    except ScriptStop:
        return f"stopped after {target.steps} optimizer steps", False
    except SystemExit as error:
        return f"called exit({'' if error.code is None else error.code})", error.code not in (None, 0)
    except NotSimulated as refused:
        raise UserError(refused.problem) from None
    except LaunchedInside as launched:
        inside = launched
    except BaseException as error:  # a script can raise anything
        problem = failure(target, meter, error)
        if watched.detached and "does not require grad" in str(error):
            problem = replace(problem, hint=LOST_GRADIENTS.mend)
        # ZeRO-3 reduces the gradients of a leaf module in its full backward hook (stage3.py, reduce_leaf_module_grads).
        # If no input requires a gradient, torch calls this hook before the module's backward (utils/hooks.py,
        # BackwardHook). Autograd then adds the gradients to tensors that ZeRO-3 has already released.
        elif meter.last[0] == "aten::add_" and any(
            map(z3_leaf_module, (m for model in watched.models for m in model.modules()))
        ):
            problem = replace(problem, hint=LEAF_HINT)
        # the copy of a partitioned weight has no elements; DeepSpeed's assertions print `ds_summary` of the weight
        elif "'ds_numel': 0," in str(error):
            problem = replace(problem, hint=COPIED_HINT)
        raise UserError(problem) from error
    else:
        return "ended by itself", False
    meter.note(f"{PurePath(target.command.script).name} starts ranks itself: {inside}")
    problems = rank_problems(inside.command, target.gpus, target.nodes)
    if problems:
        raise UserError(*problems)
    target = replace(target, command=inside.command)
    set_environment(target, inside.variables)
    return _run(target, meter, watched)


def _run_as_main(target: ScriptTarget) -> None:
    command = target.command
    # launchers put it before the script's own arguments (torch/distributed/run.py, deepspeed/launcher/launch.py)
    local = (f"{command.local_rank_argument}={target.rank % target.gpus}",) if command.local_rank_argument else ()
    sys.argv = [command.script, *local, *command.arguments]
    # `python train.py` puts the script's folder first, `python -m` the current folder; runpy adds neither
    sys.path.insert(0, os.getcwd() if command.is_module else str(Path(command.script).resolve().parent))
    if command.is_module:
        runpy.run_module(command.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command.script, run_name="__main__")


class StageJoints:
    """The shapes and dtypes that this rank's pipeline stage receives and sends."""

    def __init__(self, received: SentTensors | None):
        self._received = received
        self.stage: ScriptStage | None = None  # None without a pipeline
        self._sent: pipes._StageForwardMeta | None = None  # outputs of this rank's first PipelineStage (torch)

    def join(self) -> None:
        """Give each engine and torch stage of this process its input, and record what it sends."""
        if hasattr(PipelineStage, "_warmup_forward_vote"):  # from torch 2.14 on
            self._join_torch()
        original: Callable[..., None] = PipelineEngine.__init__

        @functools.wraps(original)
        def init(engine: PipelineEngine, *args: object, **kwargs: object) -> None:
            original(engine, *args, **kwargs)
            self._join(engine)

        replace_in(PipelineEngine, "__init__", init)

    def _join(self, engine: PipelineEngine) -> None:
        """Give one engine its input, and record what it sends.

        Raises NotSimulated if its input is unknown. Shapes and dtypes are recorded when the engine sends them ahead of
        the first tensors (runtime/pipe/engine.py, `_send_tensor_meta`).
        """
        topology, send = engine.grid._topo, engine._send_tensor_meta
        stages = tuple(topology.get_coord(rank).pipe for rank in range(topology.world_size()))
        self.stage = ScriptStage(stage=engine.stage_id, stage_of_rank=stages, sends=None)

        def noted(buffer: Tensor | Sequence[Tensor], to: int) -> None:
            buffers = [buffer] if isinstance(buffer, Tensor) else buffer
            tensors = tuple((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in buffers)
            assert self.stage
            sends = SentTensors(tensors=tensors, is_tuple=not isinstance(buffer, Tensor))
            self.stage = replace(self.stage, sends=sends)
            send(buffer, to)

        vars(engine)["_send_tensor_meta"] = noted  # of this engine only, since a process may make several
        if not engine.stage_id:
            return
        if self._received is None:
            raise later_stage(engine.stage_id + 1)
        if engine.is_pipe_partitioned:
            hint = "simulate a rank of the first stage (--rank 0), or set pipeline.pipe_partitioned to false"
            raise not_simulated("a pipeline stage whose input is partitioned by values on the device", hint)
        sizes = [(shape, getattr(torch, dtype)) for shape, dtype in self._received.tensors]
        sent = sizes, self._received.is_tuple
        give_input(engine, lambda stage: sent)

    def _join_torch(self) -> None:
        """Give torch's stages their inputs.

        They exchange the shapes of inputs before the first micro batch. Gradients from the next stage have the shapes
        and dtypes of this stage's outputs. A later stage of the same rank receives the tensors that the earlier stage
        sends. (torch.distributed.pipelining.PipelineStage: _send_meta, _recv_meta, _warmup_forward_vote,
        _warmup_backward_result)
        """

        def own_vote(stage: PipelineStage, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
            if self.stage is None:
                # this rank's first stage; the ranks of a pipeline are assumed to be evenly spaced, e.g. 0, 4, 8
                ranks = dist.get_process_group_ranks(stage.group)
                distance = ranks[1] - ranks[0] if len(ranks) > 1 else 1
                of_rank = tuple(rank // distance % len(ranks) for rank in range(dist.get_world_size()))
                self.stage = ScriptStage(stage=stage.group_rank, stage_of_rank=of_rank, sends=None)
            static = not pipes.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
            vote = torch.tensor([int(static)], dtype=torch.int32, device=stage.device)
            return vote if received_acc is None else vote * received_acc

        def send_meta(stage: PipelineStage, meta: object, dst_stage: int) -> None:
            assert self.stage
            if isinstance(meta, pipes._StageForwardMeta) and self._sent is None:
                self._sent = meta
                if self.stage.stage < max(self.stage.stage_of_rank):  # otherwise to a later stage of an earlier rank
                    self.stage = replace(self.stage, sends=SentTensors(torch_meta=pickle.dumps(meta).hex()))

        def recv_meta(stage: PipelineStage, src_stage: int) -> object:
            if src_stage > stage.stage_index:
                outputs = stage._stage_meta.outputs
                assert outputs is not None
                return pipes._StageBackwardMeta(backward_metas=tuple(map(_gradient, outputs)))
            if self._sent is not None:
                return self._sent
            if self._received is None:
                raise later_stage(stage.stage_index + 1)
            return pickle.loads(bytes.fromhex(self._received.torch_meta))

        replace_in(PipelineStage, "_warmup_forward_vote", own_vote)
        replace_in(PipelineStage, "_warmup_backward_result", lambda _, received_result: received_result)
        replace_in(PipelineStage, "_send_meta", send_meta)
        replace_in(PipelineStage, "_recv_meta", recv_meta)


def _gradient(output: pipes._TensorMeta) -> pipes._TensorMeta | None:
    """Return torch's description of an output's gradient; None without a gradient."""
    if not output.requires_grad:
        return None
    if not isinstance(output, pipes._DTensorMeta):
        return replace(output, requires_grad=False)
    # a replicated DTensor's gradient may also arrive as a partial sum, which has the same size
    placements = tuple(Replicate() if placement.is_partial() else placement for placement in output.placements)
    return replace(output, requires_grad=False, placements=placements)
