"""Text that a causal language model writes, as it comes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

from zerofit.infer.activation_memory import working
from zerofit.infer.failures import failures, guarded
from zerofit.infer.generation_request import GenerationRequest
from zerofit.infer.limits import Device

UNFINISHED = "\ufffd"  # what a decoder gives for the first bytes of a character


@torch.no_grad()
def generate(
    model: nn.Module,
    wish: GenerationRequest,
    decode: Callable[[list[int]], str],
    device: torch.device,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """What follows the prompt: text, tokens (new ones), tokens_per_s. `say` gets each piece of text as it comes.

    The same seed gives the same text. Raises RunFailed out of memory.
    """
    stream = _TextStreamer(decode, wish.ends, say)
    prompt = torch.tensor([wish.prompt], device=device)
    torch.manual_seed(wish.seed)
    start = time.perf_counter()
    with failures("a smaller --max-new-tokens"), guarded(model):
        model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=_config(wish),
            streamer=stream,
        )
    seconds = time.perf_counter() - start
    count = len(stream.tokens)
    return {"text": stream.text, "tokens": count, "tokens_per_s": count / max(seconds, 1e-9)}


def _config(wish: GenerationRequest) -> GenerationConfig:
    draw: dict[str, Any] = {"do_sample": False}
    if wish.temperature > 0:
        draw = {"do_sample": True, "temperature": wish.temperature, "top_p": wish.top_p, "top_k": 0}
    ends = sorted(wish.ends)
    pad = ends[0]  # one text a time: nothing is padded, but transformers asks for it
    return GenerationConfig(max_new_tokens=wish.most, eos_token_id=ends, pad_token_id=pad, use_cache=True, **draw)


def working_bytes(model: nn.Module, wish: GenerationRequest, device: Device) -> int:
    """Bytes beside the weights of this empty model: the forward of the prompt, and the KV cache of all tokens.

    While a token is added, the cache of one layer is there twice.
    """
    on = torch.device("cpu" if device == "cpu" else "cuda")
    first = working(model, on, lambda fake, on: _cached(fake, len(wish.prompt), on))
    whole = working(model, on, lambda fake, on: _cached(fake, len(wish.prompt) + wish.most, on))
    layers = max(1, getattr(model.config.get_text_config(), "num_hidden_layers", 1))
    return first.peak - first.kept + whole.kept + whole.kept // layers


def _cached(fake: nn.Module, length: int, device: torch.device) -> Iterable[Tensor]:
    """The tensors of the cache after a forward of so many tokens."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(fake).forward).parameters else {}
    ids = torch.zeros(1, length, dtype=torch.long, device=device)
    cache = fake(input_ids=ids, use_cache=True, **last).past_key_values
    layers = getattr(cache, "layers", ())
    return [t for layer in layers for t in vars(layer).values() if isinstance(t, Tensor)]


class _TextStreamer(BaseStreamer):
    """Takes tokens as transformers draws them and says their text, whole characters only."""

    def __init__(self, decode: Callable[[list[int]], str], ends: frozenset[int], say: Callable[[str], None]):
        self._decode, self._ends, self._say = decode, ends, say
        self._prompt_seen = False
        self._from = 0  # tokens before it have been said for good
        self._said = ""  # what has been said of those from there on
        self.tokens: list[int] = []
        self.text = ""

    def put(self, value: Tensor) -> None:
        """The prompt first, then one token at a time."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.tokens += value.reshape(-1).tolist()
        self._speak(final=False)

    def end(self) -> None:
        """Say what was held back."""
        self._speak(final=True)

    def _speak(self, final: bool) -> None:
        written = [token for token in self.tokens[self._from :] if token not in self._ends]
        text = self._decode(written)
        if text.endswith(UNFINISHED) and not final:
            return
        new = text[len(self._said) :]
        self._said = text
        self.text += new
        if new:
            self._say(new)
        if text.endswith("\n"):  # the last token stays, since decoders look at the one before for spaces
            self._from, self._said = len(self.tokens) - 1, self._decode(self.tokens[-1:])
