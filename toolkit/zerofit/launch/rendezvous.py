"""The rendezvous of a launcher's processes before their run.

They report to the first process, which sends orders. The rendezvous uses torch's TCPStore on a known port: torchrun's
store, or else a store that the first process opens.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from zerofit.launch.world import World
from zerofit.spec.errors import Problem, RunFailed, UserError

PATIENCE_S = 300.0  # seconds for all processes to arrive, each after importing torch
LEAVING_S = 10.0  # seconds for all processes to read the last order
LOOK_S = 0.1
REPORT_EVERY_S = 5.0
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Keep torch, imported within the block, from logging every connection attempt."""
    is_set = LOG_LEVEL in os.environ
    os.environ.setdefault(LOG_LEVEL, "ERROR")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[LOG_LEVEL]


# The store has keys of text, which all processes see. A job's keys have its name and the number of the start:
#
#   rank-N      each process: its host, cores, GPUs and versions     `report`, `reports`
#   order-0..   the first process: see FOLDER, spec FILE, exit CODE  `order`, `orders`
#   answer-N    each process, after an order that needs one          `answer`, `answers`
#   left        counts the processes that have read the last order   `leave`, `dismiss`
#
# The first process stays until all have left, since the store ends with it (unless it is torchrun's).
class Rendezvous:
    """One process's side of the rendezvous."""

    def __init__(self, world: World):
        """Open or connect to the store.

        Raises UserError if its port is taken, RunFailed if it is unreachable.
        """
        with quiet_torch():
            from torch._C._distributed_c10d import PrefixStore, TCPStore

        self._world, self._orders = world, itertools.count()
        host, port = world.master
        opens = world.rank == 0 and not world.agent_store
        patience = timedelta(seconds=PATIENCE_S)
        try:
            store = TCPStore(host, port, is_master=opens, timeout=patience, wait_for_workers=False)
        except RuntimeError as error:
            raise (self._taken(error) if opens else self._unreachable(error)) from None
        self._store = PrefixStore(f"zerofit/{world.job}/{world.attempt}", store)
        # the prefix survives restarts by torchrun, like its store
        self._lasting = PrefixStore(f"zerofit/{world.job}", store) if world.agent_store else None

    def report(self, facts: object) -> None:
        """Send facts about this process to the first process."""
        self._store.set(f"rank-{self._world.rank}", json.dumps(facts))

    def reports(self, show: Callable[[str], None]) -> list[Any]:
        """Return the processes' reports in the order of ranks. Raises RunFailed if some are missing."""
        keys = [f"rank-{rank}" for rank in range(self._world.size)]
        return [json.loads(text) for text in self._all(keys, PATIENCE_S, show)]

    def order(self, **order: object) -> None:
        """Send an order to the other processes."""
        self._store.set(f"order-{next(self._orders)}", json.dumps(order))

    def orders(self) -> Iterator[dict[str, Any]]:
        """Yield the first process's orders.

        Raises RunFailed if the first process does not arrive or has died.
        """
        for number in itertools.count():
            try:
                if number == 0:
                    self._all(["rank-0"], PATIENCE_S, lambda _: None)
                # `check` returns at once. `get` and `wait` wait in C++ code, where Ctrl-C has no effect.
                while not self._store.check([f"order-{number}"]):
                    time.sleep(LOOK_S)
                yield json.loads(self._store.get(f"order-{number}"))
            except RuntimeError as error:
                raise self._unreachable(error) from None

    def answer(self, text: str) -> None:
        """Answer an order of the first process."""
        self._store.set(f"answer-{self._world.rank}", text)

    def answers(self) -> dict[int, str]:
        """Return the other processes' answers by rank. Raises RunFailed if some are missing."""
        ranks = range(1, self._world.size)
        texts = self._all([f"answer-{rank}" for rank in ranks], PATIENCE_S, lambda _: None)
        return {rank: text.decode() for rank, text in zip(ranks, texts, strict=True)}

    def leave(self) -> None:
        """Confirm to the first process that its last order was read."""
        self._store.add("left", 1)

    def dismiss(self, code: int) -> None:
        """Order the other processes to exit with this code, and wait until they have read it."""
        self.order(exit=code)
        deadline = time.monotonic() + LEAVING_S
        while self._store.add("left", 0) < self._world.size - 1 and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def keep(self, name: str, text: str) -> None:
        """Store a text for later starts of this job, if torchrun's store is used."""
        if self._lasting:
            self._lasting.set(name, text)

    def kept(self, name: str) -> str | None:
        """Return a text stored by an earlier start; None if there is no such text."""
        return self._lasting.get(name).decode() if self._lasting and self._lasting.check([name]) else None

    def _all(self, keys: Sequence[str], patience_s: float, show: Callable[[str], None]) -> list[bytes]:
        """Wait until all keys exist, and return their values. `show` gets messages while it waits."""
        deadline, reported = time.monotonic() + patience_s, time.monotonic()
        while not self._store.check(list(keys)):
            missing = [key.rpartition("-")[2] for key in keys if not self._store.check([key])]
            who = f"{len(missing)} of {self._world.size} processes (rank {', '.join(missing[:5])})"
            if missing and time.monotonic() > deadline:
                message = f"{who} did not report within {patience_s:.0f} s"
                hint = f"every process started by {self._world.launcher} has to run the same command"
                raise RunFailed(Problem(kind="not-started", message=message, hint=hint))
            if missing and time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                show(f"waiting for {who}")
            time.sleep(LOOK_S)
        return self._store.multi_get(list(keys))

    def _taken(self, error: RuntimeError) -> UserError:
        host, port = self._world.master
        message = f"rank 0 cannot listen at {host} port {port}: {str(error).splitlines()[0]}"
        hint = "set another MASTER_PORT: deepspeed --master_port, torchrun --master-port, mpirun -x MASTER_PORT=N"
        return UserError(Problem(kind="port-in-use", message=message, hint=hint, where="MASTER_PORT"))

    def _unreachable(self, error: RuntimeError) -> RunFailed:
        host, port = self._world.master
        lost = f"rank {self._world.rank} cannot reach rank 0 at {host} port {port}"
        message = f"{lost}: {str(error).splitlines()[0]}"
        hint = "see rank 0's output; if rank 0 is running, set MASTER_ADDR to an address of it that this host can reach"
        return RunFailed(Problem(kind="leader", message=message, hint=hint, where="MASTER_ADDR"))
