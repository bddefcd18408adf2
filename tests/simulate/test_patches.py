"""What simulations change must exist in the installed versions, and stays unchanged everywhere else."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from zerofit.simulate import patches

pytestmark = pytest.mark.versions

# patch -> where it reaches in: module and attribute
REPLACED = {
    "module_apply": [("torch.nn", "Module._apply")],
    "item": [("torch._subclasses.fake_impls", "op_implementations_dict"), ("torch", "equal")],
    "masks": [
        ("transformers.masking_utils", "is_tracing"),
        ("transformers.masking_utils", "find_packed_sequence_indices"),
    ],
    "order_checks": [
        ("deepspeed.runtime.zero.utils", "get_lst_from_rank0"),
        ("deepspeed.runtime.zero.utils", "assert_lst_len_same_as_other_ranks"),
    ],
    "device_mesh": [("deepspeed.comm", "initialize_mesh_device"), ("deepspeed.comm.comm", "initialize_mesh_device")],
    "object_collectives": [("torch.distributed", "broadcast_object_list"), ("torch.distributed", "all_gather_object")],
    "compiled_ops": [("deepspeed.ops.op_builder.builder", "OpBuilder.load")],
    "rng_state": [("torch", "get_rng_state"), ("torch.random", "get_rng_state")],
    "tensor_constructor": [("torch", "tensor"), ("deepspeed.runtime.zero.partition_parameters", "_orig_torch_tensor")],
    "constants": [("torch._subclasses.fake_tensor", "FakeTensorMode._dispatch_impl")],
    "backend_keys": [("torch", "Tensor._make_subclass")],
    "data_setter": [("torch._C", "TensorBase.data")],
    "attention": [("torch.nn.functional", "scaled_dot_product_attention")],
    "record_stream": [("torch", "Tensor.record_stream")],
}  # fmt: skip


def found(module: str, path: str):
    value = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("patch", REPLACED)
def test_what_a_patch_replaces_is_there(patch):
    for module, path in REPLACED[patch]:
        assert found(module, path) is not None, f"patch {patch}: {module}.{path} is gone in the installed version"


def test_every_patch_is_listed():
    everywhere = [p.__name__ for p in (*patches.EVERYWHERE, *patches.ON_GPU)]
    assert {*everywhere, "compiled_ops", "item", "rng_state"} == set(REPLACED)


def test_every_patch_says_why():
    for name in REPLACED:
        assert len(inspect.getdoc(getattr(patches, name)) or "") > 60


def test_nothing_is_patched_outside_of_a_simulation(simulated):
    for places in REPLACED.values():
        for module, path in places:
            value = found(module, path)
            assert not (getattr(value, "__module__", "") or "").startswith("zerofit.simulate"), f"{module}.{path}"
    assert torch.equal(torch.zeros(1), torch.ones(1)) is False
