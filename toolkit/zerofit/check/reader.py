"""The program that reads a DeepSpeed JSON: it decides what "auto" means and how strict the JSON has to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerofit.check.dotted import autos

READERS = ("deepspeed", "trainer", "accelerate", "lightning", "zerofit")
SPOKEN = {
    "deepspeed": "DeepSpeed itself",
    "trainer": "Hugging Face's Trainer",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "zerofit": "zerofit",
    "neox": "GPT-NeoX",
}
# they call json.load: transformers 5.23 integrations/deepspeed.py, accelerate 1.15 utils/deepspeed.py:104, Lightning's
# strategies/deepspeed.py
HUGGING_FACE = ("trainer", "accelerate")
STRICT_READERS = ("trainer", "accelerate", "lightning")
# arguments of GPT-NeoX itself that stand beside DeepSpeed's in its files; - and _ are one
NEOX = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings", "train_iters")
NEOX_OWN = ("pipe_parallel_size", "model_parallel_size", "pos_emb", "no_weight_tying", "data_path", "train_data_paths")
# of parallelism: no other program fills an "auto" there, and nobody writes one by mistake
DEGREES = ("sequence_parallel_size", "tensor_parallel.autotp_size")


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Who reads a file, and how that is known."""

    name: str
    why: str = ""  # what the guess goes by; "" where the user has said it

    def sentence(self) -> str:
        """Return the line that the command begins with."""
        guess = f", since {self.why}; --for NAME names another" if self.why else ""
        return f"read as a file for {SPOKEN[self.name]}{guess}"


def guess(config: Any) -> Reader:
    """Return who most likely reads a configuration."""
    if not isinstance(config, Mapping):
        return Reader(name="deepspeed", why="nothing in it says otherwise")
    keys = {str(key).replace("-", "_") for key in config}
    if sum(key in keys for key in NEOX) >= 2 or sum(key in keys for key in NEOX_OWN) >= 2:
        return Reader(name="neox", why="it has arguments of GPT-NeoX")
    first = next(autos(config), None)
    degree = next((path for path in autos(config) if path in DEGREES), None)
    if degree is not None:
        return Reader(name="zerofit", why=f'it has "auto" for {degree}, which only zerofit fills')
    if first is not None:
        return Reader(name="trainer", why=f'it has "auto" ({first})')
    return Reader(name="deepspeed", why='it has no "auto"')
