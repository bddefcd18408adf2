"""Scripts with faults, and the same scripts without them. A fault's code marks the end of its line."""

from __future__ import annotations

ONE, TWO, EIGHT = "python", "torchrun --nproc_per_node 2", "torchrun --nproc_per_node 8"
PLAIN = """\
import torch
from torch import nn
import torch.nn.functional as F

def build():
    return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)])
"""
STEP = """\
    optimizer.step()
    optimizer.zero_grad()  #half-weights
"""
TORCH = PLAIN + """\
model = build().cuda()  #unused-search
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for i in range(50):
    x = torch.randn(4096, 2048, device="cuda")
    loss = model(x).square().mean()  #kept-outputs
    loss.backward()  #kept-graph
""" + STEP  # fmt: skip
OFFLOADED = PLAIN + """\
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
dist.init_process_group("cuda:nccl,cpu:gloo")
with torch.device("meta"):
    model = build()
fully_shard(model, offload_policy=CPUOffloadPolicy())
model.to_empty(device="cpu")
for weight in model.parameters():
    nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)  #repeated-draws
optimizer = torch.optim.AdamW(model.parameters())
for i in range(50):
    loss = model(torch.randn(64, 2048, device="cuda")).square().mean()
    loss.backward()
""" + STEP  # fmt: skip
CONFIG = """\
import deepspeed
config = dict(train_micro_batch_size_per_gpu=8, bf16=dict(enabled=True), zero_optimization=dict(stage=3),
              optimizer=dict(type="AdamW", params=dict(lr=1e-4)))
"""
LOOP = """\
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)  #frozen-states
for i in range(50):
    x = torch.randn(8, 2048, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(x).square().mean())
    engine.step()
"""
DEEPSPEED = PLAIN + CONFIG + "model = build()\n" + LOOP
LOGITS = PLAIN + """\
model = nn.Sequential(nn.Embedding(32000, 256), nn.Linear(256, 32000)).cuda().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(50):
    ids = torch.randint(0, 32000, (1024,), device="cuda")
    logits = model(ids).float()  #fp32-logits
    loss = F.cross_entropy(logits, ids)
    loss.backward()
""" + STEP  # fmt: skip
PADDED = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, vocab_size=8000)
model = LlamaForCausalLM(LlamaConfig(**sizes)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(50):
    ids, mask = torch.ones(16, 512, dtype=torch.long), torch.zeros(16, 512, dtype=torch.long)
    mask[:, :128] = 1
    model(input_ids=ids.cuda(), attention_mask=mask.cuda(), labels=ids.cuda()).loss.backward()  #padding
""" + STEP  # fmt: skip
EXPERTS = PLAIN + CONFIG + """\
class Routed(nn.Module):  #expert-leaves
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(2048, 4)
        self.experts = nn.ModuleList([nn.Linear(2048, 2048) for _ in range(4)])

    def forward(self, x):
        scores, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows = chosen == n
            out[rows] = expert(x[rows])
        return out * scores[:, None]

with deepspeed.zero.Init(config_dict_or_path=config):
    model = nn.Sequential(nn.Linear(2048, 2048), Routed())  #whole-model
""" + LOOP  # fmt: skip
ZERO_INIT, PLAIN_MODEL = "with deepspeed.zero.Init(config_dict_or_path=config):", "if True:"
CHECKPOINTED = PLAIN + """\
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(256, 64), nn.Linear(64, 64), nn.Linear(64, 256)
        self.adapter = nn.Linear(64, 64)
        self.embed.requires_grad_(False), self.block.requires_grad_(False)

    def forward(self, ids):
        adapted = lambda x: self.block(x) + self.adapter(x)
        return self.head(checkpoint(adapted, self.embed(ids), use_reentrant=True))

model = Net().cuda()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for i in range(50):
    ids = torch.ones(4, 64, dtype=torch.long).cuda()
    model(ids).square().mean().backward()  #lost-gradients
""" + STEP  # fmt: skip


def variant(text: str, *pairs: tuple[str, str]) -> str:
    """Return the script with each first text replaced by the second one; the first must be in it."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def before(line: str) -> tuple[str, str]:
    """Return the change that adds a line before the loop."""
    return "for i in", f"{line}\nfor i in"


ZERO_1 = variant(DEEPSPEED, ("stage=3", "stage=1"))
WRAPPED = """\
torch.distributed.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(build().cuda(){})"""
DDP = ("model = build().cuda()", WRAPPED.format(", find_unused_parameters=True"))
PINNED = "kept = torch.empty(1 << 36, pin_memory={})  #pinned-memory"
HALF = ("cuda()", "cuda().bfloat16()"), ('device="cuda")', 'device="cuda", dtype=torch.bfloat16)')
APPENDED = ("loss = model(x)", "losses.append(model(x))  #kept-outputs\n    loss = losses[-1]")
# two buffers that the micro batches of a step share
REUSED = (
    ("loss = model(x)", "losses[i % 2 :] = [model(x)]\n    loss = losses[-1]"),
    (STEP, STEP.replace("    ", "    if i % 4 == 3: ")),
)
LATE = ("    loss.b", "    optimizer.zero_grad()  #kept-gradients\n    loss.b"), (STEP, "    optimizer.step()\n")
WEIGHTS = 8 * 2048 * 2048 * 4  # bytes in fp32
OUTPUT = 4096 * 2048 * 4  # of a layer, in fp32
COPY = "import copy\nema = copy.deepcopy(model)"
BEFORE = before(f"{COPY}  #second-copy\n{PINNED.format(True)}")
# launcher, script, and its faults with their bytes: computed by hand, or None
FAULTY = (
    (
        ONE,
        variant(TORCH, BEFORE, APPENDED, *LATE),
        {"second-copy": WEIGHTS, "pinned-memory": 4 << 36, "kept-outputs": OUTPUT, "kept-gradients": WEIGHTS},
    ),
    (
        TWO,  # half of the bytes; the input of each layer, and the output that is squared
        variant(TORCH, *HALF, DDP, (".backward()", ".backward(retain_graph=True)")),
        {"half-weights": WEIGHTS, "unused-search": 0, "kept-graph": 9 * OUTPUT // 2},
    ),
    (ONE, LOGITS, {"fp32-logits": 1024 * 32000 * 4}),
    (ONE, PADDED, {"padding": None}),
    # 3 numbers in fp32 for each of six layers' weights, on two ranks
    (
        TWO,
        variant(ZERO_1, before("model[:6].requires_grad_(False)")),
        {"frozen-states": WEIGHTS * 6 // 8 * 3 // 2},
    ),
    # a linear layer and four experts with biases, and the gate
    (
        EIGHT,
        variant(EXPERTS, (ZERO_INIT, PLAIN_MODEL)),
        {"whole-model": 4 * (5 * 2048 * 2049 + 4 * 2049), "expert-leaves": 0},
    ),
    (ONE, CHECKPOINTED, {"lost-gradients": 0}),
    (TWO, OFFLOADED, {"repeated-draws": 0}),
)
AUTOCAST = "    with torch.autocast('cuda', torch.bfloat16):\n        loss ="
GETS_GRADIENT = "model.embed.register_forward_hook(lambda *seen: seen[-1].requires_grad_(True))"
# the faults that a script avoids -> launcher, script
HEALTHY = {
    "second-copy kept-graph kept-outputs kept-gradients pinned-memory": (
        ONE,
        variant(
            TORCH,
            (".backward()", ".backward(retain_graph=True)\n    loss.backward()\n    losses.append(loss.detach())"),
            before(f"{COPY}.cpu()\n{PINNED.format(False)}"),
        ),
    ),
    "kept-outputs": (ONE, variant(TORCH, *REUSED)),
    "half-weights unused-search": (
        TWO,
        variant(TORCH, (DDP[0], WRAPPED.format("")), ("    loss = ", AUTOCAST + " ")),
    ),
    "fp32-logits": (ONE, variant(LOGITS, ("(ids).float()", "(ids)"), ("(logits,", "(logits.float(),"))),
    "padding": (ONE, variant(PADDED, ("] = 1", "] = 1; mask[0] = 1"))),
    "frozen-states": (TWO, variant(ZERO_1, ("engine,", "model[:6].requires_grad_(False)\nengine,"))),
    "whole-model expert-leaves": (
        TWO,
        variant(EXPERTS, ("engine,", "deepspeed.utils.set_z3_leaf_modules(model, [Routed])\nengine,")),
    ),
    "lost-gradients": (ONE, variant(CHECKPOINTED, before(GETS_GRADIENT))),
    "repeated-draws": (TWO, variant(OFFLOADED, ("offload_policy=CPUOffloadPolicy()", ""), ('"cpu"', '"cuda"'))),
}
