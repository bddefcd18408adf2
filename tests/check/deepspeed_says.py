"""What the installed DeepSpeed does with each configuration of the corpus: one process, one gloo rank, on the CPU.

Engines of a setting with more ranks are built as one of them, in a further process whose collectives do nothing
(torch's "fake" backend).

    python -m tests.check.deepspeed_says said.json

A file's `deepspeed:` line claims `STAGE raises "TEXT"`, `STAGE warns "TEXT"` (in a warning of the log), `STAGE says
"TEXT"` (in any line of the log) or `STAGE gives EXPRESSION=JSON`; or it says `cannot: REASON`. The stages:

    config         DeepSpeedConfig of the values, with the setting's ranks; EXPRESSION is an attribute of it
    file           DeepSpeedConfig of the file itself
    engine         deepspeed.initialize with a toy model, a pipeline's where the setting has one
    step           the engine, and eight optimizer steps
    load           the engine, a checkpoint saved and loaded
    compile        the engine, and engine.compile()
    checkpointing  deepspeed.checkpointing.configure

No C++ op is built. Adam becomes torch's (torch_adam) where the case is not about DeepSpeed's own; what then is left
gets an op that does nothing, which is enough to build an engine.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import multiprocessing
import operator
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from tests.check.corpus import Case, cases
from zerofit.check.check import check, mend
from zerofit.check.document import parse
from zerofit.check.dotted import autos, drop, get
from zerofit.check.reader import filled_by

STEPS = 8
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")
STUBS = ("cpu_adam", "fused_adam")
OWN_ADAM = ("optimizer-amsgrad", "offload-optimizer-stage-0", "masters-in-both")  # about DeepSpeed's Adam


@dataclass(frozen=True)
class Claim:
    """A `deepspeed:` line."""

    stage: str  # "" where it cannot be shown
    verb: str  # "raises", "warns", "says" or "gives"
    text: str  # for "gives" the expression
    value: Any = None  # for "gives" what it is

    @classmethod
    def of(cls, case: Case) -> Claim:
        line = case.header("deepspeed")
        if line.startswith("cannot: "):
            return cls("", "cannot", line.removeprefix("cannot: "))
        stage, verb, rest = line.split(" ", 2)
        if verb != "gives":
            return cls(stage, verb, json.loads(rest))
        for at in (n for n in range(len(rest) - 1, 0, -1) if rest[n] == "="):
            try:
                return cls(stage, verb, rest[:at], json.loads(rest[at + 1 :]))
            except json.JSONDecodeError:
                continue
        raise ValueError(f"{case.name}: no EXPRESSION=JSON in {rest}")


def filled(config: Any, every: bool = False) -> Any:
    """The values with each "auto" that somebody fills (or every one) left out, and some batch in its place."""
    config = copy.deepcopy(config)
    for path in [p for p in autos(config) if every or p in filled_by()]:
        drop(config, path)
        if path in BATCH and not any(key in config for key in BATCH):
            config["train_micro_batch_size_per_gpu"] = 1
    if isinstance(config, dict) and config.get("scheduler", {}) == {}:
        config.pop("scheduler", None)
    return config


class Say:
    """DeepSpeed in this process."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world}
        os.environ.update({key: str(value) for key, value in local.items()})
        import deepspeed
        import torch
        from deepspeed.ops.op_builder.builder import OpBuilder
        from deepspeed.utils import groups
        from deepspeed.utils.logging import logger
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.set_num_threads(1)
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        OpBuilder.jit_load = self._op
        name, store = ("gloo", torch.distributed.HashStore()) if world == 1 else ("fake", FakeStore())
        torch.distributed.init_process_group(name, store=store, rank=rank, world_size=world)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        self.torch, self.deepspeed, self.logger = torch, deepspeed, logger
        self.groups = {k: copy.copy(v) for k, v in vars(groups).items() if k.startswith("_") and k.isupper()}
        self.groups |= {"mesh_device": None, "mpu": None, "expert_tensor_parallel_world_size": 1}
        self.lines: list[tuple[int, str]] = []
        handler = logging.Handler(logging.DEBUG)
        handler.emit = lambda record: self.lines.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
        logger.handlers = [handler]

    @staticmethod
    def _op(builder: Any, verbose: bool = True) -> Any:
        if builder.name in STUBS:
            return MagicMock()
        raise RuntimeError(f"a test builds no op, not {builder.name} either")

    def case(self, case: Case) -> dict[str, Any]:
        """What happened: `raised`, `log` and `value` of the claim, `mended` the error of a text called clean."""
        claim, started = Claim.of(case), time.monotonic()
        said: dict[str, Any] = {"raised": None, "value": None, "log": []}
        if claim.stage:
            self._fresh()
            with self._as_set(case):
                try:
                    said["value"] = json.loads(json.dumps(self._run(case, claim)))
                except BaseException as error:  # autotuning calls exit()
                    said["raised"] = f"{type(error).__name__}: {error}"
            said["log"] = self.lines[:]
        said["mended"] = self._mended(case)
        said["seconds"] = round(time.monotonic() - started, 3)
        return said

    def _fresh(self) -> None:
        from deepspeed.comm import comm
        from deepspeed.module_inject import layers
        from deepspeed.runtime.activation_checkpointing import checkpointing
        from deepspeed.utils import groups
        from deepspeed.utils.logging import warning_once

        comm.comms_logger.enabled = False
        checkpointing.PARTITION_ACTIVATIONS = checkpointing.CONTIGUOUS_CHECKPOINTING = False
        checkpointing.num_layers = None
        layers.DEEPSPEED_AUTOTP_MODE = layers.AUTOTP_MODE.INFERENCE
        vars(groups).update(self.groups)
        if hasattr(warning_once, "cache_clear"):
            warning_once.cache_clear()
        self.logger.setLevel(logging.INFO)
        self.lines.clear()

    @contextmanager
    def _as_set(self, case: Case) -> Iterator[None]:
        """The device has the setting's precisions, whatever this CPU has."""
        from deepspeed.accelerator import get_accelerator

        kinds, device = case.setting.precisions, type(get_accelerator())
        with (
            patch.object(device, "is_fp16_supported", lambda _: "fp16" in kinds),
            patch.object(device, "is_bf16_supported", lambda _: "bf16" in kinds),
        ):
            yield

    @staticmethod
    def _config(values: Any, case: Case) -> Any:
        """With the setting's ranks; a pipeline comes as the engine hands it over, in an mpu."""
        from deepspeed.runtime.config import DeepSpeedConfig

        ranks, stages = case.setting.ranks or 1, case.setting.pipeline
        mpu = stages and MagicMock(get_data_parallel_world_size=lambda: max(1, ranks // stages))
        with patch("deepspeed.comm.get_world_size", lambda *_: ranks), patch("deepspeed.comm.get_rank", lambda *_: 0):
            return DeepSpeedConfig(values, mpu or None)

    def _mended(self, case: Case) -> str | None:
        document = parse(mend(case.document, case.setting))
        if any(finding.severity == "error" for finding in check(document, case.setting)):
            return None  # it waits for a decision
        config = document.config
        try:
            self._config(filled(config, every=True), case)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _run(self, case: Case, claim: Claim) -> Any:
        if claim.stage == "file":
            config = self._config(str(case.path), case)
        elif claim.stage == "config":
            config = self._config(filled(case.document.config), case)
        elif claim.stage == "checkpointing":
            self.deepspeed.checkpointing.configure(None, deepspeed_config=filled(case.document.config))
            return None
        else:
            return self._engine(case, claim)
        return operator.attrgetter(claim.text)(config) if claim.verb == "gives" else None

    def _engine(self, case: Case, claim: Claim) -> Any:
        torch, deepspeed = self.torch, self.deepspeed
        torch.manual_seed(0)
        config = filled(case.document.config)
        self._adam(case, config)
        model = self._model(case, config)
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        if claim.stage == "step":
            for _ in range(STEPS):
                train(engine)
        elif claim.stage == "load":
            with tempfile.TemporaryDirectory() as folder:
                engine.save_checkpoint(folder)
                engine.load_checkpoint(folder)
        elif claim.stage == "compile":
            engine.compile(backend="inductor")
        if claim.verb != "gives":
            return None
        from deepspeed.module_inject.autotp_config import AutoTPPresets

        names = {"engine": engine, "infinite": infinite, "largest_buffer": largest_buffer, "presets": AutoTPPresets}
        return eval(claim.text, {**names, "deepspeed": deepspeed, "Path": Path})

    def _model(self, case: Case, config: dict[str, Any]) -> Any:
        """A toy: a pipeline, a language model where heads or experts are split, else two layers."""
        linear = self.torch.nn.Linear
        if case.setting.pipeline:
            layers = [self.deepspeed.pipe.LayerSpec(linear, 8, 8) for _ in range(2)]
            dual = case.setting.schedule == "dualpipev"
            kind = self.deepspeed.pipe.DualPipeVModule if dual else self.deepspeed.pipe.PipelineModule
            return kind(layers, num_stages=1, loss_fn=self.torch.nn.MSELoss())
        if case.setting.ranks in (None, 1) or not {"tensor_parallel", "expert_parallel"} & set(config):
            return self.torch.nn.Sequential(linear(8, 8), linear(8, 8))
        import transformers

        sizes = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
        if "expert_parallel" in config:
            settings = transformers.MixtralConfig(**sizes, **heads, num_local_experts=4)
            return transformers.MixtralForCausalLM(settings)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))

    @staticmethod
    def _adam(case: Case, config: dict[str, Any]) -> None:
        kind = str(get(config, "optimizer.type")).lower()
        zenflow = "zenflow" in config.get("zero_optimization", {}) and case.name != "zenflow-stage-0"
        about = zenflow or case.name in OWN_ADAM
        if kind in ("adam", "adamw", "muon") and not about:
            config["optimizer"].setdefault("params", {}).setdefault("torch_adam", True)


