"""Costs of a model, layer by layer, from which plans are computed. They are stored as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal, NamedTuple

from pydantic import TypeAdapter

from zerofit.features.checkpointing import Checkpointing
from zerofit.features.engines import Engine
from zerofit.spec.foreign import shaped
from zerofit.spec.model_facts import TILED_MLP_TYPES, Task, gives_loss, has_head, is_text

# when a step runs the trained model without gradients: before the training, or between forward and backward;
# "reentrant": as "within", and checkpointing has use_reentrant=True
Scored = Literal["never", "first", "within", "reentrant"]


class Savings(NamedTuple):
    """Fields of a run that reduce activation memory and change no result."""

    loss_chunk: int | None = None  # targets per chunk of logits
    mlp_chunk: int | None = None  # tokens per chunk of an MLP
    activation_offload: bool = False  # keep checkpointed activations in host memory

    @classmethod
    def of(cls, run: object) -> Savings:
        """Return the fields of a settled run."""
        return cls(*(getattr(run, name) for name in cls._fields))

    @property
    def flags(self) -> str:
        """The flags that set these fields; "" if no field is set."""
        words = [f"--{name.replace('_', '-')} {value}" for name, value in self._asdict().items() if value]
        return " ".join(words).replace(" True", "")

    @property
    def fields(self) -> dict[str, object]:
        """The fields that are set."""
        return {name: value for name, value in self._asdict().items() if value}


NOTHING_SAVED = Savings()
# offered if nothing fits otherwise; with these sizes matrix products are still large
OFFERED = Savings(loss_chunk=1024, mlp_chunk=4096, activation_offload=True)


def offered(task: Task, model_type: str | None) -> Savings:
    """Return the part of OFFERED that works for a model."""
    chunks = is_text(task) and not gives_loss(task) and not has_head(task)
    return OFFERED._replace(
        loss_chunk=OFFERED.loss_chunk if chunks else None,
        mlp_chunk=OFFERED.mlp_chunk if model_type in TILED_MLP_TYPES else None,
    )


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A quantity that depends on the micro batch: fixed + per_sample x micro batch."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, micro_batch: int) -> float:
        """Return the quantity for `micro_batch` samples."""
        return self.fixed + self.per_sample * micro_batch

    def __add__(self, other: Linear) -> Linear:
        return Linear(fixed=self.fixed + other.fixed, per_sample=self.per_sample + other.per_sample)


@dataclass(frozen=True, kw_only=True)
class BackwardMoment:
    """A part of a backward that ends when the gradient of a parameter is complete."""

    live: tuple[Linear, ...]  # live bytes minus the bytes before the layer's forward; the largest line counts
    end: Linear = Linear()  # live bytes at its end, with the new gradient
    parameter: int | None = None  # index in the layer's matrices + vectors


KernelKind = Literal["product", "convolution", "attention", "normalisation", "elementwise", "embedding", "copy"]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Kernels of one kind in a layer's forward or backward; matrix products of equal shapes."""

    kind: KernelKind
    dtype: str  # torch's name of the first tensor's type: "bfloat16"
    count: float  # number of launches
    moved_bytes: Linear  # read and written by all launches
    flops: Linear = Linear()  # of all launches; for causal attention without the masked half
    # product: M, N, K; convolution: M, N, K of its matrix product, per group; attention: heads of all samples, queries,
    # keys, head width; batch norm: channels (also its groups)
    shape: tuple[Linear, ...] = ()
    groups: int = 1
    causal: bool = False


