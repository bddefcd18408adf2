"""Everything that only a GPU can show, in the order of its worth; see README.md.

python -m benchmarks.gpu.run --out DIR [--minutes 9] [--only NAME ...] [--rehearse]

Each part is a process with a time limit of its own, and writes DIR/NAME.json after each of its cases. A second call
with the same DIR goes on with the cases that are missing, and tries those that failed once more.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from .part import PARTS, is_done

ROOT = Path(__file__).parents[2]
ENDING_S = 10  # for a part to write its last case down, and to start at all


def main() -> int:
    """0, or 1 where a case failed or is still missing."""
    asked = parse()
    asked.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * asked.minutes
    for name in asked.only or PARTS:
        left_s = end - time.monotonic() - ENDING_S
        if is_done(name, asked.out, asked.rehearse):
            print(f"{name}: done", flush=True)
        elif left_s < ENDING_S:
            print(f"{name}: no time is left; the same command goes on with it", flush=True)
        else:
            _run(name, asked.out, min(left_s, PARTS[name]), asked.rehearse)
    return 0 if all(is_done(name, asked.out, asked.rehearse) for name in asked.only or PARTS) else 1


def _run(name: str, out: Path, seconds: float, rehearse: bool) -> None:
    """Run one part; what is left of it at the end of its time, or when this process is stopped, is killed."""
    print(f"{name}: at most {seconds:.0f} s", flush=True)
    argv = [sys.executable, "-m", "benchmarks.gpu.part", name, str(out.resolve()), f"{seconds:.0f}"]
    paths = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "toolkit"), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if rehearse:
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        argv.append("--rehearse")
    with (out / "run.log").open("a") as log:
        process = subprocess.Popen(argv, cwd=ROOT, env=env, stderr=log, start_new_session=True)
        try:
            process.wait(seconds + ENDING_S)
        except subprocess.TimeoutExpired:
            print(f"{name}: its time is over", flush=True)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks and compilers that it has started
            process.wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, one JSON a part")
    parser.add_argument("--minutes", type=float, default=9, help="all of it ends in this time (default 9)")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts, in this order")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
