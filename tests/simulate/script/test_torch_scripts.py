"""Scripts of plain torch, without DeepSpeed: its loops, autocast, DistributedDataParallel and FSDP."""

from __future__ import annotations

import pytest

from tests.simulate.script.scripts import facts, refused, simulated
from zerofit.app.simulation.scripts import simulate_script
from zerofit.simulate.forecast.result import Simulation
from zerofit.spec.cluster import Cluster
from zerofit.spec.overhead import CUBLAS_HOPPER_BYTES

TORCH = """\
import os
import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
model = DistributedDataParallel(torch.nn.Linear(256, 256).cuda(local), device_ids=[local])
optimizer = torch.optim.AdamW(model.parameters(), foreach=None)
for i in range(50):
    loss = model(torch.randn(8, 256, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TWO = "torchrun --nproc_per_node 2 train.py"
PINNED = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

kept = torch.randn(1 << 20).pin_memory()
assert kept.is_pinned() and kept.pin_memory() is kept and not torch.randn(3).is_pinned()
assert torch.tensor([1, 2], pin_memory=True).tolist() == [1, 2]
for made in (
    torch.empty(5, pin_memory=True),
    torch.zeros(5, pin_memory=True),
    torch.tensor([1, 2], pin_memory=True),
    torch.empty_like(kept, pin_memory=True),
    kept.new_empty(4, pin_memory=True),
    torch.empty(1 << 23, pin_memory=True),
):
    assert made.is_pinned()
on_device = kept.to("cuda", non_blocking=True)
assert not on_device.is_pinned() and not on_device.cpu().is_pinned()
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for (x,) in DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8, pin_memory=True):
    assert x.is_pinned()
    model(x.cuda(non_blocking=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# nanoGPT, nanochat and torchvision's references ask in these ways whether a launcher has started them
ALONE = """\
import os
import torch

