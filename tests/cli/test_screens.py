"""Answers at 60, 80, 120 and 200 columns: no line is wider, no cell is cut, and the verdict comes first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import pytest

from tests.plan.stub import make_profile
from tests.simulate.targets import TINY
from zerofit.app.checking import check
from zerofit.app.checkpoints import CheckpointDescription, CheckpointList, CheckpointSummary, VerifyResult
from zerofit.app.clusters.job_files import JobFile
from zerofit.app.comparing.rows import Comparison, StrategyRow
from zerofit.app.data_view import DataView
from zerofit.app.inference import Evaluation
from zerofit.app.planning.planner import plan
from zerofit.app.simulation.runs import simulate
from zerofit.app.training.result import TrainingResult
from zerofit.checkpoint.conversion import ConvertResult
from zerofit.checkpoint.diff import CheckpointDiff, TensorRow
from zerofit.checkpoint.export import ExportResult
from zerofit.checkpoint.store import Damage
from zerofit.cli.check import _report
from zerofit.cli.check import _show as _show_report
from zerofit.cli.ckpt import show_converted, show_description, show_difference, show_export, show_list, show_verdict
from zerofit.cli.compare import show_strategies
from zerofit.cli.data import _show as _show_data
from zerofit.cli.inference import _show_scores
from zerofit.cli.launch import _show as _show_launch
from zerofit.cli.machine import BANDWIDTHS, LATENCIES, _show_findings, _show_speeds
from zerofit.cli.plan_show import show as show_plan
from zerofit.cli.simulate_show import show as show_simulation
from zerofit.cli.simulate_show import show_knobs
from zerofit.cli.train import _show_models, _show_traces
from zerofit.cli.train import show as show_training
from zerofit.doctor.check import Check
from zerofit.infer.evaluate import EvalScores
from zerofit.models.names import model_table
from zerofit.report.traces import TraceComparison, TraceRow
from zerofit.simulate.forecast.result import WITHIN, KnobResult
from zerofit.spec.cluster import Cluster
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Batch, Layout

WIDTHS = (60, 80, 120, 200)
MESH = "plan --show-mesh"
NAMES = ("zerofit", "torch", "torchvision", "deepspeed", "transformers", "accelerate")


def other_screens(folder: Path) -> dict[str, tuple[Callable[[], object], str]]:
    """Return what prints the answers of the commands that need no model, and the beginning of their first lines."""
    place = Path("/runs/of-a-name-that-is-long/checkpoints/step-00000180")
    damage = Damage(file="mp_rank_00_model_states.pt", kind="size", message="4,096 bytes instead of 8,192")
    layout = Layout(dp=4, tp=2, zero_stage=1)
    saved = {"created": "2026-11-28T01:09:59+00:00", "bytes": 289_792, "samples": 2880, "world_size": 8}
    saved |= {"path": place, "step": 180, "layout": layout}
    fine, bad = (CheckpointSummary(**saved, problems=wrong) for wrong in ([], [damage]))
    of = {"model": "llama-3.1-8b", "model_args": {}, "parameters": 8 << 30, "task": "causal-lm", "data": "pysource"}
    of |= {"precision": "bf16", "optimizer": "adamw", "batch": Batch(micro=8, accumulation=2, dp=4), "steps": 400}
    of |= {"figures": {"loss": 1.234567, "lr": 1e-3}, "files": {"a": 1}, "versions": dict.fromkeys(NAMES, "10.20.30")}
    row = TensorRow(name="model.layers.31.mlp.down_proj.weight", kind="fp32", elements=9, apart=9, max_abs=1, max_rel=1)
    device = {"device_map": {"": "cpu"}, "placement": (), "dtype": "fp32", "step": 180, "peak_host_bytes": 9 << 26}
    device |= {"host_bytes_before": 8 << 26, "peak_device_bytes": 1 << 30}
    scores = dict.fromkeys((field.name for field in fields(EvalScores)), None)
    scores |= {"samples": 359, "loss": 0.3437, "accuracy": 0.89, "samples_per_s": 33.3}
    evaluated = Evaluation(**(scores | device | {"model": str(place), "data": "digits"}))
    examined = [Check(name="limit nofile", host="node1", status="warn", value="20000", expected="65536 or more")]
    examined += [Check(name="ssh", host=f"node{n}", status="fail", value="refused", hint="ssh-copy-id") for n in (1, 2)]
    measured = dict.fromkeys((*BANDWIDTHS, *LATENCIES), 2.5e9) | {"device_name": "CPU (x86_64)", "devices": 2}
    measured |= {"kernels": [], "matmul_flops": {"bf16": 1e12}, "file": str(place), "seconds": 40.0}
    faulty = folder / "ds.json"
    faulty.write_text(
        '{"train_batch_size": 8, "zero_optimisation": {}, "fp16": {"enabled": true}, "bf16": {"enabled": true}}'
    )
    report = _report(check(str(faulty)), fix=False, migrate=False, explain=True, resolve=False)
    found = DataView(
        data="jsonl", seq_len=8, notes=("note " * 30,), counts={}, train_samples=9, valid_samples=1, samples=()
    )
    row_of_trace = TraceRow(module="block", kind="all-gather of parameters", forecast_s=0.0123, measured_s=0.0456)
    traces = TraceComparison(forecast_step_s=0.5, measured_step_s=0.6, rows=(row_of_trace,), picture=place)
    return {
        "plot --trace": (partial(_show_traces, traces), "MEASURED  0.6 s per step, 1.2 times"),
        "ckpt ls": (
            partial(show_list, CheckpointList(folder=place, checked="sizes", checkpoints=[fine, bad])),
            "DAMAGED  1 of 2",
        ),
        "ckpt show": (partial(show_description, CheckpointDescription(**vars(fine), **of)), "STEP 180 of 400  /runs"),
        "ckpt verify": (
            partial(show_verdict, VerifyResult(path=place, step=180, problems=[damage])),
            "DAMAGED  step 180",
        ),
        "ckpt convert": (
            partial(show_converted, ConvertResult(out=place, tag="step-180", parameters=9, bytes=9)),
            "WRITTEN  /",
        ),
        "ckpt export": (
            partial(show_export, ExportResult(out=place, files=["a.json"] * 9, parameters=9, dtype="bf16")),
            "WRITTEN  /",
        ),
        "ckpt diff": (
            partial(show_difference, CheckpointDiff(a=place, b=place, rows=[row])),
            "DIFFERENT  0 of 1 tensors",
        ),
        "eval": (partial(_show_scores, evaluated), "EVALUATED  359 samples of digits"),
        "doctor": (
            partial(_show_findings, {"checks": [asdict(c) for c in examined], "hosts": 2}),
            "NOT READY  2 failed",
        ),
        "calibrate": (partial(_show_speeds, measured), "MEASURED  CPU (x86_64), 2 ranks"),
        "check": (partial(_show_report, report, False, False), "stops the run"),
        "data": (partial(_show_data, found), "READABLE  9 samples to train on"),
        "launch": (partial(_show_launch, JobFile(written=str(place), new=True, hand_in="sbatch job")), "WRITTEN  /"),
        "models": (partial(_show_models, {"models": model_table(["gpt2"])}), "name "),
    }


@pytest.fixture(scope="module")
def screens(tmp_path_factory) -> dict[str, tuple[Callable[[], object], str]]:
    """What prints each answer, and the beginning of its first line."""
    profile = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.write_text(json.dumps(make_profile().as_dict()))
    run = Run(model="llama-tiny", model_args=TINY, seq_len=16, micro_batch=2, ds_config="zero2")
    small = simulate(run, Cluster("h100-80gb", gpus=2, device_memory=2**20))
    needs = {"peak_bytes": 9 << 20, "reserved_bytes": 9 << 20, "outside_bytes": 0, "host_node_bytes": 0}
    tried = [KnobResult(change="--micro-batch 1 --gradient-accumulation-steps 2", fits=True, slowdown=0.184, **needs)]
    tried += [KnobResult(change="--ds-config zero3_offload", fits=True, cost_rank=1, slowdown=6.14, **needs)]
    tried += [KnobResult(change="--activation-checkpointing", fits=True, cost_rank=2, **needs)]
    small = replace(small, tried=tuple(tried))
    sizes = {"device_total_bytes": 3 * 2**38, "margin_bytes": -(2**38)}  # 768 GiB, of which at most 1 TiB is needed
    close = replace(small, verdict=WITHIN, smi_bytes=2**39, **sizes)
    flushed = replace(close, smi_bytes=4 * 2**38)  # fits only because torch returns cached memory
    layouts = plan(profile=profile, cluster=Cluster("h100-80gb", gpus=8), global_batch=64)
    nothing = plan(profile=profile, cluster=Cluster("h100-80gb", gpus=8, device_memory=2**30), global_batch=64)
    figures = {"samples_per_s": 24146.2, "speedup": 1.16, "efficiency": 1.16, "peak_bytes_per_rank": 27367833}
    figures |= {"host_bytes_per_rank": 660812595, "comm_bytes_per_step": 159129.0, "loss": 1.9775, "accuracy": 0.526}
    common = {"ranks": 2, "processes": 2, "synchronous": True, "lines": 23, "seconds": 3.0, "title": ""}
    rows = [
        StrategyRow(strategy="parameter-server-async", status="ok", reason=None, **common, **figures),
        StrategyRow(strategy="device-map", status="not-here", reason="needs two devices in one process", **common),
    ]
    compared = Comparison(kind="strategies", about={"model": "lenet", "data": "digits"}, rows=rows)
    trained = TrainingResult(
        run_dir="/runs/a-name-that-is-long-enough-to-be-wider-than-any-terminal-that-is-60-columns-wide",
        steps=400,
        samples=3200,
        tokens=819200,
        train_loss=1.8437,
        eval={"loss": 1.84, "perplexity": 6.3},
        samples_per_s=50.0,
        tokens_per_s=13460.0,
        world_size=2,
        layout={"dp": 2, "tp": 1, "pp": 1, "sp": 1, "zero_stage": 2},
        resumed_from=None,
        unigram_entropy_nats=3.34,
        against_forecast={"memory_bytes": {"measured": 7.4e8, "forecast": 9.7e8, "difference": -0.239}},
    )
    return {
        **other_screens(tmp_path_factory.mktemp("faulty")),
        "simulate": (partial(show_simulation, small, False), "DOES NOT FIT  needs "),
        "simulate, open": (partial(show_simulation, close, False), "CLOSE TO THE LIMIT  needs 512 GiB to 1.00 TiB of"),
        "simulate, flushed": (partial(show_simulation, flushed, False), "CLOSE TO THE LIMIT  needs up to 1.00 TiB of"),
        "simulate --details": (partial(show_simulation, small, True), "DOES NOT FIT  needs "),
        "changes": (partial(show_knobs, small, True), "fits with "),
        "plan": (partial(show_plan, layouts, False, True), "FITS  "),
        MESH: (partial(show_plan, layouts, True, False), "FITS  "),
        "plan --columns": (partial(show_plan, layouts, False, False, ("margin", "step")), "FITS  "),
        "plan of too little": (partial(show_plan, nothing, False, False), "NOTHING FITS  0 of "),
        "compare": (partial(show_strategies, compared), "FASTEST  parameter-server-async, 24,146 samples/s"),
        "train": (partial(show_training, trained), "DONE  400 steps on 2 ranks, ZeRO-2"),
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_answers_fit_the_terminal(screens, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    for name, (show, first) in screens.items():
        show()
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        text = "\n".join(lines)
        assert name != "changes" or ("~18% slower     " in text and "~7.1 x the time  --ds-config" in text)
        assert text.lstrip().startswith(first), name
        assert "…" not in text and "\x1b" not in text, name
        wide = [line for line in lines if len(line) > width and len(line.rstrip("\\ ").split()[-1]) < width - 36]
        assert not wide, (name, wide)  # but for one word that is wider, which nothing can break


def test_no_word_is_broken_at_any_width(screens, monkeypatch, capsys):
    """Each word at 60 columns is one of those at 200; a mesh is a table at 200 and lines at 60."""
    words = dict[int, set[str]]()
    for width in (200, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        for name, (show, _) in screens.items():
            if name != MESH:
                show()
        text = re.sub(r"^more columns.*\n(?: .*\n)*", "", capsys.readouterr().out, flags=re.MULTILINE)
        words[width] = set(re.findall(r"[\w./()=,:+-]+", text))
    assert words[60] <= words[200]
