"""`zerofit report` and `--html`: pages of plans, explanations, checks, runs and simulations, in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.report.browser import CHROMIUM, View, looked_at
from tests.report.test_plot import a_run
from zerofit.cli.main import main
from zerofit.explain.not_finite import Replay
from zerofit.report.page import COLORS, Bar, Bars, Page
from zerofit.spec.errors import UserError

GIB = 2**30
MARKUP = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)>{{ 7 * 7 }}'
PLAN = ["plan", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100-80gb,l4", "--json"]
LOG = """Traceback (most recent call last):
  File "/home/user/train.py", line 12, in <module>
    loss = model(x).loss
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of \
which 1.12 GiB is free. Process 123 has 14.65 GiB memory in use. Of the allocated memory 13.00 GiB is allocated by \
PyTorch, and 700.00 MiB is reserved by PyTorch but unallocated.
"""


def a_simulation(**more) -> dict:
    """The output of `simulate --details --json`, with three moments, the highest in forward."""
    most = {"parameters": GIB, "activations": 2 * GIB, "unknown to zerofit": GIB}
    where = {"module": "model.layers.1.mlp", "at": "modeling.py:40"}
    last = {"parameters": GIB, "optimizer state": 2 * GIB}
    facts = {
        "world_size": 4,
        "rank": 3,
        "device": "a100-40gb",
        "device_total_bytes": 8 * GIB,
        "smi_bytes": 5 * GIB,
        "verdict": "fits",
        "fits": True,
        "because": "it fits",
        "peak_bytes": 4 * GIB,
        "peak_phase": "forward",
        "peak_at": {"module": "model.layers.1.mlp", "line": "modeling.py:40", "own": "train.py:8"},
        "breakdown": most,
        "reserved_bytes": 4 * GIB,
        "layout": {"dp": 4, "zero_stage": 2},
        "run": {"model": "gpt2", "micro_batch": 8},
        "phases": [{"name": "forward", "step": n, "peak_bytes": (3 + n) * GIB} for n in range(2)],
        "knobs": [{"change": "--micro-batch 4", "peak_bytes": 3 * GIB, "reserved_bytes": 3 * GIB, "fits": True}],
        "stages": [{"rank": n, "peak_bytes": n * GIB, "peak_phase": "backward", "fits": True} for n in (1, 2)],
        "timeline": [
            {"t": 0, "phase": "build", "step": -1, "bytes": {"parameters": GIB}, "at": "train.py:3"},
            {"t": 4, "phase": "forward", "step": 0, "bytes": most, **where},
            {"t": 9, "phase": "step", "step": 0, "bytes": last},
        ],
    }
    return facts | more


def a_failed_run(folder: Path) -> Path:
    """A run folder of 8 steps that was restarted once and then ran out of memory."""
    a_run(folder)
    (folder / "run.json").write_text(json.dumps({"model": MARKUP, "lr": 0.1}))
    (folder / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    plan = {"steps": 10, "step_s": 0.5, "layout": {"dp": 2, "zero_stage": 3}, "forecast": {"phases": {"step": GIB}}}
    (folder / "plan.json").write_text(json.dumps(plan))
    faults = [
        {"time_s": 1.7e9, "kind": "rank-ended", "ranks": [1], "host": "b", "message": "rank 1 was killed"},
        {"cause": "rank 1 was killed", "restarting_after_s": 12.5, "left_out": []},
    ]
    (folder / "logs" / "faults.jsonl").write_text("".join(json.dumps(fault) + "\n" for fault in faults))
    for rank, kind, message in ((0, "peer-lost", "lost rank 1"), (1, "out-of-memory", "CUDA out of memory")):
        problems = [{"kind": kind, "message": message}]
        (folder / "logs" / f"rank-{rank}.error.json").write_text(json.dumps({"rank": rank, "problems": problems}))
    return folder


def run(*args: str | Path, code: int = 0):
    done = CliRunner().invoke(main, list(map(str, args)))
    assert done.exit_code == code, done.output + done.stderr
    return done


REPLAY = Replay(
    cause="overflow-of-fp16",
    summary="fp16 overflows.",
    step=23,
    start="/runs/a/checkpoints/step-00000020",
    start_step=20,
    precision="fp16",
    module="layers.1.mlp",
    line="model.py:9",
    inputs=("x: up to 65504",),
    evidence=(MARKUP,),
    rank=1,
)


TRIAL = {"forecast_step_s": 2.5, "measured_step_s": 4.0, "spread": 0.25, "status": "ok", "configuration": "ZeRO 0"}
FAILED = TRIAL | {"measured_step_s": None, "spread": None, "status": "oom", "reason": MARKUP}
ARRANGEMENT = {
    "name": "colocate",
    "fits": True,
    "layout": {"zero_stage": 3, "micro_batch": 2},
    "phases": {"generate": {"vLLM weights": 2 * GIB}, "train": {"trained model": GIB, MARKUP: 2 * GIB}},
    "highest": "train",
    "highest_bytes": 3 * GIB,
    "device_total_bytes": 8 * GIB,
    "time": {"step_s": 1.25, "train_s": 1.0, "generate_s": 0.25, "tokens_per_s": None},
}
SEARCHES = {
    "serving": {
        "model": "gpt2",
        "gpu": "l4",
        "gpus": 1,
        "release": "0.27",
        "settings": {"max_model_len": 1024},
        "device_total_bytes": 8 * GIB,
        "requested_bytes": 7 * GIB,
        "cache_tokens": 4096,
        "sequences": 4.0,
        "breakdown": {"weights": 2 * GIB, "activations": GIB},
        "longest": 1024,
        "fits": False,
        "problem": MARKUP,
        "largest_utilization": 0.9,
        "smallest_utilization": 0.5,
        "remedies": ["use two GPUs"],
    },
    "rollout": {
        "method": "grpo",
        "model": "gpt2",
        "gpu": "l4",
        "ranks": 2,
        "seq_len": 512,
        "fits": True,
        "arrangements": [ARRANGEMENT, ARRANGEMENT | {"name": MARKUP, "fits": False}],
    },
    "tune": {
        "trials": [TRIAL, FAILED],
        "regret": {"best_step_s": 4.0, "untried": 7, "gap": 0.1, "at_most": 0.3},
        "considered": 9,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def pages(folder) -> dict[str, Path]:
    """One page of each kind, and one with several results side by side."""
    found = {
        name: folder / f"{name}.html"
        for name in (
            *("plan", "serving", "rollout", "tune", "explain", "failure", "replay", "check", "run", "simulation"),
            *("extreme", "several"),
        )
    }
    for name, value in SEARCHES.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
        run("report", folder / f"{name}.json", "--out", found[name])
    plan = folder / "plan.json"
    plan.write_text("a log before it\n" + run(*PLAN, "--html", found["plan"]).stdout)
    (folder / "train.log").write_text(LOG)
    run("explain", folder / "train.log", "--html", found["explain"])
    (folder / "crash.log").write_text("bash: line 1: 7 Segmentation fault")
    run("explain", folder / "crash.log", "--html", found["failure"])
    (folder / "replay.json").write_text(json.dumps(REPLAY.to_dict()))
    run("report", folder / "replay.json", "--out", found["replay"])
    (folder / "ds.json").write_text('{"train_batch_size": 8, "zero_optimisation": {"stage": 3}}')
    run("check", folder / "ds.json", "--html", found["check"], code=2)
    saved = {"first": a_simulation(), "second": a_simulation(run={"model": MARKUP, "micro_batch": 4})}
    for name, value in saved.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    failed = a_failed_run(folder / "failed")
    run("report", failed, "--out", found["run"])
    run("report", folder / "first.json", "--out", found["simulation"])
    far = {"t": 10**30, "phase": MARKUP, "step": 10**20, "bytes": {MARKUP: 10**39}, "module": MARKUP}
    extreme = a_simulation(peak_bytes=10**39, timeline=[*a_simulation()["timeline"], far])
    (folder / "extreme.json").write_text(json.dumps(extreme))
    run("report", folder / "extreme.json", "--out", found["extreme"])
    sources = [folder / "first.json", folder / "second.json", plan, failed, a_run(folder / "other")]
    run("report", *sources, "--out", found["several"])
    return found


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_pages_load_nothing_and_are_small(pages):
    for page in pages.values():
        text = text_of(page)
        assert len(text) < 2e6
        assert "default-src 'none'" in text
        assert "<img" not in text and "onerror=alert" not in text.replace("img src=x onerror=alert", "")
    assert "{{ 7 * 7 }}" in text_of(pages["run"])


@pytest.fixture(scope="module")
def seen(pages, folder) -> dict[View, dict]:
    views = [View(page=name, width=width, dark=width == 1280) for name in pages for width in (390, 1280, 2560)]
    return looked_at(pages, views, folder)


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser (Debian: chromium)")
def test_every_page_at_every_width_without_errors(pages, seen):
    assert len(seen) == 3 * len(pages)
    for view, page in seen.items():
        assert (page["errors"], page["wide"], page["images"]) == ([], [], 0), view
        assert not (page["cut"] and view.width == 390), view
        assert page["scroll"] <= page["inner"] == view.width
        assert all(0 < chart["width"] <= view.width for chart in page["charts"])
        assert page["paper"] == ("rgb(21, 24, 29)" if view.dark else "rgb(255, 255, 255)")
        assert "taken" not in page["text"].replace(MARKUP, "")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser (Debian: chromium)")
def test_charts_answer_to_the_keyboard(seen):
    (memory,) = seen[View(page="simulation", width=390)]["charts"]
    assert memory["first"] == "1.00 GiB  in build, train.py:3" + "parameters 1.00 GiB"
    highest = "activations 2.00 GiB, parameters 1.00 GiB, unknown to zerofit 1.00 GiB"
    assert memory["second"] == "4.00 GiB  in forward of step 1, model.layers.1.mlp, modeling.py:40" + highest
    assert memory["full"] == memory["reset"] == [0, 9]
    assert memory["zoomed"] == [1.75, 6.25]  # half of it, around the selected moment
    charts = seen[View(page="run", width=2560)]["charts"]
    assert [chart["first"] for chart in charts[:2]] == ["step 1loss (nats) 3", "step 1tokens per second 100"]


def test_figures_of_a_simulation(pages):
    text = text_of(pages["simulation"])
    for shown in (
        "5.00 GiB of 8.00 GiB",
        "4.00 GiB in forward",
        "train.py:8",
        "ZeRO-2, dp 4",
        "rank 3 of 4 on a100-40gb",
    ):
        assert shown in text
    assert "<td>-25%</td>" in text  # 3 GiB after the change, for 4 GiB
    assert "width:50.000%" in text  # half of the peak is activations; the device's memory is the scale's end
    assert "2.00 GiB in backward" in text  # the ranks of two stages


def test_figures_of_a_plan(pages, folder):
    plan = json.loads((folder / "plan.json").read_text().splitlines()[-1])
    text = text_of(pages["plan"])
    assert '<th scope="row">1 x 8 x l4</th>' in text
    assert f"Fits: {plan['fitting']:,} of {plan['considered']:,} layouts" in text
    chart = json.loads(text.split('<script type="application/json">')[1].split("</script>")[0])
    line = next(line for line in chart["lines"] if line["label"] == "frontier")
    speeds = [speed for speed in line["values"] if speed is not None]
    assert speeds == sorted(speeds) and len(speeds) == len(plan["frontier"]) > 3  # more memory is faster
    assert chart["x"] == sorted(chart["x"])
    dots = [
        (x, y)
        for line in chart["lines"]
        if line["label"] == "fits"
        for x, y in zip(chart["x"], line["values"], strict=True)
    ]
    assert {(x, y) for x, y in dots if y} == {(row["peak_bytes"], row["samples_per_s"]) for row in plan["layouts"]}
    for row in plan["layouts"]:  # nobody beats the frontier
        assert any(
            p["peak_bytes"] <= row["peak_bytes"] and p["samples_per_s"] >= row["samples_per_s"]
            for p in plan["frontier"]
        )


def test_figures_of_searches(seen):
    shown = {view.page: found["text"] for view, found in seen.items()}
    for words in ("Does not fit", "use two GPUs", "2.00 GiB", "66.7%", "4,096 tokens"):
        assert words in shown["serving"]
    for words in ("train: 3.00 GiB of 8.00 GiB", "1.25 s", "ZeRO-3, micro batch 2", "does not fit"):
        assert words in shown["rollout"]
    for words in ("Best: 4 s per step", "4 s (forecast 2.5 s)", "25.0%", "7; none saves more than 30.0%", "oom"):
        assert words in shown["tune"]


def test_parts_of_a_bar_have_different_colors():
    named = Bars(bars=[Bar(label="", parts=dict.fromkeys((*COLORS, *"abc"), 1.0), text="")])
    few = Bars(
        bars=[Bar(label="", parts=dict.fromkeys(("activations", "gathered parameters", *"abcdef"), 1.0), text="")]
    )
    assert len(set(named.colors.values())) >= len(COLORS)
    assert len(set(few.colors.values())) == 8


def test_figures_of_a_failed_run(pages):
    text = text_of(pages["run"])
    assert "Failed: 8 of 10 steps" in text and "rank 1: CUDA out of memory" in text
    assert "2023-11-14 22:13:20 UTC" in text and "12.5 s" in text  # the fault, and the restart after it
    assert "<td>1.00 GiB</td><td>not forecast</td>" in text
    assert "&#34;stage&#34;: 3" in text  # what DeepSpeed got


def test_figures_of_an_explanation_and_a_check(pages):
    explained, checked = text_of(pages["explain"]), text_of(pages["check"])
    assert "/home/user/train.py:12" in explained and "2.00 GiB" in explained
    assert "1 error" in checked and "zero_optimization" in checked


def test_figures_of_a_failure_and_a_replay(pages):
    failed, replayed = text_of(pages["failure"]), text_of(pages["replay"])
    assert "explained: crash" in failed and "Changes that help" in failed and "not simulated" not in failed
    for text in ("Overflow of fp16", "layers.1.mlp", "model.py:9", "step-00000020 (step 20), in fp16", "up to 65504"):
        assert text in replayed


def test_results_side_by_side_show_what_differs(pages):
    text = text_of(pages["several"])
    assert "5 results side by side" in text
    assert re.search('<th scope="row">micro_batch</th><td [^>]*>8</td><td [^>]*>4</td>', text)
    assert "first.json: activations" not in text and "second.json: --micro-batch 4" in text


def test_json_of_the_command(folder, pages):
    done = run("report", folder / "first.json", "--out", folder / "again.html", "--json")
    found = json.loads(done.stdout)
    assert found["sources"] == [{"kind": "simulation", "title": "gpt2, rank 3 of 4 on a100-40gb"}]
    assert text_of(Path(found["page"])) == text_of(pages["simulation"])


BAD = {
    "no JSON": ("no json", "expecting value"),
    "no result": ('{"a": 1}', "no result of zerofit"),
    "an error": ('{"error": {"message": "out of disk"}}', "out of disk"),
    "a wrong value": (json.dumps(a_simulation(peak_bytes="many")), "peak_bytes"),
    "no finite number": (json.dumps(a_simulation(knobs=[{"change": "a", "slowdown": float("nan")}])), "knobs.0"),
    "a negative size": (json.dumps(a_simulation(breakdown={"parameters": -1})), "breakdown.parameters"),
    "no arrangement": (json.dumps(SEARCHES["rollout"] | {"arrangements": []}), "arrangements: "),
    "no trial": (json.dumps(SEARCHES["tune"] | {"trials": []}), "trials: "),
}


def test_bad_files_are_refused_all_at_once(tmp_path):
    paths = []
    for name, (text, _) in BAD.items():
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(text)
    (tmp_path / "empty").mkdir()
    done = run("report", *paths, tmp_path / "empty", tmp_path / "none", "--out", tmp_path / "a.txt", "--json", code=2)
    errors = json.loads(done.stdout)["errors"]
    assert [error["where"] for error in errors] == [
        "--out",
        *map(str, paths),
        str(tmp_path / "empty"),
        str(tmp_path / "none"),
    ]
    for error, (_, why) in zip(errors[1:], BAD.values(), strict=False):
        assert why in error["message"]
    assert not list(tmp_path.glob("*.txt"))


def test_damaged_run_folders_still_have_a_page(tmp_path):
    """Values of other types, numbers that are not finite, and files that are cut."""
    folder = a_failed_run(tmp_path / "run")
    far = {"train_loss": "low", "eval": [], "stages": [1, {"stage": 0}], "layout": []}
    far |= {"against_forecast": {"memory_bytes": {"measured": float("inf"), "forecast": 1}, "host_bytes": 3}}
    (folder / "result.json").write_text(json.dumps(far))
    phases = {"step": "big", "save": float("inf")}
    (folder / "plan.json").write_text(json.dumps({"steps": float("nan"), "layout": [], "forecast": {"phases": phases}}))
    (folder / "ds_config.json").write_text("{")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": NaN, "memory_bytes": Infinity}\n{"step": 10, "los')
    with (folder / "logs" / "faults.jsonl").open("a") as file:
        file.write('{"time_s": 1e300, "ranks": 3, "message": null, "restarting_after_s": "soon"}\n')
    run("report", folder, "--out", tmp_path / "page.html")
    assert "Done" in text_of(tmp_path / "page.html")


@pytest.mark.parametrize(
    "command", [PLAN, ["check", "ds.json"], ["explain", "a.log"], ["replay", "a"], ["simulate", "gpt2"]]
)
def test_a_page_that_cannot_be_written_is_refused_before_any_work(command, tmp_path):
    done = run(*command, "--html", tmp_path / "missing" / "page.html", code=2)
    assert "cannot be written" in done.stderr
    with pytest.raises(UserError, match=r"cannot write .*page\.html"):
        Page(title="a page").write(tmp_path / "missing" / "page.html", "--out")


def test_many_large_results_stay_below_two_megabytes(tmp_path):
    where = {"module": "model.layers.17.mlp.down_proj", "at": "transformers/models/llama/modeling_llama.py:142"}
    kinds = dict.fromkeys(COLORS, GIB)
    moments = [{"t": t, "phase": "forward", "step": 0, "bytes": kinds | {"other": t}, **where} for t in range(2000)]
    row = {"micro_batch": 1, "peak_bytes": GIB, "samples_per_s": 1.0, "step_s": 1.0, "fits": True, "verdict": "fits"}
    layouts = [
        row | {"zero_stage": n, "layout": f"ZeRO-{n}", "breakdown": kinds, "time": {"compute_s": 1.0}}
        for n in range(1000)
    ]
    cluster = {"gpu": "l4", "gpus": 8, "nodes": 1, "device_bytes": GIB}
    plan = {"model": "m", "parameters": 1, "precision": "bf16", "cluster": cluster, "layouts": layouts}
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"considered": 1000, "fitting": 1000}))
    (tmp_path / "simulation.json").write_text(json.dumps(a_simulation(timeline=moments)))
    folder = a_run(tmp_path / "run")
    lines = [json.dumps({"step": n, "loss": 1 / n, "step_s": 0.5, "memory_bytes": n}) for n in range(1, 2001)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    paths = [tmp_path / "plan.json", *[tmp_path / "simulation.json"] * 6, *[folder] * 6]
    run("report", *paths, "--out", tmp_path / "page.html")
    text = text_of(tmp_path / "page.html")
    assert len(text) < 2e6
    assert "700 more in the output of --json." in text
    # the highest moment and the last step are never left out
    charts = [json.loads(part.split("</script>")[0]) for part in text.split('<script type="application/json">')[1:]]
    assert max(map(max, (line["values"] for line in charts[4]["lines"]))) == GIB
    assert [chart["x"][-1] for chart in charts if chart["title"] == "loss (nats)"] == [2000]
