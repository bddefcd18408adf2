"""Divide a model into layers of one tensor in and one tensor out, for pipeline parallelism."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from zerofit.features.checkpointing import Checkpointing
from zerofit.models.catalog import ModelError
from zerofit.models.checkpointing import checkpoint_block
from zerofit.models.quantized import elements
from zerofit.models.router_loss import Carrier, RouterLoss
from zerofit.spec.model_facts import LayerFacts

if TYPE_CHECKING:
    from torchvision.models import VGG, ResNet
    from transformers import (
        BertForMaskedLM,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        PreTrainedConfig,
        ViTForImageClassification,
    )
    from transformers.models.bert.modeling_bert import BertEmbeddings, BertLMPredictionHead


Maker = Callable[..., list["Layer"]]  # of one kind of model


@dataclass(kw_only=True)
class Layer:
    """One layer of the model's forward. It shares submodules and parameters with the model."""

    name: str
    module: nn.Module  # from the previous layer's tensor (first: token ids or pixels) to one tensor
    names: dict[str, str] = field(default_factory=dict)  # state dict key of `module` -> key in the model
    tied: str | None = None  # layers with the same key share one parameter and have no other parameters
    tied_attr: str | None = None  # path of that parameter in `module`
    block: bool = False  # one of the repeated blocks, which checkpointing recomputes


def as_layers(model: nn.Module, checkpointing: Checkpointing = False, loss: RouterLoss | None = None) -> list[Layer]:
    """Return the model as layers that compute its logits when run in order.

    The model may be on any device, also meta. The layers use its own submodules. With `checkpointing` each block
    recomputes its activations in backward. With `loss` (of a mixture's routers) the layers also return the sums from
    which this loss is computed. BERT's logits may differ in the last bit, since the layers add BERT's output bias after
    the matrix product.
    """
    layers = _maker(model)(model)
    if loss is not None:
        layers = _with_routers_sums(layers, loss)
    if checkpointing:
        for layer in layers:
            if layer.block:
                checkpoint_block(layer.module, checkpointing)
    return layers


def layer_facts(layers: Iterable[Layer]) -> tuple[LayerFacts, ...]:
    """Return the names and sizes of layers."""
    facts = []
    for layer in layers:
        parameters = list(layer.module.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        size = sum(map(elements, parameters))
        facts.append(LayerFacts(name=layer.name, parameters=size, trained=trained, tied=layer.tied))
    return tuple(facts)


def _with_routers_sums(layers: list[Layer], loss: RouterLoss) -> list[Layer]:
    """Wrap the first block and all later layers, so that they pass on the routers' sums."""
    # The sums have to reach the last stage, where the loss is computed. Layers before the first block have no router.
    first = next(index for index, layer in enumerate(layers) if layer.block)
    carriers = [
        replace(
            layer,
            module=Carrier(layer.module, loss),
            names={f"module.{key}": name for key, name in layer.names.items()},
            tied_attr=layer.tied_attr and f"module.{layer.tied_attr}",
        )
        for layer in layers[first:]
    ]
    return [*layers[:first], *carriers]


def _maker(model: nn.Module) -> Maker:
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if (model_type, type(model).__name__) in HEADS:
        return HEADS[model_type, type(model).__name__]
    if type(model).__module__.startswith("torchvision.models.") and type(model).__name__ in TORCHVISION:
        return TORCHVISION[type(model).__name__]
    if isinstance(model, nn.Sequential):
        return _sequential
    what = f"{type(model).__name__} ({model_type})" if model_type else type(model).__name__
    kinds = ", ".join(sorted({kind for kind, _ in HEADS}))
    message = f"{what} cannot be split into pipeline stages; supported: {kinds} of transformers, torchvision's "
    message += "ResNets and VGGs, simplecnn, lenet, mlp, resnet18-small, and any torch.nn.Sequential"
    hint = "train without --pipeline (ZeRO stages 1 to 3 support every model), or use one of these models"
    raise ModelError("pipeline-model", message, hint)


# A checkpoint has the names of the full model for any number of stages, so that it resumes in any other layout. So each
# layer maps the keys of its module to the model's keys.
def _layer(name: str, module: nn.Module, paths: dict[str, str], *, is_tied: bool = False, block: bool = False) -> Layer:
    """Return a layer.

    `paths` maps its submodules or parameters ("": the layer itself) to paths in the model. `is_tied`: whether its
    weight is both the embedding and the head.
    """
    names = {}
    for key, _ in state_tensors(module):
        # the longest path that contains the tensor; "" contains all
        path = max((p for p in paths if p == "" or key == p or key.startswith(p + ".")), key=len)
        inner_path = key[len(path) :].lstrip(".")
        names[key] = ".".join(part for part in (paths[path], inner_path) if part)
    tied, tied_attr = ("embedding", "weight") if is_tied else (None, None)
    return Layer(name=name, module=module, names=names, tied=tied, tied_attr=tied_attr, block=block)


def state_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers with their keys in the state dict, also on meta.

    The scales of quantized weights are left out, because bitsandbytes needs values to list them.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), tensor


