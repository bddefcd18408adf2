"""Costs of a model, layer by layer: the figures that a plan is made from, stored as plain JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from zerofit.spec.foreign import shaped
from zerofit.spec.model_facts import TILED_MLP_TYPES, Task, gives_loss, has_head, is_text


class Savings(NamedTuple):
    """What holds fewer activations beside checkpointing, and gives the same result; fields of a run."""

    loss_chunk: int | None = None  # targets whose logits exist at a time
    mlp_chunk: int | None = None  # tokens of a sequence that an MLP takes at a time
    activation_offload: bool = False  # what checkpointing keeps lies in host memory

    @classmethod
    def of(cls, run: Any) -> Savings:
        """Return what a settled run has."""
        return cls(*(getattr(run, name) for name in cls._fields))

    @property
    def flags(self) -> str:
        """The flags of a run that ask for this; "" for nothing."""
        words = [f"--{name.replace('_', '-')} {value}" for name, value in self._asdict().items() if value]
        return " ".join(words).replace(" True", "")

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a run that ask for this, without those that do not."""
        return {name: value for name, value in self._asdict().items() if value}


NOTHING_SAVED = Savings()
# what is offered where nothing fits without: sizes at which products are still large
OFFERED = Savings(loss_chunk=1024, mlp_chunk=4096, activation_offload=True)


def offered(task: Task, model_type: str | None) -> Savings:
    """Return what OFFERED has for such a model."""
    chunks = is_text(task) and not gives_loss(task) and not has_head(task)
    return OFFERED._replace(
        loss_chunk=OFFERED.loss_chunk if chunks else None,
        mlp_chunk=OFFERED.mlp_chunk if model_type in TILED_MLP_TYPES else None,
    )


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A quantity that grows with the micro batch: fixed + per_sample x micro batch."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, micro_batch: int) -> float:
        """Return the quantity for this many samples."""
        return self.fixed + self.per_sample * micro_batch


@dataclass(frozen=True, kw_only=True)
class BackwardMoment:
    """A stretch of a backward: what is alive in it, and the parameter whose gradient is complete at its end."""

    live: tuple[Linear, ...]  # the largest of them holds; bytes above what was alive before the layer's forward
    end: Linear = Linear()  # alive at its end, the fresh gradient included
    parameter: int | None = None  # its place in the layer's matrices + vectors


