"""The environment of ranks: accelerator, threads a rank, a place of its own for compiled ops."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from zerofit.spec.cache import cache_root


def environment(accelerator: str, cores: int, ranks: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of `ranks` ranks that share the cores of one host; what is set already (in `base`, else here)
    stays."""
    env = dict(os.environ if base is None else base)
    env.setdefault("DS_ACCELERATOR", accelerator)
    env.setdefault("TORCH_EXTENSIONS_DIR", str(ops_folder()))
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env["PYTHONSAFEPATH"] = "1"  # a user's profile.py must not stand in for the standard library's
    if accelerator == "cpu":
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
        env.setdefault("LOCAL_SIZE", str(ranks))
    return env


def ops_folder() -> Path:
    """Where this environment's compiled C++ ops lie; two environments that shared one would rebuild each other's."""
    versions = [importlib.metadata.version(name) for name in ("torch", "deepspeed")]
    key = hashlib.sha256("\n".join([sys.prefix, sys.version, *versions]).encode()).hexdigest()[:12]
    return cache_root() / "ops" / key
