"""Checkpoints by the real programs: plain DeepSpeed, Accelerate, the Trainer, FSDP with torch's own checkpoints.

    python -m benchmarks.foreign_writer FOLDER RANKS [NAME ...]

Writes FOLDER/NAME-RANKS/ for each case: the program's checkpoint, `reference` (what the program's own save_pretrained
gives), `facts.json` (losses of the next steps) and `logits.pt` (the running model's, with the saved weights).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import multiprocessing
import traceback
import unittest.mock

import torch
import torch.distributed as dist

from zerofit.launch.host import ops_folder, with_own_programs
from zerofit.launch.local import free_port

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 260,
}
BUCKETS = {"reduce_bucket_size": 50000, "stage3_param_persistence_threshold": 100}
BUCKETS |= {"stage3_gather_16bit_weights_on_model_save": True}
BUCKETS |= {"memory_efficient_linear": False}  # else ZeRO 3 rounds before it adds a bias, from then on in all cases
ADAPTERS: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
TEXT = "zerofit resumes "
LENGTH, BEFORE, AFTER, LR, DECAY = len(TEXT), 3, 5, 1e-2, 0.1
LOGITS: list[torch.Tensor] = []  # of each forward of the case that runs


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, and how it trains."""

    program: str  # a key of PROGRAMS
    stage: int = 0
    precision: str = "fp32"
    model: str = "llama"  # llama; qwen2 with tied embeddings; moe, pipeline: of DeepSpeed's own layers
    groups: int = 1
    lora: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    kind: str = "sharded"  # of FSDP's state dict
    tensor: int = 1  # AutoTP's degree


CASES = {
    **{
        f"ds-zero{stage}-{p}": Case(program="deepspeed", stage=stage, precision=p)
        for stage in range(4)
        for p in ("fp32", "bf16")
    },
    **{
        f"ds-zero{stage}-tied": Case(program="deepspeed", stage=stage, precision="bf16", model="qwen2", groups=2)
        for stage in range(4)
    },
    **{f"ds-zero{stage}-fp16": Case(program="deepspeed", stage=stage, precision="fp16") for stage in range(4)},
    **{f"ds-tp-zero{stage}": Case(program="deepspeed", stage=stage, precision="bf16", tensor=2) for stage in range(3)},
    "ds-tp-zero1-fp32": Case(program="deepspeed", stage=1, tensor=2),
    "ds-zero2-offload": Case(program="deepspeed", stage=2, zero={"offload_optimizer": {"device": "cpu"}}),
    "ds-zero3-offload": Case(program="deepspeed", stage=3, zero={"offload_optimizer": {"device": "cpu"}}),
    "ds-zero2-round-robin": Case(program="deepspeed", stage=2, groups=2, zero={"round_robin_gradients": True}),
    "ds-zero1-elastic": Case(program="deepspeed", stage=1, zero={"elastic_checkpoint": True}),
    "ds-zero3-sub-groups": Case(program="deepspeed", stage=3, groups=2, zero={"sub_group_size": 5000}),
    "ds-moe": Case(program="deepspeed", stage=2, model="moe"),
    "ds-moe-zero0": Case(program="deepspeed", stage=0, model="moe"),
    "accelerate-zero2": Case(program="accelerate", stage=2),
    "accelerate-zero3": Case(program="accelerate", stage=3, precision="bf16", model="qwen2"),
    "accelerate": Case(program="accelerate-plain"),
    "accelerate-groups": Case(program="accelerate-plain", model="qwen2", groups=2),
    "accelerate-fsdp2": Case(program="fsdp-accelerate", model="qwen2"),
    "accelerate-fsdp2-full": Case(program="fsdp-accelerate", kind="full"),
    "trainer-zero0": Case(program="trainer", stage=0),
    "trainer-zero1": Case(program="trainer", stage=1, precision="bf16"),
    "trainer-zero2": Case(program="trainer", stage=2, precision="bf16", model="qwen2"),
    "trainer-zero3": Case(program="trainer", stage=3, precision="bf16"),
    "trainer-zero2-lora": Case(program="trainer", stage=2, lora=True),
    "trainer-zero3-lora": Case(program="trainer", stage=3, lora=True),
    "trainer-ddp": Case(program="trainer-ddp"),
    "trainer-ddp-groups": Case(program="trainer-ddp", model="qwen2", groups=2),
    "lightning-zero2": Case(program="lightning", stage=2, precision="bf16"),
    "lightning-zero3": Case(program="lightning", stage=3, precision="bf16", model="qwen2"),
    "lightning-ddp": Case(program="lightning-ddp"),
    "torchtitan": Case(program="torchtitan"),
    "dcp-fsdp2": Case(program="fsdp"),
    "dcp-fsdp2-tied": Case(program="fsdp", model="qwen2"),
    "dcp-fsdp2-groups": Case(program="fsdp", model="qwen2", groups=2),
    "dcp-fsdp1-sharded": Case(program="fsdp1"),
    "dcp-fsdp1-full": Case(program="fsdp1", kind="full"),
    "torch": Case(program="torch", groups=2),
    "torch-tied": Case(program="torch", model="qwen2", groups=2),
    "ds-pipeline": Case(program="deepspeed", stage=1, model="pipeline"),
    "ds-pipeline-zero0": Case(program="deepspeed", stage=0, model="pipeline"),
}


