"""Replace torch.cuda and torch.accelerator in a script: they describe the simulated device."""

from __future__ import annotations

import contextlib
from collections import Counter
from types import SimpleNamespace

import torch
import torch.cuda.nccl

from zerofit.simulate.fakes.autocast import autocast_as_cuda
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.memory.ledger import DEVICE
from zerofit.simulate.ops.streams import Streams
from zerofit.simulate.script.target import ScriptTarget
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.spec.memory_kinds import WORKSPACES

_STATE_BYTES = 16  # of a CUDA generator


class _Properties(SimpleNamespace):
    """The properties of a device, as scripts read them."""


class _Context(contextlib.ContextDecorator):
    def __init__(self, *_: object, **__: object):
        pass

    def __enter__(self) -> _Context:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def cuda_module(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Let torch.cuda describe the simulated GPU.

    Otherwise it would look for a driver. (torch.cuda.*)
    """
    cuda = torch.cuda
    memory, numbers = _memory(meter, target.device.memory_bytes), _random_states(target.gpus)
    for name, answer in {**_devices(target), **_streams(meter.streams), **memory, **numbers}.items():
        replace_in(cuda, name, answer)
    for module, answers in ((cuda.memory, memory), (cuda.random, numbers)):
        for name in answers.keys() & vars(module).keys():
            replace_in(module, name, answers[name])
    replace_in(cuda.nccl, "version", lambda: (2, 27, 3))
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
