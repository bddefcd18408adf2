"""A conversation with a causal language model: each turn is rendered with its history, and answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import torch
from torch import nn

from zerofit.data.chat_template import CHAT_TEMPLATE, ChatTemplate, open_chat_template
from zerofit.infer.generate import DrawingOptions, GenerationRequest, Prompt, end_ids, generate, writers_tokenizer
from zerofit.infer.saved_model import SavedModel
from zerofit.spec.errors import Problem, UserError

TOKENS = 4096  # of a conversation, for which memory is reserved

Message = dict[str, str]  # "role" and "content", as chat templates have it


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A model's chat template, and how it answers."""

    template: ChatTemplate
    longest: int | None  # tokens of a conversation; None without a limit
    empty: GenerationRequest  # the settings of all answers; its prompt has no tokens

    def request(self, messages: list[Message]) -> GenerationRequest:
        """Return the request for the next answer, limited to the tokens that the model still has room for.

        Raises UserError if it has room for none.
        """
        ids = self.template.tokenizer.encode(self.template.prompt(messages))
        if self.longest is not None and len(ids) >= self.longest:
            message = f"the conversation has {len(ids)} tokens, the model supports {self.longest}"
            raise UserError(Problem(kind="too-long", message=message, hint="start a new conversation", where="--chat"))
        return self._sized(ids, self.empty.seed + len(messages))

    def largest_request(self) -> GenerationRequest:
        """Return the largest request, for which memory is reserved."""
        tokens = TOKENS if self.longest is None else min(TOKENS, self.longest)
        return self._sized([0] * max(1, tokens - self.empty.max_new_tokens), self.empty.seed)

    def _sized(self, ids: list[int], seed: int) -> GenerationRequest:
        new = self.empty.max_new_tokens
        room = new if self.longest is None else min(new, self.longest - len(ids))
        prompt = replace(self.empty.prompt, ids=tuple(ids))
        return replace(self.empty, prompt=prompt, max_new_tokens=room, seed=seed)


def open_chat(
    saved: SavedModel, tokenizer_name: str | None, given: Path | None, **drawing: Unpack[DrawingOptions]
) -> Chat:
    """Open the chat template of a model, or the `given` one. Raises UserError if there is none."""
    tokenizer = writers_tokenizer(saved, tokenizer_name)
    if saved.task != "causal-lm":
        message = f"a model for the task {saved.task} cannot chat"
        raise UserError(Problem(kind="cannot-generate", message=message, hint="--prompt TEXT", where="--chat"))
    own = saved.folder / CHAT_TEMPLATE
    template = open_chat_template(given or (own if own.is_file() else None), tokenizer)
    after = tokenizer.encode(template.turn_end)
    token = next((id for id in after if id in tokenizer.added_ids and tokenizer.decode([id]).strip()), None)
    ends = end_ids(saved, tokenizer)
    prompt = Prompt(
        ids=(),
        end_ids=ends if token is None else ends | {token},
        decode=tokenizer.decode,
        end_text=template.turn_end.strip() if token is None else "",
    )
    return Chat(template=template, longest=saved.longest, empty=GenerationRequest(prompt=prompt, **drawing))


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A conversation that has ended."""

    turns: tuple[Message, ...]
    tokens: int  # that the model wrote
    tokens_per_s: float


def talk(
    model: nn.Module,
    chat: Chat,
    turns: Iterable[str],
    system: str | None,
    device: torch.device,
    on_text: Callable[[str], None],
) -> Talk:
    """Answer each of the user's turns; the next one is read when the answer is complete. Raises as `generate` does."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    tokens, seconds = 0, 0.0
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answer = generate(model, chat.request(messages), device, on_text)
        messages.append({"role": "assistant", "content": answer.text.strip()})
        tokens += answer.tokens
        seconds += answer.tokens / answer.tokens_per_s if answer.tokens else 0.0
    return Talk(turns=tuple(messages), tokens=tokens, tokens_per_s=tokens / max(seconds, 1e-9))
