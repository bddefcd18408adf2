"""What a trace says of a model, against figures from elsewhere."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.models.small import count_parameters
from zerofit.app.job.requests import assumed_inputs
from zerofit.models.build import build, check_forward
from zerofit.models.catalog import ModelError, ModelSource, find
from zerofit.models.inputs import ImageInputs, TextInputs
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rates import rates_of
from zerofit.plan.time import Timer, model_flops
from zerofit.simulate.costs.kernels import KernelCall, kernels_of
from zerofit.simulate.costs.layers import envelope
from zerofit.simulate.costs.profile import TraceSetting, profile_model
from zerofit.simulate.fakes import kernels
from zerofit.simulate.fakes.kernels import as_on
from zerofit.spec.cluster import Cluster
from zerofit.spec.profile import NOTHING_SAVED, LayerCost, Linear, Profile, Savings, setting
from zerofit.spec.run import Run

HIDDEN, MLP, HEADS, KV, VOCAB, LAYERS, LENGTH = 160, 432, 4, 2, 260, 4, 64
TEXT = TextInputs(vocab_size=VOCAB, seq_len=LENGTH)
IMAGES = ImageInputs(channels=3, size=32, classes=10)


def traced(name: str, inputs, *settings: TraceSetting, device: str = "cuda", **args) -> Profile:
    source = find(name)
    return profile_model(source, source.task, inputs, args, settings or [TraceSetting("bf16")], device)


@pytest.fixture(scope="module")
def llama() -> Profile:
    settings = [TraceSetting("bf16", c) for c in (False, True)] + [
        TraceSetting("bf16", tp=2),
        TraceSetting("bf16", sp=2),
    ]
    return traced("llama-tiny", TEXT, *settings)


def costs(profile: Profile, *of):
    return dict(zip((layer.name for layer in profile.layers), profile.costs[setting(*of)], strict=True))


def backward_flops(cost, samples: int = 1) -> float:
    """Return FLOPs of the layer's backward, with recomputation."""
    return sum(kernel.flops.at(samples) for kernel in cost.backward_kernels)


def test_flops_of_a_block_are_those_of_its_products(llama):
    """2mnk for the projections and the MLP, 4 x length^2 x width for attention; twice that in backward."""
    block = costs(llama, "bf16", False, 1, 1)["block"]
    head = HIDDEN // HEADS
    matrices = HIDDEN * HIDDEN * 2 + 2 * HIDDEN * KV * head + 3 * HIDDEN * MLP
    products, attention = 2 * LENGTH * matrices, 4 * LENGTH * LENGTH * HIDDEN
    assert block.forward_flops == Linear(per_sample=products + attention)
    # attention's kernel computes its scores again: 5 products instead of 2
    assert backward_flops(block) == 2 * products + attention * 5 / 2
    assert costs(llama, "bf16", False, 1, 1)["head"].forward_flops == Linear(per_sample=2 * LENGTH * HIDDEN * VOCAB)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2", "bert-base"])
def test_parameters_are_those_of_the_whole_model(name):
    config = TextInputs(vocab_size=256, seq_len=32)
    assert traced(name, config).parameters == count_parameters(find(name))


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "lenet", "mobilenet_v2"])
def test_forward_flops_of_image_models_are_those_that_torch_counts(name):
    source = find(name)
    profile = traced(name, IMAGES, TraceSetting("fp32"))
    with torch.device("meta"):
        model = build(source, IMAGES, {})
    assert profile.parameters == sum(p.numel() for p in model.parameters())
    forward = sum(cost.forward_flops.at(1) for cost in profile.costs[setting("fp32", False, 1, 1)])
    assert forward == check_forward(model, source, IMAGES)


def test_a_checkpointed_block_keeps_its_input_and_computes_twice(llama):
    plain, kept = (costs(llama, "bf16", c, 1, 1)["block"] for c in (False, True))
    assert kept.saved_bytes == Linear(per_sample=2 * LENGTH * HIDDEN)
    # recomputing stops at the last tensor that is needed: the block's last product is not
    again = plain.forward_flops.per_sample - 2 * LENGTH * MLP * HIDDEN
    assert backward_flops(kept) == backward_flops(plain) + again


