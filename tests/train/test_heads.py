"""Text classifiers, taggers and encoder-decoders train as transformers' own do in plain PyTorch on one process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from rouge_score.rouge_scorer import RougeScorer
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score, f1_score

from tests.train.reference import Plan, relative_difference, sample_order
from zerofit.app.inference import evaluate, generate
from zerofit.checkpoint.export import export
from zerofit.data.opening import open_data
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run

STEPS, BATCH, LENGTH, TARGET = 4, 8, 64, 24
EXACT = 1e-5  # relative, fp32
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = {**SIZES, "vocab_size": 260, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5: dict[str, Any] = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
T5 |= {"vocab_size": 260, "dropout_rate": 0.0, "decoder_start_token_id": 0}
AUTO = {
    "classify": transformers.AutoModelForSequenceClassification,
    "tag": transformers.AutoModelForTokenClassification,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A pretrained encoder without a head, a pretrained encoder-decoder, and rows of all three kinds."""
    folder, draw = tmp_path_factory.mktemp("base"), random.Random(3)
    torch.manual_seed(1)
    transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).save_pretrained(folder / "bert")
    transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)).save_pretrained(folder / "t5")
    rows: dict[str, list[dict[str, Any]]] = {task: [] for task in AUTO}
    for _ in range(230):
        words = draw.choices(["north", "so", "it", "was", "elsewhere"], k=draw.randint(1, 6))
        mood = draw.choice(["good", "bad", "even"])
        words.insert(draw.randrange(len(words) + 1), mood)
        rows["classify"].append({"text": " ".join(words), "label": mood})
        rows["tag"].append({"tokens": words, "tags": ["MOOD" if word == mood else "O" for word in words]})
        rows["seq2seq"].append({"source": " ".join(words), "target": mood + " " + words[0]})
    for task, held in rows.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    return folder


def options(base: Path, task: str, **more) -> dict[str, Any]:
    model = base / ("t5" if task == "seq2seq" else "bert")
    how = {"steps": STEPS, "lr": 0.01, "schedule": "constant", "warmup_steps": 0, "global_batch": BATCH}
    lengths = {"seq_len": LENGTH, "target_len": TARGET, "eval_samples": 11, "tokenizer": "bytes"}
    return {"model": str(model), "task": task, "data": f"jsonl:{base}/{task}.jsonl", **how, **lengths, **more}


def data_of(base: Path, task: str) -> Any:
    kind: Any = "seq2seq-lm" if task == "seq2seq" else task
    fields = {name: options(base, task)[name] for name in ("model", "data", "seq_len", "target_len")}
    return open_data(Run(**fields), kind, LENGTH, Reporter())


