"""Horovod: ring all-reduce behind an optimizer that wraps the user's own."""

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError, whole_state

HOW = """horovod cannot be imported ({error}). Its last release, 0.28.1, does not build with torch 2.14.1 as it is:
horovod/torch/CMakeLists.txt:23 wants the CUDA toolkit wherever torch is built for CUDA, and CMakeLists.txt:19 sets
C++14, which torch/all.h:5 refuses (C++20 or later). docs/compare.md names the lines with which more of it compiles"""


def train(work: BenchmarkTask):
    """Train on ranks that find each other through the variables that horovodrun sets."""
    try:
        import horovod.torch as hvd  # pyright: ignore[reportMissingImports] - seldom installed: see HOW
    except ImportError as error:
        raise NotHereError(" ".join(HOW.format(error=error).split())) from None
    hvd.init()
    if hvd.size() != work.job.ranks:
        raise NotHereError(f"horovod finds {hvd.size()} of {work.job.ranks} ranks: horovodrun has not started them")
    model = work.model()
    optimizer = hvd.DistributedOptimizer(work.optimizer(model.parameters()), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for x, y in work.batches(hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        work.loss(model(x), y).backward()
        optimizer.step()
    return whole_state(model) if hvd.rank() == 0 else None
