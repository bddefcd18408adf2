"""What simulations of scripts change in libraries beside `simulate.fakes.patches`: still there, and still needed."""

from __future__ import annotations

import importlib
import inspect
from types import FunctionType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.torch_version import TorchVersion

from tests.simulate.test_patches import C10D, COORDINATOR, KIND, Reason, definition, value_of
from zerofit.simulate.fakes import quantized as bits
from zerofit.simulate.memory.ledger import Ledger
from zerofit.simulate.ops.streams import Streams
from zerofit.simulate.script import (
    distributed,
    files,
    generation,
    gpu,
    host,
    kernels,
    launchers,
    lengths,
    pretrained,
    saved,
)

pytestmark = pytest.mark.versions
DATA, DDP = "torch.utils.data.dataloader", "torch.nn.parallel.distributed"
HF, TENSOR = "transformers.modeling_utils", "torch._tensor"
FLAT, NORMS = "torch.distributed.fsdp._flat_param", "torch.nn.modules._functions"
MESH, NESTED = "torch.distributed.device_mesh", "torch.nested._internal.ops"
PARAMETER, INIT = "torch.nn.parameter", "torch.distributed.fsdp._init_utils"
TOKENIZERS = "transformers.tokenization_utils_base"
GROUPS = ("init_process_group", "new_group", "get_backend", "is_nccl_available", "destroy_process_group")
HYBRID = "deepspeed.runtime.hybrid_engine:DeepSpeedHybridEngine"
GRAPHS, GENERATION = "torch.cuda._graph_annotations", "transformers:GenerationMixin"
LOOPS = ("_sample", "_beam_search", "_beam_search_has_unfinished_sequences")
SAVERS = {**files.SAVERS, **files.OF_PACKAGES}
# patch -> attributes that it replaces, and the lines of the library that make it necessary
PATCHES = {
    "parameters": (["torch.nn:Parameter.__new__"], []),
    "parameter_types": (
        ["torch._subclasses.fake_tensor:FakeTensor.__new__", "torch._subclasses.fake_tensor:FakeTensor.__deepcopy__"],
        [],
    ),
    "parameter_data": (["torch._C:TensorBase.data"], []),
    "gradients": (["torch:Tensor.register_hook"], []),
    "four_bits": ([], []),
    "eight_bits": ([], []),
    "moments_of_eight_bits": ([], []),
    "tensor_values": (["torch:Tensor.numpy", "torch:Tensor.tolist", "torch:Tensor.__format__"], []),
    "lbfgs": (
        ["torch.optim:LBFGS.step", "torch.optim:LBFGS._gather_flat_grad"],
        [Reason("torch.optim.lbfgs", "LBFGS.step", "self closure", "if ys > 1e-10:")],
    ),
    "equality": (["torch:equal", "torch:Tensor.equal"], []),
    "nested_lengths": (
        ["torch._subclasses.fake_tensor:FakeTensorMode.create_symbolic_nested_int"],
        [
            Reason(
                "torch._subclasses.fake_tensor",
                "FakeTensorMode.create_symbolic_nested_int",
                "self",
                "self.shape_env must not be None",
            ),
            Reason(
                "torch.nested._internal.ops", "to_copy_default", "func", "tgt.nested_int_memo = src.nested_int_memo"
            ),
        ],
    ),
    "host_layers": (["torch:mkldnn_rnn_layer"], []),
    "replicas": (["torch.nn:DataParallel.forward"], []),
    "hybrid_engine": ([f"{HYBRID}.generate", f"{HYBRID}.new_inference_container"], []),
    "subclasses": (["torch:Tensor.as_subclass"], []),
    "addresses": (
        ["torch:UntypedStorage.data_ptr", "torch._subclasses.fake_tensor:FakeTensor.data_ptr"],
        [Reason(FLAT, "_same_storage", "a b", "a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()")],
    ),
    "loaders": (
        ["torch.utils.data:DataLoader.__init__"],
        [
            Reason(
                DATA,
                "DataLoader.__init__",
                "self dataset batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory drop_last "
                "timeout worker_init_fn multiprocessing_context generator",
                "self.num_workers = num_workers",
            )
        ],
    ),
    "compiling": (
        ["torch:compile", "torch.nn:Module.compile", "torch.nn.attention.flex_attention:create_block_mask"],
        [],
    ),
    "graphs": (
        ["torch.cuda:CUDAGraph", "torch.cuda:graph_pool_handle", f"{GRAPHS}:maybe_stamp_capture_root"],
        [],
    ),
    "announce_generation": ([f"{GENERATION}.generate"], []),
    "generation": (
        [f"{GENERATION}.{name}" for name in ("_update_model_kwargs_for_generation", *LOOPS)],
        [
            Reason(
                "transformers.generation.utils",
                "GenerationMixin._sample",
                "self input_ids logits_processor stopping_criteria generation_config synced_gpus streamer",
                "unfinished_sequences = unfinished_sequences & ~stopping_criteria(input_ids, scores)",
            )
        ],
    ),
    "triton_kernels": ([], []),
    "handles": (["torch.distributed:Work.wait"], []),
    "fetched_parameters": (
        [f"{COORDINATOR}:{KIND}.fetch_sub_module"],
        [],
    ),
    "held_parameters": (
        [f"{COORDINATOR}:{KIND}.release_backward_leftovers", f"{COORDINATOR}:update_recompute_parameters"],
        [
            Reason(
                COORDINATOR, f"{KIND}._fetch_sub_module_impl", "self", "next(reversed(self.__active_backward_submodules"
            )
        ],
    ),
    "process_groups": (
        [*(f"torch.distributed:{name}" for name in GROUPS), f"{MESH}:init_process_group"],
        [
            Reason(C10D, "init_process_group", "backend init_method", "_new_process_group_helper("),
            Reason(MESH, "DeviceMesh._setup_world_group_and_device", "self", "init_process_group()"),
        ],
    ),
    "barriers": (["torch.distributed:barrier", "torch.distributed:monitored_barrier"], []),
    "object_lists": (
        [f"torch.distributed:{name}" for name in ("gather_object", "scatter_object_list", "broadcast_object_list")],
        [Reason(C10D, "gather_object", "obj object_gather_list", "_object_to_tensor(")],
    ),
    "reductions": (
        [f"torch.distributed:{name}" for name in distributed.REDUCTIONS],
        [Reason(C10D, "all_reduce", "tensor op", "opts.reduceOp = op")],
    ),
    "coalesced": (["torch.distributed._meta_registrations:create_fakework"], []),
    "opening": (["builtins:open", "bz2:_builtin_open", "tarfile:bltn_open"], []),
    "data_parallel": (
        [f"{DDP}:_verify_param_shape_across_processes", f"{DDP}:DistributedDataParallel.register_comm_hook"],
        [Reason(DDP, "DistributedDataParallel.register_comm_hook", "self state hook", "self._check_comm_hook(hook)")],
    ),
    "resized_storages": (
        ["torch:UntypedStorage.resize_"],
        [Reason("torch.distributed.fsdp._fully_shard._fsdp_param", "free_storage", "tensor", "storage.resize_(0)")],
    ),
    "flat_sharding": (
        ["torch.distributed.fsdp:FullyShardedDataParallel.__init__", f"{INIT}:_get_compute_device"],
        [
            Reason(INIT, function, arguments, line)
            for function, arguments, line in (
                ("_init_device_handle", "state module ignored_params device_id", "else torch.device(device_id)"),
                (
                    "_get_compute_device",
                    "module ignored_params device_from_device_id rank device_handle",
                    "compute_device = torch.device(device_handle.current_device())",
                ),
            )
        ],
    ),
    "sharded_shapes": (
        ["torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached"],
        [],
    ),
    "missing_shapes": (["torch:ctc_loss"], []),
    "sparse_gradients": (["torch:embedding", "torch:embedding_bag", "torch.optim:SparseAdam.step"], []),
    "recurrent_layers": (
        [
            *(f"torch._VF:{name}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "_pack_padded_sequence")),
            "torch.nn:RNNBase.flatten_parameters",
        ],
        [
            Reason("torch.nn.modules.rnn", "LSTM.forward", "self input hx", "result = _VF.lstm("),
            Reason("torch.nn.modules.rnn", "GRU.forward", "self input hx", "result = _VF.gru("),
        ],
    ),
    "higher_order_ops": (
        ["torch:cond", "torch._higher_order_ops.cond:_get_current_dispatch_mode"],
        [
            Reason(
                "torch._higher_order_ops.cond",
                "cond_op_dense",
                "pred true_fn false_fn operands",
                'AssertionError("Mode should never be enabled for CPU/CUDA key")',
            )
        ],
    ),
    "pretrained": (
        [f"{HF}:PreTrainedModel.from_pretrained", f"{HF}:PreTrainedModel._from_config"],
        [Reason(HF, "PreTrainedModel._from_config", "cls config", "deepspeed.zero.Init(")],
    ),
    "downloaded": (["torch.hub:load_state_dict_from_url", "torch.nn:Module.load_state_dict"], []),
    "flash_attention": (
        [f"{HF}:PreTrainedModel._check_and_adjust_attn_implementation"],
        [
            Reason(
                HF,
                "PreTrainedModel.__init__",
                "self config",
                "self.config._attn_implementation_internal = self._check_and_adjust_attn_implementation(",
            )
        ],
    ),
    "synchronized_norms": (
        [f"{NORMS}:SyncBatchNorm.forward"],
        [
            Reason(NORMS, "SyncBatchNorm.forward", "self input weight bias running_mean running_var", line)
            for line in ("mean, invstd = torch.batch_norm_stats(input, eps)", "count_all = count_all[mask]")
        ],
    ),
    "autocast_types": (["torch:autocast.__enter__"], []),
    "flash_attention_package": ([], []),
    "newer_flash_attention": ([], []),
    "lazy_modules": (
        [f"{PARAMETER}:UninitializedParameter.__new__", f"{PARAMETER}:UninitializedBuffer.__new__"],
        [
            Reason(PARAMETER, "UninitializedTensorMixin.materialize", "self shape device dtype", line)
            for line in ("self.data = torch.empty(shape, device=device", "self.__class__ = self.cls_to_become")
        ],
    ),
    "set_environment": (["os:environ", "os:getenv"], []),
    "launchers_inside": (["subprocess:Popen.__init__", "os:system", "os:execv", "os:execve"], []),
    "spawned_ranks": (["torch.multiprocessing:spawn", "torch.multiprocessing:start_processes"], []),
    "ranks_in_processes": (
        ["multiprocessing.process:BaseProcess.start", "multiprocessing.process:BaseProcess.join"],
        [],
    ),
    "processes": (["multiprocessing.context:BaseContext.get_context"], []),
    "saving": ([], []),
    "tracking": (["torch.utils.tensorboard:SummaryWriter"], []),
    "scratch_files": (
        ["io:open", "os:mkdir", "shutil:_use_fd_functions", "sqlite3:connect", "sqlite3.dbapi2:connect"],
        [],
    ),
    "saved_by_torch": (
        ["torch:save", "torch:load"],
        [
            Reason(
                "torch.serialization",
                "_load",
                "zip_file map_location pickle_module",
                "if torch._guards.detect_fake_mode(None) is not None or is_meta_map_location:",
            )
        ],
    ),
    "saved_by_safetensors": (
        ["safetensors:safe_open", "safetensors.torch:save_file", "safetensors.torch:load_file"],
        [],
    ),
    "saved_models": (["transformers:PreTrainedModel.save_pretrained"], []),
    "saved_tokenizers": (
        [
            *(f"tokenizers:Tokenizer.{name}" for name in ("save", "from_file", "train")),
            "tokenizers.models:Model.save",
            *(f"tokenizers.models:{kind}.from_file" for kind in ("BPE", "WordPiece", "WordLevel")),
            *(f"tokenizers.models:{kind}.read_file" for kind in ("BPE", "WordPiece", "WordLevel")),
        ],
        [],
    ),
    "saved_checkpoints": (
        [
            "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint",
            "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint",
            "torch.distributed.checkpoint.state_dict_saver:save",
            "torch.distributed.checkpoint.state_dict_loader:load",
        ],
        [],
    ),
    "cuda_module": (["torch.cuda:is_available", "torch.cuda:memory_allocated", "torch.cuda.nccl:version"], []),
    "accelerator_module": (
        ["torch.accelerator:is_available", "torch.accelerator:current_accelerator", "torch._C:_get_accelerator"],
        [],
    ),
    "autocast": (["torch:clear_autocast_cache"], []),
    "device_shown": (
        ["torch._subclasses.fake_tensor:FakeTensor.device", "torch._subclasses.fake_tensor:init_gpu_context"],
        [],
    ),
    "to_device": (["torch:Tensor.to", "torch:Tensor.cuda", "torch:Tensor.type", "torch.cuda:FloatTensor"], []),
    "constructors": (["torch:tensor", "torch:as_tensor", "torch:asarray"], []),
    "generators": (["torch:Generator"], []),
    "tokenizers": (
        ["transformers:PreTrainedTokenizerBase.__call__"],
        [
            Reason(
                TOKENIZERS,
                "PreTrainedTokenizerBase._get_padding_truncation_strategies",
                "self padding truncation max_length",
                "return padding_strategy, truncation_strategy, max_length, kwargs",
            )
        ],
    ),
    "replaced_arguments": (
        ["transformers:TrainingArguments.__post_init__"],
        [Reason("transformers.training_args", "TrainingArguments.__post_init__", "self", "self.deepspeed")],
    ),
    "trainer_arguments": (["transformers:Trainer.__init__"], []),
    "largest_samples": (["torch.utils.data._utils.fetch:_MapDatasetFetcher.fetch"], []),
    "batches": ([f"{DATA}:_BaseDataLoaderIter.__next__"], []),
}
REASONS = [pytest.param(reason, id=f"{name}-{reason.path}") for name, (_, found) in PATCHES.items() for reason in found]


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_for_a_patch_is_still_in_the_library(reason):
    node, source = definition(reason.module, reason.path)
    assert reason.line in source, f"{reason.module}.{reason.path} no longer has {reason.line!r}: is the patch needed?"
    names, wanted = [a.arg for a in node.args.args], reason.parameters.split()
    assert names[: len(wanted)] == wanted


@pytest.mark.parametrize("name", PATCHES)
def test_what_a_patch_replaces_is_there(name):
    for place in PATCHES[name][0]:
        value = value_of(place)
        assert not (getattr(value, "__module__", "") or "").startswith("zerofit"), place


def test_every_patch_is_listed():
    beside = {
        "install_gpu",
        "capability",
        "token_tensors",
        "padded_shape",
        "quantizer_of",
        "quantize",
        "missing_triton",
        "environment",
        "traced_bits",
        "replace_everywhere",
    }  # of the same modules
    found = set()
    patched = (
        host,
        distributed,
        kernels,
        kernels,
        pretrained,
        bits,
        files,
        files,
        saved,
        gpu,
        gpu,
        launchers,
        lengths,
        generation,
    )
    for module in patched:
        functions = [
            f for f in vars(module).values() if isinstance(f, FunctionType) and f.__module__ == module.__name__
        ]
        found |= {f.__name__ for f in functions if not f.__name__.startswith("_")}
    assert found - beside == set(PATCHES)


@pytest.mark.parametrize("module", SAVERS)
def test_what_saves_is_where_it_was(module):
    owner = pytest.importorskip(module)
    for name in SAVERS[module]:
        assert callable(value_of(f"{owner.__name__}:{name}")), name


def test_triton_runs_kernels_where_they_are_left_out():
    pytest.importorskip("triton")
    for place in ("jit:JITFunction.run", "autotuner:Autotuner.run", "autotuner:Heuristics.run"):
        assert callable(value_of(f"triton.runtime.{place}"))


def signature_of(place: str) -> inspect.Signature:
    function: Any = value_of(place)
    return inspect.signature(function)


def test_bitsandbytes_has_what_is_replaced():
    pytest.importorskip("bitsandbytes")
    parameters = signature_of("bitsandbytes.nn:Params4bit.__new__").parameters
    assert set(bits._FOUR) < set(parameters)
    if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        default = signature_of("bitsandbytes.backends.default.ops:_gemm_4bit_default_impl")
        arguments = [a.name for a in torch.ops.bitsandbytes.gemm_4bit.default._schema.arguments]
        assert list(default.parameters) == arguments


def test_cuda_functions_that_are_answered_exist():
    from zerofit.simulate.script.command import ScriptTarget
    from zerofit.spec.devices import find_device

    devices = [find_device(kind) for kind in ("h100-80gb", "h100-pcie-80gb", "l40s", "l4")]
    made = [(device.compute_capability, device.multiprocessors) for device in devices]
    assert made == [((9, 0), 132), ((9, 0), 114), ((8, 9), 142), ((8, 9), 58)]
    assert inspect.signature(ScriptTarget).parameters["steps"].default == 2
    old_names = {"memory_cached", "max_memory_cached", "reset_max_memory_allocated", "reset_max_memory_cached"}
    answers = {**gpu._random_states(1), **gpu._streams(Streams(Ledger()))}
    assert not [name for name in answers.keys() - old_names if not hasattr(torch.cuda, name)]


def test_device_of_a_fake_is_a_property_that_can_be_replaced():
    assert isinstance(vars(FakeTensor)["device"], property)
    if TorchVersion(torch.__version__) < "2.14" and "fake_device" not in vars(FakeTensor):  # each tensor's own
        assert "self.fake_device = device" in inspect.getsource(FakeTensor.__new__)
    else:
        assert isinstance(vars(FakeTensor)["fake_device"], property)
    assert importlib.import_module("torch.optim.optimizer").register_optimizer_step_pre_hook