def _submodule_layer(model: nn.Module, path: str, *, is_tied: bool = False, block: bool = False) -> Layer:
    return _layer(path, model.get_submodule(path), {"": path}, is_tied=is_tied, block=block)


def _blocks(path: str, wrapped: Iterable[nn.Module]) -> list[Layer]:
    """Return a layer for each of `wrapped`: the model's blocks `path`.0, `path`.1, ..."""
    paths = ((f"{path}.{i}", block) for i, block in enumerate(wrapped))
    return [_layer(inner, block, {"block": inner}, block=True) for inner, block in paths]


def _llama(model: LlamaForCausalLM) -> list[Layer]:
    body = model.model
    is_tied = model.lm_head.weight is body.embed_tokens.weight
    decoder = (RotaryBlock(block, body.rotary_emb, model.config, i) for i, block in enumerate(body.layers))
    return [
        _submodule_layer(model, "model.embed_tokens", is_tied=is_tied),
        *_blocks("model.layers", decoder),
        _submodule_layer(model, "model.norm"),
        _submodule_layer(model, "lm_head", is_tied=is_tied),
    ]


def _gpt2(model: GPT2LMHeadModel) -> list[Layer]:
    body = model.transformer
    is_tied = model.lm_head.weight is body.wte.weight
    positions = GPT2Positions(body.wpe, body.drop)
    return [
        _submodule_layer(model, "transformer.wte", is_tied=is_tied),
        _layer("transformer.wpe", positions, {"wpe": "transformer.wpe"}),
        *_blocks("transformer.h", (MaskedBlock(block, model.config, "create_causal_mask") for block in body.h)),
        _submodule_layer(model, "transformer.ln_f"),
        _submodule_layer(model, "lm_head", is_tied=is_tied),
    ]


def _bert(model: BertForMaskedLM) -> list[Layer]:
    if model.config.is_decoder:
        raise ModelError("pipeline-model", "a BERT with is_decoder cannot be split into stages", "unset is_decoder")
    embeddings, head = model.bert.embeddings, model.cls.predictions
    is_tied = head.decoder.weight is embeddings.word_embeddings.weight
    encoder = (MaskedBlock(block, model.config, "create_bidirectional_mask") for block in model.bert.encoder.layer)
    predictions = "cls.predictions"
    biases = {"decoder_bias": f"{predictions}.decoder.bias", "bias": f"{predictions}.bias"}
    return [
        _submodule_layer(model, "bert.embeddings.word_embeddings", is_tied=is_tied),
        _layer("bert.embeddings", BertEmbeddingSum(embeddings), {"": "bert.embeddings"}),
        *_blocks("bert.encoder.layer", encoder),
        _submodule_layer(model, f"{predictions}.transform"),
        _layer(f"{predictions}.decoder", Matrix(head.decoder), {"": f"{predictions}.decoder"}, is_tied=is_tied),
        _layer(f"{predictions}.bias", BertBias(head), biases),
    ]


