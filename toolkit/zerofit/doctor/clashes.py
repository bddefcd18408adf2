"""Versions that are known not to go together, each with where it is known from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zerofit.doctor.check import FAIL, OK, WARN, Check, check

# CUDA's major version: the oldest driver that runs it
DRIVERS = {13: 580, 12: 525, 11: 450}
DRIVERS_SOURCE = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
ANY_MINOR = (11, 12)  # CUDA versions within which DeepSpeed builds with another minor version than torch's
STABLE_VISION = 29  # torchvision 0.29 and later take newer releases of torch, too
BUILDER = "deepspeed/ops/op_builder/builder.py: assert_no_cuda_mismatch"
Facts = dict[str, Any]


@dataclass(frozen=True)
class Clash:
    """One combination to stay away from."""

    name: str
    applies: Callable[[Facts], bool]
    what: str
    hint: str
    source: str
    status: str = WARN


def version(text: str | None) -> tuple[int, ...]:
    """Return the numbers of "2.30.7" or "13.0+cu130"; nothing of None."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[+a-z]", text or "")[0])))


def _nccl(facts: Facts) -> tuple[int, ...]:
    return version(facts["versions"]["nccl"]) if facts["gpus"] else ()


def _named(facts: Facts, *words: str) -> bool:
    return any(word in gpu["name"] for gpu in facts["gpus"] for word in words)


def _torchvision(facts: Facts) -> bool:
    """Detect a torchvision 0.N with another torch than the 2.(N-15) it is built for; from 0.29 on, with an older one.

    0.29.1 and 0.29.2 ask for torch 2.14 or newer, where those before name one release (their METADATA).
    """
    torch, vision = version(facts["versions"]["torch"]), version(facts["versions"]["torchvision"])
    if not vision or torch[:1] != (2,):
        return False
    built_for = vision[1] - 15
    return torch[1] < built_for if vision[1] >= STABLE_VISION else torch[1] != built_for


def _other_cuda(facts: Facts) -> bool:
    nvcc, torch = version(facts["compilers"]["nvcc"]), version(facts["versions"]["cuda"])
    if not (facts["gpus"] and nvcc and torch) or nvcc == torch[:2]:
        return False
    return nvcc[0] != torch[0] or nvcc[0] not in ANY_MINOR


def _new_gcc(facts: Facts) -> bool:
    limit, here = facts["compilers"]["newest_g++"], version(facts["compilers"]["g++"])
    return bool(facts["gpus"] and limit and here and here[0] > limit)


CLASHES = (
    Clash(
        "nccl 2.29.2",
        lambda f: _nccl(f) == (2, 29, 2),
        "NCCL 2.29.2 can hang",
        "take NCCL 2.29.3 or newer",
        "https://github.com/pytorch/pytorch/pull/174338",
        FAIL,
    ),
    Clash(
        "nccl 2.28.3",
        lambda f: _nccl(f) == (2, 28, 3) and _named(f, "H100", "H200"),
        "torch took NCCL 2.28.3 back because it broke H100",
        "take NCCL 2.27.5, or 2.28.7 or newer",
        "https://github.com/pytorch/pytorch/pull/164352",
        FAIL,
    ),
    Clash(
        "nccl on ARM",
        lambda f: () < _nccl(f) < (2, 29, 3) and f["cores"]["machine"] == "aarch64",
        "NCCL before 2.29.3 loses slots of its queue on ARM and ends up hanging",
        "take NCCL 2.29.3 or newer",
        "https://github.com/marin-community/marin/pull/8038",
        FAIL,
    ),
    Clash(
        "nccl on RTX PRO Blackwell",
        lambda f: () < _nccl(f) <= (2, 26, 2) and _named(f, "RTX PRO 6000"),
        "NCCL 2.26.2 fails with illegal memory accesses in collectives of 512 KiB and more",
        "take a newer NCCL (2.31.2 was seen to work)",
        "https://github.com/NVIDIA/nccl/issues/2418",
        FAIL,
    ),
    Clash(
        "deepspeed 0.17.6 to 0.18.2",
        lambda f: (0, 17, 6) <= version(f["versions"]["deepspeed"]) <= (0, 18, 2),
        "ZeRO stage 2 computes wrong gradients",
        "take DeepSpeed 0.19.8 or newer",
        "https://github.com/deepspeedai/DeepSpeed/issues/7718",
        FAIL,
    ),
    Clash(
        "torchvision",
        _torchvision,
        "torchvision is built for another torch: its operators (torchvision::nms) are missing",
        "install the pair that https://pytorch.org/get-started names, from one index",
        "https://github.com/pytorch/vision/issues/9174",
    ),
    Clash(
        "nvcc",
        _other_cuda,
        "DeepSpeed refuses to compile CUDA ops with an nvcc of another version than torch's",
        "install the CUDA toolkit of torch's version and point CUDA_HOME at it",
        BUILDER,
    ),
    Clash(
        "g++",
        _new_gcc,
        "nvcc refuses a g++ this new",
        "install an older g++ and name it in CXX and NVCC_PREPEND_FLAGS=-ccbin",
        "crt/host_config.h of the CUDA toolkit there",
    ),
)


def clashes(host: str, facts: Facts) -> Iterator[Check]:
    """Yield the combinations that this host has; one line that all is well where it has none."""
    found = [clash for clash in CLASHES if clash.applies(facts)]
    for clash in found:
        yield Check(
            name="versions-clash",
            host=host,
            status=clash.status,
            value=clash.what,
            expected=f"another combination than {clash.name}",
            hint=clash.hint,
            source=clash.source,
        )
    if not found:
        yield Check(name="versions-clash", host=host, status=OK, value=f"none of {len(CLASHES)} known ones")


def driver(host: str, facts: Facts) -> Iterator[Check]:
    """Check whether the driver runs the CUDA that torch was built with."""
    if not facts["driver"]:
        return
    cuda = version(facts["versions"]["cuda"])
    least = DRIVERS.get(cuda[0]) if cuda else None
    short = least is not None and version(facts["driver"])[0] < least
    expected = f"{least} or newer for CUDA {facts['versions']['cuda']}" if least else ""
    hint, source = "update the driver, or install a torch for an older CUDA", DRIVERS_SOURCE if least else ""
    found = facts["driver"]
    yield check("driver", host, found if short else "", found, expected=expected, hint=hint, source=source)
