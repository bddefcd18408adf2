"""Horovod: ring all-reduce behind an optimizer that wraps the user's own."""

from zerofit.compare.work import NotHereError, Work, whole_state

HOW = "horovod cannot be imported ({error}); `pip install horovod` builds it from source and needs cmake and a C++ "
HOW += "compiler; its last release is of 2023, and does not compile against torch from 2.1 on"


def train(work: Work):
    """The ranks find each other through the variables that horovodrun sets."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise NotHereError(HOW.format(error=error)) from None
    hvd.init()
    model = work.model()
    optimizer = hvd.DistributedOptimizer(work.optimizer(model.parameters()), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for x, y in work.batches(hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        work.loss(model(x), y).backward()
        optimizer.step()
    return whole_state(model) if hvd.rank() == 0 else None
