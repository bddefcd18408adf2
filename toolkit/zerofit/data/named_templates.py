"""Chat templates by name: the usual formats ship with zerofit."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from zerofit.spec.errors import Problem, UserError, nearest

_FOLDER = Path(__file__).with_name("templates")
# The tokens by which each format marks turns. A format without any writes plain text and ends a turn with eos_token.
NAMED_TEMPLATES: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "llama2": (),
    "zephyr": (),
    "vicuna": (),
    "alpaca": (),
}


def template_file(given: Path) -> Path:
    """Return the file of a template that is given by name or by path. Raises UserError for an unknown name.

    A file in the current folder takes precedence over a shipped template with its name.
    """
    name = str(given)
    if given.expanduser().is_file() or len(given.parts) > 1 or given.suffix in (".jinja", ".jinja2", ".j2", ".txt"):
        return given
    if name in NAMED_TEMPLATES:
        return _FOLDER / f"{name}.jinja"
    message = f"--chat-template {name} is neither a file nor the name of a template"
    hint = nearest(name.lower(), NAMED_TEMPLATES)
    raise UserError(Problem(kind="chat-template", message=message, hint=hint, where="--chat-template"))


def likely_template(vocabulary: Collection[str]) -> str:
    """Return the name of the template that suits a tokenizer with these tokens: the one with most tokens of its own."""
    suited = {name: len(tokens) for name, tokens in NAMED_TEMPLATES.items() if not missing_tokens(name, vocabulary)}
    best = max(suited, key=suited.__getitem__)
    return best if suited[best] else "zephyr"


def missing_tokens(name: str, vocabulary: Collection[str]) -> list[str]:
    """Return the tokens of a named template that a vocabulary does not have."""
    return [token for token in NAMED_TEMPLATES.get(name, ()) if token not in vocabulary]
