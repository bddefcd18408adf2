"""Evaluation and generation with a trained model, its weights spread over GPUs, host memory and disk by Accelerate."""
