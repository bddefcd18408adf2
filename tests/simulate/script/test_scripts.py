"""Scripts as users write them, simulated: what is said of them, and what is refused."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from tests.simulate.script.scripts import CONFIG, facts, only, refused, simulated
from zerofit.app.simulation.scripts import simulate_script
from zerofit.config.ds_json import write_for_trainer
from zerofit.simulate.forecast.result import ALIKE
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import UserError
from zerofit.spec.hybrid_engine import HYBRID_ENGINE_FAULTS

WIDTH = 64
BEGIN = """\
import json, os, sys
import deepspeed
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
"""
ENGINE = (
    BEGIN + "engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config='ds.json')\n"
)
LOOP = ENGINE + """\
for i in range(50):
    x = torch.randn(4, 64).to(engine.device, torch.bfloat16)
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
"""  # fmt: skip
HOLDS = """\
import deepspeed
import torch
from torch.utils.checkpoint import checkpoint

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(1024, 1024, bias=False).requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(1024))

    def forward(self, x):
        return self.frozen(x) * self.scale

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return self.attention(x)

model = torch.nn.ModuleList([Block() for _ in range(4)])
model.forward = lambda x: [x := checkpoint(block, x, use_reentrant=True) for block in model][-1]
zero = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
config["optimizer"] = {"type": "AdamW"}
engine, *_ = deepspeed.initialize(model=model, config=config)
for i in range(50):
    loss = engine(torch.randn(4, 1024, device=engine.device, dtype=torch.bfloat16, requires_grad=True)).sum()
    engine.backward(loss)
    engine.step()
"""
SAVES = LOOP + """\
    torch.save(engine.module.state_dict(), "weights.pt")
    engine.save_checkpoint("checkpoint")
    with open("log.txt", "w") as file:
        file.write(f"{loss.item():.4f}")
