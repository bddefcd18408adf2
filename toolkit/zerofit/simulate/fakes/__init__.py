"""Replace the device, its kernels, and code that reads values, to run on fake tensors."""
