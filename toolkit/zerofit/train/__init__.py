"""Training: the DeepSpeed engine, the loop, metrics; one file for the pipeline engine and one for GANs."""
