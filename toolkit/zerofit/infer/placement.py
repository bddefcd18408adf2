"""Models without weights, and their placement on devices by accelerate's device map."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from accelerate import infer_auto_device_map, init_empty_weights
from torch import nn

from zerofit.infer.guards import quiet
from zerofit.infer.limits import SHARE, Device, MemoryLimits, uncounted_bytes
from zerofit.infer.saved_model import SavedModel
from zerofit.models.batch_norm import BatchNorm
from zerofit.models.build import build
from zerofit.spec.errors import DoesNotFit, Problem, models_say
from zerofit.spec.reservations import reserved_note
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Shares of the allowed memory to try: accelerate's map can need more than its limit, so the next try gets less.
SHARES = [1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """The needs of one device, in bytes."""

    device: Device
    modules: tuple[str, ...]
    weights: int  # weights that stay on the device
    layer: int = 0  # the largest layer that is copied to the device from memory or disk to run
    working: int = 0  # activations, logits, the loss, the KV cache
    allowed: int | None = None  # None: no limit

    @property
    def needed(self) -> int:
        """The total need; if layers run on the device, with a reserve for uncounted memory."""
        reserve = uncounted_bytes(self.device) if self.working or self.layer else 0
        return self.weights + self.layer + self.working + reserve

    @property
    def fits(self) -> bool:
        """Whether the total is within the limit."""
        return self.allowed is None or self.needed <= self.allowed

    def to_dict(self) -> dict[str, object]:
        """Return the figures as JSON."""
        sizes = ("weights", "layer", "working", "needed", "allowed")
        return {"device": self.device, **{f"{name}_bytes": getattr(self, name) for name in sizes}}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A device map and the memory that it needs."""

    device_map: dict[str, Device]  # module (or parameter) -> device, for accelerate
    main: Device  # main device: the first GPU, else "cpu"; layers in memory and on disk are copied to it to run
    rows: tuple[DeviceRow, ...]
    largest: str  # the largest module that is copied to the main device; "" if no module is copied

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return all(row.fits for row in self.rows)

    @property
    def gpus(self) -> list[int]:
        """The GPUs that have a part of the model."""
        return [row.device for row in self.rows if isinstance(row.device, int)]

    @property
    def execution_device(self) -> torch.device:
        """The device of inputs and outputs."""
        return torch.device("cpu" if self.main == "cpu" else f"cuda:{self.main}")


def empty_model(saved: SavedModel, dtype: torch.dtype) -> nn.Module:
    """Build the model in evaluation mode, with parameters of this type on the meta device.

    Batch norms of models that are not transformers' stay in float32. Raises UserError if the model cannot be built.
    """
    if saved.source.family == "transformers":
        with models_say("CKPT"), torch.device("meta"):
            model = build(saved.source, None, {})
        config = cast("PreTrainedModel", model).config
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False  # only training uses the router's loss
        return model.to(dtype).eval()
    assert saved.info is not None  # see open_saved
    # Buffers stay real: some of their values may be in no file.
    with models_say("CKPT"), init_empty_weights():
        model = build(saved.source, saved.inputs, dict(saved.info.model_args))
    # The kernels of batch norms support float32 parameters with inputs of lower precision.
    for module in model.modules():
        if not isinstance(module, BatchNorm):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
    return model.eval()


def block_classes(model: nn.Module) -> list[str]:
    """Return the names of the module classes that are never split over devices.

    transformers lists them for its models. For other models these are the outermost of the model's own classes that
    occur more than once (a ResNet's bottlenecks, a Transformer's layers).
    """
    no_split = getattr(model, "_no_split_modules", None)
    if no_split is not None:
        return sorted(no_split)
    counts = Counter(type(module) for module in model.modules())
    return sorted({type(module).__name__ for module in _repeated(model, counts)})


# transformers' modules use only their own weights. Other modules may use a child's weights without calling the child,
# as torch's attention does. So all weights of a block are loaded together.
def classes_loaded_together(model: nn.Module) -> list[str]:
    """Return the names of the module classes that are loaded together with their children."""
    return [] if hasattr(model, "_no_split_modules") else block_classes(model)


def _repeated(module: nn.Module, counts: Counter[type[nn.Module]]) -> Iterator[nn.Module]:
    """Yield the outermost modules with children whose class occurs more than once."""
    for child in module.children():
        container = isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if counts[type(child)] > 1 and not container and next(child.children(), None) is not None:
            yield child
        else:
            yield from _repeated(child, counts)


