"""Streaming generation and chats with a causal language model or an encoder-decoder."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from zerofit.data.chat_template import CHAT_TEMPLATE, ChatTemplate, open_chat_template
from zerofit.data.labelled import text_decoder
from zerofit.data.tokenizer import Tokenizer, load_transformers, open_tokenizer
from zerofit.infer.evaluate import default_tokenizer, too_many_ids
from zerofit.infer.guards import failures, guarded
from zerofit.infer.limits import Device
from zerofit.infer.memory import activation_memory
from zerofit.infer.saved_model import SavedModel
from zerofit.models.hf_config import make_config
from zerofit.models.inputs import NamedInputs, TextInputs
from zerofit.models.scores import takes_cache
from zerofit.spec.errors import Problem, Problems, UserError

CHAT_TOKENS = 4096  # tokens of a conversation for which memory is reserved
UNFINISHED = "\ufffd"  # decoded text of an incomplete character


Message = dict[str, str]  # a message with "role" and "content", as in chat templates


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """Text that a language model wrote."""

    text: str
    tokens: int  # new ones
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as token ids of its model's tokenizer."""

    ids: tuple[int, ...]
    end_ids: frozenset[int]  # ids that end the text
    decode: Callable[[list[int]], str]
    end_text: str = ""  # text that also ends the answer, for models without an end token
    begins_with: int | None = None  # first token of an encoder-decoder's answer; its encoder reads the prompt


class DrawingOptions(TypedDict):
    """Fields of GenerationRequest other than the prompt."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request for text from a language model."""

    prompt: Prompt
    max_new_tokens: int
    temperature: float  # 0: always use the most likely token
    top_p: float  # sample from the most likely tokens whose probabilities add up to this
    seed: int


def check_prompt(saved: SavedModel, tokenizer_name: str | None, prompt: str, max_new_tokens: int) -> Prompt:
    """Turn a prompt into token ids.

    Raises UserError if the model cannot write text, the tokenizer does not belong to the model, or the prompt is too
    long.
    """
    tokenizer = writers_tokenizer(saved, tokenizer_name)
    has_encoder = saved.task == "seq2seq-lm"
    if (saved.info is None or has_encoder) and tokenizer.name != "bytes":
        # Models of others, and all encoders, were trained with their tokenizer's special tokens.
        ids = tuple(load_transformers(tokenizer.name)(prompt)["input_ids"])
    elif has_encoder:
        # zerofit's training ends each of the encoder's texts with this id.
        ids = (*tokenizer.encode(prompt), tokenizer.eod_id)
    else:
        ids = tuple(tokenizer.encode(prompt))
    problems = Problems()
    if not ids:
        problems.add("empty-prompt", "the prompt has no tokens", "give the text's first words", "--prompt")
    if has_encoder and saved.longest is not None and max(len(ids), max_new_tokens) > saved.longest:
        message = f"the prompt has {len(ids)} tokens and --max-new-tokens is {max_new_tokens}"
        message += f"; the model supports at most {saved.longest} of each"
        problems.add("too-long", message, "a shorter --prompt, or fewer --max-new-tokens", "--max-new-tokens")
    elif saved.longest is not None and len(ids) + max_new_tokens > saved.longest and not has_encoder:
        message = f"the prompt has {len(ids)} tokens; with {max_new_tokens} new ones"
        message += f" that is more than the model's {saved.longest}"
        free_tokens = saved.longest - len(ids)
        hint = f"--max-new-tokens {free_tokens} or less" if free_tokens > 0 else "a shorter --prompt"
        problems.add("too-long", message, hint, "--max-new-tokens")
    problems.raise_if_any()
    ends = end_ids(saved, tokenizer)
    if not has_encoder:
        return Prompt(ids=ids, end_ids=ends, decode=tokenizer.decode)
    config = make_config(saved.source, None, {})
    begins_with = config.pad_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
    return Prompt(ids=ids, end_ids=ends, decode=text_decoder(tokenizer), begins_with=begins_with)


def writers_tokenizer(saved: SavedModel, name: str | None) -> Tokenizer:
    """Return the tokenizer of a model that writes text.

    Raises UserError for other models, and for a tokenizer with more ids than the model.
    """
    writes = saved.task in ("causal-lm", "seq2seq-lm")
    if not writes or saved.source.family != "transformers":
        what = "a model of your own" if writes else f"a model of the task {saved.task}"
        hint = "name a causal language model or an encoder-decoder of transformers; `zerofit eval` supports this one"
        problem = Problem(kind="cannot-generate", message=f"{what} cannot write text", hint=hint, where="CKPT")
        raise UserError(problem)
    tokenizer = open_tokenizer(name or default_tokenizer(saved))
    if isinstance(saved.inputs, TextInputs | NamedInputs) and tokenizer.vocab_size > saved.inputs.vocab_size:
        raise UserError(too_many_ids(saved.inputs, tokenizer.vocab_size))
    return tokenizer


