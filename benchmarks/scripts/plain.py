"""A plain DeepSpeed script as in DeepSpeedExamples: knows nothing of any simulation."""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, s, w))
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self, vocab, width, layers, heads, length):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids, labels):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Text(Dataset):
    def __init__(self, n, vocab, length):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, vocab, (n, length + 1), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i, :-1], self.ids[i, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(max(args.local_rank, 0))
    model = GPT(args.vocab, args.width, args.layers, args.heads, args.length)
    if torch.distributed.get_rank() == 0:
        print("parameters:", sum(p.numel() for p in model.parameters()))
    data = Text(512, args.vocab, args.length)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.micro, sampler=sampler, num_workers=args.workers, drop_last=True)
    device = engine.device
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = 0.0
        for step, (ids, labels) in enumerate(loader):
            ids, labels = ids.to(device), labels.to(device)
            loss = engine(ids, labels)
            engine.backward(loss)
            engine.step()
            running += loss.item()
            if loss.isnan():
                raise SystemExit("loss is NaN")
            if step % 2 == 0 and engine.global_rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} mean {running / (step + 1):.4f}", flush=True)
    engine.save_checkpoint("checkpoint")


if __name__ == "__main__":
    main()
