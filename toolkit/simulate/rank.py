"""One simulated rank, in a process of its own: `python -m zerofit.simulate.rank TARGET.json ANSWER.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from zerofit.simulate.target import Target


def main() -> int:
    """Simulate the target and write what was seen."""
    target = Target.from_dict(json.loads(Path(sys.argv[1]).read_text()))
    answer = simulate(target)
    Path(sys.argv[2]).write_text(json.dumps(answer))
    return 0


def simulate(target: Target) -> dict[str, Any]:
    """Build, init and train on fake tensors. Changes this process for good: it is of no use for anything else after."""
    from zerofit.simulate.world import join, set_environment

    set_environment(target)
    import torch._dynamo  # noqa: F401  zero.Init replaces Tensor.__new__: imported later, dynamo would fail in it
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zerofit.simulate import device
    from zerofit.simulate.meter import Meter
    from zerofit.simulate.patches import apply_all
    from zerofit.simulate.scratch import scratch_of

    gpu = target.accelerator == "cuda"
    meter = Meter(device.NAME if gpu else "cpu", scratch_of(target))
    (device.install_gpu if gpu else device.install_host)(meter, target.device_bytes)
    apply_all(gpu, meter)
    with FakeTensorMode(allow_non_fake_inputs=True), meter:
        join(target)
        return _live(target, meter)


def _live(target: Target, meter: Any) -> dict[str, Any]:
    from zerofit.simulate.batches import batches
    from zerofit.simulate.handover import announce_input
    from zerofit.simulate.phases import PhaseLog, start, train_steps

    log = PhaseLog(meter, meter.begin)
    driver = start(target.job, target.rank, target.inputs, log, on_built=meter.names)
    if target.job.layout.pp > 1:
        announce_input(driver, target.inputs)
    train_steps(driver, batches(target.job, target.inputs), target.steps, log)
    return {
        "phases": [phase.as_dict() for phase in log.done],
        "live": dict(meter.ledger.live),
        "files": dict(meter.files),
    }


if __name__ == "__main__":
    sys.exit(main())
