"""The file of --space, and flags of hosts that are handed on to trials."""

from __future__ import annotations

import click
import pytest

from zerofit.app.tuning.job import KNOBS, TuneJob, allows, read_space
from zerofit.cli.launch import launch
from zerofit.cli.options import HOST_FIELDS, host_arguments, host_options
from zerofit.plan.layout import PlannedLayout
from zerofit.spec.errors import UserError
from zerofit.spec.run import Run, RunRequest
from zerofit.tune.trial import Candidate


def read(tmp_path, text):
    (tmp_path / "space.yaml").write_text(text)
    return read_space(tmp_path / "space.yaml")


def test_every_knob_is_a_figure_of_a_configuration():
    candidate = Candidate(layout=PlannedLayout(zero_stage=1, micro_batch=2), forecast_step_s=1.0, peak_bytes=1)
    assert set(KNOBS) <= set(candidate.to_dict())
    assert set(candidate.to_dict()) == {*candidate.layout.to_dict(), "compile"}


def test_values_one_or_several(tmp_path):
    allowed = read(tmp_path, "zero_stage: [1, 2]\nprecision: bf16\ncompile: [true, false]\noffload: none\n")
    assert allowed == {"zero_stage": [1, 2], "precision": ["bf16"], "compile": [True, False], "offload": ["none"]}
    row = {"zero_stage": 2, "precision": "bf16", "compile": False, "offload": "none", "micro_batch": 3}
    assert allows(allowed, row)
    assert not allows(allowed, {**row, "zero_stage": 3})


def test_everything_that_is_wrong_in_a_space(tmp_path):
    text = "zero_stage: [one, 2]\nmicro_batch: true\ncompile: 1\nprecision: fp8\nglobal_batch: 0\ntepm: 3\n"
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    told = [problem.message for problem in caught.value.problems]
    assert len(told) == 6
    assert "zero_stage: 'one' is not an integer" in told
    assert "compile: 1 is not true or false" in told
    with pytest.raises(UserError, match="unknown knob 'tepm'") as caught:
        read_space({"tepm": 3, "micro_batch": 4})
    assert caught.value.problems[0].where == "space"
    assert read_space({"micro_batch": 4, "zero_stage": (1, 2)}) == {"micro_batch": [4], "zero_stage": [1, 2]}
    with pytest.raises(UserError, match="expected a mapping, got a list"):
        read(tmp_path, "- 3\n")
    with pytest.raises(UserError, match="cannot read"):
        read_space(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(("name", "key"), [("zenflow", "zenflow"), ("superoffload", "super_offload")])
def test_a_json_whose_offloading_no_trial_would_have_is_refused(name, key):
    with pytest.raises(UserError, match=f"none of them has .*{key}"):
        TuneJob.of(RunRequest.of(Run(model="lenet", ds_config=name)))


def test_flags_of_hosts_say_the_same_again():
    @click.command()
    @host_options
    def command(**options):
        return options

    argv = ["--hostfile", "my hosts", "--exclude", "a@b:0", "--env", "A=1", "--env", "B", "--launcher", "openmpi"]
    once = command.main(argv, standalone_mode=False)
    assert set(once) == set(HOST_FIELDS)
    words = host_arguments(once)
    assert command.main(words, standalone_mode=False) == once
    parsed = launch.make_context("launch", ["mlp", *words]).params  # which trials are given
    assert {name: parsed[name] for name in HOST_FIELDS} == once