def test_a_block_keeps_what_its_backward_needs(llama):
    """In bf16, by hand: norms keep their input in float32, the normed one and the weighted one."""
    norms, rotated, attention = (
        2 * (4 + 2 + 2) * HIDDEN,
        2 * (HIDDEN + 2 * HIDDEN * KV // HEADS),
        2 * HIDDEN + 4 * HEADS,
    )
    of_block = LENGTH * (norms + 2 * 4 + rotated + attention + 2 * 4 * MLP)  # a norm's 1 / root in float32, too
    assert costs(llama, "bf16", False, 1, 1)["block"].saved_bytes.per_sample == of_block


def test_linear_layers_with_frozen_weights_keep_their_input_at_stage_3():
    """Those of the MLP; the others' inputs are kept for adapters beside q and v, and for attention."""
    partial = Run(model="llama-tiny", lora=4, lora_targets="q_proj,v_proj").partial
    source = replace(find("llama-tiny"), partial=partial)
    profile = profile_model(source, source.task, TEXT, {}, [TraceSetting("bf16")], "cuda")
    key = setting("bf16", False, 1, 1)
    saved = [profile.costs_of(profile.key_of(key, stage))[1].saved_bytes.per_sample for stage in (2, 3)]
    assert saved[1] - saved[0] == LENGTH * 2 * (HIDDEN + MLP)


def in_settings(checkpointing: bool, *every: Savings) -> list[dict[str, LayerCost]]:
    settings = (TraceSetting("bf16", checkpointing, savings=savings) for savings in every)
    return [costs(traced("llama-tiny", TEXT, one), "bf16", checkpointing, 1, 1) for one in settings]


def test_checkpoints_on_the_host_leave_the_device():
    """The device has the input of the block that runs, and the first one's while the model holds it."""
    plain, hosted = in_settings(True, NOTHING_SAVED, Savings(activation_offload=True))
    handed_on = Linear(per_sample=2 * LENGTH * HIDDEN)
    assert (plain["block"].saved_bytes, plain["block"].host_bytes) == (handed_on, Linear())
    assert (hosted["block"].saved_bytes, hosted["block"].host_bytes) == (Linear(), handed_on)
    more = hosted["embedding"].saved_bytes.per_sample - plain["embedding"].saved_bytes.per_sample
    assert more == handed_on.per_sample
    assert hosted["head"].host_bytes == hosted["embedding"].host_bytes == Linear()


def test_the_largest_activation_of_a_head_are_its_logits_in_float32(llama):
    assert costs(llama, "bf16", False, 1, 1)["head"].largest_bytes == Linear(per_sample=4 * LENGTH * VOCAB)


def test_a_loss_in_chunks_has_the_flops_of_the_whole_and_no_logits():
    plain, chunked = in_settings(False, NOTHING_SAVED, Savings(loss_chunk=16, mlp_chunk=24))
    of_head = 2 * LENGTH * HIDDEN * VOCAB
    assert plain["head"].forward_flops.per_sample == of_head
    assert chunked["head"].forward_flops.per_sample == 3 * of_head and backward_flops(chunked["head"]) == 0
    saved = [one["head"].saved_bytes.per_sample for one in (plain, chunked)]
    assert saved[0] - saved[1] >= 4 * LENGTH * VOCAB  # float32 logits
    of_mlp = 2 * LENGTH * HIDDEN * MLP
    again = backward_flops(chunked["block"]) - backward_flops(plain["block"])
    assert again == 2 * of_mlp  # the last of three products is not needed again
    assert chunked["block"].saved_bytes.per_sample < plain["block"].saved_bytes.per_sample - 4 * LENGTH * MLP


@pytest.mark.versions
def test_tensor_parallel_blocks_are_halves(llama):
    whole, half = (costs(llama, "bf16", False, tp, 1) for tp in (1, 2))
    assert half["block"].forward_flops.at(1) == whole["block"].forward_flops.at(1) / 2
    assert sum(half["block"].matrices) == sum(llama.layers[1].matrices) / 2
    assert half["block"].tp_allreduce_bytes == Linear(per_sample=2 * 2 * LENGTH * HIDDEN)
    assert half["head"].matrices == (HIDDEN * VOCAB // 2,)


def test_sequence_parallel_blocks_share_the_length(llama):
    whole, half = (costs(llama, "bf16", False, 1, sp)["block"] for sp in (1, 2))
    assert half.forward_flops.at(1) == whole.forward_flops.at(1) / 2
    local = 2 * LENGTH // 2 * HIDDEN
    assert half.sp_alltoall_bytes == Linear(per_sample=local * (2 + 2 * KV / HEADS))


@pytest.mark.parametrize(("tp", "sp"), [(1, 4), (2, 2)])
def test_more_ranks_than_heads_of_keys_exchange_repeated_heads(monkeypatch, tp, sp):
    """The exchanges of a block as they run in the trace, against the formula; ulysses_sp.py:186 repeats the heads."""
    sent = []
    original = kernels._AllToAll.forward
    monkeypatch.setattr(kernels._AllToAll, "forward", lambda ctx, x: (sent.append(x.nbytes), original(ctx, x))[1])
    block = costs(traced("llama-tiny", TEXT, TraceSetting("bf16", tp=tp, sp=sp)), "bf16", False, tp, sp)["block"]
    assert block.sp_alltoall_bytes.at(2) == sum(sent[:4])  # the first micro batch has two samples


def test_tensor_ranks_exchange_their_own_heads():
    alone, beside = TraceSetting("bf16", sp=2), TraceSetting("bf16", tp=2, sp=2)
    profile = traced("llama-tiny", TEXT, alone, beside)
    one, both = (costs(profile, "bf16", False, tp, 2)["block"] for tp in (1, 2))
    # a tensor rank has half of the query heads, and its one head of keys is repeated
    share = (HEADS + 2 * 2) / (2 * HEADS + 2 * KV)
    assert both.sp_alltoall_bytes.per_sample == one.sp_alltoall_bytes.per_sample * share
    assert both.tp_allreduce_bytes == Linear(per_sample=2 * both.output_bytes.per_sample)


def test_no_mask_and_no_matrix_of_scores(llama):
    """Bytes grow with the length, not with its square."""
    longer = traced("llama-tiny", TextInputs(vocab_size=VOCAB, seq_len=4 * LENGTH))
    short, long = (costs(p, "bf16", False, 1, 1)["block"].saved_bytes for p in (llama, longer))
    assert long.per_sample == 4 * short.per_sample


def test_dropout_in_attention_costs_the_cpu_its_fused_kernel():
    text = TextInputs(vocab_size=256, seq_len=512)
    on_cpu, on_gpu = (
        traced("gpt2", text, device=device).costs[setting("bf16", False, 1, 1)][1] for device in ("cpu", "cuda")
    )
    scores = 12 * 512 * 512
    assert on_cpu.saved_bytes.per_sample - on_gpu.saved_bytes.per_sample > 2 * scores


class Mlp(nn.Module):
    """Two products around a ReLU on 8 x 8 images, classified."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(192, 1000), nn.Linear(1000, 10)

    def forward(self, x):
        return self.down(self.up(x.flatten(1)).relu())


def test_saved_bytes_of_an_mlp_by_hand():
    """For a sample: pixels, ReLU's output; log-probabilities; labels. The first product's output is dropped."""
    source = ModelSource(name=f"{__name__}:Mlp", family="custom", origin="package.module:callable", task="custom")
    inputs = ImageInputs(channels=3, size=8, classes=10)
    profile = profile_model(source, "image", inputs, {}, [TraceSetting("fp32")], "cuda")
    up, down = profile.costs[setting("fp32", False, 1, 1)]
    assert [layer.name for layer in profile.layers] == ["up", "down"]
    assert up.saved_bytes == Linear(per_sample=4 * (192 + 1000) + 8)
    # logits are gone once their logarithms are there; both losses (summed, weighted) and the total weight are scalars
    assert down.saved_bytes.per_sample == 4 * 10
    assert down.forward_flops == Linear(per_sample=2 * 1000 * 10)
    # the second product's gradients: of its bias and of its weight (10,000) beside that of its input
    assert [moment.parameter for moment in down.backward if moment.parameter is not None] in ([0, 1], [1, 0])
    assert max(line.fixed for moment in down.backward for line in moment.live) >= 4 * 10_000


def test_batch_norm_keeps_its_inputs_as_they_come():
    profile = traced("resnet18", IMAGES, TraceSetting("bf16"), TraceSetting("fp32"))
    low, full = (sum(c.saved_bytes.at(2) for c in profile.costs[setting(p, False, 1, 1)]) for p in ("bf16", "fp32"))
    assert full / 2 < low < 0.6 * full  # beside them its statistics and weights in float32, and max pooling's indices


def test_a_profile_is_plain_json(llama):
    assert Profile.from_dict(json.loads(json.dumps(llama.as_dict()))).as_dict() == llama.as_dict()


def test_an_envelope_holds_for_every_micro_batch():
    lines = [
        Linear(fixed=100, per_sample=1),
        Linear(fixed=10, per_sample=10),
        Linear(fixed=50, per_sample=1),
        Linear(fixed=0, per_sample=10),
    ]
    best = envelope(lines)
    assert len(best) == 2
    for samples in range(1, 40):
        assert max(line.at(samples) for line in best) == max(line.at(samples) for line in lines)


def test_nothing_stays_patched():
    before = nn.functional.scaled_dot_product_attention
    with as_on("cuda"):
        assert nn.functional.scaled_dot_product_attention is not before
    assert nn.functional.scaled_dot_product_attention is before


@pytest.mark.parametrize("name", ["resnet18", "gpt2"])
def test_what_cannot_be_split_says_so(name):
    inputs = IMAGES if name == "resnet18" else TextInputs(vocab_size=256, seq_len=32)
    with pytest.raises(ModelError, match=r"tensor parallel"):
        traced(name, inputs, TraceSetting("bf16", tp=2))


class Reads(nn.Module):
    """A model that looks at values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(192, 10)

    def forward(self, x):
        return self.linear(x.flatten(1)) * (2 if x.sum() > 0 else 1)


def test_a_model_that_looks_at_values_is_named():
    source = ModelSource(name=f"{__name__}:Reads", family="custom", origin="package.module:callable", task="custom")
    inputs = ImageInputs(channels=3, size=8, classes=10)
    with pytest.raises(ModelError, match=r"cannot be traced without data, in aten.* of linear"):
        profile_model(source, "image", inputs, {}, [TraceSetting("fp32")], "cuda")


def test_seventy_billion_parameters_take_seconds():
    """Of this process's own time: other work on the machine does not count."""
    started = time.process_time()
    settings = [TraceSetting("bf16", c, tp) for c in (False, True) for tp in (1, 8)]
    profile = traced("llama-3.1-70b", TextInputs(vocab_size=128256, seq_len=4096), *settings)
    assert time.process_time() - started < 5
    assert profile.parameters == count_parameters(find("llama-3.1-70b"))
    assert [(layer.name, layer.count) for layer in profile.layers] == [("embedding", 1), ("block", 80), ("head", 1)]


def by_kind(kernels, kind: str):
    return [kernel for kernel in kernels if kernel.kind == kind]


def test_products_keep_their_shapes(llama):
    block = costs(llama, "bf16", False, 1, 1)["block"]
    products = by_kind(block.forward_kernels, "product")
    rows = Linear(per_sample=LENGTH)
    shapes = {(one.shape[1].fixed, one.shape[2].fixed): one.count for one in products}
    kv = KV * HIDDEN // HEADS
    # queries and output, keys and values, gate and up, down
    assert shapes == {(HIDDEN, HIDDEN): 2, (kv, HIDDEN): 2, (MLP, HIDDEN): 2, (HIDDEN, MLP): 1}
    assert all(one.shape[0] == rows and one.dtype == "bfloat16" for one in products)
    down = next(one for one in products if one.shape[2].fixed == MLP)
    assert down.flops == Linear(per_sample=2 * LENGTH * MLP * HIDDEN)
    assert down.moved_bytes == Linear(fixed=2 * MLP * HIDDEN, per_sample=2 * LENGTH * (MLP + HIDDEN))


def test_attention_knows_its_mask_and_heads(llama):
    (attention,) = by_kind(costs(llama, "bf16", False, 1, 1)["block"].forward_kernels, "attention")
    assert attention.causal and attention.flops == Linear(per_sample=4 * LENGTH * LENGTH * HIDDEN)
    assert [size.at(2) for size in attention.shape] == [2 * HEADS, LENGTH, LENGTH, HIDDEN // HEADS]
    bert = traced("bert-base", TextInputs(vocab_size=256, seq_len=32))
    assert not any(one.causal for one in costs(bert, "bf16", False, 1, 1)["block"].forward_kernels)


def test_step_times_stay_sane_from_one_token_to_a_million():
    cluster = Cluster("h100-80gb", gpus=1)
    rates = rates_of(cluster, "bf16")
    steps = []
    for length in (1, 128, 16_384, 1_048_576):
        text = TextInputs(vocab_size=VOCAB, seq_len=length)
        profile = traced("llama-tiny", text, max_position_embeddings=1_048_576)
        layout = PlannedLayout(zero_stage=1, micro_batch=1)
        steps.append(Timer(profile, cluster, rates).step(layout).step_s)
        flops = model_flops(profile, "bf16")
        assert 0 < flops / steps[-1] < 989e12
    assert steps == sorted(steps) and steps[0] > 1e-4  # launches alone
    assert 50 * steps[2] < steps[3] < 64**2 * steps[2]  # attention grows with the square, the rest with the length


def test_micro_batches_that_run_other_kernels_have_totals_by_kind():
    def line(values):
        return Linear(fixed=values[0], per_sample=values[1] - values[0])

    few = [KernelCall(kind="product", dtype="bfloat16", flops=10, moved_bytes=4, shape=(1, 2, 3))]
    more = [*few, KernelCall(kind="copy", dtype="bfloat16", flops=0, moved_bytes=6)]
    product, copy = kernels_of(few, more, line)
    assert (product.shape, product.flops) == ((), Linear(fixed=10, per_sample=0))
    assert (copy.count, copy.moved_bytes) == (1, Linear(fixed=0, per_sample=6))
    (same,) = kernels_of(few, few, line)
    assert [size.fixed for size in same.shape] == [1, 2, 3]


def test_an_embedding_reads_the_rows_that_it_needs(llama):
    (rows,) = by_kind(costs(llama, "bf16", False, 1, 1)["embedding"].forward_kernels, "embedding")
    assert rows.moved_bytes == Linear(per_sample=2 * 2 * LENGTH * HIDDEN)


class Grouped(nn.Module):
    """Two convolutions of 3 x 3, the second in groups, and a batch norm."""

    def __init__(self, groups: int):
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.second = nn.Conv2d(32, 32, 3, padding=1, groups=groups, bias=False)
        self.norm, self.head = nn.BatchNorm2d(32), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.norm(self.second(self.first(x))).mean((2, 3)))


def depthwise():
    return Grouped(32)


def test_grouped_convolutions_by_hand():
    """2 x pixels x outputs x inputs that make one output; as much again for each gradient, whatever the groups."""
    source = ModelSource(name=f"{__name__}:depthwise", family="custom", origin="package.module:callable", task="custom")
    inputs = ImageInputs(channels=3, size=8, classes=10)
    profile = profile_model(source, "image", inputs, {}, [TraceSetting("fp32")], "cuda")
    layers = profile.costs[setting("fp32", False, 1, 1)]
    forward = [k for layer in layers for k in by_kind(layer.forward_kernels, "convolution")]
    backward = [k for layer in layers for k in by_kind(layer.backward_kernels, "convolution")]
    first, second = 2 * 64 * 32 * 3 * 9, 2 * 64 * 32 * 9
    assert [kernel.flops.per_sample for kernel in forward] == [first, second]
    assert [kernel.flops.per_sample for kernel in backward] == [first, 2 * second]  # pixels get no gradient
    assert [(kernel.groups, kernel.shape[1].fixed, kernel.shape[2].fixed) for kernel in forward] == [
        (1, 32, 27),
        (32, 1, 9),
    ]
    (norm,) = [
        k for layer in layers for k in by_kind(layer.forward_kernels, "normalisation") if k.moved_bytes.at(1) > 1e4
    ]
    assert norm.moved_bytes.per_sample == 3 * 4 * 32 * 64  # read for the statistics, read again, written


@pytest.mark.parametrize("name", ["convnext_tiny", "efficientnet_b0", "mobilenet_v2"])
def test_backward_costs_twice_the_forward(name):
    profile = traced(name, ImageInputs(channels=3, size=64, classes=10), TraceSetting("fp16"))
    layers = profile.costs[setting("fp16", False, 1, 1)]
    forward, backward = (
        sum(flops) for flops in ([c.forward_flops.at(4) for c in layers], [backward_flops(c, 4) for c in layers])
    )
    assert 1.9 * forward < backward <= 2 * forward  # the pixels' gradient is not needed


def test_spread_experts_are_a_rank_s_share_and_send_their_tokens():
    """Of a Mixtral of four experts, two a token, a rank of two holds two of each layer; in fp32 as on CPUs."""
    profile = traced("mixtral-tiny", TextInputs(vocab_size=260, seq_len=64), TraceSetting("fp32", ep=2), device="cpu")
    block, cost = profile.layers[1], profile.costs["fp32/checkpointing=0/tp=1/sp=1/ep=2"][1]
    hidden, experts = 160, sum(block.matrices[-2:])
    assert profile.experts == 4
    assert sum(cost.matrices[place] for place in cost.experts) == experts / 2
    assert sum(cost.matrices) == sum(block.matrices) - experts / 2
    assert cost.ep_alltoall_bytes == Linear(per_sample=2 * 2 * 64 * hidden * 4)  # there and back, of two experts


def test_layers_before_equal_ones_stand_for_themselves():
    """Of a DeepSeek-V2 the first layer has no experts: the last of three that are traced stands for four."""
    inputs, args = TextInputs(vocab_size=102400, seq_len=16), {"num_hidden_layers": 5}
    profile = traced("deepseek-v2-lite", inputs, **args)
    names = ("embedding", "block", "block", "head")
    assert [(layer.name, layer.count) for layer in profile.layers] == list(zip(names, (1, 1, 4, 1), strict=True))
    with torch.device("meta"):
        model = build(find("deepseek-v2-lite"), inputs, args)
    assert profile.parameters == sum(p.numel() for p in model.parameters())


STAGES: dict[str, Any] = {"depths": [1, 1, 3, 1], "image_size": 64}
BLOCK = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
# model type: its class, and a small config; hierarchies of images, hybrids, an encoder with a decoder, a masked model
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "swin": ("SwinForImageClassification", {"embed_dim": 12, "num_heads": [2, 2, 2, 2], "window_size": 2}),
    "convnext": ("ConvNextForImageClassification", {"hidden_sizes": [8, 16, 24, 32]}),
    "hiera": ("HieraForImageClassification", {"embed_dim": 8, "image_size": [64, 64]}),
    "segformer": ("SegformerForImageClassification", {"hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 16}),
    "mamba2": ("Mamba2ForCausalLM", {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2}),
    "falcon_h1": ("FalconH1ForCausalLM", {**BLOCK, **STATES, "mamba_d_ssm": 64, "mamba_n_groups": 2}),
    "gemma4_text": ("Gemma4ForCausalLM", {**BLOCK, "head_dim": 8, "global_head_dim": 16}),
    "pegasus": ("PegasusForConditionalGeneration", {"d_model": 32, "encoder_layers": 4, "decoder_layers": 3}),
    "albert": ("AlbertForMaskedLM", {"hidden_size": 32, "embedding_size": 16, "num_attention_heads": 4}),
}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_profile_has_the_parameters_that_transformers_builds(tmp_path, model_type):
    architecture, own = ARCHITECTURES[model_type]
    images = architecture.endswith("ForImageClassification")
    values: dict[str, Any] = {**(STAGES if images else {**TOKENS, "num_hidden_layers": 4}), **own}
    config = transformers.CONFIG_MAPPING[model_type](architectures=[architecture], **values)
    config.num_labels = 10
    config.save_pretrained(tmp_path)
    source = find(str(tmp_path))
    inputs = assumed_inputs(source, source.task, 32, "image:3x64x64" if images else None, {})
    inputs = replace(inputs, classes=10) if images else inputs
    with torch.device("meta"):
        built = getattr(transformers, architecture)(config)
    device = "cpu" if model_type == "swin" else "cuda"  # whose mask is learned
    profile = profile_model(source, source.task, inputs, {}, [TraceSetting("bf16")], device)
    assert profile.parameters == sum(p.numel() for p in built.parameters())


def test_a_model_that_bf16_does_not_suit_is_refused_with_what_does(tmp_path):
    """SwinV2 multiplies a table in float32, a buffer, by weights in bf16; in DeepSpeed's engine, too."""
    values = STAGES | {"embed_dim": 12, "num_heads": [2, 2, 2, 2], "window_size": 4}
    config = transformers.Swinv2Config(architectures=["Swinv2ForImageClassification"], **values)
    config.save_pretrained(tmp_path)
    inputs = ImageInputs(channels=3, size=64, classes=2)
    with pytest.raises(ModelError, match=r"--precision fp32"):
        traced(str(tmp_path), inputs)
    with torch.device("meta"):
        built = transformers.Swinv2ForImageClassification(config)
    profile = traced(str(tmp_path), inputs, TraceSetting("fp32"))
    assert profile.parameters == sum(p.numel() for p in built.parameters())
