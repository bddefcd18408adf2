"""Read the profiles of named models that ship with zerofit, for plans without torch.

A file (profiles/*.xz) has the models of one family on one kind of device, in one precision, at one length. The name is
FAMILY-DEVICE-PRECISION.xz at the default length (without --seq-len), else FAMILY-DEVICE-PRECISION-TOKENS.xz. A line has
a model's name, the digest of its config, and its profile as JSON without default values. benchmarks/shipped_profiles.py
writes them.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path

from zerofit.models.presets import NAMED, PRESETS
from zerofit.spec.profile import Profile

FOLDER = Path(__file__).parent / "profiles"


def shipped_profile(model: str, device: str, precision: str, seq_len: int | None = None) -> Profile | None:
    """Return the shipped profile of a model.

    Returns None if there is none for this device, precision and length. `device` is "cpu" or "cuda". `seq_len` None
    stands for the default length.
    """
    if model not in NAMED:
        return None
    default = _read(profile_file(NAMED[model].family, device, precision), model)
    if seq_len is None or (default and default.seq_len == seq_len):
        return default
    return _read(profile_file(NAMED[model].family, device, precision, seq_len), model)


def shipped_settings(model: str) -> list[str]:
    """Return a model's shipped profiles in words, such as "bf16 on a GPU at 4,096 tokens"."""
    settings = []
    for file in sorted(FOLDER.glob(f"{NAMED[model].family}-*.xz")) if model in NAMED else ():
        device, precision, *length = file.stem.removeprefix(f"{NAMED[model].family}-").split("-")
        if device in ("cpu", "cuda") and model in read_lines(file):  # "bert-large-..." is no file of "bert"
            device_name = "a CPU" if device == "cpu" else "a GPU"
            settings.append(f"{precision} on {device_name}" + (f" at {int(length[0]):,} tokens" if length else ""))
    return settings


def profile_file(family: str, device: str, precision: str, seq_len: int | None = None) -> Path:
    """Return the file of a family's profiles."""
    return FOLDER / ("-".join([family, device, precision, *([str(seq_len)] if seq_len else [])]) + ".xz")


def read_lines(file: Path) -> dict[str, tuple[str, str]]:
    """Return the config's digest and the profile's JSON by model name; {} without a file."""
    if not file.is_file():
        return {}
    lines = lzma.decompress(file.read_bytes()).decode().splitlines()
    return {name: (digest, text) for name, digest, text in (line.split("\t") for line in lines)}


def config_digest(model: str) -> str:
    """Return a digest of a model's config. Profiles with another digest are outdated."""
    return hashlib.sha256(json.dumps(PRESETS.get(model, model), sort_keys=True).encode()).hexdigest()[:12]


def _read(file: Path, model: str) -> Profile | None:
    digest, text = read_lines(file).get(model, ("", ""))
    return Profile.from_dict(json.loads(text)) if digest == config_digest(model) else None
