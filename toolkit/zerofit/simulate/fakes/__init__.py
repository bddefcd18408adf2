"""Replace the device, its kernels and code that reads values, so that real code runs on fake tensors."""
