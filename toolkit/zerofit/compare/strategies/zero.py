"""Train with DeepSpeed: divide optimizer states (stage 1), gradients (2), parameters (3)."""

import deepspeed
import torch.distributed as dist

from zerofit.compare.benchmark_task import BenchmarkTask, state_on_cpu
from zerofit.train.engines import import_muon


def train(work: BenchmarkTask, stage: int, offload: bool = False):
    """Train with DeepSpeed's engine, which runs backward and step."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # only for inference; builds for 45 s
    deepspeed.init_distributed(work.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    # DeepSpeed would warn about torch's SGD or replace it, but all strategies must use the same SGD.
    config = {"train_micro_batch_size_per_gpu": work.job.global_batch // ranks, "zero_optimization": zero}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    config["gradient_clipping"] = 0.0  # DeepSpeed's default is 1.0
    model = work.model()
    # Every engine of DeepSpeed imports Muon (runtime/zero/utils.py:70). Without this call, the import takes seconds.
    import_muon()
    engine, *_ = deepspeed.initialize(model=model, optimizer=work.optimizer(model.parameters()), config=config)
    for x, y in work.batches(rank, ranks):
        engine.backward(work.loss(engine(x), y))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        return state_on_cpu(model) if rank == 0 else None
