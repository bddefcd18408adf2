"""The Hugging Face hub: not asked for half a minute when this machine cannot reach it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol
from urllib.parse import urlsplit

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class HubClient(Protocol):
    """A module that decides whether its library asks the hub."""

    HF_HUB_OFFLINE: bool


@contextmanager
def hub_if_reachable(*clients: HubClient) -> Iterator[None]:
    """While it lasts, hub clients use only what they have on the disk if the hub has no address on this machine.

    Left alone, they try each file five times and longer each time before they give up. `clients` are the modules
    that hold a flag HF_HUB_OFFLINE, besides huggingface_hub's own.
    """
    from huggingface_hub import constants

    if _reachable(constants.ENDPOINT):
        yield
        return
    modules: tuple[HubClient, ...] = (constants, *clients)
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, flag in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = flag


@lru_cache
def _reachable(endpoint: str) -> bool:
    if any(os.environ.get(name) for name in _PROXIES):
        return True  # the proxy resolves the name
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, 443)
    except OSError:
        return False
    return True