def end_ids(saved: SavedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a text, by the tokenizer and the model's generation_config.json."""
    try:
        named = GenerationConfig.from_pretrained(saved.folder, local_files_only=True).eos_token_id
    except (OSError, ValueError):  # there is no such file
        named = None
    # The file of a chat model often lists several ids: the end of the text and the end of a turn.
    ends = named if isinstance(named, list) else [] if named is None else [named]
    return frozenset([tokenizer.eod_id, *ends])


@torch.no_grad()
def generate(
    model: nn.Module, request: GenerationRequest, device: torch.device, on_text: Callable[[str], None]
) -> GeneratedText:
    """Generate what follows the prompt. `on_text` gets each piece of text when it is complete.

    The same seed gives the same text. Raises RunFailed if memory runs out.
    """
    options: dict[str, object] = {"do_sample": False}
    if request.temperature > 0:
        # Without top_k=0, transformers would draw from the 50 most likely tokens only.
        options = {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p, "top_k": 0}
    ends = sorted(request.prompt.end_ids)
    options |= {"eos_token_id": ends, "pad_token_id": ends[0]}  # transformers requires it, but nothing is padded
    if request.prompt.begins_with is not None:
        options["decoder_start_token_id"] = request.prompt.begins_with
    cached = takes_cache(cast(PreTrainedModel, model).config)
    config = GenerationConfig(max_new_tokens=request.max_new_tokens, use_cache=cached, **options)
    stream = _TextStreamer(request.prompt, on_text)
    prompt = torch.tensor([request.prompt.ids], device=device)
    torch.manual_seed(request.seed)
    start = time.perf_counter()
    with failures("a smaller --max-new-tokens"), guarded(model):
        cast(Any, model).generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config,
            streamer=stream,
            stopping_criteria=StoppingCriteriaList([stream.has_ended]),
        )
    seconds = time.perf_counter() - start
    count = len(stream.tokens)
    return GeneratedText(text=stream.text, tokens=count, tokens_per_s=count / max(seconds, 1e-9))


# The prompt's forward, whose cache is counted with that of all tokens. While a token is added, torch.cat copies the
# cache of one layer, which then exists twice:
#
#     bytes = (peak of the forward - prompt's cache) + cache of all tokens * (1 + 1 / layers)
def working_bytes(model: nn.Module, request: GenerationRequest, device: Device) -> int:
    """Return the bytes that generation needs besides the weights."""
    # The first forward has the largest activations, since it reads the whole prompt. Each later one copies the cache,
    # layer by layer, to make room for a token. So one layer's cache exists twice.
    on = torch.device("cpu" if device == "cpu" else "cuda")
    length, new = len(request.prompt.ids), request.max_new_tokens
    if request.prompt.begins_with is not None:
        first = activation_memory(model, on, lambda fake, on: _cached(fake, length, on, 1))
        all_tokens = activation_memory(model, on, lambda fake, on: _cached(fake, length, on, new))
    else:
        first = activation_memory(model, on, lambda fake, on: _cached(fake, length, on))
        all_tokens = activation_memory(model, on, lambda fake, on: _cached(fake, length + new, on))
    layers = max(1, getattr(cast(PreTrainedModel, model).config.get_text_config(), "num_hidden_layers", 1))
    return first.peak - first.returned + all_tokens.returned + all_tokens.returned // layers


def _cached(fake: nn.Module, length: int, device: torch.device, written: int = 0) -> Iterable[Tensor]:
    """Return the cache's tensors after a forward of `length` tokens.

    `written`: the decoder's tokens; 0 for a model without an encoder.
    """
    arguments = {"input_ids": torch.zeros(1, length, dtype=torch.long, device=device)}
    if written:
        arguments["decoder_input_ids"] = torch.zeros(1, written, dtype=torch.long, device=device)
    # Like generate(), which computes the logits of the last token only, if the model supports it.
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(fake).forward).parameters else {}
    output = fake(use_cache=True, **arguments, **last)
    cache = output.cache if hasattr(output, "cache") else output.past_key_values  # before transformers 5.24
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for part in (parts if written else [cache]) for layer in getattr(part, "layers", ())]
    return [t for layer in layers for t in vars(layer).values() if isinstance(t, Tensor)]


