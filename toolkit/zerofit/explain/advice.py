"""The changes that help against each cause, ordered by slowdown, and commands to find one."""

from __future__ import annotations

import re

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
NVIDIA_SMI = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"
RSS = "print psutil.Process().memory_info().rss after each step: steady growth is a leak, a jump is a longer batch"
PLAN_SERVE = (
    "zerofit plan MODEL --serve --gpus N --gpu KIND prints the least utilization and the longest sequence that fit"
)
KERNEL_LOG = "sudo dmesg -T | grep -i -E 'killed process|oom'"
# The observer is called before the error is raised, so the snapshot has all live blocks. torch.cuda.init comes first:
# an observer that is attached before CUDA starts is lost.
SNAPSHOT_LINE = (
    "import torch; torch.cuda.init(); torch.cuda.memory._record_memory_history(max_entries=200000); "
    "torch._C._cuda_attach_out_of_memory_observer("
    "lambda gpu, *_: torch.cuda.memory._dump_snapshot(f'oom-gpu{gpu}.pickle'))"
)
RECORD = f"put this line first in the script, then run `zerofit explain` on the file it writes: {SNAPSHOT_LINE}"

_OWN_DEVICE = "call torch.cuda.set_device(local_rank) before the first CUDA call of each rank"
_SMALLER_BATCH = "halve the micro batch and double gradient_accumulation_steps"
_CHECKPOINTING = "set gradient_checkpointing=True (recompute activations in backward)"
_SHARD = "use a higher ZeRO stage (stage 1 splits optimizer states, 2 gradients, 3 parameters)"
_OFFLOAD = 'set zero_optimization.offload_optimizer: {"device": "cpu"} (states in host memory)'
_VLLM_SHARE = "raise gpu_memory_utilization, if nothing else uses that memory"
_VLLM_SPLIT = "raise tensor_parallel_size, or use quantized weights"
_LOW_MEMORY = "set torch_dtype=torch.bfloat16 and low_cpu_mem_usage=True in from_pretrained"

# device of an error message -> its tool that lists processes, and how to look at torch's memory; CUDA has a snapshot
_TOOLS = {
    "HIP": ("rocm-smi --showpids", ""),
    "XPU": ("xpu-smi ps", "print torch.xpu.memory_allocated() and torch.xpu.mem_get_info()"),
    "NPU": ("npu-smi info", "print torch.npu.memory_summary()"),
    "MLU": ("cnmon", "print torch.mlu.memory_summary()"),
    "MPS": ("top -o mem", "print torch.mps.current_allocated_memory() and torch.mps.driver_allocated_memory()"),
}
_DEVICES = {"HIP": r"\bHIP|ROCBLAS|rocblas", "XPU": r"\bXPU|level_zero|_RESULT_ERROR|\bPI_ERROR", "MPS": "MPS backend"}


