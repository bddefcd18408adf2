"""Every place that reads options of a run reads all of them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.config.test_resolve import GPUS, LLAMA, refused, resolved
from zerofit.app.planning.layout_pins import LayoutPins, written_attributes
from zerofit.app.planning.output_files import layout_fields
from zerofit.check.dotted import get, put
from zerofit.cli.main import main
from zerofit.config.ds_json import read_for_run
from zerofit.plan.layout import KEYS, OPTIONS, PlannedLayout
from zerofit.spec.partial_training import PART_FIELDS
from zerofit.spec.profile import Savings
from zerofit.spec.run import DS_KEYS, Run, fields_of, plain_type
from zerofit.spec.run_folder import Job

# fields of a run that `plan` reads, but not as an attribute of the layout
NOT_OF_A_LAYOUT = {"model_args", "task", "global_batch", "seq_len", "micro_batch_by_rank", "ds_config", "ema"}
NOT_OF_A_LAYOUT |= {"attn_implementation", "compile", *Savings._fields, *PART_FIELDS}
# options of `plan` about the software, and those that it adds itself
OF_PLAN = {"precision", "weight_decay", "liger_kernel", "tensor_sequence_parallel", "cpu_threads"}
WORDS = {"checkpointing": True, "optimizer": "sgd", "schedule": "dualpipev", "zero_stage": 3, "overlap": True}
WORDS |= {"offload_optimizer": "cpu", "offload_param": "cpu", "pin_optimizer": False, "pin_param": False}


def test_every_field_is_a_flag_of_its_commands():
    commands = {name: main.get_command(None, name) for name in ("train", "launch", "simulate", "check", "plan")}
    flags = {name: {p.name for p in command.params} & Run.model_fields.keys() for name, command in commands.items()}
    assert flags["train"] == flags["launch"] == Run.model_fields.keys() - {"model"}
    assert flags["simulate"] == {*fields_of("simulate")}
    assert flags["check"] == {*fields_of("check"), "model"}
    assert flags["plan"] == {*fields_of("plan"), "model", "precision", "profile", "epochs"}  # its own options
    assert set(fields_of("plan")) - {*OPTIONS.values()} == NOT_OF_A_LAYOUT
    assert LayoutPins.__annotations__.keys() == {*fields_of("plan"), *OPTIONS.values(), *OF_PLAN}


# expert parallelism needs a model with experts
@pytest.mark.parametrize("field", [field for field in DS_KEYS if field != "expert_parallel"])
def test_a_run_and_the_json_have_the_same_value(field):
    value = {bool: True, int: 2, float: 0.5}[plain_type(Run.model_fields[field].annotation)]
    settings = {"machine": GPUS, "ranks": 2, "optimizer": "sgd"}
    config = {**read_for_run("zero3").config, "optimizer": {"type": "SGD"}}
    put(config, DS_KEYS[field], value)
    assert getattr(resolved(config, **settings)[0].run, field) == value
    _, plain = resolved("zero3", **settings, **{field: value})
    assert get(plain, DS_KEYS[field]) == value
    other = False if value is True else 2 * value
    assert any(problem.kind == "conflict" for problem in refused(config, **settings, **{field: other}))


def test_a_plan_reads_every_attribute_where_it_can_be_written():
    assert OPTIONS.keys() | KEYS.keys() <= {field.name for field in fields(PlannedLayout)}
    values = {attribute: WORDS.get(attribute, 2) for attribute in OPTIONS.keys() | KEYS.keys()}
    for attribute, option in OPTIONS.items():
        assert written_attributes({option: values[attribute]}, {})[attribute] == values[attribute]
    for attribute, key in KEYS.items():
        config = {"expert_parallel": {"enabled": True}}
        put(config, key, values[attribute])
        assert written_attributes({}, config)[attribute] == values[attribute]
    layout = PlannedLayout(**values)
    of_run = {attribute for attribute, option in OPTIONS.items() if option in Run.model_fields} - {"optimizer"}
    written = written_attributes(layout_fields(layout), {})
    assert {name: written[name] for name in of_run} == {name: values[name] for name in of_run}


def test_the_layout_of_a_job_has_the_values_of_its_json():
    types = {field.name: field.type for field in fields(PlannedLayout)}
    keys = {name: key.removeprefix("zero_optimization.") for name, key in KEYS.items() if "zero_optimization" in key}
    keys = {name: key for name, key in keys.items() if "." not in key and name != "zero_stage"}
    zero = {key: 7 if types[name] == "int" else False for name, key in keys.items()}
    decision, plain = resolved({"zero_optimization": {"stage": 3, **zero}}, machine=GPUS)
    job = Job(run=decision.run, layout=decision.layout, batch=decision.batch, steps=1, facts=LLAMA, ds_config=plain)
    assert {key: getattr(PlannedLayout.of(job), name) for name, key in keys.items()} == zero
