"""Read the rates of kernels, links and hosts, with their sources: `catalog/rates.yaml`."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from zerofit.spec.device_file import CATALOG
from zerofit.spec.files import packaged_yaml


class SourcedRate(NamedTuple):
    """A number with its source."""

    value: float
    how: str


@cache
def rate_catalog() -> dict[str, Any]:
    """Return the content of `catalog/rates.yaml`."""
    return packaged_yaml((CATALOG / "rates.yaml").read_text(encoding="utf-8"))


def rate_of(name: str) -> SourcedRate:
    """Return the entry `name` of the catalog's section `rates`."""
    entry = rate_catalog()["rates"][name]
    return SourcedRate(entry["value"], entry["source"])


def entry_of(section: str, device: str) -> dict[str, Any]:
    """Return a device's entry in a section of the catalog.

    `device` is the name that torch reports. An unlisted device gets the entry `other`.
    """
    entries = rate_catalog()[section]
    entry = entries.get(device, entries["other"])
    # A text is the name of another GPU, whose measurements count for this one too: H200 -> H100.
    return entries[entry] if isinstance(entry, str) else entry
