"""Facts about another program's checkpoint, and its damage."""

from __future__ import annotations

import errno
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.deepspeed_files import DeepSpeedFiles, flat_groups, step_count
from zerofit.checkpoint.direct_file import PIECE, UncachedReader
from zerofit.checkpoint.direct_io import equal
from zerofit.checkpoint.foreign import METADATA, OPTIM_STATES, Foreign, latest_of, state_dict_files, weight_files
from zerofit.checkpoint.full_state import FullState
from zerofit.checkpoint.index import MASTER, Shard, expected_content
from zerofit.checkpoint.store import Damage
from zerofit.checkpoint.torch_files import distributed_folders
from zerofit.spec.errors import UserError
from zerofit.spec.foreign import Unreadable, read_json
from zerofit.spec.run_folder import Layout
from zerofit.spec.units import counted

PRECISIONS = ("bf16", "fp16")  # sections of a DeepSpeed JSON
TORCH_FILES = (".pt", ".bin", ".pth", ".ckpt")


@dataclass(frozen=True, kw_only=True)
class ForeignFacts:
    """Facts from the metadata in the files. A fact is None if no file has it."""

    found: Foreign
    layout: Layout | None = None  # by DeepSpeed
    ranks: int | None = None
    step: int | None = None
    samples: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    model: str | None = None  # the class in config.json
    versions: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    files: dict[str, int] = field(default_factory=dict)
    created: str = ""  # of the newest file, ISO 8601, UTC
    damage: list[Damage] = field(default_factory=list)

    @property
    def name(self) -> str:
        """A description, e.g. "a DeepSpeed checkpoint of ZeRO-3, 2 ranks, step 3"."""
        zero = f"ZeRO-{self.layout.zero_stage}" if self.layout else None
        ranks = f"{self.ranks} rank" + "s" * (self.ranks != 1) if self.ranks else None
        step = f"step {self.step}" if self.step is not None else None
        facts = ", ".join(text for text in (zero, ranks, step) if text)
        return f"a checkpoint by {self.found.program}" + (f": {facts}" if facts else "")


def facts_of(found: Foreign) -> ForeignFacts:
    """Read the facts of a checkpoint. Unreadable files are reported as damage."""
    root = found.root
    files = [file for file in sorted(root.rglob("*")) if file.is_file()] if root == found.path else [found.path]
    listed = {file.relative_to(root).as_posix(): file.stat() for file in files}
    newest = max((stat.st_mtime for stat in listed.values()), default=0.0)
    common: dict[str, Any] = {
        "found": found,
        "model": _model_class(found),
        "bytes": sum(stat.st_size for stat in listed.values()),
        "files": {name: stat.st_size for name, stat in listed.items()},
        "created": datetime.fromtimestamp(newest, UTC).isoformat(timespec="seconds"),
        "step": found.step,
    }
    try:
        if found.format == "deepspeed":
            with expected_content(root):
                return ForeignFacts(**common | _deepspeed_facts(found))
        state = FullState(found.path)
        step = state.counters.get("global_steps") or state.counters.get("step") or found.step
        ranks = {"dcp": len(list(found.files.glob("__*_0.distcp")))}.get(found.format)
        return ForeignFacts(**common | {"step": step, "ranks": ranks})
    except UserError as error:
        return ForeignFacts(**common, damage=_damage_of(error, root))


def _damage_of(error: UserError, root: Path) -> list[Damage]:
    kinds = {"missing-file": "missing", "unsafe-file": "unsafe"}
    kinds |= dict.fromkeys(("damaged-file", "unreadable-file"), "unreadable")
    files = sorted(file for file in root.rglob("*") if file.is_file())
    damage = []
    for problem in error.problems:  # the file of the error's place, or the file in its message
        named = next((str(file) for file in files if file.name in problem.message), problem.where)
        kind = kinds.get(problem.kind, "incomplete")
        damage.append(Damage(file=_file_in(named, root), kind=kind, message=problem.message))
    return damage


def _file_in(where: str | None, root: Path) -> str:
    path = Path(where or ".")
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else "."


def _model_class(found: Foreign) -> str | None:
    folder = found.config_folder
    try:
        named = read_json(folder / "config.json").get("architectures") if folder else None
    except (OSError, Unreadable, AttributeError):
        return None
    return str(named[0]) if isinstance(named, list) and named else None


