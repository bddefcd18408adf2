"""Train one rank: the DeepSpeed engine, the loop, metrics, checkpoints and replay."""
