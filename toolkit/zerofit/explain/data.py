"""Read the YAML files of this package: failures, shortages of memory, and phases of a training."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from zerofit.spec.files import packaged_yaml


@cache
def read_data(name: str) -> dict[str, Any]:
    """Return the content of a YAML file of this package."""
    return packaged_yaml((files("zerofit.explain") / name).read_text(encoding="utf-8"))


def any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches where one of these does."""
    return re.compile("|".join(patterns))
