"""Snapshots: what was alive when, by kind; leaks and fragments; old formats; files that are none, or harmful."""

from __future__ import annotations

import gzip
import os
import pickle
import resource
import struct

import pytest

from tests.explain.snapshots import ADAM, FORWARD, LEGACY, LOADED, MIB, ran_out_in_forward, stack, training
from zerofit.explain.from_snapshot import explain_snapshot, kind_of, read_snapshot
from zerofit.spec.foreign import Unreadable
from zerofit.spec.foreign_pickle import is_pickle


@pytest.fixture
def written(tmp_path):
    def write(content, name="oom.pickle"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
        return path

    return write


def test_what_was_alive_when_it_ran_out_though_it_is_freed(written):
    run = ran_out_in_forward(3)
    found = explain_snapshot(written(run.snapshot()))
    assert found.alive == {
        "activations": 40 * MIB,
        "optimizer state": 16 * MIB,
        "parameters": 8 * MIB,
        "fragments": 0,
    }
    assert (found.cause, found.phase, found.figures.asked_bytes) == ("activations", "forward", 5 * MIB)
    assert found.lines[0].place == "transformers/models/llama/modeling_llama.py:164" and found.lines[0].blocks == 8
    assert found.at == "/home/me/train.py:61"


def test_without_an_out_of_memory_the_highest_moment(written):
    found = explain_snapshot(written(training(2).snapshot()))
    # the second step's forward, loss and gradients on top of parameters and Adam's states
    assert sum(found.alive.values()) == (8 + 16 + 20 + 2 + 8) * MIB
    assert found.alive["gradients"] == 8 * MIB and found.alive["logits and loss"] == 2 * MIB
    assert found.cause == "did-not-run-out" and found.is_known


def test_blocks_from_before_the_trace(written):
    run = ran_out_in_forward(2)
    del run.trace[0]  # the ring of events has lost the parameters' allocation
    assert explain_snapshot(written(run.snapshot())).alive["parameters"] == 8 * MIB


@pytest.mark.parametrize("leaks", [0, MIB])
def test_a_line_whose_blocks_stay_from_each_step(written, leaks):
    found = explain_snapshot(written(ran_out_in_forward(6, leaks=leaks).snapshot()))
    assert (found.cause == "leak") == bool(leaks)
    if leaks:
        assert "6 blocks that /home/me/train.py:66 allocated in" in found.evidence[0]


def test_one_forward_of_many_layers_is_no_leak(written):
    assert explain_snapshot(written(ran_out_in_forward(0).snapshot())).cause == "activations"


def test_fragments(written):
    run = ran_out_in_forward(2)
    run.trace[-1 - 16]["size"] = 30 * MIB
    found = explain_snapshot(written(run.snapshot(unused=70 * MIB)))
    assert found.cause == "fragmentation"


def test_states_that_fill_the_gpu(written):
    assert explain_snapshot(written(ran_out_in_forward(2, loads=200 * MIB).snapshot())).cause == "states"


def test_the_format_of_torch_2_0(written):
    snapshot = read_snapshot(written(LEGACY))
    assert sorted(block.bytes for block in snapshot.alive()) == [MIB, 4 * MIB]
    assert snapshot.blocks.keys() == {4096, 4096 + 4 * MIB} and snapshot.reserved_bytes == 8 * MIB
    assert explain_snapshot(written(LEGACY)).alive["optimizer state"] == 4 * MIB


def test_no_stacks_is_no_cause(written):
    run = ran_out_in_forward(2)
    for event in run.trace:
        event["frames"] = []
    found = explain_snapshot(written({**run.snapshot(), "segments": []}))
    assert not found.is_known and "_record_memory_history" in found.run_next


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        ("optimizer state", ADAM),
        ("parameters", LOADED),
        ("activations", FORWARD),
        ("copies of parameters", stack(("/usr/lib/python3.11/copy.py", 160, "deepcopy"), ("train.py", 1, "main"))),
        ("gathered parameters", stack(("/s/deepspeed/runtime/zero/partition_parameters.py", 9, "_allgather_params"))),
        ("master weights", stack(("/s/deepspeed/runtime/zero/stage3.py", 9, "_create_fp32_partitions"))),
        ("gradients", stack(("??", 0, "torch::autograd::Engine::evaluate_function"))),
        ("logits and loss", stack(("/s/transformers/loss/loss_utils.py", 9, "ForCausalLMLoss"))),
        ("activations", stack(("m.py", 1, "forward"), ("/s/torch/utils/checkpoint.py", 1, "backward"))),  # recomputed
    ],
)
def test_kinds_by_stack(kind, frames):
    assert kind_of(frames, recorded=True) == kind


def test_compressed(written):
    content = pickle.dumps(ran_out_in_forward(2).snapshot())
    path = written(gzip.compress(content), "oom.pickle.gz")
    assert is_pickle(path) and explain_snapshot(path).cause == "activations"
    path.write_bytes(path.read_bytes()[:10] + b"\xff" * 100)  # not compressed data
    assert not is_pickle(path)


@pytest.mark.parametrize("frames", [3, "ab", [3, None], [{"filename": 3, "line": "x"}], [{}]])
def test_frames_of_a_wrong_form_are_left_out(written, frames):
    run = ran_out_in_forward(2)
    for event in run.trace:
        event["frames"] = frames
    assert sum(explain_snapshot(written(run.snapshot())).alive.values()) == 64 * MIB


class Harmful:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch harmed",)


BOMB = b"\x80\x04]r" + struct.pack("<I", 2**32 - 2) + b"."  # a memo with four billion places


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"segments": [Harmful()]}),
        pickle.dumps({"segments": [{"total_size": "x", "blocks": 3}]}),
        pickle.dumps({"segments": [{"total_size": 1, "blocks": [{"state": []}]}]}),
        pickle.dumps([1, 2]),
        pickle.dumps({"segments": []}),
        pickle.dumps(training(1).snapshot())[:-40],
        b"\x80\x04\x95nonsense",
        b"\x80\x04" + b"(" * 100_000,
        BOMB,
    ],
)
def test_files_that_are_no_snapshots_are_refused(written, content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(Unreadable):
        explain_snapshot(written(content))
    assert not (tmp_path / "harmed").exists()
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
