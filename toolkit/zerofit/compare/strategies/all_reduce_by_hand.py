"""Data parallel with an all-reduce written by hand: on a central device, round a ring, along a tree, or by halving.

All of them send 2 (N - 1) times the gradients altogether. They differ in how many rounds that takes, and in the share
of the busiest rank: all of it at the centre, 2 (N - 1) / N of the gradients on a ring and by halving.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError, whole_state
from zerofit.compare.strategies.parameter_server import gradients, set_gradients


def train(work: BenchmarkTask, how: str):
    """Train on batches of which each rank reads its own share."""
    dist.init_process_group(work.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    for x, y in work.batches(rank, ranks):
        model.zero_grad()
        work.loss(model(x), y).backward()
        total = gradients(model).to(work.device)
        {"central": central, "ring": ring, "tree": tree, "halving": halving}[how](total, rank, ranks)
        set_gradients(model, total / ranks)
        optimizer.step()
    return whole_state(model) if rank == 0 else None


def central(vector: Tensor, rank: int, ranks: int) -> None:
    """Add all up on rank 0, which sends everybody the sum: 2 (N - 1) messages through one place."""
    if rank:
        dist.send(vector, 0)
        dist.recv(vector, 0)
        return
    theirs = torch.empty_like(vector)
    for other in range(1, ranks):
        dist.recv(theirs, other)
        vector += theirs
    for other in range(1, ranks):
        dist.send(vector, other)


def ring(vector: Tensor, rank: int, ranks: int) -> None:
    """Pass N parts on to the right, adding up, until each is whole somewhere; then once more: 2 (N - 1) rounds."""
    parts, left, right = vector.tensor_split(ranks), (rank - 1) % ranks, (rank + 1) % ranks
    for turn in range(ranks - 1):
        part = parts[(rank - turn - 1) % ranks]
        part += exchanged(parts[(rank - turn) % ranks], right, part, left)
    for turn in range(ranks - 1):
        part = parts[(rank - turn) % ranks]
        part.copy_(exchanged(parts[(rank - turn + 1) % ranks], right, part, left))


def tree(vector: Tensor, rank: int, ranks: int) -> None:
    """Add up in pairs, then pairs of pairs, and send the sum back down: 2 log2 N rounds of whole vectors."""
    distances = [2**n for n in range((ranks - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            dist.send(vector, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < ranks:
            theirs = torch.empty_like(vector)
            dist.recv(theirs, rank + distance)
            vector += theirs
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            dist.recv(vector, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < ranks:
            dist.send(vector, rank + distance)


def halving(vector: Tensor, rank: int, ranks: int) -> None:
    """Share halves with a partner, quarters with the next one, and put them together again: 2 log2 N rounds."""
    if ranks & (ranks - 1):
        raise NotHereError(f"halving takes a power of two of ranks, and has {ranks}")
    mine, given = vector, []
    for distance in [2**n for n in reversed(range(ranks.bit_length() - 1))]:
        low, high = mine.tensor_split(2)
        mine, theirs = (high, low) if rank & distance else (low, high)
        mine += exchanged(theirs, rank ^ distance, mine, rank ^ distance)
        given.append((mine, theirs, rank ^ distance))
    for mine, theirs, partner in reversed(given):
        theirs.copy_(exchanged(mine, partner, theirs, partner))


def exchanged(tensor: Tensor, to: int, like: Tensor, source: int) -> Tensor:
    """Send a tensor to one rank while another one's comes, of the shape of `like`."""
    arrived = torch.empty_like(like)
    both = [dist.P2POp(dist.isend, tensor, to), dist.P2POp(dist.irecv, arrived, source)]
    for request in dist.batch_isend_irecv(both):
        request.wait()
    return arrived