def train(engine: Any, factor: float = 1.0) -> None:
    """One optimizer step."""
    import torch

    size, kind = engine.train_micro_batch_size_per_gpu(), next(engine.module.parameters()).dtype
    if hasattr(engine, "train_batch"):
        batch = torch.randn(size, 8, dtype=kind)
        engine.train_batch(iter([(batch, batch)] * engine.gradient_accumulation_steps()))
        return
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(torch.randn(size, 8, dtype=kind)).float().pow(2).mean() * factor
        engine.backward(loss)
        engine.step()


def infinite(engine: Any) -> int:
    """How many steps the engine skips of one whose gradients are infinite."""
    before = engine.skipped_steps
    train(engine, float("inf"))
    return engine.skipped_steps - before


def largest_buffer(engine: Any) -> int:
    """Elements of the largest buffer that one more step makes."""
    import torch

    made = []

    def empty(*args: Any, _empty: Any = torch.empty, **kwargs: Any) -> Any:
        made.append(_empty(*args, **kwargs))
        return made[-1]

    with patch("torch.empty", empty):
        train(engine)
    return max(one.numel() for one in made)


def world(case: Case) -> tuple[int, int]:
    """Rank and number of ranks of the process that shows a case."""
    built = Claim.of(case).stage not in ("", "config", "file", "checkpointing")
    return (int(case.words.get("rank", 0)), case.setting.ranks or 1) if built else (0, 1)


def answer(out: Path, rank: int, ranks: int) -> None:
    """All cases of one world."""
    say = Say(rank, ranks)
    said = {case.name: say.case(case) for case in cases() if world(case) == (rank, ranks)}
    out.write_text(json.dumps(said), encoding="utf-8")


def main(out: str) -> None:
    """All cases; each world has a process of its own, forked from this one, which has imported the libraries."""
    for name in ("deepspeed", "torch._dynamo", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    start, said = multiprocessing.get_context("fork").Process, dict[str, Any]()
    parts = [(Path(f"{out}.{rank}-of-{ranks}"), rank, ranks) for rank, ranks in sorted(set(map(world, cases())))]
    processes = [start(target=answer, args=part) for part in parts]
    for process in processes:
        process.start()
    for process, (part, *_) in zip(processes, parts, strict=True):
        process.join()
        if process.exitcode:
            sys.exit(f"{part}: status {process.exitcode}")
        said |= json.loads(part.read_text(encoding="utf-8"))
    Path(out).write_text(json.dumps(said, indent=1), encoding="utf-8")


if __name__ == "__main__":
    os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}  # Muon would compile its Newton-Schulz steps
    main(sys.argv[1])
