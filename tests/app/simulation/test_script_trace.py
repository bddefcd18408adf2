"""Traces of users' scripts: each op at its time by hand, streams and handles that wait, and plan's times beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zerofit as zf
from zerofit.app.simulation.rank_trace import _Clocks
from zerofit.plan.kernels import RankGroup, collective_s
from zerofit.plan.rates import rates_of
from zerofit.simulate.ops.issued import COPY, HOOKS, KERNEL, STEP, CommunicatingRanks, IssuedLog, IssuedWork
from zerofit.spec.profile import Kernel, Linear

H100 = zf.Cluster("h100-80gb", gpus=4)
RATES = rates_of(H100, "bf16")
MOVED = 10_000_000_000  # bytes that a kernel of these tests reads and writes: some milliseconds
KERNEL_S = MOVED / RATES.memory
LAUNCH_S, PAIR = RATES.launch_s, CommunicatingRanks("dp", 4, 4)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def kernel(stream: int = 0, moved: float = MOVED, **more: Any) -> IssuedWork:
    one = Kernel(kind="elementwise", dtype="bfloat16", count=1.0, moved_bytes=Linear(fixed=moved))
    return IssuedWork(KERNEL, stream, more.pop("phase", "forward"), "block", 0, kernel=one, **more)


def placed(log: IssuedLog) -> _Clocks:
    return _Clocks(log.items, "bf16", H100)


def test_the_host_runs_ahead_of_long_kernels_and_small_ones_wait_for_it():
    log = IssuedLog()
    log.items += [kernel(), kernel()]
    assert placed(log).end_s == pytest.approx(LAUNCH_S + 2 * KERNEL_S)
    log.items[:] = [kernel(moved=1000)] * 10
    assert placed(log).end_s == pytest.approx(10 * LAUNCH_S, rel=0.01)
    (host,) = placed(log).launches
    assert host.end_s - host.start_s == pytest.approx(10 * LAUNCH_S)


def test_streams_run_side_by_side_until_one_waits():
    log = IssuedLog()
    log.items += [kernel(0), kernel(1)]
    assert placed(log).end_s == pytest.approx(2 * LAUNCH_S + KERNEL_S)
    log.wait(1, 0, 1)  # for the first kernel, which is done by now
    log.items += [kernel(1)]
    assert placed(log).end_s == pytest.approx(2 * LAUNCH_S + 2 * KERNEL_S)
    log.items[:] = [kernel(0)]
    log.wait(1, 0)
    log.items += [kernel(1), kernel(0)]
    clocks = placed(log)
    assert clocks.end_s == pytest.approx(LAUNCH_S + 2 * KERNEL_S)
    assert [span.stream for span in clocks.spans] == ["compute", "stream 1", "compute"]


def test_a_collective_follows_the_work_before_it_and_who_waits_for_its_handle_follows_it():
    sent_s = collective_s("all_reduce", 1e9, 1, RankGroup(4, 4), RATES)
    log = IssuedLog()
    log.items += [kernel()]
    sent = log.send(IssuedWork("allreduce", 0, "forward", "", 0, bytes=1e9), PAIR)
    log.items += [kernel()]
    beside = placed(log)
    assert beside.end_s == pytest.approx(LAUNCH_S + KERNEL_S + max(KERNEL_S, sent_s))
    assert [span.stream for span in beside.spans] == ["compute", "collectives of 4 ranks", "compute"]
    log.wait(0, *sent)
    log.items += [kernel()]
    assert placed(log).end_s == pytest.approx(LAUNCH_S + 2 * KERNEL_S + max(KERNEL_S, sent_s))


def test_the_host_waits_for_a_value_and_takes_time_for_hooks():
    log = IssuedLog()
    log.items += [kernel()]
    log.wait(None, 0)
    log.items += [kernel(moved=0)]
    assert placed(log).end_s == pytest.approx(2 * LAUNCH_S + KERNEL_S)
    log.items[:] = [IssuedWork(HOOKS, 0, "forward", "block", 0, count=3)]
    assert placed(log).end_s == pytest.approx(3 * RATES.hook_s)


def test_copies_and_steps_go_at_their_own_rates():
    log = IssuedLog()
    log.items += [IssuedWork(COPY, 0, "forward", "", 0, bytes=1e9)]
    log.items += [IssuedWork(COPY, 0, "forward", "", 0, bytes=1e9, pinned=False)]
    log.items += [IssuedWork(STEP, 0, "step", "", 0, bytes=28e9, inside=False)]
    copied, pageable, stepped = placed(log).spans
    assert pageable.end_s - pageable.start_s == pytest.approx(1e9 / RATES.pageable)
    assert copied.end_s - copied.start_s == pytest.approx(1e9 / RATES.pcie)
    assert stepped.end_s - stepped.start_s == pytest.approx(28e9 / RATES.adam)
    assert stepped.micro_batch == -1 and copied.micro_batch == 0


SHAPE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
SHAPE |= {"num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 1024}
SCRIPT = f"""\
import json, sys, torch, deepspeed
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(**{SHAPE}))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
while True:
    tokens = torch.randint(0, 4096, (4, 1024), device=engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_a_scripts_step_takes_as_long_as_plan_says_of_the_same_model(stage):
    """Two ways: op by op as DeepSpeed issues them, and in closed form from a profile and rules about DeepSpeed."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "overlap_comm": True},
    }
    Path("ds.json").write_text(json.dumps(config))
    Path("train.py").write_text(SCRIPT)
    found = zf.simulate_script(["deepspeed", "--num_gpus", "4", "train.py"], H100, trace="script.json")
    assert found.trace == Path("script.json")
    run = zf.Run(model="llama-tiny", model_args=SHAPE, seq_len=1024, micro_batch=4, ds_config=config, data="synthetic")
    zf.simulate(run, H100, trace="run.json")
    traces = [json.loads(Path(name).read_text()) for name in ("script.json", "run.json")]
    steps = [trace["otherData"]["step_s"] for trace in traces]
    assert steps[0] == pytest.approx(steps[1], rel=0.15)
    events = [event for event in traces[0]["traceEvents"] if event["ph"] == "X"]
    flops, planned = (sum(e["args"].get("flops", 0) for e in t["traceEvents"] if e["ph"] == "X") for t in traces)
    assert flops == pytest.approx(planned, rel=0.02)
    stepped = [event for event in events if event["args"]["kind"] == "optimizer"]
    parameters = 2 * 4096 * 512 + 4 * (4 * 512**2 + 3 * 512 * 2048 + 2 * 512) + 512
    assert sum(event["args"]["bytes"] for event in stepped) == pytest.approx(28 * parameters / 4, rel=1e-3)
    assert {event["cat"] for event in events} == {"forward", "backward", "step"}
    memory = [event for event in traces[0]["traceEvents"] if event["ph"] == "C"]
    last = [phase.peak_bytes for phase in found.phases if phase.step == 1]
    assert max(sum(event["args"].values()) for event in memory) == max(last)
    modules = {event["args"]["module"] for event in events}
    assert "module.model.layers.3.mlp.down_proj" in modules or "model.layers.3.mlp.down_proj" in modules


@pytest.mark.parametrize("pinned", [False, True])
def test_a_scripts_own_batches_are_copied_to_the_device(pinned):
    batches = "torch.randn(4096, 1024)" + (".pin_memory()" if pinned else "")
    lines = ["import torch", "model = torch.nn.Linear(1024, 8).cuda()", "sgd = torch.optim.SGD(model.parameters())"]
    lines += ["while True:", "    model(" + batches + ".cuda()).sum().backward()", "    sgd.step()"]
    Path("train.py").write_text("\n".join(lines))
    zf.simulate_script(["python", "train.py"], zf.Cluster("h100-80gb", gpus=1), trace="step.json")
    events = json.loads(Path("step.json").read_text())["traceEvents"]
    copies = [event for event in events if event["ph"] == "X" and event["args"]["kind"] == "copy"]
    batch = 4 * 4096 * 1024
    here = [batch * 2] if pinned else []  # read and written on the host, to be pinned
    assert [event["args"]["bytes"] for event in copies] == [*here, batch]
    assert copies[-1]["dur"] == pytest.approx(1e6 * batch / RATES.host_copy(pinned), rel=1e-3)