assert int(os.environ.get("RANK", -1)) == -1 and os.getenv("LOCAL_RANK") is None
assert not any(name in os.environ for name in ("RANK", "WORLD_SIZE")) and os.environ["RANK"] == "0"
os.environ["LOCAL_RANK"] = "0"
assert os.environ.get("LOCAL_RANK") == os.environ.setdefault("RANK", "0") == os.getenv("RANK") == "0"
torch.distributed.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(4):
    model(torch.randn(8, 8, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# the peak that the script itself reads: since its own reset, not since the phase began
PEAKS = """\
import torch

model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(4):
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == start
    large = torch.empty(1 << 25, device="cuda")
    del large
    model(torch.randn(8, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.cuda.max_memory_allocated() == start + 4 * (1 << 25)
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == start + 4 * (1 << 25)
"""
# tensors that C++ code makes on a GPU; the types are those of many older scripts
MADE = """\
import torch

class Image(torch.Tensor):
    pass

image = torch.ones(2, 4).as_subclass(Image)
assert type(image.clone()) is Image and image.cuda().tolist() == [[1] * 4] * 2
temperature = torch.tensor(0.5, device="cuda", requires_grad=True)
assert temperature.is_leaf and temperature.is_cuda
with torch.device("cuda"):
    assert torch.tensor([1, 2]).is_cuda and torch.tensor(3.0, requires_grad=True).is_leaf and torch.zeros(1).is_cuda
    assert torch.tensor([1, 2], device="cpu").tolist() == [1, 2] and torch.as_tensor([3], device="cuda").is_cuda
ids = torch.arange(3, device="cuda")
copied = torch.tensor(ids, device="cuda")
copied += 1
assert ids.tolist() == [0, 1, 2] and copied.tolist() == [1, 2, 3]
before = torch.cuda.memory_allocated()
large = torch.tensor(torch.randn(1 << 20, device="cuda"), device="cuda")
assert torch.cuda.memory_allocated() == before + large.nbytes
assert not ids.equal(copied) and ids.equal(torch.arange(3, device="cuda")) and large.equal(other=large)
Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor
valid = Tensor(5, 1).fill_(1.0)
assert valid.is_cuda and valid.shape == (5, 1) and Tensor([1.0, 2.0]).tolist() == [1, 2]
for kind in (Tensor, "torch.cuda.FloatTensor"):
    made = torch.ones(3, dtype=torch.float64).type(kind)
    assert made.is_cuda and made.dtype == torch.float32 and made.type() == "torch.cuda.FloatTensor"
on_host = torch.ones(3).type(torch.float16)
assert on_host.type() == "torch.HalfTensor" and on_host.type("torch.LongTensor").tolist() == [1, 1, 1]
assert torch.cuda.memory_stats()["active_bytes.all.peak"] >= torch.cuda.memory_stats()["active_bytes.all.current"]
optimizer = torch.optim.AdamW([temperature])
for _ in range(3):
    (temperature * 2).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SPLIT = """\
import torch
first, second = torch.nn.Linear(64, 64).to("cuda:0"), torch.nn.Linear(64, 64).cuda(1)
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
for _ in range(3):
    second(first(torch.randn(4, 64, device=0)).to("cuda:1")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CLOSURE = """\
import os
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.norm = nn.SyncBatchNorm(64)

    def forward(self, *, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.norm(x)

torch.distributed.init_process_group("nccl")
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rows = iter(range(8, 99))

def computed():
    optimizer.zero_grad()
    for _ in range(3):
        loss = net(x=torch.randn(next(rows), 64, device="cuda")).square().mean()
        loss.backward()
    return loss

for _ in range(50):
    optimizer.step(computed)
"""
AUTOCAST = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda", enabled=KIND == torch.float16)
x = torch.randn(8, 256, device="cuda")
taken, cast, sample = torch.cuda.memory_allocated, 2 * 257 * 256, 2 * 8 * 256
for i in range(50):
    y = loss = None
    before = taken()
    with torch.autocast("cuda", dtype=KIND):
        y = model[0](x)
        assert i == 0 or taken() - before == cast + 2 * sample  # weights; input and output
        assert y.dtype == KIND and model[1](y).dtype == torch.float32  # by the list of a GPU's ops
        before = taken()
        loss = model(x).square().mean()
        assert taken() - before < cast  # weights are cast once
    assert taken() - before < 0  # and that is gone
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""

LAZY = """\
import torch
from torch import nn

model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(512), nn.LazyLinear(10))
if "WHERE" == "host":
    model(torch.randn(2, 3, 16, 16))
model.cuda()
for i in range(50):
    loss = model(torch.randn(16, 3, 16, 16, device="cuda")).square().mean()
    if i == 0:
        optimizer = torch.optim.AdamW(model.parameters())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
KNOWN = {"LazyConv2d(8": "Conv2d(3, 8", "LazyBatchNorm2d(": "BatchNorm2d(8", "LazyLinear(512": "Linear(1568, 512"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plain"))
        return simulated(TORCH, TWO)


def test_plain_torch(plain):
    size = 4 * (256 * 256 + 256)
    assert facts(plain).facts.engines == 0 and plain.layout.zero_stage == 0
    assert plain.breakdown["parameters"] == pytest.approx(size, rel=0.01)
    assert plain.breakdown["communication buckets"] == pytest.approx(size, rel=0.01)  # allocated with the wrapper
    assert plain.breakdown["optimizer state"] == pytest.approx(2 * size, rel=0.01)
    assert any(row.op == "allreduce" and row.bytes == size for row in plain.comm)


OPTIONS = {
    "unused": "find_unused_parameters=True",
    "static": "static_graph=True",
    "views": "gradient_as_bucket_view=True",
}


def test_options_of_distributed_data_parallel(folder, plain):
    """The reducer's map of used parameters goes to the device by way of pinned memory, in C++."""
    kept, size = {p.name: p.end_bytes for p in plain.phases if p.step == 1}, 4 * (256 * 256 + 256)
    for name, option in OPTIONS.items():
        text = TORCH.replace("[local])\n", f"[local], {option})\n")
        found = simulated(text, TWO)
        used = 0 if name == "views" else 4 * 2  # the map, of two parameters
        views = size if name == "views" else 0  # gradients are then parts of the buckets
        ends = {p.name: p.end_bytes - used for p in found.phases if p.step == 1}
        assert ends == {**kept, "backward": kept["backward"] - views, "step": kept["step"] - views}, name
        # at the peak, a gradient is there before the reducer copies it into its bucket
        buckets = found.breakdown.get("communication buckets", 0)
        assert buckets == pytest.approx(0 if name == "views" else size, rel=0.01), name
        assert buckets + found.breakdown["gradients"] == pytest.approx(2 * size, rel=0.01), name
        calls = [(row.op, row.phase, row.count, row.bytes) for row in found.comm if row.op == "allreduce"]
        again = name == "unused"  # a static graph's map is sent in the first step alone
        assert calls == [("allreduce", "backward", 1 + again, size + again * used)], name


HOOK = """
def halved(group, bucket):
    sent = bucket.buffer().half()
    work = torch.distributed.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))

"""


@pytest.mark.parametrize(
    "hook", ["(None, halved)", "(None, fp16_compress_hook)", None], ids=["own", "of torch", "built in"]
)
def test_communication_hooks_run(folder, plain, hook):
    text = "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook\n" + TORCH
    builtin = "model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)\n"
    register = f"model.register_comm_hook{hook}\n" if hook else builtin
    result = simulated(text.replace("optimizer =", HOOK + register + "optimizer ="), TWO)
    size = 4 * (256 * 256 + 256)
    assert {row.bytes for row in result.comm if (row.op, row.phase) == ("allreduce", "backward")} == {size // 2}
    last = {p.name: p for p in result.phases if p.step == 1}
    before = {p.name: p for p in plain.phases if p.step == 1}
    assert last["step"] == before["step"] and not facts(result).facts.notes
    # at the end of backward the copy in half precision comes on top; at the plain peak, the last gradient's product
    assert last["backward"].peak_bytes - last["backward"].end_bytes == pytest.approx(size // 2, rel=0.02)


def test_power_sgd_compresses_within_the_simulated_steps(folder, plain):
    text = "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power\n" + TORCH
    state = "power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=1000)"
    hook = f"model.register_comm_hook({state}, power.powerSGD_hook)\n"
    result = simulated(text.replace("optimizer =", hook + "optimizer ="), TWO)
    factor, bias = 4 * 2 * 256, 4 * 256
    sent = [row.bytes for row in result.comm if (row.op, row.phase) == ("allreduce", "backward")]
    assert set(sent) == {2 * factor + bias}  # P and Q of the weight; the bias is not compressed
    ends = [next(p.end_bytes for p in run.phases if (p.name, p.step) == ("step", 1)) for run in (result, plain)]
    errors = 4 * (256 * 256 + 256)
    assert ends[0] - ends[1] == pytest.approx(errors + 2 * factor, rel=0.02)


def test_an_optimizer_that_holds_another_one_makes_one_step(folder):
    """What ZeroRedundancyOptimizer does after its own optimizer's step is part of the step."""
    zero = "zero(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True)"
    text = "from torch.distributed.optim import ZeroRedundancyOptimizer as zero\n" + TORCH.replace(".cuda(local)", "")
    text = text.replace("torch.optim.AdamW(model.parameters(), foreach=None)", zero).replace(', device="cuda"', "")
    (folder / "train.py").write_text(text.replace(", device_ids=[local]", ""))
    result = simulate_script(TWO.split(), Cluster("cpu", gpus=2))
    order = [(p.name, p.step) for p in result.phases]
    assert order == [("build", -1), *((name, n) for n in range(2) for name in ("forward", "backward", "step"))]
    assert sum(row.bytes for row in result.comm if (row.op, row.phase) == ("broadcast", "step")) == 4 * 257 * 256
    # weights, a bucket, gradients; both moments of the rank's own parameter, the weight
    assert result.phases[-1].end_bytes == pytest.approx(4 * (3 * 257 * 256 + 2 * 256 * 256), rel=0.001)


def test_pinned_memory_however_it_is_asked_for(folder):
    result = simulated(PINNED, gpus=1)
    assert result.host_bytes["pinned"] >= 4 * (1 << 20) and not facts(result).facts.notes


def test_tensors_are_made_as_on_a_gpu(folder):
    assert facts(simulated(MADE, gpus=1)).facts.optimizer == "AdamW"


def test_a_script_without_launcher_finds_no_rank(folder):
    assert facts(simulated(ALONE, gpus=1)).facts.optimizer == "SGD"


def test_a_script_reads_the_peak_since_its_own_reset(folder):
    assert facts(simulated(PEAKS, gpus=1)).facts.optimizer == "SGD"


def test_a_second_gpu_of_a_process_is_noted(folder):
    notes = facts(simulated(SPLIT, gpus=2)).facts.notes
    text = "tensors on cuda:1: counted on cuda:0, since one GPU per process is simulated, at train.py"
    assert {note.text for note in notes} == {f"{text}:{line}" for line in (2, 5)} and all(note.bound for note in notes)


UNKNOWN_MEMORY = """\
import torch
from torch import nn
from torch.func import jvp

net = nn.Linear(64, 32).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(50):
    out = net(torch.randn(16, 64, device="cuda"))
    torch.linalg.eigh(out.mT @ out)
    if i == 1:
        jvp(torch.sin, (out,), (out,))
    (out.mean() + out.prod(0).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_memory_that_zerofit_cannot_count_is_noted(folder):
    seen = facts(simulated(UNKNOWN_MEMORY, gpus=1))
    notes = {note.text: (note.bound, note.missing) for note in seen.facts.notes}
    assert notes == {
        "aten::_linalg_eigh: its workspace is not counted": (False, True),
        "gradient of aten::prod: an upper bound, as if an element were 0, at train.py:12": (True, False),
        "forward-mode gradients (jvp, jacfwd, hessian): an upper bound": (True, False),
    }
    assert seen.lacks_memory and not seen.is_upper_bound  # memory is missing from the bound
    failing = UNKNOWN_MEMORY.replace("\nnet", "\ndef check(i):\n    assert i < 1\n\nnet")
    problem = refused(failing.replace("    optimizer.step()", "    check(i)\n    optimizer.step()"), gpus=1)
    assert problem.kind == "script"  # none of these notes is on sizes


def test_steps_by_a_closure_with_several_micro_batches_and_recomputation(folder):
    result = simulated(CLOSURE, TWO)
    seen = facts(result).facts
    assert seen.accumulation == 3 and seen.shapes == tuple((n, 64) for n in range(8, 14))
    order = [p.name for p in result.phases]
    assert order == ["build", *2 * ["forward", "backward", "step"]]
    assert not facts(result).is_upper_bound
    assert {row.op for row in result.comm} >= {
        "allgather_base",
        "allreduce",
    }  # of the norm: statistics, their gradients


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_autocast_is_the_precision_and_casts_by_the_gpus_list(folder, kind):
    seen = facts(simulated(AUTOCAST.replace("KIND", f"torch.{kind}"), gpus=1)).facts
    assert seen.precision == {"bfloat16": "bf16 autocast", "float16": "fp16 autocast"}[kind] and not seen.notes


@pytest.mark.parametrize("where", ["host", "device"])
def test_lazy_modules_become_what_they_would_be_with_known_shapes(folder, where):
    known = LAZY.replace("LazyLinear(10", "Linear(512, 10")
    for lazy, plain in KNOWN.items():
        known = known.replace(lazy, plain)
    one, other = (simulated(text.replace("WHERE", where), gpus=1) for text in (LAZY, known))
    assert "Lazy" not in known and facts(one).facts.parameters == facts(other).facts.parameters
    assert [p for p in one.phases if p.step == 1] == [p for p in other.phases if p.step == 1]
    assert one.breakdown == other.breakdown and one.breakdown["gradients"] > 4 * 1568 * 512


def sharded(wrapped: str) -> str:
    text = TORCH.replace("DistributedDataParallel(torch", "(torch")
    return text.replace(", device_ids=[local])\n", f")\nfrom torch.distributed.fsdp import *\n{wrapped}\n")


def test_fully_sharded_models_keep_their_part(folder):
    result = simulated(sharded("fully_shard(model)"), "torchrun --nproc_per_node 4 train.py", gpus=4)
    part = 4 * (256 * 256 + 256) // 4
    last = {p.name: p for p in result.phases if p.step == 1}
    beside = 2 * CUBLAS_HOPPER_BYTES  # forward's thread and backward's
    # weights, gradients, both moments
    assert last["forward"].start_bytes - beside == pytest.approx(4 * part, rel=0.01)
    assert last["step"].end_bytes - beside == pytest.approx(4 * part, rel=0.01)
    assert last["backward"].peak_bytes - beside > 7 * part  # gathered weights beside
    assert {row.op for row in result.comm} >= {"allgather_base", "reduce_scatter_base"}


def test_a_mesh_of_devices_makes_the_process_group(folder):
    """As in PyTorch's tutorials of FSDP 2: nothing else is called before."""
    mesh = 'from torch.distributed.device_mesh import init_device_mesh\nmesh = init_device_mesh("cuda", (4,))'
    with_group = sharded("fully_shard(model)")
    alone = with_group.replace('torch.distributed.init_process_group("nccl")', mesh).replace(
        "(model)", "(model, mesh=mesh)"
    )
    results = [simulated(text, "torchrun --nproc_per_node 4 train.py", gpus=4) for text in (with_group, alone)]
    assert "init_process_group" not in alone
    assert results[0].phases == results[1].phases
    assert [row.to_dict() for row in results[0].comm] == [row.to_dict() for row in results[1].comm]


@pytest.mark.parametrize(
    "wrapped",
    [
        "FullyShardedDataParallel(model)",
        "FullyShardedDataParallel(model, None, ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True)",
        "FullyShardedDataParallel(model.cpu(), device_id=local)",
    ],
)
def test_flat_sharding_keeps_its_part(folder, wrapped):
    model = f"model = {wrapped}"
    result = simulated(sharded(model), "torchrun --nproc_per_node 4 train.py", gpus=4)
    part = 4 * (256 * 256 + 256) // 4
    last = {p.name: p for p in result.phases if p.step == 1}
    assert last["step"].end_bytes - 2 * CUBLAS_HOPPER_BYTES == pytest.approx(4 * part, rel=0.01)
    assert last["backward"].peak_bytes - 2 * CUBLAS_HOPPER_BYTES > 7 * part
    assert not facts(result).is_upper_bound


def test_flat_sharding_with_offload_keeps_all_on_the_host(folder):
    model = "model = FullyShardedDataParallel(model.cpu(), cpu_offload=CPUOffload(offload_params=True))"
    result = simulated(sharded(model), "torchrun --nproc_per_node 4 train.py", gpus=4)
    whole = 4 * (256 * 256 + 256)
    last = {p.name: p for p in result.phases if p.step == 1}
    assert last["step"].end_bytes - 2 * CUBLAS_HOPPER_BYTES < 0.1 * whole
    assert result.host_phases["step"] >= whole  # weights, gradients, both moments, of a fourth each


def test_flat_sharding_with_original_parameters_on_cpus(folder):
    text = TORCH.replace("DistributedDataParallel(torch", "(torch").replace(".cuda(local)", "")
    options = "use_orig_params=True, device_id=torch.device('cpu')"
    wrapped = f"from torch.distributed.fsdp import *\nmodel = FullyShardedDataParallel(model, {options})"
    text = text.replace(", device_ids=[local])\n", f")\n{wrapped}\n").replace(', device="cuda"', "")
    (folder / "train.py").write_text(text)
    result = simulate_script(["torchrun", "--nproc_per_node", "2", "train.py"], Cluster("cpu", gpus=2))
    (last,) = [p for p in result.phases if (p.name, p.step) == ("step", 1)]
    # weights, their gradients, both moments
    assert last.end_bytes == pytest.approx(4 * 4 * (256 * 256 + 256) // 2, rel=0.02)


TENSOR_PARALLEL = """\
import os
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
WORDS, WIDTH = 1001, 256  # the rows of the embedding do not divide evenly
with torch.device("meta"):
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WORDS, bias=False)
    )
plan = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "1": SequenceParallel(),
    "2": SequenceParallel(),
    "3": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
parallelize_module(model, mesh["tp"], plan)
fully_shard(model, mesh=mesh["dp"])
model.to_empty(device="cuda")
for parameter in model.parameters():
    nn.init.normal_(parameter)  # a draw of a sharded tensor
assert model[0].weight.device == torch.device("cuda", torch.cuda.current_device()) and model[0].weight.is_cuda
optimizer = torch.optim.AdamW(model.parameters())
for i in range(50):
    ids = torch.randint(0, WORDS, (4, 64), device="cuda")
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("rank", "rows"), [(0, 251), (3, 250)])  # of 501 and 500 rows of the tensor parallel ranks
def test_sharded_and_tensor_parallel_models_keep_their_rows(folder, rank, rows):
    """Where shards are uneven; real ranks of gloo allocate the same."""
    result = simulated(TENSOR_PARALLEL, "torchrun --nproc_per_node 4 train.py", gpus=4, rank=rank)
    kept = 2 * 4 * rows * 256 + 2 * 4 * 128  # both tables and the norm, in fp32; 128 rows of 256
    last = {p.name: p for p in result.phases if p.step == 1}
    assert last["step"].end_bytes - 2 * CUBLAS_HOPPER_BYTES == pytest.approx(4 * kept, rel=0.002)  # gradients, moments
    sent = {(row.op, row.group_size): row for row in result.comm if (row.phase, row.step) == ("forward", 1)}
    assert not facts(result).is_upper_bound  # an embedding's rows on other ranks are filled by a mask
    words = 4 * 64 * 256 * 4  # of the embedding, which each rank has for a part of the words
    assert sent["reduce_scatter_base", 2].bytes == words
    assert sent["allgather_base", 2].bytes == pytest.approx(2 * kept + words + 4 * 4 * 64 * 1001, rel=0.003)


HIGHER_ORDER = """\
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

attend, LENGTH = ATTEND, 256

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(128, 384, device="cuda")

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cuda")
        before = torch.cuda.memory_allocated()
        x = attend(q, k, v, block_mask=mask)
        kept.append(torch.cuda.memory_allocated() - before)
        x = torch.cond(x.sum() > 0, lambda x: x.relu(), lambda x: x, (x,))
        with torch.inference_mode():  # a known counter, of an op that only calls other ops
            assert torch.full((), 3, device="cuda").item() == 3
        with torch.no_grad():
            zero = torch.zeros((), dtype=torch.int64, device="cuda")
            rounds, _ = while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, y * 2), (zero, x))
        assert rounds.item() == 5
        carried, rows = scan(lambda c, row: (c + row, c * row), x.new_zeros(2, 4, 32), x[:, :, :4], dim=2)
        return carried, rows

model, kept = Net(), []
optimizer = torch.optim.AdamW(model.parameters())
for i in range(50):
    carried, rows = model(torch.randn(2, LENGTH, 128, device="cuda"))
    (carried.square().mean() + rows.square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert SMALLEST <= kept[-1] <= LARGEST, kept
"""


LOADED = """\
import sys
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained("tiny")
model = AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float32, PLAN)
optimizer = torch.optim.SGD(model.parameters(), foreach=False)
for _ in range(9):
    ids = torch.zeros(2, 8, dtype=torch.long, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
"""
NORMS = 5 * 64  # parameters, in 5 layers
MATRICES = 2 * 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128)


@pytest.mark.parametrize(
    ("plan", "kept"),
    [
        ("distributed_config=DistributedConfig(tp_size=1, fsdp_size=4)", MATRICES // 4 + NORMS // 4),
        ("distributed_config=DistributedConfig(tp_size=2, fsdp_size=2)", MATRICES // 4 + NORMS // 2),
        ("tp_plan='auto'", MATRICES // 4 + NORMS),
    ],
)
def test_a_model_that_transformers_shards_keeps_its_part(folder, plan, kept):
    result = simulated(LOADED.replace("PLAN", plan), "torchrun --nproc_per_node 4 train.py", gpus=4)
    frequencies, ids = 2 * 16 // 2 * 4, 2 * 8 * 8  # bytes of two buffers of the rotary embedding, and of the batch
    assert result.phases[0].end_bytes == 4 * kept + frequencies + ids


@pytest.mark.parametrize("compiled", [True, False])
def test_bodies_of_higher_order_ops_run(folder, compiled):
    """A compiled attention keeps its output and two figures a row; otherwise torch stores the scores."""
    attend = "torch.compile(flex_attention)" if compiled else "flex_attention"
    rows = 2 * 4 * 256
    fused, scores = 4 * rows * 32 + 2 * 4 * rows, 4 * rows * 256
    bounds = (fused, fused + 64) if compiled else (fused, fused + 4 * scores)
    text = HIGHER_ORDER.replace("ATTEND", attend)
    result = simulated(text.replace("SMALLEST", str(bounds[0])).replace("LARGEST", str(bounds[1])), gpus=1)
    peak = max(p.peak_bytes for p in result.phases if p.name == "forward")
    assert (peak > 2 * CUBLAS_HOPPER_BYTES + 2 * scores) != compiled
    assert any("torch.cond of an unknown value" in note.text for note in facts(result).facts.notes)


PIPELINE = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleKIND

dist.init_process_group("nccl")
device, rank, ranks = torch.device("cuda", int(os.environ["LOCAL_RANK"])), dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(device)
numbers = range(rank, OF_RANK * ranks, ranks)
layers = [nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(2 + number)]).to(device) for number in numbers]
stages = [PipelineStage(layer, n, OF_RANK * ranks, device) for n, layer in zip(numbers, layers)]
schedule = ScheduleKIND(stages if OF_RANK > 1 else stages[0], 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()])
for i in range(50):
    x = torch.randn(32, 1024, device=device)
    inputs, target = (x,) if rank == 0 else (), {"target": x} if rank == ranks - 1 else {}
    schedule.step(*inputs, **target, losses=[]) if target else schedule.step(*inputs)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("kind", "of_rank"), [("1F1B", 1), ("Interleaved1F1B", 2)])
def test_stages_of_torchs_pipelines(folder, kind, of_rank):
    """Each rank receives what the one before was seen to send; real ranks of gloo allocate the same."""
    text = PIPELINE.replace("KIND", kind).replace("OF_RANK", str(of_rank))
    result = simulated(text, TWO)
    assert result.rank == 1 and [stage.rank for stage in result.stages] == [0, 1]  # the later one has more layers
    layers = sum(2 + number for number in range(1, 2 * of_rank, 2))
    assert facts(result).facts.parameters == layers * 1025 * 1024
    micro, both = 8 * 1024 * 4, 2 * of_rank - 1  # bytes that stages exchange, and how often with each micro batch
    sent = [row for row in result.comm if (row.op, row.step) == ("send", 1)]
    assert facts(result).facts.accumulation == 4  # micro batches, in both orders of their forwards
    assert sum(row.count for row in sent) == 4 * both and sum(row.bytes for row in sent) == 4 * both * micro


def test_a_zero_bubble_schedule_has_backward_phases(folder):
    """It calls no torch.autograd.backward: weights' gradients come after the inputs'."""
    text = PIPELINE.replace("KIND", "InterleavedZeroBubble").replace("OF_RANK", "2")
    result = simulated(text, TWO, rank=0)
    phases = [p for p in result.phases if p.step == 0]
    assert [p.name for p in phases[-2:]] == ["backward", "step"] and phases[0].name == "forward"
    gradients = 4 * (2 + 4) * 1025 * 1024  # of stages 0 and 2
    grown = phases[-1].start_bytes - phases[0].start_bytes
    assert grown == pytest.approx(gradients + 2 * CUBLAS_HOPPER_BYTES, rel=0.02)


def test_stages_exchange_dtensors(folder):
    """A stage allocates its part of what it receives; real ranks of gloo allocate the same."""
    found = []
    for sent, received in (("x", "x"), ("DTensor.from_local(x, mesh['tp'], [Shard(1)])", "x.to_local()")):
        text = HANDED_ON.replace("SENT", sent).replace("RECEIVED", received)
        found.append(simulated(text, "torchrun --nproc_per_node 4 train.py", gpus=4))
        assert [stage.rank for stage in found[-1].stages] == [0, 2]
    plain, dtensors = found
    assert [p.peak_bytes for p in plain.phases] == [p.peak_bytes for p in dtensors.phases]
    assert plain.stages == dtensors.stages and plain.comm == dtensors.comm


HANDED_ON = """\
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "tp"))
number = mesh["pp"].get_local_rank()

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024)

    def forward(self, x):
        x = self.layer(RECEIVED if number else x)
        return x if number else SENT

part, group = Part().cuda(), mesh["pp"].get_group()
stage = PipelineStage(part, number, 2, torch.device("cuda"), group=group, get_mesh=lambda *_: mesh["tp"])
schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(part.parameters())
for i in range(50):
    x = torch.randn(32, 512, 1024, device="cuda")
    schedule.step(target=x) if number else schedule.step(x)
    optimizer.step()
    optimizer.zero_grad()
"""


ROUTED = """\
import torch
from torch import nn

gate, experts = nn.Linear(64, 4), nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
nn.ModuleList([gate, experts]).cuda()
optimizer = torch.optim.SGD([*gate.parameters(), *experts.parameters()], lr=0.1)
for i in range(50):
    x = torch.randn(32, 64, device="cuda")
    out, (weights, chosen) = torch.zeros_like(x), gate(x).softmax(-1).topk(2, -1)
    for number, expert in enumerate(experts):
        rows, places = torch.where(chosen == number)
        assert rows.shape == (16,)  # an equal share of 32 x 2 choices
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
    known = torch.tensor([0, 1, 1, 0], device="cuda")
    assert known.nonzero().flatten().tolist() == [1, 2] and known.unique().tolist() == [0, 1]
    assert torch.randint(9, (5, 3), device="cuda").unique().shape == (15,) and x[x > 0].shape == (32 * 64,)
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_shapes_that_depend_on_unknown_values_are_bounded(folder):
    seen = facts(simulated(ROUTED, gpus=1))
    assert seen.is_upper_bound
    said = "; ".join(note.text for note in seen.facts.notes)
    assert "all experts get the same number of tokens" in said
    assert "aten._unique2 of unknown values: assumed to return its largest output" in said


OBSERVED = """\
import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

torch.cuda.memory._record_memory_history(max_entries=1000)
torch.cuda.set_sync_debug_mode("warn")
assert torch.cuda.temperature() >= 0 and torch.cuda.memory_snapshot() == []
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.LazyLinear(4)).cuda()
images = [torch.randn(3, 8, 8, device="cuda") for _ in range(2)]
model(torch.stack(images))
optimizer = torch.optim.AdamW(model.parameters())

class Detector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = model

    def forward(self, images, targets):
        return {"loss": self.body(torch.stack(images)).square().mean()}

detector, ready = Detector(), tensorboard_trace_handler("traces")
torch.cuda.profiler.start()
second = schedule(wait=1, warmup=0, active=1)
recorded = dict(on_trace_ready=ready, profile_memory=True, with_stack=True)
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=second, **recorded) as observed:
    for i in range(50):
        detector(images, [{}, {}])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        observed.step()
"""


def test_profilers_and_memory_snapshots_are_accepted(folder):
    """The images of a detector are a list, and its length is the micro batch."""
    result = simulated(OBSERVED, gpus=1)
    assert facts(result).facts.micro_batch == 2 and facts(result).facts.ended == "stopped after 2 optimizer steps"
    assert {path.name for path in folder.iterdir()} == {"ds.json", "train.py"}


def test_objects_of_another_rank_are_unknown(folder):
    """Rank 1 cannot know what rank 0 sends. The message does not blame the script."""
    send = """\
names = [{"run": "abc"}] if torch.distributed.get_rank() == 0 else [None]
torch.distributed.broadcast_object_list(names, src=0)
assert names[0]["run"] == "abc"
"""
    problem = refused(TORCH.replace("for i in", send + "for i in"), TWO, gpus=2, rank=1)
    assert problem.kind == "not-simulated" and "rank 1 receives objects from rank 0 at train.py:10" in problem.message


VARLEN = """\
import torch
from torch import nn
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from transformers.utils import is_flash_attn_2_available
from flash_attn import flash_attn_func, flash_attn_with_kvcache

activate_flash_attention_impl("FA3")
assert current_flash_attention_impl() == "FA3" and is_flash_attn_2_available()
net = nn.Linear(64, 3 * 256, bias=False, dtype=torch.bfloat16, device="cuda")
optimizer = torch.optim.SGD(net.parameters())
starts = torch.tensor([0, 1000, 3000, 4096], dtype=torch.int32, device="cuda")
for _ in range(9):
    q, k, v = net(torch.randn(4096, 64, dtype=torch.bfloat16, device="cuda")).view(4096, 3, 4, 64).unbind(1)
    out = varlen_attn(q, k, v, starts, starts, 2000, 2000, window_size=(-1, 0))
    gradient, = torch.autograd.grad(out.sum(), out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, q, gradient)
    kept = torch.cuda.max_memory_allocated() - before
    assert kept == EXPECTED, kept
    net(torch.randn(1, 64, dtype=torch.bfloat16, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_the_backward_of_ragged_attention_accumulates_in_fp32(folder):
    gradients = 3 * 4096 * 4 * 64 * 2 + 4096 * 4 * 4 + 16  # zeros for the log-sum-exp and the random state, too
    accumulated = 4 * (4096 + 3 * 128) * 4 * (64 + 1)  # FlashAttention 2: gradients of queries, and row sums
    assert simulated(VARLEN.replace("EXPECTED", str(gradients + accumulated)), gpus=1).fits


GATHERED = """\
import inspect
import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer

assert {"model", "processing_class"} <= set(inspect.signature(Trainer.__init__).parameters)
dist.init_process_group("nccl")
mine = torch.tensor(1234567890123, device="cuda")
all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(all_of_them, mine)
assert [one.item() for one in all_of_them] == [1234567890123] * 2
net = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(net.parameters())
dist.all_gather(all_of_them, net.weight.sum().long())
for _ in range(9):
    net(torch.randn(8, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_gathered_values_are_known_and_signatures_are_kept(folder):
    assert simulated(GATHERED, "torchrun --nproc_per_node 2 train.py").fits
