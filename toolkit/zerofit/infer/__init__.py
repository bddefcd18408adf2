"""Evaluate a trained model, and generate text. Accelerate spreads the weights over GPUs, host and disk."""
