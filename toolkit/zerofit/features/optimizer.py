"""Define the entry of an optimizer: names, defaults, refusals, states and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FLOAT_BYTES = 4
# bytes moved per element in a float32 optimizer step on the device. Both scale the gradient (8) and take its norm (4).
# Adam reads it (4), and reads and writes master and two moments (12 + 12). SGD adds the decay (12), scales the
# momentum (8), adds to it (12) and updates (12), each in a separate op.
UNSTEPPED_BYTES = 12
ADAM_BYTES, SGD_BYTES = UNSTEPPED_BYTES + 28, UNSTEPPED_BYTES + 44

TORCH_PARAMS: Mapping[str, object] = {"betas": [0.9, 0.999], "eps": 1e-8}  # torch's defaults


class StateBytes(NamedTuple):
    """Bytes of an optimizer's states by place."""

    device: int
    host: int = 0  # paged memory, which the driver moves to the device page by page


@dataclass(frozen=True, kw_only=True)
class States:
    """The states of an optimizer: float32 numbers for each weight."""

    numbers: int = 2  # per weight on the device
    host_numbers: int = 2  # per weight, in DeepSpeed's optimizers for host memory
    factored: bool = False  # there is one number per row and column of a matrix, not per weight
    by_weight: bool = True  # each weight has its own numbers, so a checkpoint can be loaded into another layout
    unconvertible: str = ""  # if `by_weight` is false, the reason

    def element_bytes(self, on_host: bool) -> int:
        """Return the bytes of a weight's states."""
        return FLOAT_BYTES * (self.host_numbers if on_host else self.numbers)

    @property
    def least_bytes(self) -> int:
        """The least bytes of a weight's states; 0 if their number depends on shapes."""
        return FLOAT_BYTES * min(self.numbers, self.host_numbers) if self.by_weight else 0

    def of_tensors(self, numels: Iterable[int], gpu: bool) -> StateBytes:
        """Return the bytes of the states of tensors with these element counts, without offload.

        `gpu`: whether the training is on a GPU.
        """
        return StateBytes(self.element_bytes(on_host=not gpu) * sum(numels))


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The memory that a step allocates and moves, and its speed.

    Example: for each parameter, torch's Adam on a CPU allocates a root and a quotient. It frees the quotient only after
    it has allocated both for the next parameter. So `temporary` is 8 * numel, and `late` is 4. Parameters of 10 and
    then 20 elements need 4 * 10 + 8 * 20 = 200 bytes. With `group_at_once` they count as one: 8 * 30 = 240 bytes.
    """

    temporary: Callable[[int, bool], int]  # (elements of a tensor, on a GPU) -> bytes at the peak, without `decayed`
    late: Callable[[bool], int]  # (on a GPU) -> bytes per element that live until the next tensor's are allocated
    decayed: int = 0  # bytes per element of a copy of the gradient to which weight decay is added
    group_at_once: bool = False  # on a GPU, the step handles all tensors of a group at once
    moved_bytes: int = ADAM_BYTES  # per element, on the device
    like: Literal["adam", "sgd"] = "adam"  # the memory rate, which `zerofit calibrate` measures with this optimizer
    fused: bool = False  # in 16 bits without ZeRO, DeepSpeed keeps one flat float32 copy of a group


@dataclass(frozen=True, kw_only=True)
class LearningRates:
    """The default peak rates, and how they change with batch and model."""

    scratch: float
    pretrained: float
    adapters: float
    gan: float | None = None  # None: as from scratch
    by_batch: Literal["root", "linear", "fixed"] = "root"
    by_size: bool = True  # from scratch, larger models get lower rates


@dataclass(frozen=True, kw_only=True)
class TrainingSetting:
    """The settings that decide whether an optimizer gives the same results as on one device."""

    precision: str | None
    offload: str  # where the states are, "none" for the device
    zero_stage: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    combined: bool = False  # several kinds of parallelism, whose groups zerofit makes
    clipping: float | None = None
    elastic: bool = False  # zero_optimization.elastic_checkpoint
    part: str | None = None  # --lora, --train or --freeze
    momentum: float | None = None


class Refusal(NamedTuple):
    """The reason why an optimizer is refused, and what to do."""

    message: str
    hint: str
    where: str = "--optimizer"
    kind: str = "layout"


@dataclass(frozen=True, kw_only=True)
class JsonRule:
    """A rule of `zerofit check` for faults of a DeepSpeed JSON with this optimizer or feature."""

    code: str
    severity: Literal["error", "warning"] = "error"
    effect: Literal["stops", "changes", "ignored", "costs"] | None = None  # None: as in check/rules/README.md
    path: str
    when: str  # an expression: check/rules/README.md
    message: str
    why: str
    fix: str = "remove it"
    source: str  # file:line below deepspeed/ in 0.19.8
    ignored: bool = False  # whether DeepSpeed ignores the key
    settled: bool = False  # zerofit avoids the fault itself when it trains

    def fields(self) -> dict[str, Any]:
        """Return the fields of a rule of `zerofit check`."""
        return {name: value for name, value in vars(self).items() if name != "settled"}


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """Everything that differs between optimizers."""

    name: str  # in a run, flags and results
    json_type: str  # "optimizer.type" of a DeepSpeed JSON
    same_states: tuple[str, ...] = ()  # other JSON types, in lower case, with the same states and step
    trainer_names: tuple[str, ...] = ()  # values of `optim` of the Hugging Face Trainer
    docs: str  # description for users: its states, and where it runs

    # building
    cpu_class: str | None = None  # "module:class" that zerofit builds on a CPU; None: DeepSpeed builds it by its type
    gpu_class: str | None = None  # "module:class" that zerofit builds on a GPU
    library: str | None = None  # the package that has the classes, if not DeepSpeed or torch
    kernel: str | None = None  # DeepSpeed's op for the step
    torch_on_cpu: bool = False  # torch's Adam on CPUs, where DeepSpeed's takes minutes to compile
    device_op: str | None = None  # DeepSpeed's builder of the C++ op for steps on the device
    host_op: str | None = None  # DeepSpeed's builder of the C++ op for steps in host memory
    compiled: bool = False  # its step is compiled by Inductor
    zero_tested: bool = False  # ZeRO accepts it without zero_allow_untested_optimizer
    full_gradients: bool = False  # ZeRO-3 must reduce full gradients

    # defaults
    rates: LearningRates
    weight_decay: float = 0.01
    coupled_decay: bool = False  # weight decay through the gradient, so long runs of CNNs need less of it
    momentum: float | None = None
    clipping: float = 1.0
    clipping_why: str = ""
    auto: Mapping[str, object] = field(default_factory=lambda: TORCH_PARAMS)  # for "auto" in the JSON
    params: Mapping[str, object] = field(default_factory=dict)  # added if the JSON has no optimizer block
    params_why: str = "torch's default"

    # memory and time
    states: States = States()
    step: StepCost
    planned: bool = True  # `plan` forecasts it

    # check
    refuses: Callable[[TrainingSetting], Iterator[Refusal]] = lambda setting: iter(())
    rules: tuple[JsonRule, ...] = ()
    drops_params: bool = False  # DeepSpeed silently ignores unknown parameters
    pairs: tuple[str, ...] = ()  # parameters with two numbers, besides betas
    cycled_betas: bool = False  # the scheduler OneCycle overwrites its betas
