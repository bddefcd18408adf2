"""Checkpoints of other programs, recognized by the names of their files.

    saved/latest, saved/global_step3/         DeepSpeed; also in the Trainer's checkpoint-3/, in Lightning's NAME.ckpt/
    saved/latest, saved/pytorch_model/        DeepSpeed by Accelerate
    saved/.metadata, saved/__0_0.distcp       PyTorch DCP; by Accelerate in saved/pytorch_model_fsdp_0/ and optimizer_0/
    saved/model.safetensors, optimizer.pt     the Trainer or Accelerate with plain data parallelism
    saved/pytorch_model_fsdp.bin, NAME.pt     a full state dict

Importing this module imports no torch. `full_state` builds the index.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zerofit.spec.foreign import CONVERSIONS

Format = Literal["deepspeed", "universal", "dcp", "torch", "safetensors"]
MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
# In bf16 the names begin with bf16_ (DeepSpeed's runtime/engine.py, `_get_zero_ckpt_prefix`). Its
# checkpoint/constants.py also has the prefix fp16_.
OPTIM_STATES = re.compile(r"(?:[bf]p?f?16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
METADATA = ".metadata"  # of PyTorch DCP
NUMBERED = re.compile(r"(?:.*[-_=])?(?:global_step|checkpoint-|step[-=]?)(\d+)(?:\D.*)?")
STATE_DICTS = ("pytorch_model_fsdp*.bin", "pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
WITHOUT_WEIGHTS = ("training_args.bin", "scheduler.pt", "scaler.pt", "optimizer.pt", "optimizer.bin")
FILES: dict[str, Format] = {".safetensors": "safetensors", **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), "torch")}
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
# what zerofit does not read: the first bytes of files, and names of files in folders
MAGIC = {
    b"GGUF": f"a GGUF file; {CONVERSIONS['*.gguf']}",
    b"\x89HDF": "an HDF5 file (Keras)",
    b"\x1f\x8b": "a gzip archive; unpack it first",
    b"version https://git-lfs": "a pointer of Git LFS without the file; run `git lfs pull`",
    b"<": "a web page and not the file; download it again",
}
OTHERS = {
    "adapter_config.json": "a folder of peft's adapters: `ckpt export PATH OUT --merge` writes the full model",
    "*.gguf": f"a GGUF file, or a folder with one; {CONVERSIONS['*.gguf']}",
    "_CHECKPOINT_METADATA": "an Orbax checkpoint (JAX)",
    "*/_CHECKPOINT_METADATA": "a folder with an Orbax checkpoint (JAX)",
    "flax_model*.msgpack": "a Flax model (JAX)",
    "*.data-?????-of-?????": "a TensorFlow checkpoint",
    "tf_model*.h5": "a TensorFlow model",
    "*.onnx": "an ONNX model",
}
ARCHIVES = {"constants.pkl": "a TorchScript program, and not a state dict", ".npy": "a NumPy archive"}
SHARD = re.compile(r"(.+-)(\d{5})(-of-(\d{5})\.\w+)")
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A checkpoint of another program. No file has been opened yet."""

    path: Path  # the path that a user names: the folder with the configs, or a file
    files: Path  # the folder or file with the tensors
    format: Format
    program: str  # for messages: "DeepSpeed", "Trainer (DeepSpeed)", ...
    step: int | None = None  # from the names of the files

    @property
    def name(self) -> str:
        """A description from the names of its files, e.g. "a DeepSpeed checkpoint, step 3"."""
        return f"a checkpoint by {self.program}" + (f", step {self.step}" if self.step is not None else "")

    @property
    def root(self) -> Path:
        """`path` if it is a folder; otherwise the folder that contains this file."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def config_folder(self) -> Path | None:
        """The folder with config.json and the tokenizer: the checkpoint's folder or its parent."""
        return next((f for f in (self.root, self.root.parent) if (f / "config.json").is_file()), None)

    @property
    def stage_three(self) -> bool:
        """Whether DeepSpeed has partitioned the weights."""
        return any(self.files.glob("zero_pp_rank_*_model_states.pt"))


def foreign_at(path: Path) -> Foreign | None:
    """Return another program's checkpoint: the one that `latest` names, else the newest."""
    found = foreign_in(path)
    latest = latest_of(path) if path.is_dir() else None
    named = [entry for entry in found if latest is not None and entry.files == path / latest]
    return (named or found or [None])[-1]


def foreign_in(path: Path) -> list[Foreign]:
    """List another program's checkpoints in a folder, sorted by step, or a single file."""
    if path.is_file():
        form = FILES.get(path.suffix)
        return [Foreign(path=path, files=path, format=form, program="a state dict")] if form else []
    if not path.is_dir():
        return []
    found = list(_in_folder(path)) or [entry for child in _children(path) for entry in _in_folder(child)]
    return sorted(found, key=lambda entry: (-1 if entry.step is None else entry.step, entry.files.name))