"""  # fmt: skip
SAYS = """\
assert torch.cuda.is_available() and torch.cuda.device_count() == 4
where = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
assert engine.device == torch.device("cuda", 1) and torch.distributed.get_backend() == "nccl"
assert where == {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, where
mask = torch.tensor([True, False, True]).cuda()
assert mask.sum().item() == 2 and mask.tolist() == [True, False, True]
assert torch.arange(3, device="cuda")[mask].tolist() == [0, 2]
seen = [torch.zeros(1) for _ in range(8)]
torch.distributed.all_gather(seen, torch.tensor([5.0]))
assert [t.item() for t in seen] == [5.0] * 8
rows = torch.empty(16, dtype=torch.int64, device="cuda")
torch.distributed.all_gather_into_tensor(rows, torch.tensor([3, 4], device="cuda"))
assert rows.view(8, 2).cpu().tolist() == [[3, 4]] * 8
total = torch.tensor([2], device="cuda")
torch.distributed.all_reduce(total)
assert total.item() == 16
"""
ASKS = BEGIN.replace("model = ", "inner = ") + """\
class Asks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return y if y.max() > 3 else -y
model = Asks()
""" + LOOP.removeprefix(BEGIN)  # fmt: skip
GAN = ENGINE + """\
other = torch.nn.Sequential(torch.nn.Linear(64, 64))
second, *_ = deepspeed.initialize(model=other, model_parameters=other.parameters(), config='ds.json')
for i in range(50):
    for one in (engine, second):
        one.backward(one(torch.randn(4, 64).to(one.device, torch.bfloat16)).square().mean())
        one.step()
"""  # fmt: skip
REFERENCE = ENGINE + """\
other = torch.nn.Sequential(torch.nn.Linear(64, 64))
second, *_ = deepspeed.initialize(model=other, config={"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}})
for i in range(50):
    x = torch.randn(4, 64).to(engine.device, torch.bfloat16)
    with torch.no_grad():
        wanted = second(x)
    engine.backward(torch.nn.functional.mse_loss(engine(x), wanted))
    engine.step()
"""  # fmt: skip
BY_HAND = BEGIN + """\
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        mine = torch.zeros(64, dtype=grad.dtype)
        mine.add_((grad * ctx.saved_tensors[0]).sum(0))
        return None, mine

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        return Scaled.apply(x, self.weight)

model = Scale()
""" + LOOP.removeprefix(BEGIN)  # fmt: skip
FLASH = """\
import torch
from torch import nn
from flash_attn import flash_attn_func, flash_attn_varlen_qkvpacked_func

project = nn.Linear(128, 3 * 128, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(project.parameters(), lr=0.1)
bounds = torch.tensor([0, 40, 256], dtype=torch.int32, device="cuda")

def kept(attention, bytes, *args):
    before = torch.cuda.memory_allocated()
    out = attention(*args, causal=True)
    taken = torch.cuda.memory_allocated() - before
    assert taken == bytes, (taken, bytes)
    return out

for _ in range(50):
    qkv = project(torch.randn(4, 64, 128, device="cuda", dtype=torch.bfloat16)).view(4, 64, 3, 4, 32)
    # 2 bytes an element of the output, 4 a row and head, the state of the random numbers
    size = 2 * 4 * 64 * 128 + 4 * 4 * 64 * 4 + 16
    dense = kept(flash_attn_func, size, *qkv.unbind(2))
    packed = kept(flash_attn_varlen_qkvpacked_func, size, qkv.view(256, 3, 4, 32), bounds, 216)
    (dense.float().mean() + packed.float().mean()).backward()
    assert project.weight.grad.shape == project.weight.shape
    optimizer.step()
"""


def test_the_rank_that_keeps_most_gradients_is_found(folder):
    """64 x 64 + 64 twice, in three partitions of 2,774: both matrices and a bias reach into the second."""
    first, found = simulated(LOOP, gpus=3, rank=0), simulated(LOOP, gpus=3)
    assert (found.rank, found.peak_bytes - first.peak_bytes) == (1, 2 * (4096 + 64))


def test_a_loop_is_stopped_and_writes_nothing(folder):
    result = simulated(SAVES)
    seen = facts(result)
    assert [(p.name, p.step) for p in result.phases[:2]] == [("build", -1), ("init", -1)]
    assert {p.step for p in result.phases} == {-1, 0, 1} and seen.facts.ended == "stopped after 2 optimizer steps"
    assert (seen.facts.micro_batch, seen.facts.accumulation, seen.facts.zero_stage) == (4, 2, 2)
    assert seen.facts.parameters == 2 * WIDTH * (WIDTH + 1) == seen.facts.trained_parameters
    assert {path.name for path in folder.iterdir()} == {"ds.json", "train.py"}
    notes = {note.text: note.count for note in seen.facts.notes}
    assert any("the value of a tensor on the device: assumed to be 1.0, at train.py:" in text for text in notes)
    assert not seen.is_upper_bound and result.fits and sum(result.breakdown.values()) == result.peak_bytes
    assert result.to_dict()["run"]["command"] == "python train.py"
    result.plot(folder / "memory.png")
    assert (folder / "memory.png").stat().st_size > 1000


def test_a_script_sees_its_rank_and_its_gpus(folder):
    words = "deepspeed --no_local_rank --num_gpus 4 --num_nodes 2 train.py"
    text = LOOP.replace("for i in", SAYS + "for i in")
    result = simulated(text, words, gpus=4, nodes=2, rank=5)
    assert (result.rank, result.world_size) == (5, 8)


@pytest.mark.parametrize(
    ("launcher", "arguments"),
    [
        ("deepspeed --num_gpus 2", ["--local_rank=0", "a"]),
        ("torchrun --nproc_per_node 2", ["a"]),
        ("accelerate launch --num_processes 2 --use_deepspeed --zero_stage 3", ["a"]),
    ],
)
def test_launchers(folder, launcher, arguments):
    check = f"assert sys.argv[1:] == {arguments!r}, sys.argv\n"
    if launcher.startswith("accelerate"):
        check += "assert os.environ['ACCELERATE_DEEPSPEED_ZERO_STAGE'] == '3', os.environ\n"
    result = simulated(LOOP.replace("for i in", check + "for i in"), f"{launcher} train.py a")
    assert facts(result).facts.optimizer == "FusedAdam"


def test_engines_that_both_train_make_their_steps(folder):
    result = simulated(GAN.replace("range(50)", "range(4)"))
    assert facts(result).facts.engines == 2
    assert [p.name for p in result.phases if p.step == 1] == ["forward", "backward", "step"]


def test_a_reference_engine_makes_no_steps(folder):
    result = simulated(REFERENCE.replace("range(50)", "range(5)"))
    seen = facts(result).facts
    assert (seen.engines, seen.zero_stage, seen.optimizer) == (2, 2, "FusedAdam")
    assert max(p.step for p in result.phases) == 1


def test_a_gradient_that_is_summed_up_on_the_host(folder):
    (folder / "train.py").write_text(BY_HAND)
    result = simulate_script(["python", "train.py"], Cluster("cpu", gpus=2))
    assert result.breakdown["gradients"] >= 2 * WIDTH


def test_flash_attn_keeps_what_its_kernels_keep(folder):
    seen = facts(simulated(FLASH))
    assert any(note.text.startswith("flash_attn: the memory of") and note.count == 4 for note in seen.facts.notes)


@pytest.mark.parametrize("whose", ["own", "a library's"])
def test_compiling_makes_an_upper_bound(folder, whose):
    compiled = {"own": "torch.compile(model)", "a library's": "Accelerator(dynamo_backend='inductor').prepare(model)"}
    text = LOOP.replace("engine, *_", f"from accelerate import Accelerator\nmodel = {compiled[whose]}\nengine, *_")
    assert facts(simulated(text)).is_upper_bound


def test_flash_attention_is_simulated_as_torchs_own(folder):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    made = (
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"config = LlamaConfig(**{sizes}, num_attention_heads=4, attn_implementation='flash_attention_2')\n"
        "model = LlamaForCausalLM(config)\nengine, *_"
    )
    text = LOOP.replace("engine, *_", made, 1).replace("engine(x).square().mean()", "engine(ids, labels=ids).loss")
    text = text.replace(
        "    x = torch.randn(4, 64).to(engine.device, torch.bfloat16)",
        "    ids = torch.ones(4, 64).long().to(engine.device)",
    )
    seen = facts(simulated(text))
    assert seen.is_upper_bound and any("flash_attention_2: simulated as sdpa" in note.text for note in seen.facts.notes)


def test_a_mask_of_unknown_values_is_all_true(folder):
    text = LOOP.replace(".square().mean()", "[torch.rand(4, 64, device='cuda') > 0.5].mean()")
    seen = facts(simulated(text))
    assert seen.is_upper_bound and any("assumed to be all True" in note.text for note in seen.facts.notes)


def test_the_scripts_own_error_comes_out_as_it_is(folder):
    problem = refused(ENGINE + "{'a': 1}['b']\n")
    said = "this is the script's error: KeyError: 'b'\nTraceback (most recent call last):\n  File \"train"
    assert problem.message.startswith(said)
    assert problem.message.endswith("KeyError: 'b'") and problem.where == "train.py:7"
    assert "zerofit/simulate" not in problem.message


def test_an_error_inside_of_a_module_comes_out_as_it_is(folder):
    problem = refused(ASKS.replace("if y.max() > 3", "if self.inner[5]"))
    assert problem.message.startswith("this is the script's error: IndexError: index 5 is out of range\nTraceback")
    assert problem.where == "train.py:13"
    assert problem.message.endswith("IndexError: index 5 is out of range")


ALONE = "run the command without zerofit"
ARGUMENT = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--bf16")
parser.parse_args(["--bf16"])
"""


ATTENTION = """\
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
x = torch.randn(2, 4, 16, 64, device="cuda")
with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
"""


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("import not_there\n", "No module named 'not_there'", "with the packages of"),
        ("print('done')\n", "ended by itself without creating a DeepSpeed engine", "is DeepSpeed switched on?"),
        (
            "print('no rows')\nraise SystemExit(3)\n",
            "called exit(3) before it trained; its last output:\n  no rows",
            ALONE,
        ),
        ("raise SystemExit('no rows')\n", "called exit(no rows) before it trained", ALONE),
        (ARGUMENT, "called exit(2) before it trained; its last output:\n  usage", ALONE),
        (ARGUMENT, "train.py: error: argument --bf16: expected one argument", ALONE),
        (
            "import os\nprint('bye', flush=True)\nos._exit(7)\n",
            "exit code 7 and without a result; its last output:\n  bye",
            "",
        ),
        ("raise KeyboardInterrupt('stop')\n", "this is the script's error", ALONE),
        (
            "import torch\ntorch.tensor([1, 2])[5]\n",
            "this is the script's error: IndexError: index 5 is out of bounds",
            ALONE,
        ),
        ("import numpy\nnumpy.ones(1 << 45)\n", "too little memory", "a larger machine"),
        (
            "import ctypes\nctypes.string_at(0)\n",
            "cannot simulate this: the simulated process crashed with SIGSEGV in",
            "report it",
        ),
        ("import os\nos.kill(os.getpid(), 9)\n", "was killed with SIGKILL", "outside of zerofit"),
        ("import os\nos.kill(os.getppid(), 9)\nos._exit(0)\n", "was killed", "outside of zerofit"),
        ("import torch\ntorch.cuda.get_device_properties(0).later\n", "zerofit cannot simulate this", "report it"),
        ("import torch\ntorch.cuda.device_count(5)\n", "zerofit cannot simulate this", "report it"),
        (
            ENGINE + "x = torch.ones(3, device='cuda')\nassert x.dim() == 2\n",
            "AssertionError: assert x.dim() == 2 (",
            "own error",
        ),
        (ATTENTION, "this is the script's error: RuntimeError: No available kernel. Aborting execution.", ALONE),
        ("import os\nos.mkdir('a')\nos.mkdir('a/b')\nos.rmdir('a')\n", "this is the script's error: OSError", ALONE),
        ("raise AssertionError('to be moved to cuda but got simgpu:0')\n", "zerofit cannot simulate this", "report it"),
        ("raise RuntimeError('to a storage on device \"meta\"')\n", "zerofit cannot simulate this", "report it"),
        (ENGINE, "before its engine ran an optimizer step", "at least one step"),
        (
            ENGINE
            + "def twice(x: torch.Tensor) -> torch.Tensor:\n    return 2 * x\n"
            + "torch.library.custom_op('mine::twice', twice, mutates_args=())(torch.ones(3, device='cuda'))\n",
            "mine::twice in code outside of the model has no shape rule",
            "register_fake",
        ),
        (ENGINE + "torch._C._cuda_getCurrentRawStream(0)\n", "train.py:7 calls the GPU's driver", "this kernel off"),
        (
            ENGINE
            + "from deepspeed.ops.op_builder import QuantizerBuilder as B\n"
            + "B().load().quantize(torch.ones(8, device='cuda'), 1, 8, 0)\n",
            "DeepSpeed's CUDA kernel quantize cannot be simulated",
            "zero_quantized_weights",
        ),
        (ENGINE + "torch.ones(3, device='cuda') @ torch.ones(4, device='cuda')\n", "train.py fails at", "own error"),
        (
            "import torch\ntorch.eye(9, device='cuda').to_sparse()\n",
            "a sparse tensor cannot be simulated",
            "index_add_",
        ),
        (
            "import torch\nsums = torch.sparse.sum(torch.eye(9).to_sparse(), 1)\nprint(sums.values())\nsums.cuda()\n",
            "a sparse tensor cannot be simulated",
            "index_add_",
        ),
        (ENGINE + "torch.bincount(torch.rand(9, device=0).long())\n", "depends on values that only a GPU", "masks"),
    ],
)
def test_refusals(folder, text, said, hint):
    problem = refused(text)
    assert said in problem.message and hint in problem.hint
    assert "machine, too" not in problem.hint  # no real run was seen


PIPELINE = (
    BEGIN
    + """\
from deepspeed.pipe import LayerSpec, PipelineModule
deepspeed.init_distributed()
layers = [LayerSpec(torch.nn.Linear, 64, 64) for _ in range(4)]
model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
config = {**json.load(open("ds.json")), "zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
batch = torch.randn(4, 64, dtype=torch.bfloat16)
for i in range(50):
    print(engine.train_batch(iter([(batch, batch)] * 2)).item())
"""
)


def test_the_first_stage_of_a_pipeline(folder):
    result = simulated(PIPELINE, gpus=4)
    seen = facts(result).facts
    assert (result.layout.pp, result.layout.dp, result.layout.zero_stage) == (2, 2, 1)
    assert seen.parameters == 2 * WIDTH * (WIDTH + 1)  # its half of the layers
    assert [p.name for p in result.phases if p.step == 1] == ["forward", "backward", "step"]
    assert [stage.rank for stage in result.stages] == [0, 2]


LAYERS = "layers = [LayerSpec(torch.nn.Linear, 64, 64) for _ in range(4)]"
SENDERS = """\
class First(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x), torch.ones(4, 3, dtype=torch.int64, device=x.device)


class Middle(torch.nn.Linear):
    def forward(self, both):
        return super().forward(both[0]), both[1]


class Last(torch.nn.Linear):
    def forward(self, both):
        return super().forward(both[0])
"""
OF_THREE = "layers = [LayerSpec({}, 64, 64), LayerSpec({}, 64, 96), LayerSpec({}, 96, 96)]"


@pytest.mark.parametrize(
    ("layers", "more"),
    [
        pytest.param(("torch.nn.Linear",) * 3, 0, id="tensor"),
        pytest.param(("First", "Middle", "Last"), 4 * 3 * 8, id="tuple", marks=pytest.mark.slow),
    ],
)
def test_each_stage_receives_what_the_one_before_sends(folder, layers, more):
    """A layer on each of three stages, of which the second one alone changes the width."""
    text = PIPELINE.replace(LAYERS, f"{SENDERS}\n{OF_THREE.format(*layers)}").replace("num_stages=2", "num_stages=3")
    text = text.replace("[(batch, batch)]", "[(batch, batch.new_zeros(4, 96))]")
    last = simulated(text, gpus=3, rank=2)
    assert facts(last).facts.parameters == 96 * 97
    if more:
        result = simulated(text, gpus=3)
        assert [stage.rank for stage in result.stages] == [0, 1, 2] and result.stages[2].peak_bytes == last.peak_bytes
        assert result.reserved_bytes == max(stage.reserved_bytes for stage in result.stages)
    received = sum(row.bytes for row in last.comm if row.op == "recv" and row.phase == "forward")
    assert received == 2 * (4 * 96 * 2 + more)  # in two micro batches


def test_changes_of_the_json_are_simulated(folder):
    check = "json.load(open(sys.argv[1]))"
    result = simulated(LOOP.replace("config='ds.json'", f"config={check}"), "python train.py ds.json")
    rows = {row.change: row for row in result.knobs()}
    assert list(rows) == [row.change for row in sorted(rows.values(), key=lambda row: row.peak_bytes)]
    third = rows.pop("ds.json: zero_optimization.stage 3")
    offload = rows.pop("ds.json: offload_optimizer to the host")
    assert set(rows) == {"ds.json: buckets of 10,000,000 elements"} and offload.host_node_bytes > third.host_node_bytes
    (folder / "ds.json").write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": 3}}))
    assert simulated(LOOP).peak_bytes == third.peak_bytes


TRAINER = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=256)
rows = [{"input_ids": torch.zeros(64, dtype=torch.long), "labels": torch.zeros(64, dtype=torch.long)}] * 64
args = TrainingArguments("out", per_device_train_batch_size=8, bf16=True, report_to="none")
Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=rows).train()
"""


def test_a_trainer_without_deepspeed_is_tried_with_it(folder, monkeypatch):
    """Each change of TrainingArguments is what the script with these arguments needs; it is written with "auto"."""
    only(monkeypatch, "gradient_checkpointing", "zero3.json", "fsdp")
    plain = simulated(TRAINER, trace="plain.json")
    rows = {row.change: row for row in plain.knobs()}
    changes = ("gradient_checkpointing=True", "deepspeed='zero3.json'")
    assert {f"TrainingArguments({change})" for change in changes} < set(rows)
    best = rows["TrainingArguments(gradient_checkpointing=True, deepspeed='zero3.json')"]
    assert best.config == "zero3"
    write_for_trainer("zero3", folder / "zero3.json")
    assert json.loads((folder / "zero3.json").read_text())["train_micro_batch_size_per_gpu"] == "auto"
    sharded = "fsdp=True, fsdp_config={'version': 2}"
    result = simulated(TRAINER.replace("bf16=True", f"bf16=True, {sharded}"))
    assert result.peak_bytes == rows[f"TrainingArguments({sharded})"].peak_bytes
    assert not any("fsdp" in row.change for row in result.knobs())
    costs = sorted(rows.values(), key=lambda row: row.cost_rank)
    assert all(one.slowdown < other.slowdown + 2 * ALIKE for one, other in pairwise(costs))
    result = simulated(TRAINER.replace("bf16=True", f"bf16=True, {', '.join(changes)}"), trace="best.json")
    assert (result.peak_bytes, result.reserved_bytes) == (best.peak_bytes, best.reserved_bytes)
    before, after = (json.loads(Path(x.trace).read_text())["otherData"]["step_s"] for x in (plain, result))
    assert best.slowdown == pytest.approx(after / before - 1, abs=1e-3)
    assert not any("deepspeed" in row.change for row in result.knobs())  # it has it


def test_weights_that_cannot_be_simulated(folder):
    load = "import transformers\ntransformers.AutoModelForCausalLM.from_pretrained"
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    assert refused(f"{load}('m')\n").message == "weights quantized by awq cannot be simulated"
    problem = refused(f"{load}('nobody/nothing')\n")
    assert "nobody/nothing" in problem.message and "weights are not needed" in problem.hint
    assert os.environ["HF_HUB_OFFLINE"] == "1"


HYBRID = """
import deepspeed, torch
from transformers import AutoConfig, AutoModelForCausalLM
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=512)
sizes |= dict(num_attention_heads=4, num_key_value_heads=4)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {}},
    "zero_optimization": {"stage": 3},
    "hybrid_engine": {"enabled": True, "release_inference_cache": True},
}
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
for _ in range(2):
    engine.eval()
    ids = engine.module.generate(torch.ones(2, 8, dtype=torch.long, device=engine.device), max_new_tokens=8)
    engine.train()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
