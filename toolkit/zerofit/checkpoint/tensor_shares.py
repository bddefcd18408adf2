"""Join weights of tensor parallel ranks, by rules in the files or by Megatron's rules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from zerofit.checkpoint.deepspeed_files import Parts
from zerofit.checkpoint.foreign import Foreign
from zerofit.checkpoint.index import Shard, TensorSlice
from zerofit.spec.errors import Problem, UserError

# Names of Megatron-DeepSpeed (megatron/model: language_model.py, transformer.py, bert_model.py, gpt_model.py) and
# GPT-NeoX, for their checkpoints without rules. A pipeline numbers its layers; its last norm is NUMBER.weight.
MEGATRON = {
    "parameter_with_row_parallelism_patterns": [r".*attention\.dense\.weight", r".*\.dense_4h_to_h\.weight"],
    "tp_replicated_parameter_patterns": [
        r".*norm.*\.(weight|bias)",
        r"\d+\.(weight|bias)",
        r".*(position|tokentype)_embeddings\.weight",
        r".*(attention\.dense|\.dense_4h_to_h)\.bias",
        r".*(pooler\.dense|lm_head\.dense|binary_head)\.(weight|bias)",
        r".*\.gate\.wg\.weight",
    ],
    "columns": [
        r".*\.(query_key_value|query|key_value|dense_h_to_4h)\.(weight|bias)",
        r".*(word_embeddings|output_layer|final_linear|lm_head)\.weight",
        r".*lm_head\.bias",
    ],
}
MARK = re.compile(r".*\.(query_key_value|dense_h_to_4h)\.weight")
WIDE, NARROW = "dense_h_to_4h.weight", "dense_4h_to_h.weight"


def whole_shards(found: Foreign, parts: Parts, rules: dict[str, Any] | None) -> list[Shard]:
    """Return shards as parts of full tensors. Raises UserError "no-whole-view" without rules."""
    if parts.tensor_ranks == 1:
        return [shard for ranks in parts.shards.values() for shard in ranks[0]]
    # Megatron's files have no rules, but its names are always the same. Every parameter must match one of its patterns.
    unknown = []
    if not rules and any(MARK.fullmatch(name) for name in parts.shards):
        unknown = [name for name in parts.shards if not any(_Rules.matches(each, name) for each in MEGATRON.values())]
        rules = MEGATRON | {"parameter_with_2_sub_params_cat_dim_0": _gated(parts)}
    if not rules or unknown:
        what = unknown[0] if unknown else "them"
        message = (
            f"{found.files} is split over {parts.tensor_ranks} tensor parallel ranks, without rules to join {what}"
        )
        hint = "gather it with the program that wrote it, e.g. save_16bit_model; DeepSpeed saves these rules since 0.19"
        raise UserError(Problem(kind="no-whole-view", message=message, hint=hint, where=str(found.files)))
    shares = _Rules(rules)
    return [shard for name, ranks in parts.shards.items() for shard in _joined(found, shares, name, ranks)]


# These stack two matrices, so they have twice the rows.
def _gated(parts: Parts) -> list[str]:
    """Return patterns for Megatron's gated layers."""
    gated = []
    for name, ranks in parts.shards.items():
        other = parts.shards.get(name.replace(WIDE, NARROW))
        if name.endswith(WIDE) and other and ranks[0][0].shape[0] == 2 * other[0][0].shape[-1]:
            gated.append(re.escape(name.removesuffix("weight")) + "(weight|bias)")
    return gated


@dataclass(frozen=True)
class _Rules:
    """DeepSpeed's `universal_checkpoint_info` (deepspeed/checkpoint/constants.py)."""

    saved: dict[str, Any]

    def has(self, key: str, name: str) -> bool:
        return self.matches(self.saved.get(key) or (), name)

    @staticmethod
    def matches(patterns: Iterable[str], name: str) -> bool:
        try:
            return any(re.match(pattern, name) for pattern in patterns)
        except re.error as error:
            raise ValueError(f"a pattern of tensor parallel shares: {error}") from None

    def widths(self, name: str, lengths: list[int]) -> list[list[int]] | None:
        """Return each rank's rows in each of a weight's stacked matrices; None for one matrix."""
        for pattern, widths in (self.saved.get("sub_param_shard_widths") or {}).items():
            if self.matches([pattern], name):
                return [list(each) for each in widths]
        if self.has("parameter_with_2_sub_params_cat_dim_0", name):
            return [[length // 2 for length in lengths]] * 2
        for entry in self.saved.get("parameter_with_sub_params") or ():
            if self.matches(entry["patterns"], name):
                sizes = entry["shape"][entry["partition_dim"]]
                if not isinstance(sizes, list | tuple):
                    raise ValueError(f"the matrices in {name} have no sizes")
                return [[size // len(lengths)] * len(lengths) for size in sizes]
        return None

    def dim(self, name: str) -> int:
        for entry in self.saved.get("parameter_with_sub_params") or ():
            if self.matches(entry["patterns"], name):
                return int(entry["partition_dim"])
        return int(self.has("parameter_with_row_parallelism_patterns", name))


def _joined(found: Foreign, rules: _Rules, name: str, ranks: dict[int, list[Shard]]) -> list[Shard]:
    """Return the shards of a parameter as parts of the full tensor.

    If all ranks have the full parameter, return only the first rank's shards.
    """
    for pattern, reason in (rules.saved.get("autotp_unsupported_parameter_patterns") or {}).items():
        if rules.matches([pattern], name):
            message = f"{found.files}: the shares of {name} cannot be joined: {reason}"
            raise UserError(Problem(kind="no-whole-view", message=message, where=str(found.files)))
    same = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
    if len(ranks) == 1 or any(rules.has(key, name) for key in same):
        return ranks[min(ranks)]
    shapes = [shards[0].shape for _, shards in sorted(ranks.items())]
    dim = rules.dim(name) if len(shapes[0]) > 1 else 0
    lengths = [shape[dim] for shape in shapes]
    widths = rules.widths(name, lengths) or [lengths]
    full = (*shapes[0][:dim], sum(map(sum, widths)), *shapes[0][dim + 1 :])
    # A fused weight stacks several matrices (query, key and value), and each rank has a range of each of them. In the
    # full tensor, a matrix begins after all ranks' rows of the matrices before it.
    starts = [0, *accumulate(sum(each) for each in widths)]
    shards = []
    for number, (_, own) in enumerate(sorted(ranks.items())):
        ranges = [(start + sum(each[:number]), each[number]) for start, each in zip(starts, widths, strict=False)]
        cut = TensorSlice(dim, tuple(span for span in ranges if span[1]))
        if math.prod(cut.shape(full)) != math.prod(own[0].shape):
            raise ValueError(f"the share of {name} on tensor parallel rank {number} has the shape {own[0].shape}")
        shards += [replace(shard, shape=full, cut=cut) for shard in own]
    return shards
