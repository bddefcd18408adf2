"""How vLLM divides its KV cache into blocks, and how many sequences fit into it.

The rules are those of vLLM 0.27 (v1/kv_cache_interface.py, v1/core/kv_cache_utils.py), or of the older V0 engine.
If a model has several kinds of layers, vLLM divides them into groups of equally many layers. A block spans one group:

    Gemma 3 4B, 34 layers      group 0         5 layers with full attention
                               groups 1 to 6   29 layers with a sliding window: 5 in each group, the last one is padded
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

BLOCK = 16  # tokens of a block; the size of a block next to states is a multiple of it
NEARLY_EQUAL = 1.5  # if the numbers of layers of two kinds have a smaller ratio, the smaller group is padded


@dataclass(frozen=True, kw_only=True)
class CacheLayers:
    """A model's layers whose caches have the same shape. Bytes are for one layer on one rank."""

    count: int
    token_bytes: int = 0  # keys and values of one token; 0 for a state
    state_bytes: int = 0  # a sequence's state, of any length
    window: int | None = None  # tokens that a layer attends to; None: all


class Need(NamedTuple):
    """The limits on the number of tokens that one request occupies in the cache."""

    length: int  # max_model_len
    batched: int  # max_num_batched_tokens


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """How vLLM divides its cache: groups of layers with a table of blocks each share the memory."""

    group_layers: int  # layers that a block spans
    page_bytes: int  # of a block in one layer
    groups: tuple[tuple[CacheLayers, int, int], ...]  # for each kind: layers, groups, tokens of a block

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, summed over the layers that it spans."""
        return self.group_layers * self.page_bytes

    @property
    def block_tokens(self) -> int:
        """Tokens per block, in the group where they are fewest."""
        return min(tokens for _, _, tokens in self.groups)

    def blocks(self, available_bytes: float) -> int:
        """Return the number of blocks that fit into `available_bytes`."""
        return max(0, int(available_bytes // self.block_bytes))

    def blocks_of_request(self, need: Need) -> int:
        """Return how many blocks one request of `need.length` tokens occupies."""
        return sum(count * _blocks(layers, tokens, need) for layers, count, tokens in self.groups)

    def sequences(self, blocks: int, need: Need) -> float:
        """Return how many requests of `need.length` tokens fit: vLLM's "maximum concurrency"."""
        return blocks / self.blocks_of_request(need)

    def tokens(self, blocks: int, need: Need) -> int:
        """Return the cache's size in tokens, as vLLM prints it."""
        if len(self.groups) == 1 and self.groups[0][1] == 1 and self.groups[0][0].window is None:
            return blocks * self.block_tokens
        return int(self.sequences(blocks, need) * need.length)


def plan_cache(kinds: Sequence[CacheLayers], block: int = BLOCK, hybrid: bool = True) -> CachePlan:
    """Return how vLLM divides the cache of a model.

    `kinds`: the model's layers, grouped by the shape of their cache. `block`: tokens per block. `hybrid`: whether
    sliding windows and states have their own groups (V1). Otherwise a window counts as full attention.
    """
    if not hybrid and len(kinds) > 1:
        kinds = [CacheLayers(count=sum(k.count for k in kinds), token_bytes=max(k.token_bytes for k in kinds))]
    state = max((kind.state_bytes for kind in kinds), default=0)
    token = max((kind.token_bytes for kind in kinds), default=0)
    if not token:  # states alone: a block is one sequence
        return CachePlan(group_layers=sum(k.count for k in kinds), page_bytes=state, groups=((kinds[0], 1, block),))
    if state:  # a page of attention holds a state; smaller states are padded
        block = BLOCK * math.ceil(state / (BLOCK * token))
    page = block * token
    # Groups have as many layers as the rarest kind; if the kinds are nearly equally many, the rarer is padded.
    fewest, most = min(kind.count for kind in kinds), max(kind.count for kind in kinds)
    size = most if most < NEARLY_EQUAL * fewest else fewest
    return CachePlan(
        group_layers=size,
        page_bytes=page,
        groups=tuple((k, math.ceil(k.count / size), page // (k.token_bytes or token)) for k in kinds),
    )


def _blocks(layers: CacheLayers, tokens: int, need: Need) -> int:
    """Return how many blocks of `tokens` tokens a request occupies in one group of these layers."""
    if layers.state_bytes:
        return 1
    if layers.window is None:
        return math.ceil(need.length / tokens)
    # the window of earlier tokens and the new tokens; one more block, because a window may begin within a block
    return math.ceil(min(layers.window - 1 + need.batched, need.length) / tokens) + 1
