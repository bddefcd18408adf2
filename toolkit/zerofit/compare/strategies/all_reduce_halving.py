"""Train data parallel with a hand-written all-reduce by halving.

It sends as few bytes as a ring, in as few rounds as a tree.
"""

from torch import Tensor

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError
from zerofit.compare.strategies.all_reduce_central import train_with
from zerofit.compare.strategies.all_reduce_ring import exchanged


def train(work: BenchmarkTask):
    """Train with gradients that are added up by halving."""
    return train_with(work, halving)


def halving(vector: Tensor, rank: int, ranks: int) -> None:
    """Sum halves with a partner, then quarters with the next one, and so on; then reassemble."""
    if ranks & (ranks - 1):
        raise NotHereError(f"halving needs 2, 4, 8, ... ranks (a power of two), not {ranks}")
    own, exchanges = vector, []
    # With 8 ranks the partners are 4, 2 and 1 apart. Each round halves the part that a rank still adds up, so in total
    # it sends as little as in a ring, in log2 N instead of N - 1 rounds. Reassembling takes as many rounds.
    for distance in [2**n for n in reversed(range(ranks.bit_length() - 1))]:
        low, high = own.tensor_split(2)
        own, theirs = (high, low) if rank & distance else (low, high)
        own += exchanged(theirs, rank ^ distance, own, rank ^ distance)
        exchanges.append((own, theirs, rank ^ distance))
    for own, theirs, partner in reversed(exchanges):
        theirs.copy_(exchanged(own, partner, theirs, partner))
