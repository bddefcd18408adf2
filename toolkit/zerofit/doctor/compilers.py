"""The compilers that DeepSpeed's ops are built with, and whether they go together."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATIENCE_S = 10.0


def compilers(tools: Mapping[str, str | None]) -> dict[str, Any]:
    """Versions of g++ and nvcc, and the newest g++ that this nvcc accepts (from its own crt/host_config.h)."""
    nvcc = tools["nvcc"]
    return {
        "g++": _said(tools["g++"] or tools["c++"], ["-dumpfullversion", "-dumpversion"], r"^(\d+(?:\.\d+)*)"),
        "nvcc": _said(nvcc, ["--version"], r"release (\d+\.\d+)"),
        "newest_g++": _limit(Path(nvcc).resolve().parents[1]) if nvcc else None,
    }


def _said(program: str | None, arguments: list[str], pattern: str) -> str | None:
    if program is None:
        return None
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(pattern, done.stdout, re.MULTILINE)
    return found[1] if found else None


def _limit(home: Path) -> int | None:
    for path in (*home.glob("include/crt/host_config.h"), *home.glob("targets/*/include/crt/host_config.h")):
        found = re.search(r"__GNUC__ > (\d+)", path.read_text(errors="replace"))
        if found:
            return int(found[1])
    return None
