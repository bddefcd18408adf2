"""`zerofit plan` as a user and as a script see it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from zerofit.app.planning.output_files import ds_config, run_fields, write_plan
from zerofit.check.check import check
from zerofit.check.subject import TargetHardware
from zerofit.cli.main import main
from zerofit.config.decide import decide, resolve, with_recipe
from zerofit.config.ds_json import read_document
from zerofit.plan.inverse import with_layers
from zerofit.plan.layout import PlannedLayout
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import Machine, ModelFacts
from zerofit.spec.profile import Profile
from zerofit.spec.run import Run, load_run

KEYS = {
    *("zero_stage", "offload", "micro_batch", "gradient_accumulation_steps", "dp", "tp", "pp", "sp"),
    *("activation_checkpointing", "peak_bytes", "host_bytes", "nvme_bytes", "step_s", "samples_per_s", "tokens_per_s"),
    *("mfu", "fits"),
}
H100 = ["--gpus", "8", "--gpu", "h100-80gb"]
ARGS = '{"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, ' + (
    '"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096}'
)


def run(*args: object):
    return CliRunner().invoke(main, ["plan", *map(str, args)])


def asked(*args: object, code: int = 0) -> dict:
    done = run(*args, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout.strip().splitlines()[-1])


def refused(*args: object) -> list[dict]:
    answer = asked(*args, code=2)
    return answer.get("errors") or [answer["error"]]


@pytest.fixture(scope="module")
def traced(cache) -> dict:
    """The answer for a small Llama by its name; its profile is kept in the session's cache."""
    return asked("llama-tiny", "--model-args", ARGS, "--seq-len", 1024, *H100, "--global-batch", 64)


@pytest.fixture
def stored(traced) -> list[str]:
    return ["--profile", traced["profile"], *H100]


def test_the_answer_for_scripts(traced):
    assert traced["layouts"] and set(traced["layouts"][0]) >= KEYS
    assert {"rejected", "considered", "seconds"} <= set(traced)
    steps = [row["step_s"] for row in traced["layouts"]]
    assert steps == sorted(steps)
    for row in traced["layouts"]:
        assert row["fits"] and row["peak_bytes"] + row["margin_bytes"] <= row["device_total_bytes"]
        assert row["micro_batch"] * row["gradient_accumulation_steps"] * row["dp"] == 64
        assert row["tokens_per_s"] == pytest.approx(1024 * row["samples_per_s"]) and 0 < row["mfu"] < 1
        assert sum(row["breakdown"].values()) == row["peak_bytes"]
    assert all("how" not in source and source for source in traced["rate_sources"].values())


