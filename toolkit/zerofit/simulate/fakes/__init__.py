"""Replace the device, its kernels and what reads values, so that real code runs on fake tensors."""
