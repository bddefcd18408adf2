"""Run one rank of a job: the real trainer and DeepSpeed engine on fake tensors."""
