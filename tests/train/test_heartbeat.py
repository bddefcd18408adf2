"""What a rank's sign of life says, looked at from a thread while the main thread is somewhere."""

from __future__ import annotations

import gc
import json
import os
import select
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from zerofit.data.base import Dataset
from zerofit.data.loader import Order, micro_batches
from zerofit.train import heartbeat
from zerofit.train.callbacks import EventLog
from zerofit.train.heartbeat import TRAINING, Heartbeat, RankProgress


@pytest.fixture
def pulse():
    reading, writing = os.pipe()
    yield Heartbeat(writing, on_gpu=False, progress=RankProgress())
    os.close(reading)
    os.close(writing)


def seen(pulse, what, looks=1, apart_s=0.0):
    """The last of some looks that another thread takes while this one does something."""
    found = []

    def look():
        time.sleep(0.3)
        for _ in range(looks):
            found.append(pulse.look())
            time.sleep(apart_s)

    thread = threading.Thread(target=look)
    thread.start()
    what()
    thread.join()
    return found[-1]


def test_a_look_keeps_nothing_of_the_main_thread_alive(pulse):
    """Else the logits of a step in which a heartbeat falls are there until the next collection, steps later."""

    def forward() -> weakref.ref:
        logits = torch.zeros(4)
        seen(pulse, lambda: time.sleep(0.5))
        return weakref.ref(logits)

    gc.collect()
    gc.disable()
    try:
        assert forward()() is None
    finally:
        gc.enable()


def test_waiting_is_still_and_work_is_not(pulse):
    assert seen(pulse, lambda: time.sleep(2.5), looks=4, apart_s=0.5)["still_s"] >= 1.0

    def work():
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            sum(range(1000))

    assert seen(pulse, work, looks=3, apart_s=0.4)["still_s"] == 0.0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_that_waits_for_data_is_in_data(workers):
    pulse = Heartbeat(0, on_gpu=False, progress=RankProgress(phase=TRAINING))  # looks, and sends nothing
    batches = micro_batches(Slow(), Order(100, 0), (range(n, n + 1) for n in range(3)), workers)
    assert seen(pulse, lambda: list(batches))["phase"] == "data"
    assert pulse.look()["phase"] == "training loop"


class Slow(Dataset):
    draws = False

    def __len__(self):
        return 100

    def batch(self, indices, keys):
        time.sleep(0.5)
        return {"inputs": torch.zeros(len(indices)), "labels": torch.zeros(len(indices))}

    def targets(self, indices):
        return len(indices)


def test_the_collective_that_a_rank_waits_in(pulse, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    inside = dist.distributed_c10d._rank_not_in_group
    try:
        assert pulse.look()["collective"] is None
        dist.distributed_c10d._rank_not_in_group = lambda group: time.sleep(1) or inside(group)  # a barrier that waits
        assert seen(pulse, dist.barrier)["collective"] == "barrier"
    finally:
        dist.distributed_c10d._rank_not_in_group = inside
        dist.destroy_process_group()


def test_phases_follow_the_events():
    progress = RankProgress()
    pulse, events = Heartbeat(0, on_gpu=False, progress=progress), EventLog(None, progress)
    events.phase("reading the data")
    assert (pulse.look()["phase"], pulse.look()["training"]) == ("reading the data", False)
    events.training(steps=3)
    assert (pulse.look()["phase"], pulse.look()["training"]) == ("training loop", True)


def test_the_end_of_a_save_is_sent_at_once(monkeypatch):
    """Else a rank that is killed after it has written the checkpoint of step 20 is reported in an earlier step."""
    monkeypatch.setattr(heartbeat, "EVERY_S", 3600.0)
    reading, writing = os.pipe()
    progress = RankProgress(step=7, phase=TRAINING)
    pulse, events = Heartbeat(writing, on_gpu=False, progress=progress), EventLog(None, progress)
    pulse.start()
    with open(reading) as sent:
        assert json.loads(sent.readline())["step"] == 7
        progress.step = 20
        events.training(steps=40)
        assert select.select([sent], [], [], 60)[0], "no heartbeat before the next regular one"
        assert json.loads(sent.readline())["step"] == 20
