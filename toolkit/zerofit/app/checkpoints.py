"""Checkpoints of runs and of other programs, for `zerofit ckpt` and from Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zerofit.checkpoint.foreign import Foreign, foreign_at, foreign_in
from zerofit.checkpoint.model_folder import refuse_existing
from zerofit.checkpoint.store import (
    CheckpointEntry,
    Damage,
    Store,
    is_own,
    locate,
    manifest_of,
    quick_look,
    step_of,
    store_of,
    verify,
)
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.run_folder import Batch, Layout
from zerofit.spec.units import parse_bytes

if TYPE_CHECKING:
    from zerofit.checkpoint.conversion import ConvertResult
    from zerofit.checkpoint.diff import CheckpointDiff
    from zerofit.checkpoint.export import ExportResult
    from zerofit.checkpoint.foreign_facts import ForeignFacts
    from zerofit.spec.run import Precision

SHARD_SIZE = "1GiB"
ConvertFormat = Literal["universal", "deepspeed", "dcp", "hf"]
ADAPTERS = "adapter_config.json"  # of peft


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """One checkpoint of a list. Values that a damaged manifest lacks are None."""

    step: int
    path: Path
    samples: int | None
    created: str | None  # ISO 8601, UTC
    world_size: int | None
    bytes: int | None
    layout: Layout | None
    problems: list[Damage]
    program: str = "zerofit"  # program that wrote the checkpoint, e.g. "Trainer (DeepSpeed)"

    @property
    def whole(self) -> bool:
        """Whether the checkpoint has no known damage."""
        return not self.problems

    def to_dict(self) -> dict[str, object]:
        """Return one row of the data that `zerofit ckpt ls --json` prints."""
        return {**asdict(self), "path": str(self.path), "whole": self.whole}


@dataclass(frozen=True, kw_only=True)
class CheckpointList:
    """The checkpoints of a run, by step."""

    folder: Path
    checked: str  # "sizes" or "checksums"
    checkpoints: list[CheckpointSummary]

    def to_dict(self) -> dict[str, object]:
        """Return the data that `zerofit ckpt ls --json` prints."""
        rows = [row.to_dict() for row in self.checkpoints]
        return {"folder": str(self.folder), "checked": self.checked, "checkpoints": rows}


@dataclass(frozen=True, kw_only=True)
class CheckpointDescription(CheckpointSummary):
    """A checkpoint with its model, data and training settings."""

    model: str | None  # for other programs' checkpoints: the class in config.json
    model_args: Mapping[str, object]
    parameters: int
    task: str | None  # other programs save neither task, data, batch nor steps
    data: str | None
    precision: str | None
    optimizer: str | None
    batch: Batch | None
    steps: int | None  # total steps of the run
    figures: Mapping[str, object]  # of the last step: loss, lr, ...
    versions: dict[str, str]
    files: dict[str, int]  # bytes, by path within the checkpoint
    name: str = ""  # of other programs' checkpoints: "a checkpoint by DeepSpeed: ZeRO-3, 2 ranks, step 3"


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """Result of comparing every byte of a checkpoint with its checksum."""

    path: Path
    step: int | None
    problems: list[Damage]

    @property
    def ok(self) -> bool:
        """Whether the checkpoint has no damage."""
        return not self.problems

    def to_dict(self) -> dict[str, object]:
        """Return the data that `zerofit ckpt verify --json` prints."""
        return {"path": str(self.path), "step": self.step, "ok": self.ok, "problems": [vars(d) for d in self.problems]}


class Checkpoint:
    """A checkpoint: a `checkpoints/step-...` folder, or a run folder's newest complete one.

    The folder can also come from DeepSpeed, the Trainer, Accelerate, Lightning or PyTorch DCP. No method needs a GPU.
    No method needs the ranks or the layout of the run that wrote the checkpoint. No method runs code from the
    checkpoint. `on_event` gets progress and warnings. Bad input raises UserError.

    >>> import zerofit as zf
    >>> result = zf.train(zf.Run(model="mlp", data="digits", steps=20, ranks=1, output="runs/mlp"))
    >>> checkpoint = zf.Checkpoint.latest(result.run_dir)
    >>> checkpoint.verify().ok, checkpoint.describe().step
    (True, 20)
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r})"

    @classmethod
    def latest(cls, run_folder: str | Path, *, on_event: OnEvent | None = None) -> Checkpoint:
        """Return the run's newest checkpoint whose files all have the right size.

        `verify` also checks their contents.
        """
        return cls(locate(Path(run_folder), report=Reporter(on_event)))

    @staticmethod
    def list(run_folder: str | Path, *, deep: bool = False, on_event: OnEvent | None = None) -> CheckpointList:
        """List a run's checkpoints, including damaged ones.

        `deep`: check every file against its checksum.
        """
        path, report, rows = Path(run_folder), Reporter(on_event), []
        if not is_own(path) and (all_foreign := foreign_in(path)):
            report.status("importing torch ...")
            from zerofit.checkpoint.foreign_facts import facts_of, verify_foreign

            for facts in map(facts_of, all_foreign):
                damage = facts.damage or (verify_foreign(facts.found, report.status) if deep else [])
                rows.append(_foreign_summary(facts, damage))
        else:
            store = store_of(path, "RUN") or Store(path.absolute().parent)
            path = store.folder
            for entry in store.entries():
                damage = entry.damage or (verify(entry.path, report.status) if deep else [])
                rows.append(_summary(entry, damage))
        return CheckpointList(folder=path, checked="checksums" if deep else "sizes", checkpoints=rows)

    def describe(self, *, on_event: OnEvent | None = None) -> CheckpointDescription:
        """Return the checkpoint's step, model, layout, precision, versions and size."""
        if not is_own(self.path) and (foreign := foreign_at(self.path)):
            return _foreign_description(foreign)
        path = locate(self.path, report=Reporter(on_event))
        manifest = manifest_of(path)
        job, facts, run = manifest.job, manifest.job.facts, manifest.job.run
        entry = CheckpointEntry(step=manifest.step, path=path, manifest=manifest, damage=[])
        return CheckpointDescription(
            **vars(_summary(entry, [])),
            **{name: getattr(run, name) for name in ("model", "model_args", "data", "precision", "optimizer")},
            parameters=facts.parameters,
            task=facts.task,
            batch=job.batch,
            steps=job.steps,
            figures=manifest.figures,
            versions=manifest.versions,
            files={name: mark.bytes for name, mark in manifest.files.items()},
        )

    def verify(self, *, on_event: OnEvent | None = None) -> VerifyResult:
        """Compare every file with its checksum.

        In a run folder, check the newest checkpoint, damaged or not.
        """
        if not is_own(self.path) and (foreign := foreign_at(self.path)):
            from zerofit.checkpoint.foreign_facts import facts_of, verify_foreign

            damage = verify_foreign(foreign, Reporter(on_event).status)
            return VerifyResult(path=foreign.path, step=facts_of(foreign).step, problems=damage)
        store = store_of(self.path)
        # `locate` would skip a damaged checkpoint, but here the damage of the newest one is the answer.
        path = self.path if store is None else store.entries()[-1].path
        manifest, _ = quick_look(path)
        damage = verify(path, Reporter(on_event).status)
        return VerifyResult(path=path, step=manifest.step if manifest else step_of(path.absolute()), problems=damage)

    def export(
        self,
        out: str | Path,
        *,
        dtype: Precision | None = None,
        max_shard_size: str = SHARD_SIZE,
        merge: bool = False,
        model: str | Path | None = None,
        repair: bool = False,
        trust_model_code: bool = False,
        on_event: OnEvent | None = None,
    ) -> ExportResult:
        """Verify every byte, then write a transformers model as a folder, or another as one file.

        The file of another model is a safetensors file. Adapters are written in peft's format. `merge`: merge the
        adapters into the full model. With `merge`, this checkpoint may also be a folder of adapters, or a run
        folder without checkpoints. `dtype`: type of the parameters (default: the run's precision).
        `max_shard_size`: size limit of each file of a transformers model. `model`: the folder with config.json and
        the tokenizer, if another program's checkpoint lacks them. `repair`: if the file of a rank is lost, use its
        weights from the 16-bit copy in the checkpoint. A custom model `package.module:callable` is imported and
        called only with `trust_model_code`.
        """
        shard_bytes, report = parse_bytes(max_shard_size, "--max-shard-size"), Reporter(on_event)
        report.status("importing torch ...")  # here and below: takes seconds, so only methods that need it do it
        from zerofit.checkpoint.adapters import adapters_of
        from zerofit.checkpoint.export import export, export_foreign

        refuse_existing(Path(out))
        merged = merge and (self.path / ADAPTERS).is_file()
        if not is_own(self.path) and not merged and (foreign := foreign_at(self.path)):
            config = Path(model) if model is not None else None
            return export_foreign(foreign, Path(out), dtype, shard_bytes, config=config, repair=repair, report=report)
        adapters = adapters_of(self.path) if merge else None
        path = adapters or locate(self.path, deep=True, report=report)
        options = {"merge": merge, "trust_model_code": trust_model_code, "report": report}
        return export(path, Path(out), dtype, shard_bytes, **options)

    def convert(
        self,
        out: str | Path,
        *,
        to: ConvertFormat = "universal",
        ranks: int | None = None,
        stage: int | None = None,
        dtype: Precision | None = None,
        model: str | Path | None = None,
        repair: bool = False,
        on_event: OnEvent | None = None,
    ) -> ConvertResult:
        """Write the checkpoint for another program.

        `to` is the format: "universal" (a DeepSpeed engine on any number of ranks), "deepspeed" (an engine on `ranks`
        at ZeRO `stage`, without further settings), "dcp" (FSDP2 and other programs with PyTorch's distributed
        checkpoints) or "hf" (weights only, like `export`). `dtype`: type of the weights, for "deepspeed" and "hf"
        (default: as in training).
        `model`, `repair`: as in `export`; the optimizer states of the lost rank become zero.
        """
        report = Reporter(on_event)
        if to == "deepspeed" and (ranks is None or stage is None or ranks < 1 or not 0 <= stage <= 3):
            message = f"--to deepspeed needs --ranks (1 or more) and --stage (0 to 3); got {ranks} and {stage}"
            hint = "the number of processes and the ZeRO stage of the run that loads it"
            raise UserError(Problem(kind="usage", message=message, hint=hint, where="--ranks"))
        problems, given = Problems(), {"--ranks": ranks, "--stage": stage, "--dtype": dtype}
        readers = {"--ranks": ("deepspeed",), "--stage": ("deepspeed",), "--dtype": ("deepspeed", "hf")}
        for flag, formats in readers.items():
            if given[flag] is not None and to not in formats:
                why = "which has the float32 weights" if flag == "--dtype" else "which any number of ranks loads"
                problems.add("usage", f"{flag} with --to {to}, {why}", f"remove {flag}", flag)
        problems.raise_if_any()
        if to == "hf":
            result = self.export(out, dtype=dtype, model=model, repair=repair, on_event=on_event)
            # `hf` is an export with the result of a conversion.
            size = sum((result.out / file).stat().st_size for file in result.files)
            from zerofit.checkpoint.conversion import ConvertResult

            return ConvertResult(out=result.out, tag="", parameters=result.parameters, bytes=size, format=to)
        report.status("importing torch ...")
        from zerofit.checkpoint.deepspeed_writer import Target, convert_to
        from zerofit.checkpoint.universal import convert
        from zerofit.spec.run import Run

        refuse_existing(Path(out))
        path, run = locate(self.path, deep=True, report=report), Run(model=str(model)) if model else None
        if to == "universal":
            return convert(path, Path(out), report, run, repair)
        target = Target(ranks=ranks or 1, stage=stage or 0) if to == "deepspeed" else None
        return convert_to(path, Path(out), target, dtype, repair=repair, run=run, report=report)

    def diff(
        self, other: Checkpoint | str | Path, *, states: bool = False, on_event: OnEvent | None = None
    ) -> CheckpointDiff:
        """Compare tensors with another checkpoint, an exported folder or a safetensors file.

        `states`: compare the optimizer states, too; only checkpoints have them.
        """
        report = Reporter(on_event)
        report.status("importing torch ...")
        from zerofit.checkpoint.diff import diff

        return diff(self.path, other.path if isinstance(other, Checkpoint) else Path(other), states, report)


