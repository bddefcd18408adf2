"""One process of a row on another host, started over ssh.

`python -m zerofit.app.comparing.on_host` reads a first line of JSON from standard input: the job's folder, the device,
the slots and the environment. The process exits when standard input ends, since the command that started it has then
died.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from zerofit.launch.host import environment, interface_to
from zerofit.spec.local_machine import usable_cores

# prefixes of environment variables to pass on
FORWARDED = ("ZEROFIT_", "HF_", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "TOKENIZERS_", "CUDA_")


def order(folder: Path, accelerator: str, slots: int, variables: Mapping[str, str]) -> bytes:
    """Return the first input line of a process.

    `slots`: ranks on its host. `variables`: the environment of this rank only.
    """
    forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    env = forwarded | dict(variables)
    return json.dumps({"folder": str(folder), "accelerator": accelerator, "slots": slots, "env": env}).encode() + b"\n"


def main() -> NoReturn:
    """Set the environment from the first input line, then measure the row as one of its ranks."""
    instructions = json.loads(sys.stdin.readline())
    folder, forwarded = Path(instructions["folder"]), instructions["env"]
    if not (folder / "job.json").is_file():
        sys.exit(f"{folder} does not exist on this host: --output must be on a file system that all hosts share")
    accelerator, slots = instructions["accelerator"], instructions["slots"]
    os.environ |= environment(accelerator, usable_cores(), slots, os.environ | forwarded)
    interface = interface_to(forwarded["MASTER_ADDR"])
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if interface else ():
        os.environ.setdefault(name, str(interface))
    # ssh closes standard input when the asking command ends. Without this thread the rank would go on alone.
    threading.Thread(target=_end_with_input, daemon=True).start()
    # This import loads torch, and OpenMP reads its variables only once. So the environment must be set before.
    from zerofit.compare.worker import measure

    measure(folder)


def _end_with_input() -> None:
    while sys.stdin.buffer.read(1):
        continue
    os._exit(1)


if __name__ == "__main__":
    main()
