"""Train on one device: the reference for all other strategies."""

from zerofit.compare.benchmark_task import BenchmarkTask, state_on_cpu


def train(work: BenchmarkTask):
    """Run forward, backward and step."""
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    for x, y in work.batches():
        optimizer.zero_grad()
        work.loss(model(x), y).backward()
        optimizer.step()
    return state_on_cpu(model)
