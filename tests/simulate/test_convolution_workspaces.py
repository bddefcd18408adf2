"""What cuDNN may take beside a simulation, by the largest convolution."""

from __future__ import annotations

import zerofit as zf


def simulated(**fields: object) -> zf.Simulation:
    run = zf.Run(**{"ds_config": "zero0", "precision": "bf16", "data": "synthetic", **fields})
    return zf.simulate(run, zf.Cluster("h100-80gb", gpus=1))


def test_copies_of_the_largest_convolution_may_lie_beside_it():
    """In ResNet-50 at 64 samples that of the second stage's shortcut: 256 channels of 56 x 56, 512 of 28 x 28."""
    found = simulated(model="resnet50", image_size=224, micro_batch=64)
    (workspaces,) = [one for one in found.overheads if one.name == "cuDNN's workspaces"]
    largest = 2 * (64 * (256 * 56 * 56 + 512 * 28 * 28) + 512 * 256)
    assert (workspaces.low_bytes, workspaces.high_bytes) == (0, 2 * largest)
    measured = 3588 * 2**20  # that torch reserved on an H100 (benchmarks/gpu/README.md)
    assert found.reserved_bytes < measured < found.reserved_bytes + workspaces.high_bytes


def test_a_model_without_convolutions_has_none():
    found = simulated(model="llama-tiny", seq_len=32, micro_batch=1)
    assert [one.name for one in found.overheads] == ["context and kernels"]
