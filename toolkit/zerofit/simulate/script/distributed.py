"""Replace torch.distributed in a script.

Nothing is sent: all ranks are assumed to have this rank's values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed._meta_registrations import create_fakework
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.ops.tracker import user_line
from zerofit.simulate.script.command import ScriptTarget
from zerofit.simulate.script.errors import not_simulated, script_fault
from zerofit.simulate.script.tracker import ScriptTracker, is_real
from zerofit.simulate.script.values import COALESCED
from zerofit.spec.hybrid_engine import HYBRID_ENGINE_FAULTS, WITHOUT_HYBRID_ENGINE, hybrid_engine_error
from zerofit.spec.memory_kinds import BUCKETS, GRADIENTS
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Hook = Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]]

_WORTH_SAYING = 1 << 20  # bytes

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced")
_rules = torch.library.Library("c10d", "IMPL")  # removes its rules when it is deleted


def process_groups(target: ScriptTarget) -> None:
    """Make process groups that send nothing, but report the device's usual backend.

    A device mesh makes the first group if the script has not. (torch.distributed.init_process_group, new_group,
    get_backend, is_nccl_available, destroy_process_group; torch.distributed.device_mesh.init_process_group)
    """
    init, new_group = c10d.init_process_group, c10d.new_group
    backend = "nccl" if target.on_gpu else "gloo"

    # DeepSpeed, Accelerate and the script may each call it
    def init_process_group(*_: object, **__: object) -> None:
        if not dist.is_initialized():
            with unset_fake_temporarily():
                init("fake", store=FakeStore(), rank=target.rank, world_size=target.world_size)

    def group(ranks: list[int] | None = None, *_: object, **__: object) -> object:
        with _disable_current_modes():
            return new_group(ranks)

    _replace("init_process_group", init_process_group)
    replace_in(device_mesh, "init_process_group", init_process_group)
    _replace("new_group", group)
    _replace("get_backend", lambda *_, **__: backend)
    _replace("is_nccl_available", lambda: True)
    # after the script has ended, `engine.partitions` still reads the groups
    _replace("destroy_process_group", lambda *_, **__: None)


def barriers() -> None:
    """Skip barriers. (torch.distributed.barrier, monitored_barrier)"""
    for name in ("barrier", "monitored_barrier"):
        _replace(name, lambda *_, **__: None)


def object_lists(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Use this rank's objects for all ranks.

    (torch.distributed.gather_object, scatter_object_list, broadcast_object_list)

    The collectives that give their result to all ranks are in `simulate.fakes.patches.object_collectives`.
    """

    def gather_object(obj: object, object_gather_list: list[object] | None = None, *_: object, **__: object) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def receives_unknown(src: int | None) -> None:
        meter.unknown_objects = f"rank {target.rank} receives objects from rank {src or 0} at {user_line()}"

    def scatter_object_list(
        scatter_object_output_list: list[object],
        scatter_object_input_list: Sequence[object] | None = None,
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        *_: object,
        **__: object,
    ) -> None:
        if scatter_object_input_list:
            scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank(group)]
        else:
            receives_unknown(src)

    def broadcast_object_list(object_list: list[object], src: int | None = None, *_: object, **__: object) -> None:
        # receivers usually pass [None]: without this check, the script would go on with None
        if src not in (None, target.rank) and None in object_list:
            receives_unknown(src)

    _replace("broadcast_object_list", broadcast_object_list)
    _replace("gather_object", gather_object)
    _replace("scatter_object_list", scatter_object_list)


