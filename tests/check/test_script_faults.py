"""Faults of a training script that the JSON, the model or the arguments show; each has twins without the fault."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn

import zerofit as zf
from tests.check.corpus import TINY
from zerofit.check.check import check
from zerofit.check.document import of_data
from zerofit.check.rule import rules_of
from zerofit.check.subject import GivenArgument, TargetHardware
from zerofit.train.probe import expert_lists

GIB = 2**30
CODES = {rule.code for rule in rules_of((files("zerofit.check") / "rules" / "script.yaml").read_text())}
BFLOAT = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


class Mixture(nn.Module):
    """Chooses an expert by the first value of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x[0] > 0)](x)


MIXTURE = f"{__name__}.Mixture"


def faults(stage: int = 2, zero: Any = None, arguments: Any = None, config: Any = None, **setting: Any) -> set[str]:
    """The codes of script.yaml that are found in a DeepSpeed JSON without other faults of the script."""
    values = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": stage} | (zero or {}),
    }
    given = {n: GivenArgument(value=v, source=f"{n} {v}", place="run.sh:1") for n, v in (arguments or {}).items()}
    setting = {"reader": "trainer", "ranks": 8, "arguments": given} | setting
    return {f.code for f in check(of_data(values | (config or {})), TargetHardware(**setting))} & CODES


def offloading(where: str = "cpu", *, pinned: bool = True, billions: int = 70, gib: int = 1024) -> dict[str, Any]:
    """An offloaded optimizer of a model of this size, on nodes with this host memory."""
    size = billions * 10**9
    return {
        "stage": 3,
        "zero": {"offload_optimizer": {"device": where, "pin_memory": pinned, "nvme_path": "/tmp"}},
        "facts": replace(TINY, parameters=size),
        "host_bytes": gib * GIB,
    }


CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "padding": (
        [{"arguments": {"pad_to_max_length": True}}, {"arguments": {"pad_to_sequence_len": True}}],
        [
            {"arguments": {"pad_to_max_length": False}},
            {"arguments": {"pad_to_sequence_len": True, "sample_packing": True}},
            {"arguments": {"pad_to_max_length": True, "torch_compile": True}},
        ],
    ),
    "second-copy": (
        [
            {"arguments": {"stage": "dpo", "finetuning_type": "full"}},
            {"arguments": {"stage": "kto", "pref_loss": "simpo"}},
            {"arguments": {"rl": "dpo"}},
        ],
        [
            {"arguments": {"stage": "dpo"}, "stage": 3},
            {"arguments": {"stage": "dpo", "finetuning_type": "lora"}},
            {"arguments": {"stage": "dpo", "pref_loss": "orpo"}},
            {"arguments": {"stage": "sft"}},
            {"arguments": {"rl": "dpo", "adapter": "qlora"}},
            {"arguments": {"rl": "dpo", "precompute_ref_log_probs": True}},
            {"arguments": {"rl": "orpo"}},
        ],
    ),
    "unused-search": (
        [{"arguments": {"ddp_find_unused_parameters": True}}],
        [{"arguments": {"ddp_find_unused_parameters": False}}],
    ),
    "half-weights": (
        [{"config": {"bf16": BFLOAT}}],
        [
            {"config": {"bf16": BFLOAT, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}},
            {"config": {"bf16": BFLOAT | {"enabled": False}}},
            {},
        ],
    ),
    "expert-leaves": (
        [
            {"stage": 3, "facts": replace(TINY, expert_lists=(MIXTURE,))},
            {"stage": 3, "facts": replace(TINY, expert_lists=(MIXTURE,)), "zero": {"leaf_module": {"classes": ["No"]}}},
        ],
        [
            {"stage": 3, "facts": replace(TINY, expert_lists=(MIXTURE,)), "zero": {"leaf_module": {"classes": leaves}}}
            for leaves in ([MIXTURE], ["Mixture"], "Mixture")
        ]
        + [
            {"stage": 2, "facts": replace(TINY, expert_lists=(MIXTURE,))},
            {"stage": 3, "facts": replace(TINY, expert_lists=(MIXTURE,)), "ranks": 1},
            {"stage": 3, "facts": TINY},
        ],
    ),
    "pinned-memory": (
        [offloading(gib=700)],
        [offloading(), offloading(billions=7, gib=128), offloading("nvme", gib=128)],
    ),
    "host-memory": ([offloading(pinned=False, gib=700)], [offloading(pinned=False)]),
}


