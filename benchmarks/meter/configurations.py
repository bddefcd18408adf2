"""The runs whose memory is measured, forecast and compared: small models, every feature with every other one.

Each two settings that can be combined (a model and a stage, a stage and a precision, ...) come together at least once,
and each model has each of its layouts and offloads at each stage (a covering design). The last ones of some models are
added for data parallelism on more ranks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch

from zerofit.app.training.train import prepare
from zerofit.config.ds_json import read_for_run
from zerofit.data.opening import open_data
from zerofit.features.optimizers import OPTIMIZERS
from zerofit.simulate.record import SimulationTarget
from zerofit.spec.events import Reporter
from zerofit.spec.run import load_run

STEPS = 3

_HALF = {"layers": 3, "attention_heads": 4, "ffn_dim": 384}
_HALVES = {f"{half}_{key}": size for half in ("encoder", "decoder") for key, size in _HALF.items()}
_TOWER = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 384}
_WORDS = {**_TOWER, "vocab_size": 2048}
_SMALL = {"vocab_size": 2048, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_VISION = {**_TOWER, "image_size": 64, "patch_size": 16}
_PLACES = {
    f"{name}_token_id": number for number, name in enumerate(("image", "video", "vision_start", "vision_end"), 7)
}
_ROTARY = {
    **_WORDS,
    "num_key_value_heads": 2,
    **_ENDS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 4, 4]},
}
_DEEP = {"depth": 3, "hidden_size": 64, "intermediate_size": 112, "num_heads": 4, "out_hidden_size": 96}

# large enough for tens of megabytes, small enough for four ranks on two cores (VGG-11 has its published 129 million
# parameters, LeNet its 62 thousand)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model": "llama-tiny", "seq_len": 128, "model_args": {"vocab_size": 2048, "hidden_size": 192}},
    "mixtral": {
        "model": "mixtral-tiny",
        "seq_len": 128,
        "model_args": {"vocab_size": 2048, "hidden_size": 192, "num_local_experts": 8},
    },
    "gpt2": {
        "model": "gpt2",
        "seq_len": 128,
        "model_args": {
            "vocab_size": 2048,
            "n_embd": 192,
            "n_layer": 4,
            "n_head": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    },
    "bert": {
        "model": "bert-base",
        "seq_len": 128,
        "model_args": {
            "vocab_size": 2048,
            "hidden_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 768,
        },
    },
    "vit": {
        "model": "vit-b-16-hf",
        "image_size": 64,
        "model_args": {
            "hidden_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 768,
            "patch_size": 8,
        },
    },
    "resnet18": {"model": "resnet18", "image_size": 64},
    "vgg11": {"model": "vgg11", "image_size": 32},
    "lenet": {"model": "lenet", "image_size": 28},
    "t5": {
        "model": "t5-small",
        "seq_len": 64,
        "model_args": {"vocab_size": 2048, "d_model": 192, "d_ff": 768, "num_layers": 4, "num_decoder_layers": 3},
    },
    "bart": {"model": "bart-base", "seq_len": 64, "model_args": {"vocab_size": 2048, "d_model": 96, **_HALVES}},
    "whisper": {
        "model": "whisper-tiny",
        "seq_len": 32,
        "model_args": {
            "vocab_size": 2048,
            "d_model": 96,
            "max_source_positions": 100,
            **_HALVES,
            **dict.fromkeys(("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"), 0),
        },
    },
    "clip": {
        "model": "clip-vit-base-patch32",
        "seq_len": 32,
        "model_args": {"text_config": {**_WORDS, "eos_token_id": 1}, "vision_config": _VISION},
    },
    "siglip": {
        "model": "siglip-base-patch16-224",
        "seq_len": 32,
        "model_args": {"text_config": {**_WORDS, "projection_size": 96}, "vision_config": _VISION},
    },
    "llava": {
        "model": "llava-1.5-7b",
        "seq_len": 64,
        "model_args": {"image_token_index": 7, "text_config": _WORDS, "vision_config": _VISION},
    },
    "qwen2-vl": {
        "model": "qwen2-vl-2b",
        "seq_len": 64,
        "image_size": 168,
        "model_args": {
            **_PLACES,
            "text_config": _ROTARY,
            "vision_config": {"depth": 3, "embed_dim": 64, "num_heads": 4, "hidden_size": 96},
        },
    },
    "qwen2.5-vl": {
        "model": "qwen2.5-vl-3b",
        "seq_len": 64,
        "image_size": 168,
        "model_args": {**_PLACES, "text_config": _ROTARY, "vision_config": {**_DEEP, "fullatt_block_indexes": [2]}},
    },
    "qwen3-vl": {
        "model": "qwen3-vl-4b",
        "seq_len": 64,
        "image_size": 192,
        "model_args": {
            **_PLACES,
            "text_config": {**_ROTARY, "head_dim": 24},
            "vision_config": {**_DEEP, "deepstack_visual_indexes": [1]},
        },
    },
    "unet": {
        "model": "stable-diffusion-1.5",
        "image_size": 128,
        "model_args": {
            "sample_size": 16,
            "block_out_channels": [64, 128],
            "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
            "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
            "cross_attention_dim": 96,
            "attention_head_dim": 4,
        },
    },
    "dit": {
        "model": "dit-xl-2",
        "image_size": 128,
        "model_args": {"num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 24, "sample_size": 16},
    },
    "flux": {
        "model": "flux.1-dev",
        "image_size": 128,
        "model_args": {
            "num_layers": 2,
            "num_single_layers": 3,
            "num_attention_heads": 4,
            "attention_head_dim": 32,
            "joint_attention_dim": 256,
            "axes_dims_rope": [8, 12, 12],
        },
    },
    "mamba": {
        "model": "mamba-130m",
        "seq_len": 32,
        "model_args": {"vocab_size": 2048, "hidden_size": 192, "num_hidden_layers": 3},
    },
    "opt": {
        "model": "opt-350m",  # the one that projects its embeddings
        "seq_len": 64,
        "model_args": {**_SMALL, "ffn_dim": 384, "word_embed_proj_dim": 64},
    },
    "falcon": {"model": "falcon-7b", "seq_len": 64, "model_args": _SMALL},
    "olmo2": {"model": "olmo-2-1b", "seq_len": 64, "model_args": {**_WORDS, "num_key_value_heads": 4, **_ENDS}},
    "gemma2": {
        "model": "gemma-2-2b",
        "seq_len": 64,
        "model_args": {**_WORDS, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 32},
    },
    "phi3": {"model": "phi-3-mini", "seq_len": 64, "model_args": {**_WORDS, "num_key_value_heads": 4, **_ENDS}},
    "gpt-oss": {
        "model": "gpt-oss-20b",
        "seq_len": 64,
        "model_args": {**_WORDS, "num_key_value_heads": 2, "head_dim": 24, "num_local_experts": 4, **_ENDS},
    },
    "deepseek-v3": {
        "model": "deepseek-v3",
        "seq_len": 64,
        "model_args": {
            **_WORDS,
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "moe_intermediate_size": 64,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    },
    "dinov2": {"model": "dinov2-small", "image_size": 56, "model_args": {**_TOWER, "mlp_ratio": 4}},
}
# with adapters, or a part of them frozen
MODELS |= {
    "llama-lora": {**MODELS["llama"], "lora": 8},
    "llama-dora": {**MODELS["llama"], "lora": 8, "dora": True, "lora_targets": "q_proj,v_proj"},
    "gpt2-lora": {**MODELS["gpt2"], "lora": 16},
    "llama-qlora": {**MODELS["llama"], "lora": 8, "quantize": "nf4"},
    "llama-qlora-int8": {**MODELS["llama"], "lora": 8, "quantize": "int8"},
    "vit-frozen": {**MODELS["vit"], "train": ["classifier", "*.3.*"]},
}
# so deep, and with so few words, that ranks differ in what they keep of gradients
_DEEPER = {"vocab_size": 512, "hidden_size": 192, "num_hidden_layers": 6}
MODELS |= {
    "llama-deep": {**MODELS["llama"], "model_args": _DEEPER},
    "llama-tied": {**MODELS["llama"], "model_args": {**_DEEPER, "tie_word_embeddings": True}},
}
OFFLOADS = {"offload": ("offload_optimizer",), "offload-all": ("offload_optimizer", "offload_param")}
WORDS: dict[str, dict[str, Any]] = {
    "ga2": {"gradient_accumulation_steps": 2},
    "ckpt": {"activation_checkpointing": True},
    "chunk": {"loss_chunk": 128},
    "tiles": {"mlp_chunk": 48},
    "hosted": {"activation_offload": True},
    "dualpipev": {"pipeline_schedule": "dualpipev", "gradient_accumulation_steps": 4},
    **{name: {"optimizer": name} for name in OPTIMIZERS},
}
ZERO: dict[str, dict[str, Any]] = {"overlap": {"overlap_comm": True}, "buckets": {"reduce_bucket_size": 50_000}}
DEGREES = {"pp2": "pipeline", "tp2": "tensor_parallel", "sp2": "sequence_parallel", "ep2": "expert_parallel"}

# model, ZeRO stage, precision, micro batch, accumulation over 2 (ga2), activation checkpointing (ckpt), loss in chunks
# (chunk), collectives beside backward (overlap), small buckets of gradients (buckets), MLPs in tiles (tiles),
# checkpoints on the host (hosted), another optimizer than AdamW, offload of the optimizer or of parameters too,
# pipeline, tensor, sequence or expert parallel degree, ranks
NAMES = """
llama zero0 fp32 mb2 ckpt x2
llama zero1 fp32 mb2 offload x1
llama zero2 bf16 mb2 offload x2
llama zero3 fp32 mb2 ga2 offload-all x1
llama zero3 fp32 mb2 ckpt offload x1
llama zero0 bf16 mb2 ga2 ckpt pp2 x2
llama zero1 bf16 mb2 pp2 x2
llama zero0 fp32 mb2 ga2 ckpt sp2 x4
llama zero1 bf16 mb8 ga2 sp2 x2
llama zero2 fp32 mb2 ckpt sp2 x2
llama zero3 bf16 mb8 sp2 x2
llama zero0 fp32 mb2 ckpt tp2 x2
llama zero1 bf16 mb2 tp2 x2
llama zero2 fp32 mb8 ckpt tp2 x2
llama zero3 bf16 mb2 ga2 tp2 x2
llama zero0 fp32 mb8 x4
llama zero1 bf16 mb2 ckpt x2
llama zero2 fp32 mb8 x4
llama zero3 fp32 mb2 x4
llama zero3 bf16 mb2 ckpt x2
llama zero0 fp32 mb2 chunk x2
llama zero2 bf16 mb2 tiles x2
llama zero3 bf16 mb2 chunk tiles hosted x2
llama zero1 bf16 mb2 ga2 chunk tiles hosted pp2 x2
llama zero2 fp32 mb2 chunk tiles hosted sp2 x2
gpt2 zero0 bf16 mb8 ga2 x1
gpt2 zero1 bf16 mb2 ckpt offload x2
gpt2 zero2 bf16 mb2 ckpt x2
gpt2 zero2 fp32 mb2 ckpt offload x1
gpt2 zero3 fp32 mb2 ga2 offload-all x2
gpt2 zero3 fp32 mb2 x2
gpt2 zero3 bf16 mb8 offload x2
gpt2 zero0 bf16 mb8 pp2 x2
gpt2 zero1 bf16 mb8 ga2 pp2 x4
gpt2 zero3 bf16 mb2 ckpt x4
bert zero0 bf16 mb2 ckpt x2
bert zero1 bf16 mb2 ga2 ckpt offload x2
bert zero2 fp32 mb2 ga2 ckpt offload x1
bert zero3 fp32 mb8 ckpt offload-all x1
bert zero3 fp32 mb2 offload x2
bert zero0 bf16 mb8 ckpt pp2 x2
bert zero1 bf16 mb2 pp2 x2
bert zero0 bf16 mb8 ckpt tp2 x2
bert zero1 fp32 mb2 ga2 ckpt tp2 x4
bert zero2 fp32 mb2 ga2 tp2 x2
bert zero3 bf16 mb2 ga2 tp2 x2
bert zero2 bf16 mb8 x4
vit zero0 fp32 mb8 ga2 ckpt x2
vit zero1 bf16 mb8 ga2 ckpt offload x1
vit zero2 fp32 mb2 ga2 x1
vit zero2 bf16 mb8 ga2 offload x2
vit zero3 fp32 mb2 offload-all x4
vit zero3 bf16 mb8 ckpt x2
vit zero3 bf16 mb2 ckpt offload x2
vit zero0 bf16 mb8 ga2 ckpt pp2 x2
vit zero1 fp32 mb8 ckpt pp2 x2
resnet18 zero0 bf16 mb8 x1
resnet18 zero1 bf16 mb8 offload x2
resnet18 zero2 bf16 mb2 x1
resnet18 zero2 bf16 mb8 ga2 offload x2
resnet18 zero3 bf16 mb8 ckpt offload-all x1
resnet18 zero3 fp32 mb2 ga2 ckpt x1
resnet18 zero3 fp32 mb2 ga2 ckpt offload x2
resnet18 zero0 bf16 mb2 ga2 pp2 x2
resnet18 zero1 bf16 mb2 ga2 pp2 x4
resnet18 zero2 fp32 mb2 x4
resnet18 zero3 bf16 mb8 x2
vgg11 zero0 bf16 mb2 ckpt x1
vgg11 zero1 fp32 mb2 ga2 ckpt offload x2
vgg11 zero2 fp32 mb8 ga2 ckpt x2
vgg11 zero2 fp32 mb8 ckpt offload x1
vgg11 zero3 bf16 mb8 ga2 offload-all x1
vgg11 zero3 fp32 mb2 ckpt x1
vgg11 zero3 bf16 mb2 offload x1
vgg11 zero0 bf16 mb2 pp2 x2
vgg11 zero1 bf16 mb8 ga2 pp2 x2
lenet zero0 bf16 mb8 ga2 ckpt x1
lenet zero1 fp32 mb2 ga2 ckpt offload x2
lenet zero2 bf16 mb2 ga2 x2
lenet zero2 bf16 mb8 ga2 offload x4
lenet zero3 bf16 mb2 ckpt offload-all x1
lenet zero3 fp32 mb2 ga2 ckpt x2
lenet zero3 fp32 mb2 ga2 ckpt offload x1
lenet zero0 bf16 mb2 ga2 pp2 x2
lenet zero1 fp32 mb2 ckpt pp2 x2
t5 zero1 fp32 mb2 offload x1
t5 zero2 bf16 mb8 x2
t5 zero3 bf16 mb2 ckpt x2
bart zero2 fp32 mb2 ga2 x2
bart zero3 bf16 mb8 x2
whisper zero2 bf16 mb2 x2
whisper zero3 fp32 mb2 ckpt x2
clip zero1 bf16 mb8 x2
clip zero3 fp32 mb2 x2
siglip zero2 fp32 mb8 ckpt x2
siglip zero3 bf16 mb2 offload-all x2
llava zero2 bf16 mb2 ckpt x2
llava zero3 fp32 mb2 x2
qwen2-vl zero2 bf16 mb2 x2
qwen2-vl zero3 bf16 mb2 ckpt x2
qwen2.5-vl zero2 bf16 mb2 ckpt x2
qwen3-vl zero3 fp32 mb2 x2
unet zero1 fp32 mb8 x2
unet zero2 bf16 mb2 ckpt x2
dit zero2 bf16 mb8 x2
dit zero3 fp32 mb2 ckpt x2
flux zero2 fp32 mb2 x2
flux zero3 bf16 mb2 x2
mamba zero1 fp32 mb2 x2
mamba zero2 bf16 mb2 x2
dinov2 zero2 bf16 mb8 x2
opt zero1 fp32 mb2 x2
opt zero3 bf16 mb8 ckpt x2
falcon zero2 bf16 mb8 x2
falcon zero3 fp32 mb2 ckpt x2
olmo2 zero2 bf16 mb8 x2
olmo2 zero3 bf16 mb2 offload x2
gemma2 zero1 bf16 mb8 ckpt x2
gemma2 zero3 fp32 mb2 x2
phi3 zero2 fp32 mb2 ga2 x2
phi3 zero3 bf16 mb8 x2
gpt-oss zero2 bf16 mb8 x2
gpt-oss zero3 fp32 mb2 ckpt x2
deepseek-v3 zero2 bf16 mb2 x2
deepseek-v3 zero3 bf16 mb8 ckpt x2
llama-lora zero0 fp32 mb2 x2
llama-lora zero0 bf16 mb2 ckpt x2
llama-lora zero1 bf16 mb8 x2
llama-lora zero2 bf16 mb2 ga2 ckpt x2
llama-lora zero3 fp32 mb2 x2
llama-lora zero3 bf16 mb2 ckpt x2
llama-lora zero3 bf16 mb8 x4
llama-lora zero2 bf16 mb2 offload x2
llama-lora zero3 bf16 mb2 offload-all x2
llama-lora zero1 bf16 mb2 pp2 x2
llama-lora zero0 bf16 mb2 ga2 pp2 x2
llama-lora zero2 bf16 mb2 sp2 x2
llama-lora zero3 fp32 mb2 sp2 x2
llama-dora zero2 bf16 mb2 x2
gpt2-lora zero1 fp32 mb2 x2
gpt2-lora zero2 bf16 mb8 ckpt x2
gpt2-lora zero3 bf16 mb2 x2
gpt2-lora zero1 bf16 mb2 pp2 x2
llama-qlora zero0 fp32 mb2 x2
llama-qlora zero2 bf16 mb2 x2
llama-qlora zero2 bf16 mb2 ckpt x2
llama-qlora zero3 bf16 mb2 ckpt x2
llama-qlora zero3 fp32 mb2 x2
llama-qlora zero3 bf16 mb2 ga2 x2
llama-qlora zero3 bf16 mb8 offload x2
llama-qlora zero3 bf16 mb2 ckpt offload-all x2
llama-qlora-int8 zero1 bf16 mb2 x2
vit-frozen zero2 bf16 mb8 x2
vit-frozen zero3 fp32 mb2 x2
llama zero0 bf16 mb2 adamw8bit x2
llama zero2 bf16 mb2 adamw8bit x2
llama zero3 fp32 mb2 adamw8bit x2
llama-lora zero2 bf16 mb2 adamw8bit x2
llama zero0 fp32 mb2 adafactor x2
llama zero0 fp32 mb2 pp2 x2
llama zero0 fp32 mb2 pp2 adafactor x2
llama zero0 bf16 mb2 ga2 adafactor x2
llama zero1 bf16 mb2 ckpt dualpipev pp2 x2
gpt2 zero1 fp32 mb2 dualpipev pp2 x2
llama zero1 fp32 mb2 ckpt dualpipev sp2 pp2 x4
llama zero0 fp32 mb2 ga2 pp2 tp2 x4
llama zero0 bf16 mb2 ckpt tp2 sp2 x4
llama zero1 bf16 mb2 ga2 ckpt pp2 tp2 x4
llama zero1 fp32 mb8 pp2 tp2 x4
llama zero1 bf16 mb2 ga2 pp2 sp2 x4
llama zero1 fp32 mb2 ckpt chunk pp2 sp2 x4
llama zero1 bf16 mb2 ckpt dualpipev pp2 tp2 x4
llama zero1 bf16 mb2 tp2 sp2 x4
llama zero2 fp32 mb2 ckpt tp2 sp2 x4
llama zero2 bf16 mb2 ga2 chunk tp2 sp2 x4
llama zero3 bf16 mb2 tp2 sp2 x4
llama zero3 fp32 mb2 ga2 ckpt tp2 sp2 x4
llama zero1 bf16 mb2 ga2 pp2 tp2 x8
llama zero1 bf16 mb2 ckpt pp2 tp2 sp2 x8
llama zero3 bf16 mb2 ckpt tp2 sp2 x8
gpt2 zero1 bf16 mb2 ga2 dualpipev pp2 x4
llama-lora zero1 bf16 mb2 ckpt pp2 sp2 x4
mixtral zero1 fp32 mb2 ep2 x4
mixtral zero1 bf16 mb2 ckpt ep2 x2
mixtral zero2 bf16 mb2 ga2 ep2 x4
mixtral zero2 fp32 mb2 ckpt sp2 ep2 x4
mixtral zero3 bf16 mb2 ep2 x2
mixtral zero3 fp32 mb2 ga2 ckpt ep2 x4
mixtral zero3 bf16 mb2 chunk sp2 ep2 x4
mixtral zero1 fp32 mb2 pp2 ep2 x4
mixtral zero1 bf16 mb2 ga2 ckpt pp2 ep2 x4
mixtral zero1 bf16 mb2 pp2 ep2 x8
mixtral zero1 bf16 mb2 ckpt dualpipev pp2 ep2 x4
mixtral zero1 bf16 mb2 sp2 pp2 ep2 x4
mixtral zero2 bf16 mb2 ckpt sp2 ep2 x8
llama-deep zero1 bf16 mb2 buckets x2
llama-deep zero1 fp32 mb2 overlap buckets x3
llama-deep zero1 bf16 mb2 ga2 buckets x4
llama-deep zero1 fp32 mb2 ga2 overlap buckets x8
llama-deep zero2 bf16 mb2 buckets x4
llama-deep zero2 fp32 mb2 overlap buckets x2
llama-deep zero2 bf16 mb2 ga2 overlap buckets x3
llama-deep zero2 fp32 mb2 ga2 buckets x8
llama-tied zero1 bf16 mb2 overlap buckets x4
llama-tied zero1 fp32 mb2 ga2 buckets x3
llama-tied zero2 bf16 mb2 ga2 buckets x8
llama-tied zero2 fp32 mb2 overlap buckets x4
""".strip().splitlines()


def target(name: str, models: dict[str, dict[str, Any]] = MODELS) -> SimulationTarget:
    """The job of a configuration, as `zerofit train` would prepare it here, for rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {**options(name, models), "output": Path(folder) / "run"}
        prepared = prepare(load_run(None, asked), Reporter())
        job, machine = prepared.job, prepared.machine
    inputs = open_data(job.run, job.facts.task, job.run.seq_len, Reporter()).inputs
    free_bytes = psutil.virtual_memory().available
    if machine.accelerator == "cuda":
        free_bytes = torch.cuda.mem_get_info()[1]
    return SimulationTarget(
        job=job, inputs=inputs, accelerator=machine.accelerator, steps=STEPS, device_bytes=free_bytes
    )


def options(name: str, models: dict[str, dict[str, Any]] = MODELS) -> dict[str, Any]:
    """The options of `zerofit train`."""
    model, stage, precision, micro, *more, ranks = name.split()
    asked = {"data": "synthetic", **models[model], "steps": STEPS, "ranks": int(ranks[1:]), "precision": precision}
    asked["optimizer"] = "adamw"  # whose states plan forecasts
    asked["micro_batch"] = int(micro[2:])
    asked["ds_config"] = read_for_run(stage).config
    for word in more:
        if word in DEGREES:
            asked[DEGREES[word]] = 2
        elif word in ZERO:
            asked["ds_config"]["zero_optimization"] |= ZERO[word]
        elif word in OFFLOADS:
            devices = {part: {"device": "cpu", "pin_memory": True} for part in OFFLOADS[word]}
            asked["ds_config"]["zero_optimization"] |= devices
        else:
            asked |= WORDS[word]
    return asked
