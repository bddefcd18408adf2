"""Public threads on GitHub about memory: their figures and calls in torch's words, and what each found in the end.

Code lines, and what a thread leaves out of a message, are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.explain.logs import LIBRARY, TRACEBACK


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread. `found`: the cause that it found; "" if it ended without one, so that only "unknown" is right."""

    number: str
    log: str
    found: str
    why: str  # in the thread's sense


def old(asked: str, total: str, allocated: str, free: str, reserved: str) -> str:
    """The message of torch 1.4 to 2.0."""
    return (
        f"CUDA out of memory. Tried to allocate {asked} (GPU 0; {total} total capacity; {allocated} already allocated; "
        f"{free} free; {reserved} reserved in total by PyTorch)"
    )


def new(asked: str, total: str, free: str, allocated: str, unused: str, *processes: str) -> str:
    """The message of torch 2.2 and later; `processes`: what it says of each."""
    used = "".join(f"{process} memory in use. " for process in processes)
    return (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of which {free} is "
        f"free. {used}Of the allocated memory {allocated} is allocated by PyTorch, and {unused} is reserved by PyTorch "
        "but unallocated. If reserved but unallocated memory is large try setting max_split_size_mb"
    )


def calls(error: str, *frames: tuple[str, str], own: str = "trainer.train()") -> str:
    """A traceback from the user's line through functions of libraries (file, function)."""
    inner = "".join(LIBRARY.format(file=file, line=100, name=name, code="...") for file, name in frames)
    return TRACEBACK.format(own=own, frames=inner, error=f"torch.cuda.OutOfMemoryError: {error}")


