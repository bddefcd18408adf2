"""DataParallel on two simulated GPUs, against sums by hand."""

import torch
from torch import nn

from benchmarks.documents.data_parallel import data_parallel_costs
from zerofit.models.inputs import ImageInputs
from zerofit.models.vision import simplecnn_112


def test_one_linear_layer_by_hand():
    """Six images of 4 pixels, three classes, no bias: 48 bytes of weights, 16 an image, 12 its logits."""
    inputs = ImageInputs(channels=1, size=2, classes=3)
    costs = data_parallel_costs(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False)), inputs, 6)
    weights, half_input, half_logits = 48, 3 * 16, 3 * 12
    # out: weights, half of the inputs, the gradients of half of the logits; in: half of the logits, all gradients
    assert costs.sent == (weights + half_input + half_logits, half_logits + weights)
    assert costs.received == costs.sent[::-1]
    # forward: a copy of the weights, inputs, logits; backward: inputs, the gradients of logits and of weights
    assert costs.peak[1] == weights + half_input + half_logits


def test_statistics_of_batch_norm_travel_at_every_step():
    inputs = ImageInputs(channels=1, size=2, classes=3)

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))

    costs = data_parallel_costs(build, inputs, 6)
    weights, statistics, half_input, half_logits = 48 + 2 * 16, 2 * 16 + 8, 3 * 16, 3 * 12
    assert costs.sent == (weights + statistics + half_input + half_logits, half_logits + weights)


def test_the_first_gpu_has_the_optimizer_and_all_inputs():
    inputs = ImageInputs(channels=3, size=112, classes=10)
    costs = data_parallel_costs(lambda: simplecnn_112(inputs), inputs, 32)
    weights, half_input, half_logits = 4 * 2_008_842, 16 * 3 * 112 * 112 * 4, 16 * 10 * 4
    assert costs.sent == (weights + half_input + half_logits, half_logits + weights)
    more = costs.peak[0] - costs.peak[1]
    assert 0 <= more - (weights + half_input) < 1024  # momentum, and the other half; then labels and a loss
    assert torch.empty(1).device.type == "cpu"  # nothing stays replaced