"""


def test_hybrid_engine_without_kernels_needs_the_memory_of_a_plain_engine(folder):
    hybrid, plain = simulated(HYBRID), simulated(HYBRID.replace('"enabled": True', '"enabled": False'))
    assert hybrid.peak_bytes == plain.peak_bytes
    problem = refused(HYBRID.replace("engine.module.generate", "engine.generate"))
    assert "engine.generate() fails" in problem.message and "engine.module.generate()" in problem.hint


def test_hybrid_engine_is_refused_for_models_that_it_fails_with(folder):
    problem = refused(HYBRID.replace("qwen2", "llama"))
    assert "llama" in problem.message and HYBRID_ENGINE_FAULTS["llama"] in problem.message
    assert "hybrid_engine" in problem.hint and problem.where.endswith(":13")


def test_all_that_is_wrong_with_a_command(folder):
    words = ["torchrun", "--nproc_per_node", "4", "nowhere.py"]
    with pytest.raises(UserError) as caught:
        simulate_script(words, Cluster("h100-80gb", gpus=8), rank=9, steps=0)
    said = [problem.message for problem in caught.value.problems]
    assert said[:2] == ["no script nowhere.py", "the command starts 4 ranks, but --gpus is 8"]
    assert said[2].startswith("no rank 9: there are 8 ranks") and said[3].startswith("--steps 0")


COPIED = """\
import copy, torch, deepspeed

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam"}}
layer = torch.nn.Linear(8, 8)
layer.weight.grad, layer.weight.name_of_mine = torch.ones(8, 8), "first"
other = copy.deepcopy(layer)
assert other.weight.grad is None and not hasattr(other.weight, "name_of_mine") and other.weight is not layer.weight
with deepspeed.zero.Init(config_dict_or_path=CONFIG):
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64), 2)
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32), encoder)
assert all(p.shape == (0,) and not hasattr(p, "ds_shape") for p in encoder.parameters())
engine, *_ = deepspeed.initialize(model=layers, model_parameters=layers.parameters(), config=CONFIG)
engine(torch.randn(5, 1, 32, device=engine.device))
"""


def test_copies_of_partitioned_parameters_are_empty(folder):
    """As on real ranks: the engine then asserts that each parameter is available."""
    problem = refused(COPIED)
    assert "AssertionError" in problem.message and "nn.TransformerEncoder" in (problem.hint or "")


def test_a_note_says_what_holds_frozen_weights(folder):
    held, released = simulated(HOLDS), simulated(HOLDS.replace("use_reentrant=True", "use_reentrant=False"))
    notes = [[note.text for note in one.run.facts.notes if "frozen weights" in note.text] for one in (held, released)]
    assert notes[1] == []
    assert notes[0] == [
        "ZeRO-3 holds 8.00 MiB of frozen weights until backward ends, since checkpoints are recomputed with "
        "use_reentrant=True; with False, it releases them after each block"
    ]
    assert held.peak_phase == "backward"
    # all four blocks' weights, and not the running block's alone
    assert held.peak_bytes - released.peak_bytes == pytest.approx(3 * 1024 * 1024 * 2, rel=0.01)
