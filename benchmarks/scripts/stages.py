"""A transformer on the stages of torch's pipeline: `torchrun --nproc_per_node 8 stages.py --pp 4 --schedule 1F1B`.

FSDP2 shards each stage over the ranks that stages leave.
"""

import argparse

import torch
import torch.distributed as dist
from parallel import LENGTH, VOCABULARY, WIDTH, Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

LAYERS, MICRO_BATCHES = 8, 8


class Stage(nn.Module):
    """Some of the blocks; the first stage has the embeddings, the last one the head."""

    def __init__(self, number, stages):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS // stages)])
        self.words = nn.Embedding(VOCABULARY, WIDTH) if number == 0 else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if number == stages - 1 else None

    def forward(self, x):
        x = self.words(x) if self.words else x
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.head else x


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def numbers_of(rank, ranks, kind):
    """Return the numbers of a rank's stages: two of them, in the shape of a V for zero-bubble schedules."""
    if not issubclass(kind, PipelineScheduleMulti):
        return [rank]
    return [rank, 2 * ranks - 1 - rank if "V" in kind.__name__ else rank + ranks]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--schedule", default="1F1B")
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (args.pp, dist.get_world_size() // args.pp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "fsdp"))
    rank, kind = mesh["pp"].get_local_rank(), get_schedule_class(args.schedule)
    numbers = numbers_of(rank, args.pp, kind)
    parts = [Stage(number, args.pp * len(numbers)).to(device) for number in numbers]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)
    for part in parts if shape[1] > 1 else ():
        for block in part.blocks:
            fully_shard(block, mesh=mesh["fsdp"], mp_policy=policy, reshard_after_forward=False)
        fully_shard(part, mesh=mesh["fsdp"], mp_policy=policy, reshard_after_forward=False)
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(part, number, args.pp * len(numbers), device, group=group)
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = kind(stages if len(numbers) > 1 else stages[0], MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
    for step in range(20):
        ids = torch.randint(0, VOCABULARY, (MICRO_BATCHES, LENGTH), device=device)
        losses = []
        inputs = (ids,) if 0 in numbers else ()
        if args.pp * len(numbers) - 1 in numbers:
            schedule.step(*inputs, target=ids.roll(-1, 1), losses=losses, return_outputs=False)
        else:
            schedule.step(*inputs, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        print(step, *(loss.item() for loss in losses))


if __name__ == "__main__":
    main()
