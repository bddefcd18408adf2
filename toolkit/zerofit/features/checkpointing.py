"""What backward recomputes of each block: nothing, a part (`selective`), or everything."""

from __future__ import annotations

from typing import Literal

Checkpointing = bool | Literal["selective"]
# words of a layout that uses it
WORDS: dict[Checkpointing, str] = {False: "", "selective": "selective checkpointing", True: "checkpointing"}
HELP = {"selective": "keep the results of attention and of every second matrix product, recompute the rest"}
# how often collectives inside blocks run in backward, relative to forward: selective keeps what they return, except
# for all-gathers, which are half of tensor parallelism's
REPEATED: dict[Checkpointing, float] = {False: 1, "selective": 1.5, True: 2}


def alternatives(wanted: Checkpointing | None) -> tuple[Checkpointing, ...]:
    """Return the kinds to compare: those that shipped profiles have, and "selective" on request."""
    return (False, "selective", True) if wanted == "selective" else (False, True)
