"""Checkpoints of other programs: read, exported, damaged, and converted for the programs that load them.

    python -m benchmarks.foreign_checkpoints [--work FOLDER] [--output FILE] [--older FOLDER ...]

The real programs (foreign_writer.py) write checkpoints on 1, 2 and 4 ranks. Each is exported and compared bit for bit
with the writer's own weights. transformers loads the export; its logits are compared with those of the writer's model.
`train --resume` continues some in another layout, and some are converted to other layouts, which real programs load
(foreign_reader.py): the next five losses must be those of the writer. Copies are damaged in ten ways; `verify` must
name the file. An older release of DeepSpeed also writes, if
`pip install --no-deps --no-build-isolation --target FOLDER deepspeed==0.16.9` installed it. Lightning and torchtitan
write if PYTHONPATH has them.

After an interruption, the same command with the same --work continues. It repeats rows of other code.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file

from benchmarks.foreign_writer import AFTER, BEFORE, CASES, LENGTH, LR, TEXT, Case, batch, make_model
from tests.ranks.pool import RankPool
from zerofit.app.checkpoints import Checkpoint
from zerofit.checkpoint.foreign import Foreign, foreign_in
from zerofit.spec.errors import UserError
from zerofit.spec.local_machine import versions

# DeepSpeed keeps the topology of AutoTP or of a pipeline for the engines after it: each has its own processes
KEPT = ("ds-tp", "ds-pipeline")
RUNS = [(ranks, [name for name in CASES if not name.startswith(KEPT)]) for ranks in (1, 2)]
RUNS += [(ranks, [name for name in CASES if name.startswith(kept)]) for ranks in (1, 2) for kept in KEPT]
RUNS += [(4, ["ds-zero1-fp32", "ds-zero2-tied", "ds-zero3-bf16", "ds-zero3-tied", "dcp-fsdp2", "ds-moe"])]
OLDER = ["ds-zero0-fp32", "ds-zero1-bf16", "ds-zero2-tied", "ds-zero2-fp16", "ds-zero2-round-robin", "ds-zero3-bf16"]
OLDER += ["ds-zero3-tied", "ds-zero3-sub-groups", "ds-moe", "ds-moe-zero0", "trainer-zero2", "trainer-zero3"]
# runs a module with another folder before all installed packages
WITH_FOLDER = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
WITH_FOLDER += "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
# source, what the target changes, options of convert: loaded on two ranks
Change = dict[str, Any]
CONVERSIONS: list[tuple[str, str, Change, dict[str, Any]]] = [
    *(
        (f"ds-zero{old}-fp32-{ranks}", f"ds-zero{old}-fp32", {"stage": new}, {"to": "deepspeed", "stage": new})
        for old, new, ranks in ((0, 2, 2), (1, 3, 2), (2, 0, 1), (3, 1, 1), (3, 3, 1), (1, 1, 4))
    ),
    *(
        (f"ds-zero{old}-tied-{ranks}", f"ds-zero{old}-tied", {"stage": new}, {"to": "deepspeed", "stage": new})
        for old, new, ranks in ((2, 3, 2), (3, 2, 4), (1, 2, 1), (3, 1, 2))
    ),
    ("ds-zero3-bf16-4", "ds-zero3-bf16", {"stage": 2}, {"to": "deepspeed", "stage": 2}),
    ("ds-zero1-bf16-2", "ds-zero1-bf16", {"stage": 0}, {"to": "deepspeed", "stage": 0}),
    ("dcp-fsdp2-4", "ds-zero2-fp32", {"stage": 2}, {"to": "deepspeed", "stage": 2}),
    ("dcp-fsdp1-sharded-2", "ds-zero3-fp32", {}, {"to": "deepspeed", "stage": 3}),
    ("accelerate-fsdp2-2", "ds-zero1-tied", {"precision": "fp32", "groups": 1}, {"to": "deepspeed", "stage": 1}),
    # (source without DeepSpeed and with two groups, engine of the same model and groups)
    *(
        (f"{source}-2", target, {"precision": "fp32", "groups": 2, "stage": options.get("stage", 2)}, options)
        for source, target in (
            *(("torch", "ds-zero2-fp32"), ("torch-tied", "ds-zero3-tied"), ("accelerate-groups", "ds-zero1-tied")),
            *(("trainer-ddp-groups", "ds-zero2-tied"), ("dcp-fsdp2-groups", "ds-zero3-tied")),
        )
        for options in ({"to": "deepspeed", "stage": CASES[target].stage}, {"to": "universal"})
    ),
    ("torch-2", "dcp-fsdp2", {"groups": 2}, {"to": "dcp"}),
    ("torch-tied-2", "dcp-fsdp2-groups", {}, {"to": "dcp"}),
    ("trainer-ddp-groups-2", "dcp-fsdp2-groups", {}, {"to": "dcp"}),
    ("torchtitan-2", "ds-zero1-fp32", {}, {"to": "deepspeed", "stage": 1}),
    ("ds-tp-zero1-fp32-2", "ds-zero1-fp32", {}, {"to": "deepspeed", "stage": 1}),
    ("ds-tp-zero1-2", "ds-zero1-bf16", {}, {"to": "deepspeed", "stage": 1}),
    ("ds-tp-zero2-2", "ds-zero3-bf16", {}, {"to": "deepspeed", "stage": 3}),
    ("ds-zero2-fp16-2", "ds-zero1-fp16", {}, {"to": "deepspeed", "stage": 1}),
    ("ds-zero3-fp32-2", "dcp-fsdp2", {}, {"to": "dcp"}),
    ("ds-zero2-fp32-1", "dcp-fsdp2", {}, {"to": "dcp"}),
    ("ds-zero3-fp32-1", "ds-zero2-fp32", {}, {"to": "universal"}),
    ("dcp-fsdp2-1", "ds-zero1-fp32", {}, {"to": "universal"}),
    ("ds-zero3-fp16-2", "ds-zero1-fp16", {}, {"to": "deepspeed", "stage": 1}),
    ("ds-zero2-fp16-2", "ds-zero3-fp16", {}, {"to": "deepspeed", "stage": 3}),
    ("ds-zero1-fp16-2", "ds-zero2-fp16", {}, {"to": "universal"}),
]
# ranks of the run that resumes: the sources, and its ZeRO stage
RESUMES: dict[int, dict[str, int]] = {
    1: {"ds-zero2-fp16-2": 3, "ds-zero3-fp16-2": 1, "ds-zero3-fp32-2": 3, "dcp-fsdp2-4": 2},
    # without fp16 at stage 0, which DeepSpeed trains with gradients divided by the loss scale (DeepSpeed#8393)
    2: {f"ds-zero{stage}-{precision}-2": 3 - stage for stage in range(4) for precision in ("fp32", "bf16")}
    | {"ds-zero1-fp16-2": 3, "ds-zero2-fp16-2": 1, "ds-zero3-fp16-2": 0}
    | {"ds-zero2-tied-2": 3, "ds-zero3-tied-4": 1, "ds-zero3-bf16-4": 3, "ds-tp-zero1-fp32-2": 2}
    | {"accelerate-zero2-2": 3, "accelerate-zero3-2": 1, "accelerate-2": 2}
    | {"accelerate-fsdp2-2": 1, "accelerate-fsdp2-full-2": 3}
    | {"trainer-zero0-2": 2, "trainer-zero1-2": 3, "trainer-zero2-2": 0, "trainer-zero3-2": 2, "trainer-ddp-2": 3}
    | {"lightning-zero2-2": 3, "lightning-zero3-2": 1, "lightning-ddp-2": 2}
    | {"torch-2": 2, "torch-tied-2": 3, "accelerate-groups-2": 1, "trainer-ddp-groups-2": 3, "dcp-fsdp2-groups-2": 2}
    | {"dcp-fsdp2-2": 1, "dcp-fsdp2-tied-2": 3, "dcp-fsdp1-sharded-2": 2, "dcp-fsdp1-full-2": 0, "torchtitan-2": 3},
}


def main() -> None:
    """Write, check, convert, load, damage; write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="folder for the checkpoints; kept, and used again if it has them")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/foreign_checkpoints.json")
    parser.add_argument("--older", type=Path, nargs="*", default=[], help="folders with older releases of DeepSpeed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the writers, for the same sums
    table = Table(arguments.work or Path(tempfile.mkdtemp()))
    work = table.work
    for ranks, names in RUNS:
        write(work, ranks, names)
    for place in sorted(work.glob("*-[124]")):
        table.measure("exports", place.name, lambda place=place: exported(place, work / "out"))
    resume_all(table)
    convert_and_load(table)
    damage_all(table)
    for folder in arguments.older:
        by_older(folder, table)
    before = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    rows = {part: table.of(part, before.get(part, [])) for part in KEYS}
    facts = {"versions": versions(), "summary": summary(rows)}
    arguments.output.write_text(json.dumps(facts | rows, indent=1) + "\n")
    print(json.dumps(facts["summary"], indent=1))


KEYS = {  # of each part: the columns that identify a row
    "exports": ["case"],
    "resumes": ["source", "ranks", "stage"],
    "conversions": ["source", "to", "stage"],
    "damage": ["checkpoint", "damage"],
    "older": ["deepspeed", "case"],
}


class Table:
    """The rows that are measured, in WORK/rows.jsonl, each with the commit of its code."""

    def __init__(self, work: Path):
        self.work, self.code = work, code()
        work.mkdir(parents=True, exist_ok=True)
        lines = (work / "rows.jsonl").read_text().splitlines() if (work / "rows.jsonl").is_file() else []
        rows = [row for row in map(json.loads, lines) if row["code"] == self.code]
        self.rows: dict[tuple[str, str], dict[str, Any]] = {(row["part"], row["key"]): row["row"] for row in rows}

    def measure(self, part: str, key: str, measurement: Callable[[], dict[str, Any]]) -> None:
        """Add a row unless the table has it."""
        if (part, key) in self.rows:
            return
        row = self.rows[part, key] = measurement()
        with (self.work / "rows.jsonl").open("a") as file:
            file.write(json.dumps({"part": part, "key": key, "code": self.code, "row": row}) + "\n")

    def of(self, part: str, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of a part, and earlier rows of cases that were not measured again, with their code."""
        own = {key: row | {"code": self.code} for (other, key), row in self.rows.items() if other == part}
        return [row for _, row in sorted(({key_of(part, row): row for row in before} | own).items())]


def key_of(part: str, row: dict[str, Any]) -> str:
    """Return what identifies a row."""
    return " ".join(str(row.get(name)) for name in KEYS[part])


def code() -> str:
    """Return the last commit that changed what is measured; with "+" if there are changes after it."""
    paths = ["toolkit/zerofit/checkpoint", "toolkit/zerofit/app/checkpoints.py"]
    paths += [str(file) for file in Path("benchmarks").glob("foreign_*.py")]
    commit, changes = (
        subprocess.run(["git", *command, "--", *paths], capture_output=True, text=True, check=True).stdout.strip()
        for command in (["log", "-1", "--format=%h"], ["status", "--short"])
    )
    return commit + "+" * bool(changes)


def write(work: Path, ranks: int, names: list[str], older: Path | None = None) -> None:
    """Write the checkpoints that the folder does not have."""
    missing = [name for name in names if not (work / f"{name}-{ranks}/facts.json").is_file()]
    for name in missing:
        shutil.rmtree(work / f"{name}-{ranks}", ignore_errors=True)
    if missing:
        run("benchmarks.foreign_writer", work, ranks, *missing, older=older)


def by_older(folder: Path, table: Table) -> None:
    """Write and export checkpoints with an older release of DeepSpeed, on two ranks."""
    release = next(folder.glob("deepspeed-*.dist-info")).name.removeprefix("deepspeed-").removesuffix(".dist-info")
    place = table.work / f"older-{release}"
    write(place, 2, OLDER, older=folder)
    for each in sorted(place.glob("*-2")):
        key = f"{release} {each.name}"
        table.measure("older", key, lambda each=each: {"deepspeed": release, **exported(each, table.work / "out")})


def run(module: str, *arguments: object, older: Path | None = None) -> None:
    """Run a module of this folder, and show its errors."""
    with tempfile.TemporaryFile("w+") as log:
        start = ["-c", WITH_FOLDER, str(older.absolute())] if older else ["-m"]
        command = [sys.executable, *start, module, *map(str, arguments)]
        if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode:
            log.seek(0)
            sys.stderr.write(log.read()[-3000:])


def exported(place: Path, out: Path) -> dict[str, Any]:
    """Export a checkpoint, and compare it with the writer's own weights."""
    row: dict[str, Any] = {"case": place.name}
    errors = sorted(place.glob("error-*.txt"))
    found = foreign_in(place / "saved")
    if errors or not found or not (place / "facts.json").is_file():
        return row | {"result": "not written", "why": errors[0].read_text().splitlines()[-1] if errors else "no files"}
    entry = found[0]
    reference, target = reference_of(place, entry), out / place.name
    shutil.rmtree(target, ignore_errors=True)
    config = place / "reference"
    try:
        row["name"] = Checkpoint(entry.path).describe().name
        result = Checkpoint(entry.path).export(target, model=config if (config / "config.json").is_file() else None)
    except UserError as error:
        return row | {"result": "refused", "why": str(error)}
    got = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    differ = [name for name in got if name not in reference or not equal(got[name], reference[name])]
    row |= {"dtype": result.dtype, "tensors": len(got), "elements": sum(tensor.numel() for tensor in got.values())}
    if (place / "logits.pt").is_file():
        row["logits_apart"] = logits_apart(place, target)
    return row | {"result": "equal bit for bit" if got and not differ else f"different: {', '.join(differ[:3])}"}


def logits_apart(place: Path, exported: Path) -> float:
    """Load an export with transformers or peft; return the largest difference from the logits of the writer's model."""
    case = Case(**json.loads((place / "facts.json").read_text())["case"])
    if case.lora:
        model: Any = peft.PeftModel.from_pretrained(make_model(replace(case, lora=False)), exported)
    else:
        if not (exported / "config.json").is_file():
            make_model(case).config.save_pretrained(exported)
        model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    if case.program == "lightning":  # its bf16-true rounds RoPE's frequencies, too
        model.to(model.dtype)
    with torch.no_grad():
        logits = model(**batch()).logits
    return (logits.float() - torch.load(place / "logits.pt").float()).abs().max().item()


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two tensors have the same type and bits."""
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def reference_of(place: Path, entry: Foreign) -> dict[str, torch.Tensor]:
    """Return the weights that the program itself saved, or (a mixture, a pipeline) the parts of its ranks."""
    for folder in (place / "reference", entry.path):
        for name in ("model.safetensors", "adapter_model.safetensors"):
            if (folder / name).is_file():
                return load_file(folder / name)
    weights: dict[str, torch.Tensor] = {}
    for rank, file in enumerate(sorted((place / "reference").glob("module-*.pt"))):
        for name, tensor in torch.load(file).items():
            head, mark, rest = name.partition(".deepspeed_experts.")
            local, _, tail = rest.partition(".")
            shares = min(2, int(place.name[-1]))
            number = int(local or 0) + (rank % shares) * (4 // shares)
            weights[f"{head}{mark}{number}.{tail}" if mark else name] = tensor
    if not weights and (entry.path / "pytorch_model.bin").is_file():
        weights = torch.load(entry.path / "pytorch_model.bin")
    return weights


def resume_all(table: Table) -> None:
    """Continue checkpoints with `train --resume`, and compare the next five losses."""
    setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)  # noqa: B010 - as the ranks of a pool do
    (table.work / "text.txt").write_text(TEXT * 2000)
    for ranks, stages in RESUMES.items():
        pool = RankPool(ranks, table.work / f"pool{ranks}")
        try:
            for source, stage in stages.items():
                if (table.work / source / "facts.json").is_file():
                    row = {"source": source, "ranks": ranks, "stage": stage}
                    table.measure("resumes", key_of("resumes", row), partial(resumed, table.work, row, pool))
        finally:
            pool.close()


def resumed(work: Path, row: dict[str, Any], pool: RankPool) -> dict[str, Any]:
    """Train on from a checkpoint in another layout."""
    place, out = work / row["source"], work / "resumed"
    shutil.rmtree(out, ignore_errors=True)
    facts, found = json.loads((place / "facts.json").read_text()), foreign_in(place / "saved")[0]
    reference = place / "reference"
    adam = {"type": "AdamW", "params": {"betas": [0.9, 0.999], "eps": 1e-8, "torch_adam": True}}
    trained = pool.train(
        out,
        model=str(reference if (reference / "config.json").is_file() else found.path),
        data=f"text:{work / 'text.txt'}",
        tokenizer="bytes",
        seq_len=LENGTH,
        micro_batch=2,
        steps=BEFORE + AFTER,
        lr=LR,
        schedule="constant",
        warmup_steps=0,
        weight_decay={1: 0.0, 2: 0.1}[facts["case"]["groups"]],
        gradient_clipping=0,
        precision=facts["case"]["precision"],
        ds_config={"zero_optimization": {"stage": row["stage"], "memory_efficient_linear": False}, "optimizer": adam},
        resume=str(found.path),
    )
    losses = trained.losses
    apart = max(abs(a - b) for a, b in zip(losses, facts["next"], strict=True))
    return row | {"precision": facts["case"]["precision"], "next_losses": losses, "apart": apart}


def convert_and_load(table: Table) -> None:
    """Convert checkpoints, load them with the real programs on two ranks, and compare the next five losses."""
    loading, work = table.work / "loading", table.work
    known = [(f"{n:02}", *c) for n, c in enumerate(CONVERSIONS) if (work / c[0] / "facts.json").is_file()]
    known = [e for e in known if ("conversions", key_of("conversions", {"source": e[1], **e[4]})) not in table.rows]
    for number, source, case, change, options in known:
        place = loading / number
        program = {"dcp": "fsdp"}.get(options["to"], options["to"])
        done = json.dumps({"case": case, "change": change, "program": program, "code": table.code})
        if (place / "case.json").is_file() and (place / "case.json").read_text() == done:
            continue
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        options = {"ranks": 2, **options} if options["to"] == "deepspeed" else options
        # Accelerate saves no config, which gives the order of the optimizer's states
        model = str(work / source / "reference") if source.startswith("accelerate-groups") else None
        Checkpoint(foreign_in(work / source / "saved")[0].path).convert(place / "saved", model=model, **options)
        (place / "case.json").write_text(done)
    if known:
        run("benchmarks.foreign_reader", loading, 2)
    for number, source, _, _, options in known:
        wanted = json.loads((work / source / "facts.json").read_text())["next"]
        file = loading / number / "next.json"
        losses = json.loads(file.read_text()) if file.is_file() else []
        apart = max((abs(a - b) for a, b in zip(losses, wanted, strict=True)), default=None) if losses else None
        row = {"source": source, **options, "loaded_on": 2, "next_losses": losses, "apart": apart}
        table.measure("conversions", key_of("conversions", row), lambda row=row: row)


def cut(file: Path) -> None:
    """Lose the end of a file."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


def empty(file: Path) -> None:
    """Leave a file without content."""
    file.write_bytes(b"")


def zeros(file: Path) -> None:
    """Same size, all zeros: what a file system may leave after a power cut."""
    file.write_bytes(bytes(file.stat().st_size))


def flip(file: Path) -> None:
    """Change a bit in the middle of the largest tensor."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def lose(file: Path) -> None:
    """Remove a file."""
    file.unlink()


def text(file: Path) -> None:
    """Replace a file by a text, as a failed download does."""
    file.write_text("<html>404</html>")


def base_state(saved: dict[str, Any]) -> Any:
    """Return the state of torch's optimizer: a dict, or (elastic checkpoints) a list with the state of each group."""
    return saved.get("base_optimizer_state") or saved["optimizer_state_dict"]


def other_step(file: Path) -> None:
    """Set the optimizer's step to another one."""
    content = torch.load(file, weights_only=False)
    base = base_state(content["optimizer_state_dict"])
    for state in base if isinstance(base, list) else base["state"].values():
        state["step"] = state["step"] + 2
    torch.save(content, file)


def other_run(file: Path) -> None:
    """Take the file from a run with another learning rate and other weights."""
    content = torch.load(file, weights_only=False)
    saved = content["optimizer_state_dict"]
    base = base_state(saved)
    for group in [] if isinstance(base, list) else base["param_groups"]:
        group["lr"] = 0.5
    for flat in saved.get("single_partition_of_fp32_groups") or saved["fp32_flat_groups"]:
        flat.data.add_(1)
    torch.save(content, file)


def lost_states(file: Path) -> None:
    """Leave out the master weights of a rank."""
    content = torch.load(file, weights_only=False)
    saved = content["optimizer_state_dict"]
    key = "single_partition_of_fp32_groups" if "single_partition_of_fp32_groups" in saved else "fp32_flat_groups"
    saved[key] = [flat[:-2].clone() for flat in saved[key]]
    torch.save(content, file)


def wrong_latest(file: Path) -> None:
    """Let `latest` name a folder that was never finished."""
    root = file.parent.parent
    (root / "global_step9").mkdir()
    (root / "latest").write_text("global_step9")


DAMAGE: tuple[Callable[[Path], None], ...] = (cut, empty, zeros, flip, lose, text)
DAMAGE += (other_step, other_run, lost_states, wrong_latest)
DAMAGED = [f"ds-zero{stage}-{kind}" for stage in (1, 2, 3) for kind in ("fp32", "bf16", "fp16", "tied")]
DAMAGED += ["ds-zero2-offload", "ds-zero3-offload", "ds-zero2-round-robin", "ds-zero1-elastic", "ds-zero3-sub-groups"]
DAMAGED += [f"{name}-zero{stage}" for name in ("accelerate", "trainer", "lightning") for stage in (2, 3)]
DAMAGED += ["trainer-zero1", "trainer-zero2-lora", "trainer-zero3-lora"]
DAMAGED += ["dcp-fsdp2", "dcp-fsdp2-tied", "dcp-fsdp1-sharded", "accelerate-fsdp2", "torchtitan"]


def damage_all(table: Table) -> None:
    """Damage copies of checkpoints in ten ways (DCP: the six that need no DeepSpeed file)."""
    for name in (f"{case}-2" for case in DAMAGED):
        distributed = not any((table.work / name).rglob("*optim_states.pt"))
        pattern = "__1_0.distcp" if distributed else "*pp_rank_1_*optim_states.pt"
        for damage in DAMAGE[:6] if distributed else DAMAGE:
            if (table.work / name / "facts.json").is_file():
                key = f"{name} {damage.__name__}"
                table.measure("damage", key, partial(damaged, table.work, name, pattern, damage))


def damaged(work: Path, name: str, pattern: str, damage: Callable[[Path], None]) -> dict[str, Any]:
    """Damage a copy; `verify` must find nothing before, and name the file afterwards."""
    copy = work / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(foreign_in(work / name / "saved")[0].path, copy)
    before = Checkpoint(copy).verify().problems
    file = next(copy.rglob(pattern))
    damage(file)
    problems = Checkpoint(copy).verify().problems
    wanted = "latest" if damage is wrong_latest else file.relative_to(copy).as_posix()
    return {
        "checkpoint": name,
        "damage": damage.__name__,
        "found": [f"{p.file}: {p.kind} {p.message}".strip() for p in problems],
        "named": not before and any(p.file == wanted for p in problems),
    }


def summary(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Count what went right."""
    written = [row for row in rows["exports"] if row["result"] != "not written"]
    logits = [row["logits_apart"] for row in rows["exports"] if "logits_apart" in row]
    apart = [row["apart"] for row in rows["conversions"]]
    return {
        "checkpoints": len(written),
        "exports_equal_bit_for_bit": sum(row["result"] == "equal bit for bit" for row in written),
        "logits": len(logits),
        "logits_within_1e-6": sum(apart <= 1e-6 for apart in logits),
        "resumes": len(rows["resumes"]),
        "resumes_within_1e-5": sum(row["apart"] <= 1e-5 for row in rows["resumes"]),
        "conversions": len(apart),
        "loaded": sum(value is not None for value in apart),
        "loaded_within_1e-5": sum(value is not None and value <= 1e-5 for value in apart),
        "largest_difference_of_losses": max((value for value in apart if value is not None), default=None),
        "older": len(rows["older"]),
        "older_equal_bit_for_bit": sum(row["result"] == "equal bit for bit" for row in rows["older"]),
        "damaged_checkpoints": len({row["checkpoint"] for row in rows["damage"]}),
        "damaged": len(rows["damage"]),
        "damage_named": sum(row["named"] for row in rows["damage"]),
    }


if __name__ == "__main__":
    main()