def main_device(limits: MemoryLimits) -> Device:
    """Return the device on which a model runs: the first allowed GPU, else the CPU."""
    return min((d for d, size in limits.memory.items() if isinstance(d, int) and size), default="cpu")


# accelerate's map counts weights only. It counts neither the largest layer, which is copied to the device that runs
# it, nor activations. So `_placed` adds these up. If they do not fit, the next try gets a smaller share of the limits.
#
# 1. GPUs until they are full, then host memory, then the disk, for shares from 100 % down
# 2. the same without GPUs
# 3. if nothing fits: the last placement, whose rows show how much memory is missing
def place(model: nn.Module, limits: MemoryLimits, working: int) -> Placement:
    """Assign weights to GPUs, then to host memory, then to the disk. Nothing is loaded.

    `working`: bytes to leave free for the model's forward. If nothing fits, the placement that was tried last is
    returned.
    """
    gpus = sorted(d for d, size in limits.memory.items() if isinstance(d, int) and size)
    if not hasattr(model, "_no_split_modules"):
        gpus = gpus[:1]  # it is not known what models other than transformers' do between their layers
    host = limits.memory.get("cpu", 0)
    placement = None
    # The second pass runs the model on the CPU alone. It is slower, but it may fit where a GPU is too small for one
    # layer.
    for used in [gpus, []] if gpus and host else [gpus]:
        for share in SHARES:
            memory: dict[Device, int] = {
                gpu: int(share * (limits.memory[gpu] - working - uncounted_bytes(gpu))) for gpu in used
            }
            # If layers run on a GPU, the host only stores weights.
            memory["cpu"] = int(share * (host if used else host - working - uncounted_bytes("cpu")))
            device_map = _infer(model, memory)
            if device_map is None or (used and not any(isinstance(device, int) for device in device_map.values())):
                continue
            placement = _placed(model, device_map, limits, working)
            if placement.fits:
                return placement
    return placement or _placed(model, {"": gpus[0]}, limits, working)


def _infer(model: nn.Module, memory: dict[Device, int]) -> dict[str, Device] | None:
    """Return accelerate's device map, completed; None if accelerate fails."""
    if not any(size > 0 for size in memory.values()):
        return {"": "disk"}
    limits: dict[int | str, int | str] = {device: max(0, size) for device, size in memory.items()}
    try:
        with quiet():  # accelerate warns of devices that a plan names, and of buffers; buffers are counted here
            inferred = infer_auto_device_map(
                model, max_memory=limits, no_split_module_classes=block_classes(model), fallback_allocation=True
            )
    except IndexError:  # accelerate 1.15 raises it for some sizes of models with tied parameters
        return None
    # If accelerate splits a module, its map may lack the module's direct parameters and buffers, or list them one by
    # one. But dispatch_model loads only complete modules, so these tensors are assigned to the device that runs it.
    device_map = cast(dict[str, Device], inferred)  # devices in `memory`, and the disk
    main = next((d for d in device_map.values() if isinstance(d, int)), "cpu")
    unmapped = [name for name in model.state_dict() if device_of(name, device_map) is None]
    modules = {name for name, _ in model.named_modules()}
    single = [name for name in device_map if name not in modules]
    return {**device_map, **dict.fromkeys([*unmapped, *single], main)}


def _placed(model: nn.Module, device_map: dict[str, Device], limits: MemoryLimits, working: int) -> Placement:
    """Return the placement of a device map, with the memory that each device needs."""
    gpus = sorted({d for d in device_map.values() if isinstance(d, int)})
    main: Device = gpus[0] if gpus else "cpu"
    weights: dict[Device, int] = dict.fromkeys(device_map.values(), 0) | {main: 0}
    for name, tensor in model.named_parameters():
        device = device_of(name, device_map)
        assert device is not None, name  # the map covers all parameters
        weights[device] += tensor.nbytes
    for name, tensor in model.named_buffers():
        device = device_of(name, device_map) or main
        # accelerate moves a buffer to the device that runs its module and leaves it there.
        weights[device if isinstance(device, int) else main] += tensor.nbytes  # not offloaded
    layer, largest = _largest_layer(model, device_map, main)
    rows = []
    for device in [*gpus, *(d for d in ("cpu", "disk") if d in weights)]:
        runs = isinstance(device, int) or device == main
        modules = tuple(name or "all" for name, on in device_map.items() if on == device)
        rows.append(
            DeviceRow(
                device=device,
                modules=modules,
                weights=weights[device],
                layer=layer if device == main else 0,
                working=working if runs else 0,
                allowed=limits.disk if device == "disk" else limits.memory.get(device, 0),
            )
        )
    return Placement(device_map=device_map, main=main, rows=tuple(rows), largest=largest)