class _TextStreamer(BaseStreamer):
    """Sends complete characters while transformers generates tokens, up to the end text."""

    def __init__(self, prompt: Prompt, on_text: Callable[[str], None]):
        self._decode, self._end_ids, self._on_text = prompt.decode, prompt.end_ids, on_text
        self._end_text, self._ended = prompt.end_text, False
        self._prompt_seen = False
        self._line_start = 0  # index of the first token that is decoded again; the text before it has been sent
        self._sent = ""  # text that was already sent for tokens from this index on
        self.tokens: list[int] = []
        self.text = ""

    def has_ended(self, ids: Tensor, scores: object, **_: object) -> Tensor:
        """Return bool (batch,): whether the end text has been written."""
        return torch.full((len(ids),), self._ended, device=ids.device)

    def put(self, value: Tensor) -> None:
        """Receive the prompt first, then one token at a time."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.tokens += value.reshape(-1).tolist()
        self._send_text(final=False)

    def end(self) -> None:
        self._send_text(final=True)

    # One character can take several tokens, and a token's text can depend on the token before it (sentencepiece's
    # spaces). So all tokens since the last line break are decoded again, and only what is new is sent.
    def _send_text(self, final: bool) -> None:
        """Send the text of the new tokens; if it is not final, only what later tokens cannot change."""
        written = [token for token in self.tokens[self._line_start :] if token not in self._end_ids]
        text = self._decode(written)
        if text.endswith(UNFINISHED) and not final:
            return
        if self._end_text:
            text = self._before_end(text, final)
        new = text[len(self._sent) :]
        self._sent = text
        self.text += new
        if new:
            self._on_text(new)
        if text.endswith("\n") and not self._end_text:
            # keep the last token, since decoding the next one needs it to place spaces
            self._line_start, self._sent = len(self.tokens) - 1, self._decode(self.tokens[-1:])

    def _before_end(self, text: str, final: bool) -> str:
        """Cut a text at the end text; if it is not final, also at a beginning of the end text."""
        text, end, _ = text.partition(self._end_text)
        self._ended = bool(end)
        if self._ended or final:
            return text
        beginnings = (n for n in range(len(self._end_text) - 1, 0, -1) if text.endswith(self._end_text[:n]))
        return text[: len(text) - next(beginnings, 0)]


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A model's chat template, and the options of its answers."""

    template: ChatTemplate
    longest: int | None  # maximum number of tokens of a conversation; None without a limit
    empty: GenerationRequest  # the settings of all answers; its prompt has no tokens

    def request(self, messages: list[Message]) -> GenerationRequest:
        """Return the request for the next answer, limited to the tokens that remain.

        Raises UserError if the conversation has already reached the model's limit.
        """
        ids = self.template.tokenizer.encode(self.template.prompt(messages))
        if self.longest is not None and len(ids) >= self.longest:
            message = f"the conversation has {len(ids)} tokens, the model supports {self.longest}"
            raise UserError(Problem(kind="too-long", message=message, hint="start a new conversation", where="--chat"))
        # Each answer draws other numbers, and the same conversation with the same seed repeats them.
        return self._sized(ids, self.empty.seed + len(messages))

    def largest_request(self) -> GenerationRequest:
        """Return the largest possible request, for which memory is reserved."""
        tokens = CHAT_TOKENS if self.longest is None else min(CHAT_TOKENS, self.longest)
        return self._sized([0] * max(1, tokens - self.empty.max_new_tokens), self.empty.seed)

    def _sized(self, ids: list[int], seed: int) -> GenerationRequest:
        """Return a request with this prompt, for at most as many new tokens as the model supports."""
        new = self.empty.max_new_tokens
        # Near the model's limit the answer is cut, instead of refusing the whole turn.
        free_tokens = new if self.longest is None else min(new, self.longest - len(ids))
        prompt = replace(self.empty.prompt, ids=tuple(ids))
        return replace(self.empty, prompt=prompt, max_new_tokens=free_tokens, seed=seed)


def open_chat(
    saved: SavedModel, tokenizer_name: str | None, chat_template: Path | None, **drawing: Unpack[DrawingOptions]
) -> Chat:
    """Open a chat template, by default the model's. Raises UserError if there is none."""
    tokenizer = writers_tokenizer(saved, tokenizer_name)
    if saved.task != "causal-lm":
        message = f"a model for the task {saved.task} cannot chat"
        raise UserError(Problem(kind="cannot-generate", message=message, hint="--prompt TEXT", where="--chat"))
    own_template = saved.folder / CHAT_TEMPLATE
    template = open_chat_template(chat_template or (own_template if own_template.is_file() else None), tokenizer)
    # An answer ends with the template's special token for it, else with the text that the template writes after it.
    turn_end = tokenizer.encode(template.turn_end)
    token = next((id for id in turn_end if id in tokenizer.added_ids and tokenizer.decode([id]).strip()), None)
    ends = end_ids(saved, tokenizer)
    prompt = Prompt(
        ids=(),
        end_ids=ends if token is None else ends | {token},
        decode=tokenizer.decode,
        end_text=template.turn_end.strip() if token is None else "",
    )
    return Chat(template=template, longest=saved.longest, empty=GenerationRequest(prompt=prompt, **drawing))


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """A conversation that has ended."""

    turns: tuple[Message, ...]
    tokens: int  # number of tokens that the model wrote
    tokens_per_s: float


def converse(
    model: nn.Module,
    chat: Chat,
    turns: Iterable[str],
    system: str | None,
    device: torch.device,
    on_text: Callable[[str], None],
) -> Transcript:
    """Answer each of the user's turns. The next turn is read when the answer is complete.

    Raises the errors of `generate`.
    """
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    tokens, seconds = 0, 0.0
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answer = generate(model, chat.request(messages), device, on_text)
        messages.append({"role": "assistant", "content": answer.text.strip()})
        tokens += answer.tokens
        seconds += answer.tokens / answer.tokens_per_s if answer.tokens else 0.0
    return Transcript(turns=tuple(messages), tokens=tokens, tokens_per_s=tokens / max(seconds, 1e-9))
