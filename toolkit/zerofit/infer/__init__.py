"""Evaluation and generation with a trained model. Accelerate spreads its weights over GPUs, host memory and disk."""
