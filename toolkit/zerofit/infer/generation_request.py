"""What a language model is to write, held against what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zerofit.data.tokenizer import Tokenizer, load_transformers, open_tokenizer
from zerofit.infer.eval_data import tokenizer_name, too_many_ids
from zerofit.infer.saved_model import SavedModel
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import Problem, Problems, UserError


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What is to be written."""

    prompt: tuple[int, ...]  # token ids
    most: int  # new tokens
    temperature: float  # 0: the likeliest token each time
    top_p: float  # draw among the likeliest tokens that have this probability together
    seed: int
    ends: frozenset[int]  # token ids that end the text


def make_wish(saved: SavedModel, options: Mapping[str, Any]) -> tuple[GenerationRequest, Callable[[list[int]], str]]:
    """The wish of a command line, and what turns token ids into text.

    Raises UserError for a model that writes no text, a tokenizer that is not the model's, and a text too long for it.
    """
    if saved.task != "causal-lm" or saved.source.family != "transformers":
        what = f"a model of the task {saved.task}" if saved.task != "causal-lm" else "a model of your own"
        hint = "take a causal language model of transformers; `zerofit eval` takes this one"
        problem = Problem(kind="cannot-generate", message=f"{what} writes no text", hint=hint, where="CKPT")
        raise UserError(problem)
    problems = Problems()
    flags = {"tokenizer": options["tokenizer"]} if options["tokenizer"] else {}
    tokenizer = problems.attempt(lambda: _open(saved, flags))
    problems.raise_if_any()
    assert tokenizer is not None
    prompt = _ids(saved, tokenizer, options["prompt"])
    length = len(prompt) + options["max_new_tokens"]
    if not prompt:
        problems.add("empty-prompt", "the prompt has no tokens", "give the text's first words", "--prompt")
    if saved.longest is not None and length > saved.longest:
        message = f"the prompt has {len(prompt)} tokens; with {options['max_new_tokens']} new ones"
        message += f" that is more than the {saved.longest} that the model takes"
        room = saved.longest - len(prompt)
        hint = f"--max-new-tokens {room} or less" if room > 0 else "a shorter --prompt"
        problems.add("too-long", message, hint, "--max-new-tokens")
    problems.raise_if_any()
    wish = GenerationRequest(
        prompt=prompt,
        most=options["max_new_tokens"],
        temperature=options["temperature"],
        top_p=options["top_p"],
        seed=options["seed"],
        ends=_ends(saved, tokenizer),
    )
    return wish, tokenizer.decode


def _open(saved: SavedModel, flags: Mapping[str, str]) -> Tokenizer:
    tokenizer = open_tokenizer(tokenizer_name(saved, flags))
    if isinstance(saved.inputs, TextInputs) and tokenizer.vocab_size > saved.inputs.vocab_size:
        raise UserError(too_many_ids(saved.inputs, tokenizer.vocab_size))
    return tokenizer


def _ids(saved: SavedModel, tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The prompt's token ids; a model from elsewhere gets the special tokens that its tokenizer puts in front."""
    if saved.about is None and tokenizer.name != "bytes":
        return tuple(load_transformers(tokenizer.name)(text)["input_ids"])
    return tuple(tokenizer.encode(text))


def _ends(saved: SavedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokenizer's end of a document, and what the model's own generation_config.json names."""
    from transformers import GenerationConfig

    try:
        named = GenerationConfig.from_pretrained(saved.folder, local_files_only=True).eos_token_id
    except (OSError, ValueError):  # it has none
        named = None
    own = named if isinstance(named, list) else [] if named is None else [named]
    return frozenset([tokenizer.eod_id, *own])
