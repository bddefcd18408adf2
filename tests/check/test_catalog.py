"""What we ship about DeepSpeed's keys is what the installed DeepSpeed shows; nothing of it is unknown to us."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from torch.torch_version import TorchVersion

from zerofit.check import catalog as catalog_module
from zerofit.check.catalog import DERIVED_WITH, catalog, read_data
from zerofit.check.check import check
from zerofit.check.document import of_data, parse
from zerofit.check.reader import schema
from zerofit.check.subject import TargetHardware
from zerofit.config.ds_json import bundled

DEEPSPEED = Path(importlib.metadata.distribution("deepspeed").locate_file("deepspeed"))


@pytest.fixture(scope="module")
def derived() -> dict:
    done = subprocess.run([sys.executable, "-m", "zerofit.check.derive"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def paths(node: dict, prefix: str = ""):
    for key, child in node.get("properties", {}).items():
        yield prefix + key
        yield from paths(child, f"{prefix}{key}.")


def test_the_shipped_catalogue_is_that_of_the_installed_deepspeed(derived):
    """Fails when a new DeepSpeed adds, drops or changes keys: derive it anew, and describe what is new."""
    shipped = read_data(f"deepspeed-{derived['version']}.json")
    if TorchVersion(torch.__version__) < ".".join(map(str, DERIVED_WITH)):  # whose optimizers take less
        assert catalog().optimizers == derived["optimizers"]
        assert shipped["optimizers"].keys() == derived["optimizers"].keys()
        shipped["optimizers"] = derived["optimizers"]
    assert shipped == derived


def test_every_key_is_described_and_every_description_has_its_key(derived):
    known, old = set(paths(derived["schema"])), set(derived["deprecated"])
    aliases = {p for p in known if any(p == o or p.startswith(f"{o}.") for o in old)}
    described = set(read_data("descriptions.json"))
    assert described <= known
    assert known - described <= aliases
    assert set(read_data("refinements.json")) <= known


def test_keys_of_pydantic_classes_are_all_there():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    mine = catalog().node("zero_optimization")["properties"]
    for name, field in DeepSpeedZeroConfig.model_fields.items():
        assert {name, field.alias or name} <= set(mine)
    assert mine["reduce_bucket_size"]["default"] == DeepSpeedZeroConfig().reduce_bucket_size
    assert mine["stage"]["enum"] == [0, 1, 2, 3]


def test_keys_that_the_source_names_are_all_there():
    """A second way to them: the strings that DeepSpeed's reader passes to its getters by constants."""
    from deepspeed.runtime import constants

    source = (DEEPSPEED / "runtime" / "config.py").read_text()
    names = re.findall(r"get_scalar_param\(\s*param_dict,\s*([A-Z_]+)", source)
    assert len(names) > 15
    known = set(paths(catalog().schema))
    assert {getattr(constants, name) for name in names} <= known


def test_removed_keys_are_refused_by_deepspeed():
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    assert len(catalog().removed) >= 10
    for path in catalog().removed:
        *parent, key = path.split(".")
        config = {"train_batch_size": 1, **({parent[0]: {key: 1}} if parent else {key: {}})}
        with pytest.raises(DeepSpeedConfigError, match="has been removed"):
            DeepSpeedConfig(config)


def test_another_version_is_derived_once_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path))
    monkeypatch.setattr(catalog_module, "_shipped", lambda version: None)
    shipped = catalog()
    catalog.cache_clear()
    try:
        assert catalog() == shipped
        (kept,) = (tmp_path / "catalog").iterdir()
        kept.write_text(kept.read_text().replace('"gradient_clipping"', '"gradient_clopping"'))
        catalog.cache_clear()
        assert catalog().node("gradient_clopping") and not catalog().node("gradient_clipping")
    finally:
        catalog.cache_clear()


def test_the_schema_takes_what_we_ship_and_refuses_misspellings():
    made = schema()
    jsonschema.Draft202012Validator.check_schema(made)
    validator = jsonschema.Draft202012Validator(made)
    for path in bundled().values():
        assert not list(validator.iter_errors(json.loads(path.read_text()))), path
    for broken in (
        {"zero_optimisation": {}},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stage": "auto"}},
        {"fp16": {"enabled": "yes"}},
        {"train_batch_size": 0},
        {"zero_optimization": {"offload_param": {"device": "disk"}}},
    ):
        assert list(validator.iter_errors(broken)), broken
    hover = made["properties"]["zero_optimization"]["properties"]["reduce_bucket_size"]
    assert "elements" in hover["description"] and hover["default"] == 500_000_000


@pytest.mark.parametrize("package", ["deepspeed", "transformers", "accelerate"])
def test_no_false_alarm_on_what_others_ship(package):
    """Every JSON below these packages that is a DeepSpeed configuration passes without an error."""
    root = Path(importlib.metadata.distribution(package).locate_file(package))
    files = [p for p in root.rglob("*.json") if "zero_optimization" in p.read_text(errors="ignore")]
    assert files or package != "deepspeed"
    for path in files:
        assert not [f for f in check(parse(path.read_text()), TargetHardware()) if f.severity == "error"], path


@pytest.mark.parametrize("name", sorted(bundled()))
def test_no_false_alarm_on_what_we_ship(name):
    for setting in (TargetHardware(), TargetHardware(ranks=8, accelerator="cuda")):
        found = check(parse(bundled()[name].read_text()), setting)
        assert not [f for f in found if f.severity == "error"]


def test_examples_of_the_documentation_pass():
    """Settings as users have them: Hugging Face's, with every "auto" that its integration fills."""
    config = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    assert check(of_data(config), TargetHardware()) == []
