"""Facts of a model and of the machine that deciding a configuration needs, as plain figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

# fmt: off
Task = Literal[
    "image", "segmentation", "table", "causal-lm", "masked-lm", "gan", "seq2seq-lm", "speech", "image-text-pairs",
    "image-text", "denoising", "classify", "tag",
]
# fmt: on

IGNORE_INDEX = -100  # the label that counts in no loss (torch's and transformers' own choice)
DEFAULT_SEQ_LEN = 1024  # tokens of a sample where a user names none, or what the model takes where that is less


def is_text(task: str) -> bool:
    """Return whether a task has tokens in its samples; others have images, latents or rows of a table."""
    return task in ("causal-lm", "masked-lm") or has_head(task) or (gives_loss(task) and task != "denoising")


def has_head(task: str) -> bool:
    """Return whether a task gives a text, or each word of it, one of some classes: transformers' heads for that."""
    return task in ("classify", "tag")


def has_pairs(task: str) -> bool:
    """Return whether a sample is a text and what belongs to it: a class, the words' tags, or another text."""
    return has_head(task) or task == "seq2seq-lm"


def is_image(task: str) -> bool:
    """Return whether a task's models are fed images alone, and give logits of classes for each, or for its pixels."""
    return task in ("image", "segmentation")


def gives_loss(task: str) -> bool:
    """Return whether a task's models are fed several tensors by name and have a loss of their own kind."""
    return task in ("seq2seq-lm", "speech", "image-text-pairs", "image-text", "denoising")


Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
ELEMENT_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


# model types whose attention takes position ids down to the kernel and names its kv heads, as Ulysses needs
SEQUENCE_PARALLEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
# model types that AutoTP has been seen to train like one device does; GPT-2 it refuses, ViT fails in forward
TENSOR_PARALLEL_TYPES = ("bert", "llama", "mistral", "qwen2", "qwen3")
# of these, the ones that transformers itself plans, which is what zerofit goes by beside other dimensions
TENSOR_PLAN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# model types whose experts AutoEP has been seen to spread so that they train like one process does
EXPERT_TYPES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
# model types whose logits are the last hidden states times one matrix, without anything after it
PLAIN_HEAD_TYPES = ("deepseek_v2", "gpt2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")
# model types whose blocks have an MLP that maps each token by itself and drops nothing out, under the name `mlp`
TILED_MLP_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """A layer of the list that a pipeline cuts."""

    name: str
    parameters: int  # a tied one counts in each layer that shares it
    trained: int
    tied: str | None = None  # layers with the same key share all of their parameters


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Figures of one model, taken from it on the meta device (no memory used)."""

    task: Task
    parameters: int  # tied ones counted once
    largest_parameter: int  # elements
    hidden_size: int  # width of the residual stream; for CNNs the square root of the largest parameter
    forward_flops: int | None  # of one sample; None where the ops cannot be counted
    attention_heads: int | None = None
    kv_heads: int | None = None
    experts: int | None = None  # that a layer's router chooses from; None without a mixture of experts
    model_type: str | None = None  # transformers' model_type
    layers: int | None = None  # length of the list of layers that a pipeline cuts; None where it cannot
    stack: tuple[LayerFacts, ...] = ()  # these layers, where a pipeline cuts them
    own: bool = False  # the user's own model
    trained: int | None = None  # of the parameters, where some are frozen; None: all
    packed: bool = False  # a sample holds documents that must not see each other
    quantized: int = 0  # of the parameters, how many lie in a few bits each,
    quantized_bytes: int = 0  # which take so much with their scales

    @property
    def gives_logits(self) -> bool:
        """Whether the loss is computed here, from the model's logits."""
        return self.task != "gan" and not gives_loss(self.task)

    @property
    def trained_parameters(self) -> int:
        """Parameters that have gradients and optimizer states."""
        return self.parameters if self.trained is None else self.trained

    def weight_bytes(self, precision: str) -> int:
        """Return the bytes of all weights as they are used and saved."""
        return (self.parameters - self.quantized) * ELEMENT_BYTES[precision] + self.quantized_bytes

    def checkpoint_bytes(self, precision: str) -> int:
        """Estimate a checkpoint on the disk: fp32 master weights, Adam's two moments, and the weights; of what is
        trained alone."""
        return self.trained_parameters * (12 + ELEMENT_BYTES[precision])


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that ranks run on."""

    accelerator: str  # "cuda" or "cpu"
    devices: int  # GPUs, or the number of CPU ranks that make sense
    cores: int  # physical cores this process may use
    device_name: str
    fp16: bool
    bf16: bool
    here: bool = True  # this very machine, whose folders can be looked at


BUCKET_LIMIT = 50_000_000  # elements: enough for a link's full bandwidth, 100 MB in bf16


def bucket_elements(parameters: int) -> int:
    """Return the bucket's elements: the model's, at most BUCKET_LIMIT; even.

    DeepSpeed allocates the bucket whole, reduces larger parameters by themselves, and asserts an even size
    (runtime/zero/stage_1_and_2.py:3266, :1409, :390).
    """
    size = min(parameters, BUCKET_LIMIT)
    return size + size % 2


def prefetch_elements(hidden_size: int) -> int:
    """Return elements gathered ahead: about one weight matrix (as transformers chooses it)."""
    return int(0.9 * hidden_size**2)


def persistence_elements(hidden_size: int) -> int:
    """Return the threshold that keeps norms and biases on every rank, and matrices not (as in transformers)."""
    return 10 * hidden_size


def width(hidden_size: object, largest_parameter: int) -> int:
    """Return the residual stream's width; for models without one the square root of the largest parameter.

    `hidden_size` is what a config has, and a config whose class does not use it may have anything there.
    """
    return hidden_size if type(hidden_size) is int and hidden_size > 0 else math.isqrt(largest_parameter)
