"""A training loop of plain torch under FSDP 1, as in its tutorial: `torchrun --nproc_per_node 8 flat_fsdp.py`."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--together", type=int, help="HYBRID_SHARD: ranks that divide a model; default: a node's")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--originals", action="store_true")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    layers = [nn.Sequential(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(8)]
    mesh = None
    if args.together:
        mesh = init_device_mesh(device.type, (dist.get_world_size() // args.together, args.together))
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(
        nn.Sequential(*layers, nn.Linear(args.width, 10)),
        device_id=device,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[args.strategy],
        mixed_precision=mixed if args.mixed else None,
        use_orig_params=args.originals,
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=100_000),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20):
        x, y = torch.randn(args.batch, args.width, device=device), torch.randint(0, 10, (args.batch,), device=device)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