TRAINER, ACCELERATE = "transformers/trainer.py", "accelerate/optimizer.py"
MINUS_9 = "[ERROR] [launch.py:324:sigkill_handler] ['python', '-u', 'train.py'] exits with return code = -9"
THREADS = (
    Thread(
        number="pytorch/pytorch#35901",
        log=old("10.84 GiB", "23.65 GiB", "1.06 GiB", "10.26 GiB", "12.53 GiB"),
        found="fragmentation",
        why="a segment of 10.8 GiB had been split into blocks, some in use",
    ),
    Thread(
        number="pytorch/pytorch#59778",
        log=old("2.26 GiB", "6.00 GiB", "781.59 MiB", "3.03 GiB", "1.24 GiB"),
        found="",
        why="no answer why the driver refused with 3 GiB free",
    ),
    Thread(
        number="Instruction-Tuning-with-GPT-4/GPT-4-LLM#16",
        log=old("172.00 MiB", "79.35 GiB", "73.95 GiB", "12.19 MiB", "76.80 GiB"),
        found="",
        why="more GPUs or a smaller batch, without a traceback",
    ),
    Thread(
        number="LISTatSNU/FastMRI_challenge#238",
        log=old("216.00 MiB", "7.92 GiB", "69.17 MiB", "24.56 MiB", "86.00 MiB"),
        found="not-from-torch",
        why="a process that was left behind used 6 GiB",
    ),
    Thread(
        number="erikguo/yolov3#4",
        log="CUDA out of memory. Tried to allocate 338.00 MiB (GPU 0; 3.95 GiB total capacity; 1.62 GiB already "
        "allocated; 23.00 MiB free; 9.10 MiB cached)",
        found="not-from-torch",
        why="ending another process made room",
    ),
    Thread(
        number="YingqianWang/iPASSR#9",
        log=old("10.73 GiB", "8.00 GiB", "17.20 GiB", "0 bytes", "19.15 GiB"),
        found="single-tensor",
        why="the request is larger than the GPU",
    ),
    Thread(
        number="jhc13/taggui#188",
        log=new("20.00 MiB", "4.00 GiB", "2.35 GiB", "825.15 MiB", "24.85 MiB"),
        found="",
        why="expandable segments helped, although 2.35 GiB were free",
    ),
    Thread(
        number="hiyouga/LlamaFactory#7781",
        log=calls(
            new("270.00 MiB", "23.65 GiB", "208.06 MiB", "22.87 GiB", "6.23 MiB", "Process 2271798 has 23.44 GiB"),
            ("transformers/modeling_utils.py", "from_pretrained"),
            ("transformers/modeling_utils.py", "_load_state_dict_into_meta_model"),
            own="model = load_model(tokenizer)",
        ),
        found="weights",
        why="prediction loads the full model on each GPU",
    ),
    Thread(
        number="hiyouga/LlamaFactory#1936",
        log=calls(
            new(
                *("136.00 MiB", "23.65 GiB", "93.81 MiB", "21.51 GiB", "2.30 MiB"),
                *(f"Process {pid} has 398.00 MiB" for pid in (62201, 62203, 62204)),
                *("Process 62200 has 21.98 GiB", "Process 62202 has 398.00 MiB"),
            ),
            (TRAINER, "__init__"),
            (TRAINER, "_move_model_to_device"),
            ("torch/nn/modules/module.py", "to"),
            ("torch/nn/modules/module.py", "_apply"),
            own="trainer = PairwiseTrainer(model)",
        ),
        found="weights",
        why="the trainer moved the full 13B model to one GPU",
    ),
    Thread(
        number="meta-pytorch/torchtune#2071",
        log=calls(
            new("1.96 GiB", "23.43 GiB", "210.06 MiB", "22.41 GiB", "206.09 MiB", "this process has 0 bytes"),
            ("recipes/lora_finetune_distributed.py", "train"),
            ("torch/nn/modules/module.py", "_call_impl"),
            ("torchtune/modules/transformer.py", "forward"),
            ("torchtune/modules/attention.py", "forward"),
        ),
        found="activations",
        why="8B LoRA in 24 GB: a smaller batch or sequence",
    ),
    Thread(
        number="huggingface/transformers#17089",
        log=calls(
            "CUDA out of memory.",
            (TRAINER, "evaluation_loop"),
            ("transformers/trainer_pt_utils.py", "nested_concat"),
            own="metrics = trainer.evaluate()",
        ),
        found="evaluation-keeps-logits",
        why="predictions of all batches were kept on the GPU",
    ),
    Thread(
        number="huggingface/trl#2776",
        log=calls(
            new("130.00 MiB", "94.99 GiB", "87.19 MiB", "93.10 GiB", "300.10 MiB", "this process has 94.80 GiB"),
            ("torch/optim/optimizer.py", "_use_grad"),
            ("torch/optim/adamw.py", "adamw"),
            ("torch/optim/adamw.py", "_multi_tensor_adamw"),
        ),
        found="optimizer-temporaries",
        why="temporaries of AdamW's foreach implementation",
    ),
    Thread(
        number="ContextualAI/gritlm#65",
        log=calls(
            "CUDA out of memory.",
            (ACCELERATE, "step"),
            ("torch/optim/optimizer.py", "_use_grad"),
            ("torch/optim/adamw.py", "_init_group"),
            own="self.optimizer.step()",
        ),
        found="optimizer-state",
        why="AdamW's states of 8B parameters, in the first step",
    ),
    Thread(
        number="deepspeedai/DeepSpeed#4239",
        log=f"Loading checkpoint shards:  80%|████    | 4/5 [02:11<00:33, 33.1s/it]\n{MINUS_9}",
        found="weights-in-host-memory",
        why="stage 3 with both offloads filled the hosts' memory",
    ),
    Thread(
        number="deepspeedai/DeepSpeed#3160",
        log="[INFO] [utils.py:829:see_memory_usage] Before initializing optimizer states\n"
        "[INFO] [utils.py:830:see_memory_usage] MA 11.76 GB         Max_MA 11.76 GB         CA 11.77 GB\n"
        f"[INFO] [utils.py:838:see_memory_usage] CPU Virtual Memory:  used = 28.43 GB, percent = 22.6%\n{MINUS_9}",
        found="offloaded-states",
        why="6B parameters need 72 GB of states next to 28 GB of 126",
    ),
    Thread(
        number="zai-org/ChatGLM-6B#736",
        log=MINUS_9,
        found="",
        why="the system's memory was full, or a person killed it",
    ),
    Thread(
        number="ArjunaCluster/ArjunaUsers#52",
        log="/var/spool/slurmd/job191/slurm_script: line 28:  8156 Killed                  python3 main.py\n"
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of your processes may have "
        "been killed by the cgroup out-of-memory handler.",
        found="host-memory",
        why="the job's control group",
    ),
    Thread(
        number="NVIDIA/nccl#1235",
        log="ng30903:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
        "ng30903:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
        found="nccl-buffers",
        why="the model left no room for NCCL's buffers",
    ),
    Thread(
        number="fastai/docker-containers#21",
        log="RuntimeError: DataLoader worker (pid 47) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
        found="shared-memory",
        why="--shm-size=3G",
    ),
    Thread(
        number="state-spaces/mamba#387",
        log="triton.runtime.autotuner.OutOfResources: out of resource: shared memory, Required: 663808, Hardware "
        "limit: 101376. Reducing block sizes or `num_stages` may help.",
        found="kernel-resources",
        why="the head dimension needs more shared memory than any GPU has",
    ),
)

