"""A short run_translation.py: transformers.Seq2SeqTrainer with DeepSpeed."""

from dataclasses import dataclass, field

from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)


@dataclass
class Ours:
    tokenizer: str = field(default="")
    max_source_length: int = field(default=96)
    max_target_length: int = field(default=64)


def main():
    ours, args = HfArgumentParser([Ours, Seq2SeqTrainingArguments]).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(ours.tokenizer)
    sizes = {"d_model": 192, "d_ff": 512, "d_kv": 32, "num_layers": 3, "num_heads": 6}
    model = T5ForConditionalGeneration(T5Config(vocab_size=512, decoder_start_token_id=0, **sizes))
    rows = []
    for i in range(200):
        row = tokenizer(f"count {i} " * (3 + i % 11), max_length=ours.max_source_length, truncation=True)
        target = tokenizer(text_target=f"{i} " * (3 + i % 7), max_length=ours.max_target_length, truncation=True)
        rows.append({"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]})
        rows[-1]["labels"] = target["input_ids"]
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
