"""Healthy scripts to which `zerofit simulate -- COMMAND` attributes a fault: there should be none; see README.md.

python benchmarks/script_faults.py [--cases WORDS]

The scripts are those of script_accuracy.py. Their Llama is wider: a fault would be large enough to be named. Exit code
1 where a script has a fault or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from meter.script_cases import task, with_cases

from zerofit.app.simulation.scripts import simulate_script
from zerofit.simulate.forecast.result import SimulatedScript
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import UserError

EXPECTED = {"dpo": "second-copy", "grpo-reference": "second-copy"}  # TRL's reference model is whole on each rank
WIDE = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    chosen, wrong = with_cases(parser).cases, 0
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            said = faults(name, Path(folder))
            wrong += bool(said)
            print(f"{name:20} {said or 'no fault'}", flush=True)
    print(f"{len(chosen)} scripts, {wrong} with a fault or an error")
    return 1 if wrong else 0


def faults(name: str, folder: Path) -> str:
    """Return what is said of a case's script: the codes and lines of its faults, its error, or ""."""
    asked = task(name, folder / name.replace(" ", "-"))
    config = folder / "llama" / "config.json"
    if config.exists():  # only the configuration is read
        config.write_text(json.dumps(json.loads(config.read_text()) | WIDE))
    os.chdir(folder / name.replace(" ", "-"))
    try:
        run = simulate_script(asked.command, Cluster("cpu", gpus=asked.ranks), rank=0).run
    except UserError as error:
        return str(error)
    assert isinstance(run, SimulatedScript)
    seen = [fault for fault in run.facts.faults if fault.code != EXPECTED.get(name.split()[0])]
    return ", ".join(f"{fault.code} at {fault.line}: {fault.problem}" for fault in seen)


if __name__ == "__main__":
    sys.exit(main())