# accelerate's hooks copy a module's weights to the main device before it runs and free them after it: one at a time.
def _largest_layer(model: nn.Module, device_map: dict[str, Device], main: Device) -> tuple[int, str]:
    """Return the bytes and the name of the largest module whose weights are copied to run it."""
    stay_on = {main} if main == "cpu" else {d for d in device_map.values() if isinstance(d, int)}
    classes = classes_loaded_together(model)
    largest = (0, "")
    for path, module in model.named_modules():
        tensors = module.named_parameters(recurse=type(module).__name__ in classes)
        names = {f"{path}.{name}" if path else name: tensor for name, tensor in tensors}
        copied = sum(t.nbytes for name, t in names.items() if device_of(name, device_map) not in stay_on)
        largest = max(largest, (copied, path))
    return largest


def device_of(name: str, device_map: dict[str, Device]) -> Device | None:
    """Return the device of a tensor: that of the longest matching entry of the map."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def refuse_misfit(placement: Placement, limits: MemoryLimits, knobs: str) -> None:
    """Raise DoesNotFit if a device has too little memory. `knobs`: flags that reduce the need."""
    for row in placement.rows:
        if row.fits:
            continue
        allowed = shown_bytes(row.allowed or 0)
        if row.device == "disk":
            message = f"{shown_bytes(row.weights)} of weights do not fit in memory; allowed on disk: {allowed}"
            hint = "allow the disk (leave disk= out of --max-memory) or more memory, or use --dtype bf16"
        else:
            parts = [f"weights {shown_bytes(row.weights)}"] if row.weights else []
            parts += [f"the largest layer ({placement.largest}) {shown_bytes(row.layer)}"] if row.layer else []
            parts.append(f"activations and logits {shown_bytes(row.working)}")
            parts.append(f"room {shown_bytes(uncounted_bytes(row.device))}")
            message = f"{row.device} needs {shown_bytes(row.needed)} ({', '.join(parts)}); allowed: {allowed}"
            flag = f"--max-memory {row.device}={-(-row.needed >> 20)}MiB"
            hint = f"{flag} or more, {knobs} or --dtype bf16"
            if not limits.named:
                message += f", {SHARE:.0%} of the free memory{reserved_note(limits.reserved.get(row.device, 0))}"
                hint = f"{knobs} or --dtype bf16; {flag} starts it anyway"
        raise DoesNotFit(Problem(kind="does-not-fit", message=message, hint=hint, where="--max-memory"))


def table_rows(placement: Placement) -> list[dict[str, str]]:
    """Return table rows: each device with its layers and the memory that it needs."""
    return [
        {
            "device": str(row.device),
            "needed": shown_bytes(row.needed),
            "allowed": "any" if row.allowed is None else shown_bytes(row.allowed),
            "modules": ", ".join(compact_names(row.modules)) or "-",
            "weights": shown_bytes(row.weights),
            "layer": shown_bytes(row.layer),
            "working": shown_bytes(row.working),
        }
        for row in placement.rows
    ]


def compact_names(names: tuple[str, ...]) -> list[str]:
    """Return names in order, with consecutive numbers merged: "model.layers.0-21"."""
    ranges: list[tuple[str, int | None, int | None]] = []  # prefix, first and last number
    for name in names:
        numbered = re.fullmatch(r"(.*\.)(\d+)", name)
        if not numbered:
            ranges.append((name, None, None))
        elif ranges and ranges[-1][0] == numbered[1] and ranges[-1][2] == int(numbered[2]) - 1:
            ranges[-1] = (numbered[1], ranges[-1][1], int(numbered[2]))
        else:
            ranges.append((numbered[1], int(numbered[2]), int(numbered[2])))
    return [
        prefix if first is None else f"{prefix}{first}" if first == last else f"{prefix}{first}-{last}"
        for prefix, first, last in ranges
    ]
