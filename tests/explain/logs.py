"""Errors about memory in the words of each version of torch and of each program, with figures of our own."""

TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 44, in <module>
    main()
  File "/home/me/train.py", line 38, in main
    {own}
{frames}{error}
"""
LIBRARY = '  File "/opt/env/lib/python3.11/site-packages/{file}", line {line}, in {name}\n    {code}\n'

# torch's message by version: (versions, text). 24 GiB, of which 20 are in tensors, 1 unused, 0.5 free, 2.5 beside
MESSAGES = {
    "1.13 and 2.0": "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 24.00 "
    "GiB total "
    "capacity; 20.00 GiB already allocated; 512.00 MiB free; 21.00 GiB reserved in total by PyTorch) If "
    "reserved memory "
    "is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory "
    "Management and PYTORCH_CUDA_ALLOC_CONF",
    "2.1": "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacty of "
    "24.00 GiB of which 512.00 MiB is free. Including non-PyTorch memory, this process has 21.50 GiB memory in use. "
    "Process 77 has 2.00 GiB memory in use. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 1.00 "
    "GiB is "
    "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting max_split_size_mb",
    "2.2 to 2.4": "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 24.00 GiB of which 512.00 MiB is free. Including non-PyTorch memory, this process has 21.50 "
    "GiB memory "
    "in use. Process 77 has 2.00 GiB memory in use. Of the allocated memory 20.00 GiB is allocated by PyTorch, "
    "and 1.00 "
    "GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
    "2.5 and later, in a container": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
    "GPU 0 has a "
    "total capacity of 24.00 GiB of which 512.00 MiB is free. Process 4001 has 21.50 GiB memory in use. Process "
    "77 has "
    "2.00 GiB memory in use. Of the allocated memory 20.00 GiB is allocated by PyTorch, with 100.00 MiB allocated in "
    "private pools (e.g., CUDA Graphs), and 1.00 GiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated "
    "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
    "HIP, with a limit": "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 24.00 GiB of which 512.00 MiB is free. 22.00 GiB allowed; Of the allocated memory 20.00 GiB is "
    "allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated.",
}


def full(
    asked: str = "2.00 GiB", free: str = "512.00 MiB", allocated: str = "22.00 GiB", unused: str = "100.00 MiB"
) -> str:
    """torch's message for a GPU of 24 GiB that this process fills."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of "
        f"24.00 GiB "
        f"of which {free} is free. Including non-PyTorch memory, this process has 23.00 GiB memory in use. Of the "
        f"allocated memory {allocated} is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated."
    )


def traceback(own: str, *frames: tuple[str, int, str, str], error: str = "") -> str:
    """A traceback from the user's line through libraries' frames (file, line, function, code) to an error."""
    calls = "".join(LIBRARY.format(file=file, line=line, name=name, code=code) for file, line, name, code in frames)
    return TRACEBACK.format(own=own, frames=calls, error=error or full())


