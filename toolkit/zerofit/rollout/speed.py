"""Compute the time of a step: generation, log-probs, training and weight sync."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from zerofit.plan.rates import Rates
from zerofit.rollout.vllm import EngineMemory


@dataclass(frozen=True, kw_only=True)
class RolloutTime:
    """Seconds of each phase of a step. All completions have the maximum length. Phases do not overlap."""

    generate_s: float
    logprobs_s: float
    train_s: float
    sync_s: float
    sleep_s: float
    generated_tokens: int

    @property
    def step_s(self) -> float:
        """Seconds of a step: the sum of all phases."""
        return self.generate_s + self.logprobs_s + self.train_s + self.sync_s + self.sleep_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of generation, over all engines."""
        return self.generated_tokens / self.generate_s if self.generate_s else 0.0

    def to_dict(self) -> dict[str, float]:
        """Return the seconds of each phase, for `--json`."""
        return {**asdict(self), "step_s": self.step_s, "tokens_per_s": self.tokens_per_s}


def generation_s(engine: EngineMemory, rates: Rates, sequences: int, prompt: int, completion: int) -> float:
    """Return the seconds that one engine needs to generate for `sequences` prompts.

    Each prompt has `prompt` tokens and gets `completion` tokens.

    For each token, all weights and the caches of all running sequences are read. If many sequences run, the matmuls
    need longer than these reads. The cache's size limits how many sequences run at once. A prompt of `prompt`
    tokens is computed once for each sequence.
    """
    if not sequences:
        return 0.0
    model, s = engine.model, engine.settings
    running = max(1, min(sequences, s.max_num_seqs or sequences, int(engine.sequences)))
    waves = math.ceil(sequences / running)
    token_flops = 2 * model.active_parameters / s.tensor_parallel_size
    block = engine.cache.block_bytes * engine.cache.blocks_of_request(engine.need)
    moved = engine.weights + running * block * (prompt + completion / 2) / (prompt + completion)
    reduces = 2 * sum(count for count, *_ in model.kinds) * rates.call_s if s.tensor_parallel_size > 1 else 0.0
    token_s = max(moved / rates.memory, running * token_flops / rates.flops) + reduces
    return waves * completion * token_s + sequences * prompt * token_flops / rates.flops
