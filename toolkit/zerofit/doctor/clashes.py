"""Versions that are known not to work together, each with its source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zerofit.doctor.check import FAIL, OK, WARN, Check, check
from zerofit.doctor.facts import HostFacts

# CUDA's major version -> the oldest driver that supports it
DRIVERS = {13: 580, 12: 525, 11: 450}
DRIVERS_SOURCE = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
ANY_MINOR = (11, 12)  # in these CUDA versions, DeepSpeed builds with another minor version than torch's
STABLE_VISION = 29  # torchvision 0.29 and later also work with newer releases of torch
BUILDER = "deepspeed/ops/op_builder/builder.py: assert_no_cuda_mismatch"


@dataclass(frozen=True)
class Clash:
    """One combination of versions to avoid."""

    name: str
    applies: Callable[[HostFacts], bool]
    what: str
    hint: str
    source: str
    status: str = WARN


def version(text: str | None) -> tuple[int, ...]:
    """Return the numbers of "2.30.7" or "13.0+cu130" as a tuple; () for None."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[+a-z]", text or "")[0])))


def _nccl(facts: HostFacts) -> tuple[int, ...]:
    return version(facts["versions"]["nccl"]) if facts["gpus"] else ()


def _has_gpu(facts: HostFacts, *words: str) -> bool:
    return any(word in gpu["name"] for gpu in facts["gpus"] for word in words)


def _torchvision_differs(facts: HostFacts) -> bool:
    torch, vision = version(facts["versions"]["torch"]), version(facts["versions"]["torchvision"])
    if not vision or torch[:1] != (2,):
        return False
    # torchvision 0.N is built for torch 2.(N-15). From 0.29 on it also works with newer releases of torch: 0.29.1 and
    # 0.29.2 require torch 2.14 or newer (their METADATA).
    built_for = vision[1] - 15
    return torch[1] < built_for if vision[1] >= STABLE_VISION else torch[1] != built_for


def _cuda_differs(facts: HostFacts) -> bool:
    nvcc, torch = version(facts["compilers"]["nvcc"]), version(facts["versions"]["cuda"])
    if not (facts["gpus"] and nvcc and torch) or nvcc == torch[:2]:
        return False
    # Within the same major version, assert_no_cuda_mismatch accepts only the combinations that ANY_MINOR stands for.
    return nvcc[0] != torch[0] or nvcc[0] not in ANY_MINOR


def _gcc_is_too_new(facts: HostFacts) -> bool:
    limit, gcc = facts["compilers"]["newest_g++"], version(facts["compilers"]["g++"])
    return bool(facts["gpus"] and limit and gcc and gcc[0] > limit)


CLASHES = (
    Clash(
        "nccl 2.29.2",
        lambda f: _nccl(f) == (2, 29, 2),
        "NCCL 2.29.2 can hang",
        "use NCCL 2.29.3 or newer",
        "https://github.com/pytorch/pytorch/pull/174338",
        FAIL,
    ),
    Clash(
        "nccl 2.28.3",
        lambda f: _nccl(f) == (2, 28, 3) and _has_gpu(f, "H100", "H200"),
        "NCCL 2.28.3 fails on H100: torch returned to 2.27.5 for this reason",
        "use NCCL 2.27.5, or 2.28.7 or newer",
        "https://github.com/pytorch/pytorch/pull/164352",
        FAIL,
    ),
    Clash(
        "nccl on ARM",
        lambda f: () < _nccl(f) < (2, 29, 3) and f["cores"]["machine"] == "aarch64",
        "NCCL before 2.29.3 loses slots of its queue on ARM and then hangs",
        "use NCCL 2.29.3 or newer",
        "https://github.com/marin-community/marin/pull/8038",
        FAIL,
    ),
    Clash(
        "nccl on RTX PRO Blackwell",
        lambda f: () < _nccl(f) <= (2, 26, 2) and _has_gpu(f, "RTX PRO 6000"),
        "NCCL 2.26.2 fails with illegal memory accesses in collectives of 512 KiB and more",
        "use a newer NCCL (2.31.2 works)",
        "https://github.com/NVIDIA/nccl/issues/2418",
        FAIL,
    ),
    Clash(
        "deepspeed 0.17.6 to 0.18.2",
        lambda f: (0, 17, 6) <= version(f["versions"]["deepspeed"]) <= (0, 18, 2),
        "ZeRO stage 2 computes wrong gradients",
        "use DeepSpeed 0.19.8 or newer",
        "https://github.com/deepspeedai/DeepSpeed/issues/7718",
        FAIL,
    ),
    Clash(
        "torchvision",
        _torchvision_differs,
        "torchvision is built for another version of torch: its operators (torchvision::nms) are missing",
        "install torch and torchvision together from one index: https://pytorch.org/get-started",
        "https://github.com/pytorch/vision/issues/9174",
    ),
    Clash(
        "nvcc",
        _cuda_differs,
        "nvcc and torch have different CUDA versions: DeepSpeed refuses to compile its CUDA ops",
        "install the CUDA toolkit for which torch was built (torch.version.cuda) and set CUDA_HOME to it",
        BUILDER,
    ),
    Clash(
        "g++",
        _gcc_is_too_new,
        "g++ is too new for this nvcc, which refuses it",
        "install an older g++; set CXX=/path/to/g++ and NVCC_PREPEND_FLAGS='-ccbin /path/to/g++'",
        "crt/host_config.h of that host's CUDA toolkit",
    ),
)


def clashes(host: str, facts: HostFacts) -> Iterator[Check]:
    """Yield a check for each known bad combination on this host; one OK check if none."""
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
        yield Check(name="versions-clash", host=host, status=OK, value=f"none of {len(CLASHES)} known clashes")


def driver(host: str, facts: HostFacts) -> Iterator[Check]:
    """Check whether the driver is new enough for the CUDA that torch was built with."""
    if not facts["driver"]:
        return
    cuda = version(facts["versions"]["cuda"])
    least = DRIVERS.get(cuda[0]) if cuda else None
    short = least is not None and version(facts["driver"])[0] < least
    expected = f"{least} or newer for CUDA {facts['versions']['cuda']}" if least else ""
    hint = "update the driver, or install a torch for an older CUDA"
    problem = facts["driver"] if short else ""
    driver = check("driver", host, problem, facts["driver"], expected=expected, hint=hint)
    yield replace(driver, source=DRIVERS_SOURCE if least else "")
