"""A Seq2SeqTrainer that evaluates by generating."""

from datasets import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

model = T5ForConditionalGeneration(T5Config(d_model=64, d_ff=64, num_layers=2, num_heads=4, d_kv=16, vocab_size=512))
model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id = 0
rows = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 640, "labels": [[5, 6, 2]] * 640})
generates = {"predict_with_generate": True, "generation_max_length": 64}
arguments = Seq2SeqTrainingArguments("out", report_to="none", eval_strategy="steps", eval_steps=100, **generates)
metrics = {"compute_metrics": lambda predictions: {"rows": len(predictions[0])}}
Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, **metrics).train()