@pytest.mark.parametrize("code", CASES)
def test_a_fault_is_found_and_its_twins_have_none(code: str):
    faulty, healthy = CASES[code]
    assert [faults(**case) for case in faulty] == [{code}] * len(faulty)
    assert [faults(**case) for case in healthy] == [set()] * len(healthy)


def test_every_rule_about_scripts_has_a_case():
    assert set(CASES) == CODES


def test_a_lost_update_is_lost():
    lr = 1e-5
    (finding,) = zf.check(
        {
            "train_batch_size": 8,
            "gradient_clipping": 1.0,
            "bf16": BFLOAT,
            "optimizer": {"type": "AdamW", "params": {"lr": lr}},
            "zero_optimization": {"stage": 2},
        },
        reader="deepspeed",
    ).findings
    assert "above 0.0051" in finding.why
    for size, moves in ((0.0052, False), (0.001, True)):
        weight = torch.nn.Parameter(torch.full((1,), size, dtype=torch.bfloat16))
        before = weight.item()
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=lr, weight_decay=0).step()
        assert (weight.item() != before) is moves


def test_deepspeed_finds_the_classes_of_expert_lists():
    model = nn.Sequential(nn.Linear(4, 4), Mixture(), Mixture())
    assert expert_lists(model) == (MIXTURE,)
    assert set_z3_leaf_modules(model, list(expert_lists(model))) == [model[1], model[2]]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_least_host_memory_is_below_the_plan(stage: int):
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": zero,
    }
    run = zf.Run(model="llama-3.1-8b", ds_config=config, ranks=8, micro_batch=1, seq_len=1024)
    planned = zf.plan(run, zf.Cluster("a100-80gb", gpus=8, host_memory="2TiB")).to_dict()["layouts"][0]["host_bytes"]
    size, enough = 8_030_261_248 * 12, 8_030_261_248 * 14
    facts = replace(TINY, parameters=8_030_261_248)
    assert size < 8 * planned
    for host, found in ((size, {"pinned-memory"}), (enough, set())):
        assert faults(stage, zero, config=config, facts=facts, host_bytes=host) == found


def test_arguments_of_a_shell_script_are_named_with_their_line(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("deepspeed train.py --deepspeed ds.json \\\n  --learning_rate 1e-5 --pad_to_max_length True\n")
    config = {"train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
    found = zf.check(config, training_args=script).findings
    (finding,) = (f for f in found if f.code == "padding")
    assert finding.message.startswith(f"pad_to_max_length True ({script}:2) pads each row")


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("block_size", (512, 1536, 1_048_576, "auto"), (0, -1, 256, 1_000_000)),
        ("queue_depth", (1, 32_768), (0, -1)),
        ("intra_op_parallelism", (1, 3), (0, -1)),
    ],
)
def test_sizes_with_which_the_aio_op_reads_wrong_data_or_crashes(key, right, wrong):
    def stops(value: Any, device: str = "nvme") -> bool:
        offload = {"device": device, "nvme_path": "/tmp"}
        config = {
            "train_batch_size": 8,
            "aio": {key: value},
            "zero_optimization": {"stage": 3, "offload_param": offload},
        }
        return "aio-size" in {f.code for f in check(of_data(config), TargetHardware())}

    assert not any(map(stops, right))
    assert all(map(stops, wrong))
    assert not stops(wrong[0], device="cpu")  # DeepSpeed does not use the op
