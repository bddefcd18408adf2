"""A DeepSpeed without the attributes that saving needs is refused when its engine is made, not hours later."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime import compiler

from zerofit.spec.errors import RunFailed
from zerofit.train import engines
from zerofit.train.engines import import_muon
from zerofit.train.zero_layouts import check_attributes


def engine(**changes) -> SimpleNamespace:
    names = ["checkpoint_engine", "seq_data_parallel_group", "seq_dp_world_size", "zenflow", "has_moe_layers"]
    names += ["param_names", "global_steps", "global_samples", "skipped_steps", "lr_scheduler"]
    names += ["_copy_recovery_script", "_get_ckpt_name", "_get_zero_ckpt_name", "_consolidated_16bit_state_dict"]
    return SimpleNamespace(**dict.fromkeys([*names, "clip_fp32_gradients"]) | {"optimizer": None} | changes)


def test_what_is_missing_is_named_with_the_version():
    class DeepSpeedZeroOptimizer:  # as a later version might have it
        optimizer = round_robin_bit16_groups = round_robin_bit16_offsets = real_dp_process_group = None
        elastic_checkpoint = single_partition_of_fp32_groups = cpu_offload = update_lp_params = None
        scaled_global_norm = _model_parallel_all_reduce = None

    check_attributes(engine())
    broken = engine(optimizer=DeepSpeedZeroOptimizer())
    del broken.zenflow
    with pytest.raises(RunFailed) as caught:
        check_attributes(broken)
    problem = caught.value.problem
    assert problem.kind == "deepspeed-version"
    assert f"DeepSpeed {deepspeed.__version__} " in problem.message
    assert "SimpleNamespace.zenflow, DeepSpeedZeroOptimizer.partition_size," in problem.message
    assert "pip install" in problem.hint


MUON = "deepspeed.runtime.zero.muon.original_muon"


@pytest.mark.versions(of="deepspeed")
def test_engines_import_muon_without_what_compiles_it():
    code = "import sys; from zerofit.train.engines import import_muon; import_muon(); "
    code += f"sys.exit('torch._inductor.compile_fx' in sys.modules or '{MUON}' not in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


@pytest.mark.versions(of="deepspeed")
@pytest.mark.parametrize(("device", "compiles"), [("cuda", ["zeropower_via_newtonschulz5"]), ("cpu", [])])
def test_muon_is_compiled_when_it_is_first_called_but_not_on_cpus(monkeypatch, device, compiles):
    compiled = []
    monkeypatch.setattr(engines, "accelerator", lambda: SimpleNamespace(device_name=lambda: device))
    monkeypatch.delitem(sys.modules, MUON, raising=False)
    monkeypatch.setattr(compiler, "compile", lambda: lambda function: compiled.append(function) or function)
    import_muon()
    orthogonalize = sys.modules[MUON].zeropower_via_newtonschulz5
    assert not compiled and orthogonalize.__name__ == "zeropower_via_newtonschulz5"
    for _ in range(2):
        singular = torch.linalg.svdvals(orthogonalize(torch.eye(8) + 0.1, 5).float())
        assert singular.min() > 0.6 and singular.max() < 1.3  # nearly orthogonal, as its docstring says
    assert [function.__name__ for function in compiled] == compiles