def batch() -> dict[str, torch.Tensor]:
    """Return the inputs of each rank and step, (2, LENGTH): neither the ranks nor the order of samples matter.

    zerofit trains on them as samples of a text that repeats TEXT. The last token has a target, too.
    """
    tokens = torch.tensor(list((2 * TEXT).encode())).expand(2, -1)
    inputs = tokens[:, :LENGTH].clone()
    return {"input_ids": inputs, "labels": inputs, "shift_labels": tokens[:, 1 : LENGTH + 1].clone()}


def rows(count: int) -> Any:
    """Return the samples of `count` batches."""
    return [{name: value[row] for name, value in batch().items()} for _ in range(count) for row in range(2)]


def make_model(case: Case) -> Any:
    """Build a transformers model from a seed."""
    import transformers

    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        case.model, **SHAPE, num_key_value_heads=2, tie_word_embeddings=case.model == "qwen2"
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    if case.lora:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
    model.register_forward_hook(lambda _, inputs, output: LOGITS.append(output.logits.detach().clone()))
    return model


def parameter_groups(model: Any, count: int) -> list[dict[str, Any]]:
    """Return one group without weight decay, or those with and without it, which zerofit's runs have too."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if count == 1:
        return [{"params": parameters}]
    wide = [[p for p in parameters if (p.ndim > 1) == many] for many in (True, False)]
    return [{"params": wide[0], "weight_decay": DECAY}, {"params": wide[1], "weight_decay": 0.0}]


def adamw(model: Any, case: Case) -> torch.optim.Optimizer:
    """Return torch's AdamW of a case."""
    return torch.optim.AdamW(parameter_groups(model, case.groups), lr=LR, weight_decay=0.0)


def ds_config(case: Case) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a case."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case.stage, **BUCKETS, **case.zero},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True, "weight_decay": 0.0}},
        "zero_allow_untested_optimizer": True,
    }
    if case.precision != "fp32":
        config[case.precision] = {"enabled": True}
    if case.precision == "fp16":
        config["fp16"]["initial_scale_power"] = 12  # no step of any stage overflows
    if case.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": min(case.tensor, dist.get_world_size())}
    if "offload_optimizer" in case.zero:
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def start_engine(model: Any, config: dict[str, Any], groups: Any) -> Any:
    """Return a DeepSpeed engine."""
    import deepspeed

    accelerator: Any = deepspeed.get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # it refuses fp16 on CPUs
    return deepspeed.initialize(model=model, config=config, model_parameters=groups)[0]


def steps(step: Callable[[], torch.Tensor], count: int) -> list[float]:
    """Train, and return the mean loss of the ranks at each step."""
    losses = []
    for _ in range(count):
        loss = step().detach().float().clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


