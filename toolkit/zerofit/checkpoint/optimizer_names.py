"""Find parameter names for indices in torch's optimizer states, in the order of groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
# Programs use one group for all parameters, or matrices and vectors, or (the Trainer) parameters with weight decay, and
# biases and norms. DeepSpeed puts a mixture's experts into a separate group.
RULES = (
    lambda name, shape: True,
    lambda name, shape: len(shape) > 1,
    lambda name, shape: "bias" not in name and "norm" not in name.lower(),
    lambda name, shape: ".deepspeed_experts." not in name,
)

PACKED = ("__bnb_optimizer_quant_state__", "state1")  # bitsandbytes' states: codes of 8 bits and a scale per block


def weight_states(states: dict[str, object], numel: int) -> list[str]:
    """Return the kinds of a parameter's states that have a number for each of its elements."""
    if any(key in states for key in PACKED):
        return []
    numbers = {kind: value for kind, value in states.items() if isinstance(value, Tensor) and value.dim()}
    return [kind for kind, value in numbers.items() if value.is_floating_point() and value.numel() >= numel]


def state_names(
    base: dict[str, Any], shapes: Shapes, masters: Sequence[Sequence[Tensor]] | None = None
) -> list[list[tuple[int, str]]] | None:
    """Return the index and the name of each parameter, by group.

    Returns None if no known order matches the shapes. `masters` are the weights of each group, if the file has them.
    """
    # torch numbers parameters in the order of the groups, and its file has no names. For each usual way of grouping,
    # this function lists the names and compares numbers and shapes with the file. The first way that fits is the
    # answer. Parameters of equal shape cannot be told apart by this test.
    groups = [list(group["params"]) for group in base["param_groups"]]
    named = [group.get("param_names") for group in base["param_groups"]]  # newer releases of torch
    if all(
        names and len(names) == len(group) and (not shapes or shapes.keys() >= {*names})
        for names, group in zip(named, groups, strict=True)
    ):
        return [list(zip(group, names, strict=True)) for group, names in zip(groups, named, strict=True)]
    # shapes from the files, in the order of groups; None if a parameter has no states
    known: list[list[tuple[int, ...] | None]] = []
    for group in groups:
        known.append([])
        for number in group:
            state = base["state"].get(number) or {}
            kinds = weight_states(state, 0)
            known[-1].append(tuple(state[kinds[0]].shape) if kinds else None)
    if masters:
        known = [[tuple(master.shape) for master in group] for group in masters]
    candidates = (names for names in _orders(shapes) if _fits(names, groups, known, shapes))
    if names := next(candidates, None):
        return [list(zip(group, own, strict=True)) for group, own in zip(groups, names, strict=True)]
    return None


def flat_names(flats: Sequence[Tensor], shapes: Shapes) -> list[list[tuple[int, str]]] | None:
    """Return `state_names` for groups that are one flat tensor each, as in DeepSpeed's FP16_Optimizer."""
    lengths = [flat.numel() for flat in flats]
    for groups in _orders(shapes):
        if [sum(math.prod(shapes[name]) for name in names) for names in groups] == lengths:
            return [[(number, name) for name in names] for number, names in enumerate(groups)]
    return None


def _orders(shapes: Shapes) -> Iterator[list[list[str]]]:
    """Yield the usual ways to split parameters into groups."""
    # adapters' states may be those of all parameters, or of adapters alone
    for trained in (shapes, {name: shape for name, shape in shapes.items() if "lora_" in name}):
        for rule in RULES:
            ordered = [[n for n, s in trained.items() if rule(n, s)], [n for n, s in trained.items() if not rule(n, s)]]
            split = [names for names in ordered if names]
            yield split
            yield split[::-1]


def _fits(
    names: list[list[str]], groups: list[list[int]], known: list[list[tuple[int, ...] | None]], shapes: Shapes
) -> bool:
    if [len(group) for group in names] != [len(group) for group in groups]:
        return False
    pairs = (pair for own, seen in zip(names, known, strict=True) for pair in zip(own, seen, strict=True))
    return all(shape is None or shape == shapes[name] for name, shape in pairs)
