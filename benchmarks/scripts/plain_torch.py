"""A training loop of plain torch, as in its tutorials; with torchrun by DistributedDataParallel or FSDP 2."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--ddp", nargs="*", metavar="OPTION", help="names of its options that are switched on")
    parser.add_argument("--unused", action="store_true", help="have layers that no forward uses")
    parser.add_argument("--fsdp", action="store_true")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    layers = [nn.Sequential(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(args.width, 10)).to(device)
    if args.unused:
        model[0][1].spare = nn.Linear(args.width, args.width, device=device)  # a Sequential would run it
    if args.ddp is not None:
        model = DistributedDataParallel(model, [local] if gpu else None, **dict.fromkeys(args.ddp, True))
    if args.fsdp:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20):
        x, y = torch.randn(args.batch, args.width, device=device), torch.randint(0, 10, (args.batch,), device=device)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