def _in_folder(path: Path) -> Iterator[Foreign]:
    trainer = (path / "trainer_state.json").is_file()
    accelerate = any(path.glob("random_states_*.pkl"))
    by = "Trainer (%s)" if trainer else "Accelerate (%s)" if accelerate else "%s"
    folders = [path, *_children(path)]
    # The order of the formats matters: next to DeepSpeed's files, the Trainer also writes weights in 16 bits.
    tags = [folder for folder in folders if _has_states(folder) and not _is_universal(folder)]
    for tag in tags:
        # Lightning names the tag "checkpoint", in a folder that is named like a file
        lightning = path.suffix == ".ckpt" or tag.name == "checkpoint"
        program = "Lightning (DeepSpeed)" if lightning else by % "DeepSpeed"
        root = path if len(tags) == 1 else tag  # one of several checkpoints is named by its own folder
        yield Foreign(path=root, files=tag, format="deepspeed", program=program, step=_step(tag, path))
    universal = [] if tags else [folder for folder in folders if _is_universal(folder)]
    for tag in universal:
        root = path if len(universal) == 1 else tag
        yield Foreign(path=root, files=tag, format="universal", program="DeepSpeed universal", step=_step(tag, path))
    if tags or universal:
        return
    sharded = next((folder for folder in folders if _is_distributed_model(path, folder)), None)
    if sharded:
        program = by % "PyTorch DCP" if sharded == path or not sharded.name.startswith("pytorch_model_fsdp") else ""
        yield Foreign(
            path=path, files=sharded, format="dcp", program=program or "Accelerate (FSDP)", step=_step(sharded, path)
        )
    elif any(path.glob("*.safetensors")) and not (path / "adapter_config.json").is_file():
        with_states = any((path / name).is_file() for name in OPTIMIZERS)
        program = by % ("plain data parallelism" if with_states else "weights only")
        yield Foreign(path=path, files=path, format="safetensors", program=program, step=_step(path))
    else:
        kinds = (_weights_in(path, pattern) for pattern in STATE_DICTS)
        if files := next((files for files in kinds if files), None):
            file = max(files, key=lambda file: _step(file) or 0)  # the first, if no name has a step
            program = "Accelerate (FSDP, full)" if file.name.startswith("pytorch_model_fsdp") else by % "a state dict"
            yield Foreign(path=path, files=file, format="torch", program=program, step=_step(file, path))


def _weights_in(folder: Path, pattern: str) -> list[Path]:
    files = (file for file in sorted(folder.glob(pattern)) if file.is_file() and file.name not in WITHOUT_WEIGHTS)
    return [file for file in files if not file.name.startswith(("rng_state", "random_states"))]


def _children(path: Path) -> list[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def _has_states(folder: Path) -> bool:
    return any(MODEL_STATES.fullmatch(file.name) or OPTIM_STATES.fullmatch(file.name) for file in folder.glob("*.pt"))


def _is_universal(tag: Path) -> bool:
    return (tag / "zero").is_dir() and any(tag.glob("zero/*/fp32.pt"))


def _is_distributed_model(path: Path, child: Path) -> bool:
    # the folder of an Accelerate checkpoint has the model and the optimizer in folders of their own
    may_be_model = child == path or child.name.startswith("pytorch_model_fsdp")
    return may_be_model and ((child / METADATA).is_file() or any(child.glob("__*_*.distcp")))


def weight_files(folder: Path) -> list[Path]:
    """List weights named as by `save_pretrained` and DeepSpeed's `save_16bit_model`."""
    return [file for pattern in WEIGHTS for file in sorted(folder.glob(pattern))]


def state_dict_files(found: Foreign) -> list[Path]:
    """List the files of a state dict, also missing ones if the names show their number."""
    files = [found.files]
    if found.files.is_dir():
        tensors = sorted(found.files.glob("*.safetensors"))
        files = [file for file in weight_files(found.files) if file in tensors] or tensors
    match = SHARD.fullmatch(files[0].name)
    if not match:
        return files
    return [files[0].with_name(f"{match[1]}{number:05}{match[3]}") for number in range(1, int(match[4]) + 1)]


def other_format(path: Path) -> str | None:
    """Describe the format of a file or folder that zerofit does not read, or return None."""
    if path.is_dir():
        return next((text for pattern, text in OTHERS.items() if any(path.glob(pattern))), None)
    try:
        with path.open("rb") as file:
            # a tar's header has 512 bytes; a web page may begin with blank lines
            head = file.read(512).lstrip()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            known = next((text for end, text in ARCHIVES.items() if any(name.endswith(end) for name in names)), None)
            torch_file = any(name.endswith("data.pkl") for name in names)
            return known or (None if torch_file else "a zip archive; unpack it first")
    except (OSError, zipfile.BadZipFile):
        return None
    tar = "a tar archive; unpack it first" if head[257:262] == b"ustar" else None
    named = next((text for pattern, text in OTHERS.items() if path.match(pattern)), tar)
    return next((text for magic, text in MAGIC.items() if head.startswith(magic)), named)


def latest_of(path: Path) -> str | None:
    """Return the folder that the file `latest` names; None without this file."""
    for name in ("latest", "latest_universal"):
        if (path / name).is_file():
            return (path / name).read_text(errors="replace").strip()
    return None


def _step(*places: Path) -> int | None:
    """Return the step number in the first of these names that has one; None if none has."""
    matches = (NUMBERED.fullmatch(place.name) for place in places)
    return next((int(match[1]) for match in matches if match), None)
