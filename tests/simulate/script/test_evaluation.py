"""A Trainer's evaluation that generates, within the simulated steps and after them; training in evaluation mode."""

from __future__ import annotations

from tests.simulate.script.scripts import facts, simulated

TRAINER = """\
from datasets import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

config = T5Config(d_model=32, d_ff=64, num_layers=1, num_heads=4, d_kv=8, vocab_size=64, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config)
rows = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 640, "labels": [[5, 6, 2]] * 640})
arguments = Seq2SeqTrainingArguments(
    "out", report_to="none", predict_with_generate=True, generation_max_length=12, eval_strategy="steps", eval_steps=1
)
seen = lambda predictions: {"rows": len(predictions[0])}
Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=seen).train()
"""
IN_EVALUATION_MODE = """\
import torch

model = torch.nn.Linear(64, 64).cuda().eval()  # as from_pretrained returns it
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(50):
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_evaluation_that_generates_runs_few_batches(folder):
    result = simulated(TRAINER, gpus=1)
    assert [(p.name, p.step) for p in result.phases if p.name == "evaluation"] == [
        ("evaluation", 1),
        ("evaluation", -1),
    ]
    notes = {note.text: note.count for note in facts(result).facts.notes}
    # 2 batches after the first step, and 2 and 4 after the last
    assert notes["generation: each sequence gets 11 new tokens, the limit; 3 of these tokens were computed"] == 8


def test_training_in_evaluation_mode_has_its_phases(folder):
    result = simulated(IN_EVALUATION_MODE, gpus=1)
    assert [p.name for p in result.phases] == ["build", *2 * ["forward", "backward", "step"]]
