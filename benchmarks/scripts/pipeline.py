"""A GPT on the stages of a DeepSpeed pipeline, as in its tutorial: `deepspeed --num_gpus 8 pipeline.py --stages 4`."""

import argparse
import itertools

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from plain import Block
from torch import nn

VOCABULARY, WIDTH, LENGTH = 4096, 256, 128


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids):
        return self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stages", type=int, default=2)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    blocks = [LayerSpec(Block, WIDTH, 8) for _ in range(6)]
    ends = LayerSpec(nn.LayerNorm, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False)
    model = PipelineModule(
        [LayerSpec(Embeddings), *blocks, *ends],
        num_stages=args.stages,
        loss_fn=loss_of,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    ids = torch.randint(0, VOCABULARY, (engine.train_micro_batch_size_per_gpu(), LENGTH))
    batches = itertools.repeat((ids, ids))
    for step in range(20):
        loss = engine.train_batch(batches)
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
