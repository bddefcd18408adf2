"""Changes for each cause, those that cost the least speed first, and the command to run if the cause is unknown."""

from __future__ import annotations

import re

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
NVIDIA_SMI = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"
RSS = "print psutil.Process().memory_info().rss after each step: steady growth is a leak, a jump is a longer batch"
PLAN_SERVE = "zerofit plan MODEL --serve --gpus N --gpu KIND: the least utilization and the longest sequence that fit"
KERNEL_LOG = "sudo dmesg -T | grep -i -E 'killed process|oom'"
# The observer is called before the error is raised, so the snapshot has all live blocks. torch.cuda.init comes first:
# an observer that is attached before CUDA starts is lost.
SNAPSHOT_LINE = (
    "import torch; torch.cuda.init(); torch.cuda.memory._record_memory_history(max_entries=200000); "
    "torch._C._cuda_attach_out_of_memory_observer("
    "lambda gpu, *_: torch.cuda.memory._dump_snapshot(f'oom-gpu{gpu}.pickle'))"
)
RECORD = f"put this line first in the script, and explain the file that it writes: {SNAPSHOT_LINE}"

_OWN_DEVICE = "call torch.cuda.set_device(local_rank) before the first CUDA call of each rank"
_SMALLER_BATCH = "halve the micro batch and double gradient_accumulation_steps"
_CHECKPOINTING = "gradient_checkpointing=True (recompute activations in backward)"
_SHARD = "a higher ZeRO stage (stage 1 splits optimizer states, 2 gradients, 3 parameters)"
_OFFLOAD = 'zero_optimization.offload_optimizer: {"device": "cpu"} (states in host memory)'
_VLLM_SHARE = "a higher gpu_memory_utilization, if nothing else uses that memory"
_VLLM_SPLIT = "a higher tensor_parallel_size, or quantized weights"
_LOW_MEMORY = "torch_dtype=torch.bfloat16 and low_cpu_mem_usage=True in from_pretrained"

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
    """Return advice with the tools of the device that an error message names (default: CUDA's tools)."""
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
    """Return the changes that make room for a cause, without those that a Mac (one device, one memory) cannot use."""
    found = CHANGES.get(cause, ())
    if "MPS backend" in message:  # CUDA has a service of that name
        found = tuple(text for text in found if text not in (_SHARD, _OFFLOAD))
    return tuple(for_device(text, message) for text in found)


