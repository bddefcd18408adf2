"""Evaluate a trained model, and generate text, with weights on GPUs, host and disk."""