def _deepspeed_facts(found: Foreign) -> dict[str, Any]:
    files = DeepSpeedFiles.of(found)
    _, state = files.model(files.model_ranks[0])
    config = state.get("ds_config") or {}
    optimizer = files.load(next(iter(files.optimizers.values())))["optimizer_state_dict"] if files.optimizers else {}
    stage = optimizer.get("zero_stage", (config.get("zero_optimization") or {}).get("stage"))
    if stage is None:  # stage 0, or DeepSpeed's BF16_Optimizer (stage 1)
        stage = 1 if files.optimizers else 0
    precision = next((name for name in PRECISIONS if (config.get(name) or {}).get("enabled") is True), "fp32")
    named = (config.get("optimizer") or {}).get("type")
    dp, tp = int(state.get("dp_world_size") or 1), files.tensor_ranks
    stage = 3 if found.stage_three else stage
    layout = Layout(dp=dp, tp=tp, pp=len(files.model_ranks) // tp, zero_stage=stage)
    return {
        "layout": layout,
        "ranks": layout.world_size,
        "step": int(state.get("global_steps") or 0),
        "samples": state.get("global_samples"),
        "precision": precision if config else None,
        "optimizer": str(named) if named else None,
        "versions": {"deepspeed": str(state["ds_version"])} if state.get("ds_version") else {},
    }


def verify_foreign(found: Foreign, progress: Callable[[str], None] | None = None) -> list[Damage]:
    """Read every byte of a checkpoint. Return the damage.

    Damage is a file that is missing, truncated, changed, or from another step or run. torch's files have a CRC-32 of
    each tensor. Safetensors files have none: only their header and size are checked.
    """
    damage = _latest_damage(found)
    root = found.root
    for file in sorted(found.files.rglob("*")) if found.files.is_dir() else state_dict_files(found):
        if progress:
            progress(f"verifying {file.name}")
        if file.suffix in TORCH_FILES and file.is_file():  # and no pipe
            damage += _torch_file_damage(file, file.relative_to(root).as_posix())
    try:
        with expected_content(root):
            if found.format == "dcp":
                for folder in distributed_folders(found):
                    own = _distributed_damage(folder)
                    damage += [replace(d, file=(folder / d.file).relative_to(root).as_posix()) for d in own]
            elif found.format == "deepspeed" and not damage:
                damage += _rank_damage(found)
        if damage:
            return damage
        state = FullState(found.path)
        return _mixed_weights(found, state) if found.format == "deepspeed" else []
    except UserError as error:
        return damage + _damage_of(error, root)


def _latest_damage(found: Foreign) -> list[Damage]:
    """Return the fault of a `latest` file that names a folder without a checkpoint."""
    latest = latest_of(found.path) if found.path.is_dir() else None
    if latest is None or found.files in (found.path / latest, found.path):
        return []
    # for a damaged name, which may be too long, Path.is_dir raises an error
    what = "is incomplete" if latest and os.path.isdir(found.path / latest) else "does not exist"
    message = f"it names {latest[:200]!r}, which {what}; the newest with files is {found.files.name}"
    return [Damage(file="latest", kind="misplaced", message=message)]


def _torch_file_damage(file: Path, name: str) -> list[Damage]:
    try:
        with UncachedReader(file) as opened:
            bad = _changed_records(opened)
    except Exception as error:  # a damaged file can raise anything
        if cause := _system_error(error):
            return [Damage(file=name, kind="unreadable", message=cause)]
        if file.stat().st_size and file.open("rb").read(2) not in (b"PK", b"\0\0"):
            return []  # torch's older format: a pickle, which is parsed later
        return [Damage(file=name, kind="truncated", message=f"it has {file.stat().st_size} bytes: {error}")]
    return [
        Damage(file=name, kind="changed", message=f"the checksum of {_tensor_at(file, record)} differs")
        for record in bad[:1]
    ]


def _system_error(error: Exception) -> str | None:
    """Return why the system cannot read a file; None if the file's content is wrong.

    EINVAL counts as wrong content: the file contains an invalid offset, and a read at this offset fails.
    """
    return error.strerror if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL) else None


def _changed_records(opened: UncachedReader) -> list[str]:
    """Return a torch file's records with another CRC-32. Raises BadZipFile if it is cut."""
    bad, archive = [], zipfile.ZipFile(cast("IO[bytes]", opened))
    for info in archive.infolist():
        try:
            with archive.open(info) as record:  # at the end of a record, zipfile compares its CRC-32
                while record.read(1 << 20):
                    pass
        except zipfile.BadZipFile as error:
            if "CRC" not in str(error):
                raise
            bad.append(info.filename)
    # torch.serialization.set_crc32_options(False) writes other numbers instead of these checksums
    written = {
        i.filename for i in archive.infolist() if i.file_size and ("/data/" in i.filename or "data.pkl" in i.filename)
    }
    return [] if written <= {*bad} else bad


