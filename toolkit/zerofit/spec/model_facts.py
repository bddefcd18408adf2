"""Facts on which the configuration depends: about a model and about a machine."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

# fmt: off
Task = Literal[
    "image", "segmentation", "table", "causal-lm", "masked-lm", "gan", "seq2seq-lm", "speech", "image-text-pairs",
    "image-text", "denoising", "classify", "tag",
]
# fmt: on

IGNORE_INDEX = -100  # the label that losses ignore (torch, transformers)
DEFAULT_SEQ_LEN = 1024  # tokens per sample by default, or the model's limit if that is less


def is_text(task: str) -> bool:
    """Return whether a task's samples are tokens (not images, latents or rows of a table)."""
    return task in ("causal-lm", "masked-lm") or has_head(task) or (gives_loss(task) and task != "denoising")


def has_head(task: str) -> bool:
    """Return whether a task uses a transformers head that classifies texts or their words."""
    return task in ("classify", "tag")


def has_pairs(task: str) -> bool:
    """Return whether a sample is a text with a class, tags of its words, or a target text."""
    return has_head(task) or task == "seq2seq-lm"


def is_image(task: str) -> bool:
    """Return whether a task's models classify images, or the pixels of images."""
    return task in ("image", "segmentation")


def gives_loss(task: str) -> bool:
    """Return whether a task's models get several named tensors and return their own loss."""
    return task in ("seq2seq-lm", "speech", "image-text-pairs", "image-text", "denoising")


Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
DEFAULT_PRECISION = "on GPUs bf16, fp16 before Ampere; on CPUs fp32"


def default_precision(able: Collection[str], accelerator: str) -> Precision:
    """Return the default precision of a run. `able`: the precisions that the devices support."""
    usual: tuple[Precision, ...] = () if accelerator == "cpu" else ("bf16", "fp16")
    supported: list[Precision] = [name for name in usual if name in able]
    return supported[0] if supported else "fp32"


# transformers' names of attention kernels, of which torch has the first two, and the first FlashAttention
# fmt: off
AttentionKernel = Literal[
    "sdpa", "eager", "flex_attention", "flash_attention_1", "flash_attention_2", "flash_attention_3",
    "flash_attention_4",
]
# fmt: on
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
ELEMENT_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


# model types whose attention passes position ids to the kernel and names its kv heads, as Ulysses needs
SEQUENCE_PARALLEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
# model types that train with AutoTP as on one device (tested); AutoTP refuses GPT-2, and ViT fails in forward
TENSOR_PARALLEL_TYPES = ("bert", "llama", "mistral", "qwen2", "qwen3")
# the model types among these with a plan in transformers, which zerofit uses together with other kinds of parallelism
TENSOR_PLAN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# model types that train with AutoEP as in one process (tested)
EXPERT_TYPES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
# model types whose logits are the product of the last hidden states and one matrix, without another operation
PLAIN_HEAD_TYPES = ("deepseek_v2", "gpt2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")
# model types whose blocks have an `mlp` that maps each token by itself, without dropout
TILED_MLP_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# model types with Liger's norms, rotary embeddings, MLPs and loss (liger_kernel/transformers/monkey_patch.py, 0.8.5)
LIGER_TYPES = (
    *("falcon_h1", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "internlm2", "llama", "ministral", "mistral"),
    *("mixtral", "nemotron", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "smollm3"),
)


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """A layer in the list that a pipeline splits."""

    name: str
    parameters: int  # tied parameters count in each of their layers
    trained: int
    tied: str | None = None  # layers with the same key share all of their parameters


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Figures of one model, found by building it on the meta device (without memory)."""

    task: Task
    parameters: int  # tied parameters count once
    largest_parameter: int  # elements
    hidden_size: int  # width of the residual stream; for CNNs the square root of the largest parameter
    forward_flops: int | None  # per sample; None if they cannot be counted
    attention_heads: int | None = None
    kv_heads: int | None = None
    experts: int | None = None  # per layer; None without a mixture of experts
    expert_lists: tuple[str, ...] = ()  # classes with a list of experts, each with weights of its own
    model_type: str | None = None  # transformers' model_type
    layers: int | None = None  # number of layers that a pipeline splits; None if it cannot
    stack: tuple[LayerFacts, ...] = ()  # these layers
    own: bool = False  # the user's own model
    trained: int | None = None  # trained parameters, if some are frozen; None: all
    packed: bool = False  # a sample has several documents, which must not attend to each other
    quantized: int = 0  # quantized parameters
    quantized_bytes: int = 0  # their bytes, with scales

    @property
    def gives_logits(self) -> bool:
        """Whether zerofit computes the loss from the model's logits."""
        return self.task != "gan" and not gives_loss(self.task)

    @property
    def trained_parameters(self) -> int:
        """Number of parameters with gradients and optimizer states."""
        return self.parameters if self.trained is None else self.trained

    def weight_bytes(self, precision: str) -> int:
        """Return the bytes of all weights. The number is the same in memory and on disk."""
        return (self.parameters - self.quantized) * ELEMENT_BYTES[precision] + self.quantized_bytes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that ranks run on."""

    accelerator: str  # "cuda" or "cpu"
    devices: int  # GPUs, or a sensible number of CPU ranks
    cores: int  # physical cores this process may use
    device_name: str
    fp16: bool
    bf16: bool
    here: bool = True  # whether it is this machine, whose folders can be read

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions that the devices can compute in."""
        able: dict[Precision, bool] = {"fp32": True, "bf16": self.bf16, "fp16": self.fp16}
        return tuple(name for name, supported in able.items() if supported)


BUCKET_LIMIT = 50_000_000  # elements: enough for a link's full bandwidth, 100 MB in bf16


def bucket_elements(parameters: int) -> int:
    """Return a bucket's size in elements, for a model with so many parameters."""
    # DeepSpeed allocates the bucket in full, reduces larger parameters separately, and needs an even size
    # (runtime/zero/stage_1_and_2.py:3266, :1409, :390)
    size = min(parameters, BUCKET_LIMIT)
    return size + size % 2


def prefetch_elements(hidden_size: int) -> int:
    """Return the elements to prefetch: about one weight matrix (as in transformers)."""
    return int(0.9 * hidden_size**2)


def persistence_elements(hidden_size: int) -> int:
    """Return the largest number of elements of a parameter that stays on every rank.

    As in transformers, norms and biases are below it, and matrices above.
    """
    return 10 * hidden_size


def width(hidden_size: object, largest_parameter: int) -> int:
    """Return the residual stream's width, or else the square root of the largest parameter.

    `hidden_size` comes from a config. It may have any value if the model's class does not use it.
    """
    return hidden_size if type(hidden_size) is int and hidden_size > 0 else math.isqrt(largest_parameter)
