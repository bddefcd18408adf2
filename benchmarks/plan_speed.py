"""How long `zerofit plan` takes: ten thousand layouts on 1,024 GPUs from a stored profile, and from a model's name.

    python benchmarks/plan_speed.py [--model llama-3.1-70b] [--output FILE]

Prints wall and CPU seconds (the latter do not depend on what else runs on the machine), and whether torch was imported.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# a global batch of many divisors, so that ten thousand layouts come together
CLUSTER = ["--gpu", "h100-80gb", "--gpus", "8", "--nodes", "128"]
BATCH = ["--global-batch", str(1024 * 2 * 3 * 5 * 7), "--top", "10"]
LENGTH = ["--seq-len", "4096"]

RUN = """
import sys
from zerofit.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as done:
    code = done.code
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


def timed(arguments: list[str], cache: Path) -> dict[str, object]:
    """Run a plan in a process of its own."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "ZEROFIT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, "plan", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "search_s": round(answer["seconds"], 3),
        "considered": answer["considered"],
        "fitting": answer["fitting"],
        "torch_imported": done.stderr.strip().splitlines()[-1] == "True",
        "profile": answer["profile"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-70b")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name)
        rows = {"from the name": timed([arguments.model, *LENGTH, *CLUSTER, *BATCH], cache)}
        profile = rows["from the name"]["profile"]
        rows["from the kept profile"] = timed([arguments.model, *LENGTH, *CLUSTER, *BATCH], cache)
        rows["from a profile file"] = timed(["--profile", str(profile), *CLUSTER, *BATCH], cache)
    for words, row in rows.items():
        del row["profile"]
        print(f"{arguments.model} {words}: " + ", ".join(f"{k} {v}" for k, v in row.items()))
    if arguments.output:
        result = {"model": arguments.model, "cluster": CLUSTER, "batch": BATCH, "cores": os.cpu_count(), "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
