"""One device: what all others are held against."""

from zerofit.compare.work import Work, whole_state


def train(work: Work):
    """Forward, backward, step."""
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    for x, y in work.batches():
        optimizer.zero_grad()
        work.loss(model(x), y).backward()
        optimizer.step()
    return whole_state(model)
