"""Does training in more than one parallel dimension, or with spread experts, follow one process of plain PyTorch?

    python -m benchmarks.layouts [--ranks 4 8] [--only WORD] [--output benchmarks/results/layouts.json]

Each case trains STEPS steps in fp32 in one layout, on CPU ranks. Losses and gradient norms of every step and the
weights at the end are compared with `tests/train/reference.py`. Faults that such layouts may have are put into the
reference, which must then be further away than a case may be. Exit code 1 if a case disagrees, or a fault is not seen.
4 ranks take 4 GiB of memory, 16 take 14.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.ranks.pool import RankPool
from tests.train.reference import Plan, follow, relative_difference, text_windows, write_corpus
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import UserError
from zerofit.spec.local_machine import versions

STEPS, SEQ_LEN, GLOBAL_BATCH = 10, 32, 8
LOSS, NORM, WEIGHTS = 1e-5, 1e-6, 1e-5  # relative
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 260}
# large enough that attention and positions matter
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.12}
MODELS = {
    "llama": {"model_type": "llama", **SHAPE},
    "llama tied": {"model_type": "llama", **SHAPE, "tie_word_embeddings": True},
    "qwen3 tied": {"model_type": "qwen3", **SHAPE, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **SHAPE, "sliding_window": None},
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
MIXTURES = {
    "mixtral": {"model_type": "mixtral", **SHAPE, **EXPERTS, "num_local_experts": 4, "sliding_window": None},
    "qwen3 moe": {
        "model_type": "qwen3_moe",
        **SHAPE,
        **EXPERTS,
        "num_experts": 8,
        "head_dim": 16,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "deepseek v2": {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        **SHAPE,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    },
}
# their own loss, of each micro batch: with one sample in each it is the mean over samples, whatever the layout
MIXTURES |= {f"{name} balanced": MIXTURES[name] | {"router_aux_loss_coef": 0.5} for name in ("mixtral", "qwen3 moe")}
MIXTURES["qwen3 moe balanced"] |= {"tie_word_embeddings": True}
OPTIMIZERS = {
    "SGD": {"optimizer": "sgd", "lr": 0.1, "clip": 0.5},  # clipped at each step: a wrong norm or scale shows at once
    "AdamW": {"optimizer": "adamw", "lr": 1e-3, "clip": 0.5},
}
# pipeline, tensor, sequence, data
DEGREES = {
    4: [(2, 2, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (4, 1, 1, 1)],
    8: [(2, 2, 1, 2), (2, 1, 2, 2), (1, 2, 2, 2), (2, 2, 2, 1), (4, 2, 1, 1), (2, 4, 1, 1), (1, 4, 2, 1), (1, 2, 4, 1)],
    16: [(2, 2, 2, 2), (4, 2, 1, 2), (2, 4, 2, 1), (1, 4, 2, 2), (4, 4, 1, 1), (4, 1, 4, 1)],
}
# expert parallel degrees by sequence and data parallel ones
SPREAD = {4: {(1, 4): (2, 4), (2, 2): (2, 4), (4, 1): (2,)}}
# pipelines of spread experts: as DEGREES, and the expert parallel degree
PIPED = {4: [(2, 1, 1, 2, 2), (2, 1, 2, 1, 2)], 8: [(2, 1, 1, 4, 2), (2, 1, 1, 4, 4), (2, 1, 2, 2, 4), (4, 1, 1, 2, 2)]}
MORE = {
    "checkpointing": {"activation_checkpointing": True},
    "chunked loss": {"loss_chunk": 16},
    "micro batch 1": {"micro_batch": 1},
}
LONG: dict[str, dict[str, Any]] = {  # for long sequences; none of these sizes divides the tokens of a rank
    "loss in chunks": {"loss_chunk": 20},
    "MLPs in tiles": {"mlp_chunk": 6},
    "checkpoints on the host": {"activation_offload": True},
}
LONG["all three"] = LONG["loss in chunks"] | LONG["MLPs in tiles"] | LONG["checkpoints on the host"]
LONG_DEGREES = [(1, 1, 1, 2), (1, 1, 2, 1)]
DUAL_PIPE = {
    2: [(2, 1, 1, 1)],
    3: [(3, 1, 1, 1)],
    4: [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2)],
    8: [(2, 2, 1, 2), (2, 2, 2, 1), (2, 1, 2, 2)],
}
AXES = ("PP", "TP", "SP", "DP")


@dataclass(frozen=True)
class Case:
    """One layout, model and optimizer; `more` are further options of the run."""

    name: str
    ranks: int
    model: str
    optimizer: str
    more: dict[str, Any]


def cases() -> Iterator[Case]:
    """What is for long sequences on 2 ranks; all layouts with each model and optimizer, then what changes a step."""
    for degrees in LONG_DEGREES:
        for stage in range(4):
            for model, (word, options) in product(("llama", "llama tied"), LONG.items()):
                yield _case(2, degrees, stage, model, "SGD", word, options)
            yield _case(2, degrees, stage, "qwen3 tied", "AdamW", "all three", LONG["all three"])
    for ranks, layouts in DEGREES.items():
        for degrees in layouts:
            for stage in (0, 1) if degrees[0] > 1 else (0, 1, 2, 3):
                for model in MODELS:
                    for optimizer in OPTIMIZERS:
                        yield _case(ranks, degrees, stage, model, optimizer)
            for word, options in {**MORE, "all three": LONG["all three"]}.items():
                yield _case(ranks, degrees, 1, "qwen3 tied", "SGD", word, options)
        yield from _spread(ranks)
        for *degrees, expert in PIPED.get(ranks, []):
            yield from _piped(ranks, tuple(degrees), expert)
    for ranks, layouts in DUAL_PIPE.items():
        for degrees in layouts:
            yield from _dual_pipe(ranks, degrees)


def _dual_pipe(ranks: int, degrees: tuple[int, ...]) -> Iterator[Case]:
    """Yield DualPipeV with weights that are tied and not, then with what changes a step; two micro batches a stage."""
    stages, _, _, data = degrees
    micro_batch = GLOBAL_BATCH // data // (2 * stages)
    schedule = {"pipeline_schedule": "dualpipev", "micro_batch": micro_batch}
    for model, optimizer in product(("llama", "qwen3 tied"), OPTIMIZERS):
        yield _case(ranks, degrees, 1, model, optimizer, "dualpipev", schedule)
    for word, options in {"checkpointing": MORE["checkpointing"], "all three": LONG["all three"]}.items():
        yield _case(ranks, degrees, 1, "qwen3 tied", "SGD", f"dualpipev, {word}", schedule | options)


def _spread(ranks: int) -> Iterator[Case]:
    """Yield layouts of spread experts: Mixtral in all, the other mixtures in the first and at accumulation 1."""
    for (sequence, data), spreads in SPREAD.get(ranks, {}).items():
        for expert, stage in product(spreads, (1, 2, 3)):
            degrees, more = (1, 1, sequence, data), {"expert_parallel": expert}
            for optimizer in OPTIMIZERS:
                yield _case(ranks, degrees, stage, "mixtral", optimizer, f"EP{expert}", more)
            for model in ("qwen3 moe", "deepseek v2") if sequence == 1 else ("qwen3 moe",):
                yield _case(ranks, degrees, stage, model, "SGD", f"EP{expert}", more | {"micro_batch": 1})
    for word, options in MORE.items():
        if ranks in SPREAD:
            more = options | {"expert_parallel": 2}
            yield _case(ranks, (1, 1, 2, 2), 2, "mixtral", "SGD", f"EP2, {word}", more)


def _piped(ranks: int, degrees: tuple[int, ...], expert: int) -> Iterator[Case]:
    """Yield spread experts on the stages of a pipeline, with the routers' loss and without, and no experts spread.

    Ulysses does not take DeepSeek, and the routers' loss is one of each part of a sequence there. DeepSeek's first
    layer has no experts, so that it is no stage.
    """
    spread, sample = {"expert_parallel": expert}, {"micro_batch": 1}
    whole = degrees[2] == 1
    for optimizer in OPTIMIZERS:
        for model in ("mixtral", "qwen3 moe", *(["deepseek v2"] if whole and degrees[0] == 2 else [])):
            yield _case(ranks, degrees, 1, model, optimizer, f"EP{expert}", spread)
        if whole:
            yield _case(ranks, degrees, 1, "mixtral balanced", optimizer, f"EP{expert}", spread | sample)
    if not whole:
        return
    yield _case(ranks, degrees, 1, "mixtral balanced", "SGD", "whole experts", sample)
    for word, options in MORE.items():
        more = spread | sample | options
        yield _case(ranks, degrees, 1, "qwen3 moe balanced", "SGD", f"EP{expert}, {word}", more)
    if GLOBAL_BATCH // degrees[3] >= 2 * degrees[0]:
        more = spread | sample | {"pipeline_schedule": "dualpipev"}
        yield _case(ranks, degrees, 1, "qwen3 moe balanced", "SGD", f"EP{expert}, dualpipev", more)


def _case(
    ranks: int,
    degrees: tuple[int, ...],
    stage: int,
    model: str,
    optimizer: str,
    word: str = "",
    more: dict[str, Any] | None = None,
) -> Case:
    layout = " x ".join(f"{axis}{n}" for axis, n in zip(AXES, degrees, strict=True) if n > 1)
    name = ", ".join(filter(None, (layout, f"stage {stage}", model, optimizer, word)))
    pipeline, tensor, sequence, _ = degrees
    given = {"pipeline": pipeline, "tensor_parallel": tensor, "sequence_parallel": sequence, "micro_batch": 2}
    return Case(name, ranks, model, optimizer, given | {"ds_config": f"zero{stage}"} | (more or {}))


class Layouts:
    """Trains cases on ranks that wait for them, and each model with each optimizer once on one process."""

    def __init__(self, folder: Path):
        self._folder, self._number = folder, 0
        self._pool: RankPool | None = None
        self._followed: dict[tuple[str, str], tuple] = {}
        self._corpus = write_corpus(folder / "text.txt")

    def run(self, case: Case) -> dict[str, Any]:
        """The case's row: how far it is from one process, or why it is refused."""
        losses, norms, weights = self.follow(case.model, case.optimizer)
        try:
            trained = self._pool_of(case.ranks).train(self._output(), **self._options(case))
        except UserError as error:
            return {"case": case.name, "ranks": case.ranks, "refused": str(error)}
        own = AutoModelForCausalLM.from_pretrained(trained.folder.model, dtype="auto").state_dict()
        apart = {
            "loss": _apart(trained.losses, losses),
            "norm": _apart([step["grad_norm"] for step in trained.steps], norms),
            "weights": relative_difference(own, weights),
        }
        agrees = all(apart[of] <= most for of, most in (("loss", LOSS), ("norm", NORM), ("weights", WEIGHTS)))
        return {"case": case.name, "ranks": case.ranks, "apart": apart, "agrees": agrees}

    def follow(self, model: str, optimizer: str) -> tuple:
        """Losses, norms and weights of one process."""
        if (model, optimizer) not in self._followed:
            self._followed[model, optimizer] = follow(self.plan(model, optimizer))
        return self._followed[model, optimizer]

    def plan(self, model: str, optimizer: str) -> Plan:
        """The run as the reference sees it."""
        config = self._folder / model.replace(" ", "-") / "config.json"
        config.parent.mkdir(exist_ok=True)
        config.write_text(json.dumps((MODELS | MIXTURES)[model]))
        count, windows = text_windows(self._corpus, SEQ_LEN)
        text = TextInputs(vocab_size=SHAPE["vocab_size"], seq_len=SEQ_LEN)
        parts = GLOBAL_BATCH if "balanced" in model else 1  # the routers' own loss is one of each micro batch
        plan = Plan(str(config), text, {}, windows, count, global_batch=GLOBAL_BATCH, steps=STEPS, parts=parts)
        return replace(plan, **OPTIMIZERS[optimizer])

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.close()

    def _options(self, case: Case) -> dict[str, Any]:
        plan = self.plan(case.model, case.optimizer)
        how = {"model": plan.model, "data": f"text:{self._corpus}", "seq_len": SEQ_LEN, "steps": STEPS, "lr": plan.lr}
        how |= {"optimizer": plan.optimizer, "gradient_clipping": plan.clip, "global_batch": GLOBAL_BATCH}
        return how | {"schedule": "constant", "warmup_steps": 0, "eval_samples": 8} | case.more

    def _pool_of(self, ranks: int) -> RankPool:
        """Return the ranks, of which one number at a time is kept: each takes most of a GiB."""
        if self._pool is None or self._pool.ranks != ranks:
            self.close()
            self._pool = RankPool(ranks, self._folder / f"ranks-{ranks}")
        return self._pool

    def _output(self) -> Path:
        self._number += 1
        return self._folder / f"run-{self._number}"


