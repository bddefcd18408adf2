"""Which adapters and frozen weights train in which layout, and do they follow plain PyTorch with peft?

    python -m benchmarks.adapters [--only WORD] [--output benchmarks/results/adapters.json]

Each case trains STEPS steps in fp32 on CPU ranks, from a small pretrained Llama. Losses and gradient norms of every
step are compared with `tests/train/reference.py` on one process, whose model peft (or requires_grad_) has changed. Of
adapters the result is loaded by `PeftModel.from_pretrained`, and its logits are compared with those of the merged
export. Exit code 1 if a case disagrees.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn

from tests.ranks.pool import RankPool
from tests.train.reference import Plan, follow, quantize_linears, text_windows, write_corpus
from zerofit.checkpoint.export import export
from zerofit.config.ds_json import read_for_run
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import UserError
from zerofit.spec.local_machine import versions

STEPS, SEQ_LEN, GLOBAL_BATCH, RANK = 10, 32, 8, 4
ALLOWED = 1e-5  # relative: of losses and norms, and of merged logits
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.12}
# options of the run, and what a user of peft or torch writes
LORA = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"}
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any] | Callable[[str], bool]]] = {
    "lora": ({"lora": RANK}, LORA),
    "lora on queries and values": (
        {"lora": RANK, "lora_alpha": 4, "lora_targets": "q_proj,v_proj"},
        {**LORA, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    ),
    "gaussian": ({"lora": RANK, "lora_init": "gaussian"}, {**LORA, "init_lora_weights": "gaussian"}),
    "orthogonal": ({"lora": RANK, "lora_init": "orthogonal"}, {**LORA, "init_lora_weights": "orthogonal"}),
    "rslora": ({"lora": RANK, "rslora": True}, {**LORA, "use_rslora": True}),
    "dora": ({"lora": RANK, "dora": True}, {**LORA, "use_dora": True}),
    **{f"lora beside {bits}": ({"lora": RANK, "quantize": bits}, {**LORA, "beside": bits}) for bits in ("nf4", "int8")},
    "--train '*.mlp.*'": ({"train": ["*.mlp.*"]}, lambda name: ".mlp." in name),
    "--freeze model.embed_tokens": ({"freeze": ["model.embed_tokens"]}, lambda name: "embed_tokens" not in name),
}
DUAL_PIPE: dict[str, Any] = {"pipeline": 2, "pipeline_schedule": "dualpipev"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (2, {"ds_config": f"zero{stage}"}) for stage in range(4)},
    "stage 2, optimizer on the host": (2, {"ds_config": "zero2_offload"}),
    "stage 3, all on the host": (2, {"ds_config": "zero3_offload"}),
    "stage 3, all on disk": (2, {"ds_config": "zero3_nvme"}),
    "stage 2, accumulation": (2, {"ds_config": "zero2", "micro_batch": 2}),
    "stage 3, checkpointing": (2, {"ds_config": "zero3", "activation_checkpointing": True}),
    "pipeline 2, stage 0": (2, {"ds_config": "zero0", "pipeline": 2, "micro_batch": 2}),
    "pipeline 2, stage 1": (2, {"pipeline": 2, "micro_batch": 2}),
    "pipeline 4, stage 1": (4, {"pipeline": 4, "micro_batch": 2}),
    "pipeline 2, DualPipeV": (2, DUAL_PIPE | {"micro_batch": 2}),
    "sequence 2, stage 0": (2, {"sequence_parallel": 2, "ds_config": "zero0"}),
    "sequence 2, stage 2": (2, {"sequence_parallel": 2, "ds_config": "zero2"}),
    "sequence 2, stage 3": (2, {"sequence_parallel": 2, "ds_config": "zero3"}),
    "pipeline 2 x sequence 2": (4, {"pipeline": 2, "sequence_parallel": 2, "micro_batch": 2}),
    "pipeline 2 x data 2": (4, {"pipeline": 2, "micro_batch": 2}),
    "pipeline 2 x data 2, DualPipeV": (4, DUAL_PIPE | {"micro_batch": 1}),
    "tensor 2": (2, {"tensor_parallel": 2, "ds_config": "zero1"}),
}
# beside quantized weights
BITS = (*(f"stage {stage}" for stage in range(4)), "stage 3, checkpointing", "stage 2, optimizer on the host")
BITS += ("stage 3, all on the host", "stage 3, all on disk")
BITS += ("pipeline 2, stage 1", "sequence 2, stage 2", "sequence 2, stage 3", "tensor 2")
SOME = ("stage 1", "stage 3", "stage 3, all on the host", "pipeline 2, stage 1", "sequence 2, stage 2", "tensor 2")


@dataclass(frozen=True)
class Case:
    """A part that is trained, in one layout."""

    part: str
    layout: str

    @property
    def name(self) -> str:
        """What it is called in the table."""
        return f"{self.part}, {self.layout}"


def cases() -> Iterator[Case]:
    """All layouts with LoRA, some with each other part; fewest ranks first."""
    for ranks in (2, 4):
        for part in PARTS:
            for layout, (needed, _) in LAYOUTS.items():
                if needed == ranks and (part == "lora" or layout in (BITS if "quantize" in PARTS[part][0] else SOME)):
                    yield Case(part, layout)


class Adapters:
    """Trains cases on ranks that wait for them, and each part once on one process."""

    def __init__(self, folder: Path):
        self._folder, self._number = folder, 0
        self._pool: RankPool | None = None
        self._followed: dict[str, tuple] = {}
        self._corpus = write_corpus(folder / "text.txt")
        self._inputs = TextInputs(vocab_size=260, seq_len=SEQ_LEN)
        torch.manual_seed(1)
        base: Any = build(find("llama-tiny"), self._inputs, SHAPE)
        base.save_pretrained(folder / "base")

    def run(self, case: Case) -> dict[str, Any]:
        """The case's row: how far it is from one process, or why it is refused."""
        row = {"case": case.name, "part": case.part, "layout": case.layout}
        ranks, layout = LAYOUTS[case.layout]
        self._number += 1
        folder = self._folder / f"run-{self._number}"
        try:
            trained = self._pool_of(ranks).train(folder, **self._options(PARTS[case.part][0], layout))
        except UserError as error:
            return {**row, "refused": [f"{one.message}; {one.hint}" for one in error.problems]}
        losses, norms, _ = self._follow(case.part)
        apart = {"loss": _apart(trained.losses, losses)}
        apart["norm"] = _apart([step["grad_norm"] for step in trained.steps], norms)
        if "lora" in PARTS[case.part][0]:
            apart["merged logits"] = self._merged_apart(trained.folder.model)
        return {**row, "apart": apart, "agrees": max(apart.values()) <= ALLOWED}

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.close()

    @torch.no_grad()
    def _merged_apart(self, adapters: Path) -> float:
        merged = export(adapters, adapters.parent / "merged", merge=True).out
        auto = transformers.AutoModelForCausalLM
        base = auto.from_pretrained(self._folder / "base")
        loaded = peft.PeftModel.from_pretrained(base, adapters).eval()
        tokens = torch.arange(SEQ_LEN)[None] * 7 % 256
        theirs = loaded(input_ids=tokens).logits
        return float((auto.from_pretrained(merged)(input_ids=tokens).logits - theirs).norm() / theirs.norm())

    def _follow(self, part: str) -> tuple:
        if part not in self._followed:
            count, windows = text_windows(self._corpus, SEQ_LEN)
            plan = Plan(str(self._folder / "base"), self._inputs, {}, windows, count, global_batch=GLOBAL_BATCH)
            plan.steps, plan.lr = STEPS, 0.01
            # sample by sample, as a rank of small micro batches: with adapters drawn from a Gaussian, Adam's first
            # steps make 1.4e-5 of the norm, in plain PyTorch, of whether a batch is summed at once or so
            plan.parts = GLOBAL_BATCH
            self._followed[part] = follow(plan, partial(_change, how=PARTS[part][1]))
        return self._followed[part]

    def _options(self, part: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
        how = {"model": str(self._folder / "base"), "data": f"text:{self._corpus}", "seq_len": SEQ_LEN, "steps": STEPS}
        how |= {
            "tokenizer": "bytes",
            "global_batch": GLOBAL_BATCH,
            "lr": 0.01,
            "schedule": "constant",
            "warmup_steps": 0,
            "eval_samples": 8,
        }
        if layout.get("ds_config") == "zero3_nvme":
            text = json.dumps(read_for_run("zero3_nvme").config)
            layout = {**layout, "ds_config": json.loads(text.replace("/local_nvme", str(self._folder)))}
        return how | part | layout

    def _pool_of(self, ranks: int) -> RankPool:
        """Return the ranks, of which one number at a time is kept: each takes most of a GiB."""
        if self._pool is None or self._pool.ranks != ranks:
            self.close()
            self._pool = RankPool(ranks, self._folder / f"ranks-{ranks}")
        return self._pool


def _change(model: nn.Module, how: dict[str, Any] | Callable[[str], bool]) -> None:
    """Change a model as a user of peft, or of torch, does."""
    if isinstance(how, dict):
        how = dict(how)
        if bits := how.pop("beside", None):
            quantize_linears(model, bits)
        torch.manual_seed(0)
        peft.get_peft_model(model, peft.LoraConfig(**how))  # type: ignore[arg-type]
        return
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(how(name))


def _apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    """Run the cases, print each, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose name this regular expression finds")
    parser.add_argument("--output", type=Path, help="write the table as JSON; cases that it has already are kept")
    arguments = parser.parse_args()
    kept = json.loads(arguments.output.read_text())["rows"] if arguments.output and arguments.output.exists() else []
    rows = {row["case"]: row for row in kept}
    with tempfile.TemporaryDirectory() as name:
        adapters = Adapters(Path(name))
        for case in cases():
            if case.name not in rows and re.search(arguments.only, case.name):
                row = rows[case.name] = adapters.run(case)
                figures = row.get("refused") or ", ".join(f"{of} {value:.1e}" for of, value in row["apart"].items())
                print(f"{case.name}: {figures}{' IS TOO MUCH' if row.get('agrees') is False else ''}", flush=True)
                if arguments.output:
                    _write(arguments.output, list(rows.values()))
        adapters.close()
    sys.exit(1 if any(row.get("agrees") is False for row in rows.values()) else 0)


def _write(output: Path, rows: list[dict[str, Any]]) -> None:
    found = [row["apart"] for row in rows if "apart" in row]
    figures = ("loss", "norm", "merged logits")
    result = {
        "date": date.today().isoformat(),
        "hardware": f"{os.cpu_count()} CPU cores",
        "versions": versions() | {"peft": peft.__version__},
        "steps": STEPS,
        "allowed": ALLOWED,
        "largest": {of: max((one[of] for one in found if of in one), default=None) for of in figures},
        "rows": rows,
    }
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