def _foreign_summary(facts: ForeignFacts, damage: list[Damage]) -> CheckpointSummary:
    return CheckpointSummary(
        step=facts.step if facts.step is not None else 0,
        path=facts.found.path,
        samples=facts.samples,
        created=facts.created,
        world_size=facts.ranks,
        bytes=facts.bytes,
        layout=facts.layout,
        problems=damage,
        program=facts.found.program,
    )


def _foreign_description(foreign: Foreign) -> CheckpointDescription:
    from zerofit.checkpoint.foreign_facts import facts_of
    from zerofit.checkpoint.full_state import FullState

    facts, state = facts_of(foreign), FullState(foreign.path)
    return CheckpointDescription(
        **vars(_foreign_summary(facts, facts.damage)),
        name=facts.name,
        model=facts.model,
        model_args={},
        parameters=sum(state.numel(name) for name in state.names),
        task=None,
        data=None,
        precision=facts.precision,
        optimizer=facts.optimizer,
        batch=None,
        steps=None,
        figures={},
        versions=facts.versions,
        files=facts.files,
    )


def _summary(entry: CheckpointEntry, damage: list[Damage]) -> CheckpointSummary:
    manifest = entry.manifest  # None if it is damaged
    return CheckpointSummary(
        step=entry.step,
        path=entry.path,
        samples=manifest and manifest.samples,
        created=manifest and manifest.created,
        world_size=manifest and manifest.world_size,
        bytes=manifest and manifest.total_bytes,
        layout=manifest and manifest.job.layout,
        problems=damage,
    )