def reductions(meter: ScriptTracker) -> None:
    """Record the kind of each reduction, e.g. a sum. The op does not have this information.

    All ranks are assumed to have equal values. A sum changes them; a mean or a maximum does not.
    (torch.distributed.all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, all_reduce_coalesced)
    """

    def noted(original: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        bind = inspect.signature(original).bind

        @functools.wraps(original)
        def reduce(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            meter.reduction = bind(*args, **kwargs).arguments.get("op", dist.ReduceOp.SUM)
            return original(*args, **kwargs)

        return reduce

    for name in REDUCTIONS:
        _replace(name, noted(getattr(c10d, name)))


def coalesced() -> None:
    """Let collectives of several tensors run on fakes, as other collectives do. (torch.ops.c10d)"""
    for name in COALESCED:
        # torch may add the rule in a later release, and refuses a second one
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
            _rules.impl(name, lambda *args: create_fakework(args, return_first_arg=False), "Meta")


def handles(meter: ScriptTracker) -> None:
    """Record which stream waits for a collective: the current one when `wait` is called.

    A handle's future returns the tensors of the last collective. (torch.distributed.Work.wait and get_future of the
    backend that sends nothing)
    """

    def noted(original: Callable[..., object]) -> Callable[..., object]:
        def wait(self: dist.Work, *args: object, **kwargs: object) -> object:
            meter.wait_for(self)
            return original(self, *args, **kwargs)

        return wait

    def get_future(_: object) -> torch.futures.Future[object]:
        done: torch.futures.Future[object] = torch.futures.Future()
        done.set_result(tree_map(lambda received: received(), meter.received))
        return done

    # classes of C++ and of torch's fake backend: each may have its own methods
    for kind in (c10d.Work, *c10d.Work.__subclasses__()):
        if "wait" in vars(kind):
            replace_in(kind, "wait", noted(kind.wait))
        if "get_future" in vars(kind):
            replace_in(kind, "get_future", get_future)


def fetched_parameters(meter: ScriptTracker) -> None:
    """Record the parameters that ZeRO-3's hooks gather.

    (runtime/zero/partitioned_param_coordinator.py, fetch_sub_module)
    """
    original = PartitionedParameterCoordinator.fetch_sub_module

    def fetch_sub_module(self: PartitionedParameterCoordinator, current_submodule: nn.Module, forward: bool) -> None:
        if meter.streams.issued is not None:
            meter.note_hooks(sum(hasattr(p, "ds_id") for p in current_submodule.parameters(recurse=False)))
        original(self, current_submodule, forward)

    replace_in(PartitionedParameterCoordinator, "fetch_sub_module", fetch_sub_module)


def held_parameters(meter: ScriptTracker) -> None:
    """Add a note about frozen parameters that ZeRO-3 holds until the backward pass ends.

    (update_recompute_parameters and release_backward_leftovers of runtime/zero/partitioned_param_coordinator.py)
    """
    # DeepSpeed assigns each frozen parameter that a recomputed checkpoint gathers to the module whose backward began
    # last, and releases it when this backward ends. With `use_reentrant=True`, this module is the whole model or in
    # another block, since the backward of the recomputed block has not begun.
    update = getattr(partitioned_param_coordinator, "update_recompute_parameters", None)
    if update is None:  # releases before 0.19
        return
    kind, name = PartitionedParameterCoordinator, "release_backward_leftovers"
    release = getattr(kind, name)
    held = set[Any]()  # parameters with the attributes that ZeRO-3 adds

    def assigned(sub_module: nn.Module, param: Any) -> None:
        # only reentrant checkpoints recompute in an autograd node of this name (torch/utils/checkpoint.py)
        node = torch._C._current_autograd_node()
        if node is not None and node.name() == "CheckpointFunctionBackward" and not param.ds_persist:
            held.add(param)
        update(sub_module, param)

    def released(self: PartitionedParameterCoordinator) -> None:
        size = sum(p.ds_numel * p.element_size() for p in held)
        held.clear()
        if size >= _WORTH_SAYING:
            meter.note(
                f"ZeRO-3 holds {shown_bytes(size)} of frozen weights until backward ends, since checkpoints are "
                "recomputed with use_reentrant=True; with False, it releases them after each block"
            )
        release(self)

    replace_in(partitioned_param_coordinator, "update_recompute_parameters", assigned)
    replace_in(kind, name, released)


def data_parallel(meter: ScriptTracker) -> None:
    """Reduce gradient buckets in zerofit's hook, and skip the check of the other ranks' shapes.

    The C++ reducer waits for results that do not exist here. If the script registers a hook (its own or a built-in
    one), zerofit's hook calls the script's hook.
    (torch.nn.parallel.DistributedDataParallel, torch/csrc/distributed/c10d/comm.cpp)
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
    from torch.nn.parallel import DistributedDataParallel, distributed

    original: Callable[..., None] = DistributedDataParallel.__init__
    register = DistributedDataParallel.register_comm_hook
    chosen: dict[int, tuple[object, _Hook]] = {}  # id of a model -> its hook's state, its hook

    def reduced(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        c10d.all_reduce(bucket.buffer())
        done.set_result(bucket.buffer())
        return done

    def sent(model, bucket):  # no annotations: torch compares them with types, and here they would be text
        # the reducer allocates its buckets when the model is wrapped; gradients may be views of them
        meter.tag(bucket.buffer(), GRADIENTS if model.gradient_as_bucket_view else BUCKETS)
        state, hook = chosen.get(id(model), (None, reduced))
        if isinstance(state, PowerSGDState):
            _compress(state, bucket)
        return hook(state, bucket)

    def init(self: DistributedDataParallel, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        register(self, self, sent)

    def register_comm_hook(self: DistributedDataParallel, state: object, hook: _Hook) -> None:
        self._check_comm_hook(hook)
        chosen[id(self)] = state, hook

    # the C++ hooks of this kind would wait for results, too; a plain all-reduce is what `reduced` does
    def register_builtin(self: DistributedDataParallel, kind: BuiltinCommHookType) -> None:
        if kind == BuiltinCommHookType.FP16_COMPRESS:
            chosen[id(self)] = None, cast("_Hook", fp16_compress_hook)

    replace_in(distributed, "_verify_param_shape_across_processes", lambda *_, **__: True)
    replace_in(DistributedDataParallel, "__init__", init)
    replace_in(DistributedDataParallel, "register_comm_hook", register_comm_hook)
    replace_in(DistributedDataParallel, "_register_builtin_comm_hook", register_builtin)


def _compress(state: PowerSGDState, bucket: GradBucket) -> None:
    """Let PowerSGD compress from the first step on.

    Its errors are as large as the gradients and stay allocated. A run of a few steps would end before the first
    compressed step, by default step 1,000.
    """
    state.iter = max(state.iter, state.start_powerSGD_iter)
    error = state.error_dict.get(bucket.index())
    # DDP rebuilds its buckets after the first step; PowerSGD's tensors of an old bucket have another shape
    if error is not None and error.shape != bucket.buffer().shape:
        for tensors in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            tensors.pop(bucket.index(), None)


def replicas() -> None:
    """Refuse DataParallel, which uses several GPUs in one process.

    (torch.nn.DataParallel.forward)
    """
    original: Callable[..., object] = nn.DataParallel.forward

    def forward(self: nn.DataParallel[nn.Module], *args: object, **kwargs: object) -> object:
        if len(self.device_ids) > 1:
            raise not_simulated("torch.nn.DataParallel", "use DistributedDataParallel and torchrun, or set --gpus 1")
        return original(self, *args, **kwargs)

    replace_in(nn.DataParallel, "forward", forward)


def hybrid_engine() -> None:
    """Refuse models that DeepSpeed's hybrid engine fails with. Otherwise refuse its generate().

    For the other models, DeepSpeed leaves `engine.module.generate()` to transformers, and never sets the attribute that
    `engine.generate()` needs. (deepspeed/runtime/hybrid_engine.py)
    """

    def new_inference_container(_: object, layer: nn.Module, *__: object) -> None:
        model = type(layer).__module__.split(".")[-2]  # transformers.models.llama.modeling_llama
        fault = HYBRID_ENGINE_FAULTS.get(model, "zerofit cannot simulate its inference kernels")
        raise script_fault(hybrid_engine_error(model, fault), WITHOUT_HYBRID_ENGINE)

    def generate(*_: object, **__: object) -> None:
        message = "engine.generate() fails: DeepSpeed's hybrid engine has no inference kernels for this model"
        raise script_fault(message, "call engine.module.generate()")

    replace_in(DeepSpeedHybridEngine, "new_inference_container", new_inference_container)
    replace_in(DeepSpeedHybridEngine, "generate", generate)


def resized_storages(meter: ScriptTracker) -> None:
    """Record storages that are freed and allocated again without an op.

    FSDP does this with gathered weights.

    (torch.UntypedStorage.resize_; torch/distributed/fsdp/_fully_shard/_fsdp_param.py, free_storage)
    """
    original = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> object:
        out = original(self, size)
        meter.resized(self)
        return out

    replace_in(torch.UntypedStorage, "resize_", resize)


def flat_sharding() -> None:
    """Let FSDP 1 use the GPU that scripts see: number `device_id`, or the current GPU.

    (torch.distributed.fsdp.FullyShardedDataParallel.__init__; _init_utils.py, _get_compute_device,
    _move_module_to_device)
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils

    init = FullyShardedDataParallel.__init__
    signature, move_module = inspect.signature(init), _init_utils._move_module_to_device
    compute_device: Callable[..., torch.device] = _init_utils._get_compute_device

    # FSDP would use `torch.device(0)`, whose type is the accelerator's name in C++; scripts see the type "cuda"
    def numbered(*args: object, **kwargs: object) -> None:
        bound = signature.bind(*args, **kwargs)
        device_id = bound.arguments.get("device_id")
        if isinstance(device_id, int):
            bound.arguments["device_id"] = torch.device("cuda", device_id)
        init(*bound.args, **bound.kwargs)

    def current(
        module: nn.Module, ignored: set[nn.Parameter], device_id: torch.device | None, *args: object
    ) -> torch.device:
        device = compute_device(module, ignored, None, *args)
        device = device if device.type in ("cpu", "cuda") else torch.device("cuda", device.index)
        return device if device_id in (None, device) else compute_device(module, ignored, device_id, *args)

    # FSDP moves buffers by assigning their `data`, which cannot turn a real buffer into a fake one
    def move(
        module: nn.Module,
        ignored: set[nn.Parameter],
        ignored_buffers: set[torch.Tensor],
        device: torch.device | None,
    ) -> None:
        for owner in module.modules() if device is not None else ():
            for name, buffer in owner._buffers.items():
                if buffer is not None and is_real(buffer) and buffer not in ignored_buffers:
                    owner._buffers[name] = buffer.to(device)
        move_module(module, ignored, ignored_buffers, device)

    replace_in(FullyShardedDataParallel, "__init__", numbered)
    replace_in(_init_utils, "_move_module_to_device", move)
    replace_in(_init_utils, "_get_compute_device", current)


def sharded_shapes() -> None:
    """Let DTensor compute the shapes of an op's results on fakes.

    (torch.distributed.tensor, ShardingPropagator._propagate_tensor_meta_non_cached)
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    original = cast("Callable[..., object]", ShardingPropagator._propagate_tensor_meta_non_cached)

    def propagate(self: ShardingPropagator, *args: object) -> object:
        with _disable_current_modes():  # in the script's modes, host tensors are real
            return original(self, *args)

    replace_in(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)


def _replace(name: str, value: object) -> None:
    for module in (dist, c10d):
        replace_in(module, name, value)