def for_device(text: str, message: str) -> str:
    """Return the advice `text` with the tools of the device that `message` names, if not CUDA."""
    device = next((name for name in _TOOLS if re.search(_DEVICES.get(name, rf"\b{name}"), message)), "")
    if not device:
        return text
    tool, look = _TOOLS[device]
    text = text.replace(f"{NVIDIA_SMI} -l 1", tool)
    if device == "HIP":
        text = text.replace("CUDA_LAUNCH_BLOCKING=1", "AMD_SERIALIZE_KERNEL=3")
        return text.replace(NVIDIA_SMI, tool).replace("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    text = text.replace(RECORD, f"{look} before the line that fails").replace(NVIDIA_SMI, tool)
    return text.replace("torch.cuda.", f"torch.{device.lower()}.")


def changes_for(cause: str, message: str) -> tuple[str, ...]:
    """Return the changes that help against a cause on the device of `message`."""
    useless = ()  # on a Mac or a CPU rank
    if "MPS backend" in message:  # CUDA has a service of that name
        useless = (_SHARD, _OFFLOAD)
    elif "you tried to allocate" in message:  # torch's CPU allocator
        useless = (_OFFLOAD,)
    found = (text for text in CHANGES.get(cause, ()) if text not in useless)
    return tuple(for_device(text, message) for text in found)


CHANGES: dict[str, tuple[str, ...]] = {
    "vllm-gpu-not-free": (
        "lower gpu_memory_utilization (TRL's vllm_gpu_memory_utilization), a share of the whole GPU",
        f"stop other processes that use this GPU: {NVIDIA_SMI}",
        "if a trainer uses the GPU too: start vLLM before the trainer's states exist, or on other GPUs",
    ),
    "vllm-no-cache": (
        _VLLM_SHARE,
        "lower max_num_batched_tokens: vLLM keeps memory free for the activations of these tokens",
        _VLLM_SPLIT,
    ),
    "vllm-sequence-too-long": (
        "set max_model_len to the longest prompt plus completion that you use (default: the model's maximum)",
        _VLLM_SHARE,
        'set kv_cache_dtype="fp8", which halves the cache of 16-bit models',
        _VLLM_SPLIT,
    ),
    "sglang-no-cache": (
        "raise --mem-fraction-static, if nothing else uses that memory",
        "lower --max-running-requests or --cuda-graph-max-bs",
        "raise --tp-size, or use quantized weights",
    ),
    "vllm-warm-up": ("lower max_num_seqs", "lower gpu_memory_utilization"),
    "single-tensor": (
        "look at the shapes on that line: no layout can fit a tensor larger than the device",
        "if the shapes are as expected, use a smaller micro batch, or shorter or smaller inputs",
    ),
    "another-process": (
        f"stop the other process, or use another GPU (CUDA_VISIBLE_DEVICES); {NVIDIA_SMI} lists the processes",
        "stop ranks of an earlier run",
        f"if they are ranks of this run, {_OWN_DEVICE}",
    ),
    "ranks-share-device": (
        _OWN_DEVICE,
        'load checkpoints with map_location="cpu": torch.load puts tensors on the GPU that saved them',
    ),
    "not-from-torch": ("stop the other process, or use another GPU",),
    "outside-torch": (
        "create fewer process groups: each NCCL communicator keeps buffers (NCCL_BUFFSIZE sets their size)",
        "leave room: call torch.cuda.set_per_process_memory_fraction(0.9), or use a smaller micro batch",
    ),
    "metal-memory": (
        "pad inputs to a small set of shapes: Metal keeps a graph for each shape",
        "set PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to remove the limit: the Mac then swaps, and may stop responding",
    ),
    "memory-fraction": (
        "raise set_per_process_memory_fraction (or per_process_memory_fraction in the allocator's options)",
    ),
    "cuda-graphs": (
        'call torch.compile without mode="reduce-overhead", which keeps memory for each shape, or with dynamic=True',
        "pad inputs to a small set of shapes",
    ),
    "fragmentation": (
        f"write {EXPANDABLE} before the command (costs no speed)",
        "pad batches to a small set of lengths, so that blocks can be reused",
        _SMALLER_BATCH,
    ),
    "weights": (
        "set torch_dtype=torch.bfloat16 in from_pretrained, which halves fp32 weights",
        "create the model under ZeRO-3 (TrainingArguments before from_pretrained, or deepspeed.zero.Init)",
        "train LoRA over 4-bit weights (load_in_4bit)",
        'for inference, use device_map="auto", which splits the layers among the GPUs',
    ),
    "checkpoint-on-device": (
        'call torch.load(..., map_location="cpu"), then load_state_dict',
        "delete the loaded dictionary after load_state_dict",
    ),
    "states": (_SHARD, _OFFLOAD, "use an optimizer with 8-bit states, or LoRA"),
    "optimizer-temporaries": ("set foreach=False or fused=True in torch's optimizer", _SHARD, _OFFLOAD),
    "optimizer-state": (
        _SHARD,
        "use an optimizer with 8-bit states (adamw_8bit)",
        _OFFLOAD,
        "train with LoRA: only adapters have states",
    ),
    "logits": (
        "compute the loss in chunks or fused with the head (Liger's fused_linear_cross_entropy, zerofit --loss-chunk)",
        _SMALLER_BATCH,
        "lower the maximum length",
    ),
    "second-copy": (
        "keep the copy in host memory, or update it every few steps",
        "train with LoRA: the reference is then the same model without adapters",
    ),
    "activations": (_SMALLER_BATCH, _CHECKPOINTING, _SHARD, _OFFLOAD),
    "communication-buckets": (
        'set a smaller "reduce_bucket_size" in zero_optimization (50000000; the default is 500000000)',
        'set "overlap_comm": false, which allocates one buffer instead of two',
        _SMALLER_BATCH,
    ),
    "gathered-parameters": (
        "lower stage3_max_live_parameters and stage3_prefetch_bucket_size",
        _SMALLER_BATCH,
        _CHECKPOINTING,
    ),
    "evaluation-keeps-logits": (
        "keep the argmax in preprocess_logits_for_metrics, not the logits",
        "set eval_accumulation_steps=1, which moves logits to host memory",
        "set prediction_loss_only=True if no metric needs logits",
    ),
    "evaluation": (
        "lower per_device_eval_batch_size (its default is 8, whatever the training batch)",
        "keep the argmax of earlier batches, not their logits",
        "put your own evaluation loop under torch.no_grad()",
    ),
    "generation": (
        "generate fewer or shorter sequences at a time: the KV cache grows with both",
        "lower num_generations or the generation batch",
    ),
    "saving": (
        "save each rank's shard (stage3_gather_16bit_weights_on_model_save: false), and merge with zero_to_fp32.py",
        "move the state_dict to host memory parameter by parameter",
    ),
    "data-on-device": ("keep the data set in host memory, and move one batch at a time", _SMALLER_BATCH),
    "leak": (
        "add up loss.item() or loss.detach(): a stored loss keeps its graph alive",
        "do not keep outputs from one step to the next, and do not use retain_graph=True",
    ),
    "pinned-memory": (
        "set pin_memory to false, in the DataLoader and in offload_optimizer and offload_param",
        "run `ulimit -l unlimited` before the command (docker run --ulimit memlock=-1)",
        "start fewer ranks on the host, or offload less",
    ),
    "device-full-at-start": ("stop the processes of an earlier run, or use another GPU",),
    "cuda-in-dataloader": (
        "keep CUDA out of the Dataset and collate_fn: each worker would create its own CUDA context",
    ),
    "nccl-buffers": (
        "leave room for communicators: use a smaller micro batch, or call set_per_process_memory_fraction(0.9)",
        "set NCCL_BUFFSIZE=1048576, or fewer channels (NCCL_MAX_NCHANNELS)",
    ),
    "library-workspace": (
        "leave room: use a smaller micro batch, or call set_per_process_memory_fraction(0.9)",
        "stop other processes that use the device",
    ),
    "kernel-resources": (
        "use smaller block sizes or a lower num_stages for that kernel: the GPU's shared memory is fixed",
    ),
    "weights-in-host-memory": (
        _LOW_MEMORY,
        "create the model under ZeRO-3, so that each rank keeps only its part",
        "start fewer ranks on the host, or request more memory for the job (--mem)",
    ),
    "offloaded-states": (
        "keep the states on the GPUs if they fit (no offload_optimizer)",
        'set offload_optimizer: {"device": "nvme"}',
        "use more hosts, or more memory for the job (--mem): 12 to 16 bytes per parameter, split over all ranks",
        "on CPU ranks without offload, use a higher ZeRO stage",
    ),
    "data-in-host-memory": (
        "stream the data set (streaming=True), or lower num_proc",
        "request more memory for the job (--mem)",
    ),
    "dataloader-workers": (
        "lower num_workers or prefetch_factor",
        "avoid Python lists with millions of items in the Dataset",
    ),
    "shared-memory": (
        "docker run --shm-size=16g (or --ipc=host); in Kubernetes, mount an emptyDir with `medium: Memory` at /dev/shm",
        "lower num_workers",
    ),
    "saving-in-host-memory": ("save shards instead of the full model", "request more memory for the job (--mem)"),
    "host-memory": (
        "request more memory for the job (--mem), or start fewer ranks on the host",
        "use fewer DataLoader workers, or offload less",
    ),
}
