"""The time of a step: generation, log-probs, training and weight sync."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from zerofit.plan.rates import Rates
from zerofit.rollout.vllm import EngineMemory


@dataclass(frozen=True, kw_only=True)
class RolloutTime:
    """Seconds of each phase of a step, if all completions have the maximum length."""

    generate_s: float
    logprobs_s: float
    train_s: float
    sync_s: float
    sleep_s: float
    generated_tokens: int

    @property
    def step_s(self) -> float:
        """Seconds of a step: the sum of all phases, which do not overlap."""
        return self.generate_s + self.logprobs_s + self.train_s + self.sync_s + self.sleep_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of generation, over all engines."""
        return self.generated_tokens / self.generate_s if self.generate_s else 0.0

    def to_dict(self) -> dict[str, float]:
        """Return the seconds of each phase, for `--json`."""
        return {**asdict(self), "step_s": self.step_s, "tokens_per_s": self.tokens_per_s}


#     seconds = waves * completion * token_s + seconds to compute the prompts, once for each sequence
#     token_s = max(bytes of weights and caches / bandwidth, flops of the running sequences / rate) + reductions
def generation_s(engine: EngineMemory, rates: Rates, sequences: int, prompt: int, completion: int) -> float:
    """Return the seconds that one engine needs to generate for `sequences` prompts.

    Each prompt has `prompt` tokens and gets `completion` tokens.
    """
    if not sequences:
        return 0.0
    model, s = engine.model, engine.settings
    # The cache's size limits how many sequences run at once; the others wait for the next wave.
    running = max(1, min(sequences, s.max_num_seqs or sequences, int(engine.sequences)))
    waves = math.ceil(sequences / running)
    token_flops = 2 * model.active_parameters / s.tensor_parallel_size
    # Each token reads all weights and the caches of all running sequences, which are half full on average. If many
    # sequences run, the matmuls need longer than these reads.
    cache_bytes = engine.cache.block_bytes * engine.cache.blocks_of_request(engine.need)
    read_bytes = engine.weights + running * cache_bytes * (prompt + completion / 2) / (prompt + completion)
    # Tensor parallelism reduces twice in each layer, after attention and after the MLP.
    reductions = 2 * sum(count for count, *_ in model.kinds) * rates.call_s if s.tensor_parallel_size > 1 else 0.0
    token_s = max(read_bytes / rates.memory, running * token_flops / rates.flops) + reductions
    return waves * completion * token_s + sequences * prompt * token_flops / rates.flops