# Other messages, most of them of 2025 and 2026 (torch 2.6 and later, Ray, Slurm, vLLM): thread, log, the cause that the
# figures show, and a word of the advice. How the threads ended is not compared.
RECENT = (
    (
        "kyuz0/amd-strix-halo-image-video-toolboxes#3",
        'File "/opt/venv/lib64/python3.13/site-packages/torch/utils/_device.py", line 104, in '
        "__torch_function__\n"
        "    return func(*args, **kwargs)\n"
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity "
        "of 128.00 GiB of which 780.24 MiB is free. Of the allocated memory 57.70 GiB is allocated by "
        "PyTorch, and 75.82 MiB is reserved by PyTorch but unallocated.",
        "not-from-torch",
        "rocm-smi",
    ),
    (
        "ROCm/TheRock#2118",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity "
        "of 23.41 GiB of which 21.22 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is "
        "allocated by PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB "
        "is reserved by PyTorch but unallocated.",
        "memory-fraction",
        "",
    ),
    (
        "ROCm/TheRock#1054",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity "
        "of 15.24 GiB of which 15.09 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, "
        "and 0 bytes is reserved by PyTorch but unallocated.",
        "single-tensor",
        "",
    ),
    (
        "intel/intel-extension-for-pytorch#846",
        "Traceback (most recent call last):\n"
        '  File "<stdin>", line 1, in <module>\n'
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity "
        "of 15.11 GiB. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by "
        "PyTorch but unallocated.",
        "unknown",
        "xpu-smi",
    ),
    (
        "intel/torch-xpu-ops#3011",
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity "
        "of 5.65 GiB of which 5.65 GiB is free. Of the allocated memory 195.50 KiB is allocated by PyTorch, "
        "and 1.81 MiB is reserved by PyTorch but unallocated.",
        "unknown",
        "xpu-smi",
    ),
    (
        "pytorch/pytorch#177714",
        "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "unknown",
        "xpu-smi",
    ),
    (
        "pytorch/pytorch#152351",
        'File "/opt/anaconda3/envs/huggingface/lib/python3.10/site-packages/transformers/trainer.py", line '
        "3782, in training_step\n"
        "    self.accelerator.backward(loss, **kwargs)\n"
        "RuntimeError: MPS backend out of memory (MPS allocated: 11.14 GB, other allocations: 6.65 GB, max "
        "allowed: 18.13 GB). Tried to allocate 375.40 MB on private pool. Use "
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations.",
        "metal-memory",
        "torch.mps",
    ),
    (
        "Comfy-Org/ComfyUI#7440",
        "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: "
        "27.20 GiB). Tried to allocate 292.50 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 "
        "to disable upper limit for memory allocations.",
        "metal-memory",
        "torch.mps",
    ),
    (
        "Comfy-Org/ComfyUI#8984",
        "MPS backend out of memory (MPS allocated: 15.72 GiB, other allocations: 2.41 MiB, max allowed: "
        "18.13 GiB). Tried to allocate 5.81 GiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to "
        "disable upper limit for memory allocations.",
        "unknown",
        "torch.mps",
    ),
    (
        "WM-PO/WMPO#3",
        "(raylet) [2025-12-07 09:57:19,206 E 393463 393463] (raylet) node_manager.cc:3277: 2 Workers (tasks "
        "/ actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons at node (ID: "
        "8289f87b78d161ae21bf723c7c57838345a56248dd48a2c3f0d5ac73, IP: 172.24.0.226) over the last time "
        "period. To see more information about the Workers killed on this node, use `ray logs raylet.out -ip "
        "172.24.0.226`",
        "host-memory",
        "",
    ),
    (
        "nextflow-io/nextflow#5932",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been "
        "OOM Killed.\n"
        "srun: error: sdumont6156: task 0: Out Of Memory",
        "host-memory",
        "",
    ),
    (
        "vllm-project/vllm#17431",
        "ERROR 04-30 10:20:36 [core.py:396] ValueError: No available memory for the cache blocks. Try "
        "increasing `gpu_memory_utilization` when initializing the engine.",
        "vllm-no-cache",
        "zerofit plan",
    ),
    (
        "deepspeedai/DeepSpeed#1956",
        "[INFO|deepspeed.py:449] >> Attempting to resume from finetuned/checkpoint-22\n"
        f"[INFO] [engine.py:2754:_get_all_zero_checkpoint_state_dicts] read 2 ZeRO state_dicts for rank 0\n{MINUS_9}",
        "loading-in-host-memory",
        "elastic_checkpoint",
    ),
    (
        "ShivamShrirao/diffusers#61",  # stage 3 pins one buffer; the traceback shows only the first line of the call
        TRACEBACK.format(
            own="deepspeed.initialize(model)",
            frames=LIBRARY.format(
                file="deepspeed/runtime/zero/stage3.py",
                line=543,
                name="_create_param_groups_fp16_flat_cpu_memory",
                code="torch.empty(int(flat_buffer_size),",
            ),
            error="RuntimeError: CUDA error: out of memory",
        ),
        "pinned-memory",
        "pin_memory",
    ),
    (
        "baichuan-inc/Baichuan2#333",
        LIBRARY.format(
            file="deepspeed/runtime/zero/partition_parameters.py",
            line=1832,
            name="_allgather_params",
            code="replicated_tensor = torch.empty(param.ds_shape, dtype=param.ds_tensor.dtype)",
        )
        + old("1.92 GiB", "31.74 GiB", "30.00 GiB", "304.88 MiB", "30.60 GiB"),
        "gathered-parameters",
        "",
    ),
)
