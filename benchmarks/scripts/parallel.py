"""A transformer of plain torch on one device mesh: `torchrun --nproc_per_node 8 parallel.py --tp 2 --cp 2`.

FSDP2 shards the model over the ranks that tensor parallelism and replicas leave.
"""

import argparse
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

VOCABULARY, WIDTH, LAYERS, HEAD, LENGTH = 2048, 256, 4, 32, 256


class Attention(nn.Module):
    attend = staticmethod(partial(nn.functional.scaled_dot_product_attention, is_causal=True))

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 704), nn.Linear(WIDTH, 704), nn.Linear(704, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH), Mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, places):
        x = self.words(ids) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def split(model, mesh):
    """Tensor and sequence parallelism, as in torch's tutorial."""
    outer = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    inner = {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gathered, "mlp": gathered}
    inner |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    inner |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    inner |= dict.fromkeys(("attention.o", "mlp.down"), RowwiseParallel(output_layouts=Shard(1)))
    parallelize_module(model, mesh, outer)
    for block in model.blocks:
        parallelize_module(block, mesh, inner)


def main():
    parser = argparse.ArgumentParser()
    for name in ("replicas", "cp", "tp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--fp32", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rest = dist.get_world_size() // (args.replicas * args.cp * args.tp)
    mesh = init_device_mesh(device, (args.replicas, rest, args.cp, args.tp), mesh_dim_names=("dp", "fsdp", "cp", "tp"))
    if args.cp > 1 and device == "cpu":
        from ring_on_cpu import Ring

        Attention.attend = partial(Ring.apply, mesh["cp"].get_group())
    model = Transformer().to(device)
    if args.tp > 1:
        split(model, mesh["tp"])
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda") if args.offload else OffloadPolicy()}
    if not args.fp32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharding = mesh["fsdp", "cp"]._flatten("sharding")
    options["mesh"] = mesh["dp", "sharding"] if args.replicas > 1 else sharding
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20):
        ids = torch.randint(0, VOCABULARY, (4, LENGTH), device=device)
        labels, places = ids.roll(-1, 1), torch.arange(LENGTH, device=device)
        parts = {"buffers": [ids, labels, places], "buffer_seq_dims": [1, 1, 0]}
        split_length = context_parallel(mesh["cp"], **parts) if args.cp > 1 else nullcontext()
        with split_length, loss_parallel() if args.tp > 1 else nullcontext():
            logits = model(ids, places)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            loss.backward()
        del logits
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())


if __name__ == "__main__":
    main()
