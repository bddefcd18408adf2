"""A tokenizer made here, chat templates in the manner of five families of models, and conversations."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
)
# what each family writes around a turn; the assistant's part, as it would have to write it, is marked
TEMPLATES = {
    "chatml": """{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}
    {%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "headers": """{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{- m.content | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}{{- m.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
    "turns": """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- '<start_of_turn>model\n' }}
        {%- generation %}{{- m.content | trim + '<end_of_turn>' }}{% endgeneration %}{{- '\n' }}
    {%- else %}{{- '<start_of_turn>user\n' + m.content | trim + '<end_of_turn>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}""",
    "inst": """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{% generation %}{{- ' ' + m.content | trim + eos_token }}{% endgeneration %}
    {%- elif m.role == 'system' %}{{- '[INST] ' + m.content + ' [/INST]' }}
    {%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}
{%- endfor %}""",
    "tags": """{%- for m in messages %}
    {{- '<|' + m.role + '|>\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|end|>' }}{% endgeneration %}{{- '\n' }}
    {%- else %}{{- m.content + '<|end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}""",
}


def unmarked(template: str) -> str:
    """The same template as it comes with most models."""
    return template.replace("{% generation %}", "").replace("{%- generation %}", "").replace("{% endgeneration %}", "")


def write_tokenizer(folder: Path, template: str | None = None) -> Path:
    """A byte-level BPE of 400 ids with the special tokens of all templates."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(WORDS)] * 5, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", extra_special_tokens=list(SPECIAL[2:])
    )
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


TALK = "the quick brown fox jumps over a lazy dog while seven grey whales sing of rain 😀 naïve"
WORDS = TALK.split()


def conversation(seed: int, turns: int | None = None) -> list[dict[str, Any]]:
    """Some turns of some words; the first may be a system's."""
    draw = random.Random(seed)
    messages = [{"role": "system", "content": "Be brief."}] if draw.random() < 0.3 else []
    for _ in range(turns or draw.randint(1, 3)):
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))})
    return messages


def write_chats(path: Path, count: int = 60) -> Path:
    """Conversations, one a line."""
    path.write_text("".join(json.dumps({"messages": conversation(n)}) + "\n" for n in range(count)))
    return path
