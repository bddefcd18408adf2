"""What simulations change in libraries: still there, still needed, and unchanged everywhere else."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.torch_version import TorchVersion

from tests.simulate.targets import target
from zerofit.simulate.fakes import gpu_patches, patches
from zerofit.simulate.fakes.kernels import cuda_attention
from zerofit.simulate.forecast.processes import simulate_all
from zerofit.simulate.record import RankRecord

pytestmark = pytest.mark.versions


class Reason(NamedTuple):
    """A function of a library as it is written, and the line of it that makes a patch necessary."""

    module: str  # that defines it
    path: str
    parameters: str  # first ones, which calls give by their place
    line: str
    until_torch: str = ""  # that does without the patch; it goes when pyproject.toml allows nothing older
    older: str = ""  # the line as versions before the pinned one have it


FAKE_IMPLS, C10D = "torch._subclasses.fake_impls", "torch.distributed.distributed_c10d"
ZERO_UTILS, ZERO_INIT = "deepspeed.runtime.zero.utils", "deepspeed.runtime.zero.partition_parameters"
MASKING, BUILDER = "transformers.masking_utils", "deepspeed.ops.op_builder.builder"
MAMBA = "transformers.models.mamba.modeling_mamba"
OPTIMIZER, FOREACH = "torch.optim.optimizer", "torch.utils._foreach_utils"
FAKE_TENSOR = "torch._subclasses.fake_tensor"
SUPER, SUPER_PROCESS = "deepspeed.runtime.superoffload", "SuperOffloadCPUOptimizer"
MHA = "self query key value key_padding_mask need_weights attn_mask average_attn_weights is_causal"
MASKS = ("find_packed_sequence_indices", "fast_all", "_ignore_bidirectional_mask_sdpa")
AIO_CONFIG = "deepspeed.runtime.swap_tensor.aio_config"
NO_IMPL = "deepspeed.ops.op_builder.cpu.no_impl"
CPU_INFO = "cpu_info = get_cpu_info()"
# patch -> attributes that it replaces, and why; what has no source in Python has a test of its own below
PATCHES = {
    "module_apply": (
        ["torch.nn:Module._apply"],
        [
            Reason(
                "torch.nn.modules.module",
                "Module._apply",
                "self fn recurse",
                "torch.utils.swap_tensors(param, param_applied)",
            )
        ],
    ),
    "item": (
        [f"{FAKE_IMPLS}:op_implementations_dict", "torch:equal"],
        [Reason(FAKE_IMPLS, "local_scalar_dense", "fake_mode func arg", "raise DataDependentOutputException(func)")],
    ),
    "small_values": (
        [f"{FAKE_TENSOR}:CONSTANT_NUMEL_LIMIT", "torch:linspace", "torch.distributions:Distribution._validate_args"],
        [
            Reason(FAKE_TENSOR, "FakeTensorMode.may_turn_const", "self t", "t.numel() <= CONSTANT_NUMEL_LIMIT"),
            Reason("torch.distributions.distribution", "Distribution.__init__", "self", "if self._validate_args:"),
        ],
    ),
    "tracing": (
        [f"{MASKING}:is_tracing"],
        [Reason("transformers.utils.import_utils", "is_tracing", "tensor", "is_fake_tensor(tensor)")],
    ),
    "sample_masks": (
        [f"{MASKING}:{name}" for name in MASKS],
        [
            Reason(MASKING, "find_packed_sequence_indices", "position_ids", "(packed_sequence_mask[:, -1] == 0).all()"),
            Reason(MASKING, "fast_all", "tensor", "return tensor.sum() == tensor.numel()"),
            Reason(MASKING, "_ignore_bidirectional_mask_sdpa", "padding_mask kv_length", "padding_mask.all()"),
        ],
    ),
    "state_space": (
        [f"{MAMBA}:mamba_inner_fn", f"{MAMBA}:mamba_selective_scan"],
        [
            Reason(MAMBA, "mamba_inner_fn", "xz conv1d_weight conv1d_bias x_proj_weight", "return None"),
            Reason(MAMBA, "mamba_selective_scan", "hidden_states dt A B C D z", "for index in range(seq_len):"),
        ],
    ),
    "foreach_types": (
        [f"{OPTIMIZER}:_foreach_supported_types", f"{FOREACH}:_foreach_supported_types"],
        [
            Reason(OPTIMIZER, "_default_to_fused_or_foreach", "params", "type(p) in _foreach_supported_types"),
            Reason(FOREACH, "_has_foreach_support", "tensors", "type(t) in _foreach_supported_types"),
        ],
    ),
    "weight_files": (
        ["transformers.modeling_utils:safe_open"],
        [
            Reason("transformers.modeling_utils", "load_state_dict", "checkpoint_file", "with safe_open("),
            Reason(
                "transformers.modeling_utils",
                "PreTrainedModel._load_pretrained_model",
                "model state_dict",
                "file_pointer = safe_open(file",
            ),
        ],
    ),
    "order_checks": (
        [f"{ZERO_UTILS}:get_lst_from_rank0", f"{ZERO_UTILS}:assert_lst_len_same_as_other_ranks"],
        [
            Reason(ZERO_UTILS, "get_lst_from_rank0", "lst", "return [t.item() for t in lst_tensor.cpu()]"),
            Reason(ZERO_UTILS, "assert_lst_len_same_as_other_ranks", "lst", "rank0_len_tensor.cpu().item()"),
        ],
    ),
    "device_mesh": (
        ["deepspeed.comm:initialize_mesh_device", "deepspeed.comm.comm:initialize_mesh_device"],
        [
            Reason(
                "deepspeed.comm.comm",
                "initialize_mesh_device",
                "mesh_shape mesh_dim_names",
                "cdb.init_device_mesh(mesh_shape, mesh_dim_names)",
            )
        ],
    ),
    "object_collectives": (
        ["torch.distributed:broadcast_object_list", "torch.distributed:all_gather_object"],
        [
            Reason(C10D, "broadcast_object_list", "object_list src", "_object_to_tensor("),
            Reason(C10D, "all_gather_object", "object_list obj", "_object_to_tensor("),
        ],
    ),
    "sends_in_batches": (
        ["torch.distributed:batch_isend_irecv"],
        [Reason(C10D, "batch_isend_irecv", "p2p_op_list", "group._get_backend(device)")],
    ),
    "compiled_ops": (
        [f"{BUILDER}:OpBuilder.load"],
        [Reason(BUILDER, "OpBuilder.load", "self verbose", "importlib.import_module(self.absolute_name())")],
    ),
    "gpu_ops": (
        [f"{NO_IMPL}:NotImplementedBuilder.load"],
        [Reason(NO_IMPL, "NotImplementedBuilder.load", "self verbose", "raise ValueError")],
    ),
    "cpu_vendor": (
        ["cpuinfo:get_cpu_info"],
        [
            Reason("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam.__init__", "self model_params", CPU_INFO),
            Reason("deepspeed.ops.lion.cpu_lion", "DeepSpeedCPULion.__init__", "self model_params", CPU_INFO),
        ],
    ),
    "rng_state": (
        ["torch:get_rng_state", "torch.random:get_rng_state"],
        [Reason("torch.random", "get_rng_state", "", "return default_generator.get_state()")],
    ),
    "tensor_constructor": (
        ["torch:tensor", f"{ZERO_INIT}:_orig_torch_tensor"],
        [
            Reason(ZERO_INIT, "InsertPostInitMethodToModuleSubClasses", "", "torch.tensor = _orig_torch_tensor"),
        ],
    ),
    "constants": (
        [f"{FAKE_TENSOR}:FakeTensorMode._dispatch_impl"],
        [
            Reason(
                FAKE_TENSOR,
                "FakeTensorMode._dispatch_impl",
                "self func types args kwargs",
                "all(e.constant is not None for e in flat_arg_fake_tensors)",
            )
        ],
    ),
    "backend_keys": (
        ["torch:Tensor._make_subclass"],
        [Reason(FAKE_TENSOR, "FakeTensor.__new__", "cls", "device_for_backend_keys=device")],
    ),
    "fast_paths": (
        [],
        [
            Reason(
                "torch.nn.modules.activation", "MultiheadAttention.forward", MHA, "torch._native_multi_head_attention("
            )
        ],
    ),
    "direct_storage": (
        [f"{AIO_CONFIG}:get_accelerator"],
        [Reason(AIO_CONFIG, "get_aio_config", "param_dict", "assert get_accelerator().device_name() == 'cuda'")],
    ),
    "superoffload": (
        [f"{SUPER}.superoffload_stage3:{name}" for name in ("_validate_superoffload_accelerator", SUPER_PROCESS)],
        [
            Reason(f"{SUPER}.superoffload_stage3", "_validate_superoffload_accelerator", "", "device_name() == 'cuda'"),
            Reason(
                f"{SUPER}.superoffload_utils",
                f"{SUPER_PROCESS}.__init__",
                "self optimizer_config cpuadam_cores_perc max_grad_numel pin_memory",
                "self.mp_context.Process(",
            ),
            Reason(
                f"{SUPER}.superoffload_utils",
                f"{SUPER_PROCESS}.async_step",
                "self param_group_id sub_group_id fp32_param fp32_grad",
                "self.param_queue.put(task)",
            ),
        ],
    ),
    "data_setter": (["torch._C:TensorBase.data"], []),
    "attention": (["torch.nn.functional:scaled_dot_product_attention"], []),
    "norms": (["torch:ops.aten._fused_rms_norm"], []),
    "list_indices": (["torch:Tensor.__getitem__"], []),
    "record_stream": (["torch:Tensor.record_stream"], []),
    "autocast": (["torch:clear_autocast_cache"], []),
}
COALESCED = "deepspeed.runtime.comm.coalesced_collectives"
PATCHES["pieces_of_ranks"] = (
    ["deepspeed.runtime.zero.stage3:reduce_scatter_coalesced", f"{ZERO_INIT}:AllGatherCoalescedHandle.wait"],
    [
        Reason(COALESCED, "reduce_scatter_coalesced", "tensors group", "for rank in range(0, world_sz)"),
        Reason(ZERO_INIT, "AllGatherCoalescedHandle.wait", "self handle_dependency", "self.partitions[rank].narrow("),
    ],
)
COORDINATOR, KIND = "deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator"
OFFLOAD, LEAF = "deepspeed.runtime.zero.parameter_offload", "deepspeed.utils.z3_leaf_module"
PATCHES["parameters_of_modules"] = (
    [f"{COORDINATOR}:iter_params", f"{OFFLOAD}:iter_params", f"{COORDINATOR}:{KIND}._{KIND}__params_to_release"],
    [
        Reason(COORDINATOR, "get_all_parameters", "sub_module recurse", "sub_module.ds_external_parameters())"),
        *(
            Reason(COORDINATOR, f"{KIND}.__params_to_release", "self submodule_to_release step_id", line)
            for line in ("for module in self.__submodule_order[step_id:]:", "if not p.ds_persist)")
        ),
        Reason(COORDINATOR, f"{KIND}.release_sub_module", "self submodule", "params_to_release.update("),
        Reason(LEAF, "z3_leaf_module", "model", "hasattr(model, '_z3_leaf')"),
    ],
)
EP_LAYER, EP_KERNELS = "deepspeed.module_inject.auto_ep_layer", "deepspeed.moe.ep_kernels"
PATCHES |= {
    "experts": (
        [
            "deepspeed.module_inject.auto_ep:_gate_activation_matches",
            f"{EP_LAYER}:compute_split_plan",
            f"{EP_KERNELS}:fill_indices_cpu",
            f"{EP_KERNELS}:fill_indices_wrapper",
        ],
        [
            Reason(
                "deepspeed.module_inject.auto_ep", "_gate_activation_matches", "experts_module", "if torch.allclose("
            ),
            Reason(EP_LAYER, "_split_plan_from_expert_counts", "num_tokens_per_expert ep_size", ".cpu().tolist()"),
            Reason(
                EP_LAYER,
                "compute_split_plan",
                "selected_experts num_experts ep_size num_local_experts ep_group num_tokens_per_expert",
                "_split_plan_from_expert_counts(",
            ),
            Reason(
                EP_KERNELS,
                "fill_indices_cpu",
                "tokens_per_expert_group start_index_values write_offsets experts_per_rank num_ranks max_len",
                ".item()",
            ),
        ],
    ),
    "expert_ops": (
        [f"{FAKE_IMPLS}:op_implementations_dict"],
        [
            Reason(
                FAKE_IMPLS, "bincount", "fake_mode func inputs weights minlength", "DynamicOutputShapeException(func)"
            ),
            Reason(
                "torch._meta_registrations",
                "_meta_grouped_mm_common",
                "mat_a mat_b",
                "Expected mat_a to be BFloat16 or supported Float16 matrix",
                until_torch="2.15",
                older="Expected inputs of BF16 type but got mat_a.dtype",
            ),
        ],
    ),
    "expert_rows": (
        [f"{EP_KERNELS}:permute_rows_supported", f"{EP_KERNELS}:gather_rows"],
        [
            Reason(EP_KERNELS, "permute_rows_supported", "rows", 'rows.device.type == "cuda"'),
            Reason(EP_KERNELS, "gather_rows", "src index", "_gather_rows_kernel["),
        ],
    ),
}
REASONS = [pytest.param(reason, id=f"{name}-{reason.path}") for name, (_, found) in PATCHES.items() for reason in found]


def value_of(place: str):
    module, _, path = place.partition(":")
    value = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def definition(module: str, path: str) -> tuple[ast.AST, str]:
    """A function or class as its file has it, even where a decorator hides it; and its source."""
    source = inspect.getsource(importlib.import_module(module))
    node: ast.AST = ast.parse(source)
    for part in path.split("."):
        nodes = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        assert nodes, f"{module}.{path} is gone in the installed version"
        node = nodes[-1]
    return node, ast.get_source_segment(source, node) or ""


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_for_a_patch_is_still_in_the_library(reason):
    node, source = definition(reason.module, reason.path)
    needed = not reason.until_torch or TorchVersion(torch.__version__) < reason.until_torch
    found = reason.line in source or (bool(reason.older) and reason.older in source)
    assert found == needed, (
        f"{reason.module}.{reason.path} {'no longer has' if needed else 'has'} {reason.line!r}: is the patch needed?"
    )
    if isinstance(node, ast.FunctionDef):
        names, wanted = [a.arg for a in node.args.args], reason.parameters.split()
        assert [re.sub(r"_or_elem$", "", name) for name in names[: len(wanted)]] == wanted


def test_every_patch_is_listed():
    applied = (*patches.ALWAYS, *gpu_patches.ON_EVERY_GPU, *gpu_patches.OF_RUNS, *gpu_patches.OF_RUNS_ON_GPU)
    everywhere = [patch.__name__ for patch in applied]
    with_arguments = {"compiled_ops", "item", "rng_state", "record_stream", "sample_masks"}
    assert {*everywhere, *with_arguments} == set(PATCHES)


def test_fake_parameters_cannot_be_swapped():
    with FakeTensorMode(), pytest.raises(RuntimeError, match="Couldn't swap"):
        torch.nn.Linear(2, 2).to(torch.bfloat16)


def test_fake_tensors_have_no_values():
    with FakeTensorMode():
        one = torch.zeros(1)
        for ask in (lambda: torch.equal(one, one), lambda: torch.rand(1).item()):
            with pytest.raises(DataDependentOutputException):
                ask()


def test_small_tensors_that_a_constructor_makes_have_no_values():
    """Depths of stages and rates of drop path; `small_values` gives them."""
    with FakeTensorMode():
        for made in (lambda: torch.linspace(0, 1, 3), lambda: torch.tensor([2, 3]).cumsum(0)):
            with pytest.raises(DataDependentOutputException):
                [one.item() for one in made()]


def test_fake_tensors_have_no_data_setter_of_their_own():
    assert "data" not in vars(FakeTensor)


def test_attention_is_called_as_its_replacement():
    signature = re.sub(r"\s+", " ", torch.nn.functional.scaled_dot_product_attention.__doc__ or "").partition(")")[0]
    names = re.findall(r"(\w+)(?:=[^,]*)?(?:,|$)", signature.partition("(")[2])
    assert names == list(inspect.signature(cuda_attention).parameters)


def test_record_stream_takes_a_stream_and_gives_nothing():
    assert str(torch.ops.aten.record_stream.default._schema).endswith("(Tensor(a!) self, Stream s) -> ()")


def test_nothing_is_patched_outside_of_a_simulation():
    (record,) = simulate_all([target("zero3")], lambda text: None)
    assert isinstance(record, RankRecord)
    for places, _ in PATCHES.values():
        for place in places:
            assert not (getattr(value_of(place), "__module__", "") or "").startswith("zerofit.simulate"), place
    assert torch.equal(torch.zeros(1), torch.ones(1)) is False
