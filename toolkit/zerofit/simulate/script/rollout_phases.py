"""Begin and end vLLM's phases in a step, and choose the token that fills completions."""

from __future__ import annotations

from transformers.configuration_utils import PreTrainedConfig

from zerofit.simulate.engine.phases import PhaseLog
from zerofit.simulate.script.evaluation import EVALUATION

SYNC = "weight sync"


def begin(log: PhaseLog, name: str) -> None:
    """Begin a phase, except in an evaluation."""
    if log.name != EVALUATION:
        log.step = max(log.step, 0)
        log.begin(name)


def end(log: PhaseLog) -> None:
    """End vLLM's phase and begin phase "forward", except in an evaluation."""
    if log.name != EVALUATION:
        log.begin("forward")


def plain_token(config: PreTrainedConfig) -> int:
    """Return a token that is not an end-of-sequence token."""
    text = config.get_text_config()
    ends = [text.eos_token_id] if not isinstance(text.eos_token_id, list) else text.eos_token_id
    return next(token for token in range(text.vocab_size // 2, text.vocab_size) if token not in ends)