class ModuleCall(NamedTuple):
    """The begin or the end of a module's forward within a layer's forward."""

    begins: bool
    places: tuple[int, ...] = ()  # of the module's own parameters in the layer's matrices + vectors + frozen + packed
    others: tuple[tuple[int, int], ...] = ()  # (layer, place) of parameters that count in another layer
    fed: bool = True  # whether its input has a gradient

    @property
    def turned(self) -> ModuleCall:
        """The corresponding call in the backward."""
        return self._replace(begins=not self.begins)


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Costs of one layer on one rank, in one setting (see `setting`).

    Bytes are on the device. Live bytes do not include parameters and their gradients.
    """

    saved_bytes: Linear  # activations kept from its forward to its backward
    forward_peak_bytes: Linear  # peak of live bytes in its forward, minus the bytes before its forward
    backward_peak_bytes: Linear  # peak of live bytes in its backward, minus the bytes before its forward
    output_bytes: Linear  # the activation passed to the next layer (and the gradient passed back)
    largest_bytes: Linear = Linear()  # the largest activation of its forward
    forward_kernels: tuple[Kernel, ...] = ()
    backward_kernels: tuple[Kernel, ...] = ()  # with recomputation if it is checkpointed
    tp_allreduce_bytes: Linear = Linear()  # sent by tensor parallelism in forward (backward: as much)
    sp_alltoall_bytes: Linear = Linear()  # sent by sequence parallelism in forward (backward: as much)
    ep_alltoall_bytes: Linear = Linear()  # tokens sent to spread experts and back in forward (backward: as much)
    host_bytes: Linear = Linear()  # kept in host memory from its forward to its backward
    forward: tuple[Linear, ...] = ()  # forward_peak_bytes for any micro batch: the largest line counts
    backward: tuple[BackwardMoment, ...] = ()  # backward_peak_bytes over time, with new gradients of parameters
    matrices: tuple[int, ...] = ()  # numels on one rank if tensor or expert parallelism splits them
    vectors: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()  # indices in `matrices` of the weights of spread experts
    calls: tuple[ModuleCall, ...] = ()  # of its forward, in order
    recomputed: bool = False  # whether its backward begins with a recomputed forward

    @property
    def forward_flops(self) -> Linear:
        """FLOPs of the layer's forward."""
        return sum((kernel.flops for kernel in self.forward_kernels), Linear())


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Consecutive equal layers, in the order of the forward."""

    name: str  # "embedding", "block", "head", or the module's name
    count: int  # number of layers
    matrices: tuple[int, ...]  # numels of the trained parameters with two or more dimensions, in order
    vectors: tuple[int, ...]  # numels of trained biases and norms
    place: int = 0  # index of the first layer's first parameter in model.parameters()
    factors: int = 0  # Adafactor's numbers: one per row and column of matrices
    frozen: tuple[int, ...] = ()  # numels of frozen parameters that are not quantized
    quantized: tuple[int, ...] = ()  # numels of quantized weights
    packed: tuple[int, ...] = ()  # bytes of the quantized weights, without scales
    quantized_bytes: int = 0  # total bytes of the quantized weights, with scales
    buffers_bytes: int = 0  # includes quantized_bytes
    tied_to: str | None = None  # name of the layer whose matrix it shares (not in its own numels)


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """A model's costs at one sequence length (or image size), for all traced settings.

    `costs` maps a setting such as "bf16/checkpointing=0/tp=1/sp=1" to one LayerCost for each of `layers`. A setting
    that ends in "/ep=8" has its experts spread over 8 ranks. Profiles compare by identity, so derived values can be
    cached.
    """

    model: str
    task: Task
    seq_len: int | None
    layers: tuple[LayerRun, ...]
    costs: dict[str, tuple[LayerCost, ...]]
    zero3: dict[str, tuple[LayerCost, ...]] = field(default_factory=dict)  # costs that differ at stage 3: see `key_of`
    attention_heads: int | None = None
    kv_heads: int | None = None
    hidden_size: int | None = None
    experts: int | None = None  # per layer; None without a mixture of experts
    sample_bytes: int = 0  # of one sample with labels on the host
    model_type: str | None = None
    cnn: bool = False  # a convolutional network trained without adapters
    pipelines: bool = True  # whether a pipeline can split it
    versions: dict[str, str] = field(default_factory=dict)
    own_models: dict[Engine, Profile] = field(default_factory=dict)  # by engine, for those that have their own code
    scored: ClassVar[Scored] = "never"

    def of_engine(self, engine: Engine) -> Profile:
        """Return the profile for an engine. Some engines train this model with code of their own."""
        return self.own_models.get(engine, self)

    @property
    def parameters(self) -> int:
        """Number of parameters; tied parameters count once."""
        return self.trained + sum(layer.count * sum(layer.frozen + layer.quantized) for layer in self.layers)

    @property
    def trained(self) -> int:
        """Number of parameters with gradients and optimizer states."""
        return sum(layer.count * (sum(layer.matrices) + sum(layer.vectors)) for layer in self.layers)

    def key_of(self, key: str, zero_stage: int, samples: int = 0) -> str:
        """Return the key of the costs at a ZeRO stage and with a micro batch of `samples`."""
        if samples == 1 and f"{key}{SINGLE}" in self.costs:
            return f"{key}{SINGLE}"
        # costs at stage 3 can differ, since it builds buffers in 16 bits, and linear layers with frozen weights keep
        # their input
        return f"{key}{ZERO3}" if zero_stage == 3 and f"{key}{ZERO3}" in self.zero3 else key

    def costs_of(self, key: str) -> tuple[LayerCost, ...]:
        """Return the costs of a setting or of a key from `key_of`. Raises KeyError."""
        return self.zero3[key] if key.endswith(ZERO3) else self.costs[key]

    def as_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: object) -> Profile:
        """Return the profile from a dictionary that `as_dict` made. Raises Unreadable otherwise."""
        return shaped(value, TypeAdapter(cls))


ZERO3 = "/stage=3"  # suffix of a setting
SINGLE = "/samples=1"  # suffix of a setting: costs that no line in the micro batch gives, since parts are not copied


def setting(precision: str, checkpointing: Checkpointing, tp: int, sp: int, ep: int = 1) -> str:
    """Return the key of a setting in `Profile.costs`."""
    recomputed = checkpointing if isinstance(checkpointing, str) else int(checkpointing)
    key = f"{precision}/checkpointing={recomputed}/tp={tp}/sp={sp}"
    return f"{key}/ep={ep}" if ep > 1 else key


def expert_degree(key: str) -> int:
    """Return the expert parallel degree in the key of a setting.

    >>> expert_degree("bf16/checkpointing=0/tp=1/sp=1/ep=2/stage=3"), expert_degree("bf16/checkpointing=0/tp=1/sp=1")
    (2, 1)
    """
    return int(key.removesuffix(ZERO3).partition("/ep=")[2] or 1)
