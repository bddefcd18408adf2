"""zerofit: train CNNs and Transformers that no longer fit, through the DeepSpeed engine."""
