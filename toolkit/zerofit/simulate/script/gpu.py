"""Simulate a GPU for scripts. Python code uses cuda:N. torch's C++ code uses another device.

Without a GPU, a fake tensor on a CUDA device crashes in autograd (torch/csrc/autograd/engine.cpp,
hasPrimaryContext). So C++ code gets the device of `simulate.fakes.device`. Where Python code reads or names a
device, it is translated. torch.cuda and torch.accelerator describe the simulated device.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.cuda.nccl
from deepspeed.accelerator import real_accelerator
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves, tree_map_only

from zerofit.simulate.fakes import device
from zerofit.simulate.fakes.autocast import autocast_as_cuda
from zerofit.simulate.fakes.patches import PlainContext, replace_in
from zerofit.simulate.memory.ledger import DEVICE
from zerofit.simulate.ops.streams import Streams
from zerofit.simulate.script.command import ScriptTarget
from zerofit.simulate.script.tracker import SIMULATED, ScriptTracker, on_simulated
from zerofit.spec.memory_kinds import WORKSPACES

SHOWN = "cuda"
_HOSTS = ("cpu", "meta")
_STATE_BYTES = 16  # of a CUDA generator: seed and offset (torch/distributed/tensor/_random.py, _PhiloxState)


def install_gpu(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Make torch and DeepSpeed use the simulated GPU."""
    device.register(meter)
    size, local = target.device.memory_bytes, target.rank % target.gpus
    real_accelerator.set_accelerator(device.SimulatedGpu(meter, size, SHOWN, "nccl", local, target.gpus))
    for patch in (device_shown, to_device, constructors, generators):
        patch(meter, target)