def plain_step(model: Any, optimizer: Any) -> Callable[[], torch.Tensor]:
    """Return a function that makes a step without an engine, and returns its loss."""

    def step() -> torch.Tensor:
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def finish(folder: Path, case: Case, next_losses: list[float]) -> None:
    if dist.get_rank() == 0:
        facts = {"case": vars(case), "ranks": dist.get_world_size(), "next": next_losses}
        (folder / "facts.json").write_text(json.dumps(facts, indent=1))
        if LOGITS and not (case.lora and case.stage == 3):  # zero.Init draws other frozen weights, which are not saved
            torch.save(LOGITS[BEFORE], folder / "logits.pt")  # the first forward after the checkpoint


def with_deepspeed(case: Case, folder: Path) -> None:
    """Write with a plain engine."""
    import deepspeed

    if case.model in ("moe", "pipeline"):
        with_own_layers(case, folder)
        return
    model = make_model(case)
    config = ds_config(case)
    engine = start_engine(model, config, parameter_groups(model, case.groups))

    def step() -> torch.Tensor:
        loss = engine(**batch()).loss
        engine.backward(loss)
        engine.step()
        return loss

    steps(step, BEFORE)
    engine.save_checkpoint(str(folder / "saved"))
    parameters = list(engine.module.parameters())
    shared = case.tensor > 1 and dist.get_world_size() > 1
    with contextlib.ExitStack() as gathered:
        gathered.enter_context(deepspeed.zero.GatheredParameters(parameters, enabled=case.stage == 3))
        for parameter in parameters if shared else ():
            gathered.enter_context(deepspeed.module_inject.layers.GatherReplacedLayerParams([parameter], engine.module))
        if dist.get_rank() == 0:
            engine.module.save_pretrained(folder / "reference", state_dict=engine.module.state_dict())
    finish(folder, case, steps(step, AFTER))
    engine.destroy()


class Mixture(torch.nn.Module):
    """A classifier with DeepSpeed's mixture of experts."""

    def __init__(self, ranks: int):
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.first = torch.nn.Linear(16, 32)
        expert = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 32))
        self.mixture = MoE(32, expert, num_experts=4, ep_size=ranks, k=1, min_capacity=0)
        self.last = torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.mixture(torch.relu(self.first(x)))[0])


def with_own_layers(case: Case, folder: Path) -> None:
    """Write with DeepSpeed's mixture of experts, or its pipeline."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(1)
    config, ranks = ds_config(case), dist.get_world_size()
    x, y = torch.randn(2, 16), torch.tensor([1, 3])
    if case.model == "pipeline":
        layers = [torch.nn.Linear(16, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)]
        model: Any = PipelineModule(layers, num_stages=min(2, ranks), loss_fn=torch.nn.functional.cross_entropy)
        groups = None
    else:
        model = Mixture(min(2, ranks))
        groups = split({"params": list(model.parameters()), "name": "all"})
    engine = start_engine(model, config, groups or list(model.parameters()))

    def step() -> torch.Tensor:
        if case.model == "pipeline":
            return engine.train_batch(iter([(x, y)]))
        loss = torch.nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        return loss

    steps(step, BEFORE)
    engine.save_checkpoint(str(folder / "saved"))
    (folder / "reference").mkdir(exist_ok=True)
    torch.save(dict(engine.module.state_dict()), folder / "reference" / f"module-{dist.get_rank()}.pt")
    finish(folder, case, steps(step, AFTER))


def with_accelerate(case: Case, folder: Path) -> None:
    """Write with Accelerate's save_state, or with what it calls for FSDP, which it refuses to start on CPUs."""
    from accelerate import Accelerator, DeepSpeedPlugin

    reset_accelerate()
    plugin = None
    if case.program == "accelerate":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        config = ds_config(case)
        del config["optimizer"]
        config["gradient_accumulation_steps"] = 1
        plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(
        deepspeed_plugin=plugin, mixed_precision="no" if case.precision == "fp32" else case.precision
    )
    model: Any = make_model(case)
    optimizer: Any = adamw(model, case)
    loader = torch.utils.data.DataLoader(rows(1), batch_size=2)
    model, optimizer, _ = accelerator.prepare(model, optimizer, loader)

    def step() -> torch.Tensor:
        loss = model(**batch()).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    steps(step, BEFORE)
    accelerator.save_state(str(folder / "saved"))
    state = accelerator.get_state_dict(model)
    if dist.get_rank() == 0:
        plain: Any = accelerator.unwrap_model(model)
        plain.save_pretrained(folder / "reference", state_dict=state)
    dist.barrier()
    finish(folder, case, steps(step, AFTER))
    reset_accelerate()