def test_from_a_stored_profile_no_torch_is_imported(stored, tmp_path):
    code = (
        "import sys; from zerofit.cli.main import main\n"
        f"try: main({['plan', *stored, '--global-batch', '64', '--write', str(tmp_path / 'out'), '--json']})\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'torchvision'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip().splitlines()[-1] == "[]"
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["layouts"]


def test_the_second_plan_finds_the_profile(traced, monkeypatch):
    from zerofit.simulate.costs import profile

    monkeypatch.setattr(profile, "profile_model", None)
    again = asked("llama-tiny", "--model-args", ARGS, "--seq-len", 1024, *H100, "--global-batch", 64)
    assert [row["step_s"] for row in again["layouts"]] == [row["step_s"] for row in traced["layouts"]]


def test_what_people_read(stored):
    done = run(*stored, "--global-batch", 64)
    assert done.exit_code == 0
    many = run(*stored, "--global-batch", 64, "--top", 5000, "--details").stdout
    assert "layouts, each with its fastest bucket size and overlap_comm" in " ".join(many.split())
    for words in ("tokens/s", "MFU", "buckets of", "peak memory in backward", "2.00 TiB per node", "dp: data parallel"):
        assert words in done.stdout


def test_several_dimensions_are_planned_and_drawn(stored):
    flags = (*stored, "--global-batch", 64, "--tensor-parallel", 2, "--pipeline", 2)
    layouts = asked(*flags)["layouts"]
    assert {(one["dp"], one["tp"], one["pp"], one["zero_stage"]) for one in layouts} <= {(2, 2, 2, 0), (2, 2, 2, 1)}
    rows = run(*flags, "--show-mesh").stdout.splitlines()
    (last,) = (row for row in rows if row.startswith("stage 1"))
    assert last.split() == ["stage", "1", "4-5", "6-7"]


def test_nothing_fits_is_a_finding(stored):
    answer = asked(*stored, "--device-memory", "2GiB", code=1)
    assert answer["layouts"] == [] and answer["nearest_miss"]["lacks_share"] > 0
    assert sum(answer["rejected"].values()) >= answer["considered"]
    done = run(*stored, "--device-memory", "2GiB")
    assert done.exit_code == 1 and done.stdout.startswith("NOTHING FITS") and "nearest" in done.stdout


def test_the_inverse_questions(stored):
    small = [*stored, "--device-memory", "6GiB"]
    most = asked(*small, "--max", "micro-batch")["asked"]
    assert most["next_fits"] is False
    assert asked(*small, "--micro-batch", most["value"])["layouts"]
    assert not asked(*small, "--micro-batch", most["value"] + 1, code=1)["layouts"]
    deepest = asked(*small, "--max", "layers", "--pipeline", 1)["asked"]
    assert deepest["now"] == 24 and deepest["value"] > 24 and deepest["next_fits"] is False


def test_the_fewest_devices(traced, tmp_path):
    profile = with_layers(Profile.from_dict(json.loads(Path(traced["profile"]).read_text())), 240)
    (tmp_path / "deep.json").write_text(json.dumps(profile.as_dict()))
    deep = ["--profile", tmp_path / "deep.json", "--gpu", "h100-80gb", "--pipeline", 1, "--micro-batch", 1]
    deep += ["--device-memory", "16GiB", "--host-memory", "40GiB"]
    found = asked(*deep, "--gpus", 8, "--min", "gpus")
    value = found["asked"]["value"]
    assert 1 < value <= 8 and found["cluster"]["ranks"] == value == found["layouts"][0]["dp"]
    assert not asked(*deep, "--gpus", value - 1, code=1)["layouts"]
    never = asked(*deep, "--gpus", 8, "--min", "gpus", "--host-memory", "3GiB", code=1)  # less than processes take
    assert never["asked"]["value"] is None


def test_the_longest_sequence_is_traced():
    small = ["llama-tiny", *H100, "--device-memory", "5GiB", "--micro-batch", 1, "--tensor-parallel", 1]
    answer = asked(*small, "--max", "seq-len", "--activation-checkpointing", "--top", 1)["asked"]
    assert answer["value"] % 256 == 0 and answer["looked"] < 12
    assert answer["value"] == answer["limit"] or answer["next_fits"] is False


def test_the_precision_is_the_profiles(stored):
    """Traced in bf16, which a T4 has not; and fp32, which is not in the profile, is named by its flag."""
    assert asked(*stored, "--top", 1)["precision"] == "bf16"
    shown = run(*stored, "--top", 1).stdout
    assert "parameters, bf16, 1,024 tokens" in shown and "on 8 x h100-80gb" in shown
    assert refused(*stored, "--precision", "fp32")[0]["hint"] == "use --precision bf16"
    assert "t4 has no bf16" in refused(*stored[:2], "--gpu", "t4")[0]["message"]
    assert "fp16 before Ampere" in " ".join(run("--help").stdout.split())


def test_which_of_these_boxes(stored):
    answer = asked(*stored[:2], "--gpu", "l4,h100-80gb", "--gpu", "t4", "--gpus", 4, "--precision", "bf16", code=2)
    assert answer["error"]["kind"] == "precision" and "t4 has no bf16" in answer["error"]["message"]
    answer = asked(*stored[:2], "--gpu", "l4,h100-80gb", "--gpus", 4)
    assert [box["gpu"] for box in answer["boxes"]] == ["h100-80gb", "l4"]
    assert answer["cluster"]["gpu"] == "h100-80gb" and answer["boxes"][1]["layout"]["fits"]


def test_bad_input_is_said_all_at_once(stored, tmp_path):
    problems = refused(*stored[:2], "--gpu", "h100", "--gpus", 0, "--host-memory", "much")
    assert [p["kind"] for p in problems] == ["bad-value", "bad-size", "unknown-gpu"]
    assert problems[2]["hint"] == "did you mean h100-80gb or h100-pcie-80gb?"
    assert refused(*stored[:2], "--gpu", "rtx-4091")[0]["hint"].startswith("did you mean rtx4090 or ")
    assert refused(*stored, "--tensor-parallel", 5, "--gpus", 5)[0]["hint"] == "possible degrees: 1, 2, 4, 8"
    assert (
        refused(*stored, "--tensor-parallel", 5, "--gpus", 24)[0]["hint"]
        == "use a multiple of 5 ranks, or a degree that divides 24"
    )
    assert refused(*stored, "--micro-batch", 3, "--global-batch", 64)[0]["kind"] == "batch-size"
    assert refused()[0]["where"] == "MODEL"
    assert refused(*stored, "llama-tiny")[0]["kind"] == "usage"
    assert refused(*stored, "--max", "layers", "--min", "gpus")[0]["kind"] == "usage"
    assert refused("resnet18", "--input", "image:3x224")[0]["where"] == "--input"
    assert refused("--profile", tmp_path / "none.json")[0]["kind"] == "profile"
    (tmp_path / "other.json").write_text('{"layers": 3}')
    assert refused("--profile", tmp_path / "other.json")[0]["kind"] == "profile"
    assert refused("llama-tyny", *H100)[0]["kind"] == "unknown-model"
    assert refused(*stored, "--max", "seq-len")[0]["where"] == "--max"


def test_without_hardware_flags_it_is_this_machine(stored, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = asked("lenet", "--global-batch", 64)
    assert found["cluster"]["gpu"] == "cpu" and found["layouts"][0]["mfu"] is None
    assert found["layouts"][0]["tokens_per_s"] is None and found["layouts"][0]["precision"] == "fp32"
    assert all(row["offload"] == "none" for row in found["layouts"])


def test_a_written_folder_can_be_copied(stored, tmp_path, monkeypatch):
    asked(*stored, "--global-batch", 64, "--write", tmp_path / "planned")
    copy = shutil.copytree(tmp_path / "planned", tmp_path / "copied")
    shutil.rmtree(tmp_path / "planned")
    for place, file in (("/", copy / "run.yaml"), (copy, Path("run.yaml")), (tmp_path, Path("copied/run.yaml"))):
        monkeypatch.chdir(place)
        for loaded in (Run.load(file), load_run(file, {}).run):
            assert Path(str(loaded.ds_config)).resolve() == copy / "ds_config.json"
    (tmp_path / "ds.json").write_text("{}")  # as before: what is not in the file's folder is relative to the process
    (copy / "other.yaml").write_text("model: gpt2\nds_config: ds.json\n")
    assert Run.load("copied/other.yaml").ds_config == "ds.json"


def test_written_files_never_replace_others(stored, tmp_path):
    answer = asked(*stored, "--global-batch", 64, "--write", tmp_path)
    assert answer["written"] == [str(tmp_path / "ds_config.json"), str(tmp_path / "run.yaml")]
    before = (tmp_path / "run.yaml").read_text()
    assert "# data: " in before
    row = answer["layouts"][answer["written_layout"]]
    assert answer["written_layout"] == (answer["plainest"] or 0)
    assert yaml.safe_load(before)["micro_batch"] == row["micro_batch"]
    problems = refused(*stored, "--write", tmp_path)
    assert [p["kind"] for p in problems] == ["output-exists"] * 2
    assert (tmp_path / "run.yaml").read_text() == before


PLAIN = PlannedLayout(zero_stage=2, micro_batch=4, accumulation=2, dp=8)
WRITTEN = [
    PLAIN,
    replace(PLAIN, zero_stage=0),
    replace(PLAIN, zero_stage=3, prefetch=1, persistence=1, bucket=500_000_000, overlap=True),
    replace(PLAIN, offload_optimizer="cpu"),
    replace(PLAIN, zero_stage=3, offload_optimizer="cpu", offload_param="cpu", checkpointing=True),
    replace(PLAIN, zero_stage=3, offload_optimizer="nvme", offload_param="nvme"),
    replace(PLAIN, zero_stage=3, offload_optimizer="nvme"),
    replace(PLAIN, zero_stage=3, offload_optimizer="nvme", offload_param="cpu"),
    replace(PLAIN, zero_stage=1, dp=4, tp=2),
    replace(PLAIN, zero_stage=3, dp=4, tp=2),
    replace(PLAIN, zero_stage=3, dp=4, sp=2),
    replace(PLAIN, zero_stage=1, dp=4, pp=2),
    replace(PLAIN, zero_stage=0, dp=4, pp=2, precision="bf16"),
]


@pytest.mark.parametrize("layout", WRITTEN, ids=lambda c: f"z{c.zero_stage}-{c.offload_optimizer}-{c.offload_param}")
def test_written_files_are_what_train_and_check_take(layout, traced, tmp_path):
    profile = Profile.from_dict(json.loads(Path(traced["profile"]).read_text()))
    args = json.loads(ARGS)
    config = ds_config(layout, profile, str(tmp_path))
    write_plan(tmp_path, run_fields(layout, profile, args, None), config, "")
    asked_for = load_run(tmp_path / "run.yaml", {})
    document = read_document(tmp_path / "ds_config.json")
    found = check(document, TargetHardware(ranks=layout.world_size, pipeline=layout.pp, accelerator="cuda"))
    assert {f.code for f in found} <= {"nvme-disk"}  # a warning about this machine
    machine = Machine(accelerator="cuda", devices=8, cores=64, device_name="NVIDIA H100", fp16=True, bf16=True)
    problems = Problems()
    decision = decide(asked_for, document, "ds_config.json", machine, problems)
    sizes = {"parameters": profile.parameters, "largest_parameter": 10**6, "hidden_size": 1024}
    facts = ModelFacts(task="causal-lm", forward_flops=None, **sizes)
    plain = resolve(document.config, with_recipe(decision, "transformer", facts, 10), facts, machine, 10, problems)
    problems.raise_if_any()
    got = decision.layout
    assert (got.dp, got.tp, got.pp, got.sp) == (layout.dp, layout.tp, layout.pp, layout.sp)
    assert got.zero_stage == layout.zero_stage and decision.run.precision == layout.precision
    assert (decision.batch.micro, decision.batch.accumulation) == (layout.micro_batch, layout.accumulation)
    assert decision.run.activation_checkpointing is layout.checkpointing
    zero = plain["zero_optimization"]
    for key, device in (("offload_optimizer", layout.offload_optimizer), ("offload_param", layout.offload_param)):
        assert zero.get(key, {}).get("device", "none") == device
    if layout.zero_stage:
        assert (zero["reduce_bucket_size"], zero["overlap_comm"]) == (layout.bucket, layout.overlap)
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["model_args"] == args
