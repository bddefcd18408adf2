"""Training: the DeepSpeed engine, the loop and metrics. The pipeline engine and GANs have a file each."""
