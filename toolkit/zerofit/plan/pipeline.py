"""Divide layers into pipeline stages, and compute the engine's buffers.

Line numbers refer to DeepSpeed 0.19.8, runtime/pipe/engine.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from zerofit.plan.backward import upper
from zerofit.plan.dualpipev import EXCHANGE, order
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.timeline import NOTHING, Point, StageTimeline, add
from zerofit.spec.mesh import AXES, parts_of_stage, pipeline_parts
from zerofit.spec.model_facts import LayerFacts
from zerofit.spec.profile import Profile
from zerofit.spec.run_folder import Layout
from zerofit.spec.stages import Bounds, PipelineStage, cut_layers, stage_layers

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@lru_cache(maxsize=64)
def layer_stack(profile: Profile) -> tuple[LayerFacts, ...]:
    """Return the layers that a pipeline divides. Repeated ones are named `block 0`, ..."""
    first, counts, stack = profile.layers[0], Counter[str](), []
    shared = {layer.tied_to for layer in profile.layers}
    for layer in profile.layers:
        trained = sum(layer.matrices) + sum(layer.vectors)
        size = (
            trained + sum(layer.frozen + layer.quantized) + (max(first.matrices + first.frozen) if layer.tied_to else 0)
        )
        tied = layer.tied_to or (layer.name if layer.name in shared else None)
        for _ in range(layer.count):
            name = f"{layer.name} {counts[layer.name]}" if layer.count > 1 else layer.name
            counts[layer.name] += 1
            stack.append(LayerFacts(name=name, parameters=size, trained=trained, tied=tied))
    return tuple(stack)


def stage_bounds(profile: Profile, stages: int) -> Bounds:
    """Return the first layer and the end (exclusive) of each stage.

    As in training, stages have about equally many parameters. Raises ValueError if there are more stages than
    layers.
    """
    stack = layer_stack(profile)
    if stages > len(stack):
        raise ValueError(f"{profile.model} has {len(stack)} layers, too few for {stages} pipeline stages")
    return cut_layers([layer.parameters for layer in stack], [layer.trained for layer in stack], stages)


def planned_stages(profile: Profile, layout: PlannedLayout) -> tuple[PipelineStage, ...]:
    """Return the layers of each stage; () without a pipeline."""
    if layout.pp == 1:
        return ()
    bounds = stage_bounds(profile, pipeline_parts(layout.pp, layout.schedule))
    degrees = Layout(**{axis: getattr(layout, axis) for axis in AXES})
    return stage_layers(layer_stack(profile), bounds, degrees, layout.schedule)


def stage_parts(profile: Profile, layout: PlannedLayout) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for each stage the layers of each part, as (first layer, end)."""
    bounds = stage_bounds(profile, pipeline_parts(layout.pp, layout.schedule))
    every = (parts_of_stage(stage, layout.pp, layout.schedule) for stage in range(layout.pp))
    return tuple(tuple(bounds[part] for part in parts) for parts in every)


class Pass(NamedTuple):
    """One kind of forward or backward, with the memory that is alive when it begins."""

    line: StageTimeline
    direction: Direction
    others: Point = NOTHING  # live bytes of other micro batches
    graded: int = 0  # elements with gradients, if these wait for the last micro batch (stages 0 and 1)


def in_flight(lines: Sequence[StageTimeline], layout: PlannedLayout, stage: int) -> tuple[list[Pass], Point]:
    """Return a stage's passes, and its bytes kept between steps.

    `lines`: the timeline of each part. With 1F1B, stage s of p has at most p - s micro batches in flight. The
    step's first micro batches have no gradients yet. Once there are gradients, one micro batch less is in flight.
    """
    if layout.schedule == "dualpipev":
        return _dualpipev_passes(lines, layout, stage)
    (line,), (most,) = lines, most_in_flight(layout, stage)
    # Buffers for received activations and gradients (:1123, :1180). The last stage has two. It keeps logits, inputs and
    # gradients of inputs until a buffer is reused (:751).
    logits, inputs = (2.0, 4.0) if line.logits[1] else (0.0, 0.0)
    idle = add(add(add(line.received, line.sent), line.logits, logits), line.received, inputs)
    times = [(most, line.parameters)] if layout.accumulation > most else [(most, 0), (most - 1, line.parameters)]
    passes = []
    for micro_batches, graded in times:
        # each micro batch keeps its received input (:1128) and a copy of it (:705), except in the last stage, whose
        # inputs are in its two buffers
        copies = 0 if line.logits[1] else 2 * micro_batches
        others = add(add(idle, line.saved, micro_batches - 1), line.received, copies)
        passes += [Pass(line, direction, others, graded) for direction in DIRECTIONS if micro_batches]
    return passes, idle


def most_in_flight(layout: PlannedLayout, stage: int) -> tuple[int, ...]:
    """Return the most micro batches in flight between forward and backward, for each part.

    With DualPipeV both parts together have 2p + 1 micro batches in flight.
    """
    if layout.schedule == "dualpipev":
        return 2 * layout.pp - stage, stage + 1
    return (min(layout.pp - stage, layout.accumulation),)


def _dualpipev_passes(lines: Sequence[StageTimeline], layout: PlannedLayout, stage: int) -> tuple[list[Pass], Point]:
    """Return the passes in DualPipeV's order, and the bytes kept between steps."""
    walk = _Walk(lines)
    # 2 * stages micro batches fill the pipeline. With one more, all kinds of passes occur.
    for word in order(layout.pp, stage, min(layout.accumulation, 2 * layout.pp + 1)):
        walk.follow(word)
    kinds = defaultdict[tuple, list[Pass]](list)
    for kind in walk.passes:
        kinds[kind.line.received, kind.line.sent, kind.direction, kind.graded].append(kind)
    most = (upper(same, lambda kind: (kind.others[1], kind.others[0])) for same in kinds.values())
    return [kind for same in most for kind in same], walk.held


class _Walk:
    """Follows a stage through DualPipeV's order, and records its passes and live bytes."""

    def __init__(self, lines: Sequence[StageTimeline]):
        self.passes: list[Pass] = []
        self.held, self._graded, self._lines = NOTHING, 0, lines
        self._gradient = NOTHING  # received for the last backward (engine.py, grad_layer)

    def follow(self, word: str) -> None:
        if word == EXCHANGE:
            return
        line = self._lines[int(word.strip("<>FB"))]
        if word[0] == "<":
            self._hold(line.received if word[1] == "F" else line.sent)
        elif word[0] == "F" and len(word) == 2:
            self._hold(line.received)  # the forward makes a copy (engine.py:705)
            self.passes.append(Pass(line, "forward", self.held, self._graded))
            self._hold(add(line.saved, line.logits))
        elif word[0] == "B" and len(word) == 2:
            if line.sent != NOTHING:
                self._hold(self._gradient, -1)
                self._gradient = line.sent
            self._hold(line.saved, -1)
            self.passes.append(Pass(line, "backward", self.held, self._graded))
            self._hold(line.logits, -1)
            self._graded = max(self._graded, line.graded)
        elif word[0] == "B":  # after sending, the input and its gradient are freed
            self._hold(line.received, -2)

    def _hold(self, size: Point, times: int = 1) -> None:
        self.held = add(self.held, size, times)