def reset_accelerate() -> None:
    """Forget the state of the previous case."""
    from accelerate.state import AcceleratorState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def save_as_accelerate(model: Any, optimizer: Any, case: Case, folder: Path) -> None:
    """Write with the functions of Accelerate's save_state for FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import fsdp_utils

    reset_accelerate()
    accelerator = Accelerator()
    kind = "SHARDED_STATE_DICT" if case.kind == "sharded" else "FULL_STATE_DICT"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    with unittest.mock.patch.object(Accelerator, "is_fsdp2", True):
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, str(folder / "saved"))
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder / "saved"))


def with_trainer(case: Case, folder: Path) -> None:
    """Write with the Trainer of transformers."""
    import transformers

    reset_accelerate()
    arguments_of: Any = transformers.training_args
    arguments_of.is_torch_bf16_gpu_available = lambda: True  # it refuses bf16 on CPUs
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    config = ds_config(case) if case.program == "trainer" else None
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "saved"),
        per_device_train_batch_size=2,
        max_steps=BEFORE + AFTER,
        save_steps=BEFORE,
        save_total_limit=9,
        learning_rate=LR,
        weight_decay=DECAY if case.groups == 2 else 0.0,
        remove_unused_columns=False,
        average_tokens_across_devices=False,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        ddp_backend="gloo",
        bf16=case.precision == "bf16",
        deepspeed=config,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=make_model(case), args=arguments, train_dataset=rows(64))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    finish(folder, case, losses[BEFORE:])
    reset_accelerate()


def with_lightning(case: Case, folder: Path) -> None:
    """Write with the Trainer of Lightning: its DeepSpeed strategy, which it refuses to start on CPUs, or DDP."""
    import lightning.pytorch as lightning  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.accelerators.cpu import CPUAccelerator  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, deepspeed  # pyright: ignore[reportMissingImports]

    losses: list[float] = []

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model(case)

        def training_step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.net(**inputs).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0)

        def on_train_batch_end(self, *_: object) -> None:
            if self.global_step == BEFORE:
                save_gathered(self.net, folder, case.stage == 3)

    loader = torch.utils.data.DataLoader(rows(64), batch_size=2)
    saves = lightning.callbacks.ModelCheckpoint(folder / "saved", every_n_train_steps=BEFORE, save_top_k=-1)
    zero = {"zero_optimization": {"stage": case.stage, **BUCKETS}, "zero_allow_untested_optimizer": True}
    zero |= {"zero_force_ds_cpu_optimizer": False, "train_micro_batch_size_per_gpu": 2}
    strategy = DDPStrategy() if case.program == "lightning-ddp" else DeepSpeedStrategy(config=zero)
    with (
        unittest.mock.patch.object(deepspeed, "CUDAAccelerator", CPUAccelerator),
        unittest.mock.patch.object(deepspeed, "_validate_device_index_selection"),
        unittest.mock.patch.object(
            CPUAccelerator, "get_parallel_devices", lambda devices: [torch.device("cpu", 0)] * devices
        ),
    ):
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy,
            precision="bf16-true" if case.precision == "bf16" else "32-true",
            max_steps=BEFORE + AFTER,
            callbacks=[saves],
            logger=False,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Net(), loader)
    finish(folder, case, losses[BEFORE:])


def with_torchtitan(case: Case, folder: Path) -> None:
    """Write with torchtitan's optimizers and checkpoint manager, for a model that FSDP2 has sharded."""
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpoint import CheckpointManager  # pyright: ignore[reportMissingImports]
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # pyright: ignore[reportMissingImports]

    model: Any = make_model(case)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    adamw = default_adamw(lr=LR, betas=(0.9, 0.999), weight_decay=0.0)
    adamw.implementation = "for-loop"
    optimizers = adamw.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=optimizers, training_steps=100)
    config = CheckpointManager.Config(enable=True, interval=BEFORE, folder="saved", keep_latest_k=0)
    manager = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=None,
        base_folder=str(folder),
    )

    step = plain_step(model, optimizers)
    steps(step, BEFORE)
    manager.save(BEFORE)
    save_full(model, case, folder)
    finish(folder, case, steps(step, AFTER))


