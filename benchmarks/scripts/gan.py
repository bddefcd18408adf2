"""A GAN with two DeepSpeed engines, as in DeepSpeedExamples."""

import argparse
import json

import deepspeed
import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--config", required=True)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    with open(args.config) as file:
        config = json.load(file)
    w = args.width
    deepspeed.init_distributed()
    generator = nn.Sequential(
        nn.ConvTranspose2d(100, 4 * w, 4, 1, 0), nn.ReLU(),
        nn.ConvTranspose2d(4 * w, 2 * w, 4, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(2 * w, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Conv2d(3, w, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(w, 2 * w, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(2 * w, 1, 3, 1, 0), nn.Flatten(0),
    )  # fmt: skip
    g, *_ = deepspeed.initialize(model=generator, model_parameters=generator.parameters(), config=config)
    d, *_ = deepspeed.initialize(model=critic, model_parameters=critic.parameters(), config=config)
    loss_of = nn.BCEWithLogitsLoss()
    half = next(d.module.parameters()).dtype
    for step in range(20):
        real = torch.randn(config["train_micro_batch_size_per_gpu"], 3, 16, 16).to(d.device, half)
        noise = torch.randn(len(real), 100, 1, 1).to(g.device, half)
        fake = g(noise)
        judged = d(torch.cat([real, fake.detach()]))
        wanted = torch.cat([torch.ones(len(real)), torch.zeros(len(real))]).to(d.device, half).repeat_interleave(4)
        loss_d = loss_of(judged, wanted)
        d.backward(loss_d)
        d.step()
        critic.requires_grad_(False)  # its weights only pass the gradient on
        judged = critic(fake)
        loss_g = loss_of(judged, torch.ones_like(judged))
        g.backward(loss_g)
        critic.requires_grad_(True)
        g.step()
        print(f"step {step} loss of D {loss_d.item():.4f}, of G {loss_g.item():.4f}")


if __name__ == "__main__":
    main()