KernelKind = Literal["product", "convolution", "attention", "normalisation", "elementwise", "embedding", "copy"]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Kernels of one kind that one layer runs in forward or in backward; those with products have equal shapes."""

    kind: KernelKind
    dtype: str  # of its first tensor, as torch names it: "bfloat16"
    count: float  # how many of them run
    moved_bytes: Linear  # read and written by all of them
    flops: Linear = Linear()  # of all of them; of attention without what a causal mask spares
    # product: M, N, K of each; convolution: M, N, K of the product that it is, for each of its groups;
    # attention: heads of all samples, queries, keys, width of a head; batch norm: channels, which are its groups, too
    shape: tuple[Linear, ...] = ()
    groups: int = 1
    causal: bool = False


class ModuleCall(NamedTuple):
    """The begin or the end of a module's forward within a layer's."""

    begins: bool
    places: tuple[int, ...] = ()  # of the module's own parameters: in the layer's matrices + vectors + frozen + packed
    others: tuple[tuple[int, int], ...] = ()  # layers, and places in them, of those that count as another layer's
    fed: bool = True  # whether its input has a gradient

    @property
    def turned(self) -> ModuleCall:
        """What the backward has in its place."""
        return self._replace(begins=not self.begins)


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Costs of one layer of one kind on one rank, in one setting (precision, checkpointing, tensor parallel degree).

    Bytes are of the device. Live bytes leave out parameters and the gradients of parameters.
    """

    saved_bytes: Linear  # activations that stay alive from its forward to its backward
    forward_peak_bytes: Linear  # most alive during its forward, above what was alive before it
    backward_peak_bytes: Linear  # most alive during its backward, above what was alive before its forward
    output_bytes: Linear  # the activation handed to the next layer (and its gradient handed back)
    largest_bytes: Linear = Linear()  # the largest activation that its forward makes
    forward_kernels: tuple[Kernel, ...] = ()
    backward_kernels: tuple[Kernel, ...] = ()  # with recomputation, where it is checkpointed
    tp_allreduce_bytes: Linear = Linear()  # sent by tensor parallelism in forward (backward: as much)
    sp_alltoall_bytes: Linear = Linear()  # sent by sequence parallelism in forward (backward: as much)
    ep_alltoall_bytes: Linear = Linear()  # tokens sent to spread experts and back in forward (backward: as much)
    host_bytes: Linear = Linear()  # kept in host memory from its forward to its backward
    forward: tuple[Linear, ...] = ()  # forward_peak_bytes for any micro batch: the largest of them holds
    backward: tuple[BackwardMoment, ...] = ()  # backward_peak_bytes in its order; with a parameter's fresh gradient
    matrices: tuple[
        int, ...
    ] = ()  # numels on one rank where tensor or expert parallelism splits them; else the layer's own
    vectors: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()  # places in `matrices` of spread experts' weights
    calls: tuple[ModuleCall, ...] = ()  # of its forward, in their order
    recomputed: bool = False  # whether its backward begins with its forward

    @property
    def forward_flops(self) -> Linear:
        """FLOPs of its forward."""
        return _sum(kernel.flops for kernel in self.forward_kernels)

    @property
    def backward_flops(self) -> Linear:
        """FLOPs of its backward, with recomputation."""
        return _sum(kernel.flops for kernel in self.backward_kernels)


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """A run of equal layers, in the order of the forward."""

    name: str  # "embedding", "block", "head", or the module's name
    count: int  # how many of them follow each other
    matrices: tuple[int, ...]  # numels of the trained parameters with two or more dimensions, in order
    vectors: tuple[int, ...]  # numels of trained biases and norms
    place: int = 0  # of the first of them in model.parameters()
    factors: int = 0  # numbers that Adafactor keeps of them: of matrices one a row and one a column
    frozen: tuple[int, ...] = ()  # numels of parameters that are not trained, without quantised ones
    quantized: tuple[int, ...] = ()  # numbers in each weight that lies in a few bits a number;
    packed: tuple[int, ...] = ()  # bytes of each of these, without scales
    quantized_bytes: int = 0  # of all of them, with scales
    buffers_bytes: int = 0  # these bytes included
    tied_to: str | None = None  # name of the layer whose matrix it shares (its own numels leave it out)
    tp_sharded: float = 0.0  # share of its parameters that tensor parallelism splits


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """A model at one sequence length (or image size), for every setting that was traced.

    Compared by identity, so that what is derived of it can be kept.

    `costs` maps a setting, `"bf16/checkpointing=0/tp=1/sp=1"` to one LayerCost for each of `layers`;
    `/ep=8` behind it: of experts that 8 ranks share.
    """

    model: str
    task: Task
    seq_len: int | None
    layers: tuple[LayerRun, ...]
    costs: dict[str, tuple[LayerCost, ...]]
    zero3: dict[str, tuple[LayerCost, ...]] = field(default_factory=dict)  # where stage 3's differ: see `key_of`
    attention_heads: int | None = None
    kv_heads: int | None = None
    hidden_size: int | None = None
    experts: int | None = None  # that a layer's router chooses from; None without a mixture
    sample_bytes: int = 0  # of one sample and its labels, as they wait on the host
    model_type: str | None = None
    cnn: bool = False  # a convolutional network that is trained without adapters
    pipelines: bool = True  # whether a pipeline can cut it
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Elements in all, tied ones once."""
        return self.trained + sum(layer.count * sum(layer.frozen + layer.quantized) for layer in self.layers)

    @property
    def trained(self) -> int:
        """Elements that have gradients and states."""
        return sum(layer.count * (sum(layer.matrices) + sum(layer.vectors)) for layer in self.layers)

    def key_of(self, key: str, zero_stage: int) -> str:
        """Return the setting whose costs a ZeRO stage has.

        At stage 3 constructors make buffers in the lower type, and linear layers with frozen weights keep their input.
        """
        return f"{key}{ZERO3}" if zero_stage == 3 and f"{key}{ZERO3}" in self.zero3 else key

    def costs_of(self, key: str) -> tuple[LayerCost, ...]:
        """Return the costs of a setting, or of what `key_of` made of one. Raises KeyError."""
        return self.zero3[key] if key.endswith(ZERO3) else self.costs[key]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Any) -> Profile:
        """Return the profile that `as_dict` gave. Raises Unreadable for another thing."""
        return shaped(value, TypeAdapter(cls))


ZERO3 = "/stage=3"  # behind a setting


def setting(precision: str, checkpointing: bool, tp: int, sp: int, ep: int = 1) -> str:
    """Return the key of a setting in `Profile.costs`."""
    key = f"{precision}/checkpointing={int(checkpointing)}/tp={tp}/sp={sp}"
    return f"{key}/ep={ep}" if ep > 1 else key


def _sum(lines: Iterable[Linear]) -> Linear:
    pairs = [(line.fixed, line.per_sample) for line in lines]
    return Linear(fixed=sum(fixed for fixed, _ in pairs), per_sample=sum(slope for _, slope in pairs))


def _lines(entries: Iterable[dict[str, float]]) -> tuple[Linear, ...]:
    return tuple(Linear(**entry) for entry in entries)