def _apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def _half_of_head_norms(model: nn.Module) -> None:
    """Leave of the gradients of q_norm and k_norm what one of two equal tensor ranks has."""
    for name, p in model.named_parameters():
        if "_norm.weight" in name and "self_attn" in name:
            p.register_hook(lambda grad: grad / 2)


def _positions_anew(model: nn.Module) -> None:
    """Let positions begin anew in the middle of a sequence."""

    def halved(_: nn.Module, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return given[0], given[1] % (SEQ_LEN // 2)

    model.get_submodule("model.rotary_emb").register_forward_pre_hook(halved)


def _gradients_doubled(model: nn.Module) -> None:
    """Add the gradients of two sequence ranks where they are to be averaged."""
    for p in model.parameters():
        p.register_hook(lambda grad: grad * 2)


def _half_of_experts(model: nn.Module) -> None:
    """Divide the gradients of experts by two more ranks than hold them."""
    for p in model.parameters():
        if p.dim() == 3:
            p.register_hook(lambda grad: grad / 2)


def _second_expert_dropped(model: nn.Module) -> None:
    """Send one in eight tokens to its first expert alone, as a full one would."""

    def dropped(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, chosen, scores = given
        kept = torch.ones_like(scores)
        kept[::8, 1] = 0
        return x, chosen, scores * kept

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(dropped)


def _clipping(counted: Callable[[list[nn.Parameter]], list[nn.Parameter]]) -> Callable[..., Tensor]:
    """Return a `clip_grad_norm_` that goes by the norm of the parameters that are counted."""

    def clip(parameters: Iterator[nn.Parameter], most: float) -> Tensor:
        whole = list(parameters)
        norm = nn.utils.get_total_norm([cast(Tensor, p.grad) for p in counted(whole)])
        nn.utils.clip_grads_with_norm_(whole, most, norm)
        return norm

    return clip


FAULTS: dict[str, Callable[[nn.Module], None]] = {
    "half the gradient of the norms of heads": _half_of_head_norms,
    "positions that begin anew in each part of a sequence": _positions_anew,
    "gradients of sequence ranks added up": _gradients_doubled,
}
MISCOUNTS: dict[str, Callable[[list[nn.Parameter]], list[nn.Parameter]]] = {
    "clipped by the norm of the first of two stages": lambda all_: all_[: len(all_) // 2],
    "a tied weight counted in both stages": lambda all_: [all_[0], *all_],
}
EXPERT_FAULTS: dict[str, Callable[[nn.Module], None]] = {
    "gradients of experts averaged over ranks that hold other ones": _half_of_experts,
    "a token's second expert left out": _second_expert_dropped,
}
EXPERT_MISCOUNTS: dict[str, Callable[[list[nn.Parameter]], list[nn.Parameter]]] = {
    "clipped by a norm without experts": lambda all_: [p for p in all_ if p.dim() < 3],
}


def faults(layouts: Layouts) -> Iterator[dict[str, Any]]:
    """Put what a layout may do wrong into the reference; yield how far each fault is from the right one."""
    kinds = (("qwen3 tied", FAULTS, MISCOUNTS), ("mixtral", EXPERT_FAULTS, EXPERT_MISCOUNTS))
    for model, changes, miscounts in kinds:
        plan, right = layouts.plan(model, "SGD"), layouts.follow(model, "SGD")
        for name, fault in changes.items():
            yield _seen(name, follow(plan, fault), right)
        for name, counted in miscounts.items():
            with patch.object(nn.utils, "clip_grad_norm_", _clipping(counted)):
                yield _seen(name, follow(plan), right)


def _seen(name: str, wrong: tuple, right: tuple) -> dict[str, Any]:
    apart = {"loss": _apart(wrong[0], right[0]), "norm": _apart(wrong[1], right[1])}
    return {"fault": name, "apart": apart, "seen": apart["loss"] > LOSS or apart["norm"] > NORM}


def main() -> None:
    """Run faults and cases, print each, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ranks = sorted({2, *DEGREES, *DUAL_PIPE})
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8], choices=ranks, help="(default: 2 4 8)")
    parser.add_argument("--only", default="", help="only cases whose name this regular expression finds")
    parser.add_argument("--output", type=Path, help="write the table as JSON; cases that it has already are kept")
    arguments = parser.parse_args()
    kept = json.loads(arguments.output.read_text())["rows"] if arguments.output and arguments.output.exists() else []
    rows = {row["case"]: row for row in kept}
    with tempfile.TemporaryDirectory() as name:
        layouts = Layouts(Path(name))
        wrong = list(faults(layouts))
        for row in wrong:
            print(f"fault, {row['fault']}: {_figures(row)}{'' if row['seen'] else ' IS NOT SEEN'}", flush=True)
        for case in cases():
            if case.ranks in arguments.ranks and case.name not in rows and re.search(arguments.only, case.name):
                rows[case.name] = layouts.run(case)
                print(_line(rows[case.name]), flush=True)
                _write(arguments.output, wrong, list(rows.values()))
        layouts.close()
    apart = [row for row in rows.values() if row.get("agrees") is False]
    agreed = [row for row in rows.values() if row.get("agrees")]
    print(f"{len(agreed)} agree, {len(apart)} do not, {len(rows) - len(agreed) - len(apart)} are refused")
    sys.exit(1 if apart or not all(row["seen"] for row in wrong) else 0)


def _write(output: Path | None, wrong: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    if output is None:
        return
    agreed = [row["apart"] for row in rows if row.get("agrees")]
    largest = {of: max((row[of] for row in agreed), default=None) for of in ("loss", "norm", "weights")}
    result = {
        "date": date.today().isoformat(),
        "hardware": f"{os.cpu_count()} CPU cores",
        "versions": versions(),
        "steps": STEPS,
        "allowed": {"loss": LOSS, "norm": NORM, "weights": WEIGHTS},
        "largest_of_those_that_agree": largest,
        "faults": wrong,
        "rows": rows,
    }
    output.write_text(json.dumps(result, indent=1) + "\n")


def _figures(row: dict[str, Any]) -> str:
    return ", ".join(f"{of} {value:.1e}" for of, value in row["apart"].items())


def _line(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"{row['case']}: refused ({row['refused']})"
    return f"{row['case']}: {_figures(row)}{'' if row['agrees'] else ' IS TOO MUCH'}"


if __name__ == "__main__":
    main()