def save_full(model: Any, case: Case, folder: Path) -> None:
    """Write the full weights of an FSDP model with save_pretrained."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        plain = make_model(case)
        plain.load_state_dict(full)
        plain.save_pretrained(folder / "reference")
    dist.barrier()


def save_gathered(model: Any, folder: Path, gather: bool) -> None:
    """Write the weights with the program's own save_pretrained."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=gather):
        if dist.get_rank() == 0:
            model.save_pretrained(folder / "reference", state_dict=model.state_dict())


def with_fsdp(case: Case, folder: Path) -> None:
    """Write with FSDP2 or FSDP1 and torch.distributed.checkpoint."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model: Any = make_model(case)
    if case.program != "fsdp1":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = adamw(model, case)
    step = plain_step(model, optimizer)
    steps(step, BEFORE)
    (folder / "saved").mkdir(exist_ok=True)
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=case.kind == "full"))
    if case.program == "fsdp-accelerate":
        save_as_accelerate(model, optimizer, case, folder)
    elif case.kind == "full":
        if dist.get_rank() == 0:
            torch.save({"model": weights, "optimizer": states}, folder / "saved" / "state.pt")
    else:
        state_dict_saver.save(
            {"model": weights, "optimizer": states, "step": BEFORE}, checkpoint_id=str(folder / "saved")
        )
    save_full(model, case, folder)
    finish(folder, case, steps(step, AFTER))


def with_torch(case: Case, folder: Path) -> None:
    """Write the state dicts of model and optimizer with torch.save."""
    model: Any = make_model(case)
    optimizer = adamw(model, case)
    step = plain_step(model, optimizer)
    steps(step, BEFORE)
    (folder / "saved").mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, folder / "saved" / f"step{BEFORE}.pt")
        model.save_pretrained(folder / "reference")
    finish(folder, case, steps(step, AFTER))


PROGRAMS = {
    "deepspeed": with_deepspeed,
    "accelerate": with_accelerate,
    "accelerate-plain": with_accelerate,
    "trainer": with_trainer,
    "trainer-ddp": with_trainer,
    "lightning": with_lightning,
    "lightning-ddp": with_lightning,
    "torchtitan": with_torchtitan,
    "fsdp": with_fsdp,
    "fsdp1": with_fsdp,
    "fsdp-accelerate": with_fsdp,
    "torch": with_torch,
}


def start_ranks(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work` in forked ranks with a process group of gloo; exit with the worst code."""
    import accelerate  # noqa: F401 - imported once, before the ranks fork
    import deepspeed  # noqa: F401
    import torch.distributed.checkpoint
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    port, fork = free_port(), multiprocessing.get_context("fork")
    workers = [fork.Process(target=_rank, args=(rank, ranks, port, work, arguments)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(max(abs(worker.exitcode or 0) for worker in workers))


def _rank(rank: int, ranks: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in named.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCH_EXTENSIONS_DIR": str(ops_folder())}
    os.environ["PATH"] = with_own_programs(os.environ["PATH"])
    import deepspeed

    deepspeed.init_distributed("gloo")
    work(*arguments)
    dist.destroy_process_group()


def write_all(folder: Path, names: list[str]) -> None:
    """Write the cases as one rank; a case that a program refuses leaves error-RANK.txt."""
    for name in names:
        case, place = CASES[name], folder / f"{name}-{dist.get_world_size()}"
        place.mkdir(parents=True, exist_ok=True)
        LOGITS.clear()
        try:
            PROGRAMS[case.program](case, place)
        except Exception:
            (place / f"error-{dist.get_rank()}.txt").write_text(traceback.format_exc())
        dist.barrier()


if __name__ == "__main__":
    start_ranks(int(sys.argv[2]), write_all, Path(sys.argv[1]), sys.argv[3:] or list(CASES))
