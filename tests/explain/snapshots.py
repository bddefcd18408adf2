"""Memory snapshots as torch writes them, made by hand: a model that trains in steps of known sizes."""

from __future__ import annotations

from typing import Any

MIB = 1 << 20
SITE = "/opt/env/lib/python3.11/site-packages/"


def stack(*calls: tuple[str, int, str]) -> list[dict[str, Any]]:
    """Frames, innermost first."""
    return [{"filename": file, "line": line, "name": name} for file, line, name in calls]


MAIN = ("/home/me/train.py", 61, "main")
LOADED = stack(
    (f"{SITE}torch/nn/modules/module.py", 1300, "_apply"), (f"{SITE}torch/nn/modules/module.py", 1, "to"), MAIN
)
FORWARD = stack((f"{SITE}transformers/models/llama/modeling_llama.py", 164, "forward"), MAIN)
LOSS = stack((f"{SITE}torch/nn/functional.py", 3400, "cross_entropy"), MAIN)
ADAM = stack((f"{SITE}torch/optim/adam.py", 150, "_init_group"), (f"{SITE}torch/optim/adam.py", 200, "step"), MAIN)
KEPT = stack(("/home/me/train.py", 66, "log_losses"), MAIN)
BACKWARD: list[dict[str, Any]] = []  # a GPU's backward runs in a thread without Python frames


class Recorder:
    """Plays an allocator: each block has a segment of its own."""

    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self.next = 0x7F0000000000

    def alloc(self, size: int, frames: list[dict[str, Any]]) -> int:
        address, self.next = self.next, self.next + size
        self.live[address] = size, frames
        self.trace.append({"action": "alloc", "addr": address, "size": size, "stream": 0, "frames": frames})
        return address

    def free(self, address: int) -> None:
        size, _ = self.live.pop(address)
        for action in ("free_requested", "free_completed"):
            self.trace.append({"action": action, "addr": address, "size": size, "stream": 0, "frames": []})

    def ran_out(self, size: int, frames: list[dict[str, Any]], free: int = 3 * MIB) -> None:
        self.trace.append({"action": "oom", "size": size, "device_free": free, "stream": 0, "frames": frames})

    def snapshot(self, unused: int = 0) -> dict[str, Any]:
        """The snapshot; `unused` bytes are in a segment without a block in use."""
        segments = [
            segment(
                address,
                [{"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": f}],
            )
            for address, (size, f) in self.live.items()
        ]
        if unused:
            segments.append(
                segment(0x1000, [{"address": 0x1000, "size": unused, "requested_size": 0, "state": "inactive"}])
            )
        return {"segments": segments, "device_traces": [self.trace], "allocator_settings": {}}


def segment(address: int, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    total = sum(block["size"] for block in blocks)
    return {
        "device": 0,
        "address": address,
        "total_size": total,
        "stream": 0,
        "segment_type": "large",
        "blocks": blocks,
    }


def training(steps: int, *, leaks: int = 0, loads: int = 8 * MIB) -> Recorder:
    """Record steps of a model of 8 MiB that allocates 20 MiB of activations and leaves `leaks` bytes per step."""
    run = Recorder()
    run.alloc(loads, LOADED)
    for step in range(steps):
        saved = [run.alloc(5 * MIB, FORWARD) for _ in range(4)]
        loss = run.alloc(2 * MIB, LOSS)
        gradients = [run.alloc(4 * MIB, BACKWARD) for _ in range(2)]
        if step == 0:
            run.alloc(16 * MIB, ADAM)
        if leaks:
            run.alloc(leaks, KEPT)
        for address in (*saved, loss, *gradients):
            run.free(address)
    return run


def ran_out_in_forward(steps: int, *, leaks: int = 0, loads: int = 8 * MIB) -> Recorder:
    """Record a run that runs out in its next forward, and whose memory is freed before the snapshot is written."""
    run = training(steps, leaks=leaks, loads=loads)
    saved = [run.alloc(5 * MIB, FORWARD) for _ in range(8)]
    run.ran_out(5 * MIB, FORWARD)
    for address in saved:
        run.free(address)
    return run


# A snapshot of torch 2.0: blocks without addresses, their frames and sizes in a history
LEGACY = [
    {
        "device": 0,
        "address": 4096,
        "total_size": 8 * MIB,
        "stream": 0,
        "segment_type": "large",
        "blocks": [
            {
                "size": 2 * MIB,
                "state": "active_allocated",
                "history": [{"addr": 4096, "real_size": MIB, "frames": LOADED}],
            },
            {"size": 2 * MIB, "state": "inactive"},
            {
                "size": 4 * MIB,
                "state": "active_allocated",
                "history": [{"addr": 0, "real_size": 4 * MIB, "frames": ADAM}],
            },
        ],
    }
]
