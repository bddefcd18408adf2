"""Read the profiles of named models that ship with zerofit, for plans without torch.

A file (profiles/FAMILY-DEVICE-PRECISION.xz) has the models of one family on one kind of device, in one precision. All
profiles are for the default length (without --seq-len). A line has a model's name, the digest of its config, and its
profile as JSON without default values. benchmarks/shipped_profiles.py writes them.
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
    digest, text = read_lines(profile_file(NAMED[model].family, device, precision)).get(model, ("", ""))
    if digest != config_digest(model):
        return None
    profile = Profile.from_dict(json.loads(text))
    return profile if seq_len in (None, profile.seq_len) else None


def shipped_settings(model: str) -> list[str]:
    """Return a model's shipped profiles in words, such as "bf16 on a GPU"."""
    settings = []
    for file in sorted(FOLDER.glob(f"{NAMED[model].family}-*.xz")) if model in NAMED else ():
        device, precision = file.stem.removeprefix(f"{NAMED[model].family}-").split("-", 1)
        if device in ("cpu", "cuda") and model in read_lines(file):  # "bert-large-..." is no file of "bert"
            settings.append(f"{precision} on {'a CPU' if device == 'cpu' else 'a GPU'}")
    return settings


def profile_file(family: str, device: str, precision: str) -> Path:
    """Return the file of a family's profiles."""
    return FOLDER / f"{family}-{device}-{precision}.xz"


def read_lines(file: Path) -> dict[str, tuple[str, str]]:
    """Return the config's digest and the profile's JSON by model name; {} without a file."""
    if not file.is_file():
        return {}
    lines = lzma.decompress(file.read_bytes()).decode().splitlines()
    return {name: (digest, text) for name, digest, text in (line.split("\t") for line in lines)}


def config_digest(model: str) -> str:
    """Return a digest of a model's config. Profiles with another digest are outdated."""
    return hashlib.sha256(json.dumps(PRESETS.get(model, model), sort_keys=True).encode()).hexdigest()[:12]
