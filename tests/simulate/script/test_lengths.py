"""Batches as long as a script allows, and what comes after the steps."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.meter.script_cases import save_tokenizer
from tests.simulate.script.scripts import CONFIG, facts, simulated
from zerofit.simulate.script.lengths import Lengths, _longer
from zerofit.spec.units import shown_bytes

LONG = 40
SCRIPT = """\
import sys
import deepspeed, torch
from torch import nn
from torch.utils.data import DataLoader

def rows(lengths):
    return [{"input_ids": [1] * n, "labels": [1] * n} for n in lengths]

def collate(batch):
    longest = max(len(row["input_ids"]) for row in batch)
    return {k: torch.tensor([row[k] + [0] * (longest - len(row[k])) for row in batch]) for k in batch[0]}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(64, 64), nn.Linear(64, 64)

    def forward(self, input_ids, labels):
        return nn.functional.cross_entropy(self.out(self.words(input_ids)).flatten(0, 1), labels.flatten())

model = Model()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
for batch in DataLoader(rows(DATA), batch_size=4, collate_fn=collate):
    engine.backward(engine(**{k: t.to(engine.device) for k, t in batch.items()}))
    engine.step()
"""
SHORT_FIRST = SCRIPT.replace("DATA", f"[5 + i % 3 for i in range(40)] + [{LONG}]")
ALL_LONG = SCRIPT.replace("DATA", f"[{LONG}] * 40")
CUT = """\
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("tokens")
def rows(lengths):
    cut = [tokenizer("a" * n, truncation=True, max_length=24)["input_ids"] for n in lengths]
    return [{"input_ids": row, "labels": row} for row in cut]
"""


def test_the_longest_batch_is_that_of_a_script_with_only_such(folder):
    result = simulated(SHORT_FIRST, longest=True)
    seen, longest = facts(result).facts, facts(result).longest
    assert (seen.longest_seen, seen.longest_allowed, seen.allowed_by) == (7, LONG, "the longest row of the data set")
    assert longest and longest.tokens == LONG and longest.peak_bytes > result.peak_bytes
    alone = simulated(ALL_LONG)
    assert facts(alone).facts.longest_seen == LONG and facts(alone).longest is None
    # both make a batch of int64 indices to lengthen another one on the host, none on the device
    assert longest.peak_bytes == alone.peak_bytes and longest.peak_phase == alone.peak_phase


def test_a_tokenizer_says_where_it_cuts(folder):
    save_tokenizer(folder / "tokens")
    start, end = SHORT_FIRST.index("def rows"), SHORT_FIRST.index("def collate")
    seen = facts(simulated(SHORT_FIRST[:start] + CUT + SHORT_FIRST[end:])).facts
    assert (seen.longest_allowed, seen.allowed_by) == (24, "max_length of the tokenizer")


def test_what_is_lengthened():
    batch = {
        "input_ids": torch.arange(10).view(2, 5),
        "mask": torch.ones(2, 1, 5, 5),
        "labels": torch.ones(2, 3),
        "images": torch.ones(2, 3, 4, 4),
        "more": (torch.ones(2, 5), "text"),
    }
    made = _longer(batch, 5, (torch.arange(8) % 5)[None], 6)
    assert made["input_ids"].tolist()[0] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert made["mask"].shape == (2, 1, 8, 8) and made["labels"].shape == (2, 6)
    assert made["images"].shape == (2, 3, 4, 4) and made["more"][0].shape == (2, 8)


def test_the_tokens_of_an_image_are_not_repeated():
    """A model compares their number with the image's features. Here 0 is padding, 9 an image's token."""
    seen = Lengths()
    seen.trainer, seen.special = 8, {0, 9}
    rows = torch.tensor([[1, 9, 9, 2], [9, 9, 3, 0]])
    batch = {"input_ids": rows, "attention_mask": (rows > 0).long(), "square": rows[:, :, None] * rows[:, None]}
    made = seen.longer(batch)
    ids = torch.tensor([[1, 9, 9, 2, 1, 2, 1, 2], [9, 9, 3, 0, 3, 3, 3, 3]])
    assert torch.equal(made["input_ids"], ids) and torch.equal(made["attention_mask"], (ids > 0).long())
    assert torch.equal(made["square"], ids[:, :, None] * ids[:, None])
    only = seen.longer({"input_ids": torch.full((1, 4), 9)})  # no text
    assert only["input_ids"].tolist() == [[9] * 8]


TRAINER = """\
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

rows = [{"input_ids": [1] * 8, "labels": 1} for _ in range(400)]
config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=LABELS)
args = TrainingArguments("out", deepspeed="ds.json", eval_strategy="steps", eval_steps=100, report_to="none",
                         per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True)
Trainer(BertForSequenceClassification(config), args, train_dataset=rows, eval_dataset=rows,
        compute_metrics=lambda found: {}).train()
"""


def test_a_trainer_evaluates_its_first_batches(folder):
    """Per batch of 8 samples a rank keeps logits of both ranks, float32, until all are seen."""
    config = {**CONFIG, "optimizer": {"type": "AdamW"}}
    (folder / "ds.json").write_text(json.dumps(config))
    labels = 100_000
    result = simulated(TRAINER.replace("LABELS", str(labels)))
    assert result.phases[-1].name == "evaluation"
    (note,) = [n.text for n in facts(result).facts.notes if n.text.startswith("evaluation")]
    assert note.startswith("evaluation: 4 of 25 batches were simulated; the evaluation keeps ")
    assert shown_bytes(labels * 16 * 4) in note and shown_bytes(25 * labels * 16 * 4)[:2] in note


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_are_gathered_for_saving(folder, rank):
    """Rank 0 has all 16-bit weights in host memory, and the device one layer's."""
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}
    (folder / "ds.json").write_text(json.dumps({**CONFIG, "zero_optimization": zero}))
    result = simulated(ALL_LONG, rank=rank)
    assert [p.name for p in result.phases[-2:]] == ["step", "saving"]
    weights = 2 * (64 * 64 + 64 * 64 + 64)
    gained = result.host_phases["saving"] - result.host_phases["step"]
    assert gained == pytest.approx(weights if rank == 0 else 0, rel=0.05, abs=2048)
    last = result.phases[-1]
    assert 2 * 64 * 64 <= last.peak_bytes - last.start_bytes <= 2 * (2 * 64 * 64 + 64)


IMAGES = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

images = [(torch.zeros(3, HEIGHT, WIDTH), 1) for n in range(40)]
images[30] = images[7] = torch.zeros(3, 96, 48), 1

def collate(batch):  # pads, as detectors and speech recognition do
    height, width = (max(x.shape[d] for x, _ in batch) for d in (1, 2))
    padded = [nn.functional.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x, _ in batch]
    return torch.stack(padded), torch.tensor([label for _, label in batch])

model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, labels in DataLoader(images, batch_size=2, collate_fn=collate):
    nn.functional.cross_entropy(model(x.cuda()), labels.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_largest_images_of_the_data_set(folder):
    result = simulated(IMAGES.replace("HEIGHT", "32").replace("WIDTH", "16 + n % 4"), gpus=1, longest=True)
    longest = facts(result).longest
    assert facts(result).facts.shapes == ((2, 3, 32, 17), (2, 3, 32, 19))
    assert longest and longest.name == "largest 2 x 3 x 96 x 48" and longest.peak_bytes > result.peak_bytes
    alone = simulated(IMAGES.replace("HEIGHT", "96").replace("WIDTH", "48"), gpus=1)
    assert longest.peak_bytes == alone.peak_bytes
