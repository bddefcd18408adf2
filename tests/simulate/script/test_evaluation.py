"""Evaluations of a Trainer and of a loop of the script's own; weights from the network; training in evaluation mode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
# the Trainer evaluates each of these data sets, also by name
SEVERAL = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(640)]
arguments = TrainingArguments("out", report_to="none", eval_strategy="STRATEGY", eval_steps=1, max_steps=9)

def seen(predictions):
    assert len(predictions[0]) <= 4 * 8, len(predictions[0])
    return {}

parts = {"short": rows[:80], "long": rows}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=parts, compute_metrics=seen)
assert "eval_short_loss" in trainer.evaluate() and "eval_loss" in trainer.evaluate("short")
trainer.train()
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
# outputs of transformers' models are objects, not tensors
OWN_LOOP = """\
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return BaseModelOutput(last_hidden_state=self.layers(x))

net, kept = Net().cuda(), []
optimizer = torch.optim.AdamW(net.parameters())
with torch.no_grad():
    for i in range(BATCHES):
        out = net(torch.randn(128, 64, device="cuda")).last_hidden_state
        if i < KEPT:
            kept.append(out)
for _ in range(50):
    net(torch.randn(8, 64, device="cuda")).last_hidden_state.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OUTPUT_BYTES = 128 * 64 * 4
FROM_URL = """\
import torch
from torchvision.models import ResNet18_Weights, resnet18

model = resnet18(weights=ResNet18_Weights.IMAGENET1K_V1)
model.load_state_dict({k: v for k, v in torch.hub.load_state_dict_from_url("http://none/x.pth")["model"].items()})
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    model(torch.randn(2, 3, 64, 64, device="cuda")).mean().backward()
    optimizer.step()
"""


def traced(file: Path) -> list[dict]:
    return [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]


def own_loop(batches: int, kept: int = 0) -> str:
    return OWN_LOOP.replace("BATCHES", str(batches)).replace("KEPT", str(kept))


def test_a_loop_of_equal_batches_is_cut_and_the_answer_names_it(folder):
    few, many, keeping = (simulated(own_loop(*asked), gpus=1) for asked in ((3,), (500,), (500, 100)))
    assert few.phases == many.phases
    assert keeping.phases[0].peak_bytes - many.phases[0].peak_bytes == 100 * OUTPUT_BYTES
    left_out = {note.text: note.count for note in facts(many).facts.notes}
    assert left_out == {"calls of Net that repeat the allocations of earlier ones: left out, at train.py:17": 497}


def test_calls_within_the_last_step_are_left_out_but_count_for_its_time(folder):
    """As samples that a script draws between two steps: 2 of 500 calls run, but all count."""
    loop = "    with torch.no_grad():\n        for _ in range({}):\n            net(torch.randn(128, 64).cuda())\n"
    calls = (3, 500, 997)
    few, many, more = (simulated(own_loop(0) + loop.format(n), gpus=1, trace=folder / f"{n}.json") for n in calls)
    assert few.phases == many.phases == more.phases
    assert many.flops - few.flops == more.flops - many.flops == 497 * 2 * 128 * 64 * 256 * 2
    ends = [max(event["ts"] + event.get("dur", 0) for event in traced(folder / f"{n}.json")) for n in calls]
    assert ends[1] - ends[0] == pytest.approx(ends[2] - ends[1], rel=0.01)
    assert sum(note.count for note in facts(many).facts.notes) == 498


def test_weights_that_were_not_downloaded_are_named(folder, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(folder))
    notes = [note.text for note in facts(simulated(FROM_URL, gpus=1)).facts.notes]
    assert [note.partition(": not downloaded")[0] for note in notes] == [
        "https://download.pytorch.org/models/resnet18-f37072fd.pth",
        "http://none/x.pth",
    ]


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


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_few_batches_of_each_data_set_are_evaluated(folder, strategy):
    result = simulated(SEVERAL.replace("STRATEGY", strategy), gpus=1)
    assert any(phase.name == "evaluation" for phase in result.phases)
    assert any(note.text.startswith("evaluation: 4 of 80 batches") for note in facts(result).facts.notes)
