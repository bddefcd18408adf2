"""Simulate a pipeline's stages one by one.

Each stage gets the shapes that the previous stage sent.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import _utils as pipes
from torch.distributed.tensor import Replicate

from zerofit.simulate.engine.stage_input import give_input
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.record import ScriptStage, SentTensors
from zerofit.simulate.script.errors import later_stage, not_simulated


class StageJoints:
    """The shapes and dtypes that this rank's pipeline stage receives and sends."""

    def __init__(self, received: SentTensors | None):
        self._received = received
        self.stage: ScriptStage | None = None  # None without a pipeline
        self._sent: pipes._StageForwardMeta | None = None  # outputs of this rank's first PipelineStage (torch)

    def join(self) -> None:
        """Give each engine and torch stage of this process its input, and record what it sends."""
        if hasattr(PipelineStage, "_warmup_forward_vote"):  # from torch 2.14 on
            self._join_torch()
        original: Callable[..., None] = PipelineEngine.__init__

        @functools.wraps(original)
        def init(engine: PipelineEngine, *args: object, **kwargs: object) -> None:
            original(engine, *args, **kwargs)
            self._join(engine)

        replace_in(PipelineEngine, "__init__", init)

    def _join(self, engine: PipelineEngine) -> None:
        """Give one engine its input, and record what it sends.

        Raises NotSimulated if its input is unknown. Shapes and dtypes are recorded when the engine sends them ahead of
        the first tensors (runtime/pipe/engine.py, `_send_tensor_meta`).
        """
        topology, send = engine.grid._topo, engine._send_tensor_meta
        stages = tuple(topology.get_coord(rank).pipe for rank in range(topology.world_size()))
        self.stage = ScriptStage(stage=engine.stage_id, stage_of_rank=stages, sends=None)

        def noted(buffer: Tensor | Sequence[Tensor], to: int) -> None:
            buffers = [buffer] if isinstance(buffer, Tensor) else buffer
            tensors = tuple((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in buffers)
            assert self.stage
            sends = SentTensors(tensors=tensors, is_tuple=not isinstance(buffer, Tensor))
            self.stage = replace(self.stage, sends=sends)
            send(buffer, to)

        vars(engine)["_send_tensor_meta"] = noted
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

    def _join_torch(self) -> None:
        """Give torch's stages their inputs.

        They exchange the shapes of inputs before the first micro batch. Gradients from the next stage have the shapes
        and dtypes of this stage's outputs. A later stage of the same rank receives the tensors that the earlier stage
        sends. (torch.distributed.pipelining.PipelineStage: _send_meta, _recv_meta, _warmup_forward_vote,
        _warmup_backward_result)
        """

        def own_vote(stage: PipelineStage, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
            if self.stage is None:
                # this rank's first stage; the ranks of a pipeline are assumed to be evenly spaced, e.g. 0, 4, 8
                ranks = dist.get_process_group_ranks(stage.group)
                distance = ranks[1] - ranks[0] if len(ranks) > 1 else 1
                of_rank = tuple(rank // distance % len(ranks) for rank in range(dist.get_world_size()))
                self.stage = ScriptStage(stage=stage.group_rank, stage_of_rank=of_rank, sends=None)
            static = not pipes.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
            vote = torch.tensor([int(static)], dtype=torch.int32, device=stage.device)
            return vote if received_acc is None else vote * received_acc

        def send_meta(stage: PipelineStage, meta: object, dst_stage: int) -> None:
            assert self.stage
            if isinstance(meta, pipes._StageForwardMeta) and self._sent is None:
                self._sent = meta
                if self.stage.stage < max(self.stage.stage_of_rank):  # otherwise to a later stage of an earlier rank
                    self.stage = replace(self.stage, sends=SentTensors(torch_meta=pickle.dumps(meta).hex()))

        def recv_meta(stage: PipelineStage, src_stage: int) -> object:
            if src_stage > stage.stage_index:
                outputs = stage._stage_meta.outputs
                assert outputs is not None
                return pipes._StageBackwardMeta(backward_metas=tuple(map(_gradient, outputs)))
            if self._sent is not None:
                return self._sent
            if self._received is None:
                raise later_stage(stage.stage_index + 1)
            return pickle.loads(bytes.fromhex(self._received.torch_meta))

        replace_in(PipelineStage, "_warmup_forward_vote", own_vote)
        replace_in(PipelineStage, "_warmup_backward_result", lambda _, received_result: received_result)
        replace_in(PipelineStage, "_send_meta", send_meta)
        replace_in(PipelineStage, "_recv_meta", recv_meta)


def _gradient(output: pipes._TensorMeta) -> pipes._TensorMeta | None:
    """Return torch's description of an output's gradient; None without a gradient."""
    if not output.requires_grad:
        return None
    if not isinstance(output, pipes._DTensorMeta):
        return replace(output, requires_grad=False)
    # a replicated DTensor's gradient may also arrive as a partial sum, which has the same size
    placements = tuple(Replicate() if placement.is_partial() else placement for placement in output.placements)
    return replace(output, requires_grad=False, placements=placements)
