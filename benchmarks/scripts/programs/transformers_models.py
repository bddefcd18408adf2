"""Models of transformers by name: modernbert, whisper, vlm or smolvlm with its Trainer, or trl-vlm with TRL's SFT."""

import sys
import warnings

import torch
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

warnings.filterwarnings("ignore")
KIND = sys.argv[1]
SETTINGS = {"output_dir": "out", "bf16": True, "per_device_train_batch_size": 2, "report_to": [], "max_steps": 5}


def modernbert():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = ModernBertForMaskedLM(ModernBertConfig(**sizes, vocab_size=512, pad_token_id=0))
    rows = [{"input_ids": torch.randint(3, 500, (n,)), "labels": torch.randint(3, 500, (n,))} for n in range(20, 80)]

    def padded(batch):
        ids = [row["input_ids"] for row in batch]
        mask = [torch.ones_like(row) for row in ids]
        pad = torch.nn.utils.rnn.pad_sequence
        labels = pad([row["labels"] for row in batch], True, -100)
        return {"input_ids": pad(ids, True), "attention_mask": pad(mask, True), "labels": labels}

    return Trainer(model, TrainingArguments(**SETTINGS), train_dataset=rows, data_collator=padded)


def whisper():
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    more = {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 80}
    tokens = {"vocab_size": 600, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    none = {"suppress_tokens": [], "begin_suppress_tokens": []}
    config = WhisperConfig(**sizes, **more, **tokens, **none, max_target_positions=64)
    model = WhisperForConditionalGeneration(config)
    rows = [{"input_features": torch.randn(80, 3000), "labels": torch.randint(4, 500, (20,))} for _ in range(40)]
    settings = {**SETTINGS, "predict_with_generate": True, "eval_strategy": "steps", "generation_max_length": 40}
    arguments = Seq2SeqTrainingArguments(**settings)
    return Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])


def llava(image_token, vocabulary):
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=56, patch_size=14),
        text_config=LlamaConfig(**text, vocab_size=vocabulary),
        image_token_index=image_token,
    )
    return LlavaForConditionalGeneration(config)


def vlm():
    ids = torch.cat([torch.full((16,), 500), torch.arange(40)])
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    rows = [{**row, "pixel_values": torch.randn(3, 56, 56)} for _ in range(40)]
    return Trainer(llava(500, 512), TrainingArguments(**SETTINGS), train_dataset=rows)


def smolvlm():
    """Rows of two images. The model drops the second image of every other row, whose pixels are all zero."""
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Idefics3Config(
        text_config=LlamaConfig(**text, vocab_size=512, pad_token_id=0),
        vision_config={**vision, "image_size": 56, "patch_size": 14},
        scale_factor=2,
        image_token_id=500,
    )
    rows = []
    for n in range(40):
        images = 1 + n % 2
        ids = torch.cat([torch.full((4 * images,), 500), torch.arange(3, 48 - 4 * images)])
        pixels = torch.zeros(2, 3, 56, 56)
        pixels[:images] = torch.randn(images, 3, 56, 56)
        rows += [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "pixel_values": pixels}]
    return Trainer(Idefics3ForConditionalGeneration(config), TrainingArguments(**SETTINGS), train_dataset=rows)


CHAT = """{% for m in messages %}{% for c in m['content'] %}{{ '<image>' if c['type'] == 'image' else c['text'] }}
{% endfor %} {% endfor %}"""


def trl_vlm():
    import trl
    from datasets import Dataset
    from PIL import Image

    tokenizer = AutoTokenizer.from_pretrained("llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    patches = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaProcessor(images, tokenizer, **patches, chat_template=CHAT)
    asked = [{"type": "image"}, {"type": "text", "text": "one two"}]
    messages = [{"role": "user", "content": asked}]
    messages += [{"role": "assistant", "content": [{"type": "text", "text": "three four"}]}]
    rows = Dataset.from_list([{"images": [Image.new("RGB", (80, 60))], "messages": messages} for _ in range(32)])
    model = llava(tokenizer.convert_tokens_to_ids("<image>"), 600)
    arguments = trl.SFTConfig(**SETTINGS, max_length=None)
    return trl.SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=processor)


{"modernbert": modernbert, "whisper": whisper, "vlm": vlm, "smolvlm": smolvlm, "trl-vlm": trl_vlm}[KIND]().train()
