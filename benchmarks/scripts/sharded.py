"""A model that transformers shards when it loads it: `torchrun --nproc_per_node 8 sharded.py MODEL --tp_size 2`."""

import argparse

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--tp_size", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    sizes = DistributedConfig(tp_size=args.tp_size, fsdp_size=dist.get_world_size() // args.tp_size)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, distributed_config=sizes)
    # torch's default mixes DTensors with the norms' tensors under tensor parallelism, which it then refuses
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for _ in range(20):
        ids = torch.randint(0, model.config.vocab_size, (2, 128), device=model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