CHANGES: dict[str, tuple[str, ...]] = {
    "vllm-gpu-not-free": (
        "a lower gpu_memory_utilization (TRL's vllm_gpu_memory_utilization): it is a share of the whole GPU",
        f"stop other processes that use this GPU: {NVIDIA_SMI}",
        "if a trainer uses the GPU too: start vLLM before the trainer's states exist, or on other GPUs",
    ),
    "vllm-no-cache": (
        _VLLM_SHARE,
        "a smaller max_num_batched_tokens: vLLM keeps memory free for their activations",
        _VLLM_SPLIT,
    ),
    "vllm-sequence-too-long": (
        "max_model_len: set it to the longest prompt plus completion that you use (default: the model's maximum)",
        _VLLM_SHARE,
        'kv_cache_dtype="fp8" halves the cache of 16-bit models',
        _VLLM_SPLIT,
    ),
    "sglang-no-cache": (
        "a higher --mem-fraction-static, if nothing else uses that memory",
        "a smaller --max-running-requests or --cuda-graph-max-bs",
        "a higher --tp-size, or quantized weights",
    ),
    "vllm-warm-up": ("a smaller max_num_seqs", "a lower gpu_memory_utilization"),
    "single-tensor": ("look at the shapes on that line: no layout can fit a tensor larger than the device",),
    "another-process": (
        f"stop the other process, or use another GPU (CUDA_VISIBLE_DEVICES); {NVIDIA_SMI} lists them",
        "stop ranks of an earlier run",
        f"if they are ranks of this run, {_OWN_DEVICE}",
    ),
    "ranks-share-device": (
        _OWN_DEVICE,
        'load checkpoints with map_location="cpu": torch.load puts tensors on the GPU that saved them',
    ),
    "not-from-torch": (f"find the process that uses it: {NVIDIA_SMI}", "stop the other process, or use another GPU"),
    "outside-torch": (
        "create fewer process groups: each NCCL communicator keeps buffers (NCCL_BUFFSIZE sets their size)",
        "leave room: torch.cuda.set_per_process_memory_fraction(0.9), or a smaller micro batch",
    ),
    "metal-memory": (
        "pad inputs to a small set of shapes: Metal keeps a graph for each shape",
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 removes the limit: the Mac then swaps, and may stop responding",
    ),
    "memory-fraction": (
        "raise set_per_process_memory_fraction (or per_process_memory_fraction in the allocator's options)",
    ),
    "cuda-graphs": (
        'torch.compile without mode="reduce-overhead", or with dynamic=True: each shape keeps its own memory',
        "pad inputs to a small set of shapes",
    ),
    "fragmentation": (
        f"{EXPANDABLE} before the command (costs no speed)",
        "pad batches to a small set of lengths, so that blocks can be reused",
        _SMALLER_BATCH,
    ),
    "weights": (
        "torch_dtype=torch.bfloat16 in from_pretrained halves fp32 weights",
        "create the model under ZeRO-3 (TrainingArguments before from_pretrained, or deepspeed.zero.Init)",
        "LoRA over 4-bit weights (load_in_4bit)",
    ),
    "checkpoint-on-device": (
        'torch.load(..., map_location="cpu"), then load_state_dict',
        "delete the dictionary after loading",
    ),
    "states": (_SHARD, _OFFLOAD, "an optimizer with 8-bit states, or LoRA"),
    "optimizer-temporaries": ("foreach=False, or fused=True, in torch's optimizer", _SHARD, _OFFLOAD),
    "optimizer-state": (
        _SHARD,
        "an optimizer with 8-bit states (adamw_8bit)",
        _OFFLOAD,
        "LoRA: states for adapters only",
    ),
    "logits": (
        "a loss in chunks or fused with the head (Liger's fused_linear_cross_entropy; zerofit's --loss-chunk)",
        _SMALLER_BATCH,
        "a shorter maximum length",
    ),
    "second-copy": (
        "keep the copy in host memory, or update it every few steps",
        "with LoRA, the reference is the model with its adapters off",
    ),
    "activations": (_SMALLER_BATCH, _CHECKPOINTING, _SHARD, _OFFLOAD),
    "gathered-parameters": (
        "a smaller stage3_max_live_parameters and stage3_prefetch_bucket_size",
        _SMALLER_BATCH,
        _CHECKPOINTING,
    ),
    "evaluation-keeps-logits": (
        "preprocess_logits_for_metrics: keep the argmax, not the logits",
        "eval_accumulation_steps=1 moves logits to host memory",
        "prediction_loss_only=True if no metric needs them",
    ),
    "evaluation": (
        "a smaller per_device_eval_batch_size (its default is 8, whatever the training batch)",
        "keep the argmax of earlier batches, not their logits",
        "torch.no_grad() around your own evaluation loop",
    ),
    "generation": (
        "fewer or shorter sequences at a time: the key-value cache grows with both",
        "a smaller num_generations or generation batch",
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
        "pin_memory=False (offload_optimizer and offload_param have the key, too)",
        "ulimit -l unlimited before the command (docker run --ulimit memlock=-1)",
        "fewer ranks on the host, or less offload",
    ),
    "device-full-at-start": (
        f"find the process that uses the device: {NVIDIA_SMI}",
        "stop the processes of an earlier run, or use another GPU",
    ),
    "cuda-in-dataloader": (
        "keep CUDA out of the Dataset and collate_fn: each worker would create its own CUDA context",
    ),
    "nccl-buffers": (
        "leave room for communicators: a smaller micro batch, or set_per_process_memory_fraction(0.9)",
        "NCCL_BUFFSIZE=1048576, or fewer channels (NCCL_MAX_NCHANNELS)",
    ),
    "library-workspace": (
        f"find the process that uses the device: {NVIDIA_SMI}",
        "leave room: a smaller micro batch, or set_per_process_memory_fraction(0.9)",
    ),
    "kernel-resources": (
        "smaller block sizes or fewer num_stages for that kernel: its shared memory is a property of the GPU",
    ),
    "weights-in-host-memory": (
        _LOW_MEMORY,
        "create the model under ZeRO-3, so that each rank keeps only its part",
        "fewer ranks on the host, or more memory for the job (--mem)",
    ),
    "offloaded-states": (
        "keep the states on the GPUs if they fit (no offload_optimizer)",
        'offload_optimizer: {"device": "nvme"}',
        "more hosts, or more memory for the job (--mem): 12 to 16 bytes per parameter, split over all ranks",
    ),
    "data-in-host-memory": (
        "stream the data set (streaming=True), or fewer num_proc",
        "more memory for the job (--mem)",
    ),
    "dataloader-workers": (
        "fewer num_workers, or a smaller prefetch_factor",
        "avoid Python lists with millions of items in the Dataset",
    ),
    "shared-memory": (
        "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir of medium Memory at /dev/shm",
        "fewer num_workers",
    ),
    "saving-in-host-memory": ("save shards instead of the full model", "more memory for the job (--mem)"),
    "host-memory": (
        "more memory for the job (--mem), or fewer ranks on the host",
        "fewer DataLoader workers; less offload",
    ),
}
