"""A mixture of experts that ranks share: `torchrun --nproc_per_node 8 experts.py`.

Tokens travel to their experts and back by all-to-all. FSDP2 shards everything else.
"""

import torch
import torch.distributed as dist
from parallel import LENGTH, VOCABULARY, WIDTH, Attention
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

EXPERTS, CHOSEN, LAYERS = 8, 2, 4


class Experts(nn.Module):
    """The experts of this rank; each gets a row of tokens from each rank."""

    def __init__(self, ranks):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS // ranks, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS // ranks, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, tokens, counts):
        parts = tokens.split(counts)
        own = [torch.cat(parts[n :: len(self.up)]) for n in range(len(self.up))]
        weights = zip(self.up.to(tokens.dtype), self.down.to(tokens.dtype), strict=True)
        out = [nn.functional.silu(x @ up) @ down for x, (up, down) in zip(own, weights, strict=True)]
        by_rank = zip(*(x.split(counts[n :: len(self.up)]) for n, x in enumerate(out)), strict=True)
        return torch.cat([part for row in by_rank for part in row])


class Mixture(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts(group.size())

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.gate(tokens).softmax(-1)
        # a real model would choose by its scores; an even choice makes ranks comparable
        chosen = torch.arange(len(tokens) * CHOSEN, device=x.device).remainder(EXPERTS).view(-1, CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        received = all_to_all_single(counts, None, None, self.group)
        sent = counts.view(self.group.size(), -1).sum(1).tolist()
        arrived = received.view(self.group.size(), -1).sum(1).tolist()
        routed = all_to_all_single_autograd(tokens[order // CHOSEN], arrived, sent, self.group)
        back = all_to_all_single_autograd(self.experts(routed, received.tolist()), sent, arrived, self.group)
        weighted = back * scores.gather(1, chosen).flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // CHOSEN, weighted).view_as(x)


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.norm2, self.mixture = nn.RMSNorm(WIDTH), Mixture(group)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mixture(self.norm2(x))


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    blocks = [Block(mesh.get_group()) for _ in range(LAYERS)]
    ends = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    model = nn.Sequential(ends[0], *blocks, ends[1]).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    own = {p for block in blocks for p in block.mixture.experts.parameters()}
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=own)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(20):
        ids = torch.randint(0, VOCABULARY, (4, LENGTH), device=device)
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())


if __name__ == "__main__":
    main()