TRAINING = ("transformers/trainer.py", 3790, "training_step", "loss = self.compute_loss(model, inputs)")
LINEAR = ("torch/nn/modules/linear.py", 125, "forward", "return F.linear(input, self.weight, self.bias)")
LLAMA = ("transformers/models/llama/modeling_llama.py", 300, "forward", "hidden = self.mlp(hidden)")
PHASES = {
    "activations": [traceback("trainer.train()", TRAINING, LLAMA, LINEAR)],
    "logits": [
        traceback(
            "trainer.train()",
            TRAINING,
            ("transformers/models/llama/modeling_llama.py", 900, "forward", "logits = self.lm_head(hidden)"),
            ("torch/nn/modules/module.py", 1750, "_call_impl", "return forward_call(*args, **kwargs)"),
            LINEAR,
        ),
        traceback(
            "loss = F.cross_entropy(out, y)", ("torch/nn/functional.py", 3400, "cross_entropy", "return torch._C")
        ),
    ],
    "optimizer-state": [
        traceback(
            "optimizer.step()", ("torch/optim/adamw.py", 152, "_init_group", 'state["exp_avg"] = torch.zeros_like(')
        ),
        traceback(
            "engine.step()",
            ("deepspeed/runtime/engine.py", 2200, "_take_model_step", "self.optimizer.step()"),
            ("deepspeed/runtime/zero/stage_1_and_2.py", 1900, "step", "self._optimizer_step(i)"),
        ),
    ],
    "states": [
        traceback(
            "engine, *_ = deepspeed.initialize(model=model)",
            ("deepspeed/__init__.py", 181, "initialize", "engine = DeepSpeedEngine("),
            ("deepspeed/runtime/engine.py", 1300, "_configure_zero_optimizer", "optimizer = DeepSpeedZeroOptimizer("),
            ("deepspeed/runtime/zero/stage_1_and_2.py", 500, "__init__", "self.initialize_optimizer_states()"),
        )
    ],
    "weights": [
        traceback("model.to(device)", ("torch/nn/modules/module.py", 1300, "_apply", "param_applied = fn(param)")),
        traceback("model = GPT(48)", ("torch/nn/modules/linear.py", 106, "__init__", "self.weight = Parameter(")),
        traceback(
            "model = AutoModel.from_pretrained(name)",
            ("transformers/modeling_utils.py", 4000, "from_pretrained", "model, *_ = cls._load_pretrained_model("),
        ),
    ],
    "communication-buckets": [
        traceback(
            "engine.backward(loss)",
            ("deepspeed/runtime/engine.py", 2583, "backward", "self._do_optimizer_backward(loss, retain_graph)"),
            (
                "deepspeed/runtime/zero/stage_1_and_2.py",
                3266,
                "setup_buckets",
                "buf_0 = torch.empty(int(self.reduce_bucket_size),",
            ),
        )
    ],
    "checkpoint-on-device": [
        traceback("state = torch.load(path)", ("torch/serialization.py", 1500, "_cuda", "return obj.cuda(device)"))
    ],
    "evaluation-keeps-logits": [
        traceback(
            "trainer.evaluate()",
            ("transformers/trainer.py", 4100, "evaluation_loop", "all_preds.add(logits)"),
            ("transformers/trainer_pt_utils.py", 99, "nested_concat", "return torch_pad_and_concatenate(tensors"),
        )
    ],
    "evaluation": [
        traceback(
            "trainer.evaluate()", ("transformers/trainer.py", 4000, "prediction_step", "loss, out ="), LLAMA, LINEAR
        )
    ],
    "generation": [
        traceback("out = model.generate(**inputs)", ("transformers/generation/utils.py", 2000, "_sample", "x"), LLAMA)
    ],
    "saving": [
        traceback(
            "trainer.save_model()",
            (
                "deepspeed/runtime/engine.py",
                3700,
                "_zero3_consolidated_16bit_state_dict",
                "with GatheredParameters(p):",
            ),
        )
    ],
    "gathered-parameters": [
        traceback(
            "trainer.train()",
            TRAINING,
            (
                "deepspeed/runtime/zero/partitioned_param_coordinator.py",
                300,
                "fetch_sub_module",
                "self.__all_gather_params(",
            ),
        )
    ],
}
# cause -> logs without torch's figures
OTHERS = {
    "vllm-gpu-not-free": [
        "(EngineCore_DP0 pid=6940) ValueError: Free memory on device cuda:1 (19.77/22.05 GiB) on startup is less than "
        "desired GPU memory utilization (0.9, 19.84 GiB). Decrease GPU memory utilization or reduce GPU memory used by "
        "other processes."
    ],
    "vllm-no-cache": [
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine."
    ],
    "vllm-sequence-too-long": [
        "(EngineCore_DP0 pid=68) ERROR 10-25 13:08:43 [core.py:708] ValueError: To serve at least one request with the "
        "models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache "
        "memory (0.71 GiB). Based on the available memory, the estimated maximum model length is 5632. Try increasing "
        "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.",
        "ValueError: To serve at least one request with the model's max seq len (1048576),\n22.5 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (17.39 GiB).\nBased on the available memory, the "
        "estimated maximum model length is 810208.",
        "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in "
        "KV cache (3664). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`",
    ],
    "vllm-warm-up": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 1 has a total capacity of 23.57 "
        "GiB of which 605.88 MiB is free. \n\nThe above exception was the direct cause of the following exception:\n\n"
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
    ],
    "kernel-resources": [
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 180224, Hardware "
        "limit: 101376."
    ],
    "nccl-buffers": ["node1:300:366 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc async 6291456 bytes"],
    "library-workspace": ["RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"],
    "shared-memory": [
        "RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that "
        "dataloader's workers "
        "are out of shared memory. Please try to raise your shared memory limit.",
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-3 (size 9637888)",
    ],
    "pinned-memory": [
        traceback(
            "for batch in loader:",
            ("torch/utils/data/_utils/pin_memory.py", 60, "pin_memory", "return data.pin_memory(device)"),
            error="RuntimeError: CUDA error: out of memory",
        )
    ],
    "device-full-at-start": [
        traceback(
            'x = torch.zeros(1, device="cuda")',
            ("torch/cuda/__init__.py", 400, "_lazy_init", "torch._C._cuda_init()"),
            error="torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be "
            "asynchronously reported",
        )
    ],
    "cuda-in-dataloader": [
        "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal "
        + traceback("return self.images[i].cuda()", error="RuntimeError: CUDA error: out of memory")
    ],
    "dataloader-workers": ["RuntimeError: DataLoader worker (pid(s) 4021) is killed by signal: Killed. "],
    "host-memory": [
        "[1193.2] Out of memory: Killed process 4021 (python3) total-vm:90000000kB, anon-rss:62914560kB, "
        "file-rss:0kB, "
        "shmem-rss:0kB, UID:1000",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=113.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Detected 1 oom-kill event(s) in step 113.batch cgroup.",
        "slurmstepd: error: Step 113.0 exceeded memory limit (66000000 > 65000000), being killed",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 12.0 GiB for an array with shape (1, 2)",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried "
        "to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
    "weights-in-host-memory": [
        "Loading checkpoint shards:  43%|####      | 3/7 [00:12<00:16,  4.1s/it]\n"
        "[2025-01-02 13:09:33,220] [ERROR] [launch.py:324:sigkill_handler] ['python'] exits with return code = -9"
    ],
    "offloaded-states": [
        "[INFO] [utils.py:829:see_memory_usage] Before initializing optimizer states\n"
        "[INFO] [utils.py:830:see_memory_usage] MA 11.76 GB         Max_MA 11.76 GB         CA 11.77 GB         "
        "Max_CA 12 GB\n"
        "[INFO] [utils.py:838:see_memory_usage] CPU Virtual Memory:  used = 228.43 GB, percent = 90.6%\n"
        "  exitcode  : -9 (pid: 4021)\n  traceback : Signal 9 (SIGKILL) received by PID 4021"
    ],
    "unknown": [
        "train.sh: line 12:  4021 Killed                  python train.py",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        full(free="4.00 GiB", allocated="15.00 GiB"),
        "".join(f"{{'loss': 1.{n}, 'epoch': 0.{n}}}\n" for n in range(9)) + traceback("loss.backward()"),
    ],
}
