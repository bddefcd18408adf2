"""Simulate the stages of a script's pipeline one by one: each receives what the stage before was seen to send."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from zerofit.simulate.engine.stage_input import give_input
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.record import ScriptStage, SentTensors
from zerofit.simulate.script.errors import later_stage, not_simulated


class StageJoints:
    """The tensors that the stage of this process's rank receives and sends."""

    def __init__(self, received: SentTensors | None):
        self._received = received
        self.stage: ScriptStage | None = None  # None without a pipeline

    def join(self) -> None:
        """Give engines their inputs and record what they send, for the rest of this process."""
        made = PipelineEngine.__init__

        @functools.wraps(made)
        def init(engine: Any, *args: Any, **kwargs: Any) -> None:
            made(engine, *args, **kwargs)
            self._join(engine)

        replace_in(PipelineEngine, "__init__", init)

    def _join(self, engine: Any) -> None:
        """Connect one engine. Raises NotSimulated if the stage's input is unknown.

        Shapes and dtypes are recorded when the engine sends them ahead of the first tensors (runtime/pipe/engine.py,
        `_send_tensor_meta`).
        """
        topology, send = engine.grid._topo, engine._send_tensor_meta
        stages = tuple(topology.get_coord(rank).pipe for rank in range(topology.world_size()))
        self.stage = ScriptStage(stage=engine.stage_id, stage_of_rank=stages, sends=None)

        def noted(buffer: Any, to: int) -> None:
            several = isinstance(buffer, (tuple, list))
            tensors = ((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in (buffer if several else [buffer]))
            assert self.stage
            self.stage = replace(self.stage, sends=SentTensors(tensors=tuple(tensors), is_tuple=several))
            send(buffer, to)

        engine._send_tensor_meta = noted
        if not engine.stage_id:
            return
        if self._received is None:
            raise later_stage(engine.stage_id + 1)
        if engine.is_pipe_partitioned:
            hint = "simulate a rank of the first stage (--rank 0), or set pipeline.pipe_partitioned to false"
            raise not_simulated("a pipeline stage whose input is partitioned by values on the device", hint)
        sizes = [(shape, getattr(torch, dtype)) for shape, dtype in self._received.tensors]
        sent = sizes, self._received.is_tuple
        give_input(engine, lambda stage: sent)