def _vit(model: ViTForImageClassification) -> list[Layer]:
    encoder = (MaskedBlock(block, model.config, "create_bidirectional_mask") for block in model.vit.layers)
    return [
        _submodule_layer(model, "vit.embeddings"),
        *_blocks("vit.layers", encoder),
        _submodule_layer(model, "vit.layernorm"),
        _layer("classifier", FirstToken(model.classifier), {"classifier": "classifier"}),
    ]


def _sequential(model: nn.Sequential) -> list[Layer]:
    last = len(model) - 1
    return [_submodule_layer(model, path, block=i < last) for i, (path, _) in enumerate(model.named_children())]


def _group(
    name: str, model: nn.Module, paths: Iterable[str], *stateless: tuple[str, nn.Module], block: bool = False
) -> Layer:
    """Return a layer that runs the model's submodules `paths`, then the modules `stateless`."""
    keys = {path.replace(".", "_"): path for path in paths}
    modules = [(key, model.get_submodule(path)) for key, path in keys.items()]
    return _layer(name, nn.Sequential(OrderedDict([*modules, *stateless])), keys, block=block)


def _resnet(model: ResNet) -> list[Layer]:
    stages = {f"layer{n}": getattr(model, f"layer{n}") for n in range(1, 5)}
    blocks = [f"{name}.{i}" for name, stage in stages.items() for i in range(len(stage))]
    stem = _group("stem", model, ("conv1", "bn1", "relu", "maxpool"))
    flat = nn.Sequential(OrderedDict(avgpool=model.avgpool, flatten=nn.Flatten(), fc=model.fc))
    layers = [_submodule_layer(model, block, block=True) for block in blocks]
    return [stem, *layers, _layer("fc", flat, {"fc": "fc"})]


def _vgg(model: VGG) -> list[Layer]:
    """Return layers that begin at each convolution, at each linear module, and at `avgpool`."""
    features = [
        _group(f"features.{indices[0]}", model, [f"features.{i}" for i in indices], block=True)
        for indices in _cuts(cast(nn.Sequential, model.features))
    ]
    pool = _layer("avgpool", nn.Sequential(model.avgpool, nn.Flatten()), {})
    head = [
        _group(f"classifier.{indices[0]}", model, [f"classifier.{i}" for i in indices])
        for indices in _cuts(model.classifier)
    ]
    return [*features, pool, *head]


def _cuts(layers: nn.Sequential) -> list[list[int]]:
    groups: list[list[int]] = []
    for i, layer in enumerate(layers):
        if not groups or isinstance(layer, nn.Conv2d | nn.Linear):
            groups.append([])
        groups[-1].append(i)
    return groups


# A new architecture for pipelines is a function that lists the model's layers, and a row here. A layer passes one
# tensor to the next, so masks and positions are computed in the layers themselves.
TORCHVISION: dict[str, Maker] = {"ResNet": _resnet, "VGG": _vgg}

HEADS: dict[tuple[str, str], Maker] = {
    ("llama", "LlamaForCausalLM"): _llama,
    ("qwen2", "Qwen2ForCausalLM"): _llama,
    ("qwen3", "Qwen3ForCausalLM"): _llama,
    ("mistral", "MistralForCausalLM"): _llama,
    ("mixtral", "MixtralForCausalLM"): _llama,
    ("qwen3_moe", "Qwen3MoeForCausalLM"): _llama,
    ("deepseek_v2", "DeepseekV2ForCausalLM"): _llama,
    ("deepseek_v3", "DeepseekV3ForCausalLM"): _llama,
    ("gpt2", "GPT2LMHeadModel"): _gpt2,
    ("bert", "BertForMaskedLM"): _bert,
    ("vit", "ViTForImageClassification"): _vit,
}


# Blocks of transformers models with one tensor in and out: masks and positions depend only on its shape.