def device_shown(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Show the rank's CUDA device to Python code, and translate it to the simulated device.

    (torch.Tensor.device, is_cuda, get_device, _make_wrapper_subclass; FakeTensor.device, fake_device,
    init_gpu_context)
    """
    # the device has no context, so the constructor of fakes must not initialize one
    replace_in(fake_tensor, "init_gpu_context", lambda device: None)
    original = vars(FakeTensor)["device"]
    # before torch 2.14 `fake_device` is an entry in each tensor's dictionary, not a property
    fake_device: Any = vars(FakeTensor).get("fake_device") or property(
        lambda self: vars(self)["fake_device"], lambda self, value: vars(self).update(fake_device=value)
    )
    here = torch.device(SHOWN, target.rank % target.gpus)

    def as_shown(actual: torch.device) -> torch.device:
        return here if actual.type in (device.NAME, SIMULATED.type) else actual

    # a fake with a CUDA device would reach autograd's CUDA code (see the module's docstring)
    def set_fake_device(self: FakeTensor, value: torch.device) -> None:
        fake_device.fset(self, on_simulated(value))

    def index(self: Tensor) -> int:
        return here.index if self.device.type == SHOWN else -1

    replace_in(FakeTensor, "device", property(lambda self: as_shown(original.fget(self)), original.fset))
    replace_in(FakeTensor, "fake_device", property(fake_device.fget, set_fake_device))
    wrapped = vars(torch._C.TensorBase)["device"]  # of subclasses that wrap fakes, such as DTensor
    replace_in(Tensor, "device", property(lambda self: as_shown(wrapped.__get__(self))))
    replace_in(Tensor, "is_cuda", property(lambda self: self.device.type == SHOWN))
    replace_in(Tensor, "get_device", index)
    wrap = cast("Callable[..., Tensor]", Tensor._make_wrapper_subclass)

    def wrapper(*args: object, **kwargs: object) -> Tensor:
        return wrap(*map(on_simulated, args), **{name: on_simulated(value) for name, value in kwargs.items()})

    replace_in(Tensor, "_make_wrapper_subclass", staticmethod(wrapper))


def to_device(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Translate a CUDA device to the simulated device in `.to()`, `.cuda()` and `.type()`.

    Types such as torch.cuda.FloatTensor exist only with a GPU. (torch.Tensor.to, cuda, type; torch.cuda.FloatTensor)
    """
    original = cast("Callable[..., Tensor]", Tensor.to)
    kind = cast("Callable[..., Any]", Tensor.type)  # a string or a tensor

    def translated(value: object) -> object:
        """Return the simulated device if `value` names a CUDA device; otherwise `value`."""
        device = torch.device(SHOWN, value) if isinstance(value, int) else value
        device = torch.device(value) if isinstance(value, str) else device
        if not isinstance(device, torch.device) or device.type != SHOWN:
            return value
        meter.note_gpu(device.index)
        return SIMULATED

    def to(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        if args and isinstance(args[0], FakeTensor):
            args = (args[0].fake_device, args[0].dtype, *args[1:])
        elif args and not isinstance(args[0], (torch.dtype, Tensor)):
            args = (translated(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = translated(kwargs["device"])
        return original(self, *args, **kwargs)

    def cuda(self: Tensor, device: object = None, non_blocking: bool = False, **_: object) -> Tensor:
        return original(self, SIMULATED if device is None else translated(device), non_blocking=non_blocking)

    def as_type(
        self: Tensor, dtype: str | type | torch.dtype | None = None, non_blocking: bool = False
    ) -> str | Tensor:
        if dtype is None:
            return kind(self).replace(f"torch.{device.NAME}", "torch.cuda")
        match = re.search(r"\btorch\.cuda\.(\w+)", str(dtype))  # also of a class
        if match is None:
            return kind(self, dtype, non_blocking)
        return original(self, SIMULATED, getattr(torch, match[1]).dtype, non_blocking)

    def typed(name: str) -> type:
        def new(cls: type, *args: object) -> Tensor:
            return getattr(torch, name)(*args).to(SIMULATED)

        return type(name, (), {"__new__": new, "__module__": "torch.cuda"})

    for name in (name for name in dir(torch.cuda) if name.endswith("Tensor") and hasattr(torch, name)):
        replace_in(torch.cuda, name, typed(name))
    replace_in(Tensor, "to", to)
    replace_in(Tensor, "cuda", cuda)
    replace_in(Tensor, "type", as_type)


def constructors(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Make tensors from Python numbers on the host, then copy them to the device.

    (torch.tensor, as_tensor, asarray)
    """
    from deepspeed.runtime.zero import partition_parameters

    def on_host(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: object, device: torch.types.Device = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            fakes = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, FakeTensor)]
            if fakes and isinstance(args[0], (list, tuple)):  # C++ code would read their values
                args = (tree_map_only(FakeTensor, Tensor.item, args[0]), *args[1:])
                kwargs = {"dtype": fakes[0].dtype, **kwargs}
            if pin_memory:
                return made(*args, device=device, **kwargs).pin_memory()
            # Where torch would put the tensor: torch.set_default_tensor_type sets the first, and the second comes from
            # torch.set_default_device or `with torch.device(...)`. These modes run below this function.
            default = torch._C._get_default_device()
            device = default if device is None and default != "cpu" else device
            contexts = (mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext))
            device = next((mode.device for mode in contexts), None) if device is None else device
            if device is None:
                return original(*args, **kwargs)
            if (SHOWN if isinstance(device, int) else torch.device(device).type) in _HOSTS:
                return original(*args, device=device, **kwargs)
            grad = kwargs.pop("requires_grad", False)  # the copy is a leaf
            # torch.tensor copies a tensor; as_tensor and asarray only copy it between devices or types
            if not (args and isinstance(args[0], FakeTensor)):
                moved = original(*args, device="cpu", **kwargs).to(SIMULATED)
            elif original is tensor:
                moved = args[0].detach().to(device=device, copy=True, **kwargs)
            else:
                moved = args[0].to(device=device, **kwargs)
            return moved.requires_grad_() if grad else moved

        return made

    tensor = torch.tensor
    for name in ("tensor", "as_tensor", "asarray"):
        replace_in(torch, name, on_host(getattr(torch, name)))
    partition_parameters._orig_torch_tensor = torch.tensor  # zero.Init restores this


def generators(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Use the host's random generators, since the device has none. (torch.Generator)"""
    original = torch.Generator

    # a subclass, so that isinstance() and annotations still work
    class HostGenerator(original):
        def __new__(cls, device: object = "cpu") -> object:
            return original.__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]

    replace_in(torch, "Generator", HostGenerator)


class _Properties(SimpleNamespace):
    """The properties of a device, as scripts read them."""


class _Context(PlainContext, contextlib.ContextDecorator):
    def __init__(self, *_: object, **__: object):
        pass


def cuda_module(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Let torch.cuda describe the simulated GPU.

    Otherwise it would look for a driver. (torch.cuda.*)
    """
    cuda = torch.cuda
    memory, numbers = _memory(meter, target.device.memory_bytes), _random_states(target.gpus)
    for name, answer in {**_devices(target), **_streams(meter.streams), **memory, **numbers}.items():
        replace_in(cuda, name, answer)
    # torch.cuda imports these by name, and libraries import them from both modules
    for module, answers in ((cuda.memory, memory), (cuda.random, numbers)):
        for name in answers.keys() & vars(module).keys():
            replace_in(module, name, answers[name])
    replace_in(cuda.nccl, "version", lambda: (2, 27, 3))  # scripts ask for at least 2.10, which sends bf16
    for name in ("range_push", "range_pop", "mark"):
        replace_in(cuda.nvtx, name, _nothing)
    replace_in(cuda.nvtx, "range", _Context)
    for name in ("start", "stop"):
        replace_in(cuda.profiler, name, _nothing)


def accelerator_module(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Let torch.accelerator describe the simulated GPU. (torch.accelerator)"""
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: target.gpus,
        "current_device_index": lambda: target.rank % target.gpus,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_stream": lambda *_, **__: meter.streams.current,
        **dict.fromkeys(("set_device_index", "set_device_idx"), _nothing),
        **{name: answer for name, answer in _streams(meter.streams).items() if name in ("synchronize", "set_stream")},
        **_memory(meter, target.device.memory_bytes),
    }
    replace_in(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))  # read by device meshes
    for name in answers.keys() & set(dir(torch.accelerator)):
        replace_in(torch.accelerator, name, answers[name])


def graphs(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Capture a CUDA graph by running its ops once. Their memory stays in the graph's pool.

    Replays need no memory. (torch.cuda.CUDAGraph, graph_pool_handle;
    torch.cuda._graph_annotations.maybe_stamp_capture_root)
    """
    from torch.cuda import _graph_annotations, graphs

    kept = Counter[object]()  # pool -> bytes that it keeps beyond the graphs' outputs

    class Graph:
        def __init__(self, keep_graph: bool = False):
            self._pool: object = (0, id(self))
            self._begin, self._memory = 0, list[torch.Tensor]()

        def capture_begin(self, pool: object = None, *_: object, **__: object) -> None:
            self._pool, self._begin = pool or self._pool, len(meter.ledger.events)

        def capture_end(self) -> None:
            meter.note("CUDA graph: captured op by op, with the memory that its pool keeps")
            # The ops of the capture have freed their temporaries, but torch keeps them in the graph's pool.
            used, most = 0, 0
            for index, change in meter.ledger.events[self._begin :]:
                used += change if meter.ledger.storages[index].place == DEVICE else 0
                most = max(most, used)
            more = most - used - kept[self._pool]  # graphs of one pool run one after the other
            if more > 0:
                kept[self._pool] += more
                self._memory.append(torch.empty(more, dtype=torch.uint8, device="cuda"))
                meter.tag(self._memory[-1], WORKSPACES)

        def pool(self) -> object:
            return self._pool

        def reset(self) -> None:
            kept[self._pool] -= sum(tensor.nbytes for tensor in self._memory)
            self._memory.clear()

        replay = instantiate = enable_debug_mode = debug_dump = register_generator_state = _nothing

    for module in (torch.cuda, graphs):
        replace_in(module, "CUDAGraph", Graph)
        replace_in(module, "graph_pool_handle", object)
    replace_in(_graph_annotations, "maybe_stamp_capture_root", _nothing)
    replace_in(torch._C, "_host_emptyCache", _nothing)


def autocast(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Apply CUDA's autocast rules to the simulated device. Scripts use autocast for "cuda"."""
    autocast_as_cuda("AutocastCUDA", "cuda")


def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def _devices(target: ScriptTarget) -> dict[str, object]:
    name, (major, minor) = f"NVIDIA {target.device.name}", target.device.compute_capability
    multiprocessors = target.device.multiprocessors
    properties = _Properties(
        name=name,
        total_memory=target.device.memory_bytes,
        major=major,
        minor=minor,
        multi_processor_count=multiprocessors,
        warp_size=32,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        uuid="0",
        L2_cache_size=50 << 20,
    )
    yes, no = (lambda *_, **__: True), (lambda *_, **__: False)
    return {
        **dict.fromkeys(("is_available", "is_initialized", "can_device_access_peer"), yes),
        **dict.fromkeys(("is_current_stream_capturing", "_is_in_bad_fork"), no),
        **dict.fromkeys(("set_device", "init", "_lazy_init", "ipc_collect"), _nothing),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        "is_tf32_supported": lambda: major >= 8,
        "device_count": lambda: target.gpus,
        "current_device": lambda: target.rank % target.gpus,
        "get_device_name": lambda *_, **__: name,
        "get_device_capability": lambda *_, **__: (major, minor),
        "get_device_properties": lambda *_, **__: properties,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        **dict.fromkeys(("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"), lambda *_, **__: 0),
        "list_gpu_processes": lambda *_, **__: "",
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": _nothing,
        "current_blas_handle": lambda: 0,
    }


def _streams(streams: Streams) -> dict[str, object]:
    def set_stream(stream: object) -> None:
        streams.current = stream

    return {
        **dict.fromkeys(("Stream", "ExternalStream"), streams.Stream),
        "Event": streams.Event,
        "stream": streams.using,
        **dict.fromkeys(("device", "device_of"), _Context),
        "current_stream": lambda *_, **__: streams.current,
        "default_stream": lambda *_, **__: streams.default,
        "set_stream": set_stream,
        "synchronize": streams.synchronize,
    }


def _memory(meter: ScriptTracker, total: int) -> dict[str, object]:
    """Return torch.cuda's memory functions."""
    # They read the ledger. Allocated bytes count as reserved.

    def live(*_: object, **__: object) -> int:
        return meter.live()

    def peak(*_: object, **__: object) -> int:
        return meter.ledger.highest

    def reset(*_: object, **__: object) -> None:
        meter.ledger.highest = meter.live()

    def stats(*_: object, **__: object) -> dict[str, int]:
        figures = {"current": meter.live(), "peak": peak()}
        kinds = ("allocated", "reserved", "active", "requested")
        rows = {f"{kind}_bytes.all.{what}": n for kind in kinds for what, n in figures.items()}
        return {**rows, "num_alloc_retries": 0, "num_ooms": 0}

    return {
        **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), live),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), peak),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), reset),
        **dict.fromkeys(("reset_accumulated_memory_stats", "set_per_process_memory_fraction"), _nothing),
        **dict.fromkeys(("_record_memory_history", "_dump_snapshot"), _nothing),
        **dict.fromkeys(("memory_snapshot", "_snapshot"), lambda *_, **__: []),
        "device_memory_used": live,
        "get_per_process_memory_fraction": lambda *_, **__: 1.0,
        "memory_stats": stats,
        "mem_get_info": lambda *_, **__: (max(0, total - meter.live()), total),
        "memory_summary": lambda *_, **__: "",
        "empty_cache": meter.ledger.empty_cache,
    }


def _random_states(gpus: int) -> dict[str, object]:
    def state(*_: object, **__: object) -> torch.Tensor:
        return torch.zeros(_STATE_BYTES, dtype=torch.uint8)

    return {
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), _nothing),
        **dict.fromkeys(("set_rng_state", "set_rng_state_all"), _nothing),
        "initial_seed": lambda: 0,
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state() for _ in range(gpus)],
    }
