"""`python -m zerofit` is the `zerofit` command, also for launchers (`torchrun -m zerofit`)."""

from __future__ import annotations

from zerofit.cli.__main__ import run

if __name__ == "__main__":
    run()
