"""Train with Horovod: ring all-reduce in a wrapper around the user's optimizer."""

import os

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - torch documents it

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError, state_on_cpu

HOW = """horovod cannot be imported ({error}). Its last release, 0.28.1, builds with torch 2.14.1 only after changes:
horovod/torch/CMakeLists.txt:23 requires the CUDA toolkit if torch is built for CUDA, and CMakeLists.txt:19 sets
C++14, but torch/all.h:5 requires C++20 or later. docs/compare.md lists the lines to change"""


def train(work: BenchmarkTask):
    """Train on ranks that find each other through a server next to rank 0, as under horovodrun."""
    try:
        import horovod.torch as hvd  # pyright: ignore[reportMissingImports] - rarely installed: see HOW
        from horovod.runner.http.http_server import RendezvousServer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NotHereError(" ".join(HOW.format(error=error).split())) from None
    first, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(first, port, work.job.ranks, work.rank == 0)
    if work.rank == 0:
        store.set("server", str(RendezvousServer().start()))
    os.environ |= _place(work.rank, work.job.ranks, first, store.get("server").decode())
    hvd.init()
    model = work.model()
    optimizer = hvd.DistributedOptimizer(work.optimizer(model.parameters()), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for x, y in work.batches(hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        work.loss(model(x), y).backward()
        optimizer.step()
    return state_on_cpu(model) if hvd.rank() == 0 else None


def _place(rank: int, ranks: int, server: str, port: str) -> dict[str, str]:
    """Return the variables that horovodrun sets for a rank, with one rank per host."""
    # as in horovod/runner/gloo_run.py:66 and 203
    place = {"HOSTNAME": f"rank-{rank}", "RANK": rank, "SIZE": ranks, "CROSS_RANK": rank, "CROSS_SIZE": ranks}
    place |= {"LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    place |= {"GLOO_IFACE": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    place |= {"GLOO_RENDEZVOUS_ADDR": server, "GLOO_RENDEZVOUS_PORT": port}
    return {f"HOROVOD_{name}": str(value) for name, value in place.items()}