def _tensor_at(file: Path, record: str) -> str:
    """Return the keys of the tensor in a record of a torch file, e.g. "module.lm_head.weight"."""
    try:
        content = safe_load.load(file)
        with zipfile.ZipFile(file) as archive:
            records = [info for info in archive.infolist() if "/data/" in info.filename and info.file_size]
    except (UserError, zipfile.BadZipFile, OSError):
        return record
    # memory-mapped storages have the order of their records in the file
    storages: dict[int, str] = {}
    for keys, tensor in _tensors(content, ""):
        if tensor.numel():
            storages.setdefault(tensor.untyped_storage().data_ptr(), keys)
    records.sort(key=lambda info: info.header_offset)
    named = dict(zip([info.filename for info in records], [storages[key] for key in sorted(storages)], strict=False))
    return named.get(record, record)


def _tensors(value: object, keys: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield keys, value
    elif isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(inner, f"{keys}.{key}" if keys else str(key))


def _distributed_damage(folder: Path) -> list[Damage]:
    """Check the place of every tensor in a folder of a distributed checkpoint."""
    file = folder / METADATA
    if not file.is_file():
        return [Damage(file=METADATA, kind="missing", message="rank 0 writes it last: the checkpoint is incomplete")]
    try:
        stored = safe_load.load_metadata(file).storage_data
    except UserError as error:
        return [replace(damage, file=METADATA) for damage in _damage_of(error, folder)]
    # The metadata has the place of each tensor. So a cut file shows by its size, and a changed one by a chunk's
    # checksum.
    damage: dict[str, Damage] = {}
    for key, where in stored.items():
        path, name = folder / where.relative_path, where.relative_path
        if name in damage:  # one fault of a file is enough
            continue
        if not path.is_file():
            lost = [other.fqn for other, place in stored.items() if place.relative_path == name]
            message = f"{counted(len(lost), 'tensor')} cannot be read without this file, the first is {lost[0]}"
            damage[name] = Damage(file=name, kind="missing", message=message)
        elif not 0 <= where.offset <= where.offset + where.length <= path.stat().st_size:
            message = f"it has {path.stat().st_size} bytes, but {key.fqn} ends at byte {where.offset + where.length}"
            damage[name] = Damage(file=name, kind="truncated", message=message)
        else:
            start, cause = b"", None
            try:
                with UncachedReader(path, where.offset, where.length) as part:
                    start = part.read(2)
                    bad = _changed_records(part) if start == b"PK" else []
            except Exception as error:  # a damaged file can raise anything
                bad, cause = [str(error)], _system_error(error)
            tensor = getattr(key, "fqn", "?")
            if cause:
                damage[name] = Damage(file=name, kind="unreadable", message=cause)
            elif bad or start not in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05"):
                damage[name] = Damage(file=name, kind="changed", message=f"the checksum of {tensor} differs")
    return list(damage.values())


def _rank_damage(found: Foreign) -> list[Damage]:
    files = DeepSpeedFiles.of(found)
    damage = _missing_ranks(files, found)
    plain = sorted(found.files.glob("mp_rank_*_model_states.pt"))
    if found.stage_three and plain:
        message = "this file is from a run at ZeRO 0 to 2, but the other files are from a run at ZeRO 3"
        damage.append(Damage(file=_name(files, plain[0].name), kind="mixed", message=message))
    facts: dict[str, dict[str, object]] = {}
    for name in (*files.models.values(), *files.optimizers.values()):
        content = files.load(name)
        own = content.get("optimizer_state_dict") if OPTIM_STATES.fullmatch(name) else None
        base = own and (own.get("base_optimizer_state") or own.get("optimizer_state_dict"))
        groups = base.get("param_groups", []) if isinstance(base, dict) else []
        facts[name] = {
            "step": content.get("global_steps") if own is None else step_count(own),
            "release": content.get("ds_version"),
            "DeepSpeed JSON": repr(content.get("ds_config")),
            "param_shapes": repr(content.get("param_shapes")) if own is None and len(files.model_ranks) == 1 else None,
            "learning rate": repr([group.get("lr") for group in groups]) if own else None,
        }
    # a file with another value than most files is from another step or run
    # Model and optimizer files have different facts, so each kind is compared on its own.
    for kinds in (list(files.models.values()), list(files.optimizers.values())):
        for fact in ("step", "release", "DeepSpeed JSON", "param_shapes", "learning rate"):
            values = Counter(facts[name][fact] for name in kinds)
            usual = values.most_common(1)[0][0] if values else None
            for name in kinds:
                if facts[name][fact] != usual:
                    difference = "not the same as in the other files"
                    if fact == "step":
                        difference = f"{facts[name][fact]}, not {usual}"
                    damage.append(Damage(file=_name(files, name), kind="mixed", message=f"{fact}: {difference}"))
    return damage


def _name(files: DeepSpeedFiles, name: str) -> str:
    return (files.folder / name).relative_to(files.root).as_posix()


def _missing_ranks(files: DeepSpeedFiles, found: Foreign) -> list[Damage]:
    damage, remedy = [], None
    for mp in files.model_ranks:
        known = next((name for (rank, _), name in files.models.items() if rank == mp), None)
        if known is None:
            damage.append(Damage(file=_name(files, f"mp_rank_{mp:02}_model_states.pt"), kind="missing"))
            continue
        state = files.load(known)
        ranks = int(state.get("dp_world_size") or 1)
        partitioned = state.get("param_shapes") is not None
        known = [name for (rank, _), name in files.optimizers.items() if rank == mp]
        example = known[0] if known else f"zero_pp_rank_0_mp_rank_{mp:02}_optim_states.pt"
        for dp in range(ranks):
            if found.stage_three and (mp, dp) not in files.models:
                name = f"zero_pp_rank_{dp}_mp_rank_{mp:02}_model_states.pt"
                damage.append(Damage(file=_name(files, name), kind="missing", message=f"of rank {dp}"))
            if partitioned and (mp, dp) not in files.optimizers:
                name = re.sub(r"pp_rank_\d+_", f"pp_rank_{dp}_", example)
                if remedy is None:  # the same for all ranks
                    remedy = _remedy(found)
                message = _lost(state, dp, ranks, found) + remedy
                damage.append(Damage(file=_name(files, name), kind="missing", message=message))
    return damage


def _lost(state: dict[str, object], dp: int, ranks: int, found: Foreign) -> str:
    groups = flat_groups(state)
    if found.stage_three:
        count = sum(len(group) for group in groups)
        return f"1/{ranks} of each of {counted(count, 'parameter')}, and of their optimizer states, are lost"
    ranges = []
    for group in groups:  # each is split over all ranks
        share = -(-sum(shape.numel() for shape in group.values()) // ranks)
        offset, lost = 0, []
        for name, shape in group.items():
            if offset < share * (dp + 1) and offset + shape.numel() > share * dp:
                lost.append(name)
            offset += shape.numel()
        ranges += [f"{lost[0]} to {lost[-1]}"] if lost else []
    shown = ", ".join(ranges) or "no parameter"
    return f"master weights and optimizer states of about 1/{ranks} of the parameters are lost ({shown})"


def _remedy(found: Foreign) -> str:
    """Return the end of a message about lost optimizer files: what the user can do.

    The function tries to repair the checkpoint, to see which advice applies.
    """
    try:
        state = FullState(found.path, repair=True)
    except UserError:
        return ""
    copy = weight_files(found.path)[0].name if found.stage_three else "the model states file"
    if state.repaired:
        repair = "--repair uses these weights, and sets lost optimizer states to zero"
        return f"; {copy} has all weights in 16 bits: {repair}"
    return f"; `zerofit ckpt export` writes the 16-bit weights of {copy}, but no run can resume from them"


# Their master weights differ from the model files' weights.
def _mixed_weights(found: Foreign, state: FullState) -> list[Damage]:
    """Find files of other runs or steps at ZeRO 1 and 2."""
    files, damage = DeepSpeedFiles.of(found), {}
    if found.stage_three or not files.optimizers:
        return []
    for mp in files.model_ranks:
        module = files.model(mp)[1].get("module") or {}
        for name in state.names:
            saved = module.get(name)
            if not isinstance(saved, Tensor) or saved.numel() == 0:
                continue
            shares = state.shares(name)
            # A weight that all tensor parallel ranks have in full has only one share.
            share = shares[mp % files.tensor_ranks % len(shares)]
            for shard in share:
                file = shard.where[MASTER].file
                if file in damage or not OPTIM_STATES.fullmatch(Path(file).name):
                    continue
                if _differ(state, share, shard, saved):
                    other = files.model(mp)[0]
                    message = f"master weights of {name} differ from {other}; the files are of different steps or runs"
                    damage[file] = Damage(file=file, kind="mixed", message=message)
    return list(damage.values())


def _differ(state: FullState, share: list[Shard], shard: Shard, saved: Tensor) -> bool:
    """Return whether a stretch of master weights differs from the saved weights.

    The master weights are rounded to the type of the saved weights first.
    """
    flat = saved.reshape(-1)[shard.start : shard.start + shard.numel]
    offset = shard.start
    # In pieces, since a parameter's masters may need more memory than this machine has.
    for stored in flat.split(PIECE // 4):
        weights, masters = torch.empty_like(stored), torch.empty_like(stored)
        safe_load.copy_numbers(weights, stored)
        state.fill_share(share, MASTER, masters, offset)
        if not equal(weights, masters):
            return True
        offset += len(stored)
    return False
