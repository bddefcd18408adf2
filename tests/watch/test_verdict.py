"""The verdict on ranks that have last been heard of in every way that can go wrong."""

from __future__ import annotations

import signal

from zerofit.watch.verdict import RankState, judge

NOW, TIMEOUT = 1000.0, 60.0
TRAINING = {"step": 12, "phase": "backward", "training": True, "collective": "all_reduce", "at": "train/engines.py:1 f"}
TRAINING |= {"warm": True}
WELL = {**TRAINING, "still_s": 0.5, "silent_s": 0.4, "state": "running", "resending": False}


def ranks(*changes, hosts=("a", "a", "b", "b")):
    """Four ranks on two hosts, all well but for these changes by rank."""
    states = [RankState(r, host, NOW - 0.5, here=True, beat=dict(WELL)) for r, host in enumerate(hosts)]
    for rank, change in changes:
        for key, value in change.items():
            if key == "beat":
                states[rank].beat.update(value)
            else:
                setattr(states[rank], key, value)
    return states


def said(*changes):
    return judge(ranks(*changes), NOW, TIMEOUT, coming_s=180.0)


def test_all_is_well():
    assert said() is None
    assert said((1, {"ended": 0}), (2, {"ended": 0})) is None


def test_a_killed_rank_comes_before_those_that_lost_it():
    verdict = said((0, {"ended": 3}), (3, {"ended": -signal.SIGKILL}))
    assert (verdict.problem.kind, verdict.ranks[0]) == ("killed", 3)
    assert "rank 3 on b" in verdict.problem.message
    assert "step 13, backward, in all_reduce" in verdict.problem.message
    assert "dmesg" in verdict.problem.hint
    assert "SIGSEGV" in said((2, {"ended": -signal.SIGSEGV})).problem.message


def test_a_launcher_that_was_killed_takes_all_of_its_host():
    verdict = said((2, {"lost": True}), (3, {"lost": True}))
    assert (verdict.problem.kind, verdict.ranks, verdict.host) == ("vanished", (2, 3), "b")
    assert "all ranks on b" in verdict.problem.message
    alone = said((3, {"lost": True}))
    assert "rank 3 on b and its guard process" in alone.problem.message


def test_a_host_that_is_cut_off():
    silent = {"heard": NOW - TIMEOUT - 1}
    assert said((2, {"heard": NOW - TIMEOUT + 1}), (3, {"heard": NOW - TIMEOUT + 1})) is None
    verdict = said((2, silent), (3, silent))
    assert (verdict.problem.kind, verdict.host, verdict.unheard_s) == ("host-unreachable", "b", TIMEOUT + 1)


def test_ranks_that_never_came():
    late = {"here": False, "beat": {}, "heard": NOW - 100}
    assert said((1, late)) is None  # ssh and Python may take their time
    verdict = said((1, {**late, "heard": NOW - 181}))
    assert verdict.problem.kind == "not-started"
    assert "launcher.log" in verdict.problem.hint


def test_a_stopped_rank_and_one_inside_cpp():
    verdict = said((1, {"beat": {"silent_s": 61.0, "state": "stopped"}}))
    assert (verdict.problem.kind, verdict.ranks) == ("rank-stopped", (1,))
    assert said((1, {"beat": {"silent_s": 61.0, "state": "running"}, "busy": True})) is None
    assert said((1, {"beat": {"silent_s": 61.0, "state": "running"}})).problem.kind == "hang"
    assert said((1, {"beat": {"silent_s": 1700.0, "state": "disk-sleep"}})) is None
    assert said((1, {"beat": {"silent_s": 1801.0, "state": "disk-sleep"}})).problem.kind == "hang"
    starting = {"silent_s": 300.0, "state": "running", "training": False}
    assert said((1, {"beat": starting})) is None  # importing torch from a cold disk
    assert said((1, {"beat": {"silent_s": 601.0, "state": "running"}, "busy": True})).problem.kind == "hang"


def still(seconds, **beat):
    return {"beat": {"still_s": seconds, **beat}}


def test_the_rank_outside_the_collective_holds_the_others_up():
    held = [(r, still(61.0)) for r in (0, 1, 3)]
    verdict = said(*held, (2, still(61.0, collective=None, phase="forward", at="train/engines.py:9 _loss")))
    assert (verdict.problem.kind, verdict.ranks) == ("hang", (2,))
    assert "rank 2 on b is at step 13, forward (train/engines.py:9 _loss)" in verdict.problem.message
    assert "the others at step 13, backward, in all_reduce" in verdict.problem.message
    assert said(*held, (2, still(3.0))) is None  # one that moves is no hang


def test_ranks_in_different_collectives():
    verdict = said(*[(r, still(61.0)) for r in (0, 1, 2)], (3, still(61.0, collective="barrier")))
    assert verdict.ranks == (3,)
    assert "in barrier" in verdict.problem.message
    behind = said(*[(r, still(61.0)) for r in (0, 1, 2)], (3, still(61.0, step=11)))
    assert behind.ranks == (3,)


def test_work_that_may_take_long_is_given_longer():
    saving = [(r, still(300.0, training=False, phase="saving step 12")) for r in range(4)]
    assert said(*saving) is None
    assert said(*[(r, still(601.0, training=False)) for r in range(4)]).problem.kind == "hang"
    assert said(*[(r, still(300.0, warm=False)) for r in range(4)]) is None  # the first step compiles and connects
    reading = {"phase": "data", "collective": None}
    assert said(*[(r, still(300.0, **(reading if r == 2 else {}))) for r in range(4)]) is None
    assert said(*[(r, still(601.0, **(reading if r == 2 else {}))) for r in range(4)]).ranks == (2,)


def test_a_long_step_on_a_gpu_is_no_hang():
    long = [(r, still(100.0, longest_still_s=50.0)) for r in range(4)]
    assert said(*long) is None
    assert said(*[(r, still(151.0, longest_still_s=50.0)) for r in range(4)]).problem.kind == "hang"
    disk = [(r, still(700.0, training=False, state="disk-sleep" if r == 2 else "sleeping")) for r in range(4)]
    assert said(*disk) is None


def test_a_network_that_loses_packets_is_no_hang():
    lossy = [(r, still(300.0, resending=r == 1)) for r in range(4)]
    assert said(*lossy) is None
    verdict = said(*[(r, still(601.0, resending=r == 1)) for r in range(4)])
    assert (verdict.problem.kind, verdict.ranks) == ("network", (1,))