class RotaryBlock(nn.Module):
    """A block of Llama or a similar model: hidden states (batch, seq_len, hidden_size)."""

    def __init__(self, block: nn.Module, rotary: nn.Module, config: PreTrainedConfig, index: int):
        super().__init__()
        self.block = block
        self.rotary = rotary  # without parameters, so all blocks can have it
        self.config = config
        self.first_position = 0  # of this rank's tokens, if each rank has a part of the sequence
        kinds = getattr(config, "layer_types", None)
        windowed = getattr(config, "sliding_window", None) is not None
        self.sliding = kinds[index] == "sliding_attention" if kinds else windowed

    def forward(self, x: Tensor) -> Tensor:
        """Run the block with a causal mask, or a sliding-window mask if the block has one."""
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        positions = torch.arange(self.first_position, self.first_position + x.shape[1], device=x.device).unsqueeze(0)
        make_mask = create_sliding_window_causal_mask if self.sliding else create_causal_mask
        return self.block(
            x,
            attention_mask=_mask(make_mask, self.config, x, position_ids=positions),
            position_ids=positions,
            position_embeddings=self.rotary(x, positions),
        )


class GPT2Positions(nn.Module):
    """Adds learned positions to token embeddings (batch, seq_len, hidden_size)."""

    def __init__(self, wpe: nn.Embedding, drop: nn.Module):
        super().__init__()
        self.wpe, self.drop = wpe, drop

    def forward(self, x: Tensor) -> Tensor:
        """Add the position embeddings. The first token has position 0."""
        return self.drop(x + self.wpe(torch.arange(x.shape[1], device=x.device).unsqueeze(0)))


class MaskedBlock(nn.Module):
    """A block of GPT-2, BERT or ViT. Hidden states (batch, length, hidden_size) in and out."""

    def __init__(self, block: nn.Module, config: PreTrainedConfig, mask: str):
        """Wrap a block. `mask`: the function of transformers' masking_utils that makes its mask."""
        super().__init__()
        self.block, self.config, self.mask = block, config, mask

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on samples without padding."""
        from transformers import masking_utils

        return self.block(x, attention_mask=_mask(getattr(masking_utils, self.mask), self.config, x))


class BertEmbeddingSum(nn.Module):
    """Adds segment 0 and learned positions to BERT's (batch, seq_len, hidden_size)."""

    def __init__(self, embeddings: BertEmbeddings):
        super().__init__()
        self.token_type_embeddings = embeddings.token_type_embeddings
        self.position_embeddings = embeddings.position_embeddings
        self.LayerNorm, self.dropout = embeddings.LayerNorm, embeddings.dropout

    def forward(self, x: Tensor) -> Tensor:
        """Sum the embeddings in the same order as BERT, so that rounding is the same."""
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        segments = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        x = x + self.token_type_embeddings(segments) + self.position_embeddings(positions)
        return self.dropout(self.LayerNorm(x))


class Matrix(nn.Module):
    """The weight of a linear layer, without its bias.

    DeepSpeed counts a tied layer's parameters in the gradient norm on one stage only. If this layer had a bias, the
    norm would not include it.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., in_features) by the weight. Return (..., out_features)."""
        return functional.linear(x, self.weight)


class BertBias(nn.Module):
    """The bias of BERT's output matrix, under both of its names."""

    def __init__(self, head: BertLMPredictionHead):
        super().__init__()
        self.decoder_bias, self.bias = head.decoder.bias, head.bias

    def forward(self, x: Tensor) -> Tensor:
        """Add the bias to logits (batch, seq_len, vocab_size)."""
        return x + self.decoder_bias


class FirstToken(nn.Module):
    """ViT's head: hidden states (batch, length, hidden_size) to logits (batch, classes)."""

    def __init__(self, classifier: nn.Module):
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Classify from the class token."""
        return self.classifier(x[:, 0, :])


def _mask(make: Callable[..., Tensor | None], config: PreTrainedConfig, x: Tensor, **options: Tensor) -> Tensor | None:
    """Return a mask for hidden states without padding; None if the kernel needs no mask."""
    cache = "cache" if "cache" in inspect.signature(make).parameters else "past_key_values"  # before transformers 5.24
    return make(config=config, inputs_embeds=x, attention_mask=None, **{cache: None}, **options)