def followed(base: Path, task: str, lora: int = 0) -> tuple[list[float], list[float], Any]:
    """Losses, gradient norms and model of a training with transformers' own model, head and loss."""
    data, options_of = data_of(base, task), options(base, task)
    classes = () if task == "seq2seq" else data.inputs.classes
    torch.manual_seed(0)
    more = {"num_labels": len(classes), "pad_token_id": data.inputs.pad_id} if classes else {}
    model = AUTO[task].from_pretrained(options_of["model"], **more).train()
    if lora:
        targets = [n for n, m in model.bert.named_modules() if isinstance(m, torch.nn.Linear)]
        torch.manual_seed(0)
        how = {
            "lora_alpha": 2 * lora,
            "target_modules": [f"bert.{n}" for n in targets],
            "modules_to_save": ["classifier"],
        }
        model = peft.get_peft_model(model, peft.LoraConfig(r=lora, task_type="SEQ_CLS", **how))
    matrices, vectors = (
        [p for p in model.parameters() if p.requires_grad and (p.ndim > 1) is m] for m in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options_of["lr"])
    unused: Any = None
    plan = Plan("", data.inputs, {}, unused, len(data.train), global_batch=BATCH)
    losses, norms = [], []
    for step in range(STEPS):
        rows = sample_order(plan, range(step * BATCH, (step + 1) * BATCH))
        batch = data.train.batch(rows, rows)
        optimizer.zero_grad()
        loss = model(input_ids=batch["inputs"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model


def predictions(model: Any, data: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions of validation samples, one at a time and without padding."""
    true, taken = [], []
    with torch.no_grad():
        for row in np.arange(count) * len(data.valid) // count:
            batch = data.valid.trimmed(data.valid.batch([row], [row]))
            logits = model(input_ids=batch["inputs"], attention_mask=batch["attention_mask"]).logits
            labels = batch["labels"].reshape(-1)
            true += labels[labels >= 0].tolist()
            taken += logits.reshape(-1, logits.shape[-1]).argmax(-1)[labels >= 0].tolist()
    return np.array(true), np.array(taken)


@pytest.mark.parametrize(
    "task, how",
    [
        ("classify", {"ds_config": "zero3_offload", "micro_batch": 2}),
        pytest.param("tag", {"ds_config": "zero2", "micro_batch": 2}, marks=pytest.mark.versions),
    ],
)
def test_heads_train_and_are_judged_as_transformers_own(pools, tmp_path, base, task, how):
    trained = pools(2).train(tmp_path / "run", **options(base, task, **how))
    losses, norms, model = followed(base, task)
    np.testing.assert_allclose(trained.losses, losses, rtol=EXACT)
    np.testing.assert_allclose([step["grad_norm"] for step in trained.steps], norms, rtol=EXACT)
    loaded = AUTO[task].from_pretrained(trained.folder.model).eval()
    assert relative_difference(loaded.state_dict(), model.state_dict()) < 10 * EXACT
    data = data_of(base, task)
    assert [loaded.config.id2label[n] for n in range(len(data.inputs.classes))] == list(data.inputs.classes)
    true, taken = predictions(loaded, data, 11)
    wanted = {"accuracy": accuracy_score(true, taken), "macro_f1": f1_score(true, taken, average="macro")}
    if task == "tag":
        inside = [n for n, name in enumerate(data.inputs.classes) if name != "O"]
        wanted["micro_f1"] = f1_score(true, taken, labels=inside, average="micro")
    figures = trained.result["eval"]
    assert {name: figures[name] for name in wanted} == pytest.approx(wanted)
    again = evaluate(trained.folder.path, eval_samples=11, micro_batch=3, max_memory={"cpu": "1GiB"})
    assert {name: getattr(again, name) for name in wanted} == pytest.approx(wanted)
    assert again.loss == pytest.approx(figures["loss"], rel=1e-4)


def test_adapters_train_beside_a_new_head(pools, tmp_path, base):
    trained = pools(2).train(tmp_path / "run", **options(base, "classify", lora=4, ds_config="zero3", save_every="4"))
    losses, _, model = followed(base, "classify", lora=4)
    np.testing.assert_allclose(trained.losses, losses, rtol=EXACT)
    torch.manual_seed(0)
    plain = AUTO["classify"].from_pretrained(str(base / "bert"), num_labels=3)
    loaded = peft.PeftModel.from_pretrained(plain, trained.folder.model).eval()
    data = data_of(base, "classify")
    batch = data.valid.batch([0, 1, 2], [0, 1, 2])
    fed = {"input_ids": batch["inputs"], "attention_mask": batch["attention_mask"]}
    saved = {"checkpoint": trained.folder.checkpoints / "step-00000004", "adapters": trained.folder.model}
    folders = [export(path, tmp_path / name, merge=True).out for name, path in saved.items()]
    merged = [AUTO["classify"].from_pretrained(folder).eval() for folder in folders]
    with torch.no_grad():
        theirs, *ours = (one(**fed).logits for one in (model.eval(), loaded, *merged))
    for logits in ours:
        torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-5)


def test_encoder_decoders_train_on_targets_alone(pools, tmp_path, base):
    trained = pools(2).train(tmp_path / "run", **options(base, "seq2seq", ds_config="zero3", micro_batch=2))
    losses, norms, model = followed(base, "seq2seq")
    np.testing.assert_allclose(trained.losses, losses, rtol=EXACT)
    np.testing.assert_allclose([step["grad_norm"] for step in trained.steps], norms, rtol=EXACT)
    loaded: Any = AUTO["seq2seq"].from_pretrained(trained.folder.model).eval()
    assert relative_difference(loaded.state_dict(), model.state_dict()) < 10 * EXACT
    data, scorer = data_of(base, "seq2seq"), RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
    scores = []
    for row in np.arange(11) * len(data.valid) // 11:
        batch = data.valid.trimmed(data.valid.batch([row], [row]))
        fed = {"input_ids": batch["inputs"], "attention_mask": batch["attention_mask"]}
        made = loaded.generate(**fed, max_new_tokens=TARGET, do_sample=False, eos_token_id=256)[0, 1:].tolist()
        reference = bytes(token for token in batch["labels"][0].tolist() if 0 <= token < 256).decode()
        written = bytes(token for token in made[: [*made, 256].index(256)] if token < 256).decode(errors="replace")
        scores.append([score.fmeasure for score in scorer.score(reference, written).values()])
    figures = trained.result["eval"]
    assert [figures["rouge1"], figures["rouge_l"]] == pytest.approx(np.mean(scores, axis=0).tolist())
    assert figures["perplexity"] == pytest.approx(np.exp(figures["loss"]))
    again = evaluate(trained.folder.path, eval_samples=11, max_memory={"cpu": "1GiB"})
    assert (again.loss, again.rouge_l) == pytest.approx((figures["loss"], figures["rouge_l"]), rel=1e-4)
    assert 0 < generate(trained.folder.path, "it was bad", max_new_tokens=5, temperature=0).tokens <= 5


def test_a_classifier_goes_on_bit_for_bit(pools, tmp_path, base):
    how = options(base, "classify", ds_config="zero2", precision="bf16", micro_batch=2, save_every="2")
    whole = pools(2).train(tmp_path / "whole", **how)
    half = whole.folder.checkpoints / "step-00000002"
    went_on = pools(2).train(tmp_path / "on", **how, resume=str(half))
    assert went_on.losses == whole.losses[2:]
    ours, theirs = (load_file(one.folder.model / "model.safetensors") for one in (went_on, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
